"""The figures of the Calibration tab: scores beside baselines, scores by number of members, and the reliability curve.

Everything was measured in ``evaluation``; this module selects what is shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.random_streams import EXAMPLE_PAIRS, random_stream
from pluralign.core.text import shortened
from pluralign.ensemble.headline import Standing, standing
from pluralign.ensemble.record import Evaluation, FitRecord
from pluralign.evaluation.comparison import (
    Prediction,
    Verdict,
    comparison,
    floor_is_compared,
    verdicts,
)
from pluralign.server.page_examples import VotedPair, voted_pair
from pluralign.theory.intervals import ENOUGH_CLUSTERS, clustered_interval
from pluralign.theory.reliability import reliability
from pluralign.votes.preferences import PreferenceSet

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
