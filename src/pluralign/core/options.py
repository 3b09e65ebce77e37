"""Functions for the option classes of all rooms. Each room has its options in ``options.py``.

Those files import nothing heavy: ``pluralign --help`` reads them without numpy or torch.
"""

from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Any, TypeVar, get_args

from pluralign.core.errors import UsageError, did_you_mean

Options = TypeVar("Options")


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


def changed_options(options: Any) -> list[str]:
    """Return the names of the options that differ from their defaults."""
    return [option.name for option in fields(options) if getattr(options, option.name) != option.default]


def with_changes(options: Options, changes: Mapping[str, Any]) -> Options:
    """Return ``options`` with some fields replaced by name. Raises UsageError for an unknown name."""
    known = [option.name for option in fields(options)]  # type: ignore[arg-type]
    for name in changes:
        if name not in known:
            raise UsageError(f"there is no option {name!r}; {did_you_mean(name, known)}.")
    return replace(options, **changes)  # type: ignore[type-var]
