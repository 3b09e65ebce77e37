"""Losses of training: two on pairs for joint ensembles, one on whole judgments, one for a stagewise member.

Each loss is a mean over pairs of terms that are fixed during a step. So a step does not depend on how its pairs are
split over devices and micro-batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from pluralign.core.arrays import FloatArray
from pluralign.learning.voices import RankedTexts, Voices

TEMPERATURES = (0.3, 0.05)
"""τ of the soft votes of a fresh head at the first and the last step, relative to the spread of differences."""
STAGE_PENALTY = 1.0
"""Penalty of a stagewise member for disagreement above the bound: enough to outweigh the residual."""
SMALLEST_SHARE = 1e-4
"""Smallest share that a mixture may predict."""
MEMORY = 0.2
"""Weight of a step in the running spread and disagreement of the outputs."""


@dataclass
class RunningFigures:
    """Mean square and disagreement of each output's reward differences, as moving averages over steps.

    The loss of a step uses the figures of the steps before.
    """

    square: list[float] = field(default_factory=list)
    disagreement: list[float] = field(default_factory=list)
    _sums: Any = None

    def add(self, difference: Any, prob_a: Any) -> None:
        """Add one micro-batch to the current step."""
        vote = 0.5 + 0.5 * torch.sign(difference)
        disagreement = vote * (1 - prob_a[:, None]) + (1 - vote) * prob_a[:, None]
        count = torch.full_like(difference[:1], len(difference))
        sums = torch.cat([(difference**2).sum(0, keepdim=True), disagreement.sum(0, keepdim=True), count]).double()
        self._sums = sums if self._sums is None else self._sums + sums

    def end_step(self, sum_over_processes: Callable[[Any], Any]) -> None:
        """Update the figures with the micro-batches of this step, of all processes."""
        square, disagreement, count = sum_over_processes(self._sums).cpu()
        self._sums = None
        share = MEMORY if self.square else 1.0
        old = (self.square or [0.0] * len(square)), (self.disagreement or [0.0] * len(square))
        self.square, self.disagreement = (
            [(1 - share) * before + share * now for before, now in zip(past, (sums / count).tolist(), strict=True)]
            for past, sums in zip(old, (square, disagreement), strict=True)
        )

    def spread(self, like: Any) -> Any:
        """Return √mean Δ² of each output; 1 before the first step."""
        if not self.square:
            return torch.ones_like(like[0])
        return torch.tensor(self.square, device=like.device).sqrt().clamp_min(1e-6).to(like.dtype)

    def above(self, bound: float, like: Any) -> Any:
        """Return 1 for each output whose disagreement is above the bound, else 0."""
        if not self.disagreement:
            return torch.zeros_like(like[0])
        return (torch.tensor(self.disagreement, device=like.device) > bound).to(like.dtype)


PairLoss: TypeAlias = Callable[[Any, Mapping[str, Any], RunningFigures, float], Any]
"""Returns the loss of a micro-batch from reward differences ``(n, outputs)``, the labels ``prob_a``, ``target`` and
``weight``, ``(n,)`` each, the figures of the steps before, and the share of the training that is done."""


@dataclass(frozen=True)
class VoteLoss:
    """Loss of a fresh joint head: the expected squared error of the members' hard votes, and of one reward.

        mean (p̂ − p)² + 1/k² Σ_j q_j (1 − q_j) + BCE(p, σ(Δ_last)),   q_j = σ(Δ_j / (s_j τ)),   p̂ = 1/k Σ_j q_j,

    with s_j the running spread of Δ_j, and τ decreasing. The first two terms are the expected error of votes drawn with
    probabilities q_j. Rewards that start nearly equal stay equal under ``MixtureLoss``; here equal votes have a high
    error, so they part. Members learn from the votes alone: a reward as their teacher hides what divides people.
    """

    k: int

    def __call__(self, difference: Any, labels: Mapping[str, Any], running: RunningFigures, done: float) -> Any:
        """Return the loss of a micro-batch."""
        prob_a = labels["prob_a"]
        members, reward = difference[:, : self.k], difference[:, self.k]
        first, last = TEMPERATURES
        tau = first * (last / first) ** done
        soft = torch.sigmoid(members / (running.spread(difference)[: self.k] * tau))
        error = ((soft.mean(1) - prob_a) ** 2 + (soft * (1 - soft)).sum(1) / self.k**2).mean()
        return error + binary_cross_entropy_with_logits(reward, prob_a)


@dataclass(frozen=True)
class MixtureLoss:
    """Loss of a mixture of Bradley–Terry rewards, and of one reward in the last output, on the votes alone.

    BCE(p, Σ_j π_j σ(w Δ_j)) + ½ BCE(p, σ(w Δ_last)), with w the ``weight`` of a pair: damping of long differences.
    """

    weights: tuple[float, ...]
    """π of each reward of the mixture."""

    def __call__(self, difference: Any, labels: Mapping[str, Any], running: RunningFigures, done: float) -> Any:  # noqa: ARG002
        """Return the loss of a micro-batch."""
        prob_a, difference = labels["prob_a"], difference * labels["weight"][:, None]
        share = torch.sigmoid(difference[:, :-1]) @ torch.tensor(self.weights, device=difference.device)
        mixture = binary_cross_entropy(share.clamp(SMALLEST_SHARE, 1 - SMALLEST_SHARE), prob_a)
        return mixture + 0.5 * binary_cross_entropy_with_logits(difference[:, -1], prob_a)


class RankingLoss(torch.autograd.Function):
    """Loss of a mixture of Plackett–Luce rewards on whole judgments: −log P of ``voices`` per choice.

    Value and gradient are those of ``learning.voices``, in numpy. Only rewards have a gradient, not π and κ.
    """

    @staticmethod
    def forward(ctx: Any, rewards: Any, texts: RankedTexts, voices: Voices, posterior: FloatArray | None) -> Any:
        """Return the loss.

        Args:
            ctx: keeps the gradient.
            rewards: of the members for the texts, ``(n_texts, k)``.
            texts: the judgments; their inputs are not used.
            voices: π and κ.
            posterior: of each person, ``(k, 1, n_T, n_persons)``, if the person has judgments elsewhere too. The
                gradient is then that of the whole likelihood. Default: from these judgments.
        """
        ranked = replace(texts, inputs=rewards.detach().cpu().double().numpy())
        found, n = rewards_as_voices(voices).given(ranked), max(texts.n_choices, 1)
        slope = found.gradient(found.posterior if posterior is None else posterior)
        ctx.slope = torch.from_numpy(-slope / n).to(rewards)
        return rewards.new_tensor(-found.by_group.sum() / n)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the rewards."""
        return gradients[0] * ctx.slope, None, None, None


ranking_loss: Any = RankingLoss.apply


def rewards_as_voices(voices: Voices) -> Voices:
    """Return the mixture for texts whose inputs are the rewards of the members."""
    return replace(voices, theta=np.eye(voices.k))


@dataclass(frozen=True)
class StageLoss:
    """Loss of one member of a stagewise ensemble: the squared error to its target (``stage_target``)."""

    bound: float

    def __call__(self, difference: Any, labels: Mapping[str, Any], running: RunningFigures, done: float) -> Any:  # noqa: ARG002
        """Return the loss of a micro-batch."""
        share = torch.sigmoid(difference[:, 0])
        error = ((share - labels["target"]) ** 2).mean()
        excess = ((1 - 2 * labels["prob_a"]) * share).mean() * running.above(self.bound, difference)[0]
        return error + STAGE_PENALTY * excess
