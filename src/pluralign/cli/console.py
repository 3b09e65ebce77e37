"""What goes to which stream: results to stdout, as text or as JSON; notes, warnings and progress to stderr.

Everything that the command line prints passes through here. Control characters in data, names and paths are removed, so
that no file can write to the terminal's title, move its cursor or hide text. JSON has them as escapes.
"""

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pluralign.cli.plain_progress import PlainLines, plain_progress
from pluralign.core.json_values import to_json
from pluralign.core.text import printable, printable_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pluralign.core.types import Progress

# --- results on stdout ------------------------------------------------------------------------------------------------


def emit(result: Any, view: Iterable["RenderableType"], as_json: bool) -> None:
    """Print a result on stdout: as one JSON object, or as the parts of its view.

    Args:
        result: a dataclass, or a mapping of plain values and dataclasses.
        view: what a person reads. A generator draws nothing if JSON is printed.
        as_json: the option ``--json`` of the command.
    """
    if as_json:
        print_json(result)
    else:
        show(view)


def show(parts: Iterable["RenderableType"]) -> None:
    """Print each part on stdout; as plain text if stdout is no terminal. Strings and ``no_wrap`` texts keep lines."""
    from rich.text import Text

    from pluralign.cli.safe_console import SafeConsole

    console = SafeConsole(highlight=False)
    for part in parts:
        keeps_lines = isinstance(part, str) or (isinstance(part, Text) and bool(part.no_wrap))
        console.print(part, markup=False, soft_wrap=keeps_lines)


def print_json(result: Any) -> None:
    """Print a result as one JSON object in one line; NaN becomes null."""
    plain = to_json(result.to_json() if hasattr(result, "to_json") else result)
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    print(printable_json(json.dumps(plain, ensure_ascii=encoding != "utf-8", allow_nan=False)), flush=True)


# --- notes and progress on stderr -------------------------------------------------------------------------------------


def say(line: str) -> None:
    """Print a line on stderr."""
    print(printable(line), file=sys.stderr, flush=True)


def note(sentence: str) -> None:
    """Print a note on stderr."""
    say(f"note: {sentence}")


@contextmanager
def progress_bar(task: str) -> Iterator["Progress | None"]:
    """Show the progress of a task on stderr, and yield the function to call with the amount done and the total.

    A terminal shows a bar. Anything else, such as the log of a CI job, gets a plain line now and then if the task takes
    long. Yields None in all processes of a launch but the first.
    """
    if not is_first_process():
        yield None
        return
    if not sys.stderr.isatty():
        yield plain_progress(task, PlainLines(say))
        return
    from rich.markup import escape
    from rich.progress import Progress as Bar

    from pluralign.cli.safe_console import SafeConsole

    with Bar(console=SafeConsole(stderr=True), transient=True) as bar:
        row = bar.add_task(escape(task), total=None)
        yield lambda done, total: bar.update(row, completed=done, total=total or None)


@contextmanager
def working(task: str) -> Iterator[None]:
    """Show on a terminal that a task of unknown length is running."""
    with progress_bar(task):
        yield


def is_first_process() -> bool:
    """Whether this is the first of the processes that ``accelerate launch`` started; it prints for all of them."""
    from pluralign.core.distributed import launched_process

    return launched_process().first


# --- log messages on stderr -------------------------------------------------------------------------------------------


class NoteFormatter(logging.Formatter):
    """Writes a log message as ``LEVEL: message``; warnings are notes."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one message as text."""
        level = "note" if record.levelno == logging.WARNING else record.levelname
        return f"{level}: {super().format(record)}"


class StderrHandler(logging.Handler):
    """Prints log messages on ``sys.stderr`` of the moment, so that a progress bar is not torn."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        say(self.format(record))


def log_to_stderr(verbose: bool) -> None:
    """Print log messages of this application on stderr: warnings and errors, or everything if ``verbose``."""
    handler = StderrHandler()
    handler.setFormatter(NoteFormatter())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, handlers=[handler])
