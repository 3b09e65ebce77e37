"""Predictors of vote shares: an ensemble, or rewards that were trained elsewhere, with their predictions for pairs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray
from pluralign.core.random_streams import EVALUATION_FOLDS, random_stream
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.models.judge import JudgeUsage
from pluralign.theory import calibration
from pluralign.votes.preferences import PreferenceSet

Kind: TypeAlias = Literal["ensemble", "reward model", "scores", "probabilities", "personas"]

FOLDS = 5
TEMPERATURES = np.geomspace(1 / 64, 64, 97)
"""Temperatures to try, in units of the root mean square difference of rewards."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """A predictor of vote shares, with its predictions for the pairs of one data set."""

    name: str
    kind: Kind
    readings: Mapping[str, FloatArray]
    """Predicted shares preferring a, each ``(n_pairs,)``: ``vote``, ``policy`` and ``tempered``, or ``prob``."""
    level: str
    """The reading that its main figures measure."""
    difference: FloatArray | None = None
    """reward_a − reward_b of each member, ``(n_pairs, k)``. None for files of probabilities."""
    weights: FloatArray | None = None
    """Of the members, ``(k,)``."""
    undecided: float = 0.0
    """u, the share of votes that no member explains."""
    temperature: float | None = None
    """β of an ensemble's policy-level reading, or T of the tempered reading of another reward model."""
    note: str = ""
    """A remark on how its rewards were read, for people."""
    usage: JudgeUsage | None = None
    """Calls and tokens of a language model that judges as personas."""
    personas: tuple[str, ...] = ()
    """Descriptions of the members, if they are personas."""

    @property
    def k(self) -> int:
        """Number of rewards. A file of probabilities counts as one."""
        return 1 if self.weights is None else len(self.weights)

    @property
    def prob_hat(self) -> FloatArray:
        """The predicted shares that its main figures measure, ``(n_pairs,)``."""
        return self.readings[self.level]

    @property
    def votes(self) -> FloatArray | None:
        """The members' votes, ``(n_pairs, k)``. None for files of probabilities."""
        if self.difference is None:
            return None
        return calibration.votes_from_rewards(self.difference, np.zeros_like(self.difference))


def ensemble_predictor(
    ensemble: RewardEnsemble, reward_a: FloatArray, reward_b: FloatArray, name: str = "ensemble"
) -> Predictor:
    """Return an ensemble as a predictor, from the rewards of both responses of each pair, ``(n_pairs, k)``."""
    difference = reward_a - reward_b
    return Predictor(
        name=name,
        kind="ensemble",
        readings={str(level): share for level, share in ensemble.readings(difference).items()},
        level=ensemble.level,
        difference=difference,
        weights=ensemble.weights,
        undecided=ensemble.undecided,
        temperature=ensemble.temperature,
    )


def reward_predictor(
    name: str,
    kind: Kind,
    difference: FloatArray,
    weights: FloatArray,
    preferences: PreferenceSet,
    seed: int = 0,
    note: str = "",
    undecided: float = 0.0,
) -> Predictor:
    """Return rewards that were trained elsewhere as a predictor with three readings.

    ``vote``: Σ_j α_j 1[Δr_j > 0]. ``policy``: Σ_j α_j σ(Δr_j), App. A at β = 1, the model of a Bradley–Terry
    reward. ``tempered``: Σ_j α_j σ(Δr_j / T), see ``cross_fitted``. An undecided share u turns each into
    u/2 + (1 − u) times it. The main reading of one reward is σ(Δr), that of several is the share of their votes.
    """
    votes = calibration.votes_from_rewards(difference, np.zeros_like(difference))
    readings = {
        "vote": calibration.with_undecided(calibration.ensemble_prob(votes, weights), undecided),
        "policy": calibration.with_undecided(calibration.policy_prob(difference, weights, 1.0), undecided),
    }
    temperature = None
    if len(preferences.prompts) > 1:
        readings["tempered"], temperature = cross_fitted(
            difference, weights, preferences.prob_a, preferences.prompt_index, seed, undecided
        )
    level = "policy" if len(weights) == 1 else "vote"
    return Predictor(name, kind, readings, level, difference, weights, undecided, temperature, note)


def cross_fitted(
    difference: FloatArray,
    weights: FloatArray,
    prob_a: FloatArray,
    prompt_index: npt.NDArray[np.integer[Any]],
    seed: int = 0,
    undecided: float = 0.0,
) -> tuple[FloatArray, float]:
    """Return p̂(T) = u/2 + (1 − u) Σ_j α_j σ(Δr_j / T) with T chosen on prompts other than those it is applied to.

    Prompts are split into five folds. For each fold, T minimises the Brier score on the other four,

      T_f = argmin_T mean over pairs outside f of (p̂(T) − p)²,

    over a grid around the typical |Δr|.

    Returns:
        The shares, ``(n_pairs,)``, and the median of the temperatures.

    Example:
        >>> difference = np.array([[4.0], [4.0], [-4.0], [-4.0]])
        >>> shares, temperature = cross_fitted(difference, np.ones(1), np.array([.75, .75, .25, .25]), np.arange(4))
        >>> shares.round(1)
        array([0.7, 0.7, 0.3, 0.3])
    """
    spread = float(np.sqrt(np.mean(difference**2))) or 1.0
    temperatures = TEMPERATURES * spread
    prompts = np.unique(prompt_index)
    parts = np.array_split(random_stream(seed, EVALUATION_FOLDS).permutation(prompts), min(FOLDS, len(prompts)))
    held_out = [np.isin(prompt_index, part) for part in parts]
    sums = np.empty((len(temperatures), len(parts)))

    def share(rows: FloatArray, temperature: float) -> FloatArray:
        return calibration.with_undecided(calibration.policy_prob(rows, weights, temperature), undecided)

    for row, temperature in enumerate(temperatures):
        error = calibration.squared_error(share(difference, temperature), prob_a)
        sums[row] = [error[mask].sum() for mask in held_out]
    chosen = temperatures[np.argmin(sums.sum(axis=1, keepdims=True) - sums, axis=0)]
    shares = np.empty(len(prob_a))
    for mask, temperature in zip(held_out, chosen, strict=True):
        shares[mask] = share(difference[mask], temperature)
    return shares, float(np.median(chosen))


# --- files ------------------------------------------------------------------------------------------------------------
