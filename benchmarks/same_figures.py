"""Compare two folders that ``pluralign fit`` wrote from the same votes and options, before and after a change of code.

    python benchmarks/same_figures.py BEFORE AFTER

Prints "identical" if the members, weights, temperature, undecided share and every figure of the record are the same to
the last digit, else one line per difference. The files are read without Pluralign, so BEFORE may come from an earlier
version. Timings, versions and hashes are not compared. Values that only one folder has (an option that was removed, a
figure that was added) are listed, and do not count as differences. Another CPU can change the last digits.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

IGNORED = (
    "seconds", "seconds_encoding", "seconds_members", "versions", "processes", "sha256", "file",
    "format_version", "command", "identity",
)  # fmt: skip


def main() -> None:
    """Print the differences; exit with 1 if a value differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parser.parse_args()
    before, after = values(arguments.before), values(arguments.after)
    changed = [
        f"{name}: the arrays differ" if "/arrays/" in name else f"{name}: {before[name]} before, {after[name]} after"
        for name in sorted(before.keys() & after.keys())
        if before[name] != after[name]
    ]
    for where, names in (("before", before.keys() - after.keys()), ("after", after.keys() - before.keys())):
        print(*(f"only {where}: {name}" for name in sorted(names)), sep="\n", end="\n" if names else "")
    print("\n".join(changed) or f"identical: {len(before.keys() & after.keys())} values")
    sys.exit(bool(changed))


def values(folder: Path) -> dict[str, Any]:
    """Return every number, text and array of an ensemble folder by its path."""
    description = json.loads((folder / "ensemble.json").read_text(encoding="utf-8"))
    arrays = load_file(folder / description["arrays"]["file"])
    found = dict(leaves(description))
    return found | {f"/arrays/{name}": (array.shape, array.tobytes()) for name, array in arrays.items()}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every leaf of a JSON value."""
    if isinstance(value, dict):
        for key in value.keys() - {*IGNORED}:
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, list):
        for position, one in enumerate(value):
            yield from leaves(one, f"{path}/{position}")
    else:
        yield path, value


if __name__ == "__main__":
    main()
