"""What is asked of an ensemble, and the numbers of the ensemble that answer it: ``AnswerRequest`` and ``Voters``.

One request is the same for ``pluralign.answer``, the command and the server. It is checked once, when it is made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from pluralign.core.arrays import FloatArray, IndexArray
from pluralign.core.errors import UsageError, did_you_mean
from pluralign.core.options import check_seed
from pluralign.core.types import Level
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT
from pluralign.text.options import SamplingOptions
from pluralign.theory.posterior import ChoiceModel, person_chances, ranking_log_likelihood
from pluralign.theory.social_choice import COVERS, RULES, first_choices, pairwise_support
from pluralign.votes.load import VotesLike, as_choices
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Item, PromptLike

Mode: TypeAlias = Literal["balanced", "steerable", "distributional"]

MODES: tuple[Mode, ...] = get_args(Mode)

FEW_FOLLOWERS = 0.1
"""Probability that a person follows a member, below which choices and words change the answer little."""
NO_VOICES = (
    "steering cannot help: in the fit, members predicted votes on validation prompts no better than one reward, so "
    "choices and words hardly change the answer; docs/how-to/collect.md describes votes that show voices"
)
ONE_VOICE = "steering cannot help: the ensemble has only one member with weight"


@dataclass(frozen=True, eq=False)
class AnswerRequest:
    """A prompt, and how to answer it.

    Raises:
        UsageError: a name is unknown, the slate would be empty, or options belong to another mode.
    """

    prompt: PromptLike
    mode: Mode = "balanced"
    rule: str = "borda"
    """Balanced: the rule of the consensus, one of ``social_choice.RULES``."""
    level: Level = "policy"
    """Balanced, distributional: members choose by their policies ∝ exp(r/β), or each takes its favourite (``vote``)."""
    slate_size: int | None = None
    """Balanced: number of answers on the slate. Default: 2 or 3 of the candidates, or the policies' own answers."""
    cover: str = "favourite"
    """Balanced: the slate covers people whose ``favourite`` is on it, or one of whose ``top-two`` is."""
    distill: bool = False
    """Balanced: write one statement from the slate, which replaces the consensus if its support is high enough."""
    member: int | None = None
    """Steerable: this member answers."""
    like: str = ""
    """Steerable: a preference in words."""
    choices: VotesLike | None = None
    """Steerable: the user's votes on pairs and rankings, also as a path, a pandas DataFrame or a list of dicts."""
    n: int | None = None
    """Candidates to sample (default: 8), or drafts per policy, of which each member takes its best (default: 1)."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    """How candidates, drafts and statements are sampled; ``seed`` replaces its seed."""
    stop: Sequence[str] = ()
    """Candidates end before the first of these texts."""
    seed: int = 0
    """Seed of samples, tie-breaks and random draws. Different prompts get different draws."""

    def __post_init__(self) -> None:
        names = (("mode", MODES), ("rule", tuple(RULES)), ("level", get_args(Level)), ("cover", tuple(COVERS)))
        for what, known in names:
            if (given := getattr(self, what)) not in known:
                raise UsageError(f"there is no {what} {given!r}; {did_you_mean(str(given), known)}.")
        if self.slate_size is not None and self.slate_size < 1:
            raise UsageError(f"a slate needs at least one answer; slate_size cannot be {self.slate_size}.")
        if self.n is not None and self.n < 1:
            raise UsageError(f"n must be at least one response, not {self.n}.")
        if self.mode != "balanced" and (self.slate_size is not None or self.distill):
            wrong = "distill" if self.slate_size is None else "slate_size"
            raise UsageError(f"{wrong} requires mode balanced; mode {self.mode} has no slate.")
        steered_by = (self.member is not None) + bool(self.like) + (self.choices is not None)
        if self.mode != "steerable" and steered_by:
            raise UsageError(f"member, like and choices require mode steerable; mode {self.mode} takes none of them.")
        if self.mode == "steerable" and steered_by != 1:
            raise UsageError("steerable mode needs one of: a member, a preference in words, or your own choices.")
        check_seed(self.seed)

    @cached_property
    def votes(self) -> PreferenceSet | None:
        """The user's own choices."""
        return None if self.choices is None else as_choices(self.choices)


Encode: TypeAlias = Callable[[Callable[[Sequence[Item]], Any], Sequence[Item]], Any]
"""Takes an encoder and texts; returns the texts' vectors."""


def at_once(encoder: Callable[[Sequence[Item]], Any], items: Sequence[Item]) -> Any:
    """Return the vectors of texts: an ``Encode`` that calls the encoder here, once."""
    return encoder(items)


@dataclass(frozen=True, eq=False)
class Voters:
    """The people that an ensemble predicts: those of each member, the undecided, and people who follow no member."""

    weights: FloatArray
    """``(k,)``."""
    temperature: float = 1.0
    """β of the members' policies; 0 is the limit, where every member votes for its favourite."""
    undecided: float = 0.0
    model: ChoiceModel = field(default_factory=ChoiceModel)

    @classmethod
    def of(cls, ensemble: RewardEnsemble) -> "Voters":
        """Return the voters of an ensemble."""
        return cls(ensemble.weights, ensemble.temperature, ensemble.undecided, ensemble.choice_model)

    def at(self, level: Level) -> "Voters":
        """Return the same voters, who at the vote level vote for their favourites."""
        return self if level == "policy" else replace(self, temperature=0.0)

    @property
    def alpha(self) -> FloatArray:
        """The weights with sum 1."""
        return np.asarray(self.weights / self.weights.sum())

    def support(self, rewards: FloatArray) -> FloatArray:
        """Return the predicted share of people who prefer one candidate to another, ``(n, n)``."""
        return pairwise_support(rewards, self.alpha, self.temperature, self.undecided)

    def first_choices(self, rewards: FloatArray) -> FloatArray:
        """Return the predicted share of people whose favourite each candidate is, ``(n,)``."""
        return first_choices(rewards, self.alpha, self.temperature, self.undecided)

    # --- the person that a user may be: of one of the members, or of none -------------------------------------------

    @property
    def prior(self) -> FloatArray:
        """Prior of every kind of person, ``(k + 1, n_factors)``; the last row follows no member."""
        return self.model.prior(self.weights)

    @property
    def cannot_steer(self) -> str:
        """Why choices and words hardly change an answer: no evidence in the fit that members are people, or one member.

        Example:
            >>> Voters(np.ones(2), model=ChoiceModel(people=0.97, source="raters")).cannot_steer
            ''
        """
        if (self.alpha > 1 - NEGLIGIBLE_WEIGHT).any():
            return ONE_VOICE
        return NO_VOICES if self.model.people < FEW_FOLLOWERS else ""

    def chances(self, difference: FloatArray, average: FloatArray | None) -> FloatArray:
        """Return P(a) of each pair by every kind of person, ``(n, k + 1, n_factors)``."""
        return person_chances(difference, average, self.weights, self.temperature, self.undecided, self.model)

    def log_likelihood(self, rewards: FloatArray, average: FloatArray | None, place: IndexArray) -> FloatArray:
        """Return log P(ranking) by every kind of person, ``(k + 1, n_factors)``."""
        model = self.temperature, self.undecided, self.model
        return ranking_log_likelihood(rewards, average, place, self.weights, *model)

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
