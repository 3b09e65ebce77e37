"""Legitimate votes that say little: the fit learns what can be learned, says what cannot, and never fails."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run
from degenerate import CASES, raters_of

from pluralign import PreferenceSet, RewardEnsemble, fit
from pluralign.learning import joint

OPTIONS: dict[str, dict[str, Any]] = {
    "joint": {"encoder": "none"},
    "policy": {"encoder": "hashing:64", "level": "policy"},
    "stagewise": {"encoder": "none", "method": "stagewise"},
    "printed": {"encoder": "hashing:64", "method": "stagewise", "variant": "printed"},
}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "STEPS", 20)


def check(ensemble: RewardEnsemble, votes: PreferenceSet) -> None:
    """Check that an ensemble is valid, with finite predictions and valid JSON."""
    json.dumps(ensemble.record.to_json(), allow_nan=False)
    for level in ("vote", "policy"):
        share = ensemble.prob_hat(votes, level)
        assert np.isfinite(share).all()
        assert ((share >= 0) & (share <= 1)).all()


def fit_case(name: str, options: dict[str, Any], folder: Path | None = None) -> RewardEnsemble:
    votes = CASES[name]
    chosen = {"k": 2, **options}
    data = raters_of(votes) if chosen.pop("raters", False) else votes
    return fit(data, folder=folder, **chosen)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_degenerate_votes_are_fitted(name: str, options: str) -> None:
    check(fit_case(name, OPTIONS[options]), CASES[name])


@pytest.mark.parametrize("name", ["all ½", "equal features", "2 prompts"])
def test_degenerate_votes_of_raters_are_fitted(name: str) -> None:
    check(fit_case(name, {"encoder": "none", "raters": True}), CASES[name])


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("all ½", "all training votes are split evenly, so there is nothing to learn and the ensemble predicts ½"),
        ("all ties", "all training votes are split evenly, so there is nothing to learn and the ensemble predicts ½"),
        ("equal features", "the features of the two responses are equal in every training pair, so the ensemble"),
        ("2 prompts", "there is only one training pair, so the ensemble repeats its votes"),
        ("swapped", ""),
    ],
)
def test_a_note_says_why_nothing_was_learned(name: str, note: str, tmp_path: Path) -> None:
    CASES[name].save(tmp_path / "votes.parquet")
    done = run("fit", tmp_path / "votes.parquet", "-o", tmp_path / "x", "--encoder", "none", "--k", "2")
    assert done.returncode == 0, done.stderr
    assert note in done.stderr
    assert bool(done.stderr) == bool(note)
    ensemble = RewardEnsemble.load(tmp_path / "x")
    assert [kept in done.stderr for kept in ensemble.record.notes or []] == [True] * bool(note)
    if "predicts ½" in note:
        np.testing.assert_allclose(ensemble.prob_hat(CASES[name]), 0.5)


@pytest.mark.parametrize("name", ["80 prompts, all ½", "equal features", "1 training pair, ½"])
def test_commands_work_on_such_ensembles(name: str, tmp_path: Path) -> None:
    fit_case(name, OPTIONS["joint"], tmp_path / "x")
    CASES[name].save(tmp_path / "votes.parquet")
    commands: list[list[str | Path]] = [
        ["evaluate", tmp_path / "x", tmp_path / "votes.parquet"],
        ["certify", tmp_path / "x"],
        ["profile", tmp_path / "x"],
        ["prune", tmp_path / "x", "-o", tmp_path / "p", "--overwrite"],
        ["report", tmp_path / "x", "-o", tmp_path / "report.html"],
    ]
    for command in commands:
        for options in ([], ["--json"]):
            done = run(*command, *options)
            assert done.returncode == 0, (command, done.stderr)
        json.loads(done.stdout)
    done = run("diversity", tmp_path / "x")
    assert "no held-out prompt has three responses to rank" in done.stderr
