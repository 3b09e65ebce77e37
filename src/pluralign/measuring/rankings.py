"""``rankings``: one context with named alternatives, decomposed into rankings.

This module decides the two file formats of pairwise votes or shares. The mathematics is in ``theory.rankings``.
"""

import csv
import io
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError
from pluralign.core.text import is_unicode, shortened
from pluralign.core.types import Progress
from pluralign.theory import rankings as theory
from pluralign.theory.calibration import brier

EMPTY_MARKS = {"-", "–", "—", "nan", "na", "n/a"}
LAYOUT = "write {alternatives: [names], pairs: [[i, j, votes_i, votes_j]]} or a CSV matrix of shares"


@dataclass(frozen=True, eq=False)
class Tournament:
    """The share of people who prefer each of m alternatives to each other one."""

    alternatives: tuple[str, ...]
    shares: FloatArray
    """``(m, m)``: entry (i, j) is the share preferring i to j; NaN for unknown pairs and on the diagonal."""
    name: str = ""


@dataclass(frozen=True)
class RankingSample:
    """Rankings of equal weight drawn from an ensemble (Theorem 2)."""

    k: int
    rankings: Sequence[theory.Ranking]
    error: float
    """Calibration error of the sample to the ensemble, over the known pairs."""
    expected_error: float
    bound: float
    """1/(4k), an upper bound on the expected error."""


@dataclass(frozen=True, eq=False)
class RankingResult(theory.Decomposition):
    """The mixture of rankings nearest to a tournament, with the names of the alternatives."""

    alternatives: Sequence[str]
    pairs: int
    """Number of known pairs."""
    size_at_most: int
    """Upper bound on the number of rankings needed (Carathéodory)."""
    in_words: str
    """The certificate as a sentence with names; empty if there is none."""
    sample: RankingSample | None = None


def load_tournament(source: str | os.PathLike[str]) -> Tournament:
    """Read a tournament from a file, or from standard input if ``source`` is ``-``.

    JSON: ``{"alternatives": [names], "pairs": [[i, j, votes_i, votes_j], …]}``, where i and j are indices of the list
    of names, from 0. Each pair occurs at most once. CSV: a matrix whose cell (i, j) is the share preferring i to j,
    with or without a line and a column of names. The diagonal is ignored, and cells may be empty.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "drinks.json"
        >>> _ = path.write_text('{"alternatives": ["tea", "coffee"], "pairs": [[0, 1, 3, 1]]}')
        >>> load_tournament(path).shares
        array([[ nan, 0.75],
               [0.25,  nan]])
    """
    piped = str(source) == "-"
    name = "standard input" if piped else str(source)
    if not piped and not Path(source).is_file():
        raise DataError("there is no such file", file=name, remedy="check the path")
    data = sys.stdin.buffer.read() if piped else Path(source).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError("the file is not UTF-8 text", file=name, remedy=LAYOUT) from None
    if not text.strip():
        raise DataError("the file is empty", file=name, remedy=LAYOUT)
    alternatives, shares = _from_json(text, name) if text.lstrip()[0] in "{[" else _from_csv(text, name)
    if np.isnan(shares).all():
        raise DataError("no two alternatives are compared", file=name, remedy="give at least one pair")
    return Tournament(alternatives, shares, name)


def rankings(
    source: Tournament | str | os.PathLike[str], k: int | None = None, seed: int = 0, progress: Progress | None = None
) -> RankingResult:
    """Find the mixture of rankings nearest to a tournament, and decide whether it gives the shares exactly.

    Args:
        source: shares and names, or a file of them (``load_tournament``).
        k: also draw k rankings of equal weight from the mixture (Theorem 2).
        seed: random seed of that draw, and of the local search, which is used for many alternatives.
        progress: called with the number of rounds.

    Example:
        >>> result = rankings(Tournament(("tea", "coffee"), np.array([[np.nan, 0.75], [0.25, np.nan]])))
        >>> result.realizable, result.rankings, [round(weight, 6) for weight in result.weights.tolist()]
        (True, ((0, 1), (1, 0)), [0.75, 0.25])
    """
    tournament = source if isinstance(source, Tournament) else load_tournament(source)
    found = theory.decompose(tournament.shares, seed=seed, progress=progress)
    known, sample = np.triu(~np.isnan(tournament.shares), 1), None
    if k is not None:
        drawn = theory.sample_rankings(found.rankings, found.weights, k, seed)
        error = brier(theory.tournament_of(drawn, np.full(k, 1 / k))[known], found.nearest[known])
        expected = theory.sampling_error(np.where(known | known.T, found.nearest, np.nan), k)
        sample = RankingSample(k, drawn, error, expected, bound=1 / (4 * k))
    pairs, names = int(known.sum()), tournament.alternatives
    proof = in_words(found.certificate, names) if found.certificate else ""
    return RankingResult(
        **vars(found), alternatives=names, pairs=pairs, size_at_most=pairs + 1, in_words=proof, sample=sample
    )


