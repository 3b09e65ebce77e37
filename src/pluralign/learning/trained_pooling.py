"""A joint fit on a sentence encoder with a trained attention pooling, beside the same fit on frozen features.

The encoder itself stays frozen. The token states of a middle layer are read once. Small networks learn which tokens
count (``learning.backbone.attention``) and correct the mixture of rewards on the frozen features. Members then learn
from the corrected mixture, with everything that a fit on frozen features has. Validation prompts, which the networks
were not trained on, choose the target of the members, and whether the trained or the frozen features are used.

Tuning the upper layers of the encoder instead took several times as long and gained less (docs/log.md).
"""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import safetensors.numpy
from threadpoolctl import threadpool_limits

from pluralign.core.arrays import Array, FloatArray, Mask, Vectors
from pluralign.core.checkpoints import UNFINISHED, Checkpoints
from pluralign.core.errors import PluralignError, UsageError
from pluralign.core.files import disk_errors_as_data_error
from pluralign.core.hub import HUB_ID, hub_folder
from pluralign.core.options import changed_options, with_changes
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.members import FeatureMap
from pluralign.learning.frozen import encoded_texts, feature_map, fit_members, fit_tuned_members
from pluralign.learning.options import FinetuneOptions, FitOptions
from pluralign.learning.pairs import Pairs, validation_folds
from pluralign.learning.task import MANY_PAIRS, FitWatcher, LearningData, decisive_options, save_fit
from pluralign.learning.teacher import Teacher, TrainedTeacher, damping_factor, fit_teacher, trained_teacher
from pluralign.learning.tuned import (
    choose_encoder,
    decisive_tuning,
    encoder_choice,
    finetuning_packages,
    validation_errors,
    validation_rows,
)
from pluralign.text import surface
from pluralign.text.features import TextFeatures
from pluralign.text.finetuned import backbone_folder
from pluralign.text.loading import copy_model
from pluralign.text.options import LAST, is_decoder, middle_layer
from pluralign.text.pooling import ATTENTION_FILE
from pluralign.text.transformer import ModelEncoder, is_sentence_encoder, read_config
from pluralign.votes.preferences import PreferenceSet, texts_of

DEFAULTS: dict[str, Any] = {"epochs": 8.0, "learning_rate": 3e-3, "batch_size": 128}
"""Options of fine-tuning that have other defaults for a sentence encoder."""
NOT_USED = ("encoder", "features", "folds")
"""Options of frozen features that a trained pooling excludes."""
NOT_TUNED = ("optimizer", "micro_batch", "max_length", "gradient_checkpointing", "report_to", "run_name", "lora_rank")
"""Options of fine-tuning that do not apply, because the encoder stays frozen."""
TRAINED_GAIN = 4.0
"""Factor on the trained features. They are few, and as important as several hundred frozen ones; with this factor, one
strength of regularisation suits both."""


def tunes_encoder(options: FitOptions, tuning: FinetuneOptions) -> bool:
    """Return whether these options train a pooling for a sentence encoder: joint, no adapters, and a fitted head."""
    name = tuning.backbone
    if name is None or options.method != "joint" or tuning.lora or tuning.fresh_head:
        return False
    if name == "minilm" or Path(name).is_dir():
        return _is_tunable(backbone_folder(name))
    if not HUB_ID.fullmatch(name):
        return False
    try:
        return _is_tunable(hub_folder(name, "model", only=["config.json", "modules.json"], remedy=""))
    except PluralignError:  # the fit gives the reason
        return False


def _is_tunable(folder: Path) -> bool:
    """Return whether a folder holds a sentence encoder whose layers can be pooled: no decoder, and none inside."""
    if not is_sentence_encoder(folder):
        return False
    config = read_config(folder)
    return not is_decoder(config) and not config.get("is_encoder_decoder")


def encoder_defaults(tuning: FinetuneOptions, named: tuple[str, ...]) -> FinetuneOptions:
    """Return the options with the defaults for a sentence encoder in place of those that were not given.

    Args:
        tuning: the options.
        named: names of options that were given, also with their usual values.

    Raises:
        UsageError: an option that does not apply was given.
    """
    given = {*named, *changed_options(tuning)}
    if unused := [name for name in NOT_TUNED if name in given]:
        option = f"--{unused[0].replace('_', '-')}"
        raise UsageError(
            f"{option} does not apply to a sentence encoder, which stays frozen; leave it out or use --lora."
        )
    return with_changes(tuning, {name: value for name, value in DEFAULTS.items() if name not in given})


