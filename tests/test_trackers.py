"""Experiment trackers of a fine-tuning: what the Trainer gets, and what happens without their packages."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run, run_process
from tiny import two_camps, write_backbone

from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import UsageError
from pluralign.learning.backbone.batches import TextPairs
from pluralign.learning.backbone.losses import StageLoss
from pluralign.learning.backbone.recipe import check_trackers
from pluralign.learning.backbone.train import PairLabels, PairTrainer, Training, prepare_run
from pluralign.learning.options import FinetuneOptions
from pluralign.learning.tuned import decisive_tuning

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ONE_PAIR = TextPairs(
    [("so ?", "yes"), ("so ?", "no")],
    np.zeros(1, np.int32), np.ones(1, np.int32), np.array([0.5]), np.zeros(1, np.int32),
)  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_backbone(tmp_path_factory.mktemp("llama"))


def make_trainer(folder: Path, llama: Path, **changes: Any) -> PairTrainer:
    tuning = FinetuneOptions(backbone=str(llama), batch_size=8, optimizer="adamw", **changes)
    run = prepare_run(ONE_PAIR, tuning, 0, Checkpoints(folder / "town", {}))
    labels = PairLabels(ONE_PAIR.prob_a, ONE_PAIR.prob_a, np.ones(1))
    training = Training("member-0", 1, StageLoss(1.0), labels, lambda *_: np.zeros((32, 1)))
    return run.trainer(training, folder / "training-member-0", fit_head=False)


def test_no_tracker_gets_anything_by_default(tmp_path: Path, llama: Path) -> None:
    arguments = make_trainer(tmp_path, llama).args
    assert arguments.report_to == []
    assert arguments.logging_strategy == "no"


def test_trackers_and_the_name_of_the_run_are_passed_to_the_trainer(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package called wandb stands for the real one, so that the Trainer adds its callback."""
    (tmp_path / "packages" / "wandb").mkdir(parents=True)
    (tmp_path / "packages" / "wandb" / "__init__.py").write_text("run = None\n")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    utils = importlib.import_module("transformers.integrations.integration_utils")
    monkeypatch.setattr(utils, "is_wandb_available", lambda: True)
    check_trackers(FinetuneOptions(backbone="x", report_to="wandb"))
    for given, name in ({}, "town-member-0"), ({"run_name": "try"}, "try-member-0"):
        trainer = make_trainer(tmp_path, llama, report_to="wandb", **given)
        assert trainer.args.report_to == ["wandb"]
        assert trainer.args.run_name == name
        assert (trainer.args.logging_strategy, trainer.args.logging_steps) == ("steps", 1)
        kinds = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
        assert "WandbCallback" in kinds
        assert "PrinterCallback" not in kinds
    sys.modules.pop("wandb")


def test_an_uninstalled_tracker_is_one_sentence_before_training(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    votes = tmp_path / "camps.jsonl"
    votes.write_text("\n".join(map(json.dumps, two_camps(40))))
    done = run("fit", votes, "-o", tmp_path / "out", "--backbone", llama, "--report-to", "trackio")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pluralign: --report-to trackio needs the package trackio: run  pip install trackio.\n"
    assert not (tmp_path / "out").exists()


def test_stdout_is_for_results_with_trackers_too(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: transformers prints when it is imported, and a tracker may print at any time."""
    (tmp_path / "trackio.py").write_text("print('hello from the tracker')\nraise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    votes = tmp_path / "camps.jsonl"
    votes.write_text("\n".join(map(json.dumps, two_camps(40))))
    done = run_process("fit", votes, "-o", tmp_path / "out", "--backbone", llama, "--report-to", "trackio")
    assert (done.returncode, done.stdout) == (2, "")
    assert "hello from the tracker" in done.stderr


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"report_to": "wanbd"}, "there is no tracker 'wanbd'; did you mean 'wandb'?."),
        ({"report_to": "wandb,none"}, "there is no tracker 'none'; known are: trackio, wandb, tensorboard."),
        ({"run_name": "try"}, "--run-name requires --report-to."),
        ({"report_to": "wandb", "backbone": None}, "--report-to requires --backbone."),
    ],
)
def test_bad_trackers_are_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        FinetuneOptions(**({"backbone": "x"} | given))
    assert str(caught.value) == sentence


def test_trackers_do_not_decide_a_fit() -> None:
    """A killed run resumes with other trackers."""
    plain, tracked = FinetuneOptions(backbone="x"), FinetuneOptions(backbone="x", report_to="wandb", run_name="try")
    assert decisive_tuning(plain) == decisive_tuning(tracked)
