"""A weighted tournament with the names of its alternatives, and the two forms of file it is read from.

Decided here: what a file of pairwise votes or shares may look like. What follows from the shares is in ``rankings``.
"""

import csv
import io
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pluralign.core.errors import DataError
from pluralign.core.types import Progress
from pluralign.theory.calibration import brier
from pluralign.theory.rankings import MAX_ALTERNATIVES, sample_rankings, sampling_error, tournament_of
from pluralign.theory.realizability import ViolatedInequality, decompose

MARKS_OF_NOTHING = {"-", "–", "—", "nan", "na", "n/a"}
LAYOUT = "write {alternatives: [names], pairs: [[i, j, votes_i, votes_j]]} or a CSV matrix of shares"


@dataclass(frozen=True, eq=False)
class Tournament:
    """How people are shared between every two of m alternatives."""

    alternatives: tuple[str, ...]
    shares: npt.NDArray[np.float64]
    """``(m, m)``: entry (i, j) is the share preferring i to j; NaN where nobody was asked, and on the diagonal."""
    name: str = ""


def load_tournament(source: str | os.PathLike[str]) -> Tournament:
    """Read a tournament from a file, or from standard input where ``source`` is ``-``.

    JSON: ``{"alternatives": [names], "pairs": [[i, j, votes_i, votes_j], …]}``, where i and j are places in the list of
    names, from 0. Each pair is given once; some may be missing. CSV: a matrix whose cell (i, j) is the share preferring
    i to j, with or without a line and a column of names; the diagonal does not count, and cells may be empty.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "drinks.json"
        >>> _ = path.write_text('{"alternatives": ["tea", "coffee"], "pairs": [[0, 1, 3, 1]]}')
        >>> load_tournament(path).shares
        array([[ nan, 0.75],
               [0.25,  nan]])
    """
    if str(source) == "-":
        name, data = "standard input", sys.stdin.buffer.read()
    else:
        name = str(source)
        if not Path(source).is_file():
            raise DataError("there is no such file", file=name, remedy="check the path")
        data = Path(source).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError("it is not text in UTF-8", file=name, remedy=LAYOUT) from None
    if not text.strip():
        raise DataError("it is empty", file=name, remedy=LAYOUT)
    return _from_json(text, name) if text.lstrip()[0] in "{[" else _from_csv(text, name)


