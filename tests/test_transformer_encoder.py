"""Encoders that are transformers models, against the models themselves."""

import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_classifier import write_llama
from tiny import word_tokenizer

from pluralign.core.errors import DataError, UsageError
from pluralign.text import loading
from pluralign.text import transformer as cores
from pluralign.text.encoders import load_encoder
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.prompts import Item, Message, chat_messages, plain_text

ITEMS: list[Item] = [("tea ?", "yes ."), ("tea ?", "no , never , thank you ."), ("rum ?", "")]
LAYERS = 4


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLURALIGN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that transformers wrote, without anything of sentence-transformers."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
    tokenizer = word_tokenizer(special, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", model_max_length=32)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=32, max_position_embeddings=32, **sizes)
    model = transformers.BertModel(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):  # they would all be zero
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    return folder


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


@pytest.mark.slow
def test_a_decoder_reads_the_chat_template_and_is_cut_at_two_thirds(llama_folder: Path) -> None:
    encoder = load_encoder(str(llama_folder))
    assert encoder is not None
    vectors = encoder.encode(ITEMS)
    for vector, (prompt, response) in zip(vectors, ITEMS, strict=True):
        assert isinstance(prompt, str)
        expected = last_states(llama_folder, round(2 / 3 * LAYERS), chat_text(prompt, response)).mean(axis=0)
        np.testing.assert_allclose(vector, expected, atol=1e-5)
    as_chat = [((Message("user", "tea ?"),), "yes .")]
    np.testing.assert_allclose(encoder.encode(as_chat), vectors[:1], atol=1e-6)
    turns = (Message("user", "tea ?"), Message("assistant", "no ."), Message("user", "rum ?"))
    longer = last_states(llama_folder, 3, chat_text("tea ?", "no .") + chat_text("rum ?", "yes .").removeprefix("<s>"))
    np.testing.assert_allclose(encoder.encode([(turns, "yes .")])[0], longer.mean(axis=0), atol=1e-5)


@pytest.mark.slow
def test_a_decoder_without_a_chat_template_reads_plain_text(llama_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(llama_folder, folder)
    (folder / "chat_template.jinja").unlink()
    encoder = load_encoder(str(folder))
    assert encoder is not None
    expected = last_states(folder, 3, "tea ?\n\nyes .").mean(axis=0)
    np.testing.assert_allclose(encoder.encode(ITEMS)[0], expected, atol=1e-5)


# --- several layers ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "numbers"), [("auto", [0, 1, 2]), ("2,0", [0, 2]), ("1", [1]), ("0", [0]), ("last", [2])]
)
def test_the_layers_of_an_encoder_are_mean_pooled_beside_each_other(
    bert_folder: Path, layers: str, numbers: list[int]
) -> None:
    encoder: Any = load_encoder(str(bert_folder), layers=layers)
    for vector, (prompt, response) in zip(encoder.encode(ITEMS), ITEMS, strict=True):
        states = hidden_states(bert_folder, f"{prompt}\n\n{response}")
        np.testing.assert_allclose(vector, np.hstack([states[n].mean(axis=0) for n in numbers]), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize(("layers", "numbers"), [("0,1,3", [0, 1, 3]), ("0", [0]), ("auto", [3]), ("last", [LAYERS])])
def test_a_decoder_is_cut_after_the_highest_of_its_layers(
    llama_folder: Path, layers: str, numbers: list[int], pooling: str
) -> None:
    cut = max(*numbers, 1)
    encoder: Any = load_encoder(str(llama_folder), layers=layers, pooling=pooling)  # type: ignore[arg-type]
    assert len(encoder._model[0].model.layers) == cut
    for vector, (prompt, response) in zip(encoder.encode(ITEMS), ITEMS, strict=True):
        states = hidden_states(llama_folder, chat_text(str(prompt), response), num_hidden_layers=cut)
        pooled = [states[n].mean(axis=0) if pooling == "mean" else states[n][-1] for n in numbers]
        np.testing.assert_allclose(vector, np.hstack(pooled), atol=1e-5)


@pytest.mark.slow
def test_a_long_prompt_does_not_hide_the_response(bert_folder: Path) -> None:
    encoder = load_encoder(str(bert_folder))
    assert encoder is not None
    yes, no = encoder.encode([("tea ? " * 40, "yes ."), ("tea ? " * 40, "no , never .")])
    assert np.abs(yes - no).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 100])
def test_missing_or_truncated_weights_raise_data_error(
    llama_folder: Path, bert_folder: Path, tmp_path: Path, kept: int
) -> None:
    whole: Any = load_encoder(str(bert_folder), layers="last")
    saved = tmp_path / "saved"
    importlib.import_module("sentence_transformers").SentenceTransformer(modules=list(whole.load_model())).save(
        str(saved), create_model_card=False
    )
    for name, source in (("plain", bert_folder), ("decoder", llama_folder), ("sentence-transformers", saved)):
        folder = tmp_path / name
        shutil.copytree(source, folder)
        weights = folder / "model.safetensors"
        if kept:
            weights.write_bytes(weights.read_bytes()[:kept])
        else:
            weights.unlink()
        encoder = load_encoder(str(folder))
        assert encoder is not None
        with pytest.raises(DataError, match=r"it cannot be read .*; copy or download the model again") as caught:
            encoder.encode(ITEMS)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)


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


