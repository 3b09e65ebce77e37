"""Fits to the votes of known raters: the mixture against slow computations and planted groups, and ``fit`` with ids."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import WriteLines, run
from simulated import paired, random_pairs
from test_fit import Interrupt, Watching, evaluation_of, same_fit

from pluralign import fit
from pluralign.core.arrays import FloatArray
from pluralign.core.checkpoints import Checkpoints
from pluralign.learning import raters
from pluralign.learning.bradley_terry import fit_bradley_terry
from pluralign.learning.options import FitOptions
from pluralign.learning.pairs import Members, Pairs
from pluralign.learning.raters import NewPeople, VotesByRater, fit_rater_mixture, fit_rater_reward, log_likelihoods
from pluralign.learning.task import FitTask, FitWatcher
from pluralign.theory.calibration import disagreement, sigmoid
from pluralign.theory.posterior import SAFE_SHARE, ChoiceModel
from pluralign.votes.raters import RaterVotes, load_rater_votes

Votes = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], FloatArray]


def random_votes(seed: int, n_raters: int = 5, n_pairs: int = 12, n_votes: int = 40) -> tuple[VotesByRater, Votes]:
    rng = np.random.default_rng(seed)
    rater = rng.integers(n_raters, size=n_votes).astype(np.int32)
    pair = rng.integers(n_pairs, size=n_votes).astype(np.int32)
    chose_a = rng.choice([0.0, 0.5, 1.0], size=n_votes)
    return VotesByRater.count(rater, pair, chose_a, n_raters, n_pairs), (rater, pair, chose_a)


def planted_raters(
    tastes: FloatArray, seed: int, n_raters: int = 120, votes_each: int = 25
) -> tuple[FloatArray, VotesByRater, Votes]:
    """Return feature differences and votes; rater i votes by column i mod k of ``tastes``, on pairs of their own."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_raters * votes_each, len(tastes)))
    rater = np.repeat(np.arange(n_raters, dtype=np.int32), votes_each)
    chance = sigmoid(np.sum(x * tastes[:, rater % tastes.shape[1]].T, axis=1))
    chose_a = (rng.random(len(x)) < chance).astype(np.float64)
    pair = np.arange(len(x), dtype=np.int32)
    return x, VotesByRater.count(rater, pair, chose_a, n_raters, len(x)), (rater, pair, chose_a)


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
    np.testing.assert_allclose(raters.posteriors(log_likelihoods(votes, difference), shares), expected, rtol=1e-10)


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
    loss = raters.predictive_log_loss(known, known_difference, new, new_difference, shares)
    np.testing.assert_allclose(loss, slow, rtol=1e-10)


@pytest.mark.parametrize("k", [1, 3])
def test_the_objective_is_the_penalised_likelihood_and_a_local_maximum(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raters, "TOLERANCE", 1e-12)
    tastes = np.array([[2.0, -1.0], [0.0, 2.0]])
    x, votes, (rater, pair, chose_a) = planted_raters(tastes, seed=0, n_raters=20, votes_each=8)
    center, strength = np.array([0.3, -0.2]), 0.02
    start = np.random.default_rng(2).standard_normal((2, k))
    fit, reached = raters._expectation_maximisation(x, votes, center, start, strength, 500)

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
    x, votes, (_, _, chose_a) = planted_raters(np.array([[1.5], [-1.0]]), seed=1, n_raters=10, votes_each=20)
    fit = fit_rater_mixture(x, votes, np.zeros(2), 1, 0.1)
    np.testing.assert_allclose(fit.theta[:, 0], fit_bradley_terry(x, chose_a, 0.1), atol=1e-3)
    center = np.array([4.0, 4.0])
    np.testing.assert_allclose(fit_rater_mixture(x, votes, center, 1, 1e4).theta[:, 0], center, atol=1e-3)


def test_em_never_lowers_the_objective() -> None:
    x, votes, _ = planted_raters(np.array([[3.0, -3.0], [1.0, 1.0]]), seed=2, n_raters=30, votes_each=6)
    start, fit = np.random.default_rng(1).standard_normal((2, 3)), raters._expectation_maximisation
    objectives = [fit(x, votes, np.zeros(2), start, 0.003, rounds)[1] for rounds in range(8)]
    assert (np.diff(objectives) >= -1e-12).all()
    assert objectives[-1] > objectives[0] + 0.01


