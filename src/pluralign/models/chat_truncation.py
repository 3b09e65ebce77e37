"""Chat texts that are too long: the contents of messages are shortened before the chat template is applied.

Cutting the rendered text would remove the first token of the model (BOS) and the headers of the turns, which every text
of the training of a chat model starts with.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pluralign.models.batches import Tokens

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
