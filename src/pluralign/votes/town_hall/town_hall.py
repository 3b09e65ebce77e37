"""A synthetic town hall: questions, answers in English, and a population with known preferences.

Every response has numeric features that its text expresses. Every annotator i has a taste over the same features, and
the reward u_i(x, y) = taste_i · features(x, y) decides each vote. So annotators are reward-inducible, as the paper
assumes (§2), and the true share p* of any pair is counted, not estimated. The features are the position of a
response on four value axes, which depends on stance *and* issue, and its manner, such as length, tone and kind of
argument. The wording is in ``writing``; people, prompts, pairs and votes are drawn here.

There are no ties: tastes are drawn from a continuous distribution and no two responses to a prompt have the same
features, so a tie has probability zero (below 1e-10 per vote after the rounding described at ``TASTE_GRID``).
"""

import math
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, IntArray
from pluralign.core.errors import UsageError
from pluralign.votes.judgments import Judgments, by_first_appearance, ranges
from pluralign.votes.options import Loaded
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.town_hall import writing

# --- The people: the features of a response, and the tastes of six camps over them.

_PEOPLE = writing.read_toml("people.toml")

TASTE_GRID = 2.0**-38
"""Tastes are multiples of this and features of 2^-7, so a reward below 2^8 is exact in 53 bits for every order of
summation. p* and ``annotator_votes`` agree to the last vote and depend neither on block sizes nor on the BLAS."""

CAMP_SHARES: dict[str, float] = _PEOPLE["camps"]
TASTES: dict[str, tuple[list[float], float]] = _PEOPLE["tastes"]
"""For each feature its mean in each camp, and the standard deviation within a camp."""
FEATURES = tuple(TASTES)
CAMPS = tuple(CAMP_SHARES)


class Stream(IntEnum):
    """Independent random streams. More pairs do not change the people, and more people do not change the texts."""

    TOPICS = 0
    ATTRIBUTES = 1
    WORDING = 2
    PAIRS = 3
    VOTES = 4
    PEOPLE = 5


def draw_population(n_annotators: int) -> tuple[IntArray, FloatArray]:
    """Return the camp and the taste of each annotator. Camps have their shares, up to rounding to whole people."""
    random = town_stream(0, Stream.PEOPLE)  # the same people in every town
    edges = np.cumsum(list(CAMP_SHARES.values()))
    camps = np.searchsorted(edges, (np.arange(n_annotators) + 0.5) / n_annotators * edges[-1]).astype(np.int64)
    camps = random.permutation(camps)
    mean = np.array([camp_means for camp_means, _ in TASTES.values()]).T
    spread = np.array([spread for _, spread in TASTES.values()])
    tastes = mean[camps] + spread * random.standard_normal((n_annotators, len(FEATURES)))
    return camps, np.round(tastes / TASTE_GRID) * TASTE_GRID


def features_of(issue: IntArray, attributes: IntArray) -> FloatArray:
    """Return the features of attribute levels, ``(n_items, n_features)`` in the order of ``FEATURES``, in [-1, 1]."""
    levels = writing.Attributes(*attributes.T)
    loadings = np.array([topic.loadings for topic in writing.load_issues()])
    values = {name: np.array(given) for name, given in _PEOPLE["levels"].items()}
    position = values["position"][levels.stance] * values["strength"][levels.hedging]
    is_stance = [levels.stance == writing.STANCES.index(name) for name in ("compromise", "undecided")]
    is_support = [levels.support == writing.SUPPORTS.index(name) for name in ("figures", "story", "fairness", "cost")]
    by_attribute = {"length": levels.length, "warmth": levels.tone, "formality": levels.tone, "hedging": levels.hedging}
    style = [values[name][level] for name, level in by_attribute.items()]
    is_list = [levels.structure != writing.PROSE, levels.structure == writing.NUMBERED]
    manner = [*is_stance, *style, *is_list, *is_support, levels.call, levels.question]
    return np.column_stack([position[:, None] * loadings[issue], *manner]).astype(np.float64)


def town_stream(seed: int, *key: Stream) -> np.random.Generator:
    """Return the random generator of a stream."""
    check_at_least("seed", seed, 0)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise UsageError unless a value is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {value!r}.")


# --- Prompts, pairs and votes.

LEVEL_SHARES: list[list[float]] = list(_PEOPLE["level_shares"].values())
"""Probability of each level of an attribute, in the order of ``Attributes``."""
# Answers to one question lean for or against, as samples of one writer do, so many pairs share a stance and differ in
# manner. This share of the answers follows the leaning; the rest are drawn from LEVEL_SHARES.
LEANING_SHARE = 0.4

