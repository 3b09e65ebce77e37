"""The questions a town decides on: 48 issues, their positions on four value axes, and the arguments about them.

The issues are in ``issues.toml``. Each has arguments for and against it, compromises, open questions, short stories and
a price, as clauses from which ``writing`` builds sentences.
"""

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources

from pluralign.core.json_values import from_json

VALUE_AXES = ("public_spending", "change", "environment", "rules")
"""Axes of a position: spend public money or save it; change or tradition; nature first or other things first; common
rules or personal freedom. Loadings are multiples of 1/4."""


@dataclass(frozen=True)
class Issue:
    """One question, for example a bus lane, with the arguments about it."""

    verb: str
    """What the town would do, as "turn/turning": base form and -ing form."""
    rest: str
    """The rest of that phrase, "one lane of {place} into a bus lane"."""
    thing: str
    """The same as a noun, "the bus lane on {place}"."""
    kind: str
    """Kind of place it is about, a key of ``names.PLACES``."""
    loadings: tuple[float, float, float, float]
    """Position of "for" on each of ``VALUE_AXES``, each in [-1, 1]. "Against" is the opposite position."""
    money: int
    """Cost in thousands of pounds; negative if it saves money."""
    pros: tuple[str, ...]
    """Reasons for it, as clauses."""
    cons: tuple[str, ...]
    """Reasons against it, as clauses."""
    middle: tuple[str, ...]
    """Compromises, as verb phrases in base form."""
    unknown: tuple[str, ...]
    """Open questions, as indirect questions."""
    gains: str
    """People who gain, a plural noun phrase."""
    loses: str
    """People who lose, a plural noun phrase."""
    story_for: tuple[str, ...]
    """Short stories of a person who would benefit."""
    story_against: tuple[str, ...]
    """Short stories of a person who would suffer."""


@functools.cache
def load_issues() -> tuple[Issue, ...]:
    """Return all issues, in the order of the file. The file is read once.

    Example:
        >>> load_issues()[0].thing
        'the bus lane on {place}'
    """
    text = resources.files(__package__).joinpath("issues.toml").read_text(encoding="utf-8")
    return tuple(from_json(Issue, row) for row in tomllib.loads(text)["issue"])
