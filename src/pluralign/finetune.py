"""Fine-tuning of reward models on votes, with transformers' own ``Trainer``: one process or many, resumed where killed.

Decided here: the recipe (the paper's App. Training Pipeline), the two losses, and what is kept of unfinished work. The
losses are means over pairs of terms that are fixed during a step, so a step does not depend on how its pairs are dealt
out to devices and micro-batches. Every process must call ``fine_tune``; the first one writes.
"""

import errno
import gc
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import accelerate
import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch.nn.functional import binary_cross_entropy_with_logits

from pluralign.calibration import votes_from_rewards
from pluralign.encoders import Item, Progress, quiet_transformers
from pluralign.errors import DataError, MissingExtraError, UsageError
from pluralign.files import write_whole
from pluralign.joint import EXTREME_PRICE, VOTE_SHARE
from pluralign.models import Tokens, classifier_tokens, longest_text, padded
from pluralign.options import FitOptions, TuneOptions
from pluralign.simplex import simplex_least_squares
from pluralign.tuned import (
    BACKBONE_FOLDER,
    TunedFeatures,
    backbone_folder,
    forget_models,
    model_folders,
    model_identity,
)

FloatArray: TypeAlias = npt.NDArray[np.float64]

LEARNING_RATE, LORA_LEARNING_RATE = 2e-5, 2e-4
HEAD_FACTOR = 10.0
"""How much faster the head learns: it begins with nothing."""
WEIGHT_DECAY = 0.1
WARM_UP_SHARE = 0.03
LARGEST_BATCH = 512
LEAST_STEPS = 32
"""The batch is halved from 512 until an epoch has as many steps."""
SMALLEST_BATCH = 8
TEMPERATURES = (0.3, 0.05)
"""Of the joint members' softened votes, from the first step to the last."""
VOTES_UNTIL = 0.2
"""Share of the training after which joint members learn from the reward beside them more than from raw votes."""
STAGE_PRICE = 1.0
"""What a stagewise member pays for disagreement above the bound: enough to outweigh the residual."""
MEMORY = 0.2
"""How much of a step goes into the running spread and disagreement of the members."""
CHECKPOINTS = 4
"""How many times one training is kept on the way."""
COMPLETE_FILE = "complete.json"
"""Written last into a checkpoint; one without it is not resumed from."""

logger = logging.getLogger("pluralign")


@dataclass(frozen=True)
class TextPairs:
    """Compared texts, with the votes."""

    items: Sequence[Item]
    """Every distinct text."""
    a: npt.NDArray[np.int32]
    """Item that is response a, ``(n,)``."""
    b: npt.NDArray[np.int32]
    prob_a: FloatArray
    """Share of people choosing a, ``(n,)``."""


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


