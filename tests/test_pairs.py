"""The matrix of differences made in blocks is the matrix held whole, in every product and in every fit."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluralign.core import distributed
from pluralign.ensemble.members import FeatureMap, fit_feature_map
from pluralign.training import pairs as module
from pluralign.training.baselines import fit_baselines
from pluralign.training.bradley_terry import fit_bradley_terry, principal_directions
from pluralign.training.joint import fit_joint
from pluralign.training.pairs import (
    Differences,
    Pairs,
    as_array,
    differences,
    gram,
    row_squares,
    scale_rows,
    validation_folds,
)
from pluralign.training.policy_level import fit_policy_level
from pluralign.training.stagewise import stages
from pluralign.training.teacher import fit_teacher


def some_pairs(n: int = 700, d: int = 6, seed: int = 0) -> Pairs:
    """Votes of two kinds of people on texts that several pairs share."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((n // 2, d)).astype(np.float32)
    a, b = rng.integers(len(inputs), size=(2, n)).astype(np.int32)
    d_true = inputs[a] - inputs[b]
    prob = 0.6 / (1 + np.exp(-2 * d_true[:, 0])) + 0.4 / (1 + np.exp(-2 * d_true[:, 1]))
    return Pairs(inputs, a, b, rng.binomial(9, prob) / 9, np.arange(n, dtype=np.int32) // 4)


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold no matrix whole, and make each in many blocks."""
    monkeypatch.setattr(module, "DENSE_ELEMENTS", 0)
    monkeypatch.setattr(distributed, "BLOCK_ROWS", 64)


@given(st.integers(1, 200), st.integers(1, 5), st.integers(0, 2**32 - 1), st.booleans())
def test_every_product_is_that_of_the_whole_matrix(n: int, d: int, seed: int, scaled: bool) -> None:
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((20, d))
    a, b = rng.integers(20, size=(2, n)).astype(np.int32)
    lazy = Differences(inputs, a, b, rng.random(n) if scaled else None)
    whole = (inputs[a] - inputs[b]) * (1 if lazy.scale is None else lazy.scale[:, None])
    theta, many, weight = rng.standard_normal(d), rng.standard_normal((d, 3)), rng.random(n)
    factor = rng.random(n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "BLOCK_ROWS", 7)
        np.testing.assert_allclose(as_array(lazy), whole, atol=1e-12)
        np.testing.assert_allclose(lazy @ theta, whole @ theta, atol=1e-12)
        np.testing.assert_allclose(lazy @ many, whole @ many, atol=1e-12)
        np.testing.assert_allclose(weight @ lazy, weight @ whole, atol=1e-11)
        np.testing.assert_allclose(row_squares(lazy), (whole**2).sum(axis=1), atol=1e-11)
        for matrix in (lazy, whole):
            np.testing.assert_allclose(gram(matrix, weight), (whole.T * weight) @ whole / n, atol=1e-11)
            rescaled = as_array(scale_rows(matrix, factor))
            np.testing.assert_allclose(rescaled, whole * factor[:, None], atol=1e-12)
    assert lazy.shape == whole.shape


def test_a_small_matrix_is_held_whole_and_a_large_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = some_pairs(40)
    assert isinstance(pairs.difference, np.ndarray)
    monkeypatch.setattr(module, "DENSE_ELEMENTS", 40 * 6 - 1)
    assert isinstance(differences(pairs.inputs, pairs.a, pairs.b), Differences)


def fits(pairs: Pairs) -> dict[str, np.ndarray]:
    """Return what every learner makes of the pairs."""
    folds = validation_folds(pairs.prompt, 0)
    teacher = fit_teacher(pairs, folds)
    joint = fit_joint(pairs, teacher, 3, bound=0.5, restarts=1)
    policy = fit_policy_level(pairs, 2, folds, l2=teacher.l2)
    *_, last = stages(pairs.difference, pairs.prob_a, 3, l2=0.01)
    found = {
        "newton": fit_bradley_terry(pairs.difference, pairs.prob_a, 0.01),
        "teacher": teacher.theta,
        "joint": joint.theta @ joint.weights,
        "joint weights": joint.weights,
        "policy": policy.theta @ policy.weights,
        "stagewise": last.theta @ last.weights,
    }
    for name, baseline in fit_baselines(pairs, folds, 2).items():
        found[name] = baseline.prob_hat(Differences(pairs.inputs, pairs.a, pairs.b))
    return found


def test_every_fit_in_blocks_is_the_fit_in_memory(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pairs = some_pairs()
    expected = fits(pairs)
    mapped = np.memmap(tmp_path / "inputs", dtype=np.float32, mode="w+", shape=pairs.inputs.shape)
    mapped[:] = pairs.inputs
    request.getfixturevalue("in_blocks")
    on_disk = Pairs(mapped, pairs.a, pairs.b, pairs.prob_a, pairs.prompt)
    assert isinstance(on_disk.difference, Differences)
    for name, found in fits(on_disk).items():
        np.testing.assert_allclose(found, expected[name], rtol=2e-3, atol=2e-3, err_msg=name)


@pytest.mark.usefixtures("in_blocks")
def test_principal_directions_in_blocks_are_those_of_the_covariance() -> None:
    pairs = some_pairs()
    whole = as_array(pairs.difference).astype(np.float64)
    _, vectors = np.linalg.eigh(whole.T @ whole)
    found = principal_directions(pairs.difference, 2)
    np.testing.assert_allclose(np.abs(found.T @ vectors[:, ::-1][:, :2]), np.eye(2), atol=1e-3)


def test_features_scaled_in_blocks_are_those_scaled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((500, 4)).astype(np.float32) * [1, 2, 3, 0] + 5
    used = rng.random(500) < 0.7
    monkeypatch.setattr(distributed, "BLOCK_ROWS", 13)
    scaling = fit_feature_map(features, 1, used)
    np.testing.assert_allclose(scaling.mean, features[used].mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(scaling.spread[:3], features[used].std(axis=0)[:3], rtol=1e-5)
    layer = rng.standard_normal((4, 3)).astype(np.float32)
    network = FeatureMap(scaling.mean, scaling.spread, scaling.gain, layer, np.ones(3, dtype=np.float32))
    in_blocks = network(features)
    monkeypatch.setattr(distributed, "BLOCK_ROWS", 1000)
    np.testing.assert_allclose(in_blocks, network(features), rtol=1e-5, atol=1e-6)
    assert in_blocks.shape == (500, 7)
    assert in_blocks.dtype == np.float32
