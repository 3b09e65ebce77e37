"""Prompts for ``generate`` and ``tune``: from files, from data sets, or the held-out prompts of an ensemble.

A row without a prompt is a ``Failure``; the other rows are still read.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pluralign.core.errors import DataError, UsageError
from pluralign.ensemble.folder import ENSEMBLE_FILE
from pluralign.ensemble.held_out import has_held_out, load_held_out
from pluralign.votes.builder import BadRows, RowError, check_prompt
from pluralign.votes.formats import read_records
from pluralign.votes.load import load_preferences
from pluralign.votes.paper_sets import KNOWN_SETS, prism_prompts
from pluralign.votes.prompts import Prompt, PromptLike
from pluralign.votes.values import read_prompt


@dataclass(frozen=True)
class Failure:
    """A row without a prompt, or a prompt without candidates, and the reason."""

    error: str
    row: int | None = None
    """Row of the file, if the row has no prompt."""
    prompt: PromptLike | None = None
    """The prompt, if sampling failed."""

    def to_json(self) -> dict[str, Any]:
        """Return {row, error} or {prompt, error}."""
        if self.prompt is None:
            return {"row": self.row, "error": self.error}
        return {"prompt": Prompt(self.prompt).json, "error": self.error}


@dataclass
class _BadPrompts(BadRows):
    """Collects the rows without a prompt."""

    failures: list[Failure] = field(default_factory=list)

    def report(self, row: int | None, error: RowError) -> None:
        self.failures.append(Failure(str(DataError(error.problem, file=self.file, row=row)), row=row))


def load_prompts(
    source: str | os.PathLike[str] | IO[bytes], *, limit: int | None = None, seed: int = 0
) -> tuple[list[PromptLike], list[Failure]]:
    """Return the distinct prompts of a source in order, and the rows without a prompt.

    Args:
        source: one of

            - a JSON Lines, CSV or Parquet file with a column ``prompt``: prompts, candidates or votes;
            - ``-`` for standard input, or an open binary file;
            - ``prism`` or ``prism:FOLDER``: the prompts of the paper;
            - a set of votes, as for ``load_preferences``;
            - the folder of an ensemble: its held-out prompts.
        limit: maximum number of prompts. They are drawn by a hash of prompt and seed, independent of the order.
        seed: of that draw.

    Example:
        >>> import io
        >>> load_prompts(io.BytesIO(b'{"prompt": "Tea?"}\\n{"prompt": "Rum?"}\\n{"prompt": "Tea?"}'))
        (['Tea?', 'Rum?'], [])
    """
    if limit is not None and limit < 1:
        raise UsageError(f"the limit must be at least one prompt, not {limit}.")
    rows, failures = _read_source(source)
    prompts = list(dict.fromkeys(rows))
    if limit is not None and limit < len(prompts):
        drawn = set(sorted(prompts, key=lambda prompt: Prompt(prompt).hash(seed))[:limit])
        prompts = [prompt for prompt in prompts if prompt in drawn]
    return prompts, failures


def _read_source(source: str | os.PathLike[str] | IO[bytes]) -> tuple[list[PromptLike], list[Failure]]:
    if not isinstance(source, str | os.PathLike):
        return _read_stream(source, getattr(source, "name", "a stream"))
    name, _, rest = str(source).partition(":")
    path = Path(source)
    if path.is_dir() and (path / ENSEMBLE_FILE).is_file():
        if not has_held_out(path):
            remedy = "name a file of prompts, or fit again"
            raise DataError("the ensemble has no held-out votes", file=str(path), remedy=remedy)
        return list(load_held_out(path).preferences.prompts), []
    if name == "prism" and not path.exists():
        return list(prism_prompts(rest)), []
    if name in ("hf", "demo", *KNOWN_SETS) and not path.exists():
        return list(load_preferences(str(source)).prompts), []
    if str(source) == "-":
        return _read_stream(sys.stdin.buffer, "standard input")
    if not path.is_file():
        problem = "this folder holds no ensemble" if path.is_dir() else "there is no such file"
        remedy = "name a file with a column prompt, prism, a set of votes or an ensemble's folder"
        raise DataError(problem, file=str(path), remedy=remedy)
    with path.open("rb") as stream:
        return _read_stream(stream, str(path))


def _read_stream(stream: Any, name: str) -> tuple[list[PromptLike], list[Failure]]:
    bad, prompts = _BadPrompts(name), []
    for row, record in read_records(stream, bad):
        try:
            prompt = read_prompt(record.get("prompt"))
            check_prompt(prompt)
            prompts.append(prompt)
        except RowError as error:
            bad.report(row, error)
    if not prompts:
        problem = f"no row holds a prompt ({bad.failures[0].error})" if bad.failures else "there are no prompts in it"
        raise DataError(problem, file=name, remedy='write lines of {"prompt": "…"}')
    return prompts, bad.failures
