"""Social choice rules against brute force and their defining properties."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluralign.core.errors import UsageError
from pluralign.theory.social_choice import RULES, borda, choose, maximal_lottery, maximin, pairwise_support, schulze


def random_support(seed: int, n: int = 5, k: int = 7) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    random = np.random.default_rng(seed)
    return pairwise_support(random.standard_normal((n, k)), random.dirichlet(np.ones(k)))


def test_support_sums_the_weights_of_members_and_a_tie_counts_half() -> None:
    rewards, weights = [[1.0, 2.0, 0.0], [1.0, 1.0, 5.0]], [0.2, 0.5, 0.3]
    support = pairwise_support(rewards, weights)
    assert support[0, 1] == pytest.approx(0.5 * 0.2 + 0.5)
    assert support[1, 0] == pytest.approx(0.5 * 0.2 + 0.3)


@given(st.integers(0, 10_000))
def test_support_of_both_sides_sums_to_one(seed: int) -> None:
    support = random_support(seed)
    assert np.allclose(support + support.T, 1)


@given(st.integers(0, 10_000))
def test_a_condorcet_winner_is_chosen_by_all_but_borda(seed: int) -> None:
    support = random_support(seed)
    beats = support > 0.5 + 1e-6
    winners = np.flatnonzero(beats.sum(axis=1) == len(support) - 1)
    if len(winners):
        for rule in ("maximin", "schulze", "lottery"):
            assert choose(support, rule, seed) == winners[0]


@given(st.integers(0, 10_000), st.permutations(range(5)))
def test_renaming_candidates_renames_the_scores(seed: int, order: list[int]) -> None:
    support = random_support(seed)
    for rule in ("maximin", "borda", "schulze"):
        assert np.allclose(RULES[rule](support[np.ix_(order, order)]), RULES[rule](support)[order])


def test_borda_is_the_mean_rank_of_weighted_members() -> None:
    random = np.random.default_rng(3)
    rewards, weights = random.standard_normal((5, 4)), random.dirichlet(np.ones(4))
    beaten = (rewards[:, None] > rewards[None]).sum(axis=1)  # number of rivals ranked below, per member
    assert np.allclose(borda(pairwise_support(rewards, weights)), beaten @ weights / 4)


def brute_force_schulze(support: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> list[int]:
    n = len(support)

    def strength(a: int, b: int) -> float:
        best = 0.0
        middle = [c for c in range(n) if c not in (a, b)]
        for size in range(len(middle) + 1):
            for path in itertools.permutations(middle, size):
                links = [support[x, y] for x, y in itertools.pairwise([a, *path, b])]
                if min(links) > 0.5 + 1e-9:
                    best = max(best, min(links))
        return best

    return [sum(strength(a, b) > strength(b, a) + 1e-9 for b in range(n) if b != a) for a in range(n)]


@pytest.mark.parametrize("seed", range(12))
def test_schulze_agrees_with_brute_force_over_all_paths(seed: int) -> None:
    support = random_support(seed, n=5, k=3)
    assert schulze(support).tolist() == brute_force_schulze(support)


@pytest.mark.parametrize("seed", range(12))
def test_no_candidate_beats_the_maximal_lottery(seed: int) -> None:
    support = random_support(seed, k=3)
    lottery = maximal_lottery(support)
    assert lottery.sum() == pytest.approx(1)
    assert ((support - 0.5) @ lottery).max() <= 1e-7


def test_the_lottery_draws_candidates_of_a_cycle_equally_often() -> None:
    cycle = np.array([[0.5, 0.7, 0.3], [0.3, 0.5, 0.7], [0.7, 0.3, 0.5]])
    drawn = np.bincount([choose(cycle, "lottery", seed) for seed in range(600)], minlength=3)
    assert drawn.min() > 150


def test_ties_are_broken_by_mean_support_then_at_random() -> None:
    support = np.array([[0.5, 0.5, 0.6], [0.5, 0.5, 0.9], [0.4, 0.1, 0.5]])
    assert maximin(support)[:2].tolist() == [0.5, 0.5]
    assert {choose(support, "maximin", seed) for seed in range(20)} == {1}
    even = np.full((2, 2), 0.5)
    assert {choose(even, "maximin", seed) for seed in range(20)} == {0, 1}


def test_an_unknown_rule_raises_an_error_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match="did you mean 'schulze'"):
        choose(np.full((2, 2), 0.5), "schulz")
