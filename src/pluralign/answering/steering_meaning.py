"""Steering by words with their meaning: an encoder, or a language model, compares them with what members like.

*Encoder.* On held-out pairs, let v be the vector of a response in the last layer of the ensemble's encoder, and let
y_j = 2 σ(Δr_j / β) − 1 mark how clearly member j prefers response a. What sets member j apart is the direction
m_j = mean (y_j − Σ_i α_i y_i)(v_a − v_b): what it likes more than the others, within the same prompts. A description
fits member j by the cosine of its own vector and m_j, compared with the cosines of ``COMMON`` descriptions, as a
z-score. The posterior is α_j exp(z_j), averaged over bootstrap samples of the prompts.

*Language model.* It is asked which of two held-out responses a person with this preference would choose, for the pairs
that say most about the member. Its answers count as choices of the user.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from pluralign.analysis.profiles import Profile, member_name
from pluralign.answering.steering import People, ScoredChoices, Steering
from pluralign.core.arrays import FloatArray, IndexArray
from pluralign.core.errors import UsageError
from pluralign.core.random_streams import STEERING_WORDS, random_stream
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.features.frozen import TextFeatures
from pluralign.features.transformer_encoder import ModelEncoder
from pluralign.theory.logistic import sigmoid
from pluralign.theory.posterior import choice_probability, most_informative
from pluralign.votes.prompts import Prompt

Judge: TypeAlias = Callable[[str], str]
"""Takes an instruction; returns the text that a language model writes."""

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

    text: str
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
    features = replace(ensemble.features, layers="last", layer=None, pooling="mean", surface=False, identity="")
    return features.with_chosen_layers() if isinstance(features.load(), ModelEncoder) else None


def match_meaning(ensemble: RewardEnsemble, held_out: HeldOutVotes, text: str, *, seed: int = 0) -> MeaningMatch | None:
    """Compare a description with what the members like; None without a transformers encoder or enough prompts.

    Args:
        ensemble: the ensemble.
        held_out: pairs with the members' rewards. Their votes are not used.
        text: such as "protect nature first".
        seed: of the bootstrap.
    """
    features, prompts = sentence_features(ensemble), held_out.preferences.prompt_index
    if features is None or len(np.unique(prompts)) < MIN_PROMPTS or ensemble.k < 2:
        return None
    liking = 2 * sigmoid(held_out.difference / ensemble.temperature) - 1
    liking -= (liking @ ensemble.weights)[:, None]
    rows = np.sort(np.argsort(-np.abs(liking) @ ensemble.weights, kind="stable")[:MAX_PAIRS])
    votes = held_out.preferences[rows]
    responses = [str(response) for response in votes.responses]
    vectors = np.asarray(features([("", one) for one in (*responses, *COMMON, text)]), dtype=np.float64)
    of_responses, described = vectors[: len(responses)], vectors[len(responses) :]
    return MeaningMatch(
        text,
        meaning_posterior(
            of_responses[votes.a_index] - of_responses[votes.b_index],
            liking[rows],
            votes.prompt_index,
            described - of_responses.mean(axis=0),
            ensemble.weights,
            seed,
        ),
    )


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


def steer_by_meaning(match: MeaningMatch, people: People, profiles: Sequence[Profile] = ()) -> Steering:
    """Return what a description says about the user.

    A description does not show whether the user follows any member, so that probability stays as in the choice model.
    """
    posterior = people.model.people * match.posterior
    best = int(posterior.argmax())
    names = {card.member: card.label for card in profiles}
    why = (
        f"among the members, “{names.get(best, member_name(best))}” fits your words with probability "
        f"{match.posterior[best]:.0%}, by their meaning"
    )
    return Steering(
        best, why, float(posterior[best]), tuple(posterior.tolist()), average=float(1 - people.model.people)
    )


def judged_choices(people: People, held_out: HeldOutVotes, text: str, judge: Judge) -> ScoredChoices:
    """Return the choices that a language model makes for a person with a preference in words.

    Each pair is asked in both orders. A pair on which the two answers differ, or which has no clear answer, is left
    out.

    Args:
        people: the members.
        held_out: pairs to choose from: the most informative ones about the member, one per prompt.
        text: the preference.
        judge: the language model.

    Raises:
        UsageError: the language model gave no usable answer.
    """
    votes = held_out.preferences
    chance = choice_probability(held_out.difference, people.temperature, people.undecided, people.model.slip)
    rows = most_informative(chance, people.weights, votes.prompt_index, JUDGED_PAIRS)
    kept, chose_a = [], []
    for row in rows:
        prompt = Prompt(votes.prompts[votes.prompt_index[row]]).text
        pair = str(votes.responses[votes.a_index[row]]), str(votes.responses[votes.b_index[row]])
        first = _verdict(judge(judge_instruction(text, prompt, *pair)))
        second = _verdict(judge(judge_instruction(text, prompt, *reversed(pair))))
        if first is not None and second is not None and first != second:
            kept.append(row)
            chose_a.append(first == "A")
    if not kept:
        raise UsageError("the judge gave no usable answer; try another model, or leave --judge out.")
    chosen, for_a = held_out[np.array(kept)], np.array(chose_a, dtype=np.int64)
    own = replace(chosen.preferences, votes_a=for_a, votes_b=1 - for_a, ties=np.zeros_like(for_a))
    items = chosen.preferences.items()
    return ScoredChoices(own, chosen.rewards[items.a], chosen.rewards[items.b])


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
