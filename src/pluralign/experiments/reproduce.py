"""``reproduce``: run one of the paper's experiments, or the same on other votes, from votes to report.

This module runs the steps of ``plan`` in order and collects their results. The result of each finished step is stored
in the output folder, so that the same call resumes after the last finished step.
"""

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from pluralign.answering.generate import Generation, generate
from pluralign.core.checkpoints import Checkpoints, changed_inputs
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.files import atomic_folder, atomic_write
from pluralign.core.json_values import from_json, to_json
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import ENSEMBLE_FILE
from pluralign.ensemble.held_out import load_held_out
from pluralign.ensemble.record import HistoryRow
from pluralign.experiments.plan import (
    RECORD_FILE,
    Inputs,
    Plan,
    Step,
    check_inputs,
    find_recipe,
    fit_command,
    fit_options,
    plan,
    recipe_steps,
    sampling_options,
)
from pluralign.experiments.recipes import OWN, RECIPES, Recipe, load_recipe, shrink
from pluralign.experiments.rehearsal import one_thread, write_prism, write_sample, write_tiny_model
from pluralign.learning.fit import fit
from pluralign.learning.routes import Choice, Devices, Route, check_launch, choose_route, visible_devices, weights_of
from pluralign.measuring.diversity import Diversity, measure_diversity, score_candidates
from pluralign.measuring.report_data import ReportOptions, collect_report_data
from pluralign.votes.candidates import load_candidates
from pluralign.votes.load import load_preferences
from pluralign.votes.options import LoadOptions
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.summary import inspect

CLOSE = 0.02
"""A figure matches the paper's if it differs by at most this share of it."""
REHEARSED_PROMPTS, REHEARSED_PAIRS = 48, 200
"""Maximum number of prompts and pairs of other votes that a rehearsal takes."""


@dataclass(frozen=True)
class Figure:
    """One figure of the paper's Table 1, and the same figure of these votes."""

    name: str
    paper: float | None
    """None if the votes are not the paper's."""
    here: float
    close: bool


@dataclass(frozen=True)
class FitResult:
    """The results of the ``fit`` step."""

    history: list[HistoryRow]
    floor: float
    weights: list[float]


@dataclass(frozen=True)
class Reproduction:
    """The results of a recipe."""

    name: str
    folder: str
    tiny: bool
    """Whether this was a rehearsal with a random model on synthetic or few votes; its figures mean nothing."""
    table: list[Figure]
    """The paper's Table 1 and the same figures of these votes."""
    history: list[HistoryRow]
    """Training and held-out Brier score by k: Figure 2."""
    floor: float
    """Held-out Brier score of the best single reward, the line in Figure 2."""
    members_below_floor: int | None
    """Smallest k with a held-out Brier score below the floor; None if there is none."""
    tau: list[list[float]]
    """Kendall's tau between members: Figure 3."""
    mean_tau: float
    weights: list[float]
    candidates: Generation
    report: str
    seconds: dict[str, float]
    """Duration of each step, in the run that finished it."""
    skipped: list[str]
    """Steps that an earlier run finished."""
    commands: list[list[str]]
    training: Choice | None = None
    """How the members were trained, and why; None with frozen features."""


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
    optimizer: str = "",
    precision: str = "",
    load: LoadOptions | None = None,
    tiny: bool = False,
    seed: int = 0,
    devices: Devices | None = None,
    announce: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> Reproduction:
    """Run a recipe: compare the votes with Table 1, fit, sample continuations, rank them, and write a report.

    The same call resumes after the last finished step.

    Args:
        name: name of the recipe, or other votes, as ``load_preferences`` takes them.
        folder: output folder: ``ensemble``, ``candidates.jsonl``, ``report.html`` and ``reproduce.json``.
        data: see ``plan``, also for the arguments up to ``precision``.
        backbone: checkpoint that members start from.
        encoder: encoder of frozen features, instead of a backbone.
        model: model that writes the continuations.
        prompts: prompts of the continuations.
        lora: train adapters instead of all weights.
        optimizer: of the training.
        precision: of the training.
        load: how to read the votes.
        tiny: rehearse the recipe with a tiny random model on synthetic votes in the layout of the data set, or on few
            of the votes if they are not the paper's. Votes and model are written into the folder.
        seed: random seed.
        devices: to train on (default: those that torch sees).
        announce: called with the way to train, and with the name and command of each step before it runs.
        progress: called with the number of processed texts or prompts, and of all of them.
    """
    folder = Path(folder)
    recipe, data = find_recipe(name, data, load, seed)
    if tiny:
        own = recipe.name == OWN
        if (data and not own) or backbone or encoder or model or prompts:
            raise UsageError("--tiny creates its own votes, prompts and model: remove the other options.")
        recipe = shrink(recipe)
        if own:
            data, backbone = _write_own_rehearsal(data, load, folder / "rehearsal", seed)
            load = None  # the sample is as it was read
        else:
            data, backbone, prompts = _write_rehearsal(recipe, folder / "rehearsal", seed)
    elif not backbone and not encoder:
        raise UsageError(
            f"the members of {recipe.title} start from {recipe.starts_from}: name one with --backbone, or frozen "
            "features with --encoder; --dry-run shows the cost and --tiny rehearses the recipe."
        )
    inputs = check_inputs(
        recipe, data=data, backbone=backbone, encoder=encoder, model=model, prompts=prompts, lora=lora,
        optimizer=optimizer, precision=precision, load=load, seed=seed,
    )  # fmt: skip
    training = choose_training(recipe, inputs, folder, devices) if inputs.backbone else None
    with one_thread() if tiny else nullcontext():
        return _run(recipe, inputs, training, folder, tiny, announce, progress)


