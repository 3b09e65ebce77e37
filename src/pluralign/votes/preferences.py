"""Votes in memory: distinct prompts and responses, pairs as index arrays into them, vote counts, and judgments.

Defined here: how ties count, how pairs are split by prompt, and the files of a set: Parquet, which is read back
exactly, and JSON Lines in the wide layout. Other files become votes in ``load`` and ``layouts``.
"""

import gzip
import hashlib
import io
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

from pluralign.core.arrays import FloatArray, IndexArray, IntArray, Mask
from pluralign.core.errors import DataError, UsageError
from pluralign.core.files import atomic_write
from pluralign.core.late import late
from pluralign.core.text import counted
from pluralign.votes.judgments import Judgments, by_first_appearance
from pluralign.votes.options import TIE_RULES, Loaded, TieRule
from pluralign.votes.prompts import Item, Message, Prompt, PromptLike, prompts_to_hold_out

# --- Tables of distinct texts, numbered by first appearance, and arrays of positions in them.


ObjectArray: TypeAlias = npt.NDArray[np.object_]


def object_array(values: Iterable[Any]) -> ObjectArray:
    """Return values as a one-dimensional array of objects."""
    if isinstance(values, np.ndarray) and values.dtype == object:
        return values
    return np.fromiter(values, dtype=object)  # np.array would turn tuples of equal length into a matrix


def distinct(values: Sequence[Any]) -> tuple[list[Any], IndexArray]:
    """Return the distinct values by first appearance, and the position of each value among them.

    Example:
        >>> distinct(["tea", "rum", "tea"])
        (['tea', 'rum'], array([0, 1, 0], dtype=int32))
    """
    position: dict[Any, int] = {}
    index = np.fromiter((position.setdefault(value, len(position)) for value in values), np.int32, len(values))
    return list(position), index


def _used(table: ObjectArray, index: npt.NDArray[Any]) -> tuple[ObjectArray, IndexArray]:
    """Keep the entries of ``table`` that ``index`` uses, in order of first use, and renumber ``index``.

    Raises:
        UsageError: the table holds a text twice, or an index is out of range.
    """
    if len(set(table)) != len(table):
        raise UsageError("texts given with indices must be distinct; use from_columns to have them merged.")
    if len(index) and not 0 <= index.min() <= index.max() < len(table):
        raise UsageError(f"indices must be between 0 and {len(table) - 1}.")
    used, number = by_first_appearance(index)
    return table[used], number


# --- Sets of votes.


SAVED_FORMATS = ("parquet", "jsonl", "jsonl.gz")
RESERVED_COLUMNS = ("prompt", "prompt_is_chat", "response_a", "response_b", "votes_a", "votes_b", "ties")
_METADATA_KEY = b"pluralign"
_JUDGMENTS_KEY = b"pluralign judgments"
ENOUGH_JUDGMENTS = 0.1
"""Share of the votes from which judgments that tell more than counts are worth a fit of their own."""
_PER_PAIR = ("prompt_index", "a_index", "b_index", "votes_a", "votes_b", "ties")


