"""A language model as judge: which of two responses would a described person prefer?

Every pair is asked in both orders, because language models favour a position. The answer is the probability of the
first response: from the log-probabilities of the letters A and B where the model gives them, else from its text. Calls
and tokens are counted.
"""

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.text import shortened
from pluralign.core.types import Progress
from pluralign.text.causal import Choice, Sampler
from pluralign.text.remote import as_completed
from pluralign.votes.prompts import Prompt, PromptLike

LETTERS = ("A", "B")
MAX_CHARACTERS = 2_000
"""Longer prompts and responses are shortened before the judge reads them."""
MAX_FAILURES = 0.1
"""Share of questions without an answer that a run tolerates; they count as ½."""

INSTRUCTION = """{person}

Question:
{prompt}

Response A:
{a}

Response B:
{b}

Which response would this person prefer? Answer with one letter: A or B."""
PERSON = "Read this description of a person: {description}"
ANYBODY = "A person reads two responses to a question."


class JudgeModel(Sampler, Protocol):
    """A language model that samples texts and chooses between two letters."""

    def choose(self, prompt: PromptLike, letters: Sequence[str]) -> Choice:
        """Return the probability of the first of two letters. Raises DataError if the prompt cannot be answered."""
        ...


@dataclass(frozen=True)
class Question:
    """A pair of responses, and the person whose preference is asked for."""

    description: str
    """Of the person; empty for any person."""
    prompt: str
    response_a: str
    response_b: str

    def text(self, *, swapped: bool = False) -> str:
        """Return the question for the model; ``swapped`` shows response b first."""
        a, b = (self.response_b, self.response_a) if swapped else (self.response_a, self.response_b)
        person = PERSON.format(description=self.description) if self.description else ANYBODY
        prompt, a, b = (shortened(part, MAX_CHARACTERS) for part in (Prompt(self.prompt).text, a, b))
        return INSTRUCTION.format(person=person, prompt=prompt, a=a, b=b)


@dataclass(frozen=True)
class JudgeUsage:
    """What a judge's answers cost."""

    model: str
    calls: int = 0
    """Questions asked; two per pair and person."""
    unanswered: int = 0
    """Questions that failed or were answered with neither letter."""
    tokens_in: int = 0
    """Tokens read; 0 if the server does not count them."""
    tokens_out: int = 0
    seconds: float = 0.0

    def __add__(self, other: "JudgeUsage") -> "JudgeUsage":
        counts = [one.name for one in fields(self) if one.name != "model"]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in counts})


@dataclass(frozen=True, eq=False)
class Judged:
    """Answers to questions, and what they cost."""

    prob_a: FloatArray
    """Probability of response a, the mean of both orders, ``(n_questions,)``; ½ without an answer."""
    usage: JudgeUsage


def judge_pairs(
    model: JudgeModel, questions: Sequence[Question], *, concurrency: int = 1, progress: Progress | None = None
) -> Judged:
    """Ask a model which response each described person would prefer, in both orders.

    Args:
        model: the judge.
        questions: pairs with descriptions.
        concurrency: number of questions asked at the same time, each in a thread; for a server.
        progress: called with the number of calls done and the total.

    Raises:
        DataError: more than a tenth of the calls failed; the failure that exceeds this is raised.
    """
    started = time.perf_counter()
    prompts = [one.text(swapped=swapped) for one in questions for swapped in (False, True)]
    answers, failed = [Choice(math.nan)] * len(prompts), 0
    outcomes = as_completed(lambda i: model.choose(prompts[i], LETTERS), range(len(prompts)), concurrency)
    with closing(outcomes):
        for done, (i, outcome) in enumerate(outcomes, 1):
            if isinstance(outcome, Choice):
                answers[i] = outcome
            else:
                failed += 1
                if failed > MAX_FAILURES * len(prompts):
                    raise outcome
            if progress:
                progress(done, len(prompts))
    prob = np.array([answer.prob for answer in answers], dtype=np.float64).reshape(-1, 2)
    prob[:, 1] = 1.0 - prob[:, 1]  # of response a, which was shown second
    known = ~np.isnan(prob)
    mean = np.where(known, prob, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    tokens = (sum(answer.tokens_in for answer in answers), sum(answer.tokens_out for answer in answers))
    usage = JudgeUsage(model.name, len(answers), int((~known).sum()), *tokens, time.perf_counter() - started)
    return Judged(np.where(known.any(axis=1), mean, 0.5), usage)
