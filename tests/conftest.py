"""Fixtures and helpers that many tests use."""

import io
import json
import logging
import math
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from tiny import write_backbone

if TYPE_CHECKING:
    from page_browser import Tab

    from pluralign import PreferenceSet, RewardEnsemble
    from pluralign.ensemble.held_out import HeldOutVotes
    from pluralign.ensemble.record import Evaluation

settings.register_profile("pluralign", deadline=None)  # machines are noisy; time is measured in benchmarks/
settings.load_profile("pluralign")

WriteLines = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give tests, and the commands they start, a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLURALIGN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def write_jsonl(tmp_path: Path) -> WriteLines:
    """Return a function that writes records, or raw lines of text or bytes, to a .jsonl file."""

    def write(records: Iterable[Mapping[str, Any] | str | bytes], name: str = "votes.jsonl") -> Path:
        path = tmp_path / name
        with path.open("wb") as stream:
            for record in records:
                line = json.dumps(record) if isinstance(record, Mapping) else record
                stream.write((line.encode() if isinstance(line, str) else line) + b"\n")
        return path

    return write


@pytest.fixture(scope="session")
def town_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an ensemble of three members on surface features, with many held-out votes."""
    from pluralign import fit, town_hall

    path = tmp_path_factory.mktemp("ensemble")
    votes = town_hall(480).preferences
    fit(votes, k=3, encoder="none", target="votes", seed=1, folder=path, test_fraction=0.4)  # three members that differ
    return path


@pytest.fixture(scope="module")
def ensemble(town_folder: Path) -> "RewardEnsemble":
    """Return the ensemble of ``town_folder``."""
    from pluralign import RewardEnsemble

    return RewardEnsemble.load(town_folder)


@pytest.fixture(scope="module")
def held_out(town_folder: Path) -> "HeldOutVotes":
    """Return the held-out votes of ``town_folder``."""
    from pluralign.ensemble.held_out import load_held_out

    return load_held_out(town_folder)


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an ensemble of two members whose few held-out prompts allow no interval and no name."""
    from pluralign import fit, town_hall

    path = tmp_path_factory.mktemp("small")
    fit(town_hall(64).preferences, k=2, encoder="none", target="votes", folder=path)
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Return a headless Chromium, controlled through Playwright."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    if executable is None:
        reason = "no Chromium on this machine: install the package chromium to run browser tests"
        assert "PLURALIGN_NEEDS_BROWSER" not in os.environ, reason
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable, args=[*flags, "--disable-sync"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(ensemble: "RewardEnsemble", held_out: "HeldOutVotes") -> Iterator[str]:
    """Return the address of a page that shows ``ensemble``."""
    from served import running

    with running(ensemble, held_out=held_out) as client:
        yield f"{client.address}/"


@pytest.fixture(scope="module")
def shown(address: str) -> dict[str, Any]:
    """Return the data of the page; ``tests/test_page_data.py`` checks it."""
    from page_browser import page_data

    return page_data(address)


@pytest.fixture(scope="module")
def one_tab(browser: Any) -> Iterator["Tab"]:
    """Return one tab for all tests of a file."""
    from page_browser import new_tab

    with new_tab(browser) as tab:
        yield tab


@pytest.fixture
def tab(one_tab: "Tab") -> Iterator["Tab"]:
    """Return the tab, and check afterwards that the test caused no error in it."""
    with one_tab.checked():
        yield one_tab


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Use one torch thread: more threads slow down the small models of the tests."""
    from pluralign.experiments.rehearsal import one_thread

    with one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for the commands that tests start
        yield


def pairs_of(votes: "PreferenceSet", *, columns: bool = False) -> list[tuple[Any, ...]]:
    """Return (prompt, response a, response b, votes for a, votes for b, ties) of each pair, and its other columns."""
    texts = votes.prompts[votes.prompt_index], votes.responses[votes.a_index], votes.responses[votes.b_index]
    numbers = votes.votes_a.tolist(), votes.votes_b.tolist(), votes.ties.tolist()
    return list(zip(*texts, *numbers, *(votes.columns.values() if columns else ()), strict=True))


def evaluation_of(ensemble: "RewardEnsemble") -> "Evaluation":
    """Return the figures of a fit on its test prompts."""
    assert ensemble.record.evaluation is not None
    return ensemble.record.evaluation


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in the lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def wide(**changes: Any) -> dict[str, Any]:
    """Return a valid row in the wide layout, with some columns changed; None removes a column."""
    row = {"prompt": "Tea?", "response_a": "Yes.", "response_b": "No.", "votes_a": 3, "votes_b": 2} | changes
    return {name: value for name, value in row.items() if value is not None}


def launch(*arguments: str | Path) -> "subprocess.Popen[str]":
    """Start ``pluralign`` twice on this machine's CPU, as ``accelerate launch`` does on a node of GPUs.

    ``accelerate launch --cpu`` would start one process: for CPUs it leaves more than one to MPI.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*torchrun, "-m", "pluralign", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        start_new_session=True,
    )


