"""Hashed words: a text as signed counts of its words and word pairs, without a model.

This file imports nothing of the package: ``export`` copies it.
"""

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np


def hashed_words(texts: Sequence[str], dimension: int) -> Any:
    """Return ``(n_texts, dimension)`` unit vectors of counts, as float32."""
    vectors = np.zeros((len(texts), dimension), dtype=np.float32)
    for row, text in enumerate(texts):
        words = text.lower().split()
        for token in (*words, *map(" ".join, itertools.pairwise(words))):
            value = zlib.crc32(token.encode())
            vectors[row, (value >> 1) % dimension] += 1.0 if value & 1 else -1.0
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))
