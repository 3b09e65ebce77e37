"""What people read in the terminal: results as tables, histograms and panels, drawn with rich.

Draws what other modules returned and computes no result of its own. Text from data is never read as markup.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np
from rich import box
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pluralign.demo import TownHall
from pluralign.inspection import Inspection, Truth

EXAMPLE_TEXT_LENGTH = 400
BAR_WIDTH = 40
PANEL_WIDTH = 100


def show(parts: Iterable[RenderableType]) -> None:
    """Print each part on stdout; where that is no terminal, as plain text."""
    console = Console(highlight=False)
    for part in parts:
        console.print(part, markup=False)


def number(value: float) -> str:
    """Four decimals, or a dash where there is no value.

    Example:
        >>> number(0.07812), number(float("nan"))
        ('0.0781', '–')
    """
    return "–" if math.isnan(value) else f"{value:.4f}"


def figures(title: str, *headings: str) -> Table:
    """An empty table whose first column is names and whose others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", caption_justify="left", title_style="italic")
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position else "left", no_wrap=bool(position))
    return table


def inspection_page(facts: Inspection) -> Iterator[RenderableType]:
    """What ``pluralign inspect`` shows: size, remarks, the bars to beat and a histogram of the majority share."""
    low, high = facts.votes_per_pair_range
    each = f"{low}" if low == high else f"{facts.votes_per_pair:.2f} ({low} to {high})"
    yield Text(f"\n{facts.name or 'votes'}", style="bold")
    yield Text(
        f"{facts.pairs:,} pairs · {facts.prompts:,} prompts · {facts.responses:,} distinct responses · "
        f"{facts.votes:,} votes, {each} a pair"
    )
    for line in _remarks(facts):
        yield Text(f"· {line}", style="dim")
    yield Text()
    yield _bars_to_beat(facts)
    yield from _histogram(facts)


def _bars_to_beat(facts: Inspection) -> Table:
    table = figures("Squared error of the simplest predictions", "", "Brier", "corrected", "95 % over prompts")
    table.add_column("what it is", justify="left")
    bars = (
        ("floor", facts.floor, facts.floor_corrected, "a perfect single reward"),
        ("constant ½", facts.constant_half, facts.constant_half_corrected, "always half and half"),
    )
    for name, value, corrected, meaning in bars:
        key = "floor_corrected" if name == "floor" else "constant_half_corrected"
        interval = facts.intervals.get(key)
        span = f"{number(interval.low)} – {number(interval.high)}" if interval else ""
        table.add_row(name, number(value), number(corrected), span, meaning)
    table.add_row("noise", number(facts.noise), "", "", "error of the true shares")
    table.caption = "corrected = Brier − noise: an unbiased estimate of the error against all people, not these few"
    return table


def _remarks(facts: Inspection) -> Iterator[str]:
    if facts.ties and facts.tie_rule == "half":
        yield f"{facts.ties:,} ties count half a vote for each side"
    elif facts.ties:
        share = f"{facts.majority_share_of_all:.3f}"
        yield f"{facts.ties:,} ties do not count; with them in the denominator the majority share is {share}"
    if facts.single_vote_pairs:
        share = "all" if facts.single_vote_pairs == facts.pairs else f"{facts.single_vote_pairs:,}"
        yield f"{share} pairs have one vote: no disagreement can be seen there, and corrected figures leave them out"
    if facts.empty_responses:
        yield f"{facts.empty_responses:,} pairs have an empty response; people voted on it, so it is kept"
    if facts.a_wins > 0.9:
        yield f"response a wins {facts.a_wins:.0%} of the pairs: the data were turned majority-first"
    if facts.splits:
        yield "official split: " + ", ".join(f"{name} {count:,}" for name, count in facts.splits.items())
    for kind, count in facts.dropped.items():
        yield f"left out: {count:,} {kind}"


def _histogram(facts: Inspection) -> Iterator[RenderableType]:
    kinds = ", ".join(f"{count / facts.pairs:.0%} {name}" for name, count in facts.strata.items())
    yield Text(f"Share of people on the majority's side: mean {facts.majority_share:.3f} ({kinds})", style="italic")
    tallest = max(bar.count for bar in facts.histogram)
    for bar in facts.histogram:
        label = f"{bar.low:.3f}" if bar.low == bar.high else f"{bar.low:.2f} – {bar.high:.2f}"
        blocks = "█" * round(BAR_WIDTH * bar.count / tallest) or ("▏" if bar.count else "")
        yield Text(f"  {label} {blocks} {bar.count / facts.pairs:.1%}")
    yield Text()


def example_pairs(town: TownHall) -> Iterator[RenderableType]:
    """The most contested pair of a town hall and the clearest one, as people would read them."""
    votes = town.preferences
    closeness = np.abs(town.true_prob - 0.5)
    for title, row in (("The town is split on this", closeness.argmin()), ("and agrees here", closeness.argmax())):
        sides = [
            f"{name} · {count[row]} votes\n{_shortened(votes.responses[index[row]])}"
            for name, index, count in (("A", votes.a_index, votes.votes_a), ("B", votes.b_index, votes.votes_b))
        ]
        truth = f"In the whole town {town.true_prob[row]:.0%} prefer A."
        body = "\n\n".join([f"“{votes.prompts[votes.prompt_index[row]]}”", *sides, truth])
        yield Panel(Text(body), title=title, title_align="left", width=PANEL_WIDTH)


def _shortened(text: str) -> str:
    return text if len(text) <= EXAMPLE_TEXT_LENGTH else text[: EXAMPLE_TEXT_LENGTH - 1].rstrip() + "…"


def truth_table(facts: Inspection, truth: Truth) -> RenderableType:
    """Estimates from few votes beside the truth that only a town hall knows."""
    table = figures("Here the truth is known: do the estimates hold?", "", "in the votes", "estimated", "true")
    table.add_row("noise", "", number(facts.noise), number(truth.noise))
    table.add_row("constant ½", *map(number, (facts.constant_half, facts.constant_half_corrected, truth.constant_half)))
    table.add_row("floor", *map(number, (facts.floor, facts.floor_corrected, truth.floor)))
    table.add_row("majority share", number(facts.majority_share), "", number(truth.majority_share))
    table.caption = "The corrected floor is an optimist: its majorities were picked on the very votes it is judged by."
    return table
