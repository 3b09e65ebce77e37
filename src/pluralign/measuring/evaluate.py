"""``evaluate``: a predictor of vote shares, with its baselines, other predictors, groups and the policy level.

This module decides what an evaluation has: ``EvaluateOptions`` and ``FullEvaluation``. It also measures how much
disagreement a prediction keeps (``majority_shares``) and the policy level at several strengths of regularisation.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from os import PathLike
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.core.errors import UsageError
from pluralign.core.options import option, show_options, with_changes
from pluralign.core.random_streams import PAIR_SAMPLE, SIMULATED_MAJORITIES, random_stream
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import Compared, Evaluation, Insight, pairs_to_measure
from pluralign.ensemble.verdict import WORDS, Headline, headline, standing
from pluralign.learning.measure import Kind, Predictor, compare, measure, read_ensemble, worst_disagreement
from pluralign.measuring import groups as by_group
from pluralign.measuring.individuals import Representation, represent
from pluralign.measuring.insight import measure_insight
from pluralign.measuring.personas import Personas
from pluralign.measuring.predictors import Source, find_predictor, load_predictor
from pluralign.text.encoders import TextFeatures
from pluralign.text.judge import JudgeUsage
from pluralign.text.reference import log_ratio, with_log_probs
from pluralign.text.store import stored_features
from pluralign.theory import calibration
from pluralign.theory.calibration import by_stratum, sigmoid
from pluralign.votes.load import VotesLike, as_preferences
from pluralign.votes.preferences import PreferenceSet, rows_of_texts, texts_of
from pluralign.votes.raters import RaterVotes

# --- The options of an evaluation.


@dataclass(frozen=True)
class EvaluateOptions:
    """How to evaluate a predictor."""

    groups: Sequence[str] = option(by_group.DEFAULT_GROUPINGS, "Groupings of pairs: length, topic, strata or columns.")
    betas: Sequence[float] = option((), "Further strengths of regularisation for the policy level.")
    reference: str | None = option(
        None,
        "Reference policy: data (columns logprob_a, logprob_b), a causal model, or none (default: that of the fit).",
    )
    features: str | None = option(None, "Folder of pluralign encode with the (frozen) features of these votes.")
    all_prompts: bool = option(False, "Measure on training prompts too. The figures are then too good.")
    limit: int | None = option(None, "Measure on a random sample of at most this many pairs, prompt by prompt.")
    seed: int = option(0, "Of topics, groups, simulated votes, folds, the sample and raters' choices.")


# --- How much disagreement a prediction keeps: the share of the majority's side, observed and predicted.


SIMULATED_PAIRS = 1_000_000


@dataclass(frozen=True)
class MajorityShare:
    """The size of the majority on pairs where people split in one way: observed and predicted."""

    pairs: int
    people: float
    """Mean observed share of the majority's side."""
    predicted: float
    """Mean predicted share of that side. NaN for even pairs, which have no majority."""
    expected: float
    """The value of ``predicted`` for a calibrated prediction: its mean over simulated votes that split this way."""


