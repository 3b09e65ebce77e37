"""The arguments and options that commands share, and dataclasses of options as flags and back."""

import dataclasses
import functools
import inspect as introspection
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from pluralign.cli.config_file import TABLE, config_parameters
from pluralign.cli.config_file import save_config as write_config
from pluralign.cli.console import is_first_process
from pluralign.core.errors import UsageError
from pluralign.core.options import check_seed
from pluralign.features.options import EncodeOptions
from pluralign.models.options import RemoteOptions, SamplingOptions
from pluralign.policies.options import TuneOptions
from pluralign.scale.options import EngineOptions
from pluralign.server.options import ServeOptions
from pluralign.training.options import FinetuneOptions, FitOptions
from pluralign.votes.options import Loaded, LoadOptions

if TYPE_CHECKING:
    from pluralign.ensemble.record import FitRecord

SHARED_CANDIDATES = 8
"""Candidates to sample if ``-n`` is not given."""
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
