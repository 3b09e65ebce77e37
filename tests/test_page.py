"""The page in a real browser: navigation, API keys, errors, hostile texts, small screens and colours."""

import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_browser import ASK, TABS, Tab, page_data, percent, plain
from served import running

from pluralign import PreferenceSet, RewardEnsemble, answer
from pluralign.answering.request import Voters
from pluralign.answering.steering import ScoredChoices, steer_by_choices
from pluralign.core.text import printable
from pluralign.ensemble.held_out import HeldOutVotes, load_held_out
from pluralign.measuring.cards import member_profiles
from pluralign.server.explain import explain_votes
from pluralign.theory.posterior import ChoiceModel

RUNS = "window.owned = true"
HOSTILE = (
    f"<script>{RUNS}</script><img src=x onerror='{RUNS}'><svg onload='{RUNS}'><a href='javascript:{RUNS}'>x</a>"
    f"\"' onfocus='{RUNS}' autofocus x=' &lt;b&gt; {{{{7*7}}}} ${{{RUNS}}} \u202eright to left\u202d\u2066\x00😀"
)
ENDLESS = "W" * 10_000


@pytest.fixture(scope="module")
def ensemble(ensemble: RewardEnsemble) -> RewardEnsemble:
    """An ensemble whose choices and words change answers."""
    return replace(ensemble, choice_model=ChoiceModel(people=0.9, spread=0.0, source="raters"))


@pytest.fixture
def page(tab: Tab, address: str) -> Any:
    """Return the page as it opens."""
    return tab.open(address)


def test_the_introduction_describes_the_ensemble(page: Any, shown: dict[str, Any]) -> None:
    assert page.title() == "town · Pluralign"
    assert "3 reward models represent people who disagree" in page.inner_text("#lead")
    insight = shown["insight"]
    assert page.inner_text("#insight h2") == insight["title"]
    for sentence in (insight["sentence"], insight["unites"], insight["divides"], insight["trust"], insight["advice"]):
        assert sentence in page.inner_text("#insight")


def with_voices(data: dict[str, Any]) -> dict[str, Any]:
    """The data of the page of an ensemble whose members are voices."""
    same = {"wants": "wants lists", "example": "alone prefers “x”"}
    voices = [
        {"member": j, "share": share, "name": f"<b>Voice {j}</b>", **same} for j, share in enumerate((0.5, 0.3, 0.2))
    ]
    return data | {"insight": data["insight"] | {"voices": voices}}


def test_voices_have_bars_and_link_to_their_cards(tab: Tab, address: str) -> None:
    page = tab.open(address, rewrite=with_voices)
    rows = [plain(text).split("\n") for text in texts_of(page, "#insight li")]
    line = "wants lists; alone prefers “x”"
    names = [f"<b>Voice {j}</b>" for j in range(3)]
    assert [[part for part in row if part] for row in rows] == [
        [share, name, line] for share, name in zip(("50 %", "30 %", "20 %"), names, strict=True)
    ]
    widths = np.array([part.bounding_box()["width"] for part in page.query_selector_all("#insight .bar i")])
    assert widths / widths.sum() == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    assert page.get_attribute("#insight a >> nth=1", "href") == "#members/1"


def test_tabs_move_by_arrow_keys(tab: Tab, page: Any) -> None:
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


def test_a_member_has_an_address(tab: Tab, address: str) -> None:
    page = tab.open(address + "#members/2", rewrite=with_voices)
    assert page.evaluate("document.activeElement.id") == "member-2"
    page.click("#insight a >> nth=1")
    assert page.evaluate("document.activeElement.id") == "member-1"
    assert page.query_selector_all(".member.chosen")[0].get_attribute("id") == "member-1"


def test_every_field_and_button_has_a_name(page: Any) -> None:
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


