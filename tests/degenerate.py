"""Votes that are legitimate but hardly say anything: ties only, one text everywhere, one training pair."""

from collections.abc import Sequence

import numpy as np

from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.raters import RaterVotes

Rows = Sequence[tuple[str, str, str, int, int]]
PROMPTS = [f"Question {i}?" for i in range(8)]


def votes_of(rows: Rows) -> PreferenceSet:
    """Return the votes of rows (prompt, response a, response b, votes for a, votes for b)."""
    prompts, a, b, votes_a, votes_b = zip(*rows, strict=True)
    return PreferenceSet.from_columns(prompts, a, b, votes_a, votes_b)


def _texts(i: int) -> tuple[str, str]:
    random = np.random.default_rng(i)
    words = ["tea", "rum", "milk", "please", "never", "I", "would", "rather", "not", "thank you!", "why?"]
    a, b = (" ".join(random.choice(words, random.integers(1, 9))) + f" {i}{side}" for side in "ab")
    return a, b


def _all_ties() -> PreferenceSet:
    a, b = zip(*map(_texts, range(len(PROMPTS))), strict=True)
    none = [0] * len(PROMPTS)
    return PreferenceSet.from_columns(PROMPTS, a, b, none, none, ties=[3] * len(PROMPTS), tie_rule="half")


CASES: dict[str, PreferenceSet] = {
    "all ½": votes_of([(p, *_texts(i), 2, 2) for i, p in enumerate(PROMPTS)]),
    "all ties": _all_ties(),
    "the same two texts": votes_of([(p, "Yes.", "No.", 3, 1) for p in PROMPTS]),
    "the same two texts, ½": votes_of([(p, "Yes.", "No.", 1, 1) for p in PROMPTS]),
    "equal features": votes_of([(p, "tea rum", "rum tea", 3, 1) for p in PROMPTS]),
    "empty against text": votes_of([(p, "", "Yes, please.", 1, 3) for p in PROMPTS]),
    "contradictory": votes_of([(p, *_texts(i), *n) for i, p in enumerate(PROMPTS) for n in ((3, 0), (0, 3))]),
    "swapped": votes_of([(p, *texts, 3, 1) for i, p in enumerate(PROMPTS) for texts in (_texts(i), _texts(i)[::-1])]),
    "unanimous": votes_of([(p, *_texts(i), 5, 0) for i, p in enumerate(PROMPTS)]),
    "one vote each": votes_of([(p, *_texts(i), i % 2, 1 - i % 2) for i, p in enumerate(PROMPTS)]),
    "2 prompts": votes_of([(p, *_texts(i), 3, 1) for i, p in enumerate(PROMPTS[:2])]),
    "3 prompts": votes_of([(p, *_texts(i), 3 - i, 1 + i) for i, p in enumerate(PROMPTS[:3])]),
    "80 prompts, all ½": votes_of([(f"{p} {j}", *_texts(i), 2, 2) for i, p in enumerate(PROMPTS) for j in range(10)]),
    "1 training pair, ½": votes_of([(p, *_texts(i), 1, 1) for i, p in enumerate(PROMPTS[:2])]),
}


def raters_of(votes: PreferenceSet) -> RaterVotes:
    """Return the votes of a set as those of three raters, in turn; a tie is half a vote for each."""
    counts = votes.votes_a + votes.votes_b + votes.ties
    pair = np.repeat(np.arange(len(votes)), counts).astype(np.int32)
    order = np.arange(len(pair)) - np.repeat(np.cumsum(counts) - counts, counts)
    decided = np.where(order < votes.votes_a[pair], 1.0, 0.0)
    chose_a = np.where(order < (votes.votes_a + votes.votes_b)[pair], decided, 0.5)
    return RaterVotes(votes, pair, (np.arange(len(pair)) % 3).astype(np.int32), chose_a)
