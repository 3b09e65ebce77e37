"""A fit on frozen text features: encode each text once, learn, judge.

The mathematics is in ``training``. This file prepares the features, in one process or several, and calls it.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.linalg import eigh
from scipy.optimize import minimize

from pluralign.core.arrays import Array, FloatArray, IndexArray, Mask, Vectors
from pluralign.core.checkpoints import UNFINISHED, Checkpoints
from pluralign.core.processes import ALONE, Processes
from pluralign.core.random_streams import DIRECTION, HIDDEN_LAYER, random_stream
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.members import (
    FeatureMap,
    LinearMembers,
    fit_feature_map,
    spanned_axes,
    without_clipping,
)
from pluralign.ensemble.record import CHANCE, HistoryRow
from pluralign.learning.bradley_terry import fit_bradley_terry, scores
from pluralign.learning.choose import fit_joint, fit_stagewise
from pluralign.learning.measure import TestPairs, bound_cost, judge
from pluralign.learning.options import FitOptions
from pluralign.learning.pairs import Pairs
from pluralign.learning.raters import fit_raters, training_votes
from pluralign.learning.task import FitTask, FitWatcher, Members
from pluralign.learning.teacher import TrainedTeacher
from pluralign.text import surface
from pluralign.text.features import TextFeatures
from pluralign.text.finetuned import FinetunedFeatures
from pluralign.text.store import stored_features
from pluralign.theory import calibration
from pluralign.theory.calibration import sigmoid
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.raters import RaterVotes

# --- Leading directions of wide features. The layers of an encoder are highly correlated, so fits need few directions.


WIDE = 1100
"""Features with more columns are projected. Those of ``hashing`` (1,044) are not: they have no leading directions."""
LEADING = 384
"""Number of directions that wide features are projected on."""
SAMPLE = 8192
"""At most this many pairs determine the directions."""


def leading_axes(
    inputs: FeatureMap, features: Array, a: IndexArray, b: IndexArray, m: int, processes: Processes = ALONE
) -> Array:
    """Return the m directions in which the inputs of compared texts differ most, as orthonormal columns ``(d, m)``.

    They are the leading eigenvectors of Σ_i d_i d_i', d_i = inputs(φ_a) − inputs(φ_b). They do not depend on votes.

    Args:
        inputs: the map that standardises features, without axes.
        features: raw features of all texts, ``(n_texts, d)``; may be memory-mapped.
        a: index of response a among the texts, ``(n_pairs,)``.
        b: index of response b among the texts, ``(n_pairs,)``.
        m: number of directions, at most d.
        processes: the processes that share the texts. Each one reads the pairs whose a is in its part.
    """
    step = max(1, -(-len(a) // SAMPLE))
    a, b = a[::step], b[::step]
    part = processes.part(len(features))
    own = np.flatnonzero((a >= part.start) & (a < part.stop))
    difference = np.zeros((len(a), features.shape[1]), dtype=np.float32)
    difference[own] = inputs(features[a[own]]) - inputs(features[b[own]])
    difference = processes.total(difference)

    def decide() -> Array:
        d = features.shape[1]
        _, vectors = eigh(difference.T @ difference, subset_by_index=[d - m, d - 1])
        return np.ascontiguousarray(vectors[:, ::-1])

    return processes.agreed(decide)


# --- A learned hidden layer, for rewards that are a small network (``--members mlp``).


WIDTH = 32
L2 = 0.03
STEPS = 60


def fit_hidden_layer(pairs: Pairs, *, seed: int = 0, width: int = WIDTH) -> tuple[Array, Array]:
    """Return W ``(d, width)`` and b ``(width,)`` of a network r = u·φ + v·tanh(W'φ + b) fitted to the votes.

    Args:
        pairs: the training pairs.
        seed: of the random start.
        width: number of hidden units.
    """
    inputs = pairs.inputs
    d = inputs.shape[1]
    rng = random_stream(seed, HIDDEN_LAYER)
    linear = fit_bradley_terry(pairs.difference, pairs.prob_a, 0.1)
    trained = inputs[np.union1d(pairs.a, pairs.b)]  # ``inputs`` also holds the texts of test prompts
    layer = rng.standard_normal((d, width)) / (np.sqrt(d) * np.maximum(float(np.std(trained)), 1e-6))
    start = np.concatenate([linear, layer.ravel(), np.zeros(width), rng.standard_normal(width) * 0.1])
    objective = network_loss(pairs, width, L2)
    solution = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": STEPS}).x
    _, layer, bias, _ = unpack(solution, d, width)
    return layer.astype(np.float32), bias.astype(np.float32)


def unpack(unknowns: FloatArray, d: int, width: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return (u, W, b, v) from one vector."""
    u, layer, bias, v = np.split(unknowns, [d, d + d * width, d + d * width + width])
    return u, layer.reshape(d, width), bias, v


def network_loss(pairs: Pairs, width: int, l2: float) -> Callable[[FloatArray], tuple[float, FloatArray]]:
    """Return (u, W, b, v) ↦ (mean cross-entropy of σ(Δr) to p + l2/2 (|u|² + |W|² + |v|²), its gradient)."""
    inputs, n, d = pairs.inputs, len(pairs), pairs.inputs.shape[1]

    def value_and_gradient(unknowns: FloatArray) -> tuple[float, FloatArray]:
        u, layer, bias, v = unpack(unknowns, d, width)
        hidden = np.tanh(scores(inputs, layer) + bias)
        reward = scores(inputs, u) + hidden @ v
        z = reward[pairs.a] - reward[pairs.b]
        slope = (sigmoid(z) - pairs.prob_a) / n
        reward_gradient = np.bincount(pairs.a, slope, len(reward)) - np.bincount(pairs.b, slope, len(reward))
        hidden_gradient = reward_gradient[:, None] * v * (1 - hidden**2)
        layer_gradient = inputs.T @ hidden_gradient.astype(inputs.dtype) + l2 * layer
        gradient = np.concatenate([
            reward_gradient.astype(inputs.dtype) @ inputs + l2 * u, layer_gradient.ravel(), hidden_gradient.sum(axis=0),
            hidden.T @ reward_gradient + l2 * v,
        ])  # fmt: skip
        entropy = np.mean(np.logaddexp(0.0, z) - pairs.prob_a * z)
        return float(entropy + 0.5 * l2 * (u @ u + np.sum(layer**2) + v @ v)), gradient.astype(np.float64)

    return value_and_gradient


INDISTINGUISHABLE = 1e-4
"""Differences of features below it, along a random direction, are rounding errors."""


@dataclass(frozen=True, eq=False)
class TrainedInputs:
    """Inputs of members of which some were trained on votes, with the rewards they were trained for."""

    inputs: FeatureMap
    teacher: TrainedTeacher


def learn(
    preferences: PreferenceSet,
    test_rows: Mask,
    features: Vectors,
    text_features: TextFeatures | FinetunedFeatures,
    options: FitOptions,
    checkpoints: Checkpoints,
    watcher: FitWatcher,
    raters: RaterVotes | None = None,
    validation: Mask | None = None,
    directions: FloatArray | None = None,
    trained: TrainedInputs | None = None,
) -> tuple[RewardEnsemble, HeldOutVotes]:
    """Learn an ensemble from the training pairs and judge it on the others.

    Args:
        preferences: all votes.
        test_rows: which pairs are held out, ``(n_pairs,)``.
        features: features of ``texts_of(preferences)``.
        text_features: how they were made.
        options: how to learn.
        checkpoints: finished steps, and the processes that learn together.
        watcher: receives the progress.
        raters: the same votes with their raters, if these are known.
        validation: training pairs on which everything is chosen, ``(n_pairs,)``. Fine-tuned features need pairs that
            they were not trained on. Default: folds of all training prompts.
        directions: linear functions of the features that members are combinations of, ``(d, m)`` (default: all).
        trained: the inputs of members and their teacher, if some of the features were trained with it.
    """
    processes, items = checkpoints.processes, preferences.items()
    own_texts = _texts_read(preferences, processes)
    if trained is None:
        inputs = feature_map(preferences, ~test_rows, features, text_features, checkpoints, directions)
    else:
        inputs = trained.inputs
    mapped = _map_features(inputs, features, own_texts)
    pairs = Pairs(mapped, items.a, items.b, preferences.prob_a, preferences.prompt_index, processes)
    if options.members == "mlp":
        hidden, bias = fit_hidden_layer(pairs[~test_rows], seed=options.seed)
        inputs = replace(inputs, hidden=hidden, bias=bias)
        pairs = replace(pairs, inputs=_map_features(inputs, features, own_texts))
    train_rows = np.flatnonzero(~test_rows)
    if len(train_rows) == 1:
        train_rows = np.repeat(train_rows, 2)  # one for training and one for validation
    train, test = pairs[train_rows], TestPairs(preferences, test_rows, pairs[test_rows])
    notes = _limits_of(train)
    watcher.floor(calibration.floor(test.pairs.prob_a))

    history: list[HistoryRow] = []

    def record(members: Members) -> None:
        history.append(test.history_row(members, train, options.level))
        watcher.record(history[-1])

    only_fold = None if validation is None else validation[train_rows]
    task = FitTask.start(train, options, checkpoints, watcher, only_fold, trained.teacher if trained else None)
    if raters is not None:
        positions = np.cumsum(~test_rows)[train_rows] - 1
        rater_votes = training_votes(raters, ~test_rows)[positions]
        fitted = fit_raters(task, rater_votes, record)
    else:
        fitted = (fit_stagewise if options.method == "stagewise" else fit_joint)(task, record)
    # Votes do not depend on the scale of rewards. Unit spread makes the temperature comparable and rewards readable.
    members = fitted.members if options.level == "policy" else fitted.members.unit_spread(train)

    ensemble = RewardEnsemble(
        LinearMembers(inputs, members.theta),
        members.weights,
        text_features,
        fitted.temperature,
        members.undecided,
        choice_model=fitted.choice_model,
    )
    ensemble, held_out = judge(ensemble, test, features, options, fitted.baselines, history, processes)
    n_raters = None if raters is None else int(np.count_nonzero(rater_votes.per_rater))
    record_of_fit = replace(
        ensemble.record, target=fitted.target, vote_share=fitted.vote_share, raters=n_raters, notes=notes or None
    )
    if fitted.unbounded is not None and record_of_fit.evaluation is not None:
        cost = bound_cost(
            record_of_fit.evaluation, fitted.unbounded, test.pairs, options.max_disagreement, options.level
        )
        record_of_fit = replace(record_of_fit, bound=cost)
    return replace(ensemble, record=record_of_fit), held_out


def feature_map(
    preferences: PreferenceSet,
    train_rows: Mask,
    features: Vectors,
    text_features: TextFeatures | FinetunedFeatures,
    checkpoints: Checkpoints,
    directions: FloatArray | None = None,
) -> FeatureMap:
    """Return the map from features to the inputs of members, without a hidden layer. It does not depend on votes.

    Args:
        preferences: all votes.
        train_rows: pairs whose texts give means, spreads and leading directions, ``(n_pairs,)``.
        features: features of ``texts_of(preferences)``.
        text_features: how they were made. A fine-tuned backbone has no clipping: its members are a linear head.
        checkpoints: keeps the directions of wide features.
        directions: linear functions of the features that the inputs span, ``(d, m)`` (default: all).
    """
    processes, items = checkpoints.processes, preferences.items()
    a, b = items.a[train_rows], items.b[train_rows]
    in_train = np.zeros(len(features), dtype=bool)
    in_train[a] = in_train[b] = True
    n_surface = len(surface.NAMES) if text_features.surface else 0
    inputs = fit_feature_map(features, n_surface, in_train, processes, n_layers=text_features.n_layers)
    if isinstance(text_features, FinetunedFeatures):
        inputs = without_clipping(inputs)
    if directions is not None:
        return replace(inputs, axes=spanned_axes(inputs, directions))
    if inputs.dimension > WIDE:
        kept = checkpoints.arrays("axes", lambda: {"axes": leading_axes(inputs, features, a, b, LEADING, processes)})
        return replace(inputs, axes=kept["axes"])
    return inputs


@contextmanager
def encoded_texts(
    preferences: PreferenceSet,
    text_features: TextFeatures,
    options: FitOptions,
    folder: str | os.PathLike[str] | None,
    processes: Processes,
    progress: Progress | None,
) -> Iterator[Vectors]:
    """Yield the features of all texts: encoded now, or stored ones mapped from a file that is removed afterwards.

    Each of several processes encodes its part, then all of them hold everything. Of stored features each process maps
    only the texts it reads.
    """
    texts = texts_of(preferences)
    if options.features is None:
        own = processes.part(len(texts))
        part = text_features(texts[own], progress)
        if processes.count == 1:
            yield part
            return
        features = np.zeros((len(texts), part.shape[1]), dtype=np.float32)
        features[own] = part
        yield processes.total(features)
        return
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=UNFINISHED) as scratch:
        own = _texts_read(preferences, processes)
        yield stored_features(options.features, texts, text_features, Path(scratch) / "features", own)


