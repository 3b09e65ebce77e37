"""``reproduce``: run one of the paper's experiments, all four, or the same on other votes, from votes to report.

This module runs the steps of an ``Experiment`` in order and collects their results. ``reproduce.json`` in the output
folder holds the results of finished steps, so that the same call resumes after the last one.
"""

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pluralign.answering.generate import Generation, generate
from pluralign.core.arrays import FloatArray
from pluralign.core.checkpoints import changed_inputs
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.files import atomic_write, refuse_foreign
from pluralign.core.json_values import JsonObject, from_json, to_json
from pluralign.core.options import show_options, with_changes
from pluralign.core.processes import launched_process
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import ENSEMBLE_FILE
from pluralign.ensemble.held_out import load_held_out
from pluralign.ensemble.record import HistoryRow
from pluralign.experiments.recipes import RECORD_FILE, Experiment, Recipe, ReproduceOptions, Step, experiments
from pluralign.experiments.rehearsal import one_thread, rehearsal
from pluralign.learning.fit import fit
from pluralign.measuring.diversity import Diversity, measure_diversity, score_candidates
from pluralign.measuring.report_data import ReportOptions, collect_report_data
from pluralign.votes.candidates import Candidates, load_candidates
from pluralign.votes.load import load_preferences
from pluralign.votes.options import LoadOptions
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.summary import Bar, inspect

CLOSE = 0.02
"""A figure matches the paper's if it differs by at most this share of it."""
Announce = Callable[[str], None]
FAVOURITES_FILE = "favourites.jsonl"
FIRST_MEMBERS = 5
"""Number of members whose favourites are written (App. G)."""


@dataclass(frozen=True)
class Figure:
    """One figure of the paper's Table 1, and the same figure of these votes."""

    name: str
    paper: float | None
    """None if the votes are not the paper's."""
    here: float
    close: bool


@dataclass(frozen=True)
class Outcome:
    """The results of one experiment."""

    title: str
    table: list[Figure]
    """The paper's Table 1 and the same figures of these votes."""
    histogram: list[Bar]
    """Pairs by majority share: the paper's histogram of p."""
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


@dataclass(frozen=True)
class Reproduction:
    """The results of one experiment or of all four."""

    folder: str
    tiny: bool
    """Whether this was a rehearsal with a random model on synthetic or few votes; its figures mean nothing."""
    experiments: dict[str, Outcome]
    """By the name of the recipe."""
    figures: list[str]
    """Of all four: files of the paper's histogram of p and Figures 2 and 3 with four panels, as PNG and SVG."""


@show_options(ReproduceOptions)
def reproduce(
    name: str,
    folder: str | os.PathLike[str],
    options: ReproduceOptions | None = None,
    *,
    load: LoadOptions | None = None,
    announce: Announce = lambda _: None,
    progress: Progress | None = None,
    **changes: Any,
) -> Reproduction:
    """Run an experiment: compare the votes with Table 1, fit, sample continuations, rank them, and write a report.

    The same call resumes after the last finished step.

    Args:
        name: ``multipref``, ``personalllm``, ``helpsteer2`` or ``tldr`` (``NAME:FOLDER`` reads a local copy); ``all``
            (``all:FOLDER`` reads a folder with a folder for each); or other votes, as ``load_preferences`` takes them.
        folder: output folder: ``ensemble``, ``candidates.jsonl``, ``favourites.jsonl`` (App. G), ``report.html`` and
            ``reproduce.json``; with ``all``
            a folder with these for each experiment, and the figures of all.
        options: what to train and how; ``changes`` are its fields, by name. ``tiny`` rehearses with a tiny random
            model on few of the votes, or on synthetic ones if the votes would have to be downloaded.
        load: how to read the votes.
        announce: called with the name and command of each step before it runs.
        progress: called with the number of processed texts or prompts, and of all of them.
    """
    options = with_changes(options or ReproduceOptions(), changes)
    folder, todo = Path(folder), experiments(name, Path(folder), options, load or LoadOptions())
    if not (options.tiny or options.backbone or options.encoder):
        raise UsageError(
            f"the members of {todo[0].recipe.title} start from {todo[0].recipe.starts_from}: name one with --backbone, "
            "or frozen features with --encoder; --dry-run shows the commands and --tiny rehearses them."
        )
    for one in todo:
        refuse_foreign(one.folder, RECORD_FILE, "rehearsal", "ensemble")  # the commands may have been run before
    try:  # before hours of training, as it may not be installed
        from pluralign.publishing import report
    except ModuleNotFoundError as missing:
        raise MissingExtraError(missing.name or "matplotlib", "report", "a report") from None
    done = {}
    for one in todo:

        def say(text: str, prefix: str = f"{one.recipe.name}: " if len(todo) > 1 else "") -> None:
            announce(prefix + text)

        with one_thread() if options.tiny else nullcontext():
            done[one.recipe.name] = _run(rehearsal(one) if options.tiny else one, report.page, say, progress)
    drawn: list[Path] = []
    if len(todo) > 1:
        from pluralign.publishing import figures

        records = {done[one.recipe.name].title: RewardEnsemble.load(one.folder / "ensemble").record for one in todo}
        panels = figures.brier_panels(records)
        taus = figures.tau_panels({outcome.title: outcome.tau for outcome in done.values()})
        shares = figures.share_panels({outcome.title: outcome.histogram for outcome in done.values()})
        drawn = figures.save_figures({"histogram": shares, "figure2": panels, "figure3": taus}, folder)
    return Reproduction(str(folder), options.tiny, done, list(map(str, drawn)))


