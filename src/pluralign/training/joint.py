"""Joint ensembles: k members trained together on the share their votes predict. The default method, ours.

The vote 1[Δr > 0] has no slope, so it is softened to σ(Δr/τ) and τ is lowered as training goes on:

    min over θ, α   mean_i (Σ_j α_j σ(θ_j·d_i / τ) − t_i)²,   τ from 0.2 to 0.04, each θ_j·d of unit spread,

then the hard votes are taken and the weights α solved exactly. What makes it work on a few thousand noisy pairs:

* **damped differences** d̃ = d·√((1+c)/(1+c|d|²/mean|d|²)). Votes do not see a positive factor; the teacher does, and
  votes on very different texts (one of them junk) are less extreme than a logistic model thinks;
* **a teacher**, a soft-label Bradley–Terry reward. The target t is mostly its share, free of the votes' noise;
* **few directions**: the leading principal ones and the teacher's own;
* **rotated mixtures** cos φ·d̃ + sin φ·d̃' of two pairs, labelled by the teacher: pairs nobody was asked about;
* **restarts and sizes in one pass**; of restarts the best on the training pairs is kept;
* **a price on extremes**: a member whose disagreement passes a bound pays, and each keeps some teacher in it.

docs/log.md has what each is worth.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from pluralign.core.arrays import Array, FloatArray
from pluralign.theory.calibration import brier
from pluralign.theory.simplex import simplex_least_squares
from pluralign.training.bradley_terry import (
    SEARCH_DIRECTIONS,
    directions_with,
    fit_bradley_terry,
    fit_path,
    principal_directions,
    scores,
    sigmoid,
)
from pluralign.training.differences import Matrix, row_squares, scale_rows
from pluralign.training.member_bounds import cap_disagreement
from pluralign.training.pairs import Pairs
from pluralign.training.stagewise import hard_votes

SingleArray: TypeAlias = npt.NDArray[np.float32]

DAMPING_GRID = (0.0, 1.0, 3.0)
TEACHER_L2_GRID = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
VOTE_DIRECTIONS = 64
POLICY_DIRECTIONS = 128
RESTARTS = 6
FEW_RESTARTS = 3
"""For fits that only serve a choice or a comparison."""
STEPS = 500
BATCH = 4096
"""Pairs in a step, mixtures among them."""
LEARNING_RATE = 0.05
TEMPERATURES = (0.2, 0.04)
MIXTURE_SHARE = 0.3
"""Share of a batch that is rotated mixtures."""
VOTE_SHARE = 0.3
"""Share of raw votes in the target beside the teacher's."""
SPREAD_L2 = 0.003
TEACHER_CORRELATION = 0.1
"""The least correlation of a member's reward differences with the teacher's."""
EXTREME_PRICE = 0.3
POLICY_L2_GRID = (0.003, 0.01, 0.03, 0.1, 0.3)
POLICY_NOISE = 0.5


@dataclass(frozen=True)
class Teacher:
    """A soft-label Bradley–Terry reward on damped differences, with what was chosen for it on validation prompts."""

    theta: FloatArray
    """``(d,)``."""
    damping: float
    mean_square: float
    """mean |d|² of the training pairs, which damping is measured by."""
    l2: float

    def damp(self, difference: Matrix) -> Matrix:
        """Return d·√((1+c)/(1+c|d|²/mean|d|²)), ``(n, d)``."""
        return damp(difference, self.damping, self.mean_square)

    def prob_hat(self, difference: Matrix) -> FloatArray:
        """Return σ(θ·d̃), ``(n,)``."""
        return sigmoid(scores(self.damp(difference), self.theta))


def damp(difference: Matrix, damping: float, mean_square: float) -> Matrix:
    """Shorten long differences: d·√((1+c)/(1+c|d|²/mean|d|²)).

    Example:
        >>> damp(np.array([[1.0, 0.0], [3.0, 0.0]]), 3.0, 1.0).round(3)
        array([[1.   , 0.   ],
               [1.134, 0.   ]])
    """
    if damping == 0:
        return difference
    factor = np.sqrt((1 + damping) / (1 + damping * row_squares(difference) / mean_square))
    return scale_rows(difference, factor.astype(difference.dtype))


