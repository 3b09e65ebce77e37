"""How well predicted vote shares match people's votes, with the noise of few votes taken out.

The module decides what every reported figure means: the Brier score and its correction, the floor, disagreement,
regret, reliability, and intervals that respect prompts. Arrays in, arrays or numbers out; it fits nothing and does not
know how a prediction was made. These arguments mean the same everywhere, and all have shape (n_pairs,):

  prob_a: Observed share of votes for response a, the paper's p. The share in the whole population is p*.
  prob_hat: Predicted share, the paper's p-hat.
  n_votes: Votes counted for the pair, ties included; one number may stand for all pairs.
  n_ties: How many of them were ties, each counted as half a vote for either side; one number may stand for all.

Reference: Halpern, Micha, Procaccia and Shapira, "Pairwise Calibrated Rewards for Pluralistic Alignment". Sections,
definitions and lemmas cited below are that paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray
from pluralign.theory.logistic import sigmoid

BoolArray = npt.NDArray[np.bool_]

_REAL = (-np.inf, np.inf)
# Weights that were once float32 sum to 1 only to about 1e-7, so shares may leave [0, 1] by as much.
_ROUNDING = 1e-6
# Clusters the bootstrap draws at once: three arrays of 4 MB, unless one resample alone is larger.
_DRAWS_PER_BLOCK = 500_000


def _checked(
    name: str,
    values: npt.ArrayLike,
    shape: tuple[int, ...] | None = None,
    low: float = 0.0,
    high: float = 1.0,
    missing: bool = False,
) -> FloatArray:
    """`values` as floats in [low, high], 1-d unless a shape is given; NaN passes only where values may be missing."""
    array = np.asarray(values, dtype=np.float64)
    expected = array.shape[:1] if shape is None else shape
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{name} must be an array with at least one entry, but its shape is {array.shape}.")
    if array.shape != expected:
        raise ValueError(f"{name} must have shape {expected}, but it has shape {array.shape}.")
    valid = np.isfinite(array) & (array >= low - _ROUNDING) & (array <= high + _ROUNDING)
    if missing:
        valid |= np.isnan(array)
    if not valid.all():
        raise ValueError(f"{name} must hold numbers between {low:g} and {high:g}, but it holds {array[~valid][0]:g}.")
    return np.clip(array, low, high)


def _mean_known(values: FloatArray) -> float:
    """Mean of the entries that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def votes_from_rewards(reward_a: npt.ArrayLike, reward_b: npt.ArrayLike) -> FloatArray:
    """Which response each reward model votes for: vote = 1[reward_a > reward_b].

    The paper assumes that rewards never tie. Here a tie counts 1/2, so that exchanging a and b always turns a vote v
    into 1 - v.

    Args:
      reward_a: Rewards of the first responses, (n_pairs,) or (n_pairs, n_members).
      reward_b: Rewards of the second responses, of the same shape.

    Returns:
      Votes in {0, 1/2, 1}, of the same shape.

    Example:
      >>> votes_from_rewards([[2.0, 1.0], [0.0, 3.0]], [[1.0, 1.0], [5.0, 2.0]])
      array([[1. , 0.5],
             [0. , 1. ]])

    Reference: Section 2, the definition of p-hat and its footnote.
    """
    a = _checked("reward_a", reward_a, np.shape(reward_a)[:2], *_REAL)
    b = _checked("reward_b", reward_b, a.shape, *_REAL)
    return 0.5 * (a > b) + 0.5 * (a >= b)


def ensemble_prob(votes: npt.ArrayLike, weights: npt.ArrayLike) -> FloatArray:
    """The share of an ensemble's weight that votes for response a: p_hat = sum_j weights_j votes_j.

    Args:
      votes: Votes of the members, (n_pairs, n_members).
      weights: Weights of the members, non-negative with sum 1, (n_members,).

    Returns:
      prob_hat, (n_pairs,).

    Example:
      >>> ensemble_prob([[1.0, 0.0], [1.0, 1.0]], [0.75, 0.25])
      array([0.75, 1.  ])

    Reference: Section 2, above Definition 1.
    """
    alpha = _checked("weights", weights)
    v = _checked("votes", votes, np.shape(votes)[:1] + alpha.shape)
    if abs(alpha.sum() - 1.0) > _ROUNDING:
        raise ValueError(f"weights must sum to 1, but they sum to {alpha.sum():g}.")
    return np.clip(v @ alpha, 0.0, 1.0)


