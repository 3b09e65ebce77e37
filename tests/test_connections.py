"""Clients that send no request, or send one slowly, do not keep others from being served."""

import asyncio
import errno
import itertools
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
BODY = json.dumps({"pairs": [pair()]}).encode()
HEAD = (
    b"POST /v1/compare HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)
EXPECTING = HEAD.removesuffix(b"\r\n") + b"Expect: 100-continue\r\n\r\n"


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


def answer_to_a_trickle(connection: socket.socket) -> bytes:
    """Send one byte after another until the server answers or closes the connection; return its answer."""
    connection.settimeout(0.02)
    for _ in range(500):
        try:
            connection.sendall(b" ")
            return connection.recv(4096)
        except TimeoutError:
            continue
        except ConnectionError:
            return b""
    raise AssertionError("the connection was never closed")


def test_bytes_of_slow_headers_do_not_extend_the_time(ensemble: RewardEnsemble) -> None:
    with running(ensemble, limits=Limits(header_seconds=0.2)) as client, connected(client, HALF) as connection:
        assert answer_to_a_trickle(connection) == b""


def test_a_body_that_trickles_is_answered_with_408_and_closed(ensemble: RewardEnsemble) -> None:
    with (
        running(ensemble, limits=Limits(slow_body_seconds=0.2, header_seconds=60)) as client,
        connected(client, HEAD) as connection,
    ):
        assert answer_to_a_trickle(connection).startswith(b"HTTP/1.1 408")
        connection.settimeout(30)
        wait_until(lambda: is_closed(connection))  # the rest of the answer may come first


def test_a_body_that_keeps_arriving_may_take_longer(ensemble: RewardEnsemble) -> None:
    limits = Limits(slow_body_seconds=0.1, body_rate=1)
    with (
        running(ensemble, limits=limits) as client,
        connected(client, HEAD + BODY[:30]) as steady,
        connected(client, HEAD) as stalled,
    ):
        assert stalled.recv(4096).startswith(b"HTTP/1.1 408")
        steady.sendall(BODY[30:])
        assert steady.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_request_may_take_longer_than_its_headers(ensemble: RewardEnsemble) -> None:
    limits = Limits(header_seconds=0.05, body_seconds=0.5)
    with running(ensemble, limits=limits) as client, connected(client, HEAD) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 408"), "the limit of its body applies"


def test_only_complete_bodies_count_as_requests(ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(ensemble, monkeypatch)
    with running(ensemble, limits=Limits(requests=1)) as client, ExitStack() as open_ones:
        first, second, _ = (open_ones.enter_context(connected(client, HEAD + BODY[:-1])) for _ in range(3))
        first.sendall(BODY[-1:])
        wait_until(lambda: counting.sizes)
        second.sendall(BODY[-1:])
        assert second.recv(4096).startswith(b"HTTP/1.1 503")
        counting.go.set()
        assert first.recv(4096).startswith(b"HTTP/1.1 200")
        assert client.json("/v1/compare", {"pairs": [pair()]})["results"]


@pytest.mark.parametrize("sent", [HALF, EXPECTING], ids=["half a head", "a head without its body"])
def test_a_new_connection_replaces_the_oldest_incomplete_request(ensemble: RewardEnsemble, sent: bytes) -> None:
    with running(ensemble, limits=Limits(connections=3)) as client, ExitStack() as open_ones:
        first, second, third = (open_ones.enter_context(connected(client, sent)) for _ in range(3))
        if sent == EXPECTING:
            for connection in (first, second, third):
                assert connection.recv(4096).startswith(b"HTTP/1.1 100"), "the server waits for the body"
                connection.sendall(BODY[:-1])
        assert client.json("/v1/compare", {"pairs": [pair()]})["results"]
        assert is_closed(first)
        for connection in (second, third):
            connection.sendall(b"alhost\r\n\r\n" if sent == HALF else BODY[-1:])
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_incomplete_bodies_share_a_limit_of_memory(ensemble: RewardEnsemble) -> None:
    limits = Limits(body_bytes=len(BODY), buffer_factor=2)
    with running(ensemble, limits=limits) as client, ExitStack() as open_ones:
        first, second = (open_ones.enter_context(connected(client, HEAD + BODY[:-1])) for _ in range(2))
        assert client.json("/v1/compare", {"pairs": [pair()]})["results"], "complete bodies do not count"
        open_ones.enter_context(connected(client, HEAD + BODY[:-1]))
        assert is_closed(first)
        second.sendall(BODY[-1:])
        assert second.recv(4096).startswith(b"HTTP/1.1 200")


def test_requests_that_do_not_wait_for_responses_end_the_connection(ensemble: RewardEnsemble) -> None:
    """Each connection has one request and as many pipelined ones as the limit; a client that waits has no limit."""
    get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running(ensemble, limits=Limits(pipelined=4)) as client, ExitStack() as open_ones:
        greedy = [open_ones.enter_context(connected(client, 60 * get)) for _ in range(5)]
        patient = open_ones.enter_context(connected(client))
        for _ in range(12):
            patient.sendall(get)
            answer = b""
            while not answer.endswith(b'"ok"}'):
                answer += patient.recv(4096)
            assert b"connection: close" not in answer.lower()
        for connection in greedy:
            answers = b"".join(iter(lambda one=connection: one.recv(4096), b""))  # type: ignore[misc]
            assert answers.count(b"HTTP/1.1 200") == 5
            assert answers.lower().count(b"connection: close") == 1


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


def test_accept_errors_are_logged_rarely(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
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


@contextmanager
def server_with_few_files(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """``pluralign serve`` in a process that may open 256 files."""
    shell = 'ulimit -n 256; exec "$0" -m pluralign serve "$1" --name town --port 0 --json'
    process = subprocess.Popen(
        ["/bin/sh", "-c", shell, sys.executable, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        yield process, Client(json.loads(process.stdout.readline())["address"])
    finally:
        process.kill()
        process.communicate()


@contextmanager
def many_connections(client: Client, *sent: bytes) -> Iterator[list[socket.socket]]:
    """2,000 connections that have sent these bytes in turn, or as many as this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n = 2000 if hard == resource.RLIM_INFINITY else min(2000, hard - 1200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, n + 1200) if soft >= 0 else soft, hard))
    try:
        with ExitStack() as open_ones:
            connections: list[socket.socket] = []
            for start in itertools.islice(itertools.cycle(sent), n):
                connections.append(open_ones.enter_context(connected(client, start)))
                if len(connections) % 500 == 0:
                    assert client.json("/healthz") == {"status": "ok"}
                    assert client.json("/v1/compare", {"pairs": [pair()]})["results"]
            yield connections
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_thousands_of_incomplete_requests_do_not_stop_a_server_with_few_files(town_folder: Path) -> None:
    with server_with_few_files(town_folder) as (process, client):
        with many_connections(client, HALF, HEAD + b" ") as connections:
            assert is_closed(connections[0])
            assert is_closed(connections[1])
            for connection in connections[1::2]:  # SIGTERM waits for bodies, but not for headers
                connection.close()
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=30)
        errors = [line for line in log.splitlines() if "POST /v1/compare 499" not in line]
        assert len("".join(errors)) < 5000, "the log has one line per request, and does not grow with the connections"
        assert "Traceback" not in log


def test_thousands_of_slow_bodies_do_not_stop_a_server_with_the_default_limits(ensemble: RewardEnsemble) -> None:
    limits = Limits(slow_body_seconds=300, body_seconds=300)
    with running(ensemble, limits=limits) as client, many_connections(client, HEAD + BODY[:1]) as connections:
        assert is_closed(connections[0])
        connections[-1].sendall(BODY[1:])
        assert connections[-1].recv(4096).startswith(b"HTTP/1.1 200")