def rankings(
    tournament: Tournament, k: int | None = None, seed: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """What ``pluralign rankings`` reports: is it realizable, the nearest ensemble of rankings, and why not if not.

    Args:
        tournament: shares and names.
        k: also draw k rankings of equal weight from the ensemble (Theorem 2).
        seed: of that draw, and of the search beyond ``linear_ordering.EXACT_UP_TO`` alternatives.
        progress: called with the rounds done.

    Example:
        >>> facts = rankings(Tournament(("tea", "coffee"), np.array([[np.nan, 0.75], [0.25, np.nan]])))
        >>> facts["realizable"], facts["rankings"], [round(weight, 6) for weight in facts["weights"]]
        (True, [[0, 1], [1, 0]], [0.75, 0.25])
    """
    found = decompose(tournament.shares, seed=seed, progress=progress)
    known = np.triu(~np.isnan(tournament.shares), 1)
    facts: dict[str, Any] = {
        "alternatives": list(tournament.alternatives),
        "pairs": int(known.sum()),
        "realizable": found.realizable,
        "exact": found.exact,
        "distance": found.distance,
        "distance_at_least": found.distance_at_least,
        "residual": found.residual,
        "rankings": [list(ranking) for ranking in found.rankings],
        "weights": found.weights.tolist(),
        "size_at_most": int(known.sum()) + 1,
        "nearest": found.nearest.tolist(),
        "certificate": None,
    }
    if found.certificate:
        sentence = in_words(found.certificate, tournament.alternatives)
        facts["certificate"] = {**asdict(found.certificate), "in_words": sentence}
    if k is not None:
        drawn = sample_rankings(found.rankings, found.weights, k, seed)
        error = brier(tournament_of(drawn, np.full(k, 1 / k))[known], found.nearest[known])
        expected = sampling_error(np.where(known | known.T, found.nearest, np.nan), k)
        facts["sample"] = {
            "k": k,
            "rankings": [list(ranking) for ranking in drawn],
            "error": error,
            "expected_error": expected,
            "bound": 1 / (4 * k),
        }
    return facts


def in_words(certificate: ViolatedInequality, names: Sequence[str]) -> str:
    """Return why a tournament is not realizable, with the names of its alternatives.

    Example:
        >>> print(in_words(ViolatedInequality(((0, 1), (1, 2), (2, 0)), (1.0, 1.0, 1.0), 2.0, 2.5, "cycle"), "ABC"))
        No ranking holds all of “A over B”, “B over C” and “C over A”, so their shares sum to at most 2; here it is 2.5.
    """
    count = len(certificate.pairs)
    terms = [
        ("" if coefficient == 1 else f"{coefficient:.6g} × ") + f"“{names[i]} over {names[j]}”"
        for (i, j), coefficient in zip(certificate.pairs, certificate.coefficients, strict=True)
    ]
    listed = f"{', '.join(terms[:-1])} and {terms[-1]}"
    limit = f"sum to at most {certificate.bound:.10g}; here it is {certificate.value:.10g}."
    if certificate.kind == "cycle":
        return f"No ranking holds all of {listed}, so their shares {limit}"
    if set(certificate.coefficients) == {1.0}:
        return f"No ranking holds more than {certificate.bound:.10g} of {listed}, so these {count} shares {limit}"
    return f"For every ranking the shares {listed} {limit}"


def _from_json(text: str, name: str) -> Tournament:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"it is not JSON{reason}", file=name, remedy=LAYOUT) from None
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key), list) for key in ("alternatives", "pairs")
    ):
        raise DataError("it must be an object with the lists alternatives and pairs", file=name, remedy=LAYOUT)
    alternatives = _checked_names(content["alternatives"], name)
    shares = np.full((len(alternatives), len(alternatives)), np.nan)
    for number, entry in enumerate(content["pairs"], 1):
        try:
            i, j, share = _read_pair(entry, len(alternatives))
            if not math.isnan(shares[i, j]):
                raise ValueError(f"alternatives {i} and {j} have been compared before; add up the votes in one entry")
        except ValueError as error:
            problem, _, remedy = str(error).partition("; ")
            raise DataError(f"entry {number} of pairs: {problem}", file=name, remedy=remedy) from None
        shares[i, j], shares[j, i] = share, 1.0 - share
    return _finished(alternatives, shares, name)


def _read_pair(entry: Any, m: int) -> tuple[int, int, float]:
    if not isinstance(entry, list) or len(entry) != 4:
        raise ValueError("it must be a list of four; write [i, j, votes_i, votes_j]")
    if any(isinstance(part, bool) or not isinstance(part, int | float) for part in entry):
        raise ValueError("it holds something that is no number; write [i, j, votes_i, votes_j]")
    i, j, votes_i, votes_j = entry
    for place in (i, j):
        if not isinstance(place, int) or not 0 <= place < m:
            raise ValueError(f"there is no alternative {place}; use places from 0 to {m - 1}")
    if i == j:
        raise ValueError(f"alternative {i} is compared with itself; leave it out")
    for votes in (votes_i, votes_j):
        if not 0 <= votes < 2**53:
            raise ValueError(f"{_short(votes)} is no number of votes; give the people on each side, 0 or more")
    if not votes_i + votes_j > 0:
        raise ValueError("nobody voted; leave the pair out")
    return i, j, votes_i / (votes_i + votes_j)


