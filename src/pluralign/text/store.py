"""Stored features: a folder that ``pluralign encode`` wrote, with Parquet shards of keys and vectors.

Decided here: the layout of the folder, and how the vectors of given texts are read without holding all of them in
memory. ``scale`` writes the shards.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.arrays import Vectors
from pluralign.core.errors import DataError
from pluralign.core.json_values import JsonObject, from_json
from pluralign.core.text import one_line
from pluralign.text.encoders import TextFeatures, vector_key
from pluralign.text.options import Pooling, Precision
from pluralign.votes.prompts import Item, text_key

Keys: TypeAlias = npt.NDArray[np.bytes_]

FEATURES_FILE = "features.json"
VECTORS_FOLDER = "vectors"
FORMAT = "pluralign-features"
FORMAT_VERSION = 2
KEY_BYTES = 16
MAX_DIMENSION = 2**20
COPY_FOLDER = "copy the whole folder again, or encode again"
SHARD_FORMAT = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
"""Options of ``pyarrow`` for a shard. With checksums, a changed byte is detected when the shard is read."""


@dataclass(frozen=True)
class FeaturesFile:
    """Contents of ``features.json``: the encoder and the shape of the stored features."""

    rows: int
    shards: int
    dimension: int
    encoder: str
    layers: str
    pooling: Pooling
    precision: Precision
    surface: bool
    identity: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the job that wrote the features: see ``scale.jobs.Job``."""
    format_version: int = FORMAT_VERSION

    def to_json(self) -> JsonObject:
        """Return the JSON object of the file."""
        return {"format": FORMAT, **vars(self), "settings": dict(self.settings)}


def read_features_file(folder: str | os.PathLike[str]) -> FeaturesFile:
    """Read ``features.json`` in a folder. Raises DataError if it is missing or not ours."""
    path = Path(folder) / FEATURES_FILE
    if not path.is_file():
        unfinished = Path(folder).is_dir() and any(Path(folder).iterdir())
        remedy = "run the same pluralign encode again to finish it" if unfinished else "check the path"
        raise DataError(f"there is no {FEATURES_FILE} in it", file=str(folder), remedy=remedy)
    values: Any = None
    with suppress(ValueError, RecursionError):
        values = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(values, dict) and values.get("format") == FORMAT:
        if values.get("format_version") != FORMAT_VERSION:
            remedy = "run pluralign encode into another folder"
            raise DataError("it was written by another version of Pluralign", file=str(path), remedy=remedy)
        with suppress(TypeError):
            described = from_json(FeaturesFile, values)
            if 0 <= described.dimension <= MAX_DIMENSION:
                return described
    remedy = "name a folder that pluralign encode wrote"
    raise DataError("it does not describe features", file=str(path), remedy=remedy)


# --- keys and shards --------------------------------------------------------------------------------------------------


def item_keys(items: Iterable[Item]) -> Keys:
    """Return the key of each text, ``(n_items,)``: the same 16 bytes as in the vector cache."""
    return np.frombuffer(b"".join(vector_key(text_key(*item)) for item in items), dtype=f"S{KEY_BYTES}")


