"""Surface features: length, punctuation and structure of a response. They are cheap and predictive.

Decided here: which twenty numbers describe a text. They depend on the response alone; nothing is learned. This file
imports nothing of the package: ``export`` copies it.
"""

import itertools
import math
import re
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

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
    return np.array([[*_describe(text).values()] for text in texts], dtype=np.float32).reshape(-1, len(NAMES))


def _describe(text: str) -> dict[str, float]:
    """Return the features of a text by name."""
    words, runs = _WORD.findall(text), _RUN.findall(text.casefold())
    n_words, n_characters = max(len(words), 1), max(len(text), 1)
    sentences = max(len(_SENTENCE_END.findall(text)), 1)
    return {
        "log characters": math.log1p(len(text)),
        "log words": math.log1p(len(words)),
        "log sentences": math.log1p(sentences),
        "letters per word": sum(map(len, words)) / n_words,
        "words per sentence": len(words) / sentences / 20,
        "commas": text.count(",") / n_words,
        "full stops": text.count(".") / n_words,
        "question marks": text.count("?") / n_words,
        "exclamation marks": text.count("!") / n_words,
        "digits": len(_DIGIT.findall(text)) / n_characters,
        "log line ends": math.log1p(text.count("\n")),
        "log list items": math.log1p(len(_LIST_ITEM.findall(text))),
        "first person": sum(run in _FIRST_PERSON for run in runs) / n_words,
        "hedging": sum(run in _HEDGING for run in runs) / n_words,
        "capitals": sum(map(str.isupper, text)) / n_characters,
        "distinct words": len({word.lower() for word in words}) / n_words,
        "no words": float(not words),
        "quotes and brackets": sum(map(text.count, "\"'()“”")) / n_words,
        "colons": sum(map(text.count, ":;")) / n_words,
        "ends a sentence": float(text.rstrip()[-1:] in (".", "!", "?", "…")),
    }


NAMES = tuple(_describe(""))


# --- Hashed words: a text as signed counts of its words and word pairs, without a model.


def hashed_words(texts: Sequence[str], dimension: int) -> npt.NDArray[np.float32]:
    """Return ``(n_texts, dimension)`` unit vectors of counts, as float32."""
    vectors = np.zeros((len(texts), dimension), dtype=np.float32)
    for row, text in enumerate(texts):
        words = text.lower().split()
        for token in (*words, *map(" ".join, itertools.pairwise(words))):
            value = zlib.crc32(token.encode())
            vectors[row, (value >> 1) % dimension] += 1.0 if value & 1 else -1.0
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))
