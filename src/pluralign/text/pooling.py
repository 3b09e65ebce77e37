"""Attention pooling: features of a text that are trained on votes, computed from the token states of a frozen encoder.

A mean over tokens weighs every token alike. Here each of several heads learns which tokens count:

    z_h = Σ_t softmax_t(q_h·s_t + b_h) s_t,   s_t = LayerNorm(state of token t),   feature_o = Σ_h v_ho·z_h.

Each network has heads of its own. ``learning.trained_pooling`` trains them. This code is also part of the script of
exported ensembles, so it imports torch only where it is used.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

ATTENTION_FILE = "attention_pooling.safetensors"
"""The weights, in the folder of the encoder: ``query`` (networks, heads, d), ``bias`` (networks, heads), ``value``
(networks, heads, d, outputs), and ``layer``, the number of the layer whose states they read."""


def load_attention(folder: Path) -> tuple[int, Mapping[str, Any]] | None:
    """Return the layer and the weights in the folder of an encoder; None if it has none."""
    if not (folder / ATTENTION_FILE).is_file():
        return None
    import safetensors.torch

    weights = safetensors.torch.load_file(folder / ATTENTION_FILE)
    return int(weights.pop("layer")), weights


def attention_pool(states: Any, mask: Any, weights: Mapping[str, Any]) -> Any:
    """Return the trained features of texts, ``(n_texts, networks × outputs)``.

    Args:
        states: token states of one layer, ``(n_texts, n_tokens, d)``.
        mask: 1 for tokens and 0 for padding, ``(n_texts, n_tokens)``.
        weights: ``query``, ``bias`` and ``value``, as in ``ATTENTION_FILE``.
    """
    import torch

    states = torch.nn.functional.layer_norm(states.float(), states.shape[-1:])
    logits = states @ weights["query"].flatten(0, 1).T + weights["bias"].flatten()
    attention = logits.masked_fill(mask[:, :, None] == 0, -torch.inf).softmax(dim=1)
    pooled = (attention.transpose(1, 2) @ states).unflatten(1, weights["bias"].shape)
    return torch.einsum("nghd,ghdo->ngo", pooled, weights["value"]).flatten(1)
