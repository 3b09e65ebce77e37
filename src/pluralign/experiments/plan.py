"""The steps of a recipe, their commands and inputs, and their estimated cost. Nothing is run here.

Each step is a public function with a command of its own. The formulas of the cost are in ``costs``.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pluralign.core.errors import UsageError
from pluralign.experiments import costs
from pluralign.experiments.recipe import OWN, Recipe, is_own_data, load_recipe, own_recipe
from pluralign.models.causal import SAMPLES_AT_ONCE
from pluralign.votes.options import LoadOptions

RECORD_FILE = "reproduce.json"
"""Inputs, results and timings of a run, in the output folder."""
LORA_RANK = 16


# --- cost -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Estimated cost of a recipe on one H100; docs/how-to/reproduce.md has all formulas."""

    lora: bool
    optimizer: str
    parameters: int
    """Parameters of one reward model."""
    trained_parameters: int
    train_tokens: int
    """Training tokens of one member."""
    scored_tokens: int
    """Tokens that each trained member scores: all texts of training and held-out pairs."""
    steps: int
    """Optimizer steps of one member."""
    training_flops: float
    """Operations to train all members, without those of the optimizer."""
    optimizer_flops: float
    scoring_flops: float
    continuations: int
    training_hours: float
    scoring_hours: float
    generation_hours: float
    """Time to sample the continuations."""
    ranking_hours: float
    """Time for all members to score the continuations."""
    gpu_hours: float
    """Total."""
    memory_gb: float
    """GPU memory to train a member: weights, gradients and optimizer state in FP32."""
    bf16_memory_gb: float
    """The same with everything in BF16."""
    member_gb: float
    """Disk space of one member."""
    checkpoint_gb: float
    """Disk space of one training checkpoint; two are kept."""
    disk_gb: float
    """Disk space of the starting checkpoint, all members and two training checkpoints."""


def estimate_cost(recipe: Recipe, *, lora: bool = False, optimizer: str = "", k: int | None = None) -> Cost:
    """Estimate the cost of a recipe on one H100 from the paper's sizes and the recipe's assumptions.

    Example:
        >>> cost = estimate_cost(load_recipe("multipref"))
        >>> cost.train_tokens, cost.steps, round(cost.gpu_hours, 1)
        (9413000, 19, 20.9)
    """
    architecture, size, sampling = costs.LLAMA_3_8B, recipe.size, recipe.candidates
    optimizer, members = optimizer or recipe.tune.optimizer, k or recipe.fit.k
    n, language_model = costs.reward_parameters(architecture), costs.language_model_parameters(architecture)
    rank = LORA_RANK if lora else None
    trained = costs.trained_parameters(architecture, rank)
    text = size.prompt_tokens + size.response_tokens
    train_tokens = 2 * size.train_pairs * text * recipe.tune.epochs
    texts = size.texts or 2 * (size.train_pairs + size.test_pairs)
    if size.responses_a_prompt and recipe.paper:
        texts = size.responses_a_prompt * (recipe.paper.train_prompts + recipe.paper.test_prompts)
    steps = math.ceil(size.train_pairs / recipe.tune.batch_size) * recipe.tune.epochs
    training = members * costs.training_flops(n, train_tokens, lora=lora)
    matrices = costs.lora_matrices(architecture, LORA_RANK) if lora else architecture.matrices
    preconditioning = members * costs.soap_flops(matrices, steps) if optimizer == "soap" else 0.0
    scoring = members * costs.scoring_flops(n, texts * text)
    continuations = sampling.limit * sampling.n
    prompt_and_new = size.prompt_tokens + sampling.max_new_tokens
    ranking = members * costs.scoring_flops(n, continuations * prompt_and_new)
    hours = {
        "training_hours": costs.gpu_hours(training + preconditioning),
        "scoring_hours": costs.gpu_hours(scoring, costs.H100_FP32_FLOPS),
        "generation_hours": costs.decoding_hours(
            language_model, sampling.limit, sampling.n, sampling.max_new_tokens, SAMPLES_AT_ONCE
        ),
        "ranking_hours": costs.gpu_hours(ranking, costs.H100_FP32_FLOPS),
    }
    memory = [costs.training_memory(architecture, optimizer, lora_rank=rank, number_bytes=b) for b in (4, 2)]
    member = costs.FP32_BYTES * trained
    checkpoint = costs.FP32_BYTES * costs.trained_numbers(architecture, optimizer, rank)
    return Cost(
        lora=lora,
        optimizer=optimizer,
        parameters=n,
        trained_parameters=trained,
        train_tokens=train_tokens,
        scored_tokens=texts * text,
        steps=steps,
        training_flops=training,
        optimizer_flops=preconditioning,
        scoring_flops=scoring,
        continuations=continuations,
        **hours,
        gpu_hours=sum(hours.values()),
        memory_gb=memory[0] / 1e9,
        bf16_memory_gb=memory[1] / 1e9,
        member_gb=member / 1e9,
        checkpoint_gb=checkpoint / 1e9,
        disk_gb=(costs.BF16_BYTES * language_model + members * member + 2 * checkpoint) / 1e9,
    )


