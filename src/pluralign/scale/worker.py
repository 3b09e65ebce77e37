"""Worker."""

import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.errors import DataError, PluralignError
from pluralign.core.files import atomic_write
from pluralign.ensemble.ensemble import RewardEnsemble, read_description
from pluralign.features import encoder as encoders
from pluralign.features.frozen import TextFeatures
from pluralign.features.store import SHARD_FORMAT, shard_table
from pluralign.scale.shards import _items_of, _read_rows
from pluralign.votes.prompts import Item

BEGUN = "begun"


ATTEMPTS = 4
"""How often a shard is begun before it is held to be what kills its workers."""


ROWS_AT_ONCE = 8192
"""Rows of a shard in memory at a time."""


Transform: TypeAlias = Callable[[pa.Table, Sequence[Item]], pa.Table]


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