def test_few_texts_are_spread_over_the_cores() -> None:
    assert cores.core_batches([100, 100], cores=2) == [[0], [1]]
    assert cores.core_batches([100], cores=8) == [[0]]


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
        np.testing.assert_allclose(encoder.encode(items), encoder._model.encode(inputs), atol=1e-6)


@pytest.mark.slow
def test_sentence_transformers_encodes_a_model_with_a_default_prompt(
    bert_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder: Any = load_encoder(str(bert_folder))
    without = encoder.encode(ITEMS)
    monkeypatch.setattr(encoder._model, "prompts", {"thanks": "thank you "})
    monkeypatch.setattr(encoder._model, "default_prompt_name", "thanks")
    expected = encoder._model.encode([plain_text(*item) for item in ITEMS])
    np.testing.assert_allclose(encoder.encode(ITEMS), expected, atol=1e-6)
    assert np.abs(expected - without).max() > 1e-3


@pytest.mark.slow
def test_encoding_on_cores_does_not_change_the_number_of_torch_threads(bert_folder: Path) -> None:
    torch: Any = importlib.import_module("torch")
    before = torch.get_num_threads()
    encoder: Any = load_encoder(str(bert_folder))
    encoder.encode(ITEMS)
    assert torch.get_num_threads() == before
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [before], "also in threads that start later"


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


@pytest.mark.slow
def test_a_model_is_loaded_once_for_all_its_encoders(bert_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[ModelEncoder] = []
    load = ModelEncoder.load_model
    monkeypatch.setattr(ModelEncoder, "load_model", lambda encoder: read.append(encoder) or load(encoder))  # type: ignore[func-returns-value]
    cores._loaded.cache_clear()
    for _ in range(3):
        encoder = load_encoder(str(bert_folder))
        assert encoder is not None
        encoder.encode(ITEMS)
    assert len(read) == 1
    (bert_folder / "note.txt").write_text("another identity")
    changed = load_encoder(str(bert_folder))
    assert changed is not None
    changed.encode(ITEMS)
    assert len(read) == 2, "a changed folder is loaded again"


@pytest.mark.slow
def test_a_folder_in_half_precision_is_loaded_in_float32(bert_folder: Path, tmp_path: Path) -> None:
    torch: Any = importlib.import_module("torch")
    whole: Any = load_encoder(str(bert_folder), layers="last")
    half = whole.load_model().to(torch.bfloat16)
    half.save(str(tmp_path / "half"), create_model_card=False)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    encoder = load_encoder(str(tmp_path / "half"), layers="last")
    assert encoder is not None
    np.testing.assert_allclose(encoder.encode(ITEMS), whole.encode(ITEMS), atol=0.05)


@pytest.mark.slow
def test_bfloat16_layers_give_float32_vectors_that_agree(bert_folder: Path, llama_folder: Path) -> None:
    # In a child process without AMX: some CPUs report it and raise SIGILL (docs/explanation/performance.md).
    code = (
        "import json, sys; from pathlib import Path; import numpy as np\n"
        "from pluralign.text.transformer import ModelEncoder\n"
        "for folder in sys.argv[2:]:\n"
        "    encoder = ModelEncoder(Path(folder), 'half', (0, 2), half=True); items = json.loads(sys.argv[1])\n"
        "    vectors = encoder.encode(items); assert vectors.dtype == np.float32\n"
        "    print(json.dumps(vectors.tolist()))\n"
    )
    command = [sys.executable, "-c", code, json.dumps(ITEMS), str(bert_folder), str(llama_folder)]
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "CUDA_VISIBLE_DEVICES": ""}
    lines = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.splitlines()
    for folder, line in zip((bert_folder, llama_folder), lines, strict=True):
        encoder = load_encoder(str(folder), layers="0,2")
        assert encoder is not None
        exact = encoder.encode(ITEMS)
        half = np.array(json.loads(line), dtype=np.float32)
        assert 1e-4 < np.abs(half - exact).max() < 0.03 * np.abs(exact).max()
        assert (half.view(np.uint32) & 0xFFFF).any(), "the pooled vectors are not rounded to bfloat16"


@pytest.mark.slow
def test_bfloat16_on_a_cpu_that_raises_sigill_is_a_usage_error(
    bert_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PRODUCT", "import os; os.kill(os.getpid(), 4)")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    loading.check_cpu_bfloat16.cache_clear()
    encoder: Any = load_encoder(str(bert_folder), precision="bfloat16")
    with pytest.raises(UsageError, match=r"cannot multiply in bfloat16 \(.* code -4\): use --precision float32"):
        encoder.encode(ITEMS)
