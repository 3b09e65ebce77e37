"""``demo``: fit every method on a town hall with known preferences, and analyse one ensemble in detail."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from pluralign.answering.answer import Answer, answer
from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import UsageError
from pluralign.core.json_values import to_json
from pluralign.core.options import with_changes
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes, score_held_out
from pluralign.learning.fit import fit
from pluralign.learning.frozen import learn
from pluralign.learning.measure import baseline_shares
from pluralign.learning.options import FinetuneOptions, FitOptions
from pluralign.learning.raters import rater_options
from pluralign.learning.task import MANY_PAIRS, FitWatcher
from pluralign.measuring.camps import CampStudy, camps_of_ensemble
from pluralign.measuring.pruning import Pruning, prune
from pluralign.measuring.rankings import RankingResult, Tournament, rankings
from pluralign.measuring.report_data import ReportData, ReportOptions, collect_report_data
from pluralign.text.features import TextFeatures
from pluralign.theory import calibration
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.raters import RaterVotes, town_hall_votes
from pluralign.votes.town_hall.town_hall import TownHall, town_hall

# --- Fits on given features of a town hall, such as the features that decide its votes.


def fit_true_features(
    town: TownHall, raters: RaterVotes | None = None, **options: Any
) -> tuple[RewardEnsemble, HeldOutVotes]:
    """Fit an ensemble on the true features of a town hall; ``options`` are those of ``fit``.

    Example:
        >>> from pluralign import town_hall
        >>> ensemble, held_out = fit_true_features(town_hall(400), k=2)
        >>> ensemble.members.theta.shape
        (18, 2)
    """
    return fit_features(town.preferences, town.features, raters, **options)


def fit_features(
    preferences: PreferenceSet, features: Array, raters: RaterVotes | None = None, **options: Any
) -> tuple[RewardEnsemble, HeldOutVotes]:
    """Fit an ensemble on given features, with the same training and the same held-out prompts as ``fit``.

    Args:
        preferences: the votes.
        features: raw features of ``texts_of(preferences)``, in that order, ``(n_texts, d)``.
        raters: the same votes with their raters, to fit members to raters.
        **options: those of ``fit``; ``encoder`` and ``surface`` are ignored.

    Returns:
        The ensemble and the held-out votes with its rewards. It has no encoder: use ``ensemble.members.rewards`` on
        features.
    """
    chosen = with_changes(FitOptions(), {**options, "encoder": "none", "surface": False})
    if raters is not None:
        chosen = rater_options(chosen, FinetuneOptions())
    rows = preferences.test_mask(chosen.test_fraction, seed=chosen.seed)
    nothing, vectors = TextFeatures(encoder="none", surface=False), np.asarray(features, dtype=np.float32)
    with threadpool_limits(1 if len(preferences) < MANY_PAIRS else None, user_api="blas"):
        return learn(preferences, rows, vectors, nothing, chosen, Checkpoints(None, {}), FitWatcher(), raters)


JOINT, SOFT_BT, CONSTANT_HALF = "joint", "soft BT as σ(Δr)", "constant ½"
FLOOR, TRUE_SHARES = "floor", "true shares"
"""Names of the results that the terminal shows."""
METHODS: dict[str, dict[str, Any]] = {
    JOINT: {"method": "joint"},
    "joint, policy level": {"method": "joint", "level": "policy"},
    "stagewise, printed": {"method": "stagewise", "variant": "printed", "max_disagreement": 1.0},
}
"""Options of ``fit`` for each method of the demo."""
TRUE_FEATURE_PAIRS = 10_000
"""Number of pairs of the ensemble on true features, which need no encoding."""
DRAWS = 50
"""Number of random samples of annotators."""


@dataclass(frozen=True)
class MethodResult:
    """The error of one method on held-out prompts of a town hall."""

    name: str
    k: int
    brier: float
    brier_corrected: float
    true_error: float
    """Mean squared difference to the true shares, which are known for a town hall."""
    worst_disagreement: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Asked:
    """One held-out question, the answer of the ensemble, and the first choices of the whole town."""

    prompt: str
    responses: tuple[str, ...]
    """The answers to choose from, numbered by first appearance."""
    answer: Answer
    """In balanced mode: a slate and a consensus."""
    first_choices: tuple[float, ...]
    """Share of the town whose first choice each response is, in the order of ``responses``."""

    def share_of(self, text: str) -> float:
        """Return the share of the town whose first choice is this response."""
        return self.first_choices[self.responses.index(text)]


@dataclass(frozen=True)
class DemoResult:
    """All results of the demo."""

    methods: list[MethodResult]
    """All methods and baselines, best first."""
    ensemble: RewardEnsemble
    """The joint ensemble at the vote level."""
    report_data: ReportData
    camps: CampStudy
    """Which camps its members stand for."""
    camps_rater_ids: CampStudy
    """The same for an ensemble that was fitted with the raters of the votes."""
    camps_true_features: CampStudy
    """The same for a joint ensemble on the true features of the responses, fitted to more votes of the same people."""
    pruning: Pruning
    asked: Asked
    rankings: RankingResult
    """Decomposition of the true shares on the same prompt into few rankings."""

    def method(self, name: str) -> MethodResult:
        """Return the result of one method, by its name."""
        return next(result for result in self.methods if result.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return the results with the keys of the command line's JSON."""
        evaluation = self.ensemble.record.evaluation
        return {
            "told": to_json(self.methods),
            "members": to_json(evaluation.members if evaluation else []),
            "study": self.report_data.to_json(),
            "camps": self.camps.to_json(),
            "camps_rater_ids": self.camps_rater_ids.to_json(),
            "camps_true_features": self.camps_true_features.to_json(),
            "pruning": self.pruning.to_json(),
            "rankings": to_json(self.rankings),
            "asked": to_json(self.asked),
        }


