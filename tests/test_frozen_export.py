"""Exports of ensembles on frozen features: the folder gives the same rewards without this package."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run
from test_classifier import write_bert, write_llama
from test_transformers_export import pad_as_fit_does, save_ensemble, write_adapter

from pluralign import DataError, RewardEnsemble, UsageError, evaluate, export, town_hall
from pluralign.ensemble.members import LinearMembers, fit_feature_map
from pluralign.ensemble.record import DataSummary, FitRecord
from pluralign.publishing import export as frozen_export
from pluralign.publishing.standalone.reward_model import RewardModel
from pluralign.text.encoders import TextFeatures
from pluralign.text.finetuned import FinetunedFeatures
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.prompts import Item, Message, Prompt

ITEMS: list[Item] = [
    ("tea ?", "yes ."),
    ("tea ?", "no , never , thank you ."),
    ((Message("user", "tea ?"), Message("assistant", "no ."), Message("user", "rum ?")), "never , thank you ."),
    ("rum ? tea ? " * 40, "Yes! (1) So, perhaps:\n- fine"),
    ("", ""),
]
PLAIN = [(Prompt(prompt).json, response) for prompt, response in ITEMS]


def make_ensemble(features: TextFeatures, *, axes: bool = False) -> RewardEnsemble:
    """Return two random members on features of some texts."""
    features = features.resolved()
    random = np.random.default_rng(0)
    vectors = features([*ITEMS, *frozen_export.PROBES])
    scaled = fit_feature_map(vectors, 20 if features.surface else 0)
    wide = scaled.dimension
    if axes:
        scaled = replace(scaled, axes=np.linalg.qr(random.normal(size=(wide, 7)))[0].astype(np.float32))
    theta = random.normal(size=(scaled.dimension, 2)) / np.sqrt(scaled.dimension)
    data = DataSummary("/secret/votes.jsonl", "ab12", 10, 5, 4, 2)
    record = FitRecord(data=data, options={"encoder": "/secret/bert"})
    weights = np.array([0.25, 0.75])
    return RewardEnsemble(LinearMembers(scaled, theta), weights, features, undecided=0.2, record=record)


def rewards_without_pluralign(folder: Path) -> Any:
    """Return the rewards of ``reward_model.py`` in a process that cannot import this package."""
    code = (
        "import json, sys\nsys.modules['pluralign'] = None\nsys.path.insert(0, sys.argv[1])\n"
        "from reward_model import RewardModel\nmodel = RewardModel.from_pretrained(sys.argv[1])\n"
        "print(json.dumps(model.rewards(json.load(sys.stdin)).tolist()))\n"
    )
    command = [sys.executable, "-I", "-c", code, str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=json.dumps(PLAIN), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return np.array(json.loads(done.stdout))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="module")
def sentence_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sentence-transformers: state of the first token, at length 1."""
    folder = write_bert(tmp_path_factory.mktemp("models") / "sentence-bert")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    named = [(str(i), path, f"sentence_transformers.models.{kind}") for i, (path, kind) in enumerate(kinds.items())]
    modules = [{"idx": int(name), "name": name, "path": path, "type": kind} for name, path, kind in named]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "2_Normalize").mkdir()
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "tiny-llama", "CausalLM", num_hidden_layers=3)


def rewards_of_script(folder: Path) -> Any:
    """Return the rewards of ``reward_model.py`` in this process."""
    scope: dict[str, Any] = {"__name__": "exported", "__file__": str(folder / "reward_model.py")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "exported", types.ModuleType("exported"))  # dataclasses look their module up
        exec(compile((folder / "reward_model.py").read_text(), "reward_model.py", "exec"), scope)
        return scope["RewardModel"].from_pretrained(folder).rewards(PLAIN)


def check_export(ensemble: RewardEnsemble, folder: Path, *, alone: bool = False) -> dict[str, Any]:
    """Export an ensemble and compare rewards; with ``alone`` in a process that cannot import this package."""
    ensemble.save(folder / "dir")
    done = export(folder / "dir", folder / "out")
    assert done.models == [str(folder / "out")]
    expected = ensemble.rewards(ITEMS)
    assert np.ptp(expected, axis=0).min() > 0.01
    rewards = (rewards_without_pluralign if alone else rewards_of_script)(folder / "out")
    np.testing.assert_allclose(rewards, expected, atol=1e-4)
    np.testing.assert_allclose(RewardEnsemble.from_pretrained(folder / "out").rewards(ITEMS), expected, atol=1e-4)
    index: dict[str, Any] = json.loads((folder / "out" / "pluralign.json").read_text())
    return index


def test_surface_features_need_numpy_alone(tmp_path: Path) -> None:
    index = check_export(make_ensemble(TextFeatures("none")), tmp_path, alone=True)
    assert index["reader"] == {"kind": "none", "surface": True}
    assert not (tmp_path / "out" / "encoder").exists()


def test_hashed_words_survive(tmp_path: Path) -> None:
    check_export(make_ensemble(TextFeatures("hashing:64", surface=False)), tmp_path)


