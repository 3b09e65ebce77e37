"""Identity of model folders: contents count; names of folders and modification times do not."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_classifier import write_bert

from pluralign.core.errors import DataError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.learning.fit import fit
from pluralign.text import loading as identity
from pluralign.text.encoders import load_encoder
from pluralign.text.features import TextFeatures
from pluralign.text.loading import earlier_folder_identity, folder_identity, hub_source
from pluralign.text.store import FeaturesFile, _check_same_features
from pluralign.votes.town_hall.town_hall import town_hall

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_folder(folder: Path, weights: bytes = b"1234") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"num_hidden_layers": 2}')
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def write_tensors(path: Path, rows: dict[str, int], seed: int = 0) -> Path:
    from safetensors.numpy import save_file

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
    for name in ("README.md", ".gitattributes", "pytorch_model.bin", "onnx/config.json", ".cache/huggingface/a.json"):
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
    monkeypatch.setattr(identity, "WHOLE_BYTES", 1000)
    shapes = {"body": 9000, "score": 1}
    folder = write_folder(tmp_path / "model")
    path = write_tensors(folder / "model.safetensors", shapes)
    seen = {folder_identity(folder)}
    data = path.read_bytes()
    path.write_bytes(data[:-4] + b"\x00\x00\x00\x01")
    seen.add(folder_identity(folder))
    write_tensors(path, shapes, seed=1)
    seen.add(folder_identity(folder))
    assert len(seen) == 3, "a small head and a new training with the same shapes are noticed"
    write_tensors(path, shapes)
    assert folder_identity(folder) in seen


def test_a_large_file_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity, "SAMPLE_BYTES", 2000)
    path = write_tensors(tmp_path / "model.safetensors", {f"layer {n}": 500 for n in range(20)})
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    blocks = identity._blocks(data[8:start], start, len(data))
    assert len(blocks) == 20
    assert sum(length for _, length in blocks) <= 2000
    torn = identity._blocks(b"{", start, len(data))
    assert all(first >= 0 and first + length <= len(data) for first, length in torn)
    path.write_bytes(b"\xff" * 2000)  # no safetensors: its header would be longer than the file
    assert folder_identity(tmp_path).startswith(identity.PREFIX)


def test_a_snapshot_of_the_hub_has_a_repository_and_a_commit(tmp_path: Path) -> None:
    folder = tmp_path / "models--my-org--my--model" / "snapshots" / COMMIT
    assert hub_source(folder) == ("my-org/my--model", COMMIT)
    assert hub_source(folder / "1_Pooling") is None
    assert hub_source(tmp_path) is None


# --- ensembles travel -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("encoder") / "tiny-bert")


@pytest.fixture(scope="module")
def fitted(bert: Path) -> RewardEnsemble:
    votes = town_hall(60).preferences
    return fit(votes, k=2, encoder=str(bert), surface=False, target="votes")


ITEMS = [("tea ?", "yes ."), ("tea ?", "no , never .")]


@pytest.mark.slow
def test_an_ensemble_accepts_a_copy_of_its_encoder_and_refuses_changed_weights(
    fitted: RewardEnsemble, bert: Path, tmp_path: Path
) -> None:
    shutil.copytree(bert, tmp_path / "moved", copy_function=shutil.copyfile)
    assert isinstance(fitted.features, TextFeatures)
    moved = replace(fitted, features=replace(fitted.features, encoder=str(tmp_path / "moved")))
    np.testing.assert_allclose(moved.rewards(ITEMS), fitted.rewards(ITEMS))
    weights = tmp_path / "moved" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DataError, match=r"is not the one the ensemble was fitted with; restore the original"):
        moved.rewards(ITEMS)


@pytest.mark.slow
def test_an_identity_by_modification_times_is_accepted_while_it_matches(
    fitted: RewardEnsemble, bert: Path, tmp_path: Path
) -> None:
    shutil.copytree(bert, tmp_path / "old")
    encoder = load_encoder(str(tmp_path / "old"))
    assert encoder is not None
    assert isinstance(fitted.features, TextFeatures)
    earlier = f"{earlier_folder_identity(tmp_path / 'old')}/{encoder.identity.partition('/')[2]}"
    features = replace(fitted.features, encoder=str(tmp_path / "old"), identity=earlier)
    old = replace(fitted, features=features)
    np.testing.assert_allclose(old.rewards(ITEMS), fitted.rewards(ITEMS))
    loaded = features.load_checked()
    assert loaded is not None
    assert loaded.identity == earlier, "vectors that are cached under the earlier identity are used"
    stored = FeaturesFile(1, 1, 1, str(bert), "mean", False, earlier)
    _check_same_features(tmp_path, stored, replace(features, identity=""))
    os.utime(tmp_path / "old" / "model.safetensors", ns=(0, 1))
    with pytest.raises(DataError, match=r"modification times .*; copy the model with its times .*, or fit again"):
        old.rewards(ITEMS)


@pytest.mark.slow
def test_an_encoder_of_the_hub_is_saved_with_its_commit_and_loaded_at_it(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--my-org--bert" / "snapshots" / COMMIT
    shutil.copytree(bert, snapshot)
    asked: list[tuple[str, str | None]] = []

    def download(name: str, *, revision: str | None = None, **_: object) -> str:
        asked.append((name, revision))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    ensemble = fit(
        town_hall(60).preferences, k=2, encoder="my-org/bert", surface=False, target="votes", folder=tmp_path / "out"
    )
    described = json.loads((tmp_path / "out" / "ensemble.json").read_text())["features"]
    assert (described["hub_id"], described["revision"]) == ("my-org/bert", COMMIT)
    assert asked[0] == ("my-org/bert", None), "the first time it is the newest"
    asked.clear()
    np.testing.assert_allclose(RewardEnsemble.load(tmp_path / "out").rewards(ITEMS), ensemble.rewards(ITEMS))
    assert set(asked) == {("my-org/bert", COMMIT)}
    local = TextFeatures(str(snapshot)).with_identity()
    assert (local.hub_id, local.revision) == ("my-org/bert", COMMIT)
    asked.clear()
    replace(local, encoder="/another/machine/snapshot").load_checked()
    assert asked == [("my-org/bert", COMMIT)], "a missing folder is downloaded from where it came"


def test_minilm_is_saved_with_its_repository() -> None:
    assert TextFeatures("minilm").with_identity().hub_id == "sentence-transformers/all-MiniLM-L6-v2"
    assert "hub_id" not in TextFeatures("hashing").with_identity().to_json()
