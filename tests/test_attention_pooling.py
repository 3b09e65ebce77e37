"""Attention pooling against a slow reference, in every reader of texts, and its training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from tiny import write_sentence_encoder

from pluralign.learning import trained_pooling as attention
from pluralign.learning.backbone.recipe import TextPairs
from pluralign.learning.trained_pooling import NETWORKS, AttentionNetworks, FrozenMixture, train_attention
from pluralign.publishing.export import describe_reader
from pluralign.publishing.standalone import reward_model
from pluralign.text import bert
from pluralign.text.encoders import load_encoder
from pluralign.text.features import TextFeatures
from pluralign.text.pooling import ATTENTION_FILE, attention_pool, load_attention
from pluralign.text.states import TokenStates, read_token_states
from pluralign.text.transformer import ModelEncoder

pytestmark = pytest.mark.usefixtures("one_torch_thread")
MIDDLE_LAYER = 1
TEXTS = [("so ?", "tea and rum"), ("so ?", "tea"), ("so ?", "rum and rum and tea and milk"), ("why ?", "")]


def random_weights(width: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"query": (2, 3, width), "bias": (2, 3), "value": (2, 3, width, 4)}
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def save_weights(folder: Path, seed: int = 0) -> None:
    saved = random_weights(8, seed) | {"layer": torch.tensor(MIDDLE_LAYER)}
    safetensors.torch.save_file(saved, folder / ATTENTION_FILE)


@pytest.fixture
def encoder(tmp_path: Path) -> ModelEncoder:
    folder = write_sentence_encoder(tmp_path / "encoder")
    save_weights(folder)
    loaded = load_encoder(str(folder), layers="0,1,2")
    assert isinstance(loaded, ModelEncoder)
    return loaded


def reference(states: Any, weights: dict[str, Any]) -> Any:
    """The formula of the module, one text, network, head and output at a time. ``states`` is ``(n_tokens, d)``."""
    states, parts = (
        np.asarray(states, dtype=np.float64),
        {name: part.double().numpy() for name, part in weights.items()},
    )
    states = (states - states.mean(1, keepdims=True)) / np.sqrt(states.var(1, keepdims=True) + 1e-5)
    result = []
    for network in range(parts["bias"].shape[0]):
        for output in range(parts["value"].shape[3]):
            total = 0.0
            for head in range(parts["bias"].shape[1]):
                logits = [
                    float(parts["query"][network, head] @ state) + parts["bias"][network, head] for state in states
                ]
                attention = np.exp(logits) / np.sum(np.exp(logits))
                pooled = sum(share * state for share, state in zip(attention, states, strict=True))
                total += float(parts["value"][network, head, :, output] @ pooled)
            result.append(total)
    return result


def test_pooling_equals_its_formula_and_ignores_padding() -> None:
    states, weights = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)), random_weights(8)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    pooled = attention_pool(states, mask, weights)
    assert pooled.shape == (3, 8)
    for row, length in enumerate((5, 2, 1)):
        np.testing.assert_allclose(pooled[row], reference(states[row, :length], weights), rtol=1e-4, atol=1e-5)
    states[1, 2:] = 100.0
    np.testing.assert_allclose(attention_pool(states, mask, weights), pooled, rtol=1e-5)


def test_all_readers_of_texts_append_the_trained_features(
    encoder: ModelEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in BERT, sentence-transformers, and exported scripts. The frozen features before them do not change."""
    own = encoder.load_model()
    assert isinstance(own, bert.BertReader)
    vectors = own.read(own.tokens([f"{prompt}\n\n{response}" for prompt, response in TEXTS]))
    assert vectors.shape == (4, 3 * 8 + 2 * 4)
    for row, states in enumerate(encoder.token_states(TEXTS, MIDDLE_LAYER)):
        np.testing.assert_allclose(vectors[row, 24:], reference(states, random_weights(8)), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(vectors[row, 8:16], states.mean(0), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(bert, "bert_reader", lambda *_, **__: None)
    other = encoder.load_model()
    assert not isinstance(other, bert.BertReader)
    read = other.encode([f"{prompt}\n\n{response}" for prompt, response in TEXTS])
    np.testing.assert_allclose(read, vectors, rtol=1e-3, atol=1e-4)
    features = TextFeatures(str(encoder.folder), layers="0,1,2")
    exported = reward_model._Encoder(encoder.folder.parent, describe_reader(features, encoder)).vectors(TEXTS)
    np.testing.assert_allclose(exported, vectors, rtol=1e-3, atol=1e-4)


def test_trained_features_are_part_of_the_identity_of_an_encoder(encoder: ModelEncoder) -> None:
    """Else the vector cache would return features of another training."""
    save_weights(encoder.folder, seed=1)
    other = load_encoder(str(encoder.folder), layers="0,1,2")
    assert other is not None
    assert other.identity != encoder.identity
    assert load_attention(encoder.folder.parent) is None


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("reader", ["built-in", "sentence-transformers"])
def test_token_states_in_a_file_are_those_of_the_encoder(
    encoder: ModelEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, layer: int
) -> None:
    expected = encoder.token_states(TEXTS, layer)
    if reader == "sentence-transformers":
        monkeypatch.setattr(ModelEncoder, "_model", property(_without_bert))
    calls: list[tuple[int, int]] = []
    stored = read_token_states(TEXTS, encoder, layer, tmp_path / "states", lambda *done: calls.append(done))
    assert calls[-1] == (4, 4)
    states, mask = stored.padded(np.array([2, 0]))
    assert mask.sum(1).tolist() == [len(expected[2]), len(expected[0])]
    for row, text in enumerate((2, 0)):
        np.testing.assert_allclose(states[row][mask[row]].float(), expected[text].float(), rtol=1e-2, atol=1e-2)


def _without_bert(encoder: ModelEncoder) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bert, "bert_reader", lambda *_, **__: None)
        return encoder.load_model()


def test_saved_weights_give_the_outputs_of_the_trained_networks_up_to_a_constant() -> None:
    generator = torch.Generator().manual_seed(3)
    networks = AttentionNetworks(8, 3, generator)
    states, mask = torch.randn(40, 6, 8, generator=generator), torch.rand(40, 6, generator=generator) < 0.7
    mask[:, 0] = True
    networks(states, mask)  # updates the running mean and variance
    with torch.no_grad():
        outputs = networks.eval()(states, mask).flatten(1)
    weights = {name: torch.from_numpy(part) for name, part in networks.weights().items()}
    pooled = attention_pool(states, mask, weights)
    np.testing.assert_allclose(pooled - pooled[:1], outputs - outputs[:1], rtol=1e-3, atol=1e-4)


def marked_texts(rng: np.random.Generator, n: int) -> tuple[TokenStates, Any]:
    """Return texts of four tokens. Their value is that of the token that is marked in the last dimension."""
    states = rng.standard_normal((n, 4, 8)).astype(np.float32)
    marked = rng.integers(4, size=n)
    states[:, :, -1] = -2
    states[np.arange(n), marked, -1] = 2
    value = states[np.arange(n), marked, 0]
    flat = torch.from_numpy(states.reshape(-1, 8)).bfloat16()
    return TokenStates(flat, np.arange(n) * 4, np.full(n, 4)), value


def test_training_learns_which_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over tokens does not show the value of the marked one; attention finds it, also in new texts."""
    rng = np.random.default_rng(0)
    states, value = marked_texts(rng, 600)
    a, b = np.arange(0, 600, 2, dtype=np.int32), np.arange(1, 600, 2, dtype=np.int32)
    prob_a = 1 / (1 + np.exp(-4.0 * (value[a] - value[b])))
    pairs = TextPairs([], a, b, prob_a, np.arange(300, dtype=np.int32))
    start = FrozenMixture(np.zeros((600, 3)), np.array([0.5, 0.5]), np.ones(300))
    calls: list[tuple[int, int]] = []
    for name, value in {"EPOCHS": 30, "LEARNING_RATE": 1e-2, "BATCH": 50}.items():
        monkeypatch.setattr(attention, name, value)
    weights = train_attention(states, pairs, start, 0, lambda *done: calls.append(done))
    assert calls[-1] == (180, 180)
    new, expected = marked_texts(rng, 200)
    parts = {name: torch.from_numpy(np.asarray(part)) for name, part in weights.items()}
    outputs = attention_pool(*new.padded(np.arange(200)), parts).view(200, NETWORKS, 3).mean(1)
    mean = new.states.view(200, 4, 8)[:, :, 0].float().mean(1)
    assert np.corrcoef(outputs[:, -1], expected)[0, 1] > 0.8
    assert np.corrcoef(mean, expected)[0, 1] < 0.6
    again = train_attention(states, pairs, start, 0)
    for name, part in weights.items():
        np.testing.assert_array_equal(part, again[name])
