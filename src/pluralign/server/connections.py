"""Limits on connections: clients that send no request, or half of one, cannot use up the server's files and memory.

uvicorn has no timeout for headers. ``GuardedProtocol`` closes a connection whose headers do not arrive in time; the
middleware has the timeouts of bodies. At the limit of connections, a new one takes the place of the one whose request
has been incomplete for longest. A connection that sends many requests without waiting for responses is closed. The
limit of connections stays below the number of files that the process may open, so the server can always accept. The
bodies that are still arriving also share a limit of memory.
"""

import asyncio
import errno
import logging
import sys
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

from uvicorn.protocols.http.h11_impl import H11Protocol

from pluralign.server.errors import ApiError
from pluralign.server.limits import Limits
from pluralign.server.middleware import LOGGER

ACCEPTED_AT_ONCE = 16
"""Connections that asyncio accepts before it handles any of them."""
KERNEL_BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""
ACCEPT_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SECONDS_BETWEEN_WARNINGS = 60.0

logger = logging.getLogger(LOGGER)


def file_limit() -> int | None:
    """Return how many files the process may open; None if there is no limit."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


@dataclass
class ConnectionGuard:
    """The limits of all connections of a server, and those that have no complete request."""

    limits: Limits
    waiting: dict["GuardedProtocol", None] = field(default_factory=dict)
    """Connections that wait for headers or for a body, in the order in which they began to wait."""
    buffered: int = 0
    """Bytes of the bodies that are still arriving."""

    def free_memory(self) -> None:
        """Close the oldest connections with an incomplete body until the others are within the limit of bytes."""
        most = self.limits.buffer_factor * self.limits.body_bytes
        for connection in list(self.waiting) if self.buffered > most else ():
            if connection.buffered and self.buffered > most:
                connection.evict()


class GuardedProtocol(H11Protocol):
    """uvicorn's connection with a timeout for headers, and with limits of connections and of their memory."""

    def __init__(self, *arguments: Any, guard: ConnectionGuard, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.guard = guard
        self.buffered = 0
        """Bytes of a body that is still arriving."""
        self.pipelined = 0
        """Requests that arrived before the response to the one before was complete."""
        self._awaited: Literal["headers", "body"] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start the timeout. At the limit of connections, close one."""
        super().connection_made(transport)
        self._update()
        if len(self.connections) > self.guard.limits.connections:
            oldest = next(iter(self.guard.waiting))
            if oldest is self:  # all others have a complete request, which is running
                busy = "the server has too many connections; try again later."
                self._refuse(ApiError(503, busy, code="busy", retry_after=1))
            else:
                oldest.evict()

    def data_received(self, data: bytes) -> None:
        """Handle bytes of a client."""
        super().data_received(data)
        self._update()
        if self._awaited == "body":
            before = self.buffered
            self.buffered = min(before + len(data), self.guard.limits.body_bytes)  # the rest is discarded
            self.guard.buffered += self.buffered - before
            self.guard.free_memory()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's text is not used
        """Answer bytes that are not HTTP, in the shape of all errors."""
        message = "the request is not valid HTTP; check its first line, its headers and the length of its body."
        self._refuse(ApiError(400, message, code="not_http"))

    def on_response_complete(self) -> None:
        """Wait for the next request, or start one that has arrived. After too many of these it is the last one."""
        self.pipelined += bool(self.conn.trailing_data[0])
        super().on_response_complete()
        if self.pipelined >= self.guard.limits.pipelined and self.cycle is not None:
            self.headers.append((b"connection", b"close"))  # as if the client had asked for it
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._wait_for(None)
        super().connection_lost(exc)

    def evict(self) -> None:
        """Close the connection at once; a request without a complete body is cancelled."""
        self._wait_for(None)
        self.transport.abort()

    def _update(self) -> None:
        """Start or stop waiting for headers or for a body; bytes of an incomplete request do not extend the time."""
        if self.transport.is_closing():
            self._wait_for(None)
        elif self.cycle is None or self.cycle.response_complete:
            self._wait_for("headers")
        else:
            self._wait_for("body" if self.cycle.more_body else None)

    def _wait_for(self, awaited: Literal["headers", "body"] | None) -> None:
        if awaited == self._awaited:
            return
        self._awaited = awaited
        self.guard.waiting.pop(self, None)
        self.guard.buffered -= self.buffered
        self.buffered = 0
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if awaited:
            self.guard.waiting[self] = None
        if awaited == "headers":
            self._timer = self.loop.call_later(self.guard.limits.header_seconds, self._close)

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close."""
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in error.headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + error.content)
        self.transport.close()

    def _close(self) -> None:
        self._wait_for(None)
        self.transport.close()
        # A client that does not read its last response would keep the connection open.
        self.loop.call_later(self.guard.limits.header_seconds, self.transport.abort)


@dataclass
class AcceptErrors:
    """An exception handler of an event loop that reports failures to accept connections at most once per minute."""

    reported: float | None = None
    """Time of the last report."""

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle one error."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in ACCEPT_ERRORS):
            loop.default_exception_handler(context)
        elif self.reported is None or loop.time() - self.reported >= SECONDS_BETWEEN_WARNINGS:
            self.reported = loop.time()
            reason = (error.strerror or "").lower()
            logger.warning("cannot accept connections (%s); raise the limit of open files (ulimit -n).", reason)
