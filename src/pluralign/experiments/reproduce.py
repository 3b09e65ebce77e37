"""``reproduce``: the paper's experiments as recipes, one for each of its four data sets.

Decided here: the steps of a recipe, their order, what each leaves in the output folder, and what they are reckoned to
cost. What a recipe says is in ``recipes/*.toml``; the arithmetic of costs is in ``costs``. Every step is a public
function that has a command of its own, and a finished step is not done again.
"""

import json
import math
import os
import shlex
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from pluralign.analysis.member_rankings import measure_diversity
from pluralign.analysis.report_data import collect_report_data
from pluralign.answering.generate import generate
from pluralign.core.errors import DataError, MissingExtraError, UsageError, did_you_mean
from pluralign.core.files import atomic_write
from pluralign.core.json_values import without_nan
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import ENSEMBLE_FILE, RewardEnsemble
from pluralign.ensemble.held_out import load_held_out
from pluralign.experiments import costs
from pluralign.experiments.rehearsal import one_thread, write_prism, write_sample, write_tiny_model
from pluralign.fitting.fit import fit
from pluralign.models.causal import SAMPLES_AT_ONCE
from pluralign.votes.candidates import load_candidates
from pluralign.votes.load import load_preferences
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.summary import inspect

RECIPES = ("multipref", "personalllm", "helpsteer2", "tldr")
STATE_FILE = "reproduce.json"
CLOSE = 0.02
"""A figure within this share of the paper's counts as the same."""
LORA_RANK = 16

Say: TypeAlias = Callable[[str], None]


# --- recipes --------------------------------------------------------------------------------------------------------


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


# --- what it costs --------------------------------------------------------------------------------------------------


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


# --- the plan -------------------------------------------------------------------------------------------------------


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


# --- running it -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One figure of the paper's table beside the one found here."""

    name: str
    paper: float
    here: float
    close: bool


@dataclass(frozen=True)
class Reproduction:
    """What a recipe came to."""

    name: str
    folder: str
    tiny: bool
    """Whether votes and model are made up; then no figure means anything."""
    table: list[Figure]
    """The paper's Table 1 beside the votes found."""
    history: list[dict[str, Any]]
    """Train and held-out Brier by k: Figure 2."""
    floor: float
    """Held-out Brier of the best single reward, the line of Figure 2."""
    members_below_floor: int | None
    """The fewest members whose held-out Brier is below the floor; None where no number is."""
    tau: list[list[float]]
    """Kendall's tau between members: Figure 3."""
    mean_tau: float
    weights: list[float]
    candidates: dict[str, Any]
    report: str
    seconds: dict[str, float]
    """Of each step, in the run that did it."""
    skipped: list[str]
    """Steps that an earlier run had finished."""
    commands: list[list[str]]


def reproduce(
    name: str,
    folder: str | os.PathLike[str],
    *,
    data: str = "",
    backbone: str = "",
    encoder: str = "",
    model: str = "",
    prompts: str = "",
    lora: bool = False,
    tiny: bool = False,
    seed: int = 0,
    say: Say = lambda _: None,
    progress: Progress | None = None,
) -> Reproduction:
    """Run a recipe: votes beside the paper's table, members, continuations, their rankings, a report.

    The same call goes on after the last finished step. Arguments are those of ``plan``, and

    Args:
        name: of the recipe.
        folder: keeps everything: ``ensemble``, ``candidates.jsonl``, ``report.html`` and the figures.
        data: see ``plan``; so are the other arguments up to ``lora``.
        backbone: the checkpoint that members start from.
        encoder: frozen features instead.
        model: what writes the continuations.
        prompts: what it continues.
        lora: train adapters instead of all weights.
        tiny: rehearse the recipe with made-up votes and a tiny model, which are written into the folder.
        seed: of everything random.
        say: called with what is done next.
        progress: called with texts read or prompts answered, and all of them.
    """
    recipe, folder = load_recipe(name), Path(folder)
    if tiny:
        if data or backbone or encoder or model or prompts:
            raise UsageError("--tiny writes its own votes, prompts and model: leave the others out.")
        recipe = shrunk(recipe)
        data, backbone, prompts = _write_rehearsal(recipe, folder / "rehearsal", seed)
    elif not backbone and not encoder:
        raise UsageError(
            f"the members of {recipe.title} start from {recipe.starts_from}: name one with --backbone, or frozen "
            "features with --encoder; --dry-run shows what it costs and --tiny rehearses it."
        )
    inputs = _inputs(
        recipe, data=data, backbone=backbone, encoder=encoder, model=model, prompts=prompts, lora=lora, seed=seed
    )
    with one_thread() if tiny else nullcontext():
        return _follow(recipe, inputs, folder, tiny, say, progress)


