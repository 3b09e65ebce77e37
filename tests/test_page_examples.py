"""Examples on the page: prompts on which members differ, and pairs that reveal a user's preferences."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluralign import town_hall
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.server.page import (
    EXAMPLES,
    STEERING_PAIRS,
    collect_page_data,
    example_prompts,
    steering_pairs,
    voted_pair,
)
from pluralign.theory.posterior import most_informative


def test_examples_are_the_prompts_with_most_disagreement(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    votes = held_out.preferences
    items = votes.items()
    examples = list(example_prompts(ensemble, held_out))
    assert len(examples) == EXAMPLES
    favourites: dict[str, int] = {}
    for p, prompt in enumerate(votes.prompts):
        rows = np.flatnonzero(items.prompt_index == p)
        if len(rows) >= 3:
            favourites[prompt] = len(set(held_out.rewards[rows].argmax(axis=0)))
    chosen = [favourites[example.prompt] for example in examples]
    assert chosen == sorted(favourites.values(), reverse=True)[:EXAMPLES]
    for example in examples:
        p = votes.prompts.tolist().index(example.prompt)
        own = {votes.responses[items.response_index[row]] for row in np.flatnonzero(items.prompt_index == p)}
        assert set(example.responses) == own


def test_prompts_with_two_responses_are_the_fallback(ensemble: RewardEnsemble) -> None:
    votes = town_hall(40, n_responses_per_prompt=2, pairs_per_prompt=1).preferences
    rewards = np.random.default_rng(0).random((len(votes.items().prompt_index), 3))
    held_out = HeldOutVotes(votes, rewards)
    assert {len(example.responses) for example in example_prompts(ensemble, held_out)} == {2}
    assert collect_page_data(ensemble, held_out, name="town").tau is None


def test_steering_pairs_are_whole_and_have_different_prompts(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    pairs, votes = list(steering_pairs(ensemble, held_out)), held_out.preferences
    assert len(pairs) == STEERING_PAIRS == len({pair.prompt for pair in pairs})
    assert set(pairs) <= {voted_pair(votes, row) for row in range(len(votes))}


def information(chance: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> float:
    """I(J; C) by enumeration of all sequences of choices."""
    total = 0.0
    for sequence in itertools.product((True, False), repeat=len(chance)):
        likelihood = np.prod([q if a else 1 - q for q, a in zip(chance, sequence, strict=True)], axis=0)
        marginal = float(likelihood @ weights)
        total += sum(w * t * math.log(t / marginal) for w, t in zip(weights, likelihood, strict=True) if w > 0)
    return total


@given(st.integers(0, 10_000))
def test_each_steering_pair_has_the_largest_gain(seed: int) -> None:
    random = np.random.default_rng(seed)
    chance, weights = random.uniform(0.05, 0.95, (7, 3)), random.dirichlet(np.ones(3))
    chosen = most_informative(chance, weights, np.arange(7), 3)
    for n in range(3):
        gains = [information(chance[[*chosen[:n], i]], weights) for i in range(7) if i not in chosen[:n]]
        assert information(chance[chosen[: n + 1]], weights) == pytest.approx(max(gains))


@given(st.integers(0, 10_000))
def test_steering_pairs_do_not_depend_on_the_order_of_responses_or_members(seed: int) -> None:
    random = np.random.default_rng(seed)
    chance, weights = random.uniform(0.05, 0.95, (20, 4)), random.dirichlet(np.ones(4))
    chosen = most_informative(chance, weights, np.arange(20), 3)
    assert most_informative(1 - chance, weights, np.arange(20), 3) == chosen
    assert most_informative(chance[:, ::-1], weights[::-1], np.arange(20), 3) == chosen


def test_a_prompt_has_at_most_one_steering_pair() -> None:
    chance = np.random.default_rng(0).uniform(0.05, 0.95, (6, 2))
    chosen = most_informative(chance, np.array([0.5, 0.5]), np.array([0, 0, 0, 1, 1, 1]), 6)
    assert sorted(row // 3 for row in chosen) == [0, 1]
