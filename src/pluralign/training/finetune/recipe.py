"""The recipe of fine-tuning: steps, learning rates, trackers and the order of pairs (the paper's App. Training
Pipeline).
"""

import importlib
import math
import os
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from pluralign.core.errors import MissingExtraError, UsageError
from pluralign.training.batch_size import batch_and_steps
from pluralign.training.options import FinetuneOptions

LEARNING_RATE, LORA_LEARNING_RATE = 2e-5, 2e-4
WEIGHT_DECAY = 0.1
WARM_UP_SHARE = 0.03
LOGGED_STEPS = 200
"""Number of steps of one training that trackers get."""
CHECKPOINTS = 4
"""Number of checkpoints of one training."""


@dataclass(frozen=True)
class Recipe:
    """How every model of an ensemble is trained."""

    batch: int
    """Pairs per step, of all processes together."""
    steps: int
    learning_rate: float
    """Of the body; the head has ten times this."""
    tuning: FinetuneOptions
    seed: int
    processes: int
    """Number of processes that train together."""

    def micro_batch(self, most: int) -> int:
        """Return the largest divisor of a process's share of a step that is at most ``most``."""
        share = self.batch // self.processes
        return max(size for size in range(1, min(most, share) + 1) if share % size == 0)

    def arguments(self, folder: Path, micro_batch: int, run_name: str) -> Any:
        """Return the ``TrainingArguments`` for a training.

        Args:
            folder: of the checkpoints.
            micro_batch: pairs that a process reads at once.
            run_name: name of the training in trackers.
        """
        gpu, trackers = torch.cuda.is_available(), self.tuning.trackers
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=self.batch // self.processes // micro_batch,
            num_train_epochs=1,  # ``order`` holds all epochs
            learning_rate=self.learning_rate,
            weight_decay=WEIGHT_DECAY,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, math.ceil(WARM_UP_SHARE * self.steps)),
            bf16=gpu and torch.cuda.is_bf16_supported(),  # some CPUs report bf16 and raise SIGILL (docs/log.md)
            gradient_checkpointing=self.tuning.gradient_checkpointing,
            save_strategy="steps",
            save_steps=math.ceil(self.steps / (CHECKPOINTS + 1)),
            save_total_limit=2,
            logging_strategy="steps" if trackers else "no",
            logging_steps=math.ceil(self.steps / LOGGED_STEPS),
            logging_first_step=True,
            log_level_replica="passive",  # else it resets transformers' log level in all processes but the first
            report_to=trackers or "none",
            run_name=run_name,
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=gpu,
            use_cpu=not gpu,  # else it sees no other process on a machine without a GPU
            seed=self.seed,
        )
        # With more GPUs than processes the Trainer would use DataParallel, multiply the micro-batch and take fewer steps.
        arguments._n_gpu = min(1, arguments.n_gpu)
        return arguments

    def order(self, pair_lengths: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return the pairs of every step, one epoch after the other, ``(steps * batch,)``.

        Within a step the longest pairs come first. Pairs of similar length then share a micro-batch and need little
        padding; the step itself does not change.

        Args:
            pair_lengths: tokens of the longer text of each pair, ``(n,)``.
            rng: of the random order of each epoch.
        """
        n, total = len(pair_lengths), self.steps * self.batch
        order = np.concatenate([rng.permutation(n) for _ in range(math.ceil(total / n))])[:total]
        steps = order.reshape(self.steps, self.batch)
        ranks = np.argsort(-pair_lengths[steps], axis=1, kind="stable")
        return np.take_along_axis(steps, ranks, axis=1).ravel()


def check_trackers(tuning: FinetuneOptions) -> None:
    """Raise MissingExtraError if a tracker is not installed."""
    for name in tuning.trackers:
        try:
            with redirect_stdout(sys.stderr):
                importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
        except ImportError:
            raise MissingExtraError(name, None, f"--report-to {name}") from None


def make_recipe(n_pairs: int, tuning: FinetuneOptions, seed: int, processes: int) -> Recipe:
    """Return the recipe for a number of training pairs.

    Raises:
        UsageError: the batch cannot be split over the processes, or the optimiser does not work with FSDP.
    """
    batch, steps = batch_and_steps(n_pairs, tuning.batch_size, tuning.epochs)
    if batch % processes:
        raise UsageError(
            f"the number of processes must divide the pairs per step, but {batch} pairs and {processes} processes were "
            f"given; change --batch-size or the number of processes."
        )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and tuning.optimizer != "adamw":
        raise UsageError("SOAP needs whole matrices, but FSDP splits them over devices; use --optimizer adamw.")
    learning_rate = tuning.learning_rate or (LORA_LEARNING_RATE if tuning.lora else LEARNING_RATE)
    return Recipe(batch, steps, learning_rate, tuning, seed, processes)
