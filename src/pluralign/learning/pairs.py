"""Training pairs: the matrix of their feature differences, linear members on them, and validation folds.

Sixth file of the joint fit, used by all the files before. Every linear reward is fitted to the matrix with rows x_a −
x_b. This module decides whether that matrix is held in memory (``numpy`` array) or computed in blocks from the features
of the distinct texts (``Differences``). For a million pairs over 400,000 texts the matrix takes 1.6 GB, and fits make
several copies. In blocks it takes no more memory than the texts' features, which may be memory-mapped. Fits use only
the products below, so they accept both forms. With several processes, each process computes the products for its own
texts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from pluralign.core.arrays import Array, FloatArray, IndexArray, Mask
from pluralign.core.errors import DataError
from pluralign.core.processes import ALONE, PARTS, Processes, blocks
from pluralign.core.random_streams import FOLDS, random_stream
from pluralign.core.types import Level
from pluralign.theory.calibration import brier, sigmoid, votes_from_rewards, with_undecided
from pluralign.theory.simplex import simplex_least_squares

DENSE_ELEMENTS = 64_000_000
"""Largest matrix that is held in memory: 256 MB in single precision."""


# --- the matrix of feature differences --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Differences:
    """The matrix with rows s_i (x_{a_i} − x_{b_i}), computed in blocks. It supports ``@`` from both sides."""

    inputs: Array
    """x of every distinct text, ``(n_items, d)``; may be memory-mapped."""
    a: IndexArray
    """Index of response a among the texts, ``(n,)``."""
    b: IndexArray
    """Index of response b among the texts, ``(n,)``."""
    scale: Array | None = None
    """s, ``(n,)``; None means 1 for every row."""
    processes: Processes = ALONE
    """Processes that share the products. Each one handles its part of the texts, and the pairs whose a is in it."""
    log_ratio: FloatArray | float = 0.0
    """log π_ref(a)/π_ref(b) of each row, ``(n,)``, for those who read policies. Not a part of the matrix."""

    __array_ufunc__ = None  # makes ``array @ differences`` call __rmatmul__ below

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
        """Return s_i (x_a·θ − x_b·θ), ``(n,)`` or ``(n, k)``. Each text is multiplied once."""
        reward = self.of_texts(theta)
        product = reward[self.a]
        product -= reward[self.b]
        if self.scale is not None:
            product *= self.scale if product.ndim == 1 else self.scale[:, None]
        return np.asarray(product)

    def __rmatmul__(self, weight: Array) -> Array:
        """Return Σ_i w_i s_i (x_a − x_b), ``(d,)``."""
        w = np.asarray(weight, dtype=np.float64)
        w = w if self.scale is None else w * self.scale
        n = len(self.inputs)
        item_weight = (np.bincount(self.a, w, n) - np.bincount(self.b, w, n)).astype(self.dtype)

        def sum_of(part: slice) -> FloatArray:
            total = np.zeros(self.shape[1])
            for rows in blocks(part):
                total += item_weight[rows] @ self.inputs[rows]
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
        """Return the indices of the rows whose text a is in a part of the texts."""
        first, last = np.searchsorted(self.a, [part.start, part.stop], sorter=self._order_by_a)
        return np.sort(self._order_by_a[first:last])

    @cached_property
    def _order_by_a(self) -> npt.NDArray[np.int64]:
        return np.argsort(self.a, kind="stable")

    def rows(self, part: slice | npt.NDArray[np.int64]) -> Array:
        """Return some rows as an array."""
        rows = self.inputs[self.a[part]]
        rows -= self.inputs[self.b[part]]
        if self.scale is not None:
            rows *= self.scale[part, None]
        return np.asarray(rows)


Matrix: TypeAlias = Array | Differences
"""Feature differences ``(n, d)``, as an array or computed in blocks."""
AnyMatrix = TypeVar("AnyMatrix", Array, Differences, Matrix)


def first_columns(matrix: AnyMatrix, n: int) -> AnyMatrix:
    """Return the matrix with its first n columns."""
    return replace(matrix, inputs=matrix.inputs[:, :n]) if isinstance(matrix, Differences) else matrix[:, :n]


def _sum_of(matrix: Matrix, shape: tuple[int, ...], value: Callable[[Any, Array], Array]) -> FloatArray:
    """Return Σ value(row indices, rows) over the blocks of the matrix."""
    if not isinstance(matrix, Differences):
        total = np.zeros(shape)
        for rows in blocks(slice(0, len(matrix))):
            total += value(rows, matrix[rows])
        return total
    lazy = matrix

    def sum_of(part: slice) -> FloatArray:
        total, own = np.zeros(shape), lazy.rows_of(part)
        for block in blocks(slice(0, len(own))):
            total += value(own[block], lazy.rows(own[block]))
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
    if not isinstance(matrix, Differences):
        return np.asarray(np.einsum("nd,nd->n", matrix, matrix))
    squares = np.zeros(len(matrix), dtype=matrix.dtype)
    own = matrix.rows_of(matrix.processes.part(len(matrix.inputs)))
    for block in blocks(slice(0, len(own))):
        rows = matrix.rows(own[block])
        squares[own[block]] = np.einsum("nd,nd->n", rows, rows)
    return matrix.processes.total(squares)


def scale_rows(matrix: Matrix, factor: Array) -> Matrix:
    """Return the matrix with each row multiplied by its factor, ``(n,)``."""
    if not isinstance(matrix, Differences):
        return np.asarray(matrix * factor[:, None])
    return replace(matrix, scale=factor if matrix.scale is None else matrix.scale * factor)


def scores(difference: Matrix, theta: npt.ArrayLike) -> FloatArray:
    """Return θ · difference as float64, ``(n,)`` or ``(n, k)``.

    The product is computed in the precision of the differences, so that they need not be copied.

    Example:
        >>> scores(np.array([[1.0, 2.0]], dtype=np.float32), [1.0, 1.0])
        array([3.])
    """
    return np.asarray(difference @ np.asarray(theta, dtype=difference.dtype), dtype=np.float64)


def hard_votes(difference: Matrix, theta: FloatArray) -> FloatArray:
    """Return 1[θ_j · difference > 0], and ½ for a tie, ``(n, k)``."""
    reward = difference @ theta.astype(difference.dtype)
    return votes_from_rewards(reward, np.zeros_like(reward))


def soft_votes(pairs: "Pairs", theta: FloatArray) -> FloatArray:
    """Return σ(θ_j · difference + log π_ref(a)/π_ref(b)), the choices of policies at β = 1, ``(n, k)``."""
    return sigmoid(scores(pairs.difference, theta) + np.reshape(pairs.log_ratio, (-1, 1)))


def solve_weights(difference: Matrix, theta: FloatArray, prob_a: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the best simplex weights of the members' hard votes, and the share that they predict."""
    votes = hard_votes(difference, theta)
    weights = simplex_least_squares(votes, prob_a)
    return weights, votes @ weights


