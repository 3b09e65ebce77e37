"""Stored features: read by text in any order, in memory or memory-mapped, and rejected if they are other features."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from pluralign.core.errors import DataError
from pluralign.text import store
from pluralign.text.encoders import HashingEncoder, TextFeatures, encode
from pluralign.text.store import SHARD_FORMAT, item_keys, shard_name, shard_table, stored_features
from pluralign.votes.prompts import Item, Message

HASHING = TextFeatures("hashing")
HASHING_WIDTH = 1044
TEXTS: list[Item] = [
    *((f"Prompt {n % 3}?", f"Answer {n} is {'short' if n % 2 else 'a little longer'}.") for n in range(10)),
    ((Message("user", "Tea?"), Message("assistant", "Why?")), "No."),
    ('[["user","Tea?"],["assistant","Why?"]]', "No."),  # a plain prompt equal to the key of that chat
]


def write_features(folder: Path, items: Sequence[Item], rows: int = 5, **changes: Any) -> Path:
    vectors = encode(items, HashingEncoder(), cache=False)
    (folder / "vectors").mkdir(parents=True)
    starts = range(0, len(items), rows)
    for number, start in enumerate(starts):
        table = shard_table(items[start : start + rows], vectors[start : start + rows])
        pq.write_table(table, folder / "vectors" / shard_name(number), **SHARD_FORMAT)
    made_by = {"encoder": "hashing", "layers": "auto", "pooling": "mean", "precision": "float32", "surface": True}
    values: dict[str, Any] = {"format": store.FORMAT, "format_version": 2, "identity": HashingEncoder().identity}
    values |= made_by | {"shards": len(starts), "rows": len(items), "dimension": vectors.shape[1]}
    (folder / "features.json").write_text(json.dumps(values | changes))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_features(tmp_path / "features", TEXTS)


@given(wanted=st.lists(st.integers(0, len(TEXTS) - 1), max_size=30))
def test_features_are_returned_in_any_order(wanted: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-order"
    if not folder.exists():
        write_features(folder, TEXTS)
    items = [TEXTS[place] for place in wanted]
    features = stored_features(folder, items, HASHING)
    assert features.dtype == np.float32
    np.testing.assert_array_equal(features, encode(TEXTS, HashingEncoder(), cache=False)[np.array(wanted, dtype=int)])


def test_a_scratch_file_holds_the_features_as_a_memory_map(folder: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch" / "features.f32"
    mapped = stored_features(folder, TEXTS[::-1], HASHING, scratch)
    assert isinstance(mapped, np.memmap)
    assert scratch.stat().st_size == mapped.nbytes
    np.testing.assert_array_equal(mapped, stored_features(folder, TEXTS[::-1], HASHING))


def test_keys_that_end_in_zeros_are_distinguished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ends = {"a": b"\1".ljust(16, b"\0"), "b": b"\1\0\1".ljust(16, b"\0"), "c": bytes(16)}
    monkeypatch.setattr(store, "vector_key", lambda text: ends[text[-1]])
    items: list[Item] = [("Which?", name) for name in "abc"]
    folder = write_features(tmp_path / "features", items)
    expected = encode(items, HashingEncoder(), cache=False)
    np.testing.assert_array_equal(stored_features(folder, items[::-1], HASHING), expected[::-1])


def test_missing_texts_are_counted_in_the_error(folder: Path) -> None:
    items: list[Item] = [*TEXTS, ("New?", "Yes."), ("New?", "No.")]
    sentence = r"2 of 14 texts are not in it; run pluralign encode on these votes\.$"
    with pytest.raises(DataError, match=sentence):
        stored_features(folder, items, HASHING)


@pytest.mark.parametrize(
    ("requested", "sentence"),
    [
        (TextFeatures("none"), r"those of hashing \(hashing-crc32-1024\), not of none \(no encoder\)"),
        (replace(HASHING, surface=False), "it has surface features; use surface here too"),
    ],
)
def test_features_of_another_encoder_raise_data_error(folder: Path, requested: TextFeatures, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        stored_features(folder, TEXTS, requested)


def test_an_unfinished_folder_raises_data_error_with_advice(folder: Path) -> None:
    (folder / "features.json").unlink()
    with pytest.raises(DataError, match="run the same pluralign encode again to finish it"):
        stored_features(folder, TEXTS, HASHING)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, "does not describe features") for text in ("[]", "{", '{"format": "pluralign-ensemble"}')),
        ('{"format": "pluralign-features", "format_version": 2}', "does not describe features"),
        ('{"format": "pluralign-features", "format_version": 3}', "another version of Pluralign; run pluralign encode"),
    ],
)
def test_a_file_that_does_not_describe_features_raises_data_error(folder: Path, text: str, problem: str) -> None:
    (folder / "features.json").write_text(text)
    with pytest.raises(DataError, match=problem):
        stored_features(folder, TEXTS, HASHING)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"key": ["x"] * 5}, "it does not hold a key and"),
        ({"vector": pa.nulls(5, pa.list_(pa.float32(), HASHING_WIDTH))}, "it does not hold a key and"),
        ({"vector": pa.array([[1.0]] * 5, pa.list_(pa.float32(), 1))}, "it does not hold a key and"),
        ({"vector": pa.array([[np.nan] * HASHING_WIDTH] * 5, pa.list_(pa.float32(), HASHING_WIDTH))}, "finite numbers"),
        (None, "it is missing; copy the whole folder again"),
    ],
    ids=["keys", "nulls", "width", "nan", "missing"],
)
def test_a_damaged_shard_is_named(folder: Path, columns: dict[str, Any] | None, problem: str) -> None:
    path = folder / "vectors" / "part-00000.parquet"
    table = pq.read_table(path)
    path.unlink()
    if columns:
        whole = {name: table[name] for name in table.column_names} | columns
        pq.write_table(pa.table(whole), path)
    with pytest.raises(DataError, match=rf"part-00000\.parquet: .*{problem}"):
        stored_features(folder, TEXTS, HASHING)


def test_a_changed_byte_is_detected(folder: Path) -> None:
    path = folder / "vectors" / "part-00000.parquet"
    data = bytearray(path.read_bytes())
    data[data.index(bytes(item_keys(TEXTS)[0]))] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"part-00000\.parquet: it cannot be read"):
        stored_features(folder, TEXTS, HASHING)
