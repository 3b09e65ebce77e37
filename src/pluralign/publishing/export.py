"""Exports: an ensemble, or one of its members, as a folder that works without this package; and uploads of ensembles.

Fine-tuned ensembles become reward models of transformers. Ensembles on frozen features get a script of their own.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, UsageError, did_you_mean
from pluralign.core.files import atomic_folder, disk_errors_as_data_error, refuse_foreign
from pluralign.core.hub import HUB_ID, check_upload, upload_model
from pluralign.core.json_values import JsonObject, to_json
from pluralign.core.text import counted
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import ENSEMBLE_FILE
from pluralign.ensemble.held_out import has_held_out, load_held_out
from pluralign.ensemble.record import FitRecord
from pluralign.ensemble.verdict import main_evaluation, standing
from pluralign.measuring.cards import member_name, member_profiles
from pluralign.publishing.card import Kind, ModelCard, without_path
from pluralign.publishing.standalone.reward_model import RewardModel
from pluralign.text import classifier, loading
from pluralign.text.encoders import ENCODER_FOLDER, HashingEncoder, TextFeatures
from pluralign.text.finetuned import FinetunedFeatures, head_weights, load_finetuned, model_folders
from pluralign.text.transformer import ModelEncoder
from pluralign.theory.intervals import ENOUGH_CLUSTERS
from pluralign.votes.prompts import Item, Message, Prompt

INDEX_FILE = "pluralign.json"
"""Index of an export: its members, their weights, the undecided share, and the version that wrote it."""
KNOWN_BASES = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct", "minilm": loading.MINILM_HUB_ID}
"""Hub ids of models that have a short name in this library."""


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
    warnings: list[str] = field(default_factory=list)
    """Reasons not to rely on the ensemble, as sentences."""


def base_id(base: str) -> str | None:
    """Return the hub id of a base model, or None for a local folder: local paths are not published.

    Example:
        >>> base_id("smollm2"), base_id("my-org/model"), base_id("/home/me/models/mine")
        ('HuggingFaceTB/SmolLM2-135M-Instruct', 'my-org/model', None)
    """
    if base in KNOWN_BASES:
        return KNOWN_BASES[base]
    if found := loading.hub_source(Path(base)):
        return found[0]
    return base if HUB_ID.fullmatch(base) and not Path(base).exists() else None


def export_warnings(record: FitRecord) -> list[str]:
    """Return reasons not to rely on an ensemble, as sentences: no figures, few prompts, or no better than ½."""
    evaluation = main_evaluation(record)
    if evaluation is None:
        return ["The calibration of this ensemble is unknown: there are no figures on held-out votes."]
    if evaluation.prompts < ENOUGH_CLUSTERS:
        few = f"{counted(evaluation.prompts, 'held-out prompt')}, and a verdict needs at least {ENOUGH_CLUSTERS}"
        return [f"The calibration of this ensemble is uncertain: {few}."]
    half = evaluation.baselines.get("constant_half")
    found = standing(half.difference) if half else "ahead"
    if half is None or found == "ahead":
        return []
    worse = "worse than" if found == "behind" else "not significantly better than"
    scores = f"Brier score {evaluation.test.brier:.4f} against {half.brier:.4f}"
    return [f"On held-out votes this ensemble is {worse} predicting ½ for every pair ({scores})."]


def refuse_place(folder: Path, output: Path, overwrite: bool) -> None:
    """Raise UsageError unless ``output`` can hold an export of the ensemble in ``folder``."""
    inside, outside = folder.resolve(), output.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise UsageError(f"{output} must be outside the ensemble's folder {folder}, and not contain it.")
    refuse_foreign(output, *[INDEX_FILE] * overwrite, overwrite=None if overwrite else False)


def index_of(card: ModelCard, groups: Mapping[str, Sequence[int]]) -> JsonObject:
    """Return the index of an export: base, names and figures, and the members in each subfolder."""
    rows = [asdict(card.rows[j]) | {"folder": part} for part, chosen in groups.items() for j in chosen]
    about = {"format": "pluralign-export", "pluralign": __version__, "base": card.base}
    return {**about, "undecided": card.ensemble.undecided, "members": rows}


def write_index(place: Path, index: Mapping[str, Any]) -> None:
    """Write the index of an export into its folder."""
    (place / INDEX_FILE).write_text(json.dumps(to_json(index), indent=1, ensure_ascii=False), encoding="utf-8")


# --- Ensembles on frozen features as folders that work without this package.


SCRIPT = "reward_model.py"
COPIED = ("pooling", "surface")
"""Modules of ``text`` whose code becomes part of the script."""
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

    def __init__(self, encoder: str, reason: str) -> None:
        super().__init__(
            f"the encoder {encoder} needs sentence-transformers ({reason}), so its ensemble cannot be exported: "
            "use RewardEnsemble.push_to_hub, or fit with other --layers."
        )


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
    features = features if features.hub_id else replace(features.resolved(), identity=features.identity)
    if with_encoder and isinstance(encoder, ModelEncoder):
        loading.copy_model(encoder.folder, place / ENCODER_FOLDER)
        copied = replace(features, encoder=str(place / ENCODER_FOLDER)).load()
        features = replace(features, encoder=ENCODER_FOLDER, identity=copied.identity if copied else "", own=False)
    elif features.hub_id and features.encoder not in loading.BUNDLED:
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
    found = str(place / ENCODER_FOLDER) if saved.encoder == ENCODER_FOLDER else saved.encoder
    ensemble, encoder = card.ensemble, replace(saved, encoder=found).load_checked()
    expected = ensemble.rewards(PROBES)
    reader, (prompt, response) = describe_reader(saved, encoder), PROBES[0]
    index = index_of(card, {".": range(ensemble.k)}) | {
        "arrays": json.loads((place / ENSEMBLE_FILE).read_text(encoding="utf-8"))["arrays"]["file"],
        "reader": reader,
        "check": {"prompt": prompt, "response": response, "rewards": expected[0].tolist()},
    }
    local = reader | ({"hub_id": str(encoder.folder), "revision": ""} if isinstance(encoder, ModelEncoder) else {})
    model = RewardModel(place, {**index, "reader": local}, ensemble.members.arrays())
    try:
        rewards = model.rewards([(Prompt(asked).json, text) for asked, text in PROBES])
    except ValueError:  # raised by the script for its stored text
        raise NotExpressibleError(card.base, "its rewards differ") from None
    difference = float(np.max(np.abs(rewards - expected) / (1 + np.abs(expected))))
    if difference > (HALF_TOLERANCE if getattr(encoder, "half", False) else TOLERANCE):
        raise NotExpressibleError(card.base, f"its rewards differ by {difference:.2g}")
    write_index(place, index)
    (place / SCRIPT).write_text(script_text(), encoding="utf-8")


def published_record(record: FitRecord) -> FitRecord:
    """Return the record of a fit without local paths and without texts of the votes."""
    record = replace(record, insight=record.insight and record.insight.without_texts())
    return FitRecord.from_json(without_path(record.to_json()))


def describe_reader(features: TextFeatures, encoder: Any) -> JsonObject:
    """Return what the script must know to compute the features of a text."""
    reader: JsonObject = {"kind": "none", "surface": features.surface}
    if isinstance(encoder, HashingEncoder):
        return reader | {"kind": "hashing", "dimension": encoder.dimension}
    if not isinstance(encoder, ModelEncoder):
        return reader
    try:
        pooling, unit_length = (encoder.pooling, False) if encoder.layers else loading.own_pooling(encoder.folder)
    except loading.UnsupportedError as reason:
        raise NotExpressibleError(encoder.folder.name, str(reason)) from None
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


def script_text() -> str:
    """Return the text of the script: the module of the package with the code that it imports from the package."""
    package = files("pluralign")
    text = package.joinpath("publishing/standalone/reward_model.py").read_text(encoding="utf-8")
    for name in COPIED:
        source = package.joinpath(f"text/{name}.py").read_text(encoding="utf-8")
        _, _, code = source.partition('"""\n\n')  # without the docstring of the module
        before, _, after = text.partition(f"from pluralign.text.{name} import ")
        _, _, after = after.partition("\n")
        text = f"{before}# {name} features\n{code.strip()}\n\n{after}"
    return text


