"""Linear reward models on features: k of them evaluated in one product, as plain numpy arrays.

How they are fitted is in ``learning``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import Array, FloatArray
from pluralign.core.errors import DataError
from pluralign.core.processes import ALONE, Processes, blocks

CLIP = 6.0
"""Features are clipped at this many standard deviations, so that one outlier text cannot dominate."""
SURFACE_GAIN = 4.0
"""Factor on surface features. Twenty of them carry as much information as several hundred embedding dimensions; with
this factor, one strength of regularisation suits both (measured in the log of experiments)."""


@dataclass(frozen=True)
class FeatureMap:
    """Maps raw features to the inputs of linear rewards: scaled, clipped, and optionally projected.

    inputs(φ) = A' (gain · clip((φ − mean) / spread, ±clip)).
    """

    mean: Array
    """``(d,)``."""
    spread: Array
    """``(d,)``."""
    gain: Array
    """``(d,)``."""
    clip: Array = field(default_factory=lambda: np.array(CLIP, dtype=np.float32))
    """A scalar; infinity disables clipping."""
    axes: Array | None = None
    """A, ``(d, m)``: orthonormal directions that wide features are projected on. None keeps all columns."""

    @property
    def dimension(self) -> int:
        """D, the number of inputs per text: d, or m with axes."""
        return len(self.mean) if self.axes is None else int(self.axes.shape[1])

    def problem(self) -> str | None:
        """Return what is wrong with shapes and values, None if nothing is."""
        d, m = self.mean.shape[:1], (self.dimension,) if self.axes is None or self.axes.ndim == 2 else ()
        shapes = {"mean": d, "spread": d, "gain": d, "clip": (), "axes": (*d, *m)}
        arrays = {name: array for name, array in vars(self).items() if array is not None}
        if len(d) != 1:
            return "arrays of features are missing"
        if wrong := [name for name, array in arrays.items() if array.shape != shapes[name]]:
            return f"{wrong[0]} has the wrong shape"
        if bad := [name for name, array in arrays.items() if name != "clip" and not np.isfinite(array).all()]:
            return f"{bad[0]} must be finite"
        return None if (self.spread > 0).all() and self.clip > 0 else "spread and clip must be above 0"

    def __call__(self, features: Array, out: Array | None = None) -> Array:
        """Return the ``(n, D)`` inputs of ``(n, d)`` raw features as float32. ``out`` may be memory-mapped.

        Raises:
            DataError: the features have another dimension.
        """
        if features.shape[1] != len(self.mean):
            problem = f"texts have {features.shape[1]:,} features, but the ensemble was fitted with {len(self.mean):,}"
            raise DataError(problem, remedy="use the encoder it was fitted with, or fit again")
        out = np.empty((len(features), self.dimension), dtype=np.float32) if out is None else out
        for rows in blocks(slice(0, len(features))):
            scaled = np.clip((features[rows] - self.mean) / self.spread, -self.clip, self.clip)
            scaled = scaled * self.gain
            out[rows] = scaled if self.axes is None else scaled @ self.axes
        return out


def fit_feature_map(
    features: Array,
    n_surface: int,
    used: npt.NDArray[np.bool_] | None = None,
    processes: Processes = ALONE,
    *,
    n_layers: int = 1,
) -> FeatureMap:
    """Return the map that standardises features.

    The gain is 1/√L for the columns of an encoder with L layers, so that their total variance does not depend on L, and
    ``SURFACE_GAIN`` for surface features.

    Args:
        features: raw features, ``(n, d)``.
        n_surface: number of surface features, which are the last columns.
        used: rows to take mean and spread from (default: all).
        processes: the processes that share the rows.
        n_layers: L, the number of layers whose vectors are concatenated.
    """
    used = np.ones(len(features), dtype=bool) if used is None else used
    n = np.count_nonzero(used)

    def mean_of(value: Callable[[Array], Array]) -> FloatArray:
        def sum_of(part: slice) -> FloatArray:
            total = np.zeros(features.shape[1])
            for rows in blocks(part):
                total += value(features[rows][used[rows]]).sum(axis=0, dtype=np.float64)
            return total

        return processes.sum_of(len(features), sum_of) / n

    mean = mean_of(lambda part: part)
    spread = np.sqrt(mean_of(lambda part: (part - mean) ** 2))
    gain = np.where(spread > 1e-6, 1.0, 0.0)  # a constant feature carries no information
    n_encoded = len(gain) - n_surface
    gain[:n_encoded] /= np.sqrt(n_layers)
    gain[n_encoded:] *= SURFACE_GAIN
    return FeatureMap(*(part.astype(np.float32) for part in (mean, np.maximum(spread, 1e-6), gain)))


def without_clipping(inputs: FeatureMap) -> FeatureMap:
    """Return the map with neither clipping nor a mean: rewards are then a linear head on the raw features."""
    return replace(inputs, mean=np.zeros_like(inputs.mean), clip=np.array(np.inf, dtype=np.float32))


def spanned_axes(inputs: FeatureMap, directions: FloatArray) -> Array:
    """Return orthonormal axes of the inputs that span some linear functions of the raw features, ``(d, m)``.

    Args:
        inputs: the map without axes.
        directions: the linear functions, ``(d, m)``.
    """
    varies = inputs.gain > 0
    scaled = directions * np.where(varies, inputs.spread / np.where(varies, inputs.gain, 1), 0)[:, None]
    left, size, _ = np.linalg.svd(scaled, full_matrices=False)
    return np.asarray(left[:, size > 1e-6 * size.max(initial=0.0)], dtype=np.float32)


def identity_map(dimension: int) -> FeatureMap:
    """Return the identity map, for the outputs of a fine-tuned backbone."""
    zeros, ones = np.zeros(dimension, dtype=np.float32), np.ones(dimension, dtype=np.float32)
    return FeatureMap(zeros, ones, ones, clip=np.array(np.inf, dtype=np.float32))


@dataclass(frozen=True)
class LinearMembers:
    """k rewards that are linear in the mapped features: r_j(x, y) = θ_j · inputs(φ(x, y))."""

    inputs: FeatureMap
    theta: FloatArray
    """``(D, k)``."""

    @property
    def n_members(self) -> int:
        """Number of rewards."""
        return int(self.theta.shape[1])

    def rewards(self, features: Array) -> FloatArray:
        """Return the ``(n, k)`` rewards of ``(n, d)`` raw features."""
        return np.asarray(self.inputs(features) @ self.theta, dtype=np.float64)

    def head(self) -> FloatArray:
        """Return the rewards as linear functions of the raw features, ``(d, k)``, up to a constant.

        Only for inputs without clipping, as those of a fine-tuned backbone are.
        """
        inputs = self.inputs
        assert np.isinf(inputs.clip)  # noqa: S101
        theta = self.theta if inputs.axes is None else inputs.axes @ self.theta
        return np.asarray((inputs.gain / inputs.spread).astype(np.float64)[:, None] * theta)

    def take(self, indices: Sequence[int]) -> "LinearMembers":
        """Return some of the members, in the given order."""
        return replace(self, theta=self.theta[:, list(indices)])

    def problem(self) -> str | None:
        """Return what is wrong with shapes and values, None if nothing is."""
        if problem := self.inputs.problem():
            return problem
        if self.theta.ndim != 2 or len(self.theta) != self.inputs.dimension:
            return "theta has the wrong shape"
        return None if np.isfinite(self.theta).all() else "theta must be finite"

    def arrays(self) -> Mapping[str, Array]:
        """Return the arrays to save."""
        parts = {"theta": self.theta, **vars(self.inputs)}
        return {name: array for name, array in parts.items() if array is not None}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "LinearMembers":
        """Return the members saved as ``arrays()``."""
        rest = {name: array for name, array in arrays.items() if name != "theta"}
        return cls(FeatureMap(**rest), np.asarray(arrays["theta"], dtype=np.float64))
