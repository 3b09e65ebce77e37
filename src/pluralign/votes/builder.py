"""Builds a set of votes row by row: reports or counts invalid rows, stores texts once, merges the votes of a pair, and
keeps what single people said.
"""

import logging
import math
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, IntArray, Mask
from pluralign.core.errors import ON_COMMAND_LINE, DataError
from pluralign.core.options import spelled
from pluralign.core.text import counted
from pluralign.votes.columns import is_person_column, names_people
from pluralign.votes.judgments import Judgments, by_first_appearance
from pluralign.votes.options import LoadOptions
from pluralign.votes.preferences import PreferenceSet, distinct, object_array
from pluralign.votes.prompts import PromptLike
from pluralign.votes.values import RowError, checked_text, person_key

VOTES_AT_ONCE = 10**7
LONGEST_INTEGER = 10_000
"""Bits. Python does not write longer integers as text."""

logger = logging.getLogger("pluralign")


@dataclass
class BadRows:
    """Handles invalid rows: the first one raises a ``DataError``, or all are dropped and counted."""

    file: str
    skip: bool = False
    can_skip: bool = True
    """Whether the command has the option --skip-bad."""
    harmless: Collection[str] = ()
    """Kinds that are known to occur and no user can fix: they are counted and never raise."""
    counts: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """Texts by id that readers share among rows."""

    @contextmanager
    def row(self, row: int) -> Iterator[None]:
        """Report a ``RowError`` of the block with the number of its row."""
        try:
            yield
        except RowError as error:
            self.report(row, error)

    def report(self, row: int, error: RowError) -> None:
        """Count the row if invalid rows are skipped, else raise a ``DataError`` with its number."""
        if not self.skip and error.kind not in self.harmless:
            remedy = (
                f"{error.remedy}, or drop such rows with {spelled(skip_bad=True)}" if self.can_skip else error.remedy
            )
            raise DataError(error.problem, file=self.file, row=row, remedy=remedy)
        self.count(error.kind)

    def count(self, kind: str, number: int = 1) -> None:
        """Count dropped rows or votes of a kind."""
        if number:
            self.counts[kind] = self.counts.get(kind, 0) + number


class RowFacts(NamedTuple):
    """What a row tells beside texts and votes."""

    number: int
    prompt: PromptLike
    columns: Mapping[str, Any]
    """Further values of the row."""
    annotator: Any = None
    """The rater, if there is only one."""


