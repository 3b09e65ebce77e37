"""Small types that all rooms share. Array types are in ``core.arrays``, so that this file needs no numpy."""

from collections.abc import Callable
from typing import Literal, TypeAlias

Method: TypeAlias = Literal["joint", "stagewise"]
Level: TypeAlias = Literal["vote", "policy"]
"""How an ensemble is read: by the share of hard votes, or by the share of policies (App. A)."""
Progress: TypeAlias = Callable[[int, int], None]
"""Called with the number of items done and the total."""
