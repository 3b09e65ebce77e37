"""Reliability curves and strata against plain Python."""

import itertools
import math
import statistics
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluralign.theory.calibration import by_stratum, expected_calibration_error, reliability, strata


def test_equal_mass_bins_of_distinct_predictions_hold_the_same_number_of_pairs() -> None:
    rng = np.random.default_rng(3)
    q, p = rng.permutation(1000) / 1000, rng.integers(0, 6, 1000) / 5
    curve = reliability(q, p)
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
    curve = reliability(q, p, n_bins)
    group_ends = set(np.cumsum(np.unique(q, return_counts=True)[1]).tolist())
    assert set(np.cumsum(curve.count).tolist()) <= group_ends
    assert curve.count.sum() == len(q)
    assert len(curve.count) <= n_bins
    assert (np.diff(curve.predicted) > 0).all()
    reverse = reliability(q[::-1], p[::-1], n_bins)
    assert reverse.observed == pytest.approx(curve.observed)


def test_predictions_that_differ_only_by_rounding_share_a_bin() -> None:
    weights = np.random.default_rng(1).dirichlet(np.ones(6))
    q = np.array([sum(w) for w in itertools.permutations(weights[:5])])
    assert len(set(q)) > 1
    curve = reliability(q, np.linspace(0.0, 1.0, q.size), n_bins=10)
    assert curve.count.tolist() == [q.size]
    assert curve.observed == pytest.approx([0.5])


def test_equal_width_bins_are_closed_below_and_the_last_on_both_sides() -> None:
    q = [0.0, 0.1 + 0.2, 0.3, 0.35, 0.5, 0.59, 0.7, 0.95, 1.0]
    p = [0.0, 0.2, 0.4, 0.6, 1.0, 0.5, 0.9, 0.8, 1.0]
    curve = reliability(q, p, n_bins=10, strategy="width")
    assert curve.count.tolist() == [1, 3, 2, 1, 2]
    assert curve.observed == pytest.approx([0.0, 0.4, 0.75, 0.9, 0.9])
    assert 0.57 * 100 < 57
    assert reliability([0.57, 0.575], [0.5, 0.5], n_bins=100, strategy="width").count.tolist() == [2]


def test_calibration_error_averages_the_gap_over_pairs() -> None:
    levels = [0.2, 0.2, 0.2, 0.7, 0.7, 1.0]
    shares = [0.0, 0.5, 0.1, 0.9, 0.6, 0.7]
    gap = 0.0
    for level in set(levels):
        chosen = [p for q, p in zip(levels, shares, strict=True) if q == level]
        gap += len(chosen) / len(levels) * abs(level - statistics.fmean(chosen))
    assert expected_calibration_error(levels, shares, n_bins=6) == pytest.approx(gap)
    overall = abs(statistics.fmean(levels) - statistics.fmean(shares))
    assert expected_calibration_error(levels, shares, n_bins=1) == pytest.approx(overall)


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
                assert [name for name, mask in strata([share]).items() if mask[0]] == [expected], (a, n)


def test_values_are_averaged_within_strata_and_missing_ones_are_ignored() -> None:
    found = by_stratum([1.0, 2.0, np.nan, 4.0, 5.0, np.nan], [0.0, 1.0, 0.0, 0.6, 0.9, 0.5])
    assert {name: found[name] for name in ("unanimous", "contested", "lopsided")} == {
        "unanimous": (2, 1.5),
        "contested": (1, 4.0),
        "lopsided": (1, 5.0),
    }
    assert found["even"][0] == 0
    assert math.isnan(found["even"][1])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: reliability([0.5], [0.5], n_bins=0), "n_bins must be at least 1"),
        (lambda: reliability([0.5], [0.5], strategy="size"), "strategy must be 'mass' or 'width', but it is 'size'"),  # type: ignore[arg-type]
        (lambda: by_stratum([0.5], [0.5, 0.5]), r"values must have shape \(2,\)"),
    ],
)
def test_invalid_input_raises_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()
