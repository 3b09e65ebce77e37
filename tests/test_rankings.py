"""Mixtures of rankings: reduced, sampled, constructed and decomposed, against naive computation."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st
from mixtures import Matrix, all_incidences, pair_by_pair, random_mixture
from scipy.optimize import linprog

from pluralign.core.errors import UsageError
from pluralign.theory import rankings, rankings as realizability

SEEDS = st.integers(0, 100_000)


@given(SEEDS, st.integers(2, 5), st.integers(1, 150))
@settings(max_examples=40)
def test_reducing_keeps_the_tournament_and_at_most_as_many_rankings_as_caratheodory_allows(
    seed: int, m: int, count: int
) -> None:
    rng = np.random.default_rng(seed)
    orders = [tuple(rng.permutation(m).tolist()) for _ in range(count)]
    weights = rng.dirichlet(np.ones(count))
    few, few_weights = rankings.reduce_support(orders, weights)
    i, j = np.triu_indices(m, 1)
    vectors = np.array([[*pair_by_pair([order], [1.0])[i, j], 1.0] for order in orders])
    assert len(few) <= np.linalg.matrix_rank(vectors) <= math.comb(m, 2) + 1
    assert set(few) <= set(orders)
    assert (few_weights >= 0).all()
    assert few_weights.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(pair_by_pair(list(few), few_weights), pair_by_pair(orders, weights), atol=1e-9)


@pytest.mark.parametrize("k", [1, 4, 25])
def test_drawn_ensembles_have_the_expected_error_of_theorem_2(k: int) -> None:
    shares = random_mixture(5, 6, 12)
    result = rankings.decompose(shares)
    i, j = np.triu_indices(6, 1)
    errors = [
        np.mean((pair_by_pair(list(drawn), np.full(k, 1 / k)) - shares)[i, j] ** 2)
        for drawn in (rankings.sample_rankings(result.rankings, result.weights, k, seed) for seed in range(400))
    ]
    expected = rankings.sampling_error(shares, k)
    assert expected == pytest.approx(np.mean(shares[i, j] * (1 - shares[i, j])) / k)
    assert expected <= 1 / (4 * k)
    assert np.mean(errors) == pytest.approx(expected, abs=4 * np.std(errors) / 20)


def test_a_draw_depends_only_on_its_seed() -> None:
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2)]
    first = rankings.sample_rankings(orders, [0.5, 0.25, 0.25], 30, seed=1)
    assert first == rankings.sample_rankings(orders, [0.5, 0.25, 0.25], 30, seed=1)
    assert first != rankings.sample_rankings(orders, [0.5, 0.25, 0.25], 30, seed=2)


@given(SEEDS, st.integers(2, 8))
@settings(max_examples=40)
def test_mcgarveys_rankings_have_the_majorities_of_the_digraph_and_are_decomposed_exactly(seed: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    arcs = [pair if rng.random() < 0.5 else pair[::-1] for pair in itertools.combinations(range(m), 2)]
    arcs = [arc for arc in arcs if rng.random() < 0.7] or arcs[:1]
    expected = np.full((m, m), 0.5)
    for i, j in arcs:
        expected[i, j] += 1 / (2 * len(arcs))
        expected[j, i] -= 1 / (2 * len(arcs))
    orders = rankings.mcgarvey(m, arcs)
    assert len(orders) == 2 * len(arcs)
    off_diagonal = ~np.eye(m, dtype=bool)
    shares = pair_by_pair(list(orders), np.full(len(orders), 1 / len(orders)))
    np.testing.assert_allclose(shares[off_diagonal], expected[off_diagonal], atol=1e-12)
    result = rankings.decompose(expected)
    assert result.realizable is True
    assert result.residual <= 1e-9
    assert len(result.rankings) <= math.comb(m, 2) + 1


def test_invalid_arguments_are_refused() -> None:
    for orders in ([], [(0, 1), (0, 1, 2)], [(0, 0)], [(1, 2)]):
        with pytest.raises(UsageError, match="same alternatives"):
            rankings.tournament_of(orders, [1.0])
    with pytest.raises(UsageError, match="sum to 1"):
        rankings.tournament_of([(0, 1)], [0.5])
    with pytest.raises(UsageError, match="k must be at least 1"):
        rankings.sample_rankings([(0, 1)], [1.0], k=0)
    with pytest.raises(UsageError, match="k must be at least 1"):
        rankings.sampling_error([[0.5, 0.5], [0.5, 0.5]], k=0)
    with pytest.raises(UsageError, match="seed must not be negative"):
        rankings.sample_rankings([(0, 1)], [1.0], k=1, seed=-1)
    with pytest.raises(UsageError, match="an arc must join two"):
        rankings.mcgarvey(3, [(0, 3)])


# --- the linear ordering problem ---


@given(SEEDS, st.integers(1, 6))
def test_the_best_ranking_has_the_greatest_weight_of_all(seed: int, m: int) -> None:
    weights = np.random.default_rng(seed).normal(size=(m, m))
    ranking, value = rankings.best_ranking(weights)
    _, incidences = all_incidences(m)
    assert value == pytest.approx((incidences * weights).sum(axis=(1, 2)).max(), abs=1e-12)
    assert value == pytest.approx((pair_by_pair([ranking], [1.0]) * weights).sum(), abs=1e-12)


def test_the_local_search_is_nearly_always_optimal() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(50):
        weights = rng.normal(size=(9, 9))
        ranking, value = rankings.local_search_ranking(weights, rng)
        assert value == pytest.approx((pair_by_pair([ranking], [1.0]) * weights).sum())
        best = rankings.best_ranking(weights)[1]
        assert value <= best + 1e-9
        hits += value > best - 1e-9
    assert hits >= 45


def test_too_many_alternatives_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 16"):
        rankings.best_ranking(np.zeros((17, 17)))


# --- realizable tournaments, nearest mixtures and certificates, against enumeration of all rankings ---


def random_tournament(seed: int, m: int) -> Matrix:
    """Draw shares from the whole cube, in one third of the cases on a coarse grid, in one third near 1/2."""
    rng = np.random.default_rng(seed)
    upper = rng.random((m, m))
    if seed % 3 == 0:
        upper = np.round(4 * upper) / 4
    if seed % 3 == 1:
        upper = 0.5 + 0.6 * (upper - 0.5)
    return np.triu(upper, 1) + np.tril(1 - upper.T, -1)


def fence() -> Matrix:
    """Six alternatives that satisfy every 3-cycle inequality and violate the 3-fence: the sum is 7.5, its bound 7."""
    shares = np.full((6, 6), 0.5)
    for i, j in itertools.product(range(3), range(3)):
        shares[3 + j, i] = 0.5 if i == j else 1.0
        shares[i, 3 + j] = 1 - shares[3 + j, i]
    return shares


def check_refutation(result: rankings.ViolatedInequality, shares: Matrix) -> None:
    """Check that every ranking satisfies the inequality, the shares violate it, and bound and value are right."""
    m = len(shares)
    coefficients = np.zeros((m, m))
    for (i, j), coefficient in zip(result.pairs, result.coefficients, strict=True):
        assert coefficient > 0
        coefficients[i, j] = coefficient
    _, incidences = all_incidences(m)
    most = float((incidences * coefficients).sum(axis=(1, 2)).max())
    value = sum(coefficients[pair] * shares[pair] for pair in result.pairs)
    assert most == pytest.approx(result.bound, abs=1e-12)
    assert value == pytest.approx(result.value, abs=1e-12)
    assert value > most + 1e-10


def check_ensemble(result: rankings.Decomposition, shares: Matrix) -> None:
    """Check that the weights are valid, the ensemble is small enough, and its tournament is the reported one."""
    known = np.triu(~np.isnan(shares), 1)
    assert (result.weights > 0).all()
    assert result.weights.sum() == pytest.approx(1.0, abs=1e-12)
    assert len(set(result.rankings)) == len(result.rankings) <= known.sum() + 1
    mixed = pair_by_pair(list(result.rankings), result.weights)
    off_diagonal = ~np.eye(len(shares), dtype=bool)
    np.testing.assert_allclose(mixed[off_diagonal], result.nearest[off_diagonal], atol=1e-12)
    assert np.abs(mixed - shares)[known].max() == pytest.approx(result.residual, abs=1e-12)


# --- decomposing ------------------------------------------------------------------------------------------------------


@given(SEEDS, st.integers(2, 9), st.integers(1, 40))
@settings(max_examples=60)
def test_every_mixture_of_rankings_is_realizable_and_decomposed_exactly(seed: int, m: int, count: int) -> None:
    shares = random_mixture(seed, m, count)
    result = rankings.decompose(shares)
    assert result.realizable is True
    assert result.distance == 0.0
    assert result.certificate is None
    assert result.residual <= 1e-9
    check_ensemble(result, shares)


@given(SEEDS, st.integers(3, 5))
@settings(max_examples=50)
def test_realizability_agrees_with_a_linear_program_over_all_rankings(seed: int, m: int) -> None:
    shares = random_tournament(seed, m)
    orders, incidences = all_incidences(m)
    i, j = np.triu_indices(m, 1)
    # smallest total |slack| with which a mixture of all m! rankings gives the shares
    slack = np.eye(len(i))
    columns = np.hstack([incidences[:, i, j].T, slack, -slack])
    equalities = np.vstack([columns, np.append(np.ones(len(orders)), np.zeros(2 * len(i)))])
    cost = np.append(np.zeros(len(orders)), np.ones(2 * len(i)))
    least = linprog(cost, A_eq=equalities, b_eq=np.append(shares[i, j], 1.0)).fun
    result = rankings.decompose(shares)
    assert result.realizable is bool(least < 1e-7)
    if least >= 1e-7:
        # the nearest point in squared distance is no nearer in absolute distance
        assert np.abs(result.nearest - shares)[i, j].sum() >= least - 1e-7


@given(SEEDS, st.integers(3, 6))
@settings(max_examples=50)
def test_no_mixture_is_nearer_than_the_result(seed: int, m: int) -> None:
    shares = random_tournament(seed, m)
    result: Any = rankings.decompose(shares)
    check_ensemble(result, shares)
    i, j = np.triu_indices(m, 1)
    direction = (shares - result.nearest)[i, j]
    assert result.distance == pytest.approx(np.mean(direction**2), abs=1e-15)
    assert result.distance_at_least == pytest.approx(result.distance, abs=1e-10)
    # optimality of a nearest point of a convex set: no ranking lies further in the direction of the shares
    _, incidences = all_incidences(m)
    assert (incidences[:, i, j] @ direction).max() <= result.nearest[i, j] @ direction + 1e-9
    if result.realizable is False:
        check_refutation(result.certificate, shares)


def test_a_unanimous_cycle_is_not_realizable_and_is_its_own_certificate() -> None:
    shares = np.array([[0.5, 1.0, 0.0], [0.0, 0.5, 1.0], [1.0, 0.0, 0.5]])
    result: Any = rankings.decompose(shares)
    assert result.realizable is False
    assert result.distance == pytest.approx(1 / 9)  # all three shares become 2/3
    assert (result.certificate.kind, result.certificate.bound, result.certificate.value) == ("cycle", 2.0, 3.0)
    check_refutation(result.certificate, shares)


def test_a_fence_without_a_violated_cycle_is_refuted_by_its_facet() -> None:
    shares = fence()
    for i, j, k in itertools.permutations(range(6), 3):
        assert 1 <= shares[i, j] + shares[j, k] + shares[k, i] <= 2
    assert rankings.violated_cycle(shares) is None
    result: Any = rankings.decompose(shares)
    assert result.realizable is False
    assert (result.certificate.kind, result.certificate.bound, result.certificate.value) == ("dual", 7.0, 7.5)
    assert set(result.certificate.coefficients) == {1.0}
    check_refutation(result.certificate, shares)
    # the excess of 1/2 is spread evenly over nine shares: the nearest point lies on the facet
    assert result.distance == pytest.approx(9 * (0.5 / 9) ** 2 / 15)
    assert sum(result.nearest[pair] for pair in result.certificate.pairs) == pytest.approx(7.0)
    assert rankings.decompose(result.nearest).realizable is True


def test_tournaments_just_outside_and_just_inside_are_told_apart() -> None:
    for excess, realizable in ((1e-7, False), (0.0, True), (-1e-7, True)):
        shares = np.full((3, 3), (2 + excess) / 3)
        for i, j in ((1, 0), (2, 1), (0, 2)):
            shares[i, j] = (1 - excess) / 3
        result: Any = rankings.decompose(shares)
        assert result.realizable is realizable, excess
        if not realizable:
            check_refutation(result.certificate, shares)


def test_pairs_without_votes_are_unconstrained() -> None:
    shares = np.full((4, 4), np.nan)
    for i in range(3):
        shares[i, i + 1] = 1.0
    result: Any = rankings.decompose(shares)
    assert result.realizable is True
    assert result.rankings == ((0, 1, 2, 3),)
    shares[3, 0] = 1.0  # closes a cycle of four without any triple
    assert rankings.violated_cycle(shares) is None
    result = rankings.decompose(shares)
    assert result.realizable is False
    assert result.distance == pytest.approx(1 / 16)
    assert (result.certificate.pairs, result.certificate.bound) == (((0, 1), (1, 2), (2, 3), (3, 0)), 3.0)
    check_refutation(result.certificate, shares)


# --- above the exact limit --------------------------------------------------------------------------------------------


def test_above_the_exact_limit_a_decomposition_proves_realizability() -> None:
    rng = np.random.default_rng(3)
    people = [tuple(rng.permutation(rankings.EXACT_UP_TO + 1).tolist()) for _ in range(200)]
    shares = pair_by_pair(people, np.full(200, 1 / 200))
    result = rankings.decompose(shares)
    assert (result.exact, result.realizable) == (False, True)
    assert result.residual <= 1e-9
    check_ensemble(result, shares)


def test_above_the_exact_limit_a_cycle_refutes_and_bounds_the_distance() -> None:
    m = rankings.EXACT_UP_TO + 1
    shares = np.full((m, m), 0.5)
    for i, j in ((4, 7), (7, 9), (9, 4)):
        shares[i, j], shares[j, i] = 1.0, 0.0
    result: Any = rankings.decompose(shares)
    assert (result.exact, result.realizable) == (False, False)
    assert set(result.certificate.pairs) == {(4, 7), (7, 9), (9, 4)}
    # the nearest point lowers each of the three shares by 1/3 and keeps the others
    assert result.distance_at_least == pytest.approx(3 / 9 / math.comb(m, 2))
    assert result.distance_at_least <= result.distance


def test_above_the_exact_limit_a_small_fence_refutes() -> None:
    m = rankings.EXACT_UP_TO + 2
    shares = np.full((m, m), 0.5)
    shares[2:8, 2:8] = fence()
    result: Any = rankings.decompose(shares)
    assert (result.exact, result.realizable) == (False, False)
    check_refutation(
        dataclasses.replace(result.certificate, pairs=tuple((i - 2, j - 2) for i, j in result.certificate.pairs)),
        fence(),
    )
    assert result.distance_at_least == pytest.approx(9 * (0.5 / 9) ** 2 / math.comb(m, 2))
    assert result.distance_at_least <= result.distance


def test_above_the_exact_limit_a_tournament_without_a_proof_stays_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realizability, "EXACT_UP_TO", 5)
    result = rankings.decompose(fence())
    assert (result.exact, result.realizable, result.certificate) == (False, None, None)
    assert result.distance_at_least == 0.0
    assert result.distance > 0


# --- shares near one half, and arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([[0.5]], "2 to 50"),
        ([[0.5, 0.5]], "square"),
        (np.full((51, 51), 0.5), "2 to 50"),
        ([[0.5, 1.5], [-0.5, 0.5]], "between 0 and 1"),
        ([[0.5, 0.7], [0.7, 0.5]], "sum to 1"),
        (np.full((3, 3), np.nan), "at least one pair"),
    ],
)
def test_invalid_shares_are_refused(shares: npt.ArrayLike, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        rankings.decompose(shares)
