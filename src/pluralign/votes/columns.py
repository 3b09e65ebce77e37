"""What columns mean by their names: guesses for unknown columns, renamed columns, and columns with ids of people."""

import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

from pluralign.core.errors import DataError, did_you_mean
from pluralign.core.options import spelled
from pluralign.votes.values import TEXT_COLUMNS, Record, parse_cell, shown

_WORDS = tomllib.loads(resources.files("pluralign").joinpath("votes/columns.toml").read_text(encoding="utf-8"))
SYNONYMS: Mapping[str, Sequence[str]] = _WORDS["synonyms"]
_NAMES: Mapping[str, Any] = _WORDS["names"]
_KNOWN = [*SYNONYMS, *_NAMES["other"]]
"""All columns with a meaning."""


def guess_columns(needed: Collection[str], columns: Collection[str]) -> dict[str, str]:
    """Return the columns that probably hold what a layout needs, by the name that it needs.

    Columns that already have the name are left out, and so are names without a guess.

    Example:
        >>> guess_columns(["prompt", "response_a", "response_b"], ["question", "answer_1", "answer_2", "winner"])
        {'prompt': 'question', 'response_a': 'answer_1', 'response_b': 'answer_2'}
    """
    free = [name for name in columns if name not in needed]
    normal = {name: _normal(name) for name in free}
    found: dict[str, str] = {}
    for kind, words in (("response", _NAMES["texts"]), ("votes", _NAMES["counts"])):
        sides = f"{kind}_a", f"{kind}_b"
        if set(sides) <= set(needed) and not set(sides) & set(columns) and (pair := _two_sides(normal, words)):
            found |= dict(zip(sides, pair, strict=True))
    for name in needed:
        if name in columns or name in found:
            continue
        left = [column for column in free if column not in found.values()]
        for word in (name, *SYNONYMS.get(name, ())):
            if match := next((column for column in left if normal[column] == word), None):
                found[name] = match
                break
        else:
            close = [column for column in left if _closest(normal[column], _KNOWN) == name]
            if len(close) == 1:
                found[name] = close[0]
    return {name: found[name] for name in needed if name in found}


def is_clear(guess: Mapping[str, str], first: Record) -> bool:
    """Return whether guessed columns need no confirmation: no other column may be meant, and votes are not 0 and 1,
    which may number the responses or tell whether the first one is preferred.
    """
    left = {name: _normal(name) for name in first if name not in guess.values()}
    sides = [words for kind, words in (("response_a", _NAMES["texts"]), ("votes_a", _NAMES["counts"])) if kind in guess]
    others = {word for ours in guess for word in SYNONYMS.get(ours, ())} & set(left.values())
    unclear = "vote" in guess and str(first[guess["vote"]]).strip() in ("0", "1", "0.0", "1.0")
    return not (unclear or others or any(_two_sides(left, words) for words in sides))


