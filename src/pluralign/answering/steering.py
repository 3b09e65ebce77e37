"""Steerable answers: who the user is, and the candidate that the user would choose.

A user is known by a member's number, by choices, or by a preference in words. Words are compared by their meaning with
what the members like; where that is unclear or impossible, they are matched to the traits on the members' cards. Few
choices do not single out one member. So the answer is the candidate with the highest expected share of wins under the
posterior over people: every member, and one reward for everyone.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pluralign.answering.request import AnswerRequest, Encode, Voters, at_once
from pluralign.core.arrays import FloatArray, IndexArray
from pluralign.core.errors import UsageError
from pluralign.core.random_streams import STEERING_WORDS, random_stream
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.measuring.cards import Profile, member_name
from pluralign.measuring.leans import TRAITS, Lean
from pluralign.text.encoders import TextFeatures
from pluralign.text.transformer import ModelEncoder
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


FEW_FOLLOWERS = 0.1
"""Prior probability that a person follows a member, below which choices and words change the answer little."""
FITTED_WITHOUT_IDS = (
    "votes without rater ids do not show whether members are people, so your choices and words change the answer "
    "little; fit with --raters to steer"
)


@dataclass(frozen=True, eq=False)
class User:
    """What is known about a user, and the beliefs about people that follow from choices or from a meaning."""

    steering: Steering
    beliefs: FloatArray | None = None
    """The posterior of every kind of person, ``(k + 1, n_factors)``. None where one member was named, or matched by
    words of the list: then it answers."""


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
    if match is not None and not (match.unclear and any(_matching_leans(request.like, cards))):
        return User(steer_by_meaning(match, voters, cards), voters.believed(match.posterior))
    return User(steer_by_words(request.like, cards, request.seed))


def steering_notes(voters: Voters) -> tuple[str, ...]:
    """Return a note if choices and words can change the answer only little.

    Example:
        >>> from pluralign.theory.posterior import ChoiceModel
        >>> len(steering_notes(Voters(np.ones(1), model=ChoiceModel(people=0.02))))
        1
        >>> steering_notes(Voters(np.ones(1), model=ChoiceModel(people=0.97, source="raters")))
        ()
    """
    unknown = voters.model.source != "raters" and voters.model.people < FEW_FOLLOWERS
    return (FITTED_WITHOUT_IDS,) if unknown else ()


def steer_by_choices(choices: ScoredChoices, voters: Voters) -> Steering:
    """Return what the user's choices say about the user: the posterior of ``theory.posterior``.

    Args:
        choices: the user's choices and the rewards of their responses.
        voters: the prior.
    """
    path = choices.beliefs(voters)[:, :-1].sum(axis=2)
    best = int(path[-1].argmax())
    agreed = f"its favourite is yours in {choices.agreements(best)} of your {len(choices)} choices"
    why = f"{agreed}; its weight was {voters.weights[best]:.2f}"
    steps, nobody = tuple(tuple(step.tolist()) for step in path), float(max(0.0, 1 - path[-1].sum()))
    return Steering(best, why, float(path[-1][best]), steps[-1], steps, average=nobody)


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
    steering = replace(user.steering, support=float(wins[best]))
    if len(texts) < 2:
        return best, steering
    few = np.argsort(-wins, kind="stable")[:ASK_AMONG]
    first, second = (few[index] for index in np.triu_indices(len(few), 1))
    difference = None if average is None else average[first] - average[second]
    gains = theory.information_gain(voters.chances(rewards[first] - rewards[second], difference), beliefs)
    pair = int(gains.argmax())
    return best, replace(steering, ask=Ask(prompt, texts[first[pair]], texts[second[pair]], float(gains[pair])))


# --- Words by their meaning: an encoder, or a language model, compares them with what members like.


COMMON = (
    "I want short answers.", "I want long and detailed answers.", "Use simple words.", "Be formal and professional.",
    "Be warm and friendly.", "Be honest and direct.", "Give me facts, numbers and evidence.",
    "Tell me a story from real life.", "Use lists and headings.", "Write plain paragraphs.", "Ask me questions.",
    "Be careful and admit doubts.", "Be confident and decisive.", "Be optimistic.", "Be critical.", "Show both sides.",
    "Take a clear position.", "Give practical advice.", "Think about families and children.",
    "Think about money and the economy.", "Think about safety.", "Think about freedom.",
    "Think about justice and equality.", "Think about the future.", "Respect experience and history.",
    "Think about health.", "Think about science and technology.", "Think about my own town.",
    "Think about the whole world.", "Make me laugh.",
)  # fmt: skip
"""Usual descriptions. A member is a match if a description fits it better than these do."""
MAX_PAIRS = 1000
"""Held-out pairs whose texts are encoded: those on which members differ most."""
MIN_PROMPTS = 5
"""With fewer held-out prompts the meaning is not matched."""
RESAMPLES = 200
UNCLEAR = 0.5
"""Probability of the best member below which words of the list decide, if the description has any."""
JUDGED_PAIRS = 12
"""Pairs that a language model judges, each in both orders."""
JUDGE_TOKENS = 8
"""Longest reply of a judge."""
MAX_LENGTH = 2000
"""Characters of a response that a language model reads."""


@dataclass(frozen=True, eq=False)
class MeaningMatch:
    """How well a description fits the members."""

    posterior: FloatArray
    """Probability of each member, ``(k,)``, with sum 1."""

    @property
    def unclear(self) -> bool:
        """Whether no member is more likely than all others together."""
        return bool(self.posterior.max() < UNCLEAR)


def sentence_features(ensemble: RewardEnsemble) -> TextFeatures | None:
    """Return the last layer of the ensemble's encoder; None if it has no transformers encoder."""
    if not isinstance(ensemble.features, TextFeatures):
        return None
    features = replace(ensemble.features, layers="last", pooling="mean", surface=False, identity="")
    return features.resolved() if isinstance(features.load(), ModelEncoder) else None


