"""The server speaks what existing clients speak, keeps its limits, tells nothing it should not, and stops in order."""

import http.client
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import uvicorn
from conftest import run
from hypothesis import given, settings
from hypothesis import strategies as st

from pluralign import RewardEnsemble, UsageError, create_app, fit, town_hall
from pluralign.core.errors import DataError
from pluralign.ensemble.held_out import HeldOutVotes, load_held_out, score_held_out
from pluralign.models.completion import Completion
from pluralign.models.options import RemoteOptions, SamplingOptions
from pluralign.server.app import greeting, serve
from pluralign.server.limits import HEADERS, Limits
from pluralign.server.options import ServeOptions
from pluralign.server.service import without_end_marks
from pluralign.theory.social_choice import borda, pairwise_support
from pluralign.votes.prompts import Item, Message, PromptLike

TEXTS = ["Yes, we should plant many more trees.", "No.", "Perhaps: it depends on the cost, and on who pays for it."]
SECRET = "a-secret-nobody-should-log"


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "town"
    fit(town_hall(400).preferences, k=3, encoder="none", folder=folder)
    return folder


@pytest.fixture(scope="module")
def ensemble(town: Path) -> RewardEnsemble:
    return RewardEnsemble.load(town)


@pytest.fixture(scope="module")
def evidence(town: Path) -> HeldOutVotes:
    return load_held_out(town)


@dataclass
class Writer:
    """A language model of the test's own."""

    name: str = "writer"
    responses: Sequence[str] = tuple(TEXTS)
    error: Exception | None = None
    go: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[PromptLike, int, SamplingOptions]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.go.set()

    def prepare(self) -> None:
        pass

    def sample(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[Completion]:
        self.asked.append((prompt, n, options))
        self.go.wait(10)
        if self.error:
            raise self.error
        return [Completion(response) for response in self.responses][:n]


class Client:
    """Plain HTTP, as curl would send it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.host, _, port = address.removeprefix("http://").partition(":")
        self.port = int(port)
        self.service: Any = None

    def send(
        self, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            own = {"Content-Type": "application/json"} if sent is not None else {}
            given = own | {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method or ("GET" if sent is None else "POST"), path, sent, given)
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def json(self, path: str, body: Any = None, **headers: str) -> Any:
        status, _, content = self.send(path, body, **headers)
        assert status == 200, content
        return json.loads(content)

    def refused(self, path: str, body: Any = None, **headers: str) -> tuple[int, str, str]:
        """Status, code and sentence of an error, which must have OpenAI's shape."""
        status, _, content = self.send(path, body, **headers)
        error = json.loads(content)["error"]
        assert set(error) == {"message", "type", "code", "param"}
        return status, error["code"], error["message"]

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="any", max_retries=0)


@contextmanager
def running(ensemble: RewardEnsemble, generator: Any = None, **options: Any) -> Iterator[Client]:
    """A real server on a free port."""
    app = create_app(ensemble, generator, **({"name": "town"} | options))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            client = Client(f"http://127.0.0.1:{listening.getsockname()[1]}")
            client.service = app.state.service
            yield client
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def client(ensemble: RewardEnsemble, evidence: HeldOutVotes) -> Iterator[Client]:
    with running(ensemble, evidence=evidence) as client:
        yield client


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer()


@pytest.fixture(scope="module")
def writing(ensemble: RewardEnsemble, writer: Writer) -> Iterator[Client]:
    with running(ensemble, writer) as client:
        yield client


def pair(**changes: Any) -> dict[str, Any]:
    return {"prompt": "Tea?", "response_a": TEXTS[0], "response_b": TEXTS[1]} | changes


