"""How well slates, consensus and sampled answers match people's rankings, on held-out questions.

    python benchmarks/pluralism.py VOTES RANKINGS [--seeds 3] [--k 8] [--encoder minilm] [--json]
    python benchmarks/pluralism.py demo:10000 [--features true] [--seeds 3] [--methods joint,'with rater ids'] [--json]

VOTES are the pairs that the ensemble is trained on. RANKINGS is JSON Lines of {question, statements: {id: text},
rankings: [[id, …], …]}: full rankings of the same statements by several people. For the town hall, VOTES is demo:N and
the rankings are those of all 1,000 people, by their true rewards, of the responses of each prompt; ``--features true``
gives every method the features that decide the votes. Questions in the test split of VOTES are used for evaluation, all
others for training. Pairwise calibration does not guarantee these figures (the paper's Discussion): they are
higher-order judgments.

Intervals are 95 % over questions; rows that start with "−" are paired differences to the named baseline. Rivals are one
soft Bradley–Terry reward and its damped form. A damped reward has no score per response: its responses are ranked by
the mean log-odds against all others. A slate shows one of several near-duplicates; the figures with "or a
near-duplicate" count it as all of them, for rivals too, and one rival shows one of several near-duplicates like the
slate. With few people per group, total variation favours sharp
predictions; the squared distance is a proper score.
"""

import argparse
import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import logit, softmax
from tables import show
from true_features import fit_features

import pluralign
from pluralign.answering.request import Voters
from pluralign.answering.slate import NEAR_DUPLICATE, near_duplicates, similarity, slate
from pluralign.core.arrays import FloatArray
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.learning.measure import baselines_of
from pluralign.learning.pairs import Differences
from pluralign.theory.intervals import clustered_interval
from pluralign.theory.social_choice import RULES, choose, first_choices, pairwise_support
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.raters import town_hall_votes
from pluralign.votes.town_hall.town_hall import TownHall

RATERS = "with rater ids"
METHODS: dict[str, dict[str, Any]] = {
    "joint": {"method": "joint"},
    "joint policy": {"method": "joint", "level": "policy"},
    "stagewise printed": {"method": "stagewise", "variant": "printed"},
    RATERS: {},
}
SOFT_BT, DAMPED = "soft BT", "damped soft BT"
TRUE = "true"
WHOSE = {"favourite": "a person's favourite", "top-two": "a person's favourite or second"}
Figure: TypeAlias = tuple[str, float, Mapping[str, float]]
"""A figure's name, its value, and the values of its rivals by name."""


