"""Simplex least squares against optimality conditions, a brute-force grid and its invariances."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st
from simulated import optimality_gap

from pluralign.theory.simplex import simplex_least_squares, weights_and_undecided


def votes_and_target(seed: int, n: int = 60, k: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2, (n, k)).astype(float), rng.integers(0, 6, n) / 5


def error(v: np.ndarray, p: np.ndarray, a: np.ndarray) -> float:
    return float(np.mean((v @ a - p) ** 2))


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 80))
def test_weights_are_on_the_simplex_and_optimal(seed: int, k: int, n: int) -> None:
    v, p = votes_and_target(seed, n, k)
    a = simplex_least_squares(v, p)
    assert a.min() >= 0
    assert a.sum() == pytest.approx(1, abs=1e-12)
    assert optimality_gap(v, p, a) < 5e-8


def test_no_point_of_a_fine_grid_is_better() -> None:
    for seed in range(20):
        v, p = votes_and_target(seed, k=3)
        best = error(v, p, simplex_least_squares(v, p))
        grid = [np.array([i, j, 40 - i - j]) / 40 for i, j in itertools.product(range(41), repeat=2) if i + j <= 40]
        nearest = min(error(v, p, a) for a in grid)
        assert best <= nearest + 1e-9
        assert nearest - best < 0.002, "the grid is fine enough"


@given(st.integers(0, 1000), st.permutations(range(5)))
def test_permuting_members_permutes_weights(seed: int, order: list[int]) -> None:
    v, p = votes_and_target(seed, k=5)
    np.testing.assert_allclose(simplex_least_squares(v[:, order], p), simplex_least_squares(v, p)[order], atol=1e-6)


@given(st.integers(0, 1000))
def test_a_copied_member_keeps_the_fit_and_shares_the_weight(seed: int) -> None:
    v, p = votes_and_target(seed, k=3)
    once, twice = simplex_least_squares(v, p), simplex_least_squares(v[:, [0, 1, 2, 0]], p)
    assert error(v[:, [0, 1, 2, 0]], p, twice) == pytest.approx(error(v, p, once), abs=1e-9)
    assert twice[0] == pytest.approx(twice[3], abs=1e-6)
    np.testing.assert_allclose([twice[0] + twice[3], twice[1], twice[2]], once, atol=1e-4)


@given(st.integers(0, 1000))
def test_swapping_a_and_b_keeps_the_weights(seed: int) -> None:
    v, p = votes_and_target(seed, k=4)
    np.testing.assert_allclose(simplex_least_squares(1 - v, 1 - p), simplex_least_squares(v, p), atol=1e-6)


@pytest.mark.parametrize("column", [np.zeros(30), np.ones(30), np.full(30, 0.5)])
def test_constant_and_single_members_work(column: np.ndarray) -> None:
    v, p = votes_and_target(0, n=30, k=3)
    v = np.column_stack([v, column])
    assert optimality_gap(v, p, simplex_least_squares(v, p)) < 5e-8
    assert simplex_least_squares(column[:, None], p).tolist() == [1.0]
    np.testing.assert_allclose(simplex_least_squares(np.column_stack([column] * 4), p), [0.25] * 4, atol=1e-6)


def test_invalid_shapes_and_values_are_refused() -> None:
    with pytest.raises(ValueError, match="must be"):
        simplex_least_squares([[1.0, 0.0]], [0.5, 0.5])
    with pytest.raises(ValueError, match="finite"):
        simplex_least_squares([[1.0, np.nan]], [0.5])


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_weights_and_undecided_share_equal_an_ensemble_with_opposite_members(seed: int, k: int) -> None:
    """u/2 on r and u/2 on −r predict the same shares, and no ensemble with such a pair is better."""
    v, p = votes_and_target(seed, k=k)
    weights, u = weights_and_undecided(v, p)
    assert 0 <= u <= 1
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    r = np.random.default_rng(seed).integers(0, 2, len(v)).astype(float)
    explicit, columns = np.append((1 - u) * weights, [u / 2, u / 2]), np.column_stack([v, np.full(len(v), 0.5)])
    np.testing.assert_allclose(np.column_stack([v, r, 1 - r]) @ explicit, u / 2 + (1 - u) * (v @ weights), atol=1e-12)
    best = error(columns, p, np.append((1 - u) * weights, u))
    for other in np.random.default_rng(1).dirichlet(np.ones(k + 1), 30):
        assert best <= error(columns, p, other) + 5e-8
    assert best <= np.mean((p - 0.5) ** 2) + 5e-8, "never worse than a constant ½"
    weights, u = weights_and_undecided(v, p, undecided=False)
    assert u == 0
    np.testing.assert_array_equal(weights, simplex_least_squares(v, p))


def test_votes_that_say_nothing_are_all_undecided() -> None:
    weights, u = weights_and_undecided([[1.0, 1.0], [0.0, 0.0]], [0.5, 0.5])
    assert u == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(weights, [0.5, 0.5], atol=1e-4)
