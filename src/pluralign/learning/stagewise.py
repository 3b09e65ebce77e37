"""Forward stagewise ensembles: the paper's procedure (§4), and a variant that does not depend on the order of a pair.

A stage of §4 is three steps: take the residual of the hard votes so far (``stage_target``), fit one reward to it
(``fit_member``), and solve all weights again (``solve_weights``). ``stages`` repeats it. Members are linear in the
features. ``backbone.train`` trains language models in the same stages.
"""

from collections.abc import Callable, Iterator

import numpy as np
from scipy.optimize import minimize

from pluralign.core.arrays import FloatArray
from pluralign.core.random_streams import ORIENTATION, random_stream
from pluralign.learning.bradley_terry import fit_bradley_terry
from pluralign.learning.options import Orient, Variant
from pluralign.learning.pairs import Matrix, Members, cap_disagreement, hard_votes, scores
from pluralign.theory.calibration import sigmoid
from pluralign.theory.simplex import simplex_least_squares

MEMBER_STEPS = 200
"""Maximum number of L-BFGS iterations per member."""


def stages(
    difference: Matrix,
    prob_a: FloatArray,
    k: int,
    *,
    l2: float,
    variant: Variant = "symmetric",
    bound: float = 1.0,
    first: FloatArray | None = None,
    anchor: FloatArray | None = None,
) -> Iterator[Members]:
    """Yield the ensemble after each of k stages.

    Args:
        difference: features of response a minus those of b, ``(n, d)``.
        prob_a: share of people preferring a, ``(n,)``.
        k: number of members.
        l2: regularisation strength of each member.
        variant: target of a stage, see ``stage_target``. The first stage is always symmetric: it fits prob_a itself.
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
            member = fit_member(difference, prob_a - prob_hat, l2=l2, variant="symmetric" if j == 1 else variant)
            theta = np.column_stack([theta, cap_disagreement(member, anchor, difference, prob_a, bound)])
        weights, prob_hat = solve_weights(difference, theta[:, :j], prob_a)
        yield Members(theta[:, :j], weights)


def solve_weights(difference: Matrix, theta: FloatArray, prob_a: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the best simplex weights of the members' hard votes, and the share that they predict."""
    votes = hard_votes(difference, theta)
    weights = simplex_least_squares(votes, prob_a)
    return weights, votes @ weights


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


def stage_target(residual: FloatArray, variant: Variant) -> FloatArray:
    """Return what one stage fits σ(Δr) to, from the residual ε = p − p̂ of the ensemble so far, ``(n,)``.

    printed     mean (ε_i − σ(Δr_i))²        (the paper's §4)
    symmetric   mean (½ + ε_i − σ(Δr_i))²    (the same averaged over both orders of each pair)

    Swapping a pair turns ε into −ε but σ into 1 − σ, so the printed loss depends on the order of the two responses.

    Example:
        >>> stage_target(np.array([0.4, -0.6]), "symmetric").round(1)
        array([ 0.9, -0.1])
    """
    return residual if variant == "printed" else 0.5 + residual


def fit_member(difference: Matrix, residual: FloatArray, *, l2: float, variant: Variant = "symmetric") -> FloatArray:
    """Fit one linear reward to the residual of the ensemble so far: the loss of ``stage_target`` plus l2/2 |θ|².

    Args:
        difference: features of response a minus those of b, ``(n, d)``.
        residual: ε = p − p̂, ``(n,)``.
        l2: regularisation strength.
        variant: target of the stage.

    Returns:
        θ, ``(d,)``.
    """
    target = stage_target(residual, variant)
    start = fit_bradley_terry(difference, np.clip(target, 0.0, 1.0), max(l2, 0.1))
    objective = squared_loss(difference, target, l2)
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
