"""The logistic function. Every room uses this one, so that all figures agree to the last digit."""

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray


def sigmoid(z: npt.ArrayLike) -> FloatArray:
    """Return σ(z) = 1 / (1 + exp(−z)) without overflow.

    ``scipy.special.expit`` differs from this formula in the last digit, and fitted figures depend on it.

    Example:
        >>> sigmoid([-1000.0, 0.0, 1000.0])
        array([0. , 0.5, 1. ])
    """
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * np.asarray(z, dtype=np.float64))))
