"""Joint ensembles for the policy level: k members whose weighted σ(Δr_j) match the votes (App. A).

``joint`` trains for hard votes instead. Here the loss is smooth, so all members and weights are fitted by L-BFGS. They
start from a mixture of Bradley–Terry rewards fitted by EM. The target is the votes alone, or their blend with the share
that the teacher's mixture predicts: on damped differences, so that members learn to be less certain of long ones. There
is no undecided share: σ(Δr) near ½ already says that a member is undecided. With a reference policy each σ(Δr_j), also
of the teacher, is σ(Δr_j + log π_ref(a)/π_ref(b)).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import softmax

from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.core.random_streams import POLICY_LEVEL, random_stream
from pluralign.learning.bradley_terry import (
    FEW_DIRECTIONS,
    Teacher,
    TrainedTeacher,
    damping_factor,
    directions_with,
    fit_bradley_terry,
    fit_em,
    principal_directions,
)
from pluralign.learning.joint import ShareLoss
from pluralign.learning.pairs import Members, Pairs, cap_disagreement, errors_on_folds, scores, soft_votes
from pluralign.theory.calibration import sigmoid
from pluralign.theory.intervals import clearly_lower
from pluralign.theory.simplex import simplex_least_squares

POLICY_L2_GRID = (0.003, 0.01, 0.03, 0.1, 0.3)
POLICY_VOTE_SHARES = (0.3, 1.0)
"""Shares of the raw votes in the targets that validation prompts choose from: taught, and votes alone."""
ROTATED = 8192
"""Number of rotated pairs beside the pairs, with half of the total weight."""
VALIDATION_STEPS, STEPS = 50, 100
"""L-BFGS iterations of a fit that makes a choice, and of the final fit."""


@dataclass(frozen=True)
class PolicyOptions:
    """Target and regularisation of a policy-level fit."""

    vote_share: float
    """Share of the raw votes in the target; the rest is the share that the teacher's mixture predicts."""
    l2: float


def choose_policy_options(
    pairs: Pairs, teacher: Teacher, k: int, folds: Sequence[Mask], *, seed: int = 0
) -> PolicyOptions:
    """Return the target and the regularisation whose ensemble predicts the votes of validation prompts best.

    The votes alone are the target only if a paired test over prompts finds them better: where votes are few, members
    that learn from the teacher vary less.

    Args:
        pairs: the training pairs.
        teacher: the teacher of all pairs. It is fitted again without each fold.
        k: number of members.
        folds: masks of validation pairs, ``(n,)`` each.
        seed: of the start and of rotated pairs.
    """
    candidates = [PolicyOptions(vote_share, l2) for vote_share in POLICY_VOTE_SHARES for l2 in POLICY_L2_GRID]

    def errors(of: Sequence[PolicyOptions], some: Sequence[Mask]) -> FloatArray:
        def shares_of(fold: Mask) -> Iterator[FloatArray]:
            rest, check = pairs[~fold], pairs[fold]
            problem = _PolicyProblem.of(rest, teacher.refit(rest, seed), k, seed)
            for candidate in of:
                theta, weights = problem.minimise(candidate, VALIDATION_STEPS)
                yield soft_votes(check, theta) @ weights

        return errors_on_folds(pairs.prob_a, some, shares_of)

    def best(of: Sequence[PolicyOptions], found: FloatArray, n: int) -> list[int]:
        """Return the n best candidates of each target."""
        order = np.argsort(np.nanmean(found, axis=0), kind="stable").tolist()
        return [j for share in POLICY_VOTE_SHARES for j in [j for j in order if of[j].vote_share == share][:n]]

    found = errors(candidates, folds[:1])
    if len(folds) > 1:  # the first fold keeps two strengths of each target for the others
        kept = best(candidates, found, 2)
        candidates, found = [candidates[j] for j in kept], found[:, kept]
        found = np.where(np.isnan(found), errors(candidates, folds[1:]), found)
    taught, votes = best(candidates, found, 1)
    clear = clearly_lower(found[:, votes] - found[:, taught], pairs.prompt)
    return candidates[votes if clear else taught]


