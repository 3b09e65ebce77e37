"""Streaming: rewards and votes for texts that arrive as JSON Lines, in batches."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import numpy as np

from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.theory import calibration
from pluralign.votes.builder import BadRows, RowError, check_prompt, check_text
from pluralign.votes.formats import read_records
from pluralign.votes.prompts import Item, PromptLike
from pluralign.votes.values import Record, read_prompt, read_response

LINES_PER_BATCH = 256


class ScoredLine(TypedDict):
    """An output line of ``score``."""

    rewards: list[float]
    """One reward per member."""


class ComparedLine(TypedDict):
    """An output line of ``compare``."""

    votes: list[float]
    """One vote per member: 1 for response a, 0 for response b, 0.5 for a tie."""
    prob_hat: float
    """Predicted share of people who prefer response a."""
    prob_policy: float
    """The same at the policy level."""


def score(ensemble: RewardEnsemble, stream: Any, name: str) -> Iterator[ScoredLine]:
    """Yield the members' rewards for each line of {prompt, response}, in order.

    Args:
        ensemble: the ensemble.
        stream: a binary stream of JSON Lines.
        name: name of the stream in error messages.
    """
    for batch in _batches(stream, name, _read_response):
        for rewards in ensemble.rewards([item for items in batch for item in items]):
            yield {"rewards": rewards.tolist()}


def compare(ensemble: RewardEnsemble, stream: Any, name: str) -> Iterator[ComparedLine]:
    """Yield the members' votes and the predicted shares for each line of {prompt, response_a, response_b}, in order.

    Args:
        ensemble: the ensemble.
        stream: a binary stream of JSON Lines.
        name: name of the stream in error messages.
    """
    for batch in _batches(stream, name, _read_pair):
        texts = list(dict.fromkeys(item for items in batch for item in items))
        rewards = dict(zip(texts, ensemble.rewards(texts), strict=True))
        a, b = (np.stack([rewards[items[side]] for items in batch]) for side in (0, 1))
        votes = calibration.votes_from_rewards(a, b)
        shares = ensemble.readings(a - b)
        for vote, share, policy in zip(votes, shares["vote"], shares["policy"], strict=True):
            yield {"votes": vote.tolist(), "prob_hat": float(share), "prob_policy": float(policy)}


def read_item(record: Record) -> Item:
    """Return the text of a line of {prompt, response}. Raises RowError if the line cannot be used."""
    return _prompt(record), _response(record, "response")


def _read_response(record: Record) -> list[Item]:
    return [read_item(record)]


def _read_pair(record: Record) -> list[Item]:
    prompt = _prompt(record)
    return [(prompt, _response(record, name)) for name in ("response_a", "response_b")]


def _prompt(record: Record) -> PromptLike:
    prompt = read_prompt(record.get("prompt"))
    check_prompt(prompt)
    return prompt


def _response(record: Record, name: str) -> str:
    text = read_response(record.get(name), name)
    check_text(text, name)
    return text


def _batches(stream: Any, name: str, read: Callable[[Record], list[Item]]) -> Iterator[list[list[Item]]]:
    bad = BadRows(name, can_skip=False)
    records = read_records(stream, bad, only_json=True)
    while batch := list(itertools.islice(records, LINES_PER_BATCH)):
        items = []
        for row, record in batch:
            try:
                items.append(read(record))
            except RowError as error:
                bad.report(row, error)
        yield items
