"""What some choices of a person say about the person: one of the members, or nobody in particular.

A person either follows one member j, with prior probability λ α_j, or is *average*, with prior probability 1 − λ, and
chooses by one reward r_0 for everyone. Beside that, people differ in how decisive they are: reward differences are
divided by a personal factor T, with a prior around 1. With h a member or the average, z_h = Δr_j / β for a member and
Δr_0 for the average, the person chooses response a with probability

  q_hT = s/2 + (1 − s) σ(z_h / T),   s = 1 − (1 − slip)(1 − u),

where u is the undecided share for members and 0 for the average. The answer of Bayes' rule is never much worse than the
average alone: over any sequence of choices the total log loss is at most log 1/(1 − λ) larger.

A ranking has the Plackett–Luce probability of its stages in place of σ; see ``ranking_log_likelihood``.

``ChoiceModel`` holds λ, the slip and the spread of T. ``learning.raters`` chooses them.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import entr, gammaln, logsumexp, softmax, xlogy

from pluralign.core.arrays import FloatArray
from pluralign.theory.calibration import sigmoid
from pluralign.theory.social_choice import first_choices

FACTORS: FloatArray = np.array([0.35, 0.6, 1.0, 1.7, 3.0])
"""Values of T. A person with a small T decides clearly, one with a large T nearly at random."""
VOICES_SHARE = 0.5
"""λ if several rewards predict validation prompts better than one."""
SAFE_SHARE = 0.02
"""λ without evidence that members are people. The total log loss of a person's choices grows by at most .02."""
SMALLEST_SLIP = 0.02
"""Nobody is free of slips, so one choice never rules a member out."""
SPREAD = 0.35
"""Spread of log T where no rater ids are known: close to the fitted values in the log of experiments."""

INFORMATIVE_POOL = 400
"""The search for pairs that are informative together covers this many pairs: the most informative ones individually."""


@dataclass(frozen=True)
class ChoiceModel:
    """The prior over people, and their slips, for posteriors given choices."""

    people: float = SAFE_SHARE
    """λ, the prior probability that a person follows one member, from 0 to 1."""
    slip: float = SMALLEST_SLIP
    """Share of random choices, beside the undecided share."""
    spread: float = SPREAD
    """Standard deviation of log T. 0: everyone has T = 1."""
    source: str = "default"
    """Evidence for ``people``: ``raters`` (fitted to rater ids), ``voices`` (several rewards predict validation prompts
    better than one), or ``default`` (none)."""

    def problem(self) -> str | None:
        """Return what is wrong with the values, None if nothing is."""
        if not 0 <= self.people <= 1 or not 0 < self.slip <= 1 or not 0 <= self.spread < np.inf:
            return "people must be between 0 and 1, slip above 0 and at most 1, spread at least 0"
        return None

    @property
    def factor_prior(self) -> FloatArray:
        """Prior probabilities of ``FACTORS``: a discretised normal distribution of log T.

        Example:
            >>> ChoiceModel(spread=0.0).factor_prior
            array([0., 0., 1., 0., 0.])
        """
        if self.spread == 0:
            return np.asarray(FACTORS == 1.0, dtype=np.float64)
        return np.asarray(softmax(-0.5 * (np.log(FACTORS) / self.spread) ** 2))

    def prior(self, weights: npt.ArrayLike) -> FloatArray:
        """Return the prior of every member, and of the average in the last row, with each T, ``(k + 1, n_factors)``.

        Args:
            weights: α, ``(k,)``.

        Example:
            >>> ChoiceModel(people=0.5, spread=0.0).prior([0.6, 0.4]).sum(axis=1)
            array([0.3, 0.2, 0.5])
        """
        alpha = np.asarray(weights, dtype=np.float64)
        shares = np.append(self.people * alpha / alpha.sum(), 1 - self.people)
        return np.asarray(shares[:, None] * self.factor_prior)


def choice_probability(
    difference: npt.ArrayLike, temperature: npt.ArrayLike = 1.0, undecided: npt.ArrayLike = 0.0, slip: float = 0.0
) -> FloatArray:
    """Return the probability that a person who shares a reward's preferences chooses response a.

      q = s/2 + (1 − s) σ(Δr / β),   s = 1 − (1 − slip)(1 − u).

    Args:
        difference: reward of a less reward of b, any shape.
        temperature: β.
        undecided: u, the share of votes that no member explains.
        slip: share of other random choices.

    Example:
        >>> choice_probability(np.array([-1000.0, 0.0, 1000.0]), slip=0.1)
        array([0.05, 0.5 , 0.95])
    """
    random = 1 - (1 - slip) * (1 - np.asarray(undecided))
    return np.asarray(random / 2 + (1 - random) * sigmoid(np.asarray(difference) / temperature))


