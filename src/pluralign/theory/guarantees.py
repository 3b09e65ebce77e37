"""The paper's guarantees as functions: each takes numbers or votes and returns what its theorem promises.

Decided here: how Theorems 2, 3 and 4 are computed, and bounds for held-out votes that the paper does not have. What
they say of one ensemble is decided in ``certification``. Lemma 1 is ``calibration.noise``. docs/certificates.md goes
through the proofs and says where they needed mending.

Reference: Halpern, Micha, Procaccia and Shapira, "Pairwise Calibrated Rewards for Pluralistic Alignment", §3, App. D.
"""

import math

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import UsageError
from pluralign.theory import calibration

LARGEST_OPINION_VARIANCE = 0.25
"""Of a vote: p*(1 − p*) at p* = ½."""
BISECTIONS = 40
BOLDNESS = 0.9
"""The share of its capital that a bet may lose; any number below 1 is fair. Errors near 1 are rare: boldness pays."""
ROUNDING = 1e-12
"""Sums of weights are compared with this slack."""


# --- Theorem 2: few members are enough ------------------------------------------------------------------------------


def sufficient_size(epsilon: float, variance: float = LARGEST_OPINION_VARIANCE) -> int:
    """How many members are sure to be enough for a calibration error of ε: k = ⌈1/(4ε)⌉.

    k annotators drawn at random, each with weight 1/k, err by E(p̂ − p*)² = mean p*(1 − p*)/k ≤ 1/(4k); so some
    ensemble of that size errs no more. Where mean p*(1 − p*) is known, ⌈mean p*(1 − p*)/ε⌉ do.

    Args:
        epsilon: the calibration error to reach, above 0.
        variance: mean p*(1 − p*), or the ¼ that it cannot exceed.

    Example:
        >>> sufficient_size(0.01), sufficient_size(0.01, variance=0.12)
        (25, 12)

    Reference: Theorem 2 and its proof.
    """
    if not 0 < epsilon <= 1:
        raise UsageError(f"epsilon must be above 0 and at most 1, not {epsilon:g}.")
    return max(1, math.ceil(variance / epsilon - 1e-9))


def opinion_variance(prob_a: npt.ArrayLike, n_votes: npt.ArrayLike, n_ties: npt.ArrayLike = 0) -> float:
    """Unbiased estimate of mean p*(1 − p*), the variance of one random person's vote.

    n times the estimated variance of a share of n votes: mean p(1 − p)·n/(n − 1) without ties. Pairs with one vote are
    left out; NaN if there are no others.

    Example:
        >>> opinion_variance([0.75, 1.0], n_votes=4)
        0.125
    """
    each = calibration.sampling_noise(prob_a, n_votes, n_ties) * np.asarray(n_votes, dtype=np.float64)
    known = each[~np.isnan(each)]
    return float(known.mean()) if known.size else math.nan


def random_ensemble_error(prob_a: npt.ArrayLike, n_votes: npt.ArrayLike, k: int, n_ties: npt.ArrayLike = 0) -> float:
    """The calibration error to expect of k random annotators with equal weights: mean p*(1 − p*)/k.

    Example:
        >>> random_ensemble_error([0.75, 1.0], n_votes=4, k=5)
        0.025

    Reference: the proof of Theorem 2.
    """
    return opinion_variance(prob_a, n_votes, n_ties) / k


# --- Theorem 3: outliers can go -------------------------------------------------------------------------------------


def checked_beta(beta: float) -> float:
    """Return β if Theorem 3 covers it."""
    if not (math.isfinite(beta) and beta >= 2):
        raise UsageError(f"beta must be at least 2, not {beta:g}.")
    return beta


def outlier_weight_bound(beta: float) -> float:
    """The most weight that (β, (β+1)√ε)-outliers of an ε-calibrated ensemble can have: 1/(β−1).

    Example:
        >>> outlier_weight_bound(5.0)
        0.25

    Reference: Theorem 3, first part.
    """
    return 1 / (checked_beta(beta) - 1)


