"""ASGI middleware around the whole application: checks requests before any handler runs, and logs them after.

It checks the host, the API key, the content type, the size of the body, and the number of concurrent requests. It reads
a body completely before it is parsed, and keeps none beyond the limit. It cancels the work for a client that
disconnects. It adds the security headers to every response. Logs contain no text of a request unless ``log_prompts`` is
set.
"""

import asyncio
import base64
import hmac
import logging
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pluralign.server.errors import ApiError
from pluralign.server.limits import Limits

Scope: TypeAlias = MutableMapping[str, Any]
Event: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

LOGGER = "pluralign.server"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
HOST = re.compile(r"(?:\[(?P<address>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]{0,5})?")
NEEDS_KEY = ("/v1", "/v2", "/rerank", "/get_reward", "/metrics")
ALWAYS_SERVED = ("/health", "/healthz", "/metrics")
"""Paths outside the limit of concurrent requests, so that a busy server still passes its health checks."""
CLIENT_CLOSED_REQUEST = 499
"""Status in logs and metrics of a request whose client disconnected, as in nginx."""
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

logger = logging.getLogger(LOGGER)


@dataclass
class AccessMiddleware:
    """Checks every request before the application handles it."""

    app: App
    limits: Limits
    api_key: str | None
    """Required from clients. Without one, only requests to a loopback host are served."""
    observe: Callable[[str, int, float], None]
    """Called with the path, status and seconds of each request."""
    log_prompts: bool = False
    active: int = field(default=0, init=False)
    """Number of concurrent requests, without those whose body is still arriving."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def send_with_headers(event: Event) -> None:
            nonlocal status
            if event["type"] == "http.response.start":
                status = int(event["status"])
                event = {**event, "headers": _with_security_headers(event.get("headers", []))}
            await send(event)

        try:
            body = await self._accept(scope, receive)
            if self.log_prompts and body:
                logger.info("%s %s", scope["path"], body.decode(errors="replace"))
            with self._counted(scope["path"]):
                await self._run(scope, body, receive, send_with_headers)
        except ApiError as error:
            if not status:
                await _send_error(error, send_with_headers)
        except Exception as error:  # a bug: log where it is, without the text of the request
            place = traceback.extract_tb(error.__traceback__)[-1]
            logger.error("%s in %s, line %s of %s", type(error).__name__, place.name, place.lineno, place.filename)
            if not status:
                message = "internal server error; the server's log names the place."
                await _send_error(ApiError(500, message, code="internal_error"), send_with_headers)
        finally:
            status, seconds = status or CLIENT_CLOSED_REQUEST, time.perf_counter() - started
            self.observe(scope["path"], status, seconds)
            path = scope["path"].encode("unicode_escape").decode()[:200]  # one line of the log
            logger.info("%s %s %s %.0f ms", scope["method"], path, status, 1000 * seconds)

    @contextmanager
    def _counted(self, path: str) -> Iterator[None]:
        """Count a running request, or raise the error of a busy server.

        A request counts once its body is complete: clients that send slowly cannot use up the limit.
        """
        if self.active >= self.limits.requests and path not in ALWAYS_SERVED:
            raise ApiError(503, "the server is busy; try again later.", code="busy", retry_after=1)
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    async def _accept(self, scope: Scope, receive: Receive) -> bytes:
        """Check a request and return its body.

        The body of a rejected request is read and discarded, within limits: most clients send all of it before they
        read the response, and a closed connection would hide the error from them.
        """
        try:
            self._check(scope)
            return await self._read(receive)
        except ApiError as error:
            waits_for_answer = (b"expect", b"100-continue") in scope["headers"]
            if error.code not in ("slow_body", "gone") and not waits_for_answer:
                await self._discard(receive)
            raise

    async def _discard(self, receive: Receive) -> None:
        left = self.limits.drain_factor * self.limits.body_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.drain_seconds):
                while left > 0:
                    event = await receive()
                    left -= len(event.get("body", b""))
                    if not event.get("more_body"):  # the end, or a disconnect
                        return

    def _check(self, scope: Scope) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"]
        if self.api_key is None and _host(headers.get("host", "")) not in LOOPBACK:
            # Without this check a web page could reach the server under its own host name, resolved to 127.0.0.1
            # (DNS rebinding).
            message = "without an API key the server answers only to localhost; set --api-key to use other hosts."
            raise ApiError(403, message, code="unknown_host")
        needs_key = any(path == start or path.startswith(f"{start}/") for start in NEEDS_KEY)
        if self.api_key is not None and needs_key and not _has_key(headers.get("authorization", ""), self.api_key):
            message = "an API key is required; send it in the header  Authorization: Bearer KEY."
            raise ApiError(401, message, code="invalid_api_key")
        if scope["method"] == "POST":
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                message = "the body must be JSON; send it with the header  Content-Type: application/json."
                raise ApiError(415, message, code="not_json")
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length[:18]) > self.limits.body_bytes:
                raise self._too_large()

    async def _read(self, receive: Receive) -> bytes:
        """Read the body, which may come without a Content-Length, up to the limits of size and time."""
        parts: list[bytes] = []
        size, limits = 0, self.limits
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(min(limits.slow_body_seconds, limits.body_seconds)) as deadline:
                while True:
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        raise ApiError(CLIENT_CLOSED_REQUEST, "the client disconnected.", code="gone")
                    parts.append(event.get("body", b""))
                    size += len(parts[-1])
                    if size > limits.body_bytes:
                        raise self._too_large()
                    if not event.get("more_body"):
                        return b"".join(parts)
                    seconds = limits.slow_body_seconds + size / limits.body_rate
                    deadline.reschedule(started + min(seconds, limits.body_seconds))
        except TimeoutError:
            message = (
                f"the body must arrive within {limits.body_seconds:g} s, and at {limits.body_rate:,} bytes per second "
                f"or more after {limits.slow_body_seconds:g} s; send it faster, or send less."
            )
            raise ApiError(408, message, code="slow_body", close=True) from None

    def _too_large(self) -> ApiError:
        message = f"a request body may have at most {self.limits.body_bytes:,} bytes; send fewer texts per request."
        return ApiError(413, message, code="body_too_large")

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application on a body that was read, until it is done or the client disconnects."""
        replayed = asyncio.Event()

        async def replay() -> Event:
            if replayed.is_set():
                await asyncio.Event().wait()  # wait_for_disconnect below sees the client disconnect
            replayed.set()
            return {"type": "http.request", "body": body, "more_body": False}

        async def wait_for_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        async def run() -> None:
            await self.app(scope, replay, send)

        work = asyncio.create_task(run())
        watch = asyncio.create_task(wait_for_disconnect())
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


