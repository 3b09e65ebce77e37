"""Access to the server: bodies, hosts, API keys, concurrency, disconnects, logs and headers."""

import base64
import http.client
import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import openai
import pytest
from served import HELLO, SECRET, TEXTS, Client, Counting, Writer, pair, running, wait_until

from pluralign import RewardEnsemble
from pluralign.server.limits import Limits
from pluralign.server.middleware import SECURITY_HEADERS
from pluralign.server.service import without_end_marks
from pluralign.votes.prompts import Item


@pytest.fixture(scope="module")
def client(ensemble: RewardEnsemble) -> Iterator[Client]:
    with running(ensemble) as client:
        yield client


HEAD = b"POST /v1/compare HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextmanager
def sending(client: Client, headers: bytes, body: bytes = b"") -> Iterator[socket.socket]:
    """A connection that has sent the head of a request with these headers, and some bytes."""
    with socket.create_connection((client.host, client.port), timeout=10) as connection:
        connection.sendall(HEAD + headers + b"\r\n\r\n" + body)
        yield connection


def rejection(client: Client, body: Any) -> tuple[int, str]:
    """Status and code of the answer to a client that sends its whole body before it reads."""
    request = urllib.request.Request(f"{client.address}/v1/compare", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as answered:  # urllib asks to close the connection
        urllib.request.urlopen(request, timeout=30)
    with answered.value as reply:
        return reply.code, json.load(reply)["error"]["code"]


def test_a_body_without_content_length_is_cut_off_at_the_limit(ensemble: RewardEnsemble) -> None:
    with (
        running(ensemble, limits=Limits(body_bytes=2000)) as client,
        sending(client, b"Transfer-Encoding: chunked") as connection,
    ):
        answer = b""
        for _ in range(100):
            connection.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
            connection.settimeout(0.05)
            try:
                answer = connection.recv(4096)
                break
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_before_it_reads_sees_413(ensemble: RewardEnsemble, chunked: bool) -> None:
    body = b" " * 10_000_000
    chunks = (body[i : i + 100_000] for i in range(0, len(body), 100_000))
    with running(ensemble, limits=Limits(body_bytes=1_000_000)) as client:
        assert rejection(client, chunks if chunked else body) == (413, "body_too_large")


def test_a_rejected_key_is_reported_to_a_client_that_still_sends(ensemble: RewardEnsemble) -> None:
    with running(ensemble, api_key=SECRET) as client:
        assert rejection(client, b" " * 20_000_000) == (401, "invalid_api_key")


def test_the_body_of_a_rejected_request_is_not_read_forever(ensemble: RewardEnsemble) -> None:
    limits = Limits(body_bytes=100, drain_factor=2, drain_seconds=0.05)
    with running(ensemble, limits=limits) as client:
        for sent in (b"", b" " * 1000):  # a client that stops, and one that goes on
            with sending(client, b"Content-Length: 100000", sent) as connection:
                assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_client_that_waits_for_100_continue_is_rejected(ensemble: RewardEnsemble) -> None:
    headers = b"Content-Length: 100000\r\nExpect: 100-continue"
    with running(ensemble, limits=Limits(body_bytes=100)) as client, sending(client, headers) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("path", ["/v1/compare/", "/healthz/", "/v1/models/", "/docs/"])
def test_a_trailing_slash_is_not_redirected(client: Client, path: str) -> None:
    body = {"pairs": [pair()]} if "compare" in path else None
    assert client.error(path, body)[0] == 404


def test_other_content_types_and_hosts_are_rejected(client: Client) -> None:
    body = json.dumps({"pairs": [pair()]}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert client.error("/v1/compare", body, Content_Type=kind)[:2] == (415, "not_json")
    for host in (
        *("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""),
        *("localhost:evil", "[::1].evil.com", "[::1]:80:80", "localhost:80.evil.com", "[::1"),
    ):
        assert client.error("/v1/models", Host=host)[:2] == (403, "unknown_host")
    for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000"):
        assert client.send("/v1/models", Host=host)[0] == 200


def test_cross_origin_requests_are_rejected(client: Client) -> None:
    headers = {"Origin": "https://evil.example", "Access_Control_Request_Method": "POST"}
    status, answer, _ = client.send("/v1/compare", method="OPTIONS", **headers)
    assert status == 405
    assert not any(name.startswith("access-control") for name in answer)
    assert not any(name.startswith("access-control") for name in client.send("/v1/models", **headers)[1])


def test_an_api_key_protects_everything_but_the_page_and_health(ensemble: RewardEnsemble) -> None:
    with running(ensemble, Writer(), api_key=SECRET) as client:
        for path in ("/", "/docs", "/openapi.json", "/health", "/healthz"):
            assert client.send(path, Host="any.example")[0] == 200
        guarded = ("/v1/models", "/v1/ensemble", "/metrics", "/rerank", "/get_reward", "/v1/compare", "/v2/rerank")
        for path in (*guarded, "/v1", "/v1/nothing"):
            for header in ("", "Bearer wrong", SECRET, "Basic !", "Basic \xff"):
                own = {"Authorization": header} if header else {}
                assert client.error(path, **own)[:2] == (401, "invalid_api_key"), path
        assert client.send("/metrics", Authorization=f"Bearer {SECRET}")[0] == 200
        with_key = openai.OpenAI(base_url=f"{client.address}/v1", api_key=SECRET)
        assert len(list(with_key.models.list())) == 7
        with pytest.raises(openai.AuthenticationError, match="Bearer KEY"):
            client.openai.models.list()
        basic = base64.b64encode(f"any:{SECRET}".encode()).decode()  # the key as the password of a URL
        assert client.json("/get_reward?member=0", {"query": ["a"]}, Authorization=f"Basic {basic}")["rewards"]


def test_excess_concurrent_requests_get_503(ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(ensemble, monkeypatch)
    with running(ensemble, limits=Limits(requests=1)) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.json, "/v1/compare", {"pairs": [pair()]})
        wait_until(lambda: counting.sizes)
        assert client.error("/v1/models")[:2] == (503, "busy")
        assert client.json("/healthz") == client.json("/health") == {"status": "ok"}
        counting.go.set()
        first.result()
        assert client.json("/v1/models")["data"]


def test_the_log_contains_no_text_unless_enabled(ensemble: RewardEnsemble, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    writer = Writer(error=RuntimeError(SECRET))
    with running(ensemble, writer) as client:
        client.json("/v1/compare", {"pairs": [pair(prompt=SECRET)]})
        client.error("/v1/compare", {"pairs": [pair(prompt=SECRET, response_a=1)]})
        client.error("/v1/chat/completions", {"model": SECRET, "messages": HELLO})
        client.error("/v1/chat/completions", {"model": "town", "messages": [{"role": "user", "content": SECRET}]})
        client.error(f"/v1/compare?prompt={SECRET}", b"{")
    assert "POST /v1/compare 200" in caplog.text
    assert SECRET not in caplog.text
    with running(ensemble, log_prompts=True) as client:
        client.json("/v1/compare", {"pairs": [pair(prompt=SECRET)]})
    assert SECRET in caplog.text


def test_an_internal_error_is_logged_without_the_text(
    ensemble: RewardEnsemble, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(items: Sequence[Item]) -> Any:
        raise KeyError(items[0])

    monkeypatch.setattr(RewardEnsemble, "scorer", lambda _, **__: score)
    with running(ensemble) as client:
        assert client.error("/v1/compare", {"pairs": [pair(prompt=SECRET)]})[:2] == (500, "internal_error")
        assert client.json("/healthz")["status"] == "ok"
    assert "KeyError in score" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("path", ["/", "/docs", "/v1/models", "/v1/nothing", "/metrics"])
def test_every_response_has_the_security_headers(client: Client, path: str) -> None:
    headers = client.send(path)[1]
    for name, value in SECURITY_HEADERS.items():
        assert headers[name.lower()] == value
    assert "'unsafe" not in headers["content-security-policy"]


# --- service ----------------------------------------------------------------------------------------------------------


def test_end_marks_are_removed_in_linear_time() -> None:
    assert without_end_marks("<pad>" * 100_000) == ""
    kept = "<pad>" * 100_000 + " " * 100_000 + "x"
    assert without_end_marks(kept) == kept
    assert without_end_marks("Yes. \n") == "Yes. \n"
    assert without_end_marks("Use <s> and </s> there.") == "Use <s> and </s> there."


def test_overload_gets_503_until_the_queue_shrinks(ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(ensemble, monkeypatch)
    with running(ensemble, limits=Limits(queue_texts=4, batch_texts=2)) as client, ThreadPoolExecutor(2) as threads:
        first = threads.submit(client.json, "/v1/compare", {"pairs": [pair()]})
        wait_until(lambda: counting.sizes)
        second = threads.submit(client.json, "/v1/compare", {"pairs": [pair(prompt="A"), pair(prompt="B")]})
        wait_until(lambda: "pluralign_queue_texts 4.0" in client.send("/metrics")[2].decode())
        status, headers, body = client.send("/v1/compare", {"pairs": [pair(prompt="C")]})
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "queue_full"
        counting.go.set()
        assert len(first.result()["results"]) + len(second.result()["results"]) == 3
        assert client.json("/v1/compare", {"pairs": [pair(prompt="C")]})["results"]
        lines = client.send("/metrics")[2].decode()
    assert 'pluralign_rejected_total{route="/v1/compare"} 1.0' in lines
    assert 'pluralign_requests_total{route="/v1/compare",status="200"} 3.0' in lines
    assert f"pluralign_batch_texts_count {len(counting.sizes)}.0" in lines


@pytest.mark.parametrize(
    ("path", "body", "texts"),
    [
        ("/v1/compare", {"pairs": [pair(prompt="Nobody?")]}, 2),
        ("/v1/answer", {"prompt": "Trees?", "candidates": TEXTS}, 3),
    ],
)
def test_texts_of_disconnected_clients_leave_the_queue(
    ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, texts: int
) -> None:
    counting = Counting(ensemble, monkeypatch)
    with running(ensemble) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.json, "/v1/compare", {"pairs": [pair()]})
        wait_until(lambda: counting.sizes)
        leaving = http.client.HTTPConnection(client.host, client.port)
        leaving.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        wait_until(lambda: f"pluralign_queue_texts {texts}.0" in client.send("/metrics")[2].decode())
        leaving.close()
        wait_until(lambda: "pluralign_queue_texts 0.0" in client.send("/metrics")[2].decode())
        counting.go.set()
        assert first.result()["results"]
        assert counting.sizes == [2]
        wait_until(lambda: not [one for one in threading.enumerate() if one.name == "answering"])


def test_texts_of_an_answer_are_encoded_in_the_scoring_thread_between_batches(ensemble: RewardEnsemble) -> None:
    calls: list[tuple[int, str]] = []

    def encoder(items: Sequence[Item]) -> Any:
        calls.append((len(items), threading.current_thread().name))
        return np.ones((len(items), 2))

    with running(ensemble, limits=Limits(batch_texts=4)) as client:
        vectors = client.service.answerer.encode(encoder, [("", str(number)) for number in range(10)])
    assert vectors.shape == (10, 2)
    assert [size for size, _ in calls] == [4, 4, 2]
    assert all(thread.startswith("scoring") for _, thread in calls)
