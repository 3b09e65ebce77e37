"""The folder of a saved ensemble: one ensemble at every moment, hashes of every file, and a schema."""

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from conftest import run
from test_ensemble import some_ensemble

from pluralign import DataError, RewardEnsemble, town_hall
from pluralign.ensemble import folder as folder_module
from pluralign.ensemble.folder import (
    ENSEMBLE_FILE,
    REPRESENTATION_FILE,
    REWARDS_FILE,
    VOTES_FILE,
    description_hash,
    read_description,
    sealed,
    write_file,
)
from pluralign.ensemble.held_out import has_held_out, held_out_files, load_held_out, score_held_out
from pluralign.ensemble.members import LinearMembers, identity_map
from pluralign.text.finetuned import FinetunedFeatures

VOTES = town_hall(60).preferences


def save(folder: Path, seed: int = 0) -> RewardEnsemble:
    """Save an ensemble with its held-out votes."""
    ensemble = some_ensemble(seed)
    ensemble.save(folder, held_out_files(ensemble, score_held_out(ensemble, VOTES)))
    return ensemble


def change(folder: Path, edit: Callable[[dict[str, Any]], Any], *, reseal: bool = True) -> None:
    """Edit the JSON of an ensemble, with a right hash unless ``reseal`` is off."""
    description = json.loads((folder / ENSEMBLE_FILE).read_text())
    edit(description)
    if reseal:
        del description["sha256"]
        description = sealed(description)
    (folder / ENSEMBLE_FILE).write_text(json.dumps(description))


# --- one ensemble -----------------------------------------------------------------------------------------------------


def test_saving_again_leaves_the_files_of_one_ensemble_and_those_of_others(tmp_path: Path) -> None:
    (tmp_path / "backbone").mkdir()
    for name in ("notes.txt", "ensemble-mine.safetensors", VOTES_FILE, "backbone/config.json"):
        (tmp_path / name).write_text("mine")
    for seed in (0, 1):
        ensemble = save(tmp_path, seed)
    files = sorted(path.name.rpartition("-")[0] or path.name for path in tmp_path.iterdir())
    mine = ["backbone", "ensemble", "held_out.parquet", "notes.txt"]
    assert files == sorted([*mine, "ensemble", "ensemble.json", "held_out", "held_out"])
    assert (tmp_path / "backbone" / "config.json").read_text() == "mine"
    np.testing.assert_array_equal(load_held_out(tmp_path).rewards, score_held_out(ensemble, VOTES).rewards)


def test_leftovers_of_a_killed_save_are_removed_by_the_next_one(tmp_path: Path) -> None:
    save(tmp_path)
    whole = sorted(path.name for path in tmp_path.iterdir())
    for name in ("ensemble.safetensors", "held_out.parquet"):
        write_file(tmp_path, name, b"of a killed save")
    (tmp_path / "backbone-0123456789abcdef").mkdir()
    save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == whole


@pytest.mark.parametrize("step", range(4))
def test_a_full_disk_leaves_the_earlier_ensemble(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    full, write = iter([False] * step + [True] * 9), Path.write_bytes

    def write_half(path: Path, data: bytes) -> int:
        if next(full):
            write(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_half)
        patch.setattr(Path, "write_text", lambda path, text, encoding: write_half(path, text.encode(encoding)))
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, 1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_reader_that_is_overtaken_by_a_save_reads_the_new_ensemble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 0)
    slow, read = [True], RewardEnsemble._read

    def overtaken(folder: Path, description: dict[str, Any]) -> RewardEnsemble:
        if slow.pop() if slow else False:
            save(tmp_path, 1)
        return read(folder, description)

    monkeypatch.setattr(RewardEnsemble, "_read", staticmethod(overtaken))
    assert RewardEnsemble.load(tmp_path).weights.tolist() == some_ensemble(1).weights.tolist()
    assert not slow


