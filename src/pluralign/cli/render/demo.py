"""The view of ``pluralign demo``: one story in a screen and a half. The report and the JSON have everything else."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pluralign.cli.render.evaluation import headline_lines
from pluralign.cli.render.tables import command_line, draw, heading, visible
from pluralign.core.text import shortened
from pluralign.ensemble.headline import headline
from pluralign.experiments.demo import CONSTANT_HALF, FLOOR, JOINT, SOFT_BT, TRUE_SHARES, Asked, DemoResult
from pluralign.publishing.tables import Table as Tabular
from pluralign.votes.summary import Inspection
from pluralign.votes.town_hall.town_hall import TownHall

TEXT_LENGTH = 120
"""Length of a shown response: two lines in 80 columns."""
CONSENSUS_LENGTH = 75
SLATE_SHOWN = 3
ROWS = {
    JOINT: "→ ensemble",
    SOFT_BT: "one soft BT reward",
    CONSTANT_HALF: "constant ½",
    FLOOR: "floor: a perfect single reward",
    TRUE_SHARES: "true shares: a perfect ensemble",
}
"""Rows of the table, by the name of the method."""


def votes_page(town: TownHall, summary: Inspection) -> Iterator[RenderableType]:
    """Yield the size of the votes, and one contested pair with its votes."""
    yield heading("1. Votes in which people disagree")
    yield Text(
        f"{summary.pairs:,} pairs of answers to {summary.prompts:,} questions, {summary.votes_per_pair:g} votes per "
        f"pair. The town is synthetic: what each of its {len(town.tastes):,} people prefers is known. One pair:"
    )
    votes, row = town.preferences, int(np.abs(town.true_prob - 0.5).argmin())
    yield _indented(Text(f"“{votes.prompts[votes.prompt_index[row]]}”", style="italic"))
    sides = (("A", votes.a_index, votes.votes_a), ("B", votes.b_index, votes.votes_b))
    yield _texts((f"{name}: {count[row]} votes", str(votes.responses[index[row]])) for name, index, count in sides)
    yield _indented(Text(f"True share: {town.true_prob[row]:.0%} of the town prefer A. A majority label hides this."))


def demo_page(result: DemoResult, commands: Sequence[Sequence[str]], report: str | None) -> Iterator[RenderableType]:
    """Yield the main result, the camps with a member, the answer to a question, and the next commands.

    Args:
        result: of the demo.
        commands: fit the same ensemble and serve it.
        report: the file with all details, if one was written.
    """
    yield heading("2. The ensemble against one reward")
    record = result.ensemble.record
    if record.evaluation:
        yield from islice(headline_lines(headline(record.evaluation, record)), 2)  # section 5 has the next step
    yield _score_table(result)
    yield heading("3. Who is represented")
    yield from _camp_lines(result)
    yield heading("4. Ask it a question")
    yield from _asked_lines(result.asked)
    yield heading("5. Next")
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


def _score_table(result: DemoResult) -> RenderableType:
    methods = [(shown, result.method(name)) for name, shown in ROWS.items()]
    rows = [(shown, one.brier, one.brier_corrected, one.true_error) for shown, one in methods]
    note = (
        "corrected = Brier − noise of few votes. It estimates the true error (on all people of the town), and can be "
        "below 0."
    )
    table = draw(Tabular("", ("", "Brier", "corrected", "true error"), rows, note, main=0))
    table.title = None
    return table


def _camp_lines(result: DemoResult) -> Iterator[RenderableType]:
    camps = next(iter(result.camps.values())).camps
    yield Text(
        f"The town has {len(camps)} camps. No fit sees them. A camp has a member if one member agrees with it "
        "significantly more often than soft BT."
    )
    for fitted, study in result.camps.items():
        yield Text(f"  {study.represented} of {len(study.camps)} camps have a member: fitted to {fitted}")


def _asked_lines(asked: Asked) -> Iterator[RenderableType]:
    answer, chosen = asked.answer, asked.answer.consensus
    covered = sum(asked.share_of(entry.text) for entry in answer.answers)
    yield _indented(Text(f"“{asked.prompt}”", style="italic"))
    yield Text(
        f"{len(answer.answers)} of {answer.candidates} answers are the first choice of a member. For {covered:.0%} of "
        "the town, their first choice is among these. Weight of the members, share of the town:"
    )
    yield _texts(
        (f"{entry.weight:.0%}, {asked.share_of(entry.text):.0%}", entry.text) for entry in answer.answers[:SLATE_SHOWN]
    )
    if chosen is None:
        return
    text = Text(shortened(visible(chosen.text), CONSENSUS_LENGTH))
    yield Text(f"Consensus: {chosen.least_support:.0%} of the weight prefer this answer to its strongest rival.")
    yield _indented(text)


def _texts(rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Return labels with the beginning of a text each, in two columns."""
    table = Table.grid(padding=(0, 2))
    for label, text in rows:
        table.add_row(label, Text(shortened(visible(text), TEXT_LENGTH)))
    return _indented(table)


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))
