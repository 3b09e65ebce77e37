"""Views of ``pluralign reproduce``: the commands of experiments and their results."""

import shlex
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from pluralign.cli.render.tables import command_line, draw, heading
from pluralign.experiments.recipes import Experiment
from pluralign.experiments.reproduce import Outcome, Reproduction
from pluralign.publishing.tables import Table, number


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
            yield Text(f"· checkpoint, with --backbone: {one.recipe.starts_from}")
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
        yield draw(_first_table(one))
        sizes = [(str(row.k), row.train_brier, row.test_brier) for row in one.history]
        title = "Figure 2: Brier score by number of members"
        yield draw(Table(title, ("k", "train", "held out"), [*sizes, ("floor", None, one.floor)]))
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

    if all(row.paper is None for row in outcome.table):
        return Table("The votes", ("", ""), [(row.name, shown(row.here)) for row in outcome.table])
    rows = [
        (row.name, shown(row.paper), shown(row.here), "matches the paper" if row.close else "") for row in outcome.table
    ]
    return Table("Table 1", ("", "paper", "here", ""), rows, texts=(0, -1))
