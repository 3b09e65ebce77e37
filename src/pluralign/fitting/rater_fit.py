"""A fit with rater ids: choose how far members may differ, fit the mixture of raters, fit the rivals.

The members are those of ``training.rater_mixture``. They are rewards whose σ(Δr) is the probability of one person's
choice, so the fit is for the policy level, at temperature 1. Choices are made on validation prompts, by the votes of
raters there, predicted from the same raters' votes on the other training prompts.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.core.checkpoints import Arrays
from pluralign.core.errors import UsageError
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT
from pluralign.fitting.choice_fit import NewPeople, fit_choice_model, rater_groups
from pluralign.fitting.rivals import fit_rivals
from pluralign.fitting.task import AUTO_SIZES, FitTask, Fitted, Members
from pluralign.theory.logistic import sigmoid
from pluralign.theory.posterior import ChoiceModel
from pluralign.theory.simplex import weights_and_undecided
from pluralign.training.bradley_terry import directions_with, fit_bradley_terry, scores
from pluralign.training.member_bounds import cap_disagreement
from pluralign.training.options import FinetuneOptions, FitOptions
from pluralign.training.pairs import Pairs
from pluralign.training.rater_mixture import RaterMixture, VotesByRater, fit_rater_mixture, predictive_log_loss
from pluralign.training.teacher import fit_teacher
from pluralign.votes.raters import RaterVotes

STRENGTHS = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
"""Strengths of shrinkage to choose from, strongest first."""
PATIENCE = 2
"""The search ends when this many strengths in turn are no better than the best one before them."""
RESTARTS = 4
VALIDATION_ROUNDS = 20
"""EM rounds of a fit that serves a choice."""
MAX_FOLDS = 3
"""Validation folds that choose the strength."""
AUTO_STRENGTH_SIZE = 8
"""The size at which ``--k auto`` chooses the strength."""


def rater_options(options: FitOptions, finetuning: FinetuneOptions) -> FitOptions:
    """Return the options of a fit with rater ids, which is for the policy level.

    Raises:
        UsageError: an option has no meaning with rater ids.
    """
    if finetuning.backbone is not None:
        raise UsageError("--raters cannot be used with --backbone; leave one of the two out.")
    if options.method != "joint":
        raise UsageError(f"--raters requires --method joint, not {options.method}.")
    if options.target != "auto":
        raise UsageError("--target has no effect with --raters; leave it out.")
    return replace(options, level="policy")


def training_votes(votes: RaterVotes, train: Mask) -> VotesByRater:
    """Return the votes on the training pairs, counted by rater.

    Args:
        votes: all votes.
        train: which pairs are trained on, ``(n_pairs,)``.
    """
    row = np.cumsum(train) - 1
    chosen = train[votes.pair]
    return VotesByRater.count(
        votes.rater[chosen], row[votes.pair[chosen]], votes.chose_a[chosen], votes.n_raters, int(train.sum())
    )


def fit_raters(task: FitTask, votes: VotesByRater, record: Callable[[Members], None]) -> Fitted:
    """Fit an ensemble to the votes of known raters, with every smaller size for its history.

    Args:
        task: the fit.
        votes: the raters' votes on the training pairs.
        record: called with the ensemble of each size, the wanted one last.
    """
    options = task.options
    l2 = float(task.checkpoints.value("raters-l2", lambda: fit_teacher(task.train, task.folds, (0.0,)).l2))
    task.watcher.choosing("shrinkage")
    size = AUTO_STRENGTH_SIZE if options.k == "auto" else int(options.k)
    strength = float(task.checkpoints.value("raters-strength", partial(choose_strength, task, votes, size, l2)))
    if options.k == "auto":
        task.watcher.choosing("k")
        size = int(task.checkpoints.value("raters-size", partial(_choose_size, task, votes, strength, l2)))
    task.watcher.choosing("steering")
    choices = task.checkpoints.value("raters-choices", partial(_choice_values, task, votes, size, strength, l2))
    problem = _Problem.of(task.train, votes, l2)
    fits: dict[int, dict[str, Members]] = {}
    for k in sorted({2**i for i in range(size.bit_length()) if 2**i < size} | {size}):
        fits[k] = _bounded_and_free(task, problem, k, strength)
        record(fits[k]["bounded"])
    return Fitted(
        members=fits[size]["bounded"],
        temperature=1.0,
        baselines=fit_rivals(task),
        unbounded=fits[size]["free"] if options.max_disagreement < 1 else None,
        target="raters",
        choice_model=ChoiceModel(**choices),
    )


def choose_strength(task: FitTask, votes: VotesByRater, k: int, l2: float) -> float:
    """Return the strength of shrinkage with the lowest log loss on validation prompts.

    Args:
        task: the fit.
        votes: the raters' votes on the training pairs.
        k: number of members.
        l2: regularisation of the reward that members are shrunk to.
    """
    problems = [
        (_Problem.of(task.train[~fold], votes[~fold], l2), task.train[fold], votes[fold])
        for fold in task.folds[:MAX_FOLDS]
    ]
    losses: list[float] = []
    for strength in STRENGTHS:
        loss = 0.0
        for problem, pairs, new_votes in problems:
            fit = problem.fit(k, strength, task.options.seed)
            loss += float(problem.new_loss(fit.theta, fit.shares, pairs, new_votes).sum())
        losses.append(loss)
        if len(losses) - 1 - int(np.argmin(losses)) == PATIENCE:
            break
    return STRENGTHS[int(np.argmin(losses))]


def _choose_size(task: FitTask, votes: VotesByRater, strength: float, l2: float) -> int:
    """Return the smallest k whose log loss on validation prompts is within one standard error of the best.

    The standard error is that of the difference to the best, over raters.
    """
    held_out = task.folds[0]
    problem, new_votes = _Problem.of(task.train[~held_out], votes[~held_out], l2), votes[held_out]
    losses: dict[int, FloatArray] = {}
    for k in AUTO_SIZES:
        fit = problem.fit(k, strength, task.options.seed)
        losses[k] = problem.new_loss(fit.theta, fit.shares, task.train[held_out], new_votes)
    return smallest_as_good(losses, new_votes.per_rater)


def _choice_values(task: FitTask, votes: VotesByRater, k: int, strength: float, l2: float) -> dict[str, Any]:
    """Fit the choice model to raters and prompts that the members of each validation fold were not learned from."""
    seed, folds, parts = task.options.seed, task.folds[:MAX_FOLDS], []
    for fold, held_out in zip(folds, rater_groups(votes.n_raters, len(folds) + 1, seed), strict=False):
        known, new = task.train[~fold], task.train[fold]
        problem = _Problem.of(known, votes[~fold].of_raters(~held_out), l2)
        fit = problem.fit(k, strength, seed)
        theta = np.column_stack([fit.theta, problem.center])
        parts.append(
            NewPeople(
                votes[~fold].of_raters(held_out),
                scores(problem.x, theta),
                votes[fold].of_raters(held_out),
                scores(new.difference @ problem.axes, theta),
                fit.shares,
            )
        )
    return asdict(fit_choice_model(parts, seed))


def smallest_as_good(losses: Mapping[int, FloatArray], n_votes: FloatArray) -> int:
    """Return the smallest k whose total loss is within one standard error of the lowest.

    With d_i the difference of rater i's loss to that of the best k, n_i the number of their votes and d̄ = Σd / Σn, the
    standard error of Σd is √Σ(d_i − n_i d̄)².

    Args:
        losses: summed log loss of each rater by k, ``(n_raters,)`` each.
        n_votes: votes of each rater, ``(n_raters,)``.

    Example:
        >>> smallest_as_good({1: np.array([2.0, 2.0]), 2: np.array([1.0, 1.1])}, np.ones(2))
        2
    """
    best = min(losses, key=lambda k: float(losses[k].sum()))

    def as_good(k: int) -> bool:
        difference = losses[k] - losses[best]
        residual = difference - n_votes * difference.sum() / max(float(n_votes.sum()), 1.0)
        return float(difference.sum()) <= float(np.sqrt(np.sum(residual**2)))

    return min(k for k in losses if as_good(k))


@dataclass(frozen=True, eq=False)
class _Problem:
    """Training pairs in the leading directions, with the votes of raters."""

    pairs: Pairs
    votes: VotesByRater
    axes: Array
    """``(d, m)``."""
    x: Array
    """``(n_pairs, m)``."""
    center: FloatArray
    """The soft-label Bradley–Terry reward of all votes, ``(m,)``."""

    @classmethod
    def of(cls, pairs: Pairs, votes: VotesByRater, l2: float) -> "_Problem":
        """Fit the shared reward and find the directions."""
        reward = fit_bradley_terry(pairs.difference, pairs.prob_a, l2)
        axes = directions_with(pairs.difference, reward)
        x = np.ascontiguousarray(pairs.difference @ axes)
        return cls(pairs, votes, axes, x, np.asarray(axes.T @ reward, dtype=np.float64))

    def fit(self, k: int, strength: float, seed: int) -> RaterMixture:
        """Fit a mixture that serves a choice on validation prompts."""
        return fit_rater_mixture(self.x, self.votes, self.center, k, strength, seed=seed, rounds=VALIDATION_ROUNDS)

    def new_loss(self, theta: FloatArray, shares: FloatArray, pairs: Pairs, votes: VotesByRater) -> FloatArray:
        """Return the log loss of votes on other pairs, given those on these, summed per rater, ``(n_raters,)``."""
        new = scores(pairs.difference @ self.axes, theta)
        return predictive_log_loss(self.votes, scores(self.x, theta), votes, new, shares)

    def members(self, theta: FloatArray, shares: FloatArray, *, undecided: bool) -> Members:
        """Return the members with the raters' shares as weights, and the undecided share solved exactly.

        u minimises mean (u/2 + (1 − u) Σ_j π_j σ(Δr_j) − p)² over the training pairs; it is 0 without ``undecided``.
        """
        share = sigmoid(scores(self.x, theta)) @ shares
        _, u = weights_and_undecided(share[:, None], self.pairs.prob_a, undecided=undecided)
        return Members(np.asarray(self.axes @ theta, dtype=np.float64), shares, u)


def _bounded_and_free(task: FitTask, problem: _Problem, k: int, strength: float) -> dict[str, Members]:
    """Return the ensemble of one size, with the bound on disagreement and without."""

    def fit() -> Arrays:
        mixture = fit_rater_mixture(
            problem.x, problem.votes, problem.center, k, strength, seed=task.options.seed, restarts=RESTARTS
        )
        return {"theta": mixture.theta, "shares": mixture.shares}

    arrays = task.checkpoints.arrays(f"raters-{k}", fit)
    theta, shares = arrays["theta"], np.where(arrays["shares"] > NEGLIGIBLE_WEIGHT, arrays["shares"], 0.0)
    shares /= shares.sum()
    prob_a = task.train.prob_a
    capped = np.column_stack([cap_disagreement(t, problem.center, problem.x, prob_a, task.bound) for t in theta.T])
    found = {"bounded": capped, "free": theta}
    return {name: problem.members(one, shares, undecided=task.options.undecided) for name, one in found.items()}