def policy_prob(
    reward_difference: npt.ArrayLike, weights: npt.ArrayLike, beta: float, log_reference_ratio: npt.ArrayLike = 0.0
) -> FloatArray:
    """The chance that a policy drawn from the ensemble's mixture prefers response a to b.

    Each member's policy maximises its reward less beta times the KL divergence from a reference policy, so it picks a
    from {a, b} with probability sigma((r_a - r_b) / beta + log(pi_ref(a) / pi_ref(b))), and

      p_bar = sum_j weights_j sigma((r_ja - r_jb) / beta + log(pi_ref(a) / pi_ref(b))).

    As beta -> 0 it approaches the share of votes, `ensemble_prob`.

    Args:
      reward_difference: reward_a - reward_b of each member, (n_pairs, n_members).
      weights: Weights of the members, non-negative with sum 1, (n_members,).
      beta: Strength of the regularisation, above 0.
      log_reference_ratio: log(pi_ref(a) / pi_ref(b)) of each pair, (n_pairs,); 0 for a reference that favours neither.

    Returns:
      p_bar, (n_pairs,).

    Example:
      >>> policy_prob([[2.0, -1.0]], [0.75, 0.25], beta=1.0).round(4)
      array([0.7278])
      >>> policy_prob([[2.0, -1.0]], [0.75, 0.25], beta=0.01)
      array([0.75])

    Reference: Appendix A.
    """
    if not beta > 0.0:
        raise ValueError(f"beta must be above 0, but it is {beta}.")
    difference = _checked("reward_difference", reward_difference, np.shape(reward_difference)[:2], *_REAL)
    logit = difference / beta + np.asarray(log_reference_ratio, dtype=np.float64).reshape(-1, 1)
    return ensemble_prob(sigmoid(logit), weights)


def squared_error(prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike) -> FloatArray:
    """(p_hat - p)^2 for each pair, (n_pairs,).

    Example:
      >>> squared_error([0.5, 1.0], [0.75, 1.0])
      array([0.0625, 0.    ])

    Reference: Definition 1, with the observed p for p*.
    """
    p = _checked("prob_a", prob_a)
    return (_checked("prob_hat", prob_hat, p.shape) - p) ** 2


def sampling_noise(prob_a: npt.ArrayLike, n_votes: npt.ArrayLike, n_ties: npt.ArrayLike = 0) -> FloatArray:
    """Unbiased estimate, for each pair, of the variance of its observed share.

    With vote values v_i in {0, 1/2, 1} of n annotators, p = mean v_i, and Var(p) is estimated without bias by

      sum_i (v_i - p)^2 / (n (n - 1)) = (p (1 - p) - n_ties / (4 n)) / (n - 1),

    because sum v_i^2 = n p - n_ties / 4: a tie adds 1/2 to n p but only 1/4 to the sum of squares. The annotators are
    taken to be independent draws from the population; if they *are* the population, there is no such noise.

    Returns:
      Estimated variances, (n_pairs,); NaN for a single vote, which leaves no way to tell.

    Example:
      >>> sampling_noise([0.75, 0.75, 1.0], n_votes=[4, 2, 1], n_ties=[0, 1, 0])
      array([0.0625, 0.0625,    nan])

    Reference: Lemma 1, the integrand of C.
    """
    p = _checked("prob_a", prob_a)
    n, ties = (np.full(p.shape, x) if np.ndim(x) == 0 else x for x in (n_votes, n_ties))
    n = _checked("n_votes", n, p.shape, 1.0, np.inf)
    ties = _checked("n_ties", ties, p.shape, 0.0, np.inf)
    if (ties / (2.0 * n) > np.minimum(p, 1.0 - p) + _ROUNDING).any():
        raise ValueError(
            "n_ties must fit prob_a: each tie is half a vote for either side, but some pair has more ties."
        )
    several = n >= 2.0
    return np.where(several, (p * (1.0 - p) - ties / (4.0 * n)) / np.where(several, n - 1.0, 1.0), np.nan)


