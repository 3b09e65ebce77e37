"""The teachers of joint ensembles: a soft-label Bradley–Terry reward, and a mixture of such rewards.

Seventh and last file of the joint fit, on top of ``bradley_terry``. Joint members learn mostly from the share that a
teacher predicts, which has no vote noise. Both teachers see damped feature differences. Damping shortens long
differences: votes on very different texts (one of them junk, say) are less extreme than a logistic model predicts.
Damping and regularisation are chosen on validation prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.learning import bradley_terry as bt
from pluralign.learning.pairs import Matrix, Pairs, brier_on_folds, first_columns, row_squares, scale_rows, scores
from pluralign.theory.calibration import sigmoid

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
        factor = damping_factor(self.squares(difference), self.damping, self.mean_square)
        return scale_rows(difference, factor.astype(difference.dtype)) if self.damping else difference

    def prob_hat(self, difference: Matrix) -> FloatArray:
        """Return the share that the one reward predicts, σ(θ·d̃), ``(n,)``."""
        return sigmoid(scores(self.damp(difference), self.theta))

    def leading_axes(self, m: int | None) -> Array:
        """Return the first m leading directions and the rest of ``theta``, ``(d, m + 1)``; None for all axes."""
        if m is None or m >= bt.FEW_DIRECTIONS:
            return self.axes
        return bt.with_rest_of(self.theta, self.axes[:, :m])

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
    leading = bt.principal_directions(teacher.damp(difference), min(bt.FEW_DIRECTIONS, len(theta)))
    own = np.column_stack([rewards, theta])
    own = own / np.maximum(np.linalg.norm(own, axis=0), 1e-12)
    left, size, _ = np.linalg.svd(np.column_stack([leading, own]), full_matrices=False)
    return replace(teacher, axes=np.ascontiguousarray(left[:, size > 1e-4 * size[0]], dtype=difference.dtype))


def damp(difference: Matrix, damping: float, mean_square: float) -> Matrix:
    """Shorten long differences: d·√((1+c)/(1+c|d|²/mean|d|²)).

    Args:
        difference: d, ``(n, d)``.
        damping: c; 0 changes nothing.
        mean_square: mean|d|².

    Example:
        >>> damp(np.array([[1.0, 0.0], [3.0, 0.0]]), 3.0, 1.0).round(3)
        array([[1.   , 0.   ],
               [1.134, 0.   ]])
    """
    if damping == 0:
        return difference
    factor = damping_factor(row_squares(difference), damping, mean_square)
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
    difference, prob_a = pairs.difference, pairs.prob_a
    mean_square = mean_row_square(difference)
    directions = bt.principal_directions(difference, bt.SEARCH_DIRECTIONS)

    def errors(damping: float, some: Sequence[Mask]) -> FloatArray:
        reduced = damp(difference, damping, mean_square) @ directions
        return brier_on_folds(prob_a, some, bt.path_shares(reduced, prob_a, TEACHER_L2_GRID))

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
    leading = damped @ bt.principal_directions(damped, bt.FEW_DIRECTIONS)
    shares_of = bt.mixture_shares(leading, prob_a, VOICES, l2=l2, seed=seed)
    factor = bt.FACTORS[int(np.argmin(brier_on_folds(prob_a, folds[: bt.SEARCH_FOLDS], shares_of)))]
    return _fit(pairs, damping, mean_square, l2, factor * l2, seed)


def _fit(pairs: Pairs, damping: float, mean_square: float, l2: float, voices_l2: float | None, seed: int) -> Teacher:
    damped = damp(pairs.difference, damping, mean_square)
    theta = bt.fit_bradley_terry(damped, pairs.prob_a, l2)
    axes = bt.directions_with(damped, theta)
    voices, weights = theta[:, None], np.ones(1)
    if voices_l2 is not None:
        own, weights = bt.fit_em(damped @ axes, pairs.prob_a, axes.T @ theta, VOICES, l2=voices_l2, seed=seed)
        voices = np.asarray(axes @ own)
    return Teacher(theta, voices, weights, axes, damping, mean_square, l2, voices_l2)
