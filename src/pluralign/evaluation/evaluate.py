"""How well an ensemble, or anything else that predicts shares, does on votes it has not seen, beside the noise.

Computes; what is shown is decided in ``terminal``, the report and the page. ``evaluate_features`` is the quick part
that every fit runs; ``evaluate`` adds other subjects, groups of pairs and the policy level.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from pluralign.core.arrays import Array, FloatArray
from pluralign.core.errors import DataError, UsageError
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble, texts_of
from pluralign.evaluation.groups import (
    DEFAULT_GROUPINGS,
    AdversarialGroup,
    Group,
    MajorityShare,
    WorstGroup,
    adversarial_calibration,
    as_numbers,
    certain_though_contested,
    check_grouping,
    judge_groups,
    majority_shares,
)
from pluralign.evaluation.predictors import Kind, Source, Subject, ensemble_subject, find_subject, load_subject
from pluralign.features.frozen import TextFeatures
from pluralign.features.store import stored_features
from pluralign.models.causal import response_log_prob
from pluralign.models.loading import reference_folder
from pluralign.theory import calibration
from pluralign.theory.intervals import Interval, clustered_interval, paired_difference
from pluralign.theory.reliability import Reliability, by_stratum, expected_calibration_error, reliability
from pluralign.training.baselines import BASELINE_NAMES, Baseline
from pluralign.training.differences import Differences
from pluralign.training.member_bounds import USED
from pluralign.votes.preferences import PreferenceSet

BETAS = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
"""Strengths of regularisation at which every evaluation shows the policy level."""
LOG_PROB_COLUMNS = ("logprob_a", "logprob_b")


@dataclass(frozen=True)
class Figures:
    """One prediction of the vote shares, judged."""

    brier: float
    brier_corrected: float
    """Brier − noise: an unbiased estimate of the true calibration error (Lemma 1); NaN without pairs of two votes."""
    noise: float
    log_loss: float
    calibration_error: float
    """Expected calibration error over ten bins of equal mass."""
    interval: Interval
    """95 % over prompts, of the corrected Brier score (of the plain one where there is no correction)."""


@dataclass(frozen=True)
class Compared:
    """A baseline's figures, and the ensemble's Brier score less its own, pair by pair."""

    brier: float
    brier_corrected: float
    log_loss: float
    k: int
    difference: Interval
    """Below zero: the ensemble is better."""
    worst_disagreement: float | None
    """Of its members, where it votes."""


@dataclass(frozen=True)
class MemberFigures:
    """One member of the ensemble, judged by itself."""

    weight: float
    disagreement: float
    regret: float


@dataclass(frozen=True)
class Evaluation:
    """Everything measured of a subject on one set of votes."""

    level: str
    """The reading that ``test`` judges: the one an ensemble was fitted for."""
    test: Figures
    levels: Mapping[str, Figures]
    """Every reading: of an ensemble, shares of hard votes and of policies at the fitted temperature."""
    baselines: Mapping[str, Compared]
    members: list[MemberFigures]
    reliability: Reliability
    strata: Mapping[str, tuple[int, float]]
    """Pairs and mean squared error by how people split."""
    pairs: int
    prompts: int


@dataclass(frozen=True)
class SubjectFacts:
    """What was evaluated."""

    name: str
    kind: Kind
    k: int
    temperature: float | None
    note: str


@dataclass(frozen=True)
class Rival:
    """Another subject on the same pairs; differences are ours less its, for each of its readings."""

    name: str
    kind: Kind
    level: str
    readings: Mapping[str, Compared]


@dataclass(frozen=True)
class PolicyRow:
    """The policy level at one strength of regularisation; 0 is the limit, the share of votes."""

    beta: float
    brier: float
    brier_corrected: float
    brier_reference: float | None
    """With the reference policy's log-ratio, where there is a reference."""
    brier_corrected_reference: float | None


@dataclass(frozen=True)
class PolicyLevel:
    """The policy level against the strength of regularisation, from the strongest to none."""

    reference: str | None
    rows: list[PolicyRow]