def fit_teacher(
    pairs: Pairs, folds: Sequence[npt.NDArray[np.bool_]], dampings: Sequence[float] = DAMPING_GRID
) -> Teacher:
    """Fit the teacher; damping and regularisation are those that predict the votes on validation prompts best."""
    difference, prob_a = pairs.difference, pairs.prob_a
    mean_square = float(np.mean(row_squares(difference), dtype=np.float64)) or 1.0
    directions = principal_directions(difference, SEARCH_DIRECTIONS)
    errors: dict[tuple[float, float], float] = {}
    for damping in dampings:
        reduced = damp(difference, damping, mean_square) @ directions
        for held_out in folds:
            path = fit_path(reduced[~held_out], prob_a[~held_out], TEACHER_L2_GRID)
            for l2, theta in zip(TEACHER_L2_GRID, path, strict=True):
                error = brier(sigmoid(scores(reduced[held_out], theta)), prob_a[held_out])
                errors[damping, l2] = errors.get((damping, l2), 0.0) + error
    damping, l2 = min(errors, key=errors.__getitem__)
    theta = fit_bradley_terry(damp(difference, damping, mean_square), prob_a, l2)
    return Teacher(theta, damping, mean_square, l2)


@dataclass(frozen=True)
class JointFit:
    """Members trained together."""

    theta: FloatArray
    """``(d, k)``, for undamped differences too: a vote does not see the damping."""
    weights: FloatArray
    """``(k,)``."""
    score: float
    """Squared error to the blended target on the training pairs: what restarts are compared by."""


def fit_joint(pairs: Pairs, teacher: Teacher, k: int, **options: Any) -> JointFit:
    """Train k members together at the level of votes; options are those of ``fit_joint_sizes``."""
    return fit_joint_sizes(pairs, teacher, [k], **options)[k]


def fit_joint_sizes(
    pairs: Pairs,
    teacher: Teacher,
    sizes: Sequence[int],
    *,
    seed: int = 0,
    vote_share: float = VOTE_SHARE,
    bound: float = 1.0,
    restarts: int = RESTARTS,
) -> dict[int, JointFit]:
    """Train ensembles of several sizes at the level of votes, each by itself but all on the batches of the largest.

    Args:
        pairs: the training pairs.
        teacher: the reward that most of the target comes from.
        sizes: how many members each ensemble has.
        seed: of starts and batches.
        vote_share: share of the raw votes in the target; 1 does without the teacher (and without mixtures).
        bound: the largest training disagreement a member may have; 1 sets none.
        restarts: how many starts are tried for each size.
    """
    damped = teacher.damp(pairs.difference)
    axes = directions_with(damped, teacher.theta, min(VOTE_DIRECTIONS, damped.shape[1]))
    x = np.ascontiguousarray(damped @ axes, dtype=np.float32)
    guide = (axes.T @ teacher.theta).astype(np.float32)
    share = sigmoid(scores(x, guide))
    target = (1 - vote_share) * share + vote_share * pairs.prob_a
    each = [k for k in sizes for _ in range(restarts)]
    fits: dict[int, JointFit] = {}
    for candidate in _train_ensembles(x, guide, target, share, each, seed, vote_share < 1, bound):
        # The price keeps members near the bound; this keeps them under it.
        near = [cap_disagreement(member, guide.astype(np.float64), x, pairs.prob_a, bound) for member in candidate.T]
        theta = np.column_stack(near)
        votes = hard_votes(x, theta)
        weights = simplex_least_squares(votes, target)
        found = JointFit(np.asarray(axes @ theta, dtype=np.float64), weights, brier(votes @ weights, target))
        best = fits.setdefault(len(weights), found)
        fits[len(weights)] = min(best, found, key=lambda fit: fit.score)
    return fits


