"""Mixtures of rankings: reduced, sampled, constructed and decomposed, against naive computation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures import all_incidences, pair_by_pair, random_mixture

from pluralign.core.errors import UsageError
from pluralign.theory.rankings import (
    Ranking,
    best_ranking,
    decompose,
    local_search_ranking,
    mcgarvey,
    reduce_support,
    sample_rankings,
    sampling_error,
    tournament_of,
)

SEEDS = st.integers(0, 100_000)


@given(SEEDS, st.integers(2, 5), st.integers(1, 150))
@settings(max_examples=40)
def test_reducing_keeps_the_tournament_and_at_most_as_many_rankings_as_caratheodory_allows(
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


def test_a_thousand_rankings_of_five_alternatives_reduce_to_eleven() -> None:
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
    result = decompose(shares)
    i, j = np.triu_indices(6, 1)
    errors = [
        np.mean((pair_by_pair(list(drawn), np.full(k, 1 / k)) - shares)[i, j] ** 2)
        for drawn in (sample_rankings(result.rankings, result.weights, k, seed) for seed in range(400))
    ]
    expected = sampling_error(shares, k)
    assert expected == pytest.approx(np.mean(shares[i, j] * (1 - shares[i, j])) / k)
    assert expected <= 1 / (4 * k)
    assert np.mean(errors) == pytest.approx(expected, abs=4 * np.std(errors) / 20)


def test_a_draw_depends_only_on_its_seed() -> None:
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2)]
    first = sample_rankings(orders, [0.5, 0.25, 0.25], 30, seed=1)
    assert first == sample_rankings(orders, [0.5, 0.25, 0.25], 30, seed=1)
    assert first != sample_rankings(orders, [0.5, 0.25, 0.25], 30, seed=2)


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
    orders = mcgarvey(m, arcs)
    assert len(orders) == 2 * len(arcs)
    off_diagonal = ~np.eye(m, dtype=bool)
    shares = pair_by_pair(list(orders), np.full(len(orders), 1 / len(orders)))
    np.testing.assert_allclose(shares[off_diagonal], expected[off_diagonal], atol=1e-12)
    result = decompose(expected)
    assert result.realizable is True
    assert result.residual <= 1e-9
    assert len(result.rankings) <= math.comb(m, 2) + 1


def test_one_arc_gives_a_single_unanimous_pair() -> None:
    shares = tournament_of(mcgarvey(5, [(3, 1)]), [0.5, 0.5])
    expected = np.full((5, 5), 0.5)
    expected[3, 1], expected[1, 3] = 1.0, 0.0
    np.fill_diagonal(expected, np.nan)
    np.testing.assert_array_equal(shares, expected)
    assert decompose(shares).realizable is True


def test_invalid_arguments_are_refused() -> None:
    for orders in ([], [(0, 1), (0, 1, 2)], [(0, 0)], [(1, 2)]):
        with pytest.raises(UsageError, match="same alternatives"):
            tournament_of(orders, [1.0])
    with pytest.raises(UsageError, match="sum to 1"):
        tournament_of([(0, 1)], [0.5])
    with pytest.raises(UsageError, match="k must be at least 1"):
        sample_rankings([(0, 1)], [1.0], k=0)
    with pytest.raises(UsageError, match="k must be at least 1"):
        sampling_error([[0.5, 0.5], [0.5, 0.5]], k=0)
    with pytest.raises(UsageError, match="seed must not be negative"):
        sample_rankings([(0, 1)], [1.0], k=1, seed=-1)
    with pytest.raises(UsageError, match="an arc must join two"):
        mcgarvey(3, [(0, 3)])


# --- the linear ordering problem ---


@given(SEEDS, st.integers(1, 6))
def test_the_best_ranking_has_the_greatest_weight_of_all(seed: int, m: int) -> None:
    weights = np.random.default_rng(seed).normal(size=(m, m))
    ranking, value = best_ranking(weights)
    _, incidences = all_incidences(m)
    assert value == pytest.approx((incidences * weights).sum(axis=(1, 2)).max(), abs=1e-12)
    assert value == pytest.approx((pair_by_pair([ranking], [1.0]) * weights).sum(), abs=1e-12)


@given(SEEDS)
def test_the_arcs_that_the_best_ranking_reverses_are_a_minimum_feedback_arc_set(seed: int) -> None:
    m = 5
    arcs = [arc for arc in itertools.permutations(range(m), 2) if np.random.default_rng([seed, *arc]).random() < 0.4]
    weights = np.zeros((m, m))
    for arc in arcs:
        weights[arc] = 1.0

    def feedback(order: Ranking) -> int:
        return sum(order.index(i) > order.index(j) for i, j in arcs)

    ranking, value = best_ranking(weights)
    assert feedback(ranking) == min(map(feedback, itertools.permutations(range(m)))) == len(arcs) - value


def test_the_local_search_is_nearly_always_optimal() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(50):
        weights = rng.normal(size=(9, 9))
        ranking, value = local_search_ranking(weights, rng)
        assert value == pytest.approx((pair_by_pair([ranking], [1.0]) * weights).sum())
        best = best_ranking(weights)[1]
        assert value <= best + 1e-9
        hits += value > best - 1e-9
    assert hits >= 45


def test_too_many_alternatives_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 16"):
        best_ranking(np.zeros((17, 17)))
