"""What rewards are made of: scaled features, members, a hidden layer, pairs and folds; and keeping near people."""

import functools
import io
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluralign.core.errors import DataError
from pluralign.ensemble.members import CLIP, SURFACE_GAIN, FeatureMap, LinearMembers, fit_feature_map
from pluralign.theory.calibration import disagreement, votes_from_rewards
from pluralign.training.bradley_terry import bradley_terry_loss, fit_bradley_terry
from pluralign.training.hidden_layer import fit_hidden_layer, network_loss, unpack
from pluralign.training.member_bounds import cap_disagreement, training_bound
from pluralign.training.pairs import Pairs, as_array, validation_folds
from pluralign.training.stagewise import hard_votes, solve_weights

# --- features and members ---------------------------------------------------------------------------------------------


def some_features(seed: int = 0, n: int = 200, d: int = 6) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, d)) * np.geomspace(0.01, 100, d) + np.linspace(-50, 50, d)).astype(np.float32)


def some_members(seed: int = 0, k: int = 4, hidden: bool = False) -> LinearMembers:
    rng = np.random.default_rng(seed)
    inputs = fit_feature_map(some_features(), 2)
    if hidden:
        layer, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 3), (3,)))
        inputs = replace(inputs, hidden=layer, bias=bias)
    return LinearMembers(inputs, rng.standard_normal((9 if hidden else 6, k)))


def test_mapped_features_have_mean_zero_and_unit_spread_times_the_surface_gain() -> None:
    features = some_features()
    inputs = fit_feature_map(features, n_surface=2)(features)
    assert inputs.dtype == np.float32
    np.testing.assert_allclose(inputs.mean(axis=0), 0, atol=1e-3 * SURFACE_GAIN)
    np.testing.assert_allclose(inputs.std(axis=0), [1, 1, 1, 1, SURFACE_GAIN, SURFACE_GAIN], rtol=1e-3)
    np.testing.assert_allclose(fit_feature_map(features, n_surface=0)(features).std(axis=0), 1, rtol=1e-3)


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


def test_a_reward_is_linear_in_inputs_and_in_the_hidden_layer() -> None:
    members, features = some_members(hidden=True), some_features(1, n=10)
    inputs = replace(members.inputs, hidden=None, bias=None)(features).astype(float)
    hidden = np.tanh(inputs @ np.asarray(members.inputs.hidden) + np.asarray(members.inputs.bias))
    expected = inputs @ members.theta[:6] + hidden @ members.theta[6:]
    np.testing.assert_allclose(members.rewards(features), expected, atol=1e-4)
    assert members.rewards(features).shape == (10, members.n_members) == (10, 4)


@pytest.mark.parametrize("hidden", [False, True])
def test_members_round_trip_through_their_arrays(hidden: bool) -> None:
    members, features = some_members(hidden=hidden), some_features(2)
    file, arrays = io.BytesIO(), dict(members.arrays())
    np.savez(file, **arrays)  # type: ignore[arg-type]
    file.seek(0)
    with np.load(file) as stored:
        again = LinearMembers.from_arrays(dict(stored))
    np.testing.assert_array_equal(again.rewards(features), members.rewards(features))
    assert (again.inputs.hidden is not None) == hidden
    assert sorted(again.arrays()) == sorted(members.arrays())


@given(st.permutations(range(4)))
def test_taking_members_permutes_rewards(order: list[int]) -> None:
    members, features = some_members(), some_features(3, n=20)
    np.testing.assert_allclose(members.take(order).rewards(features), members.rewards(features)[:, order], atol=1e-9)
    assert members.take(order[:2]).n_members == 2


@given(st.integers(0, 1000), st.floats(-100, 100))
def test_a_constant_added_to_a_reward_changes_no_vote(seed: int, constant: float) -> None:
    rewards = some_members(seed).rewards(some_features(4, n=40))
    votes = votes_from_rewards(rewards[:20], rewards[20:])
    np.testing.assert_array_equal(votes_from_rewards(rewards[:20] + constant, rewards[20:] + constant), votes)


@given(st.integers(0, 1000))
def test_a_constant_added_to_all_inputs_changes_no_difference(seed: int) -> None:
    pairs = some_pairs(seed)
    shifted = replace(pairs, inputs=pairs.inputs + np.linspace(-3, 3, 4))
    np.testing.assert_allclose(as_array(shifted.difference), as_array(pairs.difference), atol=1e-12)
    theta = np.random.default_rng(seed).standard_normal((4, 3))
    np.testing.assert_array_equal(hard_votes(shifted.difference, theta), hard_votes(pairs.difference, theta))


@given(st.integers(0, 1000), st.integers(0, 3))
def test_a_duplicated_member_does_not_change_the_best_fit(seed: int, copied: int) -> None:
    pairs = some_pairs(seed)
    theta = np.random.default_rng(seed).standard_normal((4, 4))
    _, once = solve_weights(pairs.difference, theta, pairs.prob_a)
    weights, twice = solve_weights(pairs.difference, theta[:, [0, 1, 2, 3, copied]], pairs.prob_a)
    np.testing.assert_allclose(np.mean((twice - pairs.prob_a) ** 2), np.mean((once - pairs.prob_a) ** 2), atol=1e-7)
    assert weights[copied] == pytest.approx(weights[4], abs=1e-5), "the two share its weight"


