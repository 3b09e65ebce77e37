"""Which camps of the town hall the members stand for, and how well the closest member represents each person.

Only the town hall has this: the taste of every person is known, so agreement is counted on all pairs, not on a few
votes per person. The closest member of a camp or of a person is chosen on training prompts and measured on held-out
prompts. This file decides when a member stands for a camp: see ``CampResult.member``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import Array, FloatArray, IntArray, Mask
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.learning.measure import baselines_of
from pluralign.learning.pairs import Differences, first_columns, hard_votes
from pluralign.theory.calibration import votes_from_rewards
from pluralign.theory.intervals import Interval, clustered_interval
from pluralign.theory.kendall import vote_agreement
from pluralign.votes.preferences import texts_of
from pluralign.votes.town_hall.town_hall import TownHall

SIGNIFICANCE = 0.05
"""Probability of a false claim about any camp."""
CHANCE = 0.5
"""Agreement of a reward that is unrelated to the camp."""
_PAIRS_PER_BLOCK = 2048


@dataclass(frozen=True)
class CampResult:
    """How often the members agree with one camp on held-out prompts."""

    camp: str
    people: int
    share: float
    """Share of the population."""
    agreement: tuple[float, ...]
    """Of each member with the camp, ``(k,)``."""
    soft_bt: float
    """Agreement of one soft Bradley–Terry reward with the camp."""
    closest: int
    """The member with the highest agreement on training prompts."""
    gain: Interval
    """Agreement of the closest member − that of soft BT, with an interval corrected for the number of camps."""
    member: int | None
    """The member that stands for the camp: the closest one, if it agrees with the camp significantly more often than
    soft BT does."""


@dataclass(frozen=True)
class PeopleResult:
    """How often rewards agree with each person on held-out prompts: means over all people."""

    people: int
    closest_member: float
    soft_bt: float
    closest_camp: float
    """Agreement of the closest true camp reward, chosen in the same way: an upper reference."""
    gain: Interval
    """``closest_member`` − ``soft_bt``, with its 95 % interval over prompts."""
    better_than_soft_bt: float
    """Share of people with whom the closest member agrees more often than soft BT does."""


@dataclass(frozen=True)
class CampStudy:
    """Members against the camps and the people of a town hall."""

    camps: list[CampResult]
    """In the order of the town hall; camps without people are left out."""
    represented: int
    """Number of camps that a member stands for."""
    people: PeopleResult
    weights: tuple[float, ...]
    """Of the members, ``(k,)``."""
    train_pairs: int
    """Number of pairs that the ensemble was trained on."""
    pairs: int
    """Number of held-out pairs."""
    prompts: int
    """Number of held-out prompts."""

    def sentences(self) -> Iterator[str]:
        """Yield the results: each camp with a member, the other camps together, then people."""
        for camp in self.camps:
            if camp.member is not None:
                yield (
                    f"Member {camp.member} stands for the {camp.camp}: it agrees with them on "
                    f"{camp.agreement[camp.member]:.0%} of pairs, soft BT on {camp.soft_bt:.0%}."
                )
        others = [one for one in self.camps if one.member is None]
        if others:
            shares = [f"{one.camp} ({one.agreement[one.closest]:.0%}, soft BT {one.soft_bt:.0%})" for one in others]
            yield f"No member stands for these camps (agreement of the closest member): {', '.join(shares)}."
        people = self.people
        yield (
            f"{people.better_than_soft_bt:.0%} of people agree more often with their closest member than with soft BT. "
            f"Mean agreement: {people.closest_member:.1%} with the closest member, {people.soft_bt:.1%} with soft BT, "
            f"{people.closest_camp:.1%} with the closest true camp."
        )


def study_camps(
    town: TownHall, test_rows: Mask, votes: FloatArray, weights: npt.ArrayLike, soft_bt: FloatArray
) -> CampStudy:
    """Compare the votes of members with those of the camps and the people of a town hall.

    Args:
        town: the town hall.
        test_rows: which pairs are held out, ``(n_pairs,)``. The other pairs choose closest members.
        votes: votes of the members on all pairs, ``(n_pairs, k)``.
        weights: of the members, ``(k,)``.
        soft_bt: votes of the soft Bradley–Terry reward on all pairs, ``(n_pairs,)``.
    """
    people, prompts = town.preferences, town.preferences.prompt_index[test_rows]
    sizes = np.bincount(town.camps, minlength=len(town.camp_names))
    present = np.flatnonzero(sizes)
    rewards = town.camp_rewards()[:, present]
    camp_votes = votes_from_rewards(rewards[people.a_index], rewards[people.b_index])
    voters = np.column_stack([votes, soft_bt])
    chosen_on, measured = (vote_agreement(voters[rows], camp_votes[rows]) for rows in (~test_rows, test_rows))
    camps = []
    for place, camp in enumerate(present.tolist()):
        closest, sign = int(chosen_on[:-1, place].argmax()), 2 * camp_votes[test_rows, place] - 1
        ahead = sign * (votes[test_rows, closest] - soft_bt[test_rows])
        gain = clustered_interval(ahead, prompts, 1 - SIGNIFICANCE / len(present))
        *agreement, of_single = measured[:, place].tolist()
        found = town.camp_names[camp], int(sizes[camp]), float(sizes[camp] / sizes.sum())
        member = closest if gain.low > 0 else None
        camps.append(CampResult(*found, tuple(agreement), of_single, closest, gain, member))
    return CampStudy(
        camps=camps,
        represented=sum(camp.member is not None for camp in camps),
        people=_study_people(town, test_rows, votes, camp_votes, soft_bt),
        weights=tuple(np.asarray(weights, dtype=np.float64).tolist()),
        train_pairs=int(np.count_nonzero(~test_rows)),
        pairs=len(prompts),
        prompts=len(np.unique(prompts)),
    )


def _study_people(
    town: TownHall, test_rows: Mask, votes: FloatArray, camp_votes: FloatArray, soft_bt: FloatArray
) -> PeopleResult:
    """Compare the votes of members, and of the true camp rewards ``(n_pairs, n_camps)``, with those of every person."""
    voters = np.column_stack([votes, camp_votes, soft_bt])
    k, rows, everyone = votes.shape[1], np.flatnonzero(test_rows), np.arange(len(town.tastes))
    chosen_on = _agreement_with_people(town, np.flatnonzero(~test_rows), voters)
    measured = _agreement_with_people(town, rows, voters)
    member = chosen_on[:, :k].argmax(axis=1)
    closest, single = measured[everyone, member], measured[:, -1]
    of_camp = measured[everyone, k + chosen_on[:, k:-1].argmax(axis=1)]
    blocks = _people_in_blocks(town, rows)
    gains = [np.mean(signs * (votes[block][:, member] - soft_bt[block, None]), axis=1) for block, signs in blocks]
    gain = clustered_interval(np.concatenate(gains), town.preferences.prompt_index[rows])
    own, soft, camps = (float(of.mean()) for of in (closest, single, of_camp))
    return PeopleResult(len(everyone), own, soft, camps, gain, float(np.mean(closest > single)))


def camps_of_ensemble(
    town: TownHall, test_rows: Mask, ensemble: RewardEnsemble, features: Array | None = None
) -> CampStudy:
    """Return ``study_camps`` of an ensemble and of the soft Bradley–Terry reward that was fitted with it.

    Args:
        town: the town hall that it was fitted to.
        test_rows: which pairs were held out, ``(n_pairs,)``.
        ensemble: the ensemble.
        features: raw features of every response, in the order of ``town.preferences.responses``; encoded by default.
    """
    votes, single = hard_votes_of(town, ensemble, features)
    return study_camps(town, test_rows, votes, ensemble.weights, single)


def hard_votes_of(
    town: TownHall, ensemble: RewardEnsemble, features: Array | None = None
) -> tuple[FloatArray, FloatArray]:
    """Return the votes of the members ``(n_pairs, k)`` and of soft BT ``(n_pairs,)`` on every pair of a town hall."""
    people, items = town.preferences, town.preferences.items()
    raw = ensemble.features(texts_of(people)) if features is None else features
    pairs = Differences(ensemble.members.inputs(raw), items.a, items.b)
    soft_bt = baselines_of(ensemble)["soft_bt"].arrays["theta"]
    on_frozen = first_columns(pairs, len(soft_bt))
    return hard_votes(pairs, ensemble.members.theta), hard_votes(on_frozen, soft_bt[:, None])[:, 0]


def _people_in_blocks(town: TownHall, rows: IntArray) -> Iterator[tuple[IntArray, FloatArray]]:
    """Yield pairs in blocks, and whether each person prefers a (1) or b (−1), ``(n_block, n_people)``."""
    a, b = town.preferences.a_index, town.preferences.b_index
    for start in range(0, len(rows), _PAIRS_PER_BLOCK):
        block = rows[start : start + _PAIRS_PER_BLOCK]
        difference = (town.features[a[block]] - town.features[b[block]]) @ town.tastes.T
        yield block, np.where(difference > 0, 1.0, -1.0)


def _agreement_with_people(town: TownHall, rows: IntArray, voters: FloatArray) -> FloatArray:
    """Return ``agreement`` of every person with each voter on some pairs, ``(n_people, n_voters)``."""
    total = np.zeros((len(town.tastes), voters.shape[1]))
    for block, signs in _people_in_blocks(town, rows):
        total += signs.T @ (2 * voters[block] - 1)
    return np.asarray(0.5 + 0.5 * total / len(rows))
