"""Slates, consensus answers and statements, from rewards alone; and the gate that refuses written texts."""

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from served import Writer

from pluralign import PreferenceSet, RewardEnsemble, answer, town_hall
from pluralign.answering.answer import ALL_UNLIKE, DRAFTS, ONLY_ONE, UNCHECKED, choose
from pluralign.answering.gate import (
    FEWEST_TEXTS,
    REASONS,
    NoveltyGate,
    WordModel,
    conformal_quantile,
    fit_gate,
    sentence_embedding,
    topic_distance,
)
from pluralign.answering.request import AnswerRequest, Voters
from pluralign.answering.slate import (
    MINORITY,
    NO_MAJORITY,
    NO_MAJORITY_BY_RULE,
    NO_RIVAL,
    consensus as consensus_of,
    instruction,
    judge_statements,
    similarity,
    slate as slate_of,
)
from pluralign.cli.render.answers import answer_page
from pluralign.text.encoders import TextFeatures, default_encoder
from pluralign.theory.calibration import policy_prob, with_undecided
from pluralign.theory.social_choice import first_choices
from pluralign.votes.candidates import candidates_of
from pluralign.votes.load import load_preferences
from pluralign.votes.prompts import Item, Message, Prompt, PromptLike

TEXTS = ["A", "B", "C", "D"]
WEIGHTS = np.array([0.4, 0.35, 0.25])


def voting(*weights: float) -> Voters:
    """Voters who vote for their favourites."""
    return Voters(np.array(weights), temperature=0.0)


def slate(texts: list[str], rewards: Any, voters: Voters, **options: Any) -> Any:
    return slate_of(texts, np.array(rewards), voters, np.random.default_rng(0), **options)


def consensus(rewards: Any, voters: Voters, rule: str = "maximin") -> Any:
    return consensus_of(TEXTS[: len(rewards)], np.array(rewards), voters, rule, np.random.default_rng(0))


def test_near_duplicates_share_one_slate_entry() -> None:
    texts = ["We should plant many trees in town this year.", "We should plant many trees in town this year!", "No."]
    rewards = [[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 1.0]]
    found = slate(texts, rewards, voting(0.3, 0.4, 0.3)).entries
    assert [(entry.text, entry.members) for entry in found] == [(texts[1], (0, 1)), ("No.", (2,))]
    assert [entry.share for entry in found] == pytest.approx([0.7, 0.3])
    assert similarity(texts[0], texts[2]) == 0
    (first,) = slate(texts, rewards, voting(0.3, 0.25, 0.45), size=1).entries
    assert (first.text, first.share) == (texts[0], pytest.approx(0.55)), "near-duplicates count together"


def test_members_of_negligible_weight_are_left_out_of_the_slate() -> None:
    found = slate(["Yes.", "No."], np.eye(2), voting(1.0, 1e-9))
    (entry,) = found.entries
    assert (entry.text, entry.weight, entry.members, found.coverage) == ("Yes.", 1.0, (0,), 1.0)


SECOND_CHOICE = np.array([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 3.0], [2.9, 2.9, 2.9]])
"""Three members have different favourites and the same second choice."""


@pytest.mark.parametrize("temperature", [0.0, 0.2, 2.0])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_slate_covers_the_largest_predicted_share_of_people(temperature: float, size: int) -> None:
    found = slate(TEXTS, SECOND_CHOICE, Voters(WEIGHTS, temperature, 0.2), size=size)
    share = first_choices(SECOND_CHOICE, WEIGHTS, temperature, 0.2)
    best = max(sum(share[list(rows)]) for rows in itertools.combinations(range(4), size))
    assert found.coverage == pytest.approx(best) == pytest.approx(sum(entry.share or 0 for entry in found.entries))
    assert sum(entry.weight for entry in found.entries) == pytest.approx(1)
    assert len(found.entries) == size


def test_a_slate_shows_a_common_second_choice_if_one_of_the_top_two_is_enough() -> None:
    favourite = slate(TEXTS, SECOND_CHOICE, voting(*WEIGHTS), size=1)
    top_two = slate(TEXTS, SECOND_CHOICE, voting(*WEIGHTS), size=1, cover="top-two")
    assert (favourite.entries[0].text, favourite.coverage) == ("A", 0.4)
    assert (top_two.entries[0].text, top_two.coverage) == ("D", pytest.approx(1.0))


