"""Finished steps are stored and read back, also after a kill; each run has its own checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pluralign import DataError, FitOptions
from pluralign.core.checkpoints import INPUTS_FILE, Checkpoints, JsonLines, fingerprint

INPUTS = {"data": "abc", "options": {"k": 8, "seed": 0}, "version": "1"}


class Counted:
    """A computation that counts its calls."""

    def __init__(self, **arrays: np.ndarray) -> None:
        self.arrays, self.times = arrays, 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.times += 1
        return self.arrays


def kept(checkpoints: Checkpoints, compute: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return checkpoints.keep("first", dict[str, np.ndarray], compute)


def example() -> Counted:
    rng = np.random.default_rng(0)
    return Counted(
        theta=rng.standard_normal((3, 4)),
        transposed=rng.standard_normal((3, 4)).T,
        every_other=rng.standard_normal(10)[::2],
        single=rng.standard_normal(3).astype(np.float32),
        count=np.arange(3, dtype=np.int32),
        mask=np.array([True, False]),
        number=np.array(0.1),
        empty=np.empty((2, 0)),
    )


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# --- dataclasses ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    theta: npt.NDArray[Any]
    mean: float
    bound: float | None = None


@dataclass(frozen=True)
class Whole:
    parts: dict[int, Part]
    named: Mapping[str, npt.NDArray[Any]]
    sizes: tuple[int, ...]
    steps: list[Part]
    name: str
    is_final: bool
    best: Part | None = None
    other: Part | None = None


def test_a_dataclass_comes_back_as_it_was(tmp_path: Path) -> None:
    whole = Whole(
        {10: Part(np.ones(2), 0.1), 9: Part(np.eye(2)[:, :1].T, np.inf, 0.5)},
        {"b": np.array(0.1, np.float32), "a": np.empty((0, 3))},
        tuple(range(12)),
        [Part(np.arange(k), float(k)) for k in range(11)],
        "café",
        is_final=True,
        best=Part(np.zeros(0, np.int32), -0.0),
    )
    computed = Checkpoints(tmp_path, INPUTS).keep("whole", Whole, lambda: whole)
    stored = Checkpoints(tmp_path, INPUTS).keep("whole", Whole, lambda: pytest.fail("computed again"))
    for result in (computed, stored, Checkpoints(None, INPUTS).keep("whole", Whole, lambda: whole)):
        assert fingerprint(result) == fingerprint(whole)
        assert [type(part) for part in vars(result).values()] == [type(part) for part in vars(whole).values()]
        assert list(result.parts) == [9, 10]
        assert result.named["b"].dtype == np.float32
        assert result.parts[10].bound is None
        assert result.other is None


# --- arrays -----------------------------------------------------------------------------------------------------------


def test_stored_arrays_are_read_back_exactly(tmp_path: Path) -> None:
    compute = example()
    computed = kept(Checkpoints(tmp_path, INPUTS), compute)
    stored = kept(Checkpoints(tmp_path, dict(reversed(INPUTS.items()))), compute)
    assert compute.times == 1
    assert sorted(computed) == sorted(stored) == sorted(compute.arrays)
    for name, array in compute.arrays.items():
        for result in (computed[name], stored[name]):
            assert (result.dtype, result.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(result, array)
            assert result.flags.c_contiguous


@pytest.mark.parametrize("change", [{"data": "abd"}, {"options": {"k": 9, "seed": 0}}, {"version": "2"}])
def test_other_inputs_start_a_new_run_and_leave_the_first_one_alone(tmp_path: Path, change: dict[str, Any]) -> None:
    compute = example()
    kept(Checkpoints(tmp_path, INPUTS), compute)
    kept(Checkpoints(tmp_path, INPUTS | change), compute)
    assert compute.times == 2
    kept(Checkpoints(tmp_path, INPUTS), compute)
    assert compute.times == 2


def test_a_failed_step_leaves_no_file_and_can_be_repeated(tmp_path: Path) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise RuntimeError("out of memory")

    checkpoints, compute = Checkpoints(tmp_path, INPUTS), example()
    with pytest.raises(RuntimeError, match="out of memory"):
        kept(checkpoints, fail)
    assert files_in(tmp_path) == []
    kept(checkpoints, compute)
    assert compute.times == 1


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:-9] + b"x" + data[-8:]]
)
def test_a_damaged_step_is_computed_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    compute, number = example(), 123456789.5
    kept(Checkpoints(tmp_path, INPUTS), compute)
    Checkpoints(tmp_path, INPUTS).keep("second", float, lambda: number)
    for path in (*tmp_path.rglob("first.*"), *tmp_path.rglob("second.*")):
        path.write_bytes(damage(path.read_bytes()))
    again = Checkpoints(tmp_path, INPUTS)
    np.testing.assert_array_equal(kept(again, compute)["theta"], compute.arrays["theta"])
    assert again.keep("second", float, lambda: number) == number
    assert compute.times == 2
    assert Checkpoints(tmp_path, INPUTS).keep("second", float, lambda: pytest.fail("the value is stored")) == number


# --- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_filled_once(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "weights").write_text("1")

    first = Checkpoints(tmp_path, INPUTS).folder("member-0", fill)
    again = Checkpoints(tmp_path, INPUTS).folder("member-0", lambda _: pytest.fail("the folder is stored"))
    assert first == again
    assert (first / "weights").read_text() == "1"


def test_a_folder_whose_filling_fails_is_filled_anew(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("killed")

    checkpoints = Checkpoints(tmp_path, INPUTS)
    with pytest.raises(RuntimeError, match="killed"):
        checkpoints.folder("member-0", fail)
    assert files_in(tmp_path) == [INPUTS_FILE], "the inputs of the run, and nothing of the step"
    folder = checkpoints.folder("member-0", lambda folder: (folder / "whole").touch())
    assert files_in(folder) == ["whole"]


# --- the end of a run -------------------------------------------------------------------------------------------------


def test_finishing_removes_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "ensemble.json").write_text("{}")
    (tmp_path / "figures").mkdir()
    abandoned, checkpoints = Checkpoints(tmp_path, INPUTS | {"version": "0"}), Checkpoints(tmp_path, INPUTS)
    kept(abandoned, example())
    kept(checkpoints, example())
    assert len(list(tmp_path.iterdir())) == 4
    checkpoints.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ensemble.json", "figures"]
    compute = example()
    kept(Checkpoints(tmp_path, INPUTS), compute)
    assert compute.times == 1, "a finished run starts again"


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints(None, INPUTS)
    np.testing.assert_array_equal(kept(checkpoints, example())["theta"], example().arrays["theta"])
    checkpoints.finish()
    assert list(tmp_path.iterdir()) == []


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_a_fingerprint_depends_on_contents_only() -> None:
    array = np.arange(2000.0)
    changed = array.copy()
    changed[1000] += 1e-9
    assert fingerprint({"x": array}) == fingerprint({"x": array.copy()}) != fingerprint({"x": changed})
    assert fingerprint(array) != fingerprint(array.reshape(2, 1000)) != fingerprint(array.astype(np.float32))
    assert fingerprint(b"ab") != fingerprint(b"ba")
    assert fingerprint(Path("a")) == fingerprint("a")
    assert fingerprint(np.float64(0.5)) == fingerprint(0.5)
    assert fingerprint(FitOptions()) == fingerprint(FitOptions()) != fingerprint(FitOptions(seed=1))


def test_a_value_without_contents_has_no_fingerprint() -> None:
    with pytest.raises(TypeError, match="object has no fingerprint"):
        fingerprint({"x": object()})


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [b"", b'{"a": 1', b"1", b"x" * 200_000])
@pytest.mark.parametrize("complete", [b"", b"1\n", b'{"a": 1}\n2\n'])
def test_a_torn_last_line_is_dropped(tmp_path: Path, complete: bytes, torn: bytes) -> None:
    path = tmp_path / "done.jsonl"
    path.write_bytes(complete + torn)
    lines = JsonLines(path)
    assert len(list(lines.rows())) == complete.count(b"\n")
    assert path.read_bytes() == complete + torn, "reading changes nothing"
    lines.append("new")
    assert path.read_bytes() == complete + b'"new"\n'
    assert list(lines.rows())[-1] == "new"


def test_a_complete_line_that_is_not_json_is_refused_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "done.jsonl"
    path.write_bytes(b"1\n{\n2\n")
    with pytest.raises(DataError, match=r"done\.jsonl, row 2: the line is not JSON"):
        list(JsonLines(path).rows())


def test_all_lines_can_be_replaced(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "done.jsonl")
    lines.append(1)
    lines.replace([3, 2])
    assert list(lines.rows()) == [3, 2]
