"""Loading models: what is downloaded, what identifies a folder, and that transformers is silenced while it loads."""

import importlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file
from test_classifier import write_bert
from tiny import write_backbone, write_sentence_encoder

from pluralign import DataError, RewardEnsemble, fit, town_hall
from pluralign.answering.policies import Adapters
from pluralign.learning.backbone.base import load_base
from pluralign.text import loading
from pluralign.text.causal import LocalModel
from pluralign.text.encoders import TextFeatures, encode, load_encoder
from pluralign.text.loading import folder_identity, hub_source, load_model, model_folder, quiet_transformers

LLAMA_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors", "model.safetensors.index.json", "original/consolidated.00.pth",
    "original/params.json", "original/tokenizer.model", "pytorch_model.bin", "consolidated.safetensors",
    "llama-Q4_K_M.gguf", "onnx/model.onnx", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "README.md",
)  # fmt: skip

EMPTY_WEIGHTS = save({})
ITEMS = [("tea ?", "yes ."), ("tea ?", "no , never .")]


# --- downloads --------------------------------------------------------------------------------------------------------


def hub_of(monkeypatch: pytest.MonkeyPatch, cache: Path, *files: str) -> None:
    """Let the hub have one repository with these files."""
    filtered = importlib.import_module("huggingface_hub.utils").filter_repo_objects

    def download(_: str, *, ignore_patterns: list[str], **__: Any) -> str:
        for name in filtered(files, ignore_patterns=ignore_patterns):
            (cache / name).parent.mkdir(parents=True, exist_ok=True)
            (cache / name).write_bytes(EMPTY_WEIGHTS if name.endswith("safetensors") else b"{}")
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: list(files))


def test_weights_are_downloaded_in_one_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_of(monkeypatch, tmp_path, *LLAMA_FILES)
    model_folder("meta-llama/llama")
    kept = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert kept == {*LLAMA_FILES[:6], "README.md"}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["config.json", "model-Q4.gguf"], ", only .gguf files"),
        (["config.json", "pytorch_model.bin", "original/consolidated.00.pth"], ", only .bin and .pth files"),
        (["config.json"], ""),
    ],
)
def test_no_safetensors_is_named(files: list[str], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_of(monkeypatch, tmp_path, *files)
    with pytest.raises(DataError) as caught:
        model_folder("my-org/my-model")
    assert str(caught.value).startswith(f"hf:my-org/my-model: it has no safetensors weights{found}; name another repos")


# --- hostile and damaged folders: one sentence that names the file, before any library reads the folder ---------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence encoder and a language model, with Python files that leave a mark when they are imported."""
    folder = tmp_path_factory.mktemp("sound")
    for model in (write_sentence_encoder(folder / "encoder"), write_backbone(folder / "causal")):
        (model / "evil.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    return folder


def changed(path: Path, **values: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | values))


def add_module(folder: Path, kind: str, path: str = "2_Other") -> None:
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"idx": 2, "name": "2", "path": path, "type": kind}]))


