"""Parts of the scripts of this folder: rows of figures as a table or as JSON, and options of ``fit``."""

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from pluralign.core.json_values import to_json
from pluralign.theory.intervals import Interval

Row: TypeAlias = dict[str, Any]
"""Numbers, texts, intervals and None, by the name of their column."""


def show(rows: Sequence[Any], title: str = "", *, as_json: bool = False) -> None:
    """Print rows, which are mappings or dataclasses with the same fields, as a table or as one JSON list."""
    found = [row if isinstance(row, dict) else vars(row) for row in rows]
    if as_json:
        print(json.dumps(to_json(found)))
    else:
        Console(width=200).print(table(found, title))


def table(rows: Sequence[Row], title: str = "") -> Table:
    """Return rows as a table; a column is as wide as its longest value."""
    drawn = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name, value in rows[0].items():
        drawn.add_column(name.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        drawn.add_row(*(shown(value) for value in row.values()))
    return drawn


def shown(value: str | int | float | Interval | None) -> str:
    """Return one cell."""
    if isinstance(value, Interval):
        return f"{value.mean:+.4f} [{value.low:+.4f}, {value.high:+.4f}]"
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)


def means(rows: Sequence[Row], *, by: Sequence[str]) -> list[Row]:
    """Return the means over seeds: a row per value of the columns ``by``, with the distinct texts of other columns."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return [
        {name: of[0][name] if name in by else _mean([row[name] for row in of]) for name in of[0] if name != "seed"}
        for of in groups.values()
    ]


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], str | None):
        return ", ".join(dict.fromkeys(str(value or "") for value in values))
    alike = isinstance(values[0], Interval) or all(value == values[0] for value in values)
    return values[0] if alike else float(np.mean(values))


def fit_options(assignments: Sequence[str]) -> dict[str, Any]:
    """Return NAME=VALUE arguments as options of ``fit``; a value that is not JSON is a string.

    Example:
        >>> fit_options(["target=votes", "max_disagreement=0.45", "undecided=false"])
        {'target': 'votes', 'max_disagreement': 0.45, 'undecided': False}
    """
    options: dict[str, Any] = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
