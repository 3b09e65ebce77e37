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
from pluralign.core.json_values import JsonObject, from_json
from pluralign.core.types import Progress
from pluralign.text.encoders import Encoder, encode, load_encoder
from pluralign.text.loading import BUNDLED, MINILM_HUB_ID, hub_source
from pluralign.text.options import AUTO, Pooling, Precision, layers_text
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.items import ItemsLike

ENCODER_FOLDER = "encoder"
"""Name of the encoder in an ensemble's JSON if the encoder is a subfolder of the ensemble's folder."""


@dataclass(frozen=True)
class TextFeatures:
    """Turns texts into features: an encoder by name, and optional surface features."""

    encoder: str = "minilm"
    layers: str = AUTO
    pooling: Pooling = "mean"
    surface: bool = True
    precision: Precision = "float32"
    """Precision of the encoder. A fitted ensemble never has ``auto``, so that it encodes the same way everywhere."""
    identity: str = ""
    """Identity of the encoder when the ensemble was fitted. Another encoder with the same name is rejected."""
    hub_id: str = ""
    """Repository of the encoder on the hub, if it came from there. It is used where ``encoder`` is not a folder."""
    revision: str = ""
    """Commit of that repository; empty if it is unknown."""
    own: bool = False
    """Whether the encoder was fine-tuned with the ensemble. It is then saved in the folder of the ensemble."""

    @property
    def n_layers(self) -> int:
        """Number of layers whose states are concatenated; 1 for encoders without layers."""
        encoder = self.load()
        return max(len(encoder.layers), 1) if isinstance(encoder, ModelEncoder) else 1

    def load(self) -> Encoder | None:
        """Return the encoder. Its model is loaded when it first encodes a text that is not cached."""
        name, revision = self.encoder, ""
        if self.hub_id and name not in BUNDLED and not Path(name).is_dir():
            name, revision = self.hub_id, self.revision
        return load_encoder(name, layers=self.layers, pooling=self.pooling, precision=self.precision, revision=revision)

    def resolved(self) -> "TextFeatures":
        """Return these features as an ensemble stores them.

        ``auto`` is replaced by numbers of layers and by a precision. The identity of the encoder is added, and its
        repository and commit on the hub, if it came from there.
        """
        try:
            encoder = self.load()
        except MissingExtraError as missing:  # name an encoder that needs no package, if it is still to be chosen
            instead = "" if self.identity else "--encoder hashing"
            raise MissingExtraError(missing.package, missing.extra, missing.purpose, instead) from None
        identity = encoder.identity if encoder else ""
        if not isinstance(encoder, ModelEncoder):
            return replace(self, identity=identity, precision="float32")
        hub_id, revision = self.hub_id, self.revision
        if self.encoder == "minilm":
            hub_id = MINILM_HUB_ID
        elif found := hub_source(encoder.folder):
            hub_id, revision = found
        elif HUB_ID.fullmatch(self.encoder) and not Path(self.encoder).is_dir():
            hub_id = self.encoder
        chosen: dict[str, Any] = {"layers": layers_text(encoder.layers), "hub_id": hub_id, "revision": revision}
        return replace(self, identity=identity, precision="bfloat16" if encoder.half else "float32", **chosen)

    def load_checked(self) -> Encoder | None:
        """Return the encoder. Raises DataError if it is not the one that the ensemble was fitted with."""
        encoder = self.load()
        if self.identity and encoder is not None and encoder.identity != self.identity:
            problem = "the encoder is not the one the ensemble was fitted with"
            raise DataError(problem, file=self.encoder, remedy="restore the original model, or fit again")
        return encoder

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

    def to_json(self) -> JsonObject:
        """Return these features as an ensemble's JSON holds them."""
        absent = [name for name in ("hub_id", "revision", "own") if not getattr(self, name)]
        own = {"encoder": Path(self.encoder).name} if self.own else {}
        return {name: value for name, value in vars(self).items() if name not in absent} | own

    @classmethod
    def from_json(cls, values: Mapping[str, Any], folder: Path | None = None) -> "TextFeatures":
        """Read the JSON of ``to_json``. Raises TypeError or ValueError if it does not describe features.

        Args:
            values: the JSON object.
            folder: the folder of the ensemble, which may hold the encoder.
        """
        read = from_json(cls, values)
        if read.own and Path(read.encoder).name != read.encoder:
            raise ValueError("the encoder must be a folder of the ensemble")
        is_beside = read.own or (read.encoder == ENCODER_FOLDER and folder and (folder / ENCODER_FOLDER).is_dir())
        return replace(read, encoder=str(folder / read.encoder)) if folder and is_beside else read