DOORS: dict[str, Callable[[Path], Any]] = {
    "encoder": lambda folder: encode(ITEMS, load_encoder(str(folder)), cache=False),
    "backbone": lambda folder: load_base(str(folder), 16, ITEMS),
    "reward model": lambda folder: load_model(folder, "AutoModelForSequenceClassification"),
    "generator": lambda folder: LocalModel(str(folder)).prepare(),
    "policy": lambda folder: Adapters(str(folder)).load(None),
}
EVIL = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"auto_map": EVIL}),
        ("tokenizer_config.json", {"auto_map": EVIL, "tokenizer_class": "Evil"}),
        ("tokenizer_config.json", {"tokenizer_class": "evil.Evil"}),
        ("processor_config.json", {"image_processor": {"auto_map": EVIL}}),
        ("sentence_bert_config.json", {"model_args": {"trust_remote_code": True}}),
        ("config.json", {"attn_implementation": "evil/kernel"}),
        ("2_Dense/config.json", {"activation_function": "evil.Evil"}),
        ("2_Router/router_config.json", {"types": {"query": "evil.Evil"}}),
        ("2_Words/wordembedding_config.json", {"tokenizer_class": "sentence_transformers.base.model.torch"}),
        ("sentence_bert_config.json", {"tokenizer_name_or_path": "/elsewhere"}),
        ("sentence_bert_config.json", {"processor_kwargs": {"tokenizer_file": "/elsewhere/tokenizer.json"}}),
        ("sentence_bert_config.json", {"model_args": {"use_safetensors": False}}),
    ],
    ids=str,
)
def test_a_model_folder_runs_no_code(sound: Path, tmp_path: Path, door: str, file: str, values: dict[str, Any]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sound / ("encoder" if door == "encoder" else "causal"), folder)
    changed(folder / file, **values)
    with pytest.raises(DataError, match=rf"{file}: its \w+ \(.*\) names code outside the known libraries"):
        DOORS[door](folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("door", DOORS)
def test_a_model_folder_is_read_alone(sound: Path, tmp_path: Path, door: str) -> None:
    """No link, index or adapter makes a library read files outside the folder, or pickled ones."""
    source, folder = sound / ("encoder" if door == "encoder" else "causal"), tmp_path / "model"
    spoils: dict[str, Callable[[], Any]] = {
        "vocab.txt: it is a link out of": lambda: (folder / "vocab.txt").symlink_to(source / "tokenizer.json"),
        r"index\.json: its weight_map": lambda: changed(
            folder / "model.safetensors.index.json", weight_map={"a": "../encoder/model.safetensors"}
        ),
        "it holds an adapter": lambda: changed(folder / "0_Body" / "adapter_config.json", peft_type="LORA"),
        "no safetensors weights": lambda: (folder / "pytorch_model.bin").write_bytes(
            (folder / "model.safetensors").rename(folder / "other.safetensors").read_bytes()
        ),
    }
    for problem, spoil in spoils.items():
        shutil.copytree(source, folder)
        (folder / "0_Body").mkdir()
        spoil()
        with pytest.raises(DataError, match=problem):
            DOORS[door](folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("evil.Evil", "2_Other"),
        ("sentence_transformers.util.misc.import_from_string", "2_Other"),
        ("sentence_transformers.models.Dense", "../elsewhere"),
    ],
)
def test_modules_of_a_sentence_encoder_are_known_ones(sound: Path, tmp_path: Path, kind: str, path: str) -> None:
    shutil.copytree(sound / "encoder", tmp_path / "model")
    add_module(tmp_path / "model", kind, path)
    with pytest.raises(DataError, match=r"modules\.json: its (type|path) \(.*\) names code"):
        DOORS["encoder"](tmp_path / "model")
    assert not (tmp_path / "model" / "ran").exists()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "its megatron_config"),
        ({"auto_mapping": {"parent_library": "evil", "base_model_class": "Evil"}}, "its parent_library"),
        ({"peft_type": "XLORA"}, "its peft_type"),
    ],
)
def test_adapters_are_plain_lora(sound: Path, tmp_path: Path, values: dict[str, Any], sentence: str) -> None:
    adapter = tmp_path / "adapter"
    changed(adapter / "adapter_config.json", **{"peft_type": "LORA", "r": 2, **values})
    with pytest.raises(DataError, match=sentence):
        Adapters(str(sound / "causal")).load(adapter)
    shutil.copytree(sound / "causal", tmp_path / "model")
    shutil.copy(adapter / "adapter_config.json", tmp_path / "model")
    changed(tmp_path / "model" / "adapter_config.json", peft_type="LORA", megatron_config=None, auto_mapping=None)
    with pytest.raises(DataError, match="it holds an adapter, not a whole model"):
        DOORS["generator"](tmp_path / "model")


def pickled(weights: Path) -> None:
    weights.rename(weights.with_name("pytorch_model.bin"))


