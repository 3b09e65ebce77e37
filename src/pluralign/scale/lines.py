"""Rewards and votes for texts that arrive line by line, in batches: ``compare``, and ``score`` without a folder."""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypedDict

import numpy as np

from pluralign.answering.gate import fit_gate
from pluralign.core.errors import UsageError
from pluralign.ensemble.ensemble import RewardEnsemble, as_ensemble
from pluralign.ensemble.held_out import has_held_out, load_held_out
from pluralign.theory import calibration
from pluralign.votes.builder import BadRows
from pluralign.votes.formats import file_records, read_records
from pluralign.votes.prompts import Item
from pluralign.votes.values import Record, read_prompt, read_response

LINES_PER_BATCH = 256
Lines: TypeAlias = str | os.PathLike[str] | BinaryIO | Iterable[Mapping[str, Any]]
"""The path of a JSON Lines file, a binary stream of JSON Lines, or a list of dicts."""


class ScoredLine(TypedDict):
    """An output line of ``score``."""

    rewards: list[float]
    """One reward per member."""


class ComparedLine(TypedDict):
    """An output line of ``compare``."""

    votes: list[float]
    """One vote per member: 1 for response a, 0 for response b, 0.5 for a tie."""
    prob_hat: float | None
    """Predicted share of people who prefer response a."""
    prob_policy: float | None
    """The same at the policy level."""
    unlike: dict[str, str]
    """Responses (a, b) that the gate refuses, with the reason. Then no share is stated."""


def compare(ensemble: RewardEnsemble | str | os.PathLike[str], pairs: Lines) -> Iterator[ComparedLine]:
    """Yield the members' votes and the predicted shares for each row of {prompt, response_a, response_b}, in order.

    Args:
        ensemble: the ensemble, or its folder.
        pairs: the path of a JSON Lines file, a binary stream of JSON Lines, or a list of dicts.
    """
    loaded = as_ensemble(ensemble)
    gate = None
    if not isinstance(ensemble, RewardEnsemble) and has_held_out(ensemble):
        gate = fit_gate(load_held_out(ensemble, loaded).preferences, loaded.features)
    for batch in _batches(pairs, "response_a", "response_b"):
        texts = list(dict.fromkeys(item for items in batch for item in items))
        rewards = dict(zip(texts, loaded.rewards(texts), strict=True))
        a, b = (np.stack([rewards[items[side]] for items in batch]) for side in (0, 1))
        votes = calibration.votes_from_rewards(a, b)
        shares = loaded.readings(a - b)
        reasons = dict(zip(texts, gate.check(texts) if gate else [""] * len(texts), strict=True))
        for i, items in enumerate(batch):
            unlike = {side: reasons[item] for side, item in zip("ab", items, strict=True) if reasons[item]}
            share, policy = (None if unlike else float(shares[level][i]) for level in ("vote", "policy"))
            yield {"votes": votes[i].tolist(), "prob_hat": share, "prob_policy": policy, "unlike": unlike}


def score_lines(ensemble: RewardEnsemble | str | os.PathLike[str], texts: Lines) -> Iterator[ScoredLine]:
    """Yield the members' rewards for each row of {prompt, response}, in order: ``score`` without a folder."""
    loaded = as_ensemble(ensemble)
    for batch in _batches(texts, "response"):
        for rewards in loaded.rewards([item for items in batch for item in items]):
            yield {"rewards": rewards.tolist()}


def read_item(record: Record) -> Item:
    """Return the text of a row of {prompt, response}. Raises RowError if the row cannot be used."""
    return _read_items(record, "response")[0]


def _read_items(record: Record, *names: str) -> list[Item]:
    """Return the texts of a row, for the responses in these columns."""
    prompt = read_prompt(record.get("prompt"))
    return [(prompt, read_response(record.get(name), name)) for name in names]


def _batches(rows: Lines, *names: str) -> Iterator[list[list[Item]]]:
    """Yield the texts of the rows, in batches. Raises DataError for a bad row, after the batches before it."""
    is_path = isinstance(rows, str | os.PathLike)
    bad = BadRows(str(rows) if is_path else "standard input" if hasattr(rows, "read") else "rows", can_skip=False)
    records = _records(rows, bad)
    while batch := list(itertools.islice(records, LINES_PER_BATCH)):
        items = []
        for row, record in batch:
            with bad.row(row):
                items.append(_read_items(record, *names))
        yield items


def _records(rows: Any, bad: BadRows) -> Iterator[tuple[int, Record]]:
    if isinstance(rows, str | os.PathLike):
        if not Path(rows).is_file():
            raise UsageError(f"there is no file {rows}.")
        yield from file_records(Path(rows), bad, only_json=True)
    elif hasattr(rows, "read"):
        yield from read_records(rows, bad, only_json=True)
    else:
        yield from enumerate(rows, 1)