def run_demo(
    town: TownHall,
    *,
    k: int = 8,
    seed: int = 0,
    test_fraction: float = 0.2,
    encoder: str = "minilm",
    true_feature_pairs: int = TRUE_FEATURE_PAIRS,
    progress: Progress | None = None,
) -> DemoResult:
    """Fit every method on a town hall, compare it with baselines, and analyse the joint ensemble.

    Args:
        town: synthetic votes with known true shares.
        k: number of members.
        seed: random seed.
        test_fraction: share of prompts to hold out.
        encoder: encoder of the texts, as in ``fit``.
        true_feature_pairs: number of pairs for the camps of an ensemble on true features.
        progress: called with the number of encoded texts and of all texts.
    """
    votes = town.preferences
    rows = votes.test_mask(test_fraction, seed=seed)
    test, truth = votes[rows], town.true_prob[rows]
    methods, ensembles = [], []
    for name, method in METHODS.items():
        options: dict[str, Any] = {"k": k, "seed": seed, "test_fraction": test_fraction, "encoder": encoder, **method}
        ensembles.append(fit(votes, progress=progress, **options))
        methods.append(_measure(name, ensembles[-1], ensembles[-1].prob_hat(test, ensembles[-1].level), truth))
    ensemble = ensembles[0]
    with_ids = fit(town_hall_votes(town), k=k, seed=seed, test_fraction=test_fraction, encoder=encoder)
    methods.append(_measure("with rater ids", with_ids, with_ids.prob_hat(test, with_ids.level), truth))
    informed, informed_votes = fit_true_features(town, k=k, seed=seed, test_fraction=test_fraction)
    methods.append(_measure("joint, true features", informed, informed_votes.prob_hat(informed), truth))
    shares = baseline_shares(ensemble, test)
    methods += [
        _measure_share(TRUE_SHARES, len(town.tastes), truth, test, truth),
        _measure_share(FLOOR, 1, (truth > 0.5).astype(float), test, truth),
        _measure_share(CONSTANT_HALF, 1, np.full(len(test), 0.5), test, truth),
        _measure_share(SOFT_BT, 1, shares["soft_bt"], test, truth),
        _measure_share("mixture of BT", k, shares["mixture"], test, truth),
        random_annotators(town, rows, k, seed),
    ]
    held_out = score_held_out(ensemble, test)
    prompt = int(votes.prompt_index[rows][0])
    return DemoResult(
        methods=sorted(methods, key=lambda result: result.true_error),
        ensemble=ensemble,
        report_data=collect_report_data(ensemble, held_out, options=ReportOptions(seed=seed)),
        camps=camps_of_ensemble(town, rows, ensemble),
        camps_rater_ids=camps_of_ensemble(town, rows, with_ids),
        camps_true_features=_camps_on_true_features(true_feature_pairs, k, seed, test_fraction),
        pruning=prune(ensemble, held_out),
        asked=ask(town, ensemble, prompt, seed=seed),
        rankings=rankings(true_tournament(town, prompt), k=k, seed=seed),
    )


