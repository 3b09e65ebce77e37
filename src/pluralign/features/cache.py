"""Vector cache on disk: one SQLite file per encoder, so that no text is encoded twice.

SQLite lets several processes write in turn, and its file stays consistent when a process is killed. The key of a vector
is a hash of its text, so equal texts share one vector. Each vector is stored with a checksum. Nothing depends on the
cache: if it cannot be used, a note says so and texts are encoded again; a damaged file or vector is replaced.
"""

import hashlib
import logging
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from pluralign.core.arrays import Vectors
from pluralign.core.files import cache_folder

WAIT_SECONDS = 120.0
"""How long a process waits while another one writes."""
VERSION = 2
"""Of the keys and the stored vectors. Another version uses other files."""
_KEYS_PER_QUERY = 30_000
_CHECKSUM_BYTES = 4

logger = logging.getLogger("pluralign")
_noted: set[Path] = set()


class VectorCache:
    """Vectors of one encoder, by text. Several processes may read and write at the same time."""

    def __init__(self, encoder: str, folder: Path | None = None) -> None:
        self.encoder = encoder
        self.folder = folder

    @property
    def path(self) -> Path:
        """The file. Its name depends on the encoder's identity, so encoders never share vectors."""
        name = hashlib.sha256(f"{VERSION} {self.encoder}".encode()).hexdigest()[:32]
        return (self.folder or cache_folder()) / f"vectors-{name}.sqlite"

    def get(self, texts: Sequence[str]) -> list[Vectors | None]:
        """Return the vector of each text, or None if it is not cached."""
        keys = [vector_key(text) for text in texts]
        stored: dict[bytes, Vectors] = {}
        with self._usable():
            if self.path.exists():
                stored = self._read(keys)
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
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
                self.path.unlink(missing_ok=True)
            if self.path not in _noted:
                _noted.add(self.path)
                logger.warning("the vector cache %s cannot be used (%s): texts are encoded again.", self.path, error)


_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def vector_key(text: str) -> bytes:
    """Return the 16-byte key of a text's vector, in the cache and in stored features."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _packed(key: bytes, vector: bytes) -> bytes:
    return vector + zlib.crc32(key + vector).to_bytes(_CHECKSUM_BYTES, "little")


def _is_intact(key: bytes, packed: object) -> bool:
    return isinstance(packed, bytes) and len(packed) % 4 == 0 and packed == _packed(key, packed[:-_CHECKSUM_BYTES])