def person_chances(
    difference: FloatArray,
    average: FloatArray | None,
    weights: FloatArray,
    temperature: float,
    undecided: float,
    model: ChoiceModel,
) -> FloatArray:
    """Return q_hT: the probability of choosing a, by member (the average comes last) and T, ``(n, k + 1, n_factors)``.

    Args:
        difference: Δr of the members, ``(n, k)``.
        average: Δr_0 at temperature 1, ``(n,)``. None: the log odds of the ensemble's policy-level prediction.
        weights: α, ``(k,)``; used without ``average``.
        temperature: β.
        undecided: u.
        model: the slip.
    """
    z = difference / temperature
    if average is None:
        share = np.clip(choice_probability(z, undecided=undecided) @ (weights / weights.sum()), 1e-9, 1 - 1e-9)
        average = np.log(share) - np.log1p(-share)
    scores = np.column_stack([z, average])[:, :, None]
    at_random = np.append(np.full(z.shape[1], undecided), 0.0)[:, None]
    return choice_probability(scores, FACTORS, at_random, model.slip)


def ranking_log_likelihood(
    rewards: FloatArray,
    average: FloatArray | None,
    place: npt.ArrayLike,
    weights: FloatArray,
    temperature: float,
    undecided: float,
    model: ChoiceModel,
) -> FloatArray:
    """Return the log probability of one ranking by every kind of person and T, ``(k + 1, n_factors)``.

      log(s U + (1 − s) PL(ranking | z_h / T)),   U = Π_g n_g! / m!,

    where n_g of the m responses tie in place g, and s is that of the module. A random person gives each order with the
    same probability, so that a ranking with ties has U. For a ranking of two this is log q_hT of ``person_chances``.

    Args:
        rewards: of the members for the ranked responses, ``(m, k)``.
        average: r_0 at temperature 1, ``(m,)``. None: the log of the ensemble's predicted first choices among them.
        place: of each response, smaller is better; equal places tie, ``(m,)``.
        weights: α, ``(k,)``; used without ``average``.
        temperature: β.
        undecided: u.
        model: the slip.
    """
    m, k = rewards.shape
    if average is None:
        average = np.log(np.maximum(first_choices(rewards, weights / weights.sum(), temperature, undecided), 1e-9))
    scores = np.column_stack([rewards / temperature, average])[:, :, None] / FACTORS
    random = 1 - (1 - model.slip) * (1 - np.append(np.full(k, undecided), 0.0))[:, None]
    by_chance = gammaln(np.unique(place, return_counts=True)[1] + 1).sum() - gammaln(m + 1)
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log(random) + by_chance, np.log1p(-random) + plackett_luce(scores, place)))


NODES = np.arange(-24.0, 7.0, 0.2)
"""Nodes x of the trapezoid rule in ``tied_first``, whose integrand decays at both ends."""
FEW_TIED, FAR = 5, 150.0
"""Most tied responses, and largest |log ρ|, for the exact sum in ``tied_first``."""


def tied_first(log_ratio: npt.NDArray[np.floating]) -> tuple[FloatArray, FloatArray]:
    """Return log P(all tied responses come before all lower ones) under Plackett–Luce, and its gradient.

    A tie states no order, so its probability is the sum over all orders of the tied responses. Plackett–Luce is the
    order in which independent exponential clocks of rates e^z ring. With ρ_b the rate of a tied response over the total
    rate of the lower ones,

      P = ∫_0^∞ e^{−s} Π_b (1 − e^{−ρ_b s}) ds = ∫ e^{x − e^x} Π_b (1 − exp(−ρ_b e^x)) dx.

    Up to ``FEW_TIED`` responses take the exact sum (``_few_tied_first``), which is much faster. For more, the trapezoid
    rule over x is accurate to about 10 digits for up to 20 tied responses.

    Args:
        log_ratio: log ρ_b, ``(n_tied, …)``.

    Returns:
        log P, ``(…)``, and ∂ log P / ∂ log ρ_b, ``(n_tied, …)``.

    Example:
        >>> probability, _ = tied_first(np.zeros((2, 1)))  # A and B before C, all equally likely
        >>> np.exp(probability).round(6)
        array([0.333333])

    Reference: Yellott, "The relationship between Luce's choice axiom, Thurstone's theory of comparative judgment, and
    the double exponential distribution", J. Math. Psychology 15 (1977).
    """
    if len(log_ratio) <= FEW_TIED and np.abs(log_ratio).max(initial=0.0) < FAR:
        return _few_tied_first(np.exp(log_ratio, dtype=np.float64))
    x = NODES.reshape(-1, *[1] * log_ratio.ndim)
    scaled = np.exp(np.clip(log_ratio + x, -700, 700))
    terms = (x - np.exp(x))[:, 0] + np.log(-np.expm1(-scaled)).sum(axis=1)
    total = logsumexp(terms, axis=0)
    slope = np.where(scaled > 30, 0.0, scaled / np.expm1(np.minimum(scaled, 30)))
    gradient = np.einsum("x...,xb...->b...", np.exp(terms - total), slope)
    return np.asarray(total + np.log(NODES[1] - NODES[0])), np.asarray(gradient)


