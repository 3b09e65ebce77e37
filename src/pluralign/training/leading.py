"""Leading directions of wide features. The layers of an encoder are highly correlated, so fits need few directions.

A Newton step costs n·d² operations: with four layers of MiniLM (d = 1,556) 15 times as many as with one layer. In 384
directions, which hold 98 to 99 % of the variance, it costs no more than with one layer and predicts as well as in all
(docs/log.md).
"""

import numpy as np
from scipy.linalg import eigh

from pluralign.core.arrays import Array, IndexArray
from pluralign.core.distributed import ALONE, Processes
from pluralign.ensemble.members import FeatureMap

WIDE = 1100
"""Features with more columns are projected. Those of ``hashing`` (1,044) are not: they have no leading directions."""
LEADING = 384
"""Number of directions that wide features are projected on."""
SAMPLE = 8192
"""At most this many pairs determine the directions."""


def leading_axes(
    inputs: FeatureMap, features: Array, a: IndexArray, b: IndexArray, m: int, processes: Processes = ALONE
) -> Array:
    """Return the m directions in which the inputs of compared texts differ most, as orthonormal columns ``(d, m)``.

    They are the leading eigenvectors of Σ_i d_i d_i', d_i = inputs(φ_a) − inputs(φ_b). They do not depend on votes.

    Args:
        inputs: the map that standardises features, without axes.
        features: raw features of all texts, ``(n_texts, d)``; may be memory-mapped.
        a: index of response a among the texts, ``(n_pairs,)``.
        b: index of response b among the texts, ``(n_pairs,)``.
        m: number of directions, at most d.
        processes: the processes that share the texts. Each one reads the pairs whose a is in its part.
    """
    step = max(1, -(-len(a) // SAMPLE))
    a, b = a[::step], b[::step]
    part = processes.part(len(features))
    own = np.flatnonzero((a >= part.start) & (a < part.stop))
    difference = np.zeros((len(a), features.shape[1]), dtype=np.float32)
    difference[own] = inputs(features[a[own]]) - inputs(features[b[own]])
    difference = processes.total(difference)

    def decide() -> Array:
        d = features.shape[1]
        _, vectors = eigh(difference.T @ difference, subset_by_index=[d - m, d - 1])
        return np.ascontiguousarray(vectors[:, ::-1])

    return processes.agreed(decide)
