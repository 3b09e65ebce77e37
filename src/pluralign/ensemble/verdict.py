"""The headline of an evaluation: one main figure, one verdict, one next step; and whether people differ, in a sentence.

It stands below the insight (``measuring.insight``), above the tables. Nothing is measured here.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pluralign.core.text import counted
from pluralign.ensemble.record import (
    BASELINE_NAMES,
    ENOUGH_PEOPLE,
    SINGLE_REWARDS,
    Compared,
    Evaluation,
    Figures,
    FitRecord,
)
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval

Standing = Literal["ahead", "level", "behind", "unknown"]

WEAK_ENCODERS = ("hashing", "none")
"""Encoders that see little of a text's meaning."""
FEW_VOTES = "Fewer than 4 votes per pair cannot measure the floor, so it is not compared."
"""Why the floor is missing from a table."""
FLOOR_IS_LOW = "The floor follows the majority of these very votes, so its score is biased low."
"""A caveat on the floor in a table."""


@dataclass(frozen=True)
class Headline:
    """The main figure of an evaluation, its verdict, and what to do next, in sentences."""

    main: str
    verdict: str
    standing: Standing
    """How the predictor compares with the baseline of the verdict; ``unknown`` if these votes cannot tell."""
    next_step: str

    def __str__(self) -> str:
        return "\n".join((self.main, self.verdict, f"Next: {self.next_step}"))


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
    if evaluation.left_out.measured:  # figures on training prompts, from which no verdict follows
        leaked = f"No verdict: {evaluation.left_out.sentence}"
        return Headline(_main(evaluation, None), leaked, "unknown", "evaluate without --all.")
    baseline, name = evaluation.baselines.get("constant_half"), "predicting ½ for every pair"
    if _place(baseline) == "ahead" and "soft_bt" in evaluation.baselines:
        baseline, name = evaluation.baselines["soft_bt"], "one soft BT reward"
    place = _place(baseline)
    verdict = _verdict(evaluation, baseline, name, place)
    if place == "ahead" and (single := _single_as_good(evaluation)):
        baseline = evaluation.baselines[single]
        place = _place(baseline)
        verdict += f" {WORDS[place]} the best single reward ({BASELINE_NAMES[single]}: {_score(baseline):z.4f})."
    return Headline(_main(evaluation, record), verdict, place, _next_step(evaluation, baseline, record, folder))


def voices_sentence(evaluation: Evaluation) -> str:
    """Return whether there is evidence of distinct voices, in words; empty for predictors without several members.

    Only whole judgments show which preferences one person has together, so pair counts are no evidence.
    """
    if (found := evaluation.judgments) is None:
        if evaluation.voices is None:
            return ""
        return "Distinct voices: unknown. Pair counts alone cannot show whether people differ."
    prompts = counted(found.prompts, "held-out prompt")
    if found.people < ENOUGH_PEOPLE:
        return (
            "Distinct voices: unknown. Most prompts were judged by one person each, and preferences that differ "
            "between prompts look the same as people who differ."
        )
    if found.evidence is None:
        return f"Distinct voices: unknown. {prompts} with judgments, and an interval needs at least {ENOUGH_CLUSTERS}."
    gain = f"{found.gain.mean:+z.3f} [{found.gain.low:z.3f}, {found.gain.high:z.3f}]".replace("-", "−")
    counts = f"{counted(found.n, 'judgment')}, {prompts}"
    if found.evidence:
        return (
            "Distinct voices: yes. The ensemble predicts a whole ranking better than the best single reward by "
            f"{gain} log-likelihood per judgment ({counts})."
        )
    return (
        "No evidence of distinct voices: the ensemble does not predict a whole ranking better than the best single "
        f"reward (difference {gain} log-likelihood per judgment; {counts})."
    )


WORDS = {"ahead": "Better than", "level": "Not significantly different from", "behind": "Worse than"}


def _place(baseline: Compared | None) -> Standing:
    return standing(baseline.difference) if baseline else "unknown"


