"""Mixtures of rankings: decided, decomposed and refuted, against enumeration of all orders."""

import dataclasses
import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from pluralign.core.errors import UsageError
from pluralign.theory import rankings as module
from pluralign.theory.rankings import (
    Decomposition,
    Ranking,
    ViolatedInequality,
    best_ranking,
    decompose,
    mcgarvey,
    reduce_support,
    sample_rankings,
    sampling_error,
    tournament_of,
    violated_cycle,
)

Matrix = npt.NDArray[np.float64]
SEEDS = st.integers(0, 100_000)


def pair_by_pair(orders: list[Ranking], weights: npt.ArrayLike) -> Matrix:
    """The tournament of a mixture, one ranking and one pair at a time."""
    m = len(orders[0])
    shares = np.zeros((m, m))
    for order, weight in zip(orders, np.asarray(weights), strict=True):
        for place, i in enumerate(order):
            for j in order[place + 1 :]:
                shares[i, j] += weight
    return shares


def random_mixture(seed: int, m: int, count: int) -> Matrix:
    rng = np.random.default_rng(seed)
    orders = [tuple(rng.permutation(m).tolist()) for _ in range(count)]
    return pair_by_pair(orders, rng.dirichlet(np.full(count, rng.choice([0.2, 1.0, 20.0]))))


def random_tournament(seed: int, m: int) -> Matrix:
    """Shares from everywhere in the cube, often on a coarse grid, at times near 1/2."""
    rng = np.random.default_rng(seed)
    upper = rng.random((m, m))
    if seed % 3 == 0:
        upper = np.round(4 * upper) / 4
    if seed % 3 == 1:
        upper = 0.5 + 0.6 * (upper - 0.5)
    return np.triu(upper, 1) + np.tril(1 - upper.T, -1)


def fence() -> Matrix:
    """Six alternatives that satisfy every 3-cycle inequality and break the 3-fence: 7.5 of 9, where 7 is the most."""
    shares = np.full((6, 6), 0.5)
    for i, j in itertools.product(range(3), range(3)):
        shares[3 + j, i] = 0.5 if i == j else 1.0
        shares[i, 3 + j] = 1 - shares[3 + j, i]
    return shares


def all_incidences(m: int) -> tuple[list[Ranking], Matrix]:
    orders = list(itertools.permutations(range(m)))
    return orders, np.stack([pair_by_pair([order], [1.0]) for order in orders])


def check_refutation(found: ViolatedInequality, shares: Matrix) -> None:
    """Every order satisfies the inequality, the shares do not, and it says truly by how much."""
    m = len(shares)
    coefficients = np.zeros((m, m))
    for (i, j), coefficient in zip(found.pairs, found.coefficients, strict=True):
        assert coefficient > 0
        coefficients[i, j] = coefficient
    _, incidences = all_incidences(m)
    most = float((incidences * coefficients).sum(axis=(1, 2)).max())
    value = sum(coefficients[pair] * shares[pair] for pair in found.pairs)
    assert most == pytest.approx(found.bound, abs=1e-12)
    assert value == pytest.approx(found.value, abs=1e-12)
    assert value > most + 1e-10


def check_ensemble(found: Decomposition, shares: Matrix) -> None:
    """The ensemble is one, small enough, and its tournament is what it says."""
    known = np.triu(~np.isnan(shares), 1)
    assert (found.weights > 0).all()
    assert found.weights.sum() == pytest.approx(1.0, abs=1e-12)
    assert len(set(found.rankings)) == len(found.rankings) <= known.sum() + 1
    mixed = pair_by_pair(list(found.rankings), found.weights)
    off_diagonal = ~np.eye(len(shares), dtype=bool)
    np.testing.assert_allclose(mixed[off_diagonal], found.nearest[off_diagonal], atol=1e-12)
    assert np.abs(mixed - shares)[known].max() == pytest.approx(found.residual, abs=1e-12)


# --- the best ranking -----------------------------------------------------------------------------------------------


