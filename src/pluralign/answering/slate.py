"""Balanced answers: a slate that covers people's favourites, one consensus, and a statement written from the slate.

All functions take rewards and weights, so they need no model. ``temperature`` is β of the members' policies; 0 is the
limit, where every member votes for its favourite. ``write_statement`` scores drafts with a function that the caller
passes.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT
from pluralign.theory import social_choice
from pluralign.theory.social_choice import (
    COVERS,
    borda,
    first_choices,
    greedy_cover,
    maximin,
    merge,
    pairwise_support,
    policies,
)
from pluralign.votes.prompts import Prompt, PromptLike

Writer: TypeAlias = Callable[[str, int], Sequence[str]]
"""Takes an instruction and a number of drafts; returns texts from a language model. Raises ``DataError`` on failure."""
ScoreTexts: TypeAlias = Callable[[Sequence[str]], FloatArray]
"""Takes n responses to one prompt; returns their rewards, ``(n, k)``."""
Gate: TypeAlias = Callable[[Sequence[str]], Sequence[str]]
"""Takes n responses to one prompt; returns for each the reason to refuse it, or an empty text."""

NEAR_DUPLICATE = 0.8
"""Similarity of word trigrams from which two texts share one entry of the slate."""
DRAFTS = 4
"""Statements to request from the writer."""
WRITING_TEMPERATURE = 0.7
"""Maximum sampling temperature of drafts. At the higher temperature of candidates, small models write nonsense."""
NO_MAJORITY = "No answer has a majority; this one comes nearest."
NO_MAJORITY_BY_RULE = "No answer has a majority."
INSTRUCTION = """People were asked: {prompt}

These are their answers:
{answers}

Write one short statement that all of them could accept. Take up what they have in common, be fair to each, and add
nothing of your own. Write only the statement."""


@dataclass(frozen=True)
class SlateEntry:
    """One answer, with the members behind it."""

    text: str
    member: int | None
    """The member that answers. On a slate: of ``members`` the one with the most weight; without any, the member that
    adds most to ``share``. None for a refusal."""
    weight: float
    """Share of the members' weight on ``members``. Over a slate the sum is 1."""
    members: tuple[int, ...] = ()
    """On a slate: the members that prefer it to every other entry. Otherwise: the members that chose this text."""
    share: float | None = None
    """Predicted share of people whose favourite among all candidates it is. None if steered or refused."""


@dataclass(frozen=True)
class Slate:
    """Answers to show together."""

    entries: tuple[SlateEntry, ...]
    coverage: float
    """Predicted share of people that the slate covers: it contains their favourite, or one of their top two."""


@dataclass(frozen=True)
class Consensus:
    """One answer for everyone, chosen by a social-choice rule."""

    text: str
    rule: str
    least_support: float
    """Predicted share of people who prefer it to its strongest rival."""
    mean_support: float
    """Predicted share of people who prefer it to a rival, averaged over all rivals."""
    favourite_of: float
    """Predicted share of people whose favourite it is."""
    note: str = ""
    """Says so if every answer loses to some other answer, so that none has a majority."""


@dataclass(frozen=True)
class Distilled:
    """A statement written from the slate by a language model, and whether it replaces the consensus."""

    text: str
    least_support: float
    """Predicted share of people who prefer it to its strongest rival among the candidates."""
    to_reach: float
    """Support of the best candidate. The statement is used if its own support is at least this."""
    used: bool
    drafts: int
    """Number of drafts; this one has the most support among those that the gate accepts."""
    refused: str = ""
    """Why the gate refuses this statement. Then it refuses all drafts, and the statement is not used."""
    refused_drafts: int = 0
    """Number of drafts that the gate refuses."""


