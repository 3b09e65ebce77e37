"""Bradley–Terry rewards from vote shares, mixtures of them, and the teachers of joint ensembles.

Seventh file of the joint fit. A reward is a logistic regression on feature differences, fitted by Newton's method. The
target is the share of votes (soft labels) or the majority (hard labels). Such fits are baselines, the teacher of
``joint``, and the classifier inside ``stagewise``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.linalg import eigh

from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.core.random_streams import MIXTURE, random_stream
from pluralign.learning.pairs import (
    Matrix,
    Pairs,
    SharesOf,
    brier_on_folds,
    first_columns,
    gram,
    row_squares,
    scale_rows,
    scores,
)
from pluralign.theory.calibration import sigmoid

L2_GRID = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)
"""Regularisation strengths to choose from, strongest first. Each fit starts from the previous one."""
SEARCH_DIRECTIONS = 128
"""Regularisation strengths are compared in this many principal directions: accurate enough, and ten times cheaper."""
FEW_DIRECTIONS = 64
"""Mixtures and the members of ensembles are fitted in this many principal directions."""
NEWTON_STEPS = 30
NEWTON_TOLERANCE = 1e-7
"""Newton's method stops when a step lowers the loss by less than this fraction."""


def bradley_terry_loss(
    theta: npt.ArrayLike,
    difference: Matrix,
    target: npt.ArrayLike,
    l2: float,
    weight: npt.ArrayLike = 1.0,
    log_ratio: npt.ArrayLike = 0.0,
) -> float:
    """Return the mean cross-entropy between σ(θ · difference) and the target share, plus l2/2 |θ|².

    L(θ) = mean_i w_i (log(1 + exp(z_i)) - t_i z_i) + l2/2 |θ|²,   z_i = θ · difference_i + log_ratio_i.

    Reference: App. "BT Objective", the soft-label objective with cross-entropy.
    """
    z = scores(difference, theta) + np.asarray(log_ratio)
    losses = np.logaddexp(0.0, z) - np.asarray(target) * z
    return float(np.mean(np.asarray(weight) * losses) + 0.5 * l2 * np.sum(np.asarray(theta, dtype=np.float64) ** 2))


def fit_bradley_terry(
    difference: Matrix,
    target: npt.ArrayLike,
    l2: float,
    *,
    weight: npt.ArrayLike = 1.0,
    start: npt.ArrayLike | None = None,
    steps: int = NEWTON_STEPS,
    log_ratio: npt.ArrayLike = 0.0,
) -> FloatArray:
    """Return the reward that minimises ``bradley_terry_loss``, which is strictly convex.

    Args:
        difference: features of response a minus those of b, ``(n, d)``.
        target: share to predict, in [0, 1], ``(n,)``.
        l2: regularisation strength, above 0.
        weight: weight of each pair, ``(n,)``.
        start: initial θ, ``(d,)``; zeros by default.
        steps: maximum number of Newton steps.
        log_ratio: log π_ref(a)/π_ref(b), which is added to each logit, ``(n,)``.

    Returns:
        θ, ``(d,)``.

    Example:
        >>> theta = fit_bradley_terry(np.array([[1.0], [1.0]]), [0.75, 0.75], l2=1e-9)
        >>> sigmoid(theta).round(4)
        array([0.75])
    """
    n, d = difference.shape
    t, w = np.asarray(target, dtype=np.float64), np.broadcast_to(np.asarray(weight, dtype=np.float64), (n,))
    theta = np.zeros(d) if start is None else np.array(start, dtype=np.float64)
    ratio = np.asarray(log_ratio, dtype=np.float64)

    def loss_at(place: FloatArray) -> float:
        return bradley_terry_loss(place, difference, t, l2, w, ratio)

    loss = loss_at(theta)
    for _ in range(steps):
        p = sigmoid(scores(difference, theta) + ratio)
        gradient = (w * (p - t)).astype(difference.dtype) @ difference / n + l2 * theta
        hessian = gram(difference, w * p * (1 - p))
        hessian[np.diag_indices(d)] += l2
        step = np.linalg.solve(hessian, gradient)
        gain, length = float(gradient @ step), 1.0
        while (new := loss_at(theta - length * step)) > loss - 1e-4 * length * gain:
            length /= 2
            if length < 1e-6:
                return theta
        theta, loss, gained = theta - length * step, new, loss - new
        if gained < NEWTON_TOLERANCE * max(loss, 1e-3):
            break
    return theta


