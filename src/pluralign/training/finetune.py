"""Fine-tuning of reward models on votes, with transformers' own ``Trainer``: one process or many, resumed where killed.

Decided here: the recipe (the paper's App. Training Pipeline), what each member is fitted to, and what is kept of
unfinished work. The losses are in ``pairtrainer``. Every process must call ``fine_tune``; the first one writes.
"""

import errno
import gc
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import accelerate
import numpy as np
import numpy.typing as npt
import torch
import transformers
from threadpoolctl import threadpool_limits

from pluralign.core.arrays import FloatArray
from pluralign.core.distributed import launch_state
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.files import atomic_write
from pluralign.core.types import Progress
from pluralign.ensemble.members import fit_feature_map
from pluralign.features.finetuned import (
    TunedFeatures,
    backbone_folder,
    forget_models,
    model_folders,
    model_identity,
)
from pluralign.models.batches import Tokens
from pluralign.models.classifier import classifier_rewards, classifier_tokens
from pluralign.models.loading import longest_text, quiet_transformers
from pluralign.theory.calibration import votes_from_rewards
from pluralign.theory.simplex import simplex_least_squares
from pluralign.training.bradley_terry import fit_bradley_terry
from pluralign.training.joint import FEW_RESTARTS, Teacher, fit_joint, fit_teacher
from pluralign.training.options import FinetuneOptions, FitOptions, Variant
from pluralign.training.pair_trainer import (
    COMPLETE_FILE,
    Collator,
    JointLoss,
    OrderedPairs,
    PairTrainer,
    Running,
    StageLoss,
    TextPairs,
    Watch,
)
from pluralign.training.pairs import Pairs, validation_folds
from pluralign.training.stagewise import fit_member
from pluralign.votes.prompts import Prompt

Heads: TypeAlias = Callable[[Pairs, Teacher], FloatArray]
"""Fits linear heads to pairs, ``(hidden, outputs)``."""

LEARNING_RATE, LORA_LEARNING_RATE = 2e-5, 2e-4
WEIGHT_DECAY = 0.1
WARM_UP_SHARE = 0.03
LARGEST_BATCH = 512
LEAST_STEPS = 32
"""The batch is halved from 512 until an epoch has as many steps."""
SMALLEST_BATCH = 8
CHECKPOINTS = 4
"""How many times one training is kept on the way."""

logger = logging.getLogger("pluralign")


