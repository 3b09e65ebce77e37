"""Predictors by name: the folder of an ensemble, a transformers reward model, a file of scores, or personas.

This module decides which names are known, the columns of score files, and how their rows are matched to pairs.
"""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, Mask
from pluralign.core.errors import DataError
from pluralign.core.hub import HUB_ID
from pluralign.core.text import shortened
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import ENSEMBLE_FILE
from pluralign.learning.measure import Predictor, ensemble_predictor, reward_predictor
from pluralign.measuring.personas import PREFIX, Personas, find_personas, persona_predictor
from pluralign.text.classifier import UNDECIDED_KEY, WEIGHTS_KEY, model_rewards, reward_model_config
from pluralign.text.loading import model_folder
from pluralign.text.reference import with_log_probs
from pluralign.votes.builder import BadRows
from pluralign.votes.formats import read_records
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.prompts import Prompt, PromptLike
from pluralign.votes.values import Record, RowError, read_prompt, read_response

# --- Scores and probabilities of other models, read from files and matched to pairs by their texts.
SCORE_NAMES = ("score", "reward", "rewards")
PROB_NAMES = ("prob_hat", "prob")
LAYOUTS = (
    "{prompt, response, score} (or reward, or rewards: [k numbers]), {prompt, response_a, response_b, prob_hat} "
    "(or score_a and score_b), or prob_hat alone in the order of the pairs"
)


_NO_PAIR_LOST = ("tie votes", "repeat votes of one annotator on one pair")


def read_score_file(
    path: Path, preferences: PreferenceSet, *, measured: Mask | None = None, seed: int = 0
) -> Predictor:
    """Read scores or probabilities from a JSON Lines, CSV or Parquet file and match them to pairs by their texts.

    Rows are {prompt, response, score}, {prompt, response_a, response_b} with prob_hat or with score_a and score_b in
    either order of the pair, or prob_hat alone in the order of the pairs. ``measured`` is as in ``load_predictor``.
    """
    bad = BadRows(str(path), can_skip=False)
    with path.open("rb") as stream:
        records = list(read_records(stream, bad))
    if not records:
        raise DataError("it has no rows", file=str(path), remedy=f"give rows {LAYOUTS}")
    columns = {name for name, value in records[0][1].items() if value is not None}
    rows = _Rows(bad, records)
    score = next((name for name in SCORE_NAMES if name in columns), None)
    share = next((name for name in PROB_NAMES if name in columns), None)
    is_pair = {"response_a", "response_b"} <= columns
    if "response" in columns and score:
        rewards = rows.of_texts(score, preferences)
        items, k = preferences.items(), rewards.shape[1]
        note = "" if k == 1 else f"{k} rewards per text, read as members of equal weight"
        difference, weights = rewards[items.a] - rewards[items.b], np.full(k, 1 / k)
        return reward_predictor(str(path), "scores", difference, weights, preferences, seed, note)
    if is_pair and share:
        return _probabilities(path, rows.of_pairs(lambda record: _share(record, share), 1.0, preferences))
    if is_pair and {"score_a", "score_b"} <= columns:
        difference = rows.of_pairs(lambda row: _number(row, "score_a") - _number(row, "score_b"), 0.0, preferences)
        return reward_predictor(str(path), "scores", difference[:, None], np.ones(1), preferences, seed)
    if share and "response" not in columns and not columns & {"response_a", "response_b"}:
        return _probabilities(path, rows.in_order(share, preferences, measured))
    raise DataError(f"its columns are {', '.join(records[0][1])}", file=str(path), remedy=f"give rows {LAYOUTS}")


def _probabilities(path: Path, share: FloatArray) -> Predictor:
    return Predictor(str(path), "probabilities", {"prob": share}, "prob")


