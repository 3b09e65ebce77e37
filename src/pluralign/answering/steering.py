"""Steerable answers: who the user is, and the candidate that the user would choose.

A user is known by a member's number, by choices, or by a preference in words, which is compared by its meaning with
what the members like. Few choices do not single out one member. So the answer is the candidate with the highest
expected share of wins under the posterior over people: every member, and one reward for everyone. ``Steering.note``
says if choices or words cannot change it, and why.
"""

import itertools
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import numpy as np

from pluralign.answering.gate import Embed, sentence_embedding, spoken_words, words_of
from pluralign.answering.generate import concurrency_of
from pluralign.answering.request import FEW_FOLLOWERS, AnswerRequest, Encode, Voters, at_once
from pluralign.core.arrays import FloatArray, IndexArray
from pluralign.core.errors import UsageError
from pluralign.core.random_streams import STEERING_WORDS, random_stream
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.measuring.cards import Profile, member_name
from pluralign.text.judge import JudgeModel, Question, judge_pairs
from pluralign.theory import posterior as theory
from pluralign.theory.calibration import sigmoid
from pluralign.votes.judgments import Judgments, rankings_of_one
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.prompts import Item, Prompt

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
    answer_a: str
    """The answer to the prompt if the user chooses a."""
    answer_b: str


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
    """The prior, then the posterior after each of the user's choices. Empty for a member that was named."""
    average: float = 0.0
    """Probability that the user follows no member: then one reward for everyone predicts the choices."""
    support: float | None = None
    """Expected share of the other candidates that the user would reject for the answer. None for one member."""
    ask: Ask | None = None
    """The choice that would say most next."""
    before: str | None = None
    """The answer without the user's choices or words."""
    note: str = ""
    """Why choices or words cannot change the answer, or do not; empty if they can."""


@dataclass(frozen=True, eq=False)
class ScoredChoices:
    """The user's choices as rankings, with the rewards of the responses. A vote on a pair is a ranking of two."""

    rankings: Judgments
    rewards: FloatArray
    """Of the members for each entry of the rankings, ``(n_entries, k)``."""
    average: FloatArray | None = None
    """The reward for everyone, ``(n_entries,)``; None if there is none."""

    @classmethod
    def of(
        cls, ensemble: RewardEnsemble, votes: PreferenceSet, score: Callable[[list[Item]], FloatArray] | None = None
    ) -> "ScoredChoices":
        """Score the user's choices with an ensemble; ``score`` is its ``rewards_and_average`` by default."""
        rankings, k = rankings_of_one(votes), ensemble.k
        rewards = (score or ensemble.rewards_and_average)(texts_of(votes))[rankings.items(votes)]
        return cls(rankings, rewards[:, :k], rewards[:, k] if rewards.shape[1] > k else None)

    def __len__(self) -> int:
        """Return the number of choices."""
        return len(self.rankings)

    def beliefs(self, voters: Voters) -> FloatArray:
        """Return the posterior of every kind of person after 0, 1, … choices, ``(n_choices + 1, k + 1, n_factors)``."""
        total, start = [np.zeros_like(prior := voters.prior)], self.rankings.start
        for entries in map(slice, start[:-1], start[1:]):
            average, place = None if self.average is None else self.average[entries], self.rankings.place[entries]
            total.append(total[-1] + voters.log_likelihood(self.rewards[entries], average, place))
        return np.stack([theory.person_posterior(one[None], prior) for one in total])

    def agreements(self, member: int) -> int:
        """Return the number of choices in which a member's favourite is in the first place."""
        start = self.rankings.start
        best = [self.rewards[one:end, member].argmax() for one, end in itertools.pairwise(start)]
        return int((self.rankings.place[start[:-1] + best] == 0).sum())


