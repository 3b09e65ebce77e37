"""Is a trained pooling worth it? ``fit --pooling attention`` and a fit on frozen features, on the same splits.

    python benchmarks/tuned_encoder.py [VOTES] [--pairs 10000] [--seeds 3] [--encoder minilm] [--json]
    python benchmarks/tuned_encoder.py [RANKINGS] --judgments [--prompts 250] [--fresh 200] [--seeds 1] [--json]

Without VOTES: a town hall, where the true error is known, the squared distance between the predicted shares and those
of the whole town. With VOTES: the held-out Brier score, corrected for vote noise. Every split is trained anew. The
interval is that of the difference by prompt, ``--pooling attention`` minus frozen, over the prompts of all splits.

``fit`` uses the trained or the frozen features, as validation prompts say. The columns "tuned" and "frozen" of
the held-out Brier score (corrected) show both, whichever is used; the JSON has their difference with its interval.

``--judgments``: fits to whole rankings. Without RANKINGS: a town hall where five people rank five answers, with and
without rater ids; people, camps and true error as in ``benchmarks/voices.py``. With RANKINGS (the format of
``benchmarks/voices.py``): log P per ranking on held-out prompts.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tables
import voices
from rich import box
from rich.console import Console
from rich.table import Table

import pluralign
from pluralign.core.arrays import FloatArray
from pluralign.core.json_values import to_json
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.theory.calibration import brier_corrected
from pluralign.theory.intervals import paired_difference
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.raters import RaterVotes

TEST_FRACTION = 0.2


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("votes", nargs="?")
    parser.add_argument("--pairs", type=int, default=10_000, help="pairs of the town hall")
    parser.add_argument("--seeds", type=int, default=3, help="number of splits")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--judgments", action="store_true", help="fit to whole rankings")
    parser.add_argument("--prompts", type=int, default=250, help="with --judgments: number of prompts")
    parser.add_argument("--fresh", type=int, default=200, help="prompts of the sample that measures it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.judgments:
        found = []
        for one in of_judgments(arguments):
            found.append(one)
            print(json.dumps(to_json(one)), file=sys.stderr, flush=True)  # a killed run keeps its finished rows
        if arguments.json:
            print(json.dumps(to_json(found)))
        else:
            Console(width=200).print(tables.table(found))
        return
    true_prob = None
    if arguments.votes:
        votes = pluralign.load_preferences(arguments.votes)
    else:
        town = pluralign.town_hall(arguments.pairs)
        votes, true_prob = town.preferences, town.true_prob
    rows = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        rows.append(measure(votes, true_prob, seed, arguments))
        shown = {name: value for name, value in rows[-1].items() if not isinstance(value, list)}
        print(f"split {seed}: {shown}", file=sys.stderr, flush=True)
    names = ("tuned", "frozen")
    means = {name: float(np.mean([row[name] for row in rows])) for name in names}
    errors = {name: np.concatenate([row[f"{name}_errors"] for row in rows]) for name in names}
    prompts = np.concatenate([row["prompts"] for row in rows])
    difference = paired_difference(errors["tuned"], errors["frozen"], prompts)
    if arguments.json:
        kept = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in rows]
        interval = [difference.mean, difference.low, difference.high]
        print(json.dumps({"splits": kept, **means, "ratio": means["tuned"] / means["frozen"], "difference": interval}))
        return
    title = "true error" if true_prob is not None else "held-out Brier score, corrected"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for heading in ("split", "attention", "frozen", "ratio", "used", "Brier: tuned", "frozen", "minutes"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = (f"{row['tuned']:.4f}", f"{row['frozen']:.4f}", f"{row['tuned'] / row['frozen']:.3f}")
        both = (f"{row['test_tuned']:.4f}", f"{row['test_frozen']:.4f}")
        table.add_row(str(row["seed"]), *cells, row["used"], *both, f"{row['seconds'] / 60:.0f}")
    console = Console(width=100)
    console.print(table)
    console.print(
        f"mean {means['tuned']:.4f} against {means['frozen']:.4f}, ratio {means['tuned'] / means['frozen']:.3f}; "
        f"difference {difference.mean:.5f} [{difference.low:.5f}, {difference.high:.5f}]"
    )


def measure(
    votes: PreferenceSet, true_prob: FloatArray | None, seed: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Fit both ensembles on one split and return their errors on its held-out prompts."""
    rows = votes.test_mask(TEST_FRACTION, seed=seed)
    test = votes[rows]
    options: dict[str, Any] = {"seed": seed, "test_fraction": TEST_FRACTION, "encoder": arguments.encoder}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tuned = pluralign.fit(votes, folder=Path(folder), pooling="attention", **options)
        seconds = time.perf_counter() - started
        choice = tuned.record.encoders
        shares = {"tuned": tuned.prob_hat(test)}
    frozen: RewardEnsemble = pluralign.fit(votes, **options)
    shares["frozen"] = frozen.prob_hat(test)
    target = test.prob_a if true_prob is None else true_prob[rows]
    errors = {name: (share - target) ** 2 for name, share in shares.items()}
    if true_prob is None:
        means = {
            name: brier_corrected(share, test.prob_a, test.n_votes, test.counted_ties) for name, share in shares.items()
        }
    else:
        means = {name: float(values.mean()) for name, values in errors.items()}
    assert choice is not None
    return {
        "seed": seed, **means, "used": choice.used, "seconds": seconds,
        "validation_tuned": choice.validation_tuned, "validation_frozen": choice.validation_frozen,
        "test_tuned": choice.test_tuned, "test_frozen": choice.test_frozen,
        "test_difference": choice.difference, "test_low": choice.low, "test_high": choice.high,
        "tuned_errors": errors["tuned"].tolist(), "frozen_errors": errors["frozen"].tolist(),
        "prompts": votes.prompt_index[rows].tolist(),
    }  # fmt: skip


