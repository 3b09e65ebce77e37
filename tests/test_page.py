"""The page in a real browser: every tab with mouse and keyboard, and hostile texts."""

import contextlib
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn

from pluralign import PreferenceSet, answer, create_app
from pluralign.analysis.profiles import member_profiles
from pluralign.answering.steering import ScoredChoices, steer_by_choices
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import load_held_out
from pluralign.server.explain import explain_votes

RUNS = "window.owned = true"
HOSTILE = (
    f"<script>{RUNS}</script><img src=x onerror='{RUNS}'><svg onload='{RUNS}'><a href='javascript:{RUNS}'>x</a>"
    f"\"' onfocus='{RUNS}' autofocus x=' &lt;b&gt; {{{{7*7}}}} ${{{RUNS}}} \u202eright to left\u202d\u2066\x00😀"
)
ENDLESS = "W" * 10_000
TABS = ("ask", "calibration", "members", "compare")


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    """Serve an application from a thread; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def ensemble(town_folder: Path) -> RewardEnsemble:
    return RewardEnsemble.load(town_folder)


@pytest.fixture(scope="module")
def address(ensemble: RewardEnsemble, town_folder: Path) -> Iterator[str]:
    with running(create_app(ensemble, held_out=load_held_out(town_folder), name="town")) as at:
        yield at


@pytest.fixture(scope="module")
def shown(address: str) -> dict[str, Any]:
    """The data of the page; ``tests/test_page_data.py`` checks it."""
    with urllib.request.urlopen(f"{address}v1/ensemble") as reply:
        data: dict[str, Any] = json.load(reply)
        return data


@dataclass
class Tab:
    """A tab of the browser that records errors and messages."""

    page: Any
    messages: list[str] = field(default_factory=list)

    def open(self, address: str, width: int = 1200, rewrite: Callable[[Any], Any] | None = None) -> Any:
        """Load the page; ``rewrite`` changes the data of the page."""
        self.page.goto("about:blank")
        self.page.unroute_all()
        self.page.set_viewport_size({"width": width, "height": 900})
        if rewrite:
            self.page.route(
                "**/v1/ensemble",
                lambda route: route.fulfill(json=rewrite(route.fetch().json())),
            )
        self.page.goto(address)
        self.page.wait_for_selector("#tabs:not([hidden])")
        self.rest()
        return self.page

    def refuse(self, dialog: Any) -> None:
        self.messages.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def rest(self) -> None:
        """Wait until no request is running."""
        self.page.wait_for_timeout(30)
        self.page.wait_for_selector("[aria-busy=true]", state="detached")


@pytest.fixture(scope="module")
def one_tab(browser: Any) -> Iterator[Tab]:
    tab = Tab(browser.new_page())
    tab.page.set_default_timeout(15_000)
    tab.page.on("console", lambda message: tab.messages.append(message.text))
    tab.page.on("pageerror", lambda error: tab.messages.append(str(error)))
    tab.page.on("dialog", tab.refuse)
    yield tab
    tab.page.close()


@pytest.fixture
def tab(one_tab: Tab) -> Iterator[Tab]:
    """The tab; after a test it must have no messages, and no injected script may have run."""
    one_tab.messages.clear()
    yield one_tab
    assert one_tab.messages == []
    assert one_tab.page.evaluate("window.owned") is None


def percent(share: float) -> str:
    return f"{int(100 * share + 0.5)}\u00a0%"


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


# --- navigation ----------------------------------------------------------------------------------------------


def test_the_introduction_describes_the_ensemble(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address)
    assert page.title() == "town · Pluralign"
    assert "3 reward models represent people who disagree" in page.inner_text("#lead")
    parts = page.query_selector_all("#crowd a")
    assert [plain(part.get_attribute("aria-label")) for part in parts] == [
        f"Member {card['member']}, weight {plain(percent(card['weight']))}: {card['name']}" for card in shown["members"]
    ]
    widths = np.array([part.bounding_box()["width"] for part in parts])
    assert widths / widths.sum() == pytest.approx(shown["weights"], abs=0.01)


def test_tabs_move_by_arrow_keys(tab: Tab, address: str) -> None:
    page = tab.open(address)
    page.focus("#tab-ask")
    for key, expected in (
        ("ArrowRight", "calibration"), ("ArrowRight", "members"), ("End", "compare"), ("ArrowRight", "ask"),
        ("ArrowLeft", "compare"), ("Home", "ask"),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.id") == f"tab-{expected}"
        assert [name for name in TABS if page.is_visible(f"#{name}")] == [expected]
        assert page.get_attribute(f"#tab-{expected}", "aria-selected") == "true"
        assert page.evaluate("location.hash") == f"#{expected}"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "ask", "all tabs are one tab stop, then comes the panel"


@pytest.mark.parametrize(("link", "expected"), [("#members", "members"), ("#compare", "compare"), ("#nowhere", "ask")])
def test_addresses_open_tabs(tab: Tab, address: str, link: str, expected: str) -> None:
    page = tab.open(address + link)
    assert [name for name in TABS if page.is_visible(f"#{name}")] == [expected]


def test_the_back_button_returns_to_the_last_tab(tab: Tab, address: str) -> None:
    page = tab.open(address)
    page.click("#tab-members")
    page.go_back()
    assert [name for name in TABS if page.is_visible(f"#{name}")] == ["ask"]


def test_a_member_has_an_address(tab: Tab, address: str) -> None:
    page = tab.open(address + "#members/2")
    assert page.evaluate("document.activeElement.id") == "member-2"
    page.click("#crowd a >> nth=1")
    assert page.evaluate("document.activeElement.id") == "member-1"
    assert page.query_selector_all(".member.chosen")[0].get_attribute("id") == "member-1"


def test_every_field_and_button_has_a_name(tab: Tab, address: str) -> None:
    page = tab.open(address)
    page.click("input[value=steerable]")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('input, textarea, select, button, [role=button], [tabindex="0"]')]
        .filter((node) => !(node.labels?.length || node.getAttribute('aria-label') || node.textContent.trim()
                            || node.getAttribute('aria-labelledby')))
        .map((node) => node.outerHTML)"""
    )
    assert nameless == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))


