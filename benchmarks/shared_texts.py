"""Does reading each text once per step change the result? Joint members trained in both ways, on held-out prompts.

    python benchmarks/shared_texts.py [--pairs 1000] [--seeds 3] [--backbone minilm] [--json]

Both ways train k = 8 joint members with a fresh head on the same pairs of a town hall, with the same options. One takes
whole prompts per step and reads each of their texts once. The other takes pairs in random order and reads both texts of
each. Every seed has another split and another start. Printed: the true error of the members' hard votes on held-out
prompts, their difference with its interval by prompt, and the ratio of training times.
"""

import argparse
import json
import os
import sys
from contextlib import redirect_stdout
from typing import Any

import numpy as np
from finetuning_speed import K, both_ways, train

import pluralign
from pluralign.core.arrays import FloatArray
from pluralign.learning.options import FinetuneOptions
from pluralign.text.classifier import classifier_rewards
from pluralign.theory.intervals import paired_difference
from pluralign.votes.preferences import texts_of

TEST_FRACTION = 0.3


def main() -> None:
    """Run the benchmark and print its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000, help="pairs of the town hall")
    parser.add_argument("--seeds", type=int, default=3, help="number of splits")
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--batch-size", type=int, default=16, help="pairs per step")
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with redirect_stdout(sys.stderr):  # the Trainer prints
        rows = [measure(seed, arguments) for seed in range(arguments.seeds)]
    shared, both = (np.concatenate([row["errors"][way] for row in rows]) for way in range(2))
    difference = paired_difference(shared, both, np.concatenate([row["prompts"] for row in rows]))
    half = float(np.mean(np.concatenate([row["half"] for row in rows])))
    result: dict[str, Any] = {
        "shared": float(shared.mean()), "both": float(both.mean()), "half": half,
        "difference": [difference.mean, difference.low, difference.high],
        "speed": [row["seconds"][1] / row["seconds"][0] for row in rows],
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(result))
        return
    print(
        f"true error on held-out prompts: each text once {result['shared']:.4f}, both texts of every pair "
        f"{result['both']:.4f} (constant 1/2: {half:.4f}); difference {difference.mean:+.4f} "
        f"[{difference.low:+.4f}, {difference.high:+.4f}]; "
        f"speed {', '.join(f'{ratio:.2f} ×' for ratio in result['speed'])}"
    )


def measure(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in both ways on one split; return the squared errors on its held-out prompts and the seconds."""
    town = pluralign.town_hall(arguments.pairs)
    votes, rows = town.preferences, town.preferences.test_mask(TEST_FRACTION, seed=seed)
    test, truth = votes[rows], town.true_prob[rows]
    tuning = FinetuneOptions(
        backbone=arguments.backbone, optimizer="adamw", fresh_head=True, batch_size=arguments.batch_size,
        max_length=arguments.max_length, learning_rate=arguments.learning_rate,
    )  # fmt: skip
    seconds, errors = [], []
    for pairs in both_ways(votes[~rows]):
        time, trainer = train(pairs, K, tuning, seed)
        model: Any = trainer.model
        model.eval()
        items = test.items()
        rewards = classifier_rewards(model, trainer.processing_class, texts_of(test), arguments.max_length)
        seconds.append(time)
        errors.append((shares(rewards[:, :K], items.a, items.b) - truth) ** 2)
        print(f"split {seed}: error {errors[-1].mean():.4f}, {time:.0f} s", file=sys.stderr, flush=True)
    return {"seconds": seconds, "errors": errors, "prompts": votes.prompt_index[rows], "half": (truth - 0.5) ** 2}


def shares(rewards: FloatArray, a: Any, b: Any) -> FloatArray:
    """Return the share of equally weighted members that prefer response a, ``(n,)``."""
    return np.asarray((0.5 + 0.5 * np.sign(rewards[a] - rewards[b])).mean(axis=1))


if __name__ == "__main__":
    main()
