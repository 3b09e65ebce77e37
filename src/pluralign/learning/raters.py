"""A mixture of Bradley–Terry rewards learned from votes whose raters are known.

Every rater i belongs to one of k groups, and all votes of a rater come from the reward of their group:

    P(votes of i) = Σ_j π_j Π_{votes v of i} σ(±θ_j·d_v),   + if v is a vote for a, − for b.

Without rater ids every vote has a rater of its own; that is the mixture in ``baselines``. Vote shares alone do not
separate groups whose rewards differ by opposite amounts. A rater's votes on several pairs do.

Most raters cast few votes, so the groups' rewards are shrunk towards one reward θ_0 for everyone, not towards zero:

    max over θ, π   (1/n_votes) Σ_i log P(votes of i) − (λ/2) Σ_j |θ_j − θ_0|².

EM solves it. Integers stand for raters here; ids are removed where votes are read (``votes.raters``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.special import log_expit, logsumexp, softmax

from pluralign.core.arrays import Array, FloatArray, IndexArray, IntArray, Mask
from pluralign.core.random_streams import CHOICE_MODEL, RATER_MIXTURE, random_stream
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT
from pluralign.learning.bradley_terry import directions_with, fit_bradley_terry
from pluralign.learning.pairs import Members, Pairs, cap_disagreement, gram, scores
from pluralign.learning.task import AUTO_SIZES, FitTask, Fitted, history_sizes
from pluralign.learning.teacher import fit_teacher
from pluralign.theory.calibration import policy_prob, sigmoid, squared_error, with_undecided
from pluralign.theory.intervals import ENOUGH_CLUSTERS, paired_difference
from pluralign.theory.posterior import SAFE_SHARE, SMALLEST_SLIP, SPREAD, ChoiceModel, person_chances
from pluralign.theory.simplex import weights_and_undecided
from pluralign.votes.raters import RaterVotes

STRENGTHS = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
"""Strengths of shrinkage to choose from, strongest first."""
PATIENCE = 2
"""The search ends when this many strengths in turn are no better than the best one before them."""
RESTARTS = 4
ROUNDS, VALIDATION_ROUNDS = 40, 20
"""Maximum number of EM rounds of a final fit, and of a fit that serves a choice."""
TOLERANCE = 1e-5
"""EM stops when a round gains less than this, in nats per vote."""
MAX_FOLDS = 3
"""Validation folds that choose the strength."""
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
        sides, shape = (chose_a, 1.0 - chose_a), (n_raters, n_pairs)
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


# --- the fit: choose how far members may differ, fit the mixture of raters, fit the baselines


def training_votes(votes: RaterVotes, train: Mask) -> VotesByRater:
    """Return the votes on the training pairs, counted by rater.

    Args:
        votes: all votes.
        train: which pairs are trained on, ``(n_pairs,)``.
    """
    row, kept = np.cumsum(train) - 1, train[votes.pair]
    pair, chose_a = row[votes.pair[kept]], votes.chose_a[kept]
    return VotesByRater.count(votes.rater[kept], pair, chose_a, votes.n_raters, int(train.sum()))


def fit_raters(task: FitTask, votes: VotesByRater) -> Fitted:
    """Fit an ensemble to the votes of known raters on the training pairs, with every smaller size for its history."""
    options, keep = task.options, task.checkpoints.keep
    l2 = keep("raters-l2", float, lambda: fit_teacher(task.train, task.folds, (0.0,)).l2)
    search, size = RaterSearch(task, votes, l2), task.usual_size
    task.watcher.choosing("shrinkage")
    strength = keep("raters-strength", float, lambda: search.choose_strength(size))
    if options.k == "auto":
        task.watcher.choosing("k")
        size = keep("raters-size", int, lambda: search.choose_size(strength))
    task.watcher.choosing("steering")
    model = keep("raters-choices", ChoiceModel, lambda: search.choice_model(size, strength))
    problem, history = RaterProblem.of(task.train, votes, l2), []
    for k in history_sizes(size):
        fit = partial(problem.fit, k, strength, options.seed, RESTARTS, ROUNDS)
        mixture = keep(f"raters-{k}", Members, fit)
        shares = np.where(mixture.weights > NEGLIGIBLE_WEIGHT, mixture.weights, 0.0)
        free = replace(mixture, weights=shares / shares.sum())
        capped = [cap_disagreement(t, problem.center, problem.x, task.train.prob_a, task.bound) for t in free.theta.T]
        members = problem.in_features(replace(free, theta=np.column_stack(capped)), undecided=options.undecided)
        history.append(task.measured(members))
    unbounded = problem.in_features(free, undecided=options.undecided) if options.max_disagreement < 1 else None
    return Fitted(members, 1.0, task.baselines(), unbounded, history, target="raters", choice_model=model)


@dataclass(frozen=True, eq=False)
class RaterProblem:
    """Training pairs in the leading directions, with the votes of raters."""

    pairs: Pairs
    votes: VotesByRater
    axes: Array
    """``(d, m)``."""
    x: Array
    """``(n_pairs, m)``."""
    center: FloatArray
    """The soft-label Bradley–Terry reward of all votes, ``(m,)``."""

    @classmethod
    def of(cls, pairs: Pairs, votes: VotesByRater, l2: float) -> "RaterProblem":
        """Fit the shared reward and find the directions."""
        reward = fit_bradley_terry(pairs.difference, pairs.prob_a, l2)
        axes = directions_with(pairs.difference, reward)
        x = np.ascontiguousarray(pairs.difference @ axes)
        return cls(pairs, votes, axes, x, np.asarray(axes.T @ reward, dtype=np.float64))

    def fit(self, k: int, strength: float, seed: int, restarts: int = 1, rounds: int = VALIDATION_ROUNDS) -> Members:
        """Fit a mixture of k groups, in the leading directions."""
        options = {"seed": seed, "restarts": restarts, "rounds": rounds}
        return fit_rater_mixture(self.x, self.votes, self.center, k, strength, **options)

    def new_loss(self, fit: Members, pairs: Pairs, votes: VotesByRater) -> FloatArray:
        """Return the log loss of votes on other pairs, given those on these, summed per rater, ``(n_raters,)``."""
        new = scores(pairs.difference @ self.axes, fit.theta)
        return predictive_log_loss(self.votes, scores(self.x, fit.theta), votes, new, fit.weights)

    def in_features(self, fit: Members, *, undecided: bool) -> Members:
        """Return the members as rewards of all features, with the undecided share solved exactly.

        u minimises mean (u/2 + (1 − u) Σ_j π_j σ(Δr_j) − p)² over the training pairs; it is 0 without ``undecided``.
        """
        share = sigmoid(scores(self.x, fit.theta)) @ fit.weights
        _, u = weights_and_undecided(share[:, None], self.pairs.prob_a, undecided=undecided)
        return Members(np.asarray(self.axes @ fit.theta, dtype=np.float64), fit.weights, u)


@dataclass(frozen=True, eq=False)
class RaterSearch:
    """The choices of a fit with rater ids, made on validation prompts."""

    task: FitTask
    votes: VotesByRater
    """The raters' votes on the training pairs."""
    l2: float
    """Regularisation of the reward that members are shrunk to."""

    def _without(self, fold: Mask, raters: Mask | None = None) -> RaterProblem:
        """Return the problem of the other pairs, with the votes of some raters (default: all)."""
        votes = self.votes[~fold]
        return RaterProblem.of(self.task.train[~fold], votes if raters is None else votes.of_raters(raters), self.l2)

    def _losses(self, problem: RaterProblem, fold: Mask, k: int, strength: float) -> FloatArray:
        fit = problem.fit(k, strength, self.task.options.seed)
        return problem.new_loss(fit, self.task.train[fold], self.votes[fold])

    def choose_strength(self, k: int) -> float:
        """Return the strength of shrinkage with the lowest log loss on validation prompts."""
        problems = [(self._without(fold), fold) for fold in self.task.folds[:MAX_FOLDS]]
        losses: list[float] = []
        for strength in STRENGTHS:
            losses.append(sum(float(self._losses(problem, fold, k, strength).sum()) for problem, fold in problems))
            if len(losses) - 1 - int(np.argmin(losses)) == PATIENCE:
                break
        return STRENGTHS[int(np.argmin(losses))]

    def choose_size(self, strength: float) -> int:
        """Return the smallest k whose log loss on validation prompts is within one standard error of the best.

        The standard error is that of the difference to the best, over raters.
        """
        fold = self.task.folds[0]
        problem = self._without(fold)
        losses = {k: self._losses(problem, fold, k, strength) for k in AUTO_SIZES}
        return smallest_as_good(losses, self.votes[fold].per_rater)

    def choice_model(self, k: int, strength: float) -> ChoiceModel:
        """Fit the choice model to raters and prompts that the members of each validation fold were not learned from."""
        seed, folds, parts = self.task.options.seed, self.task.folds[:MAX_FOLDS], []
        for fold, held_out in zip(folds, rater_groups(self.votes.n_raters, len(folds) + 1, seed), strict=False):
            problem = self._without(fold, ~held_out)
            fit = problem.fit(k, strength, seed)
            theta = np.column_stack([fit.theta, problem.center])
            known, new = (self.votes[rows].of_raters(held_out) for rows in (~fold, fold))
            new_scores = scores(self.task.train[fold].difference @ problem.axes, theta)
            parts.append(NewPeople(known, scores(problem.x, theta), new, new_scores, fit.weights))
        return fit_choice_model(parts, seed)


