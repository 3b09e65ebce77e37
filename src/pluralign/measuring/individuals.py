"""How well an ensemble represents individuals: predictions of a rater's votes from a few of the rater's own choices.

Each rater counts once: scores are means over a rater's votes, then over raters. Intervals resample raters. Only these
figures are saved, never a rater's id or scores.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from pluralign.core.arrays import Array, FloatArray, IntArray, Mask
from pluralign.core.errors import DataError, UsageError
from pluralign.core.json_values import to_json
from pluralign.core.random_streams import RATER_CHOICES, random_stream
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import REPRESENTATION_FILE, load_beside, save_beside
from pluralign.ensemble.record import PromptHashes, are_trained
from pluralign.learning.measure import baselines_of
from pluralign.learning.pairs import Differences, row_squares
from pluralign.learning.raters import fit_rater_reward
from pluralign.theory.calibration import sigmoid, with_undecided
from pluralign.theory.intervals import Interval, clustered_interval
from pluralign.theory.posterior import choice_log_likelihood, person_chances, person_posterior, predicted_choice
from pluralign.votes.raters import RaterVotes

# --- Predictions of each rater's votes from some of the rater's own choices on other prompts.


CHOICES = (0, 1, 3, 5, 10, 20)
"""Numbers of choices. A last row uses all of a rater's choices."""
ALL = -1
FOLDS = 5
"""A rater's prompts are predicted in at most this many parts, each from choices on the other prompts."""
MIN_VOTES = 5
"""Fewest predicted votes of a rater."""
MAX_RATERS = 2000
"""A random sample of so many raters is measured if there are more."""
MAX_OWN_CHOICES = 300
"""Most choices that a rater's own reward is fitted to. Its cost grows with their cube."""
VARIANCES = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Prior variances of a rater's own reward, of the reward difference of a typical pair."""
CLIP = 1e-6
"""Smallest probability in a log loss."""


@dataclass(frozen=True, eq=False)
class PairPredictions:
    """What the predictions of a rater's votes need, for every pair of the data."""

    vote: FloatArray
    """P(a) by each member: u/2 + (1 − u) σ(Δr_j / β), ``(n_pairs, k)``."""
    chance: FloatArray
    """``person_chances``: P(a) by every kind of person, ``(n_pairs, k + 1, n_factors)``."""
    prior: FloatArray
    """Prior of every kind of person, ``(k + 1, n_factors)``."""
    weights: FloatArray
    """α, ``(k,)``."""
    soft_bt: FloatArray
    """P(a) by one soft Bradley–Terry reward, ``(n_pairs,)``."""
    pairs: Differences
    """Feature differences, scaled so that the mean |x_a − x_b|² is 1, ``(n_pairs, d)``."""


@dataclass(frozen=True, eq=False)
class RowScores:
    """Scores of every predictor with one number of choices, one line per rater, each rater's mean over votes."""

    accuracy: Mapping[str, FloatArray]
    """By key of ``PREDICTORS``, ``(n_raters,)``; ``own`` is ``(n_raters, n_variances)``."""
    log_loss: Mapping[str, FloatArray]
    votes: IntArray
    """Number of predicted votes, ``(n_raters,)``."""
    choices: FloatArray
    """Mean number of choices behind a predicted vote, ``(n_raters,)``."""


def vote_accuracy(probability: FloatArray, chose_a: FloatArray) -> FloatArray:
    """Return 1 for each vote that was predicted, 0 for the others, 1/2 if the prediction or the vote is a tie.

    Args:
        probability: P(a), ``(n, m)``.
        chose_a: 1, 0 or 1/2, ``(n,)``.

    Example:
        >>> vote_accuracy(np.array([[0.7, 0.5], [0.7, 0.2]]), np.array([1.0, 0.0]))
        array([[1. , 0.5],
               [0. , 1. ]])
    """
    return np.asarray((1 + np.sign(probability - 0.5) * np.sign(chose_a - 0.5)[:, None]) / 2)


