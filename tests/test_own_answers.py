"""Answers that the members' own policies write: who writes, which draft is taken, and who chooses among candidates."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from served import Writer
from test_tune import ensemble_of

from pluralign import answer
from pluralign.answering import answer as answering
from pluralign.answering.answer import Drafts, choose
from pluralign.answering.request import AnswerRequest, Voters
from pluralign.core.errors import DataError, UsageError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.text.causal import Completion
from pluralign.text.options import SamplingOptions
from pluralign.theory.social_choice import borda, pairwise_support
from pluralign.votes.prompts import PromptLike

PROMPT = "Should the town plant more trees?"


@dataclass
class Pen:
    """A policy that writes the same texts each time."""

    texts: Sequence[str]
    name: str = "pen"
    error: Exception | None = None
    requests: list[tuple[int, int]] = field(default_factory=list)

    def prepare(self) -> None:
        pass

    def sample(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[Completion]:
        self.requests.append((n, options.seed))
        if self.error:
            raise self.error
        return [Completion(text) for text in self.texts[:n]]


@pytest.fixture
def town() -> RewardEnsemble:
    """Member 0 likes question marks, member 1 full stops, member 2 likes exclamation marks."""
    return ensemble_of("question marks", "full stops", "exclamation marks", weights=(0.5, 0.3, 0.2))


def pens() -> dict[int, Pen]:
    return {
        0: Pen(["Which trees should we plant?", "Trees? Now? Why?", "Trees."]),
        1: Pen(["Yes we should.", "Yes. Many. Trees.", "Yes to trees."]),
        2: Pen(["Plant them now!", "Plant! Plant! Now!"]),
    }


def test_the_slate_holds_the_own_answer_of_every_member(town: RewardEnsemble) -> None:
    policies = pens()
    found = answer(town, PROMPT, policies=policies)
    assert {(entry.text, entry.members, entry.weight) for entry in found.answers} == {
        ("Which trees should we plant?", (0,), 0.5),
        ("Yes we should.", (1,), 0.3),
        ("Plant them now!", (2,), 0.2),
    }
    shares = [entry.share or 0 for entry in found.answers]
    assert shares == sorted(shares, reverse=True)
    assert found.written == (0, 1, 2)
    assert found.consensus is not None
    assert found.consensus.text in {entry.text for entry in found.answers}
    assert [pen.requests for pen in policies.values()] == [[(1, 0)]] * 3


def test_of_several_drafts_each_member_takes_the_one_that_it_rewards_most(town: RewardEnsemble) -> None:
    policies = pens()
    policies[0].texts = ["Which trees?", "Trees? Now? Why?", "? ? ? ? ?"]
    found = answer(town, PROMPT, policies=policies, n=2)
    assert {entry.text for entry in found.answers} == {"Trees? Now? Why?", "Yes. Many. Trees.", "Plant! Plant! Now!"}
    assert found.candidates == 6


def test_a_member_keeps_its_own_answer_where_it_would_prefer_that_of_another(town: RewardEnsemble) -> None:
    policies = {0: Pen(["No."]), 1: Pen(["What? When? Where? Why? Who?"]), 2: Pen(["Plant!"])}
    found = answer(town, PROMPT, policies=policies)
    by_member = {entry.member: entry.text for entry in found.answers}
    assert by_member == {0: "No.", 1: "What? When? Where? Why? Who?", 2: "Plant!"}


def test_the_consensus_follows_the_rule_over_the_members_answers(town: RewardEnsemble) -> None:
    policies = {0: Pen(["A?"]), 1: Pen(["B. C? D?"]), 2: Pen(["E!"])}
    found = answer(town, PROMPT, policies=policies, rule="borda")
    assert found.consensus is not None
    texts = [entry.text for entry in found.answers]
    mean_support = borda(pairwise_support(town.rewards([(PROMPT, text) for text in texts]), town.weights))
    assert found.consensus.text == texts[int(mean_support.argmax())]
    assert found.consensus.rule == "borda"


def test_a_member_without_a_policy_chooses_among_the_shared_candidates(town: RewardEnsemble) -> None:
    policies = pens()
    del policies[1]
    asked = []

    def shared() -> list[str]:
        asked.append(1)
        return ["No to that.", "No. Never. Not.", "Is it? Is it? Is it? Is it?"]

    found = answer(town, PROMPT, shared, policies=policies)
    assert {entry.member: entry.text for entry in found.answers} == {
        0: "Which trees should we plant?", 1: "No. Never. Not.", 2: "Plant them now!",
    }  # fmt: skip
    assert found.written == (0, 2)
    assert found.notes == ("member 1 has no answer of a policy and chooses among 3 shared candidates",)
    assert asked == [1]
    steered = answer(town, PROMPT, shared, "steerable", member=0, policies=policies)
    assert (steered.answers[0].text, steered.notes, asked) == ("Which trees should we plant?", (), [1])
    with pytest.raises(UsageError, match="member 1 has no policy and there are no candidates; give candidates"):
        answer(town, PROMPT, policies=policies)


def test_a_policy_that_fails_gives_a_note_and_its_member_chooses_among_candidates(town: RewardEnsemble) -> None:
    policies = pens()
    policies[2].error = DataError("the prompt is too long", remedy="shorten it")
    found = answer(town, PROMPT, ["No.", "Yes! Yes!"], policies=policies)
    assert {entry.member: entry.text for entry in found.answers}[2] == "Yes! Yes!"
    assert found.notes[0] == "the policy of member 2 wrote nothing (the prompt is too long; shorten it)"
    assert found.written == (0, 1)


def test_drafts_do_not_depend_on_concurrency(town: RewardEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = pens()
    one = answer(town, PROMPT, policies=policies, n=2)
    monkeypatch.setattr(answering, "concurrency_of", lambda _: 3)
    assert answer(town, PROMPT, policies=policies, n=2) == one


def test_slate_size_and_cover_choose_among_the_members_own_answers(town: RewardEnsemble) -> None:
    whole = answer(town, PROMPT, policies=pens())
    two = answer(town, PROMPT, policies=pens(), slate_size=2)
    assert two.answers[0].text == whole.answers[0].text
    assert len(two.answers) == 2
    assert sum(entry.weight for entry in two.answers) == pytest.approx(1), "every member stands behind an entry"
    assert (whole.coverage, two.consensus) == (pytest.approx(1), whole.consensus)
    assert two.coverage == pytest.approx(sum(entry.share or 0 for entry in two.answers))
    top = answer(town, PROMPT, policies=pens(), slate_size=2, cover="top-two")
    assert (top.coverage or 0) > (two.coverage or 0)


def test_steering_lets_only_the_chosen_members_policy_write(town: RewardEnsemble) -> None:
    policies = pens()
    found = answer(town, PROMPT, mode="steerable", member=1, policies=policies, n=3)
    assert [(one.text, one.member, one.weight) for one in found.answers] == [
        ("Yes. Many. Trees.", 1, pytest.approx(0.3))
    ]
    assert found.steering is not None
    assert found.steering.why == "it was requested by number"
    assert [len(pen.requests) for pen in policies.values()] == [0, 1, 0]
    votes = [
        {"prompt": "Tea?", "response_a": "Yes! Tea! Now!", "response_b": "Tea.", "votes_a": 1, "votes_b": 0}
        for _ in range(4)
    ]
    chosen = answer(town, PROMPT, mode="steerable", choices=votes, policies=policies)
    assert chosen.steering is not None
    assert chosen.steering.member == int(np.argmax(chosen.steering.posterior)) == 2
    assert chosen.answers[0].text == "Plant them now!"


def test_random_draws_follow_the_weights_and_one_policy_writes_one_sample(town: RewardEnsemble) -> None:
    policies = pens()
    counts = np.zeros(3)
    for seed in range(400):
        found = answer(town, PROMPT, mode="distributional", policies=policies, n=5, seed=seed)
        (entry,) = found.answers
        assert entry.member is not None
        assert entry.text == policies[entry.member].texts[0], "one sample, not the best of five"
        counts[entry.member] += 1
    assert abs(counts / 400 - town.weights).max() < 0.08
    assert {n for pen in policies.values() for n, _ in pen.requests} == {1}


def test_a_drawn_member_without_a_policy_samples_at_the_level_of_the_ensemble(town: RewardEnsemble) -> None:
    town = replace(town, record=replace(town.record, level="policy"), temperature=1e6)
    drawn = {
        answer(town, PROMPT, ["A?", "B.", "C!"], "distributional", policies={}, seed=seed).answers[0].text
        for seed in range(30)
    }
    assert drawn == {"A?", "B.", "C!"}


def test_the_member_that_is_drawn_depends_only_on_weights_prompt_and_seed(town: RewardEnsemble) -> None:
    def drawn(prompt: str) -> list[int | None]:
        found = (answer(town, prompt, None, "distributional", policies=pens(), seed=seed) for seed in range(20))
        return [one.answers[0].member for one in found]

    assert drawn("Tea?") == drawn("Tea?") != drawn("Rum?")


def test_a_statement_is_written_from_the_members_own_answers(town: RewardEnsemble) -> None:
    writer = Writer(responses=["Trees? Yes. Plant!"])
    found = answer(town, PROMPT, policies=pens(), writer=writer)
    assert found.distilled is not None
    assert found.distilled.text == "Trees? Yes. Plant!"
    listed = "\n".join(f"- ({entry.share or 0:.0%}) {entry.text}" for entry in found.answers)
    assert listed in str(writer.requests[0][0])


def test_members_without_weight_write_nothing() -> None:
    town = ensemble_of("question marks", "full stops", weights=(1.0, 0.0))
    policies = {0: Pen(["A?"]), 1: Pen(["B."])}
    found: Any = answer(town, PROMPT, policies=policies)
    assert [entry.text for entry in found.answers] == ["A?"]
    assert policies[1].requests == []


def test_equal_answers_of_two_policies_share_one_entry() -> None:
    drafts, voters = Drafts((0, 1), {0: ["Yes."], 1: ["Yes."]}), Voters(np.array([0.6, 0.4]))
    found = choose(AnswerRequest("Tea?"), voters, drafts.pool, np.array([[1.0, 2.0]]), drafts=drafts)
    assert [(entry.text, entry.members) for entry in found.answers] == [("Yes.", (0, 1))]
