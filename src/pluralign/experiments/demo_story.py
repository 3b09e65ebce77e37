"""The story that ``pluralign demo`` tells: every method on a town hall of known truth, then one ensemble closely."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pluralign.analysis.pruning import Pruning, prune
from pluralign.analysis.report_data import ReportData, collect_report_data
from pluralign.analysis.tournament import Tournament, rankings
from pluralign.core.arrays import FloatArray
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import score_held_out
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT
from pluralign.evaluation.measure import baseline_shares
from pluralign.fitting.fit import fit
from pluralign.theory import calibration
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.town_hall.townhall import TownHall

STORY: dict[str, dict[str, Any]] = {
    "joint": {"method": "joint"},
    "joint, policy level": {"method": "joint", "level": "policy"},
    "stagewise, printed": {"method": "stagewise", "variant": "printed", "max_disagreement": 1.0},
}
DRAWS = 50


@dataclass(frozen=True)
class Told:
    """One way to predict the town's votes on held-out prompts."""

    name: str
    k: int
    brier: float
    brier_corrected: float
    true_error: float
    """Mean squared distance to the true shares, which only a town hall knows."""
    worst_disagreement: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Story:
    """What the demo tells."""

    told: list[Told]
    """Every way to predict the town, best first."""
    ensemble: RewardEnsemble
    """The joint one, fitted for votes."""
    study: ReportData
    pruning: Pruning
    question: str
    """One held-out prompt, its responses numbered by first appearance."""
    rankings: dict[str, Any]
    """The whole town's shares on that prompt as a mixture of few rankings."""


def walk_through(
    town: TownHall,
    *,
    k: int = 8,
    seed: int = 0,
    test_fraction: float = 0.2,
    encoder: str = "minilm",
    progress: Progress | None = None,
) -> Story:
    """Fit every method of the story, and look closer at the joint ensemble."""
    votes = town.preferences
    rows = votes.test_mask(test_fraction, seed=seed)
    test, truth = votes[rows], town.true_prob[rows]
    told, ensembles = [], []
    for name, options in STORY.items():
        dials: dict[str, Any] = {"k": k, "seed": seed, "test_fraction": test_fraction, "encoder": encoder, **options}
        ensemble = fit(votes, progress=progress, **dials)
        facts = ensemble.facts
        error = calibration.brier(ensemble.prob_hat(test, facts["level"]), truth)
        worst = max(member["disagreement"] for member in facts["members"] if member["weight"] > NEGLIGIBLE_WEIGHT)
        seconds = facts["seconds"] - facts["seconds_encoding"]
        figures = facts["test"]
        told.append(Told(name, k, figures["brier"], figures["brier_corrected"], error, worst, seconds))
        ensembles.append(ensemble)
    shares = baseline_shares(ensembles[0], test)
    told += [
        _judge("floor", 1, (truth > 0.5).astype(float), test, truth),
        _judge("constant ½", 1, np.full(len(test), 0.5), test, truth),
        _judge("soft BT as σ(Δr)", 1, shares["soft_bt"], test, truth),
        _judge("mixture of BT", k, shares["mixture"], test, truth),
        random_annotators(town, rows, k, seed),
    ]
    ensemble = ensembles[0]
    evidence = score_held_out(ensemble, test)
    tournament = whole_town(town, int(votes.prompt_index[rows][0]))
    return Story(
        told=sorted(told, key=lambda one: one.true_error),
        ensemble=ensemble,
        study=collect_report_data(ensemble, evidence, seed=seed),
        pruning=prune(ensemble, evidence),
        question=tournament.name,
        rankings=rankings(tournament, k=k, seed=seed),
    )


def whole_town(town: TownHall, prompt: int) -> Tournament:
    """The share of the whole town that prefers each response of one prompt to each other: a realizable tournament.

    Example:
        >>> from pluralign import town_hall
        >>> whole_town(town_hall(40), 0).shares.shape
        (6, 6)
    """
    votes = town.preferences
    of_prompt = votes.items().prompt_index == prompt
    rewards = town.annotator_rewards(range(len(town.tastes)))[of_prompt]
    shares = (rewards[:, None] > rewards[None]).mean(axis=2)
    np.fill_diagonal(shares, np.nan)
    names = tuple(f"answer {number}" for number in range(1, len(rewards) + 1))
    return Tournament(names, shares, str(votes.prompts[prompt]))


def _judge(name: str, k: int, share: FloatArray, test: PreferenceSet, truth: FloatArray) -> Told:
    corrected = calibration.brier_corrected(share, test.prob_a, test.n_votes)
    return Told(name, k, calibration.brier(share, test.prob_a), corrected, calibration.brier(share, truth))


def random_annotators(town: TownHall, rows: npt.NDArray[np.bool_], k: int, seed: int) -> Told:
    """Theorem 2's construction: k people drawn at random with equal weights; mean figures of fifty draws."""
    rng = np.random.default_rng(seed)
    test, truth, name = town.preferences[rows], town.true_prob[rows], f"{k} random people"
    drawn = []
    for _ in range(DRAWS):
        share = town.annotator_votes(rng.integers(len(town.tastes), size=k)).mean(axis=1)[rows]
        one = _judge(name, k, share, test, truth)
        drawn.append((one.brier, one.brier_corrected, one.true_error))
    brier, corrected, error = np.mean(drawn, axis=0).tolist()
    return Told(name, k, brier, corrected, error)
