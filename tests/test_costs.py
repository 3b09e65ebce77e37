"""The cost of encoding: operations as counted by torch, and the hours that follow."""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from pluralign.experiments import costs
from pluralign.experiments.costs import encoding_cost, encoding_flops
from pluralign.learning.routes import LLAMA_3_8B, Architecture

SHEET = Path(__file__).parents[1] / "benchmarks" / "cost_sheet.py"
SMALL = Architecture(vocabulary=40, hidden=32, intermediate=48, layers=3, heads=4, key_value_heads=2)


def counted(model: Any, texts: int, length: int) -> int:
    """Return the operations of one forward pass, counted by torch."""
    torch, attention = importlib.import_module("torch"), importlib.import_module("torch.nn.attention")
    flop_counter = importlib.import_module("torch.utils.flop_counter")
    plain = attention.sdpa_kernel(attention.SDPBackend.MATH)  # torch does not count the fused one of CPUs
    with plain, flop_counter.FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones((texts, length), dtype=torch.long))
    return int(counter.get_total_flops())


@pytest.mark.parametrize("layers", [3, 2])
def test_the_operations_of_a_decoder_match_torch(layers: int) -> None:
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=SMALL.vocabulary,
        hidden_size=SMALL.hidden,
        intermediate_size=SMALL.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.key_value_heads,
    )
    assert counted(transformers.LlamaModel(config), 5, 10) == encoding_flops(SMALL, 50, 10, layers)


def test_the_operations_of_an_encoder_match_torch() -> None:
    transformers = importlib.import_module("transformers")
    size = Architecture(40, 32, 48, 3, 4, 4, gated=False)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    assert counted(model, 5, 10) == encoding_flops(size, 50, 10)


def test_the_sizes_of_minilm_match_its_config() -> None:
    from pluralign.text.loading import minilm_folder

    config = json.loads((minilm_folder() / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vocabulary, hidden, intermediate, layers, heads = (config[name] for name in names)
    assert Architecture(vocabulary, hidden, intermediate, layers, heads, heads, gated=False) == costs.MINILM


def test_the_cost_follows_from_its_inputs() -> None:
    cost = encoding_cost(1000, SMALL, texts_per_pair=1.5, tokens_per_text=20, surface=8, peak=1e9, utilisation=0.5)
    assert (cost.texts, cost.tokens) == (1500, 30_000)
    assert cost.flops == encoding_flops(SMALL, 30_000, 20)
    assert cost.gpu_hours == pytest.approx(cost.flops / 0.5e9 / 3600)
    assert cost.stored_bytes == 1500 * 40 * 4


def test_the_cost_sheet_uses_the_given_sizes() -> None:
    spec = importlib.util.spec_from_file_location("cost_sheet", SHEET)
    assert spec
    assert spec.loader
    sheet = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sheet)
    last = sheet.estimate_cost("llama", {"texts_per_pair": 2, "llama_tokens_per_text": 500})[-1]
    assert (last["pairs"], last["texts"], last["tokens"]) == (1e9, 2e9, 1e12)
    flops = encoding_flops(LLAMA_3_8B, 1e12, 500, 21)
    assert last["gpu_hours_bf16"] == pytest.approx(flops / (0.35 * 989.4e12) / 3600)
    assert last["gpu_hours_fp32"] == pytest.approx(flops / (0.35 * 66.9e12) / 3600)
