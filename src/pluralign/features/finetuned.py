"""Fine-tuned backbones as features: what they give a text is their outputs, and members are linear in these.

Decided here: their form on disk, that a changed file is refused, and how many models are in memory at once. A joint
ensemble is one model with several outputs and reads each text once. The members of a stagewise one are models with one
output each; as LoRA adapters they share one base in memory. How they are trained is decided in ``finetune``.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pluralign.core.errors import DataError, MissingExtraError
from pluralign.core.types import Method, Progress
from pluralign.features.encoder import encode
from pluralign.models.classifier import classifier_rewards
from pluralign.models.loading import minilm_folder, model_folder, quiet_transformers, smollm2_folder
from pluralign.votes.prompts import Item

BACKBONE_FOLDER = "backbone"
KIND = "backbone"
KEEP_BYTES = 8_000_000_000
"""Whole models of a stagewise ensemble stay in memory together up to this; larger ones are loaded in turn."""


@dataclass(frozen=True)
class TunedFeatures:
    """One or several fine-tuned models, whose outputs are the features."""

    base: str
    """The model they were tuned from, as it was named."""
    method: Method
    """``joint``: one model with all outputs. ``stagewise``: one model an output."""
    lora: bool
    outputs: int
    max_length: int
    """Longer texts lose the beginning of the prompt, in tokens."""
    identity: tuple[str, ...] = ()
    """Hash of each model's files; others in their place are refused."""
    folder: Path = field(default=Path(), compare=False)
    """The ensemble's folder, which holds the models."""

    def __call__(self, items: Sequence[Item], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        """Return ``(n_items, outputs)`` features; a text that was read before comes from the cache of vectors."""
        parts = self.parts()

        def report(position: int) -> Progress | None:
            if progress is None:
                return None
            return lambda done, total: progress(position * total + done, len(parts) * total)

        return np.hstack(
            [encode(items, part, surface=False, progress=report(position)) for position, part in enumerate(parts)]
        )

    def parts(self) -> list["Backbone"]:
        """Return the models, which are loaded when they first meet a new text."""
        models = _models_of(self)
        return [
            Backbone(place, hashed, models) for place, hashed in zip(model_folders(self), self.identity, strict=True)
        ]

    def described(self) -> dict[str, Any]:
        """Return what an ensemble's JSON says of them."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "folder"}
        return {"kind": KIND, **own, "identity": list(self.identity)}

    def identified(self) -> "TunedFeatures":
        """Return them with the hashes of their files as these are now."""
        return replace(self, identity=tuple(model_identity(place, self) for place in model_folders(self)))

    def save(self, folder: Path) -> None:
        """Put the models into another ensemble's folder, whole or not at all; no bytes are copied where links do."""
        source, target = self.folder / BACKBONE_FOLDER, folder / BACKBONE_FOLDER
        if source.resolve() == target.resolve():
            return
        partial, old = (folder / f".{BACKBONE_FOLDER}.{kind}" for kind in ("partial", "old"))
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.copytree(source, partial, copy_function=_link_or_copy)
        with suppress(FileNotFoundError):
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)


def tuned_features(described: Mapping[str, Any], folder: Path) -> TunedFeatures:
    """Return the features that an ensemble's JSON describes; their models lie in its folder."""
    known = {one.name for one in fields(TunedFeatures)}
    own = {name: value for name, value in described.items() if name in known}
    return TunedFeatures(**{**own, "identity": tuple(described["identity"]), "folder": folder})


def model_folders(features: TunedFeatures) -> list[Path]:
    """Return the folder of each model."""
    place = features.folder / BACKBONE_FOLDER
    if features.method == "joint":
        return [place]
    return [place / f"member-{j}" for j in range(features.outputs)]


def backbone_folder(name: str) -> Path:
    """Return the folder of a model to tune: ``smollm2`` or ``minilm`` from their wheels, a local one, or a hub id's."""
    if name == "smollm2":
        return smollm2_folder()
    if name == "minilm":
        return minilm_folder()
    return model_folder(name, "check the name and the network, or give a local folder, smollm2 or minilm")


@dataclass(frozen=True)
class Backbone:
    """One fine-tuned model as an encoder."""

    folder: Path
    identity: str
    models: "_Models"

    def encode(self, items: Sequence[Item]) -> npt.NDArray[np.float32]:
        """Return its outputs, ``(n_items, outputs)``."""
        model, tokenizer = self.models.get(self.folder, self.identity)
        limit = self.models.features.max_length
        return np.asarray(classifier_rewards(model, tokenizer, items, limit), dtype=np.float32)


