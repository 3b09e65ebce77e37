"""Frozen text features of an ensemble: an encoder by name, and surface features."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pluralign.core.distributed import ALONE, Processes
from pluralign.core.errors import DataError
from pluralign.core.types import Progress
from pluralign.features.encoder import Encoder, ModelEncoder, encode, load_encoder
from pluralign.features.options import Pooling, Precision
from pluralign.features.precision import in_precision
from pluralign.votes.prompts import Item


@dataclass(frozen=True)
class TextFeatures:
    """What turns texts into features: an encoder by name, and whether surface features are appended."""

    encoder: str = "minilm"
    layer: int | None = None
    pooling: Pooling = "mean"
    surface: bool = True
    precision: Precision = "float32"
    """The encoder's; that of an ensemble is never ``auto``, so that it reads texts the same way everywhere."""
    identity: str = ""
    """The encoder's identity when the ensemble was fitted; another encoder under the same name is refused."""

    def load(self) -> Encoder | None:
        """Return the encoder; its model is loaded when it first meets a new text."""
        return in_precision(load_encoder(self.encoder, layer=self.layer, pooling=self.pooling), self.precision)

    def settled(self, processes: Processes = ALONE) -> "TextFeatures":
        """Return them with the precision that will be used: of ``auto``, what the first process decides for all."""
        if self.precision == "float32":
            return self

        def decide() -> Precision:
            encoder = self.load()
            return "bfloat16" if isinstance(encoder, ModelEncoder) and encoder.half else "float32"

        return replace(self, precision=processes.agreed(decide))

    def load_checked(self) -> Encoder | None:
        """Return the encoder if it is the one that the ensemble was fitted with."""
        encoder = self.load()
        if self.identity and encoder and encoder.identity != self.identity:
            raise DataError(
                "the encoder is not the one the ensemble was fitted with",
                file=self.encoder,
                remedy="bring back the model as it was, or fit anew",
            )
        return encoder

    def __call__(self, items: Sequence[Item], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        """Return ``(n_items, dimension)`` features."""
        return encode(items, self.load_checked(), surface=self.surface, progress=progress)

    def described(self) -> dict[str, Any]:
        """Return what an ensemble's JSON says of them."""
        return dict(vars(self))
