"""The best ranking against enumeration of all rankings."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixtures import all_incidences, pair_by_pair

from pluralign.core.errors import UsageError
from pluralign.theory.rankings import Ranking, best_ranking, local_search_ranking

SEEDS = st.integers(0, 100_000)


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
