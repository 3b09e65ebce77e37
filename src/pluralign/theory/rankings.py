"""Mixtures of rankings over the alternatives of one context, and the weighted tournaments they give.

Alternatives are the numbers 0 … m−1; a ranking lists them best first. A tournament is a matrix: ``shares[i, j]`` is the
share of people preferring i to j, and ``shares[j, i]`` is 1 − ``shares[i, j]``. Both are NaN for pairs without votes.
The diagonal is ignored. ``decompose`` decides whether a tournament comes from any mixture, and finds the nearest one;
it needs the ranking of greatest weight (``best_ranking``). Files and names of alternatives are read in
``measuring.rankings``.

Reference: §3.1, App. C and D of "Pairwise Calibrated Rewards for Pluralistic Alignment".
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, IntArray, Mask
from pluralign.core.errors import UsageError
from pluralign.core.types import Progress
from pluralign.theory.calibration import ROUNDING

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
    values: FloatArray, i: IntArray, j: IntArray, m: int, opposite: FloatArray | None = None, diagonal: float = np.nan
) -> FloatArray:
    """Return an ``(m, m)`` matrix with values at (i, j), and ``opposite`` or 1 − values at (j, i)."""
    matrix = np.full((m, m), diagonal)
    matrix[i, j] = values
    matrix[j, i] = 1.0 - values if opposite is None else opposite
    return matrix


# --- The linear ordering problem: the ranking of greatest weight, given a weight per ordered pair of alternatives.


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


# --- Realizability: whether a weighted tournament comes from a mixture of rankings, and the nearest one that does.


Oracle: TypeAlias = Callable[[FloatArray], tuple[Ranking, float]]
"""Returns the best ranking for given weights, and its weight."""

RESIDUAL = 1e-9
"""A tournament is realized if no share differs by more than this."""
CONVERGED = 1e-12
"""Distances and weights below this count as 0."""
READABLE_COEFFICIENT = 60
"""Largest whole number tried as a coefficient of a certificate."""


@dataclass(frozen=True)
class ViolatedInequality:
    """An inequality that every ranking satisfies and the tournament violates, so that no mixture of rankings gives it.

    Σ_n coefficients_n x_{i_n j_n} ≤ bound for all rankings, where (i_n, j_n) = pairs_n. With the shares in place of x
    the sum is value > bound. All coefficients are positive, and whole numbers if possible.
    """

    pairs: tuple[tuple[int, int], ...]
    coefficients: tuple[float, ...]
    bound: float
    value: float
    kind: str
    """``cycle``: i over j, j over k and k over i cannot all hold; ``dual``: the direction from the nearest point."""


@dataclass(frozen=True, eq=False)
class Decomposition:
    """An ensemble of rankings, its distance from a tournament, and a lower bound on that of any ensemble."""

    rankings: tuple[Ranking, ...]
    """Each best alternative first; in order of falling weight. At most one more than the number of known pairs."""
    weights: FloatArray
    """Weights of the rankings: positive, summing to 1."""
    nearest: FloatArray
    """The tournament of this ensemble, ``(m, m)``, including pairs without votes."""
    realizable: bool | None
    """None if not decided, which happens above ``EXACT_UP_TO`` alternatives, or within rounding of the border."""
    distance: float
    """Mean squared error over the known pairs, the calibration error of Definition 1: 0 if realizable."""
    distance_at_least: float
    """Lower bound on the distance of any ensemble; equals ``distance`` up to rounding if ``exact``."""
    residual: float
    """The largest |nearest − share| over the known pairs."""
    certificate: ViolatedInequality | None
    """Proof, if ``realizable`` is False."""
    exact: bool
    """Whether every step used the exact best ranking."""


def decompose(shares: npt.ArrayLike, seed: int = 0, progress: Progress | None = None) -> Decomposition:
    """Find the nearest realizable tournament, a mixture of rankings that attains it, and a proof if it is another one.

    Solves  min_{x ∈ TG} mean_ij (x_ij − t_ij)²  over the known pairs with Wolfe's algorithm, which is column generation
    for a nearest point: x is always the nearest point of the hull of a few affinely independent rankings; the best
    ranking for c = t − x joins them; at the end c·x^σ ≤ c·x for all σ. Then either x = t, or c·t > max_σ c·x^σ
    separates t from TG. There are at most C(m, 2) + 1 rankings, because they are affinely independent (Carathéodory,
    App. C.1).

    Args:
        shares: t, ``(m, m)``, NaN for unknown pairs.
        seed: random seed of the local search, which is used above ``EXACT_UP_TO`` alternatives.
        progress: called with the number of rounds done and 0, because the total is unknown.

    Example:
        >>> result = decompose([[0.5, 0.7, 0.9], [0.3, 0.5, 0.6], [0.1, 0.4, 0.5]])
        >>> result.realizable, len(result.rankings)
        (True, 4)
        >>> cycle = decompose([[0.5, 1, 0], [0, 0.5, 1], [1, 0, 0.5]])
        >>> cycle.realizable, round(cycle.distance, 4), cycle.certificate.bound, cycle.certificate.value
        (False, 0.1111, 2.0, 3.0)

    Reference: §3.1 and App. D.1; Wolfe, "Finding the nearest point in a polytope" (1976).
    """
    table = checked_shares(shares)
    m = len(table)
    i, j = np.nonzero(np.triu(~np.isnan(table), 1))
    exact = m <= EXACT_UP_TO
    oracle: Oracle = best_ranking if exact else functools.partial(local_search_ranking, rng=checked_generator(seed))
    support, weights, least = _nearest_point(table[i, j], i, j, m, oracle, progress)
    by_weight = np.argsort(-weights, kind="stable")
    rankings, weights = tuple(support[n] for n in by_weight), weights[by_weight]
    nearest = tournament_of(rankings, weights)
    error = nearest[i, j] - table[i, j]
    residual, distance = float(np.abs(error).max()), float(np.mean(error**2))
    certificate = None
    if realizable := residual <= RESIDUAL:
        distance = least = 0.0
    else:
        certificate = violated_cycle(table) or _dual_certificate(table, nearest)
        if not exact:  # the local search gives no bound, but a certificate does: every mixture is behind its plane
            least = _depth(certificate) if certificate else 0.0
    decided = True if realizable else False if certificate else None
    at_least = min(max(least, 0.0) ** 2 / len(i), distance)
    return Decomposition(rankings, weights, nearest, decided, distance, at_least, residual, certificate, exact)


def violated_cycle(shares: npt.ArrayLike) -> ViolatedInequality | None:
    """Find the 3-cycle inequality that a tournament violates most: t_ij + t_jk + t_ki ≤ 2.

    No ranking puts i before j, j before k and k before i. In the other direction of the cycle, the inequality says that
    the sum is at least 1. For up to five alternatives these inequalities are sufficient: a tournament that satisfies
    all of them is realizable. For six or more there are others. The search takes m³ steps, so it also works for
    tournaments that are too large for exact methods.

    Example:
        >>> violated_cycle([[0.5, 0.9, 0.2], [0.1, 0.5, 0.8], [0.8, 0.2, 0.5]]).pairs
        ((0, 1), (1, 2), (2, 0))

    Reference: Grötschel, Jünger and Reinelt, "Facets of the linear ordering polytope" (1985).
    """
    t = checked_shares(shares)
    total = np.nan_to_num(t[:, :, None] + t[None, :, :] + t.T[:, None, :], nan=-np.inf)
    i, j, k = (int(index) for index in np.unravel_index(total.argmax(), total.shape))
    if not total[i, j, k] > 2 + RESIDUAL:
        return None
    return ViolatedInequality(((i, j), (j, k), (k, i)), (1.0, 1.0, 1.0), 2.0, float(total[i, j, k]), "cycle")


def _nearest_point(
    target: FloatArray, i: IntArray, j: IntArray, m: int, oracle: Oracle, progress: Progress | None
) -> tuple[list[Ranking], FloatArray, float]:
    """Run Wolfe's algorithm: return rankings and weights of the nearest point, and a lower bound on its distance.

    The bound is Euclidean and holds if the oracle is exact: with c = (t − x)/|t − x|, every point y of the polytope has
    |t − y| ≥ c·(t − y) ≥ c·t − max_σ c·x^σ.
    """

    def best_for(direction: FloatArray) -> tuple[Ranking, FloatArray]:
        ranking, _ = oracle(as_matrix(direction, i, j, m, opposite=-direction, diagonal=0.0))
        return ranking, incidence(np.array([ranking]), i, j)[0] - target

    ranking, vertex = best_for(target - 0.5)
    rankings, vertices, weights = [ranking], vertex[None], np.ones(1)
    point, rounds = vertex, 0
    while True:
        length = float(np.linalg.norm(point))
        if length <= CONVERGED:
            return rankings, weights, 0.0
        ranking, vertex = best_for(-point / length)
        least = float(point @ vertex) / length
        if length - least <= CONVERGED or ranking in rankings:
            return rankings, weights, least
        kept, vertices, weights = _corral(np.vstack([vertices, vertex]), np.append(weights, 0.0))
        rankings = [known for known, stays in zip([*rankings, ranking], kept, strict=True) if stays]
        point = weights @ vertices
        if np.linalg.norm(point) >= length:  # no progress beyond rounding
            return rankings, weights, least
        rounds += 1
        if progress:
            progress(rounds, 0)


def _corral(vertices: FloatArray, weights: FloatArray) -> tuple[Mask, FloatArray, FloatArray]:
    """Move to the point of the vertices' hull that is nearest to 0, and drop vertices that reach weight 0."""
    kept = np.ones(len(weights), dtype=bool)
    while True:
        ones = np.ones(len(weights))
        try:  # the point of the affine hull nearest to 0: V V'a ∝ 1, and adding 11' makes the matrix definite
            affine = np.linalg.solve(vertices @ vertices.T + 1.0, ones)
        except np.linalg.LinAlgError:  # vertices are dependent up to rounding
            affine = np.linalg.lstsq(vertices @ vertices.T + 1.0, ones)[0]
        affine /= affine.sum()
        down = affine <= CONVERGED
        if not down.any():
            return kept, vertices, np.asarray(affine)
        steps = np.full(len(weights), np.inf)
        steps[down] = weights[down] / np.maximum(weights[down] - affine[down], np.finfo(float).tiny)
        weights = weights + min(steps.min(), 1.0) * (affine - weights)
        stays = weights > CONVERGED
        stays[steps.argmin()] = False
        kept[np.flatnonzero(kept)[~stays]] = False
        vertices, weights = vertices[stays], weights[stays] / weights[stays].sum()


