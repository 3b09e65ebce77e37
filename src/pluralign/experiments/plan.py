"""The steps of a recipe, their commands and inputs, and their estimated cost. Nothing is run here.

Each step is a public function with a command of its own. ``recipe_cost`` estimates the cost, ``learning.routes`` says
which way to train fits the memory.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from pluralign.core.errors import UsageError, did_you_mean
from pluralign.experiments.costs import H100_MEMORY
from pluralign.experiments.recipe_cost import Cost, estimate_cost
from pluralign.experiments.recipes import OWN, Recipe, is_own_data, load_recipe, own_recipe
from pluralign.learning.options import Optimizer
from pluralign.learning.routes import (
    LLAMA_3_8B,
    NUMBER_BYTES,
    Choice,
    Devices,
    Route,
    Weights,
    choose_route,
    possible_routes,
    visible_devices,
    weights_of,
)
from pluralign.votes.options import LoadOptions

RECORD_FILE = "reproduce.json"
"""Inputs, results and timings of a run, in the output folder."""
BACKBONE = "BACKBONE"
"""Stands for a checkpoint that is not named."""
LLAMA = "Meta-Llama-3-8B"
GPU_COUNTS = (2, 4, 8)
"""Numbers of GPUs that share a model in a plan."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run beside its recipe."""

    data: str
    backbone: str
    """Checkpoint that each member fine-tunes; empty with frozen features."""
    encoder: str
    model: str
    """Model that writes the continuations."""
    prompts: str
    """Prompts of the continuations; ``held-out`` are the held-out prompts of ``fit``."""
    lora: bool
    seed: int
    load: LoadOptions = field(default_factory=LoadOptions)
    """How the votes are read."""
    optimizer: str = ""
    """Empty: the one of the recipe, or another one that fits the memory."""
    precision: str = ""
    """Of the training. Empty: float32, or bfloat16 if only that fits the memory."""

    def route(self, recipe: Recipe) -> Route:
        """Return the way to train that the recipe and these inputs stand for."""
        return Route(self.optimizer or recipe.tune.optimizer, self.precision or "float32", self.lora)

    @property
    def names_route(self) -> bool:
        """Whether a part of the route was given."""
        return bool(self.optimizer or self.precision or self.lora)


@dataclass(frozen=True)
class Step:
    """One step of a recipe, with its command."""

    name: str
    does: str
    command: list[str]
    makes: str
    """File or folder that it writes in the output folder."""


@dataclass(frozen=True)
class TrainingRoute:
    """A way to train that fits GPUs of a given size, with its command."""

    route: Route
    gpus: int
    memory_gb: float
    """Estimated memory on each GPU."""
    command: list[str]


@dataclass(frozen=True)
class Plan:
    """The steps, inputs and estimated cost of a recipe."""

    recipe: Recipe
    steps: list[Step]
    needs: list[str]
    cost: Cost
    alternatives: dict[str, Cost]
    """Cost of other ways to train."""
    model: str
    """Model of the estimates."""
    gpu_gb: float
    """Memory of one GPU, for ``routes`` and ``training``."""
    routes: list[TrainingRoute]
    """Ways to train that fit."""
    training: Choice | None = None
    """The way to train in ``steps``; None with frozen features."""


def plan(
    name: str,
    folder: str | os.PathLike[str] = "OUT",
    *,
    data: str = "",
    backbone: str = "",
    encoder: str = "",
    model: str = "",
    prompts: str = "",
    lora: bool = False,
    optimizer: str = "",
    precision: str = "",
    load: LoadOptions | None = None,
    seed: int = 0,
    devices: Devices | None = None,
) -> Plan:
    """Return the steps of a recipe and their estimated cost. Nothing is run; votes that are not the paper's are read.

    Args:
        name: ``multipref``, ``personalllm``, ``helpsteer2`` or ``tldr``; or other votes, as ``load_preferences`` takes
            them.
        folder: output folder.
        data: votes, ``NAME:FOLDER`` for a local copy (default: from the hub).
        backbone: checkpoint that members start from: a folder or a hub id.
        encoder: use frozen features of this encoder instead of a backbone.
        model: model that writes the continuations (default: the backbone, or ``smollm2`` with an encoder).
        prompts: prompts of the continuations, as ``generate`` takes them (default: those of the recipe).
        lora: train adapters instead of all weights.
        optimizer: ``soap``, ``soap-one-sided`` or ``adamw`` (default: the recipe's, or what fits the memory).
        precision: ``float32`` or ``bfloat16``, of the training (default: float32, or what fits the memory).
        load: how to read the votes.
        seed: random seed.
        devices: to train on (default: the GPUs of this machine, or one H100 of 80 GB if it has none).

    Example:
        >>> [step.name for step in plan("tldr").steps]
        ['inspect', 'fit', 'generate', 'diversity', 'report']
    """
    recipe, data = find_recipe(name, data, load, seed)
    inputs = check_inputs(
        recipe, data=data, backbone=backbone or ("" if encoder else BACKBONE), encoder=encoder, model=model,
        prompts=prompts, lora=lora, optimizer=optimizer, precision=precision, load=load, seed=seed,
    )  # fmt: skip
    known = weights_of(backbone) if backbone else None
    weights = known or LLAMA_3_8B.weights
    devices, route = devices or _visible_gpus() or Devices(1, H100_MEMORY), inputs.route(recipe)
    training = choose_route(weights, devices, route, named=inputs.names_route) if inputs.backbone else None
    route = training.route if training else route
    estimates = {_way(other): estimate_cost(recipe, other, weights=weights) for other in _compared(route)}
    cost = estimates.pop(_way(route))
    return Plan(
        recipe=recipe,
        steps=recipe_steps(recipe, inputs, Path(folder), route),
        needs=_needs(recipe, inputs, cost, training),
        cost=cost,
        alternatives=estimates,
        model=backbone if known else LLAMA,
        gpu_gb=devices.bytes_each / 1e9,
        routes=_fitting_routes(recipe, inputs, Path(folder), weights, devices) if inputs.backbone else [],
        training=training,
    )


