"""Candidates come from the request, a language model or the held-out votes, within limits."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from served import HELLO, SECRET, Client, Writer, running, wait_until

from pluralign import RewardEnsemble, town_hall
from pluralign.core.errors import DataError
from pluralign.ensemble.held_out import HeldOutVotes, score_held_out
from pluralign.server.limits import Limits
from pluralign.votes.candidates import candidates_of
from pluralign.votes.prompts import Message


@pytest.fixture(scope="module")
def client(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> Iterator[Client]:
    with running(ensemble, held_out=held_out) as client:
        yield client


def test_held_out_prompts_and_given_candidates_need_no_generator(client: Client, held_out: HeldOutVotes) -> None:

    known = candidates_of(held_out.preferences)[0]
    body = {"model": "town:consensus", "messages": [{"role": "user", "content": known.prompt}]}
    assert client.json("/v1/chat/completions", body)["choices"][0]["message"]["content"] in known.responses
    body["messages"] = [{"role": "user", "content": "Something else?"}]
    status, code, message = client.error("/v1/chat/completions", body)
    assert (status, code) == (400, "no_generator")
    assert "--model" in message
    reply = client.json("/v1/chat/completions", body | {"candidates": ["Only this."]})
    assert reply["choices"][0]["message"]["content"] == "Only this."


def test_a_single_message_stays_a_chat_if_all_held_out_prompts_are_chats(ensemble: RewardEnsemble) -> None:
    votes = town_hall(200).preferences[:12]
    chats = np.empty(len(votes.prompts), dtype=object)
    chats[:] = [(Message("user", str(prompt)),) for prompt in votes.prompts]
    votes, writer = replace(votes, prompts=chats), Writer()
    with running(ensemble, writer, held_out=score_held_out(ensemble, votes)) as client:
        client.json("/v1/chat/completions", {"model": "town", "messages": [{"role": "user", "content": "Tea?"}]})
    assert writer.requests[0][0] == (Message("user", "Tea?"),)


def test_a_failing_generator_gives_502_and_a_hanging_one_504(ensemble: RewardEnsemble) -> None:
    writer = Writer(error=DataError("the server answered 500", remedy="see its own log"))
    body = {"model": "town", "messages": HELLO}
    with running(ensemble, writer, limits=Limits(generation_seconds=0.2, generations=1)) as client:
        status, code, message = client.error("/v1/chat/completions", body)
        assert (status, code) == (502, "upstream_failed")
        assert message == "writer generated no candidates: the server answered 500; see its own log."
        writer.error = RuntimeError(f"a bug that quotes {SECRET}")
        assert client.error("/v1/chat/completions", body) == (
            502,
            "upstream_failed",
            "writer generated no candidates: RuntimeError.",
        )
        writer.error = None
        writer.go.clear()
        assert client.error("/v1/chat/completions", body)[:2] == (504, "upstream_timeout")
        writer.go.set()
        wait_until(lambda: client.send("/v1/chat/completions", body)[0] == 200)
        writer.responses = ("", " ")
        assert client.error("/v1/chat/completions", body)[:2] == (502, "upstream_failed")


def test_waiting_generations_are_limited(ensemble: RewardEnsemble) -> None:
    writer, body = Writer(), {"model": "town", "messages": HELLO}
    writer.go.clear()
    limits = Limits(generations=1, generations_waiting=1)
    with running(ensemble, writer, limits=limits) as client, ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(client.json, "/v1/chat/completions", body) for _ in range(2)]
        wait_until(lambda: client.service.slots.waiting == 2)
        status, headers, _ = client.send("/v1/chat/completions", body)
        assert (status, headers["retry-after"]) == (503, "5")
        assert len(writer.requests) == 1
        writer.go.set()
        assert all(one.result()["choices"] for one in waiting)


def test_a_long_text_of_the_language_model_gets_502(ensemble: RewardEnsemble) -> None:
    writer = Writer(responses=("Yes.", "x" * 101))
    with running(ensemble, writer, limits=Limits(characters=100)) as client:
        status, code, message = client.error("/v1/chat/completions", {"model": "town", "messages": HELLO})
        assert (status, code) == (502, "upstream_failed")
        assert message == "a text of the language model may have at most 100 characters, not 101."
        body = {"model": "town", "messages": HELLO, "candidates": ["x" * 101]}
        assert client.error("/v1/chat/completions", body)[:2] == (422, "text_too_long")