def outlier_threshold(beta: float, epsilon: float, minimum: float) -> float:
    """The disagreement Φ above which a member is an outlier in Theorem 3: β·Φ_min + (β+1)√ε.

    Φ is a probability: a threshold of 1 or more names nobody.

    Args:
        beta: at least 2.
        epsilon: the ensemble's calibration error.
        minimum: Φ_min, the least disagreement of any reward. mean min(p, 1 − p) is not above it.

    Example:
        >>> round(outlier_threshold(2.0, epsilon=0.01, minimum=0.1), 4)
        0.5
    """
    return checked_beta(beta) * minimum + (beta + 1) * math.sqrt(epsilon)


def distances_to_ensemble(votes: npt.ArrayLike, weights: npt.ArrayLike) -> FloatArray:
    """How far each member is from what all say together: d(V_j, p̂) = mean |vote_j − p̂|, with p̂ = Σ_j α_j vote_j.

    A reward tie, a vote of ½, is a coin that decides: mean [v(1 − p̂) + (1 − v)p̂], as in ``calibration.disagreement``.
    The weighted mean of the distances is mean 2p̂(1 − p̂).

    Args:
        votes: of the members on any pairs, ``(n_pairs, k)``.
        weights: of the members, ``(k,)``.

    Returns:
        The distances, ``(k,)``.

    Example:
        >>> distances_to_ensemble([[1, 1, 0], [1, 0, 0]], [0.5, 0.3, 0.2])
        array([0.35, 0.35, 0.65])

    Reference: the proof of Theorem 3.
    """
    return np.asarray(calibration.disagreement(votes, calibration.ensemble_prob(votes, weights)))


def members_to_keep(
    votes: npt.ArrayLike, weights: npt.ArrayLike, beta: float, *, only_far: bool = False
) -> npt.NDArray[np.int64]:
    """Which members Theorem 3 keeps: all but the 1/(β−1) of weight that is furthest from the ensemble itself.

    Members are ordered by d(V_j, p̂), and those are removed whose weight, summed from the furthest inwards, is at most
    1/(β−1). It takes no people's votes. If the ensemble was ε-calibrated, the rest with weights scaled to sum 1 is
    (√ε + 1/(β−1))²-calibrated and has no (β, (β+1)√ε)-outlier.

    At β = 2 that would remove everybody, so the nearest member with weight always stays. It is no outlier: the weighted
    mean distance, mean 2p̂(1 − p̂), is at most 2 mean min(p̂, 1 − p̂).

    The printed rule removes members even where none is far. ``only_far`` removes those with
    d(V_j, p̂) > β·mean min(p̂, 1 − p̂) and no others. Every outlier is among them, they have at most 1/(β−1) of the
    weight, and so the same two promises hold.

    Args:
        votes: of the members on any pairs, ``(n_pairs, k)``.
        weights: of the members, ``(k,)``.
        beta: at least 2; a larger one removes less.
        only_far: spare the members that cannot be outliers.

    Returns:
        Indices of the members that stay, in their order.

    Example:
        >>> votes = np.array([[1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 1]])
        >>> members_to_keep(votes, [0.5, 0.3, 0.2], beta=5.0)
        array([0, 1])
        >>> members_to_keep(votes, [0.5, 0.3, 0.2], beta=5.0, only_far=True)
        array([0, 1, 2])

    Reference: Theorem 3 and its proof.
    """
    most = outlier_weight_bound(beta)
    alpha = np.asarray(weights, dtype=np.float64)
    distance = distances_to_ensemble(votes, alpha)
    furthest_first = np.argsort(-distance, kind="stable")
    if only_far:
        share = calibration.ensemble_prob(votes, alpha)
        stays = distance <= beta * float(np.minimum(share, 1 - share).mean()) + ROUNDING
    else:
        stays = np.empty(len(alpha), dtype=bool)
        stays[furthest_first] = np.cumsum(alpha[furthest_first]) > most + ROUNDING
    stays[furthest_first[alpha[furthest_first] > 0][-1]] = True
    return np.flatnonzero(stays)


def pruning_bound(epsilon: float, beta: float) -> float:
    """The calibration error that Theorem 3 guarantees after pruning: (√ε + 1/(β−1))².

    Example:
        >>> round(pruning_bound(0.01, 11.0), 4)
        0.04
    """
    return shifted_bound(epsilon, outlier_weight_bound(beta))