def _camps_on_true_features(n_pairs: int, k: int, seed: int, test_fraction: float) -> CampStudy:
    town = town_hall(n_pairs, seed=seed)
    ensemble, _ = fit_true_features(town, k=k, seed=seed, test_fraction=test_fraction)
    return camps_of_ensemble(town, town.preferences.test_mask(test_fraction, seed=seed), ensemble, town.features)


def _measure(name: str, ensemble: RewardEnsemble, share: FloatArray, truth: FloatArray) -> MethodResult:
    record = ensemble.record
    if record.evaluation is None:
        raise UsageError("the demo needs held-out prompts: test_fraction must be above 0.")
    return MethodResult(
        name=name,
        k=ensemble.k,
        brier=record.evaluation.test.brier,
        brier_corrected=record.evaluation.test.brier_corrected,
        true_error=calibration.brier(share, truth),
        worst_disagreement=record.evaluation.worst_disagreement(),
        seconds=None if record.seconds is None else record.seconds - (record.seconds_encoding or 0.0),
    )


def _measure_share(name: str, k: int, share: FloatArray, test: PreferenceSet, truth: FloatArray) -> MethodResult:
    corrected = calibration.brier_corrected(share, test.prob_a, test.n_votes)
    return MethodResult(name, k, calibration.brier(share, test.prob_a), corrected, calibration.brier(share, truth))


def ask(town: TownHall, ensemble: RewardEnsemble, prompt: int, *, seed: int = 0) -> Asked:
    """Ask the ensemble one question of a town hall, with the responses of the town as candidates.

    Example:
        >>> from pluralign import fit, town_hall
        >>> town = town_hall(400)
        >>> asked = ask(town, fit(town.preferences, k=2, encoder="none"), 0)
        >>> len(asked.responses), round(sum(asked.first_choices), 6), asked.answer.mode
        (6, 1.0, 'balanced')
    """
    votes, of_prompt, rewards = town.preferences, *_rewards_of_town(town, prompt)
    responses = tuple(str(votes.responses[i]) for i in np.flatnonzero(of_prompt))
    first = np.bincount(rewards.argmax(axis=0), minlength=len(responses)) / rewards.shape[1]
    text = votes.prompts[prompt]
    return Asked(str(text), responses, answer(ensemble, text, responses, seed=seed), tuple(first.tolist()))


def _rewards_of_town(town: TownHall, prompt: int) -> tuple[Mask, FloatArray]:
    """Return which responses belong to a prompt, and everyone's rewards of these, ``(n_responses, n_people)``."""
    of_prompt = town.preferences.items().prompt_index == prompt
    return of_prompt, town.annotator_rewards(range(len(town.tastes)))[of_prompt]


def true_tournament(town: TownHall, prompt: int) -> Tournament:
    """Return the shares of the whole town between the responses to one prompt: a realizable tournament.

    Example:
        >>> from pluralign import town_hall
        >>> true_tournament(town_hall(40), 0).shares.shape
        (6, 6)
    """
    _, rewards = _rewards_of_town(town, prompt)
    shares = (rewards[:, None] > rewards[None]).mean(axis=2)
    np.fill_diagonal(shares, np.nan)
    names = tuple(f"answer {number}" for number in range(1, len(rewards) + 1))
    return Tournament(names, shares, str(town.preferences.prompts[prompt]))


def random_annotators(town: TownHall, rows: Mask, k: int, seed: int) -> MethodResult:
    """Return the mean error of k random people with equal weights, the construction of Theorem 2, over fifty draws."""
    rng = np.random.default_rng(seed)
    test, truth, name = town.preferences[rows], town.true_prob[rows], f"{k} random people"
    errors = []
    for _ in range(DRAWS):
        share = town.annotator_votes(rng.integers(len(town.tastes), size=k)).mean(axis=1)[rows]
        result = _measure_share(name, k, share, test, truth)
        errors.append((result.brier, result.brier_corrected, result.true_error))
    brier, corrected, true_error = np.mean(errors, axis=0).tolist()
    return MethodResult(name, k, brier, corrected, true_error)
