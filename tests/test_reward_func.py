"""Reward functions for trainers: rewards of one member for texts and messages, each distinct text encoded once."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_classifier import write_llama
from test_transformers_export import pad_as_fit_does, save_ensemble

from pluralign import RewardEnsemble
from pluralign.core.errors import UsageError
from pluralign.ensemble.ensemble import trainer_item
from pluralign.text.encoders import HashingEncoder
from pluralign.text.features import TextFeatures
from pluralign.votes.prompts import Message

ASKED = [{"role": "user", "content": "Tea?"}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_a_member_rewards_texts_and_messages_alike(ensemble: RewardEnsemble) -> None:
    reward = ensemble.as_reward_func(member=2)
    texts = ["Yes, please.", "No.", "Yes, please."]
    expected = ensemble.rewards([("Tea?", text) for text in texts])[:, 2]
    plain = reward(prompts=["Tea?"] * 3, completions=texts)
    assert plain == pytest.approx(expected)
    assert all(type(value) is float for value in plain)
    chats = reward(prompts=[ASKED] * 3, completions=[said(text) for text in texts], completion_ids=[[1]] * 3, task=None)
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
    grown = {
        name: np.concatenate([np.ones(8, dtype=np.float32), getattr(wide, name)]) for name in ("mean", "spread", "gain")
    }
    theta = np.vstack([np.ones((8, 3)), ensemble.members.theta])
    members = type(ensemble.members)(type(wide)(**grown), theta)
    hashing = RewardEnsemble(members, ensemble.weights, TextFeatures("hashing:8"))
    hashing.as_reward_func(0)(prompts=["Tea?"] * 6, completions=["Yes.", "No."] * 3)
    assert encoded == [2]


def test_longer_chats_and_parts_of_messages_are_read() -> None:
    chat = [
        *ASKED,
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    ]
    turns = (Message("user", "Tea?"), Message("assistant", "No."), Message("user", "Why?"))
    assert trainer_item(chat, "So.") == (turns, "So.")
    calls = [{"role": "assistant", "content": None}, {"role": "tool", "content": "42"}, *said("It is 42.")]
    assert trainer_item(ASKED, calls) == (
        (turns[0], Message("assistant", ""), Message("tool", "42")), "It is 42."
    )  # fmt: skip
    for wrong in ([{"text": "Tea?"}], 3, [], [{"role": "user", "content": [{"type": "image"}]}]):
        with pytest.raises(UsageError, match="must be a text or a list of messages"):
            trainer_item(wrong, "Yes.")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_grpo_trains_with_a_member_of_a_fine_tuned_ensemble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is loaded once, although the function is called with other texts at every step."""
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    transformers = importlib.import_module("transformers")
    pad_as_fit_does(write_llama(tmp_path / "dir" / "backbone", num_labels=3))
    tuned = save_ensemble(tmp_path / "dir", Path("my-org/llama"), "joint", False, [0, 1], 3)
    policy = pad_as_fit_does(write_llama(tmp_path / "policy", "CausalLM"))
    load, loaded = transformers.AutoModelForSequenceClassification.from_pretrained, []

    def count(*arguments: Any, **options: Any) -> Any:
        loaded.append(arguments[0])
        return load(*arguments, **options)

    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_pretrained", count)
    config = trl.GRPOConfig(
        output_dir=str(tmp_path / "tuned"), max_steps=2, per_device_train_batch_size=2, num_generations=2,
        max_completion_length=4, report_to=[], use_cpu=True, save_strategy="no", bf16=False, logging_steps=1,
    )  # fmt: skip
    prompts = datasets.Dataset.from_dict({"prompt": [ASKED] * 4})
    reward = tuned.as_reward_func(1)
    trainer = trl.GRPOTrainer(model=str(policy), reward_funcs=reward, args=config, train_dataset=prompts)
    trainer.train()
    logged = [row["rewards/member_1/mean"] for row in trainer.state.log_history if "reward" in row]
    assert len(logged) == 2
    assert np.isfinite(logged).all()
    assert len(loaded) == 1
