"""Invalid input: one sentence with file, row and remedy; with skip_bad, rows are dropped and counted by kind."""

import gzip
import io
import json
import random
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import WriteLines, wide

from pluralign import DataError, UsageError, load_preferences
from pluralign.votes import formats

GOOD = [wide(), wide(prompt="Rain?")]

BAD_ROWS = {
    "missing value": (wide(votes_b=None), "no value for votes_b"),
    "negative count": (wide(votes_a=-1), "votes_a is -1, below zero"),
    "fractional count": (wide(votes_a=2.5), "votes_a is 2.5, not a whole number"),
    "huge count": (wide(votes_a=10**12), "votes_a is 1e\\+12, above 10,000,000"),
    "not a number": (json.dumps(wide(votes_a=float("nan"))), "votes_a is NaN"),
    "no votes": (wide(votes_a=0, votes_b=0), "the pair has no vote, and 2 are needed"),
    "too few votes": (wide(votes_a=1, votes_b=0), "the pair has only 1 vote, and 2 are needed; use min_votes=1"),
    "identical responses": (wide(response_b="Yes."), "the two responses are the same text"),
    "empty prompt": (wide(prompt=" \n"), "the prompt is empty"),
    "broken UTF-8": (json.dumps(wide(prompt="caf?")).encode().replace(b"?", b"\xe9"), "not valid UTF-8"),
    "broken text": (json.dumps(wide(prompt="half a pair: \ud800")), "prompt is not valid UTF-8"),
    "not JSON": ('{"prompt": "Tea?", ', "the line is not JSON"),
    "not an object": ("[1, 2]", "the line holds a list"),
    "wrong type": (wide(votes_a="3"), "votes_a must be a whole number, not str '3'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_one_sentence_with_file_row_and_remedy(kind: str, write_jsonl: WriteLines) -> None:
    row, problem = BAD_ROWS[kind]
    path = write_jsonl([GOOD[0], row, row, GOOD[1]])
    with pytest.raises(DataError, match=problem) as caught:
        load_preferences(path)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path}, row 2: ")
    assert sentence.endswith("or drop such rows with skip_bad=True.")
    assert "\n" not in sentence
    loaded = load_preferences(path, skip_bad=True)
    assert loaded.dropped == {kind: 2}
    assert loaded == load_preferences(GOOD)


HUGE = 10**400
LONG = {"prompt": "x", "response_a": "A", "response_b": "B"}
LISTS: dict[str, Any] = {"prompt": "x", "responses": ["A", "B"]}
SHARE = wide(votes_a=None, votes_b=None)
RATINGS = {"prompt": "x", "response_1": "A", "response_2": "B", "response_1_ann": 5, "response_2_ann": 1}
TWO_TURNS = [{"role": "assistant", "content": text} for text in "AB"]
NO_VOTES: list[tuple[Any, str]] = [
    (LONG | {"vote": "maybe"}, "vote is str 'maybe'; write a, b or tie"),
    (LONG | {"vote": HUGE}, "vote is int 1000"),
    (SHARE | {"prob_a": 60, "n": 5}, "prob_a is 60, not between 0 and 1"),
    (SHARE | {"prob_a": 0.3, "n": 4}, "prob_a 0.3 of n 4 is 1.2 people"),
    (wide(votes_a=True), "votes_a must be a whole number, not bool True"),
    (wide(votes_a=HUGE), r"votes_a is about 1e\+400, above 10,000,000"),
    (wide(votes_a=0, votes_b=0, ties=4), "no vote and 4 ties, .*use ties='half'"),
    (wide(prompt=5), "prompt must be text or a list of .* messages, not int 5"),
    (wide(prompt=[]), "the prompt is empty"),
    (wide(prompt=[{"role": "\ud800", "content": "x"}]), "a role of the prompt"),
    (wide(response_a=5), "response_a must be text"),
    (wide(response_a=TWO_TURNS), "response_a has 2 messages, not one"),
    (wide(country="\ud800"), "country is not valid UTF-8"),
    (wide() | {"\ud800": 1}, "the name of a column is not valid UTF-8"),
    (wide() | {"id": 10**5000}, "id is an integer of thousands of digits"),
    (LISTS | {"rankings": [[0, 1], [0, 0]]}, "ranking 2 is list .*, but must name responses, each at most once"),
    (LISTS | {"rankings": 3}, "rankings must be a list, not int 3"),
    (LISTS | {"responses": [], "rankings": [[]]}, "the prompt has no response"),
    (LISTS | {"responses": ["A"], "scores": [[1]]}, "the prompt has only one response"),
    (LISTS | {"scores": [[1, 2], [1]]}, r"2 responses and lists of \[2, 1\] scores"),
    (LISTS | {"scores": [["good"], [1]]}, "scores must be a number, not str 'good'"),
    (LISTS | {"scores": [[float("inf")], [1]]}, "scores is inf; give a finite number"),
    ({"prompt": "x", "response_1": "A", "response_2": "B", "response_1_rm": None}, "no value for every response_"),
    ({"prompt": "x", "response": "A", "scores": [1, 2]}, "the prompt has only one response"),
    (RATINGS | {"response_01": "C"}, "the column response_01 is not numbered as 1, 2, 3"),
    (RATINGS | {"response_२": "C"}, "the column response_२ is not numbered as 1, 2, 3"),
    (RATINGS | {"response_1_bob": "5", "response_2_bob": 2}, "not str '5'"),
    ({"prompt": "x", "chosen": "A", "rejected": "A"}, "the two responses are the same"),
]


@pytest.mark.parametrize(("row", "problem"), NO_VOTES, ids=[problem for _, problem in NO_VOTES])
def test_a_row_that_is_no_vote_is_one_sentence_and_can_be_skipped(row: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        load_preferences([row])
    assert caught.value.row == 1
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"no pair has enough votes|there are no pairs in it"):
        load_preferences([row], skip_bad=True)


def test_a_response_given_twice_counts_once_at_its_best_and_a_note_counts_the_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scored = {"prompt": "x", "responses": ["A", "B", "A"], "scores": [[1, 3], [2, 2], [3, None]]}
    ranked = {"prompt": "x", "responses": ["A", "B", "A"], "rankings": [[2, 1, 0], [0, 1], [1, 2, 0]]}
    for row, votes in ((scored, (2, 0)), (ranked, (2, 1))):
        loaded = load_preferences([row] * 2 + [row | {"responses": ["A"] * 3, "prompt": "y"}])
        assert (loaded.votes_a.tolist(), loaded.votes_b.tolist()) == ([votes[0]] * 2, [votes[1]] * 2)
        assert loaded.dropped == {"identical responses": 1}
        assert "given twice in 2 rows" in caplog.messages[-1]


def test_missing_columns_are_reported_with_the_nearest_layout() -> None:
    with pytest.raises(DataError, match=r"no known layout has the columns prompt, .*also needs .*rename="):
        load_preferences([LONG | {"votes_first": 3}])
    with pytest.raises(DataError, match="no known layout"):
        load_preferences([{"text": "x"}])


CSV_HEAD = "prompt,response_a,response_b,votes_a,votes_b\nTea?,Yes.,No.,3,2\n"


PARQUET = io.BytesIO()
pq.write_table(pa.Table.from_pylist([wide()] * 100), PARQUET)
TWICE = pa.table({name: [value] for name, value in wide().items()}).append_column("votes_a", pa.array([9]))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        *(("votes.jsonl", content, "the file has no rows") for content in (b"", b"\n\n", gzip.compress(b"", mtime=0))),
        ("votes.csv", CSV_HEAD.splitlines()[0].encode(), "the file has no rows"),
        ("votes.json", b"[{]", "the file is not a JSON list"),
        ("votes.jsonl", b'{"a":' * 100_000, "nested too deeply"),
        ("votes.csv", b"prompt,prompt\nTea?,Yes.\n", "two columns have the same name"),
        ("votes.parquet", TWICE, "two columns have the same name"),
        ("votes.parquet", PARQUET.getvalue()[:-20], r"votes\.parquet: the Parquet file cannot be read"),
        ("absent/votes.jsonl", None, r"votes\.jsonl: there is no such file"),
        ("", None, "it is a folder; name a file in it"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(name: str, content: Any, problem: str, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content:
        pq.write_table(content, tmp_path / name)
    with pytest.raises(DataError, match=problem):
        load_preferences(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"Tea?,Yes.,No.,3\n", "row 2: the row has 4 fields and the header 5"),
        *(
            (f"Tea?,Yes.,No.,{cell},2\n".encode(), f"row 2: votes_a must be a whole number, not str '{cell}'")
            for cell in ("three", "1_0", "１０", "0x10", "1e", "1 0", "२")
        ),
        (b"Tea?,Yes.,No.,,2\n", "row 2: there is no value for votes_a"),
        (b"Caf\xe9?,Yes.,No.,3,2\n", "row 2: the row is not valid UTF-8"),
        (b'Tea?,"Yes.,No.,3,2\n', "row 2: the row is not CSV"),
    ],
)
def test_bad_csv_rows_are_reported_with_their_number(line: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "votes.csv"
    path.write_bytes(CSV_HEAD.encode() + line)
    with pytest.raises(DataError, match=problem):
        load_preferences(path)
    assert len(load_preferences(path, skip_bad=True)) == 1


# --- input that is meant to break the reader --------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [400, 900, 990, 1000, 200_000])
@pytest.mark.parametrize("where", ["prompt", "extra", "file", "csv"])
def test_nested_brackets_are_one_sentence(depth: int, where: str, tmp_path: Path) -> None:
    nest = "[" * depth + "]" * depth
    texts = {"file": nest, "csv": f'prompt,responses,rankings\nx,"{nest}","[[0, 1]]"\n'}
    for name, row in (("prompt", wide(prompt=5)), ("extra", wide(votes_a=None, extra=5))):
        texts[name] = json.dumps(row).replace("5", nest)
    (tmp_path / "nested.txt").write_text(texts[where])
    with pytest.raises(DataError):
        load_preferences(tmp_path / "nested.txt")


def test_a_record_that_holds_itself_is_one_sentence() -> None:
    row: dict[str, Any] = wide()
    row["itself"] = [row]
    with pytest.raises(DataError, match="row 1: the record is nested too deeply"):
        load_preferences([row])


def test_a_column_without_a_name_is_the_index_of_pandas(tmp_path: Path) -> None:
    path = tmp_path / "votes.csv"
    path.write_text(",prompt,response_a,response_b,votes_a,votes_b\n0,Tea?,Yes.,No., 3 ,+2\n")
    loaded = load_preferences(path)
    assert (list(loaded.columns), loaded.votes_a.tolist(), loaded.votes_b.tolist()) == ([], [3], [2])


@pytest.mark.parametrize("values", [[10**20, 3], [2**63, -1], [HUGE, 1], [2**53 + 1, None], [1.5, 10**30]])
def test_extra_integers_of_any_size_can_be_saved(values: list[Any], tmp_path: Path) -> None:
    loaded = load_preferences([wide(prompt=f"{i}?") | {"id": value} for i, value in enumerate(values)])
    expected = [None if value is None else str(value) for value in values]
    assert loaded.columns["id"].tolist() == expected
    loaded.save(tmp_path / "votes.parquet")
    assert load_preferences(tmp_path / "votes.parquet") == loaded


def test_parquet_text_that_is_no_utf8_is_a_bad_row(tmp_path: Path) -> None:
    columns = {name: pa.array([value] * 3) for name, value in wide().items()}
    texts = pa.array([b"Tea?", b"caf\xe9", b"Rum?"])
    columns["prompt"] = pa.StringArray.from_buffers(3, texts.buffers()[1], texts.buffers()[2])
    pq.write_table(pa.table(columns), tmp_path / "broken.parquet")
    with pytest.raises(DataError, match=r"broken\.parquet, row 2: prompt is not valid UTF-8"):
        load_preferences(tmp_path / "broken.parquet")
    loaded = load_preferences(tmp_path / "broken.parquet", skip_bad=True)
    assert list(loaded.prompts) == ["Tea?", "Rum?"]
    assert loaded.dropped == {"broken UTF-8": 1}


def test_times_in_parquet_do_not_stop_reading(tmp_path: Path) -> None:
    table = pa.table({name: [value] for name, value in wide().items()})
    for kind in (pa.timestamp("ns"), pa.timestamp("us", "Nowhere/Else"), pa.duration("ns"), pa.time64("ns")):
        times = pa.array([2**62 + 1], pa.int64()).view(kind)
        pq.write_table(table.append_column("when", times), tmp_path / "times.parquet")
        assert len(load_preferences(tmp_path / "times.parquet")) == 1


def test_a_damaged_file_of_our_own_is_one_sentence(tmp_path: Path) -> None:
    path, whole = tmp_path / "votes.parquet", tmp_path / "whole.parquet"
    load_preferences([wide(prompt=f"{i}?" * 20) for i in range(50)]).save(whole)
    content = whole.read_bytes()
    for position in range(4, len(content) - 8, 37):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x55]) + content[position + 1 :])
        try:
            assert load_preferences(path) == load_preferences(whole)  # a byte that carries nothing
        except DataError as error:
            assert str(path) in str(error)  # noqa: PT017
    table = pq.read_table(whole)
    for changed in (table.drop_columns(["ties"]), table.set_column(3, "votes_a", pa.array(["x"] * 50)),
                    table.replace_schema_metadata({"pluralign": "{"}),
                    table.replace_schema_metadata({"pluralign": '{"tie_rule": "thrice"}'})):  # fmt: skip
        pq.write_table(changed, path)
        with pytest.raises(DataError, match="the file is damaged"):
            load_preferences(path)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("place", [0.2, 0.5, 0.9])
