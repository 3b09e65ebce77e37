"""Views of an evaluation: ``pluralign evaluate``, and the tables that ``pluralign fit`` shows too."""

import math
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pluralign.cli.render.tables import decimals, figure_table, heading, number, short, span
from pluralign.ensemble.headline import FEW_VOTES, FLOOR_IS_LOW, Headline
from pluralign.ensemble.record import BoundCost, Evaluation, MemberFigures, worse_than_chance
from pluralign.measuring.evaluate import FullEvaluation, PolicyLevel
from pluralign.measuring.groups import AdversarialGroup, Group, WorstGroup
from pluralign.measuring.individuals import LEGEND, PREDICTORS, Representation, RepresentationRow
from pluralign.measuring.verdicts import (
    comparison,
    floor_is_compared,
    representation_notes,
    representation_verdicts,
    undecided_sentence,
    voices_sentence,
)
from pluralign.theory.intervals import Interval

# --- The view of how well individuals are represented: ``pluralign evaluate --raters``.


def representation_page(found: Representation) -> Iterator[RenderableType]:
    """Yield the verdicts, the notes, and a table of accuracy and one of log loss by number of choices."""
    yield heading("How well individuals are represented")
    for verdict in representation_verdicts(found):
        yield Text(verdict.text)
    for sentence in representation_notes(found):
        yield Text(f"· {sentence}", style="dim")
    yield _score_table(found, "accuracy", "Accuracy on a rater's other votes, by number of the rater's choices")
    yield _score_table(found, "log_loss", "Log loss on the same votes")
    yield _difference_table(found)


def _score_table(found: Representation, score: str, title: str) -> Table:
    table = figure_table(title, "choices", "raters", *PREDICTORS.values())
    for row in found.rows:
        values = [f"{getattr(row.predictors[name], score).mean:.4f}" for name in PREDICTORS]
        table.add_row(_label(row), f"{row.raters:,}", *(value.removeprefix("0") for value in values))
    if score == "accuracy":
        table.caption = LEGEND
    return table


def _difference_table(found: Representation) -> Table:
    table = figure_table("Posterior − soft BT on the same raters, 95 %", "choices", "accuracy", "log loss")
    for row in found.rows:
        ours = row.predictors["posterior"]
        table.add_row(_label(row), _ends(ours.accuracy_difference), _ends(ours.log_loss_difference))
    table.caption = "above 0 in accuracy and below 0 in log loss: the members are better than one reward"
    return table


def _label(row: RepresentationRow) -> str:
    return f"all ({row.mean_choices:.0f})" if row.choices is None else str(row.choices)


def _ends(interval: Interval) -> Text:
    mean = short(interval.mean)
    return Text(mean if math.isnan(interval.low) else f"{mean} [{short(interval.low)}, {short(interval.high)}]")


def evaluation_page(evaluation: FullEvaluation, title: str) -> Iterator[RenderableType]:
    """Yield the scores on these votes, members, majority shares, groups of pairs and the policy level."""
    predictor = evaluation.subject
    yield heading(title)
    yield Text(f"{evaluation.pairs:,} pairs, {evaluation.prompts:,} prompts")
    if predictor.note:
        yield Text(f"· {predictor.note}", style="dim")
    yield from headline_lines(evaluation.headline)
    yield from voices_line(evaluation)
    yield comparison_table(evaluation, "Scores on these votes (best first)")
    yield from other_scores(evaluation)
    if predictor.k > 1:
        yield member_table(evaluation.members)
    yield from undecided_line(evaluation.undecided)
    yield from chance_warning(evaluation.members)
    yield _majority_table(evaluation)
    for grouping, groups in evaluation.groups.items():
        yield _group_table(grouping, groups)
    if evaluation.worst_group:
        yield _worst_group(evaluation.worst_group)
    yield _adversarial_table(evaluation.adversarial)
    if evaluation.policy:
        yield _policy_table(evaluation.policy, predictor.temperature)
    if evaluation.representation:
        yield from representation_page(evaluation.representation)
    yield Text()


def comparison_table(evaluation: Evaluation, title: str, k: int | None = None) -> Table:
    """Return every predictor that was scored on the same votes, best first; the main row is bold and has an arrow.

    ``k`` is as in ``comparison``.
    """
    table = figure_table(title, "", "k", "Brier", "corrected", "worst", "difference")
    for row in comparison(evaluation, k):
        gap, arrow = row.difference, "→ " if row.judged else ""
        ends = f"({span(row.interval)})" if row.interval else f"[{short(gap.low)}, {short(gap.high)}]" if gap else ""
        scores = (str(row.k), number(row.brier), number(row.brier_corrected))
        worst = "" if row.worst is None else f"{row.worst:.3f}"
        table.add_row(Text(arrow + row.name), *scores, worst, Text(ends), style="bold" if row.judged else "")
    table.caption = (
        f"→ the main row; noise {number(evaluation.test.noise)}; corrected = Brier − noise, its 95 % interval in "
        "parentheses; worst = largest disagreement of a member; difference = 95 % interval of the main row's Brier − "
        "this row's (below 0: the main row is better)"
        + (f". {FLOOR_IS_LOW}" if floor_is_compared(evaluation) else f". {FEW_VOTES}")
    )
    return table


def headline_lines(found: Headline) -> Iterator[RenderableType]:
    """Yield the main figure, the verdict and the next step."""
    style = {"ahead": "bold green", "behind": "bold red"}.get(found.standing, "bold")
    yield Text(found.main, style="bold")
    yield Text(found.verdict, style=style)
    yield Text(f"Next: {found.next_step}")


def voices_line(evaluation: Evaluation) -> Iterator[RenderableType]:
    """Yield whether several voices predict these votes better than the best single reward, if that was tested."""
    if evaluation.voices is not None:
        yield Text(voices_sentence(evaluation.voices))


