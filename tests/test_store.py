"""Features on disk: found by text in any order, in memory or mapped, and refused where they are not those wanted."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluralign.core.errors import DataError
from pluralign.features import store as featurestore
from pluralign.features.cache import VectorCache, vector_key
from pluralign.features.encoder import HashingEncoder, encode
from pluralign.features.frozen import TextFeatures
from pluralign.features.store import SHARD_FORMAT, item_keys, shard_name, shard_table, stored_features
from pluralign.votes.prompts import Item, Message, text_key

HASHING = TextFeatures("hashing")
TEXTS: list[Item] = [
    *((f"Prompt {n % 3}?", f"Answer {n} is {'short' if n % 2 else 'a little longer'}.") for n in range(10)),
    ((Message("user", "Tea?"), Message("assistant", "Why?")), "No."),
    ('[["user","Tea?"],["assistant","Why?"]]', "No."),  # a plain prompt that reads like that chat's key
]


def write_features(folder: Path, items: Sequence[Item], rows: int = 5, **changes: Any) -> Path:
    vectors = encode(items, HashingEncoder(), cache=False)
    (folder / "vectors").mkdir(parents=True)
    starts = range(0, len(items), rows)
    for number, start in enumerate(starts):
        table = shard_table(items[start : start + rows], vectors[start : start + rows])
        pq.write_table(table, folder / "vectors" / shard_name(number), **SHARD_FORMAT)
    made_by = {"encoder": "hashing", "layer": None, "pooling": "mean", "surface": True}
    facts: dict[str, Any] = {"format": featurestore.FORMAT, "format_version": 1, "identity": HashingEncoder().identity}
    facts |= made_by | {"shards": len(starts), "rows": len(items), "dimension": vectors.shape[1]}
    (folder / "features.json").write_text(json.dumps(facts | changes))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_features(tmp_path / "features", TEXTS)


@given(wanted=st.lists(st.integers(0, len(TEXTS) - 1), max_size=30))
def test_any_texts_in_any_order_come_back_as_they_were_encoded(
    wanted: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-order"
    if not folder.exists():
        write_features(folder, TEXTS)
    items = [TEXTS[place] for place in wanted]
    found = stored_features(folder, items, HASHING)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, encode(TEXTS, HashingEncoder(), cache=False)[np.array(wanted, dtype=int)])


def test_with_a_scratch_file_the_same_features_are_mapped_and_not_held(folder: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch" / "features.f32"
    mapped = stored_features(folder, TEXTS[::-1], HASHING, scratch)
    assert isinstance(mapped, np.memmap)
    assert scratch.stat().st_size == mapped.nbytes
    np.testing.assert_array_equal(mapped, stored_features(folder, TEXTS[::-1], HASHING))


def test_a_key_is_that_of_the_vector_cache(tmp_path: Path) -> None:
    cache = VectorCache("anything", tmp_path)
    cache.put([text_key(*item) for item in TEXTS], np.zeros((len(TEXTS), 1), np.float32))
    with cache._connect() as connection:
        kept = {key for (key,) in connection.execute("SELECT key FROM vectors")}
    connection.close()
    padded = {bytes(key).ljust(featurestore.KEY_BYTES, b"\0") for key in item_keys(TEXTS)}
    assert padded == kept == {vector_key(text_key(*item)) for item in TEXTS}


def test_keys_that_end_in_zeros_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ends = {"a": b"\1".ljust(16, b"\0"), "b": b"\1\0\1".ljust(16, b"\0"), "c": bytes(16)}
    monkeypatch.setattr(featurestore, "vector_key", lambda text: ends[text[-1]])
    items: list[Item] = [("Which?", name) for name in "abc"]
    folder = write_features(tmp_path / "features", items)
    expected = encode(items, HashingEncoder(), cache=False)
    np.testing.assert_array_equal(stored_features(folder, items[::-1], HASHING), expected[::-1])


def test_texts_that_were_not_encoded_are_counted(folder: Path) -> None:
    items: list[Item] = [*TEXTS, ("New?", "Yes."), ("New?", "No.")]
    sentence = r"2 of 14 texts are not in it; run pluralign encode on these votes\.$"
    with pytest.raises(DataError, match=sentence):
        stored_features(folder, items, HASHING)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (TextFeatures("none"), r"those of hashing mean \(hashing-crc32-1024\), not of none \(no encoder\)"),
        (replace(HASHING, surface=False), "it has surface features; use --surface here too"),
    ],
)
def test_features_of_another_encoder_are_refused(folder: Path, asked: TextFeatures, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        stored_features(folder, TEXTS, asked)


def test_a_folder_that_is_not_finished_says_how_to_finish_it(folder: Path) -> None:
    (folder / "features.json").unlink()
    with pytest.raises(DataError, match="run the same pluralign encode again to its end"):
        stored_features(folder, TEXTS, HASHING)


@pytest.mark.parametrize("text", ["[]", "{", '{"format": "pluralign-ensemble"}'])
def test_a_file_that_describes_something_else_is_refused(folder: Path, text: str) -> None:
    (folder / "features.json").write_text(text)
    with pytest.raises(DataError, match="it does not describe features"):
        stored_features(folder, TEXTS, HASHING)


def test_features_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    folder = write_features(tmp_path / "features", TEXTS, format_version=2)
    with pytest.raises(DataError, match="newer Pluralign; upgrade pluralign"):
        stored_features(folder, TEXTS, HASHING)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "vectors" / "part-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"part-00001\.parquet: it is missing; copy the whole folder again"):
        stored_features(folder, TEXTS, HASHING)


def test_a_changed_byte_is_noticed(folder: Path) -> None:
    path = folder / "vectors" / "part-00000.parquet"
    data = bytearray(path.read_bytes())
    data[data.index(bytes(item_keys(TEXTS)[0]))] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"part-00000\.parquet: it cannot be read"):
        stored_features(folder, TEXTS, HASHING)
