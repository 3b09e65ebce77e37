"""What transformers' ``Trainer`` is given to fine-tune rewards on pairs: batches, losses, optimisers, checkpoints.

Decided here: the two losses. Each is a mean over pairs of terms that are fixed during a step, so a step does not depend
on how its pairs are dealt out to devices and micro-batches.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch.nn.functional import binary_cross_entropy_with_logits

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import MissingExtraError
from pluralign.core.files import atomic_write
from pluralign.core.types import Progress
from pluralign.models.batches import Tokens, padded
from pluralign.training.joint import EXTREME_PRICE, VOTE_SHARE
from pluralign.votes.prompts import Item

HEAD_FACTOR = 10.0
"""How much faster the head learns: it begins with nothing."""
TEMPERATURES, TEMPERATURES_FITTED = (0.3, 0.05), (0.1, 0.05)
"""Of the joint members' softened votes, from the first step to the last: from nothing, and from a fitted head."""
VOTES_UNTIL = 0.2
"""Share of the training after which members that began with nothing learn less from raw votes than from the reward."""
STAGE_PRICE = 1.0
"""What a stagewise member pays for disagreement above the bound: enough to outweigh the residual."""
MEMORY = 0.2
"""How much of a step goes into the running spread and disagreement of the members."""
COMPLETE_FILE = "complete.json"
"""Written last into a checkpoint; one without it is not resumed from."""


@dataclass(frozen=True)
class TextPairs:
    """Compared texts, with the votes."""

    items: Sequence[Item]
    """Every distinct text."""
    a: npt.NDArray[np.int32]
    """Item that is response a, ``(n,)``."""
    b: npt.NDArray[np.int32]
    prob_a: FloatArray
    """Share of people choosing a, ``(n,)``."""
    prompt: npt.NDArray[np.int32]
    """Which prompt each pair belongs to, ``(n,)``."""


# --- losses ---------------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """What the loss of the next step needs to know of the steps before: spread and disagreement of each output."""

    square: list[float] = field(default_factory=list)
    disagreement: list[float] = field(default_factory=list)
    _sums: Any = None

    def add(self, difference: Any, prob_a: Any) -> None:
        """Take note of one micro-batch."""
        vote = 0.5 + 0.5 * torch.sign(difference)
        apart = vote * (1 - prob_a[:, None]) + (1 - vote) * prob_a[:, None]
        count = torch.full_like(difference[:1], len(difference))
        sums = torch.cat([(difference**2).sum(0, keepdim=True), apart.sum(0, keepdim=True), count]).double()
        self._sums = sums if self._sums is None else self._sums + sums

    def update(self, over_processes: Callable[[Any], Any]) -> None:
        """End a step."""
        square, disagreement, count = over_processes(self._sums).cpu()
        self._sums = None
        share = MEMORY if self.square else 1.0
        old = (self.square or [0.0] * len(square)), (self.disagreement or [0.0] * len(square))
        self.square, self.disagreement = (
            [(1 - share) * before + share * now for before, now in zip(past, (sums / count).tolist(), strict=True)]
            for past, sums in zip(old, (square, disagreement), strict=True)
        )

    def spread(self, like: Any) -> Any:
        """Return √mean Δ², 1 before the first step."""
        if not self.square:
            return torch.ones_like(like[0])
        return torch.tensor(self.square, device=like.device).sqrt().clamp_min(1e-6).to(like.dtype)

    def too_far(self, like: Any, bound: float) -> Any:
        """Return 1 for outputs whose disagreement is above the bound, else 0."""
        if not self.disagreement:
            return torch.zeros_like(like[0])
        return (torch.tensor(self.disagreement, device=like.device) > bound).to(like.dtype)


@dataclass(frozen=True)
class JointLoss:
    """All members and the reward beside them, the last output; ``finetune.fine_tune`` has the formula."""

    k: int
    bound: float
    fitted: bool = False
    """Whether the head was fitted before, so that its reward can be learned from at once."""

    def __call__(self, difference: Any, of_pairs: Mapping[str, Any], running: Running, done: float) -> Any:
        """Return the loss of a micro-batch, with ``done`` of the training behind us."""
        prob_a = of_pairs["prob_a"]
        members, reward = difference[:, : self.k], difference[:, self.k]
        first, last = TEMPERATURES_FITTED if self.fitted else TEMPERATURES
        tau = first * (last / first) ** done
        soft = torch.sigmoid(members / (running.spread(difference)[: self.k] * tau))
        vote_share = 1.0 if done < VOTES_UNTIL and not self.fitted else VOTE_SHARE
        target = (1 - vote_share) * torch.sigmoid(reward).detach() + vote_share * prob_a
        # The expected squared error of votes that are drawn with these chances: undecided members cost something.
        error = ((soft.mean(1) - target) ** 2 + (soft * (1 - soft)).sum(1) / self.k**2).mean()
        apart = ((1 - 2 * prob_a)[:, None] * soft).mean(0) @ running.too_far(difference, self.bound)[: self.k]
        return error + EXTREME_PRICE / self.k * apart + binary_cross_entropy_with_logits(reward, prob_a)


