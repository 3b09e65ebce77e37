"""Features on disk, written by ``pluralign encode``: Parquet shards of keys and vectors, and what made them.

Decided here: the form of a folder of features, and how the vectors of given texts are found in it without holding all
of them in memory. Who writes the shards, and on how many machines, is decided in ``scaling``.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.arrays import Vectors
from pluralign.core.errors import DataError
from pluralign.features.cache import vector_key
from pluralign.features.frozen import TextFeatures
from pluralign.votes.prompts import Item, text_key

Keys: TypeAlias = npt.NDArray[np.bytes_]

FEATURES_FILE = "features.json"
VECTORS_FOLDER = "vectors"
FORMAT = "pluralign-features"
FORMAT_VERSION = 1
KEY_BYTES = 16
SHARD_FORMAT = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
"""How ``pyarrow`` writes a shard: a byte that changes later is noticed when it is read."""


def item_keys(items: Iterable[Item]) -> Keys:
    """Return the key of each text, ``(n_items,)``: the 16 bytes that the cache of vectors has it under."""
    return np.frombuffer(b"".join(vector_key(text_key(*item)) for item in items), dtype=f"S{KEY_BYTES}")


def shard_table(items: Sequence[Item], vectors: Vectors) -> pa.Table:
    """Return what one shard of ``vectors/`` holds: a row a text, with its key and its vector.

    Example:
        >>> shard_table([("Tea?", "Yes.")], np.ones((1, 3), np.float32)).schema.types
        [FixedSizeBinaryType(fixed_size_binary[16]), FixedSizeListType(fixed_size_list<item: float>[3])]
    """
    keys = pa.Array.from_buffers(pa.binary(KEY_BYTES), len(items), [None, pa.py_buffer(item_keys(items).tobytes())])
    flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
    return pa.table({"key": keys, "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])})


def read_features_file(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what ``features.json`` says, checked to be ours."""
    path = Path(folder) / FEATURES_FILE
    if not path.is_file():
        half_done = Path(folder).is_dir() and any(Path(folder).iterdir())
        remedy = "run the same pluralign encode again to its end" if half_done else "check the path"
        raise DataError(f"there is no {FEATURES_FILE} in it", file=str(folder), remedy=remedy)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        remedy = "name a folder that pluralign encode wrote"
        raise DataError("it does not describe features", file=str(path), remedy=remedy)
    if facts["format_version"] > FORMAT_VERSION:
        raise DataError("it was written by a newer Pluralign", file=str(path), remedy="upgrade pluralign")
    return facts


def stored_features(
    folder: str | os.PathLike[str],
    items: Sequence[Item],
    text_features: TextFeatures,
    scratch: Path | None = None,
    only: slice = slice(None),
) -> Vectors:
    """Return the features of texts from a folder that ``pluralign encode`` wrote, ``(n_items, dimension)``.

    Shards are read one after the other, so that beside the result only one of them is in memory.

    Args:
        folder: what ``pluralign encode -o`` named.
        items: the texts wanted, in the order wanted; a text may be there twice.
        text_features: what the features must have been made with.
        scratch: a file for the result, which is then mapped to memory and read from disk as it is used.
        only: the items that this process needs; the rows of others stay zero, and take no room on disk.

    Example:
        >>> stored_features("nowhere", [("Tea?", "Yes.")], TextFeatures("hashing"))
        Traceback (most recent call last):
        pluralign.errors.DataError: nowhere: there is no features.json in it; check the path.
    """
    folder = Path(folder)
    facts = read_features_file(folder)
    _refuse_other_features(folder, facts, text_features)
    shape = len(items), int(facts["dimension"])
    if scratch is None or not len(items):
        features = np.zeros(shape, dtype=np.float32)
    else:
        scratch.parent.mkdir(parents=True, exist_ok=True)
        features = np.memmap(scratch, dtype=np.float32, mode="w+", shape=shape)
    first, last, _ = only.indices(len(items))
    wanted = item_keys(items[first:last])
    order = np.argsort(wanted, kind="stable")
    ordered = wanted[order]
    missing = np.ones(len(wanted), dtype=bool)
    for keys, vectors in _shards(folder, facts):
        left, right = np.searchsorted(ordered, keys, "left"), np.searchsorted(ordered, keys, "right")
        count = right - left
        # Row r of the shard is wanted at order[left[r]], …, order[right[r] - 1]: these ranges one after the other.
        places = order[np.repeat(left - np.cumsum(count) + count, count) + np.arange(count.sum())]
        features[first + places] = np.repeat(vectors, count, axis=0)
        missing[places] = False
    if absent := int(missing.sum()):
        problem = f"{absent:,} of {len(wanted):,} texts are not in it"
        raise DataError(problem, file=str(folder), remedy="run pluralign encode on these votes")
    return features


def _refuse_other_features(folder: Path, facts: dict[str, Any], text_features: TextFeatures) -> None:
    encoder = text_features.load_checked()
    identity = encoder.identity if encoder else ""
    if identity != facts["identity"]:
        theirs = " ".join(str(facts[name]) for name in ("encoder", "layer", "pooling") if facts[name] is not None)
        raise DataError(
            f"its vectors are those of {theirs} ({facts['identity'] or 'no encoder'}), not of {text_features.encoder} "
            f"({identity or 'no encoder'})",
            file=str(folder),
            remedy="name the same encoder, layer, pooling and precision, or encode anew",
        )
    if text_features.surface != facts["surface"]:
        has = "has" if facts["surface"] else "lacks"
        remedy = f"use --{'' if facts['surface'] else 'no-'}surface here too, or encode anew"
        raise DataError(f"it {has} surface features", file=str(folder), remedy=remedy)


def _shards(folder: Path, facts: dict[str, Any]) -> Iterator[tuple[Keys, Vectors]]:
    """Yield the keys and vectors of each shard; a shard that is damaged or not there is a ``DataError``."""
    for number in range(facts["shards"]):
        path = folder / VECTORS_FOLDER / shard_name(number)
        try:
            table = pq.read_table(path, columns=["key", "vector"], page_checksum_verification=True)
            keys, vectors = table["key"].combine_chunks(), table["vector"].combine_chunks()
        except (OSError, KeyError, pa.ArrowException) as error:
            problem = "it is missing" if isinstance(error, FileNotFoundError) else f"it cannot be read ({error})"
            raise DataError(problem, file=str(path), remedy="copy the whole folder again, or encode anew") from None
        if len(table):
            found = np.frombuffer(keys.buffers()[1], dtype=f"S{KEY_BYTES}")[keys.offset : keys.offset + len(keys)]
            yield found, vectors.flatten().to_numpy().reshape(len(table), -1)


def shard_name(number: int) -> str:
    """Return the file name of a shard.

    Example:
        >>> shard_name(7)
        'part-00007.parquet'
    """
    return f"part-{number:05d}.parquet"
