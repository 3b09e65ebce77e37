"""The tables of results, once for all surfaces: terminal, report, notebook and model card.

Each function takes what another room measured and returns a ``Table`` of texts. A surface only draws it: ``as_html``
for the report and notebooks, ``as_markdown`` for model cards, ``cli.render`` for the terminal. This module also decides
how numbers are written. Nothing is measured here.
"""

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeAlias

from pluralign.core.text import shortened
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import EncoderChoice, Evaluation, HistoryRow, Insight, TunedFit, worse_than_chance
from pluralign.ensemble.verdict import FEW_VOTES, FLOOR_IS_LOW
from pluralign.measuring.cards import Profile
from pluralign.measuring.certificate import Certificate
from pluralign.measuring.comparison import comparison, floor_is_compared
from pluralign.measuring.diversity import Diversity
from pluralign.measuring.evaluate import MajorityShare, PolicyLevel
from pluralign.measuring.groups import Group, WorstGroup
from pluralign.measuring.individuals import LEGEND, PREDICTORS, Representation
from pluralign.measuring.leans import Lean
from pluralign.measuring.pruning import Pruning
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval

# --- the model --------------------------------------------------------------------------------------------------------


Cell: TypeAlias = str | int | float | Interval | None
"""A text, a count, a number with four decimals, an interval, or nothing."""


