"""The part of the page about individuals: the measure of representation, with verdicts and notes in words."""

from dataclasses import dataclass

from pluralign.evaluation.comparison import Verdict
from pluralign.evaluation.representation import LEGEND, PREDICTORS, Representation, RepresentationRow
from pluralign.evaluation.representation_verdicts import representation_notes, representation_verdicts


@dataclass(frozen=True)
class PageRepresentation:
    """How well individuals are represented, as the page shows it."""

    names: dict[str, str]
    """Heading of every predictor."""
    legend: str
    rows: list[RepresentationRow]
    verdicts: list[Verdict]
    notes: list[str]


def page_representation(found: Representation | None) -> PageRepresentation | None:
    """Return the data of the section; None if representation was not measured."""
    if found is None:
        return None
    return PageRepresentation(
        names=dict(PREDICTORS),
        legend=LEGEND,
        rows=list(found.rows),
        verdicts=list(representation_verdicts(found)),
        notes=list(representation_notes(found)),
    )
