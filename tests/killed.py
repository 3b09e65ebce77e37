"""Commands that are killed at a chosen step of their work on files.

A step is one change of the file system below a folder: a file opened for writing, renamed or removed, or a folder
created or removed. Python's audit events report it before it happens. So every moment of a save can be tried, without
waiting. Processes are forked from a server that has imported the package.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pluralign.text.causal import Completion
from pluralign.text.options import SamplingOptions
from pluralign.votes.prompts import PromptLike

CHANGES = frozenset({"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree"})
MODULES = ("pluralign.cli.main", "pluralign.learning.fit", "pluralign.measuring.pruning", "pluralign.scale.jobs")
TIMES = ("seconds", "seconds_encoding", "sha256")


@dataclass(frozen=True)
class Kill:
    """A command that writes to ``target``, in a folder where ``before`` were run."""

    name: str
    command: tuple[str, ...]
    target: str
    before: tuple[tuple[str, ...], ...] = ()


def _fit(data: str, *options: str) -> tuple[str, ...]:
    return ("fit", data, "-o", "x", "--k", "2", "--encoder", "none", "--method", "stagewise", *options)


def _prune(beta: str) -> tuple[str, ...]:
    return "prune", "x", "-o", "p", "--furthest", "--beta", beta


KILLS = (
    Kill("fit", _fit("demo:60"), "x"),
    Kill("re-fit", _fit("demo:80", "--overwrite"), "x", (_fit("demo:60"),)),
    Kill("prune", _prune("3"), "p", (_fit("demo:60"),)),
    Kill("re-prune", (*_prune("3"), "--overwrite"), "p", (_fit("demo:60"), _prune("9"))),
    Kill("encode", ("encode", "demo:60", "-o", "e", "--encoder", "hashing", "--shard-rows", "40"), "e"),
    Kill("generate", ("generate", "c.jsonl"), "c.jsonl"),
)
_undisturbed: dict[str, tuple[int, Path, dict[str, Any]]] = {}


def check_kill(kill: Kill, share: float, folder: Path) -> None:
    """Kill a command after a share of its steps, check what readers see, run it again, and check the result."""
    if kill.name not in _undisturbed:
        start, whole = folder / "start", folder / "whole"
        start.mkdir()
        for command in kill.before:
            run_to_step(command, start)
        shutil.copytree(start, whole)
        steps = run_to_step(kill.command, whole, kill.target)
        _undisturbed[kill.name] = steps, start, contents(whole)
    steps, start, expected = _undisturbed[kill.name]
    broken = folder / "killed"
    shutil.copytree(start, broken)
    before = contents(broken)
    step = 1 + int(share * steps)
    run_to_step(kill.command, broken, kill.target, step)
    _check_readers(broken / kill.target, before, expected, kill.target)
    run_to_step(kill.command, broken, kill.target)
    assert contents(broken) == expected, (kill.name, step)


def _check_readers(target: Path, before: dict[str, Any], after: dict[str, Any], name: str) -> None:
    """Check that a reader sees the ensemble before the command or after it, whole; or none, if there was none."""
    from pluralign.ensemble.ensemble import RewardEnsemble
    from pluralign.ensemble.held_out import load_held_out

    now = json.loads((target / "ensemble.json").read_bytes()) if (target / "ensemble.json").is_file() else None
    key = f"{name}/ensemble.json"
    if now is None:
        assert key not in before
        return
    assert without_times(now) in (before.get(key), after.get(key))
    load_held_out(target, RewardEnsemble.load(target))


def run_to_step(arguments: Sequence[str], folder: Path, target: str = "", step: int | None = None) -> int:
    """Run a command in a folder, in a process that is killed before a step, counted from 1; return the steps begun.

    Steps are counted in ``target``. With None, or if the command has fewer steps, it is not killed and must succeed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    begun = context.Value("i", 0)
    process = context.Process(target=_run, args=(list(arguments), str(folder), target, step, begun))
    process.start()
    process.join()
    killed = step is not None and begun.value >= step
    assert process.exitcode == (-signal.SIGKILL if killed else 0), (arguments, step, process.exitcode)
    return int(begun.value)


def _run(arguments: list[str], folder: str, target: str, step: int | None, begun: Any) -> None:
    os.chdir(folder)
    root = os.path.realpath(target)

    def watch(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(values[2], int) and not values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if event not in CHANGES and event != "open":
            return
        paths = [os.fsdecode(value) for value in values[:2] if isinstance(value, str | bytes | os.PathLike)]
        if any(os.path.realpath(path).startswith(root) for path in paths):
            begun.value += 1
            if begun.value == step:
                os.kill(os.getpid(), signal.SIGKILL)

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.addaudithook(watch)
    if arguments[0] == "generate":
        from pluralign.answering.generate import generate

        generate([f"Question {i}?" for i in range(6)], arguments[1], Echo(), 2)
        return
    from pluralign.cli.main import main

    sys.argv = ["pluralign", *arguments]
    main()


class Echo:
    """A sampler that needs no model."""

    name = "echo"

    def prepare(self) -> None:
        """Load nothing."""

    def sample(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[Completion]:
        """Return n different responses that depend on the seed."""
        return [Completion(f"{prompt} {seed + i}") for i in range(n)]


def contents(folder: Path) -> dict[str, Any]:
    """Return the contents of all files in a folder by name; of JSON without times, which differ from run to run."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: without_times(json.loads(data)) if name.endswith("json") else data for name, data in found.items()}


def without_times(value: Any) -> Any:
    """Return a JSON value without the keys of ``TIMES`` in any object."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value
