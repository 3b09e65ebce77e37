"""Joint ensembles on votes of simulated populations, where the true shares are known."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulated import optimality_gap, paired, swapped

from pluralign.learning import joint
from pluralign.learning.bradley_terry import Teacher, fit_teacher
from pluralign.learning.joint import (
    FROM_MIXTURE,
    FROM_TEACHER,
    FROM_VOTES,
    TARGETS,
    Blend,
    VoteGradients,
    train_joint,
)
from pluralign.learning.pairs import Members, Pairs, hard_votes, validation_folds
from pluralign.learning.stagewise import stages
from pluralign.theory.calibration import constant_half, disagreement, floor, sigmoid, with_undecided

N_TRAIN, N_TEST = 900, 600


@functools.cache
def population(seed: int, common: float = 1.0, d: int = 8, n_votes: int = 100) -> tuple[Pairs, Pairs, np.ndarray]:
    """Votes of 24 linear annotators of unequal weight: training pairs, test pairs, and the true shares of the latter.

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


def fit_joint(pairs: Pairs, teacher: Teacher, k: int, blend: Blend = FROM_MIXTURE, **options: Any) -> Members:
    return train_joint(pairs, teacher, k, blend, **{"starts": 4, **options})


def target_of(blend: Blend, teacher: Teacher, pairs: Pairs) -> np.ndarray:
    """The share that members learn from."""
    mixture = sigmoid(teacher.damp(pairs.difference) @ teacher.voices) @ teacher.voice_weights
    taught = mixture if blend.source == "mixture" else teacher.prob_hat(pairs.difference)
    return (1 - blend.vote_share) * taught + blend.vote_share * pairs.prob_a