@dataclass(frozen=True)
class FullEvaluation(Evaluation):
    """An evaluation with everything that ``evaluate`` adds to what a fit reports."""

    subject: SubjectFacts
    against: list[Rival]
    majority: Mapping[str, MajorityShare]
    """What is left of disagreement, by how people split."""
    certain_though_contested: float
    """Share of contested pairs for which one side is given more than .9."""
    groups: Mapping[str, list[Group]]
    worst_group: WorstGroup | None
    adversarial: list[AdversarialGroup]
    policy: PolicyLevel | None
    """None where there are no rewards."""


def evaluate(
    subject: Source,
    preferences: PreferenceSet,
    *,
    against: Sequence[Source] = (),
    groups: Sequence[str] = DEFAULT_GROUPINGS,
    betas: Sequence[float] = (),
    reference: str | None = None,
    features: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> FullEvaluation:
    """Judge an ensemble with the baselines that were fitted with it, or anything else that predicts shares, on votes.

    Args:
        subject: an ensemble or its folder, a transformers reward model (a folder or a hub id), or a file of scores or
            probabilities.
        preferences: the votes; for honest figures, of prompts that the subject did not learn from.
        against: further subjects to compare with, pair by pair.
        groups: how pairs are grouped: ``length``, ``topic``, ``strata``, or a column of the data.
        betas: further strengths of regularisation for the policy level.
        reference: the reference policy: ``data`` for columns logprob_a and logprob_b, or a causal model (a folder, a
            hub id or ``smollm2``).
        features: a folder that ``pluralign encode`` wrote of these votes, for an ensemble over frozen features.
        seed: of topics, random groups, drawings and folds.
        progress: called with texts done and in all.
    """
    for grouping in groups:
        check_grouping(grouping, preferences)
    _check_betas(betas)
    if not isinstance(subject, RewardEnsemble) and find_subject(subject) == "ensemble":
        name, subject = str(subject), RewardEnsemble.load(subject)
    else:
        name = "ensemble"
    if isinstance(subject, RewardEnsemble):
        own, baselines = _read_ensemble(subject, preferences, _features(subject, preferences, features, progress), name)
    elif features:
        raise UsageError("features are what an ensemble over frozen features reads; this subject reads texts.")
    else:
        own, baselines = load_subject(subject, preferences, seed=seed, progress=progress), {}
    rivals = []
    for other in against:
        rival = load_subject(other, preferences, seed=seed, progress=progress)
        worst = _worst_member(rival.votes, rival.weights, preferences)
        readings = {
            reading: _compare(share, own.prob_hat, preferences, rival.k, worst)
            for reading, share in rival.readings.items()
        }
        rivals.append(Rival(rival.name, rival.kind, rival.level, readings))
    p, n, prediction = preferences.prob_a, preferences.n_votes, own.prob_hat
    majority = majority_shares(prediction, p, n, seed=seed)
    by_group, worst_group = judge_groups(prediction, preferences, groups, seed=seed)
    return FullEvaluation(
        **vars(_measure(own, baselines, preferences)),
        subject=SubjectFacts(own.name, own.kind, own.k, own.temperature, own.note),
        against=rivals,
        majority=majority,
        certain_though_contested=certain_though_contested(majority),
        groups=by_group,
        worst_group=worst_group,
        adversarial=adversarial_calibration(prediction, p, n, preferences.prompt_index, seed=seed),
        policy=policy_level(own, preferences, betas, reference, progress),
    )


def _features(
    ensemble: RewardEnsemble, preferences: PreferenceSet, stored: str | None, progress: Progress | None
) -> Array:
    texts = texts_of(preferences)
    if stored is None:
        return ensemble.features(texts, progress)
    if not isinstance(ensemble.features, TextFeatures):
        raise UsageError("features are what an ensemble over frozen features reads; this one reads texts.")
    return stored_features(stored, texts, ensemble.features)


# --- the policy level -----------------------------------------------------------------------------------------------


def policy_level(
    subject: Subject,
    preferences: PreferenceSet,
    betas: Sequence[float] = (),
    reference: str | None = None,
    progress: Progress | None = None,
) -> PolicyLevel | None:
    """Return the Brier score of p̄ = Σ_j α_j σ(Δr_j / β + log π_ref(a)/π_ref(b)) for a grid of β, ending in β → 0.

    Without a reference the log-ratio is 0. The limit is the share of votes, ``ensemble_prob``, with or without it,
    except where rewards tie: there only the reference decides.

    Reference: Appendix A.
    """
    _check_betas(betas)
    if subject.difference is None or subject.weights is None:
        if reference or betas:
            raise UsageError(f"{subject.name} holds probabilities: the policy level needs rewards.")
        return None
    difference, weights = subject.difference, subject.weights
    ratio = None if reference is None else reference_log_ratio(reference, preferences, progress)
    own = [subject.temperature] if subject.temperature else []
    rows = [
        _policy_row(
            beta,
            calibration.policy_prob(difference, weights, beta),
            None if ratio is None else calibration.policy_prob(difference, weights, beta, ratio),
            preferences,
        )
        for beta in sorted({*BETAS, *betas, *own}, reverse=True)
    ]
    limit = None
    if ratio is not None:
        tied = 0.5 * (1.0 + np.tanh(0.5 * ratio))[:, None]
        limit = calibration.ensemble_prob(np.where(difference == 0, tied, (difference > 0).astype(float)), weights)
    rows.append(_policy_row(0.0, subject.readings["vote"], limit, preferences))
    return PolicyLevel(reference, rows)


def _check_betas(betas: Sequence[float]) -> None:
    if bad := [beta for beta in betas if not (math.isfinite(beta) and beta > 0)]:
        raise UsageError(f"beta must be above 0, not {bad[0]:g}; the limit 0 is always shown.")


def _policy_row(
    beta: float, share: FloatArray, with_reference: FloatArray | None, preferences: PreferenceSet
) -> PolicyRow:
    p, n, ties = preferences.prob_a, preferences.n_votes, preferences.counted_ties
    return PolicyRow(
        beta=beta,
        brier=calibration.brier(share, p),
        brier_corrected=calibration.brier_corrected(share, p, n, ties),
        brier_reference=None if with_reference is None else calibration.brier(with_reference, p),
        brier_corrected_reference=(
            None if with_reference is None else calibration.brier_corrected(with_reference, p, n, ties)
        ),
    )


def reference_log_ratio(reference: str, preferences: PreferenceSet, progress: Progress | None = None) -> FloatArray:
    """Return log π_ref(a) − log π_ref(b) of each pair, ``(n_pairs,)``, from columns of the data or a causal model."""
    if reference != "data":
        items = preferences.items()
        log_prob = response_log_prob(reference_folder(reference), texts_of(preferences), progress)
        return np.asarray(log_prob[items.a] - log_prob[items.b])
    sides = []
    for name in LOG_PROB_COLUMNS:
        values = as_numbers(preferences.columns[name]) if name in preferences.columns else None
        if values is None:
            remedy = f"give each row numbers in {' and '.join(LOG_PROB_COLUMNS)}, or name a model as --reference"
            raise DataError(f"there is no column of numbers {name}", file=preferences.name, remedy=remedy)
        if not np.isfinite(values).all():
            pair = int(np.argmin(np.isfinite(values)))
            remedy = "give the log-probability of every response"
            raise DataError(f"{name} of pair {pair + 1} is missing or not finite", file=preferences.name, remedy=remedy)
        sides.append(values)
    return np.asarray(sides[0] - sides[1])


# --- the quick part, which every fit runs ---------------------------------------------------------------------------


def baselines_of(ensemble: RewardEnsemble) -> dict[str, Baseline]:
    """Return the baselines that were fitted beside an ensemble."""
    formulas = ensemble.facts.get("baseline_formulas", {})
    return {name: Baseline(formula, ensemble.baselines[name]) for name, formula in formulas.items()}


def baseline_shares(ensemble: RewardEnsemble, preferences: PreferenceSet) -> dict[str, FloatArray]:
    """Return the share that each fitted baseline predicts for each pair."""
    items = preferences.items()
    inputs = ensemble.members.inputs(ensemble.features(texts_of(preferences)))
    pairs = Differences(inputs, items.a, items.b)
    return {name: baseline.prob_hat(pairs) for name, baseline in baselines_of(ensemble).items()}


def evaluate_features(ensemble: RewardEnsemble, preferences: PreferenceSet, features: Array) -> Evaluation:
    """Judge an ensemble on texts whose features are at hand, in the order of ``texts_of(preferences)``."""
    subject, baselines = _read_ensemble(ensemble, preferences, features)
    return _measure(subject, baselines, preferences)


@dataclass(frozen=True, eq=False)
class _Predicted:
    """What a baseline predicts."""

    share: FloatArray
    k: int = 1
    worst: float | None = None


def _read_ensemble(
    ensemble: RewardEnsemble, preferences: PreferenceSet, features: Array, name: str = "ensemble"
) -> tuple[Subject, dict[str, _Predicted]]:
    """Return what an ensemble and its baselines predict; inputs are shared between them."""
    items = preferences.items()
    inputs = ensemble.members.inputs(features)
    rewards = np.asarray(inputs @ ensemble.members.theta, dtype=np.float64)
    pairs = Differences(inputs, items.a, items.b)
    baselines = {}
    for baseline_name, baseline in baselines_of(ensemble).items():
        worst = _worst_member(baseline.votes(pairs), baseline.arrays.get("weights"), preferences)
        baselines[baseline_name] = _Predicted(baseline.prob_hat(pairs), baseline.k, worst)
    return ensemble_subject(ensemble, rewards[items.a], rewards[items.b], name), baselines


def _worst_member(votes: FloatArray | None, weights: Array | None, preferences: PreferenceSet) -> float | None:
    """Return the largest disagreement of a member that has weight, where there are votes."""
    if votes is None or weights is None:
        return None
    return float(np.max(np.asarray(calibration.disagreement(votes, preferences.prob_a))[weights > USED]))


def _measure(subject: Subject, baselines: Mapping[str, _Predicted], preferences: PreferenceSet) -> Evaluation:
    p, prediction, votes = preferences.prob_a, subject.prob_hat, subject.votes
    rivals = {
        "floor": _Predicted((p > 0.5).astype(float)),
        "constant_half": _Predicted(np.full(len(p), 0.5)),
        **baselines,
    }
    members = []
    if votes is not None and subject.weights is not None:
        phi = np.asarray(calibration.disagreement(votes, p))
        members = [
            MemberFigures(float(weight), float(phi[j]), calibration.regret(votes[:, j], p))
            for j, weight in enumerate(subject.weights)
        ]
    return Evaluation(
        level=subject.level,
        test=_figures(prediction, preferences),
        levels={name: _figures(share, preferences) for name, share in subject.readings.items()},
        baselines={
            name: _compare(rival.share, prediction, preferences, rival.k, rival.worst) for name, rival in rivals.items()
        },
        members=members,
        reliability=reliability(prediction, p),
        strata=by_stratum(calibration.squared_error(prediction, p), p),
        pairs=len(preferences),
        prompts=len(preferences.prompts),
    )


# --- as rows --------------------------------------------------------------------------------------------------------

READING_NAMES = {"vote": "votes", "policy": "policies", "tempered": "σ(Δr/T)", "prob": "as given"}


@dataclass(frozen=True)
class Prediction:
    """One way to predict the shares, as a row of a comparison."""

    name: str
    k: int
    brier: float
    brier_corrected: float | None
    log_loss: float
    worst: float | None
    """The most that one of its members disagrees, where it votes."""
    interval: Mapping[str, float] | None
    """Of its own corrected Brier score; of the subject's readings only."""
    difference: Mapping[str, float] | None
    """The subject's Brier score less its own; None of the subject's own readings, and where there is one prompt."""
    judged: bool
    """Whether it is the reading that the subject is judged by."""


def comparison(facts: Mapping[str, Any]) -> list[Prediction]:
    """Return every prediction in the facts of a fit or an evaluation, best first."""
    subject = facts.get("subject", {"kind": "ensemble", "name": "ensemble"})
    name = "ensemble" if subject["kind"] == "ensemble" else PurePath(subject["name"]).name
    worst = max((member["disagreement"] for member in facts["members"] if member["weight"] > USED), default=None)
    k = len(facts["members"]) or 1
    rows = [
        Prediction(
            _row_name(subject["kind"], name, level), k, own["brier"], own["brier_corrected"], own["log_loss"], worst,
            own["interval"], None, level == facts["level"],
        )
        for level, own in facts["levels"].items()
    ]  # fmt: skip
    others = [(BASELINE_NAMES.get(key, key), other) for key, other in facts["baselines"].items()]
    for rival in facts.get("against", []):
        name = PurePath(rival["name"]).name
        others += [(_row_name(rival["kind"], name, reading), other) for reading, other in rival["readings"].items()]
    rows += [
        Prediction(
            label, other["k"], other["brier"], other["brier_corrected"], other["log_loss"],
            other["worst_disagreement"], None, other["difference"] if other["difference"]["low"] is not None else None,
            False,
        )
        for label, other in others
    ]  # fmt: skip
    return sorted(rows, key=lambda row: row.brier)


def _row_name(kind: str, name: str, reading: str) -> str:
    return f"{name}: {'σ(Δr)' if reading == 'policy' and kind != 'ensemble' else READING_NAMES[reading]}"


def standing(difference: Mapping[str, float]) -> str:
    """Say where the subject stands to a rival: ``ahead of``, ``behind``, or ``level with`` where 0 is in the interval.

    Example:
        >>> standing({"low": -0.01, "high": 0.002})
        'level with'
    """
    return "ahead of" if difference["high"] < 0 else "behind" if difference["low"] > 0 else "level with"


KINDS = {"ahead of": "good", "level with": "level", "behind": "behind"}
"""How a page marks a verdict."""


def verdicts(facts: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield how an ensemble stands to its rivals, in sentences for someone who has not read the paper.

    Each has a ``kind``: ``good``, ``level`` where the votes do not tell, or ``behind``. Always ½ is named only where
    the ensemble is not ahead of it.
    """
    if not facts.get("test") or not facts.get("baselines"):
        return
    words = {
        "floor": {
            "ahead of": "It predicts people's votes better than any single yes-or-no judge could, even a perfect one",
            "behind": "A perfect single yes-or-no judge would predict people's votes better",
            "level with": "These votes do not tell it from a perfect single yes-or-no judge",
        },
        "soft_bt": {
            "ahead of": "It predicts shares better than one ordinary reward model read as a probability (soft BT)",
            "behind": "One ordinary reward model read as a probability (soft BT) predicts shares better",
            "level with": "These votes do not tell it from one ordinary reward model read as a probability (soft BT)",
        },
        "constant_half": {
            "behind": "Always saying half and half would predict the votes better",
            "level with": "These votes do not tell it from always saying half and half",
        },
    }
    for rival, sentences in words.items():
        found = facts["baselines"].get(rival)
        if not found or found["difference"]["low"] is None:
            continue
        gap, where = found["difference"], standing(found["difference"])
        if where in sentences:
            scores = f"Brier score {facts['test']['brier']:.4f} against {found['brier']:.4f}"
            text = f"{sentences[where]}: {scores}, difference {gap['low']:+.4f} to {gap['high']:+.4f} (95 %)."
            if rival == "soft_bt" and where == "behind":
                text += " But one reward has one answer for all; what members add is an answer for each of them."
            yield {"kind": KINDS[where], "text": text.replace("-0.", "−0.")}


# --- judging one prediction -----------------------------------------------------------------------------------------


def _figures(prediction: FloatArray, preferences: PreferenceSet) -> Figures:
    p, n, ties = preferences.prob_a, preferences.n_votes, preferences.counted_ties
    error = calibration.squared_error(prediction, p)
    corrected = error - calibration.sampling_noise(p, n, ties)
    values = corrected if not np.isnan(corrected).all() else error
    return Figures(
        brier=calibration.brier(prediction, p),
        brier_corrected=calibration.brier_corrected(prediction, p, n, ties),
        noise=calibration.noise(p, n, ties),
        log_loss=calibration.log_loss(prediction, p),
        calibration_error=expected_calibration_error(prediction, p),
        interval=clustered_interval(values, preferences.prompt_index),
    )


def _compare(
    share: FloatArray, prediction: FloatArray, preferences: PreferenceSet, k: int = 1, worst: float | None = None
) -> Compared:
    p, n, ties = preferences.prob_a, preferences.n_votes, preferences.counted_ties
    ours, theirs = calibration.squared_error(prediction, p), calibration.squared_error(share, p)
    return Compared(
        brier=calibration.brier(share, p),
        brier_corrected=calibration.brier_corrected(share, p, n, ties),
        log_loss=calibration.log_loss(share, p),
        k=k,
        difference=paired_difference(ours, theirs, preferences.prompt_index),
        worst_disagreement=worst,
    )
