"""What the choices of one rater say about the rater: the choice model of an ensemble, and a reward of their own.

Members are learned from raters in ``voices``: rater ids link the judgments of a person across prompts. Integers stand
for raters here; ids are removed where votes are read (``votes.raters``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.special import softmax

from pluralign.core.arrays import FloatArray, IndexArray, IntArray, Mask
from pluralign.core.random_streams import CHOICE_MODEL, random_stream
from pluralign.learning.pairs import Pairs
from pluralign.theory.calibration import sigmoid
from pluralign.theory.posterior import SAFE_SHARE, SMALLEST_SLIP, SPREAD, VOICES_SHARE, ChoiceModel, person_chances
from pluralign.votes.judgments import Judgments


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
        sides, shape = (chose_a, 1.0 - chose_a), (n_raters, n_pairs)
        return cls(*(sparse.csr_matrix((side, (rater, pair)), shape=shape) for side in sides))

    @classmethod
    def of(cls, judgments: Judgments, items: IndexArray, pairs: Pairs) -> "VotesByRater":
        """Count the votes on pairs that rankings hold: one on each two of their responses.

        Args:
            judgments: the rankings, with persons as raters.
            items: text of each of their entries, ``(n_entries,)``.
            pairs: the pairs. Votes on others are left out.
        """
        width = np.int64(len(pairs.inputs))
        keys = np.minimum(pairs.a, pairs.b) * width + np.maximum(pairs.a, pairs.b)
        order = np.argsort(keys, kind="stable")
        found: list[tuple[IntArray, ...]] = []
        for size in np.unique(judgments.sizes):
            rankings = np.flatnonzero(judgments.sizes == size)
            entries = judgments.start[rankings][:, None] + np.arange(size)
            first, second = np.triu_indices(size, k=1)
            better, worse = (items[entries[:, side]].astype(np.int64).ravel() for side in (first, second))
            tie = (judgments.place[entries[:, first]] == judgments.place[entries[:, second]]).ravel()
            key = np.minimum(better, worse) * width + np.maximum(better, worse)
            at = order[np.minimum(np.searchsorted(keys, key, sorter=order), len(keys) - 1)]
            there = keys[at] == key
            person = np.repeat(judgments.person[rankings], len(first))
            chose_a = np.where(tie, 0.5, pairs.a[at] == better)
            found.append((person[there], at[there], chose_a[there]))
        person, pair, chose_a = (np.concatenate(values) for values in zip(*found, strict=True))
        return cls.count(person, pair, chose_a, judgments.n_persons, len(pairs))

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


# --- what a person's choices say about the person: the parameters of ``theory.posterior.ChoiceModel``


CHOICES = (0, 5, 20)
"""Numbers of choices that votes are predicted from. Without 0, slips would make up for too sharp members."""
PEOPLE = (SAFE_SHARE, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97)
SLIPS = (SMALLEST_SLIP, 0.1, 0.2)
SPREADS = (0.0, 0.2, SPREAD, 0.5)
MIN_RATERS = 20
"""With fewer raters nothing is fitted."""


@dataclass(frozen=True, eq=False)
class NewPeople:
    """Raters and prompts that some members were not learned from."""

    known: VotesByRater
    """Votes of these raters on other prompts, from which choices are drawn."""
    known_scores: FloatArray
    """Reward differences of the members and, last, of one reward for everyone, ``(n_known_pairs, k + 1)``."""
    new: VotesByRater
    """Votes of the same raters to predict."""
    new_scores: FloatArray
    """``(n_new_pairs, k + 1)``."""
    weights: FloatArray
    """``(k,)``."""


def fit_choice_model(parts: Sequence[NewPeople], seed: int = 0) -> ChoiceModel:
    """Return the model with the lowest log loss of raters' votes, given 0, 5 and 20 of their choices on other prompts.

    Each rater counts once. The slip and the spread of T are chosen at λ = 1/2, then λ and the spread.

    Args:
        parts: members with raters and prompts that they were not learned from.
        seed: of the choices.
    """
    samples = [sample for part in parts for sample in _samples(part, seed)]
    if sum(len(np.unique(sample.rater)) for sample in samples) < MIN_RATERS * len(CHOICES):
        return ChoiceModel()
    losses: dict[ChoiceModel, float] = {}

    def try_all(slip: float, shares: Sequence[float]) -> None:
        models = [ChoiceModel(people, slip, spread, "raters") for people in shares for spread in SPREADS]
        found = np.mean([sample.log_losses(models, slip) for sample in samples], axis=0)
        losses.update(zip(models, found.tolist(), strict=True))

    for slip in SLIPS:
        try_all(slip, [VOICES_SHARE])
    try_all(min(losses, key=losses.__getitem__).slip, PEOPLE)
    return min(losses, key=losses.__getitem__)


@dataclass(frozen=True, eq=False)
class _Sample:
    """Votes to predict, each with its rater's choices."""

    part: NewPeople
    chosen: VotesByRater
    rater: IntArray
    """Of each vote, ``(n_votes,)``; the other fields likewise."""
    pair: IntArray
    for_a: Mask
    count: FloatArray
    """1, or 1/2 for either side of a tie."""

    def log_losses(self, models: Sequence[ChoiceModel], slip: float) -> FloatArray:
        """Return the mean over raters of the mean log loss of their votes under each model with this slip."""
        part = self.part

        def chances(z: FloatArray) -> FloatArray:  # of a vote for a, under every hypothesis
            model = ChoiceModel(slip=slip)
            return person_chances(z[:, :-1], z[:, -1], part.weights, 1.0, 0.0, model).reshape(len(z), -1)

        known, new = chances(part.known_scores), chances(part.new_scores)[self.pair]
        choices = np.asarray(self.chosen.for_a @ np.log(known) + self.chosen.for_b @ np.log1p(-known))
        votes = np.where(self.for_a[:, None], new, 1 - new)
        counts = np.bincount(self.rater, self.count, minlength=len(choices))

        def log_loss(model: ChoiceModel) -> float:
            with np.errstate(divide="ignore"):
                log_prior = np.log(model.prior(part.weights)).ravel()
            posterior = softmax(log_prior + choices, axis=1)
            loss = -self.count * np.log(np.einsum("nh,nh->n", posterior[self.rater], votes))
            total = np.bincount(self.rater, loss, minlength=len(choices))
            return float((total[counts > 0] / counts[counts > 0]).mean())

        return np.array([log_loss(model) for model in models])