def wait_until(true: Any) -> None:
    for _ in range(4000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it never happened")


# --- scores ---------------------------------------------------------------------------------------------------------


def test_compare_and_score_give_what_the_command_line_gives(client: Client, town: Path, write_jsonl: Any) -> None:
    chat = [
        {"role": "user", "content": "Tea?"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?"},
    ]
    pairs = [pair(), pair(response_b=TEXTS[2]), pair(prompt=chat), pair(response_b=TEXTS[0])]
    offline = [json.loads(line) for line in run("compare", town, write_jsonl(pairs)).stdout.splitlines()]
    online = client.json("/v1/compare", {"pairs": pairs})["results"]
    assert [set(one) for one in online] == [{"votes", "prob_hat", "prob_policy"}] * 4
    for ours, theirs in zip(online, offline, strict=True):
        assert ours["votes"] == theirs["votes"]
        assert ours["prob_policy"] == pytest.approx(theirs["prob_policy"])
    assert online[3]["votes"] == [0.5, 0.5, 0.5]
    texts = [{"prompt": "Tea?", "response": text} for text in TEXTS]
    offline = [json.loads(line) for line in run("score", town, write_jsonl(texts)).stdout.splitlines()]
    for ours, theirs in zip(client.json("/v1/score", {"texts": texts})["results"], offline, strict=True):
        assert ours["rewards"] == pytest.approx(theirs["rewards"])


def test_rerank_scores_by_weighted_pairwise_support(client: Client, ensemble: RewardEnsemble) -> None:
    rewards = ensemble.rewards([("Tea?", text) for text in [*TEXTS, "Never!"]])
    asked = {"query": "Tea?", "texts": [*TEXTS, "Never!"]}
    found = client.json("/rerank", asked | {"return_text": True})
    expected = borda(pairwise_support(rewards, ensemble.weights))
    assert {one["index"]: one["score"] for one in found} == pytest.approx(dict(enumerate(expected)))
    assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)
    assert all(one["text"] == asked["texts"][one["index"]] for one in found)
    raw = {one["index"]: one["score"] for one in client.json("/rerank?member=1", asked | {"raw_scores": True})}
    assert raw == pytest.approx(dict(enumerate(rewards[:, 1])))
    assert client.json("/rerank", {"query": "Tea?", "texts": ["Yes"]}) == [{"index": 0, "score": 0.5}]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_rerank_in_coheres_shape_takes_a_member_by_its_model_id(
    client: Client, ensemble: RewardEnsemble, path: str
) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    body = {"model": "town:member-2", "query": "Tea?", "documents": documents, "top_n": 2, "return_documents": True}
    found = client.json(path, body)["results"]
    order = np.argsort(-ensemble.rewards([("Tea?", text) for text in TEXTS])[:, 2])
    assert [one["index"] for one in found] == order[:2].tolist()
    assert [one["relevance_score"] for one in found] == [1.0, 0.5]
    assert [one["document"]["text"] for one in found] == [TEXTS[i] for i in order[:2]]


def test_get_reward_answers_openrlhf(client: Client, ensemble: RewardEnsemble) -> None:
    queries = [f"user: Tea?\n{TEXTS[0]}<|im_end|>\n", f"user: Tea?\n{TEXTS[1]}</s><pad>"]
    body = {"query": queries, "prompts": ["user: Tea?\n"] * 2, "labels": [None, "x"]}
    rewards = ensemble.rewards([("user: Tea?\n", text) for text in TEXTS[:2]])
    found = client.json("/get_reward", body)
    assert set(found) == {"rewards", "scores", "extra_logs"}
    assert found["rewards"] == pytest.approx((rewards @ ensemble.weights).tolist())
    assert found["extra_logs"]["member_2"] == pytest.approx(rewards[:, 2].tolist())
    assert client.json("/get_reward?member=1", body)["rewards"] == pytest.approx(rewards[:, 1].tolist())
    whole = client.json("/get_reward", {"query": [TEXTS[0]]})["rewards"]
    assert whole == pytest.approx(ensemble.rewards([("", TEXTS[0])]) @ ensemble.weights)
    assert client.refused("/get_reward", body | {"prompts": ["one"]})[0] == 422


def test_end_marks_are_taken_off_in_no_time() -> None:
    assert without_end_marks("<pad>" * 100_000) == ""
    kept = "<pad>" * 100_000 + " " * 100_000 + "x"
    assert without_end_marks(kept) == kept
    assert without_end_marks("Yes. \n") == "Yes. \n"
    assert without_end_marks("Use <s> and </s> there.") == "Use <s> and </s> there."


def test_explain_says_of_every_member_how_it_votes(client: Client) -> None:
    found = client.json("/v1/explain", pair())
    assert [member["vote"] for member in found["members"]] == found["votes"]
    assert all(member["why"] for member in found["members"])
    difference = np.subtract(found["rewards"]["a"], found["rewards"]["b"])
    assert ((difference > 0) == (np.array(found["votes"]) > 0.5)).all()


# --- answers --------------------------------------------------------------------------------------------------------


def test_the_official_client_lists_the_models(client: Client) -> None:
    ids = [model.id for model in client.openai.models.list()]
    assert ids[:4] == ["town", "town:distributional", "town:balanced", "town:consensus"]
    assert ids[4:] == ["town:member-0", "town:member-1", "town:member-2"]


def test_the_official_client_gets_the_consensus(writing: Client, writer: Writer, ensemble: RewardEnsemble) -> None:
    answer = writing.openai.chat.completions.create(
        model="town:consensus",
        messages=[{"role": "user", "content": "Plant trees?"}],
        temperature=0,
        max_tokens=7,
        seed=5,
        user="unknown fields are ignored",
    )
    facts = answer.pluralign  # type: ignore[attr-defined]
    message = answer.choices[0]
    assert (answer.object, answer.model, message.finish_reason) == ("chat.completion", "town:consensus", "stop")
    assert message.message.content == facts["consensus"]["text"]
    assert message.message.content in TEXTS
    assert sum(one["weight"] for one in facts["answers"]) == pytest.approx(1)
    assert (facts["seed"], facts["generator"], facts["candidates"]) == (5, "writer", 3)
    assert answer.usage
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    prompt, n, options = writer.asked[0]
    assert (prompt, n) == ("Plant trees?", 8)
    assert (options.temperature, options.max_new_tokens, options.seed) == (0.01, 7, 5)


def test_a_streamed_answer_is_the_answer_in_pieces(writing: Client) -> None:
    asked: dict[str, Any] = {
        "model": "town:balanced",
        "messages": [{"role": "user", "content": "Plant trees?"}],
        "seed": 1,
    }
    whole = writing.openai.chat.completions.create(**asked)
    chunks = list(writing.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert said.count("%: ") == len(whole.pluralign["answers"]) > 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-2].pluralign == whole.pluralign
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    _, headers, raw = writing.send("/v1/chat/completions", asked | {"stream": True})
    assert headers["content-type"].startswith("text/event-stream")
    assert raw.endswith(b"data: [DONE]\n\n")


def test_a_member_answers_with_its_favourite(writing: Client, ensemble: RewardEnsemble) -> None:
    rewards = ensemble.rewards([("Plant trees?", text) for text in TEXTS])
    for j in range(3):
        asked = {"model": f"town:member-{j}", "messages": [{"role": "user", "content": "Plant trees?"}]}
        found = writing.json("/v1/chat/completions", asked)
        assert found["choices"][0]["message"]["content"] == TEXTS[rewards[:, j].argmax()]
        assert found["pluralign"]["steering"]["member"] == j


def test_draws_follow_the_weights_and_a_seed_repeats_them(client: Client, ensemble: RewardEnsemble) -> None:
    asked: dict[str, Any] = {"model": "town", "messages": [{"role": "user", "content": "Tea?"}], "candidates": TEXTS}
    draws = [client.json("/v1/chat/completions", asked | {"n": 64}) for _ in range(6)]
    drawn = [one["member"] for draw in draws for one in draw["pluralign"]["answers"]]
    assert len(drawn) == len(draws) * 64 == sum(len(draw["choices"]) for draw in draws)
    shares = np.bincount(drawn, minlength=3) / len(drawn)
    assert np.abs(shares - ensemble.weights).max() < 4.5 * 0.5 / np.sqrt(len(drawn))  # standard errors
    assert len({draw["pluralign"]["seed"] for draw in draws}) == 6
    again = client.json("/v1/chat/completions", asked | {"n": 64, "seed": draws[0]["pluralign"]["seed"]})
    assert again["pluralign"] == draws[0]["pluralign"]


def test_system_and_earlier_turns_make_up_a_chat_prompt(writing: Client, writer: Writer) -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Te"}, {"type": "text", "text": "a?"}]},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?"},
    ]
    writing.json("/v1/chat/completions", {"model": "town", "messages": messages})
    said = [("system", "Be kind."), ("user", "Tea?"), ("assistant", "No."), ("user", "Why?")]
    assert writer.asked[-1][0] == tuple(Message(*turn) for turn in said)


