"""``reproduce``: the paper's experiments as recipes, one for each of its four data sets.

Decided here: the steps of a recipe, their order, what each leaves in the output folder, and what they are reckoned to
cost. What a recipe says is in ``recipes/*.toml``; the arithmetic of costs is in ``costs``. Every step is a public
function that has a command of its own, and a finished step is not done again.
"""

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pluralign.analysis.member_rankings import measure_diversity
from pluralign.analysis.report_data import collect_report_data
from pluralign.answering.generate import generate
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.files import atomic_write
from pluralign.core.json_values import without_nan
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import ENSEMBLE_FILE, RewardEnsemble
from pluralign.ensemble.held_out import load_held_out
from pluralign.experiments.plan import STATE_FILE, Inputs, Step, _fit_options, _inputs, _sampling, _steps
from pluralign.experiments.recipe import Recipe, load_recipe, shrunk
from pluralign.experiments.rehearsal import one_thread, write_prism, write_sample, write_tiny_model
from pluralign.fitting.fit import fit
from pluralign.votes.candidates import load_candidates
from pluralign.votes.load import load_preferences
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.summary import inspect

CLOSE = 0.02
"""A figure within this share of the paper's counts as the same."""

Say: TypeAlias = Callable[[str], None]


# --- recipes --------------------------------------------------------------------------------------------------------


# --- what it costs --------------------------------------------------------------------------------------------------


# --- the plan -------------------------------------------------------------------------------------------------------


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
