"""``pluralign serve`` as a process: startup, options, signals, and errors."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import run
from served import SECRET, TEXTS, Client, running, wait_until

from pluralign import RewardEnsemble, UsageError, create_app
from pluralign.server.limits import Limits, ServerSettings
from pluralign.server.run import Server, serve, startup_message, trim_memory


@pytest.fixture(scope="module")
def client(ensemble: RewardEnsemble) -> Iterator[Client]:
    with running(ensemble) as client:
        yield client


@contextmanager
def command(*arguments: str | Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """``pluralign serve`` in a process of its own, and the JSON it printed at startup."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pluralign", "serve", *map(str, arguments), "--name", "town", "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert process.stdout
    try:
        yield process, json.loads(process.stdout.readline() or "null")
    finally:
        process.kill()
        process.communicate()


class Upstream:
    """An OpenAI-compatible server that waits for ``go`` before it answers."""

    def __init__(self) -> None:

        self.received, self.go = threading.Event(), threading.Event()
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({"data": [{"id": "m"}]})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                upstream.received.set()
                upstream.go.wait(20)
                self.answer({"choices": [{"message": {"content": text}} for text in TEXTS]})

            def answer(self, data: Any) -> None:
                body = json.dumps(data).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"


def test_sigterm_finishes_running_requests_and_accepts_no_new_ones(town_folder: Path) -> None:
    upstream = Upstream()
    with (
        command(town_folder, "--model", "m", "--base-url", upstream.address, "-n", "3") as (process, ready),
        ThreadPoolExecutor(1) as threads,
    ):
        client = Client(ready["address"])
        body = {"model": "town:consensus", "messages": [{"role": "user", "content": SECRET}]}
        answer = threads.submit(client.json, "/v1/chat/completions", body)
        assert upstream.received.wait(20)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not _listens(client))
        assert process.poll() is None
        upstream.go.set()
        assert answer.result()["choices"][0]["message"]["content"] in TEXTS
        assert process.wait(10) == 0
        _, log = process.communicate()
    assert "POST /v1/chat/completions 200" in log
    assert SECRET not in log
    upstream.server.shutdown()
    upstream.server.server_close()


def test_options_set_the_seed_and_the_limits(town_folder: Path) -> None:
    upstream = Upstream()
    settings = {
        "body_bytes": ("--max-body", 900), "texts": ("--max-texts", 8), "characters": ("--max-characters", 80),
        "candidates": ("--max-candidates", 3),
        "generation_seconds": ("--max-seconds", 0.2), "generations": ("--concurrency", 2),
    }  # fmt: skip
    flags = [str(part) for flag in settings.values() for part in flag]
    remote = ["--model", "m", "--base-url", upstream.address]
    with command(town_folder, *remote, *flags, "-n", "3", "--seed", "5") as (_, ready):
        client = Client(ready["address"])
        shown = client.json("/v1/ensemble")["limits"]
        assert {name: shown[name] for name in settings} == {name: value for name, (_, value) in settings.items()}
        assert client.error("/v1/answer", {"prompt": "Tea?"})[:2] == (504, "upstream_timeout")
        drawn = random.Random(5)
        expected = [drawn.randrange(2**31) for _ in range(2)][1]  # the first one went to the request that timed out
        assert client.json("/v1/answer", {"prompt": "Tea?", "candidates": TEXTS[:2]})["seed"] == expected
        assert client.error("/v1/answer", {"prompt": "x" * 81})[1] == "text_too_long"
    upstream.go.set()
    upstream.server.shutdown()
    upstream.server.server_close()


def test_other_votes_are_shown_without_training_prompts(town_folder: Path) -> None:
    with command(town_folder, "--data", "demo:480") as (process, ready):
        shown = Client(ready["address"]).json("/v1/ensemble")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate()
    left_out = shown["left_out"]
    assert re.fullmatch(r"Left out \d+ prompts \([\d,]+ pairs\) that were used for training\.", left_out)
    assert left_out in log
    assert f"on {shown['votes']['prompts']} held-out prompts" in shown["headline"]["main"]


def test_n_above_max_candidates_exits_with_one_sentence(town_folder: Path) -> None:
    result = run("serve", town_folder, "-n", "65")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "pluralign: -n must be from 1 to 64 (--max-candidates), not 65.\n"


@pytest.mark.parametrize("idle", [True, False])
def test_one_sigint_finishes_running_requests_and_a_second_exits_at_once(town_folder: Path, idle: bool) -> None:
    upstream = Upstream()
    with (
        command(town_folder, "--model", "m", "--base-url", upstream.address, "-n", "3") as (process, ready),
        ThreadPoolExecutor(1) as threads,
    ):
        if idle:  # sent as soon as the server listens
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        else:
            client = Client(ready["address"])
            body = {"model": "town:consensus", "messages": [{"role": "user", "content": SECRET}]}
            answer = threads.submit(client.send, "/v1/chat/completions", body)
            assert upstream.received.wait(20)
            process.send_signal(signal.SIGINT)
            wait_until(lambda: not _listens(client))
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(2) == 128 + signal.SIGINT
            assert isinstance(answer.exception(), ConnectionError)
        _, log = process.communicate()
    assert log == ""
    upstream.go.set()
    upstream.server.shutdown()
    upstream.server.server_close()


def _listens(client: Client) -> bool:
    try:
        socket.create_connection((client.host, client.port), timeout=1).close()
    except OSError:
        return False
    return True


def test_the_example_in_the_startup_message_works(client: Client) -> None:
    answerer = client.service.answerer
    message = startup_message(client.address, answerer, ServerSettings(name="town"))
    match = re.search(r"curl \S+?(/v1/\S+) .*-d '(.*)'", message, flags=re.DOTALL)
    assert match
    assert client.json(match[1], match[2].encode())["choices"]
    assert "Bearer" in startup_message(client.address, answerer, ServerSettings(name="town", api_key="secret"))


def test_a_port_in_use_exits_with_one_sentence(town_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", town_folder, "--port", str(port))
    assert result.returncode == 2
    reason = "address already in use"
    sentence = f"cannot listen on port {port} of 127.0.0.1 ({reason}); choose another port with --port."
    assert result.stderr == f"pluralign: {sentence}\n"


def test_base_url_requires_a_model(town_folder: Path) -> None:
    result = run("serve", town_folder, "--base-url", "http://127.0.0.1:9/v1")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--model" in result.stderr


def test_other_hosts_require_an_api_key(ensemble: RewardEnsemble, town_folder: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.com"):
        with pytest.raises(UsageError, match="--api-key"):
            serve(ensemble, host=host)
    result = run("serve", town_folder, "--host", "0.0.0.0")
    assert result.returncode == 2
    assert "PLURALIGN_API_KEY" in result.stderr


@pytest.mark.parametrize(("counter", "trims"), [(0, 1), (1, 0), (99, 0), (100, 1)])
def test_the_server_returns_freed_memory_every_ten_seconds(
    ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch, counter: int, trims: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr("pluralign.server.run.trim_memory", lambda: calls.append(None))
    server = Server.of(create_app(ensemble, name="town"), Limits())
    server.config.load()
    server.should_exit = True
    with ThreadPoolExecutor(1) as threads:  # browser tests leave an event loop in this one
        assert threads.submit(asyncio.run, server.on_tick(counter)).result() is True
    assert len(calls) == trims


@pytest.mark.parametrize("library", [object(), None])
def test_memory_is_not_trimmed_without_glibc(monkeypatch: pytest.MonkeyPatch, library: object) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    assert trim_memory() is False
