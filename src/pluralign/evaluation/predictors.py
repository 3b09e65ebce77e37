"""What can be evaluated: our ensembles, any transformers reward model, or a file of scores or probabilities.

Decided here: how a subject is named and found, how rows of a file are matched to pairs, and how a reward that we did
not train is read as a share of people. How well it does is measured in ``evaluation``.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import ENSEMBLE_FILE, RewardEnsemble, texts_of
from pluralign.models.classifier import WEIGHTS_KEY, model_rewards, reward_model_config
from pluralign.models.loading import model_folder
from pluralign.theory import calibration
from pluralign.votes.builder import BadRows, RowError
from pluralign.votes.formats import read_records
from pluralign.votes.layouts import Record, read_prompt, read_response
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt, PromptLike

Kind: TypeAlias = Literal["ensemble", "reward model", "scores", "probabilities"]
Source: TypeAlias = "RewardEnsemble | str | PathLike[str]"

SCORE_NAMES = ("score", "reward", "rewards")
PROB_NAMES = ("prob_hat", "prob")
LAYOUTS = (
    "{prompt, response, score} (or reward, or rewards: [k numbers]), {prompt, response_a, response_b, prob_hat} "
    "(or score_a and score_b), or prob_hat alone in the order of the pairs"
)
FILE_ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".gz")
FOLDS = 5
TEMPERATURES = np.geomspace(1 / 64, 64, 97)
"""Temperatures that are tried, in units of the typical difference of rewards."""
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_NO_PAIR_LOST = ("tie votes", "repeat votes of one annotator on one pair")


@dataclass(frozen=True, eq=False)
class Predictor:
    """Something that predicts how votes are shared, with its predictions for the pairs of one set."""

    name: str
    kind: Kind
    readings: Mapping[str, FloatArray]
    """Predicted shares preferring a, each ``(n_pairs,)``: ``vote``, ``policy`` and ``tempered``, or ``prob``."""
    level: str
    """The reading it is judged by first."""
    difference: FloatArray | None = None
    """reward_a − reward_b of each member, ``(n_pairs, k)``, where there are rewards."""
    weights: FloatArray | None = None
    """Of the members, ``(k,)``."""
    temperature: float | None = None
    """β of the policy-level reading of an ensemble, T of the tempered one of a foreign reward."""
    note: str = ""
    """What a reader should know of how it was read."""

    @property
    def k(self) -> int:
        """How many rewards it has; a file of probabilities counts as one prediction."""
        return 1 if self.weights is None else len(self.weights)

    @property
    def prob_hat(self) -> FloatArray:
        """The shares it is judged by."""
        return self.readings[self.level]

    @property
    def votes(self) -> FloatArray | None:
        """The members' votes, ``(n_pairs, k)``, where there are rewards."""
        if self.difference is None:
            return None
        return calibration.votes_from_rewards(self.difference, np.zeros_like(self.difference))


def find_predictor(name: str | PathLike[str]) -> Literal["ensemble", "model", "hub", "file"]:
    """Say what a name stands for, without loading it; a name of nothing is refused."""
    path = Path(name)
    if path.is_dir():
        if (path / ENSEMBLE_FILE).is_file():
            return "ensemble"
        reward_model_config(path)
        return "model"
    if path.is_file():
        return "file"
    if path.suffix in FILE_ENDINGS:
        raise DataError("there is no such file", file=str(path), remedy="check the path")
    if _HUB_ID.fullmatch(str(name)):
        return "hub"
    remedy = "name a folder that pluralign fit wrote, a reward model (a folder or hub id), or a file of scores"
    raise DataError("there is nothing of that name", file=str(name), remedy=remedy)


