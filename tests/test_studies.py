"""The studies in benchmarks/: stability, identifiability, camps and voices."""

from argparse import Namespace
from typing import Any

import numpy as np
import pytest
from benchmark_modules import benchmark

from pluralign import RewardEnsemble, town_hall
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.theory.calibration import brier
from pluralign.votes.preferences import texts_of

NAMES = ("stability", "identifiability", "camps", "voices")
stability, identifiability, camps, voices = map(benchmark, NAMES)


def test_every_fit_seed_gets_the_same_split() -> None:
    votes = town_hall(300).preferences
    fixed = votes.with_split(0.2, seed=1)
    np.testing.assert_array_equal(fixed.test_mask(0.5, seed=7), votes.test_mask(0.2, seed=1))
    np.testing.assert_array_equal(fixed.with_split(0.2, seed=2).test_mask(), votes.test_mask(0.2, seed=2))


def test_changes_between_seeds_count_flipped_majorities_and_the_largest_gap() -> None:
    votes = town_hall(300).preferences.with_split(0.2)
    spread, shares = stability.measure("demo:300", votes, 0, 2, {"k": 2, "encoder": "none"})
    flips, gap = stability.changes(shares)
    assert flips == np.mean((shares[0] > 0.5) != (shares[1] > 0.5))
    assert gap == np.abs(shares[0] - shares[1]).max() > 0
    assert (spread.flips, spread.gap) == (flips, gap)
    assert spread.sd == pytest.approx(spread.range / 2**0.5)
    same = stability.compare(shares, shares[::-1], votes[votes.test_mask()])
    assert (same.mean, same.high) == (0, 0)


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


@pytest.mark.parametrize("decisiveness", ["groups", "lognormal"])
@pytest.mark.parametrize(("angle", "shared"), [(0, True), (90, False)])
def test_a_simulated_camp_has_one_taste_and_half_of_its_quality_is_invisible(
    decisiveness: str, angle: float, shared: bool
) -> None:
    votes, features = voices.simulate(angle, 3, 400, 9, 4, decisiveness)
    judged: Any = votes.judgments
    assert (judged.n, judged.n_prompts, set(judged.sizes)) == (3600, 400, {4})
    place = np.empty((400, 9, 4))
    place[judged.prompt.repeat(4), np.tile(np.arange(9).repeat(4), 400), judged.response % 4] = judged.place
    a, b = votes.a_index % 4, votes.b_index % 4
    np.testing.assert_array_equal(
        votes.votes_a, (place[votes.prompt_index, :, a] < place[votes.prompt_index, :, b]).sum(axis=1)
    )
    assert [text for _, text in texts_of(votes)] == list(votes.responses)
    difference = (features[votes.a_index] - features[votes.b_index]) / np.sqrt(2)
    seen = difference @ np.linalg.lstsq(difference, votes.prob_a - 0.5)[0]
    explained = np.corrcoef(seen, votes.prob_a)[0, 1] ** 2
    assert 0.35 < explained < 0.5 if shared else 0.2 < explained < 0.35


def test_ids_are_about_the_same_votes_as_counts_and_rankings() -> None:
    town = voices.drawn_town(voices.HELD_OUT + 12, answers=3, people=4)
    votes, known = voices.training_votes(town, 10), voices.with_ids(town, 10)
    train, test = votes.split()
    assert (len(train.prompts), len(test.prompts), len(train)) == (10, voices.HELD_OUT, 30)
    np.testing.assert_array_equal(np.bincount(known.pair, known.chose_a), votes.votes_a)
    assert votes.judgments is not None
    assert known.preferences.judgments is not None
    assert known.preferences.judgments.n_persons == known.n_raters < votes.judgments.n_persons == votes.judgments.n


def test_samples_with_evidence_are_those_whose_interval_is_above_zero() -> None:
    size = {"samples": 2, "prompts": 105, "people": 3, "answers": 4, "k": 2}
    (row,) = voices.one_camp(Namespace(angles=[0.0], decisiveness="groups", **size))
    assert (row["samples"], row["with evidence"] > 0) == (2, row["highest lower end"] > 0)
    assert abs(row["mean gain"]) < 0.1
