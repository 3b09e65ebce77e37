"""Frozen text features of an ensemble: an encoder by name, and surface features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pluralign.core.arrays import Vectors
from pluralign.core.distributed import ALONE, Processes
from pluralign.core.errors import DataError
from pluralign.core.json_values import from_json
from pluralign.core.types import Progress
from pluralign.features.encoder import Encoder, encode, load_encoder
from pluralign.features.layers import AUTO, layers_text
from pluralign.features.options import Pooling, Precision
from pluralign.features.precision import in_precision
from pluralign.features.transformer_encoder import ModelEncoder
from pluralign.votes.prompts import Item


@dataclass(frozen=True)
class TextFeatures:
    """Turns texts into features: an encoder by name, and optional surface features."""

    encoder: str = "minilm"
    layers: str | None = AUTO
    """Layers of a transformers model. None for features that were saved before this option existed."""
    pooling: Pooling = "mean"
    surface: bool = True
    precision: Precision = "float32"
    """Precision of the encoder. A fitted ensemble never has ``auto``, so that it encodes the same way everywhere."""
    identity: str = ""
    """Identity of the encoder when the ensemble was fitted. Another encoder with the same name is rejected."""
    layer: int | None = None
    """Number of decoder layers, if ``layers`` is None."""

    @property
    def n_layers(self) -> int:
        """Number of layers whose states are concatenated; 1 for encoders without layers."""
        encoder = self._encoder()
        return max(len(encoder.layers), 1) if isinstance(encoder, ModelEncoder) else 1

    def load(self) -> Encoder | None:
        """Return the encoder. Its model is loaded when it first encodes a text that is not cached."""
        return in_precision(self._encoder(), self.precision)

    def _encoder(self) -> Encoder | None:
        return load_encoder(self.encoder, layers=self.layers, pooling=self.pooling, layer=self.layer)

    def with_chosen_layers(self) -> "TextFeatures":
        """Return these features with the numbers of the layers in place of ``auto``."""
        encoder = self._encoder()
        if self.layers is None or not isinstance(encoder, ModelEncoder):
            return self
        return replace(self, layers=layers_text(encoder.layers))

    def with_chosen_precision(self, processes: Processes = ALONE) -> "TextFeatures":
        """Return these features with ``auto`` replaced by the precision that the first process chooses for all."""
        if self.precision == "float32":
            return self

        def decide() -> Precision:
            encoder = self.load()
            return "bfloat16" if isinstance(encoder, ModelEncoder) and encoder.half else "float32"

        return replace(self, precision=processes.agreed(decide))

    def load_checked(self) -> Encoder | None:
        """Return the encoder. Raises DataError if it is not the one that the ensemble was fitted with."""
        encoder = self.load()
        if self.identity and encoder and encoder.identity != self.identity:
            raise DataError(
                "the encoder is not the one the ensemble was fitted with",
                file=self.encoder,
                remedy="restore the original model, or fit again",
            )
        return encoder

    def __call__(self, items: Sequence[Item], progress: Progress | None = None) -> Vectors:
        """Return ``(n_items, dimension)`` features."""
        return encode(items, self.load_checked(), surface=self.surface, progress=progress)

    def to_json(self) -> dict[str, Any]:
        """Return these features as an ensemble's JSON holds them."""
        absent = "layers" if self.layers is None else "layer"
        return {name: value for name, value in vars(self).items() if name != absent}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TextFeatures":
        """Read the JSON of ``to_json``. Versions before ``layers`` wrote ``layer`` instead. May raise TypeError."""
        return from_json(cls, {"layers": None, **values})
