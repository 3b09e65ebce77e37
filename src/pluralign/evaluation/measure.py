"""The figures of a predictor on votes: of an ensemble, of its baselines, and of each member."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pluralign.core.arrays import Array, FloatArray
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT, Compared, Evaluation, Figures, MemberFigures
from pluralign.evaluation.predictors import Predictor, ensemble_predictor
from pluralign.evaluation.voices import evidence_of_voices
from pluralign.theory import calibration
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval, clustered_interval, paired_difference
from pluralign.theory.reliability import by_stratum, expected_calibration_error, reliability
from pluralign.training.baselines import Baseline
from pluralign.training.pairs import Differences
from pluralign.votes.preferences import PreferenceSet, texts_of


def baselines_of(ensemble: RewardEnsemble) -> dict[str, Baseline]:
    """Return the baselines that were fitted with an ensemble."""
    formulas = ensemble.record.baseline_formulas
    return {name: Baseline(formula, ensemble.baselines[name]) for name, formula in formulas.items()}


def baseline_shares(ensemble: RewardEnsemble, preferences: PreferenceSet) -> dict[str, FloatArray]:
    """Return the shares that each fitted baseline predicts, each ``(n_pairs,)``."""
    items = preferences.items()
    inputs = ensemble.members.inputs(ensemble.features(texts_of(preferences)))
    pairs = Differences(inputs, items.a, items.b)
    return {name: baseline.prob_hat(pairs) for name, baseline in baselines_of(ensemble).items()}


def evaluate_features(ensemble: RewardEnsemble, preferences: PreferenceSet, features: Array) -> Evaluation:
    """Measure an ensemble on votes, given the features of ``texts_of(preferences)`` in that order."""
    subject, baselines = read_ensemble(ensemble, preferences, features)
    return measure(subject, baselines, preferences)


@dataclass(frozen=True, eq=False)
class BaselinePrediction:
    """The prediction of a baseline."""

    share: FloatArray
    k: int = 1
    worst: float | None = None


def read_ensemble(
    ensemble: RewardEnsemble, preferences: PreferenceSet, features: Array, name: str = "ensemble"
) -> tuple[Predictor, dict[str, BaselinePrediction]]:
    """Return the predictions of an ensemble and of its baselines, which share its inputs."""
    items = preferences.items()
    inputs = ensemble.members.inputs(features)
    rewards = np.asarray(inputs @ ensemble.members.theta, dtype=np.float64)
    pairs = Differences(inputs, items.a, items.b)
    baselines = {}
    for baseline_name, baseline in baselines_of(ensemble).items():
        worst = worst_disagreement(baseline.votes(pairs), baseline.arrays.get("weights"), preferences)
        baselines[baseline_name] = BaselinePrediction(baseline.prob_hat(pairs), baseline.k, worst)
    return ensemble_predictor(ensemble, rewards[items.a], rewards[items.b], name), baselines


def worst_disagreement(votes: FloatArray | None, weights: Array | None, preferences: PreferenceSet) -> float | None:
    """Return the largest disagreement of a member whose weight counts, or None without votes."""
    if votes is None or weights is None:
        return None
    return float(np.max(np.asarray(calibration.disagreement(votes, preferences.prob_a))[weights > NEGLIGIBLE_WEIGHT]))


def measure(subject: Predictor, baselines: Mapping[str, BaselinePrediction], preferences: PreferenceSet) -> Evaluation:
    """Return the figures of a predictor, of its baselines, of the floor and of constant ½ on the same votes.

    Where most pairs have fewer than four votes, the floor has no corrected score and no interval
    (``calibration.floor_is_measurable``). With fewer than 20 prompts nothing has an interval.
    """
    p, prediction, votes = preferences.prob_a, subject.prob_hat, subject.votes
    rivals = {
        "floor": BaselinePrediction((p > 0.5).astype(float)),
        "constant_half": BaselinePrediction(np.full(len(p), 0.5)),
        **baselines,
    }
    compared = {
        name: compare(rival.share, prediction, preferences, rival.k, rival.worst) for name, rival in rivals.items()
    }
    if not calibration.floor_is_measurable(preferences.n_votes):
        compared["floor"] = without_verdict(compared["floor"])
    members = []
    if votes is not None and subject.weights is not None:
        phi = np.asarray(calibration.disagreement(votes, p))
        members = [
            MemberFigures(float(weight), float(phi[j]), calibration.regret(votes[:, j], p))
            for j, weight in enumerate(subject.weights)
        ]
    several = subject.kind == "ensemble" and sum(member.weight > NEGLIGIBLE_WEIGHT for member in members) > 1
    shares = {name: baseline.share for name, baseline in baselines.items()}
    return Evaluation(
        level=subject.level,
        test=_figures(prediction, preferences),
        levels={name: _figures(share, preferences) for name, share in subject.readings.items()},
        baselines=compared,
        members=members,
        undecided=subject.undecided,
        reliability=reliability(prediction, p),
        strata=by_stratum(calibration.squared_error(prediction, p), p),
        pairs=len(preferences),
        prompts=len(preferences.prompts),
        voices=evidence_of_voices(subject.readings, shares, preferences) if several else None,
    )


def without_verdict(rival: Compared) -> Compared:
    """Return a baseline whose score on these votes allows no comparison: without corrected score and interval."""
    return replace(
        rival, brier_corrected=math.nan, difference=Interval(rival.difference.mean, math.nan, math.nan, math.nan)
    )


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
        absolute_error=calibration.absolute_error(prediction, p),
        calibration_error=expected_calibration_error(prediction, p),
        interval=clustered_interval(values, preferences.prompt_index, min_clusters=ENOUGH_CLUSTERS),
    )


def compare(
    share: FloatArray, prediction: FloatArray, preferences: PreferenceSet, k: int = 1, worst: float | None = None
) -> Compared:
    """Compare a rival's predicted shares with ``prediction``, the shares of the predictor that is measured."""
    p, n, ties = preferences.prob_a, preferences.n_votes, preferences.counted_ties
    ours, theirs = calibration.squared_error(prediction, p), calibration.squared_error(share, p)
    return Compared(
        brier=calibration.brier(share, p),
        brier_corrected=calibration.brier_corrected(share, p, n, ties),
        log_loss=calibration.log_loss(share, p),
        absolute_error=calibration.absolute_error(share, p),
        k=k,
        difference=paired_difference(ours, theirs, preferences.prompt_index, min_clusters=ENOUGH_CLUSTERS),
        worst_disagreement=worst,
    )
