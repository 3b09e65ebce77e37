"""Candidates from a language model: several distinct responses to each prompt, sampled at a high temperature.

Decided here: where prompts come from, what one sampled response is, and that a file of candidates is always complete up
to its last line: an interrupted run goes on where it stopped, and a prompt that fails costs only itself. Who samples is
a ``Sampler``: a model in this process, or one behind a server (``servers``).
"""

import hashlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Protocol, TypeAlias

from pluralign.core.errors import DataError, UsageError
from pluralign.core.files import atomic_write
from pluralign.core.options import with_changes
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import ENSEMBLE_FILE
from pluralign.ensemble.held_out import VOTES_FILE
from pluralign.models.causal import LocalModel
from pluralign.models.completion import Completion
from pluralign.models.options import MAX_CONCURRENCY, RemoteOptions, SamplingOptions
from pluralign.models.remote import ServerModel
from pluralign.votes.builder import BadRows, RowError, check_text
from pluralign.votes.formats import read_records
from pluralign.votes.layouts import read_prompt
from pluralign.votes.load import load_preferences
from pluralign.votes.paper_sets import KNOWN_SETS, prism_prompts
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt, PromptLike

ROUNDS = 5
"""How often a prompt is sampled in all where responses repeat each other."""
FAILED_SUFFIX = ".failed"
COUNTS = ("repeats", "empty", "cut_off")
"""What is counted of each prompt's samples."""

Failure: TypeAlias = dict[str, Any]


