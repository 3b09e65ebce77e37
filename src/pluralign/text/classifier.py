"""Rewards of pretrained sequence classifiers, equal to those of each text alone."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError
from pluralign.core.types import Progress
from pluralign.text.loading import Tokens, context_length, in_batches, load_model, padded, read_config, without_adapter
from pluralign.votes.prompts import Item, chat_messages, plain_prompt, plain_text

# --- Chat texts that are too long: the contents of messages are shortened before the chat template is applied.


TRUNCATION = "contents"
"""Name of this rule. It is part of the key under which rewards are cached."""
Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages for a chat template; the last one is the response."""


def chat_tokens(tokenizer: Any, chat: Chat, limit: int) -> tuple[Tokens, bool]:
    """Return the tokens of a rendered chat, at most ``limit``, and whether it was shortened.

    A chat that fits is rendered as it is. Otherwise tokens are removed from the beginning of the contents: from the
    oldest turn on, then from the system message, and from the response last. Turns without content that come before
    the first user turn that is still needed are removed with their headers. If the template alone is too long, its end
    is kept.

    Args:
        tokenizer: with a chat template; it must truncate on the left.
        chat: the messages of the prompt, and the response.
        limit: maximum number of tokens.
    """
    whole = _rendered(tokenizer, chat)
    excess = len(whole["input_ids"]) - limit
    if excess <= 0:
        return whole, False
    starts = _token_starts(tokenizer, [message["content"] for message in chat])
    total, dropped, kept = sum(map(len, starts)), 0, whole
    while excess > 0 and dropped < total:  # once is not always enough: the rest of a cut word has tokens of its own
        dropped = min(total, dropped + excess)
        kept = _rendered(tokenizer, _shortened(chat, starts, dropped))
        excess = len(kept["input_ids"]) - limit
    if excess > 0:
        return _rendered(tokenizer, chat, truncation=True, max_length=limit), True
    if excess < 0:  # headers were removed too, so there is room
        longer = _rendered(tokenizer, _shortened(chat, starts, dropped + excess))
        kept = longer if len(longer["input_ids"]) <= limit else kept
    return kept, True


def _rendered(tokenizer: Any, chat: Chat, **options: Any) -> Tokens:
    text = tokenizer.apply_chat_template(list(chat), tokenize=False)
    return dict(tokenizer(text, add_special_tokens=False, verbose=False, **options))


