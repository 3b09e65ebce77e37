"""Progress where stderr is no terminal, such as the log of a CI job: a plain line now and then if work takes long."""

import time
from collections.abc import Callable

from pluralign.core.types import Progress

FIRST_SECONDS = 30.0
"""Time before the first line. Shorter work prints nothing."""
LEAST_SECONDS = 10.0
"""Time between two lines."""
MOST_SECONDS = 60.0
"""After this time a line is printed even if less than ``STEP`` was done."""
STEP = 0.1
"""Share of the work after which a line is printed, if the last one is not recent."""

Clock = Callable[[], float]


class PlainLines:
    """Prints lines on the progress of work, none in the first ``FIRST_SECONDS``, then at most one in ``LEAST_SECONDS``.

    Args:
        say: prints a line.
        clock: the time in seconds.
    """

    def __init__(self, say: Callable[[str], None], clock: Clock = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._last, self._printed = clock(), False

    @property
    def seconds(self) -> float:
        """Time since the last line, or since the start."""
        return self._clock() - self._last

    def __call__(self, line: str) -> bool:
        """Print a line unless the last one is recent; return whether it was printed."""
        if self.seconds < (LEAST_SECONDS if self._printed else FIRST_SECONDS):
            return False
        self._say(line)
        self._last, self._printed = self._clock(), True
        return True


def plain_progress(task: str, lines: PlainLines) -> Progress:
    """Return a function that prints the progress of a task every tenth of the work or every minute.

    Example:
        >>> times = iter([0.0, 12.0, 45.0, 45.0])
        >>> progress = plain_progress("Encoding texts", PlainLines(print, lambda: next(times)))
        >>> progress(600, 5000)
        >>> progress(1200, 5000)
        Encoding texts: 1,200 of 5,000 (24 %)
    """
    shown = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        share = done / total if total else 0.0
        if round(abs(share - shown), 6) < STEP and lines.seconds < MOST_SECONDS:
            return
        amount = f"{done:,} of {total:,} ({share:.0%})".replace("%", " %") if total else f"{done:,}"
        if lines(f"{task}: {amount}"):
            shown = share

    return progress
