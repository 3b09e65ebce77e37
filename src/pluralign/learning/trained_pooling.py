"""A joint fit on a frozen sentence encoder with an attention pooling that is trained on the votes.

The encoder itself stays frozen. The token states of a middle layer are read once. Small networks learn which tokens
count (``train_attention``) and correct the mixture of rewards on the frozen features. They learn from pairs
(``Lessons``), or from whole judgments (``JudgedLessons``). Members are then fitted with everything that a fit on frozen
features has, and from pairs they learn from the corrected mixture. ``tuned`` compares them with members on the frozen
features.

Tuning the upper layers of the encoder instead took several times as long and gained less (docs/log.md).
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import safetensors.numpy
import torch
from torch import Tensor

from pluralign.core.arrays import Array, FloatArray, IndexArray, IntArray, Vectors
from pluralign.core.checkpoints import UNFINISHED
from pluralign.core.errors import DataError, UsageError
from pluralign.core.files import disk_errors_as_data_error
from pluralign.core.random_streams import FINETUNE
from pluralign.core.types import Progress
from pluralign.ensemble.members import FeatureMap
from pluralign.learning.backbone.losses import MixtureLoss, RunningFigures, ranking_loss, rewards_as_voices
from pluralign.learning.backbone.recipe import TextPairs, draw_steps
from pluralign.learning.bradley_terry import Teacher, damping_factor, fit_teacher, trained_teacher
from pluralign.learning.frozen import Trained, feature_map
from pluralign.learning.options import FitOptions
from pluralign.learning.pairs import validation_folds
from pluralign.learning.tuned import Candidate, Judged, TunedTask, compare, validated_voices
from pluralign.learning.voices import RankedTexts, Voices
from pluralign.text import surface
from pluralign.text.encoders import TextFeatures
from pluralign.text.loading import copy_model, is_sentence_encoder, read_config
from pluralign.text.options import is_decoder, middle_layer
from pluralign.text.pooling import ATTENTION_FILE, attention_pool
from pluralign.text.states import TokenStates, read_token_states
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.judgments import Judgments
from pluralign.votes.preferences import texts_of

TRAINED_GAIN = 4.0
"""Factor on the trained features. They are few, and as important as several hundred frozen ones; with this factor, one
strength of regularisation suits both."""
LEARNING_RATE = 3e-3
WARM_UP = 20
"""Steps until the full learning rate."""
MOMENTUM = 0.05
"""Weight of a step in the running mean and variance of the features."""


@dataclass(frozen=True)
class Recipe:
    """How networks are built and trained."""

    epochs: float
    batch: int
    """Pairs per step, or prompts per step."""
    networks: int
    heads: int
    rank: int
    """Directions of a pooled state that a head passes on."""
    dropout: float
    """Share of the features that are dropped in a step."""
    weight_decay: float


ON_PAIRS = Recipe(epochs=8, batch=128, networks=8, heads=16, rank=8, dropout=0.0, weight_decay=0.01)
ON_JUDGMENTS = Recipe(epochs=12, batch=16, networks=1, heads=8, rank=16, dropout=0.3, weight_decay=0.3)
"""Judgments are few, and their likelihood is easily overfitted."""


def frozen_encoder(options: FitOptions) -> TextFeatures:
    """Return the features of the encoder whose pooling is trained, with chosen layers and precision.

    Raises:
        UsageError: it is no sentence encoder whose layers can be pooled.
    """
    features = TextFeatures(options.encoder, options.layers, surface=options.surface, precision=options.precision)
    features = features.resolved()
    encoder = features.load()
    config = read_config(encoder.folder) if isinstance(encoder, ModelEncoder) else {}
    decodes = is_decoder(config) or config.get("is_encoder_decoder")
    if not isinstance(encoder, ModelEncoder) or not is_sentence_encoder(encoder.folder) or decodes:
        raise UsageError(f"--pooling attention needs a sentence encoder such as minilm, not {options.encoder}.")
    if not encoder.layers:
        raise UsageError("--pooling attention reads token states of layers: name --layers by number, or auto.")
    return features


def fit_pooling(task: TunedTask, base: TextFeatures) -> Judged:
    """Train an attention pooling for an encoder on the votes, and fit a joint ensemble with its features.

    Args:
        task: the fit.
        base: the frozen features of the encoder.
    """
    task.watcher.encoding(len(task.preferences.items().prompt_index))
    frozen = task.vectors(base)
    with task.one_thread():
        start = _start(task, base, frozen) if task.judged is None else _judged_start(task, base, frozen)
    before = time.perf_counter()
    tuned = _with_pooling(task, start, base)
    seconds = time.perf_counter() - before
    vectors = task.vectors(tuned)
    with task.one_thread():
        trained = task.checkpoints.processes.agreed(partial(_trained_inputs, task, start, vectors, base))
    candidates = {"tuned": Candidate(tuned, vectors, trained=trained)}
    if task.tuning.compare_frozen:
        candidates["frozen"] = Candidate(base, frozen)
    ensemble, held_out = compare(task, candidates)
    settings = {"compare_frozen": task.tuning.compare_frozen, "validation_pairs": int(task.validation.sum())}
    return replace(ensemble, record=replace(ensemble.record, tuning=settings, seconds_members=[seconds])), held_out


@dataclass(frozen=True, eq=False)
class Start:
    """The mixture on the frozen features that training starts from, and what the networks learn from."""

    inputs: FeatureMap
    """From frozen features to the inputs of rewards."""
    theta: FloatArray
    """The rewards of the mixture on these inputs, and with pairs the one reward, ``(d, outputs)``."""
    lessons: "Lessons | JudgedLessons"
    teacher: Teacher | None = None
    """The mixture and the one reward, fitted to the training pairs without validation prompts. None with judgments."""


def _start(task: TunedTask, base: TextFeatures, frozen: Vectors) -> Start:
    """Fit the mixture on the frozen features to the training pairs."""
    inputs = feature_map(replace(task.data(base, frozen), checkpoints=task.checkpoints))
    mapped = inputs(frozen)
    pairs, rows = task.pairs(mapped), task.learned
    own, seed = pairs[rows], task.options.seed
    fit = partial(fit_teacher, own, validation_folds(own.prompt, seed), seed=seed)
    teacher = task.checkpoints.keep("start", Teacher, fit)
    theta = np.column_stack([teacher.voices, teacher.theta])
    damping = damping_factor(teacher.squares(own.difference), teacher.damping, teacher.mean_square)
    of_texts = TextPairs(texts_of(task.preferences), own.a, own.b, np.asarray(own.prob_a, np.float64), own.prompt)
    rewards = mapped.astype(np.float64) @ theta
    return Start(
        inputs, theta, Lessons(rewards, ON_PAIRS, of_texts, damping, tuple(teacher.voice_weights.tolist())), teacher
    )


def _judged_start(task: TunedTask, base: TextFeatures, frozen: Vectors) -> Start:
    """Fit the mixture on the frozen features to the judgments."""
    assert task.judged is not None  # noqa: S101
    fit, (judged, items) = task.without_validation("frozen", Candidate(base, frozen)), task.judged
    inputs = feature_map(task.data(base, frozen, "frozen, without validation prompts"))
    voices, _ = validated_voices(fit, judged, items)
    learned = np.isin(judged.prompt, task.preferences.prompt_index[task.learned])
    items = items[np.repeat(learned, judged.sizes)]
    rewards = fit.train.inputs.astype(np.float64) @ voices.theta
    return Start(inputs, voices.theta, JudgedLessons(rewards, ON_JUDGMENTS, judged[learned], items, voices))


def _with_pooling(task: TunedTask, start: Start, base: TextFeatures) -> TextFeatures:
    """Train the attention pooling, and return the features of the encoder with it."""
    encoder = base.load()
    assert isinstance(encoder, ModelEncoder)  # noqa: S101
    layer, checkpoints, preferences = middle_layer(encoder.layers), task.checkpoints, task.preferences

    def train() -> Mapping[str, Array]:
        used, texts, root = start.lessons.texts, texts_of(preferences), checkpoints.root
        assert root is not None  # noqa: S101
        root.mkdir(parents=True, exist_ok=True)
        with disk_errors_as_data_error(root), TemporaryDirectory(dir=root, prefix=UNFINISHED) as scratch:
            task.watcher.encoding(len(used))
            items = [texts[text] for text in used]
            states = read_token_states(items, encoder, layer, Path(scratch) / "states", task.progress)
            task.watcher.training("the attention pooling")
            return train_attention(states, start.lessons, task.options.seed, task.progress)

    processes = checkpoints.processes
    weights = checkpoints.keep("attention", dict[str, Array], lambda: dict(processes.agreed(train)))

    def write(folder: Path) -> None:
        if processes.first:
            copy_model(encoder.folder, folder)
            saved = {name: weights[name] for name in weights} | {"layer": np.array(layer)}
            safetensors.numpy.save_file(saved, folder / ATTENTION_FILE)

    folder = checkpoints.folder("encoder", write)
    return replace(base, encoder=str(folder), own=True, hub_id="", revision="", identity="").resolved()


def _trained_inputs(task: TunedTask, start: Start, vectors: Vectors, base: TextFeatures) -> Trained:
    """Return the frozen inputs followed by the trained features, and the rewards of all networks on them.

    An output of a network is added to its reward of the frozen mixture. With judgments, the mean of the networks is an
    input for each member. With pairs, all outputs are inputs, and the rewards of all networks are the teacher.

    Args:
        task: the fit.
        start: the rewards on frozen features.
        vectors: of all texts: frozen features of the encoder, trained features, surface features.
        base: how the frozen features were made.
    """
    items, frozen, teacher, outputs = task.preferences.items(), start.inputs, start.teacher, start.theta.shape[1]
    n_trained = vectors.shape[1] - len(frozen.mean)
    first = len(frozen.mean) - (len(surface.NAMES) if base.surface else 0)
    columns, networks = np.arange(first, first + n_trained), n_trained // outputs
    seen = vectors[np.union1d(items.a[~task.test_rows], items.b[~task.test_rows])][:, columns].astype(np.float64)
    kept = np.eye(n_trained) if teacher is not None else np.tile(np.eye(outputs), (networks, 1)) / networks
    spread = np.maximum((seen @ kept).std(axis=0), 1e-6)
    spread = spread if teacher is not None else np.tile(spread, networks)

    def extended(values: Array, more: Array) -> Array:
        return np.insert(values, [first] * n_trained, more, axis=0).astype(np.float32)

    axes = np.eye(len(frozen.mean)) if frozen.axes is None else frozen.axes
    n_frozen = axes.shape[1]
    block = np.zeros((vectors.shape[1], n_frozen + kept.shape[1]), dtype=np.float32)
    block[:, :n_frozen] = extended(axes, np.zeros((n_trained, n_frozen)))
    block[columns, n_frozen:] = kept
    inputs = replace(
        frozen,
        mean=extended(frozen.mean, seen.mean(axis=0)),
        spread=extended(frozen.spread, spread),
        gain=extended(frozen.gain, np.full(n_trained, TRAINED_GAIN)),
        axes=block,
    )
    if teacher is None:
        return Trained(inputs, task.validation, n_frozen)
    theta = np.vstack([np.tile(start.theta, networks), np.diag(spread / TRAINED_GAIN)])
    theta = theta.reshape(-1, networks, outputs)
    voices = theta[:, :, :-1].reshape(len(theta), -1)
    pairs = task.pairs(inputs(vectors))[task.learned]
    weights = np.tile(teacher.voice_weights, networks) / networks
    own = trained_teacher(teacher, pairs, voices, theta[:, :, -1].mean(axis=1), weights)
    return Trained(inputs, task.validation, n_frozen, own)


# --- the networks: heads of their own, and one output for each reward of the mixture on frozen features. An output is
# added to that reward, so training starts near the frozen mixture. Networks differ by their random start and are
# trained side by side; the mean of their predictions has less noise than each of them.


Batch: TypeAlias = tuple[IntArray, Callable[[Any, float], Any]]
"""The texts of a step, and its loss from the networks' rewards of these texts, ``(n, networks, outputs)``, and the
share of the training that is done."""


@dataclass(frozen=True, eq=False)
class Lessons:
    """Pairs that networks learn from: ``losses.MixtureLoss``."""

    rewards: FloatArray
    """Of all texts on frozen features: those of the mixture, then the one reward, ``(n_texts, outputs)``."""
    recipe: Recipe
    pairs: TextPairs
    damping: FloatArray
    """Factor that shortens long differences, of each pair, ``(n_pairs,)``."""
    weights: tuple[float, ...]
    """π, the weights of the mixture, ``(outputs − 1,)``."""

    @cached_property
    def texts(self) -> IntArray:
        """The texts that are read, in ascending order."""
        return np.union1d(self.pairs.a, self.pairs.b)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return max(1, math.ceil(self.recipe.epochs * len(self.pairs.prob_a) / self._batch))

    @property
    def _batch(self) -> int:
        return min(self.recipe.batch, len(self.pairs.prob_a))

    def batches(self, rng: np.random.Generator) -> Iterator[Batch]:
        """Yield every step."""
        pairs, loss, networks = self.pairs, MixtureLoss(self.weights), self.recipe.networks

        def of_networks(values: FloatArray) -> Any:
            return torch.from_numpy(np.repeat(values, networks)).float()

        for rows in draw_steps(pairs.prompt, self.steps, self._batch, rng):
            texts, place = np.unique(np.concatenate([pairs.a[rows], pairs.b[rows]]), return_inverse=True)
            labels = {"prob_a": of_networks(pairs.prob_a[rows]), "weight": of_networks(self.damping[rows])}
            a, b = np.split(place, 2)

            def loss_of(rewards: Any, done: float, a: Any = a, b: Any = b, labels: Any = labels) -> Any:
                return loss((rewards[a] - rewards[b]).flatten(0, 1), labels, RunningFigures(), done)

            yield texts, loss_of


@dataclass(frozen=True, eq=False)
class JudgedLessons:
    """Whole judgments that networks learn from: ``losses.ranking_loss``, with all rankings of a prompt in one step.

    With rater ids a person has rankings in many steps. The posterior of persons is computed once per epoch, from the
    rewards that each text last had: then the gradient of a step is its part of the gradient of the whole likelihood.
    """

    rewards: FloatArray
    """Of the mixture for all texts on frozen features, ``(n_texts, k)``."""
    recipe: Recipe
    judgments: Judgments
    items: IndexArray
    """Text of each of their entries, ``(n_entries,)``."""
    voices: Voices
    """The mixture."""

    @cached_property
    def texts(self) -> IntArray:
        """The texts that are read, in ascending order."""
        return np.unique(self.items).astype(np.int64)

    @cached_property
    def prompts(self) -> IntArray:
        """The prompts with judgments."""
        return np.unique(self.judgments.prompt)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return math.ceil(self.recipe.epochs * math.ceil(len(self.prompts) / self.recipe.batch))

    def batches(self, rng: np.random.Generator) -> Iterator[Batch]:
        """Yield every step."""
        judged, networks = self.judgments, range(self.recipe.networks)
        current = np.repeat(self.rewards[:, None], len(networks), axis=1)
        per_epoch = math.ceil(len(self.prompts) / self.recipe.batch)
        for step in range(self.steps):
            if step % per_epoch == 0:
                parts = np.array_split(rng.permutation(self.prompts), per_epoch)
                posteriors = [self._posterior(current[self.texts, one]) if judged.linked else None for one in networks]
            rows = np.isin(judged.prompt, parts[step % per_epoch])
            of_rows = self.items[np.repeat(rows, judged.sizes)]
            ranked, texts = RankedTexts.of(judged[rows], of_rows, self.rewards), np.unique(of_rows).astype(np.int64)
            person = np.zeros(len(ranked.group), dtype=np.int64)
            person[ranked.person] = judged.person[rows]
            own = [None if all_persons is None else all_persons[..., person] for all_persons in posteriors]

            def loss_of(rewards: Any, _: float, ranked: Any = ranked, texts: Any = texts, own: Any = own) -> Any:
                current[texts] = rewards.detach().numpy()
                parts = [ranking_loss(rewards[:, one], ranked, self.voices, own[one]) for one in networks]
                return torch.stack(parts).sum()

            yield texts, loss_of

    def _posterior(self, rewards: FloatArray) -> FloatArray:
        """Return the posterior of each person over members and decisiveness, ``(k, 1, n_T, n_persons)``."""
        ranked = replace(RankedTexts.of(self.judgments, self.items, self.rewards), inputs=rewards)
        return rewards_as_voices(self.voices).given(ranked).posterior


class AttentionNetworks(torch.nn.Module):
    """Several attention poolings with linear outputs on their standardised features.

    Args:
        width: size of a token state.
        outputs: number of outputs per network.
        recipe: their shape.
        generator: of the random start.
    """

    def __init__(self, width: int, outputs: int, recipe: Recipe, generator: torch.Generator) -> None:
        super().__init__()
        self.shape, self.dropout = (recipe.networks, recipe.heads, recipe.rank), torch.nn.Dropout(recipe.dropout)
        networks, heads, rank = self.shape

        def random(*shape: int, spread: float) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator) * spread)

        self.query = random(networks, heads, width, spread=0.5 / math.sqrt(width))
        self.bias = torch.nn.Parameter(torch.zeros(networks, heads))
        self.value = random(networks, heads, width, rank, spread=1 / math.sqrt(3 * width))
        self.head = random(networks, heads, rank, outputs, spread=0.5 / math.sqrt(heads * rank))
        self.standard = torch.nn.BatchNorm1d(networks * heads * rank, affine=False, momentum=MOMENTUM)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the outputs for texts, ``(n_texts, networks, outputs)``."""
        # A network per head gives the features of each head instead of their sum.
        each = {"query": self.query, "bias": self.bias, "value": self.value}
        weights = {name: part.flatten(0, 1)[:, None] for name, part in each.items()}
        features = self.dropout(self.standard(attention_pool(states, mask, weights))).view(-1, *self.shape)
        return torch.einsum("nghr,ghro->ngo", features, self.head)

    def weights(self) -> dict[str, Array]:
        """Return the weights for ``attention_pool``, whose features are the outputs up to a constant."""
        assert self.standard.running_var is not None  # noqa: S101
        spread = (self.standard.running_var + self.standard.eps).sqrt().view(self.shape)
        value = torch.einsum("ghdr,ghro->ghdo", self.value / spread[:, :, None], self.head)
        parts = {"query": self.query, "bias": self.bias, "value": value}
        return {name: part.detach().float().numpy() for name, part in parts.items()}


