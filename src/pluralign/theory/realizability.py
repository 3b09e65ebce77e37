"""Realizability: whether a weighted tournament comes from a mixture of rankings, and the nearest one that does.

``decompose`` returns an ensemble of rankings that attains the tournament, or the nearest realizable tournament and a
proof that the given one is not realizable. See ``rankings`` for the form of tournaments.

Every realizable tournament is an average of incidence vectors x^σ (x_ij = 1 if σ ranks i before j): a point of the
linear ordering polytope TG. Deciding whether a point lies in TG is NP-hard (Theorem 1). All of the hardness is in one
step, the best ranking for given weights (``linear_ordering``).

Reference: §3.1, App. C and D.1 of "Pairwise Calibrated Rewards for Pluralistic Alignment".
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, IntArray, Mask
from pluralign.core.types import Progress
from pluralign.theory.linear_ordering import EXACT_UP_TO, best_ranking, local_search_ranking
from pluralign.theory.rankings import (
    Ranking,
    as_matrix,
    checked_generator,
    checked_shares,
    incidence,
    tournament_of,
)

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
