"""A stagewise fit on frozen features: choose space, regularisation and size, fit stage by stage, fit the rivals."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.core.checkpoints import Arrays
from pluralign.fitting.rivals import fit_rivals
from pluralign.fitting.selection import choose_size, choose_temperature, validation_brier
from pluralign.fitting.task import FitTask, Fitted, Members
from pluralign.training.bradley_terry import fit_bradley_terry, principal_directions
from pluralign.training.pairs import Matrix, scale_rows
from pluralign.training.stagewise import orientation, stages

DIRECTIONS = (16, 32, 64, 128)
"""Numbers of leading principal directions to choose from, beside all features."""
L2_GRID = (10.0, 3.0, 1.0, 0.3, 0.1, 0.01)
FULL_L2_GRID = (3.0, 1.0)
"""Regularisation strengths to choose from, in the leading directions and with all features."""
SEARCH_FOLDS = 2
"""Settings are compared on at most this many validation folds."""


@dataclass(frozen=True)
class Setting:
    """How each member is fitted."""

    directions: int | None
    """Number of leading principal directions; None uses all features."""
    l2: float
    """Regularisation strength."""

    @property
    def name(self) -> str:
        """Name in the checkpoint."""
        return f"{self.directions or 'all'}-{self.l2:g}"


def fit_stagewise(task: FitTask, record: Callable[[Members], None]) -> Fitted:
    """Fit a stagewise ensemble (§4).

    Args:
        task: the fit.
        record: called with the ensemble after each stage.
    """
    options = task.options
    setting = choose_setting(task)
    without_validation = StagePairs(task, ~task.folds[0])
    validated = list(without_validation.members(setting, task.largest_size, task.bound, "validation"))
    if options.k == "auto":
        task.watcher.choosing("k")
        size = choose_size(dict(enumerate(validated, 1)), task.check, options.level)
    else:
        size = int(options.k)
    train, members = StagePairs(task, np.ones(len(task.train), dtype=bool)), validated[0]
    for members in train.members(setting, size, task.bound, "stage"):
        record(members)
    baselines = fit_rivals(task)
    task.watcher.choosing("temperature")
    temperature = choose_temperature(validated[size - 1].unit_spread(task.learn), task.check)
    unbounded = None
    if options.max_disagreement < 1:
        *_, unbounded = train.members(setting, size, 1.0, "unbounded")
    return Fitted(members, temperature, baselines, unbounded)


def settings(dimension: int) -> list[Setting]:
    """Return the settings to choose from for features of this dimension, from the smallest space to all features.

    Example:
        >>> sorted({setting.directions or 0 for setting in settings(40)})
        [0, 16, 32]
    """
    reduced = [Setting(m, l2) for m in DIRECTIONS if m < dimension for l2 in L2_GRID]
    return reduced + [Setting(None, l2) for l2 in (FULL_L2_GRID if reduced else L2_GRID)]


def choose_setting(task: FitTask) -> Setting:
    """Choose the space and the regularisation with the lowest Brier score of the largest ensemble in validation."""
    task.watcher.choosing("regularisation")
    candidates = settings(task.train.inputs.shape[1])

    def errors_of(held_out: Mask) -> Arrays:
        """Return the Brier score of each candidate on one fold."""
        learn, check, errors = StagePairs(task, ~held_out), task.train[held_out], []
        for setting in candidates:
            *_, members = learn.members(setting, task.largest_size, task.bound)
            errors.append(validation_brier(members, check, task.options.level))
        return {"errors": np.array(errors)}

    def search(fold: int) -> Callable[[], FloatArray]:
        return lambda: task.checkpoints.arrays(f"search-{fold}", lambda: errors_of(task.folds[fold]))["errors"]

    errors = task.in_parallel([search(fold) for fold in range(min(SEARCH_FOLDS, len(task.folds)))])
    return candidates[int(np.argmin(np.mean(errors, axis=0)))]


@dataclass(frozen=True, eq=False)
class StagePairs:
    """Some of the training pairs of a task, in the order that ``--orient`` asks for."""

    task: FitTask
    rows: Mask
    """Which of the training pairs, ``(n_train,)``."""

    @cached_property
    def sign(self) -> FloatArray:
        """−1 for each pair whose responses are swapped, else 1, ``(n,)``."""
        options = self.task.options
        return orientation(self.task.train.prob_a, options.orient, options.seed)[self.rows]

    @cached_property
    def difference(self) -> Matrix:
        """Features of the first response minus those of the second, ``(n, d)``."""
        difference = self.task.train[self.rows].difference
        return scale_rows(difference, self.sign.astype(difference.dtype))

    @cached_property
    def prob_a(self) -> FloatArray:
        """Share of people preferring the first response, ``(n,)``."""
        prob_a = self.task.train.prob_a[self.rows]
        return np.where(self.sign > 0, prob_a, 1 - prob_a)

    @cached_property
    def leading(self) -> Array:
        """The leading principal directions, ``(d, m)``."""
        return principal_directions(self.difference, max(DIRECTIONS))

    def members(self, setting: Setting, k: int, bound: float, name: str | None = None) -> Iterator[Members]:
        """Yield the ensemble after each of k stages.

        Args:
            setting: space and regularisation of every member.
            k: number of stages.
            bound: the largest disagreement of a member on these pairs.
            name: of the stages in the checkpoint, where finished ones are read from; None keeps none.
        """
        options, keep = self.task.options, self.task.checkpoints.arrays
        axes = None if setting.directions is None else self.leading[:, : setting.directions]
        x = self.difference if axes is None else self.difference @ axes
        fit = partial(
            stages, x, self.prob_a, l2=setting.l2, variant=options.variant, loss=options.loss, bound=bound
        )  # fmt: skip

        def in_features(theta: FloatArray, weights: FloatArray) -> Members:
            return Members(theta if axes is None else np.asarray(axes @ theta, dtype=np.float64), weights)

        if name is None:
            yield from (in_features(stage.theta, stage.weights) for stage in fit(k))
            return
        anchor = keep(f"{name}-{setting.name}-anchor", lambda: {"theta": fit_bradley_terry(x, self.prob_a, setting.l2)})
        earlier: FloatArray | None = None
        for j in range(1, k + 1):

            def compute(j: int = j, earlier: FloatArray | None = earlier) -> Arrays:
                *_, stage = fit(j, first=earlier, anchor=anchor["theta"])
                return {"theta": stage.theta, "weights": stage.weights}

            arrays = keep(f"{name}-{setting.name}-{j}", compute)
            earlier = arrays["theta"]
            yield in_features(earlier, arrays["weights"])
