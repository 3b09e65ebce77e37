"""``prune``: remove outliers from an ensemble (Theorem 3), and compare the error with its bound.

The distance of a member to the ensemble decides, so people's votes play no part in the choice; they only measure the
error before and after. The theorem is about hard votes, and so are the figures here. The undecided share counts as one
more reward, at distance ½ from every ensemble. The rule is in ``theory.guarantees``.
"""

import math
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, UsageError
from pluralign.core.files import refuse_foreign
from pluralign.core.json_values import JsonObject, to_json
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import ENSEMBLE_FILE, OWN_NAMES
from pluralign.ensemble.held_out import HeldOutVotes, held_out_files, held_out_votes
from pluralign.ensemble.record import HistoryRow, PruneRecord
from pluralign.learning.measure import evaluate_features
from pluralign.measuring.insight import with_insight
from pluralign.theory import calibration, guarantees
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval, clustered_interval, paired_difference
from pluralign.votes.load import VotesLike
from pluralign.votes.preferences import PreferenceSet, texts_of

BETA = 5.0
"""Default β of Theorem 3. It removes at most a quarter of the weight. At 2 all but one member may go: vacuous bound."""


@dataclass(frozen=True, eq=False)
class Pruning:
    """A pruned ensemble, the removed members, and the error before and after. Indices refer to the original members."""

    ensemble: RewardEnsemble
    held_out: HeldOutVotes
    """The votes used for measuring, with the rewards of the remaining members."""
    beta: float
    """β of Theorem 3."""
    only_far: bool
    """Whether only possible outliers were removed, instead of all the weight that the theorem allows."""
    kept: list[int]
    removed: list[int]
    removed_weight: float
    """Σ (1 − u)α_j over the removed members, plus u if the undecided share was removed."""
    undecided_before: float
    """u of the original. In the pruned ensemble it is 0 if it was removed; else it grows as the other weights do."""
    distances: list[float]
    """d(V_j, p̂) of each original member."""
    epsilon: float
    """Calibration error before pruning: the corrected Brier score of the votes, or 0 if that is negative."""
    bound: float
    """(√ε + 1/(β−1))²: the guarantee of Theorem 3."""
    shift: float
    """Root mean square change of p̂."""
    bound_after_shift: float
    """(√ε + shift)²: the last step of the theorem, with the measured change instead of its upper bound."""
    error_before: Interval
    """Corrected Brier score (plain if all pairs have one vote), 95 % interval over prompts."""
    error_after: Interval
    difference: Interval
    """After minus before, pair by pair. Above zero, pruning increased the error."""
    disagreements: list[float]
    """Φ of each original member."""
    outlier_threshold: float
    """β·Φ_min + (β+1)√ε, with the lower bound mean min(p, 1 − p) on Φ_min: every outlier is flagged, possibly more.
    At 1 or more no member can be an outlier."""
    outliers_before: list[int]

    def to_json(self) -> JsonObject:
        """Return the figures with the keys of the command line's JSON, without the ensemble and its votes."""
        own = {name: value for name, value in vars(self).items() if name not in ("ensemble", "held_out")}
        after = {"k": self.ensemble.k, "weights": self.ensemble.weights, "undecided": self.ensemble.undecided}
        return dict(to_json(own | after))

    def save(self, folder: str | PathLike[str], source: str | PathLike[str] = "", *, overwrite: bool = False) -> None:
        """Write the pruned ensemble and its votes to a folder other than ``source``, the folder of the original.

        Replace another ensemble in the folder only with ``overwrite``.
        """
        refuse_to_replace(folder, source, overwrite=overwrite)
        record = self.ensemble.record
        pruned = record.pruned and replace(record.pruned, source=str(source))
        ensemble = replace(self.ensemble, record=replace(record, pruned=pruned))
        ensemble.save(folder, held_out_files(ensemble, self.held_out))


def prune(
    ensemble: RewardEnsemble | str | PathLike[str],
    votes: HeldOutVotes | VotesLike | None = None,
    beta: float = BETA,
    *,
    only_far: bool = True,
    progress: Progress | None = None,
) -> Pruning:
    """Remove the members that can be outliers, at most 1/(β−1) of the weight (Theorem 3).

    Args:
        ensemble: an ensemble of any size, or its folder.
        votes: held-out pairs, see ``held_out_votes``. Their texts decide which members are removed; their votes measure
            the error.
        beta: β of the theorem, at least 2; a larger β removes less. Not the regularisation strength of policies.
        only_far: remove only possible outliers. Without it, remove the furthest members, near or far, up to all the
            weight that the theorem allows.
        progress: called with the number of encoded texts and of all texts.

    Returns:
        The pruned ensemble, evaluated on ``votes``, and the change of the error.

    Example:
        >>> from pluralign import fit, town_hall
        >>> town = town_hall(400).preferences
        >>> pruning = prune(fit(town, k=4, encoder="none"), town, beta=3)
        >>> pruning.removed_weight <= 0.5, pruning.error_after.mean <= pruning.bound
        (True, True)
    """
    original, held_out = held_out_votes(ensemble, votes, progress=progress)
    pruning = plan_pruning(original, held_out, beta, only_far=only_far)
    people, pruned, record = held_out.preferences, pruning.ensemble, original.record
    evaluation = evaluate_features(pruned, people, original.features(texts_of(people), progress))
    test, weights = evaluation.test, pruned.weights.tolist()
    removal = (pruning.removed, pruning.removed_weight, pruning.epsilon, pruning.bound)
    record = replace(
        record,
        k=pruned.k,
        data=record.data and replace(record.data, test_pairs=len(people), test_prompts=len(people.prompts)),
        # The sizes of the original ensemble are not sizes of this one.
        history=[HistoryRow(pruned.k, math.nan, test.brier, test.brier_corrected, weights, pruned.undecided)],
        bound=None,
        evaluation=evaluation,
        pruned=PruneRecord(original.k, beta, only_far, *removal),
    )
    return replace(pruning, ensemble=with_insight(replace(pruned, record=record), pruning.held_out))


