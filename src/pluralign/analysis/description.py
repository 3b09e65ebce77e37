"""Descriptions of members that a language model wrote, with the checks that decide whether they are shown; on disk."""

import os
from dataclasses import dataclass
from pathlib import Path

from pluralign.core.json_values import to_json
from pluralign.ensemble.folder import DESCRIPTIONS_FILE, load_beside, save_beside
from pluralign.models.judge import JudgeUsage
from pluralign.theory.intervals import Interval


@dataclass(frozen=True)
class Check:
    """Whether a judge that knows only the description predicts the member's votes on prompts that did not write it."""

    accuracy: Interval
    """Share of the pairs on which it predicts the member's vote."""
    p_value: float
    """Of a one-sided t-test by prompt that ``accuracy`` is above ½."""
    specific: Interval
    """Mean agreement with the member minus that with the other members: 0 for a description that fits everybody."""
    specific_p_value: float
    """Of a one-sided t-test by prompt that ``specific`` is above 0."""
    pairs: int
    prompts: int


@dataclass(frozen=True)
class Description:
    """Name and sentence for one member, written by a language model."""

    member: int
    name: str
    sentence: str
    shown: bool
    """Whether it passed the check."""
    reason: str
    """Why it is not shown; empty if it is."""
    model: str
    check: Check | None
    """None if the model wrote no name and sentence."""

    @property
    def evidence(self) -> str:
        """The result of the check in words."""
        if self.check is None:
            return self.reason
        found = self.check.accuracy
        return (
            f"written by {self.model}; predicts {found.mean:.0%} of its votes on {self.check.pairs:,} other pairs "
            f"(95 % interval {found.low:.0%} to {found.high:.0%}; chance 50%)"
        )


@dataclass(frozen=True)
class Descriptions:
    """The descriptions of all members, and what they cost."""

    members: tuple[Description, ...]
    usage: JudgeUsage


def save_descriptions(found: Descriptions, folder: str | os.PathLike[str]) -> Path:
    """Write descriptions into the folder of their ensemble, for reports and the page."""
    return save_beside(Path(folder), DESCRIPTIONS_FILE, to_json(found))


def load_descriptions(folder: str | os.PathLike[str]) -> Descriptions | None:
    """Read descriptions from the folder of an ensemble; None if there are none, or if they are of another fit."""
    remedy = "run pluralign profile --describe again, or delete the file"
    return load_beside(Path(folder), DESCRIPTIONS_FILE, Descriptions, remedy)
