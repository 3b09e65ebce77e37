"""Views of votes and of one ensemble's analysis: pruning, certificate, diversity, member profiles and rankings."""

import math
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from pluralign.cli.render.results import BAR_WIDTH, TEXT_LENGTH, dim, draw, heading, text_panel
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.verdict import FEW_VOTES
from pluralign.measuring.cards import Profile, member_name, unnamed_reason
from pluralign.measuring.certificate import Certificate
from pluralign.measuring.diversity import CaseStudy, Diversity
from pluralign.measuring.pruning import Pruning
from pluralign.measuring.rankings import RankingResult
from pluralign.publishing import tables
from pluralign.publishing.tables import Cell, Table, cut, ends, number
from pluralign.theory.guarantees import outlier_weight_bound
from pluralign.votes.summary import Inspection

POSITIONS_SHOWN = 3
"""Positions per card in the terminal; the JSON, the report and the page have all of them."""

# --- pruning and certificates -----------------------------------------------------------------------------------------


def pruning_page(pruning: Pruning, before: RewardEnsemble, folder: str = "") -> Iterator[RenderableType]:
    """Yield which members were removed, how far each was from the ensemble, and the error before and after."""
    k, share = before.k, f"{pruning.removed_weight:.3f} of the weight"
    outcome = f"Removed no member; all {k} are kept"
    if pruning.removed:
        outcome = f"Removed {len(pruning.removed)} of {k} members ({', '.join(map(str, pruning.removed))}), {share}"
    elif pruning.removed_weight:
        outcome = f"Removed the undecided share, {share}; all {k} members are kept"
    yield heading(f"{outcome} (β = {pruning.beta:g} allows at most {outlier_weight_bound(pruning.beta):.3f})")
    yield draw(tables.pruning_table(pruning, before))
    yield draw(tables.pruning_cost_table(pruning))
    if pruning.error_before.mean < 0:
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
    for pair in (*diversity.near_copies, *diversity.near_opposites):
        how = "almost identically" if pair.tau > 0 else "in almost opposite order"
        i, j = pair.members
        yield Text(f"Members {i} and {j} rank responses {how}: τ {number(pair.tau, 2, '+')}.", style="bold")
    if diversity.skipped:
        yield dim(f"{diversity.skipped:,} prompts with a single response were skipped.")
    for case in cut(list(cases), TEXT_LENGTH):
        body = [f"“{case.prompt}”"]
        for choice in case.choices:
            members = f"member{'s' * (len(choice.members) > 1)} {', '.join(map(str, choice.members))}"
            body.append(f"{members} · {choice.weight:.0%} of the weight\n{choice.response}")
        title = f"Prompt {case.number}: first choices among {case.candidates:,} responses"
        yield text_panel("\n\n".join(body), title)
    yield Text()


# --- profiles ---------------------------------------------------------------------------------------------------------


def profile_page(profiles: Sequence[Profile], prompts: int, title: str) -> Iterator[RenderableType]:
    """Yield one card per member; ``prompts`` is the number of prompts that they were measured on."""
    yield heading(f"{title}\n")
    for profile in profiles:
        name = f"{member_name(profile.member)}: {profile.name}" if profile.named else profile.name
        yield text_panel(_card(profile), Text(name))
    if reason := unnamed_reason(profiles, prompts):
        yield Text(reason)
    yield dim(
        "Only significant differences are listed: of all claims together, 5 % may be false. One half of the prompts "
        "proposes phrases and positions, and the other half tests them.\n"
    )


def _card(profile: Profile) -> Text:
    text = Text(f"weight {profile.weight:.3f} · disagreement {profile.disagreement:.3f}")
    if profile.written and profile.written.shown:
        text.append(f"\n{profile.written.name}", style="bold").append(f" – {profile.written.sentence}")
        text.append(f"\n{profile.written.evidence}", style="dim")
    elif profile.written:
        text.append(f"\nA description by {profile.written.model} is not shown: {profile.written.reason}.", style="dim")
    if profile.description:
        text.append(f"\n{profile.description}")
    for words, which in ((profile.likes, "phrases it prefers"), (profile.dislikes, "phrases it avoids")):
        if words:
            points = ", ".join(f"{lean.trait} ({50 * lean.relative:+.0f} points)" for lean in words)
            text.append(f"\n{which}: ", style="italic").append(points)
    for view in (*profile.views.positions[:POSITIONS_SHOWN], *profile.views.phrases[:1]):
        text.append(f"\n\n{view.title}", style="bold").append(f"\n{view.evidence}")
        for quote in view.quotes[:1]:
            text.append(f"\n{'preferred' if quote.preferred else 'rejected'}: ", style="italic")
            text.append(f"“{quote.text}”")
    for pair in cut(profile.distinguishing[:1], TEXT_LENGTH):
        people = f"{pair.weight_with_it:.0%} of the weight, {pair.people_with_it:.0%} of {pair.votes} people"
        for label, content in (
            ("\nA pair where it disagrees with most members", f"“{pair.prompt}”"),
            ("preferred", pair.preferred),
            ("rejected", pair.other),
            ("same choice", people),
        ):
            text.append(f"\n{label}: ", style="italic").append(content)
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
    count, shown = len(result.rankings), list(zip(result.weights, result.rankings, strict=True))[:RANKINGS_SHOWN]
    named = [(weight, " > ".join(result.alternatives[i] for i in ranking)) for weight, ranking in shown]
    yield draw(Table(f"{count} rankings", ("weight", "ranking, best first"), named, texts=(1,)))
    if count > RANKINGS_SHOWN:
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
    search = "was searched: rankings that a search finds are a proof, but finding none proves nothing"
    how = "was decided exactly" if result.exact else search
    yield dim(f"This question is NP-hard (Theorem 1). With {alternatives} alternatives it {how}.\n")


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
    bound = "" if result.exact else f" found (lower bound for any mixture: {result.distance_at_least:.6f})"
    yield Text(
        f"The nearest mixture{bound} has calibration error {result.distance:.6f} (mean squared difference over pairs); "
        f"the largest difference is {result.residual:.4f}."
    )


