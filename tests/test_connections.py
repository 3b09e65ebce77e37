"""Clients that connect and send no request do not keep others from being served."""

import asyncio
import errno
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from served import Client, Counting, pair, running, wait_until

from pluralign import RewardEnsemble
from pluralign.server.connections import SECONDS_BETWEEN_WARNINGS, AcceptErrors, file_limit
from pluralign.server.limits import Limits

HALF = b"GET /healthz HTTP/1.1\r\nHost: loc"


def connected(client: Client, sent: bytes = b"") -> socket.socket:
    """A connection that has sent some bytes."""
    connection = socket.create_connection((client.host, client.port), timeout=30)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Wait until the server sends something or closes the connection; return whether it closed without a word."""
    try:
        return connection.recv(4096) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", HALF, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" + HALF])
def test_a_connection_without_a_complete_request_is_closed(ensemble: RewardEnsemble, sent: bytes) -> None:
    with running(ensemble, limits=Limits(header_seconds=0.1)) as client, connected(client, sent) as connection:
        if sent.endswith(HALF) and sent != HALF:
            answer = connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")
            while b'"ok"}' not in answer:
                answer += connection.recv(4096)
        assert is_closed(connection)


def test_bytes_of_slow_headers_do_not_extend_the_time(ensemble: RewardEnsemble) -> None:
    with running(ensemble, limits=Limits(header_seconds=0.2)) as client, connected(client, HALF) as connection:
        connection.settimeout(0.02)
        for _ in range(500):
            try:
                connection.sendall(b"a")
                assert connection.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            break
        else:
            raise AssertionError("the connection was never closed")


def test_a_request_may_take_longer_than_its_headers(ensemble: RewardEnsemble) -> None:
    head = (
        b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    )
    limits = Limits(header_seconds=0.05, body_seconds=0.5)
    with running(ensemble, limits=limits) as client, connected(client, head) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 408"), "the limit of its body applies"


def test_a_new_connection_replaces_the_one_that_waits_longest(ensemble: RewardEnsemble) -> None:
    with running(ensemble, limits=Limits(connections=3)) as client, ExitStack() as open_ones:
        first, second, third = (open_ones.enter_context(connected(client, HALF)) for _ in range(3))
        assert client.json("/healthz") == {"status": "ok"}
        assert is_closed(first)
        for connection in (second, third):
            connection.sendall(b"alhost\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_running_request_is_never_replaced(ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(ensemble, monkeypatch)
    with running(ensemble, limits=Limits(connections=1)) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.json, "/v1/compare", {"pairs": [pair()]})
        wait_until(lambda: counting.sizes)
        with connected(client) as refused:
            answer = b"".join(iter(lambda: refused.recv(4096), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"Retry-After: 1" in head
        assert json.loads(body)["error"]["code"] == "busy"
        counting.go.set()
        assert first.result()["results"]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nBad Name: a\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nx",
    ],
)
def test_bytes_that_are_not_http_get_an_error_as_json(ensemble: RewardEnsemble, sent: bytes) -> None:
    with running(ensemble) as client, connected(client, sent + b"\r\n") as connection:
        head, _, body = b"".join(iter(lambda: connection.recv(4096), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["code"] == "not_http"
        assert client.json("/healthz") == {"status": "ok"}


def test_limits_stay_below_the_number_of_files() -> None:
    for files in (64, 256, 1024, 100_000):
        limits = Limits().within_files(files)
        assert limits.requests < limits.connections
        assert limits.connections < max(files, 33)
    assert Limits().within_files(100_000) == Limits() == Limits().within_files(None)
    assert file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_accept_errors_are_logged_once_per_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, now = asyncio.new_event_loop(), [1000.0]
    monkeypatch.setattr(loop, "time", lambda: now[0])
    handle = AcceptErrors()
    full: dict[str, Any] = {"message": "socket.accept() out of system resource"}
    full["exception"] = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            handle(loop, full)
            now[0] += 0.5 * SECONDS_BETWEEN_WARNINGS / 100
        assert [record.getMessage() for record in caplog.records] == [
            "cannot accept connections (too many open files); raise the limit of open files (ulimit -n)."
        ]
        now[0] += SECONDS_BETWEEN_WARNINGS
        handle(loop, full)
        assert len(caplog.records) == 2
        handle(loop, {"message": "another error", "exception": ValueError("x")})
        assert "another error" in caplog.text
    loop.close()


FILES = 256


@contextmanager
def server_with_few_files(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """``pluralign serve`` in a process that may open 256 files."""
    shell = f'ulimit -n {FILES}; exec "$0" -m pluralign serve "$1" --name town --port 0 --json'
    process = subprocess.Popen(
        ["/bin/sh", "-c", shell, sys.executable, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        yield process, Client(json.loads(process.stdout.readline())["address"])
    finally:
        process.kill()
        process.communicate()


def test_thousands_of_half_open_connections_do_not_stop_the_server(town_folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n = 2000 if hard == resource.RLIM_INFINITY else min(2000, hard - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, n + 200) if soft >= 0 else soft, hard))
    try:
        with server_with_few_files(town_folder) as (process, client), ExitStack() as open_ones:
            for opened in range(1, n + 1):
                open_ones.enter_context(connected(client, HALF))
                if opened % 500 == 0:
                    assert client.json("/healthz") == {"status": "ok"}
                    assert client.json("/v1/compare", {"pairs": [pair()]})["results"]
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=30)
        assert len(log) < 5000, "the log does not grow with the connections"
        assert "Traceback" not in log
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
