"""A joint fit on a fine-tuned sentence encoder: tune its upper layers on the votes, then fit as on frozen features.

The encoder is tuned with a mixture of Bradley–Terry rewards, which starts as the one on the frozen features. Then the
ensemble is fitted on the tuned features, with everything that a fit on frozen features has. Validation prompts, which
the encoder was not tuned on, decide everything else: the target, damping and regularisation of the ensemble on tuned
features, and whether the tuned or the frozen encoder is used. On the prompts that it was tuned on, an encoder's
features fit the votes better than on new ones, so choices made there would be too optimistic.
"""

import os
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from pluralign.core.arrays import Array, FloatArray, Mask, Vectors
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import DataError, PluralignError, UsageError
from pluralign.core.hub import HUB_ID, hub_folder
from pluralign.core.options import changed_options, with_changes
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.members import fit_feature_map
from pluralign.features import surface
from pluralign.features.finetuned import backbone_folder
from pluralign.features.frozen import TextFeatures
from pluralign.features.layers import LAST, is_decoder
from pluralign.features.transformer_encoder import ModelEncoder, is_sentence_encoder, read_config
from pluralign.fitting.encoder_choice import choose_encoder, encoder_choice, validation_errors
from pluralign.fitting.finetuned import decisive_tuning, finetuning_packages, validation_rows
from pluralign.fitting.frozen import encoded_texts, learn
from pluralign.fitting.saving import decisive_options, save_fit
from pluralign.fitting.task import MANY_PAIRS, FitWatcher
from pluralign.training.options import FinetuneOptions, FitOptions
from pluralign.training.pairs import Pairs, row_squares, validation_folds
from pluralign.training.teacher import damping_factor, fit_teacher, kept_teacher
from pluralign.votes.preferences import PreferenceSet, texts_of

if TYPE_CHECKING:
    from pluralign.training.finetune.train_model import FinetuneRun

DEFAULTS: dict[str, Any] = {"optimizer": "adamw", "epochs": 3.0, "learning_rate": 3e-4}
"""Options of fine-tuning that have other defaults for a sentence encoder."""
NOT_USED = ("encoder", "features", "folds")
"""Options of frozen features that a fine-tuned encoder excludes."""


