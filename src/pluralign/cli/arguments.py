"""What every command shares: its arguments and options, reading votes, progress on stderr, and JSON on stdout.

Decided here: how a dataclass of options becomes flags, and what goes to which stream. The commands are in ``cli``.
"""

import dataclasses
import functools
import inspect as introspection
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from pluralign.core.errors import UsageError
from pluralign.core.json_values import without_nan
from pluralign.votes.options import LoadOptions

if TYPE_CHECKING:
    from pluralign.core.types import Progress
    from pluralign.ensemble.ensemble import RewardEnsemble
    from pluralign.votes.preferences import PreferenceSet

Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A .jsonl[.gz], .csv or .parquet file, - for standard input, hf:ID, or a known set: multipref, "
        "personalllm, helpsteer2, tldr (NAME:FOLDER reads a local copy), demo (demo:PAIRS).",
    ),
]
Folder = Annotated[Path, typer.Option("--output", "-o", help="Folder for the ensemble; holds unfinished work too.")]
Ensemble = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an ensemble that pluralign fit wrote.")]
SubjectName = Annotated[
    str,
    typer.Argument(
        metavar="SUBJECT",
        help="Folder that pluralign fit wrote, a transformers reward model (folder or hub id), or a .jsonl, .csv or "
        ".parquet file of scores or probabilities.",
    ),
]
OtherVotes = Annotated[
    str | None,
    typer.Argument(metavar="[DATA]", help="Votes it did not learn from; else those that fit kept in DIR."),
]
OtherVotesOption = Annotated[
    str | None, typer.Option("--data", help="Votes it did not learn from; else those that fit kept in DIR.")
]
Groups = Annotated[
    list[str],
    typer.Option("--group", metavar="NAME", help="Groups of pairs: length, topic, strata or a column. Repeatable."),
]
Prompts = Annotated[
    str,
    typer.Argument(
        metavar="PROMPTS",
        help="A file with a column prompt (prompts, candidates or votes), - for standard input, prism (or "
        "prism:FOLDER), a known set of votes, or an ensemble's folder: the prompts held out.",
    ),
]
Lines = Annotated[str, typer.Argument(metavar="[FILE]", help="JSON Lines file, or - for standard input.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]


def with_options(*configs: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of each dataclass, with its help.

    The command receives a ``LoadOptions`` as ``load_options``, a ``FitOptions`` as ``fit_options``, and so on.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        dials = {config: [_as_parameter(config, dial) for dial in dataclasses.fields(config)] for config in configs}
        received = {config: config.__name__.replace("Options", "_options").lower() for config in configs}

        @functools.wraps(command)
        def run(**values: Any) -> None:
            for config, name in received.items():
                chosen = {dial.name: values.pop(dial.name) for dial in dials[config]}
                values[name] = config(
                    **{key: _as_mapping(key, v) if isinstance(v, list) else v for key, v in chosen.items()}
                )
            command(**values)

        own = [p for p in introspection.signature(command).parameters.values() if p.name not in received.values()]
        own = [p.replace(kind=introspection.Parameter.KEYWORD_ONLY) for p in own]
        parameters = own + [dial for of_config in dials.values() for dial in of_config]
        run.__signature__ = introspection.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


_hints = functools.cache(get_type_hints)


def _as_parameter(config: type, dial: dataclasses.Field[Any]) -> introspection.Parameter:
    kind, default = _hints(config)[dial.name], dial.default
    if get_origin(kind) is Mapping:
        kind, default = list[str], []
    elif kind == int | str:
        kind, default = str, str(default)
    flag = f"--{dial.name.replace('_', '-')}"
    flags = (f"{flag}/--no-{flag[2:]}",) if kind is bool and default else (flag,)
    option = typer.Option(
        *flags, help=dial.metadata["help"], show_default=default is not None and not isinstance(default, bool)
    )
    return introspection.Parameter(
        dial.name, introspection.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _as_mapping(name: str, pairs: list[str]) -> dict[str, str]:
    if bad := [pair for pair in pairs if not all(pair.partition("="))]:
        raise UsageError(f"--{name} needs OURS=THEIRS, not {bad[0]!r}.")
    return dict(pair.split("=", 1) for pair in pairs)


# --- reading and showing --------------------------------------------------------------------------------------------


def load_votes(data: str, options: LoadOptions) -> "PreferenceSet":
    """The votes that DATA names; what was left out of them is told on stderr."""
    from pluralign.votes.load import load_preferences

    with progress_bar(f"Reading {data}") as progress:
        preferences = load_preferences(data, options, progress=progress)
    if preferences.dropped:
        left_out = ", ".join(f"{count:,} {kind}" for kind, count in preferences.dropped.items())
        print(f"note: left out of {preferences.name}: {left_out}.", file=sys.stderr)
    return preferences


def held_out_for(folder: Path, ensemble: "RewardEnsemble", data: str | None, options: LoadOptions) -> "HeldOutVotes":
    """The held-out votes that fit kept in a folder, or others that are named."""
    from pluralign.ensemble.held_out import load_held_out, score_held_out

    if data is None:
        return load_held_out(folder)
    preferences = load_votes(data, options)
    with progress_bar("Encoding texts") as progress:
        return score_held_out(ensemble, preferences, progress)


@contextmanager
def progress_bar(what: str) -> Iterator["Progress | None"]:
    """A progress bar on stderr for work that reports itself; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(what), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A bar on stderr that only says that work goes on."""
    with progress_bar(what):
        yield


def stream_lines(ensemble: Path, file: str, read: Callable[..., Iterator[dict[str, Any]]], as_json: bool) -> None:
    """Print what ``read`` makes of each line of a file, line by line, or as one object."""
    from pluralign.ensemble.ensemble import RewardEnsemble

    loaded = RewardEnsemble.load(ensemble)
    if file != "-" and not Path(file).is_file():
        raise UsageError(f"there is no file {file}.")
    with nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as stream:
        lines = read(loaded, stream, "standard input" if file == "-" else file)
        if as_json:
            print_json({"lines": list(lines)})
            return
        for line in lines:
            print(json.dumps(line, ensure_ascii=False), flush=True)


def print_json(result: Any) -> None:
    """Print a result as one JSON object; what is not a number is null."""
    print(json.dumps(without_nan(_plain(result)), ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    """Return dataclasses, also inside dicts and lists, as dicts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
