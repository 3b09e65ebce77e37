"""Hostile values for every option and argument of every command: one sentence, or a result; never a traceback."""

from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import run

from fuzz import cases, keeps_contract, random_of
from pluralign import town_hall
from pluralign.cli.main import app

VALUES = (
    *("", " ", "0", "-1", "1", "2", "1e308", "1e-320", "nan", "inf", "-inf", "9" * 400, "-" + "9" * 30, "1_0", "١"),
    *("x", "\x1b]0;t\x07", "../..", "/", ".", "-", "a=b", "=", "a" * 300, "null", "True", "½", "no/such/file", "auto"),
    *("9" * 5000, "\udcff", "foreign.csv", "foreign", "hostile.toml", "hostile.toml"),
)
TOML = (
    10**4 * b"[",
    b"seed = " + 5000 * b"9",
    b"k = [[1]]",
    b"\xff",
    b"[rename]\na = 1",
    b"output = 'foreign.csv'",
    b"k = 1e999",
    b'seed = "\\u202e\\u001b]0;t"',
    b"overwrite = 'x'",
)
VARIABLES = {
    "RANK": ("x", "5", ""),
    "WORLD_SIZE": ("x", "-1", "0"),
    "COLUMNS": ("0", "-5", "x"),
    "PLURALIGN_CACHE": ("/dev/null", "\x01", "a" * 300),
    "PLURALIGN_API_KEY": ("", "\u00e9", "\x7f"),
    "OPENAI_API_KEY": ("\u00e9", "\x01"),
    "PLURALIGN_CHECKPOINT_SECONDS": ("nan", "x"),
}
FOREIGN = "prompt,chosen,rejected\n"
SLOW = {"serve", "demo", "generate", "tune", "reproduce", "encode", "fit"}
"""Commands that would run long, or for ever, with valid arguments: their arguments are hostile too."""
COMMANDS: dict[str, Any] = dict(sorted(typer.main.get_command(app).commands.items()))  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    town_hall(40, seed=9).preferences.save(folder / "votes.jsonl")
    (folder / "pairs.jsonl").write_text('{"prompt": "Tea?", "response": "Y", "response_a": "Y", "response_b": "N"}\n')
    (folder / "shares.csv").write_text("tea,coffee\n0.5,0.6\n0.4,0.5\n")
    return {path.stem: path for path in folder.iterdir()}


def arguments(command: str, town_folder: Path, files: dict[str, Path], output: Path) -> list[str | Path]:
    """Return valid arguments of a command that is fast."""
    votes, pairs = files["votes"], files["pairs"]
    if command in ("inspect", "rankings"):
        return [votes if command == "inspect" else files["shares"]]
    known: dict[str, list[str | Path]] = {"evaluate": [votes], "score": [pairs], "compare": [pairs], "answer": ["Tea?"]}
    known |= {name: ["-o", output / f"{name}.html"] for name in ("prune", "report", "export")}
    return [town_folder, *known.get(command, [])]


@pytest.mark.parametrize("case", cases(share=0.75))
def test_hostile_options_are_used_or_explained(
    case: int, town_folder: Path, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    random = random_of(case, "options")
    command = list(COMMANDS)[case % len(COMMANDS)]
    options = [parameter for parameter in COMMANDS[command].params if parameter.param_type_name == "option"]
    words: list[str | Path] = (
        [f"no-such-{case}"] if command in SLOW else arguments(command, town_folder, files, tmp_path)
    )
    for _ in range(int(random.integers(1, 3))):
        option = options[int(random.integers(len(options)))]
        flag = str(random.choice([name for name in option.opts if name not in ("--help", "-h")] or ["--json"]))
        words += [flag] if option.is_flag else [flag, str(VALUES[int(random.integers(len(VALUES)))])]
    (tmp_path / "hostile.toml").write_bytes(TOML[int(random.integers(len(TOML)))])
    foreign = tmp_path / "foreign.csv", tmp_path / "foreign" / "votes.csv"
    foreign[1].parent.mkdir()
    for file in foreign:
        file.write_text(FOREIGN)
    if random.random() < 0.3:
        name = str(random.choice(list(VARIABLES)))
        monkeypatch.setenv(name, str(random.choice(VARIABLES[name])))
    done = run(command, *words)
    keeps_contract(done, words)
    assert "\x1b]" not in done.stdout + done.stderr, words
    assert {file.read_text() for file in foreign} == {FOREIGN}, words
    assert [path.name for path in foreign[1].parent.iterdir()] == ["votes.csv"], words
