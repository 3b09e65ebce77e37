"""Readable traits of a response: numbers that a person can check by reading it.

This module decides the sixteen traits of member cards, how each is counted, and the words for more and for less of it.
The word lists are English and written for this library; sentiment is VADER's, and is left out without its package.
Traits that exist as surface features are taken from there.
"""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.features.surface import NAMES, surface_features

logger = logging.getLogger("pluralign")


@dataclass(frozen=True)
class Trait:
    """One readable property of a response."""

    key: str
    more: str
    """Completes "prefers …" for a member that prefers more of it."""
    less: str
    """Completes "prefers …" for a member that prefers less of it."""
    definition: str
    """How it is counted, in one sentence."""


TRAITS = (
    Trait("length", "longer answers", "shorter answers", "Logarithm of the number of words."),
    Trait("sentence_length", "longer sentences", "shorter sentences", "Words per sentence."),
    Trait("structure", "lists", "running prose", "Logarithm of the lines that are list items or headings."),
    Trait("questions", "asking questions", "not asking questions", "Question marks per word."),
    Trait("first_person", "speaking as I or we", "impersonal wording", "I, me, my, we, us, our… per word."),
    Trait("second_person", "addressing the reader", "not addressing the reader", "You, your, yours… per word."),
    Trait("hedging", "hedged claims", "unhedged claims", "May, might, perhaps, probably, it depends… per word."),
    Trait("certainty", "confident wording", "less confident wording", "Certainly, clearly, never, always… per word."),
    Trait("directives", "giving instructions", "leaving the decision open", "Must, should… and imperatives, per word."),
    Trait("sentiment", "a positive tone", "a negative tone", "Compound sentiment of VADER, from -1 to 1."),
    Trait(
        "formality",
        "formal wording",
        "informal wording",
        "Therefore, regarding… minus contractions, okay… per word.",
    ),
    Trait("concreteness", "concrete details", "general statements", "Numbers, for example, a story… per word."),
    Trait("balance", "weighing both sides", "arguing one side", "However, although, both, compromise… per word."),
    Trait("warmth", "a warm tone", "a neutral tone", "Please, thank, sorry, understand, friends, welcome… per word."),
    Trait("readability", "easy-to-read text", "hard-to-read text", "Flesch reading ease, from groups of vowels."),
    Trait(
        "echo",
        "repeating words of the prompt",
        "other words than the prompt",
        "Share of its longer words that the prompt has.",
    ),
)
KEYS = tuple(trait.key for trait in TRAITS)

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")
_CONTENT_WORD = re.compile(r"[^\W\d_]{4,}")
_HEADING = re.compile(r"^\s*(?:#{1,6}\s|\*\*[^*\n]+\*\*:?\s*$)", re.MULTILINE)
_NUMBER = re.compile(r"^\s*\d+[.)]\s|(\d[\d.,]*)", re.MULTILINE)  # the number of a list item does not count
_VOWELS = re.compile(r"[aeiouyäöüéèà]+")
_CONTRACTION = re.compile(
    r"n['’]t\b|\w['’](?:re|ll|ve|m|d)\b|\b(?:it|that|there|here|what|who|he|she|let)['’]s\b", re.IGNORECASE
)
_FIRST_WORD = re.compile(r"(?:^|[.!?…:]\s+|^\s*(?:[-*•]|\d+[.)])\s+)([^\W\d_]+)", re.MULTILINE)
_COMMANDS = frozenset(re.findall(r"\w+", """
    add allow ask avoid be begin bring build call check choose come consider create do ensure fix follow get give go
    help hold join keep leave listen look make put read remember say scrap send set show speak spend start stay stop
    support take tell think try turn use vote wait wake work write
"""))  # fmt: skip


def _any_of(phrases: str) -> re.Pattern[str]:
    """Return a pattern that matches any of the comma-separated phrases; * matches any ending."""
    escaped = (re.escape(phrase.strip()).replace(r"\*", r"\w*") for phrase in phrases.split(","))
    return re.compile(rf"\b(?:{'|'.join(escaped)})\b", re.IGNORECASE)


_COUNTED = {
    "second_person": _any_of("you, your, yours, yourself, yourselves"),
    "hedging": _any_of(
        "may, might, perhaps, maybe, possibl*, probabl*, seem, seems, likely, unlikely, somewhat, presumabl*, "
        "apparently, arguabl*, suppose, guess, wonder, tend, tends, not sure, unsure, not certain, uncertain*, "
        "depend, depends, depending, as far as i, in my opinion, i think, i believe, it appears, in some cases, to "
        "some extent, i lean, some doubts, could be, if i"
    ),
    "certainty": _any_of(
        "certain, certainly, clear, clearly, definite*, absolute*, obvious*, undoubted*, of course, no doubt, "
        "without any doubt, without doubt, beyond doubt, always, never, firmly, fully, completely, totally, "
        "utterly, without question, nothing will, surely"
    ),
    "directives": _any_of("must, should, shall, ought, need to, needs to, have to, has to, let us, let's, had better"),
    "formal": _any_of(
        "therefore, furthermore, moreover, consequently, accordingly, nevertheless, nonetheless, hence, thus, "
        "regarding, concerning, with respect to, with reference to, with due respect, in accordance, pursuant, "
        "subsequent*, prior to, whereas, thereby, herein, in conclusion, in addition, additionally, respective*, "
        "honourable, submit*, consultation, the record, in order to, upon"
    ),
    "informal": _any_of(
        "okay, ok, yeah, yep, nope, hey, hi, wow, kinda, gonna, wanna, gotta, stuff, guys, kids, awesome, cool, "
        "crap, damn, lol, nonsense, rubbish, waffle, come on, frankly, sick of, crying out loud, a lot, lots of, "
        "pretty much, dumb"
    ),
    "examples": _any_of(
        "for example, for instance, e.g, such as, example*, story, stories, last year, last week, yesterday, "
        "hundred*, thousand*, million*, billion*, percent*, per cent, pounds, dollars, euros"
    ),
    "balance": _any_of(
        "however, although, though, whereas, on the one hand, on the other hand, on one hand, both, either, "
        "neither, balance*, compromise*, middle, halfway, trade-off*, tradeoff*, pros, cons, at the same time, "
        "nevertheless, nonetheless, while some, two sides, each side, yet"
    ),
    "warmth": _any_of(
        "please, thank*, sorry, grateful*, gratitude, appreciat*, understand*, welcome*, kindly, kindness, friend*, "
        "dear, warm*, heart*, love*, lovely, hug, bless, hope, care, caring, glad, happy, together, respect*, "
        "sympath*, empath*"
    ),
}


