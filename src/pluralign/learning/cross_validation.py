"""Cross-validation by prompt: every prompt is predicted by an ensemble that was fitted without it.

A few test prompts say little about a method. ``--folds`` fits as many further ensembles, each without one part of the
prompts, and measures the pooled predictions on all prompts. The figures are about the method on these votes; the
ensemble that is saved has its own held-out prompts.
"""

import functools
from dataclasses import replace

import numpy as np

from pluralign.core.arrays import FloatArray, IntArray
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import UsageError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import Evaluation
from pluralign.learning.frozen import fit_members, fit_members_to_raters
from pluralign.learning.measure import (
    BaselinePrediction,
    Predictor,
    baselines_of,
    evidence_of_voices,
    gather_rows,
    measure,
    read_ensemble,
)
from pluralign.learning.task import FitWatcher, LearningData
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


def cross_validate(data: LearningData, folds: int, fitted: RewardEnsemble, raters: RaterVotes | None) -> Evaluation:
    """Return the figures of the method on all prompts. An official split is ignored.

    Args:
        data: the votes with their features, and how to learn. Its checkpoints keep finished folds, so that a killed run
            continues after the last one.
        folds: number of parts.
        fitted: the ensemble that is saved, for the sizes that the figures show.
        raters: the same votes with their raters, if these are known.

    Returns:
        The figures, without members, since each fold has its own.
    """
    votes, options = data.preferences, data.options
    fold = fold_of_prompts(votes, folds, options.seed)[votes.prompt_index]
    pooled: dict[str, FloatArray] = {}
    for number in range(folds):
        data.watcher.fold(number + 1, folds)
        unsaved = Checkpoints(None, {}, data.checkpoints.processes)
        part = replace(data, test_rows=fold == number, checkpoints=unsaved, watcher=FitWatcher())
        step, predict = f"fold-{number}-of-{folds}", functools.partial(_predict, part, raters)
        shares = data.checkpoints.keep(step, dict[str, FloatArray], predict)
        for name, share in shares.items():
            pooled.setdefault(name, np.full(len(votes), np.nan))[part.test_rows] = share
    readings, baselines = (
        {name.removeprefix(kind): share for name, share in pooled.items() if name.startswith(kind)}
        for kind in (READING, BASELINE)
    )
    fits = baselines_of(fitted)
    predictions = {name: BaselinePrediction(baselines[name], fits[name].k) for name in fits if name in baselines}
    figures = measure(Predictor("ensemble", "ensemble", readings, options.level), predictions, votes)
    return replace(figures, voices=evidence_of_voices(readings, baselines, votes) if fitted.k > 1 else None)


def _predict(data: LearningData, raters: RaterVotes | None) -> dict[str, FloatArray]:
    """Return the shares of the held-out pairs that an ensemble without their prompts predicts, and its baselines."""
    ensemble, held_out = fit_members(data) if raters is None else fit_members_to_raters(data, raters)
    test, processes = held_out.preferences, data.checkpoints.processes
    features = gather_rows(data.features, rows_of_texts(test, data.preferences), processes)
    own, baselines = read_ensemble(ensemble, test, features)
    shares = {f"{READING}{name}": share for name, share in own.readings.items()}
    return shares | {f"{BASELINE}{name}": found.share for name, found in baselines.items()}
