"""The values that every step of a fit reads, and the members that a step returns."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pluralign.core.arrays import FloatArray, Mask
from pluralign.core.checkpoints import Arrays, Checkpoints
from pluralign.core.errors import DataError, UsageError
from pluralign.core.types import Level
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import ENSEMBLE_FILE
from pluralign.ensemble.held_out import HeldOutVotes, held_out_files
from pluralign.ensemble.record import HistoryRow
from pluralign.learning.baselines import BASELINES, Baseline, fit_baselines
from pluralign.learning.bradley_terry import scores
from pluralign.learning.options import FitOptions
from pluralign.learning.pairs import Pairs, training_bound, validation_folds
from pluralign.learning.stagewise import hard_votes
from pluralign.learning.teacher import TrainedTeacher
from pluralign.theory import calibration
from pluralign.theory.calibration import sigmoid, with_undecided
from pluralign.theory.intervals import clustered_interval
from pluralign.theory.posterior import ChoiceModel
from pluralign.votes.preferences import PreferenceSet

MANY_PAIRS = 100_000
"""Below this number of pairs numpy runs on one thread. More threads gain nothing on such matrices, lose much on a busy
machine, and change the last digits of results with the number of cores."""
AUTO_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""The numbers of members that ``--k auto`` tries."""

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


