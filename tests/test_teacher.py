"""The teacher: damping as in its formula, and choices on validation prompts where the best one is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import as_array, paired

from pluralign.learning.bradley_terry import fit_bradley_terry
from pluralign.learning.pairs import validation_folds
from pluralign.learning.teacher import DAMPING_GRID, TEACHER_L2_GRID, damp, fit_teacher
from pluralign.theory.calibration import brier, sigmoid

# --- damping ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.floats(0.01, 20), st.floats(0.1, 10))
def test_damping_keeps_the_direction_and_the_order_of_lengths(seed: int, c: float, mean_square: float) -> None:
    difference = np.random.default_rng(seed).standard_normal((12, 3)) * np.geomspace(0.1, 10, 12)[:, None]
    damped = as_array(damp(difference, c, mean_square))
    before, after = np.linalg.norm(difference, axis=1), np.linalg.norm(damped, axis=1)
    np.testing.assert_allclose(damped / after[:, None], difference / before[:, None], atol=1e-12)
    assert (np.argsort(before) == np.argsort(after)).all()
    assert (after <= np.sqrt((1 + c) / c * mean_square) + 1e-9).all(), "there is a maximum length"


@given(st.floats(0.01, 10), st.floats(0.01, 10))
def test_damping_shortens_long_differences_and_lengthens_short_ones(one: float, more: float) -> None:
    difference = np.array([[0.5, 0.0], [2.0, 0.0], [6.0, 0.0]])
    weak, strong = (as_array(damp(difference, c, 4.0))[:, 0] for c in sorted((one, more)))
    assert strong[0] >= weak[0] >= 0.5
    assert strong[1] == pytest.approx(2.0)
    assert strong[2] <= weak[2] <= 6.0


def test_damping_equals_its_formula() -> None:
    difference = np.random.default_rng(1).standard_normal((5, 3))
    for row, damped in zip(difference, as_array(damp(difference, 2.5, 1.7)), strict=True):
        np.testing.assert_allclose(damped, row * ((1 + 2.5) / (1 + 2.5 * (row @ row) / 1.7)) ** 0.5)
    np.testing.assert_array_equal(as_array(damp(difference, 0.0, 1.0)), difference)


# --- choices on validation prompts ------------------------------------------------------------------------------------


def test_random_votes_choose_the_strongest_regularisation() -> None:
    rng = np.random.default_rng(2)
    noise = paired(rng.standard_normal((80, 40)), rng.integers(0, 2, 80).astype(float))
    chosen = fit_teacher(noise, validation_folds(noise.prompt, 0))
    assert chosen.l2 == max(TEACHER_L2_GRID)


def test_many_votes_with_a_strong_pattern_choose_the_weakest_regularisation() -> None:
    rng = np.random.default_rng(3)
    difference = rng.standard_normal((1500, 3))
    strong = paired(difference, sigmoid(difference @ [4.0, -3.0, 1.0]))
    assert fit_teacher(strong, validation_folds(strong.prompt, 0)).l2 == min(TEACHER_L2_GRID)


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