@dataclass(frozen=True)
class Table:
    """A table of results; other numbers than those of ``Cell`` are written as text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    main: int | None = None
    """The row that counts; it is bold."""
    warned: Sequence[int] = ()
    """Rows in the colour of a warning."""
    texts: Sequence[int] = (0,)
    """Columns of words, which are aligned left; a negative number counts from the end."""

    @property
    def lines(self) -> list[list[str]]:
        """The rows as text."""
        return [[written(cell) for cell in row] for row in self.rows]

    def compact(self) -> "Table":
        """Return the table without the columns that are empty in every row."""
        kept = [place for place in range(len(self.columns)) if any(row[place] not in ("", None) for row in self.rows)]
        rows = [[row[place] for place in kept] for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in kept], rows=rows)

    def is_text(self, column: int) -> bool:
        """Whether a column holds words."""
        return column in self.texts or column - len(self.columns) in self.texts


def written(cell: Cell) -> str:
    """Return a cell as text."""
    if isinstance(cell, str) or cell is None:
        return cell or ""
    if isinstance(cell, Interval):
        return with_ends(cell)
    return f"{cell:,}" if isinstance(cell, int) else number(cell)


def number(value: float | None, digits: int = 4, sign: str = "") -> str:
    """Return a number with a proper minus and without a negative zero, or a dash if it is missing.

    Example:
        >>> number(-0.0312), number(-0.00001), number(-0.00001, sign="+"), number(math.nan)
        ('−0.0312', '0.0000', '+0.0000', '–')
    """
    return "–" if value is None or math.isnan(value) else format(value, f"{sign}z.{digits}f").replace("-", "−")


def ends(interval: Interval, digits: int = 4, sign: str = "") -> str:
    """Return the ends of an interval in brackets; nothing if it has none.

    Example:
        >>> ends(Interval(0.05, -0.04, 0.06, 0.005), 2, "+"), ends(Interval(0.05, math.nan, math.nan, math.nan))
        ('[−0.04, +0.06]', '')
    """
    low, high = number(interval.low, digits, sign), number(interval.high, digits, sign)
    return "" if math.isnan(interval.low) else f"[{low}, {high}]"


def with_ends(interval: Interval, digits: int = 4, sign: str = "") -> str:
    """Return the mean and the ends of an interval.

    Example:
        >>> with_ends(Interval(0.05, 0.04, 0.06, 0.005), 2), with_ends(Interval(0.05, math.nan, math.nan, math.nan))
        ('0.05 [0.04, 0.06]', '0.0500')
    """
    return f"{number(interval.mean, digits, sign)} {ends(interval, digits, sign)}".strip()


def cut(value: Any, length: int) -> Any:
    """Return a result with every text in it shortened to a length, also those in dataclasses, lists and tuples."""
    if isinstance(value, str):
        return shortened(value, length)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{part.name: cut(getattr(value, part.name), length) for part in fields(value)})
    if type(value) in (list, tuple):
        return type(value)(cut(item, length) for item in value)
    return value


def claimed_leans(profile: Profile) -> list[Lean]:
    """Return the leans on traits that a card claims, the clearest first."""
    return sorted((lean for lean in profile.leans if lean.claim), key=lambda lean: -abs(lean.relative))


def as_html(table: Table) -> str:
    """Return a table as HTML with its title and its note. All texts are escaped."""

    def line(tag: str, cells: Sequence[str]) -> str:
        sides = ["left" if table.is_text(column) else "right" for column in range(len(table.columns))]
        return "".join(
            f'<{tag} style="text-align:{side}"{" class=wrap" * (len(cell) > 70)}>{html.escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )

    styles = dict.fromkeys(table.warned, ' class="flag"')
    if table.main is not None:
        styles[table.main] = ' class="own" style="font-weight:bold"'
    body = "".join(f"<tr{styles.get(place, '')}>{line('td', row)}</tr>\n" for place, row in enumerate(table.lines))
    title = f"<h3>{html.escape(table.title)}</h3>\n" if table.title else ""
    note = f'\n<p class="muted">{html.escape(table.note)}</p>' if table.note else ""
    head = f"<thead><tr>{line('th', table.columns)}</tr></thead>"
    return f'{title}<div class="scroll"><table>\n{head}\n<tbody>{body}</tbody></table></div>{note}'


def insight_html(insight: Insight) -> str:
    """Return the insight as HTML with its title. All texts are escaped."""
    largest = max((one.share for one in insight.voices), default=1.0)
    bar = "display:inline-block;height:.7em;background:#2f6fde;border-radius:.15em"
    rows = "".join(
        f'<div style="margin:.5em 0"><b>{one.share:.0%}</b> <b>{html.escape(one.name)}</b> '
        f'<span style="{bar};width:{8 * one.share / largest:.2f}em"></span><div>{html.escape(one.line)}</div></div>\n'
        for one in insight.voices
    )
    findings = "".join(f"<p>{html.escape(line)}</p>\n" for line in insight.findings)
    return f"<h2>{html.escape(insight.title)}</h2>\n<p>{html.escape(insight.sentence)}</p>\n{rows}{findings}"


def as_markdown(table: Table, escaped: Callable[[str], str]) -> str:
    """Return a table as Markdown, without its title and its note; ``escaped`` returns a text of data as Markdown."""
    lines = [table.columns, ["---"] * len(table.columns)]
    for place, row in enumerate(table.lines):
        first, *others = map(escaped, row)
        first = f"**{first}**" if place == table.main else first
        lines.append([f"{first} ⚠" if place in table.warned else first, *others])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- scores -----------------------------------------------------------------------------------------------------------


def comparison_table(evaluation: Evaluation, title: str = "", k: int | None = None) -> Table:
    """Return every predictor that was scored on the same votes, best first; ``k`` is as in ``comparison``.

    There is no difference with too few prompts, and no worst member if nothing votes.
    """
    predictions = comparison(evaluation, k)
    rows: list[list[Cell]] = []
    for row in predictions:
        gap = ends(row.difference, sign="+") if row.difference else ""
        worst, name = "" if row.worst is None else number(row.worst, 3), f"{'→ ' * row.judged}{row.name}"
        rows.append([name, row.k, row.brier, row.brier_corrected, worst, gap])
    compared, vote = any(row.difference for row in predictions), any(row.worst is not None for row in predictions)
    note = [
        f"→ the main row; corrected = Brier − noise ({number(evaluation.test.noise)})",
        "worst = largest disagreement of a member" * vote,
        "difference = the main row's Brier score − this row's (below 0: the main row is better)" * compared,
    ]
    caveat = FLOOR_IS_LOW if floor_is_compared(evaluation) else FEW_VOTES
    table = Table(
        title,
        ("", "k", "Brier", "corrected", "worst", "difference, 95 %"),
        rows,
        f"{'; '.join(filter(None, note))}. {caveat}",
        main=next((place for place, row in enumerate(predictions) if row.judged), None),
    )
    return table.compact()


def judgment_tables(evaluation: Evaluation) -> Iterator[Table]:
    """Yield how well whole judgments and first choices are predicted, as far as they were measured."""
    if found := evaluation.judgments:
        scores = {"best single reward": found.best_single, "equally likely rankings": found.uniform}
        rows: list[list[Cell]] = [["→ ensemble", number(found.log_likelihood, 3), "", ""]]
        rows += [[name, number(one, 3), number(found.log_likelihood - one, 3, "+"), ""] for name, one in scores.items()]
        rows[1][-1] = ends(found.gain, 3, "+")
        where = f"mean over {found.n:,} judgments on {found.prompts:,} prompts"
        note = f"{where}; higher is better; gain = ensemble − this row"
        names = ("", "log-likelihood", "gain", "gain, 95 %")
        yield Table("Whole judgments: log-likelihood per judgment", names, rows, note, main=0)
    if chosen := evaluation.first_choices:
        rows = []
        for one in chosen:
            noise = one.error - one.corrected
            others = one.soft_bt - noise, one.uniform - noise
            rows.append([one.t, one.sets, one.interval, *others, ends(one.difference, sign="+")])
        note = (
            "Σ (predicted − observed share)², mean over sets of t responses that the same people ranked; corrected = "
            "less the noise of few people; difference = ensemble − soft BT (below 0: the ensemble is better)"
        )
        columns = ("t", "sets", "ensemble", "soft BT", "uniform", "difference, 95 %")
        yield Table("First choices among t responses: squared error, corrected", columns, rows, note, texts=())


def member_table(weights: Sequence[float], evaluation: Evaluation | None, names: Sequence[str] = ()) -> Table:
    """Return the weight, and the disagreement and regret of every member; a member worse than chance is marked.

    Args:
        weights: of the members.
        evaluation: figures of the same members; None, or figures of other members, for weights alone.
        names: of the members, for a column of names.
    """
    members = evaluation.members if evaluation and len(evaluation.members) == len(weights) else []
    measured = [(number(member.disagreement, 3), number(member.regret, 3)) for member in members]
    rows = [
        [f"member {j}", names[j] if names else "", number(weight, 3), *(measured[j] if members else ("", ""))]
        for j, weight in enumerate(weights)
    ]
    warned = [j for j, member in enumerate(members) if worse_than_chance(member.disagreement, member.weight)]
    note = "disagreement: how often the member and a random person prefer different responses (chance level 0.500)"
    columns = ("", "name", "weight", "disagreement", "regret")
    table = Table("Members", columns, rows, note if members else "", warned=warned, texts=(0, 1) if names else (0,))
    return table.compact()


def history_table(history: Sequence[HistoryRow]) -> Table:
    """Return the scores of every size of the ensemble."""
    rows = [[row.k, row.train_brier, row.test_brier, row.test_brier_corrected] for row in history]
    return Table("By number of members", ("k", "train Brier", "held-out Brier", "corrected"), rows)


def encoder_table(choice: EncoderChoice) -> Table:
    """Return the fits on trained and on frozen features, with their figures on validation and on held-out prompts."""
    tuned = TunedFit(choice.validation_tuned, choice.test_tuned, choice.difference, choice.low, choice.high)
    rows: list[list[Cell]] = [["frozen", choice.validation_frozen, choice.test_frozen, ""]]
    for name, fit in (("trained", tuned), ("outputs of the trained model", choice.outputs)):
        if fit:
            low, high = (number(end, sign="+") for end in (fit.low, fit.high))
            rows.append([name, fit.validation, fit.test, "" if fit.low is None else f"[{low}, {high}]"])
    validation = "validation: −log P per judgment" if choice.judgments else "validation: Brier"
    columns = ("", validation, "held out: corrected", "held out − frozen, 95 %")
    return Table("Trained and frozen features", columns, rows)


def majority_table(majority: Mapping[str, MajorityShare], evaluation: Evaluation) -> Table:
    """Return the mean majority share by how people split: observed, predicted, and expected if calibrated."""
    rows: list[list[Cell]] = []
    for name, row in ((name, row) for name, row in majority.items() if row.pairs):
        shares = (number(share, 3) for share in (row.people, row.predicted, row.expected))
        rows.append([name, row.pairs, *shares, evaluation.strata[name][1]])
    note = (
        "lopsided: above two thirds; observed majorities rest on few votes, which look more lopsided than all people; "
        "expected if calibrated: predicted share for votes drawn from the prediction"
    )
    columns = ("people are", "pairs", "observed", "predicted", "expected if calibrated", "Brier")
    return Table("Majority share, by how people split", columns, rows, note)


def group_tables(groups: Mapping[str, Sequence[Group]]) -> Iterator[Table]:
    """Yield a table for each way of grouping the pairs."""
    for grouping, found in groups.items():
        rows: list[list[Cell]] = []
        for group in found:
            corrected = f"{number(group.brier_corrected)} {ends(group.interval)}".strip()
            residual = with_ends(group.residual, 3, "+")
            rows.append([group.name, group.pairs, group.prompts, corrected, residual])
        side = "longer response" if grouping == "length" else "predicted majority (above 0: overconfident)"
        note = f"residual: predicted − observed share of the {side}"
        if any(not math.isnan(group.interval.low) for group in found):
            note = f"brackets: 95 % over prompts, from {ENOUGH_CLUSTERS} prompts on; {note}"
        yield Table(f"By {grouping}", ("", "pairs", "prompts", "corrected Brier", "residual"), rows, note)


def worst_group_sentence(worst: WorstGroup) -> str:
    """Return which group has the largest calibration error."""
    interval = f", 95 % interval {ends(worst.interval)}" if not math.isnan(worst.interval.low) else ""
    return (
        f"Worst group: {worst.name} ({worst.grouping}). Corrected Brier {number(worst.brier_corrected)}{interval}, "
        f"corrected for choosing the worst of {worst.groups} groups."
    )


def policy_table(policy: PolicyLevel, temperature: float | None) -> Table:
    """Return the scores of the policy level by regularisation strength."""
    rows: list[list[Cell]] = []
    for row in policy.rows:
        label = f"{row.beta:.4g}{' (fitted)' * (row.beta == temperature)}" if row.beta else "→ 0 (hard votes)"
        rows.append([label, row.brier, row.brier_corrected, row.brier_reference, row.brier_corrected_reference])
    main = next((place for place, row in enumerate(policy.rows) if row.beta and row.beta == temperature), None)
    columns = ("β", "Brier", "corrected", f"Brier with {policy.reference}", "corrected with it")
    return Table("Policy level, by regularisation strength β", columns, rows, main=main).compact()


def representation_tables(found: Representation) -> Iterator[Table]:
    """Yield the accuracy, the log loss and the differences from soft BT, by number of a rater's choices."""
    labels = [f"all ({row.mean_choices:.0f})" if row.choices is None else str(row.choices) for row in found.rows]
    titles = {"accuracy": "Accuracy on a rater's other votes, by number of the rater's choices", "log_loss": "Log loss"}
    for score, title in titles.items():
        rows = [
            [label, row.raters, *(getattr(row.predictors[name], score).mean for name in PREDICTORS)]
            for label, row in zip(labels, found.rows, strict=True)
        ]
        note = f"{LEGEND} A predicted tie counts ½." if score == "accuracy" else "lower is better"
        yield Table(title, ("choices", "raters", *PREDICTORS.values()), rows, note)
    differences = []
    for label, row in zip(labels, found.rows, strict=True):
        gaps = row.predictors["posterior"].accuracy_difference, row.predictors["posterior"].log_loss_difference
        differences.append([label, *(with_ends(gap, sign="+") for gap in gaps)])
    note = "above 0 in accuracy and below 0 in log loss: the members are better than one reward"
    yield Table("Posterior − soft BT on the same raters, 95 %", ("choices", "accuracy", "log loss"), differences, note)


