"""How well slates, consensus and sampled answers match people's full rankings, on held-out questions.

    python benchmarks/pluralism.py VOTES RANKINGS [--seeds 3] [--k 8] [--encoder minilm] [--json]

VOTES are the pairs that the ensemble is trained on. RANKINGS is JSON Lines of {question, statements: {id: text},
rankings: [[id, …], …]}: full rankings of the same statements by several people. Questions in the test split of VOTES
are used for evaluation, all others for training. Pairwise calibration does not guarantee these figures (the paper's
Discussion): they are higher-order judgments. Intervals are 95 % over questions; rows that start with "−" are paired
differences to the named baseline.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import pluralign
from pluralign.answering.answer import favourites, policy
from pluralign.answering.consensus import slate
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.evaluation.measure import baselines_of
from pluralign.theory.intervals import clustered_interval
from pluralign.theory.kendall import weight_on_tops
from pluralign.theory.social_choice import RULES, choose, pairwise_support

TOP_HALF = "consensus, in the top half of a person's ranking: "
METHODS: dict[str, dict[str, Any]] = {
    "joint": {"method": "joint"},
    "joint policy": {"method": "joint", "level": "policy"},
    "stagewise printed": {"method": "stagewise", "variant": "printed"},
}


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("votes")
    parser.add_argument("rankings", type=Path)
    parser.add_argument("--seeds", type=int, default=3, help="number of splits")
    parser.add_argument("--test-fraction", type=float, default=0.2)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    votes = pluralign.load_preferences(arguments.votes)
    groups = read_rankings(arguments.rankings)
    measured: dict[str, list[tuple[int, float]]] = {}
    for seed in range(arguments.seeds):
        for name in arguments.methods.split(","):
            options = {"k": arguments.k, "seed": seed, "test_fraction": arguments.test_fraction, **METHODS[name]}
            ensemble = pluralign.fit(votes, encoder=arguments.encoder, **options)
            mask = votes.test_mask(arguments.test_fraction, seed=seed)
            test_questions = {str(votes.prompts[i]) for i in np.unique(votes.prompt_index[mask])}
            judged = [group for group in groups if group["question"] in test_questions]
            for question, figure, value in judge(name, ensemble, judged, seed):
                measured.setdefault(figure, []).append((question, value))
    results = {figure: interval(rows) for figure, rows in measured.items()}
    results |= differences(measured)
    if arguments.json:
        print(json.dumps(results))
        return
    table = Table(box=box.SIMPLE_HEAD, title=f"{len(groups):,} groups of people, {arguments.seeds} splits by question")
    for heading in ("", "mean", "95 % over questions"):
        table.add_column(heading, justify="left" if not heading else "right")
    for figure, row in results.items():
        table.add_row(figure, f"{row['mean']:.4f}", f"{row['low']:.4f} – {row['high']:.4f}")
    Console(width=120).print(table)


def read_rankings(path: Path) -> list[dict[str, Any]]:
    """Read groups of people: each has a question, distinct statements and full rankings of them."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    groups = [json.loads(line) for line in data.splitlines()]
    kept = []
    for group in groups:
        names = list(group["statements"])
        if len({group["statements"][name] for name in names}) == len(names) > 1:
            place = {str(name): i for i, name in enumerate(names)}
            orders = [[place[str(name)] for name in order] for order in group["rankings"]]
            kept.append({"question": group["question"], "texts": [group["statements"][n] for n in names],
                         "orders": orders})  # fmt: skip
    return kept


