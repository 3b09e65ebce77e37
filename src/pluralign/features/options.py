"""Options of frozen text features, shared by ``fit`` and ``encode``."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pluralign.core.options import check_choices
from pluralign.features.layers import parse_layers

Pooling: TypeAlias = Literal["mean", "last"]
Precision: TypeAlias = Literal["float32", "bfloat16", "auto"]
ChosenPrecision: TypeAlias = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class EncodeOptions:
    """How texts are encoded."""

    encoder: str = field(
        default="minilm", metadata={"help": "minilm, smollm2, hashing, none, a model folder, or a hub id."}
    )
    layers: str = field(
        default="auto",
        metadata={
            "help": "Layers to pool and concatenate, for instance 0,2,4,6 (0: embeddings). auto: four evenly spaced "
            "layers of an encoder, or the layer at two thirds of a decoder. last: the model's own vector."
        },
    )
    pooling: Pooling = field(default="mean", metadata={"help": "Pooling of layers: mean over tokens, or last token."})
    precision: Precision = field(
        default="float32",
        metadata={"help": "Precision of the encoder. auto: bfloat16 if it is faster and the vectors agree."},
    )
    surface: bool = field(default=True, metadata={"help": "Append surface features: lengths, punctuation, structure."})

    def __post_init__(self) -> None:
        parse_layers(self.layers)
        check_choices(self, {"pooling": Pooling, "precision": Precision})
