"""``certify``: what the paper's theorems guarantee of one ensemble on given votes, and where they say nothing.

Each certificate has one plain line on what it states, its numbers, a sentence on them, and whether it says anything.
The mathematics is in ``theory`` and ``calibration``; docs/certificates.md explains how to read it.
"""

import math
from dataclasses import dataclass

import numpy as np

from pluralign.analysis.pruning import BETA, Pruning, as_evidence, corrected_errors, foresee
from pluralign.core.arrays import FloatArray
from pluralign.core.types import Level, Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import Evidence
from pluralign.features.finetuned import TunedFeatures
from pluralign.theory import calibration
from pluralign.theory import guarantees as theory
from pluralign.theory.intervals import Interval, clustered_interval
from pluralign.votes.preferences import PreferenceSet

EPSILON = 0.025
"""A calibration error of .025 is a root mean square error of 16 points in a hundred people."""
DELTA = 0.05
CERTAIN_ERROR = 0.25
"""(½ − p*)² is never more."""
NARROW = 0.05
"""A gap between measured and true error that one would call small."""


@dataclass(frozen=True)
class Statement:
    """What every certificate has."""

    states: str
    """What is guaranteed in general, in a line."""
    here: str
    """What that comes to for this ensemble."""
    informative: bool
    """Whether that is better than knowing nothing."""


@dataclass(frozen=True)
class SmallSize(Statement):
    """Theorem 2: how many members are enough, and what random annotators would do."""

    epsilon: float
    sufficient_size: int
    """⌈1/(4ε)⌉."""
    opinion_variance: float
    """mean p*(1 − p*), estimated without bias."""
    sufficient_size_here: int | None
    """⌈mean p*(1 − p*)/ε⌉."""
    k: int
    random_error: float
    """Expected error of k random annotators."""
    own_error: float
    """Corrected Brier score of the ensemble's votes."""
    worth_annotators: float | None
    """How many random annotators err as little as the ensemble; None where its error is estimated at 0 or below."""


@dataclass(frozen=True)
class OutlierControl(Statement):
    """Theorem 3: how much weight outliers can have, and what removing them can cost.

    Informative if the bound is below the error of always answering ½.
    """

    beta: float
    epsilon: float
    epsilon_clipped: bool
    weight_bound: float
    least_disagreement: float
    outlier_threshold: float
    names_outliers: bool
    """Whether the threshold is below 1, so that a member could be above it."""
    outliers: list[int]
    outlier_weight: float
    distances: list[float]
    removed: list[int]
    removed_weight: float
    bound: float
    bound_after_shift: float
    error_after: float
    constant_half: float


@dataclass(frozen=True)
class Generalization(Statement):
    """Theorem 4: how far the error on training pairs can be from the error on all, for every ensemble at once.

    Informative if the bound is below 1 at the number of pairs learned from.
    """

    d: int
    k: int
    pseudo_dimension: float
    delta: float
    pairs: int
    """N, the pairs learned from."""
    prompts: int
    """The cautious N: pairs of one prompt are not independent."""
    bound_pairs: float
    bound_prompts: float
    informative_from: int
    """The least N at which the bound is below 1."""
    narrow_from: int
    """The least N at which it is below .05."""
    measured_gap: float | None
    """Held-out less training Brier score, where the fit recorded both."""
    fixed_features: bool
    """False where a hidden layer was learned from the same votes: the theorem, with d features, does not cover that."""


@dataclass(frozen=True)
class VoteNoise(Statement):
    """Lemma 1: the part of the Brier score that is only the noise of few votes."""

    noise: Interval
    """C, 95 % over prompts."""
    brier: float
    brier_corrected: float
    votes_per_pair: float


@dataclass(frozen=True)
class Range:
    """A mean over prompts and where its expectation lies with probability 1 − δ."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class HeldOut(Statement):
    """Beyond the paper: a bound for this one ensemble from prompts it has not learned from.

    Informative if the error is sure to be below ¼, which always answering ½ never exceeds.
    """

    level: Level
    delta: float
    prompts: int
    error: Range
    """L' = true error + C: the Brier score, each prompt counted once."""
    true_error: Range
    """The calibration error itself. Where all pairs have one vote only its upper end is known, that of ``error``."""
    hoeffding_width: float
    """To either side of ``error``, by Hoeffding's inequality: for comparison."""
    bernstein_width: float
    """The same by the empirical Bernstein inequality."""
    difference: Range
    """Error less that of always answering ½; here the noise of votes cancels."""


@dataclass(frozen=True)
class Certificate:
    """What is guaranteed of an ensemble, and by which votes."""

    pairs: int
    prompts: int
    k: int
    theorem_2: SmallSize
    theorem_3: OutlierControl
    theorem_4: Generalization
    lemma_1: VoteNoise
    held_out: HeldOut


