"""Scores, comparisons and rankings over HTTP equal those of the library, in the formats of existing clients."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run
from served import TEXTS, Client, pair, running

from pluralign import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.theory.social_choice import borda, pairwise_support
from pluralign.votes.prompts import Message


@pytest.fixture(scope="module")
def client(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> Iterator[Client]:
    with running(ensemble, held_out=held_out) as client:
        yield client


def test_compare_and_score_match_the_command_line(client: Client, town_folder: Path, write_jsonl: Any) -> None:
    chat = [
        {"role": "user", "content": "Tea?"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?"},
    ]
    pairs = [pair(), pair(response_b=TEXTS[2]), pair(prompt=chat), pair(response_b=TEXTS[0])]
    offline = [json.loads(line) for line in run("compare", town_folder, write_jsonl(pairs)).stdout.splitlines()]
    online = client.json("/v1/compare", {"pairs": pairs})["results"]
    assert [set(one) for one in online] == [{"votes", "prob_hat", "prob_policy"}] * 4
    for ours, theirs in zip(online, offline, strict=True):
        assert ours["votes"] == theirs["votes"]
        assert ours["prob_policy"] == pytest.approx(theirs["prob_policy"])
    assert online[3]["votes"] == [0.5, 0.5, 0.5]
    texts = [{"prompt": "Tea?", "response": text} for text in TEXTS]
    offline = [json.loads(line) for line in run("score", town_folder, write_jsonl(texts)).stdout.splitlines()]
    for ours, theirs in zip(client.json("/v1/score", {"texts": texts})["results"], offline, strict=True):
        assert ours["rewards"] == pytest.approx(theirs["rewards"])


def test_a_chat_is_scored_like_its_prompt_and_last_message(client: Client, ensemble: RewardEnsemble) -> None:
    turns = [
        {"role": "user", "content": "Tea?"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    ]
    last = {"role": "assistant", "content": TEXTS[0]}
    prompt = (Message("user", "Tea?"), Message("assistant", "No."), Message("user", "Why?"))
    body = {"texts": [{"messages": [*turns, last]}, {"prompt": turns, "response": TEXTS[0]}]}
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
    with running(undecided) as client:
        reply = client.json("/v1/explain", pair())
        assert reply["undecided"] == 0.4
        assert client.json("/v1/compare", {"pairs": [pair()]})["results"] == [
            {key: reply[key] for key in ("votes", "prob_hat", "prob_policy")}
        ]
        shown = client.json("/v1/ensemble")
        drawn = {
            client.json("/v1/answer", {"prompt": "Tea?", "mode": "distributional", "candidates": TEXTS, "seed": seed})[
                "answers"
            ][0]["member"]
            for seed in range(20)
        }
    assert reply["prob_hat"] == pytest.approx(0.2 + 0.6 * (rewards[0] > rewards[1]) @ ensemble.weights)
    soft = 1 / (1 + np.exp(-(rewards[0] - rewards[1]) / ensemble.temperature))
    assert reply["prob_policy"] == pytest.approx(0.2 + 0.6 * soft @ ensemble.weights)
    assert shown["undecided"] == 0.4
    assert shown["weights"] == ensemble.weights.tolist()
    assert shown["undecided_note"].startswith("Undecided share: 40 %. ")
    assert drawn <= set(range(ensemble.k)), "every draw is a member"


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
    reply = client.json("/get_reward", body)
    assert set(reply) == {"rewards", "scores", "extra_logs"}
    assert reply["rewards"] == pytest.approx((rewards @ ensemble.weights).tolist())
    assert reply["extra_logs"]["member_2"] == pytest.approx(rewards[:, 2].tolist())
    assert client.json("/get_reward?member=1", body)["rewards"] == pytest.approx(rewards[:, 1].tolist())
    whole = client.json("/get_reward", {"query": [TEXTS[0]]})["rewards"]
    assert whole == pytest.approx(ensemble.rewards([("", TEXTS[0])]) @ ensemble.weights)
    assert client.error("/get_reward", body | {"prompts": ["one"]})[0] == 422


def test_explain_has_every_members_vote(client: Client) -> None:
    reply = client.json("/v1/explain", pair())
    assert [member["vote"] for member in reply["members"]] == reply["votes"]
    assert all(member["why"] for member in reply["members"])
    difference = np.subtract(reply["rewards"]["a"], reply["rewards"]["b"])
    assert ((difference > 0) == (np.array(reply["votes"]) > 0.5)).all()
