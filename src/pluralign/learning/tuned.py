"""Fits on features that are trained on the votes: a fine-tuned backbone, or a pooling trained on a frozen encoder.

``fit_tuned`` holds out validation prompts, trains on the other training prompts, fits the members, and saves. Joint
members are fitted on the trained and on the frozen features: validation prompts choose, test prompts measure both
(``compare``). The members of a stagewise ensemble are the models' outputs: only their weights are solved here, and with
``--k auto`` validation prompts stop the training. ``backbone.train`` trains models, ``trained_pooling`` a pooling.
Every process of a launch runs this; the first one writes.
"""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from pluralign.core.arrays import Array, FloatArray, IndexArray, Mask, Vectors
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import MissingExtraError, PluralignError, UsageError
from pluralign.core.options import spelled
from pluralign.core.processes import join_launch
from pluralign.core.random_streams import VALIDATION_PROMPTS, random_stream
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes, held_out_files
from pluralign.ensemble.members import FeatureMap, LinearMembers, identity_map
from pluralign.ensemble.record import EncoderChoice, TunedFit
from pluralign.learning.baselines import BASELINES, TEMPERATURES, Baseline, fit_pair
from pluralign.learning.choose import validated_members
from pluralign.learning.frozen import Trained, encoded_texts, feature_map, fit_members, judgments_of, task_of
from pluralign.learning.measure import measure_fit
from pluralign.learning.options import FinetuneOptions, FitOptions
from pluralign.learning.pairs import Members, Pairs, scores, solve_weights, validation_units
from pluralign.learning.stagewise import orientation
from pluralign.learning.task import (
    MANY_PAIRS,
    FitTask,
    FitWatcher,
    LearningData,
    choose_size,
    choose_temperature,
    decisive_options,
    with_insight,
)
from pluralign.learning.voices import STARTS, RankedTexts, Voices, VoicesSearch, fit_voices, mean_of
from pluralign.text.encoders import TextFeatures
from pluralign.text.finetuned import FinetunedFeatures, forget_models, head_weights, model_folders
from pluralign.theory.calibration import brier, brier_corrected, sigmoid, squared_error
from pluralign.theory.intervals import ENOUGH_CLUSTERS, clearly_lower, paired_difference
from pluralign.votes.judgments import Judgments
from pluralign.votes.preferences import PreferenceSet, texts_of

logger = logging.getLogger("pluralign")
Judged: TypeAlias = tuple[RewardEnsemble, HeldOutVotes]
"""An ensemble with its record, and the held-out votes with their rewards."""
AFTER_TRAINING = ("compare_frozen",)
"""Options that do not change the training: a run that was killed after it resumes with other values of them."""


@dataclass(frozen=True, eq=False)
class TunedTask:
    """One fit on features that are trained on the votes."""

    preferences: PreferenceSet
    options: FitOptions
    tuning: FinetuneOptions
    checkpoints: Checkpoints
    watcher: FitWatcher
    progress: Progress | None = None

    @cached_property
    def test_rows(self) -> Mask:
        """Pairs that are held out, ``(n_pairs,)``."""
        return self.preferences.test_mask(self.options.test_fraction, seed=self.options.seed)

    @cached_property
    def validation(self) -> Mask:
        """Training pairs that no features are trained on, ``(n_pairs,)``."""
        return validation_rows(self.preferences.prompt_index, self.test_rows, self.options.seed)

    @property
    def learned(self) -> Mask:
        """Pairs that features are trained on, ``(n_pairs,)``."""
        return ~self.test_rows & ~self.validation

    @cached_property
    def judged(self) -> tuple[Judgments, IndexArray] | None:
        """The judgments on the training prompts with the text of each entry, if members learn from them."""
        return judgments_of(self.preferences, ~self.test_rows, self.options)

    @property
    def learned_judgments(self) -> tuple[Judgments, IndexArray] | None:
        """The judgments that features are trained on."""
        if self.judged is None:
            return None
        judged, items = self.judged
        learned = np.isin(judged.prompt, self.preferences.prompt_index[self.learned])
        return judged[learned], items[np.repeat(learned, judged.sizes)]

    def without_validation(self, name: str, one: "Candidate") -> tuple[FitTask, FeatureMap]:
        """Return a fit that makes its choices on the validation prompts and is compared there, and its inputs."""
        data = self.data(one.features, one.vectors, f"{name}, without validation prompts")
        data = replace(data, watcher=FitWatcher())
        trained = _trained(self, data, one)
        return task_of(data, trained.inputs, trained), trained.inputs

    def pairs(self, inputs: Array) -> Pairs:
        """Return all pairs, with the inputs of all texts."""
        items, votes = self.preferences.items(), self.preferences
        return Pairs(inputs, items.a, items.b, votes.prob_a, votes.prompt_index)

    def data(self, features: TextFeatures | FinetunedFeatures, vectors: Vectors, fit: str = "") -> LearningData:
        """Return the votes with features of all texts, to learn from. Without the name of a fit nothing is kept."""
        steps = self.steps_of(fit) if fit else Checkpoints(None, {})
        return LearningData(self.preferences, self.test_rows, vectors, features, self.options, steps, self.watcher)

    def vectors(self, features: TextFeatures) -> Vectors:
        """Return frozen features of all texts."""
        processes = self.checkpoints.processes
        with encoded_texts(self.preferences, features, self.options, None, processes, self.progress) as vectors:
            return vectors

    def one_thread(self) -> threadpool_limits:
        """Return a context in which numpy uses one thread for few pairs: see ``MANY_PAIRS``."""
        return threadpool_limits(1 if len(self.preferences) < MANY_PAIRS else None, user_api="blas")

    def steps_of(self, fit: str) -> Checkpoints:
        """Return the checkpoints of a part of this fit."""
        own = self.checkpoints
        return Checkpoints(own.root, {**own.inputs, "fit": fit}, own.processes)


