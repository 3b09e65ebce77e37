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
from pluralign.core.json_values import JsonObject, to_json
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

    @property
    def member(self) -> int | None:
        """The member that stands for the camp, or None.

        It is the closest member, if it agrees with the camp significantly more often than soft BT does.
        """
        return self.closest if self.gain.low > 0 else None

    def to_json(self) -> JsonObject:
        """Return the result with the member that stands for the camp."""
        return {**to_json(self), "member": self.member}


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

    def sentence(self) -> str:
        """Return the result in one sentence."""
        return (
            f"{_percent(self.better_than_soft_bt)} of people agree more often with their closest member than with "
            f"soft BT. Mean agreement: {_decimals(self.closest_member)} with the closest member, "
            f"{_decimals(self.soft_bt)} with soft BT, {_decimals(self.closest_camp)} with the closest true camp."
        )


@dataclass(frozen=True)
class CampStudy:
    """Members against the camps and the people of a town hall."""

    camps: list[CampResult]
    """In the order of the town hall; camps without people are left out."""
    people: PeopleResult
    weights: tuple[float, ...]
    """Of the members, ``(k,)``."""
    train_pairs: int
    """Number of pairs that the ensemble was trained on."""
    pairs: int
    """Number of held-out pairs."""
    prompts: int
    """Number of held-out prompts."""

    @property
    def represented(self) -> int:
        """Number of camps that a member stands for."""
        return sum(camp.member is not None for camp in self.camps)

    def sentences(self) -> Iterator[str]:
        """Yield the results: each camp with a member, the other camps together, then people."""
        for camp in self.camps:
            if camp.member is not None:
                yield (
                    f"Member {camp.member} stands for the {camp.camp}: it agrees with them on "
                    f"{_percent(camp.agreement[camp.member])} of pairs, soft BT on {_percent(camp.soft_bt)}."
                )
        others = [camp for camp in self.camps if camp.member is None]
        if others:
            shares = [(one.camp, _decimals(one.agreement[one.closest], 2), _decimals(one.soft_bt, 2)) for one in others]
            names = ", ".join(f"{camp} ({closest}, soft BT {single})" for camp, closest, single in shares)
            yield f"No member stands for these camps (agreement of the closest member): {names}."
        yield self.people.sentence()

    def to_json(self) -> JsonObject:
        """Return the study as plain values."""
        return {**to_json(self), "represented": self.represented}


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
    prompts = town.preferences.prompt_index[test_rows]
    sizes = np.bincount(town.camps, minlength=len(town.camp_names))
    present = np.flatnonzero(sizes)
    rewards, people = town.camp_rewards()[:, present], town.preferences
    camp_votes = votes_from_rewards(rewards[people.a_index], rewards[people.b_index])
    level = 1 - SIGNIFICANCE / len(present)
    camps = []
    for camp, own in zip(present.tolist(), camp_votes.T, strict=True):
        closest = int(np.argmax(vote_agreement(votes[~test_rows], own[~test_rows, None])))
        sign, single, of_camp = 2 * own[test_rows] - 1, soft_bt[test_rows], own[test_rows, None]
        agreement = tuple(vote_agreement(votes[test_rows], of_camp)[:, 0].tolist())
        of_single = float(vote_agreement(single[:, None], of_camp)[0, 0])
        gain = clustered_interval(sign * (votes[test_rows, closest] - single), prompts, level)
        name, size, share = town.camp_names[camp], int(sizes[camp]), float(sizes[camp] / sizes.sum())
        camps.append(CampResult(name, size, share, agreement, of_single, closest, gain))
    of_people = study_people(town, test_rows, votes, camp_votes, soft_bt)
    alpha, trained_on = tuple(np.asarray(weights, dtype=np.float64).tolist()), int(np.count_nonzero(~test_rows))
    return CampStudy(camps, of_people, alpha, trained_on, len(prompts), len(np.unique(prompts)))


def study_people(
    town: TownHall, test_rows: Mask, votes: FloatArray, camp_votes: FloatArray, soft_bt: FloatArray
) -> PeopleResult:
    """Compare the votes of members with those of every person.

    Arguments as in ``study_camps``, with the votes of the true camp rewards on all pairs, ``(n_pairs, n_camps)``.
    """
    voters = np.column_stack([votes, camp_votes, soft_bt])
    k, rows = votes.shape[1], np.flatnonzero(test_rows)
    chosen_on = _agreement_with_people(town, np.flatnonzero(~test_rows), voters)
    member, camp = chosen_on[:, :k].argmax(axis=1), chosen_on[:, k:-1].argmax(axis=1)
    measured, everyone = _agreement_with_people(town, rows, voters), np.arange(len(town.tastes))
    closest, single, of_camp = measured[everyone, member], measured[:, -1], measured[everyone, k + camp]
    blocks = _people_in_blocks(town, rows)
    gains = [np.mean(signs * (votes[block][:, member] - soft_bt[block, None]), axis=1) for block, signs in blocks]
    gain, better = clustered_interval(np.concatenate(gains), town.preferences.prompt_index[rows]), closest > single
    own, soft, camps = float(closest.mean()), float(single.mean()), float(of_camp.mean())
    return PeopleResult(len(everyone), own, soft, camps, gain, float(np.mean(better)))


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


def _decimals(value: float, digits: int = 3) -> str:
    """Return a share without its leading zero."""
    return f"{value:.{digits}f}".removeprefix("0")


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
