"""A name and a sentence for each member, written by a language model and checked on other prompts.

One half of the held-out prompts is the material: phrases and pairs that set the member apart. On the other half the
same model judges pairs as "a person described so". This module decides when a description is shown: it must predict
the member's votes better than chance, and better than it predicts the votes of the other members, or any sentence about
good answers would pass. Both are one-sided t-tests by prompt at 5 % divided by the number of members.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from pluralign.analysis.description import Check, Description, Descriptions
from pluralign.analysis.leans import MIN_LEAN, SIGNIFICANCE, find_contrasts
from pluralign.analysis.profiles import Profile, distinguishing_pairs
from pluralign.analysis.views import split_prompts, telling_phrases
from pluralign.core.arrays import FloatArray, IndexArray, IntArray
from pluralign.core.errors import DataError, UsageError
from pluralign.core.random_streams import CHECKED_PAIRS, random_stream
from pluralign.core.text import one_line, printable, shortened
from pluralign.core.types import Progress
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.models.judge import JudgeModel, JudgeUsage, Question, judge_pairs
from pluralign.models.options import SamplingOptions
from pluralign.theory.intervals import ENOUGH_CLUSTERS, clustered_interval
from pluralign.votes.prompts import Prompt

CHECKED = 100
"""Pairs that a description is checked on."""
EXAMPLES = 4
EXAMPLE_LENGTH = 400
ATTEMPTS = 3
MIN_SPECIFIC = MIN_LEAN / 2
"""A description must agree with its member on at least one vote in twenty more than with the others."""
MAX_NAME = 60
MAX_SENTENCE = 300
WRITING = SamplingOptions(temperature=0.3, top_p=0.95, max_new_tokens=150)

NOTHING_WRITTEN = "the model wrote no name and description"
NOT_BETTER_THAN_CHANCE = "it does not predict the member's votes better than chance"
FITS_EVERYBODY = "it does not predict this member's votes better than those of the other members"

REQUEST = """A reader compares two answers to the same question and prefers one of them. Describe this reader.

Phrases in answers that this reader prefers and other readers do not: {prefers}
Phrases in answers that this reader rejects and other readers do not: {rejects}

{examples}

