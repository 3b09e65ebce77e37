"""Files of votes with hostile values, columns and bytes: ``inspect`` reads them, or says what is wrong."""

import copy
import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import run
from test_public import FORMATS

from fuzz import cases, keeps_contract, random_of
from pluralign import DataError, load_preferences

Row = dict[str, Any]


def good_rows(layout: str, n: int = 4) -> list[Row]:
    """Return valid rows of a layout."""
    pair = {"response_a": "Yes, please.", "response_b": "No."}
    rows: dict[str, Callable[[int], Row]] = {
        "wide": lambda i: {**pair, "votes_a": 3, "votes_b": 2},
        "share": lambda i: {**pair, "prob_a": 0.6, "n": 5},
        "long": lambda i: {**pair, "vote": "ab"[i % 2], "annotator": f"w{i}"},
        "trl": lambda i: {"chosen": "Yes, please.", "rejected": "No."},
        "rankings": lambda i: {"responses": ["Yes.", "No.", "Maybe."], "rankings": [[0, 1, 2], [1, 0, 2]]},
        "ranking": lambda i: {"responses": ["Yes.", "No.", "Maybe."], "ranking": [2, 1, 0]},
        "score lists": lambda i: {"responses": ["Yes.", "No."], "scores": [[1, 2], [5, 3]]},
        "score columns": lambda i: dict(zip(SCORED, ("Yes.", "No.", 3, 4), strict=True)),
        "one response": lambda i: {"response": ["Yes.", "No."][i % 2], "score_ann": i, "score_bob": 2},
    }
    return [{"prompt": f"Question {i // 2}?", **rows[layout](i)} for i in range(n)]


SCORED = ("response_1", "response_2", "response_1_ann", "response_2_ann")
LAYOUTS = ("wide", "share", "long", "trl", "rankings", "ranking", "score lists", "score columns", "one response")
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2.5, 1e308, -1e308, 10**20, 10**400, float("nan"), float("inf"), 1e-320),
    *("", " ", "\x00", "\x1b]0;title\x07", "\ud800", "a" * 5000, "１２", "1_0", "0x1f", "tie", "½", "[{", "null"),
    *([], {}, [[]], [None], {"role": "user"}, [{"role": "user", "content": "Hi"}]),
    *(
        [{"role": "\ud800", "content": "x"}],
        [[[[[]]]]],
        [0, 0, 0],
        [5, 6, 7],
        {"a": 1},
        ["x"] * 50,
        ["No.", "Yes.", "No."],
    ),
)
NAMES = ("", " ", "prompt", "votes_a", "response_01", "response_२", "score_", "\x1b[31m", "split", "n", "Vote", "id\n")


def mutate(rows: list[Row], random: np.random.Generator) -> list[Row]:
    """Change, remove, add or rename values and rows."""
    for _ in range(int(random.integers(1, 4))):
        row = rows[int(random.integers(len(rows)))]
        name = str(random.choice(list(row))) if row else "prompt"
        value = VALUES[int(random.integers(len(VALUES)))]
        match int(random.integers(6)):
            case 0 | 1:
                row[name] = value
            case 2:
                row.pop(name, None)
            case 3:
                row[NAMES[int(random.integers(len(NAMES)))]] = value
            case 4:
                other = NAMES[int(random.integers(len(NAMES)))]
                for each in rows:
                    each[other] = each.pop(name, None)
            case _:
                rows.append(dict(row))
    return rows


def as_bytes(rows: list[Row], form: str) -> bytes:
    """Return rows in a file format; rows that the format cannot hold become JSON Lines."""
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    if form == "csv":
        names = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(names)
        for row in rows:
            cells = (row.get(name) for name in names)
            writer.writerow([json.dumps(cell) if isinstance(cell, list | dict) else cell for cell in cells])
        return text.getvalue().encode(errors="surrogatepass")
    if form == "parquet":
        try:
            sink, table = io.BytesIO(), pa.Table.from_pylist(rows)
            for position, column in enumerate(table.columns if len(rows) % 2 else ()):
                if pa.types.is_string(column.type):  # no longer UTF-8
                    texts = pa.array([text and text.encode().replace(b"e", b"\xff") for text in column.to_pylist()])
                    broken = pa.Array.from_buffers(pa.string(), len(texts), texts.cast(pa.binary()).buffers())
                    table = table.set_column(position, table.column_names[position], broken)
            pq.write_table(table, sink)
            return sink.getvalue()
        except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError, ValueError):
            return lines
    return lines


def damage(data: bytes, random: np.random.Generator) -> bytes:
    """Change, cut or repeat some bytes."""
    at = int(random.integers(len(data)))
    junk = bytes(random.integers(0, 256, 8, dtype=np.uint8))
    return (data[:at] + junk + data[at:], data[:at], data[:at] + junk, data + data[at:])[int(random.integers(4))]


def options_of(random: np.random.Generator) -> list[str]:
    """Return random options for reading votes."""
    known = (
        *(["--skip-bad"], ["--ties", "half"], ["--min-votes", "1"], ["--repeats", "first"], ["--json"], ["--json"]),
        *(["--rename", "prompt=question"], ["--rename", "vote=votes_a"], ["--rename", "response_a=response_b"]),
        *(["--rename", "x"], ["--rename", "=x"], ["--min-votes", "-1"]),
    )
    return [word for option in known if random.random() < 0.15 for word in option]


@pytest.mark.parametrize("case", cases())
def test_hostile_files_are_read_or_explained(case: int, tmp_path: Path) -> None:
    random = random_of(case, "inputs")
    layout = LAYOUTS[case % len(LAYOUTS)]
    form = str(random.choice(["jsonl", "csv", "parquet"]))
    data = as_bytes(mutate(good_rows(layout), random), form)
    if data and random.random() < 0.3:
        data = damage(data, random)
    if random.random() < 0.2:
        data = gzip.compress(data)
        if random.random() < 0.3:
            data = damage(data, random)
    path = tmp_path / f"votes.{form}"
    path.write_bytes(data)
    options = options_of(random)
    from_file = random.random() < 0.8
    done = run("inspect", path if from_file else "-", *options, stdin=b"" if from_file else data)
    keeps_contract(done, (layout, form, options))
    if done.returncode == 0 and "--json" in options:
        json.loads(done.stdout)


@pytest.mark.parametrize("case", cases(0.5))
def test_hostile_records_of_published_layouts_are_read_or_explained(case: int) -> None:
    random = random_of(case, "published")
    rows = copy.deepcopy(FORMATS[case % len(FORMATS)][1])
    for _ in range(int(random.integers(1, 4))):
        inside: Any = rows
        while True:
            key = (list(inside) if isinstance(inside, dict) else range(len(inside)))[int(random.integers(len(inside)))]
            if not isinstance(inside[key], dict | list) or not inside[key] or random.random() < 0.3:
                break
            inside = inside[key]
        inside[key] = copy.deepcopy(VALUES[int(random.integers(len(VALUES)))])
    try:
        load_preferences(rows, skip_bad=bool(case % 2))
    except DataError as error:
        assert "\n" not in str(error)  # noqa: PT017
