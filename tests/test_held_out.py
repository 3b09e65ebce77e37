"""Held-out votes kept beside an ensemble."""

from pathlib import Path

import numpy as np
import pytest
from conftest import run

from pluralign import DataError, RewardEnsemble, fit, town_hall
from pluralign.ensemble.held_out import load_held_out
from pluralign.votes.preferences import texts_of

VOTES = town_hall(400).preferences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ensemble")
    fit(VOTES, k=3, encoder="none", folder=path)
    return path


def test_fit_saves_held_out_votes_with_rewards(folder: Path) -> None:
    kept, ensemble = load_held_out(folder), RewardEnsemble.load(folder)
    _, test = VOTES.split()
    assert kept.preferences == test
    assert np.allclose(kept.rewards, ensemble.rewards(texts_of(test)))


def test_votes_and_differences_match_the_ensemble(folder: Path) -> None:
    kept, ensemble = load_held_out(folder), RewardEnsemble.load(folder)
    reward_a, reward_b = ensemble.pair_rewards(kept.preferences)
    assert np.allclose(kept.difference, reward_a - reward_b)
    assert np.array_equal(kept.votes, ensemble.votes(kept.preferences))


def test_taking_members_keeps_their_columns(folder: Path) -> None:
    kept = load_held_out(folder)
    assert np.array_equal(kept.take([2, 0]).votes, kept.votes[:, [2, 0]])


def test_indexing_keeps_the_rewards_of_each_pair(folder: Path) -> None:
    kept = load_held_out(folder)
    for rows in (np.arange(len(kept.preferences)) % 3 == 1, [7, 2, 30]):
        some = kept[rows]
        assert some.preferences == kept.preferences[rows]
        assert np.array_equal(some.difference, kept.difference[np.asarray(rows)])
        assert np.allclose(some.rewards, RewardEnsemble.load(folder).rewards(texts_of(some.preferences)))


def test_held_out_votes_are_optional(tmp_path: Path) -> None:
    fit(VOTES, k=2, encoder="none", folder=tmp_path)
    fit(VOTES, k=2, encoder="none", folder=tmp_path, keep_held_out=False)
    assert not list(tmp_path.glob("held_out*"))
    with pytest.raises(DataError, match=r"it has no held-out votes.*give votes that it was not trained on"):
        load_held_out(tmp_path)


def test_commands_report_missing_held_out_votes(tmp_path: Path) -> None:
    fit(VOTES, k=2, encoder="none").save(tmp_path)
    done = run("report", tmp_path, "-o", tmp_path / "report.html")
    assert done.returncode == 2
    assert "it has no held-out votes" in done.stderr
    assert not (tmp_path / "report.html").exists()
