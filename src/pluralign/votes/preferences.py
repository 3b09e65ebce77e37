"""The votes: prompts and responses stored once, comparisons as index arrays beside their vote counts.

Decided here: what a prompt is, how ties count, how pairs are split by prompt, and the Parquet form. How foreign files
become votes is decided in ``sources`` and ``shapes``.
"""

import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.arrays import FloatArray, IndexArray
from pluralign.core.errors import DataError, UsageError
from pluralign.core.files import atomic_write
from pluralign.votes.options import TIE_RULES, TieRule
from pluralign.votes.prompts import Message, Prompt, PromptLike

CountArray: TypeAlias = npt.NDArray[np.int64]
ObjectArray: TypeAlias = npt.NDArray[np.object_]

SAVED_FORMATS = ("parquet", "jsonl", "jsonl.gz")
RESERVED_COLUMNS = ("prompt", "prompt_is_chat", "response_a", "response_b", "votes_a", "votes_b", "ties")
_METADATA_KEY = b"pluralign"


class Items(NamedTuple):
    """The distinct (prompt, response) texts of a set: what an encoder reads, each once."""

    prompt_index: IndexArray
    """Prompt of each item, ``(n_items,)``."""
    response_index: IndexArray
    """Response of each item, ``(n_items,)``."""
    a: IndexArray
    """Item that is each pair's response a, ``(n_pairs,)``."""
    b: IndexArray
    """Item that is each pair's response b, ``(n_pairs,)``."""


