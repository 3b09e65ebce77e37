"""The recipe of fine-tuning (the paper's App. Training Pipeline): steps, learning rates, and the order of training.

A model learns from units: pairs with their votes, or whole judgments. The units of a prompt share responses. A step
therefore takes whole prompts, and a micro-batch reads each of its texts once and takes all its units from their
rewards. The loss is a mean over the units of a step, so the split into micro-batches changes no result.
"""

import importlib
import math
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import transformers

from pluralign.core.arrays import FloatArray, IndexArray
from pluralign.core.errors import MissingExtraError, UsageError
from pluralign.learning.options import FinetuneOptions
from pluralign.text.loading import gpu_has_bfloat16
from pluralign.text.options import ChosenPrecision, Precision
from pluralign.votes.prompts import Item

LARGEST_BATCH = 512
LEAST_STEPS = 32
"""The batch is halved from 512 until an epoch has this many steps."""
PROMPTS_PER_STEP = 8
"""Smallest number of prompts of a step, on average. The pairs of a prompt are alike: with two prompts per step the
held-out error was higher than with as many single pairs (docs/log.md)."""


def batch_and_steps(
    n_units: int, n_prompts: int, batch_size: int | None = None, epochs: float = 1.0
) -> tuple[int, int]:
    """Return units per step, and the number of steps.

    The batch is the largest power of two up to 512 that gives at least 32 steps per epoch, but no smaller than the
    units of eight prompts.

    Args:
        n_units: number of training pairs, or of judgments.
        n_prompts: number of their prompts.
        batch_size: units per step, if they are given.
        epochs: passes over the units.

    Example:
        >>> batch_and_steps(100_000, 100_000), batch_and_steps(1_500, 1_500), batch_and_steps(1_500, 150)
        ((512, 195), (32, 47), (128, 12))
    """
    batch, smallest = batch_size or LARGEST_BATCH, PROMPTS_PER_STEP * n_units / n_prompts
    while batch_size is None and batch // 2 >= smallest and n_units * epochs < LEAST_STEPS * batch:
        batch //= 2
    return batch, max(1, round(n_units * epochs / batch))


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
    """Units per step, of all processes together."""
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
            ddp_find_unused_parameters=False,  # every step uses all parameters; the search would visit the whole graph
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
    prompt: IndexArray, tuning: FinetuneOptions, seed: int, processes: int, precision: ChosenPrecision = "float32"
) -> TrainingPlan:
    """Return the plan for units of these prompts, ``(n,)``.

    Raises:
        UsageError: the batch cannot be split over the processes, or optimiser or precision do not work with FSDP.
    """
    batch, steps = batch_and_steps(len(prompt), len(np.unique(prompt)), tuning.batch_size, tuning.epochs)
    if batch % processes:
        given = f"{processes} processes cannot share a step of {batch} equally"
        raise UsageError(f"{given}; change --batch-size or the number of processes.")
    if _uses_fsdp() and precision == "bfloat16":
        raise UsageError("FSDP needs weights of one precision, but the head is in float32; use --precision float32.")
    if _uses_fsdp() and tuning.optimizer != "adamw":
        raise UsageError("SOAP needs whole matrices, but FSDP splits them over devices; use --optimizer adamw.")
    learning_rate = tuning.learning_rate or (LORA_LEARNING_RATE if tuning.lora else LEARNING_RATE)
    return TrainingPlan(batch, steps, learning_rate, tuning, seed, processes, precision)


# --- the order of training: which units each step takes, and which texts are read together --------------------------


Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """Units that are read together, each of their texts once."""

    units: Indices
    texts: Indices
    """The distinct texts of the units, in ascending order."""
    scale: float
    """Units of this micro-batch over the mean of all micro-batches of the step. The mean of the scaled losses of the
    micro-batches is the loss of the step."""


class Units(Protocol):
    """What steps are made of: pairs, or whole judgments (``losses.PairLessons`` and ``JudgedLessons``)."""

    @property
    def prompt(self) -> IndexArray:
        """Prompt of each unit, ``(n,)``."""
        ...

    @property
    def texts(self) -> Sequence[Sequence[int]]:
        """The texts of each unit."""
        ...


@dataclass(frozen=True)
class TextPairs:
    """Compared texts, with the votes."""

    items: Sequence[Item]
    """Every distinct text."""
    a: IndexArray
    """Index of response a among the texts, ``(n,)``."""
    b: IndexArray
    """Index of response b among the texts, ``(n,)``."""
    prob_a: FloatArray
    """Share of people preferring a, ``(n,)``."""
    prompt: IndexArray
    """Prompt of each pair, ``(n,)``."""


