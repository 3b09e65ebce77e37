"""The report of the demo: that of its ensemble, with camps and tables of everything that the terminal leaves out."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pluralign.core.files import atomic_write
from pluralign.experiments.demo import Asked, DemoResult
from pluralign.measuring.pruning import Pruning
from pluralign.publishing.report import page
from pluralign.publishing.tables import Table
from pluralign.votes.summary import Inspection, Truth


def write_demo_report(
    result: DemoResult,
    path: Path,
    summary: Inspection,
    truth: Truth,
    *,
    encoder: str,
    commands: Sequence[Sequence[str]] = (),
) -> Path:
    """Write the report of the demo to an HTML file.

    Args:
        result: of the demo.
        path: the file to write.
        summary: of the votes of the town hall.
        truth: the true values that ``summary`` estimates.
        encoder: of the texts.
        commands: the commands that reproduce the ensemble, each as a list of words.
    """
    camps = {
        f"vote counts, features of the texts ({encoder})": result.camps,
        f"votes with rater ids, features of the texts ({encoder})": result.camps_rater_ids,
        "vote counts, true features": result.camps_true_features,
    }
    details = list(detail_tables(result, summary, truth))
    text = page(
        result.ensemble, result.report_data, name="The town hall", commands=commands, camps=camps, details=details
    )
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


def detail_tables(result: DemoResult, summary: Inspection, truth: Truth) -> Iterator[Table]:
    """Yield all methods, the estimates beside the truth, pruning, and one question with the town's rankings."""
    yield _methods(result)
    yield _estimates(summary, truth)
    yield _pruning(result.pruning)
    yield _question(result.asked)
    yield _rankings(result)


def _methods(result: DemoResult) -> Table:
    rows = [
        (
            method.name,
            f"{method.k:,}",
            *(f"{score:z.4f}" for score in (method.brier, method.brier_corrected, method.true_error)),
            "" if method.worst_disagreement is None else f"{method.worst_disagreement:.3f}",
            "" if method.seconds is None else f"{method.seconds:.1f}",
        )
        for method in result.methods
    ]
    return Table(
        "All methods on held-out prompts, best first",
        ("", "k", "Brier", "corrected", "true error", "worst member", "seconds"),
        rows,
        "True error: squared distance to the shares of the whole town. Corrected: an estimate of it from the votes "
        "alone. Worst member: largest disagreement of a member (chance level .500).",
    )


def _estimates(summary: Inspection, truth: Truth) -> Table:
    figures = (
        ("noise", None, summary.noise, truth.noise),
        ("constant ½", summary.constant_half, summary.constant_half_corrected, truth.constant_half),
        ("floor", summary.floor, summary.floor_corrected, truth.floor),
        ("majority share", summary.majority_share, None, truth.majority_share),
    )
    return Table(
        "Estimates from the votes, and the known truth",
        ("", "observed", "estimated", "true"),
        [(name, *("" if value is None else f"{value:z.4f}" for value in values)) for name, *values in figures],
        "The corrected floor is biased low: majorities are estimated from the same votes.",
    )


def _pruning(pruning: Pruning) -> Table:
    rows = [
        (
            f"member {j}",
            f"{distance:.3f}",
            f"{pruning.disagreements[j]:.3f}",
            "removed" if j in pruning.removed else "kept",
        )
        for j, distance in sorted(enumerate(pruning.distances), key=lambda entry: -entry[1])
    ]
    before, after = pruning.error_before.mean, pruning.error_after.mean
    return Table(
        f"Pruning by Theorem 3 (β = {pruning.beta:g})",
        ("", "distance", "disagreement", ""),
        rows,
        f"Removed {pruning.removed_weight:.3f} of the weight. Calibration error {before:.4f} before and {after:.4f} "
        f"after; the theorem guarantees at most {pruning.bound:.4f}. Distance: how often the member and a random "
        "member prefer different responses.",
    )


def _question(asked: Asked) -> Table:
    slate = {entry.text: f"{entry.share:.0%}" for entry in asked.answer.answers}
    chosen = asked.answer.consensus.text if asked.answer.consensus else ""
    rows = [
        (
            f"answer {number}",
            slate.get(text, "not shown"),
            f"{asked.share_of(text):.0%}",
            f"{'Consensus. ' if text == chosen else ''}{text}",
        )
        for number, text in enumerate(asked.responses, 1)
    ]
    return Table(
        f"One held-out question: “{asked.prompt}”",
        ("", "predicted", "share of the town", ""),
        rows,
        "Predicted share of people with this first choice, for the answers of the slate, and true share of the town.",
    )


def _rankings(result: DemoResult) -> Table:
    found = result.rankings
    rows = [
        (f"{weight:.4f}", " > ".join(found.alternatives[place] for place in ranking))
        for weight, ranking in zip(found.weights, found.rankings, strict=True)
    ]
    return Table(
        "Rankings that give the shares of the whole town on this question",
        ("weight", "ranking, best first"),
        rows,
        f"At most {found.size_at_most} rankings are needed (Carathéodory). The mixture is not unique.",
    )