def choose_training(recipe: Recipe, inputs: Inputs, folder: Path, devices: Devices | None = None) -> Choice:
    """Return how to train the members of a recipe: as named, as an earlier fit in the folder did, or as fits.

    Raises:
        UsageError: it needs several processes.
    """
    first, ensemble = inputs.route(recipe), folder / "ensemble"
    started = None if inputs.names_route else _started_route(ensemble, inputs.backbone)
    if started and (ensemble / ENSEMBLE_FILE).is_file():
        return Choice(started, None, True, started != first, f"the members in {ensemble} were trained with {started}")
    weights, route = weights_of(inputs.backbone), started or first
    if weights is None:  # fit says why
        return Choice(route, None, True, route != first, f"{route}; its memory cannot be estimated")
    named = inputs.names_route or started is not None
    choice = choose_route(weights, devices or visible_devices(), route, named=named)
    check_launch(choice, shlex.join(fit_command(recipe, inputs, folder, choice.route)))
    return choice


def _started_route(ensemble: Path, backbone: str) -> Route | None:
    """Return how the members in a folder were trained, or how an unfinished fit in it trains them; else None."""
    if (ensemble / ENSEMBLE_FILE).is_file():
        record = RewardEnsemble.load(ensemble).record
        runs: list[dict[str, Any]] = [{"options": record.options, "tuning": record.tuning or {}}]
    else:
        runs = Checkpoints(ensemble, {}).other_runs()
    for fitted in runs:
        used = {**fitted.get("options", {}), **fitted.get("tuning", {})}
        if used.get("backbone") == backbone:
            return Route(used["optimizer"], used["precision"], used["lora"])
    return None


