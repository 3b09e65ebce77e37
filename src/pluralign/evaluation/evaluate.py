"""``evaluate``: a predictor of vote shares, with its baselines, other predictors, groups and the policy level."""

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike

import numpy as np

from pluralign.core.arrays import Array, Mask
from pluralign.core.errors import UsageError
from pluralign.core.random_streams import PAIR_SAMPLE, random_stream
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.headline import headline
from pluralign.ensemble.training_prompts import pairs_to_measure
from pluralign.evaluation.groupings import DEFAULT_GROUPINGS, check_grouping
from pluralign.evaluation.groups import adversarial_calibration, judge_groups
from pluralign.evaluation.majority import certain_though_contested, majority_shares
from pluralign.evaluation.measure import compare, measure, read_ensemble, worst_disagreement
from pluralign.evaluation.personas import Personas
from pluralign.evaluation.policy_level import check_betas, policy_level
from pluralign.evaluation.representation import represent
from pluralign.evaluation.results import FullEvaluation, PredictorInfo, Rival
from pluralign.evaluation.sources import Source, find_predictor, load_predictor
from pluralign.features.frozen import TextFeatures
from pluralign.features.store import stored_features
from pluralign.votes.load import VotesLike, as_preferences
from pluralign.votes.preferences import PreferenceSet, rows_of_texts, texts_of
from pluralign.votes.raters import RaterVotes


