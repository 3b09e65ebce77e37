"""Held-out calibration of all methods and baselines over several splits by prompt, in one table.

    python benchmarks/calibration.py DATA [DATA …] [--seeds 5] [--test-fraction 0.2] [--encoder minilm] [--layers auto]

DATA is anything that ``pluralign fit`` reads, for instance a file of votes or ``demo:4000``. The true shares
of the town hall are known: its table also has the true calibration error, and that of k random annotators. All figures
are means over the splits, on held-out prompts; ± is one standard error over the splits.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from tables import Row, show

import pluralign
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.experiments.demo import random_annotators
from pluralign.theory import calibration
from pluralign.votes.preferences import PreferenceSet

RUNS: dict[str, dict[str, Any]] = {
    "joint": {"method": "joint"},
    "joint policy": {"method": "joint", "level": "policy"},
    "stagewise printed": {"method": "stagewise", "variant": "printed"},
    "stagewise printed as given": {"method": "stagewise", "variant": "printed", "orient": "given"},
    "stagewise printed majority first": {"method": "stagewise", "variant": "printed", "orient": "majority"},
    "stagewise unbounded": {"method": "stagewise", "variant": "printed", "max_disagreement": 1.0},
    "stagewise symmetric": {"method": "stagewise", "variant": "symmetric"},
}
VOICES = "better than the best single reward"


def main() -> None:
    """Run the benchmark and print its tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--seeds", type=int, default=5, help="number of splits")
    parser.add_argument("--test-fraction", type=float, default=0.2)
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--layers", default="auto", help="layers of the encoder, as in pluralign fit")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--runs", help=f"run only these methods, comma-separated: {'; '.join(RUNS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    results = {data: measure(data, arguments) for data in arguments.data}
    if arguments.json:
        print(json.dumps(results))
        return
    for data, result in results.items():
        show(rows_of(result), f"{data}: {result['splits']} splits by prompt, noise {result['noise']:.4f}")
        print("\n".join(f"  {line}" for line in result["claims"]))


