"""Time and peak memory of reading and inspecting votes, relative to parsing their JSON.

    python benchmarks/inspect_speed.py [--pairs 1000000] [--json]

Writes a town hall of that many pairs to a temporary folder, inspects it on the command line, and compares the time with
that of ``json.loads`` on the same lines.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "town.jsonl"
        written, written_memory = run("demo", "--pairs", str(arguments.pairs), "-o", str(path))
        start = time.perf_counter()
        with path.open() as lines:
            for line in lines:
                json.loads(line)
        parsing = time.perf_counter() - start
        size = path.stat().st_size
        inspected, memory = run("inspect", str(path), "--json")
    result = {
        "pairs": arguments.pairs,
        "file_megabytes": size / 1e6,
        "inspect_vs_json_loads": inspected / parsing,
        "inspect_seconds": inspected,
        "make_seconds": written,
        "make_peak_gigabytes": written_memory,
        "inspect_peak_gigabytes": memory,
    }
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:24}{value:>14,.2f}")


def run(*command: str) -> tuple[float, float]:
    """Run ``pluralign`` with these arguments; return its seconds and its peak resident gigabytes."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "pluralign", *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"pluralign {' '.join(command)} failed")
    return time.perf_counter() - start, usage.ru_maxrss / 1e6


if __name__ == "__main__":
    main()
