"""The command line as scripts and people meet it: exit codes, streams, JSON, tables."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import WriteLines, run, run_in_terminal, wide
from test_summary import by_hand, random_rows

from pluralign import __version__

INSPECT_KEYS = {
    "pairs", "prompts", "votes", "votes_per_pair", "majority_share", "noise", "floor", "constant_half",
    "floor_corrected",
}  # fmt: skip


def test_inspect_prints_one_json_object_with_the_contracts_keys(write_jsonl: WriteLines) -> None:
    done = run("inspect", write_jsonl(random_rows()), "--json", "--seed", "3")
    assert done.returncode == 0
    assert done.stderr == ""
    facts = json.loads(done.stdout)
    assert set(facts) >= INSPECT_KEYS
    for name, expected in by_hand(random_rows()).items():
        assert facts[name] == pytest.approx(expected, abs=1e-12)


def test_inspect_shows_a_table_and_a_histogram(write_jsonl: WriteLines) -> None:
    done = run("inspect", write_jsonl([*random_rows(), wide(response_b="")]))
    assert done.returncode == 0
    for words in ("501 pairs", "41 prompts", "floor", "constant ½", "noise", "majority's side", "█", "empty response"):
        assert words in done.stdout


def test_inspect_reads_standard_input_and_options(write_jsonl: WriteLines) -> None:
    rows = [{"q": "x", "response_a": "A", "response_b": "B", "votes_a": 1, "votes_b": 1, "ties": 2}]
    data = write_jsonl(rows).read_bytes()
    done = run("inspect", "-", "--json", "--ties", "half", "--rename", "prompt=q", stdin=data)
    facts = json.loads(done.stdout)
    assert (facts["votes"], facts["tie_rule"]) == (4, "half")


def test_a_single_vote_gives_null_not_nan(write_jsonl: WriteLines) -> None:
    done = run("inspect", write_jsonl([{"prompt": "x", "chosen": "A", "rejected": "B"}]), "--json")
    assert json.loads(done.stdout)["noise"] is None
    assert run("inspect", write_jsonl([{"prompt": "x", "chosen": "A", "rejected": "B"}])).returncode == 0


def test_bad_input_is_one_sentence_and_exit_code_two(write_jsonl: WriteLines) -> None:
    path = write_jsonl([wide(), wide(votes_a=-1)])
    done = run("inspect", path, "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"pluralign: {path}, row 2: votes_a is -1, below zero; ")
    assert done.stderr.count("\n") == 1


def test_skipped_rows_are_told_on_stderr_and_in_the_json(write_jsonl: WriteLines) -> None:
    done = run("inspect", write_jsonl([wide(), wide(votes_a=-1), wide(ties=2)]), "--json", "--skip-bad")
    assert json.loads(done.stdout)["dropped"] == {"tie votes": 2, "negative count": 1}
    assert "2 tie votes, 1 negative count" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "demo", "--tie", "half"],
        ["inspect", "demo", "--ties", "thirds"],
        ["inspect", "demo", "--rename", "prompt"],
        ["inspect", "nowhere.jsonl"],
        ["inspekt"],
        ["demo", "--pairs", "3"],
        ["demo", "-o", "votes.xlsx"],
        ["demo", "-o", "/proc/nowhere/votes.jsonl"],
    ],
)
def test_bad_usage_exits_with_two_and_no_traceback(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr) > 20


def test_hostile_names_and_texts_are_printed_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "[bold]votes.jsonl"
    path.write_text(json.dumps(wide(response_a="[red]Yes[/red]")))
    assert "[bold]votes.jsonl" in run("inspect", path).stdout.replace("\n", "")


def test_the_demo_tells_its_story() -> None:
    story = run("demo", "--pairs", "300", "--encoder", "none", columns=120)
    assert story.returncode == 0, story.stderr
    for words in (
        "300 pairs",
        "The town is split",
        "Here the truth is known",
        "true error",
        "random people",
        "member 7",
    ):
        assert words in story.stdout
    told = json.loads(run("demo", "--pairs", "300", "--encoder", "none", "--json").stdout)
    keys = {"inspect", "truth", "told", "members", "study", "pruning", "rankings", "report"}
    assert set(told) == keys
    assert [one["true_error"] for one in told["told"]] == sorted(one["true_error"] for one in told["told"])


def test_the_demo_writes_its_votes(tmp_path: Path) -> None:
    wrote = run("demo", "--pairs", "300", "-o", tmp_path / "town.jsonl.gz", "--json")
    assert json.loads(wrote.stdout)["pairs"] == 300
    run("demo", "--pairs", "300", "-o", tmp_path / "other.parquet", "--seed", "1")
    same, town, other = (
        json.loads(run("inspect", data, "--json").stdout)["fingerprint"]
        for data in ("demo:300", tmp_path / "town.jsonl.gz", tmp_path / "other.parquet")
    )
    assert same == town != other


def test_help_has_examples_and_version_is_printed() -> None:
    assert "Examples" in run("inspect", "--help").stdout
    assert "--min-votes" in run("inspect", "--help").stdout
    assert run("--version").stdout.strip() == __version__


def test_a_reader_that_goes_away_ends_the_command_quietly(write_jsonl: WriteLines) -> None:
    path = write_jsonl(random_rows())
    command = f"{sys.executable} -m pluralign inspect {path} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_in_a_terminal_progress_goes_to_stderr_and_results_stay_clean(write_jsonl: WriteLines) -> None:
    path = write_jsonl([wide(prompt=f"p{i}") for i in range(20_000)])
    code, out, shown = run_in_terminal("inspect", path, "--json")
    assert code == 0
    assert json.loads(out)["pairs"] == 20_000
    assert "Reading" in shown
