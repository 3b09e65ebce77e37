"""What all views of the terminal share: how a table is drawn, panels and notes.

A view draws results that other rooms returned, and computes none of its own. Text from data is never read as markup.
"""

from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pluralign.core.text import printable
from pluralign.publishing.tables import Table as Tabular

TEXT_LENGTH = 400
"""Longer texts are cut."""
BAR_WIDTH = 40
PANEL_WIDTH = 100


def draw(table: Tabular) -> Table:
    """Return a table as rich draws it; an empty line separates it from the text above."""
    drawn = figure_table(table.title, caption=table.note)
    for place, name in enumerate(table.columns):
        drawn.add_column(name, justify="left" if table.is_text(place) else "right")
    for place, row in enumerate(table.lines):
        style = "bold" if place == table.main else "bold red" if place in table.warned else ""
        drawn.add_row(*map(Text, row), style=style)
    return drawn


def figure_table(title: str, *headings: str, caption: str = "") -> Table:
    """Return an empty table: a first column of names, then columns of numbers."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=Text(f"\n{title}", style="italic"),
        title_justify="left",
        caption=Text(caption, style="dim italic") if caption else None,
        caption_justify="left",
        pad_edge=False,
    )
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position else "left")
    return table


def text_panel(body: Text | str, title: Text | str) -> Panel:
    """Return a panel of text under a title."""
    text = Text(body) if isinstance(body, str) else body
    return Panel(text, title=title, title_align="left", width=PANEL_WIDTH)


def dim(text: str) -> Text:
    """Return a note in a paler colour."""
    return Text(text, style="dim")


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
