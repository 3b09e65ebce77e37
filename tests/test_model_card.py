"""Model cards and warnings of exports: the measured headline, and no claim that the table contradicts."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import evaluation_of, run

from pluralign import RewardEnsemble
from pluralign.core.text import printable
from pluralign.ensemble.record import Evaluation, FitRecord
from pluralign.ensemble.verdict import headline
from pluralign.publishing.card import ModelCard, escaped
from pluralign.theory.intervals import Interval

NAN = math.nan


def judged(ensemble: RewardEnsemble, low: float, high: float, prompts: int = 60, floor: float = 0.01) -> Evaluation:
    """Return the figures of an ensemble, with another interval of the difference to constant ½."""
    evaluation = evaluation_of(ensemble)
    half, lowest = evaluation.baselines["constant_half"], evaluation.baselines["floor"]
    baselines = {
        "floor": replace(lowest, brier_corrected=floor),
        "constant_half": replace(half, difference=Interval((low + high) / 2, low, high, 0.01)),
    }
    return replace(evaluation, baselines=baselines, prompts=prompts)


def card_of(ensemble: RewardEnsemble, **record: Any) -> str:
    names = [f"member {j}" for j in range(ensemble.k)]
    whole = replace(ensemble, record=FitRecord(**record))
    return ModelCard(whole, names, "none", None, "out").text("frozen", range(ensemble.k))


@pytest.mark.parametrize(
    ("figures", "warning"),
    [
        (None, "is unknown: there are no figures on held-out votes"),
        ((-0.06, -0.04, 60), None),
        ((-0.03, 0.01, 60), r"not significantly better than predicting ½ for every pair \(Brier score 0\.\d+ against"),
        ((0.02, 0.08, 60), "is worse than predicting ½ for every pair"),
        ((NAN, NAN, 12), "12 held-out prompts, and a verdict needs at least 20"),
    ],
    ids=["unknown", "better", "level", "worse", "few prompts"],
)
def test_an_export_warns_unless_the_ensemble_is_better_than_one_half(
    ensemble: RewardEnsemble, tmp_path: Path, figures: tuple[float, float, int] | None, warning: str | None
) -> None:
    record = FitRecord(evaluation=judged(ensemble, *figures) if figures else None)
    replace(ensemble, record=record).save(tmp_path / "dir")
    done = run("export", tmp_path / "dir", "-o", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    warnings = json.loads(done.stdout)["warnings"]
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert notes == [f"note: {sentence}" for sentence in warnings]
    assert len(warnings) == (warning is not None)
    assert not warning or re.search(warning, warnings[0])


def test_a_card_has_no_control_characters(ensemble: RewardEnsemble) -> None:
    names = [f"member {j} \x1b[2J\x07\u202e" for j in range(ensemble.k)]
    card = ModelCard(ensemble, names, "none", None, "out\x1b").text("frozen", range(ensemble.k))
    assert "member 0 " in card
    assert printable(card) == card


@pytest.mark.parametrize("ends", [(0.02, 0.08), (-0.06, -0.04)], ids=["worse", "better"])
def test_a_card_states_the_measured_headline(ensemble: RewardEnsemble, ends: tuple[float, float]) -> None:
    evaluation = judged(ensemble, *ends)
    card, shown = card_of(ensemble, evaluation=evaluation), headline(evaluation, FitRecord(evaluation=evaluation))
    assert f"**{escaped(shown.main)} {escaped(shown.verdict)}**" in card
    assert "is calibrated" not in card
    assert "calibrated to disagreement" not in card


def test_a_card_leaves_out_a_floor_that_was_not_measured(ensemble: RewardEnsemble) -> None:
    measured, unknown = (
        card_of(ensemble, evaluation=judged(ensemble, -0.06, -0.04, 60, floor)) for floor in (0.01, NAN)
    )
    assert "| floor |" in measured
    assert "can score below the floor" in " ".join(measured.split())
    assert "| floor |" not in unknown
    assert "can score below the floor" not in " ".join(unknown.split())
    assert "votes per pair cannot measure the floor" in unknown


def test_a_card_shows_the_cross_validation_if_there_was_one(ensemble: RewardEnsemble) -> None:
    better, worse = judged(ensemble, -0.06, -0.04), judged(ensemble, 0.02, 0.08)
    card = card_of(ensemble, evaluation=better, cross_validation=worse)
    assert "Worse than predicting ½ for every pair" in card
    assert "each predicted by an ensemble that was fitted without it" in card


def test_a_card_without_figures_says_so(ensemble: RewardEnsemble) -> None:
    assert "No figures: the ensemble was fitted without held-out votes." in card_of(ensemble)