def brier(prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike) -> float:
    """Mean squared error against the observed shares, mean (p_hat - p)^2: the true calibration error plus noise.

    Example:
      >>> brier([0.5, 1.0], [0.75, 1.0])
      0.03125

    Reference: Section 3.3, the empirical loss.
    """
    return float(squared_error(prob_hat, prob_a).mean())


def noise(prob_a: npt.ArrayLike, n_votes: npt.ArrayLike, n_ties: npt.ArrayLike = 0) -> float:
    """Unbiased estimate of C in E[brier] = true calibration error + C.

    The mean of `sampling_noise` over the pairs with two votes or more; NaN if there are none.

    Example:
      >>> noise([0.75, 1.0, 1.0], n_votes=[4, 4, 1])
      0.03125

    Reference: Lemma 1.
    """
    return _mean_known(sampling_noise(prob_a, n_votes, n_ties))


def brier_corrected(
    prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike, n_votes: npt.ArrayLike, n_ties: npt.ArrayLike = 0
) -> float:
    """Unbiased estimate of the true calibration error, mean (p_hat - p*)^2.

    mean [(p_hat - p)^2 - sampling_noise], both terms over the pairs with two votes or more; NaN if there are none.
    Unbiased for predictions made without these votes; on votes the ensemble was fitted to, it flatters. Being an
    estimate, it can fall below zero.

    Example:
      >>> brier_corrected([0.25, 1.0], [0.75, 1.0], n_votes=4)
      0.09375

    Reference: Lemma 1, solved for the true loss.
    """
    return _mean_known(squared_error(prob_hat, prob_a) - sampling_noise(prob_a, n_votes, n_ties))


def floor(prob_a: npt.ArrayLike) -> float:
    """The least Brier score a single deterministic reward model can reach on these votes.

    mean min(p, 1 - p)^2, the score of an oracle that votes with the majority of every pair.

    Example:
      >>> floor([0.75, 1.0])
      0.03125

    Reference: Section 5, "Ensemble of weak reward models vs. an optimal single reward model".
    """
    p = _checked("prob_a", prob_a)
    return float((np.minimum(p, 1.0 - p) ** 2).mean())


def floor_corrected(prob_a: npt.ArrayLike, n_votes: npt.ArrayLike, n_ties: npt.ArrayLike = 0) -> float:
    """The corrected Brier score of an oracle that follows each pair's own observed majority.

    mean [min(p, 1 - p)^2 - sampling_noise] over the pairs with two votes or more; NaN if there are none. The oracle
    has seen these very votes, so E[floor_corrected] <= mean min(p*, 1 - p*)^2: it makes the floor look lower than it
    is, even negative where votes are few. That makes it a conservative bar: a predictor that beats it
    beats the true floor, on average, by more.

    Example:
      >>> round(floor_corrected([0.8, 0.6], n_votes=5), 4)
      0.05

    Reference: Section 5 for the floor, Lemma 1 for the correction.
    """
    p = _checked("prob_a", prob_a)
    return _mean_known(np.minimum(p, 1.0 - p) ** 2 - sampling_noise(p, n_votes, n_ties))


def constant_half(prob_a: npt.ArrayLike) -> float:
    """Brier score of predicting 1/2 for every pair, mean (1/2 - p)^2.

    It beats the floor on every pair whose minority is above 1/4, so beating the floor alone proves little.

    Example:
      >>> constant_half([0.75, 0.5])
      0.03125
    """
    return float(((0.5 - _checked("prob_a", prob_a)) ** 2).mean())


