"""Fine-tuned backbones as features: the states before a model's head, or the outputs. Members are linear in them.

Decided here: the files on disk, that changed files are rejected, and how many models are in memory. A joint ensemble is
one model that reads each text once. Its features are the states that the head reads, so its members are another head,
and an export is a plain classifier. A stagewise ensemble is one model with one output per member. As LoRA adapters, its
members share one base in memory. ``learning.backbone`` trains the models.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors import safe_open

from pluralign.core.arrays import FloatArray, Vectors
from pluralign.core.errors import DataError
from pluralign.core.files import file_sha256, link_folder
from pluralign.core.json_values import JsonObject, from_json
from pluralign.core.types import Method, Progress
from pluralign.text import loading
from pluralign.text.classifier import TRUNCATION, classifier_head, classifier_rewards, remove_head, use_float32_head
from pluralign.text.encoders import encode
from pluralign.text.options import ChosenPrecision
from pluralign.votes.load import ItemsLike, as_items
from pluralign.votes.prompts import Item

BACKBONE_FOLDER = "backbone"
KIND = "backbone"
"""Kind of these features in an ensemble's JSON."""
SAVED_AGAIN = "copy the ensemble's folder again, or fit again"
KEEP_BYTES = 8_000_000_000
"""Whole models of a stagewise ensemble stay in memory together up to this size; larger ones are loaded in turn."""


@dataclass(frozen=True)
class FinetunedFeatures:
    """One or several fine-tuned models, whose states or outputs are the features."""

    base: str
    """Name of the base model, as it was given."""
    method: Method
    """``joint``: the states that the head of one model reads. ``stagewise``: the outputs of several models."""
    lora: bool
    outputs: int
    """Number of outputs of the head of a joint model, or number of stagewise models."""
    max_length: int
    """Maximum number of tokens per text; longer texts lose the beginning of the prompt."""
    identity: tuple[str, ...] = ()
    """Hash of each model's files. Other files in their place are rejected."""
    revision: str = ""
    """Commit of the base model, if it came from the hub. LoRA adapters are loaded on that commit."""
    precision: ChosenPrecision = "float32"
    """Precision of the models' bodies when they read texts. Heads are always in float32."""
    models: str = BACKBONE_FOLDER
    """Name of the folder of the models."""
    folder: Path = field(default=Path(), compare=False)
    """The folder of the ensemble, which holds the folder of the models."""

    surface: ClassVar[bool] = False
    """An export is a plain classifier, so no surface features stand beside the states."""
    n_layers: ClassVar[int] = 1

    def __call__(self, items: ItemsLike, progress: Progress | None = None) -> Vectors:
        """Return the features, ``(n_items, outputs)`` or ``(n_items, hidden)``.

        Texts that were read before come from the vector cache.
        """
        parts, texts = self.parts(), as_items(items)

        def report(position: int, done: int, total: int) -> None:
            if progress is not None:
                progress(position * total + done, len(parts) * total)

        read = [encode(texts, part, surface=False, progress=partial(report, i)) for i, part in enumerate(parts)]
        return np.hstack(read)

    def parts(self) -> list["Backbone"]:
        """Return the models as encoders. Each is loaded when it first encodes a text that is not cached."""
        models = _models_of(self)
        return [Backbone(*one, models) for one in zip(model_folders(self), self.identity, strict=True)]

    def to_json(self) -> JsonObject:
        """Return these features as an ensemble's JSON holds them."""
        absent = ["folder", *([] if self.revision else ["revision"])]
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in absent}
        return {"kind": KIND, **own, "identity": list(self.identity)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], folder: Path) -> "FinetunedFeatures":
        """Return the features in an ensemble's JSON.

        Args:
            values: the JSON object, as ``to_json`` returns it.
            folder: the folder of the ensemble, which holds the models.

        Raises:
            TypeError, ValueError: the JSON does not describe such features.
        """
        read = from_json(cls, {name: value for name, value in values.items() if name != "folder"})
        if Path(read.models).name != read.models or len(read.identity) != len(model_folders(read)):
            raise ValueError("these features name no models")
        return replace(read, folder=folder)

    def with_current_hashes(self) -> "FinetunedFeatures":
        """Return these features with the hashes of their current files."""
        return replace(self, identity=tuple(model_identity(place, self) for place in model_folders(self)))

    def first(self, k: int) -> "FinetunedFeatures":
        """Return the features of the first k models of a stagewise ensemble."""
        return replace(self, outputs=k, identity=self.identity[:k])

    def save(self, folder: Path) -> "FinetunedFeatures":
        """Put the models into another ensemble's folder, all of them or none, and return the features there.

        Files are hard-linked if possible. Other models in the folder stay: they are of an ensemble that is still saved.
        """
        if self.folder.resolve() == folder.resolve():
            return self
        own = hashlib.sha256("".join(self.identity).encode()).hexdigest()[:16]
        for name in (BACKBONE_FOLDER, f"{BACKBONE_FOLDER}-{own}"):
            saved = replace(self, folder=folder, models=name)
            if not (folder / name).exists():
                break
            if saved.with_current_hashes().identity == self.identity:
                return saved
        kept = {place.relative_to(self.folder / self.models).as_posix() for place in model_folders(self)}
        link_folder(self.folder / self.models, folder / saved.models, kept)
        return saved


