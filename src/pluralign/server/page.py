"""The data that the page shows of an ensemble, computed once when the server starts.

The figures are computed in ``evaluation`` and ``analysis``, and selected in ``page_figures``; the page's layout is in
``static/``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.json_values import to_json
from pluralign.core.random_streams import EXAMPLE_PAIRS, random_stream
from pluralign.core.text import shortened
from pluralign.core.types import Level
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.headline import FEW_VOTES, Headline, Standing, headline, main_evaluation, standing
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import Evaluation, Figures, FitRecord, worse_than_chance
from pluralign.measuring.cards import (
    Description,
    Distinguishing,
    Profile,
    Typical,
    member_name,
    member_profiles,
    unnamed_reason,
)
from pluralign.measuring.diversity import MIN_RESPONSES, Diversity, case_studies, held_out_candidates, measure_diversity
from pluralign.measuring.groups import DEFAULT_GROUPINGS, Group, WorstGroup, measure_groups
from pluralign.measuring.individuals import LEGEND, PREDICTORS, Representation, RepresentationRow
from pluralign.measuring.leans import CARES_LESS, KEYS, PREFERS, TRAITS, Lean, sample_prompts
from pluralign.measuring.verdicts import (
    Prediction,
    Verdict,
    comparison,
    floor_is_compared,
    representation_notes,
    representation_verdicts,
    undecided_sentence,
    verdicts,
)
from pluralign.measuring.views import Quote
from pluralign.theory.calibration import reliability
from pluralign.theory.intervals import ENOUGH_CLUSTERS, clustered_interval
from pluralign.theory.posterior import SMALLEST_SLIP, choice_probability, most_informative
from pluralign.votes.candidates import Candidates
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt
from pluralign.votes.summary import inspect

# --- Examples to try on the page: held-out prompts to ask, and pairs that reveal a user's preferences.


MAX_LENGTH = 2000
"""Maximum characters of a text that is scored again."""
EXAMPLES = 8
RESPONSES_PER_EXAMPLE = 12
STEERING_PAIRS = 6


@dataclass(frozen=True)
class Example:
    """A held-out prompt with its responses."""

    prompt: str
    responses: list[str]


@dataclass(frozen=True)
class VotedPair:
    """Two responses, and how many people preferred each."""

    prompt: str
    response_a: str
    response_b: str
    votes_a: int
    votes_b: int


def voted_pair(votes: PreferenceSet, row: int) -> VotedPair:
    """Return the pair at a row, with whole texts."""
    return VotedPair(
        prompt=Prompt(votes.prompts[votes.prompt_index[row]]).text,
        response_a=str(votes.responses[votes.a_index[row]]),
        response_b=str(votes.responses[votes.b_index[row]]),
        votes_a=int(votes.votes_a[row]),
        votes_b=int(votes.votes_b[row]),
    )


def example_prompts(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> Iterator[Example]:
    """Yield the held-out prompts on whose responses the members differ most."""
    for least in (MIN_RESPONSES, 2):
        candidates, rewards = held_out_candidates(held_out, least)
        short = [p for p, one in enumerate(candidates) if _is_short(one)]
        if short:
            break
    else:
        return
    candidates, rewards = [candidates[p] for p in short], [rewards[p] for p in short]
    for case in case_studies(ensemble, candidates, EXAMPLES, rewards=rewards):
        chosen = candidates[case.number - 1]
        yield Example(chosen.prompt_text, list(chosen.responses[:RESPONSES_PER_EXAMPLE]))


def _is_short(candidates: Candidates) -> bool:
    return max(map(len, (candidates.prompt_text, *candidates.responses))) <= MAX_LENGTH


def steering_pairs(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> Iterator[VotedPair]:
    """Yield short held-out pairs, one per prompt, that are together most informative about a user's preferences."""
    votes = held_out.preferences
    lengths = np.array([len(text) for text in votes.responses])
    prompt_lengths = np.array([len(Prompt(prompt).text) for prompt in votes.prompts])
    characters = lengths[votes.a_index] + lengths[votes.b_index] + prompt_lengths[votes.prompt_index]
    rows = np.flatnonzero(characters <= min(float(np.median(characters)), MAX_LENGTH))
    slip = max(ensemble.choice_model.slip, SMALLEST_SLIP)
    chance = choice_probability(held_out.difference[rows], ensemble.temperature, ensemble.undecided, slip)
    for chosen in most_informative(chance, ensemble.weights, votes.prompt_index[rows], STEERING_PAIRS):
        yield voted_pair(votes, int(rows[chosen]))


# --- The figures of the Calibration tab


TEXT_LENGTH = 1000
"""Longer texts are cut where they are only displayed."""
PAIRS_PER_POINT = 5