# --- ask ------------------------------------------------------------------------------------------------------------


def test_the_first_example_is_answered_when_the_page_opens(
    tab: Tab, address: str, ensemble: RewardEnsemble, shown: dict[str, Any]
) -> None:
    page = tab.open(address)
    first = shown["examples"][0]
    expected = answer(ensemble, first["prompt"], first["responses"])
    assert expected.consensus
    assert page.input_value("#prompt") == first["prompt"]
    assert page.text_content(".consensus .data") == expected.consensus.text
    assert percent(expected.consensus.least_support) in page.inner_text(".consensus")
    cards = page.query_selector_all(".slate .answer")
    assert [card.query_selector(".share").inner_text() for card in cards] == [
        percent(one.weight) for one in expected.answers
    ]
    assert [card.query_selector(".data").text_content() for card in cards] == [one.text for one in expected.answers]
    for card, one in zip(cards, expected.answers, strict=True):
        names = [shown["members"][j]["name"] for j in one.members]
        assert [voice.text_content() for voice in card.query_selector_all(".voices .data")] == names


def test_examples_and_rules_can_be_changed(
    tab: Tab, address: str, ensemble: RewardEnsemble, shown: dict[str, Any]
) -> None:
    page = tab.open(address)
    page.click("text=More questions")
    page.click("[data-example='5']")
    tab.rest()
    page.select_option("#rule", "borda")
    tab.rest()
    example = shown["examples"][5]
    expected = answer(ensemble, example["prompt"], example["responses"], rule="borda")
    assert expected.consensus
    assert page.text_content(".consensus .data") == expected.consensus.text
    assert page.get_attribute("[data-example='5']", "aria-pressed") == "true"
    assert page.get_attribute("[data-example='0']", "aria-pressed") == "false"


