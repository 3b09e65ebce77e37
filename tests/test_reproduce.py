"""Recipes run from votes to report, are resumed, and use members that were trained separately."""

import itertools
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run

from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import DataError, UsageError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import held_out_files, load_held_out
from pluralign.experiments import reproduce as reproduction
from pluralign.experiments.plan import RECORD_FILE, check_inputs, plan
from pluralign.experiments.recipes import RECIPES, load_recipe, shrink
from pluralign.experiments.rehearsal import SAMPLES, write_sample
from pluralign.experiments.reproduce import choose_training, compare_table, reproduce
from pluralign.learning.routes import LLAMA_3_8B, Devices, Route
from pluralign.votes.load import load_preferences
from pluralign.votes.options import LoadOptions
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.town_hall.town_hall import town_hall


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"name": "multiprefs"}, "there is no recipe 'multiprefs'; did you mean 'multipref'?"),
        ({}, "the members of MultiPref start from a supervised fine-tuned checkpoint of Meta-Llama-3-8B: name one"),
        ({"backbone": "b", "encoder": "minilm"}, "--backbone and --encoder cannot be combined: name one of"),
        ({"encoder": "minilm", "lora": True}, "--lora requires --backbone, not --encoder."),
        ({"encoder": "minilm", "optimizer": "adamw"}, "--optimizer requires --backbone, not --encoder."),
        ({"backbone": "b", "optimizer": "adam"}, "optimizer cannot be 'adam'; did you mean 'adamw'?"),
        ({"backbone": "b", "precision": "fp16"}, "precision cannot be 'fp16'; known are: float32, bfloat16."),
        ({"backbone": "b", "data": "tldr:x"}, "the recipe multipref needs its own votes: multipref:FOLDER, not 'tl"),
        ({"tiny": True, "backbone": "b"}, "--tiny creates its own votes, prompts and model: remove the other options."),
    ],
)  # fmt: skip
def test_bad_usage_is_one_sentence(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"name": "multipref", "folder": tmp_path / "out"}
    with pytest.raises(UsageError) as caught:
        reproduce(**(arguments | given))
    assert str(caught.value).startswith(sentence)


def test_the_command_needs_a_folder() -> None:
    done = run("reproduce", "tldr")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pluralign: name a folder with -o, or use --dry-run to see what would be done.\n"


# --- the table --------------------------------------------------------------------------------------------------------


def test_votes_are_compared_with_the_row_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = PreferenceSet.from_columns(
        ["a", "b", "b", "c"], ["1", "2", "3", "4"], ["5", "6", "7", "8"], [3, 1, 2, 0], [1, 1, 2, 4], ties=[0, 2, 0, 0],
        columns={"split": np.array(["train", "train", "train", "test"], dtype=object)},
    )  # fmt: skip
    here = {figure.name: figure.here for figure in compare_table(load_recipe("multipref"), votes)}
    share = (3 / 4 + 1 / 4 + 2 / 4 + 4 / 4) / 4  # ties in the denominator
    assert here == {"training pairs": 3, "training prompts": 2, "test prompts": 1, "annotators per pair": 4.0} | {
        "majority share": share
    }
    without = {figure.name: figure for figure in compare_table(load_recipe("helpsteer2"), votes)}
    assert without["responses"].here == 8
    assert without["majority share"].here == (3 / 4 + 1 / 2 + 2 / 4 + 4 / 4) / 4
    assert [figure.name for figure in compare_table(load_recipe("multipref"), votes) if figure.close] == [
        "annotators per pair", "majority share"
    ]  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_have_the_published_layout(name: str, tmp_path: Path) -> None:
    votes = load_preferences(f"{name}:{write_sample(name, tmp_path)}")
    train, test = votes.split()
    assert len(votes) >= 48
    assert len(train.prompts) > len(test.prompts) >= 4
    assert ("split" in votes.columns) == (name != "multipref")
    assert 0 < ((votes.prob_a > 0) & (votes.prob_a < 1)).mean() < 1


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reproduce") / "multipref"
    done = run("reproduce", "multipref", "--tiny", "-o", folder, "--json")
    assert done.returncode == 0, done.stderr
    (folder / "printed.json").write_text(done.stdout)
    assert [line.split(":")[0] for line in done.stderr.splitlines() if ": pluralign" in line] == [
        "inspect", "fit", "generate", "diversity", "report"
    ]  # fmt: skip
    return folder


