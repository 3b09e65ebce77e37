"""``fit``: from votes to an ensemble, with the evidence beside it.

Decided here: the order of the work, what is chosen on validation prompts, and what is recorded. The mathematics is in
``joint`` and ``stagewise``; nothing here looks at test votes before the last step.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from pluralign import __version__, calibration, surface
from pluralign.baselines import BASELINES, Baseline, fit_baselines
from pluralign.bradley_terry import fit_bradley_terry, scores, sigmoid
from pluralign.encoders import Progress
from pluralign.ensemble import RewardEnsemble, TextFeatures, texts_of
from pluralign.errors import DataError
from pluralign.evaluation import Evaluation, evaluate_features
from pluralign.evidence import Evidence, remove_evidence, save_evidence
from pluralign.extremes import training_bound
from pluralign.hidden import fit_hidden_layer
from pluralign.joint import FEW_RESTARTS, RESTARTS, VOTE_SHARE, Teacher, fit_joint, fit_policy_level, fit_teacher
from pluralign.jsonable import without_nan
from pluralign.members import LinearMembers, fit_feature_map
from pluralign.options import FitOptions, with_changes
from pluralign.pairs import Pairs, validation_folds
from pluralign.preferences import PreferenceSet
from pluralign.stagewise import Stage, hard_votes, stages
from pluralign.steps import Arrays, Steps

FloatArray: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]

SECOND_SPLIT = 1_000_003
MANY_PAIRS = 100_000
"""Below this numpy gets one thread: more gain nothing on such matrices, lose much on a busy machine, and change the
last digits of results with the number of cores."""
AUTO_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
STAGEWISE_L2_GRID = (0.1, 0.03, 0.01, 0.003)
BETAS = np.geomspace(0.02, 4.0, 48)
"""Temperatures of the policy-level reading that are tried, for rewards whose differences have unit spread."""


@dataclass(frozen=True)
class Record:
    """The ensemble of one size: a row of ``history``."""

    k: int
    train_brier: float
    test_brier: float
    test_brier_corrected: float
    weights: list[float]


Watch: TypeAlias = Callable[[str, Any], None]
"""Called with what is at hand ("encode", "floor", "baseline", "choose", "record") and its name, value or ``Record``."""


def fit(
    preferences: PreferenceSet,
    options: FitOptions | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    watch: Watch = lambda *_: None,
    **changes: Any,
) -> RewardEnsemble:
    """Learn an ensemble whose weighted votes match people's.

    Args:
        preferences: the votes. Prompts of the test side judge and are not learned from.
        options: how to learn; ``changes`` are its fields by name.
        folder: where unfinished work is kept and resumed from, and the ensemble is saved in the end, with the held-out
            votes unless ``keep_held_out`` is off.
        progress: called with texts encoded and in all.
        watch: called as the work goes on.

    Returns:
        The ensemble; its ``facts`` hold history, held-out figures, baselines and members.

    Example:
        >>> from pluralign import town_hall
        >>> ensemble = fit(town_hall(400).preferences, k=2, encoder="none")
        >>> ensemble.k, round(float(ensemble.weights.sum()), 6)
        (2, 1.0)
    """
    options = with_changes(options or FitOptions(), changes)
    started = time.perf_counter()
    test_rows = held_out(preferences, options)
    text_features = TextFeatures(options.encoder, options.layer, options.pooling, options.surface)
    texts = texts_of(preferences)
    watch("encode", len(texts))
    features = text_features(texts, progress)
    encoding = time.perf_counter() - started
    encoder = text_features.load()
    text_features = replace(text_features, identity=encoder.identity if encoder else "")
    inputs = {"data": preferences.fingerprint, "options": asdict(options), "version": __version__}
    steps = Steps(folder, {**inputs, "encoder": text_features.identity})
    with threadpool_limits(1 if len(preferences) < MANY_PAIRS else None, user_api="blas"):
        ensemble, evidence = _learn(preferences, test_rows, features, text_features, options, steps, watch)
    seconds = {"seconds": time.perf_counter() - started, "seconds_encoding": encoding}
    ensemble = replace(ensemble, facts={**ensemble.facts, **seconds})
    if folder is not None:
        if options.keep_held_out:
            save_evidence(evidence, folder)
        else:
            remove_evidence(folder)
        ensemble.save(folder)
        steps.finish()
    return ensemble


def held_out(preferences: PreferenceSet, options: FitOptions) -> Mask:
    """Return which pairs judge the ensemble: those on the test side of ``preferences.split``.

    So ``votes.split()`` gives prompts that ``fit(votes)`` did not learn from. Of votes that are the training side of
    such a split already, none are on its test side; then a second hash holds out a part of them.
    """
    try:
        return preferences.test_mask(options.test_fraction, seed=options.seed)
    except DataError:
        return preferences.test_mask(options.test_fraction, seed=options.seed + SECOND_SPLIT)


def _learn(
    preferences: PreferenceSet,
    test_rows: Mask,
    features: npt.NDArray[np.float32],
    text_features: TextFeatures,
    options: FitOptions,
    steps: Steps,
    watch: Watch,
) -> tuple[RewardEnsemble, Evidence]:
    texts = texts_of(preferences)
    items = preferences.items()
    in_train = np.zeros(len(texts), dtype=bool)
    in_train[items.a[~test_rows]] = in_train[items.b[~test_rows]] = True
    inputs = fit_feature_map(features[in_train], len(surface.NAMES) if options.surface else 0)
    everything = Pairs(inputs(features), items.a, items.b, preferences.prob_a, preferences.prompt_index)
    if options.members == "mlp":
        hidden, bias = fit_hidden_layer(everything[~test_rows], seed=options.seed)
        inputs = replace(inputs, hidden=hidden, bias=bias)
        everything = replace(everything, inputs=inputs(features))
    train, test = everything[~test_rows], everything[test_rows]
    work = _Work(train, validation_folds(train.prompt, options.seed), options, steps, watch)

    watch("floor", calibration.floor(test.prob_a))
    baselines = _baselines(work)
    size = work.chosen_size() if options.k == "auto" else int(options.k)
    test_votes, test_ties = preferences.n_votes[test_rows], preferences.counted_ties[test_rows]
    history = []
    fitted = None
    for k, fitted in work.ensembles(size):
        share = work.predict(test, *fitted)
        corrected = calibration.brier_corrected(share, test.prob_a, test_votes, test_ties)
        trained = calibration.brier(work.predict(train, *fitted), train.prob_a)
        history.append(Record(k, trained, calibration.brier(share, test.prob_a), corrected, fitted[1].tolist()))
        watch("record", history[-1])
    assert fitted is not None  # noqa: S101 - sizes are never empty
    theta, weights = fitted
    beta = work.beta(size)
    spread = np.std(scores(train.difference, theta), axis=0)
    if options.level == "vote":  # a vote does not see the scale: rewards get unit spread, for β and for people
        theta = theta / np.maximum(spread, 1e-12)

    ensemble = RewardEnsemble(
        members=LinearMembers(inputs, theta),
        weights=weights,
        features=text_features,
        temperature=beta,
        facts={
            "method": options.method,
            "level": options.level,
            "k": size,
            "baseline_formulas": {name: baseline.formula for name, baseline in baselines.items()},
        },
        baselines={name: baseline.arrays for name, baseline in baselines.items()},
    )
    row_of = {text: row for row, text in enumerate(texts)}
    test_set = preferences[test_rows]
    test_features = features[[row_of[text] for text in texts_of(test_set)]]
    evaluation = evaluate_features(ensemble, test_set, test_features)
    facts = {
        **ensemble.facts,
        "options": asdict(options),
        "target": work.target if options.method == "joint" and options.level == "vote" else None,
        "history": [asdict(record) for record in history],
        "bound": _bound(work, evaluation, test, size),
        "baseline_seconds": {name: baseline.seconds for name, baseline in baselines.items()},
        "data": {
            "name": preferences.name,
            "fingerprint": preferences.fingerprint,
            "train_pairs": len(train),
            "train_prompts": len(np.unique(train.prompt)),
            "test_pairs": len(test),
            "test_prompts": len(np.unique(test.prompt)),
        },
        "versions": {"pluralign": __version__, "python": platform.python_version(), "numpy": np.__version__},
        **evaluation_facts(evaluation),
    }
    evidence = Evidence(test_set, ensemble.members.rewards(test_features))
    return replace(ensemble, facts=without_nan(facts)), evidence


def evaluation_facts(evaluation: Evaluation) -> dict[str, Any]:
    """Return the figures of an evaluation as plain values, in the words of the command line's JSON."""
    facts = asdict(evaluation)
    facts["reliability"] = {name: values.tolist() for name, values in facts["reliability"].items()}
    return facts


