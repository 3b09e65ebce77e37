"""Pairs: products and fits in blocks equal those in memory; rows, validation folds, and the cap on disagreement."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from simulated import as_array, random_pairs

from pluralign.core import processes
from pluralign.core.errors import DataError
from pluralign.learning import pairs as module
from pluralign.learning.baselines import fit_baselines
from pluralign.learning.bradley_terry import fit_bradley_terry, fit_teacher, principal_directions
from pluralign.learning.joint import FROM_MIXTURE, train_joint
from pluralign.learning.pairs import Differences, Pairs, cap_disagreement, hard_votes, validation_folds
from pluralign.learning.policy_level import PolicyOptions, train_policy_level
from pluralign.learning.stagewise import stages
from pluralign.theory.calibration import disagreement


def pairs_of_two_groups(n: int = 700, d: int = 6, seed: int = 0) -> Pairs:
    """Votes of two groups of people on texts that several pairs share."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((n // 2, d)).astype(np.float32)
    a, b = rng.integers(len(inputs), size=(2, n)).astype(np.int32)
    d_true = inputs[a] - inputs[b]
    prob = 0.6 / (1 + np.exp(-2 * d_true[:, 0])) + 0.4 / (1 + np.exp(-2 * d_true[:, 1]))
    return Pairs(inputs, a, b, rng.binomial(9, prob) / 9, np.arange(n, dtype=np.int32) // 4)


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute every matrix in many blocks."""
    monkeypatch.setattr(module, "DENSE_ELEMENTS", 0)
    monkeypatch.setattr(processes, "BLOCK_ROWS", 64)


@given(st.integers(1, 200), st.integers(1, 5), st.integers(0, 2**32 - 1), st.booleans())
def test_products_in_blocks_equal_those_of_the_whole_matrix(n: int, d: int, seed: int, scaled: bool) -> None:
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((20, d))
    a, b = rng.integers(20, size=(2, n)).astype(np.int32)
    lazy = Differences(inputs, a, b, rng.random(n) if scaled else None)
    whole = (inputs[a] - inputs[b]) * (1 if lazy.scale is None else lazy.scale[:, None])
    theta, many, weight = rng.standard_normal(d), rng.standard_normal((d, 3)), rng.random(n)
    factor = rng.random(n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "BLOCK_ROWS", 7)
        np.testing.assert_allclose(as_array(lazy), whole, atol=1e-12)
        np.testing.assert_allclose(lazy @ theta, whole @ theta, atol=1e-12)
        np.testing.assert_allclose(lazy @ many, whole @ many, atol=1e-12)
        np.testing.assert_allclose(weight @ lazy, weight @ whole, atol=1e-11)
        np.testing.assert_allclose(module.row_squares(lazy), (whole**2).sum(axis=1), atol=1e-11)
        for matrix in (lazy, whole):
            np.testing.assert_allclose(module.gram(matrix, weight), (whole.T * weight) @ whole / n, atol=1e-11)
            rescaled = as_array(module.scale_rows(matrix, factor))
            np.testing.assert_allclose(rescaled, whole * factor[:, None], atol=1e-12)
    assert lazy.shape == whole.shape


def test_only_small_matrices_are_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = pairs_of_two_groups(40)
    assert isinstance(pairs.difference, np.ndarray)
    monkeypatch.setattr(module, "DENSE_ELEMENTS", 40 * 6 - 1)
    assert isinstance(replace(pairs).difference, Differences)


def fits(pairs: Pairs) -> dict[str, np.ndarray]:
    """Return the result of every fit."""
    folds = validation_folds(pairs.prompt, 0)
    teacher = fit_teacher(pairs, folds)
    joint = train_joint(pairs, teacher, 3, FROM_MIXTURE, bound=0.5, starts=1)
    policy = train_policy_level(pairs, teacher, 2, PolicyOptions(0.3, 0.03))
    *_, last = stages(pairs.difference, pairs.prob_a, 3, l2=0.01)
    results = {
        name: found.theta @ found.weights for name, found in (("joint", joint), ("policy", policy), ("last", last))
    }
    results |= {"newton": fit_bradley_terry(pairs.difference, pairs.prob_a, 0.01), "teacher": teacher.theta}
    lazy = Differences(pairs.inputs, pairs.a, pairs.b)
    baselines = {name: baseline.prob_hat(lazy) for name, baseline in fit_baselines(pairs, folds, 2).items()}
    return {**results, "joint weights": joint.weights, **baselines}


def test_fits_in_blocks_equal_fits_in_memory(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pairs = pairs_of_two_groups()
    expected = fits(pairs)
    mapped = np.memmap(tmp_path / "inputs", dtype=np.float32, mode="w+", shape=pairs.inputs.shape)
    mapped[:] = pairs.inputs
    request.getfixturevalue("in_blocks")
    on_disk = Pairs(mapped, pairs.a, pairs.b, pairs.prob_a, pairs.prompt)
    assert isinstance(on_disk.difference, Differences)
    for name, result in fits(on_disk).items():
        np.testing.assert_allclose(result, expected[name], rtol=2e-3, atol=2e-3, err_msg=name)


@pytest.mark.usefixtures("in_blocks")
def test_principal_directions_in_blocks_equal_those_of_the_covariance() -> None:
    pairs = pairs_of_two_groups()
    whole = as_array(pairs.difference).astype(np.float64)
    _, vectors = np.linalg.eigh(whole.T @ whole)
    directions = principal_directions(pairs.difference, 2)
    np.testing.assert_allclose(np.abs(directions.T @ vectors[:, ::-1][:, :2]), np.eye(2), atol=1e-3)


# --- pairs and folds --------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000))
def test_indexing_selects_rows_and_a_constant_added_to_all_inputs_changes_nothing(seed: int) -> None:
    pairs, rows = random_pairs(seed), np.array([7, 3, 3])
    part = pairs[rows]
    assert part.inputs is pairs.inputs
    np.testing.assert_array_equal(as_array(part.difference), (pairs.inputs[pairs.a] - pairs.inputs[pairs.b])[rows])
    np.testing.assert_array_equal(part.prob_a, pairs.prob_a[rows])
    np.testing.assert_array_equal(part.prompt, pairs.prompt[rows])
    assert len(pairs[pairs.prob_a > 0.5]) == (pairs.prob_a > 0.5).sum()
    shifted = replace(pairs, inputs=pairs.inputs + np.linspace(-3, 3, 4))
    np.testing.assert_allclose(as_array(shifted.difference), as_array(pairs.difference), atol=1e-12)


@given(st.integers(2, 300), st.integers(0, 1000))
def test_folds_hold_a_fifth_of_the_prompts_each_and_are_disjoint(n_prompts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = np.concatenate([np.arange(n_prompts), rng.integers(0, n_prompts, 2 * n_prompts)]).astype(np.int32) * 3
    folds = validation_folds(prompt, seed)
    held_out = [set(prompt[fold].tolist()) for fold in folds]
    assert len(folds) == min(3 if n_prompts >= 200 else 5, n_prompts)
    assert all(n_prompts // 5 <= len(names) <= -(-n_prompts // 5) for names in held_out)
    assert sum(map(len, held_out)) == len(set().union(*held_out)), "no prompt is in two folds"
    for fold in folds:
        assert not set(prompt[fold].tolist()) & set(prompt[~fold].tolist()), "all pairs of a prompt are on one side"


def test_pairs_of_a_single_prompt_are_split_pair_by_pair_and_a_single_pair_is_a_data_error() -> None:
    assert np.sum(validation_folds(np.zeros(5, dtype=np.int32), 0), axis=0).tolist() == [1] * 5
    with pytest.raises(DataError, match="training needs two pairs, but there is one"):
        validation_folds(np.zeros(1, dtype=np.int32), 0)


# --- the cap on disagreement: members move towards the anchor just far enough ----------------------------------------


def first_feature_votes(n: int = 4000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nearly all people prefer the first feature, so disagreement grows evenly with the angle to it."""
    difference = np.random.default_rng(6).standard_normal((n, 2))
    return difference, np.where(difference[:, 0] > 0, 0.95, 0.05), np.array([1.0, 0.0])


def disagreement_of(theta: np.ndarray, difference: np.ndarray, prob_a: np.ndarray) -> float:
    return float(np.max(disagreement(hard_votes(difference, theta[:, None]), prob_a)))


# Not π itself: a member exactly opposite to the anchor cancels to rounding noise half-way.
@given(st.floats(0.3, np.pi - 1e-3), st.floats(0.08, 0.9), st.floats(0.01, 100), st.floats(0.01, 100))
def test_member_moves_no_further_than_needed(angle: float, bound: float, scale: float, anchor_scale: float) -> None:
    difference, prob_a, anchor = first_feature_votes()
    member = scale * np.array([np.cos(angle), np.sin(angle)])
    capped = cap_disagreement(member, anchor_scale * anchor, difference, prob_a, bound)
    before, after = (disagreement_of(theta, difference, prob_a) for theta in (member, capped))
    assert after <= bound + 1e-9
    if before <= bound:
        np.testing.assert_array_equal(capped, member, "a member under the bound does not change")
    else:
        assert after > bound - 0.01 or angle > np.pi - 0.01, "just under the bound, unless the anchor is opposite"
    unreachable = cap_disagreement(member, anchor_scale * anchor, difference, prob_a, bound=0.01)
    np.testing.assert_allclose(unreachable / np.linalg.norm(unreachable), anchor, atol=1e-9)


@given(st.integers(0, 10_000), st.sampled_from([0.3, 0.4, 0.48]))
def test_bound_holds_wherever_the_anchor_meets_it(seed: int, bound: float) -> None:
    rng = np.random.default_rng(seed)
    difference, rewards = rng.standard_normal((100, 5)), rng.standard_normal((5, 7)) + rng.standard_normal((5, 1))
    prob_a = (difference @ rewards > 0).mean(axis=1)
    anchor, member = fit_bradley_terry(difference, prob_a, 0.1), rng.standard_normal(5)
    capped = cap_disagreement(member, anchor, difference, prob_a, bound)
    assert disagreement_of(capped, difference, prob_a) <= max(bound, disagreement_of(anchor, difference, prob_a)) + 1e-9


def test_margin_shrinks_with_more_prompts_and_1_sets_no_bound() -> None:
    bounds = [module.training_bound(0.5, n) for n in (20, 100, 1000, 100_000)]
    assert all(low < high for low, high in itertools.pairwise(bounds))
    assert 0.4 < bounds[0] < bounds[-1] < 0.5
    assert module.training_bound(0.4, 100) == pytest.approx(module.training_bound(0.5, 100) - 0.1)
    assert module.training_bound(1.0, 20) == 1.0
