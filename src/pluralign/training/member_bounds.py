"""Bounds on the disagreement of members with people, during training. ``analysis.pruning`` prunes fitted ensembles."""

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.training.pairs import Matrix

BISECTIONS = 12
MARGIN, MARGIN_BY_PROMPTS = 0.017, 0.17


def training_bound(max_disagreement: float, n_prompts: int) -> float:
    """Return the bound for training pairs that keeps disagreement on new prompts below ``max_disagreement``.

    Disagreement is lower on the training prompts than on new ones, more so with fewer prompts. The margin
    0.017 + 0.17/√prompts was measured (docs/log.md). A bound of 1 means no bound.

    Example:
        >>> round(training_bound(0.5, 400), 4), training_bound(1.0, 400)
        (0.4745, 1.0)
    """
    return max_disagreement if max_disagreement >= 1 else max_disagreement - MARGIN - MARGIN_BY_PROMPTS / n_prompts**0.5


def cap_disagreement(
    member: FloatArray, anchor: FloatArray, difference: Matrix, prob_a: FloatArray, bound: float
) -> FloatArray:
    """Move a linear reward towards an anchor just far enough to bring its disagreement under a bound.

    The anchor is scaled to the member's spread over the pairs. With θ(s) = (1 − s) member + s anchor, bisection finds
    an s just large enough for the bound. If none is, s = 1: the result is the anchor itself.

    Args:
        member: θ, ``(d,)``.
        anchor: a reward with low disagreement, such as a Bradley–Terry fit, ``(d,)``.
        difference: features of response a minus those of b, ``(n, d)``.
        prob_a: share of people preferring a, ``(n,)``.
        bound: maximum disagreement, the mean |vote − prob_a|.

    Returns:
        The member, unchanged if it is under the bound, ``(d,)``.
    """
    own_reward = difference @ member.astype(difference.dtype)
    anchor_reward = difference @ anchor.astype(difference.dtype)
    own_scale, anchor_scale = 1 / max(float(np.std(own_reward)), 1e-12), 1 / max(float(np.std(anchor_reward)), 1e-12)

    def disagreement(s: float) -> float:
        reward = (1 - s) * own_scale * own_reward + s * anchor_scale * anchor_reward
        vote = 0.5 * (reward > 0) + 0.5 * (reward >= 0)
        return float(np.mean(vote * (1 - prob_a) + (1 - vote) * prob_a))

    if disagreement(0.0) <= bound:
        return member
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if disagreement(middle) <= bound else (middle, high)
    return np.asarray((1 - high) * member + high * anchor_scale / own_scale * anchor)
