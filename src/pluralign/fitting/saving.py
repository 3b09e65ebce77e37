"""Shared by frozen and fine-tuned fits: which options decide a fit, what may be replaced, how a fit is saved."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pluralign.core.errors import DataError, UsageError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import ENSEMBLE_FILE
from pluralign.ensemble.held_out import HeldOutVotes, held_out_files
from pluralign.training.options import FitOptions
from pluralign.votes.preferences import PreferenceSet

NOT_DECISIVE = ("features", "keep_held_out", "folds")
"""Options of a fit that do not change its members."""
CHOSEN_LATER = ("precision", "learning_rate", "batch_size", "max_length")
"""Options whose recorded value may be another one than the one that was given."""


def decisive_options(options: FitOptions) -> dict[str, Any]:
    """Return the options that change what is learned. A killed fit resumes if only other options differ."""
    return {name: value for name, value in asdict(options).items() if name not in NOT_DECISIVE}


def refuse_to_replace(
    folder: str | os.PathLike[str] | None,
    preferences: PreferenceSet,
    options: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Raise UsageError if a folder holds an ensemble of other votes or options, so that none is lost by mistake.

    Args:
        folder: where a fit will be saved.
        preferences: the votes of the fit.
        options: all its decisive options by name, also those of fine-tuning, and whether it has ``raters``.
        overwrite: allow it.
    """
    if overwrite or folder is None or not (Path(folder) / ENSEMBLE_FILE).is_file():
        return
    remedy = "name another folder, or use --overwrite."
    try:
        record = RewardEnsemble.load(folder).record
    except DataError:
        raise UsageError(f"{folder} holds an ensemble that cannot be read: {remedy}") from None
    if record.data is None or record.data.fingerprint != preferences.fingerprint:
        raise UsageError(f"{folder} holds an ensemble of other votes: {remedy}")
    if record.pruned is not None:
        raise UsageError(f"{folder} holds a pruned ensemble: {remedy}")
    used = {**record.options, "backbone": None, **(record.tuning or {}), "raters": record.raters is not None}
    given = {name: value for name, value in options.items() if name not in CHOSEN_LATER}
    if changed := [name for name, value in given.items() if name in used and used[name] != value]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise UsageError(f"{folder} holds an ensemble that was fitted with other options ({names}): {remedy}")


def save_fit(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, folder: str | os.PathLike[str], *, keep_held_out: bool
) -> None:
    """Write an ensemble into a folder, with its held-out votes or without."""
    ensemble.save(folder, held_out_files(ensemble, held_out) if keep_held_out else None)
