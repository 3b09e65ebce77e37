"""What an ensemble is compared with: every simpler way to predict the share of votes, fitted with the same care.

Each baseline is a few arrays and a formula for the share, so that it is saved beside the ensemble and evaluated on
other votes too. All rewards are linear in the features; regularisation is chosen on validation prompts for each.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import ndtr

from pluralign.core.arrays import Array, FloatArray
from pluralign.theory.calibration import brier
from pluralign.training.bradley_terry import (
    L2_GRID,
    SEARCH_DIRECTIONS,
    directions_with,
    fit_bradley_terry,
    fit_path,
    principal_directions,
    scores,
    sigmoid,
)
from pluralign.training.differences import Differences
from pluralign.training.pairs import Pairs
from pluralign.training.stagewise import hard_votes, solve_weights

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

TEMPERATURES = np.geomspace(0.25, 4.0, 33)
EM_ROUNDS = 12
REDUCED = 64
VARIANCE_L2 = (0.1, 0.01)


@dataclass(frozen=True)
class Baseline:
    """A fitted baseline: which formula of ``FORMULAS`` it uses and the arrays it needs."""

    formula: str
    arrays: Arrays
    seconds: float = 0.0

    @property
    def k(self) -> int:
        """How many rewards it has."""
        return int(self.arrays["theta"].shape[1]) if self.arrays["theta"].ndim == 2 else 1

    def votes(self, pairs: Differences) -> FloatArray | None:
        """Return its members' hard votes, ``(n_pairs, k)``, where the share is one of votes."""
        return hard_votes(pairs, self.arrays["theta"]) if self.formula == "votes" else None

    def prob_hat(self, pairs: Differences) -> FloatArray:
        """Return the predicted share preferring response a, ``(n_pairs,)``."""
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
    """Φ((μ_a − μ_b) / √(s²_a + s²_b)), log s² linear: utilities that are normal with their own spread."""
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
"""Every baseline that is fitted, with its formula."""
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
"""What people call each of them, and the two that need no fit."""


