"""What reaches the terminal: no control characters of the data, and plain lines on progress in logs."""

import json
import os
import re
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import WriteLines, printed, run, run_process, wide
from rich.text import Text

from pluralign.cli import console
from pluralign.cli.render.results import FitWatch, draw
from pluralign.core.files import REPORT_MARK
from pluralign.core.text import printable, printable_json
from pluralign.publishing.tables import Table

HOSTILE = (
    "a\x1b]0;title\x07b\x1b]8;;http://evil\x1b\\c\x1b[2Jd\x9b31me\x7ff\r\x08\u202eg\u2066h\udc80i"  # escapes, C1, bidi
)
SHOWN = "a]0;titleb]8;;http://evil\\c[2Jd31mefgh\ufffdi"
UNSAFE = set(map(chr, [*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]))


def hostile_in(text: str) -> set[str]:
    return UNSAFE & set(text)


# --- control characters -----------------------------------------------------------------------------------------------


def test_control_characters_are_removed_and_lines_stay() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("one\ttwo\nthree ½ τ 日本") == "one\ttwo\nthree ½ τ 日本"


def test_json_keeps_every_character_as_an_escape(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"text": HOSTILE})
    printed = capsys.readouterr().out
    assert not hostile_in(printed)
    assert json.loads(printed) == {"text": HOSTILE}
    assert json.loads(printable_json(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE


def test_tables_texts_and_notes_are_cleaned(capsys: pytest.CaptureFixture[str]) -> None:
    console.show([HOSTILE, Text(HOSTILE), draw(Table(HOSTILE, ("name",), [[HOSTILE]]))])
    console.note(HOSTILE)
    out, err = capsys.readouterr()
    assert out.count("]0;title") == 4
    assert not hostile_in(out + err)


@pytest.mark.parametrize("command", ["inspect", "profile", "evaluate", "diversity", "answer", "rankings"])
def test_hostile_data_is_cleaned(command: str, town_folder: Path, write_jsonl: WriteLines, tmp_path: Path) -> None:
    text = HOSTILE.replace("\udc80", "")
    rows = [
        wide(prompt=f"{text}{i}", response_a=f"{text} yes {i % 3}", response_b=f"no {i}", votes_a=i % 4, votes_b=2)
        | {text: text}
        for i in range(24)
    ]
    votes = write_jsonl(rows, name="\x1b]0;votes\x07.jsonl")
    lists = write_jsonl([{"prompt": text, "responses": [text, "no", "maybe"]}], name="candidates.jsonl")
    ranked = tmp_path / "town.json"
    ranked.write_text(json.dumps({"alternatives": [text, "tea"], "pairs": [[0, 1, 3, 1]]}))
    commands: dict[str, list[str | Path]] = {
        "inspect": [votes],
        "profile": [town_folder, votes],
        "evaluate": [town_folder, votes, "--group", text],
        "diversity": [town_folder, lists],
        "answer": [town_folder, text, "--candidates", lists],
        "rankings": [ranked],
    }
    arguments = commands[command]
    done = run(command, *arguments)
    assert done.returncode == 0, done.stderr
    assert not hostile_in(done.stdout + done.stderr)
    assert "]0;" in done.stdout
    as_json = run(command, *arguments, "--json").stdout
    assert not hostile_in(as_json)
    assert json.loads(as_json)


def test_errors_that_name_columns_paths_or_options_are_cleaned(write_jsonl: WriteLines) -> None:
    path = write_jsonl([{"\x1b]0;column\x07": 1}])
    for arguments in (["inspect", path], ["inspect", "\x1b]0;none\x07.jsonl"], ["inspect", "--\x1b]0;x\x07"]):
        done = run(*arguments)
        assert done.returncode == 2
        assert not hostile_in(done.stderr)


def test_a_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")
    Path(name).write_text(json.dumps(wide()))
    done = run_process("inspect", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert "\ufffd.jsonl is not valid UTF-8; " in done.stderr


def test_a_terminal_without_unicode_gets_escapes(write_jsonl: WriteLines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    path = write_jsonl([wide(größe="x")])
    done = run_process("inspect", path)
    assert done.returncode == 0, done.stderr
    assert "constant \\xbd" in done.stdout
    assert "größe" in json.loads(run_process("inspect", path, "--json").stdout)["columns"]


# --- progress without a terminal --------------------------------------------------------------------------------------


def lines_of(words: str, seconds: float, steps: list[tuple[int, int]]) -> list[str]:
    """The lines of work whose steps take so many seconds each."""
    lines: list[str] = []
    now = 0.0
    progress = console.plain_progress(words, console.PlainLines(lines.append, lambda: now))
    for done, total in steps:
        now += seconds
        progress(done, total)
    return lines


def test_short_work_prints_nothing() -> None:
    assert lines_of("Encoding texts", console.FIRST_SECONDS / 6, [(done, 5) for done in range(1, 6)]) == []


def test_long_work_prints_a_line_per_minute() -> None:
    slow = lines_of("Tuning", 1, [(done, 1_000_000) for done in range(1, 601)])
    assert len(slow) == 1 + (600 - console.FIRST_SECONDS) // console.LATER_SECONDS


def test_work_of_unknown_length_and_a_second_pass_are_counted() -> None:
    lines = lines_of("Reading", console.LATER_SECONDS, [(7, 0), (90, 100), (10, 100)])
    assert lines == ["Reading: 7", "Reading: 90 of 100 (90 %)", "Reading: 10 of 100 (10 %)"]


def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_SECONDS", "LATER_SECONDS"):
        monkeypatch.setattr(f"pluralign.cli.console.{name}", 0.0)


def test_a_log_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    no_waiting(monkeypatch)
    with console.progress_bar("Encoding \x1btexts") as progress:
        assert progress is not None
        progress(1200, 5000)
    assert capsys.readouterr() == ("", "Encoding texts: 1,200 of 5,000 (24 %)\n")


def test_a_long_fit_names_its_stages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with FitWatch() as watch:
        watch.choosing("the target")
        assert capsys.readouterr().err == ""
        no_waiting(monkeypatch)
        watch.choosing("the target")
        watch.fold(2, 5)
    assert capsys.readouterr().err == "Fit: choosing the target\nFit: cross-validation: fold 2 of 5\n"


# --- streams that cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--version"], ["inspect", "demo:300"], ["inspect", "demo:300", "--json"]])
def test_a_full_disk_behind_stdout_is_one_sentence(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pluralign", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "pluralign: the output cannot be written: no space left on device.\n")


@pytest.mark.parametrize(
    ("redirection", "code", "sentence"),
    [
        (">&-", 2, "pluralign: standard output is closed; redirect it to a file or to /dev/null.\n"),
        ("<&-", 2, "pluralign: standard input: the file has no rows; give at least one row.\n"),
        ("2>&-", 2, ""),
    ],
)
def test_closed_streams_are_no_traceback(redirection: str, code: int, sentence: str) -> None:
    command = f"{sys.executable} -m pluralign inspect - {redirection}"
    done = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", sentence)


# --- outputs ----------------------------------------------------------------------------------------------------------


FILES = {
    "report": ["report", "ENSEMBLE", "-o", "OUT"],
    "generate": ["generate", "PROMPTS", "-o", "OUT"],
    "demo": ["demo", "--pairs", "300", "-o", "OUT"],
    "demo --report": ["demo", "--pairs", "300", "--report", "OUT"],
    "fit --save-config": ["fit", "demo:300", "-o", "ELSEWHERE", "--save-config", "OUT"],
}
FOLDERS = {
    "fit": ["fit", "demo:300", "-o", "OUT"],
    "prune": ["prune", "ENSEMBLE", "-o", "OUT"],
    "export": ["export", "ENSEMBLE", "-o", "OUT"],
    "encode": ["encode", "demo:300", "-o", "OUT", "--encoder", "none"],
    "score": ["score", "ENSEMBLE", "PROMPTS", "-o", "OUT"],
    "tune": ["tune", "ENSEMBLE", "PROMPTS", "-o", "OUT"],
    "report --figures": ["report", "ENSEMBLE", "-o", "ELSEWHERE", "--figures", "OUT"],
    "reproduce": ["reproduce", "tldr", "--tiny", "-o", "OUT"],
}


@pytest.fixture
def words(tmp_path: Path, town_folder: Path) -> dict[str, Path]:
    """Paths for the placeholders in a command."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(wide(prompt=str(i), response="Yes.")) + "\n" for i in range(5)))
    return {
        "ENSEMBLE": town_folder, "PROMPTS": prompts, "OUT": tmp_path / "out.jsonl", "ELSEWHERE": tmp_path / "elsewhere",
    }  # fmt: skip


def filled(command: list[str], words: dict[str, Path]) -> list[str]:
    return [str(words.get(word, word)) for word in command]


@pytest.mark.parametrize("command", [*FILES.values(), *FOLDERS.values()], ids=[*FILES, *FOLDERS])
def test_a_pipe_is_refused_before_the_work(command: list[str], words: dict[str, Path]) -> None:
    os.mkfifo(words["OUT"])
    done = run(*filled(command, words))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"pluralign: {words['OUT']} is ")
    assert done.stderr.count("\n") == 1
    assert stat.S_ISFIFO(words["OUT"].lstat().st_mode)
    assert not words["ELSEWHERE"].exists()


FOREIGN = "prompt,chosen,rejected\nTea?,Yes.,No.\n"


@pytest.mark.parametrize("command", [*FILES.values(), *FOLDERS.values()], ids=[*FILES, *FOLDERS])
def test_no_output_replaces_what_another_program_wrote(command: list[str], words: dict[str, Path]) -> None:
    is_folder = command in FOLDERS.values()
    figures = [f"{name}.{kind}" for name in ("shares", "reliability") for kind in ("png", "svg")]
    files = [words["OUT"] / name for name in ("votes.csv", *figures)] if is_folder else [words["OUT"]]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(FOREIGN)
    done = run(*filled(command, words))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(r"(holds other files|not written by|did not write|not empty).*; ", done.stderr)
    assert {file.read_text() for file in files} == {FOREIGN}
    assert sorted(files) == (sorted(words["OUT"].iterdir()) if is_folder else files)
    missing = [word if word != str(words["PROMPTS"]) else "missing.jsonl" for word in filled(command, words)]
    assert run(*[word.replace("demo:300", "missing.jsonl") for word in missing]).returncode == 2
    assert {file.read_text() for file in files} == {FOREIGN}


@pytest.mark.parametrize("name", ["report", "demo"])
def test_a_file_is_written_through_a_link(name: str, words: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "target.jsonl"
    words["OUT"].symlink_to(target)
    printed(*filled(FILES[name], words))
    assert words["OUT"].is_symlink()
    assert len(target.read_text()) > 20


def test_a_folder_is_written_through_a_link(words: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    words["OUT"].symlink_to(target)
    printed(*filled(FOLDERS["prune"], words))
    assert words["OUT"].is_symlink()
    assert (target / "ensemble.json").is_file()


@pytest.mark.parametrize("name", ["report", "demo"])
def test_a_full_disk_leaves_nothing_half_written(name: str, words: dict[str, Path], tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    before = REPORT_MARK if name == "report" else ""
    words["OUT"].write_text(before)
    done = subprocess.run(
        [sys.executable, "-m", "pluralign", *filled(FILES[name], words)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pluralign: the output cannot be written: file too large.\n"
    assert words["OUT"].read_text() == before
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
