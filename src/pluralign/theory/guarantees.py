"""The paper's guarantees as functions: Theorems 2, 3 and 4, and bounds for held-out votes that the paper does not have.

``measuring.certificate`` applies them to an ensemble. Lemma 1 is ``calibration.noise``.
docs/explanation/guarantees.md goes through the proofs and lists the corrections they needed.

Reference: Halpern, Micha, Procaccia and Shapira, "Pairwise Calibrated Rewards for Pluralistic Alignment", §3, App. D.
"""

import math

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import UsageError
from pluralign.theory import calibration

LARGEST_OPINION_VARIANCE = 0.25
"""Largest variance of a vote: p*(1 − p*) at p* = ½."""
BISECTIONS = 40
BOLDNESS = 0.9
"""Largest share of the capital that a bet may lose. Any value below 1 is valid; a large one pays off here, because
errors near 1 are rare."""
ROUNDING = 1e-12
"""Slack in comparisons of sums of weights."""
SMALLEST = 1e-300
"""Smallest ε and δ: 1/ε and 1/δ must be numbers."""


# --- Theorem 2: few members suffice -----------------------------------------------------------------------------------


def sufficient_size(epsilon: float, variance: float = LARGEST_OPINION_VARIANCE) -> int:
    """Compute a number of members that guarantees a calibration error of ε: k = ⌈1/(4ε)⌉.

    k annotators drawn at random, each with weight 1/k, have the error E(p̂ − p*)² = mean p*(1 − p*)/k ≤ 1/(4k), so some
    ensemble of that size has at most this error. If mean p*(1 − p*) is known, ⌈mean p*(1 − p*)/ε⌉ members are enough.

    Args:
        epsilon: target calibration error, above 0.
        variance: mean p*(1 − p*), or its upper bound ¼.

    Example:
        >>> sufficient_size(0.01), sufficient_size(0.01, variance=0.12)
        (25, 12)

    Reference: Theorem 2 and its proof.
    """
    if not 0 < epsilon <= 1:
        raise UsageError(f"epsilon must be above 0 and at most 1, not {epsilon:g}.")
    return max(1, math.ceil(variance / _not_too_small("epsilon", epsilon) - 1e-9))


def opinion_variance(prob_a: npt.ArrayLike, n_votes: npt.ArrayLike, n_ties: npt.ArrayLike = 0) -> float:
    """Estimate mean p*(1 − p*), the variance of the vote of one random person, without bias.

    This is n times the estimated variance of a share of n votes: mean p(1 − p)·n/(n − 1) without ties. Pairs with one
    vote are ignored; the result is NaN if there are no others.

    Example:
        >>> opinion_variance([0.75, 1.0], n_votes=4)
        0.125
    """
    each = calibration.sampling_noise(prob_a, n_votes, n_ties) * np.asarray(n_votes, dtype=np.float64)
    return calibration.mean_known(each)


def random_ensemble_error(prob_a: npt.ArrayLike, n_votes: npt.ArrayLike, k: int, n_ties: npt.ArrayLike = 0) -> float:
    """Estimate the expected calibration error of k random annotators with equal weights: mean p*(1 − p*)/k.

    Example:
        >>> random_ensemble_error([0.75, 1.0], n_votes=4, k=5)
        0.025

    Reference: the proof of Theorem 2.
    """
    return opinion_variance(prob_a, n_votes, n_ties) / k


# --- Theorem 3: outliers can be removed -------------------------------------------------------------------------------


def checked_beta(beta: float) -> float:
    """Return β. Raises UsageError unless it is at least 2, as Theorem 3 requires."""
    if not (math.isfinite(beta) and beta >= 2):
        raise UsageError(f"beta must be at least 2, not {beta:g}.")
    return beta


def outlier_weight_bound(beta: float) -> float:
    """Compute the largest weight that the (β, (β+1)√ε)-outliers of an ε-calibrated ensemble can have: 1/(β−1).

    Example:
        >>> outlier_weight_bound(5.0)
        0.25

    Reference: Theorem 3, first part.
    """
    return 1 / (checked_beta(beta) - 1)


def outlier_threshold(beta: float, epsilon: float, minimum: float) -> float:
    """Compute the disagreement Φ above which a member is an outlier in Theorem 3: β·Φ_min + (β+1)√ε.

    Φ is a probability, so with a threshold of 1 or more no member is an outlier.

    Args:
        beta: at least 2.
        epsilon: calibration error of the ensemble.
        minimum: Φ_min, the lowest disagreement of any reward. mean min(p, 1 − p) is a lower bound.

    Example:
        >>> round(outlier_threshold(2.0, epsilon=0.01, minimum=0.1), 4)
        0.5
    """
    return checked_beta(beta) * minimum + (beta + 1) * math.sqrt(epsilon)


