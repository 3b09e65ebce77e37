"""Start and stop the server: the socket, uvicorn, and the signals."""

import asyncio
import ctypes
import functools
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from pluralign.answering.answer import Answerer
from pluralign.core.errors import UsageError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.server import connections
from pluralign.server.app import create_app
from pluralign.server.limits import Limits, ServerSettings
from pluralign.server.middleware import LOGGER, LOOPBACK

# --- Return freed memory to the system.


def trim_memory() -> bool:
    """Return free pages of the heap to the system; whether there were any. It does nothing without glibc.

    It takes a few milliseconds. A fixed threshold for separate mappings (``M_MMAP_THRESHOLD``) avoids the fragments
    too, but makes encoding with MiniLM 11 to 14 % slower.
    """
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return bool(trim and trim(0))


TICKS_PER_TRIM = 100
"""Memory is trimmed after this many ticks of uvicorn, which has 10 per second."""


def serve(
    ensemble: "RewardEnsemble | Answerer | str | os.PathLike[str]",
    settings: ServerSettings | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    ready: Callable[[str], None] | None = None,
    **options: Any,
) -> None:
    """Serve an ensemble until the process gets SIGINT or SIGTERM.

    Running requests are finished first; a second SIGINT exits at once.

    Args:
        ensemble: an ensemble or its folder, or an ``Answerer``.
        settings: of the server; its limits are lowered if the process may open few files.
        host: address to listen on; an address that others can reach requires an API key.
        port: port to listen on; 0 chooses a free one.
        ready: called with the server's address once it listens.
        **options: those of ``create_app``.
    """
    settings = settings or ServerSettings()
    if not options.get("api_key", settings.api_key) and not _is_loopback(host):
        raise UsageError(
            f"{host} can be reached from other machines and requires an API key: give --api-key or set "
            "PLURALIGN_API_KEY, or use 127.0.0.1."
        )
    listening = _listen(host, port)
    try:
        limits = options.pop("limits", settings.limits).within_files(connections.file_limit())
        app = create_app(ensemble, settings, limits=limits, **options)
        app.state.service.score([("Are you awake?", "Yes.")])  # loads the encoder, or raises its error
        for sampler in app.state.service.answerer.samplers:
            sampler.prepare()
        address = f"[{host}]" if ":" in host else host
        server = Server.of(app, limits)
        with _signals_and_log(server):
            if ready:
                ready(f"http://{address}:{listening.getsockname()[1]}")
            server.run(sockets=[listening])
    finally:
        listening.close()


class Server(uvicorn.Server):
    """Limits connections, and exits with status 0 after a signal; a second SIGINT exits at once."""

    @classmethod
    def of(cls, app: FastAPI, limits: Limits) -> "Server":
        """Return the server of an application.

        Args:
            app: from ``create_app``.
            limits: of connections.
        """
        protocol: Any = functools.partial(connections.GuardedProtocol, guard=connections.ConnectionGuard(limits))
        quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
        return cls(uvicorn.Config(app, http=protocol, ws="none", backlog=connections.ACCEPTED_AT_ONCE, **quiet))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        asyncio.get_running_loop().set_exception_handler(connections.AcceptErrors())
        for listening in sockets or []:
            # uvicorn's backlog is also the number of connections accepted at once
            listening.listen(connections.KERNEL_BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """Do the regular work: uvicorn's, and every 10 seconds a trim of the memory."""
        if counter % TICKS_PER_TRIM == 0:
            trim_memory()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Do nothing: ``serve`` handles signals, and uvicorn would raise them again after the end."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish running requests, or exit at once."""
        if self.should_exit and sig == signal.SIGINT:
            os._exit(128 + sig)  # otherwise every cancelled request would print a traceback
        super().handle_exit(sig, frame)


@contextmanager
def _signals_and_log(server: Server) -> Iterator[None]:
    """Handle signals and log requests while the server runs."""
    logger = logging.getLogger(LOGGER)
    level = logger.level
    before = {one: signal.signal(one, server.handle_exit) for one in (signal.SIGTERM, signal.SIGINT)}
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        for one, handler in before.items():
            signal.signal(one, handler)


def startup_message(address: str, answerer: Answerer, settings: ServerSettings) -> str:
    """Return the message that the command line prints once the server listens."""
    name = settings.name
    turns = [{"role": "user", "content": "Plant more trees?"}]
    body: dict[str, Any] = {"model": f"{name}:consensus", "messages": turns}
    if answerer.generator is None:
        body["candidates"] = ["Yes, many.", "No, they cost too much."]
    key = "\n       -H 'Authorization: Bearer '\"$PLURALIGN_API_KEY\" \\" if settings.api_key else ""
    return (
        f"Serving {name} ({answerer.ensemble.k} members) at {address}/v1\n"
        f"Page: {address}/   API: {address}/docs   Stop: Ctrl-C\n"
        f"Try: curl {address}/v1/chat/completions -H 'Content-Type: application/json' \\{key}\n"
        f"       -d '{json.dumps(body)}'"
    )


def _is_loopback(host: str) -> bool:
    try:
        return host in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        code = isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno
        # create_server adds the address to the message; strerror has the reason alone.
        reason = os.strerror(code) if code else str(getattr(error, "strerror", error))
        message = f"cannot listen on port {port} of {host} ({reason.lower()}); choose another port with --port."
        raise UsageError(message) from None
