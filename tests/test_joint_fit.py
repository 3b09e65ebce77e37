"""What joint members learn from: the choice on validation prompts, where the right one is known."""

import numpy as np
import pytest

from pluralign import fit, town_hall
from pluralign.experiments.demo import fit_features
from pluralign.theory.calibration import brier


@pytest.mark.slow
def test_votes_are_chosen_where_features_show_what_divides_people() -> None:
    """The true features of the town hall: members learned from votes are closer to the town than any single reward."""
    town = town_hall(5000)
    ensemble, held_out = fit_features(town.preferences, town.features, k=8)
    assert (ensemble.record.target, ensemble.record.vote_share) == ("votes", 1.0)
    truth = town.true_prob[town.preferences.test_mask(0.1)]
    error = brier(ensemble.readings(held_out.difference)["vote"], truth)
    taught, taught_votes = fit_features(town.preferences, town.features, k=8, target="teacher")
    assert error < 0.8 * brier(taught.readings(taught_votes.difference)["vote"], truth)
    assert ensemble.undecided < 0.15 < taught.undecided


@pytest.mark.slow
def test_a_teacher_is_chosen_where_features_are_weak() -> None:
    """Hashed words and few votes: members that learn from votes alone memorise noise."""
    town = town_hall(1000)
    chosen = fit(town.preferences, k=8, encoder="hashing:256")
    assert chosen.record.target in ("teacher", "mixture")
    rows = town.preferences.test_mask(0.1)
    votes = fit(town.preferences, k=8, encoder="hashing:256", target="votes")
    truth = town.true_prob[rows]
    test = town.preferences[rows]
    assert brier(chosen.prob_hat(test), truth) < 0.9 * brier(votes.prob_hat(test), truth)


def test_no_undecided_gives_the_form_of_the_paper() -> None:
    town = town_hall(400).preferences
    ensemble = fit(town, k=2, encoder="none", undecided=False)
    assert ensemble.undecided == 0
    assert all(row.undecided == 0 for row in ensemble.record.history)
    votes = ensemble.votes(town)
    np.testing.assert_allclose(ensemble.prob_hat(town), votes @ ensemble.weights, atol=1e-12)


def test_the_figures_of_every_size_include_its_undecided_share() -> None:
    town = town_hall(400).preferences
    ensemble = fit(town, k=2, encoder="none", test_fraction=0.3)
    last = ensemble.record.history[-1]
    assert last.undecided == ensemble.undecided > 0
    test = town[town.test_mask(0.3)]
    assert last.test_brier == pytest.approx(brier(ensemble.prob_hat(test), test.prob_a), abs=1e-6)