def _train_ensembles(
    x: SingleArray,
    guide: SingleArray,
    target: FloatArray,
    share: FloatArray,
    sizes: Sequence[int],
    seed: int,
    mixtures: bool,
    bound: float,
) -> list[FloatArray]:
    """Train an ensemble of each size, equal ones side by side, in one pass; return the members of each, ``(m, k)``."""
    rng = np.random.default_rng([seed, 2])
    n, m = x.shape
    covariance = x.T @ x / n
    n_mixed = int(BATCH * MIXTURE_SHARE) if mixtures else 0
    target, share = target.astype(np.float32), share.astype(np.float32)

    def unit_spread(theta: SingleArray) -> SingleArray:
        square = np.einsum("mk,mk->k", theta, covariance @ theta)
        return np.asarray(theta / np.sqrt(np.maximum(square, 1e-12)), dtype=np.float32)

    toward = unit_spread(guide[:, None])
    correlation_with = (covariance @ toward)[:, 0]
    # Every member starts as the teacher with a random direction as strong beside it. The largest ensembles draw theirs
    # as if they were alone, so that smaller ones beside them change nothing.
    draws = {k: rng if k == max(sizes) else np.random.default_rng([seed, 2, k]) for k in sizes}
    starts = {k: draw.standard_normal((m, k * sizes.count(k)), dtype=np.float32) for k, draw in draws.items()}
    theta = np.hstack(list(starts.values()))
    theta = unit_spread(toward + unit_spread(theta - toward * (correlation_with @ theta)))
    logits = np.zeros(theta.shape[1], dtype=np.float32)
    adam = [Adam(theta), Adam(logits)]
    strength = np.repeat(np.float32(2 * SPREAD_L2) / np.array(sizes, dtype=np.float32), sizes)
    # Large arrays are written over in every step: new ones would be new memory each time.
    few = n <= BATCH - n_mixed  # then each pair is in every batch, once and with more weight
    rows = np.arange(min(n, BATCH - n_mixed))
    batch, other = (np.empty((size, m), dtype=np.float32) for size in (len(rows) + n_mixed, n_mixed))
    drawn, mixed = batch[: len(rows)], batch[len(rows) :]
    drawn[:] = x[rows]
    weight = np.full((len(batch), 1), 1 / BATCH, dtype=np.float32)
    weight[: len(rows)] *= (BATCH - n_mixed) / len(rows)
    gradients = VoteGradients(weight, sizes, bound)
    for step in range(STEPS):
        done = step / (STEPS - 1)
        tau = np.float32(TEMPERATURES[0] * (TEMPERATURES[1] / TEMPERATURES[0]) ** done)
        rate = LEARNING_RATE * (0.51 + 0.49 * np.cos(np.pi * done))
        if not few:
            rows = rng.integers(n, size=len(drawn))
            np.take(x, rows, axis=0, out=drawn, mode="clip")
        first, second = rng.integers(n, size=(2, n_mixed))
        angle = rng.random((n_mixed, 1), dtype=np.float32) * np.float32(2 * np.pi)
        np.take(x, first, axis=0, out=mixed, mode="clip")
        np.take(x, second, axis=0, out=other, mode="clip")
        mixed *= np.cos(angle)
        mixed += np.multiply(other, np.sin(angle), out=other)
        mixed_share = sigmoid(mixed @ guide).astype(np.float32)
        wanted = np.concatenate([target[rows], mixed_share])
        likely = np.concatenate([share[rows], mixed_share])
        gradient, of_logits = gradients(batch, wanted, likely, theta, logits, tau)
        pulled = covariance @ theta
        gradient -= pulled * np.einsum("mk,mk->k", theta, gradient)  # only turns: the spread stays one
        gradient += strength * (theta - pulled * np.einsum("mk,mk->k", theta, theta))
        theta = unit_spread(theta - adam[0].step(gradient, rate))
        logits = logits - adam[1].step(of_logits, rate)
        if bound < 1:
            correlation = correlation_with @ theta
            aside = unit_spread(theta - toward * correlation)
            least = np.float32(TEACHER_CORRELATION)
            theta = np.where(correlation < least, least * toward + np.sqrt(1 - least**2) * aside, theta)
    return np.split(theta.astype(np.float64), np.cumsum(sizes)[:-1], axis=1)


