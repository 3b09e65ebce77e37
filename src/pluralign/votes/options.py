"""How votes are read: the options of every command that takes DATA."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

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
