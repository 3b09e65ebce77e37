"""The insight that every surface shows first: who disagrees about what, how certain that is, and how far to trust it.

``measure_insight`` makes it once, from held-out votes; ``fit`` stores it with the ensemble. Members are shown as voices
only if whole judgments show that people differ (``learning.voices``). Else it says what unites and divides people, and
which votes would show voices. Names and claims are those of ``cards``.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.text import counted, printable
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import ENOUGH_PEOPLE, Evaluation, Insight, Voice
from pluralign.ensemble.verdict import main_evaluation, voices_sentence
from pluralign.measuring.cards import QUOTE, Profile, member_profiles, quoted, quotes_of
from pluralign.measuring.leans import SignedVotes, sample_prompts
from pluralign.measuring.views import SENTENCE
from pluralign.theory.intervals import ENOUGH_CLUSTERS
from pluralign.votes.prompts import Prompt

QUESTION = 90
"""Maximum length of a question."""
QUESTIONS = 4
"""Number of questions, and of traits that unite people, at most."""
TYPICAL_PAIRS = 10.0
"""Pairs of the average question that are added to each question before they are ordered."""
MOST, ENOUGH_VOTES = 0.8, 4
"""Share of people who agree on a pair, and how many votes show it."""
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
COLLECT = "docs/how-to/collect.md"


def measure_insight(
    ensemble: RewardEnsemble,
    held_out: HeldOutVotes,
    evaluation: Evaluation,
    profiles: Sequence[Profile] | None = None,
) -> Insight:
    """Return who disagrees about what.

    Args:
        ensemble: the ensemble.
        held_out: votes on prompts that it was not trained on, with its rewards.
        evaluation: figures on these votes, or of a cross-validation.
        profiles: cards of the members, ``member_profiles``; computed if not given.
    """
    found, data = evaluation.judgments, ensemble.record.data
    known = found.evidence if found else None
    evidence: Literal["clear", "none", "unknown"] = "unknown" if known is None else "clear" if known else "none"
    sample = sample_prompts(held_out)
    signed = SignedVotes.of(sample, ensemble.weights)
    cards = member_profiles(ensemble.weights, held_out, signed) if profiles is None else profiles
    cards = sorted(cards, key=lambda card: -card.weight)
    clear = evidence == "clear" and ensemble.k > 1
    sizes = evaluation.pairs, evaluation.prompts
    if data is not None and data.test_pairs == len(held_out.preferences):
        sizes = data.train_pairs + data.test_pairs, data.train_prompts + data.test_prompts
    votes = f"votes on {counted(sizes[0], 'pair')} of answers ({counted(sizes[1], 'prompt')})"
    number = NUMBERS[ensemble.k] if ensemble.k < len(NUMBERS) else str(ensemble.k)
    titles = {"clear": f"{number.capitalize()} voices in {votes}", "none": f"No evidence of distinct voices in {votes}"}
    unites, row = _agreement(sample, signed, clear)
    if clear and ensemble.undecided:
        follow = "of the votes follow no voice and are predicted to split evenly"
        unites = f"{ensemble.undecided:.0%} {follow}. {unites}"
    return Insight(
        title=titles.get(evidence, votes.capitalize()),
        evidence=evidence,
        sentence=voices_sentence(evaluation),
        voices=[Voice(one.member, one.weight, one.name, one.wants, one.example) for one in cards] if clear else [],
        unites=unites,
        example=" over ".join(quotes_of(sample, *row)) if row else "",
        divides=_questions(sample, sample.prob_hat(ensemble)),
        trust=trust_sentence(evaluation, held_out.prob_hat(ensemble), held_out.preferences.prob_a),
        advice="" if clear else _advice(evaluation, known_raters=ensemble.record.target == "raters"),
    )


def with_insight(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, profiles: Sequence[Profile] | None = None, *, texts: bool = True
) -> RewardEnsemble:
    """Return an ensemble whose record has its insight; without quotes and questions unless ``texts``."""
    if (evaluation := main_evaluation(ensemble.record)) is None or not len(held_out.preferences):
        return ensemble
    found = measure_insight(ensemble, held_out, evaluation, profiles)
    insight = found if texts else found.without_texts()
    return replace(ensemble, record=replace(ensemble.record, insight=insight))


# --- what unites and divides ------------------------------------------------------------------------------------------


def _agreement(sample: HeldOutVotes, signed: SignedVotes, clear: bool) -> tuple[str, tuple[int, bool] | None]:
    """Return what the members or people agree on, and an example: a pair, and whether response a is preferred."""
    people, n, votes = sample.preferences.prob_a, sample.preferences.n_votes, sample.votes
    side = np.where(people > MOST - 1e-9, 1, np.where(people < 1 - MOST + 1e-9, -1, 0))
    together = (votes > 0.5).all(axis=1) * 1 - (votes < 0.5).all(axis=1)
    agreed = np.where(side == together, side, 0) if clear else np.where(n >= ENOUGH_VOTES, side, 0)
    clearness = np.abs(agreed) * np.abs(2 * people - 1) * np.sqrt(n) * (1 + np.abs(sample.difference @ signed.weights))
    lengths = np.array([len(text) for text in sample.preferences.responses])
    short = np.minimum(lengths[sample.preferences.a_index], lengths[sample.preferences.b_index]) < QUOTE
    row = int(np.where(short, 0.1 * clearness, clearness).argmax())
    parts = [f"The voices agree on {np.mean(together != 0):.0%} of the pairs."] if clear else []
    if not clear and (n >= ENOUGH_VOTES).any():
        share = np.mean(side[n >= ENOUGH_VOTES] != 0)
        parts.append(f"At least {MOST:.0%} of people agree on {share:.0%} of the pairs.")
    if liked := [f"{phrase} ({(1 + lean) / 2:.0%})" for phrase, lean in signed.trait_leans()[1][:QUESTIONS]]:
        parts.append(f"People prefer {', '.join(liked)} where answers differ in this.")
    return " ".join(parts), (row, bool(agreed[row] > 0)) if agreed[row] else None


def _questions(sample: HeldOutVotes, prob_hat: FloatArray) -> str:
    """Return the questions on which people split most.

    The split of a pair is p(1 − p) n/(n − 1), which is unbiased; for single votes the predicted p̂(1 − p̂). Questions
    with few pairs are drawn to the mean.
    """
    votes = sample.preferences
    p, n = votes.prob_a, votes.n_votes
    split = np.where(n > 1, p * (1 - p) * n / np.maximum(n - 1, 1), prob_hat * (1 - prob_hat))
    pairs = np.bincount(votes.prompt_index, minlength=len(votes.prompts))
    total = np.bincount(votes.prompt_index, split, minlength=len(votes.prompts))
    typical = min(TYPICAL_PAIRS, float(pairs.mean()))
    order = np.argsort(-(total + typical * split.mean()) / (pairs + typical), kind="stable")
    if len(order) < 2 * QUESTIONS:
        return ""
    texts = [printable(Prompt(prompt).text) for prompt in votes.prompts]
    common = Counter(sentence for text in texts for sentence in set(SENTENCE.findall(text)))
    names: dict[str, None] = {}  # prompts can begin alike
    for prompt in order:
        if len(names) < QUESTIONS:
            names[_question(texts[prompt], common)] = None
    return "; ".join(names)


def _question(text: str, common: Mapping[str, int]) -> str:
    """Return the last question of a prompt that no other prompt asks, in quotes; its start if there is none.

    Example:
        >>> _question("It is late. Should school meals be free for all? What do you think?", {" What do you think?": 2})
        '“Should school meals be free for all?”'
    """
    asked = [one for one in SENTENCE.findall(text) if one.endswith("?") and common.get(one, 1) == 1]
    return quoted(asked[-1] if asked else text, QUESTION)


# --- trust and advice -------------------------------------------------------------------------------------------------


def trust_sentence(evaluation: Evaluation, prob_hat: FloatArray, prob_a: FloatArray) -> str:
    """Return how far a predicted share is typically off on unseen prompts: the root of the corrected Brier score.

    Args:
        evaluation: figures of the ensemble and of its baselines.
        prob_hat: predicted shares, which decide single votes, ``(n_pairs,)``.
        prob_a: observed shares, ``(n_pairs,)``.
    """
    tested, own = f"{counted(evaluation.prompts, 'prompt')} tested.", evaluation.test.brier_corrected
    if evaluation.left_out.measured:
        return f"Trust: unknown, because prompts were trained on. {evaluation.left_out.sentence}"
    if math.isnan(own):
        right = np.where(prob_hat == 0.5, 0.5, (prob_hat > 0.5) == (prob_a > 0.5)).mean()
        single = "one vote per pair does not show how far a predicted share is off"
        return f"Trust: {single}; {right:.0%} of the votes are on the side predicted for most people. {tested}"
    others = {"soft_bt": "one reward", "constant_half": "always saying half"}
    errors = {
        name: evaluation.baselines[key].brier_corrected for key, name in others.items() if key in evaluation.baselines
    }
    beside = ", ".join(f"{name} {points}" for name, error in errors.items() if (points := _points(error)))
    beside = f" ({beside})" if beside else ""
    if not (points := _points(own)):
        closer = "predicted shares are as close to the votes as the noise of few votes allows"
        return f"Trust: {closer}{beside}; more votes per pair would measure the error. {tested}"
    return f"Trust: a predicted share is typically off by {points} points on unseen prompts{beside}. {tested}"


def _points(error: float) -> str:
    """Return the root of a mean squared error in percentage points; empty if it is 0 or below."""
    return f"{100 * math.sqrt(error):.0f}" if error > 0 else ""


def _advice(evaluation: Evaluation, *, known_raters: bool) -> str:
    """Return which votes would show voices."""
    if (found := evaluation.judgments) is None:
        return f"To see voices, collect rankings, or several votes per person with rater ids ({COLLECT})."
    if found.people < ENOUGH_PEOPLE:
        return f"To see voices, let several people judge the same responses ({COLLECT})."
    if found.evidence is None:
        return (
            f"To see voices, collect judgments on more prompts, so that {ENOUGH_CLUSTERS} can be held out ({COLLECT})."
        )
    more = "Longer rankings or more prompts" if known_raters else "Longer rankings, more prompts, or rater ids"
    return f"{more} can show voices that these votes do not ({COLLECT})."
