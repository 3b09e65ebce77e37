"""Fine-tuned members and frozen features on one split: held-out Brier score, seconds per member, peak memory.

    python benchmarks/finetuning.py VOTES [--pairs 1500] [--k 8] [--runs "minilm joint,minilm stagewise,…"] [--json]

VOTES is anything that ``pluralign fit`` reads. Only a slice of whole prompts is used, because language models train
slowly without a GPU. Each run has its own process, to measure its peak memory. The main ratio is the training time of a
joint ensemble of k members over that of one member (stagewise k=1): k outputs on one backbone should cost little more.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import pluralign

RUNS: dict[str, dict[str, Any]] = {
    "frozen minilm, joint": {"encoder": "minilm"},
    "minilm, one member": {"backbone": "minilm", "method": "stagewise", "k": 1},
    "minilm, joint": {"backbone": "minilm", "learning_rate": 1e-4},
    "minilm, stagewise": {"backbone": "minilm", "method": "stagewise", "learning_rate": 1e-4},
    "smollm2 LoRA, one member": {"backbone": "smollm2", "lora": True, "method": "stagewise", "k": 1},
    "smollm2 LoRA, joint": {"backbone": "smollm2", "lora": True},
}
ONE = {"minilm, joint": "minilm, one member", "smollm2 LoRA, joint": "smollm2 LoRA, one member"}


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("votes")
    parser.add_argument("--pairs", type=int, default=1500, help="approximate number of pairs, in whole prompts")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--optimizer", default="adamw", help="soap (the paper's) takes most of the time without a GPU")
    parser.add_argument("--test-fraction", type=float, default=0.2)
    parser.add_argument("--runs", help=f"run only these, separated by semicolons: {'; '.join(RUNS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    chosen = [name for name in RUNS if not arguments.runs or name in arguments.runs.split("; ")]
    results: dict[str, dict[str, Any]] = {}
    for name in chosen:
        print(f"{name} …", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, *sys.argv, "--one", name], stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout)
    ratios = {name: results[name]["training"] / results[one]["training"]
              for name, one in ONE.items() if name in results and one in results}  # fmt: skip
    if arguments.json:
        print(json.dumps({"runs": results, "joint_vs_one_member": ratios}))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "k", "Brier", "soft BT", "worst member", "training s", "s per member", "peak GB"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, row in results.items():
        cells = (f"{row['brier']:.4f}", f"{row['soft_bt']:.4f}", f"{row['worst']:.3f}", f"{row['training']:.0f}")
        table.add_row(name, str(row["k"]), *cells, f"{row['training'] / row['k']:.1f}", f"{row['memory']:.1f}")
    console = Console(width=120)
    console.print(table)
    first = next(iter(results.values()))
    console.print(f"{first['pairs']:,} pairs, {first['test_pairs']:,} of them held out; floor {first['floor']:.4f}, "
                  f"constant ½ {first['constant_half']:.4f}, noise {first['noise']:.4f}")  # fmt: skip
    for name, ratio in ratios.items():
        console.print(f"training time, {name} k={results[name]['k']} / {ONE[name]}: {ratio:.2f}")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fit one run and return its figures."""
    votes = pluralign.load_preferences(arguments.votes)
    if len(votes) > arguments.pairs:
        order = np.random.default_rng(0).permutation(len(votes.prompts))
        sizes = np.bincount(votes.prompt_index)[order]
        kept = order[: int(np.searchsorted(np.cumsum(sizes), arguments.pairs)) + 1]
        votes = votes[np.isin(votes.prompt_index, kept)]
    options = {"k": arguments.k, "test_fraction": arguments.test_fraction, **RUNS[arguments.one]}
    if "backbone" in options:
        options |= {name: getattr(arguments, name) for name in ("epochs", "max_length", "optimizer")}
    with tempfile.TemporaryDirectory() as folder:
        ensemble = pluralign.fit(votes, folder=Path(folder), **options)
    record, evaluation = ensemble.record, ensemble.record.evaluation
    assert evaluation is not None
    assert record.data is not None
    return {
        "k": record.k,
        "brier": evaluation.test.brier,
        "brier_corrected": evaluation.test.brier_corrected,
        "soft_bt": evaluation.baselines["soft_bt"].brier,
        "floor": evaluation.baselines["floor"].brier,
        "constant_half": evaluation.baselines["constant_half"].brier,
        "noise": evaluation.test.noise,
        "worst": evaluation.worst_disagreement(),
        "training": record.seconds if record.seconds_members is None else float(np.sum(record.seconds_members)),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "pairs": len(votes),
        "test_pairs": record.data.test_pairs,
    }


if __name__ == "__main__":
    main()
