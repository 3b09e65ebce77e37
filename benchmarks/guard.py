"""Run all benchmarks at a small size and compare their ratios with the committed references.

    python benchmarks/guard.py [--only speed,serving] [--pluralism VOTES RANKINGS] [--update] [-o build/bench.json]

Runs each benchmark with ``--json`` and writes all results as one object. Only ratios are compared with
``benchmarks/reference.json``, never times. The exit code is 1 if a ratio is more than twice as bad as its reference.
``--update`` makes this run the reference; explain the reason in the commit.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tables import show

HERE = Path(__file__).parent
REFERENCE = HERE / "reference.json"
WORST = 2.0
"""Largest allowed factor by which a ratio may be worse than its reference."""
Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark script, its arguments at a small size, and the ratios to compare."""

    arguments: Sequence[str]
    ratios: Mapping[str, Better]
    """Better direction of each ratio, by its name in the JSON; ``/`` enters a nested object."""
    without: str = ""
    """Reason to skip it; empty to run it."""


BENCHMARKS = {
    "calibration": Benchmark(
        ["demo:600", "--seeds", "1", "--encoder", "hashing", "--runs", "joint,stagewise symmetric"],
        {
            "demo:600/rows/joint k=8/vs_soft_bt": "lower",
            "demo:600/rows/stagewise symmetric k=8/vs_soft_bt": "lower",
        },
    ),
    "growth": Benchmark(["--sizes", "50000", "--steps", "load"], {"inspect_vs_json_loads": "lower"}),
    "speed": Benchmark(
        ["--quick"],
        {
            "encode_vs_sentence_transformers": "higher",
            "encode_vs_gemm_peak": "higher",
            "fit_vs_encode": "lower",
            "refit_vs_fit": "lower",
            "joint_vs_stagewise": "lower",
            "joint_vs_logistic": "lower",
            "compare_vs_encode": "higher",
        },
    ),
    "serving": Benchmark(["--quick"], {"online / offline throughput": "higher", "p99 / full batch": "lower"}),
    "pluralism": Benchmark([], {}, without="it needs --pluralism VOTES RANKINGS"),
    "finetuning": Benchmark([], {}, without="it trains for many minutes; run python benchmarks/finetuning.py VOTES"),
}


def main() -> None:
    """Run the benchmarks, write their JSON and print the table; exit with 1 if a ratio is much worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"run only these, comma-separated: {','.join(BENCHMARKS)}")
    parser.add_argument("--pluralism", nargs=2, metavar=("VOTES", "RANKINGS"), help="data for benchmarks/pluralism.py")
    parser.add_argument("--update", action="store_true", help="make this run the reference")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/bench.json"))
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else list(BENCHMARKS)
    if unknown := [name for name in chosen if name not in BENCHMARKS]:
        sys.exit(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}.")
    benchmarks = {name: BENCHMARKS[name] for name in chosen}
    if arguments.pluralism and "pluralism" in benchmarks:
        benchmarks["pluralism"] = Benchmark([*arguments.pluralism, "--seeds", "1"], {})
    results, skipped, failed = run_all(benchmarks)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    reference = json.loads(REFERENCE.read_text()) if REFERENCE.is_file() else {}
    if arguments.update:
        reference |= {name: ratios_of(benchmarks[name], result) for name, result in results.items()}
        REFERENCE.write_text(json.dumps({name: reference[name] for name in sorted(reference)}, indent=1) + "\n")
    rows = [row for name, result in results.items() for row in compare(name, benchmarks[name], result, reference)]
    if rows:
        show(rows)
    for name, reason in skipped.items():
        print(f"{name}: skipped, {reason}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}.")
    sys.exit(any(row.verdict == "worse" for row in rows))


def run_all(benchmarks: Mapping[str, Benchmark]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return the JSON of each benchmark, the reasons of skipped ones, and the names of failed ones."""
    results, skipped, failed = {}, {}, []
    for name, benchmark in benchmarks.items():
        script = HERE / f"{name}.py"
        if reason := benchmark.without or ("" if script.is_file() else f"there is no {script.name}"):
            skipped[name] = reason
            continue
        started = time.perf_counter()
        command = [sys.executable, str(script), *benchmark.arguments, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            failed.append(name)
            continue
        results[name] = json.loads(done.stdout)
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return results, skipped, failed


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One ratio and its reference."""

    benchmark: str
    ratio: str
    value: float
    reference: float | None
    verdict: Literal["as good", "worse", "new"]
    better: Better


def compare(name: str, benchmark: Benchmark, result: Mapping[str, Any], reference: Mapping[str, Any]) -> list[Row]:
    """Compare the ratios of a benchmark with their references.

    Args:
        name: name of the benchmark.
        benchmark: its ratios.
        result: its JSON.
        reference: ratios by benchmark and name; a missing one is new.
    """
    rows = []
    for ratio, value in ratios_of(benchmark, result).items():
        better, before = benchmark.ratios[ratio], reference.get(name, {}).get(ratio)
        worse = before is not None and times_worse(value, before, better) > WORST
        verdict: Literal["as good", "worse", "new"] = "new" if before is None else "worse" if worse else "as good"
        rows.append(Row(name, ratio, value, before, verdict, better))
    return rows


def times_worse(value: float, reference: float, better: Better) -> float:
    """Return the factor by which a ratio is worse than its reference; below 1 it is better."""
    numerator, denominator = (reference, value) if better == "higher" else (value, reference)
    return numerator / denominator if denominator > 0 else float("inf")


def ratios_of(benchmark: Benchmark, result: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratios of a benchmark by name. Raises KeyError if one is missing: it would guard nothing."""
    return {ratio: _value(result, ratio) for ratio in benchmark.ratios}


def _value(result: Any, path: str) -> float:
    """Return the number under a name, or under names joined by ``/``."""
    if path in result:
        return float(result[path])
    for end, letter in enumerate(path):
        if letter == "/" and path[:end] in result:
            return _value(result[path[:end]], path[end + 1 :])
    raise KeyError(f"there is no {path} in the JSON of the benchmark")


if __name__ == "__main__":
    main()
