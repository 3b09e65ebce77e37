"""Measures of how well predicted vote shares match observed votes, corrected for the noise of small samples.

Every reported figure is defined here: the Brier score and its correction, the floor, disagreement, and regret.
So are reliability curves. Confidence intervals are in ``intervals``. Functions take arrays and return
arrays or numbers. Nothing is fitted, and the source of a prediction does not matter.

These arguments have the same meaning everywhere, and shape ``(n_pairs,)``:

    prob_a: observed share of votes for response a, the paper's p. The share in the whole population is p*.
    prob_hat: predicted share, the paper's p-hat.
    n_votes: number of votes per pair, including ties; a scalar applies to all pairs.
    n_ties: number of ties among them, each half a vote for either side; a scalar applies to all pairs.

Reference: Halpern, Micha, Procaccia and Shapira, "Pairwise Calibrated Rewards for Pluralistic Alignment". Sections,
definitions and lemmas cited below are from that paper.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, Mask

MAX_IDENTITY_VOTES = 3
"""Up to this many votes per pair, the corrected floor is 0 by definition (``floor_is_measurable``)."""

SMALLEST_PROBABILITY = 1e-6
"""Smallest probability of either side in ``log_loss``."""

# --- predictions ------------------------------------------------------------------------------------------------------


def votes_from_rewards(reward_a: npt.ArrayLike, reward_b: npt.ArrayLike) -> FloatArray:
    """Compute the vote of each reward model: vote = 1[reward_a > reward_b].

    The paper assumes that rewards never tie. Here a tie counts as 1/2, so that exchanging a and b always changes a
    vote v into 1 - v.

    Args:
        reward_a: rewards of the first responses, ``(n_pairs,)`` or ``(n_pairs, n_members)``.
        reward_b: rewards of the second responses, same shape.

    Returns:
        Votes in {0, 1/2, 1}, same shape.

    Example:
        >>> votes_from_rewards([[2.0, 1.0], [0.0, 3.0]], [[1.0, 1.0], [5.0, 2.0]])
        array([[1. , 0.5],
               [0. , 1. ]])

    Reference: Section 2, the definition of p-hat and its footnote.
    """
    a = checked("reward_a", reward_a, np.shape(reward_a)[:2], *REAL)
    b = checked("reward_b", reward_b, a.shape, *REAL)
    return 0.5 * (a > b) + 0.5 * (a >= b)


def ensemble_prob(votes: npt.ArrayLike, weights: npt.ArrayLike) -> FloatArray:
    """Compute the weighted share of an ensemble's votes for response a: p_hat = sum_j weights_j votes_j.

    Args:
        votes: votes of the members, ``(n_pairs, n_members)``.
        weights: weights of the members, non-negative with sum 1, ``(n_members,)``.

    Returns:
        prob_hat, ``(n_pairs,)``.

    Example:
        >>> ensemble_prob([[1.0, 0.0], [1.0, 1.0]], [0.75, 0.25])
        array([0.75, 1.  ])

    Reference: Section 2, above Definition 1.
    """
    alpha = checked("weights", weights)
    v = checked("votes", votes, np.shape(votes)[:1] + alpha.shape)
    if abs(alpha.sum() - 1.0) > ROUNDING:
        raise ValueError(f"weights must sum to 1, but they sum to {alpha.sum():g}.")
    return np.clip(v @ alpha, 0.0, 1.0)


def policy_prob(
    reward_difference: npt.ArrayLike, weights: npt.ArrayLike, beta: float, log_reference_ratio: npt.ArrayLike = 0.0
) -> FloatArray:
    """Compute the probability that a policy drawn from the ensemble's mixture prefers response a to b.

    The policy of a member maximises its reward minus beta times the KL divergence from a reference policy. It picks a
    from {a, b} with probability sigma((r_a - r_b) / beta + log(pi_ref(a) / pi_ref(b))), so

        p_bar = sum_j weights_j sigma((r_ja - r_jb) / beta + log(pi_ref(a) / pi_ref(b))).

    As beta -> 0 it approaches the share of votes, ``ensemble_prob``.

    Args:
        reward_difference: reward_a - reward_b of each member, ``(n_pairs, n_members)``.
        weights: weights of the members, non-negative with sum 1, ``(n_members,)``.
        beta: strength of the regularisation, above 0.
        log_reference_ratio: log(pi_ref(a) / pi_ref(b)) per pair, ``(n_pairs,)``; 0 for a neutral reference.

    Returns:
        p_bar, ``(n_pairs,)``.

    Example:
        >>> policy_prob([[2.0, -1.0]], [0.75, 0.25], beta=1.0).round(4)
        array([0.7278])
        >>> policy_prob([[2.0, -1.0]], [0.75, 0.25], beta=0.01)
        array([0.75])

    Reference: Appendix A.
    """
    if not beta > 0.0:
        raise ValueError(f"beta must be above 0, but it is {beta}.")
    difference = checked("reward_difference", reward_difference, np.shape(reward_difference)[:2], *REAL)
    logit = difference / beta + np.asarray(log_reference_ratio, dtype=np.float64).reshape(-1, 1)
    return ensemble_prob(sigmoid(logit), weights)


def with_undecided(share: npt.ArrayLike, undecided: float) -> FloatArray:
    """Add an undecided share u, whose votes are split evenly: p_hat = u/2 + (1 - u) share.

    It equals an ensemble whose members have the weights (1 - u) alpha_j, and that also has r and -r with weight u/2
    each, for any reward r without ties: on every pair exactly one of the two votes for a. A constant reward with
    weight u does the same, because a tie counts 1/2. So the paper's theorems apply (docs/explanation/undecided.md).

    Args:
        share: share of the other votes for response a, any shape.
        undecided: u, from 0 to 1.

    Example:
        >>> with_undecided([1.0, 0.25], 0.5)
        array([0.75 , 0.375])
    """
    if not 0.0 <= undecided <= 1.0:
        raise ValueError(f"undecided must be between 0 and 1, but it is {undecided:g}.")
    return undecided / 2 + (1.0 - undecided) * checked("share", share, np.shape(share))


# --- calibration error ------------------------------------------------------------------------------------------------


def squared_error(prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike) -> FloatArray:
    """Compute (p_hat - p)^2 per pair, ``(n_pairs,)``.

    Example:
        >>> squared_error([0.5, 1.0], [0.75, 1.0])
        array([0.0625, 0.    ])

    Reference: Definition 1, with the observed p for p*.
    """
    p = checked("prob_a", prob_a)
    return (checked("prob_hat", prob_hat, p.shape) - p) ** 2


def sampling_noise(prob_a: npt.ArrayLike, n_votes: npt.ArrayLike, n_ties: npt.ArrayLike = 0) -> FloatArray:
    """Estimate the variance of the observed share of each pair, without bias.

    With vote values v_i in {0, 1/2, 1} of n annotators, p = mean v_i, and an unbiased estimate of Var(p) is

        sum_i (v_i - p)^2 / (n (n - 1)) = (p (1 - p) - n_ties / (4 n)) / (n - 1),

    because sum v_i^2 = n p - n_ties / 4: a tie adds 1/2 to n p but only 1/4 to the sum of squares. Annotators are
    assumed to be independent draws from the population; if they *are* the population, there is no such noise.

    Returns:
        Estimated variances, ``(n_pairs,)``; NaN for pairs with one vote, where the variance cannot be estimated.

    Example:
        >>> sampling_noise([0.75, 0.75, 1.0], n_votes=[4, 2, 1], n_ties=[0, 1, 0])
        array([0.0625, 0.0625,    nan])

    Reference: Lemma 1, the integrand of C.
    """
    p = checked("prob_a", prob_a)
    n, ties = (np.full(p.shape, x) if np.ndim(x) == 0 else x for x in (n_votes, n_ties))
    n = checked("n_votes", n, p.shape, 1.0, np.inf)
    ties = checked("n_ties", ties, p.shape, 0.0, np.inf)
    if (ties / (2.0 * n) > np.minimum(p, 1.0 - p) + ROUNDING).any():
        raise ValueError("n_ties must fit prob_a: a tie is half a vote for either side, but some pair has more ties.")
    several = n >= 2.0
    return np.where(several, (p * (1.0 - p) - ties / (4.0 * n)) / np.where(several, n - 1.0, 1.0), np.nan)


def brier(prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike) -> float:
    """Compute the Brier score, mean (p_hat - p)^2: the true calibration error plus sampling noise.

    Example:
        >>> brier([0.5, 1.0], [0.75, 1.0])
        0.03125

    Reference: Section 3.3, the empirical loss.
    """
    return float(squared_error(prob_hat, prob_a).mean())


def noise(prob_a: npt.ArrayLike, n_votes: npt.ArrayLike, n_ties: npt.ArrayLike = 0) -> float:
    """Estimate C in E[brier] = true calibration error + C, without bias.

    This is the mean of ``sampling_noise`` over the pairs with two or more votes; NaN if there are none.

    Example:
        >>> noise([0.75, 1.0, 1.0], n_votes=[4, 4, 1])
        0.03125

    Reference: Lemma 1.
    """
    return mean_known(sampling_noise(prob_a, n_votes, n_ties))


def brier_corrected(
    prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike, n_votes: npt.ArrayLike, n_ties: npt.ArrayLike = 0
) -> float:
    """Estimate the true calibration error, mean (p_hat - p*)^2, without bias.

    The estimate is mean [(p_hat - p)^2 - sampling_noise] over the pairs with two or more votes; NaN if there are none.
    It is unbiased only for predictions made without these votes, and too low on the votes an ensemble was fitted to.
    It can be negative.

    Example:
        >>> brier_corrected([0.25, 1.0], [0.75, 1.0], n_votes=4)
        0.09375

    Reference: Lemma 1, solved for the true loss.
    """
    return mean_known(squared_error(prob_hat, prob_a) - sampling_noise(prob_a, n_votes, n_ties))


def log_loss(prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike) -> float:
    """Compute the cross-entropy of the prediction against the observed shares, in nats.

    -mean [p log q + (1 - p) log(1 - q)] with q = p_hat clipped to [c, 1 - c], c = ``SMALLEST_PROBABILITY``. The minimum
    is the entropy of the votes, not zero. A vote against a unanimous ensemble costs -log c.

    Example:
        >>> round(log_loss([0.5, 0.5], [0.75, 1.0]), 4)
        0.6931
    """
    p = checked("prob_a", prob_a)
    q = np.clip(checked("prob_hat", prob_hat, p.shape), SMALLEST_PROBABILITY, 1.0 - SMALLEST_PROBABILITY)
    return float(-(p * np.log(q) + (1.0 - p) * np.log1p(-q)).mean())


def absolute_error(prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike) -> float:
    """Compute the mean absolute error, mean |p_hat - p|: how many points a predicted share is off.

    It has no correction for sampling noise. An estimate from n votes has an expectation that is a polynomial in p* of
    degree at most n, and |p_hat - p*| is none, so no unbiased estimate exists. The value is too high on average:
    E|p_hat - p| >= |p_hat - p*| (Jensen). It is not a proper score either: the best prediction is the median of the
    observed share, not p*. Compare predictors by the Brier score; read this one as a size.

    Example:
        >>> absolute_error([0.5, 1.0], [0.75, 1.0])
        0.125

    Reference: Section 2, below Definition 1, names it as an alternative to the squared error.
    """
    p = checked("prob_a", prob_a)
    return float(np.abs(checked("prob_hat", prob_hat, p.shape) - p).mean())


# --- reference scores -------------------------------------------------------------------------------------------------


def floor(prob_a: npt.ArrayLike) -> float:
    """Compute the lowest Brier score that a single deterministic reward can reach on these votes.

    mean min(p, 1 - p)^2, the score of an oracle that votes with the majority of every pair.

    Example:
        >>> floor([0.75, 1.0])
        0.03125

    Reference: Section 5, "Ensemble of weak reward models vs. an optimal single reward model".
    """
    p = checked("prob_a", prob_a)
    return float((np.minimum(p, 1.0 - p) ** 2).mean())


def floor_corrected(prob_a: npt.ArrayLike, n_votes: npt.ArrayLike, n_ties: npt.ArrayLike = 0) -> float:
    """Compute the corrected Brier score of an oracle that follows the observed majority of every pair.

    mean [min(p, 1 - p)^2 - sampling_noise] over the pairs with two or more votes; NaN if there are none. The estimate
    is biased low: the majorities are estimated from the same votes, so E[floor_corrected] <= mean min(p*, 1 - p*)^2. It
    can be negative when there are few votes per pair. As a reference score it is conservative: a predictor that beats
    it beats the true floor, on average, by more.

    Example:
        >>> round(floor_corrected([0.8, 0.6], n_votes=5), 4)
        0.05

    Reference: Section 5 for the floor, Lemma 1 for the correction.
    """
    p = checked("prob_a", prob_a)
    return mean_known(np.minimum(p, 1.0 - p) ** 2 - sampling_noise(p, n_votes, n_ties))


def floor_is_measurable(n_votes: npt.ArrayLike) -> bool:
    """Return whether the corrected floor says anything about these votes: most pairs have four or more votes.

    With n <= 3 votes, min(p, 1 - p)^2 = p (1 - p) / (n - 1) for every possible p, so ``floor_corrected`` is 0 whatever
    people think. No predictor can beat it, and no verdict follows from it.

    Example:
        >>> round(abs(floor_corrected([1 / 3, 1.0, 0.5], n_votes=[3, 3, 2])), 9), floor_is_measurable([3, 3, 2])
        (0.0, False)
    """
    n = np.asarray(n_votes)
    return bool((n > MAX_IDENTITY_VOTES).sum() > (n <= MAX_IDENTITY_VOTES).sum())


def constant_half(prob_a: npt.ArrayLike) -> float:
    """Compute the Brier score of predicting 1/2 for every pair, mean (1/2 - p)^2.

    It beats the floor on every pair whose minority share is above 1/4, so beating the floor alone proves little.

    Example:
        >>> constant_half([0.75, 0.5])
        0.03125
    """
    return float(((0.5 - checked("prob_a", prob_a)) ** 2).mean())


# --- decisions --------------------------------------------------------------------------------------------------------


def regret(prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike) -> float:
    """Compute the extra disagreement with people when the prediction, not the majority, decides each pair.

    mean [1[p_hat > 1/2] (1 - p) + 1[p_hat <= 1/2] p - min(p, 1 - p)]. As printed in the paper, p_hat = 1/2 decides for
    b, so in that case exchanging a and b changes the result. ``prob_hat`` may be the votes of one member.

    Example:
        >>> regret([1.0, 1.0], [0.25, 0.75])
        0.25

    Reference: appendix "BT Objective and Evaluation Metrics".
    """
    p = checked("prob_a", prob_a)
    chose_a = checked("prob_hat", prob_hat, p.shape) > 0.5
    return float((np.where(chose_a, 1.0 - p, p) - np.minimum(p, 1.0 - p)).mean())


def disagreement(votes: npt.ArrayLike, prob_a: npt.ArrayLike) -> float | FloatArray:
    """Compute the probability that a reward model and a random annotator prefer different responses.

    Phi = mean [v (1 - p) + (1 - v) p], which is mean |v - p| for votes in {0, 1}. A reward tie, v = 1/2, counts as a
    random choice: it disagrees half of the time for every p, whereas |1/2 - p| would be 0 at p = 1/2.

    Args:
        votes: votes of one member, ``(n_pairs,)``, or of all members, ``(n_pairs, n_members)``.
        prob_a: observed shares, ``(n_pairs,)``.

    Returns:
        Phi: a number for one member, ``(n_members,)`` for several. Above 1/2 a member is worse than chance.

    Example:
        >>> disagreement([[1.0, 0.0], [1.0, 0.5]], [0.75, 1.0])
        array([0.125, 0.625])

    Reference: Section 2, "Outlier reward functions".
    """
    p = checked("prob_a", prob_a)
    v = checked("votes", votes, p.shape + np.shape(votes)[1:2])
    phi: FloatArray = (p @ (1.0 - v) + (1.0 - p) @ v) / p.size
    return phi if v.ndim == 2 else float(phi)


def outliers(disagreement: npt.ArrayLike, beta: float, gamma: float, minimum: float) -> Mask:
    """Find the reward models that are (beta, gamma)-outliers: Phi > beta * minimum + gamma.

    Args:
        disagreement: Phi of each member, ``(n_members,)``.
        beta: factor on the lowest achievable Phi.
        gamma: slack added to it.
        minimum: the lowest Phi of any reward model. It is rarely known. mean min(p, 1 - p) is a lower bound; a lower
            bound flags every outlier, and perhaps other members too.

    Returns:
        True for outliers, ``(n_members,)``.

    Example:
        >>> outliers([0.2, 0.6], beta=2.0, gamma=0.1, minimum=0.2)
        array([False,  True])

    Reference: Section 2, "Outlier reward functions".
    """
    return checked("disagreement", disagreement) > beta * minimum + gamma


# --- Reliability curves, the expected calibration error, and means by how divided people are.


@dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability curve: one entry per non-empty bin, ordered by the prediction."""

    predicted: FloatArray
    """Mean predicted share of the pairs in the bin."""
    observed: FloatArray
    """Mean observed share of the pairs in the bin."""
    count: npt.NDArray[np.int64]
    """Number of pairs in the bin."""
    standard_error: FloatArray
    """Standard error of ``observed`` if pairs were independent; NaN for a single pair."""


