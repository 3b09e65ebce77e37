"""Token states of texts in a file, for a training that reads every text several times: the encoder reads each one once.

The states take 1,536 bytes per token of MiniLM: about 2 GB for 10,000 texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pluralign.core.arrays import Array
from pluralign.core.types import Progress
from pluralign.text.pooling import attention_pool
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.prompts import Item

TEXTS = 512
"""Texts that are read at a time."""


@dataclass(frozen=True, eq=False)
class TokenStates:
    """States of all tokens of some texts, one text after the other."""

    states: Tensor
    """``(n_tokens, d)``, mapped from a file."""
    start: npt.NDArray[np.int64]
    """First token of each text, ``(n_texts,)``."""
    length: npt.NDArray[np.int64]
    """Number of tokens of each text, ``(n_texts,)``."""

    @property
    def width(self) -> int:
        """d, the size of a state."""
        return int(self.states.shape[1])

    def padded(self, texts: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the states of some texts, ``(n, n_tokens, d)``, and the mask of their tokens, ``(n, n_tokens)``."""
        length = torch.from_numpy(self.length[texts])
        mask = torch.arange(int(length.max()))[None] < length[:, None]
        states = self.states.new_zeros(*mask.shape, self.width)
        for row, text in enumerate(texts):
            states[row, : length[row]] = self.states[self.start[text] : self.start[text] + self.length[text]]
        return states, mask

    def pooled(self, weights: Mapping[str, Array]) -> Array:
        """Return the features of an attention pooling for all texts, ``(n_texts, networks × outputs)``."""
        own = {name: torch.from_numpy(np.asarray(part)) for name, part in weights.items()}
        texts = np.argsort(self.length)
        parts = [attention_pool(*self.padded(some), own) for some in np.array_split(texts, len(texts) // TEXTS + 1)]
        return torch.cat(parts).numpy()[np.argsort(texts)]


def read_token_states(
    items: Sequence[Item], encoder: ModelEncoder, layer: int, file: Path, progress: Progress | None = None
) -> TokenStates:
    """Write the token states of texts to a file and return them.

    Args:
        items: the texts.
        encoder: an encoder with layers.
        layer: one of its layers.
        file: the file to write. It must stay as long as the states are used.
        progress: called with the number of texts done and the total.
    """
    order = np.argsort([-len(response) for _, response in items], kind="stable")
    start, length = np.zeros((2, len(items)), dtype=np.int64)
    n_tokens = width = 0
    with file.open("wb") as stream:
        for first in range(0, len(items), TEXTS):
            rows = order[first : first + TEXTS]
            for row, states in zip(rows, encoder.token_states([items[row] for row in rows], layer), strict=True):
                start[row], length[row] = n_tokens, len(states)
                n_tokens, width = n_tokens + len(states), states.shape[1]
                stream.write(states.float().contiguous().numpy().tobytes())
            if progress:
                progress(first + len(rows), len(items))
    states = torch.from_file(str(file), size=n_tokens * width, dtype=torch.float32)
    return TokenStates(states.view(n_tokens, width), start, length)


# --- Pooling of several layers of a model, as a module of sentence-transformers.


class LayerPooling(torch.nn.Module):
    """Pools each of several layers and concatenates the results, without normalisation.

    Args:
        layers: the layers, in ascending order; 0 is the embeddings.
        pooling: the pooling of one layer, a module of sentence-transformers.
        attention: layer and weights of an attention pooling, whose features come last.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        pooling: torch.nn.Module,
        attention: tuple[int, Mapping[str, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.layers, self.pooling = layers, pooling
        self.attended, weights = attention or (0, {})
        self.weights = torch.nn.ParameterDict(weights).requires_grad_(False)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """Return the features with ``sentence_embedding``, ``(n_texts, n_layers × width + trained features)``."""
        states = features["all_layer_embeddings"]
        of_layers = [features | {"token_embeddings": states[n].float()} for n in self.layers]
        parts = [self.pooling(of_layer)["sentence_embedding"] for of_layer in of_layers]
        if self.weights:
            parts.append(attention_pool(states[self.attended], features["attention_mask"], dict(self.weights.items())))
        return features | {"sentence_embedding": torch.hstack(parts)}
