"""The data that the page shows of an ensemble, computed once when the server starts.

This module chooses the held-out pairs that are shown and the length of their texts. The figures are computed in
``evaluation`` and ``analysis``; the page's layout is in ``static/``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pluralign.analysis.leans import CARES_LESS, PREFERS, Lean, sample_prompts
from pluralign.analysis.member_rankings import Diversity, held_out_candidates, measure_diversity
from pluralign.analysis.profiles import (
    Distinguishing,
    Profile,
    Typical,
    member_name,
    member_profiles,
    unnamed_reason,
)
from pluralign.analysis.traits import KEYS, TRAITS
from pluralign.core.arrays import FloatArray
from pluralign.core.json_values import to_json
from pluralign.core.random_streams import EXAMPLE_PAIRS, random_stream
from pluralign.core.text import shortened
from pluralign.core.types import Level
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.headline import standing
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import Evaluation, Figures, FitRecord, worse_than_chance
from pluralign.evaluation.comparison import Prediction, Verdict, comparison, undecided_sentence, verdicts
from pluralign.evaluation.groupings import DEFAULT_GROUPINGS
from pluralign.evaluation.groups import Group, WorstGroup, judge_groups
from pluralign.evaluation.representation import Representation
from pluralign.server.page_examples import Example, VotedPair, example_prompts, steering_pairs, voted_pair
from pluralign.server.page_representation import PageRepresentation, page_representation
from pluralign.theory.intervals import clustered_interval
from pluralign.theory.reliability import reliability
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.summary import inspect

TEXT_LENGTH = 1000
"""Longer texts are cut where they are only displayed."""
PAIRS_PER_POINT = 5
MAX_CHARACTERS = 2_000_000
"""Maximum amount of text to analyse at startup, about five seconds of work; larger sets are sampled by prompt."""
LEANS_SHOWN = 5


@dataclass(frozen=True)
class VoteCounts:
    """Size of the held-out votes."""

    pairs: int
    prompts: int
    votes: int
    votes_per_pair: float
    majority_share: float


@dataclass(frozen=True)
class ComparedPrediction(Prediction):
    """A row of the comparison, with the ensemble's standing against it."""

    standing: str | None
    """``ahead of``, ``behind`` or ``level with``."""


@dataclass(frozen=True)
class HistoryPoint:
    """Held-out Brier score of the ensemble of one size."""

    k: int
    brier: float
    brier_corrected: float


@dataclass(frozen=True)
class History:
    """Held-out Brier score against the number of members, with the baselines to compare it with."""

    points: list[HistoryPoint]
    noise: float | None
    floor: float | None
    soft_bt: float | None
    constant_half: float | None


@dataclass(frozen=True)
class Bounds:
    """The ends of an interval."""

    low: float
    high: float


@dataclass(frozen=True)
class PredictedPair(VotedPair):
    """A pair with the predicted share preferring response a."""

    prob_hat: float


@dataclass(frozen=True)
class ReliabilityPoint:
    """One bin of the reliability curve."""

    predicted: float
    observed: float
    interval: Bounds | None
    count: int
    pairs: list[PredictedPair]
    """A random sample of its pairs."""


@dataclass(frozen=True)
class CardLean:
    """A claim on a member's card, with the shares of pairs that agree with it."""

    trait: str
    claim: str
    relative: float
    pairs: int
    share: float
    share_of_all: float
    """The same for all members together."""
    share_of_people: float


@dataclass(frozen=True)
class MemberCard:
    """One member, as the page shows it."""

    member: int
    name: str
    weight: float
    disagreement: float | None
    far: bool
    """Whether it disagrees with people more than chance."""
    description: str
    leans: list[CardLean]
    likes: list[str]
    dislikes: list[str]
    typical: list[Typical]
    distinguishing: list[Distinguishing]


@dataclass(frozen=True)
class ReadSample:
    """Number of prompts whose texts were analysed, and number of all prompts."""

    prompts: int
    of: int


@dataclass(frozen=True)
class PageData:
    """Everything that the page shows of an ensemble. Undefined numbers are NaN here and null in JSON."""

    name: str
    k: int
    weights: list[float]
    undecided: float
    """Share of votes that no member explains."""
    undecided_note: str
    """The same in words; empty if it is 0."""
    level: Level
    temperature: float
    method: str | None
    data: Mapping[str, str | int]
    """Size and fingerprint of the votes of the fit; empty if unknown."""
    votes: VoteCounts | None
    test: Figures | None
    verdicts: list[Verdict]
    comparison: list[ComparedPrediction]
    history: History | None
    reliability: list[ReliabilityPoint]
    groups: Mapping[str, list[Group]]
    worst_group: WorstGroup | None
    members: list[MemberCard]
    unnamed: str
    """Why some members have no name; empty if all have one."""
    disagreement: list[float]
    tau: Diversity | None
    read: ReadSample | None
    examples: list[Example]
    steering_pairs: list[VotedPair]
    representation: PageRepresentation | None
    """How well individuals are represented; None if it was not measured."""
    warnings: list[str]


