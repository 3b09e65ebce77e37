"""The report and its figures."""

import html
import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import evaluation_of, facts_of
from matplotlib.patches import Rectangle
from page_browser import Tab
from served import running
from town_raters import town_raters, town_representation

from pluralign import PreferenceSet, RewardEnsemble, UsageError, town_hall
from pluralign.core.json_values import to_json
from pluralign.core.text import printable
from pluralign.ensemble.held_out import HeldOutVotes, load_held_out
from pluralign.ensemble.record import Evaluation, LeftOut
from pluralign.ensemble.verdict import FEW_VOTES, headline
from pluralign.learning.measure import without_verdict
from pluralign.measuring.camps import CampStudy, camps_of_ensemble
from pluralign.measuring.comparison import representation_verdicts
from pluralign.measuring.individuals import PREDICTORS, Representation, save_representation
from pluralign.measuring.report_data import ReportData, ReportOptions, collect_report_data
from pluralign.publishing.figures import (
    brier_by_size,
    camp_heat_map,
    reliability_curve,
    tau_heat_map,
)
from pluralign.publishing.report import page
from pluralign.publishing.tables import Table, representation_tables
from pluralign.theory.intervals import Interval

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    " & </pre></article> \x1b[2J\x07\u202e\x9b"
)


@pytest.fixture(scope="module")
def found(held_out: HeldOutVotes, ensemble: RewardEnsemble) -> ReportData:
    return collect_report_data(ensemble, held_out)


@pytest.fixture(scope="module")
def plain(ensemble: RewardEnsemble, found: ReportData) -> str:
    """The page of ``found``."""
    return page(ensemble, found)


def hostile(held_out: HeldOutVotes) -> HeldOutVotes:
    """Return the same votes with texts that contain scripts and closing tags."""
    votes = held_out.preferences
    return HeldOutVotes(
        PreferenceSet.from_indices(
            [f"{HOSTILE} {prompt}" for prompt in votes.prompts],
            [f"{response} {HOSTILE}" for response in votes.responses],
            *(votes.prompt_index, votes.a_index, votes.b_index, votes.votes_a, votes.votes_b),
            name=HOSTILE,
        ),
        held_out.rewards,
    )


ACTIVE = re.compile(r"<(?:script|link|iframe|object|embed|img)\b")
"""Elements that load or run something."""


def test_all_sections_are_folded(plain: str) -> None:
    sections = re.findall(r'<details id="(\w+)" class="section">', plain)
    assert sections[:3] == ["figures", "votes", "calibration"]
    assert sections[3:] == ["groups", "diversity", "members", "certificate", "cases", "reproduce"]


def test_the_page_loads_nothing(plain: str) -> None:
    assert not ACTIVE.search(plain)
    assert not re.search(r'(?:src|href)="(?!#)', plain.replace('xlink:href="#', 'href="#'))
    assert "default-src 'none'" in plain


def test_the_page_shows_the_figures_of_the_fit(ensemble: RewardEnsemble, found: ReportData, plain: str) -> None:
    evaluation = evaluation_of(ensemble)
    assert f"{evaluation.test.brier:.4f}" in plain
    for name, baseline in evaluation.baselines.items():
        assert f">{baseline.brier:.4f}</td>" in plain, name
    for card in found.profiles:
        assert f"<h3>{card.label}</h3>" in plain


def test_the_page_shows_the_undecided_share(ensemble: RewardEnsemble, found: ReportData) -> None:
    evaluation = replace(evaluation_of(ensemble), undecided=0.331)
    text = page(ensemble, replace(found, record=replace(found.record, evaluation=evaluation)))
    assert "Undecided share: 33 %." in text
    none = page(ensemble, with_evaluation(found, replace(evaluation, undecided=0.0)))
    assert "Undecided share:" not in none


def with_evaluation(found: ReportData, evaluation: Evaluation) -> ReportData:
    return replace(found, record=replace(found.record, evaluation=evaluation))