def test_an_entry_that_no_member_ranks_first_names_the_member_that_adds_most() -> None:
    found = slate(TEXTS, SECOND_CHOICE, Voters(WEIGHTS, 1.0), size=4)
    entry = next(entry for entry in found.entries if entry.text == "D")
    assert (entry.weight, entry.members, entry.member) == (0.0, (), 0)
    assert found.entries[0] == entry, "it is the most likely favourite of people"
    assert found.coverage == pytest.approx(1)


def test_a_slate_is_a_selection_of_at_most_three_different_favourites() -> None:
    weights = np.full(9, 1 / 9)
    for n, size in ((2, 2), (3, 2), (4, 2), (5, 3), (6, 3), (9, 3)):
        texts = [f"Answer number {i}." for i in range(n)]
        assert len(slate(texts, np.eye(9)[:n] + 0.1, Voters(weights)).entries) == size
        assert len(slate(texts, np.eye(9)[:n], Voters(weights), size=9).entries) == n
        one = np.zeros((n, 9))
        one[0] = 1
        assert len(slate(texts, one, voting(*weights)).entries) == 1


def test_predicted_shares_of_two_answers_are_the_predicted_shares_of_the_ensemble() -> None:
    rewards, weights = np.array([[1.0, 0.2, -1.0], [0.0, 1.0, 0.5]]), np.array([0.5, 0.3, 0.2])
    town = Voters(weights, 0.7, 0.3)
    found = slate(["A", "B"], rewards, town, size=2)
    share = with_undecided(policy_prob(rewards[:1] - rewards[1:], weights, 0.7), 0.3)[0]
    assert {entry.text: entry.share for entry in found.entries} == pytest.approx({"A": share, "B": 1 - share})
    chosen = consensus(rewards, town, "borda")
    assert (chosen.least_support, chosen.favourite_of) == pytest.approx((max(share, 1 - share),) * 2)


def test_a_consensus_at_the_policy_level_counts_how_much_members_prefer_an_answer() -> None:
    rewards, weights = [[0.1, 0.1, 0.0], [0.0, 0.0, 9.0]], np.array([0.3, 0.3, 0.4])
    by_votes = consensus(rewards, Voters(weights, 0.0), "borda")
    assert (by_votes.text, by_votes.least_support) == ("A", pytest.approx(0.6))
    assert consensus(rewards, Voters(weights), "borda").text == "B"


def test_a_single_candidate_has_no_rival_and_no_share() -> None:
    found = consensus(np.zeros((1, 2)), voting(0.5, 0.5))
    shares = found.least_support, found.mean_support, found.favourite_of
    assert (found.text, *shares, found.note) == ("A", None, None, None, NO_RIVAL)
    alone = choose(AnswerRequest("Tea?"), voting(0.5, 0.5), ["A"], np.zeros((1, 2)), reasons=[""])
    assert (alone.answers[0].share, alone.coverage, alone.notes) == (None, None, (ONLY_ONE,))
    printed = io.StringIO()
    Console(width=100, file=printed).print(*answer_page(alone, "Tea?", []))
    assert "%" not in printed.getvalue()


CYCLE = np.array([[3.0, 1.0, 2.0], [2.0, 3.0, 1.0], [1.0, 2.0, 3.0]])
"""Every candidate loses to another one, by two members of three."""


@pytest.mark.parametrize(
    ("rewards", "weights", "note"),
    [
        (CYCLE, [0.4, 0.3, 0.3], MINORITY + NO_MAJORITY),
        (CYCLE, [0.6, 0.2, 0.2], ""),
        (CYCLE[:2], [0.4, 0.3, 0.3], ""),
        (CYCLE[:2], [0.5, 0.5, 0.0], ""),
    ],
)
def test_a_consensus_without_a_majority_says_so(rewards: Any, weights: list[float], note: str) -> None:
    found = consensus(rewards, voting(*weights))
    assert found.note == note
    assert (found.least_support < 0.5) == bool(note)