@dataclass(frozen=True)
class Tuned:
    """Fine-tuned models and how they came about."""

    features: TunedFeatures
    steps: int
    batch_size: int
    learning_rate: float
    seconds: list[float]
    """Of each model's training."""
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

    ``joint``: one model with k + 1 outputs; the last is a soft-label Bradley–Terry reward, trained in the same pass:

        mean (p̂ − t)² + 1/k² Σ_j q_j (1 − q_j) + BCE(p, σ(Δ_bt)),
        q_j = σ(Δ_j / (s_j τ)),   p̂ = 1/k Σ_j q_j,   t = (1 − v) σ(Δ_bt) + v p,

    with s_j the running spread of Δ_j, and τ falling. The second term makes it the expected error of votes drawn with
    chances q_j: members that stay undecided, which hard votes cannot be, cost something.

    ``stagewise``: k models with one output, each from the same checkpoint, fitted to what the hard votes of those
    before it get wrong (§4).

    In both, a member whose running disagreement with people is above the bound pays for it, and the head begins as the
    best linear one on what the base makes of the texts, unless ``fresh_head`` asks for one that knows nothing:
    fine-tuning starts from the ensemble on frozen features and not from chance.

    Args:
        pairs: the training pairs.
        k: how many members.
        options: method, variant, loss and seed.
        tuning: the backbone and the recipe.
        folder: where models are written and unfinished work is resumed from.
        bound: the training disagreement above which a member pays; 1 sets none.
        progress: called with steps done and in all.
        watch: called with "train" and the member at hand.

    Returns:
        The models as features, in ``folder``.
    """
    work = _Work(pairs, options, tuning, folder, bound, progress)
    return (_joint if options.method == "joint" else _stagewise)(work, k, watch)


def _joint(work: "_Work", k: int, watch: Callable[[str, Any], None]) -> Tuned:
    watch("train", "all members")

    def heads(base: Pairs, teacher: Teacher) -> FloatArray:
        reward = fit_bradley_terry(base.difference, base.prob_a, teacher.l2)
        if k == 1:
            return np.column_stack([reward, reward])
        found = fit_joint(base, teacher, k, seed=work.options.seed, bound=work.bound, restarts=FEW_RESTARTS)
        return np.column_stack([found.theta, reward])

    loss = JointLoss(k, work.bound, fitted=not work.tuning.fresh_head)
    (place,) = model_folders(work.features(k + 1))
    seconds = work.train("joint", place, k + 1, loss, _plain(work.pairs), heads)
    features = work.features(k + 1).identified()
    work.read(features)
    return work.result(features, [seconds])


def _stagewise(work: "_Work", k: int, watch: Callable[[str, Any], None]) -> Tuned:
    pairs, options = work.pairs, work.options
    prob_hat = np.full(len(pairs.prob_a), 0.5)
    seconds: list[float] = []
    known: tuple[str, ...] = ()
    for j in range(k):
        watch("train", f"member {j + 1} of {k}")
        features = work.features(j + 1)
        place = model_folders(features)[j]
        variant: Variant = "symmetric" if j == 0 else options.variant
        residual = pairs.prob_a - prob_hat

        def heads(
            base: Pairs, teacher: Teacher, residual: FloatArray = residual, variant: Variant = variant
        ) -> FloatArray:
            return fit_member(base.difference, residual, l2=teacher.l2, variant=variant, loss=options.loss)[:, None]

        loss = StageLoss("bce" if variant == "weighted" else options.loss, work.bound)
        targets = stage_targets(pairs.prob_a, prob_hat, variant, options.loss)
        seconds.append(work.train(f"member-{j}", place, 1, loss, targets, heads))
        known = (*known, model_identity(place, features))
        features = work.features(j + 1, known)
        outputs = work.read(features)
        votes = votes_from_rewards(outputs[pairs.a], outputs[pairs.b])
        prob_hat = votes @ simplex_least_squares(votes, pairs.prob_a)
    return work.result(features, seconds)


def stage_targets(prob_a: FloatArray, prob_hat: FloatArray, variant: str, loss: str = "mse") -> dict[str, FloatArray]:
    """Return what one stage is fitted to, and each pair's weight in it.

    With ε = p − p̂ the residual of the ensemble so far: ``printed`` ε, ``symmetric`` ½ + ε, and ``weighted`` 1[ε > 0]
    with weight |ε| / mean |ε|. Cross-entropy clips targets to [0, 1].

    Example:
        >>> stage_targets(np.array([0.8, 0.2]), np.array([0.5, 0.5]), "symmetric")["target"]
        array([0.8, 0.2])
    """
    residual = prob_a - prob_hat
    if variant == "weighted":
        weight = np.abs(residual) / max(float(np.abs(residual).mean()), 1e-12)
        return {"prob_a": prob_a, "target": (residual > 0).astype(float), "weight": weight}
    target = residual if variant == "printed" else 0.5 + residual
    return {
        "prob_a": prob_a,
        "target": np.clip(target, 0.0, 1.0) if loss == "bce" else target,
        "weight": np.ones(len(prob_a)),
    }


def _plain(pairs: TextPairs) -> dict[str, FloatArray]:
    return {"prob_a": pairs.prob_a, "target": pairs.prob_a, "weight": np.ones(len(pairs.prob_a))}


def batch_and_steps(n_pairs: int, tuning: FinetuneOptions) -> tuple[int, int]:
    """Return pairs a step and steps: the largest power of two up to 512 that leaves 32 steps an epoch, at least 8.

    Example:
        >>> options = FinetuneOptions(backbone="x")
        >>> batch_and_steps(100_000, options), batch_and_steps(1_500, options)
        ((512, 195), (32, 47))
    """
    batch = tuning.batch_size
    if batch is None:
        batch = LARGEST_BATCH
        while batch > SMALLEST_BATCH and n_pairs * tuning.epochs < LEAST_STEPS * batch:
            batch //= 2
    return batch, max(1, round(n_pairs * tuning.epochs / batch))


# --- one piece of work ----------------------------------------------------------------------------------------------


class _Work:
    """Everything that the trainings of one ensemble share: the base, its tokenizer, the texts as tokens, the recipe."""

    def __init__(
        self,
        pairs: TextPairs,
        options: FitOptions,
        tuning: FinetuneOptions,
        folder: Path,
        bound: float,
        progress: Progress | None,
    ) -> None:
        self.pairs, self.options, self.tuning, self.folder = pairs, options, tuning, folder
        self.bound, self.progress = bound, progress
        self.base_name = str(tuning.backbone)
        self.base = backbone_folder(self.base_name)
        self.state = launch_state(cpu=not torch.cuda.is_available())
        self.batch, self.steps = batch_and_steps(len(pairs.prob_a), tuning)
        if self.batch % self.state.num_processes:
            raise UsageError(f"{self.batch} pairs a step cannot be dealt out to {self.state.num_processes} processes.")
        if os.environ.get("ACCELERATE_USE_FSDP") == "true" and tuning.optimizer == "soap":
            raise UsageError("SOAP needs whole matrices, which FSDP deals out to devices: use --optimizer adamw.")
        self.learning_rate = tuning.learning_rate or (LORA_LEARNING_RATE if tuning.lora else LEARNING_RATE)
        self.micro = tuning.micro_batch
        self.notes: list[str] = []
        self.base_pairs: tuple[Pairs, FloatArray] | None = None
        self.teacher: Teacher | None = None
        self.tokenizer, self.config = self._load_tokenizer()
        self.limit = min(tuning.max_length, longest_text(_Configured(self.config), self.tokenizer))
        self.tokens = self._tokens()
        for note in self.notes:
            if self.state.is_main_process:
                logger.warning("%s.", note)

    def features(self, outputs: int, identity: tuple[str, ...] = ()) -> TunedFeatures:
        """Return the models as features."""
        return TunedFeatures(
            base=self.base_name, method=self.options.method, lora=self.tuning.lora, outputs=outputs,
            max_length=self.limit, identity=identity, folder=self.folder,
        )  # fmt: skip

    def result(self, features: TunedFeatures, seconds: list[float]) -> Tuned:
        """Return what ``fine_tune`` does."""
        return Tuned(
            features, self.steps, self.batch, self.learning_rate, seconds, self.notes, self.state.num_processes
        )

    def read(self, features: TunedFeatures) -> npt.NDArray[np.float32]:
        """Return the outputs for all texts; each process reads its part, and all find the rest in the cache."""
        items = self.pairs.items
        if self.state.num_processes > 1:
            features(items[self.state.process_index :: self.state.num_processes])
            self.state.wait_for_everyone()
        outputs = features(items)
        forget_models()
        return outputs

    # --- what is read -----------------------------------------------------------------------------------------------

    def _load_tokenizer(self) -> tuple[Any, Any]:
        try:
            with quiet_transformers():
                tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self.base)
                config: Any = transformers.AutoConfig.from_pretrained(self.base)
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            remedy = "name a folder with config.json, safetensors weights and a tokenizer"
            raise DataError(f"transformers cannot load it ({reason})", file=self.base_name, remedy=remedy) from error
        tokenizer.truncation_side, tokenizer.padding_side = "left", "right"
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                remedy = "give its tokenizer a pad_token"
                raise DataError("it has neither a padding nor an end token", file=self.base_name, remedy=remedy)
            tokenizer.pad_token = tokenizer.eos_token
            self.notes.append(f"{self.base_name} has no padding token, and its end token is used")
        if tokenizer.chat_template is None and any(Prompt(prompt).is_chat for prompt, _ in self.pairs.items):
            self.notes.append(f"{self.base_name} has no chat template, and messages are joined as plain text")
        return tokenizer, config

    def _tokens(self) -> list[Tokens]:
        tokens = [classifier_tokens(self.tokenizer, item, self.limit) for item in self.pairs.items]
        full = [i for i, text in enumerate(tokens) if len(text["input_ids"]) >= self.limit]
        whole = 1_000_000
        cut = sum(
            len(classifier_tokens(self.tokenizer, self.pairs.items[i], whole)["input_ids"]) > self.limit for i in full
        )
        if cut:
            self.notes.append(
                f"{cut:,} of {len(tokens):,} texts are longer than {self.limit:,} tokens and lose the beginning of "
                "the prompt"
            )
        return tokens

    # --- the head ---------------------------------------------------------------------------------------------------

    def fitted_head(self, model: Any, heads: Heads, device: Any) -> FloatArray:
        """Return the weights of the best linear head on what the base makes of the texts, ``(outputs, hidden)``."""
        if self.base_pairs is None:
            self.base_pairs = self._read_base(model, device)
        base, scale = self.base_pairs
        with threadpool_limits(1, user_api="blas"):
            if self.teacher is None:
                self.teacher = fit_teacher(base, validation_folds(base.prompt, self.options.seed))
            return np.asarray((heads(base, self.teacher) * scale[:, None]).T)

    def _read_base(self, model: Any, device: Any) -> tuple[Pairs, FloatArray]:
        """Return the pairs by what the head reads of each text, scaled, and the factor that each dimension got."""
        name = head_name(model)
        head = model.get_submodule(name)
        model.set_submodule(name, torch.nn.Identity())
        mine = range(self.state.process_index, len(self.pairs.items), self.state.num_processes)
        items = [self.pairs.items[i] for i in mine]
        read = classifier_rewards(model.to(device).eval(), self.tokenizer, items, self.limit).astype(np.float32)
        model.set_submodule(name, head.to(device))
        parts = accelerate.utils.gather_object([(list(mine), read)])
        hidden = np.empty((len(self.pairs.items), read.shape[1]), dtype=np.float32)
        for rows, values in parts:
            hidden[rows] = values
        pairs = self.pairs
        used = np.unique(np.concatenate([pairs.a, pairs.b]))
        scaling = fit_feature_map(hidden[used], 0)
        base = Pairs(scaling(hidden), pairs.a, pairs.b, pairs.prob_a, pairs.prompt)
        return base, np.asarray(scaling.gain / scaling.spread, dtype=np.float64)

    # --- training ---------------------------------------------------------------------------------------------------

    def train(
        self, name: str, target: Path, outputs: int, loss: Any, of_pairs: Mapping[str, FloatArray], heads: Heads
    ) -> float:
        """Train one model into ``target``, unless it is there; return the seconds it took.

        Memory that runs out halves the micro-batch: the pairs of a step stay the same, and so does the result.
        """
        told = self.folder / f"{name}.json"
        if target.is_dir() and told.is_file():
            return float(json.loads(told.read_text())["seconds"])
        runs = self.folder / f"training-{name}"
        started = time.perf_counter()
        while True:
            try:
                self._train_once(name, runs, target, outputs, loss, of_pairs, heads)
                break
            except RuntimeError as error:  # running out of memory is one
                if not _is_out_of_memory(error):
                    raise
                self._halve()
            finally:
                _free_memory()
        seconds = time.perf_counter() - started
        if self.state.is_main_process:
            with atomic_write(told) as partial:
                partial.write_text(json.dumps({"seconds": seconds}))
            shutil.rmtree(runs, ignore_errors=True)
        self.state.wait_for_everyone()
        return seconds

    def _train_once(
        self,
        name: str,
        runs: Path,
        target: Path,
        outputs: int,
        loss: Any,
        of_pairs: Mapping[str, FloatArray],
        heads: Heads,
    ) -> None:
        with _enough_disk(self.folder), quiet_transformers():
            checkpoint = self._last_complete(runs)
            begins = checkpoint is None and not self.tuning.fresh_head
            trainer = self._trainer(name, runs, outputs, loss, of_pairs, heads if begins else None)
            if checkpoint is not None:
                kept = json.loads((checkpoint / COMPLETE_FILE).read_text())
                trainer.running.square, trainer.running.disagreement = kept["square"], kept["disagreement"]
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            self._save(trainer, target)

    def _halve(self) -> None:
        here = self._micro_batch()
        if here == 1 or self.state.num_processes > 1:
            remedy = f"run the same command with --micro-batch {max(1, here // 2)}, it goes on from the last checkpoint"
            if here == 1:
                remedy = "use --lora, --gradient-checkpointing or a smaller --max-length"
            raise DataError(f"memory ran out with {here} pairs at once", file=self.base_name, remedy=remedy) from None
        self.micro = here // 2
        self.notes.append(f"memory ran out with {here} pairs at once: going on with {self.micro}")
        logger.warning("%s.", self.notes[-1])

    def _micro_batch(self) -> int:
        """The largest part of a process's share of a step that is not above the micro-batch."""
        share = self.batch // self.state.num_processes
        return max(size for size in range(1, min(self.micro, share) + 1) if share % size == 0)

    def _trainer(
        self,
        name: str,
        runs: Path,
        outputs: int,
        loss: Any,
        of_pairs: Mapping[str, FloatArray],
        heads: Heads | None,
    ) -> PairTrainer:
        micro = self._micro_batch()
        seed = [self.options.seed, 7, *name.encode()]
        arguments = transformers.TrainingArguments(
            output_dir=str(runs),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=self.batch // self.state.num_processes // micro,
            num_train_epochs=1,  # the order below holds all epochs
            learning_rate=self.learning_rate,
            weight_decay=WEIGHT_DECAY,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, math.ceil(WARM_UP_SHARE * self.steps)),
            # Some CPUs claim bf16 and die of it (docs/log.md).
            bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
            gradient_checkpointing=self.tuning.gradient_checkpointing,
            save_strategy="steps",
            save_steps=math.ceil(self.steps / (CHECKPOINTS + 1)),
            save_total_limit=2,
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),  # else it sees no other process where there is no GPU
            seed=self.options.seed,
        )
        model = self._fresh_model(outputs, np.random.SeedSequence(seed), arguments, heads)
        order = self._order(np.random.default_rng(seed))
        running = Running()
        trainer = PairTrainer(
            model=model,
            args=arguments,
            train_dataset=OrderedPairs(order, self.pairs, self.tokens, of_pairs),
            data_collator=Collator(self.tokenizer.pad_token_id),
            processing_class=self.tokenizer,
            callbacks=[Watch(running, self.progress, self.state.is_main_process)],
        )
        trainer.remove_callback(transformers.PrinterCallback)  # stdout is for results
        trainer.pair_loss, trainer.running, trainer.optimizer_name = loss, running, self.tuning.optimizer
        trainer.head = head_name(model)
        return trainer

    def _order(self, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return the pairs of every step, all epochs in turn; within a step the longest texts come first.

        Pairs of like length then share a micro-batch, and little is padded. It changes no step.
        """
        n, total = len(self.pairs.prob_a), self.steps * self.batch
        order = np.concatenate([rng.permutation(n) for _ in range(math.ceil(total / n))])[:total]
        length = np.array([len(text["input_ids"]) for text in self.tokens])
        longer = np.maximum(length[self.pairs.a], length[self.pairs.b])
        steps = order.reshape(self.steps, self.batch)
        ranks = np.argsort(-longer[steps], axis=1, kind="stable")
        return np.take_along_axis(steps, ranks, axis=1).ravel()

    def _fresh_model(
        self, outputs: int, seed: np.random.SeedSequence, arguments: Any, heads: Heads | None = None
    ) -> Any:
        """Return the base with a fresh or fitted head, dropout off, and adapters around it with LoRA."""
        config = self.config.__class__.from_dict(self.config.to_dict())
        config.num_labels = outputs
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            part.pad_token_id = self.tokenizer.pad_token_id
            for name, value in part.to_dict().items():
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
        dtype = torch.bfloat16 if self.tuning.lora and arguments.bf16 else torch.float32
        load: Any = transformers.AutoModelForSequenceClassification.from_pretrained
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(seed.generate_state(1)[0]))
            try:
                model, told = load(
                    self.base, config=config, dtype=dtype, use_safetensors=True, ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )  # fmt: skip
            except (OSError, ValueError, KeyError) as error:
                reason = " ".join(str(error).split())[:200]
                remedy = "name a folder with config.json, safetensors weights and a tokenizer"
                raise DataError(f"it cannot be loaded ({reason})", file=self.base_name, remedy=remedy) from error
            head = model.get_submodule(head_name(model))
            torch.nn.init.normal_(head.weight, std=0.02)
            with torch.no_grad():
                head.weight[-1] = 0.0  # a reward that begins with no opinion has none to unlearn
                if head.bias is not None:
                    head.bias.zero_()
                if heads is not None:
                    found = torch.as_tensor(self.fitted_head(model, heads, arguments.device))
                    head.weight.copy_(found.to(head.weight))
            if self.tuning.lora:
                model = self._with_adapters(model, told["missing_keys"])
        if self.tuning.gradient_checkpointing and self.tuning.lora:
            model.enable_input_require_grads()
        return model

    def _with_adapters(self, model: Any, fresh: Sequence[str]) -> Any:
        try:
            import peft
        except ImportError:
            raise MissingExtraError("peft", "finetune", "--lora") from None
        # Whatever the checkpoint did not bring is trained and saved whole, the head above all.
        whole = {head_name(model).split(".")[0], *(key.rpartition(".")[0] for key in fresh)}
        outer = [name for name in whole if not any(name != other and name.startswith(f"{other}.") for other in whole)]
        config = peft.LoraConfig(
            task_type=peft.TaskType.SEQ_CLS,
            r=self.tuning.lora_rank,
            lora_alpha=2 * self.tuning.lora_rank,
            lora_dropout=0.0,
            target_modules="all-linear",
            exclude_modules=outer,
            modules_to_save=sorted(outer),
        )
        return peft.get_peft_model(model, config)

    def _last_complete(self, runs: Path) -> Path | None:
        """Return the last checkpoint that was written whole; half-written ones are removed."""
        found = sorted(runs.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        whole = [path for path in found if (path / COMPLETE_FILE).is_file()]
        self.state.wait_for_everyone()
        if self.state.is_main_process:
            for path in found:
                if path not in whole:
                    shutil.rmtree(path, ignore_errors=True)
        return whole[-1] if whole else None

    def _save(self, trainer: PairTrainer, target: Path) -> None:
        partial = target.parent / f".{target.name}.partial"
        if self.state.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        self.state.wait_for_everyone()
        trainer.save_model(str(partial))
        if self.state.is_main_process:
            (partial / "training_args.bin").unlink(missing_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        self.state.wait_for_everyone()


def head_name(model: Any) -> str:
    """Return the name of the last linear layer outside the body: ``score`` of decoders, ``classifier`` of encoders."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = [
        name
        for name, layer in inner.named_modules()
        if isinstance(layer, torch.nn.Linear) and name.split(".")[0] != inner.base_model_prefix
    ]
    return str(names[-1])


@dataclass(frozen=True)
class _Configured:
    config: Any


@contextmanager
def only_the_first() -> Iterator[bool]:
    """Yield whether this is the first process of a launch; the others wait at the end of the block."""
    state = launch_state(cpu=not torch.cuda.is_available())
    yield bool(state.is_main_process)
    state.wait_for_everyone()


# --- what can run out -----------------------------------------------------------------------------------------------


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _enough_disk(folder: Path) -> Iterator[None]:
    """Turn a disk that fills into one sentence; checkpoints that were whole stay."""
    try:
        yield
    except Exception as error:  # torch and safetensors wrap what the system said in errors of their own
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and "No space left" not in str(error):
            raise
        remedy = "make room and run the same command, it goes on from the last whole checkpoint"
        raise DataError("the disk is full", file=str(folder), remedy=remedy) from error
