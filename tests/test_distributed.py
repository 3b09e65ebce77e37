"""Several processes that hold a part of the features each fit the same ensemble as one process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import kill_a_worker, launch, printed, run
from hypothesis import given, strategies as st

from pluralign import RewardEnsemble, fit, load_preferences
from pluralign.core.processes import ALONE, PARTS, Processes, launched_process, this_process
from pluralign.learning import pairs
from pluralign.learning.frozen import _texts_read


@given(st.integers(0, 1000), st.integers(1, PARTS))
def test_parts_cover_all_items_once_and_have_nearly_equal_size(n: int, count: int) -> None:
    parts = [range(n)[Processes(count, rank).part(n)] for rank in range(count)]
    assert [i for part in parts for i in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= n / PARTS + 2


@given(st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_a_sum_over_parts_is_the_total(n: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((n, 2))
    np.testing.assert_allclose(ALONE.sum_of(n, lambda part: values[part].sum(axis=0)), values.sum(axis=0), atol=1e-10)


def test_position_in_a_launch_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launched_process() == ALONE == this_process()
    array = np.arange(3)
    assert ALONE.first
    assert ALONE.total(array) is array
    assert ALONE.agreed(lambda: 7) == 7
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert launched_process() == Processes(4, 3)
    assert not launched_process().first


@pytest.mark.parametrize(("count", "rank"), [("x", "0"), ("-1", "0"), ("0", "0"), ("2", "2"), ("9" * 30, "0")])
def test_a_launch_that_cannot_be_is_one_sentence(count: str, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", count)
    monkeypatch.setenv("RANK", rank)
    done = run("inspect", "demo:40", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pluralign: RANK")
    assert done.stderr.count("\n") == 1


def test_a_command_leaves_the_process_group_of_its_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert run("--version").returncode == 0
    assert torch.distributed.is_initialized(), "a group that no launcher asked for is left alone"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("--version").returncode == 0
    assert not torch.distributed.is_initialized()


def test_a_process_reads_its_texts_and_the_other_texts_of_their_pairs() -> None:
    votes = load_preferences("demo:400")
    items = votes.items()
    for rank in range(3):
        part, read = Processes(3, rank).part(len(items.prompt_index)), _texts_read(votes, Processes(3, rank))
        own = (items.a >= part.start) & (items.a < part.stop)
        needed = {*range(part.start, part.stop), *items.a[own].tolist(), *items.b[own].tolist()}
        assert read == slice(min(needed), max(needed) + 1)
        assert len(needed) <= read.stop - read.start < len(needed) + 20, "texts of a prompt are adjacent"


def fitted_together(*command: str | Path) -> Any:
    """Return the one JSON object that two processes print."""
    together = launch(*command, "--json")
    out, errors = together.communicate(timeout=240)
    assert together.returncode == 0, errors
    facts = json.loads(out)
    assert facts["processes"] == 2
    return facts


FIT = ("--encoder", "hashing:48", "--k", "3", "--target", "mixture")


def same(one: RewardEnsemble, folder: Path) -> None:
    """Check equality to the last digits. A difference in a digit could select another start of the training."""
    two = RewardEnsemble.load(folder)
    np.testing.assert_allclose(two.weights, one.weights, rtol=1e-12)
    np.testing.assert_allclose(two.members.theta, one.members.theta, rtol=1e-9)
    for key in ("test", "baselines"):
        assert two.record.to_json()[key] == one.record.to_json()[key]


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process small sets in blocks, as large ones are: a dense matrix sums in another order."""
    monkeypatch.setattr(pairs, "DENSE_ELEMENTS", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("in_blocks")
def test_two_processes_that_encode_a_part_each_fit_the_same_ensemble_as_one(tmp_path: Path) -> None:
    votes = tmp_path / "town.jsonl"
    assert run("demo", "--pairs", "900", "-o", votes).returncode == 0
    alone = fit(load_preferences(str(votes)), encoder="hashing:48", k=3, target="mixture")
    fitted_together("fit", votes, *FIT, "-o", tmp_path / "two")
    same(alone, tmp_path / "two")


@pytest.mark.slow
@pytest.mark.usefixtures("in_blocks")
def test_a_killed_fit_with_stored_features_resumes_after_its_last_step(tmp_path: Path) -> None:
    votes, features = tmp_path / "town.jsonl", tmp_path / "features"
    assert run("demo", "--pairs", "900", "-o", votes).returncode == 0
    printed("encode", votes, "-o", features, *FIT[:2])
    fit_it = ("fit", votes, *FIT, "--features", features)
    alone = fit(load_preferences(str(votes)), encoder="hashing:48", k=3, target="mixture", features=str(features))
    first = launch(*fit_it, "-o", tmp_path / "two")
    kill_a_worker(first, tmp_path / "two", ".unfinished-*/baselines.safetensors")
    assert first.communicate(timeout=120)[0] == ""
    assert first.returncode != 0
    assert not (tmp_path / "two" / "ensemble.json").exists()
    fitted_together(*fit_it, "-o", tmp_path / "two")
    same(alone, tmp_path / "two")
    assert not list((tmp_path / "two").glob(".unfinished*")), "no checkpoint is left"


@pytest.mark.slow
@pytest.mark.usefixtures("in_blocks")
def test_two_processes_with_a_part_of_the_features_each_learn_from_the_same_judgments(tmp_path: Path) -> None:
    votes, features, encoder = "demo-rankings:600", tmp_path / "features", "hashing:48"
    assert run("encode", votes, "-o", features, "--encoder", encoder).returncode == 0
    alone = fit(load_preferences(votes), encoder=encoder, k=2, features=str(features))
    command = ("fit", votes, "--encoder", encoder, "--k", "2", "--features", features)
    facts = fitted_together(*command, "-o", tmp_path / "two")
    assert alone.record.target == facts["target"] == "judgments"
    same(alone, tmp_path / "two")
