"""Load votes from files, standard input, Hugging Face datasets, the paper's sets and the built-in town hall.

Also texts to score, without votes (``as_items``, ``pair_texts``).

``formats`` turns bytes into records, ``layouts`` turns records into votes.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol, TypeAlias

from pluralign.core.arrays import IndexArray
from pluralign.core.errors import DataError, UsageError, did_you_mean
from pluralign.core.options import show_options, spelled, with_changes
from pluralign.core.text import shortened
from pluralign.core.types import Progress
from pluralign.votes.builder import BadRows
from pluralign.votes.columns import rename_columns
from pluralign.votes.formats import check_distinct, dataset_records, file_records, hub_records, read_records
from pluralign.votes.layouts import is_layout, peeked, read_comparisons
from pluralign.votes.options import Loaded, LoadOptions
from pluralign.votes.paper_sets import KNOWN_SETS
from pluralign.votes.preferences import PreferenceSet, distinct, is_saved_set, texts_of
from pluralign.votes.prompts import Item
from pluralign.votes.town_hall.town_hall import DEFAULT_PAIRS, DEFAULT_RANKED_PAIRS, TownHall, town_hall
from pluralign.votes.values import (
    SHOWN_LENGTH,
    Record,
    RowError,
    checked_text,
    read_messages,
    read_prompt,
    read_response,
    shown,
    without_arrays,
)

DEMOS = {"demo": DEFAULT_PAIRS, "demo-rankings": DEFAULT_RANKED_PAIRS}
"""The town hall, in which people vote on pairs, or rank all answers to a prompt, with its number of pairs."""


class DataFrameLike(Protocol):
    """A pandas DataFrame."""

    @property
    def columns(self) -> Any:
        """The names of the columns."""

    @property
    def iloc(self) -> Any:
        """Rows and columns by position."""


class HasPreferences(Protocol):
    """An object that holds votes: ``RaterVotes``, ``HeldOutVotes`` or ``TownHall``."""

    @property
    def preferences(self) -> PreferenceSet:
        """The votes."""


VoteSource: TypeAlias = (
    str | os.PathLike[str] | IO[bytes] | Iterable[Record] | Mapping[str, Iterable[Record]] | DataFrameLike
)
"""A source of ``load_preferences``. The mapping is a ``datasets.DatasetDict``."""
VotesLike: TypeAlias = PreferenceSet | HasPreferences | VoteSource
"""Votes as Python functions take them: ``as_preferences`` turns them into a ``PreferenceSet``."""


def as_preferences(votes: VotesLike, options: LoadOptions | None = None) -> PreferenceSet:
    """Return votes as a ``PreferenceSet``.

    Args:
        votes: a ``PreferenceSet``, an object with one (``RaterVotes``, ``TownHall``), or a source of
            ``load_preferences``.
        options: options for reading.

    Example:
        >>> row = {"prompt": "Tea?", "response_a": "Yes.", "response_b": "No.", "votes_a": 3, "votes_b": 2}
        >>> len(as_preferences([row]))
        1
    """
    if isinstance(votes, PreferenceSet):
        return votes
    if isinstance(held := getattr(votes, "preferences", None), PreferenceSet):
        return held
    return load_preferences(votes, options)  # type: ignore[arg-type]


def as_choices(choices: VotesLike) -> PreferenceSet:
    """Return the choices of one person as a ``PreferenceSet``: single votes and rankings, with their ties.

    Example:
        >>> ranked = as_choices([{"prompt": "Tea?", "responses": ["Yes.", "No.", "Rum."], "ranking": [2, [0, 1]]}])
        >>> ranked.judgments and ranked.judgments.place
        array([0, 1, 1], dtype=int32)
    """
    options = LoadOptions(min_votes=1, ties="half")
    if isinstance(choices, PreferenceSet) or hasattr(choices, "preferences") or kind_of(choices) != "records":
        return as_preferences(choices, options)
    records, bad = open_records(choices, options)
    bad.can_skip = False
    return read_comparisons(records, bad, options)


@show_options(LoadOptions)
def load_preferences(
    source: VoteSource, options: LoadOptions | None = None, *, progress: Progress | None = None, **changes: Any
) -> PreferenceSet:
    """Load votes from any supported source.

    Args:
        source: a path (``.jsonl``, ``.csv``, ``.parquet``, each also gzipped), ``-`` for standard input, an open binary
            file, records as dicts, a pandas DataFrame, a ``datasets`` object, ``hf:ID`` or ``hf:ID:CONFIG``, or a known
            set: ``multipref``, ``personalllm``, ``helpsteer2``, ``helpsteer2-preference``, ``helpsteer3``, ``tldr``
            (from the hub, or ``NAME:FOLDER`` from a copy), ``demo`` (``demo:PAIRS``), ``demo-rankings``.
        options: options for reading; ``changes`` are its fields by name.
        progress: called regularly with the amount done and the total.

    Example:
        >>> row = {"prompt": "Tea?", "response_a": "Yes.", "response_b": "No.", "votes_a": 3, "votes_b": 2}
        >>> load_preferences([row]).prob_a
        array([0.6])
    """
    options = with_changes(options or LoadOptions(), changes)
    kind = kind_of(source)
    if kind == "demo":
        return load_town_hall(source).preferences
    if kind == "known":
        name, _, rest = str(source).partition(":")
        votes = KNOWN_SETS[name](rest, options, progress)
    elif kind == "saved":
        votes = _load_saved(str(source), options)
    else:
        votes = read_comparisons(*open_records(source, options, progress), options)
    votes = votes.without_official_split() if options.split == "prompts" else votes
    return replace(votes, loaded=Loaded.of(source, options))


def kind_of(source: object) -> Literal["demo", "known", "saved", "records"]:
    """Return what a source is: the town hall (``demo``), a known set, a file of ``PreferenceSet.save``, or records."""
    if not isinstance(source, str | os.PathLike):
        return "records"
    if exists(source):
        return "saved" if Path(source).is_file() and is_saved_set(source) else "records"
    name = str(source).partition(":")[0]
    return "demo" if name in DEMOS else "known" if name in KNOWN_SETS else "records"


def _load_saved(path: str, options: LoadOptions) -> PreferenceSet:
    """Return a set that was saved, with its own tie rule unless the options have another one than the default."""
    if options.rename:
        raise UsageError(f"rename does not apply to {path}: its columns are known.")
    saved = PreferenceSet.load(path)
    saved = saved.with_ties(options.ties) if options.ties != "drop" else saved
    enough = saved.n_votes >= (options.min_votes or 1)
    if enough.all():
        return saved
    if not enough.any():
        raise DataError(
            "no pair has enough votes", file=path, remedy=f"use a smaller min_votes, such as {spelled(min_votes=1)}"
        )
    kind = f"pairs with fewer than {options.min_votes} votes"
    return replace(saved[enough], dropped={**saved.dropped, kind: int((~enough).sum())})


def is_table(source: object) -> Literal["pandas", "datasets"] | None:
    """Return the package of a pandas DataFrame or a ``datasets`` object, without importing it, else None."""
    package = type(source).__module__.partition(".")[0]
    if package == "datasets":
        return "datasets"
    return "pandas" if package == "pandas" and hasattr(source, "columns") else None


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a file or folder of this name."""
    try:
        return Path(path).exists()
    except OSError:  # such as a name that is too long
        return False