Write exactly two lines:
Name: two to five words that name the views or the taste of this reader
Description: one sentence that says which views and which style this reader prefers, and which the reader rejects"""
EXAMPLE = "Question: {prompt}\nThis reader prefers: {preferred}\nMost other readers prefer: {other}"

_NAME = re.compile(r"^[\W_]*name[\W_]*?:[\s*_]*(.+)$", re.IGNORECASE | re.MULTILINE)
_SENTENCE = re.compile(r"^[\W_]*description[\W_]*?:[\s*_]*(.+)$", re.IGNORECASE | re.MULTILINE)


def describe_members(
    held_out: HeldOutVotes,
    weights: FloatArray,
    model: JudgeModel,
    *,
    pairs: int = CHECKED,
    concurrency: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> Descriptions:
    """Let a language model describe each member, and check each description on prompts that did not write it.

    Args:
        held_out: held-out votes with the rewards of the members.
        weights: of the members, ``(k,)``.
        model: writes the descriptions and judges with them.
        pairs: number of pairs to check on. The check makes two calls per pair and member.
        concurrency: number of questions asked at the same time.
        seed: of the texts and of the choice of pairs.
        progress: called with the number of calls done and the total.
    """
    votes, alpha = held_out.preferences, np.asarray(weights, dtype=np.float64)
    half = split_prompts(len(votes.prompts))[votes.prompt_index]
    material, checked = held_out[half == 0], held_out[half == 1]
    if min(len(part.preferences.prompts) for part in (material, checked)) < ENOUGH_CLUSTERS:
        raise UsageError(
            f"descriptions need {2 * ENOUGH_CLUSTERS} held-out prompts, half to write them and half to check them, "
            f"but there are {len(votes.prompts)}: name more votes, as in profile DIR DATA."
        )
    if pairs < ENOUGH_CLUSTERS:
        raise UsageError(f"at least {ENOUGH_CLUSTERS} pairs are needed to check a description, not {pairs}.")
    model.prepare()
    written = write_descriptions(material, alpha, model, seed)
    chosen = checked[_pairs_to_check(checked, pairs, seed)]
    known = [one for one in written if one.name]
    questions = [question for one in known for question in _questions(chosen, one.sentence)]
    judged = judge_pairs(model, questions, concurrency=concurrency, progress=progress)
    usage = judged.usage + JudgeUsage(model.name, calls=len(written))
    predicted = dict(
        zip((one.member for one in known), judged.prob_a.reshape(len(known), len(chosen.preferences)), strict=True)
    )
    members = tuple(_checked(one, predicted[one.member], chosen, alpha) if one.name else one for one in written)
    return Descriptions(members, usage)


def with_descriptions(profiles: Sequence[Profile], descriptions: Descriptions | None) -> list[Profile]:
    """Return the cards with the descriptions of their members."""
    of = {one.member: one for one in descriptions.members} if descriptions else {}
    return [replace(profile, written=of.get(profile.member)) for profile in profiles]


# --- writing ----------------------------------------------------------------------------------------------------------


def write_descriptions(material: HeldOutVotes, weights: FloatArray, model: JudgeModel, seed: int) -> list[Description]:
    """Return a description of each member that is not checked yet; without a name if the model wrote none."""
    phrases = telling_phrases(material, weights, find_contrasts(material).length)
    written = []
    for j, (prefers, rejects) in enumerate(phrases):
        examples = "\n\n".join(
            EXAMPLE.format(prompt=_cut(pair.prompt), preferred=_cut(pair.preferred), other=_cut(pair.other))
            for pair in distinguishing_pairs(material, weights, j, EXAMPLES)
        )
        request = REQUEST.format(
            prefers=", ".join(prefers) or "none", rejects=", ".join(rejects) or "none", examples=examples
        )
        name, sentence = _name_and_sentence(model, request, seed)
        reason = "" if name else NOTHING_WRITTEN
        written.append(Description(j, name, sentence, False, reason, model.name, None))
    return written


def _cut(text: str) -> str:
    return shortened(one_line(text, 10 * EXAMPLE_LENGTH), EXAMPLE_LENGTH)


def _name_and_sentence(model: JudgeModel, request: str, seed: int) -> tuple[str, str]:
    for attempt in range(ATTEMPTS):
        try:
            (answer,) = model.sample(request, 1, WRITING, seed + attempt)
        except DataError:
            continue
        name, sentence = (pattern.search(answer.text) for pattern in (_NAME, _SENTENCE))
        if name and sentence:
            return _clean(name[1], MAX_NAME), _clean(sentence[1], MAX_SENTENCE)
    return "", ""


def _clean(text: str, length: int) -> str:
    return shortened(one_line(printable(text), 10 * length).strip(" *_\"“”'`"), length)


# --- checking ---------------------------------------------------------------------------------------------------------


def _pairs_to_check(checked: HeldOutVotes, count: int, seed: int) -> IntArray:
    """Return pairs on which the members are divided, from as many prompts as possible."""
    votes = checked.votes
    divided = np.flatnonzero(np.ptp(votes, axis=1) > 0)
    if len(divided) < ENOUGH_CLUSTERS:
        raise UsageError("the members vote alike on nearly all held-out pairs, so no description can be checked.")
    order = random_stream(seed, CHECKED_PAIRS).permutation(divided)
    prompts, turn = checked.preferences.prompt_index[order], np.zeros(len(order), dtype=np.int64)
    seen: dict[int, int] = {}
    for row, prompt in enumerate(prompts.tolist()):
        turn[row] = seen[prompt] = seen.get(prompt, -1) + 1
    return np.asarray(order[np.argsort(turn, kind="stable")][:count])


def _questions(chosen: HeldOutVotes, sentence: str) -> list[Question]:
    votes = chosen.preferences
    texts = [str(response) for response in votes.responses]
    return [
        Question(sentence, Prompt(votes.prompts[p]).text, texts[a], texts[b])
        for p, a, b in zip(votes.prompt_index, votes.a_index, votes.b_index, strict=True)
    ]


def _checked(one: Description, prob_a: FloatArray, chosen: HeldOutVotes, weights: FloatArray) -> Description:
    """Return a description with its check: the judge's choice against the votes of the member and of the others."""
    prompts, own = chosen.preferences.prompt_index, chosen.votes[:, one.member]
    others = np.delete(weights, one.member)
    rest = np.delete(chosen.votes, one.member, axis=1)
    share = rest @ (others / others.sum()) if others.sum() > 0 else np.full(len(own), 0.5)
    choice = np.where(prob_a == 0.5, 0.5, (prob_a > 0.5).astype(float))
    correct, specific = 1.0 - np.abs(choice - own), (2.0 * choice - 1.0) * (own - share)
    check = Check(
        accuracy=clustered_interval(correct, prompts),
        p_value=_p_value(correct - 0.5, prompts),
        specific=clustered_interval(specific, prompts),
        specific_p_value=_p_value(specific, prompts),
        pairs=len(own),
        prompts=len(np.unique(prompts)),
    )
    level = SIGNIFICANCE / len(weights)
    reason = ""
    if check.p_value > level:
        reason = NOT_BETTER_THAN_CHANCE
    elif check.specific_p_value > level or check.specific.mean < MIN_SPECIFIC:
        reason = FITS_EVERYBODY
    return replace(one, shown=not reason, reason=reason, check=check)


def _p_value(values: FloatArray, prompts: IndexArray) -> float:
    """Return the p-value of a one-sided t-test, over prompts, that the mean is above 0."""
    sums = np.bincount(np.unique(prompts, return_inverse=True)[1], values)
    spread = float(sums.std(ddof=1)) if len(sums) > 1 else 0.0
    if spread == 0.0:
        return 0.0 if sums.mean() > 0 else 1.0
    return float(stats.t.sf(sums.mean() / (spread / len(sums) ** 0.5), len(sums) - 1))