@given(SEEDS, st.integers(1, 6))
def test_the_best_ranking_is_the_best_of_all(seed: int, m: int) -> None:
    weights = np.random.default_rng(seed).normal(size=(m, m))
    ranking, value = best_ranking(weights)
    _, incidences = all_incidences(m)
    assert value == pytest.approx((incidences * weights).sum(axis=(1, 2)).max(), abs=1e-12)
    assert value == pytest.approx((pair_by_pair([ranking], [1.0]) * weights).sum(), abs=1e-12)


@given(SEEDS)
def test_what_the_best_ranking_leaves_out_is_a_minimum_feedback_arc_set(seed: int) -> None:
    m = 5
    arcs = [arc for arc in itertools.permutations(range(m), 2) if np.random.default_rng([seed, *arc]).random() < 0.4]
    weights = np.zeros((m, m))
    for arc in arcs:
        weights[arc] = 1.0

    def feedback(order: Ranking) -> int:
        return sum(order.index(i) > order.index(j) for i, j in arcs)

    ranking, value = best_ranking(weights)
    assert feedback(ranking) == min(map(feedback, itertools.permutations(range(m)))) == len(arcs) - value


def test_the_search_for_many_alternatives_is_nearly_always_best_where_it_can_be_checked() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(50):
        weights = rng.normal(size=(9, 9))
        ranking, value = module._searched_ranking(weights, rng)
        assert value == pytest.approx((pair_by_pair([ranking], [1.0]) * weights).sum())
        best = best_ranking(weights)[1]
        assert value <= best + 1e-9
        hits += value > best - 1e-9
    assert hits >= 45


# --- decomposing ----------------------------------------------------------------------------------------------------


@given(SEEDS, st.integers(2, 9), st.integers(1, 40))
@settings(max_examples=60)
def test_every_mixture_of_rankings_is_realizable_and_decomposed_exactly(seed: int, m: int, count: int) -> None:
    shares = random_mixture(seed, m, count)
    found = decompose(shares)
    assert found.realizable is True
    assert found.distance == 0.0
    assert found.certificate is None
    assert found.residual <= 1e-9
    check_ensemble(found, shares)


@given(SEEDS, st.integers(3, 5))
@settings(max_examples=50)
def test_the_verdict_is_that_of_a_linear_program_over_all_orders(seed: int, m: int) -> None:
    shares = random_tournament(seed, m)
    orders, incidences = all_incidences(m)
    i, j = np.triu_indices(m, 1)
    # the least total |slack| with which some mixture of all m! orders gives the shares
    slack = np.eye(len(i))
    columns = np.hstack([incidences[:, i, j].T, slack, -slack])
    equalities = np.vstack([columns, np.append(np.ones(len(orders)), np.zeros(2 * len(i)))])
    cost = np.append(np.zeros(len(orders)), np.ones(2 * len(i)))
    least = linprog(cost, A_eq=equalities, b_eq=np.append(shares[i, j], 1.0)).fun
    found = decompose(shares)
    assert found.realizable is bool(least < 1e-7)
    if least >= 1e-7:
        # no nearest point in squares is nearer in sums than that
        assert np.abs(found.nearest - shares)[i, j].sum() >= least - 1e-7


@given(SEEDS, st.integers(3, 6))
@settings(max_examples=50)
def test_no_mixture_is_nearer_than_the_nearest(seed: int, m: int) -> None:
    shares = random_tournament(seed, m)
    found = decompose(shares)
    check_ensemble(found, shares)
    i, j = np.triu_indices(m, 1)
    away = (shares - found.nearest)[i, j]
    assert found.distance == pytest.approx(np.mean(away**2), abs=1e-15)
    assert found.distance_at_least == pytest.approx(found.distance, abs=1e-10)
    # the condition for a nearest point of a convex set: no order lies further along the way to the shares
    _, incidences = all_incidences(m)
    assert (incidences[:, i, j] @ away).max() <= found.nearest[i, j] @ away + 1e-9
    if found.realizable is False:
        assert found.certificate is not None
        check_refutation(found.certificate, shares)


