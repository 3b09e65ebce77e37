"""What a language model returns: a response with the reason why it ends there, or a choice between two letters."""

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


@dataclass(frozen=True)
class Choice:
    """The answer to a question whose answer is one of two letters."""

    prob: float
    """Probability of the first letter, given that the answer is one of the two; NaN without an answer."""
    tokens_in: int = 0
    """Tokens that the model read; 0 if unknown."""
    tokens_out: int = 0
    """Tokens that the model wrote; 0 if unknown."""