class Items(NamedTuple):
    """The distinct (prompt, response) texts of a set, which an encoder reads once each."""

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
    """Pairs of responses to a prompt, with the number of people who chose each.

    Create one with ``from_columns``, ``from_indices`` or ``pluralign.load_preferences``; the constructor only stores.
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
    votes_a: IntArray
    """People who chose response a, ``(n_pairs,)``."""
    votes_b: IntArray
    """People who chose response b, ``(n_pairs,)``."""
    ties: IntArray
    """People who voted for a tie, ``(n_pairs,)``; ``tie_rule`` decides whether they count."""
    tie_rule: TieRule = "drop"
    """``drop``: ties do not count (as in the paper). ``half``: a tie is half a vote for each side. ``fixed``: a tie is
    a vote for the response with fewer votes, so the majority share is of all people (the paper's MultiPref)."""
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Further columns of the data, each ``(n_pairs,)``; ``split`` holds the official split, if there is one."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of rows and votes dropped while reading, by kind. Every dropped row or vote is counted here."""
    name: str = ""
    """Source of the votes."""
    loaded: Loaded | None = None
    """How these votes were read. None for votes made in Python, also by selecting some pairs of a set."""
    judgments: Judgments | None = None
    """What single people said, of which the counts are the sums. None where only counts are known."""

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
        **fields: Any,
    ) -> "PreferenceSet":
        """Create a set from distinct texts and arrays of positions in them. Unused texts are dropped.

        ``fields`` are further fields of the set: ``ties``, ``tie_rule``, ``columns``, ``dropped``, ``name`` and
        ``judgments`` (with positions in the same texts).

        Example:
            >>> votes = PreferenceSet.from_indices(["Tea?"], ["Yes.", "No."], [0], [0], [1], [3], [2])
            >>> votes.prob_a
            array([0.6])
        """
        ties = fields.pop("ties", np.zeros_like(votes_a))
        arrays: list[Any] = [object_array(prompts), object_array(responses)]
        arrays += [np.asarray(index, np.int32) for index in (prompt_index, a_index, b_index)]
        arrays += [np.asarray(votes, np.int64) for votes in (votes_a, votes_b, ties)]
        return cls(*arrays, **fields)._numbered()

    @classmethod
    def from_columns(
        cls,
        prompt: Sequence[PromptLike],
        response_a: Sequence[str],
        response_b: Sequence[str],
        votes_a: npt.ArrayLike,
        votes_b: npt.ArrayLike,
        **fields: Any,
    ) -> "PreferenceSet":
        """Create a set from one value per pair; ``fields`` are those of ``from_indices``.

        Example:
            >>> votes = PreferenceSet.from_columns(["Tea?", "Tea?"], ["Yes.", "No."], ["No.", "Rum."], [3, 1], [2, 4])
            >>> len(votes), list(votes.responses)
            (2, ['Yes.', 'No.', 'Rum.'])
        """
        if len(response_a) != len(prompt) or len(response_b) != len(prompt):
            counts = f"{len(prompt)} prompts, {len(response_a)} responses a and {len(response_b)} responses b"
            raise UsageError(f"every pair needs a prompt and two responses, but there are {counts}.")
        prompts, prompt_index = distinct(prompt)
        responses, index = distinct([*response_a, *response_b])
        n = len(prompt)
        return cls.from_indices(prompts, responses, prompt_index, index[:n], index[n:], votes_a, votes_b, **fields)

    def _numbered(self) -> "PreferenceSet":
        """Return the checked set with its texts numbered by first appearance, and without unused ones.

        Judgments are restricted to the responses that occur in a pair of their prompt, see ``Judgments.restricted``.
        """
        prompts, prompt_index = _used(self.prompts, self.prompt_index)
        both = np.stack([self.a_index, self.b_index], axis=1).ravel()
        responses, response_index = _used(self.responses, both)
        a, b = response_index[0::2].copy(), response_index[1::2].copy()
        texts: dict[str, Any] = {"prompts": prompts, "responses": responses}
        if self.judgments is not None:
            texts["judgments"] = self._renumbered_judgments(self.judgments, prompt_index, response_index)
        return replace(self, **texts, prompt_index=prompt_index, a_index=a, b_index=b, loaded=None)._checked()

    def _renumbered_judgments(
        self, judgments: Judgments, prompt_index: IndexArray, response_index: IndexArray
    ) -> Judgments | None:
        """Return the judgments on texts of the pairs, which have the given new numbers; None if there are none."""
        width = len(self.responses)
        both = np.stack([self.a_index, self.b_index], axis=1).ravel()
        in_pairs = np.repeat(self.prompt_index.astype(np.int64), 2) * width + both
        kept = judgments.restricted(np.isin(judgments.keys(width), in_pairs))
        if not len(kept):
            return None
        new_prompt, new_response = np.empty(len(self.prompts), np.int32), np.empty(width, np.int32)
        new_prompt[self.prompt_index], new_response[both] = prompt_index, response_index
        return replace(kept, prompt=new_prompt[kept.prompt], response=new_response[kept.response])

    def _checked(self) -> "PreferenceSet":
        lengths = {len(array) for array in (self.prompt_index, self.a_index, self.votes_a, self.votes_b, self.ties)}
        lengths |= {len(values) for values in self.columns.values()}
        if len(lengths) != 1:
            raise UsageError(f"all arrays of a PreferenceSet must have one length, but there are {sorted(lengths)}.")
        if (taken := set(self.columns) & set(RESERVED_COLUMNS)) or any(not name for name in self.columns):
            name = ", ".join(sorted(taken)) or "'' (empty)"
            raise UsageError(f"extra columns must not have the name {name}: rename them.")
        if self.tie_rule not in TIE_RULES:
            raise UsageError(f"tie_rule must be 'drop', 'half' or 'fixed', not {self.tie_rule!r}.")
        if any((counts < 0).any() for counts in (self.votes_a, self.votes_b, self.ties)):
            raise UsageError("vote counts must not be negative.")
        if len(self) and not self.n_votes.min():
            raise UsageError(f"every pair needs a vote that counts, but pair {int(self.n_votes.argmin())} has none.")
        return self

    def __len__(self) -> int:
        return len(self.votes_a)

    def __repr__(self) -> str:
        sizes = {"pair": len(self), "prompt": len(self.prompts), "response": len(self.responses)}
        sizes["vote"] = int(self.n_votes.sum())
        if self.judgments is not None:
            sizes["judgment"] = self.judgments.n
        return f"PreferenceSet({self.name or 'votes'}: {', '.join(counted(n, noun) for noun, n in sizes.items())})"

    def _repr_html_(self) -> str:
        return str(late("publishing.notebook", "preferences_html")(self))

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same pairs in the same order, with the same votes, columns and judgments."""
        if not isinstance(other, PreferenceSet) or self.judgments != other.judgments:
            return False
        return bool(self._table().equals(other._table()))

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def n_votes(self) -> IntArray:
        """Number of votes that count, ``(n_pairs,)``."""
        return self.votes_a + self.votes_b + (0 if self.tie_rule == "drop" else self.ties)

    @cached_property
    def counted_ties(self) -> IntArray:
        """Votes of ½ among ``n_votes``, ``(n_pairs,)``: all ties under ``half``, else none."""
        return self.ties if self.tie_rule == "half" else np.zeros_like(self.ties)

    @cached_property
    def prob_a(self) -> FloatArray:
        """Share of people choosing response a (the paper's p), ``(n_pairs,)``: votes_a / (votes_a + votes_b).

        Under ``half`` and ``fixed`` the share is of all people. Under ``fixed`` it is ½ where both have as many votes.
        """
        for_a = {"drop": 0.0, "half": 0.5, "fixed": (1 - np.sign(self.votes_a - self.votes_b)) / 2}[self.tie_rule]
        return np.asarray((self.votes_a + for_a * self.ties) / self.n_votes, dtype=np.float64)

    @property
    def knows_raters(self) -> bool:
        """Whether rater ids link the judgments of a person across prompts."""
        return self.judgments is not None and self.judgments.linked

    @cached_property
    def whole_judgments(self) -> Judgments | None:
        """The judgments, if those that tell more than the counts make up a tenth of all votes; else None.

        A ranking of L responses holds L(L − 1)/2 votes.
        """
        if self.judgments is None:
            return None
        sizes = self.judgments.sizes[self.judgments.tell_more]
        everyone = (self.votes_a + self.votes_b + self.ties).sum()
        return self.judgments if (sizes * (sizes - 1) // 2).sum() >= ENOUGH_JUDGMENTS * everyone else None

    def __getitem__(self, rows: slice | npt.ArrayLike) -> "PreferenceSet":
        """Return the pairs at ``rows`` (a slice, indices or a mask) as a new set.

        Judgments are kept as far as their responses still occur in a pair of their prompt.
        """
        pick: Any = rows if isinstance(rows, slice) else np.asarray(rows)
        if not isinstance(pick, slice) and (pick.ndim != 1 or pick.dtype.kind not in "biu"):
            pick = np.asarray(pick, dtype=np.int64).reshape(-1)
        picked: dict[str, Any] = {name: getattr(self, name)[pick] for name in _PER_PAIR}
        picked["columns"] = {name: values[pick] for name, values in self.columns.items()}
        return replace(self, **picked)._numbered()

    def swapped(self) -> "PreferenceSet":
        """Return the same pairs with a and b exchanged."""
        swapped = replace(self, a_index=self.b_index, b_index=self.a_index, votes_a=self.votes_b, votes_b=self.votes_a)
        return swapped._numbered()

    def without_official_split(self) -> "PreferenceSet":
        """Return the same votes without the column ``split``, so that ``split`` holds out a share of the prompts."""
        return replace(self, columns={name: column for name, column in self.columns.items() if name != "split"})

    def with_ties(self, tie_rule: TieRule) -> "PreferenceSet":
        """Return the same votes with another tie rule."""
        loaded = self.loaded
        if loaded is not None and tie_rule != self.tie_rule:
            loaded = replace(loaded, options={**loaded.options, "ties": tie_rule})
        return replace(self, tie_rule=tie_rule, loaded=loaded)._checked()

    def items(self) -> Items:
        """Return the distinct (prompt, response) texts, sorted by prompt, and the positions of each pair's two texts.

        Example:
            >>> votes = PreferenceSet.from_columns(["Tea?", "Tea?"], ["Yes.", "No."], ["No.", "Rum."], [3, 1], [2, 4])
            >>> votes.items().a, votes.items().b
            (array([0, 1], dtype=int32), array([1, 2], dtype=int32))
        """
        return self._items

    @cached_property
    def _items(self) -> Items:
        width = np.int64(len(self.responses))
        both = np.concatenate([self.a_index, self.b_index]).astype(np.int64)
        key = np.tile(self.prompt_index.astype(np.int64), 2) * width + both
        distinct, position = np.unique(key, return_inverse=True)
        parts = (*np.divmod(distinct, width), *np.split(position, 2))
        return Items(*(part.astype(np.int32) for part in parts))

    def split(self, test_fraction: float | None = None, *, seed: int = 0) -> tuple["PreferenceSet", "PreferenceSet"]:
        """Split into (train, test) by prompt, never by row.

        An official split (the column ``split``) is used if it has both sides. Otherwise a prompt is in the test set if
        its hash, a number in [0, 1) that depends only on the prompt and ``seed``, is below ``test_fraction``. So a
        prompt stays on the same side in every run, and when data is added. If that leaves too few test prompts, the
        prompts with the smallest hashes are taken, see ``prompts.prompts_to_hold_out``.

        Args:
            test_fraction: share of the prompts to hold out. By default a tenth, but at least 20 prompts, or three
                tenths of the prompts if there are few.
            seed: of the hash.

        Raises:
            DataError: there is a single prompt.
        """
        test = self.test_mask(test_fraction, seed=seed)
        return self[~test], self[test]

    def test_mask(self, test_fraction: float | None = None, *, seed: int = 0) -> Mask:
        """Return which pairs are in the test set of ``split``, ``(n_pairs,)``."""
        if len(self.prompts) < 2:
            problem = "a split by prompt needs two prompts, and there is one" if len(self) else "there are no votes"
            raise DataError(problem, file=self.name, remedy="add votes on other prompts")
        test = prompts_to_hold_out(self.prompts, test_fraction, seed)[self.prompt_index]
        if "split" not in self.columns:
            return test
        official = self.columns["split"]
        is_train = official == "train"
        known = is_train | np.array([bool(value) and value == value for value in official], dtype=bool)
        # A prompt on both sides is a training prompt. Scores on a training prompt would be too good.
        trained = np.zeros(len(self.prompts), dtype=bool)
        trained[self.prompt_index[is_train]] = True
        chosen = np.where(known, ~is_train, test) & ~trained[self.prompt_index]
        return test if chosen.all() or not chosen.any() else chosen

    def with_split(self, test_fraction: float | None = None, *, seed: int = 0) -> "PreferenceSet":
        """Return the set with the split of a seed as its official split, so that fits with other seeds share it."""
        plain = self.without_official_split()
        side = np.where(plain.test_mask(test_fraction, seed=seed), "test", "train")
        return replace(plain, columns={**plain.columns, "split": side}, loaded=None)

    def to_table(self) -> pa.Table:
        """Return a wide Arrow table with one row per pair and dictionary-encoded texts.

        All else is in its metadata, also the judgments.
        """
        facts = {"tie_rule": self.tie_rule, "dropped": dict(self.dropped), "name": self.name}
        metadata = {_METADATA_KEY: json.dumps(facts).encode()}
        if self.judgments is not None:
            metadata[_JUDGMENTS_KEY] = b"%d,%d,%d:" % self._size + self.judgments.to_bytes()
        return self._table().replace_schema_metadata(metadata)

    @property
    def _size(self) -> tuple[int, int, int]:
        return len(self), len(self.prompts), len(self.responses)

    def _table(self) -> pa.Table:
        chat = np.array([Prompt(prompt).is_chat for prompt in self.prompts], dtype=bool)
        prompts = pa.array([Prompt(prompt).key for prompt in self.prompts], pa.large_string())
        responses = pa.array(self.responses, pa.large_string())
        arrays = {
            "prompt": pa.DictionaryArray.from_arrays(self.prompt_index, prompts),
            "prompt_is_chat": pa.array(chat[self.prompt_index]),
            "response_a": pa.DictionaryArray.from_arrays(self.a_index, responses),
            "response_b": pa.DictionaryArray.from_arrays(self.b_index, responses),
            **{name: pa.array(getattr(self, name)) for name in ("votes_a", "votes_b", "ties")},
            **{name: pa.array(values, from_pandas=values.dtype == object) for name, values in self.columns.items()},
        }
        return pa.table(arrays)

    @classmethod
    def from_table(cls, table: pa.Table) -> "PreferenceSet":
        """Create a set from a table of ``to_table``.

        Raises:
            UsageError: it has judgments, and rows were added or removed.
        """
        prompt_index, prompt_texts = _decode_dictionary(table["prompt"])
        a_index, a_texts = _decode_dictionary(table["response_a"])
        b_index, b_texts = _decode_dictionary(table["response_b"])
        responses, position = distinct([*a_texts, *b_texts])
        chat = table["prompt_is_chat"].to_numpy().astype(np.int32)
        # A chat and a text that equals its JSON are two prompts, so the flag is part of the key.
        keys, prompt_of_pair = np.unique(prompt_index * 2 + chat, return_inverse=True)
        prompts = [
            tuple(Message(*turn) for turn in json.loads(prompt_texts[key // 2])) if key % 2 else prompt_texts[key // 2]
            for key in keys
        ]
        a, b = position[: len(a_texts)][a_index], position[len(a_texts) :][b_index]
        votes_a, votes_b, ties = (table[name].to_numpy() for name in ("votes_a", "votes_b", "ties"))
        columns = {name: _to_numpy(table[name]) for name in table.column_names if name not in RESERVED_COLUMNS}
        metadata = table.schema.metadata or {}
        facts = json.loads(metadata.get(_METADATA_KEY, b"{}")) | {"ties": ties, "columns": columns}
        counts = cls.from_indices(prompts, responses, prompt_of_pair, a, b, votes_a, votes_b, **facts)
        if _JUDGMENTS_KEY not in metadata:
            return counts
        size, _, judgments = metadata[_JUDGMENTS_KEY].partition(b":")
        if size != b"%d,%d,%d" % counts._size:
            raise UsageError("the judgments are those of another table: select pairs of the PreferenceSet instead.")
        return replace(counts, judgments=Judgments.from_bytes(judgments))

    def to_records(self) -> Iterator[dict[str, Any]]:
        """Yield one dict per pair, in the wide layout that ``load_preferences`` reads."""
        columns = {name: values.tolist() for name, values in self.columns.items()}
        counts = self.votes_a.tolist(), self.votes_b.tolist(), self.ties.tolist()
        prompts = [Prompt(prompt).json for prompt in self.prompts]
        for row, (votes_a, votes_b, ties) in enumerate(zip(*counts, strict=True)):
            a, b = self.responses[self.a_index[row]], self.responses[self.b_index[row]]
            texts = {"prompt": prompts[self.prompt_index[row]], "response_a": a, "response_b": b}
            counted = {"votes_a": votes_a, "votes_b": votes_b, "ties": ties}
            yield texts | counted | {name: values[row] for name, values in columns.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the set to a file, atomically.

        Args:
            path: ends in ``.parquet`` (``load`` reads it back exactly), ``.jsonl`` or ``.jsonl.gz`` (counts per pair,
                without judgments).
        """
        suffix = next((known for known in SAVED_FORMATS if str(path).endswith(f".{known}")), None)
        if suffix is None:
            raise UsageError(f"{path} must end in one of {', '.join('.' + known for known in SAVED_FORMATS)}.")
        with atomic_write(path) as partial:
            if suffix == "parquet":
                partial.write_bytes(self.parquet_bytes())
                return
            opener = gzip.open if suffix.endswith("gz") else open
            with opener(partial, "wt", encoding="utf-8", newline="\n") as stream:
                for record in self.to_records():
                    stream.write(json.dumps(record, ensure_ascii=False) + "\n")

    def parquet_bytes(self) -> bytes:
        """Return the contents of a Parquet file of ``save``."""
        sink = io.BytesIO()
        # One row group and one dictionary page per column, so that Parquet also stores each text once.
        pages: dict[str, Any] = {"dictionary_pagesize_limit": 2**30, "write_page_checksum": True}
        pq.write_table(self.to_table(), sink, compression="zstd", row_group_size=max(len(self), 1), **pages)
        return sink.getvalue()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PreferenceSet":
        """Read a Parquet file of ``save``, exactly."""
        if not is_saved_set(path):
            raise DataError("not a file written by PreferenceSet.save", file=str(path), remedy="use load_preferences")
        try:
            return cls.from_table(pq.read_table(path, page_checksum_verification=True))
        except (pa.ArrowException, OSError, LookupError, TypeError, ValueError, AttributeError, OverflowError):
            raise DataError("the file is damaged", file=str(path), remedy="copy it again, or write it again") from None

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that a fit depends on: texts, pairs, votes, splits, judgments. Saved ensembles store it."""
        digest = hashlib.sha256(self.tie_rule.encode())
        for text in (*(Prompt(prompt).key for prompt in self.prompts), *self.responses):
            digest.update(hashlib.sha256(text.encode()).digest())
        for array in (self.prompt_index, self.a_index, self.b_index, self.votes_a, self.votes_b, self.ties):
            digest.update(np.ascontiguousarray(array).data)
        digest.update(json.dumps([str(value) for value in self.columns.get("split", ())]).encode())
        if (judged := self.judgments) is not None:
            for array in (judged.person, judged.prompt, judged.start, judged.response, judged.place):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def is_saved_set(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a Parquet file written by ``PreferenceSet.save``."""
    try:
        with Path(path).open("rb") as stream:  # pyarrow opens no file whose name is not UTF-8
            return _METADATA_KEY in (pq.read_schema(stream).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def _decode_dictionary(column: pa.ChunkedArray) -> tuple[IndexArray, list[str]]:
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.large_string()).dictionary_encode()
    combined = column.unify_dictionaries().combine_chunks()
    if isinstance(combined, pa.ChunkedArray):  # no rows
        return np.empty(0, np.int32), []
    return combined.indices.to_numpy().astype(np.int32), combined.dictionary.to_pylist()


def _to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    if pa.types.is_large_string(column.type) or pa.types.is_string(column.type) or column.null_count == len(column):
        return object_array(column.to_pylist())
    return np.asarray(column.to_numpy())


def texts_of(preferences: PreferenceSet) -> list[Item]:
    """Return the distinct (prompt, response) texts of the votes, in the order of ``items()``."""
    items = preferences.items()
    prompts, responses = preferences.prompts, preferences.responses
    return [(prompts[p], responses[r]) for p, r in zip(items.prompt_index, items.response_index, strict=True)]


def rows_of_texts(part: PreferenceSet, whole: PreferenceSet) -> IntArray:
    """Return the position of each text of ``part`` among the texts of ``whole``, in the order of ``texts_of``."""
    row_of = {text: row for row, text in enumerate(texts_of(whole))}
    return np.array([row_of[text] for text in texts_of(part)], dtype=np.int64)
