"""Fields that the server does not support are refused or named in the response, never dropped silently."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from served import HELLO, TEXTS, Client, Writer, pair, running

from pluralign import RewardEnsemble
from pluralign.server.chat import NAMES_SHOWN, REFUSED
from pluralign.server.schemas import ChatRequest, Turn

CHAT: dict[str, Any] = {"model": "town:consensus", "messages": HELLO, "candidates": TEXTS, "seed": 1}
CHAT_PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client(ensemble: RewardEnsemble) -> Iterator[Client]:
    with running(ensemble) as client:
        yield client


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("guided_choice", ["a", "b"]),
        ("logprobs", True),
        ("top_logprobs", 2),
        ("prompt_logprobs", 0),
        ("modalities", ["text", "audio"]),
    ],
)
def test_a_field_that_changes_the_meaning_gets_a_400_that_names_it(client: Client, field: str, value: Any) -> None:
    status, code, message = client.error(CHAT_PATH, CHAT | {field: value})
    assert (status, code) == (400, "unsupported_field")
    assert message.startswith(f"{field} is not supported: ")


def test_values_that_turn_a_feature_off_are_accepted_without_a_note(client: Client) -> None:
    off = {
        "tools": [], "tool_choice": "auto", "function_call": "none", "response_format": {"type": "text"},
        "logprobs": False, "top_logprobs": None, "modalities": ["text"], "presence_penalty": 0, "logit_bias": {},
        "user": None,
    }  # fmt: skip
    _, headers, _ = client.send(CHAT_PATH, CHAT | off)
    assert "pluralign-ignored" not in headers
    assert client.json(CHAT_PATH, CHAT | off)["pluralign"]["ignored"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_harmless_fields_are_named_in_the_response(client: Client, stream: bool) -> None:
    extra = {"presence_penalty": 0.5, "logit_bias": {"7": 1}, "user": "ann", "top_k": 5, "stream": stream}
    messages = [HELLO[0] | {"name": "Ann"}]
    _, headers, body = client.send(CHAT_PATH, CHAT | extra | {"messages": messages})
    expected = ["presence_penalty", "logit_bias", "user", "top_k", "messages.name"]
    assert headers["pluralign-ignored"] == ", ".join(expected)
    assert b'"ignored": ["presence_penalty", "logit_bias", "user", "top_k", "messages.name"]' in body


def test_the_openai_client_sees_refused_and_ignored_fields(client: Client) -> None:
    create: Any = client.openai.chat.completions.create
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError, match="tools is not supported") as refused:
        create(model="town", messages=HELLO, tools=tools)
    assert (refused.value.code, refused.value.param) == ("unsupported_field", "tools")
    with pytest.raises(openai.BadRequestError, match="logprobs is not supported"):
        create(model="town", messages=HELLO, logprobs=True)
    answer = create(model="town", messages=HELLO, frequency_penalty=0.5, extra_body={"candidates": TEXTS})
    assert answer.pluralign["ignored"] == ["frequency_penalty"]


def test_a_message_with_tool_calls_is_refused(client: Client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, *HELLO]
    status, code, message = client.error(CHAT_PATH, CHAT | {"messages": messages})
    assert (status, code) == (400, "unsupported_field")
    assert message.startswith("messages.tool_calls is not supported")


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/v1/compare", {"pairs": [pair(id=3)], "model": "town"}, "model, pairs.id"),
        ("/v1/score", {"texts": [{"prompt": "Tea?", "response": "Yes.", "id": 3}]}, "texts.id"),
        ("/v1/explain", pair(id=3), "id"),
        ("/v1/answer", {"prompt": "Tea?", "candidates": TEXTS, "best_of": 2}, "best_of"),
        ("/v1/steer", {"choices": [pair(chosen="a", id=3)]}, "choices.id"),
        ("/rerank", {"query": "Tea?", "texts": TEXTS, "truncate": True}, "truncate"),
        ("/v2/rerank", {"query": "Tea?", "documents": TEXTS, "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        ("/get_reward", {"query": TEXTS, "labels": ["x"]}, "labels"),
    ],
)
def test_every_route_names_ignored_fields(client: Client, path: str, body: dict[str, Any], ignored: str) -> None:
    status, headers, content = client.send(path, body)
    assert status == 200, content
    assert headers["pluralign-ignored"] == ignored


def test_coheres_rank_fields_are_refused(client: Client) -> None:
    body = {"query": "Tea?", "documents": TEXTS, "rank_fields": ["title"]}
    assert client.error("/v2/rerank", body)[:2] == (400, "unsupported_field")


def test_hostile_field_names_are_escaped_and_limited(client: Client) -> None:
    extra = {"line\r\nSet-Cookie: a": 1, "größe": 1, "x" * 5000: 1} | {f"field_{n}": 1 for n in range(50)}
    status, headers, _ = client.send(CHAT_PATH, CHAT | extra)
    assert status == 200
    assert "set-cookie" not in headers
    names = headers["pluralign-ignored"].split(", ")
    assert names[:2] == [r"line\r\nSet-Cookie:\x20a", r"gr\xf6\xdfe"]
    assert len(names) == NAMES_SHOWN + 1
    assert max(map(len, names)) <= 60


@pytest.mark.parametrize("stop", [". ", ["nothing", ". "]])
def test_stop_cuts_candidates_before_members_choose(ensemble: RewardEnsemble, stop: Any) -> None:
    writer = Writer(responses=("Yes. Always.", "No. Never.", "Perhaps."))
    with running(ensemble, writer) as client:
        create: Any = client.openai.chat.completions.create
        reply = create(model="town:balanced", messages=HELLO, stop=stop)
        entries = reply.pluralign["answers"]
        assert {entry["text"] for entry in entries} <= {"Yes", "No", "Perhaps."}
        assert reply.choices[0].finish_reason == "stop"
        assert ". " not in reply.choices[0].message.content.partition("\n\n")[2].split("\n\n")[0]


@pytest.mark.parametrize("name", [" ", " a", "a ", "b" * 59 + " c"])
def test_spaces_in_field_names_do_not_break_the_response(client: Client, name: str) -> None:
    status, headers, _ = client.send("/v1/compare", {"pairs": [pair()], name: 1})
    assert (status, headers["pluralign-ignored"]) == (200, name.replace(" ", "\\x20")[:60])


def test_stop_that_leaves_nothing_gets_a_400(client: Client) -> None:
    status, code, message = client.error(CHAT_PATH, CHAT | {"candidates": ["Yes.", "You."], "stop": "Y"})
    assert (status, code) == (400, "unusable")
    assert "stop" in message
    assert client.error(CHAT_PATH, CHAT | {"stop": ""})[:2] == (422, "invalid")


def test_too_many_draws_name_the_field(client: Client) -> None:
    create: Any = client.openai.chat.completions.create
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        create(model="town", messages=HELLO, n=65)
    assert refused.value.param == "n"


def test_the_guide_lists_every_refused_field() -> None:
    guide = (Path(__file__).parent.parent / "docs/how-to/serve.md").read_text()
    for part, names in REFUSED.items():
        prefix = {ChatRequest: "", Turn: "messages."}.get(part, "")
        for name in names:
            assert re.search(rf"`{re.escape(prefix + name)}`", guide), name
