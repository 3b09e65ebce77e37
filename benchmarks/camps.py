"""Do members stand for people? True error and agreement with known people, on a town hall.

    python benchmarks/camps.py [--pairs 10000] [--features true] [--seeds 1] [--k 8] [--target auto] [--json]

``--features true`` gives every method the features that decide the votes; ``minilm``, ``hashing`` or any other encoder
of ``pluralign fit`` gives features of the texts. Columns, all on held-out prompts:

- true error: squared distance between the predicted shares and those of the whole town;
- closest member: how often the member closest to a person (chosen on training prompts) votes like that person, as a
  mean over all people;
- better: share of people with whom it agrees more often than soft BT does;
- camps: number of the six camps that a member stands for.

``camps`` are the true rewards of the six camps, weighted by their size: a reference that no fit knows.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tables import Row, means, show
from true_features import fit_features

import pluralign
from pluralign.core.arrays import FloatArray
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.learning.measure import baselines_of
from pluralign.learning.pairs import Differences, hard_votes
from pluralign.measuring.camps import study_camps
from pluralign.theory.calibration import brier, ensemble_prob, votes_from_rewards
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.raters import town_hall_votes
from pluralign.votes.town_hall.town_hall import TownHall

TEST_FRACTION = 0.2
TRUE = "true"


@dataclass(frozen=True, eq=False)
class Voters:
    """Members of a method: their votes on all pairs, their weights, and the predicted shares."""

    name: str
    votes: FloatArray
    weights: FloatArray
    share: FloatArray
    undecided: float = 0.0
    target: str = ""


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--features", default=TRUE, help="true, or an encoder: minilm, hashing, …")
    parser.add_argument("--seeds", type=int, default=1, help="number of splits")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument(
        "--target", default="auto", help="what joint members learn from: auto, teacher, mixture or votes"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    town = pluralign.town_hall(arguments.pairs)
    rows: list[Row] = []
    for seed in range(arguments.seeds):
        started = time.perf_counter()
        rows += measure(town, seed, arguments)
        print(f"split {seed}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    if not arguments.json:
        rows = sorted(means(rows, by=["method"]), key=lambda row: row["true error"])
    show(rows, f"Town hall, {arguments.pairs:,} pairs, {arguments.features} features", as_json=arguments.json)


def measure(town: TownHall, seed: int, arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of one split."""
    rows = town.preferences.test_mask(TEST_FRACTION, seed=seed)
    features = town.features if arguments.features == TRUE else None
    joint = fit(town, seed, arguments, method="joint", target=arguments.target)
    voters = [
        of_ensemble("joint", town, joint, features),
        of_ensemble("with rater ids", town, fit(town, seed, arguments, town_hall_votes(town).preferences), features),
        of_ensemble("stagewise", town, fit(town, seed, arguments, method="stagewise"), features),
        *of_baselines(town, joint, features),
        true_camps(town),
    ]
    single = next(one for one in voters if one.name == "soft BT").votes[:, 0]
    for one in voters:
        study = study_camps(town, rows, one.votes, one.weights, single)
        yield {
            "method": one.name,
            "k": len(one.weights),
            "true error": brier(one.share[rows], town.true_prob[rows]),
            "closest member": study.people.closest_member,
            "better": study.people.better_than_soft_bt,
            "camps": study.represented,
            "undecided": one.undecided,
            "target": one.target,
            "seed": seed,
        }


def fit(
    town: TownHall, seed: int, arguments: argparse.Namespace, votes: PreferenceSet | None = None, **method: Any
) -> RewardEnsemble:
    """Fit an ensemble on true features or on an encoder's, with or without rater ids."""
    options = {"k": arguments.k, "seed": seed, "test_fraction": TEST_FRACTION, **method}
    if arguments.features == TRUE:
        return fit_features(votes or town.preferences, town.features, **options)[0]
    return pluralign.fit(votes or town.preferences, encoder=arguments.features, **options)


def differences(town: TownHall, ensemble: RewardEnsemble, features: FloatArray | None) -> Differences:
    """Return the feature differences of all pairs, as the ensemble reads them."""
    raw = ensemble.features(texts_of(town.preferences)) if features is None else features
    items = town.preferences.items()
    return Differences(ensemble.members.inputs(raw), items.a, items.b)


def of_ensemble(name: str, town: TownHall, ensemble: RewardEnsemble, features: FloatArray | None) -> Voters:
    """Return the members of an ensemble."""
    difference = np.asarray(differences(town, ensemble, features) @ ensemble.members.theta, dtype=np.float64)
    votes = votes_from_rewards(difference, np.zeros_like(difference))
    share = ensemble.readings(difference)[ensemble.level]
    target = ensemble.record.target or ""
    return Voters(name, votes, ensemble.weights, share, ensemble.undecided, target)


def of_baselines(town: TownHall, ensemble: RewardEnsemble, features: FloatArray | None) -> Iterator[Voters]:
    """Yield soft BT and the mixture, each with the shares that it predicts."""
    pairs, fitted = differences(town, ensemble, features), baselines_of(ensemble)
    for key, name in (("soft_bt", "soft BT"), ("mixture", "mixture of BT")):
        baseline = fitted[key]
        theta = baseline.arrays["theta"].reshape(pairs.shape[1], -1)
        weights = np.asarray(baseline.arrays.get("weights", np.ones(1)))
        yield Voters(name, hard_votes(pairs, theta), weights, baseline.prob_hat(pairs))


def true_camps(town: TownHall) -> Voters:
    """Return the true rewards of the camps, weighted by their size."""
    rewards = town.camp_rewards()
    votes = votes_from_rewards(rewards[town.preferences.a_index], rewards[town.preferences.b_index])
    weights = np.bincount(town.camps, minlength=rewards.shape[1]) / len(town.camps)
    return Voters("camps", votes, weights, ensemble_prob(votes, weights))


if __name__ == "__main__":
    main()
