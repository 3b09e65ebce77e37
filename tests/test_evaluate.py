"""Every figure of an evaluation, recomputed in plain Python from votes and weights."""

import functools
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import run
from hypothesis import given, strategies as st
from test_classifier import write_bert, write_llama

from pluralign import DataError, RewardEnsemble, UsageError, load_preferences, town_hall
from pluralign.core.json_values import to_json
from pluralign.core.types import Level
from pluralign.ensemble.members import LinearMembers, fit_feature_map
from pluralign.ensemble.record import Evaluation, FitRecord
from pluralign.learning.measure import Predictor, reward_predictor
from pluralign.measuring.evaluate import BETAS, EvaluateOptions, evaluate, policy_level
from pluralign.measuring.predictors import load_predictor
from pluralign.text.encoders import TextFeatures
from pluralign.text.reference import log_ratio, with_log_probs
from pluralign.text.surface import NAMES
from pluralign.votes.preferences import PreferenceSet, texts_of

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
        record=FitRecord.from_json({"level": level, "baseline_formulas": FORMULAS}),
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


def test_figures_of_both_readings_match_a_direct_computation(votes: PreferenceSet, evaluation: Evaluation) -> None:
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


def test_figures_of_every_baseline_match_a_direct_computation(votes: PreferenceSet, evaluation: Evaluation) -> None:
    shares = shares_by_hand(some_ensemble(), votes)
    assert set(evaluation.baselines) == {"floor", "constant_half", *FORMULAS}
    for name, compared in evaluation.baselines.items():
        assert compared.brier == pytest.approx(brier_by_hand(shares[name], votes), abs=1e-6), name
        assert compared.brier_corrected == pytest.approx(compared.brier - noise_by_hand(votes), abs=1e-9)
        gap = compared.difference
        assert gap.mean == pytest.approx(evaluation.test.brier - compared.brier, abs=1e-9), name
        assert gap.low < gap.mean < gap.high
    assert evaluation.baselines["floor"].brier == pytest.approx(mean([min(p, 1 - p) ** 2 for p in votes.prob_a]))
    assert {name: compared.k for name, compared in evaluation.baselines.items()} == {
        "floor": 1, "constant_half": 1, "soft_bt": 1, "bootstrap": 3, "mixture": 2,
    }  # fmt: skip


def test_member_disagreement_matches_a_direct_computation(votes: PreferenceSet, evaluation: Evaluation) -> None:
    ensemble = some_ensemble()
    people = votes.prob_a.tolist()
    assert [member.weight for member in evaluation.members] == [0.5, 0.25, 0.25, 0.0]
    for j, member in enumerate(evaluation.members):
        own = ensemble.votes(votes)[:, j].tolist()
        assert set(own) <= {0.0, 1.0}
        assert member.disagreement == pytest.approx(mean([abs(v - p) for v, p in zip(own, people, strict=True)]))
        least = mean([min(p, 1 - p) for p in people])
        assert member.regret == pytest.approx(member.disagreement - least)


def test_the_worst_member_ignores_negligible_weights(votes: PreferenceSet, evaluation: Evaluation) -> None:
    ensemble = some_ensemble()
    items = votes.items()
    inputs = ensemble.members.inputs(ensemble.features(texts_of(votes))).astype(float)
    z = (inputs[items.a] - inputs[items.b]) @ ensemble.baselines["bootstrap"]["theta"]
    own = [mean([abs(float(x > 0) - p) for x, p in zip(z[:, j], votes.prob_a, strict=True)]) for j in range(3)]
    assert evaluation.baselines["bootstrap"].worst_disagreement == pytest.approx(max(own[:2]), abs=1e-6)
    assert evaluation.baselines["soft_bt"].worst_disagreement is None


def test_test_figures_use_the_fitted_level(votes: PreferenceSet) -> None:
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


