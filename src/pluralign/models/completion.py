"""A response as a language model returns it: its text, and the reason why it ends there."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    Example:
        >>> Completion("Yes, because", "length").cut_off
        True
    """

    text: str
    finish_reason: str | None = None
    """As in OpenAI's API: ``stop`` if the model ended the text, ``length`` if it reached the maximum number of tokens,
    or another reason of a server; None if unknown."""

    @property
    def cut_off(self) -> bool:
        """Whether the response was cut off at the maximum number of tokens."""
        return self.finish_reason == "length"
