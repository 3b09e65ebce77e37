"""``export``: write an ensemble, or one of its members, as a folder that works without this package.

This module decides the content of the folder for fine-tuned ensembles: reward models that plain transformers loads.
Weights are safetensors, LoRA adapters are merged, the head is kept, and a model card reports the measured figures. The
folder is written atomically. Nothing is measured here except the names of the members. ``frozen_export`` writes
ensembles on frozen features.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

import numpy as np
from safetensors import safe_open

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, UsageError, did_you_mean
from pluralign.core.files import atomic_folder
from pluralign.core.hub import check_upload, upload_model
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.features.finetuned import FinetunedFeatures, load_finetuned, model_folders
from pluralign.features.frozen import TextFeatures
from pluralign.models.classifier import (
    UNDECIDED_KEY,
    WEIGHTS_KEY,
    Reads,
    added_chat_template,
    classifier_head,
    classifier_tokens,
    reads_of,
)
from pluralign.models.loading import quiet_transformers
from pluralign.publishing.export_folder import (
    Export,
    base_id,
    export_warnings,
    index_of,
    member_names,
    refuse_place,
    write_index,
)
from pluralign.publishing.frozen_export import encoder_name, save_frozen, write_script
from pluralign.publishing.model_card import Kind, ModelCard

Precision = Literal["float32", "bfloat16", "float16"]

CROSS_ENCODER_FILES: dict[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    ],
    "sentence_bert_config.json": {
        "transformer_task": "sequence-classification",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "scores",
    },
    "config_sentence_transformers.json": {
        "model_type": "CrossEncoder",
        "activation_fn": "torch.nn.modules.linear.Identity",
    },
}
"""Files of a pair model for ``CrossEncoder`` of sentence-transformers: pairs of texts, no chat template, raw scores."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    """Write an ensemble as a folder that works without Pluralign.

    A fine-tuned ensemble becomes reward models of transformers. Without ``member`` and ``separate`` it becomes one
    model with one output per member. Its configuration holds their weights, their names and the undecided share. The
    members of a stagewise ensemble are separate models and cannot be exported so.

    An ensemble on frozen features becomes a folder with its arrays, its encoder, and ``reward_model.py``, which
    computes its rewards with torch and transformers.

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
    features = ensemble.features
    if member is not None and not 0 <= member < ensemble.k:
        raise UsageError(f"member must be 0 to {ensemble.k - 1}, not {member}.")
    if member is not None and separate:
        raise UsageError("--member and --all cannot be combined: export one member, or all of them.")
    if dtype not in get_args(Precision):
        raise UsageError(f"dtype cannot be {dtype!r}; {did_you_mean(dtype, get_args(Precision))}.")
    if isinstance(features, TextFeatures):
        if member is not None or separate or dtype != "float32":
            raise UsageError(
                "an ensemble on frozen features is exported whole and in float32, without --member, --all and --dtype: "
                "reward_model.py returns one column of rewards per member."
            )
        base, known = encoder_name(features), features.hub_id or base_id(features.encoder)
    else:
        _check_tuned(features, folder, one_model=member is None and not separate)
        base, known = base_id(features.base) or PurePath(features.base).name, base_id(features.base)
    refuse_place(folder, output, overwrite)
    if push_to_hub:
        check_upload(push_to_hub)
    members = list(range(ensemble.k)) if member is None else [member]
    names = member_names(folder, ensemble)
    card = ModelCard(ensemble, names, base, known, output.resolve().name, push_to_hub or "", commands)
    groups = {f"member-{j}": [j] for j in members} if separate else {".": members}
    with atomic_folder(output) as partial:
        if isinstance(features, TextFeatures):
            write_script(card, partial, save_frozen(ensemble, features, partial, with_encoder=True))
            (partial / "README.md").write_text(card.text("frozen", members), encoding="utf-8")
        else:
            kind: Kind = "ensemble" if member is None and not separate else "member"
            _write_models(card, features, partial, groups, kind, dtype)
            if separate:
                (partial / "README.md").write_text(card.text("separate", members), encoding="utf-8")
    return Export(
        folder=str(output),
        models=[str(output / place) for place in groups],
        members=members,
        names=[names[j] for j in members],
        weights=ensemble.weights[members].tolist(),
        undecided=ensemble.undecided,
        base=base,
        hub=upload_model(output, push_to_hub, private=not public) if push_to_hub else None,
        warnings=export_warnings(ensemble.record),
    )


