"""Limits on connections: clients that connect and send no request cannot use up the server's files.

uvicorn has no timeout for headers. ``GuardedProtocol`` closes a connection whose request does not arrive in time. At
the limit of connections, a new one takes the place of the one that has waited longest for a request. The limit stays
below the number of files that the process may open, so the server can always accept.
"""

import asyncio
import errno
import logging
import sys
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

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


@dataclass(frozen=True)
class ConnectionGuard:
    """The limits of all connections of a server, and those that wait for a request."""

    limits: Limits
    waiting: dict["GuardedProtocol", None] = field(default_factory=dict)
    """In the order in which they began to wait."""


class GuardedProtocol(H11Protocol):
    """uvicorn's connection with a timeout for requests, and with a limit of connections."""

    def __init__(self, *arguments: Any, guard: ConnectionGuard, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.guard = guard
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start the timeout. At the limit of connections, close one."""
        super().connection_made(transport)
        self._update()
        if len(self.connections) > self.guard.limits.connections:
            oldest = next(iter(self.guard.waiting))
            if oldest is self:  # all others have a running request
                busy = "the server has too many connections; try again later."
                self._refuse(ApiError(503, busy, code="busy", retry_after=1))
            else:
                oldest._stop_waiting()
                oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Handle bytes of a client."""
        super().data_received(data)
        self._update()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's text is not used
        """Answer bytes that are not HTTP, in the shape of all errors."""
        message = "the request is not valid HTTP; check its first line, its headers and the length of its body."
        self._refuse(ApiError(400, message, code="not_http"))

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _update(self) -> None:
        """Start or stop waiting for a request; bytes of an incomplete one do not extend the time."""
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            self._stop_waiting()
        elif self not in self.guard.waiting:
            self.guard.waiting[self] = None
            self._timer = self.loop.call_later(self.guard.limits.header_seconds, self._close)

    def _stop_waiting(self) -> None:
        self.guard.waiting.pop(self, None)
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close."""
        headers = {"Content-Type": "application/json", "Content-Length": str(len(error.content)), **error.headers}
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + error.content)
        self.transport.close()

    def _close(self) -> None:
        self._stop_waiting()
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
