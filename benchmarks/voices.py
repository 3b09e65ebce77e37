"""Voices from whole judgments: what rankings tell that vote counts do not. One command per result.

    python benchmarks/voices.py habermas RANKINGS [--seeds 1] [--test-fraction 0.2]
    python benchmarks/voices.py town [--prompts 250 1000]
    python benchmarks/voices.py one-camp [--samples 20] [--angles 0 60 90]
    python benchmarks/voices.py curves
    python benchmarks/voices.py ukpconvarg RATERS [--seeds 3]
    python benchmarks/voices.py speed RANKINGS

Each prints a table and one JSON line; finished rows go to stderr. ``gain`` is the log-likelihood per judgment on
held-out prompts minus that of the best single reward, with its 95 % interval by prompt; above 0 is evidence of distinct
voices.

- habermas: RANKINGS is JSON Lines of {question, statements: {id: text}, rankings: [[id, …], …]}. The same split for
  fits with and without judgments. ``first choices``: total variation between predicted (sampled policies) and observed
  shares of first choices, mean over the groups of people on held-out questions.
- town: the town hall, where five people rank five answers to each prompt. Camps, people and true error are those of
  another sample of the same population, with 300 prompts; 100 further prompts choose the closest members.
- one-camp: a town without texts in which everyone has the same taste. People differ in decisiveness and noise, and half
  of the variance of quality is invisible to the features. At an angle above 0 there are two equal camps, whose tastes
  have that angle: the power of the same test.
- curves: the figures of ``town`` by number of prompts, answers per ranking and people per prompt; ``--figure FILE.svg``
  draws them.
- ukpconvarg: RATERS has one row per vote and the column ``rater``. Fits to counts, to votes linked within a prompt, and
  to votes linked by ids. How well a rater's votes are predicted from 5 and 20 of the rater's choices on other prompts.
- speed: seconds of a fit without encoding.
"""

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from pluralism import Group, read_rankings, score, variation
from scipy.special import softmax
from tables import Row, show
from true_features import fit_features

import pluralign
from pluralign.core.arrays import FloatArray
from pluralign.core.json_values import to_json
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import Evaluation
from pluralign.learning.measure import read_ensemble
from pluralign.measuring.camps import hard_votes_of, study_camps
from pluralign.measuring.individuals import represent
from pluralign.theory.calibration import brier
from pluralign.theory.intervals import Interval
from pluralign.theory.social_choice import first_choices
from pluralign.votes.judgments import Judgments, by_first_appearance
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.raters import RaterVotes, town_hall_votes
from pluralign.votes.town_hall.town_hall import TownHall, town_hall

COUNTS, RANKINGS, IDS = "counts", "rankings", "rankings and ids"


