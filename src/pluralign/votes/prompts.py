"""Prompts: a text, or the messages of a chat. Both kinds are read, hashed and displayed through ``Prompt``."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pluralign.core.arrays import Mask
from pluralign.core.errors import UsageError
from pluralign.core.options import check_seed
from pluralign.theory.intervals import ENOUGH_CLUSTERS


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

    @property
    def identity(self) -> int:
        """A 64-bit hash that tells whether two prompts ask the same: white space does not count, nor whether a single
        user message is a chat or a text.

        Example:
            >>> Prompt("Tea?\\n").identity == Prompt((Message("user", "Tea?"),)).identity
            True
        """
        same = self.turns[0].content if self.is_one_question else self.key
        return int.from_bytes(hashlib.blake2b(" ".join(same.split()).encode(), digest_size=8).digest(), "little")

    def hash(self, seed: int = 0) -> float:
        """Return a number in [0, 1) that depends only on the prompt and the seed."""
        key = hashlib.blake2b(self.key.encode(), digest_size=8, salt=seed.to_bytes(8, "little", signed=True))
        return int.from_bytes(key.digest(), "little") / 2**64


DEFAULT_TEST_FRACTION = 0.1
LARGEST_DEFAULT_FRACTION = 0.3
"""A default split holds out no more than this share of the prompts to reach ``ENOUGH_CLUSTERS``."""


def prompts_to_hold_out(prompts: Iterable[PromptLike], fraction: float | None = None, seed: int = 0) -> Mask:
    """Return which prompts are held out for testing, ``(n_prompts,)``; at least one, and never all of two or more.

    Args:
        prompts: distinct prompts.
        fraction: hold out prompts whose hash is below it. If no hash is, or all are, hold out that share of the
            prompts, those with the smallest hashes. By default a tenth; if that gives fewer than 20 test prompts, hold
            out 20, but at most three tenths of the prompts.
        seed: of the hashes.

    Example:
        >>> questions = [f"Question {i}?" for i in range(200)]
        >>> [int(prompts_to_hold_out(questions[:n]).sum()) for n in (2, 10, 50, 80, 200)]
        [1, 3, 15, 20, 20]
    """
    if fraction is not None and not 0 < fraction < 1:
        raise UsageError(f"test_fraction must be between 0 and 1, not {fraction}.")
    check_seed(seed)
    hashes = np.array([Prompt(prompt).hash(seed) for prompt in prompts])
    n, share = len(hashes), DEFAULT_TEST_FRACTION if fraction is None else fraction
    enough = 1 if fraction is not None else max(1, min(ENOUGH_CLUSTERS, round(LARGEST_DEFAULT_FRACTION * n)))
    below = hashes < share
    if n < 2 or enough <= below.sum() < n:
        return below
    chosen = np.zeros(n, dtype=bool)
    chosen[np.argsort(hashes, kind="stable")[: min(n - 1, max(enough, round(share * n)))]] = True
    return chosen


def text_key(prompt: PromptLike, response: str) -> str:
    """Return the cache key of a prompt and a response. No two items share one, whatever characters are in them.

    It starts with the kind of prompt, because the JSON of a chat could also be a text prompt, and with its length.

    Example:
        >>> text_key("Tea?", "Yes.")
        'text 4 Tea?Yes.'
    """
    read = Prompt(prompt)
    return f"{'chat' if read.is_chat else 'text'} {len(read.key)} {read.key}{response}"


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
