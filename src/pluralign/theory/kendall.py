"""Kendall's tau between the rankings that the members of an ensemble give the same responses.

Defined here: tau with ties and over several prompts, the thresholds for near copies and near opposites, and related
measures of agreement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, IndexArray

NEAR_COPY = 0.8
"""At this tau two members rank nine of ten pairs of responses the same way."""
NEAR_OPPOSITE = -0.5
"""At this tau two members rank three of four pairs of responses in opposite order."""
SIGNS_PER_BLOCK = 4_000_000
"""Comparisons held in memory at once."""


def kendall_tau_b(rewards: npt.ArrayLike) -> FloatArray:
    """Compute Kendall's tau-b between the rankings of one list of responses, for each two members.

    With s_i(y, y') = sign(r_i(y) - r_i(y')),

        tau_ij = sum s_i s_j / sqrt(sum s_i^2 * sum s_j^2), summed over all pairs of responses y, y'.

    1 means the same ranking, -1 the reverse ranking; random rankings have mean 0. Without ties, (1 - tau) / 2 is the
    share of pairs that two members rank differently. A tie of rewards is neither agreement nor disagreement.

    Args:
        rewards: rewards of the responses of one prompt, ``(n_responses, n_members)``.

    Returns:
        tau, ``(n_members, n_members)``; NaN in the row and column of a member that gives all responses the same reward.

    Example:
        >>> kendall_tau_b([[1.0, 5.0, 3.0], [2.0, 6.0, 2.0], [3.0, 7.0, 1.0]])
        array([[ 1.,  1., -1.],
               [ 1.,  1., -1.],
               [-1., -1.,  1.]])

    Reference: Kendall, "The treatment of ties in ranking problems", Biometrika 33 (1945); the paper's Section 5, "Do
    the reward models capture distinct preferences?", and Figure 3.
    """
    r = np.asarray(rewards, dtype=np.float64)
    if r.ndim != 2 or not r.size:
        raise ValueError(f"rewards must have shape (n_responses, n_members), but they have shape {r.shape}.")
    n, k = r.shape
    product = np.zeros((k, k))
    rows = max(1, SIGNS_PER_BLOCK // (n * k))
    for start in range(0, n, rows):  # each pair is counted in both orders, which changes no ratio
        signs = np.sign(r[start : start + rows, None] - r[None]).reshape(-1, k)
        product += signs.T @ signs
    untied = np.diag(product)  # pairs that each member does not tie
    norm = np.sqrt(np.outer(untied, untied))  # of whole numbers, so equal rankings give exactly 1
    tau: FloatArray = product / np.where(norm > 0.0, norm, np.nan)
    return tau


@dataclass(frozen=True, eq=False)
class MeanTau:
    """Kendall's tau averaged over prompts."""

    tau: FloatArray
    """Mean over the prompts where neither member ties all responses, ``(k, k)``."""
    standard_error: FloatArray
    """Standard error of that mean with independent prompts, ``(k, k)``; NaN for fewer than two prompts."""
    off_diagonal: float
    """Mean of tau over all pairs of different members; NaN for a single member."""
    off_diagonal_standard_error: float
    """Standard error of ``off_diagonal`` over prompts."""
    per_prompt: FloatArray
    """Mean over pairs of different members, per prompt, ``(n_prompts,)``."""
    constant: IndexArray
    """Number of prompts where the member gave all responses the same reward, ``(k,)``."""


def mean_tau(rewards: Sequence[npt.ArrayLike]) -> MeanTau:
    """Average ``kendall_tau_b`` over prompts, with standard errors.

    Args:
        rewards: rewards of the responses per prompt, ``(n_responses, n_members)``; prompts may differ in n_responses.

    Example:
        >>> same, reverse = [[1.0, 1.0], [2.0, 2.0]], [[1.0, 2.0], [2.0, 1.0]]
        >>> mean = mean_tau([same, same, same, reverse])
        >>> float(mean.tau[0, 1]), float(mean.standard_error[0, 1])
        (0.5, 0.5)

    Reference: Section 5, Figure 3.
    """
    taus = np.stack([kendall_tau_b(of_prompt) for of_prompt in rewards])
    off = ~np.eye(taus.shape[1], dtype=bool)
    per_prompt, _ = _mean(taus[:, off].T)
    tau, standard_error = _mean(taus)
    overall, _ = _mean(tau[off])
    _, overall_error = _mean(per_prompt)
    constant = np.isnan(np.diagonal(taus, axis1=1, axis2=2)).sum(axis=0)
    return MeanTau(tau, standard_error, float(overall), float(overall_error), per_prompt, constant)