# --- ``inspect``: a summary of votes


MAJORITY_FIRST = 0.9
"""Above this share of pairs won by response a, the data seem to be ordered."""


INTERVALS = ("floor_corrected", "constant_half_corrected")


def inspection_page(summary: Inspection) -> Iterator[RenderableType]:
    """Yield the size of a set of votes, notes on it, its reference scores and a histogram of majority shares."""
    low, high = summary.votes_per_pair_range
    each = f"{low}" if low == high else f"{summary.votes_per_pair:.2f} ({low} to {high})"
    yield heading(summary.name or "votes")
    yield Text(
        f"{summary.pairs:,} pairs · {summary.prompts:,} prompts · {summary.responses:,} distinct responses · "
        f"{summary.votes:,} votes, {each} per pair"
    )
    for note in _notes(summary):
        yield dim(f"· {note}")
    yield draw(_reference_scores(summary))
    kinds = ", ".join(f"{count / summary.pairs:.0%} {name}" for name, count in summary.strata.items())
    yield Text(f"\nMajority share per pair: mean {summary.majority_share:.3f} ({kinds})", style="italic")
    tallest = max(bar.count for bar in summary.histogram)
    for bar in summary.histogram:
        label = f"{bar.low:.3f}" if bar.low == bar.high else f"{bar.low:.2f} – {bar.high:.2f}"
        blocks = "█" * round(BAR_WIDTH * bar.count / tallest) or ("▏" if bar.count else "")
        yield Text(f"  {label} {blocks} {bar.count / summary.pairs:.1%}")
    yield Text()


def _reference_scores(summary: Inspection) -> Table:
    floor, half = (ends(summary.intervals[key]) if key in summary.intervals else "" for key in INTERVALS)
    rows: list[list[Cell]] = [
        ["floor", summary.floor, summary.floor_corrected, floor, "perfect single reward"],
        ["constant ½", summary.constant_half, summary.constant_half_corrected, half, "½ for every pair"],
        ["noise", summary.noise, "", "", "true vote shares"],
    ]
    note = "corrected = Brier − noise: an unbiased estimate of the error against all people, not only voters"
    if math.isnan(summary.floor_corrected):
        note += f". {FEW_VOTES}"
    columns = ("", "Brier", "corrected", "95 % over prompts", "prediction")
    return Table("Reference scores: the squared error of simple predictions", columns, rows, note, texts=(0, -1))


def _notes(summary: Inspection) -> Iterator[str]:
    if judged := summary.judgments:
        use = (
            "fit uses them"
            if judged.used
            else "fit uses the counts, because judgments that say more hold less than a tenth of the votes"
        )
        yield f"{judged.n:,} judgments on {judged.prompts:,} prompts, median {judged.responses:g} responses each; {use}"
    if summary.ties and summary.tie_rule == "half":
        yield f"{summary.ties:,} ties count as half a vote for each side"
    elif summary.ties and summary.tie_rule == "fixed":
        yield f"{summary.ties:,} ties count against the response that has more votes"
    elif summary.ties:
        share = f"{summary.majority_share_of_all:.3f}"
        yield f"{summary.ties:,} ties are not counted; with ties in the denominator the majority share is {share}"
    if summary.single_vote_pairs:
        share = "all" if summary.single_vote_pairs == summary.pairs else f"{summary.single_vote_pairs:,}"
        yield f"{share} pairs have one vote: they show no disagreement and are left out of corrected figures"
    if summary.empty_responses:
        yield f"{summary.empty_responses:,} pairs have an empty response; they are kept, because people voted on them"
    if summary.a_wins > MAJORITY_FIRST:
        yield f"response a wins {summary.a_wins:.0%} of the pairs: the data list the majority's choice first"
    if summary.splits:
        yield "official split: " + ", ".join(f"{name} {count:,}" for name, count in summary.splits.items())
    for kind, count in summary.dropped.items():
        yield f"dropped: {count:,} {kind}"