def _check_tuned(features: FinetunedFeatures, folder: Path, *, one_model: bool) -> None:
    """Raise an error if the members are to be one model but are several, or if a model was changed."""
    if features.method == "stagewise" and one_model:
        raise UsageError(
            "the members of a stagewise ensemble are separate models and cannot be exported as one: "
            "export one with --member J, or each in its own folder with --all."
        )
    if features.with_current_hashes().identity != features.identity:
        remedy = "copy the folder again, or fit again"
        raise DataError("a fine-tuned model was changed: its hash differs", file=str(folder), remedy=remedy)


# --- models -----------------------------------------------------------------------------------------------------------


def _write_models(
    card: ModelCard,
    features: FinetunedFeatures,
    partial: Path,
    groups: dict[str, list[int]],
    kind: Kind,
    dtype: Precision,
) -> None:
    """Write the models, their cards and the index."""
    for place, chosen in groups.items():
        model, tokenizer = _model_of(features, card.ensemble.members.head()[:, chosen])
        reads = reads_of(tokenizer)
        _describe(model.config, card.ensemble, card.names, chosen, kind, reads)
        _save(model, tokenizer, partial / place, dtype, features.max_length)
        limit = int(tokenizer.model_max_length)
        text = card.text(kind, chosen, reads, place, ends_in_padding(model, tokenizer), limit)
        (partial / place / "README.md").write_text(text, encoding="utf-8")
    write_index(partial, index_of(card, groups))


def _model_of(features: FinetunedFeatures, theta: FloatArray) -> tuple[Any, Any]:
    """Return one model with one output per column of θ, and its tokenizer. Members of states replace the head."""
    places, outputs = model_folders(features), features.outputs
    if features.method == "stagewise":
        (own,) = np.flatnonzero(theta[:, 0])
        places, theta, outputs = [places[own]], theta[own : own + 1], 1
    model, tokenizer = load_finetuned(places[0], features.base, outputs, revision=features.revision)
    if features.lora:
        refuse_without_head(places[0], classifier_head(model)[0])
        model = model.merge_and_unload()
    (replace_head if features.reads == "states" else keep_outputs)(model, theta)
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
    if reads_of(tokenizer) != "chat":  # TRL renders messages with a template, and ends plain texts with an end token
        tokenizer.chat_template = added_chat_template(tokenizer)
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.sep_token or tokenizer.pad_token
    if reads_of(tokenizer) == "pair":
        for name, content in CROSS_ENCODER_FILES.items():
            (place / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    with quiet_transformers():
        model.to("cpu", getattr(torch, dtype)).save_pretrained(place)
        tokenizer.save_pretrained(place)
    for path in place.glob("*.safetensors"):  # safetensors writes files that only their owner can read
        path.chmod((place / "config.json").stat().st_mode)


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
    _, head = classifier_head(model)
    bias = None if head.bias is None else theta.T @ head.bias.detach().double().cpu().numpy()
    replace_head(model, head.weight.detach().double().cpu().numpy().T @ theta, bias)


def replace_head(model: Any, theta: FloatArray, bias: FloatArray | None = None) -> None:
    """Change the head of a sequence classifier so that it returns θᵀ·states.

    Args:
        model: changed in place.
        theta: ``(hidden, k)``.
        bias: of a head that has one, ``(k,)``; zeros by default.
    """
    import torch

    name, head = classifier_head(model)
    kept = torch.nn.Linear(len(theta), theta.shape[1], bias=head.bias is not None, device=head.weight.device)
    with torch.no_grad():
        kept.weight.copy_(torch.as_tensor(np.ascontiguousarray(theta.T)))
        if kept.bias is not None:
            kept.bias.copy_(torch.as_tensor(np.zeros(theta.shape[1]) if bias is None else bias))
    model.set_submodule(name, kept)
    model.num_labels = model.config.num_labels = theta.shape[1]