@pytest.mark.parametrize("level", ["vote", "policy"])
def test_first_choices_of_two_are_the_pairs_and_of_three_are_recomputed(level: str) -> None:
    ensemble, ranked = some_ensemble(level), load_preferences("demo-rankings:240")
    assert ranked.judgments is not None
    found = evaluate(ensemble, ranked, groups=[])
    assert [one.t for one in found.first_choices] == [2, 3, 4]
    two = found.first_choices[0]
    baseline = found.baselines["soft_bt"]
    assert (two.sets, two.error) == pytest.approx((len(ranked), 2 * found.test.brier))
    assert (two.corrected, two.soft_bt) == pytest.approx((2 * found.test.brier_corrected, 2 * baseline.brier))
    for end in ("mean", "low", "high"):
        assert getattr(two.interval, end) == pytest.approx(2 * getattr(found.test.interval, end), nan_ok=True)
        assert getattr(two.difference, end) == pytest.approx(2 * getattr(baseline.difference, end), nan_ok=True)
    judged = ranked.judgments.restricted(np.arange(len(ranked.judgments.response)) % 25 > 1)  # some rank only three
    three = evaluate(ensemble, replace(ranked, judgments=judged), groups=[]).first_choices[1]
    first: dict[tuple[int, ...], list[int]] = {}
    for row in range(len(judged)):
        order = judged.response[judged.start[row] : judged.start[row + 1]].tolist()
        for chosen in itertools.combinations(order, 3):
            first.setdefault((int(judged.prompt[row]), *sorted(chosen)), []).append(chosen[0])
    errors, uniform = [], []
    for (prompt, *texts), best in first.items():
        share = [best.count(text) / len(best) for text in texts]
        rewards = ensemble.rewards([(ranked.prompts[prompt], ranked.responses[text]) for text in texts])
        policy = np.exp(rewards / ensemble.temperature) if level == "policy" else rewards == rewards.max(axis=0)
        q = (policy / policy.sum(axis=0)) @ ensemble.weights
        errors.append(((q - share) ** 2).sum())
        uniform.append(sum((1 / 3 - one) ** 2 for one in share))
    assert (three.sets, three.error) == pytest.approx((len(errors), mean(errors)), rel=1e-4)
    assert three.uniform == pytest.approx(mean(uniform))


def test_single_votes_have_an_interval_but_no_corrected_figure(votes: PreferenceSet) -> None:
    majority = (votes.votes_a > votes.votes_b).astype(np.int64)
    single = replace(votes, votes_a=majority, votes_b=1 - majority)
    found = evaluate(some_ensemble(), single)
    assert math.isnan(found.test.noise)
    assert math.isnan(found.test.brier_corrected)
    assert found.test.interval.mean == pytest.approx(found.test.brier)
    assert found.test.interval.low < found.test.brier < found.test.interval.high


def test_half_counted_ties_are_removed_from_the_noise() -> None:
    votes = PreferenceSet.from_columns(
        ["x", "y"], ["Yes.", "I might, perhaps."], ["No, never!", "Rum?"], [2, 1], [1, 2], ties=[1, 1], tie_rule="half"
    )
    figures = evaluate(some_ensemble(), votes).test
    shares = [2.5 / 4, 1.5 / 4]
    assert figures.noise == pytest.approx(mean([(p * (1 - p) - 1 / 16) / 3 for p in shares]))
    assert all(value is not None for value in asdict(figures).values())


# --- other subjects ---------------------------------------------------------------------------------------------------


def write_scores(path: Path, votes: PreferenceSet, score: Any) -> Path:
    lines = ({"prompt": p, "response": r, "score": score(r)} for p, r in texts_of(votes))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_shares(path: Path, votes: PreferenceSet, shares: npt.NDArray[np.float64]) -> Path:
    lines = ({"prob_hat": share} for share in shares.tolist())
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_another_reward_is_measured_in_each_reading(votes: PreferenceSet, tmp_path: Path) -> None:
    found = evaluate(write_scores(tmp_path / "scores.jsonl", votes, len), votes)
    longer = [len(votes.responses[a]) - len(votes.responses[b])
              for a, b in zip(votes.a_index, votes.b_index, strict=True)]  # fmt: skip
    assert set(found.levels) == {"vote", "policy", "tempered"}
    by_hand = [0.5 * ((z > 0) + (z >= 0)) for z in longer]
    assert found.levels["vote"].brier == pytest.approx(brier_by_hand(by_hand, votes))
    assert found.test == found.levels["policy"]
    assert found.levels["tempered"].brier < min(found.levels["vote"].brier, found.levels["policy"].brier)
    assert set(found.baselines) == {"floor", "constant_half"}
    assert [member.weight for member in found.members] == [1.0]
    assert (found.subject.kind, found.subject.k) == ("scores", 1)


