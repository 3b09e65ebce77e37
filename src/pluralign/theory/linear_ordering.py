"""The linear ordering problem: the ranking of greatest weight, given a weight per ordered pair of alternatives.

The problem is NP-hard, and all known exact methods take exponential time. The solution here is exact up to
``EXACT_UP_TO`` alternatives; for more, a local search may miss the optimum.
"""

import functools

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, IntArray
from pluralign.core.errors import UsageError
from pluralign.theory.rankings import Ranking

EXACT_UP_TO = 16
"""Largest number of alternatives that is solved exactly, over all 2^m subsets (about 10 ms at 16)."""
RESTARTS = 20
"""Starting points of the local search."""
NO_GAIN = 1e-12
"""A move must improve a ranking by more than this."""


def best_ranking(weights: npt.ArrayLike) -> tuple[Ranking, float]:
    """Find the ranking of greatest weight exactly:  max_σ Σ_{i before j in σ} weights_ij.

    Dynamic programming over the sets S of the alternatives ranked first:
    best(S) = max_{i ∈ S} best(S − i) + Σ_{j ∈ S − i} w_ji. With weight 1 on the arcs of a digraph, the arcs that the
    ranking reverses are a minimum feedback arc set, the problem from which Theorem 1 is proved.

    Args:
        weights: ``(m, m)`` with m at most ``EXACT_UP_TO``; the diagonal is ignored.

    Returns:
        The ranking and its weight.

    Example:
        >>> best_ranking([[0, 1, 0], [0, 0, 1], [0.5, 0, 0]])
        ((0, 1, 2), 2.0)

    Reference: App. D.1; Lawler, "A comment on minimum feedback arc sets" (1964).
    """
    w = np.asarray(weights, dtype=np.float64)
    m = len(w)
    if w.shape != (m, m) or not 1 <= m <= EXACT_UP_TO:
        raise UsageError(f"weights must be a square matrix for at most {EXACT_UP_TO} alternatives, not {w.shape}.")
    after = np.zeros((1 << m, m))  # after[S, i] = Σ_{j ∈ S} w_ji
    for j in range(m):
        np.add(after[: 1 << j], w[j], out=after[1 << j : 2 << j])
    best, last = np.zeros(1 << m), np.zeros(1 << m, dtype=np.int64)
    for sets, members, others in _subsets_by_size(m):
        values = best[others] + after[others, members]
        choice = values.argmax(axis=1)[:, None]
        best[sets] = np.take_along_axis(values, choice, axis=1)[:, 0]
        last[sets] = np.take_along_axis(members, choice, axis=1)[:, 0]
    ranking: list[int] = []
    left = (1 << m) - 1
    while left:
        ranking.append(int(last[left]))
        left ^= 1 << ranking[-1]
    return tuple(reversed(ranking)), float(best[-1])


@functools.lru_cache(maxsize=1)
def _subsets_by_size(m: int) -> list[tuple[IntArray, IntArray, IntArray]]:
    """Return, for sizes 1 … m: the sets as bit masks, their members, and the sets without each member."""
    masks = np.arange(1 << m)
    bits = (masks[:, None] >> np.arange(m)) & 1
    layers = []
    for size in range(1, m + 1):
        sets = masks[bits.sum(axis=1) == size]
        members = np.nonzero(bits[sets])[1].reshape(-1, size)
        layers.append((sets, members, sets[:, None] ^ (1 << members)))
    return layers


def local_search_ranking(weights: FloatArray, rng: np.random.Generator) -> tuple[Ranking, float]:
    """Find a ranking that no move of a single alternative improves: the best of ``RESTARTS`` local searches."""
    m = len(weights)
    gain = weights - weights.T
    np.fill_diagonal(gain, 0.0)
    borda = gain.sum(axis=1)
    spread = np.linspace(0.0, 2.0, RESTARTS)[:, None] * (borda.std() + NO_GAIN)
    orders = np.argsort(-borda - spread * rng.normal(size=(RESTARTS, m)), axis=1)
    searches = np.arange(RESTARTS)
    while True:
        ordered = gain[orders[:, :, None], orders[:, None, :]]
        # moves[n, a, b]: gain of search n if it moves the alternative at place a to place b
        upward = np.cumsum(np.tril(ordered)[:, :, ::-1], axis=2)[:, :, ::-1]
        moves = (upward - np.cumsum(np.triu(ordered), axis=2)).reshape(RESTARTS, -1)
        best = moves.argmax(axis=1)
        best[moves[searches, best] <= NO_GAIN] = 0  # from the first place to the first: no move
        if not best.any():
            break
        a, b = np.divmod(best, m)
        places = np.tile(np.arange(m, dtype=np.float64), (RESTARTS, 1))
        places[searches, a] = b + np.where(b > a, 0.5, -0.5)
        orders = np.take_along_axis(orders, np.argsort(places, axis=1), axis=1)
    values = np.triu(weights[orders[:, :, None], orders[:, None, :]], 1).sum(axis=(1, 2))
    return tuple(orders[values.argmax()].tolist()), float(values.max())
