"""Precision: bfloat16 only where it is fast and agrees, an error where it would end the process, never mixed."""

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
from pluralign.core.errors import DataError, UsageError
from pluralign.core.processes import Processes
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import sealed
from pluralign.learning.options import FitOptions
from pluralign.scale.jobs import encode
from pluralign.text import precision
from pluralign.text import transformer as transformer_encoder
from pluralign.text.encoders import HashingEncoder, load_encoder
from pluralign.text.features import TextFeatures
from pluralign.text.options import Precision
from pluralign.text.precision import (
    Trial,
    TrialTask,
    agreement,
    choose_precision,
    in_precision,
    run_trial,
    try_bfloat16,
)
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.preferences import texts_of

VOTES = town_hall(300).preferences
GOOD = Trial(works=True, speedup=2.0, agreement=0.9998)
SIGILL = Trial(failure="signal SIGILL")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"hidden_size": 16, "intermediate_size": 40}')
    return path


@pytest.fixture
def encoder(folder: Path) -> ModelEncoder:
    loaded = load_encoder(str(folder))
    assert isinstance(loaded, ModelEncoder)
    return loaded


@pytest.fixture
def without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose vectors are hashed words, slightly different in bfloat16: real products may end this process."""

    def vectors(encoder: ModelEncoder, items: Any) -> Vectors:
        return np.asarray(HashingEncoder(32).encode(items) * np.float32(1.01 if encoder.half else 1.0))

    monkeypatch.setattr(ModelEncoder, "encode", vectors)


def set_trial(monkeypatch: pytest.MonkeyPatch, trial: Trial) -> None:
    monkeypatch.setattr(precision, "try_bfloat16", lambda *_, **__: trial)


# --- the choice -------------------------------------------------------------------------------------------------------


def test_float32_does_not_change_an_encoder(encoder: ModelEncoder) -> None:
    assert in_precision(encoder, "float32") is encoder
    assert encoder.identity.endswith("//mean/left")
    assert not encoder.half


def test_bfloat16_has_its_own_vectors_in_the_cache(folder: Path) -> None:
    (folder / "config.json").write_text('{"num_hidden_layers": 2}')
    encoder = load_encoder(str(folder), layers="1,2", pooling="last")
    assert isinstance(encoder, ModelEncoder)
    half = in_precision(encoder, "bfloat16")
    assert isinstance(half, ModelEncoder)
    assert half.identity == f"{encoder.identity}/bfloat16"
    same = replace(encoder, identity=half.identity, half=True)
    assert vars(half) == vars(same), "all other settings are kept"


@pytest.mark.parametrize("requested", ["float32", "bfloat16", "auto"])
def test_encoders_without_a_model_are_in_float32(requested: Precision) -> None:
    assert in_precision(None, requested) is None
    assert in_precision(HashingEncoder(), requested) == HashingEncoder()
    assert TextFeatures("hashing", precision=requested).with_chosen_precision().precision == "float32"


@pytest.mark.parametrize(
    ("trial", "reason"),
    [
        (GOOD, ""),
        (replace(GOOD, speedup=precision.MIN_SPEEDUP, agreement=precision.MIN_AGREEMENT), ""),
        (replace(GOOD, speedup=1.19), "a layer of this shape is 1.19 × as fast in bfloat16 as in float32, below 1.2 ×"),
        (replace(GOOD, agreement=0.9989), "the agreement of bfloat16 vectors is 0.9989, below 0.999"),
        (replace(GOOD, agreement=float("nan")), "the agreement of bfloat16 vectors is nan, below 0.999"),
        (replace(GOOD, failure="signal SIGKILL"), "the trial of bfloat16 ended early (signal SIGKILL)"),
        (SIGILL, "bfloat16 does not work on this machine (signal SIGILL)"),
    ],
)
def test_auto_chooses_bfloat16_unless_the_trial_gives_a_reason_against_it(
    encoder: ModelEncoder,
    trial: Trial,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_trial(monkeypatch, trial)
    with caplog.at_level(logging.WARNING):
        assert choose_precision(encoder, "auto") == ("float32" if reason else "bfloat16")
    assert [record.getMessage() for record in caplog.records] == (
        [f"texts are encoded in float32: {reason}."] if reason else []
    )


def test_an_explicit_precision_needs_no_trial_before_the_first_text(
    encoder: ModelEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "try_bfloat16", None)  # a call would fail
    assert [choose_precision(encoder, requested) for requested in ("float32", "bfloat16")] == ["float32", "bfloat16"]


def test_the_first_of_several_processes_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_trial(monkeypatch, SIGILL)
    monkeypatch.setattr(Processes, "agreed", lambda *_: "bfloat16")  # as broadcast by the first
    features = TextFeatures(str(folder), precision="auto")
    assert features.with_chosen_precision(Processes(2, rank=1)).precision == "bfloat16"


def test_an_unknown_precision_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="precision cannot be 'bfloat'; did you mean 'bfloat16'"):
        fit(VOTES, precision="bfloat")
    with pytest.raises(UsageError, match="precision cannot be 'float23'; did you mean 'float32'"):
        encode(VOTES, "nowhere", precision="float23")


# --- the trial --------------------------------------------------------------------------------------------------------


def test_agreement_ignores_the_mean_of_all_texts() -> None:
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
def test_a_trial_runs_in_steps_and_stops_at_the_first_reason_against_bfloat16(
    encoder: ModelEncoder, without_products: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    task = TrialTask(str(encoder.folder), (), "mean", encoder.layer_shape)
    assert task.shape == (16, 40)
    seconds = {"torch.float32": 3.0, "torch.bfloat16": 2.0}
    monkeypatch.setattr(precision, "_seconds", lambda layer: seconds[str(layer.weight.dtype)])
    first, second, third = run_trial(task)
    assert (first, second) == (Trial(works=True), Trial(works=True, speedup=1.5))
    assert third.agreement == pytest.approx(1.0, abs=1e-3)
    assert list(run_trial(replace(task, product_only=True))) == [Trial(works=True)]
    seconds["torch.bfloat16"] = 4.0
    assert list(run_trial(task)) == [Trial(works=True), Trial(works=True, speedup=0.75)], "no model is loaded"


@pytest.mark.slow
@pytest.mark.parametrize(("native", "speedup"), [(True, float("inf")), (False, 0.0)])
def test_a_gpu_is_fast_if_it_supports_bfloat16_natively(
    encoder: ModelEncoder, without_products: None, native: bool, speedup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *, including_emulation: native or including_emulation)
    *_, trial = run_trial(TrialTask(str(encoder.folder), (), "mean", encoder.layer_shape))
    assert trial.speedup == speedup
    assert (trial.agreement > 0) == native


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "echo '{\"works\": true}'; echo hello; echo '{\"speedup\": Infinity}'",
            Trial(works=True, speedup=float("inf")),
        ),
        ("kill -ILL $$", Trial(failure="signal SIGILL")),
        ("echo '{\"works\": true}'; kill -KILL $$", Trial(works=True, failure="signal SIGKILL")),
        ("echo Oh! >&2; echo No torch. >&2; exit 1", Trial(failure="No torch.")),
        ("echo '{\"works\": true}'; exec sleep 60", Trial(works=True, failure="more than 0.5 seconds")),
    ],
)
def test_results_from_before_the_child_process_fails_are_kept(
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
    assert trial.works == (trial.failure == "") == (trial.speedup > 0)
    assert (trial.agreement != 0) == (trial.speedup >= precision.MIN_SPEEDUP)
    half: Any = in_precision(encoder, "bfloat16")
    if trial.works:
        assert half.encode(texts_of(VOTES)[:3]).dtype == np.float32
    else:
        with pytest.raises(UsageError, match="this CPU cannot multiply in bfloat16"):
            half.encode(texts_of(VOTES)[:3])


@pytest.mark.slow
def test_bfloat16_on_a_cpu_that_raises_sigill_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_trial(monkeypatch, SIGILL)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    transformer_encoder._loaded.cache_clear()
    model = write_backbone(tmp_path / "model")
    expected = (
        "this CPU cannot multiply in bfloat16 (signal SIGILL): use --precision float32 or auto; "
        "an ensemble that was fitted in bfloat16 needs another machine."
    )
    with pytest.raises(UsageError) as caught:
        fit(VOTES, encoder=str(model), precision="bfloat16", k=1)
    assert str(caught.value) == expected


# --- what is stored ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_products")
def test_an_ensemble_stores_the_precision_that_was_used_instead_of_auto(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_trial(monkeypatch, GOOD)
    options = FitOptions(encoder=str(folder), precision="auto", k=1)
    fitted = fit(VOTES, options, folder=tmp_path / "town")
    saved = json.loads((tmp_path / "town" / "ensemble.json").read_text())
    assert saved["features"]["precision"] == saved["facts"]["options"]["precision"] == "bfloat16"
    assert saved["features"]["identity"].endswith("/bfloat16")
    set_trial(monkeypatch, SIGILL)  # another machine
    features = RewardEnsemble.load(tmp_path / "town").features
    assert isinstance(features, TextFeatures)
    assert features == fitted.features
    encoder = features.load_checked()
    assert isinstance(encoder, ModelEncoder)
    assert encoder.half
    with pytest.raises(DataError, match="the encoder is not the one the ensemble was fitted with"):
        replace(features, precision="float32").load_checked()


@pytest.mark.usefixtures("without_products")
def test_an_ensemble_without_a_stored_precision_is_in_float32(folder: Path, tmp_path: Path) -> None:
    fit(VOTES, encoder=str(folder), k=1, folder=tmp_path / "town")
    path = tmp_path / "town" / "ensemble.json"
    saved = json.loads(path.read_text())
    assert saved["features"].pop("precision") == "float32"
    path.write_text(json.dumps(sealed({name: value for name, value in saved.items() if name != "sha256"})))
    features = RewardEnsemble.load(tmp_path / "town").features
    assert isinstance(features, TextFeatures)
    assert features.precision == "float32"
    assert features.load_checked() == load_encoder(str(folder))


@pytest.mark.usefixtures("without_products")
def test_stored_features_are_used_only_in_their_own_precision(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_trial(monkeypatch, GOOD)
    encode(VOTES, tmp_path / "features", encoder=str(folder), precision="auto")
    described = json.loads((tmp_path / "features" / "features.json").read_text())
    assert described["precision"] == "bfloat16"
    assert described["identity"].endswith("/bfloat16")
    with pytest.raises(DataError, match="it holds a job with precision bfloat16"):
        encode(VOTES, tmp_path / "features", encoder=str(folder))
    stored: dict[str, Any] = {"encoder": str(folder), "features": str(tmp_path / "features"), "k": 1}
    with pytest.raises(DataError, match="use the same encoder, layers, pooling and precision"):
        fit(VOTES, **stored)
    features = fit(VOTES, **stored, precision="bfloat16").features
    assert isinstance(features, TextFeatures)
    assert features.precision == "bfloat16"


@pytest.mark.usefixtures("without_products")
def test_fit_and_encode_have_a_precision_option() -> None:
    for command in ("fit", "encode"):
        assert "--precision" in run(command, "--help").stdout
