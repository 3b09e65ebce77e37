"""Options of ``fit``: the method, and how a backbone is fine-tuned."""

import re
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from pluralign.core.errors import UsageError, did_you_mean
from pluralign.core.options import changed_options, check_choices, check_seed, same_option
from pluralign.core.text import shortened
from pluralign.core.types import Level, Method
from pluralign.text.options import EncodeOptions, Pooling, Precision

Variant: TypeAlias = Literal["printed", "symmetric"]
Orient: TypeAlias = Literal["random", "given", "majority"]
Target: TypeAlias = Literal["auto", "teacher", "mixture", "votes"]
Optimizer: TypeAlias = Literal["soap", "soap-one-sided", "adamw"]
Tracker: TypeAlias = Literal["trackio", "wandb", "tensorboard"]
MAX_MEMBERS = 256


@dataclass(frozen=True)
class FitOptions:
    """Options of ``fit``."""

    k: int | str = field(
        default=8,
        metadata={"help": "Number of members, or auto: the fewest that are as accurate on validation prompts."},
    )
    method: Method = field(
        default="joint", metadata={"help": "Train all members together, or one after the other (the paper)."}
    )
    variant: Variant = field(
        default="symmetric", metadata={"help": "Stagewise: loss of each stage; printed is the paper's."}
    )
    orient: Orient = field(
        default="random",
        metadata={
            "help": "Stagewise: order of the two responses of training pairs: random, as given, or majority first. "
            "Only --variant printed depends on it."
        },
    )
    level: Level = field(default="vote", metadata={"help": "Train for shares of hard votes, or of policies."})
    target: Target = field(
        default="auto",
        metadata={
            "help": "Joint: learn from one soft reward and votes (teacher), from a mixture of rewards and votes, or "
            "from votes alone. auto: the best target on validation prompts."
        },
    )
    undecided: bool = field(
        default=True,
        metadata={"help": "Joint: learn the share of votes that no member explains. Without it: the paper's form."},
    )
    max_disagreement: float = field(
        default=0.5, metadata={"help": "Maximum disagreement of a member with people; 1 sets no bound."}
    )
    encoder: str = same_option(EncodeOptions, "encoder")
    layers: str = same_option(EncodeOptions, "layers")
    pooling: Pooling = same_option(EncodeOptions, "pooling")  # noqa: RUF009
    precision: Precision = field(
        default="float32",
        metadata={
            "help": "Precision of the encoder; auto: bfloat16 if it is faster and the vectors agree. Backbone: of "
            "weights, gradients and optimizer state; auto: bfloat16 (the paper) on GPUs that support it."
        },
    )
    surface: bool = same_option(EncodeOptions, "surface")
    features: str | None = field(
        default=None,
        metadata={"help": "Precomputed features from pluralign encode; skips encoding, reads from disk as needed."},
    )
    test_fraction: float | None = field(
        default=None,
        metadata={
            "help": "Share of prompts to hold out if the data has no official split (default: a tenth; at least 20 "
            "prompts, but at most three tenths)."
        },
    )
    folds: int | None = field(
        default=None,
        metadata={
            "help": "Also cross-validate: fit this many further ensembles, so that every prompt is tested once. For "
            "few prompts."
        },
    )
    keep_held_out: bool = field(
        default=True,
        metadata={"help": "Store the held-out votes and texts in the folder, for report and other commands."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of the split and of all random choices."})

    def __post_init__(self) -> None:
        if isinstance(self.k, str) and re.fullmatch("[0-9]{1,9}", self.k):
            object.__setattr__(self, "k", int(self.k))
        if self.k != "auto" and not (isinstance(self.k, int) and 1 <= self.k <= MAX_MEMBERS):
            raise UsageError(
                f"k must be a whole number from 1 to {MAX_MEMBERS}, or auto, not {shortened(repr(self.k), 20)}."
            )
        check_seed(self.seed)
        if not 0 < self.max_disagreement <= 1:
            raise UsageError(f"max_disagreement must be above 0 and at most 1, not {self.max_disagreement}.")
        if self.folds is not None and self.folds < 2:
            raise UsageError(f"folds must be at least 2, not {self.folds}.")
        if self.method == "stagewise" and self.level == "policy":
            raise UsageError(
                "stagewise members are trained for votes; use --method joint for --level policy "
                "(the policy-level figures of a stagewise ensemble are reported in any case)."
            )
        if self.method == "joint" and self.orient in ("given", "majority"):
            raise UsageError("--orient requires --method stagewise; joint members do not depend on the order.")
        check_choices(
            self,
            {
                "method": Method, "variant": Variant, "orient": Orient, "level": Level, "target": Target,
                "pooling": Pooling, "precision": Precision,
            },
        )  # fmt: skip


@dataclass(frozen=True)
class FinetuneOptions:
    """Options of fine-tuning a language model. The defaults are the paper's recipe (App. Training Pipeline)."""

    backbone: str | None = field(
        default=None,
        metadata={"help": "Fine-tune this model instead: a model folder, a hub id, smollm2 or minilm."},
    )
    lora: bool = field(
        default=False, metadata={"help": "Backbone: train LoRA adapters and the head instead of all weights."}
    )
    lora_rank: int = field(default=16, metadata={"help": "Backbone: rank of the LoRA adapters."})
    optimizer: Optimizer = field(
        default="soap",
        metadata={"help": "Backbone: soap (the paper), soap-one-sided (less memory) or adamw (least memory)."},
    )
    learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Backbone: 2e-5 by default, 2e-4 with --lora; the head uses ten times the value. "
            "Sentence encoder: 3e-3."
        },
    )
    fresh_head: bool = field(
        default=False,
        metadata={"help": "Backbone: start with a random head (the paper) instead of a fitted one."},
    )
    compare_frozen: bool = field(
        default=True,
        metadata={
            "help": "Backbone, joint: also fit the ensemble on the model without tuning, and keep it if it predicts "
            "validation prompts better."
        },
    )
    epochs: float = field(
        default=1.0, metadata={"help": "Backbone: passes over the training pairs. Sentence encoder: 8."}
    )
    batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Backbone: pairs per step, all devices together; by default 512, less for few pairs. "
            "Sentence encoder: 128."
        },
    )
    micro_batch: int = field(
        default=8, metadata={"help": "Backbone: a device reads at most twice as many texts in one forward pass."}
    )
    max_length: int = field(
        default=1024,
        metadata={"help": "Backbone: maximum tokens per text; longer texts lose the beginning of the prompt."},
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Backbone: recompute activations to save memory."}
    )
    report_to: str = field(
        default="none",
        metadata={
            "help": "Backbone: send loss and learning rate to experiment trackers: trackio, wandb, tensorboard, or "
            "several with commas between them."
        },
    )
    run_name: str | None = field(
        default=None,
        metadata={"help": "Backbone: name of the run in the trackers (default: the name of the output folder)."},
    )

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers in ``report_to``."""
        names = [name.strip() for name in self.report_to.split(",")]
        return [] if names == ["none"] else list(dict.fromkeys(names))

    def __post_init__(self) -> None:
        check_choices(self, {"optimizer": Optimizer})
        numbers = ("lora_rank", "learning_rate", "epochs", "batch_size", "micro_batch", "max_length")
        for name in numbers:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UsageError(f"{name} must be above 0, not {value:g}.")
        if unknown := [name for name in self.trackers if name not in get_args(Tracker)]:
            raise UsageError(f"there is no tracker {unknown[0]!r}; {did_you_mean(unknown[0], get_args(Tracker))}.")
        if self.run_name is not None and not self.trackers:
            raise UsageError("--run-name requires --report-to.")
        if self.backbone is None and (changed := changed_options(self)):
            raise UsageError(f"--{changed[0].replace('_', '-')} requires --backbone.")
