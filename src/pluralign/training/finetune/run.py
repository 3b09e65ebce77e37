"""Fine-tuning of reward models on votes, with transformers' ``Trainer``: one process or many, resumed after a kill.

This module decides what each member is fitted to, and what is stored of unfinished work. Every process must call
``fine_tune``; the first one writes.
"""

import errno
import gc
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from pluralign.core.arrays import FloatArray
from pluralign.core.distributed import Processes, join_launch
from pluralign.core.errors import DataError
from pluralign.core.files import atomic_write
from pluralign.core.types import Progress
from pluralign.features.finetuned import TunedFeatures, forget_models, model_folders, model_identity
from pluralign.models.classifier import classifier_head
from pluralign.models.loading import quiet_transformers
from pluralign.theory.calibration import votes_from_rewards
from pluralign.theory.simplex import simplex_least_squares
from pluralign.training import streams
from pluralign.training.bradley_terry import fit_bradley_terry
from pluralign.training.finetune.base import load_base
from pluralign.training.finetune.head import HeadFitter, Heads
from pluralign.training.finetune.losses import JointLoss, PairLoss, RunningFigures, StageLoss
from pluralign.training.finetune.recipe import make_recipe
from pluralign.training.finetune.trainer import (
    COMPLETE_FILE,
    Collator,
    OrderedPairs,
    PairLabels,
    PairTrainer,
    StepCallback,
    TextPairs,
)
from pluralign.training.joint import FEW_RESTARTS, fit_joint
from pluralign.training.options import FinetuneOptions, FitOptions, Variant
from pluralign.training.pairs import Pairs
from pluralign.training.stagewise import fit_member, stage_target
from pluralign.training.teacher import Teacher

logger = logging.getLogger("pluralign")


@dataclass(frozen=True)
class Tuned:
    """Fine-tuned models, and how they were trained."""

    features: TunedFeatures
    steps: int
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
    folder: Path,
    *,
    bound: float = 1.0,
    progress: Progress | None = None,
    watch: Callable[[str, Any], None] = lambda *_: None,
) -> Tuned:
    """Fine-tune the members of an ensemble on the votes of ``pairs``.

    ``joint``: one model with k + 1 outputs. The last is a soft-label Bradley–Terry reward, trained in the same pass:

        mean (p̂ − t)² + 1/k² Σ_j q_j (1 − q_j) + BCE(p, σ(Δ_bt)),
        q_j = σ(Δ_j / (s_j τ)),   p̂ = 1/k Σ_j q_j,   t = (1 − v) σ(Δ_bt) + v p,

    with s_j the running spread of Δ_j, and τ decreasing. The first two terms are the expected error of votes drawn
    with probabilities q_j, so undecided members are penalised: hard votes cannot be undecided.

    ``stagewise``: k models with one output, each from the same checkpoint, fitted to the residual of the hard votes of
    the members before it (§4).

    In both, a member whose running disagreement with people is above the bound is penalised. The head starts as the
    best linear one on the base model's features of the texts: fine-tuning starts from the ensemble on frozen features.
    With ``fresh_head`` it starts random instead.

    Args:
        pairs: the training pairs.
        k: number of members.
        options: method, variant, loss and seed.
        tuning: the backbone and the recipe.
        folder: models are written here, and unfinished work is resumed from here.
        bound: training disagreement above which a member is penalised; 1 sets no bound.
        progress: called with the steps done and their total.
        watch: called with "train" and the name of the member in training.

    Returns:
        The models as features, in ``folder``.
    """
    run = FinetuneRun(pairs, options, tuning, folder, bound, progress)
    return (_joint if options.method == "joint" else _stagewise)(run, k, watch)


@contextmanager
def only_the_first() -> Iterator[bool]:
    """Yield whether this is the first process of a launch. The others wait at the end of the block."""
    processes = finetune_processes()
    yield processes.first
    processes.wait()


def finetune_processes() -> Processes:
    """Return this process, joined to the others of its launch."""
    return join_launch(cpu=not torch.cuda.is_available())


def _joint(run: "FinetuneRun", k: int, watch: Callable[[str, Any], None]) -> Tuned:
    watch("train", "all members")

    def heads(pairs: Pairs, teacher: Teacher) -> FloatArray:
        reward = fit_bradley_terry(pairs.difference, pairs.prob_a, teacher.l2)
        if k == 1:
            return np.column_stack([reward, reward])
        fit = fit_joint(pairs, teacher, k, seed=run.options.seed, bound=run.bound, restarts=FEW_RESTARTS)
        return np.column_stack([fit.theta, reward])

    prob_a = run.pairs.prob_a
    loss = JointLoss(k, run.bound, fitted=not run.tuning.fresh_head)
    (target,) = model_folders(run.features(k + 1))
    seconds = run.train(Training("joint", k + 1, loss, PairLabels(prob_a, prob_a, np.ones(len(prob_a))), heads), target)
    features = run.features(k + 1).identified()
    run.outputs(features)
    return run.result(features, [seconds])


