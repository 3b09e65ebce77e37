"""``fit`` and ``prune`` replace no ensemble of other data by mistake, and leave files of others alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from pluralign import RewardEnsemble, UsageError, fit, prune, town_hall
from pluralign.ensemble.held_out import load_held_out

VOTES, OTHER = town_hall(60).preferences, town_hall(80).preferences
OPTIONS: dict[str, Any] = {"k": 2, "encoder": "none", "method": "stagewise"}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitted")
    fit(VOTES, folder=folder, **OPTIONS)
    return folder


@pytest.fixture
def copy(fitted: Path, tmp_path: Path) -> Path:
    return shutil.copytree(fitted, tmp_path / "x")


def test_the_same_fit_may_be_repeated(copy: Path) -> None:
    before = RewardEnsemble.load(copy).identity
    fit(VOTES, folder=copy, **OPTIONS)
    assert RewardEnsemble.load(copy).identity == before


@pytest.mark.parametrize(
    ("votes", "changes", "message"),
    [
        (OTHER, {}, "holds an ensemble of other votes: name another folder, or use overwrite=True"),
        (VOTES, {"k": 3}, r"was fitted with other options \(k\): name another folder, or use overwrite=True"),
        (VOTES, {"seed": 1, "level": "policy", "method": "joint"}, r"other options \(method, level, seed\)"),
    ],
)
def test_another_fit_needs_overwrite(copy: Path, votes: Any, changes: dict[str, Any], message: str) -> None:
    (copy / "notes.txt").write_text("mine")
    before = files_of(copy)
    with pytest.raises(UsageError, match=message):
        fit(votes, folder=copy, **OPTIONS | changes)
    assert files_of(copy) == before
    fit(votes, folder=copy, overwrite=True, **OPTIONS | changes)
    assert (copy / "notes.txt").read_text() == "mine"
    data: Any = RewardEnsemble.load(copy).record.data
    assert data.fingerprint == votes.fingerprint
    assert len(files_of(copy)) == len(before)


def test_an_ensemble_that_cannot_be_read_needs_overwrite(copy: Path) -> None:
    (copy / "ensemble.json").write_text("{")
    with pytest.raises(UsageError, match="holds an ensemble that cannot be read"):
        fit(VOTES, folder=copy, **OPTIONS)
    fit(VOTES, folder=copy, overwrite=True, **OPTIONS)
    load_held_out(copy)


def test_pruning_replaces_a_pruning_of_the_same_ensemble_only(copy: Path, tmp_path: Path) -> None:
    pruning = prune(RewardEnsemble.load(copy), load_held_out(copy), beta=3, only_far=False)
    pruning.save(tmp_path / "p", source=copy)
    pruning.save(tmp_path / "p", source=copy)
    fit(OTHER, folder=tmp_path / "other", **OPTIONS)
    before = files_of(tmp_path / "other")
    with pytest.raises(UsageError, match="overwrite"):
        pruning.save(tmp_path / "other", source=copy)
    assert files_of(tmp_path / "other") == before
    pruning.save(tmp_path / "other", source=copy, overwrite=True)
    assert RewardEnsemble.load(tmp_path / "other").identity == RewardEnsemble.load(tmp_path / "p").identity
    with pytest.raises(UsageError, match="holds the original ensemble"):
        pruning.save(copy, source=copy, overwrite=True)
