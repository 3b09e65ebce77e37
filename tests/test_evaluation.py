"""Every figure of an evaluation, recomputed in plain Python from votes and weights."""

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import numpy.typing as npt
import pytest

from pluralign.demo import town_hall
from pluralign.ensemble import RewardEnsemble, TextFeatures, texts_of
from pluralign.evaluation import Evaluation, evaluate, evaluate_features
from pluralign.members import LinearMembers, fit_feature_map
from pluralign.options import Level
from pluralign.preferences import PreferenceSet
from pluralign.surface import NAMES

FORMULAS = {"soft_bt": "bradley-terry", "bootstrap": "votes", "mixture": "mixture"}


@pytest.fixture(scope="module")
def votes() -> PreferenceSet:
    return town_hall(240, votes_per_pair=(2, 6)).preferences


@functools.cache
def some_features() -> npt.NDArray[np.float32]:
    return TextFeatures("none")(texts_of(town_hall(40).preferences))


def some_ensemble(level: str = "vote", seed: int = 0) -> RewardEnsemble:
    random = np.random.default_rng(seed)
    raw = some_features()
    d = len(NAMES)
    return RewardEnsemble(
        LinearMembers(fit_feature_map(raw, d), random.standard_normal((d, 4))),
        np.array([0.5, 0.25, 0.25, 0.0]),
        TextFeatures("none"),
        temperature=3.0,
        facts={"level": level, "baseline_formulas": FORMULAS},
        baselines={
            "soft_bt": {"theta": random.standard_normal(d) / 4, "temperature": np.array(2.0)},
            "bootstrap": {"theta": random.standard_normal((d, 3)), "weights": np.array([0.5, 0.5, 0.0])},
            "mixture": {"theta": random.standard_normal((d, 2)) / 4, "weights": np.array([0.3, 0.7])},
        },
    )


@pytest.fixture(scope="module")
def evaluation(votes: PreferenceSet) -> Evaluation:
    return evaluate(some_ensemble(), votes)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def brier_by_hand(predicted: Sequence[float], votes: PreferenceSet) -> float:
    return mean([(q - p) ** 2 for q, p in zip(predicted, votes.prob_a.tolist(), strict=True)])


def noise_by_hand(votes: PreferenceSet) -> float:
    return mean([p * (1 - p) / (n - 1) for p, n in zip(votes.prob_a.tolist(), votes.n_votes.tolist(), strict=True)])