def measure(data: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Fit all methods on all splits and return the mean figures."""
    town = pluralign.town_hall(int(data.partition(":")[2] or 2000)) if data.partition(":")[0] == "demo" else None
    votes = town.preferences if town else pluralign.load_preferences(data)
    chosen = {name: RUNS[name] for name in RUNS if not arguments.runs or name in arguments.runs.split(",")}
    rows: dict[str, list[dict[str, float]]] = {}
    for seed in range(arguments.seeds):
        for name, options in chosen.items():
            started = time.perf_counter()
            ensemble = pluralign.fit(
                votes,
                k=arguments.k,
                seed=seed,
                test_fraction=arguments.test_fraction,
                encoder=arguments.encoder,
                layers=arguments.layers,
                **options,
            )
            print(f"{data} split {seed}: {name}, {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
            test_rows = votes.test_mask(arguments.test_fraction, seed=seed)
            truth = town.true_prob[test_rows] if town else None
            for label, figures in read(name, ensemble, votes[test_rows], truth):
                rows.setdefault(label, []).append(figures)
        if town:
            random = random_annotators(town, test_rows, arguments.k, seed)
            figures = {"brier": random.brier, "corrected": random.brier_corrected, "true_error": random.true_error}
            rows.setdefault(f"{arguments.k} random annotators", []).append(figures)
    means = {label: {key: float(np.mean([row[key] for row in of])) for key in of[0]} for label, of in rows.items()}
    errors = {label: float(np.std([row["brier"] for row in of], ddof=1) / len(of) ** 0.5) if len(of) > 1 else 0.0
              for label, of in rows.items()}  # fmt: skip
    for label, mean in means.items():
        mean["standard_error"] = errors[label]
        mean["vs_soft_bt"] = mean["brier"] / means["soft_bt"]["brier"]
    noise = float(np.mean([row["noise"] for row in rows["soft_bt"]]))
    claims = list(check(rows, means, arguments.k))
    return {"rows": means, "noise": noise, "splits": arguments.seeds, "claims": claims}


def read(
    name: str, ensemble: RewardEnsemble, test: PreferenceSet, truth: Any
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (label, figures) of one fit: its sizes, and for the joint fit its policy level and the baselines."""
    record, evaluation = ensemble.record, ensemble.record.evaluation
    assert evaluation is not None
    fitting = (record.seconds or 0.0) - (record.seconds_encoding or 0.0)
    true_error = (
        {} if truth is None else {"true_error": calibration.brier(ensemble.prob_hat(test, record.level), truth)}
    )
    worst = evaluation.worst_disagreement() or 0.0
    for stage in record.history:
        last = stage.k == record.k
        extra = {"worst": worst, "seconds": fitting, **true_error} if last else {}
        if last or stage.k == 2 or (stage.k == 4 and name == "joint"):
            yield f"{name} k={stage.k}", {"brier": stage.test_brier, "corrected": stage.test_brier_corrected, **extra}
    if name == "joint":
        policy = evaluation.levels["policy"]
        figures = {"brier": policy.brier, "corrected": policy.brier_corrected, "worst": worst}
        yield f"joint k={record.k} read at policy level", figures
        for baseline, compared in evaluation.baselines.items():
            row = {"brier": compared.brier, "corrected": compared.brier_corrected}
            if compared.worst_disagreement is not None:
                row["worst"] = compared.worst_disagreement
            yield baseline, row | ({"noise": evaluation.test.noise} if baseline == "soft_bt" else {})
    if name in ("joint", "joint policy") and evaluation.voices and evaluation.voices.evidence is not None:
        gap = evaluation.voices.difference
        yield f"{VOICES}, {name}", {"brier": gap.mean, "corrected": gap.mean, "low": gap.low, "high": gap.high}
    if name == "joint policy":
        gap = evaluation.baselines["soft_bt"].difference
        figures = {"brier": gap.mean, "corrected": gap.mean, "low": gap.low, "high": gap.high}
        yield "policy level − soft BT", figures


def check(rows: dict[str, list[dict[str, float]]], means: dict[str, dict[str, float]], k: int) -> Iterator[str]:
    """Yield one line per comparison of the joint ensemble with other methods."""
    if joint := means.get(f"joint k={k}"):
        ratios = {name: joint["brier"] / means[name]["brier"] for name in ("soft_bt", "damped_bt") if name in means}
        yield f"joint k={k}: " + ", ".join(f"{ratio:.3f} × {name}" for name, ratio in ratios.items())
        yield f"worst member over all splits: {max(row['worst'] for row in rows[f'joint k={k}']):.3f}"
    for label, gap in rows.items():
        if label.startswith(VOICES):
            found = sum(row["high"] < 0 for row in gap)
            yield f"{label}: in {found} of {len(gap)} splits; ensemble − best single reward, 97.5 %: {spans_of(gap)}"
    if gap := rows.get("policy level − soft BT", []):
        spans = spans_of(gap)
        yield f"policy level − soft BT by split, with 95 % intervals over prompts: {spans}"


def spans_of(gap: list[dict[str, float]]) -> str:
    """Return the differences of all splits with their intervals."""
    return ", ".join(f"{row['brier']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]" for row in gap)


def rows_of(result: dict[str, Any]) -> list[Row]:
    """Return the rows of the table, best first."""
    names = {
        "brier": "Brier", "standard_error": "±", "corrected": "corrected", "vs_soft_bt": "× soft BT",
        "worst": "worst member", "true_error": "true error", "seconds": "seconds",
    }  # fmt: skip
    ordered = sorted(result["rows"].items(), key=lambda entry: entry[1]["brier"])
    shown = [(label, row) for label, row in ordered if not label.startswith(("policy level", VOICES))]
    return [{"": label, **{heading: row.get(key) for key, heading in names.items()}} for label, row in shown]


if __name__ == "__main__":
    main()
