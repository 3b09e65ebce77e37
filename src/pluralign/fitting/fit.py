"""``fit``: from votes to an ensemble, with the evidence beside it.

Decided here: the order of the work, what is chosen on validation prompts, and what is recorded. The mathematics is in
``joint`` and ``stagewise``; nothing here looks at test votes before the last step.
"""

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from pluralign.core.arrays import Array, FloatArray, Mask
from pluralign.core.checkpoints import UNFINISHED, Arrays, Steps
from pluralign.core.distributed import ALONE, Processes, this_process
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.jsonable import without_nan
from pluralign.core.options import changed_options, with_changes
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble, texts_of
from pluralign.ensemble.held_out import Evidence, remove_evidence, save_evidence
from pluralign.ensemble.members import FeatureMap, LinearMembers, as_they_are, fit_feature_map
from pluralign.evaluation.evaluate import Evaluation, evaluate_features
from pluralign.features import surface
from pluralign.features.finetuned import TunedFeatures
from pluralign.features.frozen import TextFeatures
from pluralign.features.store import stored_features
from pluralign.theory import calibration
from pluralign.theory.intervals import clustered_interval
from pluralign.theory.simplex import simplex_least_squares
from pluralign.training.baselines import BASELINES, TEMPERATURES, Baseline, fit_baselines, fit_pair
from pluralign.training.bradley_terry import fit_bradley_terry, scores, sigmoid
from pluralign.training.hidden_layer import fit_hidden_layer
from pluralign.training.joint import (
    FEW_RESTARTS,
    RESTARTS,
    VOTE_SHARE,
    JointFit,
    Teacher,
    fit_joint_sizes,
    fit_policy_level,
    fit_teacher,
)
from pluralign.training.member_bounds import USED, keep_near_people, training_bound
from pluralign.training.options import FinetuneOptions, FitOptions
from pluralign.training.pairs import MIN_PROMPTS, Pairs, validation_folds
from pluralign.training.stagewise import Stage, hard_votes, solve_weights, stages
from pluralign.votes.preferences import PreferenceSet

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
    tuning: FinetuneOptions | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    watch: Watch = lambda *_: None,
    **changes: Any,
) -> RewardEnsemble:
    """Learn an ensemble whose weighted votes match people's.

    Args:
        preferences: the votes. Prompts of the test side judge and are not learned from.
        options: how to learn; ``changes`` are its fields, and those of ``tuning``, by name.
        tuning: which language model to fine-tune, and how; unless it names one, features are frozen.
        folder: where unfinished work is kept and resumed from, and the ensemble is saved in the end, with the held-out
            votes unless ``keep_held_out`` is off.
        progress: called with texts encoded, or steps trained, and in all.
        watch: called as the work goes on.

    Returns:
        The ensemble; its ``facts`` hold history, held-out figures, baselines and members.

    Example:
        >>> from pluralign import town_hall
        >>> ensemble = fit(town_hall(400).preferences, k=2, encoder="none")
        >>> ensemble.k, round(float(ensemble.weights.sum()), 6)
        (2, 1.0)
    """
    of_tuning = {dial.name: changes.pop(dial.name) for dial in fields(FinetuneOptions) if dial.name in changes}
    tuning = with_changes(tuning or FinetuneOptions(), of_tuning)
    options = with_changes(options or FitOptions(), changes)
    started = time.perf_counter()
    if tuning.backbone is not None:
        return _fit_tuned(preferences, options, tuning, folder, progress, watch)
    test_rows, processes = held_out(preferences, options), this_process()
    chosen = options.encoder, options.layer, options.pooling, options.surface, options.precision
    text_features = TextFeatures(*chosen).settled(processes)
    options = replace(options, precision=text_features.precision)
    watch("encode", len(preferences.items().prompt_index))
    with _features(preferences, text_features, options, folder, processes, progress) as features:
        encoding = time.perf_counter() - started
        encoder = text_features.load()
        text_features = replace(text_features, identity=encoder.identity if encoder else "")
        inputs = {"data": preferences.fingerprint, "options": _recipe(options), "version": __version__}
        steps = Steps(folder, {**inputs, "encoder": text_features.identity}, processes)
        with threadpool_limits(1 if len(preferences) < MANY_PAIRS else None, user_api="blas"):
            ensemble, evidence = _learn(preferences, test_rows, features, text_features, options, steps, watch)
    seconds = {"seconds": time.perf_counter() - started, "seconds_encoding": encoding}
    ensemble = replace(ensemble, facts={**ensemble.facts, "processes": processes.count, **seconds})
    processes.wait()
    if folder is not None and processes.first:
        _save(ensemble, evidence, folder, options)
        steps.finish()
    return ensemble


