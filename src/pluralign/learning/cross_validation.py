"""Cross-validation by prompt: every prompt is predicted by an ensemble that was fitted without it.

A few test prompts say little about a method. ``--folds`` fits as many further ensembles, each without one part of the
prompts, and measures the pooled predictions on all prompts. The figures are about the method on these votes; the
ensemble that is saved has its own held-out prompts.
"""

import functools
from dataclasses import dataclass, replace

import numpy as np

from pluralign.core.arrays import FloatArray, IntArray, Mask, Vectors
from pluralign.core.checkpoints import Arrays, Checkpoints
from pluralign.core.errors import UsageError
from pluralign.core.processes import Processes
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import Evaluation
from pluralign.learning.frozen import learn
from pluralign.learning.measure import (
    BaselinePrediction,
    Predictor,
    baselines_of,
    evidence_of_voices,
    gather_rows,
    measure,
    read_ensemble,
)
from pluralign.learning.options import FitOptions
from pluralign.learning.task import FitWatcher
from pluralign.text.features import TextFeatures
from pluralign.votes.preferences import PreferenceSet, rows_of_texts
from pluralign.votes.prompts import Prompt
from pluralign.votes.raters import RaterVotes

READING, BASELINE = "reading/", "baseline/"
"""Prefixes of the stored predictions of a fold."""


def fold_of_prompts(preferences: PreferenceSet, folds: int, seed: int = 0) -> IntArray:
    """Return the fold that tests each prompt, ``(n_prompts,)``. Folds differ by at most one prompt in size.

    Raises:
        UsageError: there are fewer prompts than folds.
    """
    n = len(preferences.prompts)
    if n < folds:
        raise UsageError(f"--folds {folds} needs at least {folds} prompts, and there are {n}.")
    order = np.argsort([Prompt(prompt).hash(seed) for prompt in preferences.prompts], kind="stable")
    fold = np.empty(n, dtype=np.int64)
    fold[order] = np.arange(n) % folds
    return fold


@dataclass(frozen=True, eq=False)
class CrossValidation:
    """A cross-validation: the votes with their features, and how to learn. Fields as the arguments of ``learn``."""

    preferences: PreferenceSet
    features: Vectors
    text_features: TextFeatures
    options: FitOptions
    raters: RaterVotes | None = None

    def run(self, folds: int, fitted: RewardEnsemble, checkpoints: Checkpoints, watcher: FitWatcher) -> Evaluation:
        """Return the figures of the method on all prompts. An official split is ignored.

        Args:
            folds: number of parts.
            fitted: the ensemble that is saved, for the sizes that the figures show.
            checkpoints: keeps finished folds, so that a killed run continues after the last one.
            watcher: receives the progress.

        Returns:
            The figures, without members, since each fold has its own.
        """
        votes = self.preferences
        fold = fold_of_prompts(votes, folds, self.options.seed)[votes.prompt_index]
        pooled: dict[str, FloatArray] = {}
        for number in range(folds):
            watcher.fold(number + 1, folds)
            predict = functools.partial(self._predict, fold == number, checkpoints.processes)
            for name, share in checkpoints.arrays(f"fold-{number}-of-{folds}", predict).items():
                pooled.setdefault(name, np.full(len(votes), np.nan))[fold == number] = share
        readings, baselines = (
            {name.removeprefix(kind): share for name, share in pooled.items() if name.startswith(kind)}
            for kind in (READING, BASELINE)
        )
        sizes = {name: baseline.k for name, baseline in baselines_of(fitted).items()}
        predictions = {name: BaselinePrediction(share, sizes[name]) for name, share in baselines.items()}
        figures = measure(Predictor("ensemble", "ensemble", readings, self.options.level), predictions, votes)
        return replace(figures, voices=evidence_of_voices(readings, baselines, votes) if fitted.k > 1 else None)

    def _predict(self, test_rows: Mask, processes: Processes) -> Arrays:
        """Return the shares of one fold's pairs that an ensemble without its prompts predicts, and its baselines."""
        unsaved = Checkpoints(None, {}, processes)
        ensemble, _ = learn(
            self.preferences, test_rows, self.features, self.text_features, self.options, unsaved, FitWatcher(),
            self.raters,
        )  # fmt: skip
        test = self.preferences[test_rows]
        features = gather_rows(self.features, rows_of_texts(test, self.preferences), processes)
        own, baselines = read_ensemble(ensemble, test, features)
        shares = {f"{READING}{name}": share for name, share in own.readings.items()}
        return shares | {f"{BASELINE}{name}": found.share for name, found in baselines.items()}
