"""Joint ensembles where the truth is known: populations of linear annotators, teachers worth choosing, two readings."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluralign.theory.calibration import brier, constant_half, disagreement, floor
from pluralign.theory.logistic import sigmoid
from pluralign.theory.simplex import optimality_gap
from pluralign.training import joint, teacher
from pluralign.training.bradley_terry import fit_bradley_terry
from pluralign.training.joint import DISAGREEMENT_PENALTY, JointFit, VoteGradients, fit_joint, fit_joint_sizes
from pluralign.training.pairs import Pairs, as_array, validation_folds
from pluralign.training.policy_level import fit_policy_level, policy_loss
from pluralign.training.stagewise import hard_votes, stages
from pluralign.training.teacher import Teacher, damp, fit_teacher

N_TRAIN, N_TEST = 900, 600


def paired(difference: np.ndarray, prob_a: np.ndarray, per_prompt: int = 3) -> Pairs:
    """Pairs with these differences: b is nothing, so that a is the difference."""
    n = len(prob_a)
    inputs = np.vstack([difference, np.zeros_like(difference[:1])])
    prompt = (np.arange(n) // per_prompt).astype(np.int32)
    return Pairs(inputs, np.arange(n, dtype=np.int32), np.full(n, n, np.int32), prob_a, prompt)


def turned(pairs: Pairs, rows: np.ndarray) -> Pairs:
    """The same votes with some pairs the other way round."""
    a, b = np.where(rows, pairs.b, pairs.a), np.where(rows, pairs.a, pairs.b)
    return Pairs(pairs.inputs, a, b, np.where(rows, 1 - pairs.prob_a, pairs.prob_a), pairs.prompt)


@functools.cache
def population(seed: int, common: float = 1.0, d: int = 8, n_votes: int = 100) -> tuple[Pairs, Pairs, np.ndarray]:
    """Votes of 24 linear annotators of unequal weight: training pairs, test pairs, and the test pairs' true shares.

    ``common`` is how much the annotators agree.
    """
    rng = np.random.default_rng(seed)
    difference = rng.standard_normal((N_TRAIN + N_TEST, d)).astype(np.float32)
    rewards = rng.standard_normal((d, 24)) + common * rng.standard_normal((d, 1))
    true = np.clip((difference @ rewards > 0) @ rng.dirichlet(np.full(24, 3.0)), 0, 1)
    pairs = paired(difference, rng.binomial(n_votes, true) / n_votes)
    rows = np.arange(len(pairs))
    return pairs[rows < N_TRAIN], pairs[rows >= N_TRAIN], true[N_TRAIN:]


@functools.cache
def teacher_of(seed: int, common: float = 1.0, d: int = 8) -> Teacher:
    train, _, _ = population(seed, common, d)
    return fit_teacher(train, validation_folds(train.prompt, 0))


def predicted(fit: JointFit, pairs: Pairs) -> np.ndarray:
    return np.asarray(hard_votes(pairs.difference, fit.theta) @ fit.weights)


def numeric_gradient(value: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    steps = 1e-6 * np.eye(len(at))
    return np.array([(value(at + step) - value(at - step)) / 2e-6 for step in steps])


# --- damping ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.floats(0.01, 20), st.floats(0.1, 10))
def test_damping_keeps_the_direction_and_the_order_of_lengths(seed: int, c: float, mean_square: float) -> None:
    difference = np.random.default_rng(seed).standard_normal((12, 3)) * np.geomspace(0.1, 10, 12)[:, None]
    damped = as_array(damp(difference, c, mean_square))
    before, after = np.linalg.norm(difference, axis=1), np.linalg.norm(damped, axis=1)
    np.testing.assert_allclose(damped / after[:, None], difference / before[:, None], atol=1e-12)
    assert (np.argsort(before) == np.argsort(after)).all()
    assert (after <= np.sqrt((1 + c) / c * mean_square) + 1e-9).all(), "no difference is longer than this"


@given(st.floats(0.01, 10), st.floats(0.01, 10))
def test_more_damping_shortens_what_is_long_and_lengthens_what_is_short(one: float, more: float) -> None:
    difference = np.array([[0.5, 0.0], [2.0, 0.0], [6.0, 0.0]])
    weak, strong = (as_array(damp(difference, c, 4.0))[:, 0] for c in sorted((one, more)))
    assert strong[0] >= weak[0] >= 0.5
    assert strong[1] == pytest.approx(2.0)
    assert strong[2] <= weak[2] <= 6.0


def test_no_damping_is_none() -> None:
    difference = np.random.default_rng(0).standard_normal((5, 3))
    np.testing.assert_array_equal(as_array(damp(difference, 0.0, 1.0)), difference)
    np.testing.assert_allclose(as_array(damp(difference, 1e-12, 1.0)), difference, atol=1e-9)


def test_damping_is_as_written() -> None:
    difference = np.random.default_rng(1).standard_normal((5, 3))
    for row, damped in zip(difference, as_array(damp(difference, 2.5, 1.7)), strict=True):
        np.testing.assert_allclose(damped, row * ((1 + 2.5) / (1 + 2.5 * (row @ row) / 1.7)) ** 0.5)


# --- the teacher ------------------------------------------------------------------------------------------------------


def test_votes_without_a_pattern_choose_the_strongest_regularisation() -> None:
    rng = np.random.default_rng(2)
    noise = paired(rng.standard_normal((80, 40)), rng.integers(0, 2, 80).astype(float))
    chosen = fit_teacher(noise, validation_folds(noise.prompt, 0))
    assert chosen.l2 == max(teacher.TEACHER_L2_GRID)


def test_plenty_of_votes_with_a_strong_pattern_choose_the_weakest_regularisation() -> None:
    rng = np.random.default_rng(3)
    difference = rng.standard_normal((1500, 3))
    strong = paired(difference, sigmoid(difference @ [4.0, -3.0, 1.0]))
    assert fit_teacher(strong, validation_folds(strong.prompt, 0)).l2 == min(teacher.TEACHER_L2_GRID)


@pytest.mark.parametrize("true", [0.0, 3.0])
def test_the_damping_that_made_the_votes_is_chosen(true: float) -> None:
    rng = np.random.default_rng(4)
    difference = rng.standard_normal((2000, 3)) * np.exp(rng.standard_normal((2000, 1)))
    mean_square = float((difference**2).sum(axis=1).mean())
    votes = paired(difference, sigmoid(as_array(damp(difference, true, mean_square)) @ [1.0, -0.7, 0.3]))
    chosen = fit_teacher(votes, validation_folds(votes.prompt, 0), dampings=(0.0, 3.0))
    assert chosen.damping == true
    assert chosen.mean_square == pytest.approx(mean_square)
    assert brier(chosen.prob_hat(difference), votes.prob_a) < 1e-3


def test_no_other_choice_of_the_grid_validates_better() -> None:
    rng = np.random.default_rng(5)
    difference = rng.standard_normal((240, 20)) * np.exp(0.5 * rng.standard_normal((240, 1)))
    pairs = paired(difference, rng.binomial(3, sigmoid(difference @ rng.standard_normal(20) / 3)) / 3)
    folds = validation_folds(pairs.prompt, 0)
    chosen = fit_teacher(pairs, folds)

    def validated(c: float, l2: float) -> float:
        d = as_array(damp(difference, c, chosen.mean_square))
        fits = [(fold, fit_bradley_terry(d[~fold], pairs.prob_a[~fold], l2)) for fold in folds]
        return float(np.mean([np.mean((sigmoid(d[fold] @ theta) - pairs.prob_a[fold]) ** 2) for fold, theta in fits]))

    errors = {(c, l2): validated(c, l2) for c in teacher.DAMPING_GRID for l2 in teacher.TEACHER_L2_GRID}
    assert errors[chosen.damping, chosen.l2] <= min(errors.values()) + 1e-6
    assert max(errors.values()) > min(errors.values()) + 1e-3, "there is something to choose"
    theta = fit_bradley_terry(damp(difference, chosen.damping, chosen.mean_square), pairs.prob_a, chosen.l2)
    np.testing.assert_allclose(chosen.theta, theta, atol=1e-9)


# --- members trained for the vote -------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter training, for what holds however well members are trained."""
    monkeypatch.setattr(joint, "STEPS", 100)
    monkeypatch.setattr(joint, "BATCH", 512)


