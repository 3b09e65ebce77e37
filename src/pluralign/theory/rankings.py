"""One context: which shares of people preferring i to j come from a mixture of rankings, and from which one.

Decided here: whether a weighted tournament is realizable, the nearest one that is, an ensemble of rankings that attains
it, and the proof where there is none. Alternatives are numbers 0 … m−1 and a ranking lists them best first. A
tournament is a matrix: ``shares[i, j]`` is the share preferring i to j, ``shares[j, i]`` is 1 less it, both NaN where
nobody was asked; the diagonal does not count. Files and names of alternatives are left to ``tournaments``.

Every realizable tournament is an average of incidence vectors x^σ (x_ij = 1 where σ ranks i before j): a point of the
linear ordering polytope TG. Deciding whether a point lies in TG is NP-hard (Theorem 1). All of the hardness is in one
step, the best ranking for given weights: exact up to ``EXACT_UP_TO`` alternatives, a search beyond.

Reference: §3.1, App. C and D.1 of "Pairwise Calibrated Rewards for Pluralistic Alignment".
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import UsageError
from pluralign.core.types import Progress

IntArray: TypeAlias = npt.NDArray[np.int64]
Ranking: TypeAlias = tuple[int, ...]
Oracle: TypeAlias = Callable[[FloatArray], tuple[Ranking, float]]

EXACT_UP_TO = 16
"""Alternatives up to which the best ranking is found exactly, over all 2^m subsets (about 10 ms at 16)."""
MAX_ALTERNATIVES = 50
"""Beyond this the linear algebra alone, with C(m, 2) rows, takes minutes."""
RESIDUAL = 1e-9
"""A tournament is realized when no share is missed by more than this."""
CONVERGED = 1e-12
ROUNDING = 1e-6
"""Shares and weights that were once float32 leave [0, 1], or miss the sum 1, by no more than this."""
RESTARTS = 20
READABLE_COEFFICIENT = 60
"""The largest whole number tried as a coefficient of a certificate."""


@dataclass(frozen=True)
class ViolatedInequality:
    """An inequality that every ranking satisfies and the tournament does not: no mixture of rankings gives it.

    Σ_n coefficients_n x_{i_n j_n} ≤ bound for all rankings, where (i_n, j_n) = pairs_n; with the shares it is value >
    bound. All coefficients are positive, whole numbers where such exist.
    """

    pairs: tuple[tuple[int, int], ...]
    coefficients: tuple[float, ...]
    bound: float
    value: float
    kind: str
    """``cycle``: i over j, j over k and k over i cannot all hold; ``dual``: the direction from the nearest point."""


@dataclass(frozen=True, eq=False)
class Decomposition:
    """An ensemble of rankings, how near it comes to a tournament, and whether any could come nearer."""

    rankings: tuple[Ranking, ...]
    """Best alternative first; the heaviest ranking first. At most one more than there are known pairs."""
    weights: FloatArray
    """Of the rankings: positive, summing to 1."""
    nearest: FloatArray
    """The tournament of this ensemble, ``(m, m)``, also for pairs where nobody was asked."""
    realizable: bool | None
    """None: not decided, which happens beyond ``EXACT_UP_TO`` alternatives, or within rounding of the border."""
    distance: float
    """Mean squared error over the known pairs, the calibration error of Definition 1: 0 if realizable."""
    distance_at_least: float
    """No ensemble comes nearer than this; it equals ``distance`` up to rounding when ``exact``."""
    residual: float
    """The largest |nearest − share| over the known pairs."""
    certificate: ViolatedInequality | None
    """Why not, where ``realizable`` is False."""
    exact: bool
    """Whether the best ranking was found exactly at every step."""


def tournament_of(rankings: Sequence[Sequence[int]], weights: npt.ArrayLike) -> FloatArray:
    """The tournament of a mixture of rankings: t_ij = Σ_σ weights_σ 1[σ ranks i before j].

    Returns:
        ``(m, m)``, NaN on the diagonal.

    Example:
        >>> tournament_of([(0, 1, 2), (2, 0, 1)], [0.75, 0.25])
        array([[ nan, 1.  , 0.75],
               [0.  ,  nan, 0.75],
               [0.25, 0.25,  nan]])

    Reference: App. D.1, the tournament graph of a distribution over rankings.
    """
    orders = _checked_rankings(rankings)
    alpha = np.asarray(weights, dtype=np.float64)
    if alpha.shape != orders.shape[:1] or not (alpha >= 0).all() or abs(alpha.sum() - 1) > ROUNDING:
        raise UsageError(f"weights must be {len(orders)} numbers that are not negative and sum to 1.")
    m = orders.shape[1]
    i, j = np.triu_indices(m, 1)
    return _as_matrix(np.minimum(alpha @ _incidence(orders, i, j), 1.0), i, j, m)


def decompose(shares: npt.ArrayLike, seed: int = 0, progress: Progress | None = None) -> Decomposition:
    """The nearest realizable tournament, the rankings that mix to it, and a proof if it is not the given one.

    Solves  min_{x ∈ TG} mean_ij (x_ij − t_ij)²  over the known pairs by Wolfe's algorithm, column generation for a
    nearest point: x is always the nearest point of the hull of a few affinely independent rankings; the ranking best
    for c = t − x joins them; at the end c·x^σ ≤ c·x for all σ. Then either x = t, or c·t > max_σ c·x^σ separates t
    from TG. Being affinely independent, the rankings number at most C(m, 2) + 1 (Carathéodory, App. C.1).

    Args:
        shares: t, ``(m, m)``, NaN where unknown.
        seed: of the restarts of the search beyond ``EXACT_UP_TO`` alternatives.
        progress: called with the rounds done and 0, as their number is not known.

    Example:
        >>> found = decompose([[0.5, 0.7, 0.9], [0.3, 0.5, 0.6], [0.1, 0.4, 0.5]])
        >>> found.realizable, len(found.rankings)
        (True, 4)
        >>> cycle = decompose([[0.5, 1, 0], [0, 0.5, 1], [1, 0, 0.5]])
        >>> cycle.realizable, round(cycle.distance, 4), cycle.certificate.bound, cycle.certificate.value
        (False, 0.1111, 2.0, 3.0)

    Reference: §3.1 and App. D.1; Wolfe, "Finding the nearest point in a polytope" (1976).
    """
    table = _checked_shares(shares)
    m = len(table)
    i, j = np.nonzero(np.triu(~np.isnan(table), 1))
    exact = m <= EXACT_UP_TO
    oracle: Oracle = best_ranking if exact else functools.partial(_searched_ranking, rng=_generator(seed))
    found, weights, least = _nearest_point(table[i, j], i, j, m, oracle, progress)
    by_weight = np.argsort(-weights, kind="stable")
    rankings, weights = tuple(found[n] for n in by_weight), weights[by_weight]
    nearest = tournament_of(rankings, weights)
    error = nearest[i, j] - table[i, j]
    residual, distance = float(np.abs(error).max()), float(np.mean(error**2))
    certificate = None
    if realizable := residual <= RESIDUAL:
        distance = least = 0.0
    else:
        certificate = violated_cycle(table) or _dual_certificate(table, nearest)
        if not exact:  # the search proved nothing; with a certificate, every mixture lies behind its plane
            least = _depth(certificate) if certificate else 0.0
    return Decomposition(
        rankings=rankings,
        weights=weights,
        nearest=nearest,
        realizable=True if realizable else False if certificate else None,
        distance=distance,
        distance_at_least=min(max(least, 0.0) ** 2 / len(i), distance),
        residual=residual,
        certificate=certificate,
        exact=exact,
    )


def violated_cycle(shares: npt.ArrayLike) -> ViolatedInequality | None:
    """The 3-cycle inequality that a tournament violates most: t_ij + t_jk + t_ki ≤ 2.

    No ranking puts i before j, j before k and k before i. Read the other way round the cycle, it says that the sum is
    at least 1. Up to five alternatives these inequalities suffice: a tournament that satisfies all is realizable. From
    six on there are others. The search takes m³ steps, so it also proves things where nothing else can.

    Example:
        >>> violated_cycle([[0.5, 0.9, 0.2], [0.1, 0.5, 0.8], [0.8, 0.2, 0.5]]).pairs
        ((0, 1), (1, 2), (2, 0))

    Reference: Grötschel, Jünger and Reinelt, "Facets of the linear ordering polytope" (1985).
    """
    t = _checked_shares(shares)
    total = np.nan_to_num(t[:, :, None] + t[None, :, :] + t.T[:, None, :], nan=-np.inf)
    i, j, k = (int(index) for index in np.unravel_index(total.argmax(), total.shape))
    if not total[i, j, k] > 2 + RESIDUAL:
        return None
    return ViolatedInequality(((i, j), (j, k), (k, i)), (1.0, 1.0, 1.0), 2.0, float(total[i, j, k]), "cycle")


# --- the best ranking for given weights -----------------------------------------------------------------------------


def best_ranking(weights: npt.ArrayLike) -> tuple[Ranking, float]:
    """The ranking of greatest weight, exactly:  max_σ Σ_{i before j in σ} weights_ij  (linear ordering).

    Dynamic programming over the sets S of those ranked first: best(S) = max_{i ∈ S} best(S − i) + Σ_{j ∈ S − i} w_ji.
    With weights 1 on the arcs of a digraph, what it leaves out is a minimum feedback arc set, from which Theorem 1 is
    proved; so no fast way is to be expected, and 2^m sets are looked at.

    Args:
        weights: ``(m, m)``; the diagonal does not count. m is at most ``EXACT_UP_TO``.

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
    """For sizes 1 … m: the sets as bit masks, their members, and the sets without each member."""
    masks = np.arange(1 << m)
    bits = (masks[:, None] >> np.arange(m)) & 1
    layers = []
    for size in range(1, m + 1):
        sets = masks[bits.sum(axis=1) == size]
        members = np.nonzero(bits[sets])[1].reshape(-1, size)
        layers.append((sets, members, sets[:, None] ^ (1 << members)))
    return layers


