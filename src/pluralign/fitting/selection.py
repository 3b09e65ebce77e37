"""Choices made on validation prompts: the target, the number of members, the temperature.

Each function takes ensembles fitted without the validation prompts, and returns the choice. No test vote is read here.
"""

from collections.abc import Mapping

import numpy as np

from pluralign.core.types import Level
from pluralign.fitting.task import Members
from pluralign.theory import calibration
from pluralign.theory.intervals import clustered_interval
from pluralign.training.bradley_terry import scores
from pluralign.training.pairs import Pairs

BETAS = np.geomspace(0.02, 4.0, 48)
"""Temperatures to try for the policy-level reading, for rewards whose differences have unit spread."""


def validation_brier(members: Members, check: Pairs, level: Level) -> float:
    """Return the Brier score of an ensemble on the validation pairs."""
    return calibration.brier(members.prob_hat(check, level), check.prob_a)


def choose_size(fits: Mapping[int, Members], check: Pairs, level: Level) -> int:
    """Return the smallest k whose validation error is within one standard error of the best."""
    errors = {k: calibration.squared_error(fit.prob_hat(check, level), check.prob_a) for k, fit in fits.items()}
    best = min(errors, key=lambda k: float(errors[k].mean()))
    interval = clustered_interval(errors[best], check.prompt)
    slack = np.nan_to_num(interval.standard_error)  # NaN with one validation prompt
    return min(k for k in errors if errors[k].mean() <= interval.mean + slack)


def choose_temperature(members: Members, check: Pairs) -> float:
    """Return the temperature at which the policy-level reading predicts the validation votes best."""
    difference = scores(check.difference, members.theta)
    errors = []
    for beta in BETAS:
        share = calibration.policy_prob(difference, members.weights, beta)
        errors.append(calibration.brier(calibration.with_undecided(share, members.undecided), check.prob_a))
    return float(BETAS[int(np.argmin(errors))])