def test_without_a_language_model_held_out_prompts_and_candidates_are_answered(
    client: Client, evidence: HeldOutVotes
) -> None:
    from pluralign.votes.candidates import candidates_of

    known = candidates_of(evidence.preferences)[0]
    asked = {"model": "town:consensus", "messages": [{"role": "user", "content": known.prompt}]}
    assert client.json("/v1/chat/completions", asked)["choices"][0]["message"]["content"] in known.responses
    asked["messages"] = [{"role": "user", "content": "Something else?"}]
    status, code, sentence = client.refused("/v1/chat/completions", asked)
    assert (status, code) == (400, "no_generator")
    assert "--model" in sentence
    found = client.json("/v1/chat/completions", asked | {"candidates": ["Only this."]})
    assert found["choices"][0]["message"]["content"] == "Only this."


def test_answer_has_the_three_modes(client: Client) -> None:
    body = {"prompt": "Tea?", "candidates": TEXTS, "seed": 3}
    balanced = client.json("/v1/answer", body | {"mode": "balanced", "rule": "borda"})
    assert balanced["consensus"]["rule"] == "borda"
    assert balanced["candidate_texts"] == TEXTS
    assert [one["name"] for one in balanced["answers"]] == [
        balanced["members"][one["member"]] for one in balanced["answers"]
    ]
    assert client.json("/v1/answer", body | {"mode": "distributional"})["answers"][0]["text"] in TEXTS
    steered = client.json("/v1/answer", body | {"mode": "steerable", "member": 2})
    assert steered["steering"]["name"] == steered["members"][2]
    choices = [pair(chosen="b"), pair(response_b=TEXTS[2], chosen="a")]
    by_choices = client.json("/v1/answer", body | {"mode": "steerable", "choices": choices})["steering"]
    steering = client.json("/v1/steer", {"choices": choices})
    assert by_choices == steering
    assert len(steering["path"]) == 3
    assert sum(steering["posterior"]) == pytest.approx(1)
    assert client.refused("/v1/answer", body | {"mode": "steerable"})[:2] == (400, "unusable")
    assert client.refused("/v1/answer", body | {"rule": "dictator"})[0] == 400


