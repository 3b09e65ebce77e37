"""Calibration measures against enumeration, plain Python, scipy, and simulation with a known truth."""

import itertools
import math
import statistics
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, strategies as st

from pluralign.theory import calibration

TRUE_SHARES = [Fraction(x, 20) for x in (0, 1, 5, 9, 10, 14, 20)]

Pair = tuple[float, float, int, int]


@st.composite
def pair_lists(draw: st.DrawFn) -> list[Pair]:
    """Pairs (prob_hat, prob_a, n_votes, n_ties) with possible vote counts."""
    pairs: list[Pair] = []
    for _ in range(draw(st.integers(1, 8))):
        n_votes = draw(st.integers(1, 9))
        n_ties = draw(st.integers(0, n_votes))
        votes_a = draw(st.integers(0, n_votes - n_ties))
        prob_hat = draw(st.floats(0.0, 1.0) | st.sampled_from([0.0, 0.5, 1.0]))
        pairs.append((prob_hat, (votes_a + n_ties / 2) / n_votes, n_votes, n_ties))
    return pairs


def outcomes(true_share: Fraction, n_votes: int) -> list[tuple[Fraction, Fraction]]:
    """Every (observed share, probability) of n_votes annotators without ties."""
    return [
        (Fraction(a, n_votes), math.comb(n_votes, a) * true_share**a * (1 - true_share) ** (n_votes - a))
        for a in range(n_votes + 1)
    ]


def outcomes_with_ties(win: Fraction, tie: Fraction, n_votes: int) -> list[tuple[Fraction, int, Fraction]]:
    """Every (observed share, ties, probability) when an annotator votes a with `win` and calls a tie with `tie`."""
    found = []
    for a, ties in itertools.product(range(n_votes + 1), repeat=2):
        if (b := n_votes - a - ties) >= 0:
            ways = math.comb(n_votes, a) * math.comb(n_votes - a, ties)
            found.append((Fraction(2 * a + ties, 2 * n_votes), ties, ways * win**a * tie**ties * (1 - win - tie) ** b))
    return found


# Votes and predictions


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), min_size=1))
def test_a_vote_compares_two_rewards_and_a_tie_counts_half(rewards: list[tuple[int, int]]) -> None:
    a, b = np.array(rewards, dtype=float).T
    expected = [1.0 if x > y else 0.0 if x < y else 0.5 for x, y in rewards]
    assert calibration.votes_from_rewards(a, b).tolist() == expected
    assert calibration.votes_from_rewards(b, a).tolist() == [1 - v for v in expected]
    assert calibration.votes_from_rewards(np.column_stack([a, b]), np.column_stack([b, b])).tolist() == [
        [v, 0.5] for v in expected
    ]


def test_rewards_are_compared_without_subtraction() -> None:
    assert calibration.votes_from_rewards([5e-324, -1e308, 1e308], [0.0, 1e308, -1e308]).tolist() == [1.0, 0.0, 1.0]


def test_ensemble_prob_is_the_weight_of_the_members_that_vote_for_a() -> None:
    weights = [Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)]
    votes = list(itertools.product([Fraction(0), Fraction(1, 2), Fraction(1)], repeat=3))
    expected = [float(sum(w * v for w, v in zip(weights, row, strict=True))) for row in votes]
    assert calibration.ensemble_prob(np.array(votes, dtype=float), np.array(weights, dtype=float)) == pytest.approx(
        expected
    )


def test_float32_weights_do_not_push_a_share_above_one() -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(8), size=50).astype(np.float32)
    assert weights.astype(float).sum(axis=1).max() > 1.0
    assert max(calibration.ensemble_prob(np.ones((1, 8)), w)[0] for w in weights) == 1.0


# Scores against plain Python


@given(pair_lists())
def test_scores_match_their_equations_pair_by_pair(pairs: list[Pair]) -> None:
    q, p, _, _ = zip(*pairs, strict=True)
    errors = [(b - a) ** 2 for a, b in zip(p, q, strict=True)]
    assert calibration.squared_error(q, p) == pytest.approx(errors)
    assert calibration.brier(q, p) == pytest.approx(statistics.fmean(errors))
    assert calibration.constant_half(p) == pytest.approx(statistics.fmean((0.5 - a) ** 2 for a in p))
    assert calibration.floor(p) == pytest.approx(statistics.fmean(min(a**2, (1 - a) ** 2) for a in p))
    wrong = [(1 - a) if b > 0.5 else a for a, b in zip(p, q, strict=True)]
    assert calibration.regret(q, p) == pytest.approx(
        statistics.fmean(w - min(a, 1 - a) for w, a in zip(wrong, p, strict=True))
    )


