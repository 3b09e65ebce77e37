"""How well an ensemble predicts votes it has not seen, beside every baseline and the noise.

Computes; what is shown is decided in ``terminal`` and, later, the report.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign import calibration
from pluralign.baselines import Baseline
from pluralign.calibration import Interval, Reliability
from pluralign.encoders import Progress
from pluralign.ensemble import RewardEnsemble, texts_of
from pluralign.options import Level
from pluralign.preferences import PreferenceSet

Array: TypeAlias = npt.NDArray[np.floating[Any]]
FloatArray: TypeAlias = npt.NDArray[np.float64]


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
    """Everything measured of an ensemble on one set of votes."""

    level: Level
    """The reading that ``test`` judges: the one the ensemble was fitted for."""
    test: Figures
    levels: Mapping[Level, Figures]
    """Both readings: shares of hard votes, and of policies at the fitted temperature."""
    baselines: Mapping[str, Compared]
    members: list[MemberFigures]
    reliability: Reliability
    strata: Mapping[str, tuple[int, float]]
    """Pairs and mean squared error by how people split."""
    pairs: int
    prompts: int


def evaluate(ensemble: RewardEnsemble, preferences: PreferenceSet, *, progress: Progress | None = None) -> Evaluation:
    """Judge an ensemble, and the baselines that were fitted with it, on votes."""
    features = ensemble.features(texts_of(preferences), progress)
    return evaluate_features(ensemble, preferences, features)


def baselines_of(ensemble: RewardEnsemble) -> dict[str, Baseline]:
    """Return the baselines that were fitted beside an ensemble."""
    formulas = ensemble.facts.get("baseline_formulas", {})
    return {name: Baseline(formula, ensemble.baselines[name]) for name, formula in formulas.items()}


def baseline_shares(ensemble: RewardEnsemble, preferences: PreferenceSet) -> dict[str, FloatArray]:
    """Return the share that each fitted baseline predicts for each pair."""
    items = preferences.items()
    inputs = ensemble.members.inputs(ensemble.features(texts_of(preferences)))
    a, b = inputs[items.a], inputs[items.b]
    return {name: baseline.prob_hat(a, b) for name, baseline in baselines_of(ensemble).items()}


def evaluate_features(ensemble: RewardEnsemble, preferences: PreferenceSet, features: Array) -> Evaluation:
    """``evaluate`` for texts whose features are at hand, in the order of ``texts_of(preferences)``."""
    items = preferences.items()
    inputs = ensemble.members.inputs(features)
    rewards = np.asarray(inputs @ ensemble.members.theta, dtype=np.float64)
    difference = rewards[items.a] - rewards[items.b]
    votes = calibration.votes_from_rewards(difference, np.zeros_like(difference))
    predictions: dict[Level, FloatArray] = {
        "vote": calibration.ensemble_prob(votes, ensemble.weights),
        "policy": calibration.policy_prob(difference, ensemble.weights, ensemble.temperature),
    }
    level: Level = ensemble.facts.get("level", "vote")
    prediction, p = predictions[level], preferences.prob_a
    inputs_a, inputs_b = inputs[items.a], inputs[items.b]
    baselines = {
        "floor": _compare((p > 0.5).astype(float), prediction, preferences),
        "constant_half": _compare(np.full(len(p), 0.5), prediction, preferences),
    }
    for name, baseline in baselines_of(ensemble).items():
        own, worst = baseline.votes(inputs_a, inputs_b), None
        if own is not None:
            used = baseline.arrays["weights"] > 1e-6
            worst = float(np.max(np.asarray(calibration.disagreement(own, p))[used]))
        baselines[name] = _compare(baseline.prob_hat(inputs_a, inputs_b), prediction, preferences, baseline.k, worst)
    phi = np.asarray(calibration.disagreement(votes, p))
    members = [
        MemberFigures(float(weight), float(phi[j]), calibration.regret(votes[:, j], p))
        for j, weight in enumerate(ensemble.weights)
    ]
    return Evaluation(
        level=level,
        test=_figures(prediction, preferences),
        levels={name: _figures(share, preferences) for name, share in predictions.items()},
        baselines=baselines,
        members=members,
        reliability=calibration.reliability(prediction, p),
        strata=calibration.by_stratum(calibration.squared_error(prediction, p), p),
        pairs=len(preferences),
        prompts=len(preferences.prompts),
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
        calibration_error=calibration.expected_calibration_error(prediction, p),
        interval=calibration.clustered_interval(values, preferences.prompt_index),
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
        difference=calibration.paired_difference(ours, theirs, preferences.prompt_index),
        worst_disagreement=worst,
    )
