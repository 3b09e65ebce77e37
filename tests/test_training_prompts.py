"""Nothing is measured on training prompts by mistake: they are left out, counted, and included only with --all."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import run

from pluralign import DataError, PreferenceSet, RewardEnsemble, evaluate, town_hall
from pluralign.ensemble.held_out import load_held_out, score_held_out
from pluralign.ensemble.record import LeftOut, are_trained, hash_prompts, pairs_to_measure
from pluralign.votes.prompts import Message, PromptLike

VOTES = town_hall(480).preferences  # the votes of town_folder


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("votes") / "votes.jsonl"
    VOTES.save(path)
    return path


@pytest.fixture(scope="module")
def trained() -> PreferenceSet:
    return VOTES.split(0.4, seed=1)[0]


def test_fit_saves_the_hashes_of_its_training_prompts(ensemble: RewardEnsemble, trained: PreferenceSet) -> None:
    np.testing.assert_array_equal(ensemble.trained_on, hash_prompts(trained.prompts))


def test_all_prompts_give_a_score_that_is_too_good(ensemble: RewardEnsemble) -> None:
    honest, leaked = evaluate(ensemble, VOTES, groups=[]), evaluate(ensemble, VOTES, groups=[], all_prompts=True)
    assert leaked.pairs == len(VOTES)
    assert leaked.left_out == LeftOut(measured=honest.left_out.prompts)
    assert "too good" in leaked.headline.verdict
    assert leaked.headline.standing == "unknown"
    assert leaked.test.brier < honest.test.brier


def test_a_file_with_training_prompts_only_is_refused(ensemble: RewardEnsemble, trained: PreferenceSet) -> None:
    with pytest.raises(DataError, match="were used for training, so scores would be too good; give votes on other"):
        evaluate(ensemble, trained)
    with pytest.raises(DataError, match="were used for training"):
        score_held_out(ensemble, trained)
    assert len(score_held_out(ensemble, trained, all_prompts=True).preferences) == len(trained)


def test_white_space_and_chat_form_do_not_hide_a_training_prompt() -> None:
    trained = hash_prompts(["Tea or coffee?"])
    variants: list[PromptLike] = ["Tea  or coffee?\n", (Message("user", "Tea or coffee?"),), "Tea or cocoa?"]
    assert are_trained(variants, trained).tolist() == [True, True, False]


def test_the_training_prompts_of_every_compared_ensemble_are_left_out(ensemble: RewardEnsemble) -> None:
    first, second = (hash_prompts([VOTES.prompts[i]]) for i in (0, 1))
    rows, left_out = pairs_to_measure(VOTES, [first, second])
    assert left_out.prompts == 2
    assert set(np.unique(VOTES.prompt_index[~rows])) == {0, 1}
    other = replace(ensemble, trained_on=hash_prompts(load_prompts(ensemble)[:3]))
    assert evaluate(ensemble, VOTES, against=[other], groups=[]).left_out.prompts == len(ensemble.trained_on) + 3


def load_prompts(ensemble: RewardEnsemble) -> list[str]:
    """Return the prompts of ``VOTES`` that an ensemble was not trained on."""
    return [str(p) for p in VOTES.prompts[~are_trained(VOTES.prompts, ensemble.trained_on)]]


@pytest.mark.parametrize("command", ["evaluate", "certify", "profile"])
def test_commands_leave_training_prompts_out_and_count_them(command: str, town_folder: Path, file: Path) -> None:
    held_out = load_held_out(town_folder).preferences
    left_out = f"({len(VOTES) - len(held_out)} pairs) that were used for training. evaluate --all includes them."
    done = run(command, town_folder, file, "--json")
    assert done.returncode == 0, done.stderr
    assert left_out in done.stderr
    found = json.loads(done.stdout)
    if command == "certify":
        return
    assert found["pairs"] == len(held_out)
    assert found["left_out"]["pairs"] == len(VOTES) - len(held_out)
    if command == "evaluate":
        everything = run(command, town_folder, file, "--all", "--json")
        assert everything.returncode == 0
        assert "training prompts included: scores are too good." in everything.stderr
        assert everything.stdout != done.stdout


def test_prune_and_report_leave_training_prompts_out(town_folder: Path, file: Path, tmp_path: Path) -> None:
    pruned = run("prune", town_folder, "-o", tmp_path / "pruned", "--data", file, "--json")
    assert "that were used for training" in pruned.stderr
    assert load_held_out(tmp_path / "pruned").preferences == load_held_out(town_folder).preferences
    reported = run("report", town_folder, "-o", tmp_path / "report.html", "--data", file, "--json")
    assert "that were used for training" in reported.stderr
    assert json.loads(reported.stdout)["study"]["facts"]["left_out"]["pairs"] > 0


def test_diversity_leaves_candidates_of_training_prompts_out(
    town_folder: Path, ensemble: RewardEnsemble, tmp_path: Path
) -> None:
    lists = [{"prompt": str(prompt), "responses": ["Yes.", "No, never."]} for prompt in VOTES.prompts]
    (tmp_path / "candidates.jsonl").write_text("\n".join(map(json.dumps, lists)))
    done = run("diversity", town_folder, tmp_path / "candidates.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    assert f"Left out {len(ensemble.trained_on)} prompts that were used for training." in done.stderr
