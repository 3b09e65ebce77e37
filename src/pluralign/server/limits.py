"""What every request passes before a handler sees it: host, key, size of the body, and how many are at work at once.

Decided here: who may ask, that a body is read whole before it is parsed and never beyond its limit, that a client which
goes away stops its own work, what every response's headers say, and that logs hold no text of a request unless asked.
"""

import asyncio
import base64
import binascii
import hmac
import json
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pluralign.models.options import RemoteOptions
from pluralign.server.options import ServeOptions

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("localhost", "127.0.0.1", "::1")
NEEDS_KEY = ("/v1", "/v2", "/rerank", "/get_reward", "/metrics")
ALWAYS = ("/healthz", "/metrics")
"""Answered however busy the server is, so that nobody stops it for that."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}

logger = logging.getLogger("pluralign.server.app")


@dataclass(frozen=True)
class Limits:
    """How much the server takes on; what is beyond is refused with a sentence."""

    body_bytes: int = ServeOptions.max_body
    """Of one request."""
    body_seconds: float = 30.0
    """Within which a request's body must have arrived."""
    requests: int = ServeOptions.max_requests
    """At work at once; more are answered with 503."""
    texts: int = ServeOptions.max_texts
    """Prompt-response texts of one request."""
    characters: int = ServeOptions.max_characters
    """Of one prompt, chat or response."""
    candidates: int = ServeOptions.max_candidates
    """To choose from, given or generated."""
    choices: int = 100
    """Pairs on which a user has chosen, in one request."""
    batch_texts: int = 64
    """Scored in one go."""
    batch_wait: float = 0.05
    """Most seconds that a batch which is not full waits for more texts; less where batches are fast."""
    queue_texts: int = ServeOptions.max_queue
    """Waiting to be scored; more are answered with 503."""
    remembered: int = 16_384
    """Texts whose rewards stay in memory."""
    generations: int = 4
    """Prompts that are put to the upstream server at once; a model in this process answers one at a time."""
    generations_waiting: int = 32
    """Prompts that wait for their turn; more are answered with 503."""
    generation_seconds: float = 120.0
    """Within which the candidates for a prompt must be there; else 504."""
    max_tokens: int = 4096
    """The longest response that may be asked for."""

    @classmethod
    def of(cls, options: ServeOptions, remote: RemoteOptions | None = None) -> "Limits":
        """Return the limits that options ask for.

        Example:
            >>> limits = Limits.of(ServeOptions(max_texts=10, max_seconds=5))
            >>> limits.texts, limits.generation_seconds, limits.choices
            (10, 5, 100)
        """
        upstream = remote if remote and remote.base_url else None
        return cls(
            body_bytes=options.max_body,
            requests=options.max_requests,
            texts=options.max_texts,
            characters=options.max_characters,
            candidates=options.max_candidates,
            queue_texts=options.max_queue,
            generations=upstream.concurrency if upstream else cls.generations,
            generation_seconds=options.max_seconds or (upstream.timeout if upstream else cls.generation_seconds),
        )


class ApiError(Exception):
    """A refusal as a client sees it: a status and a sentence."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str = "", retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "code": self.code, "param": self.param or None}}


@dataclass
class Gate:
    """ASGI middleware around the whole application."""

    app: App
    limits: Limits
    api_key: str | None
    """Without one, only requests to this very machine are answered."""
    observe: Callable[[str, int, float], None]
    """Called with path, status and seconds of each request."""
    log_prompts: bool = False
    at_work: int = field(default=0, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
                own = {name.lower() for name, _ in message.get("headers", [])}
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                headers = [*message.get("headers", []), *(pair for pair in extra if pair[0] not in own)]
                message = {**message, "headers": headers}
            await send(message)

        self.at_work += 1
        try:
            self._check(scope)
            body = await self._read(receive)
            if self.log_prompts and body:
                logger.info("%s %s", scope["path"], body.decode(errors="replace"))
            await self._run(scope, body, receive, answer)
        except ApiError as error:
            if not status:
                await refuse(error, answer)
        except Exception as error:  # a bug of ours: say so to both sides, without the request's text
            place = traceback.extract_tb(error.__traceback__)[-1]
            logger.error("%s in %s, line %s of %s", type(error).__name__, place.name, place.lineno, place.filename)
            if not status:
                await refuse(ApiError(500, "the server failed; its log says where.", code="internal_error"), answer)
        finally:
            self.at_work -= 1
            seconds = time.perf_counter() - started
            self.observe(scope["path"], status or 499, seconds)
            logger.info("%s %s %s %.0f ms", scope["method"], _printable(scope["path"]), status or 499, 1000 * seconds)

    def _check(self, scope: Scope) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if self.at_work > self.limits.requests and scope["path"] not in ALWAYS:
            raise ApiError(503, "the server is busy; try again soon.", code="busy", retry_after=1)
        if self.api_key is None and _host(headers.get("host", "")) not in LOOPBACK:
            # Else a web page could reach this server under a name of its own that leads to 127.0.0.1 (DNS rebinding).
            message = "without a key this server answers only to localhost; start it with --api-key to use other names."
            raise ApiError(403, message, code="unknown_host")
        path = scope["path"]
        guarded = any(path == start or path.startswith(f"{start}/") for start in NEEDS_KEY)
        if self.api_key is not None and guarded and not _has_key(headers.get("authorization", ""), self.api_key):
            raise ApiError(401, "send the server's key as  Authorization: Bearer KEY.", code="invalid_api_key")
        if scope["method"] == "POST":
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                message = "send JSON with the header  Content-Type: application/json."
                raise ApiError(415, message, code="not_json")
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length[:18]) > self.limits.body_bytes:
                raise self._too_large()

    async def _read(self, receive: Receive) -> bytes:
        """Read the body, which may come without its length, up to the limit."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(499, "the client went away.", code="gone")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self.limits.body_bytes:
                        raise self._too_large()
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            message_text = f"the body must arrive within {self.limits.body_seconds:g} s."
            raise ApiError(408, message_text, code="slow_body") from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"a request may have {self.limits.body_bytes:,} bytes; send less.", code="body_too_large")

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application on a body that was read, until it is done or the client goes away."""
        given = asyncio.Event()

        async def replay() -> Message:
            if given.is_set():
                await asyncio.Event().wait()  # the watch below sees the client go
            given.set()
            return {"type": "http.request", "body": body, "more_body": False}

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work, watch = asyncio.create_task(_run_app(self.app, scope, replay, send)), asyncio.create_task(gone())
        try:
            await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (watch, work):
                if not task.done():
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
        if not work.cancelled():
            work.result()


async def _run_app(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


async def refuse(error: ApiError, send: Send) -> None:
    """Answer with an error."""
    body = json.dumps(error.body).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def _host(header: str) -> str:
    """Return the host of a Host header.

    Example:
        >>> _host("localhost:8000"), _host("[::1]:8000"), _host("127.0.0.1"), _host("LocalHost.")
        ('localhost', '::1', '127.0.0.1', 'localhost')
    """
    host = header.strip().lower()
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return host.removesuffix(".")


def _has_key(header: str, key: str) -> bool:
    """Whether an Authorization header holds the key, as Bearer or as the password of a URL (Basic)."""
    kind, _, given = header.partition(" ")
    if kind.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return False
    elif kind.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(), key.encode())


def _printable(path: str) -> str:
    """Return a path as a log may hold it, in one line."""
    return path.encode("unicode_escape").decode()[:200]