def collect_page_data(
    ensemble: RewardEnsemble,
    held_out: HeldOutVotes | None,
    *,
    name: str,
    profiles: Sequence[Profile] | None = None,
    representation: Representation | None = None,
    max_characters: int = MAX_CHARACTERS,
) -> PageData:
    """Return everything that the page shows of an ensemble.

    Args:
        ensemble: the one that is served.
        held_out: held-out votes with its rewards; without them the page shows only the ensemble's own record.
        name: title of the page.
        profiles: the members' cards (``page_profiles``); computed if not given.
        representation: how well individuals are represented, from ``load_representation``.
        max_characters: traits, words and rankings are measured on at most this much text.

    Example:
        >>> from pluralign import fit, town_hall
        >>> data = collect_page_data(fit(town_hall(200).preferences, k=2, encoder="none"), None, name="town")
        >>> data.name, data.k, [card.name for card in data.members], data.examples
        ('town', 2, ['Member 0', 'Member 1'], [])
    """
    data = replace(_from_record(ensemble, name), representation=page_representation(representation))
    if held_out is not None:
        profiles = page_profiles(ensemble, held_out, max_characters) if profiles is None else profiles
        data = _with_held_out(data, ensemble, held_out, profiles, max_characters)
    return replace(data, warnings=[_warning(card) for card in data.members if card.far])


def page_profiles(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, max_characters: int = MAX_CHARACTERS
) -> list[Profile]:
    """Return the members' cards; traits and words are measured on at most ``max_characters`` of text."""
    return member_profiles(ensemble.weights, held_out, max_characters=max_characters)


def _from_record(ensemble: RewardEnsemble, name: str) -> PageData:
    """Return the data that the ensemble's own record provides."""
    record, evaluation = ensemble.record, ensemble.record.evaluation
    return PageData(
        name=name,
        k=ensemble.k,
        weights=ensemble.weights.tolist(),
        undecided=ensemble.undecided,
        undecided_note=undecided_sentence(ensemble.undecided),
        level=ensemble.level,
        temperature=ensemble.temperature,
        method=record.method or None,
        data=to_json(record.data) if record.data else {},
        votes=None,
        test=evaluation.test if evaluation else None,
        verdicts=list(verdicts(evaluation)) if evaluation else [],
        comparison=_comparison(evaluation) if evaluation else [],
        history=_history(record),
        reliability=list(_recorded_curve(evaluation)) if evaluation else [],
        groups={},
        worst_group=None,
        members=list(_plain_cards(ensemble)),
        unnamed="Members without a name: there are no held-out votes to compare them on.",
        disagreement=[member.disagreement for member in evaluation.members] if evaluation else [],
        tau=None,
        read=None,
        examples=[],
        steering_pairs=[],
        representation=None,
        warnings=[],
    )


def _with_held_out(
    data: PageData,
    ensemble: RewardEnsemble,
    held_out: HeldOutVotes,
    profiles: Sequence[Profile],
    max_characters: int,
) -> PageData:
    """Add the data that held-out votes provide."""
    votes, prediction = held_out.preferences, held_out.prob_hat(ensemble)
    sample, summary = sample_prompts(held_out, max_characters), inspect(votes)
    groups, worst_group = judge_groups(prediction, votes, DEFAULT_GROUPINGS)
    return replace(
        data,
        votes=VoteCounts(summary.pairs, summary.prompts, summary.votes, summary.votes_per_pair, summary.majority_share),
        reliability=list(_measured_curve(prediction, votes)),
        groups=groups,
        worst_group=worst_group,
        members=[_card(profile) for profile in profiles],
        unnamed=unnamed_reason(profiles, len(sample.preferences.prompts)),
        disagreement=[profile.disagreement for profile in profiles],
        tau=_diversity(ensemble, sample),
        read=ReadSample(len(sample.preferences.prompts), len(votes.prompts)),
        examples=list(example_prompts(ensemble, sample)),
        steering_pairs=list(steering_pairs(ensemble, held_out)),
    )


def _warning(card: MemberCard) -> str:
    return (
        f"Member {card.member} disagrees with people more than chance: it and a random person prefer different "
        f"responses {card.disagreement:.1%} of the time. Do not tune a policy to it."
    )


# --- figures ----------------------------------------------------------------------------------------------------------


def _comparison(evaluation: Evaluation) -> list[ComparedPrediction]:
    return [
        ComparedPrediction(**vars(row), standing=standing(row.difference) if row.difference else None)
        for row in comparison(evaluation)
    ]


def _history(record: FitRecord) -> History | None:
    points = [
        HistoryPoint(row.k, row.test_brier, row.test_brier_corrected)
        for row in record.history
        if not np.isnan(row.test_brier)
    ]
    if not points:
        return None
    brier = (
        {name: baseline.brier for name, baseline in record.evaluation.baselines.items()} if record.evaluation else {}
    )
    return History(
        points=points,
        noise=record.evaluation.test.noise if record.evaluation else None,
        floor=brier.get("floor"),
        soft_bt=brier.get("soft_bt"),
        constant_half=brier.get("constant_half"),
    )