def fit_path(
    difference: Matrix,
    target: npt.ArrayLike,
    l2_grid: Sequence[float] = L2_GRID,
    log_ratio: npt.ArrayLike = 0.0,
) -> FloatArray:
    """Fit each regularisation strength in turn, starting from the previous fit; return ``(len(l2_grid), d)``."""
    path: list[FloatArray] = []
    for l2 in l2_grid:
        start = path[-1] if path else None
        path.append(fit_bradley_terry(difference, target, l2, start=start, log_ratio=log_ratio))
    return np.stack(path)


def path_shares(
    x: Array, target: FloatArray, l2_grid: Sequence[float] = L2_GRID, log_ratio: npt.ArrayLike = 0.0
) -> SharesOf:
    """Return the shares that a reward of each strength, fitted to the target without a fold, predicts for it.

    They are σ(θ·x + log π_ref(a)/π_ref(b)).
    """
    ratio = np.broadcast_to(np.asarray(log_ratio, dtype=np.float64), len(target))

    def shares_of(fold: Mask) -> FloatArray:
        path = fit_path(x[~fold], target[~fold], l2_grid, ratio[~fold])
        return sigmoid(scores(x[fold], path.T) + ratio[fold, None]).T

    return shares_of


def principal_directions(difference: Matrix, m: int) -> Array:
    """Return the m directions in which differences vary most, as orthonormal columns ``(d, m)``."""
    n, d = difference.shape
    if isinstance(difference, np.ndarray) and m < n < d // 2:
        # With fewer pairs than features, the eigenvectors u of X X' are smaller: X' u / √λ are those of X' X.
        x = difference.astype(np.float64)
        values, small = eigh(x @ x.T, subset_by_index=[n - m, n - 1])
        if values[0] > 1e-9 * values[-1]:
            return np.ascontiguousarray((x.T @ (small / np.sqrt(values)))[:, ::-1].astype(difference.dtype))
    matrix = gram(difference)
    # A few of many eigenvectors are found faster on their own.
    vectors = eigh(matrix, subset_by_index=[d - m, d - 1])[1] if 4 * m < d else np.linalg.eigh(matrix)[1]
    return np.ascontiguousarray(vectors[:, ::-1][:, :m].astype(difference.dtype))


def directions_with(difference: Matrix, theta: FloatArray, m: int = FEW_DIRECTIONS) -> Array:
    """Return m principal directions, and the rest of ``theta`` if they do not span it, ``(d, m)`` or ``(d, m + 1)``."""
    return with_rest_of(theta, principal_directions(difference, m))


def with_rest_of(theta: FloatArray, leading: Array) -> Array:
    """Return orthonormal directions, and the rest of ``theta`` if they do not span it, ``(d, m)`` or ``(d, m + 1)``."""
    rest = theta - leading @ (leading.T @ theta)
    length = float(np.linalg.norm(rest))
    if length <= 1e-5 * float(np.linalg.norm(theta)):  # rounding error: it would add some direction a second time
        return leading
    return np.column_stack([leading, rest / length]).astype(leading.dtype)


# --- Mixtures of Bradley–Terry rewards by EM: a baseline, and a teacher of joint ensembles.


EM_ROUNDS, SEARCH_ROUNDS = 12, 4
"""Rounds of a final fit, and of fits that choose the regularisation."""
SEARCH_FOLDS = 2
"""At most this many folds choose the regularisation."""
FACTORS = (0.3, 1.0, 3.0)
"""Regularisation strengths to choose from, relative to that of the single reward that groups start from."""
SMALLEST = 1e-9
"""Smallest probability of a vote in a group, so that no group is impossible."""


