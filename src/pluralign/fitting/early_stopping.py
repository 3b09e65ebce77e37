"""Early stopping over the stages of a fine-tuned ensemble, on the validation prompts (§4).

Each stage is a training of its own, so the sizes are not all trained and compared afterwards, as on frozen features.
Training stops when the validation error has not improved for ``PATIENCE`` stages. The size is then chosen among the
trained ones as on frozen features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pluralign.core.arrays import Array, IndexArray, Mask
from pluralign.fitting.selection import choose_size, validation_brier
from pluralign.fitting.task import AUTO_SIZES, Members
from pluralign.training.pairs import Pairs
from pluralign.training.stagewise import solve_weights
from pluralign.votes.preferences import PreferenceSet

MOST_STAGES = AUTO_SIZES[-1]
"""Number of stages after which training stops in any case."""
PATIENCE = 2
"""Stages without a lower validation error after which training stops. A member can help only together with the next
one, because all weights are solved again after each stage: one stage without a gain is no reason to stop."""


@dataclass(frozen=True)
class ChosenSize:
    """The number of members kept, and why training stopped."""

    k: int
    stages: int
    """Number of trained members."""
    stopped: str
    """Why no further stage was trained, with the validation Brier score of each size."""


@dataclass(frozen=True, eq=False)
class StageValidation:
    """The votes that decide how many stages are trained. No test vote is read."""

    votes: PreferenceSet
    a: IndexArray
    """Index of response a among the texts, ``(n_pairs,)``."""
    b: IndexArray
    """Index of response b among the texts, ``(n_pairs,)``."""
    learned: Mask
    """Pairs that the members are trained on."""
    validation: Mask
    """Pairs of the validation prompts."""

    def enough(self, outputs: Array) -> bool:
        """Return whether the last ``PATIENCE`` stages brought no lower validation error.

        Args:
            outputs: rewards of the members so far for every text, ``(n_texts, stages)``.
        """
        return stopped_improving(self._errors(outputs))

    def choose(self, outputs: Array) -> ChosenSize:
        """Return the smallest size whose validation error is within one standard error of the best."""
        sizes, check = self._sizes(outputs)
        errors, stages = self._errors(outputs), len(sizes)
        reason = (
            f"the validation Brier score has not improved for {PATIENCE} stages"
            if stopped_improving(errors)
            else f"{stages} stages are the most that --k auto trains"
        )
        scores = ", ".join(f"{error:.4f}" for error in errors)
        return ChosenSize(choose_size(dict(enumerate(sizes, 1)), check, "vote"), stages, f"{reason}: {scores}")

    def _errors(self, outputs: Array) -> list[float]:
        sizes, check = self._sizes(outputs)
        return [validation_brier(members, check, "vote") for members in sizes]

    def _sizes(self, outputs: Array) -> tuple[list[Members], Pairs]:
        """Return the ensemble of every size, weighted without the validation pairs, and the validation pairs."""
        pairs = Pairs(outputs, self.a, self.b, self.votes.prob_a, self.votes.prompt_index)
        return stage_members(pairs[self.learned]), pairs[self.validation]


def stage_members(pairs: Pairs) -> list[Members]:
    """Return the ensemble after each stage. Each input of ``pairs`` is the reward of one member."""
    axes = np.eye(pairs.inputs.shape[1])
    difference, prob_a = pairs.difference, pairs.prob_a
    return [Members(axes[:, :j], solve_weights(difference, axes[:, :j], prob_a)[0]) for j in range(1, len(axes) + 1)]


def stopped_improving(errors: Sequence[float]) -> bool:
    """Return whether the lowest error is at least ``PATIENCE`` stages old. An equal error is no improvement.

    Example:
        >>> stopped_improving([0.3, 0.1, 0.2]), stopped_improving([0.3, 0.1, 0.2, 0.1])
        (False, True)
    """
    return len(errors) - 1 - int(np.argmin(errors)) >= PATIENCE
