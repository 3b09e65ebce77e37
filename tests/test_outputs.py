"""Outputs of commands: devices and pipes are refused, symbolic links stay, system errors are one sentence."""

import json
import os
import pty
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run, wide

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
    prompts.write_text(json.dumps(wide(response="Yes.")) + "\n")
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


def test_a_device_behind_a_link_is_refused_and_the_link_stays(words: dict[str, Path]) -> None:
    leader, follower = pty.openpty()
    words["OUT"].symlink_to(os.ttyname(follower))
    done = run(*filled(FILES["report"], words))
    os.close(leader)
    os.close(follower)
    assert done.returncode == 2
    assert done.stderr.endswith("out.jsonl is a device or a pipe; name a regular file to write.\n")
    assert words["OUT"].is_symlink()


@pytest.mark.parametrize("name", ["report", "demo", "fit --save-config"])
@pytest.mark.parametrize("exists", [False, True])
def test_a_file_is_written_through_a_link(name: str, exists: bool, words: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "target.jsonl"
    if exists:
        target.write_text("before")
    words["OUT"].symlink_to(target)
    more = ["--encoder", "none", "--k", "2", "--target", "votes"] if name.startswith("fit") else []
    done = run(*filled(FILES[name], words), *more)
    assert done.returncode == 0, done.stderr
    assert words["OUT"].is_symlink()
    assert len(target.read_text()) > 20


def test_a_folder_is_written_through_a_link(words: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    words["OUT"].symlink_to(target)
    done = run(*filled(FOLDERS["prune"], words))
    assert done.returncode == 0, done.stderr
    assert words["OUT"].is_symlink()
    assert (target / "ensemble.json").is_file()


@pytest.mark.parametrize("name", ["report", "demo"])
def test_a_file_that_cannot_grow_is_one_sentence_and_nothing_is_half_written(
    name: str, words: dict[str, Path], tmp_path: Path
) -> None:
    """A limit on the size of files stands for a full disk."""
    words["OUT"].write_text("before")
    done = subprocess.run(
        [sys.executable, "-m", "pluralign", *filled(FILES[name], words)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pluralign: the output cannot be written: file too large.\n"
    assert words["OUT"].read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
