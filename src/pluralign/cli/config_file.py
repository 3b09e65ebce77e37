"""Options of a command in a TOML file: ``--config FILE`` reads them, ``--save-config FILE`` writes those of a run.

A file has the names of the command line, its arguments included: ``data``, ``output``, ``k``, ``min-votes`` (or
``min_votes``). Options that map names to names, such as ``rename``, are tables. Options given on the command line win
over the file.
"""

import inspect as introspection
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from pluralign.cli.outputs import output_file
from pluralign.core.errors import UsageError, did_you_mean
from pluralign.core.files import atomic_write
from pluralign.core.version import __version__

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


def save_config(file: Path, command: str, parameters: Parameters, values: Mapping[str, Any]) -> None:
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
