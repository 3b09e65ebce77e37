"""Kendall's tau against scipy, its mean over prompts by hand, and invariances."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import kendalltau

from pluralign.theory import kendall
from pluralign.theory.calibration import ensemble_prob, votes_from_rewards
from pluralign.theory.social_choice import first_choices

Rewards = npt.NDArray[np.float64]
TIED = arrays(np.float64, st.tuples(st.integers(2, 12), st.integers(1, 4)), elements=st.integers(-3, 3).map(float))


def by_scipy(rewards: Rewards) -> Rewards:
    k = rewards.shape[1]
    return np.array([[kendalltau(rewards[:, i], rewards[:, j]).statistic for j in range(k)] for i in range(k)])


@given(TIED)
def test_tau_equals_scipys_with_ties_and_is_nan_for_a_constant_member(rewards: Rewards) -> None:
    np.testing.assert_allclose(kendall.kendall_tau_b(rewards), by_scipy(rewards), atol=1e-12)


@given(TIED)
def test_tau_depends_only_on_the_order_of_rewards(rewards: Rewards) -> None:
    tau = kendall.kendall_tau_b(rewards)
    np.testing.assert_array_equal(kendall.kendall_tau_b(3.0 * rewards**3 + 7.0), tau)
    np.testing.assert_array_equal(kendall.kendall_tau_b(rewards[::-1]), tau)
    np.testing.assert_array_equal(kendall.kendall_tau_b(rewards[:, ::-1]), tau[::-1, ::-1])
    negated = rewards.copy()
    negated[:, 0] *= -1
    np.testing.assert_array_equal(kendall.kendall_tau_b(negated)[0, 1:], -tau[0, 1:])


def test_the_block_size_does_not_change_tau(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = np.random.default_rng(0).integers(0, 9, (30, 3)).astype(float)
    whole = kendall.kendall_tau_b(rewards)
    monkeypatch.setattr(kendall, "SIGNS_PER_BLOCK", 1)
    np.testing.assert_array_equal(kendall.kendall_tau_b(rewards), whole)


def test_means_and_errors_over_prompts_ignore_constant_members() -> None:
    random = np.random.default_rng(1)
    prompts = [random.standard_normal((n, 3)) for n in (4, 6, 9, 5)]
    prompts[2][:, 0] = 1.0
    mean = kendall.mean_tau(prompts)
    taus = [kendalltau(r[:, 0], r[:, 2]).statistic for r in (prompts[0], prompts[1], prompts[3])]
    assert mean.tau[0, 2] == pytest.approx(np.mean(taus))
    assert mean.standard_error[0, 2] == pytest.approx(np.std(taus, ddof=1) / np.sqrt(3))
    assert mean.constant.tolist() == [1, 0, 0]
    pairs = [mean.tau[0, 1], mean.tau[0, 2], mean.tau[1, 2]]
    assert mean.off_diagonal == pytest.approx(np.mean(pairs))
    assert mean.per_prompt[2] == pytest.approx(kendalltau(prompts[2][:, 1], prompts[2][:, 2]).statistic)
    assert mean.off_diagonal_standard_error == pytest.approx(mean.per_prompt.std(ddof=1) / 2)


def test_a_single_member_has_no_off_diagonal_mean() -> None:
    mean = kendall.mean_tau([np.array([[1.0], [2.0]])])
    assert np.isnan(mean.off_diagonal)
    assert mean.tau.tolist() == [[1.0]]
    assert np.isnan(kendall.weighted_off_diagonal([[1.0]], [1.0]))


def test_the_weighted_mean_counts_pairs_by_both_weights_and_skips_nan() -> None:
    tau = np.array([[1.0, 0.2, -0.4], [0.2, 1.0, 0.6], [-0.4, 0.6, 1.0]])
    expected = (0.5 * 0.3 * 0.2 + 0.5 * 0.2 * -0.4 + 0.3 * 0.2 * 0.6) / (0.15 + 0.1 + 0.06)
    assert kendall.weighted_off_diagonal(tau, [0.5, 0.3, 0.2]) == pytest.approx(expected)
    tau[0, 1] = tau[1, 0] = np.nan
    assert kendall.weighted_off_diagonal(tau, [0.5, 0.3, 0.2]) == pytest.approx((-0.04 + 0.036) / 0.16)


def test_near_copies_and_opposites_start_at_the_threshold_and_are_sorted() -> None:
    tau = np.array([[1.0, 0.8, -0.5], [0.8, 1.0, 0.95], [-0.5, 0.95, 1.0]])
    assert kendall.near_copies(tau) == [(1, 2), (0, 1)]
    assert kendall.near_opposites(tau) == [(0, 2)]
    assert kendall.near_copies(np.where(tau > 0.9, np.nan, tau)) == [(0, 1)]


def test_expected_distinct_choices_match_a_simulation() -> None:
    draws = np.random.default_rng(0).integers(7, size=(20_000, 4))
    simulated = np.mean([len(set(row)) for row in draws.tolist()])
    assert kendall.expected_distinct(7, 4) == pytest.approx(simulated, abs=0.02)


@pytest.mark.parametrize("bad", [np.zeros((0, 2)), np.zeros(3)])
def test_invalid_rewards_are_refused(bad: Rewards) -> None:
    with pytest.raises(ValueError, match="rewards must"):
        kendall.kendall_tau_b(bad)


# --- agreement of votes, and the example of equal shares from opposite members ---


def test_agreement_counts_equal_votes_and_half_of_the_ties() -> None:
    random = np.random.default_rng(0)
    v, w = random.choice([0.0, 0.5, 1.0], size=(50, 3)), random.choice([0.0, 1.0], size=(50, 2))
    counted = [[np.mean([1 - abs(a - b) for a, b in zip(v[:, i], w[:, j], strict=True)]) for j in range(2)]
               for i in range(3)]  # fmt: skip
    np.testing.assert_allclose(kendall.vote_agreement(v, w), counted)


def test_two_perfectly_calibrated_ensembles_can_have_opposite_members() -> None:
    """{r, −r} and {s, −s} predict ½ on every pair, but no member of one votes like a member of the other."""
    r, s = np.array([4.0, 3.0, 2.0, 1.0]), np.array([2.0, 4.0, 1.0, 3.0])
    first, second, half = np.column_stack([r, -r]), np.column_stack([s, -s]), np.array([0.5, 0.5])
    a, b = np.triu_indices(4, 1)
    votes, others = votes_from_rewards(first[a], first[b]), votes_from_rewards(second[a], second[b])
    np.testing.assert_array_equal(ensemble_prob(votes, half), np.full(6, 0.5))
    np.testing.assert_array_equal(ensemble_prob(votes, half), ensemble_prob(others, half))
    matrix = kendall.vote_agreement(votes, others)
    np.testing.assert_array_equal(matrix, np.full((2, 2), 0.5))  # each agrees with each as often as a coin
    np.testing.assert_array_equal(first_choices(first, half), [0.5, 0, 0, 0.5])  # no first choice in common
    np.testing.assert_array_equal(first_choices(second, half), [0, 0.5, 0.5, 0])
