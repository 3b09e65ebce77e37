"""Mixtures of Bradley–Terry rewards by EM: a baseline, and a teacher of joint ensembles."""

from collections.abc import Sequence

import numpy as np

from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.core.random_streams import MIXTURE, random_stream
from pluralign.theory.calibration import brier
from pluralign.theory.logistic import sigmoid
from pluralign.training.bradley_terry import fit_bradley_terry, scores

EM_ROUNDS, SEARCH_ROUNDS = 12, 4
"""Rounds of a final fit, and of fits that choose the regularisation."""
SEARCH_FOLDS = 2
"""At most this many folds choose the regularisation."""
FACTORS = (0.3, 1.0, 3.0)
"""Regularisation strengths to choose from, relative to that of the single reward that groups start from."""
SMALLEST = 1e-9
"""Smallest probability of a vote in a group, so that no group is impossible."""


def fit_em(
    x: Array, prob_a: FloatArray, guide: FloatArray, k: int, *, l2: float, seed: int = 0, rounds: int = EM_ROUNDS
) -> tuple[FloatArray, FloatArray]:
    """Fit a mixture of k Bradley–Terry models by EM: each vote comes from one of k groups of people.

    E: a vote for a comes from group j with probability ∝ π_j σ(Δr_j), a vote for b ∝ π_j (1 − σ(Δr_j)).
    M: each group's reward is fitted to its share of the votes by two Newton steps from its last value, and π_j is
    that share.

    Args:
        x: differences, ``(n, m)``.
        prob_a: share of people preferring a, ``(n,)``.
        guide: the reward that all groups start from, with noise added, ``(m,)``.
        k: number of groups.
        l2: regularisation strength of each group's reward.
        seed: of the noise.
        rounds: number of E and M steps.

    Returns:
        The rewards, ``(m, k)``, and π, ``(k,)``.
    """
    noise = random_stream(seed, MIXTURE).standard_normal((x.shape[1], k))
    members = guide[:, None] + np.std(scores(x, guide)) * noise / np.maximum(np.std(scores(x, noise), axis=0), 1e-12)
    weights = np.full(k, 1 / k)
    for _ in range(rounds):
        soft = np.clip(sigmoid(scores(x, members)), SMALLEST, 1 - SMALLEST)
        for_a = weights * soft / (soft @ weights)[:, None] * prob_a[:, None]
        for_b = weights * (1 - soft) / ((1 - soft) @ weights)[:, None] * (1 - prob_a)[:, None]
        count = np.maximum(for_a + for_b, 1e-9)
        for j in range(k):
            target, weight = for_a[:, j] / count[:, j], count[:, j] / count[:, j].mean()
            members[:, j] = fit_bradley_terry(x, target, l2, weight=weight, start=members[:, j], steps=2)
        weights = count.mean(axis=0) / count.mean(axis=0).sum()
    return members, weights


def search_errors(
    x: Array, prob_a: FloatArray, folds: Sequence[Mask], k: int, *, l2: float, seed: int = 0
) -> dict[float, float]:
    """Return the Brier score on validation prompts, summed over folds, of mixtures of each regularisation strength.

    Args:
        x: differences, ``(n, m)``.
        prob_a: share of people preferring a, ``(n,)``.
        folds: masks of validation pairs, ``(n,)`` each.
        k: number of groups.
        l2: regularisation of the single reward that groups start from; strengths are multiples of it.
        seed: of the noise.
    """
    errors = dict.fromkeys((factor * l2 for factor in FACTORS), 0.0)
    for held_out in folds[:SEARCH_FOLDS]:
        rest, p = x[~held_out], prob_a[~held_out]
        guide = fit_bradley_terry(rest, p, l2)
        for strength in errors:
            members, weights = fit_em(rest, p, guide, k, l2=strength, seed=seed, rounds=SEARCH_ROUNDS)
            errors[strength] += brier(sigmoid(scores(x[held_out], members)) @ weights, prob_a[held_out])
    return errors
