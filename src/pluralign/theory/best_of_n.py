"""Best-of-N policies: a member chooses among N samples of a base policy.

The paper uses them instead of fine-tuning (§5). Computed here: the expected reward of such a policy as N grows, and its
KL divergence from the base policy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from pluralign.core.arrays import FloatArray


def prob_best(m: int, n: int) -> FloatArray:
    """Compute the probability that the i-th of m samples, worst first, is the best of n drawn: C(i−1, n−1) / C(m, n).

    With rewards sorted r_(1) ≤ … ≤ r_(m), the expected reward of the best of n is Σ_i prob_i r_(i). It is unbiased for
    new samples and uses all m samples, whereas a single subset would use n.

    Example:
        >>> round(float(prob_best(3, 2) @ [1.0, 2.0, 4.0]), 4)
        3.3333
    """
    if not 1 <= n <= m:
        raise ValueError(f"n must be between 1 and the number of samples, {m}, not {n}.")
    prob = np.zeros(m)
    prob[n - 1 :] = np.exp(_log_choose(np.arange(n - 1, m), n - 1) - _log_choose(np.array([m]), n))
    return prob


def _log_choose(m: npt.NDArray[np.int64], n: int) -> FloatArray:
    return np.asarray(gammaln(m + 1) - gammaln(n + 1) - gammaln(m - n + 1))


def best_of_n_kl(n: int) -> float:
    """Compute the KL divergence of the best-of-n policy from its base, in nats: log n − (n − 1)/n.

    Exact if samples never tie, otherwise an upper bound.

    Example:
        >>> round(best_of_n_kl(4), 4)
        0.6363

    Reference: Stiennon et al., "Learning to summarize from human feedback" (2020); Beirami et al., "Theoretical
    guarantees on the best-of-n alignment policy" (2024) for the bound.
    """
    return math.log(n) - (n - 1) / n


@dataclass(frozen=True)
class BestOfN:
    """Rewards of each member's best-of-N policy, averaged over prompts."""

    n: list[int]
    kl: list[float]
    """KL divergence from the base at each n, in nats."""
    own: list[list[float]]
    """Per member: its mean reward for its own policy's answers minus that for the base's, in standard deviations."""
    others: list[list[float]]
    """Per member: the other members' mean reward for the same answers, each in its own standard deviations."""
    prompts: int


def best_of_n(rewards: Sequence[npt.ArrayLike]) -> BestOfN | None:
    """Evaluate every member's best-of-n policy for n = 1 up to the median number of responses per prompt.

    Rewards are scaled to mean 0 and standard deviation 1 over all responses, so that 0 is the reward of the base.

    Args:
        rewards: one array per prompt, ``(n_responses, n_members)``.

    Returns:
        The rewards, or None if fewer than half of the prompts have two responses.

    Example:
        >>> result = best_of_n([np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[0.0, 1.0], [1.0, 0.0]])])
        >>> result.n, result.own, result.others
        ([1, 2], [[0.0, 1.0], [0.0, 1.0]], [[0.0, -1.0], [0.0, -1.0]])
    """
    lists = [np.asarray(of_prompt, dtype=np.float64) for of_prompt in rewards]
    largest = int(np.median([len(of_prompt) for of_prompt in lists])) if lists else 0
    if largest < 2:
        return None
    pooled = np.concatenate(lists)
    spread = np.maximum(pooled.std(axis=0), 1e-12)
    lists = [(of_prompt - pooled.mean(axis=0)) / spread for of_prompt in lists if len(of_prompt) >= largest]
    base = np.mean([of_prompt.mean(axis=0) for of_prompt in lists], axis=0)
    k = pooled.shape[1]
    sizes = list(range(1, largest + 1))
    own, others = np.zeros((k, largest)), np.zeros((k, largest))
    for index, n in enumerate(sizes):
        for of_prompt in lists:
            prob = prob_best(len(of_prompt), n)
            for j in range(k):
                earned = prob @ (of_prompt[np.argsort(of_prompt[:, j], kind="stable")] - base)
                own[j, index] += earned[j]
                others[j, index] += (earned.sum() - earned[j]) / max(k - 1, 1)
    rewards_of, rewards_of_others = ((total / len(lists)).round(12).tolist() for total in (own, others))
    return BestOfN(sizes, [best_of_n_kl(n) for n in sizes], rewards_of, rewards_of_others, len(lists))
