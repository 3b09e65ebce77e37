"""Values as JSON can hold them, and dataclasses built from JSON."""

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from pluralign.core.text import is_unicode

JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON: what a file holds, or what ``to_json`` returns."""
Value = TypeVar("Value")
LARGEST = 1e300
"""Whole numbers above it are no floats."""


def to_json(value: Any) -> Any:
    """Return a value as JSON can hold it: dataclasses as objects, arrays as lists, NaN and infinities as None.

    Values inside it that have a method ``to_json`` are what that returns. ``value`` itself is read by its fields, so
    that its own ``to_json`` may call this.

    Example:
        >>> to_json({"noise": float("nan"), "pairs": (1, 2.5)})
        {'noise': None, 'pairs': [1, 2.5]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {part.name: _inner(getattr(value, part.name)) for part in dataclasses.fields(value)}
    if hasattr(value, "to_json"):
        return to_json(value.to_json())
    if isinstance(value, Mapping):
        return {key: _inner(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_inner(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _inner(value: Any) -> Any:
    return to_json(value.to_json() if hasattr(value, "to_json") else value)


def from_json(kind: type[Value], value: Any) -> Value:
    """Return a dataclass built from the JSON of ``to_json``, nested dataclasses included.

    Fields that the JSON lacks keep their defaults, other keys are ignored, and null for a float becomes NaN.

    Raises:
        TypeError: a value has the wrong type, or one is missing.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Score:
        ...     brier: float
        ...     k: int = 1
        >>> from_json(Score, {"brier": None, "other": 3})
        Score(brier=nan, k=1)
    """
    hints, found = get_type_hints(kind), _checked(value, isinstance(value, Mapping))
    parts = {part.name for part in dataclasses.fields(kind) if part.init}  # type: ignore[arg-type]
    return kind(**{name: _build(hints[name], item) for name, item in found.items() if name in parts})


def _build(hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        choices = [choice for choice in arguments if choice is not type(None)]
        return _build(choices[0], value) if len(choices) == 1 else _checked(value, type(value) in choices)
    if origin is Literal:
        return _checked(value, value in arguments)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_json(hint, value)
    if hint is float:
        is_number = value is None or type(value) is float or (type(value) is int and abs(value) < LARGEST)
        return float(_checked(math.nan if value is None else value, is_number))
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_build(kind, item) for kind, item in zip(kinds, _checked(value, type(value) is list), strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _build(arguments[1], item) for key, item in _checked(value, isinstance(value, Mapping)).items()}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return [_build(arguments[0], item) for item in _checked(value, type(value) is list)]
    if hint in (int, str, bool):
        return _checked(value, type(value) is hint and (hint is not str or is_unicode(value)))
    numbers = isinstance(value, list) and all(item is None or type(item) in (int, float) for item in value)
    return _checked(value, numbers)  # an array


def _checked(value: Any, is_valid: bool) -> Any:
    if not is_valid:
        raise TypeError(f"{value!r:.80} has the wrong type")
    return value
