"""Descriptions of members that a language model wrote, with the checks that decide whether they are shown; on disk."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from pluralign.core.errors import DataError
from pluralign.core.files import atomic_write
from pluralign.core.json_values import from_json, to_json
from pluralign.ensemble.folder import (
    DESCRIPTIONS_FILE,
    description_hash,
    is_intact,
    parse_json,
    read_description,
    sealed,
)
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
    path = Path(folder) / DESCRIPTIONS_FILE
    value = sealed({"ensemble": description_hash(read_description(Path(folder))), **to_json(found)})
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False), encoding="utf-8")
    return path


def load_descriptions(folder: str | os.PathLike[str]) -> Descriptions | None:
    """Read descriptions from the folder of an ensemble; None if there are none, or if they are of another fit."""
    path = Path(folder) / DESCRIPTIONS_FILE
    if not path.is_file():
        return None
    try:
        value = parse_json(path.read_bytes())
        if value["ensemble"] != description_hash(read_description(Path(folder))):
            return None
        if not is_intact(value):
            raise ValueError("its hash differs")
        return from_json(Descriptions, value)
    except (AttributeError, KeyError, TypeError, ValueError):
        remedy = "run pluralign profile --describe again, or delete the file"
        raise DataError("it cannot be read", file=str(path), remedy=remedy) from None