def certify(
    ensemble: RewardEnsemble,
    votes: Evidence | PreferenceSet,
    *,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    beta: float = BETA,
    progress: Progress | None = None,
) -> Certificate:
    """Say what the theorems guarantee of an ensemble on votes that it did not learn from.

    Args:
        ensemble: of linear members.
        votes: pairs held out from the fit.
        epsilon: the calibration error whose sufficient size is asked for (Theorem 2).
        delta: the chance that a bound does not hold (Theorem 4 and the held-out bound).
        beta: how far out an outlier is, at least 2 (Theorem 3).
        progress: called with texts encoded and in all.

    Example:
        >>> from pluralign import fit, town_hall
        >>> town = town_hall(400).preferences
        >>> found = certify(fit(town, k=2, encoder="none"), town.split()[1], epsilon=0.01)
        >>> found.theorem_2.sufficient_size, found.theorem_4.informative
        (25, False)
    """
    evidence = as_evidence(ensemble, votes, progress)
    pruned = foresee(ensemble, evidence, beta)
    return Certificate(
        pairs=len(evidence.preferences),
        prompts=len(evidence.preferences.prompts),
        k=ensemble.k,
        theorem_2=_small_size(pruned, evidence.preferences, ensemble.k, epsilon),
        theorem_3=_outlier_control(pruned, ensemble.weights, evidence.preferences),
        theorem_4=_generalization(ensemble, evidence.preferences, delta),
        lemma_1=_vote_noise(ensemble, evidence),
        held_out=_held_out(ensemble, evidence, delta),
    )


def _small_size(pruned: Pruning, people: PreferenceSet, k: int, epsilon: float) -> SmallSize:
    p, n, ties = people.prob_a, people.n_votes, people.counted_ties
    size, variance = theory.sufficient_size(epsilon), theory.opinion_variance(p, n, ties)
    known = not math.isnan(variance)
    here = f"{size} members are enough for an error of {epsilon:g}, whatever people prefer"
    size_here = worth = None
    if known:
        size_here = theory.sufficient_size(epsilon, variance)
        worth = variance / pruned.error_before.mean if pruned.error_before.mean > 0 else None
        count = "more random annotators than can be told" if worth is None else f"about {worth:.1f} random annotators"
        here += (
            f", and {size_here} as divided as people are here; {k} random annotators would err by {variance / k:.4f}. "
            f"This ensemble errs by {pruned.error_before.mean:.4f}: it is worth {count}."
        )
    else:
        here += ". Single votes do not show how divided people are."
    return SmallSize(
        states="A few random annotators, equally weighted, are nearly calibrated: some ensemble of that size exists.",
        here=here,
        informative=known,
        epsilon=epsilon,
        sufficient_size=size,
        opinion_variance=variance,
        sufficient_size_here=size_here,
        k=k,
        random_error=theory.random_ensemble_error(p, n, k, ties),
        own_error=pruned.error_before.mean if known else math.nan,
        worth_annotators=worth,
    )


def _outlier_control(pruned: Pruning, weights: FloatArray, people: PreferenceSet) -> OutlierControl:
    ignorance = float(np.nanmean(_errors_of_half(people)))
    names = pruned.outlier_threshold < 1
    who = f"members whose disagreement is above {pruned.outlier_threshold:.3f}"
    outliers = "are none" if not pruned.outliers_before else f"are {', '.join(map(str, pruned.outliers_before))}"
    here = (
        f"At β = {pruned.beta:g} outliers are {who}: "
        + (f"there {outliers}. " if names else "a disagreement is at most 1, so nobody can be one. ")
        + f"Pruning removes {pruned.removed_weight:.3f} of the weight. From ε = {pruned.epsilon:.4f} as measured, the "
        f"error then is at most {pruned.bound:.4f}; by the change of the predictions itself at most "
        f"{pruned.bound_after_shift:.4f}; measured {pruned.error_after.mean:.4f}. Always answering ½ errs by "
        f"{ignorance:.4f}."
    )
    return OutlierControl(
        states="Outliers have little weight, and leaving out the members furthest from the ensemble costs little.",
        here=here,
        informative=pruned.bound < ignorance,
        beta=pruned.beta,
        epsilon=pruned.epsilon,
        epsilon_clipped=pruned.epsilon_clipped,
        weight_bound=theory.outlier_weight_bound(pruned.beta),
        least_disagreement=pruned.least_disagreement,
        outlier_threshold=pruned.outlier_threshold,
        names_outliers=names,
        outliers=pruned.outliers_before,
        outlier_weight=float(weights[pruned.outliers_before].sum()),
        distances=pruned.distances,
        removed=pruned.removed,
        removed_weight=pruned.removed_weight,
        bound=pruned.bound,
        bound_after_shift=pruned.bound_after_shift,
        error_after=pruned.error_after.mean,
        constant_half=ignorance,
    )


