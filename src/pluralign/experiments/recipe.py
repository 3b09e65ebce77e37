"""Recipes of the paper's experiments, one for each of its four data sets.

A recipe is a file ``recipes/NAME.toml`` with the paper's figures, the training options and the assumptions of the cost
estimate. This module reads it and checks its fields.
"""

import tomllib
from dataclasses import dataclass, replace
from importlib.resources import files

from pluralign.core.errors import UsageError, did_you_mean
from pluralign.core.json_values import from_json

RECIPES = ("multipref", "personalllm", "helpsteer2", "tldr")


@dataclass(frozen=True)
class PaperRow:
    """The row of a data set in the paper's Table 1."""

    pairs: int
    pairs_are: str
    """Our reading of that number: ``train`` pairs, ``all`` pairs or ``responses``."""
    train_prompts: int
    test_prompts: int
    annotators: float
    majority_share: float
    ties_in_share: bool
    """Whether the majority share matches only with ties in the denominator."""


@dataclass(frozen=True)
class Size:
    """Sizes for the cost estimate; numbers of tokens are assumptions."""

    train_pairs: int
    test_pairs: int
    prompt_tokens: int
    response_tokens: int
    responses_a_prompt: int | None = None
    """Number of responses per prompt if pairs share responses: each text is scored once."""


@dataclass(frozen=True)
class FitSettings:
    """Options of ``fit`` for any features."""

    k: int
    method: str
    variant: str
    max_disagreement: float


@dataclass(frozen=True)
class FinetuneSettings:
    """Further options of ``fit`` for a fine-tuned backbone."""

    optimizer: str
    learning_rate: float
    epochs: int
    batch_size: int
    max_length: int
    gradient_checkpointing: bool
    fresh_head: bool


@dataclass(frozen=True)
class PaperTraining:
    """Training settings of the paper, for the record. ``fit`` has the same values as defaults."""

    precision: str
    schedule: str
    warmup: float
    weight_decay: float
    learning_rates: list[float]
    device: str


@dataclass(frozen=True)
class CandidateSettings:
    """How continuations are sampled for Figure 3."""

    prompts: str
    """``prism``, or ``held-out`` for the held-out prompts of ``fit``."""
    limit: int
    """Number of prompts."""
    n: int
    """Number of continuations per prompt."""
    temperature: float
    max_new_tokens: int


@dataclass(frozen=True)
class Recipe:
    """One experiment of the paper."""

    name: str
    title: str
    hub: str
    """Id of the data set on the Hugging Face hub."""
    starts_from: str
    """Checkpoint that the paper's members start from."""
    starts_from_note: str
    notes: tuple[str, ...]
    paper: PaperRow
    size: Size
    fit: FitSettings
    tune: FinetuneSettings
    paper_training: PaperTraining
    candidates: CandidateSettings


def load_recipe(name: str) -> Recipe:
    """Return the recipe of one of the paper's data sets.

    Example:
        >>> recipe = load_recipe("tldr")
        >>> recipe.paper.annotators, recipe.fit.k, recipe.candidates.prompts
        (7.56, 8, 'held-out')
    """
    if name not in RECIPES:
        raise UsageError(f"there is no recipe {name!r}; {did_you_mean(name, RECIPES)}.")
    text = files("pluralign").joinpath(f"experiments/recipes/{name}.toml").read_text(encoding="utf-8")
    return from_json(Recipe, tomllib.loads(text))


def shrink(recipe: Recipe) -> Recipe:
    """Return a recipe with the same steps that takes seconds: few members, prompts and tokens."""
    return replace(
        recipe,
        fit=replace(recipe.fit, k=2),
        tune=replace(recipe.tune, batch_size=16, max_length=256, learning_rate=1e-3),
        candidates=replace(recipe.candidates, limit=4, n=5, max_new_tokens=12),
    )
