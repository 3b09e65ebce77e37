"""Votes from every source and layout, against known counts or a plain loop."""

import csv
import gzip
import io
import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import pairs_of as counts, wide
from hypothesis import given, strategies as st

from pluralign import UsageError, load_preferences
from pluralign.core.errors import DataError, MissingExtraError
from pluralign.votes.prompts import Message

ROWS = [
    wide(ties=1, topic="drinks"),
    wide(prompt="Über-cool?\nReally", response_a='He said "no", twice', votes_a=0, ties=0, topic="manners"),
]
EXPECTED = [("Tea?", "Yes.", "No.", 3, 2, 1), ("Über-cool?\nReally", 'He said "no", twice', "No.", 0, 2, 0)]


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


PARQUET = io.BytesIO()
pq.write_table(pa.Table.from_pylist(ROWS), PARQUET)
FILES = {
    "votes.jsonl": as_jsonl(ROWS),
    "bom.jsonl": b"\xef\xbb\xbf" + as_jsonl(ROWS),
    "blank lines.jsonl": as_jsonl(ROWS).replace(b"\n", b"\n\n"),
    "no final newline.jsonl": as_jsonl(ROWS).rstrip(),
    "votes.jsonl.gz": gzip.compress(as_jsonl(ROWS)),
    "votes.csv": as_csv(ROWS),
    "bom.csv": b"\xef\xbb\xbf" + as_csv(ROWS),
    "votes.csv.gz": gzip.compress(as_csv(ROWS)),
    "votes.tsv": as_csv(ROWS, "\t"),
    "votes.parquet": PARQUET.getvalue(),
    "without an ending": as_jsonl(ROWS),
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_format_gives_the_same_votes(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    preferences = load_preferences(tmp_path / name)
    assert counts(preferences) == EXPECTED
    assert preferences.columns["topic"].tolist() == ["drinks", "manners"]
    assert preferences.dropped == {"tie votes": 1}


@pytest.mark.parametrize("name", ["votes.jsonl", "votes.jsonl.gz", "votes.csv", "votes.parquet"])
def test_standard_input_accepts_every_format(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe(io.BytesIO):
        """Bytes that can be read once, as from a pipe."""

        def seekable(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Pipe(FILES[name]))))
    assert counts(load_preferences("-")) == EXPECTED


def test_open_files_work(tmp_path: Path) -> None:
    (tmp_path / "votes.jsonl").write_bytes(FILES["votes.jsonl"])
    with (tmp_path / "votes.jsonl").open("rb") as stream:
        assert counts(load_preferences(stream)) == EXPECTED


def test_a_saved_set_is_read_exactly(tmp_path: Path) -> None:
    original = load_preferences(ROWS, ties="half")
    original.save(tmp_path / "saved.parquet")
    loaded = load_preferences(tmp_path / "saved.parquet")
    assert loaded == original
    assert loaded.tie_rule == "half"
    assert load_preferences(tmp_path / "saved.parquet", ties="fixed").tie_rule == "fixed"


def test_the_official_split_can_be_ignored() -> None:
    rows = [wide(prompt=f"{i}?", split="test" if i < 2 else "train") for i in range(30)]
    assert list(load_preferences(rows).split()[1].prompts) == ["0?", "1?"]
    by_prompt = load_preferences(rows, split="prompts")
    assert len(by_prompt.split()[1].prompts) == 9
    assert "split" not in by_prompt.columns


def test_shares_with_n_become_counts() -> None:
    rows = [wide(votes_a=None, votes_b=None, prob_a=0.667, n=3), wide(votes_a=None, votes_b=None, prob_a=1.0, n=4)]
    assert [row[3:] for row in counts(load_preferences(rows))] == [(2, 1, 0), (4, 0, 0)]


@given(st.lists(st.tuples(st.integers(0, 3), st.permutations(["A", "B", "C"]), st.sampled_from("ab")), min_size=1))
def test_long_rows_match_a_plain_loop(votes: list[tuple[int, list[str], str]]) -> None:
    expected: Counter[tuple[str, str, str]] = Counter()
    for prompt, (first, second, _), vote in votes:
        winner, loser = (first, second) if vote == "a" else (second, first)
        expected[str(prompt), winner, loser] += 1
    rows = [{"prompt": str(p), "response_a": a, "response_b": b, "vote": v} for p, (a, b, _), v in votes]
    loaded = load_preferences(rows, min_votes=1)
    for prompt, a, b, votes_a, votes_b, _ in counts(loaded):
        assert (votes_a, votes_b) == (expected[prompt, a, b], expected[prompt, b, a])
    assert loaded.n_votes.sum() == len(votes)
    assert len({(p, frozenset((a, b))) for p, a, b, *_ in counts(loaded)}) == len(loaded)


def test_repeated_votes_of_an_annotator_can_be_dropped(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"prompt": "x", "response_a": a, "response_b": b, "vote": vote, "annotator": who}
        for a, b, vote, who in [("A", "B", "a", "ann"), ("B", "A", "a", "ann"), ("A", "B", "b", "bob"), (*"ABa", None)]
    ]
    assert counts(load_preferences(rows))[0][3:5] == (2, 2)
    assert "1 votes repeat an annotator" in caplog.text
    once = load_preferences(rows, repeats="first")
    assert counts(once)[0][3:5] == (2, 1)
    assert once.dropped == {"repeat votes of one annotator on one pair": 1}