@dataclass(frozen=True, eq=False)
class Likings:
    """What the members like on held-out votes, as directions in the space of sentence vectors."""

    embed: Callable[[Sequence[str]], FloatArray]
    """Takes n texts; returns their vectors, ``(n, d)``."""
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

    @classmethod
    def of(cls, ensemble: RewardEnsemble, held_out: HeldOutVotes, encode: Encode = at_once) -> "Likings | None":
        """Encode held-out texts; their votes are not used. None without a transformers encoder or enough prompts."""
        features = sentence_features(ensemble)
        if features is None or ensemble.k < 2 or len(np.unique(held_out.preferences.prompt_index)) < MIN_PROMPTS:
            return None

        def embed(texts: Sequence[str]) -> FloatArray:
            return np.asarray(encode(features, [("", text) for text in texts]), dtype=np.float64)

        liking = 2 * sigmoid(held_out.difference / ensemble.temperature) - 1
        liking -= (liking @ ensemble.weights)[:, None]
        rows = np.sort(np.argsort(-np.abs(liking) @ ensemble.weights, kind="stable")[:MAX_PAIRS])
        votes = held_out.preferences[rows]
        n, vectors = len(votes.responses), embed([*map(str, votes.responses), *COMMON])
        difference = vectors[votes.a_index] - vectors[votes.b_index]
        mean = vectors[:n].mean(axis=0)
        return cls(embed, difference, liking[rows], votes.prompt_index, mean, vectors[n:], ensemble.weights)

    def match(self, text: str, seed: int = 0) -> MeaningMatch:
        """Compare a description, such as "protect nature first", with what the members like."""
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
    why = f"among the members, “{names.get(best, member_name(best))}” {fits}"
    nobody = float(1 - voters.model.people)
    return Steering(best, why, float(posterior[best]), tuple(posterior.tolist()), average=nobody)


