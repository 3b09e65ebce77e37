"""Texts to score: single responses and pairs, in the forms that people give them in Python."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from pluralign.core.arrays import IndexArray
from pluralign.core.errors import UsageError
from pluralign.votes.layouts import peeked, read_comparisons
from pluralign.votes.load import DataFrameLike, VotesLike, is_table, kind_of, load_preferences, open_records
from pluralign.votes.options import LoadOptions
from pluralign.votes.preferences import PreferenceSet, distinct, texts_of
from pluralign.votes.prompts import Item
from pluralign.votes.values import Record, RowError, checked_text, read_messages, read_prompt, read_response, shown

ItemsLike: TypeAlias = Iterable[Item | Mapping[str, Any] | Sequence[Any]] | DataFrameLike
"""Texts to score: (prompt, response), or dicts or rows with both."""
_FORM = 'write ("the prompt", "the response") or {"prompt": …, "response": …}'


def as_items(items: ItemsLike) -> list[Item]:
    """Return texts to score as (prompt, response) tuples.

    Args:
        items: tuples or lists of a prompt and a response, dicts with the keys ``prompt`` and ``response``, or a pandas
            DataFrame or ``datasets`` object with these columns. A prompt is a text or a list of messages.

    Raises:
        UsageError: an item is something else. The message names its position, from 0.

    Example:
        >>> as_items([{"prompt": "Tea?", "response": "Yes."}, ["Tea?", "No."]])
        [('Tea?', 'Yes.'), ('Tea?', 'No.')]
    """
    if is_table(items):
        records, _ = open_records(items, LoadOptions())  # type: ignore[arg-type]
        items = [record for _, record in records]
    if isinstance(items, PreferenceSet):
        raise UsageError("votes are pairs of responses: use pair_rewards, votes or prob_hat for a PreferenceSet.")
    if isinstance(items, str | bytes | os.PathLike | Mapping) or not isinstance(items, Iterable):
        raise UsageError(f"items must be a list of (prompt, response), not {shown(items)}.")
    return [_as_item(item, position) for position, item in enumerate(items)]


def _as_item(item: Any, position: int) -> Item:
    try:
        if isinstance(item, Mapping):
            prompt, response = item.get("prompt"), item.get("response")
            if prompt is None or response is None:
                raise RowError("", "it has no " + ("prompt" if prompt is None else "response"), "")
        elif isinstance(item, tuple | list) and len(item) == 2:
            prompt, response = item
        else:
            raise RowError("", f"it is {shown(item)}", "")
        text = checked_text(prompt, "prompt") if isinstance(prompt, str) else read_messages(prompt, "the prompt")
        return text, read_response(response, "the response")
    except RowError as error:
        raise UsageError(f"items[{position}] cannot be scored: {error.problem}; {_FORM}.") from None


class PairTexts(NamedTuple):
    """Pairs to compare: distinct texts, and the positions of both texts of each pair."""

    texts: list[Item]
    a: IndexArray
    b: IndexArray


def pair_texts(pairs: VotesLike) -> PairTexts:
    """Return the texts of pairs. Votes are not needed.

    Rows with the columns prompt, response_a and response_b give one pair each, in order. Other layouts are read as
    ``load_preferences`` reads them.

    Args:
        pairs: a ``PreferenceSet``, or a source of ``load_preferences`` whose rows may lack votes.

    Example:
        >>> pair_texts([{"prompt": "Tea?", "response_a": "Yes.", "response_b": "No."}]).texts
        [('Tea?', 'Yes.'), ('Tea?', 'No.')]
    """
    if isinstance(held := getattr(pairs, "preferences", pairs), PreferenceSet):
        items = held.items()
        return PairTexts(texts_of(held), items.a, items.b)
    options = LoadOptions(min_votes=1)
    if kind_of(pairs) != "records":
        return pair_texts(load_preferences(pairs, options))  # type: ignore[arg-type]
    records, bad = open_records(pairs, options)  # type: ignore[arg-type]
    first, records = peeked(records, bad)
    if not {"prompt", "response_a", "response_b"} <= first.keys():
        return pair_texts(read_comparisons(records, bad, options))
    sides: list[Item] = []
    bad.can_skip = False
    for row, record in records:
        with bad.row(row):
            sides += _read_pair(record)
    texts, index = distinct(sides)
    return PairTexts(texts, index[0::2], index[1::2])


def _read_pair(record: Record) -> list[Item]:
    prompt = read_prompt(record.get("prompt"))
    return [(prompt, read_response(record.get(name), name)) for name in ("response_a", "response_b")]
