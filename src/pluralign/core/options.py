"""Functions for the option classes of all rooms. Each room has its options in ``options.py``.

Those files import nothing heavy: ``pluralign --help`` reads them without numpy or torch.
"""

import inspect
import shlex
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields, replace
from typing import Any, TypeVar, get_args

from pluralign.core.errors import ON_COMMAND_LINE, UsageError, did_you_mean

LARGEST_SEED = 2**63 - 1

Options = TypeVar("Options")
Function = TypeVar("Function", bound=Callable[..., Any])


def option(default: Any, description: str) -> Any:
    """Return a dataclass field with a default and its help."""
    return field(default=default, metadata={"help": description})


def same_option(config: type, name: str) -> Any:
    """Return a dataclass field with the default and the help of another dataclass's field."""
    known = config.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return field(default=known.default, metadata=known.metadata)


def check_choices(options: Any, choices: Mapping[str, Any]) -> None:
    """Raise UsageError if an option is not one of the values of its ``Literal`` type.

    Args:
        options: a dataclass of options.
        choices: the ``Literal`` type of each field to check, by field name.
    """
    for name, literal in choices.items():
        value, allowed = str(getattr(options, name)), get_args(literal)
        if value not in allowed:
            raise UsageError(f"{name} cannot be {value!r}; {did_you_mean(value, allowed)}.")


def check_seed(seed: int) -> int:
    """Return a seed. Raises UsageError if it is negative or does not fit into 64 bits."""
    if seed < 0:
        raise UsageError(f"seed must not be negative, but it is {max(seed, -LARGEST_SEED)}.")
    if seed > LARGEST_SEED:
        raise UsageError(f"seed must be at most {LARGEST_SEED}.")
    return seed


def changed_options(options: Any) -> list[str]:
    """Return the names of the options that differ from their defaults."""
    return [option.name for option in fields(options) if getattr(options, option.name) != _default(option)]


def with_changes(options: Options, changes: Mapping[str, Any]) -> Options:
    """Return ``options`` with some fields replaced by name. Raises UsageError for an unknown name."""
    known = [option.name for option in fields(options)]  # type: ignore[arg-type]
    for name in changes:
        if name not in known:
            raise UsageError(f"there is no option {name!r}; {did_you_mean(name, known)}.")
    return replace(options, **changes)  # type: ignore[type-var]


def show_options(*configs: type) -> Callable[[Function], Function]:
    """Show the fields of option classes in the signature and the help of a function that takes them as ``**changes``.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Tea:
        ...     sugar: int = field(default=1, metadata={"help": "Spoons of sugar."})
        >>> @show_options(Tea)
        ... def brew(cups: int, **changes: Any) -> None:
        ...     "Brew tea."
        >>> inspect.signature(brew)
        <Signature (cups: int, *, sugar: int = 1) -> None>
        >>> print(brew.__doc__)
        Brew tea.
        <BLANKLINE>
        Fields of Tea:
            sugar: Spoons of sugar. Default: 1.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [part for part in signature.parameters.values() if part.kind is not inspect.Parameter.VAR_KEYWORD]
        keyword = inspect.Parameter.KEYWORD_ONLY
        options = [
            inspect.Parameter(option.name, keyword, default=_default(option), annotation=option.type)
            for config in configs
            for option in fields(config)
        ]
        function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        sections = [inspect.getdoc(function) or "", *map(_described, configs)]
        function.__doc__ = "\n\n".join(sections)
        return function

    return decorate


def _default(option: Any) -> Any:
    return option.default if option.default is not MISSING else option.default_factory()


def _described(config: type) -> str:
    lines = [f"Fields of {config.__name__}:"]
    for option in fields(config):
        default = _default(option)
        shown = f"{option.name}: {option.metadata['help']}" + ("" if default is None else f" Default: {default!r}.")
        lines.append(textwrap.fill(shown, 116, initial_indent=" " * 4, subsequent_indent=" " * 8))
    return "\n".join(lines)


def spelled(**options: Any) -> str:
    """Return options as a message names them: as arguments of Python, or as flags if a command runs.

    Example:
        >>> spelled(skip_bad=True, rename={"prompt": "question"})
        "skip_bad=True, rename={'prompt': 'question'}"
    """
    if ON_COMMAND_LINE.is_set():
        return shlex.join(as_flags(options))
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line.

    Example:
        >>> as_flags({"k": 4, "surface": False, "lora": True, "rename": {"prompt": "question"}, "n": 8})
        ['--k', '4', '--no-surface', '--lora', '--rename', 'prompt=question', '-n', '8']
    """
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            words += [word for ours, theirs in value.items() for word in (f"--{flag}", f"{ours}={theirs}")]
        else:
            words += ["-n" if flag == "n" else f"--{flag}", str(value)]
    return words
