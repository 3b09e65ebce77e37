"""Balanced answers: the slate of the members' picks, one consensus, and a statement written from the slate.

All functions take rewards and weights, so they need no model. ``write_statement`` scores drafts with a function that
the caller passes.
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
from pluralign.theory.social_choice import borda, maximin, pairwise_support
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
    """One answer, with the members that chose it."""

    text: str
    member: int | None
    """The member that answers. If several chose this text: the one with the most weight. None for a refusal."""
    weight: float
    """Share of the ensemble's weight on the members that chose this text."""
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class Consensus:
    """One answer for everyone, chosen by a social-choice rule."""

    text: str
    rule: str
    least_support: float
    """Share of the weight that prefers it to its strongest rival."""
    mean_support: float
    """Share of the weight that prefers it to a rival, averaged over all rivals."""
    favourite_of: float
    """Share of the weight whose top choice it is."""
    note: str = ""
    """Says so if every answer loses to some other answer, so that none has a majority."""


@dataclass(frozen=True)
class Distilled:
    """A statement written from the slate by a language model, and whether it replaces the consensus."""

    text: str
    least_support: float
    """Share of the weight that prefers it to its strongest rival among the candidates."""
    to_reach: float
    """Support of the best candidate. The statement is used if its own support is at least this."""
    used: bool
    drafts: int
    """Number of drafts; this one has the most support among those that the gate accepts."""
    refused: str = ""
    """Why the gate refuses this statement. Then it refuses all drafts, and the statement is not used."""
    refused_drafts: int = 0
    """Number of drafts that the gate refuses."""


def slate(texts: Sequence[str], favourite: npt.NDArray[np.int64], weights: FloatArray) -> tuple[SlateEntry, ...]:
    """Return the members' picks with the weight behind each, in order of decreasing weight.

    Near-duplicates share one entry. Members of negligible weight are left out.

    Args:
        texts: distinct candidates, ``n_candidates`` of them.
        favourite: index of each member's pick, ``(k,)``.
        weights: of the members, ``(k,)``.

    Example:
        >>> slate(["Yes.", "No."], np.array([0, 1, 0]), np.array([0.5, 0.3, 0.2]))[0].weight
        0.7
    """
    used = np.flatnonzero(weights > NEGLIGIBLE_WEIGHT)
    groups: list[list[int]] = []
    for j in sorted(used.tolist(), key=lambda j: -weights[j]):
        text = texts[favourite[j]]
        for group in groups:
            if similarity(text, texts[favourite[group[0]]]) >= NEAR_DUPLICATE:
                group.append(j)
                break
        else:
            groups.append([j])
    total = weights[used].sum()
    entries = [
        SlateEntry(texts[favourite[group[0]]], group[0], float(weights[group].sum() / total), tuple(sorted(group)))
        for group in groups
    ]
    return tuple(sorted(entries, key=lambda entry: -entry.weight))


def similarity(a: str, b: str) -> float:
    """Return the Jaccard similarity of the word trigrams of two texts; shorter texts use bigrams or words.

    Example:
        >>> similarity("I like tea very much.", "i like tea very much"), similarity("Yes.", "No.")
        (1.0, 0.0)
    """
    words = [re.findall(r"\w+", text.casefold()) for text in (a, b)]
    size = min(3, *(len(of) for of in words)) or 1
    grams = [{tuple(of[i : i + size]) for i in range(len(of) - size + 1)} for of in words]
    union = grams[0] | grams[1]
    return len(grams[0] & grams[1]) / len(union) if union else 1.0


def consensus(
    texts: Sequence[str], rewards: FloatArray, weights: FloatArray, rule: str, random: np.random.Generator
) -> Consensus:
    """Choose one answer by a social-choice rule over the weighted members.

    Supports are shares of the members' weight. With an undecided share u the predicted share of people is
    u/2 + (1 − u) times the support. This increases with the support and keeps ½ at ½, so every rule of
    ``social_choice`` chooses the same answer.

    Args:
        texts: distinct candidates.
        rewards: of the candidates, ``(n_candidates, k)``.
        weights: of the members, ``(k,)``.
        rule: one of ``social_choice.RULES``.
        random: breaks ties, and draws the winner of a lottery.
    """
    support = pairwise_support(rewards, weights / weights.sum())
    winner = social_choice.choose(support, rule, random.integers(2**32))
    if len(texts) == 1:
        return Consensus(texts[0], rule, 1.0, 1.0, 1.0)
    tops = rewards == rewards.max(axis=0)
    favourite_of = float((tops / tops.sum(axis=0))[winner] @ weights / weights.sum())
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
) -> Distilled | None:
    """Let a language model write statements from the slate, and keep the one with the most support.

    The support of a text is the share of weight that prefers it to its strongest rival among the candidates,
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

    Returns:
        The best draft, or None if the writer added no text that is not among the candidates.

    Reference: Tessler et al., "AI can help humans find common ground in democratic deliberation", Science 386 (2024),
    whose Habermas Machine writes and selects group statements in this way.
    """
    listed = "\n".join(f"- ({entry.weight:.0%}) {entry.text}" for entry in entries)
    written = writer(INSTRUCTION.format(prompt=Prompt(prompt).text, answers=listed), DRAFTS)
    drafts = [text for text in dict.fromkeys(text.strip() for text in written) if text and text not in texts]
    if not drafts:
        return None
    weights = weights / weights.sum()
    support = pairwise_support(np.vstack([score(drafts), rewards]), weights)
    against = support[: len(drafts), len(drafts) :].min(axis=1)
    reasons = gate(drafts) if gate else [""] * len(drafts)
    accepted = [i for i, reason in enumerate(reasons) if not reason]
    best = max(accepted or range(len(drafts)), key=lambda i: against[i])
    to_reach = float(maximin(pairwise_support(rewards, weights)).max()) if len(texts) > 1 else 0.5
    return Distilled(
        text=drafts[best],
        least_support=float(against[best]),
        to_reach=to_reach,
        used=bool(accepted and against[best] >= to_reach),
        drafts=len(drafts),
        refused=reasons[best],
        refused_drafts=len(drafts) - len(accepted),
    )
