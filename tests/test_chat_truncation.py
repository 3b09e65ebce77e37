"""Chat texts that are too long: they keep the first token, the headers and the response, and never exceed the limit."""

import importlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pluralign.text.classifier import chat_tokens, classifier_tokens, tokens_and_cut
from pluralign.votes.prompts import Message

TEMPLATE = (
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
    fast.chat_template = TEMPLATE
    return fast


def shown(tokenizer: Any, tokens: Any) -> str:
    return str(tokenizer.decode(tokens["input_ids"]))


def length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_chat_that_fits_is_read_as_it_is(tokenizer: Any) -> None:
    text = "<s><|start|>user<|end|>\nthe dog?<|eot|><|start|>assistant<|end|>\nthe fox<|eot|>"
    tokens, cut = tokens_and_cut(tokenizer, ("the dog?", "the fox"), length(tokenizer, text))
    assert (shown(tokenizer, tokens), cut) == (text, False)


def test_a_long_prompt_loses_its_beginning_and_keeps_its_header(tokenizer: Any) -> None:
    kept = "<s><|start|>user<|end|>\nlazy dog<|eot|><|start|>assistant<|end|>\nquick fox<|eot|>"
    tokens, cut = tokens_and_cut(tokenizer, ("the quick fox " * 30 + "lazy dog", "quick fox"), length(tokenizer, kept))
    assert (shown(tokenizer, tokens), cut) == (kept, True)


def test_the_oldest_turns_are_removed_first_and_the_system_message_stays(tokenizer: Any) -> None:
    chat = (
        Message("system", "be quick"),
        Message("user", "the lazy dog " * 10),
        Message("assistant", "the brown fox " * 10),
        Message("user", "over the dog?"),
    )
    kept = (
        "<s><|start|>system<|end|>\nbe quick<|eot|><|start|>user<|end|>\nover the dog?<|eot|>"
        "<|start|>assistant<|end|>\nthe fox<|eot|>"
    )
    limit = length(tokenizer, kept)
    assert shown(tokenizer, classifier_tokens(tokenizer, (chat, "the fox"), limit)) == kept
    room = shown(tokenizer, classifier_tokens(tokenizer, (chat, "the fox"), limit + 30))
    assert room.startswith("<s><|start|>system<|end|>\nbe quick<|eot|><|start|>user<|end|>\n<|eot|><|start|>assistant")
    assert room.endswith("brown fox<|eot|>" + kept.partition("be quick<|eot|>")[2])


def test_a_long_response_loses_its_beginning_after_the_whole_prompt(tokenizer: Any) -> None:
    tokens = classifier_tokens(tokenizer, ("the lazy dog?", "the fox jumps " * 50), 60)
    text = shown(tokenizer, tokens)
    assert text.startswith("<s><|start|>user<|end|>\n<|eot|><|start|>assistant<|end|>\n")
    assert text.endswith(" jumps<|eot|>")
    assert 55 <= len(tokens["input_ids"]) <= 60


def test_a_limit_below_the_template_keeps_the_end_of_the_text(tokenizer: Any) -> None:
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the dog?"}, {"role": "assistant", "content": "the fox"}], tokenize=False
    )
    expected = tokenizer(whole, add_special_tokens=False)["input_ids"][-5:]
    assert classifier_tokens(tokenizer, ("the dog?", "the fox"), 5)["input_ids"] == expected


def test_a_text_needs_few_passes_of_the_tokenizer(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[Any] = []
    call = type(tokenizer).__call__

    def counts(self: Any, *texts: Any, **options: Any) -> Any:
        passes.append(texts)
        return call(self, *texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counts)
    classifier_tokens(tokenizer, ("the dog?", "the fox"), 100)
    assert len(passes) == 1
    passes.clear()
    turns = tuple(Message(role, TEXT * 20) for role in ("user", "assistant", "user"))
    classifier_tokens(tokenizer, (turns, TEXT), 500)
    assert len(passes) <= 5


contents = st.text(st.sampled_from("the foxdgs \n日本語🙂ü"), max_size=40)
turns = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), contents), max_size=5)


@given(prompt=turns, response=contents, limit=st.integers(1, 120))
@settings(max_examples=150, deadline=None)
def test_a_text_has_at_most_limit_tokens_and_keeps_its_beginning(
    tokenizer: Any, prompt: Any, response: str, limit: int
) -> None:
    chat = [{"role": role, "content": content} for role, content in [*prompt, ("assistant", response)]]
    tokens, cut = chat_tokens(tokenizer, chat, limit)
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert len(tokens["input_ids"]) <= limit
    assert cut == (length(tokenizer, whole) > limit)
    headers = sum(length(tokenizer, f"<|start|>{turn['role']}<|end|>\n<|eot|>") for turn in chat)
    if limit > headers:
        assert tokens["input_ids"][:2] == tokenizer.convert_tokens_to_ids(["<s>", "<|start|>"])
        assert tokens["input_ids"][-1] == tokenizer.convert_tokens_to_ids("<|eot|>")


@pytest.mark.parametrize("limit", [30, 60, 90])
def test_a_tokenizer_without_offsets_gives_a_similar_text(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    item = ((Message("user", TEXT), Message("assistant", TEXT), Message("user", TEXT)), "the fox")
    fast = classifier_tokens(tokenizer, item, limit)["input_ids"]
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    slow = classifier_tokens(tokenizer, item, limit)["input_ids"]
    assert limit - 12 <= len(slow) <= limit
    assert slow[:5] == fast[:5]
    assert slow[-10:] == fast[-10:]