def model_folders(features: FinetunedFeatures) -> list[Path]:
    """Return the folder of each model."""
    place = features.folder / features.models
    if features.method == "joint":
        return [place]
    return [place / f"member-{j}" for j in range(features.outputs)]


# --- models in memory -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backbone:
    """One fine-tuned model as an encoder."""

    folder: Path
    sha256: str
    """Hash of the model's files."""
    models: "_Models"

    @property
    def identity(self) -> str:
        """Everything that the features depend on: the files, the precision, and how long texts are shortened."""
        features = self.models.features
        states = " states" if features.method == "joint" else ""
        return f"{self.sha256} {features.precision} {TRUNCATION}{states}"

    def encode(self, items: Sequence[Item]) -> Vectors:
        """Return the outputs or the states of the model, ``(n_items, outputs)`` or ``(n_items, hidden)``."""
        model, tokenizer = self.models.get(self.folder, self.sha256)
        limit = self.models.features.max_length
        return np.asarray(classifier_rewards(model, tokenizer, items, limit), dtype=np.float32)


class _Models:
    """The models of one ensemble in memory: one base with all adapters, or as many whole models as fit."""

    def __init__(self, features: FinetunedFeatures) -> None:
        self.features = features
        self.loaded: dict[Path, tuple[Any, Any]] = {}

    def get(self, folder: Path, identity: str) -> tuple[Any, Any]:
        """Return a model, ready for use, and its tokenizer."""
        if folder not in self.loaded:
            _check_files(folder, identity, self.features)
            if self.features.lora and self.loaded:
                model, tokenizer = next(iter(self.loaded.values()))
                with loading.loading(folder, SAVED_AGAIN, adapter=True):
                    model.load_adapter(folder, adapter_name=folder.name)
                self.loaded[folder] = model, tokenizer
            else:
                if not self._all_fit():
                    self.loaded.clear()
                self.loaded[folder] = load_finetuned(folder, self.features, self.features.precision)
                if self.features.method == "joint":
                    remove_head(self.loaded[folder][0])
        model, tokenizer = self.loaded[folder]
        if self.features.lora:
            model.set_adapter(folder.name)
        return model.eval(), tokenizer

    def _all_fit(self) -> bool:
        weights = (path for place in model_folders(self.features) for path in place.glob("*.safetensors"))
        return sum(path.stat().st_size for path in weights) <= KEEP_BYTES


_latest: list[_Models] = []


def _models_of(features: FinetunedFeatures) -> _Models:
    """Return the models of an ensemble, and release those of any other ensemble."""
    if not _latest or (_latest[0].features, _latest[0].features.folder) != (features, features.folder):
        _latest[:] = [_Models(features)]
    return _latest[0]


def forget_models() -> None:
    """Release all models."""
    _latest.clear()


