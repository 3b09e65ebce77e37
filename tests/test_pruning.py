"""Pruning: which members are removed, the error before and after, and the pruned ensemble on disk."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import printed, run
from test_ensemble import some_ensemble

from pluralign import DataError, RewardEnsemble, UsageError, fit, prune, town_hall
from pluralign.core.json_values import to_json
from pluralign.ensemble.held_out import HeldOutVotes, load_held_out, score_held_out
from pluralign.learning.measure import evaluate_features
from pluralign.measuring.pruning import Pruning, plan_pruning
from pluralign.votes.preferences import PreferenceSet, texts_of


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
    return prune(RewardEnsemble.load(folder), load_held_out(folder), beta=3, only_far=False)


def voting(columns: list[list[int]], votes_a: list[int], votes_b: list[int]) -> HeldOutVotes:
    """Return held-out votes whose members vote as given: one column per member, one pair per prompt."""
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


# --- removed members and figures --------------------------------------------------------------------------------------


def test_figures_match_a_count_by_hand() -> None:
    ensemble, held_out = four_and_a_contrarian(3, 1)
    pruning = plan_pruning(ensemble, held_out, beta=11, only_far=False)
    assert (pruning.removed, pruning.kept) == ([4], [0, 1, 2, 3])
    assert pruning.removed_weight == pytest.approx(0.08)
    np.testing.assert_allclose(pruning.ensemble.weights, [0.25] * 4)
    before, after = [0.69] * 4 + [0.92] * 16, [0.75] * 4 + [1.0] * 16
    noise = 0.75 * 0.25 / 3
    error = {name: np.mean([(q - 0.75) ** 2 for q in p]) - noise for name, p in (("old", before), ("new", after))}
    assert pruning.error_before.mean == pytest.approx(error["old"])
    assert pruning.error_after.mean == pytest.approx(error["new"])
    assert pruning.difference.mean == pytest.approx(error["new"] - error["old"])
    assert pruning.epsilon == 0
    assert pruning.bound == pytest.approx((0 + 1 / 10) ** 2)
    assert pruning.shift == pytest.approx(math.sqrt((4 * 0.06**2 + 16 * 0.08**2) / 20))
    assert pruning.bound_after_shift == pytest.approx(pruning.shift**2)
    assert pruning.distances[4] == pytest.approx((4 * 0.69 + 16 * 0.92) / 20)
    assert pruning.disagreements == pytest.approx([(1 * 0.75 + 19 * 0.25) / 20] * 4 + [0.75])


def test_an_outlier_is_flagged_and_removed() -> None:
    ensemble, held_out = four_and_a_contrarian()
    pruning = plan_pruning(ensemble, held_out, beta=4, only_far=False)
    epsilon = (4 * 0.31**2 + 16 * 0.08**2) / 20
    assert pruning.epsilon == pytest.approx(epsilon)
    assert pruning.outlier_threshold == pytest.approx(5 * math.sqrt(epsilon))
    assert pruning.disagreements[4] == 1.0
    assert pruning.outliers_before == [4]
    assert pruning.error_after.mean <= pruning.bound_after_shift <= pruning.bound
    only_outliers = plan_pruning(ensemble, held_out, beta=4)
    assert only_outliers.removed == [4]
    assert set(only_outliers.removed) < set(pruning.removed), (
        "the rule as printed also removes members that are not far"
    )


def test_votes_do_not_decide_which_members_are_removed(votes: PreferenceSet) -> None:
    ensemble = some_ensemble(k=6)
    pruning = prune(ensemble, votes, beta=3, only_far=False)
    swapped = prune(ensemble, replace(votes, votes_a=votes.votes_b, votes_b=votes.votes_a), beta=3, only_far=False)
    assert swapped.removed == pruning.removed != []
    assert swapped.distances == pruning.distances
    assert swapped.error_after.mean != pruning.error_after.mean
    weights = ensemble.weights[pruning.kept]
    np.testing.assert_array_equal(pruning.ensemble.members.theta, ensemble.members.theta[:, pruning.kept])
    np.testing.assert_array_equal(pruning.ensemble.weights, weights / weights.sum())


def test_without_removed_members_the_ensemble_is_unchanged(votes: PreferenceSet) -> None:
    ensemble = some_ensemble(k=3)
    pruning = prune(ensemble, score_held_out(ensemble, votes), beta=1000)
    assert (pruning.removed, pruning.removed_weight, pruning.shift) == ([], 0, 0)
    assert pruning.difference.mean == pruning.difference.high == 0
    np.testing.assert_array_equal(pruning.ensemble.weights, ensemble.weights)


def test_single_votes_use_the_plain_error_as_epsilon() -> None:
    ensemble, held_out = four_and_a_contrarian(1, 0)
    pruning = plan_pruning(ensemble, held_out, beta=11, only_far=False)
    assert pruning.epsilon == pruning.error_before.mean == pytest.approx((4 * 0.31**2 + 16 * 0.08**2) / 20)


def test_rewards_of_another_ensemble_are_rejected(votes: PreferenceSet) -> None:
    with pytest.raises(DataError, match="are of 4 members, but the ensemble has 3"):
        prune(some_ensemble(k=3), score_held_out(some_ensemble(k=4), votes))


# --- the pruned ensemble ----------------------------------------------------------------------------------------------


def test_the_record_is_measured_again(folder: Path, pruned: Pruning) -> None:
    original, record = RewardEnsemble.load(folder).record, pruned.ensemble.record
    held_out = load_held_out(folder)
    features = pruned.ensemble.features(texts_of(held_out.preferences))
    again = evaluate_features(pruned.ensemble, held_out.preferences, features)
    assert original.evaluation is not None
    assert record.evaluation is not None
    assert to_json(record.evaluation) == to_json(again)
    assert set(record.to_json()) == set(original.to_json()) - {"bound"} | {"pruned"}
    assert pruned.removed != []
    assert record.k == len(record.evaluation.members) == pruned.ensemble.k == 6 - len(pruned.removed)
    assert record.evaluation.test != original.evaluation.test
    assert record.evaluation.levels["vote"].brier_corrected == pytest.approx(pruned.error_after.mean)
    assert [row.k for row in record.history] == [pruned.ensemble.k]
    assert record.bound is None
    assert record.data == original.data
    assert record.pruned is not None
    assert record.pruned.k == 6
    assert record.pruned.removed == pruned.removed
    np.testing.assert_array_equal(pruned.ensemble.first(pruned.ensemble.k).weights, pruned.ensemble.weights)


def test_a_saved_pruned_ensemble_loads_with_its_votes(folder: Path, pruned: Pruning, tmp_path: Path) -> None:
    pruned.save(tmp_path / "pruned", source=folder)
    loaded, held_out = RewardEnsemble.load(tmp_path / "pruned"), load_held_out(tmp_path / "pruned")
    np.testing.assert_allclose(loaded.rewards(texts_of(held_out.preferences)), held_out.rewards, rtol=1e-6)
    np.testing.assert_array_equal(held_out.rewards, load_held_out(folder).rewards[:, pruned.kept])
    assert loaded.record.pruned is not None
    assert loaded.record.pruned.source == str(folder)
    assert set(loaded.baselines) == set(RewardEnsemble.load(folder).baselines)


def test_the_original_ensemble_is_not_overwritten(folder: Path, pruned: Pruning, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    before = (folder / "ensemble.json").read_bytes()
    for same in (folder, tmp_path / "link", folder / "." / ".." / folder.name):
        with pytest.raises(UsageError, match="name another folder"):
            pruned.save(same, source=folder)
    done = run("prune", folder, "-o", folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "name another folder" in done.stderr
    assert (folder / "ensemble.json").read_bytes() == before


# --- the command ------------------------------------------------------------------------------------------------------


def test_prune_prints_one_json_object(folder: Path, pruned: Pruning, tmp_path: Path) -> None:
    done = run("prune", folder, "-o", tmp_path / "out", "--beta", "3", "--furthest", "--json")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    facts = json.loads(done.stdout)
    assert set(facts) >= {"removed", "removed_weight", "bound"}
    assert facts["removed"] == pruned.removed
    assert facts["bound"] == pytest.approx(pruned.bound)
    assert facts["weights"] == RewardEnsemble.load(tmp_path / "out").weights.tolist()


def test_prune_shows_removed_members_and_the_error(folder: Path, pruned: Pruning, tmp_path: Path) -> None:
    shown = run("prune", folder, "-o", tmp_path / "out", "--beta", "3", "--furthest").stdout
    assert f"Removed {len(pruned.removed)} of 6 members" in shown
    assert f"{pruned.error_after.mean:.4f}" in shown
    assert f"{pruned.bound:.4f}" in shown
    assert shown.count("removed") >= len(pruned.removed)
    unchanged = run("prune", folder, "-o", tmp_path / "all", "--beta", "1000").stdout
    assert "Removed no member; all 6 are kept" in unchanged
    assert RewardEnsemble.load(tmp_path / "all").k == 6


def test_prune_needs_other_votes_if_none_were_held_out(votes: PreferenceSet, tmp_path: Path) -> None:
    some_ensemble(k=4).save(tmp_path / "bare")
    votes.save(tmp_path / "votes.jsonl")
    refused = run("prune", tmp_path / "bare", "-o", tmp_path / "out")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "give votes that it was not trained on" in refused.stderr
    printed("prune", tmp_path / "bare", "-o", tmp_path / "out", "--data", tmp_path / "votes.jsonl", "--json")
    assert load_held_out(tmp_path / "out").preferences == votes