# --- pairs and folds --------------------------------------------------------------------------------------------------


def some_pairs(seed: int, n: int = 50, d: int = 4, n_items: int = 30) -> Pairs:
    rng = np.random.default_rng(seed)
    a = rng.integers(0, n_items, n).astype(np.int32)
    b = ((a + rng.integers(1, n_items, n)) % n_items).astype(np.int32)
    inputs = rng.standard_normal((n_items, d))
    return Pairs(inputs, a, b, rng.integers(0, 6, n) / 5, rng.integers(0, 20, n).astype(np.int32))


def test_indexing_pairs_selects_rows_and_shares_inputs() -> None:
    pairs = some_pairs(0)
    rows = np.array([7, 3, 3])
    part = pairs[rows]
    assert len(part) == 3
    assert part.inputs is pairs.inputs
    np.testing.assert_array_equal(as_array(part.difference), as_array(pairs.difference)[rows])
    np.testing.assert_array_equal(part.prob_a, pairs.prob_a[rows])
    np.testing.assert_array_equal(part.prompt, pairs.prompt[rows])
    assert len(pairs[pairs.prob_a > 0.5]) == (pairs.prob_a > 0.5).sum()
    np.testing.assert_array_equal(as_array(pairs.difference)[0], pairs.inputs[pairs.a[0]] - pairs.inputs[pairs.b[0]])


