"""Recipes match the paper, cost estimates match their formulas, and the commands of a plan are valid."""

import importlib
import itertools
import json
import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer.main
from conftest import run
from tiny import write_backbone

from pluralign.cli.main import app
from pluralign.experiments import costs
from pluralign.experiments.plan import plan
from pluralign.experiments.recipe_cost import estimate_cost
from pluralign.experiments.recipes import RECIPES, load_recipe
from pluralign.learning.routes import Devices, Route

TABLE_1 = {
    "multipref": (9413, 4791, 532, 4.0, 0.63),
    "personalllm": (263256, 9402, 1000, 10, 0.76),
    "helpsteer2": (21000, 10000, 1000, 3.5, 0.74),
    "tldr": (3217, 729, 845, 7.56, 0.84),
}


# --- costs ------------------------------------------------------------------------------------------------------------


def test_the_operations_of_soap_match_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, optimizers = importlib.import_module("torch"), importlib.import_module("pytorch_optimizer")
    counter = importlib.import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    weight = torch.nn.Parameter(torch.randn(24, 16))
    soap = optimizers.SOAP([weight], lr=1e-3)
    for step in range(3):
        weight.grad = torch.randn_like(weight)
        with counter if step == 2 else torch.no_grad():
            soap.step()
    monkeypatch.setattr(costs, "SOAP_EVERY", math.inf)  # this step does not update the bases
    assert counter.get_total_flops() == costs.soap_flops([(24, 16)], 1)


# --- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_matches_the_paper(name: str) -> None:
    recipe = load_recipe(name)
    paper = recipe.paper
    assert paper is not None
    found = (paper.pairs, paper.train_prompts, paper.test_prompts, paper.annotators, paper.majority_share)
    assert found == TABLE_1[name]
    assert asdict(recipe.fit) == {"k": 8, "method": "stagewise", "variant": "printed", "max_disagreement": 1.0}
    assert (recipe.tune.optimizer, recipe.tune.epochs) == ("soap", 1)
    assert 1e-5 <= recipe.tune.learning_rate <= 5e-5
    assert recipe.tune.batch_size <= 512
    assert (recipe.candidates.limit, recipe.candidates.n) == (50, 100)
    assert recipe.candidates.prompts == ("held-out" if name == "tldr" else "prism")
    assert ("RLHF" if name == "tldr" else "supervised") in recipe.starts_from


def test_the_defaults_of_fine_tuning_match_the_paper() -> None:
    finetune = importlib.import_module("pluralign.learning.backbone.recipe")
    for name in RECIPES:
        noted = load_recipe(name).paper_training
        assert (noted.warmup, noted.weight_decay) == (finetune.WARM_UP_SHARE, finetune.WEIGHT_DECAY)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_the_cost_matches_the_formulas(name: str, lora: bool, precision: str) -> None:
    cost, recipe = estimate_cost(load_recipe(name), Route("soap", precision, lora)), load_recipe(name)
    n, whole, adapter = 7_504_928_768, 8_030_261_248, 41_947_136  # Meta-Llama-3-8B, computed by hand
    size = recipe.size
    per_text = size.prompt_tokens + size.response_tokens
    # Each distinct text of a prompt is read once per epoch: PersonalLLM has 8 texts in the 28 pairs of a prompt.
    tokens = (8 * 9402 if name == "personalllm" else 2 * size.train_pairs) * per_text
    texts = 8 * 10_402 if name == "personalllm" else 2 * (size.train_pairs + size.test_pairs)
    assert (cost.train_tokens, cost.scored_tokens) == (tokens, texts * per_text)
    assert cost.training_flops == pytest.approx(8 * (4 if lora else 6) * n * tokens)
    assert cost.steps == -(-size.train_pairs // (64 if name == "tldr" else 512))
    assert 0 < cost.optimizer_flops < 0.2 * cost.training_flops
    flops = cost.training_flops + cost.optimizer_flops
    assert cost.training_hours == pytest.approx(flops / (0.35 * 989.4e12) / 3600)
    assert cost.scoring_hours == pytest.approx(8 * 2 * n * texts * per_text / (0.35 * 989.4e12) / 3600)
    new = recipe.candidates.max_new_tokens
    assert cost.continuations == 5000
    assert cost.generation_hours == pytest.approx(50 * 4 * new * 2 * whole / (0.2 * 3.35e12) / 3600)
    assert cost.ranking_hours == pytest.approx(8 * 2 * n * 5000 * (size.prompt_tokens + new) / (0.35 * 989.4e12) / 3600)
    hours = (cost.training_hours, cost.scoring_hours, cost.generation_hours, cost.ranking_hours)
    assert cost.gpu_hours == pytest.approx(sum(hours))
    number = 4 if precision == "float32" else 2
    assert cost.member_gb == pytest.approx(number * (adapter if lora else n) / 1e9)
    assert cost.disk_gb == pytest.approx(2 * whole / 1e9 + 8 * cost.member_gb + 2 * cost.checkpoint_gb)
    bases = cost.checkpoint_gb - 3 * cost.member_gb
    frozen = 2 * n / 1e9 if lora else 0.0
    assert cost.memory_gb == pytest.approx(frozen + 4 * cost.member_gb + bases + 6)


def test_only_soap_adds_operations() -> None:
    routes = (Route(name) for name in ("soap", "soap-one-sided", "adamw"))
    added = [estimate_cost(load_recipe("multipref"), route).optimizer_flops for route in routes]
    assert added[0] > added[1] > added[2] == 0


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"backbone": "b", "lora": True}, {"encoder": "minilm"}])
@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_of_a_plan_are_valid(name: str, given: dict[str, Any]) -> None:
    """The command line parses every command without running it."""
    group: Any = typer.main.get_command(app)
    for step in plan(name, "OUT", **given).steps:
        assert step.command[0] == "pluralign"
        command = group.commands[step.command[1]]
        assert step.name == command.name
        with command.make_context(command.name, list(step.command[2:])) as context:
            values = context.params
        if step.name == "fit":
            assert (values["k"], values["method"], values["variant"]) == ("8", "stagewise", "printed")
            assert values["backbone"] == (None if "encoder" in given else given.get("backbone", "BACKBONE"))
            assert values["lora"] == bool(given.get("lora"))
        if step.name == "generate":
            assert (values["n"], values["limit"]) == (100, 50)
            assert values["prompts"] == ("OUT/ensemble" if name == "tldr" else "prism")


