"""Vector cache: exact, separate per encoder, consistent after a kill, shared by processes."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pluralign.core.files import cache_folder
from pluralign.text.encoders import HashingEncoder, VectorCache, encode, vector_key
from pluralign.votes.prompts import Item, Message, Prompt, text_key

# The vector of text i of batch b is 384 times the number 1000 b + i. Each batch is printed after it is stored.
WRITER = """
import sys, numpy
from pluralign.text.encoders import VectorCache
first, last, size = map(int, sys.argv[1:])
for batch in range(first, last):
    numbers = [1000 * batch + i for i in range(size)]
    vectors = numpy.repeat(numpy.array(numbers, dtype="f4")[:, None], 384, axis=1)
    VectorCache("writer").put([f"text {n}" for n in numbers], vectors)
    print(batch, flush=True)
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLURALIGN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start_writer(first: int, last: int, size: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, str(first), str(last), str(size)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def stored(batches: range, size: int) -> Iterator[tuple[int, int]]:
    """Check that every stored vector is complete, and yield each batch with the number of its stored vectors."""
    for batch in batches:
        numbers = [1000 * batch + i for i in range(size)]
        vectors = VectorCache("writer").get([f"text {n}" for n in numbers])
        for number, vector in zip(numbers, vectors, strict=True):
            if vector is not None:
                assert vector.tolist() == [number] * 384
        yield batch, sum(vector is not None for vector in vectors)


def test_a_vector_is_returned_bit_for_bit() -> None:
    special = np.array([[0.1, -0.0, 1e-45, np.inf, np.nan], [1, 2, 3, 4, 5]], dtype=np.float32)
    VectorCache("e").put(["x", "größer 👍"], special)
    first, second = VectorCache("e").get(["x", "größer 👍"])
    assert first is not None
    assert second is not None
    assert first.tobytes() == special[0].tobytes()
    assert second.tobytes() == special[1].tobytes()
    assert first.dtype == np.float32


def test_vectors_are_in_the_order_of_the_texts_and_missing_ones_are_none() -> None:
    cache = VectorCache("e")
    assert cache.get(["x", "y"]) == [None, None]
    cache.put(["x", "y"], np.array([[1.0], [2.0]], dtype=np.float32))
    vectors = cache.get(["y", "nowhere", "x", "y"])
    assert [None if vector is None else vector.item() for vector in vectors] == [2.0, None, 1.0, 2.0]
    assert cache.get([]) == []


def test_reading_writes_no_file(own_cache: Path) -> None:
    VectorCache("e").get(["x"])
    assert not own_cache.exists()


def test_encoders_share_no_vectors() -> None:
    VectorCache("one").put(["x"], np.array([[1.0]], dtype=np.float32))
    assert VectorCache("two").get(["x"]) == [None]
    assert VectorCache("one").path != VectorCache("two").path


def test_a_text_stored_twice_keeps_its_first_vector() -> None:
    cache = VectorCache("e")
    cache.put(["x"], np.array([[1.0]], dtype=np.float32))
    cache.put(["x", "y"], np.array([[9.0], [2.0]], dtype=np.float32))
    assert [vector.item() for vector in cache.get(["x", "y"]) if vector is not None] == [1.0, 2.0]


def test_more_texts_than_fit_into_one_query_are_returned() -> None:
    texts = [f"text {i}" for i in range(30_001)]
    VectorCache("e").put(texts, np.arange(30_001, dtype=np.float32)[:, None])
    vectors = VectorCache("e").get(texts)
    assert [vector.item() for vector in vectors if vector is not None] == list(range(30_001))


def test_the_environment_sets_the_folder(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == own_cache
    VectorCache("e").put(["x"], np.ones((1, 1), dtype=np.float32))
    assert [path.suffix for path in own_cache.iterdir()] == [".sqlite"]
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PLURALIGN_CACHE", "")
    assert cache_folder() == tmp_path / "home" / ".cache" / "pluralign"
    monkeypatch.delenv("PLURALIGN_CACHE")
    assert cache_folder() == tmp_path / "home" / ".cache" / "pluralign"
    assert VectorCache("e", tmp_path / "elsewhere").path.parent == tmp_path / "elsewhere"


def test_two_processes_can_write_at_the_same_time() -> None:
    writers = [start_writer(0, 12, 100), start_writer(6, 18, 100)]
    assert [writer.communicate() and writer.returncode for writer in writers] == [0, 0]
    assert list(stored(range(18), 100)) == [(batch, 100) for batch in range(18)]


def test_a_killed_writer_leaves_complete_batches_and_a_working_cache() -> None:
    random = np.random.default_rng(0)
    for attempt in range(4):
        first = attempt * 1000
        writer = start_writer(first, first + 1000, 1000)
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(2)]
        time.sleep(random.random() * 0.05)
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in writer.communicate()[0].split()]
        assert writer.returncode == -signal.SIGKILL
        counts = dict(stored(range(first, acknowledged[-1] + 2), 1000))
        assert set(counts.values()) <= {0, 1000}, "a batch is stored completely or not at all"
        assert all(counts[batch] == 1000 for batch in acknowledged), "stored batches stay"
    VectorCache("writer").put(["after"], np.ones((1, 384), dtype=np.float32))
    assert VectorCache("writer").get(["after"])[0] is not None


