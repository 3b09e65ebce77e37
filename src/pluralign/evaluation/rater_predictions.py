"""Predictions of each rater's votes from some of the rater's own choices on other prompts.

This module decides which votes are choices, which are predicted, and by whom. ``representation`` summarises the
scores over raters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import Array, FloatArray, IntArray, Mask
from pluralign.core.random_streams import RATER_CHOICES, random_stream
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.theory.calibration import with_undecided
from pluralign.theory.logistic import sigmoid
from pluralign.theory.posterior import choice_log_likelihood, person_chances, person_posterior, predicted_choice
from pluralign.training.pairs import Differences, row_squares
from pluralign.training.rater_reward import fit_rater_reward
from pluralign.votes.raters import RaterVotes

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
class Predictors:
    """What the predictions need, for every pair of the data."""

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
    inputs: Array
    """Features of the distinct texts, scaled so that the mean |x_a − x_b|² is 1, ``(n_items, d)``."""
    a: npt.NDArray[np.int32]
    """Text that is response a of each pair, ``(n_pairs,)``."""
    b: npt.NDArray[np.int32]

    @classmethod
    def of(
        cls,
        ensemble: RewardEnsemble,
        votes: RaterVotes,
        difference: FloatArray,
        average: FloatArray | None,
        soft_bt: FloatArray,
        inputs: Array,
    ) -> "Predictors":
        """Return the predictors of an ensemble.

        Args:
            ensemble: the ensemble.
            votes: the votes to predict.
            difference: reward_a − reward_b of each member, ``(n_pairs, k)``.
            average: reward_a − reward_b of the reward for everyone, ``(n_pairs,)``.
            soft_bt: the shares that the soft BT baseline predicts, ``(n_pairs,)``.
            inputs: the ensemble's inputs of the distinct texts, ``(n_items, d)``.
        """
        items, u = votes.preferences.items(), ensemble.undecided
        scale = float(np.mean(row_squares(Differences(inputs, items.a, items.b)), dtype=np.float64)) or 1.0
        return cls(
            vote=with_undecided(sigmoid(difference / ensemble.temperature), u),
            chance=person_chances(
                difference, average, ensemble.weights, ensemble.temperature, u, ensemble.choice_model
            ),
            prior=ensemble.choice_model.prior(ensemble.weights),
            weights=ensemble.weights,
            soft_bt=soft_bt,
            inputs=inputs / np.sqrt(scale).astype(inputs.dtype),
            a=items.a,
            b=items.b,
        )

    def differences(self, pairs: npt.NDArray[np.int32]) -> FloatArray:
        """Return x_a − x_b of some pairs, ``(n, d)``."""
        return np.asarray(self.inputs[self.a[pairs]] - self.inputs[self.b[pairs]], dtype=np.float64)


@dataclass(frozen=True, eq=False)
class RowScores:
    """Scores of every predictor with one number of choices, one line per rater, each rater's mean over votes."""

    accuracy: Mapping[str, FloatArray]
    """``prior``, ``posterior``, ``member``, ``ensemble``, ``soft_bt``: ``(n_raters,)``. ``members``: ``(n_raters, k)``.
    ``own``: ``(n_raters, n_variances)``."""
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
    predictors: Predictors,
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
        predictors: the predictions for every pair.
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
    rows: dict[int, list[tuple[dict[str, FloatArray], dict[str, FloatArray], int, float]]] = {}
    for done, rater in enumerate(raters.tolist()):
        own = order[ends[rater] : ends[rater + 1]]
        found: dict[int, list[tuple[IntArray, dict[str, FloatArray], int]]] = {}
        for m, predicted, probabilities, used in _predict_rater(predictors, votes, own, measured, choices, seed):
            found.setdefault(m, []).append((predicted, probabilities, used))
        for m, parts in found.items():
            y = votes.chose_a[np.concatenate([predicted for predicted, _, _ in parts])]
            if len(y) < MIN_VOTES:
                continue
            joined = {name: np.concatenate([part[name] for _, part, _ in parts]) for name in parts[0][1]}
            accuracy = {name: vote_accuracy(p, y).mean(axis=0) for name, p in joined.items()}
            loss = {name: vote_log_loss(p, y).mean(axis=0) for name, p in joined.items()}
            mean_used = sum(len(predicted) * n for predicted, _, n in parts) / len(y)
            rows.setdefault(m, []).append((accuracy, loss, len(y), mean_used))
        if progress:
            progress(done + 1, len(raters))
    return {
        m: RowScores(
            {name: _column([line[0][name] for line in lines]) for name in lines[0][0]},
            {name: _column([line[1][name] for line in lines]) for name in lines[0][1]},
            np.array([line[2] for line in lines], dtype=np.int64),
            np.array([line[3] for line in lines]),
        )
        for m, lines in sorted(rows.items(), key=lambda row: (row[0] == ALL, row[0]))
    }


def _column(lines: list[FloatArray]) -> FloatArray:
    """Return one line per rater; a predictor with a single prediction gets a vector."""
    stacked = np.stack(lines)
    return stacked[:, 0] if stacked.shape[1] == 1 else stacked


def _predict_rater(
    predictors: Predictors, votes: RaterVotes, own: IntArray, measured: Mask, choices: Sequence[int], seed: int
) -> Iterator[tuple[int, IntArray, dict[str, FloatArray], int]]:
    """Yield (m, predicted votes, probabilities by predictor, choices used) for each part of a rater's prompts."""
    prompt, pair, y = votes.prompt[own], votes.pair[own], votes.chose_a[own]
    random = random_stream(seed, RATER_CHOICES, int(votes.rater[own[0]]))
    prompts = random.permutation(np.unique(prompt[measured[prompt]]))
    differences = predictors.differences(pair)
    gram = differences @ differences.T
    log_likelihood = choice_log_likelihood(predictors.chance[pair], y, 1 - y)
    for part in np.array_split(prompts, min(FOLDS, len(prompts))):
        is_predicted = np.isin(prompt, part)
        predicted, pool = np.flatnonzero(is_predicted), random.permutation(np.flatnonzero(~is_predicted))
        for m in (*choices, ALL):
            if m > len(pool) or (m == ALL and not len(pool)):
                continue
            chosen = pool if m == ALL else pool[:m]
            posterior = person_posterior(log_likelihood[chosen], predictors.prior)
            chance = predictors.chance[pair[predicted]]
            of_members, few = predictors.vote[pair[predicted]], chosen[:MAX_OWN_CHOICES]
            dual = fit_rater_reward(gram[np.ix_(few, few)], y[few], VARIANCES)
            yield m, own[predicted], {
                "ensemble": (of_members @ predictors.weights)[:, None],
                "prior": predicted_choice(chance, predictors.prior)[:, None],
                "posterior": predicted_choice(chance, posterior)[:, None],
                "member": of_members[:, [int(posterior[:-1].sum(axis=1).argmax())]],
                "soft_bt": predictors.soft_bt[pair[predicted]][:, None],
                "members": of_members,
                "own": sigmoid(gram[np.ix_(predicted, few)] @ dual.T),
            }, len(chosen)  # fmt: skip
