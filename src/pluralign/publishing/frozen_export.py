"""Ensembles on frozen features as folders that work without this package.

No standard class of transformers or sentence-transformers computes these rewards: several pooled layers are
concatenated with surface features, scaled, clipped and projected. So the folder holds the arrays of the ensemble, the
files of the encoder, and ``reward_model.py``, a small module on top of torch and transformers. Decided here: what it is
told about the encoder. Its rewards are compared with those of the ensemble before the folder is written.
"""

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from pluralign.core.errors import UsageError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import ENSEMBLE_FILE
from pluralign.ensemble.record import FitRecord
from pluralign.features.encoder import HashingEncoder
from pluralign.features.frozen import BUNDLED, ENCODER_FOLDER, TextFeatures
from pluralign.features.transformer_encoder import ModelEncoder, is_sentence_encoder
from pluralign.models.loading import copy_model
from pluralign.publishing.export_folder import base_id, index_of, write_index
from pluralign.publishing.model_card import ModelCard, without_path
from pluralign.publishing.standalone.reward_model import RewardModel
from pluralign.votes.prompts import Item, Message, Prompt

SCRIPT = "reward_model.py"
COPIED = ("attention_pooling", "hashing", "surface")
"""Modules of ``features`` whose code becomes part of the script."""
TOLERANCE = 1e-3
"""Largest difference of a reward, relative to its size, between the script and the ensemble. In bfloat16 the order of
additions alone moves rewards by more than this; there it is ``HALF_TOLERANCE``."""
HALF_TOLERANCE = 0.05
PROBES: tuple[Item, ...] = (
    ("Should the bus be free?", "Yes, please: for everyone, on every line."),
    ("Should the bus be free?", "No.\n- Too costly\n- Who pays?"),
    ((Message("user", "Tea?"), Message("assistant", "No."), Message("user", "Why?")), "I might, perhaps, like it."),
    ("Tell me a story. " * 400, "Once upon a time there was a bus."),
)
"""Texts on which the script is compared with the ensemble: a plain one, a list, a chat, and one that is truncated."""


class NotExpressibleError(UsageError):
    """The script cannot compute the rewards of an ensemble."""


def encoder_name(features: TextFeatures) -> str:
    """Return the name of an encoder for publication: a hub id, a short name, or the last part of a path."""
    return features.hub_id or base_id(features.encoder) or PurePath(features.encoder).name


def save_frozen(ensemble: RewardEnsemble, features: TextFeatures, place: Path, *, with_encoder: bool) -> TextFeatures:
    """Save an ensemble on frozen features for publication, and return its features as they are saved.

    Args:
        ensemble: the ensemble.
        features: its features.
        place: an empty folder.
        with_encoder: whether to copy the encoder. Otherwise it is named by its hub id and revision.
    """
    encoder = features.load_checked()
    features = features if features.hub_id else replace(features.with_identity(), identity=features.identity)
    if with_encoder and isinstance(encoder, ModelEncoder):
        copy_model(encoder.folder, place / ENCODER_FOLDER)
        copied = replace(features, encoder=str(place / ENCODER_FOLDER)).load()
        features = replace(features, encoder=ENCODER_FOLDER, identity=copied.identity if copied else "", own=False)
    elif features.hub_id and features.encoder not in BUNDLED:
        features = replace(features, encoder=features.hub_id)
    replace(ensemble, features=features, record=published_record(ensemble.record)).save(place)
    return features


