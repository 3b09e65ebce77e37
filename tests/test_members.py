"""Members: scaled features, and rewards that are linear in them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pluralign.core import processes as distributed
from pluralign.ensemble.members import CLIP, SURFACE_GAIN, LinearMembers, fit_feature_map
from pluralign.theory.calibration import votes_from_rewards


def some_features(seed: int = 0, n: int = 200, d: int = 6) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, d)) * np.geomspace(0.01, 100, d) + np.linspace(-50, 50, d)).astype(np.float32)


def some_members(seed: int = 0, k: int = 4) -> LinearMembers:
    return LinearMembers(fit_feature_map(some_features(), 2), np.random.default_rng(seed).standard_normal((6, k)))


def test_mapped_features_have_mean_zero_and_unit_spread_times_the_surface_gain() -> None:
    features = some_features()
    inputs = fit_feature_map(features, n_surface=2)(features)
    assert inputs.dtype == np.float32
    np.testing.assert_allclose(inputs.mean(axis=0), 0, atol=1e-3 * SURFACE_GAIN)
    np.testing.assert_allclose(inputs.std(axis=0), [1, 1, 1, 1, SURFACE_GAIN, SURFACE_GAIN], rtol=1e-3)
    np.testing.assert_allclose(fit_feature_map(features, n_surface=0)(features).std(axis=0), 1, rtol=1e-3)


@pytest.mark.parametrize("n_layers", [1, 4])
def test_the_total_variance_of_an_encoder_does_not_depend_on_the_number_of_its_layers(n_layers: int) -> None:
    one, surface = some_features(d=6), some_features(1, d=2)
    features = np.hstack([one] * n_layers + [surface])
    inputs = fit_feature_map(features, n_surface=2, n_layers=n_layers)(features)
    assert inputs[:, :-2].var(axis=0).sum() == pytest.approx(6, rel=1e-3)
    np.testing.assert_allclose(inputs[:, -2:].std(axis=0), SURFACE_GAIN, rtol=1e-3)


def test_axes_project_the_scaled_features() -> None:
    rng, features = np.random.default_rng(0), some_features()
    scaling = fit_feature_map(features, 2)
    axes = np.linalg.qr(rng.standard_normal((6, 4)))[0].astype(np.float32)
    projected = replace(scaling, axes=axes)
    np.testing.assert_allclose(projected(features), scaling(features).astype(float) @ axes, atol=1e-4)
    assert projected.dimension == 4
    members = LinearMembers(projected, rng.standard_normal((4, 2)))
    again = LinearMembers.from_arrays(dict(members.arrays()))
    np.testing.assert_array_equal(again.rewards(features), members.rewards(features))


def test_scaling_is_learned_from_the_features_it_was_fitted_to() -> None:
    features = some_features().astype(np.float64)
    other = fit_feature_map(features, 0)(features[:5] + 2 * features.std(axis=0))
    np.testing.assert_allclose(other, (features[:5] - features.mean(axis=0)) / features.std(axis=0) + 2, atol=1e-3)


def test_outliers_are_clipped() -> None:
    features = some_features()
    scaling = fit_feature_map(features, n_surface=1)
    odd = scaling(np.full((1, 6), 1e9, dtype=np.float32))[0]
    np.testing.assert_allclose(odd, [CLIP] * 5 + [CLIP * SURFACE_GAIN])
    np.testing.assert_allclose(scaling(np.full((1, 6), -1e9, dtype=np.float32))[0], -odd)


@pytest.mark.parametrize("n_surface", [0, 3])
def test_a_feature_constant_in_training_is_ignored_elsewhere(n_surface: int) -> None:
    features = some_features()
    features[:, [1, 5]] = 7.0
    scaling = fit_feature_map(features, n_surface)
    features[:, [1, 5]] = np.random.default_rng(0).standard_normal((200, 2))
    inputs = scaling(features)
    assert (inputs[:, [1, 5]] == 0).all()
    assert (inputs[:, [0, 2, 3, 4]].std(axis=0) > 0.9).all()


@given(st.integers(0, 1000), st.floats(-100, 100))
def test_a_constant_added_to_a_reward_changes_no_vote(seed: int, constant: float) -> None:
    rewards = some_members(seed).rewards(some_features(4, n=40))
    votes = votes_from_rewards(rewards[:20], rewards[20:])
    np.testing.assert_array_equal(votes_from_rewards(rewards[:20] + constant, rewards[20:] + constant), votes)


def test_scaling_in_blocks_equals_scaling_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((500, 4)).astype(np.float32) * [1, 2, 3, 0] + 5
    used = rng.random(500) < 0.7
    monkeypatch.setattr(distributed, "BLOCK_ROWS", 13)
    scaling = fit_feature_map(features, 1, used)
    np.testing.assert_allclose(scaling.mean, features[used].mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(scaling.spread[:3], features[used].std(axis=0)[:3], rtol=1e-5)
    projected = replace(scaling, axes=rng.standard_normal((4, 3)).astype(np.float32))
    in_blocks = projected(features)
    monkeypatch.setattr(distributed, "BLOCK_ROWS", 1000)
    np.testing.assert_allclose(in_blocks, projected(features), rtol=1e-5, atol=1e-6)
    assert in_blocks.shape == (500, 3)
    assert in_blocks.dtype == np.float32
