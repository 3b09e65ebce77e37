"""Ensembles saved by version 0.1, before results were typed, still load, and every command reads them."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import run

from pluralign import RewardEnsemble
from pluralign.ensemble.ensemble import ENSEMBLE_FILE
from pluralign.ensemble.held_out import load_held_out

DATA = Path(__file__).with_name("data")
OLD, PRUNED = DATA / "ensemble-0.1", DATA / "pruned-0.1"


def facts_of(folder: Path) -> dict[str, object]:
    facts: dict[str, object] = json.loads((folder / ENSEMBLE_FILE).read_text(encoding="utf-8"))["facts"]
    return facts


def test_rewards_and_weights_are_unchanged() -> None:
    ensemble, expected = RewardEnsemble.load(OLD), json.loads((DATA / "ensemble-0.1.json").read_text())
    items = [("Tea?", "Yes, please."), ("Tea?", "No, thank you; I would rather have a coffee.")]
    np.testing.assert_allclose(ensemble.rewards(items), expected["rewards"], rtol=1e-9)
    assert ensemble.weights.tolist() == expected["weights"]


@pytest.mark.parametrize("folder", [OLD, PRUNED], ids=lambda folder: folder.name)
def test_the_record_is_read_without_loss(folder: Path, tmp_path: Path) -> None:
    ensemble = RewardEnsemble.load(folder)
    assert ensemble.record.to_json() == facts_of(folder)
    ensemble.save(tmp_path)
    assert facts_of(tmp_path) == facts_of(folder)


def test_the_record_is_typed() -> None:
    record = RewardEnsemble.load(PRUNED).record
    assert record.method == "stagewise"
    assert record.data is not None
    assert record.data.test_pairs == len(load_held_out(PRUNED).preferences)
    assert record.evaluation is not None
    assert (
        record.evaluation.baselines["soft_bt"].difference.low < record.evaluation.baselines["soft_bt"].difference.high
    )
    assert record.pruned is not None
    assert record.pruned.source == "ensemble-0.1"


@pytest.mark.parametrize("command", ["certify", "diversity", "profile"])
def test_commands_read_old_folders(command: str) -> None:
    done = run(command, OLD, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