def _searched_ranking(weights: FloatArray, rng: np.random.Generator) -> tuple[Ranking, float]:
    """A ranking that no single move of one alternative improves: the best of several searches, perhaps not of all."""
    m = len(weights)
    gain = weights - weights.T
    np.fill_diagonal(gain, 0.0)
    borda = gain.sum(axis=1)
    spread = np.linspace(0.0, 2.0, RESTARTS)[:, None] * (borda.std() + CONVERGED)
    orders = np.argsort(-borda - spread * rng.normal(size=(RESTARTS, m)), axis=1)
    searches = np.arange(RESTARTS)
    while True:
        ordered = gain[orders[:, :, None], orders[:, None, :]]
        # moves[n, a, b]: what search n wins by taking the alternative from place a to place b
        upward = np.cumsum(np.tril(ordered)[:, :, ::-1], axis=2)[:, :, ::-1]
        moves = (upward - np.cumsum(np.triu(ordered), axis=2)).reshape(RESTARTS, -1)
        best = moves.argmax(axis=1)
        best[moves[searches, best] <= CONVERGED] = 0  # from the first place to the first: stay
        if not best.any():
            break
        a, b = np.divmod(best, m)
        places = np.tile(np.arange(m, dtype=np.float64), (RESTARTS, 1))
        places[searches, a] = b + np.where(b > a, 0.5, -0.5)
        orders = np.take_along_axis(orders, np.argsort(places, axis=1), axis=1)
    values = np.triu(weights[orders[:, :, None], orders[:, None, :]], 1).sum(axis=(1, 2))
    return tuple(orders[values.argmax()].tolist()), float(values.max())


