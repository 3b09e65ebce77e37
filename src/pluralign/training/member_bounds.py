"""Keeping every member closer to people than a coin is, while it is fitted. Pruning afterwards is in ``theory``."""

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.training.differences import Matrix

BISECTIONS = 12
MARGIN, MARGIN_BY_PROMPTS = 0.017, 0.17


def training_bound(max_disagreement: float, n_prompts: int) -> float:
    """The bound to hold on training pairs, so that disagreement on new prompts stays under ``max_disagreement``.

    Members look closer to the people they learned from than to others, the more so the fewer prompts there are; the
    margin 0.017 + 0.17/√prompts was measured (docs/log.md). A bound of 1 is no bound.

    Example:
        >>> round(training_bound(0.5, 400), 4), training_bound(1.0, 400)
        (0.4745, 1.0)
    """
    return max_disagreement if max_disagreement >= 1 else max_disagreement - MARGIN - MARGIN_BY_PROMPTS / n_prompts**0.5


def cap_disagreement(
    member: FloatArray, anchor: FloatArray, difference: Matrix, prob_a: FloatArray, bound: float
) -> FloatArray:
    """Turn a linear reward towards an anchor, no further than needed to bring its disagreement under a bound.

    The anchor is scaled to the member's spread over the pairs. With θ(s) = (1 − s) member + s anchor, bisection finds
    the s at which Φ(θ(s)) comes under the bound; s = 1, the anchor itself, where none will do.

    Args:
        member: θ, ``(d,)``.
        anchor: a reward near people, such as a Bradley–Terry fit, ``(d,)``.
        difference: features of response a less those of b, ``(n, d)``.
        prob_a: the share of people choosing a, ``(n,)``.
        bound: the largest mean |vote − prob_a| it may have.
    """
    own = difference @ member.astype(difference.dtype)
    guide = difference @ anchor.astype(difference.dtype)
    own_scale, guide_scale = 1 / max(float(np.std(own)), 1e-12), 1 / max(float(np.std(guide)), 1e-12)

    def disagreement(share: float) -> float:
        reward = (1 - share) * own_scale * own + share * guide_scale * guide
        vote = 0.5 * (reward > 0) + 0.5 * (reward >= 0)
        return float(np.mean(vote * (1 - prob_a) + (1 - vote) * prob_a))

    if disagreement(0.0) <= bound:
        return member
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if disagreement(middle) <= bound else (middle, high)
    return np.asarray((1 - high) * member + high * guide_scale / own_scale * anchor)
