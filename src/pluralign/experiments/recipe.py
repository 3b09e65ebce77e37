"""Recipes of the paper's experiments."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from pluralign.core.errors import UsageError, did_you_mean

RECIPES = ("multipref", "personalllm", "helpsteer2", "tldr")


@dataclass(frozen=True)
class PaperRow:
    """A data set's row in the paper's Table 1."""

    pairs: int
    pairs_are: str
    """What that number counts, as far as one can tell: ``train`` pairs, ``all`` pairs or ``responses``."""
    train_prompts: int
    test_prompts: int
    annotators: float
    majority_share: float
    ties_in_share: bool
    """Whether the share fits ties in the denominator."""


@dataclass(frozen=True)
class Size:
    """What the cost of a recipe is reckoned with; tokens are assumed."""

    train_pairs: int
    test_pairs: int
    prompt_tokens: int
    response_tokens: int
    responses_a_prompt: int | None = None
    """Given where pairs share responses: each text is scored once."""


@dataclass(frozen=True)
class Recipe:
    """One experiment of the paper."""

    name: str
    title: str
    hub: str
    starts_from: str
    starts_from_note: str
    notes: tuple[str, ...]
    paper: PaperRow
    size: Size
    fit: Mapping[str, Any]
    """Options of ``fit``, whatever the features."""
    tune: Mapping[str, Any]
    """Further options of ``fit`` where a backbone is fine-tuned."""
    paper_training: Mapping[str, Any]
    candidates: Mapping[str, Any]


def load_recipe(name: str) -> Recipe:
    """Return the recipe of one of the paper's data sets.

    Example:
        >>> recipe = load_recipe("tldr")
        >>> recipe.paper.annotators, recipe.fit["k"], recipe.candidates["prompts"]
        (7.56, 8, 'held-out')
    """
    if name not in RECIPES:
        raise UsageError(f"there is no recipe {name!r}; {did_you_mean(name, RECIPES)}.")
    text = files("pluralign").joinpath(f"experiments/recipes/{name}.toml").read_text(encoding="utf-8")
    values = tomllib.loads(text)
    parts = {"paper": PaperRow(**values["paper"]), "size": Size(**values["size"]), "notes": tuple(values["notes"])}
    return Recipe(**{**values, **parts})


def shrunk(recipe: Recipe) -> Recipe:
    """Return a recipe that takes seconds: the same steps with few members, prompts and tokens."""
    return replace(
        recipe,
        fit={**recipe.fit, "k": 2},
        tune={**recipe.tune, "batch_size": 16, "max_length": 256, "learning_rate": 1e-3},
        candidates={**recipe.candidates, "limit": 4, "n": 5, "max_new_tokens": 12},
    )