def load_finetuned(
    folder: Path, features: FinetunedFeatures, precision: ChosenPrecision = "float32"
) -> tuple[Any, Any]:
    """Load a fine-tuned model onto the GPU, or the CPU without one, and its tokenizer, which truncates on the left.

    Args:
        folder: one of the models: a whole transformers folder, or a peft adapter with the head among its
            ``modules_to_save``. The folder's name is the name of the adapter in memory.
        features: the base model, its commit, and the number of outputs.
        precision: of the body; the head is in float32.

    Raises:
        UsageError: this machine has no GPU, and bfloat16 would end the process on its CPU.
    """
    adapted = (folder / "adapter_config.json").is_file()
    source = loading.model_folder(features.base, features.revision) if adapted else folder
    with loading.loading(folder, SAVED_AGAIN, adapter=adapted) as transformers:
        if precision == "bfloat16" and loading.device_name() == "cpu":
            loading.check_cpu_bfloat16()
        load = transformers.AutoModelForSequenceClassification.from_pretrained
        tokenizer = loading.load_tokenizer(transformers, folder)
        outputs = features.outputs if features.method == "joint" else 1
        config = transformers.AutoConfig.from_pretrained(source, num_labels=outputs)
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
        model = load(source, config=config, dtype=precision, use_safetensors=True, ignore_mismatched_sizes=adapted)
        if precision == "bfloat16":
            use_float32_head(model)
            if not adapted:
                _read_head(model, folder)
        if adapted:
            import peft

            model = peft.PeftModel.from_pretrained(model, folder, adapter_name=folder.name)
    return model.to(loading.device_name()).eval(), tokenizer


def _read_head(model: Any, folder: Path) -> None:
    """Read the head again from the files of a whole model: loading in bfloat16 has rounded it."""
    import torch

    name, head = classifier_head(model)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for part in {f"{name}.{kind}" for kind, _ in head.named_parameters()} & set(file.keys()):
                with torch.no_grad():
                    head.get_parameter(part.rpartition(".")[2]).copy_(file.get_tensor(part))


def head_weights(features: FinetunedFeatures, folder: Path) -> FloatArray:
    """Return the weights of the head of one of the models, ``(outputs, hidden)``. Loads no other weights.

    Raises:
        DataError: the model was saved without it.
    """
    import torch

    source = loading.model_folder(features.base, features.revision) if features.lora else folder
    with loading.loading(folder, SAVED_AGAIN, adapter=features.lora) as transformers, torch.device("meta"):
        config: Any = transformers.AutoConfig.from_pretrained(source, num_labels=features.outputs)
        classifier: Any = transformers.AutoModelForSequenceClassification
        name, _ = classifier_head(classifier.from_config(config))
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                if f".{key}".endswith(f".{name}.weight"):
                    return np.asarray(file.get_tensor(key).double().numpy())
    raise DataError("the model was saved without its head", file=str(folder), remedy="fit again")


# --- hashes and files -------------------------------------------------------------------------------------------------


def _check_files(folder: Path, identity: str, features: FinetunedFeatures) -> None:
    remedy = SAVED_AGAIN
    if not (folder / ("adapter_config.json" if features.lora else "config.json")).is_file():
        raise DataError("there is no fine-tuned model in it", file=str(folder), remedy=remedy)
    if model_identity(folder, features) != identity:
        changed = "the adapter or its base model" if features.lora else "the model"
        raise DataError(f"{changed} is not what was saved: its hash differs", file=str(folder), remedy=remedy)


def model_identity(folder: Path, features: FinetunedFeatures) -> str:
    """Return a hash of everything that a model's outputs depend on. A base model under an adapter is hashed quickly."""
    digest = hashlib.sha256(f"tuned {features.max_length}".encode())
    for path in sorted(path for path in folder.glob("*") if path.is_file() and path.suffix != ".md"):
        digest.update(f"{path.name} {file_sha256(path)}".encode())
    if features.lora:
        digest.update(loading.folder_identity(loading.model_folder(features.base, features.revision)).encode())
    return digest.hexdigest()
