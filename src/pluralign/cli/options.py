"""The arguments and options that commands share, and dataclasses of options as flags and back."""

import dataclasses
import functools
import inspect as introspection
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from pluralign.answering.options import TuneOptions
from pluralign.cli.console import is_first_process, output_file
from pluralign.core.errors import UsageError, did_you_mean
from pluralign.core.files import atomic_write
from pluralign.core.options import check_seed
from pluralign.core.version import __version__
from pluralign.learning.options import FinetuneOptions, FitOptions
from pluralign.scale.options import EngineOptions
from pluralign.server.limits import ServeOptions
from pluralign.text.options import EncodeOptions, RemoteOptions, SamplingOptions
from pluralign.votes.options import Loaded, LoadOptions

if TYPE_CHECKING:
    from pluralign.ensemble.record import FitRecord


# --- Options of a command in a TOML file: ``--config FILE`` reads them, ``--save-config FILE`` writes those of a run.


TABLE = "OURS=THEIRS"
"""Placeholder in ``--help`` of options that are tables in a file."""
NOT_SAVED = ("json", "overwrite")
"""Options about one call of a command. A file may hold them; ``--save-config`` leaves them out."""

Parameters = Sequence[introspection.Parameter]


def config_parameters(parameters: Parameters) -> list[introspection.Parameter]:
    """Return the parameters ``config`` and ``save_config`` for a command with these other parameters."""
    read = typer.Option(
        metavar="FILE",
        callback=_reader(parameters),
        is_eager=True,  # before the other parameters look for their defaults
        expose_value=False,
        help="Read options from this TOML file, DATA and --output included. Options given here win over the file.",
    )
    save = typer.Option(
        metavar="FILE", help="Write the options of this run to a TOML file for --config, and run.", callback=output_file
    )
    return [
        introspection.Parameter(
            name, introspection.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option]
        )
        for name, option in (("config", read), ("save_config", save))
    ]


# --- reading ----------------------------------------------------------------------------------------------------------


def _reader(parameters: Parameters) -> Callable[[typer.Context, Path | None], None]:
    def read(ctx: typer.Context, file: Path | None) -> None:
        if file is not None and not ctx.resilient_parsing:
            ctx.default_map = read_config(file, parameters)

    return read


def read_config(file: Path, parameters: Parameters) -> dict[str, Any]:
    """Return the values of a TOML file by the names of a command's parameters.

    Raises:
        UsageError: the file is missing or no TOML, or has an unknown name or a value of another type.
    """
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no file {file}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} must be a TOML file: {error}.") from None
    known = {option_name(parameter): parameter for parameter in parameters}
    values = {}
    for name, value in found.items():
        option = name.replace("_", "-")
        if option not in known:
            raise UsageError(f"{file}: there is no option {name!r}; {did_you_mean(option, known)}.")
        values[known[option].name] = _checked(f"{file}: {name}", known[option], value)
    return values


def option_name(parameter: introspection.Parameter) -> str:
    """Return the name of a parameter on the command line without its dashes; arguments have the parameter's name."""
    option = get_args(parameter.annotation)[1]
    words = [option.default, *(option.param_decls or ())]  # typer keeps the first name of an option as its default
    long = [word.partition("/")[0][2:] for word in words if isinstance(word, str) and word.startswith("--")]
    return long[0] if long else parameter.name.replace("_", "-")


def _checked(place: str, parameter: introspection.Parameter, value: Any) -> Any:
    """Return a value of a TOML file as the command line takes it. Raises UsageError for another type."""
    kind = _kind(parameter)
    if kind == list[str]:
        if isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values()):
            return [f"{ours}={theirs}" for ours, theirs in value.items()]
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list) and all(isinstance(item, str) for item in values):
            return values
        raise UsageError(f"{place} must be a table of texts or a list of texts, not {_shown(value)}.")
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UsageError(f"{place} cannot be {_shown(value)}; {did_you_mean(str(value), get_args(kind))}.")
        return value
    allowed, words = {
        bool: ((bool,), "true or false"),
        int: ((int,), "a whole number"),
        float: ((int, float), "a number"),
    }.get(kind, ((str, int, float), "a text or a number"))
    if not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool):
        raise UsageError(f"{place} must be {words}, not {_shown(value)}.")
    if "\0" in str(value):
        raise UsageError(f"{place} must not have a null character.")
    return value if kind in (bool, int, float) else str(value)


def _kind(parameter: introspection.Parameter) -> Any:
    """Return the type of a parameter without ``| None``."""
    annotation = get_args(parameter.annotation)[0]
    if get_origin(annotation) is Literal or NoneType not in get_args(annotation):
        return annotation
    return next(kind for kind in get_args(annotation) if kind is not NoneType)


def _shown(value: Any) -> str:
    names = {bool: str(value).lower(), dict: "a table", list: "a list"}
    return names.get(type(value)) or repr(value)


# --- writing ----------------------------------------------------------------------------------------------------------