def _stagewise(run: "FinetuneRun", k: int, watch: Callable[[str, Any], None]) -> Tuned:
    pairs, options = run.pairs, run.options
    prob_hat = np.full(len(pairs.prob_a), 0.5)
    seconds: list[float] = []
    identity: tuple[str, ...] = ()
    for j in range(k):
        watch("train", f"member {j + 1} of {k}")
        features = run.features(j + 1)
        folder = model_folders(features)[j]
        variant: Variant = "symmetric" if j == 0 else options.variant
        residual = pairs.prob_a - prob_hat

        def heads(
            base: Pairs, teacher: Teacher, residual: FloatArray = residual, variant: Variant = variant
        ) -> FloatArray:
            return fit_member(base.difference, residual, l2=teacher.l2, variant=variant, loss=options.loss)[:, None]

        stage = stage_target(residual, variant, options.loss)
        labels = PairLabels(pairs.prob_a, stage.target, stage.weight)
        training = Training(f"member-{j}", 1, StageLoss(stage.loss, run.bound), labels, heads)
        seconds.append(run.train(training, folder))
        identity = (*identity, model_identity(folder, features))
        features = run.features(j + 1, identity)
        outputs = run.outputs(features)
        votes = votes_from_rewards(outputs[pairs.a], outputs[pairs.b])
        prob_hat = votes @ simplex_least_squares(votes, pairs.prob_a)
    return run.result(features, seconds)


@dataclass(frozen=True)
class Training:
    """The training of one model."""

    name: str
    outputs: int
    loss: PairLoss
    labels: PairLabels
    heads: Heads
    """Fits the first head."""


