"""Vectors on disk, so that no text is encoded twice: one SQLite file per encoder.

SQLite brings what a cache needs and is easy to get wrong: writers that wait for each other, and a file that is whole
after a kill. A vector's key is a hash of its text, so equal texts share one.
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
_KEYS_A_QUERY = 30_000


class VectorCache:
    """Vectors of one encoder by the texts they encode; several processes may read and write at once."""

    def __init__(self, encoder: str, folder: Path | None = None) -> None:
        self.encoder = encoder
        self.folder = folder

    @property
    def path(self) -> Path:
        """The file: named by the encoder's identity, so that two encoders never share vectors."""
        name = hashlib.sha256(self.encoder.encode()).hexdigest()[:32]
        return (self.folder or cache_folder()) / f"vectors-{name}.sqlite"

    def get(self, texts: Sequence[str]) -> list[Vectors | None]:
        """Return each text's vector, or None where it is not there yet."""
        if not self.path.exists():
            return [None] * len(texts)
        keys = [vector_key(text) for text in texts]
        found: dict[bytes, bytes] = {}
        with closing(self._connect()) as connection:
            for start in range(0, len(keys), _KEYS_A_QUERY):
                part = keys[start : start + _KEYS_A_QUERY]
                marks = ",".join("?" * len(part))
                found.update(connection.execute(f"SELECT key, vector FROM vectors WHERE key IN ({marks})", part))  # noqa: S608
        return [np.frombuffer(found[key], dtype=np.float32) if key in found else None for key in keys]

    def put(self, texts: Iterable[str], vectors: Vectors) -> None:
        """Store vectors, all of them or, when killed, none."""
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
        return DataError(f"the cache of vectors cannot be used ({error})", file=str(self.path), remedy=remedy)


def vector_key(text: str) -> bytes:
    """Return the 16 bytes that a text's vector is kept under, here and in a folder of features."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
