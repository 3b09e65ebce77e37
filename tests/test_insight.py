"""The insight: voices with names where judgments show them, and what is said where they do not."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import evaluation_of

from pluralign.core.json_values import from_json, to_json
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes, score_held_out
from pluralign.ensemble.record import Compared, Evaluation, Insight, JudgmentFigures
from pluralign.learning.fit import fit
from pluralign.measuring.insight import measure_insight, trust_sentence, with_insight
from pluralign.publishing.export import published_record
from pluralign.theory.intervals import Interval
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.town_hall.town_hall import town_hall

NAN = math.nan
CLEAR = JudgmentFigures(549, 56, -2.825, -3.178, -2.851, Interval(0.026, 0.0149, 0.036, 0.005), 5.0)


@pytest.fixture(scope="module")
def ensemble() -> RewardEnsemble:
    return fit(town_hall(800).preferences, k=4, encoder="none", test_fraction=0.3)


@pytest.fixture(scope="module")
def held_out(ensemble: RewardEnsemble) -> HeldOutVotes:
    return score_held_out(ensemble, town_hall(1200, seed=5).preferences)


def evaluation(ensemble: RewardEnsemble, judgments: JudgmentFigures | None = None) -> Evaluation:
    return replace(evaluation_of(ensemble), judgments=judgments)


@pytest.fixture(scope="module")
def clear(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> Insight:
    return measure_insight(ensemble, held_out, evaluation(ensemble, CLEAR))


def test_every_voice_has_a_short_name_of_its_own(clear: Insight, ensemble: RewardEnsemble) -> None:
    assert clear.title.startswith("Four voices in votes on")
    names = [voice.name for voice in clear.voices]
    assert len(set(names)) == len(names) == ensemble.k
    assert all(len(name.split()) <= 4 for name in names)
    assert sum(not name.startswith("Member ") for name in names) >= 2
    shares = [voice.share for voice in clear.voices]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)


def test_an_example_of_a_voice_is_a_pair_that_the_others_decide_otherwise(
    clear: Insight, ensemble: RewardEnsemble, held_out: HeldOutVotes
) -> None:
    alone = [voice for voice in clear.voices if voice.example.startswith("alone prefers")]
    assert alone
    others = np.delete(held_out.votes, alone[0].member, axis=1)
    assert ((others > 0.5).all(axis=1) & (held_out.votes[:, alone[0].member] < 0.5)).any()


@pytest.mark.parametrize(
    ("judgments", "evidence", "words"),
    [(None, "unknown", "rankings"), (replace(CLEAR, gain=Interval(0.02, NAN, NAN, NAN)), "unknown", "more prompts"),
     (replace(CLEAR, people=1.0, gain=Interval(0.02, NAN, NAN, NAN)), "unknown", "same responses"),
     (replace(CLEAR, gain=Interval(0.0, -0.01, 0.01, 0.005)), "none", "rater ids")],
)  # fmt: skip
def test_without_evidence_there_are_no_voices_but_advice(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, judgments: JudgmentFigures | None, evidence: str, words: str
) -> None:
    found = measure_insight(ensemble, held_out, evaluation(ensemble, judgments))
    assert (found.evidence, found.voices) == (evidence, [])
    assert words in found.advice
    linked = replace(ensemble, record=replace(ensemble.record, target="raters"))
    assert "rater ids can" not in measure_insight(linked, held_out, evaluation(linked, judgments)).advice
    assert "People prefer" in found.text()
    assert "People split most on" in found.text()


def test_fit_stores_the_insight_and_print_shows_it(ensemble: RewardEnsemble) -> None:
    found: Any = ensemble.record.insight
    assert str(ensemble) == found.text()
    assert from_json(Insight, to_json(found)) == found
    assert max(map(len, found.text(60).splitlines()[1:])) <= 60
    assert str(ensemble.take([0, 1], [0.5, 0.5])) == repr(ensemble.take([0, 1], [0.5, 0.5]))


def test_published_records_have_no_texts_of_the_votes(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, clear: Insight
) -> None:
    public: Any = published_record(replace(ensemble.record, insight=clear)).insight
    assert "“" in clear.example + clear.divides
    assert not public.example + public.divides + "".join(voice.example for voice in public.voices)
    assert [voice.name for voice in public.voices] == [voice.name for voice in clear.voices]
    bare: Any = with_insight(ensemble, held_out, texts=False).record.insight
    assert (bare.example, bare.divides) == ("", "")


@pytest.mark.parametrize(
    ("own", "single", "words"),
    [(0.0144, 0.0169, "off by 12 points on unseen prompts (one reward 13, always saying half"),
     (-0.0094, 0.0169, "as close to the votes as the noise of few votes allows"), (NAN, NAN, "one vote per pair")],
)  # fmt: skip
def test_trust_is_the_root_of_the_corrected_score_if_it_has_one(
    ensemble: RewardEnsemble, own: float, single: float, words: str
) -> None:
    measured = evaluation(ensemble)
    soft: Compared = replace(measured.baselines["soft_bt"], brier_corrected=single)
    changed = replace(
        measured,
        test=replace(measured.test, brier_corrected=own),
        baselines={**measured.baselines, "soft_bt": soft},
    )
    assert words in trust_sentence(changed, np.array([0.6, 0.4]), np.array([1.0, 1.0]))


def test_quotes_have_no_control_characters() -> None:
    yes, no = ([f"{word} {i} \x1b]0;x\x07 longer words here" for i in range(60)] for word in ("yes", "no"))
    people = PreferenceSet.from_columns([f"q{i}\x1b[2J" for i in range(60)], yes, no, [5] * 60, [1] * 60)
    ensemble = fit(people, k=2, encoder="none")
    assert "yes" in str(ensemble)
    assert "\x1b" not in str(ensemble)
