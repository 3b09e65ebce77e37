"""Fine-tuning of reward models on votes: the trainer, the run that resumes trainings, and the models of an ensemble.

Every process of a launch must call ``fine_tune``; the first one writes.
"""

import gc
import importlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

import accelerate
import numpy as np
import numpy.typing as npt
import torch
import transformers
from threadpoolctl import threadpool_limits
from transformers.integrations.integration_utils import TensorBoardCallback

from pluralign.core.arrays import FloatArray, IndexArray
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import DataError, UsageError
from pluralign.core.files import atomic_write, disk_errors_as_data_error
from pluralign.core.processes import Processes
from pluralign.core.random_streams import FINETUNE
from pluralign.core.text import shortened
from pluralign.core.types import Method, Progress
from pluralign.ensemble.members import LinearMembers
from pluralign.learning.backbone import recipe
from pluralign.learning.backbone.base import BaseModel, BaseStates, base_states, load_base
from pluralign.learning.backbone.losses import (
    JudgedLessons,
    Lessons,
    MixtureLoss,
    PairLessons,
    PairLoss,
    RunningFigures,
    StageLoss,
    VoteLoss,
    prompt_of_judgments,
)
from pluralign.learning.backbone.optimizer import OneSidedSoap, RoundedAdamW, Soap
from pluralign.learning.bradley_terry import VOICES, damping_factor
from pluralign.learning.options import FitOptions, Variant
from pluralign.learning.pairs import row_squares, training_bound
from pluralign.learning.stagewise import fit_member, stage_target
from pluralign.learning.task import AUTO_SIZES, FitWatcher
from pluralign.learning.tuned import Candidate, TunedTask, mixture_of
from pluralign.learning.voices import Voices
from pluralign.text import loading
from pluralign.text.classifier import classifier_head
from pluralign.text.finetuned import FinetunedFeatures, forget_models, model_folders, model_identity
from pluralign.theory.calibration import votes_from_rewards
from pluralign.theory.simplex import simplex_least_squares
from pluralign.votes.judgments import Judgments

# --- transformers' ``Trainer`` for rewards on pairs: data set, batches, optimisers and checkpoints.


HEAD_FACTOR = 10.0
"""Learning rate of the head, relative to that of the body."""
COMPLETE_FILE = "complete.json"
"""Written last into a checkpoint; a checkpoint without it is not resumed."""
CHECKPOINT_SECONDS = 600.0
"""Time between the end of a save and the next one."""
CHECKPOINT_VARIABLE = "PLURALIGN_CHECKPOINT_SECONDS"
"""Environment variable with another time; 0 saves after every step."""
CPU_PASS, GPU_PASS = 64, 1024
"""Cost of one more forward pass, as a number of tokens. That of GPUs is a guess."""


# --- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatches(torch.utils.data.Dataset[Any]):
    """The micro-batches of a training in their order: the tokens of their texts, padded on the right."""

    batches: Sequence[recipe.MicroBatch]
    tokens: Sequence[loading.Tokens]
    """Of every distinct text."""
    pad: int
    """Token id of the padding."""

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, position: int) -> dict[str, Any]:
        batch = self.batches[position]
        return {**loading.padded([self.tokens[text] for text in batch.texts], self.pad, "cpu"), "batch": batch}


# --- training ---------------------------------------------------------------------------------------------------------