def test_a_rehearsal_runs_from_votes_to_report(rehearsal: Path) -> None:
    printed = json.loads((rehearsal / "printed.json").read_text())
    assert printed["tiny"]
    assert printed["skipped"] == []
    assert [stage["k"] for stage in printed["history"]] == [1, 2]
    record = json.loads((rehearsal / RECORD_FILE).read_text())
    assert record["seconds"] == printed["seconds"]
    assert list(record["results"]) == ["inspect", "fit", "generate", "diversity", "report"]
    ensemble = json.loads((rehearsal / "ensemble" / "ensemble.json").read_text())
    assert ensemble["facts"]["baselines"]["floor"]["brier"] == printed["floor"]
    assert ensemble["facts"]["tuning"]["optimizer"] == "soap"
    below = [stage["k"] for stage in printed["history"] if stage["test_brier"] < printed["floor"]]
    assert printed["members_below_floor"] == (below[0] if below else None)
    assert (printed["candidates"]["lines"], printed["candidates"]["responses"]) == (4, 20)
    assert printed["tau"][0][1] == pytest.approx(printed["mean_tau"])
    page = (rehearsal / "report.html").read_text()
    assert "a rehearsal on synthetic votes" in page
    assert "pluralign generate" in page


def test_a_finished_run_repeats_only_steps_whose_product_is_missing(rehearsal: Path) -> None:
    before = (rehearsal / "candidates.jsonl").read_bytes()
    (rehearsal / "report.html").unlink()
    steps: list[str] = []
    again = reproduce("multipref", rehearsal, tiny=True, announce=steps.append)
    assert again.skipped == ["inspect", "fit", "generate", "diversity"]
    assert [step.split(":")[0] for step in steps] == ["report"]
    assert (rehearsal / "report.html").is_file()
    assert (rehearsal / "candidates.jsonl").read_bytes() == before
    printed = json.loads((rehearsal / "printed.json").read_text())
    assert [asdict(row) for row in again.history] == printed["history"]


