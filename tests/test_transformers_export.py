"""Exports: plain transformers and TRL get the same rewards, heads survive, and the card has the measured figures."""

import importlib
import json
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import printed, run
from safetensors.numpy import load_file
from test_classifier import ITEMS, SIZES, alone, write_bert, write_llama
from tiny import ENCODER_WORDS as WORDS

from pluralign import DataError, PreferenceSet, RewardEnsemble, UsageError, evaluate, export, load_preferences
from pluralign.core import hub
from pluralign.ensemble.held_out import held_out_files, score_held_out
from pluralign.ensemble.members import LinearMembers, identity_map
from pluralign.ensemble.record import DataSummary, FitRecord
from pluralign.publishing.export import replace_head
from pluralign.text.classifier import model_rewards
from pluralign.text.finetuned import FinetunedFeatures, head_weights

pytestmark = pytest.mark.slow
WEIGHTS = [0.5, 0.2, 0.3]
NASTY = "votes](x) <b>|`*_#.jsonl"
"""Characters that are markup unless they are escaped."""


def some_votes(folder: Path, prompts: int = 12) -> PreferenceSet:
    random = np.random.default_rng(0)

    def text() -> str:
        return " ".join(random.choice(WORDS, size=random.integers(2, 9)))

    asked = [f"{WORDS[i % len(WORDS)]} ?" for i in range(prompts) for _ in range(4)]
    counts = random.integers(0, 6, len(asked)).tolist(), random.integers(2, 6, len(asked)).tolist()
    votes = PreferenceSet.from_columns(asked, [text() for _ in asked], [text() for _ in asked], *counts)
    votes.save(folder / "votes.jsonl")
    return load_preferences(str(folder / "votes.jsonl"))


def write_adapter(folder: Path, base: Path, outputs: int, seed: int, keeps_head: bool = True) -> None:
    """Write a LoRA adapter with random weights, with or without its head."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    peft = importlib.import_module("peft")
    torch.manual_seed(seed)
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model = load(base, num_labels=outputs, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    head = {"modules_to_save": ["score"], "task_type": "SEQ_CLS"} if keeps_head else {}
    lora = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "v_proj"], **head)
    peft.get_peft_model(model, lora).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)


def pad_as_fit_does(folder: Path) -> Path:
    """Make the end-of-text token the padding token, as ``fit`` does without a padding token."""
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return folder


def save_ensemble(
    folder: Path, base: Path, method: str, lora: bool, kept: list[int], outputs: int, head: Any = None
) -> RewardEnsemble:
    """Save an ensemble of some outputs of the models in ``folder``."""
    described: Any = {"base": str(base), "method": method, "lora": lora, "outputs": outputs, "max_length": 32}
    features = FinetunedFeatures(**described, folder=folder).with_current_hashes()
    weights = np.array(WEIGHTS[: len(kept)]) / sum(WEIGHTS[: len(kept)])
    theta = np.eye(outputs)
    if method == "joint":
        theta = head_weights(features, folder / "backbone").T if head is None else head
    ensemble = RewardEnsemble(LinearMembers(identity_map(len(theta)), theta[:, kept]), weights, features)
    ensemble.save(folder)
    return ensemble


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pad_as_fit_does(write_llama(tmp_path_factory.mktemp("base") / "tiny-llama", "CausalLM"))


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three members and one unused output of one model, with held-out votes and figures."""
    folder = tmp_path_factory.mktemp("joint")
    pad_as_fit_does(write_llama(folder / "backbone", num_labels=4))
    ensemble = save_ensemble(folder, Path("my-org/my-llama"), "joint", False, [0, 1, 2], 4)
    votes = some_votes(folder)
    ensemble.save(folder, held_out_files(ensemble, score_held_out(ensemble, votes)))
    record = FitRecord(
        evaluation=evaluate(ensemble, votes, groups=[]),
        data=DataSummary(f"/secret/{NASTY}", "ab12", 100, 25, 48, 12),
        options={"k": 3},
        tuning={"backbone": "/secret/llama"},
        notes=["2 texts of /secret/llama are *longer*"],
    )
    replace(ensemble, record=record).save(folder)
    return folder