def fit_tuned_encoder(
    preferences: PreferenceSet,
    options: FitOptions,
    tuning: FinetuneOptions,
    folder: str | os.PathLike[str] | None,
    progress: Progress | None,
    watcher: FitWatcher,
) -> RewardEnsemble:
    """Train an attention pooling for a sentence encoder on the votes, and fit a joint ensemble with its features.

    Args:
        preferences: all votes.
        options: how to learn.
        tuning: the encoder, and how its pooling is trained.
        folder: where unfinished work, the encoder and the ensemble are kept.
        progress: called with the texts encoded or the steps done, and their total.
        watcher: receives the progress of the fit.
    """
    if folder is None:
        raise UsageError("a fine-tuned ensemble needs a folder for its models.")
    with finetuning_packages():
        from pluralign.learning.backbone.train import finetune_processes
    if unused := [name for name in changed_options(options) if name in NOT_USED]:
        raise UsageError(f"--{unused[0]} cannot be used with --backbone; leave it out.")
    if options.pooling != "mean" or options.layers == LAST:
        raise UsageError(
            "a fine-tuned sentence encoder reads the mean over tokens of named layers; name layers by number."
        )
    started = time.perf_counter()
    processes = finetune_processes()
    test_rows = preferences.test_mask(options.test_fraction, seed=options.seed)
    validation = validation_rows(preferences.prompt_index, test_rows, options.seed)
    base = TextFeatures(str(tuning.backbone), options.layers, options.pooling, options.surface, options.precision)
    base = base.with_chosen_layers().with_chosen_precision(processes).with_identity()
    options = replace(options, precision=base.precision)
    inputs = {
        "data": preferences.fingerprint,
        "options": decisive_options(options),
        "tuning": decisive_tuning(tuning),
        "encoder": base.identity,
        "version": __version__,
    }
    checkpoints = Checkpoints(folder, inputs, processes)

    def steps_of(fit: str) -> Checkpoints:
        return Checkpoints(folder, {**inputs, "fit": fit}, processes)

    watcher.encoding(len(preferences.items().prompt_index))
    one_thread = partial(threadpool_limits, 1 if len(preferences) < MANY_PAIRS else None, user_api="blas")
    with encoded_texts(preferences, base, options, None, processes, progress) as frozen:
        with one_thread():
            data = LearningData(preferences, test_rows, frozen, base, options, checkpoints)
            start = _start(data, ~test_rows & ~validation)
        before = time.perf_counter()
        tuned = _with_pooling(preferences, start, base, tuning, options.seed, checkpoints, progress, watcher)
        seconds = time.perf_counter() - before
        with encoded_texts(preferences, tuned, options, None, processes, progress) as vectors, one_thread():
            trained = processes.agreed(partial(_trained_inputs, preferences, start, vectors, base, ~test_rows))
            encoders = {"tuned": replace(data, features=vectors, text_features=tuned)}
            if tuning.compare_frozen:
                encoders["frozen"] = data
            errors = {}
            for name, of in encoders.items():
                of = replace(of, checkpoints=steps_of(f"{name}, without validation prompts"))
                members_on = trained if name == "tuned" else (feature_map(of), None)
                errors[name] = validation_errors(of, validation, *members_on)
            used = processes.agreed(lambda: choose_encoder(errors, preferences.prompt_index[validation]))
            fits = {}
            for name, of in encoders.items():
                of = replace(of, checkpoints=steps_of(name), watcher=watcher if name == used else FitWatcher())
                fits[name] = fit_tuned_members(of, validation, *trained) if name == "tuned" else fit_members(of)
    ensemble, held_out = fits[used]
    record = replace(
        ensemble.record,
        tuning={**asdict(tuning), "validation_pairs": int(validation.sum())},
        encoders=encoder_choice(used, errors, fits),
        processes=processes.count,
        seconds_members=[seconds],
        seconds=time.perf_counter() - started,
    )
    ensemble = replace(ensemble, record=record)
    if processes.first:
        save_fit(ensemble, held_out, folder, keep_held_out=options.keep_held_out)
        checkpoints.finish()
    processes.wait()
    return replace(ensemble, features=RewardEnsemble.load(folder).features)


@dataclass(frozen=True, eq=False)
class _Start:
    """The mixture on the frozen features that training starts from."""

    inputs: FeatureMap
    """From frozen features to the inputs of rewards."""
    teacher: Teacher
    """The mixture and the one reward on these inputs, fitted to the training pairs without validation prompts."""
    learned: Mask
    """Pairs that it was fitted to, ``(n_pairs,)``."""
    rewards: FloatArray
    """Rewards of each text: those of the mixture, then the one reward, ``(n_texts, outputs)``."""
    damping: FloatArray
    """Factor that shortens long differences, of each pair, ``(n_pairs,)``."""


def _start(data: LearningData, learned: Mask) -> _Start:
    """Fit the mixture on the frozen features of the training pairs that the networks learn from."""
    preferences, seed, inputs = data.preferences, data.options.seed, feature_map(data)
    items, mapped = preferences.items(), inputs(data.features)
    pairs = Pairs(mapped, items.a, items.b, preferences.prob_a, preferences.prompt_index)
    own = pairs[learned]
    fit = partial(fit_teacher, own, validation_folds(own.prompt, seed), seed=seed)
    teacher = data.checkpoints.keep("start", Teacher, fit)
    rewards = mapped.astype(np.float64) @ np.column_stack([teacher.voices, teacher.theta])
    damping = damping_factor(teacher.squares(pairs.difference), teacher.damping, teacher.mean_square)
    return _Start(inputs, teacher, learned, rewards, damping)


