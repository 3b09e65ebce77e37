"""The report: one self-contained HTML page with the paper's figures for one ensemble.

Decided here: what is said in words and in which order. Nothing is measured here; text from data and models goes through
the template's escaping, and the page loads nothing and runs no script.
"""

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from pluralign.analysis.report_data import ReportData
from pluralign.analysis.traits import TRAITS
from pluralign.core.files import atomic_write
from pluralign.core.json_values import without_nan
from pluralign.core.text import shortened
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT, worse_than_chance
from pluralign.evaluation.comparison import comparison, verdicts
from pluralign.publishing import figures
from pluralign.publishing.figures import save_figures

__all__ = ["draw_figures", "page", "report", "save_figures"]

LEANS_ON_A_CARD = 4
FULL_BAR = 0.5
"""The relative lean that fills half a bar on a card."""
TEXT_LENGTH = 800
SECTIONS = {
    "votes": "The votes",
    "calibration": "Calibration",
    "groups": "Groups",
    "diversity": "Diversity",
    "members": "Members",
    "certificate": "Certificate",
    "cases": "Case studies",
    "reproduce": "How to reproduce it",
}
STATEMENTS = {
    "lemma_1": "Lemma 1: the noise of few votes",
    "theorem_2": "Theorem 2: few members are enough",
    "theorem_3": "Theorem 3: outliers can be left out",
    "theorem_4": "Theorem 4: training error carries over",
    "held_out": "Beyond the paper: this ensemble on held-out prompts",
}


def draw_figures(study: ReportData) -> dict[str, Figure]:
    """Draw every figure of a report."""
    drawn = {"shares": figures.share_histogram(study.votes), "reliability": figures.reliability_curve(study.facts)}
    if study.facts.get("history"):
        drawn["sizes"] = figures.brier_by_size(study.facts)
    if study.diversity:
        drawn["tau"] = figures.tau_heat_map(without_nan(study.diversity.tau))
    if study.best_of_n:
        drawn["best_of_n"] = figures.best_of_n_curves(study.best_of_n)
    return drawn


def report(
    ensemble: RewardEnsemble,
    study: ReportData,
    path: str | os.PathLike[str],
    *,
    name: str = "",
    commands: Sequence[Sequence[str]] = (),
) -> Path:
    """Write the report of an ensemble to one HTML file.

    Args:
        ensemble: the one that was studied.
        study: what was measured of it.
        path: the file to write.
        name: what the page calls the ensemble; unless given, the data it was fitted to.
        commands: the commands that lead here, each as a list of words.
    """
    path = Path(path)
    with atomic_write(path) as partial:
        partial.write_text(page(ensemble, study, name=name, commands=commands), encoding="utf-8")
    return path


def page(ensemble: RewardEnsemble, study: ReportData, *, name: str = "", commands: Sequence[Sequence[str]] = ()) -> str:
    """Return the report as HTML."""
    facts = study.facts
    drawn = {key: Markup(figures.as_svg(drawing, ALT[key])) for key, drawing in draw_figures(study).items()}  # noqa: S704
    values = without_nan(asdict(study))
    data = facts.get("data") or {}
    cards = list(_cards(values))
    shown = {
        "groups": bool(study.groups),
        "cases": bool(study.cases),
    }
    template = _environment().from_string(
        files("pluralign").joinpath("publishing/templates/report.html").read_text(encoding="utf-8")
    )
    rival = facts["baselines"].get("soft_bt")
    return template.render(
        title=name or PurePath(data.get("name") or "An ensemble of reward models").name,
        facts=without_nan(dict(facts)) | {"data": data},
        votes=values["votes"],
        own_votes=facts is ensemble.facts,
        sections=[(anchor, title) for anchor, title in SECTIONS.items() if shown.get(anchor, True)],
        ratio=facts["test"]["brier"] / rival["brier"] if rival else None,
        worst=max(card["disagreement"] for card in cards if card["weight"] > NEGLIGIBLE_WEIGHT),
        verdicts=list(_verdicts(study)),
        figures={**dict.fromkeys(ALT), **drawn},
        comparison=without_nan([asdict(row) for row in comparison(facts)]),
        strata=list(_strata(values)),
        groups=values["groups"],
        worst_group=values["worst_group"],
        diversity=values["diversity"],
        best_of_n=values["best_of_n"],
        profiles=cards,
        certificate=[
            {"name": title, "says": values["certificate"][key]["states"], "here": values["certificate"][key]["here"]}
            for key, title in STATEMENTS.items()
        ],
        cases=list(_cases(values)),
        commands="\n".join(shlex.join(words) for words in commands),
        settings=json.dumps(
            {key: facts.get(key) for key in ("options", "target", "data", "versions", "pruned") if facts.get(key)}
            | {"votes": {"name": study.votes.name, "fingerprint": study.votes.fingerprint}},
            indent=1,
            ensure_ascii=False,
        ),
        pairs_of=lambda found: ", ".join("{} and {}".format(*pair["members"]) for pair in found),
    )


ALT = {
    "shares": "Histogram of the share of people on the majority's side",
    "sizes": "Held-out Brier score against the number of members, with floor, constant one half, soft BT and noise",
    "reliability": "Observed against predicted shares",
    "tau": "Heat map of Kendall's tau between members",
    "best_of_n": "Reward of each member's best-of-N policy against its divergence from the base",
}


def _environment() -> Environment:
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False, lstrip_blocks=True)


def _verdicts(study: ReportData) -> Iterator[Mapping[str, str]]:
    yield from verdicts(study.facts)
    far = [card for card in study.profiles if worse_than_chance(card.disagreement, card.weight)]
    if far:
        those = ", ".join(str(card.member) for card in far)
        text = f"Further from people than a coin: member {those}. Do not tune a policy to it."
        yield {"kind": "warn", "text": text}


def _strata(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name, row in values["majorities"].items():
        if row["pairs"]:
            yield row | {"name": name, "brier": values["facts"]["strata"][name][1]}


def _cards(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    labels = {trait.key: trait.more for trait in TRAITS}
    outliers = set(values["certificate"]["theorem_3"]["outliers"])
    for card in values["profiles"]:
        clear = sorted((lean for lean in card["leans"] if lean["claim"]), key=lambda lean: -abs(lean["relative"]))
        leans = [
            lean | {"label": labels[lean["trait"]], "bar": max(-1.0, min(1.0, lean["relative"] / FULL_BAR))}
            for lean in clear[:LEANS_ON_A_CARD]
        ]
        yield card | {
            "far": worse_than_chance(card["disagreement"], card["weight"]),
            "outlier": card["member"] in outliers,
            "top_leans": leans,
            "typical": [_shortened(one, "prompt", "response") for one in card["typical"]],
            "distinguishing": [_shortened(one, "prompt", "preferred", "other") for one in card["distinguishing"]],
        }


def _cases(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    names = {card["member"]: card["name"] for card in values["profiles"]}
    for case in values["cases"]:
        picks = [
            {"who": "; ".join(f"{j} {names[j]}" for j in choice["members"]), **_shortened(choice, "response")}
            for choice in case["choices"]
        ]
        yield _shortened(case, "prompt") | {"picks": picks}


def _shortened(record: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {**record, **{key: shortened(record[key], TEXT_LENGTH) for key in keys}}