def fit_em(
    x: Array,
    prob_a: FloatArray,
    guide: FloatArray,
    k: int,
    *,
    l2: float,
    seed: int = 0,
    rounds: int = EM_ROUNDS,
    log_ratio: npt.ArrayLike = 0.0,
) -> tuple[FloatArray, FloatArray]:
    """Fit a mixture of k Bradley–Terry models by EM: each vote comes from one of k groups of people.

    E: a vote for a comes from group j with probability ∝ π_j σ(Δr_j), a vote for b ∝ π_j (1 − σ(Δr_j)).
    M: each group's reward is fitted to its share of the votes by two Newton steps from its last value, and π_j is
    that share.

    Args:
        x: differences, ``(n, m)``.
        prob_a: share of people preferring a, ``(n,)``.
        guide: the reward that all groups start from, with noise added, ``(m,)``.
        k: number of groups.
        l2: regularisation strength of each group's reward.
        seed: of the noise.
        rounds: number of E and M steps.
        log_ratio: log π_ref(a)/π_ref(b), which is added to Δr, ``(n,)``.

    Returns:
        The rewards, ``(m, k)``, and π, ``(k,)``.
    """
    noise = random_stream(seed, MIXTURE).standard_normal((x.shape[1], k))
    members = guide[:, None] + np.std(scores(x, guide)) * noise / np.maximum(np.std(scores(x, noise), axis=0), 1e-12)
    weights, ratio = np.full(k, 1 / k), np.broadcast_to(np.asarray(log_ratio, dtype=np.float64), len(x))
    for _ in range(rounds):
        soft = np.clip(sigmoid(scores(x, members) + ratio[:, None]), SMALLEST, 1 - SMALLEST)
        for_a = weights * soft / (soft @ weights)[:, None] * prob_a[:, None]
        for_b = weights * (1 - soft) / ((1 - soft) @ weights)[:, None] * (1 - prob_a)[:, None]
        count = np.maximum(for_a + for_b, 1e-9)
        for j in range(k):
            target, weight = for_a[:, j] / count[:, j], count[:, j] / count[:, j].mean()
            members[:, j] = fit_bradley_terry(
                x, target, l2, weight=weight, start=members[:, j], steps=2, log_ratio=ratio
            )
        weights = count.mean(axis=0) / count.mean(axis=0).sum()
    return members, weights


def mixture_shares(
    x: Array, prob_a: FloatArray, k: int, *, l2: float, seed: int = 0, log_ratio: npt.ArrayLike = 0.0
) -> SharesOf:
    """Return the shares that a mixture of each regularisation strength, fitted without a fold, predicts for it.

    Args:
        x: differences, ``(n, m)``.
        prob_a: share of people preferring a, ``(n,)``.
        k: number of groups.
        l2: regularisation of the single reward that groups start from; strengths are its products with ``FACTORS``.
        seed: of the noise.
        log_ratio: log π_ref(a)/π_ref(b), which is added to Δr, ``(n,)``.
    """
    ratio = np.broadcast_to(np.asarray(log_ratio, dtype=np.float64), len(x))

    def shares_of(fold: Mask) -> Iterator[FloatArray]:
        rest, p, of_rest = x[~fold], prob_a[~fold], ratio[~fold]
        guide = fit_bradley_terry(rest, p, l2, log_ratio=of_rest)
        for factor in FACTORS:
            members, weights = fit_em(
                rest, p, guide, k, l2=factor * l2, seed=seed, rounds=SEARCH_ROUNDS, log_ratio=of_rest
            )
            yield sigmoid(scores(x[fold], members) + ratio[fold, None]) @ weights

    return shares_of


# --- Teachers. Joint members learn mostly from the share that a teacher predicts, which has no vote noise. Teachers see
# damped feature differences: votes on very different texts (one of them junk, say) are less extreme than a logistic
# model predicts. Damping and regularisation are chosen on validation prompts.


DAMPING_GRID = (0.0, 1.0, 3.0, 10.0)
TEACHER_L2_GRID = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
VOICES = 8
"""Number of rewards in the mixture."""