def test_every_row_before_a_damage_of_gzip_is_kept(place: float, cut: bool, tmp_path: Path) -> None:
    rng = random.Random(place)
    prompts = [f"{i} {rng.randbytes(8).hex()}" for i in range(4000)]
    lines = [json.dumps(wide(prompt=prompt)).encode() + b"\n" for prompt in prompts]
    content = gzip.compress(b"".join(lines))
    at = int(len(content) * place)
    content = content[:at] if cut else content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
    decoder, intact = zlib.decompressobj(31), b""
    for byte in content:
        try:
            intact += decoder.decompress(bytes([byte]))
        except zlib.error:
            break
    path = tmp_path / "damaged.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="the gzip stream is damaged or ends early" if cut else "row"):
        load_preferences(path)
    found = set(intact.splitlines(keepends=True))
    readable = {prompt for prompt, line in zip(prompts, lines, strict=True) if line in found}
    loaded = load_preferences(path, skip_bad=True)
    assert len(readable) > 0.9 * place * len(lines)
    assert len(readable - set(map(str, loaded.prompts))) <= 1
    assert loaded.dropped["truncated gzip"] == 1


def test_gzip_members_are_read_as_one_file(tmp_path: Path) -> None:
    rows = [json.dumps(wide(prompt=f"{i}?")).encode() + b"\n" for i in range(3)]
    (tmp_path / "votes.jsonl.gz").write_bytes(b"".join(map(gzip.compress, rows)) + b"\0" * 100)
    assert len(load_preferences(tmp_path / "votes.jsonl.gz")) == 3
    table = pa.table({name: [value] for name, value in wide().items()})
    pq.write_table(table, tmp_path / "votes.parquet")
    (tmp_path / "votes.parquet.gz").write_bytes(gzip.compress((tmp_path / "votes.parquet").read_bytes()))
    assert len(load_preferences(tmp_path / "votes.parquet.gz")) == 1


