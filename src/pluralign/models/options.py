"""Options of sampling from a language model, in this process or behind a server."""

from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from pluralign.core.errors import UsageError
from pluralign.core.options import changed_options, check_seed

MAX_CONCURRENCY = 256
MAX_TIMEOUT = 24 * 3600
"""Seconds."""
SMALL_MODEL = 1_000_000_000
"""A local model with fewer parameters is small: at a high temperature it writes nonsense."""


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are sampled from a language model."""

    temperature: float | None = field(
        default=None,
        metadata={
            "help": "Sampling temperature; higher values give more diverse responses (default: 0.7 for local models "
            "below 1B parameters, else 1.2)."
        },
    )
    top_p: float | None = field(
        default=None,
        metadata={
            "help": "Sample from the likeliest tokens with this total probability (default: 0.9 where the default "
            "temperature is 0.7, else 1: all tokens)."
        },
    )
    max_new_tokens: int = field(default=256, metadata={"help": "Maximum length of a response, in tokens."})
    seed: int = field(default=0, metadata={"help": "Random seed; each prompt derives its own seed from it."})

    def __post_init__(self) -> None:
        if self.temperature is not None and not 0 < self.temperature <= 10:
            raise UsageError(f"temperature must be above 0 and at most 10, not {self.temperature:g}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p:g}.")
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}.")
        check_seed(self.seed)

    def with_defaults(self, *, small: bool) -> "SamplingOptions":
        """Return the options with a temperature and a ``top_p``; options that were given stay as they are.

        Args:
            small: whether the model is local and has fewer than ``SMALL_MODEL`` parameters.

        Example:
            >>> SamplingOptions().with_defaults(small=True)
            SamplingOptions(temperature=0.7, top_p=0.9, max_new_tokens=256, seed=0)
            >>> SamplingOptions(temperature=1.5).with_defaults(small=True)
            SamplingOptions(temperature=1.5, top_p=1.0, max_new_tokens=256, seed=0)
        """
        careful = small and self.temperature is None
        temperature, top_p = (0.7, 0.9) if careful else (1.2, 1.0)
        return replace(
            self,
            temperature=temperature if self.temperature is None else self.temperature,
            top_p=top_p if self.top_p is None else self.top_p,
        )


@dataclass(frozen=True)
class RemoteOptions:
    """Which server to sample from, and its limits."""

    base_url: str = field(
        default="",
        metadata={
            "help": "Sample from this server of OpenAI's chat completions API, such as http://localhost:8000/v1."
        },
    )
    api_key_env: str = field(
        default="OPENAI_API_KEY",
        metadata={"help": "Server: environment variable with the API key; it may be unset."},
    )
    concurrency: int = field(default=8, metadata={"help": "Server: maximum number of concurrent requests."})
    timeout: float = field(default=300.0, metadata={"help": "Server: timeout per response, in seconds."})

    def __post_init__(self) -> None:
        if not self.base_url and (changed := changed_options(self)):
            raise UsageError(f"--{changed[0].replace('_', '-')} requires --base-url.")
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise UsageError(f"concurrency must be from 1 to {MAX_CONCURRENCY}, not {self.concurrency}.")
        if not 0 < self.timeout <= MAX_TIMEOUT:
            raise UsageError(f"timeout must be above 0 and at most {MAX_TIMEOUT:,} seconds, not {self.timeout:g}.")
        if self.base_url:
            object.__setattr__(self, "base_url", _checked_url(self.base_url))


def _checked_url(url: str) -> str:
    """Return the URL without a slash at its end. It is stored with results, so it must not contain secrets."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https") or not url.isprintable() or " " in url:
        raise UsageError("the base URL must look like http://localhost:8000/v1 or https://api.example.com/v1.")
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(
            "the base URL must not contain a password, a query (?) or a fragment (#); put the API key into the "
            "environment variable that --api-key-env names."
        )
    return url.rstrip("/")
