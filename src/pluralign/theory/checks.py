"""Checks of array arguments, shared by the modules of this package."""

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray

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
