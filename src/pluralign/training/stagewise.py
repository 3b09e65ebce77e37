"""Forward stagewise ensembles: the paper's own procedure (§4), and two variants of its loss.

Each stage fits one reward to what the hard votes so far get wrong, then solves all weights anew. Members are linear in
the features they are given.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from pluralign.core.arrays import FloatArray
from pluralign.theory.calibration import votes_from_rewards
from pluralign.theory.simplex import simplex_least_squares
from pluralign.training.bradley_terry import fit_bradley_terry, scores, sigmoid
from pluralign.training.differences import Matrix
from pluralign.training.member_bounds import cap_disagreement
from pluralign.training.options import Loss, Variant

MEMBER_STEPS = 200


@dataclass(frozen=True)
class Stage:
    """The ensemble after one stage."""

    theta: FloatArray
    """``(d, k)``: the members so far."""
    weights: FloatArray
    """``(k,)``."""
    brier: float
    """On the training votes."""
    brier_uncapped: float
    """The same had the newest member not been pulled towards people."""


def stages(
    difference: Matrix,
    prob_a: FloatArray,
    k: int,
    *,
    l2: float,
    variant: Variant = "symmetric",
    loss: Loss = "mse",
    bound: float = 1.0,
    first: FloatArray | None = None,
    anchor: FloatArray | None = None,
) -> Iterator[Stage]:
    """Yield the ensemble after each of k stages; ``first`` holds members that an interrupted run had finished.

    Args:
        difference: features of response a less those of b, ``(n, d)``.
        prob_a: the share of people choosing a, ``(n,)``.
        k: how many members to fit.
        l2: strength of regularisation of each member.
        variant: ``printed``: the residual itself is the target; ``symmetric``: ½ plus the residual, which does not
            depend on the order of the pair; ``weighted``: a classifier of its sign, weighted by its size.
        loss: ``mse`` as in the paper, or ``bce``, for the first two variants.
        bound: the largest training disagreement a member may have; 1 sets none.
        first: members to begin with, ``(d, j)``.
        anchor: the reward that members too far from people are turned to; a Bradley–Terry fit unless given, ``(d,)``.
    """
    if anchor is None:
        anchor = fit_bradley_terry(difference, prob_a, l2)
    theta = np.empty((difference.shape[1], 0)) if first is None else first
    prob_hat = np.full(len(prob_a), 0.5)
    for j in range(1, k + 1):
        if theta.shape[1] < j:
            residual = prob_a - prob_hat
            free = fit_member(difference, residual, l2=l2, variant="symmetric" if j == 1 else variant, loss=loss)
            member = cap_disagreement(free, anchor, difference, prob_a, bound)
        else:
            free = member = theta[:, j - 1]
        theta = np.column_stack([theta[:, : j - 1], member, theta[:, j:]])
        weights, prob_hat = solve_weights(difference, theta[:, :j], prob_a)
        uncapped = prob_hat
        if not np.array_equal(free, member):
            _, uncapped = solve_weights(difference, np.column_stack([theta[:, : j - 1], free]), prob_a)
        brier = float(np.mean((prob_hat - prob_a) ** 2))
        yield Stage(theta[:, :j], weights, brier, float(np.mean((uncapped - prob_a) ** 2)))


def solve_weights(difference: Matrix, theta: FloatArray, prob_a: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the best simplex weights of the members' hard votes and the share they then predict."""
    votes = hard_votes(difference, theta)
    weights = simplex_least_squares(votes, prob_a)
    return weights, votes @ weights


def hard_votes(difference: Matrix, theta: FloatArray) -> FloatArray:
    """1[theta_j · difference > 0], ½ for a tie, ``(n, k)``."""
    reward = difference @ theta.astype(difference.dtype)
    return votes_from_rewards(reward, np.zeros_like(reward))


def fit_member(
    difference: Matrix, residual: FloatArray, *, l2: float, variant: Variant = "symmetric", loss: Loss = "mse"
) -> FloatArray:
    """Fit one reward to the residual ε = p − p̂ of the ensemble so far.

    printed     min_θ mean (ε_i − σ(θ·d_i))² + l2/2 |θ|²          (the paper's §4)
    symmetric   min_θ mean (½ + ε_i − σ(θ·d_i))² + l2/2 |θ|²      (the same averaged over both orders of each pair)
    weighted    min_θ mean w_i BCE(1[ε_i > 0], σ(θ·d_i)) + l2/2 |θ|²,  w_i = |ε_i| / mean |ε|   (the Frank–Wolfe step)

    Swapping a pair turns ε into −ε but σ into 1 − σ, so the printed loss depends on how pairs happen to be turned.

    Args:
        difference: features of response a less those of b, ``(n, d)``.
        residual: ε, ``(n,)``.
        l2: strength of regularisation.
        variant: which of the three.
        loss: ``mse``, or ``bce`` with targets clipped to [0, 1].

    Returns:
        θ, ``(d,)``.
    """
    if variant == "weighted":
        weight = np.abs(residual) / max(np.abs(residual).mean(), 1e-12)
        return fit_bradley_terry(difference, (residual > 0).astype(float), l2, weight=weight)
    target = residual if variant == "printed" else 0.5 + residual
    if loss == "bce":
        return fit_bradley_terry(difference, np.clip(target, 0.0, 1.0), l2)
    start = fit_bradley_terry(difference, np.clip(target, 0.0, 1.0), max(l2, 0.1))
    objective = squared_loss(difference, target, l2)
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": MEMBER_STEPS})
    return np.asarray(found.x, dtype=np.float64)


def squared_loss(difference: Matrix, target: FloatArray, l2: float) -> Callable[[FloatArray], tuple[float, FloatArray]]:
    """Return θ ↦ (mean (t_i − σ(θ·d_i))² + l2/2 |θ|², its gradient)."""
    n = len(target)

    def value_and_gradient(theta: FloatArray) -> tuple[float, FloatArray]:
        share = sigmoid(scores(difference, theta))
        error = share - target
        slope = (2.0 / n) * error * share * (1.0 - share)
        gradient = np.asarray(slope.astype(difference.dtype) @ difference, dtype=np.float64) + l2 * theta
        return float(np.mean(error**2) + 0.5 * l2 * theta @ theta), gradient

    return value_and_gradient