def smallest_as_good(losses: Mapping[int, FloatArray], n_votes: FloatArray) -> int:
    """Return the smallest k whose total loss is within one standard error of the lowest.

    With d_i the difference of rater i's loss to that of the best k, n_i the number of their votes and d̄ = Σd / Σn, the
    standard error of Σd is √Σ(d_i − n_i d̄)².

    Args:
        losses: summed log loss of each rater by k, ``(n_raters,)`` each.
        n_votes: votes of each rater, ``(n_raters,)``.

    Example:
        >>> smallest_as_good({1: np.array([2.0, 2.0]), 2: np.array([1.0, 1.1])}, np.ones(2))
        2
    """
    best = min(losses, key=lambda k: float(losses[k].sum()))

    def as_good(k: int) -> bool:
        difference = losses[k] - losses[best]
        residual = difference - n_votes * difference.sum() / max(float(n_votes.sum()), 1.0)
        return float(difference.sum()) <= float(np.sqrt(np.sum(residual**2)))

    return min(k for k in losses if as_good(k))


# --- the mixture of raters by EM


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
) -> Members:
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
    return max(fits, key=lambda fit: fit[1])[0]


def _expectation_maximisation(
    x: Array, votes: VotesByRater, center: FloatArray, theta: FloatArray, strength: float, rounds: int
) -> tuple[Members, float]:
    """Alternate E and M steps until a round gains less than ``TOLERANCE``.

    E: the posterior of rater i over members, from all votes of i.
    M: π_j is the mean posterior; each member's reward takes a Newton step on the votes that the posterior gives it.

    Returns:
        The rewards with π as weights, and the objective: the penalised log likelihood per vote.
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
        sides = (np.asarray(side.T @ posterior).T / n_votes for side in (votes.for_a, votes.for_b))
        of_members = zip(*map(np.ascontiguousarray, sides), theta.T, strict=True)
        theta = np.column_stack([_newton_step(x, a, b, t, center, strength) for a, b, t in of_members])
    return Members(theta, shares), objective


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


# --- what a person's choices say about the person: the parameters of ``theory.posterior.ChoiceModel``


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
