"""``certify``: the guarantees that the paper's theorems give for one ensemble on given votes.

Each statement has one line on the theorem in general, its numbers for this ensemble, a sentence about them, and whether
the result is informative or vacuous. The mathematics is in ``theory.guarantees`` and ``theory.calibration``;
docs/how-to/certify.md explains how to read a certificate.
"""

import math
import os
from dataclasses import dataclass

import numpy as np

from pluralign.core.types import Level, Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes, held_out_votes
from pluralign.measuring.pruning import BETA, Pruning, corrected_errors, plan_pruning
from pluralign.text.finetuned import FinetunedFeatures
from pluralign.theory import calibration, guarantees
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval, clustered_interval
from pluralign.votes.load import VotesLike
from pluralign.votes.preferences import PreferenceSet

EPSILON = 0.025
"""Default target: a calibration error of .025 is a root mean square error of 16 percentage points."""
DELTA = 0.05
TRIVIAL_ERROR = 0.25
"""Largest possible error of always predicting ½: (½ − p*)² is at most ¼."""
TWO_REWARDS = " The undecided share counts as two rewards."
"""Added to statements about the number of rewards."""


@dataclass(frozen=True)
class Statement:
    """The common part of all statements."""

    states: str
    """The theorem in one line."""
    here: str
    """Its result for this ensemble."""
    informative: bool
    """Whether the result is better than a trivial bound."""


@dataclass(frozen=True)
class SmallSize(Statement):
    """Theorem 2: a sufficient number of members, and the error of random annotators."""

    epsilon: float
    sufficient_size: int
    """⌈1/(4ε)⌉."""
    opinion_variance: float
    """Unbiased estimate of mean p*(1 − p*)."""
    sufficient_size_here: int | None
    """⌈mean p*(1 − p*)/ε⌉."""
    k: int
    """Number of rewards in the paper's form: two more than members with an undecided share."""
    random_error: float
    """Expected error of k random annotators."""
    worth_annotators: float | None
    """Number of random annotators with the same error as the ensemble; None if its estimated error is 0 or below."""


@dataclass(frozen=True)
class OutlierControl(Statement):
    """Theorem 3: an upper bound on the weight of outliers, and on the error after removing them.

    Informative if the bound is below the error of always predicting ½.
    """

    pruning: Pruning
    """What ``prune`` would do: outliers, bounds and the error after removing the furthest members."""
    constant_half: float


@dataclass(frozen=True)
class Generalization(Statement):
    """Theorem 4: an upper bound on the gap between training error and true error, uniform over all ensembles.

    Informative if the bound is below 1 at the number of training pairs.
    """

    d: int
    k: int
    """Number of rewards in the paper's form: two more than members with an undecided share."""
    pairs: int
    """N, the number of training pairs."""
    prompts: int
    """A conservative N: pairs of the same prompt are not independent."""
    bound_pairs: float
    bound_prompts: float
    informative_from: int
    """Smallest N at which the bound is below 1."""
    measured_gap: float | None
    """Held-out minus training Brier score, if the fit recorded both."""


@dataclass(frozen=True)
class VoteNoise(Statement):
    """Lemma 1: the part of the Brier score that is sampling noise of few votes."""

    noise: Interval
    """C with a 95 % interval over prompts."""
    brier: float
    brier_corrected: float


@dataclass(frozen=True)
class Range:
    """A mean over prompts, and an interval that contains its expectation with probability 1 − δ."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class HeldOut(Statement):
    """Beyond the paper: a bound on the error of this ensemble from held-out prompts.

    Informative if the upper bound is below ¼, the largest possible error of always predicting ½.
    """

    level: Level
    delta: float
    prompts: int
    error: Range
    """L' = true error + C: the Brier score with equal weight per prompt."""
    true_error: Range
    """The calibration error. If all pairs have one vote, only its upper end is known: that of ``error``."""
    difference: Range
    """Error minus the error of always predicting ½; the noise of the votes cancels."""


@dataclass(frozen=True)
class Certificate:
    """The guarantees for an ensemble, and the votes they rest on."""

    pairs: int
    prompts: int
    k: int
    """Number of members."""
    undecided: float
    """u, the share of votes that no member explains."""
    theorem_2: SmallSize
    theorem_3: OutlierControl
    theorem_4: Generalization
    lemma_1: VoteNoise
    held_out: HeldOut


