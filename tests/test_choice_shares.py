"""Predicted first choices and top twos against enumeration, and greedy slates against all slates."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluralign.core.arrays import FloatArray
from pluralign.theory.calibration import ensemble_prob, policy_prob, votes_from_rewards, with_undecided
from pluralign.theory.kendall import weight_on_tops
from pluralign.theory.social_choice import (
    covered_favourites,
    first_choices,
    greedy_cover,
    merge,
    pairwise_support,
    policies,
    top_twos,
)

SEEDS, BETAS, SHARES = st.integers(0, 10_000), st.sampled_from([0.0, 0.01, 0.3, 2.0]), st.floats(0.0, 1.0)


def members(seed: int, n: int = 5, k: int = 4) -> tuple[FloatArray, FloatArray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((n, k)), random.dirichlet(np.ones(k))


@given(SEEDS, BETAS, SHARES)
def test_first_choices_of_a_pair_are_the_predicted_shares_of_the_ensemble(seed: int, beta: float, u: float) -> None:
    rewards, weights = members(seed, n=2)
    difference = rewards[:1] - rewards[1:]
    votes = votes_from_rewards(difference, np.zeros_like(difference))
    share = policy_prob(difference, weights, beta) if beta else ensemble_prob(votes, weights)
    assert first_choices(rewards, weights, beta, u)[0] == pytest.approx(float(with_undecided(share, u)[0]))
    assert pairwise_support(rewards, weights, beta, u)[0, 1] == pytest.approx(float(with_undecided(share, u)[0]))


@given(SEEDS, BETAS, SHARES)
def test_shares_are_a_distribution_and_a_constant_added_to_a_reward_changes_nothing(
    seed: int, beta: float, u: float
) -> None:
    rewards, weights = members(seed)
    moved = rewards + np.array([5.0, -3.0, 0.0, 100.0])
    pairs = top_twos(rewards, weights, beta, u)
    assert first_choices(rewards, weights, beta, u).sum() == pytest.approx(1)
    assert np.triu(pairs, 1).sum() == pytest.approx(1)
    assert np.allclose(pairs, pairs.T)
    assert np.allclose(np.diag(pairs), 0)
    assert np.allclose(first_choices(moved, weights, beta, u), first_choices(rewards, weights, beta, u), atol=1e-9)
    assert np.allclose(top_twos(moved, weights, beta, u), pairs, atol=1e-9)


@given(SEEDS)
def test_small_temperatures_approach_the_favourites(seed: int) -> None:
    rewards, weights = members(seed)
    assert np.allclose(first_choices(rewards, weights), weight_on_tops(rewards, weights))
    assert np.allclose(top_twos(rewards, weights, 1e-7), top_twos(rewards, weights), atol=1e-6)


@given(SEEDS)
def test_top_twos_are_the_first_two_draws_without_replacement(seed: int) -> None:
    rewards, weights = members(seed, n=4, k=2)
    chance = policies(rewards, 0.7)
    for a, b in itertools.combinations(range(4), 2):
        expected = chance[a] * chance[b] / (1 - chance[a]) + chance[b] * chance[a] / (1 - chance[b])
        assert top_twos(rewards, weights, 0.7)[a, b] == pytest.approx(float(expected @ weights))


def coverage(shares: FloatArray, rows: tuple[int, ...]) -> float:
    """Return the share of people covered by a slate: entries with a row or a column in it, each person once."""
    once, inside = np.triu(shares), np.isin(np.arange(len(shares)), rows)
    return float(once[inside[:, None] | inside[None]].sum())


@given(SEEDS, BETAS, st.integers(1, 4))
def test_greedy_slates_are_optimal_for_favourites_and_nearly_so_for_top_twos(seed: int, beta: float, size: int) -> None:
    rewards, weights = members(seed, n=6)
    for shares, guaranteed in (
        (covered_favourites(rewards, weights, beta, 0.1), 1.0),
        (top_twos(rewards, weights, beta, 0.1), 1 - 1 / math.e),
    ):
        chosen, covered = greedy_cover(shares, size, np.random.default_rng(seed))
        best = max(coverage(shares, rows) for rows in itertools.combinations(range(6), size))
        assert covered == pytest.approx(coverage(shares, tuple(chosen.tolist())))
        assert guaranteed * best - 1e-9 <= covered <= best + 1e-9
        assert len(set(chosen.tolist())) == size


@given(SEEDS, st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_merging_candidates_keeps_the_number_of_people(seed: int, labels: list[int]) -> None:
    rewards, weights = members(seed)
    group = np.unique(labels, return_inverse=True)[1].astype(np.int64)
    shares = top_twos(rewards, weights, 0.5)
    merged = merge(shares, group)
    assert np.triu(merged).sum() == pytest.approx(1)
    for number in range(len(merged)):
        rows = tuple(np.flatnonzero(group == number).tolist())
        assert coverage(merged, (number,)) == pytest.approx(coverage(shares, rows))


def test_equal_gains_are_broken_at_random() -> None:
    first = [int(greedy_cover(np.eye(2) / 2, 1, np.random.default_rng(seed))[0][0]) for seed in range(40)]
    assert set(first) == {0, 1}
