"""The commands fit, evaluate, score and compare."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run, run_in_terminal, run_process
from test_ensemble import some_ensemble

from pluralign import RewardEnsemble
from pluralign.ensemble.members import FeatureMap, LinearMembers
from pluralign.learning.options import FitOptions
from pluralign.text.features import TextFeatures
from pluralign.votes.town_hall.town_hall import town_hall

FIT_KEYS = {"method", "k", "weights", "undecided", "seconds", "history", "test", "baselines", "members"}
BASELINES = {"floor", "constant_half", "soft_bt", "hard_bt", "bootstrap"}
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


# --- fit and evaluate -------------------------------------------------------------------------------------------------


def test_fit_prints_one_json_object_and_nothing_else(data: Path, tmp_path: Path) -> None:
    done = run("fit", "-", "-o", tmp_path / "out", *QUICK, "--seed", "2", "--json", stdin=data.read_text())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    facts = json.loads(done.stdout, parse_constant=refuse)
    assert set(facts) >= FIT_KEYS
    assert (facts["method"], facts["k"], facts["options"]["seed"]) == ("stagewise", 3, 2)
    assert [record["k"] for record in facts["history"]] == [1, 2, 3]
    assert sum(facts["weights"]) == pytest.approx(1)
    assert set(facts["test"]) >= {"brier", "brier_corrected", "noise", "log_loss", "interval"}
    assert set(facts["baselines"]) >= BASELINES
    assert all(set(member) >= {"weight", "disagreement", "regret"} for member in facts["members"])
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


def test_evaluate_scores_the_same_baselines_on_other_votes(
    data: Path, fitted: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder, _ = fitted
    done = run("evaluate", folder, data, "--all", "--json", "--seed", "1")
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert set(facts) >= {"test", "baselines", "members", "reliability"}
    assert set(facts["baselines"]) >= BASELINES
    assert facts["pairs"] == 400
    assert sum(facts["reliability"]["count"]) == 400
    votes = town_hall(400).preferences
    errors = (RewardEnsemble.load(folder).prob_hat(votes) - votes.prob_a) ** 2
    assert facts["test"]["brier"] == pytest.approx(errors.mean(), abs=1e-9)

    other = tmp_path / "other.jsonl"
    town_hall(200, seed=1).preferences.save(other)
    page = run("evaluate", folder, other)
    text = " ".join(page.stdout.split())
    assert page.returncode == 0
    for words in ("200 pairs", "constant ½", "soft BT as σ(Δr)", "mixture of BT", "member 2", "95 %"):
        assert words in text, words


def test_the_terminal_shows_the_undecided_share_and_the_absolute_error(data: Path, tmp_path: Path) -> None:
    dataclasses.replace(some_ensemble(), undecided=0.3).save(tmp_path)
    words = {
        ("evaluate", tmp_path, data): (
            "Undecided share: 30 %. No member explains these votes",
            "Mean absolute error 0.",
        ),
        ("certify", tmp_path, data): ("3 members, undecided share 30.0%", "counts as two rewards"),
        ("prune", tmp_path, "--data", data, "-o", tmp_path / "pruned"): ("undecided share 0.300 0.500 0.500 kept",),
    }
    for command, expected in words.items():
        done = run(*command)
        assert done.returncode == 0, done.stderr
        for part in expected:
            assert part in " ".join(done.stdout.split()), part


def test_evaluate_reads_single_votes_with_an_ensemble_fitted_to_shares(
    fitted: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    rows = [{"prompt": f"p{i % 7}", "chosen": f"Yes, {i} times.", "rejected": f"No {i}"} for i in range(30)]
    (tmp_path / "chosen.jsonl").write_text(as_lines(*rows))
    facts = json.loads(run("evaluate", fitted[0], tmp_path / "chosen.jsonl", "--json").stdout)
    assert facts["test"]["brier_corrected"] is None
    page = run("evaluate", fitted[0], tmp_path / "chosen.jsonl")
    assert page.returncode == 0
    assert not re.search(r"\bnan\b", page.stdout.lower())


def test_in_a_terminal_fit_shows_a_live_table_on_stderr_and_json_stays_clean(data: Path, tmp_path: Path) -> None:
    code, out, shown = run_in_terminal("fit", data, "-o", tmp_path / "out", *QUICK, "--json")
    assert code == 0
    assert json.loads(out)["k"] == 3
    assert "held-out Brier" in shown


def test_a_cache_folder_that_is_a_file_is_a_note(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLURALIGN_CACHE", str(tmp_path / "file"))
        done = run("fit", data, "-o", tmp_path / "out", "--encoder", "hashing")
    assert done.returncode == 0
    assert done.stderr.startswith("note: ")
    assert done.stderr.count("\n") == 1


def test_help_of_fit_shows_every_option_with_its_help() -> None:
    text = run("fit", "--help", columns=160).stdout
    words = " ".join(text.replace("│", " ").split())
    for option in dataclasses.fields(FitOptions):
        assert f"--{option.name.replace('_', '-')}" in words, option.name
        for word in option.metadata["help"].split()[:3]:
            assert word in words, option.name
    assert "--no-surface" in words
    assert "Examples" in text


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


def test_compare_gives_swapped_responses_the_other_share(folder: Path) -> None:
    chat = [{"role": "user", "content": "Tea?"}]
    pair = {"prompt": chat, "response_a": "Yes, please do.", "response_b": "No!"}
    swapped = {"prompt": chat, "response_a": "No!", "response_b": "Yes, please do."}
    done = run("compare", folder, "-", stdin=as_lines(pair, swapped))
    assert (done.returncode, done.stderr) == (0, "")
    there, back = (json.loads(line) for line in done.stdout.splitlines())
    assert set(there) >= {"votes", "prob_hat"}
    assert there["prob_hat"] == pytest.approx(1 - back["prob_hat"])
    weights = some_ensemble().weights
    assert there["prob_hat"] == pytest.approx(sum(weights * there["votes"]))


def test_empty_input_gives_empty_output(folder: Path) -> None:
    for command in ("score", "compare"):
        done = run(command, folder)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_bad_line_ends_the_stream_and_its_row_is_named(folder: Path) -> None:
    good = {"prompt": "Tea?", "response": "Yes."}
    done = run("score", folder, stdin=as_lines(*[good] * 300, {"prompt": "Tea?"}))
    assert done.returncode == 2
    assert done.stderr.startswith("pluralign: standard input, row 301: there is no value for response")
    assert done.stderr.count("\n") == 1
    assert len(done.stdout.splitlines()) == 256, "the batches before it were answered"


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
