"""transformers' ``Trainer`` for rewards on pairs: data set, batches, optimisers and checkpoints."""

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from time import monotonic
from typing import Any

import accelerate
import numpy as np
import torch
import transformers

from pluralign.core.arrays import FloatArray
from pluralign.core.distributed import Processes
from pluralign.core.errors import MissingExtraError, UsageError
from pluralign.core.files import atomic_write
from pluralign.core.text import shortened
from pluralign.core.types import Progress
from pluralign.models.batches import Tokens, padded
from pluralign.training.finetune.batches import MicroBatch, TextPairs, length_groups
from pluralign.training.finetune.losses import PairLoss, RunningFigures
from pluralign.training.finetune.rounding import RoundedAdamW

HEAD_FACTOR = 10.0
"""Learning rate of the head, relative to that of the body."""
COMPLETE_FILE = "complete.json"
"""Written last into a checkpoint; a checkpoint without it is not resumed."""
CHECKPOINT_SECONDS = 600.0
"""Time between two checkpoints, unless a save takes long."""
CHECKPOINT_VARIABLE = "PLURALIGN_CHECKPOINT_SECONDS"
"""Environment variable with another time; 0 saves after every step."""
CPU_PASS, GPU_PASS = 64, 1024
"""Cost of one more forward pass, as a number of tokens. That of GPUs is a guess."""
SAVE_SECONDS = 30.0
"""Time of a save above which the time between checkpoints grows in proportion: a twentieth of 600 s."""


# --- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairLabels:
    """What a training needs to know of each pair besides its texts, ``(n,)`` each."""

    prob_a: FloatArray
    """Share of people preferring a."""
    target: FloatArray
    """Share to predict."""
    weight: FloatArray
    """Weight in the loss."""


LABELS = tuple(one.name for one in fields(PairLabels))


@dataclass(frozen=True)
class MicroBatches(torch.utils.data.Dataset[Any]):
    """The micro-batches of a training in their order. Each has the tokens of its texts, padded on the right."""

    batches: Sequence[MicroBatch]
    pairs: TextPairs
    tokens: Sequence[Tokens]
    """Of every distinct text."""
    labels: PairLabels
    pad: int
    """Token id of the padding."""

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, position: int) -> dict[str, Any]:
        batch, pairs = self.batches[position], self.pairs
        places = {"a": pairs.a[batch.pairs], "b": pairs.b[batch.pairs]}
        return {
            **padded([self.tokens[text] for text in batch.texts], self.pad, "cpu"),
            **{name: torch.from_numpy(np.searchsorted(batch.texts, index)) for name, index in places.items()},
            **{name: torch.from_numpy(getattr(self.labels, name)[batch.pairs]).float() for name in LABELS},
            "scale": torch.tensor(batch.scale),
        }


