"""What people read in the terminal: results as tables, histograms and panels, drawn with rich.

Draws what other modules returned and computes no result of its own. Text from data is never read as markup.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pluralign.demo import TownHall
from pluralign.ensemble import RewardEnsemble
from pluralign.inspection import Inspection, Truth
from pluralign.walkthrough import Told

EXAMPLE_TEXT_LENGTH = 400
BAR_WIDTH = 40
PANEL_WIDTH = 100
USED = 1e-6
"""A member with less weight than this takes no part."""


def show(parts: Iterable[RenderableType]) -> None:
    """Print each part on stdout; where that is no terminal, as plain text."""
    console = Console(highlight=False)
    for part in parts:
        console.print(part, markup=False)


def number(value: float) -> str:
    """Four decimals, or a dash where there is no value.

    Example:
        >>> number(0.07812), number(float("nan"))
        ('0.0781', '–')
    """
    return "–" if math.isnan(value) else f"{value:.4f}"


def figures(title: str, *headings: str) -> Table:
    """An empty table whose first column is names and whose others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", caption_justify="left", title_style="italic")
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position else "left", no_wrap=bool(position))
    return table


def inspection_page(facts: Inspection) -> Iterator[RenderableType]:
    """What ``pluralign inspect`` shows: size, remarks, the bars to beat and a histogram of the majority share."""
    low, high = facts.votes_per_pair_range
    each = f"{low}" if low == high else f"{facts.votes_per_pair:.2f} ({low} to {high})"
    yield Text(f"\n{facts.name or 'votes'}", style="bold")
    yield Text(
        f"{facts.pairs:,} pairs · {facts.prompts:,} prompts · {facts.responses:,} distinct responses · "
        f"{facts.votes:,} votes, {each} a pair"
    )
    for line in _remarks(facts):
        yield Text(f"· {line}", style="dim")
    yield Text()
    yield _bars_to_beat(facts)
    yield from _histogram(facts)


def _bars_to_beat(facts: Inspection) -> Table:
    table = figures("Squared error of the simplest predictions", "", "Brier", "corrected", "95 % over prompts")
    table.add_column("what it is", justify="left")
    bars = (
        ("floor", facts.floor, facts.floor_corrected, "a perfect single reward"),
        ("constant ½", facts.constant_half, facts.constant_half_corrected, "always half and half"),
    )
    for name, value, corrected, meaning in bars:
        key = "floor_corrected" if name == "floor" else "constant_half_corrected"
        interval = facts.intervals.get(key)
        span = f"{number(interval.low)} – {number(interval.high)}" if interval else ""
        table.add_row(name, number(value), number(corrected), span, meaning)
    table.add_row("noise", number(facts.noise), "", "", "error of the true shares")
    table.caption = "corrected = Brier − noise: an unbiased estimate of the error against all people, not these few"
    return table


def _remarks(facts: Inspection) -> Iterator[str]:
    if facts.ties and facts.tie_rule == "half":
        yield f"{facts.ties:,} ties count half a vote for each side"
    elif facts.ties:
        share = f"{facts.majority_share_of_all:.3f}"
        yield f"{facts.ties:,} ties do not count; with them in the denominator the majority share is {share}"
    if facts.single_vote_pairs:
        share = "all" if facts.single_vote_pairs == facts.pairs else f"{facts.single_vote_pairs:,}"
        yield f"{share} pairs have one vote: no disagreement can be seen there, and corrected figures leave them out"
    if facts.empty_responses:
        yield f"{facts.empty_responses:,} pairs have an empty response; people voted on it, so it is kept"
    if facts.a_wins > 0.9:
        yield f"response a wins {facts.a_wins:.0%} of the pairs: the data were turned majority-first"
    if facts.splits:
        yield "official split: " + ", ".join(f"{name} {count:,}" for name, count in facts.splits.items())
    for kind, count in facts.dropped.items():
        yield f"left out: {count:,} {kind}"


def _histogram(facts: Inspection) -> Iterator[RenderableType]:
    kinds = ", ".join(f"{count / facts.pairs:.0%} {name}" for name, count in facts.strata.items())
    yield Text(f"Share of people on the majority's side: mean {facts.majority_share:.3f} ({kinds})", style="italic")
    tallest = max(bar.count for bar in facts.histogram)
    for bar in facts.histogram:
        label = f"{bar.low:.3f}" if bar.low == bar.high else f"{bar.low:.2f} – {bar.high:.2f}"
        blocks = "█" * round(BAR_WIDTH * bar.count / tallest) or ("▏" if bar.count else "")
        yield Text(f"  {label} {blocks} {bar.count / facts.pairs:.1%}")
    yield Text()