def shard_table(items: Sequence[Item], vectors: Vectors) -> pa.Table:
    """Return the contents of one shard: one row per text, with its key and its vector.

    Example:
        >>> shard_table([("Tea?", "Yes.")], np.ones((1, 3), np.float32)).schema.types
        [FixedSizeBinaryType(fixed_size_binary[16]), FixedSizeListType(fixed_size_list<item: float>[3])]
    """
    keys = pa.Array.from_buffers(pa.binary(KEY_BYTES), len(items), [None, pa.py_buffer(item_keys(items).tobytes())])
    flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
    return pa.table({"key": keys, "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])})


def shard_name(number: int) -> str:
    """Return the file name of a shard.

    Example:
        >>> shard_name(7)
        'part-00007.parquet'
    """
    return f"part-{number:05d}.parquet"


# --- reading ----------------------------------------------------------------------------------------------------------


def stored_features(
    folder: str | os.PathLike[str],
    items: Sequence[Item],
    text_features: TextFeatures,
    scratch: Path | None = None,
    only: slice = slice(None),
) -> Vectors:
    """Return the features of texts from a folder that ``pluralign encode`` wrote, ``(n_items, dimension)``.

    Shards are read one by one, so only the result and one shard are in memory.

    Args:
        folder: the folder given to ``pluralign encode -o``.
        items: the texts, in the order of the result; a text may occur twice.
        text_features: the features must have been made with these settings.
        scratch: a file for the result, which is then a memory map and is read from disk when it is used.
        only: the items that this process needs. The rows of other items stay zero, and take no space on disk.

    Example:
        >>> stored_features("nowhere", [("Tea?", "Yes.")], TextFeatures("hashing"))
        Traceback (most recent call last):
        pluralign.core.errors.DataError: nowhere: there is no features.json in it; check the path.
    """
    folder = Path(folder)
    stored = read_features_file(folder)
    _check_same_features(folder, stored, text_features)
    shape = len(items), stored.dimension
    if scratch is None or not len(items):
        features = np.zeros(shape, dtype=np.float32)
    else:
        scratch.parent.mkdir(parents=True, exist_ok=True)
        features = np.memmap(scratch, dtype=np.float32, mode="w+", shape=shape)
    first, last, _ = only.indices(len(items))
    needed = items[first:last]
    wanted = item_keys(needed)
    order = np.argsort(wanted, kind="stable")
    ordered = wanted[order]
    missing = np.ones(len(wanted), dtype=bool)
    for keys, vectors in _read_shards(folder, stored):
        left, right = np.searchsorted(ordered, keys, "left"), np.searchsorted(ordered, keys, "right")
        count = right - left
        # Row r of the shard belongs to order[left[r]], …, order[right[r] - 1]: concatenate these ranges.
        places = order[np.repeat(left - np.cumsum(count) + count, count) + np.arange(count.sum())]
        features[first + places] = np.repeat(vectors, count, axis=0)
        missing[places] = False
    if absent := int(missing.sum()):
        problem = f"{absent:,} of {len(wanted):,} texts are not in it"
        raise DataError(problem, file=str(folder), remedy="run pluralign encode on these votes")
    return features


def _check_same_features(folder: Path, stored: FeaturesFile, text_features: TextFeatures) -> None:
    encoder = text_features.load_checked()
    identity = encoder.identity if encoder else ""
    if stored.identity != identity:
        theirs, ours = f"{stored.encoder} ({stored.identity or 'no encoder'})", identity or "no encoder"
        problem = f"its vectors are those of {theirs}, not of {text_features.encoder} ({ours})"
        remedy = "use the same encoder, layers, pooling and precision, or encode again"
        raise DataError(problem, file=str(folder), remedy=remedy)
    if text_features.surface != stored.surface:
        has = "has" if stored.surface else "lacks"
        remedy = f"use --{'' if stored.surface else 'no-'}surface here too, or encode again"
        raise DataError(f"it {has} surface features", file=str(folder), remedy=remedy)


def _read_shards(folder: Path, stored: FeaturesFile) -> Iterator[tuple[Keys, Vectors]]:
    """Yield the keys and vectors of each shard. Raises DataError if a shard is damaged or missing."""
    for number in range(stored.shards):
        path = folder / VECTORS_FOLDER / shard_name(number)
        try:
            table = pq.read_table(path, columns=["key", "vector"], page_checksum_verification=True)
        except (OSError, KeyError, pa.ArrowException) as error:
            is_missing = isinstance(error, FileNotFoundError)
            problem = "it is missing" if is_missing else f"it cannot be read ({one_line(error)})"
            raise DataError(problem, file=str(path), remedy=COPY_FOLDER) from None
        if not len(table):
            continue
        keys, vectors = table["key"].combine_chunks(), table["vector"].combine_chunks()
        types = [pa.binary(KEY_BYTES), pa.list_(pa.float32(), stored.dimension)]
        flat = vectors.flatten() if table.schema.types == types else pa.nulls(1)
        if keys.null_count + vectors.null_count + flat.null_count or not np.isfinite(values := flat.to_numpy()).all():
            problem = f"it does not hold a key and {stored.dimension} finite numbers per row"
            raise DataError(problem, file=str(path), remedy=COPY_FOLDER)
        own = np.frombuffer(keys.buffers()[1], dtype=f"S{KEY_BYTES}")[keys.offset : keys.offset + len(keys)]
        yield own, values.reshape(len(table), -1)
