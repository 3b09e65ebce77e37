"""Training of one model: resumed from its last checkpoint, with a smaller micro-batch when memory runs out."""

import gc
import importlib
import json
import logging
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.integrations.integration_utils import TensorBoardCallback

from pluralign.core.arrays import FloatArray
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.distributed import Processes
from pluralign.core.errors import DataError
from pluralign.core.files import disk_errors_as_data_error
from pluralign.core.random_streams import FINETUNE
from pluralign.core.types import Progress
from pluralign.features.options import ChosenPrecision
from pluralign.features.precision import check_cpu_bfloat16
from pluralign.features.transformer_encoder import layer_shape
from pluralign.models.batches import Tokens
from pluralign.models.classifier import classifier_head
from pluralign.models.loading import quiet_transformers
from pluralign.training.finetune.base import BaseModel, load_base
from pluralign.training.finetune.batches import TextPairs
from pluralign.training.finetune.head import FirstHead, HeadFitter, Heads
from pluralign.training.finetune.losses import PairLoss, RunningFigures
from pluralign.training.finetune.recipe import Recipe, make_recipe
from pluralign.training.finetune.trainer import (
    COMPLETE_FILE,
    MicroBatches,
    PairLabels,
    PairTrainer,
    StepCallback,
    only_one,
)
from pluralign.training.options import FinetuneOptions

logger = logging.getLogger("pluralign")
FIRST_HEAD = np.random.SeedSequence(0)
"""Seed of a head that is replaced before it is used."""


@dataclass(frozen=True)
class Training:
    """The training of one model."""

    name: str
    outputs: int
    loss: PairLoss
    labels: PairLabels
    head: FirstHead
    """The first head; not used with ``fresh_head``."""


