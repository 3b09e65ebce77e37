"""Raters of the town hall whose preferences are known, for tests of representation."""

import numpy as np

from pluralign import RewardEnsemble, town_hall
from pluralign.measuring.individuals import Representation, represent
from pluralign.votes.preferences import texts_of
from pluralign.votes.raters import RaterVotes


def town_raters() -> RaterVotes:
    """Return votes of 15 people on the prompts that the ensemble of ``town_folder`` was fitted to."""
    hall = town_hall(480)
    random = np.random.default_rng(0)
    people = np.repeat(np.arange(15), 80)
    pair = np.concatenate([random.permutation(480)[:80] for _ in range(15)]).astype(np.int32)
    chose_a = hall.annotator_votes(range(15))[pair, people]
    return RaterVotes(hall.preferences, pair, people.astype(np.int32), chose_a)


def town_representation(ensemble: RewardEnsemble, votes: RaterVotes) -> Representation:
    """Return how well an ensemble represents these raters on its held-out prompts."""
    return represent(ensemble, votes, ensemble.features(texts_of(votes.preferences)), ensemble.trained_on)
