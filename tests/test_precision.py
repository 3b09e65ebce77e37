"""Precision: bfloat16 only where it is fast and agrees, refused where it ends the process, and never mixed."""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run
from tiny import write_backbone

from pluralign import fit, town_hall
from pluralign.core.arrays import Vectors
from pluralign.core.distributed import Processes
from pluralign.core.errors import DataError, UsageError
from pluralign.ensemble.ensemble import RewardEnsemble, texts_of
from pluralign.features import encoder as encoders
from pluralign.features import precision
from pluralign.features.encoder import HashingEncoder, ModelEncoder, load_encoder
from pluralign.features.frozen import TextFeatures
from pluralign.features.options import Precision
from pluralign.features.precision import Trial, agreement, choose_precision, findings, in_precision, try_bfloat16
from pluralign.scale.jobs import encode
from pluralign.training.options import FitOptions

VOTES = town_hall(300).preferences
GOOD = Trial(works=True, speedup=2.0, agreement=0.9998)
DEADLY = Trial(ended="signal SIGILL")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"hidden_size": 16, "intermediate_size": 40}')
    return path


@pytest.fixture
def encoder(folder: Path) -> ModelEncoder:
    found = load_encoder(str(folder))
    assert isinstance(found, ModelEncoder)
    return found


@pytest.fixture
def without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose vectors are hashed words, a little off in bfloat16: what they would multiply may kill this CPU."""

    def vectors(encoder: ModelEncoder, items: Any) -> Vectors:
        return np.asarray(HashingEncoder(32).encode(items) * np.float32(1.01 if encoder.half else 1.0))

    monkeypatch.setattr(ModelEncoder, "encode", vectors)


def answer(monkeypatch: pytest.MonkeyPatch, trial: Trial) -> None:
    monkeypatch.setattr(precision, "try_bfloat16", lambda *_, **__: trial)


# --- which it is ----------------------------------------------------------------------------------------------------


def test_float32_leaves_an_encoder_and_its_identity_as_they_are(encoder: ModelEncoder) -> None:
    assert in_precision(encoder, "float32") is encoder
    assert encoder.identity.endswith("//mean/left")
    assert not encoder.half


def test_bfloat16_has_vectors_of_its_own_in_the_cache(folder: Path) -> None:
    encoder = load_encoder(str(folder), layer=3, pooling="last")
    assert isinstance(encoder, ModelEncoder)
    half = in_precision(encoder, "bfloat16")
    assert isinstance(half, ModelEncoder)
    assert half.identity == f"{encoder.identity}/bfloat16"
    same = replace(encoder, identity=half.identity, half=True)
    assert vars(half) == vars(same), "and all other dials are kept"


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "auto"])
def test_encoders_without_a_model_have_no_choice(asked: Precision) -> None:
    assert in_precision(None, asked) is None
    assert in_precision(HashingEncoder(), asked) == HashingEncoder()
    assert TextFeatures("hashing", precision=asked).settled().precision == "float32"


@pytest.mark.parametrize(
    ("trial", "objection"),
    [
        (GOOD, ""),
        (replace(GOOD, speedup=precision.MIN_SPEEDUP, agreement=precision.MIN_AGREEMENT), ""),
        (replace(GOOD, speedup=1.19), "a layer of its shape is 1.19 × as fast in bfloat16, and 1.2 × is wanted"),
        (replace(GOOD, agreement=0.9989), "vectors in bfloat16 agree to 0.9989, and 0.999 is wanted"),
        (replace(GOOD, agreement=float("nan")), "vectors in bfloat16 agree to nan, and 0.999 is wanted"),
        (replace(GOOD, ended="signal SIGKILL"), "the trial of bfloat16 ended early (signal SIGKILL)"),
        (DEADLY, "a bfloat16 product does not work here (signal SIGILL)"),
    ],
)
def test_auto_is_bfloat16_only_where_nothing_speaks_against_it(
    encoder: ModelEncoder,
    trial: Trial,
    objection: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer(monkeypatch, trial)
    with caplog.at_level(logging.WARNING):
        assert choose_precision(encoder, "auto") == ("float32" if objection else "bfloat16")
    assert [record.getMessage() for record in caplog.records] == (
        [f"texts are read in float32: {objection}."] if objection else []
    )


def test_what_is_asked_for_outright_is_not_tried_before_a_text_is_read(
    encoder: ModelEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "try_bfloat16", None)  # a call would fail
    assert [choose_precision(encoder, asked) for asked in ("float32", "bfloat16")] == ["float32", "bfloat16"]


def test_of_several_processes_the_first_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, DEADLY)
    monkeypatch.setattr(Processes, "agreed", lambda *_: "bfloat16")  # as broadcast by the first
    features = TextFeatures(str(folder), precision="auto")
    assert features.settled(Processes(2, rank=1)).precision == "bfloat16"


def test_an_unknown_precision_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="precision cannot be 'bfloat'; did you mean 'bfloat16'"):
        fit(VOTES, precision="bfloat")
    with pytest.raises(UsageError, match="precision cannot be 'float23'; did you mean 'float32'"):
        encode(VOTES, "nowhere", precision="float23")


# --- the trial ------------------------------------------------------------------------------------------------------


def test_agreement_is_not_blind_to_what_all_texts_have_in_common() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((20, 8)).astype(np.float32)
    moved = vectors + rng.standard_normal((20, 8)).astype(np.float32)
    common = np.float32(1000)
    plain = np.sum((vectors + common) * (moved + common), axis=1)
    plain /= np.linalg.norm(vectors + common, axis=1) * np.linalg.norm(moved + common, axis=1)
    assert plain.min() > 0.999
    assert agreement(vectors + common, moved + common) == pytest.approx(agreement(vectors, moved), abs=1e-3)
    assert agreement(vectors, moved) < 0.9
    assert agreement(vectors, vectors) == pytest.approx(1.0)


@pytest.mark.slow
def test_the_parts_of_a_trial_come_in_order_and_stop_at_the_first_objection(
    encoder: ModelEncoder, without_products: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    task: dict[str, Any] = {"folder": str(encoder.folder), "layer": None, "pooling": "mean", "only_a_product": False}
    task["shape"] = encoder.layer_shape
    assert task["shape"] == (16, 40)
    seconds = {"torch.float32": 3.0, "torch.bfloat16": 2.0}
    monkeypatch.setattr(precision, "_seconds", lambda layer: seconds[str(layer.weight.dtype)])
    first, second, third = findings(task)
    assert (first, second) == ({"works": True}, {"works": True, "speedup": 1.5})
    assert third["agreement"] == pytest.approx(1.0, abs=1e-3)
    assert list(findings(task | {"only_a_product": True})) == [{"works": True}]
    seconds["torch.bfloat16"] = 4.0
    assert list(findings(task)) == [{"works": True}, {"works": True, "speedup": 0.75}], "and no model is loaded"


@pytest.mark.slow
@pytest.mark.parametrize(("native", "speedup"), [(True, float("inf")), (False, 0.0)])
def test_a_gpu_is_fast_where_it_has_bfloat16_of_its_own(
    encoder: ModelEncoder, without_products: None, native: bool, speedup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *, including_emulation: native or including_emulation)
    found: dict[str, Any] = {}
    for finding in findings({"folder": str(encoder.folder), "layer": None, "pooling": "mean"}):
        found |= finding
    assert found["speedup"] == speedup
    assert ("agreement" in found) == native


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "echo '{\"works\": true}'; echo hello; echo '{\"speedup\": Infinity}'",
            Trial(works=True, speedup=float("inf")),
        ),
        ("kill -ILL $$", Trial(ended="signal SIGILL")),
        ("echo '{\"works\": true}'; kill -KILL $$", Trial(works=True, ended="signal SIGKILL")),
        ("echo Oh! >&2; echo No torch. >&2; exit 1", Trial(ended="No torch.")),
        ("echo '{\"works\": true}'; exec sleep 60", Trial(works=True, ended="more than 0.5 seconds")),
    ],
)
def test_however_the_child_process_ends_what_it_found_is_kept(
    encoder: ModelEncoder, script: str, expected: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "python"
    child.write_text(f"#!/bin/sh\n{script}\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    monkeypatch.setattr(precision, "TRIAL_SECONDS", 0.5)
    assert try_bfloat16.__wrapped__(encoder) == expected


@pytest.mark.slow
def test_the_real_trial_never_ends_this_process(tmp_path: Path) -> None:
    encoder = load_encoder(str(write_backbone(tmp_path / "model")))
    assert isinstance(encoder, ModelEncoder)
    trial = try_bfloat16(encoder)
    assert trial.works == (trial.ended == "") == (trial.speedup > 0)
    assert (trial.agreement != 0) == (trial.speedup >= precision.MIN_SPEEDUP)
    half: Any = in_precision(encoder, "bfloat16")
    if trial.works:
        assert half.encode(texts_of(VOTES)[:3]).dtype == np.float32
    else:
        with pytest.raises(UsageError, match="this CPU cannot multiply in bfloat16"):
            half.encode(texts_of(VOTES)[:3])


@pytest.mark.slow
def test_bfloat16_on_a_cpu_that_dies_of_it_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, DEADLY)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    encoders._loaded.cache_clear()
    model = write_backbone(tmp_path / "model")
    expected = (
        "this CPU cannot multiply in bfloat16 (signal SIGILL): use --precision float32 or auto; "
        "an ensemble that was fitted in bfloat16 needs another machine."
    )
    with pytest.raises(UsageError) as caught:
        fit(VOTES, encoder=str(model), precision="bfloat16", k=1)
    assert str(caught.value) == expected


# --- what is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_products")
def test_an_ensemble_keeps_the_precision_that_was_used_and_not_auto(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, GOOD)
    options = FitOptions(encoder=str(folder), precision="auto", k=1)
    fitted = fit(VOTES, options, folder=tmp_path / "town")
    saved = json.loads((tmp_path / "town" / "ensemble.json").read_text())
    assert saved["features"]["precision"] == saved["facts"]["options"]["precision"] == "bfloat16"
    assert saved["features"]["identity"].endswith("/bfloat16")
    answer(monkeypatch, DEADLY)  # another machine
    features = RewardEnsemble.load(tmp_path / "town").features
    assert isinstance(features, TextFeatures)
    assert features == fitted.features
    encoder = features.load_checked()
    assert isinstance(encoder, ModelEncoder)
    assert encoder.half
    with pytest.raises(DataError, match="the encoder is not the one the ensemble was fitted with"):
        replace(features, precision="float32").load_checked()


@pytest.mark.usefixtures("without_products")
def test_an_ensemble_from_before_there_was_a_choice_is_in_float32(folder: Path, tmp_path: Path) -> None:
    fit(VOTES, encoder=str(folder), k=1, folder=tmp_path / "town")
    path = tmp_path / "town" / "ensemble.json"
    saved = json.loads(path.read_text())
    assert saved["features"].pop("precision") == "float32"
    path.write_text(json.dumps(saved))
    features = RewardEnsemble.load(tmp_path / "town").features
    assert isinstance(features, TextFeatures)
    assert features.precision == "float32"
    assert features.load_checked() == load_encoder(str(folder))


@pytest.mark.usefixtures("without_products")
def test_stored_features_say_their_precision_and_are_not_taken_for_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, GOOD)
    done = encode(VOTES, tmp_path / "features", encoder=str(folder), precision="auto")
    assert (
        done.precision == json.loads((tmp_path / "features" / "features.json").read_text())["precision"] == "bfloat16"
    )
    assert done.identity.endswith("/bfloat16")
    with pytest.raises(DataError, match="it holds work with precision bfloat16"):
        encode(VOTES, tmp_path / "features", encoder=str(folder))
    stored: dict[str, Any] = {"encoder": str(folder), "features": str(tmp_path / "features"), "k": 1}
    with pytest.raises(DataError, match="name the same encoder, layer, pooling and precision"):
        fit(VOTES, **stored)
    features = fit(VOTES, **stored, precision="bfloat16").features
    assert isinstance(features, TextFeatures)
    assert features.precision == "bfloat16"


@pytest.mark.usefixtures("without_products")
def test_features_from_before_there_was_a_choice_are_done_already(folder: Path, tmp_path: Path) -> None:
    encode(VOTES, tmp_path / "features", encoder=str(folder))
    path = tmp_path / "features" / "features.json"
    facts = json.loads(path.read_text())
    assert facts.pop("precision") == facts["settings"].pop("precision") == "float32"
    path.write_text(json.dumps(facts))
    again = encode(VOTES, tmp_path / "features", encoder=str(folder))
    assert again.resumed == again.shards == 1


def test_precision_is_not_for_models_that_are_fine_tuned(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="precision is about frozen features and has no use beside --backbone"):
        fit(VOTES, folder=tmp_path, backbone="smollm2", precision="bfloat16")


def test_the_command_line_has_the_flag_for_fit_and_encode() -> None:
    for command in ("fit", "encode"):
        assert "--precision" in run(command, "--help").stdout
