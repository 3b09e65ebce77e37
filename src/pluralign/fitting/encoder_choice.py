"""Fits on a fine-tuned model next to one on the frozen model: validation prompts choose, test prompts measure."""

from collections.abc import Mapping

import numpy as np

from pluralign.core.arrays import FloatArray, IndexArray, Mask, Vectors
from pluralign.core.checkpoints import Arrays, Checkpoints
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import EncoderChoice, TunedFit
from pluralign.features.finetuned import FinetunedFeatures
from pluralign.features.frozen import TextFeatures
from pluralign.fitting.frozen import TrainedInputs, feature_map
from pluralign.fitting.joint_fit import validated_members
from pluralign.fitting.task import FitTask, FitWatcher
from pluralign.theory.calibration import brier_corrected, squared_error
from pluralign.theory.intervals import ENOUGH_CLUSTERS, clearly_lower, paired_difference
from pluralign.training.options import FitOptions
from pluralign.training.pairs import Pairs
from pluralign.votes.preferences import PreferenceSet

Fits = Mapping[str, tuple[RewardEnsemble, HeldOutVotes]]
"""Ensembles by name, with the held-out votes and their rewards."""


ONE_STANDARD_ERROR = 0.84
"""Confidence of a one-sided test that asks for about one standard error."""


def validation_errors(
    preferences: PreferenceSet,
    test_rows: Mask,
    validation: Mask,
    features: TextFeatures | FinetunedFeatures,
    vectors: Vectors,
    options: FitOptions,
    checkpoints: Checkpoints,
    directions: FloatArray | None = None,
    trained: TrainedInputs | None = None,
) -> FloatArray:
    """Return the squared errors on the validation pairs of members that are fitted without them, ``(n,)``.

    Members are compared, not the rewards that a model was tuned with: features on which one soft reward predicts well
    may still be poor ones for hard votes. Target and regularisation are chosen on the same prompts, for all features
    alike: elsewhere a tuned model fits the votes too well to choose there.

    Args:
        preferences: all votes.
        test_rows: pairs that are held out, ``(n_pairs,)``.
        validation: training pairs that no model was tuned on, ``(n_pairs,)``.
        features: how the vectors were made.
        vectors: of all texts.
        options: how to learn.
        checkpoints: of this fit, which differ from those of the fit to all training pairs.
        directions: linear functions of the features that members are combinations of, ``(d, m)`` (default: all).
        trained: the inputs of members and their teacher, if some of the features were trained with it.
    """

    def compute() -> Arrays:
        items = preferences.items()
        if trained is None:
            inputs = feature_map(preferences, ~test_rows, vectors, features, checkpoints, directions)
        else:
            inputs = trained.inputs
        pairs = Pairs(
            inputs(vectors), items.a, items.b, preferences.prob_a, preferences.prompt_index, checkpoints.processes
        )
        train, only_fold = pairs[~test_rows], validation[~test_rows]
        teacher = trained.teacher if trained else None
        task = FitTask.start(train, options, checkpoints, FitWatcher(), only_fold, teacher)
        share = validated_members(task).prob_hat(task.check, options.level)
        return {"errors": squared_error(share, task.check.prob_a)}

    return np.asarray(checkpoints.arrays("validation", compute)["errors"], dtype=np.float64)


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
