"""How well individuals are represented, in the report and on the page."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run
from matplotlib.collections import LineCollection
from page_browser import Tab, page_data
from served import running
from town_raters import town_raters, town_representation

from pluralign import RewardEnsemble
from pluralign.core.json_values import to_json
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.measuring.individuals import PREDICTORS, Representation, save_representation
from pluralign.measuring.report_data import ReportData, collect_report_data
from pluralign.measuring.verdicts import representation_verdicts
from pluralign.publishing.figures import representation_curves
from pluralign.publishing.report import page


@pytest.fixture(scope="module")
def found(town_folder: Path, ensemble: RewardEnsemble) -> Representation:
    return town_representation(ensemble, town_raters())


@pytest.fixture(scope="module")
def data(ensemble: RewardEnsemble, held_out: HeldOutVotes, found: Representation) -> ReportData:
    return collect_report_data(ensemble, held_out, representation=found)


def test_the_report_has_a_section_only_where_it_was_measured(ensemble: RewardEnsemble, data: ReportData) -> None:
    text = page(ensemble, data)
    assert '<section id="individuals">' in text
    assert '<a href="#individuals">Individuals</a>' in text
    without = page(ensemble, replace(data, representation=None))
    assert "individuals" not in without


def test_the_report_shows_every_score(ensemble: RewardEnsemble, data: ReportData, found: Representation) -> None:
    text = page(ensemble, data)
    section = text[text.index('<section id="individuals">') : text.index('<section id="certificate">')]
    for row in found.rows:
        scores = [row.predictors[name] for name in PREDICTORS]
        for values in ([one.accuracy.mean for one in scores], [one.log_loss.mean for one in scores]):
            assert re.search("".join(f"<td[^>]*>{value:.4f}</td>" for value in values), section)
    for verdict in representation_verdicts(found):
        assert verdict.text.replace("'", "&#39;") in section


def test_the_figure_draws_the_measured_accuracies(found: Representation) -> None:
    axes = representation_curves(found).axes[0]
    drawn = [np.asarray(line.get_ydata()).tolist() for line in axes.lines]
    for name in ("posterior", "member", "own", "soft_bt"):
        assert [row.predictors[name].accuracy.mean for row in found.rows] in drawn
    bars = np.concatenate([bar.get_segments() for bar in axes.collections if isinstance(bar, LineCollection)])
    ends = [[row.predictors["posterior"].accuracy.low, row.predictors["posterior"].accuracy.high] for row in found.rows]
    np.testing.assert_allclose(bars[:, :, 1], ends)
    labels = [label.get_text().partition("\n")[0] for label in axes.get_xticklabels()]
    assert labels == ["0", "1", "3", "5", "10", "20", "all"]


def test_pluralign_report_reads_the_saved_figures(town_folder: Path, tmp_path: Path, found: Representation) -> None:
    folder = tmp_path / "ensemble"
    shutil.copytree(town_folder, folder)
    save_representation(found, folder)
    written = run("report", folder, "-o", tmp_path / "report.html", "--json")
    assert json.loads(written.stdout)["study"]["representation"] == to_json(found)
    assert "How well individuals are represented" in (tmp_path / "report.html").read_text()


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(ensemble: RewardEnsemble, held_out: HeldOutVotes, found: Representation) -> Iterator[str]:
    """Return the address of a page with the measure of representation."""
    with running(ensemble, held_out=held_out, representation=found) as client:
        yield f"{client.address}/"


def test_the_page_shows_every_score(tab: Tab, measured: str, found: Representation) -> None:
    rows = page_data(measured)["representation"]["rows"]
    assert rows == to_json(found)["rows"]
    opened = tab.open(measured + "#calibration")
    opened.wait_for_selector(".individuals svg")
    accuracy, log_loss = opened.query_selector_all(".individuals table")
    for table, score in ((accuracy, "accuracy"), (log_loss, "log_loss")):
        shown = [line.inner_text().split("\t") for line in table.query_selector_all("tbody tr")]
        expected = [[f"{row['predictors'][name][score]['mean']:.3f}" for name in PREDICTORS] for row in rows]
        assert [line[2:-1] for line in shown] == expected
        assert [line[0] for line in shown] == ["0", "1", "3", "5", "10", "20", "all"]
    verdicts = [one.inner_text() for one in opened.query_selector_all(".individuals .verdict")]
    assert verdicts == [verdict.text for verdict in representation_verdicts(found)]


@pytest.mark.parametrize("width", [1200, 380])
def test_the_figure_of_the_page_draws_the_accuracies(
    tab: Tab, measured: str, found: Representation, width: int
) -> None:
    opened = tab.open(measured + "#calibration", width=width)
    opened.wait_for_selector(".individuals svg")
    heights = [float(dot.get_attribute("cy")) for dot in opened.query_selector_all(".individuals .dot")]
    values = [row.predictors["posterior"].accuracy.mean for row in found.rows]
    slope, offset = np.polyfit(values, heights, 1)
    assert slope < 0
    np.testing.assert_allclose(heights, np.array(values) * slope + offset, atol=0.1)
    labels = [text.text_content() for text in opened.query_selector_all(".individuals svg text[class^=line-]")]
    assert len(labels) == 4
    box = opened.query_selector(".individuals svg").bounding_box()
    for text in opened.query_selector_all(".individuals svg text"):
        inside = text.bounding_box()
        assert inside["x"] >= box["x"] - 1
        assert inside["x"] + inside["width"] <= box["x"] + box["width"] + 1
        assert inside["y"] + inside["height"] <= box["y"] + box["height"] + 1


def test_a_page_without_the_measure_has_no_section(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    assert shown["representation"] is None
    opened = tab.open(address + "#calibration")
    opened.wait_for_selector("svg .point")
    assert opened.query_selector(".individuals") is None
