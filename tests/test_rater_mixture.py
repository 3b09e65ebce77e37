"""The mixture of Bradley–Terry rewards with one posterior per rater, against slow computations and planted groups."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from simulated import paired

from pluralign.core.arrays import FloatArray
from pluralign.learning import raters as rater_mixture
from pluralign.learning.bradley_terry import fit_bradley_terry
from pluralign.learning.pairs import Members
from pluralign.learning.raters import (
    VOICES_SHARE,
    NewPeople,
    VotesByRater,
    fit_choice_model,
    fit_rater_mixture,
    fit_rater_reward,
    log_likelihoods,
    member_loss,
    model_from_voices,
    posteriors,
    predictive_log_loss,
    rater_groups,
)
from pluralign.theory.calibration import sigmoid
from pluralign.theory.posterior import SAFE_SHARE, ChoiceModel

Votes = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], FloatArray]


def random_votes(seed: int, n_raters: int = 5, n_pairs: int = 12, n_votes: int = 40) -> tuple[VotesByRater, Votes]:
    rng = np.random.default_rng(seed)
    rater = rng.integers(n_raters, size=n_votes).astype(np.int32)
    pair = rng.integers(n_pairs, size=n_votes).astype(np.int32)
    chose_a = rng.choice([0.0, 0.5, 1.0], size=n_votes)
    return VotesByRater.count(rater, pair, chose_a, n_raters, n_pairs), (rater, pair, chose_a)


def planted_raters(
    tastes: FloatArray, seed: int, n_raters: int = 120, votes_each: int = 25
) -> tuple[FloatArray, Votes]:
    """Return feature differences and votes; rater i votes by column i mod k of ``tastes``, on pairs of their own."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_raters * votes_each, len(tastes)))
    rater = np.repeat(np.arange(n_raters, dtype=np.int32), votes_each)
    chance = sigmoid(np.sum(x * tastes[:, rater % tastes.shape[1]].T, axis=1))
    chose_a = (rng.random(len(x)) < chance).astype(np.float64)
    return x, (rater, np.arange(len(x), dtype=np.int32), chose_a)


def cosines(members: FloatArray, tastes: FloatArray) -> FloatArray:
    """Return the cosine of each taste with its closest member."""
    unit = [columns / np.linalg.norm(columns, axis=0) for columns in (members, tastes)]
    return np.asarray((unit[0].T @ unit[1]).max(axis=0))


def test_log_likelihoods_are_those_of_a_loop_over_votes() -> None:
    votes, (rater, pair, chose_a) = random_votes(0)
    difference = np.random.default_rng(1).standard_normal((12, 3))
    slow = np.zeros((5, 3))
    for i, v, a in zip(rater, pair, chose_a, strict=True):
        slow[i] += a * np.log(sigmoid(difference[v])) + (1 - a) * np.log(sigmoid(-difference[v]))
    np.testing.assert_allclose(log_likelihoods(votes, difference), slow, rtol=1e-10)
    assert votes.total == 40
    np.testing.assert_array_equal(votes.per_rater, np.bincount(rater, minlength=5))


def test_votes_on_some_pairs_keep_the_rows_of_raters() -> None:
    votes, (rater, pair, chose_a) = random_votes(2)
    some = np.arange(12) % 3 == 0
    assert votes[some].for_a.shape == (5, 4)
    np.testing.assert_array_equal(votes[some].per_rater, np.bincount(rater[some[pair]], minlength=5))
    assert votes[some].for_a.sum() == chose_a[some[pair]].sum()


