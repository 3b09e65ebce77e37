"""Judgments: what single people said about the responses to a prompt, of which vote counts keep only the sums.

Rankings, scores and several votes by one person on a prompt are all kept as rankings, with ties and missing responses.
"""

import base64
import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pluralign.core.arrays import IndexArray, IntArray, Mask

if TYPE_CHECKING:
    from pluralign.votes.preferences import PreferenceSet

_ARRAYS = ("person", "prompt", "start", "response", "place")


def by_first_appearance(index: npt.NDArray[Any]) -> tuple[IntArray, IndexArray]:
    """Return the distinct values of ``index`` in order of first appearance, and the number of each value in that order.

    Args:
        index: small integers from 0.

    Example:
        >>> by_first_appearance(np.array([7, 3, 7, 5]))
        (array([7, 3, 5]), array([0, 1, 0, 2], dtype=int32))
    """
    n = len(index)
    first_use = np.full(int(index.max()) + 1 if n else 0, n, dtype=np.int64)
    first_use[index[::-1]] = np.arange(n)[::-1]  # the last assignment to a place wins
    used = np.argsort(first_use, kind="stable")[: int((first_use < n).sum())]
    number = np.empty(len(first_use), dtype=np.int32)
    number[used] = np.arange(len(used), dtype=np.int32)
    return used, number[index].astype(np.int32)


def ranges(first: IntArray, sizes: IntArray) -> IntArray:
    """Return ``sizes[i]`` numbers from ``first[i]`` on, for each i.

    Example:
        >>> ranges(np.array([5, 0]), np.array([2, 3]))
        array([5, 6, 0, 1, 2])
    """
    return np.asarray(np.arange(sizes.sum()) + np.repeat(first - (np.cumsum(sizes) - sizes), sizes))


