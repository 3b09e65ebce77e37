"""Growth of time and memory of the commands with the number of pairs, with fitted exponents.

    python benchmarks/growth.py [--sizes 10000 100000 1000000] [--steps load encode fit evaluate] [--json]

For each size, each in a new process: write a town hall as JSON Lines, inspect it (loading), encode it by hashing into
384 dimensions and surface features, fit (joint, k = 8) on these features, and evaluate on all pairs. Exponents are
slopes of log seconds on log pairs and include the start-up time; 1 is linear. ``inspect_vs_json_loads`` is the time of
loading divided by that of ``json.loads`` on the same lines, at the largest size.
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

from tables import show

ENCODER = ["--encoder", "hashing:384"]
STEPS = ("load", "encode", "fit", "evaluate")


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="each needs those before it")
    parser.add_argument("--scratch", type=Path, help="folder for files (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    runs = []
    for pairs in arguments.sizes:
        runs.append(measure(pairs, arguments.steps, arguments.scratch))
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    result: dict[str, Any] = {"runs": runs, "inspect_vs_json_loads": runs[-1]["inspect_vs_json_loads"]}
    for step in arguments.steps if len(runs) > 1 else ():
        result[f"{step}_exponent"] = exponent(arguments.sizes, [run[f"{step}_seconds"] for run in runs])
    if arguments.json:
        print(json.dumps(result))
        return
    show(runs)
    print("\n".join(f"{name}: {value:.2f}" for name, value in result.items() if name != "runs"))


def measure(pairs: int, steps: Sequence[str], scratch: Path | None) -> dict[str, float]:
    """Return seconds and peak gigabytes of each command at one size."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        votes, features, ensemble = (str(Path(folder) / name) for name in ("town.jsonl", "features", "ensemble"))
        run("demo", "--pairs", str(pairs), "-o", votes)
        commands = {
            "load": ("inspect", votes),
            "encode": ("encode", votes, "-o", features, *ENCODER),
            "fit": ("fit", votes, "-o", ensemble, *ENCODER, "--features", features),
            "evaluate": ("evaluate", ensemble, votes, "--features", features),
        }
        result: dict[str, float] = {"pairs": pairs}
        for step in steps:
            result[f"{step}_seconds"], result[f"{step}_gigabytes"] = run(*commands[step])
        start = time.perf_counter()
        with Path(votes).open() as lines:
            for line in lines:
                json.loads(line)
        result["inspect_vs_json_loads"] = result["load_seconds"] / (time.perf_counter() - start)
        return result


def run(*command: str) -> tuple[float, float]:
    """Run ``pluralign`` with these arguments; return its seconds and its peak resident gigabytes."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "pluralign", *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"pluralign {' '.join(command)} failed")
    return time.perf_counter() - start, usage.ru_maxrss / 1e6


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the least-squares slope of log seconds on log size."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    centre_x, centre_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((value - centre_x) ** 2 for value in x)
    return sum((u - centre_x) * (v - centre_y) for u, v in zip(x, y, strict=True)) / spread if spread else math.nan


if __name__ == "__main__":
    main()