def sigma(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def shares_by_hand(ensemble: RewardEnsemble, votes: PreferenceSet) -> dict[str, list[float]]:
    """Predicted shares of both readings and all baselines, pair by pair."""
    items = votes.items()
    inputs = ensemble.members.inputs(ensemble.features(texts_of(votes))).astype(float)
    delta = inputs[items.a] - inputs[items.b]
    reward_a, reward_b = ensemble.pair_rewards(votes)
    bootstrap, mixture, soft = (ensemble.baselines[name] for name in ("bootstrap", "mixture", "soft_bt"))
    weights = ensemble.weights.tolist()
    return {
        "vote": [
            sum(w * (x > y) for w, x, y in zip(weights, a, b, strict=True))
            for a, b in zip(reward_a.tolist(), reward_b.tolist(), strict=True)
        ],
        "policy": [
            sum(w * sigma((x - y) / ensemble.temperature) for w, x, y in zip(weights, a, b, strict=True))
            for a, b in zip(reward_a.tolist(), reward_b.tolist(), strict=True)
        ],
        "floor": [float(p > 0.5) for p in votes.prob_a],
        "constant_half": [0.5] * len(votes),
        "soft_bt": [sigma(z / 2) for z in (delta @ soft["theta"]).tolist()],
        "bootstrap": [
            sum(w * (z > 0) for w, z in zip(bootstrap["weights"].tolist(), row, strict=True))
            for row in (delta @ bootstrap["theta"]).tolist()
        ],
        "mixture": [
            sum(w * sigma(z) for w, z in zip(mixture["weights"].tolist(), row, strict=True))
            for row in (delta @ mixture["theta"]).tolist()
        ],
    }


def test_both_readings_are_judged_as_by_hand(votes: PreferenceSet, evaluation: Evaluation) -> None:
    shares = shares_by_hand(some_ensemble(), votes)
    for level, figures in evaluation.levels.items():
        assert figures.brier == pytest.approx(brier_by_hand(shares[level], votes), abs=1e-9)
        assert figures.noise == pytest.approx(noise_by_hand(votes), abs=1e-12)
        assert figures.brier_corrected == pytest.approx(figures.brier - figures.noise, abs=1e-9)
        log_loss = -mean(
            [
                p * math.log(min(max(q, 1e-6), 1 - 1e-6)) + (1 - p) * math.log(1 - min(max(q, 1e-6), 1 - 1e-6))
                for q, p in zip(shares[level], votes.prob_a.tolist(), strict=True)
            ]
        )
        assert figures.log_loss == pytest.approx(log_loss, abs=1e-6)
        assert figures.interval.mean == pytest.approx(figures.brier_corrected, abs=1e-9)
        assert figures.interval.low < figures.interval.mean < figures.interval.high
        assert 0 <= figures.calibration_error <= 1


def test_every_baseline_is_there_and_judged_as_by_hand(votes: PreferenceSet, evaluation: Evaluation) -> None:
    shares = shares_by_hand(some_ensemble(), votes)
    assert set(evaluation.baselines) == {"floor", "constant_half", *FORMULAS}
    for name, compared in evaluation.baselines.items():
        assert compared.brier == pytest.approx(brier_by_hand(shares[name], votes), abs=1e-6), name
        assert compared.brier_corrected == pytest.approx(compared.brier - noise_by_hand(votes), abs=1e-9)
    assert evaluation.baselines["floor"].brier == pytest.approx(mean([min(p, 1 - p) ** 2 for p in votes.prob_a]))
    assert {name: compared.k for name, compared in evaluation.baselines.items()} == {
        "floor": 1, "constant_half": 1, "soft_bt": 1, "bootstrap": 3, "mixture": 2,
    }  # fmt: skip


def test_a_difference_is_ours_less_the_baselines_pair_by_pair(votes: PreferenceSet, evaluation: Evaluation) -> None:
    for name, compared in evaluation.baselines.items():
        gap = compared.difference
        assert gap.mean == pytest.approx(evaluation.test.brier - compared.brier, abs=1e-9), name
        assert gap.low < gap.mean < gap.high


def test_an_ensemble_that_predicts_the_votes_is_ahead_of_everything(votes: PreferenceSet) -> None:
    """Turn the votes to what the ensemble says: then its error is none, and every difference is below zero."""
    ensemble = some_ensemble()
    said = np.round(4 * ensemble.prob_hat(votes)).astype(int)
    echo = replace(votes, votes_a=said, votes_b=4 - said, ties=np.zeros(len(votes), dtype=np.int64))
    found = evaluate(ensemble, echo)
    assert found.test.brier == pytest.approx(0.0, abs=1e-20)
    for name in ("constant_half", "soft_bt", "bootstrap", "mixture"):
        assert found.baselines[name].difference.high < 0, name
    assert evaluate(ensemble, echo.swapped()).test.brier == pytest.approx(0.0, abs=1e-20), "nor in the other order"
    wrong = replace(echo, votes_a=4 - said, votes_b=said)
    assert evaluate(ensemble, wrong).baselines["constant_half"].difference.low > 0


def test_members_are_judged_by_how_often_they_and_people_differ(votes: PreferenceSet, evaluation: Evaluation) -> None:
    ensemble = some_ensemble()
    people = votes.prob_a.tolist()
    assert [member.weight for member in evaluation.members] == [0.5, 0.25, 0.25, 0.0]
    for j, member in enumerate(evaluation.members):
        own = ensemble.votes(votes)[:, j].tolist()
        assert set(own) <= {0.0, 1.0}
        assert member.disagreement == pytest.approx(mean([abs(v - p) for v, p in zip(own, people, strict=True)]))
        least = mean([min(p, 1 - p) for p in people])
        assert member.regret == pytest.approx(member.disagreement - least)


def test_the_worst_member_of_a_baseline_is_one_that_has_weight(votes: PreferenceSet, evaluation: Evaluation) -> None:
    ensemble = some_ensemble()
    items = votes.items()
    inputs = ensemble.members.inputs(ensemble.features(texts_of(votes))).astype(float)
    z = (inputs[items.a] - inputs[items.b]) @ ensemble.baselines["bootstrap"]["theta"]
    own = [mean([abs(float(x > 0) - p) for x, p in zip(z[:, j], votes.prob_a, strict=True)]) for j in range(3)]
    assert evaluation.baselines["bootstrap"].worst_disagreement == pytest.approx(max(own[:2]), abs=1e-6)
    assert evaluation.baselines["soft_bt"].worst_disagreement is None


def test_the_test_figures_are_those_of_the_level_it_was_fitted_for(votes: PreferenceSet) -> None:
    levels: tuple[Level, ...] = ("vote", "policy")
    found = {level: evaluate(some_ensemble(level), votes) for level in levels}
    for level, evaluation in found.items():
        assert evaluation.level == level
        assert evaluation.test == evaluation.levels[level]
    assert found["vote"].levels == found["policy"].levels
    assert found["vote"].test.brier != found["policy"].test.brier
    soft = found["policy"]
    assert soft.baselines["soft_bt"].difference.mean == pytest.approx(soft.test.brier - soft.baselines["soft_bt"].brier)


def test_reliability_and_strata_account_for_every_pair(votes: PreferenceSet, evaluation: Evaluation) -> None:
    curve = evaluation.reliability
    assert curve.count.sum() == len(votes) == evaluation.pairs
    assert evaluation.prompts == len(votes.prompts)
    assert (curve.count @ curve.predicted) / len(votes) == pytest.approx(some_ensemble().prob_hat(votes).mean())
    assert (curve.count @ curve.observed) / len(votes) == pytest.approx(votes.prob_a.mean())
    assert sum(count for count, _ in evaluation.strata.values()) == len(votes)
    total = math.fsum(count * error for count, error in evaluation.strata.values() if count)
    assert total / len(votes) == pytest.approx(evaluation.test.brier)


def test_features_at_hand_give_the_same_evaluation(votes: PreferenceSet, evaluation: Evaluation) -> None:
    ensemble = some_ensemble()
    again = evaluate_features(ensemble, votes, ensemble.features(texts_of(votes)))
    assert again.test == evaluation.test
    assert again.members == evaluation.members
    assert again.baselines == evaluation.baselines


def test_single_votes_leave_no_corrected_figure_but_an_interval(votes: PreferenceSet) -> None:
    majority = (votes.votes_a > votes.votes_b).astype(np.int64)
    single = replace(votes, votes_a=majority, votes_b=1 - majority)
    found = evaluate(some_ensemble(), single)
    assert math.isnan(found.test.noise)
    assert math.isnan(found.test.brier_corrected)
    assert found.test.interval.mean == pytest.approx(found.test.brier)
    assert found.test.interval.low < found.test.brier < found.test.interval.high


def test_ties_that_count_half_are_taken_out_of_the_noise() -> None:
    votes = PreferenceSet.from_columns(
        ["x", "y"], ["Yes.", "I might, perhaps."], ["No, never!", "Rum?"], [2, 1], [1, 2], ties=[1, 1], tie_rule="half"
    )
    figures = evaluate(some_ensemble(), votes).test
    shares = [2.5 / 4, 1.5 / 4]
    assert figures.noise == pytest.approx(mean([(p * (1 - p) - 1 / 16) / 3 for p in shares]))
    assert all(value is not None for value in asdict(figures).values())