# --- pairs, members and folds -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """Compared texts, by the inputs that rewards are linear in, with the votes."""

    inputs: Array
    """Inputs of every distinct text, ``(n_items, d)``."""
    a: IndexArray
    """Index of response a among the texts, ``(n,)``."""
    b: IndexArray
    """Index of response b among the texts, ``(n,)``."""
    prob_a: FloatArray
    """Share of people preferring a, ``(n,)``."""
    prompt: IndexArray
    """Prompt of each pair, ``(n,)``."""
    processes: Processes = ALONE
    """Processes that fit together."""
    log_ratio: FloatArray | float = 0.0
    """log π_ref(a)/π_ref(b) of each pair, which policies add to Δr, ``(n,)``; 0 without a reference policy."""

    def __len__(self) -> int:
        return len(self.prob_a)

    @cached_property
    def difference(self) -> Matrix:
        """Inputs of response a minus those of b, ``(n, d)``: an array if it is small and there is one process."""
        if len(self.a) * self.inputs.shape[1] <= DENSE_ELEMENTS and self.processes.count == 1:
            return np.asarray(self.inputs[self.a] - self.inputs[self.b])
        return self.lazy_difference()

    def lazy_difference(self) -> Differences:
        """Return the difference in blocks, which also gives products with single texts."""
        return Differences(self.inputs, self.a, self.b, processes=self.processes, log_ratio=self.log_ratio)

    def __getitem__(self, rows: npt.NDArray[Any]) -> "Pairs":
        """Return some of the pairs. They share the inputs."""
        ratio = self.log_ratio if isinstance(self.log_ratio, float) else self.log_ratio[rows]
        own = {"a": self.a[rows], "b": self.b[rows], "prob_a": self.prob_a[rows], "prompt": self.prompt[rows]}
        return replace(self, **own, log_ratio=ratio)


