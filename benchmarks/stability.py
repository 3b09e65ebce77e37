"""How much held-out predictions depend on the random seed of the fit.

    python benchmarks/stability.py DATA [DATA …] [--seeds 5] [--splits 1] [--set NAME=VALUE] [-o FILE] [--against FILE]

DATA is anything that ``pluralign fit`` reads. Each split by prompt is fixed; only the seed of the fit varies. For each
split:

- sd: standard deviation of the corrected Brier score over seeds (n − 1 in the denominator); range: largest − smallest;
- flips: share of held-out pairs on which two seeds predict different majorities, averaged over all pairs of seeds;
- gap: largest difference of the shares that two seeds predict for a held-out pair.

``--set NAME=VALUE`` passes any option of ``pluralign.fit``, ``-o FILE`` stores all predicted shares, and ``--against
FILE`` compares the squared errors with a stored run of other code or options, seed by seed, with a 95 % interval over
prompts.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from tables import fit_options, show

import pluralign
from pluralign.core.arrays import FloatArray
from pluralign.theory.calibration import brier_corrected, squared_error
from pluralign.theory.intervals import Interval, paired_difference
from pluralign.votes.preferences import PreferenceSet


@dataclass(frozen=True)
class Spread:
    """The held-out figures of one split, over the seeds of the fit."""

    data: str
    split: int
    seeds: int
    brier: float
    ratio: float
    """Mean Brier score divided by that of soft BT."""
    corrected: float
    """Mean over seeds."""
    sd: float
    range: float
    flips: float
    gap: float
    seconds: float
    """Mean duration of a fit without encoding."""


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds on each split")
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--test-fraction", type=float, default=0.2)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of pluralign.fit")
    parser.add_argument("-o", "--output", type=Path, help="store the figures and all predicted shares as JSON")
    parser.add_argument("--against", type=Path, help="a file of -o to compare with")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    options = {"k": arguments.k, "encoder": arguments.encoder, **fit_options(arguments.set)}
    earlier = json.loads(arguments.against.read_text())["shares"] if arguments.against else {}
    rows, shares, differences = list[Spread](), dict[str, Any](), dict[str, Interval]()
    for data in arguments.data:
        votes = pluralign.load_preferences(data)
        for split in range(arguments.splits):
            name, part = f"{data} split {split}", votes.with_split(arguments.test_fraction, seed=split)
            row, found = measure(data, part, split, arguments.seeds, options)
            rows.append(row)
            shares[name] = found.tolist()
            if name in earlier:
                differences[name] = compare(found, np.array(earlier[name]), part[part.test_mask()])
    result = {"spreads": [asdict(row) for row in rows], "shares": shares}
    result["differences"] = {name: asdict(one) for name, one in differences.items()}
    if arguments.output:
        arguments.output.write_text(json.dumps(result))
    if arguments.json:
        print(json.dumps({**result, "shares": None}))
        return
    show(rows, "Held-out figures over seeds of the fit")
    for name, one in differences.items():
        print(f"{name}: squared error − earlier {one.mean:+.5f} [{one.low:+.5f}, {one.high:+.5f}]")


def measure(
    data: str, votes: PreferenceSet, split: int, seeds: int, options: dict[str, Any]
) -> tuple[Spread, FloatArray]:
    """Fit once per seed; return the spread of the held-out figures, and the predicted shares ``(seeds, n_test)``."""
    test, shares, seconds, soft_bt = votes[votes.test_mask()], [], [], float("nan")
    for seed in range(seeds):
        started = time.perf_counter()
        ensemble = pluralign.fit(votes, seed=seed, **options)
        seconds.append(time.perf_counter() - started - (ensemble.record.seconds_encoding or 0.0))
        assert ensemble.record.evaluation is not None
        soft_bt = ensemble.record.evaluation.baselines["soft_bt"].brier
        shares.append(ensemble.prob_hat(test, ensemble.record.level))
        target = ensemble.record.target, ensemble.record.vote_share
        print(f"{data} split {split}, seed {seed}: {target}, {seconds[-1]:.0f} s", file=sys.stderr, flush=True)
    found = np.array(shares)
    corrected = [brier_corrected(share, test.prob_a, test.n_votes, test.counted_ties) for share in found]
    brier = float(np.mean([squared_error(share, test.prob_a) for share in shares]))
    score = float(np.mean(corrected)), float(np.std(corrected, ddof=1)), float(np.ptp(corrected))
    return Spread(data, split, seeds, brier, brier / soft_bt, *score, *changes(found), float(np.mean(seconds))), found


def changes(shares: FloatArray) -> tuple[float, float]:
    """Return the share of flipped majorities between two seeds, on average, and the largest gap of two shares.

    Example:
        >>> changes(np.array([[0.6, 0.4], [0.9, 0.3], [0.4, 0.3]]))
        (0.3333333333333333, 0.5)
    """
    flips = [float(np.mean((one > 0.5) != (other > 0.5))) for one, other in combinations(shares, 2)]
    return float(np.mean(flips)), float(np.ptp(shares, axis=0).max())


def compare(shares: FloatArray, earlier: FloatArray, test: PreferenceSet) -> Interval:
    """Return the mean squared error of these shares minus that of others, averaged over seeds first."""
    ours, theirs = (np.mean([squared_error(one, test.prob_a) for one in of], axis=0) for of in (shares, earlier))
    return paired_difference(ours, theirs, test.prompt_index)


if __name__ == "__main__":
    main()
