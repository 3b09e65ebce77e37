"""Views of one ensemble's analysis: pruning, certificate, diversity and member profiles."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.panel import Panel
from rich.text import Text

from pluralign.cli.render.tables import TEXT_LENGTH, dim, draw, heading, text_panel
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.measuring.cards import Profile, member_name, unnamed_reason
from pluralign.measuring.certificate import Certificate
from pluralign.measuring.diversity import CaseStudy, Diversity
from pluralign.measuring.pruning import Pruning
from pluralign.measuring.rankings import RankingResult
from pluralign.publishing import tables
from pluralign.publishing.tables import Cell, Table, cut, number
from pluralign.theory.guarantees import outlier_weight_bound

POSITIONS_SHOWN = 3
"""Positions per card in the terminal; the JSON, the report and the page have all of them."""

# --- pruning and certificates -----------------------------------------------------------------------------------------


def pruning_page(pruning: Pruning, before: RewardEnsemble, folder: str = "") -> Iterator[RenderableType]:
    """Yield which members were removed, how far each was from the ensemble, and the error before and after."""
    count, k = len(pruning.removed), before.k
    if count:
        which = ", ".join(map(str, pruning.removed))
        outcome = f"Removed {count} of {k} members ({which}), {pruning.removed_weight:.3f} of the weight"
    else:
        outcome = f"Removed no member; all {k} are kept"
        if pruning.removed_weight:
            outcome = (
                f"Removed the undecided share, {pruning.removed_weight:.3f} of the weight; all {k} members are kept"
            )
    yield heading(f"{outcome} (β = {pruning.beta:g} allows at most {outlier_weight_bound(pruning.beta):.3f})")
    yield draw(tables.pruning_table(pruning, before))
    yield draw(tables.pruning_cost_table(pruning))
    if pruning.epsilon_clipped:
        yield dim("The error before is estimated below 0; the guarantees use ε = 0.")
    if pruning.outlier_threshold >= 1:
        yield dim("At this β and ε the outlier threshold is a disagreement of 1 or more, so no member is flagged.")
    yield Text(f"Saved in {folder}. Next: pluralign certify {folder}\n" if folder else "")


def certificate_page(certificate: Certificate, title: str) -> Iterator[RenderableType]:
    """Yield each theorem in one line, its numbers here, and whether it is informative or vacuous."""
    yield heading(title)
    members = f"{certificate.k} members"
    if certificate.undecided:
        members += f", undecided share {certificate.undecided:.1%}"
    yield Text(f"{members}, {certificate.pairs:,} pairs, {certificate.prompts:,} prompts\n")
    for name, verdict, result in tables.certificate_table(certificate).lines:
        yield Text.assemble((name, "bold"), ": ", (verdict, "green" if verdict == "informative" else "yellow"))
        yield Text(f"{result}\n")


# --- diversity --------------------------------------------------------------------------------------------------------


def diversity_page(diversity: Diversity, cases: Sequence[CaseStudy], title: str) -> Iterator[RenderableType]:
    """Yield Kendall's tau between members as a heat map, and the members' choices side by side."""
    yield heading(title)
    count = len(diversity.tau)
    yield Text(f"{diversity.candidates:,} responses to {diversity.prompts:,} prompts, ranked by {count} members")
    yield draw(tables.diversity_table(diversity))
    yield Text(
        f"\nMean τ between two members: {number(diversity.mean_off_diagonal, 2, '+')} "
        f"(standard error over prompts {number(diversity.mean_off_diagonal_standard_error)}); weighted mean: "
        f"{number(diversity.weighted_off_diagonal, 2, '+')}."
    )
    tops = diversity.tops
    yield Text(
        f"Distinct first choices per prompt: {tops.distinct:.2f} (random choice: {tops.distinct_if_random:.2f}). The "
        f"most popular first choice has {tops.most_popular:.0%} of the weight."
    )
    pairs = ((diversity.near_copies, "almost identically"), (diversity.near_opposites, "in almost opposite order"))
    for similar, how in pairs:
        for pair in similar:
            i, j = pair.members
            yield Text(f"Members {i} and {j} rank responses {how}: τ {number(pair.tau, 2, '+')}.", style="bold")
    if any(diversity.constant):
        counts = ", ".join(f"{count:,} of member {j}" for j, count in enumerate(diversity.constant) if count)
        yield dim(f"Prompts left out because the member gives all responses the same reward: {counts}.")
    if diversity.skipped:
        yield dim(f"{diversity.skipped:,} prompts with a single response were skipped.")
    for case in cases:
        yield _case_panel(case)
    yield Text()


def _case_panel(case: CaseStudy) -> Panel:
    case = cut(case, TEXT_LENGTH)
    body = [f"“{case.prompt}”"]
    for choice in case.choices:
        members = f"member{'s' * (len(choice.members) > 1)} {', '.join(map(str, choice.members))}"
        body.append(f"{members} · {choice.weight:.0%} of the weight\n{choice.response}")
    title = f"Prompt {case.number}: first choices among {case.candidates:,} responses"
    return text_panel("\n\n".join(body), title)


# --- profiles ---------------------------------------------------------------------------------------------------------


def profile_page(profiles: Sequence[Profile], prompts: int, title: str) -> Iterator[RenderableType]:
    """Yield one card per member; ``prompts`` is the number of prompts that they were measured on."""
    yield heading(f"{title}\n")
    for profile in profiles:
        name = f"{member_name(profile.member)}: {profile.name}" if profile.named else profile.name
        yield text_panel(_card(profile), Text(name))
    if reason := unnamed_reason(profiles, prompts):
        yield Text(reason)
    yield Text(
        "Only significant differences are listed: 5 % over all cards together, corrected for multiple tests, for "
        "traits, phrases and positions separately. One half of the prompts proposes phrases and positions, and the "
        "other half tests them; the phrases of a position are tested together.\n",
        style="dim",
    )


def _card(profile: Profile) -> Text:
    text = Text(f"weight {profile.weight:.3f} · disagreement {profile.disagreement:.3f}")
    if profile.written and profile.written.shown:
        text.append(f"\n{profile.written.name}", style="bold")
        text.append(f" – {profile.written.sentence}")
        text.append(f"\n{profile.written.evidence}", style="dim")
    elif profile.written:
        text.append(f"\nA description by {profile.written.model} is not shown: {profile.written.reason}.", style="dim")
    if profile.description:
        text.append(f"\n{profile.description}")
    for words, which in ((profile.likes, "phrases it prefers"), (profile.dislikes, "phrases it avoids")):
        if words:
            text.append(f"\n{which}: ", style="italic")
            text.append(", ".join(f"{lean.trait} ({50 * lean.relative:+.0f} points)" for lean in words))
    shown = (*profile.views.positions[:POSITIONS_SHOWN], *profile.views.phrases[:1])
    for view in shown:
        text.append(f"\n\n{view.title}", style="bold")
        text.append(f"\n{view.evidence}")
        for quote in view.quotes[:1]:
            text.append("\npreferred: " if quote.preferred else "\nrejected: ", style="italic")
            text.append(f"“{quote.text}”")
    for pair in cut(profile.distinguishing[:1], TEXT_LENGTH):
        text.append("\n\nA pair where it disagrees with most members: ", style="italic")
        text.append(f"“{pair.prompt}”")
        text.append("\npreferred: ", style="italic")
        text.append(pair.preferred)
        text.append("\nrejected: ", style="italic")
        text.append(pair.other)
        text.append("\nsame choice: ", style="italic")
        text.append(f"{pair.weight_with_it:.0%} of the weight, {pair.people_with_it:.0%} of {pair.votes} people")
    return text


# --- Views of ``pluralign rankings``: whether shares come from rankings, the proof, and the mixture of rankings.


RANKINGS_SHOWN = 10


def rankings_page(result: RankingResult, title: str) -> Iterator[RenderableType]:
    """Yield the verdict, its reason, the mixture of rankings, and a sample from it if one was drawn."""
    alternatives = len(result.alternatives)
    possible = alternatives * (alternatives - 1) // 2
    compared = "all" if result.pairs == possible else "no constraint on the others"
    yield heading(title)
    yield Text(f"{alternatives} alternatives, {result.pairs:,} of {possible:,} pairs compared ({compared})\n")
    yield from _verdict(result)
    shown = list(zip(result.weights, result.rankings, strict=True))[:RANKINGS_SHOWN]
    named: list[list[Cell]] = [
        [weight, " > ".join(result.alternatives[i] for i in ranking)] for weight, ranking in shown
    ]
    yield draw(Table(f"{len(result.rankings)} rankings", ("weight", "ranking, best first"), named, texts=(1,)))
    if (count := len(result.rankings)) > RANKINGS_SHOWN:
        rest = sum(result.weights[RANKINGS_SHOWN:])
        yield Text(f"{count - RANKINGS_SHOWN} more rankings have {rest:.4f} of the weight; --json lists them.")
    yield Text(
        f"At most {result.size_at_most} rankings are needed (Carathéodory). The mixture is not unique: these rankings "
        "need not be those of actual voters.\n"
    )
    if sample := result.sample:
        yield Text(
            f"Sample of {sample.k:,} rankings with equal weights: calibration error to the mixture {sample.error:.5f}, "
            f"expected {sample.expected_error:.5f}, at most 1/(4k) = {sample.bound:.5f} in expectation (Theorem 2).\n"
        )
    method = (
        f"With {alternatives} alternatives this was decided exactly."
        if result.exact
        else f"With {alternatives} alternatives a heuristic search was used: rankings that it finds are a proof, but "
        "finding none proves nothing."
    )
    yield Text(
        "To decide whether shares come from rankings is NP-hard (Theorem 1): all known exact methods take exponential "
        f"time in the number of alternatives. {method}\n",
        style="dim",
    )


def _verdict(result: RankingResult) -> Iterator[RenderableType]:
    if result.realizable:
        yield Text("Realizable: the rankings below give every share.", style="bold green")
        yield Text(f"Largest deviation of a share: {result.residual:.0e}.")
        return
    if result.realizable is None:
        yield Text("Not decided: the search found no rankings that give every share, and no proof against them.\n")
    else:
        yield Text("Not realizable: no mixture of rankings gives these shares.", style="bold red")
    if result.in_words:
        yield Text(f"{result.in_words}\n")
    nearest = (
        "The nearest mixture"
        if result.exact
        else f"The nearest mixture found (lower bound for any mixture: {result.distance_at_least:.6f})"
    )
    yield Text(
        f"{nearest} has calibration error {result.distance:.6f} (mean squared difference over pairs); the largest "
        f"difference is {result.residual:.4f}."
    )
