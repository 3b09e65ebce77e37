"""A BERT's layers without padding, in arrays that are written over.

Decided here: how a BERT's weights are multiplied. Most sentence encoders are BERTs (MiniLM, BGE, E5, GTE), and reading
texts is most of what a fit costs. transformers pads texts to one length and asks for a new array after every product;
here tokens of all texts stand one after the other, one set of arrays serves all layers, attention goes text by text,
and weights lie the way products read them fastest. Embeddings, pooling and normalisation stay the model's own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def is_bert(module: Any) -> bool:
    """Tell whether a sentence-transformers module is a BERT as it was published, of which the last layer is used."""
    model = module.auto_model
    published = type(model).__name__ == "BertModel" and model.config.hidden_act == "gelu"
    only_last = module.module_output_name == "token_embeddings" and not model.config.output_hidden_states
    return published and only_last and not model.config.is_decoder


class PackedBert:
    """Does what a BERT module of sentence-transformers does, on a CPU; keeps a second copy of its layers' weights."""

    def __init__(self, module: Any) -> None:
        model = module.auto_model
        self.embeddings, self.heads = model.embeddings, model.config.num_attention_heads
        self.layers = [_Layer(layer) for layer in model.encoder.layer]

    def __call__(self, features: dict[str, Any]) -> dict[str, Any]:
        """Return the features with the last layer's states, ``(n_texts, n_tokens, width)``, zero where no token is."""
        ids, there = features["input_ids"], features["attention_mask"].bool()
        lengths = there.sum(dim=1).tolist()
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        states = self.embeddings(input_ids=ids[there][None], position_ids=positions[there][None])[0]
        n, width = states.shape
        projected, inner = states.new_empty(n, 3 * width), states.new_empty(n, self.layers[0].up.shape[1])
        context, result = torch.empty_like(states), torch.empty_like(states)
        for layer in self.layers:
            torch.mm(states, layer.projection, out=projected).add_(layer.projection_bias)
            start = 0
            for length in lengths:
                rows = slice(start, start := start + length)
                query, key, value = projected[rows].view(1, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
                attended = scaled_dot_product_attention(query, key, value)
                context[rows].view(length, self.heads, -1).copy_(attended[0].transpose(0, 1))
            torch.mm(context, layer.out, out=result).add_(layer.out_bias).add_(states)
            states = layer.after_attention(result)
            torch.mm(states, layer.up, out=inner).add_(layer.up_bias)
            torch.ops.aten.gelu.out(inner, out=inner)
            torch.mm(inner, layer.down, out=result).add_(layer.down_bias).add_(states)
            states = layer.after_inner(result)
        padded = states.new_zeros(*ids.shape, width)
        padded[there] = states
        return {**features, "token_embeddings": padded}


class _Layer:
    """One layer's weights, transposed; those of queries, keys and values as one matrix."""

    def __init__(self, layer: Any) -> None:
        own = layer.attention.self
        parts = (own.query, own.key, own.value)
        self.projection = _transposed(torch.cat([part.weight for part in parts]))
        self.projection_bias = torch.cat([part.bias for part in parts]).detach()
        dense = (layer.attention.output.dense, layer.intermediate.dense, layer.output.dense)
        self.out, self.up, self.down = (_transposed(linear.weight) for linear in dense)
        self.out_bias, self.up_bias, self.down_bias = (linear.bias.detach() for linear in dense)
        self.after_attention, self.after_inner = layer.attention.output.LayerNorm, layer.output.LayerNorm


def _transposed(weight: Tensor) -> Tensor:
    return weight.detach().t().contiguous()