class Comparisons:
    """Collects pairs, with texts stored once and counts in compact arrays. ``finish`` returns them as a set.

    Args:
        bad: names the file, and handles pairs with too few votes. Its counts become part of ``dropped``.
    """

    def __init__(self, bad: BadRows) -> None:
        self.bad = bad
        self._prompts: dict[PromptLike, int] = {}
        self._responses: dict[str, int] = {}
        self._numbers = {name: array("q") for name in ("row", "prompt", "a", "b", "votes_a", "votes_b", "ties")}
        self._annotators: list[Any] = []
        # Rankings and scores: what was added at once, from its first row, and its responses with scores rater by rater.
        self._ranked = {name: array("q") for name in ("first", "prompt", "responses", "raters")}
        self._entries, self._scores = array("q"), array("d")
        self._columns: dict[str, list[Any]] = {}
        self._left_out: dict[str, list[str]] = {"ids": [], "varying": []}
        self._words: dict[str, str] = {}
        self._with_repeats = 0

    def add(self, row: RowFacts, response_a: str, response_b: str, votes: tuple[int, int, int]) -> None:
        """Add the votes of one pair for a, for b and for a tie; one vote if ``finish`` merges."""
        if response_a == response_b:
            raise RowError("identical responses", "the two responses are the same text", "compare two different texts")
        self._check_columns(row.columns)
        a = self._responses.setdefault(response_a, len(self._responses))
        b = self._responses.setdefault(response_b, len(self._responses))
        values = (row.number, self._prompts.setdefault(row.prompt, len(self._prompts)), a, b, *votes)
        if len(self._ranked["first"]):  # from the first ranking on, a vote is kept as a ranking of two
            self._rank(values[1], np.array([a, b]), np.array(votes[:2], dtype=np.float64)[:, None])
        for numbers, value in zip(self._numbers.values(), values, strict=True):
            numbers.append(value)
        self._annotators.append(row.annotator)
        self._keep(row.columns, 1)

    def add_all_pairs(self, row: RowFacts, responses: Sequence[str], scores: FloatArray) -> None:
        """Add every pair of ``responses`` that was judged: each rater votes for the higher score, and equal scores tie.

        A text that is given twice is one response, with its best score of each rater.

        Args:
            row: prompt and further values.
            responses: m texts.
            scores: ``(m, n_raters)``; NaN for no score, and then no vote of that rater on pairs with the response.
        """
        if len(responses) < 2:
            have = "only one response" if responses else "no response"
            raise RowError("a single response", f"the prompt has {have}", "give at least two responses")
        self._check_columns(row.columns)
        if len(texts := {text: position for position, text in enumerate(dict.fromkeys(responses))}) < len(responses):
            best = np.full((len(texts), scores.shape[1]), np.nan)
            np.fmax.at(best, [texts[text] for text in responses], scores)
            scores, self._with_repeats = best, self._with_repeats + (len(texts) > 1)
        if len(texts) < 2:
            self.bad.count("identical responses")
            return
        ids = np.array([self._responses.setdefault(text, len(self._responses)) for text in texts])
        first, second = np.triu_indices(len(texts), k=1)
        votes = []
        for rows in np.array_split(np.arange(len(first)), 1 + len(first) * scores.shape[1] // VOTES_AT_ONCE):
            one, other = scores[first[rows]], scores[second[rows]]
            votes.append([(one > other).sum(axis=1), (one < other).sum(axis=1), (one == other).sum(axis=1)])
        votes_a, votes_b, ties = (np.concatenate(parts) for parts in zip(*votes, strict=True))
        judged = votes_a + votes_b + ties > 0
        first, second, votes_a, votes_b, ties = (x[judged] for x in (first, second, votes_a, votes_b, ties))
        n = len(first)
        same_prompt = np.full(n, self._prompts.setdefault(row.prompt, len(self._prompts)))
        if n:
            self._rank(same_prompt[0], ids, scores)
        arrays = (np.full(n, row.number), same_prompt, ids[first], ids[second], votes_a, votes_b, ties)
        for numbers, values in zip(self._numbers.values(), arrays, strict=True):
            numbers.frombytes(np.ascontiguousarray(values, dtype=np.int64).tobytes())
        self._annotators.extend([row.annotator] * n)
        self._keep(row.columns, n)

    def _rank(self, prompt: int, ids: IntArray, scores: FloatArray) -> None:
        """Keep what raters say about responses whose pairs are the next rows; ``scores`` are ``(m, n_raters)``."""
        of_row = (len(self._annotators), prompt, len(ids), scores.shape[1])
        for numbers, value in zip(self._ranked.values(), of_row, strict=True):
            numbers.append(value)
        self._entries.frombytes(np.tile(ids, scores.shape[1]).astype(np.int64).tobytes())
        self._scores.frombytes(scores.T.astype(np.float64).tobytes())

    def _check_columns(self, columns: Mapping[str, Any]) -> None:
        """Raise a ``RowError`` for further columns that cannot be saved."""
        for name, value in columns.items():
            if name not in self._columns:
                checked_text(name, "the name of a column")
            if isinstance(value, str):
                checked_text(value, name)
            elif isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:
                raise RowError("huge number", f"{name} is an integer of thousands of digits", "write it as a text")

    def _keep(self, columns: Mapping[str, Any], n: int) -> None:
        size = len(self._annotators)
        for name, value in columns.items():
            if is_person_column(name):
                if value is not None and name not in self._left_out["ids"]:
                    self._left_out["ids"].append(name)
                continue
            if isinstance(value, str):
                value = self._words.setdefault(value, value)
            elif not isinstance(value, bool | int | float | None):
                continue
            values = self._columns.setdefault(name, [])
            values.extend([None] * (size - n - len(values)))
            values.extend([value] * n)

    def finish(
        self,
        options: LoadOptions,
        min_votes: int = 2,
        drop_few: bool = False,
        *,
        merge: bool = False,
        offer_raters: bool = False,
    ) -> PreferenceSet:
        """Return the pairs as a ``PreferenceSet``.

        Args:
            options: how to treat ties, repeated votes and small counts.
            min_votes: minimum votes per pair, unless ``options`` has one.
            drop_few: drop and count pairs with fewer votes. Otherwise they are bad rows.
            merge: merge votes on the same two responses of a prompt, in either order.
            offer_raters: say that the ids of people which are not kept can be used.
        """
        merged = self._merged(options) if merge else self._unmerged()
        judgments = self._judgments(merged.counts, single=merge)
        preferences = self._counted(merged, judgments, options, min_votes, drop_few)[0]
        if offer_raters and (ids := self._left_out["ids"]):
            message = "%s: ids of people are not kept (%s); to use them: %s"
            use = spelled(raters=ids[0]) if ON_COMMAND_LINE.is_set() else f"load_rater_votes(source, {ids[0]!r})"
            logger.warning(message, self.bad.file, ", ".join(ids), use)
        if varying := self._left_out["varying"]:
            message = "%s: columns that differ between the votes on one pair are not kept (%s)"
            logger.warning(message, self.bad.file, ", ".join(varying))
        return preferences

    def finish_single(
        self, options: LoadOptions, min_votes: int, drop_few: bool
    ) -> tuple[PreferenceSet, IntArray, list[Any], FloatArray]:
        """Return the merged pairs, and for each single vote that counts its pair, its annotator and its value.

        The value is 1 for response a of the pair, 0 for b and 1/2 for a tie. Every row added must be one vote. The
        judgments of the pairs are linked by annotator; a vote without one is that of another person.
        """
        merged = self._merged(options)
        judgments = self._judgments(merged.counts, single=True, linked=True)
        preferences, kept = self._counted(merged, judgments, options, min_votes, drop_few)
        numbers = self._arrays()
        tie = numbers["ties"] > 0
        votes = np.flatnonzero(merged.counts & kept[merged.pair] & ~(tie & (options.ties == "drop")))
        chose_a = np.where(tie, 0.5, np.where(merged.swapped, numbers["votes_b"], numbers["votes_a"]))
        position = np.cumsum(kept) - 1
        annotators = [self._annotators[vote] for vote in votes.tolist()]
        return preferences, position[merged.pair[votes]], annotators, chose_a[votes]

    def _judgments(self, counts: Mask, *, single: bool, linked: bool = False) -> Judgments | None:
        """Return what single people said, with positions in the texts as collected.

        None if nothing tells more than the counts: no ranking has three responses, and no annotator several rankings.

        Args:
            counts: whether a row counts. A ranking of which a row does not is dropped.
            single: whether a row that was added alone is one vote.
            linked: whether an annotator is the same person for all prompts. Otherwise links hold within a prompt.
        """
        numbers, who = self._arrays(), self._who()
        ranked = {key: np.frombuffer(values, dtype=np.int64) for key, values in self._ranked.items()}
        first, raters = ranked["first"], ranked["raters"]
        if not (single or len(first)):
            return None
        n = first[0] if len(first) else len(who)  # rows before the first ranking: single votes
        cast = numbers["votes_a"] + numbers["votes_b"] + numbers["ties"] > 0
        votes = who[:n], numbers["prompt"][:n], np.full(n, 2), (counts & cast)[:n]
        ranks = who[first], ranked["prompt"], ranked["responses"], np.add.reduceat(~counts, first) == 0
        who, prompt, sizes, kept = (np.append(v, np.repeat(r, raters)) for v, r in zip(votes, ranks, strict=True))
        texts, sides = (np.stack([numbers[name][:n] for name in two], axis=1) for two in ("ab", ("votes_a", "votes_b")))
        response, score = np.append(texts, np.frombuffer(self._entries, np.int64)), np.append(sides, self._scores)
        if sizes.max(initial=0) < 3 and (who < 0).all():
            return None
        entries = np.repeat(kept, sizes)
        who, prompt, sizes = who[kept], prompt[kept], sizes[kept]
        person = np.where(who < 0, who.max(initial=0) + 1 + np.arange(len(who)), who)
        if not linked:
            _, person = np.unique(person * len(self._prompts) + prompt, return_inverse=True)
        judgments = Judgments.from_scores(person, prompt, sizes, response[entries], score[entries], linked=linked)
        return judgments if len(judgments) and (linked or judgments.tell_more.any()) else None

    def _who(self) -> IntArray:
        """Return the annotator of each row as a number from 0, or -1 if there is none, ``(n_rows,)``."""
        number: dict[str, int] = {}
        each = dict.fromkeys(self._annotators)
        known = {
            one: -1 if one is None or one != one else number.setdefault(person_key(one), len(number)) for one in each
        }
        return np.fromiter((known[one] for one in self._annotators), np.int64, len(self._annotators))

    def _arrays(self) -> dict[str, IntArray]:
        return {key: np.frombuffer(values, dtype=np.int64) for key, values in self._numbers.items()}

    def _unmerged(self) -> "_Merged":
        rows = np.arange(len(self._annotators))
        return _Merged(rows, self._arrays(), rows, np.zeros(len(rows), dtype=bool), np.ones(len(rows), dtype=bool))

    def _merged(self, options: LoadOptions) -> "_Merged":
        """Sum the votes of each (prompt, unordered pair) in the orientation of its first row."""
        numbers = self._arrays()
        a, b = numbers["a"], numbers["b"]
        texts = np.minimum(a, b) * len(self._responses) + np.maximum(a, b)
        _, texts = np.unique(texts, return_inverse=True)
        keys = numbers["prompt"] * (len(texts) + 1) + texts
        _, first, group = np.unique(keys, return_index=True, return_inverse=True)
        counts = np.ones(len(a), dtype=bool)
        if (repeated := self._repeated_votes(group)).any():
            if options.repeats == "first":
                self.bad.count("repeat votes of one annotator on one pair", int(repeated.sum()))
                counts = ~repeated
            else:
                message = (
                    "%d votes repeat an annotator's vote on the same pair and are counted; with %s only the first is"
                )
                logger.warning(message, repeated.sum(), spelled(repeats="first"))
        order, pair = by_first_appearance(group)
        rows = first[order]
        swapped = a != a[rows][pair]
        votes_a = np.where(swapped, numbers["votes_b"], numbers["votes_a"])
        votes_b = np.where(swapped, numbers["votes_a"], numbers["votes_b"])
        merged = {key: numbers[key][rows] for key in ("row", "prompt", "a", "b")}
        for key, values in (("votes_a", votes_a), ("votes_b", votes_b), ("ties", numbers["ties"])):
            merged[key] = np.bincount(pair, weights=values * counts, minlength=len(rows)).astype(np.int64)
        return _Merged(rows, merged, pair.astype(np.int64), swapped, counts)

    def _repeated_votes(self, group: IntArray) -> Mask:
        known = np.flatnonzero((who := self._who()) >= 0)
        repeated = np.zeros(len(group), dtype=bool)
        repeated[known] = True
        _, first = np.unique(who[known] * len(group) + group[known], return_index=True)
        repeated[known[first]] = False
        return repeated

    def _counted(
        self, merged: "_Merged", judgments: Judgments | None, options: LoadOptions, min_votes: int, drop_few: bool
    ) -> tuple[PreferenceSet, Mask]:
        """Return the pairs with enough votes, and which of the merged pairs they are."""
        least = max(1, min_votes if options.min_votes is None else options.min_votes)
        numbers, bad = merged.numbers, self.bad
        if self._with_repeats:
            rows = counted(self._with_repeats, "row")
            logger.warning("%s: a response is given twice in %s; its best place or score counts", bad.file, rows)
        n_votes = numbers["votes_a"] + numbers["votes_b"] + (numbers["ties"] if options.ties == "half" else 0)
        few = n_votes < least
        if drop_few and few.any():
            kind = f"pairs with fewer than {least} votes" if least > 1 else "pairs without a vote"
            bad.count(kind, int(few.sum()))
        elif not drop_few:
            for pair in np.flatnonzero(few):
                bad.report(int(numbers["row"][pair]), _too_few(int(n_votes[pair]), int(numbers["ties"][pair]), least))
        if options.ties == "drop":
            bad.count("tie votes", int(numbers["ties"][~few].sum()))
        if few.all():
            remedy = f"check the input; dropped: {bad.counts}" if bad.counts else "give at least one row"
            problem = "no pair has enough votes" if len(few) else "there are no pairs in it"
            raise DataError(problem, file=bad.file, remedy=remedy)
        preferences = PreferenceSet.from_indices(
            self._prompts,
            self._responses,
            *(numbers[key][~few] for key in ("prompt", "a", "b", "votes_a", "votes_b")),
            ties=numbers["ties"][~few],
            tie_rule=options.ties,
            columns={key: values[~few] for key, values in self._kept_columns(merged).items()},
            dropped=dict(bad.counts),
            name=bad.file,
            judgments=judgments,
        )
        return preferences, ~few

    def _kept_columns(self, merged: "_Merged") -> dict[str, npt.NDArray[Any]]:
        """Return the further columns by pair, without those that tell who voted.

        These are columns with ids of people, and columns that differ between the votes on one pair.
        """
        kept = {}
        for name, given in self._columns.items():
            values = [*given, *[None] * (len(self._annotators) - len(given))]
            code = distinct([None if value != value else value for value in values])[1]
            if name == "split":
                kept[name] = _as_array(values)[merged.rows]
            elif (code[merged.rows][merged.pair] != code).any():
                self._left_out["varying"].append(name)
            elif names_people(values, self._numbers["prompt"]):
                self._left_out["ids"].append(name)
            else:
                kept[name] = _as_array(values)[merged.rows]
        return kept


def _too_few(n_votes: int, ties: int, least: int) -> RowError:
    kind = "too few votes" if n_votes else "no votes"
    have = "no vote" if n_votes == 0 else f"only {counted(n_votes, 'vote')}"
    have += f" and {counted(ties, 'tie')}" if ties else ""
    remedies = (
        [f"use {spelled(ties='half')} to count ties"] if ties else [] if n_votes else ["give only pairs with votes"]
    )
    if n_votes:
        remedies.append(f"use {spelled(min_votes=n_votes)} to keep such pairs (one vote shows no disagreement)")
    return RowError(kind, f"the pair has {have}, and {least} are needed", " or ".join(remedies))


@dataclass(frozen=True, eq=False)
class _Merged:
    """Rows merged into pairs."""

    rows: IntArray
    """First row of each pair, ``(n_pairs,)``."""
    numbers: dict[str, IntArray]
    """Summed votes, and the texts of the first row, each ``(n_pairs,)``."""
    pair: IntArray
    """Pair of each row, ``(n_rows,)``."""
    swapped: Mask
    """Whether a row names the two responses in the other order, ``(n_rows,)``."""
    counts: Mask
    """Whether a row is counted, ``(n_rows,)``: repeated votes may not be."""


def _as_array(values: list[Any]) -> npt.NDArray[Any]:
    """Return a column as bool, int, float (NaN for nulls) or objects (strings and nulls).

    Integers that such numbers cannot hold exactly become strings.
    """
    kinds = {type(value) for value in values}
    limit = 2**63 if kinds == {int} else 2**53
    exact = int not in kinds or all(-limit < value < limit for value in values if type(value) is int)
    if kinds == {bool} or (kinds == {int} and exact):
        return np.array(values)
    if kinds <= {int, float, type(None)} and kinds != {type(None)} and exact:
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    return object_array(value if value is None or isinstance(value, str) else str(value) for value in values)