NOBODY = "your choices fit no member better than one reward for everyone, so the answer is that for everyone"
NO_MEANING = (
    "words cannot steer this ensemble and changed nothing: comparing them needs an encoder that reads their meaning, "
    "such as minilm, and held-out votes on several prompts"
)
UNKNOWN_WORDS = "none of your words is in the texts that people voted on, so they changed nothing"


@dataclass(frozen=True, eq=False)
class User:
    """What is known about a user, and the beliefs about people that follow from choices or from a meaning."""

    steering: Steering
    beliefs: FloatArray | None = None
    """The posterior of every kind of person, ``(k + 1, n_factors)``. None where one member was named: it answers."""


def find_user(
    request: AnswerRequest,
    voters: Voters,
    *,
    choices: ScoredChoices | None = None,
    cards: Sequence[Profile] = (),
    match: "MeaningMatch | None" = None,
) -> User:
    """Return what a request says about its user.

    Args:
        request: in steerable mode.
        voters: the people that the user may be.
        choices: those of the user, or of a judge for the user.
        cards: the members' cards, for ``like``.
        match: the members that ``like`` describes by its meaning.
    """
    if choices is not None:
        return User(steer_by_choices(choices, voters), choices.beliefs(voters)[-1])
    if request.member is not None:
        if not 0 <= (member := request.member) < (k := len(voters.weights)):
            raise UsageError(f"members are numbered from 0 to {k - 1}; there is no member {member}.")
        return User(Steering(member, "it was requested by number", 1.0, tuple(np.eye(k)[member].tolist())))
    match = match or MeaningMatch(voters.alpha, NO_MEANING)
    return User(steer_by_meaning(match, voters, cards), voters.believed(match.posterior))


def steer_by_choices(choices: ScoredChoices, voters: Voters) -> Steering:
    """Return what the user's choices say about the user: the posterior of ``theory.posterior``.

    Args:
        choices: the user's choices and the rewards of their responses.
        voters: the prior.
    """
    path = choices.beliefs(voters)[:, :-1].sum(axis=2)
    best, of_members = int(path[-1].argmax()), float(path[-1].sum())
    agreed = f"its favourite is yours in {choices.agreements(best)} of your {len(choices)} choices"
    why = f"{agreed}; its weight was {voters.weights[best]:.2f}"
    steps = tuple(tuple(step.tolist()) for step in path)
    note = voters.cannot_steer or (NOBODY if of_members < FEW_FOLLOWERS else "")
    nobody = max(0.0, 1 - of_members)
    return Steering(best, why, float(path[-1][best]), steps[-1], steps, average=nobody, note=note)


def answer_for(
    user: User, voters: Voters, prompt: str, texts: Sequence[str], rewards: FloatArray, average: FloatArray | None
) -> tuple[int, Steering]:
    """Return the candidate with the most expected wins, and the steering with its support and the next pair to ask.

    Args:
        user: what is known about the user, with beliefs.
        voters: the people that the user may be.
        prompt: the question.
        texts: the candidates.
        rewards: of the members, ``(n, k)``.
        average: of the reward for everyone, ``(n,)``.
    """
    beliefs = user.beliefs
    assert beliefs is not None  # noqa: S101 - not for a user known as a member
    wins = voters.expected_wins(rewards, average, beliefs)
    best = int(wins.argmax())
    before = texts[int(voters.expected_wins(rewards, average, voters.prior).argmax())]
    if len(texts) < 2:
        return best, replace(user.steering, before=before)
    few = np.argsort(-wins, kind="stable")[:ASK_AMONG]
    first, second = (few[index] for index in np.triu_indices(len(few), 1))
    difference = None if average is None else average[first] - average[second]
    chances = voters.chances(rewards[first] - rewards[second], difference)
    gains = theory.information_gain(chances, beliefs)
    pair = int(gains.argmax())
    answers = []
    for chance in (chances[pair], 1 - chances[pair]):
        after = beliefs * chance
        answers.append(texts[int(voters.expected_wins(rewards, average, after / after.sum()).argmax())])
    ask = Ask(prompt, texts[first[pair]], texts[second[pair]], float(gains[pair]), *answers)
    return best, replace(user.steering, support=float(wins[best]), ask=ask, before=before)


