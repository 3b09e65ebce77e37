"""What every step of a fit reads, which choices it makes on validation prompts, and which folders it may replace.

Second file of the joint fit, after ``fit``. ``LearningData`` holds the votes with the features of their texts.
``FitTask`` holds the training pairs that come from them, with validation folds. ``Fitted`` is the result of every way
to learn.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pluralign.core.arrays import FloatArray, Mask, Vectors
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import DataError, UsageError
from pluralign.core.files import refuse_foreign
from pluralign.core.late import late
from pluralign.core.types import Level
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import ENSEMBLE_FILE, OWN_NAMES
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import HistoryRow
from pluralign.learning.baselines import BASELINES, Baseline, fit_baselines
from pluralign.learning.bradley_terry import TrainedTeacher
from pluralign.learning.options import FinetuneOptions, FitOptions
from pluralign.learning.pairs import Members, Pairs, scores, training_bound, validation_folds
from pluralign.text.encoders import TextFeatures
from pluralign.text.finetuned import FinetunedFeatures
from pluralign.theory import calibration
from pluralign.theory.intervals import clustered_interval
from pluralign.theory.posterior import ChoiceModel
from pluralign.votes.preferences import PreferenceSet

MANY_PAIRS = 100_000
"""Below this number of pairs numpy runs on one thread. More threads gain nothing on such matrices, lose much on a busy
machine, and change the last digits of results with the number of cores."""
AUTO_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""The numbers of members that ``--k auto`` tries."""
AUTO_USUAL_SIZE = 8
"""The size at which ``--k auto`` makes the choices that come before that of k."""

Result = TypeVar("Result")


class FitWatcher:
    """Receives the progress of a fit, and ignores it. Override what should be shown, as the command line does."""

    def encoding(self, n_texts: int) -> None:
        """Texts are about to be encoded."""

    def floor(self, brier: float) -> None:
        """The Brier score of a perfect single deterministic reward on the test pairs."""

    def choosing(self, option: str) -> None:
        """An option is about to be chosen on validation prompts."""

    def fitting_baseline(self, name: str) -> None:
        """A baseline is about to be fitted."""

    def training(self, member: str) -> None:
        """A member is about to be fine-tuned."""

    def fold(self, number: int, folds: int) -> None:
        """A fold of the cross-validation is about to be fitted."""

    def record(self, row: HistoryRow) -> None:
        """An ensemble of one size has been fitted and measured."""


# --- the data and the training pairs ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LearningData:
    """Votes with the features of their texts, and how to learn from those that are not held out."""

    preferences: PreferenceSet
    """All votes."""
    test_rows: Mask
    """Pairs that are held out to measure the fit, ``(n_pairs,)``."""
    features: Vectors
    """Of ``texts_of(preferences)``, ``(n_texts, d)``."""
    text_features: TextFeatures | FinetunedFeatures
    """How the features were made."""
    options: FitOptions
    checkpoints: Checkpoints = field(default_factory=lambda: Checkpoints(None, {}))
    """Finished steps, and the processes that learn together."""
    watcher: FitWatcher = field(default_factory=FitWatcher)


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a fit learned from its training pairs."""

    members: Members
    temperature: float
    """β of the policy-level reading."""
    baselines: Mapping[str, Baseline]
    unbounded: Members | None
    """The same ensemble without the bound on disagreement. None where no bound was set."""
    history: list[HistoryRow]
    """Figures of every size that was fitted."""
    target: str | None = None
    """What members learned from: ``teacher``, ``mixture`` or ``votes`` at the vote level, ``judgments``, ``raters``."""
    vote_share: float | None = None
    """Share of the raw votes in that target."""
    seed_spread: float | None = None
    """Standard deviation of the held-out Brier score over random seeds. None if nothing is random, or if features were
    trained."""
    choice_model: ChoiceModel = field(default_factory=ChoiceModel)
    """What the choices of a person say about the person."""
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arrays of the models of the test of voices, by name. Empty without judgments."""