@dataclass(frozen=True)
class Teacher:
    """One Bradley–Terry reward, and a mixture of several, on damped differences."""

    theta: FloatArray
    """The one reward, ``(d,)``."""
    voices: FloatArray
    """The rewards of the mixture, ``(d, n_voices)``."""
    voice_weights: FloatArray
    """π, ``(n_voices,)``, with sum 1."""
    axes: Array
    """The leading directions of damped differences, and the rest of ``theta``: orthonormal columns, ``(d, m)``."""
    damping: float
    """c, chosen on validation prompts."""
    mean_square: float
    """mean |d|² of the training pairs, the unit of damping."""
    l2: float
    """Regularisation strength of the one reward, chosen on validation prompts."""
    voices_l2: float | None
    """Regularisation strength of the mixture, chosen on validation prompts. None for a mixture of the one reward."""

    def squares(self, difference: Matrix) -> Array:
        """Return |d|² of each pair as damping takes it, ``(n,)``."""
        return row_squares(difference)

    def damp(self, difference: Matrix) -> Matrix:
        """Return d·√((1+c)/(1+c|d|²/mean|d|²)), ``(n, d)``."""
        return damp(difference, self.damping, self.mean_square, self.squares)

    def prob_hat(self, difference: Matrix) -> FloatArray:
        """Return the share that the one reward predicts, σ(θ·d̃), ``(n,)``."""
        return sigmoid(scores(self.damp(difference), self.theta))

    def leading_axes(self, m: int | None) -> Array:
        """Return the first m leading directions and the rest of ``theta``, ``(d, m + 1)``; None for all axes."""
        if m is None or m >= FEW_DIRECTIONS:
            return self.axes
        return with_rest_of(self.theta, self.axes[:, :m])

    def refit(self, pairs: Pairs, seed: int = 0) -> "Teacher":
        """Return the teacher fitted to other pairs, with the same damping and regularisation."""
        return _fit(pairs, self.damping, self.mean_square, self.l2, self.voices_l2, seed)


@dataclass(frozen=True)
class TrainedTeacher(Teacher):
    """Rewards that were trained together with some of the features, on the same pairs.

    On these pairs the trained features fit the votes too well, so nothing is fitted to them again. Damping takes the
    other features.
    """

    n_frozen: int = 0
    """Number of inputs that were not trained; they come first."""

    def squares(self, difference: Matrix) -> Array:
        """Return |d|² of each pair over the inputs that were not trained, ``(n,)``."""
        return row_squares(first_columns(difference, self.n_frozen))

    def leading_axes(self, m: int | None) -> Array:  # noqa: ARG002
        """Return all axes: the directions of the trained rewards have no order."""
        return self.axes

    def refit(self, pairs: Pairs, seed: int = 0) -> "TrainedTeacher":  # noqa: ARG002
        """Return the teacher as it is."""
        return self


def trained_teacher(
    base: Teacher, pairs: Pairs, rewards: FloatArray, theta: FloatArray, weights: FloatArray
) -> TrainedTeacher:
    """Return a teacher from rewards that were trained, with the directions that members may use.

    Args:
        base: the teacher on the frozen inputs that the training started from.
        pairs: the training pairs. Their first inputs are those of ``base``.
        rewards: the rewards of the mixture, ``(d, n_voices)``.
        theta: the one reward, ``(d,)``.
        weights: weights of the mixture, ``(n_voices,)``.
    """
    difference = pairs.difference
    teacher = TrainedTeacher(
        theta, rewards, weights, rewards, base.damping, base.mean_square, base.l2, base.voices_l2, len(base.theta)
    )
    leading = principal_directions(teacher.damp(difference), min(FEW_DIRECTIONS, len(theta)))
    own = np.column_stack([rewards, theta])
    own = own / np.maximum(np.linalg.norm(own, axis=0), 1e-12)
    left, size, _ = np.linalg.svd(np.column_stack([leading, own]), full_matrices=False)
    return replace(teacher, axes=np.ascontiguousarray(left[:, size > 1e-4 * size[0]], dtype=difference.dtype))