def example_pairs(town: TownHall) -> Iterator[RenderableType]:
    """The most contested pair of a town hall and the clearest one, as people would read them."""
    votes = town.preferences
    closeness = np.abs(town.true_prob - 0.5)
    for title, row in (("The town is split on this", closeness.argmin()), ("and agrees here", closeness.argmax())):
        sides = [
            f"{name} · {count[row]} votes\n{_shortened(votes.responses[index[row]])}"
            for name, index, count in (("A", votes.a_index, votes.votes_a), ("B", votes.b_index, votes.votes_b))
        ]
        truth = f"In the whole town {town.true_prob[row]:.0%} prefer A."
        body = "\n\n".join([f"“{votes.prompts[votes.prompt_index[row]]}”", *sides, truth])
        yield Panel(Text(body), title=title, title_align="left", width=PANEL_WIDTH)


def _shortened(text: str) -> str:
    return text if len(text) <= EXAMPLE_TEXT_LENGTH else text[: EXAMPLE_TEXT_LENGTH - 1].rstrip() + "…"


def truth_table(facts: Inspection, truth: Truth) -> RenderableType:
    """Estimates from few votes beside the truth that only a town hall knows."""
    table = figures("Here the truth is known: do the estimates hold?", "", "in the votes", "estimated", "true")
    table.add_row("noise", "", number(facts.noise), number(truth.noise))
    table.add_row("constant ½", *map(number, (facts.constant_half, facts.constant_half_corrected, truth.constant_half)))
    table.add_row("floor", *map(number, (facts.floor, facts.floor_corrected, truth.floor)))
    table.add_row("majority share", number(facts.majority_share), "", number(truth.majority_share))
    table.caption = "The corrected floor is an optimist: its majorities were picked on the very votes it is judged by."
    return table


# --- fitting and evaluating -----------------------------------------------------------------------------------------

BASELINE_NAMES = {
    "floor": "floor",
    "constant_half": "constant ½",
    "soft_bt": "soft BT as σ(Δr)",
    "soft_bt_temperature": "soft BT, tempered",
    "hard_bt": "hard BT",
    "pair": "{r, −r}",
    "bootstrap": "bootstrap",
    "mean_variance": "mean–variance",
    "mixture": "mixture of BT",
}


class FitWatch:
    """A live table of k against Brier and floor on stderr while a fit runs; silent where that is no terminal."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.live: Live | None = None
        self.rows: list[Any] = []
        self.doing = ""
        self.floor = math.nan

    def __enter__(self) -> "FitWatch":
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def __call__(self, what: str, value: Any) -> None:
        """Take note of what the fit is doing."""
        if not self.console.is_terminal or what == "encode":
            return
        if self.live is None:
            self.live = Live(console=self.console, transient=True)
            self.live.start()
        if what == "floor":
            self.floor = value
        elif what == "record":
            self.rows.append(value)
        self.doing = {"baseline": f"fitting the baseline {value}", "choose": f"choosing {value}"}.get(what, "fitting")
        table = figures(self.doing, "k", "train", "held out", "corrected", "floor")
        for row in self.rows:
            cells = (row.train_brier, row.test_brier, row.test_brier_corrected, self.floor)
            table.add_row(str(row.k), *map(number, cells))
        self.live.update(table)


def fit_page(ensemble: RewardEnsemble, folder: str) -> Iterator[RenderableType]:
    """What ``pluralign fit`` shows: the ensemble beside its baselines, each size, and each member."""
    facts = ensemble.facts
    data = facts["data"]
    yield Text(f"\n{facts['method']} ensemble of {facts['k']}, fitted for the {facts['level']} level", style="bold")
    yield Text(
        f"learned from {data['train_pairs']:,} pairs of {data['train_prompts']:,} prompts, "
        f"judged on {data['test_pairs']:,} pairs of {data['test_prompts']:,} others"
    )
    yield Text()
    yield _comparison(facts)
    yield _history(facts)
    yield _members(facts)
    yield from _warnings(facts)
    fitting = facts["seconds"] - facts["seconds_encoding"]
    yield Text(f"Encoded in {facts['seconds_encoding']:.1f} s, fitted in {fitting:.1f} s, saved in {folder}.")
    yield Text(f"Next: pluralign evaluate {folder} VOTES, or pluralign compare {folder} PAIRS\n")


def evaluation_page(facts: Mapping[str, Any], title: str) -> Iterator[RenderableType]:
    """What ``pluralign evaluate`` shows: the same figures on other votes."""
    yield Text(f"\n{title}", style="bold")
    yield Text(f"{facts['pairs']:,} pairs of {facts['prompts']:,} prompts\n")
    yield _comparison(facts, "On these votes")
    yield _members(facts)
    yield from _warnings(facts)
    yield Text()


def _comparison(facts: Mapping[str, Any], title: str = "On prompts it has not seen") -> Table:
    """Every way to predict the share, best first, with the ensemble's two readings among them."""
    table = figures(title, "", "k", "Brier", "corrected", "95 %", "worst", "ours − it")
    worst = max(member["disagreement"] for member in facts["members"] if member["weight"] > USED)
    rows: list[tuple[tuple[Any, ...], str]] = []
    for level, name in (("vote", "ensemble: votes"), ("policy", "ensemble: policies")):
        own = facts["levels"][level]
        span = f"{_value(own['interval']['low'])} – {_value(own['interval']['high'])}"
        cells = (name, len(facts["members"]), own["brier"], own["brier_corrected"], span, worst, "")
        rows.append((cells, "bold" if level == facts["level"] else ""))
    for name, other in facts["baselines"].items():
        gap = other["difference"]
        difference = "" if gap["low"] is None else f"{gap['mean']:+.4f} [{gap['low']:+.4f}, {gap['high']:+.4f}]"
        own_worst = other["worst_disagreement"]
        label = BASELINE_NAMES.get(name, name)
        rows.append(((label, other["k"], other["brier"], other["brier_corrected"], "", own_worst, difference), ""))
    for (name, k, plain, corrected, span, own_worst, difference), style in sorted(rows, key=lambda row: row[0][2]):
        alone = "" if own_worst is None else f"{own_worst:.3f}"
        table.add_row(name, str(k), _value(plain), _value(corrected), span, alone, Text(difference), style=style)
    table.caption = (
        f"noise {_value(facts['test']['noise'])}; corrected = Brier − noise; worst = the most a member disagrees. "
        + _verdict(facts)
    )
    return table