def test_a_winner_of_another_rule_below_half_says_so_where_an_answer_has_a_majority() -> None:
    rewards = np.array([[3.0, 0.0], [2.0, 3.0], [1.0, 2.0], [0.0, 1.0]])  # A wins by a little, B is far above the rest
    found, majority = consensus(rewards, voting(0.52, 0.48), "borda"), consensus(rewards, voting(0.52, 0.48))
    assert (found.text, found.least_support, found.note) == ("B", pytest.approx(0.48), MINORITY)
    assert (majority.text, majority.note) == ("A", "")


def test_another_rule_does_not_claim_to_come_nearest() -> None:
    weights, random = voting(0.42, 0.3, 0.28), np.random.default_rng(0)
    nearest = consensus(CYCLE, weights)
    drawn = {consensus_of(TEXTS[:3], CYCLE, weights, "lottery", random) for _ in range(40)}
    assert {one.note for one in drawn if one.text == nearest.text} <= {MINORITY + NO_MAJORITY}
    assert {one.note for one in drawn if one.text != nearest.text} == {MINORITY + NO_MAJORITY_BY_RULE}


def test_the_statement_with_the_most_support_is_compared_with_the_best_candidate() -> None:
    voters, rewards = voting(0.6, 0.4), np.array([[1.0, 0.0], [0.0, 1.0]])
    entries = slate(["Tea.", "Rum."], rewards, voters).entries
    assert "- (60%) Tea.\n- (40%) Rum." in instruction("Tea or rum?", entries)
    of_drafts = np.array([[0.5, 2.0], [-1.0, -1.0]])
    found = judge_statements(["Both.", "Neither."], of_drafts, rewards, voters, ["", ""])
    assert (found.text, found.least_support, found.to_reach, found.used, found.drafts) == ("Both.", 0.4, 0.6, False, 2)


# --- the gate ---------------------------------------------------------------------------------------------------------

SALAD = [
    "Scan couch carnivores view spirituality looming Antonio Good magblethon electromethyl outside performance.",
    "Echoing tunnels perpetuate faces whose cycle fears umbrella, nymph broad shr plunged battery twinkling.",
]
"""Statements of SmolLM2 at temperature 2, shortened."""


@pytest.fixture(scope="module")
def votes() -> PreferenceSet:
    return town_hall(800).preferences


@pytest.fixture(scope="module")
def gate(votes: PreferenceSet) -> NoveltyGate:
    found = fit_gate(votes, TextFeatures(encoder="none"))
    assert found is not None
    return found


def reasons_of(gate: NoveltyGate, prompt: PromptLike, texts: Sequence[str]) -> list[str]:
    return gate.check([(prompt, text) for text in texts])


def test_word_salad_and_empty_texts_are_refused(votes: PreferenceSet, gate: NoveltyGate) -> None:
    assert reasons_of(gate, votes.prompts[0], SALAD) == [REASONS["words"]] * 2
    assert reasons_of(gate, "Tea?", ["", " \n"]) == [REASONS["empty"]] * 2
    assert reasons_of(gate, "Tea?", []) == []


def test_texts_without_a_known_word_and_copies_of_the_question_are_refused(gate: NoveltyGate) -> None:
    foreign = ["\U0001f600", "!?!", "qwertz.", "\u6211\u652f\u6301\u8fd9\u4e2a"]
    assert reasons_of(gate, "Tea?", ["Yes\x1b[31m", "\x00\x01", "\u202eNo."]) == [REASONS["control"]] * 3
    assert reasons_of(gate, "Tea?", ["Yes.\r\nBut not now."]) == [""]
    assert reasons_of(gate, "Tea?", foreign) == [REASONS["unknown"]] * len(foreign)
    question = "Should the town plant more trees?"
    assert reasons_of(gate, question, [question, "should the town plant more trees!"]) == [REASONS["copy"]] * 2
    chat = (Message("user", "Hello."), Message("assistant", "Yes?"), Message("user", question))
    assert reasons_of(gate, chat, [question]) == [REASONS["copy"]]
    assert reasons_of(gate, question, ["The town should plant more trees."]) == [""]
    assert reasons_of(gate, "No or yes?", ["No or yes."]) == [""], "a short question may name its answers"
    assert len({reasons_of(gate, question, [f"It{mark}s right for the town."])[0] for mark in "'\u2019"}) == 1