@pytest.mark.parametrize("seed", [0, 1])
def test_eight_members_come_near_the_true_shares_of_a_known_population(seed: int) -> None:
    train, test, true = population(seed)
    fits = [fit_joint(train, teacher_of(seed), 8), fit_joint(train, teacher_of(seed), 8, vote_share=1.0)]
    from_teacher, from_votes = (np.mean((predicted(fit, test) - true) ** 2) for fit in fits)
    two = np.mean((predicted(fit_joint(train, teacher_of(seed), 2), test) - true) ** 2)
    *_, printed = stages(train.difference, train.prob_a, 8, l2=0.01, variant="printed")
    one_by_one = np.mean((hard_votes(test.difference, printed.theta) @ printed.weights - true) ** 2)
    for error in (from_teacher, from_votes):
        assert error < 0.25 * floor(true), "a single vote cannot reach the floor"
        assert error < 0.5 * constant_half(true)
        assert error < one_by_one
    assert from_teacher <= two + 1e-3
    assert from_votes < 0.01, "with many votes there is little noise to learn"


@pytest.mark.usefixtures("quick")
def test_a_single_joint_member_is_no_better_than_the_floor() -> None:
    train, _, _ = population(0)
    share = predicted(fit_joint(train, teacher_of(0), 1), train)
    assert set(share.tolist()) <= {0.0, 0.5, 1.0}
    assert brier(share, train.prob_a) >= floor(train.prob_a) - 1e-12


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("d", "vote_share"), [(8, 0.0), (8, 0.4), (8, 1.0), (80, 0.4)])
def test_weights_are_the_best_for_the_blend_of_teacher_and_votes(d: int, vote_share: float) -> None:
    train, _, _ = population(0, d=d)
    teacher = teacher_of(0, d=d)
    fit = fit_joint(train, teacher, 4, vote_share=vote_share)
    target = (1 - vote_share) * teacher.prob_hat(train.difference) + vote_share * train.prob_a
    votes = hard_votes(train.difference, fit.theta)
    assert fit.theta.shape == (d, 4)
    assert fit.weights.min() >= 0
    assert fit.weights.sum() == pytest.approx(1)
    assert optimality_gap(votes, target, fit.weights) < 1e-4
    assert fit.score == pytest.approx(brier(votes @ fit.weights, target), abs=1e-4)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("bound", [1.0, 0.48])