def _run(
    recipe: Recipe,
    inputs: Inputs,
    training: Choice | None,
    folder: Path,
    tiny: bool,
    announce: Callable[[str], None],
    progress: Progress | None,
) -> Reproduction:
    """Run the steps of a recipe that are not finished."""
    route = training.route if training else inputs.route(recipe)
    steps = {step.name: step for step in recipe_steps(recipe, inputs, folder, route)}
    run = _StepRunner(folder, {"recipe": to_json(recipe), "inputs": to_json(inputs), "version": __version__}, announce)
    commands = [step.command for step in steps.values()]
    ensemble_folder, candidates_file, page = folder / "ensemble", folder / "candidates.jsonl", folder / "report.html"
    votes = cache(lambda: load_preferences(inputs.data, inputs.load, progress=progress))
    ensemble = cache(lambda: RewardEnsemble.load(ensemble_folder))
    candidates = cache(lambda: load_candidates(candidates_file))

    def write_report() -> dict[str, str]:
        try:
            from pluralign.publishing import report as reporting
        except ModuleNotFoundError as missing:
            raise MissingExtraError(missing.name or "matplotlib", "report", "a report") from None
        data = collect_report_data(
            ensemble(),
            load_held_out(ensemble_folder),
            options=ReportOptions(candidates(), seed=inputs.seed),
            progress=progress,
        )
        rehearsed = ", a rehearsal on synthetic votes" if recipe.paper else ", a rehearsal with a tiny model"
        title = f"{recipe.title}{rehearsed if tiny else ''}"
        return {"report": str(reporting.report(ensemble(), data, page, name=title, commands=commands))}

    if training and not (training.fits and tiny):
        announce(f"training: {training.reason}")
    table = run(steps["inspect"], lambda: compare_table(recipe, votes()))
    options = fit_options(recipe, inputs, route)
    fitted = from_json(
        FitResult,
        run(
            steps["fit"],
            lambda: _fit_result(_fitted(votes(), ensemble_folder, options, progress)),
            ensemble_folder / ENSEMBLE_FILE,
        ),
    )
    sampled = run(
        steps["generate"],
        lambda: _generated(recipe, inputs, ensemble_folder, candidates_file, progress),
        candidates_file,
    )

    def measure_rankings() -> Diversity:
        return measure_diversity(ensemble(), score_candidates(ensemble(), candidates(), progress))

    diversity = from_json(Diversity, run(steps["diversity"], measure_rankings))
    run(steps["report"], write_report, page)
    run.write_record()
    return Reproduction(
        name=recipe.name,
        folder=str(folder),
        tiny=tiny,
        table=[from_json(Figure, figure) for figure in table],
        history=fitted.history,
        floor=fitted.floor,
        members_below_floor=min((row.k for row in fitted.history if row.test_brier < fitted.floor), default=None),
        tau=diversity.tau,
        mean_tau=diversity.mean_off_diagonal,
        weights=fitted.weights,
        candidates=from_json(Generation, sampled),
        report=str(page),
        seconds=run.seconds,
        skipped=run.skipped,
        commands=commands,
        training=training,
    )


class _StepRunner:
    """Runs steps, skips those that an earlier run finished, and records their results as JSON.

    Checkpoints hold the results of finished steps. ``RECORD_FILE`` has the inputs, results and durations of all steps,
    for people; a folder whose record or checkpoints belong to other inputs is refused.
    """

    def __init__(self, folder: Path, inputs: Mapping[str, Any], announce: Callable[[str], None]) -> None:
        self._inputs, self._record, self._announce = inputs, folder / RECORD_FILE, announce
        self._checkpoints = Checkpoints(folder, inputs)
        self._finished: dict[str, dict[str, Any]] = {}
        self.skipped: list[str] = []
        if self._checkpoints.other_runs() or changed_inputs(self._recorded_inputs(), inputs):
            raise UsageError(f"{folder} holds another run; name a new folder, or repeat that run's options.")

    @property
    def seconds(self) -> dict[str, float]:
        """Duration of each finished step."""
        return {name: finished["seconds"] for name, finished in self._finished.items()}

    def __call__(self, step: Step, compute: Callable[[], Any], product: Path | None = None) -> Any:
        """Return the result of a step as JSON; the step runs if its result or its ``product`` is missing."""
        if product is not None and not product.exists():
            self._checkpoints.forget(step.name)
        if self._checkpoints.has(step.name):
            self.skipped.append(step.name)

        def timed() -> dict[str, Any]:
            self._announce(f"{step.name}: {shlex.join(step.command)}")
            started = time.perf_counter()
            result = to_json(compute())
            return {"result": result, "seconds": time.perf_counter() - started}

        self._finished[step.name] = self._checkpoints.value(step.name, timed)
        return self._finished[step.name]["result"]

    def write_record(self) -> None:
        """Write ``RECORD_FILE``."""
        results = {name: finished["result"] for name, finished in self._finished.items()}
        record = {"inputs": self._inputs, "results": results, "seconds": self.seconds}
        with atomic_write(self._record) as unfinished:
            unfinished.write_text(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False), encoding="utf-8")

    def _recorded_inputs(self) -> Mapping[str, Any]:
        """Return the inputs in the record of an earlier run, or this run's if there is no record."""
        if not self._record.is_file():
            return self._inputs
        try:
            return dict(json.loads(self._record.read_text(encoding="utf-8"))["inputs"])
        except (ValueError, KeyError, TypeError):
            raise DataError("it cannot be read", file=str(self._record), remedy="use another folder") from None


