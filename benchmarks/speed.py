"""Speed of encoding, fitting and comparing, as ratios to reference computations in the same run.

    python benchmarks/speed.py [DATA] [--pairs 4000] [--quick] [--json]

DATA is anything that ``pluralign fit`` reads (default: the town hall). The two sides of a ratio are timed alternately,
A B A B …, on the same texts, after a warm-up, in one process. A ratio is the median over rounds; its spread is given by
quartiles. Compare ratios, not seconds: the speed of a shared machine varies.
"""

import argparse
import io
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from tables import show
from threadpoolctl import threadpool_limits

import pluralign
from pluralign import RewardEnsemble
from pluralign.ensemble.members import fit_feature_map
from pluralign.learning.bradley_terry import fit_teacher
from pluralign.learning.joint import FROM_TEACHER, train_joint
from pluralign.learning.pairs import Pairs, validation_folds
from pluralign.learning.stagewise import stages
from pluralign.scale.lines import ComparedLine, compare
from pluralign.text import surface
from pluralign.text.encoders import encode, load_encoder
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.prompts import Item, plain_text

TARGETS = {
    "encode_vs_sentence_transformers": "≥ 1.5",
    "fit_vs_encode": "≤ 1.15",
    "refit_vs_fit": "≤ 0.1",
    "help_seconds": "< 0.3",
}
MEANING = {
    "encode_vs_sentence_transformers": "texts per second, this library / SentenceTransformer.encode with defaults",
    "encode_vs_gemm_peak": "FLOP per second, encoding / a large matrix product",
    "sentence_transformers_vs_gemm_peak": "FLOP per second, SentenceTransformer.encode / a large matrix product",
    "fit_vs_encode": "seconds, fit with an empty cache / encoding its distinct texts once",
    "refit_vs_fit": "seconds, fit with cached vectors / fit with an empty cache",
    "joint_vs_stagewise": "seconds, k = 8: teacher and joint members / stages at one l2",
    "joint_vs_logistic": "seconds, k = 8: teacher and joint members / one LogisticRegression on weighted rows",
    "compare_vs_encode": "texts per second, compare / encoding alone",
    "help_seconds": "pluralign --help, in a new process",
    "help_cpu_seconds": "CPU seconds of pluralign --help",
    "compare_one_pair_seconds": "pluralign compare on one new pair, in a new process",
}
K, L2 = 8, 0.01
GEMM = 1536
Timed: TypeAlias = Callable[[], Any]
Spread: TypeAlias = tuple[float, float, float]
"""First quartile, median, third quartile."""


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="demo")
    parser.add_argument(
        "--pairs", type=int, help="number of pairs to fit (default: 4,000 of the town hall, all of a file)"
    )
    parser.add_argument("--quick", action="store_true", help="150 pairs and few rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    votes = read(arguments.data, arguments.pairs or (150 if arguments.quick else None))
    with tempfile.TemporaryDirectory() as folder, cache_in(Path(folder)):
        result = measure(votes, rounds=3 if arguments.quick else 7, texts=32 if arguments.quick else 256)
    if arguments.json:
        print(json.dumps(result))
        return
    title = f"{result['pairs']:,} pairs, {result['texts']:,} texts, {result['cores']} cores, load {result['load']:.1f}"
    quartiles = {name: f"{low:.2f} – {high:.2f}" for name, (low, high) in result["spread"].items()}
    rows = [
        {"": name, "median": result[name], "quartiles": quartiles[name], "target": TARGETS.get(name, ""), "is": meaning}
        for name, meaning in MEANING.items()
    ]
    show(rows, title)


def read(data: str, pairs: int | None) -> PreferenceSet:
    """Return a town hall of that many pairs, or the first pairs of a file."""
    name, _, number = data.partition(":")
    if name == "demo":
        return pluralign.town_hall(pairs or int(number or 4000)).preferences
    votes = pluralign.load_preferences(data)
    return votes[np.arange(min(pairs or len(votes), len(votes)))]


def measure(votes: PreferenceSet, *, rounds: int, texts: int) -> dict[str, Any]:
    """Return every ratio with its spread; each round of the encoding part encodes ``texts`` texts."""
    everything = texts_of(votes)
    encoder = load_encoder("minilm", layers="last")  # the vectors that sentence-transformers gives
    assert isinstance(encoder, ModelEncoder)
    few = max(1, rounds // 3)
    spreads = encoding(encoder, everything, rounds, texts)
    spreads |= fitting(encoder, votes, everything, few)
    spreads |= learning(votes, rounds)
    spreads |= comparing(encoder, votes, few, texts // 4)
    return {
        **{name: spreads[name][1] for name in MEANING},
        "spread": {name: [spreads[name][0], spreads[name][2]] for name in MEANING},
        "pairs": len(votes),
        "texts": len(everything),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


# --- the parts --------------------------------------------------------------------------------------------------------


def encoding(encoder: ModelEncoder, items: Sequence[Item], rounds: int, texts: int) -> dict[str, Spread]:
    """Time this library, sentence-transformers and a matrix product, on other texts in every round."""
    import sentence_transformers
    import torch

    theirs = sentence_transformers.SentenceTransformer(str(encoder.folder))
    theirs.tokenizer.truncation_side = "left"  # both use the same tokens
    order = np.random.default_rng(0).permutation(len(items))
    taken = itertools.cycle([order[start : start + texts] for start in range(0, max(1, len(order) - texts + 1), texts)])
    matrix = torch.randn(GEMM, GEMM)
    difference, ratio, peak, their_peak = 0.0, [], [], []
    for turn in range(rounds + 1):
        part = [items[index] for index in next(taken)]
        plain = [plain_text(*item) for item in part]
        own, vectors = timed(partial(encoder.encode, part))
        product, _ = timed(lambda: [matrix @ matrix for _ in range(20)])
        other, reference = timed(partial(theirs.encode, plain, show_progress_bar=False))
        difference = max(difference, float(np.abs(vectors - reference).max()))
        if turn:  # the first round is the warm-up
            ratio.append(other / own)
            work = operations(encoder.folder, theirs.tokenizer, theirs.max_seq_length, plain)
            limit = 20 * 2 * GEMM**3 / product
            peak.append(work / own / limit)
            their_peak.append(work / other / limit)
    if difference > 1e-5:
        sys.exit(f"the vectors differ from those of sentence-transformers by {difference:.1e}")
    return {
        "encode_vs_sentence_transformers": spread(ratio),
        "encode_vs_gemm_peak": spread(peak),
        "sentence_transformers_vs_gemm_peak": spread(their_peak),
    }


def operations(folder: Path, tokenizer: Any, most: int | None, texts: list[str]) -> float:
    """Return the floating-point operations of the matrix products of a BERT for these texts, without padding.

    A token costs 2·(4h² + 2hi) per layer with hidden size h and intermediate size i; attention costs 4h per pair of
    tokens.
    """
    config = json.loads((folder / "config.json").read_text())
    width, inside, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    lengths = [len(ids) for ids in tokenizer(texts, truncation=True, max_length=most)["input_ids"]]
    return float(sum(layers * (2 * (4 * width**2 + 2 * width * inside) * n + 4 * width * n**2) for n in lengths))


def fitting(encoder: ModelEncoder, votes: PreferenceSet, items: Sequence[Item], rounds: int) -> dict[str, Spread]:
    """Time one encoding pass, a fit with an empty cache, and a second fit."""
    first, again = [], []
    for _ in range(rounds):
        with fresh_cache():
            alone, _ = timed(lambda: encode(items, encoder, surface=False, cache=False))
            whole, _ = timed(lambda: pluralign.fit(votes, k=K))
            cached, _ = timed(lambda: pluralign.fit(votes, k=K))
        first.append(whole / alone)
        again.append(cached / whole)
    return {"fit_vs_encode": spread(first), "refit_vs_fit": spread(again)}


def learning(votes: PreferenceSet, rounds: int) -> dict[str, Spread]:
    """Time joint members, stages and one logistic regression on the same features with one thread."""
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    items = votes.items()
    features = encode(texts_of(votes), load_encoder("minilm", layers="last"))
    inputs = fit_feature_map(features, len(surface.NAMES), np.ones(len(features), dtype=bool))(features)
    pairs = Pairs(inputs, items.a, items.b, votes.prob_a, votes.prompt_index)
    folds = validation_folds(pairs.prompt, 0)
    difference = np.asarray(inputs[items.a] - inputs[items.b])
    rows, labels = np.concatenate([difference, difference]), np.repeat([1, 0], len(difference))
    weight = np.concatenate([votes.prob_a, 1 - votes.prob_a])
    logistic = LogisticRegression(C=1 / (L2 * len(difference)), fit_intercept=False, max_iter=1000)

    # New pairs each time, because they cache their results.
    def joint() -> Any:
        own = replace(pairs)
        return train_joint(own, fit_teacher(own, folds, mixture=False), K, FROM_TEACHER)

    def stagewise() -> Any:
        return list(stages(replace(pairs).difference, votes.prob_a, K, l2=L2))

    to_stages, to_logistic = [], []
    with threadpool_limits(1):
        for turn in range(rounds + 1):
            ours, _ = timed(joint)
            staged, _ = timed(stagewise)
            single, _ = timed(lambda: logistic.fit(rows, labels, weight))
            if turn:
                to_stages.append(ours / staged)
                to_logistic.append(ours / single)
    return {"joint_vs_stagewise": spread(to_stages), "joint_vs_logistic": spread(to_logistic)}


def comparing(encoder: ModelEncoder, votes: PreferenceSet, rounds: int, texts: int) -> dict[str, Spread]:
    """Time ``compare``, encoding alone, and the start of the command line."""
    names = ("prompt", "response_a", "response_b")
    lines = [
        json.dumps(dict(zip(names, (votes.prompts[p], votes.responses[a], votes.responses[b]), strict=True)))
        for p, a, b in zip(votes.prompt_index, votes.a_index, votes.b_index, strict=True)
        if isinstance(votes.prompts[p], str)
    ]
    rates, one_pair = [], []
    with tempfile.TemporaryDirectory() as folder:
        ensemble = pluralign.fit(votes, k=2, folder=folder)
        for turn in range(rounds + 2):
            part = lines[turn * texts : (turn + 1) * texts] or lines[:texts]
            records = [json.loads(line) for line in part]
            items = list(dict.fromkeys((record["prompt"], record[side]) for record in records for side in names[1:]))
            with fresh_cache():
                alone, _ = timed(partial(encode, items, encoder, surface=False, cache=False))
                whole, _ = timed(partial(compare_lines, ensemble, part))
                if turn:
                    rates.append(alone / whole)
        helped = [timed(partial(run, "--help")) for _ in range(rounds + 2)]
        for _ in range(rounds):
            with fresh_cache():
                one_pair.append(timed(partial(run, "compare", folder, "-", lines=lines[0]))[0])
    return {
        "compare_vs_encode": spread(rates),
        "help_seconds": spread([seconds for seconds, _ in helped]),
        "help_cpu_seconds": spread([worked for _, worked in helped]),
        "compare_one_pair_seconds": spread(one_pair),
    }


def compare_lines(ensemble: RewardEnsemble, lines: Sequence[str]) -> list[ComparedLine]:
    """Return what ``pluralign compare`` prints for these lines."""
    return list(compare(ensemble, io.BytesIO("\n".join(lines).encode())))


# --- timing -----------------------------------------------------------------------------------------------------------


def timed(work: Timed) -> tuple[float, Any]:
    """Return the duration of a call in seconds, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def spread(values: Sequence[float]) -> Spread:
    """Return first quartile, median and third quartile."""
    low, high = np.percentile(values, [25, 75]).tolist()
    return low, statistics.median(values), high


def run(*command: str, lines: str = "") -> float:
    """Run ``pluralign`` in its own process and return its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "pluralign", *command], input=lines.encode(), capture_output=True, check=False
    )
    if done.returncode:
        sys.exit(f"pluralign {' '.join(command)} failed: {done.stderr.decode()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """Cache vectors in a folder inside the block."""
    before = os.environ.get("PLURALIGN_CACHE")
    os.environ["PLURALIGN_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PLURALIGN_CACHE"]
        else:
            os.environ["PLURALIGN_CACHE"] = before


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Use an empty cache inside the block."""
    with tempfile.TemporaryDirectory() as folder, cache_in(Path(folder)):
        yield


if __name__ == "__main__":
    main()
