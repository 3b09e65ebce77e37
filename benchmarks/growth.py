"""Growth of time and memory of the commands with the number of pairs, with fitted exponents.

    python benchmarks/growth.py [--sizes 10000 100000 1000000] [--json]

For each size, each in a new process: write a town hall as JSON Lines, inspect it (loading), encode it by hashing into
384 dimensions and surface features, fit (joint, k = 8) on these features, and evaluate on all pairs. Exponents are
slopes of log seconds on log pairs and include the start-up time; 1 is linear.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENCODER = ["--encoder", "hashing:384"]


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--scratch", type=Path, help="folder for files (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    runs = []
    for pairs in arguments.sizes:
        runs.append(measure(pairs, arguments.scratch))
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    result: dict[str, Any] = {"runs": runs}
    for step in ("load", "fit", "evaluate"):
        result[f"{step}_exponent"] = exponent(arguments.sizes, [run[step]["seconds"] for run in runs])
    result["peak_gigabytes"] = max(run[step]["gigabytes"] for run in runs for step in ("load", "fit", "evaluate"))
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{'pairs':>10}{'texts':>10}" + "".join(f"{step + ' s':>14}{'GB':>7}" for step in STEPS))
    for run in runs:
        cells = "".join(f"{run[step]['seconds']:>14.1f}{run[step]['gigabytes']:>7.2f}" for step in STEPS)
        print(f"{run['pairs']:>10,}{run['texts']:>10,}{cells}")
    for step in ("load", "fit", "evaluate"):
        print(f"exponent of {step}: {result[f'{step}_exponent']:.2f}")


STEPS = ("load", "encode", "fit", "evaluate")


def measure(pairs: int, scratch: Path | None) -> dict[str, Any]:
    """Return seconds and peak gigabytes of each command at one size."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        votes, features, ensemble = (str(Path(folder) / name) for name in ("town.jsonl", "features", "ensemble"))
        run("demo", "--pairs", str(pairs), "-o", votes)
        result: dict[str, Any] = {"pairs": pairs}
        result["load"], inspected = run("inspect", votes, "--json")
        result["encode"], encoded = run("encode", votes, "-o", features, *ENCODER, "--json")
        result["fit"], fitted = run("fit", votes, "-o", ensemble, *ENCODER, "--features", features, "--json")
        result["evaluate"], _ = run("evaluate", ensemble, votes, "--features", features, "--json")
        result["texts"], result["brier"] = encoded["rows"], fitted["test"]["brier"]
        assert inspected["pairs"] == pairs
        return result


def run(*command: str) -> tuple[dict[str, float], Any]:
    """Run ``pluralign`` with these arguments; return its seconds and peak resident gigabytes, and its JSON."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, "-m", "pluralign", *command], stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            sys.exit(f"pluralign {' '.join(command)} failed")
        output.seek(0)
        text = output.read()
    printed = json.loads(text) if text.startswith(b"{") else {}
    return {"seconds": seconds, "gigabytes": usage.ru_maxrss / 1e6}, printed


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the least-squares slope of log seconds on log size."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    centre_x, centre_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((value - centre_x) ** 2 for value in x)
    return sum((u - centre_x) * (v - centre_y) for u, v in zip(x, y, strict=True)) / spread if spread else math.nan


if __name__ == "__main__":
    main()
