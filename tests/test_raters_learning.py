"""Votes of known raters: what their choices say about them, and ``fit`` with ids."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WriteLines, evaluation_of, run
from simulated import paired
from test_fit import Interrupt, Watching, same_fit

from pluralign import RewardEnsemble, fit
from pluralign.learning import choose, raters
from pluralign.learning.bradley_terry import fit_bradley_terry
from pluralign.learning.pairs import Members, Pairs
from pluralign.learning.raters import NewPeople, VotesByRater, fit_rater_reward
from pluralign.theory import posterior
from pluralign.theory.calibration import disagreement, sigmoid
from pluralign.theory.posterior import SAFE_SHARE, ChoiceModel
from pluralign.votes.judgments import Judgments
from pluralign.votes.raters import RaterVotes, load_rater_votes


def test_votes_are_those_of_a_loop_over_rankings() -> None:
    """Rankings of one to four of six texts, with ties, against the pairs of texts; some pairs are not compared."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 5, 30)
    items = np.concatenate([rng.permutation(6)[:size] for size in sizes]).astype(np.int32)
    person = rng.integers(4, size=30)
    judged = Judgments.from_scores(person, np.zeros(30), sizes, items, rng.integers(3, size=len(items)), linked=True)
    a, b = np.array([[1, 0], [2, 4], [3, 1], [5, 2], [0, 5]]).T
    pairs = Pairs(np.zeros((6, 1)), a, b, np.full(5, 0.5), np.zeros(5, np.int32))
    slow = np.zeros((2, 4, 5))
    for i, (first, end) in enumerate(itertools.pairwise(judged.start)):
        place = dict(zip(judged.response[first:end].tolist(), judged.place[first:end].tolist(), strict=True))
        for row, (one, other) in enumerate(zip(a, b, strict=True)):
            if one in place and other in place:
                for_a = 0.5 + 0.5 * np.sign(place[other] - place[one])
                slow[:, judged.person[i], row] += for_a, 1 - for_a
    votes = VotesByRater.of(judged, judged.response, pairs)
    np.testing.assert_array_equal([votes.for_a.toarray(), votes.for_b.toarray()], slow)
    some = np.array([True, False, True, False, True])
    np.testing.assert_array_equal(votes[some].for_b.toarray(), slow[1][:, some])
    assert votes.of_raters(np.arange(4) == 1).for_a.toarray()[[0, 2, 3]].sum() == 0


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


@pytest.mark.parametrize(("distinct", "share"), [(True, posterior.VOICES_SHARE), (False, SAFE_SHARE)])
def test_only_evidence_of_voices_raises_the_share_without_ids(distinct: bool, share: float) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 2))
    theta = np.array([[3.0, -1.0], [0.0, 3.0]]) if distinct else np.array([[3.0, 3.0], [0.5, 0.5]])
    prob_a = sigmoid(x @ theta).mean(axis=1)
    pairs = paired(x, prob_a, per_prompt=10)
    single = sigmoid(x @ theta.mean(axis=1))
    theta = theta if distinct else 1.3 * theta
    found = choose.model_from_voices(Members(theta, np.array([0.5, 0.5])), 1.0, single, pairs)
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


@pytest.fixture(scope="module")
def fitted(votes: RaterVotes) -> RewardEnsemble:
    return fit(votes, k=2, encoder="none", max_disagreement=1.0)


def test_raters_reveal_two_opposite_tastes(fitted: RewardEnsemble) -> None:
    likes_length = sorted(np.corrcoef(np.arange(1, 41), reward)[0, 1] for reward in fitted.rewards(ANSWERS).T)
    assert likes_length[0] < -0.5 < 0.5 < likes_length[1]
    np.testing.assert_allclose(fitted.weights, 0.5, atol=0.1)
    assert (fitted.level, fitted.temperature) == ("policy", 1.0)
    assert (fitted.record.method, fitted.record.target, fitted.record.raters) == ("joint", "raters", 30)
    assert set(evaluation_of(fitted).baselines) >= {"floor", "constant_half", "soft_bt", "mixture"}
    assert [row.k for row in fitted.record.history] == [1, 2]
    assert fitted.record.history[-1].test_brier == pytest.approx(evaluation_of(fitted).test.brier)


def test_without_ids_the_same_votes_give_no_such_members(votes: RaterVotes, fitted: RewardEnsemble) -> None:
    counts = replace(votes.preferences, judgments=None)
    ensemble = fit(counts, k=2, encoder="none", level="policy", max_disagreement=1.0)
    assert ensemble.record.raters is None
    assert "raters" not in ensemble.record.to_json()
    spread, with_spread = (np.std(one.rewards(ANSWERS), axis=0).min() for one in (ensemble, fitted))
    assert with_spread > 3 * spread


def test_the_number_of_members_is_chosen_by_raters_votes(votes: RaterVotes) -> None:
    weights = fit(votes, k="auto", encoder="none", max_disagreement=1.0).weights
    assert np.sort(weights)[-3:].sum() > 0.95  # there are two kinds of raters


@pytest.mark.parametrize(("max_disagreement", "bounded"), [(0.5, True), (1.0, False)])
def test_the_bound_on_disagreement_holds_for_every_member(max_disagreement: float, bounded: bool) -> None:
    """A third of the raters prefers short answers, so a member like them disagrees with two thirds of the votes."""
    votes = load_rater_votes(opposite_raters(minority=3), "who")
    ensemble = fit(votes, k=2, encoder="none", max_disagreement=max_disagreement)
    worst = np.max(disagreement(ensemble.votes(votes.preferences), votes.preferences.prob_a))
    assert worst < 0.5 if bounded else worst > 0.6
    assert (ensemble.record.bound is not None) == bounded


# --- ids and resuming -------------------------------------------------------------------------------------------------


def test_an_interrupted_fit_resumes_and_no_file_holds_ids(
    votes: RaterVotes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = fit(votes, k=4, encoder="none")
    with pytest.raises(Interrupt):
        fit(votes, k=4, encoder="none", folder=tmp_path, watcher=Watching(until=4))
    assert b"judgments-4" in b" ".join(str(path).encode() for path in tmp_path.rglob("*")), "the fit left a checkpoint"
    assert ID.encode() not in bytes_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("pluralign.learning.voices.fit_voices", None)  # every mixture is in the checkpoint
        assert same_fit(fit(votes, k=4, encoder="none", folder=tmp_path), unbroken)
    assert ID.encode() not in bytes_in(tmp_path)


def test_other_raters_do_not_resume_from_the_old_work(votes: RaterVotes, tmp_path: Path) -> None:
    with pytest.raises(Interrupt):
        fit(votes, k=2, encoder="none", folder=tmp_path, watcher=Watching(until=2))
    judged: Any = votes.preferences.judgments
    swapped = replace(judged, person=np.random.default_rng(0).permutation(judged.person))
    others = replace(votes.preferences, judgments=swapped)
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