def write_script(card: ModelCard, place: Path, saved: TextFeatures) -> None:
    """Write ``reward_model.py`` and the index beside a saved ensemble, after comparing its rewards.

    Args:
        card: the ensemble, its names and its base.
        place: the folder.
        saved: the features, as ``save_frozen`` returned them.

    Raises:
        NotExpressibleError: the script does not compute the rewards of this ensemble.
    """
    ensemble, encoder = card.ensemble, replace(saved, encoder=_found(saved, place)).load_checked()
    expected = ensemble.rewards(PROBES)
    reader, (prompt, response) = describe_reader(saved, encoder), PROBES[0]
    more = {
        "arrays": json.loads((place / ENSEMBLE_FILE).read_text(encoding="utf-8"))["arrays"]["file"],
        "reader": reader,
        "check": {"prompt": prompt, "response": response, "rewards": expected[0].tolist()},
    }
    index = index_of(card, {".": range(ensemble.k)}, more)
    local = reader | ({"hub_id": str(encoder.folder), "revision": ""} if isinstance(encoder, ModelEncoder) else {})
    model = RewardModel(place, {**index, "reader": local}, ensemble.members.arrays())
    try:
        rewards = model.rewards([(Prompt(asked).json, text) for asked, text in PROBES])
    except ValueError:  # raised by the script for its stored text
        raise _not_expressible(card.base, "its rewards differ") from None
    difference = float(np.max(np.abs(rewards - expected) / (1 + np.abs(expected))))
    half = isinstance(encoder, ModelEncoder) and encoder.half
    if difference > (HALF_TOLERANCE if half else TOLERANCE):
        raise _not_expressible(card.base, f"its rewards differ by {difference:.2g}")
    write_index(place, index)
    (place / SCRIPT).write_text(script_text(), encoding="utf-8")


def _found(saved: TextFeatures, place: Path) -> str:
    return str(place / ENCODER_FOLDER) if saved.encoder == ENCODER_FOLDER else saved.encoder


def published_record(record: FitRecord) -> FitRecord:
    """Return the record of a fit without local paths."""
    return FitRecord.from_json(without_path(record.to_json()))


def describe_reader(features: TextFeatures, encoder: Any) -> dict[str, Any]:
    """Return what the script must know to compute the features of a text."""
    reader: dict[str, Any] = {"kind": "none", "surface": features.surface}
    if isinstance(encoder, HashingEncoder):
        return reader | {"kind": "hashing", "dimension": encoder.dimension}
    if not isinstance(encoder, ModelEncoder):
        return reader
    pooling, unit_length = (encoder.pooling, False) if encoder.layers else own_pooling(encoder.folder)
    return reader | {
        "kind": "transformer",
        "hub_id": features.hub_id,
        "revision": features.revision,
        "layers": list(encoder.layers),
        "keep_layers": encoder.kept_layers,
        "pooling": pooling,
        "unit_length": unit_length,
        "max_length": encoder.max_tokens(),
        "chat": encoder.reads_chats(),
        "dtype": "bfloat16" if encoder.half else "float32",
    }


def own_pooling(folder: Path) -> tuple[str, bool]:
    """Return the pooling of a model's own vector, and whether the vector is scaled to length 1."""
    if not is_sentence_encoder(folder):
        return "mean", False
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise _not_expressible(folder.name, f"its modules are {', '.join(kinds)}")
    config = json.loads((folder / modules[1]["path"] / "config.json").read_text(encoding="utf-8"))
    flags = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
    modes = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
    mode = names.get(flags[0]) if len(flags) == 1 else modes.get(str(config.get("pooling_mode")))
    if mode is None:
        raise _not_expressible(folder.name, f"its pooling is {' '.join(flags) or config.get('pooling_mode')}")
    return mode, "Normalize" in kinds


def script_text() -> str:
    """Return the text of the script: the module of the package with the code that it imports from the package."""
    text = _source("publishing/standalone/reward_model.py")
    for name in COPIED:
        source = _source(f"features/{name}.py")
        _, _, code = source.partition('"""\n\n')  # without the docstring of the module
        imported = f"from pluralign.features.{name} import "
        start = text.index(imported)
        end = text.index("\n", start)
        text = f"{text[:start]}# {name} features\n{code.strip()}\n\n{text[end + 1 :]}"
    return text


def _source(name: str) -> str:
    return files("pluralign").joinpath(name).read_text(encoding="utf-8")


def _not_expressible(encoder: str, reason: str) -> NotExpressibleError:
    return NotExpressibleError(
        f"the encoder {encoder} needs sentence-transformers ({reason}), so its ensemble cannot be exported: "
        "use RewardEnsemble.push_to_hub, or fit with other --layers."
    )
