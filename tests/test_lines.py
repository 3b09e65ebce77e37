"""Streaming: order, count, batches, and errors that name the row."""

import gzip
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_ensemble import some_ensemble

from pluralign.core.errors import DataError, UsageError
from pluralign.scale import lines as lines_module
from pluralign.scale.jobs import score
from pluralign.scale.lines import compare
from pluralign.votes.prompts import Message
from pluralign.votes.town_hall.town_hall import town_hall

CHAT = [
    {"role": "user", "content": "Tea?"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Rum?"},
]


def lines(*records: Mapping[str, Any] | str) -> io.BytesIO:
    return io.BytesIO(
        "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records).encode()
    )


def pair(a: str, b: str, prompt: Any = "Tea?") -> dict[str, Any]:
    return {"prompt": prompt, "response_a": a, "response_b": b}


@pytest.mark.parametrize("batch", [1, 2, 3, 256])
def test_each_line_gets_its_rewards_in_order_for_any_batch_size(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LINES_PER_BATCH", batch)
    ensemble = some_ensemble()
    texts = ["Yes.", "I might, perhaps.", "", "Yes.", "No!\n- never"]
    results = list(score(ensemble, lines(*({"prompt": "Tea?", "response": text} for text in texts))))
    expected = ensemble.rewards([("Tea?", text) for text in texts])
    assert [set(line) for line in results] == [{"rewards"}] * 5
    np.testing.assert_allclose([line["rewards"] for line in results], expected, rtol=1e-9)
    assert results[0] == results[3]


@pytest.mark.parametrize("batch", [2, 256])
def test_each_pair_gets_the_votes_and_shares_of_the_ensemble(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LINES_PER_BATCH", batch)
    ensemble, votes = some_ensemble(), town_hall(24).preferences
    results = list(compare(ensemble, lines(*votes.to_records())))
    np.testing.assert_array_equal([line["votes"] for line in results], ensemble.votes(votes))
    np.testing.assert_allclose([line["prob_hat"] for line in results], ensemble.prob_hat(votes), atol=1e-12)
    np.testing.assert_allclose([line["prob_policy"] for line in results], ensemble.prob_hat(votes, "policy"), atol=1e-9)


def test_swapped_responses_get_the_complementary_share() -> None:
    texts = ["Yes.", "I might, perhaps.", "", "No!\n- never", "Rum?"]
    pairs = [(a, b) for a in texts for b in texts]
    there = list(compare(some_ensemble(), lines(*(pair(a, b) for a, b in pairs))))
    back = list(compare(some_ensemble(), lines(*(pair(b, a) for a, b in pairs))))
    for one, other, (a, b) in zip(there, back, pairs, strict=True):
        assert one["prob_hat"] == pytest.approx(1 - other["prob_hat"], abs=1e-12)
        assert one["prob_policy"] == pytest.approx(1 - other["prob_policy"], abs=1e-12)
        assert one["votes"] == [1 - vote for vote in other["votes"]]
        if a == b:
            assert (one["prob_hat"], one["prob_policy"]) == pytest.approx((0.5, 0.5))


def test_an_empty_stream_gives_no_lines_and_blank_lines_are_skipped() -> None:
    for empty in ([], ["", "  "]):
        assert list(score(some_ensemble(), lines(*empty))) == []
        assert list(compare(some_ensemble(), lines(*empty))) == []
    assert len(list(score(some_ensemble(), lines("", {"prompt": "x", "response": "a"}, "")))) == 1


def test_chats_messages_and_gzip_are_supported() -> None:
    ensemble = some_ensemble(encoder="hashing")
    message = [{"role": "assistant", "content": "Yes, rum."}]
    stream = lines({"prompt": CHAT, "response": "Yes, rum."}, {"prompt": CHAT, "response": message, "more": 1})
    results = list(score(ensemble, io.BytesIO(gzip.compress(stream.getvalue()))))
    chat = tuple(Message(turn["role"], turn["content"]) for turn in CHAT)
    np.testing.assert_allclose(results[0]["rewards"], ensemble.rewards([(chat, "Yes, rum.")])[0], rtol=1e-9)
    assert results[0] == results[1]
    (compared,) = compare(ensemble, lines(pair("Yes.", "No.", CHAT)))
    assert len(compared["votes"]) == 3


def test_results_are_yielded_before_the_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LINES_PER_BATCH", 4)
    read = 0

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            nonlocal read
            read += 1
            line = json.dumps({"prompt": "x", "response": f"answer {read}"}).encode() + b"\n"
            buffer[: len(line)] = line
            return len(line)

    results = score(some_ensemble(), io.BufferedReader(Endless()))
    for _ in range(9):
        next(results)
    assert read < 30


def lines_before_failing(results: Iterator[Any]) -> tuple[int, str]:
    received: list[Any] = []
    with pytest.raises(DataError) as caught:
        received.extend(results)
    return len(received), str(caught.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "x"}, "there is no value for response"),
        ({"response": "x"}, "there is no value for prompt"),
        ({"prompt": "", "response": "x"}, "the prompt is empty"),
        ({"prompt": "x", "response": 7}, "response must be text"),
        ({"prompt": [{"role": "user"}], "response": "a"}, "prompt must be text or a list"),
        ("{", "the line is not JSON"),
        ("[1]", "the line holds a list"),
        ('{"prompt": "x", "response": "\\ud800"}', "response is not valid UTF-8"),
    ],
    ids=str,
)
def test_a_bad_line_is_reported_by_row_after_the_good_lines_before_it(
    bad: Mapping[str, Any] | str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "LINES_PER_BATCH", 2)
    good = {"prompt": "x", "response": "a"}
    stream = lines(good, good, good, "", bad, good)
    count, sentence = lines_before_failing(score(some_ensemble(), stream))
    assert count == 2
    assert sentence.startswith("standard input, row 5: ")
    assert message in sentence
    assert "--skip-bad" not in sentence


def test_a_pair_without_a_second_response_is_reported_by_row() -> None:
    _, sentence = lines_before_failing(compare(some_ensemble(), lines({"prompt": "x", "response_a": "a"})))
    assert sentence.startswith("standard input, row 1: there is no value for response_b")


def test_rows_come_from_a_folder_a_file_or_a_list(tmp_path: Path) -> None:
    ensemble, rows = some_ensemble(), [{"prompt": "Tea?", "response": "Yes."}, {"prompt": "Tea?", "response": "No."}]
    ensemble.save(tmp_path / "ensemble")
    (tmp_path / "texts.jsonl").write_bytes(lines(*rows).read())
    results = list(score(ensemble, rows))
    assert list(score(tmp_path / "ensemble", tmp_path / "texts.jsonl")) == results
    _, sentence = lines_before_failing(score(ensemble, [rows[0], {"prompt": "Tea?"}]))
    assert sentence.startswith("rows, row 2: there is no value for response")
    with pytest.raises(UsageError, match="there is no file nowhere"):
        list(compare(ensemble, "nowhere.jsonl"))


def test_plain_text_raises_data_error() -> None:
    with pytest.raises(DataError, match="JSON"):
        list(score(some_ensemble(), lines("Is tea better than rum?")))
