"""Views of ``pluralign rankings``: whether shares come from rankings, the proof, and the mixture of rankings."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pluralign.analysis.tournament import RankingResult
from pluralign.cli.views.tables import figure_table, heading, number

RANKINGS_SHOWN = 10


def rankings_page(result: RankingResult, title: str) -> Iterator[RenderableType]:
    """Yield the verdict, its reason, the mixture of rankings, and a sample from it if one was drawn."""
    alternatives = len(result.alternatives)
    possible = alternatives * (alternatives - 1) // 2
    compared = "all" if result.pairs == possible else "no constraint on the others"
    yield heading(title)
    yield Text(f"{alternatives} alternatives, {result.pairs:,} of {possible:,} pairs compared ({compared})\n")
    yield from _verdict(result)
    yield _ranking_table(result)
    if (count := len(result.rankings)) > RANKINGS_SHOWN:
        rest = sum(result.weights[RANKINGS_SHOWN:])
        yield Text(f"{count - RANKINGS_SHOWN} more rankings have {rest:.4f} of the weight; --json lists them.")
    yield Text(
        f"At most {result.size_at_most} rankings are needed (Carathéodory). The mixture is not unique: these rankings "
        "need not be those of actual voters.\n"
    )
    if sample := result.sample:
        yield Text(
            f"Sample of {sample.k:,} rankings with equal weights: calibration error to the mixture {sample.error:.5f}, "
            f"expected {sample.expected_error:.5f}, at most 1/(4k) = {sample.bound:.5f} in expectation (Theorem 2).\n"
        )
    method = (
        f"With {alternatives} alternatives this was decided exactly."
        if result.exact
        else f"With {alternatives} alternatives a heuristic search was used: rankings that it finds are a proof, but "
        "finding none proves nothing."
    )
    yield Text(
        "To decide whether shares come from rankings is NP-hard (Theorem 1): all known exact methods take exponential "
        f"time in the number of alternatives. {method}\n",
        style="dim",
    )


def _verdict(result: RankingResult) -> Iterator[RenderableType]:
    if result.realizable:
        yield Text("Realizable: the rankings below give every share.", style="bold green")
        yield Text(f"Largest deviation of a share: {result.residual:.0e}.")
        return
    if result.realizable is None:
        yield Text("Not decided: the search found no rankings that give every share, and no proof against them.\n")
    else:
        yield Text("Not realizable: no mixture of rankings gives these shares.", style="bold red")
    if result.certificate:
        yield Text(f"{result.certificate.in_words}\n")
    nearest = (
        "The nearest mixture"
        if result.exact
        else f"The nearest mixture found (lower bound for any mixture: {result.distance_at_least:.6f})"
    )
    yield Text(
        f"{nearest} has calibration error {result.distance:.6f} (mean squared difference over pairs); the largest "
        f"difference is {result.residual:.4f}."
    )


def _ranking_table(result: RankingResult) -> Table:
    table = figure_table(f"{len(result.rankings)} rankings", "weight")
    table.add_column("ranking, best first", overflow="fold")
    for weight, ranking in list(zip(result.weights, result.rankings, strict=True))[:RANKINGS_SHOWN]:
        table.add_row(number(weight), Text(" > ".join(result.alternatives[place] for place in ranking)))
    return table
