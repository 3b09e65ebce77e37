"""A rater's own reward: the dual fit against the primal one."""

import numpy as np
import pytest

from pluralign.learning.bradley_terry import fit_bradley_terry
from pluralign.learning.raters import fit_rater_reward


@pytest.mark.parametrize("variance", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("n", [1, 8, 40])
def test_the_dual_fit_is_the_primal_fit(n: int, variance: float) -> None:
    random = np.random.default_rng(n)
    differences, y = random.normal(size=(n, 12)), random.choice([0.0, 0.5, 1.0], size=n)
    dual = fit_rater_reward(differences @ differences.T, y, [0.01, variance])[1]
    primal = fit_bradley_terry(differences, y, 1 / (variance * n))  # its loss is a mean over the n choices
    np.testing.assert_allclose(differences.T @ dual, primal, atol=2e-3)


def test_no_choices_give_no_reward() -> None:
    assert fit_rater_reward(np.empty((0, 0)), [], [0.1, 1.0]).shape == (2, 0)


def test_separable_choices_converge() -> None:
    random = np.random.default_rng(0)
    differences = random.normal(size=(30, 200))
    y = (differences[:, 0] > 0).astype(float)
    dual = fit_rater_reward(differences @ differences.T, y, [10.0])[0]
    z = differences @ (differences.T @ dual)
    np.testing.assert_allclose(dual, 10.0 * (y - 1 / (1 + np.exp(-z))), atol=1e-8)
