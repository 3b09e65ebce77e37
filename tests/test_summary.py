"""The summary of ``inspect``, against plain Python."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from conftest import wide

from pluralign import inspect, load_preferences
from pluralign.votes.summary import Bar


def in_plain_python(rows: list[dict[str, Any]]) -> dict[str, float]:
    pairs = [(row["votes_a"], row["votes_b"]) for row in rows]
    shares = [(a / (a + b), a + b) for a, b in pairs]

    def mean(values: Iterable[float]) -> float:
        return math.fsum(values) / len(pairs)

    floor, noise = mean(min(p, 1 - p) ** 2 for p, _ in shares), mean(p * (1 - p) / (n - 1) for p, n in shares)
    return {
        "pairs": len(pairs), "votes": sum(a + b for a, b in pairs), "floor": floor, "noise": noise,
        "floor_corrected": floor - noise, "constant_half": mean((p - 0.5) ** 2 for p, _ in shares),
        "majority_share": mean(max(p, 1 - p) for p, _ in shares), "votes_per_pair": mean(n for _, n in shares),
        "prompts": len({row["prompt"] for row in rows}),
    }  # fmt: skip


def random_rows(n: int = 500) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    return [
        wide(prompt=f"p{int(rng.integers(40))}", response_a=f"a{i}", votes_a=int(a), votes_b=int(b))
        for i, (a, b) in enumerate(rng.integers(1, 6, (n, 2)))
    ]


def test_figures_agree_with_plain_python_and_intervals_contain_them() -> None:
    rows = random_rows()
    facts = inspect(load_preferences(rows))
    for name, expected in in_plain_python(rows).items():
        assert getattr(facts, name) == pytest.approx(expected, abs=1e-12), name
    for name, interval in facts.intervals.items():
        assert interval.low < getattr(facts, name) < interval.high
        assert interval.mean == pytest.approx(getattr(facts, name), abs=1e-12)
    one = inspect(load_preferences([wide(ties=1, split="train")]))
    assert one.intervals == {}
    assert str(one).splitlines() == [
        "the records: 1 pair, 1 prompt, 2 responses, 5 votes", "  votes per pair  5.00 (5 to 5)",
        "  majority share  0.600", "  floor           0.1600  corrected 0.1000",
        "  constant 1/2    0.0100  corrected -0.0500", "  noise           0.0600", "  official split  train 1",
        "  dropped         1 tie votes",
    ]  # fmt: skip


def test_few_shares_have_one_bar_each_and_many_are_binned() -> None:
    few = inspect(load_preferences([wide(votes_a=a, votes_b=5 - a, prompt=str(a)) for a in range(6)])).histogram
    assert few == [Bar(0.6, 0.6, 2), Bar(0.8, 0.8, 2), Bar(1.0, 1.0, 2)]
    rows = [wide(prompt=str(a), votes_a=a, votes_b=40 - a) for a in range(41)]
    many = inspect(load_preferences(rows)).histogram
    shares = [max(a, 40 - a) / 40 for a in range(41)]
    expected = [sum(0.5 + i / 20 <= share + 1e-9 < 0.5 + (i + 1) / 20 for share in shares) for i in range(9)]
    assert [bar.count for bar in many] == [*expected, 41 - sum(expected)]
    assert [bar.low for bar in many] == pytest.approx([0.5 + i / 20 for i in range(10)])


def test_noise_of_single_votes_is_nan() -> None:
    facts = inspect(load_preferences([{"prompt": "x", "chosen": "A", "rejected": "B"}]))
    assert np.isnan([facts.noise, facts.floor_corrected]).all()
    assert facts.single_vote_pairs == 1
    assert "nan" not in str(facts)


def test_ties_empty_texts_orientation_and_splits_are_counted() -> None:
    rows = [wide(ties=5, split="train"), wide(prompt="y", response_b="", votes_a=4, votes_b=0, split="test")]
    facts = inspect(load_preferences(rows))
    assert (facts.ties, facts.empty_responses, facts.a_wins) == (5, 1, 1.0)
    assert facts.splits == {"test": 1, "train": 1}
    assert facts.majority_share == pytest.approx((3 / 5 + 1) / 2)
    assert facts.majority_share_of_all == pytest.approx((3 / 10 + 1) / 2)
    assert facts.strata == {"unanimous": 1, "lopsided": 0, "contested": 1, "even": 0}
