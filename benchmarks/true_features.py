"""Fits on the true features of a town hall, for the benchmarks and tests that need members without an encoder."""

from dataclasses import replace
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from pluralign.core.arrays import Array
from pluralign.core.options import with_changes
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.learning.frozen import fit_members
from pluralign.learning.options import FitOptions
from pluralign.learning.task import MANY_PAIRS, LearningData
from pluralign.text.encoders import TextFeatures
from pluralign.votes.preferences import PreferenceSet


def fit_features(preferences: PreferenceSet, features: Array, **options: Any) -> tuple[RewardEnsemble, HeldOutVotes]:
    """Fit an ensemble on given features, with the same training and the same held-out prompts as ``fit``.

    Args:
        preferences: the votes.
        features: raw features of ``texts_of(preferences)``, in that order, ``(n_texts, d)``; those of a town hall are
            what decides its votes.
        **options: those of ``fit``; ``encoder`` and ``surface`` are ignored.

    Returns:
        The ensemble and the held-out votes with its rewards. It has no encoder: use ``ensemble.members.rewards`` on
        features.
    """
    chosen = with_changes(FitOptions(), {**options, "encoder": "none", "surface": False})
    if preferences.knows_raters:
        chosen = replace(chosen, level="policy")
    rows = preferences.test_mask(chosen.test_fraction, seed=chosen.seed)
    nothing, vectors = TextFeatures(encoder="none", surface=False), np.asarray(features, dtype=np.float32)
    data = LearningData(preferences, rows, vectors, nothing, chosen)
    with threadpool_limits(1 if len(preferences) < MANY_PAIRS else None, user_api="blas"):
        return fit_members(data)