def main() -> None:
    """Run one benchmark, and print its rows, its table and its JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], Iterator[Row]], path: str = "", **options: Any) -> None:
        one = commands.add_parser(run.__name__.replace("_", "-"))
        one.set_defaults(run=run)
        if path:
            one.add_argument("path", metavar=path, type=Path)
        for name, default in {"k": 8, "encoder": "minilm", **options}.items():
            listed = isinstance(default, list)
            kind = type(default[0] if listed else default)
            one.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, nargs="+" if listed else None)

    command(habermas, "RANKINGS", seeds=1, seed=0, test_fraction=0.2)
    command(town, prompts=[250, 1000], fresh=400, seed=0)
    command(one_camp, samples=20, angles=[0.0, 60.0, 90.0], prompts=300, people=5, answers=5, decisiveness="groups")
    command(curves, prompts=[100, 250, 500, 1000], fresh=400, seed=0, figure="")
    command(ukpconvarg, "RATERS", seeds=3, test_fraction=0.3)
    command(speed, "RANKINGS", rankings=[2000, 5000, 10770])
    arguments = parser.parse_args()
    rows = []
    for row in arguments.run(arguments):
        rows.append(row)
        print(json.dumps(to_json(row)), file=sys.stderr, flush=True)  # a killed run keeps its finished rows
    show(rows)
    given = {name: value for name, value in vars(arguments).items() if name not in ("run", "path")}
    print(json.dumps({"command": arguments.run.__name__, **given, "rows": to_json(rows)}))


def fit(votes: PreferenceSet | RaterVotes, arguments: argparse.Namespace, **options: Any) -> RewardEnsemble:
    """Fit with the options of the command line and others."""
    return pluralign.fit(votes, k=arguments.k, encoder=arguments.encoder, **options)


def evaluation_of(ensemble: RewardEnsemble) -> Evaluation:
    """Return the held-out figures of a fit."""
    found = ensemble.record.evaluation
    assert found is not None
    return found


def gain_of(ensemble: RewardEnsemble) -> Interval | None:
    """Return the evidence of distinct voices. None if judgments were not used."""
    judgments = evaluation_of(ensemble).judgments
    return None if judgments is None else judgments.gain


def seconds_of(ensemble: RewardEnsemble) -> float:
    """Return the seconds of a fit without encoding."""
    record = ensemble.record
    return (record.seconds or 0.0) - (record.seconds_encoding or 0.0)


# --- rankings of real people ------------------------------------------------------------------------------------------


def read_votes(path: Path, rankings: int | None = None) -> PreferenceSet:
    """Read votes with their judgments, up to a number of rankings."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows: list[dict[str, Any]] = []
    for group in map(json.loads, data.splitlines()):
        number = {name: index for index, name in enumerate(group["statements"])}
        orders = [[number[str(name)] for name in order] for order in group["rankings"]]
        texts = list(group["statements"].values())
        rows.append({"prompt": group["question"], "responses": texts, "rankings": orders})
        if rankings is not None and sum(len(row["rankings"]) for row in rows) >= rankings:
            break
    return pluralign.load_preferences(rows, skip_bad=True)


def habermas(arguments: argparse.Namespace) -> Iterator[Row]:
    """Compare fits with and without judgments on held-out questions."""
    groups, votes = read_rankings(arguments.path), read_votes(arguments.path)
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        options = {"seed": seed, "test_fraction": arguments.test_fraction}
        rows = votes.test_mask(arguments.test_fraction, seed=seed)
        test = {str(votes.prompts[i]) for i in np.unique(votes.prompt_index[rows])}
        held_out = [group for group in groups if group.question in test]
        for judgments in (False, True):
            for level in ("vote", "policy"):
                ensemble = fit(votes, arguments, **options, level=level, judgments=judgments)
                found = evaluation_of(ensemble)
                own, soft_bt, uniform = first_choice_errors(ensemble, held_out)
                yield {
                    "fit": f"{RANKINGS if judgments else COUNTS}, {level} level",
                    "seed": seed,
                    "gain": gain_of(ensemble),
                    "vote: corrected": found.levels["vote"].brier_corrected,
                    "policy: Brier": found.levels["policy"].brier,
                    "÷ soft BT": found.levels["policy"].brier / found.baselines["soft_bt"].brier,
                    "soft BT": found.baselines["soft_bt"].brier,
                    "first choices": own,
                    "of soft BT": soft_bt,
                    "uniform": uniform,
                    "seconds": seconds_of(ensemble),
                }


def first_choice_errors(ensemble: RewardEnsemble, groups: list[Group]) -> tuple[float, float, float]:
    """Return the total variation of the sampled policies, of soft BT as Plackett–Luce, and of equal shares."""
    errors = []
    for group, scored in zip(groups, score(ensemble, groups, None, argparse.Namespace(features="text")), strict=True):
        own = first_choices(scored.rewards, ensemble.weights, ensemble.temperature, ensemble.undecided)
        shares = own, softmax(scored.single), np.full(len(own), 1 / len(own))
        errors.append([variation(share, group.first) for share in shares])
    own, soft_bt, uniform = np.mean(errors, axis=0).tolist()
    return own, soft_bt, uniform