@dataclass(frozen=True)
class _Rows:
    """Rows of a file of scores or probabilities."""

    bad: BadRows
    records: list[tuple[int, Record]]

    def read(self, use: Callable[[Record], None]) -> None:
        """Call ``use`` for each row, and report the rows that it refuses."""
        for row, record in self.records:
            try:
                use(record)
            except RowError as error:
                self.bad.report(row, error)

    def of_texts(self, score: str, preferences: PreferenceSet) -> FloatArray:
        """Return the rewards of each distinct text, ``(n_items, k)``."""
        known: dict[tuple[PromptLike, str], list[float]] = {}

        def use(record: Record) -> None:
            values = _numbers(record, score)
            text = read_prompt(record.get("prompt")), read_response(record.get("response"), "response")
            if len(values) != len(next(iter(known.values()), values)):
                problem = f"{score} has another length than in earlier rows"
                raise RowError("count", problem, "give each text as many rewards")
            _put(known, text, values)

        self.read(use)
        items, texts = preferences.items(), texts_of(preferences)
        missing = np.array([text not in known for text in texts])
        self._refuse(missing[items.a] | missing[items.b], preferences, "score")
        return np.array([known[text] for text in texts])

    def of_pairs(self, read: Callable[[Record], float], mirror: float, preferences: PreferenceSet) -> FloatArray:
        """Return a number per pair, ``(n_pairs,)``. The reversed pair has the value ``mirror`` − number."""
        known: dict[tuple[PromptLike, str, str], float] = {}

        def use(record: Record) -> None:
            prompt = read_prompt(record.get("prompt"))
            a, b = (read_response(record.get(name), name) for name in ("response_a", "response_b"))
            value = read(record)
            _put(known, (prompt, a, b), value)
            _put(known, (prompt, b, a), mirror - value)

        self.read(use)
        pairs = list(zip(*_texts(preferences), strict=True))
        self._refuse(np.array([pair not in known for pair in pairs]), preferences, "row")
        return np.array([known[pair] for pair in pairs])

    def in_order(self, share: str, preferences: PreferenceSet, measured: Mask | None) -> FloatArray:
        """Return the shares of rows without texts, one row per pair of the data in the order of the pairs."""
        lost = set(preferences.dropped) - set(_NO_PAIR_LOST)
        pairs = len(preferences) if measured is None else len(measured)
        if len(self.records) != pairs or lost:
            left = ", after some were dropped" if lost else ""
            problem = f"its {len(self.records):,} rows have no texts, and there are {pairs:,} pairs{left}"
            raise DataError(problem, file=self.bad.file, remedy="add prompt, response_a and response_b to each row")
        values: list[float] = []
        self.read(lambda record: values.append(_share(record, share)))
        return np.array(values) if measured is None else np.array(values)[measured]

    def _refuse(self, missing: npt.NDArray[np.bool_], preferences: PreferenceSet, what: str) -> None:
        if not missing.any():
            return
        prompt, a, b = (texts[int(missing.argmax())] for texts in _texts(preferences))
        shown = json.dumps({"prompt": Prompt(prompt).json, "response_a": a, "response_b": b}, ensure_ascii=False)
        problem = f"{int(missing.sum()):,} of {len(missing):,} pairs have no {what} in it"
        remedy = f"add the missing rows, for example for {shortened(shown, 200)}"
        raise DataError(problem, file=self.bad.file, remedy=remedy)


def _texts(preferences: PreferenceSet) -> tuple[npt.NDArray[np.object_], ...]:
    prompts, responses = preferences.prompts, preferences.responses
    return prompts[preferences.prompt_index], responses[preferences.a_index], responses[preferences.b_index]


def _put(known: dict[Any, Any], key: Any, value: Any) -> None:
    earlier = known.setdefault(key, value)
    if earlier is not value and not np.allclose(earlier, value, atol=1e-9):
        raise RowError("conflict", "the same texts have a different value in an earlier row", "keep one of the rows")


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
    """Return a share; ½ where ``pluralign compare`` states none, for texts unlike those that people voted on."""
    if record.get(name) is None and record.get("unlike"):
        return 0.5
    value = _number(record, name)
    if not 0 <= value <= 1:
        raise RowError("range", f"{name} is {value:g}, not between 0 and 1", "give a probability, not a score")
    return value


Source: TypeAlias = "RewardEnsemble | Personas | str | PathLike[str]"


FILE_ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".gz")