def _recorded_curve(evaluation: Evaluation) -> Iterator[ReliabilityPoint]:
    """The reliability curve of the fit, without the pairs behind its points."""
    curve = evaluation.reliability
    errors = np.asarray(curve.standard_error, dtype=np.float64)  # null in an old record becomes NaN
    parts = (np.asarray(part).tolist() for part in (curve.predicted, curve.observed, curve.count, errors))
    for predicted, observed, count, error in zip(*parts, strict=True):
        interval = None if np.isnan(error) else Bounds(max(observed - 2 * error, 0), min(observed + 2 * error, 1))
        yield ReliabilityPoint(predicted, observed, interval, count, [])


def _measured_curve(prediction: FloatArray, votes: PreferenceSet) -> Iterator[ReliabilityPoint]:
    """The reliability curve with intervals over prompts, and a random sample of the pairs behind each point."""
    observed = votes.prob_a
    curve = reliability(prediction, observed)
    order = np.argsort(np.round(prediction, 9), kind="stable")  # bins are runs of this order; ties stay together
    for number, rows in enumerate(np.split(order, np.cumsum(curve.count)[:-1])):
        interval = clustered_interval(observed[rows], votes.prompt_index[rows], n_resamples=500)
        drawn = random_stream(number, EXAMPLE_PAIRS).permutation(rows)
        _, first = np.unique(votes.prompt_index[drawn], return_index=True)  # one pair per prompt
        yield ReliabilityPoint(
            predicted=float(curve.predicted[number]),
            observed=float(curve.observed[number]),
            interval=Bounds(interval.low, interval.high),
            count=int(curve.count[number]),
            pairs=[
                _predicted_pair(votes, int(row), float(prediction[row]))
                for row in drawn[np.sort(first)[:PAIRS_PER_POINT]]
            ],
        )


def _predicted_pair(votes: PreferenceSet, row: int, prediction: float) -> PredictedPair:
    pair = voted_pair(votes, row)
    texts = {key: _short(getattr(pair, key)) for key in ("prompt", "response_a", "response_b")}
    return PredictedPair(**(vars(pair) | texts), prob_hat=prediction)


def _short(text: str) -> str:
    return shortened(text, TEXT_LENGTH)


# --- members ----------------------------------------------------------------------------------------------------------


def _plain_cards(ensemble: RewardEnsemble) -> Iterator[MemberCard]:
    """Cards of members without held-out votes: weights, and the disagreement that the fit recorded."""
    evaluation = ensemble.record.evaluation
    measured = evaluation.members if evaluation and len(evaluation.members) == ensemble.k else None
    for j, weight in enumerate(ensemble.weights.tolist()):
        disagreement = measured[j].disagreement if measured else None
        yield MemberCard(
            member=j,
            name=member_name(j),
            weight=weight,
            disagreement=disagreement,
            far=disagreement is not None and worse_than_chance(disagreement, weight),
            description="",
            leans=[],
            likes=[],
            dislikes=[],
            typical=[],
            distinguishing=[],
        )


def _card(profile: Profile) -> MemberCard:
    claimed = sorted((lean for lean in profile.leans if lean.claim), key=lambda lean: -abs(lean.relative))
    return MemberCard(
        member=profile.member,
        name=profile.name,
        weight=profile.weight,
        disagreement=profile.disagreement,
        far=worse_than_chance(profile.disagreement, profile.weight),
        description=profile.description,
        leans=[card_lean(lean) for lean in claimed[:LEANS_SHOWN]],
        likes=[lean.trait for lean in profile.likes],
        dislikes=[lean.trait for lean in profile.dislikes],
        typical=[replace(one, prompt=_short(one.prompt), response=_short(one.response)) for one in profile.typical],
        distinguishing=[
            replace(one, prompt=_short(one.prompt), preferred=_short(one.preferred), other=_short(one.other))
            for one in profile.distinguishing
        ],
    )


def card_lean(lean: Lean) -> CardLean:
    """Return a claim with the shares of pairs on which the member, all members and people agree with it."""
    what = lean.claim.removeprefix(PREFERS).removeprefix(CARES_LESS)
    side = 1 if what == TRAITS[KEYS.index(lean.trait)].more else -1

    def share(value: float) -> float:
        return min(max((1 + side * value) / 2, 0.0), 1.0)

    return CardLean(
        trait=lean.trait,
        claim=lean.claim,
        relative=lean.relative,
        pairs=lean.pairs,
        share=share(lean.own),
        share_of_all=share(lean.ensemble),
        share_of_people=share(lean.people),
    )


def _diversity(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> Diversity | None:
    """Return how differently the members rank; None if no prompt has enough responses."""
    candidates, rewards = held_out_candidates(held_out)
    return measure_diversity(ensemble, candidates, rewards=rewards, held_out=held_out) if candidates else None
