"""The settings of the server: its limits, and the checks that requests stay within them."""

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pluralign.core.errors import UsageError
from pluralign.core.text import is_unicode
from pluralign.server.errors import ApiError
from pluralign.server.options import ServeOptions
from pluralign.text.options import RemoteOptions, SamplingOptions

if TYPE_CHECKING:
    from pluralign.ensemble.record import Evaluation
    from pluralign.measuring.cards import Descriptions
    from pluralign.measuring.individuals import Representation

RESERVED_FILES = 96
"""Files that connections leave to the rest of the process: models, pipes, and connections being opened or closed."""
SPARE_CONNECTIONS = 16
"""Connections beyond the limit of requests, for health checks."""


@dataclass(frozen=True)
class Limits:
    """Limits of the server. A request beyond one gets an error that names it."""

    body_bytes: int = ServeOptions.max_body
    """Maximum size of a request body."""
    body_seconds: float = 30.0
    """Maximum time for a request body to arrive; slower requests get 408."""
    slow_body_seconds: float = 10.0
    """Time that a body may take at any rate; each ``body_rate`` bytes add a second, up to ``body_seconds``."""
    body_rate: int = 1000
    """Minimum bytes per second of a body after ``slow_body_seconds``; slower requests get 408."""
    buffer_factor: int = 64
    """At most this many times ``body_bytes`` are kept of bodies that are still arriving; the oldest are closed."""
    drain_seconds: float = 5.0
    """Time to read and discard the body of a rejected request, so that its client sees the error."""
    drain_factor: int = 16
    """At most this many times ``body_bytes`` are read and discarded."""
    header_seconds: float = 10.0
    """Maximum time for a request to arrive, up to its body; slower connections are closed."""
    pipelined: int = 4
    """Requests of one connection that may arrive before the response to the one before; then it is closed."""
    connections: int = 1000
    """Maximum open connections; a new one replaces the one whose request has been incomplete for longest."""
    requests: int = 512
    """Maximum concurrent requests; excess requests get 503. Requests count when their body is complete."""
    texts: int = ServeOptions.max_texts
    """Maximum number of (prompt, response) texts per request."""
    characters: int = ServeOptions.max_characters
    """Maximum length of a prompt, chat or response."""
    candidates: int = ServeOptions.max_candidates
    """Maximum number of candidates per answer, given or generated."""
    choices: int = 100
    """Maximum number of the user's own choices per request."""
    batch_texts: int = 64
    """Maximum number of texts per scoring batch."""
    batch_wait: float = 0.05
    """Batch window: maximum seconds that an incomplete batch waits for more texts; shorter where batches are fast."""
    queue_texts: int = 4096
    """Maximum number of texts waiting to be scored; excess requests get 503."""
    remembered: int = 16_384
    """Number of texts whose rewards are cached in memory."""
    generations: int = 4
    """Maximum concurrent prompts at the upstream server. A model in this process generates for one at a time."""
    generations_waiting: int = 32
    """Maximum number of prompts waiting to be generated for; excess requests get 503."""
    generation_seconds: float = 120.0
    """Maximum time to generate the candidates of a prompt; slower ones get 504."""
    max_tokens: int = 4096
    """Maximum response length that a request may ask for."""

    @classmethod
    def of(cls, options: ServeOptions, remote: RemoteOptions | None = None) -> "Limits":
        """Return the limits that command-line options set.

        Example:
            >>> limits = Limits.of(ServeOptions(max_texts=10, max_seconds=5))
            >>> limits.texts, limits.generation_seconds, limits.choices
            (10, 5, 100)
        """
        upstream = remote if remote and remote.base_url else None
        return cls(
            body_bytes=options.max_body,
            texts=options.max_texts,
            characters=options.max_characters,
            candidates=options.max_candidates,
            queue_texts=max(options.max_texts, cls.queue_texts),  # else a request could never be queued
            generations=upstream.concurrency if upstream else cls.generations,
            generation_seconds=options.max_seconds or (upstream.timeout if upstream else cls.generation_seconds),
        )

    def within_files(self, files: int | None) -> "Limits":
        """Return limits under which the server opens fewer files than allowed, and can always answer health checks.

        Args:
            files: number of files that the process may open; None without a limit.

        Example:
            >>> few = Limits().within_files(256)
            >>> few.connections, few.requests, Limits().within_files(None) == Limits()
            (156, 140, True)
        """
        free = self.connections if files is None else files - RESERVED_FILES - self.generations
        connections = max(min(self.connections, free), 2 * SPARE_CONNECTIONS)
        return replace(self, connections=connections, requests=min(self.requests, connections - SPARE_CONNECTIONS))

    def check_text(self, text: str, what: str) -> None:
        """Raise ``ApiError`` if a text is too long, or holds half of a surrogate pair, which JSON can encode."""
        if not is_unicode(text):
            raise ApiError(422, f"{what} is not valid Unicode; send text without lone surrogates.", code="not_text")
        if len(text) > self.characters:
            message = f"{what} may have at most {self.characters:,} characters, not {len(text):,}."
            raise ApiError(422, message, code="text_too_long")


def check_count(n: int, limit: int, what: str, param: str = "") -> None:
    """Raise ``ApiError`` if there are more than allowed.

    Example:
        >>> check_count(2, 3, "candidates")
    """
    if n > limit:
        raise ApiError(422, f"a request may have at most {limit:,} {what}, not {n:,}.", code="too_many", param=param)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What ``create_app`` and ``serve`` need to know besides the answerer."""

    name: str = "pluralign"
    """First part of every model id."""
    api_key: str | None = None
    """API key required from clients; without one the server answers only to loopback hosts."""
    limits: Limits = field(default_factory=Limits)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    """Sampling options of requests that set none."""
    n: int | None = None
    """Candidates, or drafts per policy, of requests that do not say; as in ``AnswerRequest``."""
    seed: int | None = None
    """Base seed for requests that send none; random if None."""
    log_prompts: bool = False
    """Whether the log contains the bodies of requests."""
    representation: "Representation | None" = None
    """How well individuals are represented, for the page."""
    descriptions: "Descriptions | None" = None
    """Of the members by a language model, for the page."""
    evaluation: "Evaluation | None" = None
    """Figures on the held-out votes for the page, if these are other votes than those of the fit."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]{1,100}", self.name):
            problem = "the name must have only letters, digits, dots, dashes and underscores"
            raise UsageError(f"{problem}, not {self.name[:100]!r}.")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise UsageError("the API key must have only printable ASCII characters and no spaces; choose another key.")