def load_predictor(
    source: Source, preferences: PreferenceSet, *, seed: int = 0, progress: Progress | None = None
) -> Predictor:
    """Return the predictions of ``source`` for the pairs of a set.

    Args:
        source: an ensemble or the folder of one, a transformers reward model (a folder or a hub id), or a file of
            scores or probabilities.
        preferences: the pairs; votes are only used to choose the temperature of foreign rewards.
        seed: of the folds in which that is chosen.
        progress: called with texts done and in all.
    """
    if isinstance(source, RewardEnsemble):
        return ensemble_predictor(source, *source.pair_rewards(preferences, progress))
    found = find_predictor(source)
    if found == "ensemble":
        ensemble = RewardEnsemble.load(source)
        return ensemble_predictor(ensemble, *ensemble.pair_rewards(preferences, progress), name=str(source))
    if found == "file":
        return read_subject(Path(source), preferences, seed=seed)
    remedy = "check the path, or the model id and the network"
    folder = Path(source) if found == "model" else model_folder(str(source), remedy=remedy)
    return _model_subject(str(source), folder, preferences, seed, progress)


def ensemble_predictor(
    ensemble: RewardEnsemble, reward_a: FloatArray, reward_b: FloatArray, name: str = "ensemble"
) -> Predictor:
    """Return an ensemble's two readings of pairs whose rewards are at hand, each ``(n_pairs, k)``."""
    difference = reward_a - reward_b
    return Predictor(
        name=name,
        kind="ensemble",
        readings={str(level): share for level, share in ensemble.readings(difference).items()},
        level=ensemble.level,
        difference=difference,
        weights=ensemble.weights,
        temperature=ensemble.temperature,
    )


def _model_subject(
    name: str, folder: Path, preferences: PreferenceSet, seed: int, progress: Progress | None
) -> Predictor:
    config = reward_model_config(folder)
    rewards = model_rewards(folder, texts_of(preferences), progress)
    if not np.isfinite(rewards).all():
        raise DataError("it gives rewards that are not finite", file=name, remedy="check the model's weights")
    items, k = preferences.items(), rewards.shape[1]
    weights, note = np.full(k, 1 / k), "" if k == 1 else f"{k} rewards, taken as members of equal weight"
    if WEIGHTS_KEY in config:
        weights, note = np.asarray(config[WEIGHTS_KEY], dtype=np.float64), f"weights from {WEIGHTS_KEY} in config.json"
        if weights.shape != (k,) or not (weights >= 0).all() or not math.isclose(weights.sum(), 1, abs_tol=1e-6):
            remedy = f"give {k} weights that are not negative and sum to 1"
            raise DataError(f"{WEIGHTS_KEY} does not fit its {k} rewards", file=str(folder), remedy=remedy)
    return reward_subject(name, "reward model", rewards[items.a] - rewards[items.b], weights, preferences, seed, note)


def reward_subject(
    name: str,
    kind: Kind,
    difference: FloatArray,
    weights: FloatArray,
    preferences: PreferenceSet,
    seed: int = 0,
    note: str = "",
) -> Predictor:
    """Return the three readings of rewards that we did not train.

    ``vote``: Σ_j α_j 1[Δr_j > 0]. ``policy``: Σ_j α_j σ(Δr_j), App. A at β = 1: how a Bradley–Terry reward is meant.
    ``tempered``: Σ_j α_j σ(Δr_j / T), see ``cross_fitted``. One reward is judged by σ(Δr), several by their votes.
    """
    votes = calibration.votes_from_rewards(difference, np.zeros_like(difference))
    readings = {
        "vote": calibration.ensemble_prob(votes, weights),
        "policy": calibration.policy_prob(difference, weights, 1.0),
    }
    temperature = None
    if len(preferences.prompts) > 1:
        readings["tempered"], temperature = cross_fitted(
            difference, weights, preferences.prob_a, preferences.prompt_index, seed
        )
    level = "policy" if len(weights) == 1 else "vote"
    return Predictor(name, kind, readings, level, difference, weights, temperature, note)


