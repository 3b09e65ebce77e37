"""Phrases of responses: one to three words that can name a view, and in which pairs the two responses differ in them.

This module decides what a phrase is. It begins and ends with a content word and does not cross punctuation: "clean
air", "law and order". Function words may stand inside, but do not begin or end a phrase. The list of them is English.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from pluralign.core.arrays import IndexArray
from pluralign.core.text import shortened
from pluralign.evaluation.groupings import FUNCTION_WORDS

MAX_WORDS = 3
MIN_LETTERS = 3
"""Of the first and the last word; a phrase of one word has at least one letter more."""
MAX_PHRASES = 20_000
"""Only the most frequent phrases are read."""
EXCERPT_LENGTH = 180

_BREAK = re.compile(r"[.!?;:,()\[\]{}\"“”„«»\n\r\t…–—*#|/<>]+")
_TOKEN = re.compile(r"[^\W_]+(?:['’\-][^\W_]+)*")
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]*")
_NOT_A_VIEW = FUNCTION_WORDS | frozenset(re.findall(r"\S+", """
    able actually almost already although always another anybody anyone anything away back been came come comes done
    else enough even ever everybody everyone everything far going gone got however i'd i'll i'm i've instead isn't it's
    keep know less lot made maybe mean means met nobody nor nothing often once ones perhaps put quite rather really say
    says see seem seems set since somebody someone something soon still sure take than that's themselves therefore thing
    things though thus today together told took turn upon whole won won't wouldn't you're can't cannot don't doesn't
    didn't aren't shouldn't let's there's they're we'd we'll we're we've what's who's
"""))  # fmt: skip


def phrases_of(text: str) -> frozenset[str]:
    """Return the distinct phrases of a text, in lower case.

    Example:
        >>> sorted(phrases_of("Clean air matters. Law and order, too!"))
        ['air matters', 'clean', 'clean air', 'clean air matters', 'law and order', 'matters', 'order']
    """
    found = set()
    for part in _BREAK.split(text.lower().replace("’", "'")):
        tokens = _TOKEN.findall(part)
        content = [len(t) >= MIN_LETTERS and t not in _NOT_A_VIEW and not any(map(str.isdigit, t)) for t in tokens]
        for first, is_content in enumerate(content):
            if not is_content:
                continue
            for last in range(first, min(first + MAX_WORDS, len(tokens))):
                if content[last] and (last > first or len(tokens[first]) > MIN_LETTERS):
                    found.add(" ".join(tokens[first : last + 1]))
    return frozenset(found)


@dataclass(frozen=True, eq=False)
class PhraseTable:
    """Which pairs differ in which phrases."""

    phrases: list[str]
    """The most frequent first, ``(n_phrases,)``."""
    difference: Any
    """1 where only response a has the phrase, −1 where only b has it: a sparse matrix, ``(n_pairs, n_phrases)``."""


def phrase_table(texts: Sequence[str], a: IndexArray, b: IndexArray, *, min_texts: int) -> PhraseTable:
    """Return the phrases of texts, and the pairs that differ in each.

    Args:
        texts: the responses, ``(n_texts,)``.
        a: index of response a of each pair, ``(n_pairs,)``.
        b: index of response b of each pair, ``(n_pairs,)``.
        min_texts: phrases of fewer texts are left out.

    Example:
        >>> table = phrase_table(["Clean air.", "Lower taxes."], np.array([0, 1]), np.array([1, 0]), min_texts=1)
        >>> table.phrases[0], table.difference.toarray()[:, 0]
        ('clean', array([ 1., -1.]))
    """
    of_texts = [phrases_of(text) for text in texts]
    counts = Counter(phrase for of_text in of_texts for phrase in of_text)
    frequent = sorted((phrase for phrase, count in counts.items() if count >= min_texts), key=lambda p: (-counts[p], p))
    phrases = frequent[:MAX_PHRASES]
    column = {phrase: index for index, phrase in enumerate(phrases)}
    columns = [sorted(column[phrase] for phrase in of_text if phrase in column) for of_text in of_texts]
    starts = np.cumsum([0, *map(len, columns)])
    entries = np.array([index for of_text in columns for index in of_text], dtype=np.int64)
    present = sparse.csr_array((np.ones(len(entries)), entries, starts), shape=(len(texts), len(phrases)))
    difference = sparse.csc_array(present[a] - present[b])
    difference.eliminate_zeros()
    return PhraseTable(phrases, difference)


def excerpt(text: str, phrases: Sequence[str]) -> str:
    """Return the first sentence of a text that has one of the phrases, shortened around it; empty if none has.

    Example:
        >>> excerpt("I agree. We need clean air in town! Thanks.", ["clean air"])
        'We need clean air in town!'
    """
    pattern = re.compile("|".join(_pattern(phrase) for phrase in phrases), re.IGNORECASE)
    for sentence in _SENTENCE.findall(text):
        if found := pattern.search(sentence):
            sentence, before = sentence.strip(), len(sentence) - len(sentence.lstrip())
            start = max(found.start() - before - EXCERPT_LENGTH // 2, 0)
            if start and len(sentence) > EXCERPT_LENGTH:
                return "…" + shortened(sentence[start:], EXCERPT_LENGTH - 1)
            return shortened(sentence, EXCERPT_LENGTH)
    return ""


def _pattern(phrase: str) -> str:
    words = (re.escape(word).replace("'", "['’]") for word in phrase.split())
    return r"(?<![^\W_])" + r"\s+".join(words) + r"(?![^\W_])"
