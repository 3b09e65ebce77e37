"""Mixtures of rankings computed naively, for the tests of tournaments."""

import itertools

import numpy as np
import numpy.typing as npt

from pluralign.theory.rankings import Ranking

Matrix = npt.NDArray[np.float64]


def pair_by_pair(orders: list[Ranking], weights: npt.ArrayLike) -> Matrix:
    """Compute the tournament of a mixture, one ranking and one pair at a time."""
    m = len(orders[0])
    shares = np.zeros((m, m))
    for order, weight in zip(orders, np.asarray(weights), strict=True):
        for place, i in enumerate(order):
            for j in order[place + 1 :]:
                shares[i, j] += weight
    return shares


def random_mixture(seed: int, m: int, count: int) -> Matrix:
    rng = np.random.default_rng(seed)
    orders = [tuple(rng.permutation(m).tolist()) for _ in range(count)]
    return pair_by_pair(orders, rng.dirichlet(np.full(count, rng.choice([0.2, 1.0, 20.0]))))


def all_incidences(m: int) -> tuple[list[Ranking], Matrix]:
    orders = list(itertools.permutations(range(m)))
    return orders, np.stack([pair_by_pair([order], [1.0]) for order in orders])
