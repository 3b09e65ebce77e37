"""The report: one self-contained HTML page with the paper's figures for one ensemble.

This module decides the texts of the page and their order. Nothing is measured here. The template escapes all texts from
data and models; the page loads nothing and runs no script.
"""

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path, PurePath

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from pluralign.analysis.camps import CampStudy
from pluralign.analysis.leans import Lean
from pluralign.analysis.member_rankings import CaseStudy, MemberPair
from pluralign.analysis.profiles import Profile
from pluralign.analysis.report_data import ReportData
from pluralign.analysis.traits import TRAITS
from pluralign.core.files import atomic_write
from pluralign.core.text import shortened
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT, worse_than_chance
from pluralign.evaluation.comparison import Verdict, comparison, verdicts
from pluralign.evaluation.representation import LEGEND, PREDICTORS
from pluralign.evaluation.representation_verdicts import representation_notes, representation_verdicts
from pluralign.publishing import figures
from pluralign.publishing.figures import save_figures

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
    "sizes": "Held-out Brier score by number of members, with floor, constant one half, soft BT and noise",
    "reliability": "Observed against predicted shares",
    "tau": "Heat map of Kendall's tau between members",
    "best_of_n": "Reward of each member's best-of-N policy by its KL divergence from the base policy",
    "representation": "Accuracy on a rater's other votes by the number of the rater's choices, with soft BT",
}


def draw_figures(data: ReportData) -> dict[str, Figure]:
    """Draw all figures of a report."""
    drawn = {
        "shares": figures.share_histogram(data.votes),
        "reliability": figures.reliability_curve(data.evaluation.reliability),
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
    commands: Sequence[Sequence[str]] = (),
    camps: Mapping[str, CampStudy] | None = None,
) -> Path:
    """Write the report of an ensemble to an HTML file.

    Args:
        ensemble: the reported ensemble.
        data: its results, from ``collect_report_data``.
        path: the file to write.
        name: title of the page (default: the name of the data that the ensemble was fitted to).
        commands: the commands that reproduce the report, each as a list of words.
        camps: for a town hall, which camps members stand for, by the features of the fit.
    """
    path = Path(path)
    with atomic_write(path) as partial:
        partial.write_text(page(ensemble, data, name=name, commands=commands, camps=camps), encoding="utf-8")
    return path


def page(
    ensemble: RewardEnsemble,
    data: ReportData,
    *,
    name: str = "",
    commands: Sequence[Sequence[str]] = (),
    camps: Mapping[str, CampStudy] | None = None,
) -> str:
    """Return the report as HTML."""
    record, evaluation = data.record, data.evaluation
    drawn = {key: Markup(figures.as_svg(drawing, ALT_TEXTS[key])) for key, drawing in draw_figures(data).items()}  # noqa: S704
    optional = {
        "camps": camps, "groups": data.groups, "cases": data.cases, "individuals": data.representation
    }  # fmt: skip
    empty = {anchor for anchor, content in optional.items() if not content}
    template = _environment().from_string(
        files("pluralign").joinpath("publishing/templates/report.html").read_text(encoding="utf-8")
    )
    soft_bt = evaluation.baselines.get("soft_bt")
    return template.render(
        title=name or PurePath((record.data and record.data.name) or "An ensemble of reward models").name,
        record=record,
        evaluation=evaluation,
        data=data,
        on_held_out_votes=record is ensemble.record,
        sections=[(anchor, title) for anchor, title in SECTIONS.items() if anchor not in empty],
        ratio=evaluation.test.brier / soft_bt.brier if soft_bt and soft_bt.brier else None,
        worst=max(card.disagreement for card in data.profiles if card.weight > NEGLIGIBLE_WEIGHT),
        verdicts=list(_verdicts(data)),
        figures={**dict.fromkeys(ALT_TEXTS), **drawn},
        camps=[(features, study, _camp_figure(study)) for features, study in (camps or {}).items()],
        comparison=comparison(evaluation),
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
    environment.tests["missing"] = lambda value: value is None or value != value  # None or NaN
    return environment


def _settings(data: ReportData) -> str:
    record = data.record.to_json()
    shown = {key: record[key] for key in ("options", "target", "data", "versions", "pruned") if record.get(key)}
    votes = {"name": data.votes.name, "fingerprint": data.votes.fingerprint}
    return json.dumps(shown | {"votes": votes}, indent=1, ensure_ascii=False)


def _verdicts(data: ReportData) -> Iterator[Verdict]:
    yield from verdicts(data.evaluation)
    members = [str(card.member) for card in data.profiles if worse_than_chance(card.disagreement, card.weight)]
    if members:
        text = f"Worse than chance (disagreement above 0.5): member {', '.join(members)}. Do not tune a policy to it."
        yield Verdict("warn", text)


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
            outlier=profile.member in data.certificate.theorem_3.outliers,
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
    names = {profile.member: profile.name for profile in data.profiles}
    for case in data.cases:
        picks = [
            _Pick(choice.weight, "; ".join(f"{j} {names[j]}" for j in choice.members), _cut(choice.response))
            for choice in case.choices
        ]
        yield replace(case, prompt=_cut(case.prompt)), picks


def _cut(text: str) -> str:
    return shortened(text, TEXT_LENGTH)
