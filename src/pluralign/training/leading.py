"""Leading directions of wide features. The layers of an encoder are highly correlated, so fits need few directions.

A Newton step costs n·d² operations. With four layers of MiniLM (d = 1,556) it would take 15 times as long as with one;
in 512 directions, which hold 99 % of the variance, it takes 1.6 times as long and predicts as well (docs/log.md).
"""

from typing import Any

import numpy as np

from pluralign.core.arrays import Array, FloatArray, IndexArray
from pluralign.core.distributed import ALONE, Processes, blocks
from pluralign.ensemble.members import FeatureMap
from pluralign.training.pairs import Differences

WIDE = 1100
"""Features with more columns are projected. Those of ``hashing`` (1,044) are not: they have no leading directions."""
LEADING = 512
"""Number of directions that wide features are projected on."""
SAMPLE = 32_768
"""At most about this many pairs determine the directions."""


def leading_axes(
    inputs: FeatureMap, features: Array, a: IndexArray, b: IndexArray, m: int, processes: Processes = ALONE
) -> Array:
    """Return the m directions in which the inputs of compared texts differ most, as orthonormal columns ``(d, m)``.

    They are the leading eigenvectors of mean_i d_i d_i', d_i = inputs(φ_a) − inputs(φ_b). They do not depend on votes.
    Wide inputs are computed in blocks and never held for all texts.

    Args:
        inputs: the map that standardises features, without axes.
        features: raw features of all texts, ``(n_texts, d)``.
        a: index of response a among the texts, ``(n_pairs,)``.
        b: index of response b among the texts, ``(n_pairs,)``.
        m: number of directions.
        processes: the processes that share the texts.
    """
    step = -(-len(a) // SAMPLE)
    sample = Differences(features, a[::step], b[::step], processes=processes)

    def sum_of(part: slice) -> FloatArray:
        total, own = np.zeros((features.shape[1],) * 2), sample.rows_of(part)
        for block in blocks(slice(0, len(own))):
            rows: Any = own[block]
            difference = inputs(features[sample.a[rows]]) - inputs(features[sample.b[rows]])
            total += difference.T @ difference
        return total

    _, vectors = np.linalg.eigh(processes.sum_of(len(features), sum_of))
    return np.ascontiguousarray(vectors[:, ::-1][:, :m].astype(np.float32))
