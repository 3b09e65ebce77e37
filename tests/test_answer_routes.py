"""Answers over HTTP: chat completions, the three modes, steering, seeds, and where candidates come from."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from served import HELLO, SECRET, TEXTS, Client, Writer, pair, running, wait_until
from test_tune import TOWN, ensemble_of, llama, policies  # noqa: F401 - fixtures

from pluralign import DataError, RewardEnsemble, town_hall
from pluralign.answering.answer import UNCHECKED
from pluralign.answering.policies import load_policies
from pluralign.answering.steering import Likings, MeaningMatch
from pluralign.ensemble.held_out import HeldOutVotes, score_held_out
from pluralign.server.limits import Limits
from pluralign.text.causal import Completion
from pluralign.votes.candidates import candidates_of
from pluralign.votes.prompts import Message, PromptLike


@pytest.fixture(scope="module")
def client(ensemble: RewardEnsemble) -> Iterator[Client]:
    with running(ensemble) as client:
        yield client


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer()


@pytest.fixture(scope="module")
def generating(ensemble: RewardEnsemble, writer: Writer) -> Iterator[Client]:
    """A server with a language model."""
    with running(ensemble, writer) as client:
        yield client


def test_the_openai_client_lists_the_models(client: Client) -> None:
    ids = [model.id for model in client.openai.models.list()]
    assert ids[:4] == ["town", "town:distributional", "town:balanced", "town:consensus"]
    assert ids[4:] == ["town:member-0", "town:member-1", "town:member-2"]


def test_the_openai_client_retrieves_a_model(client: Client) -> None:
    assert client.openai.models.retrieve("town:member-1").id == "town:member-1"
    for unknown in ("town:member-3", "meta/llama"):
        with pytest.raises(openai.NotFoundError) as missing:
            client.openai.models.retrieve(unknown)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


def test_the_openai_client_gets_the_consensus(generating: Client, writer: Writer, ensemble: RewardEnsemble) -> None:
    answer = generating.openai.chat.completions.create(
        model="town:consensus",
        messages=[{"role": "user", "content": "Plant trees?"}],
        temperature=0,
        max_tokens=7,
        seed=5,
        user="this field has no effect",
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
    prompt, n, options = writer.requests[0]
    assert (prompt, n) == ("Plant trees?", 8)
    assert (options.temperature, options.max_new_tokens, options.seed) == (0.01, 7, 5)


def test_a_streamed_answer_equals_the_whole_answer(generating: Client) -> None:
    body: dict[str, Any] = {"model": "town:balanced", "messages": HELLO, "seed": 1}
    create = generating.openai.chat.completions.create
    whole = create(**body)
    chunks = list(create(**body, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text.count(" of people: ") == len(whole.pluralign["answers"]) > 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-2].pluralign == whole.pluralign
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    _, headers, raw = generating.send("/v1/chat/completions", body | {"stream": True})
    assert headers["content-type"].startswith("text/event-stream")
    assert raw.endswith(b"data: [DONE]\n\n")


def test_a_member_answers_with_its_favourite(generating: Client, ensemble: RewardEnsemble) -> None:
    rewards = ensemble.rewards([("Plant trees?", text) for text in TEXTS])
    for j in range(3):
        body = {"model": f"town:member-{j}", "messages": [{"role": "user", "content": "Plant trees?"}]}
        reply = generating.json("/v1/chat/completions", body)
        assert reply["choices"][0]["message"]["content"] == TEXTS[rewards[:, j].argmax()]
        assert reply["pluralign"]["steering"]["member"] == j
        assert reply["pluralign"]["steering"]["posterior"] == [float(i == j) for i in range(3)]


def test_draws_follow_the_weights_and_repeat_with_a_seed(client: Client, ensemble: RewardEnsemble) -> None:
    body: dict[str, Any] = {"model": "town", "messages": [{"role": "user", "content": "Tea?"}], "candidates": TEXTS}
    draws = [client.json("/v1/chat/completions", body | {"n": 64}) for _ in range(2)]
    drawn = [one["member"] for draw in draws for one in draw["pluralign"]["answers"]]
    assert len(drawn) == 128 == sum(len(draw["choices"]) for draw in draws)
    assert np.abs(np.bincount(drawn, minlength=3) / 128 - ensemble.weights).max() < 4.5 * 0.5 / 128**0.5
    assert draws[0]["pluralign"]["seed"] != draws[1]["pluralign"]["seed"]
    again = client.json("/v1/chat/completions", body | {"n": 64, "seed": draws[0]["pluralign"]["seed"]})
    assert again["pluralign"] == draws[0]["pluralign"]


def test_system_and_earlier_turns_form_the_prompt(generating: Client, writer: Writer) -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Te"}, {"type": "text", "text": "a?"}]},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?"},
    ]
    generating.json("/v1/chat/completions", {"model": "town", "messages": messages})
    turns = [("system", "Be kind."), ("user", "Tea?"), ("assistant", "No."), ("user", "Why?")]
    assert writer.requests[-1][0] == tuple(Message(*turn) for turn in turns)


def test_answer_supports_three_modes(client: Client) -> None:
    body = {"prompt": "Tea?", "candidates": TEXTS, "seed": 3}

    def ask(**more: Any) -> Any:
        return client.json("/v1/answer", body | more)

    balanced = ask(mode="balanced", rule="borda")
    entries = balanced["answers"]
    assert (balanced["consensus"]["rule"], balanced["texts"]) == ("borda", TEXTS)
    assert [one["name"] for one in entries] == [balanced["members"][one["member"]] for one in entries]
    assert sum(one["weight"] for one in entries) == pytest.approx(1)
    assert sum(one["share"] for one in entries) == pytest.approx(balanced["coverage"])
    two = ask(slate_size=2, cover="top-two")
    assert (len(two["answers"]), two["coverage"]) == (2, pytest.approx(1)), "two of three contain one of the top two"
    votes = ask(level="vote")
    assert [one["weight"] for one in votes["answers"]] != [one["share"] for one in votes["answers"]]
    assert ask(mode="distributional")["answers"][0]["text"] in TEXTS
    steered = ask(mode="steerable", member=2)
    assert steered["steering"]["name"] == steered["members"][2]
    choices = [pair(chosen="b"), pair(response_b=TEXTS[2], chosen="a")]
    by_choices = ask(mode="steerable", choices=choices)["steering"]
    steering = client.json("/v1/steer", {"choices": choices})
    assert {**by_choices, "support": None, "ask": None, "before": None} == steering
    assert by_choices["support"] > 0.5
    assert {by_choices["ask"]["response_a"], by_choices["ask"]["response_b"]} <= set(TEXTS)
    assert len(steering["path"]) == 3
    assert sum(steering["posterior"]) + steering["average"] == pytest.approx(1)
    for wrong in ({"mode": "distributional", "slate_size": 2}, {"mode": "steerable"}, {"distill": True}):
        assert client.error("/v1/answer", body | wrong)[:2] == (400, "unusable")


def test_slates_and_chats_name_members_by_their_cards(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    with running(ensemble, held_out=held_out) as client:
        names = [card["name"] for card in client.json("/v1/ensemble")["members"]]
        chat = {"messages": [{"role": "user", "content": "Tea?"}], "candidates": TEXTS, "seed": 1}
        slate = client.json("/v1/chat/completions", chat | {"model": "town:balanced"})
        entries = slate["pluralign"]["answers"]
        assert [entry["name"] for entry in entries] == [names[entry["member"]] for entry in entries]
        for number, entry in enumerate(entries, 1):
            heading = f"{number}. Favourite of {entry['share']:.0%} of people: {names[entry['member']]}\n"
            assert heading in slate["choices"][0]["message"]["content"]
        member = client.json("/v1/chat/completions", chat | {"model": "town:member-1"})["pluralign"]
        assert member["steering"]["name"] == member["answers"][0]["name"] == names[1]
        assert client.json("/v1/answer", {"prompt": "Tea?", "candidates": TEXTS})["members"] == names
        assert [one["name"] for one in client.json("/v1/explain", pair())["members"]] == names


def test_the_refusal_policy_runs_first(ensemble: RewardEnsemble) -> None:
    writer = Writer()

    def refusal(prompt: PromptLike) -> str | None:
        return "We do not talk about rum." if "rum" in str(prompt) else None

    with running(ensemble, writer, refusal=refusal) as client:
        for model in ("town", "town:balanced", "town:consensus", "town:member-1"):
            body = {"model": model, "messages": [{"role": "user", "content": "Why rum?"}]}
            reply = client.json("/v1/chat/completions", body)
            assert reply["choices"][0]["message"]["content"] == "We do not talk about rum."
            assert reply["pluralign"]["refused"]
        assert writer.requests == []
        assert not client.json("/v1/chat/completions", body | {"messages": HELLO})["pluralign"]["refused"]


def test_a_base_seed_determines_the_seeds_of_requests(ensemble: RewardEnsemble) -> None:
    body = {"prompt": "Tea?", "mode": "distributional", "candidates": TEXTS}
    chat = {"model": "town", "messages": HELLO, "candidates": TEXTS}

    def drawn(seed: int | None) -> list[int]:
        with running(ensemble, seed=seed) as client:
            seeds = [client.json("/v1/answer", body)["seed"]]
            replies = [client.json("/v1/chat/completions", chat | more) for more in ({}, {"seed": 3}, {})]
            seeds += [reply["pluralign"]["seed"] for reply in replies]
            assert seeds.pop(2) == 3
            return seeds

    first = drawn(7)
    assert len(set(first)) == 3
    assert drawn(7) == first
    assert not set(drawn(8)) & set(first)
    assert not set(drawn(None)) & set(drawn(None))


def test_a_generator_writes_a_statement_on_request(ensemble: RewardEnsemble) -> None:
    writer, body = Writer(responses=[*TEXTS, "Let us plant a few trees."]), {"prompt": "Trees?", "candidates": TEXTS}
    with running(ensemble, writer) as client:
        found = client.json("/v1/answer", body | {"distill": True, "seed": 1})
        assert (found["distilled"]["text"], found["distilled"]["drafts"]) == ("Let us plant a few trees.", 1)
        instruction, n, options = writer.requests[0]
        assert "People were asked: Trees?" in str(instruction)
        assert (n, options.temperature, options.seed) == (4, 0.7, 1)
        writer.error = DataError("the prompt is too long")
        failed = client.json("/v1/answer", body | {"distill": True})
        assert failed["notes"] == [UNCHECKED, "no statement was written: the prompt is too long"]


def test_no_share_is_stated_for_word_salad(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    salad = "Scan couch carnivores view spirituality looming Antonio Good magblethon outside performance."
    chat = {"model": "town:balanced", "messages": [{"role": "user", "content": "Should the town plant trees?"}]}
    with running(ensemble, Writer(responses=[salad, "asdf jkl"]), held_out=held_out) as client:
        assert "%" not in client.json("/v1/chat/completions", chat)["choices"][0]["message"]["content"]
        shown = client.json("/v1/explain", pair(response_a=salad))
        assert (shown["prob_hat"], list(shown["unlike"])) == (None, ["a"])


def test_a_completion_that_was_cut_off_says_so(ensemble: RewardEnsemble) -> None:
    class Cut(Writer):
        def sample(self, *arguments: Any) -> list[Completion]:
            return [
                Completion(one.text, "length" if one.text == TEXTS[0] else "stop") for one in super().sample(*arguments)
            ]

    chat = {"messages": [{"role": "user", "content": "Trees?"}], "seed": 1, "max_tokens": 9}
    with running(ensemble, Cut()) as client:
        reasons = {}
        for model in ("town", "town:member-0", "town:member-1", "town:consensus"):
            (choice,) = client.json("/v1/chat/completions", chat | {"model": model})["choices"]
            reasons[choice["message"]["content"]] = choice["finish_reason"]
            with client.openai.chat.completions.create(model=model, stream=True, **chat) as events:  # type: ignore[call-overload]
                last = [event.choices[0].finish_reason for event in events if event.choices][-1]
            assert last == choice["finish_reason"]
        assert reasons[TEXTS[0]] == "length"
        assert {reason for text, reason in reasons.items() if text != TEXTS[0]} == {"stop"}
        stopped = client.json("/v1/chat/completions", chat | {"model": "town:consensus", "stop": "many more trees"})
        assert stopped["choices"][0]["finish_reason"] == "stop"


def test_words_have_a_meaning(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, monkeypatch: pytest.MonkeyPatch
) -> None:
    likings = SimpleNamespace(match=lambda _, __: MeaningMatch(np.array([0.1, 0.8, 0.1])))
    monkeypatch.setattr(Likings, "of", lambda *_: likings)
    with running(ensemble, held_out=held_out) as client:
        body = {"prompt": "Tea?", "candidates": TEXTS, "mode": "steerable", "like": "protect nature first"}
        found = client.json("/v1/answer", body)["steering"]
        assert (found["member"], "by their meaning" in found["why"]) == (1, True)
        assert found["support"] is not None
        short = client.json("/v1/answer", body | {"like": "short"})["steering"]
        assert short["posterior"] == found["posterior"]


# --- where candidates come from ---------------------------------------------------------------------------------------


def test_held_out_prompts_and_candidates_need_no_generator(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    known = candidates_of(held_out.preferences)[0]
    body = {"model": "town:consensus", "messages": [{"role": "user", "content": known.prompt}]}
    with running(ensemble, held_out=held_out) as client:
        assert client.json("/v1/chat/completions", body)["choices"][0]["message"]["content"] in known.responses
        status, code, message = client.error("/v1/chat/completions", body | {"messages": HELLO})
        assert (status, code, "--model" in message) == (400, "no_generator", True)
        reply = client.json("/v1/chat/completions", body | {"candidates": ["Only this."]})
        assert reply["choices"][0]["message"]["content"] == "Only this."


def test_a_single_message_stays_a_chat_if_all_held_out_prompts_are_chats(ensemble: RewardEnsemble) -> None:
    votes = town_hall(200).preferences[:12]
    chats = np.empty(len(votes.prompts), dtype=object)
    chats[:] = [(Message("user", str(prompt)),) for prompt in votes.prompts]
    votes, writer = replace(votes, prompts=chats), Writer()
    with running(ensemble, writer, held_out=score_held_out(ensemble, votes)) as client:
        client.json("/v1/chat/completions", {"model": "town", "messages": HELLO})
    assert writer.requests[0][0] == (Message("user", "Tea?"),)


def test_a_failing_generator_gives_502_and_a_hanging_one_504(ensemble: RewardEnsemble) -> None:
    writer = Writer(error=DataError("the server answered 500", remedy="see its own log"))
    body = {"model": "town", "messages": HELLO}
    with running(ensemble, writer, limits=Limits(generation_seconds=0.2, generations=1)) as client:
        sentence = "writer generated no candidates: the server answered 500; see its own log."
        assert client.error("/v1/chat/completions", body) == (502, "upstream_failed", sentence)
        writer.error = RuntimeError(f"a bug that quotes {SECRET}")
        sentence = "writer generated no candidates: RuntimeError."
        assert client.error("/v1/chat/completions", body) == (502, "upstream_failed", sentence)
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
    writer, body = Writer(responses=("Yes.", "x" * 101)), {"model": "town", "messages": HELLO}
    with running(ensemble, writer, limits=Limits(characters=100)) as client:
        sentence = "a text of the language model may have at most 100 characters, not 101."
        assert client.error("/v1/chat/completions", body) == (502, "upstream_failed", sentence)
        body["candidates"] = ["x" * 101]
        assert client.error("/v1/chat/completions", body)[:2] == (422, "text_too_long")


# --- the members' own policies ----------------------------------------------------------------------------------------


THREE = ensemble_of("question marks", "full stops", "exclamation marks", weights=(0.5, 0.3, 0.2))


OWN = {0: "Which tea do you like?", 1: "We like tea.", 2: "Tea for us!"}
LONGER = {0: "Which? Why? Who?", 1: "Tea. Rum. Milk.", 2: "Now! Here! Us!"}
"""First and second draft of each member's policy; its member prefers the second."""


