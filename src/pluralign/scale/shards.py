"""Shards: texts are cut into Parquet files, and a worker encodes or scores one after the other.

Decided here: the columns and types of a shard, what is done to it, and that its result is written atomically, so that
doing a shard twice is harmless. ``jobs`` writes the plan and decides which shards are left to do; a worker needs only
the path of the plan, so that it runs on any node that sees the folder.
"""

import hashlib
import itertools
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.checkpoints import fingerprint
from pluralign.core.errors import DataError, PluralignError, UsageError
from pluralign.core.files import atomic_write, file_sha256
from pluralign.core.json_values import Value, from_json
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import description_hash, read_description
from pluralign.scale.lines import read_item
from pluralign.text.encoders import TextFeatures, encode
from pluralign.text.store import SHARD_FORMAT, item_keys, shard_name, shard_table
from pluralign.votes.builder import BadRows
from pluralign.votes.formats import file_records
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.prompts import Item, Prompt
from pluralign.votes.values import RowError

CHAT_COLUMN = "prompt_is_chat"
"""Whether a prompt is a chat, stored as the JSON of its messages."""
ATTEMPTS_FOLDER = "begun"
MAX_ATTEMPTS = 4
"""How many workers may start a shard before it counts as the cause of their deaths."""
ROWS_IN_MEMORY = 2048
"""Rows of a shard that are in memory at a time."""

Transform: TypeAlias = Callable[[pa.Table, Sequence[Item]], pa.Table]
"""Turns rows, and the texts read from them, into rows of the result."""


@dataclass(frozen=True)
class Plan:
    """The contents of ``plan.json``: everything that a worker needs to know."""

    settings: Mapping[str, Any]
    """Everything that the results depend on. Another job with other settings is rejected in the same folder."""
    task: Mapping[str, Any]
    """What is done to each shard: the arguments of ``encoding`` or of ``scoring``."""
    results: str
    """Folder of the result files."""
    shards: list[str]
    """The files of texts, in order."""

    def rows(self, number: int) -> int:
        """Return the number of rows of a shard; 0 if it cannot be read, which its worker will report."""
        try:
            return int(pq.read_metadata(self.shards[number]).num_rows)
        except (OSError, pa.ArrowException):
            return 0

    def todo(self) -> list[int]:
        """Return the numbers of the shards that have no result yet."""
        done = finished_results(Path(self.results))
        return [number for number in range(len(self.shards)) if shard_name(number) not in done]


def read_stored(kind: type[Value], path: Path) -> Value:
    """Return a dataclass that is stored as JSON. Raises DataError if the file is damaged."""
    try:
        return from_json(kind, json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError):
        problem = "it is damaged, or another program wrote it"
        raise DataError(problem, file=str(path), remedy="name an empty folder") from None


def finished_results(folder: Path) -> set[str]:
    """Return the names of the result files in a folder, from one listing: single checks are slow on network storage."""
    return {path.name for path in folder.glob("part-*.parquet")}


@dataclass(frozen=True)
class Worker:
    """Does shards one after the other. Everything they need is loaded at the first shard and kept."""

    plan_file: Path
    """A worker that cannot see this file would write to another disk."""
    plan_hash: str
    advance: Callable[[int], None] = field(default=lambda _: None, kw_only=True)
    """Called with the number of texts done; workers of another process have none."""

    def __call__(self, number: int) -> str:
        """Do the shard with this number. Return the problem, if the user can fix it, else an empty string."""
        try:
            _check_visible(self.plan_file)
            self._do(number)
        except PluralignError as error:
            return str(error)
        except OSError as error:
            return str(storage_error(error, self.plan_file.parents[1]))
        return ""

    @cached_property
    def plan(self) -> Plan:
        """The plan of the job. Raises DataError if it is another one than when the job started."""
        if fingerprint(self.plan_file.read_bytes()) != self.plan_hash:
            folder = str(self.plan_file.parents[1])
            raise DataError("another job runs in this folder", file=folder, remedy="name another folder")
        return read_stored(Plan, self.plan_file)

    @cached_property
    def transform(self) -> Transform:
        """The function that transforms rows; the encoder or the ensemble is loaded for it."""
        return encoding(**self.plan.task) if "features" in self.plan.task else scoring(**self.plan.task)

    def _do(self, number: int) -> None:
        texts, result = Path(self.plan.shards[number]), Path(self.plan.results) / shard_name(number)
        transform = self.transform
        _check_visible(texts)
        self._count_attempt(texts, result.name)
        with atomic_write(result) as partial, ExitStack() as stack:
            writer = None
            for first, rows in read_rows(texts, ROWS_IN_MEMORY):
                done = transform(rows, read_items(rows, texts, first))
                if writer is None:
                    writer = stack.enter_context(pq.ParquetWriter(partial, done.schema, **SHARD_FORMAT))
                writer.write_table(done)
                self.advance(len(rows))

    def _count_attempt(self, texts: Path, name: str) -> None:
        """Raise DataError if too many workers have started this shard: an engine would retry it for ever."""
        attempts = self.plan_file.parent / ATTEMPTS_FOLDER
        attempts.mkdir(exist_ok=True)
        for attempt in range(MAX_ATTEMPTS):
            with suppress(FileExistsError):
                (attempts / f"{name}.{attempt}").touch(exist_ok=False)
                return
        problem = f"{MAX_ATTEMPTS} workers died while they worked on it, perhaps for lack of memory"
        remedy = "use fewer --workers or a smaller --shard-rows; finished shards are kept"
        raise DataError(problem, file=str(texts), remedy=remedy)