def test_raters_reveal_opposite_tastes_that_shares_cannot() -> None:
    """The tastes c + r and c − r with r much larger than c: every pair's share is near ½."""
    tastes = np.array([[3.0, -3.0], [0.5, 0.5], [0.0, 0.0]])
    x, votes, (rater, pair, chose_a) = planted_raters(tastes, seed=3)
    center = fit_bradley_terry(x, chose_a, 0.01)
    fit = fit_rater_mixture(x, votes, center, 2, 0.001, restarts=2)
    assert cosines(fit.theta, tastes).min() > 0.98
    np.testing.assert_allclose(fit.weights, 0.5, atol=0.02)
    assert cosines(center[:, None], tastes).min() < 0.5, "one reward stands for neither group"
    mixed = np.random.default_rng(0).permutation(rater)  # the same votes and shares, without knowing who cast them
    fit = fit_rater_mixture(x, VotesByRater.count(mixed, pair, chose_a, 120, len(x)), center, 2, 0.001, restarts=2)
    assert cosines(fit.theta, tastes).min() < 0.8


def test_the_best_of_several_starts_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    x, votes, _ = planted_raters(np.eye(3) * 3, seed=5, n_raters=30, votes_each=8)
    fits, maximise = [], raters._expectation_maximisation

    def record(*given: Any) -> Any:
        fits.append(maximise(*given))
        return fits[-1]

    monkeypatch.setattr(raters, "_expectation_maximisation", record)
    kept = fit_rater_mixture(x, votes, np.zeros(3), 3, 0.003, restarts=5)
    assert len(fits) == 5
    assert kept is max(fits, key=lambda fit: fit[1])[0]


def test_member_loss_is_the_weighted_cross_entropy() -> None:
    x, theta, center = np.array([[1.0], [2.0]]), np.array([0.5]), np.array([1.0])
    expected = -2 * np.log(sigmoid(0.5)) - 3 * np.log(sigmoid(-1.0)) + 0.5 * 0.1 * 0.25
    loss = raters.member_loss(theta, x, np.array([2.0, 0.0]), np.array([0.0, 3.0]), center, 0.1)
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


def test_the_choice_model_shows_whether_raters_follow_members_or_the_average() -> None:
    found = raters.fit_choice_model([new_people(follow_members=True)])
    assert found.people >= 0.9
    assert found.slip <= 0.1
    assert found.source == "raters"
    assert raters.fit_choice_model([new_people(follow_members=False)]).people == SAFE_SHARE


def test_few_raters_leave_the_default() -> None:
    people, few = new_people(follow_members=True), np.arange(RATERS) < 5
    part = replace(people, known=people.known.of_raters(few), new=people.new.of_raters(few))
    assert raters.fit_choice_model([part]) == ChoiceModel()


def test_groups_of_raters_are_disjoint() -> None:
    groups = raters.rater_groups(50, 4, seed=1)
    assert np.array_equal(np.sum(groups, axis=0), np.ones(50))


@pytest.mark.parametrize(("distinct", "share"), [(True, raters.VOICES_SHARE), (False, SAFE_SHARE)])
def test_only_evidence_of_voices_raises_the_share_without_ids(distinct: bool, share: float) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 2))
    theta = np.array([[3.0, -1.0], [0.0, 3.0]]) if distinct else np.array([[3.0, 3.0], [0.5, 0.5]])
    prob_a = sigmoid(x @ theta).mean(axis=1)
    pairs = paired(x, prob_a, per_prompt=10)
    single = sigmoid(x @ theta.mean(axis=1))
    theta = theta if distinct else 1.3 * theta
    found = raters.model_from_voices(Members(theta, np.array([0.5, 0.5])), 1.0, single, pairs)
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


def test_separable_choices_converge() -> None:
    random = np.random.default_rng(0)
    differences = random.normal(size=(30, 200))
    y = (differences[:, 0] > 0).astype(float)
    dual = fit_rater_reward(differences @ differences.T, y, [10.0])[0]
    z = differences @ (differences.T @ dual)
    np.testing.assert_allclose(dual, 10.0 * (y - 1 / (1 + np.exp(-z))), atol=1e-8)
    assert fit_rater_reward(np.empty((0, 0)), [], [0.1, 1.0]).shape == (2, 0), "no choices give no reward"