def _depth(certificate: ViolatedInequality) -> float:
    """Return the Euclidean distance of the tournament from the half-space that holds all mixtures."""
    return (certificate.value - certificate.bound) / float(np.linalg.norm(certificate.coefficients))


def _dual_certificate(table: FloatArray, nearest: FloatArray) -> ViolatedInequality | None:
    """Return the separating direction t − x as an inequality, in the smallest whole numbers that still separate.

    Its bound is computed exactly, so it may involve at most ``EXACT_UP_TO`` alternatives of the tournament.
    """
    direction = np.nan_to_num(table - nearest)
    direction /= np.abs(direction).max()
    rounded = (np.round(direction * scale) for scale in range(1, READABLE_COEFFICIENT + 1))
    for candidate, margin in itertools.chain(((whole, RESIDUAL) for whole in rounded), [(direction, RESIDUAL / 10)]):
        coefficients = np.maximum(candidate, 0.0)  # −c on x_ij equals c on x_ji, up to a constant
        i, j = np.nonzero(coefficients)
        involved = np.union1d(i, j)
        if not 1 <= len(involved) <= EXACT_UP_TO:
            continue
        value = float(coefficients[i, j] @ table[i, j])
        _, bound = best_ranking(coefficients[np.ix_(involved, involved)])
        if value > bound + margin:
            pairs = tuple(zip(i.tolist(), j.tolist(), strict=True))
            return ViolatedInequality(pairs, tuple(coefficients[i, j].tolist()), bound, value, "dual")
    return None