def shifted_bound(epsilon: float, shift: float) -> float:
    """The most an ε-calibrated prediction can err after moving by ``shift`` in root mean square: (√ε + shift)².

    The last step of Theorem 3's proof (Minkowski). Its shift is at most the removed weight, which is at most 1/(β−1);
    but both predictions are known, so √(mean (p̂ − p̂')²) itself can be put in.

    Example:
        >>> round(shifted_bound(0.01, 0.05), 4)
        0.0225
    """
    return (math.sqrt(epsilon) + shift) ** 2


# --- Theorem 4: what is measured on N pairs holds for all -----------------------------------------------------------


def pseudo_dimension_bound(d: int, k: int) -> float:
    """A bound on the pseudo-dimension of the squared error of k-ensembles: d' = 20(d+1)k·log(2(d+1)k).

    Args:
        d: VC dimension of the members' comparisons, at least 1; for rewards linear in ℓ features it is at most ℓ.
        k: members.

    Example:
        >>> round(pseudo_dimension_bound(d=1, k=1), 1)
        55.5

    Reference: Theorem 4; the last lines of its proof.
    """
    if d < 1 or k < 1:
        raise UsageError(f"d and k must be at least 1, not {d} and {k}.")
    return 20 * (d + 1) * k * math.log(2 * (d + 1) * k)


def generalization_bound(n: int, d: int, k: int, delta: float) -> float:
    """How far, at most, the error on N pairs is from the error on all, for every k-ensemble at once.

    With probability 1 − δ over N independent pairs, |L' − L̂| ≤ √(2d' log(eN/d')/N) + √(log(1/δ)/(2N)) for all
    ensembles of k members, whichever was chosen and however; L' is the true error plus C of Lemma 1. Errors are in
    [0, 1], so a bound of 1 or more says nothing. Pairs of one prompt are not independent: counting prompts is cautious.

    Args:
        n: N, the pairs.
        d: VC dimension of the members' comparisons.
        k: members.
        delta: the chance that it does not hold.

    Returns:
        The bound; infinity for N < d', where the count of patterns it rests on does not apply.

    Example:
        >>> round(generalization_bound(100_000, d=1, k=1, delta=0.05), 4), generalization_bound(20, 1, 1, 0.05)
        (0.1009, inf)

    Reference: Theorem 4.
    """
    size = pseudo_dimension_bound(d, k)
    if n < size:
        return math.inf
    return math.sqrt(2 * size * math.log(math.e * n / size) / n) + math.sqrt(math.log(1 / _chance(delta)) / (2 * n))


def samples_until_informative(d: int, k: int, delta: float, width: float = 1.0) -> int:
    """The least N from which ``generalization_bound`` is below a width; 1 is where it begins to say anything.

    From N = d' on the bound falls with N, so bisection finds it.

    Example:
        >>> samples_until_informative(d=1, k=1, delta=0.05)
        366

    Reference: Theorem 4, solved for N.
    """
    if not width > 0:
        raise UsageError(f"width must be above 0, not {width:g}.")
    low = math.ceil(pseudo_dimension_bound(d, k)) - 1  # the bound is infinite here
    high = 2 * (low + 1)
    while generalization_bound(high, d, k, delta) >= width:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if generalization_bound(middle, d, k, delta) < width else (middle, high)
    return high


# --- beyond the paper: one ensemble on held-out prompts -------------------------------------------------------------


def prompt_means(values: npt.ArrayLike, prompts: npt.ArrayLike) -> FloatArray:
    """The mean of each prompt's values, NaN left out: prompts are independent draws where pairs are not.

    Drawing a prompt and then its pairs, as the paper does, each mean has the expectation of a single pair's value.

    Example:
        >>> prompt_means([0.0, 0.5, 1.0, np.nan], [7, 7, 3, 4])
        array([1.  , 0.25])
    """
    x = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(x)
    _, index = np.unique(np.asarray(prompts)[known], return_inverse=True)
    return np.bincount(index, x[known]) / np.bincount(index)


