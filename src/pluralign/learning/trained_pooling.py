"""A joint fit on a frozen sentence encoder with an attention pooling that is trained on the votes.

The encoder itself stays frozen. The token states of a middle layer are read once. Small networks learn which tokens
count (``train_attention``) and correct the mixture of rewards on the frozen features. Members then learn
from the corrected mixture, with everything that a fit on frozen features has. ``tuned`` compares them with members on
the frozen features.

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
from pluralign.learning.backbone.losses import MixtureLoss, RunningFigures
from pluralign.learning.backbone.recipe import TextPairs, draw_steps
from pluralign.learning.bradley_terry import Teacher, TrainedTeacher, damping_factor, fit_teacher, trained_teacher
from pluralign.learning.frozen import feature_map
from pluralign.learning.options import FitOptions
from pluralign.learning.pairs import validation_folds
from pluralign.learning.tuned import Candidate, Judged, TunedTask, compare
from pluralign.text import surface
from pluralign.text.encoders import TextFeatures
from pluralign.text.loading import copy_model, is_sentence_encoder, read_config
from pluralign.text.options import is_decoder, middle_layer
from pluralign.text.pooling import ATTENTION_FILE, attention_pool
from pluralign.text.states import TokenStates, read_token_states
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.preferences import texts_of

TRAINED_GAIN = 4.0
"""Factor on the trained features. They are few, and as important as several hundred frozen ones; with this factor, one
strength of regularisation suits both."""
EPOCHS = 8
BATCH = 128
"""Pairs per step."""
LEARNING_RATE = 3e-3
NETWORKS = 8
HEADS = 16
RANK = 8
"""Directions of a pooled state that a head passes on."""
WARM_UP = 20
"""Steps until the full learning rate."""
WEIGHT_DECAY = 0.01
MOMENTUM = 0.05
"""Weight of a step in the running mean and variance of the features."""


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
class _Start:
    """The mixture on the frozen features that training starts from."""

    inputs: FeatureMap
    """From frozen features to the inputs of rewards."""
    teacher: Teacher
    """The mixture and the one reward on these inputs, fitted to the training pairs without validation prompts."""
    rewards: FloatArray
    """Rewards of each text: those of the mixture, then the one reward, ``(n_texts, outputs)``."""
    damping: FloatArray
    """Factor that shortens long differences, of each pair, ``(n_pairs,)``."""


def _start(task: TunedTask, base: TextFeatures, frozen: Vectors) -> _Start:
    """Fit the mixture on the frozen features of the training pairs."""
    inputs = feature_map(replace(task.data(base, frozen), checkpoints=task.checkpoints))
    mapped = inputs(frozen)
    pairs = task.pairs(mapped)
    own, seed = pairs[task.learned], task.options.seed
    fit = partial(fit_teacher, own, validation_folds(own.prompt, seed), seed=seed)
    teacher = task.checkpoints.keep("start", Teacher, fit)
    rewards = mapped.astype(np.float64) @ np.column_stack([teacher.voices, teacher.theta])
    damping = damping_factor(teacher.squares(pairs.difference), teacher.damping, teacher.mean_square)
    return _Start(inputs, teacher, rewards, damping)


def _with_pooling(task: TunedTask, start: _Start, base: TextFeatures) -> TextFeatures:
    """Train the attention pooling, and return the features of the encoder with it."""
    encoder = base.load()
    assert isinstance(encoder, ModelEncoder)  # noqa: S101
    layer, checkpoints, preferences = middle_layer(encoder.layers), task.checkpoints, task.preferences

    def train() -> Mapping[str, Array]:
        items, rows = preferences.items(), task.learned
        used, place = np.unique(np.concatenate([items.a[rows], items.b[rows]]), return_inverse=True)
        texts = texts_of(preferences)
        a, b = np.split(place.astype(np.int32), 2)
        prob_a = np.asarray(preferences.prob_a[rows], dtype=np.float64)
        pairs = TextPairs([texts[text] for text in used], a, b, prob_a, preferences.prompt_index[rows])
        mixture = FrozenMixture(start.rewards[used], start.teacher.voice_weights, start.damping[rows])
        root = checkpoints.root
        assert root is not None  # noqa: S101
        root.mkdir(parents=True, exist_ok=True)
        with disk_errors_as_data_error(root), TemporaryDirectory(dir=root, prefix=UNFINISHED) as scratch:
            task.watcher.encoding(len(used))
            states = read_token_states(pairs.items, encoder, layer, Path(scratch) / "states", task.progress)
            task.watcher.training("the attention pooling")
            return train_attention(states, pairs, mixture, task.options.seed, task.progress)

    processes = checkpoints.processes
    weights = checkpoints.keep("attention", dict[str, Array], lambda: dict(processes.agreed(train)))

    def write(folder: Path) -> None:
        if processes.first:
            copy_model(encoder.folder, folder)
            saved = {name: weights[name] for name in weights} | {"layer": np.array(layer)}
            safetensors.numpy.save_file(saved, folder / ATTENTION_FILE)

    folder = checkpoints.folder("encoder", write)
    return replace(base, encoder=str(folder), own=True, hub_id="", revision="", identity="").resolved()


def _trained_inputs(
    task: TunedTask, start: _Start, vectors: Vectors, base: TextFeatures
) -> tuple[FeatureMap, TrainedTeacher]:
    """Return the frozen inputs followed by the trained features, and the rewards of all networks on them.

    Args:
        task: the fit.
        start: the rewards on frozen features.
        vectors: of all texts: frozen features of the encoder, trained features, surface features.
        base: how the frozen features were made.
    """
    items, frozen, teacher = task.preferences.items(), start.inputs, start.teacher
    outputs = start.rewards.shape[1]
    n_trained = vectors.shape[1] - len(frozen.mean)
    first = len(frozen.mean) - (len(surface.NAMES) if base.surface else 0)
    columns = np.arange(first, first + n_trained)
    seen = vectors[np.union1d(items.a[~task.test_rows], items.b[~task.test_rows])][:, columns].astype(np.float64)
    spread = np.maximum(seen.std(axis=0), 1e-6)

    def extended(values: Array, more: Array) -> Array:
        return np.insert(values, [first] * n_trained, more, axis=0).astype(np.float32)

    axes = np.eye(len(frozen.mean)) if frozen.axes is None else frozen.axes
    n_frozen = axes.shape[1]
    block = np.zeros((vectors.shape[1], n_frozen + n_trained), dtype=np.float32)
    block[:, :n_frozen] = extended(axes, np.zeros((n_trained, n_frozen)))
    block[columns, n_frozen + np.arange(n_trained)] = 1
    inputs = replace(
        frozen,
        mean=extended(frozen.mean, seen.mean(axis=0)),
        spread=extended(frozen.spread, spread),
        gain=extended(frozen.gain, np.full(n_trained, TRAINED_GAIN)),
        axes=block,
    )
    # An output of a network is added to its reward of the frozen mixture.
    networks = n_trained // outputs
    theta = np.tile(np.column_stack([teacher.voices, teacher.theta]), networks)
    theta = np.vstack([theta, np.diag(spread / TRAINED_GAIN)]).reshape(-1, networks, outputs)
    voices = theta[:, :, :-1].reshape(len(theta), -1)
    pairs = task.pairs(inputs(vectors))[task.learned]
    weights = np.tile(teacher.voice_weights, networks) / networks
    return inputs, trained_teacher(teacher, pairs, voices, theta[:, :, -1].mean(axis=1), weights)


# --- the networks: heads of their own, and one output for each reward of the mixture on frozen features. An output is
# added to that reward, so training starts near the frozen mixture. Networks differ by their random start and are
# trained side by side; the mean of their predictions has less noise than each of them.


@dataclass(frozen=True, eq=False)
class FrozenMixture:
    """The mixture on frozen features that training starts from."""

    rewards: FloatArray
    """Of each text: the rewards of the mixture, then the one reward, ``(n_texts, outputs)``."""
    weights: FloatArray
    """π, the weights of the mixture, ``(outputs − 1,)``."""
    damping: FloatArray
    """Factor that shortens long differences, of each pair, ``(n_pairs,)``."""


class AttentionNetworks(torch.nn.Module):
    """Several attention poolings with linear outputs on their standardised features.

    Args:
        width: size of a token state.
        outputs: number of outputs per network.
        generator: of the random start.
    """

    def __init__(self, width: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()

        def random(*shape: int, spread: float) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator) * spread)

        self.query = random(NETWORKS, HEADS, width, spread=0.5 / math.sqrt(width))
        self.bias = torch.nn.Parameter(torch.zeros(NETWORKS, HEADS))
        self.value = random(NETWORKS, HEADS, width, RANK, spread=1 / math.sqrt(3 * width))
        self.head = random(NETWORKS, HEADS, RANK, outputs, spread=0.5 / math.sqrt(HEADS * RANK))
        self.standard = torch.nn.BatchNorm1d(NETWORKS * HEADS * RANK, affine=False, momentum=MOMENTUM)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the outputs for texts, ``(n_texts, networks, outputs)``."""
        # A network per head gives the features of each head instead of their sum.
        each = {"query": self.query, "bias": self.bias, "value": self.value}
        weights = {name: part.flatten(0, 1)[:, None] for name, part in each.items()}
        features = self.standard(attention_pool(states, mask, weights)).view(-1, NETWORKS, HEADS, RANK)
        return torch.einsum("nghr,ghro->ngo", features, self.head)

    def weights(self) -> dict[str, Array]:
        """Return the weights for ``attention_pool``, whose features are the outputs up to a constant."""
        assert self.standard.running_var is not None  # noqa: S101
        spread = (self.standard.running_var + self.standard.eps).sqrt().view(NETWORKS, HEADS, RANK)
        value = torch.einsum("ghdr,ghro->ghdo", self.value / spread[:, :, None], self.head)
        parts = {"query": self.query, "bias": self.bias, "value": value}
        return {name: part.detach().float().numpy() for name, part in parts.items()}


