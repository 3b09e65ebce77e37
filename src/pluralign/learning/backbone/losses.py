"""Losses of training: two on pairs for joint ensembles, one on whole judgments, one for a stagewise member.

Each loss is a mean over pairs, or judgments, of terms that are fixed during a step. So a step does not depend on how
its pairs are split over devices and micro-batches. ``PairLessons`` and ``JudgedLessons`` hold the votes that a model
learns from, with their loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from pluralign.core.arrays import FloatArray, IndexArray, IntArray
from pluralign.learning.backbone.recipe import MicroBatch, TextPairs
from pluralign.learning.voices import RankedTexts, Voices
from pluralign.votes.judgments import Judgments

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
        if self._sums is None:  # judgments need no figures
            return
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


@dataclass(frozen=True, eq=False)
class PairLessons:
    """Pairs that a model learns from."""

    pairs: TextPairs
    pair_loss: PairLoss
    labels: Mapping[str, FloatArray]
    """``prob_a``, the share of people preferring a; ``target``, the share to predict; ``weight``; ``(n,)`` each."""

    @property
    def prompt(self) -> IndexArray:
        """Prompt of each pair, ``(n,)``."""
        return self.pairs.prompt

    @cached_property
    def texts(self) -> list[tuple[int, ...]]:
        """The two texts of each pair."""
        return list(zip(self.pairs.a.tolist(), self.pairs.b.tolist(), strict=True))

    def loss(self, rewards: Any, batch: MicroBatch, running: RunningFigures, done: float) -> Any:
        """Return the loss of some pairs.

        Args:
            rewards: of their texts, ``(n_texts, outputs)``.
            batch: the pairs and their texts.
            running: the figures of the steps before.
            done: share of the training that is done.
        """
        rows, device = batch.units, rewards.device
        a, b = (torch.from_numpy(np.searchsorted(batch.texts, side[rows])) for side in (self.pairs.a, self.pairs.b))
        difference = rewards[a.to(device)] - rewards[b.to(device)]
        labels = {name: torch.from_numpy(part[rows]).float().to(device) for name, part in self.labels.items()}
        running.add(difference.detach(), labels["prob_a"])
        return self.pair_loss(difference, labels, running, done)


@dataclass(frozen=True, eq=False)
class JudgedLessons:
    """Whole judgments that a mixture learns from: −log P per choice, with fixed π and κ.

    With rater ids a person has judgments on many prompts, in many steps. The posterior of persons is then that of given
    rewards (``given``), and the gradient of a step is its part of the gradient of the whole likelihood.
    """

    judgments: Judgments
    items: IndexArray
    """Text of each of their entries, ``(n_entries,)``."""
    voices: Voices
    """π and κ."""
    posterior: FloatArray | None = None
    """Of each person, ``(k, 1, n_T, n_persons)``. Default: from the judgments of a step."""

    @cached_property
    def prompt(self) -> IndexArray:
        """Prompt of each judgment, ``(n,)``."""
        return prompt_of_judgments(self.judgments)

    @cached_property
    def texts(self) -> list[tuple[int, ...]]:
        """The texts of each judgment."""
        judgment = np.repeat(self.judgments.judgment, self.judgments.sizes)
        order = np.argsort(judgment, kind="stable")
        parts = np.split(self.items[order], np.flatnonzero(np.diff(judgment[order])) + 1)
        return [tuple(np.unique(part).tolist()) for part in parts]

    @cached_property
    def choices(self) -> float:
        """Mean number of choices of a judgment."""
        return _ranked(self.judgments, self.items).n_choices / self.judgments.n

    def given(self, rewards: FloatArray) -> "JudgedLessons":
        """Return the lessons with the posterior of persons at these rewards of all texts, if persons are linked."""
        if not self.judgments.linked:
            return self
        ranked = replace(_ranked(self.judgments, self.items), inputs=rewards[np.unique(self.items)])
        return replace(self, posterior=_rewards_as_voices(self.voices).given(ranked).posterior)

    def loss(self, rewards: Any, batch: MicroBatch, running: RunningFigures, done: float) -> Any:  # noqa: ARG002
        """Return the loss of some judgments: see ``PairLessons.loss``."""
        judged, rows = self.judgments, np.isin(self.judgments.judgment, batch.units)
        ranked = _ranked(judged[rows], self.items[np.repeat(rows, judged.sizes)])
        posterior = self.posterior
        if posterior is not None:
            person: IntArray = np.zeros(len(ranked.group), dtype=np.int64)
            person[ranked.person] = judged.person[rows]
            posterior = posterior[..., person]
        total = ranking_loss(rewards, ranked, self.voices, posterior)
        return total / (self.choices * len(batch.units))


Lessons: TypeAlias = PairLessons | JudgedLessons


def prompt_of_judgments(judgments: Judgments) -> IndexArray:
    """Return the prompt of each judgment, ``(n,)``. A judgment can have several rankings."""
    return judgments.prompt[np.unique(judgments.judgment, return_index=True)[1]]


def _ranked(judgments: Judgments, items: IndexArray) -> RankedTexts:
    """Return judgments without inputs of their texts."""
    return RankedTexts.of(judgments, items, np.zeros((int(items.max(initial=-1)) + 1, 0)))


class RankingLoss(torch.autograd.Function):
    """Loss of a mixture of Plackett–Luce rewards on whole judgments: −log P of ``voices``.

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
        found = _rewards_as_voices(voices).given(ranked)
        slope = found.gradient(found.posterior if posterior is None else posterior)
        ctx.slope = torch.from_numpy(-slope).to(rewards)
        return rewards.new_tensor(-found.by_group.sum())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the rewards."""
        return gradients[0] * ctx.slope, None, None, None


ranking_loss: Any = RankingLoss.apply


def _rewards_as_voices(voices: Voices) -> Voices:
    """Return the mixture for texts whose inputs are the rewards of the members."""
    return replace(voices, theta=np.eye(voices.k))
