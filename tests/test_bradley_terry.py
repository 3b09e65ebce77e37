"""Bradley–Terry rewards, the teacher and policy-level members: gradients, scipy and known rewards."""

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.optimize import minimize
from scipy.special import expit, softmax
from simulated import as_array, numeric_gradient, paired

from pluralign.learning import bradley_terry, policy_level
from pluralign.learning.bradley_terry import (
    DAMPING_GRID,
    TEACHER_L2_GRID,
    Teacher,
    damp,
    fit_bradley_terry,
    fit_teacher,
    principal_directions,
)
from pluralign.learning.pairs import Members, Pairs, scores, validation_folds
from pluralign.theory.calibration import brier, sigmoid


def shares(seed: int, n: int = 80, d: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return differences, shares of five votes (some of them 0 and 1), and unequal weights."""
    rng = np.random.default_rng(seed)
    difference = rng.standard_normal((n, d)) * np.linspace(0.3, 2.0, d)
    return difference, rng.binomial(5, sigmoid(difference @ rng.standard_normal(d))) / 5, rng.random(n) * 3


def slope_at(theta: np.ndarray, *others: Any) -> np.ndarray:
    return numeric_gradient(lambda at: bradley_terry.bradley_terry_loss(at, *others), theta)


def test_loss_is_the_mean_cross_entropy_plus_half_the_square() -> None:
    difference, target, weight = shares(0)
    theta = np.array([0.3, -1.0, 0.5, 0.0, 0.2])
    p = expit(difference @ theta)
    entropy = -(target * np.log(p) + (1 - target) * np.log(1 - p))
    expected = (weight * entropy).sum() / len(target) + 0.7 / 2 * (theta**2).sum()
    assert bradley_terry.bradley_terry_loss(theta, difference, target, 0.7, weight) == pytest.approx(
        expected, rel=1e-12
    )


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
        return bradley_terry.bradley_terry_loss(theta, difference, target, l2, weight)

    other = minimize(loss, np.zeros(5), method="BFGS", options={"gtol": 1e-9, "xrtol": 1e-12})
    fitted = fit_bradley_terry(difference, target, l2, weight=weight)
    np.testing.assert_allclose(fitted, other.x, atol=2e-4)
    assert loss(fitted) <= other.fun + 1e-9


@given(st.integers(0, 10_000))
def test_swapping_some_pairs_does_not_change_the_fit(seed: int) -> None:
    difference, target, weight = shares(seed)
    swapped = np.random.default_rng(seed).random(len(target)) < 0.5
    fitted = fit_bradley_terry(difference, target, 0.03, weight=weight)
    turned = np.where(swapped[:, None], -difference, difference), np.where(swapped, 1 - target, target)
    other = fit_bradley_terry(*turned, 0.03, weight=weight)
    np.testing.assert_allclose(other, fitted, atol=1e-6)


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
    assert single.dtype == scores(difference.astype(np.float32), single).dtype == np.float64
    np.testing.assert_allclose(single, double, atol=2e-3)
    np.testing.assert_allclose(scores(difference.astype(np.float32), single), difference @ single, atol=1e-5)


def test_path_holds_the_fit_of_every_strength() -> None:
    difference, target, _ = shares(9)
    grid = (1.0, 0.1, 0.001)
    path = bradley_terry.fit_path(difference, target, grid)
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


@pytest.mark.parametrize(("d", "m"), [(20, 6), (70, 64), (8, 8), (8, 7)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_directions_are_orthonormal_and_span_the_reward(d: int, m: int, dtype: type) -> None:
    difference: np.ndarray = shares(11, n=300, d=d)[0].astype(dtype)
    theta = np.random.default_rng(11).standard_normal(d)
    axes = bradley_terry.directions_with(difference, theta, m)
    assert axes.dtype == dtype
    np.testing.assert_allclose(axes @ (axes.T @ theta), theta, atol=1e-5)
    np.testing.assert_allclose(scores(difference @ axes, axes.T @ theta), difference @ theta, atol=1e-3)
    sizes = np.linalg.svd(axes, compute_uv=False)
    assert np.minimum(np.abs(sizes - 1), sizes).max() < 1e-5, "each direction is present once, or not at all"


def teacher_of(pairs: Pairs) -> Teacher:
    return fit_teacher(pairs, validation_folds(pairs.prompt, 0))


# --- the teacher ------------------------------------------------------------------------------------------------------


def test_damping_equals_its_formula() -> None:
    difference = np.random.default_rng(1).standard_normal((5, 3))
    for row, damped in zip(difference, as_array(damp(difference, 2.5, 1.7)), strict=True):
        np.testing.assert_allclose(damped, row * ((1 + 2.5) / (1 + 2.5 * (row @ row) / 1.7)) ** 0.5)
    np.testing.assert_array_equal(as_array(damp(difference, 0.0, 1.0)), difference)


@pytest.mark.parametrize("true", [0.0, 3.0])
def test_true_damping_is_chosen(true: float) -> None:
    rng = np.random.default_rng(4)
    difference = rng.standard_normal((2000, 3)) * np.exp(rng.standard_normal((2000, 1)))
    mean_square = float((difference**2).sum(axis=1).mean())
    votes = paired(difference, sigmoid(as_array(damp(difference, true, mean_square)) @ [1.0, -0.7, 0.3]))
    chosen = fit_teacher(votes, validation_folds(votes.prompt, 0), dampings=(0.0, 3.0))
    assert chosen.damping == true
    assert chosen.mean_square == pytest.approx(mean_square)
    assert brier(chosen.prob_hat(difference), votes.prob_a) < 1e-3


def test_chosen_grid_point_has_the_lowest_validation_error() -> None:
    rng = np.random.default_rng(5)
    difference = rng.standard_normal((240, 20)) * np.exp(0.5 * rng.standard_normal((240, 1)))
    pairs = paired(difference, rng.binomial(3, sigmoid(difference @ rng.standard_normal(20) / 3)) / 3)
    folds = validation_folds(pairs.prompt, 0)
    chosen = fit_teacher(pairs, folds)

    def validation_error(c: float, l2: float) -> float:
        d = as_array(damp(difference, c, chosen.mean_square))
        fits = [(fold, fit_bradley_terry(d[~fold], pairs.prob_a[~fold], l2)) for fold in folds]
        return float(np.mean([np.mean((sigmoid(d[fold] @ theta) - pairs.prob_a[fold]) ** 2) for fold, theta in fits]))

    errors = {(c, l2): validation_error(c, l2) for c in DAMPING_GRID for l2 in TEACHER_L2_GRID}
    assert errors[chosen.damping, chosen.l2] <= min(errors.values()) + 1e-6
    assert max(errors.values()) > min(errors.values()) + 1e-3, "the grid points differ"
    theta = fit_bradley_terry(damp(difference, chosen.damping, chosen.mean_square), pairs.prob_a, chosen.l2)
    np.testing.assert_allclose(chosen.theta, theta, atol=1e-9)
    alone = fit_teacher(pairs, folds, mixture=False)
    np.testing.assert_array_equal(alone.theta, chosen.theta)
    np.testing.assert_array_equal(alone.voices, chosen.theta[:, None])


# --- members at the policy level --------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.2]), st.integers(1, 4))
def test_policy_loss_gradient_equals_finite_differences(seed: int, l2: float, k: int) -> None:
    rng = np.random.default_rng(seed)
    x, prob_a, weight = rng.standard_normal((25, 3)), rng.random(25), rng.dirichlet(np.ones(25))
    center, unknowns = rng.standard_normal((3, k)), rng.standard_normal(3 * k + k)
    loss = policy_level.policy_loss(x, prob_a, l2, k, weight, center)
    theta, logits = unknowns[: 3 * k].reshape(3, k), unknowns[3 * k :]
    weights = np.exp(logits) / np.exp(logits).sum()
    share = 1 / (1 + np.exp(-x @ theta)) @ weights
    value, gradient = loss(unknowns)
    assert value == pytest.approx(weight @ (share - prob_a) ** 2 + l2 / k * np.sum((theta - center) ** 2))
    np.testing.assert_allclose(gradient, numeric_gradient(lambda at: loss(at)[0], unknowns), atol=1e-8)


@functools.cache
def two_groups() -> Pairs:
    """Votes of two groups: 70 % prefer the first feature, 30 % the second and not the first."""
    rng = np.random.default_rng(7)
    difference = 4 * rng.standard_normal((500, 3))
    share = 0.7 * sigmoid(difference @ [1.0, 0, 0]) + 0.3 * sigmoid(difference @ [-1.0, 1.0, 0])
    return paired(difference, rng.binomial(40, share) / 40)


VOTES = policy_level.PolicyOptions(1.0, 0.003)


def test_two_policies_fit_two_groups_better_than_one_reward() -> None:
    pairs = two_groups()
    single = brier(sigmoid(pairs.difference @ fit_bradley_terry(pairs.difference, pairs.prob_a, 1e-3)), pairs.prob_a)
    fit = policy_level.train_policy_level(pairs, teacher_of(pairs), 2, VOTES)
    share = sigmoid(pairs.difference @ fit.theta) @ fit.weights
    assert ((share > 0) & (share < 1)).all()
    assert fit.weights.min() > 0
    assert fit.weights.sum() == pytest.approx(1)
    assert fit.undecided == 0
    assert fit.brier(pairs, "policy") == pytest.approx(brier(share, pairs.prob_a))
    assert brier(share, pairs.prob_a) < 0.5 * single
    one, four = (
        policy_level.train_policy_level(pairs, teacher_of(pairs), k, VOTES).brier(pairs, "policy") for k in (1, 4)
    )
    assert four < one < single, "even a single member is fitted to the squared error"


def test_members_of_another_fit_move_to_the_counts_against_a_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    """One leading direction and those of two members are all three directions."""
    monkeypatch.setattr(policy_level, "FEW_DIRECTIONS", 1)
    pairs, own = two_groups(), np.array([[1.0, -0.2], [0.5, 0.5], [0.3, 0.0]])

    def objective(theta: np.ndarray, weights: np.ndarray) -> float:
        share = sigmoid(pairs.difference @ theta) @ weights
        return brier(share, pairs.prob_a) + policy_level.PULL / 2 * float(np.sum((theta - own) ** 2))

    start = np.append(own.ravel(), np.zeros(2))
    best = minimize(lambda at: objective(at[:6].reshape(3, 2), softmax(at[6:])), start).fun
    found = policy_level.adjusted_to_counts(pairs, Members(own, np.array([0.5, 0.5])))
    assert objective(found.theta, found.weights) == pytest.approx(best, rel=1e-4)
    assert best < 0.8 * objective(own, np.array([0.5, 0.5]))
    assert found.weights.sum() == pytest.approx(1)


def test_the_teacher_shrinks_long_differences_where_there_are_few_votes() -> None:
    """One vote per pair, damped: the teacher's share is less noisy than the votes, so it is part of the target."""
    rng = np.random.default_rng(8)
    difference = rng.standard_normal((300, 12)) * np.exp(0.7 * rng.standard_normal((300, 1)))
    mean_square = float((difference**2).sum(axis=1).mean())
    reward = np.zeros(12)
    reward[:3] = 0.6
    pairs = paired(difference, rng.binomial(1, sigmoid(np.asarray(damp(difference, 10.0, mean_square)) @ reward)))
    choice = policy_level.choose_policy_options(pairs, teacher_of(pairs), 4, validation_folds(pairs.prompt, 0))
    assert choice.vote_share == 0.3
    many = two_groups()
    choice = policy_level.choose_policy_options(many, teacher_of(many), 2, validation_folds(many.prompt, 0))
    assert choice == VOTES, "many votes without damping are learned from votes alone"