def train_attention(
    states: TokenStates, pairs: TextPairs, start: FrozenMixture, seed: int, progress: Progress | None = None
) -> Mapping[str, Array]:
    """Train the networks on pairs and return their weights.

    Loss of a network, with r its outputs plus the rewards of the frozen mixture: ``losses.MixtureLoss``. AdamW; the
    learning rate falls to 0 like a cosine after ``WARM_UP`` steps.

    Args:
        states: of all texts.
        pairs: the training pairs.
        start: the mixture on frozen features.
        seed: of the start and of the order of pairs.
        progress: called with the steps done and their total.

    Raises:
        DataError: the training diverged.
    """
    rng = np.random.default_rng([seed, FINETUNE])
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    networks = AttentionNetworks(states.width, start.rewards.shape[1], generator)
    batch = min(BATCH, len(pairs.prob_a))
    steps = max(1, math.ceil(EPOCHS * len(pairs.prob_a) / batch))

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))

    optimizer = torch.optim.AdamW(networks.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    loss = MixtureLoss(tuple(start.weights.tolist()))
    for step, rows in enumerate(draw_steps(pairs.prompt, steps, batch, rng)):
        texts, place = np.unique(np.concatenate([pairs.a[rows], pairs.b[rows]]), return_inverse=True)
        rewards = networks(*states.padded(texts)) + torch.from_numpy(start.rewards[texts]).float()[:, None]
        difference = rewards[place[: len(rows)]] - rewards[place[len(rows) :]]
        labels = {"prob_a": _of_networks(pairs.prob_a[rows]), "weight": _of_networks(start.damping[rows])}
        optimizer.zero_grad()
        loss(difference.flatten(0, 1), labels, RunningFigures(), step / steps).backward()
        optimizer.step()
        schedule.step()
        if progress:
            progress(step + 1, steps)
    trained = networks.weights()
    if not all(np.isfinite(part).all() for part in trained.values()):
        raise DataError("the training of the attention pooling diverged", remedy="leave out --pooling attention")
    return trained


def _of_networks(values: FloatArray) -> Any:
    """Return the values of pairs, repeated for every network, ``(n × networks,)``."""
    return torch.from_numpy(np.repeat(values, NETWORKS)).float()
