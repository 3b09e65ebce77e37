"""Comparisons as they are read: bad rows reported or counted, texts interned, votes of one pair brought together."""

import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import IntArray, Mask
from pluralign.core.errors import DataError, UsageError, did_you_mean
from pluralign.votes.options import TIE_RULES, LoadOptions, Repeats
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt, PromptLike

logger = logging.getLogger("pluralign")


class RowError(Exception):
    """A row that cannot be used: its kind (what is counted), the problem and the remedy."""

    def __init__(self, kind: str, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.kind, self.problem, self.remedy = kind, problem, remedy


@dataclass
class BadRows:
    """What happens to rows that cannot be used: the first one stops reading, or all are dropped and counted."""

    file: str
    skip: bool = False
    can_skip: bool = True
    """Whether the command has --skip-bad."""
    counts: dict[str, int] = field(default_factory=dict)

    def report(self, row: int | None, error: RowError) -> None:
        """Count the row where bad rows are skipped, else raise a ``DataError`` naming it."""
        if not self.skip:
            remedy = f"{error.remedy}, or drop such rows with --skip-bad" if self.can_skip else error.remedy
            raise DataError(error.problem, file=self.file, row=row, remedy=remedy)
        self.counts[error.kind] = self.counts.get(error.kind, 0) + 1


class Comparisons:
    """Comparisons as they are read: texts interned, counts in compact arrays, turned into a set by ``finish``."""

    def __init__(self) -> None:
        self._prompts: dict[PromptLike, int] = {}
        self._responses: dict[str, int] = {}
        self._numbers = {name: array("q") for name in ("row", "prompt", "a", "b", "votes_a", "votes_b", "ties")}
        self._annotators: list[Any] = []
        self._columns: dict[str, list[Any]] = {}
        self._words: dict[str, str] = {}

    def add(
        self,
        row: int,
        prompt: PromptLike,
        response_a: str,
        response_b: str,
        votes_a: int,
        votes_b: int,
        ties: int = 0,
        *,
        annotator: Any = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one comparison, or one vote when ``finish`` will merge."""
        if response_a == response_b:
            raise RowError("identical responses", "the two responses are the same text", "compare two different texts")
        check_text(response_a, "response_a")
        check_text(response_b, "response_b")
        a = self._responses.setdefault(response_a, len(self._responses))
        b = self._responses.setdefault(response_b, len(self._responses))
        values = (row, self._intern_prompt(prompt), a, b, votes_a, votes_b, ties)
        for numbers, value in zip(self._numbers.values(), values, strict=True):
            numbers.append(value)
        self._annotators.append(annotator)
        self._keep(columns or {}, 1)

    def add_all_pairs(
        self,
        row: int,
        prompt: PromptLike,
        responses: Sequence[str],
        scores: npt.NDArray[np.float64],
        *,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Add every pair of ``responses``: each rater votes for the higher of its two scores, equal scores tie.

        Args:
            row: where the scores stand in the file.
            prompt: what the responses answer.
            responses: m texts.
            scores: ``(m, n_raters)``; NaN where a rater gave none, who then has no vote on that response's pairs.
            columns: further values that hold for the whole row.
        """
        for text in responses:
            check_text(text, "response")
        ids = np.array([self._responses.setdefault(text, len(self._responses)) for text in responses])
        first, second = np.triu_indices(len(responses), k=1)
        same = ids[first] == ids[second]
        first, second = first[~same], second[~same]
        votes_a = (scores[first] > scores[second]).sum(axis=1)
        votes_b = (scores[first] < scores[second]).sum(axis=1)
        ties = (scores[first] == scores[second]).sum(axis=1)
        n = len(first)
        constant = np.full(n, row), np.full(n, self._intern_prompt(prompt))
        for numbers, values in zip(
            self._numbers.values(), (*constant, ids[first], ids[second], votes_a, votes_b, ties), strict=True
        ):
            numbers.frombytes(np.ascontiguousarray(values, dtype=np.int64).tobytes())
        self._annotators.extend([None] * n)
        self._keep(columns or {}, n)
        if same.any():  # only now, so that skipping bad rows loses these pairs and not the others
            raise RowError("identical responses", "two of the responses are the same text", "name each response once")

    def _intern_prompt(self, prompt: PromptLike) -> int:
        for text in (turn.content for turn in Prompt(prompt).turns):
            check_text(text, "prompt")
        return self._prompts.setdefault(prompt, len(self._prompts))

    def _keep(self, columns: Mapping[str, Any], n: int) -> None:
        size = len(self._annotators)
        for name, value in columns.items():
            if isinstance(value, str):
                value = self._words.setdefault(value, value)
            elif not isinstance(value, bool | int | float | None):
                continue
            values = self._columns.setdefault(name, [])
            values.extend([None] * (size - n - len(values)))
            values.extend([value] * n)

    def finish(
        self,
        bad: BadRows,
        options: LoadOptions,
        *,
        merge: bool = False,
        min_votes: int = 2,
        few_votes: Literal["bad", "drop"] = "bad",
    ) -> PreferenceSet:
        """Return the comparisons read so far as a ``PreferenceSet``.

        Args:
            bad: where pairs with too few votes are reported, and whose counts end up in ``dropped``.
            options: how ties, repeats and small counts are treated.
            merge: bring votes on the same two responses of a prompt together, whatever their order.
            min_votes: the least votes a pair must have where ``options`` does not say.
            few_votes: whether a pair below that is a bad row, or is dropped and counted.
        """
        if options.ties not in TIE_RULES:
            raise UsageError(f"ties cannot be {options.ties!r}; {did_you_mean(options.ties, TIE_RULES)}.")
        least = max(1, min_votes if options.min_votes is None else options.min_votes)
        numbers = {key: np.frombuffer(values, dtype=np.int64) for key, values in self._numbers.items()}
        columns = {key: _as_array(values, len(self._annotators)) for key, values in self._columns.items()}
        dropped: dict[str, int] = {}
        if merge and len(numbers["a"]):
            keep, numbers = _merge(numbers, len(self._responses), self._annotators, options.repeats, dropped)
            columns = {key: values[keep] for key, values in columns.items()}
        counted = numbers["votes_a"] + numbers["votes_b"] + (numbers["ties"] if options.ties == "half" else 0)
        few = counted < least
        for pair in np.flatnonzero(few):
            if few_votes == "drop":
                kind = f"pairs with fewer than {least} votes" if least > 1 else "pairs without a vote"
                dropped[kind] = dropped.get(kind, 0) + 1
            else:
                bad.report(int(numbers["row"][pair]), _too_few(int(counted[pair]), int(numbers["ties"][pair]), least))
        if options.ties == "drop" and (count := int(numbers["ties"][~few].sum())):
            dropped["tie votes"] = count
        if few.all():
            raise DataError(
                "no comparison with enough votes is left" if len(few) else "there are no comparisons in it",
                file=bad.file,
                remedy=f"check the input; left out so far: {bad.counts or dropped}"
                if bad.counts or dropped
                else "give it at least one row",
            )
        return PreferenceSet.from_indices(
            self._prompts,
            self._responses,
            *(numbers[key][~few] for key in ("prompt", "a", "b", "votes_a", "votes_b")),
            ties=numbers["ties"][~few],
            tie_rule=options.ties,
            columns={key: values[~few] for key, values in columns.items()},
            dropped=dropped | bad.counts,
            name=bad.file,
        )


def _too_few(counted: int, ties: int, least: int) -> RowError:
    kind = "no votes" if counted == 0 else "too few votes"
    have = "no vote" if counted == 0 else "only one vote" if counted == 1 else f"only {counted} votes"
    if ties:
        have += f" beside {ties} tie{'s' * (ties > 1)}"
    remedies = ["use --ties half to count ties"] if ties else []
    if not ties and not counted:
        remedies.append("give only pairs people voted on")
    if counted:
        remedies.append(f"use --min-votes {counted} to keep such pairs (one vote shows no disagreement)")
    return RowError(kind, f"the pair has {have}, and {least} are needed", " or ".join(remedies))


def _merge(
    numbers: dict[str, IntArray], n_responses: int, annotators: list[Any], repeats: Repeats, dropped: dict[str, int]
) -> tuple[IntArray, dict[str, IntArray]]:
    """Sum the votes of each (prompt, unordered pair), oriented as its first row; return the first rows too."""
    a, b = numbers["a"], numbers["b"]
    _, texts = np.unique(np.minimum(a, b) * n_responses + np.maximum(a, b), return_inverse=True)
    _, first, group = np.unique(numbers["prompt"] * (texts.max() + 1) + texts, return_index=True, return_inverse=True)
    repeated = _repeated_votes(group, annotators)
    if repeated.any() and repeats == "first":
        dropped["repeat votes of one annotator on one pair"] = int(repeated.sum())
    elif repeated.any():
        logger.warning(
            "%d votes repeat an annotator's vote on the same pair and are counted; --repeats first keeps one each",
            repeated.sum(),
        )
    counts = ~repeated if repeats == "first" else np.ones(len(a), dtype=bool)
    flip = a != a[first][group]
    toward_a = np.where(flip, numbers["votes_b"], numbers["votes_a"]) * counts
    toward_b = np.where(flip, numbers["votes_a"], numbers["votes_b"]) * counts
    summed = {
        key: np.bincount(group, weights=values).astype(np.int64)
        for key, values in (("votes_a", toward_a), ("votes_b", toward_b), ("ties", numbers["ties"] * counts))
    }
    order = np.argsort(first)
    keep = first[order]
    merged = {key: numbers[key][keep] for key in ("row", "prompt", "a", "b")}
    return keep, merged | {key: values[order] for key, values in summed.items()}


def _repeated_votes(group: IntArray, annotators: list[Any]) -> Mask:
    repeated = np.zeros(len(group), dtype=bool)
    seen: set[tuple[int, Any]] = set()
    for position, annotator in enumerate(annotators):
        if annotator is not None:
            vote = (int(group[position]), annotator)
            repeated[position] = vote in seen
            seen.add(vote)
    return repeated


def _as_array(values: list[Any], n: int) -> npt.NDArray[Any]:
    """Return a column as bool, int, float (NaN for nulls) or objects (strings and nulls)."""
    values = values + [None] * (n - len(values))
    kinds = {type(value) for value in values}
    if kinds == {bool} or kinds == {int}:
        return np.array(values)
    if kinds <= {int, float, type(None)} and kinds != {type(None)}:
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    result = np.empty(n, dtype=object)
    result[:] = [value if value is None or isinstance(value, str) else str(value) for value in values]
    return result


def check_text(text: str, what: str) -> None:
    """Raise a ``RowError`` for text that no UTF-8 file could hold."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        raise RowError("broken text", f"{what} is not valid UTF-8", "save the file as UTF-8") from None
