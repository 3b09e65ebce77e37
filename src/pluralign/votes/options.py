"""Options for reading votes, shared by all commands that take DATA."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from pluralign.core.errors import UsageError
from pluralign.core.options import check_choices

TieRule: TypeAlias = Literal["drop", "half", "fixed"]
Repeats: TypeAlias = Literal["count", "first"]
SplitRule: TypeAlias = Literal["official", "prompts"]

TIE_RULES: tuple[TieRule, ...] = get_args(TieRule)


@dataclass(frozen=True)
class LoadOptions:
    """Options for reading votes."""

    ties: TieRule = field(
        default="drop",
        metadata={
            "help": "Drop ties, as in the paper; count each as half a vote for both sides; or fixed: shares of all "
            "votes, with ties against the response that has more votes, as the paper's shares of MultiPref."
        },
    )
    min_votes: int | None = field(
        default=None,
        metadata={"help": "Minimum votes per pair (default: 2, or 1 for chosen/rejected rows and most known sets)."},
    )
    repeats: Repeats = field(
        default="count", metadata={"help": "Count every vote, or only the first vote of an annotator on a pair."}
    )
    split: SplitRule = field(
        default="official",
        metadata={
            "help": "Use the official split if the data has one, or ignore it and hold out a share of the prompts."
        },
    )
    skip_bad: bool = field(default=False, metadata={"help": "Drop invalid rows and report how many of each kind."})
    rename: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"help": "Read a column of another name: --rename prompt=question. Repeatable."},
    )
    max_line_mb: int = field(
        default=16, metadata={"help": "Maximum length of a line of a text file, in MB.", "command_line": False}
    )
    max_expansion: int = field(
        default=200,
        metadata={
            "help": "Maximum size of gzip data after decompression, as a multiple of its size.",
            "command_line": False,
        },
    )

    def __post_init__(self) -> None:
        check_choices(self, {"ties": TieRule, "repeats": Repeats, "split": SplitRule})
        if not isinstance(self.rename, Mapping):
            raise UsageError(f"rename must be a dict such as {{'prompt': 'question'}}, not {self.rename!r}.")
        theirs = list(self.rename.values())
        if twice := [name for name in theirs if theirs.count(name) > 1]:
            raise UsageError(f"--rename must not give the column {twice[0]!r} two names.")
        for name in ("max_line_mb", "max_expansion"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}.")

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name."""
        defaults = LoadOptions()
        return {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if getattr(self, option.name) != getattr(defaults, option.name)
        }


@dataclass(frozen=True)
class Loaded:
    """How votes were read, to read the same votes again. It holds no rater ids."""

    source: str = ""
    """DATA of the command line. Empty in records of version 0.1, which did not store it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The fields of ``LoadOptions`` that were not at their defaults."""
    raters: str | None = None
    """The column with the rater of each vote, if raters were read."""