def _mean(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the mean along the first axis and its standard error. NaN entries are ignored."""
    known = ~np.isnan(values)
    n = known.sum(axis=0)
    mean = np.where(known, values, 0.0).sum(axis=0) / np.where(n > 0, n, np.nan)
    squares = (np.where(known, values - mean, 0.0) ** 2).sum(axis=0)
    return mean, np.sqrt(squares / np.where(n > 1, (n - 1.0) * n, np.nan))


def weighted_off_diagonal(matrix: npt.ArrayLike, weights: npt.ArrayLike) -> float:
    """Compute the mean of a matrix over two different members drawn by weight.

    sum a_i a_j m_ij / sum a_i a_j over i != j. NaN entries are ignored; the result is NaN if fewer than two members
    have weight.

    Example:
        >>> weighted_off_diagonal([[1.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 1.0]], [0.5, 0.5, 0.0])
        0.5
    """
    m, alpha = np.asarray(matrix, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    share = np.outer(alpha, alpha) * ~np.isnan(m)
    np.fill_diagonal(share, 0.0)
    return float((share * np.nan_to_num(m)).sum() / share.sum()) if share.sum() > 0 else float("nan")


def vote_agreement(votes: npt.ArrayLike, others: npt.ArrayLike | None = None) -> FloatArray:
    """Compute the share of pairs where two voters prefer the same response: mean [v_i w_j + (1 - v_i)(1 - w_j)].

    A reward tie, v = 1/2, agrees with every vote half of the time, including its own.

    Args:
        votes: v, votes of the members, ``(n_pairs, n_members)``.
        others: w, votes of others, ``(n_pairs, n_others)`` (default: the same votes).

    Returns:
        Shares of pairs, ``(n_members, n_others)``.

    Example:
        >>> vote_agreement([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
        array([[1.  , 0.75],
               [0.75, 1.  ]])
    """
    v = np.asarray(votes, dtype=np.float64)
    w = v if others is None else np.asarray(others, dtype=np.float64)
    return np.asarray((v.T @ w + (1.0 - v).T @ (1.0 - w)) / len(v))


def near_copies(tau: npt.ArrayLike, threshold: float = NEAR_COPY) -> list[tuple[int, int]]:
    """List the pairs of members whose tau is at least ``threshold``, closest first.

    Example:
        >>> near_copies([[1.0, 0.9, 0.1], [0.9, 1.0, 0.2], [0.1, 0.2, 1.0]])
        [(0, 1)]
    """
    t = np.asarray(tau, dtype=np.float64)
    pairs = [(i, j) for i in range(len(t)) for j in range(i + 1, len(t)) if t[i, j] >= threshold]
    return sorted(pairs, key=lambda pair: -t[pair])


def near_opposites(tau: npt.ArrayLike, threshold: float = NEAR_OPPOSITE) -> list[tuple[int, int]]:
    """List the pairs of members whose tau is at most ``threshold``, most opposed first.

    Example:
        >>> near_opposites([[1.0, -0.7], [-0.7, 1.0]])
        [(0, 1)]
    """
    return near_copies(-np.asarray(tau, dtype=np.float64), -threshold)


def expected_distinct(n_responses: int, n_members: int) -> float:
    """Compute the expected number of distinct top choices if each member chose at random: n (1 - (1 - 1/n)^k).

    Example:
        >>> expected_distinct(2, 2)
        1.5
    """
    return n_responses * (1.0 - (1.0 - 1.0 / n_responses) ** n_members)