class FinetuneRun:
    """The trainings of one ensemble: they share the base model, the texts as tokens, the recipe and the folder."""

    def __init__(
        self,
        pairs: TextPairs,
        options: FitOptions,
        tuning: FinetuneOptions,
        folder: Path,
        bound: float = 1.0,
        progress: Progress | None = None,
    ) -> None:
        self.pairs, self.options, self.tuning, self.folder = pairs, options, tuning, folder
        self.bound, self.progress = bound, progress
        self.processes = finetune_processes()
        self.recipe = make_recipe(len(pairs.prob_a), tuning, options.seed, self.processes.count)
        self.micro_batch = self.recipe.micro_batch(tuning.micro_batch)
        self.base = load_base(str(tuning.backbone), tuning.max_length, pairs.items)
        self.tokens, truncated = self.base.tokens(pairs.items)
        self.notes = [*self.base.notes, *([truncated] if truncated else [])]
        self.head = HeadFitter(self.base, pairs, options.seed, self.processes)
        for note in self.notes:
            if self.processes.first:
                logger.warning("%s.", note)

    def features(self, outputs: int, identity: tuple[str, ...] = ()) -> TunedFeatures:
        """Return the models as features."""
        return TunedFeatures(
            base=self.base.name, method=self.options.method, lora=self.tuning.lora, outputs=outputs,
            max_length=self.base.max_length, identity=identity, folder=self.folder,
        )  # fmt: skip

    def result(self, features: TunedFeatures, seconds: list[float]) -> Tuned:
        """Return the result of ``fine_tune``."""
        recipe = self.recipe
        return Tuned(
            features, recipe.steps, recipe.batch, recipe.learning_rate, seconds, self.notes, self.processes.count
        )

    def outputs(self, features: TunedFeatures) -> npt.NDArray[np.float32]:
        """Return the outputs for all texts, ``(n_items, outputs)``.

        Each process computes a part; the cache of vectors then gives all of them to every process.
        """
        items = self.pairs.items
        if self.processes.count > 1:
            features(items[self.processes.rank :: self.processes.count])
            self.processes.wait()
        outputs = features(items)
        forget_models()
        return outputs

    def train(self, training: Training, target: Path) -> float:
        """Train one model into ``target``, unless it is there; return the seconds it took.

        When memory runs out, the micro-batch is halved. The pairs of a step stay the same, and so does the result.
        """
        done_file = self.folder / f"{training.name}.json"
        if target.is_dir() and done_file.is_file():
            return float(json.loads(done_file.read_text())["seconds"])
        checkpoints = self.folder / f"training-{training.name}"
        started = time.perf_counter()
        while True:
            try:
                with _disk_full_as_data_error(self.folder), quiet_transformers():
                    self._save(self._train(training, checkpoints), target)
                break
            except RuntimeError as error:  # running out of memory is one
                if not _is_out_of_memory(error):
                    raise
                self._halve_micro_batch()
            finally:
                _free_memory()
        seconds = time.perf_counter() - started
        if self.processes.first:
            with atomic_write(done_file) as partial:
                partial.write_text(json.dumps({"seconds": seconds}))
            shutil.rmtree(checkpoints, ignore_errors=True)
        self.processes.wait()
        return seconds

    def _train(self, training: Training, checkpoints: Path) -> PairTrainer:
        """Train from the last complete checkpoint, or from the start; return the trainer with the trained model."""
        checkpoint = self._last_complete(checkpoints)
        trainer = self.trainer(training, checkpoints, fit_head=checkpoint is None and not self.tuning.fresh_head)
        if checkpoint is not None:
            stored = json.loads((checkpoint / COMPLETE_FILE).read_text())
            trainer.running.square, trainer.running.disagreement = stored["square"], stored["disagreement"]
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return trainer

    def trainer(self, training: Training, checkpoints: Path, fit_head: bool) -> PairTrainer:
        """Return a trainer with a fresh model, whose head is fitted or random."""
        recipe, pairs = self.recipe, self.pairs
        seed = [self.options.seed, streams.FINETUNE, *training.name.encode()]
        arguments = recipe.arguments(checkpoints, self.micro_batch)

        def head(model: Any) -> FloatArray:
            return self.head.fit(model, training.heads, arguments.device)

        model = self.base.reward_model(
            training.outputs,
            self.tuning,
            np.random.SeedSequence(seed),
            arguments.bf16,
            head if fit_head else None,
        )
        lengths = np.array([len(text["input_ids"]) for text in self.tokens])
        order = recipe.order(np.maximum(lengths[pairs.a], lengths[pairs.b]), np.random.default_rng(seed))
        running = RunningFigures()
        trainer = PairTrainer(
            model=model,
            args=arguments,
            train_dataset=OrderedPairs(order, pairs, self.tokens, training.labels),
            data_collator=Collator(self.base.tokenizer.pad_token_id),
            processing_class=self.base.tokenizer,
            callbacks=[StepCallback(running, self.progress, self.processes.first)],
        )
        trainer.remove_callback(transformers.PrinterCallback)  # stdout is for results
        trainer.pair_loss, trainer.running, trainer.optimizer_name = training.loss, running, self.tuning.optimizer
        trainer.head, _ = classifier_head(model)
        return trainer

    def _last_complete(self, checkpoints: Path) -> Path | None:
        """Return the last complete checkpoint, and remove incomplete ones."""
        folders = sorted(checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        complete = [path for path in folders if (path / COMPLETE_FILE).is_file()]
        self.processes.wait()
        if self.processes.first:
            for path in folders:
                if path not in complete:
                    shutil.rmtree(path, ignore_errors=True)
        return complete[-1] if complete else None

    def _save(self, trainer: PairTrainer, target: Path) -> None:
        """Write the trained model to ``target`` in one step."""
        partial = target.parent / f".{target.name}.partial"
        if self.processes.first:
            shutil.rmtree(partial, ignore_errors=True)
        self.processes.wait()
        trainer.save_model(str(partial))
        if self.processes.first:
            (partial / "training_args.bin").unlink(missing_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        self.processes.wait()

    def _halve_micro_batch(self) -> None:
        """Halve the micro-batch, or raise a ``DataError`` if that is not possible."""
        size = self.micro_batch
        if size == 1 or self.processes.count > 1:
            remedy = f"run the same command with --micro-batch {max(1, size // 2)}; it resumes from the last checkpoint"
            if size == 1:
                remedy = "use --lora, --gradient-checkpointing or a smaller --max-length"
            message = f"memory ran out with a micro-batch of {size}"
            raise DataError(message, file=self.base.name, remedy=remedy) from None
        self.micro_batch = self.recipe.micro_batch(size // 2)
        self.notes.append(f"memory ran out with a micro-batch of {size}, so it continues with {self.micro_batch}")
        logger.warning("%s.", self.notes[-1])


# --- memory and disk ------------------------------------------------------------------------------------------------


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _disk_full_as_data_error(folder: Path) -> Iterator[None]:
    """Raise a ``DataError`` with one sentence when the disk is full. Complete checkpoints stay."""
    try:
        yield
    except Exception as error:  # torch and safetensors wrap the system's error in their own
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and "No space left" not in str(error):
            raise
        remedy = "free some space and run the same command; it resumes from the last complete checkpoint"
        raise DataError("the disk is full", file=str(folder), remedy=remedy) from error