@given(st.integers(2, 300), st.integers(0, 1000))
def test_folds_are_disjoint_fifths_of_the_prompts(n_prompts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = np.concatenate([np.arange(n_prompts), rng.integers(0, n_prompts, 2 * n_prompts)]).astype(np.int32) * 3
    folds = validation_folds(prompt, seed)
    held_out = [set(prompt[fold].tolist()) for fold in folds]
    assert len(folds) == min(3 if n_prompts >= 200 else 5, n_prompts)
    assert all(n_prompts // 5 <= len(names) <= -(-n_prompts // 5) for names in held_out)
    assert sum(map(len, held_out)) == len(set().union(*held_out)), "no prompt is in two folds"
    for fold in folds:
        assert not set(prompt[fold].tolist()) & set(prompt[~fold].tolist()), "a prompt is on one side"


def test_five_folds_cover_every_prompt() -> None:
    prompt = np.repeat(np.arange(40, dtype=np.int32), 2)
    assert np.sum(validation_folds(prompt, 0), axis=0).tolist() == [1] * 80


def test_folds_depend_only_on_the_seed() -> None:
    prompt = np.arange(100, dtype=np.int32)
    one, again, other = (np.array(validation_folds(prompt, seed)) for seed in (0, 0, 1))
    assert (one == again).all()
    assert (one != other).any()


@pytest.mark.parametrize("n_prompts", [2, 3, 7])
def test_folds_leave_training_pairs(n_prompts: int) -> None:
    for fold in validation_folds(np.repeat(np.arange(n_prompts, dtype=np.int32), 3), 0):
        assert fold.any()
        assert (~fold).any()


# --- a hidden layer ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.2]), st.integers(1, 3))
def test_the_network_gradient_matches_finite_differences(seed: int, l2: float, width: int) -> None:
    pairs, rng = some_pairs(seed, n=12, d=2, n_items=8), np.random.default_rng(seed)
    unknowns = rng.standard_normal(2 + 2 * width + width + width)
    u, layer, bias, v = unpack(unknowns, 2, width)
    loss = network_loss(pairs, width, l2)
    value, gradient = loss(unknowns)
    reward = [float(u @ x + v @ np.tanh(layer.T @ x + bias)) for x in pairs.inputs]
    entropy = 0.0
    for a, b, p in zip(pairs.a, pairs.b, pairs.prob_a, strict=True):
        chance = 1 / (1 + np.exp(reward[b] - reward[a]))
        entropy -= (p * np.log(chance) + (1 - p) * np.log(1 - chance)) / len(pairs)
    assert value == pytest.approx(entropy + l2 / 2 * ((u**2).sum() + (layer**2).sum() + (v**2).sum()), rel=1e-9)
    steps = 1e-6 * np.eye(len(unknowns))
    numeric = np.array([(loss(unknowns + step)[0] - loss(unknowns - step)[0]) / 2e-6 for step in steps])
    np.testing.assert_allclose(gradient, numeric, atol=1e-7)


@functools.cache
def bent() -> Pairs:
    """More of the first feature is better, but below the middle it is all the same: no linear reward says so."""
    pairs = some_pairs(5, n=600, d=3, n_items=400)
    liking = 3 * np.maximum(pairs.inputs[:, 0], 0)
    return replace(pairs, prob_a=1 / (1 + np.exp(liking[pairs.b] - liking[pairs.a])))


def test_a_hidden_layer_fits_a_nonlinear_reward() -> None:
    pairs = bent()
    layer, bias = fit_hidden_layer(pairs, width=8)
    assert (layer.shape, bias.shape) == ((3, 8), (8,))
    assert layer.dtype == bias.dtype == np.float32
    nothing, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    deep = replace(pairs, inputs=FeatureMap(nothing, one, one, layer, bias)(pairs.inputs))
    assert deep.inputs.shape[1] == 3 + 8

    def entropy(of: Pairs) -> float:
        theta = fit_bradley_terry(of.difference, of.prob_a, 1e-3)
        return bradley_terry_loss(theta, of.difference, of.prob_a, 0.0)

    least = -float(np.mean(pairs.prob_a * np.log(pairs.prob_a) + (1 - pairs.prob_a) * np.log(1 - pairs.prob_a)))
    assert entropy(deep) - least < 0.3 * (entropy(pairs) - least)


def test_the_hidden_layer_depends_only_on_the_seed() -> None:
    (one, _), (again, _), (other, _) = (fit_hidden_layer(bent(), seed=seed, width=4) for seed in (0, 0, 1))
    assert one.tobytes() == again.tobytes()
    assert np.abs(one - other).max() > 0.01


# --- members kept near people -----------------------------------------------------------------------------------------


def towards_the_first(n: int = 4000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """People nearly all want the first feature, so that disagreement grows evenly with the angle to it."""
    difference = np.random.default_rng(6).standard_normal((n, 2))
    return difference, np.where(difference[:, 0] > 0, 0.95, 0.05), np.array([1.0, 0.0])


def disagreement_of(theta: np.ndarray, difference: np.ndarray, prob_a: np.ndarray) -> float:
    return float(np.max(disagreement(hard_votes(difference, theta[:, None]), prob_a)))


# Not π itself: a member exactly opposite to the anchor cancels to rounding noise half-way.
@given(st.floats(0.3, np.pi - 1e-3), st.floats(0.08, 0.9), st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_member_is_moved_no_further_than_needed(angle: float, bound: float, scale: float, of_anchor: float) -> None:
    difference, prob_a, anchor = towards_the_first()
    member = scale * np.array([np.cos(angle), np.sin(angle)])
    kept = cap_disagreement(member, of_anchor * anchor, difference, prob_a, bound)
    before, after = (disagreement_of(theta, difference, prob_a) for theta in (member, kept))
    assert after <= bound + 1e-9
    if before <= bound:
        np.testing.assert_array_equal(kept, member, "nothing to do")
    else:
        assert after > bound - 0.01 or angle > np.pi - 0.01, (
            "just under the bound; a nearly opposite member has no middle way"
        )


def test_an_unreachable_bound_gives_the_anchor() -> None:
    difference, prob_a, anchor = towards_the_first()
    kept = cap_disagreement(np.array([-1.0, 1.0]), 5 * anchor, difference, prob_a, bound=0.01)
    np.testing.assert_allclose(kept / np.linalg.norm(kept), anchor, atol=1e-12)


@given(st.integers(0, 10_000), st.sampled_from([0.3, 0.4, 0.48]))
def test_the_bound_holds_if_the_anchor_meets_it(seed: int, bound: float) -> None:
    rng = np.random.default_rng(seed)
    difference, rewards = rng.standard_normal((100, 5)), rng.standard_normal((5, 7)) + rng.standard_normal((5, 1))
    prob_a = (difference @ rewards > 0).mean(axis=1)
    anchor, member = fit_bradley_terry(difference, prob_a, 0.1), rng.standard_normal(5)
    kept = cap_disagreement(member, anchor, difference, prob_a, bound)
    assert disagreement_of(kept, difference, prob_a) <= max(bound, disagreement_of(anchor, difference, prob_a)) + 1e-9


def test_the_bound_holds_in_single_precision() -> None:
    difference, prob_a, anchor = towards_the_first()
    kept = cap_disagreement(np.array([-1.0, 1.0]), anchor, difference.astype(np.float32), prob_a, bound=0.3)
    assert 0.29 < disagreement_of(kept, difference, prob_a) <= 0.3 + 2 / len(prob_a)


def test_the_margin_shrinks_with_more_prompts_and_no_bound_stays_none() -> None:
    bounds = [training_bound(0.5, n) for n in (20, 100, 1000, 100_000)]
    assert all(low < high for low, high in itertools.pairwise(bounds))
    assert 0.4 < bounds[0] < bounds[-1] < 0.5
    assert training_bound(0.4, 100) == pytest.approx(training_bound(0.5, 100) - 0.1)
    assert training_bound(1.0, 20) == 1.0


def test_a_single_prompt_cannot_be_split_into_folds() -> None:
    with pytest.raises(DataError, match="training needs at least 2 prompts, but there are 1"):
        validation_folds(np.zeros(5, dtype=np.int32), 0)
