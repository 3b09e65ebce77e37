"""``encode`` and ``score``: texts in Parquet shards, done in this process or on a Ray cluster; ``score`` also as lines.

Decided here: the settings of each job, which shards are left to do, and the description of the results.

Resuming: a shard is done if its result file exists, because result files are written atomically. No other record of
progress is needed. A lost worker costs the shard it was working on, and the same call does the shards that are left.
The plan, ``.unfinished/plan.json``, fixes the shards and the settings of the job. The description of the results is
written last; where it exists, the job is done, unless a result file is missing or damaged.
"""

import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, overload

import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.checkpoints import changed_inputs, fingerprint
from pluralign.core.errors import DataError, PluralignError, UsageError
from pluralign.core.files import atomic_write, locked, refuse_foreign
from pluralign.core.options import show_options, with_changes
from pluralign.core.text import counted, one_line
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import description_hash, read_description
from pluralign.scale import shards
from pluralign.scale.lines import Lines, ScoredLine, score_lines
from pluralign.scale.options import EngineOptions
from pluralign.scale.ray import run_with_ray
from pluralign.scale.shards import Plan, Texts, Worker
from pluralign.text.encoders import TextFeatures
from pluralign.text.options import EncodeOptions
from pluralign.text.store import FEATURES_FILE, VECTORS_FOLDER, FeaturesFile, shard_name
from pluralign.votes.load import VotesLike, as_preferences

SCORES_FILE = "_scores.json"
"""Readers of Parquet folders ignore names that start with an underscore."""
SCORES_FORMAT = "pluralign-scores"
UNFINISHED = ".unfinished"
PLAN_FILE = "plan.json"
HASHES = ("texts", "ensemble", "identity")
"""Settings that are hashes, which mean nothing to a reader."""
Folder: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True)
class WrittenShards:
    """Result of ``encode``, and of ``score`` with an output folder."""

    folder: str
    """It also holds ``features.json`` or ``_scores.json``, with all settings."""
    made_by: str
    """The encoder, or the folder of the ensemble."""
    dimension: int
    """Numbers per text: the length of its vector, or the number of members."""
    rows: int
    shards: int
    resumed: int
    """Number of shards that an earlier run had finished."""
    seconds: float