async def _send_error(error: ApiError, send: Send) -> None:
    pairs = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": error.content})


def _with_security_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    present = {name.lower() for name, _ in headers}
    extra = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
    return [*headers, *(pair for pair in extra if pair[0] not in present)]


def _host(header: str) -> str:
    """Return the host of a Host header; empty if the header is not a host with an optional port.

    Example:
        >>> _host("localhost:8000"), _host("[::1]:8000"), _host("127.0.0.1"), _host("LocalHost.")
        ('localhost', '::1', '127.0.0.1', 'localhost')
        >>> _host("localhost:evil"), _host("[::1].evil.example")
        ('', '')
    """
    match = HOST.fullmatch(header.strip().lower())
    return (match["address"] or match["name"]).removesuffix(".") if match else ""


def _has_key(header: str, key: str) -> bool:
    """Whether an Authorization header holds the key, as Bearer token or as Basic password (user:KEY@host in a URL)."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode().partition(":")[2]
        except ValueError:  # not Base64, or not UTF-8
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(), key.encode())


# --- Prometheus metrics of one application.


BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters and histograms. Each application has its own registry."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.requests = Counter("pluralign_requests", "Requests answered.", ["route", "status"], registry=own)
        self.seconds = Histogram("pluralign_request_seconds", "Seconds per request.", ["route"], registry=own)
        self.rejected = Counter("pluralign_rejected", "Requests rejected with 503.", ["route"], registry=own)
        texts = "Texts per scoring batch."
        self.batch_texts = Histogram("pluralign_batch_texts", texts, buckets=BATCH_BUCKETS, registry=own)
        self.batch_seconds = Histogram("pluralign_batch_seconds", "Seconds per scoring batch.", registry=own)
        self.routes: set[str] = set()
        """Paths with their own label; all other paths share the label ``other``."""

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """Count one request."""
        route = path if path in self.routes else "other"
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)
        if status == 503:
            self.rejected.labels(route).inc()

    def count_batch(self, texts: int, seconds: float) -> None:
        """Count one scoring batch."""
        self.batch_texts.observe(texts)
        self.batch_seconds.observe(seconds)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Report the number of texts waiting to be scored."""
        Gauge("pluralign_queue_texts", "Texts waiting to be scored.", registry=self.registry).set_function(length)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)
