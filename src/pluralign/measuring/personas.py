"""Persona-prompted rewards, the alternative in the paper's Discussion: one language model judges pairs as many people.

A persona is a description of a person. The model says for each persona which response the person would prefer, in both
orders. Each persona is a member; the weights are exact least squares on the simplex, with an undecided share. The
weights for a pair are fitted on other prompts than its own (five folds), so that the figures are held out.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, UsageError
from pluralign.core.random_streams import EVALUATION_FOLDS, PERSONA_PROMPTS, random_stream
from pluralign.core.text import counted, one_line, printable, shortened
from pluralign.core.types import Progress
from pluralign.learning.measure import FOLDS, Predictor
from pluralign.measuring.leans import WORDS
from pluralign.text.judge import JudgeModel, Question, judge_pairs
from pluralign.text.options import SamplingOptions
from pluralign.theory import calibration
from pluralign.theory.simplex import weights_and_undecided
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt

PREFIX = "personas:"
MAX_PERSONAS = 64
MAX_CHARACTERS = 1_000
"""Of a persona."""
EXAMPLE_PROMPTS = 5
"""Prompts that a model reads before it writes personas."""
ATTEMPTS = 3
WRITING = SamplingOptions(temperature=0.8, top_p=0.95, max_new_tokens=800)
_CERTAIN = 1e-4
"""Probabilities of the judge are kept this far from 0 and 1, so that their log-odds are finite."""
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s*")


@dataclass(frozen=True, eq=False)
class Personas:
    """Descriptions of people, and the language model that judges for them."""

    name: str
    model: JudgeModel
    descriptions: tuple[str, ...] = ()
    """Empty: the model writes ``count`` of them."""
    count: int = 0
    concurrency: int = 1
    """Number of questions asked at the same time."""


def find_personas(name: str, model: JudgeModel | None, concurrency: int = 1) -> Personas:
    """Return the personas that ``personas:FILE`` or ``personas:NUMBER`` names.

    Args:
        name: with a file of personas, or the number of personas that the model writes.
        model: the judge.
        concurrency: number of questions asked at the same time.
    """
    which = name.removeprefix(PREFIX)
    if model is None:
        raise UsageError(f"{name} needs a language model that judges: name it with --model.")
    if which.isdecimal():
        if not 1 <= int(which) <= MAX_PERSONAS:
            raise UsageError(f"the number of personas must be from 1 to {MAX_PERSONAS}, not {which}.")
        return Personas(name, model, count=int(which), concurrency=concurrency)
    return Personas(name, model, read_personas(which), concurrency=concurrency)


def read_personas(path: str) -> tuple[str, ...]:
    """Read personas from a file: one per line, as text or as JSON {persona}.

    Raises:
        DataError: the file is missing, has no personas or too many, or a line is not a persona.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        remedy = "name a text file with one persona per line, or the number of personas to write"
        raise DataError("it cannot be read", file=path, remedy=remedy) from None
    found = [_persona(line, path, row) for row, line in enumerate(lines, 1) if line.strip()]
    if not 1 <= len(found) <= MAX_PERSONAS:
        remedy = f"give from 1 to {MAX_PERSONAS}, one per line"
        raise DataError(f"it has {counted(len(found), 'persona')}", file=path, remedy=remedy)
    return tuple(dict.fromkeys(found))


def _persona(line: str, path: str, row: int) -> str:
    text: object = line
    if line.lstrip().startswith("{"):
        try:
            text = json.loads(line).get("persona")
        except ValueError:
            raise DataError("the line is not JSON", file=path, row=row, remedy="correct it") from None
    if not isinstance(text, str) or not text.strip():
        raise DataError("the line has no persona", file=path, row=row, remedy='write {"persona": "…"} or plain text')
    return shortened(one_line(printable(text), MAX_CHARACTERS), MAX_CHARACTERS)


