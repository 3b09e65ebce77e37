"""Views that a member favours: phrases whose responses it prefers, or rejects, where the other members do not.

Responses to the same prompt are compared, so words that both share cancel. The held-out prompts are split into two
halves. Each half proposes views, and only the other half tests them: effect sizes and intervals come from prompts that
did not choose the phrases. There are two kinds of views:

- a *phrase*: the member prefers (or rejects) responses that have it;
- a *position*: the member prefers responses with some phrases over responses with others. The phrases
  are tested together, so they may be too rare to be tested one by one.

This module decides which views are proposed and which survive. A view survives if the relative lean (``leans``) has the
proposed sign on the other half, is significant in a one-sided test by prompt (5 % of the views of an ensemble may be
false, phrases and positions each), and moves at least three votes in a hundred.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse, stats

from pluralign.core.arrays import FloatArray, IndexArray, IntArray, Mask
from pluralign.core.random_streams import VIEW_HALVES, random_stream
from pluralign.core.text import shortened
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.measuring.groups import presence
from pluralign.measuring.leans import (
    DISLIKES_WORD,
    LIKES_WORD,
    SIGNIFICANCE,
    WORDS,
    Contrast,
    Lean,
    SignedVotes,
    discovery_threshold,
)
from pluralign.theory.intervals import ENOUGH_CLUSTERS
from pluralign.votes.prompts import Prompt

# --- Phrases of responses: one to three words that can name a view


MAX_WORDS = 3
MIN_LETTERS = 3
"""Of the first and the last word; a phrase of one word has at least one letter more."""
MAX_PHRASES = 20_000
"""Only the most frequent phrases are read."""
EXCERPT_LENGTH = 180

_BREAK = re.compile(r"[.!?;:,()\[\]{}\"“”„«»\n\r\t…–—*#|/<>]+")
_TOKEN = re.compile(r"[^\W_]+(?:['’\-][^\W_]+)*")
SENTENCE = re.compile(r"[^.!?\n]+[.!?]*")
_NOT_A_VIEW = frozenset((WORDS["function_words"] + WORDS["no_view"]).split())


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
    present = presence(of_texts, phrases)
    difference = sparse.csc_array(present[a] - present[b])
    difference.eliminate_zeros()
    return PhraseTable(phrases, difference)


def excerpt(text: str, phrases: Sequence[str], length: int = EXCERPT_LENGTH) -> str:
    """Return the first sentence of a text that has one of the phrases, shortened around it; empty if none has.

    Example:
        >>> excerpt("I agree. We need clean air in town! Thanks.", ["clean air"])
        'We need clean air in town!'
    """
    pattern = re.compile("|".join(_pattern(phrase) for phrase in phrases), re.IGNORECASE)
    for sentence in map(str.strip, SENTENCE.findall(text)):
        if found := pattern.search(sentence):
            start = found.start() - length // 2
            if start > 0 and len(sentence) > length:
                start = max(sentence.find(" ", start, found.start()) + 1, start)  # at a word
                return "…" + shortened(sentence[start:], length - 1)
            return shortened(sentence, length)
    return ""


def _pattern(phrase: str) -> str:
    words = (re.escape(word).replace("'", "['’]") for word in phrase.split())
    return r"(?<![^\W_])" + r"\s+".join(words) + r"(?![^\W_])"


PHRASES_PROPOSED = 12
"""Phrases that one half proposes for a member. More proposals need clearer evidence each."""
MIN_Z = 2.0
"""A half proposes phrases whose score statistic exceeds this."""
POSITION_PHRASES = 5
"""Phrases on each side of a position."""
MIN_PROMPTS = 5
"""Prompts of the proposing half that must differ in a phrase of a position."""
QUOTES = 2
PROMPT_LENGTH = 300
"""Maximum length of the prompt beside a quote."""


@dataclass(frozen=True)
class Quote:
    """A sentence of a held-out response that has a phrase of a view."""

    prompt: str
    text: str
    """The sentence, shortened."""
    preferred: bool
    """Whether the member prefers the response to the other one of the pair, or rejects it."""
    weight_with_it: float
    """Share of the ensemble's weight that votes like the member on this pair."""