DEFAULT_PAIRS = 2000
DEFAULT_RANKED_PAIRS = 2500  # of 250 prompts, as many as above
DEFAULT_PAIRS_PER_PROMPT = 8
_PAIRS_PER_BLOCK = 2048  # times 1,000 annotators in float64: 16 MB at a time


@dataclass(frozen=True)
class TownHall:
    """Votes, and the true preferences of the population behind them."""

    preferences: PreferenceSet
    """The votes. Pairs of one prompt are adjacent, and every response text belongs to one prompt, so item i of
    ``preferences.items()`` is ``preferences.responses[i]``."""
    true_prob: FloatArray
    """p*, the exact share of the population that prefers response a, ``(n_pairs,)``."""
    tastes: FloatArray
    """Taste of each annotator, ``(n_annotators, n_features)``."""
    features: FloatArray
    """Features of each response, in the order of ``preferences.responses``, ``(n_items, n_features)``."""
    attributes: IntArray
    """Levels of each response, ``(n_items, n_attributes)``, see ``Attributes``."""
    camps: IntArray
    """Camp of each annotator, ``(n_annotators,)``, an index into ``camp_names``."""
    people: IntArray | None = None
    """Annotator behind each person of ``preferences.judgments``, ``(n_persons,)``, if people rank."""
    feature_names: tuple[str, ...] = FEATURES
    camp_names: tuple[str, ...] = CAMPS

    def annotator_rewards(self, annotators: npt.ArrayLike) -> FloatArray:
        """Return the true rewards of the given annotators for every response, ``(n_items, n_chosen)``."""
        return np.asarray(self.features @ self.tastes[np.atleast_1d(annotators)].T)

    def annotator_votes(self, annotators: npt.ArrayLike) -> FloatArray:
        """Return the votes of the given annotators on every pair: 1 if they prefer a, else 0, ``(n_pairs, n_chosen)``.

        With k annotators drawn at random and equal weights this is the ensemble of Theorem 2's proof, whose expected
        calibration error is the mean of p*(1 - p*) / k.

        Example:
            >>> hall = town_hall(40, n_annotators=100)
            >>> votes = hall.annotator_votes(range(100))
            >>> bool((votes.mean(axis=1) == hall.true_prob).all())
            True
        """
        rewards = self.annotator_rewards(annotators)
        return (rewards[self.preferences.a_index] > rewards[self.preferences.b_index]).astype(np.float64)

    def camp_rewards(self) -> FloatArray:
        """Return the true reward of each camp for every response, ``(n_items, n_camps)``.

        The reward of a camp is that of the mean taste of its people: R_c(x, y) = features(x, y) · mean taste_i.
        A camp without people has NaN.

        Example:
            >>> town_hall(40).camp_rewards().shape[1]
            6
        """
        member_of = self.camps == np.arange(len(self.camp_names))[:, None]
        with np.errstate(invalid="ignore"):  # a camp without people
            means = member_of @ self.tastes / member_of.sum(axis=1, keepdims=True)
        return np.asarray(self.features @ means.T)