def reliability(prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike, n_bins: int = 10) -> Reliability:
    """Compute observed against predicted shares, averaged over bins of similar predictions.

    Bins have about the same number of pairs. An ensemble of k members predicts at most 2^k different shares, so bins
    consist of whole groups of equal predictions. A group belongs to the bin that holds the middle of its mass,
    bin = floor(n_bins (mass below + mass / 2)). Empty bins are omitted.

    Args:
        prob_hat: predicted shares, ``(n_pairs,)``.
        prob_a: observed shares, ``(n_pairs,)``.
        n_bins: maximum number of bins.

    Example:
        >>> curve = reliability([0.2, 0.2, 0.8, 0.8], [0.0, 0.5, 0.5, 1.0], n_bins=2)
        >>> curve.predicted, curve.observed, curve.count
        (array([0.2, 0.8]), array([0.25, 0.75]), array([2, 2]))
    """
    p = checked("prob_a", prob_a)
    q = checked("prob_hat", prob_hat, p.shape)
    # Equal sums of weights differ in the last digits with the order of addition; 9 decimals make them equal again.
    _, group, size = np.unique(np.round(q, 9), return_inverse=True, return_counts=True)
    position = ((np.cumsum(size) - size / 2.0) / p.size)[group]
    bins = np.minimum(np.floor(np.round(position * n_bins, 9)), n_bins - 1)
    _, bins, count = np.unique(bins, return_inverse=True, return_counts=True)
    observed = np.bincount(bins, p) / count
    variance = np.bincount(bins, (p - observed[bins]) ** 2) / np.where(count > 1, count - 1.0, np.nan)
    return Reliability(np.bincount(bins, q) / count, observed, count, np.sqrt(variance / count))


