"""Steerable answers: what a user's choices say about the user, and the candidate that the user would choose.

Few choices do not single out one member. So the answer is the candidate with the highest expected share of wins under
the posterior over people: every member, and one reward for everyone. Every function here is free of models and texts'
features. Words are in ``steering_meaning`` and ``steering_words``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import UsageError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.theory import calibration
from pluralign.theory.posterior import (
    ChoiceModel,
    choice_log_likelihood,
    information_gain,
    person_chances,
    person_posterior,
)
from pluralign.votes.items import pair_texts
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt, PromptLike

ASK_AMONG = 30
"""The pair to ask next is one of this many candidates, the best ones for the user."""


@dataclass(frozen=True)
class Ask:
    """Two candidates between which the user's choice would say most about the user."""

    prompt: str
    response_a: str
    response_b: str
    gain: float
    """Expected information about the user, in nats."""


@dataclass(frozen=True)
class Steering:
    """What is known about the user, and the reason."""

    member: int
    """The most likely member."""
    why: str
    sure: float
    """Probability, between 0 and 1, that the user follows this member."""
    posterior: tuple[float, ...]
    """That probability for every member. The rest of 1 is ``average``."""
    path: tuple[tuple[float, ...], ...] = ()
    """The posterior after each of the user's choices; the first entry is the prior."""
    average: float = 0.0
    """Probability that the user follows no member: then one reward for everyone predicts the choices."""
    support: float | None = None
    """Expected share of the other candidates that the user would reject for the answer. None for one member."""
    ask: Ask | None = None
    """The choice that would say most next."""


@dataclass(frozen=True, eq=False)
class ScoredChoices:
    """Pairs that the user voted on, with the rewards of both responses."""

    votes: PreferenceSet
    reward_a: FloatArray
    """Of the members, ``(n_pairs, k)``."""
    reward_b: FloatArray
    """``(n_pairs, k)``."""
    average: FloatArray | None = None
    """Reward difference of the reward for everyone, ``(n_pairs,)``; None if there is none."""

    @classmethod
    def of(cls, ensemble: RewardEnsemble, votes: PreferenceSet) -> "ScoredChoices":
        """Score the user's pairs with an ensemble."""
        texts, a, b = pair_texts(votes)
        return cls.from_rewards(votes, ensemble.rewards_and_average(texts)[np.stack([a, b])], ensemble.k)

    @classmethod
    def from_rewards(cls, votes: PreferenceSet, rewards: FloatArray, k: int) -> "ScoredChoices":
        """Return the choices with given rewards of both responses, ``(2, n_pairs, k or k + 1)``."""
        average = rewards[0, :, k] - rewards[1, :, k] if rewards.shape[2] > k else None
        return cls(votes, rewards[0, :, :k], rewards[1, :, :k], average)