@dataclass(frozen=True)
class View:
    """A claim that a member prefers responses with some phrases to responses with others."""

    prefers: tuple[str, ...]
    """Phrases of the responses that it prefers, the clearest first."""
    rejects: tuple[str, ...]
    """Phrases of the responses that it rejects, the clearest first."""
    lean: Lean
    """On the half of the prompts that tested it. It chooses the preferred side with probability (1 + |own|)/2."""
    low: float
    """Lower end of the 95 % interval of the relative lean."""
    high: float
    prompts: int
    """Number of prompts that it was tested on."""
    quotes: tuple[Quote, ...] = ()

    @property
    def title(self) -> str:
        """The claim in words, such as "Prefers “peace”, “side” to “taxes”"."""
        liked, disliked = (", ".join(f"“{phrase}”" for phrase in side) for side in (self.prefers, self.rejects))
        claim = f"prefers {liked}" if liked else f"rejects {disliked}"
        if liked and disliked:
            claim += f" to {disliked}"
        return claim[0].upper() + claim[1:]

    @property
    def evidence(self) -> str:
        """The shares of pairs in which the member, all members and people choose the preferred side, in words."""
        sign = 1 if self.prefers else -1
        own, everyone, people = self.lean.shares(sign)
        low, high = sorted((50 * sign * self.low, 50 * sign * self.high))
        return (
            f"{own:.0%} of {self.lean.pairs:,} pairs at equal length; all members {everyone:.0%}, people {people:.0%}; "
            f"difference from all members {50 * sign * self.lean.relative:+.0f} points, "
            f"95 % interval {low:+.0f} to {high:+.0f}"
        )


@dataclass(frozen=True)
class Views:
    """The views of one member that survived, and the number of proposals."""

    phrases: tuple[View, ...] = ()
    """Views of one phrase, the clearest first."""
    positions: tuple[View, ...] = ()
    """Views of several phrases."""
    proposed: int = 0
    """Number of views that were tested, both kinds."""


@dataclass(frozen=True)
class _Proposal:
    """A view to test: signs of phrases by column, on the pairs of the testing half."""

    member: int
    signs: dict[int, float]
    testing: Mask


def find_views(votes: SignedVotes) -> list[Views]:
    """Return the views of each member that survive on prompts that did not propose them."""
    people, k = votes.held_out.preferences, len(votes.weights)
    half = split_prompts(len(people.prompts))[votes.prompt_index]
    if k < 2 or min(len(np.unique(votes.prompt_index[half == side])) for side in (0, 1)) < ENOUGH_CLUSTERS:
        return [Views()] * k
    table = _table_of(votes, min_texts=2 * MIN_PROMPTS)
    proposals = [one for side in (0, 1) for one in _propose(votes, table, half == side, half != side)]
    phrases, positions = (
        _survivors([one for one in proposals if (len(one.signs) > 1) == several], votes, table)
        for several in (False, True)
    )
    counts = np.bincount([one.member for one in proposals], minlength=k)
    return [Views(*of_member) for of_member in zip(phrases, positions, counts.tolist(), strict=True)]


def telling_phrases(votes: SignedVotes) -> list[tuple[list[str], list[str]]]:
    """Return the phrases that each member prefers and rejects most clearly on these votes, without a test.

    They serve as material for a description that is checked on other prompts.
    """
    table = _table_of(votes, min_texts=MIN_PROMPTS)
    scores = _score_phrases(votes, table, np.ones(len(votes.y), dtype=bool))

    def clearest(z: FloatArray, own: FloatArray) -> list[str]:
        clear = (scores.prompts >= MIN_PROMPTS) & (z > MIN_Z) & (own > 0)
        return [table.phrases[column] for column in _distinct(z, clear, table.phrases, PHRASES_PROPOSED)]

    return [(clearest(z, own), clearest(-z, -own)) for z, own in zip(scores.z, scores.own, strict=True)]


