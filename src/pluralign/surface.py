"""Surface features: what a reader sees of a response before reading it. Cheap, and they carry real signal.

Decided here: which twenty numbers describe a text. They are of the response alone; nothing is learned.
"""

import re
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

NAMES = (
    "log characters",
    "log words",
    "log sentences",
    "letters a word",
    "words a sentence",
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
_FIRST_PERSON = re.compile(r"\b(?:i|me|my|mine|myself|we|us|our|ours)\b", re.IGNORECASE)
_HEDGING = re.compile(
    r"\b(?:may|might|could|perhaps|maybe|possibly|probably|seems?|likely|somewhat|generally|often|sometimes|"
    r"depends?|however|although|though|but|unless|while)\b",
    re.IGNORECASE,
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
    words = _WORD.findall(text)
    n_words, n_characters = max(len(words), 1), max(len(text), 1)
    sentences = max(len(_SENTENCE_END.findall(text)), 1)
    return (
        np.log1p(len(text)),
        np.log1p(len(words)),
        np.log1p(sentences),
        sum(map(len, words)) / n_words,
        len(words) / sentences / 20,
        text.count(",") / n_words,
        text.count(".") / n_words,
        text.count("?") / n_words,
        text.count("!") / n_words,
        len(_DIGIT.findall(text)) / n_characters,
        np.log1p(text.count("\n")),
        np.log1p(len(_LIST_ITEM.findall(text))),
        len(_FIRST_PERSON.findall(text)) / n_words,
        len(_HEDGING.findall(text)) / n_words,
        sum(map(str.isupper, text)) / n_characters,
        len({word.lower() for word in words}) / n_words,
        float(not words),
        sum(map(text.count, "\"'()“”")) / n_words,
        sum(map(text.count, ":;")) / n_words,
        float(text.rstrip()[-1:] in (".", "!", "?", "…")),
    )
