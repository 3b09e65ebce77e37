"""The gate for written texts: what it refuses, what it accepts, and what happens to a refused statement."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import Writer

from pluralign import PreferenceSet, answer, fit, town_hall
from pluralign.answering.answer import DRAFTS
from pluralign.answering.gate import (
    FEWEST_TEXTS,
    REASONS,
    NoveltyGate,
    WordModel,
    conformal_quantile,
    fit_gate,
    last_layer,
    topic_distance,
)
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.text.encoders import default_encoder
from pluralign.text.features import TextFeatures
from pluralign.votes.candidates import candidates_of
from pluralign.votes.prompts import Prompt

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


def shuffled(text: str, seed: int) -> str:
    words = text.split()
    return " ".join(words[i] for i in np.random.default_rng(seed).permutation(len(words)))


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_word_salad_is_refused(votes: PreferenceSet, gate: NoveltyGate) -> None:
    assert gate.reasons(votes.prompts[0], SALAD) == [REASONS["words"]] * 2


def test_shuffled_words_of_real_texts_are_refused(votes: PreferenceSet, gate: NoveltyGate) -> None:
    lists = candidates_of(votes)[:60]
    refused = [gate.reasons(one.prompt, [shuffled(one.responses[0], i)])[0] for i, one in enumerate(lists)]
    assert np.mean([reason != "" for reason in refused]) > 0.9


def test_few_texts_of_unknown_prompts_are_refused(votes: PreferenceSet) -> None:
    lists = candidates_of(votes)
    known = {Prompt(one.prompt).key for one in lists[::2]}
    mask = np.array([Prompt(votes.prompts[i]).key in known for i in votes.prompt_index])
    gate = fit_gate(votes[mask], None)
    assert gate is not None
    reasons = [reason for one in lists[1::2] for reason in gate.reasons(one.prompt, list(one.responses))]
    assert len(reasons) > 100
    assert np.mean([reason != "" for reason in reasons]) < 0.06, "three measures at 1 % each, on new prompts"


def test_texts_about_something_else_are_refused_by_the_words_of_the_question(gate: NoveltyGate) -> None:
    model = gate.model
    assert model.lacking("Should we plant trees?", "Trees cool the streets.") < 1
    assert model.lacking("Should we plant trees?", "Rum is good.") == 1


def test_an_empty_text_is_refused(gate: NoveltyGate) -> None:
    assert gate.reasons("Tea?", ["", " \n"]) == ["it is empty"] * 2
    assert gate.reasons("Tea?", []) == []


@pytest.mark.skipif(default_encoder() != "minilm", reason="needs MiniLM")
def test_the_encoders_last_layer_finds_texts_about_something_else() -> None:
    embed = last_layer(TextFeatures(layers="0,6"))
    assert embed is not None
    assert embed(["Tea?"]).shape == (1, 384)
    question = "Should children be allowed to drink alcohol?"
    near, far = topic_distance(
        embed, [(question, "Alcohol harms the young, so keep the age limit."), (question, "Trains should be cheaper.")]
    )
    assert near < far - 0.3


def test_encoders_without_a_language_model_give_no_vectors() -> None:
    assert last_layer(None) is None
    assert last_layer(TextFeatures(encoder="none")) is None
    assert last_layer(TextFeatures(encoder="hashing:64")) is None


def test_there_is_no_gate_without_enough_held_out_texts(votes: PreferenceSet) -> None:
    few = votes[:10]
    assert len({text for one in candidates_of(few) for text in one.responses}) < FEWEST_TEXTS
    assert fit_gate(few) is None


# --- thresholds -------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.sampled_from([0.01, 0.05, 0.5]))
def test_at_most_the_level_lies_above_a_threshold(values: list[float], level: float) -> None:
    above = np.mean(np.array(values) > conformal_quantile(np.array(values), level))
    assert above <= level


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


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> RewardEnsemble:
    folder: Path = tmp_path_factory.mktemp("ensemble")
    return fit(town_hall(400).preferences, k=2, encoder="none", folder=folder)


@dataclass
class Refusing:
    """A gate that refuses texts with a word."""

    word: str

    def reasons(self, _: str, texts: Sequence[str]) -> list[str]:
        return ["it is salad" if self.word in text else "" for text in texts]


def test_a_refused_statement_gives_a_note_and_the_consensus_stands(ensemble: RewardEnsemble) -> None:
    candidates, gate = ["Yes, please.", "No."], Refusing("salad")
    plain = answer(ensemble, "Tea?", candidates)
    found = answer(ensemble, "Tea?", candidates, writer=Writer(responses=["salad one", "salad two"]), gate=gate)
    assert found.distilled is not None
    assert not found.distilled.used
    assert (found.distilled.refused, found.distilled.refused_drafts) == ("it is salad", 2)
    assert found.notes == ("the written statement is refused: it is salad",)
    assert found.consensus == plain.consensus


def test_an_accepted_draft_is_kept_where_a_refused_one_has_more_support(ensemble: RewardEnsemble) -> None:
    drafts = ["Perhaps, dear neighbours, we should.", "salad " * 30, "We may plant one tree; let us see.", "No!"]
    writer, candidates = Writer(responses=drafts), ["Yes, please.", "No."]
    best = answer(ensemble, "Tea?", candidates, writer=writer).distilled
    assert best is not None
    found = answer(ensemble, "Tea?", candidates, writer=writer, gate=Refusing(best.text)).distilled
    assert found is not None
    assert found.text != best.text
    assert found.least_support <= best.least_support
    assert (found.refused, found.refused_drafts, found.drafts) == ("", 1, 4)
    assert {n for _, n, _ in writer.requests} == {DRAFTS}


def test_an_answer_that_the_gate_would_refuse_gets_a_note(ensemble: RewardEnsemble) -> None:
    ensemble = replace(ensemble, weights=np.array([1.0, 0.0]))
    found = answer(ensemble, "Tea?", ["salad"], gate=Refusing("salad"))
    assert [entry.text for entry in found.answers] == ["salad"]
    assert "read the answer of member 0 with care: it is salad" in found.notes
