"""Thurstone's model with a mean and a variance per text: the mean–variance baseline."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import ndtr

from pluralign.core.arrays import FloatArray, IndexArray, Mask
from pluralign.theory.calibration import brier
from pluralign.training.bradley_terry import directions_with
from pluralign.training.pairs import Differences, Pairs

VARIANCE_L2 = (10.0, 1.0, 0.1, 0.01)
"""Regularisation strengths to choose from."""


def mean_variance_share(arrays: Mapping[str, npt.NDArray[Any]], pairs: Differences) -> FloatArray:
    """Return Φ((μ_a − μ_b) / √(s²_a + s²_b)) with log s² linear: normal utilities, a variance per text."""
    variance = np.exp(np.clip(pairs.of_texts(arrays["log_variance"]) + arrays["offset"], -20, 20))
    total = variance[pairs.a] + variance[pairs.b]
    return np.asarray(ndtr(pairs @ arrays["theta"] / np.sqrt(total)), dtype=np.float64)


def fit_mean_variance(pairs: Pairs, theta: FloatArray, folds: Sequence[Mask]) -> dict[str, Any]:
    """Fit Thurstone's model with a variance per text by maximum likelihood; mean and log variance are linear.

    It is fitted in the leading directions. The regularisation strength is chosen on the validation prompts of
    ``folds``.

    Reference: distributional preference learning (Siththaranjan et al. 2023), the mean-and-variance model.
    """
    axes = directions_with(pairs.difference, theta)
    inputs = np.asarray(pairs.lazy_difference().of_texts(axes), dtype=np.float64)
    guide = axes.T @ theta

    def solve(rows: Mask, l2: float, steps: int) -> tuple[FloatArray, FloatArray, float]:
        objective = mean_variance_loss(inputs, pairs.a[rows], pairs.b[rows], pairs.prob_a[rows], l2, guide)
        start = np.concatenate([guide, np.zeros(len(guide) + 1)])
        solution = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": steps}).x
        return solution[: len(guide)], solution[len(guide) : -1], float(solution[-1])

    def arrays(mean: FloatArray, log_variance: FloatArray, offset: float) -> dict[str, Any]:
        return {"theta": axes @ mean, "log_variance": axes @ log_variance, "offset": np.asarray(offset)}

    errors = np.zeros(len(VARIANCE_L2))
    for held_out in folds:
        validation = pairs[held_out]
        for i, l2 in enumerate(VARIANCE_L2):
            share = mean_variance_share(arrays(*solve(~held_out, l2, 40)), validation.lazy_difference())
            errors[i] += brier(share, validation.prob_a)
    all_rows = np.ones(len(pairs), dtype=bool)
    return arrays(*solve(all_rows, VARIANCE_L2[int(np.argmin(errors))], 80))


def mean_variance_loss(
    inputs: FloatArray,
    a: IndexArray,
    b: IndexArray,
    prob_a: FloatArray,
    l2: float,
    guide: FloatArray,
) -> Callable[[FloatArray], tuple[float, FloatArray]]:
    """Return (μ, λ, c) ↦ (mean cross-entropy of Φ(Δμ/√(s²_a + s²_b)) to p + l2/2 (|μ − guide|² + |λ|²), its gradient).

    μ are the coefficients of the mean, log s² = λ·φ + c, and μ is regularised towards the Bradley–Terry reward
    ``guide``.
    """
    n, (n_items, d) = len(prob_a), inputs.shape

    def value_and_gradient(unknowns: FloatArray) -> tuple[float, FloatArray]:
        mean, spread, offset = unknowns[:d], unknowns[d : 2 * d], unknowns[-1]
        variance, utility = np.exp(np.clip(inputs @ spread + offset, -20, 20)), inputs @ mean
        total = variance[a] + variance[b]
        z = (utility[a] - utility[b]) / np.sqrt(total)
        p = np.clip(ndtr(z), 1e-9, 1 - 1e-9)
        density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
        slope = -(prob_a / p - (1 - prob_a) / (1 - p)) * density / n
        total_gradient = slope * z * -0.5 / total
        utility_gradient = slope / np.sqrt(total)
        mean_gradient = (np.bincount(a, utility_gradient, n_items) - np.bincount(b, utility_gradient, n_items)) @ inputs
        text_gradient = np.bincount(a, total_gradient, n_items) + np.bincount(b, total_gradient, n_items)
        spread_gradient = (variance * text_gradient) @ inputs
        offset_gradient = float(total_gradient @ total)
        entropy = -np.mean(prob_a * np.log(p) + (1 - prob_a) * np.log(1 - p))
        value = float(entropy + 0.5 * l2 * (np.sum((mean - guide) ** 2) + np.sum(spread**2)))
        gradients = mean_gradient + l2 * (mean - guide), spread_gradient + l2 * spread, [offset_gradient]
        return value, np.concatenate(gradients)

    return value_and_gradient
