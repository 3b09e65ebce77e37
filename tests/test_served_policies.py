"""The server answers with the members' own policies: /v1/answer, OpenAI's chat completions, and limits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import HELLO, Client, Writer, running
from test_own_answers import Pen
from test_policy_writing import llama, policies  # noqa: F401 - fixtures
from test_tune import TOWN, ensemble_of

from pluralign.core.errors import DataError
from pluralign.server.limits import Limits

THREE = ensemble_of("question marks", "full stops", "exclamation marks", weights=(0.5, 0.3, 0.2))


def pens() -> dict[int, Pen]:
    return {
        0: Pen(["Which tea do you like?", "Which? Why? Who?"]),
        1: Pen(["We like tea.", "Tea. Rum. Milk."]),
        2: Pen(["Tea for us!", "Now! Here! Us!"]),
    }


@pytest.fixture
def client() -> Iterator[Client]:
    with running(THREE, Writer(), policies=pens()) as client:
        yield client


def test_the_slate_has_every_members_own_answer(client: Client) -> None:
    found = client.json("/v1/answer", {"prompt": "Tea?", "mode": "balanced", "seed": 0})
    assert {entry["member"]: entry["text"] for entry in found["answers"]} == {
        0: "Which tea do you like?", 1: "We like tea.", 2: "Tea for us!",
    }  # fmt: skip
    assert found["written"] == [0, 1, 2]
    assert sorted(found["candidate_texts"]) == sorted(entry["text"] for entry in found["answers"])
    several = client.json("/v1/answer", {"prompt": "Tea?", "n": 2, "seed": 0})
    assert {entry["text"] for entry in several["answers"]} == {"Which? Why? Who?", "Tea. Rum. Milk.", "Now! Here! Us!"}
    assert client.json("/v1/ensemble")["policies"] == [0, 1, 2]


def test_slate_size_and_cover_choose_among_the_members_answers(client: Client) -> None:
    found = client.json("/v1/answer", {"prompt": "Tea?", "slate_size": 2, "cover": "top-two", "seed": 0})
    assert len(found["answers"]) == 2
    assert sum(entry["weight"] for entry in found["answers"]) == pytest.approx(1)
    assert 0 < found["coverage"] <= 1


def test_the_model_of_a_member_is_its_policy(client: Client) -> None:
    for member, text in enumerate(["Which tea do you like?", "We like tea.", "Tea for us!"]):
        messages: Any = HELLO
        reply = client.openai.chat.completions.create(model=f"town:member-{member}", messages=messages)
        assert reply.choices[0].message.content == text
    consensus = client.json("/v1/chat/completions", {"model": "town:consensus", "messages": HELLO})
    assert consensus["pluralign"]["written"] == [0, 1, 2]
    assert consensus["choices"][0]["message"]["content"] == consensus["pluralign"]["consensus"]["text"]


def test_draws_follow_the_weights_and_the_seed(client: Client) -> None:
    body = {"model": "town:distributional", "messages": HELLO, "n": 60, "seed": 4}
    first, again = (client.json("/v1/chat/completions", body)["choices"] for _ in range(2))
    assert first == again
    texts = [choice["message"]["content"] for choice in first]
    counts = [texts.count(text) for text in ("Which tea do you like?", "We like tea.", "Tea for us!")]
    assert sum(counts) == 60
    assert abs(np.array(counts) / 60 - THREE.weights).max() < 0.2


def test_steering_by_choices_asks_one_policy(client: Client) -> None:
    pair = {"prompt": "Rum?", "response_a": "Rum! Yes!", "response_b": "Rum. Yes.", "chosen": "a"}
    found = client.json("/v1/answer", {"prompt": "Tea?", "mode": "steerable", "choices": [pair] * 5})
    assert (found["steering"]["member"], found["answers"][0]["text"], found["written"]) == (2, "Tea for us!", [2])


def test_candidates_of_a_request_are_chosen_from_without_policies(client: Client) -> None:
    found = client.json("/v1/answer", {"prompt": "Tea?", "candidates": ["Yes.", "No?"]})
    assert found["written"] == []
    assert {entry["text"] for entry in found["answers"]} <= {"Yes.", "No?"}


def test_a_member_without_a_policy_chooses_among_candidates_of_the_generator() -> None:
    some = pens()
    del some[2]
    some[1].error = DataError("the prompt is too long")
    with running(THREE, Writer(responses=("No!", "Yes. No.", "Perhaps it is so?")), policies=some, n=3) as client:
        found = client.json("/v1/answer", {"prompt": "Tea?", "seed": 0})
        assert {entry["member"]: entry["text"] for entry in found["answers"]} == {
            0: "Which? Why? Who?", 1: "Yes. No.", 2: "No!",
        }  # fmt: skip
        assert found["written"] == [0]
        assert found["notes"] == [
            "the policy of member 1 wrote nothing (the prompt is too long)",
            "members 1, 2 have no answer of a policy and choose among 3 shared candidates",
        ]


def test_drafts_are_limited_and_cut_at_stop_texts() -> None:
    with running(THREE, Writer(), policies=pens(), limits=Limits(candidates=5)) as client:
        status, code, message = client.error("/v1/answer", {"prompt": "Tea?", "n": 2})
        assert (status, code, message) == (422, "too_many", "a request may have at most 5 drafts, not 6.")
        body = {"model": "town:member-1", "messages": HELLO, "stop": " tea"}
        assert client.json("/v1/chat/completions", body)["choices"][0]["message"]["content"] == "We like"


def test_policies_in_this_process_answer_over_http(policies: Path) -> None:  # noqa: F811
    from pluralign.answering.policies import load_policies

    tuned = load_policies(policies, TOWN)
    with running(TOWN, tuned.base, policies=tuned.samplers) as client:
        body = {"prompt": "tea ?", "seed": 3, "max_tokens": 6}
        found = client.json("/v1/answer", body)
        assert found["written"] == [0, 1]
        assert json.dumps(found) == json.dumps(client.json("/v1/answer", body)), "reproducible by seed"