def town_hall(
    n_pairs: int = DEFAULT_PAIRS,
    *,
    seed: int = 0,
    votes_per_pair: int | tuple[int, int] = 5,
    n_annotators: int = 1000,
    n_responses_per_prompt: int | None = None,
    pairs_per_prompt: int | None = None,
    rankings: bool = False,
) -> TownHall:
    """Draw prompts, responses, pairs and votes from a population with known tastes.

    For each vote an annotator is drawn uniformly from the population, with replacement, as Lemma 1 assumes: with n
    votes on a pair, votes_a ~ Binomial(n, p*). The same arguments give the same texts and votes.

    Args:
        n_pairs: number of pairs, in random orientation.
        seed: random seed of prompts, responses, pairs and votes. Another seed is another sample of the same population.
        votes_per_pair: number of votes per pair, or (low, high) for a uniform draw from that range, both included.
        n_annotators: number of people in the population.
        n_responses_per_prompt: responses from which pairs are drawn; responses in no pair are dropped. By default 6, or
            5 if people rank.
        pairs_per_prompt: distinct pairs per prompt; by default 8, or all if there are fewer or people rank.
        rankings: for each prompt ``votes_per_pair`` people are drawn, and each ranks all its responses. The counts are
            sums over these people, so pairs of a prompt are not independent.

    Example:
        >>> hall = town_hall(80, seed=1)
        >>> len(hall.preferences), hall.preferences.n_votes[0], hall.tastes.shape
        (80, np.int64(5), (1000, 18))
    """
    low, high = votes_per_pair if isinstance(votes_per_pair, tuple) else (votes_per_pair, votes_per_pair)
    usual = 5 if rankings else 6
    n_responses = usual if n_responses_per_prompt is None else n_responses_per_prompt
    all_pairs = n_responses * (n_responses - 1) // 2
    usual_pairs = all_pairs if rankings else min(DEFAULT_PAIRS_PER_PROMPT, all_pairs)
    per_prompt = usual_pairs if pairs_per_prompt is None else pairs_per_prompt
    for name, value, least in (
        ("n_pairs", n_pairs, 1),
        ("n_annotators", n_annotators, 1),
        ("n_responses_per_prompt", n_responses, 2),
        ("pairs_per_prompt", per_prompt, 1),
        ("votes_per_pair", low, 1),
        ("the upper end of votes_per_pair", high, low),
    ):
        check_at_least(name, value, least)
    if per_prompt > all_pairs:
        most = f"{all_pairs}, the pairs among {n_responses} responses"
        raise UsageError(f"pairs_per_prompt must be at most {most}, not {per_prompt}: use more responses per prompt.")
    camps, tastes = draw_population(n_annotators)
    n_prompts = -(-n_pairs // per_prompt)
    topics = _draw_topics(n_prompts, town_stream(seed, Stream.TOPICS))
    attributes = _draw_attributes(n_prompts, n_responses, town_stream(seed, Stream.ATTRIBUTES))
    prompt_index, items = _draw_pairs(n_pairs, n_prompts, n_responses, per_prompt, town_stream(seed, Stream.PAIRS))
    used, number = by_first_appearance(items.ravel())
    items = number.reshape(items.shape).astype(np.int64)
    topic_of_item = used // n_responses
    attributes = attributes.reshape(-1, attributes.shape[-1])[used]
    features = features_of(topics[topic_of_item, 0], attributes)
    prob = _share_preferring_first(features, items, tastes)

    random = town_stream(seed, Stream.VOTES)
    people = judgments = None
    if rankings:
        n_people = random.integers(low, high + 1, size=n_prompts)
        people = random.integers(n_annotators, size=n_people.sum())
        judgments = _rank(features, np.bincount(topic_of_item), tastes[people], n_people)
        n_votes = n_people[prompt_index]
        voter = people[ranges((np.cumsum(n_people) - n_people)[prompt_index], n_votes)]
        difference = np.repeat(features[items[:, 0]] - features[items[:, 1]], n_votes, axis=0)
        pair = np.repeat(np.arange(n_pairs), n_votes)
        votes_a = np.bincount(pair[_rewards(difference, tastes[voter]) > 0], minlength=n_pairs)
    else:
        n_votes = random.integers(low, high + 1, size=n_pairs)
        votes_a = random.binomial(n_votes, prob)
    prompts = [writing.write_prompt(*topic) for topic in topics.tolist()]
    responses = _write_distinct(topics[topic_of_item], attributes, town_stream(seed, Stream.WORDING))
    texts, votes = (prompts, responses, prompt_index, items[:, 0], items[:, 1]), (votes_a, n_votes - votes_a)
    name = "demo-rankings" if rankings else "demo"
    preferences = PreferenceSet.from_indices(*texts, *votes, name=name, judgments=judgments)
    if (seed, votes_per_pair, n_annotators, n_responses, per_prompt) == (0, 5, 1000, usual, usual_pairs):
        preferences = replace(preferences, loaded=Loaded(f"{name}:{n_pairs}"))
    return TownHall(preferences, prob, tastes, features, attributes, camps, people)


def _rewards(features: FloatArray, tastes: FloatArray) -> FloatArray:
    return np.asarray(np.einsum("ef,ef->e", features, tastes))


def _rank(features: FloatArray, n_items: IntArray, tastes: FloatArray, n_people: IntArray) -> Judgments:
    """Return the rankings of people, each of all items of a prompt.

    Args:
        features: of the items, sorted by prompt.
        n_items: of each prompt.
        tastes: of the people, sorted by prompt.
        n_people: of each prompt.
    """
    prompt = np.repeat(np.arange(len(n_people)), n_people)
    person = np.repeat(np.arange(len(prompt)), n_items[prompt])
    item = ranges((np.cumsum(n_items) - n_items)[prompt], n_items[prompt])
    rewards = _rewards(features[item], tastes[person])
    return Judgments.from_scores(np.arange(len(prompt)), prompt, n_items[prompt], item, rewards)


def _draw_topics(n_prompts: int, random: np.random.Generator) -> IntArray:
    """Draw distinct rows of (issue, town, place, question, day), ``(n_prompts, 5)``, each issue equally often."""
    words = writing.load_words()
    n_places = np.array([len(words.places_of[issue.kind]) for issue in writing.load_issues()])
    n_towns, n_questions = len(words.towns), len(words.questions)
    n_distinct = n_towns * n_questions * n_places
    most = len(writing.load_issues()) * int(n_distinct.min())
    if n_prompts > most:
        raise UsageError(f"at most {most:,} distinct prompts exist, not {n_prompts:,}: use more pairs per prompt.")
    rounds = -(-n_prompts // len(writing.load_issues()))
    issue = random.permuted(np.tile(np.arange(len(writing.load_issues())), (rounds, 1)), axis=1).ravel()[:n_prompts]
    code = np.empty(n_prompts, dtype=np.int64)
    for index, size in enumerate(n_distinct.tolist()):
        rows = np.flatnonzero(issue == index)
        code[rows] = random.choice(size, size=len(rows), replace=False)
    code, question = np.divmod(code, n_questions)
    place, town = np.divmod(code, n_towns)
    return np.stack([issue, town, place, question, random.integers(0, len(words.days), n_prompts)], axis=1)


def _draw_attributes(n_prompts: int, n_responses: int, random: np.random.Generator) -> IntArray:
    """Draw attribute levels, ``(n_prompts, n_responses, n_attributes)``, distinct within each prompt."""
    stance, length, structure = (writing.Attributes._fields.index(name) for name in ("stance", "length", "structure"))
    sizes = [len(shares) for shares in LEVEL_SHARES]
    leaning = random.integers(0, 2, size=n_prompts)  # 0: for, 1: against

    def draw(prompt: IntArray) -> IntArray:
        levels = np.stack([random.choice(len(p), size=len(prompt), p=p) for p in LEVEL_SHARES], axis=1)
        leans = random.random(len(prompt)) < LEANING_SHARE
        levels[:, stance] = np.where(leans, leaning[prompt], levels[:, stance])
        levels[levels[:, length] == 0, structure] = writing.PROSE  # one sentence cannot be a list
        return levels

    prompt = np.repeat(np.arange(n_prompts), n_responses)
    levels = draw(prompt)
    while True:
        code = prompt * math.prod(sizes) + np.ravel_multi_index(tuple(levels.T), sizes)
        repeated = np.ones(len(code), dtype=bool)
        repeated[np.unique(code, return_index=True)[1]] = False
        if not repeated.any():
            return levels.reshape(n_prompts, n_responses, -1)
        levels[repeated] = draw(prompt[repeated])


def _draw_pairs(
    n_pairs: int, n_prompts: int, n_responses: int, per_prompt: int, random: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Draw distinct pairs within each prompt, oriented at random: prompts ``(n_pairs,)`` and items ``(n_pairs, 2)``."""
    possible = np.stack(np.triu_indices(n_responses, k=1), axis=1)
    order = random.random((n_prompts, len(possible))).argsort(axis=1)[:, :per_prompt]
    prompt = np.repeat(np.arange(n_prompts), per_prompt)[:n_pairs]
    pairs = random.permuted(possible[order].reshape(-1, 2), axis=1)[:n_pairs]
    return prompt, pairs + prompt[:, None] * n_responses


def _share_preferring_first(features: FloatArray, items: IntArray, tastes: FloatArray) -> FloatArray:
    """Return p* of each pair, ``(n_pairs,)``: the share of annotators with a higher reward for the first item."""
    share = np.empty(len(items))
    for start in range(0, len(items), _PAIRS_PER_BLOCK):
        block = items[start : start + _PAIRS_PER_BLOCK]
        difference = features[block[:, 0]] - features[block[:, 1]]
        share[start : start + len(block)] = np.count_nonzero(difference @ tastes.T > 0, axis=1)
    return share / len(tastes)


def _write_distinct(topics: IntArray, attributes: IntArray, random: np.random.Generator) -> list[str]:
    """Write a response for every row. A text that was written before is replaced by one with other words."""
    texts: dict[str, None] = {}
    for start in range(0, len(topics), 8192):
        rows = slice(start, start + 8192)
        draws = random.integers(0, 2**16, size=(len(topics[rows]), writing.N_DRAWS), dtype=np.uint16)
        for topic, levels, row in zip(topics[rows].tolist(), attributes[rows].tolist(), draws.tolist(), strict=True):
            issue, town, place, *_ = topic
            for turns in range(writing.N_DRAWS):
                choices = row[turns:] + row[:turns]
                text = writing.write_response(issue, town, place, writing.Attributes(*levels), choices)
                if text not in texts:
                    texts[text] = None
                    break
            else:
                raise RuntimeError(f"no other wording is left for {text!r}")
    return list(texts)
