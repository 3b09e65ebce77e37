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

import torch
import transformers

from pluralign.core.errors import MissingExtraError, UsageError
from pluralign.learning.options import FinetuneOptions
from pluralign.text.loading import gpu_has_bfloat16
from pluralign.text.options import ChosenPrecision, Precision

# --- Pairs per step and number of steps of fine-tuning (the paper's App. Training Pipeline). It needs no torch.


LARGEST_BATCH = 512
LEAST_STEPS = 32
"""The batch is halved from 512 until an epoch has this many steps."""
SMALLEST_BATCH = 8


def batch_and_steps(n_pairs: int, batch_size: int | None = None, epochs: float = 1.0) -> tuple[int, int]:
    """Return pairs per step, and the number of steps.

    The batch is the largest power of two from 8 to 512 that gives at least 32 steps per epoch, or 8 if none does.

    Args:
        n_pairs: number of training pairs.
        batch_size: pairs per step, if they are given.
        epochs: passes over the pairs.

    Example:
        >>> batch_and_steps(100_000), batch_and_steps(1_500)
        ((512, 195), (32, 47))
    """
    batch = batch_size
    if batch is None:
        batch = LARGEST_BATCH
        while batch > SMALLEST_BATCH and n_pairs * epochs < LEAST_STEPS * batch:
            batch //= 2
    return batch, max(1, round(n_pairs * epochs / batch))


LEARNING_RATE, LORA_LEARNING_RATE = 2e-5, 2e-4
WEIGHT_DECAY = 0.1
WARM_UP_SHARE = 0.03
MAX_GRADIENT_NORM = 1.0
"""A longer gradient is scaled to this norm. The paper does not mention clipping; it is the default of transformers."""
LOGGED_STEPS = 200
"""Number of steps of one training that trackers get."""


@dataclass(frozen=True)
class TrainingPlan:
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
    precision: ChosenPrecision = "float32"
    """Of weights, gradients and optimiser states of the body. The head is in float32."""

    @property
    def autocast(self) -> bool:
        """Whether float32 weights are multiplied in bfloat16."""
        return self.precision == "float32" and gpu_has_bfloat16()

    @property
    def bf16_body(self) -> bool:
        """Whether the weights of the body are in bfloat16; those under LoRA adapters are not trained."""
        return self.precision == "bfloat16" or (self.tuning.lora and self.autocast)

    @property
    def scoring(self) -> ChosenPrecision:
        """Precision in which the trained models read texts."""
        return "bfloat16" if self.precision == "bfloat16" or gpu_has_bfloat16() else "float32"

    def arguments(self, folder: Path, micro_batches: int, run_name: str = "") -> Any:
        """Return the ``TrainingArguments`` for a training.

        Args:
            folder: of the checkpoints.
            micro_batches: number of micro-batches of a step, of all processes together.
            run_name: name of the training in trackers.
        """
        gpu, trackers = torch.cuda.is_available(), self.tuning.trackers
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=1,  # one micro-batch
            gradient_accumulation_steps=micro_batches // self.processes,
            num_train_epochs=1,  # ``micro_batches`` holds all epochs
            learning_rate=self.learning_rate,
            weight_decay=WEIGHT_DECAY,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, math.ceil(WARM_UP_SHARE * self.steps)),
            max_grad_norm=MAX_GRADIENT_NORM,
            bf16=self.autocast,
            gradient_checkpointing=self.tuning.gradient_checkpointing,
            save_strategy="no",  # ``StepCallback`` decides when to save, and removes old checkpoints
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
        # With several GPUs the Trainer would use DataParallel, multiply the micro-batch and take fewer steps.
        arguments._n_gpu = min(1, arguments.n_gpu)
        return arguments


def check_trackers(tuning: FinetuneOptions) -> None:
    """Raise MissingExtraError if a tracker is not installed."""
    for name in tuning.trackers:
        try:
            with redirect_stdout(sys.stderr):
                importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
        except ImportError:
            raise MissingExtraError(name, None, f"--report-to {name}") from None


def choose_precision(requested: Precision) -> ChosenPrecision:
    """Return the precision of training. ``auto`` is bfloat16 on GPUs that support it, and float32 with FSDP."""
    if requested != "auto":
        return requested
    return "bfloat16" if gpu_has_bfloat16() and not _uses_fsdp() else "float32"


def _uses_fsdp() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


def training_plan(
    n_pairs: int, tuning: FinetuneOptions, seed: int, processes: int, precision: ChosenPrecision = "float32"
) -> TrainingPlan:
    """Return the plan for a number of training pairs.

    Raises:
        UsageError: the batch cannot be split over the processes, or optimiser or precision do not work with FSDP.
    """
    batch, steps = batch_and_steps(n_pairs, tuning.batch_size, tuning.epochs)
    if batch % processes:
        raise UsageError(
            f"the number of processes must divide the pairs per step, but {batch} pairs and {processes} processes were "
            f"given; change --batch-size or the number of processes."
        )
    if _uses_fsdp() and precision == "bfloat16":
        raise UsageError("FSDP needs weights of one precision, but the head is in float32; use --precision float32.")
    if _uses_fsdp() and tuning.optimizer != "adamw":
        raise UsageError("SOAP needs whole matrices, but FSDP splits them over devices; use --optimizer adamw.")
    learning_rate = tuning.learning_rate or (LORA_LEARNING_RATE if tuning.lora else LEARNING_RATE)
    return TrainingPlan(batch, steps, learning_rate, tuning, seed, processes, precision)
