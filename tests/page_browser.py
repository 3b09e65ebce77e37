"""A tab of a real browser for tests of the page: it records messages, and checks that no injected script ran."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

ASK = "#ask form button[type=submit]"
TABS = ("ask", "calibration", "members", "compare")


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
            self.page.route("**/v1/ensemble", lambda route: route.fulfill(json=rewrite(route.fetch().json())))
        self.page.goto(address)
        self.page.wait_for_selector("#tabs:not([hidden])")
        self.rest()
        return self.page

    def refuse(self, dialog: Any) -> None:
        self.messages.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def click(self, selector: str) -> None:
        self.page.click(selector)
        self.rest()

    def select(self, selector: str, value: str) -> None:
        self.page.select_option(selector, value)
        self.rest()

    def rest(self) -> None:
        """Wait until no request is running."""
        self.page.wait_for_timeout(30)
        self.page.wait_for_selector("[aria-busy=true]", state="detached")

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Run a test; afterwards there must be no messages, and no injected script may have run."""
        self.messages.clear()
        yield
        assert self.messages == []
        assert self.page.evaluate("window.owned") is None


@contextmanager
def new_tab(browser: Any) -> Iterator[Tab]:
    """Open a tab that records console messages, errors and dialogs."""
    tab = Tab(browser.new_page())
    tab.page.set_default_timeout(15_000)
    tab.page.on("console", lambda message: tab.messages.append(message.text))
    tab.page.on("pageerror", lambda error: tab.messages.append(str(error)))
    tab.page.on("dialog", tab.refuse)
    yield tab
    tab.page.close()


def page_data(address: str) -> dict[str, Any]:
    """Return the data of the page, as the server sends it."""
    with urllib.request.urlopen(f"{address}v1/ensemble") as reply:
        data: dict[str, Any] = json.load(reply)
        return data


def percent(share: float) -> str:
    return f"{int(100 * share + 0.5)}\u00a0%"


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")
