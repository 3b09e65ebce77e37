"""What people read in the terminal: results as tables, histograms and panels, drawn with rich.

Draws what other modules returned and computes no result of its own. Text from data is never read as markup.
"""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pluralign.analysis.certificate import Certificate, Statement
from pluralign.analysis.member_rankings import CaseStudy, Diversity
from pluralign.analysis.profiles import Profile
from pluralign.analysis.pruning import Pruning
from pluralign.answering.answer import Answer
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import worse_than_chance
from pluralign.evaluation.comparison import comparison, standing
from pluralign.experiments.demo_story import Story
from pluralign.theory.guarantees import outlier_weight_bound
from pluralign.votes.summary import Inspection, Truth
from pluralign.votes.town_hall.townhall import TownHall

EXAMPLE_TEXT_LENGTH = 400
BAR_WIDTH = 40
PANEL_WIDTH = 100


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
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", caption_justify="left", title_style="italic",
                  pad_edge=False)  # fmt: skip
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position else "left")
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
    """What ``pluralign evaluate`` shows: the figures on these votes, what is left of disagreement, groups, policies."""
    subject = facts["subject"]
    yield Text(f"\n{title}", style="bold")
    yield Text(f"{facts['pairs']:,} pairs of {facts['prompts']:,} prompts")
    if subject["note"]:
        yield Text(f"· {subject['note']}", style="dim")
    yield Text()
    yield _comparison(facts, "On these votes")
    if subject["k"] > 1:
        yield _members(facts)
    yield from _warnings(facts)
    yield _majority(facts)
    for grouping, rows in facts["groups"].items():
        yield _groups(grouping, rows)
    if worst := facts["worst_group"]:
        span = worst["interval"]
        yield Text(
            f"Worst group: {worst['name']} ({worst['grouping']}), corrected Brier {_value(worst['brier_corrected'])}, "
            f"{_value(span['low'])} – {_value(span['high'])} allowing for picking the worst of {worst['groups']}.\n"
        )
    yield _adversarial(facts["adversarial"])
    if facts["policy"]:
        yield _policy(facts["policy"], subject["temperature"])
    yield Text()


def _majority(facts: Mapping[str, Any]) -> Table:
    headings = ("people were", "pairs", "their majority", "predicted for it", "if it were right", "above .9")
    table = figures("What it makes of disagreement: mean share of the majority's side", *headings)
    for name, row in facts["majority"].items():
        shares = ("–" if row[key] is None else f"{row[key]:.3f}" for key in ("people", "predicted", "expected"))
        certain = "–" if row["certain"] is None else f"{row['certain']:.0%}"
        table.add_row(name, f"{row['pairs']:,}", *shares, certain)
    certain = facts["certain_though_contested"]
    table.caption = (
        "people's majorities rest on few votes; if it were right: the same for votes drawn from the prediction. "
        + ("" if certain is None else f"It gives one side more than .9 on {certain:.0%} of contested or even pairs.")
    )
    return table