@given(SEEDS, st.integers(3, 7))
@settings(max_examples=50)
def test_new_names_and_reversed_votes_change_neither_verdict_nor_distance(seed: int, m: int) -> None:
    shares = random_tournament(seed, m)
    found = decompose(shares)
    renamed = np.random.default_rng(seed).permutation(m)
    for other in (shares[np.ix_(renamed, renamed)], shares.T):
        again = decompose(other)
        assert again.realizable is found.realizable
        assert again.distance == pytest.approx(found.distance, abs=1e-10)


def test_a_cycle_of_unanimous_shares_is_refused_with_its_cycle() -> None:
    shares = np.array([[0.5, 1.0, 0.0], [0.0, 0.5, 1.0], [1.0, 0.0, 0.5]])
    found = decompose(shares)
    assert found.realizable is False
    assert found.distance == pytest.approx(1 / 9)  # all three shares fall to 2/3
    assert found.certificate is not None
    assert (found.certificate.kind, found.certificate.bound, found.certificate.value) == ("cycle", 2.0, 3.0)
    check_refutation(found.certificate, shares)


def test_a_fence_is_refused_by_its_own_facet_where_no_cycle_shows_it() -> None:
    shares = fence()
    for i, j, k in itertools.permutations(range(6), 3):
        assert 1 <= shares[i, j] + shares[j, k] + shares[k, i] <= 2
    assert violated_cycle(shares) is None
    found = decompose(shares)
    assert found.realizable is False
    assert found.certificate is not None
    assert (found.certificate.kind, found.certificate.bound, found.certificate.value) == ("dual", 7.0, 7.5)
    assert set(found.certificate.coefficients) == {1.0}
    check_refutation(found.certificate, shares)
    # the excess of 1/2 is taken off nine shares alike: the nearest point lies on the facet
    assert found.distance == pytest.approx(9 * (0.5 / 9) ** 2 / 15)
    assert sum(found.nearest[pair] for pair in found.certificate.pairs) == pytest.approx(7.0)
    assert decompose(found.nearest).realizable is True


def test_barely_outside_is_refused_and_barely_inside_is_not() -> None:
    for excess, realizable in ((1e-7, False), (0.0, True), (-1e-7, True)):
        shares = np.full((3, 3), (2 + excess) / 3)
        for i, j in ((1, 0), (2, 1), (0, 2)):
            shares[i, j] = (1 - excess) / 3
        found = decompose(shares)
        assert found.realizable is realizable, excess
        if not realizable:
            assert found.certificate is not None
            check_refutation(found.certificate, shares)


def test_pairs_that_nobody_compared_are_free() -> None:
    shares = np.full((4, 4), np.nan)
    for i in range(3):
        shares[i, i + 1] = 1.0
    found = decompose(shares)
    assert found.realizable is True
    assert found.rankings == ((0, 1, 2, 3),)
    shares[3, 0] = 1.0  # closes a cycle of four without any triple
    assert violated_cycle(shares) is None
    found = decompose(shares)
    assert found.realizable is False
    assert found.distance == pytest.approx(1 / 16)
    assert found.certificate is not None
    assert (found.certificate.pairs, found.certificate.bound) == (((0, 1), (1, 2), (2, 3), (3, 0)), 3.0)
    check_refutation(found.certificate, shares)


def test_progress_is_told_round_by_round() -> None:
    told: list[tuple[int, int]] = []
    decompose(random_mixture(1, 8, 50), progress=lambda done, total: told.append((done, total)))
    assert told == [(rounds, 0) for rounds in range(1, len(told) + 1)]
    assert len(told) > 5


# --- more alternatives than can be decided --------------------------------------------------------------------------