# --- what is done to a shard ------------------------------------------------------------------------------------------


def encoding(features: Mapping[str, Any]) -> Transform:
    """Return the function that turns texts into keys and vectors. It does not use the vector cache of the node.

    Args:
        features: the JSON of ``TextFeatures``. Raises DataError for another encoder with the same name.
    """
    chosen = TextFeatures.from_json(features)
    encoder = chosen.load_checked()

    def transform(_: pa.Table, items: Sequence[Item]) -> pa.Table:
        if not items:
            return shard_table([], np.empty((0, 1), np.float32))
        return shard_table(items, encode(items, encoder, surface=chosen.surface, cache=False))

    return transform


def scoring(ensemble: str, identity: str) -> Transform:
    """Return the function that adds a column ``rewards`` to the rows: one number per member.

    Args:
        ensemble: folder of the ensemble.
        identity: its ``description_hash``. Raises DataError if the ensemble was
            changed during the job.
    """
    if description_hash(read_description(Path(ensemble))) != identity:
        remedy = "put it on storage that all nodes share, and do not change it during the job"
        raise DataError("it is not the ensemble that the job started with", file=ensemble, remedy=remedy)
    loaded = RewardEnsemble.load(ensemble)
    rewards_of = loaded.scorer()

    def transform(rows: pa.Table, items: Sequence[Item]) -> pa.Table:
        if "rewards" in rows.column_names:
            raise DataError("the texts already have a column rewards", remedy="rename it")
        rewards = rewards_of(items) if items else np.empty((0, loaded.k))
        offsets = np.arange(0, rewards.size + 1, loaded.k, dtype=np.int32)
        return rows.append_column("rewards", pa.ListArray.from_arrays(offsets, rewards.reshape(-1)))

    return transform


# --- the texts of a job -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """The texts of a job, and how they become shards."""

    hash: str
    """Identifies the texts. A job resumes only with the same hash."""
    cut: Callable[[Path], list[Path]]
    """Writes shards into a folder, or lists existing ones, and returns their paths in order."""
    shard_rows: int | None
    """Texts per shard; None if the shards exist already."""


def vote_texts(votes: PreferenceSet, rows: int) -> Texts:
    """Return the distinct texts of votes, as shards with this number of rows."""
    items = texts_of(votes)

    def cut(folder: Path) -> list[Path]:
        prompts = [Prompt(prompt) for prompt, _ in items]
        keys = pa.array([prompt.key for prompt in prompts], pa.large_string())
        responses = pa.array([response for _, response in items], pa.large_string())
        is_chat = pa.array([prompt.is_chat for prompt in prompts])
        columns = {"prompt": keys, CHAT_COLUMN: is_chat, "response": responses}
        starts = range(0, len(items), rows)
        return [_write_shard(pa.table(columns).slice(start, rows), folder, n) for n, start in enumerate(starts)]

    return Texts(hashlib.sha256(item_keys(items).tobytes()).hexdigest(), cut, rows)


def file_texts(path: Path, rows: int) -> Texts:
    """Return the texts of a file, as shards with its columns and this number of rows."""
    if not path.is_file():
        raise UsageError(f"there is no file or folder {path}.")
    return Texts(file_sha256(path), lambda folder: _cut_file(path, folder, rows), rows)


def existing_shards(folder: Path, results: Path) -> Texts:
    """Return the texts in the Parquet files of a folder. They are used in place.

    Args:
        folder: the folder of Parquet files.
        results: the folder of the job's results, which must be another one.
    """
    folder = folder.absolute()
    parts = sorted(path for path in folder.glob("*.parquet") if not path.name.startswith((".", "_")))
    if not parts:
        raise DataError("there is no Parquet file in it", file=str(folder), remedy="name a folder of Parquet shards")
    if results.resolve() == folder.resolve():
        raise UsageError(f"the results cannot be written to {results}, the folder of the texts: name another folder.")
    stats = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in parts]
    return Texts(fingerprint(stats), lambda _: parts, shard_rows=None)


# --- cutting ----------------------------------------------------------------------------------------------------------


def _cut_file(path: Path, folder: Path, rows: int) -> list[Path]:
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
    records = file_records(path, bad)
    while part := list(itertools.islice(records, rows)):
        plain = []
        for row, record in part:
            with bad.row(row):
                prompt, response = read_item(record)
                is_chat = {CHAT_COLUMN: True} if Prompt(prompt).is_chat else {}
                plain.append({**record, "prompt": Prompt(prompt).key, "response": response, **is_chat})
        names = dict.fromkeys(name for line in plain for name in line)
        yield pa.table({name: _array([line.get(name) for line in plain], name, path) for name in names})


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
        problem = f"the Parquet file cannot be read ({error})"
        raise DataError(problem, file=str(path), remedy="write or download it again") from None


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


# --- errors -----------------------------------------------------------------------------------------------------------


def _check_visible(path: Path) -> None:
    if not path.is_file():
        remedy = "put the folders of texts and results on storage that all nodes share, under the same path"
        raise DataError(f"the worker on {socket.gethostname()} cannot see it", file=str(path), remedy=remedy)


def storage_error(error: OSError, path: Path) -> DataError:
    """Return the error for a disk that is full, read-only or missing."""
    remedy = "free some space or repair the storage, and run the same command again"
    return DataError(f"it cannot be written ({error.strerror or error})", file=str(path), remedy=remedy)
