"""Fits on a fine-tuned model next to one on the frozen model: validation prompts choose, test prompts measure."""

from collections.abc import Mapping

import numpy as np

from pluralign.core.arrays import FloatArray, Mask, Vectors
from pluralign.core.checkpoints import Checkpoints
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import EncoderChoice, TunedFit
from pluralign.features.finetuned import FinetunedFeatures
from pluralign.features.frozen import TextFeatures
from pluralign.fitting.frozen import feature_map
from pluralign.fitting.joint_fit import quick_members
from pluralign.fitting.selection import validation_brier
from pluralign.fitting.task import FitTask, FitWatcher
from pluralign.theory.calibration import brier_corrected
from pluralign.theory.intervals import ENOUGH_CLUSTERS, paired_difference
from pluralign.training.options import FitOptions
from pluralign.training.pairs import Pairs
from pluralign.votes.preferences import PreferenceSet

Fits = Mapping[str, tuple[RewardEnsemble, HeldOutVotes]]
"""Ensembles by name, with the held-out votes and their rewards."""


def validation_error(
    preferences: PreferenceSet,
    test_rows: Mask,
    validation: Mask,
    features: TextFeatures | FinetunedFeatures,
    vectors: Vectors,
    options: FitOptions,
    checkpoints: Checkpoints,
    directions: FloatArray | None = None,
) -> float:
    """Return the Brier score on validation prompts of the members that are fitted without them.

    Members are compared, not the rewards that a model was tuned with: features on which one soft reward predicts well
    may still be poor ones for hard votes.

    Args:
        preferences: all votes.
        test_rows: pairs that are held out, ``(n_pairs,)``.
        validation: training pairs that no model was tuned on, ``(n_pairs,)``.
        features: how the vectors were made.
        vectors: of all texts.
        options: how to learn.
        checkpoints: of this fit, which differ from those of the fit to all training pairs.
        directions: linear functions of the features that members are combinations of, ``(d, m)`` (default: all).
    """

    def compute() -> float:
        items = preferences.items()
        inputs = feature_map(preferences, ~test_rows, vectors, features, checkpoints, directions)
        pairs = Pairs(
            inputs(vectors), items.a, items.b, preferences.prob_a, preferences.prompt_index, checkpoints.processes
        )
        task = FitTask.start(pairs[~test_rows & ~validation], options, checkpoints, FitWatcher())
        return validation_brier(quick_members(task), pairs[validation], options.level)

    return float(checkpoints.value("validation", compute))


def encoder_choice(used: str, validation: Mapping[str, float], fits: Fits) -> EncoderChoice:
    """Return the choice with the held-out figures of all fits.

    Args:
        used: name of the fit that validation prompts chose.
        validation: Brier score of each fit on validation prompts.
        fits: ``tuned``, and ``outputs`` and ``frozen`` where they were fitted.
    """
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