def fit_baselines(
    pairs: Pairs,
    folds: Sequence[npt.NDArray[np.bool_]],
    k: int,
    *,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Baseline]:
    """Fit every baseline on the training pairs.

    Args:
        pairs: the training pairs.
        folds: masks of validation pairs, by which regularisation is chosen.
        k: how many members the ensembles among them get.
        seed: of resampling and starts.
        report: called with each baseline's name before it is fitted.
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


def _fit_single(
    pairs: Pairs, reduced: Array, target: FloatArray, folds: Sequence[npt.NDArray[np.bool_]]
) -> dict[str, Any]:
    """One Bradley–Terry reward; its regularisation is the one whose σ(Δr) predicts validation votes best."""
    errors = np.zeros(len(L2_GRID))
    for held_out in folds:
        path = fit_path(reduced[~held_out], target[~held_out])
        predicted = sigmoid(scores(reduced[held_out], path.T))
        errors += [brier(predicted[:, i], pairs.prob_a[held_out]) for i in range(len(L2_GRID))]
    l2 = L2_GRID[int(np.argmin(errors))]
    return {"theta": fit_bradley_terry(pairs.difference, target, l2), "temperature": 1.0, "l2": l2}


def _temperature(reduced: Array, prob_a: FloatArray, folds: Sequence[npt.NDArray[np.bool_]], l2: float) -> float:
    """The T for which σ(Δr/T), fitted without the validation prompts, predicts their votes best."""
    errors = np.zeros(len(TEMPERATURES))
    for held_out in folds:
        z = scores(reduced[held_out], fit_bradley_terry(reduced[~held_out], prob_a[~held_out], l2))
        errors += [brier(sigmoid(z / temperature), prob_a[held_out]) for temperature in TEMPERATURES]
    return float(TEMPERATURES[int(np.argmin(errors))])


def fit_pair(pairs: Pairs, theta: FloatArray) -> dict[str, Any]:
    """The reward and its opposite, {r, −r}, with the best weight: p̂ takes two values."""
    both = np.column_stack([theta, -theta])
    return {"theta": both, "weights": solve_weights(pairs.difference, both, pairs.prob_a)[0]}


def _fit_bootstrap(pairs: Pairs, theta: FloatArray, l2: float, k: int, seed: int) -> dict[str, Any]:
    """Soft Bradley–Terry rewards of prompts drawn with replacement; votes with the best weights."""
    rng = np.random.default_rng([seed, 4])
    names, position = np.unique(pairs.prompt, return_inverse=True)
    members = []
    for _ in range(k):
        drawn = np.bincount(rng.integers(len(names), size=len(names)), minlength=len(names))
        members.append(
            fit_bradley_terry(pairs.difference, pairs.prob_a, l2, weight=drawn[position], start=theta, steps=3)
        )
    stacked = np.column_stack(members)
    return {"theta": stacked, "weights": solve_weights(pairs.difference, stacked, pairs.prob_a)[0]}


def _fit_mixture(pairs: Pairs, theta: FloatArray, l2: float, k: int, seed: int) -> dict[str, Any]:
    """A mixture of k Bradley–Terry models by EM: each vote was cast by one of k kinds of people.

    E: a vote for a comes from kind j with chance ∝ π_j σ(Δr_j), a vote for b with chance ∝ π_j (1 − σ(Δr_j)).
    M: each kind's reward is fitted to its share of the votes (one Newton path from where it was), π_j is that share.
    """
    rng = np.random.default_rng([seed, 5])
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


def _fit_mean_variance(pairs: Pairs, theta: FloatArray, folds: Sequence[npt.NDArray[np.bool_]]) -> dict[str, Any]:
    """Thurstone's model with a spread for every text: mean and log variance linear, by maximum likelihood.

    Fitted in the leading directions; the strength of regularisation of the variance is chosen on validation prompts.

    Reference: distributional preference learning (Siththaranjan et al. 2023), the mean-and-variance model.
    """
    axes = directions_with(pairs.difference, theta, min(REDUCED, len(theta)))
    inputs = np.asarray(pairs.judge().of_texts(axes), dtype=np.float64)
    guide = axes.T @ theta

    def solve(rows: npt.NDArray[np.bool_], l2: float, steps: int) -> tuple[FloatArray, FloatArray, float]:
        objective = mean_variance_loss(inputs, pairs.a[rows], pairs.b[rows], pairs.prob_a[rows], l2, guide)
        start = np.concatenate([guide, np.zeros(len(guide) + 1)])
        found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": steps}).x
        return found[: len(guide)], found[len(guide) : -1], float(found[-1])

    def arrays(mean: FloatArray, log_variance: FloatArray, offset: float) -> dict[str, Any]:
        return {"theta": axes @ mean, "log_variance": axes @ log_variance, "offset": offset}

    errors = []
    for l2 in VARIANCE_L2:
        error = 0.0
        for held_out in folds[:1]:
            part = Baseline("mean-variance", arrays(*solve(~held_out, l2, 40)))
            checked = pairs[held_out]
            error += brier(part.prob_hat(checked.judge()), checked.prob_a)
        errors.append(error)
    everything = np.ones(len(pairs), dtype=bool)
    return arrays(*solve(everything, VARIANCE_L2[int(np.argmin(errors))], 80))


def mean_variance_loss(
    inputs: FloatArray,
    a: npt.NDArray[np.int32],
    b: npt.NDArray[np.int32],
    prob_a: FloatArray,
    l2: float,
    guide: FloatArray,
) -> Callable[[FloatArray], tuple[float, FloatArray]]:
    """Return (μ, λ, c) ↦ (mean cross-entropy of Φ(Δμ/√(s²_a + s²_b)) to p + l2/2 (|μ − guide|² + |λ|²), its gradient).

    μ is the mean's coefficients, log s² = λ·φ + c; μ is drawn to the Bradley–Terry reward ``guide``.
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
        along = slope * z * -0.5 / total
        of_utility = slope / np.sqrt(total)
        of_mean = (np.bincount(a, of_utility, n_items) - np.bincount(b, of_utility, n_items)) @ inputs
        of_spread = (variance * (np.bincount(a, along, n_items) + np.bincount(b, along, n_items))) @ inputs
        of_offset = float(along @ total)
        entropy = -np.mean(prob_a * np.log(p) + (1 - prob_a) * np.log(1 - p))
        value = float(entropy + 0.5 * l2 * (np.sum((mean - guide) ** 2) + np.sum(spread**2)))
        return value, np.concatenate([of_mean + l2 * (mean - guide), of_spread + l2 * spread, [of_offset]])

    return value_and_gradient
