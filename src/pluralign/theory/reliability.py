"""Reliability curves, the expected calibration error, and means by how divided people are."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, Mask
from pluralign.theory.checks import REAL, ROUNDING, checked, mean_known


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


def reliability(
    prob_hat: npt.ArrayLike, prob_a: npt.ArrayLike, n_bins: int = 10, strategy: Literal["mass", "width"] = "mass"
) -> Reliability:
    """Compute observed against predicted shares, averaged over bins of similar predictions.

    An ensemble of k members predicts at most 2^k different shares, so ``mass`` bins consist of whole groups of equal
    predictions. A group belongs to the bin that holds the middle of its mass,
    bin = floor(n_bins (mass below + mass / 2)). ``width`` bins are [i / n_bins, (i + 1) / n_bins), the last one closed.
    Empty bins are omitted.

    Args:
        prob_hat: predicted shares, ``(n_pairs,)``.
        prob_a: observed shares, ``(n_pairs,)``.
        n_bins: maximum number of bins.
        strategy: ``mass`` for bins with about the same number of pairs, ``width`` for bins of equal width.

    Example:
        >>> curve = reliability([0.2, 0.2, 0.8, 0.8], [0.0, 0.5, 0.5, 1.0], n_bins=2)
        >>> curve.predicted, curve.observed, curve.count
        (array([0.2, 0.8]), array([0.25, 0.75]), array([2, 2]))
    """
    p = checked("prob_a", prob_a)
    q = checked("prob_hat", prob_hat, p.shape)
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
    """Compute the mean distance of the reliability curve from the diagonal, with fractional labels.

    sum_b (count_b / n) |predicted_b - observed_b| over the ``mass`` bins of ``reliability``. A value of zero does not
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