@dataclass(frozen=True, eq=False)
class Members:
    """Linear rewards and their weights: what every fit of an ensemble returns."""

    theta: FloatArray
    """One column per member, ``(d, k)``."""
    weights: FloatArray
    """``(k,)``, on the simplex."""
    undecided: float = 0.0
    """u, the share of votes that no member explains."""

    @property
    def k(self) -> int:
        """Number of members."""
        return len(self.weights)

    def prob_hat(self, pairs: Pairs, level: Level) -> FloatArray:
        """Return the predicted share preferring response a, ``(n,)``: of hard votes, or of policies at β = 1."""
        votes = soft_votes(pairs, self.theta) if level == "policy" else hard_votes(pairs.difference, self.theta)
        return with_undecided(np.clip(votes @ self.weights, 0.0, 1.0), self.undecided)

    def brier(self, pairs: Pairs, level: Level) -> float:
        """Return the mean squared error of the predicted shares."""
        return brier(self.prob_hat(pairs, level), pairs.prob_a)

    def unit_spread(self, pairs: Pairs, *, together: bool = False) -> "Members":
        """Return the members with rewards scaled so that their differences over ``pairs`` have unit spread.

        With ``together`` all rewards are scaled by one factor, to unit spread on average.
        """
        spread = np.std(scores(pairs.difference, self.theta), axis=0)
        spread = np.full_like(spread, np.sqrt(np.mean(spread**2))) if together else spread
        return replace(self, theta=self.theta / np.maximum(spread, 1e-12))


MATCHES = 10
"""At most this many times members are matched with those of the mean so far."""


def matched_orders(rewards: Sequence[Array]) -> list[npt.NDArray[np.integer[Any]]]:
    """Return the order of the members of each fit in which fits that started at random resemble each other most.

    Members have no order. Those of each fit are matched one to one with those of the mean so far, so that the sum of
    the correlations of their rewards is largest.

    Args:
        rewards: of the members of each fit for the same texts or pairs, ``(n, k)`` each.

    Example:
        >>> one = np.random.default_rng(0).normal(size=(9, 3))
        >>> [order.tolist() for order in matched_orders([one, one[:, [2, 0, 1]]])]
        [[0, 1, 2], [1, 2, 0]]
    """
    mean = rewards[0]
    orders: list[npt.NDArray[np.integer[Any]]] = [np.arange(mean.shape[1])] * len(rewards)
    units = [_unit_columns(own) for own in rewards]
    for _ in range(MATCHES):
        before = orders
        of_mean = _unit_columns(mean)
        orders = [linear_sum_assignment(of_mean.T @ own, maximize=True)[1] for own in units]
        if np.array_equal(before, orders):
            break
        mean = np.mean([own[:, order] for own, order in zip(rewards, orders, strict=True)], axis=0)
    return orders


def _unit_columns(values: Array) -> Array:
    """Return columns with mean 0 and length 1, so that products are correlations; constant columns are 0."""
    centred = values - values.mean(axis=0)
    return np.asarray(centred / np.maximum(np.linalg.norm(centred, axis=0), 1e-12))


def validation_units(prompt: IndexArray) -> IndexArray:
    """Return the unit that goes to one side of a validation split, for each training pair, ``(n,)``.

    The unit is the prompt. Pairs of a single prompt are split pair by pair.

    Raises:
        DataError: there is a single pair.
    """
    if len(prompt) < 2:
        raise DataError("training needs two pairs, but there is one", remedy="give more votes")
    return prompt if len(np.unique(prompt)) > 1 else np.arange(len(prompt), dtype=np.int32)


