"""Examples to try on the page: held-out prompts to ask, and pairs that reveal a user's preferences.

Their texts are scored again when they are used, so they are never cut: prompts and pairs with long texts are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pluralign.analysis.member_rankings import MIN_RESPONSES, case_studies, held_out_candidates
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.theory.posterior import SMALLEST_SLIP, choice_probability, most_informative
from pluralign.votes.candidates import Candidates
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt

MAX_LENGTH = 2000
"""Maximum characters of a text that is scored again."""
EXAMPLES = 8
RESPONSES_PER_EXAMPLE = 12
STEERING_PAIRS = 6


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
    slip = max(ensemble.choice_model.slip, SMALLEST_SLIP)
    chance = choice_probability(held_out.difference[rows], ensemble.temperature, ensemble.undecided, slip)
    for chosen in most_informative(chance, ensemble.weights, votes.prompt_index[rows], STEERING_PAIRS):
        yield voted_pair(votes, int(rows[chosen]))
