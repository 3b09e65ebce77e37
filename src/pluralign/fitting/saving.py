"""Shared by frozen and fine-tuned fits: which pairs are held out, which options decide a fit, how it is saved."""

import os
from dataclasses import asdict
from typing import Any

from pluralign.core.arrays import Mask
from pluralign.core.errors import DataError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes, remove_held_out, save_held_out
from pluralign.training.options import FitOptions
from pluralign.votes.preferences import PreferenceSet

SECOND_SPLIT = 1_000_003
"""Added to the seed to split votes that are one side of a split already."""


def held_out_rows(preferences: PreferenceSet, options: FitOptions) -> Mask:
    """Return the test pairs of a fit: those on the test side of ``preferences.split``.

    So ``votes.split()`` gives prompts that ``fit(votes)`` was not trained on. If the votes are the training side of
    such a split, none is on its test side; then a second hash holds out a part of them.
    """
    try:
        return preferences.test_mask(options.test_fraction, seed=options.seed)
    except DataError:
        return preferences.test_mask(options.test_fraction, seed=options.seed + SECOND_SPLIT)


def decisive_options(options: FitOptions) -> dict[str, Any]:
    """Return the options that change what is learned. A killed fit resumes if only other options differ."""
    return {name: value for name, value in asdict(options).items() if name not in ("features", "keep_held_out")}


def save_fit(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, folder: str | os.PathLike[str], *, keep_held_out: bool
) -> None:
    """Write an ensemble into a folder, with its held-out votes or without."""
    if keep_held_out:
        save_held_out(held_out, folder)
    else:
        remove_held_out(folder)
    ensemble.save(folder)
