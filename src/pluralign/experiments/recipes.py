"""Recipes: the paper's experiments as settings, and the exact commands that they stand for. Nothing is run here.

A recipe is a file ``recipes/NAME.toml``: one for each of the paper's data sets with the paper's figures and settings,
``own`` for any other votes, and one for each kind of hardware with the settings of training that depend on it.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from pluralign.core.errors import DataError, UsageError, did_you_mean
from pluralign.core.json_values import JsonObject, from_json
from pluralign.core.options import as_flags, changed_options, check_choices, check_seed, option, with_changes
from pluralign.learning.options import Orient
from pluralign.votes.options import LoadOptions

RECIPES = ("multipref", "personalllm", "helpsteer2", "tldr")
ALL = "all"
"""Name of the four experiments together."""
OWN = "own"
"""The recipe for other votes."""
HARDWARE = ("one-80gb-gpu", "lora", "fsdp", "cpu")
ORDERS = {"random": "random", "given": "the given", "majority": "majority-first"}
BACKBONE = "BACKBONE"
"""Stands for a checkpoint that is not named."""
RECORD_FILE = "reproduce.json"
"""Inputs, results and timings of a run, in the output folder."""


@dataclass(frozen=True)
class ReproduceOptions:
    """Inputs of an experiment beside its votes."""

    backbone: str | None = option(None, "Checkpoint to fine-tune for each member: a folder or a hub id.")
    encoder: str | None = option(None, "Use frozen features of this encoder instead of a backbone.")
    hardware: str = option(HARDWARE[0], f"Settings of training: {', '.join(HARDWARE)}; or a TOML file.")
    model: str | None = option(
        None, "Model that writes the continuations (default: the backbone, or smollm2 with --encoder)."
    )
    prompts: str | None = option(None, "Prompts to continue, such as prism:FOLDER (default: those of the recipe).")
    orient: Orient = option(
        "random",
        "Order of the two responses of each training pair, on which the printed loss depends: random, as given, or "
        "majority first (as the paper's histogram of p suggests).",
    )
    as_published: bool = option(
        False,
        "Read votes as they were published, not as the paper's Table 1 does: MultiPref without ties, HelpSteer2 with "
        "its own split.",
    )
    tiny: bool = option(False, "Rehearse every step with few votes and a tiny random model.")
    seed: int = option(0, "Random seed.")

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_choices(self, {"orient": Orient})
        if self.backbone and self.encoder:
            raise UsageError("--backbone and --encoder cannot be combined: name one of them.")
        if self.encoder and self.hardware != HARDWARE[0]:
            raise UsageError("--hardware requires --backbone, not --encoder.")
        if self.tiny and set(changed_options(self)) - {"tiny", "seed", "orient"}:
            raise UsageError("--tiny creates its own prompts and model: remove the other options.")


@dataclass(frozen=True)
class PaperRow:
    """The row of a data set in the paper's Table 1."""

    pairs: int
    pairs_are: str
    """Our reading of that number: ``training pairs``, ``pairs`` or ``responses``."""
    train_prompts: int
    test_prompts: int
    annotators: float
    majority_share: float
    ties_in_share: bool
    """Whether the majority share matches only with ties in the denominator."""


@dataclass(frozen=True)
class Recipe:
    """One experiment of the paper, or the same experiment on other votes."""

    name: str
    starts_from: str
    """Checkpoint that the paper's members start from."""
    fit: Mapping[str, Any]
    """Options of ``fit`` for any features."""
    finetune: Mapping[str, Any]
    """Further options of ``fit`` for a fine-tuned backbone."""
    generate: Mapping[str, Any]
    """Options of ``generate`` for Figure 3, and ``prompts``: ``prism``, or ``held-out`` for those of ``fit``."""
    title: str = ""
    notes: tuple[str, ...] = ()
    hub: str = ""
    """Id of the data set on the Hugging Face hub."""
    paper: PaperRow | None = None
    """None for votes that are not the paper's."""
    load: Mapping[str, Any] = field(default_factory=dict)
    """Options of reading that give the paper's Table 1."""


@dataclass(frozen=True)
class Hardware:
    """Settings of training that depend on the hardware."""

    about: str
    finetune: Mapping[str, Any]
    """Options of ``fit`` that win over those of a recipe."""
    launch: tuple[str, ...] = ()
    """Words before ``pluralign`` that start several processes."""


def load_recipe(name: str) -> Recipe:
    """Return the recipe of one of the paper's data sets, or ``own``.

    Example:
        >>> recipe = load_recipe("tldr")
        >>> recipe.paper.annotators, recipe.fit["k"], recipe.generate["prompts"]
        (7.56, 8, 'held-out')
    """
    return from_json(Recipe, tomllib.loads(_file(name).read_text(encoding="utf-8")))


