"""How much disagreement a prediction keeps: the share of the majority's side, observed and predicted."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray
from pluralign.core.random_streams import SIMULATED_MAJORITIES, random_stream
from pluralign.evaluation.groups import SIMULATIONS, simulated_shares
from pluralign.theory.reliability import by_stratum

SIMULATED_PAIRS = 1_000_000


@dataclass(frozen=True)
class MajorityShare:
    """The size of the majority on pairs where people split in one way: observed and predicted."""

    pairs: int
    people: float
    """Mean observed share of the majority's side."""
    predicted: float
    """Mean predicted share of that side. NaN for even pairs, which have no majority."""
    expected: float
    """The value of ``predicted`` for a calibrated prediction: its mean over simulated votes that split this way."""
    certain: float
    """Share of the pairs with more than .9 predicted for one side."""


def majority_shares(
    prob_hat: FloatArray, prob_a: FloatArray, n_votes: npt.NDArray[np.int64], *, seed: int = 0
) -> dict[str, MajorityShare]:
    """Return the observed and predicted share of the majority's side for each of ``reliability.strata``.

    Majorities estimated from few votes look larger than they are, so even a calibrated prediction gives unanimous
    pairs less than 1. ``expected`` is the same figure for votes drawn from the prediction.

    Example:
        >>> shares = majority_shares(np.array([.95, .95]), np.array([.6, .4]), np.array([5, 5]))
        >>> shares["contested"].people, shares["contested"].predicted, shares["contested"].certain
        (0.6, 0.5, 1.0)
    """
    random = random_stream(seed, SIMULATED_MAJORITIES)
    times = int(np.clip(SIMULATED_PAIRS // len(prob_hat), 1, SIMULATIONS))
    drawn = np.concatenate([simulated_shares(prob_hat, n_votes, random) for _ in range(times)])
    were_right = by_stratum(_towards_majority(np.tile(prob_hat, times), drawn), drawn)
    predicted = by_stratum(_towards_majority(prob_hat, prob_a), prob_a)
    people = by_stratum(np.maximum(prob_a, 1 - prob_a), prob_a)
    certain = by_stratum((np.maximum(prob_hat, 1 - prob_hat) > 0.9).astype(float), prob_a)
    return {
        name: MajorityShare(count, mean, predicted[name][1], were_right[name][1], certain[name][1])
        for name, (count, mean) in people.items()
    }


def _towards_majority(prob_hat: FloatArray, prob_a: FloatArray) -> FloatArray:
    return np.where(prob_a == 0.5, np.nan, np.where(prob_a > 0.5, prob_hat, 1 - prob_hat))


def certain_though_contested(shares: Mapping[str, MajorityShare]) -> float:
    """Return the share of contested or even pairs with more than .9 predicted for one side.

    Example:
        >>> some, none = MajorityShare(3, .6, .9, .7, 1.0), MajorityShare(1, .5, .5, .5, 0.0)
        >>> certain_though_contested({"contested": some, "even": none})
        0.75
    """
    parts = [shares[name] for name in ("contested", "even") if shares[name].pairs]
    total = sum(part.pairs for part in parts)
    return sum(part.pairs * part.certain for part in parts) / total if total else float("nan")
