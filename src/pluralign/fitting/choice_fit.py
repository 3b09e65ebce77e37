"""Fit what a person's choices say about the person: the parameters of ``theory.posterior.ChoiceModel``.

With rater ids they are fitted to new people on new prompts: raters and prompts that the members were not learned from.
Vote shares alone cannot show whether members are people. Then ``people`` stays so small that choices cannot do harm,
unless several rewards predict the votes of validation prompts better than one reward does. Test votes are never read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse
from scipy.special import softmax

from pluralign.core.arrays import FloatArray, IntArray, Mask
from pluralign.core.random_streams import CHOICE_MODEL, random_stream
from pluralign.fitting.task import Members
from pluralign.theory.calibration import policy_prob, squared_error, with_undecided
from pluralign.theory.intervals import ENOUGH_CLUSTERS, paired_difference
from pluralign.theory.posterior import SAFE_SHARE, SMALLEST_SLIP, SPREAD, ChoiceModel, person_chances
from pluralign.training.bradley_terry import scores
from pluralign.training.pairs import Pairs
from pluralign.training.rater_mixture import VotesByRater

VOICES_SHARE = 0.5
"""λ if several rewards predict validation prompts better than one."""
ROUNDING = 1e-9
"""Differences of squared errors below it are rounding errors."""
CHOICES = (0, 5, 20)
"""Numbers of choices that votes are predicted from. Without 0, slips would make up for too sharp members."""
PEOPLE = (SAFE_SHARE, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97)
SLIPS = (SMALLEST_SLIP, 0.1, 0.2)
SPREADS = (0.0, 0.2, SPREAD, 0.5)
MIN_RATERS = 20
"""With fewer raters nothing is fitted."""


def model_from_voices(members: Members, temperature: float, single: FloatArray, check: Pairs) -> ChoiceModel:
    """Return the model of an ensemble learned from vote shares alone.

    Args:
        members: fitted without the validation prompts.
        temperature: β of its policy-level reading.
        single: shares that one reward, fitted without the validation prompts, predicts for them, ``(n,)``.
        check: the validation pairs.
    """
    share = policy_prob(scores(check.difference, members.theta), members.weights, temperature)
    ours = squared_error(with_undecided(share, members.undecided), check.prob_a)
    gain = paired_difference(ours, squared_error(single, check.prob_a), check.prompt, min_clusters=ENOUGH_CLUSTERS)
    if np.isfinite(gain.high) and gain.high < -ROUNDING:
        return ChoiceModel(people=VOICES_SHARE, source="voices")
    return ChoiceModel()


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
    if sum(sample.n_raters for sample in samples) < MIN_RATERS * len(CHOICES):
        return ChoiceModel()
    start = ChoiceModel(people=VOICES_SHARE, source="raters")
    losses: dict[ChoiceModel, float] = {}
    for slip in SLIPS:
        scored = [sample.score(slip) for sample in samples]
        for spread in SPREADS:
            model = replace(start, slip=slip, spread=spread)
            losses[model] = _mean_loss(scored, model)
    slip = min(losses, key=losses.__getitem__).slip
    scored = [sample.score(slip) for sample in samples]
    for people in PEOPLE:
        for spread in SPREADS:
            model = replace(start, people=people, slip=slip, spread=spread)
            losses[model] = _mean_loss(scored, model)
    return min(losses, key=losses.__getitem__)


@dataclass(frozen=True, eq=False)
class _Scored:
    """Log likelihoods of choices and probabilities of votes under every hypothesis, for one slip."""

    choices: FloatArray
    """Summed over the choices of each rater, ``(n_raters, n_hypotheses)``."""
    votes: FloatArray
    """Probability of each vote to predict, ``(n_votes, n_hypotheses)``."""
    rater: IntArray
    """``(n_votes,)``."""
    count: FloatArray
    """1, or 1/2 for either side of a tie, ``(n_votes,)``."""
    weights: FloatArray

    def log_loss(self, model: ChoiceModel) -> float:
        """Return the mean over raters of the mean log loss of their votes."""
        with np.errstate(divide="ignore"):
            log_prior = np.log(model.prior(self.weights)).ravel()
        posterior = softmax(log_prior + self.choices, axis=1)
        loss = -self.count * np.log(np.einsum("nh,nh->n", posterior[self.rater], self.votes))
        counts = np.bincount(self.rater, self.count, minlength=len(posterior))
        total = np.bincount(self.rater, loss, minlength=len(posterior))
        return float((total[counts > 0] / counts[counts > 0]).mean())


def _mean_loss(scored: Sequence[_Scored], model: ChoiceModel) -> float:
    return sum(one.log_loss(model) for one in scored) / len(scored)


@dataclass(frozen=True, eq=False)
class _Sample:
    """Votes to predict, each with its rater's choices."""

    part: NewPeople
    chosen: VotesByRater
    rater: IntArray
    pair: IntArray
    for_a: Mask
    count: FloatArray

    @property
    def n_raters(self) -> int:
        return len(np.unique(self.rater))

    def score(self, slip: float) -> _Scored:
        """Score choices and votes under every hypothesis."""
        part, model = self.part, ChoiceModel(slip=slip)

        def chances(z: FloatArray) -> FloatArray:
            return person_chances(z[:, :-1], z[:, -1], part.weights, 1.0, 0.0, model).reshape(len(z), -1)

        known, new = chances(part.known_scores), chances(part.new_scores)[self.pair]
        choices = self.chosen.for_a @ np.log(known) + self.chosen.for_b @ np.log1p(-known)
        votes = np.where(self.for_a[:, None], new, 1 - new)
        return _Scored(np.asarray(choices), votes, self.rater, self.count, part.weights)


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
