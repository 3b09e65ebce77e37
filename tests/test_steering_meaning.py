"""Steering by the meaning of words: on vectors where the truth is known, and with a made-up judge."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from served import Writer

from pluralign import UsageError, answer
from pluralign.answering.request import Voters
from pluralign.answering.steering import (
    JUDGED_PAIRS,
    Likings,
    MeaningMatch,
    _verdict,
    judged_choices,
    meaning_posterior,
    steer_by_choices,
    steer_by_meaning,
)
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes, load_held_out
from pluralign.theory.posterior import ChoiceModel

MEMBERS = ChoiceModel(people=0.9, spread=0.0, source="raters")


@pytest.fixture(scope="module")
def held_out(town_folder: Path) -> HeldOutVotes:
    return load_held_out(town_folder)


def test_a_description_selects_the_member_that_likes_this_direction() -> None:
    random = np.random.default_rng(0)
    difference = random.normal(size=(300, 6))
    liking = np.tanh(3 * difference[:, :3])  # member j likes direction j
    liking -= liking.mean(axis=1, keepdims=True)
    common = random.normal(size=(20, 6))
    prompts = np.arange(300, dtype=np.int32) // 5
    for member in range(3):
        described = np.vstack([common, np.eye(6)[member]])
        found = meaning_posterior(difference, liking, prompts, described, np.full(3, 1 / 3))
        assert found.argmax() == member
        assert found.sum() == pytest.approx(1)
    neutral = np.vstack([common, common.mean(axis=0)])
    assert meaning_posterior(difference, liking, prompts, neutral, np.full(3, 1 / 3)).max() < 0.6


def test_words_do_not_show_whether_the_user_follows_a_member() -> None:
    people = Voters(np.array([0.5, 0.5]), model=ChoiceModel(people=0.3))
    found = steer_by_meaning(MeaningMatch(np.array([0.2, 0.8])), people)
    assert found.member == 1
    assert found.posterior == pytest.approx((0.06, 0.24))
    assert found.average == pytest.approx(0.7)
    assert people.believed(np.array([0.2, 0.8])).sum(axis=1) == pytest.approx([0.06, 0.24, 0.7])


def test_an_ensemble_without_a_transformers_encoder_has_no_meaning_to_match(
    ensemble: RewardEnsemble, held_out: HeldOutVotes
) -> None:
    assert Likings.of(ensemble, held_out) is None


def test_a_judge_that_follows_a_member_selects_it(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    ensemble = replace(ensemble, undecided=0.0, choice_model=MEMBERS)
    asked: list[str] = []
    for member in range(ensemble.k):

        def judge(instruction: str, member: int = member) -> str:
            asked.append(instruction)
            question, _, rest = instruction.partition("\n\nResponse A: ")
            first, _, rest = rest.partition("\n\nResponse B: ")
            second = rest.partition("\n\nWhich of the two")[0]
            prompt = question.partition("Question: ")[2]
            a, b = ensemble.rewards([(prompt, first), (prompt, second)])[:, member]
            return "Response A." if a > b else "B"

        choices = judged_choices(Voters.of(ensemble), held_out, "what member 1 wants", judge)
        assert len(choices.votes) <= JUDGED_PAIRS
        found = steer_by_choices(choices, Voters.of(ensemble))
        assert found.member == member
    assert "what member 1 wants" in asked[0]


def test_a_judge_that_always_says_a_is_refused(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    with pytest.raises(UsageError, match="no usable answer"):
        judged_choices(Voters.of(ensemble), held_out, "short", lambda _: "A")
    with pytest.raises(UsageError, match="a judge needs a preference in words alone"):
        answer(ensemble, "Tea?", ["Yes."], "steerable", member=1, judge=Writer(), held_out=held_out)
    judge = Writer(responses=["A"])
    with pytest.raises(UsageError, match="no usable answer"):
        answer(ensemble, "Tea?", ["Yes.", "No."], "steerable", like="short", judge=judge, held_out=held_out)


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [("A", "A"), ("Response B.", "B"), ("b", "B"), ("A or B", None), ("", None), ("I am not sure", None)],
)
def test_replies_name_exactly_one_response(reply: str, verdict: str | None) -> None:
    assert _verdict(reply) == verdict
