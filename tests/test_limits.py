"""Requests beyond the limits, and invalid ones, get an error with a sentence; no body crashes the server."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import HELLO, Client, Writer, pair, running

from pluralign import RewardEnsemble, UsageError
from pluralign.server.limits import Limits
from pluralign.server.options import ServeOptions
from pluralign.text.options import RemoteOptions

SMALL = Limits(body_bytes=2000, texts=4, characters=100, candidates=3, choices=2, max_tokens=10)


@pytest.fixture(scope="module")
def client(ensemble: RewardEnsemble) -> Iterator[Client]:
    with running(ensemble) as client:
        yield client


@pytest.fixture(scope="module")
def small(ensemble: RewardEnsemble) -> Iterator[Client]:
    with running(ensemble, Writer(), limits=SMALL) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/compare", {"pairs": [pair()] * 3}, 422, "too_many"),
        ("/v1/compare", {"pairs": [pair(response_a="x" * 101)]}, 422, "text_too_long"),
        ("/v1/compare", {"pairs": [pair(prompt="x" * 101)]}, 422, "text_too_long"),
        ("/v1/compare", {"pairs": []}, 422, "invalid"),
        ("/v1/compare", {"pairs": [pair(prompt=" ")]}, 422, "empty_prompt"),
        ("/v1/compare", {"pairs": [pair(prompt=[])]}, 422, "empty_prompt"),
        ("/v1/compare", {"pairs": [pair(prompt=None)]}, 422, "invalid"),
        ("/v1/compare", {"pairs": [pair(response_a="half \ud800")]}, 422, "not_text"),
        ("/v1/compare", {"pairs": [pair(prompt="half \udfff")]}, 422, "not_text"),
        ("/v1/compare", [], 422, "invalid"),
        ("/v1/compare", b"{", 400, "not_json"),
        ("/v1/compare", b"\xff\xfe", 400, "not_json"),
        ("/v1/compare", b"[" * 1900, 400, "not_json"),
        ("/v1/compare", b"", 422, "invalid"),
        ("/v1/compare", b"x" * 2001, 413, "body_too_large"),
        ("/v1/answer", b'{"prompt": "Tea?", "temperature": NaN}', 422, "invalid"),
        ("/v1/answer", b'{"prompt": "Tea?", "seed": 1e999}', 422, "invalid"),
        ("/v1/answer", {"prompt": "Tea?", "seed": -1}, 422, "invalid"),
        ("/v1/answer", {"prompt": "Tea?", "mode": "loud"}, 422, "invalid"),
        ("/v1/answer", {"prompt": "Tea?", "candidates": ["a", "b", "c", "d"]}, 422, "too_many"),
        ("/v1/answer", {"prompt": "Tea?", "candidates": []}, 422, "invalid"),
        ("/v1/answer", {"prompt": "Tea?", "n": 4}, 422, "too_many"),
        ("/v1/answer", {"prompt": "Tea?", "n": 2, "max_tokens": 11}, 422, "too_many"),
        ("/v1/answer", {"prompt": "Tea?", "n": 2, "mode": "steerable", "member": 3}, 400, "unusable"),
        ("/v1/steer", {"choices": [pair(chosen="a")] * 3}, 422, "too_many"),
        ("/v1/steer", {"choices": [pair(chosen="c")]}, 422, "invalid"),
        ("/v1/score", {"texts": [{"prompt": "Tea?", "response": "a"}] * 5}, 422, "too_many"),
        ("/rerank", {"query": "Tea?", "texts": list("abcde")}, 422, "too_many"),
        ("/rerank?member=3", {"query": "Tea?", "texts": ["a"]}, 404, "no_such_member"),
        ("/rerank?member=x", {"query": "Tea?", "texts": ["a"]}, 422, "invalid"),
        ("/v2/rerank", {"query": "Tea?", "documents": ["a"], "model": "town:member-9"}, 404, "model_not_found"),
        ("/get_reward", {"query": ["a"], "prompts": ["x" * 101]}, 422, "text_too_long"),
        ("/v1/chat/completions", {"model": "twon", "messages": HELLO}, 404, "model_not_found"),
        ("/v1/chat/completions", {"model": "town", "messages": []}, 422, "invalid"),
        ("/v1/chat/completions", {"model": "town:balanced", "messages": HELLO, "n": 2}, 400, "invalid"),
        ("/v1/chat/completions", {"model": "town", "messages": HELLO, "n": 4}, 422, "too_many"),
        ("/v1/chat/completions", {"model": "town", "messages": [{"role": "tool", "content": "x"}]}, 422, "invalid"),
        (
            "/v1/chat/completions",
            {"model": "town", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "unsupported_content",
        ),
        ("/v1/nothing", {}, 404, "not_found"),
        ("/v1/models", {}, 405, "method_not_allowed"),
    ],
)
def test_invalid_requests_get_an_error_sentence(small: Client, path: str, body: Any, status: int, code: str) -> None:
    error = small.error(path, body)
    assert error[:2] == (status, code), error
    assert error[2].endswith(".")
    assert small.json("/healthz") == {"status": "ok"}


FIELDS = ("prompt", "response", "response_a", "response_b", "chosen", "pairs", "texts", "choices", "candidates", "mode",
          "n", "rule", "member", "like", "seed", "temperature", "model", "messages", "role", "content", "type", "text",
          "stream", "stream_options", "query", "documents", "top_n", "prompts", "raw_scores", "stop", "tools",
          "response_format", "logprobs", "unknown")  # fmt: skip


WORDS = ("Tea?", "", "\x00", "\u2028", "\ud800", "town", "town:member-1", "balanced", "steerable", "distributional",
         "user", "short", "a", "lottery", "text")  # fmt: skip


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
    max_leaves=12,
)


PATHS = ("/v1/chat/completions", "/v1/compare", "/v1/score", "/v1/explain", "/v1/answer", "/v1/steer", "/rerank",
         "/v2/rerank", "/get_reward")  # fmt: skip


MOSTLY_RIGHT: dict[str, Any] = {
    "prompt": "Tea?", "response_a": "Yes", "response_b": "No", "pairs": [pair()], "texts": ["a", "b"], "query": "Tea?",
    "documents": ["a", "b"], "candidates": ["a", "b"], "messages": HELLO, "model": "town",
}  # fmt: skip


@settings(max_examples=150)
@given(path=st.sampled_from(PATHS), body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_no_body_crashes_the_server(client: Client, path: str, body: dict[str, Any]) -> None:
    for sent in (body, MOSTLY_RIGHT | body):
        status, _, content = client.send(path, sent)
        assert status < 500, content
        json.loads(content.partition(b"data: ")[2].partition(b"\n")[0] or content)


def test_requests_at_the_limits_are_accepted(small: Client) -> None:
    assert len(small.json("/v1/compare", {"pairs": [pair(response_a="x" * 100, prompt="y" * 100)] * 2})["results"]) == 2


def test_limits_follow_the_options() -> None:
    assert Limits.of(ServeOptions()) == Limits()
    assert Limits.of(ServeOptions(max_texts=5000)).queue_texts == 5000, "else a request could never be queued"
    remote = RemoteOptions(base_url="http://localhost:1/v1", concurrency=3, timeout=7)
    assert Limits.of(ServeOptions(), remote) == Limits(generations=3, generation_seconds=7)
    assert Limits.of(ServeOptions(max_seconds=2), remote).generation_seconds == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_body": 0}, "max_body must be above 0, not 0."),
        ({"max_seconds": float("nan")}, "max_seconds must be above 0, not nan."),
        ({"seed": -1}, "seed must not be negative, but it is -1."),
        ({"temperature": 0}, "temperature must be above 0 and at most 10, not 0."),
    ],
)
def test_invalid_limits_raise_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(sentence)}$"):
        ServeOptions(**changes)
