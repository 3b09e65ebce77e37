"""The built-in BERT against sentence-transformers, on folders that sentence-transformers wrote."""

import importlib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pluralign.text import transformer as transformer_encoder
from pluralign.text.encoders import load_encoder

pytestmark = pytest.mark.slow
VOCABULARY = "[PAD] [UNK] [CLS] [SEP] [MASK] tea ##s no yes é e ##e , . 茶 İ i"
LONG = 24
TEXTS = ["tea, no", "yes", "", "teas . Teas . É é 茶茶" * 2, "no " * 100 + "tea", "[SEP] yes [MASK]"]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Any]:
    """Return a function that makes sentence-transformers models of one BERT with random weights and biases."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    modules = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text(VOCABULARY.replace(" ", "\n"))
    transformers.BertTokenizer(str(folder / "vocab.txt"), model_max_length=LONG).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=32, max_position_embeddings=32, **sizes))
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    model.save_pretrained(folder)

    def make(pooling: str, unit: bool) -> Any:
        body = modules.Transformer(str(folder), model_kwargs={"dtype": "float32"})
        parts = [body, modules.Pooling(16, pooling), *([modules.Normalize()] if unit else [])]
        whole = importlib.import_module("sentence_transformers").SentenceTransformer(modules=parts, device="cpu")
        whole.tokenizer.truncation_side = "left"
        return whole.eval()

    return make


@pytest.fixture(scope="module")
def bert_folder(wholes: Callable[[str, bool], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "bert"
    wholes("mean", True).save(str(folder), create_model_card=False)
    return folder


def reader_of(folder: Path, layers: tuple[int, ...] = ()) -> Any:
    return importlib.import_module("pluralign.text.bert").bert_reader(folder, layers)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_as_expected(wholes: Callable[[str, bool], Any], pooling: str, unit: bool, tmp_path: Path) -> None:
    whole = wholes(pooling, unit)
    whole.save(str(tmp_path), create_model_card=False)
    reader = reader_of(tmp_path)
    tokens = reader.tokens(TEXTS)
    assert max(map(len, tokens)) == LONG, "one text is cut"
    np.testing.assert_allclose(reader.read(tokens).numpy(), whole.encode(TEXTS), atol=1e-5)
    one_by_one = np.concatenate([reader.read([ids]).numpy() for ids in tokens])
    np.testing.assert_allclose(one_by_one, whole.encode(TEXTS), atol=1e-5)


@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 2), (1,), (0,)])
def test_layers_are_reference_ones(bert_folder: Path, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    items = [("tea", text) for text in TEXTS]
    encoder: Any = load_encoder(str(bert_folder), layers=",".join(map(str, layers)))
    fast = encoder.encode(items)
    assert type(encoder._model).__name__ == "BertReader"
    monkeypatch.setattr("pluralign.text.bert.bert_reader", lambda *_, **__: None)
    transformer_encoder._loaded.cache_clear()
    np.testing.assert_allclose(fast, encoder.encode(items), atol=1e-5)
    assert type(encoder._model).__name__ == "SentenceTransformer"
    transformer_encoder._loaded.cache_clear()
    assert fast.shape == (len(TEXTS), 16 * len(layers))
    assert np.linalg.norm(fast, axis=1).min() > 1.5, "not scaled to length 1, as the model's own vector is"


def test_layers_above_the_highest_are_not_computed(bert_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(bert_folder, (0, 1))
    monkeypatch.setattr(reader.layers[1], "projection", None)
    assert reader.read(reader.tokens(TEXTS)).shape == (len(TEXTS), 32)


def test_folders_of_older_versions_are_supported(bert_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "older"
    shutil.copytree(bert_folder, folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    named = [(str(i), path, f"sentence_transformers.models.{kind}") for i, (path, kind) in enumerate(kinds.items())]
    modules = [{"idx": int(name), "name": name, "path": path, "type": kind} for name, path, kind in named]
    (folder / "modules.json").write_text(json.dumps(modules))
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **modes}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8, "do_lower_case": False}))
    reader = reader_of(folder)
    tokens = reader.tokens(TEXTS)
    assert max(map(len, tokens)) == 8
    whole = importlib.import_module("sentence_transformers").SentenceTransformer(str(folder), device="cpu")
    whole.tokenizer.truncation_side = "left"
    np.testing.assert_allclose(reader.read(tokens).numpy(), whole.encode(TEXTS), atol=1e-5)


@pytest.fixture(scope="module")
def both(bert_folder: Path) -> tuple[Any, Any]:
    """The reader of the folder, and the tokenizer of transformers."""
    transformers: Any = importlib.import_module("transformers")
    return reader_of(bert_folder), transformers.AutoTokenizer.from_pretrained(bert_folder, truncation_side="left")


ANY = st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("teaséÉ茶 ,.[]İi\x00"))


@given(text=st.text(ANY, max_size=60))
def test_tokens_are_those_of_transformers(both: tuple[Any, Any], text: str) -> None:
    reader, tokenizer = both
    assert reader.tokens([text]) == [tokenizer(text, truncation=True, max_length=LONG)["input_ids"]]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"hidden_act": "relu"}),
        ("config.json", {"architectures": ["MPNetModel"]}),
        ("config.json", {"output_hidden_states": True}),
        ("sentence_bert_config.json", {"do_lower_case": True}),
        ("sentence_bert_config.json", {"module_output_name": "sentence_embedding"}),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}),
        ("tokenizer_config.json", {"do_lower_case": False}),
        ("tokenizer.json", {"post_processor": None}),
        ("1_Pooling/config.json", {"pooling_mode": "max"}),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_folder_with_unsupported_settings_needs_sentence_transformers(
    bert_folder: Path, file: str, change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(bert_folder, folder)
    with caplog.at_level(logging.INFO):
        assert reader_of(folder) is not None
    assert caplog.messages == [f"{folder}: encoding with the built-in BERT."]
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with caplog.at_level(logging.INFO):
        assert reader_of(folder) is None
    assert "encoding with sentence-transformers (" in caplog.text


def test_missing_or_unknown_parts_need_sentence_transformers(bert_folder: Path, tmp_path: Path) -> None:
    numpy: Any = importlib.import_module("safetensors.numpy")
    required = ("modules.json", "tokenizer.json", "model.safetensors")
    for name in ("module", "weights", *required):
        shutil.copytree(bert_folder, tmp_path / name)
    for name in required:
        (tmp_path / name / name).unlink()
    modules = json.loads((bert_folder / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.base.modules.dense.Dense"
    (tmp_path / "module" / "modules.json").write_text(json.dumps(modules))
    weights = numpy.load_file(bert_folder / "model.safetensors")
    renamed = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): array for name, array in weights.items()}
    numpy.save_file(renamed, tmp_path / "weights" / "model.safetensors", metadata={"format": "pt"})
    for name in ("module", "weights", *required):
        assert reader_of(tmp_path / name) is None, name


READ = """
import sys; from pluralign.text.encoders import load_encoder
vectors = load_encoder(sys.argv[1], layers="0,2").encode([("tea", "no"), ("tea", "yes"), ("no", "tea")])
print(vectors.shape, {"torch", "transformers", "sentence_transformers"} & set(sys.modules))
"""


def test_the_built_in_bert_imports_neither_transformers_nor_sentence_transformers(bert_folder: Path) -> None:
    command = [sys.executable, "-c", READ, str(bert_folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "(3, 32) {'torch'}\n"
