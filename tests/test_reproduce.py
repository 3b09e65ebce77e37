"""Recipes match the paper, their commands are valid, and they run from votes to report and resume."""

import itertools
import json
import re
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from conftest import facts_of, printed, run

from pluralign import DataError, LoadOptions, PreferenceSet, UsageError, town_hall
from pluralign.cli.main import app
from pluralign.ensemble.held_out import load_held_out
from pluralign.experiments import recipes, reproduce as reproduction
from pluralign.experiments.reproduce import compare_table, reproduce
from pluralign.learning.backbone import recipe as finetuning

STEPS = ["inspect", "fit", "generate", "diversity", "report"]
TABLE_1 = {
    "multipref": (9413, 4791, 532, 4.0, 0.63),
    "personalllm": (263256, 9402, 1000, 10, 0.76),
    "helpsteer2": (21000, 10000, 1000, 3.5, 0.74),
    "tldr": (3217, 729, 845, 7.56, 0.84),
}


# --- recipes and their commands ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_matches_the_paper(name: str) -> None:
    recipe = recipes.load_recipe(name)
    paper: Any = recipe.paper
    found = (paper.pairs, paper.train_prompts, paper.test_prompts, paper.annotators, paper.majority_share)
    assert found == TABLE_1[name]
    assert recipe.fit == {"k": 8, "method": "stagewise", "variant": "printed", "max_disagreement": 1.0}
    assert (recipe.finetune["epochs"], recipe.finetune["fresh_head"]) == (1, True)
    assert 1e-5 <= recipe.finetune["learning_rate"] <= 5e-5
    assert recipe.finetune["batch_size"] <= 512
    assert (recipe.generate["limit"], recipe.generate["n"]) == (50, 100)
    assert recipe.generate["prompts"] == ("held-out" if name == "tldr" else "prism")
    assert ("RLHF" if name == "tldr" else "supervised") in recipe.starts_from
    assert (finetuning.WARM_UP_SHARE, finetuning.WEIGHT_DECAY) == (0.03, 0.1)


@pytest.mark.parametrize(
    "given", [{"encoder": "minilm"}, *({"backbone": "b", "hardware": name} for name in recipes.HARDWARE)]
)
@pytest.mark.parametrize("name", [*recipes.RECIPES, "votes.jsonl"])
def test_the_commands_are_valid(name: str, given: dict[str, Any]) -> None:
    """The command line parses every command without running it."""
    (experiment,) = recipes.experiments(name, Path("OUT"), recipes.ReproduceOptions(**given), LoadOptions())
    group: Any = typer.main.get_command(app)
    assert [step.name for step in experiment.steps] == STEPS
    for step in experiment.steps:
        start = step.command.index("pluralign")
        assert (start > 0) == (step.name == "fit" and given.get("hardware") == "fsdp")
        command = group.commands[step.command[start + 1]]
        assert step.name == command.name
        with command.make_context(command.name, list(step.command[start + 2 :])) as context:
            values = context.params
        if step.name == "fit":
            assert (values["k"], values["method"], values["variant"]) == ("8", "stagewise", "printed")
            assert values["backbone"] == given.get("backbone")
            chosen = {} if "encoder" in given else recipes.load_hardware(given["hardware"]).finetune
            assert {option: values[option] for option in chosen} == chosen
        if step.name == "generate":
            assert (values["n"], values["limit"]) == (100, 50)
            assert values["prompts"] == ("OUT/ensemble" if name in ("tldr", "votes.jsonl") else "prism")


@pytest.mark.parametrize(("name", "reading"), [("multipref", ("ties", "fixed")), ("helpsteer2", ("split", "prompts"))])
def test_votes_are_read_as_in_table_1_unless_as_published_or_told_otherwise(name: str, reading: Any) -> None:
    option, value = reading
    given: list[tuple[Any, Any]] = [({}, {}), ({"as_published": True}, {}), ({}, {"ties": "half"})]
    found = [
        recipes.experiments(name, Path(), recipes.ReproduceOptions(**own), LoadOptions(**load))[0].load
        for own, load in given
    ]
    assert [getattr(one, option) for one in found] == [
        value,
        getattr(LoadOptions(), option),
        {"ties": "half"}.get(option, value),
    ]