def tunes_encoder(options: FitOptions, tuning: FinetuneOptions) -> bool:
    """Return whether these options fine-tune a sentence encoder: joint, all weights, and a fitted head."""
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
    """
    given = {*named, *changed_options(tuning)}
    return with_changes(tuning, {name: value for name, value in DEFAULTS.items() if name not in given})


@dataclass(frozen=True, eq=False)
class _Start:
    """The mixture on the frozen features that the tuning starts from."""

    factor: Array
    """Scale of each dimension of the encoder, ``(d,)``."""
    theta: FloatArray
    """Rewards of the mixture, then the one reward, on scaled features, ``(d, outputs)``."""
    offset: FloatArray | None
    """Rewards of each text by its surface features, which stay as they are, ``(n_texts, outputs)``."""
    damping: FloatArray
    """Factor that shortens long differences, of each pair, ``(n_pairs,)``. It stays that of the frozen features."""
    weights: FloatArray
    """π, the weights of the mixture."""


def fit_tuned_encoder(
    preferences: PreferenceSet,
    options: FitOptions,
    tuning: FinetuneOptions,
    folder: str | os.PathLike[str] | None,
    progress: Progress | None,
    watcher: FitWatcher,
) -> RewardEnsemble:
    """Fine-tune a sentence encoder on the votes, and fit a joint ensemble on its features.

    Args:
        preferences: all votes.
        options: how to learn.
        tuning: the encoder, and how it is tuned.
        folder: where unfinished work, the encoder and the ensemble are kept.
        progress: called with the texts encoded or the steps done, and their total.
        watcher: receives the progress of the fit.
    """
    if folder is None:
        raise UsageError("a fine-tuned ensemble needs a folder for its models.")
    with finetuning_packages():
        from pluralign.training.finetune.recipe import check_trackers
        from pluralign.training.finetune.run import finetune_processes
    check_trackers(tuning)
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
    learned = ~test_rows & ~validation
    one_thread = partial(threadpool_limits, 1 if len(preferences) < MANY_PAIRS else None, user_api="blas")
    with encoded_texts(preferences, base, options, None, processes, progress) as frozen:
        with one_thread():
            start = _start(preferences, frozen, base, learned, options, checkpoints)
        run, seconds, tuned = _tune(preferences, learned, base, start, options, tuning, checkpoints, progress, watcher)
        with encoded_texts(preferences, tuned, options, None, processes, progress) as vectors, one_thread():
            encoders = {"tuned": (tuned, vectors)} | ({"frozen": (base, frozen)} if tuning.compare_frozen else {})
            errors = {
                name: validation_errors(
                    preferences,
                    test_rows,
                    validation,
                    *encoder,
                    options,
                    steps_of(f"{name}, without validation prompts"),
                )
                for name, encoder in encoders.items()
            }  # fmt: skip
            used = processes.agreed(lambda: choose_encoder(errors, preferences.prompt_index[validation]))
            fits = {
                name: learn(
                    preferences, test_rows, of, features, options, steps_of(name),
                    watcher if name == used else FitWatcher(), validation=validation if name == "tuned" else None,
                )
                for name, (features, of) in encoders.items()
            }  # fmt: skip
    ensemble, held_out = fits[used]
    record = replace(
        ensemble.record,
        tuning={
            **asdict(tuning),
            "steps": run.steps,
            "batch_size": run.recipe.batch,
            "max_length": run.base.max_length,
            "validation_pairs": int(validation.sum()),
        },
        encoders=encoder_choice(used, errors, fits),
        notes=[*(ensemble.record.notes or []), *run.notes] or None,
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


def _start(
    preferences: PreferenceSet,
    frozen: Vectors,
    base: TextFeatures,
    learned: Mask,
    options: FitOptions,
    checkpoints: Checkpoints,
) -> _Start:
    """Fit the mixture on the frozen features of the training pairs."""
    items, n_surface = preferences.items(), len(surface.NAMES) if base.surface else 0
    used = np.zeros(len(frozen), dtype=bool)
    used[items.a[learned]] = used[items.b[learned]] = True
    scaling = fit_feature_map(frozen, n_surface, used, n_layers=base.n_layers)
    mapped = scaling(frozen)
    pairs = Pairs(mapped, items.a, items.b, preferences.prob_a, preferences.prompt_index)
    train = pairs[learned]
    fit = partial(fit_teacher, train, validation_folds(train.prompt, options.seed), seed=options.seed)
    teacher = kept_teacher(checkpoints, "start", fit)
    theta, n = np.column_stack([teacher.voices, teacher.theta]), frozen.shape[1] - n_surface
    offset = mapped[:, n:].astype(np.float64) @ theta[n:] if n_surface else None
    damping = damping_factor(row_squares(pairs.difference), teacher.damping, teacher.mean_square)
    return _Start((scaling.gain / scaling.spread)[:n], theta[:n], offset, damping, teacher.voice_weights)


def _tune(
    preferences: PreferenceSet,
    learned: Mask,
    base: TextFeatures,
    start: _Start,
    options: FitOptions,
    tuning: FinetuneOptions,
    checkpoints: Checkpoints,
    progress: Progress | None,
    watcher: FitWatcher,
) -> tuple["FinetuneRun", float, TextFeatures]:
    """Tune the encoder. Return the run, its seconds, and the tuned encoder as features."""
    from pluralign.training.finetune.batches import TextPairs
    from pluralign.training.finetune.losses import MixtureLoss
    from pluralign.training.finetune.sentence import WEIGHTS_FILE, load_sentence_base, write_encoder
    from pluralign.training.finetune.train_model import Training, prepare_run
    from pluralign.training.finetune.trainer import PairLabels

    encoder = base.load()
    if not isinstance(encoder, ModelEncoder) or not (encoder.folder / WEIGHTS_FILE).is_file():
        remedy = "save the model as one safetensors file, or use --lora"
        raise DataError(f"there is no {WEIGHTS_FILE} in it", file=str(tuning.backbone), remedy=remedy)
    items, prob_a = preferences.items(), np.asarray(preferences.prob_a[learned], dtype=np.float64)
    length = min(tuning.max_length, encoder.max_tokens())
    model = load_sentence_base(str(tuning.backbone), encoder.folder, encoder.layers, length, start.factor, start.theta)
    pairs = TextPairs(
        texts_of(preferences), items.a[learned], items.b[learned], prob_a, preferences.prompt_index[learned]
    )
    mixed = options.precision == "bfloat16"
    run = prepare_run(pairs, tuning, options.seed, checkpoints, progress, base=model, mixed=mixed)
    watcher.training("the encoder")
    loss = MixtureLoss(tuple(start.weights.tolist()))
    labels = PairLabels(prob_a, prob_a, start.damping[learned])
    training = Training("encoder", start.theta.shape[1], loss, labels, lambda *_: start.theta, start.offset)
    trained = run.folder / "trained"
    seconds = run.train(training, trained)

    def write(folder: Path) -> None:
        if checkpoints.processes.first:
            write_encoder(trained, encoder.folder, folder)

    folder = checkpoints.folder("encoder", write)
    return run, seconds, replace(base, encoder=str(folder), own=True, hub_id="").with_identity()
