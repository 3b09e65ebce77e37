"""The measure of representation in sentences: whether choices help, the comparison with soft BT, and caveats."""

import math
from collections.abc import Iterator

from pluralign.ensemble.headline import standing
from pluralign.evaluation.comparison import KINDS, Verdict
from pluralign.evaluation.representation import MIN_RATERS, Representation, RepresentationRow

_GAIN = {"ahead": "improve", "level": "do not significantly change", "behind": "worsen"}
_AGAINST = {
    "ahead": "Better than one soft BT reward",
    "level": "Not significantly different from one soft BT reward",
    "behind": "Worse than one soft BT reward",
}


def main_row(found: Representation) -> RepresentationRow | None:
    """Return the row that the verdicts are about: the most choices, with enough raters for an interval.

    The row that uses all choices counts only if there is no other.
    """
    rows = [row for row in found.rows if row.raters >= MIN_RATERS and row.choices != 0]
    fixed = [row for row in rows if row.choices is not None]
    return fixed[-1] if fixed else rows[-1] if rows else None


def representation_verdicts(found: Representation) -> Iterator[Verdict]:
    """Yield whether a person's own choices improve the predictions, and how they compare with one soft BT reward.

    Log loss decides, because it also measures how certain a prediction is.
    """
    row = main_row(found)
    if row is None or math.isnan(row.log_loss_gain.low):
        yield Verdict("level", f"Fewer than {MIN_RATERS} raters have enough votes, so no interval is given.")
        return
    ours, soft_bt, before = (row.predictors[name] for name in ("posterior", "soft_bt", "prior"))
    gain, gap = row.log_loss_gain, ours.log_loss_difference
    amount = "all choices of" if row.choices is None else f"{row.choices} choices by"
    subject = f"{amount[0].upper()}{amount[1:]} a rater"
    text = (
        f"{subject} {_GAIN[standing(gain)]} the predictions of the rater's other votes: log loss "
        f"{before.log_loss.mean:.4f} without and {ours.log_loss.mean:.4f} with them, difference {gain.low:+z.4f} to "
        f"{gain.high:+z.4f} (95 %); accuracy {before.accuracy.mean:.1%} and {ours.accuracy.mean:.1%}."
    )
    yield Verdict(KINDS[standing(gain)], text.replace("-0.", "−0."))
    text = (
        f"{_AGAINST[standing(gap)]} after these choices: log loss {ours.log_loss.mean:.4f} against "
        f"{soft_bt.log_loss.mean:.4f}, difference {gap.low:+z.4f} to {gap.high:+z.4f} (95 %); accuracy "
        f"{ours.accuracy.mean:.1%} against {soft_bt.accuracy.mean:.1%}."
    )
    yield Verdict(KINDS[standing(gap)], text.replace("-0.", "−0."))


def representation_notes(found: Representation) -> Iterator[str]:
    """Yield what was measured, and the caveats."""
    yield (
        f"{found.raters:,} of {found.all_raters:,} raters have enough votes. Each rater counts once. "
        "Intervals are over raters."
    )
    if found.held_out:
        yield (
            f"Predicted votes are on {found.prompts:,} held-out prompts. Choices are on other prompts, which may be "
            "training prompts."
        )
    else:
        yield "The ensemble may have been trained on these prompts; then its scores are too good."
    if any(row.raters < MIN_RATERS for row in found.rows):
        yield f"Rows with fewer than {MIN_RATERS} raters have no interval."
    if found.without_rater:
        yield f"{found.without_rater:,} votes have no rater and were left out."
