"""The figures of a predictor on votes: of an ensemble, of its baselines, and of each member."""

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import Array, FloatArray, IndexArray, IntArray
from pluralign.core.errors import DataError
from pluralign.core.random_streams import EVALUATION_FOLDS, FIRST_CHOICES, random_stream
from pluralign.core.types import Level
from pluralign.core.version import __version__
from pluralign.ensemble import record as records
from pluralign.ensemble.ensemble import VOICES, RewardEnsemble
from pluralign.ensemble.folder import REMEDY
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.learning.baselines import FORMULAS, Baseline
from pluralign.learning.pairs import Differences, Members, Pairs, hard_votes
from pluralign.learning.task import LearningData
from pluralign.learning.voices import judgment_figures
from pluralign.text.judge import JudgeUsage
from pluralign.theory import calibration
from pluralign.theory.calibration import brier, by_stratum, expected_calibration_error, reliability, squared_error
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval, clustered_interval, paired_difference
from pluralign.theory.social_choice import FirstChoiceShares, first_choices
from pluralign.votes.judgments import Judgments, ranges
from pluralign.votes.preferences import PreferenceSet, rows_of_texts

Kind: TypeAlias = Literal["ensemble", "reward model", "scores", "probabilities", "personas"]

FOLDS = 5
TEMPERATURES = np.geomspace(1 / 64, 64, 97)
"""Temperatures to try, in units of the root mean square difference of rewards."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """A predictor of vote shares, with its predictions for the pairs of one data set."""

    name: str
    kind: Kind
    readings: Mapping[str, FloatArray]
    """Predicted shares preferring a, each ``(n_pairs,)``: ``vote``, ``policy`` and ``tempered``, or ``prob``."""
    level: str
    """The reading that its main figures measure."""
    difference: FloatArray | None = None
    """reward_a − reward_b of each member, ``(n_pairs, k)``. None for files of probabilities."""
    weights: FloatArray | None = None
    """Of the members, ``(k,)``."""
    undecided: float = 0.0
    """u, the share of votes that no member explains."""
    temperature: float | None = None
    """β of an ensemble's policy-level reading, or T of the tempered reading of another reward model."""
    note: str = ""
    """A remark on how its rewards were read, for people."""
    usage: JudgeUsage | None = None
    """Calls and tokens of a language model that judges as personas."""
    personas: tuple[str, ...] = ()
    """Descriptions of the members, if they are personas."""
    rewards: FloatArray | None = None
    """Rewards of ``preferences.items()``, ``(n_items, k)``, of an ensemble whose first choices are measured."""
    judged: records.JudgmentFigures | None = None
    """Figures of whole judgments, of an ensemble that was fitted to judgments."""

    @property
    def k(self) -> int:
        """Number of rewards. A file of probabilities counts as one."""
        return 1 if self.weights is None else len(self.weights)

    @property
    def prob_hat(self) -> FloatArray:
        """The predicted shares that its main figures measure, ``(n_pairs,)``."""
        return self.readings[self.level]

    @property
    def votes(self) -> FloatArray | None:
        """The members' votes, ``(n_pairs, k)``. None for files of probabilities."""
        if self.difference is None:
            return None
        return calibration.votes_from_rewards(self.difference, np.zeros_like(self.difference))


def ensemble_predictor(
    ensemble: RewardEnsemble, preferences: PreferenceSet, difference: FloatArray, name: str = "ensemble"
) -> Predictor:
    """Return an ensemble as a predictor, from the reward differences of each pair, ``(n_pairs, k)``.

    If it was trained with a reference policy, the votes have the columns of that policy.
    """
    readings = ensemble.readings(difference, ensemble.log_ratio(preferences))
    own, note = (ensemble.weights, ensemble.undecided, ensemble.temperature), ""
    if ensemble.reference is not None:
        note = f"the policy level has the reference policy {ensemble.reference}"
    by_name = {str(level): share for level, share in readings.items()}
    return Predictor(name, "ensemble", by_name, ensemble.level, difference, *own, note)