def test_members_have_unit_spread_over_damped_differences(bound: float) -> None:
    train, _, _ = population(0)
    reward = teacher_of(0).damp(train.difference) @ fit_joint(train, teacher_of(0), 4, bound=bound).theta
    np.testing.assert_allclose(np.mean(reward**2, axis=0), 1.0, atol=1e-3)


@functools.cache
def bounded(common: float, bound: float, vote_share: float) -> JointFit:
    return fit_joint(population(2, common)[0], teacher_of(2, common), 4, vote_share=vote_share, bound=bound)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("vote_share", [0.3, 1.0])
def test_with_any_bound_members_keep_some_of_the_teacher(vote_share: float) -> None:
    train, _, _ = population(2, 0.3)
    teacher = teacher_of(2, 0.3)

    def least_correlation(bound: float) -> float:
        fit = fit_joint(train, teacher, 8, vote_share=vote_share, bound=bound)
        reward = teacher.damp(train.difference) @ np.column_stack([teacher.theta, fit.theta])
        reward /= np.sqrt(np.mean(reward**2, axis=0))
        return float(np.mean(reward[:, 1:] * reward[:, :1], axis=0).min())

    assert least_correlation(1.0) < 0, "which they would not by themselves"
    assert min(map(least_correlation, (0.9, 0.48))) >= joint.TEACHER_CORRELATION - 1e-3


@pytest.mark.usefixtures("quick")
def test_the_best_restart_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    train, _, _ = population(0)
    restarts: list[np.ndarray] = []
    train_ensembles = joint._train_ensembles

    def record(*given: Any) -> list[np.ndarray]:
        restarts.extend(train_ensembles(*given))
        return restarts

    monkeypatch.setattr(joint, "_train_ensembles", record)
    kept = fit_joint(train, teacher_of(0), 2)
    scores = []
    for alone in restarts:
        monkeypatch.setattr(joint, "_train_ensembles", lambda *_, alone=alone: [alone])
        scores.append(fit_joint(train, teacher_of(0), 2).score)
    assert len(set(scores)) > 1
    assert kept.score == min(scores)