def _samples(part: NewPeople, seed: int) -> Iterator[_Sample]:
    """Yield the votes to predict from each number of choices; raters without choices are left out."""
    voted = (part.known.for_a + part.known.for_b).tocsr()
    sides = part.new.for_a.tocoo(), part.new.for_b.tocoo()
    rater, pair, count = (np.concatenate([getattr(side, name) for side in sides]) for name in ("row", "col", "data"))
    for_a = np.arange(len(rater)) < sides[0].nnz
    kept = (np.diff(voted.indptr) > 0)[rater] & (count > 0)
    if not kept.any():
        return
    for m in CHOICES:
        drawn = _draw(voted, m, seed)
        chosen = VotesByRater(part.known.for_a.multiply(drawn).tocsr(), part.known.for_b.multiply(drawn).tocsr())
        yield _Sample(part, chosen, rater[kept].astype(np.int64), pair[kept].astype(np.int64), for_a[kept], count[kept])


def _draw(voted: sparse.csr_matrix, m: int, seed: int) -> sparse.csr_matrix:
    """Return a mask of at most m random pairs per rater, ``(n_raters, n_pairs)``."""
    random = random_stream(seed, CHOICE_MODEL)
    picked = [random.permutation(columns)[:m] for columns in np.split(voted.indices, voted.indptr[1:-1])]
    row = np.repeat(np.arange(len(picked)), [len(columns) for columns in picked])
    return sparse.csr_matrix((np.ones(len(row)), (row, np.concatenate(picked))), shape=voted.shape)


def rater_groups(n_raters: int, n_groups: int, seed: int) -> list[Mask]:
    """Return random groups of raters, one mask each, ``(n_raters,)``."""
    group = random_stream(seed, CHOICE_MODEL, 1).integers(n_groups, size=n_raters)
    return [group == number for number in range(n_groups)]


# --- a Bradley–Terry reward fitted to the few choices of one rater, in the space of the choices (the dual)


NEWTON_STEPS = 50
NEWTON_TOLERANCE = 1e-9


def fit_rater_reward(gram: FloatArray, chose_a: npt.ArrayLike, variances: npt.ArrayLike) -> FloatArray:
    """Return the dual coefficients of the reward that fits the choices best, for each prior variance.

    With the prior θ ~ N(0, v I) the reward θ·x minimises

      Σ_i [log(1 + exp(z_i)) − y_i z_i] + |θ|² / 2v,   z_i = θ · d_i,

    for the feature differences d_i = x_a − x_b. The minimum is θ = v Σ_i c_i d_i with c_i = y_i − σ(z_i), so
    z = v G c with the Gram matrix G_il = d_i · d_l. On another pair with difference d the reward difference is
    v Σ_i c_i d_i · d.

    Args:
        gram: G, ``(n, n)``.
        chose_a: y, 1 for response a, 0 for b, 1/2 for a tie, ``(n,)``.
        variances: v, ``(n_variances,)``.

    Returns:
        v c, ``(n_variances, n)``.

    Example:
        >>> coefficients = fit_rater_reward(np.array([[4.0]]), [1.0], [0.5])
        >>> z = 4.0 * coefficients[0, 0]
        >>> bool(np.isclose(z, 4.0 * 0.5 * (1 - sigmoid(z))))
        True

    Reference: Newton's method as in Rasmussen and Williams, Gaussian Processes for Machine Learning, Algorithm 3.1.
    """
    y, v = np.asarray(chose_a, dtype=np.float64), np.asarray(variances, dtype=np.float64)
    kernels = v[:, None, None] * gram
    n = len(y)
    z, dual = np.zeros((len(v), n)), np.zeros((len(v), n))
    for _ in range(NEWTON_STEPS):
        p = sigmoid(z)
        curvature = p * (1 - p)
        root = np.sqrt(curvature)
        target = curvature * z + (y - p)
        system = np.eye(n) + root[:, :, None] * kernels * root[:, None, :]
        right = root * np.einsum("sij,sj->si", kernels, target)
        dual = target - root * np.linalg.solve(system, right[:, :, None])[:, :, 0]
        last, z = z, np.einsum("sij,sj->si", kernels, dual)
        if not n or np.max(np.abs(z - last)) < NEWTON_TOLERANCE * (1 + np.max(np.abs(z))):
            break
    return v[:, None] * dual
