"""Load votes from files, standard input, Hugging Face datasets, the paper's sets and the built-in town hall.

``formats`` turns bytes into records, ``layouts`` turns records into votes.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from pluralign.core.errors import DataError, UsageError, did_you_mean
from pluralign.core.options import with_changes
from pluralign.core.types import Progress
from pluralign.votes.builder import BadRows
from pluralign.votes.formats import dataset_records, hub_records, read_records
from pluralign.votes.layouts import Record, read_comparisons
from pluralign.votes.options import LoadOptions
from pluralign.votes.paper_sets import KNOWN_SETS
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.storage import is_saved_set
from pluralign.votes.town_hall.townhall import town_hall

if TYPE_CHECKING:
    import datasets

Source: TypeAlias = "str | os.PathLike[str] | IO[bytes] | Iterable[Record] | datasets.Dataset | datasets.DatasetDict"


def load_preferences(
    source: Source, options: LoadOptions | None = None, *, progress: Progress | None = None, **changes: Any
) -> PreferenceSet:
    """Load votes from any supported source.

    Args:
        source: a path (``.jsonl``, ``.csv``, ``.parquet``, each also gzipped), ``-`` for standard input, an open binary
            file, records as dicts, a ``datasets`` object, ``hf:ID`` or ``hf:ID:CONFIG``, or a known set: ``multipref``,
            ``personalllm``, ``helpsteer2``, ``helpsteer2-preference``, ``helpsteer3``, ``tldr`` (from the hub, or
            ``NAME:FOLDER`` from a copy), ``demo`` (``demo:PAIRS``).
        options: options for reading; ``changes`` are its fields by name.
        progress: called regularly with the amount done and the total.

    Example:
        >>> row = {"prompt": "Tea?", "response_a": "Yes.", "response_b": "No.", "votes_a": 3, "votes_b": 2}
        >>> load_preferences([row]).prob_a
        array([0.6])
    """
    options = with_changes(options or LoadOptions(), changes)
    if isinstance(source, str | os.PathLike):
        name, _, rest = str(source).partition(":")
        if name == "hf" and rest:
            return _from_records(hub_records(rest, progress), options, str(source))
        if (known := KNOWN_SETS.get(name)) and not Path(source).exists():
            return known(rest, options, progress)
        if name == "demo" and not Path(source).exists():
            return _town_hall(rest)
        if str(source) == "-":
            return _from_stream(sys.stdin.buffer, options, "standard input", progress)
        return _from_path(Path(source), options, progress)
    if hasattr(source, "read"):
        return _from_stream(source, options, getattr(source, "name", "a stream"), progress)
    if type(source).__module__.partition(".")[0] == "datasets":
        return _from_records(dataset_records(source, progress), options, "the dataset")
    return _from_records(enumerate(source, 1), options, "the records")


def _town_hall(size: str) -> PreferenceSet:
    if size and not size.isdecimal():
        raise UsageError(f"PAIRS in demo:PAIRS must be a whole number, not {size!r}.")
    return town_hall(int(size)).preferences if size else town_hall().preferences


def _from_records(records: Iterable[tuple[int, Record]], options: LoadOptions, name: str) -> PreferenceSet:
    bad = BadRows(name, skip=options.skip_bad)
    return _finish(iter(records), bad, options)


def _from_path(path: Path, options: LoadOptions, progress: Progress | None) -> PreferenceSet:
    if not path.exists():
        known = ["demo", *KNOWN_SETS]
        remedy = did_you_mean(str(path), known) if not path.suffix and "/" not in str(path) else "check the path"
        raise DataError("there is no such file or known set", file=str(path), remedy=remedy)
    if path.is_dir():
        raise DataError(
            "it is a folder",
            file=str(path),
            remedy=f"name a file in it, or NAME:FOLDER for a copy of {', '.join(KNOWN_SETS)}",
        )
    if is_saved_set(path):
        saved = PreferenceSet.load(path)  # with its own tie rule, unless the options say half
        return saved.with_ties("half") if options.ties == "half" else saved
    with path.open("rb") as stream:
        return _from_stream(stream, options, str(path), progress)


def _from_stream(stream: Any, options: LoadOptions, name: str, progress: Progress | None) -> PreferenceSet:
    bad = BadRows(name, skip=options.skip_bad)
    return _finish(read_records(stream, bad, progress), bad, options)


def _finish(records: Iterator[tuple[int, Record]], bad: BadRows, options: LoadOptions) -> PreferenceSet:
    if options.rename:
        new_names = {old: new for new, old in options.rename.items()}
        records = ((row, {new_names.get(key, key): value for key, value in record.items()}) for row, record in records)
    return read_comparisons(records, bad, options)
