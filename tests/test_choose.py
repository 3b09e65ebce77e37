"""Choices on validation prompts (targets, space, regularisation), and the leading directions of wide features."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_modules import benchmark
from simulated import as_array

from pluralign import RewardEnsemble, fit, town_hall
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.types import Level
from pluralign.ensemble.members import fit_feature_map
from pluralign.ensemble.verdict import headline
from pluralign.learning import choose, frozen, joint
from pluralign.learning.choose import Setting, StagePairs, choose_setting, settings
from pluralign.learning.frozen import leading_axes
from pluralign.learning.options import FitOptions, Orient
from pluralign.learning.pairs import Pairs, hard_votes
from pluralign.learning.stagewise import orientation, stages
from pluralign.learning.task import FitTask, FitWatcher
from pluralign.text.surface import NAMES
from pluralign.theory.calibration import brier
from pluralign.votes.preferences import texts_of


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
    assert settings(16) == [Setting(None, l2) for l2 in choose.L2_GRID]
    assert len({setting.name for setting in settings(404)}) == len(settings(404))


def test_validation_prompts_do_not_depend_on_the_seed() -> None:
    one, other = (task(seed=seed).folds for seed in (0, 1))
    np.testing.assert_array_equal(one, other)


def test_chosen_setting_has_the_lowest_validation_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "L2_GRID", (1.0, 0.01))
    monkeypatch.setattr(choose, "FULL_L2_GRID", (1.0,))
    given = task()
    pairs, errors = given.train, {}
    sign = orientation(pairs.prob_a, "random", 0)
    d, p = as_array(pairs.difference) * sign[:, None], np.where(sign > 0, pairs.prob_a, 1 - pairs.prob_a)
    for setting in settings(40):
        errors[setting] = 0.0
        for fold in given.folds[:2]:
            values, vectors = np.linalg.eigh(d[~fold].T @ d[~fold])
            axes = np.eye(40) if setting.directions is None else vectors[:, np.argsort(-values)[: setting.directions]]
            *_, last = stages(d[~fold] @ axes, p[~fold], 3, l2=setting.l2, bound=given.bound)
            errors[setting] += brier(hard_votes(d[fold] @ axes, last.theta) @ last.weights, p[fold]) / 2
    chosen = choose_setting(given)
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
    assert max(abs(at_random.mean()), abs(np.corrcoef(at_random, prob_a)[0, 1])) < 0.1
    np.testing.assert_array_equal(at_random, orientation(prob_a, "random", 3))
    assert (at_random != orientation(prob_a, "random", 4)).any()


@pytest.mark.parametrize("orient", ["random", "given", "majority"])
def test_swapped_pairs_have_the_opposite_difference_and_share(orient: Orient) -> None:
    given = task(orient=orient)
    of, sign = everything(given), orientation(given.train.prob_a, orient, 0)
    for i in range(len(given.train)):
        first, second = (given.train.a[i], given.train.b[i]) if sign[i] > 0 else (given.train.b[i], given.train.a[i])
        np.testing.assert_array_equal(
            as_array(of.difference)[i], given.train.inputs[first] - given.train.inputs[second]
        )
        assert of.prob_a[i] == pytest.approx(given.train.prob_a[i] if sign[i] > 0 else 1 - given.train.prob_a[i])
    fold = StagePairs(given, ~given.folds[0])
    np.testing.assert_array_equal(fold.sign, of.sign[~given.folds[0]])


# --- the target of joint members -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_votes_are_chosen_where_features_show_what_divides_people() -> None:
    """The true features of the town hall: members learned from votes are closer to the town than any single reward."""
    town = town_hall(5000)
    ensemble, held_out = benchmark("true_features").fit_features(town.preferences, town.features, k=8)
    assert (ensemble.record.target, ensemble.record.vote_share) == ("votes", 1.0)
    truth = town.true_prob[town.preferences.test_mask(0.1)]
    error = brier(ensemble.readings(held_out.difference)["vote"], truth)
    taught, taught_votes = benchmark("true_features").fit_features(
        town.preferences, town.features, k=8, target="teacher"
    )
    assert error < 0.8 * brier(taught.readings(taught_votes.difference)["vote"], truth)
    assert ensemble.undecided < 0.2 < taught.undecided


@pytest.mark.slow
def test_a_teacher_is_chosen_where_features_are_weak() -> None:
    """Hashed words and few votes: members that learn from votes alone memorise noise."""
    town = town_hall(1000)
    chosen = fit(town.preferences, k=8, encoder="hashing:256")
    assert chosen.record.target in ("teacher", "mixture")
    rows = town.preferences.test_mask(0.1)
    votes = fit(town.preferences, k=8, encoder="hashing:256", target="votes")
    truth, test = town.true_prob[rows], town.preferences[rows]
    assert brier(chosen.prob_hat(test), truth) < 0.9 * brier(votes.prob_hat(test), truth)


@pytest.mark.parametrize("undecided", [True, False])
def test_the_figures_of_every_size_include_its_undecided_share(undecided: bool) -> None:
    """Without one, the ensemble has the form of the paper."""
    town = town_hall(400).preferences
    ensemble = fit(town, k=2, encoder="none", test_fraction=0.3, undecided=undecided)
    history = ensemble.record.history
    assert (ensemble.undecided > 0) == undecided == any(row.undecided for row in history)
    test, u = town[town.test_mask(0.3)], ensemble.undecided
    share = ensemble.prob_hat(test)
    np.testing.assert_allclose(share, u / 2 + (1 - u) * (ensemble.votes(test) @ ensemble.weights), atol=1e-12)
    assert history[-1].undecided == u
    assert history[-1].test_brier == pytest.approx(brier(share, test.prob_a), abs=1e-6)


# --- leading directions of wide features, against an eigendecomposition of all differences --------------------------


def test_axes_hold_the_largest_variance_of_a_sample_of_the_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    features = (rng.standard_normal((80, 9)) @ rng.standard_normal((9, 9))).astype(np.float32)
    a, b = rng.integers(80, size=(2, 300))
    inputs = fit_feature_map(features, 2)
    axes = leading_axes(inputs, features, a, b, m=4)
    difference = (inputs(features)[a] - inputs(features)[b]).astype(float)
    largest = np.linalg.svd(difference, compute_uv=False) ** 2
    np.testing.assert_allclose(axes.T @ axes, np.eye(4), atol=1e-5)
    np.testing.assert_allclose(np.sum((difference @ axes) ** 2, axis=0), largest[:4], rtol=1e-4)
    monkeypatch.setattr(frozen, "SAMPLE", 80)
    np.testing.assert_array_equal(
        leading_axes(inputs, features, a, b, 4), leading_axes(inputs, features, a[::4], b[::4], 4)
    )


def test_a_fit_on_wide_features_is_projected_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "STEPS", 20)
    monkeypatch.setattr(frozen, "LEADING", 40)
    monkeypatch.setattr(frozen, "WIDE", 60)
    votes = town_hall(200).preferences
    ensemble = fit(votes, k=2, encoder="hashing:64", folder=tmp_path / "wide")
    inputs = ensemble.members.inputs
    assert inputs.axes is not None
    assert inputs.axes.shape == (64 + len(NAMES), 40)
    assert ensemble.members.theta.shape == (inputs.dimension, 2)
    texts = texts_of(votes)[:9]
    np.testing.assert_array_equal(RewardEnsemble.load(tmp_path / "wide").rewards(texts), ensemble.rewards(texts))
    monkeypatch.setattr(frozen, "WIDE", 64 + len(NAMES))
    assert fit(votes, k=2, encoder="hashing:64").members.inputs.axes is None, "not wide: all columns are kept"


@pytest.mark.parametrize("level", ["vote", "policy"])
def test_the_spread_over_seeds_is_that_of_five_fits(level: Level) -> None:
    votes = town_hall(240).preferences
    votes = replace(votes, columns={"split": np.where(votes.test_mask(0.3), "test", "train")})
    fits = [fit(votes, k=2, encoder="none", level=level, seed=seed) for seed in range(5 if level == "vote" else 1)]
    errors = [one.record.evaluation.test.brier for one in fits if one.record.evaluation]
    spread, evaluation = fits[0].record.seed_spread, fits[0].record.evaluation
    assert spread is not None
    assert evaluation is not None
    if level == "vote":
        assert spread == pytest.approx(np.std(errors, ddof=1))
    assert f"±{spread:.4f} over random seeds" in headline(evaluation, fits[0].record).main
    assert fits[0].record.to_json()["seed_spread"] == spread > 0


@pytest.mark.parametrize("options", [{"k": 1}, {"k": 2, "method": "stagewise"}], ids=str)
def test_without_random_starts_there_is_no_spread_over_seeds(options: dict[str, Any]) -> None:
    record = fit(town_hall(240).preferences, encoder="none", **options).record
    assert record.seed_spread is None
    assert record.evaluation is not None
    assert "random seeds" not in headline(record.evaluation, record).main
