"""Least squares on the probability simplex: the weights of an ensemble, given the votes of its members."""

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from pluralign.core.arrays import FloatArray

RIDGE = 1e-8
"""Added to the diagonal of the mean-square matrix. Among several optimal solutions it selects the most even one, so
that copies of a member share its weight. It raises the objective by at most this value."""


def simplex_least_squares(matrix: npt.ArrayLike, target: npt.ArrayLike) -> FloatArray:
    """Find the convex combination of columns that is nearest to a target. The solution is exact.

    Solves  min_a  mean_i (sum_j a_j V_ij - p_i)^2   subject to  a_j >= 0,  sum_j a_j = 1.

    On the simplex V a - p = (V - p 1') a = A a, so the problem is to minimise |A a|. Its optimality conditions are
    those of the non-negative least squares problem  min_{b >= 0} |A b|^2 + (sum_j b_j - 1)^2  after scaling b to sum 1:
    there, A'A b = (1 - s) 1 + m with m >= 0, m'b = 0 and s = sum b. So an exact solver for the latter gives the former.

    Args:
        matrix: V, for example the votes of the members, ``(n_rows, n_columns)``.
        target: p, ``(n_rows,)``.

    Returns:
        The weights a, ``(n_columns,)``: non-negative, summing to 1.

    Example:
        >>> simplex_least_squares([[1.0, 0.0], [0.0, 1.0]], [0.75, 0.25]).round(6)
        array([0.75, 0.25])

    Reference: §4, "reoptimize coefficients to minimize the training MSE".
    """
    v, p = np.asarray(matrix, dtype=np.float64), np.asarray(target, dtype=np.float64)
    if v.ndim != 2 or v.shape[0] != p.shape[0] or p.ndim != 1 or not v.size:
        raise ValueError(f"matrix must be (n, k) and target (n,), but they are {v.shape} and {p.shape}.")
    if not (np.isfinite(v).all() and np.isfinite(p).all()):
        raise ValueError("matrix and target must hold finite numbers.")
    k = v.shape[1]
    difference = v - p[:, None]
    gram = difference.T @ difference / len(p)
    # Only A'A matters: any factor F with F'F = A'A gives the same problem, with k rows instead of n.
    values, vectors = np.linalg.eigh(gram + RIDGE * np.eye(k))
    factor = np.sqrt(np.clip(values, 0.0, None))[:, None] * vectors.T
    # Scaling A does not change the solution; without it the row of ones would dominate a nearly perfect fit.
    factor /= max(np.abs(factor).max(), np.finfo(float).tiny)
    solution, _ = nnls(np.vstack([factor, np.ones(k)]), np.append(np.zeros(k), 1.0))
    return np.asarray(solution / solution.sum())


def weights_and_undecided(
    votes: npt.ArrayLike, target: npt.ArrayLike, *, undecided: bool = True
) -> tuple[FloatArray, float]:
    """Find the weights of members and the undecided share that together predict the target best. The solution is exact.

    Solves  min  mean_i (u/2 + (1 - u) sum_j a_j V_ij - p_i)^2  over u in [0, 1] and simplex weights a: least squares on
    the simplex with a constant column of 1/2 beside the votes.

    Args:
        votes: V, ``(n_pairs, n_members)``.
        target: p, ``(n_pairs,)``.
        undecided: False keeps u = 0.

    Returns:
        The weights a, which sum to 1, and u. Where u = 1 the weights have no effect, and they are equal.

    Example:
        >>> weights, u = weights_and_undecided([[1.0, 1.0], [0.0, 1.0]], [0.7, 0.5])
        >>> weights.round(3), round(u, 3)
        (array([0.5, 0.5]), 0.6)
    """
    v = np.asarray(votes, dtype=np.float64)
    if not undecided:
        return simplex_least_squares(v, target), 0.0
    solution = simplex_least_squares(np.column_stack([v, np.full(len(v), 0.5)]), target)
    decided = float(solution[:-1].sum())
    if decided <= 0.0:
        return np.full(v.shape[1], 1 / v.shape[1]), 1.0
    return solution[:-1] / decided, float(solution[-1])