def paper_size(k: int, undecided: float) -> int:
    """Compute the number of rewards in the paper's form of an ensemble: k, or k + 2 with an undecided share u > 0.

    The paper has no undecided share. There, u is the weight of two more rewards, r and −r with u/2 each.

    Example:
        >>> paper_size(8, 0.0), paper_size(8, 0.3)
        (8, 10)
    """
    return k + 2 if undecided > 0 else k


def distances_to_ensemble(votes: npt.ArrayLike, weights: npt.ArrayLike, undecided: float = 0.0) -> FloatArray:
    """Compute the distance of each member from the ensemble: d(V_j, p̂) = mean |vote_j − p̂|.

    p̂ = u/2 + (1 − u) Σ_j α_j vote_j. A reward tie, a vote of ½, counts as a random choice:
    mean [v(1 − p̂) + (1 − v)p̂], as in ``calibration.disagreement``. The undecided share votes ½ on every pair, so its
    distance is ½. The mean of all distances, with weights (1 − u)α_j and u, is mean 2p̂(1 − p̂).

    Args:
        votes: votes of the members on any pairs, ``(n_pairs, k)``.
        weights: weights of the members, ``(k,)``.
        undecided: u.

    Returns:
        The distances, ``(k,)``.

    Example:
        >>> distances_to_ensemble([[1, 1, 0], [1, 0, 0]], [0.5, 0.3, 0.2])
        array([0.35, 0.35, 0.65])

    Reference: the proof of Theorem 3.
    """
    share = calibration.with_undecided(calibration.ensemble_prob(votes, weights), undecided)
    return np.asarray(calibration.disagreement(votes, share))


def far_distance(votes: npt.ArrayLike, weights: npt.ArrayLike, beta: float, undecided: float = 0.0) -> float:
    """Compute the distance from the ensemble above which a reward may be an outlier: β·mean min(p̂, 1 − p̂).

    Rewards beyond it have at most 1/(β−1) of the weight, and every (β, (β+1)√ε)-outlier is among them.

    Example:
        >>> round(far_distance([[1, 1, 0], [1, 0, 0]], [0.5, 0.3, 0.2], beta=2.0), 3)
        0.7

    Reference: the proof of Theorem 3.
    """
    share = calibration.with_undecided(calibration.ensemble_prob(votes, weights), undecided)
    return checked_beta(beta) * float(np.minimum(share, 1 - share).mean())


def keeps_undecided(votes: npt.ArrayLike, weights: npt.ArrayLike, undecided: float, beta: float) -> bool:
    """Decide whether pruning keeps the undecided share: unless it may be an outlier, ½ > β·mean min(p̂, 1 − p̂).

    Its distance and its disagreement with people are ½. It is never far if u ≥ 1/β, since mean min(p̂, 1 − p̂) ≥ u/2.

    Example:
        >>> votes = np.array([[1, 1], [1, 1], [0, 1]])
        >>> keeps_undecided(votes, [0.9, 0.1], 0.1, beta=5.0), keeps_undecided(votes, [0.9, 0.1], 0.2, beta=5.0)
        (False, True)
    """
    return far_distance(votes, weights, beta, undecided) + ROUNDING >= 0.5


