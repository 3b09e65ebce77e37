"""Prompts from files, data sets and ensembles."""

import io
import json
from pathlib import Path

import pytest
from conftest import WriteLines, wide

from pluralign import fit
from pluralign.answering.generate import load_prompts
from pluralign.core.errors import DataError
from pluralign.ensemble.held_out import held_out_files, score_held_out
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Message

CHAT = (Message("user", "tea ?"), Message("assistant", "no ."), Message("user", "rum ?"))


def test_prompts_are_read_from_prompts_candidates_and_votes(write_jsonl: WriteLines, tmp_path: Path) -> None:
    messages = [turn._asdict() for turn in CHAT]
    records = [
        {"prompt": "tea ?"},
        {"prompt": "rum ?", "responses": ["no"]},
        wide(prompt=messages),
        {"prompt": "tea ?"},
    ]
    assert load_prompts(write_jsonl(records)) == (["tea ?", "rum ?", CHAT], [])
    (tmp_path / "p.csv").write_text("prompt,other\ntea ?,1\n")
    assert load_prompts(tmp_path / "p.csv") == (["tea ?"], [])
    row = {"conversation_id": "c1", "conversation_type": "values guided", "opening_prompt": "tea ?"}
    (tmp_path / "conversations.jsonl").write_text(json.dumps(row))
    assert load_prompts(f"prism:{tmp_path}") == (["tea ?"], [])
    assert len(load_prompts("demo:300")[0]) == 38


def test_an_ensembles_folder_gives_its_held_out_prompts(tmp_path: Path) -> None:
    votes = PreferenceSet.from_columns(["tea ?", "rum ?"], ["yes"] * 2, ["no"] * 2, [1, 3], [2, 1])
    ensemble = fit(votes, k=1, encoder="none", folder=tmp_path, keep_held_out=False)
    with pytest.raises(DataError, match="the ensemble has no held-out votes"):
        load_prompts(tmp_path)
    ensemble.save(tmp_path, held_out_files(ensemble, score_held_out(ensemble, votes)))
    assert load_prompts(tmp_path) == ([prompt for prompt in votes.prompts if prompt in votes.split()[1].prompts], [])


def test_rows_without_a_prompt_are_failures_and_the_others_are_read() -> None:
    text = b'{"prompt": "tea ?"}\n{"prompt": " "}\n{not json\n{"other": 1}\n{"prompt": "rum ?"}\n'
    prompts, failures = load_prompts(io.BytesIO(text))
    assert prompts == ["tea ?", "rum ?"]
    assert [failure.row for failure in failures] == [2, 3, 4]
    assert "row 2: the prompt is empty" in failures[0].error


def test_a_limit_draws_the_same_prompts_in_any_order() -> None:
    many = [f"prompt {i} ?" for i in range(40)]
    text = "\n".join(json.dumps({"prompt": prompt}) for prompt in many)
    back = "\n".join(json.dumps({"prompt": prompt}) for prompt in reversed(many))
    drawn = [load_prompts(io.BytesIO(part.encode()), limit=7)[0] for part in (text, back)]
    assert len(drawn[0]) == 7
    assert drawn[0] == drawn[1][::-1] == [prompt for prompt in many if prompt in drawn[0]]
    assert load_prompts(io.BytesIO(text.encode()), limit=7, seed=1)[0] != drawn[0]