class _Models:
    """The models of one ensemble that are in memory: one base with all adapters, or whole models as far as they fit."""

    def __init__(self, features: TunedFeatures) -> None:
        self.features = features
        self.loaded: dict[Path, tuple[Any, Any]] = {}

    def get(self, folder: Path, identity: str) -> tuple[Any, Any]:
        """Return a model, ready to be used, and its tokenizer."""
        outputs = self.features.outputs if self.features.method == "joint" else 1
        if folder not in self.loaded:
            _check(folder, identity, self.features)
            if self.features.lora and self.loaded:
                model, tokenizer = next(iter(self.loaded.values()))
                model.load_adapter(folder, adapter_name=folder.name)
                self.loaded[folder] = model, tokenizer
            else:
                if not self._all_fit():
                    self.loaded.clear()
                self.loaded[folder] = load_tuned(folder, self.features.base, outputs, folder.name)
        model, tokenizer = self.loaded[folder]
        if self.features.lora:
            model.set_adapter(folder.name)
        return model.eval(), tokenizer

    def _all_fit(self) -> bool:
        weights = (path for place in model_folders(self.features) for path in place.glob("*.safetensors"))
        return sum(path.stat().st_size for path in weights) <= KEEP_BYTES


_latest: list[_Models] = []


def _models_of(features: TunedFeatures) -> _Models:
    """Return the models in memory of an ensemble; those of any other are let go."""
    if not _latest or (_latest[0].features, _latest[0].features.folder) != (features, features.folder):
        _latest[:] = [_Models(features)]
    return _latest[0]


def forget_models() -> None:
    """Let go of every model in memory."""
    _latest.clear()


def _check(folder: Path, identity: str, features: TunedFeatures) -> None:
    remedy = "copy the folder again, or fit anew"
    if not (folder / ("adapter_config.json" if features.lora else "config.json")).is_file():
        raise DataError("there is no fine-tuned model in it", file=str(folder), remedy=remedy)
    if model_identity(folder, features) != identity:
        what = "it, or the model under its adapter," if features.lora else "it"
        raise DataError(f"{what} is not what was saved: its hash differs", file=str(folder), remedy=remedy)


def load_tuned(folder: Path, base: str, outputs: int, adapter: str = "default") -> tuple[Any, Any]:
    """Return a fine-tuned model on the best device, and its tokenizer, cutting texts from the left.

    Args:
        folder: a whole transformers folder, or a peft adapter with the head among its ``modules_to_save``.
        base: the model under an adapter.
        outputs: how many outputs the head has.
        adapter: what the adapter is called in memory.
    """
    try:
        import torch
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "finetune", "a fine-tuned ensemble") from None
    adapted = (folder / "adapter_config.json").is_file()
    source = backbone_folder(base) if adapted else folder
    load: Any = transformers.AutoModelForSequenceClassification.from_pretrained
    dtype = torch.float32
    try:
        with quiet_transformers():
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
            config: Any = transformers.AutoConfig.from_pretrained(source, num_labels=outputs)
            config.get_text_config().pad_token_id = tokenizer.pad_token_id
            model: Any = load(source, config=config, dtype=dtype, use_safetensors=True, ignore_mismatched_sizes=adapted)
            if adapted:
                model = _with_adapter(model, folder, adapter)
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
    ) as error:  # what transformers and peft raise for foreign folders
        reason = " ".join(str(error).split())[:200]
        remedy = "copy the ensemble's folder again, or fit anew"
        raise DataError(f"transformers cannot load it ({reason})", file=str(folder), remedy=remedy) from error
    tokenizer.truncation_side = "left"
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def _with_adapter(model: Any, folder: Path, adapter: str) -> Any:
    try:
        import peft
    except ImportError:
        raise MissingExtraError("peft", "finetune", "a LoRA ensemble") from None
    return peft.PeftModel.from_pretrained(model, folder, adapter_name=adapter)


# --- hashes and files -----------------------------------------------------------------------------------------------


def model_identity(folder: Path, features: TunedFeatures) -> str:
    """Hash everything that a model's outputs depend on; of a base under an adapter, what can be read in no time."""
    digest = hashlib.sha256(f"tuned {features.max_length}".encode())
    for path in sorted(path for path in folder.glob("*") if path.is_file() and path.suffix != ".md"):
        with path.open("rb") as stream:
            digest.update(f"{path.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}".encode())
    if features.lora:
        digest.update(_base_print(backbone_folder(features.base)).encode())
    return digest.hexdigest()


def _base_print(folder: Path) -> str:
    """Hash a base model without reading gigabytes: its configuration, and names, shapes and size of its weights."""
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            header = stream.read(int.from_bytes(stream.read(8), "little"))
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + header)
    return digest.hexdigest()


def _link_or_copy(source: str, target: str) -> str:
    link: Callable[[str, str], None] = os.link
    try:
        link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