def _run(experiment: Experiment, page: Callable[..., str], announce: Announce, progress: Progress | None) -> Outcome:
    """Run the steps of an experiment that are not finished."""
    recipe, folder, run = experiment.recipe, experiment.folder, _StepRunner(experiment, announce)
    inspecting, fitting, sampling, ranking, writing = experiment.steps
    commands = [step.command for step in experiment.steps]
    votes = cache(lambda: load_preferences(experiment.data, experiment.load, progress=progress))
    candidates = cache(lambda: load_candidates(folder / "candidates.jsonl"))

    def look_at_votes() -> JsonObject:
        return {"table": compare_table(recipe, votes()), "histogram": inspect(votes()).histogram}

    def rank() -> Diversity:
        rewards = score_candidates(ensemble, candidates(), progress)
        with atomic_write(folder / FAVOURITES_FILE) as partial:
            partial.write_text("".join(map(favourites_line, candidates(), rewards)), encoding="utf-8")
        return measure_diversity(ensemble, rewards)

    seen = run(inspecting, look_at_votes)
    run(fitting, lambda: _fit(experiment, votes(), progress), folder / "ensemble" / ENSEMBLE_FILE)
    ensemble = RewardEnsemble.load(folder / "ensemble")
    evaluation, history = ensemble.record.evaluation, ensemble.record.history
    if evaluation is None:
        raise UsageError("the ensemble has no held-out figures: fit with held-out prompts.")
    sampled = run(sampling, lambda: _generate(experiment, progress), folder / "candidates.jsonl")
    diversity = from_json(Diversity, run(ranking, rank, folder / FAVOURITES_FILE))

    def write_report() -> str:
        options = ReportOptions(candidates=candidates(), seed=experiment.options.seed)
        held_out, file = load_held_out(folder / "ensemble"), folder / "report.html"
        data = collect_report_data(ensemble, held_out, options=options, progress=progress)
        with atomic_write(file) as partial:
            partial.write_text(page(ensemble, data, name=recipe.title, commands=commands), encoding="utf-8")
        return str(file)

    floor = evaluation.baselines["floor"].brier
    return Outcome(
        title=recipe.title,
        table=[from_json(Figure, figure) for figure in seen["table"]],
        histogram=[from_json(Bar, bar) for bar in seen["histogram"]],
        history=history,
        floor=floor,
        members_below_floor=min((row.k for row in history if row.test_brier < floor), default=None),
        tau=diversity.tau,
        mean_tau=diversity.mean_off_diagonal,
        weights=ensemble.weights.tolist(),
        candidates=from_json(Generation, sampled),
        report=run(writing, write_report, folder / "report.html"),
        seconds=run.record["seconds"],
        skipped=run.skipped,
        commands=commands,
    )