def members_to_keep(
    votes: npt.ArrayLike, weights: npt.ArrayLike, beta: float, *, only_far: bool = False, undecided: float = 0.0
) -> npt.NDArray[np.int64]:
    """Find the members that Theorem 3 keeps: all but the 1/(β−1) of weight that is furthest from the ensemble.

    Members are ordered by d(V_j, p̂). Removed are the furthest ones whose cumulative weight is at most 1/(β−1). Votes of
    people are not needed. If the ensemble was ε-calibrated, the remaining members, with weights scaled to sum 1, are
    (√ε + 1/(β−1))²-calibrated and include no (β, (β+1)√ε)-outlier.

    With an undecided share u, member j has the weight (1 − u)α_j. The guarantees need two things: the removed weight is
    at most 1/(β−1), and every reward beyond ``far_distance`` is removed. So the undecided share stays unless it is
    beyond it (``keeps_undecided``); then it is removed too, and u of the 1/(β−1) is used up.

    At β = 2 this rule would remove all members, so the nearest member with weight is always kept. It is no outlier: the
    weighted mean distance, mean 2p̂(1 − p̂), is at most 2 mean min(p̂, 1 − p̂).

    The rule as printed removes members even if none is far. ``only_far`` removes only those with
    d(V_j, p̂) > β·mean min(p̂, 1 − p̂). They include every outlier and have at most 1/(β−1) of the weight, so both
    guarantees still hold.

    Args:
        votes: votes of the members on any pairs, ``(n_pairs, k)``.
        weights: weights of the members, ``(k,)``.
        beta: at least 2; a larger value removes less.
        only_far: keep the members that cannot be outliers.
        undecided: u.

    Returns:
        Sorted indices of the members to keep.

    Example:
        >>> votes = np.array([[1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 1]])
        >>> members_to_keep(votes, [0.5, 0.3, 0.2], beta=5.0)
        array([0, 1])
        >>> members_to_keep(votes, [0.5, 0.3, 0.2], beta=5.0, only_far=True)
        array([0, 1, 2])

    Reference: Theorem 3 and its proof.
    """
    alpha = np.asarray(weights, dtype=np.float64)
    most = outlier_weight_bound(beta) - (0.0 if keeps_undecided(votes, alpha, undecided, beta) else undecided)
    distance = distances_to_ensemble(votes, alpha, undecided)
    furthest_first = np.argsort(-distance, kind="stable")
    if only_far:
        stays = distance <= far_distance(votes, alpha, beta, undecided) + ROUNDING
    else:
        stays = np.empty(len(alpha), dtype=bool)
        stays[furthest_first] = (1 - undecided) * np.cumsum(alpha[furthest_first]) > most + ROUNDING
    stays[furthest_first[alpha[furthest_first] > 0][-1]] = True
    return np.flatnonzero(stays)


def pruning_bound(epsilon: float, beta: float) -> float:
    """Compute the calibration error that Theorem 3 guarantees after pruning: (√ε + 1/(β−1))².

    Example:
        >>> round(pruning_bound(0.01, 11.0), 4)
        0.04
    """
    return shifted_bound(epsilon, outlier_weight_bound(beta))


def shifted_bound(epsilon: float, shift: float) -> float:
    """Bound the calibration error of an ε-calibrated prediction that moves by ``shift`` in RMS: (√ε + shift)².

    This is the last step of Theorem 3's proof (Minkowski). The shift is at most the removed weight, which is at most
    1/(β−1). Both predictions are known, so the exact shift √(mean (p̂ − p̂')²) can be used instead.

    Example:
        >>> round(shifted_bound(0.01, 0.05), 4)
        0.0225
    """
    return (math.sqrt(epsilon) + shift) ** 2


# --- Theorem 4: generalization from N pairs ---------------------------------------------------------------------------


def pseudo_dimension_bound(d: int, k: int) -> float:
    """Bound the pseudo-dimension of the squared error of k-ensembles: d' = 20(d+1)k·log(2(d+1)k).

    Args:
        d: VC dimension of the members' comparisons, at least 1; for rewards linear in ℓ features it is at most ℓ.
        k: number of members.

    Example:
        >>> round(pseudo_dimension_bound(d=1, k=1), 1)
        55.5

    Reference: Theorem 4; the last lines of its proof.
    """
    if d < 1 or k < 1:
        raise UsageError(f"d and k must be at least 1, not {d} and {k}.")
    return 20 * (d + 1) * k * math.log(2 * (d + 1) * k)


def generalization_bound(n: int, d: int, k: int, delta: float) -> float:
    """Bound the difference between the error on N pairs and the expected error, for all k-ensembles at once.

    With probability 1 − δ over N independent pairs, |L' − L̂| ≤ √(2d' log(eN/d')/N) + √(log(1/δ)/(2N)) for all
    ensembles of k members, however they are chosen. L' is the true error plus C of Lemma 1. Errors are in [0, 1], so a
    bound of 1 or more is vacuous. Pairs of one prompt are not independent; counting prompts is conservative.

    Args:
        n: N, the number of pairs.
        d: VC dimension of the members' comparisons.
        k: number of members.
        delta: probability that the bound fails.

    Returns:
        The bound; infinity for N < d', where the underlying count of patterns does not apply.

    Example:
        >>> round(generalization_bound(100_000, d=1, k=1, delta=0.05), 4), generalization_bound(20, 1, 1, 0.05)
        (0.1009, inf)

    Reference: Theorem 4.
    """
    size = pseudo_dimension_bound(d, k)
    if n < size:
        return math.inf
    complexity = math.sqrt(2 * size * math.log(math.e * n / size) / n)
    return complexity + math.sqrt(math.log(1 / _checked_delta(delta)) / (2 * n))