def pens() -> dict[int, Writer]:
    return {j: Writer(responses=[OWN[j], LONGER[j]]) for j in OWN}


def texts_of(found: Any) -> dict[int, str]:
    return {entry["member"]: entry["text"] for entry in found["answers"]}


@pytest.fixture
def policy_client() -> Iterator[Client]:
    with running(THREE, Writer(), policies=pens()) as client:
        yield client


def test_the_slate_has_every_members_own_answer(policy_client: Client) -> None:
    found = policy_client.json("/v1/answer", {"prompt": "Tea?", "mode": "balanced", "seed": 0})
    assert (texts_of(found), found["written"]) == (OWN, [0, 1, 2])
    assert sorted(found["texts"]) == sorted(OWN.values())
    assert texts_of(policy_client.json("/v1/answer", {"prompt": "Tea?", "n": 2, "seed": 0})) == LONGER
    assert policy_client.json("/v1/ensemble")["policies"] == [0, 1, 2]


def test_the_model_of_a_member_is_its_policy(policy_client: Client) -> None:
    for member, text in OWN.items():
        reply = policy_client.json("/v1/chat/completions", {"model": f"town:member-{member}", "messages": HELLO})
        assert reply["choices"][0]["message"]["content"] == text
    consensus = policy_client.json("/v1/chat/completions", {"model": "town:consensus", "messages": HELLO})
    assert consensus["pluralign"]["written"] == [0, 1, 2]
    assert consensus["choices"][0]["message"]["content"] == consensus["pluralign"]["consensus"]["text"]


