"""BERT sentence encoders with torch alone. Most sentence encoders are BERTs: MiniLM (the default), BGE, E5, GTE.

Decided here: which folders are supported, and how the layers are computed. Encoding takes most of the time of a fit.
Importing transformers and sentence-transformers takes most of the time of a single comparison. This module reduces
both. The tokens of all texts are concatenated without padding, one set of buffers serves all layers, attention runs per
text, and weights are stored in the order in which products read them fastest. Vectors equal those of
sentence-transformers to 1e-6.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import layer_norm, normalize, scaled_dot_product_attention

from pluralign.text.loading import UnsupportedError, own_pooling, read_json
from pluralign.text.pooling import attention_pool, load_attention

BODY = {
    "architectures": ["BertModel"],
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "output_hidden_states": False,
}
"""Supported values in ``config.json``; a key may be absent."""
TRANSFORMER = {
    "do_lower_case": False,
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
}
"""Supported values in ``sentence_bert_config.json``."""
WHOLE = {"default_prompt_name": None, "truncate_dim": None}
"""Supported values in ``config_sentence_transformers.json``."""
NORMALIZER = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
"""Settings of ``tokenizer_config.json``, and their names in the normalizer of ``tokenizer.json``."""

logger = logging.getLogger("pluralign")


@dataclass(frozen=True)
class BertSettings:
    """Settings of a supported folder."""

    layers: int
    heads: int
    layer_norm_eps: float
    max_tokens: int
    first_token: bool
    """Whether the vector of a text is the state of its first token; else the mean over its tokens."""
    unit_length: bool
    """Whether vectors are scaled to length 1."""


def bert_reader(folder: Path, layers: tuple[int, ...] = (), *, half: bool = False) -> "BertReader | None":
    """Load the BERT in a folder, or return None if sentence-transformers must read the folder. Logs which one it is.

    Args:
        folder: a model folder.
        layers: layers to mean-pool and concatenate, in ascending order; empty for the model's own vector.
        half: whether layers run in bfloat16.
    """
    try:
        settings = read_settings(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        with safe_open(folder / "model.safetensors", "pt") as file:
            arrays = {name.removeprefix("bert."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        dtype = torch.bfloat16 if half else torch.float32
        weights = _Weights({name: array.to(dtype) for name, array in arrays.items()})
        reader = BertReader(settings, tokenizer, weights, layers, load_attention(folder) if layers else None)
    except UnsupportedError as reason:
        logger.info("%s: encoding with sentence-transformers (%s).", folder, reason)
        return None
    logger.info("%s: encoding with the built-in BERT.", folder)
    return reader


def read_settings(folder: Path) -> BertSettings:
    """Return the settings of a folder. Raises UnsupportedError if the folder asks for other steps."""
    for name in ("modules.json", "tokenizer.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise UnsupportedError(f"there is no {name}")
    names = ("config", "config_sentence_transformers", "sentence_bert_config", "tokenizer_config", "tokenizer")
    body, whole, transformer, tokenizer, pieces = (read_json(folder / f"{name}.json") for name in names)
    if not pieces.get("post_processor"):  # it gives even an empty text its first and last token
        raise UnsupportedError("tokenizer.json has no post_processor")
    # The configuration of the tokenizer also sets the normalizer, and has priority in transformers.
    normalizer = pieces.get("normalizer") or {}
    same = {name: normalizer.get(own) for name, own in NORMALIZER.items()}
    for values, supported in ((body, BODY), (transformer, TRANSFORMER), (whole, WHOLE), (tokenizer, same)):
        for name, value in supported.items():
            if values.get(name, value) != value:
                raise UnsupportedError(f"{name} is {values[name]!r}")
    pooling, unit_length = own_pooling(folder)
    if pooling == "last":
        raise UnsupportedError("its pooling is the last token")
    layers, heads = (int(_number(body, name)) for name in ("num_hidden_layers", "num_attention_heads"))
    limits = (transformer, "max_seq_length"), (tokenizer, "model_max_length")
    limit = next((_number(config, name) for config, name in limits if config.get(name)), float("inf"))
    max_tokens = int(min(limit, _number(body, "max_position_embeddings")))
    return BertSettings(layers, heads, _number(body, "layer_norm_eps"), max_tokens, pooling == "cls", unit_length)


def _number(config: dict[str, Any], name: str) -> float:
    value = config.get(name)
    if not isinstance(value, int | float):
        raise UnsupportedError(f"{name} is {value!r}")
    return value


class _Weights(dict[str, Tensor]):
    """Weights by name."""

    def __missing__(self, name: str) -> Tensor:
        raise UnsupportedError(f"model.safetensors has no {name}")


class BertReader:
    """A BERT and its tokenizer.

    The vector of a text is the model's own, with mean or first-token pooling, or the means of several layers, followed
    by the attention pooling of one of them if there is one. Layers above the highest of them are not computed.
    """

    def __init__(
        self,
        settings: BertSettings,
        tokenizer: Tokenizer,
        weights: _Weights,
        pooled: tuple[int, ...] = (),
        attention: tuple[int, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.settings, self.tokenizer, self.pooled, self.attention = settings, tokenizer, pooled, attention
        tokenizer.no_padding()
        # The response comes last, and the prompt is the same for both sides of a pair: long texts are cut on the left.
        tokenizer.enable_truncation(settings.max_tokens, direction="left")
        embeddings = "embeddings.{}_embeddings.weight".format
        self.words = weights[embeddings("word")]
        self.positions = weights[embeddings("position")] + weights[embeddings("token_type")][0]
        self.first_norm = _norm(weights, "embeddings")
        self.layers = [_Layer(weights, f"encoder.layer.{number}.") for number in range(settings.layers)]

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's token ids."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]

    @torch.inference_mode()
    def read(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Return one vector per text from its token ids, ``(n_texts, width)``."""
        attended, weights = self.attention or (0, {})
        depth = max(self.pooled, default=self.settings.layers)
        means, states = self._run(tokens, depth, attended if weights else depth)
        if self.pooled:
            if weights:
                padded = [(of_text[None], torch.ones(1, len(of_text))) for of_text in states]
                means.append(torch.cat([attention_pool(*of_text, weights) for of_text in padded]))
            return torch.hstack(means)
        texts = [of_text.float() for of_text in states]
        vectors = torch.stack([text[0] if self.settings.first_token else text.mean(0) for text in texts])
        return normalize(vectors, dim=1) if self.settings.unit_length else vectors

    @torch.inference_mode()
    def token_states(self, layer: int, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the states of a layer, ``(n_tokens, width)`` for each text."""
        return self._run(tokens, layer, layer)[1]

    def _run(self, tokens: Sequence[Sequence[int]], depth: int, kept: int) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the first ``depth`` layers: return the means of the pooled ones, and the states of one, by text."""
        lengths = [len(ids) for ids in tokens]
        rows = [slice(*ends) for ends in pairwise(accumulate(lengths, initial=0))]
        states = self.words[torch.tensor([token for ids in tokens for token in ids])]
        states += self.positions[torch.cat([torch.arange(length) for length in lengths])]
        states = self._normal(states, self.first_norm)
        n, width = states.shape
        heads = self.settings.heads
        projected, inner = states.new_empty(n, 3 * width), states.new_empty(n, self.layers[0].up.shape[1])
        context, result = torch.empty_like(states), torch.empty_like(states)
        means = [_means(states, rows)] if 0 in self.pooled else []
        kept_states = states
        for number, layer in enumerate(self.layers[:depth], 1):
            torch.mm(states, layer.projection, out=projected).add_(layer.projection_bias)
            for of_text in rows:
                parts = projected[of_text].view(1, -1, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
                attended = scaled_dot_product_attention(parts[0], parts[1], parts[2])
                context[of_text].view(-1, heads, width // heads).copy_(attended[0].transpose(0, 1))
            torch.mm(context, layer.out, out=result).add_(layer.out_bias).add_(states)
            states = self._normal(result, layer.after_attention)
            torch.mm(states, layer.up, out=inner).add_(layer.up_bias)
            torch.ops.aten.gelu.out(inner, out=inner)
            torch.mm(inner, layer.down, out=result).add_(layer.down_bias).add_(states)
            states = self._normal(result, layer.after_inner)
            if number in self.pooled:
                means.append(_means(states, rows))
            if number == kept:
                kept_states = states
        return means, [kept_states[of_text] for of_text in rows]

    def _normal(self, states: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
        return layer_norm(states, states.shape[1:], *norm, self.settings.layer_norm_eps)


def _means(states: Tensor, rows: Sequence[slice]) -> Tensor:
    """Return the mean over the tokens of each text, ``(n_texts, width)``."""
    return torch.stack([states[of_text].float().mean(0) for of_text in rows])


class _Layer:
    """The weights of one layer, transposed. Queries, keys and values share one matrix."""

    def __init__(self, weights: _Weights, prefix: str) -> None:
        names = [f"{prefix}attention.self.{part}" for part in ("query", "key", "value")]
        self.projection = torch.cat([weights[f"{name}.weight"] for name in names]).t().contiguous()
        self.projection_bias = torch.cat([weights[f"{name}.bias"] for name in names])
        dense = [f"{prefix}{part}.dense" for part in ("attention.output", "intermediate", "output")]
        self.out, self.up, self.down = (weights[f"{name}.weight"].t().contiguous() for name in dense)
        self.out_bias, self.up_bias, self.down_bias = (weights[f"{name}.bias"] for name in dense)
        self.after_attention = _norm(weights, f"{prefix}attention.output")
        self.after_inner = _norm(weights, f"{prefix}output")


def _norm(weights: _Weights, name: str) -> tuple[Tensor, Tensor]:
    return weights[f"{name}.LayerNorm.weight"], weights[f"{name}.LayerNorm.bias"]