def slate(
    texts: Sequence[str],
    rewards: FloatArray,
    weights: FloatArray,
    random: np.random.Generator,
    *,
    temperature: float = 0.0,
    undecided: float = 0.0,
    size: int | None = None,
    cover: str = "favourite",
) -> Slate:
    """Choose the answers that cover the largest predicted share of people.

    Near-duplicates count as one answer, shown by the text with the largest share. Entries are in order of decreasing
    share. Members of negligible weight are left out.

    Args:
        texts: distinct candidates.
        rewards: of the candidates, ``(n_candidates, k)``.
        weights: of the members, ``(k,)``.
        random: breaks ties.
        temperature: β of the members' policies.
        undecided: the ensemble's undecided share.
        size: number of answers, at most the number of different ones. Default: as many as the members have different
            favourites.
        cover: ``favourite`` covers people whose favourite is on the slate, ``top-two`` those with one of their top two.

    Example:
        >>> rewards = np.array([[3.0, 0.0, 2.0], [0.0, 3.0, 1.0], [1.0, 1.0, 0.0]])
        >>> found = slate(["A", "B", "C"], rewards, np.array([0.5, 0.3, 0.2]), np.random.default_rng(0))
        >>> [(entry.text, entry.share, entry.members) for entry in found.entries]
        [('A', 0.7, (0, 2)), ('B', 0.3, (1,))]
        >>> found = slate(["A", "B", "C"], rewards, np.array([0.5, 0.3, 0.2]), np.random.default_rng(0), size=1)
        >>> found.coverage
        0.7
    """
    used = np.flatnonzero(weights > NEGLIGIBLE_WEIGHT)
    rewards, alpha = rewards[:, used], weights[used] / weights[used].sum()
    share = first_choices(rewards, alpha, temperature, undecided)
    group, shown = near_duplicates(texts, np.argsort(-share, kind="stable"))
    if size is None:
        size = len(set(group[favourites(rewards, random)].tolist()))
    covered = COVERS[cover if len(texts) > 1 else "favourite"](rewards, alpha, temperature, undecided)
    chosen, coverage = greedy_cover(merge(covered, group), min(size, len(shown)), random)
    rows, shares = shown[chosen], np.bincount(group, weights=share)[chosen]
    behind = favourites(rewards[rows], random)
    added = policies(rewards, temperature)[rows] * alpha
    entries = []
    for place in np.argsort(-shares, kind="stable").tolist():
        own = np.flatnonzero(behind == place)
        first = own[alpha[own].argmax()] if len(own) else added[place].argmax()
        members = tuple(used[own].tolist())
        weight = float(alpha[own].sum())
        entries.append(SlateEntry(texts[rows[place]], int(used[first]), weight, members, float(shares[place])))
    return Slate(tuple(entries), coverage)