def _groups(grouping: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = figures(f"By {grouping}", "", "pairs", "prompts", "corrected Brier", "residual")
    for row in rows:
        span, residual = row["interval"], row["residual"]
        corrected, lean = _value(row["brier_corrected"]), f"{residual['mean']:+.3f}"
        if span["low"] is not None:
            corrected += f" [{_short(span['low'])}, {_short(span['high'])}]"
        if residual["low"] is not None:
            lean += f" [{residual['low']:+.3f}, {residual['high']:+.3f}]"
        table.add_row(Text(row["name"]), f"{row['pairs']:,}", f"{row['prompts']:,}", Text(corrected), Text(lean))
    towards = "the longer response" if grouping == "length" else "the predicted majority (above 0: overconfident)"
    table.caption = f"in brackets 95 % over prompts; residual: predicted less observed share, towards {towards}"
    return table


def _adversarial(rows: Sequence[Mapping[str, Any]]) -> Table:
    headings = ("share of prompts", "prompts", "worst error", "if it were right", "95 % below")
    table = figures("Worst calibration error of random groups", *headings)
    for row in rows:
        cells = (f"{row[key]:.4f}" for key in ("worst", "expected", "high"))
        style = "bold" if row["worst"] > row["high"] else ""
        table.add_row(f"{row['fraction']:.0%}", f"{row['prompts']:,}", *cells, style=style)
    table.caption = "if it were right: the same for votes drawn from the prediction, so only noise"
    return table


def _policy(policy: Mapping[str, Any], temperature: float | None) -> Table:
    reference = policy["reference"]
    extra = (f"Brier with {reference}", "corrected") if reference else ()
    table = figures("As policies, by β", "β", "Brier", "corrected", *extra)
    for row in policy["rows"]:
        keys = ["brier", "brier_corrected"] + ["brier_reference", "brier_corrected_reference"] * bool(reference)
        own = " (fitted)" if row["beta"] == temperature else ""
        label = f"{row['beta']:.4g}{own}" if row["beta"] else "→ 0, the votes"
        table.add_row(label, *(_value(row[key]) for key in keys), style="bold" if own else "")
    return table


def _comparison(facts: Mapping[str, Any], title: str = "On prompts it has not seen") -> Table:
    """Every way to predict the share, best first, with the ensemble's two readings among them."""
    table = figures(title, "", "k", "Brier", "corrected", "worst", "ours − it, 95 %")
    for row in comparison(facts):
        if row.interval:
            span = f"({_value(row.interval['low'])} – {_value(row.interval['high'])})"
        else:
            gap = row.difference
            span = f"{gap['mean']:+.4f} [{_short(gap['low'])}, {_short(gap['high'])}]" if gap else ""
        cells = (Text(row.name), str(row.k), _value(row.brier), _value(row.brier_corrected))
        worst = "" if row.worst is None else f"{row.worst:.3f}"
        table.add_row(*cells, worst, Text(span), style="bold" if row.judged else "")
    table.caption = (
        f"noise {_value(facts['test']['noise'])}; corrected = Brier − noise, its own 95 % in brackets; "
        "worst = the most a member disagrees. " + _verdict(facts)
    )
    return table


def _short(value: float) -> str:
    """Signed and without the leading zero, so that tables fit 80 columns."""
    return f"{value:+.4f}".replace("0.", ".", 1)


def _verdict(facts: Mapping[str, Any]) -> str:
    rival_name, words = ("soft_bt", "one soft BT read as σ(Δr)")
    who = "The ensemble"
    if facts.get("subject", {}).get("kind", "ensemble") != "ensemble":
        rival_name, words, who = "constant_half", "always saying one half", "The bold reading"
    rival = facts["baselines"].get(rival_name)
    if rival is None or rival["difference"]["low"] is None:
        return ""
    ratio = facts["test"]["brier"] / rival["brier"]
    return f"{who} is {standing(rival['difference'])} {words}: {ratio:.3f} × its Brier."


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
    return worse_than_chance(member["disagreement"], member["weight"])


def _warnings(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    if any(map(_is_far, facts["members"])):
        warning = "A member disagrees with people more than a coin does: do not tune a policy to it."
        yield Text(warning, style="bold red")
    if bound := facts.get("bound"):
        yield Text(
            f"Bound {bound['max_disagreement']:g} on disagreement: Brier {_value(bound['brier'])}, worst member "
            f"{bound['worst']:.3f}; without it {_value(bound['brier_without'])} and {bound['worst_without']:.3f}."
        )


# --- pruning and certificates ---------------------------------------------------------------------------------------


def pruning_page(pruning: Pruning, before: RewardEnsemble, folder: str = "") -> Iterator[RenderableType]:
    """What ``pluralign prune`` shows: who is how far out, who went, and the error before and after."""
    count, k = len(pruning.removed), before.k
    if count:
        who = ", ".join(map(str, pruning.removed))
        what = f"Removed {count} of {k} members ({who}), {pruning.removed_weight:.3f} of the weight"
    else:
        what = f"Nothing was removed: all {k} members stay"
    yield Text(f"\n{what} (β = {pruning.beta:g}: at most {outlier_weight_bound(pruning.beta):.3f})", style="bold")
    yield Text()
    members = figures("Members", "", "weight", "distance", "disagreement", "")
    for j in sorted(range(k), key=lambda j: -pruning.distances[j]):
        cells = (before.weights[j], pruning.distances[j], pruning.disagreements[j])
        fate = "removed" if j in pruning.removed else "stays"
        marked = f"{fate}, outlier" if j in pruning.outliers_before else fate
        style = "" if fate == "stays" else "red"
        members.add_row(f"member {j}", *(f"{cell:.3f}" for cell in cells), marked, style=style)
    members.caption = "distance: how often it and a random member prefer different responses; no people's votes in it"
    yield members
    costs = figures("Calibration error (corrected Brier of the votes)", "", "error", "95 % over prompts")
    for name, interval in (("before", pruning.error_before), ("after", pruning.error_after)):
        costs.add_row(name, number(interval.mean), f"{number(interval.low)} – {number(interval.high)}")
    gap = pruning.difference
    costs.add_row("difference", f"{gap.mean:+.4f}", f"{number(gap.low)} – {number(gap.high)}")
    costs.add_row("guaranteed: (√ε + 1/(β−1))²", number(pruning.bound), "")
    costs.add_row("guaranteed: (√ε + change of p̂)²", number(pruning.bound_after_shift), "")
    yield costs
    if pruning.epsilon_clipped:
        yield Text("The error before is estimated below 0, so ε = 0 was taken for the guarantees.", style="dim")
    if pruning.outlier_threshold >= 1:
        yield Text("At this β and ε an outlier would need a disagreement of 1 or more: nobody is flagged.", style="dim")
    yield Text(f"Saved in {folder}. Next: pluralign certify {folder}\n" if folder else "")


def certificate_page(certificate: Certificate, title: str) -> Iterator[RenderableType]:
    """What ``pluralign certify`` shows: each theorem in a line, its numbers here, and whether it says anything."""
    yield Text(f"\n{title}", style="bold")
    yield Text(f"{certificate.k} members, {certificate.pairs:,} pairs of {certificate.prompts:,} prompts\n")
    parts: dict[str, Statement] = {
        "Theorem 2: small size": certificate.theorem_2,
        "Theorem 3: outliers": certificate.theorem_3,
        "Theorem 4: from N pairs to all": certificate.theorem_4,
        "Lemma 1: noise of few votes": certificate.lemma_1,
        "Beyond the paper: held-out prompts": certificate.held_out,
    }
    for name, part in parts.items():
        verdict = ("says something here", "green") if part.informative else ("says nothing useful here", "yellow")
        yield Text.assemble((name, "bold"), "  ", verdict)
        yield Text(part.states, style="italic")
        yield Text(f"{part.here}\n")


# --- rankings -------------------------------------------------------------------------------------------------------

RANKINGS_SHOWN = 10


def rankings_page(facts: Mapping[str, Any], title: str) -> Iterator[RenderableType]:
    """What ``pluralign rankings`` shows: the verdict, its reason, and the ensemble of rankings."""
    names, count = facts["alternatives"], len(facts["rankings"])
    possible = len(names) * (len(names) - 1) // 2
    compared = "all" if facts["pairs"] == possible else "the other pairs are free"
    yield Text(f"\n{title}", style="bold")
    yield Text(f"{len(names)} alternatives, {facts['pairs']:,} of {possible:,} pairs compared ({compared})\n")
    yield from _realizable(facts)
    table = figures(f"{count} rankings", "weight")
    table.add_column("ranking, best first", overflow="fold")
    for weight, ranking in list(zip(facts["weights"], facts["rankings"], strict=True))[:RANKINGS_SHOWN]:
        table.add_row(number(weight), Text(" > ".join(names[place] for place in ranking)))
    yield table
    if count > RANKINGS_SHOWN:
        rest = sum(facts["weights"][RANKINGS_SHOWN:])
        yield Text(f"{count - RANKINGS_SHOWN} more hold {rest:.4f} of the weight; --json lists them.")
    yield Text(
        f"No more than {facts['size_at_most']} are ever needed (Carathéodory). Other rankings can give the same "
        "shares: these need not be anybody's own.\n"
    )
    if sample := facts.get("sample"):
        yield Text(
            f"{sample['k']:,} rankings drawn from it, equally weighted: calibration error {sample['error']:.5f} to it; "
            f"expected {sample['expected_error']:.5f}, and never above 1/(4k) = {sample['bound']:.5f} on average "
            "(Theorem 2).\n"
        )
    here = (
        f"{len(names)} are few enough, so this was decided exactly."
        if facts["exact"]
        else f"{len(names)} are too many, so rankings were searched: finding them is a proof, not finding them is none."
    )
    yield Text(
        "Telling whether shares come from rankings is NP-hard (Theorem 1): the work of every known exact method grows "
        f"exponentially with the number of alternatives. {here}\n",
        style="dim",
    )


def _realizable(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    distance, least = facts["distance"], facts["distance_at_least"]
    if facts["realizable"]:
        yield Text("Realizable: the rankings below give every share.", style="bold green")
        yield Text(f"No share is missed by more than {facts['residual']:.0e}.\n")
        return
    if facts["realizable"] is None:
        yield Text("Not decided: no rankings were found that give every share, nor a proof that there are none.\n")
    else:
        yield Text("Not realizable: no mixture of rankings gives these shares.", style="bold red")
        yield Text(f"{facts['certificate']['in_words']}\n")
    nearest = "The nearest mixture has" if facts["exact"] else f"The nearest found (at least {least:.6f} is sure) has"
    yield Text(
        f"{nearest} calibration error {distance:.6f}, the mean squared difference over pairs; its largest is "
        f"{facts['residual']:.4f}.\n"
    )


# --- members side by side -------------------------------------------------------------------------------------------


def diversity_page(found: Diversity, cases: Sequence[CaseStudy], title: str) -> Iterator[RenderableType]:
    """What ``pluralign diversity`` shows: tau between members as a heat map, and choices side by side."""
    yield Text(f"\n{title}", style="bold")
    yield Text(f"{found.candidates:,} responses to {found.prompts:,} prompts, ranked by {len(found.tau)} members\n")
    yield _heat_map(found)
    tops = found.tops
    yield Text(
        f"Mean τ between two members {_signed(found.mean_off_diagonal)} "
        f"(± {number(found.mean_off_diagonal_standard_error)} over prompts), counted by weight "
        f"{_signed(found.weighted_off_diagonal)}."
    )
    yield Text(
        f"Members put {tops.distinct:.2f} different responses first ({tops.distinct_if_random:.2f} if they chose at "
        f"random); the most popular one has {tops.most_popular:.0%} of the weight."
    )
    for pairs, what in ((found.near_copies, "almost the same way"), (found.near_opposites, "almost the opposite way")):
        for pair in pairs:
            i, j = pair.members
            yield Text(f"Members {i} and {j} rank responses {what}: τ {_signed(pair.tau)}.", style="bold")
    if any(found.constant):
        told = ", ".join(f"{j} on {count:,}" for j, count in enumerate(found.constant) if count)
        yield Text(f"Left out where a member gives all responses one reward: member {told} prompts.", style="dim")
    if found.skipped:
        yield Text(f"{found.skipped:,} prompts with a single response were skipped.", style="dim")
    for case in cases:
        yield _case_panel(case)
    yield Text()


def _heat_map(found: Diversity) -> Table:
    k = len(found.tau)
    table = figures("Kendall's τ between members, averaged over prompts", "", "weight", *map(str, range(k)))
    for i, row in enumerate(found.tau):
        cells = [Text(_signed(tau), style=_heat(tau)) for tau in row]
        cells[i] = Text("·", style="dim")
        table.add_row(f"member {i}", f"{found.weights[i]:.3f}", *cells)
    table.caption = "1 identical rankings, 0 random ones, −1 reversed: lower is more diverse"
    return table


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:+.2f}".replace("-", "−")


def _heat(tau: float) -> str:
    """Blue for rankings alike, red for reversed ones, the paler the nearer to none."""
    if math.isnan(tau):
        return "dim"
    pale = round(255 * (1 - min(abs(tau), 1)))
    return f"black on rgb({pale},{(255 + pale) // 2},255)" if tau >= 0 else f"black on rgb(255,{pale},{pale})"


def _case_panel(case: CaseStudy) -> Panel:
    body = [f"“{_shortened(case.prompt)}”"]
    for choice in case.choices:
        who = f"member{'s' * (len(choice.members) > 1)} {', '.join(map(str, choice.members))}"
        body.append(f"{who} · {choice.weight:.0%} of the weight\n{_shortened(choice.response)}")
    title = f"Prompt {case.number}: the members' choices among {case.candidates:,} responses"
    return Panel(Text("\n\n".join(body)), title=title, title_align="left", width=PANEL_WIDTH)


def _counted(remarks: Iterable[tuple[int, str]]) -> Iterator[Text]:
    """What happened at all, with how often."""
    for count, what in remarks:
        if count:
            yield Text(f"· {count:,} {what}", style="dim")


def generation_page(facts: Mapping[str, Any], n: int) -> Iterator[RenderableType]:
    """What ``pluralign generate`` shows: what was sampled, what was left out, and which prompts failed."""
    yield Text(f"\n{facts['file']}", style="bold")
    yield Text(
        f"{facts['responses']:,} responses to {facts['lines']:,} of {facts['prompts']:,} prompts, "
        f"{facts['model']}, {facts['seconds']:.0f} s"
    )
    remarks = (
        (facts["resumed"], "prompts were there from an earlier run"),
        (facts["repeats"], "responses came again and count once"),
        (facts["empty"], "responses had no text and are left out"),
        (facts["cut_off"], "responses were cut off; a higher --max-new-tokens lets them end"),
        (facts["short"], f"prompts have fewer than {n} different responses, however often they were sampled"),
        (len(facts["failed"]), f"prompts failed; they are in {facts['file']}.failed, and the same command tries again"),
    )
    yield from _counted(remarks)
    for failure in facts["failed"][:3]:
        yield Text(f"  {failure['error']}", style="red")
    yield Text()


def shards_page(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What ``pluralign encode`` and ``pluralign score -o`` show: what is in the folder, and what was there before."""
    made = f"vectors of {facts['dimension']:,} numbers" if "dimension" in facts else f"rewards of {facts['k']} members"
    yield Text(f"\n{facts['folder']}", style="bold")
    yield Text(f"{facts['rows']:,} texts, {made}, in {facts['shards']:,} shards, {facts['seconds']:.0f} s")
    yield from _counted([(facts["resumed"], "shards were there from an earlier run")])
    yield Text()


def tuning_page(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What ``pluralign tune`` shows: rewards before and after, KL, the cross table, answers, and how to serve."""
    policies = facts["members"]
    yield Text(f"\n{facts['folder']}: {len(policies)} policies", style="bold")
    yield Text(
        f"{facts['model']}, {facts['method']} · {facts['prompts']:,} prompts to train on, "
        f"{facts['held_out']:,} held out · {facts['seconds']:.0f} s"
    )
    remarks = (
        (facts["resumed"], "members were tuned by an earlier run"),
        (facts["too_long"], "prompts do not fit the model's window with a response, and are left out"),
        (facts["bad_rows"], "rows hold no prompt, and are left out"),
    )
    yield from _counted(remarks)
    yield Text()
    title = "Reward by its own member on held-out prompts, in standard deviations of the base's answers to a prompt"
    table = figures(title, "policy", "before", "after", "95 % of the gain", "KL, nats", "tokens")
    for policy in policies:
        low, high = policy["interval"]
        table.add_row(
            Text(f"{policy['member']} {policy['name']}"),
            f"{policy['reward_before']:+.2f}",
            f"{policy['reward_after']:+.2f}",
            f"{low:+.2f} – {high:+.2f}",
            f"{policy['kl']:.2f} ± {policy['kl_standard_error']:.2f}",
            f"{policy['tokens']:.0f}",
        )
    table.caption = f"the base writes {facts['base_tokens']:.0f} tokens"
    yield table
    for policy in policies:
        if not policy["improved"]:
            yield Text(
                f"! The reward of member {policy['member']} did not go up: its interval includes 0 or lies below. "
                "Give it more steps or prompts, a higher --learning-rate or a lower --beta.",
                style="yellow",
            )
    for note in facts["notes"]:
        yield Text(f"! {note}", style="yellow")
    if len(policies) > 1:
        names = [f"by {policy['member']}" for policy in policies]
        cross = figures("Rewards of each policy by each member", "policy", *names)
        cross.add_row("base", *(f"{value:+.2f}" for value in facts["base"]))
        for policy, row in zip(policies, facts["matrix"], strict=True):
            cross.add_row(str(policy["member"]), *(f"{value:+.2f}" for value in row))
        yield cross
    for policy in policies:
        for sample in policy["samples"][:1]:
            prompt = sample["prompt"] if isinstance(sample["prompt"], str) else sample["prompt"][-1]["content"]
            texts = (f"“{prompt}”", f"before: {sample['before']}", f"after: {sample['after']}")
            body = Text("\n".join(_shortened(_visible(text)) for text in texts))
            yield Panel(body, title=f"Policy {policy['member']}", title_align="left", width=PANEL_WIDTH)
    yield Text("Serve base and adapters with vLLM, and draw an adapter for each request with these weights:")
    weights = facts["serving"]["weights"].items()
    yield Text("  " + ", ".join(f"{name} {weight:.3f}" for name, weight in weights))
    yield Text(f"  cd {shlex.quote(facts['folder'])} && {facts['serving']['command']}\n")


def _visible(text: str) -> str:
    """Text in one line, without control characters that would move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)


def plan_page(plan: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What ``pluralign reproduce --dry-run`` shows: steps, needs, and what it is reckoned to cost."""
    recipe, cost = plan["recipe"], plan["cost"]
    yield Text(f"\n{recipe['title']}: what would be done", style="bold")
    for position, step in enumerate(plan["steps"], 1):
        yield Text(f"{position}. {step['does']}")
        yield Text(f"   {shlex.join(step['command'])}", style="dim")
    yield Text("\nIt needs", style="bold")
    for line in plan["needs"]:
        yield Text(f"· {line}")
    yield Text()
    table = figures(f"Reckoned for Meta-Llama-3-8B, {recipe['fit']['k']} members, one H100", "", "GPU-hours", "train")
    for heading in ("score", "sample", "rank", "memory GB", "disk GB"):
        table.add_column(heading, justify="right")
    first = f"{'LoRA' if cost['lora'] else 'full'}, {cost['optimizer']}"
    names = [f"{part}_hours" for part in ("gpu", "training", "scoring", "generation", "ranking")]
    names += ["memory_gb", "disk_gb"]
    for way, of_way in {first: cost, **plan["alternatives"]}.items():
        table.add_row(way, *(f"{of_way[name]:.{0 if name.endswith('gb') else 1}f}" for name in names))
    yield table
    size, sampled = recipe["size"], recipe["candidates"]
    text = size["prompt_tokens"] + size["response_tokens"]
    flops = cost["training_flops"] + cost["optimizer_flops"]
    share = cost["optimizer_flops"] / cost["training_flops"]
    for line in (
        f"{size['train_pairs']:,} training pairs × 2 texts × {text:,} tokens (assumed) = {cost['train_tokens']:,} "
        f"tokens a member, in {cost['steps']:,} steps",
        f"training {flops:.1e} operations, of which {cost['optimizer']} adds {share:.1%}; scoring all texts "
        f"{cost['scoring_flops']:.1e}",
        f"{sampled['limit']} prompts × {sampled['n']} = {cost['continuations']:,} continuations of at most "
        f"{sampled['max_new_tokens']} tokens",
        f"memory and disk with what is trained in FP32, as fit does it; all in BF16 it were "
        f"{cost['bf16_memory_gb']:.0f} GB of memory",
        *recipe["notes"],
    ):
        yield Text(f"· {line}", style="dim")
    yield Text("Formulas and assumptions: docs/reproduce.md\n", style="dim")


def reproduction_page(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What ``pluralign reproduce`` shows in the end: the paper's table and its two figures, as found here."""
    yield Text(f"\n{facts['name']} in {facts['folder']}", style="bold")
    if facts["tiny"]:
        yield Text("A rehearsal: votes and model are made up, and no figure means anything.", style="yellow")
    table = figures("Table 1", "", "paper", "here", "")
    for row in facts["table"]:
        paper, here = (f"{value:,.2f}" if value % 1 else f"{value:,.0f}" for value in (row["paper"], row["here"]))
        table.add_row(row["name"], paper, here, "as in the paper" if row["close"] else "")
    yield table
    table = figures("Figure 2: squared error by size", "k", "train", "held out")
    for stage in facts["history"]:
        table.add_row(str(stage["k"]), number(stage["train_brier"]), number(stage["test_brier"]))
    table.add_row("floor", "", number(facts["floor"]))
    yield table
    below = facts["members_below_floor"]
    yield Text(f"The floor is passed with {below} members." if below else "No size passes the floor.")
    tau = float("nan") if facts["mean_tau"] is None else facts["mean_tau"]
    yield Text(f"Figure 3: Kendall's τ between members is {number(tau)} on average.")
    if facts["skipped"]:
        yield Text(f"Done in an earlier run: {', '.join(facts['skipped'])}.", style="dim")
    yield Text(f"Report: {facts['report']}\n")


def profile_page(cards: Sequence[Profile], title: str) -> Iterator[RenderableType]:
    """What ``pluralign profile`` shows: a card for each member."""
    yield Text(f"\n{title}\n", style="bold")
    for card in cards:
        yield Panel(
            _card(card), title=Text(f"Member {card.member}: {card.name}"), title_align="left", width=PANEL_WIDTH
        )
    yield Text(
        "A claim is made only if chance would show a lean as large on any of these cards in less than 5 % of cases, "
        "for traits and for words.\n",
        style="dim",
    )


def _card(card: Profile) -> Text:
    text = Text(f"weight {card.weight:.3f} · disagreement {card.disagreement:.3f}\n{card.description}")
    for words, what in ((card.likes, "words it is drawn to"), (card.dislikes, "words it turns from")):
        if words:
            text.append(f"\n{what}: ", style="italic")
            text.append(", ".join(lean.trait for lean in words))
    for pair in card.distinguishing[:1]:
        text.append("\n\nIt stands apart here: ", style="italic")
        text.append(f"“{_shortened(pair.prompt)}”")
        text.append("\nprefers ", style="italic")
        text.append(_shortened(pair.preferred))
        text.append("\nto ", style="italic")
        text.append(_shortened(pair.other))
        text.append(
            f"\nwith {pair.weight_with_it:.0%} of the weight and {pair.people_with_it:.0%} of {pair.votes} people.",
            style="italic",
        )
    return text


def story_page(story: Story) -> Iterator[RenderableType]:
    """What the demo shows: every way to predict the town, by its true error, then the joint ensemble closely."""
    facts = story.ensemble.facts
    data = facts["data"]
    table = figures(
        f"Learned from {data['train_pairs']:,} pairs, judged on {data['test_pairs']:,} of other prompts, best first",
        *("", "k", "Brier", "corrected", "true error", "worst member", "seconds"),
    )
    for one in story.told:
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
    yield from _warnings(facts)
    yield _names(story.study.profiles)
    if story.study.diversity:
        yield from diversity_page(story.study.diversity, [], "How differently they rank")
    yield from certificate_page(story.study.certificate, "What is guaranteed")
    yield from pruning_page(story.pruning, story.ensemble)
    yield from rankings_page(story.rankings, f"One question to the whole town: “{story.question}”")
    yield Text("Your own votes: pluralign inspect FILE, then pluralign fit FILE -o DIR\n")


def _names(cards: Sequence[Profile]) -> Table:
    table = figures("The joint ensemble's members, and what sets them apart", "", "weight", "disagreement")
    table.add_column("card", justify="left")
    for card in cards:
        style = "bold red" if worse_than_chance(card.disagreement, card.weight) else ""
        numbers = (f"{card.weight:.3f}", f"{card.disagreement:.3f}")
        table.add_row(f"member {card.member}", *numbers, Text(card.name), style=style)
    table.caption = "disagreement: how often it and a random person prefer different responses; a coin has .500"
    return table


def answer_page(found: Answer, prompt: str, names: Mapping[int, str]) -> Iterator[RenderableType]:
    """What ``pluralign answer`` shows: each answer with who stands behind it, and why."""
    yield Text(f"\n“{prompt}”", style="bold")
    for note in found.notes:
        yield Text(f"· {note}", style="dim")
    if found.steering:
        yield Text(f"Member {found.steering.member}, {found.steering.sure:.0%} sure: {found.steering.why}.")
        if found.steering.path:
            yield _sharpening(found.steering.path)
    for given in found.answers:
        if given.member is None:
            yield Panel(Text(given.text), title="refused", title_align="left", width=PANEL_WIDTH)
            continue
        who = "; ".join(f"{j} {names[j]}" if j in names else f"member {j}" for j in given.members)
        bar = "█" * round(BAR_WIDTH / 2 * given.weight)
        body = Text.assemble((f"{bar} {given.weight:.0%} of the weight · {who}\n\n", "dim"), given.text)
        title = "answer" if found.mode != "balanced" else f"member {given.member}'s pick"
        yield Panel(body, title=title, title_align="left", width=PANEL_WIDTH)
    if found.consensus:
        chosen = found.consensus
        support = (
            f"by {chosen.rule}: {chosen.least_support:.0%} of the weight prefer it to its strongest rival, "
            f"{chosen.mean_support:.0%} to a rival on average; it is the favourite of {chosen.favourite_of:.0%}\n\n"
        )
        body = Text.assemble((support, "dim"), chosen.text)
        yield Panel(body, title="consensus", title_align="left", width=PANEL_WIDTH)
    if found.distilled:
        one, verdict = found.distilled, "used in its place" if found.distilled.used else "not used: too little support"
        support = f"{one.least_support:.0%} prefer it to its strongest rival; {one.to_reach:.0%} needed; {verdict}\n\n"
        title = "a statement written from the slate"
        yield Panel(Text.assemble((support, "dim"), one.text), title=title, title_align="left", width=PANEL_WIDTH)


def _sharpening(path: Sequence[Sequence[float]]) -> Table:
    table = figures("Whose taste is yours? By your choices so far", "choices", *(str(j) for j in range(len(path[0]))))
    for count, row in enumerate(path):
        table.add_row(str(count), *(f"{value:.2f}" for value in row))
    return table
