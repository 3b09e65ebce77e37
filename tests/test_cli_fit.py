"""The commands fit, evaluate, score and compare."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WriteLines, facts_of, printed, run, run_in_terminal, run_process
from test_ensemble import some_ensemble

from pluralign import RewardEnsemble, fit, load_preferences, load_rater_votes, town_hall
from pluralign.cli.options import command_history
from pluralign.ensemble.members import FeatureMap, LinearMembers
from pluralign.text.encoders import TextFeatures
from pluralign.votes.options import Loaded
from pluralign.votes.raters import town_hall_votes

QUICK = ("--encoder", "none", "--method", "stagewise", "--k", "3")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "town.jsonl"
    town_hall(400).preferences.save(path)
    return path


@pytest.fixture(scope="module")
def fitted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("fitted") / "ensemble"
    return folder, run("fit", data, "-o", folder, *QUICK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ensemble that was not fitted, for commands that only read one."""
    path = tmp_path_factory.mktemp("saved")
    some_ensemble().save(path)
    return path


def as_lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def text_of(*arguments: str | Path) -> str:
    """What a command that succeeds prints, without line ends."""
    return " ".join(printed(*arguments).split())


# --- fit and evaluate -------------------------------------------------------------------------------------------------


def test_fit_prints_one_json_object_and_nothing_else(data: Path, tmp_path: Path) -> None:
    done = run("fit", "-", "-o", tmp_path / "out", *QUICK, "--seed", "2", "--json", stdin=data.read_text())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    facts = json.loads(done.stdout, parse_constant=refuse)
    assert (facts["method"], facts["k"], facts["options"]["seed"]) == ("stagewise", 3, 2)
    assert [record["k"] for record in facts["history"]] == [1, 2, 3]
    assert sum(facts["weights"]) == pytest.approx(1)
    saved = RewardEnsemble.load(tmp_path / "out")
    assert (saved.weights.tolist(), saved.undecided) == (facts["weights"], facts["undecided"])


