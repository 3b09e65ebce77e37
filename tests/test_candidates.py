"""Candidates files: what is read, what is left out, and what is refused by name and row."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import WriteLines

from pluralign import Message
from pluralign.core.errors import DataError
from pluralign.ensemble.ensemble import texts_of
from pluralign.votes.candidates import Candidates, candidates_of, load_candidates, rows_by_prompt
from pluralign.votes.town_hall.townhall import candidates as town_candidates
from pluralign.votes.town_hall.townhall import town_hall


def test_the_town_halls_candidates_come_back(write_jsonl: WriteLines) -> None:
    lines = town_candidates(3, 5)
    found = load_candidates(write_jsonl(lines, "candidates.jsonl"))
    assert found == [Candidates(line["prompt"], tuple(line["responses"])) for line in lines]


def test_gzip_and_chats_are_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "No."}]
    path = tmp_path / "candidates.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"prompt": chat, "responses": ["Rum."]}).encode()))
    (one,) = load_candidates(path)
    assert one.prompt == (Message("user", "Tea?"), Message("assistant", "No."))
    assert one.prompt_text == "user: Tea?\nassistant: No."


def test_lines_of_one_prompt_come_together_and_repeats_are_counted() -> None:
    lines = [
        {"prompt": "Tea?", "responses": ["Yes.", "No.", "Yes."]},
        {"prompt": "Rum?", "responses": ["Yes."]},
        {"prompt": "Tea?", "responses": ["No.", "Later."]},
    ]
    stream = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    assert load_candidates(stream) == [
        Candidates("Tea?", ("Yes.", "No.", "Later."), repeats=2),
        Candidates("Rum?", ("Yes.",)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"responses": ["Yes."]}, "prompt"),
        ({"prompt": "Tea?"}, "responses must be a list"),
        ({"prompt": "Tea?", "responses": []}, "responses must be a list"),
        ({"prompt": "Tea?", "responses": "Yes."}, "responses must be a list"),
        ({"prompt": "Tea?", "responses": ["Yes.", 3]}, "response 2 must be text"),
        ({"prompt": " ", "responses": ["Yes."]}, "the prompt is empty"),
        ({"prompt": "Tea?", "responses": ["\ud800"]}, "response 1 is not valid UTF-8"),
        ("not json", "the line is not JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_row(write_jsonl: WriteLines, line: Any, message: str) -> None:
    path = write_jsonl([{"prompt": "Tea?", "responses": ["Yes."]}, line])
    with pytest.raises(DataError, match=rf"votes.jsonl, row 2: .*{message}"):
        load_candidates(path)


def test_missing_files_folders_and_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="there is no such file"):
        load_candidates(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="this is a folder"):
        load_candidates(tmp_path)
    with pytest.raises(DataError, match="there are no candidates in it"):
        load_candidates(tmp_path / "empty.jsonl")


def test_the_responses_of_votes_stand_in_the_order_of_their_texts() -> None:
    votes = town_hall(60, n_responses_per_prompt=5, pairs_per_prompt=2).preferences
    found = candidates_of(votes)
    assert [(one.prompt, response) for one in found for response in one.responses] == texts_of(votes)
    assert [len(rows) for rows in rows_by_prompt(votes)] == [len(one.responses) for one in found]
    assert {len(one.responses) for one in found} == {3, 4}
    assert [len(one.responses) for one in candidates_of(votes, least=4)] == [
        len(one.responses) for one in found if len(one.responses) >= 4
    ]
    assert candidates_of(votes[:0]) == []
