"""Views of ``pluralign fit``: a live table while it runs, and the fitted ensemble."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from pluralign.cli.console import PlainLines, say
from pluralign.cli.render.evaluation import member_warnings, scores
from pluralign.cli.render.tables import SafeConsole, draw, heading
from pluralign.core.text import counted
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.headline import headline, main_evaluation
from pluralign.ensemble.record import EncoderChoice, HistoryRow, TunedFit
from pluralign.learning.task import FitWatcher
from pluralign.publishing import tables
from pluralign.publishing.tables import number


class FitWatch(FitWatcher):
    """Shows a live table of Brier score by k on stderr while a fit runs.

    If stderr is no terminal, it prints a plain line on the current stage now and then, if the fit takes long.
    """

    def __init__(self) -> None:
        self._console = SafeConsole(stderr=True)
        self._plain = PlainLines(say)
        self._live: Live | None = None
        self._rows: list[HistoryRow] = []
        self._floor = math.nan

    def __enter__(self) -> "FitWatch":
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def floor(self, brier: float) -> None:
        """Add the floor to the table."""
        self._floor = brier
        self._draw("fitting")

    def choosing(self, option: str) -> None:
        """Name the option that is being chosen."""
        self._draw(f"choosing {option}")

    def fitting_baseline(self, name: str) -> None:
        """Name the baseline that is being fitted."""
        self._draw(f"fitting the baseline {name}")

    def training(self, member: str) -> None:
        """Show nothing: the progress bar counts the training steps."""

    def fold(self, number: int, folds: int) -> None:
        """Name the fold that is being fitted."""
        self._draw(f"cross-validation: fold {number} of {folds}")

    def record(self, row: HistoryRow) -> None:
        """Add the scores of one ensemble size."""
        self._rows.append(row)
        self._draw("fitting")

    def _draw(self, title: str) -> None:
        if not self._console.is_terminal:
            done = f" ({counted(self._rows[-1].k, 'member')} done)" if self._rows else ""
            self._plain(f"Fit: {title}{done}")
            return
        if self._live is None:
            self._live = Live(console=self._console, transient=True)
            self._live.start()
        table = tables.history_table(self._rows)
        note = "" if math.isnan(self._floor) else f"floor {number(self._floor)}"
        self._live.update(draw(replace(table, title=title, note=note)))


def fit_page(ensemble: RewardEnsemble, folder: str) -> Iterator[RenderableType]:
    """Yield the ensemble next to its baselines, every size, and every member."""
    record = ensemble.record
    data, evaluation, pooled = record.data, record.evaluation, record.cross_validation
    yield heading(f"{record.method} ensemble of {record.k} members, fitted for the {record.level} level")
    if data:
        yield Text(
            f"Trained on {data.train_pairs:,} pairs ({data.train_prompts:,} prompts); tested on {data.test_pairs:,} "
            f"pairs ({data.test_prompts:,} held-out prompts)."
        )
    if sentence := target_sentence(record.target, record.vote_share):
        yield Text(sentence)
    if record.encoders is not None:
        yield Text(encoder_sentence(record.encoders))
    if record.tuning and "stopped" in record.tuning:
        yield Text(
            f"Training stopped after {record.tuning['stages']} stages, {record.k} of them kept: "
            f"{record.tuning['stopped']}."
        )
    if record.raters is not None:
        yield Text(f"Members are fitted to the votes of {record.raters:,} raters. Rater ids are not saved.")
    if pooled:
        folds = record.options["folds"]
        yield Text(
            f"Cross-validated in {folds} folds: each of the {pooled.prompts:,} prompts is predicted by an ensemble "
            "fitted without it."
        )
    if counts := main_evaluation(record):
        where = "all prompts, cross-validated" if pooled else "held-out prompts"
        first = headline(counts, record, folder)
        yield from scores(counts, first, f"Scores on {where} (best first)", record.k)
    yield draw(tables.history_table(record.history))
    if evaluation:
        yield draw(tables.member_table(ensemble.weights.tolist(), evaluation))
        yield from member_warnings(evaluation.members, ensemble.undecided)
    if bound := record.bound:
        yield Text(
            f"Bound {bound.max_disagreement:g} on disagreement: Brier {number(bound.brier)}, worst member "
            f"{bound.worst:.3f}. Without the bound: Brier {number(bound.brier_without)}, worst member "
            f"{bound.worst_without:.3f}."
        )
    if record.seconds is not None and record.seconds_encoding is not None:
        fitting = record.seconds - record.seconds_encoding
        yield Text(f"\nEncoded in {record.seconds_encoding:.1f} s, fitted in {fitting:.1f} s, saved in {folder}.")
    commands = (f"report {folder} -o report.html", f"serve {folder}", f"evaluate {folder} VOTES")
    yield Text("Commands: " + " · ".join(f"pluralign {command}" for command in commands) + "\n", no_wrap=True)


USED_MODEL = {
    "tuned": "The fine-tuned model is used.",
    "outputs": "The fine-tuned model is used, with members that combine its trained outputs.",
    "frozen": "The frozen model is used: fine-tuning did not clearly help on validation prompts.",
}


def encoder_sentence(choice: EncoderChoice) -> str:
    """Return which model is used, and the validation and held-out figures of all fits.

    Example:
        >>> print(encoder_sentence(EncoderChoice("tuned", 0.0568, 0.0584, 0.0246, 0.0268, -0.0022, -0.003, -0.0014)))
        The fine-tuned model is used.
        Brier score on validation prompts: 0.0568 fine-tuned, 0.0584 frozen.
        Held-out Brier score (corrected): 0.0246 fine-tuned, 0.0268 frozen.
        Held-out difference from frozen: −0.0022 [−0.0030, −0.0014] fine-tuned.
    """
    tuned = TunedFit(choice.validation_tuned, choice.test_tuned, choice.difference, choice.low, choice.high)
    fits = {"fine-tuned": tuned} | ({"outputs": choice.outputs} if choice.outputs else {})
    validation = {name: fit.validation for name, fit in fits.items()} | {"frozen": choice.validation_frozen}
    held_out = {name: fit.test for name, fit in fits.items()} | {"frozen": choice.test_frozen}
    lines = [
        USED_MODEL[choice.used],
        f"Brier score on validation prompts: {_named_scores(validation)}.",
        f"Held-out Brier score (corrected): {_named_scores(held_out)}.",
    ]
    if choice.difference is not None:
        differences = ", ".join(f"{_with_interval(fit)} {name}" for name, fit in fits.items())
        lines.append(f"Held-out difference from frozen: {differences}.")
    return "\n".join(lines)


def _named_scores(scores: Mapping[str, float | None]) -> str:
    return ", ".join(f"{score:.4f} {name}" for name, score in scores.items() if score is not None)


def _with_interval(fit: TunedFit) -> str:
    interval = "" if fit.low is None else f" [{number(fit.low)}, {number(fit.high)}]"
    return f"{number(fit.difference)}{interval}"


def target_sentence(target: str | None, vote_share: float | None) -> str:
    """Return what joint members learned from, in words; nothing for other fits and older records.

    Example:
        >>> target_sentence("mixture", 0.3)
        'Members learned from a mixture of soft rewards (70 %) and the votes (30 %).'
    """
    if vote_share is None or target is None:
        return ""
    if vote_share == 1:
        return "Members learned from the votes alone."
    teacher = {"teacher": "one soft reward", "mixture": "a mixture of soft rewards"}[target]
    if vote_share == 0:
        return f"Members learned from {teacher}, which was fitted to the votes."
    return f"Members learned from {teacher} ({100 * (1 - vote_share):.0f} %) and the votes ({100 * vote_share:.0f} %)."