def load_town_hall(source: VoteSource) -> TownHall:
    """Return the town hall that ``demo`` or ``demo:PAIRS`` names; in that of ``demo-rankings`` people rank answers."""
    name, _, size = str(source).partition(":")
    if size and not re.fullmatch("[0-9]{1,9}", size):
        raise UsageError(f"PAIRS in {name}:PAIRS must be a whole number, not {shortened(size, SHOWN_LENGTH)!r}.")
    return town_hall(int(size or DEMOS[name]), rankings=name == "demo-rankings")


def open_records(
    source: VoteSource, options: LoadOptions, progress: Progress | None = None
) -> tuple[Iterator[tuple[int, Record]], BadRows]:
    """Return the numbered records of a source, with columns renamed, and where its invalid rows are reported."""
    bad = BadRows("the records", skip=options.skip_bad)
    records = _records(source, bad, progress)
    return (rename_columns(records, options.rename, bad.file, is_layout) if options.rename else records), bad


def _records(source: VoteSource, bad: BadRows, progress: Progress | None) -> Iterator[tuple[int, Record]]:
    """Return the numbered records, and put the name of the source into ``bad``."""
    if isinstance(source, str | os.PathLike):
        bad.file = str(source)
        if bad.file.startswith("hf:") and bad.file != "hf:":
            return hub_records(bad.file[3:], progress)
        if bad.file == "-":
            bad.file = "standard input"
            return read_records(sys.stdin.buffer, bad, progress)
        path = _existing_file(source)
        bad.file = str(path)
        return file_records(path, bad, progress)
    if hasattr(source, "read"):
        bad.file = str(getattr(source, "name", "a stream"))
        return read_records(source, bad, progress)
    if table := is_table(source):
        bad.file = "the dataset" if table == "datasets" else "the DataFrame"
        return dataset_records(source, progress) if table == "datasets" else _frame_records(source, bad)
    if isinstance(source, Mapping | bytes) or not isinstance(source, Iterable):
        raise UsageError(
            "votes must be a PreferenceSet, a path, a pandas DataFrame, a datasets object or a list of dicts, "
            f"not a {type(source).__name__}."
        )
    return _dict_records(source, bad)