def log_loss(prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike, clip: float = 1e-6) -> float:
    """Cross-entropy of the prediction against the observed shares, in nats.

    -mean [p log q + (1 - p) log(1 - q)] with q = p_hat clipped to [clip, 1 - clip]. The least possible value is the
    entropy of the votes, not zero. `clip` matters: a vote against a unanimous ensemble costs -log(clip).

    Args:
      clip: Least probability a prediction may give to either side.

    Example:
      >>> round(log_loss([0.5, 0.5], [0.75, 1.0]), 4)
      0.6931
    """
    if not 0.0 < clip < 0.5:
        raise ValueError(f"clip must lie strictly between 0 and 1/2, but it is {clip:g}.")
    p = _checked("prob_a", prob_a)
    q = np.clip(_checked("prob_hat", prob_hat, p.shape), clip, 1.0 - clip)
    return float(-(p * np.log(q) + (1.0 - p) * np.log1p(-q)).mean())


def regret(prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike) -> float:
    """Extra disagreement with people from deciding each pair by the prediction rather than by the majority.

    mean [1[p_hat > 1/2] (1 - p) + 1[p_hat <= 1/2] p - min(p, 1 - p)]. As printed, p_hat = 1/2 decides for b, so there
    exchanging a and b changes the result. `prob_hat` may be one member's votes.

    Example:
      >>> regret([1.0, 1.0], [0.25, 0.75])
      0.25

    Reference: appendix "BT Objective and Evaluation Metrics".
    """
    p = _checked("prob_a", prob_a)
    chose_a = _checked("prob_hat", prob_hat, p.shape) > 0.5
    return float((np.where(chose_a, 1.0 - p, p) - np.minimum(p, 1.0 - p)).mean())


def disagreement(votes: npt.ArrayLike, prob_a: npt.ArrayLike) -> float | FloatArray:
    """How often a reward model and a random annotator prefer different responses.

    Phi = mean [v (1 - p) + (1 - v) p], which is mean |v - p| for votes in {0, 1}. A reward tie, v = 1/2, is a coin
    flip and meets the other opinion half of the time whatever p is; |1/2 - p| would call it full agreement at p = 1/2.

    Args:
      votes: One member's votes, (n_pairs,), or all members', (n_pairs, n_members).

    Returns:
      Phi: a number for one member, (n_members,) for several. Above 1/2 a member is worse than a coin.

    Example:
      >>> disagreement([[1.0, 0.0], [1.0, 0.5]], [0.75, 1.0])
      array([0.125, 0.625])

    Reference: Section 2, "Outlier reward functions".
    """
    p = _checked("prob_a", prob_a)
    v = _checked("votes", votes, p.shape + np.shape(votes)[1:2])
    phi: FloatArray = (p @ (1.0 - v) + (1.0 - p) @ v) / p.size
    return phi if v.ndim == 2 else float(phi)


def outliers(disagreement: npt.ArrayLike, beta: float, gamma: float, minimum: float) -> BoolArray:
    """Which reward models are (beta, gamma)-outliers: Phi > beta * minimum + gamma.

    Args:
      disagreement: Phi of each member, (n_members,).
      beta: Factor on the least achievable Phi.
      gamma: Slack added to it.
      minimum: The least Phi of any reward model. It is rarely known; mean min(p, 1 - p) is a lower bound of it, and
        a lower bound flags every outlier and perhaps more.

    Returns:
      True for outliers, (n_members,).

    Example:
      >>> outliers([0.2, 0.6], beta=2.0, gamma=0.1, minimum=0.2)
      array([False,  True])

    Reference: Section 2, "Outlier reward functions".
    """
    return _checked("disagreement", disagreement) > beta * minimum + gamma


@dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability curve: one entry per bin that holds a pair, in order of the prediction.

    Attributes:
      predicted: Mean predicted share of the bin's pairs.
      observed: Mean observed share of the bin's pairs.
      count: Number of pairs.
      standard_error: Of `observed`, as if pairs were independent; NaN for a single pair.
    """

    predicted: FloatArray
    observed: FloatArray
    count: npt.NDArray[np.int64]
    standard_error: FloatArray


def reliability(
    prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike, n_bins: int = 10, strategy: Literal["mass", "width"] = "mass"
) -> Reliability:
    """Observed against predicted shares, averaged over bins of similar predictions.

    An ensemble of k members predicts at most 2^k different shares, so `mass` bins are made of whole groups of equal
    predictions; a group goes where the middle of its mass falls, bin = floor(n_bins (mass below + mass / 2)). `width`
    bins are [i / n_bins, (i + 1) / n_bins), the last one closed. Empty bins are left out.

    Args:
      n_bins: Most bins to make.
      strategy: `mass` for bins of about equally many pairs, `width` for bins of equal width.

    Example:
      >>> curve = reliability([0.2, 0.2, 0.8, 0.8], [0.0, 0.5, 0.5, 1.0], n_bins=2)
      >>> curve.predicted, curve.observed, curve.count
      (array([0.2, 0.8]), array([0.25, 0.75]), array([2, 2]))
    """
    p = _checked("prob_a", prob_a)
    q = _checked("prob_hat", prob_hat, p.shape)
    if n_bins < 1:
        raise ValueError(f"n_bins must be at least 1, but it is {n_bins}.")
    # Equal sums of weights differ in the last digits with the order of addition; 9 decimals make them equal again.
    if strategy == "mass":
        _, group, size = np.unique(np.round(q, 9), return_inverse=True, return_counts=True)
        position = ((np.cumsum(size) - size / 2.0) / p.size)[group]
    elif strategy == "width":
        position = q
    else:
        raise ValueError(f"strategy must be 'mass' or 'width', but it is {strategy!r}.")
    bins = np.minimum(np.floor(np.round(position * n_bins, 9)), n_bins - 1)
    _, bins, count = np.unique(bins, return_inverse=True, return_counts=True)
    observed = np.bincount(bins, p) / count
    variance = np.bincount(bins, (p - observed[bins]) ** 2) / np.where(count > 1, count - 1.0, np.nan)
    return Reliability(np.bincount(bins, q) / count, observed, count, np.sqrt(variance / count))


def expected_calibration_error(prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike, n_bins: int = 10) -> float:
    """Mean distance of the reliability curve from the diagonal, against fractional labels.

    sum_b (count_b / n) |predicted_b - observed_b| over the `mass` bins of `reliability`. Zero does not mean pairwise
    calibrated: predicting the overall mean everywhere reaches it.

    Example:
      >>> round(expected_calibration_error([0.2, 0.2, 0.8, 0.8], [0.0, 0.5, 0.5, 1.0], n_bins=2), 4)
      0.05
    """
    curve = reliability(prob_hat, prob_a, n_bins)
    return float(np.average(np.abs(curve.predicted - curve.observed), weights=curve.count))


def strata(prob_a: npt.ArrayLike) -> dict[str, BoolArray]:
    """Pairs grouped by how divided people were.

    Returns:
      Masks that partition the pairs, each (n_pairs,), by the majority's share: `unanimous` (1), `lopsided` (above
      2/3), `contested` (at most 2/3) and `even` (1/2).

    Example:
      >>> {name: int(mask.sum()) for name, mask in strata([0.0, 1 / 3, 0.5, 0.8, 1.0]).items()}
      {'unanimous': 2, 'lopsided': 1, 'contested': 1, 'even': 1}
    """
    p = _checked("prob_a", prob_a)
    majority = np.maximum(p, 1.0 - p)
    unanimous, even = majority == 1.0, majority == 0.5
    # In floats 1 - 1/3 > 2/3, so without the slack one vote of three and two of three would fall apart.
    above = majority > 2.0 / 3.0 + _ROUNDING
    return {"unanimous": unanimous, "lopsided": above & ~unanimous, "contested": ~above & ~even, "even": even}


def by_stratum(values: npt.ArrayLike, prob_a: npt.ArrayLike) -> dict[str, tuple[int, float]]:
    """Count and mean of the values in each of `strata`.

    Args:
      values: Anything measured on pairs, such as `squared_error`, (n_pairs,); NaN entries are left out.

    Returns:
      Name to (count, mean); the mean of an empty stratum is NaN.

    Example:
      >>> by_stratum([0.25, 0.75, 0.5], [1.0, 0.0, 0.5])["unanimous"]
      (2, 0.5)
    """
    masks = strata(prob_a)
    x = _checked("values", values, masks["even"].shape, *_REAL, missing=True)
    return {name: (int((~np.isnan(x[mask])).sum()), _mean_known(x[mask])) for name, mask in masks.items()}


@dataclass(frozen=True)
class Interval:
    """A mean over pairs, the ends of its bootstrap interval, and its standard deviation over resamples."""

    mean: float
    low: float
    high: float
    standard_error: float


def clustered_interval(
    values: npt.ArrayLike, clusters: npt.ArrayLike, level: float = 0.95, n_resamples: int = 2000, seed: int = 0
) -> Interval:
    """Bootstrap interval of a mean over pairs when pairs of one prompt belong together.

    Pairs that share a prompt err together, so whole prompts are drawn with replacement: with S_g the sum and N_g the
    number of cluster g's values, a resample's mean is sum S_g / sum N_g over as many draws g as there are clusters.
    The interval runs between the (1 -+ level) / 2 quantiles of these means. With fewer than about 30 clusters it is
    too narrow.

    Args:
      values: One value per pair, (n_pairs,); NaN entries are left out.
      clusters: Label of each pair's cluster, of any sortable type, (n_pairs,).
      level: Share of such intervals that should hold the true mean.

    Returns:
      The interval. Its ends and standard error are NaN unless two clusters have values: one prompt says nothing
      about the spread between prompts.

    Example:
      >>> values = squared_error([0.5, 0.5, 1.0], [0.75, 1.0, 1.0]) - sampling_noise([0.75, 1.0, 1.0], n_votes=4)
      >>> interval = clustered_interval(values, clusters=["tax", "tax", "bus"])
      >>> round(interval.mean, 4), interval.low, interval.high
      (0.0833, 0.0, 0.125)

    Reference: Field and Welsh, "Bootstrapping clustered data", JRSS B 69 (2007).
    """
    x = _checked("values", values, None, *_REAL, missing=True)
    labels = np.asarray(clusters)
    if labels.shape != x.shape:
        raise ValueError(f"clusters must have shape {x.shape}, but it has shape {labels.shape}.")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie strictly between 0 and 1, but it is {level:g}.")
    if n_resamples < 2:
        raise ValueError(f"n_resamples must be at least 2, but it is {n_resamples}.")
    known = ~np.isnan(x)
    _, index = np.unique(labels[known], return_inverse=True)
    sums, counts = np.bincount(index, x[known]), np.bincount(index).astype(np.float64)
    mean, n_clusters = _mean_known(x), counts.size
    if n_clusters < 2:
        return Interval(mean, float("nan"), float("nan"), float("nan"))

    rng = np.random.default_rng(seed)
    means = np.empty(n_resamples)
    block = max(1, _DRAWS_PER_BLOCK // n_clusters)
    for start in range(0, n_resamples, block):
        drawn = rng.integers(n_clusters, size=(min(block, n_resamples - start), n_clusters))
        means[start : start + block] = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return Interval(mean, float(low), float(high), float(means.std(ddof=1)))


def paired_difference(
    values_a: npt.ArrayLike,
    values_b: npt.ArrayLike,
    clusters: npt.ArrayLike,
    level: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """`clustered_interval` of mean (values_a - values_b), for two predictors judged on the same pairs.

    Taking the difference pair by pair removes what both share, above all the noise of the votes. Here a and b are
    predictors, not responses; a pair that is NaN for either is left out.

    Example:
      >>> paired_difference([0.25, 0.5], [0.25, 0.25], clusters=[0, 1]).mean
      0.125
    """
    a = _checked("values_a", values_a, None, *_REAL, missing=True)
    b = _checked("values_b", values_b, a.shape, *_REAL, missing=True)
    return clustered_interval(a - b, clusters, level, n_resamples, seed)