def evaluate(
    subject: Source,
    preferences: VotesLike,
    *,
    against: Sequence[Source] = (),
    groups: Sequence[str] = DEFAULT_GROUPINGS,
    betas: Sequence[float] = (),
    reference: str | None = None,
    features: str | None = None,
    raters: RaterVotes | None = None,
    all_prompts: bool = False,
    limit: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> FullEvaluation:
    """Evaluate an ensemble with its baselines, or any other predictor of vote shares.

    Args:
        subject: an ensemble or its folder, a transformers reward model (a folder or a hub id), a file of scores or
            probabilities, or ``Personas``.
        preferences: the votes: a ``PreferenceSet``, a path, a pandas DataFrame, a ``datasets`` object or a list of
            dicts. Prompts that an ensemble (the subject, or one of ``against``) was trained on are left out;
            ``left_out`` of the result counts them. Of other predictors the training prompts are unknown.
        against: other predictors to compare with, pair by pair.
        groups: groupings of the pairs: ``length``, ``topic``, ``strata``, or a column of the data.
        betas: further strengths of regularisation for the policy level.
        reference: the reference policy: ``data`` for columns logprob_a and logprob_b, or a causal model (a folder, a
            hub id or ``smollm2``).
        features: a folder of ``pluralign encode`` with the features of these votes, for ensembles on frozen features.
        raters: the same votes with their raters (``load_rater_votes``), to measure how well an ensemble predicts
            individuals; ``preferences`` must be ``raters.preferences``.
        all_prompts: measure on training prompts too. The figures are then too good.
        limit: measure on a random sample of at most this many pairs, prompt by prompt.
        seed: of topics, random groups, simulated votes, folds, the sample and the raters' choices.
        progress: called with the texts done and the total.
    """
    if not isinstance(subject, RewardEnsemble | Personas | str | PathLike) or isinstance(preferences, RewardEnsemble):
        raise UsageError("evaluate takes the predictor first, then the votes: evaluate(ensemble, votes).")
    preferences = as_preferences(preferences)
    if raters is not None and raters.preferences is not preferences:
        raise UsageError("preferences must be raters.preferences: the same votes, counted per pair.")
    for grouping in groups:
        check_grouping(grouping, preferences)
    check_betas(betas)
    name, representation, everything = "ensemble", None, preferences
    if isinstance(subject, str | PathLike) and find_predictor(subject) == "ensemble":
        name, subject = str(subject), RewardEnsemble.load(subject)
    ensembles = [found for source in (subject, *against) if (found := _ensemble(source)) is not None]
    measured, left_out = pairs_to_measure(
        everything, [ensemble.trained_on for ensemble in ensembles], all_prompts=all_prompts
    )
    if limit is not None:
        measured = _sample_pairs(everything, measured, limit, seed)
    preferences = everything[measured] if not measured.all() else everything
    if isinstance(subject, RewardEnsemble):
        inputs = _features(subject, everything if raters else preferences, features, progress)
        if raters is not None:
            trained = None if all_prompts else subject.trained_on
            representation = represent(subject, raters, inputs, trained, seed=seed, progress=progress)
            inputs = inputs[rows_of_texts(preferences, everything)]
        own, baselines = read_ensemble(subject, preferences, inputs, name)
    elif raters is not None:
        raise UsageError("--raters needs an ensemble folder: other predictors have no members to choose from.")
    elif features:
        raise UsageError("--features needs an ensemble on frozen features; this predictor reads texts.")
    else:
        own, baselines = load_predictor(subject, preferences, measured=measured, seed=seed, progress=progress), {}
    rivals = []
    for other in against:
        rival = load_predictor(other, preferences, measured=measured, seed=seed, progress=progress)
        worst = worst_disagreement(rival.votes, rival.weights, preferences)
        readings = {
            reading: compare(share, own.prob_hat, preferences, rival.k, worst)
            for reading, share in rival.readings.items()
        }
        rivals.append(Rival(rival.name, rival.kind, rival.level, readings, rival.note, rival.usage, rival.personas))
    p, n, prediction = preferences.prob_a, preferences.n_votes, own.prob_hat
    measured_figures = replace(measure(own, baselines, preferences), left_out=left_out)
    record = subject.record if isinstance(subject, RewardEnsemble) else None
    majority = majority_shares(prediction, p, n, seed=seed)
    by_group, worst_group = judge_groups(prediction, preferences, groups, seed=seed)
    return FullEvaluation(
        **vars(measured_figures),
        subject=PredictorInfo(own.name, own.kind, own.k, own.temperature, own.note, own.usage, own.personas),
        headline=headline(measured_figures, record, name),
        against=rivals,
        majority=majority,
        certain_though_contested=certain_though_contested(majority),
        groups=by_group,
        worst_group=worst_group,
        adversarial=adversarial_calibration(prediction, p, n, preferences.prompt_index, seed=seed),
        policy=policy_level(own, preferences, betas, reference, progress),
        representation=representation,
    )


def _ensemble(source: Source) -> RewardEnsemble | None:
    """Return the ensemble that a source names, or None if it is another predictor."""
    if isinstance(source, RewardEnsemble):
        return source
    if isinstance(source, Personas):
        return None
    return RewardEnsemble.load(source) if find_predictor(source) == "ensemble" else None


def _sample_pairs(preferences: PreferenceSet, measured: Mask, limit: int, seed: int) -> Mask:
    """Return a mask of at most ``limit`` of the measured pairs: those of randomly drawn prompts."""
    if limit < 1:
        raise UsageError(f"limit must be at least 1 pair, not {limit}.")
    place = random_stream(seed, PAIR_SAMPLE).permutation(len(preferences.prompts))[preferences.prompt_index]
    rows = np.flatnonzero(measured)
    chosen = np.zeros(len(measured), dtype=bool)
    chosen[rows[np.argsort(place[rows], kind="stable")][:limit]] = True
    return chosen


def _features(
    ensemble: RewardEnsemble, preferences: PreferenceSet, stored: str | None, progress: Progress | None
) -> Array:
    texts = texts_of(preferences)
    if stored is None:
        return ensemble.features(texts, progress)
    if not isinstance(ensemble.features, TextFeatures):
        raise UsageError("--features needs an ensemble on frozen features; this one is fine-tuned.")
    return stored_features(stored, texts, ensemble.features)
