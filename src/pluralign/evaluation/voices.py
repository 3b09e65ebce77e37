"""Evidence of distinct voices: do several rewards predict the votes better than the best single reward?

An ensemble can beat plain soft BT by being less extreme, without finding different views. So it is compared with the
best single reward: plain, tempered or damped. The claims of other parts (cards, steering, slates) rest on this test.
"""

import math
from collections.abc import Mapping

from pluralign.core.arrays import FloatArray
from pluralign.ensemble.record import SINGLE_REWARDS, VoicesEvidence
from pluralign.theory.calibration import brier, squared_error
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval, paired_difference
from pluralign.votes.preferences import PreferenceSet

ERROR_RATE = 0.05
"""Probability of an interval that misses its value, for all readings of an ensemble together."""


def evidence_of_voices(
    readings: Mapping[str, FloatArray], baselines: Mapping[str, FloatArray], preferences: PreferenceSet
) -> VoicesEvidence | None:
    """Test whether an ensemble predicts votes better than the best single reward.

    With p̂ a reading of the ensemble and q the prediction of the best single reward on the same votes,

        difference = mean (p̂ − p)² − mean (q − p)²,

    with an interval over prompts for each of R readings, of coverage 1 − .05/R (Bonferroni). There is evidence if one
    of these intervals is entirely below 0. Taking the single reward that is best on these votes makes the test
    conservative.

    Args:
        readings: predicted shares of the ensemble by reading, ``(n_pairs,)`` each.
        baselines: predicted shares of its baselines by name, ``(n_pairs,)`` each.
        preferences: the votes. Use prompts that nothing was trained on.

    Returns:
        The evidence, undefined with fewer than ``ENOUGH_CLUSTERS`` prompts. None if no baseline is a single reward.
    """
    prob_a, prompt = preferences.prob_a, preferences.prompt_index
    singles = {name: brier(baselines[name], prob_a) for name in SINGLE_REWARDS if name in baselines}
    if not singles:
        return None
    best_single = min(singles, key=singles.__getitem__)
    theirs, confidence = squared_error(baselines[best_single], prob_a), 1 - ERROR_RATE / len(readings)

    def against_single(share: FloatArray) -> Interval:
        return paired_difference(
            squared_error(share, prob_a), theirs, prompt, level=confidence, min_clusters=ENOUGH_CLUSTERS
        )

    differences = {reading: against_single(share) for reading, share in readings.items()}
    too_few = any(math.isnan(one.high) for one in differences.values())
    reading = min(differences, key=lambda name: differences[name].mean if too_few else differences[name].high)
    return VoicesEvidence(
        evidence=None if too_few else differences[reading].high < 0,
        best_single=best_single,
        reading=reading,
        difference=differences[reading],
        readings=differences,
        mixture=against_single(baselines["mixture"]) if "mixture" in baselines else None,
        confidence=confidence,
        reason=f"{len(preferences.prompts)} prompts, at least {ENOUGH_CLUSTERS} needed" if too_few else None,
    )
