"""The headline of an evaluation: one main figure, one verdict, one next step.

Every place that shows an evaluation starts with it: the terminal, the report, the page, model cards and ``print``. All
other figures stay in tables. Nothing is measured here.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pluralign.core.text import counted
from pluralign.ensemble.record import Compared, Evaluation, FitRecord
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval

Standing = Literal["ahead", "level", "behind", "unknown"]

WEAK_ENCODERS = ("hashing", "none")
"""Encoders that see little of a text's meaning."""
FEW_VOTES = "2–3 votes per pair cannot measure the floor, so it is not compared."
"""Why the floor is missing from a table."""


@dataclass(frozen=True)
class Headline:
    """The main figure of an evaluation, its verdict, and what to do next, as one sentence each."""

    main: str
    verdict: str
    standing: Standing
    """How the predictor compares with the baseline of the verdict; ``unknown`` if these votes cannot tell."""
    next_step: str

    def __str__(self) -> str:
        return f"{self.main}\n{self.verdict}\nNext: {self.next_step}"


def standing(difference: Interval) -> Standing:
    """Return how a predictor compares with a baseline, from the interval of Brier score − the baseline's.

    Example:
        >>> standing(Interval(-0.004, -0.01, 0.002, 0.003)), standing(Interval(0.1, math.nan, math.nan, math.nan))
        ('level', 'unknown')
    """
    if math.isnan(difference.low):
        return "unknown"
    return "ahead" if difference.high < 0 else "behind" if difference.low > 0 else "level"


def main_evaluation(record: FitRecord) -> Evaluation | None:
    """Return the figures of a fit that count: those of the cross-validation if there was one."""
    return record.cross_validation or record.evaluation


def headline(evaluation: Evaluation, record: FitRecord | None = None, folder: str = "DIR") -> Headline:
    """Return the headline of an evaluation.

    Args:
        evaluation: figures of a predictor on held-out votes.
        record: of the ensemble that was measured; None for other predictors.
        folder: of that ensemble, for the command of the next step.
    """
    rival = evaluation.baselines.get("constant_half")
    beats_half = rival is not None and standing(rival.difference) == "ahead"
    if beats_half and "soft_bt" in evaluation.baselines:
        rival, name = evaluation.baselines["soft_bt"], "one soft BT reward"
    else:
        name = "predicting ½ for every pair"
    place = standing(rival.difference) if rival else "unknown"
    return Headline(
        main=_main(evaluation),
        verdict=_verdict(evaluation, rival, name, place),
        standing=place,
        next_step=_next_step(evaluation, rival, place, beats_half, record, folder),
    )


def _main(evaluation: Evaluation) -> str:
    test, prompts = evaluation.test, counted(evaluation.prompts, "held-out prompt")
    if math.isnan(test.brier_corrected):
        return f"Main number: Brier score {test.brier:.4f} on {prompts}. With one vote per pair, noise is unknown."
    ends = "" if math.isnan(test.interval.low) else f" [{test.interval.low:.4f}, {test.interval.high:.4f}]"
    return f"Main number: corrected Brier score {test.brier_corrected:.4f}{ends} on {prompts} (0 is perfect)."


def _verdict(evaluation: Evaluation, rival: Compared | None, name: str, place: Standing) -> str:
    if evaluation.prompts < ENOUGH_CLUSTERS:
        few = counted(evaluation.prompts, "test prompt")
        return f"No verdict: {few}, and an interval needs at least {ENOUGH_CLUSTERS}."
    if rival is None or place == "unknown":
        return "No verdict: there is no baseline to compare with."
    corrected = not math.isnan(rival.brier_corrected)
    words = {"ahead": "Better than", "level": "Not significantly different from", "behind": "Worse than"}
    score = rival.brier_corrected if corrected else rival.brier
    ratio = f"; ratio of Brier scores {evaluation.test.brier / rival.brier:.3f}" if rival.brier else ""
    return f"{words[place]} {name} ({score:.4f}{ratio})."


def _next_step(
    evaluation: Evaluation,
    rival: Compared | None,
    place: Standing,
    beats_half: bool,
    record: FitRecord | None,
    folder: str,
) -> str:
    encoder = str(record.options.get("encoder", "")) if record else ""
    if evaluation.prompts < ENOUGH_CLUSTERS:
        return _more_prompts(evaluation, record)
    if place == "ahead" and beats_half:
        return f"pluralign report {folder} -o report.html, or pluralign serve {folder}." if record else (
            "compare it with other predictors (--against)."
        )  # fmt: skip
    if not record:
        return "fit an ensemble on votes of the same kind (pluralign fit), and compare it with --against."
    better_encoder = "fit with --encoder minilm, which reads the meaning of texts." if encoder in WEAK_ENCODERS else ""
    if not beats_half:
        return better_encoder or "collect more votes; on these features the ensemble has not learned from them."
    soft = evaluation.levels.get("policy")
    if place == "behind" and evaluation.level == "vote" and soft and soft.brier < evaluation.test.brier:
        score = soft.brier_corrected if not math.isnan(soft.brier_corrected) else soft.brier
        return f"fit with --level policy (read softly, these members score {score:.4f})."
    if better_encoder:
        return better_encoder
    if place == "level" and rival is not None and (enough := _prompts_to_decide(rival.difference, evaluation.prompts)):
        return f"use it as it is; about {enough:,} held-out prompts would decide, if the difference stays the same."
    if place == "level":
        return f"pluralign report {folder} -o report.html; both predict these votes equally well."
    return "try a larger encoder (--encoder NAME) or more votes; or use soft BT if you need no separate views."


def _more_prompts(evaluation: Evaluation, record: FitRecord | None) -> str:
    if record and record.evaluation is evaluation and record.data and not record.tuning:
        prompts = record.data.train_prompts + record.data.test_prompts
        if prompts >= ENOUGH_CLUSTERS:
            return f"fit with --folds 5, which tests each of the {prompts} prompts once."
    return f"collect votes on more prompts: at least {ENOUGH_CLUSTERS} for testing."


def _prompts_to_decide(difference: Interval, prompts: int) -> int | None:
    """Return how many prompts an interval of half the difference would need; None if it is too many to be useful."""
    if not difference.mean:
        return None
    needed = prompts * ((difference.high - difference.low) / (2 * difference.mean)) ** 2
    if not needed < 100 * prompts:
        return None
    digits = max(len(str(int(needed))) - 2, 0)
    return int(round(needed, -digits))
