"""The steps of a recipe and their estimated cost."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pluralign.core.errors import UsageError
from pluralign.experiments import costs
from pluralign.experiments.recipe import Recipe, load_recipe
from pluralign.models.causal import SAMPLES_AT_ONCE

STATE_FILE = "reproduce.json"


LORA_RANK = 16


@dataclass(frozen=True)
class Cost:
    """What a recipe is reckoned to cost on one H100; every formula is in docs/reproduce.md."""

    lora: bool
    optimizer: str
    parameters: int
    """Of one reward model."""
    trained_parameters: int
    train_tokens: int
    """That one member is trained on."""
    scored_tokens: int
    """That each finished member reads: all texts of training and held-out pairs."""
    steps: int
    """Of the optimizer, for one member."""
    training_flops: float
    """Of all members, without the optimizer's."""
    optimizer_flops: float
    scoring_flops: float
    continuations: int
    training_hours: float
    scoring_hours: float
    generation_hours: float
    """To sample the continuations."""
    ranking_hours: float
    """For every member to score them."""
    gpu_hours: float
    """All together."""
    memory_gb: float
    """On the GPU while a member is trained: weights, gradients and the optimizer's state in FP32."""
    bf16_memory_gb: float
    """The same if all were in BF16."""
    member_gb: float
    """On disk, of one member."""
    checkpoint_gb: float
    """On disk, of one unfinished training; two are kept."""
    disk_gb: float
    """Of the checkpoint that members start from, all members, and two unfinished trainings."""


