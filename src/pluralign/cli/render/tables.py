"""The parts that all views share: tables of figures, panels, notes, and numbers as text.

A view draws results that other rooms returned, and computes none of its own. Text from data is never read as markup.
"""

import math
from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pluralign.core import text as core_text
from pluralign.core.text import printable
from pluralign.theory.intervals import Interval

EXAMPLE_TEXT_LENGTH = 400
BAR_WIDTH = 40
PANEL_WIDTH = 100


def figure_table(title: str, *headings: str, words: str = "") -> Table:
    """Return an empty table: a first column of names, then columns of numbers, and a last one of ``words`` if named.

    An empty line separates it from the text above.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"\n{title}",
        title_justify="left",
        title_style="italic",
        caption_justify="left",
        pad_edge=False,
    )
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position else "left")
    if words:
        table.add_column(words)
    return table


def text_panel(body: Text | str, title: Text | str) -> Panel:
    """Return a panel of text under a title."""
    text = Text(body) if isinstance(body, str) else body
    return Panel(text, title=title, title_align="left", width=PANEL_WIDTH)


def heading(text: str) -> Text:
    """Return a bold line with an empty line above it."""
    return Text(f"\n{text}", style="bold")


def command_line(command: str) -> Text:
    """Return a command to copy, which is not wrapped."""
    return Text(command, style="dim", no_wrap=True)


def counted_notes(notes: Iterable[tuple[int, str]]) -> Iterator[Text]:
    """Yield a dim line for each note whose count is not zero."""
    for count, note in notes:
        if count:
            yield Text(f"· {count:,} {note}", style="dim")


def number(value: float) -> str:
    """Return a number with four decimals, or a dash for NaN.

    Example:
        >>> number(0.07812), number(-0.00001), number(float("nan"))
        ('0.0781', '0.0000', '–')
    """
    return "–" if math.isnan(value) else f"{value:z.4f}"


def decimals(value: float, form: str = ".3f") -> str:
    """Return a number in a given format, or a dash for NaN.

    Example:
        >>> decimals(0.25, ".0%"), decimals(float("nan"))
        ('25%', '–')
    """
    return "–" if math.isnan(value) else format(value, form)


def span(interval: Interval) -> str:
    """Return the ends of an interval, or a dash if there is none.

    Example:
        >>> span(Interval(0.05, 0.04, 0.06, 0.005)), span(Interval(0.05, math.nan, math.nan, math.nan))
        ('0.0400 – 0.0600', '–')
    """
    return "–" if math.isnan(interval.low) else f"{number(interval.low)} – {number(interval.high)}"


def short(value: float) -> str:
    """Return a signed number without the leading zero, so that tables fit 80 columns.

    Example:
        >>> short(-0.0312), short(-0.00001)
        ('-.0312', '+.0000')
    """
    return f"{value:+z.4f}".replace("0.", ".", 1)


def shortened(text: str) -> str:
    """Return a text cut to a length that fits a panel."""
    return core_text.shortened(text, EXAMPLE_TEXT_LENGTH)


def visible(text: str) -> str:
    """Return a text in one line, without control characters that would move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)


# --- A rich console that prints its own styles, and no control characters of the data.


class SafeConsole(Console):
    """A console whose texts are cleaned after they were laid out; removed characters have no width."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of an object, cleaned. Control segments are rich's own, such as moves of the cursor."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