def _limits_of(train: Pairs) -> list[str]:
    """Return why little or nothing can be learned from training pairs."""
    direction = random_stream(0, DIRECTION).standard_normal(train.inputs.shape[1])
    notes = []
    if (train.prob_a == CHANCE).all():
        notes.append("all training votes are split evenly, so there is nothing to learn and the ensemble predicts ½")
    elif np.abs(scores(train.difference, direction)).max() < INDISTINGUISHABLE:
        notes.append("the features of the two responses are equal in every training pair, so the ensemble predicts ½")
    elif len(np.unique(train.a)) == 1:
        notes.append("there is only one training pair, so the ensemble repeats its votes")
    return notes


def _texts_read(preferences: PreferenceSet, processes: Processes) -> slice:
    """Return the range of texts whose features a process reads: its own part, and the texts compared with it."""
    items = preferences.items()
    own = processes.part(len(items.prompt_index))
    other = items.b[(items.a >= own.start) & (items.a < own.stop)]
    return slice(min(own.start, other.min(initial=own.start)), max(own.stop, other.max(initial=0) + 1))


def _map_features(inputs: FeatureMap, features: Vectors, own_texts: slice) -> Array:
    """Return the inputs of texts: in memory, or in a file beside features that are mapped from one."""
    if not isinstance(features, np.memmap):
        return inputs(features)
    file = Path(str(features.filename)).with_name(f"inputs-{inputs.dimension}")
    mapped = np.memmap(file, np.float32, "w+", shape=(len(features), inputs.dimension))
    inputs(features[own_texts], mapped[own_texts])
    return mapped
