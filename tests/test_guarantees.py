"""Each theorem with a known truth: simulated, enumerated, or against exact probabilities from scipy."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pluralign.core.errors import UsageError
from pluralign.theory.calibration import brier, disagreement, outliers
from pluralign.theory.guarantees import (
    betting_interval,
    distances_to_ensemble,
    generalization_bound,
    members_to_keep,
    opinion_variance,
    outlier_threshold,
    outlier_weight_bound,
    pruning_bound,
    pseudo_dimension_bound,
    random_ensemble_error,
    samples_until_informative,
    shifted_bound,
    sufficient_size,
)

SEEDS, SIZES, BETAS = st.integers(0, 5000), st.integers(1, 10), st.one_of(st.just(2.0), st.floats(2, 30))

# --- Theorem 2 --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10_000))
def test_k_members_suffice_for_an_error_of_one_quarter_over_k(k: int) -> None:
    assert sufficient_size(1 / (4 * k)) == k
    assert sufficient_size(float(Fraction(1, 4 * k)) * 1.0001) == k, "a slightly larger error needs no more members"


def test_lower_variance_needs_fewer_members() -> None:
    assert sufficient_size(0.01) == 25
    assert sufficient_size(0.01, variance=0.09) == 9
    assert sufficient_size(0.5, variance=0.01) == 1, "at least one member"
    for bad in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(UsageError, match="above 0 and at most 1"):
            sufficient_size(bad)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("true", [(0.0, 0.0, 1.0), (0.3, 0.0, 0.7), (0.5, 0.2, 0.3)])
def test_the_estimate_of_the_opinion_variance_is_unbiased(n: int, true: tuple[float, float, float]) -> None:
    """Enumerates all votes 0, ½ or 1 of n people."""
    expected = 0.0
    for votes in product((0.0, 0.5, 1.0), repeat=n):
        prob = math.prod(true[int(2 * vote)] for vote in votes)
        expected += prob * opinion_variance([sum(votes) / n], n, votes.count(0.5))
    mean = true[1] / 2 + true[2]
    assert expected == pytest.approx(true[1] / 4 + true[2] - mean**2)


def test_random_annotators_have_the_error_of_the_proof() -> None:
    random = np.random.default_rng(0)
    true, n, k = random.random(4000), 5, 6
    estimate = random_ensemble_error(random.binomial(n, true) / n, np.full(4000, n), k)
    measured = np.mean([brier(random.binomial(k, true) / k, true) for _ in range(20)])
    assert estimate == pytest.approx(np.mean(true * (1 - true)) / k, rel=0.05)
    assert measured == pytest.approx(estimate, rel=0.05)
    assert measured < 1 / (4 * k)
    assert math.isnan(random_ensemble_error([1.0, 0.0], 1, k)), "one vote per pair shows no disagreement"


# --- Theorem 3 --------------------------------------------------------------------------------------------------------


def random_ensemble(seed: int, k: int, n: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw votes of k members (some ties, some copies), weights (some zero), and true shares near the ensemble's."""
    random = np.random.default_rng(seed)
    leaning = random.choice([0.02, 0.3, 0.5, 0.97], k)
    votes = (random.random((n, k)) < leaning).astype(float)
    votes[random.random((n, k)) < random.choice([0.0, 0.1])] = 0.5
    if k > 2:
        votes[:, 0] = votes[:, -1]
    weights = random.dirichlet(np.full(k, random.choice([0.3, 1.0, 50.0])))
    if k > 1 and random.random() < 0.3:
        weights[random.integers(k)] = 0.0
        weights /= weights.sum()
    truth = np.clip(votes @ weights + random.normal(0, random.choice([0.0, 0.02, 0.2]), n), 0, 1)
    return votes, weights, truth


@given(SEEDS, SIZES, BETAS, st.booleans())
def test_the_error_after_pruning_is_within_theorem_3(seed: int, k: int, beta: float, only_far: bool) -> None:
    votes, weights, truth = random_ensemble(seed, k)
    before = np.clip(votes @ weights, 0, 1)
    kept = members_to_keep(votes, weights, beta, only_far=only_far)
    after = np.clip(votes[:, kept] @ weights[kept] / weights[kept].sum(), 0, 1)
    removed = 1 - weights[kept].sum()
    assert removed <= 1 / (beta - 1) + 1e-9
    shift = math.sqrt(np.mean((after - before) ** 2))
    assert shift <= removed + 1e-9
    epsilon = brier(before, truth)
    assert brier(after, truth) <= shifted_bound(epsilon, shift) + 1e-9 <= pruning_bound(epsilon, beta) + 2e-9


