"""Loading models: what is downloaded, and that transformers is silenced only while a model is loaded."""

import importlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pluralign.core.errors import DataError
from pluralign.text.loading import folder_identity, model_folder, quiet_transformers

LLAMA_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors", "model.safetensors.index.json", "original/consolidated.00.pth",
    "original/params.json", "original/tokenizer.model", "pytorch_model.bin", "consolidated.safetensors",
    "llama-Q4_K_M.gguf", "onnx/model.onnx", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "README.md",
)  # fmt: skip


# --- downloads --------------------------------------------------------------------------------------------------------


def hub_of(monkeypatch: pytest.MonkeyPatch, cache: Path, *files: str) -> None:
    """Let the hub have one repository with these files."""
    filtered = importlib.import_module("huggingface_hub.utils").filter_repo_objects

    def download(_: str, *, ignore_patterns: list[str], **__: Any) -> str:
        for name in filtered(files, ignore_patterns=ignore_patterns):
            (cache / name).parent.mkdir(parents=True, exist_ok=True)
            (cache / name).write_text("{}")
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: list(files))


def test_weights_are_downloaded_in_one_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_of(monkeypatch, tmp_path, *LLAMA_FILES)
    model_folder("meta-llama/llama")
    kept = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert kept == {
        "config.json", "generation_config.json", "tokenizer.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "model.safetensors.index.json", "README.md",
    }  # fmt: skip


def test_a_copy_with_other_formats_is_the_same_model(tmp_path: Path) -> None:
    for folder, names in (("snapshot", ["config.json", "model.safetensors"]), ("clone", LLAMA_FILES)):
        for name in {"config.json", "model.safetensors"} | set(names) - set(LLAMA_FILES[1:6]):
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text("{}")
    assert folder_identity(tmp_path / "snapshot") == folder_identity(tmp_path / "clone")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["config.json", "model-Q4.gguf"], ", only .gguf files"),
        (["config.json", "pytorch_model.bin", "original/consolidated.00.pth"], ", only .bin and .pth files"),
        (["config.json"], ""),
    ],
)
def test_a_repository_without_safetensors_is_one_sentence(
    files: list[str], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_of(monkeypatch, tmp_path, *files)
    with pytest.raises(DataError) as caught:
        model_folder("my-org/my-model")
    assert str(caught.value) == (
        f"hf:my-org/my-model: it has no safetensors weights{found}; name another repository, or convert the model with "
        "transformers: save_pretrained writes safetensors."
    )


# --- quiet blocks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def settings() -> Iterator[Any]:
    """The verbosity and progress bar switches of transformers, restored after the test."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield logging
    logging.set_verbosity(verbosity)
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()


@pytest.mark.slow
@pytest.mark.parametrize("bars", [True, False])
def test_quiet_blocks_restore_the_settings_of_the_caller(settings: Any, bars: bool) -> None:
    settings.set_verbosity_info()
    (settings.enable_progress_bar if bars else settings.disable_progress_bar)()
    with quiet_transformers(), quiet_transformers():
        assert settings.get_verbosity() == settings.ERROR
        assert not settings.is_progress_bar_enabled()
    assert settings.get_verbosity() == settings.INFO
    assert settings.is_progress_bar_enabled() == bars


@pytest.mark.slow
def test_quiet_blocks_that_overlap_in_two_threads_restore_the_settings(settings: Any) -> None:
    settings.set_verbosity_info()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with quiet_transformers():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with quiet_transformers():
        thread.start()
        assert entered.wait(10)
    assert settings.get_verbosity() == settings.ERROR, "the other block is still open"
    leave.set()
    thread.join()
    assert settings.get_verbosity() == settings.INFO
