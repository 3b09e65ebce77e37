"""Which member stands for one person: the posterior over members given some of the person's choices."""

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

from pluralign.core.arrays import FloatArray
from pluralign.theory.logistic import sigmoid

SLIP = 0.1
"""Least share of a person's choices that are random: half of them go either way."""


def choice_probability(difference: npt.ArrayLike, temperature: float, undecided: float = 0.0) -> FloatArray:
    """Return the probability that a person who shares a member's preferences chooses response a.

      q = s/2 + (1 − s) σ(Δr / β),   s = max(u, ``SLIP``).

    Args:
        difference: reward of a less reward of b, any shape.
        temperature: β.
        undecided: u, the share of votes that no member explains.

    Example:
        >>> choice_probability(np.array([-1000.0, 0.0, 1000.0]), 1.0)
        array([0.05, 0.5 , 0.95])
    """
    slip = max(undecided, SLIP)
    return np.asarray(slip / 2 + (1 - slip) * sigmoid(np.asarray(difference) / temperature))


def choice_log_likelihood(chance: FloatArray, votes_a: npt.ArrayLike, votes_b: npt.ArrayLike) -> FloatArray:
    """Return n_a log q + n_b log(1 − q) of each pair and member, ``(n_pairs, k)``.

    Args:
        chance: q of ``choice_probability``, strictly between 0 and 1, ``(n_pairs, k)``.
        votes_a: n_a, the person's votes for response a of each pair, ``(n_pairs,)``.
        votes_b: n_b, ``(n_pairs,)``.
    """
    for_a, for_b = np.asarray(votes_a, dtype=np.float64), np.asarray(votes_b, dtype=np.float64)
    return np.asarray(for_a[:, None] * np.log(chance) + for_b[:, None] * np.log1p(-chance))


def member_posterior(log_likelihood: FloatArray, weights: npt.ArrayLike) -> FloatArray:
    """Return P(j | choices) ∝ α_j exp(Σ_i ℓ_ij), ``(k,)``. Without choices it is the weights.

    Args:
        log_likelihood: ℓ of ``choice_log_likelihood``, ``(n_pairs, k)``.
        weights: α, the prior, ``(k,)``.

    Example:
        >>> chance = np.array([[0.9, 0.3]])
        >>> member_posterior(choice_log_likelihood(chance, [1], [0]), [0.25, 0.75]).round(2)
        array([0.5, 0.5])
    """
    log_prior = np.log(np.maximum(np.asarray(weights, dtype=np.float64), 1e-300))
    return np.asarray(softmax(log_prior + log_likelihood.sum(axis=0)))
