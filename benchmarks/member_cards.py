"""Do cards name what members want? Phrases on the cards against the known tastes of a town hall's camps.

    python benchmarks/member_cards.py [--pairs 4000] [--seeds 1] [--k 8] [--encoder minilm] [--folder DIR] [--json]

Members are fitted with rater ids (``fit --raters``). A member that stands for a camp (``measuring.camps``) should have
the camp's views on its card. A phrase expresses a feature if the sentences that the town hall writes it in are, by
nine tenths, those of one value with its sign, or of compromise; other phrases express nothing and are counted apart. A
phrase agrees if the sign on the card (preferred or rejected) is that of the camp's mean taste for the feature minus the
mean taste of the town. Columns, for phrases that one half of the held-out prompts proposed and the other confirmed, and
for the phrases of positions, which were tested together:

- shown: phrases on the cards of members that stand for a camp; expressive: those that express a feature;
- agree: share of the expressive ones whose sign agrees with the matched camp;
- agree other camps: the same against the five other camps, the chance level for a card that ignores its member;
- named: camps with a member whose strongest taste (of the four values and compromise) a phrase on the card names.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tables import show

import pluralign
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import score_held_out
from pluralign.measuring.camps import camps_of_ensemble
from pluralign.measuring.leans import SignedVotes
from pluralign.measuring.views import View, Views, find_views, phrases_of
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.raters import RaterVotes, town_hall_votes
from pluralign.votes.town_hall.town_hall import TownHall
from pluralign.votes.town_hall.writing import VALUE_AXES, load_words

TEST_FRACTION = 0.2
EXPRESSES = 0.9
"""Share of a phrase's sentences that must belong to one feature and sign."""
COMPROMISE = "compromise"
COUNTED = ("shown", "expressive", "agree", "agree_other_camps", "named", "camps")
Sign = tuple[str, float]


