"""Texts in shards: how a file is cut into Parquet shards, and what a worker does to one of them.

Decided here: what a shard may hold, and that its result is written whole, with vectors or rewards and nothing else
changed. Which worker does which shard, and what happens to those that are lost, is decided in ``scaling``.
"""

import hashlib
import itertools
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.errors import DataError, PluralignError, UsageError
from pluralign.core.files import atomic_write
from pluralign.ensemble.ensemble import RewardEnsemble, read_description
from pluralign.features import encoder as encoders
from pluralign.features.frozen import TextFeatures
from pluralign.features.store import SHARD_FORMAT, shard_name, shard_table
from pluralign.scale.lines import read_item
from pluralign.votes.builder import BadRows, RowError
from pluralign.votes.formats import read_records
from pluralign.votes.prompts import Item, Prompt

CHAT_COLUMN = "prompt_is_chat"
BEGUN = "begun"
ATTEMPTS = 4
"""How often a shard is begun before it is held to be what kills its workers."""
ROWS_AT_ONCE = 8192
"""Rows of a shard in memory at a time."""

Transform: TypeAlias = Callable[[pa.Table, Sequence[Item]], pa.Table]
Cut: TypeAlias = Callable[[Path], list[Path]]
"""Writes shards into a folder, or finds them elsewhere, and returns their paths in order."""


class Task(Protocol):
    """What is done to each shard."""

    def prepare(self) -> Transform:
        """Load what is needed, once a worker; return what turns rows and their texts into rows of the result."""
        ...


@dataclass(frozen=True)
class EncodeTask:
    """Texts become keys and vectors. No node's own cache is read or written: the shards are the cache."""

    features: TextFeatures

    def prepare(self) -> Transform:
        """Find the encoder, and refuse another one under the same name."""
        encoder = self.features.load_checked()

        def transform(_: pa.Table, items: Sequence[Item]) -> pa.Table:
            if not items:
                return shard_table([], np.empty((0, 1), np.float32))
            return shard_table(items, encoders.encode(items, encoder, surface=self.features.surface, cache=False))

        return transform


@dataclass(frozen=True)
class ScoreTask:
    """Rows keep their columns and get ``rewards``, one number a member."""

    ensemble: Path
    identity: str

    def prepare(self) -> Transform:
        """Load the ensemble, and refuse another one in the same place."""
        if ensemble_identity(read_description(self.ensemble)) != self.identity:
            remedy = "put it on storage that all nodes see, and do not change it meanwhile"
            raise DataError(
                "it is not the ensemble that the work was begun with", file=str(self.ensemble), remedy=remedy
            )
        loaded = RewardEnsemble.load(self.ensemble)
        rewards_of = loaded.scorer()

        def transform(rows: pa.Table, items: Sequence[Item]) -> pa.Table:
            if "rewards" in rows.column_names:
                raise DataError("the texts have a column rewards already", remedy="rename it")
            rewards = rewards_of(items) if items else np.empty((0, loaded.k))
            offsets = np.arange(0, rewards.size + 1, loaded.k, dtype=np.int32)
            return rows.append_column("rewards", pa.ListArray.from_arrays(offsets, rewards.reshape(-1)))

        return transform


def ensemble_identity(description: Mapping[str, Any]) -> str:
    """Return a hash of all that an ensemble's JSON says, the hash of its arrays included."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Worker:
    """Does shards one after the other; what it needs is loaded at the first one and stays."""

    task: Task
    plan: Path
    """The file that says which work this is: a worker that does not see it writes to another disk."""
    digest: str
    directory: Path
    """Where the driver runs: names of folders mean the same there and here."""

    @cached_property
    def _transform(self) -> Transform:
        if Path.cwd() != self.directory and self.directory.is_dir():
            os.chdir(self.directory)
        _refuse_unseen(self.plan)
        if hashlib.sha256(self.plan.read_bytes()).hexdigest() != self.digest:
            folder = str(self.plan.parent.parent)
            raise DataError("other work goes on in this folder", file=folder, remedy="name another folder")
        return self.task.prepare()

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Do the shards of a batch; Ray Data passes columns. What a user can mend comes back as a sentence."""
        problems = [self._attempt(*shard) for shard in zip(batch["shard"], batch["result"], strict=True)]
        return {"shard": [str(shard) for shard in batch["shard"]], "problem": problems}

    def _attempt(self, shard: str, result: str) -> str:
        try:
            self._do(Path(shard), Path(result))
        except PluralignError as error:
            return str(error)
        except OSError as error:
            return str(storage_error(error, Path(result)))
        return ""

    def _do(self, shard: Path, result: Path) -> None:
        transform = self._transform
        _refuse_unseen(shard)
        self._count_attempt(shard, result.name)
        with atomic_write(result) as partial, ExitStack() as stack:
            writer = None
            for first, rows in _read_rows(shard, ROWS_AT_ONCE):
                done = transform(rows, _items_of(rows, shard, first))
                if writer is None:
                    writer = stack.enter_context(pq.ParquetWriter(partial, done.schema, **SHARD_FORMAT))
                writer.write_table(done)

    def _count_attempt(self, shard: Path, name: str) -> None:
        """Refuse a shard that worker after worker began and none finished: an engine would try for ever."""
        begun = self.plan.parent / BEGUN
        begun.mkdir(exist_ok=True)
        for attempt in range(ATTEMPTS):
            with suppress(FileExistsError):
                (begun / f"{name}.{attempt}").touch(exist_ok=False)
                return
        raise DataError(
            f"{ATTEMPTS} workers died over it, perhaps for want of memory",
            file=str(shard),
            remedy="use fewer --workers or a smaller --shard-rows; finished shards are kept",
        )


