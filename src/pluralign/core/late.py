"""Functions of higher rooms, loaded when they are called.

Rooms import only the rooms below them. A few methods of lower rooms are shortcuts that people expect on an object, such
as ``ensemble.plot()``; they call a function of a higher room through ``late``.
"""

import importlib
from collections.abc import Callable
from typing import Any


def late(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module of this package, by name.

    Example:
        >>> late("core.text", "shortened")("a long story", 7)
        'a long…'
    """
    found: Callable[..., Any] = getattr(importlib.import_module(f"pluralign.{module}"), name)
    return found
