"""Predicted shares of people by first choice or by top two, and the slate that covers most of them.

A person has the preferences of a member with probability α_j and chooses by its policy ∝ exp(r_j/β), first among all
candidates and then among the others. The limit β → 0 is the member's favourite. The undecided share u chooses
uniformly.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

from pluralign.core.arrays import FloatArray


def policies(rewards: npt.ArrayLike, temperature: float = 0.0) -> FloatArray:
    """Compute the probability that each member's policy gives each candidate, π_j(y) ∝ exp(r_j(y)/β).

    This is the policy of App. A with a uniform reference over the candidates.

    Args:
        rewards: of the candidates of one prompt, ``(n_candidates, n_members)``.
        temperature: β; 0 is the limit, where tied favourites share the probability.

    Returns:
        Probabilities, ``(n_candidates, n_members)``; each column has sum 1.

    Example:
        >>> policies([[1.0, 3.0], [0.0, 3.0]], 1.0).round(3)
        array([[0.731, 0.5  ],
               [0.269, 0.5  ]])
        >>> policies([[1.0, 3.0], [0.0, 3.0]])
        array([[1. , 0.5],
               [0. , 0.5]])
    """
    r = np.asarray(rewards, dtype=np.float64)
    if temperature == 0.0:
        top = r == r.max(axis=0)
        return np.asarray(top / top.sum(axis=0))
    return np.asarray(softmax((r - r.max(axis=0)) / temperature, axis=0))


def first_choices(
    rewards: npt.ArrayLike, weights: npt.ArrayLike, temperature: float = 0.0, undecided: float = 0.0
) -> FloatArray:
    """Compute the share of people whose favourite each candidate is: P(y) = u/n + (1 − u) Σ_j α_j π_j(y).

    On two candidates this is the policy-level p̂ (at β → 0: the vote-level p̂).

    Args:
        rewards: of the candidates of one prompt, ``(n_candidates, n_members)``.
        weights: of the members, with sum 1, ``(n_members,)``.
        temperature: β of the policies.
        undecided: u.

    Returns:
        Shares, ``(n_candidates,)``, with sum 1.

    Example:
        >>> first_choices([[2.0, 1.0], [1.0, 3.0], [0.0, 0.0]], [0.75, 0.25], undecided=0.3).round(3)
        array([0.625, 0.275, 0.1  ])
    """
    share = policies(rewards, temperature) @ np.asarray(weights, dtype=np.float64)
    return np.asarray(undecided / len(share) + (1.0 - undecided) * share)


def top_twos(
    rewards: npt.ArrayLike, weights: npt.ArrayLike, temperature: float = 0.0, undecided: float = 0.0
) -> FloatArray:
    """Compute the share of people whose top two each pair of candidates is.

    A member chooses a with probability π_j(a), then b by its policy over the others (Plackett–Luce).

    Args:
        rewards: of at least two candidates, ``(n_candidates, n_members)``.
        weights: of the members, with sum 1, ``(n_members,)``.
        temperature: β of the policies.
        undecided: u, which has each pair equally often.

    Returns:
        Shares, ``(n_candidates, n_candidates)``: symmetric, 0 on the diagonal; those above it have sum 1.

    Example:
        >>> top_twos([[2.0, 1.0], [1.0, 3.0], [0.0, 2.0]], [0.75, 0.25])
        array([[0.  , 0.75, 0.  ],
               [0.75, 0.  , 0.25],
               [0.  , 0.25, 0.  ]])
    """
    r, alpha = np.asarray(rewards, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    n, first = len(r), policies(r, temperature)
    ordered = np.zeros((n, n))
    for a in range(n):
        others = np.arange(n) != a
        ordered[a, others] = policies(r[others], temperature) @ (alpha * first[a])
    even = (1.0 - np.eye(n)) * 2.0 / (n * (n - 1))
    return np.asarray(undecided * even + (1.0 - undecided) * (ordered + ordered.T))


def covered_favourites(
    rewards: npt.ArrayLike, weights: npt.ArrayLike, temperature: float = 0.0, undecided: float = 0.0
) -> FloatArray:
    """Return ``first_choices`` on the diagonal of a matrix, as ``greedy_cover`` takes it."""
    return np.diag(first_choices(rewards, weights, temperature, undecided))


COVERS: Mapping[str, Callable[..., FloatArray]] = {"favourite": covered_favourites, "top-two": top_twos}
"""What a slate must contain to cover a person: their favourite, or one of their top two."""


def merge(shares: FloatArray, group: npt.NDArray[np.int64]) -> FloatArray:
    """Sum symmetric shares of pairs over groups of candidates that count as one.

    Args:
        shares: ``(n_candidates, n_candidates)``. A person is on the diagonal once, and off it in both entries.
        group: number of the group of each candidate, ``(n_candidates,)``.

    Example:
        >>> merge(np.array([[0.0, 0.7, 0.2], [0.7, 0.0, 0.1], [0.2, 0.1, 0.0]]), np.array([0, 0, 1])).round(3)
        array([[0.7, 0.3],
               [0.3, 0. ]])
    """
    member = np.eye(int(group.max()) + 1)[group]
    merged = member.T @ shares @ member
    own = member.T @ np.diag(shares)  # people of one candidate are counted once, people of two in both entries
    np.fill_diagonal(merged, (np.diag(merged) + own) / 2)
    return np.asarray(merged)


def greedy_cover(shares: FloatArray, size: int, random: np.random.Generator) -> tuple[npt.NDArray[np.int64], float]:
    """Choose candidates one by one, each covering the largest share of people not yet covered.

    For ``covered_favourites`` this is the optimal slate. For ``top_twos`` the covered share is submodular, so it is at
    least 1 − 1/e of the largest possible one.

    Args:
        shares: symmetric shares of people by their pair of candidates, or by one candidate on the diagonal, ``(n, n)``.
        size: number of candidates to choose, at most n.
        random: breaks ties.

    Returns:
        The chosen candidates in order, ``(size,)``, and the share of people covered.

    Example:
        >>> greedy_cover(np.diag([0.2, 0.5, 0.3]), 2, np.random.default_rng(0))
        (array([1, 2]), 0.8)

    Reference: Nemhauser, Wolsey and Fisher, "An analysis of approximations for maximizing submodular set functions",
    Mathematical Programming 14 (1978).
    """
    left, chosen, covered = shares.copy(), np.zeros(len(shares), dtype=bool), 0.0
    order: list[int] = []
    for _ in range(size):
        gain = np.where(chosen, -1.0, left.sum(axis=1))
        best = int(random.choice(np.flatnonzero(gain >= gain.max() - 1e-12)))
        order.append(best)
        covered += float(gain[best])
        chosen[best] = True
        left[best] = left[:, best] = 0.0
    return np.array(order, dtype=np.int64), min(covered, 1.0)