def _with_pooling(
    preferences: PreferenceSet,
    start: _Start,
    base: TextFeatures,
    tuning: FinetuneOptions,
    seed: int,
    checkpoints: Checkpoints,
    progress: Progress | None,
    watcher: FitWatcher,
) -> TextFeatures:
    """Train the attention pooling, and return the features of the encoder with it."""
    encoder = base.load()
    assert isinstance(encoder, ModelEncoder)  # noqa: S101
    layer = middle_layer(encoder.layers)

    def train() -> Mapping[str, Array]:
        from pluralign.learning.backbone.attention import FrozenMixture, train_attention
        from pluralign.learning.backbone.batches import TextPairs
        from pluralign.text.states import read_token_states

        items, rows = preferences.items(), start.learned
        used, place = np.unique(np.concatenate([items.a[rows], items.b[rows]]), return_inverse=True)
        texts = texts_of(preferences)
        a, b = np.split(place.astype(np.int32), 2)
        prob_a = np.asarray(preferences.prob_a[rows], dtype=np.float64)
        pairs = TextPairs([texts[text] for text in used], a, b, prob_a, preferences.prompt_index[rows])
        mixture = FrozenMixture(start.rewards[used], start.teacher.voice_weights, start.damping[rows])
        root = checkpoints.root
        assert root is not None  # noqa: S101
        root.mkdir(parents=True, exist_ok=True)
        with disk_errors_as_data_error(root), TemporaryDirectory(dir=root, prefix=UNFINISHED) as scratch:
            watcher.encoding(len(used))
            states = read_token_states(pairs.items, encoder, layer, Path(scratch) / "states", progress)
            watcher.training("the attention pooling")
            assert tuning.learning_rate is not None  # noqa: S101
            assert tuning.batch_size is not None  # noqa: S101
            return train_attention(
                states, pairs, mixture, epochs=tuning.epochs, learning_rate=tuning.learning_rate,
                batch=tuning.batch_size, seed=seed, progress=progress,
            )  # fmt: skip

    processes = checkpoints.processes
    weights = checkpoints.arrays("attention", lambda: processes.agreed(train))

    def write(folder: Path) -> None:
        if processes.first:
            copy_model(encoder.folder, folder)
            saved = {name: weights[name] for name in weights} | {"layer": np.array(layer)}
            safetensors.numpy.save_file(saved, folder / ATTENTION_FILE)

    folder = checkpoints.folder("encoder", write)
    return replace(base, encoder=str(folder), own=True, hub_id="", revision="").with_identity()


def _trained_inputs(
    preferences: PreferenceSet, start: _Start, vectors: Vectors, base: TextFeatures, train: Mask
) -> tuple[FeatureMap, TrainedTeacher]:
    """Return the frozen inputs followed by the trained features, and the rewards of all networks on them.

    Args:
        preferences: all votes.
        start: the rewards on frozen features.
        vectors: of all texts: frozen features of the encoder, trained features, surface features.
        base: how the frozen features were made.
        train: the training pairs, ``(n_pairs,)``.
    """
    items, frozen, teacher = preferences.items(), start.inputs, start.teacher
    outputs = start.rewards.shape[1]
    n_trained = vectors.shape[1] - len(frozen.mean)
    first = len(frozen.mean) - (len(surface.NAMES) if base.surface else 0)
    columns = np.arange(first, first + n_trained)
    seen = vectors[np.union1d(items.a[train], items.b[train])][:, columns].astype(np.float64)
    spread = np.maximum(seen.std(axis=0), 1e-6)

    def extended(values: Array, more: Array) -> Array:
        return np.insert(values, [first] * n_trained, more, axis=0).astype(np.float32)

    axes = np.eye(len(frozen.mean)) if frozen.axes is None else frozen.axes
    n_frozen = axes.shape[1]
    block = np.zeros((vectors.shape[1], n_frozen + n_trained), dtype=np.float32)
    block[:, :n_frozen] = extended(axes, np.zeros((n_trained, n_frozen)))
    block[columns, n_frozen + np.arange(n_trained)] = 1
    inputs = replace(
        frozen,
        mean=extended(frozen.mean, seen.mean(axis=0)),
        spread=extended(frozen.spread, spread),
        gain=extended(frozen.gain, np.full(n_trained, TRAINED_GAIN)),
        axes=block,
    )
    # An output of a network is added to its reward of the frozen mixture.
    networks = n_trained // outputs
    theta = np.tile(np.column_stack([teacher.voices, teacher.theta]), networks)
    theta = np.vstack([theta, np.diag(spread / TRAINED_GAIN)]).reshape(-1, networks, outputs)
    voices = theta[:, :, :-1].reshape(len(theta), -1)
    pairs = Pairs(inputs(vectors), items.a, items.b, preferences.prob_a, preferences.prompt_index)[start.learned]
    weights = np.tile(teacher.voice_weights, networks) / networks
    return inputs, trained_teacher(teacher, pairs, voices, theta[:, :, -1].mean(axis=1), weights)
