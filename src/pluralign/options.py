"""Every dial with its default and its help, once for Python and the command line.

Apart from the functions they steer, because ``pluralign --help`` shows them without importing numpy or torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from pluralign.errors import UsageError, did_you_mean

TieRule: TypeAlias = Literal["drop", "half"]
Repeats: TypeAlias = Literal["count", "first"]
TIE_RULES: tuple[TieRule, ...] = ("drop", "half")


@dataclass(frozen=True)
class LoadOptions:
    """How votes are read."""

    ties: TieRule = field(
        default="drop", metadata={"help": "Drop ties as the paper does, or count each as half a vote for both sides."}
    )
    min_votes: int | None = field(
        default=None,
        metadata={
            "help": "Least votes a pair must have; unless given 2, or 1 for chosen/rejected rows and most known sets."
        },
    )
    repeats: Repeats = field(
        default="count", metadata={"help": "Count every vote, or only an annotator's first on a pair."}
    )
    skip_bad: bool = field(
        default=False, metadata={"help": "Drop rows that cannot be used, and say how many of which kind."}
    )
    rename: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"help": "Read a column under another name: --rename prompt=question. Repeatable."},
    )


def with_changes(options: LoadOptions, changes: Mapping[str, Any]) -> LoadOptions:
    """Return ``options`` with some fields changed by name; an unknown name is answered with the nearest known one."""
    known = [dial.name for dial in fields(options)]
    for name in changes:
        if name not in known:
            raise UsageError(f"there is no option {name!r}; {did_you_mean(name, known)}.")
    return replace(options, **changes)
