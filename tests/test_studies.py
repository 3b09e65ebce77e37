"""The studies in benchmarks/: stability, identifiability and camps."""

import numpy as np
import pytest
from benchmark_modules import benchmark

from pluralign import town_hall
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.theory.calibration import brier

stability, identifiability, camps = (benchmark(name) for name in ("stability", "identifiability", "camps"))


def test_every_fit_seed_gets_the_same_split() -> None:
    votes = town_hall(300).preferences
    fixed = votes.with_split(0.2, seed=1)
    np.testing.assert_array_equal(fixed.test_mask(0.5, seed=7), votes.test_mask(0.2, seed=1))
    np.testing.assert_array_equal(fixed.with_split(0.2, seed=2).test_mask(), votes.test_mask(0.2, seed=2))


def test_spreads_are_means_and_standard_deviations_per_size() -> None:
    scores = [stability.Score(0, seed, k, 0.05 + 0.01 * seed, 1 + 0.1 * seed) for seed in range(3) for k in (2, 4)]
    two, four = stability.spreads("seeds", scores)
    assert (two.k, four.k, two.fits) == (2, 4, 3)
    assert (two.ratio, two.ratio_sd, two.ratio_worst) == pytest.approx((1.1, 0.1, 1.2))
    assert (two.brier, two.brier_sd) == pytest.approx((0.06, 0.01))
    assert np.isnan(next(stability.spreads("splits", scores[:1])).ratio_sd)


def test_an_ensemble_has_no_distance_from_itself_and_some_from_its_opposite(
    ensemble: RewardEnsemble, held_out: HeldOutVotes
) -> None:
    def fit(name: str, votes: HeldOutVotes, seed: int) -> object:
        share = votes.prob_hat(ensemble)
        score = brier(share, votes.preferences.prob_a)
        return identifiability.Fit(name, {"seed": seed, "k": 3}, votes, ensemble.weights, share, score, 0.0)

    same = identifiability.compare(fit("a", held_out, 0), fit("b", held_out, 1))
    assert same.differ == "seed"
    assert same.equally_calibrated
    assert (same.shares, same.members, same.first_choices) == pytest.approx((0, 0, 0), abs=1e-9)
    opposite = HeldOutVotes(held_out.preferences, -held_out.rewards)
    other = identifiability.compare(fit("a", held_out, 0), fit("b", opposite, 0))
    assert other.even_part == pytest.approx(0, abs=1e-9)
    assert other.members > 0.3
    assert not other.equally_calibrated


def test_the_true_camps_have_the_error_that_the_population_documents() -> None:
    town = town_hall(4000)
    voters = camps.true_camps(town)
    assert voters.weights.sum() == pytest.approx(1)
    assert brier(voters.share, town.true_prob) == pytest.approx(0.006, abs=0.0005)
