"""Examples to try on the page: held-out prompts to ask, and pairs that reveal a user's preferences.

Their texts are scored again when they are used, so they are never cut: prompts and pairs with long texts are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pluralign.analysis.member_rankings import MIN_RESPONSES, case_studies, held_out_candidates
from pluralign.core.arrays import FloatArray
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.theory.posterior import choice_probability
from pluralign.votes.candidates import Candidates
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt

MAX_LENGTH = 2000
"""Maximum characters of a text that is scored again."""
EXAMPLES = 8
RESPONSES_PER_EXAMPLE = 12
STEERING_PAIRS = 6
STEERING_POOL = 400
"""The search for pairs that are informative together covers this many pairs: the most informative ones individually."""


@dataclass(frozen=True)
class Example:
    """A held-out prompt with its responses."""

    prompt: str
    responses: list[str]


@dataclass(frozen=True)
class VotedPair:
    """Two responses, and how many people preferred each."""

    prompt: str
    response_a: str
    response_b: str
    votes_a: int
    votes_b: int


def voted_pair(votes: PreferenceSet, row: int) -> VotedPair:
    """Return the pair at a row, with whole texts."""
    return VotedPair(
        prompt=Prompt(votes.prompts[votes.prompt_index[row]]).text,
        response_a=str(votes.responses[votes.a_index[row]]),
        response_b=str(votes.responses[votes.b_index[row]]),
        votes_a=int(votes.votes_a[row]),
        votes_b=int(votes.votes_b[row]),
    )


def example_prompts(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> Iterator[Example]:
    """Yield the held-out prompts on whose responses the members differ most."""
    for least in (MIN_RESPONSES, 2):
        candidates, rewards = held_out_candidates(held_out, least)
        short = [p for p, one in enumerate(candidates) if _is_short(one)]
        if short:
            break
    else:
        return
    candidates, rewards = [candidates[p] for p in short], [rewards[p] for p in short]
    for case in case_studies(ensemble, candidates, EXAMPLES, rewards=rewards):
        chosen = candidates[case.number - 1]
        yield Example(chosen.prompt_text, list(chosen.responses[:RESPONSES_PER_EXAMPLE]))


def _is_short(candidates: Candidates) -> bool:
    return max(map(len, (candidates.prompt_text, *candidates.responses))) <= MAX_LENGTH


def steering_pairs(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> Iterator[VotedPair]:
    """Yield short held-out pairs, one per prompt, that are together most informative about a user's preferences."""
    votes = held_out.preferences
    lengths = np.array([len(text) for text in votes.responses])
    prompt_lengths = np.array([len(Prompt(prompt).text) for prompt in votes.prompts])
    characters = lengths[votes.a_index] + lengths[votes.b_index] + prompt_lengths[votes.prompt_index]
    rows = np.flatnonzero(characters <= min(float(np.median(characters)), MAX_LENGTH))
    chance = choice_probability(held_out.difference[rows], ensemble.temperature, ensemble.undecided)
    for chosen in most_informative(chance, ensemble.weights, votes.prompt_index[rows], STEERING_PAIRS):
        yield voted_pair(votes, int(rows[chosen]))


def most_informative(chance: FloatArray, weights: FloatArray, prompts: npt.NDArray[Any], n: int) -> list[int]:
    """Choose the pairs whose answers are most informative about the user's member, at most one per prompt.

    Let q_ij be the probability that a user of member j's preferences chooses response a of pair i, and let the weights
    be the prior. The mutual information between the member J and the choices C_S on a set S of pairs is
    I(J; C_S) = H(C_S) − Σ_j α_j H(C_S | j). The search is greedy: each step adds the pair with the largest gain.

    Args:
        chance: q, ``(n_pairs, k)``, strictly between 0 and 1.
        weights: α, ``(k,)``.
        prompts: index of each pair's prompt, ``(n_pairs,)``.
        n: number of pairs to choose.

    Returns:
        The rows of the chosen pairs, in the order of choice.

    Example:
        >>> chance = np.array([[0.5, 0.5, 0.5], [0.9, 0.1, 0.1], [0.9, 0.1, 0.2], [0.5, 0.9, 0.1]])
        >>> most_informative(chance, np.full(3, 1 / 3), np.arange(4), 2)
        [1, 3]

    Reference: Lindley, "On a measure of the information provided by an experiment", Ann. Math. Statist. 27 (1956).
    """
    alone = _information(np.stack([chance, 1 - chance], axis=1), weights)
    pool = np.argsort(-alone, kind="stable")[:STEERING_POOL]
    likelihood = np.ones((1, len(weights)))  # of each sequence of choices so far, given each member
    chosen: list[int] = []
    while len(chosen) < n and len(pool):
        q = chance[pool, None, :]
        gain = _information(np.concatenate([likelihood * q, likelihood * (1 - q)], axis=1), weights)
        best = int(pool[int(gain.argmax())])
        chosen.append(best)
        likelihood = np.concatenate([likelihood * chance[best], likelihood * (1 - chance[best])])
        pool = pool[prompts[pool] != prompts[best]]
    return chosen


def _information(likelihood: FloatArray, weights: FloatArray) -> FloatArray:
    """I(J; C) from P(sequence of choices | member), ``(n, n_sequences, k)``."""
    total = likelihood @ weights
    given_member = np.where(likelihood > 0, likelihood * np.log(np.maximum(likelihood, 1e-300)), 0.0) @ weights
    return np.asarray(given_member.sum(axis=1) - (total * np.log(np.maximum(total, 1e-300))).sum(axis=1))