# --- whole rankings ---------------------------------------------------------------------------------------------------


def of_judgments(arguments: argparse.Namespace) -> Iterator[tables.Row]:
    """Fit frozen and trained features to rankings, and yield a row of figures for each."""
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        options = {"seed": seed, "encoder": arguments.encoder}
        if arguments.votes:
            votes = voices.read_votes(Path(arguments.votes), 5 * arguments.prompts)  # five people per prompt
            rows = both_fits(votes, lambda _: {}, {**options, "test_fraction": TEST_FRACTION})
            yield from ({"fitted to": voices.RANKINGS, "seed": seed, **row} for row in rows)
            continue
        fresh = voices.Fresh(voices.drawn_town(arguments.fresh, seed=seed + 1), arguments.encoder)
        town = voices.drawn_town(arguments.prompts + voices.HELD_OUT, seed=seed)
        sources: list[tuple[str, PreferenceSet | RaterVotes]] = [
            (voices.RANKINGS, voices.training_votes(town, arguments.prompts)),
            (voices.IDS, voices.with_ids(town, arguments.prompts)),
        ]
        for name, source in sources:
            rows = both_fits(source, fresh.measure, options)
            yield from ({"fitted to": name, "seed": seed, **row} for row in rows)


def both_fits(
    votes: PreferenceSet | RaterVotes, measured: Callable[[RewardEnsemble], tables.Row], options: dict[str, Any]
) -> Iterator[tables.Row]:
    """Yield the figures of a fit on frozen features and of one with trained pooling, whichever ``fit`` would use."""
    frozen = pluralign.fit(votes, **options)
    yield {"features": "frozen", **figures(frozen, frozen, measured)}
    with tempfile.TemporaryDirectory() as folder:

        def trained(compare: bool) -> RewardEnsemble:
            place = Path(folder) / str(compare)
            return pluralign.fit(votes, folder=place, pooling="attention", compare_frozen=compare, **options)

        chosen = trained(compare=True)
        choice = chosen.record.encoders
        assert choice is not None
        row = figures(chosen if choice.used == "tuned" else trained(compare=False), frozen, measured)
        yield {"features": "trained pooling", **row, "used": f"{choice.used}: {choice.why}"}


def figures(
    ensemble: RewardEnsemble, frozen: RewardEnsemble, measured: Callable[[RewardEnsemble], tables.Row]
) -> tables.Row:
    """Return the figures of an ensemble, with its log P per held-out ranking minus that of the frozen ensemble."""
    found, other = (voices.evaluation_of(one).judgments for one in (ensemble, frozen))
    assert found is not None
    assert other is not None
    row: tables.Row = {**measured(ensemble), "log P": found.log_likelihood}
    row |= {"− frozen": found.log_likelihood - other.log_likelihood, "gain": found.gain}
    return {**row, "seconds": ensemble.record.seconds, "used": ""}


if __name__ == "__main__":
    main()
