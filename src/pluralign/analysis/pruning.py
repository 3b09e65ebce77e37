"""``prune``: an ensemble without its outliers (Theorem 3), and what that cost beside what it could have cost.

Members are judged by their distance to the ensemble, so no people's votes decide who goes; votes only measure what
became of the error. The theorem is about hard votes, and so are the figures here. The rule itself is in ``theory``.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, UsageError
from pluralign.core.jsonable import without_nan
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble, texts_of
from pluralign.ensemble.held_out import Evidence, gather_evidence, save_evidence
from pluralign.evaluation.evaluate import evaluate_features
from pluralign.fitting.fit import evaluation_facts
from pluralign.theory import calibration
from pluralign.theory import guarantees as theory
from pluralign.theory.intervals import Interval, clustered_interval, paired_difference
from pluralign.votes.preferences import PreferenceSet

BETA = 5.0
"""Removes at most a quarter of the weight. At 2 all but one member may go, and the bound says nothing."""


@dataclass(frozen=True, eq=False)
class Pruning:
    """A pruned ensemble, what was removed, and the error before and after. Indices count the members as they were."""

    ensemble: RewardEnsemble
    evidence: Evidence
    """The votes it was measured on, with the rewards of the members that stayed."""
    beta: float
    only_far: bool
    kept: list[int]
    removed: list[int]
    removed_weight: float
    distances: list[float]
    """d(V_j, p̂) of each member as it was."""
    epsilon: float
    """Calibration error before: the corrected Brier score of the votes, 0 where that is below (``epsilon_clipped``)."""
    epsilon_clipped: bool
    bound: float
    """(√ε + 1/(β−1))²: what Theorem 3 guarantees."""
    shift: float
    """Root mean square change of p̂."""
    bound_after_shift: float
    """(√ε + shift)²: the theorem's last step with the change as it is, not as it could be at most."""
    error_before: Interval
    """Corrected Brier score (plain, where all pairs have one vote), 95 % over prompts."""
    error_after: Interval
    difference: Interval
    """After less before, pair by pair: above zero, pruning cost something."""
    disagreements: list[float]
    """Φ of each member as it was."""
    least_disagreement: float
    """mean min(p, 1 − p), not above Φ_min: with it every outlier is flagged, and perhaps more."""
    outlier_threshold: float
    """β·Φ_min + (β+1)√ε; 1 or more flags nobody."""
    outliers_before: list[int]
    outliers_after: list[int]

    def facts(self) -> dict[str, Any]:
        """Return everything but the ensemble and its votes as plain values, in the words of the command line's JSON."""
        own = {name: value for name, value in vars(self).items() if name not in ("ensemble", "evidence")}
        plain = {name: vars(value) if isinstance(value, Interval) else value for name, value in own.items()}
        return plain | {"k": self.ensemble.k, "weights": self.ensemble.weights.tolist()}

    def save(self, folder: str | os.PathLike[str], source: str | os.PathLike[str] = "") -> None:
        """Write the pruned ensemble with its votes into a folder other than the ``source`` it came from."""
        refuse_same_folder(folder, source)
        save_evidence(self.evidence, folder)
        note = {**self.ensemble.facts.get("pruned", {}), "from": str(source)}
        replace(self.ensemble, facts={**self.ensemble.facts, "pruned": note}).save(folder)


def prune(
    ensemble: RewardEnsemble,
    votes: Evidence | PreferenceSet,
    beta: float = BETA,
    *,
    only_far: bool = False,
    progress: Progress | None = None,
) -> Pruning:
    """Leave out the members furthest from the ensemble itself, at most 1/(β−1) of its weight (Theorem 3).

    Args:
        ensemble: of any size.
        votes: pairs that the ensemble did not learn from. Their texts decide, their votes measure.
        beta: at least 2; a larger one removes less.
        only_far: remove only members that could be outliers, not all that the theorem allows to remove.
        progress: called with texts encoded and in all.

    Returns:
        The pruned ensemble, its figures measured anew on ``votes``, and what it cost.

    Example:
        >>> from pluralign import fit, town_hall
        >>> town = town_hall(400).preferences
        >>> found = prune(fit(town, k=4, encoder="none"), town, beta=3)
        >>> found.removed_weight <= 0.5, found.error_after.mean <= found.bound
        (True, True)
    """
    evidence = as_evidence(ensemble, votes, progress)
    found = foresee(ensemble, evidence, beta, only_far=only_far)
    features = ensemble.features(texts_of(evidence.preferences), progress)
    figures = evaluation_facts(evaluate_features(found.ensemble, evidence.preferences, features))
    record = {
        "k": found.ensemble.k,
        "train_brier": None,
        "test_brier": figures["test"]["brier"],
        "test_brier_corrected": figures["test"]["brier_corrected"],
        "weights": found.ensemble.weights.tolist(),
    }
    data = {"test_pairs": len(evidence.preferences), "test_prompts": len(evidence.preferences.prompts)}
    told = ("beta", "only_far", "removed", "removed_weight", "epsilon", "bound")
    facts = {
        **ensemble.facts,
        "k": found.ensemble.k,
        "history": [record],  # sizes of the ensemble as it was are no sizes of this one
        "bound": None,
        "data": {**ensemble.facts.get("data", {}), **data},
        "pruned": {"k": ensemble.k, **{name: getattr(found, name) for name in told}},
        **figures,
    }
    return replace(found, ensemble=replace(found.ensemble, facts=without_nan(facts)))


