"""Social choice rules against brute force and their defining properties."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import UsageError
from pluralign.theory.calibration import ensemble_prob, policy_prob, votes_from_rewards, with_undecided
from pluralign.theory.social_choice import (
    RULES,
    FirstChoiceShares,
    borda,
    choose,
    covered_favourites,
    first_choices,
    greedy_cover,
    maximal_lottery,
    maximin,
    merge,
    pairwise_support,
    policies,
    schulze,
    top_twos,
)


def random_support(seed: int, n: int = 5, k: int = 7) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    random = np.random.default_rng(seed)
    return pairwise_support(random.standard_normal((n, k)), random.dirichlet(np.ones(k)))


def test_support_sums_the_weights_of_members_and_a_tie_counts_half() -> None:
    rewards, weights = [[1.0, 2.0, 0.0], [1.0, 1.0, 5.0]], [0.2, 0.5, 0.3]
    support = pairwise_support(rewards, weights)
    assert support[0, 1] == pytest.approx(0.5 * 0.2 + 0.5)
    assert support[1, 0] == pytest.approx(0.5 * 0.2 + 0.3)


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


# --- predicted first choices and top twos against enumeration, and greedy slates against all slates ---


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


def test_weight_goes_to_top_choices_and_ties_split_it() -> None:
    rewards = [[1.0, 5.0], [1.0, 2.0], [0.0, 1.0]]
    np.testing.assert_allclose(first_choices(rewards, [0.6, 0.4]), [0.7, 0.3, 0.0])


@given(SEEDS)
def test_small_temperatures_approach_the_favourites(seed: int) -> None:
    rewards, weights = members(seed)
    assert np.allclose(first_choices(rewards, weights, 1e-7), first_choices(rewards, weights), atol=1e-6)
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


def first_choice(ranking: dict[int, int], items: tuple[int, ...]) -> FloatArray:
    """1/m for each of the m items that share the best place of a ranking."""
    best = min(ranking[item] for item in items)
    first = np.array([ranking[item] == best for item in items], dtype=float)
    return np.asarray(first / first.sum())


@pytest.mark.parametrize("t", [2, 3, 4])
def test_first_choices_are_counted_over_all_people_who_ranked_a_set(t: int) -> None:
    random, width = np.random.default_rng(t), 5
    rankings = [
        {int(item): int(random.integers(3)) for item in random.choice(7, random.integers(2, width + 1), replace=False)}
        for _ in range(40)
    ]
    person = np.append(np.arange(38), [0, 1]).astype(np.int32)
    items, places = np.full((2, 40, width), -1)
    for row, ranking in enumerate(rankings):
        columns = np.sort(random.choice(width, len(ranking), replace=False))
        items[row, columns], places[row, columns] = zip(*sorted(ranking.items()), strict=True)
    found = FirstChoiceShares.of(items, places, person, t)
    expected = {}
    for chosen in itertools.combinations(range(7), t):
        whole = [row for row, ranking in enumerate(rankings) if set(chosen) <= ranking.keys()]
        first_of_person = {person[row]: row for row in reversed(whole)}
        if len(first_of_person) >= 2:
            expected[chosen] = [first_choice(rankings[row], chosen) for row in first_of_person.values()]
    assert [tuple(row) for row in found.items.tolist()] == sorted(expected)
    for row, chosen in enumerate(sorted(expected)):
        v = np.array(expected[chosen])
        f, n = v.mean(axis=0), len(v)
        assert (found.n[row], found.shares[row].tolist()) == (n, pytest.approx(f.tolist()))
        assert found.noise[row] == pytest.approx(((v - f) ** 2).sum() / (n * (n - 1)))
    q = random.dirichlet(np.ones(t), len(found.n))
    np.testing.assert_allclose(found.error(q), [sum((q[i] - found.shares[i]) ** 2) for i in range(len(q))])


@pytest.mark.parametrize(("t", "n"), [(2, 2), (3, 2), (3, 4), (4, 3)])
def test_error_less_noise_is_unbiased_over_all_outcomes_of_n_people(t: int, n: int) -> None:
    """People draw one of several rankings, some of them with ties; every combination of n draws has its probability."""
    random, chosen = np.random.default_rng(10 * t + n), tuple(range(t))
    kinds = random.integers(2, size=(5, t))
    chance, q = random.dirichlet(np.ones(5)), random.dirichlet(np.ones(t))
    v = np.array([first_choice(dict(enumerate(kind)), chosen) for kind in kinds.tolist()])
    assert ((v > 0) & (v < 1)).any(), "some people tie"
    expectation = 0.0
    for outcome in itertools.product(range(5), repeat=n):
        people = np.arange(n, dtype=np.int32)
        found = FirstChoiceShares.of(np.tile(chosen, (n, 1)), kinds[list(outcome)], people, t)
        expectation += chance[list(outcome)].prod() * float((found.error(q[None]) - found.noise)[0])
    assert expectation == pytest.approx(((q - chance @ v) ** 2).sum())