def test_a_folder_of_another_run_is_rejected_and_keeps_its_votes(rehearsal: Path) -> None:
    files = [path for path in (rehearsal / "rehearsal").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    with pytest.raises(UsageError, match="holds another run; name a new folder"):
        reproduce("multipref", rehearsal, tiny=True, seed=1)
    with pytest.raises(UsageError, match="holds another run"):
        reproduce("tldr", rehearsal, tiny=True)
    assert {path: path.read_bytes() for path in files} == before


def test_a_folder_of_another_unfinished_run_is_rejected(tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": f"multipref:{write_sample('multipref', tmp_path / 'votes')}", "encoder": "none"}
    with pytest.raises(DataError, match="there is no such file"):
        reproduce("multipref", tmp_path / "out", **given, prompts="missing.jsonl")
    assert not (tmp_path / "out" / RECORD_FILE).exists()
    with pytest.raises(UsageError, match="holds another run; name a new folder"):
        reproduce("multipref", tmp_path / "out", **given, prompts="other.jsonl")


def test_an_unreadable_record_is_reported(tmp_path: Path) -> None:
    (tmp_path / RECORD_FILE).write_text("{")
    with pytest.raises(DataError, match=r"reproduce\.json: it cannot be read; use another folder"):
        reproduce("multipref", tmp_path, encoder="none", data=f"multipref:{write_sample('multipref', tmp_path / 'v')}")


def test_frozen_features_work_and_a_stopped_run_is_resumed(
    rehearsal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pluralign.experiments.plan.load_recipe", lambda name: shrink(load_recipe(name)))
    made, later = rehearsal / "rehearsal", tmp_path / "later.jsonl"
    given: dict[str, Any] = {"data": f"multipref:{made / 'votes'}", "encoder": "none", "model": str(made / "model")}
    with pytest.raises(DataError, match=r"later\.jsonl: there is no such file"):
        reproduce("multipref", tmp_path, **given, prompts=str(later))
    later.write_text('{"prompt": "Should we?"}\n')
    done = reproduce("multipref", tmp_path, **given, prompts=str(later))
    assert done.skipped == ["inspect", "fit"]
    assert json.loads((tmp_path / "ensemble" / "ensemble.json").read_text())["features"]["encoder"] == "none"
    assert done.candidates.lines == 1


def test_an_ensemble_fitted_by_the_command_of_the_plan_is_reused(
    rehearsal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So ``fit`` can be run separately, on several GPUs."""
    monkeypatch.setattr("pluralign.experiments.plan.load_recipe", lambda name: shrink(load_recipe(name)))
    made = rehearsal / "rehearsal"
    given: dict[str, Any] = {"data": f"multipref:{made / 'votes'}", "encoder": "none", "model": str(made / "model")}
    given["prompts"] = f"prism:{made / 'prism'}"
    command = plan("multipref", tmp_path, **given).steps[1].command
    assert run(*command[1:]).returncode == 0
    fitted = (tmp_path / "ensemble" / "ensemble.json").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduction, "fit", None)
        assert len(reproduce("multipref", tmp_path, **given).weights) == 2
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "ensemble", other / "ensemble")
    reproduce("multipref", other, **given, seed=3)
    assert (other / "ensemble" / "ensemble.json").read_bytes() != fitted


def in_rehearsal(rehearsal: Path) -> dict[str, Any]:
    """Return the arguments of ``reproduce`` that stand for the votes and the model of a rehearsal."""
    made = rehearsal / "rehearsal"
    votes, prism = f"multipref:{made / 'votes'}", f"prism:{made / 'prism'}"
    return {"data": votes, "backbone": str(made / "model"), "prompts": prism}


def test_members_trained_with_another_optimizer_are_used_unless_one_is_named(
    rehearsal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the commands of a plan can be launched on several GPUs, where SOAP does not work."""
    monkeypatch.setattr("pluralign.experiments.plan.load_recipe", lambda name: shrink(load_recipe(name)))
    ensemble, target = RewardEnsemble.load(rehearsal / "ensemble"), tmp_path / "out" / "ensemble"
    tuning = {**(ensemble.record.tuning or {}), "optimizer": "adamw"}
    other, held_out = (
        replace(ensemble, record=replace(ensemble.record, tuning=tuning)),
        load_held_out(rehearsal / "ensemble"),
    )
    other.save(target, held_out_files(other, held_out))
    fitted: list[Any] = []

    def refuse(*_: Any, **options: Any) -> None:
        fitted.append(options["optimizer"])
        raise UsageError("it is trained again")

    monkeypatch.setattr(reproduction, "fit", refuse)
    said: list[str] = []
    done = reproduce("multipref", tmp_path / "out", **in_rehearsal(rehearsal), announce=said.append)
    assert (done.training and done.training.route.optimizer, fitted) == ("adamw", [])
    assert said[0] == f"training: the members in {target} were trained with AdamW in float32"
    shutil.copytree(target, tmp_path / "other" / "ensemble")
    with pytest.raises(UsageError, match="it is trained again"):
        reproduce("multipref", tmp_path / "other", **in_rehearsal(rehearsal), optimizer="soap")
    assert fitted == ["soap"]


def test_an_unfinished_fit_is_continued_with_its_own_optimizer(rehearsal: Path, tmp_path: Path) -> None:
    recipe, given = shrink(load_recipe("multipref")), in_rehearsal(rehearsal)
    tuning = {"backbone": given["backbone"], "optimizer": "adamw", "lora": False}
    started = Checkpoints(tmp_path / "ensemble", {"options": {"precision": "bfloat16"}, "tuning": tuning})
    started.value("member-0", lambda: 1)
    inputs = check_inputs(recipe, **given, encoder="", model="", lora=False, load=None, seed=0)
    assert choose_training(recipe, inputs, tmp_path).route == Route("adamw", "bfloat16")
    assert choose_training(recipe, inputs, tmp_path / "elsewhere").route == Route()


def test_a_run_says_how_it_trains_and_which_command_needs_several_gpus(
    rehearsal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduction, "weights_of", lambda _: LLAMA_3_8B.weights)
    given = in_rehearsal(rehearsal)
    with pytest.raises(UsageError, match=r"AdamW in float32 on 4 GPUs \(FSDP\) needs about 36 GB; SOAP") as caught:
        reproduce("multipref", tmp_path, **given, devices=Devices(4, 48e9))
    assert f"-m pluralign fit {given['data']} -o {tmp_path / 'ensemble'}" in str(caught.value)
    said: list[str] = []
    monkeypatch.setattr(reproduction, "load_preferences", None)
    with pytest.raises(TypeError):
        reproduce("multipref", tmp_path, **given, devices=Devices(1, 80e9), announce=said.append)
    assert said[0].startswith("training: one-sided SOAP in bfloat16 needs about 77 GB; SOAP in float32 needs")
    assert "--optimizer soap-one-sided" not in said[1], "the votes are read first"


# --- own votes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_votes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Votes with ties, an invalid row, and the prompts in a column of another name."""
    path = tmp_path_factory.mktemp("own") / "votes.jsonl"
    rows = [{"question": row.pop("prompt"), **row, "ties": 2} for row in town_hall(120).preferences.to_records()]
    path.write_text("\n".join(map(json.dumps, [*rows, rows[0] | {"votes_a": -1}])))
    return path


READING = ["--rename", "prompt=question", "--ties", "half", "--skip-bad", "--repeats", "first", "--min-votes", "3"]


def test_the_plan_for_own_votes_has_their_sizes_and_options(own_votes: Path, tmp_path: Path) -> None:
    arguments: list[str | Path] = ["reproduce", own_votes, "--dry-run", "-o", tmp_path / "out", *READING]
    planned = json.loads(run(*arguments, "--json").stdout)
    votes = load_preferences(own_votes, rename={"prompt": "question"}, ties="half", skip_bad=True)
    size = planned["recipe"]["size"]
    assert size["train_pairs"] + size["test_pairs"] == len(votes) == 120
    assert size["texts"] == len(votes.items().prompt_index)
    characters = sum(map(len, votes.responses)) / len(votes.responses)
    assert size["response_tokens"] == round(characters / 4)
    assert planned["recipe"]["paper"] is None
    assert planned["recipe"]["tune"]["batch_size"] == 8
    assert size["train_texts"] == len(votes.split()[0].items().prompt_index) < size["texts"]
    assert planned["cost"]["train_tokens"] == size["train_texts"] * (size["prompt_tokens"] + size["response_tokens"])
    assert planned["cost"]["gpu_hours"] > 0
    inspecting, fitting, sampling = (step["command"] for step in planned["steps"][:3])
    assert inspecting[:3] == ["pluralign", "inspect", str(own_votes)]
    for command in (inspecting, fitting):
        given = dict(itertools.pairwise(command))
        assert (given["--ties"], given["--min-votes"], given["--repeats"]) == ("half", "3", "first")
        assert given["--rename"] == "prompt=question"
        assert "--skip-bad" in command
    assert {"--fresh-head", "printed", "stagewise", "soap-one-sided", "bfloat16"} < set(fitting)
    assert sampling[2] == str(tmp_path / "out" / "ensemble")
    shown = run(*arguments)
    assert shown.returncode == 0, shown.stderr
    assert "four characters" in shown.stdout
    assert not (tmp_path / "out").exists()


def test_own_votes_are_rehearsed_from_votes_to_report(own_votes: Path, tmp_path: Path) -> None:
    done = run("reproduce", own_votes, "--tiny", "-o", tmp_path / "out", *READING)
    assert done.returncode == 0, done.stderr
    assert "few of these votes and a tiny model" in done.stdout
    assert "annotators per pair" in done.stdout
    assert "matches the paper" not in done.stdout
    record = json.loads((tmp_path / "out" / RECORD_FILE).read_text())
    assert list(record["results"]) == ["inspect", "fit", "generate", "diversity", "report"]
    sample = PreferenceSet.load(tmp_path / "out" / "rehearsal" / "votes.parquet")
    assert (len(sample), sample.tie_rule) == (120, "half")
    held_out = set(load_held_out(tmp_path / "out" / "ensemble").preferences.prompts)
    asked = {json.loads(line)["prompt"] for line in (tmp_path / "out" / "candidates.jsonl").read_text().splitlines()}
    assert asked <= held_out


def test_the_papers_sets_are_read_with_the_options_too(tmp_path: Path) -> None:
    data = f"multipref:{write_sample('multipref', tmp_path / 'votes')}"
    command = plan("multipref", data=data, load=LoadOptions(ties="half", skip_bad=True)).steps[1].command
    assert command[5:8] == ["--ties", "half", "--skip-bad"]
    assert plan(data).steps[0].command == ["pluralign", "inspect", data], "NAME:FOLDER is a copy of the paper's set"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere.jsonl", "nowhere.jsonl: there is no such file or known set"),
        (
            "nowhere",
            "there is no recipe 'nowhere'; known are: multipref, personalllm, helpsteer2, tldr, all, a file of votes.",
        ),
    ],
)
def test_a_name_of_nothing_is_one_sentence(name: str, sentence: str) -> None:
    done = run("reproduce", name, "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"pluralign: {sentence}")


# --- all four ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_experiments_are_rehearsed_and_drawn_with_four_panels(rehearsal: Path) -> None:
    done = run("reproduce", "all", "--tiny", "-o", rehearsal.parent, "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert list(results["experiments"]) == list(RECIPES)
    assert results["experiments"]["multipref"]["skipped"] == ["inspect", "fit", "generate", "diversity", "report"]
    for name, one in results["experiments"].items():
        assert (len(one["history"]), one["candidates"]["lines"], one["skipped"] == []) == (2, 4, name != "multipref")
        assert Path(one["report"]) == rehearsal.parent / name / "report.html"
        held_out = set(load_held_out(rehearsal.parent / name / "ensemble").preferences.prompts)
        lines = (rehearsal.parent / name / "candidates.jsonl").read_text().splitlines()
        assert ({json.loads(line)["prompt"] for line in lines} <= held_out) == (name == "tldr")
    assert [Path(path).name for path in results["figures"]] == [
        "figure2.png", "figure2.svg", "figure3.png", "figure3.svg"
    ]  # fmt: skip
    for number in (2, 3):
        drawn = (rehearsal.parent / f"figure{number}.svg").read_text()
        assert all(f"{load_recipe(name).title} (rehearsal)" in drawn for name in RECIPES)
    floors = [f">floor {one['floor']:.4f}<" for one in results["experiments"].values()]
    assert all(floor in (rehearsal.parent / "figure2.svg").read_text() for floor in floors)
