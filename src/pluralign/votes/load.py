"""Load votes from files, standard input, Hugging Face datasets, the paper's sets and the built-in town hall.

``formats`` turns bytes into records, ``layouts`` turns records into votes.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from pluralign.core.errors import DataError, UsageError, did_you_mean
from pluralign.core.options import with_changes
from pluralign.core.types import Progress
from pluralign.votes.builder import BadRows
from pluralign.votes.formats import dataset_records, hub_records, read_records
from pluralign.votes.layouts import read_comparisons
from pluralign.votes.options import LoadOptions
from pluralign.votes.paper_sets import KNOWN_SETS
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.storage import is_saved_set
from pluralign.votes.town_hall.townhall import TownHall, town_hall
from pluralign.votes.values import Record

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
        if (known := KNOWN_SETS.get(name)) and not Path(source).exists():
            return known(rest, options, progress)
        if is_town_hall(source):
            return load_town_hall(source).preferences
        if Path(source).is_file() and is_saved_set(source):
            saved = PreferenceSet.load(source)  # with its own tie rule, unless the options say half
            return saved.with_ties("half") if options.ties == "half" else saved
    records, bad = open_records(source, options, progress)
    return read_comparisons(records, bad, options)


def is_town_hall(source: Source) -> bool:
    """Return whether a source is ``demo`` or ``demo:PAIRS``, and no file."""
    is_name = isinstance(source, str | os.PathLike) and str(source).partition(":")[0] == "demo"
    return is_name and not Path(str(source)).exists()


def load_town_hall(source: Source) -> TownHall:
    """Return the town hall that ``demo`` or ``demo:PAIRS`` names."""
    size = str(source).partition(":")[2]
    if size and not size.isdecimal():
        raise UsageError(f"PAIRS in demo:PAIRS must be a whole number, not {size!r}.")
    return town_hall(int(size)) if size else town_hall()


def open_records(
    source: Source, options: LoadOptions, progress: Progress | None = None
) -> tuple[Iterator[tuple[int, Record]], BadRows]:
    """Return the numbered records of a source, with columns renamed, and where its invalid rows are reported."""
    records, name = _numbered(source, progress)
    bad = BadRows(name, skip=options.skip_bad)
    found = records(bad)
    if options.rename:
        new_names = {old: new for new, old in options.rename.items()}
        found = ((row, {new_names.get(key, key): value for key, value in record.items()}) for row, record in found)
    return found, bad


def _numbered(
    source: Source, progress: Progress | None
) -> tuple[Callable[[BadRows], Iterator[tuple[int, Record]]], str]:
    """Return a function that yields the numbered records, and the name of the source."""
    if isinstance(source, str | os.PathLike):
        if str(source).startswith("hf:") and str(source) != "hf:":
            return lambda _: hub_records(str(source)[3:], progress), str(source)
        if str(source) == "-":
            return lambda bad: read_records(sys.stdin.buffer, bad, progress), "standard input"
        path = _existing_file(Path(source))
        return lambda bad: _file_records(path, bad, progress), str(path)
    if hasattr(source, "read"):
        return lambda bad: read_records(source, bad, progress), getattr(source, "name", "a stream")
    if type(source).__module__.partition(".")[0] == "datasets":
        return lambda _: dataset_records(source, progress), "the dataset"
    return lambda _: iter(enumerate(source, 1)), "the records"


def _existing_file(path: Path) -> Path:
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
    return path


def _file_records(path: Path, bad: BadRows, progress: Progress | None) -> Iterator[tuple[int, Record]]:
    with path.open("rb") as stream:
        yield from read_records(stream, bad, progress)