def refuse_same_folder(folder: str | os.PathLike[str], source: str | os.PathLike[str]) -> None:
    """Say no to writing a pruned ensemble over the one it comes from."""
    if str(source) and Path(folder).resolve() == Path(source).resolve():
        raise UsageError(f"{folder} holds the ensemble itself: name another folder for the pruned one.")


def as_evidence(
    ensemble: RewardEnsemble, votes: Evidence | PreferenceSet, progress: Progress | None = None
) -> Evidence:
    """Return votes with the ensemble's rewards; evidence of another ensemble is refused."""
    if isinstance(votes, PreferenceSet):
        return gather_evidence(ensemble, votes, progress)
    if votes.rewards.shape[1] != ensemble.k:
        problem = f"the held-out rewards are of {votes.rewards.shape[1]} members, but the ensemble has {ensemble.k}"
        raise DataError(problem, remedy="name votes with --data, or fit again")
    return votes


def foresee(ensemble: RewardEnsemble, evidence: Evidence, beta: float = BETA, *, only_far: bool = False) -> Pruning:
    """``prune`` without encoding a text: the ensemble it returns still has the facts it had."""
    people, weights = evidence.preferences, ensemble.weights
    kept = theory.members_to_keep(evidence.votes, weights, beta, only_far=only_far)
    removed = np.setdiff1d(np.arange(len(weights)), kept)
    rest = weights[kept] / weights[kept].sum() if len(removed) else weights
    before = calibration.ensemble_prob(evidence.votes, weights)
    after = calibration.ensemble_prob(evidence.votes[:, kept], rest) if len(removed) else before
    errors = [corrected_errors(share, people) for share in (before, after)]
    measured = float(np.nanmean(errors[0]))
    epsilon, shift = max(0.0, measured), math.sqrt(float(np.mean((after - before) ** 2)))
    phi = np.asarray(calibration.disagreement(evidence.votes, people.prob_a))
    least = float(np.minimum(people.prob_a, 1 - people.prob_a).mean())
    threshold = theory.outlier_threshold(beta, epsilon, least)
    return Pruning(
        ensemble=ensemble.take(kept.tolist(), rest),
        evidence=evidence.take(kept),
        beta=beta,
        only_far=only_far,
        kept=kept.tolist(),
        removed=removed.tolist(),
        removed_weight=float(weights[removed].sum()),
        distances=theory.distances_to_ensemble(evidence.votes, weights).tolist(),
        epsilon=epsilon,
        epsilon_clipped=measured < 0,
        bound=theory.pruning_bound(epsilon, beta),
        shift=shift,
        bound_after_shift=theory.shifted_bound(epsilon, shift),
        error_before=clustered_interval(errors[0], people.prompt_index),
        error_after=clustered_interval(errors[1], people.prompt_index),
        difference=paired_difference(errors[1], errors[0], people.prompt_index),
        disagreements=phi.tolist(),
        least_disagreement=least,
        outlier_threshold=threshold,
        outliers_before=np.flatnonzero(phi > threshold).tolist(),
        outliers_after=kept[phi[kept] > threshold].tolist(),
    )


def corrected_errors(share: FloatArray, people: PreferenceSet) -> FloatArray:
    """Return (p̂ − p)² less each pair's noise, NaN for single votes; plain (p̂ − p)², an overestimate, if all are."""
    error = calibration.squared_error(share, people.prob_a)
    noise = calibration.sampling_noise(people.prob_a, people.n_votes, people.counted_ties)
    return error if np.isnan(noise).all() else error - noise
