"""The data that the page shows of an ensemble, computed once when the server starts.

The figures are computed in ``evaluation`` and ``analysis``, and selected in ``page_figures``; the page's layout is in
``static/``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pluralign.analysis.description import Description
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
from pluralign.analysis.views import Quote
from pluralign.core.json_values import to_json
from pluralign.core.types import Level
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.headline import FEW_VOTES, Headline, headline, main_evaluation
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import Evaluation, Figures, worse_than_chance
from pluralign.evaluation.comparison import Verdict, floor_is_compared, undecided_sentence
from pluralign.evaluation.groupings import DEFAULT_GROUPINGS
from pluralign.evaluation.groups import Group, WorstGroup, judge_groups
from pluralign.evaluation.representation import Representation
from pluralign.server.page_examples import Example, VotedPair, example_prompts, steering_pairs
from pluralign.server.page_figures import (
    ComparedPrediction,
    History,
    ReliabilityPoint,
    compared_predictions,
    measured_curve,
    recorded_curve,
    score_history,
    short,
    shown_verdicts,
)
from pluralign.server.page_representation import PageRepresentation, page_representation
from pluralign.votes.summary import inspect

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
    groups, worst_group = judge_groups(prediction, votes, DEFAULT_GROUPINGS)
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
    return measure_diversity(ensemble, candidates, rewards=rewards, held_out=held_out) if candidates else None
