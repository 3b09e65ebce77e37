"""Joint ensembles: k members trained together on the share that their votes predict. The default method, ours.

The vote 1[Δr > 0] has no gradient, so training replaces it by σ(Δr/τ) and lowers τ step by step:

    min over θ, α, u   mean_i (u/2 + Σ_j α_j σ(θ_j·d_i / τ) − t_i)²,   τ from 0.2 to 0.04, each θ_j·d of unit spread,

with positive α_j and u of sum 1: u is the undecided share, the votes that no member explains. The weights and u of the
hard votes are then solved exactly. With a few thousand noisy pairs, these choices matter:

* **an undecided share**. Without it, an ensemble that must predict ½ spends members on near-opposites r and −r;
* **damped differences** d̃ = d·√((1+c)/(1+c|d|²/mean|d|²)). They change the teacher but no vote, since a vote does not
  depend on a positive factor;
* **a teacher**. The target t blends the share it predicts, which has no vote noise, with the raw votes;
* **few directions**: the leading principal ones and the teacher's own;
* **rotated pairs** cos φ·d̃ + sin φ·d̃' of two pairs, labelled by the teacher: nobody voted on them;
* **the mean of many short starts**: many sets of members are equally good on the training pairs. Each start finds
  another one, and the one with the lowest training error fits noise. Members of all starts are matched and averaged;
* **a penalty on disagreement**: a member whose disagreement exceeds a bound is penalised, and every member keeps some
  correlation with the teacher.

docs/log.md has the measured effect of each. This is the fifth file of the joint fit: ``choose`` calls ``train_joint``.
``policy_level`` trains members for the policy level, with the same ``ShareLoss``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import Array, FloatArray
from pluralign.core.random_streams import JOINT, random_stream
from pluralign.learning.bradley_terry import Teacher
from pluralign.learning.pairs import Members, Pairs, cap_disagreement, hard_votes, matched_orders, scores
from pluralign.theory.simplex import weights_and_undecided

SingleArray: TypeAlias = npt.NDArray[np.float32]
Batch: TypeAlias = tuple[SingleArray, SingleArray, SingleArray]
"""Differences d, ``(n, m)``; the share t that weighted votes should match, ``(n, n_ensembles)`` or ``(n, 1)``; and the
share p of people taken to prefer a, ``(n,)``."""

STARTS, FEW_STARTS = 32, 8
"""Starts of the ensemble, and of fits that only serve a choice, a comparison or the history."""
STEPS = 250
BATCH = 1024
"""Pairs per step, rotated ones included."""
FEW_DIRECTIONS = 4
"""Number of leading directions of the targets that use few."""
MATCHED_PAIRS = 2048
"""Members are matched on at most this many pairs."""
LEARNING_RATE = 0.05
TEMPERATURES = (0.2, 0.04)
"""τ at the first and at the last step."""
ROTATED_SHARE = 0.6
"""Share of rotated pairs in a batch."""
SPREAD_L2 = 0.003
TEACHER_CORRELATION = 0.1
"""Minimum correlation of a member's reward differences with the teacher's."""
DISAGREEMENT_PENALTY = 0.3
"""Penalty per unit of disagreement above the bound."""
NO_SPREAD = 1e-6
"""A reward has no spread if its mean square is below this share of that of a random direction."""


class ShareLoss:
    """The loss of ensembles whose weighted votes should match shares, and its gradients. Both levels train with it.

    For votes σ_ij = σ(θ_j·x_i/τ) of k members with weights α and an undecided share u, Σ_j α_j + u = 1, it is

        Σ_i w_i (u/2 + Σ_j α_j σ_ij − t_i)² + c/k Σ_j max(0, D_j − bound),
        D_j = Σ_i v_i (p_i (1 − σ_ij) + (1 − p_i) σ_ij),

    the squared error of the weighted share, plus the penalty c on disagreement with people above the bound. Votes are
    given as V = 2σ − 1 = tanh(z/2) (centred: ½ + ½ Σ_j α_j V_ij holds for every u), or as V = σ if u = 0. Several
    ensembles are computed in one pass. Large arrays are reused: results are valid until the next call.

    Args:
        weight: w of each ensemble, ``(n, n_ensembles)``; v is their mean.
        sizes: number of members of each ensemble.
        centred: whether votes are given as 2σ − 1.
        bound: disagreement above which a member is penalised, for centred votes; None for no penalty.
    """

    def __init__(
        self, weight: Array, sizes: Sequence[int], *, centred: bool = False, bound: float | None = None
    ) -> None:
        n, n_members, n_ensembles, dtype = len(weight), sum(sizes), len(sizes), weight.dtype
        self.weight, self.common, self.bound = weight, weight.mean(axis=1), bound
        self.offset, self.scale = (0.5, 0.5) if centred else (0.0, 1.0)
        self.penalty = np.repeat(dtype.type(DISAGREEMENT_PENALTY) / np.array(sizes, dtype=dtype), sizes)
        self.members, self.ensemble = np.arange(n_members), np.repeat(np.arange(n_ensembles), sizes)
        self.blocks = np.zeros((n_members, n_ensembles), dtype=dtype)
        columns = n_ensembles + (bound is not None)
        self.factors, self.coefficients = np.empty((n, columns), dtype), np.zeros((columns, n_members), dtype)
        self.error, self.slope = self.factors[:, :n_ensembles], np.empty((n, n_members), dtype)

    def errors(self, votes: Array, weights: Array, target: Array) -> Array:
        """Return the error of each ensemble's share, u/2 + Σ_j α_j σ_ij − t_i, ``(n, n_ensembles)``.

        Args:
            votes: V of the members of all ensembles, one ensemble after the other, ``(n, n_members)``.
            weights: α, ``(n_members,)``.
            target: t, the share that weighted votes should match, ``(n, n_ensembles)`` or ``(n, 1)``.
        """
        self.blocks[self.members, self.ensemble] = weights  # makes a sum over members one matrix product
        np.matmul(votes, self.scale * self.blocks, out=self.error)
        self.error += self.offset - target
        return self.error

    def gradients(self, votes: Array, share: Array | None = None) -> tuple[Array, Array]:
        """Return the gradients in σ, ``(n, n_members)``, and in α up to a constant, ``(n_members,)``.

        Args:
            votes: V, after the call of ``errors``, whose result this overwrites.
            share: p, the share of people taken to prefer a, ``(n,)``; only for a penalty.
        """
        self.error *= self.weight
        if share is not None:
            self.factors[:, -1] = (1 - 2 * share) * self.common
        moments = self.factors.T @ votes
        self.coefficients[: self.error.shape[1]] = 2 * self.blocks.T
        if share is not None:
            self.coefficients[-1] = self.penalty * (0.5 + 0.5 * moments[-1] > self.bound)
        np.matmul(self.factors, self.coefficients, out=self.slope)
        return self.slope, 2 * self.scale * moments[self.ensemble, self.members]


Source: TypeAlias = Literal["teacher", "mixture", "votes"]
"""The one reward of the teacher, its mixture of rewards, or nothing but the raw votes."""


@dataclass(frozen=True)
class Blend:
    """What members learn from: (1 − s) × the share that a teacher predicts + s × the share of votes."""

    source: Source
    vote_share: float
    """s; 1 for ``votes``."""
    directions: int | None = None
    """Number of leading directions that members use beside that of the teacher; None for all of the teacher's axes."""


