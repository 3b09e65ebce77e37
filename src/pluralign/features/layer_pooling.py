"""Pooling of several layers of a model, as a module of sentence-transformers."""

from typing import Any

import torch
from torch import Tensor


class LayerPooling(torch.nn.Module):
    """Pools each of several layers and concatenates the results, without normalisation.

    Args:
        layers: the layers, in ascending order; 0 is the embeddings.
        pooling: the pooling of one layer, a module of sentence-transformers.
    """

    def __init__(self, layers: tuple[int, ...], pooling: torch.nn.Module) -> None:
        super().__init__()
        self.layers, self.pooling = layers, pooling

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """Return the features with ``sentence_embedding``, ``(n_texts, n_layers × width)``."""
        states = features["all_layer_embeddings"]
        return features | {"sentence_embedding": torch.hstack([self._pooled(features, states[n]) for n in self.layers])}

    def _pooled(self, features: dict[str, Any], states: Tensor) -> Tensor:
        pooled: Tensor = self.pooling(features | {"token_embeddings": states.float()})["sentence_embedding"]
        return pooled
