"""A mixture of Plackett–Luce rewards learned from whole judgments: rankings, scores, several votes of one person.

Each person i shares the reward of one member j and a decisiveness 1/T. What the features miss is the same for everyone
who judged the same responses, so all people of a group g share a common part h. Of a person's rankings,

    P(rankings of i | j, T, h) = Π_rankings PL(ranking | (θ_j + φ_h) / T),   θ_j = θ_0 + δ_j,
    P(group g) = Σ_h ρ_h Π_{i in g} Σ_j π_j Σ_T κ_T P(rankings of i | j, T, h).

Without h, a mixture gains by explaining what the features miss, although nobody differs. The parameters minimise

    −(1/n) Σ_g log P(g) + λ_0/2 |θ_0|² + λ/2 (Σ_j |δ_j|² + Σ_h |φ_h|²),   n = number of choices.

With rater ids the rankings of a person on all prompts share j and T; then there is no h. L-BFGS solves it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax

from pluralign.core.arrays import Array, FloatArray, IndexArray, IntArray
from pluralign.core.random_streams import RATER_MIXTURE, random_stream
from pluralign.votes.judgments import Judgments

FACTORS = (1.0, 5.0)
"""Values of T: people who decide clearly, and people whose choices are nearly random."""
BLOCK = 1024
"""Rankings that are computed together, so that intermediate results fit into the cache."""
LOWEST = -60.0
"""Rewards of a prompt are at most so far below its best one; single precision ends at −87."""


# --- Plackett–Luce with ties ------------------------------------------------------------------------------------------

NODES = np.arange(-18.0, 4.8, 0.4)
"""Nodes x of the trapezoid rule for the integral of ``tied_first``, whose integrand decays at both ends."""


def tied_first(log_ratio: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return log P(all tied responses come before all lower ones) under Plackett–Luce, and its gradient.

    A tie states no order, so its probability is the sum over all orders of the tied responses. With independent
    exponential clocks of rates e^r, Plackett–Luce is the order in which they ring (Yellott 1977). With ρ_b the rate of
    a tied response over the total rate of the lower ones,

        P = ∫_0^∞ e^{−s} Π_b (1 − e^{−ρ_b s}) ds = ∫ e^{x − e^x} Π_b (1 − exp(−ρ_b e^x)) dx.

    The trapezoid rule on the second form is accurate to about 8 digits.

    Args:
        log_ratio: log ρ_b, ``(n_tied, …)``.

    Returns:
        log P, ``(…)``, and ∂ log P / ∂ log ρ_b, ``(n_tied, …)``.

    Example:
        >>> probability, _ = tied_first(np.zeros((2, 1)))  # A and B before C, all equally likely
        >>> np.exp(probability).round(6)
        array([0.333333])
    """
    x = NODES.reshape(-1, *[1] * log_ratio.ndim)
    scaled = np.exp(np.clip(log_ratio + x, -700, 700))
    missed = np.log(-np.expm1(-scaled))
    terms = (x - np.exp(x))[:, 0] + missed.sum(axis=1)
    total = logsumexp(terms, axis=0)
    slope = np.where(scaled > 30, 0.0, scaled / np.expm1(np.minimum(scaled, 30)))
    gradient = np.einsum("x...,xb...->b...", np.exp(terms - total), slope)
    return np.asarray(total + np.log(NODES[1] - NODES[0])), np.asarray(gradient)