def reward_predictor(
    name: str,
    kind: Kind,
    difference: FloatArray,
    weights: FloatArray,
    preferences: PreferenceSet,
    seed: int = 0,
    note: str = "",
    undecided: float = 0.0,
) -> Predictor:
    """Return rewards that were trained elsewhere as a predictor with three readings.

    ``vote``: Σ_j α_j 1[Δr_j > 0]. ``policy``: Σ_j α_j σ(Δr_j), App. A at β = 1, the model of a Bradley–Terry
    reward. ``tempered``: Σ_j α_j σ(Δr_j / T), see ``cross_fitted``. An undecided share u turns each into
    u/2 + (1 − u) times it. The main reading of one reward is σ(Δr), that of several is the share of their votes.
    """
    votes = calibration.votes_from_rewards(difference, np.zeros_like(difference))
    readings = {
        "vote": calibration.with_undecided(calibration.ensemble_prob(votes, weights), undecided),
        "policy": calibration.with_undecided(calibration.policy_prob(difference, weights, 1.0), undecided),
    }
    temperature = None
    if len(preferences.prompts) > 1:
        readings["tempered"], temperature = cross_fitted(
            difference, weights, preferences.prob_a, preferences.prompt_index, seed, undecided
        )
    level = "policy" if len(weights) == 1 else "vote"
    return Predictor(name, kind, readings, level, difference, weights, undecided, temperature, note)


def cross_fitted(
    difference: FloatArray,
    weights: FloatArray,
    prob_a: FloatArray,
    prompt_index: npt.NDArray[np.integer[Any]],
    seed: int = 0,
    undecided: float = 0.0,
) -> tuple[FloatArray, float]:
    """Return p̂(T) = u/2 + (1 − u) Σ_j α_j σ(Δr_j / T) with T chosen on prompts other than those it is applied to.

    Prompts are split into five folds. For each fold, T minimises the Brier score on the other four,

      T_f = argmin_T mean over pairs outside f of (p̂(T) − p)²,

    over a grid around the typical |Δr|.

    Returns:
        The shares, ``(n_pairs,)``, and the median of the temperatures.

    Example:
        >>> difference = np.array([[4.0], [4.0], [-4.0], [-4.0]])
        >>> shares, temperature = cross_fitted(difference, np.ones(1), np.array([.75, .75, .25, .25]), np.arange(4))
        >>> shares.round(1)
        array([0.7, 0.7, 0.3, 0.3])
    """
    spread = float(np.sqrt(np.mean(difference**2))) or 1.0
    temperatures = TEMPERATURES * spread
    prompts = np.unique(prompt_index)
    parts = np.array_split(random_stream(seed, EVALUATION_FOLDS).permutation(prompts), min(FOLDS, len(prompts)))
    held_out = [np.isin(prompt_index, part) for part in parts]
    sums = np.empty((len(temperatures), len(parts)))

    def share(rows: FloatArray, temperature: float) -> FloatArray:
        return calibration.with_undecided(calibration.policy_prob(rows, weights, temperature), undecided)

    for row, temperature in enumerate(temperatures):
        error = squared_error(share(difference, temperature), prob_a)
        sums[row] = [error[mask].sum() for mask in held_out]
    chosen = temperatures[np.argmin(sums.sum(axis=1, keepdims=True) - sums, axis=0)]
    shares = np.empty(len(prob_a))
    for mask, temperature in zip(held_out, chosen, strict=True):
        shares[mask] = share(difference[mask], temperature)
    return shares, float(np.median(chosen))


# --- do several rewards predict pair counts better than the best single reward? ---------------------------------------


ERROR_RATE = 0.05
"""Probability of an interval that misses its value, for all readings of an ensemble together."""


def evidence_of_voices(
    readings: Mapping[str, FloatArray], baselines: Mapping[str, FloatArray], preferences: PreferenceSet
) -> records.VoicesEvidence | None:
    """Test whether an ensemble predicts pair counts better than the best single reward.

    It can do so although nobody differs: several rewards also explain what the features miss. See ``JudgmentFigures``.

    With p̂ a reading of the ensemble and q the prediction of the best single reward on the same votes,

        difference = mean (p̂ − p)² − mean (q − p)²,

    with an interval over prompts for each of R readings, of coverage 1 − .05/R (Bonferroni). There is evidence if one
    of these intervals is entirely below 0. Taking the single reward that is best on these votes makes the test
    conservative.

    Args:
        readings: predicted shares of the ensemble by reading, ``(n_pairs,)`` each.
        baselines: predicted shares of its baselines by name, ``(n_pairs,)`` each.
        preferences: the votes. Use prompts that nothing was trained on.

    Returns:
        The evidence, undefined with fewer than ``ENOUGH_CLUSTERS`` prompts. None if no baseline is a single reward.
    """
    prob_a, prompt = preferences.prob_a, preferences.prompt_index
    singles = {name: brier(baselines[name], prob_a) for name in records.SINGLE_REWARDS if name in baselines}
    if not singles:
        return None
    best_single = min(singles, key=singles.__getitem__)
    theirs, confidence = squared_error(baselines[best_single], prob_a), 1 - ERROR_RATE / len(readings)
    differences = {
        reading: paired_difference(
            squared_error(share, prob_a), theirs, prompt, confidence, min_clusters=ENOUGH_CLUSTERS
        )
        for reading, share in readings.items()
    }
    too_few = any(math.isnan(one.high) for one in differences.values())
    reading = min(differences, key=lambda name: differences[name].mean if too_few else differences[name].high)
    return records.VoicesEvidence(
        evidence=None if too_few else differences[reading].high < 0,
        best_single=best_single,
        reading=reading,
        difference=differences[reading],
        confidence=confidence,
    )


