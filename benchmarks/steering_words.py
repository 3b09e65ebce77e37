"""Does a sentence find the people it describes? Steering by words on the town hall, whose camps are known.

    python benchmarks/steering_words.py [--pairs 4000] [--encoder minilm] [--seeds 1] [--k 8] [--json]

Each camp is described in one sentence. Columns: agreement with the camp's people on held-out prompts (how often a
random person of the camp prefers the response that is predicted to be preferred), as a mean over camps:

- no words: the ensemble's weights;
- soft BT: one reward for everyone;
- meaning: the mixture that ``answer`` uses, with the ensemble's choice model;
- members by meaning: the same without the reward for everyone;
- best member: the member with the highest agreement, which no sentence knows.

Ensembles are fitted with rater ids and without. Intervals are over held-out prompts of the first split. Sentences and
method were chosen while looking at that split.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from tables import Row, means, show

import pluralign
from pluralign.answering.request import Voters
from pluralign.answering.steering import Likings
from pluralign.core.arrays import FloatArray
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes, load_held_out
from pluralign.theory.intervals import clustered_interval
from pluralign.theory.posterior import predicted_choice
from pluralign.votes.preferences import texts_of
from pluralign.votes.raters import town_hall_votes
from pluralign.votes.town_hall.town_hall import CAMPS, TownHall

SENTENCES = {
    "gardeners": "Protect nature, parks and the climate first, even if it needs public money and new rules.",
    "ratepayers": "Keep taxes and public spending low; tell me what it costs before spending anything.",
    "keepers of custom": "Keep our traditions and leave things as they are; I am against change.",
    "bridge builders": "Find a compromise that is fair to both sides.",
    "planners": "The council should invest in change and plan it with clear rules.",
    "free spirits": "Let people decide for themselves, without bans and rules.",
}
TEST_FRACTION = 0.2


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument("--encoder", default="minilm", help="a transformers encoder; others have no meaning to match")
    parser.add_argument("--seeds", type=int, default=1, help="number of splits")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    town, rows = pluralign.town_hall(arguments.pairs), list[Row]()
    for seed in range(arguments.seeds):
        options = {"k": arguments.k, "seed": seed, "test_fraction": TEST_FRACTION, "encoder": arguments.encoder}
        for name, votes in (("with ids", town_hall_votes(town)), ("without ids", town.preferences)):
            with tempfile.TemporaryDirectory() as folder:
                ensemble = pluralign.fit(votes, folder=folder, **options)
                rows += list(measure(name, town, ensemble, load_held_out(folder), seed))
            print(f"split {seed} {name}: {ensemble.choice_model}", file=sys.stderr, flush=True)
    if not arguments.json:
        rows = means(rows, by=["ensemble", "way"])
    title = f"Steering by words, town hall, {arguments.pairs:,} pairs, {arguments.encoder}"
    show(rows, title, as_json=arguments.json)


def measure(name: str, town: TownHall, ensemble: RewardEnsemble, held_out: HeldOutVotes, seed: int) -> Iterator[Row]:
    """Yield the agreement of every way to steer."""
    mask = town.preferences.test_mask(TEST_FRACTION, seed=seed)
    votes = town.annotator_votes(range(len(town.tastes)))[mask]
    shares = np.column_stack([votes[:, town.camps == camp].mean(axis=1) for camp in range(len(CAMPS))])
    predictions = {camp: predict(ensemble, held_out, SENTENCES[camp], shares[:, c]) for c, camp in enumerate(CAMPS)}
    prompts = held_out.preferences.prompt_index
    agreed: dict[str, FloatArray] = {}
    for way in predictions[CAMPS[0]]:
        columns = [agreement(predictions[camp][way], shares[:, c]) for c, camp in enumerate(CAMPS)]
        agreed[way] = np.column_stack(columns)
    for way, found in agreed.items():
        gain = clustered_interval((found - agreed["no words"]).mean(axis=1), prompts)
        by_camp = dict(zip(CAMPS, found.mean(axis=0).tolist(), strict=True))
        figures = {"agreement": float(found.mean()), "− no words": gain, **by_camp}
        yield {"ensemble": name, "way": way, **figures, "seed": seed}


def predict(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, sentence: str, share: FloatArray
) -> Mapping[str, FloatArray]:
    """Return the predicted preference for response a by every way to steer; only the best member uses ``share``."""
    people, difference = Voters.of(ensemble), held_out.difference
    items = held_out.preferences.items()
    single = ensemble.rewards_and_average(texts_of(held_out.preferences))[:, ensemble.k]
    average = single[items.a] - single[items.b]
    no_words = ensemble.readings(difference)["policy"]
    counted = [j for j in range(ensemble.k) if ensemble.weights[j] > 0.01]
    best = max(counted, key=lambda j: float(agreement(difference[:, j] + 0.5, share).mean()))
    found = {"no words": no_words, "soft BT": average + 0.5, "best member": difference[:, best] + 0.5}
    if (likings := Likings.of(ensemble, held_out)) and (match := likings.match(sentence)):
        chance = people.chances(difference, average)
        found["meaning"] = predicted_choice(chance, people.believed(match.posterior))
        members = replace(people, model=replace(people.model, people=1.0))
        found["members by meaning"] = predicted_choice(chance, members.believed(match.posterior))
    return found


def agreement(predicted: FloatArray, share: FloatArray) -> FloatArray:
    """Return the share of people who prefer the response that is predicted to be preferred, ``(n,)``."""
    return np.asarray(0.5 + np.sign(predicted - 0.5) * (share - 0.5))


if __name__ == "__main__":
    main()
