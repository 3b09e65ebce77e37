"""Joint ensembles for the policy level: k members whose weighted σ(Δr_j) match the votes (App. A).

``joint`` trains for hard votes instead. Here the loss is smooth, so all members and weights are fitted by L-BFGS. They
start from a mixture of Bradley–Terry rewards fitted by EM. The target is the votes alone, or their blend with the share
that the teacher's mixture predicts: on damped differences, so that members learn to be less certain of long ones. There
is no undecided share: σ(Δr) near ½ already says that a member is undecided.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import softmax

from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.core.random_streams import POLICY_LEVEL, random_stream
from pluralign.learning.bradley_terry import directions_with, fit_bradley_terry, fit_em, scores
from pluralign.learning.joint import FROM_MIXTURE, FROM_VOTES, Blend, JointFit
from pluralign.learning.pairs import Pairs, cap_disagreement
from pluralign.learning.teacher import Teacher, TrainedTeacher, damping_factor
from pluralign.theory.calibration import brier, sigmoid
from pluralign.theory.intervals import clearly_lower
from pluralign.theory.simplex import simplex_least_squares

POLICY_L2_GRID = (0.003, 0.01, 0.03, 0.1, 0.3)
POLICY_BLENDS = (FROM_MIXTURE, FROM_VOTES)
"""The targets that validation prompts choose from."""
ROTATED = 8192
"""Number of rotated pairs beside the pairs, with half of the total weight."""
VALIDATION_STEPS, STEPS = 50, 100
"""L-BFGS iterations of a fit that makes a choice, and of the final fit."""


@dataclass(frozen=True)
class PolicyChoice:
    """Target and regularisation of a policy-level fit."""

    blend: Blend
    l2: float


def choose_policy_options(
    pairs: Pairs, teacher: Teacher, k: int, folds: Sequence[Mask], *, seed: int = 0
) -> PolicyChoice:
    """Return the target and the regularisation whose ensemble predicts the votes of validation prompts best.

    The votes alone are the target only if a paired test over prompts finds them better: where votes are few, members
    that learn from the teacher vary less.

    Args:
        pairs: the training pairs.
        teacher: the teacher of all pairs. It is fitted again without each fold.
        k: number of members.
        folds: masks of validation pairs, ``(n,)`` each.
        seed: of the start and of rotated pairs.
    """
    choices = [PolicyChoice(blend, l2) for blend in POLICY_BLENDS for l2 in POLICY_L2_GRID]
    errors = np.full((len(pairs), len(choices)), np.nan)
    for held_out in folds:
        rest, check = pairs[~held_out], pairs[held_out]
        task = _Task.of(rest, teacher.refit(rest, seed), k, seed)
        for position, choice in enumerate(choices):
            theta, weights = task.minimise(choice, VALIDATION_STEPS)
            share = sigmoid(scores(check.difference, theta)) @ weights
            errors[held_out, position] = (share - check.prob_a) ** 2
    mean = np.nanmean(errors, axis=0)
    taught, votes = (
        min((i for i, choice in enumerate(choices) if choice.blend == blend), key=lambda i: mean[i])
        for blend in POLICY_BLENDS
    )
    clear = clearly_lower(errors[:, votes] - errors[:, taught], pairs.prompt)
    return choices[votes if clear else taught]


def fit_policy_level(
    pairs: Pairs, teacher: Teacher, k: int, choice: PolicyChoice, *, seed: int = 0, bound: float = 1.0
) -> JointFit:
    """Train k members together so that Σ_j α_j σ(Δr_j) matches the votes.

    Args:
        pairs: the training pairs.
        teacher: fitted to these pairs; it predicts part of the target.
        k: number of members.
        choice: target and regularisation.
        seed: of the start and of rotated pairs.
        bound: maximum training disagreement of a member; 1 sets no bound.
    """
    task = _Task.of(pairs, teacher, k, seed)
    members, weights = task.minimise(choice, STEPS)
    capped = np.column_stack(
        [cap_disagreement(member, task.reward, pairs.difference, pairs.prob_a, bound) for member in members.T]
    )
    soft = sigmoid(scores(pairs.difference, capped))
    if not np.array_equal(capped, members):  # the shares are linear in the weights: solve these again
        weights = simplex_least_squares(soft, pairs.prob_a)
    return JointFit(capped, weights, 0.0, brier(soft @ weights, pairs.prob_a))


@dataclass(frozen=True)
class _Task:
    """Pairs and rotated pairs in the leading directions, with the members that a fit starts from."""

    axes: Array
    """``(d, m)``."""
    x: Array
    """Differences of the pairs, then of the rotated pairs, ``(n + ROTATED, m)``."""
    prob_a: FloatArray
    """``(n,)``."""
    taught: FloatArray
    """Share that the teacher's mixture predicts, ``(n + ROTATED,)``."""
    reward: FloatArray
    """One Bradley–Terry reward, ``(d,)``."""
    start: FloatArray
    """``(m, k)``."""

    @classmethod
    def of(cls, pairs: Pairs, teacher: Teacher, k: int, seed: int) -> "_Task":
        """Return the task of some pairs."""
        difference, prob_a = pairs.difference, pairs.prob_a
        if isinstance(teacher, TrainedTeacher):  # its rewards were trained on these pairs
            reward, axes = teacher.theta, teacher.axes
        else:
            reward = fit_bradley_terry(difference, prob_a, teacher.l2)
            axes = directions_with(difference, reward)
        x = np.ascontiguousarray(difference @ axes)
        if isinstance(teacher, TrainedTeacher) and k <= teacher.voices.shape[1]:
            start = np.asarray(axes.T @ teacher.voices[:, :k], dtype=np.float64)
        else:
            start, _ = fit_em(x, prob_a, axes.T @ reward, k, l2=teacher.voices_l2, seed=seed)
        # A rotated pair has rewards cos φ·r_i + sin φ·r_j, and about the length² cos²φ·|d_i|² + sin²φ·|d_j|².
        rng = random_stream(seed, POLICY_LEVEL)
        first, second = rng.integers(len(x), size=(2, ROTATED))
        angle = rng.random((ROTATED, 1)) * 2 * np.pi
        cosine, sine = np.cos(angle), np.sin(angle)
        squares, rewards = teacher.squares(difference).astype(np.float64), scores(difference, teacher.voices)
        squares = np.append(squares, cosine[:, 0] ** 2 * squares[first] + sine[:, 0] ** 2 * squares[second])
        rewards = np.vstack([rewards, cosine * rewards[first] + sine * rewards[second]])
        factor = damping_factor(squares, teacher.damping, teacher.mean_square)
        taught = sigmoid(rewards * factor[:, None]) @ teacher.voice_weights
        rotated = (cosine * x[first] + sine * x[second]).astype(x.dtype)
        return cls(axes, np.vstack([x, rotated]), prob_a, np.asarray(taught), reward, start)

    def minimise(self, choice: PolicyChoice, steps: int) -> tuple[FloatArray, FloatArray]:
        """Return the members ``(d, k)`` and weights that minimise ``policy_loss``."""
        n, share = len(self.prob_a), choice.blend.vote_share
        if share == 1:
            x, target, weight = self.x[:n], self.prob_a, np.full(n, 1 / n)
        else:
            x, target = self.x, np.append((1 - share) * self.taught[:n] + share * self.prob_a, self.taught[n:])
            weight = np.append(np.full(n, 0.5 / n), np.full(ROTATED, 0.5 / ROTATED))
        k = self.start.shape[1]
        unknowns = np.append(self.start.ravel(), np.zeros(k))
        objective = policy_loss(x, target, choice.l2, k, weight)
        solution = minimize(objective, unknowns, jac=True, method="L-BFGS-B", options={"maxiter": steps}).x
        theta, logits = solution[: self.start.size].reshape(self.start.shape), solution[self.start.size :]
        return np.asarray(self.axes @ theta, dtype=np.float64), softmax(logits)


def policy_loss(
    x: Array, target: FloatArray, l2: float, k: int, weight: FloatArray
) -> Callable[[FloatArray], tuple[float, FloatArray]]:
    """Return (θ, logits of α) ↦ (Σ_i w_i (Σ_j α_j σ(θ_j·d_i) − t_i)² + l2/k Σ_j |θ_j|², its gradient)."""
    m = x.shape[1]

    def value_and_gradient(unknowns: FloatArray) -> tuple[float, FloatArray]:
        theta, weights = unknowns[: m * k].reshape(m, k), softmax(unknowns[m * k :])
        soft = sigmoid(scores(x, theta))
        error = soft @ weights - target
        weighted = 2 * weight * error
        slope = weighted[:, None] * weights * soft * (1 - soft)
        theta_gradient = x.T @ slope.astype(x.dtype) + (2 * l2 / k) * theta
        weight_gradient = weighted @ soft
        logit_gradient = weights * (weight_gradient - weights @ weight_gradient)
        value = float(weight @ error**2 + l2 / k * np.sum(theta**2))
        return value, np.append(theta_gradient.ravel(), logit_gradient)

    return value_and_gradient
