"""``fit``: from votes to an ensemble with its figures on held-out prompts.

The order of the work: hold out test prompts, make features, choose on validation prompts (``choose``), train
(``joint``, ``policy_level``, ``stagewise``, or ``voices`` on judgments), measure (``measure``). Features are frozen
(``frozen``), or trained on the votes (``tuned``). ``--folds`` repeats the work without each part of the prompts.

To understand the joint fit, read ``fit``, ``task``, ``frozen``, ``choose``, ``joint`` (then ``policy_level``),
``pairs`` and ``bradley_terry``, in this order.
"""

import logging
import os
import time
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from pluralign.core.arrays import FloatArray, IntArray
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import UsageError
from pluralign.core.options import show_options, with_changes
from pluralign.core.processes import this_process
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import held_out_files
from pluralign.ensemble.record import Evaluation
from pluralign.learning import measure
from pluralign.learning.frozen import encoded_texts, fit_members
from pluralign.learning.options import FinetuneOptions, FitOptions, check_applies
from pluralign.learning.task import (
    MANY_PAIRS,
    FitWatcher,
    LearningData,
    decisive_options,
    refuse_to_replace,
    with_insight,
)
from pluralign.learning.tuned import fit_tuned
from pluralign.text.encoders import TextFeatures
from pluralign.text.options import AUTO
from pluralign.text.reference import log_ratio, with_log_probs
from pluralign.text.store import read_features_file
from pluralign.votes.load import VotesLike, as_preferences
from pluralign.votes.preferences import PreferenceSet, rows_of_texts
from pluralign.votes.prompts import Prompt
from pluralign.votes.raters import RaterVotes

logger = logging.getLogger("pluralign")


@show_options(FitOptions, FinetuneOptions)
def fit(
    preferences: VotesLike | RaterVotes,
    options: FitOptions | None = None,
    *,
    finetuning: FinetuneOptions | None = None,
    folder: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    watcher: FitWatcher | None = None,
    **changes: Any,
) -> RewardEnsemble:
    """Learn an ensemble whose weighted votes match the votes of people.

    Args:
        preferences: the votes: a ``PreferenceSet``, a path, a pandas DataFrame, a ``datasets`` object or a list of
            dicts. A part of the prompts is held out for testing and not trained on. With ``RaterVotes`` all
            judgments of a rater share one member, and members are fitted for the policy level. Raters are used in the
            fit only and not saved.
        options: how to learn.
        finetuning: which language model to fine-tune, and how. Without a backbone, features are frozen.
        folder: where unfinished work is kept and resumed from, and where the ensemble is saved at the end, with the
            held-out votes unless ``keep_held_out`` is off.
        overwrite: replace an ensemble of other votes or options in ``folder``.
        progress: called with the texts encoded, or the steps trained, and the total.
        watcher: receives the progress of the fit.
        **changes: fields of ``options`` and ``finetuning``, by name, such as ``k=4``.

    Returns:
        The ensemble. Its ``record`` holds the history, the held-out figures, the baselines and the members.

    Example:
        >>> from pluralign import town_hall
        >>> ensemble = fit(town_hall(400).preferences, k=2, encoder="none")
        >>> ensemble.k, round(float(ensemble.weights.sum()), 6)
        (2, 1.0)
    """
    of_finetuning = {
        option.name: changes.pop(option.name) for option in fields(FinetuneOptions) if option.name in changes
    }
    finetuning = with_changes(finetuning or FinetuneOptions(), of_finetuning)
    options = with_changes(options or FitOptions(), changes)
    watcher = watcher or FitWatcher()
    preferences = as_preferences(preferences)
    raters = preferences.knows_raters
    check_applies(options, finetuning, raters=raters)
    if raters:
        options = replace(options, level="policy")
    settings = {**decisive_options(options), **decisive_options(finetuning), "raters": raters}
    refuse_to_replace(folder, preferences, settings, overwrite=overwrite)
    if finetuning.backbone is not None or options.pooling == "attention":
        return fit_tuned(preferences, options, finetuning, folder, progress, watcher)

    started = time.perf_counter()
    if options.reference is not None:
        preferences = with_log_probs(options.reference, preferences, progress)
    test_rows, processes = preferences.test_mask(options.test_fraction, seed=options.seed), this_process()
    text_features = TextFeatures(options.encoder, options.layers, options.pooling, options.surface, options.precision)
    if options.features is not None and options.layers == AUTO:
        text_features = replace(text_features, layers=read_features_file(options.features).layers)
    text_features = text_features.resolved()
    options = replace(options, precision=text_features.precision)
    watcher.encoding(len(preferences.items().prompt_index))
    with encoded_texts(preferences, text_features, options, folder, processes, progress) as features:
        encoding = time.perf_counter() - started
        inputs = {
            "data": preferences.fingerprint,
            "options": decisive_options(options),
            "version": __version__,
            "encoder": text_features.identity,
            **({} if options.reference is None else {"log_ratio": log_ratio(preferences)}),
        }
        checkpoints = Checkpoints(folder, inputs, processes)
        data = LearningData(preferences, test_rows, features, text_features, options, checkpoints, watcher)
        with threadpool_limits(1 if len(preferences) < MANY_PAIRS else None, user_api="blas"):
            ensemble, held_out = fit_members(data)
            record = ensemble.record
            if options.folds is not None:
                record = replace(record, cross_validation=cross_validate(data, options.folds, ensemble))
    seconds = time.perf_counter() - started
    record = replace(record, processes=processes.count, seconds=seconds, seconds_encoding=encoding)
    ensemble = with_insight(replace(ensemble, record=record), held_out, options)
    for note in (record.notes or []) if processes.first else []:
        logger.warning("%s.", note)
    processes.wait()
    if folder is not None and processes.first:
        ensemble.save(folder, held_out_files(ensemble, held_out) if options.keep_held_out else None)
        checkpoints.finish()
    return ensemble


