"""Reward models: every reward equals that of a direct pass over one text."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import CHAT_TEMPLATE, word_tokenizer

from pluralign.core.errors import DataError
from pluralign.text import loading as batches
from pluralign.text.classifier import classifier_head, classifier_rewards, model_rewards
from pluralign.text.loading import load_model
from pluralign.votes.prompts import Item, Message

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "initializer_range": 0.5,  # so that rewards differ from text to text
}  # fmt: skip
ITEMS: list[Item] = [
    ("tea ?", "yes ."),
    ("tea ?", "no , never , thank you , no , never ."),
    ("rum ?", "yes"),
    ((Message("user", "tea ?"), Message("assistant", "no ."), Message("user", "rum ?")), "never , thank you ."),
]


def write_bert(folder: Path, labels: int = 1, **config: Any) -> Path:
    """Write a classifier of text pairs, without a chat template."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    tokenizers = importlib.import_module("tokenizers")
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
    tokenizer = word_tokenizer(special, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", model_max_length=32)
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)
    torch.manual_seed(labels)
    options = {"vocab_size": 32, "max_position_embeddings": 32, "num_labels": labels, **SIZES, **config}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(pad_token_id=1, **options))
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder)
    return folder


def write_llama(folder: Path, kind: str = "SequenceClassification", template: bool = True, **config: Any) -> Path:
    """Write a decoder; its texts end in </s>, and it has no padding token unless ``config`` gives one."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    tokenizer = word_tokenizer(["<unk>", "<s>", "</s>"], bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE if template else None
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    options = {"vocab_size": 32, "max_position_embeddings": 64, "num_key_value_heads": 2, **SIZES, **config}
    if kind == "SequenceClassification":
        options = {"num_labels": 1, "pad_token_id": None} | options
    model = getattr(transformers, f"LlamaFor{kind}")(transformers.LlamaConfig(**options))
    torch.nn.init.normal_((model.score if kind == "SequenceClassification" else model.lm_head).weight)
    model.save_pretrained(folder)
    return folder


def alone(folder: Path, *texts: str, special: bool = True) -> Any:
    """Return the logits of one text, or of one pair of texts, without padding or truncation."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(**tokenizer(*texts, return_tensors="pt", add_special_tokens=special)).logits[0].numpy()


CHATS = [
    "<s>user tea ? </s>assistant yes . </s>",
    "<s>user tea ? </s>assistant no , never , thank you , no , never . </s>",
    "<s>user rum ? </s>assistant yes </s>",
    "<s>user tea ? </s>assistant no . </s>user rum ? </s>assistant never , thank you . </s>",
]


@pytest.mark.slow
@pytest.mark.parametrize("pad", [None, 2], ids=["no padding token", "padded with the end token"])
def test_a_decoder_gives_each_chat_the_same_reward_as_alone(tmp_path: Path, pad: int | None) -> None:
    folder = write_llama(tmp_path / "reward", pad_token_id=pad)
    rewards = model_rewards(folder, ITEMS)
    expected = np.stack([alone(folder, chat, special=False) for chat in CHATS])
    np.testing.assert_allclose(rewards, expected, atol=1e-5)
    assert rewards.shape == (4, 1)
    assert np.ptp(rewards) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifier_of_pairs_reads_prompt_and_response_as_two_texts(tmp_path: Path, labels: int) -> None:
    folder = write_bert(tmp_path / "reward", labels)
    rewards = model_rewards(folder, ITEMS[:3])
    expected = np.stack([alone(folder, str(prompt), response) for prompt, response in ITEMS[:3]])
    np.testing.assert_allclose(rewards, expected, atol=1e-5)
    assert rewards.shape == (3, labels)
    assert np.ptp(rewards, axis=0).min() > 0.1
    chat = model_rewards(folder, ITEMS[3:])[0]
    whole = "user: tea ?\n\nassistant: no .\n\nuser: rum ?"
    np.testing.assert_allclose(chat, alone(folder, whole, "never , thank you ."), atol=1e-5)


@pytest.mark.slow
def test_a_decoder_without_template_or_separator_reads_one_text(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "reward", template=False)
    np.testing.assert_allclose(model_rewards(folder, ITEMS[:1])[0], alone(folder, "tea ?\n\nyes ."), atol=1e-5)


@pytest.mark.slow
def test_a_text_that_is_too_long_loses_the_beginning_of_the_prompt(tmp_path: Path) -> None:
    pairs = write_bert(tmp_path / "pairs")
    rewards = model_rewards(pairs, [("rum ? " * 40 + "tea", "no , never ."), ("tea", "yes . " * 40)])
    np.testing.assert_allclose(rewards[0], alone(pairs, "rum ? " * 12 + "tea", "no , never ."), atol=1e-5)
    assert np.isfinite(rewards[1]).all()
    chats = write_llama(tmp_path / "chats", max_position_embeddings=16)
    kept = "<s>user tea ? tea ? </s>assistant no , never , thank you . </s>"
    rewards = model_rewards(chats, [("tea ? " * 40, "no , never , thank you .")])
    np.testing.assert_allclose(rewards[0], alone(chats, kept, special=False), atol=1e-5)


@pytest.mark.slow
def test_batches_are_limited_and_progress_ends_at_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_bert(tmp_path / "reward")
    whole = model_rewards(folder, ITEMS)
    monkeypatch.setattr(batches, "BATCH_SIZE", 3)
    reports: list[tuple[int, int]] = []
    np.testing.assert_allclose(
        model_rewards(folder, ITEMS, lambda done, total: reports.append((done, total))), whole, atol=1e-5
    )
    assert reports == [(3, 4), (4, 4)]
    assert list(batches.batch_indices([5, 100, 9], 100)) == [[1], [2, 0]], "few tokens per batch, the longest first"


@pytest.mark.slow
def test_rewards_do_not_change_the_padding_token_of_a_loaded_model(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "reward")
    model, tokenizer = load_model(folder, "AutoModelForSequenceClassification")
    first = classifier_rewards(model, tokenizer, ITEMS, 64)
    assert model.config.pad_token_id is None
    np.testing.assert_array_equal(classifier_rewards(model, tokenizer, ITEMS, 64), first)


@pytest.mark.slow
def test_the_head_is_the_last_linear_layer_outside_the_body(tmp_path: Path) -> None:
    for folder, name in ((write_llama(tmp_path / "llama"), "score"), (write_bert(tmp_path / "bert"), "classifier")):
        model, _ = load_model(folder, "AutoModelForSequenceClassification")
        assert classifier_head(model)[0] == name


@pytest.mark.slow
def test_only_complete_reward_models_are_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither an ensemble\.json nor a config\.json"):
        model_rewards(tmp_path, ITEMS)
    causal = write_llama(tmp_path / "causal", "CausalLM")
    with pytest.raises(DataError, match=r"it holds a LlamaForCausalLM, not a reward model; name a model saved as"):
        model_rewards(causal, ITEMS)
    config = json.loads((causal / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    (causal / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"its weights lack score\.weight"):
        model_rewards(causal, ITEMS)
    (causal / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"transformers cannot load it"):
        model_rewards(causal, ITEMS)
