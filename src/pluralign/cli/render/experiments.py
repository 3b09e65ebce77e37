"""Views of whole experiments. ``demo``: one story in a screen and a half; its report and JSON have everything else.
``reproduce``: the commands of experiments and their results.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import rich.table
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from pluralign.cli.render.results import command_line, dim, draw, heading, headline_lines, insight_lines, visible
from pluralign.core.text import shortened
from pluralign.ensemble.verdict import headline
from pluralign.experiments.demo import CONSTANT_HALF, PERFECT_SINGLE, RANKINGS, SOFT_BT, TRUE_SHARES, Asked, DemoResult
from pluralign.experiments.recipes import Experiment
from pluralign.experiments.reproduce import Outcome, Reproduction
from pluralign.publishing.tables import Table, number
from pluralign.votes.summary import Inspection
from pluralign.votes.town_hall.town_hall import TownHall

TEXT_LENGTH = 120
"""Length of a shown response: two lines in 80 columns."""
CONSENSUS_LENGTH = 75
SLATE_SHOWN = 2
ROWS = {
    RANKINGS: "→ ensemble",
    SOFT_BT: "one soft BT reward",
    CONSTANT_HALF: "constant ½",
    PERFECT_SINGLE: "perfect single reward: true majorities",
    TRUE_SHARES: "perfect ensemble: true shares",
}
"""Rows of the table, by the name of the method."""
TRUE_ERROR = "corrected: Brier − noise, an estimate of the true error"


def votes_page(town: TownHall, summary: Inspection) -> Iterator[RenderableType]:
    """Yield the size of the votes, and one contested pair with its votes."""
    yield heading("1. Votes in which people disagree")
    yield Text(
        f"{summary.votes_per_pair:g} people rank the answers to each of {summary.prompts:,} questions: "
        f"{summary.pairs:,} pairs of answers. The town is synthetic: what each of its {len(town.tastes):,} people "
        "prefers is known. One pair:"
    )
    votes, row = town.preferences, int(np.abs(town.true_prob - 0.5).argmin())
    yield _indented(Text(f"“{votes.prompts[votes.prompt_index[row]]}”", style="italic"))
    sides = (("A", votes.a_index, votes.votes_a), ("B", votes.b_index, votes.votes_b))
    yield _texts((f"{name}: {count[row]} votes", str(votes.responses[index[row]])) for name, index, count in sides)
    yield _indented(Text(f"True share: {town.true_prob[row]:.0%} of the town prefer A. A majority label hides this."))


def demo_page(result: DemoResult, commands: Sequence[Sequence[str]], report: str | None) -> Iterator[RenderableType]:
    """Yield the insight, the camps with a member, the main result, the answer to a question, and the next commands.

    Args:
        result: of the demo.
        commands: fit the same ensemble and serve it.
        report: the file with all details, if one was written.
    """
    record = result.ensemble.record
    yield heading("2. Who disagrees about what, from the votes alone")
    if record.insight:
        yield from insight_lines(record.insight)
    yield heading("3. Who is represented")
    yield Text(
        f"Camps (of {len(result.camps[RANKINGS].camps)}): those with a member that agrees with them significantly more "
        "often than soft BT. Agreement: of a person with the closest member. No fit sees camps."
    )
    found = [
        (name, study.represented, study.people.closest_member, result.method(name).true_error)
        for name, study in result.camps.items()
    ]
    single = result.camps[RANKINGS].people.soft_bt, result.method(SOFT_BT).true_error
    found.append((ROWS[SOFT_BT], 0, *single))
    columns = ("fitted to", "camps", "agreement", "true error")
    yield draw(Table("", columns, found, main=1))
    yield heading("4. The ensemble against one reward")
    if record.evaluation:
        yield from islice(headline_lines(headline(record.evaluation, record)), 2)  # section 6 has the next step
    methods = [(shown, result.method(name)) for name, shown in ROWS.items()]
    rows = [(shown, one.brier, one.brier_corrected, one.true_error) for shown, one in methods]
    yield draw(Table("", ("", "Brier", "corrected", "true error"), rows, TRUE_ERROR, main=0))
    yield heading("5. Ask it a question")
    yield from _asked_lines(result.asked)
    yield heading("6. Next")
    if report:
        yield Text(f"Wrote {report}, with all methods, members and camps. Open it in a browser.")
    else:
        yield Text("All methods, members and camps are in the report:")
        yield command_line("  pluralign demo --report town.html")
    yield Text("The page of this ensemble, at http://127.0.0.1:8000:")
    for words in commands:
        yield command_line(f"  {shlex.join(words)}")
    yield Text("Your own votes:")
    yield command_line("  pluralign inspect votes.csv")
    yield command_line("  pluralign fit votes.csv -o ensemble")
    yield Text()


def _asked_lines(asked: Asked) -> Iterator[RenderableType]:
    answer, chosen = asked.answer, asked.answer.consensus
    covered = sum(asked.share_of(entry.text) for entry in answer.answers)
    yield _indented(Text(f"“{asked.prompt}”", style="italic"))
    yield Text(
        f"{len(answer.answers)} of {answer.candidates} answers are on the slate. For {covered:.0%} of "
        "the town, their first choice is among these. Weight of the members, share of the town:"
    )
    yield _texts(
        (f"{entry.weight:.0%}, {asked.share_of(entry.text):.0%}", entry.text) for entry in answer.answers[:SLATE_SHOWN]
    )
    if chosen and chosen.least_support is not None:
        yield Text(
            f"Consensus: {chosen.least_support:.0%} of people prefer this answer to its strongest rival (predicted)."
        )
        yield _indented(Text(shortened(visible(chosen.text), CONSENSUS_LENGTH)))


def _texts(rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Return labels with the beginning of a text each, in two columns."""
    table = rich.table.Table.grid(padding=(0, 2))
    for label, text in rows:
        table.add_row(label, Text(shortened(visible(text), TEXT_LENGTH)))
    return _indented(table)


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))


# --- ``reproduce``: the commands of experiments and their results


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
            yield dim(f"· {line}")
    yield dim("Nothing is estimated; what fits which hardware: docs/how-to/reproduce.md\n")


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
            yield dim(f"Finished by an earlier run: {', '.join(one.skipped)}.")
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