def pairs_by_loop(responses: list[str], scores: list[list[float | None]]) -> list[tuple[str, str, int, int, int]]:
    """Compute (a, b, votes_a, votes_b, ties) of every pair from one list of scores per response."""
    result = []
    for i, j in itertools.combinations(range(len(responses)), 2):
        tally = [0, 0, 0]
        for score_a, score_b in zip(scores[i], scores[j], strict=True):
            if score_a is not None and score_b is not None:
                tally[0 if score_a > score_b else 1 if score_a < score_b else 2] += 1
        result.append((responses[i], responses[j], *tally))
    return result  # type: ignore[return-value]


SCORES: list[list[float | None]] = [[4, 1, 3, 2.5], [3, 1, None, 7], [0, 2, 3, 2.5]]
ANSWERS = ["one", "two", "three"]


LISTS = {"prompt": "x", "responses": ANSWERS, "scores": SCORES, "topic": "t"}
FLAT: dict[str, Any] = {f"response_{i}_model": "gpt" for i in (1, 2, 3)} | {
    f"response_{i}": text for i, text in enumerate(ANSWERS, 1)
}
FLAT |= {f"response_{i}_rater{rater}": score for i, of in enumerate(SCORES, 1) for rater, score in enumerate(of)}
ONE_EACH = list(zip(ANSWERS, SCORES, strict=True))
BY_COLUMN = [(text, {f"score_{rater}": score for rater, score in enumerate(of)}) for text, of in ONE_EACH]
SCORED = {
    "lists": [LISTS],
    "cells": as_csv([LISTS | {"responses": json.dumps(ANSWERS), "scores": json.dumps(SCORES)}]),
    "columns": [{"prompt": "x", "topic": "t", **FLAT}],
    "rows": [{"prompt": p, "response": text, "scores": of, "topic": "t"} for p in "xy" for text, of in ONE_EACH],
    "columns of rows": [{"prompt": p, "response": text, "topic": "t", **of} for text, of in BY_COLUMN for p in "xy"],
}


