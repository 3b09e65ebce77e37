"""Functions of higher rooms, loaded when they are called.

Rooms import only the rooms below them. A few methods of lower rooms are shortcuts that people expect on an object, such
as ``ensemble.plot()``; they call a function of a higher room through ``late``.
"""

import importlib
from collections.abc import Callable
from typing import Any

from pluralign.core.errors import MissingExtraError


def late(module: str, name: str, *, extra: str = "", purpose: str = "") -> Callable[..., Any]:
    """Return a function of a module of this package, by name.

    Args:
        module: of the function, such as ``publishing.figures``.
        name: of the function.
        extra: the extra that installs the optional packages of the module, if it has any.
        purpose: what needs them, such as "a figure".

    Raises:
        MissingExtraError: an optional package is not installed.

    Example:
        >>> late("core.text", "shortened")("a long story", 7)
        'a long…'
    """
    try:
        loaded = importlib.import_module(f"pluralign.{module}")
    except ModuleNotFoundError as missing:
        if not extra:
            raise
        raise MissingExtraError(missing.name or extra, extra, purpose) from None
    found: Callable[..., Any] = getattr(loaded, name)
    return found
