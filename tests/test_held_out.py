"""Held-out votes kept beside an ensemble."""

from pathlib import Path

import numpy as np
import pytest

from pluralign import DataError, RewardEnsemble, fit, town_hall
from pluralign.ensemble.held_out import load_held_out
from pluralign.votes.preferences import texts_of

VOTES = town_hall(480).preferences  # the votes of town_folder


def test_fit_saves_held_out_votes_with_rewards(town_folder: Path) -> None:
    kept, ensemble = load_held_out(town_folder), RewardEnsemble.load(town_folder)
    _, test = VOTES.split(0.4, seed=1)
    assert kept.preferences == test
    assert np.allclose(kept.rewards, ensemble.rewards(texts_of(test)))


def test_votes_and_differences_match_the_ensemble(town_folder: Path) -> None:
    kept, ensemble = load_held_out(town_folder), RewardEnsemble.load(town_folder)
    reward_a, reward_b = ensemble.pair_rewards(kept.preferences)
    assert np.allclose(kept.difference, reward_a - reward_b)
    assert np.array_equal(kept.votes, ensemble.votes(kept.preferences))


def test_taking_members_keeps_their_columns(town_folder: Path) -> None:
    kept = load_held_out(town_folder)
    assert np.array_equal(kept.take([2, 0]).votes, kept.votes[:, [2, 0]])


def test_indexing_keeps_the_rewards_of_each_pair(town_folder: Path) -> None:
    kept = load_held_out(town_folder)
    for rows in (np.arange(len(kept.preferences)) % 3 == 1, [7, 2, 30]):
        some = kept[rows]
        assert some.preferences == kept.preferences[rows]
        assert np.array_equal(some.difference, kept.difference[np.asarray(rows)])
        assert np.allclose(some.rewards, RewardEnsemble.load(town_folder).rewards(texts_of(some.preferences)))


def test_held_out_votes_are_optional(tmp_path: Path) -> None:
    fit(VOTES, k=2, encoder="none", folder=tmp_path)
    fit(VOTES, k=2, encoder="none", folder=tmp_path, keep_held_out=False)
    assert not list(tmp_path.glob("held_out*"))
    with pytest.raises(DataError, match=r"it has no held-out votes.*give votes that it was not trained on"):
        load_held_out(tmp_path)