def draw_steps(prompt: IndexArray, steps: int, batch: int, rng: np.random.Generator) -> Indices:
    """Return the units of every step, ``(steps, batch)``: prompts in random order, one epoch after the other.

    Args:
        prompt: prompt of each unit, ``(n,)``.
        steps: number of steps.
        batch: number of units per step.
        rng: of the order of prompts, and of the units of a prompt.

    Example:
        >>> draw_steps(np.array([0, 0, 1, 1]), 2, 2, np.random.default_rng(0)).tolist()
        [[1, 0], [2, 3]]
    """
    _, number = np.unique(prompt, return_inverse=True)
    epochs = []
    for _ in range(math.ceil(steps * batch / len(prompt))):
        place, rank = rng.permutation(number.max() + 1), rng.random(len(prompt))
        epochs.append(np.lexsort((rank, place[number])))
    return np.concatenate(epochs)[: steps * batch].reshape(steps, batch)


def split_steps(
    steps: Indices, units: Units, lengths: Indices, max_texts: int, processes: int = 1
) -> list[list[MicroBatch]]:
    """Return the micro-batches of every step: as few as possible, and the same number in every step.

    Prompts with texts of similar length share a micro-batch and need little padding. The longest come first, so that a
    lack of memory shows at once.

    Args:
        steps: the units of every step, ``(steps, batch)``.
        units: all units.
        lengths: tokens of each text.
        max_texts: maximum number of texts of a micro-batch, at least 2. A unit with more texts has one of its own.
        processes: the number of micro-batches is a multiple of it.
    """
    prompt, texts = units.prompt, units.texts
    longest = np.zeros(int(prompt.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, prompt, [max(lengths[text] for text in own) for own in texts])
    split = []
    for step in steps:
        order = sorted(step.tolist(), key=lambda unit: (-longest[prompt[unit]], prompt[unit], texts[unit]))
        split.append(_split(np.array(order), units, max_texts))
    count = math.ceil(max(map(len, split)) / processes) * processes

    def micro_batch(part: Indices) -> MicroBatch:
        return MicroBatch(part, distinct_texts(units, part), len(part) / (steps.shape[1] / count))

    return [[micro_batch(part) for part in _refine(parts, units, count)] for parts in split]


def distinct_texts(units: Units, some: Indices) -> Indices:
    """Return the distinct texts of some units, in ascending order."""
    return np.unique(np.fromiter(chain.from_iterable(units.texts[unit] for unit in some), dtype=np.int64))


def length_groups(lengths: Sequence[int], pass_tokens: int) -> list[list[int]]:
    """Return the texts of each forward pass of a micro-batch. Texts of similar length share a pass, to avoid padding.

    Minimises Σ_g (n_g · max length_g + c) over groups g of texts that are adjacent in order of length.

    Args:
        lengths: tokens of each text.
        pass_tokens: c, the cost of one more pass, as a number of tokens.

    Example:
        >>> length_groups([10, 200, 12, 190], pass_tokens=64)
        [[1, 3], [2, 0]]
        >>> length_groups([10, 200, 12, 190], pass_tokens=1024)
        [[1, 3, 2, 0]]
    """
    order = sorted(range(len(lengths)), key=lambda text: -lengths[text])
    best: list[tuple[float, int]] = [(0.0, 0)]  # of the first texts in order: the cost, and where the last group starts
    for end in range(1, len(order) + 1):
        costs = ((best[i][0] + (end - i) * lengths[order[i]] + pass_tokens, i) for i in range(end))
        best.append(min(costs))
    groups: list[list[int]] = []
    while order:
        start = best[len(order)][1]
        groups.insert(0, order[start:])
        del order[start:]
    return groups


def _split(step: Indices, units: Units, max_texts: int) -> list[Indices]:
    """Cut the units of a step where the texts are too many: between prompts, or inside a prompt with many texts."""
    parts, current, read = list[Indices](), list[int](), set[int]()
    bounds = np.flatnonzero(np.diff(units.prompt[step])) + 1
    for group in np.split(step, bounds):
        too_many = len(read | set(distinct_texts(units, group).tolist())) > max_texts
        for unit in group.tolist():
            own = set(units.texts[unit])
            if current and (too_many or len(read | own) > max_texts):
                parts.append(np.array(current))
                current, read = [], set()
            too_many = False
            current.append(unit)
            read |= own
    return [*parts, np.array(current)]


def _refine(parts: list[Indices], units: Units, count: int) -> list[Indices]:
    """Halve the largest parts until there are ``count``, between prompts where possible."""
    parts = list(parts)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda position: len(parts[position]))
        part = parts[largest]
        bounds, middle = np.flatnonzero(np.diff(units.prompt[part])) + 1, len(part) // 2
        cut = int(bounds[np.abs(bounds - middle).argmin()]) if len(bounds) else middle
        parts[largest : largest + 1] = [part[:cut], part[cut:]]
    return parts