def _few_tied_first(rate: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return what ``tied_first`` returns, by the sum over the response that is first among the tied ones, and so on.

    With f(S) the probability that all of S come before the lower responses, whose total rate is 1, and f(∅) = 1:

      f(S) = Σ_{b in S} ρ_b / (1 + ρ_S) f(S \\ b),
      ∂_b f(S) = ρ_b / (1 + ρ_S) (f(S \\ b) − f(S)) + Σ_{c in S, c ≠ b} ρ_c / (1 + ρ_S) ∂_b f(S \\ c),

    where ∂_b is the derivative by log ρ_b.

    Args:
        rate: ρ, ``(n_tied, …)``.
    """
    n = len(rate)
    probability, slope = {0: np.ones(rate.shape[1:])}, {0: np.zeros_like(rate)}
    for tied in range(1, 1 << n):  # a set of responses, as bits
        members = [b for b in range(n) if tied >> b & 1]
        first = rate / (1 + rate[members].sum(axis=0))
        probability[tied] = sum(first[b] * probability[tied ^ 1 << b] for b in members)
        slope[tied] = sum(first[b] * slope[tied ^ 1 << b] for b in members)
        for b in members:
            slope[tied][b] += first[b] * (probability[tied ^ 1 << b] - probability[tied])
    return np.log(probability[tied]), slope[tied] / probability[tied]


def plackett_luce(scores: FloatArray, place: npt.ArrayLike) -> FloatArray:
    """Return the log probability of a ranking with ties under Plackett–Luce.

    Each place but the last has the factor of ``tied_first``, which is ρ/(1 + ρ) for one response.

    Args:
        scores: z, ``(m, …)``.
        place: of each response, smaller is better; equal places tie, ``(m,)``.

    Example:
        >>> np.exp(plackett_luce(np.log([[2.0], [1.0], [1.0]]), [0, 1, 2])).round(3)
        array([0.25])
        >>> np.exp(plackett_luce(np.zeros((3, 1)), [0, 0, 1])).round(3)
        array([0.333])
    """
    places, total = np.asarray(place), np.zeros(scores.shape[1:])
    for at in np.unique(places)[:-1]:
        log_ratio = scores[places == at] - logsumexp(scores[places > at], axis=0)
        total += -np.logaddexp(0.0, -log_ratio[0]) if len(log_ratio) == 1 else tied_first(log_ratio)[0]
    return np.asarray(total)


def choice_log_likelihood(chance: FloatArray, votes_a: npt.ArrayLike, votes_b: npt.ArrayLike) -> FloatArray:
    """Return n_a log q + n_b log(1 − q) of each pair, in the shape of ``chance``.

    Args:
        chance: q, strictly between 0 and 1, ``(n_pairs, …)``.
        votes_a: n_a, the person's votes for response a of each pair, ``(n_pairs,)``.
        votes_b: n_b, ``(n_pairs,)``.
    """
    shape = (-1, *[1] * (chance.ndim - 1))
    for_a, for_b = (np.asarray(votes, dtype=np.float64).reshape(shape) for votes in (votes_a, votes_b))
    return np.asarray(for_a * np.log(chance) + for_b * np.log1p(-chance))


def person_posterior(log_likelihood: FloatArray, prior: FloatArray) -> FloatArray:
    """Return P(h, T | choices) ∝ prior · exp(Σ_i ℓ_i), in the shape of ``prior``. Without choices it is the prior.

    Args:
        log_likelihood: ℓ of ``choice_log_likelihood``, ``(n_pairs, *prior.shape)``.
        prior: positive where a hypothesis is possible; any shape.

    Example:
        >>> chance = np.array([[0.9, 0.3]])
        >>> person_posterior(choice_log_likelihood(chance, [1], [0]), np.array([0.25, 0.75])).round(2)
        array([0.5, 0.5])
    """
    with np.errstate(divide="ignore"):
        log_prior = np.log(prior)
    return np.asarray(softmax(log_prior + log_likelihood.sum(axis=0)))


def predicted_choice(chance: FloatArray, posterior: FloatArray) -> FloatArray:
    """Return P(a) = Σ_h,T P(h, T | choices) q_hT of each pair, ``(n,)``."""
    return np.asarray(chance.reshape(len(chance), -1) @ posterior.ravel())


def information_gain(chance: FloatArray, posterior: FloatArray) -> FloatArray:
    """Return how much the choice on each pair is expected to say about h, in nats, ``(n,)``.

      I(H; C) = H(Σ_h P(h) q_h) − Σ_h P(h) H(q_h),   q_h = Σ_T P(T | h) q_hT.

    Args:
        chance: q_hT, ``(n, k + 1, n_factors)``.
        posterior: P(h, T), ``(k + 1, n_factors)``.

    Example:
        >>> chance = np.array([[[0.9], [0.1]], [[0.9], [0.9]]])
        >>> information_gain(chance, np.array([[0.5], [0.5]])).round(2)
        array([0.37, 0.  ])

    Reference: Lindley, "On a measure of the information provided by an experiment", Ann. Math. Statist. 27 (1956).
    """
    share = posterior.sum(axis=1)
    given = np.einsum("nht,ht->nh", chance, posterior / np.maximum(share, 1e-300)[:, None])
    entropy = [entr(q) + entr(1 - q) for q in (given @ share, given)]
    return np.asarray(np.maximum(entropy[0] - entropy[1] @ share, 0.0))


def most_informative(chance: FloatArray, weights: FloatArray, prompts: npt.ArrayLike, n: int) -> list[int]:
    """Choose the pairs whose answers are most informative about the user's member, at most one per prompt.

    Let q_ij be the probability that a user of member j's preferences chooses response a of pair i, and let the weights
    be the prior. The mutual information between the member J and the choices C_S on a set S of pairs is
    I(J; C_S) = H(C_S) − Σ_j α_j H(C_S | j). The search is greedy: each step adds the pair with the largest gain.

    Args:
        chance: q, ``(n_pairs, k)``, strictly between 0 and 1.
        weights: α, ``(k,)``.
        prompts: index of each pair's prompt, ``(n_pairs,)``.
        n: number of pairs to choose.

    Returns:
        The rows of the chosen pairs, in the order of choice.

    Example:
        >>> chance = np.array([[0.5, 0.5, 0.5], [0.9, 0.1, 0.1], [0.9, 0.1, 0.2], [0.5, 0.9, 0.1]])
        >>> most_informative(chance, np.full(3, 1 / 3), np.arange(4), 2)
        [1, 3]

    Reference: Lindley, "On a measure of the information provided by an experiment", Ann. Math. Statist. 27 (1956).
    """
    prompts = np.asarray(prompts)
    alone = _information(np.stack([chance, 1 - chance], axis=1), weights)
    pool = np.argsort(-alone, kind="stable")[:INFORMATIVE_POOL]
    likelihood = np.ones((1, len(weights)))  # of each sequence of choices so far, given each member
    chosen: list[int] = []
    while len(chosen) < n and len(pool):
        q = chance[pool, None, :]
        gain = _information(np.concatenate([likelihood * q, likelihood * (1 - q)], axis=1), weights)
        best = int(pool[int(gain.argmax())])
        chosen.append(best)
        likelihood = np.concatenate([likelihood * chance[best], likelihood * (1 - chance[best])])
        pool = pool[prompts[pool] != prompts[best]]
    return chosen


def _information(likelihood: FloatArray, weights: FloatArray) -> FloatArray:
    """I(J; C) from P(sequence of choices | member), ``(n, n_sequences, k)``."""
    total = likelihood @ weights
    return np.asarray((xlogy(likelihood, likelihood) @ weights).sum(axis=1) - xlogy(total, total).sum(axis=1))