def test_without_a_model_a_new_question_needs_candidates(tab: Tab, address: str, ensemble: RewardEnsemble) -> None:
    page = tab.open(address)
    page.fill("#prompt", "Shall we dance?")
    assert "This server has no language model" in page.inner_text("#ask")
    page.click("#ask form button[type=submit]")
    assert "Paste candidate answers" in page.inner_text("#ask [role=alert]")
    page.fill("#candidates", "Yes,\nlet us dance.\n\nNo.\n\n\nPerhaps: it depends.")
    page.click("#ask form button[type=submit]")
    tab.rest()
    expected = answer(ensemble, "Shall we dance?", ["Yes,\nlet us dance.", "No.", "Perhaps: it depends."])
    assert expected.consensus
    assert page.text_content(".consensus .data") == expected.consensus.text
    assert not page.is_visible("#ask [role=alert]")
    page.fill("#candidates", "Yes.\nNo.")
    page.click("#ask form button[type=submit]")
    tab.rest()
    assert re.search("[12] of 2 answers", page.inner_text("#ask"))


def test_generated_answers_are_reused_until_ask_is_pressed(tab: Tab, address: str) -> None:
    page = tab.open(address, rewrite=lambda data: data | {"can_generate": True})
    sent: list[Any] = []

    def write(route: Any) -> None:
        body = route.request.post_data_json
        sent.append(body.get("candidates"))
        texts = ["Yes.", "No, thank you."]
        reply = route.fetch(post_data=json.dumps(body | {"candidates": texts})).json()
        route.fulfill(json=reply | {"candidate_texts": texts})

    page.route("**/v1/answer", write)
    page.fill("#prompt", "Shall we dance?")
    assert "the language model of this server write answers" in page.inner_text("#ask")
    page.click("#ask form button[type=submit]")
    tab.rest()
    page.click("input[value=distributional]")
    tab.rest()
    page.click("text=Draw again")
    tab.rest()
    page.click("#ask form button[type=submit]")
    tab.rest()
    assert sent == [None, ["Yes.", "No, thank you."], ["Yes.", "No, thank you."], None]


def test_draws_are_counted(tab: Tab, address: str, shown: dict[str, Any], ensemble: RewardEnsemble) -> None:
    page = tab.open(address)
    page.click("input[value=distributional]")
    tab.rest()
    page.click("text=Draw ten")
    page.wait_for_selector("h3:text-is('11 draws')")
    tab.rest()
    example = shown["examples"][0]
    drawn = [
        answer(ensemble, example["prompt"], example["responses"], "distributional", seed=seed).answers[0]
        for seed in range(11)
    ]
    counts = [int(row.inner_text().split()[0]) for row in page.query_selector_all(".tally .percent")]
    assert counts == np.bincount([one.member for one in drawn], minlength=3).tolist()
    assert page.text_content(".results .answer .text .data") == drawn[-1].text
    assert f"Member {drawn[-1].member} was drawn" in page.inner_text("#ask")


def test_choices_on_pairs_update_the_posterior(
    tab: Tab, address: str, shown: dict[str, Any], ensemble: RewardEnsemble
) -> None:
    page = tab.open(address)
    page.click("input[value=steerable]")
    tab.rest()
    assert [row.inner_text() for row in page.query_selector_all("#ask .posterior .percent")] == [
        percent(weight) for weight in shown["weights"]
    ]
    chosen = []
    for pair, letter in zip(shown["steering_pairs"], "aab", strict=False):
        assert page.text_content("[data-choice=a] .data") == pair["response_a"]
        page.focus(f"[data-choice={letter}]")
        page.keyboard.press("Enter")
        tab.rest()
        chosen.append(letter == "a")
        pairs = shown["steering_pairs"][: len(chosen)]
        votes = PreferenceSet.from_columns(
            [one["prompt"] for one in pairs],
            [one["response_a"] for one in pairs],
            [one["response_b"] for one in pairs],
            [int(a) for a in chosen],
            [int(not a) for a in chosen],
        )
        expected = steer_by_choices(ScoredChoices.of(ensemble, votes), ensemble.weights, ensemble.temperature)
        shares = [row.inner_text() for row in page.query_selector_all("#ask .posterior .percent")]
        assert shares == [percent(share) if share >= 0.005 else "<1\u00a0%" for share in expected.posterior]
        assert f"Member {expected.member} answers" in page.inner_text("#ask")
        assert page.evaluate("document.activeElement.dataset.choice") == "a", "the keyboard focus is on the next pair"
    for _ in range(50):  # until the transition of the bars has ended
        bars = [bar.bounding_box()["width"] for bar in page.query_selector_all("#ask .posterior .meter > i")]
        widths = np.array(bars) / page.query_selector("#ask .posterior .meter").bounding_box()["width"]
        if widths == pytest.approx(expected.posterior, abs=0.02):
            break
        page.wait_for_timeout(100)
    assert widths == pytest.approx(expected.posterior, abs=0.02)
    page.click("text=Start over")
    assert "before your first choice" in page.inner_text("#ask")