def _follow(
    recipe: Recipe, inputs: Inputs, folder: Path, tiny: bool, say: Say, progress: Progress | None
) -> Reproduction:
    """Do the steps of a recipe that are not done yet."""
    steps = _steps(recipe, inputs, folder)
    run = _Run(folder, {"recipe": recipe, "inputs": inputs, "version": __version__}, say)

    votes = _Once(lambda: load_preferences(inputs.data, progress=progress))
    ensemble_folder, candidates_file = folder / "ensemble", folder / "candidates.jsonl"
    by_name = {step.name: step for step in steps}

    table = run(by_name["inspect"], lambda: [asdict(figure) for figure in compare_table(recipe, votes())])
    facts = run(
        by_name["fit"],
        lambda: _fit_facts(_fitted(votes(), ensemble_folder, _fit_options(recipe, inputs), progress)),
        ensemble_folder / ENSEMBLE_FILE,
    )
    ensemble = _Once(lambda: RewardEnsemble.load(ensemble_folder))
    sampled = run(
        by_name["generate"],
        lambda: _generated(recipe, inputs, ensemble_folder, candidates_file, progress),
        candidates_file,
    )
    lists = _Once(lambda: load_candidates(candidates_file))
    diversity = run(by_name["diversity"], lambda: asdict(measure_diversity(ensemble(), lists(), progress=progress)))
    commands = [step.command for step in steps]
    report = folder / "report.html"

    def write_report() -> dict[str, Any]:
        try:
            from pluralign.publishing import report as reporting
        except ModuleNotFoundError as missing:
            raise MissingExtraError(missing.name or "matplotlib", "report", "a report") from None
        found = collect_report_data(
            ensemble(), load_held_out(ensemble_folder), candidates=lists(), seed=inputs.seed, progress=progress
        )
        title = f"{recipe.title}{', a rehearsal on made-up votes' if tiny else ''}"
        return {"report": str(reporting.report(ensemble(), found, report, name=title, commands=commands))}

    run(by_name["report"], write_report, report)
    below = [stage["k"] for stage in facts["history"] if stage["test_brier"] < facts["floor"]]
    return Reproduction(
        name=recipe.name,
        folder=str(folder),
        tiny=tiny,
        table=[Figure(**figure) for figure in table],
        history=facts["history"],
        floor=facts["floor"],
        members_below_floor=min(below, default=None),
        tau=diversity["tau"],
        mean_tau=diversity["mean_off_diagonal"],
        weights=facts["weights"],
        candidates=sampled,
        report=str(report),
        seconds=run.seconds,
        skipped=run.skipped,
        commands=commands,
    )


def compare_table(recipe: Recipe, votes: PreferenceSet) -> list[Figure]:
    """Put a set of votes beside the paper's row about it."""
    train, test = votes.split()
    facts, paper = inspect(votes), recipe.paper
    counted = {"train": len(train), "all": len(votes), "responses": len(votes.items().prompt_index)}[paper.pairs_are]
    everyone = float((votes.votes_a + votes.votes_b + votes.ties).mean())
    share = facts.majority_share_of_all if paper.ties_in_share else facts.majority_share
    rows = {
        {"train": "training pairs", "all": "pairs", "responses": "responses"}[paper.pairs_are]: (paper.pairs, counted),
        "training prompts": (paper.train_prompts, len(train.prompts)),
        "test prompts": (paper.test_prompts, len(test.prompts)),
        "annotators a pair": (paper.annotators, everyone),
        "majority share": (paper.majority_share, share),
    }
    return [Figure(name, said, here, abs(here - said) <= CLOSE * said) for name, (said, here) in rows.items()]


