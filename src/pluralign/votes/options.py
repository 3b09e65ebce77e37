"""Options for reading votes, shared by all commands that take DATA."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pluralign.core.options import check_choices

TieRule: TypeAlias = Literal["drop", "half"]
Repeats: TypeAlias = Literal["count", "first"]

TIE_RULES: tuple[TieRule, ...] = ("drop", "half")


@dataclass(frozen=True)
class LoadOptions:
    """Options for reading votes."""

    ties: TieRule = field(
        default="drop", metadata={"help": "Drop ties, as in the paper, or count each as half a vote for both sides."}
    )
    min_votes: int | None = field(
        default=None,
        metadata={"help": "Minimum votes per pair (default: 2, or 1 for chosen/rejected rows and most known sets)."},
    )
    repeats: Repeats = field(
        default="count", metadata={"help": "Count every vote, or only the first vote of an annotator on a pair."}
    )
    skip_bad: bool = field(default=False, metadata={"help": "Drop invalid rows and report how many of each kind."})
    rename: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"help": "Read a column of another name: --rename prompt=question. Repeatable."},
    )

    def __post_init__(self) -> None:
        check_choices(self, {"ties": TieRule, "repeats": Repeats})
