"""Encoding and scoring past one machine: texts in shards, each done whole by whichever worker is free.

Decided here: how work is cut, where it is done, and what is kept. A shard is a Parquet file, its result another one,
written whole under a name of its own: doing a shard twice is harmless, and a finished one is never done again. So a
lost worker costs the shard it had in hand, a lost driver nothing but its time, and the same call goes on with the rest.
The engine ``local`` is a loop in this process, ``ray`` a pool of actors of Ray Data; both run the same ``Worker``.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.parquet as pq

from pluralign.core.errors import DataError, PluralignError, UsageError
from pluralign.core.files import atomic_write
from pluralign.core.options import with_changes
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import read_description, texts_of
from pluralign.features import store
from pluralign.features.frozen import TextFeatures
from pluralign.features.options import EncodeOptions
from pluralign.features.store import item_keys, shard_name
from pluralign.scale.options import EngineOptions
from pluralign.scale.ray_engine import _with_ray
from pluralign.scale.shards import Cut, cut_file, cut_items, find_shards
from pluralign.scale.worker import BEGUN, EncodeTask, ScoreTask, Task, Worker, ensemble_identity, storage_error
from pluralign.votes.preferences import PreferenceSet

UNFINISHED = ".unfinished"
PLAN_FILE = "plan.json"
SCORES_FILE = "_scores.json"
"""Readers of Parquet folders pass over names that begin with an underscore."""

Shard: TypeAlias = tuple[str, str]
"""The path of a shard, and that of its result."""
Outcomes: TypeAlias = Generator[Mapping[str, Any]]
"""``{"shard": path, "problem": sentence}`` of each shard; the sentence is empty where all went well."""


@dataclass(frozen=True)
class Encoded:
    """What ``encode`` left in a folder."""

    folder: str
    encoder: str
    layer: int | None
    pooling: str
    precision: str
    surface: bool
    identity: str
    dimension: int
    rows: int
    shards: int
    resumed: int
    """Of the shards, those that an earlier run had finished."""
    seconds: float


@dataclass(frozen=True)
class Scored:
    """What ``score`` left in a folder."""

    folder: str
    ensemble: str
    k: int
    rows: int
    shards: int
    resumed: int
    """Of the shards, those that an earlier run had finished."""
    seconds: float


def encode(
    texts: PreferenceSet | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    options: EncodeOptions | None = None,
    engine_options: EngineOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> Encoded:
    """Encode each distinct text once and keep the vectors in a folder that ``fit --features`` reads.

    Args:
        texts: votes, or a folder of Parquet shards with columns prompt and response, which only the workers read.
        folder: for the features, and for unfinished work, which the same call goes on with. With ``ray`` it must be on
            storage that all nodes see.
        options: the encoder; ``changes`` are its fields, and those of ``engine_options``, by name.
        engine_options: where the work is done.
        progress: called with shards done and in all.

    Example:
        >>> import tempfile
        >>> from pluralign import town_hall
        >>> votes = town_hall(50).preferences
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = encode(votes, folder, encoder="none", shard_rows=40)
        >>> done.rows == len(texts_of(votes)), done.shards == -(-done.rows // 40)
        (True, True)
    """
    engine, changes = _where(engine_options, changes)
    options = with_changes(options or EncodeOptions(), changes)
    folder = Path(folder).absolute()
    chosen = _absolute(options.encoder), options.layer, options.pooling, options.surface, options.precision
    features = TextFeatures(*chosen).settled()
    encoder = features.load()
    if encoder is None and not options.surface:
        raise UsageError("there is nothing to encode with: name an encoder or keep the surface features.")
    features = replace(features, identity=encoder.identity if encoder else "")
    made_by = asdict(options) | {"precision": features.precision, "identity": features.identity}
    if isinstance(texts, PreferenceSet):
        items = texts_of(texts)
        data = hashlib.sha256(item_keys(items).tobytes()).hexdigest()
        cut: Cut = lambda target: cut_items(items, target, engine.shard_rows)  # noqa: E731
    else:
        data, cut = find_shards(Path(texts), folder)
    work = _Work(
        folder=folder,
        results=folder / store.VECTORS_FOLDER,
        done_file=folder / store.FEATURES_FILE,
        settings={"command": "encode", "texts": data, **made_by, **_of_shards(engine, texts)},
        task=EncodeTask(features),
    )
    about = {"format": store.FORMAT, "format_version": store.FORMAT_VERSION, **made_by}
    facts, run = _do(work, cut, engine, about, progress)
    return Encoded(folder=str(folder), **made_by, **_named(facts, "dimension", "rows", "shards"), **run)


def score(
    ensemble: str | os.PathLike[str],
    texts: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    engine_options: EngineOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> Scored:
    """Add each member's reward to texts: Parquet shards with the input's columns and ``rewards``, in its order.

    Args:
        ensemble: folder that ``fit`` wrote.
        texts: a JSON Lines, CSV or Parquet file of {prompt, response}, or a folder of Parquet shards of them, which
            only the workers read.
        folder: for the shards, and for unfinished work, which the same call goes on with.
        engine_options: where the work is done; ``changes`` are its fields by name.
        progress: called with shards done and in all.
    """
    engine, changes = _where(engine_options, changes)
    if changes:
        raise UsageError(f"there is no option {next(iter(changes))!r}.")
    ensemble, texts, folder = Path(ensemble).absolute(), Path(texts).absolute(), Path(folder).absolute()
    description = read_description(ensemble)
    if texts.is_dir():
        data, cut = find_shards(texts, folder)
    elif texts.is_file():
        with texts.open("rb") as stream:
            data = hashlib.file_digest(stream, "sha256").hexdigest()
        cut = lambda target: cut_file(texts, target, engine.shard_rows)  # noqa: E731
    else:
        raise UsageError(f"there is no file or folder {texts}.")
    identity = ensemble_identity(description)
    work = _Work(
        folder=folder,
        results=folder,
        done_file=folder / SCORES_FILE,
        settings={"command": "score", "texts": data, "ensemble": identity, **_of_shards(engine, texts)},
        task=ScoreTask(ensemble, identity),
    )
    about = {"format": "pluralign-scores", "ensemble": str(ensemble), "k": len(description["weights"])}
    facts, run = _do(work, cut, engine, about, progress)
    return Scored(folder=str(folder), **_named(facts, "ensemble", "k", "rows", "shards"), **run)


def _where(options: EngineOptions | None, changes: dict[str, Any]) -> tuple[EngineOptions, dict[str, Any]]:
    known = EngineOptions.__dataclass_fields__
    ours = {name: value for name, value in changes.items() if name in known}
    return replace(options or EngineOptions(), **ours), {k: v for k, v in changes.items() if k not in known}


def _of_shards(engine: EngineOptions, texts: Any) -> dict[str, Any]:
    is_folder = not isinstance(texts, PreferenceSet) and Path(texts).is_dir()
    return {"shard_rows": None if is_folder else engine.shard_rows, "version": __version__}


def _absolute(encoder: str) -> str:
    """Return a model's folder so that workers find it wherever they run; other names are left as they are."""
    return str(Path(encoder).absolute()) if Path(encoder).is_dir() else encoder


def _named(facts: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: facts[name] for name in names}


# --- one piece of work ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    folder: Path
    results: Path
    done_file: Path
    """Written last; where it is, nothing is left to do."""
    settings: Mapping[str, Any]
    """What the results depend on; work with others is refused in the same folder."""
    task: Task

    @property
    def plan(self) -> Path:
        return self.folder / UNFINISHED / PLAN_FILE

    def finished(self) -> set[str]:
        """Return the names of results that are there. One listing: asking for each is slow on network storage."""
        return {path.name for path in self.results.glob("part-*.parquet")} if self.results.is_dir() else set()


def _do(
    work: _Work, cut: Cut, engine: EngineOptions, about: Mapping[str, Any], progress: Progress | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plan, do what is left, and describe; return the description, and what this run did."""
    started = time.perf_counter()
    if work.done_file.is_file():
        facts = _read_json(work.done_file)
        _refuse_other_settings(work, facts.get("settings", {}))
        return facts, {"resumed": facts["shards"], "seconds": time.perf_counter() - started}
    shards = _planned(work, cut)
    names = [shard_name(number) for number in range(len(shards))]
    finished = work.finished()
    todo = [
        (str(shard), str(work.results / name))
        for shard, name in zip(shards, names, strict=True)
        if name not in finished
    ]
    shutil.rmtree(work.plan.parent / BEGUN, ignore_errors=True)
    digest = hashlib.sha256(work.plan.read_bytes()).hexdigest()
    worker = Worker(work.task, work.plan, digest, Path.cwd())
    done = resumed = len(shards) - len(todo)
    with closing(_with_ray(worker, todo, engine) if engine.engine == "ray" else _here(worker, todo)) as outcomes:
        for outcome in outcomes if todo else ():
            if outcome["problem"]:
                raise PluralignError(outcome["problem"])
            done += 1
            if progress:
                progress(done, len(shards))
    facts = {**_measured([work.results / name for name in names]), **about, "settings": dict(work.settings)}
    with atomic_write(work.done_file) as partial:
        partial.write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
    shutil.rmtree(work.plan.parent, ignore_errors=True)
    for left_behind in work.results.glob(".part-*.partial"):  # by workers that were killed
        left_behind.unlink(missing_ok=True)
    return facts, {"resumed": resumed, "seconds": time.perf_counter() - started}


def _planned(work: _Work, cut: Cut) -> list[Path]:
    """Return the shards of this work: those of a plan that is there, or newly cut, with the plan written last."""
    if work.plan.is_file():
        plan = _read_json(work.plan)
        _refuse_other_settings(work, plan["settings"])
        return [Path(shard) for shard in plan["shards"]]
    if found := len(work.finished()):
        problem = f"it holds {found} shards that are not of this work"
        raise DataError(problem, file=str(work.results), remedy="name an empty folder")
    try:
        shards = cut(work.folder / UNFINISHED / "texts")
    except OSError as error:
        raise storage_error(error, work.folder) from None
    if not shards:
        raise DataError("there are no texts", file=str(work.folder), remedy="name data with at least one row")
    plan = {"settings": dict(work.settings), "shards": [str(shard) for shard in shards]}
    with atomic_write(work.plan) as partial:
        partial.write_text(json.dumps(plan, indent=1, ensure_ascii=False), encoding="utf-8")
    return shards


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise DataError("it is not what was written there", file=str(path), remedy="name an empty folder") from None


def _refuse_other_settings(work: _Work, theirs: Mapping[str, Any]) -> None:
    theirs = {"precision": "float32", **theirs}  # work from before there was a choice
    other = [name for name, value in work.settings.items() if theirs.get(name) != value]
    if other:
        shown = [
            f"{name} {theirs[name]}"
            for name in other
            if name in theirs and name not in ("texts", "ensemble", "identity")
        ]
        problem = f"it holds work with {', '.join(shown) or 'other ' + ' and '.join(other)}"
        raise DataError(problem, file=str(work.folder), remedy="give the same settings, or name another folder")


def _measured(results: Sequence[Path]) -> dict[str, Any]:
    """Return what the results' own footers say: rows in all, shards, and the length of a vector."""
    rows, dimension = 0, 0
    for path in results:
        with pq.ParquetFile(path) as file:
            rows += file.metadata.num_rows
            if file.metadata.num_rows and "vector" in file.schema_arrow.names:
                dimension = file.schema_arrow.field("vector").type.list_size
    return {"rows": rows, "shards": len(results), "dimension": dimension}


# --- engines --------------------------------------------------------------------------------------------------------


def _here(worker: Worker, todo: Iterable[Shard]) -> Outcomes:
    for shard, result in todo:
        done = worker({"shard": [shard], "result": [result]})
        yield {name: values[0] for name, values in done.items()}
