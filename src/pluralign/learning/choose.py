"""A fit on the features of texts: choose on validation prompts, fit every size, fit the baselines.

Fourth file of the joint fit, called by ``frozen``. ``fit_joint`` and ``fit_stagewise`` are the two methods. How members
are trained is in ``joint`` (vote level), ``policy_level`` and ``stagewise``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np

from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.ensemble.record import HistoryRow
from pluralign.learning.bradley_terry import (
    Teacher,
    TrainedTeacher,
    fit_bradley_terry,
    fit_teacher,
    principal_directions,
)
from pluralign.learning.joint import (
    FEW_STARTS,
    NAMED_TARGETS,
    STARTS,
    TARGETS,
    TRAINED_TARGETS,
    Blend,
    train_joint,
)
from pluralign.learning.pairs import Matrix, Members, Pairs, hard_votes, scale_rows, scores
from pluralign.learning.policy_level import PolicyOptions, choose_policy_options, train_policy_level
from pluralign.learning.stagewise import orientation, stages
from pluralign.learning.task import (
    AUTO_SIZES,
    MANY_PAIRS,
    FitTask,
    Fitted,
    choose_size,
    choose_temperature,
    history_sizes,
)
from pluralign.theory.calibration import policy_prob, squared_error, with_undecided
from pluralign.theory.intervals import ENOUGH_CLUSTERS, clearly_lower, paired_difference
from pluralign.theory.posterior import VOICES_SHARE, ChoiceModel
from pluralign.theory.simplex import weights_and_undecided

SEEDS = 5
"""The ensemble is fitted with so many seeds, to show how far its held-out error depends on them. The first is used."""
Target: TypeAlias = Blend | PolicyOptions
"""What joint members learn from, at the vote level or at the policy level (with its regularisation)."""


def fit_joint(task: FitTask) -> Fitted:
    """Fit a joint ensemble, with every smaller size for its history."""
    options, keep, policy = task.options, task.checkpoints.keep, task.options.level == "policy"
    teacher = _teacher(task)
    target = choose_target(task, teacher)
    validated: dict[int, Members] = {}
    if options.k == "auto":
        task.watcher.choosing("k")
        validated = _without_validation(task, teacher, target, reversed(AUTO_SIZES))
        size = choose_size({k: validated[k] for k in AUTO_SIZES}, task.check, options.level)
    else:
        size = int(options.k)
    sizes, history = history_sizes(size), list[HistoryRow]()

    def every_size() -> dict[int, Members]:
        fit = partial(_train, task, task.train, teacher, target=target, bound=task.bound)
        if not policy:
            return keep("joint", dict[int, Members], partial(fit, sizes))
        fits: dict[int, Members] = {}
        for k in sizes:
            fits |= keep(f"joint-{k}", dict[int, Members], partial(fit, [k]))
            history.append(task.measured(fits[k]))
        return fits

    def unbounded() -> Members | None:
        if options.max_disagreement == 1:
            return None
        free = partial(_train, task, task.train, teacher, [size], target, 1.0, FEW_STARTS)
        return keep(f"unbounded-{size}", dict[int, Members], free)[size]

    def with_seed(seed: int) -> Members:
        again = replace(task, options=replace(options, seed=seed))
        own = teacher if teacher.voices_l2 is None else teacher.refit(task.train, seed)  # one reward has no seed
        fit = partial(_train, again, task.train, own, [size], target, task.bound)
        return keep(f"seed-{seed}", dict[int, Members], fit)[size]

    fits: list[Callable[[], Any]] = [every_size, unbounded, task.baselines]
    if task.teacher is None and (policy or size > 1) and len(task.train) < MANY_PAIRS:
        fits += [partial(with_seed, seed) for seed in range(options.seed + 1, options.seed + SEEDS)]
    ensembles, free, baselines, *others = task.in_parallel(fits)
    spread = float(np.std(task.test_errors([ensembles[size], *others]), ddof=1)) if others else None
    if isinstance(target, PolicyOptions):  # members are trained at the scale of temperature 1
        return Fitted(ensembles[size], 1.0, baselines, free, history, seed_spread=spread)
    history = [task.measured(ensembles[k]) for k in sizes]
    task.watcher.choosing("temperature")
    validated = validated or _without_validation(task, teacher, target, [size])
    unit = validated[size].unit_spread(task.learn)
    temperature = choose_temperature(unit, task.check)
    single = teacher.refit(task.learn, options.seed).prob_hat(task.check.difference)
    model = model_from_voices(unit, temperature, single, task.check)
    return Fitted(
        ensembles[size], temperature, baselines, free, history, target.source, target.vote_share, spread, model
    )


def validated_members(task: FitTask) -> Members:
    """Return a joint ensemble of the wanted size, fitted without the validation prompts, to compare features on them.

    Args:
        task: the fit. Its first fold is left out; target and regularisation are chosen on its folds.
    """
    teacher, size = _teacher(task), task.usual_size
    return _without_validation(task, teacher, choose_target(task, teacher), [size])[size]


def choose_target(task: FitTask, teacher: Teacher) -> Target:
    """Choose what joint members learn from.

    At the vote level it is the teacher in few directions, unless the votes alone, in all directions, clearly predict
    validation prompts better: on the first fold, and by a paired test over the prompts of all folds. So the choice
    hardly depends on the seed. On trained features it is the best target on validation prompts. The policy level
    chooses the regularisation too.

    Args:
        task: the fit.
        teacher: the teacher of all training pairs. It is fitted again without each fold.
    """
    options, size = task.options, task.usual_size
    if options.level == "policy":

        def chosen() -> PolicyOptions:
            task.watcher.choosing("target")
            return choose_policy_options(task.train, teacher, size, task.folds, seed=options.seed)

        return task.checkpoints.keep("policy-options", PolicyOptions, chosen)
    if options.target != "auto":
        return NAMED_TARGETS[options.target]
    if size == 1:
        return TARGETS[0]
    task.watcher.choosing("target")

    def errors(blends: Sequence[Blend], folds: Sequence[Mask]) -> FloatArray:
        def ensembles(fold: Mask) -> list[Members]:
            learn = task.train[~fold]
            fits = partial(_train, task, learn, teacher.refit(learn, options.seed), [size], bound=task.bound)
            return [fits(target=blend, starts=FEW_STARTS)[size] for blend in blends]

        return task.errors_on_folds("targets", folds, ensembles)

    if isinstance(teacher, TrainedTeacher):
        return TRAINED_TARGETS[int(np.argmin(np.nanmean(errors(TRAINED_TARGETS, task.folds[:1]), axis=0)))]
    found = errors(TARGETS, task.folds[:1])
    if np.nanmean(found[:, 1] - found[:, 0]) >= 0:
        return TARGETS[0]
    if len(task.folds) > 1:
        others = errors(TARGETS, task.folds[1:])
        found = np.where(np.isnan(found), others, found)
    return TARGETS[int(clearly_lower(found[:, 1] - found[:, 0], task.train.prompt))]


def _train(
    task: FitTask,
    pairs: Pairs,
    teacher: Teacher,
    sizes: Sequence[int],
    target: Target,
    bound: float,
    starts: int = STARTS,
) -> dict[int, Members]:
    """Return an ensemble of each size fitted to ``pairs``. A single member of a vote-level fit is the teacher.

    Args:
        task: the fit, for its options.
        pairs: the training pairs, or those without the validation prompts.
        teacher: the teacher fitted to ``pairs``.
        sizes: numbers of members, the largest last.
        target: what members learn from.
        bound: the largest disagreement of a member on training pairs.
        starts: random starts of the largest ensemble of a vote-level fit.
    """
    seed, undecided = task.options.seed, task.options.undecided
    if isinstance(target, PolicyOptions):
        return {k: train_policy_level(pairs, teacher, k, target, seed=seed, bound=bound) for k in sizes}
    members = {}
    if 1 in sizes:
        theta = teacher.theta[:, None]
        votes = hard_votes(pairs.difference, theta)
        members[1] = Members(theta, *weights_and_undecided(votes, pairs.prob_a, undecided=undecided))
    for k in sizes:
        if k > 1:
            own = starts if k == sizes[-1] else min(starts, FEW_STARTS)
            members[k] = train_joint(pairs, teacher, k, target, seed=seed, bound=bound, starts=own, undecided=undecided)
    return members


def _without_validation(task: FitTask, teacher: Teacher, target: Target, sizes: Iterable[int]) -> dict[int, Members]:
    """Return ensembles of these sizes fitted without the validation prompts."""
    learn_teacher = teacher.refit(task.learn, task.options.seed)

    def fit(k: int) -> dict[int, Members]:
        members = partial(_train, task, task.learn, learn_teacher, [k], target, task.bound, FEW_STARTS)
        return task.checkpoints.keep(f"validation-{k}", dict[int, Members], members)

    fits = task.in_parallel([partial(fit, k) for k in sizes])
    return {k: members for fit in fits for k, members in fit.items()}


def _teacher(task: FitTask) -> Teacher:
    """Return the teacher of the training pairs, with its damping and regularisation chosen on the folds."""
    if task.teacher is not None:
        return task.teacher
    mixture = task.options.level == "policy" or task.options.target == "mixture"
    fit = partial(fit_teacher, task.train, task.folds, seed=task.options.seed, mixture=mixture)
    return task.checkpoints.keep("teacher", Teacher, fit)


# --- A stagewise fit: choose space, regularisation and size, fit stage by stage, fit the baselines.


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


def fit_stagewise(task: FitTask) -> Fitted:
    """Fit a stagewise ensemble (§4)."""
    options = task.options
    setting = choose_setting(task)
    validated = list(StagePairs(task, ~task.folds[0]).members(setting, task.largest_size, task.bound, "validation"))
    if options.k == "auto":
        task.watcher.choosing("k")
        size = choose_size(dict(enumerate(validated, 1)), task.check, options.level)
    else:
        size = int(options.k)
    train, history = StagePairs(task, np.ones(len(task.train), dtype=bool)), []
    for members in train.members(setting, size, task.bound, "stage"):
        history.append(task.measured(members))
    baselines = task.baselines()
    task.watcher.choosing("temperature")
    temperature = choose_temperature(validated[size - 1].unit_spread(task.learn), task.check)
    unbounded = None
    if options.max_disagreement < 1:
        *_, unbounded = train.members(setting, size, 1.0, "unbounded")
    return Fitted(members, temperature, baselines, unbounded, history)


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

    def ensembles(fold: Mask) -> list[Members]:
        pairs = StagePairs(task, ~fold)
        return [list(pairs.members(setting, task.largest_size, task.bound))[-1] for setting in candidates]

    errors = task.errors_on_folds("search", task.folds[:SEARCH_FOLDS], ensembles)
    return candidates[int(np.argmin(np.nanmean(errors, axis=0)))]


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
        axes = None if setting.directions is None else self.leading[:, : setting.directions]
        keep = self.task.checkpoints
        x = self.difference if axes is None else self.difference @ axes
        fit = partial(stages, x, self.prob_a, l2=setting.l2, variant=self.task.options.variant, bound=bound)

        def in_features(members: Members) -> Members:
            return members if axes is None else replace(members, theta=np.asarray(axes @ members.theta, np.float64))

        if name is None:
            yield from map(in_features, fit(k))
            return
        name = f"{name}-{setting.name}"
        anchor = keep.keep(f"{name}-anchor", FloatArray, lambda: fit_bradley_terry(x, self.prob_a, setting.l2))

        def stage(j: int, first: FloatArray | None) -> Members:
            return list(fit(j, first=first, anchor=anchor))[-1]

        earlier: FloatArray | None = None
        for j in range(1, k + 1):
            members = keep.keep(f"{name}-{j}", Members, partial(stage, j, earlier))
            earlier = members.theta
            yield in_features(members)


ROUNDING = 1e-9
"""Differences of squared errors below it are rounding errors."""


def model_from_voices(members: Members, temperature: float, single: FloatArray, check: Pairs) -> ChoiceModel:
    """Return the model of an ensemble learned from vote shares alone.

    Args:
        members: fitted without the validation prompts.
        temperature: β of its policy-level reading.
        single: shares that one reward, fitted without the validation prompts, predicts for them, ``(n,)``.
        check: the validation pairs.
    """
    share = policy_prob(scores(check.difference, members.theta), members.weights, temperature)
    ours = squared_error(with_undecided(share, members.undecided), check.prob_a)
    gain = paired_difference(ours, squared_error(single, check.prob_a), check.prompt, min_clusters=ENOUGH_CLUSTERS)
    if np.isfinite(gain.high) and gain.high < -ROUNDING:
        return ChoiceModel(people=VOICES_SHARE, source="voices")
    return ChoiceModel()
