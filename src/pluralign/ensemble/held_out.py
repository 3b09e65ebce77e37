"""Held-out votes of a fit with the rewards of their texts.

``fit`` saves them in the folder of the ensemble. Reports, certificates and pruning read them: everything that is said
about an ensemble later is measured on prompts it was not trained on, and no text has to be encoded again.
"""

import os
from dataclasses import dataclass, field, replace
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
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.training_prompts import LeftOut, without_training_prompts
from pluralign.theory import calibration
from pluralign.votes.preferences import PreferenceSet, texts_of

VOTES_FILE, REWARDS_FILE = "held_out.parquet", "held_out.safetensors"


@dataclass(frozen=True, eq=False)
class HeldOutVotes:
    """Votes, and the members' rewards of the texts."""

    preferences: PreferenceSet
    rewards: FloatArray
    """One row per distinct text, ``(n_items, k)``, in the order of ``texts_of(preferences)``."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Pairs of the data that are not among ``preferences``, because the ensemble was trained on their prompts."""

    @cached_property
    def difference(self) -> FloatArray:
        """reward_a − reward_b, ``(n_pairs, k)``."""
        items = self.preferences.items()
        return self.rewards[items.a] - self.rewards[items.b]

    @cached_property
    def votes(self) -> FloatArray:
        """The members' votes, ``(n_pairs, k)``: ½ for a tie."""
        return calibration.votes_from_rewards(self.difference, np.zeros_like(self.difference))

    def prob_hat(self, ensemble: RewardEnsemble) -> FloatArray:
        """Return the predicted shares at the level the ensemble was fitted for, ``(n_pairs,)``."""
        return ensemble.readings(self.difference)[ensemble.level]

    def __getitem__(self, rows: npt.ArrayLike) -> "HeldOutVotes":
        """Return the pairs at ``rows`` (indices or a mask) with the rewards of their texts."""
        preferences, whole = self.preferences[rows], self.preferences.items()
        items, pick = preferences.items(), np.asarray(rows)
        rewards = np.empty((len(items.prompt_index), self.rewards.shape[1]))
        rewards[items.a], rewards[items.b] = self.rewards[whole.a[pick]], self.rewards[whole.b[pick]]
        return replace(self, preferences=preferences, rewards=rewards)

    def take(self, members: npt.ArrayLike) -> "HeldOutVotes":
        """Return the same votes with the rewards of some members."""
        return replace(self, rewards=self.rewards[:, np.asarray(members, dtype=np.int64)])


def score_held_out(
    ensemble: RewardEnsemble,
    preferences: PreferenceSet,
    progress: Progress | None = None,
    *,
    all_prompts: bool = False,
) -> HeldOutVotes:
    """Score the texts of votes with an ensemble, without the prompts it was trained on.

    With ``all_prompts`` nothing is left out; then figures on these votes can be too good.
    """
    measured, left_out = without_training_prompts(preferences, ensemble.trained_on, all_prompts=all_prompts)
    return HeldOutVotes(measured, ensemble.rewards(texts_of(measured), progress), left_out)


def save_held_out(held_out: HeldOutVotes, folder: str | os.PathLike[str]) -> None:
    """Write held-out votes and rewards into the folder of an ensemble."""
    folder = Path(folder)
    held_out.preferences.save(folder / VOTES_FILE)
    rewards = np.ascontiguousarray(held_out.rewards, dtype=np.float64)
    with atomic_write(folder / REWARDS_FILE) as partial:
        metadata = {"votes": held_out.preferences.fingerprint}
        partial.write_bytes(safetensors.numpy.save({"rewards": rewards}, metadata=metadata))


def remove_held_out(folder: str | os.PathLike[str]) -> None:
    """Remove the held-out votes of an earlier fit from a folder."""
    for name in (VOTES_FILE, REWARDS_FILE):
        (Path(folder) / name).unlink(missing_ok=True)


def load_held_out(folder: str | os.PathLike[str]) -> HeldOutVotes:
    """Read the held-out votes that ``fit`` saved in the folder of an ensemble."""
    folder = Path(folder)
    remedy = "give votes that it was not trained on, or fit again"
    for name in (VOTES_FILE, REWARDS_FILE):
        if not (folder / name).is_file():
            raise DataError(f"it has no held-out votes ({name} is missing)", file=str(folder), remedy=remedy)
    preferences = PreferenceSet.load(folder / VOTES_FILE)
    try:
        with safetensors.safe_open(folder / REWARDS_FILE, framework="numpy") as file:
            fingerprint, rewards = (file.metadata() or {}).get("votes"), file.get_tensor("rewards")
    except safetensors.SafetensorError:
        raise DataError("it is damaged", file=str(folder / REWARDS_FILE), remedy=remedy) from None
    if fingerprint != preferences.fingerprint or len(rewards) != len(preferences.items().prompt_index):
        raise DataError(f"{VOTES_FILE} and {REWARDS_FILE} do not belong together", file=str(folder), remedy=remedy)
    return HeldOutVotes(preferences, np.asarray(rewards, dtype=np.float64))
