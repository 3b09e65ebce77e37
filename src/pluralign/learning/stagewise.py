"""Forward stagewise ensembles: the paper's procedure (§4), and two variants of its loss.

Each stage fits one reward to the residual of the hard votes so far, then solves all weights again. Members are linear
in the features. ``finetune`` trains language models in the same stages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from pluralign.core.arrays import FloatArray
from pluralign.core.random_streams import ORIENTATION, random_stream
from pluralign.learning.bradley_terry import fit_bradley_terry, scores
from pluralign.learning.options import Loss, Orient, Variant
from pluralign.learning.pairs import Matrix, cap_disagreement
from pluralign.theory.calibration import sigmoid, votes_from_rewards
from pluralign.theory.simplex import simplex_least_squares

MEMBER_STEPS = 200
"""Maximum number of L-BFGS iterations per member."""


@dataclass(frozen=True)
class Stage:
    """The ensemble after one stage."""

    theta: FloatArray
    """The members so far, ``(d, k)``."""
    weights: FloatArray
    """``(k,)``."""
    brier: float
    """On the training votes."""
    brier_uncapped: float
    """The same, had the bound not changed the newest member."""


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
    """Yield the ensemble after each of k stages.

    Args:
        difference: features of response a minus those of b, ``(n, d)``.
        prob_a: share of people preferring a, ``(n,)``.
        k: number of members.
        l2: regularisation strength of each member.
        variant: target of a stage, see ``stage_target``. The first stage is always symmetric: it fits prob_a itself.
        loss: ``mse`` as in the paper, or ``bce``. The weighted variant always uses ``bce``.
        bound: maximum training disagreement of a member; 1 sets no bound.
        first: members that an interrupted run has finished, ``(d, j)``.
        anchor: the reward that members above the bound are moved towards, ``(d,)``; by default a Bradley–Terry fit.
    """
    if anchor is None:
        anchor = fit_bradley_terry(difference, prob_a, l2)
    theta = np.empty((difference.shape[1], 0)) if first is None else first
    prob_hat = np.full(len(prob_a), 0.5)
    for j in range(1, k + 1):
        if theta.shape[1] < j:
            residual = prob_a - prob_hat
            uncapped = fit_member(difference, residual, l2=l2, variant="symmetric" if j == 1 else variant, loss=loss)
            member = cap_disagreement(uncapped, anchor, difference, prob_a, bound)
        else:
            uncapped = member = theta[:, j - 1]
        theta = np.column_stack([theta[:, : j - 1], member, theta[:, j:]])
        weights, prob_hat = solve_weights(difference, theta[:, :j], prob_a)
        prob_uncapped = prob_hat
        if not np.array_equal(uncapped, member):
            _, prob_uncapped = solve_weights(difference, np.column_stack([theta[:, : j - 1], uncapped]), prob_a)
        brier = float(np.mean((prob_hat - prob_a) ** 2))
        yield Stage(theta[:, :j], weights, brier, float(np.mean((prob_uncapped - prob_a) ** 2)))


def solve_weights(difference: Matrix, theta: FloatArray, prob_a: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the best simplex weights of the members' hard votes, and the share that they predict."""
    votes = hard_votes(difference, theta)
    weights = simplex_least_squares(votes, prob_a)
    return weights, votes @ weights


def hard_votes(difference: Matrix, theta: FloatArray) -> FloatArray:
    """Return 1[θ_j · difference > 0], and ½ for a tie, ``(n, k)``."""
    reward = difference @ theta.astype(difference.dtype)
    return votes_from_rewards(reward, np.zeros_like(reward))


def orientation(prob_a: FloatArray, orient: Orient, seed: int = 0) -> FloatArray:
    """Return 1 for each pair that keeps its order and −1 for each pair whose responses are swapped, ``(n,)``.

    ``given`` keeps every pair, ``random`` swaps each with probability ½, ``majority`` puts the response that more
    people prefer first. A swapped pair has the difference −d and the share 1 − p.

    Args:
        prob_a: share of people preferring a, ``(n,)``.
        orient: which order.
        seed: of the random order.

    Example:
        >>> orientation(np.array([0.2, 0.5, 0.8]), "majority")
        array([-1.,  1.,  1.])
    """
    if orient == "majority":
        return np.where(prob_a < 0.5, -1.0, 1.0)
    if orient == "random":
        return random_stream(seed, ORIENTATION).choice([-1.0, 1.0], size=len(prob_a))
    return np.ones(len(prob_a))


# --- one stage --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageTarget:
    """What one stage fits σ(Δr) to."""

    target: FloatArray
    """``(n,)``; outside [0, 1] possible with ``mse``."""
    weight: FloatArray
    """Weight of each pair in the loss, ``(n,)``."""
    loss: Loss


def stage_target(residual: FloatArray, variant: Variant, loss: Loss = "mse") -> StageTarget:
    """Return the target of one stage for the residual ε = p − p̂ of the ensemble so far.

    printed     mean (ε_i − σ(Δr_i))²                            (the paper's §4)
    symmetric   mean (½ + ε_i − σ(Δr_i))²                        (the same averaged over both orders of each pair)
    weighted    mean w_i BCE(1[ε_i > 0], σ(Δr_i)),  w_i = |ε_i| / mean |ε|   (the Frank–Wolfe step)

    Swapping a pair turns ε into −ε but σ into 1 − σ, so the printed loss depends on the order of the two responses.

    Args:
        residual: ε, ``(n,)``.
        variant: one of the three.
        loss: ``mse``, or ``bce`` with targets clipped to [0, 1]. The weighted variant always uses ``bce``.

    Example:
        >>> stage_target(np.array([0.4, -0.6]), "symmetric").target.round(1)
        array([ 0.9, -0.1])
    """
    if variant == "weighted":
        weight = np.abs(residual) / max(float(np.abs(residual).mean()), 1e-12)
        return StageTarget((residual > 0).astype(float), weight, "bce")
    target = residual if variant == "printed" else 0.5 + residual
    return StageTarget(np.clip(target, 0.0, 1.0) if loss == "bce" else target, np.ones(len(residual)), loss)


def fit_member(
    difference: Matrix, residual: FloatArray, *, l2: float, variant: Variant = "symmetric", loss: Loss = "mse"
) -> FloatArray:
    """Fit one linear reward to the residual of the ensemble so far: the loss of ``stage_target`` plus l2/2 |θ|².

    Args:
        difference: features of response a minus those of b, ``(n, d)``.
        residual: ε = p − p̂, ``(n,)``.
        l2: regularisation strength.
        variant: target of the stage.
        loss: ``mse`` or ``bce``.

    Returns:
        θ, ``(d,)``.
    """
    stage = stage_target(residual, variant, loss)
    if stage.loss == "bce":
        return fit_bradley_terry(difference, stage.target, l2, weight=stage.weight)
    start = fit_bradley_terry(difference, np.clip(stage.target, 0.0, 1.0), max(l2, 0.1))
    objective = squared_loss(difference, stage.target, l2)
    solution = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": MEMBER_STEPS})
    return np.asarray(solution.x, dtype=np.float64)


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
