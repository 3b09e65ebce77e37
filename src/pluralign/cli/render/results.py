"""What all views of the terminal share: tables, panels and notes; and the views of ``fit`` and ``evaluate``.

A view draws results that other rooms returned, and computes none of its own. Text from data is never read as markup.
"""

from collections.abc import Iterable, Iterator, Sequence
from shutil import get_terminal_size

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pluralign.cli.console import PlainLines, say
from pluralign.core.text import counted, printable
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import (
    Evaluation,
    FitRecord,
    HistoryRow,
    Insight,
    MemberFigures,
    worse_than_chance,
)
from pluralign.ensemble.verdict import Headline, headline, main_evaluation
from pluralign.learning.task import FitWatcher
from pluralign.measuring import comparison
from pluralign.measuring.evaluate import FullEvaluation
from pluralign.publishing import tables
from pluralign.publishing.tables import number

TEXT_LENGTH = 400
"""Longer texts are cut."""
BAR_WIDTH = 40
PANEL_WIDTH = 100


def draw(table: tables.Table) -> Table:
    """Return a table as rich draws it; an empty line separates it from the text above."""
    drawn = Table(
        box=box.SIMPLE_HEAD,
        title=Text(f"\n{table.title}", style="italic") if table.title else None,
        title_justify="left",
        caption=Text(table.note, style="dim italic") if table.note else None,
        caption_justify="left",
        pad_edge=False,
    )
    for place, name in enumerate(table.columns):
        drawn.add_column(name, justify="left" if table.is_text(place) else "right")
    for place, row in enumerate(table.lines):
        style = "bold" if place == table.main else "bold red" if place in table.warned else ""
        drawn.add_row(*map(Text, row), style=style)
    return drawn


def text_panel(body: Text | str, title: Text | str) -> Panel:
    """Return a panel of text under a title."""
    text = Text(body) if isinstance(body, str) else body
    return Panel(text, title=title, title_align="left", width=PANEL_WIDTH)


def dim(text: str) -> Text:
    """Return a note in a paler colour."""
    return Text(text, style="dim")


def heading(text: str) -> Text:
    """Return a bold line with an empty line above it."""
    return Text(f"\n{text}", style="bold")


def command_line(command: str) -> Text:
    """Return a command to copy, which is not wrapped."""
    return Text(command, style="dim", no_wrap=True)


def counted_notes(*notes: tuple[int, str]) -> Iterator[Text]:
    """Yield a dim line for each note whose count is not zero."""
    for count, note in notes:
        if count:
            yield dim(f"· {count:,} {note}")


def visible(text: str) -> str:
    """Return a text in one line, without control characters that would move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)


# --- A rich console that prints its own styles, and no control characters of the data.


class SafeConsole(Console):
    """A console whose texts are cleaned after they were laid out; removed characters have no width."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of an object, cleaned. Control segments are rich's own, such as moves of the cursor."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


# --- ``evaluate``: the scores on votes --------------------------------------------------------------------------------


def evaluation_page(evaluation: FullEvaluation, title: str) -> Iterator[RenderableType]:
    """Yield the scores on these votes, members, majority shares, groups of pairs and the policy level."""
    predictor = evaluation.subject
    if evaluation.insight:
        yield from insight_lines(evaluation.insight)
    yield heading(f"Details: {title}")
    yield Text(f"{evaluation.pairs:,} pairs, {evaluation.prompts:,} prompts")
    if predictor.note:
        yield dim(f"· {predictor.note}")
    yield from scores(evaluation, evaluation.headline, "Scores on these votes (best first)")
    if predictor.k > 1:
        yield draw(tables.member_table([member.weight for member in evaluation.members], evaluation))
    yield from member_warnings(evaluation.members, evaluation.undecided)
    yield draw(tables.majority_table(evaluation.majority, evaluation))
    yield from map(draw, tables.group_tables(evaluation.groups))
    if evaluation.worst_group:
        yield Text(f"\n{tables.worst_group_sentence(evaluation.worst_group)}")
    if evaluation.policy:
        yield draw(tables.policy_table(evaluation.policy, predictor.temperature))
    if found := evaluation.representation:
        yield heading("How well individuals are represented")
        yield from (Text(verdict.text) for verdict in comparison.representation_verdicts(found))
        yield from (dim(f"· {sentence}") for sentence in comparison.representation_notes(found))
        yield from map(draw, tables.representation_tables(found))
    yield Text()


def insight_lines(insight: Insight) -> Iterator[RenderableType]:
    """Yield the insight as wide as the terminal, at most ``PANEL_WIDTH``; its title is bold."""
    title, *lines = insight.text(min(get_terminal_size().columns, PANEL_WIDTH)).splitlines()
    yield heading(title)
    yield Text("\n".join(lines))


def headline_lines(found: Headline) -> Iterator[RenderableType]:
    """Yield the main figure, the verdict and the next step."""
    yield Text(found.main, style="bold")
    yield Text(found.verdict, style={"ahead": "bold green", "behind": "bold red"}.get(found.standing, "bold"))
    yield Text(f"Next: {found.next_step}")


def scores(evaluation: Evaluation, first: Headline, title: str, k: int | None = None) -> Iterator[RenderableType]:
    """Yield the headline, and every predictor that was scored on the same votes."""
    yield from headline_lines(first)
    yield draw(tables.comparison_table(evaluation, title, k))
    yield from map(draw, tables.judgment_tables(evaluation))


