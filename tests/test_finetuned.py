"""Fine-tuned backbones as features: rewards equal those of the models themselves, and changed files are rejected."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import facts_of
from tiny import camp_votes, write_backbone

from pluralign import DataError, PreferenceSet, RewardEnsemble, certify, fit
from pluralign.ensemble.held_out import load_held_out
from pluralign.ensemble.members import FeatureMap, LinearMembers, identity_map
from pluralign.text import finetuned as tuned
from pluralign.text.finetuned import FinetunedFeatures
from pluralign.text.loading import model_folder
from pluralign.votes.prompts import Item

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")
pytestmark = pytest.mark.usefixtures("one_torch_thread")
QUICK: dict[str, Any] = {"k": 3, "optimizer": "adamw", "learning_rate": 5e-3, "batch_size": 32, "epochs": 1}
KINDS = [("joint", False), ("joint", True), ("stagewise", False), ("stagewise", True)]
CHAT = "<s>user {} </s>assistant {} </s>"


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> PreferenceSet:
    return camp_votes(tmp_path_factory.mktemp("votes"), 150)


@pytest.fixture(scope="module")
def towns(tmp_path_factory: pytest.TempPathFactory, votes: PreferenceSet) -> dict[tuple[str, bool], Path]:
    """One fitted folder of each kind."""
    folder = tmp_path_factory.mktemp("towns")
    llama = write_backbone(folder / "llama")
    for method, lora in KINDS:
        place = folder / f"{method}-{lora}"
        options = QUICK | ({"compare_frozen": False} if method == "joint" else {})
        fit(votes, folder=place, backbone=str(llama), method=method, lora=lora, **options)
    return {(method, lora): folder / f"{method}-{lora}" for method, lora in KINDS}


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLURALIGN_CACHE", str(tmp_path / "cache"))
    tuned.forget_models()


def direct(folder: Path, outputs: int, items: list[Item]) -> npt.NDArray[Any]:
    """Return the rewards of plain transformers and peft for each text alone, with LoRA merged into the base.

    Of a joint model these are the states before the head.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    if (folder / "adapter_config.json").exists():
        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        model = (
            importlib.import_module("peft")
            .PeftModel.from_pretrained(load(base, num_labels=outputs), folder)
            .merge_and_unload()
        )
        model.config.pad_token_id = tokenizer.pad_token_id
    else:
        model = load(folder)
    if outputs > 1:
        model.score = torch.nn.Identity()
    texts = [CHAT.format(*item) for item in items]
    with torch.no_grad():
        rows = [model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0] for text in texts]
    return np.stack([row.numpy() for row in rows])


