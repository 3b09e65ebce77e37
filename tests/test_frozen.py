"""Features of a fit: leading directions of wide ones, against an eigendecomposition of all differences."""

from pathlib import Path

import numpy as np
import pytest

from pluralign import RewardEnsemble, fit
from pluralign.ensemble.members import fit_feature_map
from pluralign.learning import frozen, joint
from pluralign.learning.frozen import leading_axes
from pluralign.text.surface import NAMES
from pluralign.votes.preferences import texts_of
from pluralign.votes.town_hall.town_hall import town_hall


def test_axes_hold_the_largest_variance_of_the_differences() -> None:
    rng = np.random.default_rng(0)
    features = (rng.standard_normal((80, 9)) @ rng.standard_normal((9, 9))).astype(np.float32)
    a, b = rng.integers(80, size=(2, 300))
    inputs = fit_feature_map(features, 2)
    axes = leading_axes(inputs, features, a, b, m=4)
    difference = (inputs(features)[a] - inputs(features)[b]).astype(float)
    largest = np.linalg.svd(difference, compute_uv=False) ** 2
    np.testing.assert_allclose(axes.T @ axes, np.eye(4), atol=1e-5)
    np.testing.assert_allclose(np.sum((difference @ axes) ** 2, axis=0), largest[:4], rtol=1e-4)


def test_a_sample_of_the_pairs_determines_the_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    features = rng.standard_normal((50, 5)).astype(np.float32)
    a, b = rng.integers(50, size=(2, 200))
    inputs = fit_feature_map(features, 0)
    monkeypatch.setattr(frozen, "SAMPLE", 60)
    np.testing.assert_array_equal(
        leading_axes(inputs, features, a, b, 3), leading_axes(inputs, features, a[::4], b[::4], 3)
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
