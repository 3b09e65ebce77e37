"""Held-out votes beside the rewards that an ensemble gave their texts: what reports, certificates and pruning rest on.

``fit`` keeps them in the ensemble's folder, so that everything said of an ensemble later is measured on prompts it did
not learn from, without encoding a text again. Decided here: their form on disk.
"""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError
from pluralign.core.files import atomic_write
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble, texts_of
from pluralign.theory import calibration
from pluralign.votes.preferences import PreferenceSet

VOTES_FILE, REWARDS_FILE = "held_out.parquet", "held_out.safetensors"


@dataclass(frozen=True, eq=False)
class HeldOutVotes:
    """Votes, and what the members make of the texts voted on."""

    preferences: PreferenceSet
    rewards: FloatArray
    """Of each distinct text, ``(n_items, k)``, in the order of ``texts_of(preferences)``."""

    @cached_property
    def difference(self) -> FloatArray:
        """Reward of response a less that of b, ``(n_pairs, k)``."""
        items = self.preferences.items()
        return self.rewards[items.a] - self.rewards[items.b]

    @cached_property
    def votes(self) -> FloatArray:
        """Votes of the members, ½ for a tie, ``(n_pairs, k)``."""
        return calibration.votes_from_rewards(self.difference, np.zeros_like(self.difference))

    def prob_hat(self, ensemble: RewardEnsemble) -> FloatArray:
        """Return the share that the ensemble predicts, read at the level it was fitted for, ``(n_pairs,)``."""
        return ensemble.readings(self.difference)[ensemble.level]

    def __getitem__(self, rows: npt.ArrayLike) -> "HeldOutVotes":
        """Return the pairs at ``rows`` (indices or a mask) with the rewards of their texts."""
        preferences, whole = self.preferences[rows], self.preferences.items()
        items, pick = preferences.items(), np.asarray(rows)
        rewards = np.empty((len(items.prompt_index), self.rewards.shape[1]))
        rewards[items.a], rewards[items.b] = self.rewards[whole.a[pick]], self.rewards[whole.b[pick]]
        return HeldOutVotes(preferences, rewards)

    def take(self, members: npt.ArrayLike) -> "HeldOutVotes":
        """Return the same votes with the rewards of some members."""
        return replace(self, rewards=self.rewards[:, np.asarray(members, dtype=np.int64)])


def score_held_out(
    ensemble: RewardEnsemble, preferences: PreferenceSet, progress: Progress | None = None
) -> HeldOutVotes:
    """Return votes with an ensemble's rewards. Give votes it has not learned from: figures on others flatter it."""
    return HeldOutVotes(preferences, ensemble.rewards(texts_of(preferences), progress))


def save_held_out(evidence: HeldOutVotes, folder: str | os.PathLike[str]) -> None:
    """Write votes and rewards into an ensemble's folder."""
    folder = Path(folder)
    evidence.preferences.save(folder / VOTES_FILE)
    rewards = np.ascontiguousarray(evidence.rewards, dtype=np.float64)
    with atomic_write(folder / REWARDS_FILE) as partial:
        metadata = {"votes": evidence.preferences.fingerprint}
        partial.write_bytes(safetensors.numpy.save({"rewards": rewards}, metadata=metadata))


def remove_held_out(folder: str | os.PathLike[str]) -> None:
    """Remove what an earlier fit kept in a folder."""
    for name in (VOTES_FILE, REWARDS_FILE):
        (Path(folder) / name).unlink(missing_ok=True)


def load_held_out(folder: str | os.PathLike[str]) -> HeldOutVotes:
    """Read the held-out votes that ``fit`` kept in an ensemble's folder."""
    folder = Path(folder)
    remedy = "name votes that it did not learn from, or fit again"
    for name in (VOTES_FILE, REWARDS_FILE):
        if not (folder / name).is_file():
            raise DataError(f"no held-out votes were kept in it ({name} is missing)", file=str(folder), remedy=remedy)
    preferences = PreferenceSet.load(folder / VOTES_FILE)
    try:
        with safetensors.safe_open(folder / REWARDS_FILE, framework="numpy") as file:
            fingerprint, rewards = (file.metadata() or {}).get("votes"), file.get_tensor("rewards")
    except safetensors.SafetensorError:
        raise DataError("it cannot be read", file=str(folder / REWARDS_FILE), remedy=remedy) from None
    if fingerprint != preferences.fingerprint or len(rewards) != len(preferences.items().prompt_index):
        raise DataError(f"{VOTES_FILE} and {REWARDS_FILE} do not belong together", file=str(folder), remedy=remedy)
    return HeldOutVotes(preferences, np.asarray(rewards, dtype=np.float64))
