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
from pluralign.training.finetune.batches import MicroBatch, TextPairs, draw_steps, split_steps
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

    def arguments(self, folder: Path, micro_batches: int, run_name: str) -> Any:
        """Return the ``TrainingArguments`` for a training.

        Args:
            folder: of the checkpoints.
            micro_batches: number of micro-batches of a step, of all processes together.
            run_name: name of the training in trackers.
        """
        gpu, trackers = torch.cuda.is_available(), self.tuning.trackers
        return transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=1,  # one micro-batch
            gradient_accumulation_steps=micro_batches // self.processes,
            num_train_epochs=1,  # ``micro_batches`` holds all epochs
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

    def micro_batches(
        self, pairs: TextPairs, lengths: npt.NDArray[np.int64], max_pairs: int, rng: np.random.Generator
    ) -> list[list[MicroBatch]]:
        """Return the micro-batches of every step.

        Args:
            pairs: the training pairs.
            lengths: tokens of each text.
            max_pairs: a micro-batch has at most twice as many texts.
            rng: of the random order of each epoch.
        """
        steps = draw_steps(pairs.prompt, self.steps, self.batch, rng)
        return split_steps(steps, pairs, lengths, 2 * max_pairs, self.processes)


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
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and tuning.optimizer == "soap":
        raise UsageError("SOAP needs whole matrices, but FSDP splits them over devices; use --optimizer adamw.")
    learning_rate = tuning.learning_rate or (LORA_LEARNING_RATE if tuning.lora else LEARNING_RATE)
    return Recipe(batch, steps, learning_rate, tuning, seed, processes)
