"""Files of votes: the Parquet form, which is read back exactly, and JSON Lines in the wide layout."""

import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.arrays import IndexArray
from pluralign.core.errors import UsageError
from pluralign.core.files import atomic_write
from pluralign.votes.prompts import Message, Prompt

if TYPE_CHECKING:
    from pluralign.votes.preferences import PreferenceSet


# --- Tables of distinct texts, numbered by first appearance, and arrays of positions in them.


ObjectArray: TypeAlias = npt.NDArray[np.object_]


def object_array(values: Iterable[Any]) -> ObjectArray:
    """Return values as a one-dimensional array of objects."""
    if isinstance(values, np.ndarray) and values.dtype == object:
        return values
    values = list(values)
    array = np.empty(len(values), dtype=object)
    for position, value in enumerate(values):  # numpy would turn tuples of equal length into a matrix
        array[position] = value
    return array


def distinct(values: Sequence[Any]) -> tuple[list[Any], IndexArray]:
    """Return the distinct values by first appearance, and the position of each value among them.

    Example:
        >>> distinct(["tea", "rum", "tea"])
        (['tea', 'rum'], array([0, 1, 0], dtype=int32))
    """
    position: dict[Any, int] = {}
    index = np.fromiter((position.setdefault(value, len(position)) for value in values), np.int32, len(values))
    return list(position), index