def train_attention(
    states: TokenStates, lessons: Lessons | JudgedLessons, seed: int, progress: Progress | None = None
) -> Mapping[str, Array]:
    """Train the networks and return their weights.

    Rewards are the outputs of a network plus those of the frozen mixture. AdamW; the learning rate falls to 0 like a
    cosine after ``WARM_UP`` steps.

    Args:
        states: of the texts of the lessons.
        lessons: what the networks learn from.
        seed: of the start and of the order of steps.
        progress: called with the steps done and their total.

    Raises:
        DataError: the training diverged.
    """
    rng = np.random.default_rng([seed, FINETUNE])
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    steps, recipe = lessons.steps, lessons.recipe
    networks = AttentionNetworks(states.width, lessons.rewards.shape[1], recipe, generator)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))

    optimizer = torch.optim.AdamW(networks.parameters(), lr=LEARNING_RATE, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    with torch.random.fork_rng(devices=[]):  # dropout has no generator of its own
        torch.manual_seed(generator.initial_seed())
        for step, (texts, loss) in enumerate(lessons.batches(rng)):
            outputs = networks(*states.padded(np.searchsorted(lessons.texts, texts)))
            optimizer.zero_grad()
            loss(outputs + torch.from_numpy(lessons.rewards[texts]).float()[:, None], step / steps).backward()
            optimizer.step()
            schedule.step()
            if progress:
                progress(step + 1, steps)
    trained = networks.weights()
    if not all(np.isfinite(part).all() for part in trained.values()):
        raise DataError("the training of the attention pooling diverged", remedy="leave out --pooling attention")
    return trained
