"""Mixtures of rankings over the alternatives of one context, and the weighted tournaments they give.

Alternatives are the numbers 0 … m−1; a ranking lists them best first. A tournament is a matrix: ``shares[i, j]`` is the
share of people preferring i to j, and ``shares[j, i]`` is 1 − ``shares[i, j]``. Both are NaN for pairs without votes.
The diagonal is ignored. Whether a tournament comes from any mixture is decided in ``realizability``. Files and names of
alternatives are read in ``analysis.tournament``.

Reference: §3.1, App. C and D of "Pairwise Calibrated Rewards for Pluralistic Alignment".
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, IntArray
from pluralign.core.errors import UsageError
from pluralign.theory.checks import ROUNDING

Ranking: TypeAlias = tuple[int, ...]

MAX_ALTERNATIVES = 50
"""Above this number the linear algebra alone, with C(m, 2) rows, takes minutes."""


def tournament_of(rankings: Sequence[Sequence[int]], weights: npt.ArrayLike) -> FloatArray:
    """Compute the tournament of a mixture of rankings: t_ij = Σ_σ weights_σ 1[σ ranks i before j].

    Returns:
        ``(m, m)``, NaN on the diagonal.

    Example:
        >>> tournament_of([(0, 1, 2), (2, 0, 1)], [0.75, 0.25])
        array([[ nan, 1.  , 0.75],
               [0.  ,  nan, 0.75],
               [0.25, 0.25,  nan]])

    Reference: App. D.1, the tournament graph of a distribution over rankings.
    """
    orders = checked_rankings(rankings)
    alpha = np.asarray(weights, dtype=np.float64)
    if alpha.shape != orders.shape[:1] or not (alpha >= 0).all() or abs(alpha.sum() - 1) > ROUNDING:
        raise UsageError(f"weights must be {len(orders)} numbers that are not negative and sum to 1.")
    m = orders.shape[1]
    i, j = np.triu_indices(m, 1)
    return as_matrix(np.minimum(alpha @ incidence(orders, i, j), 1.0), i, j, m)


def reduce_support(rankings: Sequence[Sequence[int]], weights: npt.ArrayLike) -> tuple[tuple[Ranking, ...], FloatArray]:
    """Select at most C(m, 2) + 1 of the rankings and reweight them so that their tournament stays the same.

    While the vectors (x^σ, 1) are dependent, Σ_σ d_σ (x^σ, 1) = 0 for some d. Adding a multiple of d to the weights
    changes neither the tournament nor their sum, and the right multiple makes one weight 0.

    Args:
        rankings: any rankings, for example those of all people.
        weights: weights of the rankings, summing to 1.

    Returns:
        Rankings and weights, as many as have independent (x^σ, 1).

    Example:
        >>> import itertools
        >>> everybody = list(itertools.permutations(range(3)))
        >>> few, weights = reduce_support(everybody, np.full(6, 1 / 6))
        >>> len(few), bool(np.allclose(tournament_of(few, weights)[0, 1], 0.5))
        (4, True)

    Reference: App. C.1, Carathéodory's theorem.
    """
    tournament_of(rankings, weights)
    orders, alpha = checked_rankings(rankings), np.array(weights, dtype=np.float64)
    i, j = np.triu_indices(orders.shape[1], 1)
    vectors = np.vstack([incidence(orders, i, j).T, np.ones(len(orders))])
    support = np.flatnonzero(alpha > 0)
    while len(support) > 1:
        block = support[: len(vectors) + 1]
        _, singular, directions = np.linalg.svd(vectors[:, block])
        if len(block) <= len(vectors) and singular[-1] > 1e-10 * singular[0]:
            break
        d = directions[-1]  # its sum is 0, so some entry is below 0
        with np.errstate(divide="ignore"):
            steps = np.where(d < 0, -alpha[block] / np.minimum(d, 0.0), np.inf)
        alpha[block] = np.maximum(alpha[block] + steps.min() * d, 0.0)
        alpha[block[steps.argmin()]] = 0.0
        support = np.flatnonzero(alpha > 0)
    return tuple(tuple(orders[n].tolist()) for n in support), alpha[support] / alpha[support].sum()


def sample_rankings(
    rankings: Sequence[Sequence[int]], weights: npt.ArrayLike, k: int, seed: int = 0
) -> tuple[Ranking, ...]:
    """Draw k rankings independently by weight, each with new weight 1/k: the ensemble of Theorem 2's proof.

    Its expected error is ``sampling_error``, at most 1/(4k).

    Example:
        >>> sample_rankings([(0, 1), (1, 0)], [1.0, 0.0], k=2)
        ((0, 1), (0, 1))

    Reference: Theorem 2 and its proof, App. D.2.
    """
    if k < 1:
        raise UsageError(f"k must be at least 1, not {k}.")
    tournament_of(rankings, weights)
    alpha = np.asarray(weights, dtype=np.float64)
    drawn = checked_generator(seed).choice(len(alpha), size=k, p=alpha / alpha.sum())
    orders = checked_rankings(rankings)
    return tuple(tuple(orders[n].tolist()) for n in drawn)


def sampling_error(shares: npt.ArrayLike, k: int) -> float:
    """Compute the expected calibration error of k rankings drawn from a mixture:  mean t (1 − t) / k  ≤  1 / (4k).

    The share of each pair among the k rankings is binomial, with variance t(1 − t)/k around the mixture's share t.

    Example:
        >>> sampling_error([[0.5, 0.75], [0.25, 0.5]], k=3)
        0.0625

    Reference: Theorem 2's proof, App. D.2.
    """
    if k < 1:
        raise UsageError(f"k must be at least 1, not {k}.")
    table = checked_shares(shares)
    t = table[np.triu(~np.isnan(table), 1)]
    return float(np.mean(t * (1 - t)) / k)


def mcgarvey(m: int, arcs: Iterable[tuple[int, int]]) -> tuple[Ranking, ...]:
    """Construct two rankings per arc of a digraph, such that their majorities are its arcs.

    With equal weights, t_ij = ½ + 1/(2n) on each of the n arcs, and ½ between alternatives without an arc. The rankings
    of the arc (i, j) are: i, j, then the rest in order; and the rest in reverse order, then i, j. They agree on i over
    j and cancel elsewhere, so a single arc gives a tournament with a single 1.

    Example:
        >>> mcgarvey(4, [(2, 0)])
        ((2, 0, 1, 3), (3, 1, 2, 0))

    Reference: McGarvey, "A theorem on the construction of voting paradoxes" (1953), as used in App. D.1.
    """
    rankings: list[Ranking] = []
    for i, j in arcs:
        if i == j or not (0 <= i < m and 0 <= j < m):
            raise UsageError(f"an arc must join two of the alternatives 0 to {m - 1}, not {i} and {j}.")
        rest = tuple(other for other in range(m) if other not in (i, j))
        rankings += [(i, j, *rest), (*reversed(rest), i, j)]
    return tuple(rankings)


# --- checks and arrays ------------------------------------------------------------------------------------------------


def checked_generator(seed: int) -> np.random.Generator:
    """Return a random generator. Raises UsageError for a negative seed."""
    if seed < 0:
        raise UsageError(f"seed must not be negative, but it is {seed}.")
    return np.random.default_rng(seed)


def checked_shares(shares: npt.ArrayLike) -> FloatArray:
    """Return shares as a matrix with NaN on the diagonal, and with the opposite of each known share filled in."""
    t = np.array(shares, dtype=np.float64)
    if t.ndim != 2 or t.shape[0] != t.shape[1] or not 2 <= len(t) <= MAX_ALTERNATIVES:
        raise UsageError(f"shares must be a square matrix for 2 to {MAX_ALTERNATIVES} alternatives, not {t.shape}.")
    np.fill_diagonal(t, np.nan)
    if ((t < -ROUNDING) | (t > 1 + ROUNDING) | (np.abs(t + t.T - 1) > ROUNDING)).any():
        raise UsageError("shares must lie between 0 and 1, and those of the two sides of a pair must sum to 1.")
    upper = np.clip(np.where(np.isnan(t), 1 - t.T, t), 0.0, 1.0)
    i, j = np.triu_indices(len(t), 1)
    if np.isnan(upper[i, j]).all():
        raise UsageError("shares must hold at least one pair.")
    return as_matrix(upper[i, j], i, j, len(t))


def checked_rankings(rankings: Sequence[Sequence[int]]) -> IntArray:
    """Return rankings as an array, ``(n_rankings, m)``. Raises UsageError unless each is a permutation of 0 … m−1."""
    try:
        orders = np.array([tuple(ranking) for ranking in rankings], dtype=np.int64)
    except ValueError:
        orders = np.empty(0, dtype=np.int64)
    if orders.ndim != 2 or not orders.size or (np.sort(orders, axis=1) != np.arange(orders.shape[1])).any():
        raise UsageError("every ranking must list the same alternatives 0, 1, …, each once.")
    return orders


def incidence(orders: IntArray, i: IntArray, j: IntArray) -> FloatArray:
    """Return x_ij = 1[i is ranked before j], ``(n_rankings, n_pairs)``."""
    places = np.argsort(orders, axis=1)
    return (places[:, i] < places[:, j]).astype(np.float64)


def as_matrix(
    values: FloatArray,
    i: IntArray,
    j: IntArray,
    m: int,
    opposite: FloatArray | None = None,
    diagonal: float = np.nan,
) -> FloatArray:
    """Return an ``(m, m)`` matrix with values at (i, j), and ``opposite`` or 1 − values at (j, i)."""
    matrix = np.full((m, m), diagonal)
    matrix[i, j] = values
    matrix[j, i] = 1.0 - values if opposite is None else opposite
    return matrix
