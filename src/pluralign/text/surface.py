"""Surface features: length, punctuation and structure of a response. They are cheap and predictive.

Decided here: which twenty numbers describe a text. They depend on the response alone; nothing is learned. This file
imports nothing of the package: ``export`` copies it.
"""

import itertools
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

NAMES = (
    "log characters",
    "log words",
    "log sentences",
    "letters per word",
    "words per sentence",
    "commas",
    "full stops",
    "question marks",
    "exclamation marks",
    "digits",
    "log line ends",
    "log list items",
    "first person",
    "hedging",
    "capitals",
    "distinct words",
    "no words",
    "quotes and brackets",
    "colons",
    "ends a sentence",
)

_DIGIT = re.compile(r"\d")
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_SENTENCE_END = re.compile(r"[.!?…]+(?=\s|$)")
_LIST_ITEM = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE)
_RUN = re.compile(r"\w+")
_FIRST_PERSON = frozenset(("i", "me", "my", "mine", "myself", "we", "us", "our", "ours"))
_HEDGING = frozenset(
    (
        *("may", "might", "could", "perhaps", "maybe", "possibly", "probably", "seem", "seems", "likely", "somewhat"),
        *("generally", "often", "sometimes", "depend", "depends", "however", "although", "though", "but", "unless"),
        "while",
    )
)


def surface_features(texts: Iterable[str]) -> npt.NDArray[np.float32]:
    """Return ``(n_texts, len(NAMES))`` surface features.

    Example:
        >>> features = surface_features(["Yes!", "I might. Or:\\n- not, perhaps"])
        >>> round(float(features[1, NAMES.index("hedging")]), 2)
        0.4
    """
    return np.array([_describe(text) for text in texts], dtype=np.float32).reshape(-1, len(NAMES))


def _describe(text: str) -> tuple[float, ...]:
    words, runs = _WORD.findall(text), _RUN.findall(text.casefold())
    n_words, n_characters = max(len(words), 1), max(len(text), 1)
    sentences = max(len(_SENTENCE_END.findall(text)), 1)
    return (
        math.log1p(len(text)),
        math.log1p(len(words)),
        math.log1p(sentences),
        sum(map(len, words)) / n_words,
        len(words) / sentences / 20,
        text.count(",") / n_words,
        text.count(".") / n_words,
        text.count("?") / n_words,
        text.count("!") / n_words,
        len(_DIGIT.findall(text)) / n_characters,
        math.log1p(text.count("\n")),
        math.log1p(len(_LIST_ITEM.findall(text))),
        sum(run in _FIRST_PERSON for run in runs) / n_words,
        sum(run in _HEDGING for run in runs) / n_words,
        sum(map(str.isupper, text)) / n_characters,
        len({word.lower() for word in words}) / n_words,
        float(not words),
        sum(map(text.count, "\"'()“”")) / n_words,
        sum(map(text.count, ":;")) / n_words,
        float(text.rstrip()[-1:] in (".", "!", "?", "…")),
    )


# --- Hashed words: a text as signed counts of its words and word pairs, without a model.


def hashed_words(texts: Sequence[str], dimension: int) -> Any:
    """Return ``(n_texts, dimension)`` unit vectors of counts, as float32."""
    vectors = np.zeros((len(texts), dimension), dtype=np.float32)
    for row, text in enumerate(texts):
        words = text.lower().split()
        for token in (*words, *map(" ".join, itertools.pairwise(words))):
            value = zlib.crc32(token.encode())
            vectors[row, (value >> 1) % dimension] += 1.0 if value & 1 else -1.0
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))