def test_no_choice_leaves_the_weights(client: Client, ensemble: RewardEnsemble) -> None:
    steering = client.json("/v1/steer", {"choices": []})
    assert steering["posterior"] == pytest.approx(ensemble.weights.tolist())
    assert steering["member"] == ensemble.weights.argmax()


def test_a_teams_refusal_comes_before_everything(ensemble: RewardEnsemble) -> None:
    writer = Writer()

    def refusal(prompt: PromptLike) -> str | None:
        return "We do not talk about rum." if "rum" in str(prompt) else None

    with running(ensemble, writer, refusal=refusal) as client:
        for model in ("town", "town:balanced", "town:consensus", "town:member-1"):
            asked = {"model": model, "messages": [{"role": "user", "content": "Why rum?"}]}
            found = client.json("/v1/chat/completions", asked)
            assert found["choices"][0]["message"]["content"] == "We do not talk about rum."
            assert found["pluralign"]["refused"]
        assert writer.asked == []


def test_an_ensemble_that_knows_only_chats_is_asked_with_chats(ensemble: RewardEnsemble) -> None:
    votes = town_hall(200).preferences[:12]
    chats = np.empty(len(votes.prompts), dtype=object)
    chats[:] = [(Message("user", str(prompt)),) for prompt in votes.prompts]
    votes, writer = replace(votes, prompts=chats), Writer()
    with running(ensemble, writer, evidence=score_held_out(ensemble, votes)) as client:
        client.json("/v1/chat/completions", {"model": "town", "messages": [{"role": "user", "content": "Tea?"}]})
    assert writer.asked[0][0] == (Message("user", "Tea?"),)


# --- what is refused ------------------------------------------------------------------------------------------------

SMALL = Limits(body_bytes=2000, texts=4, characters=100, candidates=3, choices=2, max_tokens=10)


@pytest.fixture(scope="module")
def small(ensemble: RewardEnsemble) -> Iterator[Client]:
    with running(ensemble, Writer(), limits=SMALL) as client:
        yield client


HELLO = [{"role": "user", "content": "Tea?"}]


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
def test_what_cannot_be_answered_is_refused_with_a_sentence(
    small: Client, path: str, body: Any, status: int, code: str
) -> None:
    found = small.refused(path, body)
    assert found[:2] == (status, code), found
    assert found[2].endswith(".")
    assert small.json("/healthz") == {"status": "ok"}


FIELDS = ("prompt", "response", "response_a", "response_b", "chosen", "pairs", "texts", "choices", "candidates", "mode",
          "n", "rule", "member", "like", "seed", "temperature", "model", "messages", "role", "content", "type", "text",
          "stream", "stream_options", "query", "documents", "top_n", "prompts", "raw_scores")  # fmt: skip
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
def test_no_body_makes_the_server_fail(client: Client, path: str, body: dict[str, Any]) -> None:
    for sent in (body, MOSTLY_RIGHT | body):
        status, _, content = client.send(path, sent)
        assert status < 500, content
        json.loads(content.partition(b"data: ")[2].partition(b"\n")[0] or content)


def test_the_limits_themselves_are_allowed(small: Client) -> None:
    assert len(small.json("/v1/compare", {"pairs": [pair(response_a="x" * 100, prompt="y" * 100)] * 2})["results"]) == 2


def test_a_body_without_its_length_is_cut_off_at_the_limit(small: Client) -> None:
    with socket.create_connection((small.host, small.port), timeout=10) as connection:
        head = "POST /v1/compare HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
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