# --- Words by their meaning: an encoder, or a language model, compares them with what members like.


COMMON = tomllib.loads(files("pluralign").joinpath("answering/descriptions.toml").read_text(encoding="utf-8"))["common"]
"""Usual descriptions. A member is a match if a description fits it better than these do."""
MAX_PAIRS = 1000
"""Held-out pairs whose texts are encoded: those on which members differ most."""
MIN_PROMPTS = 5
"""With fewer held-out prompts the meaning is not matched."""
RESAMPLES = 200
JUDGED_PAIRS = 12
"""Pairs that a language model judges, each in both orders."""
UNCLEAR = 0.25
"""A judged pair counts if the mean probability of a response over both orders is further than this from ½."""


@dataclass(frozen=True, eq=False)
class MeaningMatch:
    """How well a description fits the members."""

    posterior: FloatArray
    """Probability of each member, ``(k,)``, with sum 1."""
    note: str = ""
    """Why the description says nothing about the members; then the posterior is their weights."""


@dataclass(frozen=True, eq=False)
class Likings:
    """What the members like on held-out votes, as directions in the space of sentence vectors."""

    embed: Embed
    difference: FloatArray
    """v_a − v_b of each pair, ``(n_pairs, d)``."""
    liking: FloatArray
    """How clearly each member prefers a, less the ensemble's mean, ``(n_pairs, k)``."""
    prompts: IndexArray
    mean: FloatArray
    """Mean vector of the responses, ``(d,)``."""
    common: FloatArray
    """Vectors of the usual descriptions ``COMMON``."""
    weights: FloatArray
    words: frozenset[str]
    """The words of the responses and of the usual descriptions."""

    @classmethod
    def of(cls, ensemble: RewardEnsemble, held_out: HeldOutVotes, encode: Encode = at_once) -> "Likings | None":
        """Encode held-out texts; their votes are not used. None without a transformers encoder or enough prompts."""
        if ensemble.k < 2 or len(np.unique(held_out.preferences.prompt_index)) < MIN_PROMPTS:
            return None
        if (embed := sentence_embedding(ensemble.features, encode)) is None:
            return None
        liking = 2 * sigmoid(held_out.difference / ensemble.temperature) - 1
        liking -= (liking @ ensemble.weights)[:, None]
        rows = np.sort(np.argsort(-np.abs(liking) @ ensemble.weights, kind="stable")[:MAX_PAIRS])
        votes = held_out.preferences[rows]
        texts = [*held_out.preferences.responses, *(Prompt(one).text for one in held_out.preferences.prompts), *COMMON]
        words = frozenset(word for text in texts for word in words_of(text))
        n, vectors = len(votes.responses), embed([*map(str, votes.responses), *COMMON], cache=True)
        difference = vectors[votes.a_index] - vectors[votes.b_index]
        mean = vectors[:n].mean(axis=0)
        return cls(embed, difference, liking[rows], votes.prompt_index, mean, vectors[n:], ensemble.weights, words)

    def match(self, text: str, seed: int = 0) -> MeaningMatch:
        """Compare a description, such as "protect nature first", with what the members like."""
        if self.words.isdisjoint(spoken_words(text)):
            return MeaningMatch(self.weights / self.weights.sum(), UNKNOWN_WORDS)
        described = np.vstack([self.common, self.embed([text])]) - self.mean
        known = self.difference, self.liking, self.prompts
        return MeaningMatch(meaning_posterior(*known, described, self.weights, seed))