def favourites(rewards: FloatArray, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return the index of each member's top candidate, ``(k,)``; ties are broken at random.

    Args:
        rewards: of the candidates, ``(n_candidates, k)``.
        random: breaks ties.

    Example:
        >>> favourites(np.array([[1.0, 3.0], [2.0, 0.0]]), np.random.default_rng(0))
        array([1, 0])
    """
    top = rewards == rewards.max(axis=0)
    order = random.random(rewards.shape)
    return np.asarray(np.where(top, order, -1.0).argmax(axis=0), dtype=np.int64)


def near_duplicates(
    texts: Sequence[str], order: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Group texts with their near-duplicates: each joins the first earlier text that it is similar to.

    Args:
        texts: distinct texts.
        order: the order in which texts are taken; the first of a group is shown.

    Returns:
        The group of each text, ``(n_texts,)``, and the text shown for each group, ``(n_groups,)``.

    Example:
        >>> near_duplicates(["Yes.", "No.", "yes!"], np.array([2, 0, 1]))
        (array([0, 1, 0]), array([2, 1]))
    """
    words = [_words(text) for text in texts]
    trigrams = [_grams(of, 3) for of in words]
    group, shown = np.zeros(len(texts), dtype=np.int64), list[int]()
    for i in order.tolist():
        for number, other in enumerate(shown):
            a, b = trigrams[i], trigrams[other]
            if a and b and min(len(a), len(b)) < NEAR_DUPLICATE * max(len(a), len(b)):
                continue  # sets of such different sizes cannot overlap enough
            if _jaccard(words[i], words[other]) >= NEAR_DUPLICATE:
                group[i] = number
                break
        else:
            group[i] = len(shown)
            shown.append(i)
    return group, np.array(shown, dtype=np.int64)


def similarity(a: str, b: str) -> float:
    """Return the Jaccard similarity of the word trigrams of two texts; shorter texts use bigrams or words.

    Example:
        >>> similarity("I like tea very much.", "i like tea very much"), similarity("Yes.", "No.")
        (1.0, 0.0)
    """
    return _jaccard(_words(a), _words(b))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _grams(words: Sequence[str], size: int) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def _jaccard(a: Sequence[str], b: Sequence[str]) -> float:
    size = min(3, len(a), len(b)) or 1
    grams_a, grams_b = _grams(a, size), _grams(b, size)
    union = grams_a | grams_b
    return len(grams_a & grams_b) / len(union) if union else 1.0


def consensus(
    texts: Sequence[str],
    rewards: FloatArray,
    weights: FloatArray,
    rule: str,
    random: np.random.Generator,
    *,
    temperature: float = 0.0,
    undecided: float = 0.0,
) -> Consensus:
    """Choose one answer by a social-choice rule over the predicted pairwise support.

    The undecided share u turns a support s into u/2 + (1 − u) s. This increases with s and keeps ½ at ½, so every rule
    of ``social_choice`` chooses the same answer as without it.

    Args:
        texts: distinct candidates.
        rewards: of the candidates, ``(n_candidates, k)``.
        weights: of the members, ``(k,)``.
        rule: one of ``social_choice.RULES``.
        random: breaks ties, and draws the winner of a lottery.
        temperature: β of the members' policies.
        undecided: the ensemble's undecided share.
    """
    alpha = weights / weights.sum()
    support = pairwise_support(rewards, alpha, temperature, undecided)
    winner = social_choice.choose(support, rule, random.integers(2**32))
    if len(texts) == 1:
        return Consensus(texts[0], rule, 1.0, 1.0, 1.0)
    favourite_of = float(first_choices(rewards, alpha, temperature, undecided)[winner])
    least, mean = maximin(support), borda(support)
    note = ""
    if least.max() < 0.5 - 1e-9:  # not a tie that rounding broke
        note = NO_MAJORITY if least[winner] == least.max() else NO_MAJORITY_BY_RULE
    return Consensus(texts[winner], rule, float(least[winner]), float(mean[winner]), favourite_of, note)


def write_statement(
    prompt: PromptLike,
    texts: Sequence[str],
    rewards: FloatArray,
    weights: FloatArray,
    entries: Sequence[SlateEntry],
    writer: Writer,
    score: ScoreTexts,
    gate: Gate | None = None,
    *,
    temperature: float = 0.0,
    undecided: float = 0.0,
) -> Distilled | None:
    """Let a language model write statements from the slate, and keep the one with the most support.

    The support of a text is the predicted share of people who prefer it to its strongest rival among the candidates,
    min_b s_ab. The statement is used if its support is at least that of the best candidate.

    Args:
        prompt: the question that the candidates answer.
        texts: distinct candidates.
        rewards: of the candidates, ``(n_candidates, k)``.
        weights: of the members, ``(k,)``.
        entries: the slate.
        writer: writes the drafts.
        score: returns the rewards of the drafts.
        gate: refuses drafts. The members' rewards mean nothing for texts unlike those they were trained on.
        temperature: β of the members' policies.
        undecided: the ensemble's undecided share.

    Returns:
        The best draft, or None if the writer added no text that is not among the candidates.

    Reference: Tessler et al., "AI can help humans find common ground in democratic deliberation", Science 386 (2024),
    whose Habermas Machine writes and selects group statements in this way.
    """
    listed = "\n".join(f"- ({entry.share or 0.0:.0%}) {entry.text}" for entry in entries)
    written = writer(INSTRUCTION.format(prompt=Prompt(prompt).text, answers=listed), DRAFTS)
    drafts = [text for text in dict.fromkeys(text.strip() for text in written) if text and text not in texts]
    if not drafts:
        return None
    alpha = weights / weights.sum()
    support = pairwise_support(np.vstack([score(drafts), rewards]), alpha, temperature, undecided)
    against = support[: len(drafts), len(drafts) :].min(axis=1)
    reasons = gate(drafts) if gate else [""] * len(drafts)
    accepted = [i for i, reason in enumerate(reasons) if not reason]
    best = max(accepted or range(len(drafts)), key=lambda i: against[i])
    rivals = support[len(drafts) :, len(drafts) :]
    to_reach = float(maximin(rivals).max()) if len(texts) > 1 else 0.5
    return Distilled(
        text=drafts[best],
        least_support=float(against[best]),
        to_reach=to_reach,
        used=bool(accepted and against[best] >= to_reach),
        drafts=len(drafts),
        refused=reasons[best],
        refused_drafts=len(drafts) - len(accepted),
    )