def expected_calibration_error(prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike, n_bins: int = 10) -> float:
    """Compute the mean distance of the reliability curve from the diagonal, with fractional labels.

    sum_b (count_b / n) |predicted_b - observed_b| over the bins of ``reliability``. A value of zero does not
    imply pairwise calibration: predicting the overall mean for every pair reaches it.

    Example:
        >>> round(expected_calibration_error([0.2, 0.2, 0.8, 0.8], [0.0, 0.5, 0.5, 1.0], n_bins=2), 4)
        0.05
    """
    curve = reliability(prob_hat, prob_a, n_bins)
    return float(np.average(np.abs(curve.predicted - curve.observed), weights=curve.count))


def strata(prob_a: npt.ArrayLike) -> dict[str, Mask]:
    """Group pairs by how divided people were.

    Returns:
        Masks that partition the pairs, each ``(n_pairs,)``, by the majority share: ``unanimous`` (1), ``lopsided``
        (above 2/3), ``contested`` (at most 2/3) and ``even`` (1/2).

    Example:
        >>> {name: int(mask.sum()) for name, mask in strata([0.0, 1 / 3, 0.5, 0.8, 1.0]).items()}
        {'unanimous': 2, 'lopsided': 1, 'contested': 1, 'even': 1}
    """
    p = checked("prob_a", prob_a)
    majority = np.maximum(p, 1.0 - p)
    unanimous, even = majority == 1.0, majority == 0.5
    # In floats 1 - 1/3 > 2/3. The slack puts shares of 1/3 and 2/3 into the same stratum.
    above = majority > 2.0 / 3.0 + ROUNDING
    return {"unanimous": unanimous, "lopsided": above & ~unanimous, "contested": ~above & ~even, "even": even}


