"""Bootstrap intervals against enumeration, and their coverage in simulation."""

import itertools
import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from pluralign.theory import intervals
from pluralign.theory.intervals import clustered_interval, paired_difference


def test_the_interval_matches_all_resamples_of_clusters() -> None:
    clusters = {"tax": [0.1, 0.5, 0.9], "bus": [0.2], "war": [0.8, 0.7], "sea": [0.0, 0.3, 0.1, 0.4]}
    every = itertools.product(clusters.values(), repeat=4)
    means = [statistics.fmean(itertools.chain.from_iterable(drawn)) for drawn in every]
    labels = [name for name, values in clusters.items() for _ in values]
    pooled = list(itertools.chain.from_iterable(clusters.values()))
    shuffled = np.random.default_rng(0).permutation(len(pooled))
    interval = clustered_interval(
        np.array(pooled)[shuffled], np.array(labels)[shuffled], level=0.8, n_resamples=100_000, seed=1
    )
    assert interval.mean == pytest.approx(statistics.fmean(pooled))
    assert interval.standard_error == pytest.approx(statistics.pstdev(means), rel=0.01)
    assert interval.low == pytest.approx(np.quantile(means, 0.1), abs=0.01)
    assert interval.high == pytest.approx(np.quantile(means, 0.9), abs=0.01)


def test_resampling_prompts_covers_the_truth_and_resampling_pairs_does_not() -> None:
    rng = np.random.default_rng(11)
    n_datasets, n_clusters = 300, 60
    covered = {"prompts": 0, "pairs": 0}
    for seed in range(n_datasets):
        clusters = np.repeat(np.arange(n_clusters), rng.integers(2, 12, n_clusters))
        values = rng.normal(size=n_clusters)[clusters] + rng.normal(size=clusters.size)
        for name, labels in (("prompts", clusters), ("pairs", np.arange(clusters.size))):
            interval = clustered_interval(values, labels, level=0.9, n_resamples=300, seed=seed)
            covered[name] += interval.low <= 0.0 <= interval.high
    assert 0.85 <= covered["prompts"] / n_datasets <= 0.94
    assert covered["pairs"] / n_datasets < 0.7


def test_missing_values_are_ignored() -> None:
    values = np.array([0.1, np.nan, 0.4, 0.3, np.nan, 0.9])
    clusters = np.array([0, 0, 1, 2, 3, 2])
    known = ~np.isnan(values)
    assert clustered_interval(values, clusters) == clustered_interval(values[known], clusters[known])


def test_the_block_size_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    values, clusters = rng.normal(size=300), rng.integers(0, 41, 300)
    whole = clustered_interval(values, clusters, n_resamples=101)
    for draws in (1, 41 * 7, 41 * 100):
        monkeypatch.setattr(intervals, "DRAWS_PER_BLOCK", draws)
        assert clustered_interval(values, clusters, n_resamples=101) == whole


@pytest.mark.parametrize(("values", "mean"), [([0.2, 0.4, np.nan], 0.3), ([np.nan, np.nan, np.nan], math.nan)])
def test_fewer_than_two_clusters_give_no_interval(values: list[float], mean: float) -> None:
    interval = clustered_interval(values, ["x", "x", "y"])
    assert interval.mean == pytest.approx(mean, nan_ok=True)
    assert np.isnan([interval.low, interval.high, interval.standard_error]).all()


def test_a_paired_difference_is_the_interval_of_the_differences() -> None:
    rng = np.random.default_rng(2)
    a, b, clusters = rng.normal(size=80), rng.normal(size=80), rng.integers(0, 20, 80)
    b[3] = np.nan
    known = np.arange(80) != 3
    found = paired_difference(a, b, clusters, level=0.8)
    assert found == clustered_interval((a - b)[known], clusters[known], level=0.8)
    assert found.mean == pytest.approx(np.mean(a[known]) - np.mean(b[known]))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: clustered_interval([0.5, 0.5], [1]), r"clusters must have shape \(2,\), but it has shape \(1,\)"),
        (lambda: clustered_interval([np.inf], [1]), "values must hold numbers between -inf and inf"),
        (lambda: paired_difference([0.5], [0.5, 0.5], [1]), r"values_b must have shape \(1,\)"),
    ],
)
def test_invalid_input_raises_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()
