"""A fit that fine-tunes a language model: train, read every text with it, fit the members, judge.

Training itself is in ``training.finetune``, joint members are in ``tuned_model``. The members of a stagewise ensemble
are the models' outputs: only their weights are solved here. Every process of a launch runs this; the first one writes.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from pluralign.core.arrays import Array, FloatArray, IndexArray, Mask, Vectors
from pluralign.core.checkpoints import Arrays, Checkpoints
from pluralign.core.errors import MissingExtraError, PluralignError, UsageError
from pluralign.core.options import changed_options
from pluralign.core.random_streams import VALIDATION_PROMPTS, random_stream
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.members import FeatureMap, LinearMembers, identity_map
from pluralign.ensemble.record import EncoderChoice, TunedFit
from pluralign.learning.baselines import BASELINES, TEMPERATURES, Baseline, fit_pair
from pluralign.learning.choose import validated_members
from pluralign.learning.frozen import encoded_texts, feature_map, fit_members, fit_tuned_members, task_of
from pluralign.learning.measure import measure_fit
from pluralign.learning.options import FinetuneOptions, FitOptions
from pluralign.learning.pairs import Members, Pairs, scores, training_bound, validation_units
from pluralign.learning.stagewise import orientation, solve_weights
from pluralign.learning.task import (
    AUTO_SIZES,
    MANY_PAIRS,
    FitWatcher,
    LearningData,
    choose_size,
    choose_temperature,
    decisive_options,
    save_fit,
)
from pluralign.learning.teacher import TrainedTeacher
from pluralign.text.features import TextFeatures
from pluralign.text.finetuned import FinetunedFeatures, forget_models, head_weights
from pluralign.theory import calibration
from pluralign.theory.calibration import brier_corrected, sigmoid, squared_error
from pluralign.theory.intervals import ENOUGH_CLUSTERS, clearly_lower, paired_difference
from pluralign.votes.preferences import PreferenceSet, texts_of

# --- Fits on a fine-tuned model next to one on the frozen model: validation prompts choose, test prompts measure.


Fits = Mapping[str, tuple[RewardEnsemble, HeldOutVotes]]
"""Ensembles by name, with the held-out votes and their rewards."""


ONE_STANDARD_ERROR = 0.84
"""Confidence of a one-sided test that asks for about one standard error."""


def validation_errors(
    data: LearningData, validation: Mask, inputs: FeatureMap, teacher: TrainedTeacher | None = None
) -> FloatArray:
    """Return the squared errors on the validation pairs of members that are fitted without them, ``(n,)``.

    Members are compared, not the rewards that a model was tuned with: features on which one soft reward predicts well
    may still be poor ones for hard votes. Target and regularisation are chosen on the same prompts, for all features
    alike: elsewhere a tuned model fits the votes too well to choose there.

    Args:
        data: the votes with the features. Its checkpoints differ from those of the fit to all training pairs.
        validation: training pairs that no model was tuned on, ``(n_pairs,)``.
        inputs: the inputs of members.
        teacher: rewards that were trained together with the features, if members learn from them.
    """

    def compute() -> Arrays:
        task = task_of(replace(data, watcher=FitWatcher()), inputs, validation, teacher)
        share = validated_members(task).prob_hat(task.check, data.options.level)
        return {"errors": squared_error(share, task.check.prob_a)}

    return np.asarray(data.checkpoints.arrays("validation", compute)["errors"], dtype=np.float64)


def choose_encoder(errors: Mapping[str, FloatArray], prompt: IndexArray) -> str:
    """Return the fit with the lowest error on validation prompts.

    A fine-tuned model is larger on disk, and a small lead on few prompts is chance: the frozen model is used unless the
    best of the others is better by about one standard error, paired by prompt.

    Args:
        errors: squared errors of each fit on the validation pairs, ``(n,)``.
        prompt: prompt of each validation pair, ``(n,)``.

    Example:
        >>> frozen, prompt = np.array([0.3, 0.2, 0.4, 0.3]), np.arange(4, dtype=np.int32)
        >>> choose_encoder({"tuned": frozen - [0.1, 0.1, 0.2, 0.1], "frozen": frozen}, prompt)
        'tuned'
        >>> choose_encoder({"tuned": frozen - [0.3, 0.0, 0.0, -0.2], "frozen": frozen}, prompt)
        'frozen'
    """
    best = min(errors, key=lambda name: float(errors[name].mean()))
    if best == "frozen" or "frozen" not in errors:
        return best
    better = clearly_lower(errors[best] - errors["frozen"], prompt, ONE_STANDARD_ERROR)
    return best if better else "frozen"


def encoder_choice(used: str, errors: Mapping[str, FloatArray], fits: Fits) -> EncoderChoice:
    """Return the choice with the held-out figures of all fits.

    Args:
        used: name of the fit that validation prompts chose.
        errors: squared errors of each fit on the validation pairs.
        fits: ``tuned``, and ``outputs`` and ``frozen`` where they were fitted.
    """
    validation = {name: float(values.mean()) for name, values in errors.items()}
    tuned, outputs = (_compared(name, validation, fits) if name in fits else None for name in ("tuned", "outputs"))
    assert tuned is not None  # noqa: S101
    return EncoderChoice(
        used=used,
        validation_tuned=tuned.validation,
        validation_frozen=validation.get("frozen"),
        test_tuned=tuned.test,
        test_frozen=_corrected(*fits["frozen"]) if "frozen" in fits else None,
        difference=tuned.difference,
        low=tuned.low,
        high=tuned.high,
        outputs=outputs,
    )


def _compared(name: str, validation: Mapping[str, float], fits: Fits) -> TunedFit:
    """Return the figures of a fit, and its difference from the frozen one if there is one."""
    own = TunedFit(validation[name], _corrected(*fits[name]))
    if "frozen" not in fits:
        return own
    votes = fits[name][1].preferences
    found = paired_difference(
        _errors(*fits[name]), _errors(*fits["frozen"]), votes.prompt_index, min_clusters=ENOUGH_CLUSTERS
    )
    known = not np.isnan(found.low)
    low, high = (found.low, found.high) if known else (None, None)
    return TunedFit(own.validation, own.test, found.mean, low, high)


def _errors(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> FloatArray:
    return np.asarray((held_out.prob_hat(ensemble) - held_out.preferences.prob_a) ** 2)


def _corrected(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> float:
    votes = held_out.preferences
    return brier_corrected(held_out.prob_hat(ensemble), votes.prob_a, votes.n_votes, votes.counted_ties)


# --- A joint ensemble on a fine-tuned language model: refit the head, and compare with the frozen model.


@dataclass(frozen=True, eq=False)
class ModelFit:
    """The ensemble that is used, and how it was chosen."""

    ensemble: RewardEnsemble
    held_out: HeldOutVotes
    choice: EncoderChoice
    notes: list[str]
    """What the user should know, as sentences without a full stop."""


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Features that an ensemble can be fitted on."""

    data: LearningData
    """With the checkpoints of the fit to all training pairs."""
    checking: Checkpoints
    """Of the fit without the validation prompts."""
    directions: FloatArray | None = None
    """Linear functions of the features that members are combinations of, ``(d, m)``; None for all."""

    def errors(self, validation: Mask) -> FloatArray:
        """Return the squared errors on the validation pairs of members that are fitted without them."""
        data = replace(self.data, checkpoints=self.checking)
        return validation_errors(data, validation, feature_map(data, self.directions))


