"""Shards of texts: cutting a file into Parquet shards, and reading their rows.

Decided here: the columns and types of a shard. ``worker`` does the work on a shard, ``run`` decides which shards are
left to do.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.checkpoints import fingerprint
from pluralign.core.errors import DataError, UsageError
from pluralign.core.files import atomic_write
from pluralign.scale.lines import read_item
from pluralign.text.store import shard_name
from pluralign.votes.builder import BadRows, RowError
from pluralign.votes.formats import read_records
from pluralign.votes.prompts import Item, Prompt

CHAT_COLUMN = "prompt_is_chat"
"""Whether a prompt is a chat, stored as the JSON of its messages."""

Cut: TypeAlias = Callable[[Path], list[Path]]
"""Writes shards into a folder, or lists existing ones, and returns their paths in order."""


@dataclass(frozen=True)
class Source:
    """The texts of a job."""

    hash: str
    """Identifies the texts. A job resumes only with the same hash."""
    cut: Cut
    shard_rows: int | None
    """Texts per shard; None if the shards exist already."""


# --- reading ----------------------------------------------------------------------------------------------------------


def read_rows(path: Path, n: int) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of a Parquet file, n at a time, each part with the number of its first row.

    An empty file is one empty part.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            first = 1
            for batch in file.iter_batches(batch_size=n):
                yield first, pa.Table.from_batches([batch])
                first += len(batch)
            if first == 1:
                yield first, file.schema_arrow.empty_table()
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"the Parquet file cannot be read ({error})", file=str(path), remedy="write or download it again"
        ) from None


def read_items(rows: pa.Table, file: Path, first: int) -> list[Item]:
    """Return the texts of rows of {prompt, response}. A chat is a list of messages, or their JSON with a flag.

    Args:
        rows: the rows.
        file: the file they come from, for error messages.
        first: number of the first row, for error messages.
    """
    for name in ("prompt", "response"):
        if name not in rows.column_names:
            columns = ", ".join(rows.column_names)
            raise DataError(f"there is no column {name}, only {columns}", file=str(file), remedy="rename the column")
    bad = BadRows(str(file), can_skip=False)
    names = [name for name in ("prompt", "response", CHAT_COLUMN) if name in rows.column_names]
    items: list[Item] = []
    for row, record in enumerate(rows.select(names).to_pylist(), first):
        try:
            if record.get(CHAT_COLUMN):
                record["prompt"] = [{"role": role, "content": text} for role, text in json.loads(record["prompt"])]
            items.append(read_item(record))
        except RowError as error:
            bad.report(row, error)
        except (TypeError, ValueError):
            bad.report(row, RowError("not JSON", "the chat is not JSON of [role, content] turns", "write it again"))
    return items


# --- cutting ----------------------------------------------------------------------------------------------------------


def cut_items(items: Sequence[Item], folder: Path, rows: int) -> list[Path]:
    """Write texts into shards with this number of rows, and return their paths in order."""
    starts = range(0, len(items), rows)
    return [_write_shard(_table_of(items[start : start + rows]), folder, n) for n, start in enumerate(starts)]


def _table_of(items: Sequence[Item]) -> pa.Table:
    return pa.table(
        {
            "prompt": pa.array([Prompt(prompt).key for prompt, _ in items], pa.large_string()),
            CHAT_COLUMN: pa.array([Prompt(prompt).is_chat for prompt, _ in items]),
            "response": pa.array([response for _, response in items], pa.large_string()),
        }
    )


def cut_file(path: Path, folder: Path, rows: int) -> list[Path]:
    """Cut a file into shards with its columns. Every row is checked here, where its number is known."""
    with path.open("rb") as stream:
        is_parquet = stream.read(4) == b"PAR1"
    if not is_parquet:
        return _with_one_schema([_write_shard(table, folder, n) for n, table in enumerate(_tables(path, rows))], path)
    parts = []
    for number, (first, table) in enumerate(read_rows(path, rows)):
        read_items(table, path, first)
        parts.append(_write_shard(table, folder, number))
    return parts


def _tables(path: Path, rows: int) -> Iterator[pa.Table]:
    bad = BadRows(str(path), can_skip=False)
    with path.open("rb") as stream:
        records = read_records(stream, bad)
        while part := list(itertools.islice(records, rows)):
            columns: dict[str, list[Any]] = {name: [] for name in dict.fromkeys(n for _, line in part for n in line)}
            chats = []
            for row, record in part:
                try:
                    prompt, response = read_item(record)
                except RowError as error:
                    bad.report(row, error)
                plain = dict(record) | {"prompt": Prompt(prompt).key, "response": response}
                chats.append(Prompt(prompt).is_chat)
                for name, values in columns.items():
                    values.append(plain.get(name))
            arrays = {name: _array(values, name, path) for name, values in columns.items()}
            yield pa.table(arrays | ({CHAT_COLUMN: pa.array(chats)} if any(chats) else {}))


def _array(values: list[Any], name: str, path: Path) -> pa.Array:
    try:
        return pa.array(values)
    except pa.ArrowException:
        raise _mixed_types(f"column {name} holds values of several types", path) from None


def _with_one_schema(parts: list[Path], path: Path) -> list[Path]:
    """Give all shards the same columns and types: one may lack a column, or have integers instead of floats."""
    schemas = [pq.read_schema(part) for part in parts]
    try:
        common = pa.unify_schemas(schemas or [pa.schema([])], promote_options="permissive")
    except pa.ArrowException as error:
        raise _mixed_types(f"a column has different types in different shards ({error})", path) from None
    for number, (part, schema) in enumerate(zip(parts, schemas, strict=True)):
        if not schema.equals(common):
            tables = [common.empty_table(), pq.read_table(part)]
            _write_shard(pa.concat_tables(tables, promote_options="permissive"), part.parent, number)
    return parts


def _mixed_types(problem: str, path: Path) -> DataError:
    return DataError(problem, file=str(path), remedy="give each column one type, or leave it out")


def _write_shard(table: pa.Table, folder: Path, number: int) -> Path:
    with atomic_write(folder / shard_name(number)) as partial:
        pq.write_table(table, partial, compression="zstd", write_page_checksum=True)
    return folder / shard_name(number)


def existing_shards(texts: Path, results: Path) -> Source:
    """Return the Parquet files of a folder as the texts of a job. They are used in place.

    Args:
        texts: the folder of Parquet files.
        results: the folder of the job's results, which must be another one.
    """
    texts = texts.absolute()
    parts = sorted(path for path in texts.glob("*.parquet") if not path.name.startswith((".", "_")))
    if not parts:
        raise DataError("there is no Parquet file in it", file=str(texts), remedy="name a folder of Parquet shards")
    if results.resolve() == texts.resolve():
        raise UsageError(f"the results cannot be written to {results}, the folder of the texts: name another folder.")
    stats = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in parts]
    return Source(fingerprint(stats), lambda _: parts, shard_rows=None)