@pytest.mark.slow
def test_layers_of_a_bert_survive_with_the_encoder_beside(bert: Path, tmp_path: Path) -> None:
    index = check_export(make_ensemble(TextFeatures(str(bert), "0,2"), axes=True), tmp_path, alone=True)
    assert index["reader"]["layers"] == [0, 2]
    assert (tmp_path / "out" / "encoder" / "model.safetensors").is_file()
    written = "".join(path.read_text() for path in (tmp_path / "out").glob("*.*") if path.suffix != ".safetensors")
    assert not [private for private in ("/secret", str(tmp_path), str(bert)) if private in written]
    write_bert(tmp_path / "out" / "encoder", initializer_range=0.1)
    with pytest.raises(ValueError, match="is not the one that the ensemble was fitted with"):
        RewardModel.from_pretrained(tmp_path / "out").rewards(PLAIN)


@pytest.mark.slow
def test_the_own_vector_of_a_sentence_encoder_survives(sentence_bert: Path, tmp_path: Path) -> None:
    index = check_export(make_ensemble(TextFeatures(str(sentence_bert), "last", surface=False)), tmp_path)
    assert (index["reader"]["pooling"], index["reader"]["unit_length"]) == ("cls", True)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "pooling"), [("2", "mean"), ("1,3", "last")])
def test_a_decoder_survives_with_its_chat_template(llama: Path, tmp_path: Path, layers: str, pooling: Any) -> None:
    index = check_export(make_ensemble(TextFeatures(str(llama), layers, pooling)), tmp_path)
    assert index["reader"]["chat"] is True
    assert index["reader"]["keep_layers"] == max(map(int, layers.split(",")))


@pytest.mark.slow
def test_minilm_survives(tmp_path: Path) -> None:
    index = check_export(make_ensemble(TextFeatures("minilm")), tmp_path)
    assert index["base"] == index["reader"]["hub_id"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert index["reader"]["max_length"] == 256


@pytest.mark.slow
def test_a_sentence_encoder_with_other_modules_is_refused(sentence_bert: Path, tmp_path: Path) -> None:
    ensemble = make_ensemble(TextFeatures(str(sentence_bert), "last", surface=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pluralign.text.loading.own_pooling", lambda _: ("mean", True))
        with pytest.raises(UsageError, match=r"needs sentence-transformers \(its rewards differ.*cannot be exported"):
            check_export(ensemble, tmp_path)
    assert not (tmp_path / "out").exists()
    modules = json.loads((sentence_bert / "modules.json").read_text())
    shutil.copytree(sentence_bert, tmp_path / "other")
    (tmp_path / "other" / "modules.json").write_text(json.dumps([*modules, {"type": "models.Dense", "path": ""}]))
    with pytest.raises(UsageError, match="its modules are Transformer, Pooling, Normalize, Dense"):
        frozen_export.describe_reader(TextFeatures("other", surface=False), ModelEncoder(tmp_path / "other", ""))


def test_the_script_predicts_shares_and_gives_reward_functions(tmp_path: Path) -> None:
    ensemble = make_ensemble(TextFeatures("none"))
    ensemble.save(tmp_path / "dir")
    export(tmp_path / "dir", tmp_path / "out")
    model = RewardModel.from_pretrained(tmp_path / "out")
    votes = town_hall(20).preferences
    (prompt, a), (_, b) = ITEMS[:2]
    rewards = ensemble.rewards([(prompt, a), (prompt, b)])
    expected = ensemble.readings(rewards[:1] - rewards[1:])["vote"][0]
    assert model.prob_hat(prompt, a, b) == pytest.approx(expected)
    assert model.prob_hat(prompt, a, a) == pytest.approx(0.5)
    assert model.names == ["Member 0", "Member 1"]
    chat = [{"role": "user", "content": "tea ?"}]
    completion = [{"role": "assistant", "content": "yes ."}]
    reward = model.reward_func(1)
    assert reward.__name__ == "member_1"
    assert reward(prompts=[chat, "tea ?"], completions=[completion, "yes ."], task=["x"]) == pytest.approx(
        ensemble.as_reward_func(1)(prompts=["tea ?"] * 2, completions=["yes ."] * 2)
    )
    assert evaluate(str(tmp_path / "out"), votes, groups=[]).test.brier == pytest.approx(
        evaluate(ensemble, votes, groups=[]).test.brier
    )


def test_the_command_exports_a_frozen_ensemble_whole(town_folder: Path, tmp_path: Path) -> None:
    done = run("export", town_folder, "-o", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["warnings"] == []
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors")
    assert names == ["README.md", "ensemble.json", "pluralign.json", "reward_model.py"], "no held-out votes"
    assert len([*(tmp_path / "out").glob("*.safetensors")]) == 1
    lines = '{"prompt": "Tea?", "response": "Yes."}\n'
    command = [sys.executable, "-I", str(tmp_path / "out" / "reward_model.py")]
    printed = subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout
    expected = RewardEnsemble.load(town_folder).rewards([("Tea?", "Yes.")])[0]
    np.testing.assert_allclose(json.loads(printed)["rewards"], expected, atol=1e-4)
    refused = run("export", town_folder, "-o", tmp_path / "one", "--member", "0")
    assert refused.returncode == 2
    assert "is exported whole" in refused.stderr


# --- sharing ----------------------------------------------------------------------------------------------------------


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

    fakes: dict[str, Any] = {"create_repo": create, "upload_folder": upload, "snapshot_download": download}
    for name, fake in (fakes | {"get_token": lambda: "token"}).items():
        monkeypatch.setattr(hugging_face, name, fake)
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
def test_only_encoders_off_the_hub_are_uploaded(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def refused(*_: Any) -> Any:
        raise frozen_export.NotExpressibleError("x", "y")

    monkeypatch.setattr(frozen_export, "describe_reader", refused)
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