def cross_fitted(
    difference: FloatArray,
    weights: FloatArray,
    prob_a: FloatArray,
    prompt_index: npt.NDArray[np.integer[Any]],
    seed: int = 0,
) -> tuple[FloatArray, float]:
    """Shares Σ_j α_j σ(Δr_j / T) with T chosen on other prompts than those it is judged on.

    Prompts fall into five folds. For each, T minimises the Brier score on the other four,

      T_f = argmin_T mean over pairs outside f of (Σ_j α_j σ(Δr_j / T) − p)²,

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
    parts = np.array_split(np.random.default_rng([seed, 2]).permutation(prompts), min(FOLDS, len(prompts)))
    held_out = [np.isin(prompt_index, part) for part in parts]
    sums = np.empty((len(temperatures), len(parts)))
    for row, temperature in enumerate(temperatures):
        error = calibration.squared_error(calibration.policy_prob(difference, weights, temperature), prob_a)
        sums[row] = [error[mask].sum() for mask in held_out]
    chosen = temperatures[np.argmin(sums.sum(axis=1, keepdims=True) - sums, axis=0)]
    shares = np.empty(len(prob_a))
    for mask, temperature in zip(held_out, chosen, strict=True):
        shares[mask] = calibration.policy_prob(difference[mask], weights, temperature)
    return shares, float(np.median(chosen))


# --- files ----------------------------------------------------------------------------------------------------------


def read_subject(path: Path, preferences: PreferenceSet, *, seed: int = 0) -> Predictor:
    """Read scores or probabilities from a JSON Lines, CSV or Parquet file and match them to pairs by their texts.

    Rows are {prompt, response, score}, {prompt, response_a, response_b} with prob_hat or with score_a and score_b in
    either order of the pair, or prob_hat alone in the order of the pairs.
    """
    bad = BadRows(str(path), can_skip=False)
    with path.open("rb") as stream:
        records = list(read_records(stream, bad))
    if not records:
        raise DataError("there are no rows in it", file=str(path), remedy=f"give rows {LAYOUTS}")
    columns = {name for name, value in records[0][1].items() if value is not None}
    rows = _Rows(bad, records)
    score = next((name for name in SCORE_NAMES if name in columns), None)
    share = next((name for name in PROB_NAMES if name in columns), None)
    is_pair = {"response_a", "response_b"} <= columns
    if "response" in columns and score:
        rewards = rows.of_texts(score, preferences)
        items, k = preferences.items(), rewards.shape[1]
        note = "" if k == 1 else f"{k} rewards a text, taken as members of equal weight"
        weights = np.full(k, 1 / k)
        return reward_subject(
            str(path), "scores", rewards[items.a] - rewards[items.b], weights, preferences, seed, note
        )
    if is_pair and share:
        return _probabilities(path, rows.of_pairs(lambda record: _share(record, share), 1.0, preferences))
    if is_pair and {"score_a", "score_b"} <= columns:
        difference = rows.of_pairs(lambda record: _number(record, "score_a") - _number(record, "score_b"), 0.0,
                                   preferences)  # fmt: skip
        return reward_subject(str(path), "scores", difference[:, None], np.ones(1), preferences, seed)
    if share and "response" not in columns and not columns & {"response_a", "response_b"}:
        return _probabilities(path, rows.in_order(share, preferences))
    raise DataError(f"its columns are {', '.join(records[0][1])}", file=str(path), remedy=f"give rows {LAYOUTS}")


def _probabilities(path: Path, share: FloatArray) -> Predictor:
    return Predictor(str(path), "probabilities", {"prob": share}, "prob")


@dataclass(frozen=True)
class _Rows:
    """Rows of a file of scores or probabilities."""

    bad: BadRows
    records: list[tuple[int, Record]]

    def of_texts(self, score: str, preferences: PreferenceSet) -> FloatArray:
        """Return the rewards of each distinct text of a set, ``(n_items, k)``."""
        known: dict[tuple[PromptLike, str], list[float]] = {}
        for row, record in self.records:
            try:
                values = _numbers(record, score)
                text = read_prompt(record.get("prompt")), read_response(record.get("response"), "response")
                if len(values) != len(next(iter(known.values()), values)):
                    raise RowError("count", f"{score} has another length than before", "give each text as many rewards")
                _put(known, text, values)
            except RowError as error:
                self.bad.report(row, error)
        items, texts = preferences.items(), texts_of(preferences)
        missing = np.array([text not in known for text in texts])
        self._refuse(missing[items.a] | missing[items.b], preferences, "score")
        return np.array([known[text] for text in texts])

    def of_pairs(self, read: Callable[[Record], float], mirror: float, preferences: PreferenceSet) -> FloatArray:
        """Return a number for each pair, ``(n_pairs,)``; ``mirror`` less it stands for the other order of the pair."""
        known: dict[tuple[PromptLike, str, str], float] = {}
        for row, record in self.records:
            try:
                prompt = read_prompt(record.get("prompt"))
                a, b = (read_response(record.get(name), name) for name in ("response_a", "response_b"))
                value = read(record)
                _put(known, (prompt, a, b), value)
                _put(known, (prompt, b, a), mirror - value)
            except RowError as error:
                self.bad.report(row, error)
        pairs = list(zip(*_texts(preferences), strict=True))
        self._refuse(np.array([pair not in known for pair in pairs]), preferences, "row")
        return np.array([known[pair] for pair in pairs])

    def in_order(self, share: str, preferences: PreferenceSet) -> FloatArray:
        """Return the shares of rows without texts, where they can only mean the pairs in their order."""
        lost = set(preferences.dropped) - set(_NO_PAIR_LOST)
        if len(self.records) != len(preferences) or lost:
            left = " of which some were left out" if lost else ""
            raise DataError(
                f"its {len(self.records):,} rows have no texts, and there are {len(preferences):,} pairs{left}",
                file=self.bad.file,
                remedy="add prompt, response_a and response_b to each row",
            )
        values = []
        for row, record in self.records:
            try:
                values.append(_share(record, share))
            except RowError as error:
                self.bad.report(row, error)
        return np.array(values)

    def _refuse(self, missing: npt.NDArray[np.bool_], preferences: PreferenceSet, what: str) -> None:
        if not missing.any():
            return
        prompt, a, b = (texts[int(missing.argmax())] for texts in _texts(preferences))
        plain = Prompt(prompt).json
        shown = json.dumps({"prompt": plain, "response_a": a, "response_b": b}, ensure_ascii=False)
        raise DataError(
            f"{int(missing.sum()):,} of {len(missing):,} pairs have no {what} in it",
            file=self.bad.file,
            remedy=f"add what is missing, such as {shown if len(shown) <= 200 else shown[:199] + '…'}",
        )


def _texts(preferences: PreferenceSet) -> tuple[npt.NDArray[np.object_], ...]:
    return (
        preferences.prompts[preferences.prompt_index],
        preferences.responses[preferences.a_index],
        preferences.responses[preferences.b_index],
    )


def _put(known: dict[Any, Any], key: Any, value: Any) -> None:
    earlier = known.setdefault(key, value)
    if earlier is not value and not np.allclose(earlier, value, atol=1e-9):
        raise RowError("conflict", "the same texts have another value in an earlier row", "keep one of the rows")


def _numbers(record: Record, name: str) -> list[float]:
    value: Any = record.get(name)
    if isinstance(value, str):  # a CSV cell
        with suppress(ValueError):
            value = json.loads(value) if value.startswith("[") else float(value)
    values = list(value) if isinstance(value, list | tuple | np.ndarray) else [value]
    if not values or any(isinstance(x, bool) or not isinstance(x, int | float | np.number) for x in values):
        raise RowError("wrong type", f"{name} is {value!r:.40}, not a number", "write it as a number")
    if not all(map(math.isfinite, values)):
        raise RowError("not a number", f"{name} is {value!r:.40}", "give a finite number")
    return [float(x) for x in values]


def _number(record: Record, name: str) -> float:
    values = _numbers(record, name)
    if len(values) != 1:
        raise RowError("wrong type", f"{name} holds {len(values)} numbers", "give one number")
    return values[0]


def _share(record: Record, name: str) -> float:
    value = _number(record, name)
    if not 0 <= value <= 1:
        raise RowError("range", f"{name} is {value:g}, not between 0 and 1", "give a probability, not a score")
    return value