# --- inputs and steps -------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Step:
    """One step of a recipe, with its command."""

    name: str
    does: str
    command: list[str]
    makes: str
    """File or folder that it writes in the output folder."""


@dataclass(frozen=True)
class Plan:
    """The steps, inputs and estimated cost of a recipe."""

    recipe: Recipe
    steps: list[Step]
    needs: list[str]
    cost: Cost
    alternatives: dict[str, Cost]
    """Cost of other ways to train."""


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
    load: LoadOptions | None = None,
    seed: int = 0,
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
        load: how to read the votes.
        seed: random seed.

    Example:
        >>> [step.name for step in plan("tldr").steps]
        ['inspect', 'fit', 'generate', 'diversity', 'report']
    """
    recipe, data = find_recipe(name, data, load, seed)
    inputs = check_inputs(
        recipe, data=data, backbone=backbone or ("" if encoder else "BACKBONE"), encoder=encoder, model=model,
        prompts=prompts, lora=lora, load=load, seed=seed,
    )  # fmt: skip
    estimates = {
        f"{'LoRA' if adapters else 'full'}, {optimizer}": estimate_cost(recipe, lora=adapters, optimizer=optimizer)
        for adapters in (False, True)
        for optimizer in ("soap", "adamw")
    }
    cost = estimates.pop(f"{'LoRA' if lora else 'full'}, {recipe.tune.optimizer}")
    return Plan(recipe, recipe_steps(recipe, inputs, Path(folder)), _needs(recipe, inputs, cost), cost, estimates)


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
    load: LoadOptions | None,
    seed: int,
) -> Inputs:
    """Return the inputs of a run with defaults filled in. Raises UsageError if they contradict each other."""
    if backbone and encoder:
        raise UsageError("--backbone and --encoder cannot be combined: name one of them.")
    if encoder and lora:
        raise UsageError("--lora requires --backbone, not --encoder.")
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
    )


def fit_options(recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
    """Return the options of ``fit`` by name; with a backbone, those of fine-tuning too."""
    options = {**asdict(recipe.fit), "seed": inputs.seed}
    if not inputs.backbone:
        return {**options, "encoder": inputs.encoder}
    tuned = {**asdict(recipe.tune), "backbone": inputs.backbone}
    if inputs.lora:  # LoRA needs another learning rate, and the paper has none for it: use the default of fit
        tuned = {**tuned, "lora": True}
        tuned.pop("learning_rate")
    return {**options, **tuned}


def sampling_options(recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
    """Return the options of ``generate`` by name."""
    settings = asdict(recipe.candidates)
    names = ("n", "limit", "temperature", "max_new_tokens")
    return {"model": inputs.model, **{name: settings[name] for name in names}, "seed": inputs.seed}


def recipe_steps(recipe: Recipe, inputs: Inputs, folder: Path) -> list[Step]:
    """Return the steps of a recipe in their order."""
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
            ["pluralign", "fit", inputs.data, "-o", ensemble, *reading, *_flags(fit_options(recipe, inputs))],
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


def _needs(recipe: Recipe, inputs: Inputs, cost: Cost) -> list[str]:
    votes = f"the files of {recipe.hub}" if recipe.hub and ":" not in inputs.data else inputs.data
    needs = [f"votes: {votes}"]
    if inputs.backbone:
        named = "" if inputs.backbone == "BACKBONE" else f"; here {inputs.backbone}"
        needs.append(f"checkpoint: {recipe.starts_from}; {recipe.starts_from_note}{named}")
        gpus = math.ceil(cost.memory_gb * 1e9 / costs.H100_MEMORY)
        sharded = f": {gpus} H100s of 80 GB with FSDP" if gpus > 1 else ""
        needs.append(f"GPU memory: {cost.memory_gb:.0f} GB to train a member{sharded}")
        needs.append(
            f"disk: {cost.disk_gb:.0f} GB; {cost.member_gb:.1f} GB per member, {cost.checkpoint_gb:.0f} GB for each of "
            "two training checkpoints"
        )
    else:
        needs.append(f"encoder: {inputs.encoder}, frozen; not the paper's experiment: the cost below does not apply")
    if inputs.prompts == "prism":
        needs.append("prompts: conversations.jsonl of HannahRoseKirk/prism-alignment, or --prompts prism:FOLDER")
    return needs
