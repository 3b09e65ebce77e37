"""Views of ``pluralign answer``: each answer with the members that chose it, the consensus, and the steering."""

import shlex
from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.panel import Panel
from rich.text import Text

from pluralign.answering.answer import Answer
from pluralign.answering.generate import Generation
from pluralign.answering.policies import TunedPolicy
from pluralign.answering.slate import Distilled, SlateEntry
from pluralign.answering.tune import Tuning
from pluralign.cli.render.results import (
    BAR_WIDTH,
    TEXT_LENGTH,
    command_line,
    counted_notes,
    dim,
    draw,
    heading,
    text_panel,
    visible,
)
from pluralign.core.text import counted, shortened
from pluralign.measuring.cards import Profile, member_name, unnamed_reason
from pluralign.publishing.tables import Table, number
from pluralign.scale.jobs import WrittenShards

ALL_COVERED = 0.9999
"""Coverage of a slate that has every candidate."""


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
        yield dim(f"· {note}")
    if answer.steering:
        yield from _steering(answer)
    for entry in answer.answers:
        yield _entry_panel(entry, answer, cards)
    if answer.coverage is not None:
        covering = f", covering {answer.coverage:.0%} of people (predicted)" if answer.coverage < ALL_COVERED else ""
        yield Text(f"Slate: {len(answer.answers)} of {answer.candidates} candidates{covering}.")
    if found := answer.consensus:
        support = f"Rule: {found.rule}."
        if found.least_support is not None:
            support += f" Predicted: {found.least_support:.0%} of people prefer it to its strongest rival."
        note = f"{found.note}\n" if found.note else ""
        yield text_panel(Text.assemble(note, (f"{support}\n\n", "dim"), found.text), "consensus")
    for text, reason in answer.unlike.items():
        yield dim(f"No share is stated for “{shortened(visible(text), TEXT_LENGTH)}”: {reason}.")
    if answer.distilled:
        yield _statement_panel(answer.distilled)
    shown = {j for entry in answer.answers for j in entry.members}
    if any(j in cards and not cards[j].named for j in shown):
        yield dim(unnamed_reason(profiles, prompts))


def _steering(answer: Answer) -> Iterator[RenderableType]:
    """Yield what choices or words change: the beliefs and the answer, before and now, and the next choice."""
    found = answer.steering
    assert found  # noqa: S101 - in steerable mode
    if found.before is None:
        yield Text(f"Member {found.member}: {found.why}.")
        return
    if not found.note:
        yield Text(f"Most likely member: {found.member}. {found.why[:1].upper()}{found.why[1:]}.")
        before = found.path[0] if found.path else ()
        columns = (*(before and ("before",)), "now")
        states = [(*state, max(0.0, 1 - sum(state))) for state in (*(before and (before,)), found.posterior)]
        names = [*map(str, range(len(found.posterior))), "none"]
        rows = [[name, *(f"{state[j]:.0%}" for state in states)] for j, name in enumerate(names)]
        yield draw(Table("Probability that you follow each member", ("member", *columns), rows))
    now = answer.answers[0].text
    if found.before == now:
        yield Text("The answer is the same as before your choices or words.")
    else:
        yield text_panel(found.before, "answer before your choices or words")
    if found.support is not None:
        yield Text(f"You are expected to prefer the answer to {found.support:.0%} of the other candidates.")
    if found.ask and not found.note:
        pair = Text.assemble(("A  ", "bold"), found.ask.response_a, ("\n\nB  ", "bold"), found.ask.response_b)
        yield text_panel(pair, "your choice here would say most about you")
        for letter, then in (("A", found.ask.answer_a), ("B", found.ask.answer_b)):
            same = "the answer stays the same" if then == now else f"the answer becomes “{visible(then)}”"
            yield Text(f"If you choose {letter}, {shortened(same, TEXT_LENGTH)}")


def _entry_panel(entry: SlateEntry, answer: Answer, cards: Mapping[int, Profile]) -> Panel:
    if answer.refused:
        return text_panel(entry.text, "refused")
    title = f"member {entry.member}" if answer.mode == "balanced" else "answer"
    if entry.member in answer.written:
        title = f"answer of member {entry.member}, written by its policy"
    named = "; ".join(cards[j].label if j in cards else member_name(j) for j in entry.members)
    support = f"Top choice of: {named}" if named else "No member ranks it first on the slate"
    if entry.text in answer.unlike:
        title, support = "answer", f"unlike anything these people voted on: {answer.unlike[entry.text]}"
    elif entry.share is not None:
        bar = "█" * round(BAR_WIDTH / 2 * entry.share)
        support = f"{bar} favourite of {entry.share:.0%} of people (predicted)\n{support}"
    return text_panel(Text.assemble((f"{support}\n\n", "dim"), entry.text), title)


def _statement_panel(statement: Distilled) -> Panel:
    outcome = "It replaces the consensus." if statement.used else "It is not used."
    if statement.refused:
        outcome = f"It is refused: {statement.refused}."
    support = f"{outcome}\n\n"
    if statement.least_support is not None:
        rival = f"{statement.least_support:.0%} of people prefer it to its strongest rival"
        support = f"Predicted: {rival}; {statement.to_reach:.0%} are needed. {support}"
    return text_panel(Text.assemble((support, "dim"), statement.text), "statement written from the slate")