def estimate_cost(recipe: Recipe, *, lora: bool = False, optimizer: str = "", k: int | None = None) -> Cost:
    """Return what a recipe costs on one H100, from the paper's sizes and the recipe's assumptions.

    Example:
        >>> cost = reckon(load_recipe("multipref"))
        >>> cost.train_tokens, cost.steps, round(cost.gpu_hours, 1)
        (9413000, 19, 20.9)
    """
    architecture, size, sampling = costs.LLAMA_3_8B, recipe.size, recipe.candidates
    optimizer, members = optimizer or recipe.tune["optimizer"], k or recipe.fit["k"]
    n, language_model = costs.reward_parameters(architecture), costs.language_model_parameters(architecture)
    rank = LORA_RANK if lora else None
    trained = costs.trained_parameters(architecture, rank)
    text = size.prompt_tokens + size.response_tokens
    train_tokens = 2 * size.train_pairs * text * recipe.tune["epochs"]
    texts = 2 * (size.train_pairs + size.test_pairs)
    if size.responses_a_prompt:
        texts = size.responses_a_prompt * (recipe.paper.train_prompts + recipe.paper.test_prompts)
    steps = math.ceil(size.train_pairs / recipe.tune["batch_size"]) * recipe.tune["epochs"]
    training = members * costs.training_flops(n, train_tokens, lora=lora)
    matrices = costs.lora_matrices(architecture, LORA_RANK) if lora else architecture.matrices
    preconditioning = members * costs.soap_flops(matrices, steps) if optimizer == "soap" else 0.0
    scoring = members * costs.scoring_flops(n, texts * text)
    continuations = sampling["limit"] * sampling["n"]
    prompt_and_new = size.prompt_tokens + sampling["max_new_tokens"]
    ranking = members * costs.scoring_flops(n, continuations * prompt_and_new)
    hours = {
        "training_hours": costs.gpu_hours(training + preconditioning),
        "scoring_hours": costs.gpu_hours(scoring, costs.H100_FP32_FLOPS),
        "generation_hours": costs.decoding_hours(
            language_model, sampling["limit"], sampling["n"], sampling["max_new_tokens"], SAMPLES_AT_ONCE
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


@dataclass(frozen=True)
class Inputs:
    """What a run is given beside its recipe."""

    data: str
    backbone: str
    """Fine-tuned by each member; empty where frozen features are used."""
    encoder: str
    model: str
    """Writes the continuations."""
    prompts: str
    """Of the continuations; ``held-out`` are those that ``fit`` held out."""
    lora: bool
    seed: int


@dataclass(frozen=True)
class Step:
    """One step of a recipe, with the command it stands for."""

    name: str
    does: str
    command: list[str]
    makes: str
    """In the output folder."""


@dataclass(frozen=True)
class Plan:
    """What ``reproduce`` would do."""

    recipe: Recipe
    steps: list[Step]
    needs: list[str]
    cost: Cost
    alternatives: dict[str, Cost]
    """The cost of other ways to train."""


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
    seed: int = 0,
) -> Plan:
    """Return the steps of a recipe and what they cost; nothing is read or run.

    Args:
        name: ``multipref``, ``personalllm``, ``helpsteer2`` or ``tldr``.
        folder: where it would run.
        data: the votes, ``NAME:FOLDER`` for a local copy; from the hub unless given.
        backbone: the checkpoint that members start from: a folder or a hub id.
        encoder: use frozen features of this encoder instead of a backbone.
        model: what writes the continuations; the backbone unless given, or ``smollm2`` with an encoder.
        prompts: what it continues, as ``generate`` takes them; the recipe's own unless given.
        lora: train adapters instead of all weights.
        seed: of everything random.

    Example:
        >>> [step.name for step in plan("tldr").steps]
        ['inspect', 'fit', 'generate', 'diversity', 'report']
    """
    recipe = load_recipe(name)
    inputs = _inputs(
        recipe, data=data, backbone=backbone or ("" if encoder else "BACKBONE"), encoder=encoder, model=model,
        prompts=prompts, lora=lora, seed=seed,
    )  # fmt: skip
    reckoned = {
        f"{'LoRA' if adapters else 'full'}, {optimizer}": estimate_cost(recipe, lora=adapters, optimizer=optimizer)
        for adapters in (False, True)
        for optimizer in ("soap", "adamw")
    }
    cost = reckoned.pop(f"{'LoRA' if lora else 'full'}, {recipe.tune['optimizer']}")
    return Plan(recipe, _steps(recipe, inputs, Path(folder)), _needs(recipe, inputs, cost), cost, reckoned)


def _inputs(recipe: Recipe, **given: Any) -> Inputs:
    if given["backbone"] and given["encoder"]:
        raise UsageError("a backbone is fine-tuned and an encoder is frozen: name one of them.")
    if given["encoder"] and given["lora"]:
        raise UsageError("lora is about fine-tuning: name a backbone, not an encoder.")
    data = given["data"] or recipe.name
    if data.partition(":")[0] != recipe.name:
        raise UsageError(f"the recipe {recipe.name} needs its own votes: {recipe.name}:FOLDER, not {data!r}.")
    return Inputs(
        data=data,
        backbone=given["backbone"],
        encoder=given["encoder"],
        model=given["model"] or given["backbone"] or "smollm2",
        prompts=given["prompts"] or recipe.candidates["prompts"],
        lora=given["lora"],
        seed=given["seed"],
    )


def _fit_options(recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
    """The options of ``fit`` by name: with a backbone also how it is tuned."""
    options = {**recipe.fit, "seed": inputs.seed}
    if not inputs.backbone:
        return {**options, "encoder": inputs.encoder}
    tuned = {**recipe.tune, "backbone": inputs.backbone}
    if inputs.lora:  # its learning rates are others, and the paper has none for it: fit's own
        tuned = {**tuned, "lora": True}
        tuned.pop("learning_rate")
    return {**options, **tuned}


def _sampling(recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
    """The options of ``generate`` by name."""
    names = ("n", "limit", "temperature", "max_new_tokens")
    return {"model": inputs.model, **{name: recipe.candidates[name] for name in names}, "seed": inputs.seed}


def _steps(recipe: Recipe, inputs: Inputs, folder: Path) -> list[Step]:
    ensemble, candidates = str(folder / "ensemble"), str(folder / "candidates.jsonl")
    prompts = ensemble if inputs.prompts == "held-out" else inputs.prompts
    sampled = recipe.candidates
    return [
        Step(
            "inspect",
            "Read the votes and put them beside the paper's Table 1.",
            ["pluralign", "inspect", inputs.data],
            STATE_FILE,
        ),
        Step(
            "fit",
            f"Learn {recipe.fit['k']} members one after the other; Brier on held-out prompts at every size, beside the "
            "floor (Figure 2).",
            ["pluralign", "fit", inputs.data, "-o", ensemble, *_flags(_fit_options(recipe, inputs))],
            "ensemble",
        ),
        Step(
            "generate",
            f"Sample {sampled['n']} continuations for each of {sampled['limit']} prompts.",
            ["pluralign", "generate", prompts, "-o", candidates, *_flags(_sampling(recipe, inputs))],
            "candidates.jsonl",
        ),
        Step(
            "diversity",
            "Kendall's tau between the members' rankings of them (Figure 3).",
            ["pluralign", "diversity", ensemble, candidates],
            STATE_FILE,
        ),
        Step(
            "report",
            "One page with the figures, member cards and case studies.",
            ["pluralign", "report", ensemble, "-o", str(folder / "report.html"), "--candidates", candidates],
            "report.html",
        ),
    ]


def _flags(options: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in options.items():
        flag = "-n" if name == "n" else f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return words


def _needs(recipe: Recipe, inputs: Inputs, cost: Cost) -> list[str]:
    votes = f"the files of {recipe.hub}" if ":" not in inputs.data else inputs.data
    needs = [f"votes: {votes}"]
    if inputs.backbone:
        named = "" if inputs.backbone == "BACKBONE" else f"; here {inputs.backbone}"
        needs.append(f"checkpoint: {recipe.starts_from}; {recipe.starts_from_note}{named}")
        gpus = math.ceil(cost.memory_gb * 1e9 / costs.H100_MEMORY)
        shared = f": {gpus} H100s of 80 GB share it with FSDP" if gpus > 1 else ""
        needs.append(f"GPU memory: {cost.memory_gb:.0f} GB while a member is trained{shared}")
        needs.append(
            f"disk: {cost.disk_gb:.0f} GB; {cost.member_gb:.1f} GB a member, {cost.checkpoint_gb:.0f} GB for each of "
            "two checkpoints on the way"
        )
    else:
        needs.append(f"encoder: {inputs.encoder}, frozen: not the paper's experiment, and none of the cost below")
    if inputs.prompts == "prism":
        needs.append("prompts: conversations.jsonl of HannahRoseKirk/prism-alignment, or --prompts prism:FOLDER")
    return needs