def test_beyond_the_exact_limit_found_rankings_are_a_proof() -> None:
    rng = np.random.default_rng(3)
    people = [tuple(rng.permutation(module.EXACT_UP_TO + 1).tolist()) for _ in range(200)]
    shares = pair_by_pair(people, np.full(200, 1 / 200))
    found = decompose(shares)
    assert (found.exact, found.realizable) == (False, True)
    assert found.residual <= 1e-9
    check_ensemble(found, shares)


def test_beyond_the_exact_limit_a_cycle_refutes_and_bounds_the_distance() -> None:
    m = module.EXACT_UP_TO + 1
    shares = np.full((m, m), 0.5)
    for i, j in ((4, 7), (7, 9), (9, 4)):
        shares[i, j], shares[j, i] = 1.0, 0.0
    found = decompose(shares)
    assert (found.exact, found.realizable) == (False, False)
    assert found.certificate is not None
    assert set(found.certificate.pairs) == {(4, 7), (7, 9), (9, 4)}
    # the nearest point lets each of the three shares fall by 1/3 and leaves the others
    assert found.distance_at_least == pytest.approx(3 / 9 / math.comb(m, 2))
    assert found.distance_at_least <= found.distance


def test_beyond_the_exact_limit_a_fence_refutes_if_it_is_small() -> None:
    m = module.EXACT_UP_TO + 2
    shares = np.full((m, m), 0.5)
    shares[2:8, 2:8] = fence()
    found = decompose(shares)
    assert (found.exact, found.realizable) == (False, False)
    assert found.certificate is not None
    check_refutation(
        dataclasses.replace(found.certificate, pairs=tuple((i - 2, j - 2) for i, j in found.certificate.pairs)), fence()
    )
    assert found.distance_at_least == pytest.approx(9 * (0.5 / 9) ** 2 / math.comb(m, 2))
    assert found.distance_at_least <= found.distance


def test_beyond_the_exact_limit_it_is_left_undecided_without_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXACT_UP_TO", 5)
    found = decompose(fence())
    assert (found.exact, found.realizable, found.certificate) == (False, None, None)
    assert found.distance_at_least == 0.0
    assert found.distance > 0


# --- Carathéodory, Theorem 2, McGarvey ------------------------------------------------------------------------------


@given(SEEDS, st.integers(2, 5), st.integers(1, 150))
@settings(max_examples=40)
def test_reducing_keeps_the_tournament_and_leaves_no_more_than_caratheodory_allows(
    seed: int, m: int, count: int
) -> None:
    rng = np.random.default_rng(seed)
    orders = [tuple(rng.permutation(m).tolist()) for _ in range(count)]
    weights = rng.dirichlet(np.ones(count))
    few, few_weights = reduce_support(orders, weights)
    i, j = np.triu_indices(m, 1)
    vectors = np.array([[*pair_by_pair([order], [1.0])[i, j], 1.0] for order in orders])
    assert len(few) <= np.linalg.matrix_rank(vectors) <= math.comb(m, 2) + 1
    assert set(few) <= set(orders)
    assert (few_weights >= 0).all()
    assert few_weights.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(pair_by_pair(list(few), few_weights), pair_by_pair(orders, weights), atol=1e-9)


def test_a_thousand_peoples_rankings_reduce_to_eleven() -> None:
    rng = np.random.default_rng(0)
    people = [tuple(rng.permutation(5).tolist()) for _ in range(1000)]
    few, weights = reduce_support(people, np.full(1000, 1 / 1000))
    assert len(few) == 11
    np.testing.assert_allclose(
        pair_by_pair(list(few), weights), pair_by_pair(people, np.full(1000, 1 / 1000)), atol=1e-9
    )


@pytest.mark.parametrize("k", [1, 4, 25])
def test_drawn_ensembles_have_the_expected_error_of_theorem_2(k: int) -> None:
    shares = random_mixture(5, 6, 12)
    found = decompose(shares)
    i, j = np.triu_indices(6, 1)
    errors = [
        np.mean((pair_by_pair(list(drawn), np.full(k, 1 / k)) - shares)[i, j] ** 2)
        for drawn in (sample_rankings(found.rankings, found.weights, k, seed) for seed in range(400))
    ]
    expected = sampling_error(shares, k)
    assert expected == pytest.approx(np.mean(shares[i, j] * (1 - shares[i, j])) / k)
    assert expected <= 1 / (4 * k)
    assert np.mean(errors) == pytest.approx(expected, abs=4 * np.std(errors) / 20)


