"""The page in a real browser: navigation, API keys, errors, hostile texts, small screens and colours."""

import re
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from page_browser import TABS, Tab, percent, plain
from served import running

from pluralign.ensemble.ensemble import RewardEnsemble

RUNS = "window.owned = true"
HOSTILE = (
    f"<script>{RUNS}</script><img src=x onerror='{RUNS}'><svg onload='{RUNS}'><a href='javascript:{RUNS}'>x</a>"
    f"\"' onfocus='{RUNS}' autofocus x=' &lt;b&gt; {{{{7*7}}}} ${{{RUNS}}} \u202eright to left\u202d\u2066\x00😀"
)
ENDLESS = "W" * 10_000


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
