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

from tables import Row, fit_options, show

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
    options = {**fit_options(arguments.fit), "test_fraction": arguments.test_fraction}
    trained_on = raters if arguments.with_ids else votes
    measured = [measure(trained_on, raters, {**options, "seed": seed}) for seed in range(arguments.seeds)]
    found, models = [one for one, _ in measured], [model for _, model in measured]
    if arguments.json:
        print(json.dumps(to_json(found)))
        return
    counted = ", ".join(f"{split.raters:,}" for split in found)
    for score in ("accuracy", "log_loss"):
        show(list(scores(found, score)), f"{score.replace('_', ' ')}: {len(found)} splits ({counted} raters)")
        show(list(differences(found, score)), "posterior; *: the 95 % interval over raters excludes 0")
    for split, ensemble_model in enumerate(models):
        print(f"split {split}: {ensemble_model}")


def measure(
    votes: PreferenceSet | RaterVotes, raters: RaterVotes, options: Mapping[str, Any]
) -> tuple[Representation, ChoiceModel]:
    """Fit an ensemble on one split; return its representation on its held-out prompts and its choice model."""
    ensemble = pluralign.fit(votes, **options)
    features = ensemble.features(texts_of(raters.preferences))
    found = represent(ensemble, raters, features, ensemble.trained_on, seed=options["seed"])
    return found, ensemble.choice_model


def scores(splits: Sequence[Representation], score: str) -> Iterator[Row]:
    """Yield the means over splits of one score: a row per number of choices, a column per predictor."""
    for choices, rows in rows_of(splits):
        means = {
            heading: statistics.mean(getattr(row.predictors[name], score).mean for row in rows)
            for name, heading in PREDICTORS.items()
        }
        yield {"choices": choices, **means}


def differences(splits: Sequence[Representation], score: str) -> Iterator[Row]:
    """Yield the paired differences of the posterior from the same without choices, and from soft BT."""
    for choices, rows in rows_of(splits):
        gains = [getattr(row, f"{score}_gain") for row in rows]
        gaps = [getattr(row.predictors["posterior"], f"{score}_difference") for row in rows]
        found: dict[str, str] = {}
        for name, of in (("no choices", gains), ("soft BT", gaps)):
            found |= {f"minus {name}": _spread([one.mean for one in of]), f"{name}, per split": _intervals(of)}
        yield {"choices": choices, **found}


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