@dataclass(frozen=True)
class StageLoss:
    """One member of a stagewise ensemble: squared error or cross-entropy to its target."""

    kind: str
    bound: float

    def __call__(self, difference: Any, of_pairs: Mapping[str, Any], running: Running, done: float) -> Any:  # noqa: ARG002
        """Return the loss of a micro-batch."""
        target, weight = of_pairs["target"], of_pairs["weight"]
        share = torch.sigmoid(difference[:, 0])
        if self.kind == "bce":
            error = (weight * binary_cross_entropy_with_logits(difference[:, 0], target, reduction="none")).mean()
        else:
            error = ((share - target) ** 2).mean()
        apart = ((1 - 2 * of_pairs["prob_a"]) * share).mean() * running.too_far(difference, self.bound)[0]
        return error + STAGE_PRICE * apart


# --- what transformers' Trainer is given ----------------------------------------------------------------------------


class PairTrainer(transformers.Trainer):
    """A Trainer whose batches are pairs: the first half of the texts are responses a, the second responses b."""

    loss_is_scaled_for_ga = False
    pair_loss: Any
    running: Running
    optimizer_name: str
    head: str

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: ARG002
        num_items_in_batch: Any = None,  # noqa: ARG002
    ) -> Any:
        """Return the loss of one micro-batch."""
        of_pairs = {name: inputs.pop(name) for name in ("prob_a", "target", "weight")}
        rewards = model(**inputs).logits.float()
        reward_a, reward_b = rewards.chunk(2)
        difference = reward_a - reward_b
        self.running.add(difference.detach(), of_pairs["prob_a"])
        done = self.state.global_step / max(1, self.state.max_steps - 1)
        return self.pair_loss(difference, of_pairs, self.running, done)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:  # noqa: ARG002
        ordered: Any = self.train_dataset
        return torch.utils.data.SequentialSampler(ordered)

    def create_optimizer(self, model: Any = None) -> Any:
        """Return SOAP or AdamW; the head learns faster, and vectors do not decay."""
        if self.optimizer is not None:
            return self.optimizer
        trained: Any = model or self.model
        decayed = set(self.get_decay_parameter_names(trained))
        groups: dict[tuple[bool, bool], list[Any]] = {}
        for name, parameter in trained.named_parameters():
            if parameter.requires_grad:
                in_head = f".{self.head}." in f".{name}" or ".modules_to_save." in name
                groups.setdefault((in_head, name in decayed), []).append(parameter)
        rate = self.args.learning_rate
        settings = [
            {
                "params": parameters,
                "lr": rate * (HEAD_FACTOR if in_head else 1.0),
                "weight_decay": self.args.weight_decay if decays else 0.0,
            }
            for (in_head, decays), parameters in groups.items()
        ]
        if self.optimizer_name == "adamw":
            self.optimizer = torch.optim.AdamW(settings, lr=rate)
        else:
            try:
                from pytorch_optimizer import SOAP
            except ImportError:
                raise MissingExtraError("pytorch-optimizer", "finetune", "--optimizer soap") from None
            self.optimizer = SOAP(settings, lr=rate)
        return self.optimizer


class Watch(transformers.TrainerCallback):
    """Ends each step for the running figures, reports it, and marks checkpoints that are whole."""

    def __init__(self, running: Running, progress: Progress | None, first: bool) -> None:
        self.running, self.progress, self.first = running, progress, first

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Take note of a step."""
        self.running.update(_sum_over_processes)
        if state.global_step >= state.max_steps:
            control.should_save = False  # the model itself is saved next
        if self.progress:
            self.progress(state.global_step, state.max_steps)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Mark a checkpoint as whole, with the running figures in the mark."""
        if self.first:
            kept = {"square": self.running.square, "disagreement": self.running.disagreement}
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE_FILE
            with atomic_write(path) as partial:
                partial.write_text(json.dumps(kept))


def _sum_over_processes(sums: Any) -> Any:
    return accelerate.utils.reduce(sums, "sum")


@dataclass(frozen=True)
class OrderedPairs(torch.utils.data.Dataset[Any]):
    """The pairs in the order of training."""

    order: npt.NDArray[np.int64]
    pairs: TextPairs
    tokens: Sequence[Tokens]
    of_pairs: Mapping[str, FloatArray]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> dict[str, Any]:
        pair = int(self.order[position])
        texts = {"a": self.tokens[self.pairs.a[pair]], "b": self.tokens[self.pairs.b[pair]]}
        return texts | {name: float(values[pair]) for name, values in self.of_pairs.items()}


@dataclass(frozen=True)
class Collator:
    """Puts pairs into one batch of texts, padded on the right."""

    pad: int

    def __call__(self, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return responses a, then responses b, and what is known of the pairs."""
        texts = [pair["a"] for pair in pairs] + [pair["b"] for pair in pairs]
        numbers = {name: torch.tensor([pair[name] for pair in pairs]) for name in ("prob_a", "target", "weight")}
        return padded(texts, self.pad, "cpu") | numbers