def test_gzip_that_expands_too_much_is_refused(tmp_path: Path) -> None:
    line = json.dumps(wide()).encode() + b" " * 100_000 + b"\n"
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(line * 800))
    for skip_bad in (False, True):
        with pytest.raises(DataError, match="expands to more than 200 times its size"):
            load_preferences(tmp_path / "bomb.jsonl.gz", skip_bad=skip_bad)


def test_a_line_that_is_too_long_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.dumps(wide(prompt=prompt)).encode() for prompt in ("Tea?", "x" * 1_100_000, "Rum?")]
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"\n".join(rows))
    assert len(load_preferences(path)) == 3
    monkeypatch.setattr(formats, "LONGEST_LINE", 10**6)
    with pytest.raises(DataError, match=r"row 2: the line is longer than 1 MB"):
        load_preferences(path)
    loaded = load_preferences(path, skip_bad=True)
    assert (list(loaded.prompts), loaded.dropped) == (["Tea?", "Rum?"], {"long line": 1})


def test_a_saved_set_keeps_to_the_options_or_refuses_them(tmp_path: Path) -> None:
    path = tmp_path / "votes.parquet"
    load_preferences([wide(), wide(prompt="Rain?", votes_a=9)]).save(path)
    loaded = load_preferences(path, min_votes=6)
    assert (list(loaded.prompts), loaded.dropped) == (["Rain?"], {"pairs with fewer than 6 votes": 1})
    with pytest.raises(DataError, match="no pair has enough votes"):
        load_preferences(path, min_votes=60)
    with pytest.raises(UsageError, match="rename does not apply"):
        load_preferences(path, rename={"prompt": "question"})