_PERSON = (
    "annotator|rater|worker|crowd_?worker|turker|coder|labell?er|evaluator|reviewer|contributor|assessor|judge|voter|"
    "participant|respondent|panell?ist|completed_by"
)
_ID = "ids?|names?|hash(es)?|uuids?|emails?|keys?"
_PERSON_COLUMN = re.compile(
    rf"({_PERSON})s?(_?({_ID}))?|(user|person|subject)s?_?({_ID})|(session|prolific|mturk)_?(p?ids?|hash|uuid|identifier)|"
    "e_?mails?|ip(_?addr(ess)?)?"
)
_PERSON_ID = re.compile(rf"({_PERSON}|user|person)[ _-]?\d+|A[A-Z0-9]{{11,14}}|[^@\s]+@[^@\s]+\.\w+")
"""``user12``, the ids of Mechanical Turk, e-mail addresses."""
_HASH = re.compile(r"\w?[0-9a-f]{16,}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


@lru_cache
def is_person_column(name: str) -> bool:
    """Return whether the name of a column says that it holds ids of the people who voted.

    Example:
        >>> [is_person_column(name) for name in ("annotator_id", "WorkerId", "annotator_age", "prompt_id")]
        [True, True, False, False]
    """
    return _PERSON_COLUMN.fullmatch(_normal(name)) is not None


def names_people(values: Sequence[Any], prompts: Iterable[int]) -> bool:
    """Return whether the values of a column look like ids of people: by their form, or as hashes that several prompts
    share.

    Example:
        >>> hashes = ["5f2b8c1d9e3a7f60", "0a1b2c3d4e5f6071", "5f2b8c1d9e3a7f60"]
        >>> names_people(hashes, [0, 1, 2]), names_people(hashes, [0, 1, 0])
        (True, False)
    """
    texts = {value for value in values if value is not None}
    if not texts or not all(isinstance(text, str) for text in texts):
        return False
    if all(_PERSON_ID.fullmatch(text) for text in texts):
        return True
    uses = {(value, prompt) for value, prompt in zip(values, prompts, strict=True) if value is not None}
    return all(_HASH.fullmatch(text) for text in texts) and len(uses) > len(texts)


def _normal(name: str) -> str:
    """Return a column name in lower case, with underscores between its words and before its number."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[0-9])(?=[A-Za-z])", "_", name)
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def _closest(name: str, known: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.85)), None)


def _two_sides(normal: Mapping[str, str], words: Collection[str]) -> tuple[str, str] | None:
    """Return two columns whose names differ only in the side, such as ``answer_1`` and ``answer_2``."""
    tokens = {name: tuple(text.split("_")) for name, text in normal.items()}
    of_tokens = {value: name for name, value in reversed(tokens.items())}
    for first, second in _NAMES["sides"]:
        for name, parts in tokens.items():
            rest = {part for part in parts if part != first}
            is_side = parts in (("left",), ("first",)) or rest & set(words)
            if parts.count(first) != 1 or not is_side or not rest <= {*words, *_NAMES["fillers"]}:
                continue
            if other := of_tokens.get(tuple(second if part == first else part for part in parts)):
                return name, other
    return None


def rename_columns(
    records: Iterator[tuple[int, Record]],
    rename: Mapping[str, str],
    file: str,
    is_layout: Callable[[Collection[str]], bool],
) -> Iterator[tuple[int, Record]]:
    """Yield records with renamed columns; a vote with the old name of a response becomes ``a`` or ``b``.

    Args:
        records: numbered records.
        rename: old names by new name.
        file: for errors.
        is_layout: whether columns form a layout.

    Raises:
        DataError: a column does not exist, the new name is that of another column, or it is a misspelt one.
    """
    new_name = {theirs: ours for ours, theirs in rename.items()}
    read_vote = _vote_reader(rename, file)
    unseen, first = set(rename.values()), True
    columns: dict[str, None] = {}
    for row, record in records:
        unseen -= record.keys()
        columns |= dict.fromkeys(record)
        for theirs, ours in new_name.items():
            if theirs != ours and ours in record and theirs in record and ours not in new_name:
                problem = f"{spelled(rename={ours: theirs})} is not possible, because both columns exist"
                remedy = "leave the option out, or remove one of the two"
                raise DataError(problem, file=file, row=row, remedy=remedy)
        renamed = {new_name.get(name, name): value for name, value in record.items()}
        # All columns that a CSV file names in its own way are text.
        typed = [name for name in rename if name not in TEXT_COLUMNS and isinstance(renamed.get(name), str)]
        renamed |= {name: parse_cell(name, renamed[name]) for name in typed}
        if first:
            if unseen and not is_layout(renamed):
                raise _no_column(rename, unseen, list(columns), file)
            for ours, theirs in rename.items():
                close = None if ours in _KNOWN else _closest(ours, _KNOWN)
                if close is not None and close not in renamed:
                    problem = f"{spelled(rename={ours: theirs})} gives the column a name without a meaning"
                    raise DataError(problem, file=file, remedy=f"did you mean {spelled(rename={close: theirs})}")
            first = False
        if "vote" in renamed:
            renamed["vote"] = read_vote(renamed["vote"], row)
        yield row, renamed
    if unseen and columns:
        raise _no_column(rename, unseen, list(columns), file)


def _no_column(rename: Mapping[str, str], unseen: Collection[str], columns: Sequence[str], file: str) -> DataError:
    ours, theirs = next((ours, theirs) for ours, theirs in rename.items() if theirs in unseen)
    remedy = did_you_mean(theirs, columns)
    if ours in columns:
        remedy = f"the new name comes first: {spelled(rename={theirs: ours})}"
    elif guess := guess_columns([ours], columns).get(ours):
        remedy = f"did you mean {spelled(rename={ours: guess})}"
    return DataError(f"there is no column {theirs!r} for {spelled(rename={ours: theirs})}", file=file, remedy=remedy)


def _vote_reader(rename: Mapping[str, str], file: str) -> Callable[[object, int], object]:
    """Return a function that reads votes which are the old names of the responses."""
    sides = {_normal(rename[name]): name[-1] for name in ("response_a", "response_b") if name in rename}
    from_0 = len(sides) == 2 and ("0", "1") in zip(*(name.split("_") for name in sides), strict=False)

    def read(vote: object, row: int) -> object:
        if from_0 and str(vote).strip() in ("0", "1", "0.0", "1.0"):
            names = [rename["response_a"], rename["response_b"]]
            problem = (
                f"vote is {shown(vote)} and the responses were called {' and '.join(names)}, so its meaning is unclear"
            )
            raise DataError(problem, file=file, row=row, remedy=f"write a or b, or {' or '.join(names)}")
        return sides.get(_normal(vote), vote) if isinstance(vote, str) else vote

    return read
