"""The tabs Calibration, Members and Compare show the data of the server."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_browser import Tab, page_data, percent, plain
from served import running

from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.headline import FEW_VOTES
from pluralign.ensemble.held_out import HeldOutVotes, load_held_out
from pluralign.measuring.cards import member_profiles
from pluralign.server.explain import explain_votes


def test_points_show_their_pairs(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address + "#calibration")
    curve = shown["reliability"]
    page.wait_for_selector("svg .point")
    points = page.query_selector_all("svg .point")
    assert len(points) == len(curve)
    where = [
        (float(dot.get_attribute("cx")), float(dot.get_attribute("cy")))
        for dot in page.query_selector_all(".point .dot")
    ]
    x, y = np.array(where).T
    for drawn, key in ((x, "predicted"), (-y, "observed")):
        values = [point[key] for point in curve]
        slope, offset = np.polyfit(values, drawn, 1)
        assert drawn == pytest.approx(np.array(values) * slope + offset, abs=0.1)
    worst = max(range(len(curve)), key=lambda i: abs(curve[i]["predicted"] - curve[i]["observed"]))
    assert page.inner_text(".behind .pair b >> nth=0") == curve[worst]["pairs"][0]["prompt"]
    points[0].hover()
    assert page.inner_text(".behind .pair b >> nth=0") == curve[0]["pairs"][0]["prompt"]
    shares = page.inner_text(".behind .pair h4 >> nth=0")
    pair = curve[0]["pairs"][0]
    assert f"chosen by {pair['votes_a']} of {pair['votes_a'] + pair['votes_b']}" in shares
    points[0].focus()
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".behind .pair b >> nth=0") == curve[1]["pairs"][0]["prompt"]
    points[2].click()
    points[0].hover()
    assert page.inner_text(".behind .pair b >> nth=0") == curve[2]["pairs"][0]["prompt"], (
        "a click keeps the point selected"
    )


def test_figures_are_also_tables(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address + "#calibration")
    for summary in page.query_selector_all("figure summary"):
        summary.click()
    curve, sizes = page.query_selector_all("figure table")
    rows = [row.inner_text().split("\t")[0::3] for row in curve.query_selector_all("tbody tr")]
    assert rows == [[f"{point['predicted']:.3f}", f"{point['count']}"] for point in shown["reliability"]]
    text = sizes.inner_text()
    history = shown["history"]
    for value in [*(one["brier"] for one in history["points"]), *history["lines"].values()]:
        assert f"{value:.4f}" in text


def test_the_comparison_and_the_worst_group_are_shown(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address + "#calibration")
    rows = page.query_selector_all("[aria-label='Comparison of predictions'] tbody tr")
    words = {"ahead": "ensemble better", "behind": "ensemble worse", "level": "no significant difference"}
    assert len(rows) == len(shown["comparison"])
    for row, expected in zip(rows, shown["comparison"], strict=True):
        assert expected["name"] in row.inner_text()
        assert f"{expected['brier']:.4f}" in row.inner_text()
        if expected["standing"]:
            assert words[expected["standing"]] in row.inner_text()
    for verdict in shown["verdicts"]:
        assert verdict["text"] in page.inner_text("#calibration")
    worst = page.query_selector_all("tr.worst")
    assert [row.inner_text().split("\t")[0] for row in worst] == (
        [shown["worst_group"]["name"]] if shown["worst_group"] else []
    )


def test_the_headline_comes_first_and_marks_the_row_that_counts(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address + "#calibration")
    headline = shown["headline"]
    lines = page.inner_text("#calibration .headline").split("\n\n")
    assert lines == [headline["main"], headline["verdict"], f"Next: {headline['next_step']}"]
    first = "#calibration > h2:first-child + .headline"
    assert page.query_selector(first), "nothing is between the heading and the headline"
    assert headline["verdict"] in page.inner_text("#verdict")
    (row,) = page.query_selector_all("[aria-label='Comparison of predictions'] tr.own")
    assert row.inner_text().startswith("→ ensemble: votes")
    assert "→ marks the row that counts" in page.inner_text("#calibration")


def few(data: dict[str, Any]) -> dict[str, Any]:
    """The data of the page of an ensemble with 12 test prompts and 3 votes per pair."""
    none = {"mean": -0.00001, "low": None, "high": None, "standard_error": None}
    groups = {key: [group | {"interval": none, "residual": none} for group in of] for key, of in data["groups"].items()}
    rows = [
        row | {"difference": None, "standing": None, "interval": None, "brier_corrected": -0.00001}
        for row in data["comparison"]
        if row["name"] != "floor"
    ]
    return data | {
        "headline": data["headline"] | {"standing": "unknown", "verdict": "No verdict: 12 test prompts."},
        "verdicts": [],
        "floor_note": FEW_VOTES,
        "test": data["test"] | {"interval": none, "brier_corrected": -0.00001},
        "comparison": rows,
        "groups": groups,
        "worst_group": None,
        "history": {"points": data["history"]["points"], "lines": {}},
        "reliability": [point | {"interval": None} for point in data["reliability"]],
    }


def test_few_prompts_and_votes_have_no_intervals_no_floor_and_one_reason(tab: Tab, address: str) -> None:
    page = tab.open(address + "#calibration", rewrite=few)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.inner_text("body").count("No verdict: 12 test prompts.") == 1
    text = page.inner_text("#calibration")
    assert text.count(FEW_VOTES) == 1
    assert "95 %" not in text.replace("\u00a0", " ")
    assert "Floor:" not in text
    assert "0.0000" in text
    assert "−0.0000" not in text
    assert page.query_selector_all("svg .floor, svg .whisker, svg .band") == []
    with_floor = tab.open(address + "#calibration")
    assert with_floor.query_selector_all("svg .floor, svg .whisker")


def test_pairs_left_out_and_cross_validation_are_reported(tab: Tab, address: str) -> None:
    sentence = "Left out 80 prompts (1,544 pairs) that were used for training."
    page = tab.open(
        address + "#calibration", rewrite=lambda data: data | {"left_out": sentence, "cross_validated": True}
    )
    text = page.inner_text("#calibration")
    assert sentence in text
    assert "Cross-validated: each prompt is predicted by an ensemble that was fitted without it." in text
    assert "; cross-validated." in page.inner_text("#lead")


def test_wide_tables_show_that_they_scroll(tab: Tab, address: str) -> None:
    page = tab.open(address + "#calibration", width=390)
    region = page.query_selector("[aria-label='Comparison of predictions']")
    assert region.evaluate("(node) => node.scrollWidth > node.clientWidth")
    assert region.get_attribute("tabindex") == "0"
    style = "(node) => getComputedStyle(node).backgroundAttachment"
    assert region.evaluate(style) == "local, local, scroll, scroll", "the covers of the shadows move with the content"
    for wide in page.query_selector_all(".scroll"):
        assert wide.get_attribute("tabindex") == "0"


def test_cards_show_leans_and_examples(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address + "#members")
    cards = page.query_selector_all(".member")
    for card, expected in zip(cards, shown["members"], strict=True):
        assert expected["name"] in card.inner_text()
        assert percent(expected["weight"]) in card.inner_text()
        for lean in expected["leans"]:
            assert lean["claim"][1:] in card.inner_text()
    with_examples = next(card for card in shown["members"] if card["distinguishing"])
    card = cards[with_examples["member"]]
    card.query_selector("text=Pairs where it disagrees with most members").click()
    assert with_examples["distinguishing"][0]["preferred"] in card.text_content()
    distances = [row.inner_text() for row in page.query_selector_all(".distances .percent")]
    assert distances == [percent(value) for value in [card["disagreement"] for card in shown["members"]]]


def test_the_page_reports_a_sample(tab: Tab, address: str) -> None:
    sentence = "Traits, words and rankings use a random sample of 250 of the 9,375 prompts."
    page = tab.open(address + "#members", rewrite=lambda data: data | {"read": {"prompts": 250, "of": 9375}})
    assert sentence in plain(page.inner_text("#members"))
    assert "random sample" not in tab.open(address + "#members").inner_text("#members")


def test_the_heat_map_works_with_the_keyboard(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address + "#members")
    cells = page.query_selector_all(".heat tbody td")
    labels = [float(cell.get_attribute("aria-label").split("τ ")[1].replace("−", "-")) for cell in cells]
    assert labels == pytest.approx(np.array(shown["tau"]["tau"]).ravel(), abs=0.006)
    cells[0].focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    tau = shown["tau"]["tau"][1][2]
    sentence = page.inner_text(".pairing")
    assert shown["members"][1]["name"] in sentence
    assert shown["members"][2]["name"] in sentence
    assert f"order {percent((1 - tau) / 2)} of all pairs of answers differently" in sentence


def test_compare_shows_votes_and_reasons(
    tab: Tab, address: str, shown: dict[str, Any], ensemble: RewardEnsemble, town_folder: Path
) -> None:
    page = tab.open(address + "#compare")
    pair = shown["steering_pairs"][0]
    texts = pair["prompt"], pair["response_a"], pair["response_b"]
    rewards = ensemble.rewards([(texts[0], texts[1]), (texts[0], texts[2])])
    cards = member_profiles(ensemble.weights, load_held_out(town_folder))
    expected = explain_votes(ensemble, cards, texts[0], texts[1:], rewards)
    share = ensemble.undecided / 2 + (1 - ensemble.undecided) * sum(one.weight * one.vote for one in expected)
    assert f"{percent(share)} of people are predicted to prefer A" in page.inner_text("#compare")
    assert f"In the data {pair['votes_a']} of" in page.inner_text("#compare")
    camps = page.query_selector_all(".camp")
    for one in expected:
        camp = camps[0 if one.vote > 0.5 else 1].text_content()
        assert one.name in camp
        for sentence in (*one.why, *one.against):
            assert sentence in camp
    page.fill("#response-b", "Something else.")
    page.focus("#compare button[type=submit]")
    page.keyboard.press("Enter")
    tab.rest()
    assert "In the data" not in page.inner_text("#compare"), "people have not voted on this pair"
    page.click("text=Another example")
    tab.rest()
    assert page.input_value("#response-a") == shown["steering_pairs"][1]["response_a"]
    assert "In the data" in page.inner_text("#compare")


def test_compare_shows_the_undecided_share_between_both_sides(
    tab: Tab, ensemble: RewardEnsemble, held_out: HeldOutVotes
) -> None:
    with running(replace(ensemble, undecided=0.4), held_out=held_out) as client:
        page = tab.open(f"{client.address}/#compare")
        pair = page_data(f"{client.address}/")["steering_pairs"][0]
        rewards = ensemble.rewards([(pair["prompt"], pair["response_a"]), (pair["prompt"], pair["response_b"])])
        share = 0.2 + 0.6 * (rewards[0] > rewards[1]) @ ensemble.weights
        text = page.inner_text("#compare")
        assert f"{percent(share)} of people are predicted to prefer A" in text
        assert f"The undecided share of {percent(0.4)} counts half for each side" in text
        parts = page.query_selector_all(".split > *")
        widths = np.array([part.bounding_box()["width"] for part in parts])
        (coin,) = [i for i, part in enumerate(parts) if "undecided" in part.get_attribute("class")]
        assert widths[coin] / widths.sum() == pytest.approx(0.4, abs=0.02)
        assert "Undecided share: 40 %" in page.inner_text("#crowd")


def test_a_failed_comparison_clears_the_previous_one(tab: Tab, address: str) -> None:
    page = tab.open(address + "#compare")
    assert "are predicted to prefer A" in page.inner_text("#compare .results")
    page.route("**/v1/explain", lambda route: route.fulfill(status=400, json={"error": {"message": "Too long."}}))
    page.click("#compare button[type=submit]")
    tab.rest()
    assert page.inner_text("#compare [role=alert]") == "Too long."
    assert page.inner_text("#compare .results") == ""
    tab.messages.clear()  # the browser logs every status of 400