# --- ``export``: write an ensemble, or one of its members, as a folder that works without this package.


Precision = Literal["float32", "bfloat16", "float16"]

RAW_SCORES = {"activation_fn": "torch.nn.modules.linear.Identity"}
CROSS_ENCODER_FILES: JsonObject = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    ],
    "sentence_bert_config.json": {
        "transformer_task": "sequence-classification",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "scores",
    },
    "config_sentence_transformers.json": {"model_type": "CrossEncoder", **RAW_SCORES},
}
"""Files of a pair model for ``CrossEncoder`` of sentence-transformers: pairs of texts, no chat template, raw scores."""


def export(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    member: int | Literal["all"] | None = None,
    dtype: Precision = "float32",
    overwrite: bool = False,
    push_to_hub: str | None = None,
    public: bool = False,
    commands: Sequence[Sequence[str]] = (),
) -> Export:
    """Write an ensemble as a folder that works without Pluralign.

    A fine-tuned ensemble becomes reward models of transformers. Without ``member`` it becomes one
    model with one output per member. Its configuration holds their weights, their names and the undecided share. The
    members of a stagewise ensemble are separate models and cannot be exported so.

    An ensemble on frozen features becomes a folder with its arrays, its encoder, and ``reward_model.py``, which
    computes its rewards with torch and transformers.

    Args:
        folder: folder of the ensemble, written by ``fit``.
        output: the folder to write.
        member: export only this member, as a model with one output; ``all``: each member as such a model, in the
            folders ``member-J``.
        dtype: data type of the weights. float32 reproduces the ensemble's rewards; half precision is half as large.
        overwrite: replace an earlier export.
        push_to_hub: upload the export to this repository on the Hugging Face hub.
        public: make a newly created repository public.
        commands: the commands that reproduce the export, each as a list of words, for the model card.
    """
    folder, output = Path(folder), Path(output)
    ensemble = RewardEnsemble.load(folder)
    features = ensemble.features
    if member not in (None, "all", *range(ensemble.k)):
        raise UsageError(f"member must be 0 to {ensemble.k - 1}, or all, not {member}.")
    if dtype not in get_args(Precision):
        raise UsageError(f"dtype cannot be {dtype!r}; {did_you_mean(dtype, get_args(Precision))}.")
    if isinstance(features, TextFeatures):
        if member is not None or dtype != "float32":
            whole = "is exported whole and in float32, without --member and --dtype"
            raise UsageError(f"an ensemble on frozen features {whole}: reward_model.py returns all members' rewards.")
        base, known = encoder_name(features), features.hub_id or base_id(features.encoder)
    else:
        if features.method == "stagewise" and member is None:
            apart = "the members of a stagewise ensemble are separate models and cannot be exported as one"
            raise UsageError(f"{apart}: export one with --member J, or each in its own folder with --member all.")
        if features.with_current_hashes().identity != features.identity:
            remedy = "copy the folder again, or fit again"
            raise DataError("a fine-tuned model was changed: its hash differs", file=str(folder), remedy=remedy)
        base, known = base_id(features.base) or PurePath(features.base).name, base_id(features.base)
    refuse_place(folder, output, overwrite)
    if push_to_hub:
        check_upload(push_to_hub)
    members = [member] if isinstance(member, int) else list(range(ensemble.k))
    names = [member_name(j) for j in range(ensemble.k)]
    if has_held_out(folder):
        names = [card.name for card in member_profiles(ensemble.weights, load_held_out(folder, ensemble))]
    card = ModelCard(ensemble, names, base, known, output.resolve().name, push_to_hub or "", commands)
    groups = {f"member-{j}": [j] for j in members} if member == "all" else {".": members}
    with disk_errors_as_data_error(output), atomic_folder(output) as partial:
        if isinstance(features, TextFeatures):
            write_script(card, partial, save_frozen(ensemble, features, partial, with_encoder=True))
            (partial / "README.md").write_text(card.text("frozen", members), encoding="utf-8")
        else:
            _write_models(card, partial, groups, "ensemble" if member is None else "member", dtype)
            if member == "all":
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


