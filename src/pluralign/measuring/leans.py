"""How the votes of each member move with traits of the responses.

For the two responses of a pair let x = ±1 mark the one with more of a trait, and let y = 2 vote − 1 mark the one that a
member prefers. The *lean* of the member is the coefficient of x in the regression of y on x and, for every trait except
length, on the difference in length (its sign and its size). At equal length the member chooses the response with more
of the trait with probability (1 + lean)/2. The *relative* lean is the member's lean minus the lean of the ensemble.

Leans on phrases are measured in the same way, where x marks the response that has the phrase; ``views`` finds the
phrases.

This module decides which leans a card may claim. A relative lean is claimed if it is significant, with standard errors
clustered by prompt, and if it moves at least three votes in a hundred. Of all claims of an ensemble, 5 % may be false
(Benjamini and Hochberg over traits × members). If the ensemble leans one way and the member has no clear lean the other
way, the claim is only that the member cares less.
"""

import logging
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

from pluralign.core.arrays import FloatArray, IndexArray, IntArray
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.text.surface import NAMES, surface_features
from pluralign.theory.intervals import ENOUGH_CLUSTERS
from pluralign.votes.prompts import Prompt

# --- Readable traits of a response: numbers that a person can check by reading it.


logger = logging.getLogger("pluralign")


@dataclass(frozen=True)
class Trait:
    """One readable property of a response."""

    key: str
    more: str
    """Completes "prefers …" for a member that prefers more of it."""
    less: str
    """Completes "prefers …" for a member that prefers less of it."""
    aspect: str
    """Completes "less for …" or "open to …", the name of a member that it matters less to."""
    definition: str
    """How it is counted, in one sentence."""
    unit: str
    """What a person counts: words, or words such as I or we per 100."""
    scale: Literal["", "per 100", "expm1"] = ""
    """From the value to the unit."""


WORDS = tomllib.loads(files("pluralign").joinpath("measuring/words.toml").read_text(encoding="utf-8"))
TRAITS = tuple(Trait(**values) for values in WORDS["traits"])
KEYS = tuple(trait.key for trait in TRAITS)

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")
_CONTENT_WORD = re.compile(r"[^\W\d_]{4,}")
_HEADING = re.compile(r"^\s*(?:#{1,6}\s|\*\*[^*\n]+\*\*:?\s*$)", re.MULTILINE)
_NUMBER = re.compile(r"^\s*\d+[.)]\s|(\d[\d.,]*)", re.MULTILINE)  # the number of a list item does not count
_VOWELS = re.compile(r"[aeiouyäöüéèà]+")
_CONTRACTION = re.compile(
    r"n['’]t\b|\w['’](?:re|ll|ve|m|d)\b|\b(?:it|that|there|here|what|who|he|she|let)['’]s\b", re.IGNORECASE
)
SENTIMENT_PIECE = 2_000
"""Characters whose sentiment is scored together."""
_FIRST_WORD = re.compile(r"(?:^|[.!?…:]\s+|^\s*(?:[-*•]|\d+[.)])\s+)([^\W\d_]+)", re.MULTILINE)


def _any_of(phrases: str) -> re.Pattern[str]:
    """Return a pattern that matches any of the comma-separated phrases; * matches any ending."""
    escaped = (re.escape(" ".join(phrase.split())).replace(r"\*", r"\w*") for phrase in phrases.split(","))
    return re.compile(rf"\b(?:{'|'.join(escaped)})\b", re.IGNORECASE)


