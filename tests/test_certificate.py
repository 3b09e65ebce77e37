"""Certificates: every number against its definition."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import run
from test_ensemble import some_ensemble

from pluralign import PreferenceSet, RewardEnsemble, UsageError, certify, fit, town_hall
from pluralign.ensemble.held_out import HeldOutVotes, load_held_out, score_held_out
from pluralign.ensemble.record import DataSummary, EncoderChoice, FitRecord
from pluralign.measuring.certificate import Certificate
from pluralign.measuring.pruning import plan_pruning
from pluralign.theory.guarantees import betting_interval, generalization_bound

PARTS = ("theorem_2", "theorem_3", "theorem_4", "lemma_1", "held_out")


@pytest.fixture(scope="module")
def votes() -> PreferenceSet:
    return town_hall(240, votes_per_pair=(2, 6)).preferences


@pytest.fixture(scope="module")
def held_out(votes: PreferenceSet) -> HeldOutVotes:
    return score_held_out(some_ensemble(), votes)


@pytest.fixture(scope="module")
def certificate(held_out: HeldOutVotes) -> Certificate:
    return certify(some_ensemble(), held_out, epsilon=0.01, beta=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fitted") / "town"
    fit(town_hall(500).preferences, k=3, encoder="none", method="stagewise", test_fraction=0.2, folder=path)
    return path


def test_theorem_2_compares_with_random_annotators(votes: PreferenceSet, certificate: Certificate) -> None:
    p, n = votes.prob_a, votes.n_votes
    variance = np.mean(p * (1 - p) * n / (n - 1))
    found = certificate.theorem_2
    assert found.opinion_variance == pytest.approx(variance)
    assert (found.sufficient_size, found.sufficient_size_here) == (25, math.ceil(variance / 0.01))
    assert found.random_error == pytest.approx(variance / 3)
    assert found.worth_annotators == pytest.approx(variance / certificate.lemma_1.brier_corrected)


def test_theorem_3_agrees_with_pruning(held_out: HeldOutVotes, certificate: Certificate) -> None:
    found, pruned = certificate.theorem_3, plan_pruning(some_ensemble(), held_out, beta=3)
    assert found.pruning.to_json() == pruned.to_json()
    assert found.informative == (pruned.bound < found.constant_half)
    p, n = held_out.preferences.prob_a, held_out.preferences.n_votes
    assert found.constant_half == pytest.approx(np.mean((p - 0.5) ** 2 - p * (1 - p) / (n - 1)))


def test_theorem_4_uses_the_training_pairs_of_the_fit(folder: Path) -> None:
    ensemble = RewardEnsemble.load(folder)
    found = certify(ensemble, load_held_out(folder), delta=0.1).theorem_4
    data = ensemble.record.data
    assert data is not None
    assert (found.pairs, found.prompts) == (data.train_pairs, data.train_prompts)
    assert (found.d, found.k) == (len(ensemble.members.theta), 5 if ensemble.undecided else 3)
    assert found.bound_pairs == found.bound_prompts == math.inf
    assert not found.informative
    assert generalization_bound(found.informative_from, found.d, found.k, 0.1) < 1
    last = ensemble.record.history[-1]
    assert found.measured_gap == pytest.approx(last.test_brier - last.train_brier)
    assert "is vacuous" in found.here


def test_theorem_4_is_informative_with_enough_pairs(held_out: HeldOutVotes, certificate: Certificate) -> None:
    enough = certificate.theorem_4.informative_from
    record = FitRecord(level="vote", data=DataSummary("", "", enough, 10, 0, 0))
    found = certify(replace(some_ensemble(), record=record), held_out).theorem_4
    assert found.informative
    assert 0.99 < found.bound_pairs < 1
    assert found.bound_prompts == math.inf
    tuned = replace(record, encoders=EncoderChoice("tuned", 0.1, 0.1, 0.1, 0.1, None))
    learned = certify(replace(some_ensemble(), record=tuned), held_out).theorem_4
    assert not learned.informative
    assert "trained on the same votes" in learned.here


def test_lemma_1_splits_the_brier_score(votes: PreferenceSet, certificate: Certificate) -> None:
    p, n = votes.prob_a, votes.n_votes
    found = certificate.lemma_1
    assert found.noise.mean == pytest.approx(np.mean(p * (1 - p) / (n - 1)))
    assert found.noise.low < found.noise.mean < found.noise.high
    assert found.brier == pytest.approx(np.mean((some_ensemble().prob_hat(votes) - p) ** 2))
    assert found.brier_corrected == pytest.approx(found.brier - found.noise.mean)


# --- held-out prompts -------------------------------------------------------------------------------------------------


def _votes_on(
    true: np.ndarray, random: np.random.Generator, votes_per_pair: int, pairs_per_prompt: int = 1
) -> PreferenceSet:
    """Return random votes on pairs with the given true shares."""
    n = len(true)
    for_a = random.binomial(votes_per_pair, true)
    return PreferenceSet.from_indices(
        [f"prompt {i}" for i in range(n // pairs_per_prompt)],
        ["Yes.", "No."] + [f"Maybe {j}." for j in range(pairs_per_prompt)],
        np.arange(n) // pairs_per_prompt,
        np.zeros(n, dtype=int),
        1 + np.arange(n) % pairs_per_prompt,
        for_a,
        votes_per_pair - for_a,
    )


def _with_votes(people: PreferenceSet, members: np.ndarray) -> HeldOutVotes:
    """Return held-out votes whose members vote as given; response a has reward 0 in every pair."""
    items = people.items()
    rewards = np.zeros((len(items.prompt_index), members.shape[1]))
    rewards[items.b] = 0.5 - members
    return HeldOutVotes(people, rewards)


def test_intervals_count_prompts_not_pairs(votes: PreferenceSet, certificate: Certificate) -> None:
    error = (some_ensemble().prob_hat(votes) - votes.prob_a) ** 2
    means = [error[votes.prompt_index == g].mean() for g in range(len(votes.prompts))]
    found = certificate.held_out
    assert found.error.mean == pytest.approx(np.mean(means))
    assert (found.error.low, found.error.high) == pytest.approx(betting_interval(means, 0.05), abs=1e-6)
    assert votes.n_votes.min() == 2, "so a corrected error can be as low as −1/4"
    corrected = error - votes.prob_a * (1 - votes.prob_a) / (votes.n_votes - 1)
    means = [corrected[votes.prompt_index == g].mean() for g in range(len(votes.prompts))]
    low, high = betting_interval(means, 0.05, low=-0.25)
    assert (found.true_error.low, found.true_error.high) == pytest.approx((max(0, low), high), abs=1e-6)


def test_the_difference_to_constant_half_is_certified() -> None:
    random = np.random.default_rng(5)
    true = np.where(random.random(400) < 0.5, 0.9, 0.1)
    people = _votes_on(true, random, votes_per_pair=3)
    ensemble = some_ensemble(k=2).take([0, 1], [0.9, 0.1])
    right = np.column_stack([true > 0.5, true < 0.5]).astype(float)
    for members, sign in ((right, -1), (1 - right, 1)):
        found = certify(ensemble, _with_votes(people, members)).held_out
        expected = (0.0 if sign < 0 else 0.8**2) - 0.4**2
        assert found.difference.low <= expected <= found.difference.high
        assert sign * found.difference.low > 0
        assert sign * found.difference.high > 0
        assert ("is lower than" if sign < 0 else "is higher than") in found.here
        assert found.informative == (sign < 0)


def test_the_held_out_bound_uses_the_level_of_the_ensemble(held_out: HeldOutVotes, certificate: Certificate) -> None:
    record = replace(some_ensemble().record, level="policy")
    found = certify(replace(some_ensemble(), record=record), held_out).held_out
    shares = some_ensemble().prob_hat(held_out.preferences, "policy")
    people = held_out.preferences
    means = [np.mean((shares - people.prob_a)[people.prompt_index == g] ** 2) for g in range(len(people.prompts))]
    assert (found.level, certificate.held_out.level) == ("policy", "vote")
    assert "at the policy level" in found.here
    assert found.error.mean == pytest.approx(np.mean(means))


def test_single_votes_bound_the_error_from_above_only(votes: PreferenceSet) -> None:
    majority = (votes.votes_a > votes.votes_b).astype(np.int64)
    single = replace(votes, votes_a=majority, votes_b=1 - majority)
    found = certify(some_ensemble(), single)
    assert math.isnan(found.held_out.true_error.mean)
    assert found.held_out.true_error.high == found.held_out.error.high
    assert not found.lemma_1.informative
    assert found.theorem_2.sufficient_size_here is None


def test_one_prompt_gives_no_informative_bound() -> None:
    people = _votes_on(np.full(6, 0.7), np.random.default_rng(0), votes_per_pair=5, pairs_per_prompt=6)
    found = certify(some_ensemble(k=2).take([0, 1], [0.5, 0.5]), _with_votes(people, np.ones((6, 2))))
    assert found.held_out.prompts == 1
    assert not found.held_out.informative
    assert found.lemma_1.here.endswith("; no interval from fewer than 20 prompts.")
    assert "nan" not in "".join(getattr(found, part).here for part in PARTS)


# --- the command ------------------------------------------------------------------------------------------------------


def test_certify_prints_one_json_object(folder: Path) -> None:
    done = run("certify", folder, "--json", "--epsilon", "0.05")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    facts = json.loads(done.stdout)
    assert set(facts) >= set(PARTS)
    assert all({"states", "here", "informative"} <= set(facts[part]) for part in PARTS)
    assert facts["theorem_2"]["sufficient_size"] == 5
    assert facts["theorem_4"]["bound_pairs"] is None


def test_certify_shows_whether_each_theorem_is_informative(folder: Path, tmp_path: Path) -> None:
    town_hall(200, seed=5).preferences.save(tmp_path / "others.jsonl")
    for arguments, place in (((), "its held-out votes"), ((tmp_path / "others.jsonl",), "others.jsonl")):
        done = run("certify", folder, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert place in done.stdout
        for name in ("Theorem 2", "Theorem 3", "Theorem 4", "Lemma 1", "Held-out prompts"):
            assert name in done.stdout
        assert done.stdout.count(": informative") + done.stdout.count(": vacuous here") == 5


@pytest.mark.parametrize(
    ("option", "value", "match"), [("epsilon", 0.0, "epsilon"), ("delta", 1.0, "delta"), ("beta", 1.0, "at least 2")]
)
def test_parameters_outside_their_range_are_rejected(
    held_out: HeldOutVotes, option: str, value: float, match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        certify(some_ensemble(), held_out, **{option: value})  # type: ignore[arg-type]
