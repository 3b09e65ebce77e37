"""Layouts of records: from records of any known layout to pairs with vote counts.

A layout is recognised by its columns. Invalid rows raise ``RowError``. ``formats`` reads the records; the paper's own
data sets are read in ``paper_sets``.
"""

import hashlib
import itertools
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from pluralign.core.errors import DataError
from pluralign.core.options import spelled
from pluralign.votes.builder import BadRows, Comparisons, RowFacts
from pluralign.votes.columns import guess_columns, is_clear, is_person_column, rename_columns
from pluralign.votes.options import LoadOptions
from pluralign.votes.preferences import RESERVED_COLUMNS, PreferenceSet
from pluralign.votes.prompts import PromptLike
from pluralign.votes.public import PUBLIC_FORMATS, PublicFormat
from pluralign.votes.values import (
    RATING_COLUMN,
    Record,
    Records,
    RowError,
    missing,
    read_count,
    read_list,
    read_messages,
    read_number,
    read_prompt,
    read_response,
    shown,
    split_dialogues,
)

# --- The vote in a row: which response a person chose, in the words that data sets use.


A, B, TIE = (1, 0, 0), (0, 1, 0), (0, 0, 1)
_NOUNS = ("response", "model", "answer", "completion", "output", "option", "candidate", "assistant")
_VOTES = {
    **dict.fromkeys(("a", "left", "first", "1", "1.0", *(f"{noun}_{end}" for noun in _NOUNS for end in "a1")), A),
    **dict.fromkeys(("b", "right", "second", *(f"{noun}_b" for noun in _NOUNS)), B),
    **dict.fromkeys(("tie", "ties", "both", "neither", "0.5", "½", "both_bad", "tie_(bothbad)"), TIE),
}
_SECOND = dict.fromkeys(("0", "0.0"), "0") | dict.fromkeys(("2", "2.0", *(f"{noun}_2" for noun in _NOUNS)), "2")
"""Numbers that mean response b: if votes are yes or no, and if responses are numbered."""
_NUMBERED_FROM_0 = frozenset(f"{noun}_0" for noun in _NOUNS)


def _read_vote(value: Any, numbers: set[str], file: str, row: int) -> tuple[int, int, int]:
    """Return the votes for a, for b and for a tie: one of them is 1.

    1 and 0 answer "does the voter prefer response_a?". A column of 1 and 2 numbers the responses. A column with both 0
    and 2 has no clear meaning and raises ``DataError``, also if bad rows are skipped.

    Args:
        value: the cell.
        numbers: how the rows before write a vote for response b as a number: 0 or 2. This row's is added.
        file: for errors.
        row: for errors.
    """
    if value is None or (isinstance(value, float) and value != value):
        raise missing("vote")
    is_plain = isinstance(value, str) or (isinstance(value, int | float) and abs(value) < 10)
    text = str(value).strip().lower() if is_plain and not isinstance(value, bool) else ""
    text = text.replace(" ", "_").replace("-", "_") if text not in _VOTES else text
    if text in _VOTES:
        return _VOTES[text]
    if text in _NUMBERED_FROM_0:
        problem = f"vote is {shown(value)}, and responses counted from 0 and from 1 are easily confused"
    elif text in _SECOND:
        numbers.add(_SECOND[text])
        if len(numbers) == 1:
            return B
        problem = "vote is 0 in one row and 2 in another, so the number of response_a is unclear"
    else:
        remedy = "write a, b or tie (or 1, 0, 0.5: does the voter prefer response_a?)"
        raise RowError("unknown vote", f"vote is {shown(value)}", remedy)
    raise DataError(problem, file=file, row=row, remedy="write a, b or tie")


SHARE_TOLERANCE = 0.005
"""Largest difference between a given share and a whole number of votes over n: two printed decimals."""

logger = logging.getLogger("pluralign")


# --- the layouts ------------------------------------------------------------------------------------------------------


