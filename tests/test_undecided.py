"""The undecided share: the same ensemble as one that contains r and −r, in predictions, theorems and answers."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from test_ensemble import some_ensemble
from test_pruning import four_and_a_contrarian, voting

from pluralign import PreferenceSet, certify, evaluate, town_hall
from pluralign.answering.answer import choose
from pluralign.answering.request import AnswerRequest, Voters
from pluralign.core.arrays import FloatArray
from pluralign.ensemble.held_out import HeldOutVotes, score_held_out
from pluralign.learning.measure import cross_fitted, reward_predictor
from pluralign.measuring.pruning import plan_pruning
from pluralign.theory import calibration, guarantees
from pluralign.theory.social_choice import RULES, pairwise_support

SEEDS, SHARES = st.integers(0, 2**32 - 1), st.floats(0.0, 0.95)


@pytest.fixture(scope="module")
def votes() -> PreferenceSet:
    return town_hall(200, votes_per_pair=(2, 6)).preferences


@pytest.fixture(scope="module")
def held_out(votes: PreferenceSet) -> HeldOutVotes:
    return score_held_out(some_ensemble(), votes)


def random_members(seed: int, n: int = 40, k: int = 5) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return reward differences of k members, their weights, and those of one more reward r without ties."""
    random = np.random.default_rng(seed)
    return random.normal(size=(n, k)), random.dirichlet(np.full(k, 0.5)), random.normal(size=n)