def split_prompts(n_prompts: int) -> IntArray:
    """Return the half, 0 or 1, of each prompt, ``(n_prompts,)``. The same number gives the same halves."""
    order = random_stream(0, VIEW_HALVES).permutation(n_prompts)
    half = np.zeros(n_prompts, dtype=np.int64)
    half[order[n_prompts // 2 :]] = 1
    return half


def _table_of(votes: SignedVotes, min_texts: int) -> PhraseTable:
    people, items = votes.held_out.preferences, votes.held_out.preferences.items()
    texts = [str(people.responses[r]) for r in items.response_index]
    return phrase_table(texts, items.a, items.b, min_texts=min_texts)


# --- proposals --------------------------------------------------------------------------------------------------------


class _Scores(NamedTuple):
    """How the relative votes of members move with every phrase, on some pairs."""

    z: FloatArray
    """Score statistic clustered by prompt, ``(k, n_phrases)``."""
    own: FloatArray
    """Mean signed vote of the member, ``(k, n_phrases)``."""
    prompts: IntArray
    """Number of prompts that differ in the phrase, ``(n_phrases,)``."""


def _score_phrases(votes: SignedVotes, table: PhraseTable, pairs: Mask) -> _Scores:
    """Score all phrases at once. Length is controlled for over all pairs, not phrase by phrase as in the test."""
    difference, y, length = sparse.csr_array(table.difference)[pairs], votes.y[pairs], votes.length[pairs]
    k = len(votes.weights)
    rest = y - length @ np.linalg.lstsq(length, y, rcond=None)[0]
    by_prompt = _prompt_sums(votes, pairs)
    count = np.maximum(np.asarray(abs(difference).sum(axis=0)).ravel(), 1.0)
    z, own = np.zeros((k, difference.shape[1])), np.zeros((k, difference.shape[1]))
    for j in range(k):
        sums = by_prompt @ (sparse.diags_array(rest[:, k + j]) @ difference)
        total, square = np.asarray(sums.sum(axis=0)).ravel(), np.asarray((sums * sums).sum(axis=0)).ravel()
        z[j] = total / np.maximum(np.sqrt(square), 1e-12)
        own[j] = (difference.T @ rest[:, j]) / count
    return _Scores(z, own, _prompts_of_phrases(votes, table, pairs))


def _prompt_sums(votes: SignedVotes, pairs: Mask) -> Any:
    """Return the matrix that sums over the pairs of each prompt, ``(n_prompts, n_chosen_pairs)``."""
    clusters = np.unique(votes.prompt_index[pairs], return_inverse=True)[1]
    shape = (int(clusters.max(initial=-1)) + 1, len(clusters))
    return sparse.csr_array((np.ones(len(clusters)), (clusters, np.arange(len(clusters)))), shape=shape)


def _prompts_of_phrases(votes: SignedVotes, table: PhraseTable, pairs: Mask) -> IntArray:
    """Return the number of prompts that differ in each phrase, ``(n_phrases,)``."""
    differs = _prompt_sums(votes, pairs) @ abs(sparse.csr_array(table.difference)[pairs])
    return np.asarray((differs > 0).sum(axis=0), dtype=np.int64).ravel()


def _propose(votes: SignedVotes, table: PhraseTable, proposing: Mask, testing: Mask) -> Iterator[_Proposal]:
    """Yield the phrases of each member, and its position."""
    scores, enough = _score_phrases(votes, table, proposing), ENOUGH_CLUSTERS
    # How often a phrase occurs does not depend on votes, so the testing half may be asked for it.
    usable = (scores.prompts >= 2 * MIN_PROMPTS) & (_prompts_of_phrases(votes, table, testing) >= enough)
    for j, (z, own) in enumerate(zip(scores.z, scores.own, strict=True)):
        clear = usable & (np.abs(z) > MIN_Z) & (z * own > 0)
        for column in _distinct(np.abs(z), clear, table.phrases, PHRASES_PROPOSED):
            yield _Proposal(j, {column: float(np.sign(z[column]))}, testing)
        signs = {}
        for sign in (1.0, -1.0):
            clear = (scores.prompts >= MIN_PROMPTS) & (sign * z > MIN_Z) & (sign * own > 0)
            for column in _distinct(np.abs(z), clear, table.phrases, POSITION_PHRASES):
                signs[column] = sign
        if len(set(signs.values())) == 2:
            yield _Proposal(j, signs, testing)


def _distinct(clarity: FloatArray, allowed: Mask, phrases: Sequence[str], count: int) -> list[int]:
    """Return the clearest phrases, without one that is a part of a clearer one or has a clearer one as a part."""
    chosen: list[int] = []
    for column in np.argsort(-np.where(allowed, clarity, -np.inf), kind="stable").tolist():
        if len(chosen) == count or not allowed[column]:
            break
        own = f" {phrases[column]} "
        if not any(own in f" {phrases[other]} " or f" {phrases[other]} " in own for other in chosen):
            chosen.append(column)
    return chosen


# --- tests ------------------------------------------------------------------------------------------------------------


def _survivors(proposals: Sequence[_Proposal], votes: SignedVotes, table: PhraseTable) -> list[tuple[View, ...]]:
    """Return the proposals that survive, by member, the clearest first; a phrase, or a position, at most once."""
    survivors: list[dict[object, View]] = [{} for _ in votes.weights]
    contrasts = [_contrast(one, table) for one in proposals]
    fits, k = [votes.fitted(contrast) for contrast in contrasts], len(votes.weights)
    claimed = [
        fit.z[k + one.member] * (1 if c.claims[0] else -1)
        for one, c, fit in zip(proposals, contrasts, fits, strict=True)
    ]
    threshold = discovery_threshold(claimed, sides=1)
    for one, contrast, fit in zip(proposals, contrasts, fits, strict=True):
        lean = votes.leans(contrast, fit, threshold)[one.member]
        if lean.claim:
            key = "" if len(one.signs) > 1 else next(iter(one.signs))
            survivors[one.member].setdefault(key, _view(one, contrast, lean, votes, table))
    return [tuple(sorted(found.values(), key=lambda view: -abs(view.lean.z))) for found in survivors]


def _contrast(one: _Proposal, table: PhraseTable) -> Contrast:
    """Return the pairs of the testing half whose responses differ in the phrases; only the proposed sign is claimed."""
    signed = sparse.csc_array(table.difference)[:, list(one.signs)] @ np.array(list(one.signs.values()))
    x = np.where(one.testing, np.sign(signed), 0.0)
    (first, sign), *others = one.signs.items()
    if others:
        return Contrast("phrases", x, ("prefers these phrases", "", "", ""))
    # The sign of the phrase stays in ``x``: ``own`` is the lean towards responses that have it.
    phrase = table.phrases[first]
    claims = (f"{LIKES_WORD}“{phrase}”", "") if sign > 0 else ("", f"{DISLIKES_WORD}“{phrase}”")
    return Contrast(phrase, sign * x, (*claims, "", ""))


def _view(one: _Proposal, contrast: Contrast, lean: Lean, votes: SignedVotes, table: PhraseTable) -> View:
    prefers, rejects = (tuple(table.phrases[c] for c, s in one.signs.items() if s == sign) for sign in (1.0, -1.0))
    margin = float(stats.norm.isf(SIGNIFICANCE / 2)) * lean.standard_error
    low, high, tested = lean.relative - margin, lean.relative + margin, np.unique(votes.prompt_index[contrast.x != 0])
    view = View(prefers, rejects, lean, low, high, len(tested))
    return replace(view, quotes=tuple(islice(_quotes(votes, one.member, contrast.x, view), QUOTES)))


def _quotes(votes: SignedVotes, j: int, x: FloatArray, view: View) -> Iterator[Quote]:
    """Yield sentences of the testing half on which the member votes as claimed and most of the others do not."""
    people, claimed = votes.held_out.preferences, x * (1.0 if view.prefers else -1.0)
    for pair in distinct_pairs(votes.held_out, votes.weights, j, claimed):
        response = people.a_index[pair.row] if x[pair.row] > 0 else people.b_index[pair.row]
        if sentence := excerpt(str(people.responses[response]), view.prefers or view.rejects):
            asked = shortened(Prompt(people.prompts[people.prompt_index[pair.row]]).text, PROMPT_LENGTH)
            yield Quote(asked, sentence, bool(view.prefers), pair.weight_with_it)


class DistinctPair(NamedTuple):
    """A pair on which a member strongly prefers the response that most of the weight rejects."""

    row: int
    margin: float
    """Reward difference in units of its root mean square; above 0 the member prefers response a."""
    weight_with_it: float
    """Share of the ensemble's weight that prefers the same response."""


def distinct_pairs(
    held_out: HeldOutVotes, weights: FloatArray, j: int, side: FloatArray | None = None
) -> Iterator[DistinctPair]:
    """Yield the pairs that set member j apart, one per prompt: strong preferences with little weight behind them first.

    With ``side``, ``(n_pairs,)``, only pairs on which it prefers that side: above 0 response a, below 0 response b.
    """
    difference, share_a = held_out.difference[:, j], held_out.votes @ weights
    margin = difference / (float(np.sqrt((difference**2).mean())) or 1.0)
    with_it = np.where(margin > 0, share_a, 1.0 - share_a)
    clarity = np.abs(margin) * (1.0 - 2.0 * with_it)
    if side is not None:
        clarity = np.where(side * margin > 0, clarity, 0.0)
    order, shown = np.argsort(-clarity, kind="stable"), set[int]()
    for row in order[clarity[order] > 0].tolist():
        if (prompt := int(held_out.preferences.prompt_index[row])) not in shown:
            shown.add(prompt)
            yield DistinctPair(row, float(margin[row]), float(with_it[row]))
