"""Tables of distinct texts, numbered by first appearance, and arrays of positions in them."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import IndexArray
from pluralign.core.errors import UsageError

ObjectArray: TypeAlias = npt.NDArray[np.object_]


def object_array(values: Iterable[Any]) -> ObjectArray:
    """Return values as a one-dimensional array of objects."""
    if isinstance(values, np.ndarray) and values.dtype == object:
        return values
    values = list(values)
    array = np.empty(len(values), dtype=object)
    for position, value in enumerate(values):  # numpy would turn tuples of equal length into a matrix
        array[position] = value
    return array


def distinct(values: Sequence[Any]) -> tuple[list[Any], IndexArray]:
    """Return the distinct values by first appearance, and the position of each value among them.

    Example:
        >>> distinct(["tea", "rum", "tea"])
        (['tea', 'rum'], array([0, 1, 0], dtype=int32))
    """
    position: dict[Any, int] = {}
    index = np.fromiter((position.setdefault(value, len(position)) for value in values), np.int32, len(values))
    return list(position), index


def number_by_first_appearance(table: ObjectArray, index: npt.NDArray[Any]) -> tuple[ObjectArray, IndexArray]:
    """Keep the entries of ``table`` that ``index`` uses, in order of first use, and renumber ``index``.

    Raises:
        UsageError: the table holds a text twice, or an index is out of range.
    """
    if len(set(table)) != len(table):
        raise UsageError("texts given with indices must be distinct; use from_columns to have them merged.")
    if len(index) and not 0 <= index.min() <= index.max() < len(table):
        raise UsageError(f"indices must be between 0 and {len(table) - 1}.")
    first_use = np.full(len(table), len(index), dtype=np.int64)
    first_use[index[::-1]] = np.arange(len(index))[::-1]  # the last assignment to a place wins
    order = np.argsort(first_use, kind="stable")[: int((first_use < len(index)).sum())]
    number = np.empty(len(table), dtype=np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    return table[order], number[index].astype(np.int32)
