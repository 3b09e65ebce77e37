"""Exported members in TRL, untouched: BERT and Llama, plain texts and messages; and the snippets of model cards."""

import importlib
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_classifier import ITEMS, write_bert, write_llama
from test_transformers_export import pad_as_fit_does, save_ensemble

from pluralign import RewardEnsemble, export
from pluralign.text.classifier import added_chat_template, model_rewards, reads_of
from pluralign.votes.prompts import Prompt, plain_text

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_torch_thread")]
QUICK: dict[str, Any] = {
    "max_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "save_strategy": "no",
    "bf16": False, "logging_steps": 1,
}  # fmt: skip
GENERATIONS: dict[str, Any] = {"num_generations": 2, "max_completion_length": 4}
KINDS = ("bert", "llama", "plain-llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, one ensemble of each kind, and its second member as an export."""
    folder = tmp_path_factory.mktemp("trl")
    pad_as_fit_does(write_llama(folder / "policy", "CausalLM"))
    write_bert(folder / "bert" / "backbone", 3)
    pad_as_fit_does(write_llama(folder / "llama" / "backbone", num_labels=3))
    pad_as_fit_does(write_llama(folder / "plain-llama" / "backbone", template=False, num_labels=3))
    for kind in KINDS:
        save_ensemble(folder / kind, Path("my-org/my-model"), "joint", False, [0, 1], 3)
        export(folder / kind, folder / f"{kind}-member", member=1)
    return folder


def messages(text: str, role: str = "assistant") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


@pytest.mark.parametrize("chat", [True, False], ids=["messages", "texts"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_member_is_a_reward_and_is_trained_further(folder: Path, tmp_path: Path, kind: str, chat: bool) -> None:
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    member = str(folder / f"{kind}-member")
    prompt: Any = messages("tea ?", "user") if chat else "tea ? "
    chosen, rejected = ((messages(text) if chat else text) for text in ("yes .", "no , never ."))
    grpo = trl.GRPOTrainer(
        model=str(folder / "policy"),
        reward_funcs=member,
        train_dataset=datasets.Dataset.from_dict({"prompt": [prompt] * 4}),
        args=trl.GRPOConfig(output_dir=str(tmp_path / "policy"), **QUICK, **GENERATIONS),
    )
    grpo.train()
    assert np.isfinite([row["reward"] for row in grpo.state.log_history if "reward" in row]).all()
    rows = {"prompt": [prompt] * 2, "chosen": [chosen] * 2, "rejected": [rejected] * 2}
    config = trl.RewardConfig(output_dir=str(tmp_path / "reward"), max_length=32, **QUICK)
    further = trl.RewardTrainer(model=member, args=config, train_dataset=datasets.Dataset.from_dict(rows))
    further.train()
    assert np.isfinite([row["loss"] for row in further.state.log_history if "loss" in row]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_messages_are_rendered_as_the_input_of_the_member(folder: Path, kind: str) -> None:
    """TRL tokenizes the rendered text without special tokens."""
    transformers, torch = importlib.import_module("transformers"), importlib.import_module("torch")
    place = folder / f"{kind}-member"
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(place).eval()
    rewards = []
    for prompt, response in ITEMS:
        text = tokenizer.apply_chat_template([*Prompt(prompt).messages, *messages(response)], tokenize=False)
        inputs = tokenizer(text=[text], return_tensors="pt", add_special_tokens=False)
        if kind == "bert":
            native = tokenizer(Prompt(prompt).joined("\n\n"), response)
            assert inputs["input_ids"][0].tolist() == native["input_ids"]
            assert set(inputs) == set(native), "this tokenizer gives no token types"
        elif kind == "plain-llama":
            assert inputs["input_ids"][0].tolist() == tokenizer(plain_text(prompt, response))["input_ids"]
        with torch.no_grad():
            rewards.append(model(**inputs).logits[0].numpy())
    expected = RewardEnsemble.load(folder / kind).rewards(ITEMS)[:, [1]]
    np.testing.assert_allclose(rewards, expected, atol=1e-4)
    np.testing.assert_allclose(model_rewards(place, ITEMS), expected, atol=1e-4)


def test_an_added_template_does_not_change_how_a_model_is_read(folder: Path) -> None:
    load = importlib.import_module("transformers").AutoTokenizer.from_pretrained
    assert [reads_of(load(folder / f"{kind}-member")) for kind in KINDS] == ["pair", "chat", "text"]
    bert = load(folder / "bert-member")
    assert bert.apply_chat_template([*messages("tea ?", "user"), *messages("yes .")], tokenize=False) == (
        "[CLS]tea ?[SEP]yes .[SEP]"
    )
    assert bert.apply_chat_template(messages("tea ?", "user"), tokenize=False) == "[CLS]tea ?[SEP]"
    assert added_chat_template(bert) == bert.chat_template
    assert bert.eos_token == "[SEP]"


# --- snippets of the card ---------------------------------------------------------------------------------------------


def run_snippets(card: str, policy: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run all Python code of a card in one scope, with a tiny policy and short training."""
    trl = importlib.import_module("trl")
    monkeypatch.setattr(trl, "GRPOConfig", partial(trl.GRPOConfig, **QUICK, **GENERATIONS))
    monkeypatch.setattr(trl, "RewardConfig", partial(trl.RewardConfig, **QUICK))
    snippets = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    scope: dict[str, Any] = {}
    for snippet in snippets:
        exec(snippet.replace("Qwen/Qwen3-0.6B", str(policy)), scope)
    assert len(snippets) >= 2
    return scope


@pytest.mark.parametrize("kind", KINDS)
def test_the_snippets_of_a_member_run(folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export(folder / kind, Path("exported"), member=1)
    scope = run_snippets(Path("exported/README.md").read_text(), folder / "policy", monkeypatch)
    expected = RewardEnsemble.load(folder / kind).rewards([("Tea?", "Yes, please.")])[0, 1]
    assert float(scope["rewards"]) == pytest.approx(expected, abs=1e-4)
    assert scope["trainer"].state.global_step == 1


def test_the_snippets_of_a_frozen_ensemble_run(
    town_folder: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # restores sys.path, which a snippet changes
    export(town_folder, Path("exported"))
    scope = run_snippets(Path("exported/README.md").read_text(), folder / "policy", monkeypatch)
    expected = RewardEnsemble.load(town_folder).rewards([("Tea?", "Yes, please."), ("Tea?", "No.")])
    np.testing.assert_allclose(scope["rewards"], expected, atol=1e-6)
    assert 0 <= scope["share"] <= 1
