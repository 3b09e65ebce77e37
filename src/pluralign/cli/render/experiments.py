"""Views of ``pluralign reproduce``: the plan of a recipe and its results."""

import shlex
from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pluralign.cli.render.tables import command_line, figure_table, heading
from pluralign.experiments.plan import Plan
from pluralign.experiments.recipe_cost import Cost
from pluralign.experiments.reproduce import Plans, Reproduction, Reproductions
from pluralign.learning.routes import OPTIMIZER_NAMES
from pluralign.publishing.tables import number

SHORT = {"float32": "FP32", "bfloat16": "BF16"}


def plan_page(plan: Plan) -> Iterator[RenderableType]:
    """Yield the steps of a recipe, its requirements and its estimated cost."""
    yield heading(f"{plan.recipe.title}: steps")
    for position, step in enumerate(plan.steps, 1):
        yield Text(f"{position}. {step.does}")
        yield command_line(f"   {shlex.join(step.command)}")
    yield heading("Requirements")
    for line in plan.needs:
        yield Text(f"· {line}")
    if plan.routes:
        yield heading(f"Ways to train {plan.model} on GPUs of {plan.gpu_gb:.0f} GB")
    for way in plan.routes:
        yield Text(f"· {way.route}: about {way.memory_gb:.0f} GB on {'each GPU' if way.gpus > 1 else 'one GPU'}")
        yield command_line(f"   {shlex.join(way.command)}")
    yield _cost_table(plan)
    for line in (*_cost_notes(plan), *plan.recipe.notes):
        yield Text(f"· {line}", style="dim")
    yield Text("Formulas and assumptions: docs/how-to/reproduce.md\n", style="dim")


def plans_page(plans: Plans) -> Iterator[RenderableType]:
    """Yield the estimated cost of the four experiments, and their requirements."""
    table = figure_table("Estimated cost on one H100", "", "hours", "train", "score", "sample", "rank", "disk GB")
    for plan in plans.plans.values():
        cost = plan.cost
        hours = (cost.gpu_hours, cost.training_hours, cost.scoring_hours, cost.generation_hours, cost.ranking_hours)
        table.add_row(plan.recipe.title, *(f"{value:.1f}" for value in hours), f"{cost.disk_gb:.0f}")
    table.add_row("all", f"{plans.gpu_hours:.1f}", "", "", "", "", "")
    yield table
    for name, plan in plans.plans.items():
        yield heading(plan.recipe.title)
        for line in plan.needs:
            yield Text(f"· {line}")
        yield command_line(f"   pluralign reproduce {name} --dry-run")
    yield Text("The last command of each set shows its steps.\n", style="dim")


def reproductions_page(results: Reproductions) -> Iterator[RenderableType]:
    """Yield the results of the four experiments, and the files of the figures."""
    if results.tiny:
        yield Text("A rehearsal with synthetic votes and tiny models: the figures mean nothing.", style="yellow")
    columns = ("", "held out", "floor", "below the floor from", "mean τ")
    table = figure_table(f"The paper's experiments in {results.folder}", *columns)
    for name, one in results.experiments.items():
        below = "never" if one.members_below_floor is None else f"k = {one.members_below_floor}"
        scores = (number(one.history[-1].test_brier), number(one.floor))
        table.add_row(name, *scores, below, number(one.mean_tau))
    yield table
    for one in results.experiments.values():
        yield Text(f"Report: {one.report}")
    for path in results.figures:
        yield Text(f"Figure: {path}")
    yield Text("")


def _first_table(reproduction: Reproduction) -> Table:
    """Return the paper's Table 1 beside the figures of these votes, or the latter alone."""

    def shown(value: float) -> str:
        return f"{value:,.2f}" if value % 1 else f"{value:,.0f}"

    if all(row.paper is None for row in reproduction.table):
        table = figure_table("The votes", "", "")
        for row in reproduction.table:
            table.add_row(row.name, shown(row.here))
        return table
    table = figure_table("Table 1", "", "paper", "here", "")
    for row in reproduction.table:
        paper = "" if row.paper is None else shown(row.paper)
        table.add_row(row.name, paper, shown(row.here), "matches the paper" if row.close else "")
    return table


def _cost_table(plan: Plan) -> Table:
    title = f"Estimated for {plan.model}, {plan.recipe.fit.k} members, one H100"
    parts = ("train", "score", "sample", "rank", "GPU GB", "disk GB")
    table = figure_table(title, "", "hours", *parts)
    for cost in (plan.cost, *plan.alternatives.values()):
        way = f"{'LoRA, ' if cost.lora else ''}{OPTIMIZER_NAMES[cost.optimizer]}, {SHORT[cost.precision]}"
        hours = (cost.gpu_hours, cost.training_hours, cost.scoring_hours, cost.generation_hours, cost.ranking_hours)
        sizes = (cost.memory_gb, cost.disk_gb)
        table.add_row(way, *(f"{value:.1f}" for value in hours), *(f"{value:.0f}" for value in sizes))
    return table


def _cost_notes(plan: Plan) -> Iterator[str]:
    size, sampled, cost = plan.recipe.size, plan.recipe.candidates, plan.cost
    text_tokens = size.prompt_tokens + size.response_tokens
    yield (
        f"{cost.train_tokens // text_tokens:,} texts of {size.train_pairs:,} training pairs × {text_tokens:,} tokens "
        f"(assumed) = {cost.train_tokens:,} tokens per member, in {cost.steps:,} steps; pairs of a prompt share texts"
    )
    yield _training_note(cost)
    yield (
        f"{sampled.limit} prompts × {sampled.n} = {cost.continuations:,} continuations of at most "
        f"{sampled.max_new_tokens} tokens"
    )
    yield "memory and disk are for weights, gradients and optimizer state in the named precision"


def _training_note(cost: Cost) -> str:
    flops = cost.training_flops + cost.optimizer_flops
    share = cost.optimizer_flops / cost.training_flops
    return (
        f"training takes {flops:.1e} operations, including {share:.1%} added by {cost.optimizer}; scoring all texts "
        f"takes {cost.scoring_flops:.1e}"
    )


def reproduction_page(reproduction: Reproduction) -> Iterator[RenderableType]:
    """Yield the paper's Table 1 and its two figures next to the results here."""
    yield heading(f"{reproduction.name} in {reproduction.folder}")
    if reproduction.tiny:
        votes = "synthetic votes" if any(row.paper for row in reproduction.table) else "few of these votes"
        yield Text(f"A rehearsal with {votes} and a tiny model: the figures mean nothing.", style="yellow")
    yield _first_table(reproduction)
    table = figure_table("Figure 2: Brier score by number of members", "k", "train", "held out")
    for stage in reproduction.history:
        table.add_row(str(stage.k), number(stage.train_brier), number(stage.test_brier))
    table.add_row("floor", "", number(reproduction.floor))
    yield table
    below = reproduction.members_below_floor
    yield Text(f"The ensemble beats the floor from {below} members on." if below else "No size beats the floor.")
    yield Text(f"Figure 3: mean Kendall's τ between members: {number(reproduction.mean_tau)}.")
    if reproduction.skipped:
        yield Text(f"Finished by an earlier run: {', '.join(reproduction.skipped)}.", style="dim")
    yield Text(f"Report: {reproduction.report}\n")
