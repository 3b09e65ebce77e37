"""Do members fitted with rater ids find the camps of the town hall? Everybody's true preferences are known there.

    python benchmarks/camps.py [--pairs 4000] [--features true|minilm|hashing] [--k 8] [--json]

Prints, on held-out prompts: the true calibration error of the ensemble and of one soft BT reward, how often a person
agrees with the closest member and with soft BT, how well raters' votes are predicted from their training votes, and
the agreement of each member with each camp. ``true`` uses the features that decide votes, without reading the texts.
"""

import argparse
import json
from typing import Any

import numpy as np

import pluralign
from pluralign.core.arrays import FloatArray, Mask
from pluralign.core.checkpoints import Checkpoints
from pluralign.ensemble.members import fit_feature_map
from pluralign.features import surface
from pluralign.features.frozen import TextFeatures
from pluralign.fitting.rater_fit import fit_raters, training_votes
from pluralign.fitting.task import FitTask, FitWatcher, Members
from pluralign.theory.calibration import log_loss
from pluralign.theory.logistic import sigmoid
from pluralign.training.bradley_terry import scores
from pluralign.training.options import FitOptions
from pluralign.training.pairs import Pairs
from pluralign.training.rater_mixture import VotesByRater, log_likelihoods, posteriors
from pluralign.votes.preferences import texts_of
from pluralign.votes.raters import RaterVotes, town_hall_votes
from pluralign.votes.town_hall.townhall import TownHall


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument("--features", choices=("true", "minilm", "hashing"), default="true")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = measure(pluralign.town_hall(arguments.pairs), arguments.features, arguments.k)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if name != "agreement":
            print(f"{name:32} {value if isinstance(value, list) else round(value, 4)}")
    print("agreement with the people of each camp, a row per member:")
    print("  ".join(found["agreement"]))
    for row in zip(*found["agreement"].values(), strict=True):
        print("  ".join(f"{share:{len(camp)}.2f}" for camp, share in zip(found["agreement"], row, strict=True)))


def measure(hall: TownHall, features: str, k: int) -> dict[str, Any]:
    """Fit with rater ids on four fifths of the prompts, and measure on the others."""
    votes = town_hall_votes(hall)
    preferences, items = hall.preferences, hall.preferences.items()
    if features == "true":
        raw, n_surface = hall.features[items.response_index].astype(np.float32), 0
    else:
        raw, n_surface = TextFeatures(features)(texts_of(preferences)), len(surface.NAMES)
    test = preferences.test_mask(0.2)
    used = np.zeros(len(raw), dtype=bool)
    used[items.a[~test]] = used[items.b[~test]] = True
    inputs = fit_feature_map(raw, n_surface, used)(raw)
    pairs = Pairs(inputs, items.a, items.b, preferences.prob_a, preferences.prompt_index)
    task = FitTask.start(pairs[~test], FitOptions(k=k, level="policy"), Checkpoints(None, {}), FitWatcher())
    known = training_votes(votes, ~test)
    fitted = fit_raters(task, known, lambda _: None)
    reward = fitted.baselines["soft_bt"].arrays["theta"]
    return figures(hall, votes, known, pairs, test, fitted.members, scores(pairs.difference, reward))


def figures(
    hall: TownHall,
    votes: RaterVotes,
    known: VotesByRater,
    pairs: Pairs,
    test: Mask,
    members: Members,
    soft_bt: FloatArray,
) -> dict[str, Any]:
    """Return the figures on the test pairs."""
    difference = scores(pairs.difference, members.theta)
    people = hall.annotator_votes(np.arange(len(hall.tastes)))[test]
    agreement = np.stack([np.mean(people == vote[:, None], axis=0) for vote in (difference[test] > 0).T])
    by_soft_bt = np.mean(people == (soft_bt[test] > 0)[:, None], axis=0)
    truth, prob_hat = hall.true_prob, members.prob_hat(pairs, "policy")
    posterior = posteriors(log_likelihoods(known, difference[~test]), members.weights)
    new = test[votes.pair]
    pair, vote = votes.pair[new], votes.chose_a[new]
    steered = np.einsum("nk,nk->n", posterior[votes.rater[new]], sigmoid(difference[pair]))
    return {
        "weights": members.weights.round(3).tolist(),
        "undecided": members.undecided,
        "true_error": float(np.mean((prob_hat - truth)[test] ** 2)),
        "true_error_soft_bt": float(np.mean((sigmoid(soft_bt) - truth)[test] ** 2)),
        "closest_member_agrees": float(agreement.max(axis=0).mean()),
        "soft_bt_agrees": float(by_soft_bt.mean()),
        "closest_member_better": float(np.mean(agreement.max(axis=0) > by_soft_bt)),
        "votes_accuracy": float(np.mean((steered > 0.5) == vote)),
        "votes_accuracy_soft_bt": float(np.mean((soft_bt[pair] > 0) == vote)),
        "votes_log_loss": log_loss(steered, vote),
        "votes_log_loss_soft_bt": log_loss(sigmoid(soft_bt)[pair], vote),
        "agreement": {
            camp: agreement[:, hall.camps == number].mean(axis=1).round(3).tolist()
            for number, camp in enumerate(hall.camp_names)
        },
    }


if __name__ == "__main__":
    main()
