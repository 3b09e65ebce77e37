"""How well an encoder in bfloat16 agrees with float32: vectors, votes of members, Brier, and speed.

    python benchmarks/precision.py [DATA] [--encoder minilm] [--seeds 10] [--json]

DATA is anything that ``pluralign fit`` reads; demo:1000 unless given. For each seed, which is also that of the
split, one ensemble is fitted in float32 and reads its held-out texts in both precisions; another is fitted in bfloat16
altogether; and, to see how much fits differ anyway, a third on float32 vectors that were nudged in their sixth digit.

A CPU that dies of AMX that it claims to have can be told to do without it before Python starts:
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
from pluralign.ensemble.ensemble import texts_of
from pluralign.features.encoder import Encoder, encode
from pluralign.features.frozen import TextFeatures
from pluralign.features.options import Precision
from pluralign.features.precision import agreement
from pluralign.fitting.saving import held_out_rows
from pluralign.theory import calibration
from pluralign.training.options import FitOptions
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Item

MEANING = {
    "vectors_median_distance": "1 − cosine of a text's two vectors, median",
    "vectors_largest_distance": "the same, largest",
    "vectors_agreement": "least cosine once the mean of all texts is taken off: what --precision auto asks for",
    "votes_flipped": "share of (held-out pair, member) votes that change when texts are read in bfloat16",
    "share_moved": "how far the predicted share of a held-out pair moves then, mean",
    "brier": "held-out Brier of the float32 ensembles, mean over seeds",
    "brier_read_in_bfloat16": "of the same ensembles, texts read in bfloat16",
    "brier_fitted_in_bfloat16": "of ensembles fitted and read in bfloat16",
    "brier_fitted_nudged": "of ensembles fitted in float32, vectors nudged by 1e-6 of themselves",
    "error_fitted_in_bfloat16": "standard error of the mean difference between fits in bfloat16 and in float32",
    "error_fitted_nudged": "the same for nudged fits and float32",
    "soft_bt": "held-out Brier of the baseline soft BT in float32, mean over seeds",
    "soft_bt_in_bfloat16": "the same in bfloat16",
    "bfloat16_vs_float32": "texts a second of encoding, bfloat16 over float32",
}
PRECISIONS: tuple[Precision, Precision] = ("float32", "bfloat16")
REFITTED = ("fitted_in_bfloat16", "fitted_nudged")
NUDGE = 1e-6
ROUNDS, TEXTS = 5, 64


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="demo:1000")
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--seeds", type=int, default=10, help="how many splits and fits, at least 2")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2: their spread is the error")
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
    table = Table("", "", "what", box=box.SIMPLE_HEAD, title=title)
    for name, meaning in MEANING.items():
        table.add_row(name, f"{result[name]:.2g}" if "distance" in name else f"{result[name]:.4f}", meaning)
    Console(width=140).print(table)


def measure(votes: PreferenceSet, encoder: str, seeds: int) -> dict[str, Any]:
    """Return every figure of ``MEANING``, and what they are about."""
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
    """Return what one split says; all vectors are in the cache."""
    held = votes[np.flatnonzero(held_out_rows(votes, options))]
    exact, half = (pluralign.fit(votes, replace(options, precision=precision)) for precision in PRECISIONS)
    with patch("pluralign.features.frozen.encode", nudged):
        other = pluralign.fit(votes, options)
    reread = replace(exact, features=half.features)
    brier, brier_half, brier_other = (_brier(ensemble) for ensemble in (exact, half, other))
    soft_bt = [ensemble.facts["baselines"]["soft_bt"]["brier"] for ensemble in (exact, half)]
    return {
        "votes_flipped": float(np.mean(exact.votes(held) != reread.votes(held))),
        "share_moved": float(np.mean(np.abs(exact.prob_hat(held) - reread.prob_hat(held)))),
        "brier": brier,
        "brier_read_in_bfloat16": calibration.brier(reread.prob_hat(held), held.prob_a),
        "brier_fitted_in_bfloat16": brier_half,
        "brier_fitted_nudged": brier_other,
        "soft_bt": soft_bt[0],
        "soft_bt_in_bfloat16": soft_bt[1],
    }


def _brier(ensemble: RewardEnsemble) -> float:
    return float(ensemble.facts["test"]["brier"])


def standard_error(differences: Sequence[float]) -> float:
    """Return that of their mean."""
    return statistics.stdev(differences) / math.sqrt(len(differences))


def nudged(*arguments: Any, **options: Any) -> Vectors:
    """Return what ``encode`` returns, each number moved by about a millionth of itself."""
    vectors = encode(*arguments, **options)
    noise = np.random.default_rng(0).standard_normal(vectors.shape, dtype=np.float32)
    return np.asarray(vectors * (1 + np.float32(NUDGE) * noise))


def speedup(encoders: Sequence[Encoder | None], texts: Sequence[Item]) -> float:
    """Return how much faster the second encoder is, timed in turn; the models are loaded already."""
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