def with_pair(difference: FloatArray, weights: FloatArray, u: float, r: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the paper's form of an ensemble: its members with (1 − u)α_j, and r and −r with u/2 each."""
    return np.column_stack([difference, r, -r]), np.append((1 - u) * weights, [u / 2, u / 2])


def votes_of(difference: FloatArray) -> FloatArray:
    return (difference > 0).astype(float)


# --- the identity -----------------------------------------------------------------------------------------------------


@given(SEEDS, SHARES, st.sampled_from([0.05, 1.0, 20.0]))
def test_an_undecided_share_equals_r_and_minus_r_for_any_r_and_a_constant(seed: int, u: float, beta: float) -> None:
    difference, weights, r = random_members(seed)
    full, alpha = with_pair(difference, weights, u, r)
    ensemble = replace(some_ensemble(k=5), weights=weights, undecided=u, temperature=beta)
    found = ensemble.readings(difference)
    np.testing.assert_allclose(found["vote"], votes_of(full) @ alpha, atol=1e-12)
    np.testing.assert_allclose(found["policy"], (1 / (1 + np.exp(-full / beta))) @ alpha, atol=1e-12)
    tied = np.column_stack([difference, np.zeros(len(difference))])  # a constant reward ties on every pair
    votes = calibration.votes_from_rewards(tied, np.zeros_like(tied))
    by_ties = calibration.ensemble_prob(votes, np.append((1 - u) * weights, u))
    np.testing.assert_allclose(found["vote"], by_ties, atol=1e-12)


# --- Theorem 3 on an explicit ensemble --------------------------------------------------------------------------------


@given(SEEDS, SHARES)
def test_distances_are_those_of_the_explicit_ensemble(seed: int, u: float) -> None:
    difference, weights, r = random_members(seed)
    full, alpha = with_pair(difference, weights, u, r)
    explicit = guarantees.distances_to_ensemble(votes_of(full), alpha)
    np.testing.assert_allclose(
        guarantees.distances_to_ensemble(votes_of(difference), weights, u), explicit[:5], atol=1e-12
    )
    assert explicit[5] + explicit[6] == pytest.approx(1.0), "the distance of the pair is ½ on average"
    share = votes_of(full) @ alpha
    assert explicit @ alpha == pytest.approx(np.mean(2 * share * (1 - share)), abs=1e-9)
    assert guarantees.far_distance(votes_of(difference), weights, 3.0, u) == pytest.approx(
        3 * np.minimum(share, 1 - share).mean()
    )


@given(SEEDS, SHARES, st.floats(2.0, 12.0), st.booleans(), st.floats(0.0, 3.0))
def test_pruning_keeps_both_guarantees(seed: int, u: float, beta: float, only_far: bool, lean: float) -> None:
    """Members lean to one side, so that some are far. ε is the error against shares that are known exactly."""
    difference, weights, _ = random_members(seed)
    votes = votes_of(difference + lean)
    random = np.random.default_rng(seed)
    truth = np.clip(u / 2 + (1 - u) * votes @ weights + 0.1 * random.normal(size=len(votes)), 0, 1)
    before = u / 2 + (1 - u) * (votes @ weights)
    kept = guarantees.members_to_keep(votes, weights, beta, only_far=only_far, undecided=u)
    stays = guarantees.keeps_undecided(votes, weights, u, beta)
    removed = (1 - u) * (1 - weights[kept].sum()) + (0.0 if stays else u)
    if beta > 2.0001 or only_far:
        assert removed <= guarantees.outlier_weight_bound(beta) + 1e-9
    rest = weights[kept] * (1 - u)
    total = rest.sum() + (u if stays else 0.0)
    if total < 1e-9:  # a member whose weight is only rounding error
        return
    after = (votes[:, kept] @ rest + (u / 2 if stays else 0.0)) / total
    epsilon = float(np.mean((before - truth) ** 2))
    assert np.sqrt(np.mean((after - before) ** 2)) <= removed + 1e-9
    assert np.mean((after - truth) ** 2) <= guarantees.pruning_bound(epsilon, beta) + 1e-9
    least = float(np.minimum(truth, 1 - truth).mean())
    threshold = guarantees.outlier_threshold(beta, epsilon, least)
    assert (np.asarray(calibration.disagreement(votes[:, kept], truth)) <= threshold + 1e-9).all()
    assert not stays or threshold >= 0.5 - 1e-9, "its disagreement is ½"


def test_a_far_undecided_share_is_removed_and_uses_up_its_part_of_the_weight() -> None:
    """Members agree on 19 of 20 pairs. At u = .05, β = 4: ½ > 4·mean min(p̂, 1 − p̂), so the share is far."""
    columns = [[1] * 20 for _ in range(10)]
    columns[9] = [0] + [1] * 19
    held_out = voting(columns, [4] * 20, [0] * 20)
    ensemble = replace(some_ensemble(k=10).take(range(10), np.full(10, 0.1)), undecided=0.05)
    share = np.append(0.025 + 0.95 * 0.9, np.full(19, 0.975))
    assert 4 * np.minimum(share, 1 - share).mean() < 0.5
    pruning = plan_pruning(ensemble, held_out, beta=4, only_far=False)
    assert pruning.ensemble.undecided == 0
    assert pruning.undecided_before == 0.05
    assert len(pruning.removed) == 2, "1/(β − 1) − u = .283 is two members of .095 each"
    assert pruning.removed_weight == pytest.approx(0.05 + 2 * 0.095)
    far = plan_pruning(ensemble, held_out, beta=4)
    assert (far.removed, far.ensemble.undecided, far.removed_weight) == ([], 0.0, 0.05)


def test_a_near_undecided_share_is_kept_and_scaled_like_the_members() -> None:
    ensemble, held_out = four_and_a_contrarian(3, 1)
    undecided = replace(ensemble, undecided=0.4)
    assert plan_pruning(ensemble, held_out, beta=21, only_far=False).removed == [], "a weight of .08 is above 1/20"
    pruning = plan_pruning(undecided, held_out, beta=21, only_far=False)
    assert pruning.removed == [4], "a weight of (1 − u)·.08 is not"
    assert pruning.ensemble.undecided == pytest.approx(0.4 / (1 - 0.6 * 0.08))
    assert pruning.removed_weight == pytest.approx(0.6 * 0.08)
    after = np.column_stack([held_out.votes[:, :4], np.ones(20), np.zeros(20)])  # with r ≡ "a is better"
    weights = np.append(0.6 * 0.23 * np.ones(4), [0.2, 0.2]) / (1 - 0.6 * 0.08)
    error = np.mean((after @ weights - 0.75) ** 2) - 0.75 * 0.25 / 3
    assert pruning.error_after.mean == pytest.approx(error)
    assert pruning.to_json()["undecided"] == pytest.approx(pruning.ensemble.undecided)


# --- certificates and evaluation --------------------------------------------------------------------------------------


def test_certificates_count_two_more_rewards(held_out: HeldOutVotes) -> None:
    ensembles = (replace(some_ensemble(), undecided=u) for u in (0.0, 0.3))
    plain, undecided = (certify(ensemble, held_out, epsilon=0.01, beta=3) for ensemble in ensembles)
    assert (guarantees.paper_size(3, 0.0), guarantees.paper_size(3, 0.3)) == (3, 5)
    assert (plain.k, plain.theorem_2.k, plain.theorem_4.k) == (3, 3, 3)
    assert (undecided.k, undecided.theorem_2.k, undecided.theorem_4.k, undecided.undecided) == (3, 5, 5, 0.3)
    assert undecided.theorem_2.random_error == pytest.approx(plain.theorem_2.random_error * 3 / 5)
    share = 0.15 + 0.7 * held_out.votes @ some_ensemble().weights
    assert undecided.lemma_1.brier == pytest.approx(np.mean((share - held_out.preferences.prob_a) ** 2))
    for statement in (undecided.theorem_2, undecided.theorem_3, undecided.theorem_4):
        assert "undecided share" in statement.here
    assert "undecided" not in plain.theorem_2.here + plain.theorem_3.here + plain.theorem_4.here


def test_every_figure_of_an_evaluation_uses_the_undecided_share(votes: PreferenceSet) -> None:
    ensemble, ratio = replace(some_ensemble(), undecided=0.4), np.linspace(-3, 3, len(votes))
    columns = {"logprob_a": ratio, "logprob_b": np.zeros(len(votes))}
    referred = replace(votes, columns={**votes.columns, **columns})
    found: Any = evaluate(ensemble, referred, groups=[], betas=[2.5], reference="data")
    difference = np.subtract(*ensemble.pair_rewards(votes))
    policy, moved = (
        0.2 + 0.6 * (1 / (1 + np.exp(-(difference / 2.5 + shift)))) @ ensemble.weights for shift in (0, ratio[:, None])
    )
    hard = 0.2 + 0.6 * (difference > 0) @ ensemble.weights
    rows = {row.beta: row for row in found.policy.rows}
    assert rows[2.5].brier == pytest.approx(np.mean((policy - votes.prob_a) ** 2))
    assert rows[2.5].brier_reference == pytest.approx(np.mean((moved - votes.prob_a) ** 2))
    assert rows[0.0].brier == pytest.approx(np.mean((hard - votes.prob_a) ** 2))
    assert found.levels["vote"].brier == rows[0.0].brier
    assert found.levels["vote"].absolute_error == pytest.approx(np.mean(np.abs(hard - votes.prob_a)))
    assert found.baselines["constant_half"].absolute_error == pytest.approx(np.mean(np.abs(0.5 - votes.prob_a)))
    assert found.undecided == 0.4


def test_rewards_trained_elsewhere_may_have_an_undecided_share(votes: PreferenceSet) -> None:
    difference, weights = np.random.default_rng(0).normal(size=(len(votes), 2)), np.array([0.7, 0.3])
    found = reward_predictor("mine", "reward model", difference, weights, votes, undecided=0.5)
    np.testing.assert_allclose(found.readings["vote"], 0.25 + 0.5 * votes_of(difference) @ weights)
    np.testing.assert_allclose(found.readings["policy"], 0.25 + 0.5 * (1 / (1 + np.exp(-difference))) @ weights)
    shares, _ = cross_fitted(difference, weights, votes.prob_a, votes.prompt_index, 0, 0.5)
    np.testing.assert_array_equal(found.readings["tempered"], shares)
    assert 0.25 <= shares.min() <= shares.max() <= 0.75


# --- answers ----------------------------------------------------------------------------------------------------------


@given(SEEDS, SHARES)
def test_no_rule_of_the_consensus_depends_on_the_undecided_share(seed: int, u: float) -> None:
    rewards, weights, _ = random_members(seed, n=5, k=4)
    support = pairwise_support(rewards, weights)
    for rule in ("maximin", "borda", "schulze"):
        scores, shrunk = RULES[rule](support), RULES[rule](u / 2 + (1 - u) * support)
        assert scores[shrunk.argmax()] == pytest.approx(scores.max(), abs=1e-6)
    lottery = RULES["lottery"](u / 2 + (1 - u) * support)
    assert (lottery @ (support - 0.5)).min() >= -1e-6, "still a lottery that no other one beats"


def test_a_distributional_answer_is_drawn_by_the_weights_of_the_members() -> None:
    rewards, weights = np.eye(2), np.array([0.7, 0.3])
    drawn: dict[float, list[str]] = {0: [], 0.9: []}
    for seed, u in itertools.product(range(400), drawn):
        request = AnswerRequest("", "distributional", level="vote", seed=seed)
        drawn[u].append(choose(request, Voters(weights, undecided=u), ["A", "B"], rewards).answers[0].text)
    assert drawn[0] == drawn[0.9]
    assert 0.6 < np.mean([text == "A" for text in drawn[0]]) < 0.8