@dataclass(frozen=True, eq=False)
class People:
    """The people that a user may be: those of each member, and people who follow no member."""

    weights: FloatArray
    """``(k,)``."""
    temperature: float = 1.0
    undecided: float = 0.0
    model: ChoiceModel = field(default_factory=ChoiceModel)

    @classmethod
    def of(cls, ensemble: RewardEnsemble) -> "People":
        """Return the people of an ensemble."""
        return cls(ensemble.weights, ensemble.temperature, ensemble.undecided, ensemble.choice_model)

    @property
    def prior(self) -> FloatArray:
        """Prior of every kind of person, ``(k + 1, n_factors)``; the last row follows no member."""
        return self.model.prior(self.weights)

    def chances(self, difference: FloatArray, average: FloatArray | None) -> FloatArray:
        """Return P(a) of each pair by every kind of person, ``(n, k + 1, n_factors)``."""
        return person_chances(difference, average, self.weights, self.temperature, self.undecided, self.model)

    def beliefs(self, choices: ScoredChoices, n: int | None = None) -> FloatArray:
        """Return the posterior of every kind of person given the first n choices, ``(k + 1, n_factors)``."""
        votes = choices.votes
        chance, tied = self.chances(choices.reward_a - choices.reward_b, choices.average), 0.5 * votes.counted_ties
        log_likelihood = choice_log_likelihood(chance, votes.votes_a + tied, votes.votes_b + tied)
        return person_posterior(log_likelihood[:n], self.prior)

    def believed(self, members: FloatArray) -> FloatArray:
        """Return the prior with its probability of members split as given, ``(k + 1, n_factors)``."""
        shares = np.append(self.model.people * members, 1 - self.model.people)
        return np.asarray(shares[:, None] * self.model.factor_prior)

    def expected_wins(self, rewards: FloatArray, average: FloatArray | None, beliefs: FloatArray) -> FloatArray:
        """Return the expected share of other candidates that the user would reject for each candidate, ``(n,)``.

        Args:
            rewards: of the members, ``(n, k)``.
            average: of the reward for everyone, ``(n,)``.
            beliefs: the posterior, ``(k + 1, n_factors)``.
        """
        n = len(rewards)
        if n == 1:
            return np.ones(1)
        wins = np.zeros(n)
        for row in range(n):
            difference = None if average is None else average[row] - average
            chance = self.chances(rewards[row] - rewards, difference).reshape(n, -1) @ beliefs.ravel()
            wins[row] = (chance.sum() - chance[row]) / (n - 1)
        return wins


def steer_to_member(member: int, k: int) -> Steering:
    """Return the steering of a member that was requested by number.

    Raises:
        UsageError: there is no such member.
    """
    if not 0 <= member < k:
        raise UsageError(f"members are numbered from 0 to {k - 1}; there is no member {member}.")
    return Steering(member, "it was requested by number", 1.0, tuple(float(j == member) for j in range(k)))


def steer_by_choices(choices: ScoredChoices, people: People) -> Steering:
    """Return what the user's choices say about the user: the posterior of ``theory.posterior``.

    Args:
        choices: the user's pairs and their rewards.
        people: the prior.
    """
    votes, weights = choices.votes, people.weights
    path = [people.beliefs(choices, n)[:-1].sum(axis=1) for n in range(len(votes) + 1)]
    best = int(path[-1].argmax())
    prefers_a = calibration.votes_from_rewards(choices.reward_a, choices.reward_b)[:, best] > 0.5
    agreements = int(np.sum(prefers_a == (votes.prob_a > 0.5)))
    why = f"it agrees with {agreements} of your {len(votes)} choices; its weight was {weights[best]:.2f}"
    return Steering(
        best,
        why,
        float(path[-1][best]),
        tuple(path[-1].tolist()),
        tuple(tuple(p.tolist()) for p in path),
        average=float(max(0.0, 1 - path[-1].sum())),
    )


def answer_for(
    steering: Steering,
    people: People,
    beliefs: FloatArray,
    prompt: PromptLike,
    texts: Sequence[str],
    rewards: FloatArray,
    average: FloatArray | None,
) -> tuple[int, Steering]:
    """Return the candidate with the most expected wins, and the steering with its support and the next pair to ask.

    Args:
        steering: what is known about the user.
        people: the people that the user may be.
        beliefs: their posterior, ``(k + 1, n_factors)``.
        prompt: the question.
        texts: the candidates.
        rewards: of the members, ``(n, k)``.
        average: of the reward for everyone, ``(n,)``.
    """
    wins = people.expected_wins(rewards, average, beliefs)
    best = int(wins.argmax())
    steering = replace(steering, support=float(wins[best]))
    if len(texts) < 2:
        return best, steering
    few = np.argsort(-wins, kind="stable")[:ASK_AMONG]
    first, second = (few[index] for index in np.triu_indices(len(few), 1))
    difference = None if average is None else average[first] - average[second]
    gains = information_gain(people.chances(rewards[first] - rewards[second], difference), beliefs)
    pair = int(gains.argmax())
    asked = Ask(Prompt(prompt).text, texts[first[pair]], texts[second[pair]], float(gains[pair]))
    return best, replace(steering, ask=asked)