def other_scores(evaluation: Evaluation) -> Iterator[RenderableType]:
    """Yield the absolute error and the log loss, beside those of soft BT; nothing for records without them."""
    own, rival = evaluation.test, evaluation.baselines.get("soft_bt")
    if math.isnan(own.absolute_error):
        return
    line = f"Mean absolute error {own.absolute_error:.4f}, log loss {own.log_loss:.4f}"
    if rival is not None:
        line += f" (soft BT: {rival.absolute_error:.4f} and {rival.log_loss:.4f})"
    yield Text(f"{line}; neither is corrected for noise.")


def member_table(members: Sequence[MemberFigures]) -> Table:
    """Return weight, disagreement and regret of every member; red is worse than chance."""
    table = figure_table("Members", "", "weight", "disagreement", "regret")
    for position, member in enumerate(members):
        cells = (f"{value:.3f}" for value in (member.weight, member.disagreement, member.regret))
        style = "bold red" if worse_than_chance(member.disagreement, member.weight) else ""
        table.add_row(f"member {position}", *cells, style=style)
    table.caption = DISAGREEMENT_CAPTION
    return table


def undecided_line(undecided: float) -> Iterator[RenderableType]:
    """Yield the undecided share, if there is one."""
    if undecided:
        yield Text(undecided_sentence(undecided))


DISAGREEMENT_CAPTION = (
    "disagreement: how often the member and a random person prefer different responses (chance level .500)"
)


def chance_warning(members: Sequence[MemberFigures]) -> Iterator[RenderableType]:
    """Yield a warning if a member disagrees with people more than chance."""
    if any(worse_than_chance(member.disagreement, member.weight) for member in members):
        warning = "A member disagrees with people more than chance (.500). Do not tune a policy to it."
        yield Text(warning, style="bold red")


def bound_line(bound: BoundCost | None) -> Iterator[RenderableType]:
    """Yield what the bound on disagreement costs, if there is one."""
    if bound:
        yield Text(
            f"Bound {bound.max_disagreement:g} on disagreement: Brier {number(bound.brier)}, worst member "
            f"{bound.worst:.3f}. Without the bound: Brier {number(bound.brier_without)}, worst member "
            f"{bound.worst_without:.3f}."
        )


def _majority_table(evaluation: FullEvaluation) -> Table:
    headings = ("people are", "pairs", "observed", "predicted", "expected if calibrated", "above .9")
    table = figure_table("Majority share, by how people split", *headings)
    for name, row in evaluation.majority.items():
        shares = map(decimals, (row.people, row.predicted, row.expected))
        table.add_row(name, f"{row.pairs:,}", *shares, decimals(row.certain, ".0%"))
    certain = evaluation.certain_though_contested
    table.caption = (
        "observed majorities rest on few votes; expected if calibrated: predicted share for votes drawn from the "
        "prediction; above .9: share of pairs for which one side is predicted above .9"
        + ("" if math.isnan(certain) else f" ({certain:.0%} of contested or even pairs)")
    )
    return table


def _group_table(grouping: str, groups: Sequence[Group]) -> Table:
    table = figure_table(f"By {grouping}", "", "pairs", "prompts", "corrected Brier", "residual")
    for group in groups:
        interval, residual = group.interval, group.residual
        corrected, lean = number(group.brier_corrected), f"{residual.mean:+.3f}"
        if not math.isnan(interval.low):
            corrected += f" [{short(interval.low)}, {short(interval.high)}]"
        if not math.isnan(residual.low):
            lean += f" [{residual.low:+.3f}, {residual.high:+.3f}]"
        table.add_row(Text(group.name), f"{group.pairs:,}", f"{group.prompts:,}", Text(corrected), Text(lean))
    side = "longer response" if grouping == "length" else "predicted majority (above 0: overconfident)"
    table.caption = f"brackets: 95 % over prompts; residual: predicted − observed share of the {side}"
    return table


def _worst_group(worst: WorstGroup) -> Text:
    return Text(
        f"\nWorst group: {worst.name} ({worst.grouping}). Corrected Brier {number(worst.brier_corrected)}, 95 % "
        f"interval {span(worst.interval)}, corrected for choosing the worst of {worst.groups} groups."
    )


def _adversarial_table(rows: Sequence[AdversarialGroup]) -> Table:
    headings = ("share of prompts", "prompts", "worst error", "expected if calibrated", "95 % below")
    table = figure_table("Worst calibration error among random groups of prompts", *headings)
    for row in rows:
        cells = (f"{value:.4f}" for value in (row.worst, row.expected, row.high))
        style = "bold" if row.worst > row.high else ""
        table.add_row(f"{row.fraction:.0%}", f"{row.prompts:,}", *cells, style=style)
    table.caption = (
        "expected if calibrated: the worst error for votes drawn from the prediction, which is sampling noise only; "
        "95 % below: 95 % of such draws are below it; bold: above that"
    )
    return table


def _policy_table(policy: PolicyLevel, temperature: float | None) -> Table:
    reference = (f"Brier with {policy.reference}", "corrected") if policy.reference else ()
    table = figure_table("Policy level, by regularisation strength β", "β", "Brier", "corrected", *reference)
    for row in policy.rows:
        values = [row.brier, row.brier_corrected]
        if row.brier_reference is not None and row.brier_corrected_reference is not None:
            values += [row.brier_reference, row.brier_corrected_reference]
        fitted = row.beta == temperature
        label = (f"{row.beta:.4g}" + " (fitted)" * fitted) if row.beta else "→ 0 (hard votes)"
        table.add_row(label, *map(number, values), style="bold" if fitted else "")
    return table