@dataclass
class FinetuneRun:
    """What the trainings of one ensemble share."""

    pairs: TextPairs
    tokens: Sequence[Tokens]
    """Of every distinct text."""
    recipe: Recipe
    base: BaseModel
    head: HeadFitter
    checkpoints: Checkpoints
    notes: list[str]
    """What the user should know about the run, as sentences without a full stop."""
    micro_batch: int
    """A process reads at most twice as many texts at once; lower after memory ran out."""
    progress: Progress | None = None
    steps: int = 0
    """Optimiser steps that the last training took."""

    @property
    def folder(self) -> Path:
        """Folder of the models and of unfinished trainings."""
        if self.checkpoints.path is None:
            raise ValueError("fine-tuning needs checkpoints with a folder")
        return self.checkpoints.path

    def train(self, training: Training, target: Path) -> float:
        """Train one model into ``target``, a folder of the checkpoints, unless it is there; return the seconds."""
        unfinished = self.folder / f"training-{training.name}"

        def compute() -> dict[str, float]:
            started = time.perf_counter()
            self.steps = self.recipe.steps  # of a model that was complete when a run was killed
            name = target.relative_to(self.folder).as_posix()
            self.checkpoints.folder(name, lambda folder: self._train_into(folder, training, unfinished))
            if self.checkpoints.processes.first:
                shutil.rmtree(unfinished, ignore_errors=True)
            return {"seconds": time.perf_counter() - started, "steps": self.steps}

        done = self.checkpoints.value(training.name, compute)
        self.steps = int(done["steps"])
        return float(done["seconds"])

    def fit_head(self, heads: Heads) -> FloatArray:
        """Return the weights of a head fitted to the base model's states, ``(outputs, hidden)``. Loads the model."""
        recipe = self.recipe
        try:
            with random_states_restored(), quiet_transformers():
                device = recipe.arguments(self.folder, recipe.processes, "").device
                model = self.base.reward_model(1, replace(recipe.tuning, lora=False), FIRST_HEAD, recipe.bf16_body)
                fitted = self.head.fit(heads, model, device)
                del model  # so that its memory is free for the training
            return fitted
        finally:
            _free_memory()

    def _train_into(self, folder: Path, training: Training, unfinished: Path) -> None:
        """Train one model and write it to a folder.

        When memory runs out, the micro-batch is halved. The pairs of a step stay the same, and so does the result.
        """
        while True:
            try:
                remedy = "free some space and run the same command; it resumes from the last complete checkpoint"
                disk_errors = disk_errors_as_data_error(self.folder, remedy)
                with disk_errors, random_states_restored(), quiet_transformers():
                    trainer = self._train(training, unfinished)
                    self.steps = trainer.state.global_step
                    trainer.save_model(str(folder))
                    del trainer  # so that its memory is free for what follows
                break
            except RuntimeError as error:  # running out of memory is one
                if not _is_out_of_memory(error):
                    raise
                self._halve_micro_batch()
            finally:
                _free_memory()
        if self.checkpoints.processes.first:
            (folder / "training_args.bin").unlink(missing_ok=True)

    def _train(self, training: Training, unfinished: Path) -> PairTrainer:
        """Train from the last complete checkpoint, or from the start; return the trainer with the trained model."""
        checkpoint = self._last_complete(unfinished)
        trainer = self.trainer(training, unfinished, fit_head=checkpoint is None and not self.recipe.tuning.fresh_head)
        if checkpoint is not None:
            stored = json.loads((checkpoint / COMPLETE_FILE).read_text())
            trainer.running.square, trainer.running.disagreement = stored["square"], stored["disagreement"]
        with redirect_stdout(sys.stderr):  # stdout is for results, and trackers print
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            if "wandb" in self.recipe.tuning.trackers:
                importlib.import_module("wandb").finish()  # else the next model continues this run
        return trainer

    def trainer(self, training: Training, unfinished: Path, fit_head: bool) -> PairTrainer:
        """Return a trainer with a fresh model, whose head is fitted or random."""
        recipe, pairs = self.recipe, self.pairs
        seed = [recipe.seed, FINETUNE, *training.name.encode()]
        lengths = np.array([len(text["input_ids"]) for text in self.tokens])
        batches = recipe.micro_batches(pairs, lengths, self.micro_batch, np.random.default_rng(seed))
        arguments = recipe.arguments(unfinished, len(batches[0]), self._run_name(training))

        def head(model: Any) -> FloatArray:
            return training.head(model, arguments.device)

        sequence = np.random.SeedSequence(seed)
        model = self.base.reward_model(
            training.outputs, recipe.tuning, sequence, recipe.bf16_body, head if fit_head else None
        )
        running = RunningFigures()
        trainer = PairTrainer(
            model=model,
            args=arguments,
            train_dataset=MicroBatches(
                list(chain.from_iterable(batches)),
                pairs,
                self.tokens,
                training.labels,
                self.base.tokenizer.pad_token_id,
            ),
            data_collator=only_one,
            processing_class=self.base.tokenizer,
            callbacks=[StepCallback(running, self.progress, self.checkpoints.processes)],
        )
        trainer.remove_callback(transformers.PrinterCallback)  # stdout is for results
        trainer.pair_loss, trainer.running, trainer.optimizer_name = training.loss, running, recipe.tuning.optimizer
        trainer.head, _ = classifier_head(model)
        if "tensorboard" in recipe.tuning.trackers:  # its default is a folder of the checkpoints, which are removed
            logs: Any = trainer.pop_callback(TensorBoardCallback)
            logs.logging_dir = logs.logging_dir or str(Path("runs") / arguments.run_name)
            trainer.add_callback(logs)
        return trainer

    def _run_name(self, training: Training) -> str:
        """Return the name of a training in trackers: the run and the model, such as ``ensemble-member-0``."""
        root = self.checkpoints.root
        return f"{self.recipe.tuning.run_name or (root.resolve().name if root else '')}-{training.name}"

    def _last_complete(self, unfinished: Path) -> Path | None:
        """Return the last complete checkpoint, and remove incomplete ones."""
        folders = sorted(unfinished.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        complete = [path for path in folders if (path / COMPLETE_FILE).is_file()]
        self.checkpoints.processes.wait()
        if self.checkpoints.processes.first:
            for path in folders:
                if path not in complete:
                    shutil.rmtree(path, ignore_errors=True)
        return complete[-1] if complete else None

    def _halve_micro_batch(self) -> None:
        """Halve the micro-batch, or raise a ``DataError`` if that is not possible."""
        size = self.micro_batch
        if size == 1 or self.checkpoints.processes.count > 1:
            remedy = f"run the same command with --micro-batch {max(1, size // 2)}; it resumes from the last checkpoint"
            if size == 1:
                remedy = "use --lora, --gradient-checkpointing or a smaller --max-length"
            message = f"memory ran out with a micro-batch of {size}"
            raise DataError(message, file=self.base.name, remedy=remedy) from None
        self.micro_batch = size // 2
        self.notes.append(f"memory ran out with a micro-batch of {size}, so it continues with {self.micro_batch}")
        logger.warning("%s.", self.notes[-1])


def prepare_run(
    pairs: TextPairs,
    tuning: FinetuneOptions,
    seed: int,
    checkpoints: Checkpoints,
    progress: Progress | None = None,
    precision: ChosenPrecision = "float32",
) -> FinetuneRun:
    """Load the tokenizer of the base model, tokenise the texts, and log notes for the user.

    Args:
        pairs: the training pairs.
        tuning: the backbone and the recipe.
        seed: of heads, adapters and the order of pairs.
        checkpoints: stores models and unfinished trainings; it must have a folder.
        progress: called with the steps done and their total.
        precision: of weights, gradients and optimiser states.

    Raises:
        UsageError: the recipe does not work here, see ``make_recipe``, or bfloat16 would end the process.
    """
    processes = checkpoints.processes
    recipe = make_recipe(len(pairs.prob_a), tuning, seed, processes.count, precision)
    base = load_base(str(tuning.backbone), tuning.max_length, pairs.items)
    if precision == "bfloat16" and not torch.cuda.is_available():
        check_cpu_bfloat16(layer_shape(base.config.to_dict()))
    tokens, truncated = base.tokens(pairs.items)
    notes = [*base.notes, *([truncated] if truncated else []), *_unused_gpus(processes)]
    for note in notes:
        if processes.first:
            logger.warning("%s.", note)
    head = HeadFitter(base, pairs, seed, processes)
    return FinetuneRun(pairs, tokens, recipe, base, head, checkpoints, notes, tuning.micro_batch, progress)


def _unused_gpus(processes: Processes) -> list[str]:
    """Return a note if this process sees further GPUs: a process trains on one."""
    unused = torch.cuda.device_count() - 1
    if processes.count > 1 or unused < 1:
        return []
    return [
        f"training uses one GPU, and {unused} more {'is' if unused == 1 else 'are'} not used; start it with accelerate "
        f"launch --num_processes {unused + 1} -m pluralign fit … to use all of them"
    ]


# --- memory, disk and random states -----------------------------------------------------------------------------------


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def random_states_restored() -> Iterator[None]:
    """Restore the random states of Python, numpy and torch, which ``Trainer`` seeds for the whole process."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