def baselines_of(ensemble: RewardEnsemble) -> dict[str, Baseline]:
    """Return the baselines that were fitted with an ensemble."""
    formulas = ensemble.record.baseline_formulas
    for name, formula in formulas.items():
        if formula not in FORMULAS or name not in ensemble.baselines:
            raise DataError(f"the baseline {name} of the ensemble is damaged", remedy=REMEDY)
    return {name: Baseline(formula, ensemble.baselines[name]) for name, formula in formulas.items()}


def evaluate_features(ensemble: RewardEnsemble, preferences: PreferenceSet, features: Array) -> records.Evaluation:
    """Measure an ensemble on votes, given the features of ``texts_of(preferences)`` in that order."""
    subject, baselines = read_ensemble(ensemble, preferences, features)
    return measure(subject, baselines, preferences)


@dataclass(frozen=True, eq=False)
class BaselinePrediction:
    """The prediction of a baseline."""

    share: FloatArray
    k: int = 1
    worst: float | None = None
    rewards: FloatArray | None = None
    """One reward of each of ``preferences.items()``, ``(n_items, 1)``, that is read as Plackett–Luce."""


def read_ensemble(
    ensemble: RewardEnsemble, preferences: PreferenceSet, features: Array, name: str = "ensemble"
) -> tuple[Predictor, dict[str, BaselinePrediction]]:
    """Return the predictions of an ensemble and of its baselines, which share its inputs."""
    items = preferences.items()
    inputs = ensemble.members.inputs(features)
    rewards = np.asarray(inputs @ ensemble.members.theta, dtype=np.float64)
    pairs = Differences(inputs, items.a, items.b, log_ratio=ensemble.log_ratio(preferences))
    baselines = {}
    for baseline_name, baseline in baselines_of(ensemble).items():
        worst = worst_disagreement(baseline.votes(pairs), baseline.arrays.get("weights"), preferences.prob_a)
        plain = baseline.rewards(inputs) if baseline_name == "soft_bt" else None
        baselines[baseline_name] = BaselinePrediction(baseline.prob_hat(pairs), baseline.k, worst, plain)
    predictor = ensemble_predictor(ensemble, preferences, rewards[items.a] - rewards[items.b], name)
    judged, found = preferences.judgments, None
    if judged is not None and VOICES in ensemble.baselines and len(ensemble.baselines[VOICES]["shares"]) > 1:
        found = judgment_figures(ensemble.baselines, judged, judged.items(preferences), inputs)
    return replace(predictor, rewards=rewards, judged=found), baselines


def worst_disagreement(votes: FloatArray | None, weights: Array | None, prob_a: FloatArray) -> float | None:
    """Return the largest disagreement of a member whose weight counts, or None without votes."""
    if votes is None or weights is None:
        return None
    found = np.asarray(calibration.disagreement(votes, prob_a))
    return float(found[weights > records.NEGLIGIBLE_WEIGHT].max())


def measure(
    subject: Predictor, baselines: Mapping[str, BaselinePrediction], preferences: PreferenceSet
) -> records.Evaluation:
    """Return the figures of a predictor, of its baselines, of the floor and of constant ½ on the same votes.

    Where most pairs have fewer than four votes, the floor has no corrected score and no interval
    (``calibration.floor_is_measurable``). With fewer than 20 prompts nothing has an interval.
    """
    p, prediction, votes = preferences.prob_a, subject.prob_hat, subject.votes
    others = {
        "floor": BaselinePrediction((p > 0.5).astype(float)),
        "constant_half": BaselinePrediction(np.full(len(p), 0.5)),
        **baselines,
    }
    compared = {name: compare(one.share, prediction, preferences, one.k, one.worst) for name, one in others.items()}
    if not calibration.floor_is_measurable(preferences.n_votes):
        compared["floor"] = without_verdict(compared["floor"])
    members = []
    if votes is not None and subject.weights is not None:
        phi = np.asarray(calibration.disagreement(votes, p))
        members = [
            records.MemberFigures(float(weight), float(phi[j]), calibration.regret(votes[:, j], p))
            for j, weight in enumerate(subject.weights)
        ]
    several = subject.kind == "ensemble" and sum(member.weight > records.NEGLIGIBLE_WEIGHT for member in members) > 1
    shares = {name: baseline.share for name, baseline in baselines.items()}
    voices = evidence_of_voices(subject.readings, shares, preferences) if several else None
    return records.Evaluation(
        level=subject.level,
        test=_figures(prediction, preferences),
        levels={name: _figures(share, preferences) for name, share in subject.readings.items()},
        baselines=compared,
        members=members,
        undecided=subject.undecided,
        reliability=reliability(prediction, p),
        strata=by_stratum(squared_error(prediction, p), p),
        pairs=len(preferences),
        prompts=len(preferences.prompts),
        voices=voices,
        judgments=subject.judged,
        first_choices=first_choice_figures(subject, baselines.get("soft_bt"), preferences),
    )


