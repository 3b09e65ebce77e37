"""Slates, consensus answers and statements, from rewards alone."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from rich.console import Console

from pluralign.answering.answer import choose
from pluralign.answering.consensus import (
    NO_MAJORITY,
    NO_MAJORITY_BY_RULE,
    consensus,
    similarity,
    slate,
    write_statement,
)
from pluralign.cli.views.answers import answer_page


def test_near_duplicates_share_one_slate_entry() -> None:
    texts = ["We should plant many trees in town this year.", "We should plant many trees in town this year!", "No."]
    entries = slate(texts, np.array([0, 1, 2]), np.array([0.3, 0.4, 0.3]))
    assert [(entry.text, entry.members) for entry in entries] == [(texts[1], (0, 1)), ("No.", (2,))]
    assert similarity(texts[0], texts[2]) == 0


def test_members_of_negligible_weight_are_left_out_of_the_slate() -> None:
    (entry,) = slate(["Yes.", "No."], np.array([0, 1]), np.array([1.0, 1e-9]))
    assert (entry.text, entry.weight, entry.members) == ("Yes.", 1.0, (0,))


def test_the_consensus_of_a_single_candidate_has_full_support() -> None:
    found = consensus(["Yes."], np.zeros((1, 2)), np.array([0.5, 0.5]), "maximin", np.random.default_rng(0))
    assert (found.text, found.least_support, found.mean_support, found.favourite_of) == ("Yes.", 1.0, 1.0, 1.0)


CYCLE = np.array([[3.0, 1.0, 2.0], [2.0, 3.0, 1.0], [1.0, 2.0, 3.0]])
"""Every candidate loses to another one, by two members of three."""


@pytest.mark.parametrize(
    ("rewards", "weights", "rule", "note"),
    [
        (CYCLE, [0.4, 0.3, 0.3], "maximin", NO_MAJORITY),
        (CYCLE, [0.6, 0.2, 0.2], "maximin", ""),
        (CYCLE[:2], [0.4, 0.3, 0.3], "maximin", ""),
        (CYCLE[:2], [0.5, 0.5, 0.0], "maximin", ""),
    ],
)
def test_a_consensus_without_a_majority_says_so(
    rewards: npt.NDArray[np.float64], weights: list[float], rule: str, note: str
) -> None:
    found = consensus(["A", "B", "C"][: len(rewards)], rewards, np.array(weights), rule, np.random.default_rng(0))
    assert found.note == note
    assert (found.least_support < 0.5) == bool(note)


def test_another_rule_does_not_claim_to_come_nearest() -> None:
    weights, random = np.array([0.42, 0.3, 0.28]), np.random.default_rng(0)
    nearest = consensus(["A", "B", "C"], CYCLE, weights, "maximin", random)
    drawn = {consensus(["A", "B", "C"], CYCLE, weights, "lottery", random) for _ in range(40)}
    assert {one.note for one in drawn if one.text == nearest.text} <= {NO_MAJORITY}
    assert {one.note for one in drawn if one.text != nearest.text} == {NO_MAJORITY_BY_RULE}


def test_the_statement_with_the_most_support_is_compared_with_the_best_candidate() -> None:
    weights, rewards = np.array([0.6, 0.4]), np.array([[1.0, 0.0], [0.0, 1.0]])
    drafted = {"Both.": [0.5, 2.0], "Neither.": [-1.0, -1.0]}
    entries = slate(["Tea.", "Rum."], np.array([0, 1]), weights)
    instructions: list[str] = []

    def writer(instruction: str, count: int) -> list[str]:
        instructions.append(instruction)
        return list(drafted)[:count]

    found = write_statement(
        "Tea or rum?",
        ["Tea.", "Rum."],
        rewards,
        weights,
        entries,
        writer,
        lambda drafts: np.array([drafted[d] for d in drafts]),
    )
    assert found is not None
    assert (found.text, found.least_support, found.to_reach, found.used, found.drafts) == ("Both.", 0.4, 0.6, False, 2)
    assert "- (60%) Tea.\n- (40%) Rum." in instructions[0]


def test_the_terminal_says_that_no_answer_has_a_majority() -> None:
    found = choose(CYCLE, np.array([0.4, 0.3, 0.3]), ["A", "B", "C"])
    page: Any = answer_page
    console = Console(width=100, file=io.StringIO())
    console.print(*page(found, "Tea?", {}))
    assert NO_MAJORITY in console.file.getvalue()  # type: ignore[attr-defined]