def test_pairs_can_be_skipped_until_none_is_left(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address)
    page.click("input[value=steerable]")
    for _ in shown["steering_pairs"]:
        page.click("text=Skip this pair")
    assert "No more pairs" in page.inner_text("#ask")


def test_more_like_this_counts_as_choices(
    tab: Tab, address: str, ensemble: RewardEnsemble, shown: dict[str, Any]
) -> None:
    page = tab.open(address)
    example = shown["examples"][0]
    slate = answer(ensemble, example["prompt"], example["responses"]).answers
    page.click(".slate .answer >> nth=1 >> text=More like this")
    tab.rest()
    liked, others = slate[1].text, [one.text for one in slate if one is not slate[1]]
    n = len(others)
    votes = PreferenceSet.from_columns([example["prompt"]] * n, [liked] * n, others, [1] * n, [0] * n)
    expected = steer_by_choices(ScoredChoices.of(ensemble, votes), ensemble.weights, ensemble.temperature)
    assert page.is_checked("input[value=steerable]")
    assert f"Member {expected.member} answers" in page.inner_text("#ask")


def test_a_member_or_words_can_steer(tab: Tab, address: str) -> None:
    page = tab.open(address)
    page.click("input[value=steerable]")
    page.click("text=Other ways to steer")
    page.select_option("#member", "2")
    tab.rest()
    assert "Member 2 answers" in page.inner_text("#ask")
    page.click("text=Other ways to steer")
    page.fill("#like", "zzz")
    page.keyboard.press("Enter")
    tab.rest()
    assert "nothing in 'zzz' names a trait" in page.inner_text("#ask [role=alert]")
    tab.messages.clear()  # the browser logs every status of 400


# --- calibration ----------------------------------------------------------------------------------------------------


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


def test_a_point_has_an_address(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address + "#calibration/1")
    assert page.inner_text(".behind .pair b >> nth=0") == shown["reliability"][1]["pairs"][0]["prompt"]


def test_figures_are_also_tables(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address + "#calibration")
    for summary in page.query_selector_all("figure summary"):
        summary.click()
    curve, sizes = page.query_selector_all("figure table")
    rows = [row.inner_text().split("\t")[0::3] for row in curve.query_selector_all("tbody tr")]
    assert rows == [[f"{point['predicted']:.3f}", f"{point['count']}"] for point in shown["reliability"]]
    text = sizes.inner_text()
    history = shown["history"]
    for value in [*(one["brier"] for one in history["points"]), history["floor"], history["soft_bt"], history["noise"]]:
        assert f"{value:.4f}" in text


def test_the_comparison_and_the_worst_group_are_shown(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address + "#calibration")
    rows = page.query_selector_all("[aria-label='Comparison of predictions'] tbody tr")
    words = {"ahead of": "ensemble better", "behind": "ensemble worse", "level with": "no significant difference"}
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


# --- members --------------------------------------------------------------------------------------------------------


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
    assert distances == [percent(value) for value in shown["disagreement"]]


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


# --- compare --------------------------------------------------------------------------------------------------------


def test_compare_shows_votes_and_reasons(
    tab: Tab, address: str, shown: dict[str, Any], ensemble: RewardEnsemble, town_folder: Path
) -> None:
    page = tab.open(address + "#compare")
    pair = shown["steering_pairs"][0]
    texts = pair["prompt"], pair["response_a"], pair["response_b"]
    rewards = ensemble.rewards([(texts[0], texts[1]), (texts[0], texts[2])])
    cards = member_profiles(ensemble.weights, load_held_out(town_folder))
    expected = explain_votes(ensemble, cards, texts[0], texts[1:], rewards)
    share = sum(one.weight * one.vote for one in expected)
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


