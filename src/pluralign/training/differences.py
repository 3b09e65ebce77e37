"""The matrix of feature differences, row by row x_a − x_b, that every linear reward is learned from.

Decided here: when that matrix is held whole and when it is made in blocks from the distinct texts' inputs. A million
pairs over 400,000 texts would be 1.6 GB as a matrix, several times over; in blocks it costs what the texts cost, which
may be memory-mapped. Learners need only products with it, so they do not see which of the two they have; nor whether
several processes make the products together, each from the texts that are its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import Array, FloatArray
from pluralign.core.distributed import ALONE, PARTS, Processes, blocks

DENSE_ELEMENTS = 64_000_000
"""A matrix of at most so many numbers is held whole: 256 MB in single precision."""


@dataclass(frozen=True, eq=False)
class Differences:
    """The matrix with rows s_i (x_{a_i} − x_{b_i}), never held whole; it takes part in products as an array does."""

    inputs: Array
    """x of every distinct text, ``(n_items, d)``; may be memory-mapped."""
    a: npt.NDArray[np.int32]
    b: npt.NDArray[np.int32]
    scale: Array | None = None
    """s, ``(n,)``; none is 1 everywhere."""
    processes: Processes = ALONE
    """Who makes products together: each of them multiplies its part of the texts, and the pairs whose a is there."""

    __array_ufunc__ = None  # so that ``array @ differences`` comes here

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.a), self.inputs.shape[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Precision of the inputs."""
        return self.inputs.dtype

    def __len__(self) -> int:
        return len(self.a)

    def __matmul__(self, theta: Array) -> Array:
        """Return s_i (x_a·θ − x_b·θ), ``(n,)`` or ``(n, k)``: each text is multiplied once."""
        product = self.of_texts(theta)
        found = product[self.a]
        found -= product[self.b]
        if self.scale is not None:
            found *= self.scale if found.ndim == 1 else self.scale[:, None]
        return np.asarray(found)

    def __rmatmul__(self, weight: Array) -> Array:
        """Return Σ_i w_i s_i (x_a − x_b), ``(d,)``."""
        w = np.asarray(weight, dtype=np.float64)
        w = w if self.scale is None else w * self.scale
        n = len(self.inputs)
        of_item = (np.bincount(self.a, w, n) - np.bincount(self.b, w, n)).astype(self.dtype)

        def sum_of(part: slice) -> FloatArray:
            total = np.zeros(self.shape[1])
            for rows in blocks(part):
                total += of_item[rows] @ self.inputs[rows]
            return total

        return self.processes.sum_of(n, sum_of).astype(self.dtype)

    def of_texts(self, theta: npt.ArrayLike) -> Array:
        """Return x·θ of every distinct text, ``(n_items,)`` or ``(n_items, k)``."""
        n = len(self.inputs)
        product = np.zeros((n, *np.shape(theta)[1:]), dtype=np.result_type(self.inputs, theta))
        for v in self.processes.parts():
            for rows in blocks(slice(v * n // PARTS, (v + 1) * n // PARTS)):
                np.matmul(self.inputs[rows], theta, out=product[rows])
        return self.processes.total(product)

    def rows_of(self, part: slice) -> npt.NDArray[np.int64]:
        """Return which rows have their text a in a part of the texts."""
        first, last = np.searchsorted(self.a, [part.start, part.stop], sorter=self._by_a)
        return np.sort(self._by_a[first:last])

    @cached_property
    def _by_a(self) -> npt.NDArray[np.int64]:
        return np.argsort(self.a, kind="stable")

    def rows(self, part: slice | npt.NDArray[np.int64]) -> Array:
        """Return some rows as an array."""
        found = self.inputs[self.a[part]]
        found -= self.inputs[self.b[part]]
        if self.scale is not None:
            found *= self.scale[part, None]
        return np.asarray(found)


Matrix: TypeAlias = Array | Differences
"""Feature differences ``(n, d)``, held whole or not."""


def differences(
    inputs: Array, a: npt.NDArray[np.int32], b: npt.NDArray[np.int32], processes: Processes = ALONE
) -> Matrix:
    """Return the matrix with rows x_a − x_b: an array where that is small and no work is shared."""
    if len(a) * inputs.shape[1] <= DENSE_ELEMENTS and processes.count == 1:
        return np.asarray(inputs[a] - inputs[b])
    return Differences(inputs, a, b, processes=processes)


def as_array(matrix: Matrix) -> Array:
    """Return the matrix held whole."""
    return matrix.rows(slice(None)) if isinstance(matrix, Differences) else matrix


def _sum_of(matrix: Matrix, shape: tuple[int, ...], value: Callable[[Any, Array], Array]) -> FloatArray:
    """Return Σ value(which rows, these rows) over the whole matrix, in blocks."""
    if not isinstance(matrix, Differences):
        total = np.zeros(shape)
        for rows in blocks(slice(0, len(matrix))):
            total += value(rows, matrix[rows])
        return total
    lazy = matrix

    def sum_of(part: slice) -> FloatArray:
        total, found = np.zeros(shape), lazy.rows_of(part)
        for block in blocks(slice(0, len(found))):
            total += value(found[block], lazy.rows(found[block]))
        return total

    return lazy.processes.sum_of(len(lazy.inputs), sum_of)


def gram(matrix: Matrix, weight: npt.ArrayLike = 1.0) -> FloatArray:
    """Return mean_i w_i d_i d_i', ``(d, d)``; w must not be negative.

    Example:
        >>> gram(np.array([[1.0, 0.0], [0.0, 2.0]]), [1.0, 0.5])
        array([[0.5, 0. ],
               [0. , 1. ]])
    """
    n, d = matrix.shape
    root = np.sqrt(np.broadcast_to(np.asarray(weight, dtype=np.float64), (n,)) / n).astype(matrix.dtype)

    def outer(which: Any, rows: Array) -> Array:
        weighted = rows * root[which, None]
        return np.asarray(weighted.T @ weighted)

    return _sum_of(matrix, (d, d), outer)


def row_squares(matrix: Matrix) -> Array:
    """Return |d_i|², ``(n,)``.

    Example:
        >>> row_squares(np.array([[3.0, 4.0]]))
        array([25.])
    """
    squares = np.zeros(len(matrix), dtype=matrix.dtype)
    if not isinstance(matrix, Differences):
        return np.asarray(np.einsum("nd,nd->n", matrix, matrix))
    own = matrix.rows_of(matrix.processes.part(len(matrix.inputs)))
    for block in blocks(slice(0, len(own))):
        rows = matrix.rows(own[block])
        squares[own[block]] = np.einsum("nd,nd->n", rows, rows)
    return matrix.processes.total(squares)


def scale_rows(matrix: Matrix, factor: Array) -> Matrix:
    """Return the matrix with each row multiplied by a number."""
    if not isinstance(matrix, Differences):
        return np.asarray(matrix * factor[:, None])
    return replace(matrix, scale=factor if matrix.scale is None else matrix.scale * factor)