# --- models -----------------------------------------------------------------------------------------------------------


def _write_models(card: ModelCard, partial: Path, groups: dict[str, list[int]], kind: Kind, dtype: Precision) -> None:
    """Write the models, their cards and the index."""
    features: Any = card.ensemble.features
    for place, chosen in groups.items():
        model, tokenizer = _model_of(features, card.ensemble.members.head()[:, chosen])
        reads = classifier.reads_of(tokenizer)
        _describe(model.config, card, chosen, kind, reads)
        _save(model, tokenizer, partial / place, dtype, features.max_length)
        limit = int(tokenizer.model_max_length)
        text = card.text(kind, chosen, reads, place, ends_in_padding(model, tokenizer), limit)
        (partial / place / "README.md").write_text(text, encoding="utf-8")
    write_index(partial, index_of(card, groups))


def _model_of(features: FinetunedFeatures, theta: FloatArray) -> tuple[Any, Any]:
    """Return one model with one output per column of θ, and its tokenizer. Members of states replace the head."""
    places = model_folders(features)
    if features.method == "stagewise":
        (own,) = np.flatnonzero(theta[:, 0])
        places, theta = [places[own]], theta[own : own + 1]
    model, tokenizer = load_finetuned(places[0], features)
    if features.lora:
        head_weights(features, places[0])  # without its head, transformers would make a random one
        model = model.merge_and_unload()
    replace_head(model, theta, of_outputs=features.method == "stagewise")
    return model, tokenizer