def _read_share(record: Record) -> tuple[int, int]:
    n, share = read_count(record, "n"), read_number(record.get("prob_a"), "prob_a")
    if math.isnan(share):
        raise missing("prob_a")
    if not 0 <= share <= 1:
        problem = f"prob_a is {share:g}, not between 0 and 1"
        raise RowError("share outside 0 to 1", problem, "give a share, not a percent")
    votes_a = round(share * n)
    if n and abs(votes_a / n - share) > SHARE_TOLERANCE:
        problem = f"prob_a {share:g} of n {n} is {share * n:g} people, not a whole number"
        raise RowError("fractional count", problem, "give the shares with more decimals or the counts themselves")
    return votes_a, n - votes_a


def _wide(record: Record, row: int, into: Comparisons) -> None:
    if "votes_a" in record or "votes_b" in record:
        votes = read_count(record, "votes_a"), read_count(record, "votes_b")
    else:
        votes = _read_share(record)
    ties = read_count(record, "ties") if record.get("ties") is not None else 0
    _add_pair(record, row, into, (*votes, ties))


def _read_single(records: Records, into: Comparisons) -> None:
    """Read what one person says per row: a vote on a pair, or a ranking."""
    numbers: set[str] = set()

    def read_row(record: Record, row: int, into: Comparisons) -> None:
        if record.get("ranking") is not None or not {"vote", "response_a"} & record.keys():
            _rankings(record, row, into)
            return
        votes = _read_vote(record.get("vote"), numbers, into.bad.file, row)
        _add_pair(record, row, into, votes, annotator=_voter(record))

    each(read_row)(records, into)


def _add_pair(record: Record, row: int, into: Comparisons, votes: tuple[int, int, int], annotator: Any = None) -> None:
    a, b = (read_response(record.get(name), name) for name in ("response_a", "response_b"))
    into.add(_facts(record, row, annotator), a, b, votes)


def _chosen(record: Record, row: int, into: Comparisons) -> None:
    chosen, rejected = record.get("chosen"), record.get("rejected")
    if not isinstance(chosen, str) and not isinstance(rejected, str) and chosen is not None and rejected is not None:
        shared, chosen, rejected = split_dialogues(read_messages(chosen, "chosen"), read_messages(rejected, "rejected"))
        record = record if record.get("prompt") is not None else {**record, "prompt": shared}
    texts = read_response(chosen, "chosen"), read_response(rejected, "rejected")
    # If the chosen text were always response a, the position would reveal the winner. A hash of the texts decides.
    first, second = sorted(texts, key=_text_hash)
    rest = {name: value for name, value in record.items() if name not in ("chosen", "rejected")}
    votes = int(first == texts[0]), int(first != texts[0]), 0
    into.add(_facts(rest, row, _voter(record)), first, second, votes)


def _text_hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


def _rankings(record: Record, row: int, into: Comparisons) -> None:
    texts = record.get("responses")
    named = dict(texts) if isinstance(texts, Mapping) else dict(enumerate(read_list(texts, "responses")))
    place = {str(key): position for position, key in enumerate(named)}
    rankings = [record["ranking"]] if "ranking" in record else read_list(record.get("rankings"), "rankings")
    scores = np.array([_read_ranking(ranking, place, number) for number, ranking in enumerate(rankings, 1)]).T
    scores = scores.reshape(len(named), len(rankings))
    answers = [read_response(text, "responses") for text in named.values()]
    named_texts = {text for text, of_text in zip(answers, np.isfinite(scores).any(axis=1), strict=True) if of_text}
    if "ranking" in record and len(named_texts) == 1 < len(set(answers)):
        raise RowError("a single response", "the ranking names only one response", "rank at least two")
    annotator = _voter(record) if "ranking" in record else None
    into.add_all_pairs(_facts(record, row, annotator), answers, scores)


