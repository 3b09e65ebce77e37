"""Slates, consensus answers and statements, from rewards alone."""

import io
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from rich.console import Console

from pluralign.answering.answer import choose
from pluralign.answering.request import AnswerRequest, Voters
from pluralign.answering.slate import (
    NO_MAJORITY,
    NO_MAJORITY_BY_RULE,
    consensus,
    instruction,
    judge_statements,
    similarity,
    slate,
)
from pluralign.cli.render.answers import answer_page
from pluralign.theory.calibration import policy_prob, with_undecided
from pluralign.theory.social_choice import first_choices


def voting(*weights: float) -> Voters:
    """Voters who vote for their favourites."""
    return Voters(np.array(weights), temperature=0.0)


def test_near_duplicates_share_one_slate_entry() -> None:
    texts = ["We should plant many trees in town this year.", "We should plant many trees in town this year!", "No."]
    rewards = np.array([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 1.0]])
    found = slate(texts, rewards, voting(0.3, 0.4, 0.3), np.random.default_rng(0))
    assert [(entry.text, entry.members) for entry in found.entries] == [(texts[1], (0, 1)), ("No.", (2,))]
    assert [entry.share for entry in found.entries] == pytest.approx([0.7, 0.3])
    assert similarity(texts[0], texts[2]) == 0
    (first,) = slate(texts, rewards, voting(0.3, 0.25, 0.45), np.random.default_rng(0), size=1).entries
    assert first.text == texts[0]
    assert first.share == pytest.approx(0.55), "near-duplicates count together"


def test_members_of_negligible_weight_are_left_out_of_the_slate() -> None:
    found = slate(["Yes.", "No."], np.eye(2), voting(1.0, 1e-9), np.random.default_rng(0))
    (entry,) = found.entries
    assert (entry.text, entry.weight, entry.members, found.coverage) == ("Yes.", 1.0, (0,), 1.0)


SECOND_CHOICE = np.array([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 3.0], [2.9, 2.9, 2.9]])
"""Three members have different favourites and the same second choice."""


def test_a_slate_covers_the_largest_predicted_share_of_people() -> None:
    weights, texts = np.array([0.4, 0.35, 0.25]), ["A", "B", "C", "D"]
    for temperature, size in itertools.product((0.0, 0.2, 2.0), (1, 2, 3)):
        found = slate(texts, SECOND_CHOICE, Voters(weights, temperature, 0.2), np.random.default_rng(0), size=size)
        share = first_choices(SECOND_CHOICE, weights, temperature, 0.2)
        best = max(sum(share[list(rows)]) for rows in itertools.combinations(range(4), size))
        assert found.coverage == pytest.approx(best) == pytest.approx(sum(entry.share or 0 for entry in found.entries))
        assert sum(entry.weight for entry in found.entries) == pytest.approx(1)
        assert len(found.entries) == size


def test_a_slate_shows_a_common_second_choice_if_one_of_the_top_two_is_enough() -> None:
    weights, texts, random = voting(0.4, 0.35, 0.25), ["A", "B", "C", "D"], np.random.default_rng(0)
    favourite = slate(texts, SECOND_CHOICE, weights, random, size=1)
    top_two = slate(texts, SECOND_CHOICE, weights, random, size=1, cover="top-two")
    assert (favourite.entries[0].text, favourite.coverage) == ("A", 0.4)
    assert top_two.entries[0].text == "D"
    assert top_two.coverage == pytest.approx(1.0)


def test_an_entry_that_no_member_ranks_first_names_the_member_that_adds_most() -> None:
    weights, texts = np.array([0.4, 0.35, 0.25]), ["A", "B", "C", "D"]
    found = slate(texts, SECOND_CHOICE, Voters(weights, 1.0), np.random.default_rng(0), size=4)
    entry = next(entry for entry in found.entries if entry.text == "D")
    assert (entry.weight, entry.members, entry.member) == (0.0, (), 0)
    assert found.entries[0] == entry, "it is the most likely favourite of people"
    assert found.coverage == pytest.approx(1)


