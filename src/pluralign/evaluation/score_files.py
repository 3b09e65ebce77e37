"""Scores and probabilities of other models, read from files and matched to pairs by their texts."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, Mask
from pluralign.core.errors import DataError
from pluralign.core.text import shortened
from pluralign.evaluation.predictors import Predictor, reward_predictor
from pluralign.votes.builder import BadRows, RowError
from pluralign.votes.formats import read_records
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.prompts import Prompt, PromptLike
from pluralign.votes.values import Record, read_prompt, read_response

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
        weights = np.full(k, 1 / k)
        return reward_predictor(
            str(path), "scores", rewards[items.a] - rewards[items.b], weights, preferences, seed, note
        )
    if is_pair and share:
        return _probabilities(path, rows.of_pairs(lambda record: _share(record, share), 1.0, preferences))
    if is_pair and {"score_a", "score_b"} <= columns:
        difference = rows.of_pairs(lambda record: _number(record, "score_a") - _number(record, "score_b"), 0.0,
                                   preferences)  # fmt: skip
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

    def of_texts(self, score: str, preferences: PreferenceSet) -> FloatArray:
        """Return the rewards of each distinct text, ``(n_items, k)``."""
        known: dict[tuple[PromptLike, str], list[float]] = {}
        for row, record in self.records:
            try:
                values = _numbers(record, score)
                text = read_prompt(record.get("prompt")), read_response(record.get("response"), "response")
                if len(values) != len(next(iter(known.values()), values)):
                    raise RowError(
                        "count",
                        f"{score} has another length than in earlier rows",
                        "give each text as many rewards",
                    )
                _put(known, text, values)
            except RowError as error:
                self.bad.report(row, error)
        items, texts = preferences.items(), texts_of(preferences)
        missing = np.array([text not in known for text in texts])
        self._refuse(missing[items.a] | missing[items.b], preferences, "score")
        return np.array([known[text] for text in texts])

    def of_pairs(self, read: Callable[[Record], float], mirror: float, preferences: PreferenceSet) -> FloatArray:
        """Return a number per pair, ``(n_pairs,)``. The reversed pair has the value ``mirror`` − number."""
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

    def in_order(self, share: str, preferences: PreferenceSet, measured: Mask | None) -> FloatArray:
        """Return the shares of rows without texts, one row per pair of the data in the order of the pairs."""
        lost = set(preferences.dropped) - set(_NO_PAIR_LOST)
        pairs = len(preferences) if measured is None else len(measured)
        if len(self.records) != pairs or lost:
            left = ", after some were dropped" if lost else ""
            raise DataError(
                f"its {len(self.records):,} rows have no texts, and there are {pairs:,} pairs{left}",
                file=self.bad.file,
                remedy="add prompt, response_a and response_b to each row",
            )
        values = []
        for row, record in self.records:
            try:
                values.append(_share(record, share))
            except RowError as error:
                self.bad.report(row, error)
        return np.array(values) if measured is None else np.array(values)[measured]

    def _refuse(self, missing: npt.NDArray[np.bool_], preferences: PreferenceSet, what: str) -> None:
        if not missing.any():
            return
        prompt, a, b = (texts[int(missing.argmax())] for texts in _texts(preferences))
        plain = Prompt(prompt).json
        shown = json.dumps({"prompt": plain, "response_a": a, "response_b": b}, ensure_ascii=False)
        raise DataError(
            f"{int(missing.sum()):,} of {len(missing):,} pairs have no {what} in it",
            file=self.bad.file,
            remedy=f"add the missing rows, for example for {shortened(shown, 200)}",
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
    value = _number(record, name)
    if not 0 <= value <= 1:
        raise RowError("range", f"{name} is {value:g}, not between 0 and 1", "give a probability, not a score")
    return value
