"""Balanced answers: a slate that covers people's favourites, one consensus, and a statement written from the slate.

All functions take rewards and ``Voters``, so they need no model.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.answering.request import Voters
from pluralign.core.arrays import FloatArray
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT
from pluralign.theory import social_choice
from pluralign.theory.social_choice import COVERS, borda, greedy_cover, maximin, merge, policies
from pluralign.votes.prompts import Prompt, PromptLike

Indices: TypeAlias = npt.NDArray[np.int64]

NEAR_DUPLICATE = 0.8
"""Similarity of word trigrams from which two texts share one entry of the slate."""
SLATE_SIZE = 3
"""Maximum number of answers on a slate by default: a slate is a selection."""
FEWEST_ON_SLATE = 2
NO_RIVAL = "It is the only answer, so it has no rival and no share of people."
MINORITY = "Fewer than half of people prefer it to its strongest rival."
NO_MAJORITY = " No answer has a majority; this one comes nearest."
NO_MAJORITY_BY_RULE = " No answer has a majority."
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
    """Predicted share of people whose favourite among all candidates it is. None if steered or refused, without another
    candidate, and for texts that the gate refuses."""


@dataclass(frozen=True)
class Slate:
    """Answers to show together."""

    entries: tuple[SlateEntry, ...]
    coverage: float | None
    """Predicted share of people that the slate covers: it contains their favourite, or one of their top two. None if
    there is only one answer."""


@dataclass(frozen=True)
class Consensus:
    """One answer for everyone, chosen by a social-choice rule."""

    text: str
    rule: str
    least_support: float | None
    """Predicted share of people who prefer it to its strongest rival. None, as the other shares, without a rival."""
    mean_support: float | None
    """Predicted share of people who prefer it to a rival, averaged over all rivals."""
    favourite_of: float | None
    """Predicted share of people whose favourite it is."""
    note: str = ""
    """Says so if fewer than half of people prefer it to its strongest rival, or if there is no rival."""


@dataclass(frozen=True)
class Distilled:
    """A statement written from the slate by a language model, and whether it replaces the consensus."""

    text: str
    least_support: float | None
    """Predicted share of people who prefer it to its strongest rival among the candidates. None if it is refused."""
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
    voters: Voters,
    random: np.random.Generator,
    *,
    size: int | None = None,
    cover: str = "favourite",
    own: Indices | None = None,
) -> Slate:
    """Choose the answers that cover the largest predicted share of people.

    Near-duplicates count as one answer, shown by the text with the largest share. Entries are in order of decreasing
    share. Members of negligible weight are left out.

    Args:
        texts: distinct candidates.
        rewards: of the candidates, ``(n_candidates, k)``.
        voters: the ensemble's numbers.
        random: breaks ties.
        size: number of answers, at most the number of different ones. Default: half of the candidates, between 2 and
            ``SLATE_SIZE``, and no more than the members have different favourites. With ``own``: all different ones.
        cover: ``favourite`` covers people whose favourite is on the slate, ``top-two`` those with one of their top two.
        own: the answer that each member's own policy gave, ``(k,)``; members stand behind theirs.

    Example:
        >>> rewards = np.array([[3.0, 0.0, 2.0], [0.0, 3.0, 1.0], [1.0, 1.0, 0.0]])
        >>> town = Voters(np.array([0.5, 0.3, 0.2]), temperature=0.0)
        >>> found = slate(["A", "B", "C"], rewards, town, np.random.default_rng(0))
        >>> [(entry.text, entry.share, entry.members) for entry in found.entries]
        [('A', 0.7, (0, 2)), ('B', 0.3, (1,))]
        >>> slate(["A", "B", "C"], rewards, town, np.random.default_rng(0), size=1).coverage
        0.7
    """
    used = np.flatnonzero(voters.weights > NEGLIGIBLE_WEIGHT)
    rewards, voters = rewards[:, used], replace(voters, weights=voters.weights[used])
    alpha, share = voters.alpha, voters.first_choices(rewards)
    group, shown = near_duplicates(texts, np.argsort(-share, kind="stable"))
    own = None if own is None else own[used]
    if size is None:
        size = len(set(group[favourites(rewards, random) if own is None else own].tolist()))
        size = size if own is not None else min(size, max(FEWEST_ON_SLATE, min(SLATE_SIZE, (len(shown) + 1) // 2)))
    covered = COVERS[cover if len(texts) > 1 else "favourite"](rewards, alpha, voters.temperature, voters.undecided)
    chosen, coverage = greedy_cover(merge(covered, group), min(size, len(shown)), random)
    rows, shares = shown[chosen], np.bincount(group, weights=share)[chosen]
    behind = favourites(rewards[rows], random)
    if own is not None:
        places = np.full(len(shown), -1)
        places[chosen] = np.arange(len(chosen))
        behind = np.where(places[group[own]] >= 0, places[group[own]], behind)
    added = policies(rewards, voters.temperature)[rows] * alpha
    entries = []
    for place in np.argsort(-shares, kind="stable").tolist():
        members = np.flatnonzero(behind == place)
        authors = members if own is None else members[own[members] == rows[place]]  # not of a near-duplicate
        named = authors if len(authors) else members
        first = named[alpha[named].argmax()] if len(named) else added[place].argmax()
        weight = float(alpha[members].sum())
        stated = float(shares[place]) if len(shown) > 1 else None
        entries.append(SlateEntry(texts[rows[place]], int(used[first]), weight, tuple(used[members].tolist()), stated))
    return Slate(tuple(entries), coverage if len(shown) > 1 else None)


def favourites(rewards: FloatArray, random: np.random.Generator) -> Indices:
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


def near_duplicates(texts: Sequence[str], order: Indices) -> tuple[Indices, Indices]:
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
    texts: Sequence[str], rewards: FloatArray, voters: Voters, rule: str, random: np.random.Generator
) -> Consensus:
    """Choose one answer by a social-choice rule over the predicted pairwise support.

    The undecided share u turns a support s into u/2 + (1 − u) s. This increases with s and keeps ½ at ½, so every rule
    of ``social_choice`` chooses the same answer as without it.

    Args:
        texts: distinct candidates.
        rewards: of the candidates, ``(n_candidates, k)``.
        voters: the ensemble's numbers.
        rule: one of ``social_choice.RULES``.
        random: breaks ties, and draws the winner of a lottery.
    """
    support = voters.support(rewards)
    winner = social_choice.choose(support, rule, random.integers(2**32))
    if len(texts) == 1:
        return Consensus(texts[0], rule, None, None, None, NO_RIVAL)
    favourite_of = float(voters.first_choices(rewards)[winner])
    least, mean, half = maximin(support), borda(support), 0.5 - 1e-9  # not a tie that rounding broke
    note = MINORITY if least[winner] < half else ""
    if least.max() < half:
        note += NO_MAJORITY if least[winner] == least.max() else NO_MAJORITY_BY_RULE
    return Consensus(texts[winner], rule, float(least[winner]), float(mean[winner]), favourite_of, note)


def instruction(prompt: PromptLike, entries: Sequence[SlateEntry]) -> str:
    """Return the instruction that asks a language model for a statement."""
    shares = ["" if entry.share is None else f"({entry.share:.0%}) " for entry in entries]
    listed = "\n".join(f"- {share}{entry.text}" for share, entry in zip(shares, entries, strict=True))
    return INSTRUCTION.format(prompt=Prompt(prompt).text, answers=listed)


def judge_statements(
    drafts: Sequence[str], of_drafts: FloatArray, rewards: FloatArray, voters: Voters, reasons: Sequence[str]
) -> Distilled:
    """Return the draft of a statement with the most support.

    The support of a text is the predicted share of people who prefer it to its strongest rival among the candidates,
    min_b s_ab. The statement is used if its support is at least that of the best candidate.

    Args:
        drafts: what a language model wrote, without texts that are candidates.
        of_drafts: rewards of the drafts, ``(n_drafts, k)``.
        rewards: of the distinct candidates, ``(n_candidates, k)``.
        voters: the ensemble's numbers.
        reasons: why the gate refuses each draft; empty if it accepts it. The members' rewards mean nothing for texts
            unlike those they were trained on.

    Reference: Tessler et al., "AI can help humans find common ground in democratic deliberation", Science 386 (2024),
    whose Habermas Machine writes and selects group statements in this way.
    """
    support = voters.support(np.vstack([of_drafts, rewards]))
    against = support[: len(drafts), len(drafts) :].min(axis=1)
    accepted = [i for i, reason in enumerate(reasons) if not reason]
    best = max(accepted or range(len(drafts)), key=lambda i: against[i])
    to_reach = float(maximin(support[len(drafts) :, len(drafts) :]).max()) if len(rewards) > 1 else 0.5
    return Distilled(
        text=drafts[best],
        least_support=None if reasons[best] else float(against[best]),
        to_reach=to_reach,
        used=bool(accepted and against[best] >= to_reach),
        drafts=len(drafts),
        refused=reasons[best],
        refused_drafts=len(drafts) - len(accepted),
    )
