"""Bradley–Terry rewards against scipy, scikit-learn, finite differences and data simulated from a known reward."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import expit
from simulated import numeric_gradient

from pluralign.learning.bradley_terry import (
    bradley_terry_loss,
    directions_with,
    fit_bradley_terry,
    fit_path,
    principal_directions,
)
from pluralign.learning.pairs import scores
from pluralign.theory.calibration import sigmoid


def shares(seed: int, n: int = 80, d: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return differences, shares of five votes (some of them 0 and 1), and unequal weights."""
    rng = np.random.default_rng(seed)
    difference = rng.standard_normal((n, d)) * np.linspace(0.3, 2.0, d)
    return difference, rng.binomial(5, sigmoid(difference @ rng.standard_normal(d))) / 5, rng.random(n) * 3


def slope_at(theta: np.ndarray, *others: Any) -> np.ndarray:
    return numeric_gradient(lambda at: bradley_terry_loss(at, *others), theta)


def test_loss_is_the_mean_cross_entropy_plus_half_the_square() -> None:
    difference, target, weight = shares(0)
    theta = np.array([0.3, -1.0, 0.5, 0.0, 0.2])
    p = expit(difference @ theta)
    entropy = -(target * np.log(p) + (1 - target) * np.log(1 - p))
    expected = (weight * entropy).sum() / len(target) + 0.7 / 2 * (theta**2).sum()
    assert bradley_terry_loss(theta, difference, target, 0.7, weight) == pytest.approx(expected, rel=1e-12)


@given(st.integers(0, 10_000), st.sampled_from([1.0, 0.03, 1e-4]))
def test_gradient_vanishes_at_the_fit(seed: int, l2: float) -> None:
    difference, target, weight = shares(seed)
    fitted = fit_bradley_terry(difference, target, l2, weight=weight)
    slope = slope_at(fitted, difference, target, l2, weight)
    assert np.abs(slope).max() < 3e-4 * np.abs(slope_at(0 * fitted, difference, target, l2, weight)).max()


@pytest.mark.parametrize("l2", [1.0, 0.01, 1e-4])
def test_fit_equals_scipys_minimum(l2: float) -> None:
    difference, target, weight = shares(1)

    def loss(theta: np.ndarray) -> float:
        return bradley_terry_loss(theta, difference, target, l2, weight)

    other = minimize(loss, np.zeros(5), method="BFGS", options={"gtol": 1e-9, "xrtol": 1e-12})
    fitted = fit_bradley_terry(difference, target, l2, weight=weight)
    np.testing.assert_allclose(fitted, other.x, atol=2e-4)
    assert loss(fitted) <= other.fun + 1e-9


def test_fit_equals_scikit_learns_on_weighted_rows() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    difference, target, weight = shares(2)
    l2, n = 0.02, len(target)
    model = linear_model.LogisticRegression(C=1 / (n * l2), fit_intercept=False, tol=1e-10, max_iter=10_000)
    votes = np.repeat([1, 0], n)
    model.fit(np.tile(difference, (2, 1)), votes, np.concatenate([weight * target, weight * (1 - target)]))
    np.testing.assert_allclose(fit_bradley_terry(difference, target, l2, weight=weight), model.coef_[0], atol=2e-4)


def test_weight_equals_a_number_of_repetitions() -> None:
    difference, target, _ = shares(3)
    times = np.random.default_rng(3).integers(0, 4, len(target))
    repeated = fit_bradley_terry(np.repeat(difference, times, axis=0), np.repeat(target, times), 0.1)
    weighted = fit_bradley_terry(difference, target, 0.1, weight=times / times.mean())
    np.testing.assert_allclose(weighted, repeated, atol=1e-5)


@given(st.integers(0, 10_000))
def test_swapping_some_pairs_does_not_change_the_fit(seed: int) -> None:
    difference, target, weight = shares(seed)
    swapped = np.random.default_rng(seed).random(len(target)) < 0.5
    fitted = fit_bradley_terry(difference, target, 0.03, weight=weight)
    other = fit_bradley_terry(
        np.where(swapped[:, None], -difference, difference), np.where(swapped, 1 - target, target), 0.03, weight=weight
    )
    np.testing.assert_allclose(other, fitted, atol=1e-6)


def test_known_reward_is_recovered_from_many_votes() -> None:
    rng = np.random.default_rng(5)
    theta, difference = np.array([1.0, -0.5, 0.25, 0.0]), rng.standard_normal((20_000, 4))
    target = rng.binomial(9, expit(difference @ theta)) / 9
    np.testing.assert_allclose(fit_bradley_terry(difference, target, 1e-7), theta, atol=0.03)