# --- the nearest point and its certificate --------------------------------------------------------------------------


def _nearest_point(
    target: FloatArray, i: IntArray, j: IntArray, m: int, oracle: Oracle, progress: Progress | None
) -> tuple[list[Ranking], FloatArray, float]:
    """Wolfe's algorithm: rankings and weights of the point nearest to the target, and a lower bound on its distance.

    The bound, Euclidean, holds if the oracle is exact: with c = (t − x)/|t − x|, every point y of the polytope has
    |t − y| ≥ c·(t − y) ≥ c·t − max_σ c·x^σ.
    """

    def best_for(direction: FloatArray) -> tuple[Ranking, FloatArray]:
        ranking, _ = oracle(_as_matrix(direction, i, j, m, opposite=-direction, diagonal=0.0))
        return ranking, _incidence(np.array([ranking]), i, j)[0] - target

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
        if np.linalg.norm(point) >= length:  # as near as rounding lets it come
            return rankings, weights, least
        rounds += 1
        if progress:
            progress(rounds, 0)


def _corral(vertices: FloatArray, weights: FloatArray) -> tuple[npt.NDArray[np.bool_], FloatArray, FloatArray]:
    """Walk to the point nearest to 0 in the vertices' hull, dropping the vertices that reach weight 0 on the way."""
    kept = np.ones(len(weights), dtype=bool)
    while True:
        ones = np.ones(len(weights))
        try:  # the point nearest to 0 of the affine hull: V V'a ∝ 1, and adding 11' makes the matrix definite
            affine = np.linalg.solve(vertices @ vertices.T + 1.0, ones)
        except np.linalg.LinAlgError:  # dependent up to rounding
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
    """How far the tournament lies, in Euclidean distance, from the half-space that holds all mixtures."""
    return (certificate.value - certificate.bound) / float(np.linalg.norm(certificate.coefficients))


