"""The vote in a row: which response a person chose, in the words that data sets use."""

from typing import Any

from pluralign.core.errors import DataError
from pluralign.votes.builder import BadRows, RowError
from pluralign.votes.values import Record, missing, shown

A, B, TIE = (1, 0, 0), (0, 1, 0), (0, 0, 1)
_NOUNS = ("response", "model", "answer", "completion", "output", "option", "candidate", "assistant")
_VOTES = {
    **dict.fromkeys(("a", "left", "first", "1", "1.0", *(f"{noun}_{end}" for noun in _NOUNS for end in "a1")), A),
    **dict.fromkeys(("b", "right", "second", *(f"{noun}_b" for noun in _NOUNS)), B),
    **dict.fromkeys(("tie", "ties", "both", "neither", "0.5", "½", "tie (bothbad)", "tie_(bothbad)"), TIE),
}
_ZERO = frozenset({"0", "0.0"})
_TWO = frozenset({"2", "2.0", *(f"{noun}_2" for noun in _NOUNS)})
_NUMBERED_FROM_0 = frozenset(f"{noun}_0" for noun in _NOUNS)


class VoteReader:
    """Reads the column ``vote`` of one file.

    1 and 0 answer "does the voter prefer response_a?". A column of 1 and 2 numbers the responses. A column with both 0
    and 2 has no clear meaning and raises ``DataError``, also if bad rows are skipped.
    """

    def __init__(self, bad: BadRows) -> None:
        self._bad = bad
        self._second: str | None = None
        """How this file writes a vote for response b as a number: 0 or 2."""

    def read(self, record: Record, row: int) -> tuple[int, int, int]:
        """Return the votes for a, for b and for a tie: one of them is 1."""
        value = record.get("vote")
        if value is None or (isinstance(value, float) and value != value):
            raise missing("vote")
        text = "" if isinstance(value, bool) or not _is_plain(value) else str(value).strip().lower()
        text = text.replace(" ", "_").replace("-", "_") if text not in _VOTES else text
        if text in _VOTES:
            return _VOTES[text]
        if text in _NUMBERED_FROM_0:
            self._refuse(row, f"vote is {shown(value)}, and responses counted from 0 and from 1 are easily confused")
        if text in _ZERO or text in _TWO:
            number = "0" if text in _ZERO else "2"
            if self._second not in (None, number):
                self._refuse(row, "vote is 0 in one row and 2 in another, so the number of response_a is unclear")
            self._second = number
            return B
        raise RowError(
            "unknown vote",
            f"vote is {shown(value)}",
            "write a, b or tie (or 1, 0, 0.5: does the voter prefer response_a?)",
        )

    def _refuse(self, row: int, problem: str) -> None:
        raise DataError(problem, file=self._bad.file, row=row, remedy="write a, b or tie")


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int | float) and abs(value) < 10)
