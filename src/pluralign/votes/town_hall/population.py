"""The people of the town hall: the features of a response, and the tastes of six camps over them.

The features of a response are its position on four value axes, which depends on stance *and* issue, and its manner,
such as length, tone and kind of argument. An annotator has a taste over the same features; the product is the reward.
"""

from enum import IntEnum

import numpy as np

from pluralign.core.arrays import FloatArray, IntArray
from pluralign.core.errors import UsageError
from pluralign.votes.town_hall.writing import NUMBERED, PROSE, STANCES, SUPPORTS, Attributes, load_issues

# Values of the levels. They make every feature a multiple of 1/128, which keeps rewards exact: see TASTE_GRID.
_POSITION = np.array([1.0, -1.0, 0.25, 0.0])  # by stance: a compromise is a quarter of the way to "for"
_STRENGTH = np.array([1.0, 0.875, 0.75])  # by hedging: a hedged position is weaker
_LENGTH = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
_WARMTH = np.array([1.0, 0.0, 0.0, -1.0])
_FORMALITY = np.array([-0.5, 0.0, 1.0, -0.5])
_HEDGING = np.array([-1.0, 0.0, 1.0])

TASTE_GRID = 2.0**-38
"""Tastes are multiples of this and features of 2^-7, so a reward below 2^8 is exact in 53 bits for every order of
summation. p* and ``annotator_votes`` agree to the last vote and depend neither on block sizes nor on the BLAS."""

CAMP_SHARES = {
    "gardeners": 0.24,
    "ratepayers": 0.20,
    "keepers of custom": 0.18,
    "bridge builders": 0.15,
    "planners": 0.13,
    "free spirits": 0.10,
}
# For each feature: its mean taste in each camp, in the order above, and the standard deviation within a camp.
# Positions divide people far more than manner does, and have larger weights. A single reward cannot express this: the
# manner that decides between two answers of the same stance makes almost nobody prefer the other stance.
# Mean squared distance from p* on 20,000 pairs: constant ½ .074, one soft Bradley-Terry reward on true features .016,
# the six camp means voting with their shares .006, eight random annotators .022.
TASTES: dict[str, tuple[tuple[float, float, float, float, float, float], float]] = {
    "public_spending": ((1.65, -3.85, 0.9, 1.15, 2.65, -0.6), 0.9),
    "change": ((1.1, -0.4, -4.15, 0.1, 3.1, 1.35), 0.9),
    "environment": ((4.0, -1.25, 0.75, 0.5, 1.25, 0.5), 0.9),
    "rules": ((1.25, -0.25, 1.5, 0.25, 2.75, -4.25), 0.9),
    "compromise": ((0.0, 0.0, 0.0, 3.75, 0.0, 0.0), 0.9),
    "undecided": ((-0.85, -0.85, -0.85, -0.35, -0.85, -0.85), 0.2),
    "length": ((0.8, -0.1, 0.65, 0.65, 1.0, -0.1), 0.12),
    "warmth": ((0.2, 0.05, 0.15, 0.3, 0.1, 0.1), 0.12),
    "formality": ((0.0, 0.0, 0.5, 0.0, 0.35, -0.35), 0.08),
    "hedging": ((-0.05, -0.05, -0.05, 0.0, -0.05, -0.1), 0.03),
    "list": ((0.1, 0.6, -0.6, 0.25, 0.95, 0.25), 0.12),
    "numbered": ((0.0, 0.05, 0.0, 0.0, 0.25, 0.0), 0.05),
    "figures": ((0.85, 1.1, 0.6, 0.85, 1.3, 0.85), 0.1),
    "story": ((1.2, 0.6, 1.2, 0.85, 0.5, 0.85), 0.1),
    "fairness": ((0.7, 0.7, 0.7, 1.2, 0.7, 0.7), 0.1),
    "cost": ((0.6, 1.3, 0.85, 0.85, 0.85, 0.85), 0.1),
    "call_to_action": ((-0.35, -0.85, -0.85, -0.85, -0.85, -1.1), 0.1),
    "question_back": ((0.7, 0.5, 0.7, 1.2, 0.7, 0.7), 0.1),
}
FEATURES = tuple(TASTES)
CAMPS = tuple(CAMP_SHARES)


class Stream(IntEnum):
    """Independent random streams. More pairs do not change the people, and more people do not change the texts."""

    TOPICS = 0
    ATTRIBUTES = 1
    WORDING = 2
    PAIRS = 3
    VOTES = 4
    PEOPLE = 5


def draw_population(n_annotators: int) -> tuple[IntArray, FloatArray]:
    """Return the camp and the taste of each annotator. Camps have their shares, up to rounding to whole people."""
    random = random_stream(0, Stream.PEOPLE)  # the same people in every town
    edges = np.cumsum(list(CAMP_SHARES.values()))
    camps = np.searchsorted(edges, (np.arange(n_annotators) + 0.5) / n_annotators * edges[-1]).astype(np.int64)
    camps = random.permutation(camps)
    mean = np.array([camp_means for camp_means, _ in TASTES.values()]).T
    spread = np.array([spread for _, spread in TASTES.values()])
    tastes = mean[camps] + spread * random.standard_normal((n_annotators, len(FEATURES)))
    return camps, np.round(tastes / TASTE_GRID) * TASTE_GRID


def features_of(issue: IntArray, attributes: IntArray) -> FloatArray:
    """Return the features of attribute levels, ``(n_items, n_features)`` in the order of ``FEATURES``, in [-1, 1]."""
    levels = Attributes(*attributes.T)
    loadings = np.array([topic.loadings for topic in load_issues()])
    position = _POSITION[levels.stance] * _STRENGTH[levels.hedging]
    is_stance = [levels.stance == STANCES.index(name) for name in ("compromise", "undecided")]
    is_support = [levels.support == SUPPORTS.index(name) for name in ("figures", "story", "fairness", "cost")]
    style = [_LENGTH[levels.length], _WARMTH[levels.tone], _FORMALITY[levels.tone], _HEDGING[levels.hedging]]
    is_list = [levels.structure != PROSE, levels.structure == NUMBERED]
    manner = [*is_stance, *style, *is_list, *is_support, levels.call, levels.question]
    return np.column_stack([position[:, None] * loadings[issue], *manner]).astype(np.float64)


def random_stream(seed: int, *key: Stream) -> np.random.Generator:
    """Return the random generator of a stream."""
    check_at_least("seed", seed, 0)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise UsageError unless a value is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {value!r}.")