def _score(found: Compared | Figures) -> float:
    """Return the corrected Brier score, or the plain one if every pair has a single vote."""
    return found.brier if math.isnan(found.brier_corrected) else found.brier_corrected


def _main(evaluation: Evaluation, record: FitRecord | None) -> str:
    test = evaluation.test
    prompts = counted(evaluation.prompts, "held-out prompt" if record and record.method else "prompt")
    if math.isnan(test.brier_corrected):
        return f"Main number: Brier score {test.brier:.4f} on {prompts}. With one vote per pair, noise is unknown."
    ends = "" if math.isnan(test.interval.low) else f" [{test.interval.low:z.4f}, {test.interval.high:z.4f}]"
    score = f"{test.brier_corrected:z.4f}{ends}".replace("-", "−")
    score = f"Main number: corrected Brier score {score} on {prompts}"
    if record and record.evaluation is evaluation and record.seed_spread is not None:
        score += f", ±{record.seed_spread:.4f} over random seeds"
    if test.brier_corrected > 0:
        return f"{score} (0 is perfect)."
    return f"{score}. At 0 or below, no error is left that so few votes can measure."


def _verdict(evaluation: Evaluation, baseline: Compared | None, name: str, place: Standing) -> str:
    if evaluation.prompts < ENOUGH_CLUSTERS:
        few = counted(evaluation.prompts, "test prompt")
        return f"No verdict: {few}, and an interval needs at least {ENOUGH_CLUSTERS}."
    if baseline is None or place == "unknown":
        return "No verdict: there is no baseline to compare with."
    ratio = f"; ratio of Brier scores {evaluation.test.brier / baseline.brier:.3f}" if baseline.brier else ""
    return f"{WORDS[place]} {name} ({_score(baseline):z.4f}{ratio})."


def _single_as_good(evaluation: Evaluation) -> str | None:
    """Return the key of the best single reward if the ensemble is not better, else None. It can beat plain soft BT."""
    singles = {key: evaluation.baselines[key] for key in SINGLE_REWARDS if key in evaluation.baselines}
    best = min(singles, key=lambda name: singles[name].brier, default=None)
    return best if best and standing(singles[best].difference) != "ahead" else None


def _next_step(evaluation: Evaluation, baseline: Compared | None, record: FitRecord | None, folder: str) -> str:
    place, beats_half = _place(baseline), _place(evaluation.baselines.get("constant_half")) == "ahead"
    serve = f"pluralign serve {folder}"
    encoder = str(record.options.get("encoder", "")) if record else ""
    if evaluation.prompts < ENOUGH_CLUSTERS:
        if record and record.evaluation is evaluation and record.data and not record.tuning:
            prompts = record.data.train_prompts + record.data.test_prompts
            if prompts >= ENOUGH_CLUSTERS:
                return f"fit with --folds 5, which tests each of the {prompts} prompts once."
        return f"collect votes on more prompts: at least {ENOUGH_CLUSTERS} for testing."
    if place == "ahead":
        return f"{serve}." if record else "compare it with other predictors (--against)."
    if not record:
        return "fit an ensemble on votes of the same kind (pluralign fit), and compare it with --against."
    better_encoder = "fit with --encoder minilm, which reads the meaning of texts." if encoder in WEAK_ENCODERS else ""
    if not beats_half:
        return better_encoder or "collect more votes; on these features the ensemble has not learned from them."
    soft = evaluation.levels.get("policy")
    if place == "behind" and evaluation.level == "vote" and soft and soft.brier < evaluation.test.brier:
        return f"fit with --level policy (read softly, these members score {_score(soft):z.4f})."
    if better_encoder:
        return better_encoder
    if place == "level":
        if evaluation.level == "vote" and evaluation.judgments is not None and evaluation.judgments.evidence:
            return f"{serve}; or fit with --level policy, for more accurate shares."
        return f"{serve}; one reward predicts these votes as well."
    return "try a larger encoder (--encoder NAME) or more votes; or use one reward if you need no separate views."
