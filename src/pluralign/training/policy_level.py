"""Joint ensembles for the policy level: k members whose weighted σ(Δr_j) match the votes (App. A).

``joint`` trains for hard votes instead. Here the loss is smooth, so all members and weights are fitted by L-BFGS.
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import minimize
from scipy.special import softmax

from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.core.random_streams import POLICY_LEVEL, random_stream
from pluralign.theory.calibration import brier
from pluralign.theory.logistic import sigmoid
from pluralign.theory.simplex import simplex_least_squares
from pluralign.training.bradley_terry import directions_with, fit_bradley_terry, principal_directions, scores
from pluralign.training.joint import JointFit
from pluralign.training.member_bounds import cap_disagreement
from pluralign.training.pairs import Pairs

POLICY_DIRECTIONS = 128
"""Members are fitted in this many principal directions."""
POLICY_L2_GRID = (0.003, 0.01, 0.03, 0.1, 0.3)
POLICY_NOISE = 0.5
"""Spread of the random start of each member, relative to the Bradley–Terry reward."""
VALIDATION_STEPS, STEPS = 50, 100
"""L-BFGS iterations of a fit that chooses the regularisation, and of the final fit."""


def fit_policy_level(
    pairs: Pairs, k: int, folds: Sequence[Mask], *, l2: float, seed: int = 0, bound: float = 1.0
) -> JointFit:
    """Train k members together so that Σ_j α_j σ(Δr_j) matches the votes; validation prompts choose regularisation.

    Args:
        pairs: the training pairs.
        k: number of members.
        folds: masks of validation pairs, ``(n,)`` each.
        l2: regularisation of the Bradley–Terry reward that all members start from, with noise added.
        seed: of the noise.
        bound: maximum training disagreement of a member; 1 sets no bound.
    """
    difference, prob_a = pairs.difference, pairs.prob_a
    leading = difference @ principal_directions(difference, POLICY_DIRECTIONS)
    errors = np.zeros(len(POLICY_L2_GRID))
    for held_out in folds:
        train, validation = leading[~held_out], leading[held_out]
        start = _noisy_start(train, fit_bradley_terry(train, prob_a[~held_out], l2), k, seed)
        for position, strength in enumerate(POLICY_L2_GRID):
            theta, weights = _minimise(train, prob_a[~held_out], start, strength, VALIDATION_STEPS)
            errors[position] += brier(sigmoid(scores(validation, theta)) @ weights, prob_a[held_out])
    reward = fit_bradley_terry(difference, prob_a, l2)
    axes = directions_with(difference, reward, min(POLICY_DIRECTIONS, difference.shape[1]))
    x = np.ascontiguousarray(difference @ axes)
    start = _noisy_start(x, axes.T @ reward, k, seed)
    theta, weights = _minimise(x, prob_a, start, POLICY_L2_GRID[int(np.argmin(errors))], STEPS)
    members = np.asarray(axes @ theta)
    capped = np.column_stack([cap_disagreement(member, reward, difference, prob_a, bound) for member in members.T])
    soft = sigmoid(scores(difference, capped))
    if not np.array_equal(capped, members):  # the shares are linear in the weights: solve these again
        weights = simplex_least_squares(soft, prob_a)
    return JointFit(capped, weights, brier(soft @ weights, prob_a))


def _noisy_start(x: Array, reward: FloatArray, k: int, seed: int) -> FloatArray:
    """Return k copies of a reward with noise of half its spread added, ``(m, k)``."""
    noise = random_stream(seed, POLICY_LEVEL).standard_normal((len(reward), k))
    strength = POLICY_NOISE * np.std(scores(x, reward)) / np.maximum(np.std(scores(x, noise), axis=0), 1e-12)
    return np.asarray(reward[:, None] + strength * noise)


def _minimise(x: Array, prob_a: FloatArray, start: FloatArray, l2: float, steps: int) -> tuple[FloatArray, FloatArray]:
    """Return the members and weights that minimise ``policy_loss``."""
    objective = policy_loss(x, prob_a, l2, start.shape[1])
    unknowns = np.append(start.ravel(), np.zeros(start.shape[1]))
    solution = minimize(objective, unknowns, jac=True, method="L-BFGS-B", options={"maxiter": steps}).x
    theta, logits = solution[: start.size].reshape(start.shape), solution[start.size :]
    return theta, softmax(logits)


def policy_loss(x: Array, prob_a: FloatArray, l2: float, k: int) -> Callable[[FloatArray], tuple[float, FloatArray]]:
    """Return (θ, logits of α) ↦ (mean (Σ_j α_j σ(θ_j·d) − p)² + l2/k Σ_j |θ_j|², its gradient)."""
    n, m = x.shape

    def value_and_gradient(unknowns: FloatArray) -> tuple[float, FloatArray]:
        theta, weights = unknowns[: m * k].reshape(m, k), softmax(unknowns[m * k :])
        soft = sigmoid(scores(x, theta))
        error = soft @ weights - prob_a
        slope = (2 / n) * error[:, None] * weights * soft * (1 - soft)
        theta_gradient = x.T @ slope.astype(x.dtype) + (2 * l2 / k) * theta
        weight_gradient = (2 / n) * (error @ soft)
        logit_gradient = weights * (weight_gradient - weights @ weight_gradient)
        value = float(np.mean(error**2) + l2 / k * np.sum(theta**2))
        return value, np.append(theta_gradient.ravel(), logit_gradient)

    return value_and_gradient
