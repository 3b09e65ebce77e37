"""How alike two sets of rewards are: agreement of votes, and the distance between two ensembles.

Shares of votes do not determine the rewards behind them (§2, non-identifiability). These functions measure how far
apart the members of two ensembles are, whatever their predicted shares. The theory is in
docs/explanation/identifiability.md.
"""

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from pluralign.core.arrays import FloatArray
from pluralign.theory.checks import checked


def agreement(votes: npt.ArrayLike, others: npt.ArrayLike) -> FloatArray:
    """Return how often two sets of voters prefer the same response, ``(n_voters, n_others)``.

    A_ij = mean over pairs of v_i w_j + (1 − v_i)(1 − w_j): the share of pairs with the same vote. A tie (½) is half an
    agreement with any vote.

    Args:
        votes: v, ``(n_pairs, n_voters)``.
        others: w, ``(n_pairs, n_others)``.

    Example:
        >>> agreement([[1.0], [0.0], [0.5]], [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
        array([[0.5       , 0.16666667]])
    """
    v, w = np.asarray(votes, dtype=np.float64), np.asarray(others, dtype=np.float64)
    return np.asarray((v.T @ w + (1 - v).T @ (1 - w)) / len(v))


def transport_cost(cost: npt.ArrayLike, weights: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """Return the earth mover's distance between two weightings.

    min Σ_ij T_ij c_ij over T ≥ 0 with row sums ``weights`` and column sums ``others``.

    Args:
        cost: c, ``(k, l)``.
        weights: α, on the simplex, ``(k,)``.
        others: α′, on the simplex, ``(l,)``.

    Example:
        >>> round(transport_cost([[0.0, 1.0], [1.0, 0.0]], [0.75, 0.25], [0.5, 0.5]), 6)
        0.25
    """
    c = np.asarray(cost, dtype=np.float64)
    a, b = np.asarray(weights, dtype=np.float64), np.asarray(others, dtype=np.float64)
    k, n = c.shape
    sums = np.vstack([np.kron(np.eye(k), np.ones(n)), np.kron(np.ones(k), np.eye(n))])
    marginals = np.concatenate([a / a.sum(), b / b.sum()])
    # The last equation follows from the others; without it, rounding cannot make them contradict each other.
    solution = linprog(c.ravel(), A_eq=sums[:-1], b_eq=marginals[:-1])
    if not solution.success:
        raise ValueError(f"the transport problem has no solution: {solution.message}")
    return float(max(0.0, solution.fun))


def member_distance(matrix: npt.ArrayLike, weights: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """Return the distance between the members of two ensembles.

    W = min_T Σ_ij T_ij (1 − A_ij): members are matched in the best way, and a matched pair costs the share of pairs
    on which its votes differ. It is 0 only if the members vote alike, with the same weights.

    Args:
        matrix: A, the ``agreement`` of their members, ``(k, l)``.
        weights: of the first ensemble, ``(k,)``.
        others: weights of the second ensemble, ``(l,)``.
    """
    return transport_cost(1 - checked("matrix", matrix, np.shape(matrix)), weights, others)


def even_part_distance(matrix: npt.ArrayLike, weights: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """Return the distance between the even parts of two ensembles.

    The even part of an ensemble has each member r and its opposite −r with half of the weight; it predicts ½ on every
    pair. The opposite of a member disagrees where the member agrees, so the distance is W = min_T Σ_ij T_ij c_ij with
    c_ij = min(A_ij, 1 − A_ij). Arguments as in ``member_distance``.
    """
    a = checked("matrix", matrix, np.shape(matrix))
    return transport_cost(np.minimum(a, 1 - a), weights, others)


def unmatched_distance(matrix: npt.ArrayLike, weights: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """Return how often two members drawn independently from the two ensembles disagree: Σ_ij α_i α′_j (1 − A_ij).

    It bounds ``member_distance`` from above. Arguments as in ``member_distance``.

    Example:
        >>> unmatched_distance([[1.0, 0.0], [0.0, 1.0]], [0.5, 0.5], [0.5, 0.5])
        0.5
    """
    a, b = np.asarray(weights, dtype=np.float64), np.asarray(others, dtype=np.float64)
    return float(a @ (1 - checked("matrix", matrix, np.shape(matrix))) @ b)
