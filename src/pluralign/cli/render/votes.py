"""The view of ``pluralign inspect``: a summary of votes."""

import math
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from pluralign.cli.render.tables import BAR_WIDTH, dim, draw, heading
from pluralign.ensemble.headline import FEW_VOTES
from pluralign.publishing.tables import Cell, Table, ends
from pluralign.votes.summary import Inspection

MAJORITY_FIRST = 0.9
"""Above this share of pairs won by response a, the data seem to be ordered."""


def inspection_page(summary: Inspection) -> Iterator[RenderableType]:
    """Yield the size of a set of votes, notes on it, its reference scores and a histogram of majority shares."""
    low, high = summary.votes_per_pair_range
    each = f"{low}" if low == high else f"{summary.votes_per_pair:.2f} ({low} to {high})"
    yield heading(summary.name or "votes")
    yield Text(
        f"{summary.pairs:,} pairs · {summary.prompts:,} prompts · {summary.responses:,} distinct responses · "
        f"{summary.votes:,} votes, {each} per pair"
    )
    for note in _notes(summary):
        yield dim(f"· {note}")
    yield draw(_reference_scores(summary))
    yield from _histogram(summary)


def _reference_scores(summary: Inspection) -> Table:
    rows: list[list[Cell]] = []
    for key, name, value, corrected, prediction in (
        ("floor", "floor", summary.floor, summary.floor_corrected, "perfect single reward"),
        ("constant_half", "constant ½", summary.constant_half, summary.constant_half_corrected, "½ for every pair"),
    ):
        interval = summary.intervals.get(f"{key}_corrected")
        rows.append([name, value, corrected, ends(interval) if interval else "", prediction])
    rows.append(["noise", summary.noise, "", "", "true vote shares"])
    note = "corrected = Brier − noise: an unbiased estimate of the error against all people, not only voters"
    if math.isnan(summary.floor_corrected):
        note += f". {FEW_VOTES}"
    columns = ("", "Brier", "corrected", "95 % over prompts", "prediction")
    return Table("Reference scores: the squared error of simple predictions", columns, rows, note, texts=(0, -1))


def _notes(summary: Inspection) -> Iterator[str]:
    if summary.ties and summary.tie_rule == "half":
        yield f"{summary.ties:,} ties count as half a vote for each side"
    elif summary.ties and summary.tie_rule == "fixed":
        yield f"{summary.ties:,} ties count against the response that has more votes"
    elif summary.ties:
        share = f"{summary.majority_share_of_all:.3f}"
        yield f"{summary.ties:,} ties are not counted; with ties in the denominator the majority share is {share}"
    if summary.single_vote_pairs:
        share = "all" if summary.single_vote_pairs == summary.pairs else f"{summary.single_vote_pairs:,}"
        yield f"{share} pairs have one vote: they show no disagreement and are left out of corrected figures"
    if summary.empty_responses:
        yield f"{summary.empty_responses:,} pairs have an empty response; they are kept, because people voted on them"
    if summary.a_wins > MAJORITY_FIRST:
        yield f"response a wins {summary.a_wins:.0%} of the pairs: the data list the majority's choice first"
    if summary.splits:
        yield "official split: " + ", ".join(f"{name} {count:,}" for name, count in summary.splits.items())
    for kind, count in summary.dropped.items():
        yield f"dropped: {count:,} {kind}"


def _histogram(summary: Inspection) -> Iterator[RenderableType]:
    kinds = ", ".join(f"{count / summary.pairs:.0%} {name}" for name, count in summary.strata.items())
    yield Text(f"\nMajority share per pair: mean {summary.majority_share:.3f} ({kinds})", style="italic")
    tallest = max(bar.count for bar in summary.histogram)
    for bar in summary.histogram:
        label = f"{bar.low:.3f}" if bar.low == bar.high else f"{bar.low:.2f} – {bar.high:.2f}"
        blocks = "█" * round(BAR_WIDTH * bar.count / tallest) or ("▏" if bar.count else "")
        yield Text(f"  {label} {blocks} {bar.count / summary.pairs:.1%}")
    yield Text()
