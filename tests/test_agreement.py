"""Agreement of votes, and the example of equal shares from opposite members."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pluralign.core.arrays import FloatArray
from pluralign.theory.calibration import ensemble_prob, votes_from_rewards
from pluralign.theory.kendall import vote_agreement, weight_on_tops

SEEDS = st.integers(0, 10_000)


def test_agreement_counts_equal_votes_and_half_of_the_ties() -> None:
    random = np.random.default_rng(0)
    v, w = random.choice([0.0, 0.5, 1.0], size=(50, 3)), random.choice([0.0, 1.0], size=(50, 2))
    counted = [[np.mean([1 - abs(a - b) for a, b in zip(v[:, i], w[:, j], strict=True)]) for j in range(2)]
               for i in range(3)]  # fmt: skip
    np.testing.assert_allclose(vote_agreement(v, w), counted)


def drawn_votes(random: np.random.Generator, k: int, n_responses: int = 6) -> tuple[FloatArray, FloatArray]:
    """Rewards of some responses, and the votes of every member on all pairs of them."""
    rewards = random.standard_normal((n_responses, k))
    a, b = np.triu_indices(n_responses, 1)
    return rewards, votes_from_rewards(rewards[a], rewards[b])


def test_two_perfectly_calibrated_ensembles_can_have_opposite_members() -> None:
    """{r, −r} and {s, −s} predict ½ on every pair, but no member of one votes like a member of the other."""
    r, s = np.array([4.0, 3.0, 2.0, 1.0]), np.array([2.0, 4.0, 1.0, 3.0])
    first, second, half = np.column_stack([r, -r]), np.column_stack([s, -s]), np.array([0.5, 0.5])
    a, b = np.triu_indices(4, 1)
    votes, others = votes_from_rewards(first[a], first[b]), votes_from_rewards(second[a], second[b])
    np.testing.assert_array_equal(ensemble_prob(votes, half), np.full(6, 0.5))
    np.testing.assert_array_equal(ensemble_prob(votes, half), ensemble_prob(others, half))
    matrix = vote_agreement(votes, others)
    np.testing.assert_array_equal(matrix, np.full((2, 2), 0.5))  # each agrees with each as often as a coin
    np.testing.assert_array_equal(weight_on_tops(first, half), [0.5, 0, 0, 0.5])  # no first choice in common
    np.testing.assert_array_equal(weight_on_tops(second, half), [0, 0.5, 0.5, 0])


@given(SEEDS)
def test_opposite_members_can_be_exchanged_without_changing_any_share(seed: int) -> None:
    random = np.random.default_rng(seed)
    (_, votes), (_, pair), (_, other) = (drawn_votes(random, k) for k in (3, 1, 1))
    weights, undecided = random.dirichlet(np.ones(3)), random.random()
    alpha = np.concatenate([(1 - undecided) * weights, [undecided / 2, undecided / 2]])
    shares = [ensemble_prob(np.hstack([votes, one, 1 - one]), alpha) for one in (pair, other)]
    np.testing.assert_allclose(shares[0], shares[1])
    np.testing.assert_allclose(shares[0], undecided / 2 + (1 - undecided) * ensemble_prob(votes, weights))