def speed(arguments: argparse.Namespace) -> Iterator[Row]:
    """Time fits with and without judgments."""
    for n in arguments.rankings:
        votes = read_votes(arguments.path, n)
        fits = {name: fit(votes, arguments, judgments=name == RANKINGS) for name in (COUNTS, RANKINGS)}
        judged = votes.judgments.n if votes.judgments else 0
        yield {"rankings": judged, **{f"seconds, {name}": seconds_of(one) for name, one in fits.items()}}


# --- the town hall ----------------------------------------------------------------------------------------------------

CHOOSING = 0.25
"""Share of the fresh prompts that choose the closest members."""
HELD_OUT = 60
"""Prompts beside the training prompts, for the test of voices."""


@dataclass(frozen=True, eq=False)
class Fresh:
    """Another sample of the same population: people and camps are measured on it."""

    town: TownHall
    encoder: str

    @cached_property
    def rows(self) -> Any:
        """Pairs that measure, ``(n_pairs,)``; the others choose closest members."""
        return self.town.preferences.test_mask(1 - CHOOSING)

    def measure(self, ensemble: RewardEnsemble) -> Row:
        """Return how well an ensemble stands for people and camps, with its true errors."""
        town, rows = self.town, self.rows
        features = ensemble.features(texts_of(town.preferences))  # from the cache of vectors after the first fit
        votes, single = hard_votes_of(town, ensemble, features)
        study = study_camps(town, rows, votes, ensemble.weights, single)
        own, baselines = read_ensemble(ensemble, town.preferences, features)
        shares = {**own.readings, "soft BT": baselines["soft_bt"].share}
        error = {name: brier(share[rows], town.true_prob[rows]) for name, share in shares.items()}
        return {
            "closest member": study.people.closest_member,
            "soft BT": study.people.soft_bt,
            "camps": study.represented,
            "true error, vote": error["vote"],
            "policy": error["policy"],
            "of soft BT": error["soft BT"],
            "policy ÷ soft BT": error["policy"] / error["soft BT"],
        }


def training_votes(town: TownHall, n_prompts: int) -> PreferenceSet:
    """Return the votes on the first prompts for training and on ``HELD_OUT`` others for the test of voices."""
    votes = town.preferences
    votes = votes[votes.prompt_index < n_prompts + HELD_OUT]
    side = np.where(votes.prompt_index < n_prompts, "train", "test")
    return replace(votes, columns={"split": side})


def with_ids(town: TownHall, n_prompts: int) -> RaterVotes:
    """Return the same votes with the people behind them."""
    whole = town_hall_votes(town)
    votes = training_votes(replace(town, preferences=whole.preferences), n_prompts)
    kept = whole.pair < len(votes)
    return RaterVotes(votes, whole.pair[kept], by_first_appearance(whole.rater[kept])[1], whole.chose_a[kept])


def drawn_town(n_prompts: int, answers: int = 5, people: int = 5, seed: int = 0) -> TownHall:
    """Return a town hall with this many prompts, each with all pairs of its answers."""
    pairs = n_prompts * answers * (answers - 1) // 2
    return town_hall(pairs, seed=seed, rankings=True, n_responses_per_prompt=answers, votes_per_pair=people)


def town(arguments: argparse.Namespace) -> Iterator[Row]:
    """Compare fits to counts, rankings, and rankings with ids."""
    fresh = Fresh(drawn_town(arguments.fresh, seed=arguments.seed + 1), arguments.encoder)
    drawn = drawn_town(max(arguments.prompts) + HELD_OUT, seed=arguments.seed)
    levels = {COUNTS: ("vote", "policy"), RANKINGS: ("vote", "policy"), IDS: ("policy",)}
    for n, name in product(arguments.prompts, levels):
        votes = with_ids(drawn, n) if name == IDS else training_votes(drawn, n)
        for level in levels[name]:
            ensemble = fit(votes, arguments, level=level, **({"judgments": False} if name == COUNTS else {}))
            figures = {**fresh.measure(ensemble), "gain": gain_of(ensemble), "seconds": seconds_of(ensemble)}
            yield {"prompts": n, "fitted to": name, "level": level, **figures}


