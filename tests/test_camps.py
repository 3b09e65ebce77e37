"""Camps of the town hall: agreement is counted right, and a member stands for a camp only if it earns it."""

import numpy as np
import pytest
from benchmark_modules import benchmark

from pluralign import PluralignError, town_hall
from pluralign.core.arrays import FloatArray, Mask
from pluralign.measuring.camps import CampStudy, camps_of_ensemble, hard_votes_of, study_camps
from pluralign.votes.town_hall.town_hall import TownHall


@pytest.fixture(scope="module")
def town() -> TownHall:
    return town_hall(1600, n_annotators=200)


@pytest.fixture(scope="module")
def rows(town: TownHall) -> Mask:
    return town.preferences.test_mask(0.4)


@pytest.fixture(scope="module")
def camp_votes(town: TownHall) -> FloatArray:
    """Votes of the mean taste of each camp, from the tastes."""
    means = np.array([town.tastes[town.camps == camp].mean(axis=0) for camp in range(6)])
    difference = town.features[town.preferences.a_index] - town.features[town.preferences.b_index]
    return np.asarray(difference @ means.T > 0, dtype=np.float64)


@pytest.fixture(scope="module")
def crowd(town: TownHall) -> FloatArray:
    """Votes of the mean taste of everybody, which stand in for soft BT."""
    difference = town.features[town.preferences.a_index] - town.features[town.preferences.b_index]
    return np.asarray(difference @ town.tastes.mean(axis=0) > 0, dtype=np.float64)


@pytest.fixture(scope="module")
def true_camps(town: TownHall, rows: Mask, camp_votes: FloatArray, crowd: FloatArray) -> CampStudy:
    """The study of an ensemble whose members are the six camps, in reversed order."""
    return study_camps(town, rows, camp_votes[:, ::-1], np.full(6, 1 / 6), crowd)


def test_every_camp_of_an_ensemble_of_camps_has_its_own_member(true_camps: CampStudy) -> None:
    assert [camp.member for camp in true_camps.camps] == [5, 4, 3, 2, 1, 0]
    assert [camp.agreement[camp.closest] for camp in true_camps.camps] == [1.0] * 6
    assert true_camps.represented == 6
    assert true_camps.people.closest_member == true_camps.people.closest_camp
    assert sum(camp.people for camp in true_camps.camps) == true_camps.people.people == 200


def test_soft_bt_in_place_of_every_member_stands_for_nobody(town: TownHall, rows: Mask, crowd: FloatArray) -> None:
    study = study_camps(town, rows, np.column_stack([crowd, crowd]), [0.5, 0.5], crowd)
    assert study.represented == 0
    assert study.people.better_than_soft_bt == 0
    assert study.people.closest_member == study.people.soft_bt
    assert next(study.sentences()).startswith("No member stands for these camps")


def test_people_are_compared_as_by_a_loop_over_them(
    town: TownHall, rows: Mask, camp_votes: FloatArray, crowd: FloatArray
) -> None:
    votes = camp_votes[:, :3]
    people = study_camps(town, rows, votes, np.full(3, 1 / 3), crowd).people
    own, single, camps, chosen = [], [], [], []
    for person in range(200):
        vote = town.annotator_votes(person)[:, 0]
        train, test = vote[~rows], vote[rows]
        chosen.append(int(np.argmax([np.mean(train == votes[~rows, j]) for j in range(3)])))
        camp = int(np.argmax([np.mean(train == camp_votes[~rows, j]) for j in range(6)]))
        own.append(np.mean(test == votes[rows, chosen[-1]]))
        camps.append(np.mean(test == camp_votes[rows, camp]))
        single.append(np.mean(test == crowd[rows]))
    assert people.closest_member == pytest.approx(np.mean(own))
    assert people.soft_bt == pytest.approx(np.mean(single))
    assert people.closest_camp == pytest.approx(np.mean(camps))
    assert people.gain.mean == pytest.approx(np.mean(own) - np.mean(single))
    assert people.better_than_soft_bt == np.mean(np.array(own) > np.array(single))


def test_the_closest_member_is_chosen_on_training_prompts(
    town: TownHall, rows: Mask, camp_votes: FloatArray, crowd: FloatArray
) -> None:
    """A member that equals the gardeners on held-out prompts only, and opposes them in training, is not chosen."""
    gardeners = camp_votes[:, 0]
    trap = np.where(rows, gardeners, 1 - gardeners)
    study = study_camps(town, rows, np.column_stack([trap, crowd]), [0.5, 0.5], crowd)
    assert study.camps[0].agreement[0] == 1.0
    assert study.camps[0].closest == 1
    assert study.camps[0].member is None


def test_members_on_true_features_agree_with_people_more_than_soft_bt(town: TownHall) -> None:
    ensemble, held_out = benchmark("true_features").fit_features(
        town.preferences, town.features, k=4, target="votes", test_fraction=0.4
    )
    rows = town.preferences.test_mask(0.4)
    votes, _ = hard_votes_of(town, ensemble, town.features)
    np.testing.assert_array_equal(votes[rows], held_out.votes)
    people = camps_of_ensemble(town, rows, ensemble, town.features).people
    assert people.soft_bt + 0.02 < people.closest_member < people.closest_camp
    with pytest.raises(PluralignError, match="nothing to encode"):  # true features never reach real texts
        ensemble.rewards([("Tea?", "Yes.")])
