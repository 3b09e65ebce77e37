"""Best-of-N policies against enumeration, simulation and numerical integration."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest

from pluralign.core.arrays import FloatArray
from pluralign.theory.best_of_n import best_of_n, best_of_n_kl, prob_best


def expected_best(rewards: npt.ArrayLike, n: int) -> FloatArray:
    """Return the expected reward of the best of n samples."""
    ordered = np.sort(np.asarray(rewards, dtype=np.float64), axis=0)
    return np.asarray(prob_best(len(ordered), n) @ ordered)


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_the_expected_best_is_the_mean_over_all_subsets(n: int) -> None:
    rewards = np.random.default_rng(n).standard_normal((6, 2))
    subsets = [rewards[list(chosen)].max(axis=0) for chosen in itertools.combinations(range(6), n)]
    assert np.allclose(expected_best(rewards, n), np.mean(subsets, axis=0))


def test_many_samples_do_not_overflow_and_more_than_there_are_is_refused() -> None:
    assert float(expected_best(np.arange(5000.0), 2500)) == pytest.approx(4998, abs=1)
    with pytest.raises(ValueError, match="number of samples, 3, not 4"):
        expected_best([1.0, 2.0, 3.0], 4)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_kl_matches_the_best_of_n_distribution(n: int) -> None:
    # In the quantile u of the base, best-of-n has density n u^(n−1). KL = ∫ n u^(n−1) log(n u^(n−1)) du, by midpoints.
    u = (np.arange(200_000) + 0.5) / 200_000
    density = n * u ** (n - 1)
    assert best_of_n_kl(n) == pytest.approx(float(np.mean(density * np.log(density))), abs=1e-4)
    assert best_of_n_kl(n) <= math.log(n) + 1e-12


def test_own_reward_equals_the_expected_best() -> None:
    random = np.random.default_rng(5)
    lists = [random.standard_normal((5, 3)) * [1.0, 4.0, 0.5] + [0.0, 7.0, -2.0] for _ in range(30)]
    result = best_of_n(lists)
    assert result is not None
    assert result.n == [1, 2, 3, 4, 5]
    pooled = np.concatenate(lists)
    for j in range(3):
        for index, n in enumerate(result.n):
            expected = np.mean([float(expected_best(rewards[:, j], n)) for rewards in lists]) - pooled[:, j].mean()
            assert result.own[j][index] == pytest.approx(expected / pooled[:, j].std())


def test_other_members_reward_equals_own_reward_for_a_copy_and_its_negative_for_an_opposite() -> None:
    rewards = np.random.default_rng(6).standard_normal((40, 4, 1))
    for sign in (1, -1):
        both = best_of_n([np.hstack([r, sign * r]) for r in rewards])
        assert both is not None
        assert np.allclose(both.others[0], sign * np.array(both.own[0]))


def test_prompts_with_one_response_give_no_result() -> None:
    assert best_of_n([np.zeros((1, 2))]) is None
    assert best_of_n([]) is None
