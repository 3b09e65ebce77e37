"""Choosing a member by the user's own choices or by words."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pluralign import PreferenceSet, member_profiles
from pluralign.analysis.profiles import Profile
from pluralign.answering.steering import ScoredChoices, Steering, steer_by_choices, steer_by_words, wanted_traits
from pluralign.core.errors import UsageError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import load_held_out


@pytest.fixture(scope="module")
def cards(town_folder: Path, ensemble: RewardEnsemble) -> list[Profile]:
    return member_profiles(ensemble.weights, load_held_out(town_folder))


def steer_from(ensemble: RewardEnsemble, choices: PreferenceSet) -> Steering:
    return steer_by_choices(
        ScoredChoices.of(ensemble, choices), ensemble.weights, ensemble.temperature, ensemble.undecided
    )


def test_choices_that_follow_a_member_select_it(ensemble: RewardEnsemble, town_folder: Path) -> None:
    votes = load_held_out(town_folder).preferences
    for member in range(ensemble.k):
        own = ensemble.votes(votes)[:, member]
        choices = replace(votes, votes_a=(own > 0.5).astype(np.int64), votes_b=(own <= 0.5).astype(np.int64))
        found = steer_from(ensemble, choices[:60])
        assert found.member == member
        assert found.path[0] == pytest.approx(ensemble.weights)
        assert found.path[-1][member] > 0.9 > found.path[1][member], "the posterior sharpens"


def test_the_posterior_of_choices_follows_bayes_rule(ensemble: RewardEnsemble) -> None:
    pair = PreferenceSet.from_columns(["Trees?"], ["Yes, and many of them, please!"], ["No."], [1], [0])
    reward_a, reward_b = ensemble.pair_rewards(pair)
    likelihood = 0.05 + 0.9 / (1 + np.exp(-(reward_a - reward_b)[0] / ensemble.temperature))
    expected = ensemble.weights * likelihood
    assert steer_from(ensemble, pair).posterior == pytest.approx(expected / expected.sum())


def test_words_select_the_member_that_leans_in_that_direction(cards: list[Profile]) -> None:
    lengths = [next(lean.own for lean in card.leans if lean.trait == "length") for card in cards]
    for words, wanted in (("long answers", np.argmax(lengths)), ("brief, please", np.argmin(lengths))):
        if (max(lengths) if "long" in words else -min(lengths)) > 0:
            assert steer_by_words(words, cards).member == wanted


def test_negation_reverses_the_wanted_direction() -> None:
    assert wanted_traits("not formal, no bullets, detailed") == {"formality": -1, "structure": -1, "length": 1}


def test_unknown_words_raise_an_error_that_suggests_known_ones(cards: list[Profile]) -> None:
    with pytest.raises(UsageError, match=r"nothing in 'purple' names a trait.*try words such as long, short"):
        steer_by_words("purple", cards)
    with pytest.raises(UsageError, match="need held-out votes"):
        steer_by_words("short", [])
