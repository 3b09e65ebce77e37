"""A learned hidden layer, for rewards that are a small network (``--members mlp``).

The layer comes from one soft-label Bradley–Terry network. The members of an ensemble are then linear in the layer and
in the inputs. All members share one forward pass, and every method and baseline works on it unchanged.
"""

from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize

from pluralign.core.arrays import Array, FloatArray
from pluralign.core.random_streams import HIDDEN_LAYER, random_stream
from pluralign.theory.logistic import sigmoid
from pluralign.training.bradley_terry import fit_bradley_terry, scores
from pluralign.training.pairs import Pairs

WIDTH = 32
L2 = 0.03
STEPS = 60


def fit_hidden_layer(pairs: Pairs, *, seed: int = 0, width: int = WIDTH) -> tuple[Array, Array]:
    """Return W ``(d, width)`` and b ``(width,)`` of a network r = u·φ + v·tanh(W'φ + b) fitted to the votes.

    Args:
        pairs: the training pairs.
        seed: of the random start.
        width: number of hidden units.
    """
    inputs = pairs.inputs
    d = inputs.shape[1]
    rng = random_stream(seed, HIDDEN_LAYER)
    linear = fit_bradley_terry(pairs.difference, pairs.prob_a, 0.1)
    trained = inputs[np.union1d(pairs.a, pairs.b)]  # ``inputs`` also holds the texts of test prompts
    layer = rng.standard_normal((d, width)) / (np.sqrt(d) * np.maximum(float(np.std(trained)), 1e-6))
    start = np.concatenate([linear, layer.ravel(), np.zeros(width), rng.standard_normal(width) * 0.1])
    objective = network_loss(pairs, width, L2)
    solution = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": STEPS}).x
    _, layer, bias, _ = unpack(solution, d, width)
    return layer.astype(np.float32), bias.astype(np.float32)


def unpack(unknowns: FloatArray, d: int, width: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return (u, W, b, v) from one vector."""
    u, layer, bias, v = np.split(unknowns, [d, d + d * width, d + d * width + width])
    return u, layer.reshape(d, width), bias, v


def network_loss(pairs: Pairs, width: int, l2: float) -> Callable[[FloatArray], tuple[float, FloatArray]]:
    """Return (u, W, b, v) ↦ (mean cross-entropy of σ(Δr) to p + l2/2 (|u|² + |W|² + |v|²), its gradient)."""
    inputs, n, d = pairs.inputs, len(pairs), pairs.inputs.shape[1]

    def value_and_gradient(unknowns: FloatArray) -> tuple[float, FloatArray]:
        u, layer, bias, v = unpack(unknowns, d, width)
        hidden = np.tanh(scores(inputs, layer) + bias)
        reward = scores(inputs, u) + hidden @ v
        z = reward[pairs.a] - reward[pairs.b]
        slope = (sigmoid(z) - pairs.prob_a) / n
        reward_gradient = np.bincount(pairs.a, slope, len(reward)) - np.bincount(pairs.b, slope, len(reward))
        hidden_gradient = reward_gradient[:, None] * v * (1 - hidden**2)
        layer_gradient = inputs.T @ hidden_gradient.astype(inputs.dtype) + l2 * layer
        gradient = np.concatenate([
            reward_gradient.astype(inputs.dtype) @ inputs + l2 * u, layer_gradient.ravel(), hidden_gradient.sum(axis=0),
            hidden.T @ reward_gradient + l2 * v,
        ])  # fmt: skip
        entropy = np.mean(np.logaddexp(0.0, z) - pairs.prob_a * z)
        return float(entropy + 0.5 * l2 * (u @ u + np.sum(layer**2) + v @ v)), gradient.astype(np.float64)

    return value_and_gradient