def damp(
    difference: Matrix, damping: float, mean_square: float, squares: Callable[[Matrix], Array] = row_squares
) -> Matrix:
    """Shorten long differences: d·√((1+c)/(1+c|d|²/mean|d|²)).

    Args:
        difference: d, ``(n, d)``.
        damping: c; 0 changes nothing.
        mean_square: mean|d|².
        squares: returns |d|² of each pair, ``(n,)``.

    Example:
        >>> damp(np.array([[1.0, 0.0], [3.0, 0.0]]), 3.0, 1.0).round(3)
        array([[1.   , 0.   ],
               [1.134, 0.   ]])
    """
    if damping == 0:
        return difference
    factor = damping_factor(squares(difference), damping, mean_square)
    return scale_rows(difference, factor.astype(difference.dtype))


def mean_row_square(difference: Matrix) -> float:
    """Return mean |d|², the unit of damping; 1 if all differences are 0."""
    return float(np.mean(row_squares(difference), dtype=np.float64)) or 1.0


def damping_factor(squares: Array, damping: float, mean_square: float) -> FloatArray:
    """Return √((1+c)/(1+c|d|²/mean|d|²)) from |d|², ``(n,)``."""
    return np.asarray(np.sqrt((1 + damping) / (1 + damping * squares / mean_square)), dtype=np.float64)


def fit_teacher(
    pairs: Pairs,
    folds: Sequence[Mask],
    dampings: Sequence[float] = DAMPING_GRID,
    seed: int = 0,
    *,
    mixture: bool = True,
) -> Teacher:
    """Fit the teacher with the damping and regularisation that have the lowest Brier score on validation prompts.

    The first fold keeps half of the dampings for the other folds.

    Args:
        pairs: the training pairs.
        folds: masks of validation pairs, ``(n,)`` each.
        dampings: values of c to choose from.
        seed: of the start of the mixture.
        mixture: whether to fit the mixture too.
    """
    difference, prob_a, ratio = pairs.difference, pairs.prob_a, pairs.log_ratio
    mean_square = mean_row_square(difference)
    directions = principal_directions(difference, SEARCH_DIRECTIONS)

    def errors(damping: float, some: Sequence[Mask]) -> FloatArray:
        reduced = damp(difference, damping, mean_square) @ directions
        return brier_on_folds(prob_a, some, path_shares(reduced, prob_a, TEACHER_L2_GRID, ratio))

    found = {damping: errors(damping, folds[:1]) for damping in dampings}
    if len(folds) > 1:
        best = sorted(dampings, key=lambda damping: float(found[damping].min()))[: -(-len(dampings) // 2)]
        n = len(folds)
        found = {damping: found[damping] / n + errors(damping, folds[1:]) * (n - 1) / n for damping in best}
    damping = min(found, key=lambda damping: float(found[damping].min()))
    l2 = TEACHER_L2_GRID[int(np.argmin(found[damping]))]
    if not mixture:
        return _fit(pairs, damping, mean_square, l2, None, seed)
    damped = damp(difference, damping, mean_square)
    leading = damped @ principal_directions(damped, FEW_DIRECTIONS)
    shares_of = mixture_shares(leading, prob_a, VOICES, l2=l2, seed=seed, log_ratio=ratio)
    factor = FACTORS[int(np.argmin(brier_on_folds(prob_a, folds[:SEARCH_FOLDS], shares_of)))]
    return _fit(pairs, damping, mean_square, l2, factor * l2, seed)


def _fit(pairs: Pairs, damping: float, mean_square: float, l2: float, voices_l2: float | None, seed: int) -> Teacher:
    damped, prob_a, ratio = damp(pairs.difference, damping, mean_square), pairs.prob_a, pairs.log_ratio
    theta = fit_bradley_terry(damped, prob_a, l2, log_ratio=ratio)
    axes = directions_with(damped, theta)
    voices, weights = theta[:, None], np.ones(1)
    if voices_l2 is not None:
        guide = axes.T @ theta
        own, weights = fit_em(damped @ axes, prob_a, guide, VOICES, l2=voices_l2, seed=seed, log_ratio=ratio)
        voices = np.asarray(axes @ own)
    return Teacher(theta, voices, weights, axes, damping, mean_square, l2, voices_l2)