def fit_tuned(
    preferences: PreferenceSet,
    options: FitOptions,
    tuning: FinetuneOptions,
    folder: str | os.PathLike[str] | None,
    progress: Progress | None,
    watcher: FitWatcher,
) -> RewardEnsemble:
    """Learn an ensemble whose features are trained on the votes.

    Args:
        preferences: all votes.
        options: how to learn.
        tuning: which model to fine-tune, and how. Without a backbone, a pooling is trained on ``options.encoder``.
        folder: where unfinished work, the models and the ensemble are kept.
        progress: called with the texts encoded or the optimiser steps done, and the total.
        watcher: receives the progress of the fit.
    """
    if folder is None:
        raise UsageError("features that are trained on the votes need a folder for their models.")
    started = time.perf_counter()
    try:
        with redirect_stdout(sys.stderr):  # stdout is for results, and transformers prints with WANDB_MODE=offline
            import torch

            from pluralign.learning import trained_pooling
            from pluralign.learning.backbone.recipe import check_trackers, choose_precision
    except ImportError as error:
        raise MissingExtraError(str(error.name), "finetune", "--backbone") from None
    check_trackers(tuning)
    processes = join_launch(cpu=not torch.cuda.is_available())
    encoder = None if tuning.backbone is not None else trained_pooling.frozen_encoder(options)
    options = replace(options, precision=encoder.precision if encoder else choose_precision(options.precision))
    inputs = {
        "data": preferences.fingerprint,
        "options": decisive_options(options),
        "tuning": {name: value for name, value in decisive_options(tuning).items() if name not in AFTER_TRAINING},
        "encoder": encoder.identity if encoder else None,
        "version": __version__,
    }
    task = TunedTask(preferences, options, tuning, Checkpoints(folder, inputs, processes), watcher, progress)
    ensemble, held_out = trained_pooling.fit_pooling(task, encoder) if encoder else _fit_backbone(task)
    record = replace(ensemble.record, processes=processes.count, seconds=time.perf_counter() - started)
    ensemble = with_insight(replace(ensemble, record=record), held_out, options)
    if processes.first:
        ensemble.save(folder, held_out_files(ensemble, held_out) if options.keep_held_out else None)
        task.checkpoints.finish()
    processes.wait()
    return replace(ensemble, features=RewardEnsemble.load(folder).features)