def _token_starts(tokenizer: Any, contents: Sequence[str]) -> list[Sequence[int]]:
    """Return where the tokens of each content start. Without a fast tokenizer every character counts as a token."""
    if not tokenizer.is_fast:
        return [range(len(content)) for content in contents]
    found = tokenizer(list(contents), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [[start for start, _ in offsets] for offsets in found["offset_mapping"]]


def _shortened(chat: Chat, starts: Sequence[Sequence[int]], dropped: int) -> list[Mapping[str, Any]]:
    """Return the chat without the first ``dropped`` tokens of its contents, and without turns that are then empty."""
    *prompt, response = range(len(chat))
    order = [*sorted(prompt, key=lambda index: chat[index]["role"] == "system"), response]
    messages = list(chat)
    for index in order:
        here = min(max(dropped, 0), len(starts[index]))
        dropped -= here
        if here:
            rest = chat[index]["content"][starts[index][here] :] if here < len(starts[index]) else ""
            messages[index] = {**chat[index], "content": rest}
    turns = [index for index in range(len(chat)) if chat[index]["role"] != "system"]
    first = next((index for index in turns if messages[index]["content"]), response)
    begin = max((index for index in turns if index <= first and chat[index]["role"] == "user"), default=turns[0])
    return [message for index, message in enumerate(messages) if index >= begin or index not in turns]


WEIGHTS_KEY = "pluralign_weights"
"""Key of the members' weights in the configuration of a model with several rewards."""
UNDECIDED_KEY = "pluralign_undecided"
"""Key of the undecided share beside them; 0 if it is missing."""
Reads = Literal["chat", "pair", "text"]
"""Input format of prompt and response: a chat template, two texts with a separator, or one text."""
ADDED_TEMPLATE = "{#- pluralign: for tools that render messages; the model reads a pair or a plain text -#}"
"""Start of a chat template that ``added_chat_template`` wrote. Such a model is still read as a pair or a text."""


def reward_model_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a sequence classifier.

    Raises:
        DataError: the folder holds another kind of model; transformers would give it a head of random weights.
    """
    config = read_config(folder, "name a folder that pluralign fit wrote, or a transformers reward model")
    names = config.get("architectures") or ["model without a named architecture"]
    if not any(str(name).endswith("ForSequenceClassification") for name in names):
        remedy = "name a model saved as …ForSequenceClassification"
        raise DataError(f"it holds a {names[0]}, not a reward model", file=str(folder), remedy=remedy)
    return config


def model_rewards(folder: Path, items: Sequence[Item], progress: Progress | None = None) -> FloatArray:
    """Return the rewards of a sequence classifier for each (prompt, response), ``(n_items, n_labels)``.

    The chat template of the tokenizer formats each text. Without a template, prompt and response are the two texts of a
    pair, or one text with an empty line between them if the tokenizer has no separator. Texts that are too long lose
    the beginning of the prompt; a chat keeps its first token and its headers.

    Args:
        folder: a transformers folder with a …ForSequenceClassification model.
        items: prompts with responses.
        progress: called with the number of items done and the total.
    """
    reward_model_config(folder)
    model, tokenizer = load_model(folder, "AutoModelForSequenceClassification")
    return classifier_rewards(model, tokenizer, items, context_length(model, tokenizer), progress)


def classifier_rewards(
    model: Any, tokenizer: Any, items: Sequence[Item], limit: int, progress: Progress | None = None
) -> FloatArray:
    """Return the rewards of a loaded sequence classifier, ``(n_items, n_labels)``. See ``model_rewards``.

    Args:
        model: the classifier.
        tokenizer: its tokenizer, which must truncate on the left.
        items: prompts with responses.
        limit: maximum number of tokens per text.
        progress: called with the number of items done and the total.
    """
    texts = [classifier_tokens(tokenizer, item, limit) for item in items]
    own_pad = model.config.get_text_config().pad_token_id

    def rewards(batch: Sequence[int]) -> Any:
        # Decoders score the last token that is not padding. For a decoder without a padding token this must be the last
        # token of the text, so any id that these texts do not use can pad them.
        used = {token for index in batch for token in texts[index]["input_ids"]}
        pad = own_pad if own_pad is not None else next(token for token in range(len(used) + 1) if token not in used)
        model.config.get_text_config().pad_token_id = pad
        return model(**padded([texts[index] for index in batch], pad, model.device)).logits.float()

    try:
        return in_batches(texts, rewards, progress)
    finally:
        model.config.get_text_config().pad_token_id = own_pad


def classifier_head(model: Any) -> tuple[str, Any]:
    """Return the name and the layer of a sequence classifier's head: the last linear layer outside the body.

    It is ``score`` in decoders, ``classifier`` or the like in encoders. The model may be wrapped by peft.
    """
    import torch

    inner = without_adapter(model)
    linear = [(str(name), layer) for name, layer in inner.named_modules() if isinstance(layer, torch.nn.Linear)]
    return [(name, layer) for name, layer in linear if name.split(".")[0] != inner.base_model_prefix][-1]


def remove_head(model: Any) -> tuple[str, Any]:
    """Replace the head of a sequence classifier by the identity, and return its name and the layer.

    The model then returns the states that the head read, pooled as for the head: of the last token in decoders.
    """
    import torch

    name, head = classifier_head(model)
    without_adapter(model).set_submodule(name, torch.nn.Identity())
    return name, head


def use_float32_head(model: Any) -> None:
    """Compute the head of a sequence classifier in float32. The body keeps its precision."""
    _, head = classifier_head(model)
    head.float()
    head.register_forward_pre_hook(lambda _, inputs: tuple(value.float() for value in inputs))


def classifier_tokens(tokenizer: Any, item: Item, limit: int) -> Tokens:
    """Return the tokens that a sequence classifier reads for a prompt and its response, at most ``limit``."""
    return tokens_and_cut(tokenizer, item, limit)[0]


def tokens_and_cut(tokenizer: Any, item: Item, limit: int) -> tuple[Tokens, bool]:
    """Return the tokens that a sequence classifier reads, at most ``limit``, and whether the text was too long."""
    prompt, response = item
    reads = reads_of(tokenizer)
    if reads == "chat":
        return chat_tokens(tokenizer, chat_messages(prompt, response), limit)
    texts = (plain_prompt(prompt), response) if reads == "pair" else (plain_text(prompt, response),)
    tokens = tokenizer(*texts, verbose=False)
    if len(tokens["input_ids"]) <= limit:
        return dict(tokens), False
    cut: str | bool = True
    if reads == "pair":
        room = limit - tokenizer.num_special_tokens_to_add(pair=True)
        fits = len(tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"]) < room
        cut = "only_first" if fits else "longest_first"
    return dict(tokenizer(*texts, truncation=cut, max_length=limit)), True


def reads_of(tokenizer: Any) -> Reads:
    """Return the input format of a sequence classifier: see ``model_rewards``."""
    if tokenizer.chat_template and not str(tokenizer.chat_template).startswith(ADDED_TEMPLATE):
        return "chat"
    return "pair" if tokenizer.sep_token else "text"


def added_chat_template(tokenizer: Any) -> str:
    """Return a chat template that renders messages as the input of a classifier of pairs or plain texts.

    TRL renders messages with the chat template of a reward model and adds no special tokens. The template writes them:
    the rendered text has the same tokens as the pair or the plain text. (Only token types differ: a rendered text has a
    single type.)
    """
    pair = reads_of(tokenizer) == "pair"
    tokens = tokenizer(*("tea", "tea")[: 1 + pair])
    names, text_of = tokenizer.convert_ids_to_tokens(tokens["input_ids"]), tokens.sequence_ids()  # None: special
    places = [place for place, text in enumerate(text_of) if text is not None]
    middle = [place for place in range(places[0], places[-1]) if text_of[place] is None]
    first, last = "".join(names[: places[0]]), "".join(names[places[-1] + 1 :])
    between = "".join(names[place] for place in middle) if pair else "\n\n"
    return (
        f"{ADDED_TEMPLATE}"
        "{%- set turns = messages[:-1] if messages[-1]['role'] == 'assistant' else messages -%}"
        f"{{{{- {json.dumps(first)} -}}}}"
        "{%- if turns | length == 1 and turns[0]['role'] == 'user' -%}{{- turns[0]['content'] -}}"
        "{%- else -%}{%- for turn in turns -%}{{- turn['role'] + ': ' + turn['content'] -}}"
        "{%- if not loop.last -%}{{- '\\n\\n' -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
        f"{{{{- {json.dumps(between)} -}}}}"
        "{%- if turns | length < messages | length -%}"
        f"{{{{- messages[-1]['content'] + {json.dumps(last)} -}}}}"
        "{%- endif -%}"
    )
