"""The prompts that an ensemble was trained on, as hashes, so that nothing is measured on them by mistake.

Scores on training prompts are too good. ``fit`` saves a hash of every training prompt with the ensemble; every command
that measures an ensemble on other data leaves these prompts out, and reports how many.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import Mask
from pluralign.core.errors import DataError
from pluralign.core.text import counted
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt, PromptLike

PromptHashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class LeftOut:
    """The pairs of a data set that were left out because an ensemble was trained on their prompts."""

    pairs: int = 0
    prompts: int = 0
    known: bool = True
    """Whether the training prompts are known. Ensembles of version 0.1 did not record them; then nothing is left out.
    """
    measured: int = 0
    """Training prompts that were measured all the same, with ``all_prompts``. Scores are then too good."""

    @property
    def sentence(self) -> str:
        """What was left out, in words; empty if nothing was.

        Example:
            >>> LeftOut(1544, 80).sentence
            'Left out 80 prompts (1,544 pairs) that were used for training.'
        """
        if not self.known:
            return "Training prompts are unknown, so none are left out; scores on training prompts are too good."
        if self.measured:
            return f"{counted(self.measured, 'training prompt')} included: scores are too good."
        if not self.prompts:
            return ""
        pairs = f" ({counted(self.pairs, 'pair')})" if self.pairs else ""
        verb = "was" if self.prompts == 1 else "were"
        return f"Left out {counted(self.prompts, 'prompt')}{pairs} that {verb} used for training."


def hash_prompts(prompts: Iterable[PromptLike]) -> PromptHashes:
    """Return the sorted distinct hashes of prompts."""
    return np.unique(np.array([Prompt(prompt).identity for prompt in prompts], dtype=np.uint64))


def are_trained(prompts: Iterable[PromptLike], trained_on: PromptHashes) -> Mask:
    """Return which prompts are among the training prompts, ``(n_prompts,)``."""
    return np.isin(np.array([Prompt(prompt).identity for prompt in prompts], dtype=np.uint64), trained_on)


def pairs_to_measure(
    preferences: PreferenceSet, trained_on: Sequence[PromptHashes | None], *, all_prompts: bool = False
) -> tuple[Mask, LeftOut]:
    """Return which pairs have prompts that were not used for training, ``(n_pairs,)``, and the number of the others.

    Args:
        preferences: votes.
        trained_on: the training prompts of each ensemble to be measured, None where they are unknown.
        all_prompts: leave nothing out.

    Raises:
        DataError: every prompt was used for training.
    """
    known = [hashes for hashes in trained_on if hashes is not None]
    trained = are_trained(preferences.prompts, np.concatenate([*known, np.empty(0, dtype=np.uint64)]))
    rows = trained[preferences.prompt_index]
    if all_prompts or not known:
        included = LeftOut(known=len(known) == len(trained_on), measured=int(trained.sum()))
        return np.ones(len(preferences), dtype=bool), included
    if rows.all():
        raise DataError(
            f"all {counted(len(preferences.prompts), 'prompt')} were used for training, so scores would be too good",
            file=preferences.name,
            remedy="give votes on other prompts, or use --all to measure on training prompts",
        )
    return ~rows, LeftOut(int(rows.sum()), int(trained.sum()), known=len(known) == len(trained_on))


def without_training_prompts(
    preferences: PreferenceSet, trained_on: PromptHashes | None, *, all_prompts: bool = False
) -> tuple[PreferenceSet, LeftOut]:
    """Return the pairs whose prompts one ensemble was not trained on. Arguments as for ``pairs_to_measure``."""
    measured, left_out = pairs_to_measure(preferences, [trained_on], all_prompts=all_prompts)
    return (preferences[measured] if left_out.pairs else preferences), left_out