def validation_rows(prompt: npt.NDArray[np.int32], test_rows: Mask, seed: int) -> Mask:
    """Return the pairs of a tenth of the training prompts. Features are not trained on them."""
    units = validation_units(prompt[~test_rows])
    names = np.unique(units)
    order = random_stream(seed, VALIDATION_PROMPTS).permutation(names)
    rows = np.zeros(len(prompt), dtype=bool)
    rows[~test_rows] = np.isin(units, order[: max(1, len(names) // 10)])
    return rows


def _fit_backbone(task: TunedTask) -> Judged:
    """Fine-tune models, and fit an ensemble on them."""
    from pluralign.learning.backbone.recipe import TextPairs
    from pluralign.learning.backbone.train import fine_tune

    preferences, options, learned = task.preferences, task.options, task.learned
    items = preferences.items()
    a, b, prob_a = items.a[learned], items.b[learned], np.asarray(preferences.prob_a[learned], dtype=np.float64)
    if options.method == "stagewise" and options.variant == "printed":  # the only loss that depends on the order
        kept = orientation(prob_a, options.orient, options.seed) > 0
        a, b, prob_a = np.where(kept, a, b), np.where(kept, b, a), np.where(kept, prob_a, 1 - prob_a)
    pairs = TextPairs(texts_of(preferences), a, b, prob_a, preferences.prompt_index[learned])

    def enough(outputs: Array) -> bool:
        return stopped_improving(sizes_on_validation(task, outputs)[1])

    run, features, seconds = fine_tune(pairs, task, enough if options.k == "auto" else None)
    reading = time.perf_counter()
    settings = {
        **asdict(task.tuning),
        "steps": run.plan.steps,
        "batch_size": run.plan.batch,
        "learning_rate": run.plan.learning_rate,
        "max_length": features.max_length,
        "scoring_precision": features.precision,
        "validation_pairs": int(task.validation.sum()),
    }
    if options.method == "joint":
        candidates, notes = _candidates(task, features)
        ensemble, held_out = compare(task, candidates)
        notes = [*(ensemble.record.notes or []), *run.notes, *notes]
    else:
        ensemble, held_out, chosen = _fit_stages(task, features)
        settings |= chosen
        notes = run.notes
    encoding = time.perf_counter() - reading
    record = replace(ensemble.record, tuning=settings, notes=notes, seconds_members=seconds, seconds_encoding=encoding)
    return replace(ensemble, record=record), held_out


# --- Joint members on trained and on frozen features: validation prompts choose, test prompts measure.


ONE_STANDARD_ERROR = 0.84
"""Confidence of a one-sided test that asks for about one standard error."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Features that a joint ensemble can be fitted on."""

    features: TextFeatures | FinetunedFeatures
    vectors: Vectors
    """Of all texts."""
    directions: FloatArray | None = None
    """Linear functions of the features that members are combinations of, ``(d, m)``; None for all."""
    trained: Trained | None = None
    """The inputs of members, if only some of the features were trained."""


def _candidates(task: TunedTask, model: FinetunedFeatures) -> tuple[dict[str, Candidate], list[str]]:
    """Return the states of a fine-tuned model, its outputs, and the frozen model, with notes for the user."""
    states = model(texts_of(task.preferences), task.progress)
    forget_models()
    (folder,) = model_folders(model)
    candidates = {"tuned": Candidate(model, states), "outputs": Candidate(model, states, head_weights(model, folder).T)}
    if not task.tuning.compare_frozen:
        return candidates, []
    try:
        frozen = TextFeatures(str(task.tuning.backbone), precision=model.precision).resolved()
        return {**candidates, "frozen": Candidate(frozen, task.vectors(frozen))}, []
    except PluralignError as error:  # hours of training are not lost to a package that is missing
        note = f"the frozen model was not compared: {str(error).rstrip('.')}"
        if task.checkpoints.processes.first:
            logger.warning("%s.", note)
        return candidates, [note]


def compare(task: TunedTask, candidates: Mapping[str, Candidate]) -> Judged:
    """Fit a joint ensemble on each candidate, and return the best on validation prompts with the figures of all.

    Args:
        task: the fit.
        candidates: ``tuned``, and ``outputs`` and ``frozen`` if they are compared.
    """
    with task.one_thread():
        found = {name: _validation_errors(task, name, one) for name, one in candidates.items()}
        errors, prompt = {name: one for name, (one, _) in found.items()}, found["tuned"][1]
        used, why = task.checkpoints.processes.agreed(lambda: choose_encoder(errors, prompt))
        fits = {}
        for name, one in candidates.items():
            data = task.data(one.features, one.vectors, name)
            data = data if name == used else replace(data, watcher=FitWatcher())
            fits[name] = fit_members(data, None if name == "frozen" else _trained(task, data, one))
    ensemble, held_out = fits[used]
    choice = replace(encoder_choice(used, errors, fits), why=why, judgments=task.judged is not None)
    return replace(ensemble, record=replace(ensemble.record, encoders=choice)), held_out


def _trained(task: TunedTask, data: LearningData, one: Candidate) -> Trained:
    return one.trained or Trained(feature_map(data, one.directions), task.validation)


def _validation_errors(task: TunedTask, name: str, one: Candidate) -> tuple[FloatArray, IndexArray]:
    """Return the errors of members on validation prompts that they were not fitted on, with the prompts, ``(n,)``.

    From counts: the squared error of each pair. From judgments: −log P of each judgment by the mixture.

    Members are compared, not the rewards that a model was tuned with: features on which one soft reward predicts well
    may still be poor ones for hard votes. Target and regularisation are chosen on the same prompts, for all features
    alike: elsewhere a tuned model fits the votes too well to choose there.
    """
    fit, _ = task.without_validation(name, one)
    if task.judged is not None:
        voices, check = validated_voices(fit, *task.judged)
        error = (-voices.by_group(check) / check.judgments_of_group)[check.group_of_judgment]
        return error, check.prompt_of_group[check.group_of_judgment]

    def compute() -> FloatArray:
        share = validated_members(fit).prob_hat(fit.check, task.options.level)
        return squared_error(share, fit.check.prob_a)

    return fit.checkpoints.keep("validation", FloatArray, compute), fit.check.prompt


def validated_voices(task: FitTask, judgments: Judgments, items: IndexArray) -> tuple[Voices, RankedTexts]:
    """Fit the mixture without the validation prompts, and return it with the judgments on these prompts.

    Args:
        task: the training pairs with one validation fold.
        judgments: on the training prompts.
        items: text of each of their entries, ``(n_entries,)``.
    """
    search, k = VoicesSearch(task, judgments, items), task.usual_size

    def fit() -> Voices:
        learn, penalties = search.parts[0][0], search.choose_penalties(k)
        start, seed = search.fitted(0, 1, penalties).theta[:, 0], task.options.seed * STARTS
        fits = [partial(fit_voices, learn, k, penalties, start, seed=seed + number) for number in range(STARTS)]
        return mean_of(task.in_parallel(fits), learn.inputs)

    return task.checkpoints.keep("voices", Voices, fit), search.texts(task.folds[0], linked=False)


def mixture_of(task: TunedTask, name: str, one: Candidate) -> tuple[FeatureMap, Voices, FloatArray]:
    """Fit the mixture to the judgments without the validation prompts.

    Returns:
        The map to its inputs, the mixture, and its rewards of all texts, ``(n_texts, k)``.
    """
    assert task.judged is not None  # noqa: S101
    fit, inputs = task.without_validation(name, one)
    voices, _ = validated_voices(fit, *task.judged)
    return inputs, voices, fit.train.inputs.astype(np.float64) @ voices.theta


def choose_encoder(errors: Mapping[str, FloatArray], prompt: IndexArray) -> tuple[str, str]:
    """Return the fit with the lowest error on validation prompts, and why.

    A fine-tuned model is larger on disk, and a small lead on few prompts is chance: the frozen model is used unless the
    best of the others is better by about one standard error, paired by prompt, on at least ``ENOUGH_CLUSTERS`` prompts.

    Args:
        errors: errors of each fit on the validation prompts, ``(n,)``.
        prompt: prompt of each error, ``(n,)``.

    Example:
        >>> frozen, prompt = np.tile([0.3, 0.2, 0.4, 0.3], 10), np.arange(40, dtype=np.int32)
        >>> choose_encoder({"tuned": frozen - 0.1, "frozen": frozen}, prompt)
        ('tuned', 'better on 40 validation prompts')
        >>> choose_encoder({"tuned": frozen - np.tile([0.3, -0.3, 0.0, 0.1], 10), "frozen": frozen}, prompt)[0]
        'frozen'
        >>> choose_encoder({"tuned": frozen[:9] - 0.1, "frozen": frozen[:9]}, prompt[:9])[0]
        'frozen'
    """
    best, n = min(errors, key=lambda name: float(errors[name].mean())), len(np.unique(prompt))
    if "frozen" not in errors:
        return best, "the frozen features were not compared"
    if n < ENOUGH_CLUSTERS:
        few = f"{n} validation prompts are too few to choose (fewer than {ENOUGH_CLUSTERS})"
        return "frozen", f"{few}; {spelled(compare_frozen=False)} keeps the trained ones"
    if best != "frozen" and clearly_lower(errors[best] - errors["frozen"], prompt, ONE_STANDARD_ERROR):
        return best, f"better on {n} validation prompts"
    return "frozen", f"training did not clearly help on {n} validation prompts"


def encoder_choice(used: str, errors: Mapping[str, FloatArray], fits: Mapping[str, Judged]) -> EncoderChoice:
    """Return the choice with the held-out figures of all fits.

    Args:
        used: name of the fit that validation prompts chose.
        errors: errors of each fit on the validation prompts.
        fits: the fit of each candidate.
    """
    squared, figures = {}, {}
    for name, (ensemble, held_out) in fits.items():
        votes, share = held_out.preferences, held_out.prob_hat(ensemble)
        squared[name] = squared_error(share, votes.prob_a)
        corrected = brier_corrected(share, votes.prob_a, votes.n_votes, votes.counted_ties)
        figures[name] = TunedFit(float(errors[name].mean()), corrected)
    prompt = fits[used][1].preferences.prompt_index
    for name in figures.keys() - {"frozen"} if "frozen" in fits else ():
        found = paired_difference(squared[name], squared["frozen"], prompt, min_clusters=ENOUGH_CLUSTERS)
        low, high = (None, None) if np.isnan(found.low) else (found.low, found.high)
        figures[name] = replace(figures[name], difference=found.mean, low=low, high=high)
    tuned, frozen = figures["tuned"], figures.get("frozen")
    validation, test = (frozen.validation, frozen.test) if frozen else (None, None)
    interval = tuned.difference, tuned.low, tuned.high
    return EncoderChoice(used, tuned.validation, validation, tuned.test, test, *interval, figures.get("outputs"))


# --- A stagewise ensemble: its weights, and early stopping on the validation prompts (§4). No test vote is read for it.


PATIENCE = 2
"""Stages without a lower validation error after which training stops. A member can help only together with the next
one, because all weights are solved again after each stage: one stage without a gain is no reason to stop."""


def sizes_on_validation(task: TunedTask, outputs: Array) -> tuple[list[Members], list[float]]:
    """Return the ensembles after each stage, weighted without the validation pairs, and their errors on these pairs.

    Args:
        task: the fit.
        outputs: rewards of the members so far for every text, ``(n_texts, stages)``.
    """
    pairs = task.pairs(outputs)
    check, sizes = pairs[task.validation], stage_members(pairs[task.learned])
    return sizes, [members.brier(check, "vote") for members in sizes]


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


def choose_stages(task: TunedTask, outputs: Array) -> tuple[int, str]:
    """Return the smallest size whose validation error is within one standard error of the best, and why training ended.

    Args:
        task: the fit.
        outputs: rewards of all trained members for every text, ``(n_texts, stages)``.
    """
    sizes, errors = sizes_on_validation(task, outputs)
    reason = f"{len(sizes)} stages are the most that --k auto trains"
    if stopped_improving(errors):
        reason = f"the validation Brier score has not improved for {PATIENCE} stages"
    listed = ", ".join(f"{error:.4f}" for error in errors)
    k = choose_size(dict(enumerate(sizes, 1)), task.pairs(outputs)[task.validation], "vote")
    return k, f"{reason}: {listed}"


def _fit_stages(
    task: TunedTask, models: FinetunedFeatures
) -> tuple[RewardEnsemble, HeldOutVotes, dict[str, int | str]]:
    """Solve the weights of stagewise members, and judge the ensemble. With ``--k auto``, say why training stopped."""
    data = task.data(models, models(texts_of(task.preferences)))
    told: dict[str, int | str] = {}
    fit = task_of(data, identity_map(models.outputs))
    sizes = stage_members(fit.train)
    history = [fit.measured(members) for members in sizes]
    members = sizes[-1]
    if task.options.k == "auto":  # the models of later stages are left behind
        k, stopped = choose_stages(task, data.features)
        told = {"stages": len(sizes), "stopped": stopped}
        models = models.first(k)
        data = replace(data, features=data.features[:, :k], text_features=models, watcher=FitWatcher())
        fit = task_of(data, identity_map(k))
        members = stage_members(fit.train)[-1]
    check, members = fit.train[task.validation[~task.test_rows]], members.unit_spread(fit.train)
    linear, temperature = LinearMembers(identity_map(models.outputs), members.theta), choose_temperature(members, check)
    ensemble = RewardEnsemble(linear, members.weights, models, temperature, members.undecided)
    return *measure_fit(ensemble, data, _first_member_baselines(fit.train, check), history), told


def _first_member_baselines(train: Pairs, check: Pairs) -> dict[str, Baseline]:
    """Return the first member as a single reward: as it is, tempered, and with its opposite."""
    reward = np.eye(train.inputs.shape[1])[:, 0]
    z = scores(check.difference, reward)
    errors = [brier(sigmoid(z / temperature), check.prob_a) for temperature in TEMPERATURES]
    baselines = {
        "soft_bt": {"theta": reward, "temperature": np.array(1.0)},
        "soft_bt_temperature": {"theta": reward, "temperature": np.array(TEMPERATURES[int(np.argmin(errors))])},
        "pair": fit_pair(train, reward),
    }
    return {name: Baseline(BASELINES[name], arrays) for name, arrays in baselines.items()}
