"""Training with a reference policy (App. A): members at the policy level learn what the reference does not explain."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from simulated import numeric_gradient, paired, swapped

from pluralign import DataError, RewardEnsemble, UsageError, evaluate, fit, town_hall
from pluralign.ensemble.held_out import load_held_out
from pluralign.ensemble.record import Evaluation
from pluralign.learning.bradley_terry import bradley_terry_loss, fit_bradley_terry, fit_em, fit_teacher
from pluralign.learning.pairs import Members, Pairs, soft_votes, validation_folds
from pluralign.learning.policy_level import PolicyOptions, policy_loss, train_policy_level
from pluralign.theory.calibration import brier, sigmoid
from pluralign.votes.preferences import PreferenceSet


@cache
def mixture() -> tuple[Pairs, np.ndarray]:
    """Pairs with few votes by two policies with a reference of known log-ratios, and the true shares."""
    rng = np.random.default_rng(3)
    difference, ratio = 2 * rng.standard_normal((900, 4)), 1.5 * rng.standard_normal(900)
    share = sigmoid(difference @ np.array([[1.0, -1.0], [0.5, 1.0], [0, 0], [0, 0]]) + ratio[:, None]) @ [0.6, 0.4]
    return replace(paired(difference, rng.binomial(5, share) / 5), log_ratio=ratio), share


def trained(pairs: Pairs, vote_share: float = 0.3) -> Members:
    teacher = fit_teacher(pairs, validation_folds(pairs.prompt))
    return train_policy_level(pairs, teacher, 2, PolicyOptions(vote_share, 0.003))


def test_the_reference_lowers_the_error_where_people_follow_it() -> None:
    pairs, share = mixture()
    rows = np.arange(len(pairs)) < 600
    train, test, truth = pairs[rows], pairs[~rows], share[~rows]
    with_it = brier(trained(train).prob_hat(test, "policy"), truth)
    without = brier(trained(replace(train, log_ratio=0.0)).prob_hat(replace(test, log_ratio=0.0), "policy"), truth)
    assert with_it < 0.01 < 0.03 < without


def test_a_log_ratio_of_zero_changes_no_digit() -> None:
    pairs, _ = mixture()
    plain, zero = (trained(replace(pairs[np.arange(300)], log_ratio=ratio)) for ratio in (0.0, np.zeros(300)))
    np.testing.assert_array_equal(plain.theta, zero.theta)
    np.testing.assert_array_equal(plain.weights, zero.weights)


def test_swapping_responses_and_the_sign_of_the_log_ratio_changes_nothing() -> None:
    pairs, _ = mixture()
    rows = np.random.default_rng(0).random(len(pairs)) < 0.5
    other = replace(swapped(pairs, rows), log_ratio=np.where(rows, -np.asarray(pairs.log_ratio), pairs.log_ratio))
    fits = [trained(one, vote_share=1.0) for one in (pairs, other)]  # a swap would change the random rotated pairs
    one, two = (fit.prob_hat(pairs, "policy") for fit in fits)
    np.testing.assert_allclose(two, one, atol=2e-3)
    np.testing.assert_allclose(fits[0].prob_hat(other, "policy"), np.where(rows, 1 - one, one), atol=1e-12)


def test_gradients_with_log_ratios_equal_finite_differences() -> None:
    rng = np.random.default_rng(1)
    x, p, ratio, weight = rng.standard_normal((25, 3)), rng.random(25), rng.standard_normal(25), rng.dirichlet([1] * 25)
    loss, unknowns = policy_loss(x, p, 0.1, 2, weight, log_ratio=ratio), rng.standard_normal(8)
    np.testing.assert_allclose(loss(unknowns)[1], numeric_gradient(lambda at: loss(at)[0], unknowns), atol=1e-8)
    theta = fit_bradley_terry(x, p, 0.01, log_ratio=ratio)
    slope = numeric_gradient(lambda at: bradley_terry_loss(at, x, p, 0.01, log_ratio=ratio), theta)
    np.testing.assert_allclose(slope, 0, atol=1e-4)


def test_em_recovers_the_groups_behind_a_reference() -> None:
    pairs, share = mixture()
    x = np.asarray(pairs.difference)
    guide = fit_bradley_terry(x, share, 1e-4, log_ratio=pairs.log_ratio)
    members, weights = fit_em(x, share, guide, 2, l2=1e-4, rounds=60, log_ratio=pairs.log_ratio)
    assert brier(soft_votes(pairs, members) @ weights, share) < 0.002


# --- a whole fit ------------------------------------------------------------------------------------------------------


def town(scale: float = 2.0) -> PreferenceSet:
    """Votes of the town hall where people also follow a reference, with its log-probabilities in columns."""
    votes, rng = town_hall(400).preferences, np.random.default_rng(5)
    sides = scale * rng.standard_normal((2, len(votes)))
    p = np.clip(votes.prob_a, 0.05, 0.95)
    share = sigmoid(np.log(p / (1 - p)) + sides[0] - sides[1])
    a = rng.binomial(5, share)
    columns = {"logprob_a": sides[0], "logprob_b": sides[1]}
    return replace(
        votes, votes_a=a.astype(votes.votes_a.dtype), votes_b=(5 - a).astype(votes.votes_b.dtype), columns=columns,
        judgments=None,
    )  # fmt: skip


def fitted(votes: PreferenceSet, **changes: Any) -> RewardEnsemble:
    return fit(votes, **{"k": 2, "encoder": "none", "level": "policy", **changes})


def evaluation_of(ensemble: RewardEnsemble) -> Evaluation:
    assert ensemble.record.evaluation is not None
    return ensemble.record.evaluation


def test_a_fit_with_a_reference_is_measured_with_it(tmp_path: Any) -> None:
    votes = town()
    ensemble, plain = fitted(votes, reference="data", folder=tmp_path / "one", folds=2), fitted(votes)
    found, without = evaluation_of(ensemble), evaluation_of(plain)
    assert ensemble.reference == ensemble.record.options["reference"] == "data"
    assert plain.reference is None
    assert found.test.brier < 0.7 * without.test.brier
    assert found.baselines["soft_bt"].brier < 0.7 * without.baselines["soft_bt"].brier, "soft BT has it too"
    assert ensemble.record.history[-1].test_brier == pytest.approx(found.test.brier, abs=1e-6)
    assert ensemble.record.cross_validation is not None
    assert ensemble.record.cross_validation.test.brier < 0.7 * without.test.brier

    again = evaluate(ensemble, votes)
    assert again.test.brier == pytest.approx(found.test.brier, abs=1e-9)
    assert "reference policy data" in again.subject.note
    assert again.policy is not None
    row = next(row for row in again.policy.rows if row.beta == 1.0)
    assert row.brier_reference == pytest.approx(again.test.brier)
    off = evaluate(ensemble, votes, reference="none", against=[ensemble])
    assert off.test.brier == pytest.approx(row.brier)
    assert off.against[0].readings["policy"].brier == pytest.approx(again.test.brier)
    held_out = load_held_out(tmp_path / "one")
    assert brier(held_out.prob_hat(ensemble), held_out.preferences.prob_a) == pytest.approx(found.test.brier)
    bare = replace(votes, columns={})
    with pytest.raises(DataError, match="no numeric column logprob_a"):
        evaluate(ensemble, bare)
    assert evaluate(ensemble, bare, reference="none").test.brier == pytest.approx(row.brier)


def test_a_reference_that_favours_neither_gives_the_figures_without_it() -> None:
    votes = town(0.0)
    with_it, without = (evaluation_of(fitted(votes, reference=reference)) for reference in ("data", None))
    assert with_it.test.scores == without.test.scores
    assert {name: one.brier for name, one in with_it.baselines.items()} == {
        name: one.brier for name, one in without.baselines.items()
    }


WRONG: Sequence[dict[str, Any]] = [
    {"level": "vote"}, {"method": "stagewise", "level": "vote"}, {"pooling": "attention"}, {"backbone": "minilm"},
]  # fmt: skip


@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_a_reference_that_has_no_effect_raises_usage_error(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="reference has no effect with"):
        fitted(town(), reference="data", **changes)


def test_votes_without_log_probabilities_raise_data_error() -> None:
    with pytest.raises(DataError, match="no numeric column logprob_a; give each row numbers"):
        fitted(replace(town(), columns={}), reference="data")


def test_a_reference_that_decides_alone_is_noted() -> None:
    notes = [fitted(town(scale), reference="data").record.notes or [] for scale in (2.0, 20.0)]
    assert ["reference policy" in " ".join(one) for one in notes] == [False, True]
