"""The estimated cost of a recipe on one H100, from its sizes and the formulas of ``costs``."""

import math
from dataclasses import dataclass

from pluralign.experiments import costs
from pluralign.experiments.recipes import Recipe
from pluralign.learning.routes import (
    BF16_BYTES,
    LLAMA_3_8B,
    LORA_RANK,
    NUMBER_BYTES,
    Route,
    Weights,
    trained_numbers,
    trained_parameters,
    trained_shapes,
    training_memory,
)
from pluralign.text.causal import SAMPLES_AT_ONCE


@dataclass(frozen=True)
class Cost:
    """Estimated cost of a recipe on one H100; docs/how-to/reproduce.md has all formulas."""

    lora: bool
    optimizer: str
    precision: str
    """Of trained weights, gradients and optimizer state."""
    parameters: int
    """Parameters of one reward model."""
    trained_parameters: int
    train_tokens: int
    """Training tokens of one member: each distinct text of a prompt is read once per epoch."""
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
    """GPU memory to train a member: weights, gradients and optimizer state in ``precision``, and activations."""
    bf16_memory_gb: float
    """The same with everything in BF16."""
    member_gb: float
    """Disk space of one member."""
    checkpoint_gb: float
    """Disk space of one training checkpoint; two are kept at most."""
    disk_gb: float
    """Disk space of the starting checkpoint, all members and two training checkpoints."""


def estimate_cost(
    recipe: Recipe, route: Route | None = None, *, weights: Weights | None = None, k: int | None = None
) -> Cost:
    """Estimate the cost of a recipe on one H100 from the paper's sizes and the recipe's assumptions.

    Args:
        recipe: sizes and settings.
        route: how a member is trained (default: as the recipe does).
        weights: of the backbone (default: Meta-Llama-3-8B).
        k: number of members (default: that of the recipe).

    Example:
        >>> from pluralign.experiments.recipes import load_recipe
        >>> cost = estimate_cost(load_recipe("multipref"))
        >>> cost.train_tokens, cost.steps, round(cost.gpu_hours, 1)
        (9413000, 19, 4.3)
    """
    route, weights = route or Route(recipe.tune.optimizer), weights or LLAMA_3_8B.weights
    size, sampling, members = recipe.size, recipe.candidates, k or recipe.fit.k
    n, rank = weights.parameters, LORA_RANK if route.lora else None
    text = size.prompt_tokens + size.response_tokens
    learned, read = _texts(recipe)
    train_tokens = learned * text * recipe.tune.epochs
    steps = math.ceil(size.train_pairs / recipe.tune.batch_size) * recipe.tune.epochs
    training = members * costs.training_flops(n, train_tokens, lora=route.lora)
    preconditioning = members * costs.soap_flops(trained_shapes(weights, rank), steps, route.optimizer)
    scoring = members * costs.scoring_flops(n, read * text)
    continuations = sampling.limit * sampling.n
    prompt_and_new = size.prompt_tokens + sampling.max_new_tokens
    ranking = members * costs.scoring_flops(n, continuations * prompt_and_new)
    hours = {
        "training_hours": costs.gpu_hours(training + preconditioning),
        "scoring_hours": costs.gpu_hours(scoring),
        "generation_hours": costs.decoding_hours(
            weights.language_model_parameters, sampling.limit, sampling.n, sampling.max_new_tokens, SAMPLES_AT_ONCE
        ),
        "ranking_hours": costs.gpu_hours(ranking),
    }
    number, trained = NUMBER_BYTES[route.precision], trained_parameters(weights, rank)
    checkpoint = number * trained_numbers(weights, route.optimizer, rank)
    starting = BF16_BYTES * weights.language_model_parameters
    return Cost(
        lora=route.lora,
        optimizer=route.optimizer,
        precision=route.precision,
        parameters=n,
        trained_parameters=trained,
        train_tokens=train_tokens,
        scored_tokens=read * text,
        steps=steps,
        training_flops=training,
        optimizer_flops=preconditioning,
        scoring_flops=scoring,
        continuations=continuations,
        **hours,
        gpu_hours=sum(hours.values()),
        memory_gb=route.memory(weights) / 1e9,
        bf16_memory_gb=training_memory(weights, route.optimizer, "bfloat16", lora_rank=rank) / 1e9,
        member_gb=number * trained / 1e9,
        checkpoint_gb=checkpoint / 1e9,
        disk_gb=(starting + members * number * trained + 2 * checkpoint) / 1e9,
    )


def _texts(recipe: Recipe) -> tuple[int, int]:
    """Return the number of distinct texts of training pairs, and of all pairs."""
    size = recipe.size
    if size.responses_a_prompt and recipe.paper:
        train, test = recipe.paper.train_prompts, recipe.paper.test_prompts
        return size.responses_a_prompt * train, size.responses_a_prompt * (train + test)
    return size.train_texts or 2 * size.train_pairs, size.texts or 2 * (size.train_pairs + size.test_pairs)