def load_hardware(name: str) -> Hardware:
    """Return settings of training by their name or from a TOML file.

    Example:
        >>> load_hardware("lora").finetune["optimizer"]
        'adamw'
    """
    if name not in HARDWARE and not Path(name).is_file():
        raise UsageError(f"there is no hardware {name!r}; {did_you_mean(name, (*HARDWARE, 'a TOML file'))}.")
    file = _file(name) if name in HARDWARE else Path(name)
    try:
        return from_json(Hardware, tomllib.loads(file.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError) as error:
        raise UsageError(f"{name} must be a TOML file with about and [finetune]: {error}.") from None


def _file(name: str) -> Any:
    return files("pluralign").joinpath(f"experiments/recipes/{name}.toml")


# --- one experiment, and its commands ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step of an experiment, with its command."""

    name: str
    does: str
    command: list[str]


@dataclass(frozen=True)
class Experiment:
    """A recipe with its votes, options and output folder."""

    recipe: Recipe
    data: str
    folder: Path
    options: ReproduceOptions
    load: LoadOptions

    @property
    def hardware(self) -> Hardware:
        """Settings of training."""
        return load_hardware(self.options.hardware)

    @property
    def fit_options(self) -> JsonObject:
        """Options of ``fit`` by name; with a backbone, those of fine-tuning too."""
        options = {**self.recipe.fit, "orient": self.options.orient, "seed": self.options.seed}
        if self.options.encoder:
            return {**options, "encoder": self.options.encoder}
        backbone = {"backbone": self.options.backbone or BACKBONE}
        return {**options, **backbone, **self.recipe.finetune, **self.hardware.finetune}

    @property
    def prompts(self) -> str:
        """Prompts of the continuations, as ``generate`` takes them."""
        prompts = self.options.prompts or str(self.recipe.generate["prompts"])
        return str(self.folder / "ensemble") if prompts == "held-out" else prompts

    @property
    def sampling(self) -> JsonObject:
        """Options of ``generate`` by name."""
        settings = {name: value for name, value in self.recipe.generate.items() if name != "prompts"}
        own = "smollm2" if self.options.encoder else self.options.backbone or BACKBONE
        return {"model": self.options.model or own, **settings, "seed": self.options.seed}

    @property
    def steps(self) -> list[Step]:
        """The steps in their order; each is a public function with a command of its own."""
        k, sampled = self.recipe.fit["k"], self.recipe.generate
        reading = as_flags({name: getattr(self.load, name) for name in changed_options(self.load)})
        ensemble, candidates = str(self.folder / "ensemble"), str(self.folder / "candidates.jsonl")
        compared = " and compare them with the paper's Table 1" if self.recipe.paper else ""
        does = {
            "inspect": f"Read the votes{compared}.",
            "fit": f"Train {k} members, pairs in {ORDERS[self.options.orient]} order; report the held-out Brier score "
            "at every size, and the floor (Figure 2).",
            "generate": f"Sample {sampled['n']} continuations for each of {sampled['limit']} prompts.",
            "diversity": "Compute Kendall's tau between the members' rankings of the continuations (Figure 3).",
            "report": "Write one page with figures, member cards and case studies.",
        }
        arguments = {
            "inspect": [self.data, *reading],
            "fit": [self.data, "-o", ensemble, *reading, *as_flags(self.fit_options)],
            "generate": [self.prompts, "-o", candidates, *as_flags(self.sampling)],
            "diversity": [ensemble, candidates],
            "report": [ensemble, "-o", str(self.folder / "report.html"), "--candidates", candidates],
        }
        launch = {"fit": () if self.options.encoder else self.hardware.launch}
        commands = {name: [*launch.get(name, ()), "pluralign", name, *words] for name, words in arguments.items()}
        return [Step(name, text, commands[name]) for name, text in does.items()]


def experiments(name: str, folder: Path, options: ReproduceOptions, load: LoadOptions) -> list[Experiment]:
    """Return the experiments that a name stands for.

    Args:
        name: one of the paper's data sets (``NAME:FOLDER`` reads a local copy), ``all`` of them (``all:FOLDER`` for a
            folder with a folder for each), or other votes, as ``load_preferences`` takes them.
        folder: output folder, with a folder for each experiment if there are several.
        options: inputs beside the votes.
        load: how to read the votes.

    Example:
        >>> one, = experiments("tldr", Path("OUT"), ReproduceOptions(), LoadOptions())
        >>> [step.name for step in one.steps]
        ['inspect', 'fit', 'generate', 'diversity', 'report']
    """
    kind, _, copies = name.partition(":")

    def reading(recipe: Recipe) -> LoadOptions:
        own = {} if options.as_published else recipe.load
        return with_changes(load, {name: own[name] for name in own if name not in changed_options(load)})

    if kind in RECIPES:
        recipe = load_recipe(kind)
        return [Experiment(recipe, name, folder, options, reading(recipe))]
    if kind != ALL:
        if name == "-":
            raise UsageError("the votes are read more than once, so standard input cannot be used; name a file.")
        if kind not in ("hf", "demo") and not Path(name).exists() and not Path(name).suffix and "/" not in name:
            known = (*RECIPES, ALL, "a file of votes")
            raise UsageError(f"there is no recipe {name!r}; {did_you_mean(name, known)}.")
        return [Experiment(replace(load_recipe(OWN), title=name), name, folder, options, load)]
    found = []
    for one in RECIPES:
        copy, recipe = Path(copies) / one, load_recipe(one)
        if copies and not copy.is_dir():
            remedy = f"all:FOLDER needs a folder with the folders {', '.join(RECIPES)}; all alone uses the hub"
            raise DataError("there is no such folder", file=str(copy), remedy=remedy)
        keeps_prompts = recipe.generate["prompts"] == "prism"  # others continue held-out prompts of their own
        chosen = options if keeps_prompts else replace(options, prompts=None)
        found.append(Experiment(recipe, f"{one}:{copy}" if copies else one, folder / one, chosen, reading(recipe)))
    return found
