"""Bradley–Terry rewards from vote shares: logistic regression on feature differences, by Newton's method.

The target is the share of votes (soft labels) or the majority (hard labels). The fit is a baseline, the teacher of
``joint``, and the classifier inside ``stagewise``.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from scipy.linalg import eigh

from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.core.random_streams import MIXTURE, random_stream
from pluralign.learning.pairs import Matrix, SharesOf, gram, scores
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
    theta: npt.ArrayLike, difference: Matrix, target: npt.ArrayLike, l2: float, weight: npt.ArrayLike = 1.0
) -> float:
    """Return the mean cross-entropy between σ(θ · difference) and the target share, plus l2/2 |θ|².

    L(θ) = mean_i w_i (log(1 + exp(z_i)) - t_i z_i) + l2/2 |θ|²,   z_i = θ · difference_i.

    Reference: App. "BT Objective", the soft-label objective with cross-entropy.
    """
    z = scores(difference, theta)
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
) -> FloatArray:
    """Return the reward that minimises ``bradley_terry_loss``, which is strictly convex.

    Args:
        difference: features of response a minus those of b, ``(n, d)``.
        target: share to predict, in [0, 1], ``(n,)``.
        l2: regularisation strength, above 0.
        weight: weight of each pair, ``(n,)``.
        start: initial θ, ``(d,)``; zeros by default.
        steps: maximum number of Newton steps.

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
    loss = bradley_terry_loss(theta, difference, t, l2, w)
    for _ in range(steps):
        p = sigmoid(scores(difference, theta))
        gradient = (w * (p - t)).astype(difference.dtype) @ difference / n + l2 * theta
        hessian = gram(difference, w * p * (1 - p))
        hessian[np.diag_indices(d)] += l2
        step = np.linalg.solve(hessian, gradient)
        gain, length = float(gradient @ step), 1.0
        while (new := bradley_terry_loss(theta - length * step, difference, t, l2, w)) > loss - 1e-4 * length * gain:
            length /= 2
            if length < 1e-6:
                return theta
        theta, loss, gained = theta - length * step, new, loss - new
        if gained < NEWTON_TOLERANCE * max(loss, 1e-3):
            break
    return theta


def fit_path(difference: Matrix, target: npt.ArrayLike, l2_grid: Sequence[float] = L2_GRID) -> FloatArray:
    """Fit each regularisation strength in turn, starting from the previous fit; return ``(len(l2_grid), d)``."""
    path: list[FloatArray] = []
    for l2 in l2_grid:
        path.append(fit_bradley_terry(difference, target, l2, start=path[-1] if path else None))
    return np.stack(path)


def path_shares(x: Array, target: FloatArray, l2_grid: Sequence[float] = L2_GRID) -> SharesOf:
    """Return the shares σ(θ·x) that a reward of each strength, fitted to the target without a fold, predicts for it."""
    return lambda fold: sigmoid(scores(x[fold], fit_path(x[~fold], target[~fold], l2_grid).T)).T


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
    x: Array, prob_a: FloatArray, guide: FloatArray, k: int, *, l2: float, seed: int = 0, rounds: int = EM_ROUNDS
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

    Returns:
        The rewards, ``(m, k)``, and π, ``(k,)``.
    """
    noise = random_stream(seed, MIXTURE).standard_normal((x.shape[1], k))
    members = guide[:, None] + np.std(scores(x, guide)) * noise / np.maximum(np.std(scores(x, noise), axis=0), 1e-12)
    weights = np.full(k, 1 / k)
    for _ in range(rounds):
        soft = np.clip(sigmoid(scores(x, members)), SMALLEST, 1 - SMALLEST)
        for_a = weights * soft / (soft @ weights)[:, None] * prob_a[:, None]
        for_b = weights * (1 - soft) / ((1 - soft) @ weights)[:, None] * (1 - prob_a)[:, None]
        count = np.maximum(for_a + for_b, 1e-9)
        for j in range(k):
            target, weight = for_a[:, j] / count[:, j], count[:, j] / count[:, j].mean()
            members[:, j] = fit_bradley_terry(x, target, l2, weight=weight, start=members[:, j], steps=2)
        weights = count.mean(axis=0) / count.mean(axis=0).sum()
    return members, weights


def mixture_shares(x: Array, prob_a: FloatArray, k: int, *, l2: float, seed: int = 0) -> SharesOf:
    """Return the shares that a mixture of each regularisation strength, fitted without a fold, predicts for it.

    Args:
        x: differences, ``(n, m)``.
        prob_a: share of people preferring a, ``(n,)``.
        k: number of groups.
        l2: regularisation of the single reward that groups start from; strengths are its products with ``FACTORS``.
        seed: of the noise.
    """

    def shares_of(fold: Mask) -> Iterator[FloatArray]:
        rest, p = x[~fold], prob_a[~fold]
        guide = fit_bradley_terry(rest, p, l2)
        for factor in FACTORS:
            members, weights = fit_em(rest, p, guide, k, l2=factor * l2, seed=seed, rounds=SEARCH_ROUNDS)
            yield sigmoid(scores(x[fold], members)) @ weights

    return shares_of
