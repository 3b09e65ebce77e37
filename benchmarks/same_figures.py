"""Fit an ensemble again with its recorded options, and compare every figure with the recorded one.

    python benchmarks/same_figures.py FOLDER DATA

FOLDER was written by ``pluralign fit DATA -o FOLDER``, by this version or an earlier one, on frozen features. After a
change of the code that should not change results, this prints "identical": parameters, weights, temperature, undecided
share and all figures of the record are the same to the last digit. Timings and versions are not compared. Another CPU
can change the last digits.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

import pluralign
from pluralign.learning.options import FitOptions

IGNORED = ("seconds", "seconds_encoding", "baseline_seconds", "versions", "processes", "pruned")


def main() -> None:
    """Print the differences; exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder of the recorded ensemble")
    parser.add_argument("data", help="the votes it was fitted to, as for pluralign fit")
    arguments = parser.parse_args()
    recorded = pluralign.RewardEnsemble.load(arguments.folder)
    known = {option.name for option in fields(FitOptions)}
    options: dict[str, Any] = {name: value for name, value in recorded.record.options.items() if name in known}
    again = pluralign.fit(pluralign.load_preferences(arguments.data), **options)
    found = list(differences(recorded.record.to_json(), again.record.to_json()))
    if recorded.members.theta.tobytes() != again.members.theta.tobytes():
        found.append("members: the parameters differ")
    found += [
        f"{name}: the values differ"
        for name in ("weights", "temperature", "undecided")
        if not np.array_equal(getattr(recorded, name), getattr(again, name))
    ]
    print("\n".join(found) or "identical")
    sys.exit(bool(found))


def differences(recorded: Any, again: Any, path: str = "") -> Iterator[str]:
    """Yield one line per value that differs; keys that only one of them has differ too."""
    if isinstance(recorded, dict) and isinstance(again, dict):
        for key in sorted({*recorded, *again} - {*IGNORED}):
            yield from differences(recorded.get(key), again.get(key), f"{path}/{key}")
    elif isinstance(recorded, list) and isinstance(again, list) and len(recorded) == len(again):
        for position, (one, other) in enumerate(zip(recorded, again, strict=True)):
            yield from differences(one, other, f"{path}/{position}")
    elif recorded != again:
        yield f"{path}: {recorded} was recorded, {again} is new"


if __name__ == "__main__":
    main()
