"""A mixture of Bradley–Terry rewards learned from votes whose raters are known.

Every rater i belongs to one of k groups, and all votes of a rater come from the reward of their group:

    P(votes of i) = Σ_j π_j Π_{votes v of i} σ(±θ_j·d_v),   + if v is a vote for a, − for b.

Without rater ids every vote has a rater of its own; that is the mixture in ``baselines``. Vote shares alone do not
separate groups whose rewards differ by opposite amounts. A rater's votes on several pairs do.

Most raters cast few votes, so the groups' rewards are shrunk towards one reward θ_0 for everyone, not towards zero:

    max over θ, π   (1/n_votes) Σ_i log P(votes of i) − (λ/2) Σ_j |θ_j − θ_0|².

EM solves it. Integers stand for raters here; ids are removed where votes are read (``votes.raters``).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.special import log_expit, logsumexp, softmax

from pluralign.core.arrays import Array, FloatArray, IndexArray, Mask
from pluralign.core.random_streams import RATER_MIXTURE, random_stream
from pluralign.theory.logistic import sigmoid
from pluralign.training.bradley_terry import scores
from pluralign.training.pairs import gram

ROUNDS = 40
TOLERANCE = 1e-5
"""EM stops when a round gains less than this, in nats per vote."""
START_NOISE = 0.5
"""Spread of the random part of a member's reward differences at the start."""
SMALLEST_SHARE = 1e-12
SMALLEST_STEP = 1e-9


@dataclass(frozen=True, eq=False)
class VotesByRater:
    """Votes of every rater on every pair, as sparse matrices."""

    for_a: sparse.csr_matrix
    """Votes for response a, ``(n_raters, n_pairs)``. A tie is half a vote for either side."""
    for_b: sparse.csr_matrix
    """Votes for response b, ``(n_raters, n_pairs)``."""

    @classmethod
    def count(
        cls, rater: IndexArray, pair: IndexArray, chose_a: FloatArray, n_raters: int, n_pairs: int
    ) -> "VotesByRater":
        """Count votes.

        Args:
            rater: rater of each vote, ``(n_votes,)``.
            pair: pair of each vote, ``(n_votes,)``.
            chose_a: 1 for a vote for a, 0 for b, 1/2 for a tie, ``(n_votes,)``.
            n_raters: number of raters.
            n_pairs: number of pairs.
        """
        shape = (n_raters, n_pairs)
        sides = (chose_a, 1.0 - chose_a)
        return cls(*(sparse.csr_matrix((side, (rater, pair)), shape=shape) for side in sides))

    def __getitem__(self, pairs: Mask | npt.NDArray[np.int64]) -> "VotesByRater":
        """Return the votes on some pairs (a mask or indices). Raters keep their rows."""
        return VotesByRater(self.for_a[:, pairs], self.for_b[:, pairs])

    def of_raters(self, raters: Mask) -> "VotesByRater":
        """Return the votes of some raters. The others keep their rows, without votes."""
        sides = [(sparse.diags(raters.astype(np.float64)) @ side).tocsr() for side in (self.for_a, self.for_b)]
        for side in sides:
            side.eliminate_zeros()
        return VotesByRater(*sides)

    @property
    def n_raters(self) -> int:
        """Number of raters."""
        return int(self.for_a.shape[0])

    @property
    def total(self) -> float:
        """Number of votes."""
        return float(self.for_a.sum() + self.for_b.sum())

    @property
    def per_rater(self) -> FloatArray:
        """Number of votes of each rater, ``(n_raters,)``."""
        return np.asarray((self.for_a + self.for_b).sum(axis=1), dtype=np.float64).ravel()


@dataclass(frozen=True, eq=False)
class RaterMixture:
    """Rewards of groups of raters."""

    theta: FloatArray
    """``(d, k)``."""
    shares: FloatArray
    """π, the share of raters in each group, ``(k,)``."""
    objective: float
    """Penalised log likelihood per vote; the start with the highest value is kept."""


def log_likelihoods(votes: VotesByRater, difference: npt.ArrayLike) -> FloatArray:
    """Return Σ_{votes v of i} log σ(±Δr_vj), the log likelihood of each rater's votes per member, ``(n_raters, k)``.

    Args:
        votes: the votes.
        difference: Δr, the members' reward differences, ``(n_pairs, k)``.
    """
    z = np.asarray(difference, dtype=np.float64)
    return np.asarray(votes.for_a @ log_expit(z) + votes.for_b @ log_expit(-z))


def posteriors(log_likelihood: FloatArray, shares: FloatArray) -> FloatArray:
    """Return P(j | votes of i) ∝ π_j exp(log likelihood of i under j), ``(n_raters, k)``.

    Example:
        >>> posteriors(np.log([[0.9, 0.1], [0.5, 0.5]]), np.array([0.5, 0.5])).round(3)
        array([[0.9, 0.1],
               [0.5, 0.5]])
    """
    return np.asarray(softmax(log_likelihood + np.log(np.maximum(shares, SMALLEST_SHARE)), axis=1))


