"""Fine-tuning of reward models on votes: the target, the loss and the first head of each member.

Every process of a launch must call ``fine_tune``; the first one writes. ``train_model`` trains and resumes one model.
"""

import gc
import importlib
import json
import logging
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

import accelerate
import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers.integrations.integration_utils import TensorBoardCallback

from pluralign.core.arrays import FloatArray
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.files import atomic_write, disk_errors_as_data_error
from pluralign.core.processes import Processes, join_launch
from pluralign.core.random_streams import FINETUNE
from pluralign.core.text import shortened
from pluralign.core.types import Method, Progress
from pluralign.learning.backbone.base import BaseModel, FirstHead, HeadFitter, Heads, load_base
from pluralign.learning.backbone.batches import MicroBatch, TextPairs, length_groups
from pluralign.learning.backbone.losses import MixtureLoss, PairLoss, RunningFigures, StageLoss, VoteLoss
from pluralign.learning.backbone.optimizer import RoundedAdamW
from pluralign.learning.backbone.recipe import Recipe, choose_precision, make_recipe
from pluralign.learning.options import FinetuneOptions, FitOptions, Variant
from pluralign.learning.pairs import Pairs, row_squares
from pluralign.learning.stagewise import fit_member, stage_target
from pluralign.learning.teacher import VOICES, Teacher, damping_factor
from pluralign.text.classifier import classifier_head
from pluralign.text.finetuned import FinetunedFeatures, forget_models, model_folders, model_identity
from pluralign.text.loading import Tokens, hub_source, padded, quiet_transformers
from pluralign.text.options import ChosenPrecision
from pluralign.text.precision import check_cpu_bfloat16
from pluralign.text.transformer import layer_shape
from pluralign.theory.calibration import votes_from_rewards
from pluralign.theory.simplex import simplex_least_squares

# --- transformers' ``Trainer`` for rewards on pairs: data set, batches, optimisers and checkpoints.


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
                from pluralign.learning.backbone.optimizer import OneSidedSoap, Soap
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


# --- Training of one model: resumed from its last checkpoint, with a smaller micro-batch when memory runs out.


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


Enough: TypeAlias = Callable[[npt.NDArray[np.float32]], bool]
"""Takes the rewards of the members so far for every text, ``(n_items, members)``; returns whether to stop there."""


@dataclass(frozen=True)
class Tuned:
    """Fine-tuned models, and how they were trained."""

    features: FinetunedFeatures
    steps: int
    """Optimiser steps that each model took."""
    batch_size: int
    learning_rate: float
    seconds: list[float]
    """Training time of each model."""
    notes: list[str]
    processes: int