def _baselines(work: "_Work") -> dict[str, Baseline]:
    def compute() -> Arrays:
        k = AUTO_SIZES[-1] if work.options.k == "auto" else int(work.options.k)
        report = partial(work.watch, "baseline")
        fitted = fit_baselines(work.train, work.folds, k, seed=work.options.seed, report=report)
        flat = {f"{name}/{part}": array for name, base in fitted.items() for part, array in base.arrays.items()}
        return flat | {f"{name}/seconds": np.array(base.seconds) for name, base in fitted.items()}

    arrays = work.steps("baselines", compute)
    kept = {}
    for name, formula in BASELINES.items():
        parts = {key.partition("/")[2]: array for key, array in arrays.items() if key.startswith(f"{name}/")}
        seconds = float(parts.pop("seconds"))
        kept[name] = Baseline(formula, parts, seconds)
    return kept


def _bound(work: "_Work", evaluation: Evaluation, test: Pairs, size: int) -> dict[str, Any] | None:
    """What keeping members near people cost: held-out Brier and worst member, with the bound and without."""
    if work.options.max_disagreement >= 1:
        return None
    free = replace(work, options=replace(work.options, max_disagreement=1.0))
    theta, weights = free.one(work.train, size, "unbounded")
    votes = hard_votes(test.difference, theta)
    worst = np.asarray(calibration.disagreement(votes, test.prob_a))[weights > 1e-6].max()
    return {
        "max_disagreement": work.options.max_disagreement,
        "brier": evaluation.test.brier,
        "brier_without": calibration.brier(work.predict(test, theta, weights), test.prob_a),
        "worst": max(member.disagreement for member in evaluation.members if member.weight > 1e-6),
        "worst_without": float(worst),
    }