def test_the_order_of_pairs_is_in_the_command_and_in_its_description() -> None:
    for order, words in {"random": "random order", "majority": "majority-first order"}.items():
        (one,) = recipes.experiments("tldr", Path("OUT"), recipes.ReproduceOptions(orient=order), LoadOptions())  # type: ignore[arg-type]
        fitting = one.steps[1]
        assert dict(itertools.pairwise(fitting.command))["--orient"] == order
        assert words in fitting.does


def test_the_launch_with_fsdp_has_the_settings_of_the_shipped_file(tmp_path: Path) -> None:
    words = dict(itertools.pairwise(recipes.load_hardware("fsdp").launch))
    text = (Path(__file__).parents[1] / "configs" / "accelerate_fsdp.yaml").read_text()
    settings = re.findall(r"(?:^  (fsdp_\w+)|^(mixed_precision)): (\w+)$", text, flags=re.M)
    assert len(settings) == 7
    assert all(words[f"--{first or second}"] == value for first, second, value in settings)
    file = tmp_path / "large.toml"  # other hardware comes from a file
    file.write_text('about = "one GPU of 141 GB"\n[finetune]\noptimizer = "soap"\n')
    assert recipes.load_hardware(str(file)).finetune == {"optimizer": "soap"}
    file.write_text("[finetune]\n")
    with pytest.raises(UsageError, match="must be a TOML file with about"):
        recipes.load_hardware(str(file))


def test_the_dry_run_prints_the_commands_and_writes_nothing(tmp_path: Path) -> None:
    reading = ["--rename", "prompt=question", "--ties", "half", "--skip-bad", "--min-votes", "3"]
    arguments = ["reproduce", "votes.jsonl", "--dry-run", "-o", str(tmp_path / "out"), "--hardware", "lora", *reading]
    shown = run(*arguments)
    steps = json.loads(run(*arguments, "--json").stdout)["own"]["steps"]
    for step in steps:
        assert shlex.join(step["command"]) in " ".join(shown.stdout.split())
    for command in (steps[0]["command"], steps[1]["command"]):
        given = dict(itertools.pairwise(command))
        assert (given["--ties"], given["--min-votes"], given["--rename"]) == ("half", "3", "prompt=question")
        assert "--skip-bad" in command
    assert not (tmp_path / "out").exists()


