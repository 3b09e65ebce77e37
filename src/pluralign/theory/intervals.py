"""Bootstrap confidence intervals that resample whole prompts, and a t-test over prompts."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtr

from pluralign.theory.calibration import REAL, checked, mean_known

DRAWS_PER_BLOCK = 500_000
"""Clusters drawn at once: three arrays of 4 MB, unless a single resample is larger."""
ENOUGH_CLUSTERS = 20
"""With fewer prompts a bootstrap interval is much too narrow, so none is shown and no verdict is given."""


@dataclass(frozen=True)
class Interval:
    """A mean over pairs, the ends of its bootstrap interval, and its standard deviation over resamples."""

    mean: float
    low: float
    high: float
    standard_error: float


def clustered_interval(
    values: ArrayLike,
    clusters: ArrayLike,
    level: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
    *,
    min_clusters: int = 2,
) -> Interval:
    """Compute a bootstrap interval of a mean over pairs, with pairs clustered by prompt.

    Errors on pairs of the same prompt are correlated, so whole prompts are drawn with replacement: with S_g the sum and
    N_g the number of values of cluster g, the mean of a resample is sum S_g / sum N_g over as many draws g as there are
    clusters. The interval runs between the (1 -+ level) / 2 quantiles of these means. With fewer than about 30 clusters
    it is too narrow.

    Args:
        values: one value per pair, ``(n_pairs,)``; NaN entries are ignored.
        clusters: cluster label of each pair, of any sortable type, ``(n_pairs,)``.
        level: nominal coverage of the interval.
        n_resamples: number of resamples.
        seed: random seed of the resamples.
        min_clusters: smallest number of clusters for which there is an interval; ``ENOUGH_CLUSTERS`` for figures that
            people read.

    Returns:
        The interval. Its ends and its standard error are NaN unless at least ``min_clusters`` clusters have values.

    Example:
        >>> from pluralign.theory.calibration import sampling_noise, squared_error
        >>> values = squared_error([0.5, 0.5, 1.0], [0.75, 1.0, 1.0]) - sampling_noise([0.75, 1.0, 1.0], n_votes=4)
        >>> interval = clustered_interval(values, clusters=["tax", "tax", "bus"])
        >>> round(interval.mean, 4), interval.low, interval.high
        (0.0833, 0.0, 0.125)

    Reference: Field and Welsh, "Bootstrapping clustered data", JRSS B 69 (2007).
    """
    x = checked("values", values, None, *REAL, missing=True)
    labels = np.asarray(clusters)
    if labels.shape != x.shape:
        raise ValueError(f"clusters must have shape {x.shape}, but it has shape {labels.shape}.")
    known = ~np.isnan(x)
    _, index = np.unique(labels[known], return_inverse=True)
    sums, counts = np.bincount(index, x[known]), np.bincount(index).astype(np.float64)
    mean, n_clusters = mean_known(x), counts.size
    if n_clusters < max(2, min_clusters):
        return Interval(mean, float("nan"), float("nan"), float("nan"))

    rng = np.random.default_rng(seed)
    means = np.empty(n_resamples)
    block = max(1, DRAWS_PER_BLOCK // n_clusters)
    for start in range(0, n_resamples, block):
        drawn = rng.integers(n_clusters, size=(min(block, n_resamples - start), n_clusters))
        means[start : start + block] = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return Interval(mean, float(low), float(high), float(means.std(ddof=1)))


def paired_difference(
    values_a: ArrayLike, values_b: ArrayLike, clusters: ArrayLike, level: float = 0.95, *, min_clusters: int = 2
) -> Interval:
    """Compute the ``clustered_interval`` of mean (values_a - values_b), for two predictors on the same pairs.

    A difference per pair removes the variation that both predictors share, above all the noise of the votes. Here a and
    b are predictors, not responses. Pairs where either value is NaN are ignored.

    Example:
        >>> paired_difference([0.25, 0.5], [0.25, 0.25], clusters=[0, 1]).mean
        0.125
    """
    a = checked("values_a", values_a, None, *REAL, missing=True)
    b = checked("values_b", values_b, a.shape, *REAL, missing=True)
    return clustered_interval(a - b, clusters, level, min_clusters=min_clusters)


def clearly_lower(values: ArrayLike, clusters: ArrayLike, confidence: float = 0.975) -> bool:
    """Whether a mean over pairs is below 0 by a one-sided t-test over clusters; never with fewer than two clusters.

    It serves choices on validation prompts, of which there may be too few for a bootstrap.

    Args:
        values: one value per pair, ``(n_pairs,)``; NaN entries are ignored.
        clusters: cluster label of each pair, ``(n_pairs,)``.
        confidence: of the test.

    Example:
        >>> clearly_lower([-2.0, -1.0, -2.0], [0, 1, 2]), clearly_lower([-2.0, 1.0, -1.0], [0, 1, 2])
        (True, False)
    """
    return p_value_above_zero(-np.asarray(values, dtype=np.float64), clusters) < 1.0 - confidence


def p_value_above_zero(values: ArrayLike, clusters: ArrayLike) -> float:
    """Compute the p-value of a one-sided t-test, over clusters, that a mean over pairs is above 0.

    With S_g the sum over the pairs of cluster g and G clusters, t = mean S_g / (sd S_g / √G) has Student's distribution
    with G − 1 degrees of freedom under the null hypothesis.

    Returns:
        The p-value; 1 for fewer than two clusters.

    Example:
        >>> round(p_value_above_zero([2.0, 1.0, 2.0], [0, 1, 2]), 3)
        0.019
    """
    x = checked("values", values, None, *REAL, missing=True)
    known = ~np.isnan(x)
    sums = np.bincount(np.unique(np.asarray(clusters)[known], return_inverse=True)[1], x[known])
    if len(sums) < 2:
        return 1.0
    spread = float(np.std(sums, ddof=1)) / len(sums) ** 0.5
    if spread == 0.0:
        return 0.0 if sums.mean() > 0 else 1.0
    return float(stdtr(len(sums) - 1, -sums.mean() / spread))
