"""Scores, comparisons and rankings over HTTP equal those of the library, in the formats of existing clients."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from conftest import run
from served import HELLO, TEXTS, Client, Writer, pair, running

from pluralign import PreferenceSet, RemoteOptions, RewardEnsemble, UsageError, create_app
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import FitRecord
from pluralign.server.chat import NAMES_SHOWN, REFUSED
from pluralign.server.limits import Limits
from pluralign.server.options import ServeOptions
from pluralign.server.schemas import ChatRequest, Turn
from pluralign.theory.social_choice import borda, pairwise_support
from pluralign.votes.prompts import Message

TURNS = [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "No."}]
TURNS += [{"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module")
def client(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> Iterator[Client]:
    with running(ensemble, held_out=held_out) as client:
        yield client


def test_compare_and_score_match_the_command_line(client: Client, town_folder: Path, write_jsonl: Any) -> None:
    pairs = [pair(), pair(response_b=TEXTS[2]), pair(prompt=TURNS), pair(response_b=TEXTS[0])]
    pairs.append(pair(response_a="asdf jkl qwer"))
    offline = [json.loads(line) for line in run("compare", town_folder, write_jsonl(pairs)).stdout.splitlines()]
    online = client.json("/v1/compare", {"pairs": pairs})["results"]
    assert [set(one) for one in online] == [{"votes", "prob_hat", "prob_policy", "unlike"}] * 5
    for ours, theirs in zip(online, offline, strict=True):
        assert (ours["votes"], ours["unlike"]) == (theirs["votes"], theirs["unlike"])
        assert ours["prob_policy"] == pytest.approx(theirs["prob_policy"])
    assert (
        [bool(one["unlike"]) for one in online] == [one["prob_hat"] is None for one in online] == [False] * 4 + [True]
    )
    assert online[3]["votes"] == [0.5, 0.5, 0.5]
    texts = [{"prompt": "Tea?", "response": text} for text in TEXTS]
    offline = [json.loads(line) for line in run("score", town_folder, write_jsonl(texts)).stdout.splitlines()]
    for ours, theirs in zip(client.json("/v1/score", {"texts": texts})["results"], offline, strict=True):
        assert ours["rewards"] == pytest.approx(theirs["rewards"])


def test_a_chat_is_scored_like_its_prompt_and_last_message(client: Client, ensemble: RewardEnsemble) -> None:
    parts = [*TURNS[:2], {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
    prompt = tuple(Message(**turn) for turn in TURNS)
    messages = [*parts, {"role": "assistant", "content": TEXTS[0]}]
    body = {"texts": [{"messages": messages}, {"prompt": parts, "response": TEXTS[0]}]}
    whole, split = client.json("/v1/score", body)["results"]
    assert whole == split
    assert whole["rewards"] == pytest.approx(ensemble.rewards([(prompt, TEXTS[0])])[0].tolist())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"prompt": "Tea?"}, "must have prompt and response, or messages"),
        ({"prompt": "Tea?", "messages": []}, "must have prompt and response, or messages"),
        ({"messages": [{"role": "user", "content": "Tea?"}]}, "a last message of the assistant"),
        ({"messages": [{"role": "assistant", "content": "Yes."}]}, "a last message of the assistant"),
    ],
)
def test_a_text_without_prompt_or_response_gets_a_sentence(client: Client, text: Any, words: str) -> None:
    status, code, message = client.error("/v1/score", {"texts": [text]})
    assert (status, code) == (422, "invalid")
    assert message.startswith("texts.0: ")
    assert words in message


def test_predicted_shares_include_the_undecided_share(ensemble: RewardEnsemble) -> None:
    undecided = replace(ensemble, undecided=0.4)
    rewards = ensemble.rewards([("Tea?", TEXTS[0]), ("Tea?", TEXTS[1])])
    body = {"prompt": "Tea?", "mode": "distributional", "candidates": TEXTS}
    with running(undecided) as client:
        reply, shown = client.json("/v1/explain", pair()), client.json("/v1/ensemble")
        (compared,) = client.json("/v1/compare", {"pairs": [pair()]})["results"]
        answers = [client.json("/v1/answer", body | {"seed": seed})["answers"][0] for seed in range(20)]
    assert reply["undecided"] == 0.4
    assert compared == {key: reply[key] for key in ("votes", "prob_hat", "prob_policy", "unlike")}
    assert reply["prob_hat"] == pytest.approx(0.2 + 0.6 * (rewards[0] > rewards[1]) @ ensemble.weights)
    soft = 1 / (1 + np.exp(-(rewards[0] - rewards[1]) / ensemble.temperature))
    assert reply["prob_policy"] == pytest.approx(0.2 + 0.6 * soft @ ensemble.weights)
    assert shown["undecided"] == 0.4
    assert shown["weights"] == ensemble.weights.tolist()
    assert shown["undecided_note"].startswith("Undecided share: 40 %. ")
    assert {one["member"] for one in answers} <= set(range(ensemble.k)), "every draw is a member"


def test_rerank_scores_by_weighted_pairwise_support(client: Client, ensemble: RewardEnsemble) -> None:
    rewards = ensemble.rewards([("Tea?", text) for text in [*TEXTS, "Never!"]])
    body = {"query": "Tea?", "texts": [*TEXTS, "Never!"]}
    reply = client.json("/rerank", body | {"return_text": True})
    expected = borda(pairwise_support(rewards, ensemble.weights))
    assert {one["index"]: one["score"] for one in reply} == pytest.approx(dict(enumerate(expected)))
    assert [one["score"] for one in reply] == sorted((one["score"] for one in reply), reverse=True)
    assert all(one["text"] == body["texts"][one["index"]] for one in reply)
    raw = {one["index"]: one["score"] for one in client.json("/rerank?member=1", body | {"raw_scores": True})}
    assert raw == pytest.approx(dict(enumerate(rewards[:, 1])))
    assert client.json("/rerank", {"query": "Tea?", "texts": ["Yes"]}) == [{"index": 0, "score": 0.5}]


def test_texts_unlike_those_people_voted_on_are_last_in_a_ranking_and_get_no_support(client: Client) -> None:
    texts = ["asdf jkl qwer", *TEXTS, "\U0001f600", "blue blue blue the the"]
    status, headers, content = client.send("/rerank", {"query": "Tea?", "texts": texts})
    assert (status, headers["pluralign-unlike"]) == (200, "0, 4, 5")
    ranked = [(one["index"], one["score"]) for one in json.loads(content)]
    assert {index for index, _ in ranked[3:]} == {0, 4, 5}
    assert [score for _, score in ranked[3:]] == [0, 0, 0]
    alone = client.json("/v2/rerank", {"query": "Tea?", "documents": TEXTS})["results"]
    assert ranked[:3] == [(one["index"] + 1, one["relevance_score"]) for one in alone], "they are no rivals"
    _, headers, _ = client.send("/v2/rerank", {"query": "Tea?", "documents": texts, "model": "town:member-0"})
    assert "pluralign-unlike" not in headers, "a member's ranking states no share of people"


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_cohere_rerank_accepts_a_member_as_model_id(client: Client, ensemble: RewardEnsemble, path: str) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    body = {"model": "town:member-2", "query": "Tea?", "documents": documents, "top_n": 2, "return_documents": True}
    reply = client.json(path, body)["results"]
    order = np.argsort(-ensemble.rewards([("Tea?", text) for text in TEXTS])[:, 2])
    assert [one["index"] for one in reply] == order[:2].tolist()
    assert [one["relevance_score"] for one in reply] == [1.0, 0.5]
    assert [one["document"]["text"] for one in reply] == [TEXTS[i] for i in order[:2]]


def test_get_reward_has_openrlhfs_format(client: Client, ensemble: RewardEnsemble) -> None:
    queries = [f"user: Tea?\n{TEXTS[0]}<|im_end|>\n", f"user: Tea?\n{TEXTS[1]}</s><pad>"]
    body = {"query": queries, "prompts": ["user: Tea?\n"] * 2, "labels": [None, "x"]}
    rewards = ensemble.rewards([("user: Tea?\n", text) for text in TEXTS[:2]])
    reply = client.json("/get_reward?member=1", body)
    assert set(reply) == {"rewards", "scores", "extra_logs"}
    assert reply["rewards"] == reply["scores"] == pytest.approx(rewards[:, 1].tolist())
    assert reply["extra_logs"]["member_2"] == pytest.approx(rewards[:, 2].tolist())
    whole = client.json("/get_reward?member=0", {"query": [TEXTS[0]]})["rewards"]
    assert whole == pytest.approx(ensemble.rewards([("", TEXTS[0])])[:, 0])
    assert client.error("/get_reward?member=0", body | {"prompts": ["one"]})[0] == 422
    raw = {"query": "Tea?", "texts": TEXTS, "raw_scores": True}
    for path, sent in (("/get_reward", body), ("/rerank", raw)):
        assert client.error(path, sent)[:2] == (422, "member_required"), "rewards of members are not averaged"


def test_explain_has_every_members_vote(client: Client) -> None:
    reply = client.json("/v1/explain", pair())
    assert [member["vote"] for member in reply["members"]] == reply["votes"]
    assert all(member["why"] for member in reply["members"])
    difference = np.subtract(reply["rewards"]["a"], reply["rewards"]["b"])
    assert ((difference > 0) == (np.array(reply["votes"]) > 0.5)).all()


# --- fields -----------------------------------------------------------------------------------------------------------


CHAT: dict[str, Any] = {"model": "town:consensus", "messages": HELLO, "candidates": TEXTS, "seed": 1}
CHAT_PATH = "/v1/chat/completions"


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
        ("messages", [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, *HELLO]),
        ("modalities", ["text", "audio"]),
    ],
)
def test_a_field_that_changes_the_meaning_gets_a_400_that_names_it(client: Client, field: str, value: Any) -> None:
    status, code, message = client.error(CHAT_PATH, CHAT | {field: value})
    assert (status, code) == (400, "unsupported_field")
    assert message.startswith(f"{field if field != 'messages' else 'messages.tool_calls'} is not supported: ")


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


ROUTES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/compare", {"pairs": [pair(id=3)], "model": "town"}, "model, pairs.id"),
    ("/v1/score", {"texts": [{"prompt": "Tea?", "response": "Yes.", "id": 3}]}, "texts.id"),
    ("/v1/explain", pair(id=3), "id"),
    ("/v1/answer", {"prompt": "Tea?", "candidates": TEXTS, "best_of": 2}, "best_of"),
    ("/v1/steer", {"choices": [pair(chosen="a", id=3)]}, "choices.id"),
    ("/rerank", {"query": "Tea?", "texts": TEXTS, "truncate": True}, "truncate"),
    ("/v2/rerank", {"query": "Tea?", "documents": TEXTS, "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
    ("/get_reward?member=0", {"query": TEXTS, "labels": ["x"]}, "labels"),
]


@pytest.mark.parametrize(("path", "body", "ignored"), ROUTES)
def test_every_route_names_ignored_fields(client: Client, path: str, body: dict[str, Any], ignored: str) -> None:
    status, headers, content = client.send(path, body)
    assert status == 200, content
    assert headers["pluralign-ignored"] == ignored


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


NAMES = ["", " ", " a", "b" * 59 + " c", *map(chr, [*range(0x110), 0x2028, 0x202E, 0xFFFE, 0x10FFFF])]


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), *(route[:2] for route in ROUTES)])
def test_no_field_name_breaks_a_response(client: Client, path: str, body: dict[str, Any]) -> None:
    for start in range(0, len(NAMES), NAMES_SHOWN - 2):
        names = NAMES[start : start + NAMES_SHOWN - 2]
        for ordered in (names, names[::-1]):  # each at the end of the header, too
            status, headers, _ = client.send(path, body | dict.fromkeys(ordered, 1))
            assert status == 200
            ignored = headers["pluralign-ignored"]
            assert ignored.isascii()
            assert ignored.isprintable()
            assert len(ignored.split(", ")) >= len(names) - 2  # "n" is a field of chats
    status, headers, _ = client.send(path, body | {"": 1})
    assert (status, '""' in headers["pluralign-ignored"].split(", ")) == (200, True)
    assert client.error(path, body | {"\ud800": 1})[0] == 422


def test_stop_that_leaves_nothing_gets_a_400(client: Client) -> None:
    status, code, message = client.error(CHAT_PATH, CHAT | {"candidates": ["Yes.", "You."], "stop": "Y"})
    assert (status, code) == (400, "unusable")
    assert "stop" in message
    assert client.error(CHAT_PATH, CHAT | {"stop": ""})[:2] == (422, "invalid")


def test_the_guide_lists_every_refused_field() -> None:
    guide = (Path(__file__).parent.parent / "docs/how-to/serve.md").read_text()
    for part, names in REFUSED.items():
        prefix = {ChatRequest: "", Turn: "messages."}.get(part, "")
        for name in names:
            assert re.search(rf"`{re.escape(prefix + name)}`", guide), name


# --- limits -----------------------------------------------------------------------------------------------------------


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
SMALL = Limits(body_bytes=2000, texts=4, characters=100, candidates=3, choices=2, max_tokens=10)


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
        ("/v1/compare", [], 422, "invalid"),
        ("/v1/compare", b"{", 400, "not_json"),
        ("/v1/compare", b"[" * 1900, 400, "not_json"),
        ("/v1/compare", b"", 422, "invalid"),
        ("/v1/compare", b"x" * 2001, 413, "body_too_large"),
        ("/v1/answer", b'{"prompt": "Tea?", "temperature": NaN}', 422, "invalid"),
        ("/v1/answer", {"prompt": "Tea?", "seed": -1}, 422, "invalid"),
        ("/v1/answer", {"prompt": "Tea?", "candidates": ["a", "b", "c", "d"]}, 422, "too_many"),
        ("/v1/answer", {"prompt": "Tea?", "candidates": []}, 422, "invalid"),
        ("/v1/answer", {"prompt": "Tea?", "n": 4}, 422, "too_many"),
        ("/v1/answer", {"prompt": "Tea?", "n": 2, "max_tokens": 11}, 422, "too_many"),
        ("/v1/answer", {"prompt": "Tea?", "n": 2, "mode": "steerable", "member": 3}, 400, "unusable"),
        ("/v1/steer", {"choices": [pair(chosen="a")] * 3}, 422, "too_many"),
        ("/v1/steer", {"choices": [pair(chosen="a", ranking=[0, 1])]}, 422, "invalid"),
        ("/v1/steer", {"choices": [{"prompt": "Tea?", "responses": ["a", "b"], "ranking": [0, 2]}]}, 400, "unusable"),
        ("/v1/steer", {"choices": [{"prompt": "Tea?", "responses": list("abcd"), "ranking": [0, 1]}]}, 422, "too_many"),
        ("/v2/rerank", {"query": "Tea?", "documents": ["a"], "rank_fields": ["title"]}, 400, "unsupported_field"),
        ("/rerank", {"query": "Tea?", "texts": list("abcde")}, 422, "too_many"),
        ("/rerank?member=3", {"query": "Tea?", "texts": ["a"]}, 404, "no_such_member"),
        ("/rerank?member=x", {"query": "Tea?", "texts": ["a"]}, 422, "invalid"),
        ("/v2/rerank", {"query": "Tea?", "documents": ["a"], "model": "town:member-9"}, 404, "model_not_found"),
        ("/get_reward?member=0", {"query": ["a"], "prompts": ["x" * 101]}, 422, "text_too_long"),
        ("/v1/chat/completions", {"model": "twon", "messages": HELLO}, 404, "model_not_found"),
        ("/v1/chat/completions", {"model": "town", "messages": []}, 422, "invalid"),
        ("/v1/chat/completions", {"model": "town:balanced", "messages": HELLO, "n": 2}, 400, "invalid"),
        ("/v1/chat/completions", {"model": "town", "messages": HELLO, "n": 4}, 422, "too_many"),
        ("/v1/chat/completions", {"model": "town", "messages": [{"role": "tool", "content": "x"}]}, 422, "invalid"),
        ("/v1/chat/completions", {"model": "town", "messages": IMAGE}, 400, "unsupported_content"),
        ("/v1/nothing", {}, 404, "not_found"),
        ("/v1/models", {}, 405, "method_not_allowed"),
    ],
)
def test_invalid_requests_get_an_error_sentence(small: Client, path: str, body: Any, status: int, code: str) -> None:
    error = small.error(path, body)
    assert error[:2] == (status, code), error
    assert error[2].endswith(".")
    assert small.json("/healthz") == {"status": "ok"}


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


# --- openapi ----------------------------------------------------------------------------------------------------------


SLATE = {"model": "town:balanced", "messages": HELLO, "candidates": TEXTS}
ANSWER = {"prompt": "Tea?", "candidates": TEXTS}
REQUESTS: list[tuple[str, str, Any]] = [
    ("/v1/models", "/v1/models", None),
    ("/v1/models/{model}", "/v1/models/town", None),
    ("/v1/chat/completions", "/v1/chat/completions", SLATE),
    ("/v1/answer", "/v1/answer", ANSWER),
    ("/v1/answer", "/v1/answer", ANSWER | {"mode": "distributional"}),
    ("/v1/answer", "/v1/answer", ANSWER | {"mode": "steerable", "choices": [pair(chosen="a")]}),
    ("/v1/steer", "/v1/steer", {"choices": [{"prompt": "Tea?", "responses": TEXTS, "ranking": [2, [0, 1]]}]}),
    ("/v1/compare", "/v1/compare", {"pairs": [pair()]}),
    ("/v1/score", "/v1/score", {"texts": [{"prompt": "Tea?", "response": "Yes."}]}),
    ("/v1/explain", "/v1/explain", pair()),
    ("/rerank", "/rerank?member=1", {"query": "Tea?", "texts": TEXTS, "return_text": True}),
    ("/v1/rerank", "/v1/rerank", {"query": "Tea?", "documents": TEXTS}),
    ("/v2/rerank", "/v2/rerank", {"query": "Tea?", "documents": TEXTS, "return_documents": True}),
    ("/get_reward", "/get_reward?member=0", {"query": TEXTS}),
    ("/v1/ensemble", "/v1/ensemble", None),
    ("/health", "/health", None),
    ("/healthz", "/healthz", None),
    ("/metrics", "/metrics", None),
]


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
        assert client.json("/v1/ensemble")["tables"]
        check(client, "/v1/ensemble", "/v1/ensemble", None)
    with running(replace(ensemble, record=FitRecord())) as client:
        check(client, "/v1/ensemble", "/v1/ensemble", None)


# --- app --------------------------------------------------------------------------------------------------------------


def test_every_route_is_described_and_the_description_loads_nothing(client: Client) -> None:
    described, listing = client.json("/openapi.json"), client.send("/docs")[2].decode()
    assert "<script" not in listing
    assert not re.search(r"(src|href)=\"(https?:)?//", listing)
    schemas = described["components"]["schemas"]
    for path, methods in described["paths"].items():
        assert path in listing
        for route in methods.values():
            (media_type, content), *_ = route["responses"]["200"]["content"].items()
            if path == "/metrics":
                assert media_type == "text/plain"
                continue
            schema = content["schema"].get("items", content["schema"])
            assert schemas[schema["$ref"].rpartition("/")[2]]["description"], path
            error = route["responses"]["422"]["content"]["application/json"]["schema"]["$ref"]
            assert error == "#/components/schemas/ErrorBody"


def test_unknown_paths_share_one_metric_label(client: Client) -> None:
    for n in range(5):
        client.send(f"/made-up-{n}")
    lines = client.send("/metrics")[2].decode()
    assert "made-up" not in lines
    assert 'route="other",status="404"' in lines


def test_a_name_unfit_for_model_ids_raises(ensemble: RewardEnsemble) -> None:
    with pytest.raises(UsageError, match="letters, digits"):
        create_app(ensemble, name="a:b")


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "line\n"])
def test_an_api_key_unfit_for_headers_raises(ensemble: RewardEnsemble, key: str) -> None:
    with pytest.raises(UsageError, match="the API key must have"):
        create_app(ensemble, api_key=key)