class PairTrainer(transformers.Trainer):
    """A ``Trainer`` whose batches are ``MicroBatches``."""

    loss_is_scaled_for_ga = False
    lessons: Lessons
    running: RunningFigures
    optimizer_name: str
    head: str
    """Name of the head's layer."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """Return the loss of one micro-batch."""
        batch: recipe.MicroBatch = inputs.pop("batch")
        done = self.state.global_step / max(1, self.state.max_steps - 1)
        return batch.scale * self.lessons.loss(self.rewards(model, inputs), batch, self.running, done)

    def rewards(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Return the rewards of the texts of a micro-batch, ``(n_texts, outputs)``, read in groups of similar length.

        In several processes there is one group: DDP and FSDP expect one forward pass per step.
        """
        if self.args.world_size > 1:
            return model(**inputs).logits.float()
        lengths = inputs["attention_mask"].sum(dim=1).tolist()
        groups = recipe.length_groups(lengths, CPU_PASS if self.args.device.type == "cpu" else GPU_PASS)
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
        settings = []
        for (in_head, decays), parameters in groups.items():
            own = {"lr": rate * HEAD_FACTOR} if in_head else {"lr": rate}
            settings.append({"params": parameters, **own, "weight_decay": self.args.weight_decay if decays else 0.0})
        half = any(one.dtype == torch.bfloat16 for group in groups.values() for one in group)
        kind = {"soap": Soap, "soap-one-sided": OneSidedSoap, "adamw": RoundedAdamW if half else torch.optim.AdamW}
        self.optimizer = kind[self.optimizer_name](settings, lr=rate)
        return self.optimizer


class StepCallback(transformers.TrainerCallback):
    """Updates the running figures after each step, reports progress, and decides when a checkpoint is saved.

    A checkpoint is due ``CHECKPOINT_SECONDS`` after the last one or after the start. Only the newest complete one is
    kept.

    Args:
        running: the figures to update.
        progress: called with the steps done and their total.
        processes: the first one decides and writes.
    """

    def __init__(self, running: RunningFigures, progress: Progress | None, processes: Processes) -> None:
        self.running, self.progress, self.processes = running, progress, processes
        self.interval = checkpoint_seconds()
        self.since = monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Start the clock."""
        self.since = monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Update the running figures, report the step, and ask for a checkpoint if one is due."""
        self.running.end_step(lambda sums: accelerate.utils.reduce(sums, "sum"))
        if state.global_step < state.max_steps:  # after the last step the model itself is saved
            control.should_save = self.processes.agreed(lambda: monotonic() - self.since >= self.interval)
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
            for path in newest.parent.glob("checkpoint-*"):
                if path != newest:
                    shutil.rmtree(path, ignore_errors=True)
        self.since = monotonic()


def checkpoint_seconds() -> float:
    """Return the time between two checkpoints. Raises UsageError if the environment variable has no such value."""
    value = os.environ.get(CHECKPOINT_VARIABLE, str(CHECKPOINT_SECONDS))
    with suppress(ValueError):
        if (seconds := float(value)) >= 0:
            return seconds
    raise UsageError(f"{CHECKPOINT_VARIABLE} must be a number of seconds, 0 or more, not {shortened(value, 20)!r}.")


# --- The trainings of one ensemble: each resumes from its last checkpoint. When memory runs out, micro-batches shrink.


logger = logging.getLogger("pluralign")
MICRO_BATCH = 8
"""A process reads at most twice as many texts in one forward pass."""
MICRO_BATCH_FILE = "micro-batch"
"""Holds the size after memory ran out, for a resumed run."""
ANY_SEED = np.random.SeedSequence(0)
"""Seed of a head that is not used."""


@dataclass(frozen=True)
class Training:
    """The training of one model."""

    name: str
    outputs: int
    lessons: Lessons
    head: Callable[[], FloatArray]
    """Returns the weights of the first head, ``(outputs, hidden)``; not used with ``fresh_head``."""