def _frame_records(frame: Any, bad: BadRows) -> Iterator[tuple[int, Record]]:
    """Yield the rows of a pandas DataFrame; its missing values are nulls."""
    names = [str(name) for name in frame.columns]
    check_distinct(names, bad)
    values = []
    for position in range(len(names)):
        column = frame.iloc[:, position]
        cells = zip(column.tolist(), column.isna().tolist(), strict=True)
        values.append([None if is_missing else without_arrays(value) for value, is_missing in cells])
    for row, of_row in enumerate(zip(*values, strict=True), 1):
        yield row, dict(zip(names, of_row, strict=True))


def _dict_records(records: Iterable[Any], bad: BadRows) -> Iterator[tuple[int, Record]]:
    for row, record in enumerate(records, 1):
        if not isinstance(record, Mapping) or not all(isinstance(name, str) for name in record):
            problem = f"a record must be a dict with column names, not {shown(record)}"
            raise DataError(problem, file=bad.file, row=row, remedy="give a list of dicts")
        try:
            plain = without_arrays(record)
        except RecursionError:
            raise DataError("the record is nested too deeply", file=bad.file, row=row) from None
        yield row, plain


def _existing_file(source: str | os.PathLike[str]) -> Path:
    path = Path(source)
    if not str(source):
        raise DataError("the name of the data is empty", remedy="name a file or a known set")
    if not exists(path):
        known = [*DEMOS, *KNOWN_SETS]
        remedy = did_you_mean(str(path), known) if not path.suffix and "/" not in str(path) else "check the path"
        raise DataError("there is no such file or known set", file=str(path), remedy=remedy)
    if (path / "ensemble.json").is_file():
        remedy = "name the ensemble first, then a file of votes"
        raise DataError("it is the folder of an ensemble, not votes", file=str(path), remedy=remedy)
    if polis := sorted(path.glob("*participant*-votes.csv")):
        return polis[0]
    if path.is_dir():
        remedy = f"name a file in it, or NAME:FOLDER for a copy of {', '.join(KNOWN_SETS)}"
        raise DataError("it is a folder", file=str(path), remedy=remedy)
    return path


# --- Texts to score: single responses and pairs, in the forms that people give them in Python.


