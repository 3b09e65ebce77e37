"""Pruning: who goes, what it costs, and that the pruned ensemble is whole and true to itself."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import run
from test_ensemble import some_ensemble

from pluralign import RewardEnsemble, fit, prune, town_hall
from pluralign.analysis.pruning import Pruning, plan_pruning
from pluralign.core.errors import DataError, UsageError
from pluralign.core.json_values import without_nan
from pluralign.ensemble.ensemble import texts_of
from pluralign.ensemble.held_out import HeldOutVotes, load_held_out, score_held_out
from pluralign.evaluation.measure import evaluate_features
from pluralign.fitting.fit import evaluation_facts
from pluralign.votes.preferences import PreferenceSet

CONTRACT = {"removed", "removed_weight", "bound"}


@pytest.fixture(scope="module")
def votes() -> PreferenceSet:
    return town_hall(160).preferences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fitted") / "town"
    fit(town_hall(500).preferences, k=6, encoder="none", method="stagewise", test_fraction=0.2, folder=path)
    return path


@pytest.fixture(scope="module")
def pruned(folder: Path) -> Pruning:
    return prune(RewardEnsemble.load(folder), load_held_out(folder), beta=3)


def voting(columns: list[list[int]], votes_a: list[int], votes_b: list[int]) -> HeldOutVotes:
    """Members that vote as given, each column a member, on pairs of a prompt each."""
    n = len(columns[0])
    people = PreferenceSet.from_columns(
        [f"prompt {i}" for i in range(n)], ["Yes."] * n, ["No."] * n, votes_a[:n], votes_b[:n]
    )
    items = people.items()
    rewards = np.zeros((len(items.prompt_index), len(columns)))
    rewards[items.a] = np.array(columns).T
    rewards[items.b] = 0.5
    return HeldOutVotes(people, rewards)


def four_and_a_contrarian(votes_a: int = 4, votes_b: int = 0) -> tuple[RewardEnsemble, HeldOutVotes]:
    n = 20
    columns = [[1] * n for _ in range(4)] + [[0] * n]
    for j in range(4):
        columns[j][j] = 0
    ensemble = some_ensemble(k=5).take(range(5), [0.23, 0.23, 0.23, 0.23, 0.08])
    return ensemble, voting(columns, [votes_a] * n, [votes_b] * n)


# --- what is decided and measured -----------------------------------------------------------------------------------


def test_figures_are_those_of_votes_counted_by_hand() -> None:
    ensemble, evidence = four_and_a_contrarian(3, 1)
    found = plan_pruning(ensemble, evidence, beta=11)
    assert (found.removed, found.kept) == ([4], [0, 1, 2, 3])
    assert found.removed_weight == pytest.approx(0.08)
    np.testing.assert_allclose(found.ensemble.weights, [0.25] * 4)
    before, after = [0.69] * 4 + [0.92] * 16, [0.75] * 4 + [1.0] * 16
    noise = 0.75 * 0.25 / 3
    error = {name: np.mean([(q - 0.75) ** 2 for q in p]) - noise for name, p in (("old", before), ("new", after))}
    assert found.error_before.mean == pytest.approx(error["old"])
    assert found.error_after.mean == pytest.approx(error["new"])
    assert found.difference.mean == pytest.approx(error["new"] - error["old"])
    assert found.epsilon_clipped
    assert found.epsilon == 0
    assert found.bound == pytest.approx((0 + 1 / 10) ** 2)
    assert found.shift == pytest.approx(math.sqrt((4 * 0.06**2 + 16 * 0.08**2) / 20))
    assert found.bound_after_shift == pytest.approx(found.shift**2)
    assert found.distances[4] == pytest.approx((4 * 0.69 + 16 * 0.92) / 20)
    assert found.disagreements == pytest.approx([(1 * 0.75 + 19 * 0.25) / 20] * 4 + [0.75])
    assert found.least_disagreement == pytest.approx(0.25)


def test_an_outlier_is_flagged_before_and_gone_after() -> None:
    ensemble, evidence = four_and_a_contrarian()
    found = plan_pruning(ensemble, evidence, beta=4)
    epsilon = (4 * 0.31**2 + 16 * 0.08**2) / 20
    assert found.epsilon == pytest.approx(epsilon)
    assert not found.epsilon_clipped
    assert found.outlier_threshold == pytest.approx(5 * math.sqrt(epsilon))
    assert found.disagreements[4] == 1.0
    assert (found.outliers_before, found.outliers_after) == ([4], [])
    assert found.error_after.mean <= found.bound_after_shift <= found.bound
    spared = plan_pruning(ensemble, evidence, beta=4, only_far=True)
    assert spared.removed == [4]
    assert set(spared.removed) < set(found.removed), "as printed, members go that are not far out"
    assert spared.outliers_after == []


def test_no_people_decide_who_goes(votes: PreferenceSet) -> None:
    ensemble = some_ensemble(k=6)
    found = prune(ensemble, votes, beta=3)
    turned = prune(ensemble, replace(votes, votes_a=votes.votes_b, votes_b=votes.votes_a), beta=3)
    assert turned.removed == found.removed != []
    assert turned.distances == found.distances
    assert turned.error_after.mean != found.error_after.mean
    kept = ensemble.prune(votes, beta=3)
    np.testing.assert_array_equal(kept.members.theta, found.ensemble.members.theta)
    np.testing.assert_array_equal(kept.weights, found.ensemble.weights)


def test_where_nothing_goes_the_ensemble_is_the_same(votes: PreferenceSet) -> None:
    ensemble = some_ensemble(k=3)
    found = prune(ensemble, score_held_out(ensemble, votes), beta=1000)
    assert (found.removed, found.removed_weight, found.shift) == ([], 0, 0)
    assert found.difference.mean == found.difference.high == 0
    np.testing.assert_array_equal(found.ensemble.weights, ensemble.weights)


def test_single_votes_leave_the_plain_error_as_epsilon() -> None:
    ensemble, evidence = four_and_a_contrarian(1, 0)
    found = plan_pruning(ensemble, evidence, beta=11)
    assert found.epsilon == found.error_before.mean == pytest.approx((4 * 0.31**2 + 16 * 0.08**2) / 20)


def test_rewards_of_another_ensemble_are_refused(votes: PreferenceSet) -> None:
    with pytest.raises(DataError, match="are of 4 members, but the ensemble has 3"):
        prune(some_ensemble(k=3), score_held_out(some_ensemble(k=4), votes))


# --- the pruned ensemble --------------------------------------------------------------------------------------------


def test_facts_are_measured_anew(folder: Path, pruned: Pruning) -> None:
    original, facts = RewardEnsemble.load(folder).facts, pruned.ensemble.facts
    evidence = load_held_out(folder)
    features = pruned.ensemble.features(texts_of(evidence.preferences))
    again = without_nan(evaluation_facts(evaluate_features(pruned.ensemble, evidence.preferences, features)))
    assert {name: facts[name] for name in again} == again
    assert set(facts) == set(original) | {"pruned"}
    assert pruned.removed != []
    assert facts["k"] == len(facts["members"]) == pruned.ensemble.k == 6 - len(pruned.removed)
    assert facts["test"] != original["test"]
    assert facts["levels"]["vote"]["brier_corrected"] == pytest.approx(pruned.error_after.mean)
    assert [row["k"] for row in facts["history"]] == [pruned.ensemble.k]
    assert facts["bound"] is None
    assert facts["data"] == original["data"]
    assert facts["pruned"]["k"] == 6
    assert facts["pruned"]["removed"] == pruned.removed
    np.testing.assert_array_equal(pruned.ensemble.first(pruned.ensemble.k).weights, pruned.ensemble.weights)


def test_a_pruned_folder_is_a_whole_ensemble(folder: Path, pruned: Pruning, tmp_path: Path) -> None:
    pruned.save(tmp_path / "pruned", source=folder)
    loaded, evidence = RewardEnsemble.load(tmp_path / "pruned"), load_held_out(tmp_path / "pruned")
    np.testing.assert_allclose(loaded.rewards(texts_of(evidence.preferences)), evidence.rewards, rtol=1e-6)
    np.testing.assert_array_equal(evidence.rewards, load_held_out(folder).rewards[:, pruned.kept])
    assert loaded.facts["pruned"]["from"] == str(folder)
    assert set(loaded.baselines) == set(RewardEnsemble.load(folder).baselines)


def test_the_ensemble_itself_is_not_overwritten(folder: Path, pruned: Pruning, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    before = (folder / "ensemble.json").read_bytes()
    for same in (folder, tmp_path / "link", folder / "." / ".." / folder.name):
        with pytest.raises(UsageError, match="name another folder"):
            pruned.save(same, source=folder)
    done = run("prune", folder, "-o", folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "name another folder" in done.stderr
    assert (folder / "ensemble.json").read_bytes() == before


# --- the command ----------------------------------------------------------------------------------------------------


def test_prune_prints_one_json_object(folder: Path, pruned: Pruning, tmp_path: Path) -> None:
    done = run("prune", folder, "-o", tmp_path / "out", "--beta", "3", "--json")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    facts = json.loads(done.stdout)
    assert set(facts) >= CONTRACT
    assert facts["removed"] == pruned.removed
    assert facts["bound"] == pytest.approx(pruned.bound)
    assert facts["weights"] == RewardEnsemble.load(tmp_path / "out").weights.tolist()


def test_prune_shows_who_went_and_what_it_cost(folder: Path, pruned: Pruning, tmp_path: Path) -> None:
    shown = run("prune", folder, "-o", tmp_path / "out", "--beta", "3").stdout
    assert f"Removed {len(pruned.removed)} of 6 members" in shown
    assert f"{pruned.error_after.mean:.4f}" in shown
    assert f"{pruned.bound:.4f}" in shown
    assert shown.count("removed") >= len(pruned.removed)
    quiet = run("prune", folder, "-o", tmp_path / "all", "--beta", "1000").stdout
    assert "Removed no member; all 6 are kept" in quiet
    assert RewardEnsemble.load(tmp_path / "all").k == 6


def test_prune_measures_on_other_votes_where_none_were_kept(votes: PreferenceSet, tmp_path: Path) -> None:
    some_ensemble(k=4).save(tmp_path / "bare")
    votes.save(tmp_path / "votes.jsonl")
    refused = run("prune", tmp_path / "bare", "-o", tmp_path / "out")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "name votes that it did not learn from" in refused.stderr
    done = run("prune", tmp_path / "bare", "-o", tmp_path / "out", "--data", tmp_path / "votes.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    assert load_held_out(tmp_path / "out").preferences == votes


def test_a_beta_that_the_theorem_does_not_take_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    done = run("prune", folder, "-o", tmp_path / "out", "--beta", "1.5")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pluralign: beta must be at least 2, not 1.5.\n"
    assert not (tmp_path / "out").exists()