class _StepRunner:
    """Runs steps, skips those that an earlier run finished, and records their results in ``RECORD_FILE``.

    Raises:
        UsageError: the folder holds the record of a run with other inputs.
    """

    def __init__(self, experiment: Experiment, announce: Announce) -> None:
        self._file, self._announce = experiment.folder / RECORD_FILE, announce
        names = ("recipe", "data", "options", "load")
        inputs = {name: to_json(getattr(experiment, name)) for name in names} | {"version": __version__}
        self.record: JsonObject = {"inputs": inputs, "results": {}, "seconds": {}}
        self.skipped: list[str] = []
        if self._file.is_file():
            try:
                self.record = json.loads(self._file.read_text(encoding="utf-8"))
                changed = changed_inputs(self.record["inputs"], inputs)
            except (ValueError, KeyError, TypeError):
                raise DataError("it cannot be read", file=str(self._file), remedy="use another folder") from None
            if changed:
                folder = self._file.parent
                raise UsageError(f"{folder} holds another run; name a new folder, or repeat that run's options.")

    def __call__(self, step: Step, compute: Callable[[], Any], product: Path | None = None) -> Any:
        """Return the result of a step as JSON; the step runs if its result or its ``product`` is missing."""
        results = self.record["results"]
        if step.name in results and (product is None or product.exists()):
            self.skipped.append(step.name)
            return results[step.name]
        self._announce(f"{step.name}: {shlex.join(step.command)}")
        started = time.perf_counter()
        results[step.name] = to_json({"result": compute()})["result"]
        self.record["seconds"][step.name] = time.perf_counter() - started
        with atomic_write(self._file) as unfinished:
            unfinished.write_text(json.dumps(self.record, indent=1, ensure_ascii=False, allow_nan=False), "utf-8")
        return results[step.name]


# --- the steps --------------------------------------------------------------------------------------------------------


def compare_table(recipe: Recipe, votes: PreferenceSet) -> list[Figure]:
    """Return the figures of Table 1 for these votes, beside the paper's if it has a row for them."""
    (train, test), summary, paper = votes.split(), inspect(votes), recipe.paper
    counts = {"training pairs": len(train), "pairs": len(votes), "responses": len(votes.items().prompt_index)}
    counted = paper.pairs_are if paper else "training pairs"
    here = {
        counted: counts[counted],
        "training prompts": len(train.prompts),
        "test prompts": len(test.prompts),
        "annotators per pair": float((votes.votes_a + votes.votes_b + votes.ties).mean()),
        "majority share": summary.majority_share_of_all if paper and paper.ties_in_share else summary.majority_share,
    }
    if paper is None:
        return [Figure(name, None, value, False) for name, value in here.items()]
    printed = (paper.pairs, paper.train_prompts, paper.test_prompts, paper.annotators, paper.majority_share)
    return [
        Figure(name, theirs, value, abs(value - theirs) <= CLOSE * theirs)
        for (name, value), theirs in zip(here.items(), printed, strict=True)
    ]


def favourites_line(of_prompt: Candidates, rewards: FloatArray) -> str:
    """Return a prompt with the top-ranked continuation of each of the first members, in order of training (App. G)."""
    best = [of_prompt.responses[i] for i in rewards[:, :FIRST_MEMBERS].argmax(axis=0)]
    return json.dumps({"prompt": of_prompt.prompt_text, "favourites": best}, ensure_ascii=False) + "\n"


def _fit(experiment: Experiment, votes: PreferenceSet, progress: Progress | None) -> dict[str, Any]:
    """Fit the ensemble, unless one that was fitted to these votes with these options is in the folder.

    So the ``fit`` command can be run separately, on several GPUs with ``accelerate launch``.
    """
    folder, options = experiment.folder / "ensemble", experiment.fit_options
    if (folder / ENSEMBLE_FILE).is_file():
        record = RewardEnsemble.load(folder).record
        used: Mapping[str, Any] = {**record.options, **(record.tuning or {})}
        same_options = all(used.get(name) == value for name, value in options.items())
        if same_options and record.data is not None and record.data.fingerprint == votes.fingerprint:
            return {"folder": str(folder)}
    elif experiment.options.backbone and experiment.hardware.launch and launched_process().count == 1:
        command = shlex.join(experiment.steps[1].command)
        raise UsageError(f"{experiment.options.hardware} trains in several processes: first run  {command}")
    fit(votes, folder=folder, progress=progress, **options)
    return {"folder": str(folder)}


def _generate(experiment: Experiment, progress: Progress | None) -> Generation:
    output = experiment.folder / "candidates.jsonl"
    generation = generate(experiment.prompts, output, progress=progress, **experiment.sampling)
    if not generation.lines:
        problem = "no prompt got a response"
        raise DataError(problem, file=experiment.sampling["model"], remedy=f"see {output}.failed")
    return generation