def hoeffding_width(n: int, delta: float, span: float = 1.0) -> float:
    """How far the mean of n independent values in an interval of length ``span`` is from its expectation.

    At most span·√(log(2/δ)/(2n)) with probability 1 − δ. For one ensemble and prompts it has not learned from, that
    is a bound on |L' − L̂| that does not grow with d or k; unlike Theorem 4 it says nothing of training data.

    Example:
        >>> round(hoeffding_width(200, 0.05), 4)
        0.096

    Reference: Hoeffding, "Probability inequalities for sums of bounded random variables", JASA 58 (1963), Theorem 2.
    """
    return span * math.sqrt(math.log(2 / _chance(delta)) / (2 * n)) if n else math.inf


def bernstein_width(values: npt.ArrayLike, delta: float, span: float = 1.0) -> float:
    """``hoeffding_width`` for values that vary little: √(2V log(4/δ)/n) + 7·span·log(4/δ)/(3(n−1)).

    V is the sample variance. Each side has probability δ/2.

    Args:
        values: independent values in an interval of length ``span``, ``(n,)``.
        delta: the chance that it does not hold.
        span: length of the interval that no value can leave, whatever the sample.

    Returns:
        The width; infinity for fewer than two values.

    Example:
        >>> values = np.tile([0.02, 0.08], 500)
        >>> bernstein_width(values, 0.05) < hoeffding_width(1000, 0.05)
        True

    Reference: Maurer and Pontil, "Empirical Bernstein Bounds and Sample Variance Penalization", COLT 2009, Theorem 4.
    """
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return math.inf
    log = math.log(4 / _chance(delta))
    return math.sqrt(2 * float(x.var(ddof=1)) * log / len(x)) + 7 * span * log / (3 * (len(x) - 1))


def betting_interval(values: npt.ArrayLike, delta: float, low: float = 0.0, high: float = 1.0) -> tuple[float, float]:
    """Where the expectation of independent values in [low, high] lies with probability 1 − δ, by betting against it.

    For values x_i scaled to [0, 1] and a candidate mean m, a gambler starts with 1 and stakes λ_i on x_i being above m:
    K = Π (1 + λ_i (x_i − m)). If m is the mean the game is fair, and K reaches 2/δ with probability δ/2 at most; an m
    at which it does is ruled out as too low. The same with 1 − x_i rules out the m that are too high. The stakes

      λ_i = √(2 log(2/δ) / (n σ²_{i−1})), at most 0.9/m,

    use only values before the i-th, so the game is fair; σ², their variance, raises them where values vary little. At
    some hundred prompts it is several times narrower than ``hoeffding_width`` and ``bernstein_width``, and as rigorous.

    Args:
        values: independent, in an order that does not depend on them, ``(n,)``.
        delta: the chance that it does not hold.
        low: what no value can be below, whatever the sample.
        high: what no value can be above.

    Returns:
        The two ends.

    Example:
        >>> below, above = betting_interval(np.tile([0.02, 0.08], 100), 0.05)
        >>> round(below, 3), round(above, 3)
        (0.042, 0.07)

    Reference: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 86 (2024),
    the hedged capital interval.
    """
    x = (np.asarray(values, dtype=np.float64) - low) / (high - low)
    log, count = math.log(2 / _chance(delta)), np.arange(2, len(x) + 2)
    variance = (0.25 + np.cumsum((x - (0.5 + np.cumsum(x)) / count) ** 2)) / count
    stakes = np.sqrt(2 * log / (len(x) * np.append(0.25, variance[:-1])))

    def lower(x: FloatArray) -> float:
        ruled_out, possible = 0.0, 1.0
        for _ in range(BISECTIONS):  # the capital falls as m rises
            m = (ruled_out + possible) / 2
            log_capital = np.log1p(np.minimum(stakes, BOLDNESS / m) * (x - m)).sum()
            ruled_out, possible = (m, possible) if log_capital >= log else (ruled_out, m)
        return ruled_out

    return low + (high - low) * lower(x), high - (high - low) * lower(1 - x)


def _chance(delta: float) -> float:
    if not 0 < delta < 1:
        raise UsageError(f"delta must be strictly between 0 and 1, not {delta:g}.")
    return delta