def by_stratum(values: npt.ArrayLike, prob_a: npt.ArrayLike) -> dict[str, tuple[int, float]]:
    """Compute the count and the mean of values in each of the ``strata``.

    Args:
        values: one value per pair, such as ``squared_error``, ``(n_pairs,)``; NaN entries are ignored.
        prob_a: observed shares, ``(n_pairs,)``.

    Returns:
        (count, mean) by name; the mean of an empty stratum is NaN.

    Example:
        >>> by_stratum([0.25, 0.75, 0.5], [1.0, 0.0, 0.5])["unanimous"]
        (2, 0.5)
    """
    masks = strata(prob_a)
    x = checked("values", values, masks["even"].shape, *REAL, missing=True)
    return {name: (int((~np.isnan(x[mask])).sum()), mean_known(x[mask])) for name, mask in masks.items()}


# --- The logistic function. Every room uses this one, so that all figures agree to the last digit.


def sigmoid(z: npt.ArrayLike) -> FloatArray:
    """Return σ(z) = 1 / (1 + exp(−z)) without overflow.

    ``scipy.special.expit`` differs from this formula in the last digit, and fitted figures depend on it.

    Example:
        >>> sigmoid([-1000.0, 0.0, 1000.0])
        array([0. , 0.5, 1. ])
    """
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * np.asarray(z, dtype=np.float64))))