def test_separable_pairs_have_a_finite_optimum() -> None:
    difference, _, _ = shares(6)
    target = (difference @ np.array([1.0, -1.0, 0.5, 2.0, 0.0]) > 0).astype(float)
    fitted = fit_bradley_terry(difference, target, 1e-6)
    assert np.isfinite(fitted).all()
    assert (hits := (difference @ fitted > 0) == target).all(), f"{(~hits).sum()} on the wrong side"
    slope = slope_at(fitted, difference, target, 1e-6)
    assert np.abs(slope).max() < 1e-3 * np.abs(slope_at(0 * fitted, difference, target, 1e-6)).max()


def test_single_precision_gives_nearly_the_same_reward() -> None:
    difference, target, weight = shares(7, n=400, d=30)
    double = fit_bradley_terry(difference, target, 0.01, weight=weight)
    single = fit_bradley_terry(difference.astype(np.float32), target, 0.01, weight=weight)
    assert single.dtype == np.float64
    np.testing.assert_allclose(single, double, atol=2e-3)


def test_scores_keep_the_precision_of_the_differences() -> None:
    difference, _, _ = shares(8)
    theta = np.random.default_rng(8).standard_normal((5, 3))
    np.testing.assert_array_equal(scores(difference, theta), difference @ theta)
    single = scores(difference.astype(np.float32), theta)
    assert single.dtype == np.float64
    np.testing.assert_allclose(single, difference @ theta, atol=1e-5)


def test_path_holds_the_fit_of_every_strength() -> None:
    difference, target, _ = shares(9)
    grid = (1.0, 0.1, 0.001)
    path = fit_path(difference, target, grid)
    for l2, theta in zip(grid, path, strict=True):
        np.testing.assert_allclose(theta, fit_bradley_terry(difference, target, l2), atol=2e-4)
    assert (np.diff(np.linalg.norm(path, axis=1)) > 0).all(), "weaker regularisation, larger reward"


def test_directions_of_fewer_pairs_than_features_equal_the_right_singular_vectors() -> None:
    """They come from a smaller matrix; with equal pairs there are too few directions, and the larger one is used."""
    rng = np.random.default_rng(5)
    difference = rng.standard_normal((30, 90)) * np.geomspace(1, 0.1, 90)
    _, _, right = np.linalg.svd(difference)
    directions = principal_directions(difference, 6)
    np.testing.assert_allclose(np.abs(np.sum(directions * right[:6].T, axis=0)), 1.0, atol=1e-9)
    np.testing.assert_allclose(directions.T @ directions, np.eye(6), atol=1e-9)
    repeated = principal_directions(np.repeat(difference[:3], 10, axis=0), 6)
    np.testing.assert_allclose(repeated.T @ repeated, np.eye(6), atol=1e-9)


def test_principal_directions_equal_the_right_singular_vectors() -> None:
    difference, _, _ = shares(10, n=200, d=7)
    directions = principal_directions(difference, 4)
    _, _, right = np.linalg.svd(difference, full_matrices=False)
    np.testing.assert_allclose(directions.T @ directions, np.eye(4), atol=1e-12)
    np.testing.assert_allclose(np.abs((directions * right[:4].T).sum(axis=0)), 1.0, atol=1e-9)
    assert principal_directions(difference, 99).shape == (7, 7)


@pytest.mark.parametrize(("d", "m"), [(20, 6), (70, 64), (8, 8), (8, 7)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_directions_are_orthonormal_and_span_the_reward(d: int, m: int, dtype: type) -> None:
    difference: np.ndarray = shares(11, n=300, d=d)[0].astype(dtype)
    theta = np.random.default_rng(11).standard_normal(d)
    axes = directions_with(difference, theta, m)
    assert axes.dtype == dtype
    np.testing.assert_allclose(axes @ (axes.T @ theta), theta, atol=1e-5)
    np.testing.assert_allclose(scores(difference @ axes, axes.T @ theta), difference @ theta, atol=1e-3)
    sizes = np.linalg.svd(axes, compute_uv=False)
    assert np.minimum(np.abs(sizes - 1), sizes).max() < 1e-5, "each direction is present once, or not at all"


def test_reward_within_the_leading_directions_adds_no_direction() -> None:
    difference = shares(12, n=300, d=20)[0].astype(np.float32)
    theta = principal_directions(difference, 5).astype(np.float64) @ np.arange(1.0, 6.0)
    axes = directions_with(difference, theta, 5)
    np.testing.assert_allclose(axes @ (axes.T @ theta), theta, atol=1e-4)