@dataclass(frozen=True, eq=False)
class PreferenceSet:
    """Comparisons of two responses to a prompt, with how many people chose each.

    Build one with ``from_columns``, ``from_indices`` or ``pluralign.load_preferences``; the constructor only stores.
    Texts are distinct in their tables and numbered by first appearance, so equal sets have equal arrays.
    """

    prompts: ObjectArray
    """Distinct prompts, ``(n_prompts,)``: strings, or tuples of ``Message`` for chats."""
    responses: ObjectArray
    """Distinct response texts, ``(n_responses,)``."""
    prompt_index: IndexArray
    """Prompt of each pair, ``(n_pairs,)``."""
    a_index: IndexArray
    """Response a of each pair, ``(n_pairs,)``."""
    b_index: IndexArray
    """Response b of each pair, ``(n_pairs,)``."""
    votes_a: CountArray
    """People who chose response a, ``(n_pairs,)``."""
    votes_b: CountArray
    """People who chose response b, ``(n_pairs,)``."""
    ties: CountArray
    """People who called it a tie, ``(n_pairs,)``; whether they count is ``tie_rule``."""
    tie_rule: TieRule = "drop"
    """``drop``: ties are no votes (the paper). ``half``: a tie is half a vote for each side."""
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Further columns of the data, each ``(n_pairs,)``; ``split`` holds an official split where there is one."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """What reading left out, by kind: nothing is dropped without being counted here."""
    name: str = ""
    """Where the votes came from."""

    @classmethod
    def from_indices(
        cls,
        prompts: Iterable[PromptLike],
        responses: Iterable[str],
        prompt_index: npt.ArrayLike,
        a_index: npt.ArrayLike,
        b_index: npt.ArrayLike,
        votes_a: npt.ArrayLike,
        votes_b: npt.ArrayLike,
        *,
        ties: npt.ArrayLike | None = None,
        tie_rule: TieRule = "drop",
        columns: Mapping[str, npt.NDArray[Any]] | None = None,
        dropped: Mapping[str, int] | None = None,
        name: str = "",
    ) -> "PreferenceSet":
        """Make a set from distinct texts and arrays that point into them; unused texts are left behind.

        Example:
            >>> votes = PreferenceSet.from_indices(["Tea?"], ["Yes.", "No."], [0], [0], [1], [3], [2])
            >>> votes.prob_a
            array([0.6])
        """
        counts_a = np.asarray(votes_a, dtype=np.int64)
        pair_index = np.stack([np.asarray(a_index, np.int32), np.asarray(b_index, np.int32)], axis=1)
        prompt_table, prompt_position = _number_by_first_appearance(_object_array(prompts), np.asarray(prompt_index))
        response_table, response_position = _number_by_first_appearance(_object_array(responses), pair_index.ravel())
        return cls(
            prompts=prompt_table,
            responses=response_table,
            prompt_index=prompt_position,
            a_index=response_position[0::2].copy(),
            b_index=response_position[1::2].copy(),
            votes_a=counts_a,
            votes_b=np.asarray(votes_b, dtype=np.int64),
            ties=np.zeros(len(counts_a), np.int64) if ties is None else np.asarray(ties, dtype=np.int64),
            tie_rule=tie_rule,
            columns=dict(columns or {}),
            dropped=dict(dropped or {}),
            name=name,
        )._checked()

    @classmethod
    def from_columns(
        cls,
        prompt: Sequence[PromptLike],
        response_a: Sequence[str],
        response_b: Sequence[str],
        votes_a: npt.ArrayLike,
        votes_b: npt.ArrayLike,
        **options: Any,
    ) -> "PreferenceSet":
        """Make a set from one value a pair; ``options`` are those of ``from_indices``.

        Example:
            >>> votes = PreferenceSet.from_columns(["Tea?", "Tea?"], ["Yes.", "No."], ["No.", "Rum."], [3, 1], [2, 4])
            >>> len(votes), list(votes.responses)
            (2, ['Yes.', 'No.', 'Rum.'])
        """
        if len(response_a) != len(prompt) or len(response_b) != len(prompt):
            counts = f"{len(prompt)} prompts, {len(response_a)} responses a and {len(response_b)} responses b"
            raise UsageError(f"every pair needs a prompt and two responses, but there are {counts}.")
        prompts, prompt_index = _distinct(prompt)
        responses, index = _distinct([*response_a, *response_b])
        n = len(prompt)
        return cls.from_indices(prompts, responses, prompt_index, index[:n], index[n:], votes_a, votes_b, **options)

    def _checked(self) -> "PreferenceSet":
        lengths = {len(array) for array in (self.prompt_index, self.a_index, self.votes_a, self.votes_b, self.ties)}
        lengths |= {len(values) for values in self.columns.values()}
        if len(lengths) != 1:
            raise UsageError(f"all arrays of a PreferenceSet must have one length, but there are {sorted(lengths)}.")
        if (taken := set(self.columns) & set(RESERVED_COLUMNS)) or any(not name for name in self.columns):
            raise UsageError(f"extra columns may not be called {', '.join(sorted(taken)) or 'nothing'}: rename them.")
        if self.tie_rule not in TIE_RULES:
            raise UsageError(f"tie_rule must be 'drop' or 'half', not {self.tie_rule!r}.")
        if min(map(_smallest, (self.votes_a, self.votes_b, self.ties))) < 0:
            raise UsageError("vote counts must not be negative.")
        if len(self) and not self.n_votes.min():
            raise UsageError(f"every pair needs a vote, but pair {int(self.n_votes.argmin())} has none that counts.")
        return self

    def __len__(self) -> int:
        return len(self.votes_a)

    def __repr__(self) -> str:
        return (
            f"PreferenceSet({self.name or 'votes'}: {len(self):,} pairs, {len(self.prompts):,} prompts, "
            f"{len(self.responses):,} responses, {self.n_votes.sum():,.0f} votes)"
        )

    def __eq__(self, other: object) -> bool:
        """Same pairs in the same order with the same texts, votes and columns; where they came from does not matter."""
        return isinstance(other, PreferenceSet) and self.to_table().equals(other.to_table(), check_metadata=False)

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def n_votes(self) -> CountArray:
        """Votes that count for each pair, ``(n_pairs,)``."""
        return self.votes_a + self.votes_b + self.counted_ties

    @cached_property
    def counted_ties(self) -> CountArray:
        """Tie votes among ``n_votes``, ``(n_pairs,)``: all of them under ``half``, none under ``drop``."""
        return self.ties if self.tie_rule == "half" else np.zeros_like(self.ties)

    @cached_property
    def prob_a(self) -> FloatArray:
        """Share of people choosing response a (the paper's p), ``(n_pairs,)``: votes_a / (votes_a + votes_b)."""
        return (self.votes_a + self.counted_ties / 2) / self.n_votes

    def __getitem__(self, rows: slice | npt.ArrayLike) -> "PreferenceSet":
        """Return the pairs at ``rows`` (a slice, indices or a mask) as a set of its own."""
        pick: Any = rows if isinstance(rows, slice) else np.asarray(rows)
        if not isinstance(pick, slice) and (pick.ndim != 1 or pick.dtype.kind not in "biu"):
            pick = np.asarray(pick, dtype=np.int64).reshape(-1)
        return self.from_indices(
            self.prompts,
            self.responses,
            self.prompt_index[pick],
            self.a_index[pick],
            self.b_index[pick],
            self.votes_a[pick],
            self.votes_b[pick],
            ties=self.ties[pick],
            tie_rule=self.tie_rule,
            columns={name: values[pick] for name, values in self.columns.items()},
            dropped=self.dropped,
            name=self.name,
        )

    def swapped(self) -> "PreferenceSet":
        """Return the same comparisons with a and b exchanged."""
        return self.from_indices(
            self.prompts,
            self.responses,
            self.prompt_index,
            self.b_index,
            self.a_index,
            self.votes_b,
            self.votes_a,
            ties=self.ties,
            tie_rule=self.tie_rule,
            columns=self.columns,
            dropped=self.dropped,
            name=self.name,
        )

    def with_ties(self, tie_rule: TieRule) -> "PreferenceSet":
        """Return the same votes with ties counted by another rule."""
        return replace(self, tie_rule=tie_rule)._checked()

    def items(self) -> Items:
        """Return the distinct (prompt, response) texts and where each pair's two responses are among them.

        Example:
            >>> votes = PreferenceSet.from_columns(["Tea?", "Tea?"], ["Yes.", "No."], ["No.", "Rum."], [3, 1], [2, 4])
            >>> votes.items().a, votes.items().b
            (array([0, 1], dtype=int32), array([1, 2], dtype=int32))
        """
        width = np.int64(len(self.responses))
        both = np.concatenate([self.a_index, self.b_index]).astype(np.int64)
        key = np.tile(self.prompt_index.astype(np.int64), 2) * width + both
        distinct, position = np.unique(key, return_inverse=True)
        position = position.astype(np.int32)
        n = len(self)
        return Items(
            (distinct // width).astype(np.int32), (distinct % width).astype(np.int32), position[:n], position[n:]
        )

    def split(self, test_fraction: float = 0.1, *, seed: int = 0) -> tuple["PreferenceSet", "PreferenceSet"]:
        """Split into (train, test) by prompt, never by row.

        An official split (the column ``split``) is kept. Without one a prompt is in test when its hash, a number in
        [0, 1) that depends only on the prompt and ``seed``, is below ``test_fraction``: the same prompt lands on the
        same side in every run, and as data grows.
        """
        test = self.test_mask(test_fraction, seed=seed)
        return self[~test], self[test]

    def test_mask(self, test_fraction: float = 0.1, *, seed: int = 0) -> npt.NDArray[np.bool_]:
        """Return which pairs are on the test side of ``split``, ``(n_pairs,)``."""
        if not 0 < test_fraction < 1:
            raise UsageError(f"test_fraction must be between 0 and 1, not {test_fraction}.")
        hashed = np.array([Prompt(prompt).hash(seed) < test_fraction for prompt in self.prompts], dtype=bool)
        test = hashed[self.prompt_index]
        if "split" in self.columns:
            official = self.columns["split"]
            is_train = official == "train"
            known = is_train | np.array([bool(value) and value == value for value in official], dtype=bool)
            # A prompt named on both sides trains: testing on a prompt that was trained on would flatter.
            trained = np.zeros(len(self.prompts), dtype=bool)
            trained[self.prompt_index[is_train]] = True
            test = np.where(known, ~is_train, test) & ~trained[self.prompt_index]
        if test.all() or not test.any():
            raise DataError(
                f"the split by prompt left one side empty ({len(self.prompts)} prompts, {int(test.sum())} of "
                f"{len(self)} pairs in test)",
                file=self.name,
                remedy="use more prompts, another --test-fraction or another --seed",
            )
        return test

    def to_table(self) -> pa.Table:
        """Return a wide Arrow table, one row a pair, texts dictionary-encoded."""
        chat = np.array([Prompt(prompt).is_chat for prompt in self.prompts], dtype=bool)
        prompts = pa.array([Prompt(prompt).key for prompt in self.prompts], pa.large_string())
        responses = pa.array(self.responses, pa.large_string())
        arrays: dict[str, pa.Array] = {"prompt": pa.DictionaryArray.from_arrays(self.prompt_index, prompts)}
        if chat.any():
            arrays["prompt_is_chat"] = pa.array(chat[self.prompt_index])
        arrays["response_a"] = pa.DictionaryArray.from_arrays(self.a_index, responses)
        arrays["response_b"] = pa.DictionaryArray.from_arrays(self.b_index, responses)
        arrays |= {"votes_a": pa.array(self.votes_a), "votes_b": pa.array(self.votes_b), "ties": pa.array(self.ties)}
        arrays |= {name: pa.array(values, from_pandas=values.dtype == object) for name, values in self.columns.items()}
        facts = {"tie_rule": self.tie_rule, "dropped": dict(self.dropped), "name": self.name}
        return pa.table(arrays, metadata={_METADATA_KEY: json.dumps(facts).encode()})

    @classmethod
    def from_table(cls, table: pa.Table) -> "PreferenceSet":
        """Make a set from what ``to_table`` gives."""
        facts = json.loads((table.schema.metadata or {}).get(_METADATA_KEY, b"{}"))
        prompt_index, prompt_texts = _decode_dictionary(table["prompt"])
        a_index, a_texts = _decode_dictionary(table["response_a"])
        b_index, b_texts = _decode_dictionary(table["response_b"])
        responses, position = _distinct([*a_texts, *b_texts])
        chat = np.zeros(len(prompt_index), dtype=np.int32)
        if "prompt_is_chat" in table.column_names:
            chat = table["prompt_is_chat"].to_numpy().astype(np.int32)
        # A chat and a plain prompt that reads like its JSON are two prompts, so the flag is part of the key.
        keys, prompt_index = np.unique(prompt_index * 2 + chat, return_inverse=True)
        prompts = [
            tuple(Message(*turn) for turn in json.loads(prompt_texts[key // 2])) if key % 2 else prompt_texts[key // 2]
            for key in keys
        ]
        return cls.from_indices(
            prompts,
            responses,
            prompt_index,
            position[: len(a_texts)][a_index],
            position[len(a_texts) :][b_index],
            table["votes_a"].to_numpy(),
            table["votes_b"].to_numpy(),
            ties=table["ties"].to_numpy(),
            columns={name: _to_numpy(table[name]) for name in table.column_names if name not in RESERVED_COLUMNS},
            **facts,
        )

    def to_records(self) -> Iterator[dict[str, Any]]:
        """Yield one plain dict a pair, in the wide layout that any reader of JSON Lines understands."""
        columns = {name: values.tolist() for name, values in self.columns.items()}
        counts = self.votes_a.tolist(), self.votes_b.tolist(), self.ties.tolist()
        plain = [Prompt(prompt).json for prompt in self.prompts]
        for row, (votes_a, votes_b, ties) in enumerate(zip(*counts, strict=True)):
            yield {
                "prompt": plain[self.prompt_index[row]],
                "response_a": self.responses[self.a_index[row]],
                "response_b": self.responses[self.b_index[row]],
                "votes_a": votes_a,
                "votes_b": votes_b,
                "ties": ties,
                **{name: values[row] for name, values in columns.items()},
            }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the set, whole or not at all: ``.parquet`` (``load`` reads it exactly), ``.jsonl`` or ``.jsonl.gz``."""
        suffix = "".join(Path(path).suffixes[-2:] if str(path).endswith(".gz") else Path(path).suffixes[-1:])[1:]
        if suffix not in SAVED_FORMATS:
            raise UsageError(f"{path} must end in one of {', '.join('.' + known for known in SAVED_FORMATS)}.")
        with atomic_write(path) as partial:
            if suffix == "parquet":
                pq.write_table(
                    self.to_table(),
                    partial,
                    compression="zstd",
                    # One row group and one dictionary page a column, so that Parquet too stores each text once.
                    row_group_size=max(len(self), 1),
                    dictionary_pagesize_limit=2**30,
                )
                return
            opener = gzip.open if suffix.endswith("gz") else open
            with opener(partial, "wt", encoding="utf-8", newline="\n") as stream:
                for record in self.to_records():
                    stream.write(json.dumps(record, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PreferenceSet":
        """Read what ``save`` wrote, exactly."""
        if not is_saved_set(path):
            raise DataError("not a file written by PreferenceSet.save", file=str(path), remedy="use load_preferences")
        return cls.from_table(pq.read_table(path))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything a fit depends on: texts, pairs, votes and splits."""
        digest = hashlib.sha256(self.tie_rule.encode())
        for text in (*(Prompt(prompt).key for prompt in self.prompts), *self.responses):
            digest.update(hashlib.sha256(text.encode()).digest())
        for array in (self.prompt_index, self.a_index, self.b_index, self.votes_a, self.votes_b, self.ties):
            digest.update(np.ascontiguousarray(array).data)
        digest.update(json.dumps([str(value) for value in self.columns.get("split", ())]).encode())
        return digest.hexdigest()


def concatenate(sets: Sequence[PreferenceSet]) -> PreferenceSet:
    """Join sets with one tie rule; a column that one of them lacks is null there.

    Example:
        >>> tea = PreferenceSet.from_columns(["Tea?"], ["Yes."], ["No."], [3], [2])
        >>> concatenate([tea, tea]).votes_a
        array([3, 3])
    """
    rules = {preferences.tie_rule for preferences in sets}
    if len(rules) != 1:
        raise UsageError(f"sets to concatenate must share one tie rule, but there are {len(rules)}.")
    dropped: dict[str, int] = {}
    for preferences in sets:
        for kind, count in preferences.dropped.items():
            dropped[kind] = dropped.get(kind, 0) + count
    tables = [_with_chat_column(preferences.to_table()) for preferences in sets]
    joined = PreferenceSet.from_table(pa.concat_tables(tables, promote_options="permissive"))
    name = "+".join(dict.fromkeys(preferences.name for preferences in sets if preferences.name))
    return replace(joined, tie_rule=rules.pop(), dropped=dropped, name=name)


def is_saved_set(path: str | os.PathLike[str]) -> bool:
    """Tell whether a Parquet file was written by ``PreferenceSet.save``."""
    try:
        return _METADATA_KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def _smallest(values: CountArray) -> int:
    return int(values.min()) if len(values) else 0


def _object_array(values: Iterable[Any]) -> ObjectArray:
    if isinstance(values, np.ndarray) and values.dtype == object:
        return values
    values = list(values)
    array = np.empty(len(values), dtype=object)
    for position, value in enumerate(values):  # numpy would turn equal-length tuples into a matrix
        array[position] = value
    return array


def _distinct(values: Sequence[Any]) -> tuple[list[Any], IndexArray]:
    """Return the distinct values by first appearance, and the position of each value among them."""
    position: dict[Any, int] = {}
    index = np.fromiter((position.setdefault(value, len(position)) for value in values), np.int32, len(values))
    return list(position), index


def _number_by_first_appearance(table: ObjectArray, index: npt.NDArray[Any]) -> tuple[ObjectArray, IndexArray]:
    """Keep the entries of ``table`` that ``index`` uses, in the order of their first use, and renumber ``index``."""
    if len(set(table)) != len(table):
        raise UsageError("texts given with indices must be distinct; use from_columns to have them merged.")
    if len(index) and not 0 <= index.min() <= index.max() < len(table):
        raise UsageError(f"indices must be between 0 and {len(table) - 1}.")
    first_use = np.full(len(table), len(index), dtype=np.int64)
    first_use[index[::-1]] = np.arange(len(index))[::-1]  # the last assignment to a place wins
    order = np.argsort(first_use, kind="stable")[: int((first_use < len(index)).sum())]
    number = np.empty(len(table), dtype=np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    return table[order], number[index].astype(np.int32)


def _decode_dictionary(column: pa.ChunkedArray) -> tuple[IndexArray, list[str]]:
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.large_string()).dictionary_encode()
    combined = column.unify_dictionaries().combine_chunks()
    if isinstance(combined, pa.ChunkedArray):  # no rows
        return np.empty(0, np.int32), []
    return combined.indices.to_numpy().astype(np.int32), combined.dictionary.to_pylist()


def _to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    if pa.types.is_large_string(column.type) or pa.types.is_string(column.type) or column.null_count == len(column):
        return _object_array(column.to_pylist())
    return np.asarray(column.to_numpy())


def _with_chat_column(table: pa.Table) -> pa.Table:
    if "prompt_is_chat" in table.column_names:
        return table
    return table.append_column("prompt_is_chat", pa.array(np.zeros(len(table), dtype=bool)))
