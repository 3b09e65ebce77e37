"""Calibration within groups of pairs, the worst group, and the worst of random groups (adversarial groups).

A good average can hide a group that is predicted badly. Results do not depend on the order of the two responses.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from pluralign.core.arrays import FloatArray
from pluralign.core.random_streams import PROMPT_SUBSETS, SIMULATED_VOTES, random_stream
from pluralign.evaluation.groupings import group_labels, pair_lengths
from pluralign.theory import calibration
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval, clustered_interval
from pluralign.theory.reliability import expected_calibration_error
from pluralign.votes.preferences import PreferenceSet

FRACTIONS = (0.05, 0.1, 0.2, 0.5, 1.0)
SUBSETS = 200
SUBSETS_AT_ONCE = 50
SIMULATIONS = 20
BINS = 10


# --- grouping ---------------------------------------------------------------------------------------------------------


# --- calibration within groups ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Figures of one group of pairs."""

    name: str
    pairs: int
    prompts: int
    brier: float
    brier_corrected: float
    interval: Interval
    """95 % interval over prompts of the corrected Brier score (of the plain one if all pairs have one vote)."""
    residual: Interval
    """Mean p̂ − p for the longer response in groups of length, for the predicted majority in others."""
    calibration_error: float


@dataclass(frozen=True)
class WorstGroup:
    """The group with the highest corrected Brier score, with an interval that allows for the selection."""

    grouping: str
    name: str
    brier_corrected: float
    interval: Interval
    """At level 1 − .05/groups, so that the intervals of all groups hold together with 95 % (Bonferroni)."""
    groups: int
    """Number of groups with enough prompts to be selected."""


def judge_groups(
    prob_hat: FloatArray, preferences: PreferenceSet, groupings: Sequence[str], *, seed: int = 0
) -> tuple[dict[str, list[Group]], WorstGroup | None]:
    """Return the calibration within each group of each grouping, and the worst group.

    The residual is mean s·(p̂ − p), with s = ±1 the side of the longer response (``length``) or of the predicted
    majority (all other groupings, where a positive residual means overconfidence). A pair without such a side counts
    0, the mean over its two orders.
    """
    p, n, ties = preferences.prob_a, preferences.n_votes, preferences.counted_ties
    error = calibration.squared_error(prob_hat, p)
    corrected = error - calibration.sampling_noise(p, n, ties)
    found: dict[str, list[Group]] = {}
    candidates: list[tuple[float, str, str, FloatArray, npt.NDArray[Any]]] = []
    for grouping in dict.fromkeys(groupings):
        labels = group_labels(grouping, preferences, seed=seed)
        side = np.sign(np.subtract(*pair_lengths(preferences))) if grouping == "length" else np.sign(prob_hat - 0.5)
        found[grouping] = []
        for name in sorted(set(labels.tolist()), key=lambda label: (label in ("other", "missing"), _order(label))):
            rows = np.flatnonzero(labels == name)
            prompt = preferences.prompt_index[rows]
            values = corrected[rows] if not np.isnan(corrected[rows]).all() else error[rows]
            group = Group(
                name=name,
                pairs=len(rows),
                prompts=len(np.unique(prompt)),
                brier=float(error[rows].mean()),
                brier_corrected=calibration.brier_corrected(prob_hat[rows], p[rows], n[rows], ties[rows]),
                interval=clustered_interval(values, prompt, seed=seed, min_clusters=ENOUGH_CLUSTERS),
                residual=clustered_interval(
                    side[rows] * (prob_hat - p)[rows], prompt, seed=seed, min_clusters=ENOUGH_CLUSTERS
                ),
                calibration_error=expected_calibration_error(prob_hat[rows], p[rows]),
            )
            found[grouping].append(group)
            if group.prompts >= ENOUGH_CLUSTERS:
                candidates.append((group.interval.mean, grouping, name, values, prompt))
    if not candidates:
        return found, None
    height, grouping, name, values, prompt = max(candidates, key=lambda candidate: candidate[0])
    m = len(candidates)
    interval = clustered_interval(values, prompt, level=1 - 0.05 / m, n_resamples=max(2000, 800 * m))
    return found, WorstGroup(grouping, name, height, interval, m)


def _order(label: str) -> tuple[float, str]:
    """Return a sort key: numbers by size, then words."""
    number = re.match(r"-?\d+(\.\d+)?(e[+-]?\d+)?", label)
    return (float(number[0]) if number else np.inf, label)


