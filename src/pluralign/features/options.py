"""Options of frozen text features, shared by ``fit`` and ``encode``."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pluralign.core.options import check_choices

Pooling: TypeAlias = Literal["mean", "last"]
Precision: TypeAlias = Literal["float32", "bfloat16", "auto"]


@dataclass(frozen=True)
class EncodeOptions:
    """How texts are encoded."""

    encoder: str = field(
        default="minilm", metadata={"help": "minilm, smollm2, hashing, none, a model folder, or a hub id."}
    )
    layer: int | None = field(
        default=None, metadata={"help": "Number of decoder layers to keep (default: two thirds of them)."}
    )
    pooling: Pooling = field(default="mean", metadata={"help": "Decoder: mean over tokens, or the last token."})
    precision: Precision = field(
        default="float32",
        metadata={"help": "Precision of the encoder. auto: bfloat16 if it is faster and the vectors agree."},
    )
    surface: bool = field(default=True, metadata={"help": "Append surface features: lengths, punctuation, structure."})

    def __post_init__(self) -> None:
        check_choices(self, {"pooling": Pooling, "precision": Precision})
