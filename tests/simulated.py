"""Pairs with simulated votes, numerical gradients and the gap of simplex weights, for tests of training."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pluralign.learning.pairs import Differences, Matrix, Pairs
from pluralign.votes.judgments import Judgments
from pluralign.votes.preferences import PreferenceSet, distinct


def as_array(matrix: Matrix) -> np.ndarray:
    """Return the whole matrix as an array."""
    return matrix.rows(slice(None)) if isinstance(matrix, Differences) else matrix


def paired(difference: np.ndarray, prob_a: np.ndarray, per_prompt: int = 3) -> Pairs:
    """Return pairs with these differences: the inputs of b are 0."""
    n = len(prob_a)
    inputs = np.vstack([difference, np.zeros_like(difference[:1])])
    prompt = (np.arange(n) // per_prompt).astype(np.int32)
    return Pairs(inputs, np.arange(n, dtype=np.int32), np.full(n, n, np.int32), prob_a, prompt)


def swapped(pairs: Pairs, rows: np.ndarray) -> Pairs:
    """Return the same votes with the responses of some pairs swapped."""
    a, b = np.where(rows, pairs.b, pairs.a), np.where(rows, pairs.a, pairs.b)
    return Pairs(pairs.inputs, a, b, np.where(rows, 1 - pairs.prob_a, pairs.prob_a), pairs.prompt)


def random_pairs(seed: int, n: int = 50, d: int = 4, n_items: int = 30) -> Pairs:
    """Pairs with random inputs and shares of five votes."""
    rng = np.random.default_rng(seed)
    a = rng.integers(0, n_items, n).astype(np.int32)
    b = ((a + rng.integers(1, n_items, n)) % n_items).astype(np.int32)
    inputs = rng.standard_normal((n_items, d))
    return Pairs(inputs, a, b, rng.integers(0, 6, n) / 5, rng.integers(0, 20, n).astype(np.int32))


def numeric_gradient(value: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    """Return the gradient of a function by central differences."""
    steps = 1e-6 * np.eye(len(at))
    return np.array([(value(at + step) - value(at - step)) / 2e-6 for step in steps])


def concatenate(sets: Sequence[PreferenceSet]) -> PreferenceSet:
    """Join sets of one tie rule; persons in the judgments of different sets are different people."""
    tables = [replace(votes, judgments=None).to_table() for votes in sets]
    joined = PreferenceSet.from_table(pa.concat_tables(tables, promote_options="permissive"))

    def moved(judged: Judgments, votes: PreferenceSet) -> Judgments:
        both = (joined.prompts, votes.prompts), (joined.responses, votes.responses)
        prompt, response = (distinct([*whole, *part])[1][len(whole) :] for whole, part in both)
        return replace(judged, prompt=prompt[judged.prompt], response=response[judged.response])

    parts = [moved(votes.judgments, votes) for votes in sets if votes.judgments is not None]
    if not parts:
        return replace(joined, tie_rule=sets[0].tie_rule)
    first = np.cumsum([0, *(part.n_persons for part in parts)])
    person = np.concatenate([part.person + shift for part, shift in zip(parts, first, strict=False)])
    prompt, sizes, response, place = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("prompt", "sizes", "response", "place")
    )
    linked = any(part.linked for part in parts)
    judged = Judgments.from_scores(person, prompt, sizes, response, -place, linked=linked)
    return replace(joined, tie_rule=sets[0].tie_rule, judgments=judged)


def optimality_gap(matrix: npt.ArrayLike, target: npt.ArrayLike, weights: npt.ArrayLike) -> float:
    """Return the Frank–Wolfe gap, an upper bound on f(a) − min f for f(a) = mean (V a − p)² on the simplex."""
    v, p, a = (np.asarray(array, dtype=np.float64) for array in (matrix, target, weights))
    gradient = 2 * v.T @ (v @ a - p) / len(p)
    return float(gradient @ a - gradient.min())
