"""Views of ``pluralign answer``: each answer with the members that chose it, the consensus, and the steering."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pluralign.analysis.profiles import Profile, member_name, unnamed_reason
from pluralign.answering.answer import Answer
from pluralign.answering.consensus import Consensus, Distilled, SlateEntry
from pluralign.answering.steering import Steering
from pluralign.cli.views.tables import BAR_WIDTH, figure_table, heading, text_panel


def answer_page(
    answer: Answer, prompt: str, profiles: Sequence[Profile] = (), prompts: int = 0
) -> Iterator[RenderableType]:
    """Yield the answers of one mode, with the reasons for them.

    Args:
        answer: the answers.
        prompt: the question.
        profiles: the members' cards; empty without held-out votes.
        prompts: number of prompts that the cards were measured on.
    """
    cards = {profile.member: profile for profile in profiles}
    yield heading(f"“{prompt}”")
    for note in answer.notes:
        yield Text(f"· {note}", style="dim")
    if answer.steering:
        chosen = answer.steering
        yield from _steering(chosen)
    for entry in answer.answers:
        yield _entry_panel(entry, _entry_title(entry, answer), cards)
    if answer.coverage is not None:
        count = f"{len(answer.answers)} of {answer.candidates} candidates"
        yield Text(f"Slate: {count}, covering {answer.coverage:.0%} of people (predicted).")
    if answer.consensus:
        yield _consensus_panel(answer.consensus)
    if answer.distilled:
        yield _statement_panel(answer.distilled)
    shown = {j for entry in answer.answers for j in entry.members}
    if any(j in cards and not cards[j].named for j in shown):
        yield Text(unnamed_reason(profiles, prompts), style="dim")


def _entry_title(entry: SlateEntry, answer: Answer) -> str:
    if entry.member in answer.written:
        return f"answer of member {entry.member}, written by its policy"
    return f"member {entry.member}" if answer.mode == "balanced" else "answer"


def _steering(found: Steering) -> Iterator[RenderableType]:
    """Yield what is known about the user, how sure it is, and the choice that would say most next."""
    if found.support is None:
        yield Text(f"Member {found.member} (probability {found.sure:.0%}): {found.why}.")
    else:
        yield Text(
            f"Most likely member: {found.member} (probability {found.sure:.0%}; {found.average:.0%} that you follow no "
            f"member): {found.why}."
        )
        yield Text(f"You are expected to prefer the answer to {found.support:.0%} of the other candidates.")
    if found.path:
        yield _posterior_table(found.path)
    if found.ask:
        pair = Text.assemble(("A  ", "bold"), found.ask.response_a, ("\n\nB  ", "bold"), found.ask.response_b)
        yield text_panel(pair, f"your choice here would say most about you ({found.ask.gain:.3f} nats)")


def _entry_panel(entry: SlateEntry, title: str, cards: Mapping[int, Profile]) -> Panel:
    if entry.member is None:
        return text_panel(entry.text, "refused")
    named = "; ".join(cards[j].label if j in cards else member_name(j) for j in entry.members)
    support = f"{entry.weight:.0%} of the weight · {named or 'no member ranks it first on the slate'}\n\n"
    if entry.share is not None:
        bar = "█" * round(BAR_WIDTH / 2 * entry.share)
        support = f"{bar} favourite of {entry.share:.0%} of people (predicted)\n{support}"
    return text_panel(Text.assemble((support, "dim"), entry.text), title)


def _consensus_panel(consensus: Consensus) -> Panel:
    support = (
        f"Rule: {consensus.rule}. Predicted: {consensus.least_support:.0%} of people prefer it to its strongest rival, "
        f"{consensus.mean_support:.0%} to an average rival; it is the favourite of {consensus.favourite_of:.0%}.\n\n"
    )
    note = f"{consensus.note}\n" if consensus.note else ""
    return text_panel(Text.assemble(note, (support, "dim"), consensus.text), "consensus")


def _statement_panel(statement: Distilled) -> Panel:
    outcome = "It replaces the consensus." if statement.used else "It is not used."
    if statement.refused:
        outcome = f"It is refused: {statement.refused}."
    support = (
        f"Predicted: {statement.least_support:.0%} of people prefer it to its strongest rival; "
        f"{statement.to_reach:.0%} are needed. {outcome}\n\n"
    )
    return text_panel(Text.assemble((support, "dim"), statement.text), "statement written from the slate")


def _posterior_table(path: Sequence[Sequence[float]]) -> Table:
    title = "Probability of each member, by number of your choices"
    table = figure_table(title, "choices", *(str(j) for j in range(len(path[0]))), "none")
    for count, row in enumerate(path):
        table.add_row(str(count), *(f"{value:.2f}" for value in (*row, max(0.0, 1 - sum(row)))))
    return table
