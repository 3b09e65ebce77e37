"""Texts of a model in padded batches of similar length."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.types import Progress
from pluralign.models.loading import BATCH_SIZE, BATCH_TOKENS

Tokens: TypeAlias = dict[str, list[int]]


def padded(texts: Sequence[Tokens], pad: int, device: Any) -> dict[str, Any]:
    """Return token ids and masks of some texts as tensors, padded on the right."""
    import torch

    width = max(len(text["input_ids"]) for text in texts)
    filled = {
        name: [text[name] + [pad if name == "input_ids" else 0] * (width - len(text[name])) for text in texts]
        for name in texts[0]
    }
    return {name: torch.tensor(rows, device=device) for name, rows in filled.items()}


def _in_batches(
    texts: Sequence[Tokens],
    compute: Callable[[Sequence[int]], Any],
    progress: Progress | None,
    most_tokens: int = BATCH_TOKENS,
) -> FloatArray:
    """Return ``compute`` of every text, ``(n_texts, d)``: texts of like length together, the longest first."""
    import torch

    results: list[Any] = [None] * len(texts)
    done = 0
    with torch.inference_mode():
        for batch in _batches([len(text["input_ids"]) for text in texts], most_tokens):
            for index, row in zip(batch, compute(batch).cpu().numpy(), strict=True):
                results[index] = row
            done += len(batch)
            if progress:
                progress(done, len(texts))
    return np.asarray(results, dtype=np.float64)


def _batches(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        size = max(1, min(BATCH_SIZE, most_tokens // max(lengths[order[start]], 1)))
        yield order[start : start + size]
        start += size