def test_a_comparison_needs_two_responses(tab: Tab, address: str) -> None:
    page = tab.open(address + "#compare")
    page.fill("#response-a", " ")
    page.click("#compare button[type=submit]")
    assert "Paste two responses" in page.inner_text("#compare [role=alert]")


# --- errors and hostile texts ----------------------------------------------------------------------------------------------


def test_the_api_key_is_requested_and_kept_in_the_tab(browser: Any, ensemble: RewardEnsemble) -> None:
    with running(create_app(ensemble, name="town", api_key="open-sesame")) as address:
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector("#key:not([hidden])")
        assert page.evaluate("document.activeElement.id") == "key-field"
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=This key was rejected")
        page.fill("#key-field", "open-sesame")
        page.click("text=Continue")
        page.wait_for_selector("#tabs:not([hidden])")
        assert not page.is_visible("#key")
        page.reload()
        page.wait_for_selector("#tabs:not([hidden])")
        assert not page.is_visible("#key")
        page.close()


def test_the_page_reports_missing_held_out_votes(tab: Tab, ensemble: RewardEnsemble) -> None:
    with running(create_app(ensemble, name="town")) as address:
        page = tab.open(address)
        page.fill("#prompt", "Tea?")
        page.fill("#candidates", "Yes.\nNo.")
        page.click("#ask form button[type=submit]")
        tab.rest()
        assert "Member" in page.inner_text(".slate")
        page.click("input[value=steerable]")
        assert "This ensemble has no held-out pairs" in page.inner_text("#ask")
        page.click("#tab-calibration")
        assert "their texts are not stored" in page.inner_text("#calibration")
        page.click("#tab-members")
        assert "no held-out prompt has enough answers to rank" in page.inner_text("#members")
        page.click("#tab-compare")
        assert page.query_selector("text=Another example") is None


def test_an_ensemble_without_figures_is_shown(tab: Tab, address: str) -> None:
    nothing: dict[str, Any] = {
        "reliability": [],
        "history": None,
        "comparison": [],
        "verdicts": [],
        "groups": {},
        "test": None,
        "data": {},
    }
    page = tab.open(
        address + "#calibration", rewrite=lambda data: data | nothing | {"votes": None, "worst_group": None}
    )
    assert "fitted without held-out votes" in page.inner_text("#calibration")


def test_a_stopped_server_is_reported(tab: Tab, address: str) -> None:
    page = tab.open(address)
    page.route("**/v1/answer", lambda route: route.abort())
    page.click("#ask form button[type=submit]")
    tab.rest()
    assert page.inner_text("#ask [role=alert]") == "No response from the server. Is it still running?"
    tab.messages.clear()  # the browser logs the failed request


def hostile(value: Any, key: str = "") -> Any:
    """Data of the page with hostile content in every text, and very long words in every name."""
    if isinstance(value, dict):
        return {name if key != "groups" else name + HOSTILE: hostile(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, key) for item in value]
    if isinstance(value, str) and key not in ("mode", "standing", "level"):
        return f"{value} {HOSTILE} {ENDLESS if key in ('name', 'prompt', 'preferred', 'claim') else ''}"
    return value


