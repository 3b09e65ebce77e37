"""Values as JSON can hold them."""

import math
from collections.abc import Mapping
from typing import Any


def without_nan(value: Any) -> Any:
    """Return plain values with NaN and infinities, which JSON has no word for, replaced by None.

    Example:
        >>> without_nan({"noise": float("nan"), "pairs": (1, 2.5)})
        {'noise': None, 'pairs': [1, 2.5]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value