def fit_tuned_model(
    preferences: PreferenceSet,
    test_rows: Mask,
    validation: Mask,
    model: FinetunedFeatures,
    options: FitOptions,
    frozen: TextFeatures | None,
    steps_of: Callable[[str], Checkpoints],
    progress: Progress | None,
    watcher: FitWatcher,
) -> ModelFit:
    """Fit joint ensembles on a fine-tuned and on the frozen model, and use the best on validation prompts.

    Args:
        preferences: all votes.
        test_rows: pairs that are held out, ``(n_pairs,)``.
        validation: training pairs that the model was not tuned on, ``(n_pairs,)``.
        model: the fine-tuned model, whose features are its states.
        options: how to learn.
        frozen: the same model before tuning; None to use the fine-tuned one in any case.
        steps_of: returns the checkpoints of a fit by its name.
        progress: called with the texts encoded and the total.
        watcher: receives the progress of the fit that is used.
    """
    states, notes = model(texts_of(preferences), progress), []
    forget_models()

    def candidate(
        name: str, features: TextFeatures | FinetunedFeatures, vectors: Vectors, directions: FloatArray | None = None
    ) -> _Candidate:
        data = LearningData(preferences, test_rows, vectors, features, options, steps_of(name), watcher)
        return _Candidate(data, steps_of(f"{name}, without validation prompts"), directions)

    candidates = {
        "tuned": candidate("tuned", model, states),
        "outputs": candidate("outputs", model, states, head_weights(model).T),
    }
    processes = candidates["tuned"].data.checkpoints.processes
    if frozen is not None:
        try:
            chosen = frozen.with_chosen_layers().with_chosen_precision(processes).with_identity()
            with encoded_texts(preferences, chosen, options, None, processes, progress) as vectors:
                candidates["frozen"] = candidate("frozen", chosen, vectors)
        except PluralignError as error:  # hours of training are not lost to a package that is missing
            notes.append(f"the frozen model was not compared: {str(error).rstrip('.')}")
    with threadpool_limits(1 if len(preferences) < MANY_PAIRS else None, user_api="blas"):
        errors = {name: one.errors(validation) for name, one in candidates.items()}
        used = processes.agreed(lambda: choose_encoder(errors, preferences.prompt_index[validation]))
        fits = {}
        for name, one in candidates.items():
            data = one.data if name == used else replace(one.data, watcher=FitWatcher())
            if name == "frozen":
                fits[name] = fit_members(data)
            else:
                fits[name] = fit_tuned_members(data, validation, feature_map(data, one.directions))
    return ModelFit(*fits[used], encoder_choice(used, errors, fits), notes)


# --- Early stopping over the stages of a fine-tuned ensemble, on the validation prompts (§4).


