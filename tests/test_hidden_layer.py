"""The hidden layer: its gradient, and votes that no linear reward can fit."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import numeric_gradient, random_pairs

from pluralign.ensemble.members import FeatureMap
from pluralign.learning.bradley_terry import bradley_terry_loss, fit_bradley_terry
from pluralign.learning.frozen import fit_hidden_layer, network_loss, unpack
from pluralign.learning.pairs import Pairs


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.2]), st.integers(1, 3))
def test_network_gradient_equals_finite_differences(seed: int, l2: float, width: int) -> None:
    pairs, rng = random_pairs(seed, n=12, d=2, n_items=8), np.random.default_rng(seed)
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
    np.testing.assert_allclose(gradient, numeric_gradient(lambda at: loss(at)[0], unknowns), atol=1e-7)


@functools.cache
def nonlinear_votes() -> Pairs:
    """Votes for more of the first feature where it is positive; below 0 it makes no difference."""
    pairs = random_pairs(5, n=600, d=3, n_items=400)
    utility = 3 * np.maximum(pairs.inputs[:, 0], 0)
    return replace(pairs, prob_a=1 / (1 + np.exp(utility[pairs.b] - utility[pairs.a])))


def test_hidden_layer_fits_votes_that_are_not_linear() -> None:
    pairs = nonlinear_votes()
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


def test_hidden_layer_depends_only_on_the_seed() -> None:
    (one, _), (again, _), (other, _) = (fit_hidden_layer(nonlinear_votes(), seed=seed, width=4) for seed in (0, 0, 1))
    assert one.tobytes() == again.tobytes()
    assert np.abs(one - other).max() > 0.01
