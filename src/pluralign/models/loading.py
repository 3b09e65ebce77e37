"""Pretrained models: finding their folders, and loading them with transformers."""

import importlib.util
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pluralign.core.errors import DataError, MissingExtraError
from pluralign.core.hub import hub_files, hub_folder
from pluralign.core.text import one_line
from pluralign.models.batches import BATCH_TOKENS
from pluralign.models.bundled import smollm2_folder
from pluralign.models.identity import CONSOLIDATED, OTHER_FORMATS, model_files

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