# --- fits with rater ids ----------------------------------------------------------------------------------------------


ID = "secret-rater"


def opposite_raters(minority: int = 2) -> list[dict[str, Any]]:
    """Return votes on answers of 1 to 40 words. One rater in ``minority`` prefers shorter answers, others longer."""
    rng = np.random.default_rng(0)
    rows = []
    for prompt in range(40):
        lengths = rng.choice(np.arange(1, 41), size=4, replace=False)
        answers = [" ".join(["yes"] * length) + "." for length in lengths]
        for place, rater in enumerate(rng.choice(30, size=12, replace=False)):
            a, b = ((0, 1), (2, 3))[place % 2]
            longer = lengths[a] > lengths[b]
            vote = "a" if longer == (rater % minority != 0) else "b"
            row = {"prompt": f"Question {prompt}?", "response_a": answers[a], "response_b": answers[b]}
            rows.append({**row, "vote": vote, "who": f"{ID}-{rater}"})
    return rows


@pytest.fixture(scope="module")
def votes() -> RaterVotes:
    return load_rater_votes(opposite_raters(), "who")


def bytes_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


ANSWERS = [("Question?", " ".join(["yes"] * n) + ".") for n in range(1, 41)]


# --- results ----------------------------------------------------------------------------------------------------------


def test_raters_reveal_two_opposite_tastes(votes: RaterVotes) -> None:
    ensemble = fit(votes, k=2, encoder="none", max_disagreement=1.0)
    likes_length = sorted(np.corrcoef(np.arange(1, 41), reward)[0, 1] for reward in ensemble.rewards(ANSWERS).T)
    assert likes_length[0] < -0.5 < 0.5 < likes_length[1]
    np.testing.assert_allclose(ensemble.weights, 0.5, atol=0.1)
    assert (ensemble.level, ensemble.temperature) == ("policy", 1.0)
    assert (ensemble.record.method, ensemble.record.target, ensemble.record.raters) == ("joint", "raters", 30)
    assert set(evaluation_of(ensemble).baselines) >= {"floor", "constant_half", "soft_bt", "mixture"}
    assert [row.k for row in ensemble.record.history] == [1, 2]
    assert ensemble.record.history[-1].test_brier == pytest.approx(evaluation_of(ensemble).test.brier)


def test_without_ids_the_same_votes_give_no_such_members(votes: RaterVotes) -> None:
    ensemble = fit(votes.preferences, k=2, encoder="none", level="policy", max_disagreement=1.0)
    assert ensemble.record.raters is None
    assert "raters" not in ensemble.record.to_json()
    with_ids = fit(votes, k=2, encoder="none", max_disagreement=1.0)
    spread, with_spread = (np.std(one.rewards(ANSWERS), axis=0).min() for one in (ensemble, with_ids))
    assert with_spread > 3 * spread


def test_the_number_of_members_is_chosen_by_raters_votes(votes: RaterVotes) -> None:
    assert 2 <= fit(votes, k="auto", encoder="none", max_disagreement=1.0).k <= 4


@pytest.mark.parametrize(("max_disagreement", "bounded"), [(0.5, True), (1.0, False)])
def test_the_bound_on_disagreement_holds_for_every_member(max_disagreement: float, bounded: bool) -> None:
    """A third of the raters prefers short answers, so a member like them disagrees with two thirds of the votes."""
    votes = load_rater_votes(opposite_raters(minority=3), "who")
    ensemble = fit(votes, k=2, encoder="none", max_disagreement=max_disagreement)
    worst = np.max(disagreement(ensemble.votes(votes.preferences), votes.preferences.prob_a))
    assert worst < 0.5 if bounded else worst > 0.6
    assert (ensemble.record.bound is not None) == bounded