class VoteGradients:
    """The slopes of what several ensembles pay on a batch, all of them in one pass.

    With votes σ_ij = σ(θ_j·x_i/τ) and shares p_i by which people prefer a, an ensemble of k members pays

        Σ_i w_i (Σ_j α_j σ_ij − t_i)² + c/k Σ_j max(0, D_j − bound),   D_j = Σ_i w_i (p_i (1 − σ_ij) + (1 − p_i) σ_ij),

    its squared error and the price c of members that disagree with people beyond the bound. Large arrays are kept and
    written over.
    """

    def __init__(self, weight: SingleArray, sizes: Sequence[int], bound: float) -> None:
        n_members, n_ensembles = sum(sizes), len(sizes)
        self.weight, self.bound = weight, bound
        self.price = np.repeat(np.float32(EXTREME_PRICE) / np.array(sizes, dtype=np.float32), sizes)
        self.members, self.ensemble = np.arange(n_members), np.repeat(np.arange(n_ensembles), sizes)
        self.blocks = np.zeros((n_members, n_ensembles), dtype=np.float32)
        self.firsts = np.cumsum([0, *sizes[:-1]])
        self.lean, self.slope = (np.empty((len(weight), n_members), dtype=np.float32) for _ in range(2))
        self.factors = np.empty((len(weight), n_ensembles + 1), dtype=np.float32)
        self.coefficients = np.zeros((n_ensembles + 1, n_members), dtype=np.float32)

    def __call__(
        self,
        x: SingleArray,
        target: SingleArray,
        share: SingleArray,
        theta: SingleArray,
        logits: SingleArray,
        tau: np.float32,
    ) -> tuple[SingleArray, SingleArray]:
        """Return the slopes in θ, ``(m, n_members)``, and in the logits of α, ``(n_members,)``.

        Args:
            x: ``(n, m)`` differences.
            target: ``(n,)``, what the weighted votes should be.
            share: ``(n,)``, by which people are taken to prefer a.
            theta: ``(m, n_members)``, the members of one ensemble after those of another.
            logits: ``(n_members,)``.
            tau: the temperature.
        """
        # In place of a vote σ its lean tanh(z/2τ) = 2σ − 1: D = ½ + ½ Σ_i w_i (1 − 2p_i) lean_i, slope (1 − lean²)/2τ.
        lean, factors, coefficients = self.lean, self.factors, self.coefficients
        np.tanh(np.matmul(x, theta / (2 * tau), out=lean), out=lean)
        weights = np.exp(logits - np.maximum.reduceat(logits, self.firsts)[self.ensemble])
        weights /= self._sums(weights)
        self.blocks[self.members, self.ensemble] = weights  # so that sums over members are one product
        factors[:, :-1] = 0.5 * (lean @ self.blocks + 1) - target[:, None]
        factors[:, -1] = 1 - 2 * share
        factors *= self.weight
        moments = factors.T @ lean
        coefficients[:-1] = 0.5 * self.blocks.T
        coefficients[-1] = 0.25 * self.price * (0.5 + 0.5 * moments[-1] > self.bound)
        np.matmul(factors, coefficients, out=self.slope)
        self.slope *= np.subtract(1, np.square(lean, out=lean), out=lean)
        of_weights = moments[self.ensemble, self.members]  # less what all members of an ensemble share
        of_logits = weights * (of_weights - self._sums(weights * of_weights))
        return np.asarray(x.T @ self.slope / tau), np.asarray(of_logits)

    def _sums(self, values: SingleArray) -> SingleArray:
        """Return for each member the sum over its ensemble."""
        return np.asarray(np.add.reduceat(values, self.firsts)[self.ensemble])


class Adam:
    """The Adam step for one array."""

    def __init__(self, like: SingleArray) -> None:
        self.mean, self.square, self.count = np.zeros_like(like), np.zeros_like(like), 0

    def step(self, gradient: SingleArray, rate: float) -> SingleArray:
        """Return what to subtract."""
        self.count += 1
        self.mean += 0.1 * (gradient - self.mean)
        self.square += 0.01 * (gradient**2 - self.square)
        mean, square = self.mean / (1 - 0.9**self.count), self.square / (1 - 0.99**self.count)
        return np.asarray(rate * mean / (np.sqrt(square) + 1e-10), dtype=np.float32)


# --- trained for the policy-level reading ---------------------------------------------------------------------------