def _from_csv(text: str, name: str) -> Tournament:
    try:
        rows = [[_stripped(cell) for cell in row] for row in csv.reader(io.StringIO(text, newline=""), strict=True)]
    except csv.Error:
        raise DataError("it is neither JSON nor CSV", file=name, remedy=LAYOUT) from None
    rows = [row for row in rows if row not in ([], [""])]
    if not rows:
        raise DataError("no two alternatives are compared", file=name, remedy="give at least one share")
    names: list[str] | None = None
    if any(_is_word(cell) for cell in rows[0][1:]) or len(rows) == len(rows[0]) + 1:
        names, *rows = rows
    beside: list[str] | None = None
    if rows and (any(_is_word(row[0]) for row in rows) or all(len(row) == len(rows) + 1 for row in rows)):
        beside, rows = [row[0] for row in rows], [row[1:] for row in rows]
        names = names[1:] if names and len(names) == len(rows) + 1 else names
    m = len(rows)
    for number, row in enumerate(rows, 1):
        if len(row) != m:
            problem = f"it has {len(row)} shares, but there are {m} rows of shares"
            raise DataError(problem, file=name, row=number, remedy="write a square matrix")
    if names is not None and beside is not None and names != beside:
        raise DataError("the names above and beside the matrix differ", file=name, remedy="use the same, in one order")
    alternatives = _checked_names(names or beside or [str(place) for place in range(m)], name)
    if len(alternatives) != m:
        problem = f"there are {len(alternatives)} names, but {m} rows of shares"
        raise DataError(problem, file=name, remedy="name every alternative once")
    shares = np.full((m, m), np.nan)
    for i, row in enumerate(rows):
        for j, cell in enumerate(row):
            if i != j and cell:
                shares[i, j] = _read_share(cell, alternatives[j], name, i + 1)
    for i, j in np.argwhere(np.abs(shares + shares.T - 1.0) > 1e-6):
        problem = (
            f"the shares {shares[i, j]:g} of {_short(alternatives[i])} over {_short(alternatives[j])} "
            f"and {shares[j, i]:g} of the opposite do not sum to 1"
        )
        raise DataError(problem, file=name, row=int(i) + 1, remedy="correct them, or leave one of the two empty")
    return _finished(alternatives, np.where(np.isnan(shares), 1.0 - shares.T, shares), name)


def _stripped(cell: str) -> str:
    return "" if (text := cell.strip()).lower() in MARKS_OF_NOTHING else text


def _is_word(cell: str) -> bool:
    try:
        float(cell or "0")
    except ValueError:
        return True
    return False


def _read_share(cell: str, column: str, name: str, row: int) -> float:
    remedy = "give shares as numbers from 0 to 1, or leave the cell empty"
    if _is_word(cell):
        raise DataError(f"{_short(cell)} under {_short(column)} is no number", file=name, row=row, remedy=remedy)
    if not 0 <= (share := float(cell)) <= 1:
        raise DataError(f"the share {cell} under {_short(column)} is not in [0, 1]", file=name, row=row, remedy=remedy)
    return share


def _checked_names(names: list[Any], file: str) -> tuple[str, ...]:
    if not 2 <= len(names) <= MAX_ALTERNATIVES:
        remedy = "one alternative leaves nothing to compare" if len(names) < 2 else "keep those that matter most"
        raise DataError(f"2 to {MAX_ALTERNATIVES} alternatives are needed, not {len(names)}", file=file, remedy=remedy)
    if any(isinstance(name, bool) or not isinstance(name, str | int) or not str(name).strip() for name in names):
        raise DataError("an alternative has no name", file=file, remedy="name each by a text")
    words = tuple(str(name) for name in names)
    for name in words:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise DataError(f"the name {name!r} is half of a character", file=file, remedy="write names in UTF-8")
        if words.count(name) > 1:
            raise DataError(f"two alternatives are named {_short(name)}", file=file, remedy="tell them apart")
    return words


def _finished(alternatives: tuple[str, ...], shares: npt.NDArray[np.float64], name: str) -> Tournament:
    if np.isnan(shares).all():
        raise DataError("no two alternatives are compared", file=name, remedy="give at least one pair")
    return Tournament(alternatives, shares, name)


def _short(value: Any) -> str:
    text = str(value)
    return repr(text if len(text) <= 40 else text[:39] + "…") if isinstance(value, str) else text[:40]