@given(SEEDS, SIZES, BETAS)
def test_no_outlier_remains_if_the_minimum_disagreement_is_known(seed: int, k: int, beta: float) -> None:
    """The vote pattern that follows every majority has the minimum."""
    votes, weights, truth = random_ensemble(seed, k)
    epsilon = brier(np.clip(votes @ weights, 0, 1), truth)
    least = float(np.minimum(truth, 1 - truth).mean())
    phi = np.asarray(disagreement(votes, truth))
    far = outliers(phi, beta, (beta + 1) * math.sqrt(epsilon), least)
    assert (far == (phi > outlier_threshold(beta, epsilon, least))).all()
    assert weights[far].sum() <= outlier_weight_bound(beta) + 1e-9, "the first part of the theorem"
    for only_far in (False, True):
        assert not far[members_to_keep(votes, weights, beta, only_far=only_far)].any()


def test_random_ensembles_include_outliers() -> None:
    count = 0
    for seed in range(300):
        votes, weights, truth = random_ensemble(seed, 8)
        epsilon = brier(np.clip(votes @ weights, 0, 1), truth)
        least = float(np.minimum(truth, 1 - truth).mean())
        count += bool((np.asarray(disagreement(votes, truth)) > outlier_threshold(2.5, epsilon, least)).any())
    assert count > 20