@dataclass(frozen=True, eq=False)
class Judgments:
    """What single people said about the responses to one prompt: rankings, with ties and missing responses.

    A vote on a pair is a ranking of two. A judgment is all that one person said about one prompt.
    """

    person: IndexArray
    """Who, ``(n_rankings,)``, numbered from 0 by first appearance. Without rater ids a person has rankings on one
    prompt only."""
    prompt: IndexArray
    """Prompt of each ranking, an index into the prompts of the set, ``(n_rankings,)``."""
    start: IntArray
    """The entries of ranking i are ``start[i]:start[i + 1]``, ``(n_rankings + 1,)``."""
    response: IndexArray
    """Response of each entry, an index into the responses of the set, best first within a ranking, ``(n_entries,)``.
    A ranking has each response once."""
    place: IndexArray
    """Place of each entry in its ranking, 0 for the best, ``(n_entries,)``. Equal places tie: 0, 0, 1, 2, …"""
    linked: bool = False
    """Whether persons are known across prompts (rater ids)."""

    @classmethod
    def from_scores(
        cls,
        person: npt.ArrayLike,
        prompt: npt.ArrayLike,
        sizes: IntArray | list[int],
        response: npt.ArrayLike,
        score: npt.ArrayLike,
        *,
        linked: bool = False,
    ) -> "Judgments":
        """Create rankings from scores. Rankings with fewer than two responses are dropped.

        Args:
            person: of each ranking, small integers from 0, ``(n_rankings,)``.
            prompt: of each ranking, ``(n_rankings,)``.
            sizes: number of entries of each ranking, ``(n_rankings,)``.
            response: of each entry, ``(n_entries,)``. A response that is given twice keeps its best place.
            score: of each entry, higher is better; equal scores tie, and NaN is not judged, ``(n_entries,)``.
            linked: whether persons are known across prompts.

        Example:
            >>> one = Judgments.from_scores([0], [0], [4], [5, 6, 7, 8], [2.0, 9.0, np.nan, 2.0])
            >>> one.response, one.place
            (array([6, 5, 8], dtype=int32), array([0, 1, 1], dtype=int32))
        """
        given, scores = np.asarray(response, np.int64), np.asarray(score, np.float64)
        ranking = np.repeat(np.arange(len(sizes)), sizes)
        best_first = np.lexsort((-scores, ranking))
        best_first = best_first[~np.isnan(scores[best_first])]
        key = (ranking * (given.max(initial=0) + 1) + given)[best_first]
        kept = best_first[np.sort(np.unique(key, return_index=True)[1])]
        entries = ranking[kept], given[kept], scores[kept]
        return cls._ranked(np.asarray(person), np.asarray(prompt), entries, linked)

    @classmethod
    def _ranked(
        cls,
        person: npt.NDArray[Any],
        prompt: npt.NDArray[Any],
        entries: tuple[npt.NDArray[Any], ...],
        linked: bool,
    ) -> "Judgments":
        """Create rankings from the ranking, response and level of entries in their order; equal levels tie."""
        sizes = np.bincount(entries[0], minlength=len(person))
        whole = sizes >= 2
        response, level = (values[whole[entries[0]]] for values in entries[1:])
        start = np.concatenate([[0], np.cumsum(sizes[whole])])
        worse = np.cumsum(np.diff(level, prepend=level[:1]) != 0)
        place = worse - np.repeat(worse[start[:-1]], sizes[whole])
        texts = prompt[whole].astype(np.int32), start, response.astype(np.int32)
        return cls(by_first_appearance(person[whole])[1], *texts, place.astype(np.int32), linked)

    def __len__(self) -> int:
        """Return the number of rankings."""
        return len(self.person)

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same rankings in the same order."""
        return (
            isinstance(other, Judgments)
            and self.linked == other.linked
            and all(np.array_equal(getattr(self, name), getattr(other, name)) for name in _ARRAYS)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def n_persons(self) -> int:
        """Number of persons."""
        return int(self.person.max(initial=-1)) + 1

    @property
    def n(self) -> int:
        """Number of judgments: distinct (person, prompt)."""
        return int(self.judgment.max(initial=-1)) + 1

    @property
    def n_prompts(self) -> int:
        """Number of distinct prompts."""
        return len(np.unique(self.prompt))

    @cached_property
    def sizes(self) -> IntArray:
        """Number of responses of each ranking, ``(n_rankings,)``."""
        return np.diff(self.start)

    @cached_property
    def judgment(self) -> IndexArray:
        """Judgment that each ranking belongs to, ``(n_rankings,)``: the number of its (person, prompt)."""
        key = self.person * (self.prompt.max(initial=0) + np.int64(1)) + self.prompt
        return by_first_appearance(np.unique(key, return_inverse=True)[1])[1]

    @cached_property
    def tell_more(self) -> Mask:
        """Whether a ranking tells more than vote counts, ``(n_rankings,)``.

        It has three or more responses, or its person has several rankings on that prompt.
        """
        return np.asarray((self.sizes >= 3) | (np.bincount(self.judgment)[self.judgment] > 1), dtype=bool)

    @cached_property
    def group(self) -> IndexArray:
        """People who judged the same responses, ``(n_rankings,)``, numbered by first appearance.

        Judgments that share a response to a prompt are in one group, also through other judgments: the connected
        components of judgments and the (prompt, response) items they name. A group never spans prompts.
        """
        key = np.repeat(self.prompt.astype(np.int64), self.sizes) * (self.response.max(initial=0) + 1) + self.response
        items, item = np.unique(key, return_inverse=True)
        judgment = np.repeat(self.judgment, self.sizes)
        n = self.n + len(items)
        links = coo_array((np.ones(len(item), dtype=bool), (judgment, self.n + item)), shape=(n, n))
        _, component = connected_components(links, directed=False)
        return by_first_appearance(component[self.judgment])[1]

    def __getitem__(self, rankings: npt.ArrayLike) -> "Judgments":
        """Return the rankings of a mask or at indices; persons are numbered anew by first appearance."""
        rows = np.arange(len(self))[np.asarray(rankings)]
        sizes = self.sizes[rows]
        ranking = np.repeat(np.arange(len(rows)), sizes)
        entries = ranges(self.start[rows], sizes)
        of_entries = ranking, self.response[entries], self.place[entries]
        return self._ranked(self.person[rows], self.prompt[rows], of_entries, self.linked)

    def restricted(self, entries: Mask) -> "Judgments":
        """Return the rankings of the remaining entries, without those that have fewer than two.

        By Luce's axiom a restricted Plackett–Luce ranking is a Plackett–Luce ranking of the remaining responses, so
        nothing but information is lost.
        """
        ranking = np.repeat(np.arange(len(self)), self.sizes)[entries]
        of_entries = ranking, self.response[entries], self.place[entries]
        return self._ranked(self.person, self.prompt, of_entries, self.linked)

    def unlinked(self) -> "Judgments":
        """Return the same judgments, each by a person of its own: nobody is known across prompts."""
        return replace(self, person=self.judgment, linked=False)

    def keys(self, n_responses: int) -> IntArray:
        """Return a number for the (prompt, response) of each entry, ``(n_entries,)``."""
        return np.repeat(self.prompt.astype(np.int64), self.sizes) * n_responses + self.response

    def items(self, preferences: "PreferenceSet") -> IndexArray:
        """Return the position of each entry's (prompt, response) among ``preferences.items()``, ``(n_entries,)``."""
        items, width = preferences.items(), len(preferences.responses)
        keys = items.prompt_index.astype(np.int64) * width + items.response_index
        return np.searchsorted(keys, self.keys(width)).astype(np.int32)

    def to_bytes(self) -> bytes:
        """Return the judgments as ASCII text."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        data = safetensors.numpy.save({**arrays, "linked": np.array([self.linked])})
        return base64.b64encode(zlib.compress(data))

    @classmethod
    def from_bytes(cls, text: bytes) -> "Judgments":
        """Read what ``to_bytes`` wrote. Raises ``ValueError`` if it is damaged."""
        try:
            arrays: dict[str, Any] = safetensors.numpy.load(zlib.decompress(base64.b64decode(text, validate=True)))
            return cls(**{name: arrays[name] for name in _ARRAYS}, linked=bool(arrays["linked"][0]))
        except (zlib.error, safetensors.SafetensorError, LookupError) as error:
            raise ValueError(f"the judgments are damaged ({error})") from None


def rankings_of_one(preferences: "PreferenceSet") -> Judgments:
    """Return votes as the rankings of one person.

    On a prompt with judgments these are the judgments. On the others every vote is a ranking of two.
    """
    judged, counted = preferences.judgments, np.ones(len(preferences.prompts), dtype=bool)
    if judged is not None:
        counted[judged.prompt] = False
    rows = np.flatnonzero(counted[preferences.prompt_index])
    votes = np.stack([preferences.votes_a, preferences.votes_b, preferences.counted_ties], axis=1)[rows]
    pair, sizes = np.repeat(rows, votes.sum(axis=1)), np.full(votes.sum(), 2)
    for_a = np.repeat(np.tile([1.0, -1.0, 0.0], len(rows)), votes.ravel())
    both = np.stack([preferences.a_index, preferences.b_index], axis=1)[pair]
    scores = np.stack([for_a, np.zeros(len(pair))], axis=1)
    prompt, response, score = preferences.prompt_index[pair], both.ravel(), scores.ravel()
    if judged is not None:
        prompt, sizes = np.append(judged.prompt, prompt), np.append(judged.sizes, sizes)
        response, score = np.append(judged.response, response), np.append(-judged.place, score)
    return Judgments.from_scores(np.zeros_like(prompt), prompt, sizes, response, score, linked=True)