def test_the_api_key_is_requested_and_kept_in_the_tab(browser: Any, ensemble: RewardEnsemble) -> None:
    with running(ensemble, api_key="open-sesame") as client:
        page = browser.new_page()
        page.goto(client.address)
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
    with running(ensemble) as client:
        page = tab.open(client.address)
        page.fill("#prompt", "Tea?")
        page.fill("#candidates", "Yes.\nNo.")
        tab.click(ASK)
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
    nothing: dict[str, Any] = {"history": None, "votes": None, "worst_group": "", "reliability": [], "tables": []}
    nothing["data"] = {}
    page = tab.open(address + "#calibration", rewrite=lambda data: data | nothing)
    assert "fitted without held-out votes" in page.inner_text("#calibration")


def test_a_stopped_server_is_reported(tab: Tab, page: Any) -> None:
    page.route("**/v1/answer", lambda route: route.abort())
    tab.click(ASK)
    assert page.inner_text("#ask [role=alert]") == "No response from the server. Is it still running?"
    tab.messages.clear()  # the browser logs the failed request


def hostile(value: Any, key: str = "") -> Any:
    """Data of the page with hostile content in every text, and very long words in every name."""
    if isinstance(value, dict):
        return {name: hostile(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, key) for item in value]
    if isinstance(value, str) and key not in ("mode", "standing", "level", "cannot_steer"):
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
        shown = page.evaluate("document.body.textContent")
        assert printable(shown) == shown, where
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{where} overflows horizontally"

    assert f"<script>{RUNS}</script>" in page.inner_text("h1")
    page.fill("#prompt", f"{HOSTILE} {ENDLESS}")
    page.fill("#candidates", f"{HOSTILE}\n{ENDLESS}\n{HOSTILE} {ENDLESS}")
    for mode in ("balanced", "distributional", "steerable"):
        tab.click(f"input[value={mode}]")
        is_harmless(mode)
    tab.click("[data-choice=a]")
    is_harmless("steered")
    for name in TABS[1:]:
        tab.click(f"#tab-{name}")
        is_harmless(name)
    assert f"<script>{RUNS}</script>" in page.inner_text("#compare .results")
    assert all(url.startswith(address) for url in requests)


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


