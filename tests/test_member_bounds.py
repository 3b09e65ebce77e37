"""The cap on disagreement: members move towards the anchor just far enough."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluralign.learning.bradley_terry import fit_bradley_terry
from pluralign.learning.pairs import cap_disagreement, hard_votes, training_bound
from pluralign.theory.calibration import disagreement


def first_feature_votes(n: int = 4000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nearly all people prefer the first feature, so disagreement grows evenly with the angle to it."""
    difference = np.random.default_rng(6).standard_normal((n, 2))
    return difference, np.where(difference[:, 0] > 0, 0.95, 0.05), np.array([1.0, 0.0])


def disagreement_of(theta: np.ndarray, difference: np.ndarray, prob_a: np.ndarray) -> float:
    return float(np.max(disagreement(hard_votes(difference, theta[:, None]), prob_a)))


# Not π itself: a member exactly opposite to the anchor cancels to rounding noise half-way.
@given(st.floats(0.3, np.pi - 1e-3), st.floats(0.08, 0.9), st.floats(0.01, 100), st.floats(0.01, 100))
def test_member_moves_no_further_than_needed(angle: float, bound: float, scale: float, anchor_scale: float) -> None:
    difference, prob_a, anchor = first_feature_votes()
    member = scale * np.array([np.cos(angle), np.sin(angle)])
    capped = cap_disagreement(member, anchor_scale * anchor, difference, prob_a, bound)
    before, after = (disagreement_of(theta, difference, prob_a) for theta in (member, capped))
    assert after <= bound + 1e-9
    if before <= bound:
        np.testing.assert_array_equal(capped, member, "a member under the bound does not change")
    else:
        assert after > bound - 0.01 or angle > np.pi - 0.01, "just under the bound, unless the anchor is opposite"


def test_unreachable_bound_gives_the_anchor() -> None:
    difference, prob_a, anchor = first_feature_votes()
    capped = cap_disagreement(np.array([-1.0, 1.0]), 5 * anchor, difference, prob_a, bound=0.01)
    np.testing.assert_allclose(capped / np.linalg.norm(capped), anchor, atol=1e-12)


@given(st.integers(0, 10_000), st.sampled_from([0.3, 0.4, 0.48]))
def test_bound_holds_wherever_the_anchor_meets_it(seed: int, bound: float) -> None:
    rng = np.random.default_rng(seed)
    difference, rewards = rng.standard_normal((100, 5)), rng.standard_normal((5, 7)) + rng.standard_normal((5, 1))
    prob_a = (difference @ rewards > 0).mean(axis=1)
    anchor, member = fit_bradley_terry(difference, prob_a, 0.1), rng.standard_normal(5)
    capped = cap_disagreement(member, anchor, difference, prob_a, bound)
    assert disagreement_of(capped, difference, prob_a) <= max(bound, disagreement_of(anchor, difference, prob_a)) + 1e-9


def test_bound_holds_in_single_precision() -> None:
    difference, prob_a, anchor = first_feature_votes()
    capped = cap_disagreement(np.array([-1.0, 1.0]), anchor, difference.astype(np.float32), prob_a, bound=0.3)
    assert 0.29 < disagreement_of(capped, difference, prob_a) <= 0.3 + 2 / len(prob_a)


def test_margin_shrinks_with_more_prompts_and_1_sets_no_bound() -> None:
    bounds = [training_bound(0.5, n) for n in (20, 100, 1000, 100_000)]
    assert all(low < high for low, high in itertools.pairwise(bounds))
    assert 0.4 < bounds[0] < bounds[-1] < 0.5
    assert training_bound(0.4, 100) == pytest.approx(training_bound(0.5, 100) - 0.1)
    assert training_bound(1.0, 20) == 1.0
