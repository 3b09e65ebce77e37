"""Baselines: simpler predictors of the share of votes, fitted as carefully as the ensemble.

Each baseline is a formula for the share and the arrays it needs, so it is saved with the ensemble and evaluated on
other votes too. All rewards are linear in the features. Regularisation and damping are chosen on validation prompts.
Rewards that are read as σ(Δr) have the reference policy of the ensemble, if there is one: σ(Δr + log-ratio).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import ndtr

from pluralign.core.arrays import Array, FloatArray, IndexArray, Mask
from pluralign.core.random_streams import BOOTSTRAP, random_stream
from pluralign.learning import bradley_terry as bt
from pluralign.learning.pairs import (
    Differences,
    Matrix,
    Pairs,
    brier_on_folds,
    errors_on_folds,
    hard_votes,
    scores,
    solve_weights,
)
from pluralign.theory.calibration import sigmoid, with_undecided
from pluralign.theory.intervals import clearly_lower

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Parts: TypeAlias = dict[str, Any]
"""The arrays and numbers of a formula, by name, before ``fit_baselines`` makes arrays of all."""

VARIANCE_L2 = (10.0, 1.0, 0.1, 0.01)
"""Regularisation strengths of the mean–variance baseline to choose from."""
TEMPERATURES = np.geomspace(0.25, 4.0, 33)
UNDECIDED = tuple(np.linspace(0.0, 0.8, 17))
DAMPINGS = (1.0, 3.0, 10.0)
"""Values of c that damped soft BT tries beside 0, which is plain soft BT."""


@dataclass(frozen=True)
class Baseline:
    """A fitted baseline."""

    formula: str
    """Key of ``FORMULAS``."""
    arrays: Arrays
    """The arrays that the formula needs, by name. Rewards use the first inputs, as many as ``theta`` has rows."""

    @property
    def k(self) -> int:
        """Number of rewards."""
        return int(self.arrays["theta"].shape[1]) if self.arrays["theta"].ndim == 2 else 1

    def votes(self, pairs: Differences) -> FloatArray | None:
        """Return the hard votes of its members, ``(n_pairs, k)``; None if its share is not a share of votes."""
        return hard_votes(self._inputs(pairs), self.arrays["theta"]) if self.formula == "votes" else None

    def prob_hat(self, pairs: Differences) -> FloatArray:
        """Return the predicted share of people preferring a, ``(n_pairs,)``."""
        return FORMULAS[self.formula](self.arrays, self._inputs(pairs))

    def rewards(self, inputs: Array) -> FloatArray:
        """Return the rewards of texts over their temperature, ``(n_texts, k)``. Without damping."""
        theta = self.arrays["theta"].reshape(len(self.arrays["theta"]), -1)
        scaled = inputs[:, : len(theta)] @ theta / self.arrays["temperature"]
        return np.asarray(scaled, dtype=np.float64)

    def _inputs(self, pairs: Differences) -> Differences:
        return replace(pairs, inputs=pairs.inputs[:, : len(self.arrays["theta"])])


def _damped(arrays: Arrays, pairs: Differences) -> Matrix:
    return bt.damp(pairs, float(arrays.get("damping", 0.0)), float(arrays.get("mean_square", 1.0)))


def _bradley_terry(arrays: Arrays, pairs: Differences) -> FloatArray:
    """u/2 + (1 − u) σ(θ·d̃ / T + log-ratio), with d̃ the damped differences and u an undecided share."""
    share = sigmoid(scores(_damped(arrays, pairs), arrays["theta"]) / arrays["temperature"] + pairs.log_ratio)
    return with_undecided(share, float(arrays.get("undecided", 0.0)))


def _votes(arrays: Arrays, pairs: Differences) -> FloatArray:
    """Σ_j α_j 1[Δr_j > 0]."""
    return hard_votes(pairs, arrays["theta"]) @ arrays["weights"]


def _mixture(arrays: Arrays, pairs: Differences) -> FloatArray:
    """Σ_j π_j σ(θ_j·d̃ + log-ratio), with d̃ the damped differences."""
    logits = scores(_damped(arrays, pairs), arrays["theta"]) + np.reshape(pairs.log_ratio, (-1, 1))
    return np.asarray(sigmoid(logits) @ arrays["weights"])


def _mean_variance(arrays: Arrays, pairs: Differences) -> FloatArray:
    """Return Φ((μ_a − μ_b) / √(s²_a + s²_b)) with log s² linear: normal utilities, a variance per text."""
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
    "damped_bt": "bradley-terry",
    "undecided_bt": "bradley-terry",
    "pair": "votes",
    "bootstrap": "votes",
    "mean_variance": "mean-variance",
    "mixture": "mixture",
}
"""Formula of every fitted baseline."""


def fit_baselines(
    pairs: Pairs, folds: Sequence[Mask], k: int, *, seed: int = 0, report: Callable[[str], None] = lambda _: None
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

    def fit(name: str, make: Callable[[], Parts]) -> None:
        report(name)
        fitted[name] = Baseline(BASELINES[name], {part: np.asarray(array) for part, array in make().items()})

    reduced = pairs.difference @ bt.principal_directions(pairs.difference, bt.SEARCH_DIRECTIONS)
    shares, majorities = pairs.prob_a, np.where(pairs.prob_a == 0.5, 0.5, (pairs.prob_a > 0.5).astype(float))
    fit("soft_bt", lambda: _fit_single(pairs, reduced, shares, folds))
    fit("hard_bt", lambda: _fit_single(pairs, reduced, majorities, folds))
    single = fitted["soft_bt"].arrays
    theta, l2 = single["theta"], float(single["l2"])
    fit("soft_bt_temperature", lambda: {"theta": theta, "temperature": _temperature(pairs, reduced, folds, l2)[1]})
    fit("damped_bt", lambda: fit_damped(pairs, single, folds))
    fit("undecided_bt", lambda: fit_undecided(pairs, fitted["damped_bt"].arrays, folds))
    fit("pair", lambda: fit_pair(pairs, theta))
    fit("bootstrap", lambda: _fit_bootstrap(pairs, reduced, l2, folds, k, seed))
    fit("mean_variance", lambda: fit_mean_variance(pairs, theta, folds[: bt.SEARCH_FOLDS]))
    fit("mixture", lambda: _fit_mixture(pairs, single, fitted["damped_bt"].arrays, folds, k, seed))
    return fitted


# --- single rewards ---------------------------------------------------------------------------------------------------


def _fit_single(pairs: Pairs, reduced: Array, target: FloatArray, folds: Sequence[Mask]) -> Parts:
    """Fit one Bradley–Terry reward with the regularisation whose σ(Δr) predicts validation votes best."""
    shares_of = bt.path_shares(reduced, target, log_ratio=pairs.log_ratio)
    l2 = bt.L2_GRID[int(np.argmin(brier_on_folds(pairs.prob_a, folds, shares_of)))]
    theta = bt.fit_bradley_terry(pairs.difference, target, l2, log_ratio=pairs.log_ratio)
    return {"theta": theta, "temperature": 1.0, "l2": l2}


def fit_damped(pairs: Pairs, plain: Arrays, folds: Sequence[Mask]) -> Parts:
    """Fit one reward on damped differences, σ(θ·d̃). Without clear evidence for damping it is plain soft BT.

    Damping starts at c = 0 with the regularisation of soft BT. Each larger c, with its best regularisation on
    validation prompts, replaces the current one if a one-sided paired t-test over these prompts finds it better. So the
    choice rarely makes soft BT worse, even with few prompts.

    Args:
        pairs: the training pairs.
        plain: arrays of plain soft BT.
        folds: masks of validation pairs, ``(n,)`` each.
    """
    difference, prob_a, ratio = pairs.difference, pairs.prob_a, pairs.log_ratio
    mean_square = bt.mean_row_square(difference)
    directions = bt.principal_directions(difference, bt.SEARCH_DIRECTIONS)
    damping, l2 = 0.0, float(plain["l2"])
    error = errors_on_folds(prob_a, folds, bt.path_shares(difference @ directions, prob_a, [l2], ratio))[:, 0]
    for candidate in DAMPINGS:
        reduced = bt.damp(difference, candidate, mean_square) @ directions
        errors = errors_on_folds(prob_a, folds, bt.path_shares(reduced, prob_a, log_ratio=ratio))
        best = int(np.argmin(np.mean([errors[fold].mean(axis=0) for fold in folds], axis=0)))
        if clearly_lower(errors[:, best] - error, pairs.prompt):
            damping, l2, error = candidate, bt.L2_GRID[best], errors[:, best]
    theta = plain["theta"]
    if damping:
        theta = bt.fit_bradley_terry(bt.damp(difference, damping, mean_square), prob_a, l2, log_ratio=ratio)
    return {"theta": theta, "temperature": 1.0, "l2": l2, "damping": damping, "mean_square": mean_square}


def _temperature(
    pairs: Pairs, reduced: Array, folds: Sequence[Mask], l2: float, shares: Sequence[float] = (0.0,)
) -> tuple[float, float]:
    """Return the u and T for which u/2 + (1 − u) σ(Δr/T), fitted without the validation prompts, predicts them best."""
    prob_a, ratio = pairs.prob_a, np.broadcast_to(np.asarray(pairs.log_ratio), len(pairs))

    def shares_of(fold: Mask) -> Iterator[FloatArray]:
        z = scores(reduced[fold], bt.fit_bradley_terry(reduced[~fold], prob_a[~fold], l2, log_ratio=ratio[~fold]))
        soft = [sigmoid(z / temperature + ratio[fold]) for temperature in TEMPERATURES]
        return (with_undecided(share, u) for u in shares for share in soft)

    row, column = divmod(int(np.argmin(brier_on_folds(prob_a, folds, shares_of))), len(TEMPERATURES))
    return shares[row], float(TEMPERATURES[column])


def fit_undecided(pairs: Pairs, damped: Arrays, folds: Sequence[Mask]) -> Parts:
    """Add an undecided share to damped soft BT: u/2 + (1 − u) σ(θ·d̃/T), with u and T chosen on validation prompts.

    An ensemble has an undecided share too. What that alone gains is no evidence of distinct voices.

    Args:
        pairs: the training pairs.
        damped: arrays of damped soft BT.
        folds: masks of validation pairs, ``(n,)`` each.
    """
    difference = bt.damp(pairs.difference, float(damped["damping"]), float(damped["mean_square"]))
    reduced = difference @ bt.principal_directions(difference, bt.SEARCH_DIRECTIONS)
    u, temperature = _temperature(pairs, reduced, folds, float(damped["l2"]), UNDECIDED)
    return {**damped, "undecided": u, "temperature": temperature}


def fit_pair(pairs: Pairs, theta: FloatArray) -> Parts:
    """Weight a reward and its opposite, {r, −r}, in the best way; p̂ takes two values."""
    both = np.column_stack([theta, -theta])
    return {"theta": both, "weights": solve_weights(pairs.difference, both, pairs.prob_a)[0]}


# --- several rewards --------------------------------------------------------------------------------------------------


def _fit_bootstrap(pairs: Pairs, reduced: Array, l2: float, folds: Sequence[Mask], k: int, seed: int) -> Parts:
    """Fit k soft Bradley–Terry rewards to prompts drawn with replacement, and weight their votes in the best way.

    Validation prompts choose the regularisation: that of soft BT, or a tenth or a hundredth of it.
    """

    def members(x: Matrix, p: FloatArray, prompt: IndexArray, strength: float) -> tuple[FloatArray, FloatArray]:
        rng = random_stream(seed, BOOTSTRAP)
        names, position = np.unique(prompt, return_inverse=True)
        start, stacked = bt.fit_bradley_terry(x, p, strength), []
        for _ in range(k):
            weight = np.bincount(rng.integers(len(names), size=len(names)), minlength=len(names))[position]
            stacked.append(bt.fit_bradley_terry(x, p, strength, weight=weight, start=start, steps=3))
        theta = np.column_stack(stacked)
        return theta, solve_weights(x, theta, p)[0]

    strengths = [l2, l2 / 10, l2 / 100]

    def shares_of(fold: Mask) -> Iterator[FloatArray]:
        rest = pairs[~fold]
        for strength in strengths:
            theta, weights = members(reduced[~fold], rest.prob_a, rest.prompt, strength)
            yield hard_votes(reduced[fold], theta) @ weights

    l2 = strengths[int(np.argmin(brier_on_folds(pairs.prob_a, folds[:1], shares_of)))]
    theta, weights = members(pairs.difference, pairs.prob_a, pairs.prompt, l2)
    return {"theta": theta, "weights": weights, "l2": l2}


def _fit_mixture(pairs: Pairs, plain: Arrays, damped: Arrays, folds: Sequence[Mask], k: int, seed: int) -> Parts:
    """Fit a mixture of k Bradley–Terry models by EM, with the best damping and regularisation on validation prompts.

    It is fitted in the leading directions. It tries the damping and the regularisation of both single rewards, and
    multiples of the latter.

    Args:
        pairs: the training pairs.
        plain: arrays of soft BT.
        damped: arrays of damped soft BT.
        folds: masks of validation pairs, ``(n,)`` each.
        k: number of groups.
        seed: of the start.
    """
    prob_a, mean_square = pairs.prob_a, float(damped["mean_square"])
    singles = {0.0: plain, float(damped["damping"]): damped}
    errors: dict[tuple[float, float], float] = {}
    for damping, single in singles.items():
        difference, l2 = bt.damp(pairs.difference, damping, mean_square), float(single["l2"])
        x = difference @ bt.principal_directions(difference, bt.FEW_DIRECTIONS)
        shares_of = bt.mixture_shares(x, prob_a, k, l2=l2, seed=seed, log_ratio=pairs.log_ratio)
        found = brier_on_folds(prob_a, folds[: bt.SEARCH_FOLDS], shares_of)
        errors |= {(damping, factor * l2): error for factor, error in zip(bt.FACTORS, found, strict=True)}
    damping, l2 = min(errors, key=errors.__getitem__)
    theta, difference = singles[damping]["theta"], bt.damp(pairs.difference, damping, mean_square)
    axes = bt.directions_with(difference, theta)
    guide = np.asarray(axes.T @ theta, dtype=np.float64)
    members, weights = bt.fit_em(difference @ axes, prob_a, guide, k, l2=l2, seed=seed, log_ratio=pairs.log_ratio)
    return {"theta": axes @ members, "weights": weights, "l2": l2, "damping": damping, "mean_square": mean_square}


# --- Thurstone's model with a mean and a variance per text ------------------------------------------------------------


def fit_mean_variance(pairs: Pairs, theta: FloatArray, folds: Sequence[Mask]) -> Parts:
    """Fit Thurstone's model with a variance per text by maximum likelihood; mean and log variance are linear.

    It is fitted in the leading directions. The regularisation strength is chosen on the validation prompts of
    ``folds``.

    Reference: distributional preference learning (Siththaranjan et al. 2023), the mean-and-variance model.
    """
    axes = bt.directions_with(pairs.difference, theta)
    inputs = np.asarray(pairs.lazy_difference().of_texts(axes), dtype=np.float64)
    guide = axes.T @ theta

    def solve(rows: Mask, l2: float, steps: int) -> tuple[FloatArray, FloatArray, float]:
        objective = mean_variance_loss(inputs, pairs.a[rows], pairs.b[rows], pairs.prob_a[rows], l2, guide)
        start = np.concatenate([guide, np.zeros(len(guide) + 1)])
        solution = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": steps}).x
        return solution[: len(guide)], solution[len(guide) : -1], float(solution[-1])

    def arrays(mean: FloatArray, log_variance: FloatArray, offset: float) -> Parts:
        return {"theta": axes @ mean, "log_variance": axes @ log_variance, "offset": np.asarray(offset)}

    def shares_of(fold: Mask) -> Iterator[FloatArray]:
        for l2 in VARIANCE_L2:
            yield _mean_variance(arrays(*solve(~fold, l2, 40)), pairs[fold].lazy_difference())

    best = int(np.argmin(brier_on_folds(pairs.prob_a, folds, shares_of)))
    return arrays(*solve(np.ones(len(pairs), dtype=bool), VARIANCE_L2[best], 80))


def mean_variance_loss(
    inputs: FloatArray, a: IndexArray, b: IndexArray, prob_a: FloatArray, l2: float, guide: FloatArray
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
