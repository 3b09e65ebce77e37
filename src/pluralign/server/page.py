"""The data that the page shows of an ensemble, computed once when the server starts.

The figures are those of ``measuring``; this module selects them, draws examples and cuts long texts. The page's layout
is in ``static/``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pluralign.core.arrays import FloatArray, IntArray
from pluralign.core.json_values import to_json
from pluralign.core.random_streams import EXAMPLE_PAIRS, random_stream
from pluralign.core.types import Level
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import Evaluation, FitRecord, HistoryRow, Insight, worse_than_chance
from pluralign.ensemble.verdict import Headline, headline, main_evaluation
from pluralign.measuring import cards, comparison, leans as traits
from pluralign.measuring.comparison import Verdict
from pluralign.measuring.diversity import MIN_RESPONSES, Diversity, case_studies, held_out_candidates, measure_diversity
from pluralign.measuring.evaluate import FullEvaluation
from pluralign.measuring.groups import DEFAULT_GROUPINGS, measure_groups
from pluralign.measuring.individuals import Representation
from pluralign.measuring.views import Quote
from pluralign.publishing.tables import (
    Table,
    claimed_leans,
    comparison_table,
    cut,
    group_tables,
    judgment_tables,
    representation_tables,
    worst_group_sentence,
)
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval, clustered_interval
from pluralign.theory.posterior import SMALLEST_SLIP, choice_probability, most_informative
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt

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
    prob_hat: float | None = None
    """The predicted share preferring response a, for pairs behind a point of the reliability curve."""


def voted_pair(votes: PreferenceSet, row: int) -> VotedPair:
    """Return the pair at a row, with whole texts."""
    prompt = Prompt(votes.prompts[votes.prompt_index[row]]).text
    first, second = (str(votes.responses[index[row]]) for index in (votes.a_index, votes.b_index))
    return VotedPair(prompt, first, second, int(votes.votes_a[row]), int(votes.votes_b[row]))


def example_prompts(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> Iterator[Example]:
    """Yield the held-out prompts on whose responses the members differ most."""
    for least in (MIN_RESPONSES, 2):
        candidates, rewards = held_out_candidates(held_out, least)
        lengths = [max(map(len, (one.prompt_text, *one.responses))) for one in candidates]
        short = [p for p, longest in enumerate(lengths) if longest <= MAX_LENGTH]
        if short:
            break
    else:
        return
    candidates, rewards = [candidates[p] for p in short], [rewards[p] for p in short]
    for case in case_studies(ensemble, candidates, rewards, EXAMPLES):
        chosen = candidates[case.number - 1]
        yield Example(chosen.prompt_text, list(chosen.responses[:RESPONSES_PER_EXAMPLE]))


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
class History:
    """Held-out Brier score against the number of members."""

    points: list[HistoryRow]
    lines: Mapping[str, float]
    """Brier scores to compare it with, by name: noise, floor, soft_bt and constant_half, as far as they are known."""


@dataclass(frozen=True)
class ReliabilityPoint:
    """One bin of the reliability curve."""

    predicted: float
    observed: float
    interval: Interval | None
    """Two standard errors around ``observed``; None with fewer than 20 prompts."""
    count: int
    pairs: list[VotedPair]
    """A random sample of its pairs; empty if their texts are unknown."""


@dataclass(frozen=True)
class Individuals:
    """How well individuals are represented."""

    verdicts: Sequence[Verdict]
    tables: Sequence[Table]
    notes: Sequence[str]


def score_history(record: FitRecord) -> History | None:
    """Return the held-out score of every size that was fitted; without the floor if these votes cannot measure it."""
    rows, evaluation = [row for row in record.history if not np.isnan(row.test_brier)], record.evaluation
    if not rows:
        return None
    lines = {}
    if evaluation:
        names = ["soft_bt", "constant_half", *["floor"] * comparison.floor_is_compared(evaluation)]
        lines = {name: evaluation.baselines[name].brier for name in names if name in evaluation.baselines}
        lines["noise"] = evaluation.test.noise
    return History(rows, {name: score for name, score in lines.items() if not np.isnan(score)})


def reliability_points(
    evaluation: Evaluation, votes: PreferenceSet | None, prediction: FloatArray | None
) -> Iterator[ReliabilityPoint]:
    """Yield the bins of the reliability curve. With the votes behind it, intervals are over prompts.

    Args:
        evaluation: has the curve.
        votes: those it was measured on, for a random sample of the pairs in each bin.
        prediction: predicted shares of these votes.
    """
    curve, enough = evaluation.reliability, evaluation.prompts >= ENOUGH_CLUSTERS
    columns = (np.asarray(part) for part in (curve.predicted, curve.observed, curve.standard_error, curve.count))
    order = None if prediction is None else np.argsort(np.round(prediction, 9), kind="stable")
    start = 0
    for number, (predicted, observed, error, count) in enumerate(np.column_stack([*columns]).tolist()):
        interval, pairs = Interval(observed, max(observed - 2 * error, 0), min(observed + 2 * error, 1), error), []
        if votes is not None and prediction is not None and order is not None:
            rows = order[start : start + int(count)]  # bins are runs of this order; ties stay together
            interval = clustered_interval(votes.prob_a[rows], votes.prompt_index[rows], n_resamples=500)
            pairs = _sample(votes, prediction, random_stream(number, EXAMPLE_PAIRS).permutation(rows))
        start += int(count)
        shown = interval if enough and not np.isnan(interval.standard_error) else None
        yield ReliabilityPoint(predicted, observed, shown, int(count), pairs)


def _sample(votes: PreferenceSet, prediction: FloatArray, drawn: IntArray) -> list[VotedPair]:
    """Return the first of these pairs, at most one per prompt, with their predicted shares."""
    _, first = np.unique(votes.prompt_index[drawn], return_index=True)
    rows = drawn[np.sort(first)[:PAIRS_PER_POINT]].tolist()
    return [replace(cut(voted_pair(votes, row), TEXT_LENGTH), prob_hat=float(prediction[row])) for row in rows]


LEANS_SHOWN = 5
NO_VOTES = "Members without a name: there are no held-out votes to compare them on."


@dataclass(frozen=True)
class CardLean:
    """A claim on a member's card, with the shares of pairs that agree with it."""

    claim: str
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
    quotes: Sequence[Quote]


