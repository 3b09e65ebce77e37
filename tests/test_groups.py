"""Calibration within groups, against plain recomputation and simulated votes whose truth is known."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pluralign import PreferenceSet, UsageError
from pluralign.core.arrays import FloatArray
from pluralign.measuring import groups
from pluralign.measuring.evaluate import majority_shares
from pluralign.votes.prompts import Message
from pluralign.votes.values import as_numbers


def some_votes(n: int = 240, n_votes: int = 5, seed: int = 0, **columns: Any) -> tuple[PreferenceSet, FloatArray]:
    """Votes of a known truth, four pairs a prompt, and that truth."""
    random = np.random.default_rng(seed)
    truth = random.uniform(size=n)
    drawn = random.binomial(n_votes, truth)
    texts = ["word " * int(length) for length in random.integers(1, 60, size=2 * n)]
    numbered = [f"{text}{i}" for i, text in enumerate(texts)]
    prompts = [f"question {i // 4}" for i in range(n)]
    votes = PreferenceSet.from_columns(prompts, numbered[:n], numbered[n:], drawn, n_votes - drawn, columns=columns)
    return votes, truth


# --- grouping ---------------------------------------------------------------------------------------------------------


def test_length_groups_use_the_ratio_of_lengths() -> None:
    lengths = [(100, 100), (109, 100), (100, 110), (149, 100), (100, 151), (249, 100), (100, 900), (0, 1), (0, 5)]
    votes = PreferenceSet.from_columns(
        ["x"] * 9, ["a" * a for a, _ in lengths], ["b" * b for _, b in lengths], [1] * 9, [1] * 9
    )
    near, more, twice, far = "1 to 1.1", "1.1 to 1.5", "1.5 to 2.5", "over 2.5"
    expected = [near, near, more, more, twice, twice, far, near, far]
    assert groups.group_labels("length", votes).tolist() == [f"{name} × as long" for name in expected]
    assert groups.group_labels("length", votes.swapped()).tolist() == groups.group_labels("length", votes).tolist()


def test_strata_group_by_how_people_split() -> None:
    votes = PreferenceSet.from_columns(["x"] * 4, list("abcd"), list("efgh"), [4, 3, 2, 0], [0, 1, 2, 4])
    assert groups.group_labels("strata", votes).tolist() == ["unanimous", "lopsided", "even", "unanimous"]


def test_rare_values_of_a_column_are_grouped() -> None:
    values = np.array(["uk"] * 30 + ["fr"] * 29 + [None] * 31 + ["de"] * 2, dtype=object)
    labels = groups.column_labels(values).tolist()
    assert [labels[0], labels[30], labels[60], labels[90]] == ["uk", "other", "missing", "other"]
    few = np.repeat([1.0, 2.0], 40)
    assert set(groups.column_labels(few)) == {"1.0", "2.0"}
    assert set(groups.column_labels(np.array([True, False] * 40))) == {"True", "False"}


def test_numbers_with_many_values_are_split_into_quartiles() -> None:
    values = np.arange(100.0)
    names, counts = np.unique(groups.column_labels(values).astype(str), return_counts=True)
    assert sorted(counts) == [25, 25, 25, 25]
    assert "0 to 24.75" in names
    text = np.array([str(value) for value in values] + [None], dtype=object)
    assert groups.column_labels(text)[:100].tolist() == groups.column_labels(values).tolist(), "CSV columns are text"
    assert groups.column_labels(text)[100] == "missing"
    assert as_numbers(np.array(["1", "one"], dtype=object)) is None


def test_an_unknown_grouping_raises_usage_error_with_a_suggestion() -> None:
    votes, _ = some_votes(8, country=np.array(["uk"] * 8, dtype=object))
    with pytest.raises(UsageError, match=r"cannot be grouped by 'contry'; did you mean 'country'\?"):
        groups.group_labels("contry", votes)
    with pytest.raises(UsageError, match=r"known are: length, topic, strata, country"):
        groups.group_labels("zzz", votes)


def test_topics_are_named_by_their_words() -> None:
    random = np.random.default_rng(0)
    subjects = {"bus": ["bus", "route", "driver", "station"], "school": ["school", "teacher", "pupil", "lesson"]}
    prompts, truth = [], []
    for i in range(60):
        truth.append(list(subjects)[i % 2])
        words = random.choice(subjects[truth[-1]], 3, replace=False)
        prompts.append(f"What should the town do about the {' '.join(words)}?")
    found = groups.topics([*prompts[:-1], (Message("user", prompts[-1]),)])
    assert len(set(found)) == 2
    for name in set(found):
        own = {subject for subject, topic in zip(truth, found, strict=True) if topic == name}
        assert len(own) == 1, "one cluster, one subject"
        assert set(name.split(", ")) <= set(subjects[own.pop()])
    assert groups.topics(prompts, seed=3).tolist() == groups.topics(prompts, seed=3).tolist()
    assert set(groups.topics(prompts[:10])) == {"all prompts"}, "few prompts make no topics"
    assert set(groups.topics(["same words here"] * 100)) == {"all prompts"}


# --- within groups ----------------------------------------------------------------------------------------------------


def test_group_figures_use_only_pairs_of_the_group() -> None:
    side = np.array(["left", "right"] * 120, dtype=object)
    votes, truth = some_votes(side=side)
    predicted = np.clip(truth + np.where(side == "left", 0.2, 0.0), 0, 1)
    found, worst = groups.measure_groups(predicted, votes, ["side"])
    assert [group.name for group in found["side"]] == ["left", "right"]
    for group in found["side"]:
        own = votes[side == group.name]
        share = predicted[side == group.name]
        assert (group.pairs, group.prompts) == (120, 60)
        assert group.brier == pytest.approx(np.mean((share - own.prob_a) ** 2))
        noise = np.mean(own.prob_a * (1 - own.prob_a) / 4)
        assert group.brier_corrected == pytest.approx(group.brier - noise)
        assert group.interval.low < group.brier_corrected < group.interval.high
        towards = [(q - p) if q > 0.5 else (p - q) for q, p in zip(share, own.prob_a, strict=True)]
        assert group.residual.mean == pytest.approx(math.fsum(towards) / 120)
    assert worst is not None
    assert (worst.grouping, worst.name, worst.groups) == ("side", "left", 2)
    assert worst.brier_corrected == pytest.approx(found["side"][0].brier_corrected)
    assert worst.interval.low < found["side"][0].interval.low < found["side"][0].interval.high < worst.interval.high


def test_the_length_residual_shows_a_bias_to_longer_responses() -> None:
    votes, _ = some_votes(400)
    lengths = np.array([len(text) for text in votes.responses])
    longer = np.where(lengths[votes.a_index] > lengths[votes.b_index], 1, -1)
    predicted = np.clip(votes.prob_a + 0.1 * longer, -1, 2)
    kept = (predicted >= 0) & (predicted <= 1)
    found, _ = groups.measure_groups(predicted[kept], votes[kept], ["length"])
    for group in found["length"]:
        assert 0 < group.residual.mean <= 0.1 + 1e-9
    assert found["length"][-1].residual.mean == pytest.approx(0.1), "no ties in length here"


@given(st.integers(0, 20), st.booleans())
def test_groups_are_the_same_for_both_orders_of_a_pair(seed: int, by_votes: bool) -> None:
    votes, truth = some_votes(48, seed=seed)
    predicted = np.round(2 * truth) / 2 if by_votes else truth
    names = ["length", "strata"]
    for one, other in zip(*(groups.measure_groups(q, v, names)[0].values() for q, v in
                            ((predicted, votes), (1 - predicted, votes.swapped()))), strict=True):  # fmt: skip
        for group, turned in zip(one, other, strict=True):
            assert turned.brier == pytest.approx(group.brier)
            assert turned.residual.mean == pytest.approx(group.residual.mean, abs=1e-12)
    there = groups.adversarial_calibration(predicted, votes)
    back = groups.adversarial_calibration(1 - predicted, votes.swapped())
    assert [group.worst for group in back] == pytest.approx([group.worst for group in there])


def test_a_group_of_few_prompts_is_never_the_worst() -> None:
    side = np.array(["bad"] * 40 + ["good"] * 200, dtype=object)
    votes, truth = some_votes(side=side)
    predicted = np.where(side == "bad", 1 - truth, truth)
    found, worst = groups.measure_groups(predicted, votes, ["side"])
    assert found["side"][0].brier > 2 * found["side"][1].brier
    assert worst is not None
    assert worst.name == "good"
    assert groups.measure_groups(predicted[:40], votes[:40], ["side"])[1] is None


# --- adversarial groups -----------------------------------------------------------------------------------------------


def by_fraction(found: list[groups.AdversarialGroup]) -> dict[float, groups.AdversarialGroup]:
    return {group.fraction: group for group in found}


def test_adversarial_error_is_within_noise_for_a_calibrated_prediction() -> None:
    above = 0
    for seed in range(10):
        votes, truth = some_votes(400, seed=seed)
        right = groups.adversarial_calibration(truth, votes, seed=seed)
        above += sum(group.worst > group.high for group in right)
        sharp = np.clip(3 * (truth - 0.5) + 0.5, 0, 1)
        wrong = groups.adversarial_calibration(sharp, votes, seed=seed)
        assert all(group.worst > group.high for group in wrong)
    assert above <= 10, "of 50; one in twenty is expected, and the sizes of one seed go together"


def test_a_miscalibrated_tenth_shows_in_small_groups() -> None:
    votes, truth = some_votes(800, n_votes=50)
    spoiled = np.where(votes.prompt_index < 20, 1 - truth, truth)
    clean = by_fraction(groups.adversarial_calibration(truth, votes))
    found = by_fraction(groups.adversarial_calibration(spoiled, votes))
    assert found[0.05].worst - clean[0.05].worst > 2 * (found[1.0].worst - clean[1.0].worst)


# --- what is left of disagreement -------------------------------------------------------------------------------------


def test_majority_shares_match_a_direct_computation() -> None:
    prob_a, predicted = np.array([1.0, 0.0, 0.8, 0.6, 0.4, 0.5]), np.array([0.9, 0.3, 0.7, 0.95, 0.3, 0.02])
    shares = majority_shares(predicted, prob_a, np.full(6, 10))
    assert [shares[name].pairs for name in shares] == [2, 1, 2, 1]
    assert shares["unanimous"].people == 1.0
    assert shares["unanimous"].predicted == pytest.approx((0.9 + 0.7) / 2)
    assert shares["lopsided"].predicted == pytest.approx(0.7)
    assert shares["contested"].people == pytest.approx(0.6)
    assert shares["contested"].predicted == pytest.approx((0.95 + 0.7) / 2)
    assert math.isnan(shares["even"].predicted)


def test_a_calibrated_prediction_matches_its_expected_majority_shares() -> None:
    votes, truth = some_votes(20_000)
    shares = majority_shares(truth, votes.prob_a, votes.n_votes)
    for name in ("unanimous", "lopsided", "contested"):
        assert shares[name].predicted == pytest.approx(shares[name].expected, abs=0.01)
    assert shares["unanimous"].predicted < 0.95, "five votes make more unanimous pairs than there are"
    collapsed = majority_shares((truth > 0.5).astype(float), votes.prob_a, votes.n_votes)
    assert collapsed["unanimous"].expected == 1.0
