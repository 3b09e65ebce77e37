"""Ensembles on the hub: what is uploaded loads again, and holds no votes, texts or local paths."""

import importlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_classifier import ITEMS, write_bert, write_llama
from test_frozen_export import make_ensemble
from test_transformers_export import pad_as_fit_does, save_ensemble, write_adapter

from pluralign import RewardEnsemble
from pluralign.core.errors import DataError, UsageError
from pluralign.publishing import export as frozen_export
from pluralign.text.features import TextFeatures
from pluralign.text.finetuned import FinetunedFeatures

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the hub: uploads copy into it, downloads return its subfolders."""
    hugging_face, place = importlib.import_module("huggingface_hub"), tmp_path / "hub"

    def create(name: str, *, private: bool, **_: Any) -> Any:
        (place / name).mkdir(parents=True)
        (tmp_path / "private").write_text(str(private))
        return hugging_face.RepoUrl(f"https://huggingface.co/{name}")

    def upload(*, repo_id: str, folder_path: Path, **_: Any) -> None:
        shutil.copytree(folder_path, place / repo_id, dirs_exist_ok=True)

    def download(name: str, *, revision: str | None = None, **_: Any) -> str:
        (tmp_path / "asked").write_text(f"{name}@{revision}")
        if not (place / name).is_dir():
            raise ConnectionError("no route to host")
        return str(place / name)

    for name, replacement in {
        "create_repo": create,
        "upload_folder": upload,
        "snapshot_download": download,
        "get_token": lambda: "token",
    }.items():
        monkeypatch.setattr(hugging_face, name, replacement)
    return place


def texts_in(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.rglob("*") if path.suffix in {".json", ".md", ".py", ".jinja"})


def test_a_frozen_ensemble_returns_from_the_hub(town_folder: Path, hub: Path, tmp_path: Path) -> None:
    ensemble = RewardEnsemble.load(town_folder)
    address = ensemble.push_to_hub("my-org/town", names=["A", "B", "C"])
    assert address == "https://huggingface.co/my-org/town"
    assert (tmp_path / "private").read_text() == "True"
    loaded = RewardEnsemble.from_pretrained("my-org/town", revision="v1")
    assert (tmp_path / "asked").read_text() == "my-org/town@v1"
    items = [("Tea?", "Yes, please."), ("Tea?", "No.")]
    np.testing.assert_allclose(loaded.rewards(items), ensemble.rewards(items))
    assert loaded.trained_on is not None
    assert loaded.record.evaluation is not None
    names = {path.name for path in (hub / "my-org/town").iterdir()}
    assert not any(name.startswith("held_out") for name in names)
    assert {"ensemble.json", "pluralign.json", "reward_model.py", "README.md"} <= names
    card = (hub / "my-org/town" / "README.md").read_text()
    assert 'from_pretrained("my-org/town")' in card
    assert "| member 0 | A |" in card


@pytest.mark.slow
def test_an_encoder_of_the_hub_is_named_and_another_one_is_uploaded(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = write_bert(tmp_path / "models--my-org--bert" / "snapshots" / COMMIT)
    (hub / "my-org").mkdir(parents=True)
    (hub / "my-org" / "bert").symlink_to(snapshot)
    named = make_ensemble(TextFeatures(str(snapshot)))
    named.push_to_hub("my-org/named")
    assert not (hub / "my-org/named/encoder").exists()
    features = json.loads((hub / "my-org/named/ensemble.json").read_text())["features"]
    assert (features["encoder"], features["hub_id"], features["revision"]) == ("my-org/bert", "my-org/bert", COMMIT)
    np.testing.assert_allclose(RewardEnsemble.from_pretrained("my-org/named").rewards(ITEMS), named.rewards(ITEMS))
    assert (tmp_path / "asked").read_text() == f"my-org/bert@{COMMIT}"
    local = make_ensemble(TextFeatures(str(write_bert(tmp_path / "mine"))))
    expected = local.rewards(ITEMS)
    local.push_to_hub("my-org/local", private=False)
    assert (tmp_path / "private").read_text() == "False"
    shutil.rmtree(tmp_path / "mine")
    np.testing.assert_allclose(RewardEnsemble.from_pretrained("my-org/local").rewards(ITEMS), expected)
    for name in ("named", "local"):
        assert str(tmp_path) not in texts_in(hub / "my-org" / name)
        assert "/secret" not in texts_in(hub / "my-org" / name)
    monkeypatch.setattr(
        frozen_export, "describe_reader", lambda *_: (_ for _ in ()).throw(frozen_export.NotExpressibleError("x", "y"))
    )
    named.push_to_hub("my-org/unusual")
    assert not (hub / "my-org/unusual/reward_model.py").exists(), "the script is left out where it cannot work"
    assert "reward_model.py" not in (hub / "my-org/unusual/README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_fine_tuned_ensemble_returns_from_the_hub(hub: Path, tmp_path: Path, lora: bool) -> None:
    base = pad_as_fit_does(write_llama(tmp_path / "models--my-org--llama" / "snapshots" / COMMIT, "CausalLM"))
    (hub / "my-org").mkdir(parents=True)
    (hub / "my-org" / "llama").symlink_to(base)
    folder = tmp_path / "dir"
    if lora:
        write_adapter(folder / "backbone", base, 3, seed=1)
    else:
        pad_as_fit_does(write_llama(folder / "backbone", num_labels=3))
    ensemble = save_ensemble(folder, base, "joint", lora, [0, 1], 3)
    assert isinstance(ensemble.features, FinetunedFeatures)
    ensemble = replace(ensemble, features=replace(ensemble.features, revision=COMMIT))
    before = {path.name: path.read_bytes() for path in (folder / "backbone").iterdir()}
    ensemble.push_to_hub("my-org/tuned")
    assert {path.name: path.read_bytes() for path in (folder / "backbone").iterdir()} == before
    loaded = RewardEnsemble.from_pretrained("my-org/tuned")
    np.testing.assert_allclose(loaded.rewards(ITEMS), ensemble.rewards(ITEMS), atol=1e-5)
    assert isinstance(loaded.features, FinetunedFeatures)
    assert (loaded.features.base, loaded.features.revision) == ("my-org/llama", COMMIT)
    if lora:
        assert (tmp_path / "asked").read_text() == f"my-org/llama@{COMMIT}"
    assert str(tmp_path) not in texts_in(hub / "my-org" / "tuned")
    assert "RewardEnsemble.from_pretrained" in (hub / "my-org/tuned/README.md").read_text()


@pytest.mark.slow
def test_adapters_on_a_local_base_are_refused(hub: Path, tmp_path: Path) -> None:
    base = pad_as_fit_does(write_llama(tmp_path / "base", "CausalLM"))
    write_adapter(tmp_path / "dir" / "backbone", base, 3, seed=1)
    ensemble = save_ensemble(tmp_path / "dir", base, "joint", True, [0, 1], 3)
    with pytest.raises(UsageError, match=r"need the base model .*, which is not on the hub: fit with a hub id"):
        ensemble.push_to_hub("my-org/tuned")
    assert not hub.exists()


def test_folders_load_by_the_same_name(town_folder: Path, tmp_path: Path, hub: Path) -> None:
    ensemble = RewardEnsemble.from_pretrained(town_folder)
    ensemble.save_pretrained(tmp_path / "copy")
    assert RewardEnsemble.from_pretrained(str(tmp_path / "copy")).k == ensemble.k
    with pytest.raises(DataError, match=r"nowhere: there is no such folder; check the path, or give a hub id"):
        RewardEnsemble.from_pretrained("nowhere")
    with pytest.raises(DataError, match=r"no route to host.*; check the name and the network"):
        RewardEnsemble.from_pretrained("my-org/nothing")
    with pytest.raises(UsageError, match="one entry per member, 3, not 1"):
        ensemble.push_to_hub("my-org/town", names=["A"])


@pytest.mark.slow
def test_an_encoder_that_has_moved_is_given_by_its_new_place(tmp_path: Path) -> None:
    ensemble = make_ensemble(TextFeatures(str(write_bert(tmp_path / "first"))))
    ensemble.save(tmp_path / "dir")
    expected = ensemble.rewards(ITEMS)
    (tmp_path / "first").rename(tmp_path / "second")
    with pytest.raises(DataError, match=r"first: there is no such model folder; check the path; .*encoder=…"):
        RewardEnsemble.load(tmp_path / "dir").rewards(ITEMS)
    moved = RewardEnsemble.from_pretrained(tmp_path / "dir", encoder=str(tmp_path / "second"))
    np.testing.assert_allclose(moved.rewards(ITEMS), expected)
    other = write_bert(tmp_path / "other", initializer_range=0.1)
    with pytest.raises(DataError, match="is not the one the ensemble was fitted with"):
        RewardEnsemble.from_pretrained(tmp_path / "dir", encoder=str(other)).rewards(ITEMS)


def test_a_failed_upload_is_one_sentence(town_folder: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(importlib.import_module("huggingface_hub"), "upload_folder", fail)
    with pytest.raises(DataError, match=r"upload to the hub failed .*no route to host\); check .* network\.$"):
        RewardEnsemble.load(town_folder).push_to_hub("my-org/town")
