"""A joint fit on frozen features: choose the target and the size, fit every size, fit the rivals."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pluralign.core.checkpoints import Arrays
from pluralign.fitting.choice_fit import model_from_voices
from pluralign.fitting.rivals import fit_rivals
from pluralign.fitting.selection import choose_size, choose_temperature, validation_brier
from pluralign.fitting.task import AUTO_SIZES, FitTask, Fitted, Members
from pluralign.theory.posterior import ChoiceModel
from pluralign.theory.simplex import weights_and_undecided
from pluralign.training.joint import (
    BLENDS,
    FEW_RESTARTS,
    FROM_MIXTURE,
    FROM_TEACHER,
    FROM_VOTES,
    RESTARTS,
    Blend,
    fit_joint_ensembles,
)
from pluralign.training.pairs import Pairs
from pluralign.training.policy_level import POLICY_BLENDS, PolicyChoice, choose_policy_options, fit_policy_level
from pluralign.training.stagewise import hard_votes
from pluralign.training.teacher import Teacher, fit_teacher, kept_teacher

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
