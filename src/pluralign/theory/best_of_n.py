"""Best-of-N policies: a member's choice among N samples of a base policy, the paper's stand-in for fine-tuning (§5).

Arrays in, numbers out: what such a policy earns as N grows, and how far it moves from the base.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from pluralign.core.arrays import FloatArray


def expected_best(rewards: npt.ArrayLike, n: int) -> FloatArray:
    """The mean reward of the best of n samples, over all subsets of n of the M samples at hand.

    With rewards sorted r_(1) ≤ … ≤ r_(M), r_(i) is the best of C(i−1, n−1) subsets, so

      E[best of n] = Σ_i C(i−1, n−1) / C(M, n) · r_(i),

    which is unbiased for fresh samples, and uses every sample where drawing one subset would use n.

    Args:
        rewards: of the samples for one prompt, ``(M,)`` or ``(M, n_members)``.
        n: samples a policy chooses from, at most M.

    Returns:
        A number, or ``(n_members,)``.

    Example:
        >>> round(float(expected_best([1.0, 2.0, 4.0], 2)), 4)
        3.3333
    """
    r = np.sort(np.asarray(rewards, dtype=np.float64), axis=0)
    m = len(r)
    if not 1 <= n <= m:
        raise ValueError(f"n must be between 1 and the {m} samples at hand, not {n}.")
    return np.asarray(np.tensordot(_chances(m, n), r, axes=1))


def _chances(m: int, n: int) -> FloatArray:
    """The chance that each of m responses, from worst to best, is the best of n drawn of them: C(i−1, n−1)/C(m, n)."""
    chances = np.zeros(m)
    chances[n - 1 :] = np.exp(_log_choose(np.arange(n - 1, m), n - 1) - _log_choose(np.array([m]), n))
    return chances


def _log_choose(m: npt.NDArray[np.int64], n: int) -> FloatArray:
    return np.asarray(gammaln(m + 1) - gammaln(n + 1) - gammaln(m - n + 1))


def best_of_n_kl(n: int) -> float:
    """KL divergence of the best-of-n policy from its base, in nats: log n − (n − 1)/n.

    Exact where samples never tie; otherwise an upper bound.

    Example:
        >>> round(best_of_n_kl(4), 4)
        0.6363

    Reference: Stiennon et al., "Learning to summarize from human feedback" (2020); Beirami et al., "Theoretical
    guarantees on the best-of-n alignment policy" (2024) for the bound.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}.")
    return math.log(n) - (n - 1) / n


@dataclass(frozen=True)
class BestOfN:
    """What each member's best-of-N policy earns, averaged over prompts."""

    n: list[int]
    kl: list[float]
    """Divergence from the base at each n, in nats."""
    own: list[list[float]]
    """Of each member, the mean reward of its policy's answers above the base's, in its standard deviations."""
    others: list[list[float]]
    """The mean reward that all the other members give the same answers, each in its own standard deviations."""
    prompts: int


def best_of_n(rewards: Sequence[npt.ArrayLike]) -> BestOfN | None:
    """Follow every member's best-of-n policy from n = 1 to as many responses as half of the prompts have.

    Rewards are scaled to mean 0 and standard deviation 1 over all responses, so that 0 is what the base earns.

    Args:
        rewards: for each prompt, ``(n_responses, n_members)``.

    Returns:
        None where fewer than half of the prompts have two responses.

    Example:
        >>> found = best_of_n([np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[0.0, 1.0], [1.0, 0.0]])])
        >>> found.n, found.own, found.others
        ([1, 2], [[0.0, 1.0], [0.0, 1.0]], [[0.0, -1.0], [0.0, -1.0]])
    """
    lists = [np.asarray(of_prompt, dtype=np.float64) for of_prompt in rewards]
    most = int(np.median([len(of_prompt) for of_prompt in lists])) if lists else 0
    if most < 2:
        return None
    everything = np.concatenate(lists)
    spread = np.maximum(everything.std(axis=0), 1e-12)
    lists = [(of_prompt - everything.mean(axis=0)) / spread for of_prompt in lists if len(of_prompt) >= most]
    base = np.mean([of_prompt.mean(axis=0) for of_prompt in lists], axis=0)
    k = everything.shape[1]
    sizes = list(range(1, most + 1))
    own, others = np.zeros((k, most)), np.zeros((k, most))
    for place, n in enumerate(sizes):
        for of_prompt in lists:
            chances = _chances(len(of_prompt), n)
            for j in range(k):
                earned = chances @ (of_prompt[np.argsort(of_prompt[:, j], kind="stable")] - base)
                own[j, place] += earned[j]
                others[j, place] += (earned.sum() - earned[j]) / max(k - 1, 1)
    return BestOfN(
        n=sizes,
        kl=[best_of_n_kl(n) for n in sizes],
        own=(own / len(lists)).round(12).tolist(),
        others=(others / len(lists)).round(12).tolist(),
        prompts=len(lists),
    )