def member_warnings(members: Sequence[MemberFigures], undecided: float) -> Iterator[RenderableType]:
    """Yield the undecided share, and a warning if a member disagrees with people more than chance."""
    if undecided:
        yield Text(comparison.undecided_sentence(undecided))
    if any(worse_than_chance(member.disagreement, member.weight) for member in members):
        warning = "A member disagrees with people more than chance (.500). Do not tune a policy to it."
        yield Text(warning, style="bold red")


# --- ``fit``: the fitted ensemble, and a live table while it is fitted ------------------------------------------------


def fit_page(ensemble: RewardEnsemble, folder: str) -> Iterator[RenderableType]:
    """Yield the insight, then the ensemble next to its baselines, every size, and every member."""
    record = ensemble.record
    evaluation, pooled = record.evaluation, record.cross_validation
    if record.insight:
        yield from insight_lines(record.insight)
    yield heading(f"Details: {record.method} ensemble of {record.k} members, fitted for the {record.level} level")
    yield from map(Text, _how_fitted(record))
    if counts := main_evaluation(record):
        where = "all prompts, cross-validated" if pooled else "held-out prompts"
        first = headline(counts, record, folder)
        yield from scores(counts, first, f"Scores on {where} (best first)", record.k)
    yield draw(tables.history_table(record.history))
    if record.encoders:
        yield draw(tables.encoder_table(record.encoders))
    if evaluation:
        voices = sorted(record.insight.voices if record.insight else (), key=lambda one: one.member)
        names = [one.name for one in voices]
        yield draw(tables.member_table(ensemble.weights.tolist(), evaluation, names))
        yield from member_warnings(evaluation.members, ensemble.undecided)
    if bound := record.bound:
        yield Text(
            f"Bound {bound.max_disagreement:g} on disagreement: Brier {number(bound.brier)}, worst member "
            f"{bound.worst:.3f}. Without the bound: Brier {number(bound.brier_without)}, worst member "
            f"{bound.worst_without:.3f}."
        )
    if record.seconds is not None and record.seconds_encoding is not None:
        fitting = record.seconds - record.seconds_encoding
        yield Text(f"\nEncoded in {record.seconds_encoding:.1f} s, fitted in {fitting:.1f} s, saved in {folder}.")
    commands = (f"report {folder} -o report.html", f"serve {folder}", f"evaluate {folder} VOTES")
    yield Text("Commands: " + " · ".join(f"pluralign {command}" for command in commands) + "\n", no_wrap=True)


def _how_fitted(record: FitRecord) -> Iterator[str]:
    """Yield what members learned from, as sentences."""
    if data := record.data:
        tested = f"{data.test_pairs:,} pairs ({data.test_prompts:,} held-out prompts)"
        yield f"Trained on {data.train_pairs:,} pairs ({data.train_prompts:,} prompts); tested on {tested}."
    if sentence := target_sentence(record.target, record.vote_share):
        yield sentence
    if record.encoders is not None:
        yield ": ".join(filter(None, (USED_MODEL[record.encoders.used], record.encoders.why))) + "."
    if record.tuning and (reason := record.tuning.get("stopped")):
        yield f"Training stopped after {record.tuning['stages']} stages, {record.k} of them kept: {reason}."
    if record.raters is not None:
        yield f"Members are fitted to the votes of {record.raters:,} raters. Rater ids are not saved."
    if pooled := record.cross_validation:
        each = f"each of the {pooled.prompts:,} prompts is predicted by an ensemble fitted without it"
        yield f"Cross-validated in {record.options['folds']} folds: {each}."


USED_MODEL = {
    "tuned": "The trained features are used",
    "outputs": "The trained features are used, with members that combine the model's outputs",
    "frozen": "The frozen features are used",
}


def target_sentence(target: str | None, vote_share: float | None) -> str:
    """Return what joint members learned from, in words; nothing for other fits and older records.

    Example:
        >>> target_sentence("mixture", 0.3)
        'Members learned from a mixture of soft rewards (70 %) and the votes (30 %).'
    """
    if vote_share is None or target is None:
        return ""
    if vote_share == 1:
        return "Members learned from the votes alone."
    teacher = {"teacher": "one soft reward", "mixture": "a mixture of soft rewards"}[target]
    if vote_share == 0:
        return f"Members learned from {teacher}, which was fitted to the votes."
    return f"Members learned from {teacher} ({100 * (1 - vote_share):.0f} %) and the votes ({100 * vote_share:.0f} %)."


class FitWatch(FitWatcher):
    """Shows the stage of a fit on stderr: in a terminal as a status line, else as a plain line now and then."""

    def __init__(self) -> None:
        console = SafeConsole(stderr=True)
        self._status = console.status("") if console.is_terminal else None
        self._plain, self._members = PlainLines(say), 0

    def __enter__(self) -> "FitWatch":
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def choosing(self, option: str) -> None:
        """Name the option that is being chosen."""
        self._show(f"choosing {option}")

    def fitting_baseline(self, name: str) -> None:
        """Name the baseline that is being fitted."""
        self._show(f"fitting the baseline {name}")

    def fold(self, number: int, folds: int) -> None:
        """Name the fold that is being fitted."""
        self._show(f"cross-validation: fold {number} of {folds}")

    def record(self, row: HistoryRow) -> None:
        """Count the members of the ensemble so far."""
        self._members = row.k
        self._show("fitting")

    def _show(self, stage: str) -> None:
        line = f"Fit: {stage}" + (f" ({counted(self._members, 'member')} done)" if self._members else "")
        if self._status:
            self._status.start()  # once
            self._status.update(line)
        else:
            self._plain(line)