def _read_ranking(ranking: Any, place: Mapping[str, int], number: int) -> list[float]:
    """Return a score for each response: minus its place, NaN if it is left out."""
    scores = [math.nan] * len(place)
    listed = read_list(ranking, "ranking")
    for position, entry in enumerate(listed):
        keys = read_list(entry, "ranking") if isinstance(entry, list | tuple) else [entry]
        at = [place.get(str(key)) for key in keys]
        if not at or None in at or len(set(at)) < len(at) or not all(math.isnan(scores[i]) for i in at):  # type: ignore[index]
            listed = []
            break
        for i in at:
            scores[i] = -position  # type: ignore[index]
    if place and not listed:
        problem = f"ranking {number} is {shown(ranking)}, but must name responses, each at most once"
        remedy = "list their keys (or indices, from 0), best first, and those that tie as a list in the list"
        raise RowError("invalid ranking", problem, remedy)
    return scores


def _score_lists(record: Record, row: int, into: Comparisons) -> None:
    answers = [read_response(text, "responses") for text in read_list(record.get("responses"), "responses")]
    given = [read_list(of_response, "scores") for of_response in read_list(record.get("scores"), "scores")]
    if len(given) != len(answers) or len({len(of_response) for of_response in given}) > 1:
        problem = f"there are {len(answers)} responses and lists of {[len(scores) for scores in given]} scores"
        remedy = "give one list per response with one entry per rater (null for no score)"
        raise RowError("uneven scores", problem, remedy)
    scores = np.array([[read_number(value, "scores") for value in of_response] for of_response in given])
    scores = scores.reshape(len(answers), len(given[0]) if given else 0)
    into.add_all_pairs(_facts(record, row), answers, scores)


_NUMBERED = re.compile(r"response_(0|[1-9][0-9]{0,5})")
_OTHER_DIGITS = re.compile(r"response_\d+")


def _score_columns(record: Record, row: int, into: Comparisons) -> None:
    numbers = sorted(int(match[1]) for name in record if (match := _NUMBERED.fullmatch(name)))
    if odd := [name for name in record if _OTHER_DIGITS.fullmatch(name) and not _NUMBERED.fullmatch(name)]:
        raise RowError("wrong name", f"the column {odd[0]} is not numbered as 1, 2, 3, …", "rename the column")
    raters = list(dict.fromkeys(match[2] for name in record if (match := RATING_COLUMN.fullmatch(name))))
    given = [i for i in numbers if record[f"response_{i}"] is not None]
    into.bad.count("missing responses", len(numbers) - len(given))
    if not given:
        return
    answers = [read_response(record[f"response_{i}"], f"response_{i}") for i in given]
    names = [[f"response_{i}_{rater}" for rater in raters] for i in given]
    scores = np.array([[read_number(record.get(name), name) for name in of_response] for of_response in names])
    if np.isnan(scores).all():
        raise missing("every response_{i}_{rater}")
    rest = {name: value for name, value in record.items() if not name.startswith("response_")}
    into.add_all_pairs(_facts(rest, row), answers, scores)


def _is_score(name: str) -> bool:
    return name == "scores" or name.startswith("score_")


def _read_responses(records: Records, into: Comparisons) -> None:
    """Group rows by prompt; each row is one response with its raters' scores.

    Raters are matched by the names of their columns, or by their position in lists of the same length. A rater votes on
    a pair only with a score for both responses.
    """
    rows: dict[PromptLike, list[tuple[int, Record]]] = {}
    for row, record in records:
        with into.bad.row(row):
            read_response(record.get("response"), "response")
            rows.setdefault(read_prompt(record.get("prompt")), []).append((row, record))
    for prompt, group in rows.items():
        row, first = group[0]
        given = [record for _, record in group]
        names = list(dict.fromkeys(name for record in given for name in record if name.startswith("score_")))
        scores = [record.get("scores", [record.get(name) for name in names]) for record in given]
        others = {name: value for name, value in first.items() if name != "response" and not _is_score(name)}
        responses = [record["response"] for record in given]
        with into.bad.row(row):
            _score_lists({**others, "prompt": prompt, "responses": responses, "scores": scores}, row, into)


