"""A joint ensemble on a fine-tuned language model: refit the head, and compare with the frozen model.

The trained head is one of a mixture of rewards, which made the model see what divides people. The members are another
linear head on the states that it reads, fitted with everything that a fit on frozen features has: target, restarts,
exact weights, undecided share, baselines. Three fits compete, and validation prompts, which the model was not tuned on,
choose one:

* ``tuned``: members on all states;
* ``outputs``: members that are combinations of the trained outputs, which leaves few directions to overfit in;
* ``frozen``: the ensemble that ``fit --encoder`` gives for the same model and split.

The fits on tuned states make their own choices (target, damping, regularisation) on the validation prompts only: on the
prompts that the model was tuned on, its states fit the votes too well.

Why a head, and not features in files of their own: an export stays a plain classifier that transformers, TRL and vLLM
load, a LoRA adapter keeps its format, and pruning selects rows. Scaling is part of the head. Clipping and surface
features are not linear in the states, so tuned members have neither; the frozen ensemble has both.
"""

from collections.abc import Callable
from dataclasses import dataclass

from threadpoolctl import threadpool_limits

from pluralign.core.arrays import FloatArray, Mask, Vectors
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import PluralignError
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import EncoderChoice
from pluralign.features.finetuned import FinetunedFeatures, forget_models, head_weights
from pluralign.features.frozen import TextFeatures
from pluralign.fitting.encoder_choice import choose_encoder, encoder_choice, validation_errors
from pluralign.fitting.frozen import encoded_texts, learn
from pluralign.fitting.task import MANY_PAIRS, FitWatcher
from pluralign.training.options import FitOptions
from pluralign.votes.preferences import PreferenceSet, texts_of


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

    features: TextFeatures | FinetunedFeatures
    vectors: Vectors
    """Of all texts."""
    steps: Checkpoints
    """Of the fit to all training pairs."""
    checking: Checkpoints
    """Of the fit without the validation prompts."""
    directions: FloatArray | None = None
    """Linear functions of the features that members are combinations of, ``(d, m)``; None for all."""


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

    def both(name: str) -> tuple[Checkpoints, Checkpoints]:
        return steps_of(name), steps_of(f"{name}, without validation prompts")

    candidates = {
        "tuned": _Candidate(model, states, *both("tuned")),
        "outputs": _Candidate(model, states, *both("outputs"), head_weights(model).T),
    }
    if frozen is not None:
        try:
            candidates["frozen"] = _frozen(preferences, frozen, options, *both("frozen"), progress)
        except PluralignError as error:  # hours of training are not lost to a package that is missing
            notes.append(f"the frozen model was not compared: {str(error).rstrip('.')}")
    with threadpool_limits(1 if len(preferences) < MANY_PAIRS else None, user_api="blas"):
        errors = {
            name: validation_errors(
                preferences, test_rows, validation, one.features, one.vectors, options, one.checking, one.directions
            )
            for name, one in candidates.items()
        }
        prompt = preferences.prompt_index[validation]
        used = candidates["tuned"].steps.processes.agreed(lambda: choose_encoder(errors, prompt))
        fits = {
            name: learn(
                preferences, test_rows, one.vectors, one.features, options, one.steps,
                watcher if name == used else FitWatcher(), directions=one.directions,
                validation=None if name == "frozen" else validation,
            )
            for name, one in candidates.items()
        }  # fmt: skip
    return ModelFit(*fits[used], encoder_choice(used, errors, fits), notes)


def _frozen(
    preferences: PreferenceSet,
    frozen: TextFeatures,
    options: FitOptions,
    steps: Checkpoints,
    checking: Checkpoints,
    progress: Progress | None,
) -> _Candidate:
    """Return the frozen model, and its features of all texts."""
    chosen = frozen.with_chosen_layers().with_chosen_precision(steps.processes).with_identity()
    with encoded_texts(preferences, chosen, options, None, steps.processes, progress) as vectors:
        return _Candidate(chosen, vectors, steps, checking)
