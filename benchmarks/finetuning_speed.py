"""Speed of fine-tuning: pairs per second of joint members, of other ways to train them, and of TRL's RewardTrainer.

    python benchmarks/finetuning_speed.py [HABERMAS.jsonl] [--backbone minilm] [--pairs 384] [--rounds 3] [--json]

All ways train on the same pairs with the same model, length, precision, optimiser and pairs per step. They take turns;
ratios are medians over rounds, so that a busy machine slows all of them. Only training is timed: no loading, no
tokenisation, no evaluation.

- joint, k = 8: a classifier with k outputs, one epoch. Each text of a prompt is read once per step.
- one member: the same with one output.
- both texts of every pair: joint, with pairs in random order and both texts read for each.
- TRL RewardTrainer: one reward, trained on the majority's choice, one epoch.
- attention pooling: what ``fit --backbone`` does with a sentence encoder. Each text is read once, then 8 epochs.

For joint training the table also has the share of padding among the tokens that were read, and the achieved operations
per second relative to those of a large matrix product in the same run ("of peak"): 6 × tokens × parameters without
embeddings / seconds, tokens without padding. Attention, the optimiser and the Trainer count as lost time.

Shapes: ``town hall`` (8 pairs of 6 responses per prompt), ``PersonalLLM`` (28 pairs of 8 responses), and the file.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import pluralign
from pluralign.core.arrays import FloatArray
from pluralign.core.checkpoints import Checkpoints
from pluralign.ensemble.members import identity_map
from pluralign.learning.backbone.losses import MixtureLoss, PairLessons, StageLoss, VoteLoss
from pluralign.learning.backbone.recipe import TextPairs, length_groups, training_plan
from pluralign.learning.backbone.train import CPU_PASS, MICRO_BATCH, PairTrainer, Training, prepare_run
from pluralign.learning.options import FinetuneOptions
from pluralign.learning.trained_pooling import ON_PAIRS, Start, train_attention
from pluralign.text.classifier import classifier_tokens
from pluralign.text.encoders import TextFeatures
from pluralign.text.loading import quiet_transformers
from pluralign.text.options import middle_layer
from pluralign.text.states import read_token_states
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.preferences import PreferenceSet, texts_of

K = 8
JOINT, ONE, BOTH, TRL = f"joint, k = {K}", "one member", "both texts of every pair", "TRL RewardTrainer"
POOLING = "attention pooling"
PRODUCT = 2048
"""Rows of the large matrix product."""
WAYS = (JOINT, ONE, BOTH, TRL, POOLING)


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("votes", nargs="?", help="a file of votes, such as Habermas")
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--pairs", type=int, default=384, help="approximate number of pairs, in whole prompts")
    parser.add_argument("--batch-size", type=int, default=64, help="pairs per step")
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    shapes = {
        "town hall": pluralign.town_hall(arguments.pairs).preferences,
        "PersonalLLM": pluralign.town_hall(arguments.pairs, n_responses_per_prompt=8, pairs_per_prompt=28).preferences,
    }
    if arguments.votes:
        shapes[Path(arguments.votes).stem] = slice_of(pluralign.load_preferences(arguments.votes), arguments.pairs)
    with redirect_stdout(sys.stderr):  # the Trainer prints
        results = {name: measure(name, votes, arguments) for name, votes in shapes.items()}
    if arguments.json:
        print(json.dumps(results))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "pairs", "texts", *(f"{name}, pairs/s" for name in WAYS), "padding", "of peak"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, row in results.items():
        rates = (f"{row['pairs_per_second'][way]:.1f}" for way in WAYS)
        used = (f"{row['padding']:.1%}", f"{row['of_peak']:.2f}")
        table.add_row(name, f"{row['pairs']:,}", f"{row['texts']:,}", *rates, *used)
    console = Console(width=140)
    console.print(table)
    for name, row in results.items():
        console.print(
            f"{name}: joint is {row['over_both_texts']:.2f} × both texts of every pair, "
            f"{row['over_trl']:.2f} × TRL; its time per pair is {row['over_one_member']:.2f} × one member's; "
            f"attention pooling is {row['pooling_over_trl']:.2f} × TRL"
        )


def slice_of(votes: PreferenceSet, pairs: int) -> PreferenceSet:
    """Return about so many pairs, in whole prompts."""
    order = np.random.default_rng(0).permutation(len(votes.prompts))
    sizes = np.bincount(votes.prompt_index, minlength=len(votes.prompts))[order]
    kept = order[: int(np.searchsorted(np.cumsum(sizes), pairs)) + 1]
    return votes[np.isin(votes.prompt_index, kept)]


def measure(name: str, votes: PreferenceSet, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the speed of all ways on one set of pairs."""
    shared, alone = both_ways(votes)
    ways: dict[str, Callable[[], float]] = {
        JOINT: lambda: ours(shared, K, arguments),
        ONE: lambda: ours(shared, 0, arguments),
        BOTH: lambda: ours(alone, K, arguments),
        TRL: lambda: trl(shared, arguments),
        POOLING: lambda: pooling(shared, arguments),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peaks = []
    for turn in range(arguments.rounds):
        peaks.append(product_peak())
        for way, train in ways.items():
            seconds[way].append(train())
            print(f"{name}, round {turn + 1}, {way}: {seconds[way][-1]:.1f} s", file=sys.stderr, flush=True)

    def ratio(over: str, under: str) -> float:
        return float(np.median(np.array(seconds[over]) / np.array(seconds[under])))

    trained = len(votes) // arguments.batch_size * arguments.batch_size
    work = work_of(shared, arguments)
    return {
        "pairs": len(votes),
        "texts": len(shared.items),
        "pairs_per_second": {
            way: (len(votes) if way == POOLING else trained) / float(np.median(times)) for way, times in seconds.items()
        },
        "over_both_texts": ratio(BOTH, JOINT),
        "over_trl": ratio(TRL, JOINT),
        "over_one_member": ratio(JOINT, ONE),
        "pooling_over_trl": ratio(TRL, POOLING) * len(votes) / trained,
        "tokens_per_second": work["tokens"] / float(np.median(seconds[JOINT])),
        "padding": work["padding"],
        "of_peak": float(np.median(work["operations"] / np.array(seconds[JOINT]) / np.array(peaks))),
        "seconds": seconds,
    }


def both_ways(votes: PreferenceSet) -> tuple[TextPairs, TextPairs]:
    """Return the pairs with shared texts, and the same pairs with two texts of their own each, in no prompt."""
    texts, items = texts_of(votes), votes.items()
    shared = TextPairs(texts, items.a, items.b, np.asarray(votes.prob_a, dtype=np.float64), votes.prompt_index)
    rows, own = np.arange(len(votes), dtype=np.int32), [texts[text] for text in (*items.a, *items.b)]
    return shared, replace(shared, items=own, a=rows, b=rows + len(rows), prompt=rows)


def ours(pairs: TextPairs, k: int, arguments: argparse.Namespace) -> float:
    """Return the training time of k joint members and the reward beside them; for k = 0, of one member."""
    return train(pairs, k, options_of(pairs, arguments))[0]


def options_of(pairs: TextPairs, arguments: argparse.Namespace) -> FinetuneOptions:
    """Return the options of joint training: one epoch of whole steps."""
    return FinetuneOptions(
        backbone=arguments.backbone, optimizer="adamw", fresh_head=True, batch_size=arguments.batch_size,
        max_length=arguments.max_length,
        epochs=len(pairs.a) // arguments.batch_size * arguments.batch_size / len(pairs.a),
    )  # fmt: skip


def train(pairs: TextPairs, k: int, tuning: FinetuneOptions, seed: int = 0) -> tuple[float, PairTrainer]:
    """Train k joint members and the reward beside them, or for k = 0 one member. Return the seconds and the trainer."""
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        trainer = trainer_of(pairs, k, tuning, seed, Path(folder))
        started = time.perf_counter()
        trainer.train()
        return time.perf_counter() - started, trainer


def trainer_of(pairs: TextPairs, k: int, tuning: FinetuneOptions, seed: int, folder: Path) -> PairTrainer:
    """Return the trainer of k joint members and the reward beside them, or for k = 0 of one member."""
    run = prepare_run(pairs, training_plan(pairs.prompt, tuning, seed, 1), Checkpoints(folder, {}))
    lessons = PairLessons(pairs, VoteLoss(k) if k else StageLoss(1.0), labels_of(pairs))
    trainer = run.trainer(Training("joint", k + 1, lessons, lambda: np.zeros(0)), folder / "checkpoints", None)
    trainer.args.save_strategy = "no"
    return trainer


def labels_of(pairs: TextPairs) -> dict[str, FloatArray]:
    """Return what every loss reads of the pairs."""
    return {"prob_a": pairs.prob_a, "target": pairs.prob_a, "weight": np.ones(len(pairs.a))}


def work_of(pairs: TextPairs, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the tokens that joint training reads, the share of padding beside them, and their operations."""
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        trainer = trainer_of(pairs, K, options_of(pairs, arguments), 0, Path(folder))
    data: Any = trainer.train_dataset
    lengths = [data[position]["attention_mask"].sum(dim=1).tolist() for position in range(len(data))]
    tokens = sum(map(sum, lengths))
    read = sum(len(group) * of[group[0]] for of in lengths for group in length_groups(of, CPU_PASS))
    model: Any = trainer.model
    parameters = sum(part.numel() for name, part in model.named_parameters() if "embed" not in name)
    return {"tokens": tokens, "padding": 1 - tokens / read, "operations": 6.0 * parameters * tokens}


def product_peak() -> float:
    """Return the operations per second of a large matrix product on all cores."""
    matrix, times = torch.rand(PRODUCT, PRODUCT), []
    for _ in range(5):
        started = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - started)
    return float(2 * PRODUCT**3 / min(times))


def pooling(pairs: TextPairs, arguments: argparse.Namespace) -> float:
    """Return the time of reading all texts and of training an attention pooling on them with the default options."""
    encoder = TextFeatures(arguments.backbone).load()
    assert isinstance(encoder, ModelEncoder)
    layer = middle_layer(encoder.layers)
    encoder.token_states(pairs.items[:1], layer)  # loads the model
    lessons = PairLessons(pairs, MixtureLoss((1 / K,) * K), labels_of(pairs))
    start = Start(identity_map(1), np.zeros((1, K + 1)), np.zeros((len(pairs.items), K + 1)), lessons, ON_PAIRS)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        states = read_token_states(pairs.items, encoder, layer, Path(folder) / "states")
        train_attention(states, start, 0)
        return time.perf_counter() - started


def trl(pairs: TextPairs, arguments: argparse.Namespace) -> float:
    """Return the training time of TRL's RewardTrainer on the same pairs and tokens."""
    import datasets
    import transformers
    from trl import RewardConfig, RewardTrainer

    from pluralign.text.loading import model_folder

    folder = model_folder(arguments.backbone)
    with tempfile.TemporaryDirectory() as output, quiet_transformers():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.truncation_side = "left"
        tokens = [classifier_tokens(tokenizer, item, arguments.max_length)["input_ids"] for item in pairs.items]
        first = pairs.prob_a >= 0.5
        chosen, rejected = np.where(first, pairs.a, pairs.b), np.where(first, pairs.b, pairs.a)
        rows = len(chosen) // arguments.batch_size * arguments.batch_size
        data = datasets.Dataset.from_dict(
            {
                "chosen_ids": [tokens[text] for text in chosen[:rows]],
                "rejected_ids": [tokens[text] for text in rejected[:rows]],
            }
        )
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype="float32", use_safetensors=True
        )
        settings = RewardConfig(
            output_dir=output, per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=arguments.batch_size // MICRO_BATCH, num_train_epochs=1,
            learning_rate=2e-5, optim="adamw_torch", max_length=arguments.max_length, gradient_checkpointing=False,
            bf16=False, save_strategy="no", report_to="none", logging_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = RewardTrainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer)
        started = time.perf_counter()
        trainer.train()
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
