"""Choices on validation prompts: the target of joint members, and space and regularisation of stagewise ones."""

from typing import Any

import numpy as np
import pytest
from simulated import as_array

from pluralign import fit as fit_ensemble
from pluralign import town_hall
from pluralign.core.checkpoints import Checkpoints
from pluralign.experiments.demo import fit_features
from pluralign.learning import choose as stagewise_fit
from pluralign.learning.choose import Setting, StagePairs, choose_setting, settings
from pluralign.learning.options import FitOptions, Orient
from pluralign.learning.pairs import Pairs, hard_votes
from pluralign.learning.stagewise import orientation, stages
from pluralign.learning.task import FitTask, FitWatcher
from pluralign.theory.calibration import brier


def votes(n: int = 240, d: int = 40, seed: int = 0) -> Pairs:
    """Votes of three groups that read three of 40 features, the three with the largest spread."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((2 * n, d)) * np.where(np.arange(d) < 3, 3.0, 1.0)
    a, b = np.arange(n, dtype=np.int32), np.arange(n, 2 * n, dtype=np.int32)
    share = ((inputs[a] - inputs[b])[:, :3] > 0).mean(axis=1)
    return Pairs(inputs, a, b, rng.binomial(5, 0.1 + 0.8 * share) / 5, (np.arange(n) // 3).astype(np.int32))


def task(pairs: Pairs | None = None, **options: Any) -> FitTask:
    chosen = FitOptions(**{"method": "stagewise", "k": 3, **options})
    return FitTask(pairs or votes(), chosen, Checkpoints(None, {}), FitWatcher())


def everything(of: FitTask) -> StagePairs:
    return StagePairs(of, np.ones(len(of.train), dtype=bool))


# --- the choice of space and regularisation ---------------------------------------------------------------------------


def test_settings_have_no_more_directions_than_features() -> None:
    assert {setting.directions for setting in settings(404)} == {16, 32, 64, 128, None}
    assert {setting.directions for setting in settings(64)} == {16, 32, None}
    assert settings(16) == [Setting(None, l2) for l2 in stagewise_fit.L2_GRID]
    assert len({setting.name for setting in settings(404)}) == len(settings(404))


def test_chosen_setting_has_the_lowest_validation_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stagewise_fit, "L2_GRID", (1.0, 0.01))
    monkeypatch.setattr(stagewise_fit, "FULL_L2_GRID", (1.0,))
    fit = task()
    pairs, errors = fit.train, {}
    sign = orientation(pairs.prob_a, "random", 0)
    d, p = as_array(pairs.difference) * sign[:, None], np.where(sign > 0, pairs.prob_a, 1 - pairs.prob_a)
    for setting in settings(40):
        errors[setting] = 0.0
        for fold in fit.folds[:2]:
            values, vectors = np.linalg.eigh(d[~fold].T @ d[~fold])
            axes = np.eye(40) if setting.directions is None else vectors[:, np.argsort(-values)[: setting.directions]]
            *_, last = stages(d[~fold] @ axes, p[~fold], 3, l2=setting.l2, bound=fit.bound)
            errors[setting] += brier(hard_votes(d[fold] @ axes, last.theta) @ last.weights, p[fold]) / 2
    chosen = choose_setting(fit)
    assert errors[chosen] <= min(errors.values()) + 1e-3, "rounding can change a vote"
    assert max(errors.values()) > min(errors.values()) + 5e-3


def test_members_stay_in_the_leading_directions() -> None:
    of = everything(task())
    *_, reduced = of.members(Setting(16, 0.1), 3, 1.0)
    d = as_array(of.difference)
    _, vectors = np.linalg.eigh(d.T @ d)
    rest = reduced.theta - vectors[:, -16:] @ (vectors[:, -16:].T @ reduced.theta)
    assert np.abs(rest).max() < 1e-9 * np.abs(reduced.theta).max()
    *_, full = of.members(Setting(None, 0.1), 3, 1.0)
    *_, plain = stages(d, of.prob_a, 3, l2=0.1)
    np.testing.assert_allclose(full.theta, plain.theta)
    np.testing.assert_allclose(full.weights, plain.weights)


def test_stages_of_a_checkpoint_equal_those_without(tmp_path: Any) -> None:
    pairs = votes()
    options = FitOptions(method="stagewise", k=3)
    kept = everything(FitTask(pairs, options, Checkpoints(tmp_path, {"run": 1}), FitWatcher()))
    setting = Setting(16, 0.1)
    fresh, stored, again = (list(kept.members(setting, 3, 0.45, name)) for name in (None, "stage", "stage"))
    for one, two, three in zip(fresh, stored, again, strict=True):
        np.testing.assert_allclose(two.theta, one.theta, atol=1e-6)
        np.testing.assert_array_equal(three.theta, two.theta)
        np.testing.assert_allclose(two.weights, one.weights, atol=1e-6)


# --- the order of the two responses -----------------------------------------------------------------------------------


def test_orientation_follows_its_option() -> None:
    prob_a = np.random.default_rng(0).integers(0, 5, 2000) / 4
    assert (orientation(prob_a, "given") == 1).all()
    majority = orientation(prob_a, "majority")
    assert (np.where(majority > 0, prob_a, 1 - prob_a) >= 0.5).all()
    assert (majority[prob_a == 0.5] == 1).all()
    at_random = orientation(prob_a, "random", 3)
    assert set(np.unique(at_random)) == {-1.0, 1.0}
    assert abs(at_random.mean()) < 0.1
    assert abs(np.corrcoef(at_random, prob_a)[0, 1]) < 0.1
    np.testing.assert_array_equal(at_random, orientation(prob_a, "random", 3))
    assert (at_random != orientation(prob_a, "random", 4)).any()


@pytest.mark.parametrize("orient", ["random", "given", "majority"])
def test_swapped_pairs_have_the_opposite_difference_and_share(orient: Orient) -> None:
    fit = task(orient=orient)
    of, sign = everything(fit), orientation(fit.train.prob_a, orient, 0)
    for i in range(len(fit.train)):
        first, second = (fit.train.a[i], fit.train.b[i]) if sign[i] > 0 else (fit.train.b[i], fit.train.a[i])
        np.testing.assert_array_equal(as_array(of.difference)[i], fit.train.inputs[first] - fit.train.inputs[second])
        assert of.prob_a[i] == pytest.approx(fit.train.prob_a[i] if sign[i] > 0 else 1 - fit.train.prob_a[i])
    fold = StagePairs(fit, ~fit.folds[0])
    np.testing.assert_array_equal(fold.sign, of.sign[~fit.folds[0]])


@pytest.mark.parametrize("variant", ["printed", "symmetric"])
def test_only_the_printed_variant_depends_on_the_order(variant: str) -> None:
    members = {}
    for orient in ("random", "given", "majority"):
        *_, members[orient] = everything(task(variant=variant, orient=orient)).members(Setting(16, 0.1), 3, 1.0)
    for orient in ("given", "majority"):
        gap = np.abs(members[orient].theta - members["random"].theta).max()
        assert gap > 0.01 if variant == "printed" else gap < 1e-3


# --- the target of joint members -------------------------------------------------------------------------------------


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
    chosen = fit_ensemble(town.preferences, k=8, encoder="hashing:256")
    assert chosen.record.target in ("teacher", "mixture")
    rows = town.preferences.test_mask(0.1)
    votes = fit_ensemble(town.preferences, k=8, encoder="hashing:256", target="votes")
    truth = town.true_prob[rows]
    test = town.preferences[rows]
    assert brier(chosen.prob_hat(test), truth) < 0.9 * brier(votes.prob_hat(test), truth)


def test_no_undecided_gives_the_form_of_the_paper() -> None:
    town = town_hall(400).preferences
    ensemble = fit_ensemble(town, k=2, encoder="none", undecided=False)
    assert ensemble.undecided == 0
    assert all(row.undecided == 0 for row in ensemble.record.history)
    votes = ensemble.votes(town)
    np.testing.assert_allclose(ensemble.prob_hat(town), votes @ ensemble.weights, atol=1e-12)


def test_the_figures_of_every_size_include_its_undecided_share() -> None:
    town = town_hall(400).preferences
    ensemble = fit_ensemble(town, k=2, encoder="none", test_fraction=0.3)
    last = ensemble.record.history[-1]
    assert last.undecided == ensemble.undecided > 0
    test = town[town.test_mask(0.3)]
    assert last.test_brier == pytest.approx(brier(ensemble.prob_hat(test), test.prob_a), abs=1e-6)