# --- cross-validation by prompt: every prompt is predicted by an ensemble that was fitted without it. The figures are
# about the method on these votes; the ensemble that is saved has its own held-out prompts.


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


def cross_validate(data: LearningData, folds: int, fitted: RewardEnsemble) -> Evaluation:
    """Return the figures of the method on all prompts. An official split is ignored.

    Args:
        data: the votes with their features, and how to learn. Its checkpoints keep finished folds, so that a killed run
            continues after the last one.
        folds: number of parts.
        fitted: the ensemble that is saved, for the sizes that the figures show.

    Returns:
        The figures, without members, since each fold has its own. Those of judgments are of the held-out prompts.
    """
    votes, options = data.preferences, data.options
    fold = fold_of_prompts(votes, folds, options.seed)[votes.prompt_index]
    pooled: dict[str, dict[str, FloatArray]] = {"readings": {}, "baselines": {}}
    for number in range(folds):
        data.watcher.fold(number + 1, folds)
        unsaved = Checkpoints(None, {}, data.checkpoints.processes)
        part = replace(data, test_rows=fold == number, checkpoints=unsaved, watcher=FitWatcher())
        step, predict = f"fold-{number}-of-{folds}", partial(_predict, part)
        for kind, shares in data.checkpoints.keep(step, dict[str, dict[str, FloatArray]], predict).items():
            for name, share in shares.items():
                pooled[kind].setdefault(name, np.full(len(votes), np.nan))[part.test_rows] = share
    readings, baselines = pooled["readings"], pooled["baselines"]
    fits = measure.baselines_of(fitted)
    predictions = {
        name: measure.BaselinePrediction(baselines[name], fits[name].k) for name in fits if name in baselines
    }
    figures = measure.measure(measure.Predictor("ensemble", "ensemble", readings, options.level), predictions, votes)
    voices = measure.evidence_of_voices(readings, baselines, votes) if fitted.k > 1 else None
    held_out = fitted.record.evaluation
    assert held_out is not None  # noqa: S101
    return replace(figures, voices=voices, judgments=held_out.judgments, first_choices=held_out.first_choices)


def _predict(data: LearningData) -> dict[str, dict[str, FloatArray]]:
    """Return the shares of the held-out pairs that an ensemble without their prompts predicts, and its baselines."""
    ensemble, held_out = fit_members(data)
    test, processes = held_out.preferences, data.checkpoints.processes
    features = processes.gathered(data.features, rows_of_texts(test, data.preferences))
    own, baselines = measure.read_ensemble(ensemble, test, features)
    return {"readings": dict(own.readings), "baselines": {name: found.share for name, found in baselines.items()}}
