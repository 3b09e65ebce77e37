"""The command line: each command calls the public function of the same name and shows what it returned.

Decided here: what is printed where. Results go to stdout (with ``--json`` one object and nothing else), talk and
progress to stderr; bad input is one sentence on stderr and exit code 2.
"""

import dataclasses
import functools
import inspect as introspection
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from pluralign import __version__
from pluralign.errors import PluralignError, UsageError
from pluralign.options import LoadOptions

if TYPE_CHECKING:
    from pluralign.preferences import PreferenceSet
    from pluralign.records import Progress

app = typer.Typer(
    name="pluralign",
    help="Learn a small weighted ensemble of reward models whose votes match how people's votes are shared.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A .jsonl[.gz], .csv or .parquet file, - for standard input, hf:ID, or a known set: multipref, "
        "personalllm, helpsteer2, tldr (NAME:FOLDER reads a local copy), demo (demo:PAIRS).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]


def with_options(config: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of a dataclass, with its help; it receives them as ``options``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(config)
        dials = []
        for dial in dataclasses.fields(config):
            is_mapping = get_origin(hints[dial.name]) is Mapping
            flags = (f"--{dial.name.replace('_', '-')}",)
            option = typer.Option(*flags, help=dial.metadata["help"], show_default=dial.default not in (None, False))
            kind = list[str] if is_mapping else hints[dial.name]
            default = [] if is_mapping else dial.default
            dials.append(
                introspection.Parameter(
                    dial.name, introspection.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
                )
            )

        @functools.wraps(command)
        def run(**values: Any) -> None:
            chosen = {dial.name: values.pop(dial.name) for dial in dials}
            chosen = {
                name: _as_mapping(name, value) if isinstance(value, list) else value for name, value in chosen.items()
            }
            command(**values, options=config(**chosen))

        own = [p for p in introspection.signature(command).parameters.values() if p.name != "options"]
        own = [p.replace(kind=introspection.Parameter.KEYWORD_ONLY) for p in own]
        run.__signature__ = introspection.Signature(own + dials)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in own + dials}
        return run

    return decorate


def _as_mapping(name: str, pairs: list[str]) -> dict[str, str]:
    if bad := [pair for pair in pairs if not all(pair.partition("="))]:
        raise UsageError(f"--{name} needs OURS=THEIRS, not {bad[0]!r}.")
    return dict(pair.split("=", 1) for pair in pairs)


# --- commands -------------------------------------------------------------------------------------------------------


@app.command(
    epilog="Examples:\n\n  pluralign inspect votes.jsonl.gz\n\n  pluralign inspect demo --json\n\n"
    "  zcat votes.jsonl.gz | pluralign inspect - --ties half\n\n"
    "  pluralign inspect rankings.jsonl --rename prompt=question --rename responses=statements"
)
@with_options(LoadOptions)
def inspect(data: Data, options: LoadOptions, as_json: Json = False, seed: Seed = 0) -> None:  # noqa: ARG001
    """Show what the votes hold: how much people disagree, and how much of it is only noise."""
    from pluralign import terminal
    from pluralign.inspection import inspect as inspect_votes

    facts = inspect_votes(_load(data, options))
    if as_json:
        _print_json(facts)
    else:
        terminal.show(terminal.inspection_page(facts))


@app.command(
    epilog="Examples:\n\n  pluralign demo\n\n  pluralign demo --pairs 1000000 -o town.jsonl\n\n"
    "  pluralign demo --pairs 500 --json"
)
def demo(
    pairs: Annotated[
        int, typer.Option(help="How many comparisons the town hall holds.", min=200, max=1_000_000)
    ] = 2000,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the votes to this .jsonl[.gz] or .parquet file and stop."),
    ] = None,
    as_json: Json = False,
    seed: Seed = 0,
) -> None:
    """Tell the whole story on the built-in town hall, a made-up place where everyone's true taste is known."""
    from pluralign import terminal
    from pluralign.demo import town_hall
    from pluralign.inspection import inspect as inspect_votes
    from pluralign.inspection import inspect_truth

    with _working(f"Asking the town about {pairs:,} pairs"):
        town = town_hall(pairs, seed=seed)
    if output:
        with _working(f"Writing {output}"):
            town.preferences.save(output)
        if as_json:
            _print_json({"file": str(output), "pairs": len(town.preferences)})
        else:
            print(f"Wrote {len(town.preferences):,} pairs to {output}. Next: pluralign inspect {output}")
        return
    facts = inspect_votes(town.preferences)
    truth = inspect_truth(town)
    if as_json:
        _print_json({"inspect": dataclasses.asdict(facts), "truth": dataclasses.asdict(truth)})
        return
    terminal.show(terminal.inspection_page(facts))
    terminal.show(terminal.example_pairs(town))
    terminal.show([terminal.truth_table(facts, truth)])


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say more on stderr.")] = False,
) -> None:
    """What holds for every command."""
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s: %(message)s")
    logging.addLevelName(logging.WARNING, "note")
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; a user's mistake is one sentence on stderr and exit code 2."""
    try:
        app(standalone_mode=True)
    except PluralignError as error:
        _fail(str(error))
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (PermissionError, IsADirectoryError, NotADirectoryError, FileNotFoundError) as error:
        _fail(f"{error.filename or 'a file'}: {(error.strerror or 'cannot be used').lower()}.")


def _fail(sentence: str) -> None:
    print(f"pluralign: {sentence}", file=sys.stderr)
    sys.exit(2)


# --- reading and showing --------------------------------------------------------------------------------------------


def _load(data: str, options: LoadOptions) -> "PreferenceSet":
    from pluralign.sources import load_preferences

    with _progress(f"Reading {data}") as progress:
        preferences = load_preferences(data, options, progress=progress)
    if preferences.dropped:
        left_out = ", ".join(f"{count:,} {kind}" for kind, count in preferences.dropped.items())
        print(f"note: left out of {preferences.name}: {left_out}.", file=sys.stderr)
    return preferences


@contextmanager
def _progress(what: str) -> Iterator["Progress | None"]:
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
def _working(what: str) -> Iterator[None]:
    """A bar on stderr that only says that work goes on."""
    with _progress(what):
        yield


def _print_json(result: Any) -> None:
    values = dataclasses.asdict(result) if dataclasses.is_dataclass(result) and not isinstance(result, type) else result
    print(json.dumps(_finite(values), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    """Replace NaN, which JSON has no word for, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
