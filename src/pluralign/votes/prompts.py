"""Prompts: a text, or the messages of a chat. Both kinds are read, hashed and displayed through ``Prompt``."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias


class Message(NamedTuple):
    """One turn of a chat prompt."""

    role: str
    content: str


PromptLike: TypeAlias = str | tuple[Message, ...]
"""A raw prompt, as callers pass it and votes store it: a text, or the messages of a chat."""
Item: TypeAlias = tuple[PromptLike, str]
"""A prompt and one response to it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Reads both kinds of prompt the same way.

    Example:
        >>> chat = Prompt((Message("user", "Tea?"), Message("assistant", "No.")))
        >>> chat.text
        'user: Tea?\\nassistant: No.'
        >>> Prompt("Why?").messages
        [{'role': 'user', 'content': 'Why?'}]
    """

    value: PromptLike

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a list of messages."""
        return not isinstance(self.value, str)

    @property
    def turns(self) -> tuple[Message, ...]:
        """The messages of a chat. A text counts as one user message."""
        return (Message("user", self.value),) if isinstance(self.value, str) else self.value

    @property
    def is_one_question(self) -> bool:
        """Whether the prompt is a chat with a single user message."""
        return self.is_chat and len(self.turns) == 1 and self.turns[0].role == "user"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The list of role/content dicts that chat templates take."""
        return [turn._asdict() for turn in self.turns]

    @property
    def json(self) -> str | list[dict[str, str]]:
        """The prompt as stored in JSON files: the text, or the list of messages."""
        return self.value if isinstance(self.value, str) else self.messages

    @property
    def text(self) -> str:
        """The prompt for display: the text, or one line per turn of a chat."""
        return self.joined("\n")

    def joined(self, separator: str) -> str:
        """Return the text, or the turns of a chat as ``role: content``, joined by the separator."""
        if isinstance(self.value, str):
            return self.value
        return separator.join(f"{turn.role}: {turn.content}" for turn in self.value)

    @property
    def key(self) -> str:
        """The text that is hashed: the text itself, or the messages as JSON."""
        if isinstance(self.value, str):
            return self.value
        return json.dumps(self.value, ensure_ascii=False, separators=(",", ":"))

    def hash(self, seed: int = 0) -> float:
        """Return a number in [0, 1) that depends only on the prompt and the seed."""
        key = hashlib.blake2b(self.key.encode(), digest_size=8, salt=seed.to_bytes(8, "little", signed=True))
        return int.from_bytes(key.digest(), "little") / 2**64


def text_key(prompt: PromptLike, response: str) -> str:
    """Return the cache key of a prompt and a response.

    The key of a chat starts with a control character, because the JSON of a chat could also be a text prompt.
    """
    read = Prompt(prompt)
    return f"{chr(30) if read.is_chat else ''}{read.key}\x1f{response}"


def chat_messages(prompt: PromptLike, response: str) -> list[dict[str, Any]]:
    """Return a prompt and the response of the assistant as a list of messages for chat templates."""
    return [*Prompt(prompt).messages, {"role": "assistant", "content": response}]


def plain_text(prompt: PromptLike, response: str) -> str:
    """Return a prompt and a response as one text, for models without a chat template.

    Example:
        >>> plain_text("Tea?", "Yes.")
        'Tea?\\n\\nYes.'
    """
    return f"{plain_prompt(prompt)}\n\n{response}"


def plain_prompt(prompt: PromptLike) -> str:
    """Return a prompt as one text, with a blank line between the turns of a chat."""
    return Prompt(prompt).joined("\n\n")