def vote_log_loss(probability: FloatArray, chose_a: FloatArray) -> FloatArray:
    """Return −y log q − (1 − y) log(1 − q) of each vote y, with q clipped to [CLIP, 1 − CLIP], ``(n, m)``."""
    q, y = np.clip(probability, CLIP, 1 - CLIP), chose_a[:, None]
    return np.asarray(-(y * np.log(q) + (1 - y) * np.log1p(-q)))


def qualified_raters(votes: RaterVotes, measured: Mask, seed: int) -> IntArray:
    """Return the raters with votes on at least two prompts and ``MIN_VOTES`` votes on measured prompts.

    Args:
        votes: the votes.
        measured: the prompts whose votes may be predicted, ``(n_prompts,)``.
        seed: of the sample, if there are more than ``MAX_RATERS``.
    """
    prompt = votes.prompt
    _, first = np.unique(votes.rater.astype(np.int64) * len(measured) + prompt, return_index=True)
    n_prompts = np.bincount(votes.rater[first], minlength=votes.n_raters)
    n_predicted = np.bincount(votes.rater[measured[prompt]], minlength=votes.n_raters)
    qualified = np.flatnonzero((n_prompts >= 2) & (n_predicted >= MIN_VOTES))
    if len(qualified) <= MAX_RATERS:
        return qualified
    return np.sort(random_stream(seed, RATER_CHOICES).choice(qualified, MAX_RATERS, replace=False))


