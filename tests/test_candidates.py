"""Candidates files: reading, merging, and errors with file and row."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import WriteLines

from pluralign import DataError, town_hall
from pluralign.votes.candidates import Candidates, candidates_of, load_candidates, rows_by_prompt
from pluralign.votes.preferences import texts_of
from pluralign.votes.prompts import Message


def test_gzip_and_chats_are_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "No."}]
    path = tmp_path / "candidates.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"prompt": chat, "responses": ["Rum."]}).encode()))
    (candidates,) = load_candidates(path)
    assert candidates.prompt == (Message("user", "Tea?"), Message("assistant", "No."))
    assert candidates.prompt_text == "user: Tea?\nassistant: No."


def test_lines_with_the_same_prompt_are_merged_and_repeats_are_counted() -> None:
    lines = [
        {"prompt": "Tea?", "responses": ["Yes.", "No.", "Yes."]},
        {"prompt": "Rum?", "responses": ["Yes."]},
        {"prompt": "Tea?", "responses": ["No.", "Later."]},
    ]
    stream = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    tea, rum = load_candidates(stream)
    assert tea == Candidates("Tea?", ("Yes.", "No.", "Later."), repeats=2)
    assert rum == Candidates("Rum?", ("Yes.",))
    with pytest.raises(DataError, match="no rows"):
        load_candidates(io.BytesIO())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"responses": ["Yes."]}, "prompt"),
        ({"prompt": "Tea?", "responses": "Yes."}, "responses must be a list"),
        ({"prompt": "Tea?", "responses": ["Yes.", 3]}, "response 2 must be text"),
        ({"prompt": " ", "responses": ["Yes."]}, "the prompt is empty"),
        ("not json", "the line is not JSON"),
    ],
)
def test_a_bad_line_is_reported_with_file_and_row(write_jsonl: WriteLines, line: Any, message: str) -> None:
    path = write_jsonl([{"prompt": "Tea?", "responses": ["Yes."]}, line])
    with pytest.raises(DataError, match=rf"votes.jsonl, row 2: .*{message}"):
        load_candidates(path)


def test_candidates_of_votes_are_in_the_order_of_items() -> None:
    votes = town_hall(60, n_responses_per_prompt=5, pairs_per_prompt=2).preferences
    lists = candidates_of(votes)
    assert [(one.prompt, response) for one in lists for response in one.responses] == texts_of(votes)
    assert [len(rows) for rows in rows_by_prompt(votes)] == [len(one.responses) for one in lists]
    assert {len(one.responses) for one in lists} == {3, 4}
    assert candidates_of(votes, least=4) == [one for one in lists if len(one.responses) >= 4]
    assert candidates_of(votes[:0]) == []
