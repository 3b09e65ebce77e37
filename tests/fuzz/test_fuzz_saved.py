"""Saved ensembles with one damaged file: every command works, or says in one sentence what is wrong."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run
from town_raters import town_raters, town_representation

from fuzz import cases, keeps_contract, places, random_of
from pluralign import RewardEnsemble, town_hall
from pluralign.ensemble.folder import ENSEMBLE_FILE, sealed
from pluralign.measuring.individuals import load_representation, save_representation

SHARDS = ("--encoder", "hashing:32", "--shard-rows", "20")
LINE = json.dumps({"prompt": "Tea?", "response": "Yes.", "response_a": "Yes.", "response_b": "No, thank you."})
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 0.5, -0.5, 1e-320, 1e308, 10**400, float("nan"), float("inf")),
    *(
        "",
        "x",
        "../..",
        "0.5",
        "é\u0000",
        "\ud800",
        "\x1b[2J\u202e",
        [],
        [0.5, 0.5],
        [1.0],
        ["x"],
        {},
        {"x": 1},
        [[[]]],
    ),
)


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("votes") / "votes.jsonl"
    town_hall(40, seed=9).preferences.save(path)
    return path


@pytest.fixture(scope="module")
def saved(town_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "ensemble"
    shutil.copytree(town_folder, folder)
    save_representation(town_representation(RewardEnsemble.load(folder), town_raters()), folder)
    return folder


def commands(folder: Path, votes: Path, output: Path) -> dict[str, list[str | Path]]:
    return {
        "certify": ["certify", folder],
        "profile": ["profile", folder],
        "diversity": ["diversity", folder],
        "prune": ["prune", folder, "-o", output / "pruned"],
        "score": ["score", folder, "-"],
        "compare": ["compare", folder, "-"],
        "evaluate": ["evaluate", folder, votes],
        "export": ["export", folder, "-o", output / "exported"],
        "report": ["report", folder, "-o", output / "report.html"],
    }


def damage_bytes(path: Path, random: np.random.Generator) -> str:
    """Change, cut, extend, empty or remove a file."""
    data, kind = path.read_bytes(), str(random.choice(["flip", "cut", "extend", "zero", "empty", "remove", "swap"]))
    at = int(random.integers(len(data)))
    if kind == "remove":
        path.unlink()
        return f"{path.name} removed"
    changed = {
        "flip": data[:at] + bytes([data[at] ^ int(random.integers(1, 256))]) + data[at + 1 :],
        "cut": data[:at],
        "extend": data + bytes(random.integers(0, 256, 20, dtype=np.uint8)),
        "zero": data[:at] + bytes(len(data) - at),
        "empty": b"",
        "swap": data[at:] + data[:at],
    }[kind]
    path.write_bytes(changed)
    return f"{path.name} {kind} at {at}" if changed != data else ""


def damage_json(path: Path, random: np.random.Generator, *, reseal: bool) -> str:
    """Replace or remove one value of a JSON file; with ``reseal`` its hash is right all the same."""
    value = json.loads(path.read_bytes())
    before = json.dumps(value)
    inner = list(places(value))[1:]
    chosen = inner[int(random.integers(len(inner)))]
    if len(chosen) > 1 and random.random() < 0.3:  # long parts hide the short ones
        chosen = chosen[: int(random.integers(1, len(chosen)))]
    inside = value
    for key in chosen[:-1]:
        inside = inside[key]
    new = VALUES[int(random.integers(len(VALUES)))]
    if random.random() < 0.15:
        del inside[chosen[-1]]
    else:
        inside[chosen[-1]] = new
    if json.dumps(value) == before:
        return ""
    if reseal:
        value.pop("sha256", None)
        value = sealed(value)
    path.write_text(json.dumps(value))
    return f"{path.name} {chosen} = {new!r}"


@pytest.mark.parametrize("case", cases())
def test_a_damaged_ensemble_is_used_as_a_whole_or_refused(case: int, saved: Path, votes: Path, tmp_path: Path) -> None:
    random, folder = random_of(case, "saved"), tmp_path / "ensemble"
    shutil.copytree(saved, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    path = sorted(folder.iterdir())[int(random.integers(len(before)))]
    kind = str(random.choice(["bytes", "json", "resealed"])) if path.suffix == ".json" else "bytes"
    what = damage_bytes(path, random) if kind == "bytes" else damage_json(path, random, reseal=kind == "resealed")
    known = commands(folder, votes, tmp_path)
    names = sorted(name for name in known if name != "report" or case % 10 == 0)
    for name in [names[i] for i in random.permutation(len(names))[:2]]:
        done = run(*known[name], "--json", stdin=LINE)
        keeps_contract(done, what)
        essential = path.name == ENSEMBLE_FILE or path.name.startswith("ensemble-")
        if essential and kind != "resealed" and what:
            assert done.returncode == 2, (what, done.stdout)


@pytest.fixture(scope="module")
def stored(votes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "features"
    assert run("encode", votes, "-o", folder, *SHARDS).returncode == 0
    return folder


@pytest.mark.parametrize("case", cases(share=0.25))
def test_damaged_shards_are_done_again_or_named(case: int, stored: Path, votes: Path, tmp_path: Path) -> None:
    random, folder = random_of(case, "shards"), tmp_path / "features"
    shutil.copytree(stored, folder)
    path = sorted(folder.rglob("*.*"))[case % 3]
    is_json = path.suffix == ".json" and random.random() < 0.7
    what = damage_json(path, random, reseal=False) if is_json else damage_bytes(path, random)
    done = run("encode", votes, "-o", folder, *SHARDS)
    keeps_contract(done, what)
    keeps_contract(run("fit", votes, "-o", tmp_path / "out", "--features", folder, "--k", "1", *SHARDS[:2]), what)
    if "removed" in what and done.returncode == 0:
        assert path.is_file()


def test_an_undamaged_folder_is_used_by_every_command(saved: Path, votes: Path, tmp_path: Path) -> None:
    assert load_representation(saved) is not None
    for name, command in commands(saved, votes, tmp_path).items():
        done = run(*command, "--json", stdin=LINE)
        assert done.returncode == 0, (name, done.stderr)
