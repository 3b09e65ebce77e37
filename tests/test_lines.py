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

from pluralign import DataError, UsageError, compare, score, town_hall
from pluralign.scale import lines as lines_module
from pluralign.votes.prompts import Message

CHAT = [{"role": role, "content": text} for role, text in (("user", "Tea?"), ("assistant", "No."), ("user", "Rum?"))]


def lines(*records: Mapping[str, Any] | str) -> io.BytesIO:
    texts = (record if isinstance(record, str) else json.dumps(record) for record in records)
    return io.BytesIO("".join(f"{text}\n" for text in texts).encode())


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
    hat, policy = (np.array([line[level] for line in results], dtype=float) for level in ("prob_hat", "prob_policy"))
    np.testing.assert_allclose(hat, ensemble.prob_hat(votes), atol=1e-12)
    np.testing.assert_allclose(policy, ensemble.prob_hat(votes, "policy"), atol=1e-9)


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
    (compared,) = compare(ensemble, lines({"prompt": CHAT, "response_a": "Yes.", "response_b": "No."}))
    assert len(compared["votes"]) == 3


def test_results_are_yielded_before_the_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LINES_PER_BATCH", 4)
    read = 0

    class Endless(io.BytesIO):
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
        ({"prompt": "x", "response": 7}, "response must be text"),
        ("{", "the line is not JSON"),
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
