"""Every dial with its default and its help, once for Python and the command line.

Apart from the functions they steer, because ``pluralign --help`` shows them without importing numpy or torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from pluralign.errors import UsageError, did_you_mean

TieRule: TypeAlias = Literal["drop", "half"]
Repeats: TypeAlias = Literal["count", "first"]
Variant: TypeAlias = Literal["printed", "symmetric", "weighted"]
Loss: TypeAlias = Literal["mse", "bce"]
Method: TypeAlias = Literal["joint", "stagewise"]
Level: TypeAlias = Literal["vote", "policy"]
Target: TypeAlias = Literal["auto", "teacher", "votes"]
MemberKind: TypeAlias = Literal["linear", "mlp"]
Pooling: TypeAlias = Literal["mean", "last"]
Optimizer: TypeAlias = Literal["soap", "adamw"]
MAX_MEMBERS = 256
TIE_RULES: tuple[TieRule, ...] = ("drop", "half")


@dataclass(frozen=True)
class LoadOptions:
    """How votes are read."""

    ties: TieRule = field(
        default="drop", metadata={"help": "Drop ties as the paper does, or count each as half a vote for both sides."}
    )
    min_votes: int | None = field(
        default=None,
        metadata={
            "help": "Least votes a pair must have; unless given 2, or 1 for chosen/rejected rows and most known sets."
        },
    )
    repeats: Repeats = field(
        default="count", metadata={"help": "Count every vote, or only an annotator's first on a pair."}
    )
    skip_bad: bool = field(
        default=False, metadata={"help": "Drop rows that cannot be used, and say how many of which kind."}
    )
    rename: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"help": "Read a column under another name: --rename prompt=question. Repeatable."},
    )


@dataclass(frozen=True)
class FitOptions:
    """How an ensemble is learned."""

    k: int | str = field(default=8, metadata={"help": "Members of the ensemble, or auto: the fewest that do as well."})
    method: Method = field(
        default="joint", metadata={"help": "All members together, or one after the other (the paper)."}
    )
    variant: Variant = field(default="symmetric", metadata={"help": "Stagewise: the loss of each stage."})
    loss: Loss = field(default="mse", metadata={"help": "Stagewise: squared error or cross-entropy."})
    level: Level = field(default="vote", metadata={"help": "What is optimised: shares of hard votes, or of policies."})
    target: Target = field(
        default="auto", metadata={"help": "Joint: learn from a teacher, the raw votes, or what validates better."}
    )
    members: MemberKind = field(
        default="linear", metadata={"help": "Rewards linear in the features, or a small network."}
    )
    max_disagreement: float = field(
        default=0.5, metadata={"help": "No member may disagree with people more than this; 1 sets no bound."}
    )
    encoder: str = field(
        default="minilm", metadata={"help": "minilm, smollm2, hashing, none, a model folder, or a hub id."}
    )
    layer: int | None = field(
        default=None, metadata={"help": "Layers of a decoder that are kept: two thirds unless given."}
    )
    pooling: Pooling = field(default="mean", metadata={"help": "Mean over a decoder's tokens, or the last one."})
    surface: bool = field(default=True, metadata={"help": "Append surface features: lengths, punctuation, structure."})
    test_fraction: float = field(
        default=0.1, metadata={"help": "Share of prompts held out where no official split is."}
    )
    keep_held_out: bool = field(
        default=True, metadata={"help": "Keep the held-out votes and texts in the folder, for report and the like."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the split and of everything random."})

    def __post_init__(self) -> None:
        if isinstance(self.k, str) and self.k.isdecimal():
            object.__setattr__(self, "k", int(self.k))
        if self.k != "auto" and not (isinstance(self.k, int) and 1 <= self.k <= MAX_MEMBERS):
            raise UsageError(f"k must be a whole number from 1 to {MAX_MEMBERS}, or auto, not {self.k!r}.")
        if self.seed < 0:
            raise UsageError(f"seed must not be negative, but it is {self.seed}.")
        if not 0 < self.max_disagreement <= 1:
            raise UsageError(f"max_disagreement must be above 0 and at most 1, not {self.max_disagreement}.")
        if self.method == "stagewise" and self.level == "policy":
            raise UsageError(
                "stagewise members are fitted for votes; use --method joint for --level policy "
                "(the policy-level reading of a stagewise ensemble is reported all the same)."
            )
        for dial in fields(self):
            allowed = get_args(_CHOICES.get(dial.name))
            if allowed and getattr(self, dial.name) not in allowed:
                came = str(getattr(self, dial.name))
                raise UsageError(f"{dial.name} cannot be {came!r}; {did_you_mean(came, allowed)}.")


_CHOICES = {
    "method": Method, "variant": Variant, "loss": Loss, "level": Level, "target": Target, "members": MemberKind,
    "pooling": Pooling,
}  # fmt: skip


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are sampled from a language model."""

    temperature: float = field(
        default=1.2, metadata={"help": "Above 1 responses differ more than the model was trained to make them."}
    )
    top_p: float = field(
        default=1.0, metadata={"help": "Sample from the likeliest tokens that make up this share; 1 leaves none out."}
    )
    max_new_tokens: int = field(default=256, metadata={"help": "Longest response, in tokens."})
    seed: int = field(default=0, metadata={"help": "Seed of everything random; each prompt has its own from it."})

    def __post_init__(self) -> None:
        if not 0 < self.temperature <= 10:
            raise UsageError(f"temperature must be above 0 and at most 10, not {self.temperature:g}.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p:g}.")
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}.")
        if self.seed < 0:
            raise UsageError(f"seed must not be negative, but it is {self.seed}.")