@dataclass(frozen=True, eq=False)
class Group:
    """People who ranked the same texts."""

    question: str
    texts: list[str]
    place: npt.NDArray[np.int64]
    """Place of each text in each person's ranking, 0 for the favourite, ``(n_people, n_texts)``."""
    rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Rows of the texts in the features of a town hall; empty for others."""

    @property
    def first(self) -> FloatArray:
        """Share of people whose favourite each text is, ``(n_texts,)``."""
        return np.asarray((self.place == 0).mean(axis=0))


@dataclass(frozen=True, eq=False)
class Scored:
    """A group's texts as an ensemble and single rewards see them."""

    rewards: FloatArray
    single: FloatArray
    """Reward of soft BT, ``(n_texts,)``."""
    damped: FloatArray
    """Mean log-odds of damped soft BT against the other texts, ``(n_texts,)``."""


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("votes", help="file of votes, or demo:N")
    parser.add_argument("rankings", type=Path, nargs="?", help="file of rankings; not for demo:N")
    parser.add_argument("--seeds", type=int, default=3, help="number of splits")
    parser.add_argument("--test-fraction", type=float, default=0.2)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--features", choices=("text", TRUE), default="text", help="true: for demo:N only")
    parser.add_argument("--slate-size", type=int, help="answers per slate (default: as many as different favourites)")
    parser.add_argument("--methods", default="joint,joint policy", help=f"comma-separated: {', '.join(METHODS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    town, votes, groups = load(arguments)
    measured: dict[str, list[tuple[str, float, Mapping[str, float]]]] = {}
    for seed in range(arguments.seeds):
        mask = votes.test_mask(arguments.test_fraction, seed=seed)
        test_questions = {str(votes.prompts[i]) for i in np.unique(votes.prompt_index[mask])}
        judged = [group for group in groups if group.question in test_questions]
        for name in arguments.methods.split(","):
            ensemble = fit(name, votes, town, seed, arguments)
            random = np.random.default_rng(seed)
            for group, scored in zip(judged, score(ensemble, judged, town, arguments), strict=True):
                for figure, value, rivals in judge(name, ensemble, group, scored, random, arguments.slate_size):
                    measured.setdefault(figure, []).append((f"{seed} {group.question}", value, rivals))
    results = summary(measured)
    if arguments.json:
        print(json.dumps(results))
        return
    rows = [{"figure": figure, **row} for figure, row in results.items()]
    show(rows, f"{len(groups):,} groups of people, {arguments.seeds} splits by question; 95 % over questions")


# --- data and fits ----------------------------------------------------------------------------------------------------


def load(arguments: argparse.Namespace) -> tuple[TownHall | None, PreferenceSet, list[Group]]:
    """Return the town hall if there is one, the votes, and the groups of people."""
    if arguments.votes.startswith("demo:"):
        town = pluralign.town_hall(int(arguments.votes.removeprefix("demo:")))
        return town, town.preferences, town_groups(town)
    return None, pluralign.load_preferences(arguments.votes), read_rankings(arguments.rankings)


def read_rankings(path: Path) -> list[Group]:
    """Read groups of people: each has a question, distinct statements and full rankings of them."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    kept = []
    for line in data.splitlines():
        group = json.loads(line)
        names, texts = list(map(str, group["statements"])), list(group["statements"].values())
        if len(set(texts)) == len(texts) > 1:
            orders = [[str(name) for name in order] for order in group["rankings"]]
            place = np.array([[order.index(name) for name in names] for order in orders])
            kept.append(Group(group["question"], texts, place))
    return kept


def town_groups(town: TownHall) -> list[Group]:
    """Return all people of a town hall with their rankings of the responses of each prompt."""
    votes, rewards = town.preferences, town.annotator_rewards(range(len(town.tastes)))
    items: dict[int, set[int]] = {}
    for prompt, a, b in zip(votes.prompt_index.tolist(), votes.a_index.tolist(), votes.b_index.tolist(), strict=True):
        items.setdefault(prompt, set()).update((a, b))
    groups = []
    for prompt, used in items.items():
        rows = np.array(sorted(used))
        place = np.argsort(np.argsort(-rewards[rows], axis=0), axis=0).T
        groups.append(Group(str(votes.prompts[prompt]), [votes.responses[i] for i in rows], place, rows))
    return groups


def fit(
    name: str, votes: PreferenceSet, town: TownHall | None, seed: int, arguments: argparse.Namespace
) -> RewardEnsemble:
    """Fit an ensemble without the held-out questions."""
    options = {"k": arguments.k, "seed": seed, "test_fraction": arguments.test_fraction, **METHODS[name]}
    if name == RATERS:
        assert town is not None, "rater ids: for demo:N only"
        votes = town_hall_votes(town).preferences
    if arguments.features == TRUE:
        assert town is not None, "true features: for demo:N only"
        return fit_features(votes, town.features, **options)[0]
    return pluralign.fit(votes, encoder=arguments.encoder, **options)


def score(
    ensemble: RewardEnsemble, groups: list[Group], town: TownHall | None, arguments: argparse.Namespace
) -> Iterator[Scored]:
    """Yield the rewards of each group's texts."""
    if arguments.features == TRUE:
        assert town is not None
        features = np.asarray(town.features[np.concatenate([group.rows for group in groups])], dtype=np.float32)
    else:
        features = ensemble.features([(group.question, text) for group in groups for text in group.texts])
    inputs = ensemble.members.inputs(features)
    rewards, baselines = ensemble.members.rewards(features), baselines_of(ensemble)
    one = inputs @ baselines["soft_bt"].arrays["theta"]
    start = 0
    for group in groups:
        n = len(group.texts)
        rows = slice(start, start + n)
        start += n
        a, b = (index.ravel() for index in np.indices((n, n), dtype=np.int32))
        shares = baselines["damped_bt"].prob_hat(Differences(inputs[rows], a, b)).reshape(n, n)
        odds = logit(np.clip(shares, 1e-6, 1 - 1e-6)).sum(axis=1) / (n - 1)
        yield Scored(np.asarray(rewards[rows], dtype=np.float64), np.ravel(one[rows]), odds)


# --- figures ----------------------------------------------------------------------------------------------------------


def judge(
    name: str,
    ensemble: RewardEnsemble,
    group: Group,
    scored: Scored,
    random: np.random.Generator,
    size: int | None,
) -> Iterator[Figure]:
    """Yield the figures of one ensemble on one group of people."""
    yield from judge_draws(name, ensemble, group, scored)
    yield from judge_slates(name, ensemble, group, scored, random, size)
    yield from judge_consensus(name, ensemble, group, scored)


def judge_draws(name: str, ensemble: RewardEnsemble, group: Group, scored: Scored) -> Iterator[Figure]:
    """Yield the distances between drawn answers and people's first choices."""
    n, alpha, beta = len(group.texts), ensemble.weights / ensemble.weights.sum(), ensemble.temperature
    luce = {SOFT_BT: softmax(scored.single), DAMPED: softmax(scored.damped)}
    drawn = {
        f"{name}, random member's favourite": first_choices(scored.rewards, alpha),
        f"{name}, sampled policies": first_choices(scored.rewards, alpha, beta),
        f"{name}, sampled policies and undecided share": first_choices(scored.rewards, alpha, beta, ensemble.undecided),
        **{f"Plackett–Luce from {rival}": share for rival, share in luce.items()},
        "always the top of soft BT": np.eye(n)[scored.single.argmax()],
        "uniform": np.full(n, 1 / n),
    }
    for what, distance in (("total variation", variation), ("squared distance", squared)):
        rivals = {f"Plackett–Luce from {rival}": distance(share, group.first) for rival, share in luce.items()}
        for subject, share in drawn.items():
            yield f"first choices, {what}: {subject}", distance(share, group.first), rivals


def judge_slates(
    name: str,
    ensemble: RewardEnsemble,
    group: Group,
    scored: Scored,
    random: np.random.Generator,
    size: int | None,
) -> Iterator[Figure]:
    """Yield how many people are covered by slates, and by as many of the top of single rewards."""
    covered = {"favourite": group.place == 0, "top-two": group.place < 2}
    alike = np.array([[similarity(a, b) >= NEAR_DUPLICATE for b in group.texts] for a in group.texts])
    orders = {SOFT_BT: np.argsort(-scored.single), DAMPED: np.argsort(-scored.damped)}
    orders[f"{SOFT_BT}, one of several near-duplicates"] = near_duplicates(group.texts, orders[SOFT_BT])[1]
    for level, beta in (("policy", ensemble.temperature), ("vote", 0.0)):
        for cover, liked in covered.items():
            found = slate(
                group.texts,
                scored.rewards,
                replace(Voters.of(ensemble), temperature=beta),
                random,
                size=size,
                cover=cover,
            )
            shown = [group.texts.index(entry.text) for entry in found.entries]
            subject, whose = f"{name}, {level} level", WHOSE[cover]
            for what, serves in ((whose, liked), (f"{whose}, or a near-duplicate", liked @ alike)):
                share = float(serves[:, shown].any(axis=1).mean())
                rivals = {
                    f"top of {rival}": float(serves[:, order[: len(shown)]].any(axis=1).mean())
                    for rival, order in orders.items()
                }
                yield f"slate contains {what}: {subject}", share, rivals
                for rival, value in rivals.items():
                    yield f"slate contains {what}: {rival} (same size as {subject})", value, {}
            predicted = share if found.coverage is None else found.coverage
            yield f"slate, predicted minus true coverage, {cover}: {subject}", predicted - share, {}
            yield f"slate size, {cover}: {subject}", float(len(shown)), {}


def judge_consensus(name: str, ensemble: RewardEnsemble, group: Group, scored: Scored) -> Iterator[Figure]:
    """Yield how people rank the consensus, and the top of single rewards."""
    alpha = ensemble.weights / ensemble.weights.sum()
    tops = {f"top of {SOFT_BT}": int(scored.single.argmax()), f"top of {DAMPED}": int(scored.damped.argmax())}
    winners = dict(tops)
    for level, beta in (("policy", ensemble.temperature), ("vote", 0.0)):
        support = pairwise_support(scored.rewards, alpha, beta, ensemble.undecided)
        winners |= {f"{name}, {level} level, {rule}": choose(support, rule) for rule in RULES}
    for what, measure in (("pairwise wins", wins), ("in the top half of a person's ranking", top_half)):
        rivals = {rival: measure(winner, group.place) for rival, winner in tops.items()}
        for subject, winner in winners.items():
            yield f"consensus, {what}: {subject}", measure(winner, group.place), rivals


def variation(p: FloatArray, q: FloatArray) -> float:
    """Return the total variation distance of two distributions."""
    return float(np.abs(p - q).sum() / 2)


def squared(p: FloatArray, q: FloatArray) -> float:
    """Return the squared distance of two distributions."""
    return float(((p - q) ** 2).sum())


def wins(winner: int, place: npt.NDArray[np.int64]) -> float:
    """Return the share of (person, other text) comparisons that a text wins."""
    return float(1 - place[:, winner].mean() / (place.shape[1] - 1))


def top_half(winner: int, place: npt.NDArray[np.int64]) -> float:
    """Return the share of people who rank a text in the top half."""
    return float((place[:, winner] < place.shape[1] / 2).mean())


def summary(measured: Mapping[str, list[tuple[str, float, Mapping[str, float]]]]) -> dict[str, dict[str, float]]:
    """Return the mean of each figure and its paired differences to its rivals, with 95 % intervals over questions."""
    means, differences = {}, {}
    for figure, rows in measured.items():
        questions = [question for question, _, _ in rows]
        means[figure] = interval([value for _, value, _ in rows], questions)
        for rival in rows[0][2]:
            if rival != figure.rpartition(": ")[2]:
                paired = [value - rivals[rival] for _, value, rivals in rows]
                differences[f"− {figure} minus {rival}"] = interval(paired, questions)
    return means | differences


def interval(values: list[float], questions: list[str]) -> dict[str, float]:
    """Return the mean and its 95 % interval over questions."""
    found = clustered_interval(values, questions)
    return {"mean": found.mean, "low": found.low, "high": found.high, "groups": len(values)}


if __name__ == "__main__":
    main()
