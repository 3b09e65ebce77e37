"""A joint fit on frozen features: choose the target and the size, fit every size, fit the rivals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pluralign.core.checkpoints import Arrays
from pluralign.fitting.rivals import fit_rivals
from pluralign.fitting.selection import choose_size, choose_temperature, validation_brier
from pluralign.fitting.task import AUTO_SIZES, FitTask, Fitted, Members
from pluralign.training.bradley_terry import fit_bradley_terry
from pluralign.training.joint import FEW_RESTARTS, RESTARTS, VOTE_SHARE, JointFit, fit_joint_sizes
from pluralign.training.pairs import Pairs, validation_folds
from pluralign.training.policy_level import fit_policy_level
from pluralign.training.teacher import Teacher, fit_teacher

TARGETS = ("teacher", "votes")
AUTO_TARGET_SIZE = 8
"""The size at which ``--k auto`` chooses the target."""


def fit_joint(task: FitTask, record: Callable[[Members], None]) -> Fitted:
    """Fit a joint ensemble, with every smaller size for its history.

    Args:
        task: the fit.
        record: called with the ensemble of each size, the wanted one last.
    """
    options, policy = task.options, task.options.level == "policy"
    teacher = _fit_teacher(task)
    learn_teacher = _on_pairs(teacher, task.learn)
    if options.k == "auto":
        task.watcher.choosing("k")
    target, validated = choose_target(task, learn_teacher)
    if options.k == "auto":
        validated = _without_validation(task, learn_teacher, target, reversed(AUTO_SIZES), validated)
        size = choose_size({k: validated[k] for k in AUTO_SIZES}, task.check, options.level)
    else:
        size = int(options.k)

    sizes = sorted({2**i for i in range(size.bit_length()) if 2**i < size} | {size})
    every_size = partial(_fit_sizes, task, teacher, target, sizes, record if policy else None)
    fits: list[Callable[[], Any]] = [every_size]
    if options.max_disagreement < 1:
        free = partial(members_of_sizes, task, task.train, teacher, [size], target, bound=1.0)
        fits.append(lambda: task.keep(f"unbounded-{size}", free)[size])
    fits.append(lambda: fit_rivals(task))
    ensembles, *unbounded, baselines = task.in_parallel(fits)
    if not policy:
        for k in sizes:
            record(ensembles[k])

    temperature = 1.0  # policy-level members are trained at this scale
    if not policy:
        task.watcher.choosing("temperature")
        validated = _without_validation(task, learn_teacher, target, [size], validated)
        temperature = choose_temperature(validated[size].unit_spread(task.learn), task.check)
    return Fitted(
        members=ensembles[size],
        temperature=temperature,
        baselines=baselines,
        unbounded=unbounded[0] if unbounded else None,
        target=None if policy else target,
    )


def choose_target(task: FitTask, learn_teacher: Teacher) -> tuple[str, dict[int, Members]]:
    """Choose what joint members learn from: the teacher or the raw votes, whichever predicts validation votes better.

    Args:
        task: the fit.
        learn_teacher: the teacher fitted without the validation prompts.

    Returns:
        The target, and the ensemble fitted to it without the validation prompts, by its size. Empty where nothing had
        to be fitted: the target was given, the level is ``policy``, or there is one member, which is the teacher.
    """
    options = task.options
    if options.target != "auto" or options.level == "policy":
        return options.target, {}
    size = AUTO_TARGET_SIZE if options.k == "auto" else int(options.k)
    if size == 1:
        return "teacher", {}
    task.watcher.choosing("target")
    fits = task.in_parallel(
        [partial(_without_validation, task, learn_teacher, target, [size], {}) for target in TARGETS]
    )
    errors = [validation_brier(fit[size], task.check, options.level) for fit in fits]
    chosen = 0 if errors[0] <= errors[1] else 1
    return TARGETS[chosen], fits[chosen]


def members_of_sizes(
    task: FitTask,
    pairs: Pairs,
    teacher: Teacher,
    sizes: Sequence[int],
    target: str,
    *,
    bound: float,
    restarts: int = FEW_RESTARTS,
) -> dict[int, Members]:
    """Return an ensemble of each size fitted to ``pairs``. A single member is the teacher.

    Args:
        task: the fit, for its options and folds.
        pairs: the training pairs, or those without the validation prompts.
        teacher: the teacher fitted to ``pairs``.
        sizes: numbers of members.
        target: ``votes``, or a blend of the teacher's probabilities with the votes.
        bound: the largest disagreement of a member on training pairs.
        restarts: random starts of the vote-level fit.
    """
    seed, fits = task.options.seed, dict[int, JointFit]()
    if task.options.level == "policy":
        folds = task.folds if pairs is task.train else validation_folds(pairs.prompt, seed)[:1]
        fits = {k: fit_policy_level(pairs, k, folds, l2=teacher.l2, seed=seed, bound=bound) for k in sizes}
    elif several := [k for k in sizes if k > 1]:
        share = 1.0 if target == "votes" else VOTE_SHARE
        fits = fit_joint_sizes(pairs, teacher, several, seed=seed, vote_share=share, bound=bound, restarts=restarts)
    alone = Members(teacher.theta[:, None], np.ones(1))
    return {k: Members(fits[k].theta, fits[k].weights) if k in fits else alone for k in sizes}


def _fit_sizes(
    task: FitTask, teacher: Teacher, target: str, sizes: Sequence[int], record: Callable[[Members], None] | None
) -> dict[int, Members]:
    """Return an ensemble of each size: trained side by side at the vote level, one after the other at policy level."""
    fit = partial(members_of_sizes, task, task.train, teacher, target=target, bound=task.bound, restarts=RESTARTS)
    if task.options.level == "vote":
        return task.keep("joint", partial(fit, sizes))
    fits: dict[int, Members] = {}
    for k in sizes:
        fits |= task.keep(f"joint-{k}", partial(fit, [k]))
        if record:
            record(fits[k])
    return fits


def _without_validation(
    task: FitTask, learn_teacher: Teacher, target: str, sizes: Iterable[int], known: Mapping[int, Members]
) -> dict[int, Members]:
    """Return ensembles of these sizes fitted without the validation prompts; ``known`` ones are not fitted again."""

    def fit(k: int) -> dict[int, Members]:
        members = partial(members_of_sizes, task, task.learn, learn_teacher, [k], target, bound=task.bound)
        return task.keep(f"validation-{target}-{k}", members)

    fits = task.in_parallel([partial(fit, k) for k in sizes if k not in known])
    return {**known, **{k: members for fit in fits for k, members in fit.items()}}


def _fit_teacher(task: FitTask) -> Teacher:
    """Return the teacher of the training pairs, with its damping and regularisation chosen on the folds."""

    def compute() -> Arrays:
        return {name: np.asarray(value) for name, value in vars(fit_teacher(task.train, task.folds)).items()}

    arrays = task.checkpoints.arrays("teacher", compute)
    return Teacher(arrays["theta"], *(float(arrays[name]) for name in ("damping", "mean_square", "l2")))


def _on_pairs(teacher: Teacher, pairs: Pairs) -> Teacher:
    """Return the teacher fitted to other pairs, with the same damping and regularisation."""
    return replace(teacher, theta=fit_bradley_terry(teacher.damp(pairs.difference), pairs.prob_a, teacher.l2))
