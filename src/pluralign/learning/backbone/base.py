"""The pretrained model that is fine-tuned: its tokenizer, its texts as tokens, and fresh reward models from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import numpy as np
import torch
import transformers
from threadpoolctl import threadpool_limits

from pluralign.core.arrays import FloatArray, Vectors
from pluralign.core.errors import DataError, MissingExtraError
from pluralign.core.processes import Processes
from pluralign.ensemble.members import fit_feature_map
from pluralign.learning.backbone.recipe import TextPairs
from pluralign.learning.bradley_terry import Teacher, fit_teacher
from pluralign.learning.options import FinetuneOptions
from pluralign.learning.pairs import Pairs, validation_folds
from pluralign.text.classifier import classifier_head, classifier_rewards, remove_head, tokens_and_cut, use_float32_head
from pluralign.text.loading import Tokens, context_length, load_tokenizer, loading, model_folder, sort_targets
from pluralign.votes.prompts import Item, Prompt

HEAD_DEVIATION = 0.02
"""Standard deviation of the weights of a fresh head."""


@dataclass(frozen=True)
class BaseModel:
    """A pretrained model, not loaded into memory."""

    name: str
    """As it was given."""
    folder: Path
    tokenizer: Any
    config: Any
    max_length: int
    """Tokens that are read of a text."""
    notes: tuple[str, ...]
    """What the user should know about it, as sentences without a full stop."""

    def tokens(self, items: Sequence[Item]) -> tuple[list[Tokens], str | None]:
        """Return the tokens of each text, and a note if some texts are truncated."""
        read = [tokens_and_cut(self.tokenizer, item, self.max_length) for item in items]
        cut = sum(too_long for _, too_long in read)
        limit = f"are longer than {self.max_length:,} tokens and lose the beginning of the prompt"
        return [text for text, _ in read], f"{cut:,} of {len(read):,} texts {limit}" if cut else None

    def reward_model(
        self,
        outputs: int,
        tuning: FinetuneOptions,
        seed: np.random.SeedSequence,
        bf16: bool = False,
        weights: FloatArray | None = None,
    ) -> Any:
        """Return the model with a reward head, dropout off, and with LoRA adapters if ``tuning`` asks for them.

        Args:
            outputs: number of rewards.
            tuning: LoRA and gradient checkpointing.
            seed: of the fresh head and the adapters.
            bf16: load the body in bfloat16; the head is in float32.
            weights: of the head, ``(outputs, hidden)``; by default random, and 0 for the last of several outputs.
        """
        dtype = torch.bfloat16 if bf16 else torch.float32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(seed.generate_state(1)[0]))
            model, missing = self._load(outputs, dtype)
            if bf16:
                use_float32_head(model)
            _, head = classifier_head(model)
            torch.nn.init.normal_(head.weight, std=HEAD_DEVIATION)
            with torch.no_grad():
                if outputs > 1:  # the last output of a joint model is its Bradley–Terry reward, which starts from 0
                    head.weight[-1] = 0.0
                if head.bias is not None:
                    head.bias.zero_()
                if weights is not None:
                    head.weight.copy_(torch.as_tensor(weights).to(head.weight))
            if tuning.lora:
                model = _with_adapters(model, missing, tuning.lora_rank)
        if tuning.gradient_checkpointing and tuning.lora:
            model.enable_input_require_grads()
        return model

    def _load(self, outputs: int, dtype: Any) -> tuple[Any, Sequence[str]]:
        """Return the classifier, and the names of the weights that the checkpoint does not hold."""
        config = self.config.__class__.from_dict(self.config.to_dict())
        config.num_labels = outputs
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            part.pad_token_id = self.tokenizer.pad_token_id
            for key, value in part.to_dict().items():
                if "drop" in key and isinstance(value, float):
                    setattr(part, key, 0.0)
        with loading(self.name):
            load: Any = transformers.AutoModelForSequenceClassification.from_pretrained
            model, info = load(
                self.folder, config=config, dtype=dtype, use_safetensors=True, ignore_mismatched_sizes=True,
                output_loading_info=True,
            )  # fmt: skip
        return model, info["missing_keys"]


def load_base(name: str, max_length: int, items: Sequence[Item]) -> BaseModel:
    """Return the base model of that name, with a tokenizer that pads on the right and truncates on the left.

    Args:
        name: a model folder, a hub id, ``smollm2`` or ``minilm``.
        max_length: maximum number of tokens per text; the model's own limit may be lower.
        items: the texts of the training, to note whether the tokenizer lacks a chat template for them.

    Raises:
        DataError: transformers cannot load it, or it has no token to pad with.
    """
    folder = model_folder(name)
    with loading(name):
        tokenizer: Any = load_tokenizer(transformers, folder)
        config: Any = transformers.AutoConfig.from_pretrained(folder)
    tokenizer.padding_side = "right"
    notes: list[str] = []
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            remedy = "give its tokenizer a pad_token"
            raise DataError("it has neither a padding nor an end token", file=name, remedy=remedy)
        tokenizer.pad_token = tokenizer.eos_token
        notes.append(f"{name} has no padding token, so its end token is used")
    if tokenizer.chat_template is None and any(Prompt(prompt).is_chat for prompt, _ in items):
        notes.append(f"{name} has no chat template, so messages are joined as plain text")
    limit = min(max_length, context_length(SimpleNamespace(config=config), tokenizer))
    return BaseModel(name, folder, tokenizer, config, limit, tuple(notes))


def _with_adapters(model: Any, missing: Sequence[str], rank: int) -> Any:
    """Return the model with LoRA adapters on all linear layers of its body.

    The head, and all else that the checkpoint does not hold, is trained and saved in full.
    """
    try:
        import peft
    except ImportError:
        raise MissingExtraError("peft", "finetune", "--lora") from None
    name, _ = classifier_head(model)
    full = {name.split(".")[0], *(key.rpartition(".")[0] for key in missing)}
    outer = [name for name in full if not any(name != other and name.startswith(f"{other}.") for other in full)]
    config = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_CLS,
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        exclude_modules=sorted(outer),
        modules_to_save=sorted(outer),
    )
    adapted = peft.get_peft_model(model, config)
    sort_targets(adapted)
    return adapted


# --- Fitted heads: fine-tuning starts from the ensemble on the base model's frozen states instead of random rewards.


@dataclass(frozen=True, eq=False)
class BaseStates:
    """The states of the base model for all texts, and the training pairs by them."""

    states: Vectors
    """``(n_texts, hidden)``."""
    pairs: Pairs
    """Their inputs are the scaled states of the texts."""
    factor: FloatArray
    """Scale factor of each dimension, ``(hidden,)``."""
    seed: int
    """Of the validation folds."""

    @cached_property
    def teacher(self) -> Teacher:
        """The rewards fitted to the training pairs."""
        with threadpool_limits(1, user_api="blas"):
            return fit_teacher(self.pairs, validation_folds(self.pairs.prompt, self.seed))

    def head(self, theta: FloatArray) -> FloatArray:
        """Return linear rewards of the inputs, ``(hidden, outputs)``, as weights of a head, ``(outputs, hidden)``."""
        return np.asarray((theta * self.factor[:, None]).T)


def base_states(base: BaseModel, model: Any, pairs: TextPairs, seed: int, processes: Processes) -> BaseStates:
    """Read the training texts with the base model.

    Args:
        base: the base model.
        model: a sequence classifier made from it, before any training, on its device. It loses its head.
        pairs: the training pairs.
        seed: of the validation folds.
        processes: each process reads a part of the texts.
    """
    remove_head(model)
    own = range(processes.rank, len(pairs.items), processes.count)
    items = [pairs.items[i] for i in own]
    read = classifier_rewards(model.eval(), base.tokenizer, items, base.max_length).astype(np.float32)
    states = np.empty((len(pairs.items), read.shape[1]), dtype=np.float32)
    for rows, values in accelerate.utils.gather_object([(list(own), read)]):
        states[rows] = values
    used = np.unique(np.concatenate([pairs.a, pairs.b]))
    scaling = fit_feature_map(states[used], 0)
    inputs = Pairs(scaling(states), pairs.a, pairs.b, pairs.prob_a, pairs.prompt)
    return BaseStates(states, inputs, np.asarray(scaling.gain / scaling.spread, dtype=np.float64), seed)
