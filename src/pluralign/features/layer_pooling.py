"""Pooling of several layers of a model, as a module of sentence-transformers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pluralign.features.attention_pooling import attention_pool


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
        parts = [self._pooled(features, states[n]) for n in self.layers]
        if self.weights:
            parts.append(attention_pool(states[self.attended], features["attention_mask"], dict(self.weights.items())))
        return features | {"sentence_embedding": torch.hstack(parts)}

    def _pooled(self, features: dict[str, Any], states: Tensor) -> Tensor:
        pooled: Tensor = self.pooling(features | {"token_embeddings": states.float()})["sentence_embedding"]
        return pooled