def test_candidates_of_a_request_are_chosen_from_without_policies(policy_client: Client) -> None:
    found = policy_client.json("/v1/answer", {"prompt": "Tea?", "candidates": ["Yes.", "No?"]})
    assert found["written"] == []
    assert {entry["text"] for entry in found["answers"]} <= {"Yes.", "No?"}


def test_a_member_without_a_policy_chooses_among_candidates_of_the_generator() -> None:
    some = pens()
    del some[2]
    some[1].error = DataError("the prompt is too long")
    with running(THREE, Writer(responses=("No!", "Yes. No.", "Perhaps it is so?")), policies=some, n=3) as client:
        found = client.json("/v1/answer", {"prompt": "Tea?", "seed": 0})
        assert texts_of(found) == {0: LONGER[0], 1: "Yes. No.", 2: "No!"}
        assert found["written"] == [0]
        assert found["notes"] == [
            "the policy of member 1 wrote nothing (the prompt is too long)",
            "members 1, 2 have no answer of a policy and choose among 3 shared candidates",
            UNCHECKED,
        ]


def test_drafts_are_limited_and_cut_at_stop_texts() -> None:
    with running(THREE, Writer(), policies=pens(), limits=Limits(candidates=5)) as client:
        message = "a request may have at most 5 drafts, not 6."
        assert client.error("/v1/answer", {"prompt": "Tea?", "n": 2}) == (422, "too_many", message)
        body = {"model": "town:member-1", "messages": HELLO, "stop": " tea"}
        assert client.json("/v1/chat/completions", body)["choices"][0]["message"]["content"] == "We like"


def test_policies_in_this_process_answer_over_http(policies: Path) -> None:  # noqa: F811
    tuned = load_policies(policies, TOWN)
    with running(TOWN, tuned.base, policies=tuned.samplers) as client:
        body = {"prompt": "tea ?", "seed": 3, "max_tokens": 6}
        found = client.json("/v1/answer", body)
        assert found["written"] == [0, 1]
        assert json.dumps(found) == json.dumps(client.json("/v1/answer", body)), "reproducible by seed"