def train_policy_level(
    pairs: Pairs, teacher: Teacher, k: int, chosen: PolicyOptions, *, seed: int = 0, bound: float = 1.0
) -> Members:
    """Train k members together so that Σ_j α_j σ(Δr_j) matches the votes.

    Args:
        pairs: the training pairs.
        teacher: fitted to these pairs; it predicts part of the target.
        k: number of members.
        chosen: target and regularisation.
        seed: of the start and of rotated pairs.
        bound: maximum training disagreement of a member; 1 sets no bound.
    """
    problem = _PolicyProblem.of(pairs, teacher, k, seed)
    theta, weights = problem.minimise(chosen, STEPS)
    capped = np.column_stack(
        [cap_disagreement(member, problem.reward, pairs.difference, pairs.prob_a, bound) for member in theta.T]
    )
    if not np.array_equal(capped, theta):  # the shares are linear in the weights: solve these again
        weights = simplex_least_squares(soft_votes(pairs, capped), pairs.prob_a)
    return Members(capped, weights)


@dataclass(frozen=True)
class _PolicyProblem:
    """Pairs and rotated pairs in the leading directions, with the members that a fit starts from."""

    axes: Array
    """``(d, m)``."""
    x: Array
    """Differences of the pairs, then of the rotated pairs, ``(n + ROTATED, m)``."""
    prob_a: FloatArray
    """``(n,)``."""
    log_ratio: FloatArray
    """log π_ref(a)/π_ref(b), ``(n + ROTATED,)``."""
    taught: FloatArray
    """Share that the teacher's mixture predicts, ``(n + ROTATED,)``."""
    reward: FloatArray
    """One Bradley–Terry reward, ``(d,)``."""
    start: FloatArray
    """``(m, k)``."""

    @classmethod
    def of(cls, pairs: Pairs, teacher: Teacher, k: int, seed: int) -> "_PolicyProblem":
        """Return the problem of some pairs."""
        difference, prob_a = pairs.difference, pairs.prob_a
        ratio = np.broadcast_to(np.asarray(pairs.log_ratio), len(pairs))
        if isinstance(teacher, TrainedTeacher):  # its rewards were trained on these pairs
            reward, axes = teacher.theta, teacher.axes
        else:
            reward = fit_bradley_terry(difference, prob_a, teacher.l2, log_ratio=ratio)
            axes = directions_with(difference, reward)
        x = np.ascontiguousarray(difference @ axes)
        if isinstance(teacher, TrainedTeacher) and k <= teacher.voices.shape[1]:
            start = np.asarray(axes.T @ teacher.voices[:, :k], dtype=np.float64)
        else:
            assert teacher.voices_l2 is not None  # noqa: S101 - a teacher of the policy level has a mixture
            start, _ = fit_em(x, prob_a, axes.T @ reward, k, l2=teacher.voices_l2, seed=seed, log_ratio=ratio)
        # A rotated pair has rewards cos φ·r_i + sin φ·r_j, and about the length² cos²φ·|d_i|² + sin²φ·|d_j|².
        # Log-ratios are rotated as rewards are: a swap of the responses changes their signs.
        rng = random_stream(seed, POLICY_LEVEL)
        first, second = rng.integers(len(x), size=(2, ROTATED))
        angle = rng.random((ROTATED, 1)) * 2 * np.pi
        cosine, sine = np.cos(angle), np.sin(angle)
        squares, rewards = teacher.squares(difference).astype(np.float64), scores(difference, teacher.voices)
        squares = np.append(squares, cosine[:, 0] ** 2 * squares[first] + sine[:, 0] ** 2 * squares[second])
        rewards = np.vstack([rewards, cosine * rewards[first] + sine * rewards[second]])
        ratio = np.append(ratio, cosine[:, 0] * ratio[first] + sine[:, 0] * ratio[second])
        factor = damping_factor(squares, teacher.damping, teacher.mean_square)
        taught = sigmoid(rewards * factor[:, None] + ratio[:, None]) @ teacher.voice_weights
        rotated = (cosine * x[first] + sine * x[second]).astype(x.dtype)
        return cls(axes, np.vstack([x, rotated]), prob_a, ratio, np.asarray(taught), reward, start)

    def minimise(self, chosen: PolicyOptions, steps: int) -> tuple[FloatArray, FloatArray]:
        """Return the members ``(d, k)`` and weights that minimise ``policy_loss``."""
        n, share = len(self.prob_a), chosen.vote_share
        if share == 1:
            x, target, weight = self.x[:n], self.prob_a, np.full(n, 1 / n)
        else:
            x, target = self.x, np.append((1 - share) * self.taught[:n] + share * self.prob_a, self.taught[n:])
            weight = np.append(np.full(n, 0.5 / n), np.full(ROTATED, 0.5 / ROTATED))
        k = self.start.shape[1]
        unknowns = np.append(self.start.ravel(), np.zeros(k))
        objective = policy_loss(x, target, chosen.l2, k, weight, log_ratio=self.log_ratio[: len(x)])
        solution = minimize(objective, unknowns, jac=True, method="L-BFGS-B", options={"maxiter": steps}).x
        theta, logits = solution[: self.start.size].reshape(self.start.shape), solution[self.start.size :]
        return np.asarray(self.axes @ theta, dtype=np.float64), softmax(logits)