def curves(arguments: argparse.Namespace) -> Iterator[Row]:
    """Vary the number of prompts, the answers per ranking, and the people per prompt."""
    fresh, most = Fresh(drawn_town(arguments.fresh, seed=arguments.seed + 1), arguments.encoder), max(arguments.prompts)
    rows: list[Row] = []
    settings = [("single pairs", 2, 5), ("counts of rankings", 5, 5)]
    settings += [(RANKINGS, answers, people) for answers, people in ((3, 5), (5, 5), (5, 3), (5, 1))]
    for name, answers, people in settings:
        drawn = drawn_town(most + HELD_OUT, answers, people, arguments.seed)
        for n in arguments.prompts:
            ensemble = fit(training_votes(drawn, n), arguments, judgments=name == RANKINGS)
            figures = {**fresh.measure(ensemble), "gain": gain_of(ensemble), "seconds": seconds_of(ensemble)}
            rows.append({"fitted to": name, "answers": answers, "people": people, "prompts": n, **figures})
            yield rows[-1]
    if arguments.figure:
        draw_curves(rows, arguments.figure)


def draw_curves(rows: Sequence[Row], path: str) -> None:
    """Draw the agreement with the closest member by number of prompts, one line per setting."""
    from matplotlib import rc_context

    from pluralign.publishing import figures

    lines: dict[str, list[tuple[Any, Any]]] = {}
    for row in rows:
        votes = row["fitted to"] if row["fitted to"] != RANKINGS else f"rankings of {row['answers']}"
        lines.setdefault(f"{votes}, {row['people']} people", []).append((row["prompts"], row["closest member"]))
    with rc_context(figures.STYLE):
        drawing, axes = figures.figure(7.0, 3.8)
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), "o-", label=name, alpha=0.9 if name.startswith("rankings") else 0.5)
        axes.set_xscale("log")
        ticks = sorted({n for points in lines.values() for n, _ in points})
        axes.set_xticks(ticks, map(str, ticks))
        axes.minorticks_off()
        axes.set_xlabel("prompts")
        axes.set_ylabel("agreement with the closest member")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        drawing.savefig(path, metadata={"Date": None})


# --- a town of one camp -----------------------------------------------------------------------------------------------

VISIBLE = 20
"""Number of features."""
TEMPERATURES = (0.5, 3.0)
"""Of people who decide clearly, and of people whose choices are nearly random."""


def one_camp(arguments: argparse.Namespace) -> Iterator[Row]:
    """Count how often voices are found where everyone has the same taste, and where there are two."""
    for angle in arguments.angles:
        gains, started = [], time.perf_counter()
        for sample in range(arguments.samples):
            votes, features = simulate(
                angle, sample, arguments.prompts, arguments.people, arguments.answers, arguments.decisiveness
            )
            ensemble, _ = fit_features(votes, features, k=arguments.k, test_fraction=0.2)
            gains.append(gain_of(ensemble) or Interval(np.nan, np.nan, np.nan, np.nan))
        yield {
            "angle": angle,
            "samples": len(gains),
            "with evidence": sum(gain.low > 0 for gain in gains),
            "mean gain": float(np.mean([gain.mean for gain in gains])),
            "highest lower end": max(gain.low for gain in gains),
            "seconds": (time.perf_counter() - started) / len(gains),
        }


