"""Encoding and scoring at scale: texts in Parquet shards, done in this process or on a Ray cluster.

Decided here: the settings of each job, and its results. ``run`` decides which shards are left to do, ``worker`` does
them. The engine ``local`` is a loop in this process, ``ray`` a pool of Ray Data actors; both run the same ``Worker``.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pluralign.core.errors import UsageError
from pluralign.core.files import file_sha256
from pluralign.core.options import show_options, with_changes
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.folder import description_hash, read_description
from pluralign.scale.options import EngineOptions
from pluralign.scale.ray import run_with_ray
from pluralign.scale.run import Engine, Job, Settings, run_here, run_job
from pluralign.scale.shards import Source, cut_file, cut_items, existing_shards
from pluralign.scale.worker import EncodeTask, ScoreTask
from pluralign.text.features import TextFeatures
from pluralign.text.options import EncodeOptions
from pluralign.text.store import FEATURES_FILE, FORMAT_VERSION, VECTORS_FOLDER, FeaturesFile, item_keys
from pluralign.votes.load import VotesLike, as_preferences
from pluralign.votes.preferences import PreferenceSet, texts_of

SCORES_FILE = "_scores.json"
"""Readers of Parquet folders ignore names that start with an underscore."""
SCORES_FORMAT = "pluralign-scores"
ENGINES: Mapping[str, Engine] = {"local": run_here, "ray": run_with_ray}


@dataclass(frozen=True)
class Encoded:
    """Result of ``encode``."""

    folder: str
    encoder: str
    layers: str
    pooling: str
    precision: str
    surface: bool
    identity: str
    dimension: int
    rows: int
    shards: int
    resumed: int
    """Number of shards that an earlier run had finished."""
    seconds: float


@dataclass(frozen=True)
class Scored:
    """Result of ``score``."""

    folder: str
    ensemble: str
    k: int
    rows: int
    shards: int
    resumed: int
    """Number of shards that an earlier run had finished."""
    seconds: float


@dataclass(frozen=True)
class ScoresFile:
    """Contents of ``_scores.json``: the ensemble and the shape of the stored rewards."""

    rows: int
    shards: int
    dimension: int
    ensemble: str
    k: int
    settings: Settings = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the file."""
        shape = {name: getattr(self, name) for name in ("rows", "shards", "dimension")}
        about = {"format": SCORES_FORMAT, "ensemble": self.ensemble, "k": self.k}
        return {**shape, **about, "settings": dict(self.settings)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ScoresFile":
        """Read the JSON object of the file. Raises TypeError if a value is missing."""
        return cls(**{one.name: values[one.name] for one in fields(cls) if one.name in values})


@show_options(EncodeOptions, EngineOptions)
def encode(
    texts: VotesLike,
    folder: str | os.PathLike[str],
    options: EncodeOptions | None = None,
    engine_options: EngineOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> Encoded:
    """Encode each distinct text once, and store the vectors in a folder that ``fit --features`` reads.

    Args:
        texts: votes (a ``PreferenceSet``, a path, a pandas DataFrame, a list of dicts), or a folder of Parquet shards
            with columns prompt and response, which only the workers read.
        folder: folder of the features, and of unfinished work, which the same call resumes. With ``ray`` it must be on
            storage that all nodes share.
        options: the encoder; ``changes`` are fields of it and of ``engine_options``, by name.
        engine_options: where the shards run.
        progress: called with the number of shards done and the total.

    Example:
        >>> import tempfile
        >>> from pluralign import town_hall
        >>> votes = town_hall(50).preferences
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = encode(votes, folder, encoder="none", shard_rows=40)
        >>> done.rows == len(texts_of(votes)), done.shards == -(-done.rows // 40)
        (True, True)
    """
    engine, changes = _engine_options(engine_options, changes)
    options = with_changes(options or EncodeOptions(), changes)
    folder = Path(folder).absolute()
    chosen = _absolute(options.encoder), options.layers, options.pooling, options.surface, options.precision
    features = TextFeatures(*chosen).resolved()
    encoder = features.load()
    if encoder is None and not options.surface:
        raise UsageError("there is nothing to encode with: name an encoder or keep the surface features.")
    if isinstance(texts, str | os.PathLike) and Path(texts).is_dir():
        source = existing_shards(Path(texts), folder)
    else:
        source = _votes(as_preferences(texts), engine)
    decided = {name: getattr(features, name) for name in ("layers", "precision", "identity")}
    made_by = asdict(options) | decided
    settings = {"command": "encode", "keys": FORMAT_VERSION, "texts": source.hash, **made_by, **_cutting(source)}
    job = Job(
        folder=folder,
        results=folder / VECTORS_FOLDER,
        description=folder / FEATURES_FILE,
        settings=settings,
        task=EncodeTask(features),
        describe=lambda shape: FeaturesFile(**asdict(shape), **made_by, settings=settings),
        read=FeaturesFile.from_json,
    )
    run = run_job(job, source.cut, ENGINES[engine.engine], engine, progress)
    stored = run.description
    return Encoded(
        folder=str(folder),
        **made_by,
        dimension=stored.dimension,
        rows=stored.rows,
        shards=stored.shards,
        resumed=run.resumed,
        seconds=run.seconds,
    )


def score(
    ensemble: str | os.PathLike[str],
    texts: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    engine_options: EngineOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> Scored:
    """Add each member's reward to texts: write Parquet shards with the input's columns and order, and ``rewards``.

    Args:
        ensemble: folder that ``fit`` wrote.
        texts: a JSON Lines, CSV or Parquet file of {prompt, response}, or a folder of such Parquet shards, which only
            the workers read.
        folder: folder of the results, and of unfinished work, which the same call resumes.
        engine_options: where the shards run; ``changes`` are its fields by name.
        progress: called with the number of shards done and the total.
    """
    engine, changes = _engine_options(engine_options, changes)
    if changes:
        raise UsageError(f"there is no option {next(iter(changes))!r}.")
    ensemble, texts, folder = Path(ensemble).absolute(), Path(texts).absolute(), Path(folder).absolute()
    description = read_description(ensemble)
    k, identity = len(description["weights"]), description_hash(description)
    source = existing_shards(texts, folder) if texts.is_dir() else _file(texts, engine)
    settings = {"command": "score", "texts": source.hash, "ensemble": identity, **_cutting(source)}
    job = Job(
        folder=folder,
        results=folder,
        description=folder / SCORES_FILE,
        settings=settings,
        task=ScoreTask(ensemble, identity),
        describe=lambda shape: ScoresFile(**asdict(shape), ensemble=str(ensemble), k=k, settings=settings),
        read=ScoresFile.from_json,
    )
    run = run_job(job, source.cut, ENGINES[engine.engine], engine, progress)
    stored = run.description
    return Scored(str(folder), stored.ensemble, stored.k, stored.rows, stored.shards, run.resumed, run.seconds)


def _engine_options(options: EngineOptions | None, changes: dict[str, Any]) -> tuple[EngineOptions, dict[str, Any]]:
    """Return the options of the engine with their changes, and the other changes."""
    known = EngineOptions.__dataclass_fields__
    own = {name: value for name, value in changes.items() if name in known}
    others = {name: value for name, value in changes.items() if name not in known}
    return replace(options or EngineOptions(), **own), others


def _votes(votes: PreferenceSet, engine: EngineOptions) -> Source:
    items = texts_of(votes)
    content = hashlib.sha256(item_keys(items).tobytes()).hexdigest()
    return Source(content, lambda target: cut_items(items, target, engine.shard_rows), engine.shard_rows)


def _file(path: Path, engine: EngineOptions) -> Source:
    if not path.is_file():
        raise UsageError(f"there is no file or folder {path}.")
    return Source(file_sha256(path), lambda target: cut_file(path, target, engine.shard_rows), engine.shard_rows)


def _cutting(source: Source) -> Settings:
    return {"shard_rows": source.shard_rows, "version": __version__}


def _absolute(encoder: str) -> str:
    """Return the absolute path of a model folder, so that workers find it anywhere; other names stay as they are."""
    return str(Path(encoder).absolute()) if Path(encoder).is_dir() else encoder
