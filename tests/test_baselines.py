"""Baselines: properties of every formula, and each fit on votes simulated from the model it assumes."""

import functools
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st
from scipy.special import ndtr
from scipy.stats import ttest_1samp
from simulated import as_array, numeric_gradient, optimality_gap, paired

from pluralign.learning import baselines, bradley_terry as mixture
from pluralign.learning.baselines import FORMULAS, Baseline, fit_baselines, fit_damped, fit_undecided
from pluralign.learning.bradley_terry import L2_GRID, fit_bradley_terry, fit_em, principal_directions
from pluralign.learning.pairs import Differences, Pairs, hard_votes, validation_folds
from pluralign.theory.calibration import brier, constant_half, sigmoid
from pluralign.theory.intervals import clearly_lower

NAMES = [
    "soft_bt", "hard_bt", "soft_bt_temperature", "damped_bt", "undecided_bt", "pair", "bootstrap", "mean_variance",
    "mixture",
]  # fmt: skip
SEVERAL = 3


def compared(inputs: np.ndarray, share: Callable[[np.ndarray, np.ndarray], np.ndarray], n_votes: int) -> Pairs:
    """Compare each text of the first half with one of the second, two pairs per prompt."""
    n = len(inputs) // 2
    a, b = np.arange(n, dtype=np.int32), np.arange(n, 2 * n, dtype=np.int32)
    prob_a = np.random.default_rng(0).binomial(n_votes, share(inputs[a], inputs[b])) / n_votes
    return Pairs(inputs, a, b, prob_a, (np.arange(n) // 2).astype(np.int32))


@functools.cache
def votes() -> Pairs:
    """Votes of two groups: two thirds prefer the first feature, one third the second."""
    rng = np.random.default_rng(1)

    def share(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(2 / 3 * sigmoid(2 * (a - b)[:, 0]) + 1 / 3 * sigmoid(2 * (a - b)[:, 1]))

    return compared(rng.standard_normal((600, 6)).astype(np.float32), share, 12)


@functools.cache
def fitted() -> dict[str, Baseline]:
    return fit_baselines(votes(), validation_folds(votes().prompt, 0), SEVERAL)


def new_texts() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    return rng.standard_normal((50, 6)).astype(np.float32) * 3, rng.standard_normal((50, 6)).astype(np.float32)


def between(a: np.ndarray, b: np.ndarray) -> Differences:
    return Differences(np.vstack([a, b]), np.arange(len(a), dtype=np.int32), np.arange(len(a), dtype=np.int32) + len(a))


def predicted(baseline: Baseline, pairs: Pairs) -> np.ndarray:
    return baseline.prob_hat(Differences(pairs.inputs, pairs.a, pairs.b))


# --- all baselines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_shares_and_swap_with_the_pair(name: str) -> None:
    a, b = new_texts()
    share = fitted()[name].prob_hat(between(a, b))
    assert share.shape == (50,)
    assert share.dtype == np.float64
    assert -1e-12 <= share.min() < share.max() <= 1 + 1e-12
    np.testing.assert_allclose(fitted()[name].prob_hat(between(b, a)), 1 - share, atol=1e-6)
    np.testing.assert_allclose(fitted()[name].prob_hat(between(a, a)), 0.5, atol=1e-9)


def test_formulas_equal_their_definitions() -> None:
    a, b = (side.astype(np.float64)[:, :2] for side in new_texts())
    one, several, weights = np.array([1.0, -0.5]), np.array([[1.0, -2.0], [0.5, 1.0]]), np.array([0.3, 0.7])
    log_variance, offset = np.array([0.2, -0.4]), 0.1
    share = {
        "bradley-terry": {"theta": one, "temperature": np.array(2.5)},
        "votes": {"theta": several, "weights": weights},
        "mixture": {"theta": several, "weights": weights},
        "mean-variance": {"theta": one, "log_variance": log_variance, "offset": np.array(offset)},
    }
    predictions = {formula: Baseline(formula, arrays).prob_hat(between(a, b)) for formula, arrays in share.items()}
    assert set(predictions) == set(FORMULAS)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        spread = sum(math.exp(log_variance @ side + offset) for side in (x, y))
        gaps = [r @ (x - y) for r in several.T]
        assert predictions["bradley-terry"][i] == pytest.approx(1 / (1 + math.exp(-(one @ (x - y)) / 2.5)))
        assert predictions["votes"][i] == pytest.approx(0.3 * (gaps[0] > 0) + 0.7 * (gaps[1] > 0))
        mixed = 0.3 / (1 + math.exp(-gaps[0])) + 0.7 / (1 + math.exp(-gaps[1]))
        assert predictions["mixture"][i] == pytest.approx(mixed)
        assert predictions["mean-variance"][i] == pytest.approx(NormalDist().cdf(one @ (x - y) / math.sqrt(spread)))


def test_all_but_bootstrap_beat_chance_on_training_votes() -> None:
    chance = constant_half(votes().prob_a)
    error = {name: brier(predicted(fitted()[name], votes()), votes().prob_a) for name in NAMES}
    assert max(error[name] for name in NAMES if name != "bootstrap") < 0.9 * chance
    vote = hard_votes(votes().difference, fitted()["soft_bt"].arrays["theta"][:, None])[:, 0]
    assert error["bootstrap"] < brier(vote, votes().prob_a), "bootstrap members hardly differ, but beat a single vote"


def test_every_baseline_is_reported_and_the_seed_changes_only_bootstrap_and_mixture() -> None:
    small, reported = votes()[np.arange(100)], list[str]()
    folds = validation_folds(small.prompt, 0)
    one, again, other = (fit_baselines(small, folds, 2, seed=seed, report=reported.append) for seed in (0, 0, 1))
    assert reported == 3 * NAMES == 3 * list(one)
    assert {baseline.formula for baseline in one.values()} == set(FORMULAS)
    assert [baseline.k for baseline in one.values()] == [1, 1, 1, 1, 1, 2, 2, 1, 2]
    for name in NAMES:
        first, same, differs = (
            {part: array.tobytes() for part, array in found[name].arrays.items()} for found in (one, again, other)
        )
        assert first == same
        assert (first != differs) == (name in ("bootstrap", "mixture"))


# --- one reward -------------------------------------------------------------------------------------------------------


def validation_error(pairs: Pairs, target: np.ndarray, l2: float, temperature: float = 1.0) -> float:
    """Return the error of σ(Δr/T), fitted to the target without each fold, summed over folds."""
    d, error = as_array(pairs.difference), 0.0
    for fold in validation_folds(pairs.prompt, 0):
        theta = fit_bradley_terry(d[~fold], target[~fold], l2)
        error += brier(sigmoid(d[fold] @ theta / temperature), pairs.prob_a[fold])
    return error


@pytest.mark.parametrize("name", ["soft_bt", "hard_bt"])
def test_single_reward_has_the_regularisation_with_the_lowest_validation_error(name: str) -> None:
    pairs, arrays = votes(), fitted()[name].arrays
    majority = np.where(pairs.prob_a == 0.5, 0.5, pairs.prob_a > 0.5)
    assert (pairs.prob_a == 0.5).any()
    target = pairs.prob_a if name == "soft_bt" else majority
    l2, errors = float(arrays["l2"]), {l2: validation_error(pairs, target, l2) for l2 in L2_GRID}
    np.testing.assert_allclose(arrays["theta"], fit_bradley_terry(pairs.difference, target, l2), atol=1e-6)
    assert errors[l2] <= min(errors.values()) + 1e-5


def test_temperature_lowers_the_validation_error() -> None:
    pairs, arrays, l2 = votes(), fitted()["soft_bt_temperature"].arrays, float(fitted()["soft_bt"].arrays["l2"])
    np.testing.assert_array_equal(arrays["theta"], fitted()["soft_bt"].arrays["theta"])

    error = functools.partial(validation_error, pairs, pairs.prob_a, l2)
    chosen = float(arrays["temperature"])
    assert error(chosen) <= min(map(error, np.geomspace(0.25, 4.0, 101))) + 1e-3
    assert error(chosen) <= error(1.0) + 1e-6


def saturating(c: float, n: int = 800) -> Pairs:
    """Votes of one reward on differences damped by c; half of the texts are five times as long as the others."""
    rng = np.random.default_rng(5)
    inputs = rng.standard_normal((2 * n, 4)) * np.where(rng.random(2 * n) < 0.5, 1.0, 5.0)[:, None]
    mean_square = float(np.mean(np.sum((inputs[:n] - inputs[n:]) ** 2, axis=1)))

    def share(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        d = a - b
        length = np.sqrt((1 + c) / (1 + c * np.sum(d**2, axis=1) / mean_square))
        return sigmoid(0.6 * length * (d[:, 0] - d[:, 1]))

    return compared(inputs, share, 9)


def soft_bt(pairs: Pairs, l2: float = 0.01) -> dict[str, np.ndarray]:
    theta = fit_bradley_terry(pairs.difference, pairs.prob_a, l2)
    return {"theta": theta, "temperature": np.array(1.0), "l2": np.array(l2)}


def test_damping_is_found_where_votes_need_it_and_lowers_the_error_on_other_pairs() -> None:
    pairs, plain = saturating(10.0), soft_bt(saturating(10.0))
    learn = pairs[pairs.prompt < 300]
    arrays = fit_damped(learn, soft_bt(learn), validation_folds(learn.prompt, 0))
    assert arrays["damping"] >= 3
    other, d = pairs[pairs.prompt >= 300], as_array(pairs.difference)[pairs.prompt >= 300]
    share = predicted(Baseline("bradley-terry", {name: np.asarray(one) for name, one in arrays.items()}), other)
    c, unit = arrays["damping"], np.mean(np.sum(as_array(learn.difference) ** 2, axis=1))
    by_hand = 1 / (1 + np.exp(-np.sqrt((1 + c) / (1 + c * np.sum(d**2, axis=1) / unit)) * (d @ arrays["theta"])))
    np.testing.assert_allclose(share, by_hand, atol=1e-9)
    assert brier(share, other.prob_a) < 0.9 * brier(sigmoid(d @ plain["theta"]), other.prob_a)


def test_damped_reward_is_soft_bt_where_votes_are_logistic() -> None:
    pairs = saturating(0.0)
    plain = soft_bt(pairs)
    arrays = fit_damped(pairs, plain, validation_folds(pairs.prompt, 0))
    assert (arrays["damping"], arrays["l2"]) == (0, plain["l2"])
    np.testing.assert_array_equal(arrays["theta"], plain["theta"])


def test_clearly_lower_is_the_paired_t_test_of_scipy() -> None:
    rng = np.random.default_rng(6)
    decided = []
    for shift in np.linspace(0, 1, 40):
        sums, prompt = rng.standard_normal(8) - shift, np.arange(8).repeat(3)
        parts = rng.standard_normal((8, 3))
        parts += (sums - parts.sum(axis=1))[:, None] / 3
        expected = ttest_1samp(sums, 0, alternative="less").pvalue < 0.025
        decided.append(clearly_lower(parts.ravel(), prompt))
        assert decided[-1] == expected
    assert 5 < sum(decided) < 35
    missing = np.append(np.full(4, -1.0), np.nan)
    assert not clearly_lower(missing, np.array([0, 0, 0, 0, 1])), "one prompt is no evidence"


# --- votes ------------------------------------------------------------------------------------------------------------


def test_reward_and_its_opposite_have_the_best_weight() -> None:
    pairs, pair = votes(), fitted()["pair"]
    np.testing.assert_array_equal(pair.arrays["theta"][:, 1], -pair.arrays["theta"][:, 0])
    share = predicted(pair, pairs)
    assert len(np.unique(share.round(12))) == 2
    vote = hard_votes(pairs.difference, fitted()["soft_bt"].arrays["theta"][:, None])[:, 0]
    grid = [brier(weight * vote + (1 - weight) * (1 - vote), pairs.prob_a) for weight in np.linspace(0, 1, 1001)]
    assert min(grid) - 1e-5 < brier(share, pairs.prob_a) <= min(grid) + 1e-9, "the grid comes close to it"


def test_bootstrap_members_differ_and_have_optimal_weights() -> None:
    pairs, arrays = votes(), fitted()["bootstrap"].arrays
    theta = arrays["theta"]
    assert theta.shape == (6, SEVERAL)
    single = fitted()["soft_bt"].arrays["theta"]
    for j in range(SEVERAL):
        assert np.corrcoef(theta[:, j], single)[0, 1] > 0.8, "all are fitted to similar votes"
        for i in range(j):
            assert np.abs(theta[:, i] - theta[:, j]).max() > 0.01, "but not the same"
    assert optimality_gap(hard_votes(pairs.difference, theta), pairs.prob_a, arrays["weights"]) < 1e-6


def test_bootstrap_draws_whole_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[np.ndarray] = []

    def record(*given: Any, weight: npt.ArrayLike = 1.0, **_: object) -> np.ndarray:
        drawn.extend([np.asarray(weight)] if np.ndim(weight) else [])
        return fit_bradley_terry(*given, weight=weight)

    monkeypatch.setattr(mixture, "fit_bradley_terry", record)
    pairs = votes()
    baselines._fit_bootstrap(pairs, as_array(pairs.difference), 0.1, validation_folds(pairs.prompt, 0), 4, 0)
    assert len(drawn) == 4 * (1 + 3), "three strengths are tried"
    for weight in drawn[-4:]:
        assert weight.mean() == pytest.approx(1), "as many prompts as there were"
        assert (weight[0::2] == weight[1::2]).all(), "both pairs of a prompt, or neither"
        assert 0.2 < (weight == 0).mean() < 0.55, "about one in e is left out"


# --- mixture ----------------------------------------------------------------------------------------------------------


def log_likelihood(pairs: Pairs, theta: np.ndarray, weights: np.ndarray) -> float:
    """Return the mean log-likelihood of a vote: of group j with probability weights_j, which votes by σ(Δr_j)."""
    total = 0.0
    for d, p in zip(as_array(pairs.difference).astype(float), pairs.prob_a, strict=True):
        for_a = sum(w / (1 + np.exp(-d @ t)) for t, w in zip(theta.T, weights, strict=True))
        total += p * np.log(for_a) + (1 - p) * np.log(1 - for_a)
    return total / len(pairs)


def test_em_never_lowers_the_likelihood() -> None:
    pairs, theta = votes(), fitted()["soft_bt"].arrays["theta"]
    reached = []
    for rounds in (0, 1, 2, 3, 5, 8, 12):
        d, p = as_array(pairs.difference), pairs.prob_a
        members, weights = fit_em(d, p, theta, SEVERAL, l2=1e-4, seed=0, rounds=rounds)
        reached.append(log_likelihood(pairs, members, weights))
        assert weights.sum() == pytest.approx(1)
        assert weights.min() > 0
    assert np.diff(reached).min() > -1e-5
    assert reached[-1] > reached[0] + 0.005
    assert reached[-1] > log_likelihood(pairs, theta[:, None], np.ones(1)), "and above that of one reward"


def test_one_em_round_equals_its_definition() -> None:
    pairs, theta, k = votes(), fitted()["soft_bt"].arrays["theta"], 2
    d, p = as_array(pairs.difference), pairs.prob_a
    start, start_weights = fit_em(d, p, theta, k, l2=0.1, seed=3, rounds=0)
    after_one, weights = fit_em(d, p, theta, k, l2=0.1, seed=3, rounds=1)
    chance = 1 / (1 + np.exp(-d @ start))
    of_a, of_b = start_weights * chance, start_weights * (1 - chance)
    votes_a = p[:, None] * of_a / of_a.sum(axis=1, keepdims=True)
    votes_b = (1 - p)[:, None] * of_b / of_b.sum(axis=1, keepdims=True)
    count = votes_a + votes_b
    np.testing.assert_allclose(weights, count.mean(axis=0), atol=1e-5)
    for j in range(k):
        best = fit_bradley_terry(d, votes_a[:, j] / count[:, j], 0.1, weight=count[:, j] / count[:, j].mean())
        before, after = (np.abs(fit[:, j] - best).max() for fit in (start, after_one))
        assert after < 0.2 * before, "two Newton steps come near the best reward of this group"


def test_mixture_has_the_damping_and_regularisation_with_the_lowest_validation_error() -> None:
    pairs, arrays = votes(), fitted()["mixture"].arrays
    singles = {float(of.get("damping", 0)): of for of in (fitted()[name].arrays for name in ("soft_bt", "damped_bt"))}
    folds = validation_folds(pairs.prompt, 0)[: mixture.SEARCH_FOLDS]
    squares = np.sum(as_array(pairs.difference) ** 2, axis=1)

    def validation_error(c: float, factor: float) -> float:
        single_l2, p, error = float(singles[c]["l2"]), pairs.prob_a, 0.0
        d = as_array(pairs.difference) * np.sqrt((1 + c) / (1 + c * squares / squares.mean()))[:, None]
        d = d @ principal_directions(d, d.shape[1])  # random starts depend on the axes
        for fold in folds:
            guide = fit_bradley_terry(d[~fold], p[~fold], single_l2)
            theta, weights = fit_em(d[~fold], p[~fold], guide, SEVERAL, l2=factor * single_l2, rounds=4)
            error += brier(sigmoid(d[fold] @ theta) @ weights, p[fold])
        return error

    errors = {(c, factor): validation_error(c, factor) for c in singles for factor in mixture.FACTORS}
    damping = float(arrays["damping"])
    chosen = damping, round(float(arrays["l2"] / singles[damping]["l2"]), 6)
    assert len(errors) == 6
    assert errors[chosen] <= min(errors.values()) + 1e-6
    assert max(errors.values()) > min(errors.values()) + 3e-4


# --- mean and variance ------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.3]))
def test_mean_variance_gradient_equals_finite_differences(seed: int, l2: float) -> None:
    rng = np.random.default_rng(seed)
    # shares are not extreme enough to be clipped
    inputs, unknowns = rng.uniform(-1, 1, (14, 3)), rng.uniform(-0.5, 0.5, 7)
    guide = rng.standard_normal(3)
    a, b = np.arange(7, dtype=np.int32), np.arange(7, 14, dtype=np.int32)
    prob_a = rng.random(7)
    loss = baselines.mean_variance_loss(inputs, a, b, prob_a, l2, guide)
    value, gradient = loss(unknowns)
    mean, spread, offset = unknowns[:3], unknowns[3:6], unknowns[6]
    p = ndtr((inputs[a] - inputs[b]) @ mean / np.sqrt(sum(np.exp(inputs[side] @ spread + offset) for side in (a, b))))
    entropy = -np.mean(prob_a * np.log(p) + (1 - prob_a) * np.log(1 - p))
    assert value == pytest.approx(entropy + l2 / 2 * (np.sum((mean - guide) ** 2) + np.sum(spread**2)), rel=1e-9)
    np.testing.assert_allclose(gradient, numeric_gradient(lambda at: loss(at)[0], unknowns), atol=1e-6, rtol=1e-6)


def test_mean_variance_model_recovers_its_own_shares() -> None:
    """People disagree more on texts with a high third feature; one reward cannot express this."""
    rng = np.random.default_rng(4)

    def share(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(ndtr((a - b)[:, 0] / np.sqrt((np.exp(2 * a[:, 2]) + np.exp(2 * b[:, 2])) / 4)))

    pairs = compared(rng.standard_normal((3000, 4)), share, 50)
    a, b = rng.standard_normal((2, 400, 4))
    soft = fit_bradley_terry(pairs.difference, pairs.prob_a, 0.003)
    folds = validation_folds(pairs.prompt, 0)
    model = Baseline("mean-variance", baselines.fit_mean_variance(pairs, soft, folds[:1]))
    error = brier(model.prob_hat(between(a, b)), share(a, b))
    assert error < 0.3 * brier(sigmoid((a - b) @ soft), share(a, b))
    assert error < 2e-3


# --- one reward with an undecided share -------------------------------------------------------------------------------


@pytest.mark.parametrize("true", [0.0, 0.5])
def test_the_undecided_share_of_one_reward_is_found(true: float) -> None:
    rng = np.random.default_rng(11)
    difference = 3 * rng.standard_normal((3000, 3))
    pairs = paired(difference, true / 2 + (1 - true) * sigmoid(difference @ [2.0, -1.0, 0.5]))
    folds = validation_folds(pairs.prompt, 0)
    arrays = fit_undecided(pairs, fit_damped(pairs, soft_bt(pairs), folds), folds)
    assert float(arrays["undecided"]) == pytest.approx(true, abs=0.1)
    share = predicted(Baseline("bradley-terry", {name: np.asarray(value) for name, value in arrays.items()}), pairs)
    assert np.mean((share - pairs.prob_a) ** 2) < 0.002
