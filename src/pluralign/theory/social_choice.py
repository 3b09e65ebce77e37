"""Choose one candidate by the pairwise support of weighted members, or a slate that covers the most people.

Also first choices: predicted shares, and those observed in rankings (``FirstChoiceShares``).

Weights are real numbers. The voting libraries we examined count ballots and do not accept such weights, so the rules
are implemented here; each is a few lines over the matrix of pairwise support.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.special import softmax

from pluralign.core.arrays import FloatArray, IndexArray, IntArray
from pluralign.core.errors import UsageError, did_you_mean
from pluralign.theory.calibration import sigmoid

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
    maximise_value = np.append(np.zeros(n), -1.0)
    payoffs, total = np.column_stack([-(support - 0.5).T, np.ones(n)]), np.append(np.ones(n), 0.0)[None]
    solution = linprog(maximise_value, payoffs, np.zeros(n), total, [1.0], [(0, None)] * n + [(None, None)])
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


# --- Predicted shares of people by first choice or by top two, and the slate that covers most of them.


def policies(rewards: npt.ArrayLike, temperature: float = 0.0) -> FloatArray:
    """Compute the probability that each member's policy gives each candidate, π_j(y) ∝ exp(r_j(y)/β).

    This is the policy of App. A with a uniform reference over the candidates.

    Args:
        rewards: of the candidates of one prompt, ``(…, n_candidates, n_members)``.
        temperature: β; 0 is the limit, where tied favourites share the probability.

    Returns:
        Probabilities, ``(…, n_candidates, n_members)``, with sum 1 over the candidates.

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
        top = r == r.max(axis=-2, keepdims=True)
        return np.asarray(top / top.sum(axis=-2, keepdims=True))
    return np.asarray(softmax((r - r.max(axis=-2, keepdims=True)) / temperature, axis=-2))


def first_choices(
    rewards: npt.ArrayLike, weights: npt.ArrayLike, temperature: float = 0.0, undecided: float = 0.0
) -> FloatArray:
    """Compute the share of people whose favourite each candidate is: P(y) = u/n + (1 − u) Σ_j α_j π_j(y).

    On two candidates this is the policy-level p̂ (at β → 0: the vote-level p̂).

    Args:
        rewards: of the candidates of one prompt, ``(…, n_candidates, n_members)``.
        weights: of the members, with sum 1, ``(n_members,)``.
        temperature: β of the policies.
        undecided: u.

    Returns:
        Shares, ``(…, n_candidates)``, with sum 1 over the candidates.

    Example:
        >>> first_choices([[2.0, 1.0], [1.0, 3.0], [0.0, 0.0]], [0.75, 0.25], undecided=0.3).round(3)
        array([0.625, 0.275, 0.1  ])
    """
    share = policies(rewards, temperature) @ np.asarray(weights, dtype=np.float64)
    return np.asarray(undecided / share.shape[-1] + (1.0 - undecided) * share)


@dataclass(frozen=True, eq=False)
class FirstChoiceShares:
    """First choices of people in sets of t items: observed, to compare with predicted shares.

    With v_i the first choice of person i as a vector, 1/m for each of m items that tie for it, and n people,

      f = (1/n) Σ_i v_i,   error = Σ_s (q_s − f_s)²,   noise = (1/(n(n − 1))) Σ_i |v_i − f|².

    E[f] = p and E[noise] = E|f − p|², so error − noise is unbiased for Σ_s (q_s − p_s)². This is Lemma 1 for t choices:
    for t = 2 error and noise are twice those of the Brier score.
    """

    items: IntArray
    """The items of each set, ``(n_sets, t)``."""
    shares: FloatArray
    """f, ``(n_sets, t)``."""
    squares: FloatArray
    """(1/n) Σ_i |v_i|², which is 1 without ties, ``(n_sets,)``."""
    n: IntArray
    """Number of people who ranked all items of a set, at least 2, ``(n_sets,)``."""

    @classmethod
    def of(cls, items: IntArray, places: IntArray, person: IndexArray, t: int) -> "FirstChoiceShares":
        """Count first choices in all sets of t items that at least two people ranked.

        Args:
            items: of each ranking, in ascending order; −1 is missing, ``(n_rankings, length)``.
            places: their places, lower is better, ``(n_rankings, length)``.
            person: who ranked, ``(n_rankings,)``. Of several rankings with the same set the first counts.
            t: size of the sets.

        Example:
            >>> a, b = [-1, 4, 6], [4, 6, 9]  # the second and third person rank 9 above 4 and 6, or the same as 4
            >>> places = np.array([[0, 0, 1], [1, 2, 0], [0, 1, 0]])
            >>> found = FirstChoiceShares.of(np.array([a, b, b]), places, np.arange(3), 2)
            >>> found.items.tolist(), found.n.tolist(), found.shares.tolist()
            ([[4, 6], [4, 9], [6, 9]], [3, 2, 2], [[1.0, 0.0], [0.25, 0.75], [0.0, 1.0]])
            >>> found.noise
            array([0.   , 0.125, 0.   ])
        """
        chosen = np.array(list(combinations(range(items.shape[1]), t)), dtype=np.int64).reshape(-1, t)
        ranking, subset = np.nonzero((items[:, chosen] >= 0).all(axis=2))
        columns = chosen[subset].T
        key = np.zeros(len(ranking), dtype=np.int64)
        for column in columns:  # numbers of distinct prefixes, which cannot overflow
            key = np.unique(key * (items.max(initial=0) + 1) + items[ranking, column], return_inverse=True)[1]
        _, rows = np.unique(key * (person.max(initial=0) + np.int64(1)) + person[ranking], return_index=True)
        key, ranking, columns = key[rows], ranking[rows], columns[:, rows]
        of_set = places[ranking, columns].T
        first = of_set == of_set.min(axis=1, keepdims=True)
        v = first / first.sum(axis=1, keepdims=True)
        n = np.bincount(key)
        shares = np.stack([np.bincount(key, one) for one in v.T], axis=1) / n[:, None]
        squares = np.bincount(key, (v**2).sum(axis=1)) / n
        where = np.unique(key, return_index=True)[1]
        several = n >= 2
        return cls(items[ranking[where], columns[:, where]].T[several], shares[several], squares[several], n[several])

    @property
    def noise(self) -> FloatArray:
        """The expected error of the true shares, estimated without bias, ``(n_sets,)``."""
        return np.asarray((self.squares - (self.shares**2).sum(axis=1)) / (self.n - 1))

    def error(self, predicted: FloatArray) -> FloatArray:
        """Return Σ_s (q_s − f_s)² for predicted shares q, ``(n_sets, t)``."""
        return np.asarray(((predicted - self.shares) ** 2).sum(axis=1))


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
