"""Recipes of the paper's experiments, one for each of its four data sets, and one for any other votes.

A recipe is a file ``recipes/NAME.toml`` with the paper's figures, the training options and the assumptions of the cost
estimate. This module reads it and checks its fields. ``recipes/own.toml`` has no figures of the paper; its sizes are
those of the votes.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from pluralign.core.errors import UsageError, did_you_mean
from pluralign.core.json_values import from_json
from pluralign.learning.backbone.recipe import batch_and_steps
from pluralign.votes.load import load_preferences
from pluralign.votes.options import LoadOptions
from pluralign.votes.paper_sets import KNOWN_SETS

RECIPES = ("multipref", "personalllm", "helpsteer2", "tldr")
OWN = "own"
"""The recipe for other votes."""
CHARACTERS_A_TOKEN = 4
"""Assumed length of a token of English text."""


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
    """Number of responses per prompt if pairs share responses: each text is read once, although it is in many pairs."""
    texts: int | None = None
    """Number of distinct texts, if it is known."""
    train_texts: int | None = None
    """Number of distinct texts of training pairs, if it is known."""


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
    """One experiment of the paper, or the same experiment on other votes."""

    name: str
    title: str
    starts_from: str
    """Checkpoint that the paper's members start from."""
    starts_from_note: str
    notes: tuple[str, ...]
    size: Size
    fit: FitSettings
    tune: FinetuneSettings
    paper_training: PaperTraining
    candidates: CandidateSettings
    hub: str = ""
    """Id of the data set on the Hugging Face hub."""
    paper: PaperRow | None = None
    """None for votes that are not the paper's."""


def load_recipe(name: str) -> Recipe:
    """Return the recipe of one of the paper's data sets.

    Example:
        >>> recipe = load_recipe("tldr")
        >>> recipe.paper.annotators, recipe.fit.k, recipe.candidates.prompts
        (7.56, 8, 'held-out')
    """
    if name not in RECIPES:
        known = (*RECIPES, "all", "a file of votes")
        raise UsageError(f"there is no recipe {name!r}; {did_you_mean(name, known)}.")
    return from_json(Recipe, _settings(name))


def is_own_data(name: str) -> bool:
    """Return whether a name is DATA, and not one of the paper's data sets.

    Example:
        >>> [is_own_data(name) for name in ("tldr", "tldr:copy", "votes.jsonl", "demo:400", "hf:org/set")]
        [False, False, True, True, True]
    """
    kind = name.partition(":")[0]
    if kind in RECIPES:
        return False
    return kind in ("hf", "demo", *KNOWN_SETS) or Path(name).exists() or bool(Path(name).suffix) or "/" in name


def own_recipe(data: str, load: LoadOptions | None = None, *, seed: int = 0) -> Recipe:
    """Return the paper's recipe for any votes: its settings, and the sizes of these votes.

    Args:
        data: the votes, as ``load_preferences`` takes them. They are read.
        load: how to read them.
        seed: of the split into training and test prompts.

    Example:
        >>> recipe = own_recipe("demo:400")
        >>> recipe.fit.variant, recipe.candidates.prompts, recipe.size.train_pairs + recipe.size.test_pairs
        ('printed', 'held-out', 400)
    """
    if data == "-":
        raise UsageError("the votes are read more than once, so standard input cannot be used; name a file.")
    votes = load_preferences(data, load)
    train, test = votes.split(seed=seed)
    size = Size(
        train_pairs=len(train),
        test_pairs=len(test),
        prompt_tokens=_mean_tokens(map(str, votes.prompts)),
        response_tokens=_mean_tokens(votes.responses),
        texts=len(votes.items().prompt_index),
        train_texts=len(train.items().prompt_index),
    )
    settings = _settings(OWN)
    settings["tune"]["batch_size"], _ = batch_and_steps(len(train), epochs=settings["tune"]["epochs"])
    return from_json(Recipe, {**settings, "title": votes.name, "size": asdict(size)})


def _settings(name: str) -> dict[str, Any]:
    text = files("pluralign").joinpath(f"experiments/recipes/{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _mean_tokens(texts: Iterable[str]) -> int:
    lengths = [len(text) for text in texts]
    return max(1, round(sum(lengths) / CHARACTERS_A_TOKEN / max(1, len(lengths))))


def shrink(recipe: Recipe) -> Recipe:
    """Return a recipe with the same steps that takes seconds: few members, prompts and tokens."""
    return replace(
        recipe,
        fit=replace(recipe.fit, k=2),
        tune=replace(recipe.tune, batch_size=16, max_length=256, learning_rate=1e-3),
        candidates=replace(recipe.candidates, limit=4, n=5, max_new_tokens=12),
    )