def without_verdict(found: records.Compared) -> records.Compared:
    """Return a baseline whose score on these votes allows no comparison: without corrected score and interval."""
    unknown = Interval(found.difference.mean, math.nan, math.nan, math.nan)
    return replace(found, brier_corrected=math.nan, difference=unknown)


def _errors(share: FloatArray, preferences: PreferenceSet) -> dict[str, float]:
    p = preferences.prob_a
    return {
        "brier": brier(share, p),
        "brier_corrected": calibration.brier_corrected(share, p, preferences.n_votes, preferences.counted_ties),
        "log_loss": calibration.log_loss(share, p),
        "absolute_error": calibration.absolute_error(share, p),
    }


def _figures(prediction: FloatArray, preferences: PreferenceSet) -> records.Figures:
    p, n, ties = preferences.prob_a, preferences.n_votes, preferences.counted_ties
    error = squared_error(prediction, p)
    corrected = error - calibration.sampling_noise(p, n, ties)
    values = corrected if not np.isnan(corrected).all() else error
    return records.Figures(
        **_errors(prediction, preferences),
        noise=calibration.noise(p, n, ties),
        calibration_error=expected_calibration_error(prediction, p),
        interval=clustered_interval(values, preferences.prompt_index, min_clusters=ENOUGH_CLUSTERS),
    )


def compare(
    share: FloatArray, prediction: FloatArray, preferences: PreferenceSet, k: int = 1, worst: float | None = None
) -> records.Compared:
    """Compare a baseline's predicted shares with ``prediction``, the shares of the predictor that is measured."""
    ours, theirs = (squared_error(one, preferences.prob_a) for one in (prediction, share))
    difference = paired_difference(ours, theirs, preferences.prompt_index, min_clusters=ENOUGH_CLUSTERS)
    return records.Compared(**_errors(share, preferences), k=k, difference=difference, worst_disagreement=worst)


# --- first choices in sets of more than two responses -----------------------------------------------------------------

SET_SIZES = (2, 3, 4)
LONGEST_RANKING = 8
"""Of longer rankings a random sample of the responses counts, the same for all people of a prompt: 70 sets of four."""


def first_choice_figures(
    subject: Predictor, soft_bt: BaselinePrediction | None, preferences: PreferenceSet, seed: int = 0
) -> list[records.FirstChoices]:
    """Compare predicted with observed shares of first choices in all sets of t = 2, 3, 4 responses that people ranked.

    Args:
        subject: the ensemble. At the policy level its members choose by Plackett–Luce.
        soft_bt: one reward to compare with.
        preferences: votes with judgments. Several votes of one person are not combined to a ranking.
        seed: of the sample of responses from rankings that are too long.

    Returns:
        Figures for each t for which two people ranked the same t responses. None without judgments or rewards.
    """
    if (judged := preferences.judgments) is None or subject.rewards is None or subject.weights is None:
        return []
    beta = (subject.temperature or 0.0) if subject.level == "policy" else 0.0
    single = None if soft_bt is None else soft_bt.rewards
    items, places = _as_matrices(judged, judged.items(preferences), seed)
    figures = []
    for t in SET_SIZES:
        observed = FirstChoiceShares.of(items, places, judged.judgment, t)
        if not len(observed.n):
            continue
        prompt = preferences.items().prompt_index[observed.items[:, 0]]
        share = first_choices(subject.rewards[observed.items], subject.weights, beta, subject.undecided)
        error, uniform = observed.error(share), observed.error(np.full(share.shape, 1 / t))
        rival = np.full(len(error), np.nan)
        if single is not None:
            rival = observed.error(first_choices(single[observed.items], np.ones(1), 1.0))
        corrected = clustered_interval(error - observed.noise, prompt, min_clusters=ENOUGH_CLUSTERS)
        difference = paired_difference(error, rival, prompt, min_clusters=ENOUGH_CLUSTERS)
        means = float(error.mean()), corrected.mean, corrected, float(rival.mean()), float(uniform.mean())
        figures.append(records.FirstChoices(t, len(error), *means, difference))
    return figures