def luminance(colour: str) -> float:
    full = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(full[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def texts_of(page: Any, selector: str) -> list[str]:
    return [node.inner_text() for node in page.query_selector_all(selector)]


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


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


# --- page ask ---------------------------------------------------------------------------------------------------------


def test_the_first_example_is_answered(page: Any, ensemble: RewardEnsemble, shown: dict[str, Any]) -> None:
    first = shown["examples"][0]
    expected = answer(ensemble, first["prompt"], first["responses"])
    assert expected.consensus
    assert page.input_value("#prompt") == first["prompt"]
    assert page.text_content(".consensus .data") == expected.consensus.text
    assert percent(expected.consensus.least_support or 0.0) in page.inner_text(".consensus")
    for card, one in zip(page.query_selector_all(".slate .answer"), expected.answers, strict=True):
        assert card.query_selector(".share").inner_text() == percent(one.share or 0.0)
        assert card.query_selector(".data").text_content() == one.text
        assert texts_of(card, ".voices .data") == [shown["members"][j]["name"] for j in one.members]


def test_another_example_and_rule(tab: Tab, page: Any, ensemble: RewardEnsemble, shown: dict[str, Any]) -> None:
    page.click("text=More questions")
    tab.click("[data-example='5']")
    tab.select("#rule", "maximin")
    example = shown["examples"][5]
    expected = answer(ensemble, example["prompt"], example["responses"], rule="maximin")
    assert expected.consensus
    assert page.text_content(".consensus .data") == expected.consensus.text
    assert page.get_attribute("[data-example='5']", "aria-pressed") == "true"
    assert page.get_attribute("[data-example='0']", "aria-pressed") == "false"


def test_without_a_model_a_new_question_needs_candidates(tab: Tab, page: Any, ensemble: RewardEnsemble) -> None:
    page.fill("#prompt", "Shall we dance?")
    assert "This server has no language model" in page.inner_text("#ask")
    page.click(ASK)
    assert "Paste candidate answers" in page.inner_text("#ask [role=alert]")
    assert page.inner_text("#ask .results") == ""
    page.fill("#candidates", "Yes,\nlet us dance.\n\nNo.\n\n\nPerhaps: it depends.")
    tab.click(ASK)
    expected = answer(ensemble, "Shall we dance?", ["Yes,\nlet us dance.", "No.", "Perhaps: it depends."])
    assert expected.consensus
    assert page.text_content(".consensus .data") == expected.consensus.text
    assert not page.is_visible("#ask [role=alert]")
    page.fill("#candidates", "Yes.\nNo.")
    tab.click(ASK)
    assert re.search("[12] of 2 answers", page.inner_text("#ask"))


def writing(page: Any, asked_for: str = "candidates", **more: Any) -> list[Any]:
    """Let the server write two answers; return the list of what its requests ask for."""
    sent: list[Any] = []

    def write(route: Any) -> None:
        body = route.request.post_data_json
        sent.append(body.get(asked_for))
        texts = ["Yes.", "No, thank you."]
        reply = route.fetch(post_data=json.dumps(body | {"candidates": texts})).json()
        route.fulfill(json=reply | {"texts": texts, **more})

    page.route("**/v1/answer", write)
    page.fill("#prompt", "Shall we dance?")
    return sent


def test_generated_answers_are_reused_until_ask_is_pressed(tab: Tab, address: str) -> None:
    page = tab.open(address, rewrite=lambda data: data | {"can_generate": True})
    sent = writing(page)
    assert "the language model of this server write answers" in page.inner_text("#ask")
    tab.click(ASK)
    tab.click("input[value=distributional]")
    tab.click("text=Draw again")
    tab.click(ASK)
    assert sent == [None, ["Yes.", "No, thank you."], ["Yes.", "No, thank you."], None]


def test_answers_of_policies_are_not_reused_as_candidates(tab: Tab, address: str) -> None:
    page = tab.open(address, rewrite=lambda data: data | {"can_generate": True, "policies": [0, 1]})
    sent = writing(page, written=[0, 1])
    assert "let each member answer with its own policy" in page.inner_text("#ask")
    tab.click(ASK)
    assert "Each member's own policy wrote its answer." in page.inner_text("#ask")
    tab.click(ASK)
    assert sent == [None, None]


def test_only_the_button_asks_the_language_model(tab: Tab, address: str) -> None:
    page = tab.open(address, rewrite=lambda data: data | {"can_generate": True})
    sent = writing(page, "mode")
    for mode in ("distributional", "steerable", "balanced"):
        tab.click(f"input[value={mode}]")
    tab.select("#rule", "maximin")
    assert "Press Ask" in page.inner_text("#ask .results")
    page.click("input[value=steerable]")
    tab.click("[data-choice=a]")
    assert "after 1 choice" in page.inner_text("#ask"), "the posterior needs no language model"
    page.click("text=Other ways to steer")
    tab.select("#member", "2")
    assert sent == []
    tab.click(ASK)
    assert sent == ["steerable"]
    assert "Member 2 answers" in page.inner_text("#ask")
    page.fill("#prompt", "Shall we sing?")
    tab.click("input[value=distributional]")
    assert sent == ["steerable"]


def test_an_error_clears_the_previous_answer(tab: Tab, page: Any) -> None:
    assert page.query_selector(".slate")
    page.route("**/v1/answer", lambda route: route.fulfill(status=502, json={"error": {"message": HOSTILE}}))
    tab.click(ASK)
    assert f"<script>{RUNS}</script>" in page.inner_text("#ask [role=alert]")
    assert page.inner_text("#ask .results") == ""
    page.click("input[value=steerable]")
    tab.click("[data-choice=a]")
    assert f"<script>{RUNS}</script>" in page.inner_text("#ask [role=alert]")
    assert page.query_selector("[data-choice=a]"), "the next pair can still be chosen"
    assert page.query_selector("#ask .answer") is None
    tab.messages.clear()  # the browser logs every status of 502


def test_draws_are_counted(tab: Tab, page: Any, shown: dict[str, Any], ensemble: RewardEnsemble) -> None:
    tab.click("input[value=distributional]")
    page.click("text=Draw ten")
    page.wait_for_selector("h3:text-is('11 draws')")
    tab.rest()
    example = shown["examples"][0]
    asked: Any = example["prompt"], example["responses"], "distributional"
    drawn: list[Any] = [answer(ensemble, *asked, seed=seed).answers[0] for seed in range(11)]
    counts = [int(row.inner_text().split()[0]) for row in page.query_selector_all(".tally .percent")]
    assert counts == np.bincount([one.member for one in drawn], minlength=3).tolist()
    assert page.text_content(".results .answer .text .data") == drawn[-1].text
    assert f"Member {drawn[-1].member} was drawn" in page.inner_text("#ask")


def test_choices_update_the_posterior(tab: Tab, page: Any, shown: dict[str, Any], ensemble: RewardEnsemble) -> None:
    tab.click("input[value=steerable]")
    assert texts_of(page, "#ask .posterior .percent") == [percent(weight) for weight in shown["weights"]]
    choices: list[dict[str, Any]] = []
    for pair, letter in zip(shown["steering_pairs"], "aab", strict=False):
        assert page.text_content("[data-choice=a] .data") == pair["response_a"]
        page.focus(f"[data-choice={letter}]")
        page.keyboard.press("Enter")
        tab.rest()
        choices.append(pair | {"votes_a": int(letter == "a"), "votes_b": int(letter == "b")})
        columns = (
            [one[key] for one in choices] for key in ("prompt", "response_a", "response_b", "votes_a", "votes_b")
        )
        scored = ScoredChoices.of(ensemble, PreferenceSet.from_columns(*columns))
        expected = steer_by_choices(scored, Voters.of(ensemble))
        shares = [percent(share) if share >= 0.005 else "<1\u00a0%" for share in expected.posterior]
        assert texts_of(page, "#ask .posterior .percent") == shares
        assert f"{expected.average:.0%}".replace("%", "\u00a0%: of no member") in page.inner_text("#ask")
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


def test_pairs_can_be_skipped_until_none_is_left(page: Any, shown: dict[str, Any]) -> None:
    page.click("input[value=steerable]")
    for _ in shown["steering_pairs"]:
        page.click("text=Skip this pair")
    assert "No more pairs" in page.inner_text("#ask")


def test_more_like_this_is_choices(tab: Tab, page: Any, ensemble: RewardEnsemble, shown: dict[str, Any]) -> None:
    example = shown["examples"][0]
    slate = answer(ensemble, example["prompt"], example["responses"]).answers
    tab.click(".slate .answer >> nth=1 >> text=More like this")
    liked, others = slate[1].text, [one.text for one in slate if one is not slate[1]]
    n = len(others)
    votes = PreferenceSet.from_columns([example["prompt"]] * n, [liked] * n, others, [1] * n, [0] * n)
    expected = steer_by_choices(ScoredChoices.of(ensemble, votes), Voters.of(ensemble))
    assert page.is_checked("input[value=steerable]")
    assert f"{expected.average:.0%}".replace("%", "\u00a0%: of no member") in page.inner_text("#ask")


def test_a_member_or_words_can_steer(tab: Tab, page: Any) -> None:
    page.click("input[value=steerable]")
    page.click("text=Other ways to steer")
    tab.select("#member", "2")
    assert "Member 2 answers" in page.inner_text("#ask")
    page.click("text=Other ways to steer")
    page.fill("#like", "zzz")
    page.keyboard.press("Enter")
    tab.rest()
    assert "Words cannot steer this ensemble and changed nothing" in page.inner_text("#ask")


def test_a_page_without_voices_says_that_steering_cannot_help(
    tab: Tab, ensemble: RewardEnsemble, held_out: HeldOutVotes
) -> None:
    with running(replace(ensemble, choice_model=ChoiceModel()), held_out=held_out) as client:
        page = tab.open(f"{client.address}/")
        assert page.query_selector("text=More like this") is None
        tab.click("input[value=steerable]")
        assert "Steering cannot help" in page.inner_text("#ask")
        assert page.query_selector("[data-choice]") is None
        tab.select("#member", "2")
        assert "Member 2 answers" in page.inner_text("#ask")


def test_gibberish_has_no_share_on_the_page(tab: Tab, page: Any) -> None:
    page.fill("#prompt", "Shall we plant trees?")
    page.fill("#candidates", "asdf jkl qwer\n\nblue blue blue the the")
    for mode in ("balanced", "steerable", "distributional"):
        page.click(f"input[value={mode}]")
        if mode == "steerable":
            page.click("text=Other ways to steer")
            tab.select("#member", "1")
        tab.click(ASK)
        assert "Unlike anything these people voted on" in page.inner_text("#ask .results")
        assert "%" not in page.inner_text("#ask .results .answer")
    assert page.query_selector(".share") is None
    tab.click("#tab-compare")
    page.fill("#response-a", "blue blue blue the the")
    tab.click("#compare button[type=submit]")
    assert "No share of people is stated" in page.inner_text("#compare .results")


def test_the_size_of_a_slate_can_be_chosen_and_cards_have_one_number(tab: Tab, page: Any) -> None:
    assert len(page.query_selector_all(".slate .answer")) <= 3
    for size in ("1", "2"):
        tab.select("#slate-size", size)
        cards = page.query_selector_all(".slate .answer")
        assert len(cards) == int(size)
        for card in cards:
            header = card.query_selector("header").inner_text() + card.query_selector(".voices").inner_text()
            assert header.count("%") == 1


def test_a_line_says_for_how_long_the_language_model_writes(tab: Tab, address: str) -> None:
    page = tab.open(address, rewrite=lambda data: data | {"can_generate": True})
    held: list[Any] = []
    page.route("**/v1/answer", lambda route: held.append(route))
    page.fill("#prompt", "Shall we dance?")
    page.click(ASK)
    page.wait_for_selector("text=The language model is writing… 1 s")
    held[0].abort()
    tab.rest()
    assert not page.is_visible("text=The language model is writing")
    tab.messages.clear()  # the browser logs the failed request


# --- page figures -----------------------------------------------------------------------------------------------------


def test_points_show_their_pairs(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address + "#calibration")
    curve = shown["reliability"]
    page.wait_for_selector("svg .point")
    points = page.query_selector_all("svg .point")
    assert len(points) == len(curve)
    dots = page.query_selector_all(".point .dot")
    x, y = ([float(dot.get_attribute(name)) for dot in dots] for name in ("cx", "cy"))
    for drawn, key, sign in ((x, "predicted", 1), (y, "observed", -1)):
        values = [point[key] for point in curve]
        slope, offset = np.polyfit(values, drawn, 1)
        assert slope * sign > 0
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
    first = page.inner_text(".behind .pair b >> nth=0")
    assert first == curve[2]["pairs"][0]["prompt"], "a click keeps the point selected"


def test_figures_are_also_tables(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address + "#calibration")
    for summary in page.query_selector_all("figure summary"):
        summary.click()
    curve, sizes = page.query_selector_all("figure table")
    rows = [row.inner_text().split("\t")[0::3] for row in curve.query_selector_all("tbody tr")]
    assert rows == [[f"{point['predicted']:.3f}", f"{point['count']}"] for point in shown["reliability"]]
    text = sizes.inner_text()
    history = shown["history"]
    for value in [*(one["test_brier"] for one in history["points"]), *history["lines"].values()]:
        assert f"{value:.4f}" in text


def test_tables_and_the_worst_group_are_shown(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address + "#calibration", rewrite=lambda data: data | {"worst_group": "Worst group: <b>x</b>."})
    for table in shown["tables"]:
        rows = page.query_selector_all(f"[aria-label='{table['title']}'] tbody tr")
        cells = [[cell.text_content() for cell in row.query_selector_all("th, td")] for row in rows]
        assert [row[1:] for row in cells] == [row[1:] for row in table["rows"]]
        assert all(row[0].startswith(name) for row, (name, *_) in zip(cells, table["rows"], strict=True))
        assert table["note"] in page.inner_text("#calibration")
    assert "Worst group: <b>x</b>." in page.inner_text("#calibration")


def test_the_headline_comes_first_and_marks_the_row_that_counts(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address + "#calibration")
    headline = shown["headline"]
    lines = page.inner_text("#calibration .headline").split("\n\n")
    assert lines == [headline["main"], headline["verdict"], f"Next: {headline['next_step']}"]
    first = "#calibration > h2:first-child + .headline"
    assert page.query_selector(first), "nothing is between the heading and the headline"
    (row,) = page.query_selector_all("[aria-label='Comparison with baselines'] tr.own")
    assert row.inner_text().startswith("→ ensemble: votes\nthe weight of the members that vote for an answer")


def test_a_floor_that_was_not_measured_is_not_drawn(tab: Tab, address: str) -> None:
    def without(data: dict[str, Any]) -> dict[str, Any]:
        return data | {"history": data["history"] | {"lines": {}}}

    page = tab.open(address + "#calibration", rewrite=without)
    assert page.query_selector_all("svg .floor, svg .band") == []
    assert "Floor:" not in page.inner_text("#calibration")
    assert tab.open(address + "#calibration").query_selector_all("svg .floor")


def test_pairs_left_out_and_cross_validation_are_reported(tab: Tab, address: str) -> None:
    sentence = "Left out 80 prompts (1,544 pairs) that were used for training."
    more = {"left_out": sentence, "cross_validated": True}
    page = tab.open(address + "#calibration", rewrite=lambda data: data | more)
    text = page.inner_text("#calibration")
    assert sentence in text
    assert "Cross-validated: each prompt is predicted by an ensemble that was fitted without it." in text
    assert "; cross-validated." in page.inner_text("#lead")


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
    assert texts_of(page, ".distances .percent") == [percent(card["disagreement"]) for card in shown["members"]]


def test_the_page_reports_a_sample(tab: Tab, address: str) -> None:
    sentence = "Traits, words and rankings use a random sample of 250 of the 9,375 prompts."
    page = tab.open(address + "#members", rewrite=lambda data: data | {"read": {"prompts": 250, "of": 9375}})
    assert sentence in plain(page.inner_text("#members"))
    assert "random sample" not in tab.open(address + "#members").inner_text("#members")


def test_the_heat_map_has_every_tau_and_names_the_most_different_members(
    tab: Tab, address: str, shown: dict[str, Any]
) -> None:
    page = tab.open(address + "#members")
    labels = [cell.get_attribute("aria-label").split("τ ")[1] for cell in page.query_selector_all(".heat tbody td")]
    tau = np.array(shown["tau"]["tau"])
    assert [float(label.replace("−", "-")) for label in labels] == pytest.approx(tau.ravel(), abs=0.006)
    i, j = divmod(int(tau.argmin()), len(tau))
    sentence = page.inner_text(".pairing")
    assert all(shown["members"][member]["name"] in sentence for member in (i, j))
    assert f"order {percent((1 - tau[i, j]) / 2)} of all pairs of answers differently" in sentence


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
    tab.click("text=Another example")
    assert page.input_value("#response-a") == shown["steering_pairs"][1]["response_a"]
    assert "In the data" in page.inner_text("#compare")


def test_compare_shows_the_undecided_share(tab: Tab, ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
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
        assert "Undecided share: 40 %" in page.inner_text("#lead")


def test_a_failed_comparison_clears_the_previous_one(tab: Tab, address: str) -> None:
    page = tab.open(address + "#compare")
    assert "are predicted to prefer A" in page.inner_text("#compare .results")
    page.route("**/v1/explain", lambda route: route.fulfill(status=400, json={"error": {"message": "Too long."}}))
    tab.click("#compare button[type=submit]")
    assert texts_of(page, "#compare [role=alert]") + texts_of(page, "#compare .results") == ["Too long.", ""]
    tab.messages.clear()  # the browser logs every status of 400