def fine_tune(
    pairs: TextPairs,
    k: int,
    options: FitOptions,
    tuning: FinetuneOptions,
    checkpoints: Checkpoints,
    *,
    bound: float = 1.0,
    enough: Enough | None = None,
    progress: Progress | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """Fine-tune the models of an ensemble on the votes of ``pairs``.

    ``joint``: one model whose outputs are the rewards of a mixture, then one reward. It learns from the votes alone
    (``MixtureLoss``); no output learns from the prediction of another, because a single reward hides what divides
    people. The head starts as the mixture on the base model's states, fitted as the teacher of a frozen ensemble is,
    with its weights and its damping. The members themselves are fitted afterwards, on the states of the trained model.

    ``stagewise``: k models with one output, each from the same checkpoint, fitted to the residual of the hard votes of
    the members before it (§4). The head starts as the best linear one on the base model's states. A member whose
    running disagreement with people is above the bound is penalised.

    With ``fresh_head`` the head starts random instead, and a joint model learns by ``VoteLoss``.

    Args:
        pairs: the training pairs.
        k: number of stagewise members; with ``enough`` the largest. A joint model does not depend on it.
        options: method, variant and seed.
        tuning: the backbone and the recipe.
        checkpoints: stores the models and unfinished trainings, and resumes them; it must have a folder, and
            ``finetune_processes()`` as its processes.
        bound: stagewise: training disagreement above which a member is penalised; 1 sets no bound.
        enough: stagewise: called after each stage; if it returns True, no further stage is trained. Its answer is
            stored, so a resumed run stops at the same stage.
        progress: called with the steps done and their total.
        report: called with the name of each model before its training.

    Returns:
        The models as features, in the folder of ``checkpoints``: the states of a joint model, or the outputs of
        stagewise models.
    """
    run = prepare_run(pairs, tuning, options.seed, checkpoints, progress, choose_precision(options.precision))
    if options.method == "joint":
        features, seconds = _joint(run, report)
    else:
        features, seconds = _stagewise(run, k, options, bound, enough, report)
    recipe = run.recipe
    return Tuned(
        features, run.steps, recipe.batch, recipe.learning_rate, seconds, run.notes, checkpoints.processes.count
    )


def finetune_processes() -> Processes:
    """Return this process, joined to the others of its launch, for the ``Checkpoints`` of a fine-tuning."""
    return join_launch(cpu=not torch.cuda.is_available())


def _joint(run: FinetuneRun, report: Callable[[str], None]) -> tuple[FinetunedFeatures, list[float]]:
    prob_a = run.pairs.prob_a
    loss: PairLoss = VoteLoss(VOICES)
    start = {"head": np.zeros(0), "damping": np.ones(len(prob_a))}  # a fresh head needs none
    if not run.recipe.tuning.fresh_head:
        start = _start(run)
        loss = MixtureLoss(tuple(start["weights"].tolist()))
    report("all members")
    labels = PairLabels(prob_a, prob_a, start["damping"])
    features = _features(run, "joint", VOICES + 1)
    (folder,) = model_folders(features)
    seconds = run.train(Training("joint", VOICES + 1, loss, labels, lambda *_: start["head"]), folder)
    features = features.with_current_hashes()
    _outputs(run, features)  # fills the cache of vectors
    return features, [seconds]


def _start(run: FinetuneRun) -> dict[str, FloatArray]:
    """Return the mixture that a joint training starts from: ``head``, ``weights``, and ``damping`` of each pair."""
    found: dict[str, FloatArray] = {}

    def heads(pairs: Pairs, teacher: Teacher) -> FloatArray:
        squares = row_squares(pairs.difference)
        found["damping"] = damping_factor(squares, teacher.damping, teacher.mean_square)
        found["weights"] = teacher.voice_weights
        return np.column_stack([teacher.voices, teacher.theta])

    def compute() -> dict[str, FloatArray]:
        head = run.fit_head(heads)
        return {"head": head, **found}

    return run.checkpoints.arrays("start", compute)


def _stagewise(
    run: FinetuneRun,
    k: int,
    options: FitOptions,
    bound: float,
    enough: Enough | None,
    report: Callable[[str], None],
) -> tuple[FinetunedFeatures, list[float]]:
    pairs = run.pairs
    prob_hat = np.full(len(pairs.prob_a), 0.5)
    seconds: list[float] = []
    identity: tuple[str, ...] = ()
    for j in range(k):
        report(f"member {j + 1} of {'at most ' if enough else ''}{k}")
        features = _features(run, "stagewise", j + 1)
        folder = model_folders(features)[j]
        variant: Variant = "symmetric" if j == 0 else options.variant
        residual = pairs.prob_a - prob_hat

        def heads(
            base: Pairs, teacher: Teacher, residual: FloatArray = residual, variant: Variant = variant
        ) -> FloatArray:
            return fit_member(base.difference, residual, l2=teacher.l2, variant=variant)[:, None]

        labels = PairLabels(pairs.prob_a, stage_target(residual, variant), np.ones(len(residual)))
        head = partial(run.head.fit, heads)
        seconds.append(run.train(Training(f"member-{j}", 1, StageLoss(bound), labels, head), folder))
        identity = (*identity, model_identity(folder, features))
        features = _features(run, "stagewise", j + 1, identity)
        outputs = _outputs(run, features)
        votes = votes_from_rewards(outputs[pairs.a], outputs[pairs.b])
        if enough and _agreed(run, f"enough-{j}", lambda: enough(outputs)):  # noqa: B023 - called at once
            break
        prob_hat = votes @ simplex_least_squares(votes, pairs.prob_a)
    return features, seconds


def _agreed(run: FinetuneRun, name: str, decide: Callable[[], bool]) -> bool:
    """Return a decision of the first process, as stored if it was made before."""
    return bool(run.checkpoints.value(name, lambda: run.checkpoints.processes.agreed(decide)))


def _features(run: FinetuneRun, method: Method, outputs: int, identity: tuple[str, ...] = ()) -> FinetunedFeatures:
    """Return the models as features."""
    source = hub_source(run.base.folder)
    return FinetunedFeatures(
        base=run.base.name, method=method, lora=run.recipe.tuning.lora, outputs=outputs,
        max_length=run.base.max_length, identity=identity, revision=source[1] if source else "",
        precision=run.recipe.scoring, folder=run.folder, reads="states" if method == "joint" else "outputs",
    )  # fmt: skip


def _outputs(run: FinetuneRun, features: FinetunedFeatures) -> npt.NDArray[np.float32]:
    """Return the features of all texts: the outputs of stagewise models, ``(n_items, outputs)``, or joint states.

    Each process computes a part; the cache of vectors then gives all of them to every process.
    """
    items, processes = run.pairs.items, run.checkpoints.processes
    if processes.count > 1:
        features(items[processes.rank :: processes.count])
        processes.wait()
    outputs = features(items)
    forget_models()
    return outputs
