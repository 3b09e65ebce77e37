"""``export``: write a fine-tuned ensemble, or one of its members, as a reward model that plain transformers loads.

This module decides the content of the folder. Weights are safetensors, LoRA adapters are merged, the head is kept, and
a model card reports the measured figures. The folder is written atomically. Nothing is measured here except the names
of the members.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

import numpy as np
from safetensors import safe_open

from pluralign.analysis.profiles import member_profiles
from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, UsageError, did_you_mean
from pluralign.core.files import atomic_folder
from pluralign.core.hub import HUB_ID, check_upload, upload_model
from pluralign.core.json_values import without_nan
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import has_held_out, load_held_out
from pluralign.features.finetuned import FinetunedFeatures, load_finetuned, model_folders
from pluralign.models.classifier import UNDECIDED_KEY, WEIGHTS_KEY, classifier_head, classifier_tokens
from pluralign.models.loading import quiet_transformers
from pluralign.publishing.model_card import Kind, ModelCard, Reads

Precision = Literal["float32", "bfloat16", "float16"]

INDEX_FILE = "pluralign.json"
"""Index of an export: its members, their weights, the undecided share, and the version that wrote it."""
KNOWN_BASES = {
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
}
"""Hub ids of models that have a short name in this library."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Export:
    """The result of an export."""

    folder: str
    models: list[str]
    """Folders for ``from_pretrained``: one, or one per member."""
    members: list[int]
    """Indices of the exported members."""
    names: list[str]
    weights: list[float]
    """Weights of the exported members in the ensemble; they sum to 1 if all are exported."""
    undecided: float
    """Share of votes that no member explains."""
    base: str
    hub: str | None
    """URL on the hub, if the export was pushed."""


def export(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    member: int | None = None,
    separate: bool = False,
    dtype: Precision = "float32",
    overwrite: bool = False,
    push_to_hub: str | None = None,
    public: bool = False,
    commands: Sequence[Sequence[str]] = (),
) -> Export:
    """Write a fine-tuned ensemble as transformers reward models.

    Without ``member`` and ``separate`` the ensemble becomes one model with one output per member. Its configuration
    holds their weights, their names and the undecided share. The members of a stagewise ensemble are separate models
    and cannot be exported so.

    Args:
        folder: folder of the ensemble, written by ``fit``.
        output: the folder to write.
        member: export only this member, as a model with one output.
        separate: export each member as a model with one output, in the folders ``member-J``.
        dtype: data type of the weights. float32 reproduces the ensemble's rewards; half precision is half as large.
        overwrite: replace an earlier export.
        push_to_hub: upload the export to this repository on the Hugging Face hub.
        public: make a newly created repository public.
        commands: the commands that reproduce the export, each as a list of words, for the model card.
    """
    folder, output = Path(folder), Path(output)
    ensemble = RewardEnsemble.load(folder)
    features = _tuned(ensemble, folder)
    if member is not None and not 0 <= member < ensemble.k:
        raise UsageError(f"member must be 0 to {ensemble.k - 1}, not {member}.")
    if member is not None and separate:
        raise UsageError("--member and --all cannot be combined: export one member, or all of them.")
    if features.method == "stagewise" and member is None and not separate:
        raise UsageError(
            "the members of a stagewise ensemble are separate models and cannot be exported as one: "
            "export one with --member J, or each in its own folder with --all."
        )
    if dtype not in get_args(Precision):
        raise UsageError(f"dtype cannot be {dtype!r}; {did_you_mean(dtype, get_args(Precision))}.")
    _refuse_place(folder, output, overwrite)
    if push_to_hub:
        check_upload(push_to_hub)
    members = list(range(ensemble.k)) if member is None else [member]
    names = member_names(folder, ensemble)
    base = base_id(features.base) or PurePath(features.base).name
    card = ModelCard(ensemble, names, base, base_id(features.base), output.resolve().name, push_to_hub or "", commands)
    groups = {f"member-{j}": [j] for j in members} if separate else {".": members}
    with atomic_folder(output) as partial:
        for place, chosen in groups.items():
            kind: Kind = "ensemble" if member is None and not separate else "member"
            model, tokenizer = _model_of(features, ensemble.members.theta[:, chosen])
            reads = reads_of(tokenizer)
            _describe(model.config, ensemble, names, chosen, kind, reads)
            _save(model, tokenizer, partial / place, dtype, features.max_length)
            text = card.text(kind, chosen, reads, place, ends_in_padding(model, tokenizer))
            (partial / place / "README.md").write_text(text, encoding="utf-8")
        if separate:
            (partial / "README.md").write_text(card.text("separate", members), encoding="utf-8")
        rows = [asdict(card.member_row(j)) | {"folder": place} for place, chosen in groups.items() for j in chosen]
        index = {
            "format": "pluralign-export",
            "pluralign": __version__,
            "base": base,
            "undecided": ensemble.undecided,
            "members": rows,
        }
        (partial / INDEX_FILE).write_text(json.dumps(without_nan(index), indent=1, ensure_ascii=False), "utf-8")
    return Export(
        folder=str(output),
        models=[str(output / place) for place in groups],
        members=members,
        names=[names[j] for j in members],
        weights=ensemble.weights[members].tolist(),
        undecided=ensemble.undecided,
        base=base,
        hub=upload_model(output, push_to_hub, private=not public) if push_to_hub else None,
    )


