"""The teacher of joint ensembles: a soft-label Bradley–Terry reward on damped feature differences.

Joint members learn mostly from the share that the teacher predicts, which has no vote noise. Damping shortens long
differences: votes on very different texts (one of them junk, say) are less extreme than a logistic model predicts.
Damping and regularisation are chosen on validation prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pluralign.core.arrays import FloatArray, Mask
from pluralign.theory.calibration import brier
from pluralign.theory.logistic import sigmoid
from pluralign.training.bradley_terry import (
    SEARCH_DIRECTIONS,
    fit_bradley_terry,
    fit_path,
    principal_directions,
    scores,
)
from pluralign.training.pairs import Matrix, Pairs, row_squares, scale_rows

DAMPING_GRID = (0.0, 1.0, 3.0)
TEACHER_L2_GRID = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01)


@dataclass(frozen=True)
class Teacher:
    """A soft-label Bradley–Terry reward on damped differences."""

    theta: FloatArray
    """``(d,)``."""
    damping: float
    """c, chosen on validation prompts."""
    mean_square: float
    """mean |d|² of the training pairs, the unit of damping."""
    l2: float
    """Regularisation strength, chosen on validation prompts."""

    def damp(self, difference: Matrix) -> Matrix:
        """Return d·√((1+c)/(1+c|d|²/mean|d|²)), ``(n, d)``."""
        return damp(difference, self.damping, self.mean_square)

    def prob_hat(self, difference: Matrix) -> FloatArray:
        """Return σ(θ·d̃), ``(n,)``."""
        return sigmoid(scores(self.damp(difference), self.theta))


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
    factor = np.sqrt((1 + damping) / (1 + damping * row_squares(difference) / mean_square))
    return scale_rows(difference, factor.astype(difference.dtype))


def fit_teacher(pairs: Pairs, folds: Sequence[Mask], dampings: Sequence[float] = DAMPING_GRID) -> Teacher:
    """Fit the teacher with the damping and regularisation that have the lowest Brier score on validation prompts.

    Args:
        pairs: the training pairs.
        folds: masks of validation pairs, ``(n,)`` each.
        dampings: values of c to choose from.
    """
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
