"""The report: one self-contained HTML page with the paper's figures for one ensemble.

This module decides the texts of the page and their order. The page starts with the headline: one main figure, one
verdict and one next step. Nothing is measured here. The template escapes all texts from data and models; the page loads
nothing and runs no script.
"""

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path, PurePath

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from pluralign.core.errors import UsageError
from pluralign.core.files import atomic_write
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble, as_ensemble
from pluralign.ensemble.headline import headline
from pluralign.ensemble.held_out import HeldOutVotes, load_held_out, score_held_out
from pluralign.ensemble.record import worse_than_chance
from pluralign.measuring.camps import CampStudy
from pluralign.measuring.cards import load_descriptions
from pluralign.measuring.evaluate import evaluate
from pluralign.measuring.individuals import load_representation
from pluralign.measuring.leans import TRAITS
from pluralign.measuring.report_data import ReportData, ReportOptions, collect_report_data
from pluralign.measuring.verdicts import (
    KINDS,
    floor_is_compared,
    representation_notes,
    representation_verdicts,
    undecided_sentence,
    verdicts,
)
from pluralign.publishing import figures
from pluralign.publishing.tables import (
    Table,
    as_html,
    certificate_table,
    claimed_leans,
    comparison_table,
    cut,
    group_tables,
    majority_table,
    number,
    representation_tables,
    worst_group_sentence,
)
from pluralign.theory.intervals import ENOUGH_CLUSTERS
from pluralign.votes.load import VotesLike, as_preferences

LEANS_PER_CARD = 4
FULL_BAR = 0.5
"""Relative lean that fills half of a bar on a card."""
TEXT_LENGTH = 800
"""Longer texts are cut."""
SECTIONS = {
    "camps": "Camps",
    "votes": "Votes",
    "calibration": "Calibration",
    "groups": "Groups",
    "diversity": "Diversity",
    "members": "Members",
    "individuals": "Individuals",
    "certificate": "Certificate",
    "cases": "Case studies",
    "details": "Details",
    "reproduce": "How to reproduce",
}
ALT_TEXTS = {
    "shares": "Histogram of the majority share",
    "sizes": "Held-out Brier score by number of members, with the baselines and noise",
    "reliability": "Observed against predicted shares",
    "tau": "Heat map of Kendall's tau between members",
    "best_of_n": "Reward of each member's best-of-N policy by its KL divergence from the base policy",
    "representation": "Accuracy on a rater's other votes by the number of the rater's choices, with soft BT",
}


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
    options, loaded = options or ReportOptions(), as_ensemble(ensemble)
    folder = None if isinstance(ensemble, RewardEnsemble) else ensemble
    evaluation = None
    if votes is not None:
        held_out = votes if isinstance(votes, HeldOutVotes) else score_held_out(loaded, as_preferences(votes), progress)
        evaluation = evaluate(loaded, held_out.preferences, groups=[], all_prompts=True, seed=options.seed)
        evaluation = replace(evaluation, left_out=held_out.left_out)
    elif folder is not None:
        held_out = load_held_out(folder, loaded)
    else:
        raise UsageError("give votes, or the folder of an ensemble: it holds the held-out votes of the fit.")
    study = collect_report_data(
        loaded,
        held_out,
        evaluation,
        options,
        representation=load_representation(folder) if folder is not None else None,
        descriptions=load_descriptions(folder) if folder is not None and votes is None else None,
        progress=progress,
    )
    text = page(loaded, study, folder=str(folder or "DIR"), commands=commands)
    with atomic_write(Path(output)) as partial:
        partial.write_text(text, encoding="utf-8")
    drawn = figures.save_figures(draw_figures(study), figures_folder) if figures_folder else []
    return Report(str(output), list(map(str, drawn)), study)


