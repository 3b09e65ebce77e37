"""Agreement of an encoder in bfloat16 with float32: vectors, votes of members, Brier scores, and speed.

    python benchmarks/precision.py [DATA] [--encoder minilm] [--seeds 10] [--json]

DATA is anything that ``pluralign fit`` reads (default: demo:1000). For each seed, which is also the seed of the split,
one ensemble is fitted in float32 and encodes its held-out texts in both precisions; a second one is fitted in bfloat16.
To show how much fits differ anyway, a third one is fitted on float32 vectors changed in their sixth digit.

Some CPUs report AMX and raise SIGILL on it. Disable AMX before Python starts with
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import pluralign
from pluralign import RewardEnsemble
from pluralign.core.arrays import Vectors
from pluralign.core.errors import PluralignError
from pluralign.ensemble.record import Evaluation
from pluralign.learning.options import FitOptions
from pluralign.text.encoders import Encoder, encode
from pluralign.text.features import TextFeatures
from pluralign.text.options import Precision
from pluralign.text.precision import agreement
from pluralign.theory import calibration
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.prompts import Item

MEANING = {
    "vectors_median_distance": "1 − cosine of the two vectors of a text, median",
    "vectors_largest_distance": "1 − cosine of the two vectors of a text, maximum",
    "vectors_agreement": "smallest cosine after subtracting the mean of all texts: the criterion of --precision auto",
    "votes_flipped": "share of (held-out pair, member) votes that change with texts in bfloat16",
    "share_moved": "mean absolute change of the predicted share of a held-out pair",
    "brier": "held-out Brier score of the float32 ensembles, mean over seeds",
    "brier_read_in_bfloat16": "same ensembles, with texts in bfloat16",
    "brier_fitted_in_bfloat16": "ensembles fitted and evaluated in bfloat16",
    "brier_fitted_with_noise": "ensembles fitted in float32 on vectors with relative noise of 1e-6",
    "error_fitted_in_bfloat16": "standard error of the mean difference between fits in bfloat16 and in float32",
    "error_fitted_with_noise": "standard error of the mean difference between fits with noise and in float32",
    "soft_bt": "held-out Brier score of the baseline soft BT in float32, mean over seeds",
    "soft_bt_in_bfloat16": "held-out Brier score of the baseline soft BT in bfloat16",
    "bfloat16_vs_float32": "texts per second of encoding, bfloat16 / float32",
}
PRECISIONS: tuple[Precision, Precision] = ("float32", "bfloat16")
REFITTED = ("fitted_in_bfloat16", "fitted_with_noise")
RELATIVE_NOISE = 1e-6
ROUNDS, TEXTS = 5, 64


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="demo:1000")
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--seeds", type=int, default=10, help="number of splits and fits, at least 2")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2, for a standard error")
    try:
        votes = pluralign.load_preferences(arguments.data)
        with tempfile.TemporaryDirectory() as cache:
            os.environ["PLURALIGN_CACHE"] = cache
            result = measure(votes, arguments.encoder, arguments.seeds)
    except PluralignError as error:
        raise SystemExit(str(error)) from None
    if arguments.json:
        print(json.dumps(result))
        return
    title = f"{arguments.encoder}, {result['pairs']:,} pairs, {result['texts']:,} texts, {arguments.seeds} seeds"
    table = Table("", "", "meaning", box=box.SIMPLE_HEAD, title=title)
    for name, meaning in MEANING.items():
        table.add_row(name, f"{result[name]:.2g}" if "distance" in name else f"{result[name]:.4f}", meaning)
    Console(width=140).print(table)


def measure(votes: PreferenceSet, encoder: str, seeds: int) -> dict[str, Any]:
    """Return every figure of ``MEANING``, and the sizes of the data."""
    texts = texts_of(votes)
    encoders = [TextFeatures(encoder, precision=precision).load() for precision in PRECISIONS]
    exact, half = (encode(texts, each, surface=False) for each in encoders)
    cosine = np.sum(exact * half, axis=1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(half, axis=1)
    runs = [fitted(votes, FitOptions(encoder=encoder, seed=seed)) for seed in range(seeds)]
    return {
        "vectors_median_distance": float(np.median(1 - cosine)),
        "vectors_largest_distance": float(np.max(1 - cosine)),
        "vectors_agreement": agreement(exact, half),
        **{name: statistics.mean(run[name] for run in runs) for name in runs[0]},
        **{f"error_{name}": standard_error([run[f"brier_{name}"] - run["brier"] for run in runs]) for name in REFITTED},
        "bfloat16_vs_float32": speedup(encoders, texts[:TEXTS]),
        "encoder": encoder,
        "pairs": len(votes),
        "texts": len(texts),
        "seeds": seeds,
    }


def fitted(votes: PreferenceSet, options: FitOptions) -> dict[str, float]:
    """Return the figures of one split; all vectors are cached."""
    held = votes.split(options.test_fraction, seed=options.seed)[1]
    exact, half = (pluralign.fit(votes, replace(options, precision=precision)) for precision in PRECISIONS)
    with patch("pluralign.text.features.encode", noisy):
        other = pluralign.fit(votes, options)
    in_half = replace(exact, features=half.features)
    brier, brier_half, brier_other = (_evaluation(ensemble).test.brier for ensemble in (exact, half, other))
    soft_bt = [_evaluation(ensemble).baselines["soft_bt"].brier for ensemble in (exact, half)]
    return {
        "votes_flipped": float(np.mean(exact.votes(held) != in_half.votes(held))),
        "share_moved": float(np.mean(np.abs(exact.prob_hat(held) - in_half.prob_hat(held)))),
        "brier": brier,
        "brier_read_in_bfloat16": calibration.brier(in_half.prob_hat(held), held.prob_a),
        "brier_fitted_in_bfloat16": brier_half,
        "brier_fitted_with_noise": brier_other,
        "soft_bt": soft_bt[0],
        "soft_bt_in_bfloat16": soft_bt[1],
    }


def _evaluation(ensemble: RewardEnsemble) -> Evaluation:
    assert ensemble.record.evaluation is not None
    return ensemble.record.evaluation


def standard_error(differences: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return statistics.stdev(differences) / math.sqrt(len(differences))


def noisy(*arguments: Any, **options: Any) -> Vectors:
    """Return the vectors of ``encode`` with relative noise of one millionth."""
    vectors = encode(*arguments, **options)
    noise = np.random.default_rng(0).standard_normal(vectors.shape, dtype=np.float32)
    return np.asarray(vectors * (1 + np.float32(RELATIVE_NOISE) * noise))


def speedup(encoders: Sequence[Encoder | None], texts: Sequence[Item]) -> float:
    """Return the speedup of the second encoder over the first, timed alternately with loaded models."""
    ratios = []
    for _ in range(ROUNDS):
        seconds = []
        for encoder in encoders:
            started = time.perf_counter()
            encode(texts, encoder, surface=False, cache=False)
            seconds.append(time.perf_counter() - started)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


if __name__ == "__main__":
    main()
