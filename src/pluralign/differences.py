"""The matrix of feature differences, row by row x_a − x_b, that every linear reward is learned from.

Decided here: when that matrix is held whole and when it is made in blocks from the distinct texts' inputs. A million
pairs over 400,000 texts would be 1.6 GB as a matrix, several times over; in blocks it costs what the texts cost, which
may be memory-mapped. Learners need only products with it, so they do not see which of the two they have.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.floating[Any]]
FloatArray: TypeAlias = npt.NDArray[np.float64]

DENSE_ELEMENTS = 64_000_000
"""A matrix of at most so many numbers is held whole: 256 MB in single precision."""
BLOCK_ROWS = 32_768


@dataclass(frozen=True, eq=False)
class Differences:
    """The matrix with rows s_i (x_{a_i} − x_{b_i}), never held whole; it takes part in products as an array does."""

    inputs: Array
    """x of every distinct text, ``(n_items, d)``; may be memory-mapped."""
    a: npt.NDArray[np.int32]
    b: npt.NDArray[np.int32]
    scale: Array | None = None
    """s, ``(n,)``; none is 1 everywhere."""

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
        product = np.empty((len(self.inputs), *np.shape(theta)[1:]), dtype=np.result_type(self.inputs, theta))
        for rows in blocks(len(self.inputs)):
            np.matmul(self.inputs[rows], theta, out=product[rows])
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
        total = np.zeros(self.shape[1])
        for rows in blocks(n):
            total += of_item[rows] @ self.inputs[rows]
        return total.astype(self.dtype)

    def rows(self, part: slice) -> Array:
        """Return some rows as an array."""
        found = self.inputs[self.a[part]]
        found -= self.inputs[self.b[part]]
        if self.scale is not None:
            found *= self.scale[part, None]
        return np.asarray(found)


Matrix: TypeAlias = Array | Differences
"""Feature differences ``(n, d)``, held whole or not."""


def differences(inputs: Array, a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> Matrix:
    """Return the matrix with rows x_a − x_b: an array where that is small, else ``Differences``."""
    if len(a) * inputs.shape[1] <= DENSE_ELEMENTS:
        return np.asarray(inputs[a] - inputs[b])
    return Differences(inputs, a, b)


def as_array(matrix: Matrix) -> Array:
    """Return the matrix held whole."""
    return matrix.rows(slice(None)) if isinstance(matrix, Differences) else matrix


def blocks(n: int) -> Iterator[slice]:
    """Yield slices that cover n rows in order."""
    for start in range(0, n, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, n))


def _parts(matrix: Matrix) -> Iterator[tuple[slice, Array]]:
    for part in blocks(len(matrix)):
        yield part, matrix.rows(part) if isinstance(matrix, Differences) else matrix[part]


def gram(matrix: Matrix, weight: npt.ArrayLike = 1.0) -> FloatArray:
    """Return mean_i w_i d_i d_i', ``(d, d)``; w must not be negative.

    Example:
        >>> gram(np.array([[1.0, 0.0], [0.0, 2.0]]), [1.0, 0.5])
        array([[0.5, 0. ],
               [0. , 1. ]])
    """
    n, d = matrix.shape
    root = np.sqrt(np.broadcast_to(np.asarray(weight, dtype=np.float64), (n,)) / n).astype(matrix.dtype)
    total = np.zeros((d, d))
    for part, rows in _parts(matrix):
        weighted = rows * root[part, None]
        total += weighted.T @ weighted
    return total


def row_squares(matrix: Matrix) -> Array:
    """Return |d_i|², ``(n,)``.

    Example:
        >>> row_squares(np.array([[3.0, 4.0]]))
        array([25.])
    """
    return np.concatenate([np.einsum("nd,nd->n", rows, rows) for _, rows in _parts(matrix)])


def scale_rows(matrix: Matrix, factor: Array) -> Matrix:
    """Return the matrix with each row multiplied by a number."""
    if not isinstance(matrix, Differences):
        return np.asarray(matrix * factor[:, None])
    return replace(matrix, scale=factor if matrix.scale is None else matrix.scale * factor)