def fit_policy_level(
    pairs: Pairs, k: int, folds: Sequence[npt.NDArray[np.bool_]], *, l2: float, seed: int = 0, bound: float = 1.0
) -> JointFit:
    """Train k members together so that Σ_j α_j σ(Δr_j) matches the votes; regularisation chosen on validation prompts.

    Args:
        pairs: the training pairs.
        k: how many members.
        folds: masks of validation pairs.
        l2: regularisation of the Bradley–Terry reward from which all members start, with some noise.
        seed: of the noise.
        bound: the largest training disagreement a member may have; 1 sets none.
    """
    difference, prob_a = pairs.difference, pairs.prob_a
    leading = difference @ principal_directions(difference, POLICY_DIRECTIONS)
    errors = np.zeros(len(POLICY_L2_GRID))
    for held_out in folds:
        learn, check = leading[~held_out], leading[held_out]
        start = _policy_start(learn, fit_bradley_terry(learn, prob_a[~held_out], l2), k, seed)
        for position, strength in enumerate(POLICY_L2_GRID):
            theta, weights = _minimise_policy(learn, prob_a[~held_out], start, strength, steps=50)
            errors[position] += brier(sigmoid(scores(check, theta)) @ weights, prob_a[held_out])
    guide = fit_bradley_terry(difference, prob_a, l2)
    axes = directions_with(difference, guide, min(POLICY_DIRECTIONS, difference.shape[1]))
    x = np.ascontiguousarray(difference @ axes)
    start = _policy_start(x, axes.T @ guide, k, seed)
    theta, weights = _minimise_policy(x, prob_a, start, POLICY_L2_GRID[int(np.argmin(errors))], steps=100)
    found = np.asarray(axes @ theta)
    near = np.column_stack([cap_disagreement(member, guide, difference, prob_a, bound) for member in found.T])
    soft = sigmoid(scores(difference, near))
    if not np.array_equal(near, found):  # the shares are linear in the weights, so these can be solved anew
        weights = simplex_least_squares(soft, prob_a)
    return JointFit(near, weights, brier(soft @ weights, prob_a))


def _policy_start(x: Array, guide: FloatArray, k: int, seed: int) -> FloatArray:
    noise = np.random.default_rng([seed, 3]).standard_normal((len(guide), k))
    strength = POLICY_NOISE * np.std(scores(x, guide)) / np.maximum(np.std(scores(x, noise), axis=0), 1e-12)
    return np.asarray(guide[:, None] + strength * noise)


def _minimise_policy(
    x: Array, prob_a: FloatArray, start: FloatArray, l2: float, steps: int
) -> tuple[FloatArray, FloatArray]:
    objective = policy_loss(x, prob_a, l2, start.shape[1])
    unknowns = np.append(start.ravel(), np.zeros(start.shape[1]))
    found = minimize(objective, unknowns, jac=True, method="L-BFGS-B", options={"maxiter": steps}).x
    theta, logits = found[: start.size].reshape(start.shape), found[start.size :]
    return theta, _softmax(logits)


def policy_loss(x: Array, prob_a: FloatArray, l2: float, k: int) -> Callable[[FloatArray], tuple[float, FloatArray]]:
    """Return (θ, logits of α) ↦ (mean (Σ_j α_j σ(θ_j·d) − p)² + l2/k Σ_j |θ_j|², its gradient)."""
    n, m = x.shape

    def value_and_gradient(unknowns: FloatArray) -> tuple[float, FloatArray]:
        theta, weights = unknowns[: m * k].reshape(m, k), _softmax(unknowns[m * k :])
        soft = sigmoid(scores(x, theta))
        error = soft @ weights - prob_a
        slope = (2 / n) * error[:, None] * weights * soft * (1 - soft)
        of_theta = x.T @ slope.astype(x.dtype) + (2 * l2 / k) * theta
        of_weights = (2 / n) * (error @ soft)
        of_logits = weights * (of_weights - weights @ of_weights)
        value = float(np.mean(error**2) + l2 / k * np.sum(theta**2))
        return value, np.append(of_theta.ravel(), of_logits)

    return value_and_gradient


def _softmax(logits: FloatArray) -> FloatArray:
    raised = np.exp(logits - logits.max())
    return np.asarray(raised / raised.sum())
