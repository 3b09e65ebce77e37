"""Pairs as learners see them: inputs of each distinct text once, and which two of them each pair compares."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import Array, FloatArray
from pluralign.core.distributed import ALONE, Processes
from pluralign.core.errors import DataError
from pluralign.training.differences import Differences, Matrix, differences

MIN_PROMPTS = 2
"""Fewer prompts cannot be split into those to learn from and those to choose by."""


@dataclass(frozen=True)
class Pairs:
    """Compared texts by what rewards are linear in."""

    inputs: Array
    """Of every distinct text, ``(n_items, d)``."""
    a: npt.NDArray[np.int32]
    """Item that is response a, ``(n,)``."""
    b: npt.NDArray[np.int32]
    """Item that is response b, ``(n,)``."""
    prob_a: FloatArray
    """Share of people choosing a, ``(n,)``."""
    prompt: npt.NDArray[np.int32]
    """Which prompt each pair belongs to, ``(n,)``."""
    processes: Processes = ALONE
    """Who learns from them together."""

    def __len__(self) -> int:
        return len(self.prob_a)

    @cached_property
    def difference(self) -> Matrix:
        """Inputs of response a less those of b, ``(n, d)``."""
        return differences(self.inputs, self.a, self.b, self.processes)

    def judge(self) -> Differences:
        """Return the pairs as what predicts shares takes them."""
        return Differences(self.inputs, self.a, self.b, processes=self.processes)

    def __getitem__(self, rows: npt.NDArray[Any]) -> "Pairs":
        """Return some of the pairs; inputs are shared."""
        return replace(self, a=self.a[rows], b=self.b[rows], prob_a=self.prob_a[rows], prompt=self.prompt[rows])


def validation_folds(prompt: npt.NDArray[np.int32], seed: int) -> list[npt.NDArray[np.bool_]]:
    """Return masks of pairs whose prompts are held out for choices, a fifth of the prompts each.

    Three folds where prompts abound, five where they are few and one fold says little.
    """
    names = np.unique(prompt)
    if len(names) < MIN_PROMPTS:
        raise DataError(
            f"there are {len(names)} prompts to learn from, and {MIN_PROMPTS} are needed",
            remedy="give votes on more prompts, so that some can be held out for choices",
        )
    order = np.random.default_rng([seed, 1]).permutation(names)
    n_folds = 3 if len(names) >= 200 else 5
    parts = np.array_split(order, 5)[: min(n_folds, len(names))]
    return [np.isin(prompt, part) for part in parts if len(part)]