@pytest.mark.parametrize("name", SCORED)
def test_scores_compare_every_pair_of_responses(name: str, tmp_path: Path) -> None:
    source: Any = SCORED[name]
    if isinstance(source, bytes):
        (tmp_path / "scores.csv").write_bytes(source)
        source = tmp_path / "scores.csv"
    loaded = load_preferences(source)
    assert [row[1:] for row in counts(loaded)[:3]] == pairs_by_loop(ANSWERS, SCORES)
    assert [row[0] for row in counts(loaded)[::3]] == ["x", "y"][: len(loaded) // 3]
    assert {name: set(values.tolist()) for name, values in loaded.columns.items()} == {"topic": {"t"}}


@pytest.mark.parametrize("names", [[0, 1, 2], ["s0", "s1", "s2"]])
def test_rankings_compare_every_pair_of_responses(names: list[Any]) -> None:
    orders = [[2, 0, 1], [2, 1, 0], [0, 1, 2]]
    row: dict[str, Any] = {
        "prompt": "x",
        "responses": ANSWERS if 0 in names else dict(zip(names, ANSWERS, strict=True)),
    }
    rankings = [[names[i] for i in order] for order in orders]
    places: list[list[float | None]] = [[-order.index(i) for order in orders] for i in range(3)]
    assert [one[1:] for one in counts(load_preferences([row | {"rankings": rankings}]))] == pairs_by_loop(
        ANSWERS, places
    )
    few = load_preferences([row | {"rankings": [rankings[0], rankings[1][:2]]}])
    assert (len(few), few.dropped) == (1, {"pairs with fewer than 2 votes": 2}), "no row is bad"
    one_each = load_preferences([row | {"ranking": ranking} for ranking in rankings])
    assert [one[1:] for one in counts(one_each)] == pairs_by_loop(ANSWERS, places)


def test_raters_in_columns_are_matched_by_name_and_need_a_score_for_both_responses() -> None:
    rows = [
        {"prompt": "x", "response": "A", "score_ann": 5, "score_bob": 1},
        {"prompt": "x", "response": "B", "score_bob": 2, "score_ann": 6, "score_cat": 3},
        {"prompt": "x", "response": "C", "score_cat": 9, "score_bob": 0},
    ]
    loaded = [row[1:] for row in counts(load_preferences(rows, min_votes=1))]
    assert loaded == [("A", "B", 0, 2, 0), ("A", "C", 1, 0, 0), ("B", "C", 1, 1, 0)]


def test_renamed_csv_columns_have_the_type_of_their_new_name(tmp_path: Path) -> None:
    row = {"question": "x", "answer_1": "A", "answer_2": "7", "for_1": "3", "for_2": "2"}
    (tmp_path / "votes.csv").write_bytes(as_csv([row]))
    rename = {"prompt": "question", "response_a": "answer_1", "response_b": "answer_2"}
    rename |= {"votes_a": "for_1", "votes_b": "for_2"}
    assert counts(load_preferences(tmp_path / "votes.csv", rename=rename)) == [("x", "A", "7", 3, 2, 0)]


def test_chosen_and_rejected_rows_are_votes_in_random_orientation() -> None:
    rows = [{"prompt": f"p{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(400)]
    rows += [{"prompt": "p0", "chosen": "bad 0", "rejected": "good 0"}] * 2
    loaded = load_preferences(rows)
    assert len(loaded) == 400
    first = counts(loaded)[0]
    assert dict(zip(first[1:3], first[3:5], strict=True)) == {"good 0": 1, "bad 0": 2}
    assert 0.4 < (loaded.votes_a[1:] == 1).mean() < 0.6, "the position must not reveal the chosen side"


def test_chosen_and_rejected_as_chats_share_their_prompt(tmp_path: Path) -> None:
    ask, yes, no = (
        {"role": r, "content": c} for r, c in [("user", "Tea?"), ("assistant", "Yes."), ("assistant", "No.")]
    )
    implicit = load_preferences([{"chosen": [ask, yes], "rejected": [ask, no]}])
    explicit = load_preferences([{"prompt": [ask], "chosen": [yes], "rejected": [no]}])
    assert implicit == explicit
    (tmp_path / "pandas.csv").write_bytes(as_csv([{"chosen": str([ask, yes]), "rejected": str([ask, no])}]))
    assert load_preferences(tmp_path / "pandas.csv") == explicit
    parts = ask | {"content": [{"type": "text", "text": "Tea?"}]}
    assert load_preferences([{"prompt": [parts], "chosen": [yes], "rejected": [no]}]) == explicit
    assert implicit.prompts[0] == (Message("user", "Tea?"),)
    assert set(implicit.responses) == {"Yes.", "No."}


def test_datasets_and_dataset_dicts_work() -> None:
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_list(ROWS)
    assert counts(load_preferences(part)) == EXPECTED
    new = datasets.Dataset.from_list([wide(prompt="new")])
    both = load_preferences(datasets.DatasetDict({"train": part, "test": new}))
    assert both.columns["split"].tolist() == ["train", "train", "test"]
    assert list(both.split()[1].prompts) == ["new"]


def test_a_hub_id_is_loaded_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "owner-name"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(as_jsonl(ROWS))
    assert counts(load_preferences(f"hf:{folder}")) == EXPECTED


def test_a_failed_download_and_a_missing_package_raise_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def refuse(*_: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match=r"hf:owner/name: .*ConnectionError: no route to host.*; check the id"):
        load_preferences("hf:owner/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pluralign\[hf\]'"):
        load_preferences("hf:owner/name")


@pytest.mark.parametrize(
    ("source", "options", "problem"),
    [
        ("multiperf", {}, r"did you mean 'multipref'\?$"),
        ("demo:many", {}, "must be a whole number"),
        (ROWS, {"skip_badd": True}, "did you mean 'skip_bad'"),
        (ROWS, {"ties": "halve"}, "ties cannot be 'halve'; did you mean 'half'"),
    ],
)
def test_unknown_names_raise_a_suggestion(source: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises((DataError, UsageError), match=problem):
        load_preferences(source, **options)


def test_progress_reaches_the_size_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "votes.jsonl").write_bytes(as_jsonl([wide(prompt=f"p{i}") for i in range(12_000)]))
    calls: list[tuple[int, int]] = []
    load_preferences(tmp_path / "votes.jsonl", progress=lambda done, total: calls.append((done, total)))
    size = (tmp_path / "votes.jsonl").stat().st_size
    assert calls[-1] == (size, size)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_columns_of_the_data_are_kept_with_their_types() -> None:
    first = wide(flag=True, size=3, score=1.5, word="a", deep=[1])
    columns = load_preferences([first, wide(prompt="y", flag=False, size=4, score=2, word="b", late=7)]).columns
    kinds = {name: values.dtype.kind for name, values in columns.items()}
    assert kinds == {"flag": "b", "size": "i", "score": "f", "word": "O", "late": "f"}
    np.testing.assert_array_equal(columns["late"], [np.nan, 7])


def test_long_csv_cells_are_read(tmp_path: Path) -> None:
    csv.field_size_limit(131_072)  # the default
    row = wide(response_a="x" * 200_000)
    (tmp_path / "votes.csv").write_bytes(as_csv([row]))
    assert load_preferences(tmp_path / "votes.csv").responses[0] == row["response_a"]