def certify(
    ensemble: RewardEnsemble | str | os.PathLike[str],
    votes: HeldOutVotes | VotesLike | None = None,
    *,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    beta: float = BETA,
    progress: Progress | None = None,
) -> Certificate:
    """Return the guarantees of the paper's theorems for an ensemble on held-out votes.

    Args:
        ensemble: the ensemble, or its folder.
        votes: pairs held out from the fit, see ``held_out_votes``.
        epsilon: target calibration error of Theorem 2, which gives the sufficient number of members.
        delta: probability that a bound fails (Theorem 4 and the held-out bound).
        beta: β of Theorem 3, at least 2: the larger, the further out an outlier must be. Not the regularisation
            strength of policies.
        progress: called with the number of encoded texts and of all texts.

    Example:
        >>> from pluralign import fit, town_hall
        >>> town = town_hall(400).preferences
        >>> certificate = certify(fit(town, k=2, encoder="none"), town.split()[1], epsilon=0.01)
        >>> certificate.theorem_2.sufficient_size, certificate.theorem_4.informative
        (25, False)
    """
    ensemble, held_out = held_out_votes(ensemble, votes, progress=progress)
    people, pruning = held_out.preferences, plan_pruning(ensemble, held_out, beta)
    return Certificate(
        pairs=len(people),
        prompts=len(people.prompts),
        k=ensemble.k,
        undecided=ensemble.undecided,
        theorem_2=_small_size(pruning, people, guarantees.paper_size(ensemble.k, ensemble.undecided), epsilon),
        theorem_3=_outlier_control(pruning, people),
        theorem_4=_generalization(ensemble, people, delta),
        lemma_1=_vote_noise(ensemble, held_out),
        held_out=_held_out(ensemble, held_out, delta),
    )


def _small_size(pruning: Pruning, people: PreferenceSet, k: int, epsilon: float) -> SmallSize:
    p, n, ties = people.prob_a, people.n_votes, people.counted_ties
    size, variance = guarantees.sufficient_size(epsilon), guarantees.opinion_variance(p, n, ties)
    here, size_here = f"{size} members are enough for an error of {epsilon:g} on any votes", None
    error, worth = pruning.error_before.mean, None
    if known := not math.isnan(variance):
        size_here = guarantees.sufficient_size(epsilon, variance)
        worth = variance / error if error > 0 else None
        equal = f"equal to that of about {worth:.1f}" if worth is not None else "too low to compare with"
        here += (
            f", and {size_here} at the disagreement of these votes. {k} random annotators have an expected error of "
            f"{variance / k:.4f}. The error of this ensemble is {error:z.4f}, {equal} random annotators."
            + TWO_REWARDS
            * (pruning.undecided_before > 0)
        )
    else:
        here += ". Single votes do not show how much people disagree."
    return SmallSize(
        states="A small, equally weighted sample of annotators is nearly calibrated, so a small ensemble exists.",
        here=here,
        informative=known,
        epsilon=epsilon,
        sufficient_size=size,
        opinion_variance=variance,
        sufficient_size_here=size_here,
        k=k,
        random_error=guarantees.random_ensemble_error(p, n, k, ties),
        worth_annotators=worth,
    )


def _outlier_control(pruning: Pruning, people: PreferenceSet) -> OutlierControl:
    error_of_half = float(np.nanmean(corrected_errors(np.full(len(people), 0.5), people)))
    outliers = "impossible, because a disagreement is at most 1"
    if pruning.outlier_threshold < 1:
        outliers = ", ".join(map(str, pruning.outliers_before)) or "none"
    here = (
        f"At β = {pruning.beta:g} an outlier is a member with a disagreement above {pruning.outlier_threshold:.3f}: "
        f"{outliers}. "
        f"Pruning removes {pruning.removed_weight:.3f} of the weight. With the measured ε = {pruning.epsilon:.4f}, "
        f"the error after pruning is at most {pruning.bound:.4f} by the theorem, and at most "
        f"{pruning.bound_after_shift:.4f} by the measured change of the predictions. The measured error is "
        f"{pruning.error_after.mean:z.4f}; the error of always predicting ½ is {error_of_half:z.4f}."
    )
    if pruning.undecided_before:
        fate = "kept" if pruning.ensemble.undecided else "removed"
        here += f" The undecided share counts as a reward at distance ½ and is {fate}."
    return OutlierControl(
        states="Outliers have little weight, and removing the members furthest from the ensemble adds little error.",
        here=here,
        informative=pruning.bound < error_of_half,
        pruning=pruning,
        constant_half=error_of_half,
    )


