"""Mixtures of Bradley–Terry rewards by EM: a baseline, and a teacher of joint ensembles."""

import numpy as np

from pluralign.core.arrays import Array, FloatArray
from pluralign.core.random_streams import MIXTURE, random_stream
from pluralign.theory.logistic import sigmoid
from pluralign.training.bradley_terry import fit_bradley_terry, scores

EM_ROUNDS = 12
ROUNDING = 1e-9


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
    members = guide[:, None] + np.std(scores(x, guide)) * noise / np.std(scores(x, noise), axis=0)
    weights = np.full(k, 1 / k)
    for _ in range(rounds):
        soft = np.clip(sigmoid(scores(x, members)), ROUNDING, 1 - ROUNDING)  # no group is impossible
        for_a = weights * soft / (soft @ weights)[:, None] * prob_a[:, None]
        for_b = weights * (1 - soft) / ((1 - soft) @ weights)[:, None] * (1 - prob_a)[:, None]
        count = np.maximum(for_a + for_b, 1e-9)
        for j in range(k):
            target, weight = for_a[:, j] / count[:, j], count[:, j] / count[:, j].mean()
            members[:, j] = fit_bradley_terry(x, target, l2, weight=weight, start=members[:, j], steps=2)
        weights = count.mean(axis=0) / count.mean(axis=0).sum()
    return members, weights