def test_the_dry_run_shows_steps_and_cost_and_writes_nothing(tmp_path: Path) -> None:
    arguments = ["reproduce", "multipref", "--dry-run", "-o", str(tmp_path / "out"), "--lora"]
    shown = run(*arguments)
    assert shown.returncode == 0, shown.stderr
    planned = json.loads(run(*arguments, "--json").stdout)
    for step in planned["steps"]:
        assert shlex.join(step["command"]) in " ".join(shown.stdout.split())
    assert f"{planned['cost']['gpu_hours']:.1f}" in shown.stdout
    assert {"full, soap", "full, adamw", "LoRA, adamw"} < set(planned["alternatives"])
    assert planned["cost"]["lora"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("devices", "steps_use", "routes"),
    [
        (Devices(1, 80e9), ("soap-one-sided", "bfloat16", False), [77, 66, 66, 22]),
        (Devices(4, 80e9), ("soap-one-sided", "bfloat16", False), [77, 66, 66, 22]),
        (Devices(4, 48e9), ("adamw", "float32", False), [36, 22]),
        (Devices(1, 24e9), ("adamw", "float32", True), [21, 22]),
        (None, ("soap-one-sided", "bfloat16", False), [77, 66, 66, 22]),
    ],
)
def test_every_route_of_a_plan_fits_and_has_a_valid_command(
    devices: Devices | None, steps_use: tuple[str, str, bool], routes: list[int]
) -> None:
    planned = plan("multipref", devices=devices)
    assert [round(way.memory_gb) for way in planned.routes] == routes
    group: Any = typer.main.get_command(app)
    for way in planned.routes:
        command = way.command[way.command.index("pluralign") + 1 :]
        assert (way.command[0] == "accelerate") == (way.gpus > 1)
        fit = group.commands[command[0]]
        with fit.make_context("fit", command[1:]) as context:
            values = context.params
        assert Route(values["optimizer"], values["precision"], values["lora"], way.gpus) == way.route
    assert planned.training is not None
    used = planned.training.route
    assert (used.optimizer, used.precision, used.lora) == steps_use
    assert any(planned.steps[1].command == way.command for way in planned.routes)


def test_a_named_optimizer_and_precision_are_in_the_commands() -> None:
    planned = plan("multipref", optimizer="soap", precision="bfloat16", devices=Devices(1, 24e9))
    given = dict(itertools.pairwise(planned.steps[1].command))
    assert (given["--optimizer"], given["--precision"]) == ("soap", "bfloat16")
    assert planned.training is not None
    assert not planned.training.fits


def test_the_cost_is_that_of_a_named_model(tmp_path: Path) -> None:
    model = str(write_backbone(tmp_path))
    planned = plan("multipref", backbone=model, devices=Devices(1, 80e9))
    assert (planned.model, planned.training and planned.training.route) == (model, Route())
    assert planned.cost.parameters < 1e5
    assert plan("multipref", backbone="nowhere").model == "Meta-Llama-3-8B"


def test_the_plan_of_all_experiments_adds_their_costs(tmp_path: Path) -> None:
    for name in RECIPES:
        (tmp_path / name).mkdir()
    arguments = ["reproduce", "all", "--dry-run", "--data", str(tmp_path), "--prompts", "prism:here", "-o", "paper"]
    planned = json.loads(run(*arguments, "--json").stdout)
    assert list(planned["plans"]) == list(RECIPES)
    assert planned["gpu_hours"] == pytest.approx(sum(one["cost"]["gpu_hours"] for one in planned["plans"].values()))
    for name, one in planned["plans"].items():
        inspecting, fitting, sampling = (step["command"] for step in one["steps"][:3])
        assert inspecting[2] == f"{name}:{tmp_path / name}"
        assert fitting[4] == f"paper/{name}/ensemble"
        assert sampling[2] == ("paper/tldr/ensemble" if name == "tldr" else "prism:here")
    shown = run(*arguments).stdout
    assert f"{planned['gpu_hours']:.1f}" in shown
    assert "pluralign reproduce tldr --dry-run" in shown


def test_a_missing_copy_of_a_set_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "multipref").mkdir()
    done = run("reproduce", "all", "--dry-run", "--data", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"pluralign: {tmp_path / 'personalllm'}: there is no such folder; --data of reproduce"
    )