def test_a_body_that_does_not_come_is_not_waited_for(ensemble: RewardEnsemble) -> None:
    with (
        running(ensemble, limits=Limits(body_seconds=0.1)) as client,
        socket.create_connection((client.host, client.port), timeout=10) as connection,
    ):
        head = "POST /v1/compare HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_other_content_types_and_foreign_hosts_are_refused(client: Client) -> None:
    body = json.dumps({"pairs": [pair()]}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert client.refused("/v1/compare", body, Content_Type=kind)[:2] == (415, "not_json")
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""):
        assert client.refused("/v1/models", Host=host)[:2] == (403, "unknown_host")
    for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000"):
        assert client.send("/v1/models", Host=host)[0] == 200


def test_no_other_site_is_let_in(client: Client) -> None:
    headers = {"Origin": "https://evil.example", "Access_Control_Request_Method": "POST"}
    status, answer, _ = client.send("/v1/compare", method="OPTIONS", **headers)
    assert status == 405
    assert not any(name.startswith("access-control") for name in answer)
    assert not any(name.startswith("access-control") for name in client.send("/v1/models", **headers)[1])


# --- keys -----------------------------------------------------------------------------------------------------------


def test_with_a_key_only_the_page_and_health_are_open(ensemble: RewardEnsemble) -> None:
    with running(ensemble, Writer(), api_key=SECRET) as client:
        for path in ("/", "/docs", "/openapi.json", "/healthz"):
            assert client.send(path, Host="any.example")[0] == 200
        guarded = ("/v1/models", "/v1/ensemble", "/metrics", "/rerank", "/get_reward", "/v1/compare", "/v2/rerank")
        for path in (*guarded, "/v1", "/v1/nothing"):
            for header in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": SECRET},
                {"Authorization": "Basic !"},
            ):
                assert client.refused(path, **header)[:2] == (401, "invalid_api_key"), path
        assert client.send("/metrics", Authorization=f"Bearer {SECRET}")[0] == 200
        with_key = openai.OpenAI(base_url=f"{client.address}/v1", api_key=SECRET)
        assert len(list(with_key.models.list())) == 7
        with pytest.raises(openai.AuthenticationError, match="Bearer KEY"):
            client.openai.models.list()


def test_the_key_may_be_the_password_of_an_address(ensemble: RewardEnsemble) -> None:
    import base64

    with running(ensemble, api_key=SECRET) as client:
        basic = base64.b64encode(f"any:{SECRET}".encode()).decode()
        assert client.json("/get_reward", {"query": ["a"]}, Authorization=f"Basic {basic}")["rewards"]


