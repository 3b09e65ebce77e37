"""A joint fit on a frozen sentence encoder with an attention pooling that is trained on the votes.

The encoder itself stays frozen. The token states of a middle layer are read once. Small networks learn which tokens
count (``train_attention``) and correct the mixture of rewards on the frozen features. They learn from pairs
(``PairLessons``), or from whole judgments (``JudgedLessons``). Members are then fitted with everything that a fit on
frozen features has, and from pairs they learn from the corrected mixture. ``tuned`` compares them with members on the
frozen features.

Tuning the upper layers of the encoder instead took several times as long and gained less (docs/log.md).
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch import Tensor

from pluralign.core.arrays import Array, FloatArray, Vectors
from pluralign.core.checkpoints import UNFINISHED
from pluralign.core.errors import DataError, UsageError
from pluralign.core.files import disk_errors_as_data_error
from pluralign.core.random_streams import FINETUNE
from pluralign.core.types import Progress
from pluralign.ensemble.members import FeatureMap
from pluralign.learning.backbone.losses import JudgedLessons, Lessons, MixtureLoss, PairLessons, RunningFigures
from pluralign.learning.backbone.recipe import MicroBatch, TextPairs, distinct_texts, draw_steps
from pluralign.learning.bradley_terry import Teacher, damping_factor, fit_teacher, trained_teacher
from pluralign.learning.frozen import Trained, feature_map
from pluralign.learning.options import FitOptions
from pluralign.learning.pairs import validation_folds
from pluralign.learning.tuned import Candidate, Judged, TunedTask, compare, mixture_of
from pluralign.text import surface
from pluralign.text.encoders import TextFeatures, VectorCache
from pluralign.text.loading import copy_model, is_sentence_encoder, read_config
from pluralign.text.options import is_decoder, middle_layer
from pluralign.text.pooling import ATTENTION_FILE, attention_pool
from pluralign.text.states import TokenStates, read_token_states
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.preferences import texts_of
from pluralign.votes.prompts import text_key

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
        start = _start(task, base, frozen)
    before = time.perf_counter()
    tuned, vectors = _with_pooling(task, start, base, frozen)
    seconds = time.perf_counter() - before
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
    rewards: FloatArray
    """Of all texts, ``(n_texts, outputs)``."""
    lessons: Lessons
    recipe: Recipe
    teacher: Teacher | None = None
    """The mixture and the one reward, fitted to the training pairs without validation prompts. None with judgments."""


def _start(task: TunedTask, base: TextFeatures, frozen: Vectors) -> Start:
    """Fit the mixture on the frozen features to the training pairs, or to the judgments."""
    if task.learned_judgments is not None:
        inputs, voices, rewards = mixture_of(task, "frozen", Candidate(base, frozen))
        return Start(inputs, voices.theta, rewards, JudgedLessons(*task.learned_judgments, voices), ON_JUDGMENTS)
    inputs = feature_map(replace(task.data(base, frozen), checkpoints=task.checkpoints))
    mapped = inputs(frozen)
    own, seed = task.pairs(mapped)[task.learned], task.options.seed
    fit = partial(fit_teacher, own, validation_folds(own.prompt, seed), seed=seed)
    teacher = task.checkpoints.keep("start", Teacher, fit)
    theta = np.column_stack([teacher.voices, teacher.theta])
    damping = damping_factor(teacher.squares(own.difference), teacher.damping, teacher.mean_square)
    prob_a = np.asarray(own.prob_a, np.float64)
    pairs = TextPairs(texts_of(task.preferences), own.a, own.b, prob_a, own.prompt)
    loss = MixtureLoss(tuple(teacher.voice_weights.tolist()))
    lessons = PairLessons(pairs, loss, {"prob_a": prob_a, "weight": damping})
    return Start(inputs, theta, mapped.astype(np.float64) @ theta, lessons, ON_PAIRS, teacher)


def _with_pooling(task: TunedTask, start: Start, base: TextFeatures, frozen: Vectors) -> tuple[TextFeatures, Vectors]:
    """Train the attention pooling; return the features of the encoder with it, and these of all texts.

    The encoder does not read the texts again for them: they are the frozen features with the pooled token states.
    """
    encoder, texts = base.load(), texts_of(task.preferences)
    assert isinstance(encoder, ModelEncoder)  # noqa: S101
    layer, checkpoints, processes = middle_layer(encoder.layers), task.checkpoints, task.checkpoints.processes

    def train() -> dict[str, Array]:
        root = checkpoints.root
        assert root is not None  # noqa: S101
        root.mkdir(parents=True, exist_ok=True)
        with disk_errors_as_data_error(root), TemporaryDirectory(dir=root, prefix=UNFINISHED) as scratch:
            task.watcher.encoding(len(texts))
            states = read_token_states(texts, encoder, layer, Path(scratch) / "states", task.progress)
            task.watcher.training("the attention pooling")
            weights = train_attention(states, start, task.options.seed, task.progress)
            return {**weights, "pooled": states.pooled(weights)}

    found = dict(checkpoints.keep("attention", dict[str, Array], lambda: processes.agreed(train)))
    pooled = found.pop("pooled")

    def write(folder: Path) -> None:
        if processes.first:
            copy_model(encoder.folder, folder)
            safetensors.numpy.save_file(found | {"layer": np.array(layer)}, folder / ATTENTION_FILE)

    folder = checkpoints.folder("encoder", write)
    tuned = replace(base, encoder=str(folder), own=True, hub_id="", revision="", identity="").resolved()
    first = frozen.shape[1] - (len(surface.NAMES) if base.surface else 0)
    vectors = np.hstack([frozen[:, :first], pooled, frozen[:, first:]])
    if processes.first:
        VectorCache(tuned.identity).put([text_key(*text) for text in texts], vectors[:, : first + pooled.shape[1]])
    return tuned, vectors


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
    states: TokenStates, start: Start, seed: int, progress: Progress | None = None
) -> Mapping[str, Array]:
    """Train the networks and return their weights.

    Rewards are the outputs of a network plus those of the frozen mixture. AdamW; the learning rate falls to 0 like a
    cosine after ``WARM_UP`` steps. With rater ids the posterior of persons is computed once per epoch, from the rewards
    that each text last had, in the mean of the networks.

    Args:
        states: of all texts.
        start: what the networks learn from, and the rewards that they correct.
        seed: of the start and of the order of steps.
        progress: called with the steps done and their total.

    Raises:
        DataError: the training diverged.
    """
    rng = np.random.default_rng([seed, FINETUNE])
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    recipe, lessons, rewards = start.recipe, start.lessons, start.rewards.copy()
    n = len(lessons.prompt)
    batch = min(n, recipe.batch)
    if isinstance(lessons, JudgedLessons):
        batch = min(n, math.ceil(recipe.batch * n / len(np.unique(lessons.prompt))))
    steps, per_epoch = max(1, math.ceil(recipe.epochs * n / batch)), math.ceil(n / batch)
    networks = AttentionNetworks(states.width, rewards.shape[1], recipe, generator)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))

    optimizer = torch.optim.AdamW(networks.parameters(), lr=LEARNING_RATE, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    with torch.random.fork_rng(devices=[]):  # dropout has no generator of its own
        torch.manual_seed(generator.initial_seed())
        for step, units in enumerate(draw_steps(lessons.prompt, steps, batch, rng)):
            if isinstance(lessons, JudgedLessons) and step % per_epoch == 0:
                lessons = lessons.given(rewards)
            texts = distinct_texts(lessons, units)
            outputs = networks(*states.padded(texts))
            outputs = outputs + torch.from_numpy(start.rewards[texts]).float()[:, None]
            rewards[texts] = outputs.detach().mean(dim=1).numpy()
            part = MicroBatch(units, texts, 1.0)
            losses = [lessons.loss(one, part, RunningFigures(), step / steps) for one in outputs.unbind(dim=1)]
            optimizer.zero_grad()
            loss: Any = torch.stack(losses).mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            if progress:
                progress(step + 1, steps)
    trained = networks.weights()
    if not all(np.isfinite(part).all() for part in trained.values()):
        raise DataError("the training of the attention pooling diverged", remedy="leave out --pooling attention")
    return trained