# --- the steps --------------------------------------------------------------------------------------------------------


def compare_table(recipe: Recipe, votes: PreferenceSet) -> list[Figure]:
    """Return the figures of Table 1 for these votes, beside the paper's if it has a row for them."""
    train, test = votes.split()
    summary, paper = inspect(votes), recipe.paper
    annotators = float((votes.votes_a + votes.votes_b + votes.ties).mean())
    if paper is None:
        found = {
            "training pairs": len(train),
            "training prompts": len(train.prompts),
            "test prompts": len(test.prompts),
            "annotators per pair": annotators,
            "majority share": summary.majority_share,
        }
        return [Figure(name, None, here, False) for name, here in found.items()]
    pairs = {"train": len(train), "all": len(votes), "responses": len(votes.items().prompt_index)}[paper.pairs_are]
    share = summary.majority_share_of_all if paper.ties_in_share else summary.majority_share
    rows = {
        {"train": "training pairs", "all": "pairs", "responses": "responses"}[paper.pairs_are]: (paper.pairs, pairs),
        "training prompts": (paper.train_prompts, len(train.prompts)),
        "test prompts": (paper.test_prompts, len(test.prompts)),
        "annotators per pair": (paper.annotators, annotators),
        "majority share": (paper.majority_share, share),
    }
    return [
        Figure(name, in_paper, here, abs(here - in_paper) <= CLOSE * in_paper)
        for name, (in_paper, here) in rows.items()
    ]


def _fitted(
    votes: PreferenceSet, folder: Path, options: Mapping[str, Any], progress: Progress | None
) -> RewardEnsemble:
    """Return the ensemble in a folder if it was fitted to these votes with these options, else fit it.

    So the ``fit`` command of the plan can be run separately, on several GPUs with ``accelerate launch``.
    """
    if (folder / ENSEMBLE_FILE).is_file():
        ensemble = RewardEnsemble.load(folder)
        record = ensemble.record
        used = {**record.options, **(record.tuning or {})}
        same_options = all(used.get(name) == value for name, value in options.items())
        if same_options and record.data is not None and record.data.fingerprint == votes.fingerprint:
            return ensemble
    return fit(votes, folder=folder, overwrite=True, progress=progress, **options)


def _fit_result(ensemble: RewardEnsemble) -> FitResult:
    record = ensemble.record
    if record.evaluation is None:
        raise UsageError("the ensemble has no held-out figures: fit with held-out prompts.")
    return FitResult(record.history, record.evaluation.baselines["floor"].brier, ensemble.weights.tolist())


def _generated(recipe: Recipe, inputs: Inputs, ensemble: Path, output: Path, progress: Progress | None) -> Generation:
    prompts = str(ensemble) if inputs.prompts == "held-out" else inputs.prompts
    generation = generate(prompts, output, progress=progress, **sampling_options(recipe, inputs))
    if not generation.lines:
        raise DataError("no prompt got a response", file=inputs.model, remedy=f"see {output}.failed")
    return generation


def _write_own_rehearsal(data: str, load: LoadOptions | None, folder: Path, seed: int) -> tuple[str, str]:
    """Write the pairs of the first prompts, and a model; return their names as options."""
    votes = load_preferences(data, load)
    sample = votes[votes.prompt_index < REHEARSED_PROMPTS][:REHEARSED_PAIRS]
    path, model = folder / "votes.parquet", folder / "model"
    sample.save(path)
    if not (model / "tokenizer.json").is_file():
        write_tiny_model(model, [*sample.responses, *map(str, sample.prompts)], seed=seed)
    return str(path), str(model)