@pytest.fixture(scope="module")
def joint_lora(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    folder = tmp_path_factory.mktemp("joint-lora")
    write_adapter(folder / "backbone", base, 4, seed=1)
    save_ensemble(folder, base, "joint", True, [0, 1, 2], 4)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["full", "lora"])
def stagewise(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Three members with one model each, the second of which was pruned."""
    folder = tmp_path_factory.mktemp("stagewise")
    for j in range(3):
        if request.param:
            write_adapter(folder / "backbone" / f"member-{j}", base, 1, seed=j)
        else:
            pad_as_fit_does(write_llama(folder / "backbone" / f"member-{j}", initializer_range=0.3 + j / 10))
    save_ensemble(folder, base, "stagewise", request.param, [0, 2], 3)
    return folder


def chats_of_items() -> list[list[dict[str, str]]]:
    chats = []
    for prompt, response in ITEMS:
        before = [("user", prompt)] if isinstance(prompt, str) else [(turn.role, turn.content) for turn in prompt]
        chats.append([{"role": role, "content": text} for role, text in [*before, ("assistant", response)]])
    return chats


def plain_rewards(folder: Path) -> Any:
    """Return the rewards of plain transformers, with the chat template and one text at a time."""
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats_of_items()]
    return np.stack([alone(folder, text, special=False) for text in texts])


# --- the same rewards -------------------------------------------------------------------------------------------------


def test_a_joint_ensemble_becomes_one_model_with_one_output_per_member(joint: Path, tmp_path: Path) -> None:
    done = export(joint, tmp_path / "out")
    expected = RewardEnsemble.load(joint).rewards(ITEMS)
    rewards = plain_rewards(tmp_path / "out")
    np.testing.assert_allclose(rewards, expected, atol=1e-4)
    assert rewards.shape == (4, 3)
    assert np.ptp(rewards, axis=0).min() > 0.1
    assert done.models == [str(tmp_path / "out")]
    assert done.weights == pytest.approx(WEIGHTS)
    config, written = json.loads((tmp_path / "out" / "config.json").read_text()), [*(tmp_path / "out").iterdir()]
    assert config["pluralign_weights"] == pytest.approx(WEIGHTS)
    assert config["pluralign_names"] == done.names == list(config["id2label"].values())
    assert config["problem_type"] == "regression"
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert {path.suffix for path in written} <= {".json", ".safetensors", ".md", ".jinja"}
    assert len({path.stat().st_mode for path in written}) == 1, "all files have the same permissions"


def test_a_lora_head_survives_save_merge_and_load(joint_lora: Path, base: Path, tmp_path: Path) -> None:
    expected = RewardEnsemble.load(joint_lora).rewards(ITEMS)
    saved = load_file(joint_lora / "backbone" / "adapter_model.safetensors")
    (head,) = [array for name, array in saved.items() if ".score." in name]
    for member in (None, 1):
        place = tmp_path / f"out-{member}"
        export(joint_lora, place, member=member)
        rows = [0, 1, 2] if member is None else [member]
        np.testing.assert_allclose(plain_rewards(place), expected[:, rows], atol=1e-4)
        exported = load_file(place / "model.safetensors")
        np.testing.assert_array_equal(exported["score.weight"], head[rows])
        assert not any("lora" in name for name in exported)
    bare = load_file(base / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert np.abs(exported["model.layers.0.self_attn.q_proj.weight"] - bare).max() > 0.01, "LoRA was merged"


def test_an_adapter_without_its_head_is_rejected(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "dir" / "backbone", base, 3, seed=1, keeps_head=False)
    save_ensemble(tmp_path / "dir", base, "joint", True, [0, 1], 3, np.eye(16))
    with pytest.raises(DataError, match=r"the model was saved without its head; fit again"):
        export(tmp_path / "dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stagewise_members_are_exported_one_by_one(stagewise: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"separate models .* member J, or each .* member all"):
        export(stagewise, tmp_path / "out")
    ensemble = RewardEnsemble.load(stagewise)
    done = export(stagewise, tmp_path / "out", member="all")
    rewards = np.hstack([plain_rewards(tmp_path / "out" / f"member-{j}") for j in range(2)])
    np.testing.assert_allclose(rewards, ensemble.rewards(ITEMS), atol=1e-4)
    assert np.abs(rewards[:, 0] - rewards[:, 1]).max() > 0.1
    index = json.loads((tmp_path / "out" / "pluralign.json").read_text())
    assert [row["folder"] for row in index["members"]] == ["member-0", "member-1"]
    assert [row["weight"] for row in index["members"]] == pytest.approx([5 / 7, 2 / 7])
    assert all(Path(place, "README.md").is_file() for place in (*done.models, done.folder))


def test_a_pruned_ensemble_exports_its_remaining_members(joint: Path, tmp_path: Path) -> None:
    whole = RewardEnsemble.load(joint)
    replace(whole.take([2, 0], [0.75, 0.25]), record=FitRecord()).save(tmp_path / "pruned")
    export(tmp_path / "pruned", tmp_path / "out")
    np.testing.assert_allclose(plain_rewards(tmp_path / "out"), whole.rewards(ITEMS)[:, [2, 0]], atol=1e-4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["pluralign_weights"] == [0.75, 0.25]
    assert config["id2label"] == {"0": "Member 0", "1": "Member 1"}, "without held-out votes there are no names"


def test_an_undecided_share_survives_the_export(joint: Path, tmp_path: Path) -> None:
    """The exported model predicts as the ensemble does, and its card gives the formula that it is evaluated by."""
    ensemble = replace(RewardEnsemble.load(joint), undecided=0.4)
    ensemble.save(tmp_path / "dir")
    done = export(tmp_path / "dir", tmp_path / "out")
    assert done.undecided == 0.4
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pluralign_undecided"] == 0.4
    assert json.loads((tmp_path / "out" / "pluralign.json").read_text())["undecided"] == 0.4
    votes = some_votes(tmp_path)
    assert evaluate(tmp_path / "out", votes, groups=[]).levels["vote"].brier == pytest.approx(
        evaluate(ensemble, votes, groups=[]).levels["vote"].brier
    )
    card = (tmp_path / "out" / "README.md").read_text()
    (formula,) = re.findall(r"`(u / 2 \+ .*?)`", card)
    torch = importlib.import_module("torch")
    rewards_a, rewards_b = torch.tensor(ensemble.rewards(ITEMS[:2]))
    known = {"u": 0.4, "weights": torch.tensor(WEIGHTS), "rewards_a": rewards_a, "rewards_b": rewards_b}
    expected = 0.2 + 0.6 * np.array(WEIGHTS) @ (rewards_a > rewards_b).numpy()
    assert float(eval(formula, known)) == pytest.approx(expected)
    assert "u/2 + (1 − u) × w" in card
    assert "u = 0.4000 is the undecided share" in card
    export(joint, tmp_path / "plain")
    assert "undecided" not in (tmp_path / "plain" / "README.md").read_text()
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["pluralign_undecided"] == 0


def test_a_pair_classifier_keeps_its_bias_and_gives_raw_scores_to_cross_encoders(tmp_path: Path) -> None:
    sentence_transformers = importlib.import_module("sentence_transformers")
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    write_bert(tmp_path / "dir" / "backbone", 3)
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model = load(tmp_path / "dir" / "backbone")
    torch.nn.init.normal_(model.classifier.bias)
    model.save_pretrained(tmp_path / "dir" / "backbone")
    ensemble = save_ensemble(tmp_path / "dir", Path("minilm"), "joint", False, [0, 1], 3)
    export(tmp_path / "dir", tmp_path / "out", member=1)
    pairs = [(str(prompt), response) for prompt, response in ITEMS[:3]]
    expected = ensemble.rewards(pairs)[:, 1]
    np.testing.assert_allclose([alone(tmp_path / "out", *pair)[0] for pair in pairs], expected, atol=1e-4)
    scores = sentence_transformers.CrossEncoder(str(tmp_path / "out")).predict(pairs)
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "/score" in card
    assert 'base_model: "sentence-transformers/all-MiniLM-L6-v2"' in card


def test_long_texts_are_truncated_as_in_training(joint: Path, tmp_path: Path) -> None:
    export(joint, tmp_path / "out")
    long = [("tea ? rum ? " * 30, "no , never .")]
    expected = RewardEnsemble.load(joint).rewards(long)
    np.testing.assert_allclose(model_rewards(tmp_path / "out", long), expected, atol=1e-4)
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.model_max_length, tokenizer.truncation_side) == (32, "left")


def test_a_head_can_combine_outputs() -> None:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=32, num_labels=3, max_position_embeddings=32, **SIZES)
    model = transformers.BertForSequenceClassification(config).eval()
    torch.nn.init.normal_(model.classifier.bias)
    theta = np.array([[0.5, 0.0], [0.5, -1.0], [0.0, 2.0]])
    with torch.no_grad():
        tokens = torch.tensor([[2, 5, 7, 3]])
        before = model(tokens).logits.numpy()
        replace_head(model, theta, of_outputs=True)
        np.testing.assert_allclose(model(tokens).logits.numpy(), before @ theta, atol=1e-5)


# --- the card ---------------------------------------------------------------------------------------------------------


def test_the_card_has_figures_and_its_code_runs(joint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [["pluralign", "fit", "/secret/votes.jsonl", "-o", "dir"]]
    export(joint, tmp_path / "out", commands=commands)
    card, evaluation = (tmp_path / "out" / "README.md").read_text(), RewardEnsemble.load(joint).record.evaluation
    assert evaluation is not None
    about = importlib.import_module("yaml").safe_load(card.split("---\n")[1])
    expected = {"library_name": "transformers", "pipeline_tag": "text-classification", "base_model": "my-org/my-llama"}
    assert expected.items() <= about.items()
    assert {"pluralign", "reward-model"} <= set(about["tags"])
    for figure in (evaluation.test.brier, evaluation.test.noise, evaluation.baselines["floor"].brier):
        assert f"{figure:.4f}" in card
    for row in evaluation.members:
        assert f"| {row.weight:.3f} | {row.disagreement:.3f} | {row.regret:.3f} |" in card
    far = [row for row in evaluation.members if row.disagreement > 0.5]
    assert card.count("is worse than chance") == len(far)
    assert "/secret" not in card
    texts = load_preferences(str(joint / "votes.jsonl")).responses
    assert not [text for text in texts if len(text.split()) > 2 and text in card]
    assert "pluralign fit votes.jsonl -o dir" in card
    assert r"Note from training: 2 texts of llama are \*longer\*." in card
    assert "--pooler-config '{\"use_activation\": false}'" in card
    loading, for_vllm = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    scope: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(loading + for_vllm, scope)
    expected = RewardEnsemble.load(joint).rewards([("Tea?", "Yes, please.")])[0]
    np.testing.assert_allclose(scope["rewards"].numpy(), expected, atol=1e-4)
    # vLLM reads the last token of the ids, which is the token that transformers reads.
    torch, model = scope["torch"], scope["model"]
    with torch.no_grad():
        states = model.model(torch.tensor([scope["ids"]])).last_hidden_state[0, -1]
        np.testing.assert_allclose(model.score(states).numpy(), expected, atol=1e-4)
        whole = model.model(**scope["inputs"]).last_hidden_state[0, -1]
        assert (model.score(whole) - model.score(states)).abs().max() > 0.01, "the two tokens give different rewards"


def test_text_from_data_is_escaped_on_a_card(joint: Path, tmp_path: Path) -> None:
    export(joint, tmp_path / "out", member=0)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "<b>" not in card
    (row,) = [line for line in card.splitlines() if line.startswith("| votes |")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 3, "a bar in a name adds no column"
    assert not re.search(r"(?<!\\)[\]()`*_#]", row)
    render = importlib.import_module("markdown_it").MarkdownIt("commonmark").enable("table").render
    assert "votes](x) &lt;b&gt;|`*_#.jsonl</td>" in render(card.split("---\n", 2)[2]), "it is rendered unchanged"


# --- where it is written ----------------------------------------------------------------------------------------------


def test_bad_usage_is_one_sentence(joint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong: Any
    for place, wrong, words in (
        *((tmp_path / "out", {"member": member}, f"member must be 0 to 2, or all, not {member}") for member in (3, -1)),
        (tmp_path / "out", {"dtype": "flaot16"}, "did you mean 'float16'"),
        *((place, {"overwrite": True}, "outside the ensemble's") for place in (joint, joint / "out", joint.parent)),
        (tmp_path / "file", {}, "is not a folder"),
    ):
        with pytest.raises(UsageError, match=words):
            export(joint, place, **wrong)
    assert "or all, not each" in run("export", joint, "-o", tmp_path / "out", "--member", "each").stderr
    assert not (tmp_path / "out").exists()


def test_an_export_replaces_only_an_export(joint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export(joint, out, member=0)
    with pytest.raises(UsageError, match=r"holds other files; .* overwrite"):
        export(joint, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("pluralign.publishing.card.ModelCard.text", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export(joint, out, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "no partial folder is left"
    export(joint, out, overwrite=True)
    assert "pluralign_weights" in json.loads((out / "config.json").read_text())
    (out / "pluralign.json").unlink()
    with pytest.raises(UsageError, match="holds other files; name another folder, or remove this one"):
        export(joint, out, overwrite=True)


def test_half_precision_halves_the_size(joint: Path, tmp_path: Path) -> None:
    export(joint, tmp_path / "whole")
    export(joint, tmp_path / "half", dtype="bfloat16")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "half")]
    assert 0.4 < sizes[1] / sizes[0] < 0.75
    np.testing.assert_allclose(model_rewards(tmp_path / "half", ITEMS), plain_rewards(tmp_path / "whole"), atol=0.3)


# --- the hub and the command ------------------------------------------------------------------------------------------


def test_a_push_uploads_to_a_private_repository(joint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hugging_face = importlib.import_module("huggingface_hub")
    calls: list[tuple[str, Any]] = []

    def create(name: str, **options: Any) -> Any:
        calls.append(("create", {"name": name, **options}))
        return hugging_face.RepoUrl(f"https://huggingface.co/{name}")

    monkeypatch.setattr(hugging_face, "create_repo", create)
    monkeypatch.setattr(hugging_face, "upload_folder", lambda **options: calls.append(("upload", options)))
    monkeypatch.setattr(hugging_face, "get_token", lambda: "token")
    done = export(joint, tmp_path / "out", push_to_hub="my-org/rewards")
    assert done.hub == "https://huggingface.co/my-org/rewards"
    (created, repository), (uploaded, given) = calls
    assert (created, repository["name"], repository["private"]) == ("create", "my-org/rewards", True)
    assert (uploaded, given["repo_id"], Path(given["folder_path"])) == ("upload", "my-org/rewards", tmp_path / "out")
    assert 'where = "my-org/rewards"' in (tmp_path / "out" / "README.md").read_text()
    export(joint, tmp_path / "public", push_to_hub="my-org/rewards", public=True)
    assert calls[2][1]["private"] is False

    def fail(**_: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(hugging_face, "upload_folder", fail)
    with pytest.raises(DataError, match=r"hub failed \(ConnectionError: no route to host\).*is complete in"):
        export(joint, tmp_path / "kept", push_to_hub="my-org/rewards")
    assert (tmp_path / "kept" / "model.safetensors").is_file()


def test_a_push_needs_a_token_and_a_name_with_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("huggingface_hub"), "get_token", lambda: None)
    with pytest.raises(UsageError, match=r"needs a token: run  hf auth login  or set HF_TOKEN"):
        hub.check_upload("my-org/rewards")
    with pytest.raises(UsageError, match="OWNER/NAME, not 'rewards'"):
        hub.check_upload("rewards")


def test_the_command_writes_the_same_as_the_function(joint_lora: Path, tmp_path: Path) -> None:
    shown = printed("export", joint_lora, "-o", tmp_path / "out", "--member", "1", "--json")
    assert {"members": [1], "models": [str(tmp_path / "out")]}.items() <= json.loads(shown).items()
    expected = RewardEnsemble.load(joint_lora).rewards(ITEMS)[:, [1]]
    np.testing.assert_allclose(plain_rewards(tmp_path / "out"), expected, atol=1e-4)
    again = run("export", joint_lora, "-o", tmp_path / "out")
    assert (again.returncode, again.stderr.count("\n"), "--overwrite" in again.stderr) == (2, 1, True)


def test_a_full_disk_is_one_sentence_and_nothing_is_half_written(joint: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk; safetensors has its own error for it."""
    done = subprocess.run(
        [sys.executable, "-m", "pluralign", "export", str(joint), "-o", str(tmp_path / "out")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    sentence = "file too large; free some space and run the same command"
    assert done.stderr.splitlines()[-1] == f"pluralign: {tmp_path / 'out'}: {sentence}."
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
