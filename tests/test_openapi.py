"""Real responses of every route are valid under the schemas of /openapi.json."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from served import HELLO, TEXTS, Client, pair, running

from pluralign import PreferenceSet, RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import FitRecord

CHAT = {"model": "town:balanced", "messages": HELLO, "candidates": TEXTS}
ANSWER = {"prompt": "Tea?", "candidates": TEXTS}
REQUESTS: list[tuple[str, str, Any]] = [
    ("/v1/models", "/v1/models", None),
    ("/v1/models/{model}", "/v1/models/town", None),
    ("/v1/chat/completions", "/v1/chat/completions", CHAT),
    ("/v1/answer", "/v1/answer", ANSWER),
    ("/v1/answer", "/v1/answer", ANSWER | {"mode": "distributional"}),
    ("/v1/answer", "/v1/answer", ANSWER | {"mode": "steerable", "choices": [pair(chosen="a")]}),
    ("/v1/steer", "/v1/steer", {"choices": []}),
    ("/v1/compare", "/v1/compare", {"pairs": [pair()]}),
    ("/v1/score", "/v1/score", {"texts": [{"prompt": "Tea?", "response": "Yes."}]}),
    ("/v1/explain", "/v1/explain", pair()),
    ("/rerank", "/rerank?member=1", {"query": "Tea?", "texts": TEXTS, "return_text": True}),
    ("/v1/rerank", "/v1/rerank", {"query": "Tea?", "documents": TEXTS}),
    ("/v2/rerank", "/v2/rerank", {"query": "Tea?", "documents": TEXTS, "return_documents": True}),
    ("/get_reward", "/get_reward", {"query": TEXTS}),
    ("/v1/ensemble", "/v1/ensemble", None),
    ("/health", "/health", None),
    ("/healthz", "/healthz", None),
    ("/metrics", "/metrics", None),
]


@pytest.fixture(scope="module")
def client(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> Iterator[Client]:
    with running(ensemble, held_out=held_out) as client:
        yield client


def check(client: Client, route: str, path: str, body: Any, status: int = 200) -> None:
    """Send a request and validate its response."""
    description = client.json("/openapi.json")
    given, headers, content = client.send(path, body)
    assert given == status, content
    responses = description["paths"][route]["get" if body is None else "post"]["responses"]
    media_type = headers["content-type"].partition(";")[0]
    described = responses[str(status) if str(status) in responses else f"{status // 100}XX"]["content"][media_type]
    if media_type == "application/json":
        schema = {**described["schema"], "components": description["components"]}
        jsonschema.Draft202012Validator(schema).validate(json.loads(content))


@pytest.mark.parametrize(("route", "path", "body"), REQUESTS)
def test_every_response_is_valid(client: Client, route: str, path: str, body: Any) -> None:
    check(client, route, path, body)


def test_every_described_route_is_tested(client: Client) -> None:
    assert set(client.json("/openapi.json")["paths"]) == {route for route, _, _ in REQUESTS}


@pytest.mark.parametrize(("body", "status"), [({}, 422), (ANSWER | {"rule": "dictator"}, 400), (b"x" * 5_000_000, 413)])
def test_errors_are_valid(client: Client, body: Any, status: int) -> None:
    check(client, "/v1/answer", "/v1/answer", body, status)


def test_undefined_figures_are_valid_as_null(ensemble: RewardEnsemble) -> None:
    votes = PreferenceSet.from_columns(["Tea?"], ["Yes."], ["No."], [1], [0])
    one_pair = HeldOutVotes(votes, np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]]))
    with running(ensemble, held_out=one_pair) as client:
        assert client.json("/v1/ensemble")["groups"]["length"][0]["interval"]["low"] is None
        check(client, "/v1/ensemble", "/v1/ensemble", None)
    with running(replace(ensemble, record=FitRecord())) as client:
        check(client, "/v1/ensemble", "/v1/ensemble", None)