def validation_folds(prompt: IndexArray, seed: int = 0) -> list[Mask]:
    """Return one mask of validation pairs per fold; each fold holds out a fifth of the prompts.

    There are 3 folds from 200 prompts on, else 5: with few prompts a single fold is too noisy. A single prompt is split
    by pair.

    Args:
        prompt: prompt of each pair, ``(n,)``.
        seed: of the random order of prompts. It is not that of the fit, so that the seed does not change choices.

    Raises:
        DataError: there is a single pair.
    """
    units = validation_units(prompt)
    names = np.unique(units)
    order = random_stream(seed, FOLDS).permutation(names)
    n_folds = 3 if len(names) >= 200 else 5
    parts = np.array_split(order, 5)[: min(n_folds, len(names))]
    return [np.isin(units, part) for part in parts if len(part)]


SharesOf: TypeAlias = Callable[[Mask], Iterable[FloatArray]]
"""Returns the shares that each candidate, fitted without a fold, predicts for it, ``(n_held_out,)`` each."""


def errors_on_folds(prob_a: FloatArray, folds: Sequence[Mask], shares_of: SharesOf) -> FloatArray:
    """Return (p̂ − p)² of each pair for each candidate, ``(n, n_candidates)``. Pairs of no fold have NaN."""
    errors = [np.stack([(share - prob_a[fold]) ** 2 for share in shares_of(fold)], axis=1) for fold in folds]
    found = np.full((len(prob_a), errors[0].shape[1]), np.nan)
    for fold, error in zip(folds, errors, strict=True):
        found[fold] = error
    return found


def brier_on_folds(prob_a: FloatArray, folds: Sequence[Mask], shares_of: SharesOf) -> FloatArray:
    """Return the Brier score of each candidate on validation prompts, averaged over folds, ``(n_candidates,)``.

    Every choice of regularisation, damping or temperature takes the candidate with the lowest one.
    """
    scored = [[brier(share, prob_a[fold]) for share in shares_of(fold)] for fold in folds]
    return np.asarray(np.mean(scored, axis=0))


# --- Bounds on the disagreement of members with people, during training. ``measuring.pruning`` prunes fitted ensembles.


BISECTIONS = 12
MARGIN, MARGIN_BY_PROMPTS = 0.017, 0.17


def training_bound(max_disagreement: float, n_prompts: int) -> float:
    """Return the bound for training pairs that keeps disagreement on new prompts below ``max_disagreement``.

    Disagreement is lower on the training prompts than on new ones, more so with fewer prompts. The margin
    0.017 + 0.17/√prompts was measured (docs/log.md). A bound of 1 means no bound.

    Example:
        >>> round(training_bound(0.5, 400), 4), training_bound(1.0, 400)
        (0.4745, 1.0)
    """
    return max_disagreement if max_disagreement >= 1 else max_disagreement - MARGIN - MARGIN_BY_PROMPTS / n_prompts**0.5


def cap_disagreement(
    member: FloatArray, anchor: FloatArray, difference: Matrix, prob_a: FloatArray, bound: float
) -> FloatArray:
    """Move a linear reward towards an anchor just far enough to bring its disagreement under a bound.

    The anchor is scaled to the member's spread over the pairs. With θ(s) = (1 − s) member + s anchor, bisection finds
    an s just large enough for the bound. If none is, s = 1: the result is the anchor itself.

    Args:
        member: θ, ``(d,)``.
        anchor: a reward with low disagreement, such as a Bradley–Terry fit, ``(d,)``.
        difference: features of response a minus those of b, ``(n, d)``.
        prob_a: share of people preferring a, ``(n,)``.
        bound: maximum disagreement, the mean |vote − prob_a|.

    Returns:
        The member, unchanged if it is under the bound, ``(d,)``.
    """
    own_reward = difference @ member.astype(difference.dtype)
    anchor_reward = difference @ anchor.astype(difference.dtype)
    own_scale, anchor_scale = 1 / max(float(np.std(own_reward)), 1e-12), 1 / max(float(np.std(anchor_reward)), 1e-12)

    def disagreement(s: float) -> float:
        reward = (1 - s) * own_scale * own_reward + s * anchor_scale * anchor_reward
        vote = 0.5 * (reward > 0) + 0.5 * (reward >= 0)
        return float(np.mean(vote * (1 - prob_a) + (1 - vote) * prob_a))

    if disagreement(0.0) <= bound:
        return member
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if disagreement(middle) <= bound else (middle, high)
    return np.asarray((1 - high) * member + high * anchor_scale / own_scale * anchor)
