"""How well individuals are represented: a rater's votes predicted from the rater's choices, over several splits.

    python benchmarks/representation.py VOTES RATERS [--column rater] [--with-ids] [--seeds 3] [--fit k=8] [--json]

VOTES are the votes that ensembles are trained on. RATERS are votes on the same prompts with one row per vote and a
column of rater ids; it may be the same file. With ``--with-ids`` ensembles are trained on RATERS and their ids instead.
Both may be ``demo:PAIRS``, the town hall. Each split holds out other prompts; only votes on held-out prompts are
predicted. Figures are means over splits; differences also have ± the standard deviation over splits, and the value of
each split with its 95 % interval over raters.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import pluralign
from pluralign.core.json_values import to_json
from pluralign.measuring.individuals import PREDICTORS, Representation, RepresentationRow, represent
from pluralign.theory.intervals import Interval
from pluralign.theory.posterior import ChoiceModel
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.raters import RaterVotes, load_rater_votes


def main() -> None:
    """Run the benchmark and print its tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("votes")
    parser.add_argument("raters")
    parser.add_argument("--column", default="rater", help="column of rater ids in RATERS")
    parser.add_argument("--with-ids", action="store_true", help="train on RATERS with their ids")
    parser.add_argument("--seeds", type=int, default=3, help="number of splits")
    parser.add_argument("--test-fraction", type=float, default=0.3)
    parser.add_argument("--fit", action="append", default=[], metavar="NAME=VALUE", help="an option of pluralign fit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    votes = pluralign.load_preferences(arguments.votes)
    raters = load_rater_votes(arguments.raters, arguments.column)
    chosen = dict(option.split("=", 1) for option in arguments.fit)
    options = {name: _parsed(value) for name, value in chosen.items()} | {"test_fraction": arguments.test_fraction}
    trained_on = raters if arguments.with_ids else votes
    measured = [measure(trained_on, raters, {**options, "seed": seed}) for seed in range(arguments.seeds)]
    found, models = [one for one, _ in measured], [model for _, model in measured]
    if arguments.json:
        print(json.dumps(to_json(found)))
        return
    console = Console(width=150)
    for score in ("accuracy", "log_loss"):
        console.print(score_table(found, score))
        console.print(difference_table(found, score))
    for split, ensemble_model in enumerate(models):
        console.print(f"split {split}: {ensemble_model}", highlight=False)


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def measure(
    votes: PreferenceSet | RaterVotes, raters: RaterVotes, options: Mapping[str, Any]
) -> tuple[Representation, ChoiceModel]:
    """Fit an ensemble on one split; return its representation on its held-out prompts and its choice model."""
    ensemble = pluralign.fit(votes, **options)
    features = ensemble.features(texts_of(raters.preferences))
    found = represent(ensemble, raters, features, ensemble.trained_on, seed=options["seed"])
    return found, ensemble.choice_model


def score_table(splits: Sequence[Representation], score: str) -> Table:
    """Return the means over splits of one score: a row per number of choices, a column per predictor."""
    raters = ", ".join(f"{split.raters:,}" for split in splits)
    table = Table(box=box.SIMPLE_HEAD, title=f"{score.replace('_', ' ')}: {len(splits)} splits ({raters} raters)")
    for heading in ("choices", *PREDICTORS.values()):
        table.add_column(heading, justify="right", no_wrap=True)
    for choices, rows in rows_of(splits):
        means = [statistics.mean(getattr(row.predictors[name], score).mean for row in rows) for name in PREDICTORS]
        table.add_row(choices, *(f"{mean:.4f}" for mean in means))
    return table


def difference_table(splits: Sequence[Representation], score: str) -> Table:
    """Return the paired differences of the posterior from the same without choices, and from soft BT."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{score.replace('_', ' ')}: posterior minus …")
    for heading in ("choices", "no choices", "per split", "soft BT", "per split"):
        table.add_column(heading, justify="right")
    for choices, rows in rows_of(splits):
        gains = [getattr(row, f"{score}_gain") for row in rows]
        gaps = [getattr(row.predictors["posterior"], f"{score}_difference") for row in rows]
        cells = [cell for found in (gains, gaps) for cell in (_spread([one.mean for one in found]), _intervals(found))]
        table.add_row(choices, *cells)
    table.caption = "*: the 95 % interval over raters excludes 0"
    return table


def rows_of(splits: Sequence[Representation]) -> Iterator[tuple[str, list[RepresentationRow]]]:
    """Yield the rows of all splits by number of choices."""
    for choices in [row.choices for row in splits[0].rows]:
        rows = [row for split in splits for row in split.rows if row.choices == choices]
        yield "all" if choices is None else str(choices), rows


def _intervals(found: Sequence[Interval]) -> str:
    return "\n".join(
        f"{one.mean:+.4f} [{one.low:+.4f}, {one.high:+.4f}]{'*' if one.low > 0 or one.high < 0 else ' '}"
        for one in found
    )


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):+.4f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.4f}"


if __name__ == "__main__":
    main()
