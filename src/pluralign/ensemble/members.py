"""Reward models over frozen features: k of them evaluated in one pass, as plain arrays.

Decided here: what a linear and a small neural reward are. How they are fitted is decided in ``joint`` and
``stagewise``; scoring needs numpy alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import Array, FloatArray
from pluralign.core.distributed import ALONE, Processes, blocks

CLIP = 6.0
"""Standard deviations beyond which a feature says nothing more: one odd text must not outweigh all others."""
SURFACE_GAIN = 4.0
"""How much larger surface features are made than embedding dimensions: twenty of them carry as much as several hundred
of those, and so one strength of regularisation serves both (docs/log.md)."""


@dataclass(frozen=True)
class FeatureMap:
    """From raw features to what rewards are linear in: scaled, clipped, and through one hidden layer if there is one.

    inputs(φ) = gain · clip((φ − mean) / spread, ±clip), and with a hidden layer tanh(inputs(φ) W + b) beside them.
    """

    mean: Array
    """``(d,)``."""
    spread: Array
    """``(d,)``."""
    gain: Array
    """``(d,)``."""
    hidden: Array | None = None
    """W, ``(d, h)``."""
    bias: Array | None = None
    """b, ``(h,)``."""
    clip: Array = field(default_factory=lambda: np.array(CLIP, dtype=np.float32))
    """A number; infinity clips nothing."""

    @property
    def dimension(self) -> int:
        """D, how many inputs a text has."""
        return len(self.mean) + (0 if self.bias is None else len(self.bias))

    def __call__(self, features: Array, out: Array | None = None) -> Array:
        """Return ``(n, D)`` inputs of ``(n, d)`` raw features, in float32; ``out`` may be memory-mapped."""
        out = np.empty((len(features), self.dimension), dtype=np.float32) if out is None else out
        d = len(self.mean)
        for rows in blocks(slice(0, len(features))):
            scaled = np.clip((features[rows] - self.mean) / self.spread, -self.clip, self.clip)
            out[rows, :d] = scaled * self.gain
            if self.hidden is not None and self.bias is not None:
                out[rows, d:] = np.tanh(out[rows, :d] @ self.hidden + self.bias)
        return out


def fit_feature_map(
    features: Array,
    n_surface: int,
    used: npt.NDArray[np.bool_] | None = None,
    processes: Processes = ALONE,
) -> FeatureMap:
    """Return the scaling of features, or of the rows ``used``; the last ``n_surface`` are surface features."""
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
    gain = np.where(spread > 1e-6, 1.0, 0.0)  # a feature that never varies says nothing
    if n_surface:
        gain[-n_surface:] *= SURFACE_GAIN
    return FeatureMap(*(part.astype(np.float32) for part in (mean, np.maximum(spread, 1e-6), gain)))


def as_they_are(dimension: int) -> FeatureMap:
    """Return the map that leaves features as they are: the outputs of a fine-tuned backbone are rewards already."""
    zeros, ones = np.zeros(dimension, dtype=np.float32), np.ones(dimension, dtype=np.float32)
    return FeatureMap(zeros, ones, ones, clip=np.array(np.inf, dtype=np.float32))


@dataclass(frozen=True)
class LinearMembers:
    """k rewards that are linear in mapped features: r_j(x, y) = theta_j · inputs(phi(x, y))."""

    inputs: FeatureMap
    theta: FloatArray
    """``(D, k)``."""

    @property
    def n_members(self) -> int:
        """How many rewards there are."""
        return int(self.theta.shape[1])

    def rewards(self, features: Array) -> FloatArray:
        """Return ``(n, k)`` rewards of ``(n, d)`` raw features."""
        return np.asarray(self.inputs(features) @ self.theta, dtype=np.float64)

    def take(self, indices: Sequence[int]) -> "LinearMembers":
        """Return some of the members, in the given order."""
        return replace(self, theta=self.theta[:, list(indices)])

    def arrays(self) -> Mapping[str, Array]:
        """Return what a file must hold to give the members back."""
        parts = {"theta": self.theta, **vars(self.inputs)}
        return {name: array for name, array in parts.items() if array is not None}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "LinearMembers":
        """Return the members that ``arrays`` gave."""
        rest = {name: array for name, array in arrays.items() if name != "theta"}
        return cls(FeatureMap(**rest), np.asarray(arrays["theta"], dtype=np.float64))