def test_a_draw_depends_on_its_seed_only() -> None:
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2)]
    first = sample_rankings(orders, [0.5, 0.25, 0.25], 30, seed=1)
    assert first == sample_rankings(orders, [0.5, 0.25, 0.25], 30, seed=1)
    assert first != sample_rankings(orders, [0.5, 0.25, 0.25], 30, seed=2)


@given(SEEDS, st.integers(2, 8))
@settings(max_examples=40)
def test_mcgarveys_rankings_have_the_digraphs_majorities_and_are_decomposed_exactly(seed: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    arcs = [pair if rng.random() < 0.5 else pair[::-1] for pair in itertools.combinations(range(m), 2)]
    arcs = [arc for arc in arcs if rng.random() < 0.7] or arcs[:1]
    expected = np.full((m, m), 0.5)
    for i, j in arcs:
        expected[i, j] += 1 / (2 * len(arcs))
        expected[j, i] -= 1 / (2 * len(arcs))
    orders = mcgarvey(m, arcs)
    assert len(orders) == 2 * len(arcs)
    off_diagonal = ~np.eye(m, dtype=bool)
    shares = pair_by_pair(list(orders), np.full(len(orders), 1 / len(orders)))
    np.testing.assert_allclose(shares[off_diagonal], expected[off_diagonal], atol=1e-12)
    found = decompose(expected)
    assert found.realizable is True
    assert found.residual <= 1e-9


def test_one_arc_gives_a_single_unanimous_pair() -> None:
    shares = tournament_of(mcgarvey(5, [(3, 1)]), [0.5, 0.5])
    expected = np.full((5, 5), 0.5)
    expected[3, 1], expected[1, 3] = 1.0, 0.0
    np.fill_diagonal(expected, np.nan)
    np.testing.assert_array_equal(shares, expected)
    assert decompose(shares).realizable is True


@given(SEEDS, st.integers(2, 7))
@settings(max_examples=40)
def test_shares_near_one_half_are_always_realizable(seed: int, m: int) -> None:
    # App. D.1's ball: McGarvey's tournaments, half a unit from the centre along each of d axes, reach 1/(2d) everywhere
    reach = 1 / (2 * math.comb(m, 2))
    upper = 0.5 + np.random.default_rng(seed).choice([-reach, reach], size=(m, m))
    assert decompose(np.triu(upper, 1) + np.tril(1 - upper.T, -1)).realizable is True


# --- arguments ------------------------------------------------------------------------------------------------------


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
def test_shares_that_are_no_tournament_are_refused(shares: npt.ArrayLike, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        decompose(shares)


def test_other_arguments_are_checked() -> None:
    for orders in ([], [(0, 1), (0, 1, 2)], [(0, 0)], [(1, 2)]):
        with pytest.raises(UsageError, match="same alternatives"):
            tournament_of(orders, [1.0])
    with pytest.raises(UsageError, match="sum to 1"):
        reduce_support([(0, 1)], [0.5])
    with pytest.raises(UsageError, match="k must be at least 1"):
        sample_rankings([(0, 1)], [1.0], k=0)
    with pytest.raises(UsageError, match="k must be at least 1"):
        sampling_error([[0.5, 0.5], [0.5, 0.5]], k=0)
    with pytest.raises(UsageError, match="seed must not be negative"):
        sample_rankings([(0, 1)], [1.0], k=1, seed=-1)
    with pytest.raises(UsageError, match="an arc joins two"):
        mcgarvey(3, [(0, 3)])
    with pytest.raises(UsageError, match="at most 16"):
        best_ranking(np.zeros((17, 17)))