DAMAGES: list[tuple[str, str | bytes | Callable[[Path], Any], str]] = [
    *[(name, "", rf"{name}: it is not a JSON object; copy") for name in ("config.json", "tokenizer.json")],
    *[(name, "[3]", rf"{name}: it is not a JSON object; copy") for name in ("config.json", "tokenizer_config.json")],
    ("config.json", '{"a":' * 100_000, r"config\.json: it is not a JSON object; copy"),
    ("config.json", "{}", r"encoder: it cannot be loaded \(.*\); name a folder with config\.json"),
    ("config.json", Path.unlink, r"encoder: there is no config\.json in it; name a transformers model"),
    ("config.json", lambda path: changed(path, num_hidden_layers=0), r"config\.json gives 0 layers; copy"),
    ("config.json", lambda path: changed(path, num_hidden_layers=5), "weights have 2 layers"),
    ("config.json", lambda path: changed(path, num_attention_heads=3), "it cannot encode these texts"),
    ("modules.json", "{", r"modules\.json: it is not a JSON list; copy"),
    ("modules.json", "[null]", r"encoder: it cannot be loaded"),
    ("1_Pooling/config.json", b"\xff", r"1_Pooling/config\.json: it is not a JSON object; copy"),
    ("1_Pooling/config.json", Path.unlink, r"encoder: it cannot be loaded"),
    ("tokenizer.json", "{}", r"encoder: it cannot be loaded \(.*\); name a folder with .*tokenizer\.json"),
    ("tokenizer.json", Path.unlink, r"encoder: it cannot be loaded \(.*\); name a folder with .*tokenizer\.json"),
    ("model.safetensors", b"", r"model\.safetensors: it is damaged \(.*\); copy or download"),
    ("model.safetensors", lambda path: os.truncate(path, 3000), r"model\.safetensors: it is damaged \(.*\); copy"),
    ("model.safetensors", Path.unlink, r"encoder: it cannot be loaded \(.*\); name a folder with .*safetensors"),
    ("model.safetensors", pickled, r"encoder: it has no safetensors weights, only \.bin files; name another"),
]


@pytest.mark.parametrize(
    ("file", "damage", "sentence"), DAMAGES, ids=[f"{i} {one[0]}" for i, one in enumerate(DAMAGES)]
)
def test_a_damaged_encoder_is_one_sentence(sound: Path, tmp_path: Path, file: str, damage: Any, sentence: str) -> None:
    shutil.copytree(sound / "encoder", tmp_path / "encoder")
    path = tmp_path / "encoder" / file
    if callable(damage):
        damage(path)
    else:
        path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    with pytest.raises(DataError, match=sentence) as caught:
        DOORS["encoder"](tmp_path / "encoder")
    assert str(tmp_path / "encoder") in str(caught.value)


def test_pickled_weights_beside_safetensors_are_not_read(sound: Path, tmp_path: Path) -> None:
    """``do_lower_case`` is a setting that only sentence-transformers reads."""
    pair = [shutil.copytree(sound / "encoder", tmp_path / name) for name in ("plain", "pickled")]
    for folder in pair:
        changed(folder / "sentence_bert_config.json", do_lower_case=True, max_seq_length=32)
    (pair[1] / "pytorch_model.bin").write_bytes(b"not weights")
    np.testing.assert_array_equal(*map(DOORS["encoder"], pair))
    changed(pair[1] / "sentence_bert_config.json", model_args={"use_safetensors": False})
    with pytest.raises(DataError, match="use_safetensors"):
        DOORS["encoder"](pair[1])


def test_an_encoder_that_ignores_the_text_is_an_error_of_the_encoder(sound: Path, tmp_path: Path) -> None:
    for name in ("no tokenizer", "no weights"):
        shutil.copytree(sound / "encoder", tmp_path / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "no tokenizer" / name).unlink()
    with pytest.raises(DataError, match=r"no tokenizer: its tokenizer has no vocabulary.*; copy the tokenizer's files"):
        DOORS["encoder"](tmp_path / "no tokenizer")
    weights = load_file(tmp_path / "no weights" / "model.safetensors")
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    save_file(zeros, tmp_path / "no weights" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match="gives 4 different responses the same vector"):
        encode([("tea ?", text) for text in ("yes", "no", "never", "rum")], load_encoder(str(tmp_path / "no weights")))


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
def test_quiet_blocks_that_overlap_in_two_threads_restore_the_settings(settings: Any) -> None:
    settings.set_verbosity_info()
    settings.enable_progress_bar()
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
    assert not settings.is_progress_bar_enabled()
    leave.set()
    thread.join()
    assert settings.get_verbosity() == settings.INFO
    assert settings.is_progress_bar_enabled()


# --- identity: contents count; names of folders and modification times do not ----------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_folder(folder: Path, weights: bytes = b"1234") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"num_hidden_layers": 2}')
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def write_tensors(path: Path, rows: dict[str, int], seed: int = 0) -> Path:

    random = np.random.default_rng(seed)
    save_file({name: random.normal(size=(size, 64)).astype(np.float32) for name, size in rows.items()}, path)
    return path


def test_a_copy_with_another_name_and_other_times_is_the_same_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy" / "model.safetensors", ns=(0, 1))
    assert folder_identity(tmp_path / "copy") == folder_identity(folder)