def meaning_posterior(
    difference: FloatArray,
    liking: FloatArray,
    prompts: IndexArray,
    described: FloatArray,
    weights: FloatArray,
    seed: int = 0,
) -> FloatArray:
    """Return the probability of each member given a description, ``(k,)``.

    Args:
        difference: v_a − v_b of each pair, ``(n_pairs, d)``.
        liking: how clearly each member prefers a, less the ensemble's mean, ``(n_pairs, k)``.
        prompts: prompt of each pair, ``(n_pairs,)``.
        described: centred vectors of usual descriptions, and of the description in the last row, ``(n + 1, d)``.
        weights: α, ``(k,)``.
        seed: of the bootstrap over prompts.
    """
    names, prompt = np.unique(prompts, return_inverse=True)
    random, k = random_stream(seed, STEERING_WORDS), liking.shape[1]
    unit = described / np.maximum(np.linalg.norm(described, axis=1, keepdims=True), 1e-12)
    posterior = np.zeros(k)
    for _ in range(RESAMPLES):
        count = np.bincount(random.integers(len(names), size=len(names)), minlength=len(names))
        direction = difference.T @ (liking * count[prompt][:, None])
        cosine = unit @ (direction / np.maximum(np.linalg.norm(direction, axis=0), 1e-12))
        z = (cosine[-1] - cosine[:-1].mean(axis=0)) / np.maximum(cosine[:-1].std(axis=0), 1e-12)
        fit = weights * np.exp(z - z.max())
        posterior += fit / fit.sum() / RESAMPLES
    return posterior


def steer_by_meaning(match: MeaningMatch, voters: Voters, profiles: Sequence[Profile] = ()) -> Steering:
    """Return what a description says about the user.

    A description does not show whether the user follows any member, so that probability stays as in the choice model.
    """
    posterior = voters.model.people * match.posterior
    best = int(posterior.argmax())
    names = {card.member: card.label for card in profiles}
    fits = f"fits your words with probability {match.posterior[best]:.0%}, by their meaning"
    why = match.note or f"among the members, “{names.get(best, member_name(best))}” {fits}"
    prior, known = (tuple((voters.model.people * of).tolist()) for of in (voters.alpha, match.posterior))
    note, nobody = match.note or voters.cannot_steer, float(1 - voters.model.people)
    return Steering(best, why, known[best], known, (prior,), average=nobody, note=note)


def judged_choices(voters: Voters, held_out: HeldOutVotes, text: str, judge: JudgeModel) -> ScoredChoices:
    """Return the choices that a language model makes for a person with a preference in words.

    Each pair is asked in both orders. A pair on which the answers differ, or are not clear, is left out.

    Args:
        voters: the ensemble's numbers.
        held_out: pairs to choose from: the most informative ones about the member, one per prompt.
        text: the preference.
        judge: the language model.

    Raises:
        UsageError: the language model gave no usable answer.
    """
    votes = held_out.preferences
    chance = theory.choice_probability(held_out.difference, voters.temperature, voters.undecided, voters.model.slip)
    rows = np.array(theory.most_informative(chance, voters.weights, votes.prompt_index, JUDGED_PAIRS))
    asked, person = votes[rows], f"From an answer this person wants: {text}"
    parts = (of.tolist() for of in (asked.prompt_index, asked.a_index, asked.b_index))
    questions = [
        Question(person, Prompt(asked.prompts[prompt]).text, str(asked.responses[a]), str(asked.responses[b]))
        for prompt, a, b in zip(*parts, strict=True)
    ]
    prob_a = judge_pairs(judge, questions, concurrency=concurrency_of(judge)).prob_a
    clear = np.abs(prob_a - 0.5) > UNCLEAR
    if not clear.any():
        raise UsageError("the judge gave no usable answer; try another model, or leave --judge out.")
    chosen, for_a = held_out[rows[clear]], (prob_a[clear] > 0.5).astype(np.int64)
    own = replace(chosen.preferences, votes_a=for_a, votes_b=1 - for_a, ties=0 * for_a, judgments=None)
    rankings = rankings_of_one(own)
    return ScoredChoices(rankings, chosen.rewards[rankings.items(own)])
