"""Joint members trained for the policy level: the gradient, and two groups of people that one reward cannot fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import numeric_gradient, paired

from pluralign.learning.bradley_terry import fit_bradley_terry
from pluralign.learning.pairs import Pairs, validation_folds
from pluralign.learning.policy_level import PolicyOptions, choose_policy_options, policy_loss, train_policy_level
from pluralign.learning.teacher import Teacher, damp, fit_teacher
from pluralign.theory.calibration import brier, sigmoid


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.2]), st.integers(1, 4))
def test_policy_loss_gradient_equals_finite_differences(seed: int, l2: float, k: int) -> None:
    rng = np.random.default_rng(seed)
    x, prob_a, weight = rng.standard_normal((25, 3)), rng.random(25), rng.dirichlet(np.ones(25))
    loss, unknowns = policy_loss(x, prob_a, l2, k, weight), rng.standard_normal(3 * k + k)
    theta, logits = unknowns[: 3 * k].reshape(3, k), unknowns[3 * k :]
    weights = np.exp(logits) / np.exp(logits).sum()
    share = 1 / (1 + np.exp(-x @ theta)) @ weights
    value, gradient = loss(unknowns)
    assert value == pytest.approx(weight @ (share - prob_a) ** 2 + l2 / k * np.sum(theta**2), rel=1e-12)
    np.testing.assert_allclose(gradient, numeric_gradient(lambda at: loss(at)[0], unknowns), atol=1e-8)


def two_groups() -> Pairs:
    """Votes of two groups: 70 % prefer the first feature, 30 % the second and not the first."""
    rng = np.random.default_rng(7)
    difference = 4 * rng.standard_normal((500, 3))
    share = 0.7 * sigmoid(difference @ [1.0, 0, 0]) + 0.3 * sigmoid(difference @ [-1.0, 1.0, 0])
    return paired(difference, rng.binomial(40, share) / 40)


VOTES = PolicyOptions(1.0, 0.003)


def teacher_of(pairs: Pairs) -> Teacher:
    return fit_teacher(pairs, validation_folds(pairs.prompt, 0))


def test_two_policies_fit_two_groups_better_than_one_reward() -> None:
    pairs = two_groups()
    single = brier(sigmoid(pairs.difference @ fit_bradley_terry(pairs.difference, pairs.prob_a, 1e-3)), pairs.prob_a)
    fit = train_policy_level(pairs, teacher_of(pairs), 2, VOTES)
    share = sigmoid(pairs.difference @ fit.theta) @ fit.weights
    assert ((share > 0) & (share < 1)).all()
    assert fit.weights.min() > 0
    assert fit.weights.sum() == pytest.approx(1)
    assert fit.undecided == 0
    assert brier(share, pairs.prob_a) < 0.5 * single


def test_training_lowers_the_error_of_the_start() -> None:
    pairs = two_groups()
    guide = fit_bradley_terry(pairs.difference, pairs.prob_a, 0.01)
    start = brier(sigmoid(pairs.difference @ guide), pairs.prob_a)
    scores = [train_policy_level(pairs, teacher_of(pairs), k, VOTES).brier(pairs, "policy") for k in (1, 4)]
    assert scores[0] < start, "even a single member is fitted to the squared error"
    assert scores[1] < scores[0]


def test_fit_depends_only_on_the_seed() -> None:
    pairs = two_groups()
    teacher, choice = teacher_of(pairs), PolicyOptions(0.3, 0.03)
    one, again, other = (train_policy_level(pairs, teacher, 3, choice, seed=seed) for seed in (0, 0, 1))
    assert one.theta.tobytes() == again.theta.tobytes()
    assert np.abs(one.theta - other.theta).max() > 0.01


def test_many_votes_without_damping_are_learned_from_votes_alone() -> None:
    pairs = two_groups()
    choice = choose_policy_options(pairs, teacher_of(pairs), 2, validation_folds(pairs.prompt, 0))
    assert choice == PolicyOptions(1.0, 0.003)


def test_the_teacher_shrinks_long_differences_where_there_are_few_votes() -> None:
    """One vote per pair, damped: the teacher's share is less noisy than the votes, so it is part of the target."""
    rng = np.random.default_rng(8)
    difference = rng.standard_normal((300, 12)) * np.exp(0.7 * rng.standard_normal((300, 1)))
    mean_square = float((difference**2).sum(axis=1).mean())
    reward = np.zeros(12)
    reward[:3] = 0.6
    pairs = paired(difference, rng.binomial(1, sigmoid(np.asarray(damp(difference, 10.0, mean_square)) @ reward)))
    choice = choose_policy_options(pairs, teacher_of(pairs), 4, validation_folds(pairs.prompt, 0))
    assert choice.vote_share == 0.3