def test_the_dry_run_of_all_has_copies_and_prompts(tmp_path: Path) -> None:
    (tmp_path / "multipref").mkdir()
    arguments = ["reproduce", f"all:{tmp_path}", "--dry-run", "--prompts", "prism:here", "-o", "paper"]
    assert run("reproduce", "tldr").stderr.startswith("pluralign: name a folder with -o, or use --dry-run")
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"pluralign: {tmp_path / 'personalllm'}: there is no such folder; all:FOLDER needs")
    for name in recipes.RECIPES[1:]:
        (tmp_path / name).mkdir()
    planned = json.loads(run(*arguments, "--json").stdout)
    assert list(planned) == list(recipes.RECIPES)
    for name, one in planned.items():
        inspecting, fitting, sampling = (step["command"] for step in one["steps"][:3])
        assert inspecting[2] == f"{name}:{tmp_path / name}"
        assert fitting[4] == f"paper/{name}/ensemble"
        assert sampling[2] == ("paper/tldr/ensemble" if name == "tldr" else "prism:here")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"name": "multiprefs"}, "there is no recipe 'multiprefs'; did you mean 'multipref'?"),
        ({"name": "-"}, "standard input cannot be used"),
        ({}, "the members of MultiPref start from a supervised .* dry_run shows the commands"),
        ({"backbone": "b", "encoder": "minilm"}, "backbone and encoder cannot be combined"),
        ({"encoder": "minilm", "hardware": "lora"}, "hardware requires backbone"),
        ({"backbone": "b", "hardware": "fdsp"}, "there is no hardware 'fdsp'; did you mean 'fsdp'?"),
        ({"tiny": True, "backbone": "b"}, "tiny creates its own prompts and model"),
    ],
)
def test_bad_usage_is_one_sentence(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        reproduce(**{"name": "multipref", "folder": tmp_path / "out", **given})


def test_votes_are_compared_with_the_row_of_the_paper() -> None:
    votes = PreferenceSet.from_columns(
        ["a", "b", "b", "c"], ["1", "2", "3", "4"], ["5", "6", "7", "8"], [3, 1, 2, 0], [1, 1, 2, 4], ties=[0, 2, 0, 0],
        columns={"split": np.array(["train", "train", "train", "test"], dtype=object)},
    )  # fmt: skip
    here = {figure.name: figure.here for figure in compare_table(recipes.load_recipe("multipref"), votes)}
    share = (3 / 4 + 1 / 4 + 2 / 4 + 4 / 4) / 4  # ties in the denominator
    counts = {"training pairs": 3, "training prompts": 2, "test prompts": 1, "annotators per pair": 4.0}
    assert here == counts | {"majority share": share}
    without = {figure.name: figure for figure in compare_table(recipes.load_recipe("helpsteer2"), votes)}
    assert without["responses"].here == 8
    assert without["majority share"].here == (3 / 4 + 1 / 2 + 2 / 4 + 4 / 4) / 4
    close = [figure.name for figure in compare_table(recipes.load_recipe("multipref"), votes) if figure.close]
    assert close == ["annotators per pair", "majority share"]
    assert all(figure.paper is None and not figure.close for figure in compare_table(recipes.load_recipe("own"), votes))


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reproduce") / "multipref"
    done = run("reproduce", "multipref", "--tiny", "-o", folder, "--json")
    assert done.returncode == 0, done.stderr
    (folder / "printed.json").write_text(done.stdout)
    assert [line.split(":")[0] for line in done.stderr.splitlines() if ": pluralign" in line] == STEPS
    return folder


@pytest.fixture
def given(rehearsed: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of ``reproduce`` for a short run on the votes and with the model of a rehearsal."""
    quick = {"limit": 4, "n": 5, "max_new_tokens": 12, "prompts": "held-out"}
    stored = recipes.load_recipe

    def load(name: str) -> recipes.Recipe:
        recipe = stored(name)
        return replace(recipe, fit={**recipe.fit, "k": 2}, generate=quick)

    monkeypatch.setattr(recipes, "load_recipe", load)
    made = rehearsed / "rehearsal"
    return {"name": str(made / "votes.parquet"), "encoder": "none", "model": str(made / "model")}


def test_a_rehearsal_runs_from_votes_to_report(rehearsed: Path) -> None:
    one = json.loads((rehearsed / "printed.json").read_text())["experiments"]["multipref"]
    assert one["skipped"] == []
    assert [stage["k"] for stage in one["history"]] == [1, 2]
    record = json.loads((rehearsed / recipes.RECORD_FILE).read_text())
    assert list(record["results"]) == STEPS
    ensemble = json.loads((rehearsed / "ensemble" / "ensemble.json").read_text())
    assert ensemble["facts"]["baselines"]["floor"]["brier"] == one["floor"]
    assert ensemble["facts"]["tuning"]["optimizer"] == "soap"
    below = [stage["k"] for stage in one["history"] if stage["test_brier"] < one["floor"]]
    assert one["members_below_floor"] == (below[0] if below else None)
    assert (one["candidates"]["lines"], one["candidates"]["responses"]) == (4, 20)
    assert one["tau"][0][1] == pytest.approx(one["mean_tau"])
    assert "MultiPref (rehearsal)" in (rehearsed / "report.html").read_text()


def test_a_finished_run_repeats_only_steps_whose_product_is_missing(rehearsed: Path) -> None:
    files = [rehearsed / "candidates.jsonl", *(path for path in (rehearsed / "rehearsal").rglob("*") if path.is_file())]
    before = {path: path.read_bytes() for path in files}
    (rehearsed / "report.html").unlink()
    announced: list[str] = []
    again = reproduce("multipref", rehearsed, tiny=True, announce=announced.append).experiments["multipref"]
    assert again.skipped == STEPS[:-1]
    assert [step.split(":")[0] for step in announced] == ["report"]
    assert (rehearsed / "report.html").is_file()
    printed = json.loads((rehearsed / "printed.json").read_text())
    assert [asdict(row) for row in again.history] == printed["experiments"]["multipref"]["history"]
    for name, seed in (("multipref", 1), ("tldr", 0)):
        with pytest.raises(UsageError, match="holds another run; name a new folder"):
            reproduce(name, rehearsed, tiny=True, seed=seed)
    assert {path: path.read_bytes() for path in files} == before


def test_a_stopped_run_is_resumed_with_the_same_options_only(given: dict[str, Any], tmp_path: Path) -> None:
    later = tmp_path / "later.jsonl"
    with pytest.raises(DataError, match=r"later\.jsonl: there is no such file"):
        reproduce(**given, folder=tmp_path, prompts=str(later))
    with pytest.raises(UsageError, match="holds another run; name a new folder"):
        reproduce(**given, folder=tmp_path, prompts="other.jsonl")
    later.write_text('{"prompt": "Should we?"}\n')
    done = reproduce(**given, folder=tmp_path, prompts=str(later)).experiments["own"]
    assert done.skipped == ["inspect", "fit"]
    assert json.loads((tmp_path / "ensemble" / "ensemble.json").read_text())["features"]["encoder"] == "none"
    assert done.candidates.lines == 1
    (tmp_path / recipes.RECORD_FILE).write_text("{")
    with pytest.raises(DataError, match=r"reproduce\.json: it cannot be read; use another folder"):
        reproduce(**given, folder=tmp_path, prompts=str(later))


def test_an_ensemble_fitted_by_the_command_is_reused_and_another_one_is_kept(
    given: dict[str, Any], tmp_path: Path
) -> None:
    """So ``fit`` can be run separately, on several GPUs."""
    name, options = given["name"], recipes.ReproduceOptions(encoder="none", model=given["model"])
    (experiment,) = recipes.experiments(name, tmp_path, options, LoadOptions())
    assert run(*experiment.steps[1].command[1:]).returncode == 0
    fitted = (tmp_path / "ensemble" / "ensemble.json").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduction, "fit", None)
        assert len(reproduce(**given, folder=tmp_path).experiments["own"].weights) == 2
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "ensemble", other / "ensemble")
    with pytest.raises(UsageError, match="fitted with other options"):
        reproduce(**given, folder=other, seed=3)
    assert (other / "ensemble" / "ensemble.json").read_bytes() == fitted


def test_hardware_of_several_processes_needs_a_launch(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fsdp trains in several processes: first run  accelerate launch .* fit"):
        reproduce(given["name"], tmp_path, backbone=given["model"], hardware="fsdp")


def test_own_votes_are_rehearsed_from_votes_to_report(tmp_path: Path) -> None:
    path, out = tmp_path / "votes.jsonl", tmp_path / "out"
    rows = [{"question": row.pop("prompt"), **row, "ties": 2} for row in town_hall(120).preferences.to_records()]
    path.write_text("\n".join(map(json.dumps, [*rows, rows[0] | {"votes_a": -1}])))
    reading = ["--rename", "prompt=question", "--ties", "half", "--skip-bad"]
    shown = printed("reproduce", path, "--tiny", "-o", out, *reading)
    assert "few votes and a tiny model" in shown
    assert "matches the paper" not in shown
    assert list(json.loads((out / recipes.RECORD_FILE).read_text())["results"]) == STEPS
    sample = PreferenceSet.load(out / "rehearsal" / "votes.parquet")
    assert (len(sample), sample.tie_rule) == (120, "half")
    held_out = set(load_held_out(out / "ensemble").preferences.prompts)
    asked = {json.loads(line)["prompt"] for line in (out / "candidates.jsonl").read_text().splitlines()}
    assert asked <= held_out


@pytest.mark.slow
def test_all_experiments_are_rehearsed_and_drawn_with_four_panels(rehearsed: Path) -> None:
    results = facts_of("reproduce", "all", "--tiny", "-o", rehearsed.parent)
    assert list(results["experiments"]) == list(recipes.RECIPES)
    for name, one in results["experiments"].items():
        assert (len(one["history"]), one["candidates"]["lines"]) == (2, 4)
        assert one["skipped"] == (STEPS if name == "multipref" else [])
        assert Path(one["report"]) == rehearsed.parent / name / "report.html"
        lines = [json.loads(line) for line in (rehearsed.parent / name / "favourites.jsonl").read_text().splitlines()]
        assert [len(line["favourites"]) for line in lines] == [2] * 4, "one for each of the two members"
        assert sum(bar["count"] for bar in one["histogram"]) > 0
    for figure in ("histogram", "figure2", "figure3"):
        drawn = (rehearsed.parent / f"{figure}.svg").read_text()
        assert all(f"{recipes.load_recipe(name).title} (rehearsal)" in drawn for name in recipes.RECIPES)
    floors = [f">floor {one['floor']:.4f}<" for one in results["experiments"].values()]
    assert all(floor in (rehearsed.parent / "figure2.svg").read_text() for floor in floors)