_OWN = ("prob_a", "n", "vote", "responses", "rankings", "ranking", "scores", "response")
_CONSUMED = frozenset({*RESERVED_COLUMNS, *_OWN})


def _voter(record: Record) -> str | float | None:
    """Return the id of who cast a vote. It finds repeated votes and the judgments of a person, and is not stored."""
    ids = (value for name, value in record.items() if is_person_column(name) and isinstance(value, str | int | float))
    return next(ids, None)


def _facts(record: Record, row: int, annotator: Any = None) -> RowFacts:
    """Return the prompt of a row and its further columns. One without a name is an index that pandas wrote."""
    others = {name: value for name, value in record.items() if name and name not in _CONSUMED}
    return RowFacts(row, read_prompt(record.get("prompt")), others, annotator)


Reader: TypeAlias = Callable[[Records, Comparisons], None]
"""Reads all records of a layout."""


@dataclass(frozen=True)
class Layout:
    """A layout of records: how it is recognised and read."""

    name: str
    needs: str
    """Its columns, for messages and documentation."""
    read: Reader
    match: Callable[[Collection[str]], bool] | None = None
    """Whether columns form this layout; by default, if all of ``needs`` but the prompt are among them."""
    merge: bool = False
    """Whether rows are single votes, to be merged by pair."""
    min_votes: int = 2
    """Default minimum of votes per pair."""
    drop_few: bool = True
    """Whether pairs with fewer votes are dropped and counted. Else they are bad rows."""

    @property
    def words(self) -> list[str]:
        """The names of the columns in ``needs``, without optional ones."""
        return [word for word in re.findall(r"\w+", re.sub(r"\[.*\]|\(.*\)", "", self.needs)) if word.islower()]

    def matches(self, columns: Collection[str]) -> bool:
        """Return whether columns form this layout."""
        return self.match(columns) if self.match else {*self.words, "prompt"} <= {*columns, "prompt"}


def each(read_row: Callable[[Record, int, Comparisons], None]) -> Reader:
    """Return a reader of records that are read one by one."""

    def read(records: Records, into: Comparisons) -> None:
        for row, record in records:
            try:  # bad.row would take a tenth of the time of reading a file
                read_row(record, row, into)
            except RowError as error:
                into.bad.report(row, error)

    return read


def _has_score_columns(columns: Collection[str]) -> bool:
    return "response_1" in columns and any(RATING_COLUMN.fullmatch(name) for name in columns)


def _has_response_score(columns: Collection[str]) -> bool:
    return "response" in columns and any(map(_is_score, columns))


_PAIR = "prompt, response_a, response_b"
LAYOUTS = (
    Layout("trl", "prompt, chosen, rejected", each(_chosen), merge=True, min_votes=1),
    Layout("wide", f"{_PAIR}, votes_a, votes_b", each(_wide), drop_few=False),
    Layout("share", f"{_PAIR}, prob_a, n", each(_wide), drop_few=False),
    Layout("long", f"{_PAIR}, vote [, annotator]", _read_single, merge=True, drop_few=False),
    Layout("rankings", "prompt, responses, rankings", each(_rankings)),
    Layout("ranking", "prompt, responses, ranking", _read_single, merge=True),
    Layout("score lists", "prompt, responses, scores", each(_score_lists)),
    Layout("score columns", "prompt, response_1, …, response_1_RATER, …", each(_score_columns), _has_score_columns),
    Layout("one response per row", "prompt, response, scores (or score_RATER …)", _read_responses, _has_response_score),
)
"""All layouts, in the order in which they are tried."""