def test_an_unknown_baseline_is_one_sentence(town_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(town_folder, tmp_path / "x")
    change(tmp_path / "x", lambda description: description["facts"].update(baseline_formulas={"soft_bt": "none"}))
    done = run("evaluate", tmp_path / "x", "demo:60")
    assert (done.returncode, done.stdout) == (2, "")
    assert "copy the folder again, or fit again" in done.stderr


def test_held_out_rewards_of_another_ensemble_are_refused(tmp_path: Path) -> None:
    first = save(tmp_path / "one", 0)
    save(tmp_path / "two", 1)
    with pytest.raises(DataError, match=r"are those of another ensemble; copy the folder again, or fit again"):
        load_held_out(tmp_path / "two", first)
    other = json.loads((tmp_path / "one" / ENSEMBLE_FILE).read_text())["files"]
    for entry in other.values():
        shutil.copy(tmp_path / "one" / entry["file"], tmp_path / "two")
    change(tmp_path / "two", lambda description: description.update(files=other))
    with pytest.raises(DataError, match="are those of another ensemble"):
        load_held_out(tmp_path / "two")


def test_saving_without_held_out_votes_removes_those_of_the_earlier_ensemble(tmp_path: Path) -> None:
    ensemble = save(tmp_path)
    assert has_held_out(tmp_path)
    ensemble.save(tmp_path)
    assert not has_held_out(tmp_path)
    assert not list(tmp_path.glob("held_out*"))
    ensemble.save(tmp_path, held_out_files(ensemble, score_held_out(ensemble, VOTES)))
    assert has_held_out(tmp_path)


def test_figures_about_raters_are_removed_with_their_ensemble(tmp_path: Path) -> None:
    for seed, kept in ((0, True), (1, False)):
        save(tmp_path, 0)
        of = {"ensemble": description_hash(read_description(tmp_path))}
        (tmp_path / REPRESENTATION_FILE).write_text(json.dumps(of))
        save(tmp_path, seed)
        assert (tmp_path / REPRESENTATION_FILE).exists() == kept


# --- hashes -----------------------------------------------------------------------------------------------------------


def test_a_changed_file_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path)
    for path in [path for path in tmp_path.iterdir() if path.name != ENSEMBLE_FILE]:
        data = path.read_bytes()
        for changed in (data[:-1], data[:50] + bytes([data[50] ^ 1]) + data[51:]):
            path.write_bytes(changed)
            with pytest.raises(DataError, match=rf"{path.name} was changed after saving: its hash differs; copy the"):
                load_held_out(tmp_path)
        path.write_bytes(data)
    load_held_out(tmp_path)


@pytest.mark.parametrize(
    "edit",
    [
        lambda description: description.update(temperature=0.8),
        lambda description: description["facts"].update(notes=[]),
        lambda description: description.pop("sha256"),
    ],
)
def test_an_edited_description_is_refused(tmp_path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    save(tmp_path)
    change(tmp_path, edit, reseal=False)
    with pytest.raises(DataError, match=r"ensemble\.json: it was changed after saving: its hash differs; copy the"):
        RewardEnsemble.load(tmp_path)


def test_layout_and_order_of_the_json_do_not_matter(tmp_path: Path) -> None:
    save(tmp_path)
    description = json.loads((tmp_path / ENSEMBLE_FILE).read_text())
    (tmp_path / ENSEMBLE_FILE).write_text(json.dumps(dict(reversed(description.items()))))
    RewardEnsemble.load(tmp_path)


# --- the schema -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"weights": [0.5, 0.4, 0.2]}, r"weights must sum to 1, not 1\.1"),
        ({"weights": [1.5, -0.5, 0.0]}, "weights must be a list of numbers, none below 0"),
        ({"weights": []}, "weights must be a list of numbers"),
        ({"weights": [0.5, 0.5]}, "it has 3 members and 2 weights"),
        ({"temperature": 0}, "temperature must be a number above 0"),
        ({"temperature": 10**400}, "temperature must be a number above 0"),
        ({"undecided": 1.0}, "undecided must be a number from 0 to below 1"),
        ({"undecided": True}, "undecided must be a number from 0 to below 1"),
        ({"arrays": {"file": 3}}, "arrays must name a file and its hash"),
        ({"files": None}, "files must be an object"),
        ({"features": []}, "features and facts must be objects"),
        ({"features": {"encoder": 3}}, "its description of the features cannot be read"),
        ({"facts": {"level": "soup"}}, "its record of the fit cannot be read"),
        ({"facts": {"method": "\ud800"}}, "its record of the fit cannot be read"),
        ({"choice_model": {"people": 2.0}}, "people must be between 0 and 1"),
        ({"choice_model": {"slip": "0"}}, "its choice model cannot be read"),
    ],
)
def test_impossible_values_are_refused_even_with_the_right_hash(
    tmp_path: Path, values: dict[str, Any], problem: str
) -> None:
    save(tmp_path)
    change(tmp_path, lambda description: description.update(values))
    with pytest.raises(DataError, match=rf"{problem}.*; copy the folder again, or fit again"):
        RewardEnsemble.load(tmp_path)


@pytest.mark.parametrize("data", [b'{"weights": NaN}', b"[" * 100_000, b"{", b"", b"\x00", b'{"a": 1', b"\xff\xfe"])
def test_what_is_no_json_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ENSEMBLE_FILE).write_bytes(data)
    with pytest.raises(DataError, match="it is not JSON; copy the folder again"):
        read_description(tmp_path)