def far_one(weight: float, n: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Nine members that agree except on one pair each, and one that votes the opposite."""
    votes = np.ones((n, 10))
    votes[np.arange(9), np.arange(9)] = 0
    votes[:, 9] = 1 - votes[:, 0]
    return votes, np.array([(1 - weight) / 9] * 9 + [weight])


@pytest.mark.parametrize(("beta", "removed"), [(11.5, 0), (10.5, 1)])
def test_a_member_that_crosses_the_weight_limit_is_kept(beta: float, removed: int) -> None:
    """A weight of 0.1 is removed if 1/(β−1) is above it; the next member would exceed the limit and is kept."""
    kept = members_to_keep(*far_one(0.1), beta)
    assert len(kept) == 10 - removed
    assert (9 in kept) == (removed == 0)


def test_members_at_equal_distance_are_removed_up_to_the_weight_limit() -> None:
    votes = np.eye(4)  # all at the same distance
    weights = np.full(4, 0.25)
    assert len(set(distances_to_ensemble(votes, weights).round(12))) == 1
    assert [len(members_to_keep(votes, weights, beta)) for beta in (5.01, 5, 3, 2)] == [4, 3, 2, 1]


def test_at_beta_two_the_nearest_member_with_weight_is_kept() -> None:
    """The rule as printed would remove all members. The weight of a member without weight cannot be scaled to 1."""
    votes, weights = far_one(0.4)
    votes, weights = np.column_stack([votes, np.ones(50)]), np.append(weights, 0.0)
    assert distances_to_ensemble(votes, weights).argmin() == 10
    (kept,) = members_to_keep(votes, weights, beta=2)
    assert weights[kept] > 0
    assert kept < 9


def test_only_far_keeps_all_members_if_none_is_far() -> None:
    votes, weights = far_one(0.05)
    assert members_to_keep(votes, weights, 5).tolist() != members_to_keep(votes, weights, 5, only_far=True).tolist()
    assert members_to_keep(votes, weights, 5, only_far=True).tolist() == list(range(9)), "the far member is removed"
    assert len(members_to_keep(votes[:, :9], np.full(9, 1 / 9), 5)) < 9, "as printed, the rule removes near members"
    assert len(members_to_keep(votes[:, :9], np.full(9, 1 / 9), 5, only_far=True)) == 9


@given(SEEDS, SIZES)
def test_the_mean_distance_equals_that_of_two_random_members(seed: int, k: int) -> None:
    votes, weights, _ = random_ensemble(seed, k)
    distance = distances_to_ensemble(votes, weights)
    pairwise = [[np.mean(v * (1 - w) + (1 - v) * w) for w in votes.T] for v in votes.T]
    np.testing.assert_allclose(distance, np.array(pairwise) @ weights, atol=1e-9)
    share = votes @ weights
    assert distance @ weights == pytest.approx(np.mean(2 * share * (1 - share)), abs=1e-9)


@pytest.mark.parametrize("beta", [1.5, math.nan, math.inf, -3.0])
def test_theorem_3_requires_beta_of_at_least_two(beta: float) -> None:
    with pytest.raises(UsageError, match="at least 2"):
        members_to_keep(np.eye(2), [0.5, 0.5], beta)


# --- Theorem 4 --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 2000), st.integers(1, 64))
def test_the_pseudo_dimension_bound_holds_despite_the_slip_in_its_proof(d: int, k: int) -> None:
    """2^m ≤ (em)^((d+1)k) is simplified in print to m log 2 ≤ (d+1)k log m, without the e; the result still holds.

    Above 4(d+1)k log(2(d+1)k) points there are too few patterns to shatter them.
    """
    a, m = (d + 1) * k, pseudo_dimension_bound(d, k) / 5
    assert m == pytest.approx(4 * a * math.log(2 * a))
    assert m * math.log(2) > a * (1 + math.log(m))
    assert math.log(2) > a / m, "so it holds for every larger m, because the left side grows faster"


def test_the_bound_holds_for_every_ensemble_at_once() -> None:
    """Two members on a line, r and −r, with any weights: p̂ is α if Δ > 0, else 1 − α."""
    random = np.random.default_rng(1)
    n, delta, alpha = 2000, 0.05, np.linspace(0, 1, 41)[:, None]
    bound = generalization_bound(n, d=1, k=2, delta=delta)
    assert bound < 1
    misses, gaps = 0, []
    for _ in range(40):
        right, people = random.random(n) < 0.5, random.random(n) < 0.8
        p = np.where(right, people, 1 - people)
        sample = np.mean((np.where(right, alpha, 1 - alpha) - p) ** 2, axis=1)
        true = 0.8 * (alpha[:, 0] - 1) ** 2 + 0.2 * alpha[:, 0] ** 2
        gaps.append(np.abs(sample - true).max())
        misses += gaps[-1] > bound
    assert max(gaps) > 0.005
    assert misses <= 2


@given(st.integers(1, 500), st.integers(1, 16), st.sampled_from([0.05, 0.5, 1.0, 1.3]))
def test_bisection_finds_the_smallest_informative_number_of_pairs(d: int, k: int, width: float) -> None:
    n = samples_until_informative(d, k, 0.05, width)
    assert generalization_bound(n, d, k, 0.05) < width <= generalization_bound(n - 1, d, k, 0.05)
    assert generalization_bound(10 * n, d, k, 0.05) < generalization_bound(2 * n, d, k, 0.05) < width


def test_the_generalization_bound_is_the_formula_of_the_paper() -> None:
    size = 20 * 101 * 8 * math.log(2 * 101 * 8)
    n = 10_000_000
    expected = math.sqrt(2 * size * math.log(math.e * n / size) / n) + math.sqrt(math.log(1 / 0.1) / (2 * n))
    assert generalization_bound(n, d=100, k=8, delta=0.1) == pytest.approx(expected)
    assert generalization_bound(int(size), d=100, k=8, delta=0.1) == math.inf
    with pytest.raises(UsageError, match="delta"):
        generalization_bound(n, 100, 8, delta=1.0)
    with pytest.raises(UsageError, match="at least 1"):
        pseudo_dimension_bound(0, 8)
    with pytest.raises(UsageError, match="width"):
        samples_until_informative(100, 8, 0.1, width=0.0)


# --- held-out prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 25, 120])
@pytest.mark.parametrize("p", [0.03, 0.5, 0.9])
def test_the_betting_interval_has_its_nominal_coverage(n: int, p: float) -> None:
    random = np.random.default_rng(n)
    ends = np.array([betting_interval(random.random(n) < p, 0.2) for _ in range(250)])
    assert np.mean((ends[:, 0] > p) | (ends[:, 1] < p)) <= 0.2
    assert (ends[:, 0] <= ends[:, 1]).all()


def test_the_betting_interval_is_not_much_wider_than_necessary() -> None:
    random = np.random.default_rng(0)
    values = random.beta(2, 30, 300)
    low, high = betting_interval(values, 0.05)
    assert low < values.mean() < high
    assert 3 * (high - low) < 2 * math.sqrt(math.log(2 / 0.05) / (2 * 300)), "Hoeffding's half-width"
    ends = np.array([betting_interval(random.random(120) < 0.5, 0.2) for _ in range(250)])
    assert np.mean((ends[:, 0] > 0.5) | (ends[:, 1] < 0.5)) > 0.05, "for coins the coverage is close to nominal"


@given(SEEDS, st.floats(-2, 0), st.floats(1, 3))
def test_the_betting_interval_is_equivariant_to_scale_and_reflection(seed: int, low: float, high: float) -> None:
    values = np.random.default_rng(seed).random(30)
    below, above = betting_interval(values, 0.1)
    scaled = betting_interval(low + (high - low) * values, 0.1, low, high)
    np.testing.assert_allclose(scaled, [low + (high - low) * below, low + (high - low) * above], atol=1e-6)
    np.testing.assert_allclose(betting_interval(1 - values, 0.1), [1 - above, 1 - below], atol=1e-6)


def test_the_betting_interval_of_one_value_matches_a_manual_calculation() -> None:
    """One value of 1, δ = .5: stakes √(2 log 4 / ¼), at most .9/m; m is rejected if 1 + λ(1 − m) reaches 4."""
    low, high = betting_interval([1.0], 0.5)
    stake = min(math.sqrt(8 * math.log(4)), 0.9 / low)
    assert 1 + stake * (1 - low) == pytest.approx(4, abs=1e-6)
    assert high == 1.0