def test_fit_compares_the_ensemble_with_soft_bt(fitted: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = fitted
    assert (done.returncode, done.stderr) == (0, ""), "progress is shown only in a terminal"
    text = " ".join(done.stdout.split())
    assert "Main number: corrected Brier score" in text
    assert "Next: " in text
    for words in (
        *("stagewise ensemble of 3 members", "constant ½", "floor", "hard BT", "bootstrap", "noise (0.", "member 2"),
        *("disagreement", "held-out Brier", "ensemble: votes", "ensemble: policies", "Without the bound"),
    ):
        assert words in text, words
    assert str(folder) in text.replace(" ", "")
    names = sorted(re.sub(r"-[0-9a-f]{16}\.", ".", path.name) for path in folder.iterdir())
    assert names == ["ensemble.json", "ensemble.safetensors", "held_out.parquet", "held_out.safetensors"]


def test_the_terminal_shows_the_undecided_share_and_the_absolute_error(data: Path, tmp_path: Path) -> None:
    dataclasses.replace(some_ensemble(), undecided=0.3).save(tmp_path)
    evaluated, certified = text_of("evaluate", tmp_path, data), text_of("certify", tmp_path, data)
    assert "Undecided share: 30 %. No member explains these votes" in evaluated
    assert "3 members, undecided share 30.0%" in certified
    assert "counts as two rewards" in certified
    pruned = text_of("prune", tmp_path, "--data", data, "-o", tmp_path / "pruned")
    assert "undecided share 0.300 0.500 0.500 kept" in pruned


def test_evaluate_reads_single_votes_with_an_ensemble_fitted_to_shares(
    fitted: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    rows = [{"prompt": f"p{i % 7}", "chosen": f"Yes, {i} times.", "rejected": f"No {i}"} for i in range(30)]
    (tmp_path / "chosen.jsonl").write_text(as_lines(*rows))
    assert facts_of("evaluate", fitted[0], tmp_path / "chosen.jsonl")["test"]["brier_corrected"] is None
    assert not re.search(r"\bnan\b", text_of("evaluate", fitted[0], tmp_path / "chosen.jsonl").lower())


def test_in_a_terminal_fit_shows_its_stage_on_stderr_and_json_stays_clean(data: Path, tmp_path: Path) -> None:
    code, out, shown = run_in_terminal("fit", data, "-o", tmp_path / "out", *QUICK, "--json")
    assert code == 0
    assert json.loads(out)["k"] == 3
    assert "Fit: " in shown


# --- score and compare ------------------------------------------------------------------------------------------------


def test_score_streams_rewards_from_standard_input_and_files(folder: Path, tmp_path: Path) -> None:
    texts = ["Yes.", "I might, perhaps – größer!", "", "No."] * 100
    stdin = as_lines(*({"prompt": "Tea?", "response": text} for text in texts))
    done = run("score", folder, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 400
    expected = some_ensemble().rewards([("Tea?", text) for text in texts[:4]])
    for i, line in enumerate(lines):
        assert line["rewards"] == pytest.approx(expected[i % 4].tolist(), rel=1e-9)
    (tmp_path / "texts.jsonl").write_text(stdin)
    assert run("score", folder, tmp_path / "texts.jsonl").stdout == done.stdout
    assert json.loads(run("score", folder, "-", "--json", stdin=stdin).stdout) == {"lines": lines}


def test_a_closed_pipe_ends_the_stream_quietly(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(as_lines(*[{"prompt": "Tea?", "response": "Yes."}] * 3000))
    command = f"{sys.executable} -m pluralign score {folder} {tmp_path / 'texts.jsonl'} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.slow
def test_loading_a_model_prints_nothing_on_stderr(tmp_path: Path) -> None:
    one = np.ones(384, dtype=np.float32)
    members = LinearMembers(FeatureMap(0 * one, one, one), np.eye(384, 3))
    features = TextFeatures("minilm", "last", surface=False)
    dataclasses.replace(some_ensemble(), members=members, features=features).save(tmp_path / "minilm")
    done = run_process(
        "score", tmp_path / "minilm", stdin=as_lines({"prompt": "Tea?", "response": "Quite new to the cache."})
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["rewards"]) == 3


# --- config file ------------------------------------------------------------------------------------------------------


FAST = ["--encoder", "none", "--target", "votes"]


@pytest.fixture
def votes(write_jsonl: WriteLines) -> Path:
    """Votes whose prompts are in a column of another name."""
    rows = list(town_hall(200).preferences.to_records())
    return write_jsonl([{"question": row.pop("prompt"), **row} for row in rows])


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a file of options."""

    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_saved_config_gives_the_same_weights(votes: Path, tmp_path: Path) -> None:
    saved, first, again = tmp_path / "run.toml", tmp_path / "first", tmp_path / "again"
    given = ["--k", "2", "--rename", "prompt=question", "--no-undecided", "--seed", "3", "--max-disagreement", "0.45"]
    text_of("fit", votes, "-o", first, *FAST, *given, "--save-config", saved)
    assert tomllib.loads(saved.read_text()) == {
        "data": str(votes), "output": str(first), "k": 2, "encoder": "none", "target": "votes", "undecided": False,
        "seed": 3, "max-disagreement": 0.45, "rename": {"prompt": "question"},
    }  # fmt: skip
    text_of("fit", "--config", saved, "-o", again)
    one, two = RewardEnsemble.load(first), RewardEnsemble.load(again)
    assert one.weights.tolist() == two.weights.tolist()
    assert one.record.options == two.record.options


def test_the_command_line_wins_over_a_config(config: Callable[[str], Path], votes: Path, tmp_path: Path) -> None:
    own = f"data = '{votes}'\noutput = '{tmp_path / 'out'}'\nk = 4\nencoder = 'none'\ntarget = 'votes'\n"
    file = config(f"{own}keep_held_out = false\njson = true\n[rename]\nprompt = 'question'")
    printed = json.loads(text_of("fit", "--config", file, "--k", "2"))
    assert (printed["k"], printed["options"]["keep_held_out"]) == (2, False)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('metod = "joint"', "there is no option 'metod'; did you mean 'method'?"),
        ("config = 1", "there is no option 'config'; known are: data, output, "),
        ("k = [2]", "k must be one value, not [2]."),
        ("seed = 1.5", "seed cannot be 1.5: "),
        ("epochs = 'two'", "epochs cannot be 'two': "),
        ('features = "a\\u0000b"', "features must not have a null character."),
    ],
)
def test_a_wrong_name_or_value_is_one_sentence(text: str, sentence: str, config: Callable[[str], Path]) -> None:
    path = config(text)
    done = run("fit", "demo:300", "-o", "never", "--config", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"pluralign: {path}: {sentence}")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith((".\n", "?\n"))


def test_a_file_that_is_missing_or_no_toml_is_one_sentence(config: Callable[[str], Path], tmp_path: Path) -> None:
    path = config("k = ")
    assert run("fit", "--config", path).stderr.startswith(f"pluralign: {path} must be a TOML file: Invalid value")
    deep, long = b"k = " + 10**5 * b"[" + 10**5 * b"]", b"seed = " + 5000 * b"9"
    for content in (b"\xff", deep, b"rename = {a = " + deep, long):
        path.write_bytes(content)
        done = run("fit", "--config", path)
        assert done.stderr.startswith(f"pluralign: {path} must be a TOML file: ")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    missing = tmp_path / "missing.toml"
    assert run("fit", "--config", missing).stderr == f"pluralign: there is no file {missing}.\n"


def test_invalid_options_are_not_saved(tmp_path: Path) -> None:
    saved = tmp_path / "run.toml"
    done = run("fit", "demo:300", "-o", tmp_path / "out", "--k", "0", "--save-config", saved)
    assert done.returncode == 2
    assert "k must be a whole number" in done.stderr
    assert not saved.exists()


def test_every_text_survives_the_round_trip(tmp_path: Path, write_jsonl: WriteLines) -> None:
    row = {"response_a": "Yes.", "response_b": "No!", "12": "me"}
    rows = [row | {"x=y": str(i), "vote": "ab"[j % 2]} for i in range(30) for j in range(2 + i % 2)]
    votes = write_jsonl(rows, name='a "b" \\ ½ \x7f.jsonl')
    saved = tmp_path / "run.toml"
    given = ["--raters", "12", "--rename", "prompt=x=y", "--encoder", "none", "--k", "1", "--save-config", saved]
    assert run("fit", votes, "-o", tmp_path / "007", *map(str, given)).returncode == 0
    read = tomllib.loads(saved.read_text(encoding="utf-8"))
    assert (read["data"], read["output"]) == (str(votes), str(tmp_path / "007"))
    assert (read["raters"], read["rename"]) == (12, {"prompt": "x=y"})


# --- command history --------------------------------------------------------------------------------------------------


OPTIONS = ("--k", "2", "--encoder", "none", "--method", "stagewise", "--variant", "printed", "--test-fraction", "0.3")


def printed_command(folder: Path) -> list[str]:
    """Return the command of the fit that the report of a folder prints."""
    text_of("report", folder, "-o", folder / "report.html")
    line = re.search(r"pluralign fit [^\n]*", unescape((folder / "report.html").read_text()))
    assert line
    return shlex.split(line[0])


def fitted_again(folder: Path, command: list[str], tmp_path: Path) -> RewardEnsemble:
    """Return the ensemble that a command makes in another folder."""
    assert command[:2] == ["pluralign", "fit"]
    command[command.index(str(folder))] = str(tmp_path / "again")
    text_of(*command[1:])
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
    text_of("fit", single_votes, "-o", folder, *OPTIONS, "--no-keep-held-out", "--seed", "3", *data, *renames)
    ensemble = RewardEnsemble.load(folder)
    command = command_history(ensemble.record, folder, ["report"])[0]
    assert {*data, *renames} <= set(command)
    assert same(fitted_again(folder, command, tmp_path), ensemble)


def test_a_report_prints_the_command_with_raters_and_folds(single_votes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    renames = [word for rename in RENAMES[:4] for word in ("--rename", rename)]
    options = ("--k", "1", "--encoder", "none", "--raters", "worker", "--skip-bad", "--folds", "2", "--overwrite")
    text_of("fit", single_votes, "-o", folder, *options, *renames)
    command = printed_command(folder)
    assert "--raters worker" in " ".join(command)
    assert "--folds 2" in " ".join(command)
    assert not {"--overwrite", "--test-fraction"} & set(command)
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
    counts = dataclasses.replace(load_rater_votes("demo:160", "rater").preferences, judgments=None)
    counted = fit(counts, k=1, encoder="none", method="stagewise")
    assert command_history(counted.record, tmp_path, ["report", "x"]) == [["pluralign", "report", "x"]]


def test_a_pruned_ensemble_names_both_commands(town_folder: Path, tmp_path: Path) -> None:
    pruned = tmp_path / "pruned"
    assert run("prune", town_folder, "-o", pruned, "--beta", "3", "--furthest").returncode == 0
    record = RewardEnsemble.load(pruned).record
    first, second, _ = command_history(record, pruned, ["report"])
    assert first[:5] == ["pluralign", "fit", "demo:480", "-o", str(town_folder)]
    assert second == ["pluralign", "prune", str(town_folder), "-o", str(pruned), "--beta", "3", "--furthest"]