@show_options(EncodeOptions, EngineOptions)
def encode(
    texts: VotesLike,
    folder: Folder,
    options: EncodeOptions | None = None,
    engine_options: EngineOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> WrittenShards:
    """Encode each distinct text once, and store the vectors in a folder that ``fit --features`` reads.

    Args:
        texts: votes (a ``PreferenceSet``, a path, a pandas DataFrame, a list of dicts), or a folder of Parquet shards
            with columns prompt and response, which only the workers read.
        folder: folder of the features, and of unfinished work, which the same call resumes. With ``ray`` it must be on
            storage that all nodes share.
        options: the encoder; ``changes`` are fields of it and of ``engine_options``, by name.
        engine_options: where the shards run.
        progress: called with the number of texts done and the total.

    Example:
        >>> import tempfile
        >>> from pluralign import town_hall
        >>> votes = town_hall(50).preferences
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = encode(votes, folder, encoder="none", shard_rows=40)
        >>> done.shards == -(-done.rows // 40), done.made_by
        (True, 'none')
    """
    of_engine = {name: changes.pop(name) for name in EngineOptions.__dataclass_fields__ if name in changes}
    engine = with_changes(engine_options or EngineOptions(), of_engine)
    options = with_changes(options or EncodeOptions(), changes)
    folder = Path(folder).absolute()
    # Workers find the folder of a model anywhere by its absolute path.
    name = str(Path(options.encoder).absolute()) if Path(options.encoder).is_dir() else options.encoder
    chosen = TextFeatures(name, options.layers, options.pooling, options.surface, options.precision)
    features = chosen.resolved()
    if features.load() is None and not options.surface:
        raise UsageError("there is nothing to encode with: name an encoder or keep the surface features.")
    if isinstance(texts, str | os.PathLike) and Path(texts).is_dir():
        source = shards.existing_shards(Path(texts), folder)
    else:
        source = shards.vote_texts(as_preferences(texts), engine.shard_rows)
    decided = {name: getattr(features, name) for name in ("layers", "precision", "identity")}
    made_by = asdict(options) | decided
    settings = _settings("encode", source, **made_by)
    about = FeaturesFile(rows=0, shards=0, dimension=0, **made_by, settings=settings).to_json()
    job = Job(folder, VECTORS_FOLDER, FEATURES_FILE, about, {"features": features.to_json()})
    return run_job(job, options.encoder, source, engine, progress)


@overload
def score(ensemble: Folder | RewardEnsemble, texts: Lines, folder: None = None) -> Iterator[ScoredLine]: ...


@overload
def score(ensemble: Folder, texts: Folder, folder: Folder, *options: Any, **changes: Any) -> WrittenShards: ...


def score(
    ensemble: Any,
    texts: Any,
    folder: Folder | None = None,
    engine_options: EngineOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> Iterator[ScoredLine] | WrittenShards:
    """Return each member's reward for texts: an iterator of lines, or with a folder Parquet shards in it.

    The shards have the columns and the order of the input, and a column ``rewards``.

    Args:
        ensemble: folder that ``fit`` wrote; without ``folder`` also a loaded ensemble.
        texts: rows of {prompt, response}: the path of a JSON Lines file, a binary stream of JSON Lines, or a list of
            dicts. With ``folder`` the path of a JSON Lines, CSV or Parquet file, or of a folder of Parquet shards,
            which only the workers read.
        folder: folder of the results, and of unfinished work, which the same call resumes.
        engine_options: where the shards run; ``changes`` are its fields by name.
        progress: called with the number of texts done and the total.

    Example:
        >>> from pluralign import fit, town_hall
        >>> ensemble = fit(town_hall(400).preferences, k=2, encoder="none")
        >>> [len(line["rewards"]) for line in score(ensemble, [{"prompt": "Tea?", "response": "Yes."}])]
        [2]
    """
    engine = with_changes(engine_options or EngineOptions(), changes)
    if folder is None:
        return score_lines(ensemble, texts)
    ensemble, texts, folder = Path(ensemble).absolute(), Path(texts).absolute(), Path(folder).absolute()
    described = read_description(ensemble)
    k, identity = len(described["weights"]), description_hash(described)
    source = shards.existing_shards(texts, folder) if texts.is_dir() else shards.file_texts(texts, engine.shard_rows)
    settings = _settings("score", source, ensemble=identity)
    about = {"format": SCORES_FORMAT, "ensemble": str(ensemble), "dimension": k, "settings": settings}
    job = Job(folder, "", SCORES_FILE, about, {"ensemble": str(ensemble), "identity": identity})
    return run_job(job, str(ensemble), source, engine, progress)


def _settings(command: str, texts: Texts, **others: Any) -> dict[str, Any]:
    """Return everything that the results of a job depend on, as JSON values."""
    return {"command": command, "texts": texts.hash, **others, "shard_rows": texts.shard_rows, "version": __version__}


# --- a job ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One call of ``encode`` or ``score``."""

    folder: Path
    subfolder: str
    """Place of the result files in it."""
    description_file: str
    about: Mapping[str, Any]
    """Contents of the description, with the ``settings`` of the job; the numbers come from the results."""
    task: Mapping[str, Any]
    """See ``Plan.task``."""

    @property
    def results(self) -> Path:
        """Folder of the result files."""
        return self.folder / self.subfolder

    @property
    def plan(self) -> Path:
        """File of the plan."""
        return self.folder / UNFINISHED / PLAN_FILE


@dataclass(frozen=True)
class Described:
    """What ``run_job`` reads of the description of a finished job."""

    rows: int
    shards: int
    dimension: int
    settings: Mapping[str, Any]


def run_job(
    job: Job, made_by: str, texts: Texts, options: EngineOptions, progress: Progress | None = None
) -> WrittenShards:
    """Do the shards of a job that are left, and describe the results.

    Args:
        job: the job.
        made_by: see ``WrittenShards``.
        texts: cut into shards, if there is no plan yet.
        options: where the shards run.
        progress: called with the number of texts done and the total.
    """
    started, description = time.perf_counter(), job.folder / job.description_file
    refuse_foreign(job.folder, job.description_file, VECTORS_FOLDER, "part-")
    with locked(job.folder):  # a second run of the same job waits, and finds it finished
        before = None if _is_finished(job, description) else _do_shards(job, description, texts, options, progress)
        found = shards.read_stored(Described, description)
        shutil.rmtree(job.plan.parent, ignore_errors=True)
        for leftover in job.results.glob(".part-*.partial"):  # of killed workers
            leftover.unlink(missing_ok=True)
    resumed, seconds = found.shards if before is None else before, time.perf_counter() - started
    return WrittenShards(str(job.folder), made_by, found.dimension, found.rows, found.shards, resumed, seconds)


def _is_finished(job: Job, description: Path) -> bool:
    """Return whether a job is described and has all its shards. Damaged ones are removed, to be done again."""
    if not description.is_file():
        return False
    found = shards.read_stored(Described, description)
    _check_settings(job, found.settings)
    for name in shards.finished_results(job.results):
        try:
            pq.read_metadata(job.results / name)
        except (OSError, pa.ArrowException):
            (job.results / name).unlink(missing_ok=True)
    return len(shards.finished_results(job.results)) >= found.shards


def _do_shards(job: Job, description: Path, texts: Texts, options: EngineOptions, progress: Progress | None) -> int:
    """Do the shards that are left, and write the description; return how many an earlier run had finished."""
    plan = _read_or_make_plan(job, texts)
    shutil.rmtree(job.plan.parent / shards.ATTEMPTS_FOLDER, ignore_errors=True)
    todo, total = plan.todo(), len(plan.shards)
    rows = [plan.rows(number) for number in range(total)]
    left, done = sum(rows[number] for number in todo), itertools.count(1)

    def advance(texts: int) -> None:
        nonlocal left
        left -= texts
        if progress:
            progress(sum(rows) - left, sum(rows))

    worker_of, on_ray = (job.plan, fingerprint(job.plan.read_bytes())), options.engine == "ray" and todo
    on_cluster = closing(run_with_ray(Worker(*worker_of), options)) if on_ray else None
    with on_cluster or nullcontext(map(Worker(*worker_of, advance=advance), todo)) as problems:
        for problem in problems:
            if problem:
                raise PluralignError(problem)
            if on_ray:  # shards finish in any order
                advance(left // (len(todo) + 1 - next(done)))
    _write(description, {**job.about, **_numbers(job.results, total)})
    return total - len(todo)


def _read_or_make_plan(job: Job, texts: Texts) -> Plan:
    """Return the plan of an unfinished job, or cut the texts and write the plan last."""
    if job.plan.is_file():
        plan = shards.read_stored(Plan, job.plan)
        _check_settings(job, plan.settings)
        return plan
    is_ours = (job.folder / job.description_file).is_file()
    if not is_ours and (others := len(shards.finished_results(job.results))):
        problem = f"it holds {counted(others, 'shard')} of another job"
        raise DataError(problem, file=str(job.results), remedy="name an empty folder")
    try:
        parts = texts.cut(job.folder / UNFINISHED / "texts")
    except OSError as error:
        raise shards.storage_error(error, job.folder) from None
    if not parts:
        raise DataError("there are no texts", file=str(job.folder), remedy="name data with at least one row")
    plan = Plan(job.about["settings"], job.task, str(job.results), [str(part) for part in parts])
    _write(job.plan, asdict(plan))
    return plan


def _check_settings(job: Job, stored: Mapping[str, Any]) -> None:
    """Raise DataError if a job in the folder has other settings."""
    if changed := changed_inputs(stored, job.about["settings"]):
        shown = [f"{name} {stored[name]}" for name in changed if name in stored and name not in HASHES]
        problem = f"it holds a job with {', '.join(shown) or 'other ' + ' and '.join(changed)}"
        raise DataError(problem, file=str(job.folder), remedy="use the same settings, or name another folder")


def _numbers(results: Path, n_shards: int) -> dict[str, int]:
    """Return the numbers in the footers of the result files: rows, shards, and the length of their vectors, if any."""
    numbers = {"rows": 0, "shards": n_shards}
    for path in (results / shard_name(number) for number in range(n_shards)):
        try:
            rows, schema = pq.read_metadata(path).num_rows, pq.read_schema(path)
        except (OSError, pa.ArrowException) as error:
            remedy = "remove this file, and run the same command again"
            raise DataError(f"it cannot be read ({one_line(error)})", file=str(path), remedy=remedy) from None
        numbers["rows"] += rows
        if rows and "vector" in schema.names:
            numbers["dimension"] = schema.field("vector").type.list_size
    return numbers


def _write(path: Path, values: Mapping[str, Any]) -> None:
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(values, indent=1, ensure_ascii=False), encoding="utf-8")
