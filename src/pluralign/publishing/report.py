"""The report: one self-contained HTML page with the paper's figures for one ensemble.

This module decides the texts of the page and their order. The page starts with the insight; everything else is folded.
Nothing is measured here. The template escapes all texts from data and models; the page loads
nothing and runs no script.
"""

import json
import math
import os
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from pluralign.core.files import REPORT_MARK, atomic_write, refuse_foreign
from pluralign.core.text import printable
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes, held_out_votes
from pluralign.ensemble.record import worse_than_chance
from pluralign.ensemble.verdict import headline
from pluralign.measuring import comparison
from pluralign.measuring.camps import CampStudy
from pluralign.measuring.cards import load_descriptions
from pluralign.measuring.evaluate import evaluate_held_out
from pluralign.measuring.individuals import load_representation
from pluralign.measuring.leans import TRAITS
from pluralign.measuring.report_data import ReportData, ReportOptions, collect_report_data
from pluralign.publishing import figures, tables
from pluralign.publishing.tables import Table, cut, number
from pluralign.theory.intervals import ENOUGH_CLUSTERS
from pluralign.votes.load import VotesLike

TEXT_LENGTH = 800
"""Longer texts are cut."""


@dataclass(frozen=True)
class Report:
    """A written report."""

    report: str
    """The HTML file."""
    figures: list[str]
    """Files of the figures, if they were written."""
    study: ReportData


def report(
    ensemble: RewardEnsemble | str | os.PathLike[str],
    output: str | os.PathLike[str],
    votes: HeldOutVotes | VotesLike | None = None,
    options: ReportOptions | None = None,
    *,
    figures_folder: str | os.PathLike[str] | None = None,
    commands: Sequence[Sequence[str]] = (),
    progress: Progress | None = None,
) -> Report:
    """Measure an ensemble on held-out votes and write its report to an HTML file.

    Args:
        ensemble: the ensemble, or its folder. The folder may also hold descriptions of the members, and how well
            individuals are represented.
        output: the file to write.
        votes: votes that the ensemble was not trained on (default: the held-out votes that ``fit`` saved).
        options: what to show.
        figures_folder: also write the figures as PNG and SVG files to this folder.
        commands: the commands that reproduce the report, each as a list of words.
        progress: called while texts are encoded.
    """
    refuse_foreign(output, REPORT_MARK)
    options, (loaded, held_out) = options or ReportOptions(), held_out_votes(ensemble, votes, progress=progress)
    folder = None if isinstance(ensemble, RewardEnsemble) else ensemble
    evaluation = None if votes is None else evaluate_held_out(loaded, held_out, options.seed)
    individuals = load_representation(folder) if folder is not None else None
    descriptions = load_descriptions(folder) if folder is not None and votes is None else None
    study = collect_report_data(
        loaded, held_out, evaluation, options, representation=individuals, descriptions=descriptions, progress=progress
    )
    text = page(loaded, study, folder=str(folder or "DIR"), commands=commands)
    with atomic_write(Path(output)) as partial:
        partial.write_text(text, encoding="utf-8")
    drawn = figures.save_figures(draw_figures(study), figures_folder) if figures_folder else []
    return Report(str(output), list(map(str, drawn)), study)


def draw_figures(data: ReportData) -> dict[str, Figure]:
    """Draw all figures of a report."""
    drawn = {"shares": figures.share_histogram(data.votes), "reliability": figures.reliability_curve(data.main)}
    if data.record.history:
        drawn["sizes"] = figures.brier_by_size(data.record, data.evaluation)
    if data.diversity:
        drawn["tau"] = figures.tau_heat_map(data.diversity.tau)
    if data.best_of_n:
        drawn["best_of_n"] = figures.best_of_n_curves(data.best_of_n)
    return drawn


def page(
    ensemble: RewardEnsemble,
    data: ReportData,
    *,
    name: str = "",
    folder: str = "DIR",
    commands: Sequence[Sequence[str]] = (),
    camps: Mapping[str, CampStudy] | None = None,
    details: Sequence[Table] = (),
) -> str:
    """Return the report of an ensemble as HTML.

    Args:
        ensemble: the reported ensemble.
        data: its results, from ``collect_report_data``.
        name: title of the page (default: the name of the data that the ensemble was fitted to).
        folder: of the ensemble, for the command of the next step.
        commands: the commands that reproduce the report, each as a list of words.
        camps: for a town hall, which camps members stand for, by the features of the fit.
        details: more tables.
    """
    first, drawn = headline(data.main, ensemble.record, folder), draw_figures(data)
    fitted = data.record.data
    return printable(
        _environment()
        .get_template("report.html")
        .render(
            title=name or PurePath((fitted and fitted.name) or "An ensemble of reward models").name,
            ensemble=ensemble,
            data=data,
            headline=first,
            insight=data.insight,
            standing=comparison.KINDS[first.standing],
            verdicts=comparison,
            tables=tables,
            drawn=defaultdict(bool, drawn),
            figure=lambda key, label: _svg(drawn[key], label),
            camps=camps or {},
            camp_map=lambda study: _svg(figures.camp_heat_map(study), "Agreement between camps and members"),
            details=details,
            enough=ENOUGH_CLUSTERS,
            traits={trait.key: trait.more for trait in TRAITS},
            commands="\n".join(shlex.join(words) for words in commands),
            settings=_settings(data),
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("pluralign.publishing"), autoescape=True, undefined=StrictUndefined, lstrip_blocks=True
    )
    environment.tests["missing"] = lambda value: value is None or math.isnan(value)
    environment.tests["far"] = lambda profile: worse_than_chance(profile.disagreement, profile.weight)
    environment.filters.update(num=number, cut=lambda value: cut(value, TEXT_LENGTH))
    environment.filters["table"] = lambda table: Markup(tables.as_html(table))  # noqa: S704  # its texts are escaped
    return environment


def _svg(drawing: Figure, label: str) -> Markup:
    return Markup(figures.as_svg(drawing, label))  # noqa: S704


def _settings(data: ReportData) -> str:
    record = data.record.to_json()
    shown = {key: record[key] for key in ("options", "target", "data", "versions", "pruned") if record.get(key)}
    votes = {"name": data.votes.name, "fingerprint": data.votes.fingerprint}
    return json.dumps(shown | {"votes": votes}, indent=1, ensure_ascii=False)