@pytest.mark.parametrize(
    ("common", "bound", "vote_share"), [(1.0, 0.45, 0.3), (0.3, 0.48, 0.3), (0.3, 0.48, 1.0), (0.3, 0.42, 0.3)]
)
def test_no_member_that_counts_disagrees_with_people_more_than_the_bound(
    common: float, bound: float, vote_share: float
) -> None:
    train, _, _ = population(2, common)
    guide = hard_votes(train.difference, teacher_of(2, common).theta[:, None])
    assert np.max(disagreement(guide, train.prob_a)) < bound - 0.02, "the bound can be kept"
    fit = bounded(common, bound, vote_share)
    found = np.asarray(disagreement(hard_votes(train.difference, fit.theta), train.prob_a))
    assert found[fit.weights > 1e-3].max() <= bound + 0.01


def test_without_a_bound_some_member_is_no_better_than_a_coin() -> None:
    train, _, _ = population(2, 0.3)
    fit = bounded(0.3, 1.0, 0.3)
    found = np.asarray(disagreement(hard_votes(train.difference, fit.theta), train.prob_a))
    assert found[fit.weights > 1e-3].max() > 0.49


@pytest.mark.usefixtures("quick")
def test_the_seed_decides_and_nothing_else() -> None:
    train, _, _ = population(0)
    first, again, other = (fit_joint(train, teacher_of(0), 4, seed=seed) for seed in (0, 0, 1))
    assert again.theta.tobytes() == first.theta.tobytes()
    assert again.weights.tobytes() == first.weights.tobytes()
    assert again.score == first.score
    assert np.abs(other.theta - first.theta).max() > 0.01


@pytest.mark.usefixtures("quick")
def test_a_share_turns_with_its_pair() -> None:
    train, test, _ = population(0)
    fit = fit_joint(train, teacher_of(0), 4)
    swapped = turned(test, np.ones(len(test), dtype=bool))
    np.testing.assert_allclose(predicted(fit, swapped), 1 - predicted(fit, test), atol=1e-12)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("some", "vote_share"), [(1.0, 0.3), (0.5, 1.0)])
def test_how_pairs_happen_to_be_turned_does_not_matter_to_training(some: float, vote_share: float) -> None:
    """All of them: exactly the same problem. Some of them: other mixtures, and so only without a teacher."""
    train, test, _ = population(0)
    other = turned(train, np.random.default_rng(0).random(len(train)) < some)
    teacher = fit_teacher(other, validation_folds(other.prompt, 0))
    np.testing.assert_allclose(teacher.theta, teacher_of(0).theta, atol=1e-4)
    one, same = (fit_joint(pairs, teacher_of(0), 4, vote_share=vote_share) for pairs in (train, other))
    assert np.mean((predicted(same, test) - predicted(one, test)) ** 2) < 1e-3


