"""Estimates of memory agree with transformers, peft and pytorch-optimizer."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from tiny import write_backbone

from pluralign.learning import routes as memory
from pluralign.learning.routes import (
    LLAMA_3_8B,
    Architecture,
    trained_numbers,
    trained_parameters,
    training_memory,
    weights_of,
)

SMALL = Architecture(vocabulary=50, hidden=16, intermediate=32, layers=2, heads=4, key_value_heads=2)


def small_llama(kind: str, **config: Any) -> Any:
    transformers = importlib.import_module("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    options = {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, **config}
    return getattr(transformers, f"LlamaFor{kind}")(transformers.LlamaConfig(**options))


def parameters_of(model: Any, trained: bool = False) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


def test_parameters_match_transformers() -> None:
    assert SMALL.weights.parameters == parameters_of(small_llama("SequenceClassification", num_labels=1))
    assert SMALL.weights.language_model_parameters == parameters_of(small_llama("CausalLM"))


def test_lora_parameters_match_peft() -> None:
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=3, target_modules="all-linear", modules_to_save=["score"])
    adapted = peft.get_peft_model(small_llama("SequenceClassification", num_labels=1), config)
    assert trained_parameters(SMALL.weights, 3) == parameters_of(adapted, trained=True)


@pytest.mark.parametrize("largest", [10_000, 20])
def test_the_size_of_a_checkpoint_matches_the_state_of_soap(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch, optimizers = importlib.import_module("torch"), importlib.import_module("pytorch_optimizer")
    model = small_llama("SequenceClassification", num_labels=1)
    soap = optimizers.SOAP(model.parameters(), lr=1e-3, max_precondition_dim=largest)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        soap.step()
    kept = parameters_of(model)
    for state in soap.state.values():
        tensors = [state["exp_avg"], state["exp_avg_sq"], *state["GG"], *(state["Q"] or [])]
        kept += sum(tensor.numel() for tensor in tensors if hasattr(tensor, "numel"))
    monkeypatch.setattr(memory, "SOAP_LARGEST_SIDE", largest)
    assert trained_numbers(SMALL.weights) == kept


def test_the_weights_of_a_folder_are_those_of_its_model(tmp_path: Path) -> None:
    weights, sizes = weights_of(str(write_backbone(tmp_path))), Architecture(32, 32, 64, 2, 2, 2).weights
    assert weights is not None
    assert sorted(weights.shapes) == sorted(sizes.shapes)
    assert sorted(weights.linear) == sorted(sizes.linear)
    assert (weights.layers, weights.hidden, weights.vocabulary) == (2, 32, 32)
    assert training_memory(weights) == training_memory(sizes)


def test_a_model_of_another_architecture_is_counted_exactly(tmp_path: Path) -> None:
    transformers = importlib.import_module("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, num_labels=1)
    config.save_pretrained(tmp_path)
    weights = weights_of(str(tmp_path))
    assert weights is not None
    assert weights.parameters == parameters_of(transformers.GPT2ForSequenceClassification(config))
    assert len(weights.linear) == 4 * 2


def test_of_a_hub_id_only_the_configuration_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    write_backbone(tmp_path)
    (tmp_path / "model.safetensors").unlink()

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    weights = weights_of("my-org/my-model")
    assert weights is not None
    assert weights.hidden == 32
    assert asked == [("my-org/my-model", ["config.json"])]


@pytest.mark.parametrize("name", ["missing", "/no/such/model"])
def test_the_memory_of_a_missing_model_is_unknown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    assert weights_of(name) is None


def test_the_memory_of_llama_is_as_documented() -> None:
    """The figures of docs/how-to/reproduce.md."""
    llama, n = LLAMA_3_8B.weights, 7_504_928_768
    assert training_memory(llama, "adamw") == 4 * 4 * n + 6e9
    assert training_memory(llama, "adamw", "bfloat16") == 2 * 4 * n + 6e9
    assert training_memory(llama, "adamw", shards=4) == 4 * n + 6e9
    # One side less of q, k, v and o in each layer, and of the head: two 4096 × 4096 matrices in BF16 for each.
    saved = (32 * 4 + 1) * 2 * 4096**2 * 2
    assert training_memory(llama, "soap", "bfloat16") - training_memory(llama, "soap-one-sided", "bfloat16") == saved