def test_others_are_not_served_without_a_key(ensemble: RewardEnsemble, town: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.com"):
        with pytest.raises(UsageError, match="--api-key"):
            serve(ensemble, host=host)
    refused = run("serve", town, "--host", "0.0.0.0")
    assert refused.returncode == 2
    assert "PLURALIGN_API_KEY" in refused.stderr


# --- many at once ---------------------------------------------------------------------------------------------------


class Counting:
    """An ensemble's scorer that waits for its turn and keeps the sizes of its batches."""

    def __init__(self, ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.go = threading.Event()
        own = ensemble.scorer()

        def score(items: Sequence[Item]) -> Any:
            self.sizes.append(len(items))
            self.go.wait(10)
            return own(items)

        monkeypatch.setattr(RewardEnsemble, "scorer", lambda _: score)


def test_concurrent_requests_are_scored_in_few_batches_and_each_gets_its_own(
    ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [pair(response_a=f"{TEXTS[0]} {n}" * (n % 3 + 1), response_b=f"{TEXTS[2]} {n}") for n in range(48)]
    expected = ensemble.rewards([(one["prompt"], one["response_a"]) for one in pairs])
    counting = Counting(ensemble, monkeypatch)
    with running(ensemble) as client, ThreadPoolExecutor(16) as threads:
        texts = [{"texts": [{"prompt": one["prompt"], "response": one["response_a"]}]} for one in pairs]
        asked = [threads.submit(client.json, "/v1/score", text) for text in texts]
        wait_until(lambda: counting.sizes)
        others = 16 - counting.sizes[0]  # of the clients, each of which waits for its answer before it asks again
        wait_until(lambda: f"pluralign_queue_texts {others}.0" in client.send("/metrics")[2].decode())
        counting.go.set()
        found = [one.result()["results"][0]["rewards"] for one in asked]
        lines = client.send("/metrics")[2].decode()
    np.testing.assert_allclose(found, expected)
    assert sum(counting.sizes[:2]) >= 16
    assert sum(counting.sizes) == 48
    assert f"pluralign_batch_texts_count {len(counting.sizes)}.0" in lines
    assert 'pluralign_requests_total{route="/v1/score",status="200"} 48.0' in lines


def test_overload_is_answered_with_503_and_is_over_when_it_is_over(
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


def test_a_client_that_goes_away_is_not_scored_for(ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(ensemble, monkeypatch)
    with running(ensemble) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.json, "/v1/compare", {"pairs": [pair()]})
        wait_until(lambda: counting.sizes)
        leaving = http.client.HTTPConnection(client.host, client.port)
        body = json.dumps({"pairs": [pair(prompt="Nobody?")]})
        leaving.request("POST", "/v1/compare", body, {"Content-Type": "application/json"})
        wait_until(lambda: "pluralign_queue_texts 2.0" in client.send("/metrics")[2].decode())
        leaving.close()
        wait_until(lambda: "pluralign_queue_texts 0.0" in client.send("/metrics")[2].decode())
        counting.go.set()
        first.result()
        assert counting.sizes == [2]


def test_too_many_requests_at_once_are_refused(ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(ensemble, monkeypatch)
    with running(ensemble, limits=Limits(requests=1)) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.json, "/v1/compare", {"pairs": [pair()]})
        wait_until(lambda: counting.sizes)
        assert client.refused("/v1/models")[:2] == (503, "busy")
        assert client.json("/healthz")["status"] == "ok"
        counting.go.set()
        first.result()
        assert client.json("/v1/models")["data"]


# --- the language model ---------------------------------------------------------------------------------------------


def test_a_language_model_that_fails_is_a_502_and_one_that_hangs_a_504(ensemble: RewardEnsemble) -> None:
    writer = Writer(error=DataError("the server answered 500", remedy="see its own log"))
    asked = {"model": "town", "messages": HELLO}
    with running(ensemble, writer, limits=Limits(generation_seconds=0.2, generations=1)) as client:
        status, code, sentence = client.refused("/v1/chat/completions", asked)
        assert (status, code) == (502, "upstream_failed")
        assert sentence == "writer gave no candidates: the server answered 500; see its own log."
        writer.error = RuntimeError(f"a bug that quotes {SECRET}")
        assert client.refused("/v1/chat/completions", asked) == (
            502,
            "upstream_failed",
            "writer gave no candidates: RuntimeError.",
        )
        writer.error = None
        writer.go.clear()
        assert client.refused("/v1/chat/completions", asked)[:2] == (504, "upstream_timeout")
        writer.go.set()
        wait_until(lambda: client.send("/v1/chat/completions", asked)[0] == 200)
        writer.responses = ("", " ")
        assert client.refused("/v1/chat/completions", asked)[:2] == (502, "upstream_failed")


def test_only_so_many_prompts_wait_for_candidates(ensemble: RewardEnsemble) -> None:
    writer, asked = Writer(), {"model": "town", "messages": HELLO}
    writer.go.clear()
    limits = Limits(generations=1, generations_waiting=1)
    with running(ensemble, writer, limits=limits) as client, ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(client.json, "/v1/chat/completions", asked) for _ in range(2)]
        wait_until(lambda: client.service._asking == 2)
        status, headers, _ = client.send("/v1/chat/completions", asked)
        assert (status, headers["retry-after"]) == (503, "5")
        assert len(writer.asked) == 1
        writer.go.set()
        assert all(one.result()["choices"] for one in waiting)


# --- logs, pages, metrics -------------------------------------------------------------------------------------------


def test_no_text_of_a_request_is_in_the_log_unless_asked_for(
    ensemble: RewardEnsemble, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    writer = Writer(error=RuntimeError(SECRET))
    with running(ensemble, writer) as client:
        client.json("/v1/compare", {"pairs": [pair(prompt=SECRET)]})
        client.refused("/v1/compare", {"pairs": [pair(prompt=SECRET, response_a=1)]})
        client.refused("/v1/chat/completions", {"model": SECRET, "messages": HELLO})
        client.refused("/v1/chat/completions", {"model": "town", "messages": [{"role": "user", "content": SECRET}]})
        client.refused(f"/v1/compare?prompt={SECRET}", b"{")
    assert "POST /v1/compare 200" in caplog.text
    assert SECRET not in caplog.text
    with running(ensemble, log_prompts=True) as client:
        client.json("/v1/compare", {"pairs": [pair(prompt=SECRET)]})
    assert SECRET in caplog.text


def test_a_bug_of_ours_is_told_without_the_text(
    ensemble: RewardEnsemble, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(items: Sequence[Item]) -> Any:
        raise KeyError(items[0])

    monkeypatch.setattr(RewardEnsemble, "scorer", lambda _: score)
    with running(ensemble) as client:
        assert client.refused("/v1/compare", {"pairs": [pair(prompt=SECRET)]})[:2] == (500, "internal_error")
        assert client.json("/healthz")["status"] == "ok"
    assert "KeyError in score" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("path", ["/", "/docs", "/v1/models", "/v1/nothing", "/metrics"])
def test_every_response_has_the_strict_headers(client: Client, path: str) -> None:
    headers = client.send(path)[1]
    for name, value in HEADERS.items():
        assert headers[name.lower()] == value
    assert "'unsafe" not in headers["content-security-policy"]


def test_the_pages_facts_are_there(client: Client, ensemble: RewardEnsemble) -> None:
    shown = client.json("/v1/ensemble")
    assert (shown["name"], shown["k"], shown["can_generate"]) == ("town", 3, False)
    assert shown["modes"] == ["balanced", "steerable", "distributional"]
    assert shown["limits"]["candidates"] == Limits().candidates
    assert len(shown["members"]) == 3


def test_the_description_of_the_api_is_complete_and_needs_no_other_site(client: Client) -> None:
    described = client.json("/openapi.json")["paths"]
    listing = client.send("/docs")[2].decode()
    for path in (
        "/v1/chat/completions",
        "/v1/compare",
        "/v1/score",
        "/rerank",
        "/v2/rerank",
        "/get_reward",
        "/metrics",
    ):
        assert path in described
        assert path in listing
    assert "<script" not in listing
    assert not re.search(r"(src|href)=\"(https?:)?//", listing)


def test_unknown_paths_do_not_fill_the_metrics(client: Client) -> None:
    for n in range(5):
        client.send(f"/made-up-{n}")
    lines = client.send("/metrics")[2].decode()
    assert "made-up" not in lines
    assert 'route="other",status="404"' in lines


def test_a_name_that_no_model_id_could_hold_is_refused(ensemble: RewardEnsemble) -> None:
    with pytest.raises(UsageError, match="letters, digits"):
        create_app(ensemble, name="a:b")


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "line\n"])
def test_a_key_that_no_header_could_hold_is_refused(ensemble: RewardEnsemble, key: str) -> None:
    with pytest.raises(UsageError, match="the key must be"):
        create_app(ensemble, api_key=key)


def test_a_servers_seed_gives_requests_theirs_in_turn(ensemble: RewardEnsemble) -> None:
    def drawn(seed: int | None) -> list[int]:
        with running(ensemble, seed=seed) as client:
            chat = {"model": "town", "messages": [{"role": "user", "content": "Tea?"}], "candidates": TEXTS}
            asked = [
                client.json("/v1/answer", {"prompt": "Tea?", "mode": "distributional", "candidates": TEXTS})["seed"]
            ]
            asked.append(client.json("/v1/chat/completions", chat)["pluralign"]["seed"])
            assert client.json("/v1/chat/completions", chat | {"seed": 3})["pluralign"]["seed"] == 3
            return [*asked, client.json("/v1/chat/completions", chat)["pluralign"]["seed"]]

    first = drawn(7)
    assert len(set(first)) == 3
    assert drawn(7) == first
    assert not set(drawn(8)) & set(first)
    assert not set(drawn(None)) & set(drawn(None))


# --- the command ----------------------------------------------------------------------------------------------------


@contextmanager
def command(*arguments: str | Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """``pluralign serve`` in a process of its own, and what it printed when it was ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pluralign", "serve", *map(str, arguments), "--port", "0", "--json"],
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
    """An OpenAI-compatible server that answers when it is told to."""

    def __init__(self) -> None:
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        self.asked, self.go = threading.Event(), threading.Event()
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({"data": [{"id": "m"}]})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                upstream.asked.set()
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


def test_a_stop_finishes_what_is_running_and_takes_nothing_new(town: Path) -> None:
    upstream = Upstream()
    with (
        command(town, "--model", "m", "--base-url", upstream.address, "-n", "3") as (process, ready),
        ThreadPoolExecutor(1) as threads,
    ):
        client = Client(ready["address"])
        asked = {"model": "town:consensus", "messages": [{"role": "user", "content": SECRET}]}
        answer = threads.submit(client.json, "/v1/chat/completions", asked)
        assert upstream.asked.wait(20)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not _listens(client))
        assert process.poll() is None
        upstream.go.set()
        assert answer.result()["choices"][0]["message"]["content"] in TEXTS
        assert process.wait(10) == 0
        _, told = process.communicate()
    assert "POST /v1/chat/completions 200" in told
    assert SECRET not in told
    upstream.server.shutdown()
    upstream.server.server_close()


def test_a_seed_and_limits_can_be_set_from_the_command_line(town: Path) -> None:
    upstream = Upstream()
    dials = {
        "body_bytes": ("--max-body", 900), "texts": ("--max-texts", 8), "characters": ("--max-characters", 80),
        "candidates": ("--max-candidates", 3), "requests": ("--max-requests", 9), "queue_texts": ("--max-queue", 10),
        "generation_seconds": ("--max-seconds", 0.2), "generations": ("--concurrency", 2),
    }  # fmt: skip
    flags = [str(part) for flag in dials.values() for part in flag]
    remote = ["--model", "m", "--base-url", upstream.address]
    with command(town, *remote, *flags, "-n", "3", "--seed", "5") as (_, ready):
        client = Client(ready["address"])
        shown = client.json("/v1/ensemble")["limits"]
        assert {name: shown[name] for name in dials} == {name: value for name, (_, value) in dials.items()}
        assert client.refused("/v1/answer", {"prompt": "Tea?"})[:2] == (504, "upstream_timeout")
        drawn = random.Random(5)
        expected = [drawn.randrange(2**31) for _ in range(2)][1]  # the first one went to the request that took too long
        assert client.json("/v1/answer", {"prompt": "Tea?", "candidates": TEXTS[:2]})["seed"] == expected
        assert client.refused("/v1/answer", {"prompt": "x" * 81})[1] == "text_too_long"
    upstream.go.set()
    upstream.server.shutdown()
    upstream.server.server_close()


def test_limits_are_those_of_the_options() -> None:
    assert Limits.of(ServeOptions()) == Limits()
    remote = RemoteOptions(base_url="http://localhost:1/v1", concurrency=3, timeout=7)
    assert Limits.of(ServeOptions(), remote) == Limits(generations=3, generation_seconds=7)
    assert Limits.of(ServeOptions(max_seconds=2), remote).generation_seconds == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_body": 0}, "max_body must be above 0, not 0."),
        ({"max_seconds": float("nan")}, "max_seconds must be above 0, not nan."),
        (
            {"max_texts": 5000},
            "max_queue must be at least max_texts, 5,000, or so large a request could never be taken.",
        ),
        ({"seed": -1}, "seed must not be negative, but it is -1."),
        ({"temperature": 0}, "temperature must be above 0 and at most 10, not 0."),
    ],
)
def test_limits_that_cannot_be_are_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        ServeOptions(**changes)


def test_more_candidates_than_are_allowed_are_one_sentence(town: Path) -> None:
    refused = run("serve", town, "-n", "65")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "pluralign: -n must be from 1 to 64 (--max-candidates), not 65.\n"


@pytest.mark.parametrize("idle", [True, False])
def test_one_ctrl_c_finishes_what_is_running_and_a_second_ends_at_once(town: Path, idle: bool) -> None:
    upstream = Upstream()
    with (
        command(town, "--model", "m", "--base-url", upstream.address, "-n", "3") as (process, ready),
        ThreadPoolExecutor(1) as threads,
    ):
        if idle:  # sent as soon as the server says that it listens
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        else:
            client = Client(ready["address"])
            asked = {"model": "town:consensus", "messages": [{"role": "user", "content": SECRET}]}
            answer = threads.submit(client.send, "/v1/chat/completions", asked)
            assert upstream.asked.wait(20)
            process.send_signal(signal.SIGINT)
            wait_until(lambda: not _listens(client))
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(2) == 128 + signal.SIGINT
            assert isinstance(answer.exception(), ConnectionError)
        _, told = process.communicate()
    assert told == ""
    upstream.go.set()
    upstream.server.shutdown()
    upstream.server.server_close()


def _listens(client: Client) -> bool:
    try:
        socket.create_connection((client.host, client.port), timeout=1).close()
    except OSError:
        return False
    return True


def test_what_the_command_says_to_try_works(client: Client) -> None:
    said = greeting(client.address, "town", 3, generates=False, has_key=False)
    found = re.search(r"curl \S+?(/v1/\S+) .*-d '(.*)'", said, flags=re.DOTALL)
    assert found
    assert client.json(found[1], found[2].encode())["choices"]
    assert "Bearer" in greeting(client.address, "town", 3, generates=True, has_key=True)


def test_a_port_in_use_is_one_sentence(town: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run("serve", town, "--port", str(port))
    assert refused.returncode == 2
    assert (
        refused.stderr
        == f"pluralign: port {port} of 127.0.0.1 cannot be used (address already in use); name another with --port.\n"
    )


def test_a_server_without_its_model_is_refused(town: Path) -> None:
    refused = run("serve", town, "--base-url", "http://127.0.0.1:9/v1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--model" in refused.stderr