FROM_TEACHER = Blend("teacher", 0.3, FEW_DIRECTIONS)
FROM_MIXTURE = Blend("mixture", 0.3)
FROM_VOTES = Blend("votes", 1.0)
TARGETS = (FROM_TEACHER, FROM_VOTES)
TRAINED_TARGETS = (FROM_TEACHER, Blend("mixture", 0.0), FROM_MIXTURE, FROM_VOTES)
"""The targets that validation prompts choose from: on frozen features the usual one first, and on trained features."""
NAMED_TARGETS = {"teacher": FROM_TEACHER, "mixture": FROM_MIXTURE, "votes": FROM_VOTES}
"""The targets by the name of ``--target``."""


def train_joint(
    pairs: Pairs,
    teacher: Teacher,
    k: int,
    blend: Blend,
    *,
    seed: int = 0,
    bound: float = 1.0,
    starts: int = STARTS,
    undecided: bool = True,
) -> Members:
    """Train k members for hard votes.

    Args:
        pairs: the training pairs.
        teacher: the rewards that provide most of the target.
        k: number of members.
        blend: the target.
        seed: of starts and batches.
        bound: maximum training disagreement of a member; 1 sets no bound.
        starts: number of random starts. Their matched members are averaged.
        undecided: whether to learn an undecided share u; else u = 0, the paper's form.
    """
    problem = _VoteProblem(pairs, teacher, blend)
    anchor, x = problem.guide.astype(np.float64), problem.x
    theta = _mean_of(_train_ensembles(problem, k, starts, bound, seed, undecided), x)
    # The penalty keeps members near the bound; the cap enforces it.
    theta = np.column_stack([cap_disagreement(one, anchor, x, pairs.prob_a, bound) for one in theta.T])
    weights, rest = weights_and_undecided(hard_votes(x, theta), problem.target, undecided=undecided)
    # Also valid for undamped differences: damping changes no vote.
    return Members(np.asarray(problem.axes @ theta, dtype=np.float64), weights, rest)