@dataclass(frozen=True, eq=False)
class Members:
    """Linear rewards and their weights."""

    theta: FloatArray
    """One column per member, ``(d, k)``."""
    weights: FloatArray
    """``(k,)``, on the simplex."""
    undecided: float = 0.0
    """u, the share of votes that no member explains."""

    @property
    def k(self) -> int:
        """Number of members."""
        return len(self.weights)

    def prob_hat(self, pairs: Pairs, level: Level) -> FloatArray:
        """Return the predicted share preferring response a, ``(n,)``: of hard votes, or of policies at β = 1."""
        if level == "policy":
            votes = sigmoid(scores(pairs.difference, self.theta))
        else:
            votes = hard_votes(pairs.difference, self.theta)
        return with_undecided(np.clip(votes @ self.weights, 0.0, 1.0), self.undecided)

    def unit_spread(self, pairs: Pairs) -> "Members":
        """Return the members with rewards scaled so that their differences over ``pairs`` have unit spread."""
        spread = np.std(scores(pairs.difference, self.theta), axis=0)
        return replace(self, theta=self.theta / np.maximum(spread, 1e-12))


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a fit on frozen features learned from its training pairs."""

    members: Members
    temperature: float
    """β of the policy-level reading."""
    baselines: Mapping[str, Baseline]
    unbounded: Members | None
    """The same ensemble without the bound on disagreement. None where no bound was set."""
    target: str | None = None
    """What joint members learned from: ``teacher``, ``mixture`` or ``votes`` at the vote level, or ``raters``."""
    vote_share: float | None = None
    """Share of the raw votes in that target."""
    choice_model: ChoiceModel = field(default_factory=ChoiceModel)
    """What the choices of a person say about the person."""


@dataclass(frozen=True, eq=False)
class FitTask:
    """One fit on frozen features: its pairs, options, checkpoints and watcher."""

    train: Pairs
    folds: list[Mask]
    """Validation folds of the training pairs. The first one serves the choices made here."""
    options: FitOptions
    checkpoints: Checkpoints
    watcher: FitWatcher
    teacher: TrainedTeacher | None = None
    """Rewards that were trained with the features; None to fit a teacher."""

    @classmethod
    def start(
        cls,
        train: Pairs,
        options: FitOptions,
        checkpoints: Checkpoints,
        watcher: FitWatcher,
        validation: Mask | None = None,
        teacher: TrainedTeacher | None = None,
    ) -> "FitTask":
        """Return the task with its validation folds.

        Args:
            train: the training pairs.
            options: how to learn.
            checkpoints: finished steps.
            watcher: receives the progress.
            validation: the training pairs that form the only fold (default: several folds of all prompts).
            teacher: rewards that were trained with the features.
        """
        folds = validation_folds(train.prompt, options.seed) if validation is None else [validation]
        return cls(train, folds, options, checkpoints, watcher, teacher)

    def on_frozen_inputs(self) -> "FitTask":
        """Return the task of predictors that use none of the trained inputs, with folds of all prompts.

        A baseline on trained inputs would be weaker: they fit the votes of the training pairs too well.
        """
        if self.teacher is None:
            return self
        inputs = np.ascontiguousarray(self.train.inputs[:, : self.teacher.n_frozen])
        folds = validation_folds(self.train.prompt, self.options.seed)
        return replace(self, train=replace(self.train, inputs=inputs), folds=folds)

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

    def keep(self, name: str, fit: Callable[[], Mapping[int, Members]]) -> dict[int, Members]:
        """Return the ensembles that ``fit`` returns by size, read from the checkpoint if it was finished before."""

        def compute() -> Arrays:
            fitted = fit().items()
            return {f"{k}/{part}": np.asarray(value) for k, members in fitted for part, value in vars(members).items()}

        arrays = self.checkpoints.arrays(name, compute)
        sizes = sorted({int(key.partition("/")[0]) for key in arrays})
        return {
            k: Members(arrays[f"{k}/theta"], arrays[f"{k}/weights"], float(arrays[f"{k}/undecided"])) for k in sizes
        }

    def in_parallel(self, fits: Sequence[Callable[[], Result]]) -> list[Result]:
        """Return the results of independent fits, run on one core each.

        They run one after the other where numpy already uses all cores, and where several processes learn together,
        because their sums must be taken in the same order.
        """
        if self.options.level == "policy" or len(self.train) >= MANY_PAIRS or self.train.processes.count > 1:
            return [fit() for fit in fits]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda fit: fit(), fits))


# --- Choices made on validation prompts: the target, the number of members, the temperature.


BETAS = np.geomspace(0.02, 4.0, 48)
"""Temperatures to try for the policy-level reading, for rewards whose differences have unit spread."""


def validation_brier(members: Members, check: Pairs, level: Level) -> float:
    """Return the Brier score of an ensemble on the validation pairs."""
    return calibration.brier(members.prob_hat(check, level), check.prob_a)


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
    errors = []
    for beta in BETAS:
        share = calibration.policy_prob(difference, members.weights, beta)
        errors.append(calibration.brier(calibration.with_undecided(share, members.undecided), check.prob_a))
    return float(BETAS[int(np.argmin(errors))])


# --- The baselines of a fit, kept in its checkpoint.


def fit_rivals(task: FitTask) -> dict[str, Baseline]:
    """Return every baseline, fitted to the training pairs with the same folds as the ensemble.

    If features were trained with a teacher, baselines use the frozen ones.
    """
    task = task.on_frozen_inputs()

    def compute() -> Arrays:
        fitted = fit_baselines(
            task.train,
            task.folds,
            task.largest_size,
            seed=task.options.seed,
            report=task.watcher.fitting_baseline,
        )
        flat = {f"{name}/{part}": array for name, base in fitted.items() for part, array in base.arrays.items()}
        return flat | {f"{name}/seconds": np.array(base.seconds) for name, base in fitted.items()}

    arrays = task.checkpoints.arrays("baselines", compute)
    kept = {}
    for name, formula in BASELINES.items():
        parts = {key.partition("/")[2]: array for key, array in arrays.items() if key.startswith(f"{name}/")}
        seconds = float(parts.pop("seconds"))
        kept[name] = Baseline(formula, parts, seconds)
    return kept


# --- Shared by frozen and fine-tuned fits: which options decide a fit, what may be replaced, how a fit is saved.


NOT_DECISIVE = ("features", "keep_held_out", "folds")
"""Options of a fit that do not change its members."""
CHOSEN_LATER = ("precision", "learning_rate", "batch_size", "max_length")
"""Options whose recorded value may be another one than the one that was given."""


def decisive_options(options: FitOptions) -> dict[str, Any]:
    """Return the options that change what is learned. A killed fit resumes if only other options differ."""
    return {name: value for name, value in asdict(options).items() if name not in NOT_DECISIVE}


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
    if overwrite or folder is None or not (Path(folder) / ENSEMBLE_FILE).is_file():
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


def save_fit(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, folder: str | os.PathLike[str], *, keep_held_out: bool
) -> None:
    """Write an ensemble into a folder, with its held-out votes or without."""
    ensemble.save(folder, held_out_files(ensemble, held_out) if keep_held_out else None)