def find_predictor(name: str | PathLike[str]) -> Literal["ensemble", "model", "hub", "file", "personas"]:
    """Return the kind of predictor of this name, without loading it. Raises DataError if the name matches nothing."""
    path = Path(name)
    if str(name).startswith(PREFIX):
        return "personas"
    if path.is_dir():
        if (path / ENSEMBLE_FILE).is_file():
            return "ensemble"
        reward_model_config(path)
        return "model"
    if path.is_file():
        return "file"
    if path.suffix in FILE_ENDINGS:
        raise DataError("there is no such file", file=str(path), remedy="check the path")
    if HUB_ID.fullmatch(str(name)):
        return "hub"
    remedy = "name a folder that pluralign fit wrote, a reward model (folder or hub id), a score file, or personas:FILE"
    raise DataError("no such folder, file or hub id", file=str(name), remedy=remedy)


def load_predictor(
    source: Source,
    preferences: PreferenceSet,
    *,
    measured: Mask | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Predictor:
    """Return the predictions of ``source`` for the pairs of a set.

    Args:
        source: an ensemble or the folder of one, a transformers reward model (a folder or a hub id), a file of
            scores or probabilities, or ``Personas``.
        preferences: the pairs. Votes serve only to choose the temperature of rewards trained elsewhere.
        measured: if ``preferences`` are a part of a data file, which pairs of it they are. For files of shares without
            texts, which have one row per pair of the data file.
        seed: of the folds for that choice.
        progress: called with the texts done and the total.
    """
    if isinstance(source, RewardEnsemble):
        return _ensemble_predictor(source, preferences, "ensemble", progress)
    if isinstance(source, Personas):
        return persona_predictor(source, preferences, seed=seed, progress=progress)
    kind = find_predictor(source)
    if kind == "personas":
        find_personas(str(source), None)  # raises UsageError: a name alone has no judge
    if kind == "ensemble":
        return _ensemble_predictor(RewardEnsemble.load(source), preferences, str(source), progress)
    if kind == "file":
        return read_score_file(Path(source), preferences, measured=measured, seed=seed)
    remedy = "check the path, or the model id and the network"
    folder = Path(source) if kind == "model" else model_folder(str(source), remedy=remedy)
    return _model_predictor(str(source), folder, preferences, seed, progress)


def _ensemble_predictor(
    ensemble: RewardEnsemble, preferences: PreferenceSet, name: str, progress: Progress | None
) -> Predictor:
    if ensemble.reference is not None:
        preferences = with_log_probs(ensemble.reference, preferences, progress)
    reward_a, reward_b = ensemble.pair_rewards(preferences, progress)
    return ensemble_predictor(ensemble, preferences, reward_a - reward_b, name)


def _model_predictor(
    name: str, folder: Path, preferences: PreferenceSet, seed: int, progress: Progress | None
) -> Predictor:
    config = reward_model_config(folder)
    rewards = model_rewards(folder, texts_of(preferences), progress)
    if not np.isfinite(rewards).all():
        raise DataError("its rewards are not finite", file=name, remedy="check the model's weights")
    items, k = preferences.items(), rewards.shape[1]
    weights, note = np.full(k, 1 / k), "" if k == 1 else f"{k} rewards, read as members of equal weight"
    if WEIGHTS_KEY in config:
        weights, note = np.asarray(config[WEIGHTS_KEY], dtype=np.float64), f"weights from {WEIGHTS_KEY} in config.json"
        if weights.shape != (k,) or not (weights >= 0).all() or not math.isclose(weights.sum(), 1, abs_tol=1e-6):
            remedy = f"give {k} weights that are not negative and sum to 1"
            raise DataError(f"{WEIGHTS_KEY} does not match its {k} rewards", file=str(folder), remedy=remedy)
    undecided = config.get(UNDECIDED_KEY, 0.0)
    if not isinstance(undecided, int | float) or not 0 <= undecided <= 1:
        raise DataError(f"{UNDECIDED_KEY} is not a share", file=str(folder), remedy="give a number from 0 to 1")
    difference = rewards[items.a] - rewards[items.b]
    return reward_predictor(name, "reward model", difference, weights, preferences, seed, note, float(undecided))