def _mean_of(fits: Sequence[FloatArray], x: SingleArray) -> FloatArray:
    """Return the mean of the matched members of several fits, scaled to unit spread, ``(m, k)``."""
    rows = x[:: -(-len(x) // MATCHED_PAIRS)]
    orders = matched_orders([rows @ theta for theta in fits])
    mean = np.mean([theta[:, order] for theta, order in zip(fits, orders, strict=True)], axis=0)
    return _UnitSpread(x).scaled(mean.astype(np.float32)).astype(np.float64)


# --- training ---------------------------------------------------------------------------------------------------------


class _VoteProblem:
    """What all starts are trained on, in single precision: pairs, and the targets of pairs and of rotated pairs."""

    def __init__(self, pairs: Pairs, teacher: Teacher, blend: Blend) -> None:
        damped = teacher.damp(pairs.difference)
        self.axes = teacher.leading_axes(blend.directions)
        """The directions that members use, ``(d, m)``."""
        self.x = np.ascontiguousarray(damped @ self.axes, dtype=np.float32)
        """Damped differences in these directions, ``(n, m)``."""
        self.guide = (self.axes.T @ teacher.theta).astype(np.float32)
        """The one reward of the teacher, ``(m,)``."""
        self.blend, self.weights = blend, teacher.voice_weights.astype(np.float32)
        one = teacher.theta[:, None]
        rewards = scores(damped, np.column_stack([one, teacher.voices]) if blend.source == "mixture" else one)
        self.rewards = np.ascontiguousarray(rewards, dtype=np.float32)
        """Reward differences of the one reward, then of the mixture where it is needed, ``(n, 1 or 1 + n_voices)``."""
        self.share, taught = self.shares(self.rewards.copy())
        self.target = ((1 - blend.vote_share) * taught + blend.vote_share * pairs.prob_a).astype(np.float32)

    def shares(self, rewards: SingleArray) -> tuple[SingleArray, SingleArray]:
        """Return the share that the one reward predicts, and the one that members learn from without votes, ``(n,)``.

        Overwrites ``rewards``. The second one is also the target of rotated pairs, on which nobody voted.
        """
        rewards *= np.float32(0.5)
        np.tanh(rewards, out=rewards)
        rewards *= np.float32(0.5)
        rewards += np.float32(0.5)  # σ(x) = ½ + ½ tanh(x/2)
        one = rewards[:, 0]
        return one, rewards[:, 1:] @ self.weights if self.blend.source == "mixture" else one


def _train_ensembles(
    problem: _VoteProblem, k: int, starts: int, bound: float, seed: int, undecided: bool
) -> list[FloatArray]:
    """Train k members from each start, all in one pass; return the members of each, ``(m, k)``."""
    rng, sizes = random_stream(seed, JOINT), [k] * starts
    space = _UnitSpread(problem.x)
    teacher = space.scaled(problem.guide[:, None])
    # The first members are the teacher plus random directions of equal strength.
    theta = rng.standard_normal((len(teacher), k * starts), dtype=np.float32)
    theta = space.scaled(teacher + space.scaled(theta - teacher * space.correlation(theta, teacher)))
    # The logits of the members' weights, then that of the undecided share of each start: a quarter at first.
    logits = np.zeros(theta.shape[1] + starts, dtype=np.float32)
    logits[theta.shape[1] :] = np.log(k / 3) if undecided else -np.inf
    theta_adam, logit_adam = Adam(theta), Adam(logits)
    batches = _Batches(problem, rng)
    gradients = VoteGradients(np.tile(batches.weight[:, None], starts), sizes, bound)
    for step in range(STEPS):
        done = step / max(STEPS - 1, 1)
        tau = np.float32(TEMPERATURES[0] * (TEMPERATURES[1] / TEMPERATURES[0]) ** done)
        rate = LEARNING_RATE * (0.51 + 0.49 * np.cos(np.pi * done))
        theta_gradient, logit_gradient = gradients(batches.draw(), theta, logits, tau)
        tangent = space.tangent(theta_gradient, theta, np.float32(2 * SPREAD_L2 / k))
        theta = space.scaled(theta - theta_adam.step(tangent, rate))
        logits = logits - logit_adam.step(logit_gradient, rate)
        if bound < 1:
            theta = space.correlated(theta, teacher, np.float32(TEACHER_CORRELATION))
    return np.split(theta.astype(np.float64), starts, axis=1)


class _UnitSpread:
    """The space of rewards whose differences have mean square 1: θ'Cθ = 1 with C = mean_i d_i d_i'."""

    def __init__(self, x: SingleArray) -> None:
        self.covariance = x.T @ x / len(x)
        self.least = np.float32(NO_SPREAD * np.trace(self.covariance) / len(self.covariance) or 1.0)
        """Least mean square of the differences of a reward with |θ| = 1."""

    def scaled(self, theta: SingleArray) -> SingleArray:
        """Return each column of ``(m, k)`` scaled to unit spread. A reward without spread is not blown up."""
        square = np.einsum("mk,mk->k", theta, self.covariance @ theta)
        square = np.maximum(square, self.least * np.einsum("mk,mk->k", theta, theta))
        return np.asarray(theta / np.sqrt(np.maximum(square, 1e-12)), dtype=np.float32)

    def correlation(self, theta: SingleArray, teacher: SingleArray) -> SingleArray:
        """Return the correlation of each column with the teacher ``(m, 1)``, for columns of unit spread, ``(k,)``."""
        return np.asarray((self.covariance @ teacher)[:, 0] @ theta)

    def tangent(self, gradient: SingleArray, theta: SingleArray, l2: np.float32) -> SingleArray:
        """Return the gradient plus that of l2/2 |θ|², without the part that would change the spread."""
        normal = self.covariance @ theta
        gradient -= normal * np.einsum("mk,mk->k", theta, gradient)
        gradient += l2 * (theta - normal * np.einsum("mk,mk->k", theta, theta))
        return gradient

    def correlated(self, theta: SingleArray, teacher: SingleArray, least: np.float32) -> SingleArray:
        """Return members moved towards the teacher where their correlation with it is below ``least``."""
        correlation = self.correlation(theta, teacher)
        aside = self.scaled(theta - teacher * correlation)
        return np.where(correlation < least, least * teacher + np.sqrt(1 - least**2) * aside, theta)


class _Batches:
    """Batches of pairs and rotated pairs. Large arrays are reused in every step to save allocations.

    Args:
        problem: the pairs.
        rng: draws pairs and angles.
    """

    def __init__(self, problem: _VoteProblem, rng: np.random.Generator) -> None:
        self.problem, self.rng = problem, rng
        n, m = problem.x.shape
        # Rotated pairs have no votes, so votes alone are learned without them.
        self.n_rotated = 0 if problem.blend.vote_share == 1 else int(BATCH * ROTATED_SHARE)
        n_drawn = BATCH - self.n_rotated
        self.resample = n > n_drawn  # else each pair is in every batch once, with more weight
        self.rows = np.arange(min(n, n_drawn))
        self.batch = np.empty((len(self.rows) + self.n_rotated, m), dtype=np.float32)
        self.other = np.empty((self.n_rotated, m), dtype=np.float32)
        self.drawn, self.rotated = self.batch[: len(self.rows)], self.batch[len(self.rows) :]
        self.drawn[:] = problem.x[self.rows]
        self.weight = np.full(len(self.batch), 1 / BATCH, dtype=np.float32)
        self.weight[: len(self.rows)] *= n_drawn / len(self.rows)

    def draw(self) -> Batch:
        """Return a batch that is valid until the next call."""
        problem, n = self.problem, len(self.problem.x)
        if self.resample:
            self.rows = self.rng.integers(n, size=len(self.drawn))
            np.take(problem.x, self.rows, axis=0, out=self.drawn, mode="clip")
        target, share = problem.target[self.rows], problem.share[self.rows]
        if self.n_rotated:
            first, second = self.rng.integers(n, size=(2, self.n_rotated))
            angle = self.rng.random((self.n_rotated, 1), dtype=np.float32) * np.float32(2 * np.pi)
            np.take(problem.x, first, axis=0, out=self.rotated, mode="clip")
            np.take(problem.x, second, axis=0, out=self.other, mode="clip")
            cosine, sine = np.cos(angle), np.sin(angle)
            self.rotated *= cosine
            self.rotated += np.multiply(self.other, sine, out=self.other)
            one, taught = problem.shares(problem.rewards[first] * cosine + problem.rewards[second] * sine)
            target, share = np.concatenate([target, taught]), np.concatenate([share, one])
        return self.batch, target[:, None], share


class VoteGradients:
    """Gradients of ``ShareLoss`` for soft votes σ(θ_j·x_i/τ) in θ and in the logits of the weights, in one pass.

    Args:
        weight: w of each ensemble, ``(n, n_ensembles)``.
        sizes: number of members of each ensemble.
        bound: disagreement above which a member is penalised.
    """

    def __init__(self, weight: SingleArray, sizes: Sequence[int], bound: float) -> None:
        self.loss = ShareLoss(weight, sizes, centred=True, bound=bound)
        self.firsts = np.cumsum([0, *sizes[:-1]])
        self.lean = np.empty((len(weight), sum(sizes)), dtype=np.float32)

    def __call__(
        self, batch: Batch, theta: SingleArray, logits: SingleArray, tau: np.float32
    ) -> tuple[SingleArray, SingleArray]:
        """Return the gradients in θ, ``(m, n_members)``, and in the logits, ``(n_members + n_ensembles,)``.

        Args:
            batch: the pairs.
            theta: members of all ensembles, one ensemble after the other, ``(m, n_members)``.
            logits: of α, then of the undecided share of each ensemble, ``(n_members + n_ensembles,)``. −∞ there
                sets u = 0.
            tau: the temperature τ.
        """
        (x, target, share), lean, ensemble = batch, self.lean, self.loss.ensemble
        np.tanh(np.matmul(x, theta / (2 * tau), out=lean), out=lean)
        own, rest = logits[: len(ensemble)], logits[len(ensemble) :]
        largest = np.maximum(np.maximum.reduceat(own, self.firsts), rest)
        weights, undecided = np.exp(own - largest[ensemble]), np.exp(rest - largest)
        total = np.add.reduceat(weights, self.firsts) + undecided
        weights, undecided = weights / total[ensemble], undecided / total
        self.loss.errors(lean, weights, target)
        slope, weight_gradient = self.loss.gradients(lean, share)
        slope *= np.subtract(1, np.square(lean, out=lean), out=lean)  # dσ(z)/dz = (1 − lean²)/4
        mean = np.add.reduceat(weights * weight_gradient, self.firsts)
        logit_gradient = np.append(weights * (weight_gradient - mean[ensemble]), -undecided * mean)
        return np.asarray(x.T @ slope / (4 * tau)), np.asarray(logit_gradient, dtype=np.float32)


class Adam:
    """The Adam optimiser for one array."""

    def __init__(self, like: SingleArray) -> None:
        self.mean, self.square, self.count = np.zeros_like(like), np.zeros_like(like), 0

    def step(self, gradient: SingleArray, rate: float) -> SingleArray:
        """Return the step to subtract."""
        self.count += 1
        self.mean += 0.1 * (gradient - self.mean)
        self.square += 0.01 * (gradient**2 - self.square)
        mean, square = self.mean / (1 - 0.9**self.count), self.square / (1 - 0.99**self.count)
        return np.asarray(rate * mean / (np.sqrt(square) + 1e-10), dtype=np.float32)
