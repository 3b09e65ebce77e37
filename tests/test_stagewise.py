"""The stagewise loop against a plain implementation of the paper's §4, and the properties of each loss variant."""

import itertools
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize
from simulated import numeric_gradient

from pluralign.learning.options import Variant
from pluralign.learning.pairs import Members, hard_votes
from pluralign.learning.stagewise import squared_loss, stages
from pluralign.theory.calibration import disagreement

VARIANTS: tuple[Variant, ...] = get_args(Variant)


def people(seed: int, n: int = 200, d: int = 4, groups: int = 6, votes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Return differences, and shares of votes by several groups of people with partly equal rewards."""
    rng = np.random.default_rng(seed)
    difference, rewards = rng.standard_normal((n, d)), rng.standard_normal((d, groups))
    rewards[0] += 1.0
    share = (difference @ rewards > 0).mean(axis=1)
    return difference, rng.binomial(votes, share) / votes


def fitted(seed: int = 0, k: int = 4, **options: object) -> list[Members]:
    difference, prob_a = people(seed)
    return list(stages(difference, prob_a, k, **{"l2": 0.03} | options))  # type: ignore[arg-type]


def error_of(stage: Members, difference: np.ndarray, prob_a: np.ndarray) -> float:
    return float(np.mean((hard_votes(difference, stage.theta) @ stage.weights - prob_a) ** 2))


def swapped(difference: np.ndarray, share: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same votes with the responses of a random half of the pairs swapped."""
    flip = np.random.default_rng(seed).random(len(share)) < 0.5
    return np.where(flip[:, None], -difference, difference), np.where(flip, 1 - share, share)


# --- the loss of one member -------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.3]))
def test_squared_loss_gradient_equals_finite_differences(seed: int, l2: float) -> None:
    rng = np.random.default_rng(seed)
    difference, target, theta = rng.standard_normal((30, 4)), rng.uniform(-1, 2, 30), rng.standard_normal(4)
    loss = squared_loss(difference, target, l2)
    value, gradient = loss(theta)
    plain = np.mean((target - 1 / (1 + np.exp(-difference @ theta))) ** 2) + l2 / 2 * np.sum(theta**2)
    assert value == pytest.approx(plain, rel=1e-12)
    np.testing.assert_allclose(gradient, numeric_gradient(lambda at: loss(at)[0], theta), atol=1e-8)


@given(st.integers(0, 10_000))
def test_printed_loss_averaged_over_both_orders_is_the_symmetric_loss_plus_a_quarter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    difference, residual, theta = rng.standard_normal((20, 3)), rng.uniform(-1, 1, 20), rng.standard_normal(3)
    as_given = squared_loss(difference, residual, 0.0)(theta)
    other_way = squared_loss(-difference, -residual, 0.0)(theta)
    symmetric = squared_loss(difference, 0.5 + residual, 0.0)(theta)
    assert (as_given[0] + other_way[0]) / 2 == pytest.approx(symmetric[0] + 0.25, abs=1e-12)
    np.testing.assert_allclose((as_given[1] + other_way[1]) / 2, symmetric[1], atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_only_the_printed_loss_depends_on_the_order_within_pairs(seed: int) -> None:
    difference, prob_a = people(seed)
    cases: tuple[tuple[Variant, int], ...] = (("symmetric", 4), ("printed", 2))
    for variant, k in cases:
        *_, one = stages(difference, prob_a, k, l2=0.03, variant=variant)
        *_, other = stages(*swapped(difference, prob_a, seed), k, l2=0.03, variant=variant)
        np.testing.assert_allclose(other.theta[:, 0], one.theta[:, 0], atol=1e-4)  # the first is always symmetric
        if variant == "symmetric":
            np.testing.assert_allclose(other.theta, one.theta, atol=1e-3)
            np.testing.assert_allclose(other.weights, one.weights, atol=1e-5)
        else:
            assert np.abs(other.theta[:, 1] - one.theta[:, 1]).max() > 0.02


# --- votes and weights ------------------------------------------------------------------------------------------------


def test_votes_are_signs_and_ties_count_half() -> None:
    difference = np.array([[1.0, 0.0], [-1.0, 2.0], [0.0, 0.0]])
    theta = np.array([[1.0, -3.0], [1.0, 0.0]])
    assert hard_votes(difference, theta).tolist() == [[1.0, 0.0], [1.0, 1.0], [0.5, 0.5]]


# --- the loop ---------------------------------------------------------------------------------------------------------


def paper(difference: np.ndarray, p: np.ndarray, k: int, l2: float, half: float) -> list[tuple[np.ndarray, ...]]:
    """Return the stages of §4, computed plainly: fit σ(Δr) to the residual by squared error, solve all weights again.

    The first reward is fitted to p itself. Later ones are fitted to ``half`` plus the residual: 0 as printed.
    """
    members: list[np.ndarray] = []
    results: list[tuple[np.ndarray, ...]] = []
    target = p
    for _ in range(k):

        def squared(theta: np.ndarray, target: np.ndarray = target) -> float:
            total = 0.0
            for d_i, t_i in zip(difference, target, strict=True):
                total += (t_i - 1 / (1 + np.exp(-(theta @ d_i)))) ** 2
            return total / len(p) + l2 / 2 * float(theta @ theta)

        members.append(minimize(squared, np.zeros(difference.shape[1]), method="BFGS", options={"gtol": 1e-7}).x)
        votes = np.array([[1.0 if theta @ d_i > 0 else 0.0 for theta in members] for d_i in difference])
        even = np.full(len(members), 1 / len(members))
        simplex = {"type": "eq", "fun": lambda a: a.sum() - 1}
        weights = minimize(
            lambda a, votes=votes: np.mean((votes @ a - p) ** 2), even, method="SLSQP",
            bounds=[(0, 1)] * len(even), constraints=simplex, options={"ftol": 1e-14},
        ).x  # fmt: skip
        target = half + p - votes @ weights
        results.append((np.column_stack(members), weights, np.mean((votes @ weights - p) ** 2)))
    return results


@pytest.mark.parametrize(("variant", "half"), [("printed", 0.0), ("symmetric", 0.5)])
def test_stages_equal_the_papers_procedure(variant: Variant, half: float) -> None:
    difference, prob_a = people(4, n=40, d=3)
    ours = list(stages(difference, prob_a, 4, l2=0.05, variant=variant))
    for stage, (theta, weights, brier) in zip(ours, paper(difference, prob_a, 4, 0.05, half), strict=True):
        np.testing.assert_allclose(stage.theta, theta, atol=5e-3)
        np.testing.assert_allclose(stage.weights, weights, atol=1e-3)
        assert error_of(stage, difference, prob_a) == pytest.approx(brier, abs=1e-6)


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.sampled_from(VARIANTS), st.sampled_from([1.0, 0.42]))
def test_training_error_never_rises(seed: int, variant: Variant, bound: float) -> None:
    difference, prob_a = people(seed, n=120)
    fits = list(stages(difference, prob_a, 5, l2=0.03, variant=variant, bound=bound))
    assert [stage.theta.shape for stage in fits] == [(4, j) for j in range(1, 6)]
    assert np.diff([error_of(stage, difference, prob_a) for stage in fits]).max() < 1e-7
    for one, after in itertools.pairwise(fits):
        np.testing.assert_array_equal(after.theta[:, :-1], one.theta, "earlier members do not change")
        assert (after.weights >= 0).all()
        assert after.weights.sum() == pytest.approx(1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("done", [1, 2, 4])
def test_resumed_stages_equal_uninterrupted_ones(variant: Variant, done: int) -> None:
    uninterrupted = fitted(variant=variant)
    resumed = fitted(variant=variant, first=uninterrupted[done - 1].theta)
    for one, other in zip(uninterrupted, resumed, strict=True):
        np.testing.assert_array_equal(other.theta, one.theta)
        np.testing.assert_array_equal(other.weights, one.weights)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_member_disagrees_more_than_the_bound(variant: Variant) -> None:
    for seed in range(4):
        difference, prob_a = people(seed)
        free, bounded = fitted(seed, variant=variant), fitted(seed, variant=variant, bound=0.4)
        worst = np.max(disagreement(hard_votes(difference, free[-1].theta), prob_a))
        assert worst > 0.42, "the bound is active"
        assert np.max(disagreement(hard_votes(difference, bounded[-1].theta), prob_a)) <= 0.4 + 1 / len(prob_a)