@given(pair_lists())
def test_noise_and_corrected_scores_use_the_pairs_with_two_votes_or_more(pairs: list[Pair]) -> None:
    q, p, n, ties = zip(*pairs, strict=True)
    several = [
        (b, a, statistics.variance([1.0] * round(a * m - t / 2) + [0.5] * t + [0.0] * round((1 - a) * m - t / 2)) / m)
        for b, a, m, t in pairs
        if m >= 2
    ]
    if not several:
        assert math.isnan(calibration.noise(p, n, ties))
        assert math.isnan(calibration.brier_corrected(q, p, n, ties))
        assert math.isnan(calibration.floor_corrected(p, n, ties))
        return
    assert calibration.noise(p, n, ties) == pytest.approx(statistics.fmean(v for _, _, v in several))
    assert calibration.brier_corrected(q, p, n, ties) == pytest.approx(
        statistics.fmean((b - a) ** 2 - v for b, a, v in several)
    )
    assert calibration.floor_corrected(p, n, ties) == pytest.approx(
        statistics.fmean(min(a, 1 - a) ** 2 - v for _, a, v in several)
    )


def test_regret_decides_for_b_at_exactly_one_half_as_printed() -> None:
    assert calibration.regret([0.5], [0.75]) == 0.5
    assert calibration.regret([0.5], [0.25]) == 0.0
    assert calibration.regret([np.nextafter(0.5, 1.0)], [0.75]) == 0.0


def test_the_floor_is_the_best_brier_score_of_all_deterministic_votes() -> None:
    prob_a = [0.0, 0.2, 0.5, 0.6, 0.9, 1.0]
    best = min(calibration.brier(votes, prob_a) for votes in itertools.product([0.0, 1.0], repeat=len(prob_a)))
    assert calibration.floor(prob_a) == pytest.approx(best)


def test_log_loss_is_entropy_plus_divergence() -> None:
    p, q = np.array([0.1, 0.5, 0.8]), np.array([0.3, 0.4, 0.95])
    entropy = scipy.stats.entropy([p, 1 - p])
    divergence = scipy.special.rel_entr([p, 1 - p], [q, 1 - q]).sum(axis=0)
    assert calibration.log_loss(q, p) == pytest.approx(np.mean(entropy + divergence))


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("predicted", [Fraction(1, 10), Fraction(1, 2), Fraction(7, 10)])
def test_the_absolute_error_is_too_high_on_average(n: int, predicted: Fraction) -> None:
    """By enumeration of all vote counts: its expectation is at least |p̂ − p*|, and above it near p*."""
    for truth in TRUE_SHARES:
        counts = [math.comb(n, votes) * truth**votes * (1 - truth) ** (n - votes) for votes in range(n + 1)]
        errors = [calibration.absolute_error([float(predicted)], [votes / n]) for votes in range(n + 1)]
        expected = sum(float(count) * error for count, error in zip(counts, errors, strict=True))
        assert expected >= abs(float(predicted - truth)) - 1e-12
        if truth == predicted:
            assert expected > 0.05


def test_an_undecided_share_is_between_0_and_1() -> None:
    assert calibration.with_undecided([0.0, 1.0], 1.0).tolist() == [0.5, 0.5]
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="undecided must be between 0 and 1"):
            calibration.with_undecided([0.5], wrong)


def test_a_vote_against_a_certain_prediction_costs_a_finite_amount() -> None:
    assert calibration.log_loss([1.0], [0.0]) == pytest.approx(-math.log(1e-6))
    assert calibration.log_loss([0.0], [1.0]) == pytest.approx(-math.log(1e-6))
    assert calibration.log_loss([1.0], [1.0]) == pytest.approx(1e-6)


# Lemma 1: bias of the scores with few votes, for a known p*


@pytest.mark.parametrize("n_votes", range(2, 11))
@pytest.mark.parametrize("true_share", TRUE_SHARES, ids=str)
def test_the_corrected_brier_score_is_unbiased_and_the_plain_one_is_biased_by_the_noise(
    true_share: Fraction, n_votes: int
) -> None:
    prob_hat = Fraction(3, 10)
    plain = corrected = estimated = 0.0
    for observed, probability in outcomes(true_share, n_votes):
        q, p, w = [float(prob_hat)], [float(observed)], float(probability)
        plain += w * calibration.brier(q, p)
        corrected += w * calibration.brier_corrected(q, p, [n_votes])
        estimated += w * calibration.noise(p, [n_votes])
    truth, c = (prob_hat - true_share) ** 2, true_share * (1 - true_share) / n_votes
    assert corrected == pytest.approx(float(truth), abs=1e-12)
    assert plain == pytest.approx(float(truth + c), abs=1e-12)
    assert estimated == pytest.approx(float(c), abs=1e-12)