def write_personas(model: JudgeModel, count: int, prompts: Sequence[str], seed: int = 0) -> tuple[str, ...]:
    """Let a model write personas for questions like these prompts. It sees no votes.

    Raises:
        DataError: it wrote fewer than ``count`` in all attempts.
    """
    chosen = random_stream(seed, PERSONA_PROMPTS).permutation(len(prompts))[:EXAMPLE_PROMPTS]
    listed = "\n".join(f"- {shortened(one_line(prompts[i], 300), 300)}" for i in chosen)
    found: dict[str, None] = {}
    for attempt in range(ATTEMPTS):
        request = WORDS["requests"]["personas"].format(prompts=listed, count=count)
        (written,) = model.sample(request, 1, WRITING, seed + attempt)
        lines = (_BULLET.sub("", printable(line)).strip() for line in written.text.splitlines())
        found |= dict.fromkeys(shortened(line, MAX_CHARACTERS) for line in lines if len(line.split()) >= 3)
        if len(found) >= count:
            return tuple(found)[:count]
    remedy = "name a larger model, fewer personas, or a file of personas"
    raise DataError(f"{model.name} wrote {counted(len(found), 'persona')}, not {count}", remedy=remedy)


def pair_questions(preferences: PreferenceSet, person: str) -> list[Question]:
    """Return the question about each pair: which response would this person prefer."""
    prompts = [Prompt(prompt).text for prompt in preferences.prompts]
    texts = [str(response) for response in preferences.responses]
    pairs = zip(preferences.prompt_index, preferences.a_index, preferences.b_index, strict=True)
    return [Question(person, prompts[p], texts[a], texts[b]) for p, a, b in pairs]


def persona_predictor(
    personas: Personas, preferences: PreferenceSet, *, seed: int = 0, progress: Progress | None = None
) -> Predictor:
    """Return the personas' votes on pairs as a predictor of vote shares.

    ``vote`` is the weighted share of personas that prefer a; ``policy`` weighs the judge's probabilities instead.
    """
    model = personas.model
    if len(preferences.prompts) < 2:  # before any call of the model
        raise UsageError("personas need votes on at least two prompts: their weights are fitted on other prompts.")
    model.prepare()
    prompts = [Prompt(prompt).text for prompt in preferences.prompts]
    descriptions = personas.descriptions or write_personas(model, personas.count, prompts, seed)
    asked = [pair_questions(preferences, persona) for persona in descriptions]
    questions = [question for of_pair in zip(*asked, strict=True) for question in of_pair]
    judged = judge_pairs(model, questions, concurrency=personas.concurrency, progress=progress)
    prob = np.clip(judged.prob_a.reshape(len(preferences), len(descriptions)), _CERTAIN, 1 - _CERTAIN)
    difference = np.log(prob / (1 - prob))
    votes = calibration.votes_from_rewards(difference, np.zeros_like(difference))
    alpha, undecided = weights_and_undecided(votes, preferences.prob_a)
    readings = {name: cross_fitted_share(of, preferences, seed) for name, of in (("vote", votes), ("policy", prob))}
    usage, name = judged.usage, f"{personas.name} ({model.name})"
    note = (
        f"{counted(len(descriptions), 'persona')}; weights for each prompt fitted on other prompts; "
        f"{usage.calls:,} calls, {usage.tokens_in + usage.tokens_out:,} tokens, {usage.seconds:.0f} s, "
        f"{usage.unanswered:,} unanswered"
    )
    return Predictor(name, "personas", readings, "vote", difference, alpha, undecided, None, note, usage, descriptions)


def cross_fitted_share(votes: FloatArray, preferences: PreferenceSet, seed: int = 0) -> FloatArray:
    """Return u/2 + (1 − u) Σ_j α_j V_j of each pair, with α and u fitted on prompts of the other folds, ``(n_pairs,)``.

    Args:
        votes: V, votes or probabilities of the members, ``(n_pairs, k)``.
        preferences: the pairs with people's votes.
        seed: of the folds.
    """
    prompts = np.unique(preferences.prompt_index)
    share = np.empty(len(preferences))
    for part in np.array_split(random_stream(seed, EVALUATION_FOLDS).permutation(prompts), min(FOLDS, len(prompts))):
        inside = np.isin(preferences.prompt_index, part)
        weights, undecided = weights_and_undecided(votes[~inside], preferences.prob_a[~inside])
        share[inside] = calibration.with_undecided(calibration.ensemble_prob(votes[inside], weights), undecided)
    return share
