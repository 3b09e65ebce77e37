"""Options of sampling from a language model, in this process or behind a server."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pluralign.core.errors import UsageError
from pluralign.core.options import changed_options, check_seed

MAX_CONCURRENCY = 256
MAX_TIMEOUT = 24 * 3600
"""Seconds."""


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are sampled from a language model."""

    temperature: float = field(
        default=1.2, metadata={"help": "Sampling temperature; values above 1 give more diverse responses."}
    )
    top_p: float = field(
        default=1.0, metadata={"help": "Sample from the likeliest tokens with this total probability; 1: all tokens."}
    )
    max_new_tokens: int = field(default=256, metadata={"help": "Maximum length of a response, in tokens."})
    seed: int = field(default=0, metadata={"help": "Random seed; each prompt derives its own seed from it."})

    def __post_init__(self) -> None:
        if not 0 < self.temperature <= 10:
            raise UsageError(f"temperature must be above 0 and at most 10, not {self.temperature:g}.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p:g}.")
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}.")
        check_seed(self.seed)


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