def _visible_gpus() -> Devices | None:
    try:
        devices = visible_devices()
    except ImportError:
        return None
    return devices if devices.gpu else None


def _compared(route: Route) -> list[Route]:
    """Return the ways to train in the table of costs, the given one first."""
    full = [Route("soap"), Route("adamw"), *(Route(name, "bfloat16") for name in ("soap", "soap-one-sided", "adamw"))]
    return list(dict.fromkeys([route, *full, Route("soap", lora=True), Route("adamw", lora=True)]))


def _way(route: Route) -> str:
    words = [
        "LoRA" if route.lora else "full",
        route.optimizer,
        *([route.precision] if route.precision != "float32" else []),
    ]
    return ", ".join(words) + (f" on {route.shards} GPUs" if route.shards > 1 else "")


def _fitting_routes(
    recipe: Recipe, inputs: Inputs, folder: Path, weights: Weights, devices: Devices
) -> list[TrainingRoute]:
    """Return the ways to train that fit one of the devices, or as few of them as possible with FSDP."""

    def fits(route: Route) -> bool:
        return route.memory(weights) <= devices.bytes_each

    *full, lora = possible_routes(Route(recipe.tune.optimizer), replace(devices, count=1))
    shared = [route for count in GPU_COUNTS if fits(route := Route("adamw", shards=count))]
    return [
        TrainingRoute(route, route.shards, route.memory(weights) / 1e9, fit_command(recipe, inputs, folder, route))
        for route in (*full, *shared[:1], lora)
        if fits(route)
    ]


def find_recipe(name: str, data: str = "", load: LoadOptions | None = None, seed: int = 0) -> tuple[Recipe, str]:
    """Return the recipe that a name stands for, and the votes: one of the paper's, or the recipe for other votes."""
    if not is_own_data(name):
        kind, copy, _ = name.partition(":")
        return load_recipe(kind), data or (name if copy else "")
    if data:
        raise UsageError(f"--data names a copy of one of the paper's data sets, but {name} are votes already.")
    return own_recipe(name, load, seed=seed), name


def check_inputs(
    recipe: Recipe,
    *,
    data: str,
    backbone: str,
    encoder: str,
    model: str,
    prompts: str,
    lora: bool,
    optimizer: str = "",
    precision: str = "",
    load: LoadOptions | None,
    seed: int,
) -> Inputs:
    """Return the inputs of a run with defaults filled in. Raises UsageError if they contradict each other."""
    if backbone and encoder:
        raise UsageError("--backbone and --encoder cannot be combined: name one of them.")
    for option, given in {"lora": lora, "optimizer": optimizer, "precision": precision}.items():
        if encoder and given:
            raise UsageError(f"--{option} requires --backbone, not --encoder.")
    if optimizer and optimizer not in get_args(Optimizer):
        raise UsageError(f"optimizer cannot be {optimizer!r}; {did_you_mean(optimizer, get_args(Optimizer))}.")
    if precision and precision not in NUMBER_BYTES:
        raise UsageError(f"precision cannot be {precision!r}; {did_you_mean(precision, NUMBER_BYTES)}.")
    data = data or recipe.name
    if recipe.name != OWN and data.partition(":")[0] != recipe.name:
        raise UsageError(f"the recipe {recipe.name} needs its own votes: {recipe.name}:FOLDER, not {data!r}.")
    return Inputs(
        data=data,
        backbone=backbone,
        encoder=encoder,
        model=model or backbone or "smollm2",
        prompts=prompts or recipe.candidates.prompts,
        lora=lora,
        seed=seed,
        load=load or LoadOptions(),
        optimizer=optimizer,
        precision=precision,
    )