def _dual_certificate(table: FloatArray, nearest: FloatArray) -> ViolatedInequality | None:
    """The separating direction t − x as an inequality, in the smallest whole numbers that still separate.

    Its bound is exact, so it may hold ``EXACT_UP_TO`` alternatives, however many the tournament has.
    """
    direction = np.nan_to_num(table - nearest)
    direction /= np.abs(direction).max()
    rounded = (np.round(direction * scale) for scale in range(1, READABLE_COEFFICIENT + 1))
    for candidate, margin in itertools.chain(((whole, RESIDUAL) for whole in rounded), [(direction, RESIDUAL / 10)]):
        coefficients = np.maximum(candidate, 0.0)  # −c on x_ij is c on x_ji, up to a constant
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


# --- small ensembles ------------------------------------------------------------------------------------------------


def reduce_support(rankings: Sequence[Sequence[int]], weights: npt.ArrayLike) -> tuple[tuple[Ranking, ...], FloatArray]:
    """At most C(m, 2) + 1 of the rankings, reweighted so that their tournament stays the same.

    While the vectors (x^σ, 1) are dependent, Σ_σ d_σ (x^σ, 1) = 0 for some d; adding a multiple of d to the weights
    changes neither the tournament nor their sum, and the right multiple brings one weight to 0.

    Args:
        rankings: for instance those of all people.
        weights: of the rankings, summing to 1.

    Returns:
        Rankings and weights, as many as have independent (x^σ, 1).

    Example:
        >>> everybody = list(itertools.permutations(range(3)))
        >>> few, weights = reduce_support(everybody, np.full(6, 1 / 6))
        >>> len(few), bool(np.allclose(tournament_of(few, weights)[0, 1], 0.5))
        (4, True)

    Reference: App. C.1, Carathéodory's theorem.
    """
    tournament_of(rankings, weights)
    orders, alpha = _checked_rankings(rankings), np.array(weights, dtype=np.float64)
    i, j = np.triu_indices(orders.shape[1], 1)
    vectors = np.vstack([_incidence(orders, i, j).T, np.ones(len(orders))])
    support = np.flatnonzero(alpha > 0)
    while len(support) > 1:
        block = support[: len(vectors) + 1]
        _, singular, directions = np.linalg.svd(vectors[:, block])
        if len(block) <= len(vectors) and singular[-1] > 1e-10 * singular[0]:
            break
        d = directions[-1]  # of sum 0, so some entry is below 0
        with np.errstate(divide="ignore"):
            steps = np.where(d < 0, -alpha[block] / np.minimum(d, 0.0), np.inf)
        alpha[block] = np.maximum(alpha[block] + steps.min() * d, 0.0)
        alpha[block[steps.argmin()]] = 0.0
        support = np.flatnonzero(alpha > 0)
    return tuple(tuple(orders[n].tolist()) for n in support), alpha[support] / alpha[support].sum()


