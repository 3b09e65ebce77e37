"""Votes in memory: distinct prompts and responses, pairs as index arrays into them, and vote counts.

Defined here: how ties count, and how pairs are split by prompt. Files of a set are in ``storage``; other files become
votes in ``load`` and ``layouts``.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.arrays import FloatArray, IndexArray, IntArray, Mask
from pluralign.core.errors import DataError, UsageError
from pluralign.core.late import late
from pluralign.votes import storage
from pluralign.votes.options import TIE_RULES, Loaded, TieRule
from pluralign.votes.prompts import Item, Prompt, PromptLike, prompts_to_hold_out
from pluralign.votes.storage import ObjectArray, distinct, number_by_first_appearance, object_array


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
        """Create a set from distinct texts and arrays of positions in them. Unused texts are dropped.

        Example:
            >>> votes = PreferenceSet.from_indices(["Tea?"], ["Yes.", "No."], [0], [0], [1], [3], [2])
            >>> votes.prob_a
            array([0.6])
        """
        counts_a = np.asarray(votes_a, dtype=np.int64)
        pair_index = np.stack([np.asarray(a_index, np.int32), np.asarray(b_index, np.int32)], axis=1)
        prompt_table, prompt_position = number_by_first_appearance(object_array(prompts), np.asarray(prompt_index))
        response_table, response_position = number_by_first_appearance(object_array(responses), pair_index.ravel())
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
        """Create a set from one value per pair; ``options`` are those of ``from_indices``.

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
        return cls.from_indices(prompts, responses, prompt_index, index[:n], index[n:], votes_a, votes_b, **options)

    def _checked(self) -> "PreferenceSet":
        lengths = {len(array) for array in (self.prompt_index, self.a_index, self.votes_a, self.votes_b, self.ties)}
        lengths |= {len(values) for values in self.columns.values()}
        if len(lengths) != 1:
            raise UsageError(f"all arrays of a PreferenceSet must have one length, but there are {sorted(lengths)}.")
        if (taken := set(self.columns) & set(storage.RESERVED_COLUMNS)) or any(not name for name in self.columns):
            name = ", ".join(sorted(taken)) or "'' (empty)"
            raise UsageError(f"extra columns must not have the name {name}: rename them.")
        if self.tie_rule not in TIE_RULES:
            raise UsageError(f"tie_rule must be 'drop', 'half' or 'fixed', not {self.tie_rule!r}.")
        if min(map(_smallest, (self.votes_a, self.votes_b, self.ties))) < 0:
            raise UsageError("vote counts must not be negative.")
        if len(self) and not self.n_votes.min():
            raise UsageError(f"every pair needs a vote that counts, but pair {int(self.n_votes.argmin())} has none.")
        return self

    def __len__(self) -> int:
        return len(self.votes_a)

    def __repr__(self) -> str:
        return (
            f"PreferenceSet({self.name or 'votes'}: {len(self):,} pairs, {len(self.prompts):,} prompts, "
            f"{len(self.responses):,} responses, {self.n_votes.sum():,.0f} votes)"
        )

    def _repr_html_(self) -> str:
        return str(late("publishing.notebook", "preferences_html")(self))

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same pairs in the same order, with the same votes and columns."""
        return isinstance(other, PreferenceSet) and self.to_table().equals(other.to_table(), check_metadata=False)

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

    def __getitem__(self, rows: slice | npt.ArrayLike) -> "PreferenceSet":
        """Return the pairs at ``rows`` (a slice, indices or a mask) as a new set."""
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
        """Return the same pairs with a and b exchanged."""
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
        position = position.astype(np.int32)
        n = len(self)
        return Items(
            (distinct // width).astype(np.int32), (distinct % width).astype(np.int32), position[:n], position[n:]
        )

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
            raise DataError(
                "a split by prompt needs two prompts, and there is one" if len(self) else "there are no votes",
                file=self.name,
                remedy="add votes on other prompts",
            )
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
        """Return a wide Arrow table with one row per pair and dictionary-encoded texts."""
        return storage.to_table(self)

    @classmethod
    def from_table(cls, table: pa.Table) -> "PreferenceSet":
        """Create a set from a table of ``to_table``."""
        return cls.from_indices(**storage.from_table(table))

    def to_records(self) -> Iterator[dict[str, Any]]:
        """Yield one dict per pair, in the wide layout that ``load_preferences`` reads."""
        return storage.to_records(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the set to a file, atomically.

        Args:
            path: ends in ``.parquet`` (``load`` reads it back exactly), ``.jsonl`` or ``.jsonl.gz``.
        """
        storage.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PreferenceSet":
        """Read a Parquet file of ``save``, exactly."""
        if not storage.is_saved_set(path):
            raise DataError("not a file written by PreferenceSet.save", file=str(path), remedy="use load_preferences")
        try:
            return cls.from_table(pq.read_table(path, page_checksum_verification=True))
        except (pa.ArrowException, OSError, LookupError, TypeError, ValueError, AttributeError, OverflowError):
            raise DataError("the file is damaged", file=str(path), remedy="copy it again, or write it again") from None

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that a fit depends on: texts, pairs, votes and splits. Saved ensembles store it."""
        digest = hashlib.sha256(self.tie_rule.encode())
        for text in (*(Prompt(prompt).key for prompt in self.prompts), *self.responses):
            digest.update(hashlib.sha256(text.encode()).digest())
        for array in (self.prompt_index, self.a_index, self.b_index, self.votes_a, self.votes_b, self.ties):
            digest.update(np.ascontiguousarray(array).data)
        digest.update(json.dumps([str(value) for value in self.columns.get("split", ())]).encode())
        return digest.hexdigest()


def concatenate(sets: Sequence[PreferenceSet]) -> PreferenceSet:
    """Join sets that have the same tie rule. A column that one of them does not have is null in its pairs.

    Example:
        >>> tea = PreferenceSet.from_columns(["Tea?"], ["Yes."], ["No."], [3], [2])
        >>> concatenate([tea, tea]).votes_a
        array([3, 3])
    """
    if other := [votes for votes in sets if not isinstance(votes, PreferenceSet)]:
        raise UsageError(f"concatenate takes PreferenceSets (load_preferences), not a {type(other[0]).__name__}.")
    rules = {preferences.tie_rule for preferences in sets}
    if len(rules) != 1:
        raise UsageError(f"sets to concatenate must have the same tie rule, but there are {len(rules)}.")
    dropped: dict[str, int] = {}
    for preferences in sets:
        for kind, count in preferences.dropped.items():
            dropped[kind] = dropped.get(kind, 0) + count
    joined = PreferenceSet.from_table(storage.concatenated_table(list(sets)))
    name = "+".join(dict.fromkeys(preferences.name for preferences in sets if preferences.name))
    return replace(joined, tie_rule=rules.pop(), dropped=dropped, name=name)


def _smallest(values: IntArray) -> int:
    return int(values.min()) if len(values) else 0


def texts_of(preferences: PreferenceSet) -> list[Item]:
    """Return the distinct (prompt, response) texts of the votes, in the order of ``items()``."""
    items = preferences.items()
    prompts, responses = preferences.prompts, preferences.responses
    return [(prompts[p], responses[r]) for p, r in zip(items.prompt_index, items.response_index, strict=True)]


def rows_of_texts(part: PreferenceSet, whole: PreferenceSet) -> IntArray:
    """Return the position of each text of ``part`` among the texts of ``whole``, in the order of ``texts_of``."""
    row_of = {text: row for row, text in enumerate(texts_of(whole))}
    return np.array([row_of[text] for text in texts_of(part)], dtype=np.int64)
