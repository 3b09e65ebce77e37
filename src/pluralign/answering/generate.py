"""Candidates from a language model: several distinct responses to each prompt, sampled at random.

``sample_distinct`` samples one prompt from a ``Sampler``: a model in this process, or one behind a server.
``generate`` fills a file of candidates. An interrupted run resumes from its file. A prompt that fails does not affect
the others.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, TypeAlias

from pluralign.core.checkpoints import JsonLines
from pluralign.core.errors import DataError, UsageError
from pluralign.core.options import with_changes
from pluralign.core.types import Progress
from pluralign.ensemble.folder import ENSEMBLE_FILE
from pluralign.ensemble.held_out import has_held_out, load_held_out
from pluralign.text.causal import LocalModel, Sampler as Sampler
from pluralign.text.options import SamplingOptions
from pluralign.text.remote import ServerModel, as_completed as as_completed, language_model
from pluralign.votes.builder import BadRows
from pluralign.votes.formats import read_records
from pluralign.votes.load import load_preferences
from pluralign.votes.paper_sets import KNOWN_SETS, prism_prompts
from pluralign.votes.prompts import Prompt, PromptLike
from pluralign.votes.values import RowError, read_prompt

Source: TypeAlias = Sequence[PromptLike] | str | os.PathLike[str] | IO[bytes]

# --- Prompts for ``generate`` and ``tune``: from files, from data sets, or the held-out prompts of an ensemble.


@dataclass(frozen=True)
class Failure:
    """A row without a prompt, or a prompt without candidates, and the reason."""

    error: str
    row: int | None = None
    """Row of the file, if the row has no prompt."""
    prompt: Any = None
    """The prompt as JSON, if sampling failed."""


@dataclass
class _BadPrompts(BadRows):
    """Collects the rows without a prompt."""

    failures: list[Failure] = field(default_factory=list)

    def report(self, row: int | None, error: RowError) -> None:
        self.failures.append(Failure(str(DataError(error.problem, file=self.file, row=row)), row=row))


def load_prompts(source: Source, *, limit: int | None = None, seed: int = 0) -> tuple[list[PromptLike], list[Failure]]:
    """Return the distinct prompts of a source in order, and the rows without a prompt.

    Args:
        source: one of

            - a JSON Lines, CSV or Parquet file with a column ``prompt``: prompts, candidates or votes;
            - ``-`` for standard input, or an open binary file;
            - ``prism`` or ``prism:FOLDER``: the prompts of the paper;
            - a set of votes, as for ``load_preferences``;
            - the folder of an ensemble: its held-out prompts;
            - prompts.
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


def _read_source(source: Source) -> tuple[list[PromptLike], list[Failure]]:
    if isinstance(source, Sequence) and not isinstance(source, str):
        return list(source), []
    if not isinstance(source, str | os.PathLike):
        return _read_stream(source, getattr(source, "name", "a stream"))
    name, _, rest = str(source).partition(":")
    path = Path(source)
    if path.is_dir() and (path / ENSEMBLE_FILE).is_file():
        if not has_held_out(path):
            problem = "the ensemble has no held-out votes"
            raise DataError(problem, file=str(path), remedy="name a file of prompts, or fit again")
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
            prompts.append(prompt)
        except RowError as error:
            bad.report(row, error)
    if not prompts:
        problem = f"no row holds a prompt ({bad.failures[0].error})" if bad.failures else "there are no prompts in it"
        raise DataError(problem, file=name, remedy='write lines of {"prompt": "…"}')
    return prompts, bad.failures


ROUNDS = 5
"""Maximum number of times that one prompt is sampled, if responses repeat each other."""
FAILED_SUFFIX = ".failed"
"""Suffix of the file that lists failed prompts, beside the candidates file."""

# --- one prompt -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampled:
    """Distinct responses to one prompt, and counts of those left out."""

    responses: list[str]
    repeats: int
    """Repeated responses, left out."""
    empty: int
    """Responses without text, left out."""
    cut_off: int
    """Distinct responses that were cut off at the maximum length."""
    unfinished: Sequence[str] = ()
    """These responses; empty if a candidates file holds only their number."""

    @property
    def counts(self) -> dict[str, int]:
        """The counts, as a line of a candidates file stores them."""
        return {"repeats": self.repeats, "empty": self.empty, "cut_off": self.cut_off}


def concurrency_of(sampler: Sampler) -> int:
    """Return the number of prompts that a model is asked at the same time, each in a thread: several for a server."""
    return sampler.options.concurrency if isinstance(sampler, ServerModel) else 1


