"""Reward models: every reward equals that of a direct pass over one text. Long chats keep headers and the response."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiny import CHAT_TEMPLATE, word_tokenizer

from pluralign.core.errors import DataError
from pluralign.text import classifier, loading as batches
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
    rewards = classifier.model_rewards(folder, ITEMS)
    expected = np.stack([alone(folder, chat, special=False) for chat in CHATS])
    np.testing.assert_allclose(rewards, expected, atol=1e-5)
    assert rewards.shape == (4, 1)
    assert np.ptp(rewards) > 0.1
    model, tokenizer = load_model(folder, "AutoModelForSequenceClassification")
    np.testing.assert_allclose(classifier.classifier_rewards(model, tokenizer, ITEMS, 64), expected, atol=1e-5)
    assert model.config.pad_token_id == pad, "the padding token of a loaded model does not change"


@pytest.mark.slow
@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifier_of_pairs_reads_prompt_and_response_as_two_texts(tmp_path: Path, labels: int) -> None:
    folder = write_bert(tmp_path / "reward", labels)
    rewards = classifier.model_rewards(folder, ITEMS[:3])
    expected = np.stack([alone(folder, str(prompt), response) for prompt, response in ITEMS[:3]])
    np.testing.assert_allclose(rewards, expected, atol=1e-5)
    assert rewards.shape == (3, labels)
    assert np.ptp(rewards, axis=0).min() > 0.1
    chat = classifier.model_rewards(folder, ITEMS[3:])[0]
    whole = "user: tea ?\n\nassistant: no .\n\nuser: rum ?"
    np.testing.assert_allclose(chat, alone(folder, whole, "never , thank you ."), atol=1e-5)


@pytest.mark.slow
def test_a_decoder_without_template_or_separator_reads_one_text(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "reward", template=False)
    np.testing.assert_allclose(
        classifier.model_rewards(folder, ITEMS[:1])[0], alone(folder, "tea ?\n\nyes ."), atol=1e-5
    )


@pytest.mark.slow
def test_a_text_that_is_too_long_loses_the_beginning_of_the_prompt(tmp_path: Path) -> None:
    pairs = write_bert(tmp_path / "pairs")
    rewards = classifier.model_rewards(pairs, [("rum ? " * 40 + "tea", "no , never ."), ("tea", "yes . " * 40)])
    np.testing.assert_allclose(rewards[0], alone(pairs, "rum ? " * 12 + "tea", "no , never ."), atol=1e-5)
    assert np.isfinite(rewards[1]).all()
    chats = write_llama(tmp_path / "chats", max_position_embeddings=16)
    kept = "<s>user tea ? tea ? </s>assistant no , never , thank you . </s>"
    rewards = classifier.model_rewards(chats, [("tea ? " * 40, "no , never , thank you .")])
    np.testing.assert_allclose(rewards[0], alone(chats, kept, special=False), atol=1e-5)


@pytest.mark.slow
def test_batches_are_limited_and_progress_ends_at_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_bert(tmp_path / "reward")
    whole = classifier.model_rewards(folder, ITEMS)
    monkeypatch.setattr(batches, "BATCH_SIZE", 3)
    reports: list[tuple[int, int]] = []
    again = classifier.model_rewards(folder, ITEMS, lambda done, total: reports.append((done, total)))
    np.testing.assert_allclose(again, whole, atol=1e-5)
    assert reports == [(3, 4), (4, 4)]
    assert list(batches.batch_indices([5, 100, 9], 100)) == [[1], [2, 0]], "few tokens per batch, the longest first"


@pytest.mark.slow
def test_the_head_is_the_last_linear_layer_outside_the_body(tmp_path: Path) -> None:
    for folder, name in ((write_llama(tmp_path / "llama"), "score"), (write_bert(tmp_path / "bert"), "classifier")):
        model, _ = load_model(folder, "AutoModelForSequenceClassification")
        assert classifier.classifier_head(model)[0] == name


@pytest.mark.slow
def test_only_complete_reward_models_are_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no config\.json in it; name a folder that pluralign fit wrote"):
        classifier.model_rewards(tmp_path, ITEMS)
    causal = write_llama(tmp_path / "causal", "CausalLM")
    with pytest.raises(DataError, match=r"it holds a LlamaForCausalLM, not a reward model; name a model saved as"):
        classifier.model_rewards(causal, ITEMS)
    config = (causal / "config.json").read_text().replace("LlamaForCausalLM", "LlamaForSequenceClassification")
    (causal / "config.json").write_text(config)
    with pytest.raises(DataError, match=r"its weights lack score\.weight"):
        classifier.model_rewards(causal, ITEMS)
    (causal / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"transformers cannot load it"):
        classifier.model_rewards(causal, ITEMS)


# --- chat texts that are too long -----------------------------------------------------------------------------------

HEADERS = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start|>' + message['role'] + '<|end|>\n' + "
    "message['content'] | trim + '<|eot|>' }}{% endfor %}"
)
"""Like Llama 3's: a header per turn, contents are trimmed."""
TEXT = "The quick brown fox jumps over the lazy dog; wörter mit ümlauten, 日本語の文章, 🙂 🙃 user assistant system"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte-level tokenizer, so that some characters have several tokens, and tokens can merge at a cut."""
    tokenizers, transformers = importlib.import_module("tokenizers"), importlib.import_module("transformers")
    special = ["<s>", "<|start|>", "<|end|>", "<|eot|>"]
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    trained.train_from_iterator([TEXT], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained, bos_token="<s>", eos_token="<|eot|>", truncation_side="left"
    )
    fast.chat_template = HEADERS
    return fast


def shown(tokenizer: Any, tokens: Any) -> str:
    return str(tokenizer.decode(tokens["input_ids"]))


START, ANSWERED = "<s><|start|>user<|end|>\n", "<|eot|><|start|>assistant<|end|>\n"


def length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("prompt", "response", "kept"),
    [
        ("the dog?", "the fox", f"{START}the dog?{ANSWERED}the fox<|eot|>"),
        ("the quick fox " * 30 + "lazy dog", "quick fox", f"{START}lazy dog{ANSWERED}quick fox<|eot|>"),
    ],
    ids=["a chat that fits", "a prompt that loses its beginning"],
)
def test_a_prompt_loses_its_beginning_only_if_it_must(tokenizer: Any, prompt: str, response: str, kept: str) -> None:
    tokens, cut = classifier.tokens_and_cut(tokenizer, (prompt, response), length(tokenizer, kept))
    assert (shown(tokenizer, tokens), cut) == (kept, len(prompt) > 50)


def test_the_oldest_turns_are_removed_first_and_the_system_message_stays(tokenizer: Any) -> None:
    chat = (
        Message("system", "be quick"),
        Message("user", "the lazy dog " * 10),
        Message("assistant", "the brown fox " * 10),
        Message("user", "over the dog?"),
    )
    system = "<s><|start|>system<|end|>\nbe quick<|eot|><|start|>user<|end|>\n"
    kept = f"{system}over the dog?{ANSWERED}the fox<|eot|>"
    limit = length(tokenizer, kept)
    assert shown(tokenizer, classifier.classifier_tokens(tokenizer, (chat, "the fox"), limit)) == kept
    room = shown(tokenizer, classifier.classifier_tokens(tokenizer, (chat, "the fox"), limit + 30))
    assert room.startswith(f"{system}<|eot|><|start|>assistant")
    assert room.endswith("brown fox<|eot|>" + kept.partition("be quick<|eot|>")[2])


def test_a_long_response_loses_its_beginning_after_the_whole_prompt(tokenizer: Any) -> None:
    tokens = classifier.classifier_tokens(tokenizer, ("the lazy dog?", "the fox jumps " * 50), 60)
    text = shown(tokenizer, tokens)
    assert text.startswith(START + ANSWERED)
    assert text.endswith(" jumps<|eot|>")
    assert 55 <= len(tokens["input_ids"]) <= 60


def test_a_limit_below_the_template_keeps_the_end_of_the_text(tokenizer: Any) -> None:
    expected = tokenizer(f"{START}the dog?{ANSWERED}the fox<|eot|>", add_special_tokens=False)["input_ids"][-5:]
    assert classifier.classifier_tokens(tokenizer, ("the dog?", "the fox"), 5)["input_ids"] == expected


contents = st.text(st.sampled_from("the foxdgs \n日本語🙂ü"), max_size=40)
turns = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), contents), max_size=5)


@given(prompt=turns, response=contents, limit=st.integers(1, 120))
@settings(max_examples=150, deadline=None)
def test_a_text_has_at_most_limit_tokens(tokenizer: Any, prompt: Any, response: str, limit: int) -> None:
    chat = [{"role": role, "content": content} for role, content in [*prompt, ("assistant", response)]]
    tokens, cut = classifier.chat_tokens(tokenizer, chat, limit)
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert len(tokens["input_ids"]) <= limit
    assert cut == (length(tokenizer, whole) > limit)
    headers = sum(length(tokenizer, f"<|start|>{turn['role']}<|end|>\n<|eot|>") for turn in chat)
    if limit > headers:
        assert tokens["input_ids"][:2] == tokenizer.convert_tokens_to_ids(["<s>", "<|start|>"])
        assert tokens["input_ids"][-1] == tokenizer.convert_tokens_to_ids("<|eot|>")


@pytest.mark.parametrize("limit", [30, 60, 90])
def test_a_slow_tokenizer_gives_a_similar_text(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    item = ((Message("user", TEXT), Message("assistant", TEXT), Message("user", TEXT)), "the fox")
    fast = classifier.classifier_tokens(tokenizer, item, limit)["input_ids"]
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    slow = classifier.classifier_tokens(tokenizer, item, limit)["input_ids"]
    assert limit - 12 <= len(slow) <= limit
    assert slow[:5] == fast[:5]
    assert slow[-10:] == fast[-10:]