def refuse_to_replace(folder: str | PathLike[str], source: str | PathLike[str], *, overwrite: bool = False) -> None:
    """Raise UsageError if a pruned ensemble would replace the original, or an ensemble that is no pruning of it."""
    if str(source) and Path(folder).resolve() == Path(source).resolve():
        raise UsageError(f"{folder} holds the original ensemble: name another folder for the pruned one.")
    refuse_foreign(folder, *OWN_NAMES, overwrite=overwrite)
    if overwrite or not (Path(folder) / ENSEMBLE_FILE).is_file():
        return
    try:
        pruned = RewardEnsemble.load(folder).record.pruned
    except DataError:
        pruned = None
    if pruned is None or pruned.source != str(source):
        raise UsageError(f"{folder} holds another ensemble: name another folder, or use --overwrite.")


def plan_pruning(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, beta: float = BETA, *, only_far: bool = True
) -> Pruning:
    """Return what ``prune`` would do, without encoding texts. The ensemble in it keeps the record of the original."""
    people, weights, undecided = held_out.preferences, ensemble.weights, ensemble.undecided
    kept = guarantees.members_to_keep(held_out.votes, weights, beta, only_far=only_far, undecided=undecided)
    removed = np.setdiff1d(np.arange(len(weights)), kept)
    keeps_undecided = guarantees.keeps_undecided(held_out.votes, weights, undecided, beta)
    removed_weight = float((1 - undecided) * weights[removed].sum()) + (0.0 if keeps_undecided else undecided)
    pruned, rest = ensemble, held_out.take(kept)
    if removed_weight > 0 or len(removed):
        left = undecided / (1 - removed_weight) if keeps_undecided and undecided else 0.0
        pruned = ensemble.take(kept.tolist(), weights[kept] / weights[kept].sum(), left)
    before = ensemble.readings(held_out.difference)["vote"]
    after = pruned.readings(rest.difference)["vote"]
    errors = [corrected_errors(share, people) for share in (before, after)]
    epsilon, shift = max(0.0, float(np.nanmean(errors[0]))), math.sqrt(float(np.mean((after - before) ** 2)))
    phi = np.asarray(calibration.disagreement(held_out.votes, people.prob_a))
    least = float(np.minimum(people.prob_a, 1 - people.prob_a).mean())
    outlier = calibration.outliers(phi, beta, (beta + 1) * math.sqrt(epsilon), least)
    return Pruning(
        ensemble=pruned,
        held_out=rest,
        beta=beta,
        only_far=only_far,
        kept=kept.tolist(),
        removed=removed.tolist(),
        removed_weight=removed_weight,
        undecided_before=undecided,
        distances=guarantees.distances_to_ensemble(held_out.votes, weights, undecided).tolist(),
        epsilon=epsilon,
        bound=guarantees.pruning_bound(epsilon, beta),
        shift=shift,
        bound_after_shift=guarantees.shifted_bound(epsilon, shift),
        error_before=clustered_interval(errors[0], people.prompt_index, min_clusters=ENOUGH_CLUSTERS),
        error_after=clustered_interval(errors[1], people.prompt_index, min_clusters=ENOUGH_CLUSTERS),
        difference=paired_difference(errors[1], errors[0], people.prompt_index, min_clusters=ENOUGH_CLUSTERS),
        disagreements=phi.tolist(),
        outlier_threshold=guarantees.outlier_threshold(beta, epsilon, least),
        outliers_before=np.flatnonzero(outlier).tolist(),
    )


def corrected_errors(share: FloatArray, people: PreferenceSet) -> FloatArray:
    """Return (p̂ − p)² minus the noise of each pair, NaN for single votes.

    If all pairs have a single vote, return plain (p̂ − p)², an overestimate.
    """
    error = calibration.squared_error(share, people.prob_a)
    noise = calibration.sampling_noise(people.prob_a, people.n_votes, people.counted_ties)
    return error if np.isnan(noise).all() else error - noise
