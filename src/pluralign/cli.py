"""The command line: each command calls the public function of the same name and shows what it returned.

Decided here: what is printed where. Results go to stdout (with ``--json`` one object and nothing else), talk and
progress to stderr; bad input is one sentence on stderr and exit code 2.
"""

import dataclasses
import functools
import inspect as introspection
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from pluralign import __version__
from pluralign.errors import PluralignError, UsageError
from pluralign.jsonable import without_nan
from pluralign.options import FitOptions, LoadOptions

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
Folder = Annotated[Path, typer.Option("--output", "-o", help="Folder for the ensemble; holds unfinished work too.")]
Ensemble = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an ensemble that pluralign fit wrote.")]
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


def _as_parameter(config: type, dial: dataclasses.Field[Any]) -> introspection.Parameter:
    kind, default = get_type_hints(config)[dial.name], dial.default
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


# --- commands -------------------------------------------------------------------------------------------------------


@app.command(
    epilog="Examples:\n\n  pluralign inspect votes.jsonl.gz\n\n  pluralign inspect demo --json\n\n"
    "  zcat votes.jsonl.gz | pluralign inspect - --ties half\n\n"
    "  pluralign inspect rankings.jsonl --rename prompt=question --rename responses=statements"
)
@with_options(LoadOptions)
def inspect(data: Data, load_options: LoadOptions, as_json: Json = False, seed: Seed = 0) -> None:  # noqa: ARG001
    """Show what the votes hold: how much people disagree, and how much of it is only noise."""
    from pluralign import terminal
    from pluralign.inspection import inspect as inspect_votes

    facts = inspect_votes(_load(data, load_options))
    if as_json:
        _print_json(facts)
    else:
        terminal.show(terminal.inspection_page(facts))


@app.command(
    epilog="Examples:\n\n  pluralign fit votes.jsonl.gz -o ensemble\n\n"
    "  pluralign fit demo -o town --method stagewise --variant printed --k 4\n\n"
    "  pluralign fit votes.parquet -o soft --level policy --encoder smollm2 --json"
)
@with_options(LoadOptions, FitOptions)
def fit(data: Data, output: Folder, load_options: LoadOptions, fit_options: FitOptions, as_json: Json = False) -> None:
    """Learn an ensemble and judge it on held-out prompts; the same command resumes a killed fit."""
    from pluralign import terminal
    from pluralign.fitting import fit as fit_ensemble

    preferences = _load(data, load_options)
    with _progress("Encoding texts") as progress, terminal.FitWatch() as watch:
        ensemble = fit_ensemble(preferences, fit_options, folder=output, progress=progress, watch=watch)
    facts = {"folder": str(output), **ensemble.facts, "weights": ensemble.weights.tolist()}
    if as_json:
        _print_json(facts)
    else:
        terminal.show(terminal.fit_page(ensemble, str(output)))


@app.command(
    epilog="Examples:\n\n  pluralign evaluate ensemble other-votes.jsonl\n\n  pluralign evaluate ensemble demo --json"
)
@with_options(LoadOptions)
def evaluate(
    ensemble: Ensemble,
    data: Data,
    load_options: LoadOptions,
    as_json: Json = False,
    seed: Seed = 0,  # noqa: ARG001
) -> None:
    """Judge an ensemble, and the baselines fitted with it, on other votes."""
    from pluralign import terminal
    from pluralign.ensemble import RewardEnsemble
    from pluralign.evaluation import evaluate as evaluate_ensemble
    from pluralign.fitting import evaluation_facts

    loaded = RewardEnsemble.load(ensemble)
    preferences = _load(data, load_options)
    with _progress("Encoding texts") as progress:
        evaluation = evaluate_ensemble(loaded, preferences, progress=progress)
    facts = without_nan(evaluation_facts(evaluation))
    if as_json:
        _print_json(facts)
    else:
        terminal.show(terminal.evaluation_page(facts, f"{ensemble} on {preferences.name}"))


@app.command(epilog="Examples:\n\n  pluralign score ensemble texts.jsonl\n\n"
             "  echo '{\"prompt\": \"Tea?\", \"response\": \"Yes.\"}' | pluralign score ensemble")  # fmt: skip
def score(ensemble: Ensemble, file: Lines = "-", as_json: Json = False, seed: Seed = 0) -> None:  # noqa: ARG001
    """Print each member's reward for lines of {prompt, response}; streams JSON Lines."""
    from pluralign.streaming import score as score_lines

    _stream(ensemble, file, score_lines, as_json)


@app.command(epilog="Examples:\n\n  pluralign compare ensemble pairs.jsonl\n\n"
             "  echo '{\"prompt\": \"Tea?\", \"response_a\": \"Yes.\", \"response_b\": \"No.\"}' "
             "| pluralign compare ensemble")  # fmt: skip
def compare(ensemble: Ensemble, file: Lines = "-", as_json: Json = False, seed: Seed = 0) -> None:  # noqa: ARG001
    """Print the members' votes and their predicted share for lines of {prompt, response_a, response_b}."""
    from pluralign.streaming import compare as compare_lines

    _stream(ensemble, file, compare_lines, as_json)


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
    encoder: Annotated[str, typer.Option(help="What reads the texts: see pluralign fit.")] = "minilm",
    as_json: Json = False,
    seed: Seed = 0,
) -> None:
    """Tell the whole story on the built-in town hall, a made-up place where everyone's true taste is known."""
    from pluralign import terminal
    from pluralign.demo import town_hall
    from pluralign.inspection import inspect as inspect_votes
    from pluralign.inspection import inspect_truth
    from pluralign.walkthrough import walk_through

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
    facts, truth = inspect_votes(town.preferences), inspect_truth(town)
    if not as_json:
        terminal.show(terminal.inspection_page(facts))
        terminal.show(terminal.example_pairs(town))
        terminal.show([terminal.truth_table(facts, truth)])
    with _progress("Encoding what the town wrote") as progress:
        told, ensemble = walk_through(town, seed=seed, encoder=encoder, progress=progress)
    if as_json:
        _print_json({"inspect": facts, "truth": truth, "told": told, "members": ensemble.facts["members"]})
    else:
        terminal.show(terminal.story_page(told, ensemble.facts))


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
    except (PermissionError, IsADirectoryError, NotADirectoryError, FileNotFoundError, FileExistsError) as error:
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


def _stream(ensemble: Path, file: str, read: Callable[..., Iterator[dict[str, Any]]], as_json: bool) -> None:
    from pluralign.ensemble import RewardEnsemble

    loaded = RewardEnsemble.load(ensemble)
    if file != "-" and not Path(file).is_file():
        raise UsageError(f"there is no file {file}.")
    with nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as stream:
        lines = read(loaded, stream, "standard input" if file == "-" else file)
        if as_json:
            _print_json({"lines": list(lines)})
            return
        for line in lines:
            print(json.dumps(line, ensure_ascii=False), flush=True)


def _print_json(result: Any) -> None:
    print(json.dumps(without_nan(_plain(result)), ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    """Return dataclasses, also inside dicts and lists, as dicts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
