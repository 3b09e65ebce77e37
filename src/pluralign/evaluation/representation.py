"""How well an ensemble represents individuals: predictions of a rater's votes from a few of the rater's own choices.

Each rater counts once: scores are means over a rater's votes, then over raters. Intervals resample raters. Only these
figures are saved, never a rater's id or scores.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pluralign.core.arrays import Array, FloatArray, IntArray
from pluralign.core.errors import DataError, UsageError
from pluralign.core.json_values import to_json
from pluralign.core.random_streams import RATER_CHOICES, random_stream
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import REPRESENTATION_FILE, load_beside, save_beside
from pluralign.ensemble.training_prompts import PromptHashes, are_trained
from pluralign.evaluation.measure import baselines_of
from pluralign.evaluation.rater_predictions import (
    ALL,
    CHOICES,
    FOLDS,
    MIN_VOTES,
    VARIANCES,
    Predictors,
    RowScores,
    score_raters,
)
from pluralign.theory.intervals import Interval, clustered_interval
from pluralign.training.pairs import Differences
from pluralign.votes.raters import RaterVotes

MIN_RATERS = 10
"""With fewer raters no interval is given: a bootstrap of so few is too narrow."""
PREDICTORS = {
    "posterior": "posterior",
    "prior": "no choices",
    "member": "member",
    "ensemble": "p̂",
    "soft_bt": "soft BT",
    "own": "own",
    "hindsight": "best",
}
"""Every predictor of a row, with the heading of its column."""
LEGEND = (
    "Posterior: members and one reward for everyone, weighted by the rater's choices. No choices: the same before any "
    "choice. Member: the most likely member. p̂: the ensemble's weights. Soft BT: one reward for all raters. Own: a "
    "reward fitted to the rater's choices alone. Best: the best member in hindsight, an upper bound."
)


@dataclass(frozen=True)
class RaterScore:
    """Scores of one predictor, averaged over raters, and their differences from soft BT on the same raters."""

    accuracy: Interval
    log_loss: Interval
    accuracy_difference: Interval
    """Above 0 the predictor is better than soft BT."""
    log_loss_difference: Interval
    """Below 0 the predictor is better than soft BT."""


@dataclass(frozen=True)
class RepresentationRow:
    """Predictions from one number of choices. Rows differ in their raters, so compare within a row."""

    choices: int | None
    """Choices per rater. None: all choices on other prompts."""
    mean_choices: float
    raters: int
    votes: int
    """Predicted votes."""
    predictors: Mapping[str, RaterScore]
    """By key of ``PREDICTORS``."""
    accuracy_gain: Interval
    """Accuracy of the posterior − accuracy of the same predictor without choices. Above 0 the choices help."""
    log_loss_gain: Interval
    """The same difference of log losses. Below 0 the choices help."""


@dataclass(frozen=True)
class Representation:
    """How well an ensemble represents individual raters."""

    rows: list[RepresentationRow]
    raters: int
    """Raters with enough votes."""
    all_raters: int
    prompts: int
    """Prompts with predicted votes."""
    held_out: bool
    """Whether predicted votes are limited to the held-out prompts of the fit."""
    data: str
    without_rater: int = 0
    """Votes without a rater."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures with the keys of the command line's JSON."""
        return dict(to_json(self))