@dataclass(frozen=True)
class ComparedPrediction(Prediction):
    """A row of the comparison, with the ensemble's standing against it."""

    standing: Standing | None


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


def compared_predictions(evaluation: Evaluation, k: int) -> list[ComparedPrediction]:
    """Return every prediction of the same votes, best first, with the standing of the ensemble of k members."""
    return [
        ComparedPrediction(**vars(row), standing=standing(row.difference) if row.difference else None)
        for row in comparison(evaluation, k)
    ]


def shown_verdicts(evaluation: Evaluation) -> list[Verdict]:
    """Return the verdicts; without the evidence of distinct voices if it is undefined, as the headline says why."""
    undefined = evaluation.voices is not None and evaluation.voices.evidence is None
    return list(verdicts(replace(evaluation, voices=None) if undefined else evaluation))


def score_history(record: FitRecord) -> History | None:
    """Return the held-out score of every size that was fitted; without the floor if these votes cannot measure it."""
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
        floor=brier.get("floor") if record.evaluation and floor_is_compared(record.evaluation) else None,
        soft_bt=brier.get("soft_bt"),
        constant_half=brier.get("constant_half"),
    )


def recorded_curve(evaluation: Evaluation) -> Iterator[ReliabilityPoint]:
    """The reliability curve of the fit, without the pairs behind its points."""
    curve = evaluation.reliability
    errors = np.asarray(curve.standard_error, dtype=np.float64)  # null in an old record becomes NaN
    if evaluation.prompts < ENOUGH_CLUSTERS:
        errors = np.full_like(errors, np.nan)
    parts = (np.asarray(part).tolist() for part in (curve.predicted, curve.observed, curve.count, errors))
    for predicted, observed, count, error in zip(*parts, strict=True):
        interval = None if np.isnan(error) else Bounds(max(observed - 2 * error, 0), min(observed + 2 * error, 1))
        yield ReliabilityPoint(predicted, observed, interval, count, [])


def measured_curve(prediction: FloatArray, votes: PreferenceSet) -> Iterator[ReliabilityPoint]:
    """The reliability curve with intervals over prompts, and a random sample of the pairs behind each point.

    With fewer than 20 prompts there are no intervals.
    """
    observed, enough = votes.prob_a, len(votes.prompts) >= ENOUGH_CLUSTERS
    curve = reliability(prediction, observed)
    order = np.argsort(np.round(prediction, 9), kind="stable")  # bins are runs of this order; ties stay together
    for number, rows in enumerate(np.split(order, np.cumsum(curve.count)[:-1])):
        interval = clustered_interval(observed[rows], votes.prompt_index[rows], n_resamples=500)
        drawn = random_stream(number, EXAMPLE_PAIRS).permutation(rows)
        _, first = np.unique(votes.prompt_index[drawn], return_index=True)  # one pair per prompt
        yield ReliabilityPoint(
            predicted=float(curve.predicted[number]),
            observed=float(curve.observed[number]),
            interval=Bounds(interval.low, interval.high) if enough else None,
            count=int(curve.count[number]),
            pairs=[
                _predicted_pair(votes, int(row), float(prediction[row]))
                for row in drawn[np.sort(first)[:PAIRS_PER_POINT]]
            ],
        )


def _predicted_pair(votes: PreferenceSet, row: int, prediction: float) -> PredictedPair:
    pair = voted_pair(votes, row)
    texts = {key: short(getattr(pair, key)) for key in ("prompt", "response_a", "response_b")}
    return PredictedPair(**(vars(pair) | texts), prob_hat=prediction)


def short(text: str) -> str:
    """Return a text that is only displayed, cut if it is long."""
    return shortened(text, TEXT_LENGTH)


# --- The part of the page about individuals: the measure of representation, with verdicts and notes in words.


@dataclass(frozen=True)
class PageRepresentation:
    """How well individuals are represented, as the page shows it."""

    names: dict[str, str]
    """Heading of every predictor."""
    legend: str
    rows: list[RepresentationRow]
    verdicts: list[Verdict]
    notes: list[str]


def page_representation(found: Representation | None) -> PageRepresentation | None:
    """Return the data of the section; None if representation was not measured."""
    if found is None:
        return None
    return PageRepresentation(
        names=dict(PREDICTORS),
        legend=LEGEND,
        rows=list(found.rows),
        verdicts=list(representation_verdicts(found)),
        notes=list(representation_notes(found)),
    )


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
class CardView:
    """A phrase or position on a member's card, in words, with quotes of held-out responses."""

    title: str
    evidence: str
    quotes: list[Quote]