@pytest.mark.usefixtures("quick")
def test_smaller_ensembles_beside_it_do_not_change_the_largest() -> None:
    train, _, _ = population(0)
    together = fit_joint_sizes(train, teacher_of(0), [2, 4])
    assert [together[k].theta.shape[1] for k in (2, 4)] == [2, 4]
    alone = fit_joint(train, teacher_of(0), 4)
    np.testing.assert_allclose(together[4].theta, alone.theta, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(together[4].weights, alone.weights, atol=1e-2)


@pytest.mark.parametrize("bound", [0.5, 1.0])
def test_the_gradients_of_votes_are_those_of_finite_differences(bound: float) -> None:
    rng = np.random.default_rng(3)
    n, m, sizes, tau = 40, 3, [3, 2], 0.7
    x, theta, logits = rng.normal(size=(n, m)), rng.normal(size=(m, sum(sizes))), rng.normal(size=sum(sizes))
    target, share, weight = rng.random(n), rng.random(n), rng.dirichlet(np.ones(n))

    def paid(theta: np.ndarray, logits: np.ndarray) -> float:
        total = 0.0
        for k, columns in zip(sizes, np.split(np.arange(sum(sizes)), [sizes[0]]), strict=True):
            votes = 1 / (1 + np.exp(-x @ theta[:, columns] / tau))
            alpha = np.exp(logits[columns]) / np.exp(logits[columns]).sum()
            total += float(weight @ (votes @ alpha - target) ** 2)
            against = weight @ (share[:, None] * (1 - votes) + (1 - share[:, None]) * votes)
            total += DISAGREEMENT_PENALTY / k * np.maximum(0, against - bound).sum()
        return total

    def slopes(of: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
        steps = 1e-5 * np.eye(at.size).reshape(at.size, *at.shape)
        return np.array([(of(at + step) - of(at - step)) / 2e-5 for step in steps]).reshape(at.shape)

    gradients = VoteGradients(weight[:, None].astype(np.float32), sizes, bound)
    single = [array.astype(np.float32) for array in (x, target, share, theta, logits)]
    of_theta, of_logits = gradients(single[0], single[1], single[2], single[3], single[4], np.float32(tau))
    np.testing.assert_allclose(of_theta, slopes(lambda other: paid(other, logits), theta), atol=2e-5)
    np.testing.assert_allclose(of_logits, slopes(lambda other: paid(theta, other), logits), atol=2e-5)


def test_the_first_step_of_adam_has_the_length_of_its_rate() -> None:
    gradient = np.array([3.0, -1e-4, 0.0], dtype=np.float32)
    np.testing.assert_allclose(joint.Adam(gradient).step(gradient, 0.05), [0.05, -0.05, 0.0], atol=1e-6)


# --- members trained for the policy-level reading ---------------------------------------------------------------------


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.2]), st.integers(1, 4))
def test_the_gradient_of_the_policy_loss_is_that_of_finite_differences(seed: int, l2: float, k: int) -> None:
    rng = np.random.default_rng(seed)
    x, prob_a = rng.standard_normal((25, 3)), rng.random(25)
    loss, unknowns = policy_loss(x, prob_a, l2, k), rng.standard_normal(3 * k + k)
    theta, logits = unknowns[: 3 * k].reshape(3, k), unknowns[3 * k :]
    weights = np.exp(logits) / np.exp(logits).sum()
    share = 1 / (1 + np.exp(-x @ theta)) @ weights
    value, gradient = loss(unknowns)
    assert value == pytest.approx(np.mean((share - prob_a) ** 2) + l2 / k * np.sum(theta**2), rel=1e-12)
    np.testing.assert_allclose(gradient, numeric_gradient(lambda at: loss(at)[0], unknowns), atol=1e-8)


def two_kinds() -> Pairs:
    """Seven in ten people want the first feature; the others the second, and not the first."""
    rng = np.random.default_rng(7)
    difference = 4 * rng.standard_normal((500, 3))
    share = 0.7 * sigmoid(difference @ [1.0, 0, 0]) + 0.3 * sigmoid(difference @ [-1.0, 1.0, 0])
    return paired(difference, rng.binomial(40, share) / 40)


def test_two_kinds_of_people_are_met_by_two_policies_and_not_by_one_reward() -> None:
    pairs = two_kinds()
    folds = validation_folds(pairs.prompt, 0)
    single = brier(sigmoid(pairs.difference @ fit_bradley_terry(pairs.difference, pairs.prob_a, 1e-3)), pairs.prob_a)
    fit = fit_policy_level(pairs, 2, folds, l2=0.01)
    share = sigmoid(pairs.difference @ fit.theta) @ fit.weights
    assert ((share > 0) & (share < 1)).all()
    assert fit.weights.min() > 0
    assert fit.weights.sum() == pytest.approx(1)
    assert fit.score == pytest.approx(brier(share, pairs.prob_a), abs=1e-6)
    assert fit.score < 0.5 * single


def test_policy_level_training_ends_lower_than_it_began() -> None:
    pairs = two_kinds()
    guide = fit_bradley_terry(pairs.difference, pairs.prob_a, 0.01)
    start = brier(sigmoid(pairs.difference @ guide), pairs.prob_a)
    scores = [fit_policy_level(pairs, k, validation_folds(pairs.prompt, 0), l2=0.01).score for k in (1, 4)]
    assert scores[0] < start, "even a single member is fitted to the squared error"
    assert scores[1] < scores[0]


def test_the_policy_level_seed_decides() -> None:
    pairs = two_kinds()
    folds = validation_folds(pairs.prompt, 0)
    one, again, other = (fit_policy_level(pairs, 3, folds, l2=0.01, seed=seed) for seed in (0, 0, 1))
    assert one.theta.tobytes() == again.theta.tobytes()
    assert np.abs(one.theta - other.theta).max() > 0.01