ITEMS: list[Item] = [("so ?", "tea yes no"), ("so ?", "rum well"), ("fine ?", "tea rum you thank you"), ("?", "no")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rewards_equal_those_of_a_direct_pass(towns: dict[Any, Path], kind: tuple[str, bool]) -> None:
    folder, (method, lora) = towns[kind], kind
    ensemble = RewardEnsemble.load(folder)
    assert isinstance(ensemble.features, FinetunedFeatures)
    assert ensemble.features.lora == lora
    if method == "joint":
        expected = direct(folder / "backbone", 9, ITEMS)
    else:
        expected = np.hstack([direct(folder / "backbone" / f"member-{j}", 1, ITEMS) for j in range(3)])
    np.testing.assert_allclose(ensemble.features(ITEMS), expected, atol=1e-5)
    np.testing.assert_allclose(ensemble.rewards(ITEMS), expected @ ensemble.members.head(), atol=1e-3)
    assert np.ptp(ensemble.rewards(ITEMS), axis=0).min() > 0.01
    assert not list(folder.rglob("*.bin")), "safetensors only"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_saved_copy_gives_the_same_rewards_without_the_original(
    towns: dict[Any, Path], kind: tuple[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble = RewardEnsemble.load(towns[kind])
    rewards = ensemble.rewards(ITEMS)
    monkeypatch.setenv("PLURALIGN_CACHE", str(tmp_path / "cache"))
    shutil.copytree(towns[kind], tmp_path / "first")
    first = RewardEnsemble.load(tmp_path / "first")
    first.take([0, 2], [0.5, 0.5]).save(tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    np.testing.assert_allclose(RewardEnsemble.load(tmp_path / "second").rewards(ITEMS), rewards[:, [0, 2]], atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache")
def test_a_stagewise_lora_ensemble_has_one_base_in_memory(
    towns: dict[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loaded = transformers.AutoModelForSequenceClassification.from_pretrained, []

    def count(*arguments: Any, **options: Any) -> Any:
        loaded.append(arguments[0])
        return load(*arguments, **options)

    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_pretrained", count)
    ensemble = RewardEnsemble.load(towns["stagewise", True])
    reports: list[tuple[int, int]] = []
    ensemble.features(ITEMS, lambda done, total: reports.append((done, total)))
    ensemble.features([("new ?", "tea")])
    assert len(loaded) == 1
    assert reports == [(4, 12), (8, 12), (12, 12)], "one pass per member"


@pytest.mark.slow
def test_whole_models_that_exceed_memory_are_loaded_in_turn(
    towns: dict[Any, Path], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = RewardEnsemble.load(towns["stagewise", False]).rewards(ITEMS)
    request.getfixturevalue("empty_cache")
    monkeypatch.setattr(tuned, "KEEP_BYTES", 10)
    ensemble = RewardEnsemble.load(towns["stagewise", False])
    np.testing.assert_allclose(ensemble.rewards(ITEMS), expected, atol=1e-5)
    assert len(tuned._latest[0].loaded) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("kind", [("joint", False), ("stagewise", True)], ids=str)
def test_changed_or_missing_files_raise_data_error(
    towns: dict[Any, Path], kind: tuple[str, bool], tmp_path: Path
) -> None:
    shutil.copytree(towns[kind], tmp_path / "town")
    weights = next((tmp_path / "town" / "backbone").rglob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DataError, match=r"is not what was saved: its hash differs; copy the ensemble's folder"):
        RewardEnsemble.load(tmp_path / "town").rewards(ITEMS)
    shutil.rmtree(tmp_path / "town" / "backbone")
    with pytest.raises(DataError, match=r"there is no fine-tuned model in it"):
        RewardEnsemble.load(tmp_path / "town").rewards(ITEMS)


@pytest.mark.slow
def test_a_fine_tuned_ensemble_can_be_pruned_and_certified(towns: dict[Any, Path], tmp_path: Path) -> None:
    folder = towns["joint", False]
    kept = facts_of("prune", folder, "-o", tmp_path / "pruned", "--beta", "2", "--furthest")["kept"]
    whole, part = RewardEnsemble.load(folder), RewardEnsemble.load(tmp_path / "pruned")
    np.testing.assert_allclose(part.rewards(ITEMS), whole.rewards(ITEMS)[:, kept], atol=1e-5)
    evidence = load_held_out(folder)
    texts = [(p, r) for p in evidence.preferences.prompts[:1] for r in evidence.preferences.responses[:1]]
    np.testing.assert_allclose(whole.rewards(texts)[0], evidence.rewards[0], atol=1e-4)
    certificate = certify(whole, evidence)
    assert "features were trained on the same votes, which the theorem does not" in certificate.theorem_4.here


def test_outputs_are_not_clipped_but_other_features_are() -> None:
    members = LinearMembers(identity_map(2), np.array([[1.0], [0.5]]))
    outputs = np.array([[40.0, -8.0]], dtype=np.float32)
    np.testing.assert_array_equal(members.rewards(outputs), [[36.0]])
    np.testing.assert_array_equal(LinearMembers.from_arrays(members.arrays()).rewards(outputs), [[36.0]])
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    np.testing.assert_array_equal(FeatureMap(zeros, ones, ones)(outputs), [[6.0, -6.0]])


def test_an_unknown_backbone_raises_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"check the name and the network, or give a local folder, smollm2 or minilm"):
        model_folder("nobody/nothing")
