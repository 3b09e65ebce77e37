"""Fits on a fine-tuned model next to one on the frozen model: validation prompts choose, test prompts measure."""

from collections.abc import Mapping

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import EncoderChoice, TunedFit
from pluralign.theory.calibration import brier_corrected
from pluralign.theory.intervals import ENOUGH_CLUSTERS, paired_difference

Fits = Mapping[str, tuple[RewardEnsemble, HeldOutVotes]]
"""Ensembles by name, with the held-out votes and their rewards."""


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
