"""Held-out votes of a fit with the rewards of their texts.

``fit`` saves them in the folder of the ensemble. Reports, certificates and pruning read them: everything that is said
about an ensemble later is measured on prompts it was not trained on, and no text has to be encoded again.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, UsageError
from pluralign.core.types import Progress
from pluralign.ensemble import folder as disk
from pluralign.ensemble.ensemble import RewardEnsemble, as_ensemble
from pluralign.ensemble.folder import REMEDY, REWARDS_FILE, VOTES_FILE
from pluralign.ensemble.record import LeftOut, pairs_to_measure
from pluralign.text.reference import with_log_probs
from pluralign.theory import calibration
from pluralign.votes.load import VotesLike, as_preferences
from pluralign.votes.preferences import PreferenceSet, texts_of


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
        return ensemble.readings(self.difference, ensemble.log_ratio(self.preferences))[ensemble.level]

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
    ensemble: RewardEnsemble, preferences: PreferenceSet, progress: Progress | None = None, *, all_prompts: bool = False
) -> HeldOutVotes:
    """Score the texts of votes with an ensemble, without the prompts it was trained on.

    With ``all_prompts`` nothing is left out; then figures on these votes can be too good.
    """
    rows, left_out = pairs_to_measure(preferences, [ensemble.trained_on], all_prompts=all_prompts)
    measured = preferences[rows] if left_out.pairs else preferences
    if ensemble.reference is not None:
        measured = with_log_probs(ensemble.reference, measured, progress)
    return HeldOutVotes(measured, ensemble.rewards(texts_of(measured), progress), left_out)


def held_out_votes(
    ensemble: RewardEnsemble | str | os.PathLike[str],
    votes: HeldOutVotes | VotesLike | None = None,
    *,
    progress: Progress | None = None,
) -> tuple[RewardEnsemble, HeldOutVotes]:
    """Return an ensemble and the votes to measure it on.

    Args:
        ensemble: the ensemble, or its folder.
        votes: votes of any kind, which the ensemble scores (``score_held_out``), or scored ones (default: those that
            ``fit`` saved in the folder).
        progress: called with the texts encoded and the total.

    Raises:
        UsageError: there are no votes.
        DataError: scored votes are of another ensemble.
    """
    loaded = as_ensemble(ensemble)
    if votes is None and not isinstance(ensemble, RewardEnsemble):
        return loaded, load_held_out(ensemble, loaded)
    if votes is None:
        raise UsageError("give votes, or the folder of an ensemble: it holds the held-out votes of the fit.")
    if not isinstance(votes, HeldOutVotes):
        return loaded, score_held_out(loaded, as_preferences(votes), progress)
    if votes.rewards.shape[1] != loaded.k:
        problem = f"the held-out rewards are of {votes.rewards.shape[1]} members, but the ensemble has {loaded.k}"
        raise DataError(problem, remedy="name votes with --data, or fit again")
    return loaded, votes


def held_out_files(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> dict[str, bytes]:
    """Return the contents of the files to save with an ensemble, by name. The rewards carry its hash.

    Judgments are saved unlinked: nobody can be followed from prompt to prompt.
    """
    rewards, votes = np.ascontiguousarray(held_out.rewards, dtype=np.float64), held_out.preferences
    if votes.judgments is not None:
        votes = replace(votes, judgments=votes.judgments.unlinked())
    of = {"votes": votes.fingerprint, "ensemble": ensemble.identity}
    return {
        VOTES_FILE: votes.parquet_bytes(),
        REWARDS_FILE: safetensors.numpy.save({"rewards": rewards}, metadata={"of": json.dumps(of)}),
    }


def has_held_out(folder: str | os.PathLike[str]) -> bool:
    """Return whether the folder of an ensemble holds held-out votes."""
    folder = Path(folder)
    return REWARDS_FILE in disk.read_description(folder)["files"]


def load_held_out(folder: str | os.PathLike[str], ensemble: RewardEnsemble | None = None) -> HeldOutVotes:
    """Read the held-out votes that ``fit`` saved in the folder of an ensemble.

    Args:
        folder: the folder of the ensemble.
        ensemble: the ensemble, if it was read already.

    Raises:
        DataError: there are none, a file is damaged, or they are of another ensemble.
    """
    folder = Path(folder)

    def read(description: Mapping[str, Any]) -> HeldOutVotes:
        return _read_held_out(folder, description, ensemble or RewardEnsemble.load(folder))

    return disk.read_consistently(folder, read)


def _read_held_out(folder: Path, description: Mapping[str, Any], ensemble: RewardEnsemble) -> HeldOutVotes:
    contents, paths = {}, {}
    for name in (VOTES_FILE, REWARDS_FILE):
        entry = description["files"].get(name)
        if entry is None:
            remedy = "give votes that it was not trained on, or fit again"
            raise DataError(f"it has no held-out votes ({name} is missing)", file=str(folder), remedy=remedy)
        contents[name], paths[name] = disk.read_file(folder, entry), folder / entry["file"]
    with disk.readable(paths[VOTES_FILE]):
        preferences = PreferenceSet.load(paths[VOTES_FILE])
    with disk.readable(paths[REWARDS_FILE]):
        data = contents[REWARDS_FILE]
        # Metadata is in the JSON header after its length in 8 bytes. It is one entry: safetensors writes several in
        # random order.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        of = dict(json.loads(header["__metadata__"]["of"]))
        rewards = safetensors.numpy.load(data)["rewards"]
    belongs = of.get("votes") == preferences.fingerprint
    if not belongs or rewards.shape[:1] != preferences.items().prompt_index.shape:
        raise DataError(f"{VOTES_FILE} and {REWARDS_FILE} do not belong together", file=str(folder), remedy=REMEDY)
    if of.get("ensemble") != ensemble.identity or rewards.shape[1:] != (ensemble.k,):
        raise DataError("its held-out rewards are those of another ensemble", file=str(folder), remedy=REMEDY)
    if not np.isfinite(rewards).all():
        raise DataError("rewards must be finite", file=str(paths[REWARDS_FILE]), remedy=REMEDY)
    return HeldOutVotes(preferences, np.asarray(rewards, dtype=np.float64))
