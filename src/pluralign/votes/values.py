"""Values of records: counts, numbers, prompts and responses. A value that cannot be used raises ``RowError``."""

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray
from pluralign.core.text import shortened
from pluralign.votes.prompts import Message, PromptLike

Record: TypeAlias = Mapping[str, Any]
Records: TypeAlias = Iterable[tuple[int, Record]]
"""Records with their row numbers, which start at 1."""

MAX_VOTES = 10_000_000
"""A larger count is probably an id or a time stamp in the wrong column."""
SHOWN_LENGTH = 40
"""Longest value in an error message."""
RATING_COLUMN = re.compile(r"response_(0|[1-9][0-9]{0,5})_(?!model$)(.+)")
"""A rater's score of a numbered response. ``response_1_model`` is the name of a model."""
_WHOLE = re.compile(r"[+-]?[0-9]{1,4000}")
"""Plain ASCII digits, unlike ``int``, which also reads 1_0."""
_WHOLE_FLOAT = re.compile(r"[+-]?[0-9]+[.]0+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)


class RowError(Exception):
    """An invalid row: its kind (for the counts), the problem and the remedy."""

    def __init__(self, kind: str, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.kind, self.problem, self.remedy = kind, problem, remedy


def checked_text(text: str, what: str) -> str:
    """Return a text. Raises a ``RowError`` if it cannot be encoded as UTF-8."""
    try:
        if not text.isascii():
            text.encode()
        return text
    except UnicodeEncodeError:
        raise RowError("broken text", f"{what} is not valid UTF-8", "save the file as UTF-8") from None


def person_key(value: Any) -> str:
    """Return the id of a person as a text: 1, 1.0 and the texts of both are one person.

    Example:
        >>> [person_key(value) for value in (1, 1.0, "1", "1.0", "1.5", "007")]
        ['1', '1', '1', '1', '1.5', '007']
    """
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    return text.partition(".")[0] if _WHOLE_FLOAT.fullmatch(text) else text


def missing(name: str) -> RowError:
    """Return the error of a value that is not there."""
    return RowError("missing value", f"there is no value for {name}", "fill it in")


def read_count(record: Record, name: str) -> int:
    """Return a vote count: a whole number from 0 to ``MAX_VOTES``."""
    value = record.get(name)
    if type(value) is int and 0 <= value <= MAX_VOTES:
        return value
    if value is None:
        raise missing(name)
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise RowError("wrong type", f"{name} must be a whole number, not {shown(value)}", "write it as a number")
    if value != value:
        raise RowError("not a number", f"{name} is NaN", "give the number of people")
    if value < 0:
        raise RowError("negative count", f"{name} is {_number_text(value)}, below zero", "give the number of people")
    if value > MAX_VOTES:
        problem = f"{name} is {_number_text(value)}, above {MAX_VOTES:,}"
        raise RowError("huge count", problem, "check that the column holds counts")
    if value != int(value):
        problem = f"{name} is {value:g}, not a whole number"
        raise RowError("fractional count", problem, "give counts, or shares as prob_a with n")
    return int(value)


def read_number(value: Any, name: str) -> float:
    """Return a finite number, or NaN for a null or NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise RowError("wrong type", f"{name} must be a number, not {shown(value)}", "write it as a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        problem = f"{name} is {_number_text(value)}"
        raise RowError("not a number", problem, "give a finite number, or null for no value")
    return number


def _number_text(value: Any) -> str:
    try:
        return f"{value:g}"
    except OverflowError:  # an integer beyond the range of floats
        return f"about {'-' if value < 0 else ''}1e+{int(abs(value).bit_length() * math.log10(2))}"


def read_prompt(value: Any) -> PromptLike:
    """Return a prompt: a non-empty text, or a list of role/content messages as a tuple of ``Message``."""
    if value is None:
        raise missing("prompt")
    prompt = checked_text(value, "prompt") if isinstance(value, str) else read_messages(value, "the prompt")
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise RowError("empty prompt", "the prompt is empty", "give the text that the responses answer")
    return prompt


def read_messages(value: Any, name: str) -> tuple[Message, ...]:
    """Return the messages of a chat, a list of ``{"role": …, "content": …}`` or of ``Message``."""
    try:
        turns = tuple(turn if isinstance(turn, Message) else Message(turn["role"], _content(turn)) for turn in value)
        if all(isinstance(part, str) for turn in turns for part in turn) and not isinstance(value, Mapping | str):
            for turn in turns:
                checked_text(turn.role, f"a role of {name}")
                checked_text(turn.content, name)
            return turns
    except (TypeError, KeyError, IndexError, AttributeError):
        pass
    problem = f"{name} must be text or a list of role/content messages, not {shown(value)}"
    raise RowError("wrong type", problem, 'write it as "…" or [{"role": "user", "content": "…"}]')


def _content(turn: Mapping[str, Any]) -> Any:
    """Return the text of a message. It may be a list of parts, of which the texts are read."""
    content = turn["content"]
    return "\n".join(part.get("text") or "" for part in content) if isinstance(content, list) else content


def split_dialogues(a: Sequence[Message], b: Sequence[Message]) -> tuple[tuple[Message, ...], str, str]:
    """Return the common beginning of two dialogues, and the rest of each as a text.

    Example:
        >>> ask, yes, no = Message("user", "Tea?"), Message("assistant", "Yes."), Message("assistant", "No.")
        >>> split_dialogues([ask, yes], [ask, no, Message("user", "Why?")])
        ((Message(role='user', content='Tea?'),), 'Yes.', 'No.\\n\\nuser: Why?')
    """
    shared = next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
    rest = (
        "\n\n".join([*(t.content for t in side[:1]), *(f"{t.role}: {t.content}" for t in side[1:])])
        for side in (a[shared:], b[shared:])
    )
    return (tuple(a[:shared]), *rest)  # type: ignore[return-value]


def read_response(value: Any, name: str) -> str:
    """Return a response: a text, which may be empty, or a list with one assistant message."""
    if isinstance(value, str):
        return checked_text(value, name)
    if value is None:
        raise missing(name)
    messages = read_messages(value, name)
    if len(messages) != 1:
        raise RowError("wrong type", f"{name} has {len(messages)} messages, not one", "give only the last turn")
    return messages[0].content


def read_list(value: Any, name: str) -> list[Any]:
    """Return a list, tuple or array as a list."""
    if value is None:
        raise missing(name)
    if not isinstance(value, list | tuple):
        raise RowError("wrong type", f"{name} must be a list, not {shown(value)}", "write it as a list")
    return list(value)


def shown(value: Any) -> str:
    """Return the type and the start of a value, for error messages."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        return f"a very long {type(value).__name__}"
    return f"{type(value).__name__} {shortened(text, SHOWN_LENGTH)}"


def without_arrays(value: Any) -> Any:
    """Return a value with lists instead of numpy arrays, also inside it."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [without_arrays(one) for one in value]
    return {name: without_arrays(one) for name, one in value.items()} if isinstance(value, dict) else value


def parsed(value: Any) -> Any:
    """Return a number, a list or an object, also if it is a text, as in CSV files: JSON or Python source.

    Example:
        >>> parsed("[{'role': 'user'}]"), parsed('[null]'), parsed("[1")
        ([{'role': 'user'}], [None], '[1')
    """
    if not isinstance(value, str) or not re.match(r"[\[{]|-?[0-9.]+$", value):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            return read(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return value


TEXT_COLUMNS = ("prompt", "response_a", "response_b", "response", "chosen", "rejected")
"""Columns whose empty cells are empty texts."""


def parse_cell(name: str, text: str) -> Any:
    """Return a CSV cell in the type of its column: counts and scores are numbers, lists are JSON.

    Example:
        >>> parse_cell("votes_a", "3"), parse_cell("votes_a", "1_0"), parse_cell("country", "3")
        (3, '1_0', '3')
    """
    if text == "":
        return None if name not in TEXT_COLUMNS else text
    is_count = name in ("votes_a", "votes_b", "ties", "n", "prob_a")
    if is_count or name.startswith("score_") or RATING_COLUMN.fullmatch(name):
        if _WHOLE.fullmatch(digits := text.strip()):
            return int(digits)
        return float(digits) if _DECIMAL.fullmatch(digits) else text
    is_list = name in ("responses", "rankings", "ranking", "scores")
    return parsed(text) if is_list or (name in ("prompt", "chosen", "rejected") and text.startswith("[{")) else text


def as_numbers(values: npt.NDArray[Any]) -> FloatArray | None:
    """Return a column as floats with NaN for nulls, or None if it is not numeric. CSV columns are text.

    Example:
        >>> as_numbers(np.array(["1.5", None], dtype=object))
        array([1.5, nan])
    """
    if values.dtype.kind == "b":
        return None
    try:
        return np.array([np.nan if value is None else value for value in values.tolist()], dtype=np.float64)
    except ValueError:
        return None
