"""Views of an evaluation: ``pluralign evaluate``, and the parts that ``pluralign fit`` shows too."""

import math
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from pluralign.cli.render.tables import dim, draw, heading
from pluralign.ensemble.headline import Headline
from pluralign.ensemble.record import Evaluation, MemberFigures, worse_than_chance
from pluralign.measuring.evaluate import FullEvaluation
from pluralign.measuring.individuals import Representation
from pluralign.measuring.verdicts import (
    representation_notes,
    representation_verdicts,
    undecided_sentence,
    voices_sentence,
)
from pluralign.publishing import tables


def evaluation_page(evaluation: FullEvaluation, title: str) -> Iterator[RenderableType]:
    """Yield the scores on these votes, members, majority shares, groups of pairs and the policy level."""
    predictor = evaluation.subject
    yield heading(title)
    yield Text(f"{evaluation.pairs:,} pairs, {evaluation.prompts:,} prompts")
    if predictor.note:
        yield dim(f"· {predictor.note}")
    yield from scores(evaluation, evaluation.headline, "Scores on these votes (best first)")
    if predictor.k > 1:
        yield draw(tables.member_table([member.weight for member in evaluation.members], evaluation))
    yield from member_warnings(evaluation.members, evaluation.undecided)
    yield draw(tables.majority_table(evaluation.majority, evaluation))
    if not math.isnan(evaluation.certain_though_contested):
        yield dim(
            f"One side is predicted above .9 for {evaluation.certain_though_contested:.0%} of contested or even pairs."
        )
    for table in tables.group_tables(evaluation.groups):
        yield draw(table.without("Brier"))
    if evaluation.worst_group:
        yield Text(f"\n{tables.worst_group_sentence(evaluation.worst_group)}")
    yield draw(tables.adversarial_table(evaluation.adversarial))
    if evaluation.policy:
        yield draw(tables.policy_table(evaluation.policy, predictor.temperature))
    if evaluation.representation:
        yield from representation_page(evaluation.representation)
    yield Text()


def representation_page(found: Representation) -> Iterator[RenderableType]:
    """Yield how well individuals are represented: verdicts, notes, accuracy and log loss by number of choices."""
    yield heading("How well individuals are represented")
    for verdict in representation_verdicts(found):
        yield Text(verdict.text)
    for sentence in representation_notes(found):
        yield dim(f"· {sentence}")
    yield from map(draw, tables.representation_tables(found))


def headline_lines(found: Headline) -> Iterator[RenderableType]:
    """Yield the main figure, the verdict and the next step."""
    yield Text(found.main, style="bold")
    yield Text(found.verdict, style={"ahead": "bold green", "behind": "bold red"}.get(found.standing, "bold"))
    yield Text(f"Next: {found.next_step}")


def scores(evaluation: Evaluation, first: Headline, title: str, k: int | None = None) -> Iterator[RenderableType]:
    """Yield the headline, every predictor that was scored on the same votes, and the scores that are not corrected."""
    yield from headline_lines(first)
    if evaluation.voices is not None:
        yield Text(voices_sentence(evaluation.voices))
    yield draw(tables.comparison_table(evaluation, title, k).without("absolute", "log loss", "difference"))
    own, rival = evaluation.test, evaluation.baselines.get("soft_bt")
    line = f"Mean absolute error {own.absolute_error:.4f}, log loss {own.log_loss:.4f}"
    if rival is not None:
        line += f" (soft BT: {rival.absolute_error:.4f} and {rival.log_loss:.4f})"
    yield Text(f"{line}; neither is corrected for noise.")


def member_warnings(members: Sequence[MemberFigures], undecided: float) -> Iterator[RenderableType]:
    """Yield the undecided share, and a warning if a member disagrees with people more than chance."""
    if undecided:
        yield Text(undecided_sentence(undecided))
    if any(worse_than_chance(member.disagreement, member.weight) for member in members):
        warning = "A member disagrees with people more than chance (.500). Do not tune a policy to it."
        yield Text(warning, style="bold red")
