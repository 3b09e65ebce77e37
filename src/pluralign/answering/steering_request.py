"""What a steerable request says about its user: a member's number, a preference in words, or the user's choices."""

from collections.abc import Sequence

from pluralign.analysis.profiles import Profile
from pluralign.answering.steering import People, ScoredChoices, Steering, steer_by_choices, steer_to_member
from pluralign.answering.steering_meaning import MeaningMatch, steer_by_meaning
from pluralign.answering.steering_words import names_a_trait, steer_by_words
from pluralign.core.arrays import FloatArray
from pluralign.core.errors import UsageError

FEW_FOLLOWERS = 0.1
"""Prior probability that a person follows a member, below which choices and words change the answer little."""
FITTED_WITHOUT_IDS = (
    "votes without rater ids do not show whether members are people, so your choices and words change the answer "
    "little; fit with --raters to steer"
)


def find_steering(
    people: People,
    *,
    member: int | None = None,
    like: str = "",
    choices: ScoredChoices | None = None,
    profiles: Sequence[Profile] = (),
    match: MeaningMatch | None = None,
    seed: int = 0,
) -> tuple[Steering, FloatArray | None]:
    """Return what is known about a user, and the beliefs about people that follow from choices or from a meaning.

    There are no beliefs where one member was named, or matched by words of the list: then it answers.

    Args:
        people: the members as people.
        member: the number of a member.
        like: a preference in words.
        choices: pairs that the user voted on.
        profiles: the members' cards, for ``like``.
        match: the members that ``like`` describes by its meaning.
        seed: of the draws behind a match by words.

    Raises:
        UsageError: unless exactly one of ``member``, ``like`` and ``choices`` is given.
    """
    if (member is not None) + bool(like) + (choices is not None) != 1:
        raise UsageError("steerable mode needs one of: a member, a preference in words, or your own choices.")
    if choices is not None:
        return steer_by_choices(choices, people), people.beliefs(choices)
    if like and match is not None and not (match.unclear and names_a_trait(like, profiles)):
        return steer_by_meaning(match, people, profiles), people.believed(match.posterior)
    if member is not None:
        return steer_to_member(member, len(people.weights)), None
    return steer_by_words(like, profiles, seed), None


def steering_notes(people: People) -> tuple[str, ...]:
    """Return a note if choices and words can change the answer only little.

    Example:
        >>> import numpy as np
        >>> from pluralign.theory.posterior import ChoiceModel
        >>> len(steering_notes(People(np.ones(1), 1.0, 0.0, ChoiceModel(people=0.02))))
        1
        >>> steering_notes(People(np.ones(1), 1.0, 0.0, ChoiceModel(people=0.97, source="raters")))
        ()
    """
    unknown = people.model.source != "raters" and people.model.people < FEW_FOLLOWERS
    return (FITTED_WITHOUT_IDS,) if unknown else ()
