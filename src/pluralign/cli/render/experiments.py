"""Views of ``pluralign reproduce``: the commands of experiments and their results."""

import shlex
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pluralign.cli.render.tables import command_line, figure_table, heading, number
from pluralign.experiments.recipes import Experiment
from pluralign.experiments.reproduce import Outcome, Reproduction


def commands_page(experiments: Sequence[Experiment]) -> Iterator[RenderableType]:
    """Yield the steps of each experiment with their commands, and what they need."""
    for one in experiments:
        yield heading(f"{one.recipe.title}: steps")
        for position, step in enumerate(one.steps, 1):
            yield Text(f"{position}. {step.does}")
            yield command_line(f"   {shlex.join(step.command)}")
        yield heading("Requirements")
        yield Text(f"· votes: {f'the files of {one.recipe.hub}' if one.recipe.name == one.data else one.data}")
        if one.options.encoder:
            yield Text(f"· encoder: {one.options.encoder}, frozen; not the paper's experiment")
        else:
            yield Text(
                f"· checkpoint: {one.recipe.starts_from}; the paper does not name it: give yours with --backbone"
            )
            yield Text(f"· hardware: {one.hardware.about} (--hardware {one.options.hardware})")
        if one.prompts == "prism":
            yield Text("· prompts: HannahRoseKirk/prism-alignment from the hub, or --prompts prism:FOLDER")
        for line in one.recipe.notes:
            yield Text(f"· {line}", style="dim")
    yield Text("Nothing is estimated; what fits which hardware: docs/how-to/reproduce.md\n", style="dim")


def reproduction_page(done: Reproduction) -> Iterator[RenderableType]:
    """Yield the paper's Table 1 and its two figures next to the results here, for each experiment."""
    for name, one in done.experiments.items():
        yield heading(f"{name} in {done.folder}")
        if done.tiny:
            yield Text("A rehearsal with few votes and a tiny model: the figures mean nothing.", style="yellow")
        yield _first_table(one)
        table = figure_table("Figure 2: Brier score by number of members", "k", "train", "held out")
        for stage in one.history:
            table.add_row(str(stage.k), number(stage.train_brier), number(stage.test_brier))
        table.add_row("floor", "", number(one.floor))
        yield table
        below = one.members_below_floor
        yield Text(f"The ensemble beats the floor from {below} members on." if below else "No size beats the floor.")
        yield Text(f"Figure 3: mean Kendall's τ between members: {number(one.mean_tau)}.")
        if one.skipped:
            yield Text(f"Finished by an earlier run: {', '.join(one.skipped)}.", style="dim")
        yield Text(f"Report: {one.report}")
    for path in done.figures:
        yield Text(f"Figure: {path}")
    yield Text("")


def _first_table(outcome: Outcome) -> Table:
    """Return the paper's Table 1 beside the figures of these votes, or the latter alone."""

    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:,.2f}" if value % 1 else f"{value:,.0f}"

    known = any(row.paper is not None for row in outcome.table)
    table = figure_table("Table 1", "", "paper", "here", "") if known else figure_table("The votes", "", "")
    for row in outcome.table:
        cells = [shown(row.paper), shown(row.here), "matches the paper" if row.close else ""]
        table.add_row(row.name, *(cells if known else cells[1:2]))
    return table