def _generalization(ensemble: RewardEnsemble, people: PreferenceSet, delta: float) -> Generalization:
    data = ensemble.record.data
    pairs, prompts = (data.train_pairs, data.train_prompts) if data else (len(people), len(people.prompts))
    d, k = ensemble.members.theta.shape[0], guarantees.paper_size(ensemble.k, ensemble.undecided)
    bounds = [guarantees.generalization_bound(n, d, k, delta) for n in (pairs, prompts)]
    start = guarantees.samples_until_informative(d, k, delta, 1.0)
    kept, choice = ensemble.record.kept, ensemble.record.encoders
    there = f"{bounds[0]:.4f}" if bounds[0] < 1 else "vacuous"
    here = f"With d = {d} features and k = {k} the bound is below 1 from N = {start:,} pairs on; "
    here += f"at N = {pairs:,} it is {there}." + TWO_REWARDS * (ensemble.undecided > 0)
    gap = kept.test_brier - kept.train_brier if kept else math.nan
    if not math.isnan(gap):
        here += f" The measured gap between held-out and training Brier score is {gap:+z.4f}."
    if tuned := isinstance(ensemble.features, FinetunedFeatures) or (choice is not None and choice.used != "frozen"):
        here += " The features were trained on the same votes, which the theorem does not cover."
    return Generalization(
        states="With enough independent pairs, training error is close to true error for all ensembles of this size.",
        here=here,
        informative=bounds[0] < 1 and not tuned,
        d=d,
        k=k,
        pairs=pairs,
        prompts=prompts,
        bound_pairs=bounds[0],
        bound_prompts=bounds[1],
        informative_from=start,
        measured_gap=None if math.isnan(gap) else gap,
    )


def _vote_noise(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> VoteNoise:
    people, share = held_out.preferences, ensemble.readings(held_out.difference)["vote"]
    p, n, ties = people.prob_a, people.n_votes, people.counted_ties
    values = calibration.sampling_noise(p, n, ties)
    noise = clustered_interval(values, people.prompt_index, min_clusters=ENOUGH_CLUSTERS)
    plain, known = calibration.brier(share, p), not math.isnan(noise.mean)
    here = "All pairs have a single vote, so C cannot be separated from the error."
    if known:
        here = f"C = {noise.mean:.4f} of the Brier score of {plain:.4f} is noise"
        too_few = f"; no interval from fewer than {ENOUGH_CLUSTERS} prompts."
        here += too_few if math.isnan(noise.low) else f" (95 %: {noise.low:.4f} – {noise.high:.4f})."
    return VoteNoise(
        states="With few votes per pair, the Brier score of a perfect ensemble is C; the rest is calibration error.",
        here=here,
        informative=known,
        noise=noise,
        brier=plain,
        brier_corrected=calibration.brier_corrected(share, p, n, ties),
    )


def _held_out(ensemble: RewardEnsemble, held_out: HeldOutVotes, delta: float) -> HeldOut:
    people, prompts = held_out.preferences, held_out.preferences.prompt_index
    share, level = held_out.prob_hat(ensemble), ensemble.level
    plain = calibration.squared_error(share, people.prob_a)
    noise = calibration.sampling_noise(people.prob_a, people.n_votes, people.counted_ties)
    means = guarantees.prompt_means(plain, prompts)
    error = Range(float(means.mean()), *guarantees.betting_interval(means, delta))
    if np.isnan(noise).all():
        true_error, estimate = Range(math.nan, 0.0, error.high), "cannot be estimated from single votes"
    else:
        # A corrected error is at most 1, and at least minus the largest noise: that of an even split of fewest votes.
        lowest = -1 / (4 * (float(people.n_votes[people.n_votes > 1].min()) - 1))
        corrected = guarantees.prompt_means(plain - noise, prompts)
        low, high = guarantees.betting_interval(corrected, delta, low=lowest)
        true_error = Range(float(corrected.mean()), max(0.0, low), high)
        estimate = f"estimate {true_error.mean:z.4f}"
    # (p̂ − p)² − (½ − p)² is linear in p, so its extremes are at p = 0 and 1: p̂² − ¼ and (1 − p̂)² − ¼.
    gaps = guarantees.prompt_means(plain - calibration.squared_error(np.full(len(people), 0.5), people.prob_a), prompts)
    difference = Range(float(gaps.mean()), *guarantees.betting_interval(gaps, delta, low=-0.25, high=0.75))
    ahead = "lower" if difference.high < 0 else "higher" if difference.low > 0 else "not significantly lower"
    reading = " at the policy level" if level == "policy" else ""
    here = (
        f"Guaranteed with probability {1 - delta:g} each, from {len(means):,} prompts that count equally: the true "
        f"calibration error{reading} is at most {true_error.high:.4f} ({estimate}); the error is {ahead} than that of "
        f"always predicting ½ (difference {difference.low:+z.4f} to {difference.high:+z.4f}). The interval that fit "
        "prints is approximate and narrower, and there all pairs count equally."
    )
    return HeldOut(
        states="On held-out prompts, the measured error of this ensemble is close to its true error.",
        here=here,
        informative=true_error.high < TRIVIAL_ERROR,
        level=level,
        delta=delta,
        prompts=len(means),
        error=error,
        true_error=true_error,
        difference=difference,
    )