@dataclass(frozen=True)
class MemberCard:
    """One member, as the page shows it. Without held-out votes only its weight and its disagreement are known."""

    member: int
    name: str
    weight: float
    disagreement: float | None
    far: bool
    """Whether it disagrees with people more than chance."""
    description: str = ""
    leans: Sequence[CardLean] = ()
    likes: Sequence[str] = ()
    dislikes: Sequence[str] = ()
    written: Mapping[str, str] | None = None
    """Name, sentence and evidence of a language model's description, if it passed its check."""
    views: Sequence[CardView] = ()
    """Positions and phrases that survived on the other half of the prompts."""
    distinguishing: Sequence[cards.Distinguishing] = ()


@dataclass(frozen=True, kw_only=True)
class PageData:
    """Everything that the page shows of an ensemble. Undefined numbers are NaN here and null in JSON."""

    name: str
    k: int
    weights: Sequence[float]
    undecided: float
    """Share of votes that no member explains."""
    undecided_note: str
    """The same in words; empty if it is 0."""
    level: Level
    members: Sequence[MemberCard]
    unnamed: str
    """Why some members have no name; empty if all have one."""
    data: Mapping[str, str | int]
    """Size and fingerprint of the votes of the fit; empty if unknown."""
    history: History | None
    individuals: Individuals | None
    """How well individuals are represented; None if it was not measured."""
    cross_validated: bool
    """Whether the headline, the scores and the reliability curve come from a cross-validation."""

    insight: Insight | None = None
    """Who disagrees about what. None without held-out votes."""
    headline: Headline | None = None
    """The main figure, the verdict and the next step. None without figures."""
    tables: Sequence[Table] = ()
    """The comparison with baselines, whole judgments, first choices, and groups of pairs."""
    worst_group: str = ""
    """The group with the largest error, in words; empty if there are too few."""
    reliability: Sequence[ReliabilityPoint] = ()

    votes: Mapping[str, int] | None = None
    """Numbers of pairs and prompts of the held-out votes."""
    left_out: str = ""
    """How many pairs of other votes were left out because of their prompts, in words; empty if none."""
    tau: Diversity | None = None
    read: Mapping[str, int] | None = None
    """Number of prompts whose texts were analysed, and ``of`` how many."""
    examples: Sequence[Example] = ()
    steering_pairs: Sequence[VotedPair] = ()