@pytest.mark.parametrize("n_votes", [2, 3, 5, 8])
@pytest.mark.parametrize(("win", "tie"), [(1, 0), (1, 3), (0, 4), (3, 5), (2, 6), (8, 0)])
def test_sampling_noise_is_unbiased_when_ties_count_half(win: int, tie: int, n_votes: int) -> None:
    every = outcomes_with_ties(Fraction(win, 8), Fraction(tie, 8), n_votes)
    mean = sum(w * p for p, _, w in every)
    assert mean == Fraction(2 * win + tie, 16)
    variance = sum(w * (p - mean) ** 2 for p, _, w in every)
    shares, ties, weights = zip(*every, strict=True)
    estimate = calibration.sampling_noise(np.array(shares, dtype=float), np.full(len(shares), n_votes), ties)
    assert np.array(weights, dtype=float) @ estimate == pytest.approx(float(variance), abs=1e-14)
    assert (estimate > -1e-15).all()


@pytest.mark.parametrize("n_votes", range(2, 9))
def test_the_corrected_floor_is_never_above_the_true_floor_on_average(n_votes: int) -> None:
    for win, tie in itertools.product(range(9), repeat=2):
        if win + tie > 8:
            continue
        every = outcomes_with_ties(Fraction(win, 8), Fraction(tie, 8), n_votes)
        expected = sum(float(w) * calibration.floor_corrected([float(p)], n_votes, ties) for p, ties, w in every)
        share = (2 * win + tie) / 16
        assert expected <= min(share, 1 - share) ** 2 + 1e-12


# Disagreement and outliers


def test_disagreement_is_the_probability_that_a_random_annotator_differs_from_the_reward() -> None:
    annotators = [[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]]  # per pair
    votes = [[Fraction(1), Fraction(0)], [Fraction(1, 2), Fraction(1)], [Fraction(0), Fraction(1, 2)]]
    expected = []
    for member in range(2):
        chance = Fraction(0)
        for row, people in zip(votes, annotators, strict=True):
            for person in people:
                chance += (row[member] if person == 0 else 1 - row[member]) / (len(people) * len(votes))
        expected.append(float(chance))
    prob_a = np.mean(annotators, axis=1)
    assert calibration.disagreement(np.array(votes, dtype=float), prob_a) == pytest.approx(expected)
    assert calibration.disagreement([float(row[0]) for row in votes], prob_a) == pytest.approx(expected[0])


def test_outliers_lie_strictly_above_the_scaled_minimum() -> None:
    assert calibration.outliers([0.25, 0.5, 0.625, 0.75], beta=2.0, gamma=0.125, minimum=0.25).tolist() == [
        False
    ] * 3 + [True]


# Invalid input


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: calibration.brier([], []), "prob_a must be an array with at least one entry"),
        (lambda: calibration.brier([0.5], [0.5, 0.5]), r"prob_hat must have shape \(2,\), but it has shape \(1,\)"),
        (lambda: calibration.brier([1.01], [0.5]), "prob_hat must hold numbers between 0 and 1, but it holds 1.01"),
        (lambda: calibration.log_loss([0.5], [np.nan]), "prob_a must hold numbers between 0 and 1, but it holds nan"),
        (lambda: calibration.noise([0.5], [0]), "n_votes must hold numbers between 1 and inf, but it holds 0"),
        (lambda: calibration.noise([0.75], [4], [3]), "n_ties must fit prob_a"),
        (lambda: calibration.votes_from_rewards([np.nan], [0.0]), "reward_a must hold numbers between -inf and inf"),
        (lambda: calibration.policy_prob(np.ones((1, 2)), [0.5, 0.5], 0.0), "beta must be above 0"),
        (lambda: calibration.votes_from_rewards([[1.0, 2.0]], [1.0]), r"reward_b must have shape \(1, 2\)"),
        (lambda: calibration.ensemble_prob([[1.0, 0.0]], [0.5, 0.4]), "weights must sum to 1, but they sum to 0.9"),
        (
            lambda: calibration.ensemble_prob([1.0, 0.0], [0.5, 0.5]),
            r"votes must have shape \(2, 2\), but it has shape \(2,\)",
        ),
        (lambda: calibration.by_stratum([0.5], [0.5, 0.5]), r"values must have shape \(2,\)"),
    ],
)
def test_invalid_input_raises_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def test_shares_outside_the_unit_interval_by_rounding_are_accepted() -> None:
    assert calibration.brier([1.0 + 2e-16, -1e-9], [1.0, 0.0]) == 0.0


