"""Theorem 3: pruning by distance to the ensemble keeps its calibration and leaves no outlier."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluralign.calibration import brier, disagreement, outliers
from pluralign.errors import UsageError
from pluralign.extremes import members_to_keep, pruning_bound


def random_ensemble(seed: int, k: int, n: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Votes of k members, their weights, and true shares near what they predict."""
    rng = np.random.default_rng(seed)
    leaning = rng.random(k)
    votes = (rng.random((n, k)) < leaning).astype(float)
    weights = rng.dirichlet(np.full(k, rng.choice([0.3, 1.0, 5.0])))
    truth = np.clip(votes @ weights + rng.normal(0, rng.choice([0.0, 0.05, 0.2]), n), 0, 1)
    return votes, weights, truth


@given(st.integers(0, 5000), st.integers(1, 10), st.floats(2, 30))
def test_pruning_keeps_what_theorem_3_promises(seed: int, k: int, beta: float) -> None:
    votes, weights, truth = random_ensemble(seed, k)
    epsilon = brier(np.clip(votes @ weights, 0, 1), truth)
    kept = members_to_keep(votes, weights, beta)
    removed = 1 - weights[kept].sum()
    rest = weights[kept] / weights[kept].sum()
    if len(kept) > 1 or removed <= 1 / (beta - 1) + 1e-9:  # beta = 2 may name everybody, and one must stay
        assert removed <= 1 / (beta - 1) + 1e-9
        assert brier(np.clip(votes[:, kept] @ rest, 0, 1), truth) <= pruning_bound(epsilon, beta) + 1e-9


@given(st.integers(0, 5000), st.integers(2, 10), st.floats(2, 30))
def test_no_outlier_remains_when_the_smallest_disagreement_is_known(seed: int, k: int, beta: float) -> None:
    votes, weights, truth = random_ensemble(seed, k)
    epsilon = brier(np.clip(votes @ weights, 0, 1), truth)
    smallest = float(np.minimum(truth, 1 - truth).mean())  # of a reward that follows every majority
    far = outliers(np.asarray(disagreement(votes, truth)), beta, (beta + 1) * epsilon**0.5, smallest)
    assert weights[far].sum() <= 1 / (beta - 1) + 1e-9, "the first part of the theorem"
    kept = members_to_keep(votes, weights, beta)
    if 1 - weights[kept].sum() <= 1 / (beta - 1) + 1e-9:
        assert not far[kept].any()


def test_the_furthest_member_goes_first_and_order_is_kept() -> None:
    votes = np.array([[1, 1, 1, 0], [0, 0, 0, 1], [1, 1, 0, 0], [1, 0, 1, 0]])
    weights = np.array([0.4, 0.25, 0.25, 0.1])
    assert members_to_keep(votes, weights, beta=11).tolist() == [0, 1, 2]
    assert members_to_keep(votes, weights, beta=30).tolist() == [0, 1, 2, 3], "a tenth is more than 1/29"
    with pytest.raises(UsageError, match="at least 2"):
        members_to_keep(votes, weights, beta=1.5)