@dataclass(frozen=True)
class _Work:
    """One fit under way: training pairs, what is chosen on validation prompts, and the two methods behind one door."""

    train: Pairs
    folds: list[Mask]
    options: FitOptions
    steps: Steps
    watch: Watch

    @property
    def bound(self) -> float:
        """The largest disagreement a member may have on training pairs."""
        return training_bound(self.options.max_disagreement, len(np.unique(self.train.prompt)))

    # --- the readings -----------------------------------------------------------------------------------------------

    def predict(self, pairs: Pairs, theta: FloatArray, weights: FloatArray) -> FloatArray:
        """Return the share that members predict at the level that is optimised."""
        if self.options.level == "policy":
            return np.asarray(sigmoid(scores(pairs.difference, theta)) @ weights)
        return np.asarray(hard_votes(pairs.difference, theta) @ weights)

    # --- fitting ----------------------------------------------------------------------------------------------------

    def ensembles(self, size: int) -> Iterator[tuple[int, tuple[FloatArray, FloatArray]]]:
        """Yield (k, (theta, weights)) for every size that history shows, the wanted one last."""
        if self.options.method == "stagewise":
            for j, stage in enumerate(self._stages(self.train, size, self._stagewise_l2(), "stage"), 1):
                yield j, (stage.theta, stage.weights)
            return
        sizes = sorted({2**i for i in range(size.bit_length()) if 2**i < size} | {size})
        for k in sizes:
            yield k, self.one(self.train, k, "joint")

    def one(self, pairs: Pairs, k: int, name: str) -> tuple[FloatArray, FloatArray]:
        """Return (theta, weights) of one ensemble of k members fitted to ``pairs``."""
        if self.options.method == "stagewise":
            *_, last = self._stages(pairs, k, self._stagewise_l2(), name)
            return last.theta, last.weights
        restarts = RESTARTS if name == "joint" else FEW_RESTARTS
        arrays = self.steps(f"{name}-{k}", lambda: self._joint(pairs, k, self.target, restarts))
        return arrays["theta"], arrays["weights"]

    def _joint(self, pairs: Pairs, k: int, target: str, restarts: int = FEW_RESTARTS) -> Arrays:
        teacher, seed = self._teacher(pairs), self.options.seed
        if self.options.level == "policy":
            folds = self.folds if pairs is self.train else validation_folds(pairs.prompt, seed)[:1]
            found = fit_policy_level(pairs, k, folds, l2=teacher.l2, seed=seed, bound=self.bound)
            return {"theta": found.theta, "weights": found.weights}
        if k == 1:
            return {"theta": teacher.theta[:, None], "weights": np.ones(1)}
        share = 1.0 if target == "votes" else VOTE_SHARE
        found = fit_joint(pairs, teacher, k, seed=seed, vote_share=share, bound=self.bound, restarts=restarts)
        return {"theta": found.theta, "weights": found.weights}

    def _teacher(self, pairs: Pairs) -> Teacher:
        def compute() -> Arrays:
            teacher = fit_teacher(self.train, self.folds)
            return {name: np.asarray(value) for name, value in vars(teacher).items()}

        arrays = self.steps("teacher", compute)
        chosen = Teacher(arrays["theta"], *(float(arrays[name]) for name in ("damping", "mean_square", "l2")))
        if pairs is self.train:
            return chosen
        return replace(chosen, theta=fit_bradley_terry(chosen.damp(pairs.difference), pairs.prob_a, chosen.l2))

    def _stages(self, pairs: Pairs, k: int, l2: float, name: str) -> Iterator[Stage]:
        options, known = self.options, None
        anchor = self.steps(
            f"{name}-{l2:g}-anchor", lambda: {"theta": fit_bradley_terry(pairs.difference, pairs.prob_a, l2)}
        )["theta"]
        for j in range(1, k + 1):

            def compute(j: int = j, known: FloatArray | None = known) -> Arrays:
                *_, stage = stages(
                    pairs.difference, pairs.prob_a, j, l2=l2, variant=options.variant, loss=options.loss,
                    bound=self.bound, first=known, anchor=anchor,
                )  # fmt: skip
                return {key: np.asarray(value) for key, value in vars(stage).items()}

            arrays = self.steps(f"{name}-{l2:g}-{j}", compute)
            known = arrays["theta"]
            yield Stage(known, arrays["weights"], float(arrays["brier"]), float(arrays["brier_uncapped"]))

    # --- choices on validation prompts ------------------------------------------------------------------------------

    @property
    def _split(self) -> tuple[Pairs, Pairs]:
        held_out = self.folds[0]
        return self.train[~held_out], self.train[held_out]

    @property
    def target(self) -> str:
        """What joint members learn from: the teacher or the raw votes, whichever predicts validation votes better."""
        if self.options.target != "auto" or self.options.method != "joint" or self.options.level != "vote":
            return self.options.target
        size = 8 if self.options.k == "auto" else int(self.options.k)

        def compute() -> Arrays:
            self.watch("choose", "target")
            learn, check = self._split
            errors = []
            for target in ("teacher", "votes"):
                arrays = self.steps(f"validation-{target}-{size}", lambda t=target: self._joint(learn, size, t))  # type: ignore[misc]
                errors.append(calibration.brier(self.predict(check, arrays["theta"], arrays["weights"]), check.prob_a))
            return {"errors": np.array(errors)}

        errors = self.steps("target", compute)["errors"] if size > 1 else [0.0, 1.0]
        return "teacher" if errors[0] <= errors[1] else "votes"

    def _validated(self, k: int) -> tuple[FloatArray, FloatArray]:
        """Return (theta, weights) fitted without the validation prompts."""
        learn, _ = self._split
        if self.options.method == "stagewise":
            return self.one(learn, k, "validation")
        arrays = self.steps(f"validation-{self.target}-{k}", lambda: self._joint(learn, k, self.target))
        return arrays["theta"], arrays["weights"]

    def beta(self, k: int) -> float:
        """Return the temperature at which the policy-level reading predicts validation votes best."""
        if self.options.level == "policy":
            return 1.0  # its members were trained at this scale
        self.watch("choose", "temperature")
        learn, check = self._split
        theta, weights = self._validated(k)
        theta = theta / np.maximum(np.std(scores(learn.difference, theta), axis=0), 1e-12)
        difference = scores(check.difference, theta)
        errors = [calibration.brier(calibration.policy_prob(difference, weights, beta), check.prob_a) for beta in BETAS]
        return float(BETAS[int(np.argmin(errors))])

    def _stagewise_l2(self) -> float:
        size = AUTO_SIZES[-1] if self.options.k == "auto" else int(self.options.k)

        def compute() -> Arrays:
            self.watch("choose", "regularisation")
            learn, check = self._split
            errors = []
            for l2 in STAGEWISE_L2_GRID:
                *_, last = self._stages(learn, size, l2, "validation")
                errors.append(calibration.brier(self.predict(check, last.theta, last.weights), check.prob_a))
            return {"l2": np.array(STAGEWISE_L2_GRID[int(np.argmin(errors))])}

        return float(self.steps("stagewise-l2", compute)["l2"])

    def chosen_size(self) -> int:
        """Return the smallest k whose validation error is within one standard error of the best."""
        self.watch("choose", "k")
        learn, check = self._split
        errors = {}
        if self.options.method == "stagewise":
            found = dict(enumerate(self._stages(learn, AUTO_SIZES[-1], self._stagewise_l2(), "validation"), 1))
            fits = {k: (stage.theta, stage.weights) for k, stage in found.items()}
        else:
            fits = {k: self._validated(k) for k in AUTO_SIZES}
        for k, fitted in fits.items():
            errors[k] = calibration.squared_error(self.predict(check, *fitted), check.prob_a)
        best = min(errors, key=lambda k: float(errors[k].mean()))
        interval = calibration.clustered_interval(errors[best], check.prompt)
        slack = np.nan_to_num(interval.standard_error)  # NaN with one validation prompt
        return min(k for k in errors if errors[k].mean() <= interval.mean + slack)