@pytest.mark.parametrize("text", ["[1]", '{"format": "other"}'])
def test_json_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / ENSEMBLE_FILE).write_text(text)
    with pytest.raises(DataError, match="does not describe an ensemble"):
        read_description(tmp_path)


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        ("members/theta", np.full((20, 3), np.nan), "theta must be finite|theta has the wrong shape"),
        ("members/theta", np.ones((4, 3)), "theta has the wrong shape"),
        ("members/theta", np.ones(20), "theta has the wrong shape"),
        ("members/mean", np.ones((3, 3)), "wrong shape"),
        ("members/spread", np.zeros(1), "wrong shape"),
        ("members/unknown", np.ones(3), "it does not hold members"),
        ("baselines/soft_bt/theta", np.full(3, np.inf), "arrays of baselines must be finite"),
        ("training_prompts", np.ones(3), "training_prompts must be a list of 64-bit hashes"),
    ],
)
def test_impossible_arrays_are_refused_even_with_the_right_hash(
    tmp_path: Path, name: str, array: np.ndarray, problem: str
) -> None:
    save(tmp_path)
    entry = read_description(tmp_path)["arrays"]
    arrays = safetensors.numpy.load((tmp_path / entry["file"]).read_bytes())
    written = write_file(tmp_path, "ensemble.safetensors", safetensors.numpy.save({**arrays, name: array}))
    change(tmp_path, lambda description: description.update(arrays=written))
    with pytest.raises(DataError, match=problem):
        RewardEnsemble.load(tmp_path)


def test_impossible_held_out_rewards_are_refused(tmp_path: Path) -> None:
    ensemble, held_out = some_ensemble(), score_held_out(some_ensemble(), VOTES)
    for bad, problem in ((held_out.rewards * np.nan, "must be finite"), (held_out.rewards[:, :1], "another ensemble")):
        ensemble.save(tmp_path, held_out_files(ensemble, replace(held_out, rewards=bad)))
        with pytest.raises(DataError, match=problem):
            load_held_out(tmp_path)
    files = held_out_files(ensemble, held_out)
    for name, content, problem in (
        (REWARDS_FILE, b"nonsense", "it is damaged"),
        (VOTES_FILE, b"nonsense", "not a file written by"),
        (VOTES_FILE, VOTES[:50].parquet_bytes(), "do not belong together"),
    ):
        ensemble.save(tmp_path, files | {name: content})
        with pytest.raises(DataError, match=problem):
            load_held_out(tmp_path)


def test_another_format_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    for version in (3, 99, "4", None):
        save(tmp_path)
        change(tmp_path, lambda description, version=version: description.update(format_version=version))  # type: ignore[misc]
        with pytest.raises(DataError, match="use the version of pluralign that wrote it"):
            RewardEnsemble.load(tmp_path)


def test_an_ensemble_that_could_not_be_read_back_is_not_saved(tmp_path: Path) -> None:
    save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ensemble = some_ensemble(1)
    for broken in (
        replace(ensemble, weights=ensemble.weights * 2),
        replace(ensemble, temperature=float("nan")),
        replace(ensemble, members=LinearMembers(ensemble.members.inputs, ensemble.members.theta * np.nan)),
    ):
        with pytest.raises(DataError, match="an ensemble cannot be saved"):
            broken.save(tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_features_of_another_dimension_are_refused() -> None:
    ensemble = some_ensemble()
    with pytest.raises(
        DataError, match=r"texts have 3 features, but the ensemble was fitted with \d+; use the encoder"
    ):
        ensemble.members.rewards(np.ones((2, 3), dtype=np.float32))


# --- fine-tuned models ------------------------------------------------------------------------------------------------


def tuned_ensemble(folder: Path, content: str) -> RewardEnsemble:
    """Return an ensemble whose model is a folder that nothing loads."""
    (folder / "backbone").mkdir(parents=True)
    (folder / "backbone" / "config.json").write_text(content)
    features = FinetunedFeatures("base", "joint", lora=False, outputs=3, max_length=8, folder=folder)
    theta = np.eye(3)[:, :2]
    return RewardEnsemble(LinearMembers(identity_map(3), theta), np.array([0.5, 0.5]), features.with_current_hashes())


def models_in(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.glob("backbone*/config.json")]


def test_models_of_the_old_ensemble_stay_until_the_new_one_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (tuned_ensemble(tmp_path / name, name) for name in ("first", "second"))
    target = tmp_path / "target"
    first.save(target)
    assert (target / "backbone" / "config.json").read_text() == "first"

    def crash(*_: Any) -> None:
        assert sorted(models_in(target)) == ["first", "second"]
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "write_description", crash)
        with pytest.raises(OSError, match="disk full"):
            second.save(target)
    assert models_in(target) == ["first"]
    assert RewardEnsemble.load(target).features == first.features
    for _ in range(2):
        second.save(target)
        assert models_in(target) == ["second"]
    loaded = RewardEnsemble.load(target).features
    assert isinstance(loaded, FinetunedFeatures)
    assert loaded.with_current_hashes() == loaded
    RewardEnsemble.load(target).save(target)
    assert models_in(target) == ["second"], "saving in the same folder keeps the models"


def test_a_description_cannot_name_models_elsewhere(tmp_path: Path) -> None:
    tuned_ensemble(tmp_path / "first", "first").save(tmp_path / "x")
    change(tmp_path / "x", lambda description: description["features"].update(models="../first/backbone"))
    with pytest.raises(DataError, match="its description of the features cannot be read"):
        RewardEnsemble.load(tmp_path / "x")
