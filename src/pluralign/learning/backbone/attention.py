"""Training of an attention pooling on votes: corrections of a mixture of rewards, from the token states of an encoder.

Every network has heads of its own, and one output for each reward of the mixture on frozen features. An output is added
to that reward, so training starts near the frozen mixture. Networks differ by their random start and are trained side
by side; the mean of their predictions has less noise than each of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pluralign.core.arrays import Array, FloatArray
from pluralign.core.errors import DataError
from pluralign.core.random_streams import FINETUNE
from pluralign.core.types import Progress
from pluralign.learning.backbone.batches import TextPairs, draw_steps
from pluralign.learning.backbone.losses import MixtureLoss, RunningFigures
from pluralign.text.pooling import attention_pool
from pluralign.text.states import TokenStates

EPOCHS = 8
BATCH = 128
"""Pairs per step."""
LEARNING_RATE = 3e-3
NETWORKS = 8
HEADS = 16
RANK = 8
"""Directions of a pooled state that a head passes on."""
WARM_UP = 20
"""Steps until the full learning rate."""
WEIGHT_DECAY = 0.01
MOMENTUM = 0.05
"""Weight of a step in the running mean and variance of the features."""


@dataclass(frozen=True, eq=False)
class FrozenMixture:
    """The mixture on frozen features that training starts from."""

    rewards: FloatArray
    """Of each text: the rewards of the mixture, then the one reward, ``(n_texts, outputs)``."""
    weights: FloatArray
    """π, the weights of the mixture, ``(outputs − 1,)``."""
    damping: FloatArray
    """Factor that shortens long differences, of each pair, ``(n_pairs,)``."""


class AttentionNetworks(torch.nn.Module):
    """Several attention poolings with linear outputs on their standardised features.

    Args:
        width: size of a token state.
        outputs: number of outputs per network.
        generator: of the random start.
    """

    def __init__(self, width: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()

        def random(*shape: int, spread: float) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator) * spread)

        self.query = random(NETWORKS, HEADS, width, spread=0.5 / math.sqrt(width))
        self.bias = torch.nn.Parameter(torch.zeros(NETWORKS, HEADS))
        self.value = random(NETWORKS, HEADS, width, RANK, spread=1 / math.sqrt(3 * width))
        self.head = random(NETWORKS, HEADS, RANK, outputs, spread=0.5 / math.sqrt(HEADS * RANK))
        self.standard = torch.nn.BatchNorm1d(NETWORKS * HEADS * RANK, affine=False, momentum=MOMENTUM)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the outputs for texts, ``(n_texts, networks, outputs)``."""
        # A network per head gives the features of each head instead of their sum.
        weights = {
            "query": self.query.reshape(NETWORKS * HEADS, 1, -1),
            "bias": self.bias.reshape(NETWORKS * HEADS, 1),
            "value": self.value.flatten(0, 1)[:, None],
        }
        features = self.standard(attention_pool(states, mask, weights)).view(-1, NETWORKS, HEADS, RANK)
        return torch.einsum("nghr,ghro->ngo", features, self.head)

    def weights(self) -> dict[str, Array]:
        """Return the weights for ``attention_pool``, whose features are the outputs up to a constant."""
        assert self.standard.running_var is not None  # noqa: S101
        spread = (self.standard.running_var + self.standard.eps).sqrt().view(NETWORKS, HEADS, RANK)
        value = torch.einsum("ghdr,ghro->ghdo", self.value / spread[:, :, None], self.head)
        return {
            name: part.detach().float().numpy()
            for name, part in {"query": self.query, "bias": self.bias, "value": value}.items()
        }


def train_attention(
    states: TokenStates, pairs: TextPairs, start: FrozenMixture, seed: int, progress: Progress | None = None
) -> Mapping[str, Array]:
    """Train the networks on pairs and return their weights.

    Loss of a network, with r its outputs plus the rewards of the frozen mixture: ``losses.MixtureLoss``. AdamW; the
    learning rate falls to 0 like a cosine after ``WARM_UP`` steps.

    Args:
        states: of all texts.
        pairs: the training pairs.
        start: the mixture on frozen features.
        seed: of the start and of the order of pairs.
        progress: called with the steps done and their total.

    Raises:
        DataError: the training diverged.
    """
    rng = np.random.default_rng([seed, FINETUNE])
    networks = AttentionNetworks(
        states.width, start.rewards.shape[1], torch.Generator().manual_seed(int(rng.integers(2**62)))
    )
    batch = min(BATCH, len(pairs.prob_a))
    steps = max(1, math.ceil(EPOCHS * len(pairs.prob_a) / batch))
    optimizer = torch.optim.AdamW(networks.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    loss = MixtureLoss(tuple(start.weights.tolist()))
    for step, rows in enumerate(draw_steps(pairs.prompt, steps, batch, rng)):
        texts, place = np.unique(np.concatenate([pairs.a[rows], pairs.b[rows]]), return_inverse=True)
        rewards = networks(*states.padded(texts)) + torch.from_numpy(start.rewards[texts]).float()[:, None]
        difference = rewards[place[: len(rows)]] - rewards[place[len(rows) :]]
        labels = {"prob_a": _of_networks(pairs.prob_a[rows]), "weight": _of_networks(start.damping[rows])}
        optimizer.zero_grad()
        loss(difference.flatten(0, 1), labels, RunningFigures(), step / steps).backward()
        optimizer.step()
        schedule.step()
        if progress:
            progress(step + 1, steps)
    trained = networks.weights()
    if not all(np.isfinite(part).all() for part in trained.values()):
        raise DataError("the training of the attention pooling diverged", remedy="leave out --pooling attention")
    return trained


def _rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, relative to the largest one."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _of_networks(values: FloatArray) -> Any:
    """Return the values of pairs, repeated for every network, ``(n × networks,)``."""
    return torch.from_numpy(np.repeat(values, NETWORKS)).float()