def kill_a_worker(launched: "subprocess.Popen[str]", folder: Path, written: str) -> None:
    """Kill the last of the two processes of ``launch`` once a file like ``written`` is in a folder."""
    deadline = time.monotonic() + 120
    while not list(folder.glob(written)):
        assert launched.poll() is None, launched.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = ["pgrep", "-P", str(launched.pid)]
    workers = subprocess.run(children, capture_output=True, text=True, check=True).stdout.split()
    assert len(workers) == 2
    os.kill(int(workers[-1]), signal.SIGKILL)


def run(*arguments: str | Path, stdin: bytes | str = b"", columns: int = 120) -> subprocess.CompletedProcess[str]:
    """Run ``pluralign`` inside this process; return its exit code, stdout and stderr.

    ``run_process`` starts a process, for tests of what only a process has: a fresh interpreter, file descriptors.
    """
    from pluralign.cli.main import main

    command, code, log = ["pluralign", *map(str, arguments)], 0, logging.getLogger()
    level, handlers = log.level, log.handlers[:]
    contents = {"stdin": stdin.encode() if isinstance(stdin, str) else stdin, "stdout": b"", "stderr": b""}
    streams = {
        name: io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", write_through=True)
        for name, content in contents.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("NO_COLOR", "1")
        patch.setattr(sys, "argv", command)
        patch.setattr("pluralign.cli.console.FIRST_SECONDS", math.inf)  # machines are noisy
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        log.handlers.clear()  # those of pytest: the command adds its own
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        finally:
            log.handlers[:] = handlers
            log.setLevel(level)
    out, err = (streams[name].buffer.getvalue().decode() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(command, code, out, err)


def printed(*arguments: str | Path, stdin: bytes | str = b"", columns: int = 120) -> str:
    """Return what a command prints on stdout. It must succeed."""
    done = run(*arguments, stdin=stdin, columns=columns)
    assert done.returncode == 0, done.stderr
    return done.stdout


def facts_of(*arguments: str | Path, stdin: bytes | str = b"") -> Any:
    """Return the JSON object that a command prints. It must succeed."""
    return json.loads(printed(*arguments, "--json", stdin=stdin))


def run_process(*arguments: str | Path, stdin: bytes | str = b"") -> subprocess.CompletedProcess[str]:
    """Run ``pluralign`` in a process of its own, as a script would; return its exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "pluralign", *map(str, arguments)],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        check=False,
        env=os.environ | {"COLUMNS": "120", "NO_COLOR": "1"},
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def run_in_terminal(*arguments: str | Path) -> tuple[int, str, str]:
    """Run ``pluralign`` with a terminal as stderr; return its exit code, stdout and the output of the terminal."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "pluralign", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, env=os.environ | {"TERM": "xterm"})
    os.close(follower)
    shown = b""
    while True:
        try:
            chunk = os.read(leader, 4096)
        except OSError:  # Linux raises this when the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    out, _ = process.communicate()
    return process.returncode, out.decode(), shown.decode(errors="replace")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny causal model, as a hub would provide it."""

    return write_backbone(tmp_path_factory.mktemp("llama"))