def draw_figures(data: ReportData) -> dict[str, Figure]:
    """Draw all figures of a report."""
    drawn = {
        "shares": figures.share_histogram(data.votes),
        "reliability": figures.reliability_curve(data.main),
    }
    if data.record.history:
        drawn["sizes"] = figures.brier_by_size(data.record, data.evaluation)
    if data.diversity:
        drawn["tau"] = figures.tau_heat_map(data.diversity.tau)
    if data.best_of_n:
        drawn["best_of_n"] = figures.best_of_n_curves(data.best_of_n)
    if data.representation:
        drawn["representation"] = figures.representation_curves(data.representation)
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
    record, evaluation, main, found = data.record, data.evaluation, data.main, data.representation
    first = headline(main, ensemble.record, folder, in_report=True)
    optional = {"camps": camps, "groups": data.groups, "cases": data.cases, "individuals": found, "details": details}
    empty = {anchor for anchor, content in optional.items() if not content}
    drawn = {key: _svg(drawing, ALT_TEXTS[key]) for key, drawing in draw_figures(data).items()}
    tables = {
        "comparison": _html(comparison_table(main, k=ensemble.k)),
        "majority": _html(majority_table(data.majorities, evaluation)),
        "groups": [_html(table) for table in group_tables(data.groups)],
        "representation": [_html(table) for table in representation_tables(found)] if found else [],
        "certificate": _html(certificate_table(data.certificate)),
        "details": [_html(table) for table in details],
    }
    template = _environment().from_string(
        files("pluralign").joinpath("publishing/templates/report.html").read_text(encoding="utf-8")
    )
    return template.render(
        title=name or PurePath((record.data and record.data.name) or "An ensemble of reward models").name,
        record=record,
        evaluation=evaluation,
        main=main,
        k=ensemble.k,
        headline=first,
        standing=KINDS[first.standing],
        data=data,
        on_held_out_votes=record is ensemble.record,
        sections=[(anchor, title) for anchor, title in SECTIONS.items() if anchor not in empty],
        verdicts=list(verdicts(main)),
        undecided=undecided_sentence(evaluation.undecided),
        floor_drawn=floor_is_compared(evaluation),
        far_sentence=_far_sentence(data),
        figures={**dict.fromkeys(ALT_TEXTS), **drawn},
        tables=tables,
        worst_group=worst_group_sentence(data.worst_group) if data.worst_group and data.worst_group.groups > 1 else "",
        camps=[
            (features, study, _svg(figures.camp_heat_map(study), "Heat map of the agreement between camps and members"))
            for features, study in (camps or {}).items()
        ],
        enough=ENOUGH_CLUSTERS,
        profiles=cut(data.profiles, TEXT_LENGTH),
        outliers=data.certificate.theorem_3.pruning.outliers_before,
        claimed=lambda profile: claimed_leans(profile)[:LEANS_PER_CARD],
        is_far=lambda profile: worse_than_chance(profile.disagreement, profile.weight),
        traits={trait.key: trait.more for trait in TRAITS},
        full_bar=FULL_BAR,
        rater_verdicts=list(representation_verdicts(found)) if found else [],
        rater_notes=list(representation_notes(found)) if found else [],
        cases=cut(data.cases, TEXT_LENGTH),
        labels={profile.member: profile.label for profile in data.profiles},
        commands="\n".join(shlex.join(words) for words in commands),
        settings=_settings(data),
    )


def _environment() -> Environment:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False, lstrip_blocks=True)
    environment.tests["missing"] = lambda value: value is None or math.isnan(value)
    environment.filters["num"] = number
    return environment


def _html(table: Table) -> Markup:
    return Markup(as_html(table))  # noqa: S704  # its texts are escaped


def _svg(drawing: Figure, label: str) -> Markup:
    return Markup(figures.as_svg(drawing, label))  # noqa: S704


def _settings(data: ReportData) -> str:
    record = data.record.to_json()
    shown = {key: record[key] for key in ("options", "target", "data", "versions", "pruned") if record.get(key)}
    votes = {"name": data.votes.name, "fingerprint": data.votes.fingerprint}
    return json.dumps(shown | {"votes": votes}, indent=1, ensure_ascii=False)


def _far_sentence(data: ReportData) -> str:
    members = [str(card.member) for card in data.profiles if worse_than_chance(card.disagreement, card.weight)]
    if not members:
        return ""
    which = f"member {members[0]}. Do not tune a policy to it."
    if len(members) > 1:
        which = f"members {', '.join(members)}. Do not tune policies to them."
    return f"Worse than chance (disagreement above 0.5): {which}"
