"""The command line: exit codes, streams, JSON, help, inspect and demo."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import WriteLines, facts_of, printed, run, run_process, wide
from test_summary import in_plain_python, random_rows

from pluralign import __version__, demo, town_hall
from pluralign.cli.main import COMMANDS

COMMAND_NAMES = [command.__name__ for commands in COMMANDS.values() for command in commands]
WITH_SEED = {"demo", "fit", "evaluate", "answer", "serve", "tune", "generate", "rankings", "reproduce"}


# --- in a process: streams and exit codes -----------------------------------------------------------------------------


def test_json_goes_to_stdout_and_notes_to_stderr(write_jsonl: WriteLines) -> None:
    done = run_process("inspect", write_jsonl([wide(), wide(votes_a=-1), wide(ties=2)]), "--json", "--skip-bad")
    assert done.returncode == 0
    assert json.loads(done.stdout)["dropped"] == {"tie votes": 2, "negative count": 1}
    assert done.stderr.startswith("note: dropped from ")
    assert "1 negative count, 2 tie votes" in done.stderr


# --- help, options and logging ----------------------------------------------------------------------------------------


def test_help_lists_every_command_and_version_is_printed() -> None:
    text = run("--help").stdout
    assert all(f"│ {name} " in text for name in COMMAND_NAMES)
    assert run("--version").stdout.strip() == __version__


@pytest.mark.parametrize("name", COMMAND_NAMES)
def test_help_of_a_command_has_examples_and_its_seed(name: str) -> None:
    done = run(name, "--help", columns=160)
    assert (done.returncode, done.stderr) == (0, "")
    options, _, examples = done.stdout.partition("Examples:")
    assert f"pluralign {name}" in examples
    assert "--json" in done.stdout
    assert ("--seed" in options) == (name in WITH_SEED), "commands with randomness"


# --- shell completion -------------------------------------------------------------------------------------------------


def test_completion_is_printed_and_installed_for_the_shell_that_runs(tmp_path: Path) -> None:
    both = " && ".join(f"{sys.executable} -m pluralign --{what}-completion" for what in ("show", "install"))
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", f"{both}; true"], env=environment, capture_output=True, text=True, check=True)
    assert "complete -o default -F _pluralign_completion pluralign" in done.stdout
    script = tmp_path / ".bash_completions" / "pluralign.sh"
    assert "_PLURALIGN_COMPLETE=complete_bash" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("pluralign re", ["report", "reproduce"]),
        ("pluralign fit --met", ["--method"]),
        ("pluralign fit demo --method s", ["stagewise"]),
    ],
)
def test_names_and_values_are_completed(words: str, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PLURALIGN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    done = run()
    assert (done.returncode, done.stdout.split()) == (0, found)


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_prints_one_json_object_with_all_keys(write_jsonl: WriteLines) -> None:
    done = run("inspect", write_jsonl(random_rows()), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    for name, expected in in_plain_python(random_rows()).items():
        assert summary[name] == pytest.approx(expected, abs=1e-12)


def test_inspect_reads_standard_input_and_options(write_jsonl: WriteLines) -> None:
    rows = [{"q": "x", "response_a": "A", "response_b": "B", "votes_a": 1, "votes_b": 1, "ties": 2}]
    data = write_jsonl(rows).read_bytes()
    done = run("inspect", "-", "--json", "--ties", "half", "--rename", "prompt=q", stdin=data)
    summary = json.loads(done.stdout)
    assert (summary["votes"], summary["tie_rule"]) == (4, "half")


# --- demo -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fast_demo() -> Iterator[None]:
    """The fits of the demo run once for all tests that look at it."""
    result = demo(town_hall(300, rankings=True), encoder="none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pluralign.demo", lambda *_, **__: result)
        yield


DEMO = ("demo", "--pairs", "300", "--encoder", "none")


@pytest.mark.usefixtures("fast_demo")
def test_demo_tells_its_story_in_eighty_lines_of_eighty_columns() -> None:
    text = printed(*DEMO, columns=80)
    shown = text.splitlines()
    assert (len(shown) <= 80, max(map(len, shown)) <= 80) == (True, True)
    parts = ["1. Votes", "2. Who disagrees", "3. Who is", "rankings with ids", "Main number:", "→ ensemble"]
    parts += ["perfect single reward", "true shares", "5. Ask", "Consensus:", "6. Next"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "are in the report:\n  pluralign demo --report town.html\n" in text


@pytest.mark.usefixtures("fast_demo")
def test_demo_names_the_commands_that_fit_and_serve_the_same_ensemble() -> None:
    shown = printed(*DEMO)
    options = "-o town --encoder none --test-fraction 0.2\n  pluralign serve town\n"
    assert f"  pluralign fit demo-rankings:300 {options}" in shown
    other = printed(*DEMO, "--seed", "3")
    assert f"  pluralign demo --pairs 300 --seed 3 -o town.parquet\n  pluralign fit town.parquet {options}" in other


@pytest.mark.usefixtures("fast_demo")
def test_report_of_the_demo_has_all_methods_and_the_truth(tmp_path: Path) -> None:
    shown = printed(*DEMO, "--report", tmp_path / "town.html")
    assert f"Wrote {tmp_path / 'town.html'}" in shown.replace("\n", "")
    page = (tmp_path / "town.html").read_text()
    parts = ["All methods on held-out prompts", "stagewise, printed", "8 random people", "keepers of custom"]
    assert [words for words in parts if words not in page] == []


@pytest.mark.usefixtures("fast_demo")
def test_demo_prints_json_with_all_keys() -> None:
    result = facts_of(*DEMO)
    keys = {"inspect", "truth", "methods", "report_data", "camps", "asked", "report"}
    assert set(result) == keys
    assert sum(result["asked"]["first_choices"]) == pytest.approx(1)
    assert {entry["text"] for entry in result["asked"]["answer"]["answers"]} <= set(result["asked"]["responses"])
    assert list(result["camps"]) == ["vote counts", "rankings", "rankings with ids"]
    for study in result["camps"].values():
        assert len(study["camps"]) == 6
        assert study["represented"] == sum(camp["member"] is not None for camp in study["camps"])
    assert {"facts", "votes", "profiles", "certificate"} < set(result["report_data"])
    errors = [method["true_error"] for method in result["methods"]]
    assert errors == sorted(errors)


def test_demo_writes_its_votes(tmp_path: Path) -> None:
    wrote = run("demo", "--pairs", "300", "-o", tmp_path / "town.parquet", "--json")
    assert json.loads(wrote.stdout)["pairs"] == 300
    run("demo", "--pairs", "300", "-o", tmp_path / "other.parquet", "--seed", "1")
    assert "only .parquet keeps rankings" in run("demo", "--pairs", "300", "-o", tmp_path / "counts.jsonl.gz").stdout
    files = [tmp_path / file for file in ("town.parquet", "other.parquet", "counts.jsonl.gz")]
    found = [json.loads(run("inspect", str(data), "--json").stdout) for data in ("demo-rankings:300", *files)]
    same, town, other, counts = (one["fingerprint"] for one in found)
    assert same == town != other
    assert counts != town
    assert [one["judgments"] is None for one in found] == [False, False, False, True]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("inspect", "missing argument 'DATA'"),
        ("inspekt demo", "did you mean 'inspect'"),
        ("fit --metod joint", "--method"),
        ("inspect dmo", "'demo'?"),
        (f"demo -o {'x' * 300}.jsonl", "xxx.jsonl: file name too long."),
        (f"fit demo:300 -o {'x' * 300}", "xxx: file name too long."),
        ("fit demo:60 -o x extra", "unexpected extra argument"),
        ("fit demo:60 -o x --epochs", "requires an argument"),
        ("inspect demo --tie half", "--tie"),
        ("inspect demo --rename prompt", "--rename must be OURS=THEIRS, not 'prompt'"),
        ("demo --pairs 3", "pairs"),
        ("demo -o votes.xlsx", "votes.xlsx"),
        ("fit demo:60", "--output"),
        ("fit demo:60 -o ", "the value of -o is empty"),
        ("fit demo:60 -o x --seed -1", "seed must not be negative"),
        (f"fit demo:60 -o x --seed {2**64}", "seed must be at most"),
        (f"fit demo:60 -o x --k {'9' * 5000}", "k must be a whole number from 1 to 256"),
        ("fit demo:60 -o x --method joynt", "'joint', 'stagewise'"),
        ("fit demo:60 -o /proc/nowhere/out --encoder none --method stagewise", "/proc/nowhere"),
        ("inspect ", "an argument is empty"),
        (f"inspect demo:{'9' * 5000}", "PAIRS in demo:PAIRS must be a whole number"),
        (f"inspect {'x' * 5000}", "there is no such file or known set"),
        ("evaluate nowhere demo:60", "no such folder, file or hub id; name a folder that pluralign fit wrote"),
        ("evaluate votes.jsonl FOLDER", "name the ensemble first, then a file of votes"),
        ("certify FOLDER --epsilon 1e-320", "epsilon must be at least 1e-300"),
        ("score FOLDER nowhere.jsonl", "there is no file nowhere.jsonl"),
    ],
    ids=lambda value: value[:60],
)
def test_a_mistake_is_a_short_message(
    words: str, sentence: str, town_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "votes.jsonl").write_text("{}")
    done = run(*(str(town_folder) if word == "FOLDER" else word for word in words.split(" ")), columns=200)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert (done.stderr[:11], done.stderr.count("\n")) == ("pluralign: ", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["votes.jsonl"]