@dataclass(frozen=True)
class TuneOptions:
    """How a language model is fine-tuned; the defaults are the paper's recipe (App. Training Pipeline)."""

    backbone: str | None = field(
        default=None,
        metadata={"help": "Fine-tune this model instead: a model folder, a hub id, smollm2 or minilm."},
    )
    lora: bool = field(default=False, metadata={"help": "Backbone: train LoRA adapters and the head, not all weights."})
    lora_rank: int = field(default=16, metadata={"help": "Backbone: rank of the adapters."})
    optimizer: Optimizer = field(default="soap", metadata={"help": "Backbone: soap (the paper) or adamw."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Backbone: 2e-5 unless given, 2e-4 with --lora; ten times that for the head."}
    )
    fresh_head: bool = field(
        default=False,
        metadata={"help": "Backbone: begin with a head that knows nothing (the paper), not a fitted one."},
    )
    epochs: float = field(default=1.0, metadata={"help": "Backbone: passes over the training pairs."})
    batch_size: int | None = field(
        default=None,
        metadata={"help": "Backbone: pairs a step, all devices together: up to 512, fewer where pairs are few."},
    )
    micro_batch: int = field(default=8, metadata={"help": "Backbone: most pairs a device reads at once."})
    max_length: int = field(
        default=1024, metadata={"help": "Backbone: tokens of a text that are read; the prompt's beginning is cut."}
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Backbone: save memory by computing activations twice."}
    )

    def __post_init__(self) -> None:
        if self.optimizer not in (known := get_args(Optimizer)):
            raise UsageError(f"optimizer cannot be {self.optimizer!r}; {did_you_mean(self.optimizer, known)}.")
        numbers = ("lora_rank", "learning_rate", "epochs", "batch_size", "micro_batch", "max_length")
        for name in numbers:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UsageError(f"{name} must be above 0, not {value:g}.")
        if self.backbone is None and (changed := changed_options(self)):
            raise UsageError(f"{changed[0]} is about fine-tuning: name a model to tune with --backbone.")


def changed_options(options: Any) -> list[str]:
    """Return the names of the options that differ from their defaults."""
    return [dial.name for dial in fields(options) if getattr(options, dial.name) != dial.default]


Options = TypeVar("Options", "LoadOptions", "FitOptions", "SamplingOptions", "TuneOptions")


def with_changes(options: Options, changes: Mapping[str, Any]) -> Options:
    """Return ``options`` with some fields changed by name; an unknown name is answered with the nearest known one."""
    known = [dial.name for dial in fields(options)]
    for name in changes:
        if name not in known:
            raise UsageError(f"there is no option {name!r}; {did_you_mean(name, known)}.")
    return replace(options, **changes)