MOST_STAGES = AUTO_SIZES[-1]
"""Number of stages after which training stops in any case."""
PATIENCE = 2
"""Stages without a lower validation error after which training stops. A member can help only together with the next
one, because all weights are solved again after each stage: one stage without a gain is no reason to stop."""


@dataclass(frozen=True)
class ChosenSize:
    """The number of members kept, and why training stopped."""

    k: int
    stages: int
    """Number of trained members."""
    stopped: str
    """Why no further stage was trained, with the validation Brier score of each size."""


@dataclass(frozen=True, eq=False)
class StageValidation:
    """The votes that decide how many stages are trained. No test vote is read."""

    votes: PreferenceSet
    a: IndexArray
    """Index of response a among the texts, ``(n_pairs,)``."""
    b: IndexArray
    """Index of response b among the texts, ``(n_pairs,)``."""
    learned: Mask
    """Pairs that the members are trained on."""
    validation: Mask
    """Pairs of the validation prompts."""

    def enough(self, outputs: Array) -> bool:
        """Return whether the last ``PATIENCE`` stages brought no lower validation error.

        Args:
            outputs: rewards of the members so far for every text, ``(n_texts, stages)``.
        """
        return stopped_improving(self._errors(outputs))

    def choose(self, outputs: Array) -> ChosenSize:
        """Return the smallest size whose validation error is within one standard error of the best."""
        sizes, check = self._sizes(outputs)
        errors, stages = self._errors(outputs), len(sizes)
        reason = (
            f"the validation Brier score has not improved for {PATIENCE} stages"
            if stopped_improving(errors)
            else f"{stages} stages are the most that --k auto trains"
        )
        scores = ", ".join(f"{error:.4f}" for error in errors)
        return ChosenSize(choose_size(dict(enumerate(sizes, 1)), check, "vote"), stages, f"{reason}: {scores}")

    def _errors(self, outputs: Array) -> list[float]:
        sizes, check = self._sizes(outputs)
        return [members.brier(check, "vote") for members in sizes]

    def _sizes(self, outputs: Array) -> tuple[list[Members], Pairs]:
        """Return the ensemble of every size, weighted without the validation pairs, and the validation pairs."""
        pairs = Pairs(outputs, self.a, self.b, self.votes.prob_a, self.votes.prompt_index)
        return stage_members(pairs[self.learned]), pairs[self.validation]


def stage_members(pairs: Pairs) -> list[Members]:
    """Return the ensemble after each stage. Each input of ``pairs`` is the reward of one member."""
    axes = np.eye(pairs.inputs.shape[1])
    difference, prob_a = pairs.difference, pairs.prob_a
    return [Members(axes[:, :j], solve_weights(difference, axes[:, :j], prob_a)[0]) for j in range(1, len(axes) + 1)]


def stopped_improving(errors: Sequence[float]) -> bool:
    """Return whether the lowest error is at least ``PATIENCE`` stages old. An equal error is no improvement.

    Example:
        >>> stopped_improving([0.3, 0.1, 0.2]), stopped_improving([0.3, 0.1, 0.2, 0.1])
        (False, True)
    """
    return len(errors) - 1 - int(np.argmin(errors)) >= PATIENCE


logger = logging.getLogger("pluralign")
FROZEN_OPTIONS = ("encoder", "layers", "pooling", "surface", "features")
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
        from pluralign.learning.backbone import train as finetune
        from pluralign.learning.backbone.batches import TextPairs
        from pluralign.learning.backbone.recipe import check_trackers, choose_precision
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
        outputs = models(texts)
        data = LearningData(preferences, test_rows, outputs, models, options, watcher=watcher)
        ensemble, held_out, chosen = _fit_stages(data, models, stages)
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
    data: LearningData, models: FinetunedFeatures, stages: StageValidation
) -> tuple[RewardEnsemble, HeldOutVotes, ChosenSize | None]:
    """Solve the weights of stagewise members, and measure the ensemble. With ``--k auto``, return the chosen size too.

    Args:
        data: the votes, with the outputs of all models as features.
        models: the models of all stages.
        stages: chooses the number of stages that are kept.
    """
    task = task_of(data, identity_map(models.outputs))
    sizes = stage_members(task.train)
    history = [task.measured(members) for members in sizes]
    members, chosen = sizes[-1], stages.choose(data.features) if data.options.k == "auto" else None
    if chosen:  # the models of later stages are left behind
        models, outputs = models.first(chosen.k), data.features[:, : chosen.k]
        data = replace(data, features=outputs, text_features=models)
        task = task_of(replace(data, watcher=FitWatcher()), identity_map(models.outputs))
        members = stage_members(task.train)[-1]
    check, members = task.train[stages.validation[~data.test_rows]], members.unit_spread(task.train)
    ensemble = RewardEnsemble(
        LinearMembers(identity_map(models.outputs), members.theta),
        members.weights,
        models,
        choose_temperature(members, check),
        members.undecided,
    )
    return *measure_fit(ensemble, data, _first_member_baselines(task.train, check), history), chosen


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