def judged_choices(voters: Voters, held_out: HeldOutVotes, text: str, ask: Callable[[str], str]) -> ScoredChoices:
    """Return the choices that a language model makes for a person with a preference in words.

    Each pair is asked in both orders. A pair on which the two answers differ, or which has no clear answer, is left
    out.

    Args:
        voters: the ensemble's numbers.
        held_out: pairs to choose from: the most informative ones about the member, one per prompt.
        text: the preference.
        ask: takes an instruction; returns the text that a language model writes.

    Raises:
        UsageError: the language model gave no usable answer.
    """
    votes = held_out.preferences
    chance = theory.choice_probability(held_out.difference, voters.temperature, voters.undecided, voters.model.slip)
    rows = theory.most_informative(chance, voters.weights, votes.prompt_index, JUDGED_PAIRS)
    kept, chose_a = [], []
    for row in rows:
        prompt = Prompt(votes.prompts[votes.prompt_index[row]]).text
        pair = str(votes.responses[votes.a_index[row]]), str(votes.responses[votes.b_index[row]])
        first = _verdict(ask(judge_instruction(text, prompt, *pair)))
        second = _verdict(ask(judge_instruction(text, prompt, *reversed(pair))))
        if first is not None and second is not None and first != second:
            kept.append(row)
            chose_a.append(first == "A")
    if not kept:
        raise UsageError("the judge gave no usable answer; try another model, or leave --judge out.")
    chosen, for_a = held_out[np.array(kept)], np.array(chose_a, dtype=np.int64)
    own = replace(chosen.preferences, votes_a=for_a, votes_b=1 - for_a, ties=0 * for_a, judgments=None)
    rankings = rankings_of_one(own)
    return ScoredChoices(rankings, chosen.rewards[rankings.items(own)])


def judge_instruction(text: str, prompt: str, response_a: str, response_b: str) -> str:
    """Return the instruction for one pair."""
    return (
        f"A person says what they want from an answer: {text}\n\nQuestion: {prompt}\n\n"
        f"Response A: {response_a[:MAX_LENGTH]}\n\nResponse B: {response_b[:MAX_LENGTH]}\n\n"
        "Which of the two responses would this person prefer? Reply with one letter, A or B."
    )


def _verdict(reply: str) -> str | None:
    """Return A or B if the reply names exactly one of them, else None.

    Example:
        >>> _verdict("Response B."), _verdict("a"), _verdict("A or B")
        ('B', 'A', None)
    """
    found = {letter.upper() for letter in re.findall(r"\b([AB]|[ab](?=\W*$))\b", reply.strip())}
    return found.pop() if len(found) == 1 else None


# --- Words by a list of words: the fallback where meaning cannot be matched.


DRAWS = 4000
"""Monte Carlo draws behind the posterior of a match by words."""
SURE_ENOUGH = 0.5
"""Posterior below which the reason mentions that other members fit nearly as well."""
WANTED: Mapping[str, tuple[str, str]] = {
    "length": ("long longer detailed thorough depth elaborate extensive", "short shorter brief concise terse succinct"),
    "sentence_length": ("flowing", "crisp snappy"),
    "structure": ("list lists bullet bullets structured steps headings organised organized", "prose paragraphs essay"),
    "questions": ("questions question asking socratic", "unquestioning"),
    "first_person": ("personal i we first-person", "impersonal neutral third-person"),
    "second_person": ("addressing you direct-address", ""),
    "hedging": ("hedged cautious careful tentative nuanced humble uncertain", "blunt unhedged direct straightforward"),
    "certainty": ("certain confident decisive bold assertive firm", "unsure"),
    "directives": ("actionable advice instructions commanding prescriptive practical", "open"),
    "sentiment": ("positive optimistic cheerful upbeat hopeful", "negative critical pessimistic gloomy harsh"),
    "formality": ("formal official professional academic", "informal casual chatty colloquial relaxed"),
    "concreteness": ("concrete specific examples numbers facts factual evidence data", "abstract general principled"),
    "balance": ("balanced both sides fair even-handed compromise impartial", "one-sided partisan opinionated"),
    "warmth": ("warm kind friendly empathetic caring polite compassionate", "cool cold detached matter-of-fact"),
    "readability": ("simple easy plain readable accessible clear", "demanding sophisticated complex scholarly"),
    "echo": ("on-topic", "original"),
}
"""Words that request more or less of each trait."""
KNOWN_WORDS_OF = ("length", "hedging", "formality", "warmth")
"""Traits whose words an error suggests."""
_NEGATIONS = frozenset(["not", "no", "less", "without", "never", "fewer", "dont", "don't", "avoid", "hate", "dislike"])