class Sampler(Protocol):
    """What answers prompts."""

    @property
    def name(self) -> str:
        """What the model is called; kept with each line of a file."""
        ...

    def prepare(self) -> None:
        """Load or reach the model; called once, and only where something is to be sampled."""
        ...

    def sample(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[Completion]:
        """Return n sampled responses, which may repeat each other; a prompt it cannot answer is a ``DataError``."""
        ...


@dataclass(frozen=True)
class Sampled:
    """Distinct responses to one prompt, and what was left out."""

    responses: list[str]
    repeats: int
    empty: int
    cut_off: int
    """Of the responses, those that do not end by themselves."""


@dataclass(frozen=True)
class Generation:
    """What a run of ``generate`` did; ``lines`` and ``responses`` are of this run and those it went on from."""

    file: str
    model: str
    prompts: int
    """Distinct prompts asked for."""
    lines: int
    """Prompts that have candidates in the file."""
    resumed: int
    """Of them, those that an earlier run had finished."""
    responses: int
    """Distinct responses to these prompts."""
    repeats: int
    """Responses sampled once more and left out."""
    empty: int
    """Responses without any text, left out."""
    cut_off: int
    """Of the responses, those that were cut off at the longest length."""
    short: int
    """Prompts with fewer distinct responses than asked for after all rounds."""
    failed: list[Failure]
    """Prompts without candidates, each with the reason."""
    seconds: float


# --- prompts --------------------------------------------------------------------------------------------------------


@dataclass
class _BadPrompts(BadRows):
    """Rows that hold no prompt: kept as failures, so that they do not lose the rest."""

    failures: list[Failure] = field(default_factory=list)

    def report(self, row: int | None, error: RowError) -> None:
        self.failures.append({"row": row, "error": str(DataError(error.problem, file=self.file, row=row))})


def load_prompts(
    source: str | os.PathLike[str] | IO[bytes], *, limit: int | None = None, seed: int = 0
) -> tuple[list[PromptLike], list[Failure]]:
    """Return distinct prompts in their order, and the rows that hold none.

    Args:
        source: a JSON Lines, CSV or Parquet file with a column ``prompt`` (prompts, candidates and votes have one),
            ``-``, an open binary file, ``prism`` or ``prism:FOLDER`` (what the paper uses), a set of votes as
            ``load_preferences`` takes it, or an ensemble's folder: the prompts that ``fit`` held out.
        limit: take only so many, drawn by a hash of prompt and seed: the same ones whatever the order.
        seed: of that draw.

    Example:
        >>> import io
        >>> load_prompts(io.BytesIO(b'{"prompt": "Tea?"}\\n{"prompt": "Rum?"}\\n{"prompt": "Tea?"}'))
        (['Tea?', 'Rum?'], [])
    """
    if limit is not None and limit < 1:
        raise UsageError(f"the limit must be at least one prompt, not {limit}.")
    given, failures = _read_prompts(source)
    prompts = list(dict.fromkeys(given))
    if limit is not None and limit < len(prompts):
        drawn = set(sorted(prompts, key=lambda prompt: Prompt(prompt).hash(seed))[:limit])
        prompts = [prompt for prompt in prompts if prompt in drawn]
    return prompts, failures


def _read_prompts(source: str | os.PathLike[str] | IO[bytes]) -> tuple[list[PromptLike], list[Failure]]:
    if not isinstance(source, str | os.PathLike):
        return _prompts_of(source, getattr(source, "name", "a stream"))
    name, _, rest = str(source).partition(":")
    path = Path(source)
    if path.is_dir() and (path / ENSEMBLE_FILE).is_file():
        if not (path / VOTES_FILE).is_file():
            remedy = "name a file of prompts, or fit again"
            raise DataError("no held-out votes were kept in it", file=str(path), remedy=remedy)
        return list(PreferenceSet.load(path / VOTES_FILE).prompts), []
    if name == "prism" and not path.exists():
        return list(prism_prompts(rest)), []
    if name in ("hf", "demo", *KNOWN_SETS) and not path.exists():
        return list(load_preferences(str(source)).prompts), []
    if str(source) == "-":
        return _prompts_of(sys.stdin.buffer, "standard input")
    if not path.is_file():
        problem = "this folder holds no ensemble" if path.is_dir() else "there is no such file"
        remedy = "name a file with a column prompt, prism, a set of votes or an ensemble's folder"
        raise DataError(problem, file=str(path), remedy=remedy)
    with path.open("rb") as stream:
        return _prompts_of(stream, str(path))


def _prompts_of(stream: Any, name: str) -> tuple[list[PromptLike], list[Failure]]:
    bad, prompts = _BadPrompts(name), []
    for row, record in read_records(stream, bad):
        try:
            prompt = read_prompt(record.get("prompt"))
            for text in (turn.content for turn in Prompt(prompt).turns):
                check_text(text, "prompt")
            prompts.append(prompt)
        except RowError as error:
            bad.report(row, error)
    if not prompts:
        problem = (
            f"no row holds a prompt ({bad.failures[0]['error']})" if bad.failures else "there are no prompts in it"
        )
        raise DataError(problem, file=name, remedy='write lines of {"prompt": "…"}')
    return prompts, bad.failures


# --- a model in this process ----------------------------------------------------------------------------------------


# --- distinct responses ---------------------------------------------------------------------------------------------


def find_sampler(model: str, remote: RemoteOptions | None = None) -> Sampler:
    """Return the sampler that a name stands for: a server's model where a server is named, else one in this process."""
    return ServerModel(model, remote) if remote and remote.base_url else LocalModel(model)


def sample_distinct(sampler: Sampler, prompt: PromptLike, n: int, options: SamplingOptions) -> Sampled:
    """Sample until there are n distinct responses, in at most ``ROUNDS`` rounds; there is at least one."""
    found: dict[str, bool] = {}  # and whether it was cut off
    repeats = empty = 0
    for attempt in range(ROUNDS):
        for completion in sampler.sample(prompt, n - len(found), options, prompt_seed(prompt, options.seed, attempt)):
            text = completion.text.strip()
            empty += not text
            repeats += text in found
            if text:
                found.setdefault(text, completion.cut_off)
        if len(found) == n:
            break
    if not found:
        raise DataError("the model wrote nothing, however often it was asked", remedy="check its chat template")
    return Sampled(list(found), repeats, empty, sum(found.values()))


def prompt_seed(prompt: PromptLike, seed: int, attempt: int = 0) -> int:
    """Return the seed of one prompt's samples, which depends on nothing but these.

    Example:
        >>> prompt_seed("Tea?", 0) == prompt_seed("Tea?", 0), prompt_seed("Tea?", 0) == prompt_seed("Rum?", 0)
        (True, False)
    """
    key = json.dumps([Prompt(prompt).key, not Prompt(prompt).is_chat, seed, attempt])
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")


# --- the file -------------------------------------------------------------------------------------------------------


def generate(
    prompts: Sequence[PromptLike] | str | os.PathLike[str],
    output: str | os.PathLike[str],
    model: str | Sampler,
    n: int,
    options: SamplingOptions | None = None,
    *,
    limit: int | None = None,
    concurrency: int = 1,
    progress: Progress | None = None,
    **changes: Any,
) -> Generation:
    """Sample n distinct responses to each prompt into a candidates file, one line a prompt.

    A line is written whole as soon as its prompt is finished, with the settings it came from. The same call goes on
    with an unfinished file; a file of other settings is refused. The responses to a prompt depend on it, the model and
    the settings, and not on the other prompts. Prompts that fail are listed in ``OUTPUT.failed`` and tried again by the
    next call. In the end the lines stand in the order of the prompts.

    Args:
        prompts: prompts, or where to read them (``load_prompts``).
        output: the candidates file, JSON Lines of {prompt, responses}.
        model: ``smollm2``, a folder or a hub id of a causal language model, or a ``Sampler`` such as ``ServerModel``.
        n: distinct responses to a prompt.
        options: how to sample; ``changes`` are its fields by name.
        limit: take only so many prompts, drawn by the seed.
        concurrency: prompts asked at the same time, from as many threads; for a server.
        progress: called with prompts done and in all.

    Reference: the paper's Section 5, "Do the reward models capture distinct preferences?".
    """
    options = with_changes(options or SamplingOptions(), changes)
    if n < 1:
        raise UsageError(f"n must be at least one response a prompt, not {n}.")
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise UsageError(f"concurrency must be from 1 to {MAX_CONCURRENCY}, not {concurrency}.")
    started, output = time.perf_counter(), Path(output)
    if output.is_dir():
        raise UsageError(f"{output} is a folder; name the file to write, such as {output / 'candidates.jsonl'}.")
    failed: list[Failure] = []
    if isinstance(prompts, str | os.PathLike):
        prompts, failed = load_prompts(prompts, limit=limit, seed=options.seed)
    else:
        prompts = list(dict.fromkeys(prompts))[:limit]
    sampler = find_sampler(model) if isinstance(model, str) else model
    settings = {"model": sampler.name, "n": n, **asdict(options)}
    done = _finished(output, settings)
    keyed = {Prompt(prompt).key: prompt for prompt in prompts}
    todo = [key for key in keyed if key not in done]
    if todo:
        sampler.prepare()
    errors: dict[str, DataError] = {}
    outcomes = _as_they_finish(lambda key: sample_distinct(sampler, keyed[key], n, options), todo, concurrency)
    with closing(outcomes):
        for position, (key, outcome) in enumerate(outcomes, len(keyed) - len(todo) + 1):
            if isinstance(outcome, DataError):
                errors[key] = outcome
            else:
                counts = {name: getattr(outcome, name) for name in COUNTS}
                came_from = {"sampled": {**counts, **settings}}
                _append(output, {"prompt": Prompt(keyed[key]).json, "responses": outcome.responses, **came_from})
                done[key] = {"responses": len(outcome.responses), "sampled": counts}
            if progress:
                progress(position, len(keyed))
    _put_in_order(output, list(done), list(keyed))
    failed += [{"prompt": Prompt(keyed[key]).json, "error": str(errors[key])} for key in todo if key in errors]
    _write_failures(Path(f"{output}{FAILED_SUFFIX}"), failed)
    lines = [done[key] for key in keyed if key in done]
    return Generation(
        file=str(output),
        model=sampler.name,
        prompts=len(keyed),
        lines=len(lines),
        resumed=len(keyed) - len(todo),
        responses=sum(line["responses"] for line in lines),
        repeats=sum(line["sampled"]["repeats"] for line in lines),
        empty=sum(line["sampled"]["empty"] for line in lines),
        cut_off=sum(line["sampled"]["cut_off"] for line in lines),
        short=sum(line["responses"] < n for line in lines),
        failed=failed,
        seconds=time.perf_counter() - started,
    )


def _as_they_finish(
    work: Callable[[str], Sampled], todo: Sequence[str], concurrency: int
) -> Generator[tuple[str, Sampled | DataError]]:
    """Yield each key with what ``work`` makes of it, or the ``DataError`` it raises; any other error ends it all.

    Threads are daemons, and begin nothing new after Ctrl-C or an error: nobody waits for a server's last answers.
    """
    if concurrency == 1:
        for key in todo:
            try:
                yield key, work(key)
            except DataError as error:
                yield key, error
        return
    waiting = deque(todo)
    finished: SimpleQueue[tuple[str, Sampled | Exception]] = SimpleQueue()

    def go_on() -> None:
        while True:
            try:
                key = waiting.popleft()
            except IndexError:
                return
            try:
                finished.put((key, work(key)))
            except Exception as error:  # told to the thread that reads
                finished.put((key, error))

    for _ in range(min(concurrency, len(todo))):
        threading.Thread(target=go_on, daemon=True).start()
    try:
        for _ in todo:
            key, outcome = finished.get()
            if isinstance(outcome, Exception) and not isinstance(outcome, DataError):
                raise outcome
            yield key, outcome
    finally:
        waiting.clear()


def _append(path: Path, line: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        stream.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def _put_in_order(path: Path, written: Sequence[str], wanted: Sequence[str]) -> None:
    """Put the lines of these prompts, which may have finished in any order, into theirs; others stay in front."""
    place = {key: position for position, key in enumerate(wanted)}
    places = [place.get(key, -1) for key in written]
    if places == sorted(places):
        return
    with path.open("rb") as stream:
        lines = list(stream)
    if len(lines) == len(places):  # else somebody has put two files together
        with atomic_write(path) as partial:
            partial.write_bytes(b"".join(lines[i] for i in sorted(range(len(lines)), key=places.__getitem__)))


def _finished(path: Path, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is known of the prompts that a file has candidates for; a line that a kill cut short is removed."""
    if not path.is_file():
        return {}
    whole, done = 0, {}
    with path.open("rb") as stream:
        for row, raw in enumerate(stream, 1):
            if not raw.endswith(b"\n"):
                break
            whole += len(raw)
            try:
                line = json.loads(raw)
                sampled, responses = dict(line["sampled"]), len(line["responses"])
                sampled.setdefault("cut_off", 0)  # earlier versions did not count them
                counts = {name: int(sampled.pop(name)) for name in COUNTS}
                key = Prompt(read_prompt(line["prompt"])).key
            except (ValueError, KeyError, TypeError, RowError):
                remedy = "name another file, or remove this one"
                raise DataError(
                    "pluralign generate did not write this line", file=str(path), row=row, remedy=remedy
                ) from None
            if other := [name for name in settings if sampled.get(name) != settings[name]]:
                was = ", ".join(f"{name} {sampled.get(name)}" for name in other)
                remedy = "name another file, or use these settings to go on with it"
                raise DataError(f"its candidates were sampled with {was}", file=str(path), row=row, remedy=remedy)
            done[key] = {"responses": responses, "sampled": counts}
    if whole < path.stat().st_size:
        with path.open("r+b") as stream:
            stream.truncate(whole)
    return done


def _write_failures(path: Path, failed: Sequence[Failure]) -> None:
    if not failed:
        path.unlink(missing_ok=True)
        return
    with atomic_write(path) as partial:
        partial.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in failed), encoding="utf-8")