# --- adversarial groups -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdversarialGroup:
    """The worst calibration error among random groups of one size, and the value expected from noise alone."""

    fraction: float
    """Size of the groups as a share of the prompts."""
    prompts: int
    worst: float
    expected: float
    """Mean of the same figure over simulated votes drawn from the prediction."""
    high: float
    """95 % quantile of the simulated figures."""


def simulated_shares(prob_hat: FloatArray, n_votes: npt.NDArray[np.int64], random: np.random.Generator) -> FloatArray:
    """Return simulated shares under a correct prediction: Binomial(n_votes, p̂) / n_votes per pair."""
    return random.binomial(n_votes, prob_hat) / n_votes


def adversarial_calibration(
    prob_hat: FloatArray,
    prob_a: FloatArray,
    n_votes: npt.NDArray[np.int64],
    prompt_index: npt.NDArray[np.integer[Any]],
    *,
    fractions: Sequence[float] = FRACTIONS,
    seed: int = 0,
) -> list[AdversarialGroup]:
    """Return the worst calibration error over random groups of prompts, for groups of several sizes.

    With pairs turned so that p̂ ≥ ½ and binned by p̂ (ten bins of equal mass), a group S of prompts has the error

      CE(S) = Σ_b |Σ_{i ∈ S, i in b} (p̂_i − p_i)| / |S|,

    and the adversarial error at size f is max CE(S) over 200 random S of f × all prompts; at f = 1 it is the error on
    all pairs. Sampling noise alone makes some group look bad, so the same figure is computed for votes drawn from p̂
    with the same groups: ``expected`` and ``high``. A value above ``high`` means that some groups are predicted worse
    than noise explains.

    Args:
        prob_hat: predicted shares, ``(n_pairs,)``.
        prob_a: observed shares, ``(n_pairs,)``.
        n_votes: votes of each pair, ``(n_pairs,)``.
        prompt_index: prompt of each pair, ``(n_pairs,)``.
        fractions: sizes of groups as shares of the prompts.
        seed: of groups and drawings.

    Example:
        >>> found = adversarial_calibration(np.full(8, .75), np.ones(8), np.full(8, 4), np.arange(8), fractions=[1.0])
        >>> found[0].worst
        0.25

    Reference: Zhao, Ma and Ermon, "Individual Calibration with Randomized Forecasting" (ICML 2020), the definition of
    adversarial group calibration.
    """
    side = np.sign(prob_hat - 0.5)
    _, prompt = np.unique(prompt_index, return_inverse=True)
    n_prompts, n_pairs = int(prompt.max()) + 1, len(prob_hat)
    leaning, equal = np.unique(np.round(np.maximum(prob_hat, 1 - prob_hat), 9), return_inverse=True)
    mass = np.bincount(equal, minlength=len(leaning))
    bins = np.minimum(((np.cumsum(mass) - mass / 2) / n_pairs * BINS).astype(int), BINS - 1)[equal]
    sizes = np.bincount(prompt, minlength=n_prompts).astype(np.float64)
    random = random_stream(seed, SIMULATED_VOTES)
    observed = itertools.chain([prob_a], (simulated_shares(prob_hat, n_votes, random) for _ in range(SIMULATIONS)))
    errors = np.hstack(
        [
            np.bincount(prompt * BINS + bins, side * (prob_hat - share), n_prompts * BINS).reshape(n_prompts, BINS)
            for share in observed
        ]
    )
    found = []
    random = random_stream(seed, PROMPT_SUBSETS)  # a separate stream, so that both orders of pairs get the same groups
    for fraction in fractions:
        chosen = max(1, round(fraction * n_prompts))
        worst = np.zeros(1 + SIMULATIONS)
        for _ in range(1 if chosen == n_prompts else SUBSETS // SUBSETS_AT_ONCE):
            drawn = [random.choice(n_prompts, chosen, replace=False) for _ in range(SUBSETS_AT_ONCE)]
            starts = np.arange(SUBSETS_AT_ONCE + 1) * chosen
            # Sparse products also avoid starting threads for small matrices.
            ones, shape = np.ones(SUBSETS_AT_ONCE * chosen), (SUBSETS_AT_ONCE, n_prompts)
            member = sparse.csr_array((ones, np.concatenate(drawn), starts), shape=shape)
            totals = np.abs(member @ errors).reshape(SUBSETS_AT_ONCE, 1 + SIMULATIONS, BINS).sum(axis=2)
            worst = np.maximum(worst, (totals / (member @ sizes)[:, None]).max(axis=0))
        high = float(np.quantile(worst[1:], 0.95))
        found.append(AdversarialGroup(fraction, chosen, float(worst[0]), float(worst[1:].mean()), high))
    return found


# --- what is left of disagreement -------------------------------------------------------------------------------------
