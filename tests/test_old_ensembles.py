"""Ensembles saved by version 0.1, before results were typed, still load, and every command reads them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run

from pluralign import RewardEnsemble
from pluralign.ensemble.folder import ENSEMBLE_FILE
from pluralign.ensemble.held_out import load_held_out

DATA = Path(__file__).with_name("data")
OLD, PRUNED = DATA / "ensemble-0.1", DATA / "pruned-0.1"


def facts_of(folder: Path) -> dict[str, object]:
    facts: dict[str, object] = json.loads((folder / ENSEMBLE_FILE).read_text(encoding="utf-8"))["facts"]
    return facts


def parts_of(new: Any, old: Any) -> Any:
    """Return the parts of new JSON that have a counterpart in the old: later versions may add keys to objects."""
    if isinstance(old, dict):
        return {key: parts_of(new[key], item) for key, item in old.items() if key in new}
    if isinstance(old, list) and len(old) == len(new):
        return [parts_of(*items) for items in zip(new, old, strict=True)]
    return new


def test_rewards_and_weights_are_unchanged() -> None:
    ensemble, expected = RewardEnsemble.load(OLD), json.loads((DATA / "ensemble-0.1.json").read_text())
    items = [("Tea?", "Yes, please."), ("Tea?", "No, thank you; I would rather have a coffee.")]
    np.testing.assert_allclose(ensemble.rewards(items), expected["rewards"], rtol=1e-9)
    assert ensemble.weights.tolist() == expected["weights"]


@pytest.mark.parametrize("folder", [OLD, PRUNED], ids=lambda folder: folder.name)
def test_the_record_is_read_without_loss(folder: Path, tmp_path: Path) -> None:
    ensemble = RewardEnsemble.load(folder)
    read = ensemble.record.to_json()
    assert parts_of(read, facts_of(folder)) == facts_of(folder)
    ensemble.save(tmp_path)
    assert facts_of(tmp_path) == read


@pytest.mark.parametrize("folder", [OLD, PRUNED], ids=lambda folder: folder.name)
def test_figures_that_version_0_1_did_not_have_are_neutral(folder: Path) -> None:
    ensemble, record = RewardEnsemble.load(folder), RewardEnsemble.load(folder).record
    assert ensemble.undecided == 0
    assert {row.undecided for row in record.history} == {0.0}
    assert record.evaluation is not None
    assert record.evaluation.undecided == 0
    assert np.isnan(record.evaluation.test.absolute_error)
    assert np.isnan(record.evaluation.baselines["soft_bt"].absolute_error)


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
