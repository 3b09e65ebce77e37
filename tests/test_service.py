"""Concurrent requests share batches, and overload is rejected until it is over."""

import json
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from served import TEXTS, Counting, pair, running, wait_until

from pluralign import RewardEnsemble
from pluralign.server.limits import Limits
from pluralign.server.service import without_end_marks
from pluralign.votes.prompts import Item


def test_end_marks_are_removed_in_linear_time() -> None:
    assert without_end_marks("<pad>" * 100_000) == ""
    kept = "<pad>" * 100_000 + " " * 100_000 + "x"
    assert without_end_marks(kept) == kept
    assert without_end_marks("Yes. \n") == "Yes. \n"
    assert without_end_marks("Use <s> and </s> there.") == "Use <s> and </s> there."


def test_concurrent_requests_share_batches_and_get_their_own_results(
    ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [pair(response_a=f"{TEXTS[0]} {n}" * (n % 3 + 1), response_b=f"{TEXTS[2]} {n}") for n in range(48)]
    expected = ensemble.rewards([(one["prompt"], one["response_a"]) for one in pairs])
    counting = Counting(ensemble, monkeypatch)
    with running(ensemble) as client, ThreadPoolExecutor(16) as threads:
        texts = [{"texts": [{"prompt": one["prompt"], "response": one["response_a"]}]} for one in pairs]
        requests = [threads.submit(client.json, "/v1/score", text) for text in texts]
        wait_until(lambda: counting.sizes)
        others = 16 - counting.sizes[0]  # of the clients, each of which waits for its answer before it asks again
        wait_until(lambda: f"pluralign_queue_texts {others}.0" in client.send("/metrics")[2].decode())
        counting.go.set()
        rewards = [one.result()["results"][0]["rewards"] for one in requests]
        lines = client.send("/metrics")[2].decode()
    np.testing.assert_allclose(rewards, expected)
    assert sum(counting.sizes[:2]) >= 16
    assert sum(counting.sizes) == 48
    assert f"pluralign_batch_texts_count {len(counting.sizes)}.0" in lines
    assert 'pluralign_requests_total{route="/v1/score",status="200"} 48.0' in lines


def test_overload_gets_503_until_the_queue_is_shorter(
    ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        assert 'pluralign_rejected_total{route="/v1/compare"} 1.0' in client.send("/metrics")[2].decode()


def test_an_answer_whose_client_disconnects_leaves_the_queue(
    ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(ensemble, monkeypatch)
    with running(ensemble) as client, ThreadPoolExecutor(1) as threads:

        def queue_is(n: int) -> bool:
            return f"pluralign_queue_texts {n}.0" in client.send("/metrics")[2].decode()

        first = threads.submit(client.json, "/v1/compare", {"pairs": [pair()]})
        wait_until(lambda: counting.sizes)
        body = json.dumps({"prompt": "Trees?", "candidates": TEXTS}).encode()
        head = "POST /v1/answer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        with socket.create_connection((client.host, client.port)) as impatient:
            impatient.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: queue_is(3))
        wait_until(lambda: queue_is(0))
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