def simulate(
    angle: float, seed: int, n_prompts: int, n_people: int, n_answers: int, decisiveness: str
) -> tuple[PreferenceSet, FloatArray]:
    """Return rankings of people with one taste or two, and the features of the answers.

    A person i ranks by (x·θ_i + h) / T_i + Gumbel noise. The part h of an answer is the same for everyone, has the
    variance of x·θ_i, and is not in the features x.

    Args:
        angle: between the tastes of two equal camps, in degrees.
        seed: of everything.
        n_prompts: number of prompts.
        n_people: people who rank the answers to a prompt.
        n_answers: answers to a prompt.
        decisiveness: T is one of ``TEMPERATURES`` (``groups``), or its logarithm is standard normal (``lognormal``).
    """
    random = np.random.default_rng(seed)
    features = random.standard_normal((n_prompts, n_answers, VISIBLE))
    hidden = random.standard_normal((n_prompts, n_answers))
    tastes = np.linalg.qr(random.standard_normal((VISIBLE, 2)))[0].T
    turned = np.cos(np.radians(angle)) * tastes[0] + np.sin(np.radians(angle)) * tastes[1]
    camp = random.integers(2, size=(n_prompts, n_people))
    people = n_prompts, n_people
    temperature = random.choice(TEMPERATURES, people) if decisiveness == "groups" else random.lognormal(0, 1, people)
    quality = np.einsum("gad,gpd->gpa", features, np.stack([tastes[0], turned])[camp]) + hidden[:, None]
    utility = quality / temperature[..., None] + random.gumbel(size=quality.shape)
    a, b = np.triu_indices(n_answers, k=1)
    first = np.arange(n_prompts)[:, None] * n_answers
    votes_a = (utility[:, :, a] > utility[:, :, b]).sum(axis=1).ravel()
    prompt = np.repeat(np.arange(n_prompts), n_people)
    response = (np.repeat(first, n_people, axis=0) + np.arange(n_answers)).ravel()
    judgments = Judgments.from_scores(
        np.arange(len(prompt)), prompt, np.full(len(prompt), n_answers), response, utility.ravel()
    )
    texts = [f"question {i}" for i in range(n_prompts)], [f"answer {i}" for i in range(n_prompts * n_answers)]
    index = np.repeat(np.arange(n_prompts), len(a)), (first + a).ravel(), (first + b).ravel()
    votes = PreferenceSet.from_indices(*texts, *index, votes_a, n_people - votes_a, judgments=judgments)
    return votes, features.reshape(-1, VISIBLE)


# --- votes of known raters --------------------------------------------------------------------------------------------


def ukpconvarg(arguments: argparse.Namespace) -> Iterator[Row]:
    """Compare counts, votes linked within a prompt, and votes linked by ids."""
    linked, votes = pluralign.load_rater_votes(arguments.path, "rater"), pluralign.load_preferences(arguments.path)
    for seed in range(arguments.seeds):
        for name in (COUNTS, "within a prompt", "ids"):
            of_judgments = {"judgments": False} if name == COUNTS else {}
            options = {"seed": seed, "test_fraction": arguments.test_fraction, **of_judgments}
            ensemble = fit(linked if name == "ids" else votes, arguments, **options)
            features = ensemble.features(texts_of(linked.preferences))
            found = represent(ensemble, linked, features, ensemble.trained_on, choices=(5, 20))
            rows = {row.choices: row for row in found.rows}
            by_choices: Row = {}
            for m in (5, 20):
                posterior = rows[m].predictors["posterior"]
                by_choices[f"accuracy, {m} choices"] = posterior.accuracy.mean
                by_choices[f"gain of {m} choices"] = rows[m].accuracy_gain
                by_choices[f"− soft BT, {m} choices"] = posterior.accuracy_difference
            yield {
                "fitted to": name,
                "seed": seed,
                "voices": gain_of(ensemble),
                **by_choices,
                "best member": rows[5].predictors["hindsight"].accuracy.mean,
                "soft BT": rows[5].predictors["soft_bt"].accuracy.mean,
                "÷ soft BT": evaluation_of(ensemble).test.brier / evaluation_of(ensemble).baselines["soft_bt"].brier,
                "seconds": seconds_of(ensemble),
            }


if __name__ == "__main__":
    main()
