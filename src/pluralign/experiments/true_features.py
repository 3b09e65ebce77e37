"""Fits on given features of a town hall, such as the features that decide its votes.

They show what members learn when features see everything that divides people. Real votes have no such features: the
ensemble has no encoder and cannot score texts.
"""

from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from pluralign.core.arrays import Array
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.options import with_changes
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.features.frozen import TextFeatures
from pluralign.fitting.frozen import learn
from pluralign.fitting.rater_fit import rater_options
from pluralign.fitting.task import MANY_PAIRS, FitWatcher
from pluralign.training.options import FinetuneOptions, FitOptions
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.raters import RaterVotes
from pluralign.votes.town_hall.townhall import TownHall


def fit_true_features(
    town: TownHall, raters: RaterVotes | None = None, **options: Any
) -> tuple[RewardEnsemble, HeldOutVotes]:
    """Fit an ensemble on the true features of a town hall; ``options`` are those of ``fit``.

    Example:
        >>> from pluralign import town_hall
        >>> ensemble, held_out = fit_true_features(town_hall(400), k=2)
        >>> ensemble.members.theta.shape
        (18, 2)
    """
    return fit_features(town.preferences, town.features, raters, **options)


def fit_features(
    preferences: PreferenceSet, features: Array, raters: RaterVotes | None = None, **options: Any
) -> tuple[RewardEnsemble, HeldOutVotes]:
    """Fit an ensemble on given features, with the same training and the same held-out prompts as ``fit``.

    Args:
        preferences: the votes.
        features: raw features of ``texts_of(preferences)``, in that order, ``(n_texts, d)``.
        raters: the same votes with their raters, to fit members to raters.
        **options: those of ``fit``; ``encoder`` and ``surface`` are ignored.

    Returns:
        The ensemble and the held-out votes with its rewards. It has no encoder: use ``ensemble.members.rewards`` on
        features.
    """
    chosen = with_changes(FitOptions(), {**options, "encoder": "none", "surface": False})
    if raters is not None:
        chosen = rater_options(chosen, FinetuneOptions())
    rows = preferences.test_mask(chosen.test_fraction, seed=chosen.seed)
    nothing, vectors = TextFeatures(encoder="none", surface=False), np.asarray(features, dtype=np.float32)
    with threadpool_limits(1 if len(preferences) < MANY_PAIRS else None, user_api="blas"):
        return learn(preferences, rows, vectors, nothing, chosen, Checkpoints(None, {}), FitWatcher(), raters)
