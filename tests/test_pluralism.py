"""The benchmark of slates, consensus and draws: people's rankings, and figures whose values are known."""

import json
from pathlib import Path

import numpy as np
import pytest
from benchmark_modules import benchmark

from pluralign import town_hall

pluralism = benchmark("pluralism")


def test_the_rankings_of_a_town_hall_are_those_of_its_people() -> None:
    town = town_hall(24)
    groups = pluralism.town_groups(town)
    assert {group.question for group in groups} == {str(prompt) for prompt in town.preferences.prompts}
    first = groups[0]
    rewards = town.annotator_rewards(range(1000))[first.rows]
    assert first.first == pytest.approx(np.bincount(rewards.argmax(axis=0), minlength=len(rewards)) / 1000)
    assert [town.preferences.responses[row] for row in first.rows] == first.texts
    a, b = town.preferences.a_index[0], town.preferences.b_index[0]
    place = first.place[:, [int(np.flatnonzero(first.rows == row)[0]) for row in (a, b)]]
    assert (place[:, 0] < place[:, 1]).mean() == town.true_prob[0]


def test_rankings_are_read_and_groups_with_repeated_statements_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rankings.jsonl"
    group = {"question": "Tea?", "statements": {"1": "Yes.", "2": "No."}, "rankings": [["2", "1"], [2, 1], ["1", "2"]]}
    file.write_text("\n".join(json.dumps(one) for one in (group, group | {"statements": {"1": "Yes.", "2": "Yes."}})))
    (read,) = pluralism.read_rankings(file)
    assert read.texts == ["Yes.", "No."]
    assert read.first == pytest.approx([1 / 3, 2 / 3])
    assert (pluralism.wins(1, read.place), pluralism.top_half(1, read.place)) == pytest.approx((2 / 3, 2 / 3))


def test_differences_to_rivals_are_paired_and_a_rival_is_not_compared_with_itself() -> None:
    rows = [("a", 0.5, {"soft BT": 0.4}), ("b", 0.9, {"soft BT": 0.7})]
    results = pluralism.summary({"slate: joint": rows, "slate: soft BT": rows})
    assert results["− slate: joint minus soft BT"]["mean"] == pytest.approx(0.15)
    assert set(results) == {"slate: joint", "slate: soft BT", "− slate: joint minus soft BT"}