def steer_by_words(text: str, profiles: Sequence[Profile], seed: int = 0) -> Steering:
    """Choose the member whose measured leans match a preference in words.

    The words are looked up in ``WANTED``, which maps words to more or less of a trait, and among the words that the
    members' cards list as liked or disliked. A member's fit is the mean of its leans in the wanted directions. The
    posterior is the share of random draws of all leans, within their standard errors, in which the member fits best.

    Args:
        text: such as "short, warm answers without lists".
        profiles: the members' cards.
        seed: of the draws.

    Raises:
        UsageError: if there are no cards, no word matches, or no member leans in the wanted direction.
    """
    if not profiles:
        problem = "a preference in words is matched to the members' cards, which need held-out votes"
        raise UsageError(f"{problem}; pluralign fit keeps them in the ensemble's folder.")
    matches = _matching_leans(text, profiles)
    if not any(matches):
        some = ", ".join(side.split()[0] for trait in KNOWN_WORDS_OF for side in WANTED[trait])
        remedy = f"try words such as {some}, or give a few choices of your own"
        raise UsageError(f"nothing in {text!r} names a trait that the cards measure; {remedy}.")
    random = random_stream(seed, STEERING_WORDS)
    # Dividing by the matches of all members, not its own: a trait that a card lacks adds 0 to the member's fit.
    n = len({lean.trait for leans in matches for lean, _ in leans})
    scores = np.array([sum(sign * lean.own for lean, sign in leans) / n for leans in matches])
    errors = np.array([sum(lean.standard_error**2 for lean, _ in leans) ** 0.5 / n for leans in matches])
    drawn = scores + errors * random.standard_normal((DRAWS, len(scores)))
    posterior = np.bincount(drawn.argmax(axis=1), minlength=len(scores)) / DRAWS
    best = int(posterior.argmax())
    if scores[best] <= 0:
        raise UsageError(f"no member leans towards {text!r}; the nearest is {profiles[best].name!r}.")
    why = f"“{profiles[best].name}” fits {'; '.join(_reason(lean, sign) for lean, sign in matches[best])}"
    if posterior[best] < SURE_ENOUGH:
        why += "; others fit nearly as well"
    return Steering(best, why, float(posterior[best]), tuple(posterior.tolist()))


def _matching_leans(text: str, profiles: Sequence[Profile]) -> list[list[tuple[Lean, int]]]:
    """Return, per member, the leans that the text names, each with its wanted direction: +1 more, −1 less."""
    wanted = wanted_traits(text)
    words = set(re.findall(r"[\w'-]+", text.casefold()))
    matches = []
    for card in profiles:
        leans = [(lean, wanted[lean.trait]) for lean in card.leans if lean.trait in wanted and np.isfinite(lean.own)]
        leans += [(lean, 1) for lean in (*card.likes, *card.dislikes) if lean.trait in words and np.isfinite(lean.own)]
        matches.append(leans)
    return matches


def _reason(lean: Lean, sign: int) -> str:
    labels = {trait.key: trait.more if sign > 0 else trait.less for trait in TRAITS}
    own, everyone = (1 + sign * lean.own) / 2, (1 + sign * lean.ensemble) / 2
    return f"{labels.get(lean.trait, lean.trait)}: chosen in {own:.0%} of pairs (all members together: {everyone:.0%})"


def wanted_traits(text: str) -> dict[str, int]:
    """Return the traits that a text requests: +1 for more, −1 for less of each.

    Example:
        >>> wanted_traits("short, warm answers without lists")
        {'length': -1, 'warmth': 1, 'structure': -1}
    """
    wanted: dict[str, int] = {}
    for clause in re.split(r"[,.;:!?]|\bbut\b", text.casefold()):  # a negation ends with its clause
        words = re.findall(r"[\w'-]+", clause)
        for place, word in enumerate(words):
            direction = -1 if _NEGATIONS & set(words[max(0, place - 2) : place]) else 1
            for trait, (more, less) in WANTED.items():
                if word in more.split() or word in less.split():
                    wanted[trait] = direction * (1 if word in more.split() else -1)
    return wanted
