"""Members on features that stay as they are: of an encoder, or of a model whose fine-tuning is over.

Third file of the joint fit: from features to pairs, and from members to an ensemble with its figures. ``fit_members``
is a fit to counts or to judgments, on frozen features or on features that were themselves trained on the votes
(``Trained``): map features to inputs, take the training pairs, fit, measure on the held-out pairs. ``encoded_texts``
makes frozen features, in one process or several.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import eigh

from pluralign.core.arrays import Array, FloatArray, IndexArray, Mask, Vectors
from pluralign.core.checkpoints import UNFINISHED
from pluralign.core.processes import ALONE, Processes
from pluralign.core.random_streams import DIRECTION, random_stream
from pluralign.core.text import counted
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.members import FeatureMap, LinearMembers, fit_feature_map, spanned_axes, without_clipping
from pluralign.ensemble.record import CHANCE, NEGLIGIBLE_WEIGHT, HistoryRow
from pluralign.learning.bradley_terry import TrainedTeacher
from pluralign.learning.choose import fit_joint, fit_stagewise
from pluralign.learning.measure import bound_cost, measure_fit
from pluralign.learning.options import FitOptions
from pluralign.learning.pairs import Pairs, scores
from pluralign.learning.task import FitTask, Fitted, LearningData
from pluralign.learning.voices import fit_judgments
from pluralign.text import surface
from pluralign.text.encoders import TextFeatures
from pluralign.text.finetuned import FinetunedFeatures
from pluralign.text.reference import log_ratio
from pluralign.text.store import stored_features
from pluralign.theory import calibration
from pluralign.votes.judgments import Judgments
from pluralign.votes.preferences import PreferenceSet, texts_of

DECISIVE_LOG_RATIO = 4.0
"""Log-ratios of a reference policy above it leave little to rewards: σ(4) = .98."""
INDISTINGUISHABLE = 1e-4
"""Differences of features below it, along a random direction, are rounding errors."""


@dataclass(frozen=True, eq=False)
class Trained:
    """The inputs of members, if features were trained on votes."""

    inputs: FeatureMap
    """From features to inputs, such as ``feature_map(data, directions)``."""
    validation: Mask
    """Training pairs that the features were not trained on, ``(n_pairs,)``. All choices are made on them."""
    n_frozen: int | None = None
    """Number of inputs that were not trained; they come first. None: all come from a trained model."""
    teacher: TrainedTeacher | None = None
    """Rewards that were trained together with the features, if members learn from them."""


def fit_members(data: LearningData, trained: Trained | None = None) -> tuple[RewardEnsemble, HeldOutVotes]:
    """Fit an ensemble to the training pairs, or to the judgments on them, and measure it on the other pairs."""
    inputs = trained.inputs if trained else feature_map(data)
    task = task_of(data, inputs, trained)
    if data.options.method == "stagewise":
        return _measured(data, inputs, task, fit_stagewise(task))
    judged = judgments_of(data.preferences, ~data.test_rows, data.options)
    if judged is None:
        return _measured(data, inputs, task, fit_joint(task))
    ensemble, held_out = _measured(data, inputs, task, fit_judgments(task, *judged))
    raters = judged[0].n_persons if data.preferences.knows_raters else None
    return replace(ensemble, record=replace(ensemble.record, raters=raters)), held_out


def judgments_of(votes: PreferenceSet, rows: Mask, options: FitOptions) -> tuple[Judgments, IndexArray] | None:
    """Return the judgments that a joint fit learns from; None if it learns from vote counts.

    Args:
        votes: all votes.
        rows: pairs whose prompts count, ``(n_pairs,)``.
        options: how to learn.

    Returns:
        The judgments on these prompts, and the text of each of their entries.
    """
    judged = votes.judgments if votes.knows_raters else votes.whole_judgments
    wanted = options.judgments and options.target == "auto" and options.reference is None
    if judged is None or not (votes.knows_raters or wanted):
        return None
    kept = np.isin(judged.prompt, votes.prompt_index[rows])
    return (judged[kept], judged.items(votes)[np.repeat(kept, judged.sizes)]) if kept.any() else None


# --- the steps --------------------------------------------------------------------------------------------------------


def feature_map(data: LearningData, directions: FloatArray | None = None) -> FeatureMap:
    """Return the map from features to the inputs of members. It does not depend on votes.

    Means, spreads and leading directions are those of the texts of training pairs. A fine-tuned backbone has no
    clipping: its members are a linear head.

    Args:
        data: the votes with the features of their texts. Its checkpoints keep the directions of wide features.
        directions: linear functions of the features that the inputs span, ``(d, m)`` (default: all).
    """
    processes, items, made_by = data.checkpoints.processes, data.preferences.items(), data.text_features
    a, b = items.a[~data.test_rows], items.b[~data.test_rows]
    in_train = np.zeros(len(data.features), dtype=bool)
    in_train[a] = in_train[b] = True
    n_surface = len(surface.NAMES) if made_by.surface else 0
    inputs = fit_feature_map(data.features, n_surface, in_train, processes, n_layers=made_by.n_layers)
    if isinstance(made_by, FinetunedFeatures):
        inputs = without_clipping(inputs)
    if directions is not None:
        return replace(inputs, axes=spanned_axes(inputs, directions))
    if inputs.dimension > WIDE:
        leading = partial(leading_axes, inputs, data.features, a, b, LEADING, processes)
        return replace(inputs, axes=data.checkpoints.keep("axes", Array, leading))
    return inputs


def task_of(data: LearningData, inputs: FeatureMap, trained: Trained | None = None) -> FitTask:
    """Return the training and held-out pairs with these inputs."""
    votes, items, processes = data.preferences, data.preferences.items(), data.checkpoints.processes
    mapped = _map_features(inputs, data.features, _texts_read(votes, processes))
    ratio = 0.0 if data.options.reference is None else log_ratio(votes)
    pairs = Pairs(mapped, items.a, items.b, votes.prob_a, votes.prompt_index, processes, ratio)
    train, test = _training_rows(data), pairs[data.test_rows]
    data.watcher.floor(calibration.floor(test.prob_a))
    return FitTask(
        pairs[train], data.options, data.checkpoints, data.watcher, test, votes[data.test_rows],
        *((trained.validation[train], trained.teacher, trained.n_frozen) if trained else ()),
    )  # fmt: skip


def _training_rows(data: LearningData) -> npt.NDArray[Any]:
    """Return the rows of the training pairs. A single one counts twice: once for training, once for validation."""
    rows = np.flatnonzero(~data.test_rows)
    return np.repeat(rows, 2) if len(rows) == 1 else rows


def _measured(
    data: LearningData, inputs: FeatureMap, task: FitTask, fitted: Fitted
) -> tuple[RewardEnsemble, HeldOutVotes]:
    """Return the ensemble with its record, and the held-out votes with its rewards."""
    options, test, (fitted, idle) = data.options, task.test, _without_idle(fitted, data.options.method)
    assert test is not None  # noqa: S101
    # Votes do not depend on the scale of rewards. Unit spread makes the temperature comparable and rewards readable.
    members = fitted.members
    together = fitted.target in ("judgments", "raters")  # their members differ in how decisive they are
    members = members if options.level == "policy" else members.unit_spread(task.train, together=together)
    linear, own = LinearMembers(inputs, members.theta), (data.text_features, fitted.temperature, members.undecided)
    ensemble = RewardEnsemble(linear, members.weights, *own, baselines=fitted.models, choice_model=fitted.choice_model)
    ensemble, held_out = measure_fit(ensemble, data, fitted.baselines, fitted.history)
    record, notes = ensemble.record, [*_limits_of(task.train), *idle]
    record = replace(record, target=fitted.target, vote_share=fitted.vote_share, seed_spread=fitted.seed_spread)
    record = replace(record, notes=notes or None)
    if fitted.unbounded is not None and record.evaluation is not None:
        cost = bound_cost(record.evaluation, fitted.unbounded, test, options.max_disagreement, options.level)
        record = replace(record, bound=cost)
    return replace(ensemble, record=record), held_out


def _without_idle(fitted: Fitted, method: str) -> tuple[Fitted, list[str]]:
    """Return a fit without the members that have no weight, which predict nothing, and a note about them.

    The history counts members with weight, one row per number. The weights of stages are those of the members that are
    left.
    """
    weights = fitted.members.weights
    used = np.flatnonzero(weights > NEGLIGIBLE_WEIGHT)
    if len(used) == len(weights):
        return fitted, []
    alpha, rows = weights[used] / weights[used].sum(), dict[int, HistoryRow]()
    for row in fitted.history:
        of_row = np.asarray(row.weights)
        left = of_row[used[used < len(of_row)]] if method == "stagewise" else of_row[of_row > NEGLIGIBLE_WEIGHT]
        k = int((of_row > NEGLIGIBLE_WEIGHT).sum())
        rows[k] = replace(row, k=k, weights=left.tolist())
    last = replace(rows.pop(len(used)), weights=alpha.tolist())
    history = [*(rows[k] for k in sorted(rows) if k < len(used)), last]
    members = replace(fitted.members, theta=fitted.members.theta[:, used], weights=alpha)
    note = f"{len(weights) - len(used)} of {counted(len(weights), 'member')} got no weight, so {len(used)} are left"
    return replace(fitted, members=members, history=history), [note]


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
    if (typical := float(np.median(np.abs(train.log_ratio)))) > DECISIVE_LOG_RATIO:
        notes.append(
            f"half of the reference policy's log-ratios exceed {typical:.0f} nats: it alone decides these pairs"
        )
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


# --- frozen features --------------------------------------------------------------------------------------------------


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


# --- leading directions of wide features: the layers of an encoder are highly correlated, so fits need few ------------


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