def sample_rankings(
    rankings: Sequence[Sequence[int]], weights: npt.ArrayLike, k: int, seed: int = 0
) -> tuple[Ranking, ...]:
    """Draw k rankings independently by weight, each to count 1/k: the ensemble of Theorem 2's proof.

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
    drawn = _generator(seed).choice(len(alpha), size=k, p=alpha / alpha.sum())
    orders = _checked_rankings(rankings)
    return tuple(tuple(orders[n].tolist()) for n in drawn)


def sampling_error(shares: npt.ArrayLike, k: int) -> float:
    """The expected calibration error of k rankings drawn from a mixture:  mean t (1 − t) / k  ≤  1 / (4k).

    Each pair's share among the k is binomial with variance t(1 − t)/k around the mixture's share t.

    Example:
        >>> sampling_error([[0.5, 0.75], [0.25, 0.5]], k=3)
        0.0625

    Reference: Theorem 2's proof, App. D.2.
    """
    if k < 1:
        raise UsageError(f"k must be at least 1, not {k}.")
    table = _checked_shares(shares)
    t = table[np.triu(~np.isnan(table), 1)]
    return float(np.mean(t * (1 - t)) / k)


def mcgarvey(m: int, arcs: Iterable[tuple[int, int]]) -> tuple[Ranking, ...]:
    """Two rankings for each arc of a digraph, whose majorities are its arcs.

    With equal weights, t_ij = ½ + 1/(2n) on each of the n arcs, and ½ between alternatives that no arc joins. Those for
    the arc (i, j): i, j, then the rest in order; and the rest in reverse order, then i, j. They agree on i over j and
    cancel elsewhere, so one arc alone gives a tournament with a single 1.

    Example:
        >>> mcgarvey(4, [(2, 0)])
        ((2, 0, 1, 3), (3, 1, 2, 0))

    Reference: McGarvey, "A theorem on the construction of voting paradoxes" (1953), as used in App. D.1.
    """
    rankings: list[Ranking] = []
    for i, j in arcs:
        if i == j or not (0 <= i < m and 0 <= j < m):
            raise UsageError(f"an arc joins two of the alternatives 0 to {m - 1}, not {i} and {j}.")
        rest = tuple(other for other in range(m) if other not in (i, j))
        rankings += [(i, j, *rest), (*reversed(rest), i, j)]
    return tuple(rankings)


# --- arrays ---------------------------------------------------------------------------------------------------------


def _generator(seed: int) -> np.random.Generator:
    if seed < 0:
        raise UsageError(f"seed must not be negative, but it is {seed}.")
    return np.random.default_rng(seed)


def _checked_shares(shares: npt.ArrayLike) -> FloatArray:
    """``shares`` as a matrix whose diagonal is NaN, with each known share's opposite filled in."""
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
    return _as_matrix(upper[i, j], i, j, len(t))


def _checked_rankings(rankings: Sequence[Sequence[int]]) -> IntArray:
    try:
        orders = np.array([tuple(ranking) for ranking in rankings], dtype=np.int64)
    except ValueError:
        orders = np.empty(0, dtype=np.int64)
    if orders.ndim != 2 or not orders.size or (np.sort(orders, axis=1) != np.arange(orders.shape[1])).any():
        raise UsageError("every ranking must list the same alternatives 0, 1, …, each once.")
    return orders


def _incidence(orders: IntArray, i: IntArray, j: IntArray) -> FloatArray:
    """x_ij = 1[i is ranked before j], ``(n_rankings, n_pairs)``."""
    places = np.argsort(orders, axis=1)
    return (places[:, i] < places[:, j]).astype(np.float64)


def _as_matrix(
    values: FloatArray,
    i: IntArray,
    j: IntArray,
    m: int,
    opposite: FloatArray | None = None,
    diagonal: float = np.nan,
) -> FloatArray:
    """``(m, m)`` with values at (i, j) and 1 − values at (j, i)."""
    matrix = np.full((m, m), diagonal)
    matrix[i, j] = values
    matrix[j, i] = 1.0 - values if opposite is None else opposite
    return matrix
