"""Vector cache on disk: one SQLite file per encoder, so that no text is encoded twice.

SQLite lets several processes write in turn, and its file stays consistent when a process is killed. The key of a vector
is a hash of its text, so equal texts share one vector.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from pluralign.core.arrays import Vectors
from pluralign.core.errors import DataError
from pluralign.core.files import cache_folder

WAIT_SECONDS = 120.0
"""How long a process waits while another one writes."""
_KEYS_PER_QUERY = 30_000


class VectorCache:
    """Vectors of one encoder, by text. Several processes may read and write at the same time."""

    def __init__(self, encoder: str, folder: Path | None = None) -> None:
        self.encoder = encoder
        self.folder = folder

    @property
    def path(self) -> Path:
        """The file. Its name depends on the encoder's identity, so encoders never share vectors."""
        name = hashlib.sha256(self.encoder.encode()).hexdigest()[:32]
        return (self.folder or cache_folder()) / f"vectors-{name}.sqlite"

    def get(self, texts: Sequence[str]) -> list[Vectors | None]:
        """Return the vector of each text, or None if it is not cached."""
        if not self.path.exists():
            return [None] * len(texts)
        keys = [vector_key(text) for text in texts]
        stored: dict[bytes, bytes] = {}
        with closing(self._connect()) as connection:
            for start in range(0, len(keys), _KEYS_PER_QUERY):
                part = keys[start : start + _KEYS_PER_QUERY]
                marks = ",".join("?" * len(part))
                stored.update(connection.execute(f"SELECT key, vector FROM vectors WHERE key IN ({marks})", part))  # noqa: S608
        return [np.frombuffer(stored[key], dtype=np.float32) if key in stored else None for key in keys]

    def put(self, texts: Iterable[str], vectors: Vectors) -> None:
        """Store vectors in one transaction: if the process is killed, none of them is stored."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = [(vector_key(text), vector.astype("<f4").tobytes()) for text, vector in zip(texts, vectors, strict=True)]
        with closing(self._connect()) as connection, connection:
            connection.executemany("INSERT OR IGNORE INTO vectors VALUES (?, ?)", rows)

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(self.path, timeout=WAIT_SECONDS)
        except sqlite3.Error as error:
            raise self._unusable(error) from None
        try:
            connection.execute("CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, vector BLOB) WITHOUT ROWID")
        except sqlite3.Error as error:
            connection.close()
            raise self._unusable(error) from None
        return connection

    def _unusable(self, error: sqlite3.Error) -> DataError:
        remedy = "remove the file, or set PLURALIGN_CACHE to another folder"
        return DataError(f"the vector cache cannot be used ({error})", file=str(self.path), remedy=remedy)


def vector_key(text: str) -> bytes:
    """Return the 16-byte key of a text's vector, in the cache and in stored features."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
