"""The order of training: which pairs each step takes, and which texts are read together.

The pairs of a prompt share responses. A step therefore takes whole prompts, and a micro-batch reads each of its texts
once and takes all its pairs from their rewards. The loss is a mean over the pairs of a step, so the split into
micro-batches changes no result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, IndexArray
from pluralign.votes.prompts import Item

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TextPairs:
    """Compared texts, with the votes."""

    items: Sequence[Item]
    """Every distinct text."""
    a: IndexArray
    """Index of response a among the texts, ``(n,)``."""
    b: IndexArray
    """Index of response b among the texts, ``(n,)``."""
    prob_a: FloatArray
    """Share of people preferring a, ``(n,)``."""
    prompt: IndexArray
    """Prompt of each pair, ``(n,)``."""


@dataclass(frozen=True)
class MicroBatch:
    """Pairs that are read together, each of their texts once."""

    pairs: Indices
    texts: Indices
    """The distinct texts of the pairs."""
    scale: float
    """Pairs of this micro-batch over the mean of all micro-batches of the step. The mean of the scaled losses of the
    micro-batches is the loss of the step."""


def draw_steps(prompt: IndexArray, steps: int, batch: int, rng: np.random.Generator) -> Indices:
    """Return the pairs of every step, ``(steps, batch)``: prompts in random order, one epoch after the other.

    Args:
        prompt: prompt of each pair, ``(n,)``.
        steps: number of steps.
        batch: number of pairs per step.
        rng: of the order of prompts, and of the pairs of a prompt.

    Example:
        >>> draw_steps(np.array([0, 0, 1, 1]), 2, 2, np.random.default_rng(0)).tolist()
        [[1, 0], [2, 3]]
    """
    _, number = np.unique(prompt, return_inverse=True)
    epochs = []
    for _ in range(math.ceil(steps * batch / len(prompt))):
        place, rank = rng.permutation(number.max() + 1), rng.random(len(prompt))
        epochs.append(np.lexsort((rank, place[number])))
    return np.concatenate(epochs)[: steps * batch].reshape(steps, batch)


def split_steps(
    steps: Indices, pairs: TextPairs, lengths: Indices, max_texts: int, processes: int = 1
) -> list[list[MicroBatch]]:
    """Return the micro-batches of every step: as few as possible, and the same number in every step.

    Prompts with texts of similar length share a micro-batch and need little padding. The longest come first, so that a
    lack of memory shows at once.

    Args:
        steps: the pairs of every step, ``(steps, batch)``.
        pairs: the training pairs.
        lengths: tokens of each text.
        max_texts: maximum number of texts of a micro-batch, at least 2.
        processes: the number of micro-batches is a multiple of it.
    """
    longest = np.zeros(int(pairs.prompt.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, pairs.prompt, np.maximum(lengths[pairs.a], lengths[pairs.b]))
    split = []
    for step in steps:
        order = np.lexsort((pairs.b[step], pairs.a[step], pairs.prompt[step], -longest[pairs.prompt[step]]))
        split.append(_split(step[order], pairs, max_texts))
    count = math.ceil(max(map(len, split)) / processes) * processes
    return [[_micro_batch(part, pairs, len(step) / count) for part in _refine(parts, pairs, count)]
            for step, parts in zip(steps, split, strict=True)]  # fmt: skip


def length_groups(lengths: Sequence[int], pass_tokens: int) -> list[list[int]]:
    """Return the texts of each forward pass of a micro-batch. Texts of similar length share a pass, to avoid padding.

    Minimises Σ_g (n_g · max length_g + c) over groups g of texts that are adjacent in order of length.

    Args:
        lengths: tokens of each text.
        pass_tokens: c, the cost of one more pass, as a number of tokens.

    Example:
        >>> length_groups([10, 200, 12, 190], pass_tokens=64)
        [[1, 3], [2, 0]]
        >>> length_groups([10, 200, 12, 190], pass_tokens=1024)
        [[1, 3, 2, 0]]
    """
    order = sorted(range(len(lengths)), key=lambda text: -lengths[text])
    best: list[tuple[float, int]] = [(0.0, 0)]  # of the first texts in order: the cost, and where the last group starts
    for end in range(1, len(order) + 1):
        costs = ((best[i][0] + (end - i) * lengths[order[i]] + pass_tokens, i) for i in range(end))
        best.append(min(costs))
    groups: list[list[int]] = []
    end = len(order)
    while end:
        start = best[end][1]
        groups.insert(0, order[start:end])
        end = start
    return groups


def _split(step: Indices, pairs: TextPairs, max_texts: int) -> list[Indices]:
    """Cut the pairs of a step where the texts are too many: between prompts, or inside a prompt with many texts."""
    parts: list[Indices] = []
    current: list[int] = []
    texts: set[int] = set()
    bounds = np.flatnonzero(np.diff(pairs.prompt[step])) + 1
    for group in np.split(step, bounds):
        own = set(pairs.a[group].tolist()) | set(pairs.b[group].tolist())
        if current and len(texts | own) > max_texts:
            parts.append(np.array(current))
            current, texts = [], set()
        for pair in group.tolist():
            both = {int(pairs.a[pair]), int(pairs.b[pair])}
            if len(texts | both) > max_texts:
                parts.append(np.array(current))
                current, texts = [], set()
            current.append(pair)
            texts |= both
    return [*parts, np.array(current)]


def _refine(parts: list[Indices], pairs: TextPairs, count: int) -> list[Indices]:
    """Halve the largest parts until there are ``count``, between prompts where possible."""
    parts = list(parts)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda position: len(parts[position]))
        part = parts[largest]
        bounds, middle = np.flatnonzero(np.diff(pairs.prompt[part])) + 1, len(part) // 2
        cut = int(bounds[np.abs(bounds - middle).argmin()]) if len(bounds) else middle
        parts[largest : largest + 1] = [part[:cut], part[cut:]]
    return parts


def _micro_batch(part: Indices, pairs: TextPairs, mean_pairs: float) -> MicroBatch:
    texts = np.unique(np.concatenate([pairs.a[part], pairs.b[part]])).astype(np.int64)
    return MicroBatch(part, texts, len(part) / mean_pairs)