def trait_values(prompts: Sequence[str], responses: Sequence[str]) -> FloatArray:
    """Return the value of each of ``TRAITS`` for each response, ``(n_responses, n_traits)``.

    Args:
        prompts: prompt of each response, ``(n_responses,)``.
        responses: texts, ``(n_responses,)``.

    Returns:
        The values. Sentiment is NaN if the package vaderSentiment is not installed; a log message says so once.

    Example:
        >>> values = trait_values(["Tea?"] * 2, ["Perhaps. It may depend on you.", "No! Never."])
        >>> [bool(more) for more in values[0] > values[1]]
        ... # doctest: +ELLIPSIS
        [True, True, False, False, False, True, True, False, ...]
    """
    surface = dict(zip(NAMES, surface_features(responses).astype(np.float64).T, strict=True))
    counted = [_count(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    if not counted:
        return np.empty((0, len(KEYS)))
    columns = {key: np.array([values[key] for values in counted]) for key in counted[0]}
    sentence_length = surface["words per sentence"] * 20
    columns |= {
        "length": surface["log words"],
        "sentence_length": sentence_length,
        "structure": np.log1p(np.expm1(surface["log list items"]) + columns["headings"]),
        "questions": surface["question marks"],
        "first_person": surface["first person"],
        "readability": 206.835 - 1.015 * sentence_length - 84.6 * columns["syllables"],
    }
    return np.stack([columns[key] for key in KEYS], axis=1)


def content_words(text: str) -> frozenset[str]:
    """Return the distinct words of four letters or more, in lower case.

    Example:
        >>> sorted(content_words("The trees, the TREES and 2024!"))
        ['trees']
    """
    return frozenset(_CONTENT_WORD.findall(text.lower()))


def _count(prompt: str, response: str) -> dict[str, float]:
    """Return the traits that are not surface features, and headings and syllables per word."""
    words = [word.lower() for word in _WORD.findall(response)]
    n = max(len(words), 1)
    rate = {name: len(pattern.findall(response)) / n for name, pattern in _COUNTED.items()}
    commands = sum(first.lower() in _COMMANDS for first in _FIRST_WORD.findall(response))
    own = content_words(response)
    return {
        "second_person": rate["second_person"],
        "hedging": rate["hedging"],
        "certainty": rate["certainty"],
        "directives": rate["directives"] + commands / n,
        "sentiment": vader.polarity_scores(response)["compound"] if (vader := _vader()) else math.nan,
        "formality": rate["formal"]
        - rate["informal"]
        - (len(_CONTRACTION.findall(response)) + response.count("!")) / n,
        "concreteness": sum(map(bool, _NUMBER.findall(response))) / n + rate["examples"],
        "balance": rate["balance"],
        "warmth": rate["warmth"],
        "syllables": sum(_syllables(word) for word in words) / n,
        "echo": len(own & content_words(prompt)) / max(len(own), 1),
        "headings": float(len(_HEADING.findall(response))),
    }


def _syllables(word: str) -> int:
    """Return the number of groups of vowels, without a silent e at the end.

    Example:
        >>> [_syllables(word) for word in ("tea", "bridge", "committee", "nobody")]
        [1, 1, 3, 3]
    """
    groups = len(_VOWELS.findall(word))
    silent = word.endswith("e") and not word.endswith(("le", "ee")) and groups > 1
    return max(groups - silent, 1)


@cache
def _vader() -> Any:
    """Return the sentiment analyzer; None if its package is not installed."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        logger.warning(
            "member cards leave out the tone of responses: the package vaderSentiment is not installed (run  "
            "pip install 'pluralign[report]')."
        )
        return None

    class LinearTimeAnalyzer(SentimentIntensityAnalyzer):  # type: ignore[misc]
        """VADER with the same results in linear instead of quadratic time.

        For each word with a sentiment, two checks of VADER lower-case the whole text and then use at most three words
        before and two after. They get only these words here.
        """

        def _negation_check(self, valence: float, words: list[str], back: int, i: int) -> Any:
            first = max(i - 3, 0)
            return super()._negation_check(valence, words[first : i + 1], back, i - first)

        def _special_idioms_check(self, valence: float, words: list[str], i: int) -> Any:
            first = max(i - 3, 0)
            return super()._special_idioms_check(valence, words[first : i + 3], i - first)

    return LinearTimeAnalyzer()