def samples_until_informative(d: int, k: int, delta: float, width: float = 1.0) -> int:
    """Compute the smallest N for which ``generalization_bound`` is below a width; below 1 it is informative.

    For N ≥ d' the bound decreases with N, so bisection finds the answer.

    Example:
        >>> samples_until_informative(d=1, k=1, delta=0.05)
        366

    Reference: Theorem 4, solved for N.
    """
    if not width > 0:
        raise UsageError(f"width must be above 0, not {width:g}.")
    low = math.ceil(pseudo_dimension_bound(d, k)) - 1  # the bound is infinite at this N
    high = 2 * (low + 1)
    while generalization_bound(high, d, k, delta) >= width:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if generalization_bound(middle, d, k, delta) < width else (middle, high)
    return high


# --- beyond the paper: one ensemble on held-out prompts ---------------------------------------------------------------


def prompt_means(values: npt.ArrayLike, prompts: npt.ArrayLike) -> FloatArray:
    """Compute the mean of the values of each prompt, ignoring NaN. Prompts are independent draws; pairs are not.

    If a prompt is drawn first and then its pairs, as in the paper, each mean has the expectation of a single pair.

    Example:
        >>> prompt_means([0.0, 0.5, 1.0, np.nan], [7, 7, 3, 4])
        array([1.  , 0.25])
    """
    x = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(x)
    _, index = np.unique(np.asarray(prompts)[known], return_inverse=True)
    return np.bincount(index, x[known]) / np.bincount(index)


def betting_interval(values: npt.ArrayLike, delta: float, low: float = 0.0, high: float = 1.0) -> tuple[float, float]:
    """Compute a confidence interval, level 1 − δ, of the expectation of independent values in [low, high], by betting.

    For values x_i scaled to [0, 1] and a candidate mean m, a bettor starts with capital 1 and stakes λ_i on x_i > m:
    K = Π (1 + λ_i (x_i − m)). If m is the mean, the game is fair and K reaches 2/δ with probability at most δ/2, so an
    m with a larger K is rejected as too low. The same with 1 − x_i rejects values of m that are too high. The stakes

        λ_i = √(2 log(2/δ) / (n σ²_{i−1})), at most 0.9/m,

    use only the values before the i-th, so the game is fair. σ² is the variance of these values, so stakes are larger
    if values vary little. With a few hundred prompts the interval is several times narrower than
    those of Hoeffding and of empirical Bernstein, and as rigorous.

    Args:
        values: independent values, in an order that does not depend on them, ``(n,)``.
        delta: probability that the interval misses the expectation.
        low: smallest possible value, not only in the sample.
        high: largest possible value.

    Returns:
        The lower and the upper end.

    Example:
        >>> below, above = betting_interval(np.tile([0.02, 0.08], 100), 0.05)
        >>> round(below, 3), round(above, 3)
        (0.042, 0.07)

    Reference: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 86 (2024),
    the hedged capital interval.
    """
    x = (np.asarray(values, dtype=np.float64) - low) / (high - low)
    log, count = math.log(2 / _checked_delta(delta)), np.arange(2, len(x) + 2)
    variance = (0.25 + np.cumsum((x - (0.5 + np.cumsum(x)) / count) ** 2)) / count
    stakes = np.sqrt(2 * log / (len(x) * np.append(0.25, variance[:-1])))

    def lower(x: FloatArray) -> float:
        rejected, possible = 0.0, 1.0
        for _ in range(BISECTIONS):  # the capital decreases in m
            m = (rejected + possible) / 2
            log_capital = np.log1p(np.minimum(stakes, BOLDNESS / m) * (x - m)).sum()
            rejected, possible = (m, possible) if log_capital >= log else (rejected, m)
        return rejected

    return low + (high - low) * lower(x), high - (high - low) * lower(1 - x)


def _checked_delta(delta: float) -> float:
    if not 0 < delta < 1:
        raise UsageError(f"delta must be strictly between 0 and 1, not {delta:g}.")
    return _not_too_small("delta", delta)


def _not_too_small(name: str, value: float) -> float:
    if value < SMALLEST:
        raise UsageError(f"{name} must be at least {SMALLEST:g}, not {value:g}.")
    return value