def test_files_that_are_never_loaded_do_not_count(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    before = folder_identity(folder)
    for name in ("README.md", ".gitattributes", *LLAMA_FILES[6:], ".cache/huggingface/a.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    assert folder_identity(folder) == before
    (folder / "model.safetensors").unlink()
    only_bin = folder_identity(folder)
    (folder / "pytorch_model.bin").write_text("[]")
    assert folder_identity(folder) != only_bin, "without safetensors the other weights count"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "1_Pooling/config.json", "chat_template.jinja"])
def test_a_changed_file_is_another_model(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    before = folder_identity(folder)
    (folder / name).write_text("[]")
    assert folder_identity(folder) != before


def test_large_weights_are_sampled_in_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "WHOLE_BYTES", 1000)
    shapes = {"body": 9000, "score": 1}
    folder = write_folder(tmp_path / "model")
    path = folder / "model.safetensors"
    contents = [write_tensors(path, shapes, seed).read_bytes() for seed in (0, 1)]
    seen = []
    for data in (*contents, contents[0][:-4] + b"\x00\x00\x00\x01", contents[0]):
        path.write_bytes(data)
        loading._weights_hash.cache_clear()  # the clock of the file system is too coarse for two writes at once
        seen.append(folder_identity(folder))
    assert len(set(seen)) == 3, "a small head and a new training with the same shapes are noticed"
    assert seen[0] == seen[-1]


def test_a_large_file_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(loading, "SAMPLE_BYTES", 2000)
    path = write_tensors(tmp_path / "model.safetensors", {f"layer {n}": 500 for n in range(20)})
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    blocks = loading._blocks(data[8:start], start, len(data))
    assert len(blocks) == 20
    assert sum(length for _, length in blocks) <= 2000
    torn = loading._blocks(b"{", start, len(data))
    assert all(first >= 0 and first + length <= len(data) for first, length in torn)
    path.write_bytes(b"\xff" * 2000)  # no safetensors: its header would be longer than the file
    assert folder_identity(tmp_path).startswith("content-")


def test_a_snapshot_of_the_hub_has_a_repository_and_a_commit(tmp_path: Path) -> None:
    folder = tmp_path / "models--my-org--my--model" / "snapshots" / COMMIT
    assert hub_source(folder) == ("my-org/my--model", COMMIT)
    assert hub_source(folder / "1_Pooling") is None
    assert hub_source(tmp_path) is None


# --- ensembles travel -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("encoder") / "tiny-bert")


@pytest.mark.slow
def test_an_encoder_of_the_hub_keeps_its_commit(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--my-org--bert" / "snapshots" / COMMIT
    shutil.copytree(bert, snapshot)
    asked: list[tuple[str, str | None]] = []

    def download(name: str, *, revision: str | None = None, **_: object) -> str:
        asked.append((name, revision))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    options: Any = {"k": 2, "encoder": "my-org/bert", "surface": False, "target": "votes"}
    ensemble = fit(town_hall(60).preferences, **options, folder=tmp_path / "out")
    described = json.loads((tmp_path / "out" / "ensemble.json").read_text())["features"]
    assert (described["hub_id"], described["revision"]) == ("my-org/bert", COMMIT)
    assert asked[0] == ("my-org/bert", None), "the first time it is the newest"
    asked.clear()
    np.testing.assert_allclose(RewardEnsemble.load(tmp_path / "out").rewards(ITEMS), ensemble.rewards(ITEMS))
    assert set(asked) == {("my-org/bert", COMMIT)}
    local = TextFeatures(str(snapshot)).resolved()
    assert (local.hub_id, local.revision) == ("my-org/bert", COMMIT)
    asked.clear()
    replace(local, encoder="/another/machine/snapshot").load_checked()
    assert asked == [("my-org/bert", COMMIT)], "a missing folder is downloaded from where it came"


def test_minilm_is_saved_with_its_repository() -> None:
    assert TextFeatures("minilm").resolved().hub_id == "sentence-transformers/all-MiniLM-L6-v2"
    assert "hub_id" not in TextFeatures("hashing").resolved().to_json()


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("native", "chosen"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_bfloat16_where_it_is_native(native: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loading.choose_precision("bfloat16") == "bfloat16"
    assert loading.choose_precision("auto") == "float32", "on a CPU"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *, including_emulation: native or including_emulation)
    assert loading.choose_precision("auto") == chosen
    assert loading.choose_precision("float32") == "float32"
