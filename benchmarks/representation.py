"""How well individuals are represented: a rater's votes predicted from the rater's choices, over several splits.

    python benchmarks/representation.py VOTES RATERS [--column rater] [--with-ids] [--seeds 3] [--fit k=8] [--json]

VOTES are the votes that ensembles are trained on. RATERS are votes on the same prompts with one row per vote and a
column of rater ids; it may be the same file. With ``--with-ids`` ensembles are trained on RATERS and their ids instead.
Each split holds out other prompts; only votes on held-out prompts are predicted. Figures are means over splits;
differences also have ± the standard deviation over splits.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import pluralign
from pluralign.evaluation.representation import PREDICTORS, Representation, represent
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
    found = [measure(trained_on, raters, {**options, "seed": seed}) for seed in range(arguments.seeds)]
    if arguments.json:
        print(json.dumps([split.to_json() for split in found]))
        return
    console = Console(width=150)
    for score in ("accuracy", "log_loss"):
        console.print(score_table(found, score))


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def measure(votes: PreferenceSet | RaterVotes, raters: RaterVotes, options: Mapping[str, Any]) -> Representation:
    """Fit an ensemble on one split, and measure representation on its held-out prompts."""
    ensemble = pluralign.fit(votes, **options)
    features = ensemble.features(texts_of(raters.preferences))
    return represent(ensemble, raters, features, ensemble.trained_on, seed=options["seed"])


def score_table(splits: Sequence[Representation], score: str) -> Table:
    """Return the means over splits of one score: a row per number of choices, a column per predictor."""
    raters = ", ".join(f"{split.raters:,}" for split in splits)
    table = Table(box=box.SIMPLE_HEAD, title=f"{score.replace('_', ' ')}: {len(splits)} splits ({raters} raters)")
    for heading in ("choices", *PREDICTORS.values(), "posterior − soft BT", "per split (*: 95 %)"):
        table.add_column(heading, justify="right", no_wrap=True)
    for choices in [row.choices for row in splits[0].rows]:
        rows = [row for split in splits for row in split.rows if row.choices == choices]
        means = [statistics.mean(getattr(row.predictors[name], score).mean for row in rows) for name in PREDICTORS]
        gaps = [getattr(row.predictors["posterior"], f"{score}_difference") for row in rows]
        starred = [f"{gap.mean:+.4f}{'*' * (gap.low > 0 or gap.high < 0)}" for gap in gaps]
        label = "all" if choices is None else str(choices)
        values = [f"{mean:.4f}" for mean in means]
        table.add_row(label, *values, _spread([gap.mean for gap in gaps]), " ".join(starred))
    table.caption = "*: the 95 % interval over raters excludes 0"
    return table


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):+.4f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.4f}"


if __name__ == "__main__":
    main()