def test_shuffled_words_of_real_texts_are_refused(votes: PreferenceSet, gate: NoveltyGate) -> None:
    random = np.random.default_rng(0)
    lists = [(one.prompt, " ".join(random.permutation(one.responses[0].split()))) for one in candidates_of(votes)[:60]]
    assert np.mean([reasons_of(gate, prompt, [text])[0] != "" for prompt, text in lists]) > 0.9


def test_few_texts_of_unknown_prompts_are_refused(votes: PreferenceSet) -> None:
    lists = candidates_of(votes)
    known = {Prompt(one.prompt).key for one in lists[::2]}
    mask = np.array([Prompt(votes.prompts[i]).key in known for i in votes.prompt_index])
    gate: Any = fit_gate(votes[mask], None)
    reasons = [reason for one in lists[1::2] for reason in reasons_of(gate, one.prompt, list(one.responses))]
    assert len(reasons) > 100
    assert np.mean([reason != "" for reason in reasons]) < 0.06, "three measures at 1 % each, on new prompts"


@pytest.mark.skipif(default_encoder() != "minilm", reason="needs MiniLM")
def test_the_encoders_last_layer_finds_texts_about_something_else() -> None:
    embed: Any = sentence_embedding(TextFeatures(layers="0,6"))
    assert embed(["Tea?"]).shape == (1, 384)
    question = "Should children be allowed to drink alcohol?"
    texts = ("Alcohol harms the young, so keep the age limit.", "Trains should be cheaper.")
    near, far = topic_distance(embed, [(question, text) for text in texts])
    assert near < far - 0.3


@pytest.mark.parametrize("features", [None, TextFeatures(encoder="none"), TextFeatures(encoder="hashing:64")])
def test_encoders_without_a_language_model_give_no_vectors(features: TextFeatures | None) -> None:
    assert sentence_embedding(features) is None


def test_there_is_no_gate_without_enough_held_out_texts(votes: PreferenceSet) -> None:
    few = votes[:10]
    assert len({text for one in candidates_of(few) for text in one.responses}) < FEWEST_TEXTS
    assert fit_gate(few) is None


def test_new_values_are_above_the_threshold_as_often_as_the_level_says() -> None:
    random = np.random.default_rng(0)
    above = [random.normal() > conformal_quantile(random.normal(size=200), 0.05) for _ in range(4000)]
    assert np.mean(above) == pytest.approx(0.05, abs=0.012)


def test_a_word_model_of_the_same_text_is_not_surprised() -> None:
    model = WordModel.of(["the town plants trees .", "the town likes trees ."])
    assert model.unseen("the town plants trees .") == 0
    assert model.surprise("the town plants trees .") < model.surprise("trees plants town the .")
    assert model.surprise("") == model.unseen("") == 0


# --- refused statements -----------------------------------------------------------------------------------------------


@dataclass
class Refusing:
    """A gate that refuses texts with a word."""

    word: str

    def check(self, items: Sequence[Item]) -> list[str]:
        return ["it is salad" if self.word in text else "" for _, text in items]


def test_a_refused_statement_gives_a_note_and_the_consensus_stands(ensemble: RewardEnsemble) -> None:
    candidates, gate = ["Yes, please.", "No."], Refusing("salad")
    plain = answer(ensemble, "Tea?", candidates)
    found: Any = answer(ensemble, "Tea?", candidates, writer=Writer(responses=["salad one", "salad two"]), gate=gate)
    assert not found.distilled.used
    assert (found.distilled.refused, found.distilled.refused_drafts) == ("it is salad", 2)
    assert found.notes == ("the written statement is refused: it is salad",)
    assert found.consensus == plain.consensus