_COUNTED = {name: _any_of(phrases) for name, phrases in WORDS["counted"].items()}
_COMMANDS = frozenset(WORDS["commands"].split())


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
    shouted = len(_CONTRACTION.findall(response)) + response.count("!")
    return rate | {
        "directives": rate["directives"] + commands / n,
        "sentiment": _sentiment(response),
        "formality": rate["formal"] - rate["informal"] - shouted / n,
        "concreteness": sum(map(bool, _NUMBER.findall(response))) / n + rate["examples"],
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


def _sentiment(text: str) -> float:
    """Return the mean sentiment of pieces of a text, because VADER takes quadratic time; NaN without its package."""
    pieces = [text[start : start + SENTIMENT_PIECE] for start in range(0, max(len(text), 1), SENTIMENT_PIECE)]
    vader = _vader()
    return float(np.mean([vader.polarity_scores(piece)["compound"] for piece in pieces])) if vader else math.nan


@cache
def _vader() -> Any:
    """Return the sentiment analyzer; None if its package is not installed."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        install = "the package vaderSentiment is not installed (run  pip install 'pluralign[report]')"
        logger.warning("member cards leave out the tone of responses: %s.", install)
        return None
    return SentimentIntensityAnalyzer()


SIGNIFICANCE = 0.05
"""Expected share of false claims on all cards of an ensemble together, for traits, phrases and positions each. If no
member differs, it is the probability of any claim."""
MIN_LEAN = 0.06
"""Smaller relative leans move less than three votes in a hundred and are not claimed."""
PREFERS = "prefers "
CARES_LESS = "cares less about "
LIKES_WORD = "likes mentions of "
DISLIKES_WORD = "dislikes mentions of "


@dataclass(frozen=True)
class Lean:
    """How the votes of one member move with one trait or word, at equal length."""

    trait: str
    """Key of the trait, or the word."""
    own: float
    """Lean of the member: it chooses the response with more of the trait with probability (1 + own)/2."""
    relative: float
    """``own`` minus ``ensemble``."""
    standard_error: float
    """Standard error of ``relative``, clustered by prompt."""
    z: float
    """Score statistic of ``relative``: standard normal for a member with the lean of the ensemble."""
    ensemble: float
    """Lean of the weighted votes of all members."""
    people: float
    """Lean of people's votes."""
    pairs: int
    """Number of pairs whose responses differ in the trait."""
    claim: str
    """Claim for a card, such as "prefers longer answers"; empty if the lean is small or not significant."""

    @property
    def phrase(self) -> str:
        """The claim about a trait without its verb."""
        return self.claim.removeprefix(PREFERS).removeprefix(CARES_LESS)

    def shares(self, side: int = 0) -> tuple[float, float, float]:
        """Return the shares of pairs in which the member, all members and people choose one side.

        Args:
            side: 1 for the responses with more of it, −1 for those with less, 0 for the side that the claim is about.
        """
        side = side or (1 if self.phrase == TRAITS[KEYS.index(self.trait)].more else -1)
        own, ensemble, people = (
            min(max((1 + side * value) / 2, 0.0), 1.0) for value in (self.own, self.ensemble, self.people)
        )
        return own, ensemble, people


MAX_CHARACTERS = 1_000_000
"""Maximum amount of text whose traits are measured, about three seconds of work; larger sets are sampled by prompt."""


def sample_prompts(held_out: HeldOutVotes, max_characters: int | None = None) -> HeldOutVotes:
    """Return the votes on a random sample of prompts whose texts have at most ``MAX_CHARACTERS``, or the given number.

    Whole prompts are drawn, at least one, and the same votes give the same sample. The prompt counts once per response.

    Example:
        >>> from pluralign import town_hall
        >>> votes = town_hall(400).preferences
        >>> held_out = HeldOutVotes(votes, np.zeros((len(votes.responses), 1)))
        >>> len(votes.prompts), len(sample_prompts(held_out, 100_000).preferences.prompts)
        (50, 22)
    """
    votes, items = held_out.preferences, held_out.preferences.items()
    prompts = np.array([len(Prompt(prompt).text) for prompt in votes.prompts])
    responses = np.array([len(text) for text in votes.responses])
    sizes = np.bincount(items.prompt_index, prompts[items.prompt_index] + responses[items.response_index])
    max_characters = MAX_CHARACTERS if max_characters is None else max_characters
    if sizes.sum() <= max_characters:
        return held_out
    order = np.random.default_rng(11).permutation(len(sizes))
    n = max(int(np.searchsorted(np.cumsum(sizes[order]), max_characters, side="right")), 1)
    return held_out[np.isin(votes.prompt_index, order[:n])]


# --- tests of leans ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contrast:
    """A trait or phrases, and which response of each pair has more of it."""

    name: str
    x: FloatArray
    """1 if response a has more of it, −1 if response b has, 0 if neither or if the pair is not tested, ``(n_pairs,)``.
    """
    claims: tuple[str, str, str, str]
    """Of a member that prefers more of it, prefers less, cares less about more of it, and about less of it."""
    adjusted: bool = True
    """Whether leans are adjusted for length."""


@dataclass(frozen=True, eq=False)
class SignedVotes:
    """Votes as ±1, and the traits in which the two responses of each pair differ."""

    held_out: HeldOutVotes
    weights: FloatArray
    """Of the members, ``(k,)``."""
    signs: FloatArray
    """1 if response a has more of a trait, −1 if response b has, else 0, ``(n_pairs, n_traits)``."""
    length: FloatArray
    """Sign and size of the difference in length, the controls of the regression, ``(n_pairs, 2)``."""

    @classmethod
    def of(cls, held_out: HeldOutVotes, weights: FloatArray) -> "SignedVotes":
        """Compare the two responses of each pair in every trait."""
        votes, items = held_out.preferences, held_out.preferences.items()
        prompts = [Prompt(prompt).text for prompt in votes.prompts]
        responses = [str(votes.responses[r]) for r in items.response_index]
        values = trait_values([prompts[p] for p in items.prompt_index], responses)
        difference = values[items.a] - values[items.b]
        length = difference[:, KEYS.index("length")]
        controls = np.stack([np.sign(length), np.clip(length / (length.std() or 1.0), -3.0, 3.0)], axis=1)
        signs = np.nan_to_num(np.sign(difference))  # an unmeasured trait does not differ in any pair
        return cls(held_out, weights, signs, controls)

    @property
    def prompt_index(self) -> IndexArray:
        """Prompt of each pair, ``(n_pairs,)``."""
        return self.held_out.preferences.prompt_index

    @cached_property
    def y(self) -> FloatArray:
        """2 vote − 1, ``(n_pairs, 2 k + 2)``: members, members relative to the ensemble, people, the ensemble."""
        members = 2.0 * self.held_out.votes - 1.0
        ensemble = members @ self.weights
        people = 2.0 * self.held_out.preferences.prob_a - 1.0
        return np.column_stack([members, members - ensemble[:, None], people, ensemble])

    def trait_leans(self) -> tuple[list[tuple[Lean, ...]], list[tuple[str, float]]]:
        """Return the leans of each member on all traits, and what people prefer: traits with the lean of their votes.

        People's leans are significant too, and the largest come first.
        """
        k, contrasts = len(self.weights), []
        for trait, x in zip(TRAITS, self.signs.T, strict=True):
            claims = (PREFERS + trait.more, PREFERS + trait.less, CARES_LESS + trait.more, CARES_LESS + trait.less)
            contrasts.append(Contrast(trait.key, x, claims, adjusted=trait.key != "length"))
        fits = [self.fitted(contrast) for contrast in contrasts]
        of_members, of_people = (
            discovery_threshold(np.abs([fit.z[columns] for fit in fits])) for columns in (slice(k, 2 * k), -2)
        )
        people = [
            (trait.more if fit.mean[-2] > 0 else trait.less, abs(float(fit.mean[-2])))
            for trait, fit in zip(TRAITS, fits, strict=True)
            if abs(fit.z[-2]) >= of_people and abs(fit.mean[-2]) >= MIN_LEAN
        ]
        leans = [self.leans(*both, of_members) for both in zip(contrasts, fits, strict=True)]
        return list(zip(*leans, strict=True)), sorted(people, key=lambda one: -one[1])

    def fitted(self, contrast: Contrast) -> "AdjustedMean":
        """Return the regression of all votes on a contrast, NaN for fewer than ``ENOUGH_CLUSTERS`` prompts."""
        rows = np.flatnonzero(contrast.x)
        clusters = np.unique(self.prompt_index[rows], return_inverse=True)[1]
        if int(clusters.max(initial=-1)) + 1 < ENOUGH_CLUSTERS:
            return AdjustedMean(*np.full((3, self.y.shape[1]), np.nan))
        controls = self.length[rows] if contrast.adjusted else np.empty((len(rows), 0))
        return adjusted_mean(self.y[rows], contrast.x[rows], controls, clusters)

    def leans(self, contrast: Contrast, fitted: "AdjustedMean", threshold: float) -> list[Lean]:
        """Return the lean of each member on a contrast; one has a claim if |z| reaches the threshold."""
        k, pairs = len(self.weights), int(np.count_nonzero(contrast.x))
        clear = (np.abs(fitted.z) >= threshold) & (np.abs(fitted.mean) >= MIN_LEAN)
        people, ensemble = fitted.mean[-2:].tolist()
        more, less, less_about_more, less_about_less = contrast.claims
        leans = []
        for j in range(k):
            own, relative = fitted.mean[[j, k + j]].tolist()
            prefers = own * relative > 0 and bool(clear[j] or ensemble * relative >= 0)
            claim = (more if prefers else less_about_less) if relative > 0 else (less if prefers else less_about_more)
            error, z, claim = float(fitted.standard_error[k + j]), float(fitted.z[k + j]), claim if clear[k + j] else ""
            leans.append(Lean(contrast.name, own, relative, error, z, ensemble, people, pairs, claim))
        return leans


def discovery_threshold(z: npt.ArrayLike, sides: int = 2) -> float:
    """Return the smallest statistic that is a discovery, if a share ``SIGNIFICANCE`` of these may be false.

    Of m sorted p-values those up to the largest p_(i) ≤ .05 i/m are discoveries. Undefined statistics are no tests.

    Example:
        >>> discovery_threshold([4.0, 2.5, 1.0, 0.2]), discovery_threshold([1.0, 0.2])
        (2.5, inf)

    Reference: Benjamini and Hochberg, "Controlling the false discovery rate", J. R. Stat. Soc. B 57 (1995).
    """
    found = np.asarray(z, dtype=np.float64).ravel()
    found = -np.sort(-found[~np.isnan(found)])
    passed = np.flatnonzero(sides * stats.norm.sf(found) <= SIGNIFICANCE * np.arange(1, len(found) + 1) / len(found))
    return float(found[passed[-1]]) if len(passed) else math.inf


class AdjustedMean(NamedTuple):
    """One coefficient per column of y, each array ``(m,)``; NaN if x is a linear combination of the controls."""

    mean: FloatArray
    standard_error: FloatArray
    """Clustered."""
    z: FloatArray
    """Score statistic: standard normal if x has no effect."""


def adjusted_mean(y: FloatArray, x: FloatArray, controls: FloatArray, clusters: IntArray) -> AdjustedMean:
    """Return the coefficient of x in the regression of each column of y on x and the controls.

    By the Frisch–Waugh–Lovell theorem the coefficient is b = Σ x̃ y / Σ x̃², where x̃ is x minus its regression on the
    controls. With residuals e, its standard error clustered over G clusters g is √(G/(G−1) Σ_g (Σ_{i∈g} x̃ e)²) / Σ x̃².
    That is too small for few clusters, so z uses the residuals of the regression on the controls alone, which are the
    residuals under the null hypothesis. Without controls and with x = ±1, b is the mean of x y. There is no intercept,
    because exchanging the responses of a pair changes every sign.

    Args:
        y: ``(n, m)``.
        x: ``(n,)``.
        controls: ``(n, c)``.
        clusters: index of the cluster of each row, from 0, ``(n,)``.

    Example:
        >>> y, x = np.array([[1.0], [1.0], [-1.0], [1.0]]), np.array([1.0, 1.0, -1.0, -1.0])
        >>> fitted = adjusted_mean(y, x, np.empty((4, 0)), np.arange(4))
        >>> float(fitted.mean[0]), float(fitted.standard_error[0])
        (0.5, 0.5)

    Reference: Liang and Zeger, "Longitudinal data analysis using generalized linear models", Biometrika 73 (1986).
    """
    n_clusters = int(clusters.max()) + 1
    without = np.linalg.lstsq(controls, np.column_stack([x, y]), rcond=None)[0] if controls.size else None
    left, rest = (x, y) if without is None else (x - controls @ without[:, 0], y - controls @ without[:, 1:])
    scale = float(left @ left)
    if scale < 1e-9 * len(x) or n_clusters < 2:
        return AdjustedMean(*np.full((3, y.shape[1]), np.nan))
    mean = left @ rest / scale
    spread, spread_without = (
        np.sqrt(n_clusters / (n_clusters - 1) * (_sums(left[:, None] * residual, clusters) ** 2).sum(axis=0))
        for residual in (rest - np.outer(left, mean), rest)
    )
    return AdjustedMean(mean, spread / scale, mean * scale / np.maximum(spread_without, 1e-12))


def _sums(values: FloatArray, clusters: IntArray) -> FloatArray:
    sums = np.zeros((int(clusters.max()) + 1, values.shape[1]))
    np.add.at(sums, clusters, values)
    return sums
