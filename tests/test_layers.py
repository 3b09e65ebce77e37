"""The option ``layers``: its values, and features that were saved before it existed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run

from pluralign import encode, fit
from pluralign.core.errors import DataError, UsageError
from pluralign.learning import joint
from pluralign.text.encoders import load_encoder
from pluralign.text.features import TextFeatures
from pluralign.text.options import EncodeOptions, choose_layers, layers_from_layer, layers_text, parse_layers
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.town_hall.town_hall import town_hall

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
    for name in ("hashing", "none"):
        with pytest.raises(UsageError, match=f"--layers requires an encoder that is a transformers model, not {name}"):
            load_encoder(name, layers="0,2")


def test_the_earlier_option_layer_had_a_meaning_only_for_decoders() -> None:
    decoder = {"num_hidden_layers": 30, "architectures": DECODER}
    assert layers_from_layer(None, decoder, "", own=False) == (20,)
    assert layers_from_layer(7, decoder, "", own=False) == (7,)
    assert layers_from_layer(7, decoder, "", own=True) == ()
    assert layers_from_layer(7, {"num_hidden_layers": 6}, "", own=False) == ()


def test_features_are_read_from_json_with_layers_and_with_layer() -> None:
    new = TextFeatures("minilm", "0,2", surface=False)
    assert new.to_json()["layers"] == "0,2"
    assert "layer" not in new.to_json()
    assert TextFeatures.from_json(new.to_json()) == new
    values = {"encoder": "smollm2", "layer": 7, "pooling": "mean", "surface": True, "identity": "smollm2/7/mean/left"}
    old = TextFeatures.from_json(values)
    assert (old.layers, old.layer) == (None, 7)
    assert values.items() <= old.to_json().items(), "saved again as it was"
    assert "layers" not in old.to_json()


@pytest.mark.slow
def test_minilm_has_four_layers_by_default() -> None:
    encoder = load_encoder("minilm")
    assert isinstance(encoder, ModelEncoder)
    assert encoder.layers == (0, 2, 4, 6)
    assert encoder.identity == "minilm-53aa51172d142c89/layers 0,2,4,6/left"
    features = TextFeatures("minilm").with_chosen_layers()
    assert (features.layers, features.n_layers) == ("0,2,4,6", 4)
    last = TextFeatures.from_json({"encoder": "minilm", "layer": None, "identity": "minilm-53aa51172d142c89/left"})
    assert last.n_layers == 1
    items = [("Tea?", "Yes."), ("Tea?", "No, never.")]
    vectors, own = features(items), last(items)
    assert (vectors.shape, own.shape) == ((2, 4 * 384 + 20), (2, 384 + 20))
    normalised = vectors[:, 3 * 384 : -20] / np.linalg.norm(vectors[:, 3 * 384 : -20], axis=1, keepdims=True)
    np.testing.assert_allclose(normalised, own[:, :-20], atol=1e-5)


@pytest.mark.slow
def test_features_stored_before_layers_existed_are_fitted_with_the_default_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint, "STEPS", 5)
    votes = town_hall(40).preferences
    encode(votes, tmp_path / "features", layers="last")
    path = tmp_path / "features" / "features.json"
    described = json.loads(path.read_text())
    assert described.pop("layers") == "last"
    path.write_text(json.dumps(described | {"layer": None}))
    ensemble = fit(votes, k=2, features=str(tmp_path / "features"), folder=tmp_path / "dir")
    assert isinstance(ensemble.features, TextFeatures)
    assert ensemble.features.layers is None
    assert ensemble.features.identity == described["identity"] == "minilm-53aa51172d142c89/left"
    with pytest.raises(DataError, match="use the same encoder, layers, pooling and precision"):
        fit(votes, k=2, features=str(tmp_path / "features"), layers="0,6")


def test_bad_layers_are_one_sentence_on_the_command_line(tmp_path: Path) -> None:
    for command in ("fit", "encode"):
        done = run(command, "demo:200", "-o", tmp_path / command, "--layers", "two")
        assert done.returncode == 2
        assert "layers must be auto, last, or numbers such as 0,2,4,6, not 'two'." in " ".join(done.stderr.split())
