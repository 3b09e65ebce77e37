"""BERT sentence encoders, read with torch alone: most encoders are BERTs (MiniLM, BGE, E5, GTE), and so is the default.

Decided here: which folders are read this way, and how their weights are multiplied. Reading texts is most of what a fit
costs, importing transformers and sentence-transformers most of what a single comparison costs; here both cost less.
Tokens of all texts stand one after the other without padding, one set of arrays serves all layers, attention goes text
by text, and weights lie the way products read them fastest. Vectors are sentence-transformers' own, to 1e-6.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import layer_norm, normalize, scaled_dot_product_attention

BODY = {
    "architectures": ["BertModel"],
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "output_hidden_states": False,
}
TRANSFORMER = {
    "do_lower_case": False,
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
}
WHOLE = {"default_prompt_name": None, "truncate_dim": None}
"""What a folder says or leaves out: of the model, of the module around it, of all modules together."""


def bert_reader(folder: Path, *, half: bool = False) -> "BertReader | None":
    """Return a reader of the folder, or None where it holds anything but a BERT with mean or first-token pooling.

    Args:
        folder: of a model.
        half: whether layers multiply in bfloat16.
    """
    try:
        settings = _settings(folder)
        return BertReader(folder, settings, torch.bfloat16 if half else torch.float32) if settings else None
    except (KeyError, TypeError, ValueError):  # files of another form, weights under other names
        return None


def _settings(folder: Path) -> dict[str, Any] | None:
    """Return what a BERT is read with, or None where the folder asks for anything that is not done here."""

    def read(name: str) -> Any:
        return json.loads((folder / name).read_text()) if (folder / name).is_file() else {}

    if not all((folder / name).is_file() for name in ("modules.json", "tokenizer.json", "model.safetensors")):
        return None
    body, transformer = read("config.json"), read("sentence_bert_config.json")
    whole, tokenizer = read("config_sentence_transformers.json"), read("tokenizer_config.json")
    pieces = read("tokenizer.json")
    if not pieces.get("post_processor"):  # it gives even an empty text its first and last token
        return None
    # What is done to letters also stands in the tokenizer's configuration, which wins in transformers.
    letters = pieces.get("normalizer") or {}
    names = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars",
    }
    said = {name: letters.get(own) for name, own in names.items()}
    for found, wanted in ((body, BODY), (transformer, TRANSFORMER), (whole, WHOLE), (tokenizer, said)):
        if any(found.get(name, value) != value for name, value in wanted.items()):
            return None
    modules = read("modules.json")
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        return None
    pooling = read(f"{modules[1]['path']}/config.json")
    old = [
        name.removeprefix("pooling_mode_") for name, on in pooling.items() if name.startswith("pooling_mode_") and on
    ]
    mode = {"mean_tokens": "mean", "cls_token": "cls"}.get(" ".join(old), pooling.get("pooling_mode"))
    if mode not in ("mean", "cls"):
        return None
    limits = (body["max_position_embeddings"], transformer.get("max_seq_length") or tokenizer.get("model_max_length"))
    most = min(int(limit) for limit in limits if limit)
    return {**body, "first_token": mode == "cls", "unit": "Normalize" in kinds, "most": most}


class BertReader:
    """A BERT with mean or first-token pooling, from a folder that sentence-transformers wrote."""

    device = torch.device("cpu")

    def __init__(self, folder: Path, settings: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.first_token, self.unit = settings["first_token"], settings["unit"]
        self.heads, self.eps = settings["num_attention_heads"], settings["layer_norm_eps"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        # The response is last, and the prompt the same for both sides: what is too long is cut from the left.
        self.tokenizer.enable_truncation(settings["most"], direction="left")
        with safe_open(folder / "model.safetensors", "pt") as file:
            weights = {name.removeprefix("bert."): file.get_tensor(name).to(dtype) for name in file.keys()}  # noqa: SIM118
        embeddings = "embeddings.{}_embeddings.weight".format
        self.words, self.positions = weights[embeddings("word")], weights[embeddings("position")]
        self.positions = self.positions + weights[embeddings("token_type")][0]
        self.first_norm = _norm(weights, "embeddings")
        self.layers = [_Layer(weights, f"encoder.layer.{number}.") for number in range(settings["num_hidden_layers"])]

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's token ids."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]

    @torch.inference_mode()
    def read(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Return one vector for each text's tokens, ``(n_texts, width)``."""
        lengths = [len(ids) for ids in tokens]
        rows = [slice(*ends) for ends in pairwise(accumulate(lengths, initial=0))]
        states = self.words[torch.tensor([token for ids in tokens for token in ids])]
        states += self.positions[torch.cat([torch.arange(length) for length in lengths])]
        states = self._normal(states, self.first_norm)
        n, width = states.shape
        projected, inner = states.new_empty(n, 3 * width), states.new_empty(n, self.layers[0].up.shape[1])
        context, result = torch.empty_like(states), torch.empty_like(states)
        for layer in self.layers:
            torch.mm(states, layer.projection, out=projected).add_(layer.projection_bias)
            for of_text in rows:
                parts = projected[of_text].view(1, -1, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
                attended = scaled_dot_product_attention(parts[0], parts[1], parts[2])
                context[of_text].view(-1, self.heads, width // self.heads).copy_(attended[0].transpose(0, 1))
            torch.mm(context, layer.out, out=result).add_(layer.out_bias).add_(states)
            states = self._normal(result, layer.after_attention)
            torch.mm(states, layer.up, out=inner).add_(layer.up_bias)
            torch.ops.aten.gelu.out(inner, out=inner)
            torch.mm(inner, layer.down, out=result).add_(layer.down_bias).add_(states)
            states = self._normal(result, layer.after_inner)
        texts = [states[of_text].float() for of_text in rows]
        vectors = torch.stack([text[0] if self.first_token else text.mean(0) for text in texts])
        return normalize(vectors, dim=1) if self.unit else vectors

    def _normal(self, states: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
        return layer_norm(states, states.shape[1:], *norm, self.eps)


class _Layer:
    """One layer's weights, transposed; those of queries, keys and values as one matrix."""

    def __init__(self, weights: dict[str, Tensor], prefix: str) -> None:
        names = [f"{prefix}attention.self.{part}" for part in ("query", "key", "value")]
        self.projection = torch.cat([weights[f"{name}.weight"] for name in names]).t().contiguous()
        self.projection_bias = torch.cat([weights[f"{name}.bias"] for name in names])
        dense = [f"{prefix}{part}.dense" for part in ("attention.output", "intermediate", "output")]
        self.out, self.up, self.down = (weights[f"{name}.weight"].t().contiguous() for name in dense)
        self.out_bias, self.up_bias, self.down_bias = (weights[f"{name}.bias"] for name in dense)
        self.after_attention = _norm(weights, f"{prefix}attention.output")
        self.after_inner = _norm(weights, f"{prefix}output")


def _norm(weights: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return weights[f"{name}.LayerNorm.weight"], weights[f"{name}.LayerNorm.bias"]