@dataclass(frozen=True)
class Counts:
    """Phrases on the cards of members that stand for a camp."""

    kind: str
    seed: int
    shown: int
    expressive: int
    agree: int
    agree_other_camps: float
    """Mean number that agree with another camp."""
    camps: int
    """Camps with a member."""
    named: int
    """Of these, camps whose strongest taste a phrase on the card names."""


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4_000)
    parser.add_argument("--seeds", type=int, default=1, help="number of splits")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--encoder", default="minilm", help="as in pluralign fit")
    parser.add_argument("--folder", help="keep the fits in this folder, and use those that are there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    rows = [row for seed in range(options.seeds) for row in measure(options, seed)]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    total = []
    for kind in dict.fromkeys(row.kind for row in rows):
        sums = {name: sum(getattr(row, name) for row in rows if row.kind == kind) for name in COUNTED}
        shares = {name: sums[name] / max(sums["expressive"], 1) for name in ("agree", "agree_other_camps")}
        total.append({"kind": kind, **sums, **shares})
    show(total, f"{options.pairs:,} pairs, {options.encoder}, k = {options.k}, {options.seeds} splits")


def fit(votes: RaterVotes | PreferenceSet, options: argparse.Namespace, seed: int) -> RewardEnsemble:
    """Fit an ensemble, or load it if ``--folder`` has a fit of the same votes and options."""
    folder = Path(options.folder) / f"seed{seed}" if options.folder else None
    return pluralign.fit(
        votes, k=options.k, encoder=options.encoder, test_fraction=TEST_FRACTION, seed=seed, folder=folder
    )


def measure(options: argparse.Namespace, seed: int) -> Iterator[Counts]:
    """Fit members to a town hall with rater ids and yield the counts of their cards."""
    started, town = time.perf_counter(), pluralign.town_hall(options.pairs)
    ensemble = fit(town_hall_votes(town), options, seed)
    rows = town.preferences.test_mask(TEST_FRACTION, seed=seed)
    study = camps_of_ensemble(town, rows, ensemble)
    matched = {camp.member: camp.camp for camp in study.camps if camp.member is not None}
    held_out = score_held_out(ensemble, town.preferences[rows], all_prompts=True)
    views = find_views(SignedVotes.of(held_out, ensemble.weights))
    print(f"split {seed}: {time.perf_counter() - started:.0f} s, {len(matched)} members", file=sys.stderr, flush=True)
    tastes, sources = relative_tastes(town), expressed()
    for kind, of in (("confirmed phrases", single), ("phrases of positions", grouped)):
        cards = {camp: list(of(views[member])) for member, camp in matched.items()}
        yield count(kind, seed, cards, tastes, sources)


def single(views: Views) -> Iterator[Sign]:
    """Yield each phrase of a card that was confirmed by itself, with its sign."""
    yield from _signed(views.phrases)


def grouped(views: Views) -> Iterator[Sign]:
    """Yield each phrase of a card's positions with its sign, once."""
    yield from dict.fromkeys(_signed(views.positions))


def _signed(views: Sequence[View]) -> Iterator[Sign]:
    for view in views:
        yield from ((phrase, 1.0) for phrase in view.prefers)
        yield from ((phrase, -1.0) for phrase in view.rejects)


def count(
    kind: str,
    seed: int,
    cards: dict[str, list[Sign]],
    tastes: dict[str, dict[str, float]],
    sources: dict[str, Sign],
) -> Counts:
    """Compare the phrases of each camp's card with the tastes of that camp and of the others."""
    shown = expressive = agree = named = 0
    others = 0.0
    for camp, listed in cards.items():
        shown += len(listed)
        strongest = max((*VALUE_AXES, COMPROMISE), key=lambda axis: abs(tastes[camp][axis]))
        hit = False
        for phrase, sign in listed:
            if phrase not in sources:
                continue
            axis, side = sources[phrase]
            right = {name: sign * side * taste[axis] > 0 for name, taste in tastes.items()}
            expressive += 1
            agree += right[camp]
            others += float(np.mean([value for name, value in right.items() if name != camp]))
            hit = hit or (axis == strongest and right[camp])
        named += hit
    return Counts(kind, seed, shown, expressive, agree, others, len(cards), named)


def relative_tastes(town: TownHall) -> dict[str, dict[str, float]]:
    """Return the mean taste of each camp minus that of the town, by camp and feature."""
    mean = town.tastes.mean(axis=0)
    return {
        camp: dict(zip(town.feature_names, (town.tastes[town.camps == c].mean(axis=0) - mean).tolist(), strict=True))
        for c, camp in enumerate(town.camp_names)
    }


def expressed() -> dict[str, Sign]:
    """Return the feature and sign that each phrase of the town hall's sentences about values expresses, if any."""
    counts: dict[str, Counter[Sign]] = {}
    for key, sentence in _sentences():
        for phrase in phrases_of(sentence):
            counts.setdefault(phrase, Counter())[key] += 1
    found = {}
    for phrase, of in counts.items():
        key, most = of.most_common(1)[0]
        if key[0] and most >= EXPRESSES * of.total():
            found[phrase] = key
    return found


def _sentences() -> Iterator[tuple[Sign, str]]:
    """Yield sentences with the feature and sign that they express; an empty feature for all others."""
    words = load_words()
    for values in (words.value_tags, words.values):
        for axis, by_end in values.items():
            for end, sentences in by_end.items():
                yield from (((axis, 1.0 if end == "for" else -1.0), sentence) for sentence in sentences)
    for by_stance in (words.balance_tags, words.balance):
        for stance, sentences in by_stance.items():
            key = (COMPROMISE, 1.0) if stance == COMPROMISE else ("", 0.0)
            yield from ((key, sentence) for sentence in sentences)
    for stance, by_hedge in words.positions.items():
        key = (COMPROMISE, 1.0) if stance == COMPROMISE else ("", 0.0)
        yield from ((key, sentence) for sentences in by_hedge.values() for sentence in sentences)
    others = [words.leads, words.openers, words.closers, words.assurances, words.next_steps, words.calls]
    others += [words.list_titles, words.support_frames, *words.support.values(), *words.cost.values()]
    for table in others:
        yield from ((("", 0.0), sentence) for sentences in table.values() for sentence in sentences)


if __name__ == "__main__":
    main()
