"""How much the held-out score depends on the random seed of the fit, and on the split.

    python benchmarks/stability.py DATA [--seeds 8] [--splits 4] [--k 8] [--encoder minilm] [--set NAME=VALUE] [--json]

DATA is anything that ``pluralign fit`` reads. Two spreads are measured for each number of members:

- over seeds: the split by prompt is fixed, and only the seed of the fit varies. It decides the random starts, the
  validation prompts, and so the choices made on them.
- over splits: the seed of the fit is fixed, and the split varies.

``ratio`` is the Brier score on held-out prompts divided by that of soft BT from the same fit; sd is the standard
deviation with n − 1 in the denominator. ``--set NAME=VALUE`` passes any option of ``pluralign.fit``.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import pluralign
from pluralign.votes.preferences import PreferenceSet


@dataclass(frozen=True)
class Score:
    """The held-out score of one fit at one number of members."""

    split: int
    seed: int
    k: int
    brier: float
    ratio: float
    """Brier score divided by that of soft BT."""


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of the scores of several fits."""

    over: str
    """``seeds`` or ``splits``."""
    k: int
    fits: int
    brier: float
    brier_sd: float
    ratio: float
    ratio_sd: float
    ratio_worst: float


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=8, help="number of fit seeds on the first split")
    parser.add_argument("--splits", type=int, default=4, help="number of splits with the first fit seed")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--test-fraction", type=float, default=0.2)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of pluralign.fit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    options = {"k": arguments.k, "encoder": arguments.encoder, **read_options(arguments.set)}
    votes = pluralign.load_preferences(arguments.data)
    scores: list[Score] = []
    for split, seed in dict.fromkeys(
        [*((0, s) for s in range(arguments.seeds)), *((s, 0) for s in range(arguments.splits))]
    ):
        started = time.perf_counter()
        scores += fit_scores(votes.with_split(arguments.test_fraction, seed=split), split, seed, options)
        took = time.perf_counter() - started
        print(
            f"split {split}, seed {seed}: {scores[-1].ratio:.4f} × soft BT, {took:.0f} s", file=sys.stderr, flush=True
        )
    rows = [
        *spreads("seeds", [s for s in scores if s.split == 0]),
        *spreads("splits", [s for s in scores if s.seed == 0]),
    ]
    if arguments.json:
        print(
            json.dumps(
                {"data": arguments.data, "spreads": [asdict(r) for r in rows], "fits": [asdict(s) for s in scores]}
            )
        )
        return
    Console(width=120).print(table(arguments.data, rows))


def read_options(assignments: Sequence[str]) -> dict[str, Any]:
    """Return NAME=VALUE arguments as options of ``fit``; a value that is not JSON is a string.

    Example:
        >>> read_options(["target=votes", "max_disagreement=0.45", "undecided=false"])
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


def fit_scores(votes: PreferenceSet, split: int, seed: int, options: dict[str, Any]) -> Iterator[Score]:
    """Fit once and yield the score of every number of members in its history."""
    record = pluralign.fit(votes, seed=seed, **options).record
    assert record.evaluation is not None
    soft_bt = record.evaluation.baselines["soft_bt"].brier
    for row in record.history:
        yield Score(split, seed, row.k, row.test_brier, row.test_brier / soft_bt)


def spreads(over: str, scores: Sequence[Score]) -> Iterator[Spread]:
    """Yield the mean and the standard deviation of the scores at each number of members."""
    for k in sorted({score.k for score in scores}):
        brier, ratio = np.array([(score.brier, score.ratio) for score in scores if score.k == k]).T
        sd = [float(np.std(values, ddof=1)) if len(values) > 1 else float("nan") for values in (brier, ratio)]
        yield Spread(over, k, len(brier), float(brier.mean()), sd[0], float(ratio.mean()), sd[1], float(ratio.max()))


def table(data: str, rows: Sequence[Spread]) -> Table:
    """Return the table of all spreads."""
    drawn = Table(
        box=box.SIMPLE_HEAD, title=f"{data}: held-out Brier score over seeds and over splits", title_justify="left"
    )
    for position, name in enumerate(("over", "k", "fits", "Brier", "sd", "× soft BT", "sd", "worst")):
        drawn.add_column(name, justify="right" if position else "left")
    for row in rows:
        cells = (
            f"{row.brier:.4f}",
            f"{row.brier_sd:.4f}",
            f"{row.ratio:.4f}",
            f"{row.ratio_sd:.4f}",
            f"{row.ratio_worst:.4f}",
        )
        drawn.add_row(row.over, str(row.k), str(row.fits), *cells)
    return drawn


if __name__ == "__main__":
    main()