def write_config(file: Path, command: str, parameters: Parameters, values: Mapping[str, Any]) -> None:
    """Write the values of a command's parameters that differ from their defaults to a TOML file."""
    lines, tables = [f"# pluralign {__version__}: pluralign {command} --config {file.name}"], []
    for parameter in parameters:
        name, value = option_name(parameter), values[parameter.name]
        if name in NOT_SAVED or value == parameter.default or value is None:
            continue
        if get_args(parameter.annotation)[1].metavar == TABLE:
            rows = [item.partition("=") for item in value]
            tables += ["", f"[{name}]", *(f"{_toml(ours)} = {_toml(theirs)}" for ours, _, theirs in rows)]
        else:
            lines.append(f"{name} = {_toml(value)}")
    try:
        text = "\n".join([*lines, *tables, ""]).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{file} must be UTF-8, but a name in these options is not.") from None
    with atomic_write(file) as partial:
        partial.write_bytes(text)


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
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    text = str(value)
    if text.isdecimal() and text == str(int(text)):
        return text  # such as the number of members, which may also be a word
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has the escapes of JSON


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
}
"""The heading of each dataclass of options in ``--help``."""

Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="Votes: a .jsonl[.gz], .csv or .parquet file, - for standard input, hf:ID, or a known set: multipref, "
        "personalllm, helpsteer2, tldr (NAME:FOLDER reads a local copy), demo (demo:PAIRS).",
    ),
]
EnsembleFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Ensemble folder, written by pluralign fit.")]
OtherVotes = Annotated[
    str | None,
    typer.Argument(metavar="[DATA]", help="Votes not used for training (default: the held-out votes saved in DIR)."),
]
OtherVotesOption = Annotated[
    str | None,
    typer.Option("--data", help="Votes not used for training (default: the held-out votes saved in DIR)."),
]
AllPrompts = Annotated[
    bool,
    typer.Option("--all", help="Measure on training prompts too (default: they are left out). Scores are too good."),
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
PromptLimit = Annotated[int | None, typer.Option(help="Use a random sample of this many prompts.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]


def _checked_seed(seed: int) -> int:
    check_seed(seed)
    return seed


Seed = Annotated[int, typer.Option(help="Random seed.", callback=_checked_seed)]


# --- dataclasses of options as flags ----------------------------------------------------------------------------------


def with_options(*configs: type, config_file: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of each dataclass, with the help of the field.

    The command receives a ``LoadOptions`` as ``load_options``, a ``FitOptions`` as ``fit_options``, and so on. A
    parameter ``named`` receives the names of the options that the user gave, also with their default values. With
    ``config_file`` the command also has ``--config`` and ``--save-config``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        flags = {config: [_as_parameter(config, field) for field in dataclasses.fields(config)] for config in configs}
        received = {config: config.__name__.replace("Options", "_options").lower() for config in configs}
        takes_names = "named" in introspection.signature(command).parameters

        @functools.wraps(command)
        def run(save_config: Path | None = None, context: typer.Context | None = None, **values: Any) -> None:
            values.pop("config", None)
            given = dict(values)
            for config, name in received.items():
                chosen = {flag.name: values.pop(flag.name) for flag in flags[config]}
                values[name] = config(
                    **{key: _as_mapping(key, v) if isinstance(v, list) else v for key, v in chosen.items()}
                )
            if save_config is not None and is_first_process():
                write_config(save_config, command.__name__, parameters, given)
            if takes_names and context is not None:
                values["named"] = {name for name in given if _is_given(context, name)}
            command(**values)

        hidden = (*received.values(), "named")
        own = [p for p in introspection.signature(command).parameters.values() if p.name not in hidden]
        own = [p.replace(kind=introspection.Parameter.KEYWORD_ONLY) for p in own]
        parameters = own + [flag for of_config in flags.values() for flag in of_config]
        signature = [*parameters, *(config_parameters(parameters) if config_file else [])]
        if takes_names:
            keyword = introspection.Parameter.KEYWORD_ONLY
            signature.append(introspection.Parameter("context", keyword, annotation=typer.Context))
        run.__signature__ = introspection.Signature(signature)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature}
        return run

    return decorate


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


_hints = functools.cache(get_type_hints)


def _as_parameter(config: type, field: dataclasses.Field[Any]) -> introspection.Parameter:
    kind, default = _hints(config)[field.name], field.default
    if get_origin(kind) is Mapping:
        kind, default = list[str], []
    elif kind == int | str:
        kind, default = str, str(default)
    flag = f"--{field.name.replace('_', '-')}"
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool and default else flag,
        metavar=TABLE if get_origin(_hints(config)[field.name]) is Mapping else None,
        help=field.metadata["help"],
        show_default=default is not None and not isinstance(default, bool),
        rich_help_panel=PANELS[config],
    )
    return introspection.Parameter(
        field.name, introspection.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _as_mapping(name: str, pairs: list[str]) -> dict[str, str]:
    if bad := [pair for pair in pairs if not all(pair.partition("="))]:
        raise UsageError(f"--{name} must be OURS=THEIRS, not {bad[0]!r}.")
    names = [pair.partition("=")[0] for pair in pairs]
    if twice := [ours for ours in names if names.count(ours) > 1]:
        raise UsageError(f"--{name} must not give the name {twice[0]!r} to two columns.")
    return dict(pair.split("=", 1) for pair in pairs)


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
        data = "-" if data == "standard input" else data
        commands.append(["pluralign", "fit", data, "-o", str(fitted_in), *_as_flags(record, loaded)])
    if pruned and pruned.source:
        only_far = ["--only-far"] if pruned.only_far else []
        words = ["pluralign", "prune", pruned.source, "-o", str(folder), "--beta", f"{pruned.beta:g}", *only_far]
        commands.append(words)
    return [*commands, ["pluralign", *last]]


def _as_flags(record: "FitRecord", loaded: Loaded) -> list[str]:
    """Return the recorded options that differ from the defaults of ``pluralign fit``."""
    defaults = dataclasses.asdict(FitOptions()) | dataclasses.asdict(FinetuneOptions())
    defaults |= dataclasses.asdict(LoadOptions()) | {"raters": None}
    used = {**loaded.options, "raters": loaded.raters, **record.options, **(record.tuning or {})}
    words = []
    for name, value in used.items():
        if name not in defaults or value == defaults[name] or (loaded.raters and name == "level"):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            words += [word for ours, theirs in value.items() for word in (f"--{flag}", f"{ours}={theirs}")]
        else:
            words += [f"--{flag}", str(value)]
    return words