def score_raters(
    predictions: PairPredictions,
    votes: RaterVotes,
    measured: Mask,
    *,
    choices: Sequence[int] = CHOICES,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[int, RowScores]:
    """Predict the votes of every qualified rater from m of the rater's choices on other prompts, for each m.

    The measured prompts of a rater are split at random into at most ``FOLDS`` parts. The votes on a part are predicted
    from m random votes of the same rater on all other prompts. More choices include the fewer ones. A part with
    fewer than m choices is left out of row m, and so is a rater with fewer than ``MIN_VOTES`` predicted votes.

    Args:
        predictions: for every pair.
        votes: the votes.
        measured: the prompts whose votes may be predicted, ``(n_prompts,)``. Choices may come from all prompts.
        choices: the numbers m.
        seed: of the parts and the choices.
        progress: called with the raters done and their number.

    Returns:
        The scores by m; ``ALL`` is the row that uses all choices.
    """
    order = np.argsort(votes.rater, kind="stable")
    ends = np.searchsorted(votes.rater[order], np.arange(votes.n_raters + 1))
    raters = qualified_raters(votes, measured, seed)
    rows: dict[int, list[tuple[_Scores, _Scores, int, float]]] = {}
    for done, rater in enumerate(raters.tolist()):
        own = order[ends[rater] : ends[rater + 1]]
        for m, scores in _score_rater(predictions, votes, own, measured, choices, seed):
            rows.setdefault(m, []).append(scores)
        if progress:
            progress(done + 1, len(raters))
    found = {}
    for m in sorted(rows, key=lambda m: (m == ALL, m)):
        accuracy, loss, counts, used = zip(*rows[m], strict=True)
        found[m] = RowScores(_stacked(accuracy), _stacked(loss), np.array(counts, dtype=np.int64), np.array(used))
    return found


_Scores: TypeAlias = dict[str, FloatArray]


def _stacked(lines: Sequence[_Scores]) -> _Scores:
    return {name: np.stack([line[name] for line in lines]) for name in lines[0]}


def _score_rater(
    predictions: PairPredictions, votes: RaterVotes, own: IntArray, measured: Mask, choices: Sequence[int], seed: int
) -> Iterator[tuple[int, tuple[_Scores, _Scores, int, float]]]:
    """Yield (m, accuracy and log loss by predictor, predicted votes, mean number of choices) of one rater."""
    prompt, pair, y = votes.prompt[own], votes.pair[own], votes.chose_a[own]
    random = random_stream(seed, RATER_CHOICES, int(votes.rater[own[0]]))
    prompts = random.permutation(np.unique(prompt[measured[prompt]]))
    differences = predictions.pairs.rows(pair.astype(np.int64)).astype(np.float64)
    gram = differences @ differences.T
    log_likelihood = choice_log_likelihood(predictions.chance[pair], y, 1 - y)
    inside = [np.isin(prompt, part) for part in np.array_split(prompts, min(FOLDS, len(prompts)))]
    parts = [(np.flatnonzero(part), random.permutation(np.flatnonzero(~part))) for part in inside]
    for m in (*choices, ALL):
        enough = [(rows, pool if m == ALL else pool[:m]) for rows, pool in parts if len(pool) >= (m if m >= 0 else 1)]
        predicted = np.concatenate([rows for rows, _ in enough]) if enough else np.empty(0, dtype=np.int64)
        if len(predicted) < MIN_VOTES:
            continue
        by_part: dict[str, list[FloatArray]] = defaultdict(list)
        for rows, chosen in enough:
            posterior = person_posterior(log_likelihood[chosen], predictions.prior)
            chance, few = predictions.chance[pair[rows]], chosen[:MAX_OWN_CHOICES]
            of_members = predictions.vote[pair[rows]]
            dual = fit_rater_reward(gram[np.ix_(few, few)], y[few], VARIANCES)
            by_part["ensemble"].append((of_members @ predictions.weights)[:, None])
            by_part["prior"].append(predicted_choice(chance, predictions.prior)[:, None])
            by_part["posterior"].append(predicted_choice(chance, posterior)[:, None])
            by_part["member"].append(of_members[:, [int(posterior[:-1].sum(axis=1).argmax())]])
            by_part["soft_bt"].append(predictions.soft_bt[pair[rows]][:, None])
            by_part["hindsight"].append(of_members)
            by_part["own"].append(sigmoid(gram[np.ix_(rows, few)] @ dual.T))
        joined = {name: np.concatenate(found) for name, found in by_part.items()}
        accuracy = {name: np.squeeze(vote_accuracy(p, y[predicted]).mean(axis=0)) for name, p in joined.items()}
        loss = {name: np.squeeze(vote_log_loss(p, y[predicted]).mean(axis=0)) for name, p in joined.items()}
        accuracy["hindsight"], loss["hindsight"] = accuracy["hindsight"].max(), loss["hindsight"].min()
        mean_used = sum(len(rows) * len(chosen) for rows, chosen in enough) / len(predicted)
        yield m, (accuracy, loss, len(predicted), mean_used)


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
    items, u, beta, model = votes.preferences.items(), ensemble.undecided, ensemble.temperature, ensemble.choice_model
    inputs = ensemble.members.inputs(features)
    pairs = Differences(inputs, items.a, items.b)

    def difference(theta: FloatArray) -> FloatArray:
        rewards = np.asarray(inputs @ theta, dtype=np.float64)
        return np.asarray(rewards[items.a] - rewards[items.b])

    of_members, theta = difference(ensemble.members.theta), ensemble.average_theta
    average = None if theta is None else difference(theta)
    scale = float(np.mean(row_squares(pairs), dtype=np.float64)) or 1.0
    predictions = PairPredictions(
        vote=with_undecided(sigmoid(of_members / beta), u),
        chance=person_chances(of_members, average, ensemble.weights, beta, u, model),
        prior=model.prior(ensemble.weights),
        weights=ensemble.weights,
        soft_bt=baselines["soft_bt"].prob_hat(pairs),
        pairs=replace(pairs, inputs=inputs / np.sqrt(scale).astype(inputs.dtype)),
    )
    prompts = votes.preferences.prompts
    measured = np.ones(len(prompts), dtype=bool) if trained_on is None else ~are_trained(prompts, trained_on)
    scores = score_raters(predictions, votes, measured, choices=choices, seed=seed, progress=progress)
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
    return save_beside(Path(folder), REPRESENTATION_FILE, to_json(found))


def load_representation(folder: str | os.PathLike[str]) -> Representation | None:
    """Read the figures from the folder of an ensemble; None if there are none, or if they are of another fit."""
    remedy = "run pluralign evaluate --raters again, or delete the file"
    return load_beside(Path(folder), REPRESENTATION_FILE, Representation, remedy)