def predicted(fit: Members, pairs: Pairs) -> np.ndarray:
    return with_undecided(hard_votes(pairs.difference, fit.theta) @ fit.weights, fit.undecided)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter training, for properties that do not depend on its length."""
    monkeypatch.setattr(joint, "STEPS", 100)
    monkeypatch.setattr(joint, "BATCH", 256)


@pytest.mark.parametrize("seed", [0, 1])
def test_eight_members_predict_the_true_shares_of_a_population(seed: int) -> None:
    train, test, true = population(seed)
    fits = [fit_joint(train, teacher_of(seed), 8), fit_joint(train, teacher_of(seed), 8, FROM_VOTES)]
    from_teacher, from_votes = (np.mean((predicted(fit, test) - true) ** 2) for fit in fits)
    two = np.mean((predicted(fit_joint(train, teacher_of(seed), 2), test) - true) ** 2)
    *_, printed = stages(train.difference, train.prob_a, 8, l2=0.01, variant="printed")
    one_by_one = np.mean((hard_votes(test.difference, printed.theta) @ printed.weights - true) ** 2)
    for error in (from_teacher, from_votes):
        assert error < 0.25 * floor(true), "no single vote can get below the floor"
        assert error < 0.5 * constant_half(true)
        assert error < one_by_one
    assert from_teacher <= two + 1e-3
    assert from_votes < 0.01, "with many votes there is little noise to learn"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("undecided", [True, False])
@pytest.mark.parametrize(("d", "blend"), [(8, blend) for blend in TARGETS] + [(80, Blend("mixture", 0.4))])
def test_weights_and_undecided_share_are_optimal_for_the_blend(d: int, blend: Blend, undecided: bool) -> None:
    train, _, _ = population(0, d=d)
    teacher = teacher_of(0, d=d)
    fit = fit_joint(train, teacher, 4, blend, undecided=undecided)
    target = target_of(blend, teacher, train)
    votes = hard_votes(train.difference, fit.theta)
    assert fit.theta.shape == (d, 4)
    assert fit.weights.min() >= 0
    assert fit.weights.sum() == pytest.approx(1)
    columns, weights = votes, fit.weights
    if undecided:
        columns = np.column_stack([votes, np.full(len(votes), 0.5)])
        weights = np.append((1 - fit.undecided) * fit.weights, fit.undecided)
    else:
        assert fit.undecided == 0
    assert optimality_gap(columns, target, weights) < 1e-4


def test_undecided_share_replaces_members_that_are_near_opposites() -> None:
    """Half of the votes are coin flips: without an undecided share some member must vote against the others."""
    train, _, _ = population(0)
    noisy = replace(train, prob_a=0.5 * train.prob_a + 0.25)
    teacher = fit_teacher(noisy, validation_folds(noisy.prompt, 0))
    fits = [fit_joint(noisy, teacher, 4, undecided=undecided) for undecided in (True, False)]

    def smallest_correlation(fit: Members) -> float:
        return float(np.corrcoef(hard_votes(noisy.difference, fit.theta[:, fit.weights > 1e-3]).T).min())

    assert 0.3 < fits[0].undecided < 0.7
    assert smallest_correlation(fits[0]) > smallest_correlation(fits[1]) + 0.3
    errors = [np.mean((predicted(fit, noisy) - noisy.prob_a) ** 2) for fit in fits]
    assert errors[0] < errors[1]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("bound", [1.0, 0.48])
def test_members_have_unit_spread_over_damped_differences(bound: float) -> None:
    train, _, _ = population(0)
    reward = teacher_of(0).damp(train.difference) @ fit_joint(train, teacher_of(0), 4, bound=bound).theta
    np.testing.assert_allclose(np.mean(reward**2, axis=0), 1.0, atol=1e-3)


@functools.cache
def bounded(common: float, bound: float, blend: Blend, undecided: bool = False) -> Members:
    train, teacher = population(2, common)[0], teacher_of(2, common)
    return fit_joint(train, teacher, 4, blend, bound=bound, undecided=undecided)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("blend", [FROM_TEACHER, FROM_VOTES])
def test_bounded_members_stay_correlated_with_the_teacher(blend: Blend) -> None:
    train, _, _ = population(2, 0.3)
    teacher = teacher_of(2, 0.3)

    def least_correlation(bound: float) -> float:
        fit = fit_joint(train, teacher, 8, blend, bound=bound, undecided=False, starts=1)
        reward = teacher.damp(train.difference) @ np.column_stack([teacher.theta, fit.theta])
        reward /= np.sqrt(np.mean(reward**2, axis=0))
        return float(np.mean(reward[:, 1:] * reward[:, :1], axis=0).min())

    assert least_correlation(1.0) < 0, "without a bound some member is not"
    assert min(map(least_correlation, (0.9, 0.48))) >= joint.TEACHER_CORRELATION - 1e-3


@pytest.mark.usefixtures("quick")
def test_members_of_all_starts_are_matched_before_they_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    train, _, _ = population(0)
    alone = fit_joint(train, teacher_of(0), 4, starts=1)
    train_ensembles = joint._train_ensembles

    def shuffled(problem: Any, k: int, starts: int, *given: Any) -> list[np.ndarray]:
        (members,) = train_ensembles(problem, k, 1, *given)
        return [members[:, np.random.default_rng(start).permutation(k)] for start in range(starts)]

    monkeypatch.setattr(joint, "_train_ensembles", shuffled)
    mean = fit_joint(train, teacher_of(0), 4, starts=5)
    np.testing.assert_allclose(np.sort(mean.weights), np.sort(alone.weights), atol=1e-3)
    np.testing.assert_allclose(predicted(mean, train), predicted(alone, train), atol=1e-3)


@pytest.mark.usefixtures("quick")
def test_the_mean_of_many_starts_depends_less_on_the_seed() -> None:
    train, test, _ = population(0, d=40, n_votes=3)
    teacher = fit_teacher(train, validation_folds(train.prompt))

    def spread(starts: int) -> float:
        fits = [fit_joint(train, teacher, 4, seed=seed, starts=starts) for seed in range(4)]
        return float(np.var([predicted(fit, test) for fit in fits], axis=0).mean())

    assert spread(16) < 0.5 * spread(1)


@pytest.mark.parametrize(
    ("common", "bound", "blend"),
    [(1.0, 0.45, FROM_TEACHER), (0.3, 0.48, FROM_MIXTURE), (0.3, 0.48, FROM_VOTES), (0.3, 0.42, FROM_TEACHER)],
)
@pytest.mark.parametrize("undecided", [True, False])
def test_no_member_with_weight_exceeds_the_bound(common: float, bound: float, blend: Blend, undecided: bool) -> None:
    train, _, _ = population(2, common)
    teacher_votes = hard_votes(train.difference, teacher_of(2, common).theta[:, None])
    assert np.max(disagreement(teacher_votes, train.prob_a)) < bound - 0.02, "the teacher meets the bound"
    fit = bounded(common, bound, blend, undecided)
    disagreements = np.asarray(disagreement(hard_votes(train.difference, fit.theta), train.prob_a))
    assert disagreements[fit.weights > 1e-3].max() <= bound + 0.01
    free = bounded(common, 1.0, FROM_TEACHER)
    disagreements = np.asarray(disagreement(hard_votes(train.difference, free.theta), train.prob_a))
    assert common == 1 or disagreements[free.weights > 1e-3].max() > 0.49, "the bound is active"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("some", "blend"), [(1.0, FROM_TEACHER), (0.5, FROM_VOTES)])
def test_training_does_not_depend_on_the_order_within_pairs(some: float, blend: Blend) -> None:
    """All pairs swapped: the same problem. Some pairs swapped: other mixtures, so only without a teacher."""
    train, test, _ = population(0)
    other = swapped(train, np.random.default_rng(0).random(len(train)) < some)
    teacher = fit_teacher(other, validation_folds(other.prompt, 0))
    np.testing.assert_allclose(teacher.theta, teacher_of(0).theta, atol=1e-4)
    one, same = (fit_joint(pairs, teacher_of(0), 4, blend) for pairs in (train, other))
    assert np.mean((predicted(same, test) - predicted(one, test)) ** 2) < 1e-3


@pytest.mark.parametrize("bound", [0.5, 1.0])
def test_vote_gradients_equal_finite_differences(bound: float) -> None:
    rng = np.random.default_rng(3)
    n, m, sizes, tau = 40, 3, [3, 2], 0.7
    x, theta = rng.normal(size=(n, m)), rng.normal(size=(m, sum(sizes)))
    logits = rng.normal(size=sum(sizes) + len(sizes))
    target, share, weight = rng.random((n, 2)), rng.random(n), rng.dirichlet(np.ones(n), size=2).T

    def loss(theta: np.ndarray, logits: np.ndarray) -> float:
        total = 0.0
        for e, columns in enumerate(np.split(np.arange(sum(sizes)), [sizes[0]])):
            k, votes = sizes[e], 1 / (1 + np.exp(-x @ theta[:, columns] / tau))
            alpha = np.exp(np.append(logits[columns], logits[sum(sizes) + e]))
            alpha /= alpha.sum()
            prediction = votes @ alpha[:-1] + alpha[-1] / 2
            total += float(weight[:, e] @ (prediction - target[:, e]) ** 2)
            against = weight.mean(axis=1) @ (share[:, None] * (1 - votes) + (1 - share[:, None]) * votes)
            total += joint.DISAGREEMENT_PENALTY / k * np.maximum(0, against - bound).sum()
        return total

    def numeric(of: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
        steps = 1e-5 * np.eye(at.size).reshape(at.size, *at.shape)
        return np.array([(of(at + step) - of(at - step)) / 2e-5 for step in steps]).reshape(at.shape)

    gradients = VoteGradients(weight.astype(np.float32), sizes, bound)
    single = [array.astype(np.float32) for array in (x, target, share, theta, logits)]
    of_theta, of_logits = gradients((single[0], single[1], single[2]), single[3], single[4], np.float32(tau))
    np.testing.assert_allclose(of_theta, numeric(lambda other: loss(other, logits), theta), atol=2e-5)
    np.testing.assert_allclose(of_logits, numeric(lambda other: loss(theta, other), logits), atol=2e-5)