def test_the_page_starts_with_the_insight_then_the_headline(ensemble: RewardEnsemble, found: ReportData) -> None:
    first = headline(evaluation_of(ensemble), ensemble.record, "town")
    text = html.unescape(page(ensemble, found, folder="town"))
    insight: Any = found.insight
    lines = (insight.title, insight.sentence, *insight.findings, "<details", first.main, first.verdict, first.next_step)
    places = [text.index(line) for line in lines]
    assert places == sorted(places)


def test_a_cross_validation_is_the_main_figure(ensemble: RewardEnsemble, found: ReportData) -> None:
    evaluation = evaluation_of(ensemble)
    figures = replace(evaluation.test, brier=0.0777, brier_corrected=0.0444)
    levels = {**evaluation.levels, evaluation.level: figures}
    pooled = replace(evaluation, test=figures, levels=levels, members=[], prompts=75)
    record = replace(found.record, cross_validation=pooled, options={**found.record.options, "folds": 5})
    text = page(ensemble, replace(found, record=record))
    assert "Main number: corrected Brier score 0.0444" in text
    assert "Cross-validated in 5 folds: each of the 75 prompts is predicted by an ensemble fitted without it." in text
    row = re.search(r"<td[^>]*>→ ensemble: votes.*?</tr>", text)
    assert row
    assert [cell in row[0] for cell in (">3<", ">0.0777<", ">0.0444<")] == [True] * 3