def test_with_one_vote_per_rater_the_posterior_is_that_of_the_mixture_of_votes() -> None:
    """π_j σ(Δr_j) / Σ_j π_j σ(Δr_j) for a vote for a, with 1 − σ for b: the E step of ``baselines``."""
    difference, shares = np.random.default_rng(3).standard_normal((6, 3)), np.array([0.5, 0.3, 0.2])
    rows, chose_a = np.arange(6, dtype=np.int32), np.array([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    votes = VotesByRater.count(rows, rows, chose_a, 6, 6)
    chance = np.where(chose_a[:, None] == 1, sigmoid(difference), 1 - sigmoid(difference))
    expected = shares * chance / (chance @ shares)[:, None]
    np.testing.assert_allclose(posteriors(log_likelihoods(votes, difference), shares), expected, rtol=1e-10)


def test_predictive_log_loss_is_that_of_a_loop_over_votes() -> None:
    known, _ = random_votes(4)
    new, (rater, pair, chose_a) = random_votes(5, n_pairs=7)
    rng = np.random.default_rng(6)
    known_difference, new_difference = rng.standard_normal((12, 3)), rng.standard_normal((7, 3))
    shares = np.array([0.2, 0.5, 0.3])
    likelihood = np.exp(log_likelihoods(known, known_difference))
    slow = np.zeros(5)
    for i, v, a in zip(rater, pair, chose_a, strict=True):
        posterior = shares * likelihood[i] / (shares @ likelihood[i])
        prob_a = float(posterior @ sigmoid(new_difference[v]))
        slow[i] -= a * np.log(prob_a) + (1 - a) * np.log(1 - prob_a)
    loss = predictive_log_loss(known, known_difference, new, new_difference, shares)
    np.testing.assert_allclose(loss, slow, rtol=1e-10)


@pytest.mark.parametrize("k", [1, 3])
def test_the_objective_is_the_penalised_likelihood_and_a_local_maximum(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rater_mixture, "TOLERANCE", 1e-12)
    x, (rater, pair, chose_a) = planted_raters(np.array([[2.0, -1.0], [0.0, 2.0]]), seed=0, n_raters=20, votes_each=8)
    center, strength = np.array([0.3, -0.2]), 0.02
    votes, start = (
        VotesByRater.count(rater, pair, chose_a, 20, len(x)),
        np.random.default_rng(2).standard_normal((2, k)),
    )
    fit, reached = rater_mixture._expectation_maximisation(x, votes, center, start, strength, 500)

    def objective(theta: FloatArray, shares: FloatArray) -> float:
        total = 0.0
        for i in range(20):
            rows = pair[rater == i]
            signs = np.where(chose_a[rows] == 1, 1.0, -1.0)[:, None]
            total += np.log(np.prod(sigmoid(signs * (x[rows] @ theta)), axis=0) @ shares)
        return total / len(x) - strength / 2 * float(np.sum((theta - center[:, None]) ** 2))

    best = objective(fit.theta, fit.weights)
    assert reached == pytest.approx(best, abs=1e-9)
    rng = np.random.default_rng(1)
    for _ in range(20):
        step = 0.01 * rng.standard_normal(fit.theta.shape)
        shares = fit.weights * np.exp(0.02 * rng.standard_normal(k))
        assert objective(fit.theta + step, shares / shares.sum()) < best + 1e-7


def test_one_member_is_a_bradley_terry_fit_shrunk_to_the_center() -> None:
    x, (rater, pair, chose_a) = planted_raters(np.array([[1.5], [-1.0]]), seed=1, n_raters=10, votes_each=20)
    votes = VotesByRater.count(rater, pair, chose_a, 10, len(x))
    fit = fit_rater_mixture(x, votes, np.zeros(2), 1, 0.1)
    np.testing.assert_allclose(fit.theta[:, 0], fit_bradley_terry(x, chose_a, 0.1), atol=1e-3)
    center = np.array([4.0, 4.0])
    np.testing.assert_allclose(fit_rater_mixture(x, votes, center, 1, 1e4).theta[:, 0], center, atol=1e-3)


def test_em_never_lowers_the_objective() -> None:
    x, (rater, pair, chose_a) = planted_raters(np.array([[3.0, -3.0], [1.0, 1.0]]), seed=2, n_raters=30, votes_each=6)
    votes = VotesByRater.count(rater, pair, chose_a, 30, len(x))
    start, fit = np.random.default_rng(1).standard_normal((2, 3)), rater_mixture._expectation_maximisation
    objectives = [fit(x, votes, np.zeros(2), start, 0.003, rounds)[1] for rounds in range(8)]
    assert (np.diff(objectives) >= -1e-12).all()
    assert objectives[-1] > objectives[0] + 0.01


def test_raters_reveal_opposite_tastes_that_shares_cannot() -> None:
    """The tastes c + r and c − r with r much larger than c: every pair's share is near ½."""
    tastes = np.array([[3.0, -3.0], [0.5, 0.5], [0.0, 0.0]])
    x, (rater, pair, chose_a) = planted_raters(tastes, seed=3)
    center = fit_bradley_terry(x, chose_a, 0.01)
    fit = fit_rater_mixture(x, VotesByRater.count(rater, pair, chose_a, 120, len(x)), center, 2, 0.001, restarts=2)
    assert cosines(fit.theta, tastes).min() > 0.98
    np.testing.assert_allclose(fit.weights, 0.5, atol=0.02)
    assert cosines(center[:, None], tastes).min() < 0.5, "one reward stands for neither group"
    mixed = np.random.default_rng(0).permutation(rater)  # the same votes and shares, without knowing who cast them
    fit = fit_rater_mixture(x, VotesByRater.count(mixed, pair, chose_a, 120, len(x)), center, 2, 0.001, restarts=2)
    assert cosines(fit.theta, tastes).min() < 0.8


def test_the_best_of_several_starts_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    x, (rater, pair, chose_a) = planted_raters(np.eye(3) * 3, seed=5, n_raters=30, votes_each=8)
    votes, run = VotesByRater.count(rater, pair, chose_a, 30, len(x)), rater_mixture._expectation_maximisation
    fits = []

    def record(*given: Any) -> Any:
        fits.append(run(*given))
        return fits[-1]

    monkeypatch.setattr(rater_mixture, "_expectation_maximisation", record)
    kept = fit_rater_mixture(x, votes, np.zeros(3), 3, 0.003, restarts=5)
    assert len(fits) == 5
    assert kept is max(fits, key=lambda fit: fit[1])[0]


def test_member_loss_is_the_weighted_cross_entropy() -> None:
    x, theta, center = np.array([[1.0], [2.0]]), np.array([0.5]), np.array([1.0])
    expected = -2 * np.log(sigmoid(0.5)) - 3 * np.log(sigmoid(-1.0)) + 0.5 * 0.1 * 0.25
    loss = member_loss(theta, x, np.array([2.0, 0.0]), np.array([0.0, 3.0]), center, 0.1)
    assert loss == pytest.approx(float(expected))


# --- the choice model: fitted to raters who are members, and safe where nothing shows that members are people ---------


K, PAIRS, RATERS = 3, 60, 80
WEIGHTS = np.full(K, 1 / K)


def new_people(follow_members: bool, seed: int = 0) -> NewPeople:
    """Return raters who follow one member each, or who all follow the average."""
    random = np.random.default_rng(seed)
    scores = 3 * random.normal(size=(2 * PAIRS, K + 1))
    kind = random.integers(K, size=RATERS) if follow_members else np.full(RATERS, K)
    rater, pair = (index.ravel().astype(np.int32) for index in np.indices((RATERS, 2 * PAIRS)))
    chose_a = (random.random(len(rater)) < sigmoid(scores[pair, kind[rater]])).astype(float)
    votes = VotesByRater.count(rater, pair, chose_a, RATERS, 2 * PAIRS)
    known = np.arange(2 * PAIRS) < PAIRS
    return NewPeople(votes[known], scores[known], votes[~known], scores[~known], WEIGHTS)


def test_raters_who_follow_members_get_a_large_share_and_few_slips() -> None:
    found = fit_choice_model([new_people(follow_members=True)])
    assert found.people >= 0.9
    assert found.slip <= 0.1
    assert found.source == "raters"


def test_raters_who_follow_the_average_get_the_smallest_share() -> None:
    assert fit_choice_model([new_people(follow_members=False)]).people == SAFE_SHARE


def test_few_raters_leave_the_default() -> None:
    people = new_people(follow_members=True)
    few = np.arange(RATERS) < 5
    part = NewPeople(
        people.known.of_raters(few), people.known_scores, people.new.of_raters(few), people.new_scores, WEIGHTS
    )
    assert fit_choice_model([part]) == ChoiceModel()


def test_groups_of_raters_are_disjoint() -> None:
    groups = rater_groups(50, 4, seed=1)
    assert np.array_equal(np.sum(groups, axis=0), np.ones(50))


@pytest.mark.parametrize(("distinct", "share"), [(True, VOICES_SHARE), (False, SAFE_SHARE)])
def test_only_evidence_of_voices_raises_the_share_without_ids(distinct: bool, share: float) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 2))
    theta = np.array([[3.0, -1.0], [0.0, 3.0]]) if distinct else np.array([[3.0, 3.0], [0.5, 0.5]])
    prob_a = sigmoid(x @ theta).mean(axis=1)
    pairs = paired(x, prob_a, per_prompt=10)
    single = sigmoid(x @ theta.mean(axis=1))
    theta = theta if distinct else 1.3 * theta
    found = model_from_voices(Members(theta, np.array([0.5, 0.5])), 1.0, single, pairs)
    assert found.people == share


# --- the reward of one rater: the dual fit against the primal one ---


@pytest.mark.parametrize("variance", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("n", [1, 8, 40])
def test_the_dual_fit_is_the_primal_fit(n: int, variance: float) -> None:
    random = np.random.default_rng(n)
    differences, y = random.normal(size=(n, 12)), random.choice([0.0, 0.5, 1.0], size=n)
    dual = fit_rater_reward(differences @ differences.T, y, [0.01, variance])[1]
    primal = fit_bradley_terry(differences, y, 1 / (variance * n))  # its loss is a mean over the n choices
    np.testing.assert_allclose(differences.T @ dual, primal, atol=2e-3)


def test_no_choices_give_no_reward() -> None:
    assert fit_rater_reward(np.empty((0, 0)), [], [0.1, 1.0]).shape == (2, 0)


def test_separable_choices_converge() -> None:
    random = np.random.default_rng(0)
    differences = random.normal(size=(30, 200))
    y = (differences[:, 0] > 0).astype(float)
    dual = fit_rater_reward(differences @ differences.T, y, [10.0])[0]
    z = differences @ (differences.T @ dual)
    np.testing.assert_allclose(dual, 10.0 * (y - 1 / (1 + np.exp(-z))), atol=1e-8)