def collect_page_data(
    ensemble: RewardEnsemble,
    held_out: HeldOutVotes | None,
    *,
    name: str,
    profiles: Sequence[cards.Profile] | None = None,
    representation: Representation | None = None,
    evaluation: Evaluation | None = None,
) -> PageData:
    """Return everything that the page shows of an ensemble.

    Args:
        ensemble: the one that is served.
        held_out: held-out votes with its rewards; without them the page shows only the ensemble's own record.
        name: title of the page.
        profiles: the members' cards (``cards.member_profiles``); computed if not given.
        representation: how well individuals are represented, from ``load_representation``.
        evaluation: figures on ``held_out`` if these are other votes than those of the fit.

    Example:
        >>> from pluralign import fit, town_hall
        >>> data = collect_page_data(fit(town_hall(200).preferences, k=2, encoder="none"), None, name="town")
        >>> data.name, data.k, [card.name for card in data.members], data.examples
        ('town', 2, ['Member 0', 'Member 1'], ())
    """
    record, cross_validated = ensemble.record, evaluation is None and ensemble.record.cross_validation is not None
    figures: dict[str, Any] = {}
    if main := evaluation or main_evaluation(record):
        behind = held_out and not cross_validated and main.pairs == len(held_out.preferences)
        votes = held_out.preferences if held_out and behind else None
        figures = {
            "insight": main.insight if isinstance(main, FullEvaluation) else record.insight,
            "headline": headline(main, record),
            "reliability": list(reliability_points(main, votes, held_out.prob_hat(ensemble) if held_out else None)),
            "tables": [comparison_table(main, "Comparison with baselines", ensemble.k), *judgment_tables(main)],
        }
    if held_out is None:
        figures |= {"members": list(_plain_cards(ensemble)), "unnamed": NO_VOTES}
    else:
        profiles = profiles if profiles is not None else cards.member_profiles(ensemble.weights, held_out)
        found = _of_held_out(ensemble, held_out, profiles)
        figures |= found | {"tables": [*figures.get("tables", ()), *found["tables"]]}
    figures["tables"] = [replace(table, rows=table.lines) for table in figures.get("tables", ())]
    return PageData(
        name=name,
        k=ensemble.k,
        weights=ensemble.weights.tolist(),
        undecided=ensemble.undecided,
        undecided_note=comparison.undecided_sentence(ensemble.undecided),
        level=ensemble.level,
        data={name: part for name, part in to_json(record.data).items() if name != "loaded"} if record.data else {},
        history=score_history(record),
        individuals=_individuals(representation) if representation else None,
        cross_validated=cross_validated,
        **figures,
    )


def _individuals(found: Representation) -> Individuals:
    tables = [replace(table, rows=table.lines) for table in representation_tables(found)]
    return Individuals(
        list(comparison.representation_verdicts(found)), tables, list(comparison.representation_notes(found))
    )


def _of_held_out(ensemble: RewardEnsemble, held_out: HeldOutVotes, profiles: Sequence[cards.Profile]) -> dict[str, Any]:
    """Return the fields of ``PageData`` that held-out votes provide."""
    votes, sample = held_out.preferences, traits.sample_prompts(held_out)
    candidates, rewards = held_out_candidates(sample)
    groups, worst = measure_groups(held_out.prob_hat(ensemble), votes, DEFAULT_GROUPINGS)
    return {
        "members": list(map(_card, profiles)),
        "unnamed": cards.unnamed_reason(profiles, len(sample.preferences.prompts)),
        "votes": {"pairs": len(votes), "prompts": len(votes.prompts)},
        "left_out": held_out.left_out.sentence,
        "tables": list(group_tables(groups)),
        "worst_group": worst_group_sentence(worst) if worst and worst.groups > 1 else "",
        "tau": measure_diversity(ensemble, rewards, sample) if candidates else None,
        "read": {"prompts": len(sample.preferences.prompts), "of": len(votes.prompts)},
        "examples": list(example_prompts(ensemble, sample)),
        "steering_pairs": list(steering_pairs(ensemble, held_out)),
    }


# --- members ----------------------------------------------------------------------------------------------------------


def _plain_cards(ensemble: RewardEnsemble) -> Iterator[MemberCard]:
    """Cards of members without held-out votes: weights, and the disagreement that the fit recorded."""
    evaluation = ensemble.record.evaluation
    measured = evaluation.members if evaluation and len(evaluation.members) == ensemble.k else None
    for j, weight in enumerate(ensemble.weights.tolist()):
        disagreement = measured[j].disagreement if measured else None
        yield MemberCard(
            member=j,
            name=cards.member_name(j),
            weight=weight,
            disagreement=disagreement,
            far=disagreement is not None and worse_than_chance(disagreement, weight),
        )


def _card(profile: cards.Profile) -> MemberCard:
    words = {name: str(getattr(profile.written, name, "")) for name in ("name", "sentence", "evidence")}
    return MemberCard(
        member=profile.member,
        name=profile.name,
        weight=profile.weight,
        disagreement=profile.disagreement,
        far=worse_than_chance(profile.disagreement, profile.weight),
        description=profile.description,
        leans=[CardLean(lean.claim, lean.pairs, *lean.shares()) for lean in claimed_leans(profile)[:LEANS_SHOWN]],
        likes=[lean.trait for lean in profile.likes],
        dislikes=[lean.trait for lean in profile.dislikes],
        written=words if profile.written and profile.written.shown else None,
        views=[
            CardView(view.title, view.evidence, cut(view.quotes, TEXT_LENGTH))
            for view in (*profile.views.positions, *profile.views.phrases)
        ],
        distinguishing=cut(profile.distinguishing, TEXT_LENGTH),
    )