def member_names(folder: str | os.PathLike[str], ensemble: RewardEnsemble) -> list[str]:
    """Return the name of each member on its card, or its number if there are no held-out votes."""
    if not has_held_out(folder):
        return [f"member {j}" for j in range(ensemble.k)]
    return [card.name for card in member_profiles(ensemble.weights, load_held_out(folder, ensemble))]


def base_id(base: str) -> str | None:
    """Return the hub id of a base model, or None for a local folder: local paths are not published.

    Example:
        >>> base_id("smollm2"), base_id("my-org/model"), base_id("/home/me/models/mine")
        ('HuggingFaceTB/SmolLM2-135M-Instruct', 'my-org/model', None)
    """
    return KNOWN_BASES.get(base) or (base if HUB_ID.fullmatch(base) and not Path(base).exists() else None)


def _tuned(ensemble: RewardEnsemble, folder: Path) -> FinetunedFeatures:
    """Return the fine-tuned features of an ensemble, after checking the hash of the models."""
    features = ensemble.features
    if not isinstance(features, FinetunedFeatures):
        raise UsageError(
            f"{folder} has linear heads on frozen features (encoder {features.encoder}), scaled and clipped, which a "
            "transformers classifier cannot compute: score with pluralign, or fit with --backbone."
        )
    if features.with_current_hashes().identity != features.identity:
        remedy = "copy the folder again, or fit again"
        raise DataError("a fine-tuned model was changed: its hash differs", file=str(folder), remedy=remedy)
    return features


def _refuse_place(folder: Path, output: Path, overwrite: bool) -> None:
    inside, outside = folder.resolve(), output.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise UsageError(
            f"{output} must be outside the ensemble's folder {folder}, and not contain it; name another folder."
        )
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise UsageError(
                f"{output} is not empty; name another folder, or replace an earlier export with --overwrite."
            )
        if not (output / INDEX_FILE).is_file():
            raise UsageError(f"{output} is not an earlier export ({INDEX_FILE} is missing); name another folder.")
    elif output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; name a folder.")


# --- models -----------------------------------------------------------------------------------------------------------


def _model_of(features: FinetunedFeatures, theta: FloatArray) -> tuple[Any, Any]:
    """Return one model with one output per column of θ, and its tokenizer."""
    places = model_folders(features)
    if features.method == "stagewise":
        (own,) = np.flatnonzero(theta[:, 0])
        places, theta = [places[own]], theta[own : own + 1]
    model, tokenizer = load_finetuned(places[0], features.base, len(theta))
    if features.lora:
        refuse_without_head(places[0], classifier_head(model)[0])
        model = model.merge_and_unload()
    keep_outputs(model, theta)
    return model, tokenizer


