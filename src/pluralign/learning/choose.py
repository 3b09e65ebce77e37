"""A joint fit on frozen features: choose the target and the size, fit every size, fit the rivals."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.core.checkpoints import Arrays
from pluralign.learning.bradley_terry import fit_bradley_terry, principal_directions
from pluralign.learning.joint import (
    BLENDS,
    FEW_RESTARTS,
    FROM_MIXTURE,
    FROM_TEACHER,
    FROM_VOTES,
    RESTARTS,
    Blend,
    fit_joint_ensembles,
)
from pluralign.learning.pairs import Matrix, Pairs, scale_rows
from pluralign.learning.policy_level import POLICY_BLENDS, PolicyChoice, choose_policy_options, fit_policy_level
from pluralign.learning.raters import model_from_voices
from pluralign.learning.stagewise import hard_votes, orientation, stages
from pluralign.learning.task import (
    AUTO_SIZES,
    FitTask,
    Fitted,
    Members,
    choose_size,
    choose_temperature,
    fit_rivals,
    validation_brier,
)
from pluralign.learning.teacher import Teacher, fit_teacher, kept_teacher
from pluralign.theory.posterior import ChoiceModel
from pluralign.theory.simplex import weights_and_undecided

NAMED_BLENDS = {"teacher": FROM_TEACHER, "mixture": FROM_MIXTURE, "votes": FROM_VOTES}
AUTO_TARGET_SIZE = 8
"""The size at which ``--k auto`` chooses the target."""


def fit_joint(task: FitTask, record: Callable[[Members], None]) -> Fitted:
    """Fit a joint ensemble, with every smaller size for its history.

    Args:
        task: the fit.
        record: called with the ensemble of each size, the wanted one last.
    """
    options, policy = task.options, task.options.level == "policy"
    teacher = _teacher(task)
    if options.k == "auto":
        task.watcher.choosing("k")
    blend = FROM_MIXTURE
    if policy:
        _policy_choice(task)  # first, so that no step of the fit starts inside another
    else:
        blend = choose_blend(task, teacher)
    validated: dict[int, Members] = {}
    if options.k == "auto":
        validated = _without_validation(task, teacher, blend, reversed(AUTO_SIZES))
        size = choose_size({k: validated[k] for k in AUTO_SIZES}, task.check, options.level)
    else:
        size = int(options.k)

    sizes = sorted({2**i for i in range(size.bit_length()) if 2**i < size} | {size})
    every_size = partial(_fit_sizes, task, teacher, blend, sizes, record if policy else None)
    fits: list[Callable[[], Any]] = [every_size]
    if options.max_disagreement < 1:
        free = partial(members_of_sizes, task, task.train, teacher, [size], blend, bound=1.0)
        fits.append(lambda: task.keep(f"unbounded-{size}", free)[size])
    fits.append(lambda: fit_rivals(task))
    ensembles, *unbounded, baselines = task.in_parallel(fits)
    if not policy:
        for k in sizes:
            record(ensembles[k])

    temperature = 1.0  # policy-level members are trained at this scale
    choice_model = ChoiceModel()
    if not policy:
        task.watcher.choosing("temperature")
        validated = validated or _without_validation(task, teacher, blend, [size])
        unit = validated[size].unit_spread(task.learn)
        temperature = choose_temperature(unit, task.check)
        single = teacher.refit(task.learn, options.seed).prob_hat(task.check.difference)
        choice_model = model_from_voices(unit, temperature, single, task.check)
    return Fitted(
        members=ensembles[size],
        temperature=temperature,
        baselines=baselines,
        unbounded=unbounded[0] if unbounded else None,
        target=None if policy else blend.source,
        vote_share=None if policy else blend.vote_share,
        choice_model=choice_model,
    )


def validated_members(task: FitTask) -> Members:
    """Return a joint ensemble of the wanted size, fitted without the validation prompts, to compare features on them.

    Args:
        task: the fit. Its first fold is left out; target and regularisation are chosen on its folds.
    """
    teacher = _teacher(task)
    size = AUTO_TARGET_SIZE if task.options.k == "auto" else int(task.options.k)
    policy = task.options.level == "policy"
    if policy:
        _policy_choice(task)
    blend = FROM_MIXTURE if policy else choose_blend(task, teacher)
    return _without_validation(task, teacher, blend, [size])[size]


def choose_blend(task: FitTask, teacher: Teacher) -> Blend:
    """Choose what joint members learn from: the target whose ensemble predicts the votes of validation prompts best.

    Every fold is held out once; all targets are trained side by side on the rest.

    Args:
        task: the fit.
        teacher: the teacher of all training pairs. It is fitted again without each fold.
    """
    options = task.options
    if options.target != "auto":
        return NAMED_BLENDS[options.target]
    size = AUTO_TARGET_SIZE if options.k == "auto" else int(options.k)
    if size == 1:
        return FROM_TEACHER
    task.watcher.choosing("target")

    def errors(fold: int) -> Arrays:
        learn, check = task.train[~task.folds[fold]], task.train[task.folds[fold]]
        fits = fit_joint_ensembles(
            learn,
            teacher.refit(learn, options.seed),
            [(size, blend) for blend in BLENDS],
            seed=options.seed,
            bound=task.bound,
            restarts=FEW_RESTARTS,
            undecided=options.undecided,
            short=True,
        )
        members = (Members(fit.theta, fit.weights, fit.undecided) for fit in fits)
        return {"errors": np.array([validation_brier(one, check, options.level) for one in members])}

    def kept(fold: int) -> Arrays:
        return task.checkpoints.arrays(f"targets-{fold}", partial(errors, fold))

    found = task.in_parallel([partial(kept, fold) for fold in range(len(task.folds))])
    return BLENDS[int(np.argmin(sum(one["errors"] for one in found)))]


def members_of_sizes(
    task: FitTask,
    pairs: Pairs,
    teacher: Teacher,
    sizes: Sequence[int],
    blend: Blend,
    *,
    bound: float,
    restarts: int = FEW_RESTARTS,
) -> dict[int, Members]:
    """Return an ensemble of each size fitted to ``pairs``. A single member of a vote-level fit is the teacher.

    Args:
        task: the fit, for its options and folds.
        pairs: the training pairs, or those without the validation prompts.
        teacher: the teacher fitted to ``pairs``.
        sizes: numbers of members.
        blend: what members learn from.
        bound: the largest disagreement of a member on training pairs.
        restarts: random starts of the vote-level fit.
    """
    seed, undecided = task.options.seed, task.options.undecided
    if task.options.level == "policy":
        choice = _policy_choice(task)
        fits = {k: fit_policy_level(pairs, teacher, k, choice, seed=seed, bound=bound) for k in sizes}
        return {k: Members(fit.theta, fit.weights) for k, fit in fits.items()}
    members = {}
    if 1 in sizes:
        theta = teacher.theta[:, None]
        votes = hard_votes(pairs.difference, theta)
        members[1] = Members(theta, *weights_and_undecided(votes, pairs.prob_a, undecided=undecided))
    if several := [k for k in sizes if k > 1]:
        trained = fit_joint_ensembles(
            pairs,
            teacher,
            [(k, blend) for k in several],
            seed=seed,
            bound=bound,
            restarts=restarts,
            undecided=undecided,
        )
        members |= {k: Members(fit.theta, fit.weights, fit.undecided) for k, fit in zip(several, trained, strict=True)}
    return members


def _fit_sizes(
    task: FitTask, teacher: Teacher, blend: Blend, sizes: Sequence[int], record: Callable[[Members], None] | None
) -> dict[int, Members]:
    """Return an ensemble of each size: trained side by side at the vote level, one after the other at policy level."""
    fit = partial(members_of_sizes, task, task.train, teacher, blend=blend, bound=task.bound, restarts=RESTARTS)
    if task.options.level == "vote":
        return task.keep("joint", partial(fit, sizes))
    fits: dict[int, Members] = {}
    for k in sizes:
        fits |= task.keep(f"joint-{k}", partial(fit, [k]))
        if record:
            record(fits[k])
    return fits


def _policy_choice(task: FitTask) -> PolicyChoice:
    """Return the target and regularisation of a policy-level fit, chosen on the folds for the wanted size."""
    size = AUTO_TARGET_SIZE if task.options.k == "auto" else int(task.options.k)

    def compute() -> Arrays:
        task.watcher.choosing("target")
        choice = choose_policy_options(task.train, _teacher(task), size, task.folds, seed=task.options.seed)
        return {"blend": np.array(POLICY_BLENDS.index(choice.blend)), "l2": np.array(choice.l2)}

    arrays = task.checkpoints.arrays("policy-options", compute)
    return PolicyChoice(POLICY_BLENDS[int(arrays["blend"])], float(arrays["l2"]))


def _without_validation(task: FitTask, teacher: Teacher, blend: Blend, sizes: Iterable[int]) -> dict[int, Members]:
    """Return ensembles of these sizes fitted without the validation prompts."""
    learn_teacher = teacher.refit(task.learn, task.options.seed)

    def fit(k: int) -> dict[int, Members]:
        members = partial(members_of_sizes, task, task.learn, learn_teacher, [k], blend, bound=task.bound)
        return task.keep(f"validation-{k}", members)

    fits = task.in_parallel([partial(fit, k) for k in sizes])
    return {k: members for fit in fits for k, members in fit.items()}


def _teacher(task: FitTask) -> Teacher:
    """Return the teacher of the training pairs, with its damping and regularisation chosen on the folds."""
    if task.teacher is not None:
        return task.teacher
    fit = partial(fit_teacher, task.train, task.folds, seed=task.options.seed)
    return kept_teacher(task.checkpoints, "teacher", fit)


# --- A stagewise fit on frozen features: choose space, regularisation and size, fit stage by stage, fit the rivals.


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