def only_one(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the one micro-batch of a batch: a ``DataLoader`` makes batches of one."""
    (batch,) = batches
    return batch


# --- training ---------------------------------------------------------------------------------------------------------


class PairTrainer(transformers.Trainer):
    """A ``Trainer`` whose batches are ``MicroBatches``."""

    loss_is_scaled_for_ga = False
    pair_loss: PairLoss
    running: RunningFigures
    optimizer_name: str
    head: str
    """Name of the head's layer."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: ARG002
        num_items_in_batch: Any = None,  # noqa: ARG002
    ) -> Any:
        """Return the loss of one micro-batch."""
        labels = {name: inputs.pop(name) for name in LABELS}
        a, b, scale = (inputs.pop(name) for name in ("a", "b", "scale"))
        rewards = self.rewards(model, inputs)
        difference = rewards[a] - rewards[b]
        self.running.add(difference.detach(), labels["prob_a"])
        done = self.state.global_step / max(1, self.state.max_steps - 1)
        return scale * self.pair_loss(difference, labels, self.running, done)

    def rewards(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Return the rewards of the texts of a micro-batch, ``(n_texts, outputs)``, read in groups of similar length.

        In several processes there is one group: DDP and FSDP expect one forward pass per step.
        """
        if self.args.world_size > 1:
            return model(**inputs).logits.float()
        lengths = inputs["attention_mask"].sum(dim=1).tolist()
        groups = length_groups(lengths, CPU_PASS if self.args.device.type == "cpu" else GPU_PASS)
        parts = [
            model(**{name: part[group, : lengths[group[0]]] for name, part in inputs.items()}).logits.float()
            for group in groups
        ]
        return torch.cat(parts)[torch.from_numpy(np.argsort(np.concatenate(groups)))]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:  # noqa: ARG002
        ordered: Any = self.train_dataset
        return torch.utils.data.SequentialSampler(ordered)

    def create_optimizer(self, model: Any = None) -> Any:
        """Return SOAP or AdamW. The head has a higher learning rate; biases and norms have no weight decay."""
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
            half = any(one.dtype == torch.bfloat16 for group in groups.values() for one in group)
            self.optimizer = (RoundedAdamW if half else torch.optim.AdamW)(settings, lr=rate)
        else:
            try:
                from pluralign.training.finetune.soap import OneSidedSoap, Soap
            except ImportError:
                option = f"--optimizer {self.optimizer_name}"
                raise MissingExtraError("pytorch-optimizer", "finetune", option) from None
            self.optimizer = (OneSidedSoap if self.optimizer_name == "soap-one-sided" else Soap)(settings, lr=rate)
        return self.optimizer


class StepCallback(transformers.TrainerCallback):
    """Updates the running figures after each step, reports progress, and decides when a checkpoint is saved.

    A checkpoint is due ``CHECKPOINT_SECONDS`` after the last one or after the start. If a save takes longer than
    ``SAVE_SECONDS``, the interval grows in proportion, so that saving takes at most a twentieth of the time. Only the
    newest complete checkpoint is kept.

    Args:
        running: the figures to update.
        progress: called with the steps done and their total.
        processes: the first one decides and writes.
    """

    def __init__(self, running: RunningFigures, progress: Progress | None, processes: Processes) -> None:
        self.running, self.progress, self.processes = running, progress, processes
        self.interval = checkpoint_seconds()
        self.slowdown = 1.0
        self.since = self.save_started = monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Start the clock."""
        self.since = monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Update the running figures, report the step, and ask for a checkpoint if one is due."""
        self.running.end_step(_sum_over_processes)
        if state.global_step < state.max_steps:  # after the last step the model itself is saved
            control.should_save = self.processes.agreed(self._is_due)
        self.save_started = monotonic()
        if self.progress:
            self.progress(state.global_step, state.max_steps)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Mark a checkpoint as complete, store the running figures in the mark, and remove older checkpoints."""
        self.processes.wait()  # every process writes a part
        if self.processes.first:
            stored = {"square": self.running.square, "disagreement": self.running.disagreement}
            newest = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            with atomic_write(newest / COMPLETE_FILE) as partial:
                partial.write_text(json.dumps(stored))
            for path in Path(args.output_dir).glob("checkpoint-*"):
                if path != newest:
                    shutil.rmtree(path, ignore_errors=True)
        self.since = monotonic()
        self.slowdown = max(1.0, (self.since - self.save_started) / SAVE_SECONDS)

    def _is_due(self) -> bool:
        return monotonic() - self.since >= self.interval * self.slowdown


def checkpoint_seconds() -> float:
    """Return the time between two checkpoints. Raises UsageError if the environment variable has no such value."""
    value = os.environ.get(CHECKPOINT_VARIABLE, str(CHECKPOINT_SECONDS))
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise UsageError(f"{CHECKPOINT_VARIABLE} must be a number of seconds, 0 or more, not {shortened(value, 20)!r}.")
    return seconds


def _sum_over_processes(sums: Any) -> Any:
    return accelerate.utils.reduce(sums, "sum")