def test_a_report_on_other_votes_ignores_the_cross_validation(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    evaluation = evaluation_of(ensemble)
    validated = replace(ensemble, record=replace(ensemble.record, cross_validation=evaluation))
    other = replace(evaluation, left_out=LeftOut(pairs=40, prompts=5))
    found = collect_report_data(validated, held_out, other, ReportOptions(cases=0))
    assert found.main is other
    text = page(validated, found)
    assert "Left out 5 prompts (40 pairs) that were used for training." in text
    assert "Cross-validated" not in text


def without_floor(evaluation: Evaluation) -> Evaluation:
    """Return an evaluation as on votes with 2–3 votes per pair."""
    return replace(
        evaluation, baselines={**evaluation.baselines, "floor": without_verdict(evaluation.baselines["floor"])}
    )


def test_a_floor_that_votes_cannot_measure_is_no_rival(ensemble: RewardEnsemble, found: ReportData, plain: str) -> None:
    few = with_evaluation(found, without_floor(evaluation_of(ensemble)))
    text = page(ensemble, few)
    shown = (">floor</td>", "below the floor")
    assert [words in plain for words in shown] == [True] * 2
    assert [words in text for words in shown] == [False] * 2
    assert FEW_VOTES in text
    assert FEW_VOTES not in plain
    (axes,) = brier_by_size(few.record, few.evaluation).axes
    assert not [label.get_text() for label in axes.texts if label.get_text().startswith("floor")]
    assert not axes.patches, "there is no band"


def test_few_prompts_have_no_intervals_and_the_page_says_why_once(small_folder: Path) -> None:
    ensemble, held_out = RewardEnsemble.load(small_folder), load_held_out(small_folder)
    found = collect_report_data(ensemble, held_out)
    text = page(ensemble, found)
    prompts = len(held_out.preferences.prompts)
    assert text.count(f"No verdict: {prompts} test prompts, and an interval needs at least 20.") == 1
    assert "95 %" not in text.split("<h2>Certificate</h2>")[0]
    assert not re.search(r"\bnan\b", text, flags=re.IGNORECASE)
    (axes,) = reliability_curve(found.evaluation).axes
    assert not axes.collections, "there are no error bars"
    assert reliability_curve(replace(found.evaluation, prompts=20)).axes[0].collections


def test_no_number_is_a_negative_zero(ensemble: RewardEnsemble, found: ReportData) -> None:
    tiny = Interval(-1e-6, -1e-6, -1e-6, 0.0)
    evaluation = evaluation_of(ensemble)
    zeros = {name: replace(one, brier_corrected=-1e-6, difference=tiny) for name, one in evaluation.baselines.items()}
    test = replace(evaluation.test, brier_corrected=-1e-6, interval=tiny)
    changed = replace(evaluation, baselines=zeros, test=test, levels={**evaluation.levels, evaluation.level: test})
    text = page(ensemble, with_evaluation(found, changed))
    assert not re.search(r"[-−]0?\.0+(?!\d)", text)
    assert "[+0.0000, +0.0000]" in text
    labels = [label.get_text() for label in tau_heat_map([[1.0, -1e-6], [-1e-6, 1.0]]).axes[0].texts]
    assert labels == ["1.00", ".00", ".00", "1.00"]
    unknown = tau_heat_map([[1.0, math.nan], [math.nan, 1.0]]).axes[0].texts
    assert [label.get_text() for label in unknown] == ["1.00", "–", "–", "1.00"]


def test_an_ensemble_without_held_out_figures_has_no_report(ensemble: RewardEnsemble, found: ReportData) -> None:
    with pytest.raises(UsageError, match="no held-out figures: name votes with votes"):
        page(ensemble, replace(found, record=replace(found.record, evaluation=None)))


def test_texts_from_data_are_escaped(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    text = page(ensemble, collect_report_data(ensemble, hostile(held_out)), name=HOSTILE)
    assert "&lt;script&gt;" in text
    assert printable(text) == text
    assert not ACTIVE.search(text)


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_a_browser_shows_hostile_texts_as_plain_text(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, tmp_path: Path, browser: Any, width: int, scheme: str
) -> None:
    path = tmp_path / "r.html"
    data = collect_report_data(ensemble, hostile(held_out))
    path.write_text(page(ensemble, data, name="A town"), encoding="utf-8")
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    requests: list[str] = []
    messages: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.goto(path.as_uri())
    for summary in tab.query_selector_all("details > summary"):
        summary.click()
    assert tab.title() == "A town"
    assert requests == [path.as_uri()]
    assert messages == []
    assert tab.evaluate("document.scripts.length + document.images.length") == 0
    assert "<script>document.title='owned'</script>" in tab.inner_text("#cases")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page does not scroll sideways"
    assert all(box["width"] > 150 for box in (svg.bounding_box() for svg in tab.query_selector_all("figure svg")))
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(20, 22, 27)") == (scheme == "dark")
    tab.close()


def test_a_phone_and_a_printer_get_the_whole_report(
    ensemble: RewardEnsemble, found: ReportData, tmp_path: Path, browser: Any
) -> None:
    columns = ("", "k", "Brier", "corrected", "true error", "worst member", "seconds")
    wide = Table("All methods", columns, [["perfect single reward", 1000, *[-0.1234] * 4, "123.4"]])
    (tmp_path / "r.html").write_text(page(ensemble, found, details=[wide]), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 390, "height": 900})
    tab.goto((tmp_path / "r.html").as_uri())
    certificate = "document.querySelector('#certificate table').checkVisibility()"
    assert not tab.evaluate(certificate)
    tab.emulate_media(media="print")
    assert tab.evaluate(certificate)
    tab.emulate_media(media="screen")
    tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    clipped = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    assert tab.evaluate(clipped) == 0
    tab.close()


def test_figure_2_has_every_size_and_line(found: ReportData) -> None:
    drawing = brier_by_size(found.record, found.evaluation)
    (axes,) = drawing.axes
    curve, *lines = [np.asarray(line.get_xydata()) for line in axes.lines]
    assert curve[:, 0].tolist() == [row.k for row in found.record.history]
    assert curve[:, 1].tolist() == [row.test_brier for row in found.record.history]
    heights = {round(float(line[0, 1]), 9) for line in lines}
    expected = [found.evaluation.baselines[name].brier for name in ("floor", "constant_half", "soft_bt")]
    assert heights == {round(value, 9) for value in [*expected, found.evaluation.test.noise]}


@pytest.fixture(scope="module")
def camps(ensemble: RewardEnsemble) -> CampStudy:
    """The camps, with member 1 standing for the first of them."""
    town = town_hall(480)
    study = camps_of_ensemble(town, town.preferences.test_mask(0.4), ensemble)
    first, others = replace(study.camps[0], member=1), [replace(camp, member=None) for camp in study.camps[1:]]
    return replace(study, camps=[first, *others], represented=1)


def test_the_report_shows_camps(ensemble: RewardEnsemble, found: ReportData, camps: CampStudy, plain: str) -> None:
    text = page(ensemble, found, camps={"some features": camps})
    assert "1 of 6 camps have a member: some features" in text
    assert "Member 1 stands for the gardeners" in text
    assert "No member stands for these camps" in text
    assert 'id="camps"' not in plain


def test_the_heat_map_of_camps_has_every_agreement_and_frames_the_member(camps: CampStudy) -> None:
    axes = camp_heat_map(camps).axes[0]
    expected = [value for camp in camps.camps for value in (*camp.agreement, camp.soft_bt)]
    assert [text.get_text() for text in axes.texts] == [f"{value:.2f}".replace("0.", ".") for value in expected]
    assert [patch.get_xy() for patch in axes.patches if isinstance(patch, Rectangle)] == [(1, 0)]


def test_the_command_writes_the_page_and_the_figures(town_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    facts = facts_of("report", town_folder, "-o", target, "--figures", tmp_path / "figures")
    assert facts["report"] == str(target)
    assert {Path(name).read_bytes()[:4] for name in facts["figures"]} == {b"\x89PNG", b"<?xm"}
    assert len(facts["figures"]) == 10
    assert facts["study"]["certificate"]["k"] == 3
    for words in ("pluralign fit demo", "--k 3", "--encoder none", "--test-fraction 0.4"):
        assert words in target.read_text()


def test_the_command_ranks_given_candidates(town_folder: Path, tmp_path: Path) -> None:
    lines = tmp_path / "candidates.jsonl"
    lines.write_text(json.dumps({"prompt": "Should we plant trees?", "responses": ["Yes.", "No, never.", "Perhaps: "]}))
    (case,) = facts_of("report", town_folder, "-o", tmp_path / "r.html", "--candidates", lines)["study"]["cases"]
    assert case["prompt"] == "Should we plant trees?"


# --- representation of individuals ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def represented(town_folder: Path, ensemble: RewardEnsemble) -> Representation:
    return town_representation(ensemble, town_raters())


@pytest.fixture(scope="module")
def data(ensemble: RewardEnsemble, held_out: HeldOutVotes, represented: Representation) -> ReportData:
    return collect_report_data(ensemble, held_out, representation=represented)


def test_the_report_shows_every_score(ensemble: RewardEnsemble, data: ReportData, represented: Representation) -> None:
    text = page(ensemble, data)
    section = text[text.index('<details id="individuals"') : text.index('<details id="certificate"')]
    for row in represented.rows:
        scores = [row.predictors[name] for name in PREDICTORS]
        for values in ([one.accuracy.mean for one in scores], [one.log_loss.mean for one in scores]):
            assert re.search("".join(f"<td[^>]*>{value:.4f}</td>" for value in values), section)
    for verdict in representation_verdicts(represented):
        assert verdict.text.replace("'", "&#39;") in section


def test_the_command_reads_the_saved_figures(town_folder: Path, tmp_path: Path, represented: Representation) -> None:
    copy = shutil.copytree(town_folder, tmp_path / "ensemble")
    save_representation(represented, copy)
    written = facts_of("report", copy, "-o", tmp_path / "report.html")
    assert written["study"]["representation"] == to_json(represented)
    assert "How well individuals are represented" in (tmp_path / "report.html").read_text()


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(ensemble: RewardEnsemble, held_out: HeldOutVotes, represented: Representation) -> Iterator[str]:
    """Return the address of a page with the measure of representation."""
    with running(ensemble, held_out=held_out, representation=represented) as client:
        yield f"{client.address}/"


def test_the_page_shows_every_score(tab: Tab, measured: str, represented: Representation) -> None:
    opened = tab.open(measured + "#calibration")
    for table in representation_tables(represented):
        rows = opened.query_selector_all(f'[aria-label="{table.title}"] tbody tr')
        assert [line.inner_text().split("\t") for line in rows] == table.lines
    verdicts = {one.inner_text() for one in opened.query_selector_all("#calibration .verdict")}
    assert verdicts >= {verdict.text for verdict in representation_verdicts(represented)}


def test_a_page_without_the_measure_has_no_section(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    assert shown["individuals"] is None
    assert "How well individuals" not in tab.open(address + "#calibration").inner_text("#calibration")