def _generalization(ensemble: RewardEnsemble, people: PreferenceSet, delta: float) -> Generalization:
    data = ensemble.facts.get("data", {})
    pairs, prompts = data.get("train_pairs", len(people)), data.get("train_prompts", len(people.prompts))
    d, k = ensemble.members.theta.shape
    bounds = [theory.generalization_bound(n, d, k, delta) for n in (pairs, prompts)]
    start, narrow = (theory.samples_until_informative(d, k, delta, width) for width in (1.0, NARROW))
    history = ensemble.facts.get("history") or [{}]
    trained, tested = history[-1].get("train_brier"), history[-1].get("test_brier")
    gap = None if trained is None or tested is None else tested - trained
    here = f"With d = {d} features and k = {k} the bound says something from N = {start:,} pairs on; " + (
        f"at N = {pairs:,} it is {bounds[0]:.4f}." if bounds[0] < 1 else f"at N = {pairs:,} it says nothing."
    )
    if gap is not None:
        here += f" Measured: {gap:+.4f} from training to held-out prompts."
    tuned = isinstance(ensemble.features, TunedFeatures)
    if not (fixed := ensemble.members.inputs.hidden is None and not tuned):
        what = "The features were" if tuned else "A hidden layer was"
        here += f" {what} learned from the same votes, which it does not cover."
    return Generalization(
        states="The error on enough independent pairs is near the true one, for every ensemble of this size at once.",
        here=here,
        informative=bounds[0] < 1 and fixed,
        d=d,
        k=k,
        pseudo_dimension=theory.pseudo_dimension_bound(d, k),
        delta=delta,
        pairs=pairs,
        prompts=prompts,
        bound_pairs=bounds[0],
        bound_prompts=bounds[1],
        informative_from=start,
        narrow_from=narrow,
        measured_gap=gap,
        fixed_features=fixed,
    )


def _vote_noise(ensemble: RewardEnsemble, evidence: Evidence) -> VoteNoise:
    people = evidence.preferences
    share = calibration.ensemble_prob(evidence.votes, ensemble.weights)
    p, n, ties = people.prob_a, people.n_votes, people.counted_ties
    noise = clustered_interval(calibration.sampling_noise(p, n, ties), people.prompt_index)
    plain, known = calibration.brier(share, p), not math.isnan(noise.mean)
    here = "All pairs have one vote, and C cannot be told from the error."
    if known:
        here = f"Of the Brier score of {plain:.4f}, C = {noise.mean:.4f} is noise"
        alone = math.isnan(noise.low)
        here += "; one prompt gives no interval." if alone else f" (95 %: {noise.low:.4f} – {noise.high:.4f})."
    return VoteNoise(
        states="Judged by few votes, even a perfect ensemble errs by C; the rest of the Brier score is its own error.",
        here=here,
        informative=known,
        noise=noise,
        brier=plain,
        brier_corrected=calibration.brier_corrected(share, p, n, ties),
        votes_per_pair=float(n.mean()),
    )


def _held_out(ensemble: RewardEnsemble, evidence: Evidence, delta: float) -> HeldOut:
    people, prompts = evidence.preferences, evidence.preferences.prompt_index
    share, level = evidence.prob_hat(ensemble), ensemble.level
    plain = calibration.squared_error(share, people.prob_a)
    noise = calibration.sampling_noise(people.prob_a, people.n_votes, people.counted_ties)
    means = theory.prompt_means(plain, prompts)
    error = Range(float(means.mean()), *theory.betting_interval(means, delta))
    if np.isnan(noise).all():
        true_error = Range(math.nan, 0.0, error.high)
    else:
        # A corrected error is at most 1 and at least minus the largest noise, that of an even split of fewest votes.
        least = -1 / (4 * (float(people.n_votes[people.n_votes > 1].min()) - 1))
        corrected = theory.prompt_means(plain - noise, prompts)
        low, high = theory.betting_interval(corrected, delta, low=least)
        true_error = Range(float(corrected.mean()), max(0.0, low), high)
    # (p̂ − p)² − (½ − p)² is linear in p, so it is extreme at p = 0 and 1: p̂² − ¼ and (1 − p̂)² − ¼.
    gaps = theory.prompt_means(plain - calibration.squared_error(np.full(len(people), 0.5), people.prob_a), prompts)
    difference = Range(float(gaps.mean()), *theory.betting_interval(gaps, delta, low=-0.25, high=0.75))
    ahead = "better than" if difference.high < 0 else "worse than" if difference.low > 0 else "not surely better than"
    estimate = (
        "not to be estimated from single votes" if math.isnan(true_error.mean) else f"estimated {true_error.mean:.4f}"
    )
    reading = ", read as policies," if level == "policy" else ""
    here = (
        f"With probability {1 - delta:g} each, from {len(means):,} prompts: its true calibration error{reading} is at "
        f"most {true_error.high:.4f} ({estimate}); it is {ahead} always answering ½ "
        f"({difference.low:+.4f} to {difference.high:+.4f})."
    )
    return HeldOut(
        states="On prompts it did not learn from, the measured error of this one ensemble is near its true one.",
        here=here,
        informative=true_error.high < CERTAIN_ERROR,
        level=level,
        delta=delta,
        prompts=len(means),
        error=error,
        true_error=true_error,
        hoeffding_width=theory.hoeffding_width(len(means), delta),
        bernstein_width=theory.bernstein_width(means, delta),
        difference=difference,
    )


def _errors_of_half(people: PreferenceSet) -> FloatArray:
    return corrected_errors(np.full(len(people), 0.5), people)
