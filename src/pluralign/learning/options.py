"""Options of ``fit``: the method, how a backbone is fine-tuned, and the one table of which option applies when.

The classes check values. ``check_applies`` checks combinations: an option that was changed and has no effect is an
error. An option with its default value is never one, so stating a default equals leaving it out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from pluralign.core.errors import UsageError, did_you_mean
from pluralign.core.options import changed_options, check_choices, check_seed, option, same_option
from pluralign.core.text import shortened
from pluralign.core.types import Level, Method
from pluralign.text.options import EncodeOptions, Precision

Variant: TypeAlias = Literal["printed", "symmetric"]
Orient: TypeAlias = Literal["random", "given", "majority"]
Target: TypeAlias = Literal["auto", "teacher", "mixture", "votes"]
FitPooling: TypeAlias = Literal["mean", "last", "attention"]
Optimizer: TypeAlias = Literal["soap", "soap-one-sided", "adamw"]
Tracker: TypeAlias = Literal["trackio", "wandb", "tensorboard"]
MAX_MEMBERS = 256


@dataclass(frozen=True)
class FitOptions:
    """Options of ``fit``."""

    k: int | str = option(8, "Number of members, or auto: the fewest that are as accurate on validation prompts.")
    method: Method = option("joint", "Train all members together, or one after the other (the paper).")
    variant: Variant = option("symmetric", "Stagewise: loss of each stage; printed is the paper's.")
    orient: Orient = option(
        "random",
        "Stagewise: order of the two responses of training pairs: random, as given, or majority first. "
        "Only --variant printed depends on it.",
    )
    level: Level = option("vote", "Train for shares of hard votes, or of policies.")
    reference: str | None = option(
        None,
        "With --level policy: train with a reference policy (App. A): data (columns logprob_a, logprob_b), smollm2, a "
        "model folder or a hub id.",
    )
    target: Target = option(
        "auto",
        "Joint: learn from one soft reward and votes (teacher), from a mixture of rewards and votes, or "
        "from votes alone. auto: teacher, unless validation prompts clearly prefer the votes.",
    )
    judgments: bool = option(
        True,
        "Joint: learn from whole rankings, scores and votes of one person, if the data has them. Without it: from "
        "vote counts per pair.",
    )
    undecided: bool = option(
        True, "Joint: learn the share of votes that no member explains. Without it: the paper's form."
    )
    max_disagreement: float = option(0.5, "Maximum disagreement of a member with people; 1 sets no bound.")
    encoder: str = same_option(EncodeOptions, "encoder")
    layers: str = same_option(EncodeOptions, "layers")
    pooling: FitPooling = option(
        "mean",
        "Pooling of layers: mean over tokens, last token, or attention: also train on the votes which "
        "tokens of a sentence encoder count. The encoder stays frozen.",
    )
    precision: Precision = option(
        "float32",
        "Precision of the encoder. Backbone: of weights, gradients and optimizer state. auto: bfloat16 "
        "(the paper) on GPUs that support it.",
    )
    surface: bool = same_option(EncodeOptions, "surface")
    features: str | None = option(
        None, "Precomputed features from pluralign encode; skips encoding, reads from disk as needed."
    )
    test_fraction: float | None = option(
        None,
        "Share of prompts to hold out if the data has no official split (default: a tenth; at least 20 "
        "prompts, but at most three tenths).",
    )
    folds: int | None = option(
        None,
        "Also cross-validate: fit this many further ensembles, so that every prompt is tested once. For few prompts.",
    )
    keep_held_out: bool = option(
        True, "Store the held-out votes and texts in the folder, for report and other commands."
    )
    seed: int = option(0, "Seed of the split and of all random choices.")

    def __post_init__(self) -> None:
        if isinstance(self.k, str) and re.fullmatch("[0-9]{1,9}", self.k):
            object.__setattr__(self, "k", int(self.k))
        if self.k != "auto" and not (isinstance(self.k, int) and 1 <= self.k <= MAX_MEMBERS):
            given = shortened(repr(self.k), 20)
            raise UsageError(f"k must be a whole number from 1 to {MAX_MEMBERS}, or auto, not {given}.")
        check_seed(self.seed)
        if not 0 < self.max_disagreement <= 1:
            raise UsageError(f"max_disagreement must be above 0 and at most 1, not {self.max_disagreement}.")
        if self.folds is not None and self.folds < 2:
            raise UsageError(f"folds must be at least 2, not {self.folds}.")
        checked = {"method": Method, "variant": Variant, "orient": Orient, "level": Level, "target": Target}
        check_choices(self, {**checked, "pooling": FitPooling, "precision": Precision})


@dataclass(frozen=True)
class FinetuneOptions:
    """Options of fine-tuning a language model. The defaults are the paper's recipe (App. Training Pipeline)."""

    backbone: str | None = option(None, "Fine-tune this model: a model folder, a hub id, smollm2 or minilm.")
    lora: bool = option(False, "Backbone: train LoRA adapters and the head instead of all weights.")
    lora_rank: int = option(16, "Backbone: rank of the LoRA adapters.")
    optimizer: Optimizer = option(
        "soap", "Backbone: soap (the paper), soap-one-sided (less memory) or adamw (least memory)."
    )
    learning_rate: float | None = option(
        None, "Backbone: 2e-5 by default, 2e-4 with --lora; the head uses ten times the value."
    )
    fresh_head: bool = option(False, "Backbone: start with a random head (the paper) instead of a fitted one.")
    compare_frozen: bool = option(
        True,
        "Backbone or --pooling attention, joint: also fit the ensemble without training the features, and keep it if "
        "the trained features are not clearly better on validation prompts.",
    )
    epochs: float = option(1.0, "Backbone: passes over the training pairs.")
    batch_size: int | None = option(
        None, "Backbone: pairs or judgments per step, all devices together; by default 512, less for few of them."
    )
    max_length: int = option(1024, "Backbone: maximum tokens per text; longer texts lose the beginning of the prompt.")
    gradient_checkpointing: bool = option(False, "Backbone: recompute activations to save memory.")
    report_to: str = option(
        "none",
        "Backbone: send loss and learning rate to experiment trackers: trackio, wandb, tensorboard, or several with "
        "commas between them.",
    )

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers in ``report_to``."""
        names = [name.strip() for name in self.report_to.split(",")]
        return [] if names == ["none"] else list(dict.fromkeys(names))

    def __post_init__(self) -> None:
        check_choices(self, {"optimizer": Optimizer})
        for name in ("lora_rank", "learning_rate", "epochs", "batch_size", "max_length"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UsageError(f"{name} must be above 0, not {value:g}.")
        if unknown := [name for name in self.trackers if name not in get_args(Tracker)]:
            raise UsageError(f"there is no tracker {unknown[0]!r}; {did_you_mean(unknown[0], get_args(Tracker))}.")


# --- Which option applies when.


@dataclass(frozen=True)
class Applies:
    """The settings in which an option has an effect: every one that is not excluded here."""

    method: tuple[Method, ...] = ("joint", "stagewise")
    features: tuple[Literal["frozen", "attention", "backbone"], ...] = ("frozen", "attention", "backbone")
    level: tuple[Level, ...] = ("vote", "policy")
    raters: tuple[bool, ...] = (False, True)


APPLIES: Mapping[str, Applies] = {
    **dict.fromkeys(("variant", "orient"), Applies(method=("stagewise",))),
    **dict.fromkeys(("level", "undecided", "raters"), Applies(method=("joint",))),
    "judgments": Applies(method=("joint",), raters=(False,)),
    "target": Applies(method=("joint",), level=("vote",), raters=(False,)),
    "reference": Applies(method=("joint",), features=("frozen",), level=("policy",), raters=(False,)),
    **dict.fromkeys(("features", "folds"), Applies(features=("frozen",))),
    **dict.fromkeys(("encoder", "layers", "pooling", "surface"), Applies(features=("frozen", "attention"))),
    "pooling attention": Applies(method=("joint",)),
    "compare_frozen": Applies(method=("joint",), features=("attention", "backbone")),
    **dict.fromkeys(
        ("lora", "lora_rank", "optimizer", "learning_rate", "fresh_head", "epochs", "batch_size", "max_length",
         "gradient_checkpointing", "report_to"),
        Applies(features=("backbone",)),
    ),
}  # fmt: skip
"""Options that are not listed apply always. ``raters`` are those of the votes."""
SETTINGS = {
    "frozen": "without --backbone",
    "attention": "with --pooling attention, which keeps the encoder frozen (--backbone fine-tunes it)",
    "backbone": "with --backbone",
    True: "with --raters",
}


def check_applies(options: FitOptions, tuning: FinetuneOptions, *, raters: bool) -> None:
    """Raise UsageError if an option was changed that has no effect beside the others.

    Args:
        options: how to learn.
        tuning: how to fine-tune.
        raters: whether the votes have rater ids.

    Example:
        >>> check_applies(FitOptions(folds=5), FinetuneOptions(backbone="minilm"), raters=False)
        Traceback (most recent call last):
        pluralign.core.errors.UsageError: folds has no effect with backbone; leave it out.
    """
    attention = options.pooling == "attention"
    setting = {
        "method": options.method,
        "features": "backbone" if tuning.backbone is not None else "attention" if attention else "frozen",
        "level": options.level,
        "raters": raters,
    }
    names = [*changed_options(options), *changed_options(tuning)]
    names += ["pooling attention"] * attention + ["raters"] * raters
    for name in names:
        applies = APPLIES.get(name, Applies())
        for part, value in setting.items():
            if value not in getattr(applies, part):
                where = SETTINGS.get(value, f"with --{part} {value}")
                remedy = "leave it out"
                if value == "backbone" and "attention" in applies.features:
                    remedy += ", or replace --backbone by --encoder with --pooling attention"
                negated = "no-" if getattr(options, name, None) is False or getattr(tuning, name, None) is False else ""
                raise UsageError(f"--{negated}{name.replace('_', '-')} has no effect {where}; {remedy}.")
