"""The policy level of a predictor (App. A) at several strengths of regularisation."""

import math
from collections.abc import Sequence

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, UsageError
from pluralign.core.types import Progress
from pluralign.evaluation.groupings import as_numbers
from pluralign.evaluation.predictors import Predictor
from pluralign.evaluation.results import PolicyLevel, PolicyRow
from pluralign.models.causal import response_log_prob
from pluralign.models.loading import reference_folder
from pluralign.theory import calibration
from pluralign.theory.logistic import sigmoid
from pluralign.votes.preferences import PreferenceSet, texts_of

BETAS = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
"""Strengths of regularisation β that every evaluation reports."""
LOG_PROB_COLUMNS = ("logprob_a", "logprob_b")


def policy_level(
    subject: Predictor,
    preferences: PreferenceSet,
    betas: Sequence[float] = (),
    reference: str | None = None,
    progress: Progress | None = None,
) -> PolicyLevel | None:
    """Return the Brier score of the policy level for a grid of β, ending in β → 0.

      p̂ = u/2 + (1 − u) Σ_j α_j σ(Δr_j / β + log π_ref(a)/π_ref(b))

    Without a reference policy the log-ratio is 0. The limit is the share of hard votes, with or without a reference,
    except for tied rewards, where the reference alone decides.

    Args:
        subject: the predictor; it needs rewards.
        preferences: the votes.
        betas: further values of β.
        reference: the reference policy, see ``reference_log_ratio``.
        progress: called while the reference reads texts.

    Returns:
        The table, or None for files of probabilities.

    Reference: Appendix A.
    """
    check_betas(betas)
    if subject.difference is None or subject.weights is None:
        if reference or betas:
            raise UsageError(f"{subject.name} has probabilities, but the policy level needs rewards.")
        return None
    difference, weights = subject.difference, subject.weights

    def share(beta: float, log_ratio: FloatArray | float = 0.0) -> FloatArray:
        prediction = calibration.policy_prob(difference, weights, beta, log_ratio)
        return calibration.with_undecided(prediction, subject.undecided)

    ratio = None if reference is None else reference_log_ratio(reference, preferences, progress)
    own = [subject.temperature] if subject.temperature else []
    rows = [
        _policy_row(
            beta,
            share(beta),
            None if ratio is None else share(beta, ratio),
            preferences,
        )
        for beta in sorted({*BETAS, *betas, *own}, reverse=True)
    ]
    limit = None
    if ratio is not None:
        tied = sigmoid(ratio)[:, None]
        votes = np.where(difference == 0, tied, (difference > 0).astype(float))
        limit = calibration.with_undecided(calibration.ensemble_prob(votes, weights), subject.undecided)
    rows.append(_policy_row(0.0, subject.readings["vote"], limit, preferences))
    return PolicyLevel(reference, rows)


def check_betas(betas: Sequence[float]) -> None:
    """Raise UsageError for a β that is not a positive number."""
    if bad := [beta for beta in betas if not (math.isfinite(beta) and beta > 0)]:
        raise UsageError(f"beta must be above 0, not {bad[0]:g}; the limit 0 is always reported.")


def _policy_row(
    beta: float, share: FloatArray, with_reference: FloatArray | None, preferences: PreferenceSet
) -> PolicyRow:
    p, n, ties = preferences.prob_a, preferences.n_votes, preferences.counted_ties
    return PolicyRow(
        beta=beta,
        brier=calibration.brier(share, p),
        brier_corrected=calibration.brier_corrected(share, p, n, ties),
        brier_reference=None if with_reference is None else calibration.brier(with_reference, p),
        brier_corrected_reference=(
            None if with_reference is None else calibration.brier_corrected(with_reference, p, n, ties)
        ),
    )


def reference_log_ratio(reference: str, preferences: PreferenceSet, progress: Progress | None = None) -> FloatArray:
    """Return log π_ref(a) − log π_ref(b) of each pair, ``(n_pairs,)``, from columns of the data or a causal model."""
    if reference != "data":
        items = preferences.items()
        log_prob = response_log_prob(reference_folder(reference), texts_of(preferences), progress)
        return np.asarray(log_prob[items.a] - log_prob[items.b])
    sides = []
    for name in LOG_PROB_COLUMNS:
        values = as_numbers(preferences.columns[name]) if name in preferences.columns else None
        if values is None:
            remedy = f"give each row numbers in {' and '.join(LOG_PROB_COLUMNS)}, or name a model as --reference"
            raise DataError(f"it has no numeric column {name}", file=preferences.name, remedy=remedy)
        if not np.isfinite(values).all():
            pair = int(np.argmin(np.isfinite(values)))
            remedy = "give the log-probability of every response"
            raise DataError(f"{name} of pair {pair + 1} is missing or not finite", file=preferences.name, remedy=remedy)
        sides.append(values)
    return np.asarray(sides[0] - sides[1])
