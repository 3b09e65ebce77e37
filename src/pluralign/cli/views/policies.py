"""Views of ``pluralign tune``: the tuned policies' rewards, KL and sample answers, and how to serve them."""

import shlex
from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pluralign.cli.views.tables import (
    command_line,
    counted_notes,
    figure_table,
    heading,
    shortened,
    text_panel,
    visible,
)
from pluralign.policies.tune import Tuning


def tuning_page(tuning: Tuning) -> Iterator[RenderableType]:
    """Yield rewards before and after, KL, the cross table, one answer per policy, and a command that serves them."""
    yield heading(f"{tuning.folder}: {len(tuning.members)} policies")
    yield Text(
        f"{tuning.model}, {tuning.method} · {tuning.prompts:,} training prompts, {tuning.held_out:,} held-out prompts "
        f"· {tuning.seconds:.0f} s"
    )
    yield from counted_notes(
        (
            (tuning.resumed, "members were tuned by an earlier run"),
            (tuning.too_long, "prompts were dropped: prompt and response do not fit the model's context window"),
            (tuning.bad_rows, "rows were dropped: they hold no prompt"),
        )
    )
    yield _reward_table(tuning)
    for policy in tuning.members:
        if not policy.improved:
            yield Text(
                f"! The reward of member {policy.member} did not improve significantly: its 95 % interval is not above "
                "0. Try more steps or prompts, a higher --learning-rate or a lower --beta.",
                style="yellow",
            )
    for note in tuning.notes:
        yield Text(f"! {note}", style="yellow")
    if len(tuning.members) > 1:
        yield _cross_table(tuning)
    yield from _samples(tuning)
    yield Text("Serve the base model and the adapters with vLLM. Draw an adapter per request with these weights:")
    yield Text("  " + ", ".join(f"{name} {weight:.3f}" for name, weight in tuning.serving.weights.items()))
    yield command_line(f"  cd {shlex.quote(tuning.folder)} && {tuning.serving.command}\n")


def _reward_table(tuning: Tuning) -> Table:
    title = "Reward by the policy's own member on held-out prompts, in standard deviations of the base model's answers"
    table = figure_table(title, "policy", "before", "after", "gain, 95 %", "KL, nats", "tokens")
    for policy in tuning.members:
        low, high = policy.interval
        table.add_row(
            Text(f"{policy.member} {policy.name}"),
            f"{policy.reward_before:+.2f}",
            f"{policy.reward_after:+.2f}",
            f"{low:+.2f} – {high:+.2f}",
            f"{policy.kl:.2f} ± {policy.kl_standard_error:.2f}",
            f"{policy.tokens:.0f}",
        )
    table.caption = f"tokens: mean response length; base model: {tuning.base_tokens:.0f}"
    return table


def _cross_table(tuning: Tuning) -> Table:
    columns = [f"by {policy.member}" for policy in tuning.members]
    table = figure_table("Reward of each policy by each member", "policy", *columns)
    table.add_row("base", *(f"{value:+.2f}" for value in tuning.base))
    for policy, row in zip(tuning.members, tuning.matrix, strict=True):
        table.add_row(str(policy.member), *(f"{value:+.2f}" for value in row))
    return table


def _samples(tuning: Tuning) -> Iterator[RenderableType]:
    for policy in tuning.members:
        for sample in policy.samples[:1]:
            prompt = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]
            texts = (f"“{prompt}”", f"before: {sample.before}", f"after: {sample.after}")
            yield text_panel("\n".join(shortened(visible(text)) for text in texts), f"Policy {policy.member}")