def sampling_for(sampler: Sampler, options: SamplingOptions) -> SamplingOptions:
    """Return the options with the defaults for a model: small local models are sampled at a lower temperature."""
    if isinstance(sampler, LocalModel | ServerModel):
        return sampler.with_defaults(options)
    return options.with_defaults(small=False)


def sample_distinct(sampler: Sampler, prompt: PromptLike, n: int, options: SamplingOptions) -> Sampled:
    """Sample a prompt until there are n distinct responses, at most ``ROUNDS`` times.

    Returns:
        Between 1 and n distinct responses.

    Raises:
        DataError: all responses were empty.
    """
    options = sampling_for(sampler, options)
    cut_off: dict[str, bool] = {}  # by distinct response
    repeats = empty = 0
    for attempt in range(ROUNDS):
        seed = prompt_seed(prompt, options.seed, attempt)
        for completion in sampler.sample(prompt, n - len(cut_off), options, seed):
            text = completion.text.strip()
            empty += not text
            repeats += text in cut_off
            if text:
                cut_off.setdefault(text, completion.cut_off)
        if len(cut_off) == n:
            break
    if not cut_off:
        raise DataError(f"the model wrote nothing in {ROUNDS} attempts", remedy="check its chat template")
    return Sampled(list(cut_off), repeats, empty, sum(cut_off.values()), [text for text in cut_off if cut_off[text]])


def prompt_seed(prompt: PromptLike, seed: int, attempt: int = 0) -> int:
    """Return the seed of one prompt's samples. It depends only on the arguments.

    Example:
        >>> prompt_seed("Tea?", 0) == prompt_seed("Tea?", 0), prompt_seed("Tea?", 0) == prompt_seed("Rum?", 0)
        (True, False)
    """
    key = json.dumps([Prompt(prompt).key, not Prompt(prompt).is_chat, seed, attempt])
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")


# --- a file of candidates ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    """The result of ``generate``; counts include earlier runs that it resumed."""

    file: str
    model: str
    prompts: int
    """Distinct prompts in the request."""
    lines: int
    """Prompts with candidates in the file."""
    resumed: int
    """Prompts that an earlier run had finished."""
    responses: int
    """Distinct responses to these prompts."""
    repeats: int
    """Repeated responses, left out."""
    empty: int
    """Responses without text, left out."""
    cut_off: int
    """Distinct responses that were cut off at the maximum length."""
    short: int
    """Prompts with fewer distinct responses than requested, after all rounds."""
    failed: list[Failure]
    """Rows without a prompt and prompts without candidates."""
    seconds: float


