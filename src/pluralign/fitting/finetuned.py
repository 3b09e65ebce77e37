"""A fit that fine-tunes a language model: train, read every text with it, fit the members, judge.

Training itself is in ``training.finetune``, joint members are in ``tuned_model``. The members of a stagewise ensemble
are the models' outputs: only their weights are solved here. Every process of a launch runs this; the first one writes.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import Mask
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import MissingExtraError, UsageError
from pluralign.core.options import changed_options
from pluralign.core.random_streams import VALIDATION_PROMPTS, random_stream
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.members import LinearMembers, identity_map
from pluralign.features.finetuned import FinetunedFeatures
from pluralign.features.frozen import TextFeatures
from pluralign.fitting.early_stopping import MOST_STAGES, ChosenSize, StageValidation, stage_members
from pluralign.fitting.judging import TestPairs, judge
from pluralign.fitting.saving import decisive_options, save_fit
from pluralign.fitting.selection import choose_temperature
from pluralign.fitting.task import FitWatcher
from pluralign.fitting.tuned_model import fit_tuned_model
from pluralign.theory import calibration
from pluralign.theory.logistic import sigmoid
from pluralign.training.baselines import BASELINES, TEMPERATURES, Baseline, fit_pair
from pluralign.training.bradley_terry import scores
from pluralign.training.member_bounds import training_bound
from pluralign.training.options import FinetuneOptions, FitOptions
from pluralign.training.pairs import Pairs, validation_units
from pluralign.training.stagewise import orientation
from pluralign.votes.preferences import PreferenceSet, texts_of

logger = logging.getLogger("pluralign")
FROZEN_OPTIONS = ("encoder", "layers", "pooling", "surface", "members", "features")
SAME_RESULT_OPTIONS = ("micro_batch", "gradient_checkpointing", "report_to", "run_name")
"""Options that change no result, such as how much is read at once: a killed run resumes with other values of them."""
AFTER_TRAINING = ("compare_frozen",)
"""Options that do not change the training: a run that was killed after it resumes with other values of them."""


@contextmanager
def finetuning_packages() -> Iterator[None]:
    """Import the packages of fine-tuning inside this block. Raises MissingExtraError if one is not installed."""
    try:
        with redirect_stdout(sys.stderr):  # stdout is for results, and transformers prints with WANDB_MODE=offline
            yield
    except ImportError as error:
        raise MissingExtraError(str(error.name), "finetune", "--backbone") from None


def decisive_tuning(tuning: FinetuneOptions) -> dict[str, Any]:
    """Return the options of fine-tuning that change what is learned."""
    return {name: value for name, value in asdict(tuning).items() if name not in SAME_RESULT_OPTIONS}


def fit_finetuned(
    preferences: PreferenceSet,
    options: FitOptions,
    tuning: FinetuneOptions,
    folder: str | os.PathLike[str] | None,
    progress: Progress | None,
    watcher: FitWatcher,
) -> RewardEnsemble:
    """Learn an ensemble whose features are fine-tuned on the votes.

    Args:
        preferences: all votes.
        options: how to learn; options of frozen features raise UsageError.
        tuning: which model to fine-tune, and how.
        folder: where unfinished work, the models and the ensemble are kept.
        progress: called with the optimiser steps done and the total.
        watcher: receives the progress of the fit.
    """
    size = _check_options(options)
    if folder is None:
        raise UsageError("a fine-tuned ensemble needs a folder for its models.")
    with finetuning_packages():
        from pluralign.training.finetune import run as finetune
        from pluralign.training.finetune.batches import TextPairs
        from pluralign.training.finetune.recipe import check_trackers, choose_precision
    check_trackers(tuning)
    options = replace(options, precision=choose_precision(options.precision))
    started = time.perf_counter()
    test_rows = preferences.test_mask(options.test_fraction, seed=options.seed)
    texts, items = texts_of(preferences), preferences.items()
    validation = validation_rows(preferences.prompt_index, test_rows, options.seed)
    learned = ~test_rows & ~validation
    a, b, prob_a = items.a[learned], items.b[learned], np.asarray(preferences.prob_a[learned], dtype=np.float64)
    if options.method == "stagewise" and options.variant == "printed":  # the only loss that depends on the order
        kept = orientation(prob_a, options.orient, options.seed) > 0
        a, b, prob_a = np.where(kept, a, b), np.where(kept, b, a), np.where(kept, prob_a, 1 - prob_a)
    text_pairs = TextPairs(texts, a, b, prob_a, preferences.prompt_index[learned])
    inputs = {
        "data": preferences.fingerprint,
        "options": decisive_options(options),
        "tuning": {name: value for name, value in decisive_tuning(tuning).items() if name not in AFTER_TRAINING},
        "version": __version__,
    }
    checkpoints = Checkpoints(folder, inputs, finetune.finetune_processes())
    bound = training_bound(options.max_disagreement, len(np.unique(preferences.prompt_index[learned])))
    stages = StageValidation(preferences, items.a, items.b, learned, validation)
    tuned = finetune.fine_tune(
        text_pairs, size, options, tuning, checkpoints, bound=bound,
        enough=stages.enough if options.k == "auto" else None, progress=progress, report=watcher.training,
    )  # fmt: skip

    reading = time.perf_counter()
    models = tuned.features
    if options.method == "joint":
        frozen = TextFeatures(str(tuning.backbone), precision=models.precision) if tuning.compare_frozen else None

        def steps_of(fit: str) -> Checkpoints:
            return Checkpoints(folder, {**inputs, "fit": fit}, checkpoints.processes)

        fitted = fit_tuned_model(
            preferences, test_rows, validation, models, options, frozen, steps_of, progress, watcher
        )
        ensemble, held_out, choice, chosen = fitted.ensemble, fitted.held_out, fitted.choice, None
        notes = [*(ensemble.record.notes or []), *tuned.notes, *fitted.notes]
        for note in fitted.notes if checkpoints.processes.first else []:
            logger.warning("%s.", note)
    else:
        ensemble, held_out, chosen = _fit_stages(preferences, test_rows, models, options, stages, watcher)
        choice, notes = None, tuned.notes
    now = time.perf_counter()
    record = replace(
        ensemble.record,
        tuning={
            **asdict(tuning),
            "steps": tuned.steps,
            "batch_size": tuned.batch_size,
            "learning_rate": tuned.learning_rate,
            "max_length": models.max_length,
            "scoring_precision": models.precision,
            "validation_pairs": int(validation.sum()),
            **({"stages": chosen.stages, "stopped": chosen.stopped} if chosen else {}),
        },
        encoders=choice,
        notes=notes,
        processes=tuned.processes,
        seconds_members=tuned.seconds,
        seconds=now - started,
        seconds_encoding=now - reading,
    )
    ensemble = replace(ensemble, record=record)
    if checkpoints.processes.first:
        save_fit(ensemble, held_out, folder, keep_held_out=options.keep_held_out)
        checkpoints.finish()
    checkpoints.processes.wait()
    return replace(ensemble, features=RewardEnsemble.load(folder).features)


def _fit_stages(
    preferences: PreferenceSet,
    test_rows: Mask,
    models: FinetunedFeatures,
    options: FitOptions,
    stages: StageValidation,
    watcher: FitWatcher,
) -> tuple[RewardEnsemble, HeldOutVotes, ChosenSize | None]:
    """Solve the weights of stagewise members, and judge the ensemble. With ``--k auto``, return the chosen size too."""
    items, features = preferences.items(), models(texts_of(preferences))
    pairs = Pairs(features, items.a, items.b, preferences.prob_a, preferences.prompt_index)
    train, test = pairs[~test_rows], TestPairs(preferences, test_rows, pairs[test_rows])
    watcher.floor(calibration.floor(test.pairs.prob_a))
    sizes = stage_members(train)
    history = [test.history_row(members, train, "vote") for members in sizes]
    for row in history:
        watcher.record(row)
    members = sizes[-1]
    chosen = stages.choose(features) if options.k == "auto" else None
    if chosen:  # the models of later stages are left behind
        models, features = models.first(chosen.k), features[:, : chosen.k]
        pairs = replace(pairs, inputs=features)
        train = pairs[~test_rows]
        members = stage_members(train)[-1]
    check, members = pairs[stages.validation], members.unit_spread(train)
    ensemble = RewardEnsemble(
        LinearMembers(identity_map(models.outputs), members.theta),
        members.weights,
        models,
        choose_temperature(members, check),
        members.undecided,
    )
    baselines = _first_member_baselines(train, check)
    return *judge(ensemble, test, features, options, baselines, history), chosen


def _check_options(options: FitOptions) -> int:
    """Return k, or the most stages of ``auto``. Raises UsageError for options that have no meaning with a backbone."""
    if frozen := [name for name in changed_options(options) if name in FROZEN_OPTIONS]:
        raise UsageError(f"{frozen[0]} is an option of frozen features; leave it out with --backbone.")
    if options.folds is not None:
        raise UsageError("--folds cannot be used with --backbone, since each fold is trained anew; leave it out.")
    if options.target != "auto" and options.method == "stagewise":
        raise UsageError("--target has no effect with --method stagewise; leave it out.")
    return MOST_STAGES if options.k == "auto" else int(options.k)


def validation_rows(prompt: npt.NDArray[np.int32], test_rows: Mask, seed: int) -> Mask:
    """Return the pairs of a tenth of the training prompts. The model is not trained on them."""
    units = validation_units(prompt[~test_rows])
    names = np.unique(units)
    order = random_stream(seed, VALIDATION_PROMPTS).permutation(names)
    rows = np.zeros(len(prompt), dtype=bool)
    rows[~test_rows] = np.isin(units, order[: max(1, len(names) // 10)])
    return rows


def _first_member_baselines(train: Pairs, check: Pairs) -> dict[str, Baseline]:
    """Return the first member as a single reward: as it is, tempered, and with its opposite."""
    reward = np.eye(train.inputs.shape[1])[:, 0]
    z = scores(check.difference, reward)
    errors = [calibration.brier(sigmoid(z / temperature), check.prob_a) for temperature in TEMPERATURES]
    baselines = {
        "soft_bt": {"theta": reward, "temperature": np.array(1.0)},
        "soft_bt_temperature": {"theta": reward, "temperature": np.array(TEMPERATURES[int(np.argmin(errors))])},
        "pair": fit_pair(train, reward),
    }
    return {
        name: Baseline(BASELINES[name], {part: np.asarray(array) for part, array in arrays.items()})
        for name, arrays in baselines.items()
    }