def test_a_damaged_file_is_replaced_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    cache = VectorCache("e")
    for damaged in (b"this is not a database" * 100, b""):
        cache.put(["x"], np.ones((1, 1), dtype=np.float32))
        cache.path.write_bytes(damaged)
        assert cache.get(["x"]) == [None]
        cache.put(["x"], np.ones((1, 1), dtype=np.float32))
        assert cache.get(["x"]) == [np.float32(1)]
    assert re.findall(r"the vector cache .* cannot be used \(.*\): texts are encoded again\.", caplog.text)
    assert len(caplog.records) == 1, "one note per file"


def test_a_damaged_vector_is_encoded_again() -> None:
    cache = VectorCache("e")
    for damage in ("X'00000000'", "X''", "NULL", "substr(vector, 2)", "'text'", "X'FF' || substr(vector, 2)"):
        cache.put(["x", "y"], np.ones((2, 3), dtype=np.float32))
        with closing(sqlite3.connect(cache.path)) as connection, connection:
            connection.execute(f"UPDATE vectors SET vector = {damage} WHERE key = ?", [vector_key("x")])
        first, second = cache.get(["x", "y"])
        assert first is None
        assert second is not None
    cache.put(["x"], np.ones((1, 3), dtype=np.float32))
    assert cache.get(["x"])[0] is not None


def test_a_cache_that_cannot_be_written_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    items = [("Tea?", "Yes."), ("Tea?", "No.")]
    expected = encode(items, HashingEncoder(8), cache=False)
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        monkeypatch.setenv("PLURALIGN_CACHE", str(place))
        np.testing.assert_array_equal(encode(items, HashingEncoder(8)), expected)
    assert len(caplog.records) == 3
    assert "texts are encoded again" in caplog.text


def test_no_two_items_share_a_vector() -> None:
    chat = (Message("user", "Tea?"),)
    items: list[Item] = [
        *(("a\x1fb", "c"), ("a", "b\x1fc"), ("", "a\x1fb\x1fc"), ("a 1 b", "c"), ("a", " 1 bc"), ("", "x"), ("x", "")),
        *((chat, "c"), (Prompt(chat).key, "c"), ("\x1e" + Prompt(chat).key, "c"), ("1", "0 a"), ("10", " a")),
    ]
    assert len({text_key(*item) for item in items}) == len(items)
    vectors = encode(items, HashingEncoder(64), surface=False)
    np.testing.assert_array_equal(vectors, encode(items, HashingEncoder(64), surface=False, cache=False))
