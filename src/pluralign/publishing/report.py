"""The report: one self-contained HTML page with the paper's figures for one ensemble.

This module decides the texts of the page and their order. The page starts with the headline: one main figure, one
verdict and one next step. Nothing is measured here. The template escapes all texts from data and models; the page loads
nothing and runs no script.
"""

import functools
import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path, PurePath

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from pluralign.core.files import atomic_write
from pluralign.core.text import shortened
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.headline import FEW_VOTES, headline
from pluralign.ensemble.record import worse_than_chance
from pluralign.measuring.camps import CampStudy
from pluralign.measuring.cards import Profile
from pluralign.measuring.diversity import CaseStudy, MemberPair
from pluralign.measuring.individuals import LEGEND, PREDICTORS
from pluralign.measuring.leans import TRAITS, Lean
from pluralign.measuring.report_data import ReportData
from pluralign.measuring.verdicts import (
    KINDS,
    comparison,
    floor_is_compared,
    representation_notes,
    representation_verdicts,
    undecided_sentence,
    verdicts,
)
from pluralign.publishing import figures
from pluralign.publishing.figures import save_figures
from pluralign.theory.intervals import ENOUGH_CLUSTERS

__all__ = ["draw_figures", "page", "report", "save_figures"]

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
STATEMENTS = {
    "lemma_1": "Lemma 1: sampling noise of few votes",
    "theorem_2": "Theorem 2: small ensembles suffice",
    "theorem_3": "Theorem 3: outliers can be removed",
    "theorem_4": "Theorem 4: generalisation from N pairs",
    "held_out": "Beyond the paper: bound from held-out prompts",
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
class ReportTable:
    """A table of results that are not about one ensemble, in a section of its own."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


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


def report(
    ensemble: RewardEnsemble,
    data: ReportData,
    path: str | os.PathLike[str],
    *,
    name: str = "",
    folder: str = "DIR",
    commands: Sequence[Sequence[str]] = (),
    camps: Mapping[str, CampStudy] | None = None,
    details: Sequence[ReportTable] = (),
) -> Path:
    """Write the report of an ensemble to an HTML file.

    Args:
        ensemble: the reported ensemble.
        data: its results, from ``collect_report_data``.
        path: the file to write.
        name: title of the page (default: the name of the data that the ensemble was fitted to).
        folder: of the ensemble, for the command of the next step.
        commands: the commands that reproduce the report, each as a list of words.
        camps: for a town hall, which camps members stand for, by the features of the fit.
        details: more tables.
    """
    path = Path(path)
    text = page(ensemble, data, name=name, folder=folder, commands=commands, camps=camps, details=details)
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


def page(
    ensemble: RewardEnsemble,
    data: ReportData,
    *,
    name: str = "",
    folder: str = "DIR",
    commands: Sequence[Sequence[str]] = (),
    camps: Mapping[str, CampStudy] | None = None,
    details: Sequence[ReportTable] = (),
) -> str:
    """Return the report as HTML. Arguments as for ``report``."""
    record, evaluation, main = data.record, data.evaluation, data.main
    first = headline(main, ensemble.record, folder, in_report=True)
    rows = comparison(main, ensemble.k)
    drawn = {key: Markup(figures.as_svg(drawing, ALT_TEXTS[key])) for key, drawing in draw_figures(data).items()}  # noqa: S704
    optional = {
        "camps": camps, "groups": data.groups, "cases": data.cases, "individuals": data.representation,
        "details": details,
    }  # fmt: skip
    empty = {anchor for anchor, content in optional.items() if not content}
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
        few_votes="" if floor_is_compared(main) else FEW_VOTES,
        floor_drawn=floor_is_compared(evaluation),
        far=_worse_than_chance(data),
        figures={**dict.fromkeys(ALT_TEXTS), **drawn},
        camps=[(features, study, _camp_figure(study)) for features, study in (camps or {}).items()],
        comparison=rows,
        worst=any(row.worst is not None for row in rows),
        intervals=main.prompts >= ENOUGH_CLUSTERS,
        enough=ENOUGH_CLUSTERS,
        group_intervals=any(not math.isnan(group.interval.low) for of in data.groups.values() for group in of),
        details=details,
        cards=list(_cards(data)),
        predictors=PREDICTORS,
        legend=LEGEND,
        rater_verdicts=list(representation_verdicts(data.representation)) if data.representation else [],
        rater_notes=list(representation_notes(data.representation)) if data.representation else [],
        statements=[(title, getattr(data.certificate, key)) for key, title in STATEMENTS.items()],
        cases=list(_cases(data)),
        commands="\n".join(shlex.join(words) for words in commands),
        settings=_settings(data),
        listed=_listed,
    )


def _camp_figure(study: CampStudy) -> Markup:
    label = "Heat map of the agreement between camps and members"
    return Markup(figures.as_svg(figures.camp_heat_map(study), label))  # noqa: S704


def _environment() -> Environment:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False, lstrip_blocks=True)
    environment.tests["missing"] = _is_missing
    environment.filters["num"] = _number
    environment.filters["signed"] = functools.partial(_number, sign="+")
    return environment


def _is_missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _number(value: float | None, digits: int = 4, sign: str = "") -> str:
    """Return a number with a proper minus and without a negative zero, or a dash if it is missing.

    Example:
        >>> _number(-0.0312), _number(-0.00001), _number(-0.00001, sign="+"), _number(math.nan)
        ('−0.0312', '0.0000', '+0.0000', '–')
    """
    return "–" if value is None or math.isnan(value) else format(value, f"{sign}z.{digits}f").replace("-", "−")


def _settings(data: ReportData) -> str:
    record = data.record.to_json()
    shown = {key: record[key] for key in ("options", "target", "data", "versions", "pruned") if record.get(key)}
    votes = {"name": data.votes.name, "fingerprint": data.votes.fingerprint}
    return json.dumps(shown | {"votes": votes}, indent=1, ensure_ascii=False)


def _worse_than_chance(data: ReportData) -> str:
    members = [str(card.member) for card in data.profiles if worse_than_chance(card.disagreement, card.weight)]
    if not members:
        return ""
    which = f"member {members[0]}. Do not tune a policy to it."
    if len(members) > 1:
        which = f"members {', '.join(members)}. Do not tune policies to them."
    return f"Worse than chance (disagreement above 0.5): {which}"


def _listed(pairs: Sequence[MemberPair]) -> str:
    return ", ".join("{} and {}".format(*pair.members) for pair in pairs)


# --- cards and case studies -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LeanBar:
    """A lean on a card, drawn as a bar."""

    label: str
    relative: float
    length: float
    """Signed share of half the axis, from −1 to 1."""


@dataclass(frozen=True)
class _Card:
    """A member's card, with shortened texts."""

    profile: Profile
    worse_than_chance: bool
    outlier: bool
    """By Theorem 3."""
    leans: list[_LeanBar]


def _cards(data: ReportData) -> Iterator[_Card]:
    for profile in data.profiles:
        claimed = sorted((lean for lean in profile.leans if lean.claim), key=lambda lean: -abs(lean.relative))
        card = replace(
            profile,
            typical=tuple(
                replace(one, prompt=_cut(one.prompt), response=_cut(one.response)) for one in profile.typical
            ),
            distinguishing=tuple(
                replace(
                    one,
                    prompt=_cut(one.prompt),
                    preferred=_cut(one.preferred),
                    other=_cut(one.other),
                )
                for one in profile.distinguishing
            ),
        )
        yield _Card(
            profile=card,
            worse_than_chance=worse_than_chance(profile.disagreement, profile.weight),
            outlier=profile.member in data.certificate.theorem_3.pruning.outliers_before,
            leans=[_lean_bar(lean) for lean in claimed[:LEANS_PER_CARD]],
        )


def _lean_bar(lean: Lean) -> _LeanBar:
    labels = {trait.key: trait.more for trait in TRAITS}
    return _LeanBar(labels[lean.trait], lean.relative, max(-1.0, min(1.0, lean.relative / FULL_BAR)))


@dataclass(frozen=True)
class _Pick:
    """A response of a case study, and the names of the members that choose it."""

    weight: float
    members: str
    response: str


def _cases(data: ReportData) -> Iterator[tuple[CaseStudy, list[_Pick]]]:
    labels = {profile.member: profile.label for profile in data.profiles}
    for case in data.cases:
        picks = [
            _Pick(choice.weight, "; ".join(labels[j] for j in choice.members), _cut(choice.response))
            for choice in case.choices
        ]
        yield replace(case, prompt=_cut(case.prompt)), picks


def _cut(text: str) -> str:
    return shortened(text, TEXT_LENGTH)
