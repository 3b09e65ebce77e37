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

from pluralign import RewardEnsemble, UsageError, export
from pluralign.ensemble.ensemble import trainer_item
from pluralign.text.classifier import added_chat_template, model_rewards, reads_of
from pluralign.text.encoders import HashingEncoder, TextFeatures
from pluralign.votes.prompts import Message, Prompt, plain_text

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
    config = trl.GRPOConfig(output_dir=str(tmp_path / "policy"), **QUICK, **GENERATIONS)
    prompts = datasets.Dataset.from_dict({"prompt": [prompt] * 4})
    grpo = trl.GRPOTrainer(model=str(folder / "policy"), reward_funcs=member, args=config, train_dataset=prompts)
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


def test_snippets_of_frozen_ones(
    town_folder: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # restores sys.path, which a snippet changes
    export(town_folder, Path("exported"))
    scope = run_snippets(Path("exported/README.md").read_text(), folder / "policy", monkeypatch)
    expected = RewardEnsemble.load(town_folder).rewards([("Tea?", "Yes, please."), ("Tea?", "No.")])
    np.testing.assert_allclose(scope["rewards"], expected, atol=1e-6)
    assert 0 <= scope["share"] <= 1


# --- reward func ------------------------------------------------------------------------------------------------------


ASKED = [{"role": "user", "content": "Tea?"}]


def test_a_member_rewards_texts_and_messages_alike(ensemble: RewardEnsemble) -> None:
    reward = ensemble.as_reward_func(member=2)
    texts = ["Yes, please.", "No.", "Yes, please."]
    expected = ensemble.rewards([("Tea?", text) for text in texts])[:, 2]
    plain = reward(prompts=["Tea?"] * 3, completions=texts)
    assert plain == pytest.approx(expected)
    assert all(type(value) is float for value in plain)
    answers = [messages(text) for text in texts]
    chats = reward(prompts=[ASKED] * 3, completions=answers, completion_ids=[[1]] * 3, task=None)
    assert chats == plain
    assert reward(prompts=[], completions=[]) == []
    assert reward.__name__ == "member_2"


@pytest.mark.parametrize("member", [None, 3, -1, "first", True])
def test_a_member_must_be_named(ensemble: RewardEnsemble, member: Any) -> None:
    with pytest.raises(UsageError, match="0 to 2"):
        ensemble.as_reward_func(member)


def test_each_distinct_text_is_encoded_once(ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = HashingEncoder.encode

    def count(self: HashingEncoder, items: Any) -> Any:
        encoded.append(len(items))
        return encode(self, items)

    monkeypatch.setattr(HashingEncoder, "encode", count)
    wide = ensemble.members.inputs
    ones, names = np.ones(8, dtype=np.float32), ("mean", "spread", "gain")
    grown = {name: np.concatenate([ones, getattr(wide, name)]) for name in names}
    theta = np.vstack([np.ones((8, 3)), ensemble.members.theta])
    members = type(ensemble.members)(type(wide)(**grown), theta)
    hashing = RewardEnsemble(members, ensemble.weights, TextFeatures("hashing:8"))
    hashing.as_reward_func(0)(prompts=["Tea?"] * 6, completions=["Yes.", "No."] * 3)
    assert encoded == [2]


def test_longer_chats_and_parts_of_messages_are_read() -> None:
    chat = [*ASKED, *messages("No."), {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
    turns = (Message("user", "Tea?"), Message("assistant", "No."), Message("user", "Why?"))
    assert trainer_item(chat, "So.") == (turns, "So.")
    calls = [{"role": "assistant", "content": None}, {"role": "tool", "content": "42"}, *messages("It is 42.")]
    before = turns[0], Message("assistant", ""), Message("tool", "42")
    assert trainer_item(ASKED, calls) == (before, "It is 42.")
    for wrong in ([{"text": "Tea?"}], 3, [], [{"role": "user", "content": [{"type": "image"}]}]):
        with pytest.raises(UsageError, match="must be a text or a list of messages"):
            trainer_item(wrong, "Yes.")
