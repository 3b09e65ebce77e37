"""The view of how well individuals are represented: ``pluralign evaluate --raters``."""

import math
from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pluralign.cli.views.tables import figure_table, heading, short
from pluralign.evaluation.representation import LEGEND, PREDICTORS, Representation, RepresentationRow
from pluralign.evaluation.representation_verdicts import representation_notes, representation_verdicts
from pluralign.theory.intervals import Interval


def representation_page(found: Representation) -> Iterator[RenderableType]:
    """Yield the verdicts, the notes, and a table of accuracy and one of log loss by number of choices."""
    yield heading("How well individuals are represented")
    for verdict in representation_verdicts(found):
        yield Text(verdict.text)
    for sentence in representation_notes(found):
        yield Text(f"· {sentence}", style="dim")
    yield _score_table(found, "accuracy", "Accuracy on a rater's other votes, by number of the rater's choices")
    yield _score_table(found, "log_loss", "Log loss on the same votes")
    yield _difference_table(found)


def _score_table(found: Representation, score: str, title: str) -> Table:
    table = figure_table(title, "choices", "raters", *PREDICTORS.values())
    for row in found.rows:
        values = [f"{getattr(row.predictors[name], score).mean:.4f}" for name in PREDICTORS]
        table.add_row(_label(row), f"{row.raters:,}", *(value.removeprefix("0") for value in values))
    if score == "accuracy":
        table.caption = LEGEND
    return table


def _difference_table(found: Representation) -> Table:
    table = figure_table("Posterior − soft BT on the same raters, 95 %", "choices", "accuracy", "log loss")
    for row in found.rows:
        ours = row.predictors["posterior"]
        table.add_row(_label(row), _ends(ours.accuracy_difference), _ends(ours.log_loss_difference))
    table.caption = "above 0 in accuracy and below 0 in log loss: the members are better than one reward"
    return table


def _label(row: RepresentationRow) -> str:
    return f"all ({row.mean_choices:.0f})" if row.choices is None else str(row.choices)


def _ends(interval: Interval) -> Text:
    mean = short(interval.mean)
    return Text(mean if math.isnan(interval.low) else f"{mean} [{short(interval.low)}, {short(interval.high)}]")