def predictive_log_loss(
    known: VotesByRater, known_difference: FloatArray, new: VotesByRater, new_difference: FloatArray, shares: FloatArray
) -> FloatArray:
    """Return the log loss of each rater's new votes given their known votes, summed per rater, ``(n_raters,)``.

    Each new vote is predicted by Σ_j P(j | known votes of i) σ(±Δr_j).

    Args:
        known: votes that the posterior over members uses.
        known_difference: reward differences of their pairs, ``(n_known_pairs, k)``.
        new: votes to predict, with the same raters.
        new_difference: reward differences of their pairs, ``(n_new_pairs, k)``.
        shares: π, ``(k,)``.
    """
    posterior = posteriors(log_likelihoods(known, known_difference), shares)
    loss = np.zeros(len(posterior))
    for side, soft in ((new.for_a, sigmoid(new_difference)), (new.for_b, sigmoid(-new_difference))):
        cells = side.tocoo()
        chance = np.einsum("nk,nk->n", posterior[cells.row], soft[cells.col])
        loss += np.bincount(cells.row, -cells.data * np.log(np.maximum(chance, SMALLEST_SHARE)), len(posterior))
    return loss


def fit_rater_mixture(
    x: Array,
    votes: VotesByRater,
    center: FloatArray,
    k: int,
    strength: float,
    *,
    seed: int = 0,
    restarts: int = 1,
    rounds: int = ROUNDS,
) -> RaterMixture:
    """Fit k rewards by EM. Of several random starts, the one with the highest objective is kept.

    Args:
        x: features of response a minus those of b, ``(n_pairs, d)``.
        votes: the votes on these pairs.
        center: θ_0, ``(d,)``.
        k: number of members.
        strength: λ, how strongly members are shrunk towards ``center``.
        seed: of the starts.
        restarts: number of random starts.
        rounds: maximum number of EM rounds per start.
    """
    fits = []
    for number in range(restarts):
        noise = random_stream(seed, RATER_MIXTURE, k, number).standard_normal((len(center), k))
        scale = START_NOISE / np.maximum(np.std(scores(x, noise), axis=0), 1e-12)
        fits.append(_expectation_maximisation(x, votes, center, center[:, None] + scale * noise, strength, rounds))
    return max(fits, key=lambda fit: fit.objective)


def _expectation_maximisation(
    x: Array, votes: VotesByRater, center: FloatArray, theta: FloatArray, strength: float, rounds: int
) -> RaterMixture:
    """Alternate E and M steps until a round gains less than ``TOLERANCE``.

    E: the posterior of rater i over members, from all votes of i.
    M: π_j is the mean posterior; each member's reward takes a Newton step on the votes that the posterior gives it.
    """
    n_votes, voters = votes.total, votes.per_rater > 0
    shares, objective = np.full(theta.shape[1], 1 / theta.shape[1]), -np.inf
    for number in range(rounds + 1):
        log_likelihood = log_likelihoods(votes, scores(x, theta))
        mixed = logsumexp(log_likelihood + np.log(np.maximum(shares, SMALLEST_SHARE)), axis=1)
        penalty = 0.5 * strength * float(np.sum((theta - center[:, None]) ** 2))
        last, objective = objective, float(mixed[voters].sum()) / n_votes - penalty
        if number == rounds or objective - last < TOLERANCE:
            break
        posterior = posteriors(log_likelihood, shares)
        shares = posterior[voters].mean(axis=0)
        for_a, for_b = np.asarray(votes.for_a.T @ posterior), np.asarray(votes.for_b.T @ posterior)
        theta = np.column_stack(
            [
                _newton_step(x, for_a[:, j] / n_votes, for_b[:, j] / n_votes, theta[:, j], center, strength)
                for j in range(len(shares))
            ]
        )
    return RaterMixture(theta, shares, objective)


def member_loss(
    theta: FloatArray, x: Array, for_a: FloatArray, for_b: FloatArray, center: FloatArray, strength: float
) -> float:
    """Return −Σ_i (a_i log σ(z_i) + b_i log σ(−z_i)) + λ/2 |θ − θ_0|², with z = x θ: the loss of one M step."""
    z = scores(x, theta)
    return float(-(for_a @ log_expit(z)) - for_b @ log_expit(-z) + 0.5 * strength * np.sum((theta - center) ** 2))


def _newton_step(
    x: Array, for_a: FloatArray, for_b: FloatArray, theta: FloatArray, center: FloatArray, strength: float
) -> FloatArray:
    """Lower ``member_loss`` by one Newton step, halved until it lowers the loss."""
    count, chance = for_a + for_b, sigmoid(scores(x, theta))
    gradient = (count * chance - for_a).astype(x.dtype) @ x + strength * (theta - center)
    hessian = gram(x, len(x) * count * chance * (1 - chance))
    hessian[np.diag_indices(len(theta))] += strength
    step = np.linalg.solve(hessian, gradient)
    loss = member_loss(theta, x, for_a, for_b, center, strength)
    while member_loss(theta - step, x, for_a, for_b, center, strength) > loss:
        step = step / 2
        if float(np.abs(step).max()) < SMALLEST_STEP:
            return theta
    return np.asarray(theta - step)