def test_a_file_of_probabilities_is_measured_as_given(votes: PreferenceSet, tmp_path: Path) -> None:
    ensemble = some_ensemble()
    path = write_shares(tmp_path / "shares.jsonl", votes, ensemble.prob_hat(votes))
    found = evaluate(path, votes, against=[ensemble])
    own = evaluate(ensemble, votes)
    assert found.test == own.test
    assert (found.level, list(found.levels), found.members, found.policy) == ("prob", ["prob"], [], None)
    assert found.majority["contested"] == own.majority["contested"]
    assert to_json(found.groups) == to_json(own.groups)  # NaN is null there
    assert found.adversarial == own.adversarial
    assert found.against[0].readings["vote"].difference.mean == pytest.approx(0)


def test_rivals_are_compared_in_each_reading(votes: PreferenceSet, tmp_path: Path) -> None:
    ensemble = some_ensemble()
    some_ensemble("policy", seed=1).save(tmp_path / "other")
    scores = write_scores(tmp_path / "scores.jsonl", votes, len)
    found = evaluate(ensemble, votes, against=[tmp_path / "other", scores])
    other, reward = found.against
    compared = str(found).splitlines()[-2:]
    assert [any(name in line for name in ("other", scores.name)) for line in compared] == [True, True]
    assert (other.kind, other.level, other.name) == ("ensemble", "policy", str(tmp_path / "other"))
    assert set(other.readings) == {"vote", "policy"}
    assert set(reward.readings) == {"vote", "policy", "tempered"}
    alone = evaluate(tmp_path / "other", votes)
    for level, figures in alone.levels.items():
        assert other.readings[level].brier == pytest.approx(figures.brier)
        assert other.readings[level].difference.mean == pytest.approx(found.test.brier - figures.brier)
        assert other.readings[level].worst_disagreement == max(m.disagreement for m in alone.members if m.weight > 0)
    assert reward.readings["vote"].difference.low < reward.readings["vote"].difference.high


@pytest.mark.slow
def test_a_reward_model_can_be_evaluated_and_compared_with(tmp_path: Path) -> None:
    votes = PreferenceSet.from_columns(
        ["tea ?", "rum ?", "tea ?"], ["yes .", "no .", "never ."], ["no .", "yes .", "yes ."], [4, 3, 2], [1, 2, 2]
    )
    folder = write_bert(tmp_path / "reward", 3)
    found = evaluate(folder, votes, against=[some_ensemble(), folder])
    assert found.subject.note == "3 rewards, read as members of equal weight"
    assert found.test.brier == pytest.approx(brier_by_hand(load_predictor(folder, votes).prob_hat.tolist(), votes))
    assert found.against[1].readings["vote"].difference.mean == 0
    assert len(found.members) == 3


# --- the policy level -------------------------------------------------------------------------------------------------


def a_subject(difference: npt.NDArray[np.float64], votes: PreferenceSet) -> Predictor:
    k = difference.shape[1]
    return reward_predictor("r", "scores", difference, np.full(k, 1 / k), votes)


