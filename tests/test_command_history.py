"""The command that a report prints makes the same ensemble again."""

import json
import re
import shlex
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from conftest import WriteLines, run

from pluralign import RewardEnsemble, fit, load_preferences, load_rater_votes, town_hall
from pluralign.cli.options import command_history
from pluralign.votes.options import Loaded
from pluralign.votes.raters import town_hall_votes

OPTIONS = ("--k", "2", "--encoder", "none", "--method", "stagewise", "--variant", "printed", "--test-fraction", "0.3")


def printed_command(folder: Path) -> list[str]:
    """Return the command of the fit that the report of a folder prints."""
    report = folder / "report.html"
    assert run("report", folder, "-o", report).returncode == 0
    line = re.search(r"pluralign fit [^\n]*", unescape(report.read_text()))
    assert line
    return shlex.split(line[0])


def fitted_again(folder: Path, command: list[str], tmp_path: Path) -> RewardEnsemble:
    """Return the ensemble that a command makes in another folder."""
    assert command[:2] == ["pluralign", "fit"]
    command[command.index(str(folder))] = str(tmp_path / "again")
    done = run(*command[1:])
    assert done.returncode == 0, done.stderr
    return RewardEnsemble.load(tmp_path / "again")


def same(one: RewardEnsemble, other: RewardEnsemble) -> bool:
    hashes = {ensemble.record.data.fingerprint for ensemble in (one, other) if ensemble.record.data}
    return len(hashes) == 1 and np.array_equal(one.weights, other.weights)


@pytest.fixture
def single_votes(write_jsonl: WriteLines) -> Path:
    """Return a file of single votes with ties, repeats, bad rows and columns of other names."""
    votes = town_hall_votes(town_hall(160))
    counts, rows = votes.preferences, []
    for number, (pair, rater, chose_a) in enumerate(zip(votes.pair, votes.rater, votes.chose_a, strict=True)):
        row = {
            "the question": counts.prompts[counts.prompt_index[pair]],
            "answer 1": counts.responses[counts.a_index[pair]],
            "answer 2": counts.responses[counts.b_index[pair]],
            "winner": "tie" if number % 11 == 0 else "answer 1" if chose_a else "answer 2",
            "worker": f"w{rater}",
        }
        rows += [row, row] if number % 7 == 0 else [row]
    return write_jsonl([*rows, {"the question": "Tea?"}])


RENAMES = ("prompt=the question", "response_a=answer 1", "response_b=answer 2", "vote=winner", "annotator=worker")


def test_the_printed_command_has_every_option_of_the_data(single_votes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    data = ["--ties", "half", "--min-votes", "3", "--repeats", "first", "--skip-bad"]
    renames = [word for rename in RENAMES for word in ("--rename", rename)]
    done = run("fit", single_votes, "-o", folder, *OPTIONS, "--no-keep-held-out", "--seed", "3", *data, *renames)
    assert done.returncode == 0, done.stderr
    ensemble = RewardEnsemble.load(folder)
    command = command_history(ensemble.record, folder, ["report"])[0]
    assert {*data, *renames} <= set(command)
    assert same(fitted_again(folder, command, tmp_path), ensemble)


def test_a_report_prints_the_command_with_raters_and_folds(single_votes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    renames = [word for rename in RENAMES[:4] for word in ("--rename", rename)]
    options = ("--k", "1", "--encoder", "none", "--raters", "worker", "--skip-bad", "--folds", "2", "--overwrite")
    done = run("fit", single_votes, "-o", folder, *options, *renames)
    assert done.returncode == 0, done.stderr
    command = printed_command(folder)
    assert command[command.index("--raters") + 1] == "worker"
    assert command[command.index("--folds") + 1] == "2"
    assert "--overwrite" not in command
    assert "--test-fraction" not in command
    assert "w17" not in (folder / "ensemble.json").read_text()
    assert same(fitted_again(folder, command, tmp_path), RewardEnsemble.load(folder))


def test_the_source_is_the_one_that_was_given(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    assert run("fit", "demo:120", "-o", folder, *OPTIONS).returncode == 0
    assert command_history(RewardEnsemble.load(folder).record, folder, ["report"])[0][2] == "demo:120"
    votes = tmp_path / "votes.parquet"
    load_preferences("demo:120").save(votes)
    assert load_preferences(votes, ties="half").loaded == Loaded(str(votes), {"ties": "half"})
    rows = "".join(json.dumps(row) + "\n" for row in load_preferences(votes).to_records())
    assert run("fit", "-", "-o", tmp_path / "piped", *OPTIONS, stdin=rows).returncode == 0
    assert command_history(RewardEnsemble.load(tmp_path / "piped").record, folder, ["report"])[0][2] == "-"


def test_votes_that_were_made_in_python_have_no_command(tmp_path: Path) -> None:
    town = load_preferences("demo:160")
    assert town.loaded == Loaded("demo:160")
    assert town.with_ties("half").loaded == Loaded("demo:160", {"ties": "half"})
    for changed in (town[:120], town.swapped(), town.with_split(), town_hall(160, seed=1).preferences):
        assert changed.loaded is None
    ensemble = fit(town[:120], k=1, encoder="none", method="stagewise")
    assert command_history(ensemble.record, tmp_path, ["report", "x"]) == [["pluralign", "report", "x"]]
    raters = load_rater_votes("demo:160", "rater")
    counted = fit(raters.preferences, k=1, encoder="none", method="stagewise")
    assert command_history(counted.record, tmp_path, ["report", "x"]) == [["pluralign", "report", "x"]]


def test_a_pruned_ensemble_names_both_commands(town_folder: Path, tmp_path: Path) -> None:
    pruned = tmp_path / "pruned"
    assert run("prune", town_folder, "-o", pruned, "--beta", "3").returncode == 0
    record = RewardEnsemble.load(pruned).record
    first, second, _ = command_history(record, pruned, ["report"])
    assert first[:5] == ["pluralign", "fit", "demo:480", "-o", str(town_folder)]
    assert second == ["pluralign", "prune", str(town_folder), "-o", str(pruned), "--beta", "3"]