def in_words(certificate: theory.ViolatedInequality, names: Sequence[str]) -> str:
    """Return a sentence that explains why a tournament is not realizable.

    Example:
        >>> found = theory.ViolatedInequality(((0, 1), (1, 2), (2, 0)), (1.0, 1.0, 1.0), 2.0, 2.5, "cycle")
        >>> print(in_words(found, "ABC"))
        No ranking satisfies all of “A over B”, “B over C” and “C over A”, so their shares sum to at most 2; here 2.5.
    """
    times = ["" if coefficient == 1 else f"{coefficient:.6g} × " for coefficient in certificate.coefficients]
    terms = [f"{factor}“{names[i]} over {names[j]}”" for factor, (i, j) in zip(times, certificate.pairs, strict=True)]
    count, listed = len(terms), f"{', '.join(terms[:-1])} and {terms[-1]}"
    limit = f"sum to at most {certificate.bound:.10g}; here {certificate.value:.10g}."
    if certificate.kind == "cycle":
        return f"No ranking satisfies all of {listed}, so their shares {limit}"
    if set(certificate.coefficients) == {1.0}:
        return f"No ranking satisfies more than {certificate.bound:.10g} of {listed}, so these {count} shares {limit}"
    return f"For every ranking the shares {listed} {limit}"


def _from_json(text: str, name: str) -> tuple[tuple[str, ...], FloatArray]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"the file is not valid JSON{reason}", file=name, remedy=LAYOUT) from None
    lists = ("alternatives", "pairs")
    if not isinstance(content, dict) or not all(isinstance(content.get(key), list) for key in lists):
        raise DataError("it must be a JSON object with the lists alternatives and pairs", file=name, remedy=LAYOUT)
    alternatives = _checked_names(content["alternatives"], name)
    shares = np.full((len(alternatives), len(alternatives)), np.nan)
    for number, entry in enumerate(content["pairs"], 1):
        try:
            i, j, share = _read_pair(entry, len(alternatives))
            if not math.isnan(shares[i, j]):
                raise ValueError(f"alternatives {i} and {j} occur twice; sum the votes in one entry")
        except ValueError as error:
            problem, _, remedy = str(error).partition("; ")
            raise DataError(f"entry {number} of pairs: {problem}", file=name, remedy=remedy) from None
        shares[i, j], shares[j, i] = share, 1.0 - share
    return alternatives, shares


def _read_pair(entry: Any, m: int) -> tuple[int, int, float]:
    if not isinstance(entry, list) or len(entry) != 4 or any(type(part) not in (int, float) for part in entry):
        raise ValueError("it must be a list of four numbers; write [i, j, votes_i, votes_j]")
    i, j, votes_i, votes_j = entry
    if not (isinstance(i, int) and isinstance(j, int) and 0 <= min(i, j) < max(i, j) < m):
        raise ValueError(f"{i} and {j} are no two alternatives; use two different indices from 0 to {m - 1}")
    if not (0 <= min(votes_i, votes_j) <= max(votes_i, votes_j) < 2**53 and votes_i + votes_j > 0):
        votes = f"{_short(votes_i)} and {_short(votes_j)}"
        raise ValueError(f"{votes} are no numbers of votes; give the votes on each side, 0 or more but not both 0")
    return i, j, votes_i / (votes_i + votes_j)