def test_the_policy_level_is_measured_for_every_beta(votes: PreferenceSet) -> None:
    ensemble = some_ensemble()
    table = evaluate(ensemble, votes, betas=[0.5]).policy
    assert table is not None
    assert [row.beta for row in table.rows] == sorted({*BETAS, 0.5, 3.0, 0.0}, reverse=True)
    reward_a, reward_b = (side.tolist() for side in ensemble.pair_rewards(votes))
    for row in table.rows[:-1]:
        shares = [
            sum(w * sigma((x - y) / row.beta) for w, x, y in zip(ensemble.weights, a, b, strict=True))
            if row.beta > 0.1 else math.nan
            for a, b in zip(reward_a, reward_b, strict=True)
        ]  # fmt: skip
        if row.beta > 0.1:
            assert row.brier == pytest.approx(brier_by_hand(shares, votes), abs=1e-9)
        assert row.brier_corrected == pytest.approx(row.brier - noise_by_hand(votes))
        assert row.brier_reference is None
    assert table.rows[-1].brier == pytest.approx(evaluate(ensemble, votes).levels["vote"].brier)


@given(st.integers(0, 50), st.booleans())
def test_the_policy_level_converges_to_votes_as_beta_goes_to_zero(seed: int, with_reference: bool) -> None:
    """|p̄ − p̂| ≤ Σ α σ(−|Δr|/β + |log-ratio|), which falls to 0 with β; for one reward the distance itself falls."""
    from pluralign.theory.calibration import policy_prob

    random = np.random.default_rng(seed)
    difference = random.choice([-1, 1], size=(40, 3)) * random.uniform(0.2, 3, size=(40, 3))
    ratio = random.normal(size=40) if with_reference else np.zeros(40)
    weights = np.full(3, 1 / 3)
    votes = (difference > 0) @ weights
    bounds = []
    for beta in (1.0, 0.3, 0.1, 0.03, 0.01):
        distance = np.abs(policy_prob(difference, weights, beta, ratio) - votes)
        bounds.append((1 / (1 + np.exp(np.abs(difference) / beta - np.abs(ratio)[:, None]))) @ weights)
        assert (distance <= bounds[-1] + 1e-12).all()
    assert (np.diff(bounds, axis=0) <= 0).all()
    assert bounds[-1].max() < 1e-6
    alone = [np.abs(policy_prob(difference[:, :1], [1.0], beta) - (difference[:, 0] > 0)) for beta in BETAS]
    assert (np.diff(alone, axis=0) <= 0).all()


def test_a_reference_from_columns_moves_every_share(votes: PreferenceSet) -> None:
    random = np.random.default_rng(0)
    log_a, log_b = random.normal(size=(2, len(votes)))
    with_columns = replace(votes, columns={"logprob_a": log_a, "logprob_b": np.array([str(x) for x in log_b], object)})
    difference = random.normal(size=(len(votes), 2))
    difference[:5] = 0
    table = policy_level(a_subject(difference, with_columns), with_columns, EvaluateOptions(reference="data"))
    assert table is not None
    assert table.reference == "data"
    row = next(row for row in table.rows if row.beta == 1.0)
    shares = [mean([sigma(z + x - y) for z in zs]) for zs, x, y in zip(difference.tolist(), log_a, log_b, strict=True)]
    assert row.brier_reference == pytest.approx(brier_by_hand(shares, votes))
    assert row.brier_reference != row.brier
    limit = [
        mean([sigma(x - y) if z == 0 else float(z > 0) for z in zs])
        for zs, x, y in zip(difference.tolist(), log_a, log_b, strict=True)
    ]
    assert table.rows[-1].brier_reference == pytest.approx(brier_by_hand(limit, votes)), "where rewards tie, it decides"


def test_a_missing_reference_raises_data_error(votes: PreferenceSet, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"it has no numeric column logprob_a; give each row numbers in logprob_a"):
        evaluate(some_ensemble(), votes, reference="data")
    holes = replace(votes, columns=dict.fromkeys(("logprob_a", "logprob_b"), np.full(len(votes), np.nan)))
    with pytest.raises(DataError, match=r"logprob_a of pair 1 is missing or not finite"):
        with_log_probs("data", holes)
    for beta in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="beta must be above 0"):
            evaluate(some_ensemble(), votes, betas=[beta])
    shares = write_shares(tmp_path / "shares.jsonl", votes, votes.prob_a)
    with pytest.raises(UsageError, match=r"shares\.jsonl has probabilities, but the policy level needs rewards"):
        evaluate(shares, votes, betas=[1.0])
    with pytest.raises(UsageError, match=r"cannot be grouped by 'lenght'; did you mean 'length'"):
        evaluate(some_ensemble(), votes, groups=["lenght"])


