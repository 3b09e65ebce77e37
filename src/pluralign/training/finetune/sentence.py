"""Sentence encoders as backbones: rewards that are linear in the mean states of several layers, as on frozen features.

Training starts from the rewards that were fitted on the frozen features, and changes the upper layers. The result is a
folder like that of the base, with other weights: any tool for sentence encoders reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import transformers
from transformers.modeling_outputs import SequenceClassifierOutput

from pluralign.core.arrays import Array, FloatArray
from pluralign.core.errors import DataError
from pluralign.models.batches import Tokens
from pluralign.models.loading import copy_model, not_loadable
from pluralign.training.finetune.base import BaseModel, read_folder, turn_off_dropout
from pluralign.votes.prompts import Item, plain_text

WEIGHTS_FILE = "model.safetensors"
BODY = "body"


class PooledRewards(torch.nn.Module):
    """Rewards from a sentence encoder: a linear layer on the scaled mean states of several layers.

    Args:
        body: the encoder.
        layers: the layers that are pooled; 0 is the embeddings.
        factor: scale of each pooled dimension, ``(d,)``.
        theta: the first rewards, ``(d, outputs)``.
        trained: number of upper layers that are trained.
    """

    base_model_prefix = BODY
    factor: torch.Tensor

    def __init__(self, body: Any, layers: tuple[int, ...], factor: Array, theta: FloatArray, trained: int) -> None:
        super().__init__()
        self.body, self.layers = body, layers
        self.register_buffer("factor", torch.as_tensor(factor, dtype=torch.float32))
        self.score = torch.nn.Linear(theta.shape[0], theta.shape[1], bias=False)
        with torch.no_grad():
            self.score.weight.copy_(torch.as_tensor(theta.T))
        body.requires_grad_(False)
        layer_stack(body)[-trained:].requires_grad_(True)

    def forward(self, input_ids: Any, attention_mask: Any, **_: Any) -> Any:
        """Return the rewards of texts as ``logits``, ``(n_texts, outputs)``."""
        read = self.body(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        mask = attention_mask[:, :, None].float()
        with torch.autocast(input_ids.device.type, enabled=False):  # means and rewards stay in float32
            means = [(read.hidden_states[n].float() * mask).sum(1) / mask.sum(1) for n in self.layers]
            return SequenceClassifierOutput(logits=self.score(torch.hstack(means) * self.factor))

    def gradient_checkpointing_enable(self, *args: Any, **options: Any) -> None:
        """Recompute the activations of the body."""
        self.body.gradient_checkpointing_enable(*args, **options)


def layer_stack(body: Any) -> Any:
    """Return the layers of an encoder. Raises DataError if they are not a list, as in models that repeat one layer."""
    depth = body.config.num_hidden_layers
    stacks = [part for part in body.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == depth]
    if not stacks:
        remedy = "use --lora, or frozen features with --encoder"
        raise DataError("its upper layers cannot be trained alone", file=body.name_or_path, remedy=remedy)
    return stacks[0]


@dataclass(frozen=True)
class SentenceBase(BaseModel):
    """A sentence encoder, and the rewards on its frozen features that training starts from."""

    layers: tuple[int, ...] = ()
    """The layers that are pooled."""
    factor: Array = None  # type: ignore[assignment]
    """Scale of each pooled dimension, ``(d,)``."""
    theta: FloatArray = None  # type: ignore[assignment]
    """The first rewards, ``(d, outputs)``."""
    trained: int = 0
    """Number of upper layers that are trained."""

    def tokens(self, items: Sequence[Item]) -> tuple[list[Tokens], str | None]:
        """Return the tokens of each text as the frozen encoder reads them. There is no note."""
        texts = [plain_text(*item) for item in items]
        read = self.tokenizer(texts, truncation=True, max_length=self.max_length, return_token_type_ids=False)
        return [
            {"input_ids": ids, "attention_mask": mask}
            for ids, mask in zip(read["input_ids"], read["attention_mask"], strict=True)
        ], None

    def reward_model(self, *_: Any, **__: Any) -> PooledRewards:
        """Return the encoder with the rewards that training starts from.

        Raises:
            DataError: transformers cannot load it, or its layers are not a list.
        """
        try:
            body: Any = transformers.AutoModel.from_pretrained(
                self.folder, config=self.config, dtype=torch.float32, use_safetensors=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise not_loadable(self.name, error) from error
        return PooledRewards(body, self.layers, self.factor, self.theta, self.trained)


def load_sentence_base(
    name: str, folder: Path, layers: tuple[int, ...], max_length: int, factor: Array, theta: FloatArray
) -> SentenceBase:
    """Return a sentence encoder whose upper half of layers will be trained, without dropout.

    Args:
        name: of the model, as it was given.
        folder: of the model.
        layers: the layers that are pooled.
        max_length: maximum number of tokens per text.
        factor: scale of each pooled dimension, ``(d,)``.
        theta: the first rewards, ``(d, outputs)``.
    """
    tokenizer, config = read_folder(name, folder)
    turn_off_dropout(config)
    trained = (config.num_hidden_layers + 1) // 2
    return SentenceBase(name, folder, tokenizer, config, max_length, (), layers, factor, theta, trained)


def write_encoder(trained: Path, base: Path, folder: Path) -> None:
    """Write a trained encoder as a folder like that of its base.

    Args:
        trained: the folder that the training saved.
        base: the folder of the base.
        folder: an empty folder.
    """
    weights = safetensors.torch.load_file(trained / WEIGHTS_FILE)
    with safetensors.safe_open(base / WEIGHTS_FILE, "pt") as stored:
        names = {name: name for name in stored.keys()}  # noqa: SIM118
    names |= {name.partition(".")[2]: name for name in names}  # some folders name weights bert.…
    body = {
        names[own]: value.contiguous()
        for name, value in weights.items()
        if name.startswith(f"{BODY}.") and (own := name.removeprefix(f"{BODY}.")) in names
    }
    copy_model(base, folder)
    safetensors.torch.save_file(body, folder / WEIGHTS_FILE, metadata={"format": "pt"})
