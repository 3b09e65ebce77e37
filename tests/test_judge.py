"""A language model as judge: both orders are asked, calls are counted, and failures are tolerated only in part."""

import json
import math
from typing import Any

import pytest
from judging import Parrot
from test_remote import Reply, Request, Serve, fails, prompt_of, says, serve  # noqa: F401

from pluralign.core.errors import DataError
from pluralign.text.judge import MAX_CHARACTERS, Question, judge_pairs
from pluralign.text.remote import read_choice

TREES = Question("likes trees", "Park?", "More trees, please.", "A car park.")
CARS = Question("likes parking", "Park?", "More trees, please.", "Parking for cars.")


def with_log_probs(**logprobs: float) -> Reply:
    top = [{"token": token, "logprob": value} for token, value in logprobs.items()]
    choice = {"message": {"content": "A"}, "logprobs": {"content": [{"top_logprobs": top}]}}
    return Reply({"choices": [choice], "usage": {"prompt_tokens": 90, "completion_tokens": 1}})


def test_each_pair_is_asked_in_both_orders_and_calls_are_counted() -> None:
    parrot = Parrot()
    judged = judge_pairs(parrot, [TREES, CARS])
    assert judged.prob_a.tolist() == [1.0, 0.0]
    assert len(parrot.asked) == judged.usage.calls == 4
    assert parrot.asked[1].index("A car park.") < parrot.asked[1].index("More trees")
    assert (judged.usage.tokens_in, judged.usage.tokens_out, judged.usage.unanswered) == (28, 4, 0)


def test_a_judge_that_always_says_a_prefers_nothing() -> None:
    assert judge_pairs(Parrot(judges=lambda _: 1.0), [TREES, CARS]).prob_a.tolist() == [0.5, 0.5]


def test_unanswered_questions_count_half_and_are_counted() -> None:
    judged = judge_pairs(Parrot(judges=lambda _: math.nan), [TREES])
    assert judged.prob_a.tolist() == [0.5]
    assert judged.usage.unanswered == 2


def test_one_order_is_enough_and_many_failures_end_the_run() -> None:
    assert judge_pairs(Parrot(fails=1), [TREES] * 10).prob_a.tolist() == [1.0] * 10
    with pytest.raises(DataError, match="asleep"):
        judge_pairs(Parrot(fails=9), [TREES] * 10)
    with pytest.raises(DataError, match="asleep"):
        judge_pairs(Parrot(fails=9), [TREES] * 10, concurrency=3)


def test_threads_keep_the_order_of_the_questions() -> None:
    assert judge_pairs(Parrot(), [TREES, CARS] * 20, concurrency=4).prob_a.tolist() == [1.0, 0.0] * 20


def test_long_texts_are_shortened() -> None:
    text = Question("", "x" * 9_000, "y" * 9_000, "z" * 9_000).text()
    assert len(text) < 3 * MAX_CHARACTERS + 500
    assert "description" not in text


def test_a_server_gives_log_probabilities_of_the_letters(serve: Serve) -> None:  # noqa: F811
    upstream = serve(lambda _: with_log_probs(A=math.log(0.6), B=math.log(0.2), The=math.log(0.1)))
    choice = upstream.model().choose("A or B?", ("A", "B"))
    assert choice.prob == pytest.approx(0.75)
    assert (choice.tokens_in, choice.tokens_out) == (90, 1)
    assert upstream.requests[0]["logprobs"] is True
    assert upstream.requests[0]["temperature"] == 0


def test_a_server_without_log_probabilities_is_read_by_its_text(serve: Serve) -> None:  # noqa: F811
    def script(request: Request) -> Reply:
        if "logprobs" in request:
            return fails(400, "logprobs are not supported")
        return says("Response B, because" if "tea" in prompt_of(request) else "Neither.")

    model = serve(script).model()
    assert model.choose("tea?", ("A", "B")).prob == 0.0
    assert math.isnan(model.choose("rum?", ("A", "B")).prob)


def test_a_damaged_reply_is_an_error_and_odd_log_probabilities_are_ignored() -> None:
    with pytest.raises(DataError, match="not JSON"):
        read_choice(b"<html>", ("A", "B"))
    odd: Any
    for odd in (None, {"content": []}, {"content": [{"top_logprobs": [{"token": None}]}]}, "?"):
        body = json.dumps({"choices": [{"message": {"content": "A"}, "logprobs": odd}]}).encode()
        assert read_choice(body, ("A", "B")).prob == 1.0
