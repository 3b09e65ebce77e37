"""Options for reading votes, shared by all commands that take DATA."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from pluralign.core.errors import UsageError
from pluralign.core.options import changed_options, check_choices, option

TieRule: TypeAlias = Literal["drop", "half", "fixed"]
Repeats: TypeAlias = Literal["count", "first"]
SplitRule: TypeAlias = Literal["official", "prompts"]

TIE_RULES: tuple[TieRule, ...] = get_args(TieRule)


@dataclass(frozen=True)
class LoadOptions:
    """Options for reading votes."""

    ties: TieRule = option(
        "drop",
        "Drop ties, as in the paper; count each as half a vote for both sides; or fixed: shares of all "
        "votes, with ties against the response that has more votes, as the paper's shares of MultiPref.",
    )
    min_votes: int | None = option(
        None, "Minimum votes per pair (default: 2, or 1 for chosen/rejected rows and most known sets)."
    )
    repeats: Repeats = option("count", "Count every vote, or only the first vote of an annotator on a pair.")
    split: SplitRule = option(
        "official", "Use the official split if the data has one, or ignore it and hold out a share of the prompts."
    )
    skip_bad: bool = option(False, "Drop invalid rows and report how many of each kind.")
    rename: Mapping[str, str] = field(
        default_factory=dict, metadata={"help": "Read a column of another name: --rename prompt=question. Repeatable."}
    )

    def __post_init__(self) -> None:
        check_choices(self, {"ties": TieRule, "repeats": Repeats, "split": SplitRule})
        if not isinstance(self.rename, Mapping):
            raise UsageError(f"rename must be a dict such as {{'prompt': 'question'}}, not {self.rename!r}.")
        theirs = list(self.rename.values())
        if twice := [name for name in theirs if theirs.count(name) > 1]:
            raise UsageError(f"rename must not give the column {twice[0]!r} two names.")


@dataclass(frozen=True)
class Loaded:
    """How votes were read, to read the same votes again. It holds no rater ids."""

    source: str = ""
    """DATA of the command line."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The fields of ``LoadOptions`` that were not at their defaults."""
    raters: str | None = None
    """The column with the rater of each vote, if raters were read."""

    @classmethod
    def of(cls, source: object, options: LoadOptions, raters: str | None = None) -> "Loaded | None":
        """Return how a source is read; None for data without a name, which cannot be read again."""
        if not isinstance(source, str | os.PathLike):
            return None
        return cls(str(source), {name: getattr(options, name) for name in changed_options(options)}, raters)
