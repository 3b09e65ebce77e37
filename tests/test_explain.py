"""A member's vote is explained by measured preferences that apply to the two texts, and by nothing else."""

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.measuring.cards import Profile
from pluralign.measuring.leans import DISLIKES_WORD, LIKES_WORD, Lean
from pluralign.measuring.report_data import ReportData, collect_report_data
from pluralign.server.explain import A_TIE, NO_CARDS, NO_REASON, MemberVote, explain_votes

SHORT, LONG = "No.", "Yes, and there are many good reasons for it, of which the first is that it is right. " * 3


@pytest.fixture(scope="module")
def report(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> ReportData:
    return collect_report_data(ensemble, held_out)


def a_lean(trait: str = "length", own: float = 0.5, pairs: int = 400, claim: str = "") -> Lean:
    return Lean(trait, own, own, 0.01, own / 0.01, 0.0, 0.1, pairs, claim)


def a_card(member: int = 0, leans: tuple[Lean, ...] = (), **words: Any) -> Profile:
    own = {"likes": (), "dislikes": (), "typical": (), "distinguishing": ()} | words
    return Profile(member, 0.3, 0.4, f"card {member}", "", leans, **own)


def explained(ensemble: RewardEnsemble, card: Profile, margin: float = 1.0) -> MemberVote:
    """The vote of member 0, which prefers LONG if the margin is above 0."""
    return explain_votes(ensemble, [card], "Tea?", (LONG, SHORT), [[margin, 0.0, 0.0], [0.0, 0.0, 0.0]])[0]


def test_a_lean_in_the_votes_direction_explains_it(ensemble: RewardEnsemble) -> None:
    n_words = len(LONG.split())
    likes = a_card(leans=(a_lean("length", 0.5),))
    assert explained(ensemble, likes).why == [
        f"Prefers longer answers (75 % of 400 held-out pairs): A has {n_words} words, B 1."
    ]
    against = explained(ensemble, likes, -1.0)
    assert against.why == [NO_REASON]
    assert against.against == [f"Prefers longer answers (75 % of 400 held-out pairs): A has {n_words} words, B 1."]
    shorter = explained(ensemble, a_card(leans=(a_lean("length", -0.5),)), -1.0)
    assert shorter.why == [f"Prefers shorter answers (75 % of 400 held-out pairs): B has 1 words, A {n_words}."]


@pytest.mark.parametrize(
    "lean",
    [
        pytest.param(a_lean("length", 0.05, 10_000), id="too small to matter"),
        pytest.param(a_lean("length", 0.3, 100), id="could be chance"),
        pytest.param(a_lean("length", math.nan, 400), id="not measured"),
        pytest.param(a_lean("second_person", 0.5), id="the texts do not differ in it"),
    ],
)
def test_unclear_leans_explain_nothing(ensemble: RewardEnsemble, lean: Lean) -> None:
    vote = explained(ensemble, a_card(leans=(lean,)))
    assert (vote.why, vote.against) == ([NO_REASON], [])


def test_small_differences_are_no_reason(ensemble: RewardEnsemble) -> None:
    card = a_card(leans=(a_lean("length", 0.5),))
    long = "word " * 53
    assert explain_votes(ensemble, [card], "", (long, long + "word"), [[0, 0, 0], [1, 0, 0]])[0].why == [NO_REASON]
    assert explain_votes(ensemble, [card], "", (long, long + long), [[0, 0, 0], [1, 0, 0]])[0].why != [NO_REASON]


def test_words_explain_a_vote(ensemble: RewardEnsemble) -> None:
    likes = explained(ensemble, a_card(likes=(a_lean("reasons", 0.4),)))
    rest = "“reasons” (70 % of 400 held-out pairs): only A contains it."
    assert likes.why == [LIKES_WORD.capitalize() + rest]
    turns = explained(ensemble, a_card(dislikes=(a_lean("reasons", -0.4),)), -1.0)
    assert turns.why == [f"{DISLIKES_WORD.capitalize()}“reasons” (70 % of 400 held-out pairs): only A contains it."]


def test_every_member_has_a_vote(ensemble: RewardEnsemble) -> None:
    votes = explain_votes(ensemble, [], "Tea?", ("Yes.", "No."), [[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]])
    assert [one.vote for one in votes] == [1.0, 0.0, 0.5]
    assert [one.margin for one in votes] == [1.0, -1.0, 0.0]
    assert [one.why for one in votes] == [[NO_CARDS], [NO_CARDS], [A_TIE]]
    assert [one.weight for one in votes] == ensemble.weights.tolist()
    assert votes[0].prob_a == pytest.approx(1 / (1 + math.exp(-1 / ensemble.temperature)))


def test_swapping_the_responses_swaps_the_reasons(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, report: ReportData
) -> None:
    votes = held_out.preferences
    reasons = 0
    for row in range(20):
        prompt = votes.prompts[votes.prompt_index[row]]
        a, b = votes.responses[votes.a_index[row]], votes.responses[votes.b_index[row]]
        rewards = ensemble.rewards([(prompt, a), (prompt, b)])
        one = explain_votes(ensemble, report.profiles, prompt, (a, b), [rewards[0], rewards[1]])
        other = explain_votes(ensemble, report.profiles, prompt, (b, a), [rewards[1], rewards[0]])
        swap = str.maketrans("AB", "BA")
        for this, that in zip(one, other, strict=True):
            assert [s.split(": ")[-1] for s in this.why] == [s.split(": ")[-1].translate(swap) for s in that.why]
            assert this.vote == 1 - that.vote
            reasons += this.why not in ([NO_REASON], [A_TIE])
    assert reasons > 10


def test_votes_are_valid_json(ensemble: RewardEnsemble, report: ReportData) -> None:
    votes = explain_votes(ensemble, report.profiles, "Tea?", (LONG, SHORT), [[1, 2, 3], [3, 2, 1]])
    plain = [asdict(vote) for vote in votes]
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert report.profiles[0].name == votes[0].name