# --- choices on validation prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "weak"), [(2.0, True), (0.0, False)], ids=["two tastes", "coin flips"])
def test_shrinkage_is_weak_only_if_raters_differ(scale: float, weak: bool) -> None:
    pairs = random_pairs(0, n=600, d=4, n_items=60)
    rng = np.random.default_rng(1)
    theta = scale * rng.standard_normal((4, 2))
    rater = rng.integers(40, size=600).astype(np.int32)
    chance = sigmoid(np.sum(np.asarray(pairs.difference) * theta[:, rater % 2].T, axis=1))
    chose_a = (rng.random(600) < chance).astype(np.float64)
    pairs = Pairs(pairs.inputs, pairs.a, pairs.b, chose_a, rng.integers(30, size=600).astype(np.int32))
    votes = VotesByRater.count(rater, np.arange(600, dtype=np.int32), chose_a, 40, 600)
    task = FitTask(pairs, FitOptions(level="policy"), Checkpoints(None, {}), FitWatcher())
    strength = raters.RaterSearch(task, votes, 1.0).choose_strength(2)
    assert strength in raters.STRENGTHS
    assert (strength < 0.1) == weak


def test_the_smallest_size_within_one_standard_error_is_chosen() -> None:
    n_votes = np.full(4, 10.0)
    losses = {1: np.array([8.0, 8.0, 8.0, 8.1]), 2: np.array([6.0, 6.2, 6.1, 6.0]), 4: np.array([6.0, 6.0, 6.1, 6.15])}
    # d = 2 − 4 = [0, .2, 0, −.15], Σd = .05 and √Σ(d − mean)² = .249; of 1 − 4 it is 7.85 and .09
    assert raters.smallest_as_good(losses, n_votes) == 2
    assert raters.smallest_as_good({1: losses[1], 4: losses[4]}, n_votes) == 4


def test_training_votes_are_those_on_training_pairs(votes: RaterVotes) -> None:
    train = np.arange(len(votes.preferences)) % 4 != 0
    counted = raters.training_votes(votes, train)
    assert counted.for_a.shape == (votes.n_raters, train.sum())
    for side, expected in ((counted.for_a, votes.preferences.votes_a), (counted.for_b, votes.preferences.votes_b)):
        np.testing.assert_array_equal(np.asarray(side.sum(axis=0)).ravel(), expected[train], strict=False)


# --- ids and resuming -------------------------------------------------------------------------------------------------


def test_an_interrupted_fit_resumes_and_no_file_holds_ids(
    votes: RaterVotes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = fit(votes, k=4, encoder="none")
    with pytest.raises(Interrupt):
        fit(votes, k=4, encoder="none", folder=tmp_path, watcher=Watching(until=4))
    assert b"raters-4" in b" ".join(str(path).encode() for path in tmp_path.rglob("*")), "the fit left a checkpoint"
    assert ID.encode() not in bytes_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("pluralign.learning.raters.fit_rater_mixture", None)  # every mixture is in the checkpoint
        assert same_fit(fit(votes, k=4, encoder="none", folder=tmp_path), unbroken)
    assert ID.encode() not in bytes_in(tmp_path)


def test_other_raters_do_not_resume_from_the_old_work(votes: RaterVotes, tmp_path: Path) -> None:
    with pytest.raises(Interrupt):
        fit(votes, k=2, encoder="none", folder=tmp_path, watcher=Watching(until=2))
    order = np.random.default_rng(0).permutation(len(votes))
    others = RaterVotes(votes.preferences, votes.pair, votes.rater[order], votes.chose_a)
    resumed = fit(others, k=2, encoder="none", folder=tmp_path)
    assert same_fit(resumed, fit(others, k=2, encoder="none"))
    assert not same_fit(resumed, fit(votes, k=2, encoder="none"))


# --- options ----------------------------------------------------------------------------------------------------------


def test_the_command_line_fits_raters(write_jsonl: WriteLines, tmp_path: Path) -> None:
    options = ("--raters", "who", "--encoder", "none", "--k", "2")
    done = run("fit", write_jsonl(opposite_raters()), "-o", tmp_path / "fitted", *options)
    assert done.returncode == 0, done.stderr
    assert "Members are fitted to the votes of 30 raters. Rater ids are not saved." in " ".join(done.stdout.split())
    assert ID not in done.stdout + done.stderr
    assert ID.encode() not in bytes_in(tmp_path / "fitted")
