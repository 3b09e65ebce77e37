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

Options = TypeVar("Options", "LoadOptions", "FitOptions")


def with_changes(options: Options, changes: Mapping[str, Any]) -> Options:
    """Return ``options`` with some fields changed by name; an unknown name is answered with the nearest known one."""
    known = [dial.name for dial in fields(options)]
    for name in changes:
        if name not in known:
            raise UsageError(f"there is no option {name!r}; {did_you_mean(name, known)}.")
    return replace(options, **changes)
