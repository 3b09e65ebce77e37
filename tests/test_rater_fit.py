"""``fit`` with rater ids: what it finds, what it refuses, what it saves, and resuming."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run
from simulated import random_pairs
from test_fit import Interrupt, Watching, evaluation_of, same_fit

from pluralign import RewardEnsemble, fit
from pluralign.core.checkpoints import Checkpoints
from pluralign.learning.options import FitOptions
from pluralign.learning.pairs import Pairs
from pluralign.learning.raters import STRENGTHS, RaterSearch, VotesByRater, smallest_as_good, training_votes
from pluralign.learning.task import FitTask, FitWatcher
from pluralign.theory.calibration import disagreement, sigmoid
from pluralign.votes.raters import RaterVotes, load_rater_votes

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


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("votes") / "votes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in opposite_raters()))
    return path


def bytes_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def length_preference(ensemble: RewardEnsemble) -> np.ndarray[Any, Any]:
    """Return the correlation of each member's reward with the number of words."""
    counts = np.arange(1, 41)
    rewards = ensemble.rewards([("Question?", " ".join(["yes"] * n) + ".") for n in counts])
    return np.array([np.corrcoef(counts, reward)[0, 1] for reward in rewards.T])


# --- results ----------------------------------------------------------------------------------------------------------


def test_raters_reveal_two_opposite_tastes(votes: RaterVotes) -> None:
    ensemble = fit(votes, k=2, encoder="none", max_disagreement=1.0)
    assert sorted(np.sign(length_preference(ensemble))) == [-1, 1]
    assert np.abs(length_preference(ensemble)).min() > 0.5
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
    answers = [("Question?", " ".join(["yes"] * n) + ".") for n in range(1, 41)]
    spread, with_spread = (np.std(one.rewards(answers), axis=0).min() for one in (ensemble, with_ids))
    assert with_spread > 3 * spread


def test_the_number_of_members_is_chosen_by_raters_votes(votes: RaterVotes) -> None:
    assert 2 <= fit(votes, k="auto", encoder="none", max_disagreement=1.0).k <= 4


@pytest.mark.parametrize(("max_disagreement", "bounded"), [(0.5, True), (1.0, False)])
def test_the_bound_on_disagreement_holds_for_every_member(max_disagreement: float, bounded: bool) -> None:
    """A third of the raters prefers short answers, so a member like them disagrees with two thirds of the votes."""
    votes = load_rater_votes(opposite_raters(minority=3), "who")
    ensemble = fit(votes, k=2, encoder="none", max_disagreement=max_disagreement)
    worst = np.max(disagreement(ensemble.votes(votes.preferences), votes.preferences.prob_a))
    assert (worst < 0.5) == bounded
    assert (worst > 0.6) != bounded
    assert (ensemble.record.bound is not None) == bounded


# --- choices on validation prompts ------------------------------------------------------------------------------------


def task_of(pairs: Pairs) -> FitTask:
    return FitTask(pairs, FitOptions(level="policy"), Checkpoints(None, {}), FitWatcher())


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
    strength = RaterSearch(task_of(pairs), votes, 1.0).choose_strength(2)
    assert strength in STRENGTHS
    assert (strength < 0.1) == weak


def test_the_smallest_size_within_one_standard_error_is_chosen() -> None:
    n_votes = np.full(4, 10.0)
    losses = {1: np.array([8.0, 8.0, 8.0, 8.1]), 2: np.array([6.0, 6.2, 6.1, 6.0]), 4: np.array([6.0, 6.0, 6.1, 6.15])}
    # d = 2 − 4 = [0, .2, 0, −.15], Σd = .05 and √Σ(d − mean)² = .249; of 1 − 4 it is 7.85 and .09
    assert smallest_as_good(losses, n_votes) == 2
    assert smallest_as_good({1: losses[1], 4: losses[4]}, n_votes) == 4


def test_training_votes_are_those_on_training_pairs(votes: RaterVotes) -> None:
    train = np.arange(len(votes.preferences)) % 4 != 0
    counted = training_votes(votes, train)
    assert counted.for_a.shape == (votes.n_raters, train.sum())
    for side, expected in ((counted.for_a, votes.preferences.votes_a), (counted.for_b, votes.preferences.votes_b)):
        np.testing.assert_array_equal(np.asarray(side.sum(axis=0)).ravel(), expected[train], strict=False)


# --- ids and resuming -------------------------------------------------------------------------------------------------


def test_ids_are_in_no_file(votes: RaterVotes, tmp_path: Path) -> None:
    with pytest.raises(Interrupt):
        fit(votes, k=4, encoder="none", folder=tmp_path, watcher=Watching(until=4))
    unfinished = bytes_in(tmp_path)
    assert b"raters-4" in b" ".join(str(path).encode() for path in tmp_path.rglob("*")), "the fit left a checkpoint"
    assert ID.encode() not in unfinished
    fit(votes, k=4, encoder="none", folder=tmp_path)
    assert ID.encode() not in bytes_in(tmp_path)


def test_an_interrupted_fit_resumes(votes: RaterVotes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken = fit(votes, k=4, encoder="none")
    with pytest.raises(Interrupt):
        fit(votes, k=4, encoder="none", folder=tmp_path, watcher=Watching(until=4))
    with monkeypatch.context() as patch:
        patch.setattr("pluralign.learning.raters.fit_rater_mixture", None)  # every mixture is in the checkpoint
        assert same_fit(fit(votes, k=4, encoder="none", folder=tmp_path), unbroken)


def test_other_raters_do_not_resume_from_the_old_work(votes: RaterVotes, tmp_path: Path) -> None:
    with pytest.raises(Interrupt):
        fit(votes, k=2, encoder="none", folder=tmp_path, watcher=Watching(until=2))
    order = np.random.default_rng(0).permutation(len(votes))
    others = RaterVotes(votes.preferences, votes.pair, votes.rater[order], votes.chose_a)
    resumed = fit(others, k=2, encoder="none", folder=tmp_path)
    assert same_fit(resumed, fit(others, k=2, encoder="none"))
    assert not same_fit(resumed, fit(votes, k=2, encoder="none"))


# --- options ----------------------------------------------------------------------------------------------------------


def test_the_command_line_fits_raters(file: Path, tmp_path: Path) -> None:
    done = run("fit", file, "-o", tmp_path / "fitted", "--raters", "who", "--encoder", "none", "--k", "2")
    assert done.returncode == 0, done.stderr
    assert "Members are fitted to the votes of 30 raters. Rater ids are not saved." in " ".join(done.stdout.split())
    assert ID not in done.stdout + done.stderr
    assert ID.encode() not in bytes_in(tmp_path)