@dataclass(frozen=True)
class Written:
    """Name and sentence that a language model wrote for a member, with the result of their check in words."""

    name: str
    sentence: str
    evidence: str


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
    written: Written | None
    """Name and sentence of a language model, if they passed their check."""
    views: list[CardView]
    """Positions and phrases that survived on the other half of the prompts."""
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
    left_out: str
    """How many pairs of other votes were left out because of their prompts, in words; empty if none."""
    headline: Headline | None
    """The main figure, the verdict and the next step. None without figures."""
    cross_validated: bool
    """Whether the headline, the scores and the reliability curve come from a cross-validation."""
    floor_note: str
    """Why the floor is not compared; empty if it is."""
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
    evaluation: Evaluation | None = None,
    max_characters: int = MAX_CHARACTERS,
) -> PageData:
    """Return everything that the page shows of an ensemble.

    Args:
        ensemble: the one that is served.
        held_out: held-out votes with its rewards; without them the page shows only the ensemble's own record.
        name: title of the page.
        profiles: the members' cards (``page_profiles``); computed if not given.
        representation: how well individuals are represented, from ``load_representation``.
        evaluation: figures on ``held_out`` if these are other votes than those of the fit.
        max_characters: traits, words and rankings are measured on at most this much text.

    Example:
        >>> from pluralign import fit, town_hall
        >>> data = collect_page_data(fit(town_hall(200).preferences, k=2, encoder="none"), None, name="town")
        >>> data.name, data.k, [card.name for card in data.members], data.examples
        ('town', 2, ['Member 0', 'Member 1'], [])
    """
    data = _from_record(ensemble, name, evaluation or main_evaluation(ensemble.record))
    cross_validated = evaluation is None and ensemble.record.cross_validation is not None
    data = replace(data, cross_validated=cross_validated, representation=page_representation(representation))
    if held_out is not None:
        profiles = page_profiles(ensemble, held_out, max_characters) if profiles is None else profiles
        data = _with_held_out(data, ensemble, held_out, profiles, max_characters)
    return replace(data, warnings=[_warning(card) for card in data.members if card.far])


def page_profiles(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, max_characters: int = MAX_CHARACTERS
) -> list[Profile]:
    """Return the members' cards; traits and words are measured on at most ``max_characters`` of text."""
    return member_profiles(ensemble.weights, held_out, max_characters=max_characters)


def _from_record(ensemble: RewardEnsemble, name: str, evaluation: Evaluation | None) -> PageData:
    """Return the data that the ensemble's own record and its main figures provide."""
    record, own = ensemble.record, ensemble.record.evaluation
    return PageData(
        name=name,
        k=ensemble.k,
        weights=ensemble.weights.tolist(),
        undecided=ensemble.undecided,
        undecided_note=undecided_sentence(ensemble.undecided),
        level=ensemble.level,
        temperature=ensemble.temperature,
        method=record.method or None,
        data={name: part for name, part in to_json(record.data).items() if name != "loaded"} if record.data else {},
        votes=None,
        left_out="",
        headline=headline(evaluation, record) if evaluation else None,
        cross_validated=False,
        floor_note="" if evaluation is None or floor_is_compared(evaluation) else FEW_VOTES,
        test=evaluation.test if evaluation else None,
        verdicts=shown_verdicts(evaluation) if evaluation else [],
        comparison=compared_predictions(evaluation, ensemble.k) if evaluation else [],
        history=score_history(record),
        reliability=list(recorded_curve(evaluation)) if evaluation else [],
        groups={},
        worst_group=None,
        members=list(_plain_cards(ensemble)),
        unnamed="Members without a name: there are no held-out votes to compare them on.",
        disagreement=[member.disagreement for member in own.members] if own else [],
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
    groups, worst_group = measure_groups(prediction, votes, DEFAULT_GROUPINGS)
    return replace(
        data,
        votes=VoteCounts(summary.pairs, summary.prompts, summary.votes, summary.votes_per_pair, summary.majority_share),
        left_out=held_out.left_out.sentence,
        reliability=data.reliability if data.cross_validated else list(measured_curve(prediction, votes)),
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
            written=None,
            views=[],
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
        written=_written(profile.written),
        views=[
            CardView(view.title, view.evidence, [replace(quote, prompt=short(quote.prompt)) for quote in view.quotes])
            for view in (*profile.views.positions, *profile.views.phrases)
        ],
        typical=[replace(one, prompt=short(one.prompt), response=short(one.response)) for one in profile.typical],
        distinguishing=[
            replace(one, prompt=short(one.prompt), preferred=short(one.preferred), other=short(one.other))
            for one in profile.distinguishing
        ],
    )


def _written(found: Description | None) -> Written | None:
    return Written(found.name, found.sentence, found.evidence) if found and found.shown else None


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
    return measure_diversity(ensemble, rewards, held_out) if candidates else None
