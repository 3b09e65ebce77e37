"""``reproduce all``: the paper's four experiments one after the other, and its figures with four panels."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pluralign.core.errors import DataError, MissingExtraError
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.experiments.plan import Plan, plan
from pluralign.experiments.recipe import RECIPES, load_recipe
from pluralign.experiments.reproduce import Reproduction, reproduce

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
