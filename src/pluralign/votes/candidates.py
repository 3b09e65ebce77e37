"""Candidates: several responses to one prompt, to be ranked or compared.

A candidates file is JSON Lines of {prompt, responses}. Repeated responses are dropped and counted.
"""

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.errors import DataError
from pluralign.core.types import Progress
from pluralign.votes.builder import BadRows, RowError, check_prompt, check_text
from pluralign.votes.formats import read_records
from pluralign.votes.layouts import is_layout, read_comparisons
from pluralign.votes.load import VotesLike, is_named_set, load_preferences, open_records
from pluralign.votes.options import LoadOptions
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt, PromptLike
from pluralign.votes.values import Record, Records, read_prompt, read_response


@dataclass(frozen=True)
class Candidates:
    """One prompt and distinct responses to it."""

    prompt: PromptLike
    responses: tuple[str, ...]
    repeats: int = 0
    """Number of repeated responses that were dropped."""

    @property
    def prompt_text(self) -> str:
        """The prompt for display, with one line per turn of a chat."""
        return Prompt(self.prompt).text


def load_candidates(source: str | os.PathLike[str] | IO[bytes], progress: Progress | None = None) -> list[Candidates]:
    """Read a candidates file: JSON Lines of {prompt, responses: [text, …]}, plain or gzipped.

    Lines with the same prompt are merged. A repeated response is kept once and counted.

    Args:
        source: a path, ``-`` for standard input, or an open binary file.
        progress: called regularly with the bytes read and the total.

    Example:
        >>> import io
        >>> lines = b'{"prompt": "Tea?", "responses": ["Yes.", "No.", "Yes."]}'
        >>> load_candidates(io.BytesIO(lines))
        [Candidates(prompt='Tea?', responses=('Yes.', 'No.'), repeats=1)]
    """
    if hasattr(source, "read"):
        return _read(source, getattr(source, "name", "a stream"), progress)
    if str(source) == "-":
        return _read(sys.stdin.buffer, "standard input", progress)
    path = Path(source)
    if not path.is_file():
        problem = "it is a folder" if path.is_dir() else "there is no such file"
        raise DataError(problem, file=str(path), remedy="name a .jsonl[.gz] file of {prompt, responses} lines")
    with path.open("rb") as stream:
        return _read(stream, str(path), progress)


CandidatesLike: TypeAlias = Sequence[Candidates] | VotesLike


def as_candidates(source: CandidatesLike) -> list[Candidates]:
    """Return candidates in any of their forms.

    Args:
        source: ``Candidates``; a file, a DataFrame or dicts of {prompt, responses}; or votes, whose responses to each
            prompt become its candidates.

    Example:
        >>> as_candidates([{"prompt": "Tea?", "responses": ["Yes.", "No."]}])
        [Candidates(prompt='Tea?', responses=('Yes.', 'No.'), repeats=0)]
    """
    if isinstance(source, list | tuple) and all(isinstance(entry, Candidates) for entry in source):
        return list(source)
    if isinstance(held := getattr(source, "preferences", source), PreferenceSet):
        return candidates_of(held)
    if is_named_set(source):
        return candidates_of(load_preferences(source))  # type: ignore[arg-type]
    records, bad = open_records(source, LoadOptions())  # type: ignore[arg-type]
    bad.can_skip = False
    first = next(records, None)
    if first is None:
        raise DataError("there are no candidates", file=bad.file, remedy="give at least one prompt with its responses")
    records = itertools.chain([first], records)
    if is_layout(first[1]) or "responses" not in first[1]:
        return candidates_of(read_comparisons(records, bad, LoadOptions()))
    return _merged(records, bad)


def _read(stream: Any, name: str, progress: Progress | None) -> list[Candidates]:
    bad = BadRows(name, can_skip=False)
    return _merged(read_records(stream, bad, progress, only_json=True), bad)


def _merged(records: Records, bad: BadRows) -> list[Candidates]:
    by_prompt: dict[PromptLike, dict[str, int]] = {}
    for row, record in records:
        try:
            prompt, responses = _read_line(record)
        except RowError as error:
            bad.report(row, error)
            continue
        counts = by_prompt.setdefault(prompt, {})
        for response in responses:
            counts[response] = counts.get(response, 0) + 1
    if not by_prompt:
        raise DataError("the file has no candidates", file=bad.file, remedy="give at least one line")
    return [
        Candidates(prompt, tuple(counts), repeats=sum(counts.values()) - len(counts))
        for prompt, counts in by_prompt.items()
    ]


def _read_line(record: Record) -> tuple[PromptLike, list[str]]:
    prompt = read_prompt(record.get("prompt"))
    check_prompt(prompt)
    given = record.get("responses")
    if not isinstance(given, list) or not given:
        raise RowError("wrong type", "responses must be a list of texts, not empty", 'write it as ["…", "…"]')
    responses = [read_response(value, f"response {position}") for position, value in enumerate(given, 1)]
    for position, response in enumerate(responses, 1):
        check_text(response, f"response {position}")
    return prompt, responses


def candidates_of(preferences: PreferenceSet, least: int = 2) -> list[Candidates]:
    """Return the responses to each prompt of a set of votes, for prompts with at least ``least`` responses.

    Responses are in the order of ``preferences.items()``.

    Example:
        >>> from pluralign import PreferenceSet
        >>> votes = PreferenceSet.from_columns(["Tea?", "Tea?"], ["Yes.", "No."], ["No.", "Rum."], [3, 1], [2, 4])
        >>> candidates_of(votes)
        [Candidates(prompt='Tea?', responses=('Yes.', 'No.', 'Rum.'), repeats=0)]
    """
    items = preferences.items()
    return [
        Candidates(
            preferences.prompts[items.prompt_index[rows[0]]], tuple(preferences.responses[items.response_index[rows]])
        )
        for rows in rows_by_prompt(preferences)
        if len(rows) >= least
    ]


def rows_by_prompt(preferences: PreferenceSet) -> list[npt.NDArray[np.int64]]:
    """Return the rows of ``preferences.items()`` of each prompt, in the order of ``preferences.prompts``."""
    prompt_index = preferences.items().prompt_index  # sorted: see ``items``
    return (
        np.split(np.arange(len(prompt_index)), np.flatnonzero(np.diff(prompt_index)) + 1) if len(prompt_index) else []
    )