def judge(name: str, ensemble: RewardEnsemble, groups: list[dict[str, Any]], seed: int) -> Any:
    """Yield (question, figure, value) for every group of people."""
    soft_bt = baselines_of(ensemble)["soft_bt"]
    texts = [(group["question"], text) for group in groups for text in group["texts"]]
    features = ensemble.features(texts)
    rewards, inputs = ensemble.members.rewards(features), ensemble.members.inputs(features)
    one = inputs @ soft_bt.arrays["theta"] / float(np.ravel(soft_bt.arrays["temperature"])[0])
    questions = {question: i for i, question in enumerate(dict.fromkeys(group["question"] for group in groups))}
    start, first = 0, name == next(iter(METHODS))
    random = np.random.default_rng(seed)
    for group in groups:
        n, question = len(group["texts"]), 10_000 * seed + questions[group["question"]]
        own, single = rewards[start : start + n], one[start : start + n]
        start += n
        people = np.bincount([order[0] for order in group["orders"]], minlength=n) / len(group["orders"])
        tops = weight_on_tops(own, ensemble.weights)
        lottery = np.exp(single - single.max())
        lottery /= lottery.sum()
        if ensemble.level == "policy":
            sampled = np.column_stack([policy(own[:, j], ensemble.temperature) for j in range(ensemble.k)])
            mixture = sampled @ ensemble.weights
            yield question, f"first choices, total variation: {name}, sampled policies", variation(mixture, people)
        yield question, f"first choices, total variation: {name}, random member", variation(tops, people)
        entries = slate(group["texts"], favourites(own, random), ensemble.weights)
        shown = [group["texts"].index(entry.text) for entry in entries]
        yield question, f"slate contains a person's favourite: {name}", float(people[shown].sum())
        yield question, f"slate size: {name}", float(len(shown))
        if ensemble.level == "policy":
            likely = np.argsort(-mixture)[: len(shown)]
            yield (
                question,
                f"slate contains a person's favourite: {name}, most likely responses (same size)",
                float(people[likely].sum()),
            )
        order = np.argsort(-single)
        yield question, f"slate contains a person's favourite: top of soft BT (same size as {name})", float(
            people[order[: len(shown)]].sum())  # fmt: skip
        yield question, f"slate contains a person's favourite: random (same size as {name})", len(shown) / n
        support = pairwise_support(own, ensemble.weights)
        for rule in RULES:
            winner = choose(support, rule, seed)
            yield question, f"consensus, pairwise wins: {name}, {rule}", contests(winner, group["orders"])
            yield (
                question,
                f"{TOP_HALF}{name}, {rule}",
                top_half(winner, group["orders"]),
            )
        if first:
            yield question, "first choices, total variation: Plackett–Luce from soft BT", variation(lottery, people)
            best = np.zeros(n)
            best[int(single.argmax())] = 1.0
            yield question, "first choices, total variation: always the top of soft BT", variation(best, people)
            yield question, "first choices, total variation: uniform", variation(np.full(n, 1 / n), people)
            winner = int(single.argmax())
            yield (
                question,
                "consensus, pairwise wins: top of soft BT",
                contests(winner, group["orders"]),
            )
            yield (
                question,
                f"{TOP_HALF}top of soft BT",
                top_half(winner, group["orders"]),
            )


def variation(p: Any, q: Any) -> float:
    """Return the total variation distance of two distributions."""
    return float(np.abs(np.asarray(p) - np.asarray(q)).sum() / 2)


def contests(winner: int, orders: list[list[int]]) -> float:
    """Return the share of (person, other statement) comparisons that a statement wins."""
    return float(np.mean([(len(order) - 1 - order.index(winner)) / (len(order) - 1) for order in orders]))


def top_half(winner: int, orders: list[list[int]]) -> float:
    """Return the share of people who rank a statement in the top half."""
    return float(np.mean([order.index(winner) < len(order) / 2 for order in orders]))


def interval(rows: list[tuple[int, float]]) -> dict[str, float]:
    """Return the mean and its 95 % interval over questions."""
    found = clustered_interval([value for _, value in rows], [question for question, _ in rows])
    return {"mean": found.mean, "low": found.low, "high": found.high, "groups": len(rows)}


def differences(measured: dict[str, list[tuple[int, float]]]) -> dict[str, dict[str, float]]:
    """Return the paired difference of each figure to its baseline."""
    rivals = {
        "first choices, total variation: ": "first choices, total variation: Plackett–Luce from soft BT",
        "consensus, pairwise wins: ": "consensus, pairwise wins: top of soft BT",
        TOP_HALF: f"{TOP_HALF}top of soft BT",
    }
    found = {}
    for figure, rows in measured.items():
        rival = next((other for start, other in rivals.items() if figure.startswith(start)), None)
        if figure.startswith("slate contains a person's favourite: ") and "same size as" not in figure:
            name = figure.rpartition(": ")[2].removesuffix(", most likely responses (same size)")
            rival = f"slate contains a person's favourite: top of soft BT (same size as {name})"
        if rival and rival != figure and len(measured.get(rival, [])) == len(rows):
            paired = [(q, a - b) for (q, a), (_, b) in zip(rows, measured[rival], strict=True)]
            found[f"− {figure} minus {rival.rpartition(': ')[2]}"] = interval(paired)
    return found


if __name__ == "__main__":
    main()