PULL, PULL_STEPS = 0.2, 50
"""Regularisation towards given members, and L-BFGS iterations, of ``adjusted_to_counts``. A weaker pull gains 1 % of
true error on the town hall, and moves members away from the people they stand for (docs/log.md)."""


def adjusted_to_counts(pairs: Pairs, members: Members) -> Members:
    """Move the members of another fit a little, so that their weighted σ(Δr_j) match the vote shares better.

    Minimises Σ_i w_i (Σ_j α_j σ((θ_j + ξ_j)·d_i) − p_i)² + λ/k Σ_j |ξ_j|² over ξ, in the leading directions and those
    of the members, and α.
    """
    difference, k = pairs.difference, members.k
    leading = principal_directions(difference, FEW_DIRECTIONS)
    axes = np.linalg.qr(np.column_stack([leading, members.theta]))[0].astype(difference.dtype)
    x, own = np.ascontiguousarray(difference @ axes), np.asarray(axes.T @ members.theta, dtype=np.float64)
    objective = policy_loss(x, pairs.prob_a, PULL, k, np.full(len(x), 1 / len(x)), own)
    start = np.append(own.ravel(), np.log(np.maximum(members.weights, 1e-6)))
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": PULL_STEPS}).x
    moved = found[: own.size].reshape(own.shape) - own
    return Members(members.theta + axes @ moved, softmax(found[own.size :]))


def policy_loss(
    x: Array,
    target: FloatArray,
    l2: float,
    k: int,
    weight: FloatArray,
    center: FloatArray | None = None,
    log_ratio: FloatArray | float = 0.0,
) -> Callable[[FloatArray], tuple[float, FloatArray]]:
    """Return (θ, logits of α) ↦ (Σ_i w_i (Σ_j α_j σ(θ_j·d_i + o_i) − t_i)² + l2/k Σ_j |θ_j − c_j|², its gradient).

    This is ``ShareLoss`` with τ = 1, without undecided share and penalty, plus the regularisation (c is 0 by default)
    and the log-ratio o of the reference policy.
    """
    ratio = np.reshape(log_ratio, (-1, 1))
    m, loss, center = x.shape[1], ShareLoss(weight[:, None], [k]), np.zeros(1) if center is None else center

    def value_and_gradient(unknowns: FloatArray) -> tuple[float, FloatArray]:
        theta, weights = unknowns[: m * k].reshape(m, k), softmax(unknowns[m * k :])
        soft = sigmoid(scores(x, theta) + ratio)
        error = loss.errors(soft, weights, target[:, None])
        value = float(weight @ error[:, 0] ** 2 + l2 / k * np.sum((theta - center) ** 2))
        slope, weight_gradient = loss.gradients(soft)
        slope *= soft
        slope *= 1 - soft
        theta_gradient = x.T @ slope.astype(x.dtype) + (2 * l2 / k) * (theta - center)
        logit_gradient = weights * (weight_gradient - weights @ weight_gradient)
        return value, np.append(theta_gradient.ravel(), logit_gradient)

    return value_and_gradient