def _describe(
    config: Any, ensemble: RewardEnsemble, names: Sequence[str], chosen: Sequence[int], kind: Kind, reads: Reads
) -> None:
    """Describe the outputs of a model in its configuration."""
    labels = [names[j] for j in chosen]
    config.id2label, config.label2id = dict(enumerate(labels)), {name: i for i, name in enumerate(labels)}
    # Rewards are not probabilities. This setting keeps vLLM and pipelines from applying a softmax, and scorers of pairs
    # of texts (vLLM's /score, CrossEncoder of sentence-transformers) from applying a sigmoid.
    config.problem_type = "regression"
    if reads == "pair":
        config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
    config.pluralign, config.pluralign_names = __version__, labels
    if kind == "ensemble":
        setattr(config, WEIGHTS_KEY, ensemble.weights[list(chosen)].tolist())
        setattr(config, UNDECIDED_KEY, ensemble.undecided)
        config.pluralign_temperature = ensemble.temperature
    else:
        config.pluralign_member, config.pluralign_member_weight = chosen[0], float(ensemble.weights[chosen[0]])


def _save(model: Any, tokenizer: Any, place: Path, dtype: Precision, max_length: int) -> None:
    import torch

    place.mkdir(exist_ok=True)
    size, free = sum(part.numel() for part in model.parameters()) * BYTES[dtype], shutil.disk_usage(place).free
    if size > free:
        raise UsageError(f"the model needs {size / 1e6:,.0f} MB, but only {free / 1e6:,.0f} MB are free.")
    # Long inputs are truncated at the beginning of the prompt, as in the fit of the ensemble.
    tokenizer.truncation_side, tokenizer.padding_side = "left", "right"
    tokenizer.init_kwargs |= {"truncation_side": "left", "padding_side": "right"}  # otherwise they are not saved
    tokenizer.model_max_length = min(int(tokenizer.model_max_length), max_length)
    with quiet_transformers():
        model.to("cpu", getattr(torch, dtype)).save_pretrained(place)
        tokenizer.save_pretrained(place)
    for path in place.glob("*.safetensors"):  # safetensors writes files that only their owner can read
        path.chmod((place / "config.json").stat().st_mode)


def reads_of(tokenizer: Any) -> Reads:
    """Return the input format of a model: see ``models.classifier.model_rewards``."""
    return "chat" if tokenizer.chat_template else "pair" if tokenizer.sep_token else "text"


def ends_in_padding(model: Any, tokenizer: Any) -> bool:
    """Return whether a decoder's inputs end in its padding token, so that it reads the token before.

    This happens if the token at the end of a turn is also the padding token. vLLM has no padding: it reads the last
    token.
    """
    last = classifier_tokens(tokenizer, ("Tea?", "Yes."), tokenizer.model_max_length)["input_ids"][-1]
    return bool(reads_of(tokenizer) != "pair" and last == model.config.get_text_config().pad_token_id)


def refuse_without_head(adapter: Path, head: str) -> None:
    """Raise DataError if an adapter was saved without its head.

    Merging such an adapter gives a random head: the base model has none, so transformers initializes one at random, and
    peft does not replace it if ``modules_to_save`` did not name it.
    """
    weights = adapter / "adapter_model.safetensors"
    name = head.removesuffix(".modules_to_save.default")
    with safe_open(weights, framework="numpy") as file:
        if not any(f".{name}." in key for key in file.keys()):  # noqa: SIM118
            remedy = "fit again; its rewards cannot be recovered"
            raise DataError(f"the adapter was saved without its head, {name}", file=str(weights), remedy=remedy)


def keep_outputs(model: Any, theta: FloatArray) -> None:
    """Change the head of a sequence classifier so that it returns θᵀ·outputs; one-hot columns select outputs.

    Args:
        model: changed in place: its head becomes W' = θᵀ W, b' = θᵀ b.
        theta: ``(outputs, k)``.
    """
    import torch

    name, head = classifier_head(model)
    mix = torch.as_tensor(np.ascontiguousarray(theta.T), dtype=torch.float64, device=head.weight.device)
    kept = torch.nn.Linear(head.in_features, len(mix), bias=head.bias is not None, device=mix.device)
    with torch.no_grad():
        kept.weight.copy_(mix @ head.weight.double())
        if head.bias is not None:
            kept.bias.copy_(mix @ head.bias.double())
    model.set_submodule(name, kept)
    model.num_labels = model.config.num_labels = len(mix)