# --- Views of ``pluralign tune``: the tuned policies' rewards, KL and sample answers, and how to serve them.


def tuning_page(tuning: Tuning) -> Iterator[RenderableType]:
    """Yield rewards before and after, KL, the cross table, one answer per policy, and a command that serves them."""
    base, settings, members = tuning.base, tuning.settings, [policy.member for policy in tuning.members]
    assert base is not None and tuning.serving is not None  # noqa: S101, PT018 - a member is tuned
    yield heading(f"{tuning.folder}: {len(members)} policies")
    yield Text(
        f"{settings['model']}, {settings['method']} · {base.prompts:,} training prompts, {base.held_out:,} held-out "
        f"prompts · {tuning.seconds:.0f} s"
    )
    yield from counted_notes(
        (tuning.resumed, "members were tuned by an earlier run"),
        (base.too_long, "prompts were dropped: prompt and response do not fit the model's context window"),
        (tuning.bad_rows, "rows were dropped: they hold no prompt"),
    )
    yield draw(_reward_table(tuning.members, base.base_tokens))
    remedy = "Try more steps or prompts, a higher --learning-rate or a lower --beta."
    weak = [policy.member for policy in tuning.members if not policy.improved]
    for note in (*(f"The reward of member {j} did not improve significantly. {remedy}" for j in weak), *tuning.notes):
        yield Text(f"! {note}", style="yellow")
    if len(members) > 1:
        figures = {"base": base.base_rewards, **{str(one.member): one.rewards for one in tuning.members}}
        rows = [[name, *(number(rewards[j], 2, "+") for j in members)] for name, rewards in figures.items()]
        columns = ("policy", *(f"by {j}" for j in members))
        yield draw(Table("Reward of each policy by each member", columns, rows))
    for policy in tuning.members:
        for sample in policy.samples[:1]:
            prompt = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]
            texts = (f"“{prompt}”", f"before: {sample.before}", f"after: {sample.after}")
            shown = "\n".join(shortened(visible(text), TEXT_LENGTH) for text in texts)
            yield text_panel(shown, f"Policy {policy.member}")
    yield Text("Serve the base model and the adapters with vLLM. Draw an adapter per request with these weights:")
    yield Text("  " + ", ".join(f"{name} {weight:.3f}" for name, weight in tuning.serving.weights.items()))
    yield command_line(f"  cd {shlex.quote(tuning.folder)} && {tuning.serving.command}\n")


def _reward_table(members: Sequence[TunedPolicy], base_tokens: float) -> Table:
    rows = []
    for policy in members:
        figures = (policy.reward_before, policy.reward_after, *policy.interval)
        before, after, low, high = (number(value, 2, "+") for value in figures)
        kl = f"{number(policy.kl, 2)} ± {number(policy.kl_standard_error, 2)}"
        name = f"{policy.member} {policy.name}"
        rows.append([name, before, after, f"{low} – {high}", kl, number(policy.tokens, 0)])
    title = "Reward by the policy's own member on held-out prompts, in standard deviations of the base model's answers"
    columns = ("policy", "before", "after", "gain, 95 %", "KL, nats", "tokens")
    note = f"tokens: mean response length; base model: {number(base_tokens, 0)}"
    return Table(title, columns, rows, note)


# --- Views of resumable jobs that write files: ``pluralign generate``, ``pluralign encode`` and ``pluralign score -o``.


FAILURES_SHOWN = 3


def generation_page(generation: Generation, n: int) -> Iterator[RenderableType]:
    """Yield what was sampled, what was left out, and the first failures."""
    yield heading(generation.file)
    yield Text(
        f"{generation.responses:,} responses to {generation.lines:,} of {generation.prompts:,} prompts from "
        f"{generation.model}, {generation.seconds:.0f} s"
    )
    failures = f"prompts failed; {generation.file}.failed lists them, and the same command tries them again"
    yield from counted_notes(
        (generation.resumed, "prompts were finished by an earlier run"),
        (generation.repeats, "duplicate responses were dropped"),
        (generation.empty, "empty responses were dropped"),
        (generation.cut_off, "responses were cut off at --max-new-tokens; a higher value lets them end"),
        (generation.short, f"prompts have fewer than {n} distinct responses after all rounds of sampling"),
        (len(generation.failed), failures),
    )
    for failure in generation.failed[:FAILURES_SHOWN]:
        yield Text(f"  {failure.error}", style="red")
    yield Text()


def shards_page(job: WrittenShards, numbers: str) -> Iterator[RenderableType]:
    """Yield what is in the folder, and how much of it an earlier run had written."""
    yield heading(job.folder)
    sizes = f"{counted(job.rows, 'text')}, {numbers.format(job.dimension)}, {counted(job.shards, 'shard')}"
    yield Text(f"{sizes}, {job.seconds:.0f} s")
    yield from counted_notes((job.resumed, "finished by an earlier run"))
    yield Text()