def _verdict(facts: Mapping[str, Any]) -> str:
    rival = facts["baselines"].get("soft_bt")
    if rival is None or rival["difference"]["low"] is None:
        return ""
    gap = rival["difference"]
    standing = "ahead of" if gap["high"] < 0 else "behind" if gap["low"] > 0 else "level with"
    ratio = facts["test"]["brier"] / rival["brier"]
    return f"The ensemble is {standing} one soft BT read as σ(Δr): {ratio:.3f} × its Brier."


def _value(value: float | None) -> str:
    return number(math.nan if value is None else value)


def _history(facts: Mapping[str, Any]) -> Table:
    table = figures("By size", "k", "train Brier", "held-out Brier", "corrected")
    for row in facts["history"]:
        table.add_row(str(row["k"]), *map(_value, (row["train_brier"], row["test_brier"], row["test_brier_corrected"])))
    return table


def _members(facts: Mapping[str, Any]) -> Table:
    table = figures("Members", "", "weight", "disagreement", "regret")
    for position, member in enumerate(facts["members"]):
        cells = (f"{member[name]:.3f}" for name in ("weight", "disagreement", "regret"))
        table.add_row(f"member {position}", *cells, style="bold red" if _is_far(member) else "")
    table.caption = "disagreement: how often it and a random person prefer different responses; a coin has .500"
    return table


def _is_far(member: Mapping[str, float]) -> bool:
    return member["disagreement"] > 0.5 and member["weight"] > USED


def _warnings(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    if any(map(_is_far, facts["members"])):
        warning = "A member disagrees with people more than a coin does: do not tune a policy to it."
        yield Text(warning, style="bold red")
    if bound := facts.get("bound"):
        yield Text(
            f"Bound {bound['max_disagreement']:g} on disagreement: Brier {_value(bound['brier'])}, worst member "
            f"{bound['worst']:.3f}; without it {_value(bound['brier_without'])} and {bound['worst_without']:.3f}."
        )


def story_page(told: Sequence[Told], facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What the demo shows of its fits: every way to predict the town, by its true error."""
    data = facts["data"]
    table = figures(
        f"Learned from {data['train_pairs']:,} pairs, judged on {data['test_pairs']:,} of other prompts, best first",
        *("", "k", "Brier", "corrected", "true error", "worst member", "seconds"),
    )
    for one in told:
        cells = (one.brier, one.brier_corrected, one.true_error)
        worst = "" if one.worst_disagreement is None else f"{one.worst_disagreement:.3f}"
        seconds = "" if one.seconds is None else f"{one.seconds:.1f}"
        style = "bold" if one.name.startswith("joint") else ""
        table.add_row(one.name, str(one.k), *map(number, cells), worst, seconds, style=style)
    table.caption = (
        "true error: squared distance to the whole town's shares. corrected estimates it from the votes alone. "
        "A member whose disagreement is above .500 is further from people than a coin."
    )
    yield table
    yield _members(facts)
    yield from _warnings(facts)
    yield Text("Your own votes: pluralign inspect FILE, then pluralign fit FILE -o DIR\n")