@dataclass(frozen=True, eq=False)
class FitTask:
    """The training pairs of one fit, with its options, checkpoints and watcher."""

    train: Pairs
    options: FitOptions
    checkpoints: Checkpoints
    watcher: FitWatcher
    test: Pairs | None = None
    """The held-out pairs, which measure the ensembles of the history. Nothing is chosen on them."""
    test_votes: PreferenceSet | None = None
    """Their votes."""
    validation: Mask | None = None
    """The training pairs that form the only validation fold. None for several folds of all prompts."""
    teacher: TrainedTeacher | None = None
    """Rewards that were trained with the features; None to fit a teacher."""
    n_frozen: int | None = None
    """Number of inputs that were not trained on votes; they come first. None: baselines use all inputs."""

    @cached_property
    def folds(self) -> list[Mask]:
        """Validation folds of the training pairs. The first one serves the choices made here."""
        if self.validation is not None:
            return [self.validation]
        return validation_folds(self.train.prompt)

    @cached_property
    def learn(self) -> Pairs:
        """Training pairs without the validation prompts."""
        return self.train[~self.folds[0]]

    @cached_property
    def check(self) -> Pairs:
        """Training pairs of the validation prompts."""
        return self.train[self.folds[0]]

    @property
    def bound(self) -> float:
        """The largest disagreement that a member may have on training pairs."""
        return training_bound(self.options.max_disagreement, len(np.unique(self.train.prompt)))

    @property
    def largest_size(self) -> int:
        """The number of members asked for, or the largest that ``auto`` tries."""
        return AUTO_SIZES[-1] if self.options.k == "auto" else int(self.options.k)

    @property
    def usual_size(self) -> int:
        """The number of members asked for, or the one at which ``auto`` makes the choices before that of k."""
        return AUTO_USUAL_SIZE if self.options.k == "auto" else int(self.options.k)

    def test_errors(self, ensembles: Sequence[Members]) -> FloatArray:
        """Return the Brier score of each ensemble on the held-out pairs. Nothing is chosen by it."""
        assert self.test is not None  # noqa: S101
        return np.array([members.brier(self.test, self.options.level) for members in ensembles])

    def measured(self, members: Members) -> HistoryRow:
        """Measure the ensemble of one size on training and held-out pairs, and show its row."""
        assert self.test is not None and self.test_votes is not None  # noqa: S101, PT018
        level, prob_a, votes = self.options.level, self.test.prob_a, self.test_votes
        share = members.prob_hat(self.test, level)
        row = HistoryRow(
            k=members.k,
            train_brier=members.brier(self.train, level),
            test_brier=calibration.brier(share, prob_a),
            test_brier_corrected=calibration.brier_corrected(share, prob_a, votes.n_votes, votes.counted_ties),
            weights=members.weights.tolist(),
            undecided=members.undecided,
        )
        self.watcher.record(row)
        return row

    def baselines(self) -> dict[str, Baseline]:
        """Return every baseline, fitted to the training pairs with the same folds as the ensemble.

        If features were trained beside frozen ones, baselines use the frozen ones, with folds of all prompts: on
        trained inputs, which fit the votes of the training pairs too well, they would be weaker.
        """
        train, folds = self.train, self.folds
        if self.n_frozen is not None:
            train = replace(train, inputs=np.ascontiguousarray(train.inputs[:, : self.n_frozen]))
            folds = validation_folds(train.prompt)

        def fit() -> dict[str, Baseline]:
            seed, report = self.options.seed, self.watcher.fitting_baseline
            return fit_baselines(train, folds, self.largest_size, seed=seed, report=report)

        kept = self.checkpoints.keep("baselines", dict[str, Baseline], fit)
        return {name: kept[name] for name in BASELINES}

    def in_parallel(self, fits: Sequence[Callable[[], Result]]) -> list[Result]:
        """Return the results of independent fits, run on one core each.

        They run one after the other where numpy already uses all cores, and where several processes learn together,
        because their sums must be taken in the same order.
        """
        if len(self.train) >= MANY_PAIRS or self.train.processes.count > 1:
            return [fit() for fit in fits]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda fit: fit(), fits))

    def errors_on_folds(
        self, name: str, folds: Sequence[Mask], ensembles: Callable[[Mask], Sequence[Members]]
    ) -> FloatArray:
        """Return (p̂ − p)² of each training pair for each candidate; NaN in no fold. Folds are kept and run in parallel.

        Args:
            name: of the steps in the checkpoint.
            folds: masks of validation pairs, ``(n_train,)`` each.
            ensembles: returns the ensemble of every candidate, fitted without a fold.
        """

        def kept(fold: Mask) -> FloatArray:
            def errors() -> FloatArray:
                check = self.train[fold]
                shares = [members.prob_hat(check, self.options.level) for members in ensembles(fold)]
                return np.column_stack([calibration.squared_error(share, check.prob_a) for share in shares])

            return self.checkpoints.keep(f"{name}-{int(np.argmax(fold))}", FloatArray, errors)

        found = self.in_parallel([partial(kept, fold) for fold in folds])
        errors = np.full((len(self.train), found[0].shape[1]), np.nan)
        for fold, error in zip(folds, found, strict=True):
            errors[fold] = error
        return errors