# --- Checks of array arguments, shared by the modules of this package.


REAL = (-np.inf, np.inf)
"""Range of any finite number."""
ROUNDING = 1e-6
"""Slack for shares and weights: weights once stored as float32 sum to 1 only to about 1e-7."""


def checked(
    name: str,
    values: npt.ArrayLike,
    shape: tuple[int, ...] | None = None,
    low: float = 0.0,
    high: float = 1.0,
    missing: bool = False,
) -> FloatArray:
    """Return an argument as an array of floats in [low, high].

    Args:
        name: name of the argument, for the error message.
        values: its value.
        shape: required shape; any one-dimensional shape if None.
        low: smallest allowed value, up to ``ROUNDING``.
        high: largest allowed value, up to ``ROUNDING``.
        missing: allow NaN.

    Raises:
        ValueError: the array is empty, has another shape, or holds a value outside the range.
    """
    array = np.asarray(values, dtype=np.float64)
    expected = array.shape[:1] if shape is None else shape
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{name} must be an array with at least one entry, but its shape is {array.shape}.")
    if array.shape != expected:
        raise ValueError(f"{name} must have shape {expected}, but it has shape {array.shape}.")
    valid = np.isfinite(array) & (array >= low - ROUNDING) & (array <= high + ROUNDING)
    if missing:
        valid |= np.isnan(array)
    if not valid.all():
        raise ValueError(f"{name} must hold numbers between {low:g} and {high:g}, but it holds {array[~valid][0]:g}.")
    return np.clip(array, low, high)


def mean_known(values: FloatArray) -> float:
    """Return the mean of the entries that are not NaN, or NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
