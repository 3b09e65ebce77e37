"""Social choice rules: choose one candidate by the pairwise support of weighted members.

Weights are real numbers. The voting libraries we examined count ballots and do not accept such weights, so the rules
are implemented here; each is a few lines over the matrix of pairwise support.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import UsageError, did_you_mean
from pluralign.theory.logistic import sigmoid

_EQUAL = 1e-9


def pairwise_support(
    rewards: npt.ArrayLike, weights: npt.ArrayLike, temperature: float = 0.0, undecided: float = 0.0
) -> FloatArray:
    """Compute the predicted share of people who prefer a to b: s_ab = u/2 + (1 − u) Σ_j α_j σ((r_j(a) − r_j(b))/β).

    The limit β → 0 counts votes, Σ_j α_j 1[r_j(a) > r_j(b)], where a tie counts ½.

    Args:
        rewards: rewards of the candidates of one prompt, ``(n_candidates, n_members)``.
        weights: weights of the members, ``(n_members,)``.
        temperature: β; 0 is the limit.
        undecided: u, the share of people that no member explains.

    Returns:
        Support, ``(n_candidates, n_candidates)``; s_ab + s_ba = 1, and ½ on the diagonal.

    Example:
        >>> pairwise_support([[2.0, 1.0], [1.0, 3.0]], [0.75, 0.25])
        array([[0.5 , 0.75],
               [0.25, 0.5 ]])
        >>> pairwise_support([[2.0, 1.0], [1.0, 3.0]], [0.75, 0.25], temperature=1.0, undecided=0.2).round(3)
        array([[0.5  , 0.562],
               [0.438, 0.5  ]])

    Reference: the paper's p̂ for one context (App. C.2); the policy level is App. A.
    """
    r, alpha = np.asarray(rewards, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    support = np.full((len(r), len(r)), undecided / 2)
    for j, weight in enumerate((1.0 - undecided) * alpha):  # one member at a time: n² numbers, not n²·k
        difference = r[:, j, None] - r[None, :, j]
        if temperature == 0.0:
            support += weight * (0.5 * (difference > 0) + 0.5 * (difference >= 0))
        else:
            support += weight * sigmoid(difference / temperature)
    return support


def maximin(support: FloatArray) -> FloatArray:
    """Compute the support of each candidate against its strongest rival, min_b s_ab (Simpson, Kramer).

    Example:
        >>> maximin(np.array([[0.5, 0.6, 0.7], [0.4, 0.5, 0.9], [0.3, 0.1, 0.5]]))
        array([0.6, 0.4, 0.1])
    """
    others = np.where(np.eye(len(support), dtype=bool), np.inf, support)
    return np.asarray(others.min(axis=1))


def borda(support: FloatArray) -> FloatArray:
    """Compute the mean support of each candidate over all rivals: the weighted Borda score, scaled to [0, 1].

    Example:
        >>> borda(np.array([[0.5, 0.6, 0.7], [0.4, 0.5, 0.9], [0.3, 0.1, 0.5]])).round(3)
        array([0.65, 0.65, 0.2 ])
    """
    n = len(support)
    return np.asarray((support.sum(axis=1) - 0.5) / (n - 1))


def schulze(support: FloatArray) -> FloatArray:
    """Count the rivals that each candidate beats by Schulze's method. A Condorcet winner beats all.

    The strength of a path of victories (s > ½) is its weakest link; a beats b if the strongest path from a to b is
    stronger than any from b to a.

    Example:
        >>> schulze(np.array([[0.5, 0.6, 0.3], [0.4, 0.5, 0.8], [0.7, 0.2, 0.5]]))
        array([0., 2., 1.])

    Reference: Schulze, "A new monotonic, clone-independent, reversal symmetric, and Condorcet-consistent
    single-winner election method", Social Choice and Welfare 36 (2011).
    """
    path = np.where(support > 0.5 + _EQUAL, support, 0.0)
    for middle in range(len(path)):
        path = np.maximum(path, np.minimum(path[:, [middle]], path[[middle]]))
    return np.asarray((path > path.T + _EQUAL).sum(axis=1), dtype=np.float64)


def maximal_lottery(support: FloatArray) -> FloatArray:
    """Compute the lottery that no other lottery beats in expectation: optimal play in the game with payoff s − ½.

    max_p min_b Σ_a p_a (s_ab − ½), a linear programme. Its value is 0, and a Condorcet winner has probability 1.

    Example:
        >>> maximal_lottery(np.array([[0.5, 0.6, 0.4], [0.4, 0.5, 0.6], [0.6, 0.4, 0.5]])).round(3)
        array([0.333, 0.333, 0.333])

    Reference: Fishburn, "Probabilistic social choice based on simple voting comparisons", Review of Economic Studies
    51 (1984).
    """
    n = len(support)
    solution = linprog(
        np.append(np.zeros(n), -1.0),  # maximise the value v
        A_ub=np.column_stack([-(support - 0.5).T, np.ones(n)]),
        b_ub=np.zeros(n),
        A_eq=np.append(np.ones(n), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0, None)] * n + [(None, None)],
    )
    lottery = np.clip(solution.x[:n], 0.0, None)
    return np.asarray(lottery / lottery.sum())


RULES: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "maximin": maximin,
    "borda": borda,
    "schulze": schulze,
    "lottery": maximal_lottery,
}
"""Each rule scores every candidate. The highest score wins; from the lottery a candidate is drawn."""


def choose(support: FloatArray, rule: str, seed: npt.ArrayLike = 0) -> int:
    """Return the candidate that a rule chooses. Ties are broken by mean support, then at random.

    Example:
        >>> choose(np.array([[0.5, 0.6], [0.4, 0.5]]), "maximin")
        0
    """
    if rule not in RULES:
        raise UsageError(f"there is no rule {rule!r}; {did_you_mean(rule, RULES)}.")
    if len(support) == 1:
        return 0
    random = np.random.default_rng(np.atleast_1d(seed))
    scores = RULES[rule](support)
    if rule == "lottery":
        return int(random.choice(len(support), p=scores))
    best = np.flatnonzero(scores >= scores.max() - _EQUAL)
    mean = borda(support)[best]
    return int(random.choice(best[mean >= mean.max() - _EQUAL]))