def history_sizes(size: int) -> list[int]:
    """Return the sizes that are fitted for the history of an ensemble: the powers of two below its size, and its size.

    Example:
        >>> history_sizes(6)
        [1, 2, 4, 6]
    """
    return [2**i for i in range(size.bit_length()) if 2**i < size] + [size]


# --- choices made on validation prompts: the number of members, the temperature ---------------------------------------


BETAS = np.geomspace(0.02, 4.0, 48)
"""Temperatures to try for the policy-level reading, for rewards whose differences have unit spread."""


def choose_size(fits: Mapping[int, Members], check: Pairs, level: Level) -> int:
    """Return the smallest k whose validation error is within one standard error of the best."""
    errors = {k: calibration.squared_error(fit.prob_hat(check, level), check.prob_a) for k, fit in fits.items()}
    best = min(errors, key=lambda k: float(errors[k].mean()))
    interval = clustered_interval(errors[best], check.prompt)
    slack = np.nan_to_num(interval.standard_error)  # NaN with one validation prompt
    return min(k for k in errors if errors[k].mean() <= interval.mean + slack)


def choose_temperature(members: Members, check: Pairs) -> float:
    """Return the temperature at which the policy-level reading predicts the validation votes best."""
    difference = scores(check.difference, members.theta)

    def error(beta: float) -> float:
        share = calibration.policy_prob(difference, members.weights, beta)
        return calibration.brier(calibration.with_undecided(share, members.undecided), check.prob_a)

    return float(min(BETAS, key=error))


# --- Shared by frozen and fine-tuned fits: which options decide a fit, what may be replaced, how a fit is saved.


NOT_DECISIVE = ("features", "keep_held_out", "folds", "gradient_checkpointing", "report_to")
"""Options that do not change the members."""
CHOSEN_LATER = ("precision", "learning_rate", "batch_size", "max_length")
"""Options whose recorded value may be another one than the one that was given."""


def decisive_options(options: FitOptions | FinetuneOptions) -> dict[str, Any]:
    """Return the options that change what is learned. A killed fit resumes if only other options differ."""
    return {name: value for name, value in asdict(options).items() if name not in NOT_DECISIVE}


def with_insight(ensemble: RewardEnsemble, held_out: HeldOutVotes, options: FitOptions) -> RewardEnsemble:
    """Return an ensemble with its insight, which a higher room makes of it; without texts if no votes are kept."""
    found: RewardEnsemble = late("measuring.insight", "with_insight")(ensemble, held_out, texts=options.keep_held_out)
    return found


def refuse_to_replace(
    folder: str | os.PathLike[str] | None,
    preferences: PreferenceSet,
    options: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Raise UsageError if a folder holds an ensemble of other votes or options, so that none is lost by mistake.

    Args:
        folder: where a fit will be saved.
        preferences: the votes of the fit.
        options: all its decisive options by name, also those of fine-tuning, and whether it has ``raters``.
        overwrite: allow it.
    """
    if folder is None:
        return
    refuse_foreign(folder, *OWN_NAMES, overwrite=overwrite)
    if overwrite or not (Path(folder) / ENSEMBLE_FILE).is_file():
        return
    remedy = "name another folder, or use --overwrite."
    try:
        record = RewardEnsemble.load(folder).record
    except DataError:
        raise UsageError(f"{folder} holds an ensemble that cannot be read: {remedy}") from None
    if record.data is None or record.data.fingerprint != preferences.fingerprint:
        raise UsageError(f"{folder} holds an ensemble of other votes: {remedy}")
    if record.pruned is not None:
        raise UsageError(f"{folder} holds a pruned ensemble: {remedy}")
    used = {**record.options, "backbone": None, **(record.tuning or {}), "raters": record.raters is not None}
    given = {name: value for name, value in options.items() if name not in CHOSEN_LATER}
    if changed := [name for name, value in given.items() if name in used and used[name] != value]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise UsageError(f"{folder} holds an ensemble that was fitted with other options ({names}): {remedy}")