def fit_options(recipe: Recipe, inputs: Inputs, route: Route) -> dict[str, Any]:
    """Return the options of ``fit`` by name; with a backbone, those of fine-tuning too."""
    options = {**asdict(recipe.fit), "seed": inputs.seed}
    if not inputs.backbone:
        return {**options, "encoder": inputs.encoder}
    tuned = {**asdict(recipe.tune), "backbone": inputs.backbone}
    tuned |= {"optimizer": route.optimizer, "precision": route.precision}
    if route.lora:  # LoRA needs another learning rate, and the paper has none for it: use the default of fit
        tuned = {**tuned, "lora": True}
        tuned.pop("learning_rate")
    return {**options, **tuned}


def sampling_options(recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
    """Return the options of ``generate`` by name."""
    settings = asdict(recipe.candidates)
    names = ("n", "limit", "temperature", "max_new_tokens")
    return {"model": inputs.model, **{name: settings[name] for name in names}, "seed": inputs.seed}


def fit_command(recipe: Recipe, inputs: Inputs, folder: Path, route: Route) -> list[str]:
    """Return the command that trains the members of a recipe on a route."""
    words = ["fit", inputs.data, "-o", str(folder / "ensemble"), *_flags(_changed(inputs.load))]
    return [*route.launcher, *words, *_flags(fit_options(recipe, inputs, route))]


def recipe_steps(recipe: Recipe, inputs: Inputs, folder: Path, route: Route) -> list[Step]:
    """Return the steps of a recipe in their order, with members trained on a route."""
    ensemble, candidates = str(folder / "ensemble"), str(folder / "candidates.jsonl")
    prompts = ensemble if inputs.prompts == "held-out" else inputs.prompts
    sampled, reading = recipe.candidates, _flags(_changed(inputs.load))
    return [
        Step(
            "inspect",
            "Read the votes and compare them with the paper's Table 1." if recipe.paper else "Read the votes.",
            ["pluralign", "inspect", inputs.data, *reading],
            RECORD_FILE,
        ),
        Step(
            "fit",
            f"Train {recipe.fit.k} members one after the other; report the held-out Brier score at every size and the "
            "floor (Figure 2).",
            fit_command(recipe, inputs, folder, route),
            "ensemble",
        ),
        Step(
            "generate",
            f"Sample {sampled.n} continuations for each of {sampled.limit} prompts.",
            ["pluralign", "generate", prompts, "-o", candidates, *_flags(sampling_options(recipe, inputs))],
            "candidates.jsonl",
        ),
        Step(
            "diversity",
            "Compute Kendall's tau between the members' rankings of the continuations (Figure 3).",
            ["pluralign", "diversity", ensemble, candidates],
            RECORD_FILE,
        ),
        Step(
            "report",
            "Write one page with figures, member cards and case studies.",
            ["pluralign", "report", ensemble, "-o", str(folder / "report.html"), "--candidates", candidates],
            "report.html",
        ),
    ]


def _flags(options: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in options.items():
        flag = "-n" if name == "n" else f"--{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            words += [word for ours, theirs in value.items() for word in (flag, f"{ours}={theirs}")]
            continue
        words += [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return words


def _changed(load: LoadOptions) -> dict[str, Any]:
    """Return the options for reading votes that are not the defaults, by name."""
    usual = LoadOptions()
    return {name: value for name, value in asdict(load).items() if value != getattr(usual, name)}


def _needs(recipe: Recipe, inputs: Inputs, cost: Cost, training: Choice | None) -> list[str]:
    votes = f"the files of {recipe.hub}" if recipe.hub and ":" not in inputs.data else inputs.data
    needs = [f"votes: {votes}"]
    if inputs.backbone:
        named = "" if inputs.backbone == BACKBONE else f"; here {inputs.backbone}"
        needs.append(f"checkpoint: {recipe.starts_from}; {recipe.starts_from_note}{named}")
        if training is not None:
            needs.append(f"GPU memory to train a member: {training.reason}")
        needs.append(
            f"disk: {cost.disk_gb:.0f} GB; {cost.member_gb:.1f} GB per member, {cost.checkpoint_gb:.0f} GB for each of "
            "at most two training checkpoints"
        )
    else:
        needs.append(f"encoder: {inputs.encoder}, frozen; not the paper's experiment: the cost below does not apply")
    if inputs.prompts == "prism":
        needs.append("prompts: conversations.jsonl of HannahRoseKirk/prism-alignment, or --prompts prism:FOLDER")
    return needs
