"""Causal language models in this process: log-probabilities of responses, and sampling."""

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_classifier import ITEMS, write_llama

from pluralign import DataError, SamplingOptions
from pluralign.experiments.rehearsal import write_tiny_model
from pluralign.text import causal
from pluralign.text.causal import LocalModel, response_log_prob, token_log_probs
from pluralign.text.loading import load_model

WORDS = "tea rum water yes no never please thank you with milk and sugar ? . ,"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", [WORDS]))


@pytest.mark.slow
@pytest.mark.parametrize("template", [True, False], ids=["chat", "plain"])
def test_a_reference_gives_the_log_probability_of_the_response_and_its_end(tmp_path: Path, template: bool) -> None:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    folder = write_llama(tmp_path / "reference", "CausalLM", template)
    log_probs = response_log_prob(folder, ITEMS[:3])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for value, (prompt, response) in zip(log_probs, ITEMS[:3], strict=True):
        before = f"<s>user {prompt} </s>assistant " if template else f"{prompt}\n\n"
        ids = tokenizer(before, add_special_tokens=not template)["input_ids"]
        total = 0.0
        for token in [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1].tolist()
            total += logits[token] - math.log(math.fsum(map(math.exp, logits)))
            ids.append(token)
        assert value == pytest.approx(total, abs=1e-4)
    with pytest.raises(DataError, match=r"a response has 65 tokens, but the model reads at most 64; leave"):
        response_log_prob(folder, [("tea ?", "yes " * 64)])


@pytest.mark.slow
def test_token_log_probs_do_not_depend_on_the_batch_and_follow_the_temperature(tmp_path: Path) -> None:
    torch = importlib.import_module("torch")
    model, _ = load_model(write_llama(tmp_path / "reference", "CausalLM"), "AutoModelForCausalLM")
    contexts, responses = [[1, 4, 5], [1], [1, 9, 8, 7, 6]], [[6, 2], [7, 8, 9, 10, 2], [2]]
    with torch.inference_mode():
        batch = token_log_probs(model, contexts, responses, temperature=0.7)
        for together, context, response in zip(batch, contexts, responses, strict=True):
            logits = model(torch.tensor([context + response])).logits[0, len(context) - 1 : -1] / 0.7
            expected = torch.log_softmax(logits, dim=-1)[range(len(response)), response]
            np.testing.assert_allclose(together.numpy(), expected.numpy(), atol=1e-5)


def test_sampling_does_not_change_the_callers_random_state(model: str) -> None:
    torch = importlib.import_module("torch")
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    LocalModel(model).sample("tea ?", 2, SamplingOptions(max_new_tokens=3), seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_samples_follow_the_models_probabilities_at_the_temperature(model: str) -> None:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    ids = tokenizer("<|user|> tea ? <|end|> <|assistant|> ", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = torch.softmax(network(ids).logits[0, -1] / 0.05, dim=-1)
    n = 1500
    options = SamplingOptions(temperature=0.05, max_new_tokens=1)
    responses = [completion.text for completion in LocalModel(model).sample("tea ?", n, options, seed=5)]
    assert len(responses) == n
    for token, share in enumerate(expected.tolist()):
        word = tokenizer.decode([token], skip_special_tokens=True)
        if word:
            error = (share * (1 - share) / n) ** 0.5
            assert abs(responses.count(word) / n - share) <= 4.5 * error + 1e-9, word


def test_top_p_excludes_unlikely_tokens(model: str) -> None:
    responses = LocalModel(model).sample("tea ?", 40, SamplingOptions(top_p=1e-6, max_new_tokens=2), seed=5)
    assert len(set(responses)) == 1


def test_small_models_have_a_lower_default_temperature(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    local, careful = LocalModel(model), SamplingOptions(temperature=0.7, top_p=0.9)
    assert causal.parameter_count(Path(model)) == sum(weights.numel() for weights in local.model.parameters())
    assert local.with_defaults(SamplingOptions()) == careful
    default, same = (local.sample("tea ?", 8, options, seed=2) for options in (SamplingOptions(), careful))
    assert default == same
    given = SamplingOptions(temperature=1.5)
    assert local.with_defaults(given) == SamplingOptions(temperature=1.5, top_p=1.0)
    assert local.with_defaults(SamplingOptions(top_p=0.5)) == SamplingOptions(temperature=0.7, top_p=0.5)
    monkeypatch.setattr(causal, "SMALL_MODEL", 10)
    assert LocalModel(model).with_defaults(SamplingOptions()) == SamplingOptions(temperature=1.2, top_p=1.0)


def test_the_models_own_sampling_settings_are_ignored(model: str, tmp_path: Path) -> None:
    transformers = importlib.import_module("transformers")
    folder = tmp_path / "greedy"
    network = transformers.AutoModelForCausalLM.from_pretrained(model)
    network.generation_config = transformers.GenerationConfig(do_sample=True, top_k=1, repetition_penalty=3.0)
    network.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    options = SamplingOptions(max_new_tokens=4)
    assert LocalModel(str(folder)).sample("tea ?", 6, options, 1) == LocalModel(model).sample("tea ?", 6, options, 1)


def test_running_out_of_memory_halves_the_batch(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = importlib.import_module("torch")
    local, sizes, whole = LocalModel(model), [], LocalModel.continuations

    def limited(self: LocalModel, tokens: Any, n: int, options: SamplingOptions) -> Any:
        sizes.append(n)
        if n > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, tokens, n, options)

    monkeypatch.setattr(LocalModel, "continuations", limited)
    monkeypatch.setattr(causal, "SAMPLES_AT_ONCE", 8)
    local._at_once = 8
    assert len(local.sample("tea ?", 7, SamplingOptions(max_new_tokens=2), seed=0)) == 7
    assert sizes == [7, 4, 2, 2, 2, 1]


def test_a_response_counts_as_cut_off_if_more_tokens_would_follow(model: str) -> None:
    local = LocalModel(model)
    short, long = (local.sample("tea ?", 32, SamplingOptions(max_new_tokens=n), seed=0) for n in (6, 18))
    ended = [completion.finish_reason == "stop" for completion in short]
    assert [completion.cut_off for completion in short] == [not end for end in ended]
    assert 0 < sum(ended) < 32
    is_longer = [len(more.text) > len(completion.text) for completion, more in zip(short, long, strict=True)]
    assert not any(end and more for end, more in zip(ended, is_longer, strict=True))
    assert sum(is_longer) > 0.8 * (32 - sum(ended)), "all but those whose next token is the end token"