ItemsLike: TypeAlias = Iterable[Item | Mapping[str, Any] | Sequence[Any]] | DataFrameLike
"""Texts to score: (prompt, response), or dicts or rows with both."""
_FORM = 'write ("the prompt", "the response") or {"prompt": …, "response": …}'


def as_items(items: ItemsLike) -> list[Item]:
    """Return texts to score as (prompt, response) tuples.

    Args:
        items: tuples or lists of a prompt and a response, dicts with the keys ``prompt`` and ``response``, or a pandas
            DataFrame or ``datasets`` object with these columns. A prompt is a text or a list of messages.

    Raises:
        UsageError: an item is something else. The message names its position, from 0.

    Example:
        >>> as_items([{"prompt": "Tea?", "response": "Yes."}, ["Tea?", "No."]])
        [('Tea?', 'Yes.'), ('Tea?', 'No.')]
    """
    if is_table(items):
        records, _ = open_records(items, LoadOptions())  # type: ignore[arg-type]
        items = [record for _, record in records]
    if isinstance(items, PreferenceSet):
        raise UsageError("votes are pairs of responses: use pair_rewards, votes or prob_hat for a PreferenceSet.")
    if isinstance(items, str | bytes | os.PathLike | Mapping) or not isinstance(items, Iterable):
        raise UsageError(f"items must be a list of (prompt, response), not {shown(items)}.")
    return [_as_item(item, position) for position, item in enumerate(items)]


def _as_item(item: Any, position: int) -> Item:
    try:
        if isinstance(item, Mapping):
            prompt, response = item.get("prompt"), item.get("response")
            if prompt is None or response is None:
                raise RowError("", "it has no " + ("prompt" if prompt is None else "response"), "")
        elif isinstance(item, tuple | list) and len(item) == 2:
            prompt, response = item
        else:
            raise RowError("", f"it is {shown(item)}", "")
        text = checked_text(prompt, "prompt") if isinstance(prompt, str) else read_messages(prompt, "the prompt")
        return text, read_response(response, "the response")
    except RowError as error:
        raise UsageError(f"items[{position}] cannot be scored: {error.problem}; {_FORM}.") from None


class PairTexts(NamedTuple):
    """Pairs to compare: distinct texts, and the positions of both texts of each pair."""

    texts: list[Item]
    a: IndexArray
    b: IndexArray


def pair_texts(pairs: VotesLike) -> PairTexts:
    """Return the texts of pairs. Votes are not needed.

    Rows with the columns prompt, response_a and response_b give one pair each, in order. Other layouts are read as
    ``load_preferences`` reads them.

    Args:
        pairs: a ``PreferenceSet``, or a source of ``load_preferences`` whose rows may lack votes.

    Example:
        >>> pair_texts([{"prompt": "Tea?", "response_a": "Yes.", "response_b": "No."}]).texts
        [('Tea?', 'Yes.'), ('Tea?', 'No.')]
    """
    if isinstance(held := getattr(pairs, "preferences", pairs), PreferenceSet):
        items = held.items()
        return PairTexts(texts_of(held), items.a, items.b)
    options = LoadOptions(min_votes=1)
    if kind_of(pairs) != "records":
        return pair_texts(load_preferences(pairs, options))  # type: ignore[arg-type]
    records, bad = open_records(pairs, options)  # type: ignore[arg-type]
    first, records = peeked(records, bad)
    if not {"prompt", "response_a", "response_b"} <= first.keys():
        return pair_texts(read_comparisons(records, bad, options))
    sides: list[Item] = []
    bad.can_skip = False
    for row, record in records:
        with bad.row(row):
            sides += _read_pair(record)
    texts, index = distinct(sides)
    return PairTexts(texts, index[0::2], index[1::2])


def _read_pair(record: Record) -> list[Item]:
    prompt = read_prompt(record.get("prompt"))
    return [(prompt, read_response(record.get(name), name)) for name in ("response_a", "response_b")]