def fine_tune(
    pairs: TextPairs,
    k: int,
    options: FitOptions,
    tuning: TuneOptions,
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

    with s_j the running spread of Δ_j, τ falling, and v = 1 in the beginning. The second term makes it the expected
    error of votes drawn with chances q_j: members that stay undecided, which hard votes cannot be, cost something.

    ``stagewise``: k models with one output, each from the same checkpoint with a fresh head, fitted to what the hard
    votes of those before it get wrong (§4).

    In both, a member whose running disagreement with people is above the bound pays for it.

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
    seconds = []
    if options.method == "joint":
        watch("train", "all members")
        outputs = k + 1
        seconds.append(work.train("joint", folder / BACKBONE_FOLDER, outputs, _JointLoss(k, bound), _plain(pairs)))
        features = work.features(outputs).identified()
        work.read(features)
        return work.result(features, seconds)
    prob_hat = np.full(len(pairs.prob_a), 0.5)
    known: list[str] = []
    for j in range(k):
        watch("train", f"member {j + 1} of {k}")
        features = work.features(j + 1)
        place = model_folders(features)[j]
        variant = "symmetric" if j == 0 else options.variant
        targets = stage_targets(pairs.prob_a, prob_hat, variant, options.loss)
        loss = _StageLoss("bce" if variant == "weighted" else options.loss, bound)
        seconds.append(work.train(f"member-{j}", place, 1, loss, targets))
        known.append(model_identity(place, features))
        features = work.features(j + 1, tuple(known))
        outputs_so_far = work.read(features)
        votes = votes_from_rewards(outputs_so_far[pairs.a], outputs_so_far[pairs.b])
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


def batch_and_steps(n_pairs: int, tuning: TuneOptions) -> tuple[int, int]:
    """Return pairs a step and steps: the largest power of two up to 512 that leaves 32 steps an epoch, at least 8.

    Example:
        >>> batch_and_steps(100_000, TuneOptions(backbone="x")), batch_and_steps(1_500, TuneOptions(backbone="x"))
        ((512, 195), (32, 47))
    """
    batch = tuning.batch_size
    if batch is None:
        batch = LARGEST_BATCH
        while batch > SMALLEST_BATCH and n_pairs * tuning.epochs < LEAST_STEPS * batch:
            batch //= 2
    return batch, max(1, round(n_pairs * tuning.epochs / batch))


# --- losses ---------------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """What the loss of the next step needs to know of the steps before: spread and disagreement of each output."""

    square: list[float] = field(default_factory=list)
    disagreement: list[float] = field(default_factory=list)
    _sums: Any = None

    def add(self, difference: Any, prob_a: Any) -> None:
        """Take note of one micro-batch."""
        vote = 0.5 + 0.5 * torch.sign(difference)
        apart = vote * (1 - prob_a[:, None]) + (1 - vote) * prob_a[:, None]
        count = torch.full_like(difference[:1], len(difference))
        sums = torch.cat([(difference**2).sum(0, keepdim=True), apart.sum(0, keepdim=True), count]).double()
        self._sums = sums if self._sums is None else self._sums + sums

    def update(self, over_processes: Callable[[Any], Any]) -> None:
        """End a step."""
        square, disagreement, count = over_processes(self._sums).cpu()
        self._sums = None
        share = MEMORY if self.square else 1.0
        old = (self.square or [0.0] * len(square)), (self.disagreement or [0.0] * len(square))
        self.square, self.disagreement = (
            [(1 - share) * before + share * now for before, now in zip(past, (sums / count).tolist(), strict=True)]
            for past, sums in zip(old, (square, disagreement), strict=True)
        )

    def spread(self, like: Any) -> Any:
        """Return √mean Δ², 1 before the first step."""
        if not self.square:
            return torch.ones_like(like[0])
        return torch.tensor(self.square, device=like.device).sqrt().clamp_min(1e-6).to(like.dtype)

    def too_far(self, like: Any, bound: float) -> Any:
        """Return 1 for outputs whose disagreement is above the bound, else 0."""
        if not self.disagreement:
            return torch.zeros_like(like[0])
        return (torch.tensor(self.disagreement, device=like.device) > bound).to(like.dtype)


@dataclass(frozen=True)
class _JointLoss:
    k: int
    bound: float

    def __call__(self, difference: Any, of_pairs: Mapping[str, Any], running: _Running, done: float) -> Any:
        """Return the loss of a micro-batch, with ``done`` of the training behind us."""
        prob_a = of_pairs["prob_a"]
        members, reward = difference[:, : self.k], difference[:, self.k]
        tau = TEMPERATURES[0] * (TEMPERATURES[1] / TEMPERATURES[0]) ** done
        soft = torch.sigmoid(members / (running.spread(difference)[: self.k] * tau))
        vote_share = 1.0 if done < VOTES_UNTIL else VOTE_SHARE
        target = (1 - vote_share) * torch.sigmoid(reward).detach() + vote_share * prob_a
        # The expected squared error of votes that are drawn with these chances: undecided members cost something.
        error = ((soft.mean(1) - target) ** 2 + (soft * (1 - soft)).sum(1) / self.k**2).mean()
        apart = ((1 - 2 * prob_a)[:, None] * soft).mean(0) @ running.too_far(difference, self.bound)[: self.k]
        return error + EXTREME_PRICE / self.k * apart + binary_cross_entropy_with_logits(reward, prob_a)


@dataclass(frozen=True)
class _StageLoss:
    kind: str
    bound: float

    def __call__(self, difference: Any, of_pairs: Mapping[str, Any], running: _Running, done: float) -> Any:  # noqa: ARG002
        """Return the loss of a micro-batch."""
        target, weight = of_pairs["target"], of_pairs["weight"]
        share = torch.sigmoid(difference[:, 0])
        if self.kind == "bce":
            error = (weight * binary_cross_entropy_with_logits(difference[:, 0], target, reduction="none")).mean()
        else:
            error = ((share - target) ** 2).mean()
        apart = ((1 - 2 * of_pairs["prob_a"]) * share).mean() * running.too_far(difference, self.bound)[0]
        return error + STAGE_PRICE * apart


# --- one piece of work ----------------------------------------------------------------------------------------------


class _Work:
    """Everything that the trainings of one ensemble share: the base, its tokenizer, the texts as tokens, the recipe."""

    def __init__(
        self,
        pairs: TextPairs,
        options: FitOptions,
        tuning: TuneOptions,
        folder: Path,
        bound: float,
        progress: Progress | None,
    ) -> None:
        self.pairs, self.options, self.tuning, self.folder = pairs, options, tuning, folder
        self.bound, self.progress = bound, progress
        self.base_name = str(tuning.backbone)
        self.base = backbone_folder(self.base_name)
        self.state = accelerate.PartialState()
        self.batch, self.steps = batch_and_steps(len(pairs.prob_a), tuning)
        if self.batch % self.state.num_processes:
            raise UsageError(f"{self.batch} pairs a step cannot be dealt out to {self.state.num_processes} processes.")
        if self.state.distributed_type == accelerate.DistributedType.FSDP and tuning.optimizer == "soap":
            raise UsageError("SOAP needs whole matrices, which FSDP deals out to devices: use --optimizer adamw.")
        self.learning_rate = tuning.learning_rate or (LORA_LEARNING_RATE if tuning.lora else LEARNING_RATE)
        self.micro = tuning.micro_batch
        self.notes: list[str] = []
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
        return Tuned(features, self.steps, self.batch, self.learning_rate, seconds, self.notes)

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
        if tokenizer.chat_template is None and any(not isinstance(prompt, str) for prompt, _ in self.pairs.items):
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

    # --- training ---------------------------------------------------------------------------------------------------

    def train(self, name: str, target: Path, outputs: int, loss: Any, of_pairs: Mapping[str, FloatArray]) -> float:
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
                with _enough_disk(self.folder), quiet_transformers():
                    trainer = self._trainer(name, runs, outputs, loss, of_pairs)
                    checkpoint = self._last_complete(runs, trainer)
                    trainer.train(resume_from_checkpoint=checkpoint)
                    self._save(trainer, target)
                break
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                self._halve()
            finally:
                trainer = None
                _free_memory()
        seconds = time.perf_counter() - started
        if self.state.is_main_process:
            with write_whole(told) as partial:
                partial.write_text(json.dumps({"seconds": seconds}))
            shutil.rmtree(runs, ignore_errors=True)
        self.state.wait_for_everyone()
        return seconds

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
        self, name: str, runs: Path, outputs: int, loss: Any, of_pairs: Mapping[str, FloatArray]
    ) -> "_PairTrainer":
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
            seed=self.options.seed,
        )
        model = self._fresh_model(outputs, np.random.SeedSequence(seed), arguments)
        order = self._order(np.random.default_rng(seed))
        running = _Running()
        trainer = _PairTrainer(
            model=model,
            args=arguments,
            train_dataset=_Ordered(order, self.pairs, self.tokens, of_pairs),
            data_collator=_Collator(self.tokenizer.pad_token_id),
            processing_class=self.tokenizer,
            callbacks=[_Watch(running, self.progress, self.state.is_main_process)],
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

    def _fresh_model(self, outputs: int, seed: np.random.SeedSequence, arguments: Any) -> Any:
        """Return the base with a fresh head, dropout off, and adapters around it with LoRA."""
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

    def _last_complete(self, runs: Path, trainer: "_PairTrainer") -> str | None:
        """Return the last checkpoint that was written whole; half-written ones are removed."""
        found = sorted(runs.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        whole = [path for path in found if (path / COMPLETE_FILE).is_file()]
        self.state.wait_for_everyone()
        if self.state.is_main_process:
            for path in found:
                if path not in whole:
                    shutil.rmtree(path, ignore_errors=True)
        if not whole:
            return None
        kept = json.loads((whole[-1] / COMPLETE_FILE).read_text())
        trainer.running.square, trainer.running.disagreement = kept["square"], kept["disagreement"]
        return str(whole[-1])

    def _save(self, trainer: "_PairTrainer", target: Path) -> None:
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


# --- what transformers' Trainer is given ----------------------------------------------------------------------------


class _PairTrainer(transformers.Trainer):
    """A Trainer whose batches are pairs: the first half of the texts are responses a, the second responses b."""

    loss_is_scaled_for_ga = False
    pair_loss: Any
    running: _Running
    optimizer_name: str
    head: str

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: ARG002
        num_items_in_batch: Any = None,  # noqa: ARG002
    ) -> Any:
        of_pairs = {name: inputs.pop(name) for name in ("prob_a", "target", "weight")}
        rewards = model(**inputs).logits.float()
        reward_a, reward_b = rewards.chunk(2)
        difference = reward_a - reward_b
        self.running.add(difference.detach(), of_pairs["prob_a"])
        done = self.state.global_step / max(1, self.state.max_steps - 1)
        return self.pair_loss(difference, of_pairs, self.running, done)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:  # noqa: ARG002
        ordered: Any = self.train_dataset
        return torch.utils.data.SequentialSampler(ordered)

    def create_optimizer(self, model: Any = None) -> Any:
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
            self.optimizer = torch.optim.AdamW(settings, lr=rate)
        else:
            try:
                from pytorch_optimizer import SOAP
            except ImportError:
                raise MissingExtraError("pytorch-optimizer", "finetune", "--optimizer soap") from None
            self.optimizer = SOAP(settings, lr=rate)
        return self.optimizer


class _Watch(transformers.TrainerCallback):
    """Ends each step for the running figures, reports it, and marks checkpoints that are whole."""

    def __init__(self, running: _Running, progress: Progress | None, first: bool) -> None:
        self.running, self.progress, self.first = running, progress, first

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.running.update(_sum_over_processes)
        if state.global_step >= state.max_steps:
            control.should_save = False  # the model itself is saved next
        if self.progress:
            self.progress(state.global_step, state.max_steps)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if self.first:
            kept = {"square": self.running.square, "disagreement": self.running.disagreement}
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE_FILE
            with write_whole(path) as partial:
                partial.write_text(json.dumps(kept))


def _sum_over_processes(sums: Any) -> Any:
    return accelerate.utils.reduce(sums, "sum")


@dataclass(frozen=True)
class _Ordered(torch.utils.data.Dataset[Any]):
    """The pairs in the order of training."""

    order: npt.NDArray[np.int64]
    pairs: TextPairs
    tokens: Sequence[Tokens]
    of_pairs: Mapping[str, FloatArray]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> dict[str, Any]:
        pair = int(self.order[position])
        texts = {"a": self.tokens[self.pairs.a[pair]], "b": self.tokens[self.pairs.b[pair]]}
        return texts | {name: float(values[pair]) for name, values in self.of_pairs.items()}


@dataclass(frozen=True)
class _Collator:
    pad: int

    def __call__(self, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        texts = [pair["a"] for pair in pairs] + [pair["b"] for pair in pairs]
        numbers = {name: torch.tensor([pair[name] for pair in pairs]) for name in ("prob_a", "target", "weight")}
        return padded(texts, self.pad, "cpu") | numbers


@contextmanager
def only_the_first() -> Iterator[bool]:
    """Yield whether this is the first process of a launch; the others wait at the end of the block."""
    state = accelerate.PartialState()
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