def majority_shares(
    prob_hat: FloatArray, prob_a: FloatArray, n_votes: npt.NDArray[np.int64], *, seed: int = 0
) -> dict[str, MajorityShare]:
    """Return the observed and predicted share of the majority's side for each of ``calibration.strata``.

    Majorities estimated from few votes look larger than they are, so even a calibrated prediction gives unanimous
    pairs less than 1. ``expected`` is the same figure for votes drawn from the prediction.

    Example:
        >>> shares = majority_shares(np.array([.95, .95]), np.array([.6, .4]), np.array([5, 5]))
        >>> shares["contested"].people, shares["contested"].predicted
        (0.6, 0.5)
    """
    random = random_stream(seed, SIMULATED_MAJORITIES)
    times = int(np.clip(SIMULATED_PAIRS // len(prob_hat), 1, by_group.SIMULATIONS))
    drawn = np.concatenate([by_group.simulated_shares(prob_hat, n_votes, random) for _ in range(times)])
    expected = by_stratum(_towards_majority(np.tile(prob_hat, times), drawn), drawn)
    predicted = by_stratum(_towards_majority(prob_hat, prob_a), prob_a)
    people = by_stratum(np.maximum(prob_a, 1 - prob_a), prob_a)
    return {name: MajorityShare(*people[name], predicted[name][1], expected[name][1]) for name in people}


def _towards_majority(prob_hat: FloatArray, prob_a: FloatArray) -> FloatArray:
    return np.where(prob_a == 0.5, np.nan, np.where(prob_a > 0.5, prob_hat, 1 - prob_hat))


# --- The results of an evaluation.


@dataclass(frozen=True)
class PredictorInfo:
    """The predictor that was evaluated."""

    name: str
    kind: Kind
    k: int
    temperature: float | None
    note: str
    usage: JudgeUsage | None = None
    """Calls and tokens of a language model that judges as personas."""
    personas: tuple[str, ...] = ()
    """Descriptions of the members, if they are personas."""


@dataclass(frozen=True, kw_only=True)
class OtherPredictor(PredictorInfo):
    """Another predictor on the same pairs, with the differences (evaluated − other) for each of its readings."""

    level: str
    readings: Mapping[str, Compared]


@dataclass(frozen=True)
class PolicyRow:
    """The policy level at one strength of regularisation. 0 is the limit: the share of hard votes."""

    beta: float
    brier: float
    brier_corrected: float
    brier_reference: float | None = None
    """With the log-ratio of the reference policy, if there is one."""
    brier_corrected_reference: float | None = None


@dataclass(frozen=True)
class PolicyLevel:
    """The policy level by strength of regularisation, strongest first."""

    reference: str | None
    rows: list[PolicyRow]


@dataclass(frozen=True, repr=False)
class FullEvaluation(Evaluation):
    """An evaluation with groups, other predictors and the policy level beside the figures of a fit."""

    subject: PredictorInfo
    headline: Headline
    """The main figure, the verdict and the next step."""
    against: list[OtherPredictor]
    majority: Mapping[str, MajorityShare]
    """Share of the majority's side, observed and predicted, by how people split."""
    groups: Mapping[str, list[by_group.Group]]
    worst_group: by_group.WorstGroup | None
    adversarial: list[by_group.AdversarialGroup]
    policy: PolicyLevel | None
    """None for files of probabilities."""
    insight: Insight | None = None
    """Who disagrees about what, by these votes. None for other predictors than ensembles."""
    representation: Representation | None = None
    """How well individual raters are represented, if the raters are known."""

    def __str__(self) -> str:
        return "\n".join([*([self.insight.text()] if self.insight else []), *self.summary])

    @property
    def summary(self) -> list[str]:
        """Size, headline, and how it compares with each of the other predictors, in lines."""
        lines = [f"{self.subject.name}: {self.pairs:,} pairs", *str(self.headline).splitlines()]
        for number, other in enumerate(self.against, 2):
            found = other.readings[other.level]
            place, gap = standing(found.difference), f"{found.difference.mean:+z.4f}"
            if place != "unknown":
                gap += f" [{found.difference.low:+z.4f}, {found.difference.high:+z.4f}]"
            word = WORDS.get(place, "Compared with")
            name = PurePath(other.name).name + (f" {number} (k = {other.k})" if other.name == self.subject.name else "")
            lines.append(f"{word} {name}: difference of Brier scores {gap.replace('-', '−')}.")
        return lines


# --- The policy level of a predictor (App. A) at several strengths of regularisation.


BETAS = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
"""Strengths of regularisation β that every evaluation reports."""
WITHOUT = "none"
"""``--reference`` that leaves out the reference policy of the training."""


def policy_level(subject: Predictor, preferences: PreferenceSet, options: EvaluateOptions) -> PolicyLevel | None:
    """Return the Brier score of the policy level for a grid of β, ending in β → 0.

      p̂ = u/2 + (1 − u) Σ_j α_j σ(Δr_j / β + log π_ref(a)/π_ref(b))

    Without a reference policy the log-ratio is 0. The limit is the share of hard votes, with or without a reference,
    except for tied rewards, where the reference alone decides.

    Args:
        subject: the predictor; it needs rewards.
        preferences: the votes, with the columns of the reference policy (``text.reference.with_log_probs``).
        options: with further values of β, and the name of the reference policy.

    Returns:
        The table, or None for files of probabilities.

    Reference: Appendix A.
    """
    if subject.difference is None or subject.weights is None:
        if options.reference or options.betas:
            raise UsageError(f"{subject.name} has probabilities, but the policy level needs rewards.")
        return None
    difference, weights, undecided = subject.difference, subject.weights, subject.undecided
    ratios: list[FloatArray | float] = [0.0]
    limit = [subject.readings["vote"]]
    if options.reference is not None:
        ratios.append(ratio := log_ratio(preferences))
        votes = np.where(difference == 0, sigmoid(ratio)[:, None], (difference > 0).astype(float))
        limit.append(calibration.with_undecided(calibration.ensemble_prob(votes, weights), undecided))
    p, n, ties = preferences.prob_a, preferences.n_votes, preferences.counted_ties
    rows = []
    for beta in sorted({*BETAS, *options.betas, *filter(None, [subject.temperature]), 0.0}, reverse=True):
        shares = limit
        if beta > 0:
            read = (calibration.policy_prob(difference, weights, beta, ratio) for ratio in ratios)
            shares = [calibration.with_undecided(share, undecided) for share in read]
        # Without the reference, and with it if there is one.
        scores = [(calibration.brier(share, p), calibration.brier_corrected(share, p, n, ties)) for share in shares]
        rows.append(PolicyRow(beta, *itertools.chain(*scores)))
    return PolicyLevel(options.reference, rows)


@show_options(EvaluateOptions)
def evaluate(
    subject: Source,
    preferences: VotesLike,
    options: EvaluateOptions | None = None,
    *,
    against: Sequence[Source] = (),
    raters: RaterVotes | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> FullEvaluation:
    """Evaluate an ensemble with its baselines, or any other predictor of vote shares.

    Args:
        subject: an ensemble or its folder, a transformers reward model (a folder or a hub id), a file of scores or
            probabilities, or ``Personas``.
        preferences: the votes: a ``PreferenceSet``, a path, a pandas DataFrame, a ``datasets`` object or a list of
            dicts. Prompts that an ensemble (the subject, or one of ``against``) was trained on are left out;
            ``left_out`` of the result counts them. Of other predictors the training prompts are unknown.
        options: how to evaluate.
        against: other predictors to compare with, pair by pair.
        raters: the same votes with their raters (``load_rater_votes``), to measure how well an ensemble predicts
            individuals; ``preferences`` must be ``raters.preferences``.
        progress: called with the texts done and the total.
        **changes: fields of ``options`` by name, such as ``groups=["topic"]``.
    """
    if not isinstance(subject, RewardEnsemble | Personas | str | PathLike) or isinstance(preferences, RewardEnsemble):
        raise UsageError("evaluate takes the predictor first, then the votes: evaluate(ensemble, votes).")
    options, everything = with_changes(options or EvaluateOptions(), changes), as_preferences(preferences)
    if raters is not None and raters.preferences is not everything:
        raise UsageError("preferences must be raters.preferences: the same votes, counted per pair.")
    for grouping in options.groups:
        by_group.check_grouping(grouping, everything)
    if bad := [beta for beta in options.betas if not (math.isfinite(beta) and beta > 0)]:
        raise UsageError(f"beta must be above 0, not {bad[0]:g}; the limit 0 is always reported.")
    name, representation, seed = str(subject) if isinstance(subject, str | PathLike) else "ensemble", None, options.seed
    ensembles = [_ensemble(source) for source in (subject, *against)]
    ensemble, trained_on = ensembles[0], [one.trained_on for one in ensembles if one is not None]
    measured, left_out = pairs_to_measure(everything, trained_on, all_prompts=options.all_prompts)
    if options.limit is not None:
        measured = _sample_pairs(everything, measured, options.limit, seed)
    votes = everything[measured] if not measured.all() else everything
    ensemble, options = _reference_of(ensemble, options)
    load = partial(load_predictor, preferences=votes, measured=measured, seed=seed, progress=progress)
    if options.reference is not None:
        votes = with_log_probs(options.reference, votes, progress)
    if ensemble is not None:
        inputs = _features(ensemble, everything if raters else votes, options.features, progress)
        if raters is not None:
            trained = None if options.all_prompts else ensemble.trained_on
            representation = represent(ensemble, raters, inputs, trained, seed=seed, progress=progress)
            inputs = inputs[rows_of_texts(votes, everything)]
        own, baselines = read_ensemble(ensemble, votes, inputs, name)
    elif raters is not None:
        raise UsageError("--raters needs an ensemble folder: other predictors have no members to choose from.")
    elif options.features:
        raise UsageError("--features needs an ensemble on frozen features; this predictor reads texts.")
    else:
        own, baselines = load(subject), {}
    prediction, others = own.prob_hat, []
    for other in map(load, against):
        worst = worst_disagreement(other.votes, other.weights, votes.prob_a)
        readings = {key: compare(share, prediction, votes, other.k, worst) for key, share in other.readings.items()}
        others.append(OtherPredictor(**_info(other), level=other.level, readings=readings))
    figures, insight = replace(measure(own, baselines, votes), left_out=left_out), None
    if ensemble is not None and own.rewards is not None:
        insight = measure_insight(ensemble, HeldOutVotes(votes, own.rewards, left_out), figures)
    groups, worst_group = by_group.measure_groups(prediction, votes, options.groups, seed=seed)
    return FullEvaluation(
        **vars(figures),
        insight=insight,
        subject=PredictorInfo(**_info(own)),
        headline=headline(figures, ensemble.record if ensemble is not None else None, name),
        against=others,
        majority=majority_shares(prediction, votes.prob_a, votes.n_votes, seed=seed),
        groups=groups,
        worst_group=worst_group,
        adversarial=by_group.adversarial_calibration(prediction, votes, seed=seed),
        policy=policy_level(own, votes, options),
        representation=representation,
    )


def _reference_of(
    ensemble: RewardEnsemble | None, options: EvaluateOptions
) -> tuple[RewardEnsemble | None, EvaluateOptions]:
    """Return an ensemble and options with one reference policy: that of the options, or else that of the training."""
    trained = None if ensemble is None else ensemble.reference
    reference = None if options.reference == WITHOUT else options.reference or trained
    if ensemble is not None and trained is not None:
        changed = {**ensemble.record.options, "reference": reference}
        ensemble = replace(ensemble, record=replace(ensemble.record, options=changed))
    return ensemble, replace(options, reference=reference)


def _info(predictor: Predictor) -> dict[str, Any]:
    """Return what is said about a predictor, by field of ``PredictorInfo``."""
    return {part.name: getattr(predictor, part.name) for part in fields(PredictorInfo)}


def evaluate_held_out(ensemble: RewardEnsemble, held_out: HeldOutVotes, seed: int = 0) -> FullEvaluation:
    """Return the figures on votes that were scored already, with the number of pairs left out."""
    reference = None if ensemble.reference is None else "data"  # the held-out votes have the columns
    evaluation = evaluate(ensemble, held_out.preferences, groups=[], all_prompts=True, seed=seed, reference=reference)
    return replace(evaluation, left_out=held_out.left_out)


def _ensemble(source: Source) -> RewardEnsemble | None:
    """Return the ensemble that a source names, or None if it is another predictor."""
    if isinstance(source, RewardEnsemble | Personas):
        return source if isinstance(source, RewardEnsemble) else None
    return RewardEnsemble.load(source) if find_predictor(source) == "ensemble" else None


def _sample_pairs(preferences: PreferenceSet, measured: Mask, limit: int, seed: int) -> Mask:
    """Return a mask of at most ``limit`` of the measured pairs: those of randomly drawn prompts."""
    if limit < 1:
        raise UsageError(f"limit must be at least 1 pair, not {limit}.")
    place = random_stream(seed, PAIR_SAMPLE).permutation(len(preferences.prompts))[preferences.prompt_index]
    rows = np.flatnonzero(measured)
    chosen = np.zeros(len(measured), dtype=bool)
    chosen[rows[np.argsort(place[rows], kind="stable")][:limit]] = True
    return chosen


def _features(
    ensemble: RewardEnsemble, preferences: PreferenceSet, stored: str | None, progress: Progress | None
) -> Array:
    texts = texts_of(preferences)
    if stored is None:
        return ensemble.features(texts, progress)
    if not isinstance(ensemble.features, TextFeatures):
        raise UsageError("--features needs an ensemble on frozen features; this one is fine-tuned.")
    return stored_features(stored, texts, ensemble.features)
