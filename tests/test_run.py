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
from pathlib import Path
from typing import Any

import pytest
from conftest import run
from served import SECRET, TEXTS, Client, running, wait_until
from test_remote import Reply, Request, Serve, says, serve  # noqa: F401 - a fixture

from pluralign import RewardEnsemble, UsageError, create_app
from pluralign.server.limits import Limits, ServerSettings
from pluralign.server.run import Server, serve as serve_ensemble, startup_message, trim_memory


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


class Slow:
    """A language model on a server that waits for ``go`` before it answers; ``flags`` make ``serve`` use it."""

    def __init__(self, start: Serve) -> None:
        self.received, self.go = threading.Event(), threading.Event()
        server = start(self.script, Reply({"data": [{"id": "m"}]}))
        self.flags = ("--model", "m", "--base-url", server.url, "-n", "3")

    def script(self, _: Request) -> Reply:
        self.received.set()
        self.go.wait(20)
        return says(*TEXTS)


@pytest.fixture
def slow(serve: Serve) -> Iterator[Slow]:  # noqa: F811
    found = Slow(serve)
    yield found
    found.go.set()


CHAT = {"model": "town:consensus", "messages": [{"role": "user", "content": SECRET}]}


def test_sigterm_finishes_running_requests_and_accepts_no_new_ones(town_folder: Path, slow: Slow) -> None:
    with command(town_folder, *slow.flags) as (process, ready), ThreadPoolExecutor(1) as threads:
        client = Client(ready["address"])
        answer = threads.submit(client.json, "/v1/chat/completions", CHAT)
        assert slow.received.wait(20)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not _listens(client))
        assert process.poll() is None
        slow.go.set()
        assert answer.result()["choices"][0]["message"]["content"] in TEXTS
        assert process.wait(10) == 0
        _, log = process.communicate()
    assert "POST /v1/chat/completions 200" in log
    assert SECRET not in log


def test_options_set_the_seed_and_the_limits(town_folder: Path, slow: Slow) -> None:
    settings = {
        "body_bytes": ("--max-body", 900), "texts": ("--max-texts", 8), "characters": ("--max-characters", 80),
        "candidates": ("--max-candidates", 3),
        "generation_seconds": ("--max-seconds", 0.2), "generations": ("--concurrency", 2),
    }  # fmt: skip
    flags = [str(part) for flag in settings.values() for part in flag]
    with command(town_folder, *slow.flags, *flags, "--seed", "5") as (_, ready):
        client = Client(ready["address"])
        shown = client.json("/v1/ensemble")["limits"]
        assert {name: shown[name] for name in settings} == {name: value for name, (_, value) in settings.items()}
        assert client.error("/v1/answer", {"prompt": "Tea?"})[:2] == (504, "upstream_timeout")
        drawn = random.Random(5)
        expected = [drawn.randrange(2**31) for _ in range(2)][1]  # the first one went to the request that timed out
        assert client.json("/v1/answer", {"prompt": "Tea?", "candidates": TEXTS[:2]})["seed"] == expected
        assert client.error("/v1/answer", {"prompt": "x" * 81})[1] == "text_too_long"


def test_other_votes_are_shown_without_training_prompts(town_folder: Path) -> None:
    with command(town_folder, "--data", "demo:480") as (process, ready):
        shown = Client(ready["address"]).json("/v1/ensemble")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate()
    left_out = shown["left_out"]
    assert re.fullmatch(r"Left out \d+ prompts \([\d,]+ pairs\) that were used for training\.", left_out)
    assert left_out in log
    assert f"on {shown['votes']['prompts']} held-out prompts" in shown["headline"]["main"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-n", "65"], "pluralign: -n must be from 1 to 64 (--max-candidates), not 65.\n"),
        (["--base-url", "http://127.0.0.1:9/v1"], "--model"),
        (["--host", "0.0.0.0"], "PLURALIGN_API_KEY"),
    ],
)
def test_bad_options_exit_with_one_sentence(town_folder: Path, arguments: list[str], sentence: str) -> None:
    result = run("serve", town_folder, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert sentence in result.stderr


@pytest.mark.parametrize("idle", [True, False])
def test_one_sigint_finishes_requests_and_a_second_exits_at_once(town_folder: Path, slow: Slow, idle: bool) -> None:
    with command(town_folder, *slow.flags) as (process, ready), ThreadPoolExecutor(1) as threads:
        if idle:  # sent as soon as the server listens
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        else:
            client = Client(ready["address"])
            answer = threads.submit(client.send, "/v1/chat/completions", CHAT)
            assert slow.received.wait(20)
            process.send_signal(signal.SIGINT)
            wait_until(lambda: not _listens(client))
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(2) == 128 + signal.SIGINT
            assert isinstance(answer.exception(), ConnectionError)
        _, log = process.communicate()
    assert log == ""


def _listens(client: Client) -> bool:
    try:
        socket.create_connection((client.host, client.port), timeout=1).close()
    except OSError:
        return False
    return True


def test_the_example_in_the_startup_message_works(ensemble: RewardEnsemble) -> None:
    with running(ensemble) as client:
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
    sentence = f"cannot listen on port {port} of 127.0.0.1 (address already in use); choose another port with --port."
    assert (result.returncode, result.stderr) == (2, f"pluralign: {sentence}\n")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_other_hosts_require_an_api_key(ensemble: RewardEnsemble, host: str) -> None:
    with pytest.raises(UsageError, match="api_key"):
        serve_ensemble(ensemble, host=host)


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
