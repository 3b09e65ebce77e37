"""The arguments and options that commands share, and dataclasses of options as flags and back."""

import dataclasses
import functools
import inspect as introspection
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from pluralign.answering.options import TuneOptions
from pluralign.cli.console import output_file, output_folder
from pluralign.core.errors import UsageError, did_you_mean
from pluralign.core.options import as_flags, check_seed
from pluralign.core.text import one_line, shortened
from pluralign.core.version import __version__
from pluralign.experiments.recipes import ReproduceOptions
from pluralign.learning.options import FinetuneOptions, FitOptions
from pluralign.scale.options import EngineOptions
from pluralign.server.options import ServeOptions
from pluralign.text.options import EncodeOptions, RemoteOptions, SamplingOptions
from pluralign.votes.options import LoadOptions

if TYPE_CHECKING:
    from pluralign.ensemble.record import FitRecord


# --- arguments and options of several commands ------------------------------------------------------------------------


TABLE = "OURS=THEIRS"
"""Placeholder in ``--help`` of options that are tables in a file."""
PANELS = {
    LoadOptions: "Reading votes",
    FitOptions: "Fitting",
    FinetuneOptions: "Fine-tuning (with --backbone)",
    EncodeOptions: "Encoding",
    EngineOptions: "Shards and workers",
    SamplingOptions: "Sampling",
    RemoteOptions: "Sampling from a server (with --base-url)",
    TuneOptions: "Tuning",
    ServeOptions: "Sampling and limits",
    ReproduceOptions: "Experiment",
}
"""The heading of each dataclass of options in ``--help``."""

Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="Votes: a .jsonl[.gz], .csv or .parquet file, - for standard input, hf:ID, or a known set: multipref, "
        "personalllm, helpsteer2, tldr (NAME:FOLDER reads a local copy), demo or demo-rankings (demo:PAIRS).",
    ),
]
EnsembleFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Ensemble folder, written by pluralign fit.")]
OtherVotes = Annotated[
    str | None,
    typer.Argument(metavar="[DATA]", help="Votes not used for training (default: the held-out votes saved in DIR)."),
]
OtherVotesOption = Annotated[
    str | None, typer.Option("--data", help="Votes not used for training (default: the held-out votes saved in DIR).")
]
Candidates = Annotated[
    str | None,
    typer.Option(help="JSON Lines of {prompt, responses} to rank (default: the responses of held-out prompts)."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an ensemble of other data or options in the output folder.")
]
Groups = Annotated[
    list[str],
    typer.Option(
        "--group", metavar="NAME", help="Group pairs by length, topic, strata or a column of DATA. Repeatable."
    ),
]
Prompts = Annotated[
    str,
    typer.Argument(
        metavar="PROMPTS",
        help="A file with a column prompt (prompts, candidates or votes), - for standard input, prism (or "
        "prism:FOLDER), a known set of votes, or an ensemble folder (its held-out prompts).",
    ),
]
PolicyFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder of pluralign tune: each member's policy writes its answer. Members without one choose among "
        "shared candidates. With --base-url: the adapters are models of that server.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]


def output_to(what: str, callback: Callable[[Path | None], Path | None] = output_folder) -> Any:
    """Return the option ``--output`` for a folder, or for a file with the callback ``output_file``."""
    return typer.Option("--output", "-o", callback=callback, help=what)


Seed = Annotated[int, typer.Option(help="Random seed.", callback=check_seed)]


# --- dataclasses of options as flags ----------------------------------------------------------------------------------


def with_options(*configs: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of each dataclass, with the help of the field.

    The command receives a ``LoadOptions`` as ``load_options``, a ``FitOptions`` as ``fit_options``, and so on.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        flags = {config: list(_parameters(config)) for config in configs}
        received = {config: config.__name__.replace("Options", "_options").lower() for config in configs}

        @functools.wraps(command)
        def run(**values: Any) -> None:
            for config, name in received.items():
                chosen = {flag.name: values.pop(flag.name) for flag in flags[config]}
                values[name] = config(
                    **{key: _as_mapping(key, v) if isinstance(v, list) else v for key, v in chosen.items()}
                )
            command(**values)

        own = [p for p in introspection.signature(command).parameters.values() if p.name not in received.values()]
        parameters = [p.replace(kind=introspection.Parameter.KEYWORD_ONLY) for p in own]
        parameters += [flag for of_config in flags.values() for flag in of_config]
        run.__signature__ = introspection.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameters(config: type) -> Iterator[introspection.Parameter]:
    """Yield the parameters for the fields of a dataclass that are options of the command line."""
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        if not field.metadata.get("command_line", True):
            continue
        kind, default, flag, metavar = hints[field.name], field.default, f"--{field.name.replace('_', '-')}", None
        if get_origin(kind) is Mapping:
            kind, default, metavar = list[str], [], TABLE
        elif kind == int | str:
            kind, default = str, str(default)
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if kind is bool and default else flag,
            metavar=metavar,
            help=field.metadata["help"],
            show_default=default is not None and not isinstance(default, bool),
            rich_help_panel=PANELS[config],
        )
        kinds = introspection.Parameter
        yield kinds(field.name, kinds.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _as_mapping(name: str, pairs: list[str]) -> dict[str, str]:
    if bad := [pair for pair in pairs if not all(pair.partition("="))]:
        raise UsageError(f"--{name} must be OURS=THEIRS, not {bad[0]!r}.")
    names = [pair.partition("=")[0] for pair in pairs]
    if twice := [ours for ours in names if names.count(ours) > 1]:
        raise UsageError(f"--{name} must not give the name {twice[0]!r} to two columns.")
    return dict(pair.split("=", 1) for pair in pairs)


# --- Options of a command in a TOML file: ``--config FILE`` reads them, ``--save-config FILE`` writes those of a run.


CONFIG_MARK = "# pluralign "
"""The start of a file of ``--save-config``."""
NOT_SAVED = ("json", "overwrite", "save-config")
"""Options about one call of a command. A file may hold the first two; ``--save-config`` leaves them out."""


def read_config(context: typer.Context, file: Path | None) -> None:
    """Make the values of a TOML file the defaults of a command's options.

    Raises:
        UsageError: the file is missing or no TOML, or has an unknown name or a value that the option does not take.
    """
    if file is None or context.resilient_parsing:
        return
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no file {file}.") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, thousands of digits, nested too deeply
        raise UsageError(f"{file} must be a TOML file: {one_line(error)}.") from None
    known: dict[str, Any] = {_long_name(option): option for option in context.command.params}
    del known["config"], known["save-config"]
    values: dict[str, Any] = {}
    for name, value in found.items():
        option = name.replace("_", "-")
        if option not in known:
            raise UsageError(f"{file}: there is no option {name!r}; {did_you_mean(option, known)}.")
        words = [f"{ours}={theirs}" for ours, theirs in value.items()] if isinstance(value, Mapping) else value
        words = [str(word) for word in (words if isinstance(words, list) else [words])]
        if "\0" in str(value):
            raise UsageError(f"{file}: {name} must not have a null character.")
        if isinstance(value, Mapping | list) and not known[option].multiple:
            raise UsageError(f"{file}: {name} must be one value, not {shortened(repr(value), 80)}.")
        values[known[option].name] = words if known[option].multiple else words[0]
        try:
            known[option].process_value(context, values[known[option].name])
        except typer.BadParameter as error:
            reason = error.message.replace("Input", "it").rstrip(".")
            raise UsageError(f"{file}: {name} cannot be {shortened(repr(value), 80)}: {reason}.") from None
    context.default_map = values


def config_text(context: typer.Context, file: Path) -> bytes:
    """Return the contents of a TOML file with the options that the user of a command gave."""
    lines, tables = [f"{CONFIG_MARK}{__version__}: pluralign {context.command.name} --config {file.name}"], []
    for option in context.command.params:
        name, source = _long_name(option), context.get_parameter_source(str(option.name))
        if name in NOT_SAVED or source is None or source.name == "DEFAULT":
            continue
        value = context.params.get(str(option.name))
        if option.metavar == TABLE:
            rows = [item.partition("=") for item in value or ()]
            tables += ["", f"[{name}]", *(f"{_toml(ours)} = {_toml(theirs)}" for ours, _, theirs in rows)]
        elif value is not None:
            lines.append(f"{name} = {_toml(value)}")
    try:
        return "\n".join([*lines, *tables, ""]).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{file} must be UTF-8, but a name in these options is not.") from None


def _long_name(option: Any) -> str:
    """Return the name of an option on the command line without its dashes, or the name of an argument."""
    return str(next((word for word in option.opts if word.startswith("--")), option.name)).removeprefix("--")


def _toml(value: Any) -> str:
    """Return a flat value as TOML.

    Example:
        >>> print(_toml(True), _toml(2e-05), _toml("8"), _toml('say "hi"'), _toml(["a", "b"]))
        true 2e-05 8 "say \\"hi\\"" ["a", "b"]
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    text = str(value)
    if text.isdecimal() and text == str(int(text)):
        return text  # such as the number of members, which may also be a word
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has the escapes of JSON


Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        callback=read_config,
        is_eager=True,  # before the other parameters look for their defaults
        expose_value=False,
        help="Read options from this TOML file, DATA and --output included. Options given here win over the file.",
    ),
]
SaveConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        callback=output_file,
        help="Write the options of this run to a TOML file for --config, at its end.",
    ),
]


# --- the commands that made a file ------------------------------------------------------------------------------------


def command_history(record: "FitRecord", folder: Path, last: Sequence[str]) -> list[list[str]]:
    """Return the commands that made a file: the fit, if its record holds data and options, and the last command.

    Args:
        record: of the fitted ensemble.
        folder: of the ensemble.
        last: arguments of the last command.

    Example:
        >>> from pluralign.ensemble.record import DataSummary, FitRecord
        >>> record = FitRecord(data=DataSummary("votes.csv", "", 90, 9, 10, 1), options={"k": 4, "surface": False})
        >>> for words in command_history(record, Path("town"), ["report", "town"]):
        ...     print(*words)
        pluralign fit votes.csv -o town --k 4 --no-surface
        pluralign report town
    """
    pruned, commands = record.pruned, []
    fitted_in = Path(pruned.source) if pruned and pruned.source else folder
    loaded = record.data.loaded if record.data else None
    if record.data and loaded and record.options and bool(loaded.raters) == (record.raters is not None):
        data = loaded.source or record.data.name
        defaults = {"raters": None, **vars(FitOptions()), **vars(FinetuneOptions()), **vars(LoadOptions())}
        used = {**loaded.options, "raters": loaded.raters, **record.options, **(record.tuning or {})}
        if loaded.raters:
            del used["level"]
        changed = {name: value for name, value in used.items() if value != defaults.get(name, value)}
        words = ["pluralign", "fit", "-" if data == "standard input" else data, "-o", str(fitted_in)]
        commands.append([*words, *as_flags(changed)])
    if pruned and pruned.source:
        words = ["pluralign", "prune", pruned.source, "-o", str(folder), "--beta", f"{pruned.beta:g}"]
        commands.append([*words, *([] if pruned.only_far else ["--furthest"])])
    return [*commands, ["pluralign", *last]]