def _as_matrices(judged: Judgments, item: IndexArray, seed: int) -> tuple[IntArray, IntArray]:
    """Return the items of each ranking in ascending order, and their places, ``(n_rankings, length)``; −1 is missing.

    Args:
        judged: the rankings.
        item: number of each entry, ``(n_entries,)``.
        seed: of the sample from rankings that are longer than ``LONGEST_RANKING``.
    """
    ranking = np.repeat(np.arange(len(judged)), judged.sizes)
    drawn = random_stream(seed, FIRST_CHOICES).permutation(int(item.max()) + 1)[item]
    rank = np.empty(len(item), dtype=np.int64)
    rank[np.lexsort((drawn, ranking))] = ranges(np.zeros_like(judged.sizes), judged.sizes)
    kept = np.flatnonzero(rank < LONGEST_RANKING)
    kept = kept[np.lexsort((item[kept], ranking[kept]))]
    sizes = np.minimum(judged.sizes, LONGEST_RANKING)
    cells = ranking[kept], ranges(np.zeros_like(sizes), sizes)
    items, places = np.full((2, len(judged), int(sizes.max())), -1, dtype=np.int64)
    items[cells], places[cells] = item[kept], judged.place[kept]
    return items, places


# --- a fitted ensemble on its held-out pairs, and the record of the fit -----------------------------------------------


def measure_fit(
    ensemble: RewardEnsemble, data: LearningData, baselines: Mapping[str, Baseline], history: list[records.HistoryRow]
) -> tuple[RewardEnsemble, HeldOutVotes]:
    """Measure a fitted ensemble on the held-out pairs.

    Args:
        ensemble: the ensemble, without a record.
        data: the votes, which of them are held out, and the features of their texts.
        baselines: the baselines fitted beside it.
        history: the ensembles of each size.

    Returns:
        The ensemble with its baselines and its record, and the held-out votes with its rewards.
    """
    votes, options, test_votes = data.preferences, data.options, data.preferences[data.test_rows]
    learned_from = votes.prompt_index[~data.test_rows]
    record = records.FitRecord(
        method=options.method,
        level=options.level,
        k=ensemble.k,
        baseline_formulas={name: baseline.formula for name, baseline in baselines.items()},
        options=asdict(options),
        history=history,
        data=records.DataSummary(
            name=votes.name,
            fingerprint=votes.fingerprint,
            train_pairs=len(learned_from),
            train_prompts=len(np.unique(learned_from)),
            test_pairs=len(test_votes),
            test_prompts=len(np.unique(votes.prompt_index[data.test_rows])),
            loaded=votes.loaded,
        ),
        versions={"pluralign": __version__, "python": platform.python_version(), "numpy": np.__version__},
    )
    arrays = {**ensemble.baselines, **{name: baseline.arrays for name, baseline in baselines.items()}}
    trained_on = records.hash_prompts(votes.prompts[np.unique(learned_from)])
    ensemble = replace(ensemble, record=record, baselines=arrays, trained_on=trained_on)
    features = data.checkpoints.processes.gathered(data.features, rows_of_texts(test_votes, votes))
    evaluation = evaluate_features(ensemble, test_votes, features)
    ensemble = replace(ensemble, record=replace(record, evaluation=evaluation))
    return ensemble, HeldOutVotes(test_votes, ensemble.members.rewards(features))


def bound_cost(
    evaluation: records.Evaluation, unbounded: Members, test: Pairs, max_disagreement: float, level: Level
) -> records.BoundCost:
    """Measure what the bound on disagreement costs on the test pairs.

    Args:
        evaluation: the figures of the ensemble with the bound.
        unbounded: the ensemble fitted without it.
        test: the test pairs.
        max_disagreement: the bound.
        level: the reading that was optimised.
    """
    without = worst_disagreement(hard_votes(test.difference, unbounded.theta), unbounded.weights, test.prob_a)
    worst = evaluation.worst_disagreement()
    assert worst is not None and without is not None  # noqa: S101, PT018 - an ensemble has members
    return records.BoundCost(max_disagreement, evaluation.test.brier, unbounded.brier(test, level), worst, without)
