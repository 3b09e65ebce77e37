"""Token batches: texts of similar length are padded together and run through a model without gradients."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.types import Progress

BATCH_SIZE = 32
"""Maximum number of texts per batch."""
BATCH_TOKENS = 16_384
"""Maximum number of tokens per batch, padding included."""

Tokens: TypeAlias = dict[str, list[int]]
"""Token ids and masks of one text, as a tokenizer returns them."""


def padded(texts: Sequence[Tokens], pad: int, device: Any) -> dict[str, Any]:
    """Return token ids and masks of several texts as tensors, padded on the right.

    Args:
        texts: token ids and masks of each text.
        pad: the id of the padding token; masks are padded with 0.
        device: where the tensors are created.
    """
    import torch

    width = max(len(text["input_ids"]) for text in texts)
    filled = {
        name: [text[name] + [pad if name == "input_ids" else 0] * (width - len(text[name])) for text in texts]
        for name in texts[0]
    }
    return {name: torch.tensor(rows, device=device) for name, rows in filled.items()}


def in_batches(
    texts: Sequence[Tokens],
    compute: Callable[[Sequence[int]], Any],
    progress: Progress | None,
    max_tokens: int = BATCH_TOKENS,
) -> FloatArray:
    """Return ``compute`` of every text, ``(n_texts, d)``, in the order of the texts.

    Texts of similar length share a batch. The longest texts come first, so that a lack of memory shows at once.

    Args:
        texts: token ids and masks of each text.
        compute: takes the indices of a batch and returns a tensor ``(n_batch, d)``.
        progress: called with the number of texts done and the total.
        max_tokens: maximum number of tokens per batch, padding included.
    """
    import torch

    results: list[Any] = [None] * len(texts)
    done = 0
    with torch.inference_mode():
        for batch in batch_indices([len(text["input_ids"]) for text in texts], max_tokens):
            for index, row in zip(batch, compute(batch).cpu().numpy(), strict=True):
                results[index] = row
            done += len(batch)
            if progress:
                progress(done, len(texts))
    return np.asarray(results, dtype=np.float64)


def batch_indices(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of each batch, longest texts first.

    Example:
        >>> list(batch_indices([5, 100, 9], max_tokens=100))
        [[1], [2, 0]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        size = max(1, min(BATCH_SIZE, max_tokens // max(lengths[order[start]], 1)))
        yield order[start : start + size]
        start += size