# --- analyses ---------------------------------------------------------------------------------------------------------


def certificate_table(certificate: Certificate) -> Table:
    """Return each theorem, its numbers here, and whether it is informative or vacuous."""
    parts = {
        "Lemma 1 (noise of few votes)": certificate.lemma_1,
        "Theorem 2 (small size)": certificate.theorem_2,
        "Theorem 3 (outliers)": certificate.theorem_3,
        "Theorem 4 (generalisation from N pairs)": certificate.theorem_4,
        "Held-out prompts (not in the paper)": certificate.held_out,
    }
    words = {True: "informative", False: "vacuous here"}
    rows = [[name, words[part.informative], f"{part.states} {part.here}"] for name, part in parts.items()]
    return Table("", ("statement", "verdict", "result"), rows, texts=(0, 1, 2))


def diversity_table(diversity: Diversity) -> Table:
    """Return Kendall's τ between members."""
    rows = []
    for i, row in enumerate(diversity.tau):
        others = ("·" if i == j else number(tau, 2, "+") for j, tau in enumerate(row))
        rows.append([str(i), number(diversity.weights[i], 3), *others])
    columns = ("member", "weight", *map(str, range(len(diversity.tau))))
    note = "1: identical rankings, 0: unrelated, −1: reversed; lower is more diverse"
    return Table("Kendall's τ between members, averaged over prompts", columns, rows, note)