def _describe(config: Any, card: ModelCard, chosen: Sequence[int], kind: Kind, reads: classifier.Reads) -> None:
    """Describe the outputs of a model in its configuration."""
    ensemble, labels = card.ensemble, [card.names[j] for j in chosen]
    config.id2label, config.label2id = dict(enumerate(labels)), {name: i for i, name in enumerate(labels)}
    # Rewards are not probabilities. This setting keeps vLLM and pipelines from applying a softmax, and scorers of pairs
    # of texts (vLLM's /score, CrossEncoder of sentence-transformers) from applying a sigmoid.
    config.problem_type = "regression"
    if reads == "pair":
        config.sentence_transformers = dict(RAW_SCORES)
    config.pluralign, config.pluralign_names = __version__, labels
    if kind == "ensemble":
        setattr(config, classifier.WEIGHTS_KEY, ensemble.weights[list(chosen)].tolist())
        setattr(config, classifier.UNDECIDED_KEY, ensemble.undecided)
        config.pluralign_temperature = ensemble.temperature
    else:
        config.pluralign_member, config.pluralign_member_weight = chosen[0], float(ensemble.weights[chosen[0]])


def _save(model: Any, tokenizer: Any, place: Path, dtype: Precision, max_length: int) -> None:
    import torch

    place.mkdir(exist_ok=True)
    # Long inputs are truncated at the beginning of the prompt, as in the fit of the ensemble.
    tokenizer.truncation_side, tokenizer.padding_side = "left", "right"
    tokenizer.init_kwargs |= {"truncation_side": "left", "padding_side": "right"}  # otherwise they are not saved
    tokenizer.model_max_length = min(int(tokenizer.model_max_length), max_length)
    reads = classifier.reads_of(tokenizer)
    if reads != "chat":  # TRL renders messages with a template, and ends plain texts with an end token
        tokenizer.chat_template = classifier.added_chat_template(tokenizer)
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.sep_token or tokenizer.pad_token
    if reads == "pair":
        for name, content in CROSS_ENCODER_FILES.items():
            (place / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    with loading.quiet_transformers():
        model.to("cpu", getattr(torch, dtype)).save_pretrained(place)
        tokenizer.save_pretrained(place)
    for path in place.glob("*.safetensors"):  # safetensors writes files that only their owner can read
        path.chmod((place / "config.json").stat().st_mode)


def ends_in_padding(model: Any, tokenizer: Any) -> bool:
    """Return whether a decoder's inputs end in its padding token, so that it reads the token before.

    This happens if the token at the end of a turn is also the padding token. vLLM has no padding: it reads the last
    token.
    """
    last = classifier.classifier_tokens(tokenizer, ("Tea?", "Yes."), tokenizer.model_max_length)["input_ids"][-1]
    return bool(classifier.reads_of(tokenizer) != "pair" and last == model.config.get_text_config().pad_token_id)


def replace_head(model: Any, theta: FloatArray, *, of_outputs: bool = False) -> None:
    """Change the head of a sequence classifier so that it returns θᵀ·states, or θᵀ·outputs.

    Args:
        model: changed in place.
        theta: ``(hidden, k)``; of outputs, ``(outputs, k)``: then W' = θᵀ W and b' = θᵀ b.
        of_outputs: whether θ combines the outputs of the old head.
    """
    import torch

    name, head = classifier.classifier_head(model)
    bias = np.zeros(theta.shape[1])
    if of_outputs:
        bias = bias if head.bias is None else theta.T @ head.bias.detach().double().cpu().numpy()
        theta = head.weight.detach().double().cpu().numpy().T @ theta
    kept = torch.nn.Linear(len(theta), theta.shape[1], bias=head.bias is not None, device=head.weight.device)
    with torch.no_grad():
        kept.weight.copy_(torch.as_tensor(np.ascontiguousarray(theta.T)))
        if kept.bias is not None:
            kept.bias.copy_(torch.as_tensor(bias))
    model.set_submodule(name, kept)
    model.num_labels = model.config.num_labels = theta.shape[1]


# --- ``RewardEnsemble.push_to_hub``: upload an ensemble that ``RewardEnsemble.from_pretrained`` loads again.


def push_ensemble(
    ensemble: RewardEnsemble, name: str, *, private: bool = True, names: Sequence[str] | None = None
) -> str:
    """Upload an ensemble with a model card, and return the URL: see ``RewardEnsemble.push_to_hub``."""
    check_upload(name)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / PurePath(name).name
        place.mkdir()
        _write_shared(ensemble, place, name, names)
        return upload_model(place, name, private=private, kept=False)


def _write_shared(ensemble: RewardEnsemble, place: Path, hub_id: str, names: Sequence[str] | None) -> None:
    """Write the files of an upload into an empty folder."""
    names = [member_name(j) for j in range(ensemble.k)] if names is None else list(names)
    if len(names) != ensemble.k:
        raise UsageError(f"names must have one entry per member, {ensemble.k}, not {len(names)}.")
    features, members = ensemble.features, range(ensemble.k)
    if isinstance(features, TextFeatures):
        source = features if features.hub_id else features.resolved()
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
            need = f"the LoRA adapters need the base model {features.base}, which is not on the hub"
            raise UsageError(f"{need}: fit with a hub id, or use pluralign export --push-to-hub, which merges them.")
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