def shrunk(recipe: Recipe) -> Recipe:
    """Return a recipe that takes seconds: the same steps with few members, prompts and tokens."""
    return replace(
        recipe,
        fit={**recipe.fit, "k": 2},
        tune={**recipe.tune, "batch_size": 16, "max_length": 256, "learning_rate": 1e-3},
        candidates={**recipe.candidates, "limit": 4, "n": 5, "max_new_tokens": 12},
    )


def _write_rehearsal(recipe: Recipe, folder: Path, seed: int) -> tuple[str, str, str]:
    """Write made-up votes, prompts and a model; return how each is named."""
    votes, prism, model = folder / "votes", folder / "prism", folder / "model"
    write_sample(recipe.name, votes, seed=seed)
    write_prism(prism, seed=seed)
    data = f"{recipe.name}:{votes}"
    if not (model / "tokenizer.json").is_file():
        preferences = load_preferences(data)
        texts = [*preferences.responses, *map(str, preferences.prompts)]
        write_tiny_model(model, texts, seed=seed)
    prompts = "" if recipe.candidates["prompts"] == "held-out" else f"prism:{prism}"
    return data, str(model), prompts


def _fitted(
    votes: PreferenceSet, folder: Path, options: Mapping[str, Any], progress: Progress | None
) -> RewardEnsemble:
    """Return the ensemble of a folder where ``pluralign fit`` put the one that is wanted, else fit it.

    So the plan's own fit command can be run apart, on several GPUs with ``accelerate launch``.
    """
    if (folder / ENSEMBLE_FILE).is_file():
        ensemble = RewardEnsemble.load(folder)
        facts = ensemble.facts
        used = {**facts.get("options", {}), **facts.get("tuning", {})}
        same_options = all(used.get(name) == value for name, value in options.items())
        if same_options and facts["data"]["fingerprint"] == votes.fingerprint:
            return ensemble
    return fit(votes, folder=folder, progress=progress, **options)


def _fit_facts(ensemble: RewardEnsemble) -> dict[str, Any]:
    facts = ensemble.facts
    return {
        "history": facts["history"],
        "floor": facts["baselines"]["floor"]["brier"],
        "weights": ensemble.weights.tolist(),
    }


def _generated(
    recipe: Recipe, inputs: Inputs, ensemble: Path, output: Path, progress: Progress | None
) -> dict[str, Any]:
    prompts = str(ensemble) if inputs.prompts == "held-out" else inputs.prompts
    done = generate(prompts, output, progress=progress, **_sampling(recipe, inputs))
    if not done.lines:
        raise DataError("no prompt could be answered", file=inputs.model, remedy=f"see {output}.failed")
    return asdict(done)


class _Once:
    """A value computed when it is first asked for."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute, self._value = compute, None

    def __call__(self) -> Any:
        if self._value is None:
            self._value = self._compute()
        return self._value


class _Run:
    """Steps whose results are kept in the output folder, so that the same run goes on where it stopped."""

    def __init__(self, folder: Path, inputs: Mapping[str, Any], say: Say) -> None:
        self._path, self._say = folder / STATE_FILE, say
        self.skipped: list[str] = []
        told = json.loads(json.dumps({name: _plain(value) for name, value in inputs.items()}))
        self._state: dict[str, Any] = {"inputs": told, "results": {}, "seconds": {}}
        if self._path.is_file():
            try:
                kept = json.loads(self._path.read_text(encoding="utf-8"))
                same = kept["inputs"] == told
            except (ValueError, KeyError, TypeError):
                raise DataError("it cannot be read", file=str(self._path), remedy="use another folder") from None
            if not same:
                raise UsageError(f"{folder} holds another run; name a new folder, or repeat that run's options.")
            self._state = kept

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self._state["seconds"])

    def __call__(self, step: Step, work: Callable[[], Any], makes: Path | None = None) -> Any:
        results = self._state["results"]
        if step.name in results and (makes is None or makes.exists()):
            self.skipped.append(step.name)
            return results[step.name]
        self._say(f"{step.name}: {shlex.join(step.command)}")
        started = time.perf_counter()
        results[step.name] = without_nan(_plain(work()))
        self._state["seconds"][step.name] = time.perf_counter() - started
        with atomic_write(self._path) as partial:
            partial.write_text(json.dumps(self._state, indent=1, ensure_ascii=False, allow_nan=False), encoding="utf-8")
        return results[step.name]


def _plain(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