def generate(
    prompts: Sequence[PromptLike] | str | os.PathLike[str],
    output: str | os.PathLike[str],
    model: str | Sampler,
    n: int,
    options: SamplingOptions | None = None,
    *,
    limit: int | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> Generation:
    """Sample n distinct responses to each prompt into a candidates file, one line per prompt.

    A line is written as soon as its prompt is finished, and stores the settings. The same call resumes a partial file;
    a file with other settings is refused. The responses to a prompt depend only on the prompt, the model and the
    settings, not on other prompts. Prompts that fail are listed in ``OUTPUT.failed``; the next call tries them again.
    At the end the lines are sorted into the order of the prompts.

    Args:
        prompts: prompts, or their source (``load_prompts``).
        output: the candidates file, JSON Lines of {prompt, responses}.
        model: ``smollm2``, the folder or hub id of a causal language model, or a ``Sampler`` such as ``ServerModel``.
        n: number of distinct responses per prompt.
        options: how to sample; ``changes`` are its fields by name.
        limit: maximum number of prompts, drawn by the seed.
        progress: called with the number of finished prompts and the total.

    Reference: the paper's Section 5, "Do the reward models capture distinct preferences?".
    """
    options = with_changes(options or SamplingOptions(), changes)
    if n < 1:
        raise UsageError(f"n must be at least one response per prompt, not {n}.")
    started, output = time.perf_counter(), Path(output)
    if output.is_dir():
        raise UsageError(f"{output} is a folder; name the file to write, such as {output / 'candidates.jsonl'}.")
    prompts, failed = load_prompts(prompts, limit=limit, seed=options.seed)
    sampler = language_model(model) if isinstance(model, str) else model
    options = sampling_for(sampler, options)
    settings = {"model": sampler.name, "n": n, **asdict(options)}
    lines, failures = JsonLines(output), Path(f"{output}{FAILED_SUFFIX}")
    _check_owner(failures, b'{"error": ', "row")
    finished = _read_finished(lines, settings)
    by_key = {Prompt(prompt).key: prompt for prompt in prompts}
    remaining = [key for key in by_key if key not in finished]
    if remaining:
        sampler.prepare()
    errors: dict[str, DataError] = {}
    outcomes = as_completed(
        lambda key: sample_distinct(sampler, by_key[key], n, options), remaining, concurrency_of(sampler)
    )
    with closing(outcomes):
        for done, (key, outcome) in enumerate(outcomes, len(by_key) - len(remaining) + 1):
            if isinstance(outcome, DataError):
                errors[key] = outcome
            else:
                line = {"prompt": Prompt(by_key[key]).json, "responses": outcome.responses}
                lines.append(line | {"sampled": outcome.counts | settings})
                finished[key] = outcome
            if progress:
                progress(done, len(by_key))
    _sort_lines(lines, list(finished), list(by_key))
    failed += [Failure(str(errors[key]), prompt=Prompt(by_key[key]).json) for key in remaining if key in errors]
    if failed:
        JsonLines(failures).replace(asdict(failure) for failure in failed)
    else:
        failures.unlink(missing_ok=True)
    found = [finished[key] for key in by_key if key in finished]
    return Generation(
        file=str(output),
        model=sampler.name,
        prompts=len(by_key),
        lines=len(found),
        resumed=len(by_key) - len(remaining),
        responses=sum(len(line.responses) for line in found),
        repeats=sum(line.repeats for line in found),
        empty=sum(line.empty for line in found),
        cut_off=sum(line.cut_off for line in found),
        short=sum(len(line.responses) < n for line in found),
        failed=failed,
        seconds=time.perf_counter() - started,
    )


def _read_finished(lines: JsonLines, settings: Mapping[str, Any]) -> dict[str, Sampled]:
    """Return the finished prompts of a candidates file, by key, and remove a line that a kill left incomplete.

    Raises:
        DataError: a line is not from ``generate``, or was sampled with other settings. The file is not changed.
    """
    _check_owner(lines.path, b'{"prompt": ', "sampled")
    finished = {}
    for row, line in enumerate(lines.rows(), 1):
        try:
            sampled = dict(line["sampled"])
            repeats, empty, cut_off = (int(sampled[name]) for name in ("repeats", "empty", "cut_off"))
            found = Sampled(list(line["responses"]), repeats, empty, cut_off)
            key = Prompt(read_prompt(line["prompt"])).key
        except (ValueError, KeyError, TypeError, RowError):
            raise _foreign_line(lines.path, row) from None
        if changed := [name for name in settings if sampled.get(name) != settings[name]]:
            known = ", ".join(f"{name} {sampled.get(name)}" for name in changed)
            remedy = "name another file, or use these settings to resume"
            raise DataError(f"its candidates were sampled with {known}", file=str(lines.path), row=row, remedy=remedy)
        finished[key] = found
    lines.drop_torn_line()
    return finished


def _check_owner(path: Path, start: bytes, key: str) -> None:
    """Raise DataError if the first line of a file is not from ``generate``, so that no other file is emptied.

    Args:
        path: of the file, which may be missing.
        start: how a line of ``generate`` starts. A line that a kill left incomplete is the start of one.
        key: what a complete line holds.
    """
    if not path.is_file():
        return
    with path.open("rb") as stream:
        line = stream.read(len(start))
        ours = start.startswith(line)
        line += stream.readline() if line == start else b""
    try:
        complete = json.loads(line)
    except ValueError:
        ours = ours and not line.endswith(b"\n")
    else:
        ours = ours and isinstance(complete, dict) and key in complete
    if not ours:
        raise _foreign_line(path, 1)


def _foreign_line(path: Path, row: int) -> DataError:
    problem, remedy = "pluralign generate did not write this line", "name another file, or remove this one"
    return DataError(problem, file=str(path), row=row, remedy=remedy)


def _sort_lines(lines: JsonLines, written: Sequence[str], wanted: Sequence[str]) -> None:
    """Sort the lines of these prompts, which may have finished in any order; other lines come first."""
    place = {key: position for position, key in enumerate(wanted)}
    places = [place.get(key, -1) for key in written]
    if places == sorted(places):
        return
    rows = list(lines.rows())
    if len(rows) == len(places):  # not if the file holds a prompt twice, as two joined files do
        lines.replace(rows[i] for i in sorted(range(len(rows)), key=places.__getitem__))