@pytest.mark.slow
def test_a_reference_model_shifts_shares_to_likelier_responses(tmp_path: Path) -> None:
    from pluralign.text.causal import response_log_prob

    votes = PreferenceSet.from_columns(["tea ?", "rum ?"], ["yes .", "no ."], ["no , never .", "yes ."], [4, 3], [1, 2])
    folder = write_llama(tmp_path / "reference", "CausalLM")
    sides = [response_log_prob(folder, list(zip(["tea ?", "rum ?"], texts, strict=True)))
             for texts in (["yes .", "no ."], ["no , never .", "yes ."])]  # fmt: skip
    np.testing.assert_allclose(log_ratio(with_log_probs(str(folder), votes)), sides[0] - sides[1], atol=1e-4)


# --- the command ------------------------------------------------------------------------------------------------------


def test_json_output_has_every_figure(tmp_path: Path, votes: PreferenceSet) -> None:
    some_ensemble().save(tmp_path / "ensemble")
    data = tmp_path / "votes.jsonl"
    replace(votes, columns={"country": np.array(["uk", "fr"] * 120, dtype=object)}).save(data)
    scores = write_scores(tmp_path / "scores.jsonl", votes, len)
    options = ["--group", "country", "--group", "length", "--beta", "0.5", "--seed", "3"]
    done = run("evaluate", tmp_path / "ensemble", data, "--against", scores, *options, "--json")
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert list(facts["groups"]) == ["country", "length"]
    assert [group["name"] for group in facts["groups"]["country"]] == ["fr", "uk"]
    assert 0.5 in [row["beta"] for row in facts["policy"]["rows"]]
    same = evaluate(some_ensemble(), replace(votes, columns={"country": np.array(["uk", "fr"] * 120, dtype=object)}),
                    groups=["country", "length"], against=[scores], seed=3)  # fmt: skip
    assert facts["worst_group"]["interval"] == asdict(same)["worst_group"]["interval"]
    assert facts["adversarial"] == asdict(same)["adversarial"]
    assert facts["against"][0]["readings"]["tempered"]["brier"] == same.against[0].readings["tempered"].brier


def test_terminal_output_shows_majority_shares(tmp_path: Path, votes: PreferenceSet) -> None:
    data = tmp_path / "votes.jsonl"
    renamed = np.array([f"[bold]{prompt}" for prompt in votes.prompts], dtype=object)
    marked = replace(votes, prompts=renamed, columns={"kind": np.array(["[red]"] * 240, dtype=object)})
    marked.save(data)
    scores = write_scores(tmp_path / "[b]scores.jsonl", marked, len)
    some_ensemble().save(tmp_path / "ensemble")
    options: list[str | Path] = ["--against", tmp_path / "ensemble", "--group", "kind", "--group", "length"]
    page = run("evaluate", scores, data, *options, columns=160)
    assert page.returncode == 0, page.stderr
    text = " ".join(page.stdout.split())
    for words in ("[b]scores.jsonl: votes", "[b]scores.jsonl: σ(Δr/T)", "ensemble: policies", "Majority share",
                  "contested", "By length", "[red]", "Worst group", "→ 0 (hard votes)",
                  "predicting ½ for every pair"):  # fmt: skip
        assert words in text, words
    assert "Members" not in text
    shares = write_shares(tmp_path / "shares.jsonl", votes, votes.prob_a)
    page = run("evaluate", shares, data, columns=160)
    assert page.returncode == 0, page.stderr
    assert "shares.jsonl: as given" in page.stdout
    assert "Policy level" not in page.stdout
