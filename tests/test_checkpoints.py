"""Steps are computed once, come back as they were, and belong to one piece of work."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pluralign.core.checkpoints import Steps

INPUTS = {"data": "abc", "options": {"k": 8, "seed": 0}, "version": "1"}


class Counted:
    """A computation that counts how often it is run."""

    def __init__(self, **arrays: np.ndarray) -> None:
        self.arrays, self.times = arrays, 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.times += 1
        return self.arrays


def example() -> Counted:
    rng = np.random.default_rng(0)
    return Counted(
        theta=rng.standard_normal((3, 4)),
        turned=rng.standard_normal((3, 4)).T,
        every_other=rng.standard_normal(10)[::2],
        single=rng.standard_normal(3).astype(np.float32),
        count=np.arange(3, dtype=np.int32),
        mask=np.array([True, False]),
        number=np.array(0.1),
        nothing=np.empty((2, 0)),
    )


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_finished_step_is_not_computed_again_by_the_same_work(tmp_path: Path) -> None:
    compute = example()
    Steps(tmp_path, INPUTS)("first", compute)
    Steps(tmp_path, dict(reversed(INPUTS.items())))("first", compute)
    assert compute.times == 1


def test_a_step_is_computed_once_within_a_run(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        compute, steps = example(), Steps(folder, INPUTS)
        assert steps("first", compute) is steps("first", compute)
        assert compute.times == 1


def test_a_step_comes_back_as_it_was(tmp_path: Path) -> None:
    compute = example()
    kept = Steps(tmp_path, INPUTS)("first", compute)
    again = Steps(tmp_path, INPUTS)("first", compute)
    assert sorted(kept) == sorted(again) == sorted(compute.arrays)
    for name, array in compute.arrays.items():
        for found in (kept[name], again[name]):
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("change", [{"data": "abd"}, {"options": {"k": 9, "seed": 0}}, {"version": "2"}])
def test_other_work_starts_from_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    compute = example()
    Steps(tmp_path, INPUTS)("first", compute)
    Steps(tmp_path, INPUTS | change)("first", compute)
    assert compute.times == 2
    Steps(tmp_path, INPUTS)("first", compute)
    assert compute.times == 2, "and leaves the other's steps alone"


def test_steps_are_told_apart_by_name(tmp_path: Path) -> None:
    one, other = Counted(x=np.zeros(2)), Counted(x=np.ones(2))
    steps = Steps(tmp_path, INPUTS)
    steps("stage-0.1-1", one)
    assert steps("stage-0.1-2", other)["x"].tolist() == [1, 1]
    assert Steps(tmp_path, INPUTS)("stage-0.1-1", other)["x"].tolist() == [0, 0]


def test_a_step_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise RuntimeError("out of memory")

    steps, compute = Steps(tmp_path, INPUTS), example()
    with pytest.raises(RuntimeError, match="out of memory"):
        steps("first", fail)
    assert files_in(tmp_path) == []
    steps("first", compute)
    assert compute.times == 1


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", half)
        with pytest.raises(OSError, match="disk full"):
            Steps(tmp_path, INPUTS)("first", example())
    assert files_in(tmp_path) == []
    compute = example()
    Steps(tmp_path, INPUTS)("first", compute)
    assert compute.times == 1


def test_what_a_killed_writer_left_is_no_step(tmp_path: Path) -> None:
    Steps(tmp_path, INPUTS)("first", example())
    (folder,) = tmp_path.iterdir()
    (folder / ".second.safetensors.x7.partial").write_bytes(b"half a fi")
    compute = Counted(x=np.ones(1))
    assert Steps(tmp_path, INPUTS)("second", compute)["x"].tolist() == [1]
    assert compute.times == 1


def test_finishing_removes_what_was_kept_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "ensemble.json").write_text("{}")
    (tmp_path / "figures").mkdir()
    abandoned, steps = Steps(tmp_path, INPUTS | {"version": "0"}), Steps(tmp_path, INPUTS)
    abandoned("first", example())
    steps("first", example())
    assert len(list(tmp_path.iterdir())) == 4
    steps.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ensemble.json", "figures"]
    compute = example()
    Steps(tmp_path, INPUTS)("first", compute)
    assert compute.times == 1, "finished work begins again"


def test_without_a_folder_nothing_is_written_and_finishing_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = Steps(None, INPUTS)
    np.testing.assert_array_equal(steps("first", example())["theta"], example().arrays["theta"])
    steps.finish()
    assert list(tmp_path.iterdir()) == []


def test_making_steps_touches_no_file(tmp_path: Path) -> None:
    Steps(tmp_path / "new", INPUTS).finish()
    assert list(tmp_path.iterdir()) == []