def number_by_first_appearance(table: ObjectArray, index: npt.NDArray[Any]) -> tuple[ObjectArray, IndexArray]:
    """Keep the entries of ``table`` that ``index`` uses, in order of first use, and renumber ``index``.

    Raises:
        UsageError: the table holds a text twice, or an index is out of range.
    """
    if len(set(table)) != len(table):
        raise UsageError("texts given with indices must be distinct; use from_columns to have them merged.")
    if len(index) and not 0 <= index.min() <= index.max() < len(table):
        raise UsageError(f"indices must be between 0 and {len(table) - 1}.")
    first_use = np.full(len(table), len(index), dtype=np.int64)
    first_use[index[::-1]] = np.arange(len(index))[::-1]  # the last assignment to a place wins
    order = np.argsort(first_use, kind="stable")[: int((first_use < len(index)).sum())]
    number = np.empty(len(table), dtype=np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    return table[order], number[index].astype(np.int32)


SAVED_FORMATS = ("parquet", "jsonl", "jsonl.gz")
RESERVED_COLUMNS = ("prompt", "prompt_is_chat", "response_a", "response_b", "votes_a", "votes_b", "ties")
_METADATA_KEY = b"pluralign"


def is_saved_set(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a Parquet file written by ``PreferenceSet.save``."""
    try:
        with Path(path).open("rb") as stream:  # pyarrow opens no file whose name is not UTF-8
            return _METADATA_KEY in (pq.read_schema(stream).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def save(preferences: "PreferenceSet", path: str | os.PathLike[str]) -> None:
    """Write votes atomically, in the format of the file's suffix."""
    suffix = "".join(Path(path).suffixes[-2:] if str(path).endswith(".gz") else Path(path).suffixes[-1:])[1:]
    if suffix not in SAVED_FORMATS:
        raise UsageError(f"{path} must end in one of {', '.join('.' + known for known in SAVED_FORMATS)}.")
    with atomic_write(path) as partial:
        if suffix == "parquet":
            _write_parquet(preferences, partial)
            return
        opener = gzip.open if suffix.endswith("gz") else open
        with opener(partial, "wt", encoding="utf-8", newline="\n") as stream:
            for record in to_records(preferences):
                stream.write(json.dumps(record, ensure_ascii=False) + "\n")


def parquet_bytes(preferences: "PreferenceSet") -> bytes:
    """Return the contents of a Parquet file of ``save``."""
    sink = io.BytesIO()
    _write_parquet(preferences, sink)
    return sink.getvalue()


def _write_parquet(preferences: "PreferenceSet", target: Path | io.BytesIO) -> None:
    pq.write_table(
        to_table(preferences),
        target,
        compression="zstd",
        # One row group and one dictionary page per column, so that Parquet also stores each text once.
        row_group_size=max(len(preferences), 1),
        dictionary_pagesize_limit=2**30,
        write_page_checksum=True,
    )


def to_records(preferences: "PreferenceSet") -> Iterator[dict[str, Any]]:
    """Yield one dict per pair, in the wide layout."""
    columns = {name: values.tolist() for name, values in preferences.columns.items()}
    counts = preferences.votes_a.tolist(), preferences.votes_b.tolist(), preferences.ties.tolist()
    prompts = [Prompt(prompt).json for prompt in preferences.prompts]
    for row, (votes_a, votes_b, ties) in enumerate(zip(*counts, strict=True)):
        yield {
            "prompt": prompts[preferences.prompt_index[row]],
            "response_a": preferences.responses[preferences.a_index[row]],
            "response_b": preferences.responses[preferences.b_index[row]],
            "votes_a": votes_a,
            "votes_b": votes_b,
            "ties": ties,
            **{name: values[row] for name, values in columns.items()},
        }


def to_table(preferences: "PreferenceSet") -> pa.Table:
    """Return a wide Arrow table with one row per pair and dictionary-encoded texts."""
    chat = np.array([Prompt(prompt).is_chat for prompt in preferences.prompts], dtype=bool)
    prompts = pa.array([Prompt(prompt).key for prompt in preferences.prompts], pa.large_string())
    responses = pa.array(preferences.responses, pa.large_string())
    arrays: dict[str, pa.Array] = {"prompt": pa.DictionaryArray.from_arrays(preferences.prompt_index, prompts)}
    if chat.any():
        arrays["prompt_is_chat"] = pa.array(chat[preferences.prompt_index])
    arrays["response_a"] = pa.DictionaryArray.from_arrays(preferences.a_index, responses)
    arrays["response_b"] = pa.DictionaryArray.from_arrays(preferences.b_index, responses)
    arrays |= {name: pa.array(getattr(preferences, name)) for name in ("votes_a", "votes_b", "ties")}
    arrays |= {
        name: pa.array(values, from_pandas=values.dtype == object) for name, values in preferences.columns.items()
    }
    facts = {"tie_rule": preferences.tie_rule, "dropped": dict(preferences.dropped), "name": preferences.name}
    return pa.table(arrays, metadata={_METADATA_KEY: json.dumps(facts).encode()})


def from_table(table: pa.Table) -> dict[str, Any]:
    """Return the arguments of ``PreferenceSet.from_indices`` that give the set of a table of ``to_table``."""
    prompt_index, prompt_texts = _decode_dictionary(table["prompt"])
    a_index, a_texts = _decode_dictionary(table["response_a"])
    b_index, b_texts = _decode_dictionary(table["response_b"])
    responses, position = distinct([*a_texts, *b_texts])
    chat = np.zeros(len(prompt_index), dtype=np.int32)
    if "prompt_is_chat" in table.column_names:
        chat = table["prompt_is_chat"].to_numpy().astype(np.int32)
    # A chat and a text that equals its JSON are two prompts, so the flag is part of the key.
    keys, prompt_index = np.unique(prompt_index * 2 + chat, return_inverse=True)
    prompts = [
        tuple(Message(*turn) for turn in json.loads(prompt_texts[key // 2])) if key % 2 else prompt_texts[key // 2]
        for key in keys
    ]
    return {
        "prompts": prompts,
        "responses": responses,
        "prompt_index": prompt_index,
        "a_index": position[: len(a_texts)][a_index],
        "b_index": position[len(a_texts) :][b_index],
        "votes_a": table["votes_a"].to_numpy(),
        "votes_b": table["votes_b"].to_numpy(),
        "ties": table["ties"].to_numpy(),
        "columns": {name: _to_numpy(table[name]) for name in table.column_names if name not in RESERVED_COLUMNS},
        **json.loads((table.schema.metadata or {}).get(_METADATA_KEY, b"{}")),
    }


def concatenated_table(sets: "list[PreferenceSet]") -> pa.Table:
    """Return the rows of several sets in one table; a column that a set does not have is null in its rows."""
    tables = [_with_chat_column(to_table(preferences)) for preferences in sets]
    return pa.concat_tables(tables, promote_options="permissive")


def _decode_dictionary(column: pa.ChunkedArray) -> tuple[IndexArray, list[str]]:
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.large_string()).dictionary_encode()
    combined = column.unify_dictionaries().combine_chunks()
    if isinstance(combined, pa.ChunkedArray):  # no rows
        return np.empty(0, np.int32), []
    return combined.indices.to_numpy().astype(np.int32), combined.dictionary.to_pylist()


def _to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    if pa.types.is_large_string(column.type) or pa.types.is_string(column.type) or column.null_count == len(column):
        return object_array(column.to_pylist())
    return np.asarray(column.to_numpy())


def _with_chat_column(table: pa.Table) -> pa.Table:
    if "prompt_is_chat" in table.column_names:
        return table
    return table.append_column("prompt_is_chat", pa.array(np.zeros(len(table), dtype=bool)))
