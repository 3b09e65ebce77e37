"""Predictors compared on the same votes: rows of a table, and verdicts in words."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from pluralign.ensemble.record import BASELINE_NAMES, Evaluation, Scores
from pluralign.ensemble.verdict import WORDS, Standing, standing
from pluralign.measuring.evaluate import FullEvaluation
from pluralign.measuring.individuals import MIN_RATERS, Representation
from pluralign.theory.intervals import Interval

READING_NAMES = {"vote": "votes", "policy": "policies", "tempered": "σ(Δr/T)", "prob": "as given"}


@dataclass(frozen=True)
class Prediction(Scores):
    """One row of the comparison: a way to predict the shares."""

    name: str
    k: int
    worst: float | None
    """Largest disagreement of a member. None if it has no votes."""
    interval: Interval | None
    """95 % interval of its corrected Brier score. Only for the evaluated predictor, with enough prompts."""
    difference: Interval | None
    """Brier score of the evaluated predictor − its own. None for the predictor itself, and with few prompts."""
    judged: bool
    """Whether this is the reading of the main figures."""


def comparison(evaluation: Evaluation, k: int | None = None) -> list[Prediction]:
    """Return every prediction that was measured on the same votes, best first.

    The floor is left out where these votes cannot measure it (``floor_is_compared``).

    Args:
        evaluation: the figures.
        k: number of members, for a cross-validation, which lists none (default: the number of members listed).
    """
    full = evaluation if isinstance(evaluation, FullEvaluation) else None
    kind, name = (full.subject.kind, full.subject.name) if full else ("ensemble", "")
    worst, k = evaluation.worst_disagreement(), len(evaluation.members) or k or 1
    rows = []
    for level, own in evaluation.levels.items():
        label = _row_name(kind, "ensemble" if kind == "ensemble" else name, level)
        judged, interval = level == evaluation.level, _if_known(own.interval)
        rows.append(
            Prediction(**own.scores, name=label, k=k, worst=worst, interval=interval, difference=None, judged=judged)
        )
    left_out = () if floor_is_compared(evaluation) else ("floor",)
    others = [(BASELINE_NAMES.get(key, key), one) for key, one in evaluation.baselines.items() if key not in left_out]
    for one in full.against if full else []:
        others += [(_row_name(one.kind, one.name, reading), other) for reading, other in one.readings.items()]
    for label, other in others:
        gap, worst = _if_known(other.difference), other.worst_disagreement
        rows.append(
            Prediction(**other.scores, name=label, k=other.k, worst=worst, interval=None, difference=gap, judged=False)
        )
    return sorted(rows, key=lambda row: row.brier)


def _if_known(interval: Interval) -> Interval | None:
    return None if math.isnan(interval.low) else interval


def floor_is_compared(evaluation: Evaluation) -> bool:
    """Return whether the floor is compared on these votes. With 2–3 votes per pair it is 0 by definition."""
    floor = evaluation.baselines.get("floor")
    return floor is not None and not math.isnan(floor.brier_corrected)


def _row_name(kind: str, name: str, reading: str) -> str:
    shown = "σ(Δr)" if reading == "policy" and kind != "ensemble" else READING_NAMES[reading]
    return f"{PurePath(name).name}: {shown}"


def undecided_sentence(undecided: float) -> str:
    """Return the undecided share in words that need no knowledge of the paper; empty for 0.

    Example:
        >>> undecided_sentence(0.331)
        'Undecided share: 33 %. No member explains these votes; they are predicted to split evenly.'
    """
    if not undecided:
        return ""
    share = f"{100 * undecided:.{0 if undecided >= 0.01 else 1}f} %"
    return f"Undecided share: {share}. No member explains these votes; they are predicted to split evenly."


KINDS: dict[Standing, str] = {"ahead": "good", "level": "level", "behind": "behind", "unknown": "level"}
"""How the page marks a verdict."""


@dataclass(frozen=True)
class Verdict:
    """How an ensemble compares with a baseline, in one sentence."""

    kind: str
    """``good``, ``level`` (no significant difference) or ``behind``."""
    text: str


# --- The measure of representation in sentences: whether choices help, the comparison with soft BT, and caveats.


_GAIN = {"ahead": "improve", "level": "do not significantly change", "behind": "worsen"}


def representation_verdicts(found: Representation) -> Iterator[Verdict]:
    """Yield whether a person's own choices improve the predictions, and how they compare with one soft BT reward.

    The row with the most choices counts, if it has enough raters; that of all choices only if there is no other. Log
    loss decides, because it also measures how certain a prediction is.
    """
    rows = [row for row in found.rows if row.raters >= MIN_RATERS and row.choices != 0]
    row = next((row for row in reversed(rows) if row.choices is not None), rows[-1] if rows else None)
    if row is None or math.isnan(row.log_loss_gain.low):
        yield Verdict("level", f"Fewer than {MIN_RATERS} raters have enough votes, so no interval is given.")
        return
    subject = "All choices of a rater" if row.choices is None else f"{row.choices} choices by a rater"
    ours = row.predictors["posterior"]
    gain, gap = row.log_loss_gain, ours.log_loss_difference
    claims = (
        (f"{subject} {_GAIN[standing(gain)]} the predictions of the rater's other votes", gain, "prior", " before"),
        (f"{WORDS[standing(gap)]} one soft BT reward after these choices", gap, "soft_bt", ""),
    )
    for claim, difference, name, when in claims:
        other = row.predictors[name]
        text = (
            f"{claim}: log loss {ours.log_loss.mean:.4f} against {other.log_loss.mean:.4f}{when}, difference "
            f"{difference.low:+z.4f} to {difference.high:+z.4f} (95 %); accuracy {ours.accuracy.mean:.1%} against "
            f"{other.accuracy.mean:.1%}{when}."
        )
        yield Verdict(KINDS[standing(difference)], text.replace("-", "−"))


def representation_notes(found: Representation) -> Iterator[str]:
    """Yield what was measured, and the caveats."""
    yield (
        f"{found.raters:,} of {found.all_raters:,} raters have enough votes. Each rater counts once. "
        "Intervals are over raters."
    )
    yield (
        f"Predicted votes are on {found.prompts:,} held-out prompts. Choices are on other prompts, which may be "
        "training prompts."
        if found.held_out
        else "The ensemble may have been trained on these prompts; then its scores are too good."
    )
    if any(row.raters < MIN_RATERS for row in found.rows):
        yield f"Rows with fewer than {MIN_RATERS} raters have no interval."
    if found.without_rater:
        yield f"{found.without_rater:,} votes have no rater and were left out."
