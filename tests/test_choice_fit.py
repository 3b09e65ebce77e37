"""The choice model: fitted to raters who are members, and safe where nothing shows that members are people."""

import numpy as np
import pytest

from pluralign.learning.pairs import Members, Pairs
from pluralign.learning.raters import (
    VOICES_SHARE,
    NewPeople,
    VotesByRater,
    fit_choice_model,
    model_from_voices,
    rater_groups,
)
from pluralign.theory.calibration import sigmoid
from pluralign.theory.posterior import SAFE_SHARE, ChoiceModel

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
    zeros = np.zeros((1, 2))
    pairs = Pairs(
        np.vstack([x, zeros]),
        np.arange(400, dtype=np.int32),
        np.full(400, 400, dtype=np.int32),
        prob_a,
        (np.arange(400) // 10).astype(np.int32),
    )
    single = sigmoid(x @ theta.mean(axis=1))
    theta = theta if distinct else 1.3 * theta
    found = model_from_voices(Members(theta, np.array([0.5, 0.5])), 1.0, single, pairs)
    assert found.people == share