def represent(
    ensemble: RewardEnsemble,
    votes: RaterVotes,
    features: Array,
    trained_on: PromptHashes | None = None,
    *,
    choices: Sequence[int] = CHOICES,
    seed: int = 0,
    progress: Progress | None = None,
) -> Representation:
    """Measure how well an ensemble predicts each rater's votes from some of the rater's choices on other prompts.

    Predictors: members and one reward for everyone, weighted by their posterior given the choices
    (``theory.posterior``), and the same without choices; the member with the highest posterior; the ensemble's weights
    and one soft BT reward; a Bradley–Terry reward fitted to the same choices alone; and the member that predicts best
    in hindsight.

    Args:
        ensemble: the ensemble, with its soft BT baseline.
        votes: votes with raters.
        features: of the texts of ``votes.preferences``, in the order of ``texts_of``.
        trained_on: hashes of the training prompts, whose votes are not predicted. Choices may come from all prompts.
            None: predict the votes on all prompts.
        choices: numbers of choices.
        seed: of the random choices.
        progress: called with the raters done and their number.

    Raises:
        UsageError: the ensemble has no soft BT baseline.
        DataError: no rater has enough votes.
    """
    baselines = baselines_of(ensemble)
    if "soft_bt" not in baselines:
        raise UsageError("--raters compares with the soft BT baseline, and this ensemble has none: fit it again.")
    items = votes.preferences.items()
    inputs = ensemble.members.inputs(features)
    rewards = np.asarray(inputs @ ensemble.members.theta, dtype=np.float64)
    soft_bt = baselines["soft_bt"].prob_hat(Differences(inputs, items.a, items.b))
    average = None
    if (theta := ensemble.average_theta) is not None:
        single = np.asarray(inputs @ theta, dtype=np.float64)
        average = single[items.a] - single[items.b]
    predictors = Predictors.of(ensemble, votes, rewards[items.a] - rewards[items.b], average, soft_bt, inputs)
    prompts = votes.preferences.prompts
    measured = np.ones(len(prompts), dtype=bool) if trained_on is None else ~are_trained(prompts, trained_on)
    scores = score_raters(predictors, votes, measured, choices=choices, seed=seed, progress=progress)
    if not scores:
        raise DataError(
            f"no rater has votes on two prompts and at least {MIN_VOTES} votes that can be predicted",
            file=votes.preferences.name,
            remedy="give more votes per rater",
        )
    return Representation(
        rows=[summarise(m, row, seed) for m, row in scores.items()],
        raters=max(len(row.votes) for row in scores.values()),
        all_raters=votes.n_raters,
        prompts=int(measured.sum()),
        held_out=trained_on is not None,
        data=votes.preferences.name,
        without_rater=votes.without_rater,
    )


def summarise(m: int, row: RowScores, seed: int = 0) -> RepresentationRow:
    """Average the scores of one row over raters, with intervals and differences from soft BT."""
    accuracy, log_loss = dict(row.accuracy), dict(row.log_loss)
    accuracy["hindsight"] = accuracy.pop("members").reshape(len(row.votes), -1).max(axis=1)
    log_loss["hindsight"] = log_loss.pop("members").reshape(len(row.votes), -1).min(axis=1)
    chosen = chosen_variances(log_loss["own"], seed)
    accuracy["own"] = accuracy["own"][np.arange(len(chosen)), chosen]
    log_loss["own"] = log_loss["own"][np.arange(len(chosen)), chosen]
    return RepresentationRow(
        choices=None if m == ALL else m,
        mean_choices=float(row.choices.mean()),
        raters=len(row.votes),
        votes=int(row.votes.sum()),
        predictors={
            name: RaterScore(
                over_raters(accuracy[name]),
                over_raters(log_loss[name]),
                over_raters(accuracy[name] - accuracy["soft_bt"]),
                over_raters(log_loss[name] - log_loss["soft_bt"]),
            )
            for name in PREDICTORS
        },
        accuracy_gain=over_raters(accuracy["posterior"] - accuracy["prior"]),
        log_loss_gain=over_raters(log_loss["posterior"] - log_loss["prior"]),
    )


def chosen_variances(log_loss: FloatArray, seed: int = 0) -> IntArray:
    """Return, per rater, the prior variance whose mean log loss over the raters of other folds is lowest.

    Args:
        log_loss: ``(n_raters, n_variances)``.
        seed: of the folds.
    """
    n = len(log_loss)
    chosen = np.full(n, len(VARIANCES) // 2)
    if n < 2:
        return chosen
    for part in np.array_split(random_stream(seed, RATER_CHOICES, 0, 0).permutation(n), min(FOLDS, n)):
        others = np.delete(log_loss, part, axis=0)
        chosen[part] = int(others.mean(axis=0).argmin())
    return chosen


def over_raters(values: FloatArray) -> Interval:
    """Return the mean over raters with its 95 % bootstrap interval; without interval below ``MIN_RATERS`` raters."""
    if len(values) < MIN_RATERS:
        return Interval(float(np.mean(values)), math.nan, math.nan, math.nan)
    return clustered_interval(values, np.arange(len(values)))


# --- on disk ----------------------------------------------------------------------------------------------------------


def save_representation(found: Representation, folder: str | os.PathLike[str]) -> Path:
    """Write the figures into the folder of their ensemble, for reports and the page."""
    return save_beside(Path(folder), REPRESENTATION_FILE, found.to_json())


def load_representation(folder: str | os.PathLike[str]) -> Representation | None:
    """Read the figures from the folder of an ensemble; None if there are none, or if they are of another fit."""
    remedy = "run pluralign evaluate --raters again, or delete the file"
    return load_beside(Path(folder), REPRESENTATION_FILE, Representation, remedy)
