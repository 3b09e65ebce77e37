"""``RewardEnsemble.push_to_hub``: upload an ensemble that ``RewardEnsemble.from_pretrained`` loads again.

Decided here: what is uploaded. Held-out votes, texts and local paths are not.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from pluralign.core.errors import UsageError
from pluralign.core.hub import check_upload, upload_model
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.features.finetuned import FinetunedFeatures
from pluralign.features.frozen import TextFeatures
from pluralign.publishing.export_folder import KNOWN_BASES, base_id, numbered_names
from pluralign.publishing.frozen_export import (
    NotExpressibleError,
    encoder_name,
    published_record,
    save_frozen,
    write_script,
)
from pluralign.publishing.model_card import ModelCard


def push_ensemble(
    ensemble: RewardEnsemble, name: str, *, private: bool = True, names: Sequence[str] | None = None
) -> str:
    """Upload an ensemble with a model card, and return the URL: see ``RewardEnsemble.push_to_hub``."""
    check_upload(name)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / PurePath(name).name
        place.mkdir()
        write_shared(ensemble, place, name, names)
        return upload_model(place, name, private=private, kept=False)


def write_shared(ensemble: RewardEnsemble, place: Path, hub_id: str, names: Sequence[str] | None = None) -> None:
    """Write the files of an upload into an empty folder.

    Args:
        ensemble: the ensemble.
        place: the folder.
        hub_id: the repository, for the model card.
        names: names of the members (default: their numbers).
    """
    names = numbered_names(ensemble) if names is None else list(names)
    if len(names) != ensemble.k:
        raise UsageError(f"names must have one entry per member, {ensemble.k}, not {len(names)}.")
    features, members = ensemble.features, range(ensemble.k)
    if isinstance(features, TextFeatures):
        source = features if features.hub_id else features.with_identity()
        card = ModelCard(ensemble, names, encoder_name(source), source.hub_id or None, place.name, hub_id)
        saved, script = save_frozen(ensemble, features, place, with_encoder=not source.hub_id), True
        try:
            write_script(card, place, saved)
        except NotExpressibleError:  # then the folder needs this package
            script = False
        text = card.text("frozen", members, script=script)
    else:
        base = base_id(features.base)
        if features.lora and base is None:
            raise UsageError(
                f"the LoRA adapters need the base model {features.base}, which is not on the hub: fit with a hub id, "
                "or use pluralign export --push-to-hub, which merges them."
            )
        card = ModelCard(ensemble, names, base or PurePath(features.base).name, base, place.name, hub_id)
        save_tuned(ensemble, features, place)
        text = card.text("tuned", members)
    (place / "README.md").write_text(text, encoding="utf-8")


def save_tuned(ensemble: RewardEnsemble, features: FinetunedFeatures, place: Path) -> None:
    """Save a fine-tuned ensemble for publication: the base is named by its hub id, without local paths."""
    features.save(place)
    name = features.base if features.base in KNOWN_BASES else base_id(features.base) or PurePath(features.base).name
    for path in place.rglob("README.md"):  # written by peft, with local paths
        path.unlink()
    for path in place.rglob("adapter_config.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = base_id(name) or name
        path.unlink()  # it may be a hard link to the file of the ensemble
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    published = replace(features, base=name, folder=place).with_current_hashes()
    replace(ensemble, features=published, record=published_record(ensemble.record)).save(place)