@dataclass
class FinetuneRun:
    """What the trainings of one ensemble share."""

    pairs: recipe.TextPairs
    tokens: Sequence[loading.Tokens]
    """Of every distinct text."""
    plan: recipe.TrainingPlan
    base: BaseModel
    checkpoints: Checkpoints
    notes: list[str]
    """What the user should know about the run, as sentences without a full stop."""
    progress: Progress | None = None

    @property
    def folder(self) -> Path:
        """Folder of the models and of unfinished trainings."""
        if self.checkpoints.path is None:
            raise ValueError("fine-tuning needs checkpoints with a folder")
        return self.checkpoints.path

    @cached_property
    def states(self) -> BaseStates:
        """The training pairs by the states of the base model, which is loaded and reads each text once."""
        plan, processes = self.plan, self.checkpoints.processes
        try:
            with loading.random_states_restored(), loading.quiet_transformers():
                model = self.base.reward_model(1, replace(plan.tuning, lora=False), ANY_SEED, plan.bf16_body)
                model.to(plan.arguments(self.folder, plan.processes).device)
                states = base_states(self.base, model, self.pairs, plan.seed, processes)
                del model  # so that its memory is free for the training
            return states
        finally:
            _free_memory()

    def train(self, training: Training, target: Path) -> float:
        """Train one model into ``target``, a folder of the checkpoints, unless it is there; return the seconds."""
        unfinished = self.folder / f"training-{training.name}"

        def compute() -> float:
            started = time.perf_counter()
            name = target.relative_to(self.folder).as_posix()
            self.checkpoints.folder(name, lambda folder: self._train_into(folder, training, unfinished))
            if self.checkpoints.processes.first:
                shutil.rmtree(unfinished, ignore_errors=True)
            return time.perf_counter() - started

        return self.checkpoints.keep(training.name, float, compute)

    def _train_into(self, folder: Path, training: Training, unfinished: Path) -> None:
        """Train one model and write it to a folder.

        When memory runs out, the micro-batch is halved. The pairs of a step stay the same, and so does the result.
        """
        while True:
            try:
                remedy = "free some space and run the same command; it resumes from the last complete checkpoint"
                disk_errors = disk_errors_as_data_error(self.folder, remedy)
                with disk_errors, loading.random_states_restored(), loading.quiet_transformers():
                    trainer = self._train(training, unfinished)
                    trainer.save_model(str(folder))
                    del trainer  # so that its memory is free for what follows
                break
            except RuntimeError as error:  # running out of memory is one
                if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                    raise
                self._halve_micro_batch()
            finally:
                _free_memory()
        if self.checkpoints.processes.first:
            (folder / "training_args.bin").unlink(missing_ok=True)

    def _train(self, training: Training, unfinished: Path) -> PairTrainer:
        """Train from the last complete checkpoint, or from the start; return the trainer with the trained model."""
        checkpoint = self._last_complete(unfinished)
        starts = checkpoint is None and not self.plan.tuning.fresh_head
        trainer = self.trainer(training, unfinished, training.head() if starts else None)
        if checkpoint is not None:
            stored = json.loads((checkpoint / COMPLETE_FILE).read_text())
            trainer.running.square, trainer.running.disagreement = stored["square"], stored["disagreement"]
        with redirect_stdout(sys.stderr):  # stdout is for results, and trackers print
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            if "wandb" in self.plan.tuning.trackers:
                importlib.import_module("wandb").finish()  # else the next model continues this run
        return trainer

    def trainer(self, training: Training, unfinished: Path, head: FloatArray | None) -> PairTrainer:
        """Return a trainer with a fresh model, whose head has the given weights or random ones."""
        plan, lessons, root = self.plan, training.lessons, self.checkpoints.root
        seed = [plan.seed, FINETUNE, *training.name.encode()]
        lengths = np.array([len(text["input_ids"]) for text in self.tokens])
        steps = recipe.draw_steps(lessons.prompt, plan.steps, plan.batch, np.random.default_rng(seed))
        batches = recipe.split_steps(steps, lessons, lengths, 2 * self._micro_batch(), plan.processes)
        run_name = f"{root.resolve().name if root else ''}-{training.name}"
        arguments = plan.arguments(unfinished, len(batches[0]), run_name)
        model = self.base.reward_model(
            training.outputs, plan.tuning, np.random.SeedSequence(seed), plan.bf16_body, head
        )
        running, pad = RunningFigures(), self.base.tokenizer.pad_token_id
        trainer = PairTrainer(
            model=model,
            args=arguments,
            train_dataset=MicroBatches(list(chain.from_iterable(batches)), self.tokens, pad),
            data_collator=itemgetter(0),  # a DataLoader makes batches of one micro-batch
            processing_class=self.base.tokenizer,
            callbacks=[StepCallback(running, self.progress, self.checkpoints.processes)],
        )
        trainer.remove_callback(transformers.PrinterCallback)  # stdout is for results
        trainer.lessons, trainer.running, trainer.optimizer_name = lessons, running, plan.tuning.optimizer
        trainer.head, _ = classifier_head(model)
        if "tensorboard" in plan.tuning.trackers:  # its default is a folder of the checkpoints, which are removed
            logs: Any = trainer.pop_callback(TensorBoardCallback)
            logs.logging_dir = logs.logging_dir or str(Path("runs") / run_name)
            trainer.add_callback(logs)
        return trainer

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

    def _micro_batch(self) -> int:
        """Return the size of a micro-batch: ``MICRO_BATCH``, or less after memory ran out."""
        file = self.folder / MICRO_BATCH_FILE
        return int(file.read_text()) if file.is_file() else MICRO_BATCH

    def _halve_micro_batch(self) -> None:
        """Halve the micro-batch. Several processes cannot go on without the one that failed: they start again.

        Raises:
            DataError: a micro-batch of 1 is too large, or there are several processes.
        """
        size = self._micro_batch()
        message = f"memory ran out with a micro-batch of {size}"
        if size == 1:
            remedy = "use --lora, --gradient-checkpointing, --optimizer adamw or a smaller --max-length"
            raise DataError(message, file=self.base.name, remedy=remedy) from None
        with atomic_write(self.folder / MICRO_BATCH_FILE) as partial:
            partial.write_text(str(size // 2))
        if self.checkpoints.processes.count > 1:
            remedy = f"run the same command; it resumes from the last checkpoint with {size // 2}"
            raise DataError(message, file=self.base.name, remedy=remedy) from None
        self.notes.append(f"{message}, so it continues with {size // 2}")
        logger.warning("%s.", self.notes[-1])

    def features(self, method: Method, outputs: int, identity: tuple[str, ...] = ()) -> FinetunedFeatures:
        """Return the models as features."""
        source = loading.hub_source(self.base.folder)
        return FinetunedFeatures(
            base=self.base.name, method=method, lora=self.plan.tuning.lora, outputs=outputs,
            max_length=self.base.max_length, identity=identity, revision=source[1] if source else "",
            precision=self.plan.scoring, folder=self.folder,
        )  # fmt: skip

    def read(self, features: FinetunedFeatures) -> npt.NDArray[np.float32]:
        """Return the features of all texts: the outputs of stagewise models, ``(n_items, outputs)``, or joint states.

        Each process computes a part; the cache of vectors then gives all of them to every process.
        """
        items, processes = self.pairs.items, self.checkpoints.processes
        if processes.count > 1:
            features(items[processes.rank :: processes.count])
            processes.wait()
        vectors = features(items)
        forget_models()
        return vectors


def prepare_run(
    pairs: recipe.TextPairs, plan: recipe.TrainingPlan, checkpoints: Checkpoints, progress: Progress | None = None
) -> FinetuneRun:
    """Load the tokenizer of the base model, tokenise the texts, and log notes for the user.

    Args:
        pairs: the training pairs.
        plan: how models are trained.
        checkpoints: stores models and unfinished trainings; it must have a folder.
        progress: called with the steps done and their total.

    Raises:
        UsageError: bfloat16 would end the process.
    """
    base = load_base(str(plan.tuning.backbone), plan.tuning.max_length, pairs.items)
    if plan.precision == "bfloat16" and not torch.cuda.is_available():
        loading.check_cpu_bfloat16()
    tokens, truncated = base.tokens(pairs.items)
    notes = [*base.notes, *([truncated] if truncated else [])]
    unused = torch.cuda.device_count() - 1  # a process trains on one
    if plan.processes == 1 and unused > 0:
        notes.append(
            f"training uses one GPU, and {unused} more {'is' if unused == 1 else 'are'} not used; start it with "
            f"accelerate launch --num_processes {unused + 1} -m pluralign fit … to use all of them"
        )
    for note in notes if checkpoints.processes.first else []:
        logger.warning("%s.", note)
    return FinetuneRun(pairs, tokens, plan, base, checkpoints, notes, progress)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- The models of an ensemble: one with all outputs, or one per stage (§4).


Enough: TypeAlias = Callable[[npt.NDArray[np.float32]], bool]
"""Takes the rewards of the members so far for every text, ``(n_items, members)``; returns whether to stop there."""
MOST_STAGES = AUTO_SIZES[-1]
"""Number of stages after which ``--k auto`` stops in any case."""


def fine_tune(
    pairs: recipe.TextPairs, task: TunedTask, enough: Enough | None = None
) -> tuple[FinetuneRun, FinetunedFeatures, list[float]]:
    """Fine-tune the models of an ensemble on the votes of ``pairs``.

    ``joint``: one model whose outputs are the rewards of a mixture. The head starts as the mixture on the base model's
    states. The members themselves are fitted afterwards, on the states of the trained model.

    - From judgments: the mixture is that of ``voices``, with its shares and decisiveness, and so is the loss.
    - From counts: the mixture is fitted as the teacher of a frozen ensemble is, with its weights and its damping, and
      one reward follows. All learn from the votes alone (``MixtureLoss``); no output learns from the prediction of
      another, because a single reward hides what divides people.

    ``stagewise``: k models with one output, each from the same checkpoint, fitted to the residual of the hard votes of
    the members before it (§4). The head starts as the best linear one on the base model's states. A member whose
    running disagreement with people is above the bound is penalised.

    With ``fresh_head`` the head starts random instead, and a joint model learns from counts by ``VoteLoss``.

    Args:
        pairs: the training pairs.
        task: the fit. A joint model does not depend on the size. Checkpoints need a folder: they store the models
            and unfinished trainings, and resume them.
        enough: stagewise: called after each stage; if it returns True, no further stage is trained. Its answer is
            stored, so a resumed run stops at the same stage.

    Returns:
        The run; the models as features, which are the states of a joint model, or the outputs of stagewise models; and
        the training time of each model.
    """
    options, processes = task.options, task.checkpoints.processes
    judged = task.learned_judgments if options.method == "joint" and not task.tuning.fresh_head else None
    prompt = pairs.prompt if judged is None else prompt_of_judgments(judged[0])
    plan = recipe.training_plan(
        prompt, task.tuning, options.seed, processes.count, recipe.choose_precision(options.precision)
    )
    run = prepare_run(pairs, plan, task.checkpoints, task.progress)
    if options.method == "joint":
        task.watcher.training("all members")
        if judged is None and task.judged is not None:
            run.notes.append("a fresh head learns from vote counts, so only the members learned from judgments")
        features, training = _of_counts(run) if judged is None else _of_judgments(run, task, *judged)
        return run, *_joint(run, features, training)
    return run, *_stagewise(run, options, enough, task.watcher)


def _joint(run: FinetuneRun, features: FinetunedFeatures, training: Training) -> tuple[FinetunedFeatures, list[float]]:
    (folder,) = model_folders(features)
    seconds = run.train(training, folder)
    features = features.with_current_hashes()
    run.read(features)  # fills the cache of vectors
    return features, [seconds]


def _of_counts(run: FinetuneRun) -> tuple[FinetunedFeatures, Training]:
    """Return a joint model that learns from counts, and how."""
    prob_a = run.pairs.prob_a

    def mixture() -> dict[str, FloatArray]:
        """Return the mixture on the base model's states as weights of a head, and the damping of each pair."""
        teacher, squares = run.states.teacher, row_squares(run.states.pairs.difference)
        head = run.states.head(np.column_stack([teacher.voices, teacher.theta]))
        damping = damping_factor(squares, teacher.damping, teacher.mean_square)
        return {"head": head, "weights": teacher.voice_weights, "damping": damping}

    loss: PairLoss = VoteLoss(VOICES)
    start = {"damping": np.ones(len(prob_a))}  # a fresh head needs nothing else
    if not run.plan.tuning.fresh_head:
        start = run.checkpoints.keep("start", dict[str, FloatArray], mixture)
        loss = MixtureLoss(tuple(start["weights"].tolist()))
    lessons = PairLessons(run.pairs, loss, {"prob_a": prob_a, "weight": start["damping"]})
    return run.features("joint", VOICES + 1), Training("joint", VOICES + 1, lessons, lambda: start["head"])


@dataclass(frozen=True)
class JudgedStart:
    """What a model that learns from judgments starts from."""

    head: FloatArray
    """The mixture on the base model's states as weights of a head, ``(k, hidden)``."""
    voices: Voices
    posterior: FloatArray | None
    """Of each person, where rater ids are known: see ``JudgedLessons``."""


def _of_judgments(
    run: FinetuneRun, task: TunedTask, judgments: Judgments, items: IndexArray
) -> tuple[FinetunedFeatures, Training]:
    """Return a joint model that learns from judgments, and how."""

    def mixture() -> JudgedStart:
        with threadpool_limits(1, user_api="blas"):
            base = Candidate(run.features("joint", 1), run.states.states)
            inputs, voices, rewards = mixture_of(task, "base", base)
            posterior = JudgedLessons(judgments, items, voices).given(rewards).posterior
        return JudgedStart(LinearMembers(inputs, voices.theta).head().T, voices, posterior)

    start = run.checkpoints.keep("start", JudgedStart, mixture)
    lessons, k = JudgedLessons(judgments, items, start.voices, start.posterior), start.voices.k
    return run.features("joint", k), Training("joint", k, lessons, lambda: start.head)


def _stagewise(
    run: FinetuneRun, options: FitOptions, enough: Enough | None, watcher: FitWatcher
) -> tuple[FinetunedFeatures, list[float]]:
    pairs, processes = run.pairs, run.checkpoints.processes
    k = MOST_STAGES if options.k == "auto" else int(options.k)
    bound = training_bound(options.max_disagreement, len(np.unique(pairs.prompt)))
    prob_hat = np.full(len(pairs.prob_a), 0.5)
    seconds: list[float] = []
    identity: tuple[str, ...] = ()
    for j in range(k):
        watcher.training(f"member {j + 1} of {'at most ' if enough else ''}{k}")
        features = run.features("stagewise", j + 1)
        folder = model_folders(features)[j]
        variant: Variant = "symmetric" if j == 0 else options.variant
        residual = pairs.prob_a - prob_hat

        def head(residual: FloatArray = residual, variant: Variant = variant) -> FloatArray:
            difference, l2 = run.states.pairs.difference, run.states.teacher.l2
            with threadpool_limits(1, user_api="blas"):
                theta = fit_member(difference, residual, l2=l2, variant=variant)
                return run.states.head(theta[:, None])

        labels = {"prob_a": pairs.prob_a, "target": stage_target(residual, variant)}
        lessons = PairLessons(pairs, StageLoss(bound), labels)
        seconds.append(run.train(Training(f"member-{j}", 1, lessons, head), folder))
        identity = (*identity, model_identity(folder, features))
        features = run.features("stagewise", j + 1, identity)
        outputs = run.read(features)
        votes = votes_from_rewards(outputs[pairs.a], outputs[pairs.b])
        if enough and run.checkpoints.keep(f"enough-{j}", bool, lambda: processes.agreed(lambda: enough(outputs))):  # noqa: B023 - called at once
            break
        prob_hat = votes @ simplex_least_squares(votes, pairs.prob_a)
    return features, seconds