def is_layout(columns: Collection[str]) -> bool:
    """Return whether columns form a layout."""
    return any(layout.matches(columns) for layout in LAYOUTS)


def find_layout(first: Record, file: str) -> tuple[Layout, dict[str, str]]:
    """Return the layout of a first record, and the columns to rename for it, old names by new name.

    Raises:
        DataError: there is none, or more than one column may have a meaning that is needed. It names the columns.
    """
    columns = list(first)
    layout = next((each for each in LAYOUTS if each.matches(columns)), None)
    if layout is not None:
        in_chat = not isinstance(first.get("chosen", ""), str)
        guess = {} if in_chat else guess_columns(["prompt"], columns)
        problem = "there is no column prompt"
    else:
        guesses = {known.name: guess_columns(known.words, columns) for known in LAYOUTS}
        complete = (known for known in LAYOUTS if set(known.words) <= {*guesses[known.name], *columns})
        layout = next((known for known in complete if known.matches([*guesses[known.name], *columns])), None)
        guess = guesses[layout.name] if layout else {}
        problem = f"no known layout has the columns {', '.join(columns) or '(none)'}"
    if layout is not None and is_clear(guess, first):
        return layout, guess
    if layout is not None:
        raise DataError(problem, file=file, row=1, remedy=f"use {spelled(rename=guess)}")
    nearest = max(LAYOUTS, key=lambda known: len({*known.words} & {*guesses[known.name], *columns}) / len(known.words))
    absent = [word for word in nearest.words if word not in columns]
    renames = {word: guesses[nearest.name].get(word, "THEIRS") for word in absent or ["prompt"]}
    problem += f"; the nearest layout, {nearest.needs}, also needs {', '.join(absent)}"
    remedy = f"use {spelled(rename=renames)} (THEIRS: a column of yours); docs/reference/data.md has all layouts"
    raise DataError(problem, file=file, row=1, remedy=remedy)


def peeked(records: Iterator[tuple[int, Record]], bad: BadRows) -> tuple[Record, Iterator[tuple[int, Record]]]:
    """Return the first record, whose columns decide how records are read, and all records."""
    first = next(records, None)
    if first is None:
        raise DataError("the file has no rows", file=bad.file, remedy="give at least one row")
    return first[1], itertools.chain([first], records)


def recognise(
    records: Iterator[tuple[int, Record]], bad: BadRows, known: PublicFormat | None = None
) -> tuple[Layout, Iterator[tuple[int, Record]]]:
    """Return the layout of the first record, and all records in this layout.

    Records of a public format are converted, and columns with other names are renamed; a note says so.

    Args:
        records: numbered records.
        bad: names the file, and handles invalid rows.
        known: the format of the records, if the user named it.
    """
    first, records = peeked(records, bad)
    public = known or next((public for public in PUBLIC_FORMATS.values() if public.matches(first)), None)
    if public is None:
        layout, renames = find_layout(first, bad.file)
        if renames:
            logger.warning("%s: columns are read as %s", bad.file, spelled(rename=renames))
            records = rename_columns(records, renames, bad.file, is_layout)
        return layout, records
    if known is None:
        logger.warning("%s: read as %s. %s", bad.file, public.name, public.assumed)
    bad.harmless = ["identical responses"]
    records = iter(public.rows(records, bad))
    row = next(records, None)
    layout = find_layout(row[1], bad.file)[0] if row else LAYOUTS[0]
    return replace(layout, min_votes=1, drop_few=True), itertools.chain([row] if row else [], records)


def read_comparisons(records: Iterator[tuple[int, Record]], bad: BadRows, options: LoadOptions) -> PreferenceSet:
    """Return the votes of all records."""
    layout, records = recognise(records, bad)
    comparisons = Comparisons(bad)
    layout.read(records, comparisons)
    few = layout.min_votes, layout.drop_few
    return comparisons.finish(options, *few, merge=layout.merge, offer_raters=layout.merge)