@given(st.floats(-1e4, 1e4))
def test_sigmoid_equals_scipys_and_is_symmetric(z: float) -> None:
    assert calibration.sigmoid(z) == pytest.approx(scipy.special.expit(z), abs=1e-15)
    assert calibration.sigmoid(-z) == pytest.approx(1 - calibration.sigmoid(z), abs=1e-15)


# --- reliability curves and strata against plain Python ---


def test_equal_mass_bins_of_distinct_predictions_hold_the_same_number_of_pairs() -> None:
    rng = np.random.default_rng(3)
    q, p = rng.permutation(1000) / 1000, rng.integers(0, 6, 1000) / 5
    curve = calibration.reliability(q, p)
    order = np.argsort(q)
    for b, chunk in enumerate(np.split(order, 10)):
        assert curve.predicted[b] == pytest.approx(statistics.fmean(q[chunk]))
        assert curve.observed[b] == pytest.approx(statistics.fmean(p[chunk]))
        assert curve.standard_error[b] == pytest.approx(statistics.stdev(p[chunk]) / math.sqrt(100))
    assert curve.count.tolist() == [100] * 10


@given(st.lists(st.integers(0, 15), min_size=1, max_size=60), st.integers(1, 12))
def test_equal_mass_bins_never_split_equal_predictions(levels: list[int], n_bins: int) -> None:
    q = np.array(levels) / 15
    p = np.arange(len(q)) % 4 / 3
    curve = calibration.reliability(q, p, n_bins)
    group_ends = set(np.cumsum(np.unique(q, return_counts=True)[1]).tolist())
    assert set(np.cumsum(curve.count).tolist()) <= group_ends
    assert curve.count.sum() == len(q)
    assert len(curve.count) <= n_bins
    assert (np.diff(curve.predicted) > 0).all()
    reverse = calibration.reliability(q[::-1], p[::-1], n_bins)
    assert reverse.observed == pytest.approx(curve.observed)


def test_predictions_that_differ_only_by_rounding_share_a_bin() -> None:
    weights = np.random.default_rng(1).dirichlet(np.ones(6))
    q = np.array([sum(w) for w in itertools.permutations(weights[:5])])
    assert len(set(q)) > 1
    curve = calibration.reliability(q, np.linspace(0.0, 1.0, q.size), n_bins=10)
    assert curve.count.tolist() == [q.size]
    assert curve.observed == pytest.approx([0.5])


def test_calibration_error_averages_the_gap_over_pairs() -> None:
    levels = [0.2, 0.2, 0.2, 0.7, 0.7, 1.0]
    shares = [0.0, 0.5, 0.1, 0.9, 0.6, 0.7]
    gap = 0.0
    for level in set(levels):
        chosen = [p for q, p in zip(levels, shares, strict=True) if q == level]
        gap += len(chosen) / len(levels) * abs(level - statistics.fmean(chosen))
    assert calibration.expected_calibration_error(levels, shares, n_bins=6) == pytest.approx(gap)
    overall = abs(statistics.fmean(levels) - statistics.fmean(shares))
    assert calibration.expected_calibration_error(levels, shares, n_bins=1) == pytest.approx(overall)


# Strata


def test_strata_follow_the_exact_fraction_for_every_small_number_of_votes() -> None:
    for n in range(1, 31):
        for a in range(n + 1):
            majority = max(Fraction(a, n), 1 - Fraction(a, n))
            if majority == 1:
                expected = "unanimous"
            elif majority > Fraction(2, 3):
                expected = "lopsided"
            else:
                expected = "even" if majority == Fraction(1, 2) else "contested"
            for share in (a / n, float(np.float32(a / n))):
                assert [name for name, mask in calibration.strata([share]).items() if mask[0]] == [expected], (a, n)


def test_values_are_averaged_within_strata_and_missing_ones_are_ignored() -> None:
    found = calibration.by_stratum([1.0, 2.0, np.nan, 4.0, 5.0, np.nan], [0.0, 1.0, 0.0, 0.6, 0.9, 0.5])
    assert {name: found[name] for name in ("unanimous", "contested", "lopsided")} == {
        "unanimous": (2, 1.5),
        "contested": (1, 4.0),
        "lopsided": (1, 5.0),
    }
    assert found["even"][0] == 0
    assert math.isnan(found["even"][1])