def _refuse_unseen(path: Path) -> None:
    if not path.is_file():
        remedy = "the folders of texts and results must be on storage that all nodes see, under the same path"
        raise DataError(f"the worker on {socket.gethostname()} does not find it", file=str(path), remedy=remedy)


def storage_error(error: OSError, path: Path) -> DataError:
    """Return what to say of a disk that is full, read-only or gone."""
    remedy = "make room or mend the storage, and run the same command again"
    return DataError(f"it cannot be written ({error.strerror or error})", file=str(path), remedy=remedy)


def _read_rows(shard: Path, at_once: int) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of a file in parts, each with the number of its first row; an empty file is one empty part."""
    try:
        with pq.ParquetFile(shard, page_checksum_verification=True) as file:
            first = 1
            for batch in file.iter_batches(batch_size=at_once):
                yield first, pa.Table.from_batches([batch])
                first += len(batch)
            if first == 1:
                yield first, file.schema_arrow.empty_table()
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"the Parquet file cannot be read ({error})", file=str(shard), remedy="write or fetch it again"
        ) from None


def _items_of(rows: pa.Table, file: Path, first: int) -> list[Item]:
    """Return the texts of rows of {prompt, response}; a chat is a list of messages, or their JSON and a flag."""
    for name in ("prompt", "response"):
        if name not in rows.column_names:
            found = ", ".join(rows.column_names)
            raise DataError(f"there is no column {name}, only {found}", file=str(file), remedy="rename the column")
    bad = BadRows(str(file), can_skip=False)
    columns = [name for name in ("prompt", "response", CHAT_COLUMN) if name in rows.column_names]
    items: list[Item] = []
    for row, record in enumerate(rows.select(columns).to_pylist(), first):
        try:
            if record.get(CHAT_COLUMN):
                record["prompt"] = [{"role": role, "content": text} for role, text in json.loads(record["prompt"])]
            items.append(read_item(record))
        except RowError as error:
            bad.report(row, error)
        except (TypeError, ValueError):
            bad.report(row, RowError("not JSON", "the chat is not JSON of [role, content] turns", "write it anew"))
    return items


# --- cutting --------------------------------------------------------------------------------------------------------


def cut_items(items: Sequence[Item], target: Path, rows: int) -> list[Path]:
    """Write texts into shards of so many rows, and return their paths in order."""
    starts = range(0, len(items), rows)
    return [_write_shard(_table_of(items[start : start + rows]), target, n) for n, start in enumerate(starts)]


def _table_of(items: Sequence[Item]) -> pa.Table:
    return pa.table(
        {
            "prompt": pa.array([Prompt(prompt).key for prompt, _ in items], pa.large_string()),
            CHAT_COLUMN: pa.array([Prompt(prompt).is_chat for prompt, _ in items]),
            "response": pa.array([response for _, response in items], pa.large_string()),
        }
    )


def cut_file(path: Path, target: Path, rows: int) -> list[Path]:
    """Cut a file into shards with its columns; every row is checked here, where its number is known."""
    with path.open("rb") as stream:
        is_parquet = stream.read(4) == b"PAR1"
    if not is_parquet:
        return _one_schema([_write_shard(table, target, n) for n, table in enumerate(_tables(path, rows))], path)
    parts = []
    for number, (first, table) in enumerate(_read_rows(path, rows)):
        _items_of(table, path, first)
        parts.append(_write_shard(table, target, number))
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
        raise _mixed(f"column {name} holds values of several types", path) from None


def _one_schema(parts: list[Path], path: Path) -> list[Path]:
    """Give all shards the columns and types of all: one may lack a column, or have whole numbers for fractions."""
    schemas = [pq.read_schema(part) for part in parts]
    try:
        common = pa.unify_schemas(schemas or [pa.schema([])], promote_options="permissive")
    except pa.ArrowException as error:
        raise _mixed(f"a column changes its type from shard to shard ({error})", path) from None
    for number, (part, schema) in enumerate(zip(parts, schemas, strict=True)):
        if not schema.equals(common):
            tables = [common.empty_table(), pq.read_table(part)]
            _write_shard(pa.concat_tables(tables, promote_options="permissive"), part.parent, number)
    return parts


def _mixed(problem: str, path: Path) -> DataError:
    return DataError(problem, file=str(path), remedy="give each column one type, or leave it out")


def _write_shard(table: pa.Table, target: Path, number: int) -> Path:
    with atomic_write(target / shard_name(number)) as partial:
        pq.write_table(table, partial, compression="zstd", write_page_checksum=True)
    return target / shard_name(number)


def find_shards(texts: Path, folder: Path) -> tuple[str, Cut]:
    """Return the fingerprint of a folder of shards, and what finds them: they are used where they are."""
    texts = texts.absolute()
    parts = sorted(path for path in texts.glob("*.parquet") if not path.name.startswith((".", "_")))
    if not parts:
        raise DataError("there is no Parquet file in it", file=str(texts), remedy="name a folder of Parquet shards")
    if folder.resolve() == texts.resolve():
        raise UsageError(f"the results cannot go into {folder}, where the texts are: name another folder.")
    stats = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in parts]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest(), lambda _: parts
