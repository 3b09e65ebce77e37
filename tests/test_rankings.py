"""Mixtures of rankings: sampled, decomposed, against naive computation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures import pair_by_pair, random_mixture

from pluralign.core.errors import UsageError
from pluralign.theory.rankings import (
    decompose,
    sample_rankings,
    sampling_error,
    tournament_of,
)

SEEDS = st.integers(0, 100_000)


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
def test_small_majorities_along_any_digraph_are_realizable(seed: int, m: int) -> None:
    """McGarvey's construction (App. D.1): t_ij = ½ + 1/(2n) on each of n arcs, and ½ elsewhere."""
    rng = np.random.default_rng(seed)
    arcs = [pair if rng.random() < 0.5 else pair[::-1] for pair in itertools.combinations(range(m), 2)]
    arcs = [arc for arc in arcs if rng.random() < 0.7] or arcs[:1]
    expected = np.full((m, m), 0.5)
    for i, j in arcs:
        expected[i, j] += 1 / (2 * len(arcs))
        expected[j, i] -= 1 / (2 * len(arcs))
    result = decompose(expected)
    assert result.realizable is True
    assert result.residual <= 1e-9
    assert len(result.rankings) <= math.comb(m, 2) + 1


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
