"""Running a job: cut the texts into shards, do the shards that are left, and describe the results.

Resuming: a shard is done if its result file exists, because result files are written atomically. No other record of
progress is needed. A lost worker costs the shard it was working on, and the same call does the shards that are left.
The plan, ``.unfinished/plan.json``, fixes the shards and the settings of the job. The description of the results is
written last; where it exists, the job is done.
"""

import json
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import pyarrow.parquet as pq

from pluralign.core.checkpoints import changed_inputs, fingerprint
from pluralign.core.errors import DataError, PluralignError
from pluralign.core.files import atomic_write
from pluralign.core.types import Progress
from pluralign.scale.options import EngineOptions
from pluralign.scale.shards import Cut
from pluralign.scale.worker import ATTEMPTS_FOLDER, Outcome, Shard, Task, Worker, storage_error
from pluralign.text.store import shard_name

UNFINISHED = ".unfinished"
PLAN_FILE = "plan.json"
HASHES = ("texts", "ensemble", "identity")
"""Settings that are hashes, which mean nothing to a reader."""

Settings: TypeAlias = Mapping[str, Any]
"""Everything that the results of a job depend on, as JSON values by name."""
Engine: TypeAlias = Callable[[Worker, Sequence[Shard], EngineOptions], Generator[Outcome]]


@dataclass(frozen=True)
class Shape:
    """Numbers read from the result files."""

    rows: int
    shards: int
    dimension: int
    """Length of a vector; 0 for results without vectors."""


class Description(Protocol):
    """The description of the results of a finished job."""

    @property
    def shards(self) -> int:
        """Number of result files."""
        ...

    @property
    def settings(self) -> Settings:
        """The settings of the job."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the file."""
        ...


D = TypeVar("D", bound=Description)


@dataclass(frozen=True)
class Job(Generic[D]):
    """One call of ``encode`` or ``score``."""

    folder: Path
    results: Path
    """Folder of the result files."""
    description: Path
    """File of the description."""
    settings: Settings
    """Another job with other settings is rejected in the same folder."""
    task: Task
    describe: Callable[[Shape], D]
    """Returns the description of the results."""
    read: Callable[[Mapping[str, Any]], D]
    """Reads the description from JSON."""

    @property
    def plan(self) -> Path:
        """File of the plan."""
        return self.folder / UNFINISHED / PLAN_FILE

    def finished(self) -> set[str]:
        """Return the names of the existing results, from one listing: single checks are slow on network storage."""
        return {path.name for path in self.results.glob("part-*.parquet")} if self.results.is_dir() else set()


@dataclass(frozen=True)
class Plan:
    """The settings of a job and its shards, as stored in ``plan.json``."""

    settings: Settings
    shards: list[str]
    """The files of texts, in order."""


@dataclass(frozen=True)
class Run(Generic[D]):
    """Result of ``run_job``."""

    description: D
    resumed: int
    """Number of shards that an earlier run had finished."""
    seconds: float


def run_job(job: Job[D], cut: Cut, engine: Engine, options: EngineOptions, progress: Progress | None) -> Run[D]:
    """Do the shards of a job that are left, and describe the results.

    Args:
        job: the job.
        cut: cuts the texts into shards, if there is no plan yet.
        engine: runs the worker on the shards.
        options: options of the engine.
        progress: called with the number of shards done and the total.
    """
    started = time.perf_counter()
    if job.description.is_file():
        described = _read(job.description, job.read)
        _check_settings(job, described.settings)
        _remove_leftovers(job)
        return Run(described, described.shards, time.perf_counter() - started)
    plan = _read_or_make_plan(job, cut)
    names = [shard_name(number) for number in range(len(plan.shards))]
    finished = job.finished()
    todo = [
        Shard(texts, str(job.results / name))
        for texts, name in zip(plan.shards, names, strict=True)
        if name not in finished
    ]
    shutil.rmtree(job.plan.parent / ATTEMPTS_FOLDER, ignore_errors=True)
    worker = Worker(job.task, job.plan, fingerprint(job.plan.read_bytes()))
    done = resumed = len(plan.shards) - len(todo)
    with closing(engine(worker, todo, options)) as outcomes:
        for outcome in outcomes if todo else ():
            if outcome.problem:
                raise PluralignError(outcome.problem)
            done += 1
            if progress:
                progress(done, len(plan.shards))
    described = job.describe(_shape([job.results / name for name in names]))
    _write(job.description, described.to_json())
    _remove_leftovers(job)
    return Run(described, resumed, time.perf_counter() - started)


def _remove_leftovers(job: Job[Any]) -> None:
    """Remove the plan of a finished job, and the files of killed workers."""
    shutil.rmtree(job.plan.parent, ignore_errors=True)
    for leftover in job.results.glob(".part-*.partial"):
        leftover.unlink(missing_ok=True)


def run_here(worker: Worker, shards: Sequence[Shard], _: EngineOptions) -> Generator[Outcome]:
    """Do the shards in this process, one after the other: the engine ``local``."""
    for shard in shards:
        yield worker(shard)


def _read_or_make_plan(job: Job[Any], cut: Cut) -> Plan:
    """Return the plan of an unfinished job, or cut the texts and write the plan last."""
    if job.plan.is_file():
        plan = _read(job.plan, lambda values: Plan(values["settings"], values["shards"]))
        _check_settings(job, plan.settings)
        return plan
    if others := len(job.finished()):
        problem = f"it holds {others} shards of another job"
        raise DataError(problem, file=str(job.results), remedy="name an empty folder")
    try:
        shards = cut(job.folder / UNFINISHED / "texts")
    except OSError as error:
        raise storage_error(error, job.folder) from None
    if not shards:
        raise DataError("there are no texts", file=str(job.folder), remedy="name data with at least one row")
    plan = Plan(dict(job.settings), [str(shard) for shard in shards])
    _write(job.plan, asdict(plan))
    return plan


def _check_settings(job: Job[Any], stored: Settings) -> None:
    """Raise DataError if a job in the folder has other settings."""
    known = {"precision": "float32", **stored}  # jobs of earlier versions have no precision
    for name in ("texts", "ensemble"):  # and longer hashes
        if name in known and name in job.settings:
            known[name] = str(known[name])[: len(job.settings[name])]
    changed = changed_inputs(known, job.settings)
    if changed:
        shown = [f"{name} {known[name]}" for name in changed if name in known and name not in HASHES]
        problem = f"it holds a job with {', '.join(shown) or 'other ' + ' and '.join(changed)}"
        raise DataError(problem, file=str(job.folder), remedy="use the same settings, or name another folder")


def _shape(results: Sequence[Path]) -> Shape:
    """Return the numbers in the footers of the result files."""
    rows, dimension = 0, 0
    for path in results:
        with pq.ParquetFile(path) as file:
            rows += file.metadata.num_rows
            if file.metadata.num_rows and "vector" in file.schema_arrow.names:
                dimension = file.schema_arrow.field("vector").type.list_size
    return Shape(rows, len(results), dimension)


T = TypeVar("T")


def _read(path: Path, read: Callable[[Mapping[str, Any]], T]) -> T:
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError):
        problem = "it is damaged, or another program wrote it"
        raise DataError(problem, file=str(path), remedy="name an empty folder") from None


def _write(path: Path, values: Mapping[str, Any]) -> None:
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(values, indent=1, ensure_ascii=False), encoding="utf-8")