def _write_rehearsal(recipe: Recipe, folder: Path, seed: int) -> tuple[str, str, str]:
    """Write synthetic votes, prompts and a model; return their names as options."""
    votes, prism, model = folder / "votes", folder / "prism", folder / "model"
    # A run with another seed must not change the votes of a finished one: it is rejected later.
    for place, write in ((votes, partial(write_sample, recipe.name)), (prism, write_prism)):
        if not place.is_dir():
            with atomic_folder(place) as unfinished:
                write(unfinished, seed=seed)
    data = f"{recipe.name}:{votes}"
    if not (model / "tokenizer.json").is_file():
        preferences = load_preferences(data)
        texts = [*preferences.responses, *map(str, preferences.prompts)]
        write_tiny_model(model, texts, seed=seed)
    prompts = "" if recipe.candidates.prompts == "held-out" else f"prism:{prism}"
    return data, str(model), prompts


# --- ``reproduce all``: the paper's four experiments one after the other, and its figures with four panels.


ALL = "all"
"""Name of the four experiments together."""


@dataclass(frozen=True)
class Plans:
    """The plans of the four experiments."""

    plans: dict[str, Plan]
    gpu_hours: float
    """Estimated for all of them, on one H100."""


@dataclass(frozen=True)
class Reproductions:
    """The results of the four experiments."""

    folder: str
    tiny: bool
    experiments: dict[str, Reproduction]
    figures: list[str]
    """Files of the paper's Figures 2 and 3 for all four sets, as PNG and SVG."""


def plan_all(folder: str | os.PathLike[str] = "OUT", *, data: str = "", prompts: str = "", **options: Any) -> Plans:
    """Return the plans of the four experiments; see ``reproduce_all`` for the arguments."""
    inputs = _inputs(data, prompts)
    plans = {name: plan(name, Path(folder) / name, **inputs[name], **options) for name in RECIPES}
    return Plans(plans, sum(one.cost.gpu_hours for one in plans.values()))


def reproduce_all(
    folder: str | os.PathLike[str],
    *,
    data: str = "",
    prompts: str = "",
    announce: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
    **options: Any,
) -> Reproductions:
    """Run the four experiments one after the other, and draw the paper's Figures 2 and 3. The same call resumes.

    Args:
        folder: output folder, with a folder for each experiment and the files of the figures.
        data: folder with a local copy of each data set: FOLDER/multipref and so on (default: from the hub).
        prompts: prompts of the continuations, except for TL;DR, which uses held-out posts.
        announce: called with the name of the experiment and what ``reproduce`` announces.
        progress: see ``reproduce``.
        **options: all other arguments of ``reproduce``.
    """
    try:
        from pluralign.publishing import figures
    except ModuleNotFoundError as missing:  # before hours of training
        raise MissingExtraError(missing.name or "matplotlib", "report", "the figures") from None
    folder, inputs, done = Path(folder), _inputs(data, prompts), {}
    for name in RECIPES:

        def say(text: str, name: str = name) -> None:
            announce(f"{name}: {text}")

        done[name] = reproduce(name, folder / name, **inputs[name], **options, announce=say, progress=progress)
    titles = {name: load_recipe(name).title + (" (rehearsal)" if done[name].tiny else "") for name in RECIPES}
    records = {titles[name]: RewardEnsemble.load(folder / name / "ensemble").record for name in RECIPES}
    taus = {titles[name]: done[name].tau for name in RECIPES}
    drawings = {"figure2": figures.brier_panels(records), "figure3": figures.tau_panels(taus)}
    paths = figures.save_figures(drawings, folder)
    return Reproductions(str(folder), any(one.tiny for one in done.values()), done, list(map(str, paths)))


def _inputs(data: str, prompts: str) -> dict[str, Mapping[str, Any]]:
    """Return the votes and the prompts of each experiment."""
    inputs: dict[str, Mapping[str, Any]] = {}
    for name in RECIPES:
        copy = Path(data) / name
        if data and not copy.is_dir():
            names = ", ".join(RECIPES)
            remedy = f"--data of reproduce all needs a folder with the folders {names}, or leave it out for the hub"
            raise DataError("there is no such folder", file=str(copy), remedy=remedy)
        asks = load_recipe(name).candidates.prompts == "prism"
        inputs[name] = {"data": f"{name}:{copy}" if data else "", "prompts": prompts if asks else ""}
    return inputs
