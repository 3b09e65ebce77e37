"""The worker: encodes or scores one shard after the other.

Decided here: what is done to a shard, and that its result is written atomically, so that doing a shard twice is
harmless. ``run`` decides which shards are left to do, and an engine decides where workers run.
"""

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.checkpoints import fingerprint
from pluralign.core.errors import DataError, PluralignError
from pluralign.core.files import atomic_write
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import description_hash, read_description
from pluralign.scale.shards import read_items, read_rows
from pluralign.text import encoders
from pluralign.text.features import TextFeatures
from pluralign.text.store import SHARD_FORMAT, shard_table
from pluralign.votes.prompts import Item

ATTEMPTS_FOLDER = "begun"
MAX_ATTEMPTS = 4
"""How many workers may start a shard before it counts as the cause of their deaths."""
ROWS_IN_MEMORY = 8192
"""Rows of a shard that are in memory at a time."""

Transform: TypeAlias = Callable[[pa.Table, Sequence[Item]], pa.Table]
"""Turns rows, and the texts read from them, into rows of the result."""


@dataclass(frozen=True)
class Shard:
    """One unit of work: a file of texts and the file of its result."""

    texts: str
    result: str


@dataclass(frozen=True)
class Outcome:
    """The outcome of one shard."""

    shard: str
    """The file of texts."""
    problem: str = ""
    """The error message, for errors that the user can fix; empty if the result was written."""


class Task(Protocol):
    """What is done to each shard."""

    def prepare(self) -> Transform:
        """Load everything needed, once per worker, and return the function that transforms rows."""
        ...


@dataclass(frozen=True)
class EncodeTask:
    """Turns texts into keys and vectors. It does not use the vector cache of the node."""

    features: TextFeatures

    def prepare(self) -> Transform:
        """Load the encoder. Raises DataError if it is another one with the same name."""
        encoder = self.features.load_checked()

        def transform(_: pa.Table, items: Sequence[Item]) -> pa.Table:
            if not items:
                return shard_table([], np.empty((0, 1), np.float32))
            return shard_table(items, encoders.encode(items, encoder, surface=self.features.surface, cache=False))

        return transform


@dataclass(frozen=True)
class ScoreTask:
    """Adds a column ``rewards`` to the rows: one number per member."""

    ensemble: Path
    identity: str
    """See ``folder.description_hash``."""

    def prepare(self) -> Transform:
        """Load the ensemble. Raises DataError if it is not the one that the job started with."""
        if description_hash(read_description(self.ensemble)) != self.identity:
            raise DataError(
                "it is not the ensemble that the job started with",
                file=str(self.ensemble),
                remedy="put it on storage that all nodes share, and do not change it during the job",
            )
        loaded = RewardEnsemble.load(self.ensemble)
        rewards_of = loaded.scorer()

        def transform(rows: pa.Table, items: Sequence[Item]) -> pa.Table:
            if "rewards" in rows.column_names:
                raise DataError("the texts already have a column rewards", remedy="rename it")
            rewards = rewards_of(items) if items else np.empty((0, loaded.k))
            offsets = np.arange(0, rewards.size + 1, loaded.k, dtype=np.int32)
            return rows.append_column("rewards", pa.ListArray.from_arrays(offsets, rewards.reshape(-1)))

        return transform


@dataclass(frozen=True)
class Worker:
    """Does shards one after the other. Everything the task needs is loaded at the first shard and kept."""

    task: Task
    plan: Path
    """The plan of the job. A worker that cannot see this file would write to another disk."""
    plan_hash: str

    def __call__(self, shard: Shard) -> Outcome:
        """Do a shard. An error that the user can fix is returned as the outcome; others are raised."""
        try:
            self._do(Path(shard.texts), Path(shard.result))
        except PluralignError as error:
            return Outcome(shard.texts, str(error))
        except OSError as error:
            return Outcome(shard.texts, str(storage_error(error, Path(shard.result))))
        return Outcome(shard.texts)

    @cached_property
    def _transform(self) -> Transform:
        _check_visible(self.plan)
        if fingerprint(self.plan.read_bytes()) != self.plan_hash:
            folder = str(self.plan.parent.parent)
            raise DataError("another job runs in this folder", file=folder, remedy="name another folder")
        return self.task.prepare()

    def _do(self, texts: Path, result: Path) -> None:
        transform = self._transform
        _check_visible(texts)
        self._count_attempt(texts, result.name)
        with atomic_write(result) as partial, ExitStack() as stack:
            writer = None
            for first, rows in read_rows(texts, ROWS_IN_MEMORY):
                done = transform(rows, read_items(rows, texts, first))
                if writer is None:
                    writer = stack.enter_context(pq.ParquetWriter(partial, done.schema, **SHARD_FORMAT))
                writer.write_table(done)

    def _count_attempt(self, texts: Path, name: str) -> None:
        """Raise DataError if too many workers have started this shard: an engine would retry it for ever."""
        attempts = self.plan.parent / ATTEMPTS_FOLDER
        attempts.mkdir(exist_ok=True)
        for attempt in range(MAX_ATTEMPTS):
            with suppress(FileExistsError):
                (attempts / f"{name}.{attempt}").touch(exist_ok=False)
                return
        raise DataError(
            f"{MAX_ATTEMPTS} workers died while they worked on it, perhaps for lack of memory",
            file=str(texts),
            remedy="use fewer --workers or a smaller --shard-rows; finished shards are kept",
        )


def _check_visible(path: Path) -> None:
    if not path.is_file():
        raise DataError(
            f"the worker on {socket.gethostname()} cannot see it",
            file=str(path),
            remedy="put the folders of texts and results on storage that all nodes share, under the same path",
        )


def storage_error(error: OSError, path: Path) -> DataError:
    """Return the error for a disk that is full, read-only or missing."""
    remedy = "free some space or repair the storage, and run the same command again"
    return DataError(f"it cannot be written ({error.strerror or error})", file=str(path), remedy=remedy)