def _recipe(options: FitOptions) -> dict[str, Any]:
    """Return the options that decide what is learned: a killed fit goes on where the others differ."""
    return {name: value for name, value in asdict(options).items() if name not in ("features", "keep_held_out")}


@contextmanager
def _features(
    preferences: PreferenceSet,
    text_features: TextFeatures,
    options: FitOptions,
    folder: str | os.PathLike[str] | None,
    processes: Processes,
    progress: Progress | None,
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield features of texts: encoded now, or those stored, mapped from a file that goes when the fit ends.

    Several processes encode a part each and then have all; of stored features each maps those that it will read.
    """
    texts = texts_of(preferences)
    if options.features is None:
        own = processes.part(len(texts))
        part = text_features(texts[own], progress)
        if processes.count == 1:
            yield part
            return
        features = np.zeros((len(texts), part.shape[1]), dtype=np.float32)
        features[own] = part
        yield processes.total(features)
        return
    if options.members == "mlp" and processes.count > 1:
        raise UsageError("a hidden layer needs all features in every process; leave out --members mlp or --features.")
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=UNFINISHED) as scratch:
        only = _texts_read(preferences, processes)
        yield stored_features(options.features, texts, text_features, Path(scratch) / "features", only)


def _texts_read(preferences: PreferenceSet, processes: Processes) -> slice:
    """Return the range of texts whose features a process reads: its own, and what they are compared with."""
    items = preferences.items()
    own = processes.part(len(items.prompt_index))
    other = items.b[(items.a >= own.start) & (items.a < own.stop)]
    return slice(min(own.start, other.min(initial=own.start)), max(own.stop, other.max(initial=0) + 1))


def _mapped_inputs(inputs: FeatureMap, features: npt.NDArray[np.float32], only: slice) -> Array:
    """Return the inputs of texts: in memory, or on disk beside features that are there."""
    if not isinstance(features, np.memmap):
        return inputs(features)
    file = Path(str(features.filename)).with_name(f"inputs-{inputs.dimension}")
    mapped = np.memmap(file, np.float32, "w+", shape=(len(features), inputs.dimension))
    inputs(features[only], mapped[only])
    return mapped


def _save(ensemble: RewardEnsemble, evidence: Evidence, folder: str | os.PathLike[str], options: FitOptions) -> None:
    if options.keep_held_out:
        save_evidence(evidence, folder)
    else:
        remove_evidence(folder)
    ensemble.save(folder)


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
    processes, items = steps.processes, preferences.items()
    only = _texts_read(preferences, processes)
    in_train = np.zeros(len(features), dtype=bool)
    in_train[items.a[~test_rows]] = in_train[items.b[~test_rows]] = True
    inputs = fit_feature_map(features, len(surface.NAMES) if options.surface else 0, in_train, processes)
    mapped = _mapped_inputs(inputs, features, only)
    everything = Pairs(mapped, items.a, items.b, preferences.prob_a, preferences.prompt_index, processes)
    if options.members == "mlp":
        hidden, bias = fit_hidden_layer(everything[~test_rows], seed=options.seed)
        inputs = replace(inputs, hidden=hidden, bias=bias)
        everything = replace(everything, inputs=_mapped_inputs(inputs, features, only))
    train, test = everything[~test_rows], everything[test_rows]
    work = _Work(train, validation_folds(train.prompt, options.seed), options, steps, watch)

    watch("floor", calibration.floor(test.prob_a))
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
    baselines = work.baselines()
    beta = work.beta(size)
    spread = np.std(scores(train.difference, theta), axis=0)
    if options.level == "vote":  # a vote does not see the scale: rewards get unit spread, for β and for people
        theta = theta / np.maximum(spread, 1e-12)

    ensemble = RewardEnsemble(LinearMembers(inputs, theta), weights, text_features, beta)
    ensemble, evidence = _judged(ensemble, preferences, test_rows, features, options, baselines, history, processes)
    facts = {
        "target": work.target if options.method == "joint" and options.level == "vote" else None,
        "bound": _bound(work, ensemble.facts, test, size),
    }
    return replace(ensemble, facts={**ensemble.facts, **without_nan(facts)}), evidence


def _judged(
    ensemble: RewardEnsemble,
    preferences: PreferenceSet,
    test_rows: Mask,
    features: npt.NDArray[np.float32],
    options: FitOptions,
    baselines: Mapping[str, Baseline],
    history: Sequence[Record],
    processes: Processes = ALONE,
) -> tuple[RewardEnsemble, Evidence]:
    """Return a fitted ensemble with its baselines, its figures on the test pairs and what is known of the fit."""
    ensemble = replace(
        ensemble,
        facts={
            "method": options.method,
            "level": options.level,
            "k": ensemble.k,
            "baseline_formulas": {name: baseline.formula for name, baseline in baselines.items()},
        },
        baselines={name: baseline.arrays for name, baseline in baselines.items()},
    )
    row_of = {text: row for row, text in enumerate(texts_of(preferences))}
    test_set = preferences[test_rows]
    test_features = _rows_of(features, np.array([row_of[text] for text in texts_of(test_set)]), processes)
    evaluation = evaluate_features(ensemble, test_set, test_features)
    learned_from = preferences.prompt_index[~test_rows]
    facts = {
        **ensemble.facts,
        "options": asdict(options),
        "target": None,
        "history": [asdict(record) for record in history],
        "bound": None,
        "baseline_seconds": {name: baseline.seconds for name, baseline in baselines.items()},
        "data": {
            "name": preferences.name,
            "fingerprint": preferences.fingerprint,
            "train_pairs": len(learned_from),
            "train_prompts": len(np.unique(learned_from)),
            "test_pairs": len(test_set),
            "test_prompts": len(np.unique(preferences.prompt_index[test_rows])),
        },
        "versions": {"pluralign": __version__, "python": platform.python_version(), "numpy": np.__version__},
        **evaluation_facts(evaluation),
    }
    evidence = Evidence(test_set, ensemble.members.rewards(test_features))
    return replace(ensemble, facts=without_nan(facts)), evidence


def _rows_of(
    features: npt.NDArray[np.float32], rows: npt.NDArray[np.int64], processes: Processes
) -> npt.NDArray[np.float32]:
    """Return some rows of features, each from the process that has it."""
    own = processes.part(len(features))
    found = np.zeros((len(rows), features.shape[1]), dtype=np.float32)
    mine = (rows >= own.start) & (rows < own.stop)
    found[mine] = features[rows[mine]]
    return processes.total(found)


# --- fine-tuned members ---------------------------------------------------------------------------------------------


def _fit_tuned(
    preferences: PreferenceSet,
    options: FitOptions,
    tuning: FinetuneOptions,
    folder: str | os.PathLike[str] | None,
    progress: Progress | None,
    watch: Watch,
) -> RewardEnsemble:
    """Learn an ensemble whose features are fine-tuned; every process of a launch calls it, the first one writes."""
    size = _tuned_size(options, folder)
    assert folder is not None  # noqa: S101 - refused above
    try:
        from pluralign.training import finetune
        from pluralign.training.pair_trainer import TextPairs
    except ImportError as error:
        raise MissingExtraError(str(error.name), "finetune", "--backbone") from None
    started = time.perf_counter()
    test_rows = held_out(preferences, options)
    texts, items = texts_of(preferences), preferences.items()
    watch("floor", calibration.floor(preferences.prob_a[test_rows]))
    validation = ~test_rows & validation_rows(preferences.prompt_index, test_rows, options.seed)
    learned = ~test_rows & ~validation
    voted = TextPairs(
        texts,
        items.a[learned],
        items.b[learned],
        np.asarray(preferences.prob_a[learned], dtype=np.float64),
        preferences.prompt_index[learned],
    )
    # How many pairs are read at once decides nothing: a killed run goes on with fewer.
    recipe = {
        key: value for key, value in asdict(tuning).items() if key not in ("micro_batch", "gradient_checkpointing")
    }
    inputs = {"data": preferences.fingerprint, "options": _recipe(options), "tuning": recipe, "version": __version__}
    steps = Steps(folder, inputs)
    assert steps.path is not None  # noqa: S101 - there is a folder
    n_prompts = len(np.unique(preferences.prompt_index[learned]))
    bound = training_bound(options.max_disagreement, n_prompts)
    tuned = finetune.fine_tune(voted, size, options, tuning, steps.path, bound=bound, progress=progress, watch=watch)
    reading = time.perf_counter()
    features = tuned.features(texts)
    outputs = as_they_are(tuned.features.outputs)
    everything = Pairs(features, items.a, items.b, preferences.prob_a, preferences.prompt_index)
    train, check, test = everything[~test_rows], everything[validation], everything[test_rows]
    theta, stages_found = _tuned_members(train, size, options.method, bound)
    baselines = _tuned_baselines(train, check, tuned.features)
    test_votes, test_ties = preferences.n_votes[test_rows], preferences.counted_ties[test_rows]
    history = []
    for weights in stages_found:
        members = theta[:, : len(weights)]
        share = hard_votes(test.difference, members) @ weights
        corrected = calibration.brier_corrected(share, test.prob_a, test_votes, test_ties)
        trained = calibration.brier(hard_votes(train.difference, members) @ weights, train.prob_a)
        tested = calibration.brier(share, test.prob_a)
        history.append(Record(len(weights), trained, tested, corrected, weights.tolist()))
        watch("record", history[-1])
    weights = stages_found[-1]
    theta = theta / np.maximum(np.std(scores(train.difference, theta), axis=0), 1e-12)
    beta = _best_beta(check, theta, weights)
    ensemble = RewardEnsemble(LinearMembers(outputs, theta), weights, tuned.features, beta)
    ensemble, evidence = _judged(ensemble, preferences, test_rows, features, options, baselines, history)
    now = time.perf_counter()
    facts = {
        "tuning": {
            **asdict(tuning),
            "steps": tuned.steps,
            "batch_size": tuned.batch_size,
            "learning_rate": tuned.learning_rate,
            "max_length": tuned.features.max_length,
            "validation_pairs": len(check),
        },
        "notes": tuned.notes,
        "processes": tuned.processes,
        "seconds_members": tuned.seconds,
        "seconds": now - started,
        "seconds_encoding": now - reading,
    }
    ensemble = replace(ensemble, facts={**ensemble.facts, **facts})
    with finetune.only_the_first() as first:
        if first:
            _save(ensemble, evidence, folder, options)
            steps.finish()
    return replace(ensemble, features=replace(tuned.features, folder=Path(folder)))


def _tuned_size(options: FitOptions, folder: str | os.PathLike[str] | None) -> int:
    """Return k, unless these options make no sense with a backbone."""
    if folder is None:
        raise UsageError("a fine-tuned ensemble needs a folder for its models.")
    frozen = [
        name
        for name in changed_options(options)
        if name in ("encoder", "layer", "pooling", "precision", "surface", "members", "features")
    ]
    if frozen:
        raise UsageError(f"{frozen[0]} is about frozen features and has no use beside --backbone.")
    if options.level == "policy":
        raise UsageError("fine-tuned members are trained for votes; leave --level out, both readings are reported.")
    if options.target != "auto":
        raise UsageError(
            "target has no use beside --backbone: fine-tuned members learn from votes, then from a reward."
        )
    if options.k == "auto":
        raise UsageError("k cannot be auto beside --backbone, as every size is a training of its own; name a number.")
    return int(options.k)


def validation_rows(prompt: npt.NDArray[np.int32], test_rows: Mask, seed: int) -> Mask:
    """Return the pairs of a tenth of the prompts that are not tested on: no model is tuned on them."""
    names = np.unique(prompt[~test_rows])
    if len(names) < MIN_PROMPTS:
        raise DataError(
            f"there are {len(names)} prompts to learn from, and {MIN_PROMPTS} are needed",
            remedy="give votes on more prompts, so that some can be held out for choices",
        )
    order = np.random.default_rng([seed, 6]).permutation(names)
    return np.isin(prompt, order[: max(1, len(names) // 10)])


def _tuned_members(train: Pairs, size: int, method: str, bound: float) -> tuple[FloatArray, list[FloatArray]]:
    """Return each member as a mixture of outputs, ``(outputs, k)``, and the weights of every size of history."""
    axes = np.eye(train.inputs.shape[1])
    difference, prob_a = train.difference, train.prob_a
    if method == "stagewise":
        return axes, [solve_weights(difference, axes[:, :j], prob_a)[0] for j in range(1, size + 1)]
    reward = axes[:, size]
    if size == 1:
        return reward[:, None], [np.ones(1)]
    near = [keep_near_people(axes[:, j], reward, difference, prob_a, bound) for j in range(size)]
    theta = np.column_stack(near)
    target = (1 - VOTE_SHARE) * sigmoid(scores(difference, reward)) + VOTE_SHARE * prob_a
    return theta, [simplex_least_squares(hard_votes(difference, theta), target)]


def _tuned_baselines(train: Pairs, check: Pairs, features: TunedFeatures) -> dict[str, Baseline]:
    """Return the single reward that was tuned beside the members, as it is, tempered, and with its opposite."""
    reward = np.eye(features.outputs)[:, features.outputs - 1 if features.method == "joint" else 0]
    z = scores(check.difference, reward)
    errors = [calibration.brier(sigmoid(z / temperature), check.prob_a) for temperature in TEMPERATURES]
    found = {
        "soft_bt": {"theta": reward, "temperature": np.array(1.0)},
        "soft_bt_temperature": {"theta": reward, "temperature": np.array(TEMPERATURES[int(np.argmin(errors))])},
        "pair": fit_pair(train, reward),
    }
    return {
        name: Baseline(BASELINES[name], {part: np.asarray(array) for part, array in arrays.items()})
        for name, arrays in found.items()
    }


def evaluation_facts(evaluation: Evaluation) -> dict[str, Any]:
    """Return the figures of an evaluation as plain values, in the words of the command line's JSON."""
    facts = asdict(evaluation)
    facts["reliability"] = {name: values.tolist() for name, values in facts["reliability"].items()}
    return facts


def _bound(work: "_Work", facts: Mapping[str, Any], test: Pairs, size: int) -> dict[str, Any] | None:
    """What keeping members near people cost: held-out Brier and worst member, with the bound and without."""
    if work.options.max_disagreement >= 1:
        return None
    theta, weights = work.unbounded(size)
    votes = hard_votes(test.difference, theta)
    worst = np.asarray(calibration.disagreement(votes, test.prob_a))[weights > USED].max()
    return {
        "max_disagreement": work.options.max_disagreement,
        "brier": facts["test"]["brier"],
        "brier_without": calibration.brier(work.predict(test, theta, weights), test.prob_a),
        "worst": max(member["disagreement"] for member in facts["members"] if member["weight"] > USED),
        "worst_without": float(worst),
    }


def _best_beta(check: Pairs, theta: FloatArray, weights: FloatArray) -> float:
    """Return the temperature at which the policy-level reading predicts validation votes best."""
    difference = scores(check.difference, theta)
    errors = [calibration.brier(calibration.policy_prob(difference, weights, beta), check.prob_a) for beta in BETAS]
    return float(BETAS[int(np.argmin(errors))])


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
        self.target  # noqa: B018 - chosen now, so that it is chosen once
        if self.options.level == "policy":
            yield from ((k, self.one(self.train, k, "joint")) for k in sizes)
            return
        free = [partial(self.unbounded, size)] if self.options.max_disagreement < 1 else []
        self._at_once([partial(self._joint_sizes, sizes), *free, self.baselines])
        yield from self._joint_sizes(sizes).items()

    def one(self, pairs: Pairs, k: int, name: str) -> tuple[FloatArray, FloatArray]:
        """Return (theta, weights) of one ensemble of k members fitted to ``pairs``."""
        if self.options.method == "stagewise":
            *_, last = self._stages(pairs, k, self._stagewise_l2(), name)
            return last.theta, last.weights
        arrays = self.steps(f"{name}-{k}", lambda: self._joint(pairs, [k], self.target)[k])
        return arrays["theta"], arrays["weights"]

    def _joint_sizes(self, sizes: Sequence[int]) -> dict[int, tuple[FloatArray, FloatArray]]:
        """Return (theta, weights) of an ensemble of each size, trained side by side."""

        def compute() -> Arrays:
            found = self._joint(self.train, sizes, self.target, RESTARTS)
            return {f"{k}/{name}": array for k, arrays in found.items() for name, array in arrays.items()}

        arrays = self.steps("joint", compute)
        return {k: (arrays[f"{k}/theta"], arrays[f"{k}/weights"]) for k in sizes}

    def unbounded(self, k: int) -> tuple[FloatArray, FloatArray]:
        """Return (theta, weights) of k members that may be as far from people as they like."""
        free = replace(self, options=replace(self.options, max_disagreement=1.0))
        return free.one(self.train, k, "unbounded")

    def baselines(self) -> dict[str, Baseline]:
        """Return every baseline, fitted to the training pairs."""

        def compute() -> Arrays:
            k = AUTO_SIZES[-1] if self.options.k == "auto" else int(self.options.k)
            report = partial(self.watch, "baseline")
            fitted = fit_baselines(self.train, self.folds, k, seed=self.options.seed, report=report)
            flat = {f"{name}/{part}": array for name, base in fitted.items() for part, array in base.arrays.items()}
            return flat | {f"{name}/seconds": np.array(base.seconds) for name, base in fitted.items()}

        arrays = self.steps("baselines", compute)
        kept = {}
        for name, formula in BASELINES.items():
            parts = {key.partition("/")[2]: array for key, array in arrays.items() if key.startswith(f"{name}/")}
            seconds = float(parts.pop("seconds"))
            kept[name] = Baseline(formula, parts, seconds)
        return kept

    def _at_once(self, fits: Sequence[Callable[[], Any]]) -> None:
        """Make fits that do not need each other, a core each; their steps keep them until they are asked for.

        Not where numpy has all cores already, nor where processes learn together: their sums are taken in order.
        """
        if self.options.level == "policy" or len(self.train) >= MANY_PAIRS or self.train.processes.count > 1:
            return
        self._teacher(self.train)  # all of them need it
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda fit: fit(), fits))

    def _joint(
        self, pairs: Pairs, sizes: Sequence[int], target: str, restarts: int = FEW_RESTARTS
    ) -> dict[int, Arrays]:
        """Return an ensemble of each size fitted to ``pairs``; a single member is the teacher."""
        teacher, seed, fits = self._teacher(pairs), self.options.seed, dict[int, JointFit]()
        if self.options.level == "policy":
            folds = self.folds if pairs is self.train else validation_folds(pairs.prompt, seed)[:1]
            fits = {k: fit_policy_level(pairs, k, folds, l2=teacher.l2, seed=seed, bound=self.bound) for k in sizes}
        elif several := [k for k in sizes if k > 1]:
            share = 1.0 if target == "votes" else VOTE_SHARE
            fits = fit_joint_sizes(
                pairs, teacher, several, seed=seed, vote_share=share, bound=self.bound, restarts=restarts
            )
        alone = {"theta": teacher.theta[:, None], "weights": np.ones(1)}
        return {k: {"theta": fits[k].theta, "weights": fits[k].weights} if k in fits else alone for k in sizes}

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
            targets = ("teacher", "votes")

            def fitted(target: str) -> Arrays:
                return self.steps(f"validation-{target}-{size}", lambda: self._joint(learn, [size], target)[size])

            self._at_once([partial(fitted, target) for target in targets])
            shares = [self.predict(check, arrays["theta"], arrays["weights"]) for arrays in map(fitted, targets)]
            return {"errors": np.array([calibration.brier(share, check.prob_a) for share in shares])}

        errors = self.steps("target", compute)["errors"] if size > 1 else [0.0, 1.0]
        return "teacher" if errors[0] <= errors[1] else "votes"

    def _validated(self, k: int) -> tuple[FloatArray, FloatArray]:
        """Return (theta, weights) fitted without the validation prompts."""
        learn, _ = self._split
        if self.options.method == "stagewise":
            return self.one(learn, k, "validation")
        arrays = self.steps(f"validation-{self.target}-{k}", lambda: self._joint(learn, [k], self.target)[k])
        return arrays["theta"], arrays["weights"]

    def beta(self, k: int) -> float:
        """Return the temperature at which the policy-level reading predicts validation votes best."""
        if self.options.level == "policy":
            return 1.0  # its members were trained at this scale
        self.watch("choose", "temperature")
        learn, check = self._split
        theta, weights = self._validated(k)
        theta = theta / np.maximum(np.std(scores(learn.difference, theta), axis=0), 1e-12)
        return _best_beta(check, theta, weights)

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
            self.target  # noqa: B018 - chosen now, so that it is chosen once
            self._at_once([partial(self._validated, k) for k in reversed(AUTO_SIZES)])
            fits = {k: self._validated(k) for k in AUTO_SIZES}
        for k, fitted in fits.items():
            errors[k] = calibration.squared_error(self.predict(check, *fitted), check.prob_a)
        best = min(errors, key=lambda k: float(errors[k].mean()))
        interval = clustered_interval(errors[best], check.prompt)
        slack = np.nan_to_num(interval.standard_error)  # NaN with one validation prompt
        return min(k for k in errors if errors[k].mean() <= interval.mean + slack)