def test_a_slate_has_as_many_entries_as_different_favourites_by_default() -> None:
    weights, texts = np.array([0.4, 0.35, 0.25]), ["A", "B", "C", "D"]
    for temperature in (0.0, 1.0):
        found = slate(texts, SECOND_CHOICE, Voters(weights, temperature), np.random.default_rng(0))
        assert len(found.entries) == 3
    assert len(slate(texts, SECOND_CHOICE, Voters(weights), np.random.default_rng(0), size=9).entries) == 4


def test_predicted_shares_of_two_answers_are_the_predicted_shares_of_the_ensemble() -> None:
    rewards, weights = np.array([[1.0, 0.2, -1.0], [0.0, 1.0, 0.5]]), np.array([0.5, 0.3, 0.2])
    town = Voters(weights, 0.7, 0.3)
    found = slate(["A", "B"], rewards, town, np.random.default_rng(0), size=2)
    share = with_undecided(policy_prob(rewards[:1] - rewards[1:], weights, 0.7), 0.3)[0]
    assert {entry.text: entry.share for entry in found.entries} == pytest.approx({"A": share, "B": 1 - share})
    chosen = consensus(["A", "B"], rewards, town, "borda", np.random.default_rng(0))
    assert (chosen.least_support, chosen.favourite_of) == pytest.approx((max(share, 1 - share),) * 2)


def test_a_consensus_at_the_policy_level_counts_how_much_members_prefer_an_answer() -> None:
    rewards, weights = np.array([[0.1, 0.1, 0.0], [0.0, 0.0, 9.0]]), np.array([0.3, 0.3, 0.4])
    by_votes = consensus(["A", "B"], rewards, Voters(weights, 0.0), "borda", np.random.default_rng(0))
    by_policies = consensus(["A", "B"], rewards, Voters(weights), "borda", np.random.default_rng(0))
    assert by_votes.text == "A"
    assert by_votes.least_support == pytest.approx(0.6)
    assert by_policies.text == "B"


def test_the_consensus_of_a_single_candidate_has_full_support() -> None:
    found = consensus(["Yes."], np.zeros((1, 2)), voting(0.5, 0.5), "maximin", np.random.default_rng(0))
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
    found = consensus(["A", "B", "C"][: len(rewards)], rewards, voting(*weights), rule, np.random.default_rng(0))
    assert found.note == note
    assert (found.least_support < 0.5) == bool(note)


def test_another_rule_does_not_claim_to_come_nearest() -> None:
    weights, random = voting(0.42, 0.3, 0.28), np.random.default_rng(0)
    nearest = consensus(["A", "B", "C"], CYCLE, weights, "maximin", random)
    drawn = {consensus(["A", "B", "C"], CYCLE, weights, "lottery", random) for _ in range(40)}
    assert {one.note for one in drawn if one.text == nearest.text} <= {NO_MAJORITY}
    assert {one.note for one in drawn if one.text != nearest.text} == {NO_MAJORITY_BY_RULE}


def test_the_statement_with_the_most_support_is_compared_with_the_best_candidate() -> None:
    voters, rewards = voting(0.6, 0.4), np.array([[1.0, 0.0], [0.0, 1.0]])
    entries = slate(["Tea.", "Rum."], rewards, voters, np.random.default_rng(0)).entries
    assert "- (60%) Tea.\n- (40%) Rum." in instruction("Tea or rum?", entries)
    of_drafts = np.array([[0.5, 2.0], [-1.0, -1.0]])
    found = judge_statements(["Both.", "Neither."], of_drafts, rewards, voters, ["", ""])
    assert (found.text, found.least_support, found.to_reach, found.used, found.drafts) == ("Both.", 0.4, 0.6, False, 2)


def test_the_terminal_says_that_no_answer_has_a_majority() -> None:
    found = choose(AnswerRequest("", rule="maximin", level="vote"), voting(0.4, 0.3, 0.3), ["A", "B", "C"], CYCLE)
    page: Any = answer_page
    console = Console(width=100, file=io.StringIO())
    console.print(*page(found, "Tea?", {}))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert NO_MAJORITY in printed
    assert "favourite of 40% of people (predicted)" in printed
    assert "3 of 3 candidates, covering 100% of people (predicted)" in printed
