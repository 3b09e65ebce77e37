"""A rich console that prints its own styles, and no control characters of the data."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pluralign.core.text import printable


class SafeConsole(Console):
    """A console whose texts are cleaned after they were laid out; removed characters have no width."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of an object, cleaned. Control segments are rich's own, such as moves of the cursor."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
