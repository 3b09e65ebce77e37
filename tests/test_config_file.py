"""``fit --config`` and ``--save-config``: options in a TOML file."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import WriteLines, run, wide

from pluralign import RewardEnsemble

FAST = ["--encoder", "none", "--target", "votes"]


@pytest.fixture
def votes(write_jsonl: WriteLines) -> Path:
    """Votes whose prompts are in a column of another name."""
    from pluralign import town_hall

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
    done = run("fit", votes, "-o", first, *FAST, *given, "--save-config", saved, "--json")
    assert done.returncode == 0, done.stderr
    assert tomllib.loads(saved.read_text()) == {
        "data": str(votes), "output": str(first), "k": 2, "encoder": "none", "target": "votes", "undecided": False,
        "seed": 3, "max-disagreement": 0.45, "rename": {"prompt": "question"},
    }  # fmt: skip
    done = run("fit", "--config", saved, "-o", again)
    assert done.returncode == 0, done.stderr
    one, two = RewardEnsemble.load(first), RewardEnsemble.load(again)
    assert one.weights.tolist() == two.weights.tolist()
    assert one.record.options == two.record.options


def test_a_config_alone_is_enough_and_the_command_line_wins(
    config: Callable[[str], Path], votes: Path, tmp_path: Path
) -> None:
    text = f"""
        data = "{votes}"
        output = "{tmp_path / "out"}"
        k = 4
        encoder = "none"
        target = "votes"
        keep_held_out = false
        json = true
        [rename]
        prompt = "question"
    """
    done = run("fit", "--config", config(text), "--k", "2")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["k"], printed["options"]["keep_held_out"]) == (2, False)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('metod = "joint"', "there is no option 'metod'; did you mean 'method'?."),
        ("config = 1", "there is no option 'config'; known are: data, output, "),
        ("k = [2]", "k must be one value, not [2]."),
        ("seed = 1.5", "seed cannot be 1.5: "),
        ("epochs = 'two'", "epochs cannot be 'two': "),
        ("surface = 'nope'", "surface cannot be 'nope': "),
        ("method = 'stagewis'", "method cannot be 'stagewis': "),
        ('features = "a\\u0000b"', "features must not have a null character."),
    ],
)
def test_a_wrong_name_or_value_is_one_sentence(text: str, sentence: str, config: Callable[[str], Path]) -> None:
    path = config(text)
    done = run("fit", "demo:300", "-o", "never", "--config", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"pluralign: {path}: {sentence}")
    assert done.stderr.count("\n") == 1


def test_a_file_that_is_missing_or_no_toml_is_one_sentence(config: Callable[[str], Path], tmp_path: Path) -> None:
    path = config("k = ")
    assert run("fit", "--config", path).stderr.startswith(f"pluralign: {path} must be a TOML file: Invalid value")
    path.write_bytes(b"\xff")
    assert run("fit", "--config", path).stderr.startswith(f"pluralign: {path} must be a TOML file: ")
    missing = tmp_path / "missing.toml"
    assert run("fit", "--config", missing).stderr == f"pluralign: there is no file {missing}.\n"


def test_invalid_options_are_not_saved(tmp_path: Path) -> None:
    saved = tmp_path / "run.toml"
    done = run("fit", "demo:300", "-o", tmp_path / "out", "--k", "0", "--save-config", saved)
    assert done.returncode == 2
    assert "k must be a whole number" in done.stderr
    assert not saved.exists()


def test_every_text_survives_the_round_trip(tmp_path: Path, write_jsonl: WriteLines) -> None:
    """The fit fails, since the votes have no such column; the options are saved before."""
    votes = write_jsonl([wide()], name='a "b" \\ ½ \x7f.jsonl')
    saved = tmp_path / "run.toml"
    run("fit", votes, "-o", tmp_path / "007", "--raters", "12", "--rename", 'pro"mpt=x=y', "--save-config", saved)
    read = tomllib.loads(saved.read_text(encoding="utf-8"))
    assert (read["data"], read["output"]) == (str(votes), str(tmp_path / "007"))
    assert (read["raters"], read["rename"]) == (12, {'pro"mpt': "x=y"})