@pytest.mark.parametrize("width", [1200, 390])
def test_hostile_texts_stay_text(tab: Tab, address: str, width: int) -> None:
    page = tab.open(address, width, rewrite=hostile)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for path in ("answer", "explain"):
        page.route(f"**/v1/{path}", lambda route: route.fulfill(json=hostile(route.fetch().json())))

    def is_harmless(where: str) -> None:
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        bad = "iframe, object, [style*=url], a[href^=javascript], [onerror], [onload], [onfocus]"
        lists = f"[document.scripts, document.images, document.querySelectorAll('{bad}')]"
        counted = page.evaluate(f"{lists}.map((all) => all.length)")
        assert counted == [1, 0, 0], where
        assert page.evaluate("window.owned") is None, where
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{where} overflows horizontally"

    assert f"<script>{RUNS}</script>" in page.inner_text("h1")
    page.fill("#prompt", f"{HOSTILE} {ENDLESS}")
    page.fill("#candidates", f"{HOSTILE}\n{ENDLESS}\n{HOSTILE} {ENDLESS}")
    for mode in ("balanced", "distributional", "steerable"):
        page.click(f"input[value={mode}]")
        tab.rest()
        is_harmless(mode)
    page.click("[data-choice=a]")
    tab.rest()
    is_harmless("steered")
    for name in TABS[1:]:
        page.click(f"#tab-{name}")
        tab.rest()
        is_harmless(name)
    assert f"<script>{RUNS}</script>" in page.inner_text("#compare .results")
    assert all(url.startswith(address) for url in requests)


def test_hostile_errors_stay_text(tab: Tab, address: str) -> None:
    page = tab.open(address)
    page.route("**/v1/answer", lambda route: route.fulfill(status=400, json={"error": {"message": HOSTILE}}))
    page.click("#ask form button[type=submit]")
    tab.rest()
    assert f"<script>{RUNS}</script>" in page.inner_text("#ask [role=alert]")
    tab.messages.clear()  # the browser logs every status of 400


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (320, "dark")])
def test_phones_need_no_horizontal_scrolling(tab: Tab, address: str, width: int, scheme: str) -> None:
    tab.page.emulate_media(color_scheme=scheme)
    page = tab.open(address, width=width)
    for name in TABS:
        page.click(f"#tab-{name}")
        tab.rest()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 27)"
    assert dark == (scheme == "dark")
    tab.page.emulate_media(color_scheme="light")


def test_the_page_parses_no_markup_and_loads_nothing_external() -> None:
    folder = files("pluralign").joinpath("server/static")
    sources = {one.name: one.read_text() for one in folder.iterdir() if one.name.endswith((".js", ".css", ".html"))}
    assert {"index.html", "app.js", "style.css"} <= set(sources)
    for name, text in sources.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
        kept = text.replace("http://www.w3.org/2000/svg", "")  # a namespace, not an address
        assert not re.search(r"https?://|@import|url\(", kept), name
    html = sources["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)


# --- colours --------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    full = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(full[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(one: str, other: str, share: float) -> str:
    """The color-mix of CSS in srgb."""
    pairs = [(int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)


def schemes() -> dict[str, dict[str, str]]:
    """The colours of each scheme by name; the members' are ``m3`` and ``on3``."""
    style = files("pluralign").joinpath("server/static/style.css").read_text()
    light: dict[str, str] = {}
    dark: dict[str, str] = {}
    for media, rules in re.findall(
        r"(@media \(prefers-color-scheme: dark\) \{)?((?:\s*(?:/\*.*?\*/\s*)?(?::root|\.m\d[^{}]*) \{[^{}]*\})+)", style
    ):
        target = dark if media else light
        for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", rules):
            for name, colour in re.findall(r"--([\w-]+): (#\w+)", body):
                members = re.findall(r"\.m(\d)", selector)
                target |= {f"{name}{j}": colour for j in members} if members else {name: colour}
    return {"light": light, "dark": light | dark}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(scheme: str) -> None:
    colours = schemes()[scheme]
    for text in ("ink", "muted", "ensemble", "rival", "warn", "good", "floor"):
        for behind in ("page", "card"):
            assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
    assert contrast(colours["ink"], colours["chip"]) >= 4.5
    assert contrast(colours["on-ensemble"], colours["ensemble"]) >= 4.5
    for j in range(10):
        assert contrast(colours[f"on{j}"], colours[f"m{j}"]) >= 4.5, f"the number of member {j}"
        assert contrast(colours[f"m{j}"], colours["card"]) >= 3, f"the bar of member {j}"
    assert contrast(colours["field"], colours["card"]) >= 3, "the edge of a field"
    for tau in range(101):
        ink = "#ffffff" if tau >= 95 else colours["cell"]
        for end in ("alike", "opposite"):
            assert contrast(ink, mixed(colours[end], colours["even"], tau / 100)) >= 4.5, f"{end} {tau}"