def _from_csv(text: str, name: str) -> tuple[tuple[str, ...], FloatArray]:
    try:
        rows = [[_cell_text(cell) for cell in row] for row in csv.reader(io.StringIO(text, newline=""), strict=True)]
    except csv.Error:
        raise DataError("the file is neither JSON nor CSV", file=name, remedy=LAYOUT) from None
    rows = [row for row in rows if row not in ([], [""])]
    if not rows:
        raise DataError("no two alternatives are compared", file=name, remedy="give at least one share")
    column_names: list[str] | None = None
    if any(_is_text(cell) for cell in rows[0][1:]) or len(rows) == len(rows[0]) + 1:
        column_names, *rows = rows
    row_names: list[str] | None = None
    if rows and (any(_is_text(row[0]) for row in rows) or all(len(row) == len(rows) + 1 for row in rows)):
        row_names, rows = [row[0] for row in rows], [row[1:] for row in rows]
        if column_names and len(column_names) == len(rows) + 1:
            column_names = column_names[1:]
    m = len(rows)
    for number, row in enumerate(rows, 1):
        if len(row) != m:
            problem = f"the row has {len(row)} shares, but there are {m} rows of shares"
            raise DataError(problem, file=name, row=number, remedy="write a square matrix")
    if column_names is not None and row_names is not None and column_names != row_names:
        raise DataError("the names above and beside the matrix differ", file=name, remedy="use the same names")
    alternatives = _checked_names(column_names or row_names or [str(index) for index in range(m)], name)
    if len(alternatives) != m:
        problem = f"there are {len(alternatives)} names, but {m} rows of shares"
        raise DataError(problem, file=name, remedy="name every alternative once")
    shares = np.full((m, m), np.nan)
    for i, row in enumerate(rows):
        for j, cell in enumerate(row):
            if i != j and cell:
                shares[i, j] = _read_share(cell, alternatives[j], name, i + 1)
    for i, j in np.argwhere(np.abs(shares + shares.T - 1.0) > 1e-6):
        pair = f"{_short(alternatives[i])} over {_short(alternatives[j])}"
        problem = f"the shares {shares[i, j]:g} of {pair} and {shares[j, i]:g} of the opposite do not sum to 1"
        raise DataError(problem, file=name, row=int(i) + 1, remedy="correct them, or leave one of the two cells empty")
    return alternatives, np.where(np.isnan(shares), 1.0 - shares.T, shares)


def _cell_text(cell: str) -> str:
    return "" if (text := cell.strip()).lower() in EMPTY_MARKS else text


def _is_text(cell: str) -> bool:
    try:
        float(cell or "0")
    except ValueError:
        return True
    return False


def _read_share(cell: str, column: str, name: str, row: int) -> float:
    remedy = "give shares as numbers from 0 to 1, or leave the cell empty"
    if _is_text(cell):
        raise DataError(f"{_short(cell)} under {_short(column)} is not a number", file=name, row=row, remedy=remedy)
    if not 0 <= (share := float(cell)) <= 1:
        raise DataError(f"the share {cell} under {_short(column)} is not in [0, 1]", file=name, row=row, remedy=remedy)
    return share


def _checked_names(names: list[Any], file: str) -> tuple[str, ...]:
    if not 2 <= len(names) <= theory.MAX_ALTERNATIVES:
        problem = f"the number of alternatives must be 2 to {theory.MAX_ALTERNATIVES}, not {len(names)}"
        raise DataError(problem, file=file, remedy="add alternatives" if len(names) < 2 else "remove alternatives")
    if any(isinstance(name, bool) or not isinstance(name, str | int) or not str(name).strip() for name in names):
        raise DataError("an alternative has no name", file=file, remedy="give each alternative a name")
    words = tuple(str(name) for name in names)
    for name in words:
        if not is_unicode(name):
            raise DataError(f"the name {name!r} has an unpaired surrogate", file=file, remedy="write names in UTF-8")
        if words.count(name) > 1:
            raise DataError(f"two alternatives are named {_short(name)}", file=file, remedy="give them different names")
    return words


def _short(value: Any) -> str:
    return repr(shortened(value, 40)) if isinstance(value, str) else str(value)[:40]
