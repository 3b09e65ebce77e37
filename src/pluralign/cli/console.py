"""What commands read, and what goes to which stream: results to stdout, as text or JSON; notes and progress to stderr.

Everything that the command line prints passes through here. Control characters in data, names and paths are removed, so
that no file can write to the terminal's title, move its cursor or hide text. JSON has them as escapes.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pluralign.core.errors import UsageError
from pluralign.core.json_values import to_json
from pluralign.core.text import printable, printable_json
from pluralign.core.types import Progress
from pluralign.votes.options import LoadOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pluralign.ensemble.ensemble import RewardEnsemble
    from pluralign.ensemble.held_out import HeldOutVotes
    from pluralign.ensemble.record import LeftOut
    from pluralign.votes.preferences import PreferenceSet
    from pluralign.votes.raters import RaterVotes

# --- Progress where stderr is no terminal, such as the log of a CI job: a plain line now and then if work takes long.


FIRST_SECONDS = 30.0
"""Time before the first line. Shorter work prints nothing."""
LATER_SECONDS = 60.0
"""Time between two lines."""


class PlainLines:
    """Prints lines on the progress of work, none in the first ``FIRST_SECONDS``, then one in ``LATER_SECONDS``.

    Args:
        say: prints a line.
        clock: the time in seconds.

    Example:
        >>> times = iter([0.0, 12.0, 45.0])
        >>> lines = PlainLines(print, lambda: next(times))
        >>> lines("Encoding texts: 600 of 5,000 (12 %)")
        >>> lines("Encoding texts: 1,200 of 5,000 (24 %)")
        Encoding texts: 1,200 of 5,000 (24 %)
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._last, self._printed = clock(), False

    def __call__(self, line: str) -> None:
        """Print a line unless the last one is recent."""
        now = self._clock()
        if now - self._last >= (LATER_SECONDS if self._printed else FIRST_SECONDS):
            self._say(line)
            self._last, self._printed = now, True


def plain_progress(task: str, lines: PlainLines) -> Progress:
    """Return a function that prints the progress of a task."""
    return lambda done, total: lines(
        f"{task}: {done:,} of {total:,} ({100 * done / total:.0f} %)" if total else f"{task}: {done:,}"
    )


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

    from pluralign.cli.render.results import SafeConsole

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

    A terminal shows a bar, which needs no call. Anything else, such as the log of a CI job, gets a plain line now and
    then if the task takes long. Yields None in all processes of a launch but the first.
    """
    if not is_first_process():
        yield None
        return
    if not sys.stderr.isatty():
        yield plain_progress(task, PlainLines(say))
        return
    from rich.markup import escape
    from rich.progress import Progress as Bar

    from pluralign.cli.render.results import SafeConsole

    with Bar(console=SafeConsole(stderr=True), transient=True) as bar:
        row = bar.add_task(escape(task), total=None)
        yield lambda done, total: bar.update(row, completed=done, total=total or None)


def is_first_process() -> bool:
    """Whether this is the first of the processes that ``accelerate launch`` started; it prints for all of them."""
    from pluralign.core.processes import launched_process

    return launched_process().first


# --- log messages on stderr -------------------------------------------------------------------------------------------


class StderrHandler(logging.Handler):
    """Prints log messages on ``sys.stderr`` of the moment, so that a progress bar is not torn."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message as ``LEVEL: message``; warnings are notes."""
        say(f"{'note' if record.levelno == logging.WARNING else record.levelname}: {self.format(record)}")


def log_to_stderr(verbose: bool) -> None:
    """Print log messages of this application on stderr: warnings and errors, or everything if ``verbose``."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, handlers=[StderrHandler()], format="%(message)s"
    )


# --- What commands write: checked before the work, so that no result is lost and nothing else is replaced.


def output_file(value: Path | None) -> Path | None:
    """Return the file to write for a path: itself, or the target of a symbolic link.

    Raises:
        UsageError: it exists and is no regular file.
    """
    return _output(value, Path.is_file, "a folder, a device or a pipe; name a regular file")


def output_folder(value: Path | None) -> Path | None:
    """Return the folder to write for a path: itself, or the target of a symbolic link.

    Raises:
        UsageError: it exists and is no folder.
    """
    return _output(value, Path.is_dir, "not a folder; name a folder")


def _output(value: Path | None, fits: Callable[[Path], bool], remedy: str) -> Path | None:
    target = value.resolve() if value is not None and value.is_symlink() else value
    if target is not None and target.exists() and not fits(target):
        raise UsageError(f"{value} is {remedy} to write.")
    return target


# --- What commands read: votes, the held-out votes of an ensemble, and packages of optional extras.


def load_votes(data: str, options: LoadOptions) -> "PreferenceSet":
    """Return the votes that DATA names; a note on stderr counts the rows and votes that were dropped."""
    from pluralign.votes.load import load_preferences

    with progress_bar(f"Reading {data}") as progress:
        preferences = load_preferences(data, options, progress=progress)
    _note_dropped(preferences)
    return preferences


def rater_votes(data: str, column: str, options: LoadOptions) -> "RaterVotes":
    """Return the votes that DATA names with the rater of each; a note on stderr counts what was dropped."""
    from pluralign.votes.raters import load_rater_votes

    with progress_bar(f"Reading {data}") as progress:
        votes = load_rater_votes(data, column, options, progress=progress)
    _note_dropped(votes.preferences)
    if votes.without_rater and is_first_process():
        note(f"{votes.without_rater:,} votes have no rater.")
    return votes


def _note_dropped(preferences: "PreferenceSet") -> None:
    if preferences.dropped and is_first_process():
        dropped = ", ".join(f"{count:,} {kind}" for kind, count in preferences.dropped.items())
        note(f"dropped from {preferences.name}: {dropped}.")


def load_held_out_votes(folder: Path, data: str | None) -> tuple["RewardEnsemble", "HeldOutVotes"]:
    """Return the ensemble in a folder, and the held-out votes that fit saved there or those of DATA with its rewards.

    DATA is read with the options that fit recorded. Its prompts that the ensemble was trained on are left out; a note
    on stderr counts them.
    """
    from pluralign.ensemble.ensemble import RewardEnsemble
    from pluralign.ensemble.held_out import load_held_out, score_held_out

    ensemble = RewardEnsemble.load(folder)
    if data is None:
        return ensemble, load_held_out(folder, ensemble)
    fitted = ensemble.record.data
    preferences = load_votes(data, LoadOptions(**fitted.loaded.options) if fitted and fitted.loaded else LoadOptions())
    with progress_bar("Encoding texts") as progress:
        held_out = score_held_out(ensemble, preferences, progress)
    note_left_out(held_out.left_out)
    return ensemble, held_out


def note_left_out(left_out: "LeftOut") -> None:
    """Say on stderr how many pairs were left out because the ensemble was trained on their prompts."""
    if left_out.sentence and is_first_process():
        note(left_out.sentence + (" evaluate --all includes them." if left_out.prompts else ""))
