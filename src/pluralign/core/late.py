"""Functions of higher rooms, loaded when they are called.

Rooms import only the rooms below them. A few methods of lower rooms are shortcuts that people expect on an object, such
as ``ensemble.plot()``; they call a function of a higher room through ``late``. So do the names of ``pluralign``.
"""

import importlib
from collections.abc import Callable
from typing import Any

from pluralign.core.errors import MissingExtraError

EXTRAS = {"publishing": "report", "server": "server"}
"""Rooms whose modules import optional packages at their top, and the extra that installs these."""


def late(module: str, name: str, *, purpose: str = "") -> Callable[..., Any]:
    """Return a function of a module of this package, by name.

    Args:
        module: of the function, such as ``publishing.figures``.
        name: of the function.
        purpose: what needs it, for the error message (default: the function).

    Raises:
        MissingExtraError: a package that the module imports is not installed.

    Example:
        >>> late("core.text", "shortened")("a long story", 7)
        'a long…'
    """
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(f"pluralign.{module}"), name)
    except ModuleNotFoundError as missing:
        extra = EXTRAS.get(module.partition(".")[0])
        if extra is None or missing.name is None or missing.name.startswith("pluralign"):
            raise
        raise MissingExtraError(missing.name, extra, purpose or f"pluralign.{name}") from None
    return found