def test_an_accepted_draft_is_kept_where_a_refused_one_has_more_support(ensemble: RewardEnsemble) -> None:
    drafts = ["Perhaps, dear neighbours, we should.", "salad " * 30, "We may plant one tree; let us see.", "No!"]
    writer, candidates = Writer(responses=drafts), ["Yes, please.", "No."]
    best: Any = answer(ensemble, "Tea?", candidates, writer=writer).distilled
    found: Any = answer(ensemble, "Tea?", candidates, writer=writer, gate=Refusing(best.text)).distilled
    assert found.text != best.text
    assert found.least_support <= best.least_support
    assert (found.refused, found.refused_drafts, found.drafts) == ("", 1, 4)
    assert {n for _, n, _ in writer.requests} == {DRAFTS}


SALADS = ["Yes, please, a salad!", "salad " * 9, "No.", "Perhaps; it may depend on the cost."]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"level": "vote", "rule": "lottery", "slate_size": 4},
        {"mode": "distributional"},
        {"mode": "steerable", "member": 1},
        {"mode": "steerable", "choices": [{"prompt": "?", "response_a": "No.", "response_b": "Yes!", "vote": "b"}]},
        {"policies": {0: Writer(responses=["Salad? A salad!"]), 1: Writer(responses=["We may plant one."])}},
    ],
    ids=["balanced", "vote level", "distributional", "member", "choices", "policies"],
)
def test_refused_texts_never_win_against_others_and_have_no_share(
    ensemble: RewardEnsemble, options: dict[str, Any]
) -> None:
    for seed in range(8):
        found = answer(ensemble, "Tea?", SALADS, gate=Refusing("alad"), seed=seed, **options)
        shown = [entry.text for entry in found.answers] + ([found.consensus.text] if found.consensus else [])
        assert not any("alad" in text for text in shown)
        assert set(found.unlike.values()) == {"it is salad"}
        assert any(f"{len(found.unlike)} of {found.candidates} candidates are unlike" in note for note in found.notes)
        none = answer(ensemble, "Tea?", SALADS, gate=Refusing(""), seed=seed, **options)
        assert none.notes[-1] == ALL_UNLIKE or ALL_UNLIKE in none.notes
        assert (none.consensus, none.coverage) == (None, None)
        assert {(entry.share, entry.weight, entry.members) for entry in none.answers} == {(None, 0.0, ())}
        assert none.steering is None or none.steering.support is None
    page = io.StringIO()
    Console(width=100, file=page).print(*answer_page(none, "Tea?", []))
    assert "%" not in page.getvalue()
    assert "unlike anything these people voted on" in page.getvalue()


def test_without_held_out_texts_a_note_says_that_nothing_was_checked(ensemble: RewardEnsemble) -> None:
    assert answer(ensemble, "Tea?", SALADS).notes == (UNCHECKED,)


def test_texts_that_people_voted_on_are_never_refused(votes: PreferenceSet) -> None:
    odd = {"prompt": "Tea?", "response_a": "zu mag blethon", "response_b": "zzz zzz zzz zzz"}
    gate: Any = fit_gate(load_preferences([*votes.to_records(), odd | {"votes_a": 3, "votes_b": 2}]), None)
    assert reasons_of(gate, "Tea?", ["zu mag blethon", "zzz zzz zzz zzz"]) == ["", ""]
    assert reasons_of(gate, "Rum?", ["zzz zzz zzz zzz"]) != [""]


def test_short_texts_are_compared_with_short_parts_of_held_out_texts(votes: PreferenceSet, gate: NoveltyGate) -> None:
    nonsense = ["asdf jkl qwer", "blue blue blue the the", "the the the the"]
    assert all(reasons_of(gate, "Should the town plant more trees?", nonsense))
    sensible = ["We should plant trees, because they cool the streets.", "No.", "Yes, but only if it costs little."]
    assert reasons_of(gate, "Should the town plant more trees?", sensible) == [""] * 3
    known = {Prompt(one).key for one in votes.prompts[::2]}
    mask = np.array([Prompt(votes.prompts[i]).key in known for i in votes.prompt_index])
    half: Any = fit_gate(votes[mask], None)
    for length in (5, 10, 20):
        words = [(one.prompt, " ".join(one.responses[0].split()[:length])) for one in candidates_of(votes[~mask])]
        assert np.mean([reason != "" for reason in half.check(words)]) < 0.06
