"""Candidates: several responses to one prompt, to be ranked or compared.

A candidates file is JSON Lines of {prompt, responses}. Repeated responses are dropped and counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.types import Progress
from pluralign.votes.layouts import is_layout, peeked, read_comparisons
from pluralign.votes.load import VotesLike, kind_of, load_preferences, open_records
from pluralign.votes.options import LoadOptions
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt, PromptLike
from pluralign.votes.values import RowError, read_prompt, read_response


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


CandidatesLike: TypeAlias = Sequence[Candidates] | VotesLike


def load_candidates(source: CandidatesLike, progress: Progress | None = None) -> list[Candidates]:
    """Return candidates in any of their forms.

    Lines with the same prompt are merged. A repeated response is kept once and counted.

    Args:
        source: a file (``-`` for standard input), an open binary file, a DataFrame or dicts of {prompt, responses:
            [text, …]}; votes, whose responses to each prompt become its candidates; or ``Candidates``.
        progress: called regularly with the bytes read and the total.

    Example:
        >>> import io
        >>> lines = b'{"prompt": "Tea?", "responses": ["Yes.", "No.", "Yes."]}'
        >>> load_candidates(io.BytesIO(lines))
        [Candidates(prompt='Tea?', responses=('Yes.', 'No.'), repeats=1)]
    """
    if isinstance(source, list | tuple) and all(isinstance(entry, Candidates) for entry in source):
        return list(source)
    if isinstance(held := getattr(source, "preferences", source), PreferenceSet):
        return candidates_of(held)
    if kind_of(source) != "records":
        return candidates_of(load_preferences(source, progress=progress))  # type: ignore[arg-type]
    records, bad = open_records(source, LoadOptions(), progress)  # type: ignore[arg-type]
    bad.can_skip = False
    first, records = peeked(records, bad)
    if is_layout(first) or "responses" not in first:
        return candidates_of(read_comparisons(records, bad, LoadOptions()))
    by_prompt: dict[PromptLike, Counter[str]] = {}
    for row, record in records:
        with bad.row(row):
            given = record.get("responses")
            if not isinstance(given, list) or not given:
                raise RowError("wrong type", "responses must be a list of texts, not empty", 'write it as ["…", "…"]')
            texts = [read_response(text, f"response {position}") for position, text in enumerate(given, 1)]
            by_prompt.setdefault(read_prompt(record.get("prompt")), Counter()).update(texts)
    return [
        Candidates(prompt, tuple(counts), repeats=counts.total() - len(counts)) for prompt, counts in by_prompt.items()
    ]


def candidates_of(preferences: PreferenceSet, least: int = 2) -> list[Candidates]:
    """Return the responses to each prompt of a set of votes, for prompts with at least ``least`` responses.

    Responses are in the order of ``preferences.items()``.

    Example:
        >>> from pluralign import PreferenceSet
        >>> votes = PreferenceSet.from_columns(["Tea?", "Tea?"], ["Yes.", "No."], ["No.", "Rum."], [3, 1], [2, 4])
        >>> candidates_of(votes)
        [Candidates(prompt='Tea?', responses=('Yes.', 'No.', 'Rum.'), repeats=0)]
    """
    texts = preferences.responses[preferences.items().response_index]
    by_prompt = zip(preferences.prompts, rows_by_prompt(preferences), strict=True)
    return [Candidates(prompt, tuple(texts[rows])) for prompt, rows in by_prompt if len(rows) >= least]


def rows_by_prompt(preferences: PreferenceSet) -> list[npt.NDArray[np.int64]]:
    """Return the rows of ``preferences.items()`` of each prompt, in the order of ``preferences.prompts``."""
    prompt_index = preferences.items().prompt_index  # sorted: see ``items``
    rows = np.split(np.arange(len(prompt_index)), np.flatnonzero(np.diff(prompt_index)) + 1)
    return rows if len(prompt_index) else []
