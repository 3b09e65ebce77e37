"""Baselines: simpler predictors of the share of votes, fitted as carefully as the ensemble.

Each baseline is a formula for the share and the arrays it needs, so it is saved with the ensemble and evaluated on
other votes too. All rewards are linear in the features. Regularisation is chosen on validation prompts for each.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import ndtr

from pluralign.core.arrays import Array, FloatArray, IndexArray, Mask
from pluralign.core.random_streams import BOOTSTRAP, MIXTURE, random_stream
from pluralign.theory.calibration import brier
from pluralign.theory.logistic import sigmoid
from pluralign.training.bradley_terry import (
    L2_GRID,
    SEARCH_DIRECTIONS,
    directions_with,
    fit_bradley_terry,
    fit_path,
    principal_directions,
    scores,
)
from pluralign.training.pairs import Differences, Pairs
from pluralign.training.stagewise import hard_votes, solve_weights

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

TEMPERATURES = np.geomspace(0.25, 4.0, 33)
EM_ROUNDS = 12
REDUCED = 64
"""The mixture and the mean–variance model are fitted in this many principal directions."""
VARIANCE_L2 = (0.1, 0.01)


@dataclass(frozen=True)
class Baseline:
    """A fitted baseline."""

    formula: str
    """Key of ``FORMULAS``."""
    arrays: Arrays
    """The arrays that the formula needs, by name."""
    seconds: float = 0.0
    """Duration of the fit."""

    @property
    def k(self) -> int:
        """Number of rewards."""
        return int(self.arrays["theta"].shape[1]) if self.arrays["theta"].ndim == 2 else 1

    def votes(self, pairs: Differences) -> FloatArray | None:
        """Return the hard votes of its members, ``(n_pairs, k)``; None if its share is not a share of votes."""
        return hard_votes(pairs, self.arrays["theta"]) if self.formula == "votes" else None

    def prob_hat(self, pairs: Differences) -> FloatArray:
        """Return the predicted share of people preferring a, ``(n_pairs,)``."""
        return FORMULAS[self.formula](self.arrays, pairs)


def _bradley_terry(arrays: Arrays, pairs: Differences) -> FloatArray:
    """σ(Δr / T)."""
    return sigmoid(scores(pairs, arrays["theta"]) / arrays["temperature"])


def _votes(arrays: Arrays, pairs: Differences) -> FloatArray:
    """Σ_j α_j 1[Δr_j > 0]."""
    return hard_votes(pairs, arrays["theta"]) @ arrays["weights"]


def _mixture(arrays: Arrays, pairs: Differences) -> FloatArray:
    """Σ_j π_j σ(Δr_j)."""
    return np.asarray(sigmoid(scores(pairs, arrays["theta"])) @ arrays["weights"])


def _mean_variance(arrays: Arrays, pairs: Differences) -> FloatArray:
    """Φ((μ_a − μ_b) / √(s²_a + s²_b)) with log s² linear: normal utilities, each text with its own variance."""
    variance = np.exp(np.clip(pairs.of_texts(arrays["log_variance"]) + arrays["offset"], -20, 20))
    total = variance[pairs.a] + variance[pairs.b]
    return np.asarray(ndtr(pairs @ arrays["theta"] / np.sqrt(total)), dtype=np.float64)


FORMULAS: Mapping[str, Callable[[Arrays, Differences], FloatArray]] = {
    "bradley-terry": _bradley_terry,
    "votes": _votes,
    "mixture": _mixture,
    "mean-variance": _mean_variance,
}

BASELINES = {
    "soft_bt": "bradley-terry",
    "hard_bt": "bradley-terry",
    "soft_bt_temperature": "bradley-terry",
    "pair": "votes",
    "bootstrap": "votes",
    "mean_variance": "mean-variance",
    "mixture": "mixture",
}
"""Formula of every fitted baseline."""
BASELINE_NAMES = {
    "floor": "floor",
    "constant_half": "constant ½",
    "soft_bt": "soft BT as σ(Δr)",
    "soft_bt_temperature": "soft BT, tempered",
    "hard_bt": "hard BT",
    "pair": "{r, −r}",
    "bootstrap": "bootstrap",
    "mean_variance": "mean–variance",
    "mixture": "mixture of BT",
}
"""Display name of every baseline, including the two that need no fit."""


def fit_baselines(
    pairs: Pairs,
    folds: Sequence[Mask],
    k: int,
    *,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Baseline]:
    """Fit every baseline on the training pairs.

    Args:
        pairs: the training pairs.
        folds: masks of validation pairs, which choose the regularisation, ``(n,)`` each.
        k: number of members of the ensembles among the baselines.
        seed: of resampling and starts.
        report: called with the name of each baseline before its fit.
    """
    fitted: dict[str, Baseline] = {}

    def fit(name: str, make: Callable[[], dict[str, Any]]) -> None:
        report(name)
        start = time.perf_counter()
        arrays = {part: np.asarray(array) for part, array in make().items()}
        fitted[name] = Baseline(BASELINES[name], arrays, time.perf_counter() - start)

    reduced = pairs.difference @ principal_directions(pairs.difference, SEARCH_DIRECTIONS)
    shares, majorities = pairs.prob_a, np.where(pairs.prob_a == 0.5, 0.5, (pairs.prob_a > 0.5).astype(float))
    fit("soft_bt", lambda: _fit_single(pairs, reduced, shares, folds))
    fit("hard_bt", lambda: _fit_single(pairs, reduced, majorities, folds))
    theta, l2 = fitted["soft_bt"].arrays["theta"], float(fitted["soft_bt"].arrays["l2"])
    fit("soft_bt_temperature", lambda: {"theta": theta, "temperature": _temperature(reduced, shares, folds, l2)})
    fit("pair", lambda: fit_pair(pairs, theta))
    fit("bootstrap", lambda: _fit_bootstrap(pairs, theta, l2, k, seed))
    fit("mean_variance", lambda: _fit_mean_variance(pairs, theta, folds))
    fit("mixture", lambda: _fit_mixture(pairs, theta, l2, k, seed))
    return fitted


def _fit_single(pairs: Pairs, reduced: Array, target: FloatArray, folds: Sequence[Mask]) -> dict[str, Any]:
    """Fit one Bradley–Terry reward with the regularisation whose σ(Δr) predicts validation votes best."""
    errors = np.zeros(len(L2_GRID))
    for held_out in folds:
        path = fit_path(reduced[~held_out], target[~held_out])
        predicted = sigmoid(scores(reduced[held_out], path.T))
        errors += [brier(predicted[:, i], pairs.prob_a[held_out]) for i in range(len(L2_GRID))]
    l2 = L2_GRID[int(np.argmin(errors))]
    return {"theta": fit_bradley_terry(pairs.difference, target, l2), "temperature": 1.0, "l2": l2}


def _temperature(reduced: Array, prob_a: FloatArray, folds: Sequence[Mask], l2: float) -> float:
    """Return the T for which σ(Δr/T), fitted without the validation prompts, predicts their votes best."""
    errors = np.zeros(len(TEMPERATURES))
    for held_out in folds:
        z = scores(reduced[held_out], fit_bradley_terry(reduced[~held_out], prob_a[~held_out], l2))
        errors += [brier(sigmoid(z / temperature), prob_a[held_out]) for temperature in TEMPERATURES]
    return float(TEMPERATURES[int(np.argmin(errors))])


def fit_pair(pairs: Pairs, theta: FloatArray) -> dict[str, Any]:
    """Weight a reward and its opposite, {r, −r}, in the best way; p̂ takes two values."""
    both = np.column_stack([theta, -theta])
    return {"theta": both, "weights": solve_weights(pairs.difference, both, pairs.prob_a)[0]}


def _fit_bootstrap(pairs: Pairs, theta: FloatArray, l2: float, k: int, seed: int) -> dict[str, Any]:
    """Fit k soft Bradley–Terry rewards to prompts drawn with replacement, and weight their votes in the best way."""
    rng = random_stream(seed, BOOTSTRAP)
    names, position = np.unique(pairs.prompt, return_inverse=True)
    members = []
    for _ in range(k):
        drawn = np.bincount(rng.integers(len(names), size=len(names)), minlength=len(names))
        weight = drawn[position]
        members.append(fit_bradley_terry(pairs.difference, pairs.prob_a, l2, weight=weight, start=theta, steps=3))
    stacked = np.column_stack(members)
    return {"theta": stacked, "weights": solve_weights(pairs.difference, stacked, pairs.prob_a)[0]}


def _fit_mixture(pairs: Pairs, theta: FloatArray, l2: float, k: int, seed: int) -> dict[str, Any]:
    """Fit a mixture of k Bradley–Terry models by EM: each vote comes from one of k groups of people.

    E: a vote for a comes from group j with probability ∝ π_j σ(Δr_j), a vote for b ∝ π_j (1 − σ(Δr_j)).
    M: each group's reward is fitted to its share of the votes by two Newton steps from its last value, and π_j is
    that share.
    """
    rng = random_stream(seed, MIXTURE)
    axes = directions_with(pairs.difference, theta, min(REDUCED, len(theta)))
    x, p = pairs.difference @ axes, pairs.prob_a
    noise = rng.standard_normal((x.shape[1], k))
    guide = axes.T @ theta
    members = guide[:, None] + np.std(scores(x, guide)) * noise / np.std(scores(x, noise), axis=0)
    weights = np.full(k, 1 / k)
    for _ in range(EM_ROUNDS):
        soft = sigmoid(scores(x, members))
        for_a = weights * soft / (soft @ weights)[:, None] * p[:, None]
        for_b = weights * (1 - soft) / ((1 - soft) @ weights)[:, None] * (1 - p)[:, None]
        count = np.maximum(for_a + for_b, 1e-9)
        for j in range(k):
            target, weight = for_a[:, j] / count[:, j], count[:, j] / count[:, j].mean()
            members[:, j] = fit_bradley_terry(x, target, l2, weight=weight, start=members[:, j], steps=2)
        weights = count.mean(axis=0) / count.mean(axis=0).sum()
    return {"theta": axes @ members, "weights": weights}


def _fit_mean_variance(pairs: Pairs, theta: FloatArray, folds: Sequence[Mask]) -> dict[str, Any]:
    """Fit Thurstone's model with a variance per text by maximum likelihood; mean and log variance are linear.

    It is fitted in the leading directions. The regularisation strength is chosen on validation prompts.

    Reference: distributional preference learning (Siththaranjan et al. 2023), the mean-and-variance model.
    """
    axes = directions_with(pairs.difference, theta, min(REDUCED, len(theta)))
    inputs = np.asarray(pairs.lazy_difference().of_texts(axes), dtype=np.float64)
    guide = axes.T @ theta

    def solve(rows: Mask, l2: float, steps: int) -> tuple[FloatArray, FloatArray, float]:
        objective = mean_variance_loss(inputs, pairs.a[rows], pairs.b[rows], pairs.prob_a[rows], l2, guide)
        start = np.concatenate([guide, np.zeros(len(guide) + 1)])
        solution = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": steps}).x
        return solution[: len(guide)], solution[len(guide) : -1], float(solution[-1])

    def arrays(mean: FloatArray, log_variance: FloatArray, offset: float) -> dict[str, Any]:
        return {"theta": axes @ mean, "log_variance": axes @ log_variance, "offset": offset}

    validation, errors = pairs[folds[0]], []
    for l2 in VARIANCE_L2:
        fitted = Baseline("mean-variance", arrays(*solve(~folds[0], l2, 40)))
        errors.append(brier(fitted.prob_hat(validation.lazy_difference()), validation.prob_a))
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