def pruning_table(pruning: Pruning, before: RewardEnsemble) -> Table:
    """Return the members, furthest from the ensemble first, and which were removed."""
    order = sorted(range(before.k), key=lambda j: -pruning.distances[j])
    rows: list[list[Cell]] = []
    for j in order:
        outcome = "removed" if j in pruning.removed else "kept"
        figures = ((1 - pruning.undecided_before) * before.weights[j], pruning.distances[j], pruning.disagreements[j])
        marked = f"{outcome}, outlier" if j in pruning.outliers_before else outcome
        rows.append([f"member {j}", *(number(figure, 3) for figure in figures), marked])
    note = "distance: how often the member and a random member prefer different responses; it does not depend on votes"
    if pruning.undecided_before:
        outcome = "kept" if pruning.ensemble.undecided else "removed"
        rows.append(["undecided share", number(pruning.undecided_before, 3), "0.500", "0.500", outcome])
        note += "; weight: share of all votes, including the undecided share"
    warned = [place for place, j in enumerate(order) if j in pruning.removed]
    columns = ("", "weight", "distance", "disagreement", "")
    return Table("Members (furthest first)", columns, rows, note, warned=warned, texts=(0, -1))


def pruning_cost_table(pruning: Pruning) -> Table:
    """Return the calibration error before and after pruning, and its bounds."""
    before, after, change = pruning.error_before, pruning.error_after, pruning.difference
    rows = [
        ["before", number(before.mean), ends(before)],
        ["after", number(after.mean), ends(after)],
        ["difference", number(change.mean, sign="+"), ends(change, sign="+")],
        ["upper bound: (√ε + 1/(β−1))²", number(pruning.bound), ""],
        ["upper bound: (√ε + change of p̂)²", number(pruning.bound_after_shift), ""],
    ]
    note = f"no interval from fewer than {ENOUGH_CLUSTERS} prompts" if math.isnan(pruning.difference.low) else ""
    title = "Calibration error (corrected Brier of hard votes)"
    return Table(title, ("", "error", "95 % over prompts"), rows, note)
