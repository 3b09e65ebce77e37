"""What a user's choices and words say about the user, and what they change in the answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from served import Writer

from pluralign import Answerer, AnswerRequest, PreferenceSet, answer, fit, town_hall
from pluralign.answering.request import NO_VOICES, ONE_VOICE, Voters
from pluralign.answering.steering import (
    JUDGED_PAIRS,
    NO_MEANING,
    NOBODY,
    UNKNOWN_WORDS,
    Likings,
    MeaningMatch,
    ScoredChoices,
    Steering,
    judged_choices,
    meaning_posterior,
    steer_by_choices,
    steer_by_meaning,
)
from pluralign.core.errors import UsageError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes, score_held_out
from pluralign.text.causal import Choice
from pluralign.text.encoders import default_encoder
from pluralign.theory.posterior import ChoiceModel
from pluralign.votes.prompts import PromptLike

MEMBERS = ChoiceModel(people=0.9, spread=0.0, source="raters")


@pytest.fixture(scope="module")
def minilm_town() -> tuple[RewardEnsemble, HeldOutVotes]:
    """An ensemble that reads meaning, with held-out votes."""
    votes = town_hall(100).preferences
    mask = votes.test_mask(0.5)
    town = fit(votes[~mask], k=2, encoder="minilm", target="mixture")
    return town, score_held_out(town, votes[mask])


def steer_from(ensemble: RewardEnsemble, choices: PreferenceSet) -> Steering:
    return steer_by_choices(ScoredChoices.of(ensemble, choices), Voters.of(ensemble))


def choices_of_member(ensemble: RewardEnsemble, votes: PreferenceSet, member: int) -> PreferenceSet:
    own = ensemble.votes(votes)[:, member]
    return replace(votes, votes_a=(own > 0.5).astype(np.int64), votes_b=(own <= 0.5).astype(np.int64))


def test_choices_that_follow_a_member_select_it(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    ensemble = replace(ensemble, undecided=0.0, choice_model=MEMBERS)
    for member in range(ensemble.k):
        found = steer_from(ensemble, choices_of_member(ensemble, held_out.preferences, member)[:60])
        assert found.member == member
        assert found.path[0] == pytest.approx(0.9 * ensemble.weights)
        assert found.path[-1][member] > 0.9 > found.path[1][member], "the posterior sharpens"
        assert found.average == pytest.approx(1 - sum(found.posterior))


@pytest.mark.parametrize("undecided", [0.0, 0.4])
def test_the_posterior_of_choices_follows_bayes_rule(ensemble: RewardEnsemble, undecided: float) -> None:
    ensemble = replace(ensemble, undecided=undecided, choice_model=MEMBERS)
    pair = PreferenceSet.from_columns(["Trees?"], ["Yes, and many of them, please!"], ["No."], [1], [0])
    rewards = ensemble.rewards_and_average([("Trees?", "Yes, and many of them, please!"), ("Trees?", "No.")])
    difference = rewards[0] - rewards[1]
    chance = 1 / (1 + np.exp(-difference / np.append(np.full(ensemble.k, ensemble.temperature), 1.0)))
    at_random = 1 - (1 - MEMBERS.slip) * (1 - np.append(np.full(ensemble.k, undecided), 0.0))
    expected = np.append(0.9 * ensemble.weights, 0.1) * (at_random / 2 + (1 - at_random) * chance)
    assert steer_from(ensemble, pair).posterior == pytest.approx(expected[:-1] / expected.sum())


def test_without_evidence_choices_keep_the_average_answer(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    votes = held_out.preferences
    candidates = [str(text) for text in votes.responses[:8]]
    prompt = str(votes.prompts[0])
    rewards = ensemble.rewards_and_average([(prompt, text) for text in candidates])
    safe = replace(ensemble, choice_model=ChoiceModel(people=0.0))
    found: Any = answer(safe, prompt, candidates, "steerable", choices=choices_of_member(ensemble, votes, 0)[:5])
    assert found.answers[0].text == candidates[int(rewards[:, -1].argmax())]
    assert (found.steering.sure, found.steering.average) == (0.0, 1.0)


def test_the_answer_has_the_most_expected_wins(ensemble: RewardEnsemble) -> None:
    random = np.random.default_rng(0)
    rewards, average = random.normal(size=(5, ensemble.k)), random.normal(size=5)
    people = Voters(ensemble.weights, 0.5, 0.1, ChoiceModel(people=0.6, spread=0.4))
    beliefs = people.prior
    wins = people.expected_wins(rewards, average, beliefs)
    for i in range(5):
        others = [j for j in range(5) if j != i]
        chances = people.chances(rewards[[i]] - rewards[others], average[i] - average[others])
        assert wins[i] == pytest.approx(np.mean([sum((beliefs * chance).ravel()) for chance in chances]))
    assert wins.mean() == pytest.approx(0.5)


def test_an_answer_says_what_choices_changed_and_what_the_next_one_decides(
    ensemble: RewardEnsemble, held_out: HeldOutVotes
) -> None:
    def as_rows(choices: PreferenceSet) -> list[dict[str, str]]:
        texts = [{name: row[name] for name in ("prompt", "response_a", "response_b")} for row in choices.to_records()]
        return [{**one, "vote": "a" if first else "b"} for one, first in zip(texts, choices.votes_a, strict=True)]

    ensemble, votes = replace(ensemble, undecided=0.0, choice_model=MEMBERS), held_out.preferences
    prompt, candidates = str(votes.prompts[0]), [str(text) for text in votes.responses[:20]]
    changed = set()
    for member in range(ensemble.k):
        choices = choices_of_member(ensemble, votes, member)
        found: Any = answer(ensemble, prompt, candidates, "steerable", choices=choices[:9])
        ask, now = found.steering.ask, found.answers[0].text
        assert {ask.response_a, ask.response_b} <= set(candidates)
        assert ask.gain > 0
        changed.add(now != found.steering.before)
        for letter, then in (("a", ask.answer_a), ("b", ask.answer_b)):
            last = {"prompt": prompt, "response_a": ask.response_a, "response_b": ask.response_b, "vote": letter}
            rows = [*as_rows(choices[:9]), last]
            assert answer(ensemble, prompt, candidates, "steerable", choices=rows).answers[0].text == then
    assert True in changed
    alone: Any = answer(ensemble, prompt, candidates[:1], "steerable", choices=votes[:3])
    assert alone.steering.ask is None


def test_where_votes_show_no_voices_a_note_says_that_steering_cannot_help(ensemble: RewardEnsemble) -> None:
    choice = [{"prompt": "Rum?", "response_a": "Yes, please!", "response_b": "No.", "vote": "a"}]
    for model, note in (
        (ChoiceModel(), NO_VOICES),
        (ChoiceModel(people=0.05, source="raters"), NO_VOICES),
        (ChoiceModel(people=0.5, source="voices"), ""),
    ):
        found: Any = answer(replace(ensemble, choice_model=model), "Tea?", ["Yes.", "No."], "steerable", choices=choice)
        assert found.steering.note == note
        assert (NO_VOICES in found.notes) == bool(note)
    one = replace(ensemble, weights=np.eye(ensemble.k)[0])
    found = answer(one, "Tea?", ["Yes.", "No."], "steerable", choices=choice)
    assert found.notes[-1] == ONE_VOICE


def test_choices_that_follow_no_member_give_a_note(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    choices = choices_of_member(ensemble, held_out.preferences, 0)[:30]
    scored = ScoredChoices.of(ensemble, choices)
    average = np.asarray(
        -5.0 * scored.rankings.place, dtype=np.float64
    )  # everyone's favourite is chosen, and it is every member's last
    scored = replace(scored, rewards=np.repeat(-average[:, None], ensemble.k, axis=1), average=average)
    found = steer_by_choices(scored, Voters.of(replace(ensemble, choice_model=MEMBERS)))
    assert found.average > 0.9
    assert found.note == NOBODY


# --- words by their meaning -------------------------------------------------------------------------------------------


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


def test_words_without_a_meaning_change_nothing_and_a_note_says_so(
    ensemble: RewardEnsemble, held_out: HeldOutVotes
) -> None:
    assert Likings.of(ensemble, held_out) is None
    found: Any = answer(ensemble, "Tea?", ["Yes.", "No."], "steerable", like="short", held_out=held_out)
    assert (found.steering.note, found.answers[0].text) == (NO_MEANING, found.steering.before)
    assert NO_MEANING in found.notes


@pytest.mark.skipif(default_encoder() != "minilm", reason="needs MiniLM")
def test_nonsense_words_change_nothing_and_a_note_says_so(minilm_town: tuple[RewardEnsemble, HeldOutVotes]) -> None:
    town, held_out = minilm_town
    answerer, posterior = Answerer(replace(town, choice_model=MEMBERS), held_out), dict[str, tuple[float, ...]]()
    for words in ("xyzzy qwerty", "protect nature and the climate first"):
        request = AnswerRequest("Trees?", "steerable", like=words)
        found: Any = answerer.answer(request, ["Yes.", "No."]).steering
        assert found.note == (UNKNOWN_WORDS if "xyzzy" in words else "")
        assert np.array(found.path) == pytest.approx(0.9 * town.weights[None]), "the probabilities before the words"
        posterior[words] = found.posterior
    assert posterior["xyzzy qwerty"] == pytest.approx(0.9 * town.weights)
    assert posterior["protect nature and the climate first"] != pytest.approx(0.9 * town.weights)


@dataclass
class Judge(Writer):
    """Follows a member of an ensemble, or always says A."""

    ensemble: RewardEnsemble | None = None
    member: int = 0
    asked: list[str] = field(default_factory=list)

    def choose(self, prompt: PromptLike, _: Sequence[str]) -> Choice:
        self.asked.append(str(prompt))
        if self.ensemble is None:
            return Choice(1.0)
        rest = str(prompt).partition("\n\nQuestion:\n")[2]
        question, _, rest = rest.partition("\n\nResponse A:\n")
        first, _, rest = rest.partition("\n\nResponse B:\n")
        second = rest.partition("\n\nWhich response")[0]
        a, b = self.ensemble.rewards([(question, first), (question, second)])[:, self.member]
        return Choice(float(a > b))


def test_a_judge_that_follows_a_member_selects_it(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    ensemble = replace(ensemble, undecided=0.0, choice_model=MEMBERS)
    for member in range(ensemble.k):
        judge = Judge(ensemble=ensemble, member=member)
        choices = judged_choices(Voters.of(ensemble), held_out, "what member 1 wants", judge)
        assert len(choices) <= JUDGED_PAIRS
        found = steer_by_choices(choices, Voters.of(ensemble))
        assert found.member == member
        assert "what member 1 wants" in judge.asked[0]


def test_a_judge_that_always_says_a_is_refused(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    with pytest.raises(UsageError, match="a judge needs a preference in words alone"):
        answer(ensemble, "Tea?", ["Yes."], "steerable", member=1, judge=Judge(), held_out=held_out)
    with pytest.raises(UsageError, match="no usable answer"):
        answer(ensemble, "Tea?", ["Yes.", "No."], "steerable", like="short", judge=Judge(), held_out=held_out)
